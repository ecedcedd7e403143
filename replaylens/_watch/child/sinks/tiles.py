"""Pictures side by side, one for each watched value.

In: samples, of which some may be lost. Out: one picture of all, for a step. Its size is settled when it is asked for
first, by how many values there are then; a value that comes later makes the others move together. Where it belongs is
told by those that come before and after it in a step, so that two films of a run are alike, whatever each has lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module

import numpy as np

from ..statistics import Stats
from ..wire import Sample
from .canvas import Canvas
from .colormaps import BACKGROUND, PANEL, Colours
from .pictures import Painter, mark_step
from .single_numbers import is_own_number

Key = tuple[str, str]
Place = tuple[int, int, int, int]  # left, top, right, bottom

TILE = 320, 240  # pixels
ALONE = 640, 452
LARGEST = 1920, 1080
LEAST = 112, 84
DIM = 0.6  # of a picture that is late
FORWARD = "scalar", "input", "activation"  # kinds in the order in which a step has them


class Tile:
    """A value's painter, and the place of its picture, once there is one."""

    def __init__(self, painter: Painter) -> None:
        self.painter = painter
        self.waiting: tuple[Sample, Stats] | None = None
        self.place: Place | None = None
        self.is_own_number = False
        self.step = -1
        self._interval = math.inf  # steps between two samples, where none was lost

    def see(self, sample: Sample) -> None:
        """Take note of its step."""
        if 0 <= self.step < sample.step:
            self._interval = min(self._interval, sample.step - self.step)
        self.step, self.is_own_number = sample.step, is_own_number(sample)

    def mark(self, canvas: Canvas, step: int) -> None:
        """Say on a picture of all which other step this is of; one whose sample of this step was lost is dimmed."""
        if self.place is None or self.is_own_number or self.step == step:
            return
        canvas = canvas.part(*self.place)
        if step - self.step >= self._interval:
            canvas.blend(np.full(canvas.pixels.shape[:2], DIM, np.float32), PANEL)
        mark_step(canvas, self.step)


class Tiles:
    """The tiles of a film. `above` is how much of the largest height is taken by others."""

    def __init__(self, size: tuple[int, int] | None, painter: Callable[[], Painter], above: int = 0) -> None:
        self._size, self._painter, self._above = size, painter, above
        self._tiles: dict[Key, Tile] = {}
        self._arrived: dict[str, dict[str, None]] = {}  # names by kind, in this step
        self._fullest: dict[str, list[str]] = {}  # the same, of the steps that lost least
        self._canvas: Canvas | None = None
        self.said = ""

    def draw(self, sample: Sample, stats: Stats) -> None:
        """The picture of a value; a new value needs a place first, and waits for the end of its step."""
        tile = self._tiles.setdefault((sample.name, sample.what), Tile(self._painter()))
        tile.see(sample)
        self._arrived.setdefault(sample.what, {})[sample.name] = None
        if self._canvas is not None and tile.place is not None:
            tile.painter.draw(self._canvas.part(*tile.place), sample, stats)
        else:
            tile.waiting = sample, stats

    def picture(self, step: int) -> Canvas:
        """All tiles at the end of a step; those of another step say so."""
        if self._canvas is None:
            self._canvas = Canvas.new(*(self._size or size_for(len(self._tiles), self._above)))
        canvas = self._canvas
        if self._has_more() or any(tile.waiting is not None for tile in self._tiles.values()):
            self._lay_out(canvas)
        shown = Canvas(canvas.pixels.copy())
        for tile in self._tiles.values():
            tile.mark(shown, step)
        return shown

    def _has_more(self) -> bool:
        """Whether a kind had more names in this step than in any before."""
        arrived, self._arrived = self._arrived, {}
        more = {kind: [*names] for kind, names in arrived.items() if len(names) > len(self._fullest.get(kind, ()))}
        self._fullest.update(more)
        return bool(more)

    def _lay_out(self, canvas: Canvas) -> None:
        """A place for each tile: names in the order of a step, the kinds of one name side by side."""
        tiles = self._in_order()
        across, down = grid_for(len(tiles), canvas.width, canvas.height)
        self.said = f"{len(tiles) - across * down} more have no room" if len(tiles) > across * down else ""
        old = [None if tile.place is None else canvas.part(*tile.place).pixels.copy() for tile in tiles]
        canvas.fill(BACKGROUND)
        for number, (tile, pixels) in enumerate(zip(tiles, old, strict=True)):
            waiting, tile.waiting = tile.waiting, None
            tile.place = place_of(canvas, number, across, down) if number < across * down else None
            if tile.place is None:
                continue
            part = canvas.part(*tile.place)
            if waiting is not None:
                tile.painter.draw(part, *waiting)
            elif pixels is not None:
                part.put(resized(pixels, part.width, part.height))

    def _in_order(self) -> list[Tile]:
        """Numbers of the user's own come first."""
        order: list[str] = []
        for kind in sorted(self._fullest, key=lambda kind: FORWARD.index(kind) if kind in FORWARD else len(FORWARD)):
            names = self._fullest[kind]
            insert(order, names[::-1] if kind == "grad" else names)  # which come from the last to the first
        insert(order, [name for name, _ in self._tiles])
        ranks = {name: rank for rank, name in enumerate(order)}
        keys = sorted(self._tiles, key=lambda key: (not self._tiles[key].is_own_number, ranks[key[0]], key[1]))
        return [self._tiles[key] for key in keys]


def insert(order: list[str], names: Sequence[str]) -> None:
    """Put names that are new where their neighbours are: after the one before, else before the next that is known."""
    known = set(order)
    for number, name in enumerate(names):
        if name in known:
            continue
        following = next((one for one in names[number + 1 :] if one in known), None)
        if number:
            order.insert(order.index(names[number - 1]) + 1, name)
        else:
            order.insert(len(order) if following is None else order.index(following), name)
        known.add(name)


def place_of(canvas: Canvas, number: int, across: int, down: int) -> Place:
    """The part of a canvas for a tile, with a dark line around it."""
    row, column = divmod(number, across)
    width, height = canvas.width / across, canvas.height / down
    return (
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
