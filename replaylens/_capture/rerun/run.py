"""Runs the model once more from where the recorded forward began, with patches applied while it runs, and restores
everything afterwards.

In: a ForwardState, the Record of the forward, and a Request. Out: a LiveRun: the record of the path that the model
takes with these patches, and the patches that this path never reached. Parameters, buffers and inputs are the recorded
ones unless the request gives others; attributes, containers and generators are as they were when the recorded forward
began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen
from torch import nn

from ..._edit.select import SAVE_EVERYTHING, SaveSpec
from ..._ir.autograd import as_leaf
from ..._ir.equality import REPEATED_FORWARD
from ..._ir.graph import Graph
from ..._ir.label import Naming
from ..._ir.location import Location
from ..._ir.memory import have_same_address, storage_of
from ..._ir.model_turns import Turn
from ..._ir.node import Call, Const, Input, Node, Ref, State, TensorSpec, refs_in, value_of
from ..._ir.printer import listing
from ..._ir.trees import freeze_deep, thaw, thaw_shared
from ..._replay.guards import Departure, departures_between_runs
from ..._replay.inputs import input_numbers
from ..._replay.interpreter import modes, recorded_environment
from ..._replay.move import addresses_given_memory
from ..._replay.record import Record, detached
from ..._replay.request import Request
from ..._replay.supply import Run, supply
from ...errors import DivergedReplay, NotDifferentiable, StaleValue
from ..autograd_effects import without_hooks_around
from ..capture import (
    Captured,
    TraceRequest,
    flags_before,
    iterators_in,
    put_generators_back,
    record_of,
    require_no_iterators,
    require_supported,
    trace_twice,
    undo_writes,
)
from ..memory_saving import memory_saving_tracer, stop_observing
from ..provenance import Provenance, StartMark, reaches_scripts
from ..recorder import geometry_of
from ..recording import Recording, ValueId
from ..rng import caller_generators
from ..scopes import addresses, exclusive
from ..snapshot import ForwardState, ModelState, RngState, Snapshot, restore_flags
from ..state_changes import LATE_WRITE, held_tensor, tensor_at
from ..tracer import Tracer
from ..writes import WRITTEN_THROUGH_DATA
from .live_patches import LivePatch, LivePatches, MatchingSites, is_output_alias_node, live_patch_at, live_patches_of
from .patching_tracer import LiveSetup, PatchingTracer
from .same_forward import ForwardComparison
from .substitutes import PendingSubstitute

T = TypeVar("T")
Held = Mapping[str, torch.Tensor]  # by the name of a node: the model's own tensor


@frozen(eq=False)
class LiveRun:
    """The result of a live run."""

    record: Record
    unreached: tuple[str, ...]  # patched nodes that this path never reached
    state: dict[Ref, torch.Tensor]  # parameters and other state that it read, with autograd history


def with_model_to_itself(model: Any, work: Callable[[Turn], T]) -> T:
    """Returns the result of `work` while no other thread runs the model, which it changes and restores."""
    return exclusive(lambda: Provenance(model).modules, work)


def has_scripts(model: Any) -> bool:
    """True if a module of the model is TorchScript, or its code refers to such a function."""
    origins = Provenance(model)
    return any(isinstance(one, torch.jit.ScriptModule) for one in origins.modules) or reaches_scripts(origins)


def capture_without_effects(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], naming: Naming, wish: SaveSpec = SAVE_EVERYTHING
) -> Captured:
    """Captures and leaves nothing behind, not even what a plain forward leaves. What `wish` does not mean is freed
    meanwhile.
    """
    require_supported(model)
    require_no_iterators(args, kwargs)

    def _capture_without_effects(turn: Turn) -> Captured:
        start = ForwardState(model, naming, Snapshot(Provenance(model).modules, (args, kwargs)), RngState())
        setup = LiveSetup(LivePatches(), {}, lambda tracer: [])
        captured, _ = _run(turn, start, args, kwargs, setup, wish=wish)
        stop_observing(captured.recording)
        start.generators = tuple(captured.recording.rng.generators.values())
        start.lent = frozenset(map(id, caller_generators(model, args, kwargs)))
        start.snapshot.flags = flags_before(captured.recording)
        return captured

    return with_model_to_itself(model, _capture_without_effects)


def capture_on_other_inputs(start: ForwardState, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """The record of the model on other inputs, begun as the recorded forward began, with the parameters and buffers
    that the model holds now. Nothing of it is left behind.
    """
    setup = LiveSetup(LivePatches(), {}, lambda tracer: [])

    def _capture_on_other_inputs(turn: Turn) -> Captured:
        now = evolve(start, snapshot=start.snapshot.holding(Provenance(start.model).modules))
        captured, tracer = _run(turn, now, args, kwargs, setup, inputs_are_new=True)
        del tracer.substitutes  # which hold the tracer, and so all that the model has computed
        return captured

    with without_hooks_around(), recorded_environment(True, graph), modes(graph.outer_modes):
        made = record_of(with_model_to_itself(start.model, _capture_on_other_inputs))
    known = tuple(dict.fromkeys((*graph.forward_only, *made.graph.forward_only)))  # without hooks some are not seen
    return evolve(made, graph=evolve(made.graph, forward_only=known))


def next_forward_difference(start: ForwardState, record: Record, in_all: bool = False) -> str:
    """How the next forward of the model would differ from the recorded one on its inputs; empty if it would not. With
    `in_all` what Python reads, and what is drawn, counts as well.
    """
    graph = record.graph
    given = lambda leaf: as_leaf(record.value(leaf)) if type(leaf) is Ref else leaf  # noqa: E731
    args, kwargs = thaw_shared(graph.inputs, given)
    try:
        with recorded_environment(True, graph), modes(graph.outer_modes):
            found = record_of(capture_without_effects(start.model, args, kwargs, start.naming))
    except Exception as error:
        return f"raises {type(error).__name__}"
    comparison = ForwardComparison(record, found)
    return comparison.difference() or (comparison.difference_beside() if in_all else "")


def prove(start: ForwardState, record: Record) -> None:
    """Raise StaleValue unless the model that was bound to a loaded program does what was recorded, on its inputs."""
    if start.is_proven:
        return
    before = RngState()
    try:
        start.rng.put_back()
        why = next_forward_difference(start, record, in_all=True)
    finally:
        before.put_back()
    if why:
        raise StaleValue(
            f"the model that was given by state= is not the one that was recorded: on the recorded inputs it {why}.\n"
            "Give that one, in the same mode (`eval()` or `train()`), or load the file without state=."
        )
    start.is_proven = True


def run_with_patches(start: ForwardState, record: Record, request: Request, given: Any = None) -> LiveRun:
    """Runs the model, patched as a request says, on the recorded inputs unless `given` others.

    Holds the turn of the model: no other run and no plain forward sees it while it is changed.
    """
    return with_model_to_itself(start.model, lambda turn: _run_with_patches(turn, start, record, request, given))


def _run_with_patches(turn: Turn, start: ForwardState, record: Record, request: Request, given: Any) -> LiveRun:
    _require_recorded_state(record, request)
    record = _with_recorded_attributes(record)
    graph, patches = record.graph, live_patches_of(record, request)
    if patches.unreachable:
        raise DivergedReplay(
            f"the patch at {patches.unreachable[0]} cannot be applied while the model runs: it is a view that "
            "replaylens regenerates after a write to its memory, and no call of the model gives it."
        )
    numbers = input_numbers(graph, *(given or ())) if given else {node.name: node.path[0] for node in graph.input_nodes}
    inputs = {numbers[name]: patch for name, patch in patches.sources.items() if name in numbers}
    held = record.live if start.objects is None else start.objects
    make = partial(_substitutes, record, held, request, patches)
    state = _state_in_inputs(start.model, record) if request.inputs is None and given is None else {}
    separate, most = given is None and not request.fresh, max(10_000, 100 * len(graph))
    setup = LiveSetup(
        patches, inputs, make, state, grad=request.grad, fresh=request.fresh, separate_draws=separate, max_calls=most
    )
    args, kwargs = given or thaw_shared(
        graph.inputs, lambda leaf: supply(record, request, leaf) if type(leaf) is Ref else leaf
    )
    for kind in iterators_in(args, kwargs) if given is None else ():
        raise DivergedReplay(
            f"the model cannot be run again: one of its inputs is an iterator (a {kind}), which the recorded forward "
            "has exhausted. Capture it with a list instead."
        )
    ambient = evolve(graph.outer_modes, grad=True, inference=False) if request.grad else graph.outer_modes
    with recorded_environment(not request.fresh, graph), modes(ambient):
        captured, tracer = _run(turn, start, args, kwargs, setup, request.inputs is not None)
    if request.fresh:  # other generator states than when recorded
        captured.recording.rng.other_random_sources = graph.other_random_sources
    found = record_of(captured)
    if request.grad:
        _require_same_backward(captured.recording, record.graph, found.graph)
    if not request.given and request.inputs is None and not request.fresh:
        _require_as_recorded(record, found)
    unreached = patches.unreached(tracer.reached)
    if unreached and not tracer.reached and not request.ends:
        raise DivergedReplay(
            f"with this patch the model takes another path and never reaches {', '.join(unreached)}: nothing was "
            "patched."
        )
    pairs = zip(captured.recording.records, found.graph.nodes, strict=True)
    values = captured.recording.values
    return LiveRun(found, unreached, {Ref(n.name): values[r.returns] for r, n in pairs if isinstance(n, State)})


def _require_same_backward(recording: Recording, *graphs: Graph) -> None:
    """Refuses gradients that differ from the model's own backward: the writes of the forward are undone by now."""
    for word in (word for graph in graphs for word in graph.forward_only if word in (LATE_WRITE, WRITTEN_THROUGH_DATA)):
        raise NotDifferentiable(f"gradients through {word}")
    for tensor, flag in recording.autograd.left_turned:
        if tensor.requires_grad != flag:
            raise NotDifferentiable(
                f"the forward sets `requires_grad` of a tensor of the model, {TensorSpec.of(tensor)}, to another value "
                "and leaves it: the model's own backward reads that, but a run restores it before. Set it before the "
                "forward."
            )


