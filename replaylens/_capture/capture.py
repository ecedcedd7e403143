"""capture(model, *inputs): run the model once and record the pure program that it was.

In: any model or function and its inputs. Out: a Captured: the recording, and what the model returned. The model, its
buffers, its hooks, the generators and torch itself are left as a plain forward leaves them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import RLock, get_ident
from types import FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from .._edit.select import SAVE_EVERYTHING, SaveSpec
from .._ir.autograd import history_of
from .._ir.equality import python_attributes, same_content
from .._ir.graph import Graph
from .._ir.interrupts import after_fork, during, exclusive_generator, reset_lock, restoring_modes
from .._ir.label import Naming
from .._ir.memory import extent, storage_of, versions_of
from .._ir.model_state import StatePlace
from .._ir.model_turns import modules_inside, turns, wait_for_turns
from .._ir.node import Input, Node, State
from .._ir.torch_private import (
    compiler_if_loaded,
    default_device,
    hooks_of_all_modules,
    settle_dispatch_keys,
    without_function_modes,
)
from .._ir.trees import ATOMS, fingerprint, freeze_deep, keys_of, leaves, named_items, require_room, thaw_shared, walk
from .._ir.util import add_note, cached_property
from .._replay.record import Record, Versions
from ..errors import CaptureError, ReplaylensError, UnannouncedWrite, UnsupportedModel
from .aliasing import Alias, may_overlap
from .autograd_effects import check_hooks, close_checkpoints, recomputed_writes, record_changed_flags
from .custom_functions import by_its_class
from .freeze import FrozenRecording, freeze_recording, last_name, metadata_of
from .memory_saving import memory_saving_tracer, stop_observing
from .output_aliases import add_output_aliases
from .provenance import Provenance, StartMark, hidden_tensors, is_older, marking_older_objects, reaches_scripts
from .recorder import RetraceAtDispatch
from .recording import Freed, Recording, SourceRecord, ValueId, address_of, timed
from .rng import caller_generators
from .scopes import boundary, callers, line_of, listening, outermost
from .snapshot import ForwardState, RngState, Snapshot, restore_flags
from .state_changes import (
    changed_attributes,
    check_outside_writes,
    copy_aliased_output,
    copy_changed_state,
    copy_exposed_memory,
    detach_inputs,
    held_tensor,
    record_changes,
    record_places,
    record_state_in_inputs,
    require_writes_recorded,
    tensors_at_start,
    version_counters,
)
from .threads import running_forward
from .tracer import Tracer
from .user_code import is_torch_code


@frozen(eq=False)
class Captured:
    """One traced forward, and the state it began in, from which the model can be run again."""

    recording: Recording
    output: Any
    beginning: ForwardState

    @cached_property
    def frozen(self) -> FrozenRecording:
        """Its graph, and the names in it."""
        made = freeze_recording(self.recording, add_output_aliases(self.recording))
        return evolve(made, graph=_with_original_dtypes(made, self.recording))


@frozen(eq=False)
class TraceRequest:
    """A forward to be traced, and the tracers for it."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beginning: ForwardState
    tracer: Callable[[Recording, Provenance, StartMark, bool, str], Tracer] = Tracer
    second: Callable[[Recording, Provenance, StartMark, bool, str], Tracer] | None = (
        None  # for the second run, if another
    )
    failed: Callable[[Recording, ForwardState], None] | None = None  # called if the forward raises
    begun: Callable[[tuple[Recording, ForwardState]], None] | None = None  # called when a run begins


