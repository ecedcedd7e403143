"""Changes of `requires_grad` of leaves during a forward: `p.requires_grad_(False)`, `.requires_grad = True`.

In: a call that sets the flag of a tensor. Out: from then on the tensor has a value of its own, so that each call reads
it with the flag of that moment: detached while frozen, the original value once it is thawed.
"""

from __future__ import annotations

from typing import Any

import torch

from .._ir.autograd import needing, standing
from .dispatch import Handling, Rule
from .recorder import Recorder
from .recording import CallRecord, SourceRecord, ValueId, reads_of


def turn(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A call that may change the flag of a leaf: `requires_grad_`, the setter of `requires_grad`, `detach_`."""
    tensor = args[0]
    wanted = func.__name__ != "detach_" and bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    before = tensor.requires_grad
    if before == wanted or not tensor.is_leaf or recorder.functorch or tensor.is_inference():
        result = func(*args, **kwargs)
        if before is wanted is False and not recorder.recording.ambient[0]:  # else this may raise, or freeze
            recorder.ask("flags", torch.Tensor.requires_grad.__get__, (tensor,), {}, False)  # type: ignore[attr-defined]
        return result
    source = recorder.read(tensor)
    _keep_flag(recorder, source, tensor, before)
    result = func(*args, **kwargs)
    first, flag, _ = recorder.recording.autograd.turned.setdefault(id(tensor), (source, before, tensor))
    if wanted == flag and first in recorder.memory.equal_values(source):
        handle = first
    else:
        thawed = (standing, first, source) if flag else (needing, source)
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


def note_flags(recorder: Recorder) -> None:
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
