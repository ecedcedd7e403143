"""Pictures side by side, one for each watched value.

In: samples in any order. Out: one picture of all. Its size is settled when it is asked for first, by how many values
there are then; a value that comes later makes the others move together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module

import numpy as np

from ..statistics import Stats
from ..wire import Sample
from .canvas import Canvas
from .colormaps import BACKGROUND, Colours
from .pictures import Painter

Key = tuple[str, str]

TILE = 320, 240  # pixels
ALONE = 640, 452
LARGEST = 1920, 1080
LEAST = 112, 84


class Tile:
    """A value's painter, and the place of its picture, once there is one."""

    def __init__(self, painter: Painter) -> None:
        self.painter = painter
        self.waiting: tuple[Sample, Stats] | None = None
        self.place: Canvas | None = None


class Tiles:
    """The tiles of a film. `above` is how much of the largest height is taken by others."""

    def __init__(self, size: tuple[int, int] | None, painter: Callable[[], Painter], above: int = 0) -> None:
        self._size, self._painter, self._above = size, painter, above
        self._tiles: dict[Key, Tile] = {}
        self._canvas: Canvas | None = None
        self.said = ""

    def draw(self, sample: Sample, stats: Stats) -> None:
        """The picture of a value; a new value needs a place first."""
        key = sample.name, sample.what
        if key not in self._tiles:
            self._tiles[key] = Tile(self._painter())
            if self._canvas is not None:
                self._lay_out(self._canvas)
        tile = self._tiles[key]
        if tile.place is not None:
            tile.painter.draw(tile.place, sample, stats)
        elif self._canvas is None:
            tile.waiting = sample, stats

    def picture(self) -> Canvas:
        """All tiles as they are now."""
        if self._canvas is None:
            self._canvas = Canvas.new(*(self._size or size_for(len(self._tiles), self._above)))
            self._lay_out(self._canvas)
            for tile in self._tiles.values():
                if tile.place is not None and tile.waiting is not None:
                    tile.painter.draw(tile.place, *tile.waiting)
                tile.waiting = None
        return self._canvas

    def _lay_out(self, canvas: Canvas) -> None:
        """A place for each tile: names in the order of their arrival, the kinds of one name side by side."""
        names = {name: place for place, (name, _) in reversed(list(enumerate(self._tiles)))}
        tiles = [self._tiles[key] for key in sorted(self._tiles, key=lambda key: (names[key[0]], key[1]))]
        across, down = grid_for(len(tiles), canvas.width, canvas.height)
        self.said = f"{len(tiles) - across * down} more have no room" if len(tiles) > across * down else ""
        old = [None if tile.place is None else tile.place.pixels.copy() for tile in tiles]
        canvas.fill(BACKGROUND)
        for number, (tile, pixels) in enumerate(zip(tiles, old, strict=True)):
            tile.place = place_of(canvas, number, across, down) if number < across * down else None
            if tile.place is not None and pixels is not None:
                tile.place.put(resized(pixels, tile.place.width, tile.place.height))


def place_of(canvas: Canvas, number: int, across: int, down: int) -> Canvas:
    """The part of a canvas for a tile, with a dark line around it."""
    row, column = divmod(number, across)
    width, height = canvas.width / across, canvas.height / down
    return canvas.part(
        round(column * width) + 1,
        round(row * height) + 1,
        round((column + 1) * width) - 1,
        round((row + 1) * height) - 1,
    )


def size_for(tiles: int, above: int) -> tuple[int, int]:
    """A picture in which so many tiles have their usual size, or as large as films are made."""
    if tiles == 1:
        return ALONE
    across, down = grid_for(tiles, TILE[0] * 100, TILE[1] * 100)
    return min(across * TILE[0], LARGEST[0]), min(down * TILE[1], LARGEST[1] - above)


def grid_for(tiles: int, width: int, height: int) -> tuple[int, int]:
    """Columns and rows in which the tiles are as large as can be; not smaller than can be read."""
    most_across, most_down = max(width // LEAST[0], 1), max(height // LEAST[1], 1)

    def side(across: int) -> tuple[float, int]:
        return min(width / across / TILE[0], height / math.ceil(tiles / across) / TILE[1]), across

    across = max(range(1, min(tiles, most_across) + 1), key=side)
    return across, min(math.ceil(tiles / across), most_down)


def resized(pixels: Colours, width: int, height: int) -> Colours:
    """A picture in another size."""
    image = import_module("PIL.Image").fromarray(pixels)
    return np.asarray(image.resize((max(width, 1), max(height, 1))))
