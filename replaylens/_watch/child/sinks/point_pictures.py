"""Rows of a tensor as points of a plane.

In: a watched value, a part of a canvas, the size of its text. Out: the canvas is drawn on.
"""

from __future__ import annotations

import numpy as np

from .canvas import Canvas, Numbers, short
from .colormaps import BACKGROUND, FAINT, GRID, Colours, lit
from .distribution_pictures import histogram
from .watched_value import Watched


def scatter(value: Watched, canvas: Canvas, size: int) -> None:
    """Rows of the tensor as points, by their two principal components; their colours tell their order."""
    points = value.axes.of(value.sample)
    if points is None:
        histogram(value, canvas, size)
        return
    places, order, explained = points
    plot = canvas.part(0, 0, canvas.width, canvas.height - size * 1.5)
    plot.fill(BACKGROUND)
    middle = plot.width / 2, plot.height / 2
    plot.line(middle[0], 0, middle[0], plot.height, GRID)
    plot.line(0, middle[1], plot.width, middle[1], GRID)
    reach = value.axes.reach
    xs, ys = (c + place / reach * c * 0.92 for c, place in zip(middle, (places[:, 0], -places[:, 1]), strict=True))
    colours = lit("turbo" if value.cmap == "viridis" else value.cmap)
    discs(plot, xs, ys, colours[(order * (len(colours) - 1)).astype(int)], 1 + size / 9)
    canvas.text(
        f"{len(order):,} rows   principal components {explained[0]:.0%}, {explained[1]:.0%}   ±{short(reach)}",
        canvas.width / 2, canvas.height - size * 1.2, size, FAINT, 0.5,
    )  # fmt: skip


def discs(plot: Canvas, xs: Numbers, ys: Numbers, colours: Colours, radius: float) -> None:
    """Smooth points."""
    xs, ys = (np.clip(one, -1e4, 1e4) for one in (xs, ys))
    reach = int(radius) + 1
    left, top = np.floor(xs).astype(int), np.floor(ys).astype(int)
    for down in range(-reach, reach + 2):
        for right in range(-reach, reach + 2):
            far = np.hypot(left + right - xs, top + down - ys)
            plot.dots(left + right, top + down, np.clip(radius + 0.5 - far, 0, 1) * 0.85, colours)
