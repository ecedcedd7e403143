"""capture(model, *inputs): run the model once, and give back the pure program that it was.

In: any model or function and its inputs. Out: a Capture: the recording, and what the model returned. The model, its
buffers, its hooks, the generators and torch itself are left as a plain forward leaves them.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import RLock, get_ident
from types import FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .._edit.save_spec import EVERYTHING, SaveSpec
from .._ir.equality import attached, same_content
from .._ir.graph import Graph
from .._ir.model_state import StatePlace
from .._ir.node import Input, Node, Ref, State
from .._ir.node_summary import Naming
from .._ir.shared_memory import extent, storage_of, versions_of
from .._ir.torch_private import compiler_if_loaded, default_device, hooks_of_all_modules, without_function_modes
from .._ir.trees import ATOMS, fingerprint, freeze_deep, keys_of, leaves, named, require_room, thaw_shared, walk
from .._ir.turns import calls, come, turns
from .._ir.util import add_note
from .._ir.world import alone, drawing_alone, freed, in_children, restoring
from .._replay.record import Record, Versions
from ..errors import CaptureError, ReplaylensError, UnannouncedWrite, UnsupportedModel
from .aliasing import Alias, may_overlap
from .bytecode import is_torch_code
from .checkpoints import leave_checkpoints, recomputed_writes
from .custom_functions import by_its_class
from .grad_hooks import note_hooks
from .leaf_flags import note_flags
from .memory_saving import memory_saving_tracer, settle
from .output_aliases import hand_on
from .provenance import Moment, Provenance, is_older, marking_older_objects, reaches_scripts, tensors_behind
from .recorder import RetraceAtDispatch
from .recording import Recording, SourceRecord, ValueId, account_of, address_of, freeze, last_name, line_of, timed
from .rng import lent_generators
from .scopes import boundary, callers, listening, outermost
from .snapshot import ForwardState, RngState, Snapshot, turn_back
from .state_changes import (
    altered,
    counters_of,
    held,
    held_at_start,
    keep_arrays,
    keep_by_value,
    keep_inputs,
    note_places,
    note_writes_from_outside,
    output_by_value,
    require_seen,
    take_changes,
    take_lent,
)
from .threads import followed
from .tracer import Tracer


@frozen(eq=False)
class Captured:
    """What one look at a forward gave, and where the forward began, so that the model can be run from there again."""

    recording: Recording
    output: Any
    beginning: ForwardState


@frozen(eq=False)
class Forward:
    """What is to be looked at, and who looks."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beginning: ForwardState
    tracer: Callable[[Recording, Provenance, Moment, bool, str], Tracer] = Tracer
    second: Callable[[Recording, Provenance, Moment, bool, str], Tracer] | None = None  # of a second look, if another
    failed: Callable[[Recording, ForwardState], None] | None = None  # is told of a look that raises
    begun: Callable[[tuple[Recording, ForwardState]], None] | None = None  # is told of each look when it begins


def record(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    naming: Naming,
    unknown: str = "raise",
    wish: SaveSpec = EVERYTHING,
    failed: Callable[[Recording, ForwardState], None] | None = None,
    begun: Callable[[tuple[Recording, ForwardState]], None] | None = None,
) -> Captured:
    """Run the model under the tracer. Looks a second time, at every ATen call, if the first was blind to something, or
    had let go of a value that turned out to be needed: everything is kept then until the end.
    """
    require_supported(model)
    origins = Provenance(model)
    if turns:  # another thread may have changed the model meanwhile
        come(map(id, origins.modules))
        origins = Provenance(model)
    snapshot = Snapshot(origins.modules, (args, kwargs), held=origins.held)
    beginning = ForwardState(model, naming, snapshot, RngState(), unknown)
    tracer = Tracer if wish.everything else memory_saving_tracer(wish)
    captured = trace_twice(Forward(model, args, kwargs, beginning, tracer, Tracer, failed, begun), put_back, origins)
    settle(captured.recording)
    beginning.generators = tuple(captured.recording.generators.values())
    beginning.lent = frozenset(map(id, lent_generators(model, args, kwargs)))
    beginning.snapshot.flags = flags_of(captured.recording)
    return captured


