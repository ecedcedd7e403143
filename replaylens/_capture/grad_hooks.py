"""Hooks on the gradients of tensors, which the forward registers and may remove.

In: `h.register_hook(f)`. Out: from there on a value of its own, whose gradient goes through the hook. A hook acts as
long as it is registered when a gradient is taken: one that is removed before is removed from the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .._ir.autograd import hooked
from .._ir.runtime import alias
from .aliasing import Alias
from .bytecode import words
from .dispatch import Handling, Rule
from .recorder import Recorder
from .recording import CallRecord, Recording, SourceRecord, ValueId, handles_in, reads_of
from .user_code import closed_over

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


def hook(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
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
    recorder.append(hooked, Rule(Handling.LEAF, _HOOK), [source, function], {}, handle, site, None, False)
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
            results = [recording.values[handle] for handle in handles_in(record.returns)]
            if any(getattr(value, "requires_grad", False) for value in results):
                return True
    return False


def settle_hooks(recording: Recording) -> None:
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
        if record.returns == handle and isinstance(record, CallRecord) and record.function is hooked:
            recording.records[number] = record._replace(function=alias, args=record.args[:1])


def note_hooks(recorder: Recorder) -> None:
    """Records what no replay can reproduce of the hooks that are left after the forward."""
    recording = recorder.recording
    settle_hooks(recording)
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
            named = names | words(value.__code__)
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            named_globals = [value.__globals__[name] for name in sorted(named) if name in value.__globals__]
            stack.extend((one, named) for one in (*closed_over(value), *defaults, *named_globals))
        elif isinstance(value, MethodType):
            stack.extend(((value.__func__, names), (value.__self__, names | words(value.__func__.__code__))))
        elif isinstance(value, partial):
            stack.extend((one, names) for one in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, dict):
            stack.extend((one, names) for one in value.values())
        elif isinstance(value, (tuple, list, set, frozenset)):
            stack.extend((one, names) for one in value)
        elif not isinstance(value, (type, ModuleType)):
            call = vars(type(value)).get("__call__")
            named = names | (words(call.__code__) if isinstance(call, FunctionType) else frozenset())
            stack.extend((one, named) for one in _attributes(value, named))


def _attributes(value: Any, names: frozenset[str]) -> list[Any]:
    """The attributes of an object with one of these names, including tensors and modules of a module."""
    held = [getattr(value, "__dict__", {})]
    held.extend(held[0].get(table) or {} for table in ("_buffers", "_modules"))
    return [one for table in held for name, one in table.items() if name in names]
