"""Pictures of values by their size or in their order: bars, strips of the samples before, curves.

In: a watched value, a part of a canvas, the size of its text. Out: the canvas is drawn on.
"""

from __future__ import annotations

import numpy as np

from ..statistics import Histogram, real
from .canvas import Canvas, Numbers
from .colormaps import ACCENT, BACKGROUND, FAINT, GRID, INFINITE, MINUS_INFINITE, NOT_A_NUMBER, coloured
from .lettering import width_of
from .value_scale import EvenScale, Scale
from .watched_value import Watched, visible_ticks

FIRST = 24  # samples fill a strip; with more, its rows become narrower
FEW = 1e-12


def histogram(value: Watched, canvas: Canvas, size: int) -> None:
    """Bars of the distribution, and below them those of the samples before as rows of colour, the newest at the top."""
    wide = canvas.part(size * 4, 0, canvas.width - size * 0.5, canvas.height)
    ground = round(canvas.height * 0.62)
    strip_top = ground + size * 1.7
    bars(value, wide.part(0, size * 0.6, wide.width, ground), canvas, size)
    for place, text in visible_ticks(value.scale, wide.width, room_for(value.scale, size)):
        wide.text(text, place * wide.width, ground + size * 0.25, size, FAINT, 0.5)
    waterfall(value, wide.part(0, strip_top, wide.width, canvas.height))
    canvas.text("before", 0, strip_top, size, FAINT)


def room_for(scale: Scale, size: int) -> float:
    """How far ticks must lie apart for their texts to stand side by side; those at the ends are moved inwards."""
    return 1.5 * max(width_of(text, size) for _, text in scale.ticks()) + size * 0.4


