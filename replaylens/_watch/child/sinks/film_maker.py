"""Films of samples: one picture for each sampled step, of all watched values or of one.

In: samples with their numbers, notes, alarms. Out: movie files. A tiled film's picture is finished when a sample of
another step arrives, so that all values of a step are in it. After a fault nothing is touched again, not even to close
it: a library in an unknown state may take the process with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..statistics import Stats
from ..wire import Event, Sample
from .canvas import Canvas
from .colormaps import ALARM, FAINT, INK
from .movie_files import AnimatedPng, Mp4
from .new_files import file_name
from .pictures import Painter
from .single_numbers import is_own_number
from .tiles import Tiles

Size = tuple[int, int]
Movie = Mp4 | AnimatedPng

ONE = 640, 480  # pixels of a film of one value
HEAD = 28  # of the line over the tiles
MOST_FILES = 48  # each encoder takes some megabytes
ALARM_SHOWN = 3  # pictures


class FilmMaker:
    """The sink behind `Film`."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        self.path = path = Path(options["path"])
        self._size: Size | None = options["size"] and tuple(options["size"])
        self._suffix = str(options["suffix"])
        self._painter = partial(Painter, options["kind"], options["cmap"])
        self._reel = partial(Reel, AnimatedPng if self._suffix == ".png" else Mp4, options["fps"], options["frames"])
        self._caption = Caption(str(run.get("name") or run.get("model") or ""))
        self._folder, self._stem = (path.parent, f"{path.stem}-") if path.suffix else (path, "")
        self._single: dict[tuple[str, str], tuple[Painter, Reel]] = {}
        self._tiled: TiledFilm | None = None
        if options["tiled"]:
            self._tiled = self._tiled_film(path if path.suffix else self._named("all"))
        self._most_files = 0 if options["tiled"] else MOST_FILES
        self._is_touchable = True

    def sample(self, sample: Sample, stats: Stats) -> None:
        """The picture of a sample, in its own film as long as there are not too many, else in the one of the others."""
        key = sample.name, sample.what
        if key not in self._single and len(self._single) >= self._most_files:
            self._tiled = self._tiled or self._tiled_film(self._named("others"))
            self._guarded(self._tiled.sample, sample, stats)
        else:
            self._guarded(self._alone, key, sample, stats)

    def event(self, event: Event) -> None:
        """Notes and alarms are seen on the pictures that follow."""
        self._caption.event(event)

    def flush(self) -> None:
        """Nothing waits but the picture of a step that may not be over."""

    def close(self) -> None:
        """The last picture, and the ends of the files."""
        self._guarded(self._finish)

    def _finish(self) -> None:
        for _, reel in self._single.values():
            reel.close()
        if self._tiled is not None:
            self._tiled.close()

    def _guarded(self, work: Callable[..., None], *given: Any) -> None:
        if self._is_touchable:
            self._is_touchable = False
            work(*given)
            self._is_touchable = True

    def _alone(self, key: tuple[str, str], sample: Sample, stats: Stats) -> None:
        if key not in self._single:
            self._single[key] = self._painter(), self._reel(self._named(f"{file_name(key[0])}-{file_name(key[1])}"))
        painter, reel = self._single[key]
        canvas = Canvas.new(*(self._size or ONE))
        painter.draw(canvas, sample, stats)
        self._caption.mark(canvas)
        reel.add(canvas)

    def _named(self, name: str) -> Path:
        """A file in the folder, or beside the file that was named."""
        return self._folder / f"{self._stem}{name}{self._suffix}"

    def _tiled_film(self, path: Path) -> TiledFilm:
        return TiledFilm(self._reel(path), self._size, partial(self._painter, has_note=False), self._caption)


class Caption:
    """What was noted last, and whether there was an alarm."""

    def __init__(self, run: str) -> None:
        self.run, self.text = run, ""
        self._left = 0

    @property
    def colour(self) -> tuple[int, int, int]:
        return ALARM if self._left else FAINT

    def event(self, event: Event) -> None:
        """The text of a note or an alarm."""
        if event.kind in ("note", "epoch", "alarm"):
            facts = event.facts
            self.text = str(facts.get("text") or facts.get("reason") or next(iter(facts.values()), event.kind))
            self._left = ALARM_SHOWN if event.kind == "alarm" else 0

    def mark(self, canvas: Canvas) -> None:
        """A red border on some pictures after an alarm."""
        if self._left > 0:
            self._left -= 1
            for x, y in ((0, 0), (canvas.width - 3, canvas.height - 3)):
                canvas.part(0, y, canvas.width, y + 3).fill(ALARM)
                canvas.part(x, 0, x + 3, canvas.height).fill(ALARM)


class Reel:
    """One film, in as many files as it needs."""

    def __init__(self, kind: type[Movie], fps: float, most: int | None, path: Path) -> None:
        self._kind, self._fps, self._most, self._path = kind, fps, most, path
        self._movie: Movie | None = None
        self._frames = 0

    def add(self, canvas: Canvas) -> None:
        """The next picture. A file that is full is closed; the next one finds a free name."""
        if self._frames == self._most:
            self.close()
        if self._movie is None:
            self._movie = self._kind(self._path, (canvas.width, canvas.height), self._fps)
        self._movie.add(canvas.pixels)
        self._frames += 1

    def close(self) -> None:
        movie, self._movie, self._frames = self._movie, None, 0
        if movie is not None:
            movie.close()


class TiledFilm:
    """A film in which each value has its place. Numbers of the user's own may come in each step: where there are other
    values as well, these say when there is a new picture.
    """

    def __init__(self, reel: Reel, size: Size | None, painter: Callable[[], Painter], caption: Caption) -> None:
        self._reel, self._caption = reel, caption
        self._tiles = Tiles(size and (size[0], size[1] - HEAD), painter, HEAD)
        self._step = -1
        self._is_due = self._has_values = False

    def sample(self, sample: Sample, stats: Stats) -> None:
        """A tile, after the picture of the step before."""
        if self._step != sample.step and self._is_due:
            self._add()
        self._step = sample.step
        self._tiles.draw(sample, stats)
        self._has_values = self._has_values or not is_own_number(sample)
        self._is_due = self._is_due or not (self._has_values and is_own_number(sample))

    def close(self) -> None:
        """The picture of the last step."""
        if self._is_due:
            self._add()
        self._reel.close()

    def _add(self) -> None:
        self._is_due = False
        tiles = self._tiles.picture(self._step)
        canvas = Canvas.new(tiles.width, tiles.height + HEAD)
        canvas.put(tiles.pixels, 0, HEAD)
        caption, y = self._caption, 5
        begin = canvas.text(caption.run, 6, y, 14, INK) + 20
        begin += canvas.text(self._tiles.said, begin, y, 14, FAINT)
        end = canvas.width - canvas.text(f"step {self._step}", canvas.width - 6, y, 14, INK, 1.0) - 20
        middle = canvas.part(begin, 0, max(end, begin), HEAD)
        middle.text(caption.text, middle.width / 2, y, 14, caption.colour, 0.5)
        caption.mark(canvas)
        self._reel.add(canvas)
