"""A forward of somebody's training, followed: it runs once, as it would unseen, and what it computes is told meanwhile.

In: a module, the arguments of its call, and a Companion. Out: what the module returned, the very object; and for the
companion each record as it is made, with its live tensors, and in the end the Recording, from which layers get names.

A followed forward is not for replays, so it needs no copies, no second run and no checks. Above all it changes nothing:

* Where a capture gives the model an alias, so that an output is a value of its own, the tensor itself gets the second
  value. An alias is a step of the backward pass, and would change the order in which gradients are added up.
* Where a capture computes something beside the model (a gradient inside the forward, what a call raised), or looks
  again with every ATen call recorded, or refuses, the rest of the forward is not followed. The tracer is *blind* then:
  it passes every call on, and leaves torch as soon as it stands on top of the modes. The call at hand has run or has
  not: `_Below`, a mode beneath the tracer's, saw it. So its result is there, or it is made now; nothing runs twice, and
  an exception of the model's reaches the model as it was raised.
* Where a mode alone would change what is computed, the tracer leaves first: torch's attention modules take fused
  kernels where no mode is on, and a compiled function would be compiled anew, with the mode in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from threading import RLock, get_ident
from typing import Any, Protocol

import torch
from attrs import define
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from .._edit.select import SaveSpec
from .._ir.interrupts import TorchModes, after_fork, during, reset_lock, run_to_end
from .._ir.label import Naming
from .._ir.runtime import alias
from .._ir.torch_private import (
    compiler_if_loaded,
    count_function_modes,
    function_mode_at,
    peek_interpreter_stack,
    pop_function_mode,
    push_function_mode,
    without_function_modes,
)
from .._ir.trees import freeze_deep
from ..errors import ReplaylensError
from .capture import deeper_stack, require_ready
from .custom_functions import apply_call
from .dispatch import Handling, Rule, rule_of
from .memory_saving import MemorySavingTracer, ValueDropper
from .provenance import Provenance, StartMark, marking_older_objects, reaches_scripts
from .recorder import RetraceAtDispatch
from .recording import PLAIN, CallRecord, Recording, SourceRecord, ValueId
from .rng import Draw, DrawLog
from .scopes import boundary, listening, outermost, stop_listening
from .snapshot import Snapshot
from .state_changes import Counters, record_changes, require_writes_recorded, version_counters

Record = CallRecord | SourceRecord


class Companion(Protocol):
    """Who follows: told of each record, of the end, or why there is none. What it raises is raised nowhere."""

    def recorded(self, number: int, record: Record, recording: Recording) -> bool:
        """A record was made, and its tensors are alive. True if they are to be kept to the end."""

    def ended(self, recording: Recording, count: int, twice: dict[ValueId, ValueId]) -> None:
        """The forward is over; the first `count` records are those of its calls, in order. `twice`: values whose tensor
        also stands for an earlier value, which is meant where the model reads it by another name.
        """

    def lost(self, why: str) -> None:
        """The rest of the forward is not followed."""


def follow(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], naming: Naming, companion: Companion
) -> Any:
    """What the module returns for these arguments, called once; the companion learns what it computed."""
    world = TorchModes()
    try:
        with marking_older_objects() as date:
            begun = _begin(model, args, kwargs, naming, companion, date)
            return _run(model, args, kwargs) if begun is None else _followed(model, args, kwargs, *begun)
    except Exception:
        raise  # the model's own: what it left of torch's modes stays
    except BaseException:
        run_to_end(world.put_back)
        raise


def _begin(
    model: nn.Module, args: Any, kwargs: Any, naming: Naming, companion: Companion, date: StartMark
) -> tuple[FollowingTracer, Snapshot] | None:
    """The tracer, with the inputs recorded, and the attributes of the modules; None if the forward cannot be
    followed.
    """
    try:
        origins = Provenance(model)
        require_ready(origins)
        snapshot = Snapshot(origins.modules, None, held=origins.held)
        origins.attributes_begun = snapshot.attributes
        if reaches_scripts(origins):
            raise ReplaylensError("its code calls TorchScript, or other code that hides its calls.")
        recording = Recording(type(model).__name__, naming)
        tracer = FollowingTracer(companion, recording, origins, date)
        recording.default_dtype = torch.get_default_dtype()
        recording.outer_modes = tracer.context()
        recording.inputs = _take_inputs(tracer, args, kwargs)
        tracer.counters = version_counters(origins, snapshot)
    except (Exception, RetraceAtDispatch) as error:
        companion.lost(_text(error))
        return None
    return tracer, snapshot


def _followed(model: nn.Module, args: Any, kwargs: Any, tracer: FollowingTracer, snapshot: Snapshot) -> Any:
    try:
        with deeper_stack(), listening(tracer), seeing_compilers(tracer):
            try:
                tracer.enter()
                output = _run(model, args, kwargs)
            finally:
                tracer.leave()
        tracer.end(output, snapshot)
        return output
    finally:
        tracer.release()


def _take_inputs(tracer: FollowingTracer, args: Any, kwargs: Any) -> Any:
    """Record each tensor among the inputs once. One that is state of the model as well would need an alias."""
    count = 0

    def leaf(tensor: torch.Tensor) -> ValueId:
        nonlocal count
        known = tracer.memory.read(tensor)
        if known is not None:
            return known
        if tracer.origins.was_own(tensor):
            raise ReplaylensError("one of its inputs is a tensor of the model's own.")
        handle = tracer.recording.keep(tensor)
        tracer.recording.records.append(SourceRecord("input", handle, (count,), None, tensor))
        tracer.memory.register(tensor, handle)
        count += 1
        return handle

    return freeze_deep((tuple(args), dict(kwargs)), leaf)


@outermost
@boundary
def _run(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return nn.Module.__call__(model, *args, **kwargs)


class FollowingTracer(MemorySavingTracer):
    """The tracer of one followed forward."""

    leaves_changes = False
    only_follows = True

    def __init__(self, companion: Companion, recording: Recording, origins: Provenance, date: StartMark) -> None:
        super().__init__(SaveSpec(), recording, origins, date, False, "raise")
        self.companion = companion
        self.below = _Below()
        self.is_blind = False
        self.modes = -1  # on torch's stack before ours
        self.draws = _NoDraws({}, {}, {})
        self.told = 0  # records
        self.twice: dict[ValueId, ValueId] = {}  # second values of tensors, and what they stood for at first
        self.counters: Counters = ([], [])  # write counters of what the model holds, as the forward began
        tells: Any = self
        self.dropper: _Dropper = _Dropper(recording, self.memory, tells, self.in_trees, self.aliased, self.aliases)
        recording.values.dropper = self.dropper  # type: ignore[attr-defined]

    # -- in and out ----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """See the calls of this thread."""
        self.modes = count_function_modes()
        push_function_mode(self.below)
        push_function_mode(self)

    def leave(self) -> None:
        """See no more calls. Idempotent."""
        while count_function_modes() > self.modes >= 0:
            pop_function_mode()

    def vanish(self) -> None:
        """Leave torch in the midst of the forward, if no mode of the user's stands above."""
        count = count_function_modes()
        if count == self.modes + 2 and function_mode_at(count - 1) is self:
            self.leave()
            stop_listening(self)

    def go_blind(self, why: str) -> None:
        """Follow no further, and hold nothing of the forward."""
        if not self.is_blind:
            self.forget()
            self.companion.lost(why)

    def forget(self) -> None:
        """Hold no tensor any more. The tracer is blind then. Idempotent."""
        self.is_blind, self.refused = True, None
        self.module_call = self._passed_call  # type: ignore[method-assign]
        recording, memory = self.recording, self.memory
        for held in (memory.live, memory.bases, memory.by_storage, memory.keep_alive, memory.sources):
            held.clear()
        for table in (recording.guards, recording.asked, recording.scopes, self.stateful, self.date.tensors):
            table.clear()
        recording.records, recording.values, recording.scope_outputs, recording.output = [], [], [], None

    def release(self) -> None:
        """Hold nothing at all any more, so that no collector is needed."""
        self.forget()
        vars(self).pop("module_call", None)
        self.dropper.guess = None  # type: ignore[assignment]

    # -- what the dropper asks -----------------------------------------------------------------------------------------

    def wants(self, record: Record) -> bool:
        """Tell of a record; True if its values are to be kept."""
        self.told += 1
        with without_function_modes(), self.beneath_leaf():
            return self.companion.recorded(self.told - 1, record, self.recording)

    def wants_output(self, number: int) -> bool:
        return False

    def end(self, output: Any, snapshot: Snapshot) -> None:
        """The forward is over: hand the recording on."""
        if self.is_blind:
            return
        try:
            with without_function_modes(), self.beneath_leaf():
                self.note_asked()
                require_writes_recorded(self, self.counters)
                if self.memory.unannounced_writes():
                    raise RetraceAtDispatch
                self.recording.output = freeze_deep(output, self.read)
                self.dropper.look()
                self.recording.values = list(self.recording.values)
                count = len(self.recording.records)
                record_changes(self, snapshot)
                self.recording.addresses = self.origins.addresses
                self.companion.ended(self.recording, count, self.twice)
        except (Exception, RetraceAtDispatch) as error:
            self.go_blind(_text(error))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_blind or (rule := _rule(func)).how is Handling.PASS:
            return func(*args, **kwargs) if kwargs else func(*args)
        how, why = rule.how, ""
        is_relu = how is Handling.RELU and not kwargs["inplace"]
        runs_body = how in _RUN_BODIES and not is_relu and func not in self.opened
        outer = self.below.expect(torch.relu if is_relu else func, args)
        try:  # in this frame, as in the tracer's: the user's line is found by its depth
            if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
                raise RetraceAtDispatch
            if how is Handling.FRESH and not kwargs:
                out = self._fresh(rule, func, args, 2)
            elif is_relu:
                out = self._fresh(_RELU, torch.relu, args, 4)
            elif how is Handling.VIEW and not kwargs:
                out = self._view(rule, func, args)
            else:
                out = self._open_or_call(rule, func, args, kwargs or {})
            self.dropper.look()
            return out
        except BaseException as error:
            if not self._is_tracers(error, runs_body):
                raise
            why = _text(error)
        finally:
            call, self.below.call = self.below.call, outer
        self.go_blind(why)
        if call.raised is not None:
            raise call.raised
        return call.out if call.has_run else func(*args, **kwargs) if kwargs else func(*args)

    def _is_tracers(self, error: BaseException, runs_body: bool) -> bool:
        """True for an error of the tracer's, and not of the call."""
        if isinstance(error, _REFUSALS):
            return True
        is_of_call = error is self.below.call.raised or runs_body
        return isinstance(error, Exception) and not is_of_call

    def _special_dual(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """A call beneath which the operations are others than those that are seen here."""
        raise RetraceAtDispatch

    _not_followed: Any = _special_dual
    _special_higher_order = _special_resize = _special_differentiate = _special_backward = _not_followed

    def identity_alias(self, rule: Rule, out: torch.Tensor) -> torch.Tensor | None:
        """The argument itself, which then has the value of the result."""
        is_node = rule.is_identity and type(out) in PLAIN and not _hides_gradient(self, out)
        return out if is_node else None

    # -- modules and custom functions ----------------------------------------------------------------------------------

    def _passed_call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call of a module while the tracer is blind."""
        self.vanish()
        return call(module, *args, **kwargs)

    def _learn_class(self, kind: type) -> None:
        super()._learn_class(kind)
        self.has_scripts |= issubclass(kind, _ATTENTION)

    def _is_script(self, module: nn.Module) -> bool:
        return super()._is_script(module) or _may_take_fused_kernel(module)

    def _script_call(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.go_blind(f"what a {type(module).__name__} computes is not seen.")
        return self._passed_call(module, call, args, kwargs)

    def _module_output(self, given: Any, out: Any, records: int, beyond: int) -> tuple[Any, Any, tuple[ValueId, ...]]:
        """What the module returned, as it returned it."""
        if not self.is_blind:
            try:
                _, tree, shared = super()._module_output(given, out, records, beyond)
                self.dropper.look()
                return out, tree, shared
            except (Exception, RetraceAtDispatch) as error:
                self.go_blind(_text(error))
        return out, (), ()

    def _identity(self, tensor: torch.Tensor) -> torch.Tensor:
        with without_function_modes(), self.beneath_leaf():
            if not _hides_gradient(self, tensor):
                self._second_value(tensor, ())
        return tensor

    def output_alias(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        with without_function_modes(), self.beneath_leaf():
            if not _hides_gradient(self, tensor):
                self._second_value(tensor, (number,))
        return tensor

    def _second_value(self, tensor: torch.Tensor, more: tuple[int, ...]) -> None:
        """Record an alias of a tensor, which the tensor itself stands for from now on."""
        source, site = self.read(tensor), None if more else self.site()
        self.append(alias, _IDENTITY, [source, *more], {}, self.register_again(tensor), site, None, False)

    def register_again(self, tensor: torch.Tensor) -> ValueId:
        source = self.read(tensor)
        made = super().register_again(tensor)
        self.twice[made] = self.twice.get(source, source)
        return made

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A custom function. Its body is recorded before it is known to be one node, and told afterwards."""
        if self.is_blind or (kind.__name__, kind.__module__) == ("CheckpointFunction", "torch.utils.checkpoint"):
            return call(*args, **kwargs)
        self.dropper.look()
        once = _Once(call)
        self.dropper.waits += 1
        why = ""
        try:
            out = apply_call(self, kind, once, args, kwargs)
        except BaseException as error:
            if error is once.raised or not isinstance(error, (Exception, RetraceAtDispatch)):
                raise
            why = _text(error)
        finally:
            self.dropper.waits -= 1
        if why:
            self.go_blind(why)
            out = once.out if once.has_run else call(*args, **kwargs)
        self.dropper.look()
        return out

    def keys_noted(self) -> None:
        """Does nothing: no dispatch mode is on."""

    def swapped(self) -> None:
        self.go_blind("`torch.utils.swap_tensors` exchanged two tensors.")


_REFUSALS = (ReplaylensError, RetraceAtDispatch)
_RUN_BODIES = (Handling.OPEN, Handling.RELU)
_RELU = Rule(Handling.FRESH, "relu")
_IDENTITY = Rule(Handling.LEAF, "identity", is_identity=True)
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def _rule(func: Any) -> Rule:
    try:
        return rule_of(func)
    except TypeError:  # an unhashable callable
        return Rule(Handling.OPAQUE, "call", may_draw=True)


def _text(error: BaseException) -> str:
    if isinstance(error, RetraceAtDispatch):
        return "something was computed in a way that is not seen: another thread, a transform, a gradient, a script."
    return str(error) if isinstance(error, ReplaylensError) else f"{type(error).__name__}: {error}"


def _hides_gradient(tracer: FollowingTracer, tensor: torch.Tensor) -> bool:
    """True where a capture gives no alias: the tensor has gradients, and they are off just here."""
    return bool(tensor.requires_grad and not torch.is_grad_enabled() and tracer.recording.outer_modes[0])


def _may_take_fused_kernel(module: nn.Module) -> bool:
    """True for attention modules of torch's in evaluation, if no gradient is asked of them."""
    if not isinstance(module, _ATTENTION) or module.training:
        return False
    return not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()))