def trace_forward(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    naming: Naming,
    unknown: str = "raise",
    wish: SaveSpec = SAVE_EVERYTHING,
    failed: Callable[[Recording, ForwardState], None] | None = None,
    begun: Callable[[tuple[Recording, ForwardState]], None] | None = None,
) -> Captured:
    """Run the model under the tracer; once more, with every ATen call recorded, if the first run missed something or
    freed a value that turned out to be needed. The second run frees nothing before it ends.
    """
    require_supported(model)
    origins = Provenance(model)
    if turns:  # another thread may have changed the model meanwhile
        wait_for_turns(map(id, origins.modules))
        origins = Provenance(model)
    snapshot = Snapshot(origins.modules, (args, kwargs), held=origins.held)
    beginning = ForwardState(model, naming, snapshot, RngState(), unknown)
    tracer = Tracer if wish.everything else memory_saving_tracer(wish)
    captured = trace_twice(
        TraceRequest(model, args, kwargs, beginning, tracer, Tracer, failed, begun), undo_first_run, origins
    )
    stop_observing(captured.recording)
    beginning.generators = tuple(captured.recording.rng.generators.values())
    beginning.lent = frozenset(map(id, caller_generators(model, args, kwargs)))
    beginning.snapshot.flags = flags_before(captured.recording)
    return captured


def _modules_of(held: dict[str, Any]) -> list[int]:
    """The ids of the modules that a running capture holds, from the locals of its frame."""
    origins: Provenance | None = held.get("origins")
    return [] if origins is None else list(map(id, origins.modules))


modules_inside[trace_forward.__code__] = _modules_of


def flags_before(recording: Recording) -> list[tuple[torch.Tensor, bool]]:
    """The leaves whose `requires_grad` the forward changed, each with its value before."""
    return [(tensor, flag) for _, flag, tensor in recording.autograd.turned.values()]


def trace_twice(
    forward: TraceRequest, put_back: Callable[[Recording, ForwardState], None], origins: Provenance
) -> Captured:
    """What the first run gave, or the second. Torch's modes are left as they were, wherever an interrupt comes."""
    return restoring_modes(partial(_trace_twice, forward, put_back, origins))


def _trace_twice(
    forward: TraceRequest, put_back: Callable[[Recording, ForwardState], None], origins: Provenance
) -> Captured:
    """The first run, or the second, before which everything that the first one changed is put back."""
    compiler_at_start = compiler_if_loaded()
    first = Recording(_name_of(forward.model), forward.beginning.naming)
    deep = torch.is_inference_mode_enabled()  # its tensors have no write counters: every write must be seen
    try:
        return _trace_once(forward, first, origins, deep)
    except RetraceAtDispatch:
        deep = True
    except ReplaylensError:
        raise
    except Exception:
        if compiler_at_start or not compiler_if_loaded():
            raise  # else the compiler was loaded during the forward, and did not know of the capture
        deep = False
    require_no_iterators(forward.args, forward.kwargs)
    with exclusive_generator():
        put_back(first, forward.beginning)
    try:
        again = evolve(forward, tracer=forward.second or forward.tracer)
        return _trace_once(again, Recording(first.model_name, first.naming), Provenance(forward.model), deep)
    except RetraceAtDispatch:
        if not deep:
            raise
        raise CaptureError(
            "an operation received a tensor of unknown origin, even though every ATen call was recorded."
        ) from None


def _trace_once(forward: TraceRequest, recording: Recording, origins: Provenance, deep: bool) -> Captured:
    require_ready(origins)
    if forward.begun is not None:
        forward.begun((recording, forward.beginning))
    origins.attributes_begun = forward.beginning.snapshot.attributes
    deep = deep or reaches_scripts(origins)
    with marking_older_objects() as date:
        tracer = forward.tracer(recording, origins, date, deep, forward.beginning.unknown)
        tracer.draws.caller_states = {
            id(g): g.get_state() for g in caller_generators(forward.model, forward.args, forward.kwargs)
        }
        tracer.draws.model_states = {id(g): state for g, state in forward.beginning.snapshot.generators}
        recording.default_dtype = torch.get_default_dtype()
        recording.outer_modes, recording.is_deep = tracer.context(), deep
        recording.default_device = default_device()
        recording.model = forward.model if isinstance(forward.model, FunctionType) else None
        recording.input_facts.takes_any_keyword = _takes_any_keyword(forward.model)
        recording.run.called_from = callers(sys._getframe())
        recording.inputs, args, kwargs = _take_inputs(tracer, forward.args, forward.kwargs)
        watch = tracer.watch if tracer.deep and tracer.watch is not None else nullcontext()
        counters = version_counters(origins, forward.beginning.snapshot)
        _expose_arrays(tracer, forward.beginning.snapshot)
        with eager_compiler(), deeper_stack(), listening(tracer), tracer, watch:
            with timed(recording), _reporting_failure(forward, recording), running_forward(tracer):
                output = _call(forward.model, args, kwargs, tracer)
            with without_function_modes(), tracer.beneath_leaf():
                tracer.note_other_threads()
                tracer.note_asked()
                require_writes_recorded(tracer, counters)
                _record_end(forward, tracer, output)
                output = copy_aliased_output(tracer, output)
    for tree in (recording.inputs, recording.output, *[handed[1] for handed in recording.scope_outputs]):
        if type(tree) is not ValueId:
            require_room(tree)
    tracer.watch = None  # a reference cycle, which would keep every value alive
    recording.addresses = origins.addresses
    origins.forget()
    return Captured(recording, output, forward.beginning)


