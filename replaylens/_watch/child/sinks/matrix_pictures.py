"""Pictures of values at their places: heat maps, surfaces from above and as landscapes.

In: a watched value whose places are known, a part of a canvas, the size of its text. Out: the canvas is drawn on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrangement import Arranged, arranged, reduced
from .canvas import Canvas, Numbers
from .colormaps import FAINT, GRID, INFINITE, MINUS_INFINITE, NOT_A_NUMBER, PANEL, Colours, coloured
from .distribution_pictures import histogram
from .surface_view import View, fineness, finer, landscape, shaded, view_of
from .value_scale import Scale
from .watched_value import Watched, visible_ticks


def heatmap(value: Watched, canvas: Canvas, size: int) -> None:
    """Each value as a cell of colour, at the place that it has in the tensor."""
    found, plot = prepared(value, canvas, size, gap=1)
    if found is None:
        histogram(value, canvas, size)
        return
    height, width = fitting(found.shape, plot.height, plot.width)
    plot.put(cells(value, found, height, width), (plot.width - width) // 2, (plot.height - height) // 2)
    colour_bar(value, canvas, size)


def surface2d(value: Watched, canvas: Canvas, size: int) -> None:
    """The surface from above: smooth colours, lit from the left, with its level lines."""
    found, plot = prepared(value, canvas, size, gap=0)
    if found is None:
        histogram(value, canvas, size)
        return
    height, width = fitting(found.shape, plot.height, plot.width)
    small = reduced(found.matrix, min(height, 240), min(width, 240), value.scale.middle)
    heights = finer(level(value.scale, small), height, width)
    pixels = shaded(heights, coloured(heights, value.cmap), min(small.shape) * 0.5 + 6)
    levels = np.floor(heights * 10)
    edges = (np.diff(levels, axis=0, prepend=levels[:1]) != 0) | (np.diff(levels, axis=1, prepend=levels[:, :1]) != 0)
    pixels[edges] = (pixels[edges] * 0.55).astype(np.uint8)
    mark_cells(pixels, enlarged(small, height, width))
    plot.put(pixels, (plot.width - width) // 2, (plot.height - height) // 2)
    colour_bar(value, canvas, size)


def surface(value: Watched, canvas: Canvas, size: int) -> None:
    """The matrix as a landscape."""
    found = arranged(value.sample, gap=0)
    if found is None:
        histogram(value, canvas, size)
        return
    left = size * 4
    plot = canvas.part(left, size * 0.5, canvas.width, canvas.height - size * 1.2)
    fine = fineness(plot.width)
    small = reduced(found.matrix, fine // 2, fine // 2, value.scale.middle)
    heights, colours = terrain(value, small, fine)
    view = view_of(found.shape, plot.width, plot.height)
    box(value, plot, canvas, view, size, left)
    plot.lay(*landscape(heights, colours, view, plot.width, plot.height))
    frame(plot, view)
    sides(canvas, view, found.shape, size, left)


def terrain(value: Watched, small: Numbers, fine: int) -> tuple[Numbers, Colours]:
    """Heights and colours of many more points than the matrix has; its own rows and columns are drawn as a net. What is
    not a number stands out of it as a post.
    """
    heights = finer(level(value.scale, small), fine, fine)
    colours = shaded(heights, coloured(heights, value.cmap), fine * 0.55)
    if max(small.shape) <= fine // 5:
        net(colours, small.shape)
    if not np.isfinite(small).all():
        blocks = enlarged(small, fine, fine)
        mark_cells(colours, blocks)
        heights[np.isnan(blocks) | (blocks == np.inf)] = 1.0
        heights[blocks == -np.inf] = 0.0
    return heights, colours


def net(colours: Colours, shape: tuple[int, ...]) -> None:
    """Darker lines through the values of the matrix."""
    for axis, count in enumerate(shape[:2]):
        if count > 1:
            places = np.round(np.linspace(0, colours.shape[axis] - 1, count)).astype(int)
            part = colours[places] if axis == 0 else colours[:, places]
            faded = (part * 0.72).astype(np.uint8)
            if axis == 0:
                colours[places] = faded
            else:
                colours[:, places] = faded


def box(value: Watched, plot: Canvas, outer: Canvas, view: View, size: int, left: float) -> None:
    """The back of the box around a landscape, with the ticks of the scale."""
    a, b = view.across, view.along
    ticks = visible_ticks(value.scale, view.scale * 0.5, size * 1.2)
    for height, _ in [*ticks, (0.0, ""), (1.0, "")]:
        for one, other in (((-a, b), (a, b)), ((a, b), (a, -b))):
            plot.line(*view.place(*one, height), *view.place(*other, height), GRID, 0.9)
    for corner in ((-a, b), (a, b), (a, -b)):
        plot.line(*view.place(*corner, 0), *view.place(*corner, 1), GRID)
    for height, text in ticks:
        x, y = view.place(-a, b, height)
        outer.text(text, left + x - size * 0.4, y - size * 0.1, size, FAINT, 1.0)


def frame(plot: Canvas, view: View) -> None:
    """The front edges of the ground, over the landscape."""
    a, b = view.across, view.along
    for one, other in (((-a, -b), (a, -b)), ((-a, -b), (-a, b))):
        plot.line(*view.place(*one, 0), *view.place(*other, 0), FAINT, 0.7)


def sides(canvas: Canvas, view: View, shape: tuple[int, ...], size: int, left: float) -> None:
    """How many rows and columns there are, at the front edges."""
    a, b = view.across, view.along
    x, y = view.place(0, -b, 0)
    canvas.text(f"{shape[1]} columns", left + x + size, y + size * 0.5, size, FAINT)
    x, y = view.place(-a, 0, 0)
    canvas.text(f"{shape[0]} rows", left + x - size, y + size * 0.5, size, FAINT, 1.0)


def prepared(value: Watched, canvas: Canvas, size: int, gap: int) -> tuple[Arranged | None, Canvas]:
    """The values as a matrix, and the place for its picture, beside the bar of colours."""
    found = arranged(value.sample, gap)
    bottom = canvas.height
    if found is not None and found.said:
        bottom -= round(size * 1.4)
        canvas.text(found.said, 0, canvas.height - size * 1.2, size, FAINT)
    return found, canvas.part(0, 0, canvas.width - bar_width(size), bottom)


def bar_width(size: int) -> int:
    return size * 6


def colour_bar(value: Watched, canvas: Canvas, size: int) -> None:
    """Which colour is which value, at the right."""
    left = canvas.width - bar_width(size) + size
    bar = canvas.part(left, size * 0.5, left + size, canvas.height - size)
    shares = 1 - np.arange(bar.height) / max(bar.height - 1, 1)
    bar.pixels[:] = coloured(shares, value.cmap)[:, None]
    for place, text in visible_ticks(value.scale, bar.height, size * 1.3):
        canvas.text(text, left + size * 1.4, size * 0.5 + (1 - place) * bar.height - size * 0.6, size, FAINT)


def fitting(shape: tuple[int, ...], height: int, width: int) -> tuple[int, int]:
    """The size of a picture with square cells; a very long one is stretched to a third of its length."""
    ratio = min(max(shape[0] / shape[1], 1 / 3), 3.0)
    return max(int(min(height, width * ratio)), 1), max(int(min(width, height / ratio)), 1)


def cells(value: Watched, found: Arranged, height: int, width: int) -> Colours:
    """The matrix as pixels."""
    matrix = found.matrix
    if found.empty is not None and (matrix.shape[0] > height or matrix.shape[1] > width):
        matrix = np.where(found.empty, value.scale.middle, matrix)
    small = reduced(matrix, height, width, value.scale.middle)
    pixels = coloured(level(value.scale, small), value.cmap)
    mark_cells(pixels, small)
    if found.empty is not None and small.shape == found.empty.shape:
        pixels[found.empty] = PANEL
    return enlarged(pixels, height, width)


def enlarged(matrix: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Each value as a block."""
    rows, columns = (np.arange(new) * old // new for new, old in zip((height, width), matrix.shape, strict=False))
    return matrix[rows[:, None], columns]


def level(scale: Scale, matrix: Numbers) -> NDArray[np.float32]:
    """Positions of values; what is not finite lies on the middle, or the ground."""
    ground = 0.5 if scale.two_sided else 0.0
    return np.where(np.isfinite(matrix), scale.of(matrix), ground).astype(np.float32)


def mark_cells(pixels: Colours, matrix: Numbers) -> None:
    """Give what is not finite the colours that nothing else has."""
    if not np.isfinite(matrix).all():
        pixels[np.isnan(matrix)] = NOT_A_NUMBER
        pixels[matrix == np.inf] = INFINITE
        pixels[matrix == -np.inf] = MINUS_INFINITE
