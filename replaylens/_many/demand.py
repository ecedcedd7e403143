"""Which rows of each value anybody reads, walking back from what is asked for.

In: steps, and the values asked for. Out: for a value either nothing (all of it is read), or an axis and its rows. A
number in an index begins a demand (`logits[:, -1]`), and operations that treat rows alike hand it on to what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._core.graph import Graph
from .._core.trees import Branch
from .rules import is_whole_slice, positive, whole_index
from .steps import Step

Rows = tuple[int, tuple[int, ...]]  # an axis and row numbers along it
Demand = dict[int, Rows | None]  # by slot; None: all of it


def demand(graph: Graph, positions: Iterable[int], ends: Iterable[int], step_at: Callable[[int], Step]) -> Demand:
    """What is read of each value that one of the ends needs. `positions` are those that may change, last one first."""
    found: Demand = dict.fromkeys(ends)
    for position in positions:
        if not graph.call_marks[position]:
            continue
        step = step_at(position)
        asked = [found[given] for given in step.gives if given in found]
        if asked:
            for number, rows in enumerate(_read(step, asked)):
                if number not in step.unread:
                    _add(found, step, number, rows)
    return found


def _read(step: Step, asked: list[Rows | None]) -> Sequence[Rows | None]:
    """What a step reads of each of its refs, when this is asked of its outputs."""
    first = asked[0]
    if first is not None and all(rows == first for rows in asked):
        for align in step.alignments:
            if set(align.outputs) == {first[0]} and step.holds(align):
                return [None if axis is None else (axis, first[1]) for axis in align.operands]
    return [taken_rows(step), *[None] * (len(step.reads) - 1)] if step.reads else []


def taken_rows(step: Step) -> Rows | None:
    """The rows that an index takes: numbers and slices, along the first axis where they leave something out."""
    node, name = step.node, step.like.name
    if name not in ("getitem", "select") or len(step.reads) != 1 or len(node.args) < (3 if name == "select" else 2):
        return None
    shape = step.recorded[0].shape
    if name == "select":
        axis = positive(int(node.args[1]), len(shape))
        return (axis, (positive(int(node.args[2]), shape[axis]),)) if shape[axis] > 1 else None
    try:
        index = [item for item in whole_index(node.args[1], len(shape)) if item is not None]
    except TypeError:
        return None
    for axis, item in enumerate(index):
        if type(item) is int and shape[axis] > 1:
            return axis, (positive(item, shape[axis]),)
        if isinstance(item, Branch) and not is_whole_slice(item, shape[axis]):
            rows = tuple(range(shape[axis])[slice(*item.items)])
            if rows and all(bound is None or type(bound) is int for bound in item.items):
                return axis, rows
    return None


def _add(found: Demand, step: Step, number: int, rows: Rows | None) -> None:
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


def taking(step: Step, axis: int) -> tuple[int, Any] | None:
    """For an index with a number at this axis: the row that it takes, and the index of what is left, with the rows'
    own axis in front.
    """
    node, shape = step.node, step.recorded[0].shape if step.recorded else ()
    if step.like.name != "getitem" or len(step.reads) != 1:
        return None
    try:
        index = whole_index(node.args[1], len(shape))
    except TypeError:
        return None
    rest, place = [], -1
    for item in index:
        place += item is not None
        if place != axis or item is None:
            rest.append(slice(*item.items) if isinstance(item, Branch) else item)
        elif type(item) is not int:
            return None
    number = [item for item in index if item is not None][axis]
    return positive(number, shape[axis]), (slice(None), *rest)
