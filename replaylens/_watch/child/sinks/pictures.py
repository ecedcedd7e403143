"""A picture of one sample, after those of the samples before it.

In: a sample, its numbers, a part of a canvas. Out: the canvas is drawn on. A Painter belongs to one watched value and
keeps its scale and its past; the kinds of pictures are functions of a Painter and a canvas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..statistics import Histogram, Stats, real
from ..wire import Sample
from .arrangement import Arranged, arranged, reduced
from .canvas import Canvas, Numbers, short
from .colormaps import (
    ACCENT,
    BACKGROUND,
    FAINT,
    GRID,
    INFINITE,
    INK,
    MINUS_INFINITE,
    NOT_A_NUMBER,
    PANEL,
    Colours,
    coloured,
)
from .lettering import width_of
from .new_files import title
from .principal_axes import PrincipalAxes
from .surface_view import View, fineness, finer, landscape, shaded, view_of
from .value_scale import Scale

PAST = 96  # samples
FIRST = 24  # of them fill a strip; then the rows become narrower
FEW = 1e-12


class Painter:
    """Draws the samples of one watched value."""

    def __init__(self, kind: str = "auto", cmap: str = "auto") -> None:
        self.kind, self._cmap = kind, cmap
        self.scale = Scale()
        self.axes = PrincipalAxes()
        self.past: deque[Histogram | None] = deque(maxlen=PAST)
        self.single: deque[float] = deque(maxlen=PAST)
        self.fault = ""  # of the drawing
        self.sample: Sample
        self.stats: Stats

    @property
    def cmap(self) -> str:
        """Two colours around zero for flat pictures of signed values."""
        if self._cmap != "auto":
            return self._cmap
        return "coolwarm" if self.scale.two_sided and self.kind == "heatmap" else "viridis"

    @np.errstate(all="ignore")  # values near the largest number are drawn at the ends of scales
    def draw(self, canvas: Canvas, sample: Sample, stats: Stats) -> None:
        """The picture of the next sample."""
        self.sample, self.stats = sample, stats
        self.scale.see(stats)
        self.past.append(stats.histogram)
        if sample.size == 1 and sample.values.size:
            self.single.append(float(real(sample.values).ravel()[0]))
        canvas.fill(PANEL)
        margin, size = max(canvas.height // 40, 3), text_size(canvas)
        inner = canvas.part(margin * 1.5, margin, canvas.width - margin * 1.5, canvas.height - margin)
        top = head(inner, self, size)
        bottom = foot(inner, stats, size) if canvas.height > 110 else inner.height
        self._picture(inner.part(0, top, inner.width, bottom), size)

    def _picture(self, canvas: Canvas, size: int) -> None:
        if min(canvas.width, canvas.height) < 24:
            return
        kind = self._chosen()
        said = nothing_to_see(self.sample, self.stats, kind)
        if said:
            canvas.text(said, canvas.width / 2, canvas.height / 2 - size, size, FAINT, 0.5)
            return
        try:
            PICTURES[kind](self, canvas, max(size - 2, 8))
        except Exception as error:  # one value that cannot be drawn does not end the film
            self.fault = f"cannot be drawn: {error}"
            canvas.text(self.fault, 0, canvas.height / 2, size, FAINT)

    def _chosen(self) -> str:
        """What fits the sample: the kind that was asked for, if it can be drawn."""
        sample = self.sample
        many = sum(one > 1 for one in sample.shape)
        flat = sample.thinned or sample.values.size != sample.size
        if sample.size == 1:
            return "trend"
        kind = self.kind
        if kind == "auto":
            kind = "histogram" if many > 2 else "surface" if many == 2 else "line"
        if kind in ("heatmap", "surface", "surface2d") and flat:
            return "histogram"
        if kind in ("surface", "surface2d") and many < 2:
            return "line"
        if kind == "scatter" and (flat or many < 2):
            return "histogram"
        return kind


def text_size(canvas: Canvas) -> int:
    return int(np.clip(min(canvas.height / 24, canvas.width / 30), 9, 18))


def head(canvas: Canvas, painter: Painter, size: int) -> float:
    """Which value it is, of which step. Gives where the picture begins."""
    sample, stats = painter.sample, painter.stats
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
        facts += ["scaled by the loss scale"] * sample.scaled + [sample.note] * bool(sample.note)
        canvas.part(0, 0, x - size, canvas.height).text("   ".join(facts), 0, y, small, FAINT)
        return y + small * 1.7
    return y


def warnings(canvas: Canvas, stats: Stats, x: float, y: float, size: int) -> float:
    """How many values are not finite, right of x. Gives where that begins."""
    for count, word, colour in ((stats.infs, "Inf", INFINITE), (stats.nans, "NaN", NOT_A_NUMBER)):
        if count:
            x -= canvas.text(f"{count:,} {word}", x, y, size, colour, 1.0) + size * 0.6
    return x


def foot(canvas: Canvas, stats: Stats, size: int) -> float:
    """The numbers. Gives where they begin."""
    y, small = canvas.height - size * 1.25, max(size - 2, 8)
    if stats.mean is not None and stats.std is not None and stats.least is not None and stats.most is not None:
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


# -- the kinds --------------------------------------------------------------------------------------------------------


def histogram(painter: Painter, canvas: Canvas, size: int) -> None:
    """Bars of the distribution, and below them those of the samples before as rows of colour, the newest at the top."""
    wide = canvas.part(size * 4, 0, canvas.width - size * 0.5, canvas.height)
    ground = round(canvas.height * 0.62)
    strip_top = ground + size * 1.7
    bars(painter, wide.part(0, size * 0.6, wide.width, ground), canvas, size)
    for place, text in visible_ticks(painter.scale, wide.width, size * 4):
        wide.text(text, place * wide.width, ground + size * 0.25, size, FAINT, 0.5)
    waterfall(painter, wide.part(0, strip_top, wide.width, canvas.height))
    canvas.text("before", 0, strip_top, size, FAINT)


def bars(painter: Painter, canvas: Canvas, outer: Canvas, size: int) -> None:
    """Shares of the values, as roots: a layer of which nine tenths are zero still shows the others."""
    count = int(np.clip(canvas.width // 6, 12, 96))
    shares = rebinned(painter.stats.histogram, painter.scale, count)
    top = top_share(shares)
    for share in (0.01, 0.1, 0.25, 0.5, 1.0):
        y = canvas.height * (1 - (share / top) ** 0.5)
        if share <= top and (share * 4 > top):
            canvas.line(0, y, canvas.width, y, GRID)
            outer.text(f"{share:.0%}", size * 3.6, y, size, FAINT, 1.0)
    places = np.arange(canvas.width) * count / canvas.width
    heights = np.sqrt(shares / top)[places.astype(int)] * canvas.height
    heights[places % 1 < count / canvas.width] = 0  # a gap between bars
    colours = coloured((np.arange(count) + 0.5) / count, painter.cmap)[places.astype(int)]
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


def waterfall(painter: Painter, canvas: Canvas) -> None:
    """The distributions of the samples so far, the newest at the top. Where none was finite, the row says so."""
    if canvas.height < 4 or not canvas.width:
        return
    shown = list(painter.past)[::-1][: canvas.height]
    columns = min(canvas.width, 96)
    shares = np.array([rebinned(one, painter.scale, columns) for one in shown])
    light = np.sqrt(shares / np.maximum(shares.max(1, keepdims=True), FEW))
    colours = coloured(light, "inferno" if painter.cmap != "inferno" else "viridis")
    colours[[one is None for one in shown]] = NOT_A_NUMBER
    wide = np.arange(canvas.width) * columns // canvas.width
    canvas.fill(BACKGROUND)
    tall = np.arange(canvas.height) * max(len(shown), FIRST) // canvas.height
    canvas.put(colours[tall[tall < len(shown)][:, None], wide])


def line(painter: Painter, canvas: Canvas, size: int) -> None:
    """The values in their order; where several share a column of pixels, from the least to the greatest of them."""
    values = real(painter.sample.values).ravel()
    wide = canvas.part(size * 4.4, 0, canvas.width - size * 0.5, canvas.height)
    ground = round(canvas.height * 0.66)
    plot = wide.part(0, size * 0.6, wide.width, ground)
    grid(painter.scale, plot, canvas, size, size * 0.6)
    graph(painter.scale, plot, values)
    for place, text in ((0.0, "0"), (1.0, f"{painter.sample.size - 1:,}")):
        wide.text(text, place * wide.width, ground + size * 0.2, size, FAINT, place)
    strip(painter, canvas.part(size * 4.4, ground + size * 1.8, canvas.width - size * 0.5, canvas.height), canvas, size)


def strip(painter: Painter, canvas: Canvas, outer: Canvas, size: int) -> None:
    """The distributions so far as rows of colour over an axis of values."""
    waterfall(painter, canvas.part(0, 0, canvas.width, canvas.height - size * 1.5))
    for place, text in visible_ticks(painter.scale, canvas.width, size * 4):
        canvas.text(text, place * canvas.width, canvas.height - size * 1.25, size, FAINT, 0.5)
    outer.text("values", 0, outer.height - canvas.height, size, FAINT)


def trend(painter: Painter, canvas: Canvas, size: int) -> None:
    """A single number over the samples so far."""
    values = np.array(painter.single)
    plot = canvas.part(size * 4.4, size * 0.6, canvas.width - size * 0.5, canvas.height - size * 1.5)
    grid(painter.scale, plot, canvas, size, size * 0.6)
    graph(painter.scale, plot, values)
    canvas.text(f"the last {len(values)} samples", canvas.width, canvas.height - size * 1.2, size, FAINT, 1.0)


def grid(scale: Scale, plot: Canvas, outer: Canvas, size: int, top: float) -> None:
    """Horizontal lines at the ticks of the scale, with their values at the left of the plot."""
    plot.fill(BACKGROUND)
    for place, text in visible_ticks(scale, plot.height, size * 1.3):
        y = (1 - place) * (plot.height - 1)
        plot.line(0, y, plot.width, y, GRID, 0.8)
        outer.text(text, size * 4, top + y - size * 0.6, size, FAINT, 1.0)


def graph(scale: Scale, plot: Canvas, values: Numbers) -> None:
    """A curve through the values, and marks where they are not finite."""
    count, width = values.size, plot.width
    finite = np.where(np.isfinite(values), values, np.nan)
    middle = (plot.height - 3) * (1 - scale.of(finite)) + 1
    if count > width:
        begins = np.arange(width) * count // width
        tops, bottoms = (f.reduceat(middle, begins) for f in (np.fmin, np.fmax))
        plot.columns(tops - 0.8, bottoms + 0.8, ACCENT)
    else:
        places = np.arange(width) * max(count - 1, 1) / max(width - 1, 1)
        ys = np.interp(places, np.arange(count), middle)
        plot.curve(ys, ACCENT)
    marks(plot, values)


def marks(plot: Canvas, values: Numbers) -> None:
    """Where values are not finite: NaN over the whole height, infinities at their end."""
    wide = max(2, min(plot.width // max(values.size, 1), 6))
    for found, top, bottom, colour in (
        (np.isnan(values), 0.0, 1.0, NOT_A_NUMBER),
        (values == np.inf, 0.0, 0.12, INFINITE),
        (values == -np.inf, 0.88, 1.0, MINUS_INFINITE),
    ):
        if found.any():
            places = np.nonzero(found)[0] * (plot.width - wide) // max(values.size - 1, 1)
            hit = np.zeros(plot.width, bool)
            for shift in range(wide):
                hit[places + shift] = True
            high, low = (np.where(hit, plot.height * one, np.nan) for one in (top, bottom))
            plot.columns(high, low, colour, 0.85)


def heatmap(painter: Painter, canvas: Canvas, size: int) -> None:
    """Each value as a cell of colour, at the place that it has in the tensor."""
    found, plot = prepared(painter, canvas, size, gap=1)
    if found is None:
        histogram(painter, canvas, size)
        return
    height, width = fitting(found.matrix.shape, plot.height, plot.width)
    plot.put(cells(painter, found, height, width), (plot.width - width) // 2, (plot.height - height) // 2)
    colour_bar(painter, canvas, size)


def surface2d(painter: Painter, canvas: Canvas, size: int) -> None:
    """The surface from above: smooth colours, lit from the left, with its level lines."""
    found, plot = prepared(painter, canvas, size, gap=0)
    if found is None:
        histogram(painter, canvas, size)
        return
    height, width = fitting(found.matrix.shape, plot.height, plot.width)
    small = reduced(found.matrix, min(height, 240), min(width, 240), painter.scale.middle)
    heights = finer(level(painter.scale, small), height, width)
    pixels = shaded(heights, coloured(heights, painter.cmap), min(small.shape) * 0.5 + 6)
    levels = np.floor(heights * 10)
    edges = (np.diff(levels, axis=0, prepend=levels[:1]) != 0) | (np.diff(levels, axis=1, prepend=levels[:, :1]) != 0)
    pixels[edges] = (pixels[edges] * 0.55).astype(np.uint8)
    mark_cells(pixels, enlarged(small, height, width))
    plot.put(pixels, (plot.width - width) // 2, (plot.height - height) // 2)
    colour_bar(painter, canvas, size)


def surface(painter: Painter, canvas: Canvas, size: int) -> None:
    """The matrix as a landscape."""
    found = arranged(painter.sample, gap=0)
    if found is None:
        histogram(painter, canvas, size)
        return
    left = size * 4
    plot = canvas.part(left, size * 0.5, canvas.width, canvas.height - size * 1.2)
    fine = fineness(plot.width)
    small = reduced(found.matrix, fine // 2, fine // 2, painter.scale.middle)
    heights, colours = terrain(painter, small, fine)
    view = view_of(found.matrix.shape, plot.width, plot.height)
    box(painter, plot, canvas, view, size, left)
    plot.lay(*landscape(heights, colours, view, plot.width, plot.height))
    frame(plot, view)
    sides(canvas, view, found.matrix.shape, size, left)


def terrain(painter: Painter, small: Numbers, fine: int) -> tuple[Numbers, Colours]:
    """Heights and colours of many more points than the matrix has; its own rows and columns are drawn as a net. What is
    not a number stands out of it as a post.
    """
    heights = finer(level(painter.scale, small), fine, fine)
    colours = shaded(heights, coloured(heights, painter.cmap), fine * 0.55)
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


def box(painter: Painter, plot: Canvas, outer: Canvas, view: View, size: int, left: float) -> None:
    """The back of the box around a landscape, with the ticks of the scale."""
    a, b = view.across, view.along
    ticks = visible_ticks(painter.scale, view.scale * 0.5, size * 1.2)
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


def scatter(painter: Painter, canvas: Canvas, size: int) -> None:
    """Rows of the tensor as points, by their two principal components; their colours tell their order."""
    points = painter.axes.of(painter.sample)
    if points is None:
        histogram(painter, canvas, size)
        return
    places, order, explained = points
    plot = canvas.part(0, 0, canvas.width, canvas.height - size * 1.5)
    plot.fill(BACKGROUND)
    middle = plot.width / 2, plot.height / 2
    plot.line(middle[0], 0, middle[0], plot.height, GRID)
    plot.line(0, middle[1], plot.width, middle[1], GRID)
    reach = painter.axes.reach
    xs, ys = (c + place / reach * c * 0.92 for c, place in zip(middle, (places[:, 0], -places[:, 1]), strict=True))
    discs(plot, xs, ys, coloured(order, "turbo" if painter.cmap == "viridis" else painter.cmap), 1 + size / 9)
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


PICTURES: dict[str, Callable[[Painter, Canvas, int], Any]] = {
    "histogram": histogram,
    "heatmap": heatmap,
    "surface": surface,
    "surface2d": surface2d,
    "scatter": scatter,
    "line": line,
    "trend": trend,
}


# -- what they share ---------------------------------------------------------------------------------------------------


def visible_ticks(scale: Scale, length: float, least: float) -> list[tuple[float, str]]:
    """Ticks that lie so many pixels apart; the middle one and the ends come first."""
    ticks = scale.ticks()
    chosen: list[tuple[float, str]] = []
    order = sorted(range(len(ticks)), key=lambda one: (min(one, len(ticks) - 1 - one, abs(one - len(ticks) // 2)), one))
    for one in order:
        if all(abs(ticks[one][0] - other) * length >= least for other, _ in chosen):
            chosen.append(ticks[one])
    return sorted(chosen)


def prepared(painter: Painter, canvas: Canvas, size: int, gap: int) -> tuple[Arranged | None, Canvas]:
    """The values as a matrix, and the place for its picture, beside the bar of colours."""
    found = arranged(painter.sample, gap)
    bottom = canvas.height
    if found is not None and found.said:
        bottom -= round(size * 1.4)
        canvas.text(found.said, 0, canvas.height - size * 1.2, size, FAINT)
    return found, canvas.part(0, 0, canvas.width - bar_width(size), bottom)


def bar_width(size: int) -> int:
    return size * 6


def colour_bar(painter: Painter, canvas: Canvas, size: int) -> None:
    """Which colour is which value, at the right."""
    left = canvas.width - bar_width(size) + size
    bar = canvas.part(left, size * 0.5, left + size, canvas.height - size)
    shares = 1 - np.arange(bar.height) / max(bar.height - 1, 1)
    bar.pixels[:] = coloured(shares, painter.cmap)[:, None]
    for place, text in visible_ticks(painter.scale, bar.height, size * 1.3):
        canvas.text(text, left + size * 1.4, size * 0.5 + (1 - place) * bar.height - size * 0.6, size, FAINT)


def fitting(shape: tuple[int, ...], height: int, width: int) -> tuple[int, int]:
    """The size of a picture with square cells; a very long one is stretched to a third of its length."""
    ratio = min(max(shape[0] / shape[1], 1 / 3), 3.0)
    return max(int(min(height, width * ratio)), 1), max(int(min(width, height / ratio)), 1)


def cells(painter: Painter, found: Arranged, height: int, width: int) -> Colours:
    """The matrix as pixels."""
    matrix = found.matrix
    if found.empty is not None and (matrix.shape[0] > height or matrix.shape[1] > width):
        matrix = np.where(found.empty, painter.scale.middle, matrix)
    small = reduced(matrix, height, width, painter.scale.middle)
    pixels = coloured(level(painter.scale, small), painter.cmap)
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
