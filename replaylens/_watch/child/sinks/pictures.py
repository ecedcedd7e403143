"""A picture of one sample, after those of the samples before it.

In: a sample, its numbers, a part of a canvas. Out: the canvas is drawn on: which value it is, its numbers, and between
them the kind of picture that was asked for, or that fits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..statistics import Stats
from ..wire import Sample
from .arrangement import has_places
from .canvas import Canvas, short
from .colormaps import ACCENT, FAINT, INFINITE, INK, LATE, NOT_A_NUMBER, PANEL
from .distribution_pictures import histogram, line, trend
from .lettering import width_of
from .matrix_pictures import heatmap, surface, surface2d
from .new_files import title
from .point_pictures import scatter
from .watched_value import Watched

PICTURES: dict[str, Callable[[Watched, Canvas, int], None]] = {
    "histogram": histogram,
    "heatmap": heatmap,
    "surface": surface,
    "surface2d": surface2d,
    "scatter": scatter,
    "line": line,
    "trend": trend,
}


class Painter:
    """Draws the samples of one watched value."""

    def __init__(self, kind: str = "auto", cmap: str = "auto", has_note: bool = True) -> None:
        self.value = Watched(kind, cmap)
        self._has_note = has_note  # else it is said above all pictures
        self.fault = ""  # of the drawing

    @np.errstate(all="ignore")  # values near the largest number are drawn at the ends of scales
    def draw(self, canvas: Canvas, sample: Sample, stats: Stats) -> None:
        """The picture of the next sample."""
        self.value.see(sample, stats)
        canvas.fill(PANEL)
        inner, size = inside(canvas)
        top = head(inner, sample, stats, size, sample.note if self._has_note else "")
        bottom = foot(inner, sample, stats, size) if canvas.height > 110 else inner.height
        self._picture(inner.part(0, top, inner.width, bottom), size)

    def _picture(self, canvas: Canvas, size: int) -> None:
        if min(canvas.width, canvas.height) < 24:
            return
        kind = chosen(self.value.kind, self.value.sample)
        said = nothing_to_see(self.value.sample, self.value.stats, kind)
        if said:
            canvas.text(said, canvas.width / 2, canvas.height / 2 - size, size, FAINT, 0.5)
            return
        try:
            PICTURES[kind](self.value, canvas, max(size - 2, 8))
        except Exception as error:  # one value that cannot be drawn does not end the film
            self.fault = f"cannot be drawn: {error}"
            canvas.text(self.fault, 0, canvas.height / 2, size, FAINT)


def chosen(kind: str, sample: Sample) -> str:
    """What fits the sample: the kind that was asked for, if it can be drawn."""
    many = sum(one > 1 for one in sample.shape)
    if sample.size == 1:
        return "trend"
    if kind == "auto":
        kind = "histogram" if many > 2 else "surface" if many == 2 else "line"
    if kind in ("heatmap", "surface", "surface2d") and not has_places(sample):
        return "histogram"
    if kind == "scatter" and (sample.thinned or sample.values.size != sample.size):
        return "histogram"  # of no row all is known
    if many < 2 and kind in ("surface", "surface2d"):
        return "line"
    return "histogram" if many < 2 and kind == "scatter" else kind


def text_size(canvas: Canvas) -> int:
    return int(np.clip(min(canvas.height / 24, canvas.width / 30), 9, 18))


def inside(canvas: Canvas) -> tuple[Canvas, int]:
    """A picture without its margins, and the size of its text."""
    margin = max(canvas.height // 40, 3)
    return canvas.part(margin * 1.5, margin, canvas.width - margin * 1.5, canvas.height - margin), text_size(canvas)


def mark_step(canvas: Canvas, step: int) -> None:
    """Write the step of a picture anew, where it is not that of the pictures around it."""
    inner, size = inside(canvas)
    text = f"step {step}"
    inner.part(inner.width - width_of(text, size) - 4, 0, inner.width, size * 1.3).fill(PANEL)
    inner.text(text, inner.width, 0, size, LATE, 1.0)


def head(canvas: Canvas, sample: Sample, stats: Stats, size: int, note: str) -> float:
    """Which value it is, of which step. Gives where the picture begins."""
    step = f"step {sample.step}"
    room = canvas.width - width_of(step, size) - size
    kind = width_of(sample.what, size) + size * 0.5
    kind = kind if kind < room * 0.7 else 0.0
    begin = canvas.part(0, 0, room - kind, canvas.height).text(title(sample.name), 0, 0, size, INK)
    if kind:
        canvas.text(sample.what, begin + size * 0.5, 0, size, ACCENT)
    canvas.text(step, canvas.width, 0, size, INK, 1.0)
    y, small = size * 1.35, max(size - 2, 8)
    if canvas.height > 110:
        x = warnings(canvas, stats, canvas.width, y, small)
        shape = "×".join(map(str, sample.shape)) or "one number"
        facts = [shape, sample.dtype]
        facts += [f"{sample.values.size:,} of {sample.size:,} values"] * sample.thinned
        facts += ["scaled by the loss scale"] * sample.scaled + [note] * bool(note)
        canvas.part(0, 0, x - size, canvas.height).text("   ".join(facts), 0, y, small, FAINT)
        return y + small * 1.7
    return y


def warnings(canvas: Canvas, stats: Stats, x: float, y: float, size: int) -> float:
    """How many values are not finite, right of x. Gives where that begins."""
    for count, word, colour in ((stats.infs, "Inf", INFINITE), (stats.nans, "NaN", NOT_A_NUMBER)):
        if count:
            x -= canvas.text(f"{count:,} {word}", x, y, size, colour, 1.0) + size * 0.6
    return x


def foot(canvas: Canvas, sample: Sample, stats: Stats, size: int) -> float:
    """The numbers. Gives where they begin."""
    y, small = canvas.height - size * 1.25, max(size - 2, 8)
    if sample.size == 1:
        if stats.mean is not None:
            canvas.text(f"now {stats.mean:.5g}", 0, y, small, FAINT)
    elif stats.mean is not None and stats.std is not None and stats.least is not None and stats.most is not None:
        texts = f"mean {short(stats.mean)}", f"std {short(stats.std)}", f"{short(stats.least)} … {short(stats.most)}"
        all_fit = sum(width_of(text, small) for text in texts) < canvas.width - 2 * size
        for text, place in zip(texts, (0.0, 0.5, 1.0), strict=True):
            if all_fit or place != 0.5:
                canvas.text(text, canvas.width * place, y, small, FAINT, place)
    return y - size * 0.3


def nothing_to_see(sample: Sample, stats: Stats, kind: str) -> str:
    """Why there is no picture, or nothing. In those of a matrix, what is not a number is seen at its place."""
    if not sample.size:
        return "no values"
    return "" if stats.quantiles is not None or kind in ("heatmap", "surface", "surface2d") else "no finite value"