def _modules_of(held: dict[str, Any]) -> list[int]:
    """The modules that a capture is in the middle of, by id, as its frame has them."""
    origins: Provenance | None = held.get("origins")
    return [] if origins is None else list(map(id, origins.modules))


calls[record.__code__] = _modules_of


def flags_of(recording: Recording) -> list[tuple[torch.Tensor, bool]]:
    """Of the leaves whose flag the forward turned: how it was before."""
    return [(tensor, flag) for _, flag, tensor in recording.turned.values()]


def trace_twice(forward: Forward, put_back: Callable[[Recording, ForwardState], None], origins: Provenance) -> Captured:
    """What a first look gave, or a second one. Torch's modes are left as they were, wherever an interrupt comes."""
    return restoring(partial(_trace_twice, forward, put_back, origins))


def _trace_twice(
    forward: Forward, put_back: Callable[[Recording, ForwardState], None], origins: Provenance
) -> Captured:
    """What a first look gave, or a second one, before which all that the first one changed is put back."""
    compiler_at_start = compiler_if_loaded()
    first = Recording(_name_of(forward.model), forward.beginning.naming)
    deep = torch.is_inference_mode_enabled()  # its tensors have no write counters: every write must be seen
    try:
        return _look(forward, first, origins, deep)
    except RetraceAtDispatch:
        deep = True
    except ReplaylensError:
        raise
    except Exception:
        if compiler_at_start or not compiler_if_loaded():
            raise  # else: the compiler was loaded in the middle, and did not know of the capture
        deep = False
    require_no_iterators(forward.args, forward.kwargs)
    with drawing_alone():
        put_back(first, forward.beginning)
    try:
        again = evolve(forward, tracer=forward.second or forward.tracer)
        return _look(again, Recording(first.model_name, first.naming), Provenance(forward.model), deep)
    except RetraceAtDispatch:
        if not deep:
            raise
        raise CaptureError(
            "a tensor reached an operation whose origin was not seen, not even among the ATen calls."
        ) from None


def _look(forward: Forward, recording: Recording, origins: Provenance, deep: bool) -> Captured:
    _require_ready(origins)
    if forward.begun is not None:
        forward.begun((recording, forward.beginning))
    origins.attributes_begun = forward.beginning.snapshot.attributes
    deep = deep or reaches_scripts(origins)
    with marking_older_objects() as date:
        tracer = forward.tracer(recording, origins, date, deep, forward.beginning.unknown)
        tracer.draws.caller_states = {
            id(g): g.get_state() for g in lent_generators(forward.model, forward.args, forward.kwargs)
        }
        tracer.draws.model_states = {id(g): state for g, state in forward.beginning.snapshot.generators}
        recording.default_dtype = torch.get_default_dtype()
        recording.ambient, recording.is_deep = tracer.context(), deep
        recording.default_device = default_device()
        recording.model = forward.model if isinstance(forward.model, FunctionType) else None
        recording.takes_any_keyword = _takes_any_keyword(forward.model)
        recording.called_from = callers(sys._getframe())
        recording.inputs, args, kwargs = _take_inputs(tracer, forward.args, forward.kwargs)
        watch = tracer.watch if tracer.deep and tracer.watch is not None else nullcontext()
        counters = counters_of(origins, forward.beginning.snapshot)
        _watch_arrays(tracer, forward.beginning.snapshot)
        with eager_compiler(), deeper_stack(), listening(tracer), tracer, watch:
            with timed(recording), _told_of_failure(forward, recording), followed(tracer):
                output = _call(forward.model, args, kwargs, tracer)
            with without_function_modes(), tracer.at_work():
                tracer.note_other_threads()
                tracer.note_asked()
                require_seen(tracer, counters)
                _take_ends(forward, tracer, output)
                output = output_by_value(tracer, output)
    for tree in (recording.inputs, recording.output, *[handed[1] for handed in recording.scope_outputs]):
        if type(tree) is not ValueId:
            require_room(tree)
    tracer.watch = None  # they hold each other, and with them every value
    recording.addresses = origins.addresses
    origins.forget()
    return Captured(recording, output, forward.beginning)


