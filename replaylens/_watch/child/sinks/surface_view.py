"""A matrix as a landscape, seen from the front and above.

In: heights from 0 to 1 with their colours. Out: pixels, and the places of the box around them. Each column of pixels
looks along a line over the landscape: the heights on that line, from near to far, are projected, and what rises above
all that is nearer is seen. All columns are done at once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .canvas import Numbers
from .colormaps import Colours

TURN = math.radians(32)
RISE = math.radians(33)
HEIGHT = 0.62  # of the box, to the length of its longer side
LONGER = 1.2
MOST_STEPS = 288
LIGHT = np.array([-0.45, -0.35, 0.82]) / np.linalg.norm([-0.45, -0.35, 0.82])


class View(NamedTuple):
    """How points of the box lie on the picture. The ground reaches from -across to across, and -along to along."""

    across: float
    along: float
    scale: float
    x: float
    y: float

    def place(self, u: float, v: float, height: float) -> tuple[float, float]:
        """Pixels of a point: u to the right, v to the back, height from 0 to 1."""
        side = u * math.cos(TURN) - v * math.sin(TURN)
        depth = u * math.sin(TURN) + v * math.cos(TURN)
        up = depth * math.sin(RISE) + height * HEIGHT * math.cos(RISE)
        return self.x + side * self.scale, self.y - up * self.scale


def view_of(shape: tuple[int, ...], width: int, height: int) -> View:
    """A view in which the box fills the picture. Long sides are shortened, so that thin matrices are seen as well, and
    to one of a few lengths, so that layers share their lines of sight.
    """
    ratio = LONGER ** min(max(round(math.log(shape[0] / shape[1]) / 2 / math.log(LONGER)), -4), 4)
    across, along = 0.5 / max(1.0, ratio), 0.5 * min(1.0, ratio)
    unit = View(across, along, 1.0, 0.0, 0.0)
    corners = [unit.place(u, v, z) for u in (-across, across) for v in (-along, along) for z in (0, 1)]
    (left, top), (right, bottom) = (tuple(map(f, zip(*corners, strict=True))) for f in (min, max))
    scale = min(width / (right - left), height / (bottom - top))
    x, y = (width - (left + right) * scale) / 2, (height - (top + bottom) * scale) / 2
    return View(across, along, scale, x, y)


class Rays(NamedTuple):
    """Where the lines of sight of the columns of pixels pass over a landscape, from near to far."""

    cells: NDArray[np.intp]  # of each step on each line; where there is no landscape, any
    ground: NDArray[np.float32]  # how far down the picture the ground is there; elsewhere, below all pictures
    over: NDArray[np.bool_]  # whether the landscape is there


def fineness(width: int) -> int:
    """How many points a landscape has on each side, in a picture of this width."""
    return 240 if width > 400 else 120


@lru_cache(maxsize=8)
def rays_of(view: View, width: int, fine: int) -> Rays:
    """The lines of sight; the same for all frames of a film."""
    reach = math.hypot(view.across, view.along)
    steps = min(max(int(2 * reach * view.scale), 48), MOST_STEPS)
    depth = np.linspace(-reach, reach, steps, dtype=np.float32)[:, None]
    side = ((np.arange(width, dtype=np.float32) + 0.5 - view.x) / view.scale)[None]
    u = side * math.cos(TURN) + depth * math.sin(TURN)
    v = depth * math.cos(TURN) - side * math.sin(TURN)
    over = (np.abs(u) < view.across) & (np.abs(v) < view.along)
    column, row = (np.where(over, one, 0) * (fine / 2) for one in (u / view.across + 1, 1 - v / view.along))
    cells = np.minimum(row.astype(np.intp), fine - 1) * fine + np.minimum(column.astype(np.intp), fine - 1)
    ground = (view.y - depth * math.sin(RISE) * view.scale).astype(np.float32)
    return Rays(cells, np.where(over, ground, np.float32(1e6)), over)


def landscape(heights: Numbers, colours: Colours, view: View, width: int, height: int) -> tuple[Colours, Numbers]:
    """Pixels of the surface, and how far each is covered by it, from 0 to 1. There are as many rows as columns."""
    rays, lines = rays_of(view, width, len(heights)), np.arange(width)
    lift = (heights * (HEIGHT * math.cos(RISE) * view.scale)).astype(np.float32).ravel()
    horizon = rays.ground - lift.take(rays.cells)
    np.minimum.accumulate(horizon, 0, out=horizon)
    first = np.argmax(rays.over, 0)  # where the line of sight enters: below it, the landscape's side is seen
    foot = np.where(rays.over.any(0), rays.ground[first, lines], -1e6)
    seen = np.minimum(steps_seen(horizon, height), len(horizon) - 1)
    rows = np.arange(height, dtype=np.float32)[:, None]
    pixels = colours.reshape(-1, 3).take(rays.cells[seen, lines], 0)
    wall = (rows > horizon[first, lines]) & (rows < foot)
    pixels[wall] = (pixels[wall] * np.float32(0.45)).astype(np.uint8)
    cover = np.clip(rows + 1 - horizon[-1], 0, 1) * np.clip(foot - rows, 0, 1)
    return pixels, cover


def steps_seen(horizon: NDArray[np.float32], height: int) -> NDArray[np.intp]:
    """For each pixel, the first step on its line of sight whose horizon is not below it."""
    rows = np.clip(np.ceil(horizon), 0, height).astype(np.intp)  # pixels from there down are covered
    width = rows.shape[1]
    begins = np.bincount((rows * width + np.arange(width)).ravel(), minlength=(height + 1) * width)
    later = np.cumsum(begins.reshape(height + 1, width), 0)[:height]  # steps whose horizon is above the pixel, or at it
    return len(horizon) - later


def finer(matrix: Numbers, rows: int, columns: int) -> Numbers:
    """A matrix with more rows and columns, linear between the old ones."""
    return weights(matrix.shape[0], rows) @ matrix @ weights(matrix.shape[1], columns).T


@lru_cache(maxsize=32)
def weights(old: int, new: int) -> NDArray[np.float32]:
    """What each new row takes of each old one."""
    places = np.linspace(0, old - 1, new)
    return np.maximum(1 - np.abs(places[:, None] - np.arange(old)), 0).astype(np.float32)


def shaded(heights: Numbers, colours: Colours, steepness: float) -> Colours:
    """Colours as they look in a light from the left, above, behind the eye."""
    down, right = np.gradient(heights) if min(heights.shape) > 1 else (np.zeros_like(heights), np.zeros_like(heights))
    right, back = right * steepness, -down * steepness
    light = (LIGHT[2] - right * LIGHT[0] - back * LIGHT[1]) / np.sqrt(1 + right**2 + back**2)
    return np.clip(colours * (0.42 + 0.72 * np.clip(light, 0, 1))[..., None], 0, 255).astype(np.uint8)
