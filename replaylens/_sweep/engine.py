"""A chunk of variants in one pass: each starts at its own nodes, and every node runs once for all variants that have
reached it.

In: a PreparedProgram, and variants, each a list of changes at positions. Out: what each variant makes of the values
asked for. Values that no change can reach, that nobody reads, or whose row is as recorded are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._edit.patch import calls_functions, is_by_number, keeps_layout
from .._ir.memory import overlaps_itself, with_layout_of
from .._ir.node import Context, Guard, Input, Ref, filled, refs_in
from .._replay.flag_guards import OuterModes, ReplacedValues, has_input_attributes
from .._replay.guards import Departure, departure
from .._replay.interpreter import modes, recorded_environment
from .._replay.layout_guards import LayoutReaders, geometry, layout_departures
from .._replay.request import Change
from .._replay.rng_stream import as_the_user
from .alignment import Alignment
from .batched_ops import BatchedOp, RowsDiffer, ShapesDeparted
from .prepared_program import WORTH_PACKING, PreparedProgram, Rows, row_view
from .sparse_rows import Delta, Pairs, chosen, folded, joined, lane_value, marked_pairs, packed, stacked, without_lanes

Tensor = torch.Tensor
Deltas = Sequence[Delta | None]


@frozen(eq=False)
class Variant:
    """One set of changes: at which positions, which."""

    number: int
    changes: tuple[tuple[int, Change], ...]
    first: int = field(init=False)  # the position of the first change, if there is any

    @first.default
    def _first(self) -> int:
        return min([position for position, _ in self.changes], default=0)

    @property
    def read_by_changes(self) -> list[Ref]:
        """The values that later changes are made of, all of them and not only number by number."""
        later = [change for position, change in self.changes if position > self.first]
        return [ref for change in later if not is_by_number(change.what) for ref in refs_in(change.tree)]

    @property
    def changed(self) -> dict[int, tuple[Change, ...]]:
        """The changes by position."""
        found: dict[int, tuple[Change, ...]] = {}
        for position, change in self.changes:
            found[position] = (*found.get(position, ()), change)
        return found


@frozen(eq=False)
class Strategy:
    """How an op runs on Deltas of certain forms: the alignment, and whether to search dense values for the rows that
    differ. `fits`: the Deltas already lie along its axes.
    """

    align: Alignment
    packs: bool
    fits: bool


def run_chunk(
    program: PreparedProgram,
    variants: Sequence[Variant],
    departed: Callable[[int, Departure], None],
    layout_ends: frozenset[Ref] = frozenset(),
) -> dict[Ref, Delta]:
    """The ends' values of these variants, where they differ from the recorded ones. Variants that leave the recorded
    path are reported, and dropped; so are those in which one of `layout_ends` lies otherwise in memory.
    """
    with torch.no_grad(), recorded_environment(program.draws, program.graph):
        return _Chunk(program, variants, departed, layout_ends).run()


_UNKNOWN: Any = object()


class _Chunk:
    """The mutable state of one pass: `env` holds the values that differ, by slot."""

    def __init__(
        self,
        program: PreparedProgram,
        variants: Sequence[Variant],
        departed: Callable[[int, Departure], None],
        layout_ends: frozenset[Ref],
    ) -> None:
        self.program, self.departed = program, departed
        self.layout_ends = layout_ends
        self.variants = {variant.number: variant for variant in variants}
        self.laid: dict[int, dict[Ref, Tensor]] = {}  # by variant: its changed values that lie otherwise than recorded
        self.env: list[Delta | None] = [None] * len(program.values)
        self.restricted_pairs: dict[tuple[int, Rows], Any] = {}  # pairs that were cut to a demand already
        self.dropped: set[int] = set()
        self.runs_functions = any(calls_functions(change.what) for one in variants for _, change in one.changes)
        self.starts: dict[int, list[tuple[int, Change]]] = {}
        for variant in variants:
            for position, change in variant.changes:
                self.starts.setdefault(position, []).append((variant.number, change))

    def run(self) -> dict[Ref, Delta]:
        program = self.program
        cone, dying = program.cone_of(frozenset(self.starts))
        guards = sorted(program.graph.guards, key=lambda guard: guard.position, reverse=True)
        calls, nodes = program.graph.call_marks, program.graph.nodes
        context: Context | None = None
        with ExitStack() as stack:
            for position in cone:
                while guards and guards[-1].position <= position:
                    self._check_guard(guards.pop())
                if calls[position]:
                    node = nodes[position]
                    if node.context is not context:  # type: ignore[union-attr]
                        stack.close()
                        context = node.context  # type: ignore[union-attr]
                        stack.enter_context(_modes_of(context))
                    self._execute(program.step(position))
                if position in self.starts:
                    self._start_variants(self.starts[position])
                for slot in dying.get(position, ()):
                    self.env[slot] = None
            while guards:
                self._check_guard(guards.pop())
        found = [(ref, self.env[program.slot[ref]]) for ref in program.ends]
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
            found = self._row_view(step, deltas) if step.may_take else None
            if found is None:
                found = self._run_by_rows(step, deltas)
            if found is None:
                found, at_once = step.whole(deltas)
                if not at_once:
                    self.program.alone[step.node.name] = step.node.kind
        except ShapesDeparted as error:
            self._drop(error.departures, error.departures.__getitem__)
            self._execute(step)
            return
        for slot, delta, result in zip(step.gives, found, step.results, strict=False):  # no rows, no values
            self._keep(slot, delta, result)

    def _keep(self, slot: int, delta: Delta, recorded: Tensor) -> None:
        """Stores a value, restricted to what anybody reads of it."""
        wanted = self.program.wanted
        if slot not in wanted:
            return
        rows = wanted[slot]
        if rows is not None:
            delta = self._restricted(delta, rows, recorded)
        if len(delta.pairs):
            self.env[slot] = delta

    def _restricted(self, delta: Delta, rows: Rows, recorded: Tensor) -> Delta:
        axis, numbers = rows
        if delta.axis is not None and delta.axis != axis and not delta.is_dense:
            return delta
        if delta.axis == axis and (id(delta.pairs), rows) in self.restricted_pairs:
            return delta
        delta = chosen(delta, axis, recorded, numbers)
        self.restricted_pairs[id(delta.pairs), rows] = delta.pairs
        return delta

    def _run_by_rows(self, step: BatchedOp, deltas: Deltas) -> list[Delta] | None:
        """Runs an op row by row, if an alignment has rows in every changed operand; else None."""
        rows = self.program.demanded(step)
        forms = [None if delta is None else (delta.axis, delta.pairs.codes is None) for delta in deltas]
        key = (self.program.packs, rows and rows[0], *forms)
        strategy: Strategy | None = step.routes.get(key, _UNKNOWN)
        if strategy is _UNKNOWN:
            strategy = step.routes[key] = self._choose_strategy(step, deltas)
        if strategy is None:
            return None
        align = strategy.align
        if rows is None and strategy.fits:
            return self._by_rows(step, align, deltas)
        ready = deltas if strategy.fits else self._arranged(step, deltas, strategy)
        if rows is not None and rows[0] == align.outputs[0]:
            ready = [
                None if delta is None else self._restricted(delta, (axis or 0, rows[1]), recorded)
                for delta, axis, recorded in zip(ready, align.operands, step.recorded, strict=True)
            ]
        found = self._by_rows(step, align, ready)
        if self.program.scratch.lent:
            self.program.scratch.take_back(found or ())
        return self._run_by_rows(step, deltas) if found is None else found

    def _by_rows(self, step: BatchedOp, align: Alignment, deltas: Deltas) -> list[Delta] | None:
        narrowed = self.program.narrowed
        try:
            if narrowed is not None and narrowed.product is step and narrowed.fits(align, deltas):
                return narrowed.by_rows(align, deltas)
            return step.by_rows(align, deltas)
        except RowsDiffer:
            step.refute(align)
            return None

    def _choose_strategy(self, step: BatchedOp, deltas: Deltas) -> Strategy | None:
        changed = [number for number, delta in enumerate(deltas) if delta is not None]
        possible = [align for align in step.alignments if all(align.operands[number] is not None for number in changed)]
        while possible:
            align, packs = self._preferred(step, possible, deltas, changed)
            if step.holds(align):
                fits = not packs and all(deltas[n].axis == align.operands[n] for n in changed)  # type: ignore[union-attr]
                return Strategy(align, packs, fits)
            possible.remove(align)
        return None

    def _preferred(
        self, step: BatchedOp, possible: list[Alignment], deltas: Deltas, changed: list[int]
    ) -> tuple[Alignment, bool]:
        """The alignment to try first, and whether to pack: to search dense values for the rows that differ.

        1. One along the axis of which only some rows are read: the others are never computed.

        2. If some Deltas are sparse, one along all their axes, so that they stay sparse. Dense operands beside them
        are packed; so is everything if the op is costly.

        3. If all are dense and the op is costly, the one with the most rows, packed: fewer rows are multiplied.

        4. One along the axes that the Deltas lie along already: nothing moves.

        5. The first one, the likeliest by its axes.
        """
        axes = {number: delta.axis for number, delta in enumerate(deltas) if delta is not None}
        sparse = [number for number, delta in enumerate(deltas) if delta is not None and not delta.is_dense]
        costly = self.program.packs and step.work >= WORTH_PACKING
        if (rows := self.program.demanded(step)) is not None:
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

    def _arranged(self, step: BatchedOp, deltas: Deltas, strategy: Strategy) -> list[Delta | None]:
        """The Deltas as the strategy needs them: sparse along its axes, or all rows of each variant."""
        found: list[Delta | None] = []
        for delta, axis, recorded in zip(deltas, strategy.align.operands, step.recorded, strict=True):
            if delta is None:
                found.append(None)
                continue
            assert axis is not None
            if strategy.packs and recorded.shape[axis] > 1 and (delta.is_dense or delta.axis != axis):
                found.append(packed(delta, axis, recorded))
            else:
                found.append(delta if delta.axis == axis else folded(delta, axis, recorded, self.program.scratch))
        return found

    def _row_view(self, step: BatchedOp, deltas: Deltas) -> list[Delta] | None:
        """A view of one row, taken of that row alone, which is a whole value afterwards."""
        delta = deltas[0]
        if delta is None or delta.axis is None or delta.is_dense or (at := row_view(step, delta.axis)) is None:
            return None
        row, take = at
        some = marked_pairs(delta, delta.pairs.rows == row)
        if not len(some.pairs):
            return []
        return [stacked(some.pairs.lanes, take(some.data.movedim(some.axis or 0, 0)))]

    # -- variants that join, and those that leave ---------------------------------------------------------------------

    def _start_variants(self, changes: list[tuple[int, Change]]) -> None:
        """Starts variants whose change is here: their value so far, changed."""
        program = self.program
        news: dict[int, list[tuple[int, Tensor]]] = {}
        for lane, change in sorted(changes, key=lambda pair: pair[0]) if len(changes) > 1 else changes:
            if lane not in self.dropped:
                for slot, new in self._changed(lane, change):
                    if (departure := self._metadata_departure(lane, change, slot, new)) is not None:
                        self._drop((lane,), {lane: departure}.__getitem__)
                        continue
                    if self.runs_functions and (change.holds or calls_functions(change.what)):
                        new = new.clone()  # the next call of a function may fill the same memory
                    news.setdefault(slot, []).append((lane, new.detach() if new.requires_grad else new))
        for slot, pairs in news.items():
            recorded = program.values[slot]
            lanes = tuple([lane for lane, _ in pairs])
            values = [new for _, new in pairs]
            axis = program.row_axis(slot)
            if axis is not None and len(values) == 1 and not program.packs:
                fresh = Delta(axis, Pairs(recorded.shape[axis], lanes, device=recorded.device), values[0])
            else:
                fresh = stacked(lanes, torch.stack(values))
                if axis is not None:
                    fresh = packed(fresh, axis, recorded) if program.packs else folded(fresh, axis, recorded)
            old, self.env[slot] = self.env[slot], None
            left = without_lanes(old, lanes) if old is not None else None
            self._keep(slot, fresh if left is None else joined(left, fresh, recorded), recorded)

    def _changed(self, lane: int, change: Change) -> list[tuple[int, Tensor]]:
        if not (self.program.draws and calls_functions(change.what)):
            return self._made(lane, change)
        with as_the_user():
            return self._made(lane, change)

    def _made(self, lane: int, change: Change) -> list[tuple[int, Tensor]]:
        if type(change.tree) is Ref:
            slot = self.program.slot[change.tree]
            value = self._value_as_it_lay(slot, lane)
            if self.program.graph.asked:  # how it lies, too
                return [(slot, change.make(value))]
            new = change.free(value)
            if not isinstance(new, Tensor) or new.shape != value.shape or new.dtype != value.dtype:
                new = change.make(value)  # raises, and says what is wrong
            return [(slot, new)]
        slots = [self.program.slot[ref] for ref in refs_in(change.tree)]
        now = filled(change.tree, lambda ref: self._value_as_it_lay(self.program.slot[ref], lane))
        news = change.make(now)
        return list(zip(slots, news, strict=True))

    def _metadata_departure(self, lane: int, change: Change, slot: int, new: Tensor) -> Departure | None:
        """The departure if a patched value has another memory layout where that matters, or something else that a
        model may ask an input for.
        """
        has_attributes = bool(vars(new)) or bool(self.program.graph.literals)
        own, known = has_input_attributes(new) or has_attributes, self.program.values[slot]
        if (new.is_conj(), new.is_neg()) != (known.is_conj(), known.is_neg()):  # stacked, variants have no such marks
            return Departure("the mark of a conjugate or negative of a patched value", "one", "another")
        lies = geometry if self.program.graph.asked else Tensor.stride
        if lies(new) == lies(known) and not own:
            return None
        ref, graph, values = self.program.refs[slot], self.program.graph, self.program.record.values
        if own and isinstance(graph[ref.node], Input):
            instead = ReplacedValues(graph, values, OuterModes.of_replay(graph, False), frozenset((ref,)), {})
            if (departure := next(instead.departures(ref, values[ref], new), None)) is not None:
                return departure
        elif not graph.asked and keeps_layout(change.what) and not overlaps_itself(known):
            return None  # a replay lays it as it lay
        laid = self.laid.setdefault(lane, {})
        laid[ref] = new
        return next(layout_departures(graph, values, laid, True, readers=self._layout_readers(lane, change)), None)

    def _layout_readers(self, lane: int, change: Change) -> LayoutReaders:
        """Where it matters that a variant's values lie otherwise than the recorded ones. Also where a later change is
        made of such a value.
        """
        changes = [one for _, one in sorted(self.variants[lane].changes, key=lambda pair: pair[0])]
        place = next(number for number, one in enumerate(changes) if one is change)
        made_of = [ref for one in changes[place + 1 :] if one.follows for ref in refs_in(one.tree)]
        return LayoutReaders(self.program.layout_readers, self.layout_ends.union(made_of))

    def _value_as_it_lay(self, slot: int, lane: int) -> Tensor:
        """A variant's value in the recorded memory layout: a function of the user's may read how it lies."""
        value, recorded = self._value(slot, lane), self.program.values[slot]
        return value if value is recorded else with_layout_of(value, recorded)

    def _value(self, slot: int, lane: int) -> Tensor:
        recorded, delta = self.program.values[slot], self.env[slot]
        return recorded if delta is None else lane_value(delta, lane, recorded)

    def _check_guard(self, guard: Guard) -> None:
        """Checks a guard for each variant that has another value there."""
        slots = [self.program.slot[ref] for ref in guard.refs]
        lanes = {lane for slot in slots if (delta := self.env[slot]) is not None for lane in delta.pairs.lanes}
        found: dict[int, Departure] = {}
        for lane in sorted(lanes):
            value = partial(lambda lane, ref: self._value(self.program.slot[ref], lane), lane)
            if (left := departure(guard, value, lambda ref: self.program.values[self.program.slot[ref]])) is not None:
                found[lane] = left
        self._drop(found, found.__getitem__)

    def _drop(self, lanes: Iterable[int], why: Callable[[int], Departure]) -> None:
        dropped = set(lanes)
        for lane in sorted(dropped):
            self.departed(lane, why(lane))
        self.dropped |= dropped
        if dropped:
            self.env = [None if delta is None else without_lanes(delta, dropped) for delta in self.env]


def _modes_of(context: Context) -> Any:
    """The recorded autocast and kernels; gradients are off in a sweep."""
    return modes(evolve(context, grad=False, inference=False))