def _take_ends(forward: Forward, tracer: Tracer, output: Any) -> None:
    """What the forward gave, and what it wrote."""
    recording = tracer.recording
    recording.output = freeze_deep(output, tracer.read)
    _require_open(tracer, recording.output)
    note_hooks(tracer)
    note_writes_from_outside(tracer)
    if recording.turned:
        note_flags(tracer)
    take_changes(tracer, forward.beginning.snapshot)
    if tracer.leaves_changes:
        recording.altered = altered(tracer, forward.beginning.snapshot)
    recording.computed_again = recomputed_writes(tracer)
    _take_touched(tracer)
    _require_one_memory(tracer)
    _require_one_storage(tracer, forward.beginning.snapshot)
    recording.left = tracer.draws.final_state()
    beginning = forward.beginning
    recording.drawn_elsewhere = (
        *beginning.rng.moved(),
        *beginning.snapshot.drawn_generators(),
        *tracer.draws.only_model,
    )
    recording.doubts = tracer.draws.unknown
    recording.versions = _require_announced(tracer)
    if tracer.leaves_changes:
        keep_by_value(tracer)
        keep_arrays(tracer)
        keep_inputs(recording)
        note_places(tracer)
        take_lent(tracer)
    modules = [scope.module for scope in recording.scopes]
    own = any(module._backward_hooks or module._backward_pre_hooks for module in modules)
    if own or (modules and any(hooks_of_all_modules)):
        recording.one_way.append("a module's backward hook")


def _require_open(tracer: Tracer, tree: Any) -> None:
    """Is all that the model computed in its output where a program can put other values?"""
    closed = [leaf for leaf in leaves(tree) if type(leaf) is not ValueId and type(leaf) not in ATOMS]
    keys = [key for key in keys_of(tree) if isinstance(key, torch.Tensor)]
    own = tracer.origins.known_modules if closed else frozenset()
    for leaf in [*closed, *keys]:
        for tensor in [leaf] if isinstance(leaf, torch.Tensor) else tensors_behind(leaf, own):
            if tracer.origins.own_among(tensor) or (
                tracer.memory.read(tensor) is None and is_older(tensor, tracer.date)
            ):
                continue
            what = "a tensor as a key" if leaf is tensor else f"a {type(leaf).__name__} that holds a tensor"
            raise CaptureError(
                f"the model returned {what} which the forward computed or was given: a replay could put no other "
                "there.\nReturn such tensors by themselves, in lists, tuples, dicts or attributes of objects."
            )


@contextmanager
def _told_of_failure(forward: Forward, recording: Recording) -> Iterator[None]:
    try:
        yield
    except RetraceAtDispatch:
        raise  # all is put back before the second look
    except BaseException:
        if forward.failed is not None:
            with without_function_modes():
                forward.failed(recording, forward.beginning)
        raise


@outermost
@boundary
def _ended(model: Any, args: Any, kwargs: Any) -> Any:
    """Call the model. A checkpoint that it did not leave by itself is over as well."""
    try:
        return model(*args, **kwargs)
    except BaseException as error:
        leave_checkpoints(error)
        raise


@boundary
def _call(model: Any, args: Any, kwargs: Any, tracer: Tracer) -> Any:
    try:
        output = _ended(by_its_class(model), args, kwargs)
    except (RetraceAtDispatch, ReplaylensError):
        raise
    except Exception as error:
        if tracer.refused is not None and tracer.refused is not error:
            raise tracer.refused from error
        _say_where(error, tracer)
        raise
    finally:
        if tracer.functorch:
            tracer.leave_functorch()
    if tracer.refused is not None:
        raise tracer.refused
    if any(isinstance(leaf, GeneratorType) for leaf in leaves(freeze_deep(output, lambda tensor: None))):
        raise CaptureError(
            "the model returned a generator, which computes after the forward is over. Capture a "
            "function that returns a list of it."
        )
    return output