def _require_recorded_state(record: Record, request: Request) -> None:
    """Raises StaleValue unless the model still holds the recorded parameters and buffers: it would be another model.
    The request may replace some; attributes are restored for the run.
    """
    by_name, _ = record.watched
    for name, place in by_name.items():
        is_given = record.graph.positions[name] in request.given
        if place.kind != "attribute" and not is_given and not place.is_recorded_tensor():
            raise StaleValue(record.stale(Ref(name)))


def _with_recorded_attributes(record: Record) -> Record:
    """The record, so that attributes which the user has replaced are put back for the run if they are intact."""
    places = {address: place for address, place in record.places.items() if not place.is_intact_elsewhere()}
    return record if len(places) == len(record.places) else evolve(record, places=places)


def as_run(
    live: LiveRun,
    recorded: Record,
    request: Request,
    first: Departure | None,
    find: Callable[[Any], Location],
    program: Any,
) -> Run:
    """A live run as the Run that a request asked for. `find` resolves a name in the program of that run."""
    record, graph = live.record, live.record.graph
    has_output = request.to is None

    def get(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf
        return live.state.get(leaf, record.value(leaf)) if request.grad else detached(record.value(leaf))

    patched_outputs = _patched_outputs(request, recorded.graph, graph, get) if has_output else {}

    def lookup(name: Any) -> Any:
        at = name if isinstance(name, Location) else find(name)
        if (places := at.inner) is not None:
            return thaw(places, lambda leaf: lookup(leaf) if type(leaf) is Location else leaf)
        if at.output is not None and at.output in patched_outputs:
            return patched_outputs[at.output]
        return thaw(at.tree(graph), get)

    found = [mismatch.departure for mismatch in request.mismatches]
    found += departures_between_runs(recorded.graph, graph, recorded.value, record.value)
    if first is not None and all(str(first) != str(other) for other in found):
        found.insert(0, first)
    found.extend(Departure(f"the patch at {name}", "reached", "on a path not taken") for name in live.unreached)
    return Run(
        executed=tuple([call.name for call in graph.calls]),
        state_changes={**{a: get(ref) for a, ref in graph.changes}, **dict.fromkeys(graph.removed)}
        if has_output
        else {},
        departures=tuple(found),
        output=thaw(
            graph.output,
            lambda leaf: patched_outputs[leaf] if type(leaf) is Ref and leaf in patched_outputs else get(leaf),
        )
        if has_output
        else None,
        has_output=has_output,
        lookup=lookup,
        program=program,
    )


def _patched_outputs(request: Request, recorded: Graph, graph: Graph, get: Callable[[Any], Any]) -> dict[Ref, Any]:
    """Values of the patched program outputs. An output of the recorded program is matched by its number."""
    found: dict[Ref, Any] = {}
    places = MatchingSites(recorded, graph) if request.ends else None
    for ref, change in request.ends.items():
        at = places.of(Location(ref.node, output=ref)) if places else None
        if at is None or (mine := at.output) is None:
            raise DivergedReplay(f"the patch at an output, {ref}, does not apply: the model returns fewer outputs now.")
        found[mine] = live_patch_at(recorded, ref, change)(get(mine))
    return found


def _run(
    turn: Turn,
    start: ForwardState,
    args: Any,
    kwargs: Any,
    setup: LiveSetup,
    inputs_are_new: bool = False,
    wish: SaveSpec = SAVE_EVERYTHING,
) -> tuple[Captured, Any]:
    """Runs the model once from its ForwardState, and restores its present state and the generators. Also the tracer:
    one that patches, unless values are freed.

    `inputs_are_new`: the inputs are not those of the recorded forward, and keep their present content.
    """
    tracers: list[Any] = []
    inputs = Snapshot((), (args, kwargs)) if inputs_are_new else None
    origins, dtype = Provenance(start.model), torch.get_default_dtype()
    model_state = ModelState(origins.modules, (args, kwargs), start)

    def new_tracer(recording: Recording, own: Provenance, date: StartMark, deep: bool, unknown: str) -> PatchingTracer:
        tracers.append(PatchingTracer(recording, own, date, deep, unknown, setup))
        return tracers[-1]

    def new_saving_tracer(*about: Any) -> Tracer:
        tracers.append(memory_saving_tracer(wish)(*about))
        return tracers[-1]

    def leave() -> None:
        _undo_writes(tracers)
        model_state.put_back()
        torch.set_default_dtype(dtype)
        if not setup.fresh:
            for tracer in reversed(tracers):
                put_generators_back(tracer.recording)
            model_state.put_generators_back()
        else:
            model_state.put_own_generators_back()

    def begin() -> None:
        start.snapshot.put_back(draws_on=setup.fresh)
        if not setup.fresh:  # else the model's own generators draw on from where they are
            start.put_back()
        if inputs is not None:
            inputs.put_back()

    def begin_again(recording: Recording, of: ForwardState) -> None:
        leave()
        begin()

    try:
        try:
            turn.undo = leave
            begin()
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                origins = Provenance(start.model)  # of the restored model
                first = new_tracer if wish.everything else new_saving_tracer
                request = TraceRequest(start.model, args, kwargs, start, first, new_tracer)
                captured = trace_twice(request, begin_again, origins)
            recording, unwritten = captured.recording, getattr(tracers[-1], "patched_state", ())
            recording.state.changes = [
                (where, last) for where, last in recording.state.changes if last not in unwritten
            ]
            return captured, tracers[-1]
        finally:
            leave()
    finally:  # again: an interrupt may have hit before it or within it
        leave()


def _undo_writes(tracers: list[Any]) -> None:
    """Undoes what was written to the model's own tensors. Under a tracer that patches, nothing was."""
    for tracer in tracers:
        if not isinstance(tracer, PatchingTracer):
            restore_flags(flags_before(tracer.recording))
            undo_writes(tracer.recording)


def _substitutes(
    record: Record, held: Held, request: Request, patches: LivePatches, tracer: PatchingTracer
) -> list[tuple[torch.Tensor, PendingSubstitute]]:
    """The substitutes of parameters, buffers and constants: recorded values where the model now holds others, values
    that the request gives, and patched ones. `held` are the model's own, by node.
    """
    found: list[tuple[torch.Tensor, PendingSubstitute]] = []
    named = addresses(tracer.origins.table)
    modules = {named[id(module)]: module for module in tracer.origins.modules}
    given = addresses_given_memory(record.graph)
    for node in record.graph.nodes:
        if isinstance(node, State) and node.name in held:
            own = held[node.name]
            objects, value = _objects(node, modules, own), _value(node, record, request, own)
            where: Any = _where(node.address, modules)
        elif isinstance(node, Const) and node.name in patches.sources:
            value, where = _constant(node, record), node.origin
            objects = [value]
        else:
            continue
        kind = node.kind if isinstance(node, State) else "constant"
        storages = _storages_at(node, objects, value, given) if isinstance(node, State) else ()
        pending = PendingSubstitute(kind, where, tuple(objects), value, storages=storages)
        if (patch := patches.sources.get(node.name)) is not None:
            (new,), key = tracer.compute_patch(patch, (value,))
            record_patch = partial(_record_source_patch, tracer, patch, new, key)
            found.append((new, evolve(pending, record_patch=record_patch)))
        elif any(thing is not value for thing in objects):
            new = value.view_as(value) if any(value is other for other, _ in found) else value
            found.append((new, evolve(pending, value=new)))
    if request.inputs is not None:
        found.extend(_state_in_recorded_inputs(record, modules, request))
    return found


def _storages_at(
    node: State, objects: list[torch.Tensor], value: torch.Tensor, given: frozenset[str]
) -> tuple[int, ...]:
    """The storages of the objects at a state node, where these lie in memory as the value does. Empty for a parameter
    that the forward moved to other memory: it began elsewhere.
    """
    if node.kind == "parameter" and not given.isdisjoint((node.address, *node.aliases)):
        return ()
    alike = [one for one in objects if geometry_of(one) == geometry_of(value)]
    return tuple([key for one in alike if (key := storage_of(one)) is not None])


def _state_in_inputs(model: Any, record: Record) -> dict[int, list[torch.Tensor]]:
    """Tensors of the model that lie in the memory of a recorded input and that the forward wrote, by input number."""
    origins = Provenance(model)
    named = addresses(origins.table)
    modules = {named[id(module)]: module for module in origins.modules}
    found: dict[int, list[torch.Tensor]] = {}
    for address, (name, _) in record.lent.items():
        node = record.graph[name]
        if isinstance(node, Input) and (now := tensor_at(_where(address, modules))) is not None:
            found.setdefault(node.path[0], []).append(now)
    return found


def _state_in_recorded_inputs(
    record: Record, modules: dict[str, nn.Module], request: Request
) -> Iterator[tuple[torch.Tensor, PendingSubstitute]]:
    """Substitutes for tensors of the model that lay in the memory of a recorded input, for a run on other inputs: they
    have the content of then, unless an input shares their memory again.
    """
    given: list[torch.Tensor] = []
    freeze_deep(request.inputs, given.append)
    known = {storage_of(tensor) for tensor in given}
    read = {address for node in record.graph.state_nodes for address in (node.address, *node.aliases)}
    for address, (_, first) in record.lent.items():
        now = tensor_at(_where(address, modules)) if address not in read else None
        if now is not None and storage_of(now) not in known:
            yield first, PendingSubstitute("buffer", _where(address, modules), (now,), first)


def _value(node: State, record: Record, request: Request, own: torch.Tensor) -> torch.Tensor:
    """The recorded or given value, as the model's own object where that still is this value."""
    value = supply(record, request, Ref(node.name))
    given = request.given.get(record.graph.positions[node.name])
    if given is not None and given.requires_grad != value.requires_grad:  # the model may read the flag
        return given
    return own if given is None and _is_same_memory(own, value) else value


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not have_same_address(one, other):
        return False
    return one.layout is not torch.strided or (one.shape, one.stride()) == (other.shape, other.stride())


def _objects(node: State, modules: dict[str, nn.Module], own: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that the model holds at the addresses of a node now, then the one that it held when recorded."""
    found = [own]
    for address in (node.address, *node.aliases) if node.kind != "attribute" else ():
        module, key = _where(address, modules)
        now = held_tensor(module, key) if module is not None else None
        if now is not None and all(now is not other for other in found):
            found.insert(0, now)
    return found


def _where(address: str, modules: dict[str, nn.Module]) -> tuple[nn.Module | None, str]:
    """The module that an address leads to, and the key within that module."""
    steps = address.split(".")
    for count in range(len(steps) - 1, -1, -1):
        if (module := modules.get(".".join(steps[:count]))) is not None:
            return module, ".".join(steps[count:])
    return None, address


def _constant(node: Const, record: Record) -> torch.Tensor:
    if node.origin != "older than the capture":
        raise DivergedReplay(
            f"the patch at {node.name} cannot be applied while the model runs: the model creates this constant itself "
            f"({node.origin})."
        )
    return record.value(Ref(node.name))


def _record_source_patch(
    tracer: PatchingTracer, patch: LivePatch, new: torch.Tensor, key: str | None, old: ValueId
) -> None:
    """Records the patch of a parameter, buffer or constant at its first read."""
    number, handle = len(tracer.recording.records) - 1, tracer.recording.keep(new)
    tracer.memory.register(new, handle)
    tracer.patched_state.add(handle)
    tracer.record_patch(patch, number, [old], [handle], key)


def _require_as_recorded(record: Record, found: Record) -> None:
    """Raises StaleValue unless the run repeats the recorded forward up to its first patch: its code changed."""
    for one, other in _until_patched(record.graph, found.graph):
        same = type(one) is type(other)
        if isinstance(one, Call) and isinstance(other, Call):
            refs = refs_in(value_of(one)), refs_in(value_of(other))
            same = one.kind == other.kind and len(refs[0]) == len(refs[1])  # one run may write where the other does not
            pairs = [(record.values.get(ref), found.values[mine]) for ref, mine in zip(*refs, strict=False)]
            same = same and all(old is None or _is_close(old, new) for old, new in pairs)
        if not same:
            raise StaleValue(
                "the patch leaves the recorded path, and the model cannot be run instead: before any patch it no "
                f"longer does what was recorded.\n{listing(record.graph, one.name, 'another value now')}\n"
                "Its code or attributes have changed. Capture it again."
            )


def _until_patched(one: Graph, other: Graph) -> Iterator[tuple[Node, Node]]:
    """Pairs the nodes of both graphs up to the first patch. Aliases of module outputs are left out: their place in the
    graph depends on the patches.
    """
    patched = {node.edits: node for node in other.calls if node.edits is not None}
    end = next((n for n, node in enumerate(other.nodes) if node.name in patched), len(other.nodes))
    first = patched.get(other.nodes[end].name) if end < len(other.nodes) else None
    # what it edits is an alias that exists in this run only at its end
    is_hand_off = first is not None and is_output_alias_node(one[first.target.function.name])
    made = [
        [n for n in nodes if not is_output_alias_node(n)]
        for nodes in (one.nodes, other.nodes[: end + (not is_hand_off)])
    ]
    yield from zip(*made, strict=False)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two values agree up to the last bits, which some kernels vary."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or one.is_quantized or one.is_meta:
        return True
    return REPEATED_FORWARD.holds(one.detach(), other.detach())
