"""Rows of a tensor as points of a plane: their two principal components, steady from one sample to the next.

In: samples. Out: places, an order for their colours, how much of the variance they show. The axes of one sample are
where the search for the next one's begins, which makes it short, and keeps a film from flickering.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..statistics import real
from ..wire import Sample
from .canvas import Numbers
from .value_scale import rounded

MOST_ROWS = 4096
TURNS, FIRST_TURNS = 3, 16  # of the search
FIRM = 1e-9  # keeps directions apart where there is no variance


class PrincipalAxes:
    """The axes of one watched value."""

    def __init__(self) -> None:
        self.reach = 0.0  # of the plane, from its middle
        self._axes: NDArray[np.float64] | None = None
        self._reaches: deque[float] = deque(maxlen=32)

    def of(self, sample: Sample) -> tuple[Numbers, Numbers, tuple[float, float]] | None:
        """Places, colours from 0 to 1, and shares of the variance; None where there are too few finite rows."""
        rows, order = rows_of(sample)
        fine = np.isfinite(rows).all(1)
        rows, order = rows[fine].astype(np.float64), order[fine]
        if len(rows) < 3 or rows.shape[1] < 2:
            return None
        with np.errstate(all="ignore"):
            size = float(np.abs(rows).max()) or 1.0
            rows = rows / size
            rows -= rows.mean(0)
        whole = float((rows**2).sum())
        axes = self._found(rows)
        places = rows @ axes
        shares = (places**2).sum(0) / whole if whole else np.zeros(2)
        places = places * size
        self._see(places)
        return places, order, (float(shares[0]), float(shares[1]))

    def _found(self, rows: Numbers) -> NDArray[np.float64]:
        """The two directions of most variance, turned as little as can be from those of before."""
        known = self._axes if self._axes is not None and len(self._axes) == rows.shape[1] else None
        axes = np.random.default_rng(0).normal(size=(rows.shape[1], 2)) if known is None else known
        for _ in range(FIRST_TURNS if known is None else TURNS):
            axes, _ = np.linalg.qr(rows.T @ (rows @ axes) + FIRM * axes)
        _, turned = np.linalg.eigh((rows @ axes).T @ (rows @ axes))
        axes = axes @ turned[:, ::-1]
        if known is not None:
            axes = axes * np.where((axes * known).sum(0) < 0, -1, 1)
        self._axes = axes
        return axes

    def _see(self, places: Numbers) -> None:
        """Keep the reach of the plane steady, too."""
        far = float(np.quantile(np.abs(places), 0.98)) * 1.3
        self._reaches.append(far if math.isfinite(far) else 0.0)
        usual = median(self._reaches)
        if usual and not self.reach / 2.1 < usual < self.reach * 1.05:
            self.reach = rounded(usual * 1.5)
        self.reach = self.reach or 1.0


def rows_of(sample: Sample) -> tuple[Numbers, Numbers]:
    """Items of the first axis as rows, or of all axes but the last if these are fewer than eight; and their order."""
    values = real(sample.values)
    shape = [one for one in sample.shape if one != 1]
    values = values.reshape(shape)
    few = shape[0] < 8 and len(shape) > 2
    rows = values.reshape(-1, shape[-1]) if few else values.reshape(shape[0], -1)
    order = np.arange(len(rows)) / max(len(rows) - 1, 1)
    step = -(-len(rows) // MOST_ROWS)
    return rows[::step], order[::step]
