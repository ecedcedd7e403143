"""Hooks on the gradients of tensors, which the forward registers and may remove.

In: `h.register_hook(f)`. Out: from there on a value of its own, whose gradient goes through the hook. A hook acts as
long as it is registered when a gradient is taken: one that is removed before is removed from the recording.

Changes of `requires_grad` of leaves during a forward: `p.requires_grad_(False)`, `.requires_grad = True`.

In: a call that sets the flag of a tensor. Out: from then on the tensor has a value of its own, so that each call reads
it with the flag of that moment: detached while frozen, the original value once it is thawed.

Checkpoints (torch.utils.checkpoint) in a live run: in the backward they would recompute without the patches.

A non-reentrant checkpoint hooks in where autograd saves tensors, and saves none. Where these hooks are disabled
autograd saves as usual, and the backward recomputes nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from traceback import walk_tb
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .._ir.autograd import requiring_grad, with_gradient_hook, with_history_of
from .._ir.runtime import alias
from .._ir.torch_private import leave_saving_hooks_alone, top_saving_hooks
from .aliasing import Alias
from .dispatch import Handling, Rule
from .recorder import Recorder
from .recording import CallRecord, Recording, SourceRecord, ValueId, reads_of, value_ids_in, value_ids_with_paths
from .user_code import closure_values, forward_code, identifiers

HOOK_LATE = "a hook on a tensor that was already read: it acts on gradients from there, too. Register it before."
HOOK_ON_STEP = (
    "hooks on steps of the backward pass (grad_fn.register_hook), which are not recorded. Register them on tensors."
)
HOOK_READS = (
    "a hook that reads tensors of the forward or its inputs: it would keep those of the capture. Use a custom Function "
    "that saves them."
)
HOOK_TWICE = (
    "a hook inside a gradient with create_graph=True: it acts once, but on both backward passes. Use a custom Function."
)
_HOOK = "hook"
_MAX_OBJECTS = 10_000  # that are searched for the tensors that a hook can reach


def record_hook(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Registers a hook. Gradients of earlier reads of the tensor go through it as well."""
    tensor = args[0]
    removable = func(*args, **kwargs)
    if recorder.functorch:
        return removable
    source = recorder.read(tensor)
    function = args[1] if len(args) > 1 else kwargs["hook"]
    site = recorder.site()
    is_late = _is_read_with_gradient(recorder.recording, source)
    handle = recorder.register_again(tensor)
    recorder.memory.same_data_as[handle] = source
    recorder.recording.autograd.hooks.append((handle, removable, is_late))
    recorder.append(with_gradient_hook, Rule(Handling.LEAF, _HOOK), [source, function], {}, handle, site, None, False)
    _order_hooks(recorder.recording)
    return removable


def _order_hooks(recording: Recording) -> None:
    """A gradient passes the first registered hook of a value first: that is the last of the recorded calls."""
    chain = list(_chain(recording))
    hooks = {handle: (removable, is_late) for handle, removable, is_late in recording.autograd.hooks}
    held = [(record.function, record.args[1:], hooks.pop(record.returns, None)) for _, record in chain]
    for (number, record), (function, more, noted) in zip(chain, [*held[1:], held[0]], strict=True):
        recording.records[number] = record._replace(function=function, args=[record.args[0], *more])
        if noted is not None:
            hooks[record.returns] = noted
    recording.autograd.hooks[:] = [(handle, *hooks[handle]) for handle in sorted(hooks)]


def _chain(recording: Recording) -> Iterator[tuple[int, CallRecord]]:
    """The calls of hooks on one value, the last recorded first."""
    wanted = recording.records[-1].returns
    for number in range(len(recording.records) - 1, -1, -1):
        record = recording.records[number]
        if record.returns != wanted:
            continue
        if not isinstance(record, CallRecord) or record.kind != _HOOK:
            break
        yield number, record
        wanted = record.args[0]


def _is_read_with_gradient(recording: Recording, source: ValueId) -> bool:
    """True if a call whose result requires gradients has read this value."""
    for record in reversed(recording.records):
        if record.returns == source:
            break
        if source in reads_of(record):
            results = [recording.values[handle] for handle in value_ids_in(record.returns)]
            if any(getattr(value, "requires_grad", False) for value in results):
                return True
    return False


def drop_removed_hooks(recording: Recording) -> None:
    """Of hooks that are removed by now, only the value stays."""
    staying = []
    for handle, removable, is_late in recording.autograd.hooks:
        held = removable.hooks_dict_ref()
        if held is not None and removable.id in held:
            staying.append((handle, removable, is_late))
        else:
            _remove_hook(recording, handle)
    recording.autograd.hooks[:] = staying


def _remove_hook(recording: Recording, handle: ValueId) -> None:
    for number, record in enumerate(recording.records):
        if record.returns == handle and isinstance(record, CallRecord) and record.function is with_gradient_hook:
            recording.records[number] = record._replace(function=alias, args=record.args[:1])