class _Once:
    """A call, and what it gave."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.has_run = False
        self.out: Any = None
        self.raised: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_run = True
        try:
            self.out = self.call(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise
        return self.out


class _Expected:
    """A torch call that the tracer is to make, and what it gave once it has run."""

    __slots__ = ("args", "func", "has_run", "out", "raised")

    def __init__(self, func: Any, args: Any) -> None:
        self.func, self.args = func, args
        self.has_run = False
        self.out: Any = None
        self.raised: BaseException | None = None

    def is_it(self, func: Any, args: Any) -> bool:
        return func == self.func and len(args) == len(self.args) and all(map(_is, args, self.args))


def _is(one: Any, other: Any) -> bool:
    return one is other


class _Below(TorchFunctionMode):
    """The mode beneath the tracer's: it sees the calls that the tracer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.call = _Expected(None, ())

    def expect(self, func: Any, args: Any) -> _Expected:
        """From now on it waits for this call. Gives the one that it was waiting for."""
        outer, self.call = self.call, _Expected(func, args)
        return outer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self.call
        if call.has_run or not call.is_it(func, args):
            return func(*args, **kwargs) if kwargs else func(*args)
        call.has_run = True
        try:
            out = call.out = func(*args, **kwargs) if kwargs else func(*args)
            return out
        except BaseException as error:
            call.raised = error
            raise