def bars(value: Watched, canvas: Canvas, outer: Canvas, size: int) -> None:
    """Shares of the values, as roots: a layer of which nine tenths are zero still shows the others."""
    count = int(np.clip(canvas.width // 6, 12, 96))
    shares = rebinned(value.stats.histogram, value.scale, count)
    top = top_share(shares)
    for share in (0.01, 0.1, 0.25, 0.5, 1.0):
        y = canvas.height * (1 - (share / top) ** 0.5)
        if share <= top and (share * 4 > top):
            canvas.line(0, y, canvas.width, y, GRID)
            outer.text(f"{share:.0%}", size * 3.6, y, size, FAINT, 1.0)
    places = np.arange(canvas.width) * count / canvas.width
    heights = np.sqrt(shares / top)[places.astype(int)] * canvas.height
    heights[places % 1 < count / canvas.width] = 0  # a gap between bars
    colours = coloured((np.arange(count) + 0.5) / count, value.cmap)[places.astype(int)]
    lit = (colours * 0.75 + 60).astype(np.uint8)
    rows = np.arange(canvas.height)[:, None]
    cover = np.clip(rows + 1 - (canvas.height - heights), 0, 1)
    canvas.lay(np.broadcast_to(lit, canvas.pixels.shape), cover)
    canvas.line(0, canvas.height - 1, canvas.width, canvas.height - 1, GRID)


def top_share(shares: Numbers) -> float:
    """The share at the top of the axis: one of a few, so that it seldom changes."""
    largest = float(shares.max(initial=FEW))
    return next((one for one in (0.02, 0.05, 0.1, 0.2, 0.5) if largest <= one), 1.0)


def rebinned(histogram: Histogram | None, scale: Scale, count: int) -> Numbers:
    """The share of values in each of `count` even stretches of the scale; its ends take what lies beyond."""
    if histogram is None:
        return np.zeros(count)
    edges, counts = np.array(histogram.edges), np.array(histogram.counts)
    below = np.concatenate([[0], np.cumsum(counts)])
    wanted = scale.values(np.linspace(0, 1, count + 1))
    reached = np.interp(wanted, edges, below, left=0, right=below[-1])
    reached[0], reached[-1] = 0, below[-1]
    return np.diff(reached) / max(below[-1], 1)


def waterfall(value: Watched, canvas: Canvas) -> None:
    """The distributions of the samples so far, the newest at the top. Where none was finite, the row says so."""
    if canvas.height < 4 or not canvas.width:
        return
    shown = list(value.past)[::-1][: canvas.height]
    columns = min(canvas.width, 96)
    shares = np.array([rebinned(one, value.scale, columns) for one in shown])
    light = np.sqrt(shares / np.maximum(shares.max(1, keepdims=True), FEW))
    colours = coloured(light, "inferno" if value.cmap != "inferno" else "viridis")
    colours[[one is None for one in shown]] = NOT_A_NUMBER
    wide = np.arange(canvas.width) * columns // canvas.width
    canvas.fill(BACKGROUND)
    tall = np.arange(canvas.height) * max(len(shown), FIRST) // canvas.height
    canvas.put(colours[tall[tall < len(shown)][:, None], wide])


def line(value: Watched, canvas: Canvas, size: int) -> None:
    """The values in their order; where several share a column of pixels, from the least to the greatest of them."""
    values = real(value.sample.values).ravel()
    wide = canvas.part(size * 4.4, 0, canvas.width - size * 0.5, canvas.height)
    ground = round(canvas.height * 0.66)
    plot = wide.part(0, size * 0.6, wide.width, ground)
    grid(value.scale, plot, canvas, size, size * 0.6)
    graph(value.scale, plot, values)
    for place, text in ((0.0, "0"), (1.0, f"{value.sample.size - 1:,}")):
        wide.text(text, place * wide.width, ground + size * 0.2, size, FAINT, place)
    strip(value, canvas.part(size * 4.4, ground + size * 1.8, canvas.width - size * 0.5, canvas.height), canvas, size)


def strip(value: Watched, canvas: Canvas, outer: Canvas, size: int) -> None:
    """The distributions so far as rows of colour over an axis of values."""
    waterfall(value, canvas.part(0, 0, canvas.width, canvas.height - size * 1.5))
    for place, text in visible_ticks(value.scale, canvas.width, room_for(value.scale, size)):
        canvas.text(text, place * canvas.width, canvas.height - size * 1.25, size, FAINT, 0.5)
    outer.text("values", 0, outer.height - canvas.height, size, FAINT)


def trend(value: Watched, canvas: Canvas, size: int) -> None:
    """A single number over the steps so far."""
    steps, values = np.array(value.single).T
    scale = EvenScale(values)
    plot = canvas.part(size * 5, size * 0.6, canvas.width - size * 0.5, canvas.height - size * 1.5)
    grid(scale, plot, canvas, size, size * 0.6)
    graph(scale, plot, values, (steps - steps[0]) / max(steps[-1] - steps[0], 1))
    low = canvas.height - size * 1.2
    canvas.text(f"step {steps[0]:.0f}", size * 5, low, size, FAINT)
    canvas.text(f"{steps[-1]:.0f}", canvas.width - size * 0.5, low, size, FAINT, 1.0)


def grid(scale: Scale | EvenScale, plot: Canvas, outer: Canvas, size: int, top: float) -> None:
    """Horizontal lines at the ticks of the scale, with their values at the left of the plot."""
    plot.fill(BACKGROUND)
    for place, text in visible_ticks(scale, plot.height, size * 1.3):
        y = (1 - place) * (plot.height - 1)
        plot.line(0, y, plot.width, y, GRID, 0.8)
        outer.text(text, size * 4, top + y - size * 0.6, size, FAINT, 1.0)


def graph(scale: Scale | EvenScale, plot: Canvas, values: Numbers, places: Numbers | None = None) -> None:
    """A curve through the values, and marks where they are not finite. Places are from 0 to 1; None: even ones."""
    if not plot.width or not plot.height:
        return
    if places is None:
        places = np.arange(values.size) / max(values.size - 1, 1)
    finite = np.where(np.isfinite(values), values, np.nan)
    middle = (plot.height - 3) * (1 - scale.of(finite)) + 1
    ys = np.interp(np.arange(plot.width) / max(plot.width - 1, 1), places, middle)
    if values.size > plot.width:
        columns, tops, bottoms = (places * (plot.width - 1)).astype(int), ys.copy(), ys.copy()
        np.fmin.at(tops, columns, middle)
        np.fmax.at(bottoms, columns, middle)
        plot.columns(tops - 0.8, bottoms + 0.8, ACCENT)
    else:
        plot.curve(ys, ACCENT)
    marks(plot, values, places)


def marks(plot: Canvas, values: Numbers, places: Numbers) -> None:
    """Where values are not finite: NaN over the whole height, infinities at their end."""
    wide = max(2, min(plot.width // max(values.size, 1), 6))
    for found, top, bottom, colour in (
        (np.isnan(values), 0.0, 1.0, NOT_A_NUMBER),
        (values == np.inf, 0.0, 0.12, INFINITE),
        (values == -np.inf, 0.88, 1.0, MINUS_INFINITE),
    ):
        if found.any():
            columns = (places[found] * max(plot.width - wide, 0)).astype(int)
            hit = np.zeros(plot.width + wide, bool)
            for shift in range(wide):
                hit[columns + shift] = True
            hit = hit[: plot.width]
            high, low = (np.where(hit, plot.height * one, np.nan) for one in (top, bottom))
            plot.columns(high, low, colour, 0.85)