def check_hooks(recorder: Recorder) -> None:
    """Records what no replay can reproduce of the hooks that are left after the forward."""
    recording = recorder.recording
    drop_removed_hooks(recording)
    if any(is_late for _, _, is_late in recording.autograd.hooks):
        recording.autograd.forward_only.append(HOOK_LATE)
    for _, removable, _ in recording.autograd.hooks:
        hook = (removable.hooks_dict_ref() or {}).get(removable.id)
        if any(_is_of_forward(recorder, tensor) for tensor in _reachable_tensors(hook)):
            recording.autograd.forward_only.append(HOOK_READS)


def _is_of_forward(recorder: Recorder, tensor: torch.Tensor) -> bool:
    """True if the forward computed or wrote this tensor, or it is an input. State exists in a replay too."""
    known = recorder.memory.live.get(id(tensor))
    if isinstance(known, Alias):
        if known.base.version:
            return True
        known = known.handle
    source = [r for r in recorder.recording.records if isinstance(r, SourceRecord) and r.returns == known]
    return known is not None and (not source or source[0].kind == "input")


def _reachable_tensors(hook: Any) -> Iterator[torch.Tensor]:
    """The tensors that a function can refer to: closure, defaults, bound arguments and globals that it names, and the
    attributes that it names of other objects.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, frozenset[str]]] = [(hook, frozenset())]
    while stack and len(seen) < _MAX_OBJECTS:
        value, names = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, FunctionType):
            named = names | identifiers(value.__code__)
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            named_globals = [value.__globals__[name] for name in sorted(named) if name in value.__globals__]
            stack.extend((one, named) for one in (*closure_values(value), *defaults, *named_globals))
        elif isinstance(value, MethodType):
            stack.extend(((value.__func__, names), (value.__self__, names | identifiers(value.__func__.__code__))))
        elif isinstance(value, partial):
            stack.extend((one, names) for one in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, dict):
            stack.extend((one, names) for one in value.values())
        elif isinstance(value, (tuple, list, set, frozenset)):
            stack.extend((one, names) for one in value)
        elif not isinstance(value, (type, ModuleType)):
            call = vars(type(value)).get("__call__")
            named = names | (identifiers(call.__code__) if isinstance(call, FunctionType) else frozenset())
            stack.extend((one, named) for one in _attributes(value, named))


def _attributes(value: Any, names: frozenset[str]) -> list[Any]:
    """The attributes of an object with one of these names, including tensors and modules of a module."""
    held = [getattr(value, "__dict__", {})]
    held.extend(held[0].get(table) or {} for table in ("_buffers", "_modules"))
    return [one for table in held for name, one in table.items() if name in names]


def set_requires_grad(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A call that may change the flag of a leaf: `requires_grad_`, the setter of `requires_grad`, `detach_`."""
    tensor = args[0]
    wanted = func.__name__ != "detach_" and bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    before = tensor.requires_grad
    if before == wanted or not tensor.is_leaf or recorder.functorch or tensor.is_inference():
        result = func(*args, **kwargs)
        if before is wanted is False and not recorder.recording.outer_modes[0]:  # else this may raise, or freeze
            recorder.ask("flags", torch.Tensor.requires_grad.__get__, (tensor,), {}, False)  # type: ignore[attr-defined]
        return result
    source = recorder.read(tensor)
    _keep_flag(recorder, source, tensor, before)
    result = func(*args, **kwargs)
    first, flag, _ = recorder.recording.autograd.turned.setdefault(id(tensor), (source, before, tensor))
    if wanted == flag and first in recorder.memory.equal_values(source):
        handle = first
    else:
        thawed = (with_history_of, first, source) if flag else (requiring_grad, source)
        handle = _record_change(recorder, tensor, *(thawed if wanted else (torch.Tensor.detach, source)))
    _set_value(recorder, tensor, handle)
    return result


def _keep_flag(recorder: Recorder, source: ValueId, tensor: torch.Tensor, flag: bool) -> None:
    """Records the result of a call with the flag of that moment. State and inputs stay themselves."""
    values = recorder.recording.values
    is_given = any(isinstance(r, SourceRecord) and r.returns == source for r in recorder.recording.records)
    if values[source] is tensor and not is_given:
        with recorder.beneath_leaf():
            values[source] = tensor.detach().requires_grad_(flag)


def _record_change(recorder: Recorder, tensor: torch.Tensor, function: Any, *reads: ValueId) -> ValueId:
    """Records the call that changes the flag: its result has the content of the last value that it reads."""
    flag = function is not torch.Tensor.detach
    with recorder.beneath_leaf():
        handle = recorder.recording.keep(tensor.detach().requires_grad_(flag))
    recorder.memory.same_data_as[handle] = reads[-1]
    recorder.append(
        function, Rule(Handling.LEAF, "requiresgrad"), list(reads), {}, handle, recorder.site(), None, False
    )
    return handle


def _set_value(recorder: Recorder, tensor: torch.Tensor, handle: ValueId) -> None:
    """From now on the tensor has this value."""
    entry = recorder.memory.alias_of(tensor)
    entry.handle = handle
    if not entry.steps:
        entry.base.handle = handle
    entry.base.held.append(handle)


