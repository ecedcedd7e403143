"""What a batch gives as arrays, and batches as shards.

In: the values of one batch after another. Out: the arrays of one shard after another, each whole. A batch that reaches
over the end of a shard is cut: how it was computed does not depend on where shards begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from attrs import define, field, frozen

from ..errors import BadSource
from .batch_reader import Batch
from .extraction_plan import ArrayPlan, Plan, array_dtype, as_array
from .layer_values import LayerValues
from .model_inputs import Call
from .numpy_later import np

Array: TypeAlias = "np.ndarray[Any, Any]"


@frozen(eq=False)
class BatchValues:
    """What a batch gives: rows of each array; and whether the model had to run for it."""

    arrays: Mapping[str, Array]
    is_rerun: bool


@frozen(eq=False)
class Shard:
    """The rows of a shard."""

    number: int
    arrays: Mapping[str, Array]
    reruns: int


def values_of(values: LayerValues, batch: Batch, plan: Plan) -> BatchValues:
    """What a batch gives, as it is stored."""
    return as_stored(*values(batch.call, batch.first), batch.call, plan)


def as_stored(tensors: Mapping[str, torch.Tensor], is_rerun: bool, call: Call, plan: Plan) -> BatchValues:
    """The values of layers for a batch as they are stored. Raises if they do not fit the arrays that were begun."""
    planned = {one.name: one for one in plan.arrays}
    labels = {name: label for name, label in call.labels.items() if name in planned}
    if missing := [name for name in planned if name not in tensors and name not in labels]:
        raise BadSource(
            f"{missing[0]!r} is in the first batch, and not in this one. Each batch must have the same parts."
        )
    for name, tensor in tensors.items():
        _require_fit(planned.get(name), name, tensor, call.rows)
    arrays = {name: as_array(tensor) for name, tensor in tensors.items()}
    return BatchValues(arrays | {name: _label(planned[name], label) for name, label in labels.items()}, is_rerun)


def require_rows(name: str, tensor: torch.Tensor, rows: int) -> None:
    """Raise unless the first axis of what is stored of a layer are the rows of the batch."""
    if tensor.dim() and len(tensor) == rows:
        return
    raise BadSource(
        f"{name} gives {tuple(tensor.shape)} for a batch of {rows} rows: its first axis is not that of the rows. Make "
        f"it so by reduce={{{name!r}: lambda value: ...}}, or leave the layer out."
    )


def _require_fit(one: ArrayPlan | None, name: str, tensor: torch.Tensor, rows: int) -> None:
    if one is None:
        raise BadSource(f"this batch gives {name!r}, which the first one did not.")
    require_rows(name, tensor, rows)
    shape, (dtype, computed) = tuple(tensor.shape[1:]), array_dtype(tensor, name)
    if shape != one.shape:
        raise BadSource(
            f"{name} gives {shape} for each row of this batch, and {one.shape} for those of the first. Reduce the axis "
            'that differs (reduce="b t d -> b d"), or give batches of one size: padded, or cut.'
        )
    if (dtype, computed) != (one.dtype, one.computed_as):
        raise BadSource(
            f"{name} gives {computed} in this batch, and {one.computed_as} in the first. Say dtype= for it."
        )


def _label(one: ArrayPlan, label: Array) -> Array:
    if label.dtype.name != one.dtype:
        raise BadSource(f"{one.name!r} is {label.dtype.name} in this batch, and {one.dtype} in the first.")
    return label


@define(eq=False)
class OpenShard:
    """A shard that is being filled."""

    rows: range
    arrays: dict[str, Array]
    filled: int = 0
    reruns: int = 0


@define(eq=False)
class ShardBuilder:
    """Batches in order, as shards. Arrays are used again once the next shard is asked for."""

    plan: Plan
    is_done: Callable[[int], bool]
    _open: dict[int, OpenShard] = field(factory=dict, init=False)
    _spare: list[dict[str, Array]] = field(factory=list, init=False)

    def wants(self, first: int, end: int) -> bool:
        """True if some of these rows are in a shard that is not done."""
        return any(not self.is_done(shard) for shard in self._shards(first, end))

    def add(self, first: int, batch: BatchValues) -> Iterator[Shard]:
        """Takes the rows of a batch; the shards that it fills."""
        end = first + len(next(iter(batch.arrays.values())))
        for number in self._shards(first, end):
            if self.is_done(number):
                continue
            made = self._open.setdefault(number, self._new(number)) if number not in self._open else self._open[number]
            begin, stop = max(first, made.rows.start), min(end, made.rows.stop)
            if begin != made.rows.start + made.filled:
                raise BadSource(f"the data give row {begin} where row {made.rows.start + made.filled} is due.")
            for name, array in made.arrays.items():
                array[begin - made.rows.start : stop - made.rows.start] = batch.arrays[name][
                    begin - first : stop - first
                ]
            made.filled += stop - begin
            made.reruns += batch.is_rerun and made.rows.start <= first
            if made.filled == len(made.rows):
                yield self._closed(number)

    def rest(self) -> Iterator[Shard]:
        """The shard that the end of the data has left open."""
        for number in sorted(self._open):
            yield self._closed(number)

    def _shards(self, first: int, end: int) -> range:
        size = self.plan.shard_rows
        last = end if self.plan.total is None else min(end, self.plan.total)
        return range(first // size, -(-last // size))

    def _new(self, number: int) -> OpenShard:
        rows = self.plan.rows_of(number)
        if self._spare:
            return OpenShard(rows, self._spare.pop())
        size = self.plan.shard_rows if self.plan.total is None else min(self.plan.shard_rows, self.plan.total)
        return OpenShard(rows, {one.name: np.empty((size, *one.shape), one.dtype) for one in self.plan.arrays})

    def _closed(self, number: int) -> Shard:
        made = self._open.pop(number)
        self._spare.append(made.arrays)
        return Shard(number, {name: array[: made.filled] for name, array in made.arrays.items()}, made.reruns)