def record_of(captured: Captured) -> Record:
    """What a capture knows, by Ref: values, write counters, generator states, the model's own parameters."""
    hand_on(captured.recording)
    recording, made = captured.recording, freeze(captured.recording)
    homes: dict[int, Any] = {}  # of each module, by id
    notes, steps = recording.places(), recording.steps
    places = {address_of(made.addresses, note[0]): StatePlace.noted(note, homes, steps) for note in notes}
    graph = _as_it_was(made.graph, places, recording)
    values: dict[Ref, torch.Tensor] = {}
    live: dict[str, torch.Tensor] = {}
    for ref, handle in made.handles.items():
        if handle not in recording.gone:
            values[ref] = recording.given.get(handle, recording.values[handle])
    for source, node in zip(recording.records, graph.nodes, strict=True):
        if isinstance(node, State) and isinstance(source, SourceRecord):
            value = values[Ref(node.name)]
            live[node.name] = source.tensor
            values[Ref(node.name)] = (
                value if value.is_inference() else value.detach().requires_grad_(value.requires_grad)
            )
        elif isinstance(node, Input) and _is_written_leaf(source, values.get(Ref(node.name))):
            live[node.name] = source.tensor  # type: ignore[union-attr]
    names = {handle: ref.node for ref, handle in made.handles.items()}
    lent = {address_of(made.addresses, where): (names[source], first) for where, source, first in recording.lent}
    versions = Versions((ref, recording.versions[handle]) for ref, handle in made.handles.items() if ref in values)
    account = account_of(recording, made)
    return Record(graph, values, versions, recording.draws, live, account=account, places=places, lent=lent)


def _is_written_leaf(source: Any, value: torch.Tensor | None) -> bool:
    """Did the forward write a leaf that it was given, so that what it held before is kept by value?"""
    return value is not None and value is not source.tensor and value.requires_grad and source.tensor.is_leaf


def _as_it_was(graph: Graph, places: dict[str, StatePlace], recording: Recording) -> Graph:
    """The graph with the dtypes and strides that the model's tensors had: `model.double()` may have come before this
    was asked.
    """
    nodes: list[Node] = list(graph.nodes)
    for position, (node, source) in enumerate(zip(graph.nodes, recording.records, strict=True)):
        if not isinstance(node, State) or (place := places.get(node.address)) is None:
            continue
        if place.dtype is not None and place.dtype is not node.meaning.dtype:
            node = evolve(node, meaning=evolve(node.meaning, dtype=place.dtype))
        if isinstance(source, SourceRecord) and recording.strides:
            strides = recording.strides.get(id(source.tensor), node.meaning.strides)
            node = evolve(node, meaning=evolve(node.meaning, strides=strides))
        nodes[position] = node
    return graph if all(map(operator.is_, nodes, graph.nodes)) else evolve(graph, nodes=tuple(nodes))


def require_supported(model: Any) -> None:
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(model, parallel):
        kind = type(model).__name__
        raise UnsupportedModel(
            f"the model is wrapped in {kind}, whose replicas run in threads. Capture `model.module` instead."
        )
    if not callable(model):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be called. Give a module or a function, then its inputs."
        )


def iterators_in(*trees: Any) -> list[str]:
    """The kinds of the iterators of Python's own among inputs: a forward that reads one uses it up."""
    found = leaves(freeze_deep(trees, lambda tensor: None))
    kinds = [type(leaf) for leaf in found if isinstance(leaf, Iterator)]
    return [kind.__name__ for kind in kinds if not isinstance(getattr(kind, "__next__", None), FunctionType)]


def require_no_iterators(args: Any, kwargs: Any) -> None:
    """Refuse inputs that a second forward would find empty."""
    for kind in iterators_in(args, kwargs):
        raise CaptureError(
            f"an iterator is among the inputs (a {kind}), which the first of the forwards that this takes would use up."
            "\nGive a list of what it gives."
        )