def _record_end(forward: TraceRequest, tracer: Tracer, output: Any) -> None:
    """Record what the forward returned, and what it left changed."""
    recording = tracer.recording
    recording.output = freeze_deep(output, tracer.read)
    _require_open(tracer, recording.output)
    check_hooks(tracer)
    check_outside_writes(tracer)
    if recording.autograd.turned:
        record_changed_flags(tracer)
    record_changes(tracer, forward.beginning.snapshot)
    if tracer.leaves_changes:
        recording.state.altered = changed_attributes(tracer, forward.beginning.snapshot)
    recording.state.recomputed_writes = recomputed_writes(tracer)
    _take_touched(tracer)
    _require_one_memory(tracer)
    _require_one_storage(tracer, forward.beginning.snapshot)
    recording.rng.left = tracer.draws.final_state()
    beginning = forward.beginning
    recording.rng.other_random_sources = (
        *beginning.rng.moved(),
        *beginning.snapshot.drawn_generators(),
        *tracer.draws.only_model,
    )
    recording.rng.unknown_states = tracer.draws.unknown
    recording.versions = _require_announced(tracer)
    if tracer.leaves_changes:
        copy_changed_state(tracer)
        copy_exposed_memory(tracer)
        detach_inputs(recording)
        record_places(tracer)
        record_state_in_inputs(tracer)
    modules = [scope.module for scope in recording.scopes]
    own = any(module._backward_hooks or module._backward_pre_hooks for module in modules)
    if own or (modules and any(hooks_of_all_modules)):
        recording.autograd.forward_only.append("a module's backward hook")


def _require_open(tracer: Tracer, tree: Any) -> None:
    """Refuse tensors in the output at places where a program cannot put others."""
    closed = [leaf for leaf in leaves(tree) if type(leaf) is not ValueId and type(leaf) not in ATOMS]
    keys = [key for key in keys_of(tree) if isinstance(key, torch.Tensor)]
    own = tracer.origins.known_modules if closed else frozenset()
    for leaf in [*closed, *keys]:
        for tensor in [leaf] if isinstance(leaf, torch.Tensor) else hidden_tensors(leaf, own):
            if tracer.origins.own_among(tensor) or (
                tracer.memory.read(tensor) is None and is_older(tensor, tracer.date)
            ):
                continue
            what = "a tensor as a key" if leaf is tensor else f"a {type(leaf).__name__} that holds a tensor"
            raise CaptureError(
                f"the model returned {what} that the forward computed or received: a replay could not replace it.\n"
                "Return such tensors by themselves, in lists, tuples, dicts or attributes of objects."
            )


@contextmanager
def _reporting_failure(forward: TraceRequest, recording: Recording) -> Iterator[None]:
    try:
        yield
    except RetraceAtDispatch:
        raise  # everything is put back before the second run
    except BaseException:
        if forward.failed is not None:
            with without_function_modes():
                forward.failed(recording, forward.beginning)
        raise


