"""A record made ready for many variants: slots, batched ops, and what is read of each value.

In: a Record, and the values asked for. Out: for positions that change, the cone that they reach, and each node of it
ready to run. Built once for a sweep; facts about a node are found when they are first needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import define, field

from .._ir.graph import Graph
from .._ir.node import Call, Ref, specs_of
from .._replay.record import Record
from .batched_ops import BatchedOp, step_of
from .demand import Demand, Rows, demand
from .sparse_rows import Scratch

WORTH_PACKING = 5e5  # multiplications: below this, looking for the rows that differ costs more than multiplying them


@define(eq=False)
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
    cones: dict[frozenset[int], Any] = field(factory=dict)
    sizes: tuple[list[float], list[float]] | None = None  # of values, by position: see chunks.py
    packs: bool = False  # looking for the rows that differ pays somewhere below the changes
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

    @property
    def graph(self) -> Graph:
        return self.record.graph

    def step(self, position: int) -> BatchedOp:
        """The batched op at a position, made when it is first needed."""
        found = self.steps[position]
        if found is None:
            node = self.graph.nodes[position]
            assert isinstance(node, Call)
            found = self.steps[position] = step_of(node, self.slot, self.values, self.meanings, self.record.draws)
        return found

    def cone(self, positions: Iterable[int]) -> list[int]:
        """The positions that changes at these can reach and that the ends need, in order."""
        graph, needed, marks = self.graph, self.needed, bytearray(len(self.graph))
        reached = graph.reached
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

    def prepare(self, positions: Iterable[int]) -> None:
        """Finds what is read of each value, for all changes to come."""
        self.alone.clear()
        places = frozenset(positions)
        if places == self.prepared:
            return
        self.prepared = places
        cone = self.cone(places)
        ends = [self.slot[ref] for ref in (*self.ends, *(ref for guard in self.graph.guards for ref in guard.refs))]
        self.wanted = demand(self.graph, reversed(cone), ends, self.step)
        changing = {slot for position in cone for slot in self.gives(position)}
        self.packs = any(self._is_costly(p, changing) for p in cone if self.graph.call_marks[p])
        self.axes.clear()
        self.sizes = None

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
