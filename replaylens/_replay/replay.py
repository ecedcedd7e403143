"""Replay: runs a program again, whole or in part, with changes.

In: the record of a forward pass and a Request. Out: a Run. plan.py decides what runs, supply.py with which values,
interpreter.py runs it; here the request is translated into positions and values, and the result is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._edit.lower import may_vary
from .._ir.graph import Graph
from .._ir.interrupts import exclusive_generator
from .._ir.location import Location
from .._ir.memory import with_strides
from .._ir.model_state import tensor_state
from .._ir.node import Call, Input, Ref, refs_of
from .._ir.torch_private import is_wrapped
from .._ir.trees import thaw
from ..errors import InputMismatch, ReplaylensError
from .alias_analysis import writes_views
from .compile import Mode, compile_plan
from .deferred import DeferredValues, PatchResults, version_mark
from .flag_guards import OuterModes, ReplacedValues, guarded_changes, metadata_departures as departures_of
from .function import require_differentiable
from .guards import Departure, RerunRequired, aliasing_hazards, diverged_error, exceptions_as_departures
from .interpreter import Code
from .plan import Plan, plan
from .record import Cache, Record, detached, recomputed
from .request import Change, Request
from .resolve_patches import PatchRunner
from .runner import Values, run_code
from .supply import InitialEnv, Origin, Run, is_drawn_anew, known_marks, reached_by_draws


def replay(
    record: Record,
    request: Request,
    resolve: Callable[[Any], Location],
    instrument: Callable[[Code], Code] | None = None,
    origin: Origin | None = None,
) -> Run:
    """Runs what the request needs. `resolve` turns a user's name into a Location, for lookups in the Run."""
    ran = execute(record, request, instrument)
    graph, request, values = record.graph, ran.request, ran.values

    def finish(value: Any) -> Any:
        return value if request.grad or not isinstance(value, torch.Tensor) else detached(value)

    late = DeferredValues(ran, record, finish)

    def lookup(name: Any) -> Any:
        at = name if isinstance(name, Location) else resolve(name)
        return _read(graph, late, patched_outputs, at)

    def output_leaf(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf
        return patched_outputs[leaf] if leaf in patched_outputs else finish(values[leaf])

    has_output = request.to is None
    patched_outputs = {ref: finish(change(values[ref])) for ref, change in request.ends.items()} if has_output else {}
    output = thaw(graph.output, output_leaf) if has_output else None
    changes: dict[str, Any] = {a: finish(values[ref]) for a, ref in graph.changes} if has_output else {}
    changes |= dict.fromkeys(graph.removed) if has_output else {}
    return Run(
        values.code.executed, changes, tuple(ran.departures), output, has_output, lookup, late.everything, origin=origin
    )


def _read(graph: Graph, late: DeferredValues, patched_outputs: Mapping[Ref, Any], at: Location) -> Any:
    """What a run has at a Location."""
    if (places := at.inner) is not None:
        return thaw(places, lambda leaf: _read(graph, late, patched_outputs, leaf) if type(leaf) is Location else leaf)
    if at.output is not None and at.output in patched_outputs:
        return patched_outputs[at.output]
    return late(graph.positions[at.node], at.tree(graph))


@frozen(eq=False)
class Executed:
    """The result of a request: the values after its last step, and where it left the recorded path."""

    request: Request
    wanted: frozenset[int]
    values: Values
    once: frozenset[int]  # functions of an edit that ran: they may give something else when they are called again
    departures: list[Departure]
    patched: PatchResults  # what the patches made
    given: dict[int, Any]  # how the given tensors looked when it began

    def __getitem__(self, ref: Ref) -> Any:
        return self.values[ref]


def execute(record: Record, request: Request, instrument: Callable[[Code], Code] | None = None) -> Executed:
    """Runs what the request needs. `instrument` may wrap the code to observe it."""
    departed = _DepartureHandler(request.on_divergence)
    _require_fitting(request, departed)
    graph, record = record.graph, _with_start_values(record, request)
    compiled = _compiled(record, request)
    code = compiled.code
    if request.grad:
        require_differentiable(graph)
    for departure in _departures_before(graph, request):
        departed(departure)
    given = {Ref(graph.nodes[position].name): tensor for position, tensor in request.given.items()}
    around = OuterModes.of_replay(graph, request.grad)
    if [*map(departed, departures_of(graph, record.values, given, around))]:
        request = evolve(request, given=_on_the_recorded_path(graph, request.given))

    remembered, given_marks = (
        PatchResults(),
        {p: (version_mark(tensor), tensor_state(tensor)) for p, tensor in request.given.items()},
    )
    env = compiled.beginning.begin(record, request)
    env[code.departed] = departed
    if code.patches:
        refs = {ref for position in request.changed for ref in refs_of(graph.nodes[position])}
        instead = ReplacedValues(graph, record.values, around, refs.union(given), given)
        applying = PatchRunner(graph, compiled.writes_views, instead, departed, remembered)
        for position, number, slot in code.patches:
            env[slot] = applying.function(position, number, request.changed[position][number])
    try:
        with (
            exceptions_as_departures(graph, partial(_changed_nodes, graph, request), departed),
            _undoing_draws() if request.fresh else nullcontext(),
        ):
            run_code(graph, Values(code if instrument is None else instrument(code), env))
    except RerunRequired:
        remembered.undraw()
        raise
    return Executed(request, compiled.wanted, Values(code, env), compiled.once, departed.found, remembered, given_marks)


@frozen(eq=False)
class _DepartureHandler:
    """Handles departures from the recorded path: raises, asks for a rerun of the model, or notes them."""

    on_divergence: str
    found: list[Departure] = field(factory=list)

    def __call__(self, departure: Departure) -> None:
        if self.on_divergence == "raise":
            raise diverged_error(departure)
        if self.on_divergence == "rerun":
            raise RerunRequired(departure)
        self.found.append(departure)


def _require_fitting(request: Request, departed: _DepartureHandler) -> None:
    """Reports each mismatch of the given tensors as a departure, or raises."""
    for mismatch in request.mismatches:
        if request.on_divergence == "raise" or (request.on_divergence == "ignore" and not mismatch.can_follow):
            raise InputMismatch(mismatch.text)
        departed(mismatch.departure)


def _with_start_values(record: Record, request: Request) -> Record:
    """The record with the values at which gradients end, where a replay begins at one."""
    starts = request.start if request.grad and not request.at else ()
    if not starts:
        return record
    refs = [ref for position in starts for ref in refs_of(record.graph.nodes[position])]
    if all(ref in record.values for ref in refs):
        return record
    found = recomputed(record, [ref for ref in refs if ref not in record.values])
    return evolve(record, values={**record.values, **found})


def _departures_before(graph: Graph, request: Request) -> Iterator[Departure]:
    """Departures that are known before anything runs."""
    yield from hazards_of_changes(graph, request.changed)
    for name in graph.other_random_sources if request.fresh else ():
        yield Departure(f"what `{name}` drew", "drawn in the forward", "others, which only the model can draw")
    for name in graph.generator_read if request.fresh else ():
        yield Departure(f"what `{name}` gave", "of the recorded state", "of one that only the model can read")


def hazards_of_changes(graph: Graph, changed: Mapping[int, tuple[Change, ...]]) -> Iterator[Departure]:
    """Patches that break aliasing, or through which the model takes gradients that cannot follow them."""
    for position, changes in changed.items():
        node = graph.nodes[position]
        if graph.shares_inputs and isinstance(node, Input):
            yield Departure(f"the memory of {node.name}", "shared with what is written", "apart from it")
        if isinstance(node, Call):
            constant = not all(change.follows for change in changes) and graph.is_recomputed(node.name)
            yield from aliasing_hazards(node, constant)


def _on_the_recorded_path(graph: Graph, given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The given tensors in the memory layouts that the recorded path needs."""
    strides = {position: graph.nodes[position].spec.strides for position in given}  # type: ignore[union-attr]
    return {p: tensor if is_wrapped(tensor) else with_strides(tensor, strides[p]) for p, tensor in given.items()}


def _changed_nodes(graph: Graph, request: Request) -> list[str]:
    """The nodes that may have another value than recorded to begin with."""
    drawn = [call.name for call in graph.calls if call.draws is not None] if request.fresh else []
    changed = {graph.nodes[position].name for position in request.changed}
    again = [call.name for call in graph.inner_gradients if not changed.isdisjoint(call.through)]
    return [*changed, *(graph.nodes[position].name for position in request.given), *drawn, *again]


@contextmanager
def _undoing_draws() -> Iterator[None]:
    """Undoes the draws from the user's generator if the replay leaves its path: the model makes them again."""
    with exclusive_generator():
        state = torch.default_generator.get_state()
        try:
            yield
        except RerunRequired:
            torch.default_generator.set_state(state)
            raise


@frozen(eq=False)
class _Compiled:
    """What all requests of one kind share."""

    code: Code
    beginning: InitialEnv
    wanted: frozenset[int]
    once: frozenset[int]  # functions of an edit that run
    writes_views: bool


_COMPILED: Cache[Hashable, _Compiled] = Cache()


def _compiled(record: Record, request: Request) -> _Compiled:
    """The compiled plan for this kind of request: one for all patches at the same values."""
    trees = [(p, tuple([change.tree for change in changes])) for p, changes in sorted(request.changed.items())]
    kind = (
        tuple(trees),
        frozenset(request.given),
        request.start,
        request.to,
        request.at,
        request.keep,
        request.grad,
        request.fresh,
        request.whole,
    )
    known = _COMPILED.get(record, kind)
    return _COMPILED.put(record, kind, _compile(record, request, dict(trees))) if known is None else known


def _compile(record: Record, request: Request, trees: dict[int, tuple[Any, ...]]) -> _Compiled:
    graph = record.graph
    wanted = _wanted(graph, request)
    places, varying = _places(graph, request), [graph.positions[c.name] for c in graph.edited if may_vary(c)]
    made = _planned(record, request, wanted, request.keep.union(places, varying), places)
    _require_reached(graph, request, made)
    left = graph.left if _leaves_generator(request) else None
    mode = Mode(request.grad, request.fresh, left, places=places)
    code = compile_plan(record.compiled, made, record.draws, lambda ref: record.value(ref), mode, trees)
    once = frozenset(varying).intersection(made.run)
    return _Compiled(code, InitialEnv(code, request), wanted, once, bool(trees) and writes_views(graph))


def _planned(
    record: Record, request: Request, wanted: frozenset[int], keep: frozenset[int], places: Mapping[int, Any]
) -> Plan:
    graph = record.graph
    if request.fresh:  # what is drawn once more later would be other numbers
        reached, last = reached_by_draws(graph, request), len(graph) if request.to is None else request.to
        wanted |= {position for position in request.keep if reached[position] and position <= last}
    drawn = [p for p in graph.drawing if is_drawn_anew(graph, request, p)] if request.fresh else ()
    return plan(
        graph,
        wanted,
        known_marks(record, request),
        (*request.changed, *request.given, *request.start, *drawn),
        rerun_all=request.whole,
        keep=keep,
        until=request.to,
        again=places,
        turns=graph.turns if request.fresh and not request.start else {},
        last=graph.last_draw if _leaves_generator(request) else (),
        heeded=guarded_changes(graph, request.changed, request.to),
    )


def _wanted(graph: Graph, request: Request) -> frozenset[int]:
    if request.to is not None:
        return frozenset((request.to,))
    return frozenset([graph.positions[ref.node] for ref in (graph.output_refs if request.at else graph.wanted_refs)])


def _leaves_generator(request: Request) -> bool:
    """True if the user's generator ends where the model leaves it. Part of a program leaves it after its last draw."""
    return request.fresh and request.to is None and not request.start


def _places(graph: Graph, request: Request) -> dict[int, tuple[Ref, ...]]:
    """The values at which a request asks for gradients, by position."""
    places: dict[int, tuple[Ref, ...]] = {}
    for ref in sorted(request.at, key=lambda ref: (graph.positions[ref.node], ref.path)):
        position = graph.positions[ref.node]
        places[position] = (*places.get(position, ()), ref)
    return places


def _require_reached(graph: Graph, request: Request, made: Plan) -> None:
    if request.to is None:
        return
    again = {name for call in graph.inner_gradients if graph.positions[call.name] in made.run for name in call.through}
    names = {position: graph.nodes[position].name for position in request.changed}
    unreached = [name for position, name in names.items() if position not in made.patch and name not in again]
    if unreached:
        raise ReplaylensError(
            f"the patch at {unreached[0]} would do nothing: {graph.nodes[request.to].name}, which is asked for, "
            "does not need it."
        )
