"""Which rows of each value anybody reads, found by walking back from the ends.

In: batched ops, and the values asked for. Out: for each value either None, if all of it is read, or an axis and its
rows. An index such as `logits[:, -1]` starts a demand, and operations that treat rows alike pass it on to their
operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .._ir.graph import Graph
from .batched_ops import BatchedOp

Tensor = torch.Tensor

Rows = tuple[int, tuple[int, ...]]  # an axis and row numbers along it
Demand = dict[int, Rows | None]  # by slot; None: all of it


def demand(graph: Graph, positions: Iterable[int], ends: Iterable[int], step_at: Callable[[int], BatchedOp]) -> Demand:
    """What is read of each value that the ends need. `positions` are those that may change, in descending order."""
    found: Demand = dict.fromkeys(ends)
    for position in positions:
        if not graph.call_marks[position]:
            continue
        step = step_at(position)
        wanted = [found[given] for given in step.gives if given in found]
        if wanted:
            for number, rows in enumerate(_operand_rows(step, wanted)):
                if number not in step.unread:
                    _merge(found, step, number, rows)
    return found


def _operand_rows(step: BatchedOp, wanted: list[Rows | None]) -> Sequence[Rows | None]:
    """What an op reads of each operand, if these rows of its outputs are wanted."""
    first = wanted[0]
    if first is not None and all(rows == first for rows in wanted):
        for align in step.alignments:
            if set(align.outputs) == {first[0]} and step.holds(align):
                return [None if axis is None else (axis, first[1]) for axis in align.operands]
    return [taken_rows(step), *[None] * (len(step.reads) - 1)] if step.reads else []


def taken_rows(step: BatchedOp) -> Rows | None:
    """The rows that a view selects, along the first axis where it selects some and not all."""
    if not step.may_take:
        return None
    if step.signature.taken is None:
        found: Rows | None = None
        for axis, at in enumerate(places := _source_positions(step) or ()):
            marks = torch.zeros(step.recorded[0].shape[axis], dtype=torch.bool, device=at.device)
            marks[at] = True
            if found is None and not bool(marks.all()):
                found = axis, tuple(marks.nonzero().flatten().tolist())
        step.signature.taken = found, bool(places)
    rows: Rows | None = step.signature.taken[0]
    return rows


def _merge(found: Demand, step: BatchedOp, number: int, rows: Rows | None) -> None:
    slot, shape = step.reads[number], step.recorded[number].shape
    if slot in found:
        before = found[slot]
        if before is None or rows is None or before[0] != rows[0]:
            rows = None
        else:
            rows = before[0], tuple(sorted({*before[1], *rows[1]}))
    if rows is not None and len(rows[1]) >= shape[rows[0]]:
        rows = None
    found[slot] = rows


def taking(step: BatchedOp, axis: int) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """For a view of one row along an axis: that row, and the view of several such rows stacked in front."""
    taken_rows(step)
    places = _source_positions(step) if step.signature.taken[1] else None
    if places is None or not bool((places[axis] == (row := int(places[axis][0]))).all()):
        return None
    shape, result = step.recorded[0].shape, step.results[0]
    inner = torch.zeros_like(places[axis])
    for number, at in enumerate(places):
        inner = inner if number == axis else inner * shape[number] + at

    def take(rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), -1).index_select(1, inner).reshape(len(rows), *result.shape)

    return row, take


def _source_positions(step: BatchedOp) -> list[Tensor] | None:
    """For each element of a view, its position in the operand, by axis; None if the op gives no view."""
    (value,), (result,) = step.recorded, step.results
    given = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    try:
        (found,) = step.parts(step.call([given]))
    except Exception:  # not even in this layout
        return None
    if (found.shape, found.dtype) != (result.shape, value.dtype) or _storage(found) != _storage(given):
        return None
    flat = torch.tensor(found.storage_offset(), device=value.device)
    for size, stride in zip(found.shape, found.stride(), strict=True):
        flat = flat.unsqueeze(-1) + torch.arange(size, device=value.device) * stride
    return [flat.flatten() // stride % size for size, stride in zip(given.shape, given.stride(), strict=True)]


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
