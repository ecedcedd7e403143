"""The record of an edited graph: what the edit cannot have changed is shared, the rest runs at once.

In: the Record of a program, a graph rewritten from its graph, and the tensors that the edit brought in. Out: a Record
of the edited graph, and its output. Wrong shapes and departures from the recorded path are found here and not in a
later replay. What the edit was is not known here.

Functions of an edit may draw random numbers. `Watched` finds out which of them do: they draw from the user's generator
while the record is derived, and become draws of the program with the generator state that they began in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._edit.lower import may_vary
from .._edit.rewrite import NO_REFS, old_names, replace, unchanged_values
from .._ir.autograd import as_leaf
from .._ir.graph import Graph
from .._ir.label import unused_name
from .._ir.memory import storage_of, version_of
from .._ir.node import Call, Guard, Input, Node, Ref, State, TensorSpec, filled, refs_of, specs_of, value_of
from .._ir.printer import listing
from .._ir.runtime import alias
from .._ir.target import Target
from ..errors import ShapeMismatch
from .alias_analysis import detached_views
from .compile import CompiledGraph, compile_plan
from .flag_guards import flag_answer, value_departures
from .guards import (
    Departure,
    aliasing_hazards,
    changed_answer,
    diverged_error,
    exceptions_as_departures,
    guard_identity,
    same_result,
    with_answer,
)
from .interpreter import Code
from .layout_guards import asks_for_view, edit_layout_departures
from .move import with_specs_of
from .plan import Plan, plan
from .record import Record, Versions, keeping_only
from .runner import initial_values, run_code

Derived = tuple[Record, Any]


@frozen(eq=False)
class DrawObserver:
    """Observes which functions of an edit draw random numbers while its record is derived."""

    before: Mapping[str, torch.Tensor]  # the states that are kept already, by key
    start: torch.Tensor = field(factory=lambda: torch.default_generator.get_state())
    now: list[torch.Tensor] = field(factory=list)  # the user's generator
    states: dict[str, torch.Tensor] = field(factory=dict)  # of nodes that drew

    def __call__(self, graph: Graph, names: set[str], derived: Callable[[Graph], Derived]) -> Derived:
        """The record and output that `derived` makes of the graph, with the observed calls marked as draws."""
        self.now[:] = [self.start]
        self.states.clear()
        calls = {name: call for name in names if isinstance(call := graph[name], Call)}
        observed = replace(graph, {name: (self._observed(call),) for name, call in calls.items()}) if calls else graph
        record, output = derived(observed)
        torch.default_generator.set_state(self.now[0])
        if not calls:
            return record, output
        keys = {name: unused_name(f"draw_of_{name}", self.before) for name in self.states}
        draws = {**record.draws, **{keys[name]: state for name, state in self.states.items()}}

        def plain(node: Node) -> Node:
            if node.name not in calls or not isinstance(node, Call):
                return node
            key = keys.get(node.name)
            follows = None if key is None else f"start_of_{node.name}"
            return evolve(node, target=calls[node.name].target, draws=key, follows=follows)

        made = evolve(record.graph, nodes=tuple(map(plain, record.graph.nodes)))
        return evolve(record, graph=made, draws=draws), output

    def _observed(self, call: Call) -> Call:
        function = call.target.function

        def observe(*args: Any, **kwargs: Any) -> Any:
            outside, state = torch.default_generator.get_state(), self.now[0]
            torch.default_generator.set_state(state)
            try:
                return function(*args, **kwargs)
            finally:
                self.now[0] = torch.default_generator.get_state()
                torch.default_generator.set_state(outside)
                if not torch.equal(self.now[0], state):
                    self.states[call.name] = state

        return evolve(call, target=Target(call.target.name, observe, is_stable=False))


ValueByRef = dict[Ref, torch.Tensor]


@frozen(eq=False)
class EditAdditions:
    """What an edit brings in besides nodes: tensors of new or changed sources, live parameters, generator states."""

    values: Mapping[str, torch.Tensor] = field(factory=dict)
    live: Mapping[str, torch.Tensor] = field(factory=dict)
    draws: Mapping[str, torch.Tensor] = field(factory=dict)


NOTHING_ADDED = EditAdditions()


def apply_edit(
    record: Record,
    graph: Graph,
    added: EditAdditions = NOTHING_ADDED,
    on_divergence: str = "raise",
    wanted: Mapping[Ref, TensorSpec] = NO_REFS,
) -> tuple[Record, Any]:
    """A Record of the edited graph, and its output. Values that the edit cannot reach are the very same tensors.

    Values that other nodes read must keep their recorded shape and dtype; `wanted` gives the specs of values that are
    new.
    """
    require_edit_policy(on_divergence)
    derivation = _Derivation(record, graph, added, unchanged_values(record.graph, graph, added.values), wanted)
    departures: list[Departure] = []

    def departed(departure: Departure) -> None:
        departures.append(departure)
        if on_divergence == "raise":
            raise diverged_error(departure)

    known = derivation.known()
    values = {**known, **derivation.run(known, departed)}
    for departure in derivation.departures(values):
        departed(departure)
    graph = with_specs_of(graph, {ref: tensor for ref, tensor in values.items() if ref not in derivation.same})
    if departures:
        graph = evolve(graph, guards=tuple([_as_answered(guard, values) for guard in graph.guards]))
    made = Record(
        graph,
        values,
        derivation.versions(values),
        {**record.draws, **added.draws, **derivation.drawn},
        derivation.live(),
        account=record.account.untimed(),
        places=record.places,
    )
    made = made if record.saved is None else keeping_only(made, record.saved)
    return made, filled(graph.output, values.__getitem__)


def require_edit_policy(on_divergence: str) -> None:
    """Checks `on_divergence` of an edit: an edited program has no model to rerun."""
    if on_divergence not in ("raise", "ignore"):
        raise ValueError(f"on_divergence of an edit must be one of 'raise', 'ignore', not {on_divergence!r}.")


@frozen(eq=False)
class _Derivation:
    """One derivation: the record before, the graph after, and which values are the same in both."""

    record: Record
    graph: Graph
    added: EditAdditions
    same: dict[Ref, Ref]
    wanted: Mapping[Ref, TensorSpec]
    drawn: dict[str, torch.Tensor] = field(factory=dict)  # the states of draws that begin elsewhere now

    def known(self) -> ValueByRef:
        """The values that exist before anything runs."""
        old = self.record.values
        shared = {new: old[ref] for new, ref in self.same.items() if ref in old}
        return shared | {Ref(name): tensor for name, tensor in self.added.values.items()}

    def run(self, known: ValueByRef, departed: Callable[[Departure], None]) -> ValueByRef:
        """Runs every node whose value is not known."""
        graph = self.graph
        made, code = self._compiled(known)
        begun = initial_values(
            code, lambda ref: as_leaf(self.record.value(self.same[ref]) if ref in self.same else known[ref]), departed
        )
        refs = [ref for position in made.run for ref in refs_of(graph.nodes[position])]
        with exceptions_as_departures(graph, lambda: code.executed, departed):
            try:
                ran = run_code(graph, begun)
            except Exception as error:
                self.require_shapes(begun.tensors(refs), error)
                for departure in self.aliasing_departures(
                    known | begun.tensors(refs)
                ):  # what is wrong may only follow from that
                    departed(departure)
                raise
        found = ran.tensors(refs)
        self.require_shapes(found)
        self.drawn.update(ran.states_begun)
        return found | self._states_begun()

    def _states_begun(self) -> ValueByRef:
        """The generator states that calls which rerun a draw themselves receive: those in which it begins now."""
        drawn, states = self.graph.drawn, self.graph.states
        return {ref: self.drawn[key] for key in self.drawn for ref in states.get(drawn[key], ())}

    def _compiled(self, known: ValueByRef) -> tuple[Plan, Code]:
        graph, recorded = self.graph, self._recorded_guards()
        is_known = bytearray([all(ref in known for ref in refs_of(node)) for node in graph.nodes])
        unknown = [position for position, mark in enumerate(is_known) if not mark]
        made = plan(graph, unknown, is_known, unknown, keep=range(len(graph)))
        made = evolve(made, guards=tuple([number for number in made.guards if number in recorded]))
        pairs = [zip(graph.guards[n].refs, recorded[n].refs, strict=True) for n in made.guards]
        before = dict(pair for guard in pairs for pair in guard)
        draws = {**self.record.draws, **self.added.draws}
        return made, compile_plan(CompiledGraph(graph), made, draws, lambda ref: self.record.value(before[ref]))

    def require_shapes(self, values: ValueByRef, cause: Exception | None = None) -> None:
        """Raises if a value that is read has lost its recorded shape or dtype. Shapes that depend on content are left
        to guards.
        """
        old, graph = self.record.graph, self.graph
        before = {ref: meaning for node in old.calls for ref, meaning in specs_of(node).items()}
        before |= {Ref(n.name): before[tree] for n in old.calls if type(tree := value_of(n)) is Ref and tree in before}
        before |= self.wanted
        now = with_specs_of(graph, values)
        decided, ends = self._content_dependent(now, before, values), frozenset(graph.output_refs)
        for node in now.calls:
            for ref, meaning in specs_of(node).items():
                wanted = before.get(ref)
                if (
                    ref not in values
                    or wanted is None
                    or node.is_dynamic
                    or node.name in decided
                    or not (graph.users[graph.positions[node.name]] or (node.edited and ref not in ends))
                ):
                    continue
                elsewhere = bool(node.edited) and wanted.device != meaning.device
                if elsewhere or (wanted.shape, wanted.dtype) != (meaning.shape, meaning.dtype):
                    now_is = f"{meaning} on {meaning.device}" if elsewhere else f"{meaning}"
                    raise ShapeMismatch(
                        f"after the edit `{ref}` is {now_is}; what reads it was recorded with {wanted}.\n"
                        f"{listing(now, node.name, node.edited)}\n"
                        f"Give a value of shape {wanted.shape} and dtype {wanted.dtype}, or capture the changed model."
                    ) from cause

    @staticmethod
    def _content_dependent(now: Graph, before: Mapping[Ref, TensorSpec], values: ValueByRef) -> frozenset[str]:
        """The nodes after calls whose content gives another shape than the recorded one."""
        other = [
            node.name
            for node in now.calls
            if node.is_dynamic
            and any(before.get(ref, new).sizes != new.sizes for ref, new in specs_of(node).items() if ref in values)
        ]
        return now.descendants(other) if other else frozenset()

    def departures(self, values: ValueByRef) -> Iterator[Departure]:
        """Departures from the recorded path that no guard reports."""
        yield from self.aliasing_departures(values)
        yield from self.handed_back(values)
        yield from self.asked_departures(values)
        yield from self.layout_departures(values)

    def handed_back(self, values: ValueByRef) -> Iterator[Departure]:
        """Functions of the user's that return the memory that they are given, where the model writes through it. A
        program's write makes a copy, so which of the two tensors would share it is undecidable.
        """
        functions = [call for call in self.graph.edited if may_vary(call)]
        if not functions or not detached_views(self.graph, ()):
            return
        for call in functions:
            if shares_memory(values, refs_of(call), call.refs):
                yield returns_its_memory(call)

    def aliasing_departures(self, values: ValueByRef) -> Iterator[Departure]:
        """Edited calls whose memory the model writes later, or through which it takes gradients."""
        old, graph = self.record.graph, self.graph
        for edited in graph.edited:
            if edited.name not in old or refs_of(edited)[0] in self.same:
                continue
            call = old[edited.name]
            if not isinstance(call, Call) or edited is call:
                continue
            yield from aliasing_hazards(call, self._is_gradient_cut(edited.name))

    def asked_departures(self, values: ValueByRef) -> Iterator[Departure]:
        """Other answers to questions about the layout and flags of values that the edit has altered."""
        for guard in self.graph.asked:
            if guard.refs and (ref := guard.refs[0]) in values and ref not in self.same:
                yield from value_departures(guard, values[ref])
                if asks_for_view(guard) and self._is_made_by_an_edit(ref):
                    yield from filter(None, (changed_answer(guard, flag_answer(guard, values[ref])),))

    def _is_made_by_an_edit(self, ref: Ref) -> bool:
        """True if a call of the edit itself gives the value. An alias stands for the value it aliases."""
        node = self.graph[ref.node]
        return isinstance(node, Call) and bool(node.edited) and node.target.function is not alias

    def layout_departures(self, values: ValueByRef) -> Iterator[Departure]:
        """Departures that follow from the memory layout of values that the edit has altered."""
        old, instead = self.record, dict(self._replaced_operands())
        meanings = {ref: meaning for node in old.graph.nodes for ref, meaning in specs_of(node).items()}
        new = {ref: tensor for ref, tensor in values.items() if ref not in self.same}
        places = {ref: instead.get(ref, ref) for ref in new}
        before = {ref: old.values[was] for ref, was in places.items() if was in old.values}
        strides = {ref: meanings[was].strides for ref, was in places.items() if was in meanings}
        edited = {*instead, *self.graph.edited_refs, *[Ref(name) for name in self.added.values]}
        yield from edit_layout_departures(self.graph, before, strides, new, edited)

    def _replaced_operands(self) -> Iterator[tuple[Ref, Ref]]:
        """What the model's calls read now, with what they read before the edit."""
        old = self.record.graph
        for call in self.graph.calls:
            was = old[call.name] if call.name in old and not call.edited else None
            if isinstance(was, Call) and was.refs != call.refs and len(was.refs) == len(call.refs):
                yield from zip(call.refs, was.refs, strict=True)

    def _is_gradient_cut(self, name: str) -> bool:
        """True if the model takes a gradient through this node, and it no longer depends on where that gradient
        starts.
        """
        given = [call.arguments for call in self.graph.inner_gradients if name in call.through]
        return any(name not in self.graph.descendants([ref.node for ref in one.starts]) for one in given)

    def _recorded_guards(self) -> dict[int, Guard]:
        """Each guard as it was before the edit, by its number now. Guards that the edit brought hold anyway."""
        left, found = list(self.record.graph.guards), {}
        for number, guard in enumerate(self.graph.guards):
            if left and guard_identity(left[0]) == guard_identity(guard) and same_result(left[0].result, guard.result):
                found[number] = left.pop(0)
        return found

    def versions(self, values: ValueByRef) -> Versions:
        """The write counters of all values; those of the very tensors of the record as recorded."""
        old, held = self.record.versions, self.record.values
        origins = ((ref, t, self.same.get(ref)) for ref, t in values.items())
        return Versions((ref, old[was] if was and held.get(was) is t else version_of(t)) for ref, t, was in origins)

    def live(self) -> dict[str, torch.Tensor]:
        """The model's own parameters and inputs, and those that the edit brought."""
        was = old_names(self.record.graph, self.graph)
        sources = {node.name for node in self.graph.nodes if isinstance(node, (State, Input))}
        kept = sources.difference(self.added.values)
        known = {name: self.record.live.get(was.get(name, name)) for name in kept}
        return {name: tensor for name, tensor in known.items() if tensor is not None} | dict(self.added.live)


def shares_memory(values: Mapping[Ref, torch.Tensor], some: Iterable[Ref], others: Iterable[Ref]) -> bool:
    """True if any of the first values shares memory with one of the others."""
    memory = {storage_of(values[ref]) for ref in others if ref in values} - {None}
    return any(ref in values and storage_of(values[ref]) in memory for ref in some)


def returns_its_memory(call: Call) -> Departure:
    """The departure for a user's function that returns the memory it is given, where the model writes."""
    what = f"the memory of {call.name}, which the model writes,"
    return Departure(what, "that of one tensor", "handed on by a function, which a program cannot follow", call.source)


def _as_answered(guard: Guard, values: ValueByRef) -> Guard:
    """The guard with the answer of these values: the derived program takes this path."""
    return with_answer(guard, values.__getitem__) if all(ref in values for ref in guard.refs) else guard