@outermost
@boundary
def _run_model(model: Any, args: Any, kwargs: Any) -> Any:
    """Call the model. A checkpoint that it did not leave itself ends with it."""
    try:
        return model(*args, **kwargs)
    except BaseException as error:
        close_checkpoints(error)
        raise


@boundary
def _call(model: Any, args: Any, kwargs: Any, tracer: Tracer) -> Any:
    try:
        output = _run_model(by_its_class(model), args, kwargs)
    except (RetraceAtDispatch, ReplaylensError):
        raise
    except Exception as error:
        if tracer.refused is not None and tracer.refused is not error:
            raise tracer.refused from error
        _note_where(error, tracer)
        raise
    finally:
        if tracer.functorch:
            tracer.leave_functorch()
        settle_dispatch_keys()
    if tracer.refused is not None:
        raise tracer.refused
    if any(isinstance(leaf, GeneratorType) for leaf in leaves(freeze_deep(output, lambda tensor: None))):
        raise CaptureError(
            "the model returned a generator, which computes after the forward has ended. Capture a function "
            "that returns a list of it."
        )
    return output


def record_of(captured: Captured) -> Record:
    """What a capture knows, by Ref: values, write counters, generator states, the model's own parameters."""
    recording, made = captured.recording, captured.frozen
    homes: dict[int, Any] = {}  # of each module, by id
    notes, steps = recording.state.places(), recording.state.fused_steps
    places = {address_of(made.addresses, note[0]): StatePlace.noted(note, homes, steps) for note in notes}
    own: dict[ValueId, torch.Tensor] = dict(recording.input_facts.copies)
    live: dict[str, torch.Tensor] = {}
    for node, source in _sources(made, recording):
        value = own.get(source.returns, recording.values[source.returns])
        if type(node) is State:
            live[node.name] = source.tensor
            own[source.returns] = _apart(value)
        elif type(node) is Input and source.returns not in recording.freed and _is_written_leaf(source, value):
            live[node.name] = source.tensor
    freed, held, counts = recording.freed, recording.values, recording.versions
    values = {ref: own[h] if h in own else held[h] for h, ref in made.refs.items() if h not in freed}
    versions = Versions([(ref, counts[h]) for h, ref in made.refs.items() if counts[h] and h not in freed])
    lent = {
        address_of(made.addresses, where): (made.refs[handle].node, first)
        for where, handle, first in recording.state.in_inputs
    }
    account = metadata_of(recording, made)
    return Record(made.graph, values, versions, recording.rng.draws, live, account=account, places=places, lent=lent)


def _apart(value: torch.Tensor) -> torch.Tensor:
    """The same content as a leaf of its own, which the model does not hold."""
    if value.is_inference():
        return value
    return value.detach().requires_grad_() if value.requires_grad else value.detach()


def holds_histories(captured: Captured) -> bool:
    """True if a value, or what the model returned, keeps the saved tensors of a backward pass alive."""
    values: list[Any] = captured.recording.values
    without = (Freed, nn.Parameter)
    return any(type(v) not in without and v.requires_grad and history_of(v) is not None for v in values)


def _is_written_leaf(source: SourceRecord, value: torch.Tensor) -> bool:
    """True if the forward wrote a leaf among its inputs, so that its content before is kept by value."""
    return value is not source.tensor and value.requires_grad and source.tensor.is_leaf


def _sources(made: FrozenRecording, recording: Recording) -> list[tuple[Node, SourceRecord]]:
    """The nodes that no call made, each with its record."""
    pairs = zip(made.graph.nodes, recording.records, strict=True)
    return [(node, record) for node, record in pairs if isinstance(record, SourceRecord)]


