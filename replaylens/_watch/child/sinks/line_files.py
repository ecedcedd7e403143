"""Samples as lines of a file: JSON Lines and CSV.

In: samples with their numbers. Out: one line each, written at once, so that a reader of the file sees whole lines at
any time, and after any end.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

from ..statistics import Stats
from ..wire import Event, Sample
from .new_files import NewFile

QUANTILES = "q05 q25 q50 q75 q95".split()
COLUMNS = (
    "step name what number time dtype shape size thinned mean std least most norm nans infs zeros".split()
    + QUANTILES
    + ["scaled", "note"]
)


class JsonLines:
    """A JSON object per sample, and per event: only these have the key `"event"`, as in `{"event": "alarm", "step": 7,
    "time": ..., "facts": {...}}`. In pandas, `df[df.event.isna()]` are the samples. What is not finite is null.
    """

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        self._file = NewFile(options["path"])
        self.path = self._file.path

    def sample(self, sample: Sample, stats: Stats) -> None:
        self._write(record(sample, stats))

    def event(self, event: Event) -> None:
        self._write({"event": event.kind, "step": event.step, "time": event.time, "facts": plain(event.facts)})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.append(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None: ...

    def close(self) -> None:
        self._file.close()


class CommaSeparated:
    """A row per sample, under the same columns from the first line to the last. Events are not in it."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        self._file = NewFile(options["path"])
        self.path = self._file.path
        self._write(COLUMNS)

    def sample(self, sample: Sample, stats: Stats) -> None:
        facts = record(sample, stats)
        facts["shape"] = "x".join(map(str, facts["shape"]))
        facts.update(zip(QUANTILES, facts.pop("quantiles") or (None,) * 5, strict=True))
        self._write([facts.get(column) for column in COLUMNS])

    def _write(self, cells: list[Any]) -> None:
        line = io.StringIO()
        csv.writer(line).writerow(cells)
        self._file.append(line.getvalue().encode(errors="backslashreplace"))

    def event(self, event: Event) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        self._file.close()


def record(sample: Sample, stats: Stats) -> dict[str, Any]:
    """A sample as a line: which it is, then its numbers."""
    facts: dict[str, Any] = {
        "step": sample.step,
        "name": sample.name,
        "what": sample.what,
        "number": sample.number,
        "time": round(sample.time, 3),
        "dtype": sample.dtype,
        "shape": list(sample.shape),
        "size": sample.size,
        "thinned": sample.thinned,
    }
    numbers = stats._asdict()
    del numbers["histogram"]
    return {**facts, **numbers, "scaled": sample.scaled, "note": sample.note}


def plain(value: Any) -> Any:
    """Anything as JSON can have it. Numbers that are not finite are text here: that an alarm's is NaN is the news."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
