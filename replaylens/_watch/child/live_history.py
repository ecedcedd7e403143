"""What the live page remembers of a run: a row for each value, notes, alarms; bounded, however long the run.

In: samples with their numbers, events. Out: plain data for JSON. A row keeps at most MOST_POINTS points: when they are
full, neighbours are merged and each stands for twice as many samples. No time is read and nothing is sent here.
"""

from __future__ import annotations

import base64
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .statistics import Stats
from .wire import Event, Sample

MOST_POINTS, MOST_ROWS, MOST_MARKS = 256, 400, 200
# A distribution is kept as the values below which these shares of it lie: little memory, no scale fixed in advance.
LEVELS = (0, 0.01, 0.05, 0.1, 0.15, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.85, 0.9, 0.95, 0.99, 1)
MEAN, STD, NORM, ZEROS, NANS, INFS, QUANTILES = range(7)
LAST = QUANTILES + len(LEVELS)
LARGEST = 3e38  # of what 32 bits hold

Point = NDArray[np.float32]


@np.errstate(all="ignore")
def point_of(stats: Stats) -> Point:
    """The numbers of a sample as one vector; NaN where there is none."""
    point = np.full(LAST, np.nan, np.float32)
    for place, number in enumerate((stats.mean, stats.std, stats.norm, stats.zeros, stats.nans, stats.infs)):
        if number is not None:
            point[place] = min(max(number, -LARGEST), LARGEST)
    if stats.histogram is not None and stats.quantiles is not None:
        point[QUANTILES:] = np.clip(_levels(stats), -LARGEST, LARGEST)
    return point


def _levels(stats: Stats) -> NDArray[np.float64]:
    """The values at LEVELS: read off the counts of the histogram and the quantiles together."""
    assert stats.histogram is not None and stats.quantiles is not None
    edges, counts = stats.histogram
    below = np.concatenate([[0.0], np.cumsum(counts) / max(1, sum(counts)), (0.05, 0.25, 0.5, 0.75, 0.95)])
    values = np.concatenate([edges, stats.quantiles])
    order = np.lexsort((below, values))
    found = np.interp(LEVELS, np.maximum.accumulate(below[order]), values[order])
    least, most = stats.least, stats.most
    return found if least is None or most is None else np.clip(found, least, most)


@np.errstate(all="ignore")
def merged(one: Point, other: Point, share: float) -> Point:
    """Two points (or rows of points) as one; `share` is the weight of the other. Extremes and counts are the larger."""
    mixed = (1 - share) * one + share * other
    mixed = np.where(np.isnan(one), other, np.where(np.isnan(other), one, mixed)).astype(np.float32)
    for place, further in ((NANS, np.fmax), (INFS, np.fmax), (QUANTILES, np.fmin), (LAST - 1, np.fmax)):
        mixed[..., place] = further(one[..., place], other[..., place])
    return mixed


class Track:
    """Points over the steps. Each stands for `stride` samples, the last one for `weight` of them."""

    __slots__ = ("points", "steps", "stride", "used", "weight")

    def __init__(self) -> None:
        self.points, self.steps = np.empty((8, LAST), np.float32), np.empty(8, np.int64)
        self.used, self.weight, self.stride = 0, 0, 1

    def add(self, step: int, point: Point, weight: int = 1) -> None:
        """One more point, at the end."""
        if self.used and self.weight < self.stride:
            last = self.used - 1
            self.weight += weight
            self.points[last] = merged(self.points[last], point, weight / self.weight)
            self.steps[last] = step
            return
        if self.used == MOST_POINTS:
            self._halve()
        elif self.used == len(self.points):
            self.points, self.steps = (np.concatenate([one, np.empty_like(one)]) for one in (self.points, self.steps))
        self.points[self.used], self.steps[self.used] = point, step
        self.used, self.weight = self.used + 1, weight

    def _halve(self) -> None:
        """Neighbours become one."""
        self.used //= 2
        self.points[: self.used] = merged(self.points[0::2], self.points[1::2], 0.5)
        self.steps[: self.used] = self.steps[1::2]
        self.stride *= 2

    def as_data(self) -> dict[str, Any]:
        """For JSON: the steps, and the points as 32-bit numbers in base64."""
        return {
            "steps": self.steps[: self.used].tolist(),
            "points": packed(self.points[: self.used]),
            "stride": self.stride,
            "weight": self.weight,
        }


def packed(points: NDArray[np.floating]) -> str:
    """Numbers as text: base64 of little-endian 32-bit floats, which can be NaN, as JSON cannot."""
    return base64.b64encode(np.ascontiguousarray(points, "<f4").tobytes()).decode("ascii")