def _require_ready(origins: Provenance) -> None:
    kinds = {type(module) for module, _, _ in origins.table}
    if not any(issubclass(kind, (nn.DataParallel, LazyModuleMixin)) for kind in kinds):
        return
    for module, _, _ in origins.table:
        if isinstance(module, nn.DataParallel):
            raise UnsupportedModel(
                "a submodule is wrapped in DataParallel, whose replicas run in threads. Use its `.module` instead."
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            kind = type(module).__name__
            raise UnsupportedModel(
                f"a {kind} has no parameters yet: they are born in the first forward. Run the model "
                "once, then capture it."
            )


def _name_of(model: Any) -> str:
    if isinstance(model, nn.Module):
        modules = vars(model).get("_modules", ())
        inner = modules["_orig_mod"] if "_orig_mod" in modules else model  # noqa: SIM401  (those of TorchScript: no get)
        return type(inner).__name__
    while isinstance(model, partial):
        model = model.func
    named = model if inspect.isroutine(model) or isinstance(model, type) else None  # others may answer anything
    return str(getattr(named, "__name__", type(model).__name__)).strip("<>")


def _take_inputs(tracer: Tracer, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A node for each tensor among the inputs; one that is given twice is one node.

    An input that is also a parameter, buffer or attribute of the model is handed on as an alias: what the model reads
    of its own and what it was given are two things.
    """
    counter: list[Any] = []
    own = tracer.origins.was_own
    swapped: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> ValueId:
        if id(tensor) in swapped:
            tensor = swapped[id(tensor)]
        elif own(tensor):
            swapped[id(tensor)] = made = tensor.view_as(tensor)
            tracer.double(tensor, made)
            tensor = made
            tracer.memory.keep_alive.append(tensor)
        known = tracer.memory.read(tensor)
        if known is not None:
            return known
        counter.append(tensor)
        handle = tracer.recording.keep(tensor)
        if id(tensor) not in tracer.doubled:
            tracer.recording.input_types[handle] = type(tensor)
        tracer.recording.records.append(SourceRecord("input", handle, (len(counter) - 1,), None, tensor))
        tracer.memory.know(tensor, handle)
        return handle

    tree = freeze_deep((tuple(args), dict(kwargs)), leaf)
    plain = [(path, item) for path, item in walk(tree, named) if type(item) is not ValueId and type(item) not in ATOMS]
    given = [(path, tracer.recording.values[item]) for path, item in walk(tree, named) if type(item) is ValueId]
    hung = [(path, text) for path, tensor in given if (text := attached(tensor)) is not None]
    tracer.recording.literals = (*[(path, fingerprint(item)) for path, item in plain], *hung)
    if swapped:
        args, kwargs = thaw_shared(tree, lambda leaf: tracer.recording.values[leaf] if type(leaf) is ValueId else leaf)
    return tree, *tracer.given(tree, args, kwargs)


def _take_touched(tracer: Tracer) -> None:
    """Which sources hold memory that was written, or whose address was asked for."""
    tracer.recording.written.update(tracer.memory.written)
    tracer.recording.writes = tracer.memory.written
    if not tracer.memory.written and not tracer.exposed:
        return
    for record in tracer.recording.records:
        if isinstance(record, SourceRecord):
            known = tracer.memory.live.get(id(record.tensor))
            if isinstance(known, Alias) and (known.base.version or known.base.exposed is not None):
                tracer.recording.touched.add(record.returns)


def _watch_arrays(tracer: Tracer, snapshot: Snapshot) -> None:
    """Arrays of numpy's that hang on the model, or are given to it, over memory of its tensors or inputs: Python may
    write there at any time, and torch does not see it.
    """
    arrays = [value for value, _ in snapshot.restorers if hasattr(value, "__array_interface__") and value.size]
    if not arrays:
        return
    bounds = [_bounds_of(array) for array in arrays]
    given = [record.tensor for record in tracer.recording.records if isinstance(record, SourceRecord)]
    for tensor in (*given, *held_at_start(tracer.origins, snapshot)):
        found = extent(tensor)
        if found is not None and any(found[0] < end and start < found[1] for start, end in bounds):
            tracer.read(tensor)
            tracer.memory.expose(tensor, is_told=False)
            tracer.memory.entry(tensor).base.is_kept = tracer.exposed = True


def _bounds_of(array: Any) -> tuple[int, int]:
    """The first address that an array of numpy's looks at, and the first after it."""
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    start: int = array.__array_interface__["data"][0]
    return start + sum(step for step in steps if step < 0), start + sum(
        step for step in steps if step > 0
    ) + array.itemsize


def _require_one_memory(tracer: Tracer) -> None:
    """Refuse what was written from outside of torch, by numpy or through an address, where inputs or tensors of the
    model's look at the same memory by no call that was seen: their values were recorded as they were found, then or
    later. A write by torch makes them views of one memory before it happens.
    """
    memory = tracer.memory
    if not memory.bases:
        return
    rewritten = {id(base) for base, _ in memory.rewritten}
    bases = {id(one.base): one.base for one in memory.live.values() if isinstance(one, Alias)}
    for key, base in bases.items():
        if base.exposed is None or (key not in rewritten and same_content(base.root, base.exposed)):
            continue
        for record in tracer.recording.records:
            if not isinstance(record, SourceRecord) or storage_of(record.tensor) != storage_of(base.root):
                continue
            known = memory.live.get(id(record.tensor))
            if (not isinstance(known, Alias) or known.base is not base) and may_overlap(record.tensor, base.root):
                raise CaptureError(
                    f"memory of a tensor {tuple(base.root.shape)} was written by numpy, or by others that torch does "
                    f"not see, and {_article(record.kind)} {tuple(record.tensor.shape)} looks at it as well. Which of "
                    "them has which value cannot be known.\nGive copies, or write by torch."
                )


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _require_one_storage(tracer: Tracer, snapshot: Snapshot) -> None:
    """Refuse memory that numpy, dlpack or the like made another storage of, when it is written: of inputs, and of all
    that the model holds, read or not.
    """
    memory = tracer.memory
    if not memory.written:
        return
    given = [(record.tensor, record.kind) for record in tracer.recording.records if isinstance(record, SourceRecord)]
    known = {id(tensor): memory.live.get(id(tensor)) for tensor, _ in given}
    written = {number for number, one in known.items() if isinstance(one, Alias) and one.base.version}
    if not written:
        return
    held = ((tensor, "tensor of the model's") for tensor in held_at_start(tracer.origins, snapshot))
    there = {id(tensor): (tensor, kind) for tensor, kind in (*held, *given)}
    extents = sorted((*found, number) for number, (t, _) in there.items() if (found := extent(t)) is not None)
    for place, (_, end, number) in enumerate(extents):
        for first, _, other in extents[place + 1 :]:
            if first >= end:
                break
            (one, kind), (two, kind_of_two) = there[number], there[other]
            if (number in written or other in written) and storage_of(one) != storage_of(two):
                tensor, what = (two, kind_of_two) if kind_of_two == "input" else (one, kind)
                raise CaptureError(
                    f"{_article(what)} {tuple(tensor.shape)} lies in the memory of another tensor of the forward's, "
                    "through numpy, dlpack or the like, and one of them is written: which value is in it when cannot "
                    "be known.\nGive copies, or views that torch made."
                )


def _takes_any_keyword(model: Any) -> bool:
    """Can the forward see in which order its keywords were given?"""
    while isinstance(model, partial):
        model = model.func
    found = inspect.getattr_static(type(model), "forward", None) if isinstance(model, nn.Module) else model
    forward = found.__func__ if isinstance(found, (MethodType, staticmethod, classmethod)) else found
    code = (forward.__code__ if isinstance(forward, FunctionType) else None) or getattr(
        inspect.getattr_static(model, "__call__", None), "__code__", None
    )
    return code is None or bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _require_announced(tracer: Tracer) -> list[int]:
    """The write counters of all values at the end, if nothing was written that nobody announced."""
    values = tracer.recording.values
    counters = versions_of(values)
    if counters == tracer.recording.versions:
        return counters
    for tensor, _ in tracer.memory.unannounced():
        if not tracer.deep:
            raise RetraceAtDispatch
        raise UnannouncedWrite(
            f"a tensor {tuple(tensor.shape)} was written during the forward by something that was not "
            "seen: another thread, an "
            "extension, or a call that hides from torch. Nothing recorded after the write can be "
            "trusted, so there is no program."
        )
    return counters


def _say_where(error: Exception, tracer: Tracer) -> None:
    """Say where in the model its own exception came from."""
    done = sum(1 for entry in tracer.recording.records if not isinstance(entry, SourceRecord))
    module = tracer.recording.scopes[tracer.failed_scope].module if tracer.failed_scope >= 0 else None
    inside = f" inside {type(module).__name__}" if module is not None else ""
    source, frame = None, error.__traceback__
    while frame is not None:
        if not is_torch_code(frame.tb_frame.f_code):
            source = line_of((frame.tb_frame.f_code, frame.tb_lasti))
        frame = frame.tb_next
    where = "\n" + source.indented if source is not None else ""
    last = f", the last of them {last_name(tracer.recording)}" if done else ""
    add_note(error, f"replaylens: the model raised this after {done} recorded calls{last}{inside}.{where}")


def put_back(recording: Recording, beginning: ForwardState) -> None:
    """Undo what a first look changed, before the second."""
    put_generators_back(recording)
    beginning.put_back()
    turn_back(flags_of(recording))
    with torch.no_grad():
        for record in recording.records:
            if not isinstance(record, SourceRecord):
                continue
            now = held(*record.where) if record.kind in ("parameter", "buffer") else record.tensor
            first = recording.values[record.returns]
            if now is not None and now is not first:
                with torch.inference_mode() if now.is_inference() else nullcontext():
                    now.copy_(first)


def put_generators_back(recording: Recording) -> None:
    """Every generator as it was before the first draw."""
    for generator, state in recording.generators.values():
        generator.set_state(state)


@contextmanager
def deeper_stack() -> Iterator[None]:
    """Room on Python's stack for the tracer's own frames, two at each module call: what the model alone has room for
    has room under a capture. Process-wide: put back by the last capture.
    """
    token = object()
    try:
        try:
            alone(_compiler_lock, partial(_deepens, token))
            yield
        finally:
            alone(_compiler_lock, partial(_is_shallow_again, token))
    finally:  # again: an interrupt may have come before, or in it
        alone(_compiler_lock, partial(_is_shallow_again, token))


def _deepens(token: object) -> None:
    _deeper[token] = get_ident()
    if not _limits:
        _limits.append(sys.getrecursionlimit())
        sys.setrecursionlimit(2 * _limits[0] + 500)


def _is_shallow_again(token: object) -> None:
    _deeper.pop(token, None)
    if not _deeper and _limits:
        sys.setrecursionlimit(_limits[0])
        _limits.clear()


_deeper: dict[object, int] = {}  # the captures that want room, and their threads
_limits: list[int] = []  # the user's limit, while there are some
_compiler_lock = RLock()
_eager: dict[object, int] = {}  # the captures that want the compiler to run nothing, and their threads
_stances: list[Any] = []  # the user's, while there are some


@contextmanager
def eager_compiler() -> Iterator[None]:
    """Compiled modules run eagerly meanwhile. The stance is process-wide: put back by the last capture."""
    dynamo, token = compiler_if_loaded("torch._dynamo.eval_frame"), object()
    if dynamo is None:
        yield
        return
    try:
        try:
            alone(_compiler_lock, partial(_compiles_nothing, dynamo, token))
            yield
        finally:
            alone(_compiler_lock, partial(_compiles_again, dynamo, token))
    finally:  # again: an interrupt may have come before, or in it
        alone(_compiler_lock, partial(_compiles_again, dynamo, token))


def _compiles_nothing(dynamo: Any, token: object) -> None:
    _eager[token] = get_ident()
    if not _stances:
        _stances.append(dynamo._stance)
        dynamo._set_stance(dynamo.DynamoStance("force_eager"))


def _compiles_again(dynamo: Any, token: object) -> None:
    _eager.pop(token, None)
    if not _eager and _stances:
        dynamo._set_stance(_stances[0])
        _stances.clear()


def _in_a_child() -> None:
    freed(_compiler_lock)
    for token in [token for token, thread in _eager.items() if thread != get_ident()]:
        _compiles_again(compiler_if_loaded("torch._dynamo.eval_frame"), token)
    for token in [token for token, thread in _deeper.items() if thread != get_ident()]:
        _is_shallow_again(token)


in_children(_in_a_child)
