"""Leaves that the forward freezes, and lets take gradients again: `p.requires_grad_(False)`, `.requires_grad = True`.

In: a call that turns the flag of a tensor. Out: what the tensor holds from here on is a value of its own, so that each
call reads it with the flag that it had then: detached while it is frozen, the very value from before when it is not.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.pure import needing, standing
from .builder import Handle, SourceRecord
from .recorder import Recorder
from .rules import How, Rule


def turn(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A call that may turn a leaf's flag: `requires_grad_`, the setter of `requires_grad`, `detach_`."""
    tensor = args[0]
    wanted = func.__name__ != "detach_" and bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    before = tensor.requires_grad
    if before == wanted or not tensor.is_leaf or recorder.functorch or tensor.is_inference():
        result = func(*args, **kwargs)
        if before is wanted is False and not recorder.recording.ambient[0]:  # with gradients this may raise, or freeze
            recorder.ask("flags", torch.Tensor.requires_grad.__get__, (tensor,), {}, False)  # type: ignore[attr-defined]
        return result
    source = recorder.read(tensor)
    _keep_as_it_was(recorder, source, tensor, before)
    result = func(*args, **kwargs)
    first, flag, _ = recorder.recording.turned.setdefault(id(tensor), (source, before, tensor))
    if wanted == flag and first in recorder.memory.same_content(source):
        _hold(recorder, tensor, first)
    elif not wanted:
        _hold(recorder, tensor, _written_down(recorder, tensor, torch.Tensor.detach, source))
    elif flag:
        _hold(recorder, tensor, _written_down(recorder, tensor, standing, first, source))
    else:
        _hold(recorder, tensor, _written_down(recorder, tensor, needing, source))
    return result


def _keep_as_it_was(recorder: Recorder, source: Handle, tensor: torch.Tensor, flag: bool) -> None:
    """What a call gave is recorded with the flag that it had then. What the model holds and is given stays itself."""
    values = recorder.recording.values
    is_given = any(isinstance(r, SourceRecord) and r.returns == source for r in recorder.recording.records)
    if values[source] is tensor and not is_given:
        with recorder.at_work():
            values[source] = tensor.detach().requires_grad_(flag)


def _written_down(recorder: Recorder, tensor: torch.Tensor, function: Any, *reads: Handle) -> Handle:
    """The call that stands for the turn: what it gives has the content of the last thing that it reads."""
    flag = function is not torch.Tensor.detach
    with recorder.at_work():
        handle = recorder.recording.keep(tensor.detach().requires_grad_(flag))
    recorder.memory.same_as[handle] = reads[-1]
    rule = Rule(How.LEAF, "requiresgrad")
    recorder.append(function, rule, list(reads), {}, handle, recorder.site(), None, False)
    return handle


def _hold(recorder: Recorder, tensor: torch.Tensor, handle: Handle) -> None:
    """From here on the tensor holds this value."""
    entry = recorder.memory.entry(tensor)
    entry.handle = handle
    if not entry.steps:
        entry.base.handle = handle
    entry.base.held.append(handle)