def record_changed_flags(recorder: Recorder) -> None:
    """Records which leaves of the model keep another flag than at the start although calls have read them as requiring
    gradients: torch reads the flag in the backward, and may find it restored by then.
    """
    recording = recorder.recording
    own = {r.returns for r in recording.records if isinstance(r, SourceRecord) and r.kind != "input"}
    for first, flag, tensor in recording.autograd.turned.values():
        if first in own and tensor.requires_grad != flag and _was_read_while_thawed(recorder, first, flag):
            recording.autograd.left_turned.append((tensor, not flag))


def _was_read_while_thawed(recorder: Recorder, first: ValueId, flag: bool) -> bool:
    """True if a call has read the leaf while it required gradients."""
    recording = recorder.recording
    values = {first} if flag else set()
    for record in recording.records:
        if not isinstance(record, CallRecord):
            continue
        if record.kind == "requiresgrad" and first in recorder.memory.equal_values(record.args[-1]):
            values.update({record.returns} if record.function is not torch.Tensor.detach else ())
        elif record.context[0] and not values.isdisjoint(reads_of(record)):
            return True
    return False


_hooks: Any = top_saving_hooks
_ignore_hooks: Any = leave_saving_hooks_alone


def without_recomputation() -> AbstractContextManager[Any]:
    """While a checkpoint around the model saves what it would otherwise recompute."""
    return _saving_without_hooks() if has_checkpoint_hooks() else _UNCHANGED


def without_hooks_around() -> AbstractContextManager[Any]:
    """While the model runs for a program that outlives the hooks that the caller has on what autograd saves."""
    return _saving_without_hooks() if _hooks(False) is not None else _UNCHANGED


def has_checkpoint_hooks() -> bool:
    """True if a checkpoint keeps autograd from saving tensors."""
    hooks = _hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def called_by_checkpoint() -> bool:
    """True if a checkpoint of any kind runs the present call, with or without gradients."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


def recomputed_writes(recorder: Recorder) -> list[tuple[Any, str]]:
    """Where the backward of the model repeats writes of the forward: (module, key). In place, or by assigning a tensor
    made from what stood there; one made from other things comes out the same again.
    """
    recording = recorder.recording
    written_again, values = recording.checkpoints.written, recording.values
    found = {
        id(last): last in written_again or id(values[last]) in written_again for _, last in recording.state.changes
    }
    if not all(found.values()) and (recording.checkpoints.records or _may_checkpoint_unseen(recorder)):
        made = {
            int(h): n for n, record in enumerate(recording.records) for _, h in value_ids_with_paths(record.returns)
        }
        places = {(id(module), key) for (module, key), _ in recording.state.changes}
        for _, last in recording.state.changes:
            inside = made.get(int(last)) in recording.checkpoints.records or not recording.checkpoints.records
            found[id(last)] |= inside and _is_made_of(recording, made, last, places)
    return [where for where, last in recording.state.changes if found[id(last)]]


def _may_checkpoint_unseen(recorder: Recorder) -> bool:
    """True if the code names a checkpoint where gradients are off, and a checkpoint leaves no mark."""
    if recorder.recording.outer_modes[0] or not recorder.recording.state.changes:
        return False
    code = forward_code(recorder.recording.model, recorder.origins.modules)
    return any("checkpoint" in name for one in code for name in one.co_names)


def _is_made_of(recording: Recording, made: dict[int, int], last: ValueId, places: set[tuple[int, str]]) -> bool:
    """True if a value depends on what stood at one of these places."""
    stack, seen = [int(last)], set[int]()
    while stack:
        handle = stack.pop()
        if handle in seen or handle not in made:
            continue
        seen.add(handle)
        record = recording.records[made[handle]]
        if isinstance(record, SourceRecord):
            where = record.where
            if record.kind not in ("input", "constant") and (id(where[0]), where[1]) in places:
                return True
        else:
            trees = (*record.args, *(record.kwargs or {}).values())
            stack.extend(int(leaf) for leaf in value_ids_in(trees))
    return False


_CHECKPOINT_FILE = inspect.unwrap(checkpoint).__code__.co_filename


def close_checkpoints(error: BaseException) -> None:
    """Removes the hooks of checkpoints that an exception ended. Before torch 2.13 they stay as long as the exception is
    held: the generator that would remove them lives in a frame of its traceback.
    """
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None or error.__traceback__ is None:
        return
    code = inspect.unwrap(module.checkpoint).__code__
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is code]
    for frame in reversed(frames):
        with suppress(RuntimeError):  # it still runs: the exception is handled inside
            frame.clear()


_UNCHANGED = nullcontext()


@contextmanager
def _saving_without_hooks() -> Iterator[None]:
    """Disables the hooks by a switch instead of popping them: nested checkpoints have two on the stack."""
    before = _ignore_hooks(True)
    try:
        yield
    finally:
        _ignore_hooks(before)