def _with_original_dtypes(made: FrozenRecording, recording: Recording) -> Graph:
    """The graph with the dtypes and strides that the model's tensors had then: `model.double()` may have been called
    since.
    """
    layouts = {id(tensor): look[1] for *_, tensor, look in recording.state.places() if tensor is not None}
    changed: dict[str, Node] = {}
    for node, source in _sources(made, recording):
        if type(node) is not State or id(source.tensor) not in layouts:
            continue
        layout = layouts[id(source.tensor)]
        if layout is not None and layout[2] is not node.spec.dtype:
            node = changed[node.name] = evolve(node, spec=evolve(node.spec, dtype=layout[2]))
        if recording.strides:
            strides = recording.strides.get(id(source.tensor), node.spec.strides)
            node = changed[node.name] = evolve(node, spec=evolve(node.spec, strides=strides))
    if not changed:
        return made.graph
    return evolve(made.graph, nodes=tuple([changed.get(node.name, node) for node in made.graph.nodes]))


def require_supported(model: Any) -> None:
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(model, parallel):
        kind = type(model).__name__
        raise UnsupportedModel(
            f"the model is wrapped in {kind}, whose replicas run in threads. Capture `model.module` instead."
        )
    if not callable(model):
        raise UnsupportedModel(f"{type(model).__name__} is not callable. Pass a module or a function, then its inputs.")


def iterators_in(*trees: Any) -> list[str]:
    """The kinds of Python's own iterators among inputs, which a forward that reads them uses up."""
    found = leaves(freeze_deep(trees, lambda tensor: None))
    kinds = [type(leaf) for leaf in found if isinstance(leaf, Iterator)]
    return [kind.__name__ for kind in kinds if not isinstance(getattr(kind, "__next__", None), FunctionType)]


def require_no_iterators(args: Any, kwargs: Any) -> None:
    """Refuse inputs that a second forward would find empty."""
    for kind in iterators_in(args, kwargs):
        raise CaptureError(
            f"the inputs contain an iterator (a {kind}), which a second run of the forward would find exhausted.\n"
            "Pass a list of its items."
        )


def require_ready(origins: Provenance) -> None:
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
                f"a {kind} has no parameters yet: its first forward creates them. Run the model once, then capture it."
            )


def _name_of(model: Any) -> str:
    if isinstance(model, nn.Module):
        modules = vars(model).get("_modules", ())
        inner = modules["_orig_mod"] if "_orig_mod" in modules else model  # noqa: SIM401  (those of TorchScript: no get)
        return type(inner).__name__
    while isinstance(model, partial):
        model = model.func
    named = (
        model if inspect.isroutine(model) or isinstance(model, type) else None
    )  # other objects may return anything as `__name__`
    return str(getattr(named, "__name__", type(model).__name__)).strip("<>")


