"""A record made ready for many variants: slots, batched ops, and which rows of each value anybody reads.

In: a Record, and the values asked for. Out: for positions that change, the cone that they reach, and each node of it
ready to run; for each value either None, if all of it is read, or an axis and its rows, found by walking back from the
ends. An index such as `logits[:, -1]` starts a demand, and operations that treat rows alike pass it on to their
operands. Built once for a sweep; facts about a node are found when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import torch
from attrs import define, field

from .._ir.graph import Graph
from .._ir.node import Call, Ref, specs_of
from .._ir.util import cached_property
from .._replay.record import Record
from .batched_ops import BatchedOp, asks_for_layout, batched_op
from .narrowed_product import NarrowedProduct, narrowed_product
from .sparse_rows import Scratch

WORTH_PACKING = 5e5  # multiplications: below this, looking for the rows that differ costs more than multiplying them


@define(eq=False, slots=False)
class PreparedProgram:
    """A record made ready for many chunks of variants."""

    record: Record
    ends: tuple[Ref, ...]
    slot: dict[Ref, int] = field(init=False)
    refs: list[Ref] = field(init=False)  # by slot, as the next three
    values: list[torch.Tensor] = field(init=False)
    meanings: list[Any] = field(init=False)
    steps: list[BatchedOp | None] = field(init=False)
    needed: bytearray = field(init=False)
    draws: bool = field(init=False)
    wanted: Demand = field(factory=dict)
    prepared: frozenset[int] = frozenset()  # the positions that all this is prepared for
    made: dict[Any, PreparedProgram] = field(factory=dict)  # by what it was prepared for
    cones: dict[frozenset[int], Any] = field(factory=dict)
    totals: list[Any] = field(factory=list)  # sums over what all this is prepared for: see sweep_plan.py
    apart: dict[int, float] = field(factory=dict)  # by position: see sweep_plan.py
    packs: bool = False  # looking for the rows that differ pays somewhere below the changes
    narrowed: NarrowedProduct | None = None
    axes: dict[int, int | None] = field(factory=dict)  # of a slot: the axis along which its readers treat rows alike
    scratch: Scratch = field(factory=Scratch)
    alone: dict[str, str] = field(factory=dict)  # nodes that ran variant by variant, and their kinds

    def __attrs_post_init__(self) -> None:
        graph, record = self.graph, self.record
        self.slot = {ref: number for number, ref in enumerate(record.values)}
        self.refs = list(record.values)
        self.values = record.steady_values()
        by_ref = {ref: meaning for node in graph.nodes for ref, meaning in specs_of(node).items()}
        self.meanings = [by_ref.get(ref) for ref in record.values]
        self.steps = [None] * len(graph)
        reads = {ref.node for ref in (*self.ends, *(ref for guard in graph.guards for ref in guard.refs))}
        self.needed = graph.marked_ancestors(reads)
        self.draws = any(call.draws is not None for call in graph.calls)

    @cached_property
    def layout_readers(self) -> frozenset[str]:
        """The names of the calls that may give other numbers where their operands lie otherwise."""
        return frozenset([call.name for call in self.graph.calls if asks_for_layout(call)])

    @property
    def graph(self) -> Graph:
        return self.record.graph

    def step(self, position: int) -> BatchedOp:
        """The batched op at a position, made when it is first needed."""
        found = self.steps[position]
        if found is None:
            node = self.graph.nodes[position]
            assert isinstance(node, Call)
            found = self.steps[position] = batched_op(node, self.slot, self.values, self.meanings, self.record.draws)
        return found

    def cone(self, positions: Iterable[int]) -> list[int]:
        """The positions that changes at these can reach and that the ends need, in order."""
        graph, needed, marks = self.graph, self.needed, bytearray(len(self.graph))
        reached = graph.dependents
        for position in positions:
            marks[position] = 1
        for position in range(marks.find(1), len(graph)):
            if marks[position]:
                for user in reached[position]:
                    if needed[user] and not marks[user] and self._reads_content(user, position):
                        marks[user] = 1
        return [position for position, mark in enumerate(marks) if mark and needed[position]]

    def _reads_content(self, user: int, position: int) -> bool:
        """True if a call reads the content of a node, and not only its shape."""
        node = self.graph.nodes[user]
        short = node.target.name if isinstance(node, Call) else ""
        if not short.endswith(("_like", "_as")) and ".new_" not in short:
            return True
        step, name = self.step(user), self.graph.nodes[position].name
        mine = {self.slot[ref] for ref in self.graph.refs[user] if ref.node == name}
        return any(read in mine and number not in step.unread for number, read in enumerate(step.reads))

    def prepared_for(self, positions: Iterable[int], read_by_changes: Iterable[Ref] = ()) -> PreparedProgram:
        """The same program, where what is read of each value is known, for all changes at these positions.
        `read_by_changes`: values that changes are made of, and that earlier changes may reach.

        Each sweep has one of its own: another one may run in between, in a thread, or in a metric or patch.
        """
        key = frozenset(positions), frozenset(read_by_changes)
        known = self.made.get(key)
        if known is None:
            known = copy(self)
            known.axes, known.apart, known.totals, known.made = {}, {}, [], {}
            known._prepare(*key)
            if len(self.made) >= 4:
                self.made.pop(next(iter(self.made)), None)
            self.made[key] = known
        mine = copy(known)
        mine.alone = {}
        return mine

    def with_own_memory(self) -> PreparedProgram:
        """The same for one run."""
        mine = copy(self)
        mine.scratch = Scratch()
        return mine

    def _prepare(self, places: frozenset[int], whole: frozenset[Ref]) -> None:
        self.prepared = places
        cone, _ = self.cone_of(places)
        guarded = [ref for guard in self.graph.guards for ref in guard.refs]
        ends = [self.slot[ref] for ref in (*self.ends, *guarded, *whole)]
        self.wanted = demand(self.graph, reversed(cone), ends, self.step)
        changing = {slot for position in cone for slot in self.gives(position)}
        self.packs = any(self._is_costly(p, changing) for p in cone if self.graph.call_marks[p])
        self.narrowed = self._narrowed(cone, changing, ends) if self.packs else None

    def _is_costly(self, position: int, changing: set[int]) -> bool:
        """True for a matrix product that is worth computing on some of its rows alone."""
        step = self.step(position)
        if step.work < WORTH_PACKING:
            return False
        return any(
            step.has_rows(number, axis)
            for number, (slot, value) in enumerate(zip(step.reads, step.recorded, strict=True))
            if slot in changing
            for axis, size in enumerate(value.shape)
            if size > 1
        )

    def _narrowed(self, cone: Sequence[int], changing: set[int], ends: Sequence[int]) -> NarrowedProduct | None:
        """The last costly product, if only some of its columns are read: of an unembedding, those of a few words."""
        calls = [position for position in reversed(cone) if self.graph.call_marks[position]]
        last = next((position for position in calls if self.step(position).work >= max(WORTH_PACKING, 1)), None)
        if last is None:
            return None
        step, later = self.step(last), [position for position in calls if position > last]
        columns = demand(self.graph, later, ends, self.step, by=-1).get(step.gives[0])
        if columns is None:
            return None
        fixed = [number for number, slot in enumerate(step.reads) if slot not in changing]
        return narrowed_product(step, *columns, fixed)

    def gives(self, position: int) -> tuple[int, ...]:
        """The slots of what a node gives."""
        node = self.graph.nodes[position]
        return self.step(position).gives if isinstance(node, Call) else (self.slot[Ref(node.name)],)

    def demanded(self, step: BatchedOp) -> Rows | None:
        """The rows that are read of everything an op gives."""
        if len(step.gives) == 1:
            return self.wanted.get(step.gives[0])
        asked = [self.wanted[given] for given in step.gives if given in self.wanted]
        return asked[0] if asked and all(rows == asked[0] for rows in asked) else None

    def cone_of(self, positions: frozenset[int]) -> tuple[list[int], dict[int, list[int]]]:
        """The cone of changes at these positions, with its deaths; cached, since sweeps repeat."""
        found = self.cones.get(positions)
        if found is None:
            cone = self.cone(positions)
            if len(self.cones) >= 64:
                self.cones.clear()
            found = self.cones[positions] = cone, self.deaths(cone)
        return found

    def deaths(self, cone: Sequence[int]) -> dict[int, list[int]]:
        """After each position of a cone, the slots that nobody reads any more."""
        last: dict[int, int] = {}
        for position in cone:
            if self.graph.call_marks[position]:
                for slot in self.step(position).reads:
                    last[slot] = position
        for ref in (*self.ends, *(ref for guard in self.graph.guards for ref in guard.refs)):
            last.pop(self.slot[ref], None)
        dying: dict[int, list[int]] = {}
        for slot, position in last.items():
            dying.setdefault(position, []).append(slot)
        return dying

    def row_axis(self, slot: int) -> int | None:
        """The axis along which the readers of a value treat rows alike: the longest one if rows are packed."""
        if slot not in self.axes:
            self.axes[slot] = self._row_axis(slot)
        return self.axes[slot]

    def _row_axis(self, slot: int) -> int | None:
        readers: list[tuple[BatchedOp, int]] = []
        for user in self.graph.users[self.graph.positions[self.refs[slot].node]]:
            step = self.step(user) if self.needed[user] else None
            if step is not None and slot in step.reads:
                readers.append((step, step.reads.index(slot)))
        shape = self.values[slot].shape
        axes = sorted(range(len(shape)), key=lambda axis: (-shape[axis] if self.packs else 0, axis))
        for axis in axes:  # most often there is one that all have: to know of the others costs proofs
            if readers and all(step.has_rows(number, axis) for step, number in readers):
                return axis
        found = False
        for step, number in readers:
            if mine := [axis for axis in axes if step.has_rows(number, axis)]:
                axes, found = mine, True
        return axes[0] if found else None


Tensor = torch.Tensor

Rows = tuple[int, tuple[int, ...]]  # an axis and row numbers along it
Demand = dict[int, Rows | None]  # by slot; None: all of it


def demand(
    graph: Graph, positions: Iterable[int], ends: Iterable[int], step_at: Callable[[int], BatchedOp], by: int = 0
) -> Demand:
    """What is read of each value that the ends need. `positions` are those that may change, in descending order. `by`:
    along the first or the last axis where a view selects some.
    """
    found: Demand = dict.fromkeys(ends)
    for position in positions:
        if not graph.call_marks[position]:
            continue
        step = step_at(position)
        wanted = [found[given] for given in step.gives if given in found]
        if wanted:
            for number, rows in enumerate(_operand_rows(step, wanted, by)):
                if number not in step.unread:
                    _merge(found, step, number, rows)
    return found


def _operand_rows(step: BatchedOp, wanted: list[Rows | None], by: int) -> Sequence[Rows | None]:
    """What an op reads of each operand, if these rows of its outputs are wanted. Of a view that selects some itself, it
    may be either: of `logits[:, -1][:, word]` the position comes first, the word last.
    """
    first, taken = wanted[0], selected_rows(step, by)
    if first is not None and all(rows == first for rows in wanted):
        for align in step.alignments:
            if set(align.outputs) == {first[0]} and step.holds(align):
                found = [None if axis is None else (axis, first[1]) for axis in align.operands]
                if taken is None or found[0] is None or sorted((found[0][0], taken[0]))[by] == found[0][0]:
                    return found
                break
    return [taken, *[None] * (len(step.reads) - 1)] if step.reads else []


def selected_rows(step: BatchedOp, by: int = 0) -> Rows | None:
    """The rows that a view selects, along the first axis where it selects some and not all; by -1, along the last."""
    if not step.may_take:
        return None
    if step.signature.taken is None:
        found: list[Rows] = []
        for axis, at in enumerate(places := _source_positions(step) or ()):
            marks = torch.zeros(step.recorded[0].shape[axis], dtype=torch.bool, device=at.device)
            marks[at] = True
            if not bool(marks.all()):
                found.append((axis, tuple(marks.nonzero().flatten().tolist())))
        step.signature.taken = found, bool(places)
    taken: list[Rows] = step.signature.taken[0]
    return taken[by] if taken else None


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


def row_view(step: BatchedOp, axis: int) -> tuple[int, Callable[[Tensor], Tensor]] | None:
    """For a view of one row along an axis: that row, and the view of several such rows stacked in front."""
    selected_rows(step)
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