class _NoDraws(DrawLog):
    """Of random numbers nothing is kept."""

    def around(self, may_draw: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        return _NO_DRAW

    def keep(self, generator: torch.Generator, state: torch.Tensor) -> str | None:
        return None


_NO_DRAW = Draw(None, torch.default_generator)


@define(eq=False)
class _Dropper(ValueDropper):
    """Tells the companion of each record, and drops the values that it does not keep."""

    waits: int = 0  # custom functions that run: their records may be taken back

    def look(self) -> None:
        """Tell of what is new."""
        if not self.waits and self.records_seen < len(self.recording.records):
            self._look_at_new()

    def drop_when_due(self) -> None:
        if not self.waits:
            super().drop_when_due()


# -- compilers that the forward calls ----------------------------------------------------------------------------------

_lock = RLock()
_tracers: dict[int, list[FollowingTracer]] = {}  # of each thread
_originals: dict[str, Any] = {}


def seeing_compilers(tracer: FollowingTracer) -> AbstractContextManager[None]:
    """Within, the tracer leaves before a compiled function runs in this thread."""
    here = get_ident()
    return during(_lock, partial(_enter, here, tracer), partial(_leave, here, tracer))


def _enter(here: int, tracer: FollowingTracer) -> None:
    for owner, name, replacement in _entries():
        if (there := getattr(owner, name)) is not replacement:
            _originals[name] = there
            setattr(owner, name, replacement)
    _tracers.setdefault(here, []).append(tracer)


def _leave(here: int, tracer: FollowingTracer) -> None:
    stack = _tracers.get(here, [])
    if tracer in stack:
        del stack[stack.index(tracer) :]
    if not stack:
        _tracers.pop(here, None)
    if not _tracers:
        for owner, name, replacement in _entries():
            if getattr(owner, name) is replacement:
                setattr(owner, name, _originals[name])


def _entries() -> Iterator[tuple[Any, str, Any]]:
    yield torch, "compile", _traced_compile
    if (frames := compiler_if_loaded("torch._dynamo.eval_frame")) is not None:
        yield frames, "_callback_from_stance", _traced_callback


def _step_aside() -> None:
    for tracer in reversed(_tracers.get(get_ident(), [])):
        tracer.go_blind("it calls a compiled function, inside which nothing is seen.")
        tracer.vanish()


def _traced_compile(*args: Any, **kwargs: Any) -> Any:
    """`torch.compile`, which loads the compiler where nobody has so far."""
    _step_aside()
    return _originals["compile"](*args, **kwargs)


def _traced_callback(callback: Any) -> Any:
    """The compiler is turned on before a compiled function runs, or off where the callback is None or False."""
    if callback:
        _step_aside()
    return _originals["_callback_from_stance"](callback)


def _in_a_child() -> None:
    reset_lock(_lock)
    for other in [thread for thread in _tracers if thread != get_ident()]:
        for tracer in list(_tracers[other]):
            _leave(other, tracer)


after_fork(_in_a_child)
