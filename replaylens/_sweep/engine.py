"""A chunk of variants in one pass: each joins at its own node, and every node runs once for all who have reached it.

In: a Machine, and variants, each a list of changes at positions. Out: what each variant makes of the values asked for.
Nothing is computed that no change can reach, that nobody reads, or whose row is as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen

from .._ir.copies import in_layout
from .._ir.node import Context, Guard, Input, Ref, filled, refs_in
from .._replay.flag_guards import OuterModes, ReplacedValues, is_like_an_input
from .._replay.guards import Departure, departure
from .._replay.interpreter import modes, recorded_world
from .._replay.layout_guards import geometry, layout_departures
from .._replay.request import Change
from .alignment import Alignment
from .batched_ops import BatchedOp, Departed, NotAlike
from .demand import Rows, taking
from .prepared_program import WORTH_PACKING, PreparedProgram
from .sparse_rows import Delta, Pairs, chosen, folded, joined, kept, lane_value, packed, stacked, without

Tensor = torch.Tensor
Deltas = Sequence[Delta | None]


@frozen(eq=False)
class Variant:
    """One set of changes: at which positions, what."""

    number: int
    changes: tuple[tuple[int, Change], ...]

    @property
    def first(self) -> int:
        return min(position for position, _ in self.changes)


@frozen(eq=False)
class Strategy:
    """How a step is run on values of certain forms: the rows that are alike, and whether to look for those that
    differ. `fits`: the values lie as they must already.
    """

    align: Alignment
    packs: bool
    fits: bool


def run(
    machine: PreparedProgram, variants: Sequence[Variant], departed: Callable[[int, Departure], None]
) -> dict[Ref, Delta]:
    """The ends' values of these variants, where they differ from the recorded ones. Variants that leave the recorded
    path are reported, and dropped.
    """
    with torch.no_grad(), recorded_world(machine.draws, machine.graph):
        return _Chunk(machine, variants, departed).run()


_UNKNOWN: Any = object()


class _Chunk:
    """The mutable state of one pass: `env` holds the values that differ, by slot."""

    def __init__(
        self, machine: PreparedProgram, variants: Sequence[Variant], departed: Callable[[int, Departure], None]
    ) -> None:
        self.machine, self.departed = machine, departed
        self.env: list[Delta | None] = [None] * len(machine.values)
        self.limited: dict[tuple[int, Rows], Any] = {}  # pairs that were cut to a demand already
        self.gone: set[int] = set()
        self.joins: dict[int, list[tuple[int, Change]]] = {}
        for variant in variants:
            for position, change in variant.changes:
                self.joins.setdefault(position, []).append((variant.number, change))

    def run(self) -> dict[Ref, Delta]:
        machine = self.machine
        cone, dying = machine.way(frozenset(self.joins))
        guards = sorted(machine.graph.guards, key=lambda guard: guard.position, reverse=True)
        calls, nodes = machine.graph.call_marks, machine.graph.nodes
        context: Context | None = None
        with ExitStack() as stack:
            for position in cone:
                while guards and guards[-1].position <= position:
                    self._ask(guards.pop())
                if calls[position]:
                    node = nodes[position]
                    if node.context is not context:  # type: ignore[union-attr]
                        stack.close()
                        context = node.context  # type: ignore[union-attr]
                        stack.enter_context(_modes_of(context))
                    self._execute(machine.step(position))
                if position in self.joins:
                    self._join(self.joins[position])
                for slot in dying.get(position, ()):
                    self.env[slot] = None
            while guards:
                self._ask(guards.pop())
        found = [(ref, self.env[machine.slot[ref]]) for ref in machine.ends]
        return {ref: delta for ref, delta in found if delta is not None}

    # -- running a node ------------------------------------------------------------------------------------------------

    def _execute(self, step: BatchedOp) -> None:
        env = self.env
        deltas = [env[slot] for slot in step.reads]
        for number in step.unread:
            deltas[number] = None
        if not any(deltas):
            return
        try:
            found = self._taken(step, deltas) if step.may_take else None
            if found is None:
                found = self._aligned(step, deltas)
            if found is None:
                found, at_once = step.whole(deltas)
                if not at_once:
                    self.machine.alone[step.node.name] = step.node.kind
        except Departed as error:
            self._drop(error.departures, error.departures.__getitem__)
            self._execute(step)
            return
        for slot, delta, result in zip(step.gives, found, step.results, strict=False):  # no rows, no values
            self._keep(slot, delta, result)

    def _keep(self, slot: int, delta: Delta, recorded: Tensor) -> None:
        """Remember a value, cut to what anybody reads of it."""
        wanted = self.machine.wanted
        if slot not in wanted:
            return
        rows = wanted[slot]
        if rows is not None:
            delta = self._cut(delta, rows, recorded)
        if len(delta.pairs):
            self.env[slot] = delta

    def _cut(self, delta: Delta, rows: Rows, recorded: Tensor) -> Delta:
        axis, numbers = rows
        if delta.axis is not None and delta.axis != axis and not delta.is_dense:
            return delta
        if delta.axis == axis and (id(delta.pairs), rows) in self.limited:
            return delta
        delta = chosen(delta, axis, recorded, numbers)
        self.limited[id(delta.pairs), rows] = delta.pairs
        return delta

    def _aligned(self, step: BatchedOp, deltas: Deltas) -> list[Delta] | None:
        """Run row by row, if there is a way that all changed values can take."""
        rows = self.machine.demanded(step)
        forms = [None if delta is None else (delta.axis, delta.pairs.codes is None) for delta in deltas]
        key = (self.machine.packs, rows and rows[0], *forms)
        route: Strategy | None = step.routes.get(key, _UNKNOWN)
        if route is _UNKNOWN:
            route = step.routes[key] = self._route(step, deltas)
        if route is None:
            return None
        align = route.align
        if rows is None and route.fits:
            return self._by_rows(step, align, deltas)
        ready = deltas if route.fits else self._laid(step, deltas, route)
        if rows is not None and rows[0] == align.outputs[0]:
            ready = [
                None if delta is None else self._cut(delta, (axis or 0, rows[1]), recorded)
                for delta, axis, recorded in zip(ready, align.operands, step.recorded, strict=True)
            ]
        found = self._by_rows(step, align, ready)
        if self.machine.scratch.lent:
            self.machine.scratch.take_back(found or ())
        return self._aligned(step, deltas) if found is None else found

    def _by_rows(self, step: BatchedOp, align: Alignment, deltas: Deltas) -> list[Delta] | None:
        try:
            return step.by_rows(align, deltas)
        except NotAlike:
            step.refute(align)
            return None

    def _route(self, step: BatchedOp, deltas: Deltas) -> Strategy | None:
        changed = [number for number, delta in enumerate(deltas) if delta is not None]
        possible = [align for align in step.alignments if all(align.operands[number] is not None for number in changed)]
        while possible:
            align, packs = self._best(step, possible, deltas, changed)
            if step.holds(align):
                fits = not packs and all(deltas[n].axis == align.operands[n] for n in changed)  # type: ignore[union-attr]
                return Strategy(align, packs, fits)
            possible.remove(align)
        return None

    def _best(
        self, step: BatchedOp, possible: list[Alignment], deltas: Deltas, changed: list[int]
    ) -> tuple[Alignment, bool]:
        """The way that keeps sparse values sparse; and whether dense ones are to be looked through for what differs."""
        axes = {number: delta.axis for number, delta in enumerate(deltas) if delta is not None}
        sparse = [number for number, delta in enumerate(deltas) if delta is not None and not delta.is_dense]
        costly = self.machine.packs and step.work >= WORTH_PACKING
        if (rows := self.machine.demanded(step)) is not None:
            for align in possible:
                if align.outputs[0] == rows[0]:
                    return align, False
        if sparse:
            for align in possible:
                if all(align.operands[number] == axes[number] for number in sparse):
                    return align, costly or len(sparse) < len(changed)
        elif costly:
            first = changed[0]
            sizes = [step.recorded[first].shape[align.operands[first] or 0] for align in possible]
            best = max(range(len(possible)), key=lambda n: (sizes[n], -n))
            if sizes[best] > 1:
                return possible[best], True
        for align in possible:
            if all((axes[number] or 0) == align.operands[number] for number in changed):
                return align, False
        return possible[0], False

    def _laid(self, step: BatchedOp, deltas: Deltas, route: Strategy) -> list[Delta | None]:
        """The values as the route wants them: sparse along its axes, or all rows of each variant."""
        found: list[Delta | None] = []
        for delta, axis, recorded in zip(deltas, route.align.operands, step.recorded, strict=True):
            if delta is None:
                found.append(None)
                continue
            assert axis is not None
            if route.packs and recorded.shape[axis] > 1 and (delta.is_dense or delta.axis != axis):
                found.append(packed(delta, axis, recorded))
            else:
                found.append(delta if delta.axis == axis else folded(delta, axis, recorded, self.machine.scratch))
        return found

    def _taken(self, step: BatchedOp, deltas: Deltas) -> list[Delta] | None:
        """An index that takes one row: only that row is looked at, and it is a whole value afterwards."""
        delta = deltas[0]
        if delta is None or delta.axis is None or delta.is_dense or (at := taking(step, delta.axis)) is None:
            return None
        row, take = at
        some = kept(delta, delta.pairs.rows == row)
        if not len(some.pairs):
            return []
        return [stacked(some.pairs.lanes, take(some.data.movedim(some.axis or 0, 0)))]

    # -- variants that join, and those that leave ---------------------------------------------------------------------

    def _join(self, changes: list[tuple[int, Change]]) -> None:
        """Variants whose change is here: the value as it is for them so far, changed."""
        machine = self.machine
        news: dict[int, list[tuple[int, Tensor]]] = {}
        for lane, change in sorted(changes, key=lambda pair: pair[0]) if len(changes) > 1 else changes:
            if lane not in self.gone:
                for slot, new in self._changed(lane, change):
                    if (departure := self._lies_otherwise(slot, new)) is not None:
                        self._drop((lane,), {lane: departure}.__getitem__)
                        continue
                    news.setdefault(slot, []).append((lane, new.detach() if new.requires_grad else new))
        for slot, pairs in news.items():
            recorded = machine.values[slot]
            lanes = tuple([lane for lane, _ in pairs])
            values = [new for _, new in pairs]
            axis = machine.row_axis(slot)
            if axis is not None and len(values) == 1 and not machine.packs:
                fresh = Delta(axis, Pairs(recorded.shape[axis], lanes, device=recorded.device), values[0])
            else:
                fresh = stacked(lanes, torch.stack(values))
                if axis is not None:
                    fresh = packed(fresh, axis, recorded) if machine.packs else folded(fresh, axis, recorded)
            old, self.env[slot] = self.env[slot], None
            left = without(old, lanes) if old is not None else None
            self._keep(slot, fresh if left is None else joined(left, fresh, recorded), recorded)

    def _changed(self, lane: int, change: Change) -> list[tuple[int, Tensor]]:
        if type(change.tree) is Ref:
            slot = self.machine.slot[change.tree]
            value = self._value(slot, lane)
            if self.machine.graph.asked:  # how it lies, too: a function of the user's is given it as it lay
                return [(slot, change.make(in_layout(value, self.machine.meanings[slot].strides)))]
            new = change.free(value)
            if not isinstance(new, Tensor) or new.shape != value.shape or new.dtype != value.dtype:
                new = change.make(value)  # raises, and says what is wrong
            return [(slot, new)]
        slots = [self.machine.slot[ref] for ref in refs_in(change.tree)]
        now = filled(change.tree, lambda ref: self._value(self.machine.slot[ref], lane))
        news = change.make(now)
        return list(zip(slots, news, strict=True))

    def _lies_otherwise(self, slot: int, new: Tensor) -> Departure | None:
        """Does the memory layout of a patched value lead away, or what else the model may ask of an input?"""
        has_attributes = bool(vars(new)) or bool(self.machine.graph.literals)
        own, known = is_like_an_input(new) or has_attributes, self.machine.values[slot]
        if (new.is_conj(), new.is_neg()) != (known.is_conj(), known.is_neg()):  # stacked, variants have no such marks
            return Departure("the mark of a conjugate or negative of a patched value", "one", "another")
        lies = geometry if self.machine.graph.asked else Tensor.stride
        if lies(new) == lies(known) and not own:
            return None
        ref = next(ref for ref, number in self.machine.slot.items() if number == slot)
        graph, values = self.machine.graph, self.machine.record.values
        if not own or not isinstance(graph[ref.node], Input):
            return next(layout_departures(graph, values, {ref: new}, up_to_rounding=True), None)
        instead = ReplacedValues(graph, values, OuterModes.of_replay(graph, False), frozenset((ref,)), {})
        return next(instead.departures(ref, values[ref], new), None)

    def _value(self, slot: int, lane: int) -> Tensor:
        recorded, delta = self.machine.values[slot], self.env[slot]
        return recorded if delta is None else lane_value(delta, lane, recorded)

    def _ask(self, guard: Guard) -> None:
        """Ask a guard again, for each variant that has another value there."""
        slots = [self.machine.slot[ref] for ref in guard.refs]
        lanes = {lane for slot in slots if (delta := self.env[slot]) is not None for lane in delta.pairs.lanes}
        found: dict[int, Departure] = {}
        for lane in sorted(lanes):
            value = partial(self._of, lane)
            if (left := departure(guard, value, lambda ref: self.machine.values[self.machine.slot[ref]])) is not None:
                found[lane] = left
        self._drop(found, found.__getitem__)

    def _of(self, lane: int, ref: Ref) -> Tensor:
        return self._value(self.machine.slot[ref], lane)

    def _drop(self, lanes: Iterable[int], why: Callable[[int], Departure]) -> None:
        gone = set(lanes)
        for lane in sorted(gone):
            self.departed(lane, why(lane))
        self.gone |= gone
        if gone:
            self.env = [None if delta is None else without(delta, gone) for delta in self.env]


def _modes_of(context: Context) -> Any:
    """The recorded autocast and kernels; gradients are off in a sweep."""
    return modes(evolve(context, grad=False, inference=False))