class Row:
    """One value of the run: its numbers over the steps, and what its newest sample was."""

    def __init__(self, identity: int, name: str, what: str) -> None:
        self.identity, self.name, self.what = identity, name, what
        self.track = Track()
        self.seen = self.step = self.bad = self.news_weight = 0
        self.first_bad = self.last_bad = -1
        self.newest: Sample | None = None  # without its values
        self.stats: Stats | None = None
        self.news: Point | None = None  # what no page has been told yet

    def add(self, sample: Sample, stats: Stats, told: bool) -> None:
        """One more sample. `told`: pages look, and will be told of it."""
        point = point_of(stats)
        self.track.add(sample.step, point)
        self.seen, self.step, self.stats = self.seen + 1, sample.step, stats
        self.newest = sample._replace(values=_NOTHING)
        if stats.nans or stats.infs:
            self.first_bad = sample.step if self.first_bad < 0 else self.first_bad
            self.last_bad, self.bad = sample.step, self.bad + 1
        if told:
            self.news_weight += 1
            self.news = point if self.news is None else merged(self.news, point, 1 / self.news_weight)

    def take_news(self) -> dict[str, Any]:
        """What happened since the last call, for JSON."""
        assert self.news is not None
        said = {**self.facts(), "point": packed(self.news), "weight": self.news_weight}
        self.forget_news()
        return said

    def forget_news(self) -> None:
        """Nobody looks any more."""
        self.news, self.news_weight = None, 0

    def whole(self) -> dict[str, Any]:
        """Everything about the row, for JSON."""
        return {**self.facts(), "history": self.track.as_data()}

    def facts(self) -> dict[str, Any]:
        """What the newest sample was, for JSON."""
        sample, stats = self.newest, self.stats
        assert sample is not None and stats is not None
        return {
            "id": self.identity,
            "name": self.name,
            "what": self.what,
            "seen": self.seen,
            "step": self.step,
            "dtype": sample.dtype,
            "shape": list(sample.shape),
            "size": sample.size,
            "thinned": sample.thinned,
            "scaled": sample.scaled,
            "numbers": [_rounded(getattr(stats, name)) for name in ("mean", "std", "least", "most", "norm", "zeros")],
            "wrong": [stats.nans, stats.infs, self.first_bad, self.last_bad, self.bad],
            "histogram": None if stats.histogram is None else _histogram(stats),
        }


_NOTHING = np.empty(0, np.float32)


def _rounded(number: float | None) -> float | None:
    return None if number is None or not np.isfinite(number) else float(f"{number:.5g}")


def _histogram(stats: Stats) -> list[Any]:
    assert stats.histogram is not None
    edges, counts = stats.histogram
    return [packed(np.clip(edges, -LARGEST, LARGEST)), list(counts)]


class History:
    """All rows, notes and alarms of a run."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.beyond: set[tuple[str, str]] = set()  # for which there is no room; at most as many as there are rows
        self.notes: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
        self.alarms: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
        self.alarms_seen = 0
        self.paused = False
        self.step = 0

    def sample(self, sample: Sample, stats: Stats, told: bool) -> Row | None:
        """One more sample; None if there are too many rows to show its own."""
        key = sample.name, sample.what
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= MOST_ROWS:
                if len(self.beyond) < MOST_ROWS:
                    self.beyond.add(key)
                return None
            row = self.rows[key] = Row(len(self.rows), *key)
        row.add(sample, stats, told)
        self.step = max(self.step, sample.step)
        return row

    def note(self, step: int, text: str) -> dict[str, Any] | None:
        """A mark on the axis of steps; None if it is the last one again (each sample carries the note of its time)."""
        if not text or (self.notes and self.notes[-1]["text"] == text):
            return None
        mark = {"step": step, "text": text}
        self.notes.append(mark)
        return mark

    def alarm(self, event: Event) -> dict[str, Any]:
        """An alarm, for JSON: its step, why, and the file of the step."""
        self.alarms_seen += 1
        texts = {name: str(event.facts.get(name) or "") for name in ("reason", "path", "name")}
        alarm = {"number": self.alarms_seen, "step": event.step, "time": event.time, **texts}
        self.alarms.append(alarm)
        return alarm

    def news(self) -> list[dict[str, Any]]:
        """What happened to the rows since the last call."""
        return [row.take_news() for row in self.rows.values() if row.news is not None]

    def forget_news(self) -> None:
        """Nobody looks any more."""
        for row in self.rows.values():
            row.forget_news()
