"""The rows of the data as calls of the model, from any row on, as far as they are wanted.

In: a DataSource, what the model takes, and what the user says of it. Out: batches, each with the number of its first
row and the call that it makes. Data that can be gone through once give their first batch only once: it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from attrs import define, field, frozen

from .._ir.util import add_note
from ..errors import BadSource
from .data_source import DataSource, Stretch
from .model_inputs import Call, Forward, call_with


@frozen(eq=False)
class Batch:
    """A call of the model, and the number of its first row."""

    first: int
    call: Call

    @property
    def end(self) -> int:
        """The number of the row behind its last one."""
        return self.first + self.call.rows


@define(eq=False)
class BatchReader:
    """The data as batches. `limit` is how many rows are wanted, None for all."""

    source: DataSource
    forward: Forward
    inputs: Any = None
    limit: int | None = None
    _begun: Iterator[Batch] | None = field(default=None, init=False)

    @property
    def total(self) -> int | None:
        """The number of rows, where it is known beforehand."""
        return self.source.total if self.limit is None else self.limit

    def again(self) -> BatchReader:
        """One that has read nothing, to be sent elsewhere."""
        return BatchReader(self.source, self.forward, self.inputs, self.limit)

    def first(self) -> Batch:
        """The first batch. What was begun with it is gone on with."""
        batches = self._batches(0, self.limit)
        found = next(batches, None)
        if found is None:
            raise BadSource("the data have no rows.")
        self._begun = chain([found], batches)
        return found

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The batches that hold these rows, in order; the first may begin before `start`."""
        if self._begun is not None and (start == 0 or self.source.is_one_pass):
            batches, self._begun = self._begun, None
        else:
            self._begun = None  # a loader's workers end here
            batches = self._batches(start, stop)
        for batch in batches:
            if stop is not None and batch.first >= stop:
                return
            yield batch

    def _batches(self, start: int, stop: int | None) -> Iterator[Batch]:
        given, row = self.source.batches(start, stop), start
        while self.limit is None or row < self.limit:
            try:
                stretch = next(given, None)
            except Exception as error:
                add_note(error, f"replaylens: raised by the data, for the batch that begins at row {row} or before.")
                raise
            if stretch is None:
                self._require_all(row)
                return
            batch = self._batch(stretch)
            row = batch.end
            if batch.call.rows:
                yield batch

    def _batch(self, stretch: Stretch) -> Batch:
        return Batch(stretch.first, call_with(stretch.given, self.forward, self.inputs, stretch.rows))

    def _require_all(self, row: int) -> None:
        """Raise if data that ended here were said to have more rows."""
        if self.source.is_one_pass and self.limit is not None:
            raise BadSource(f"the data ended after {row} rows, and total={self.limit} were announced.")


def reader_of(source: DataSource, forward: Forward, inputs: Any, limit: int | None) -> BatchReader:
    """The reader of so many rows of the data."""
    if limit is not None:
        if type(limit) is not int or limit < 1:
            raise ValueError(f"total= is a number of rows, not {limit!r:.60}.")
        if source.total is not None and limit > source.total:
            raise BadSource(f"total={limit} rows are asked for, and the data have {source.total}.")
    return BatchReader(source, forward, inputs, limit)
