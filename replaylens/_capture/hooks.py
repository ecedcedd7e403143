"""Hooks on the gradients of tensors, which the forward registers, and may take away again.

In: `h.register_hook(f)`. Out: a value of its own from there on, whose gradient goes through the hook. A hook acts as
long as it is there when a gradient is taken: one that is gone by then is taken out of the recording.
"""

from __future__ import annotations

from typing import Any

from .._core.pure import alias, hooked
from .._core.trees import leaves
from .builder import CallRecord, Handle, Recording
from .recorder import Recorder
from .rules import How, Rule

HOOK_LATE = "a hook on a tensor that was read before: it acts on what comes back from there too. Register it at once."
HOOK_ON_STEP = (
    "hooks on steps of the backward pass (grad_fn.register_hook): they are not seen. Register them on tensors."
)
HOOK_TWICE = (
    "a hook within a gradient that is taken with create_graph=True: it acts on both ways back, and once. Use a custom "
    "function."
)


def hook(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A hook is registered. What was read of the tensor before has its gradient go through the hook as well."""
    tensor = args[0]
    removable = func(*args, **kwargs)
    if recorder.functorch:
        return removable
    source = recorder.read(tensor)
    function = args[1] if len(args) > 1 else kwargs["hook"]
    site = recorder.site()
    is_late = _is_read(recorder.recording, source)
    handle = recorder.know_again(tensor)
    recorder.memory.same_as[handle] = source
    recorder.recording.hooks.append((handle, removable, is_late))
    recorder.append(hooked, Rule(How.LEAF, "hook"), [source, function], {}, handle, site, None, False)
    return removable


def _is_read(recording: Recording, source: Handle) -> bool:
    """Does anything that has a history read this value?"""
    for record in reversed(recording.records):
        if record.returns == source:
            break
        if isinstance(record, CallRecord) and source in [x for x in _reads(record) if type(x) is Handle]:
            given: list[Any] = [recording.values[x] for x in leaves(record.returns) if type(x) is Handle]
            if any(getattr(value, "requires_grad", False) for value in given):
                return True
    return False


def _reads(record: CallRecord) -> list[Any]:
    return list(leaves((*record.args, *(record.kwargs or {}).values())))


def settle_hooks(recording: Recording, at_end: bool = False) -> None:
    """Of the hooks that are gone by now only the value stays. What no replay can give is noted at the end."""
    staying = []
    for handle, removable, is_late in recording.hooks:
        held = removable.hooks_dict_ref()
        if held is not None and removable.id in held:
            staying.append((handle, removable, is_late))
            if is_late and at_end:
                recording.one_way.append(HOOK_LATE)
        else:
            _take_out(recording, handle)
    recording.hooks[:] = staying


def _take_out(recording: Recording, handle: Handle) -> None:
    for number, record in enumerate(recording.records):
        if record.returns == handle and isinstance(record, CallRecord) and record.function is hooked:
            recording.records[number] = record._replace(function=alias, args=record.args[:1])