def _take_inputs(tracer: Tracer, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Record each tensor among the inputs once, and return them as a tree with the arguments for the model.

    An input that is also a parameter, buffer or attribute of the model is passed on as an alias: state that the model
    reads and an input that it gets are two values.
    """
    counter: list[Any] = []
    own = tracer.origins.was_own
    swapped: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> ValueId:
        if id(tensor) in swapped:
            tensor = swapped[id(tensor)]
        elif own(tensor):
            swapped[id(tensor)] = made = tensor.view_as(tensor)
            tracer.note_alias(tensor, made)
            tensor = made
            tracer.memory.keep_alive.append(tensor)
        known = tracer.memory.read(tensor)
        if known is not None:
            return known
        counter.append(tensor)
        handle = tracer.recording.keep(tensor)
        if id(tensor) not in tracer.aliased:
            tracer.recording.input_facts.types[handle] = type(tensor)
        tracer.recording.records.append(SourceRecord("input", handle, (len(counter) - 1,), None, tensor))
        tracer.memory.register(tensor, handle)
        return handle

    tree = freeze_deep((tuple(args), dict(kwargs)), leaf)
    plain = [
        (path, item) for path, item in walk(tree, named_items) if type(item) is not ValueId and type(item) not in ATOMS
    ]
    given = [(path, tracer.recording.values[item]) for path, item in walk(tree, named_items) if type(item) is ValueId]
    hung = [(path, text) for path, tensor in given if (text := python_attributes(tensor)) is not None]
    tracer.recording.input_facts.literals = (*[(path, fingerprint(item)) for path, item in plain], *hung)
    if swapped:
        args, kwargs = thaw_shared(tree, lambda leaf: tracer.recording.values[leaf] if type(leaf) is ValueId else leaf)
    return tree, *tracer.given(tree, args, kwargs)


def _take_touched(tracer: Tracer) -> None:
    """Note the sources whose memory was written, or whose address was read."""
    tracer.recording.aliasing.written.update(tracer.memory.written)
    tracer.recording.aliasing.writes = tracer.memory.written
    if not tracer.memory.written and not tracer.exposed:
        return
    for record in tracer.recording.records:
        if isinstance(record, SourceRecord):
            known = tracer.memory.live.get(id(record.tensor))
            if isinstance(known, Alias) and (known.base.version or known.base.exposed is not None):
                tracer.recording.aliasing.touched.add(record.returns)


def _expose_arrays(tracer: Tracer, snapshot: Snapshot) -> None:
    """Expose tensors under numpy arrays that hang on the model or are among its inputs: Python may write there at any
    time, and torch does not see it.
    """
    arrays = [value for value, _ in snapshot.restorers if hasattr(value, "__array_interface__") and value.size]
    if not arrays:
        return
    bounds = [_bounds_of(array) for array in arrays]
    given = [record.tensor for record in tracer.recording.records if isinstance(record, SourceRecord)]
    for tensor in (*given, *tensors_at_start(tracer.origins, snapshot)):
        found = extent(tensor)
        if found is not None and any(found[0] < end and start < found[1] for start, end in bounds):
            tracer.read(tensor)
            tracer.memory.expose(tensor, is_content_read=False)
            tracer.memory.alias_of(tensor).base.is_kept = tracer.exposed = True


def _bounds_of(array: Any) -> tuple[int, int]:
    """The first address of a numpy array, and the first one past it."""
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    start: int = array.__array_interface__["data"][0]
    return start + sum(step for step in steps if step < 0), start + sum(
        step for step in steps if step > 0
    ) + array.itemsize


def _require_one_memory(tracer: Tracer) -> None:
    """Refuse memory that was written from outside torch if inputs or tensors of the model's share it by no recorded
    call.

    Their values were recorded as found, before the write or after. (A write by torch makes them views of one base
    first.)
    """
    memory = tracer.memory
    if not memory.bases:
        return
    rewritten = {id(base) for base, _ in memory.external_writes}
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
                    f"memory of a tensor {tuple(base.root.shape)} was written by numpy, or by other code that torch "
                    f"does not see, and {_article(record.kind)} {tuple(record.tensor.shape)} shares it. Which of them "
                    "holds which value cannot be known.\n"
                    "Pass copies, or write through torch."
                )


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _require_one_storage(tracer: Tracer, snapshot: Snapshot) -> None:
    """Refuse writes to memory that lies under two storages, through numpy or dlpack, of inputs or of anything that the
    model holds.
    """
    memory = tracer.memory
    if not memory.written:
        return
    given = [(record.tensor, record.kind) for record in tracer.recording.records if isinstance(record, SourceRecord)]
    known = {id(tensor): memory.live.get(id(tensor)) for tensor, _ in given}
    written = {number for number, one in known.items() if isinstance(one, Alias) and one.base.version}
    if not written:
        return
    held = ((tensor, "tensor of the model's") for tensor in tensors_at_start(tracer.origins, snapshot))
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
                    f"{_article(what)} {tuple(tensor.shape)} shares memory with another tensor of the forward through "
                    "numpy, dlpack or the like, and one of them is written: which value it holds when cannot be "
                    "known.\n"
                    "Pass copies, or views made by torch."
                )


def _takes_any_keyword(model: Any) -> bool:
    """True if the forward takes `**kwargs`, so that it can see their order."""
    while isinstance(model, partial):
        model = model.func
    found = inspect.getattr_static(type(model), "forward", None) if isinstance(model, nn.Module) else model
    forward = found.__func__ if isinstance(found, (MethodType, staticmethod, classmethod)) else found
    code = (forward.__code__ if isinstance(forward, FunctionType) else None) or getattr(
        inspect.getattr_static(model, "__call__", None), "__code__", None
    )
    return code is None or bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _require_announced(tracer: Tracer) -> list[int]:
    """The write counters of all values at the end. Refuses writes that no call announced."""
    values = tracer.recording.values
    counters = versions_of(values)
    if counters == tracer.recording.versions:
        return counters
    for tensor, _ in tracer.memory.unannounced_writes():
        if not tracer.deep:
            raise RetraceAtDispatch
        raise UnannouncedWrite(
            f"a tensor {tuple(tensor.shape)} was written during the forward by code that the capture did not "
            "see: another thread, an extension, or a call that hides from torch. No value recorded after the "
            "write can be trusted, so there is no program."
        )
    return counters


def _note_where(error: Exception, tracer: Tracer) -> None:
    """Add to the model's own exception where in the model it was raised."""
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


def undo_first_run(recording: Recording, beginning: ForwardState) -> None:
    """Undo what the first run changed, before the second."""
    put_generators_back(recording)
    beginning.put_back()
    restore_flags(flags_before(recording))
    undo_writes(recording)


def undo_writes(recording: Recording) -> None:
    """Give the tensors of the model and the inputs the content that they had before the first write."""
    with torch.no_grad():
        for record in recording.records:
            if not isinstance(record, SourceRecord):
                continue
            now = held_tensor(*record.where) if record.kind in ("parameter", "buffer") else record.tensor
            first = recording.values[record.returns]
            if now is not None and now is not first:
                with torch.inference_mode() if now.is_inference() else nullcontext():
                    now.copy_(first)


def put_generators_back(recording: Recording) -> None:
    """Give every generator the state it had before its first draw."""
    for generator, state in recording.rng.generators.values():
        generator.set_state(state)


@define(eq=False)
class _ProcessSetting:
    """A setting of the whole process that captures need otherwise: the first changes it, the last puts it back."""

    read: Callable[[], Any]
    change: Callable[[Any], Any]  # called with the user's setting, as is `restore`
    restore: Callable[[Any], Any]
    users: dict[object, int] = field(factory=dict)  # a token for each capture, and its thread
    before: list[Any] = field(factory=list)  # the user's setting, while it is changed

    def changed(self) -> AbstractContextManager[None]:
        token = object()
        return during(_settings_lock, partial(self._enter, token), partial(self._leave, token))

    def _enter(self, token: object) -> None:
        self.users[token] = get_ident()
        if not self.before:
            self.before.append(self.read())
            self.change(self.before[0])

    def _leave(self, token: object) -> None:
        self.users.pop(token, None)
        if not self.users and self.before:
            self.restore(self.before[0])
            self.before.clear()

    def in_child(self) -> None:
        """After a fork: only the thread that forked is still there."""
        for token in [token for token, thread in self.users.items() if thread != get_ident()]:
            self._leave(token)


def deeper_stack() -> AbstractContextManager[None]:
    """Within, Python's stack has room for the tracer's own frames, two per module call."""
    return _stack_limit.changed()


def eager_compiler() -> AbstractContextManager[None]:
    """Within, compiled modules run eagerly."""
    return nullcontext() if _dynamo() is None else _stance.changed()


def _dynamo() -> Any:
    return compiler_if_loaded("torch._dynamo.eval_frame")


_settings_lock = RLock()
_stack_limit = _ProcessSetting(
    sys.getrecursionlimit, lambda limit: sys.setrecursionlimit(2 * limit + 500), sys.setrecursionlimit
)
_stance = _ProcessSetting(
    lambda: _dynamo()._stance,
    lambda _: _dynamo()._set_stance(_dynamo().DynamoStance("force_eager")),
    lambda stance: _dynamo()._set_stance(stance),
)


def _in_a_child() -> None:
    reset_lock(_settings_lock)
    _stance.in_child()
    _stack_limit.in_child()


after_fork(_in_a_child)
