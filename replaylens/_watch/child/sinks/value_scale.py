"""From values to positions between 0 and 1, such that pictures of one film can be compared and none is flat.

In: the numbers of one sample after the other. Out: positions and labelled ticks. Values are measured in spreads of the
usual sample: the median of those of late, rounded, so that the scale seldom moves and one bad sample does not move
it. As far as a spread they lie evenly, beyond it logarithmically: an explosion is seen, and so is what comes after it.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..statistics import LARGEST, Stats
from .canvas import Numbers, short

NEAR, FAR = 2.0, 5.0  # units from the middle to either end: for values within bounds, and for others
TOLERANCE = 2.2  # how far the usual spread may go from the unit
MEMORY = 48  # samples


class Scale:
    """The scale of one watched value."""

    def __init__(self) -> None:
        self.unit = 0.0
        self.middle = 0.0
        self.signed = False
        self.reach = FAR
        self._spreads: deque[float] = deque(maxlen=MEMORY)
        self._nearest: deque[float] = deque(maxlen=MEMORY)
        self._extremes: deque[float] = deque(maxlen=MEMORY)

    def see(self, stats: Stats) -> None:
        """Take a sample into account."""
        if stats.quantiles is None or stats.least is None or stats.most is None:
            return
        low, _, usual, _, high = stats.quantiles
        around_zero = low <= 0 <= high
        spread = max(stats.spread, high / 4 - low / 4, abs(usual) / 3 if around_zero else 0.0)
        self._spreads.append(spread or abs(usual))
        self._nearest.append(0.0 if around_zero else min(low, high, key=abs))
        self.signed = self.signed or low < 0 or -stats.least > stats.most / 4
        spread = median(self._spreads)
        if spread and not self.unit / TOLERANCE < spread < self.unit * TOLERANCE:
            self.unit = rounded(spread)
        self._move(usual)
        self._extremes.append(max(stats.most - self.middle, self.middle - stats.least))
        far = median(self._extremes) / (self.unit or 1.0)
        if far > NEAR * 1.05 or far < NEAR * 0.8:
            self.reach = FAR if far > NEAR else NEAR

    def _move(self, usual: float) -> None:
        """Zero is the middle, unless nearly all values lie far from it."""
        is_far = abs(median(self._nearest)) > 4 * self.unit
        if not is_far:
            self.middle = 0.0
        elif self.unit and abs(usual - self.middle) > 3 * self.unit:
            self.middle = round(usual / self.unit) * self.unit

    @property
    def two_sided(self) -> bool:
        """Whether the middle is at 0.5 (else the least value, zero, is at 0)."""
        return self.signed or self.middle != 0

    def of(self, values: Numbers) -> Numbers:
        """Positions from 0 to 1; what lies beyond the ends is put there, and NaN stays NaN."""
        with np.errstate(all="ignore"):
            far = np.arcsinh((np.asarray(values) - self.middle) / (self.unit or 1.0)) / math.asinh(self.reach)
        return np.clip((far + 1) / 2 if self.two_sided else far, 0, 1)

    def values(self, positions: Numbers) -> NDArray[np.float64]:
        """The values at positions. The ends of the scale stand for all beyond them."""
        far = np.asarray(positions, np.float64)
        far = far * 2 - 1 if self.two_sided else far
        return np.sinh(far * math.asinh(self.reach)) * (self.unit or 1.0) + self.middle

    def ticks(self) -> list[tuple[float, str]]:
        """Positions with their values as text."""
        above = [1, 2, 5] if self.reach == FAR else [0.5, 1, 2]
        steps = [*(-step for step in reversed(above) if self.two_sided), 0, *above]
        values = [self.middle + step * (self.unit or 1.0) for step in steps]
        return [(float(self.of(np.array(value))), short(value)) for value in values if abs(value) <= LARGEST]


class EvenScale:
    """An even scale of the finite ones of some numbers. Few that lie far out are put at its ends."""

    def __init__(self, numbers: Numbers) -> None:
        fine = numbers[np.isfinite(numbers)]
        least, low, high, most = np.quantile(fine, [0, 0.05, 0.95, 1]) if fine.size else (0.0, 0.0, 1.0, 1.0)
        room = 3 * (high - low) or abs(high) / 10 or 1.0
        self._low, self._high = max(least, low - room), min(most, high + room)
        if not self._low < self._high:
            self._low, self._high = self._low - room, self._high + room

    def of(self, values: Numbers) -> Numbers:
        """Positions from 0 to 1."""
        return np.clip((values - self._low) / (self._high - self._low), 0, 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Positions with their values as text: even ones, with the digits that they need."""
        unit = rounded((self._high - self._low) / 4)
        digits = max(0, -math.floor(math.log10(unit))) if 0 < unit < 1e5 else 0
        first, last = math.ceil(self._low / unit), math.floor(self._high / unit)
        values = [number * unit for number in range(first, min(last, first + 12) + 1)]
        large = max(map(abs, values), default=0) >= 1e5 or digits > 5
        texts = [short(value) if large else f"{value:.{digits}f}" for value in values]
        return [(float(self.of(np.array(value))), text) for value, text in zip(values, texts, strict=True)]


def rounded(number: float) -> float:
    """The nearest of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(number))
    return min((1, 2, 5, 10), key=lambda one: abs(math.log(number / power / one))) * power if power else number
