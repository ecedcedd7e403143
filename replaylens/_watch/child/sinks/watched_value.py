"""What is known of one watched value while its pictures are drawn: the newest sample, and what came before it."""

from __future__ import annotations

from collections import deque

from ..statistics import Histogram, Stats, real
from ..wire import Sample
from .principal_axes import PrincipalAxes
from .value_scale import EvenScale, Scale

PAST = 96  # samples
MOST_SINGLE = 1 << 14


class Watched:
    """A watched value: its scale, its axes, its past."""

    sample: Sample
    stats: Stats

    def __init__(self, kind: str = "auto", cmap: str = "auto") -> None:
        self.kind, self._cmap = kind, cmap
        self.scale = Scale()
        self.axes = PrincipalAxes()
        self.past: deque[Histogram | None] = deque(maxlen=PAST)
        self.single: deque[tuple[int, float]] = deque(maxlen=MOST_SINGLE)  # of one number: steps and values

    @property
    def cmap(self) -> str:
        """Two colours around zero for flat pictures of signed values."""
        if self._cmap != "auto":
            return self._cmap
        return "coolwarm" if self.scale.two_sided and self.kind == "heatmap" else "viridis"

    def see(self, sample: Sample, stats: Stats) -> None:
        """The next sample."""
        self.sample, self.stats = sample, stats
        self.scale.see(stats)
        self.past.append(stats.histogram)
        if sample.size == 1 and sample.values.size:
            self.single.append((sample.step, float(real(sample.values).ravel()[0])))


def visible_ticks(scale: Scale | EvenScale, length: float, least: float) -> list[tuple[float, str]]:
    """Ticks that lie so many pixels apart; the middle one and the ends come first."""
    ticks = scale.ticks()
    chosen: list[tuple[float, str]] = []
    order = sorted(range(len(ticks)), key=lambda one: (min(one, len(ticks) - 1 - one, abs(one - len(ticks) // 2)), one))
    for one in order:
        if all(abs(ticks[one][0] - other) * length >= least for other, _ in chosen):
            chosen.append(ticks[one])
    return sorted(chosen)
