"""Memory that a backward pass still reads, written where torch does not notice: `weight.data.mul_(0.5)` after its use.

In: memory that is written through `.data` or by numpy, or exchanged. Out: whether a call before saved it.
Torch's own backward then reads what is there by that time; a program has the gradient of what was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from .._core.pure import history_of, same_content
from .._core.trees import freeze_deep, leaves, thaw
from .builder import CallRecord, Gone, Handle, Recording
from .recorder import Recorder
from .regions import reads_of
from .storage import Base, storage_key

LATE_WRITE = (
    "memory that the model writes by .data or numpy after its use: torch's own backward reads what is there by then, "
    "without a sign. Write it before, or compute with a copy."
)
Is = Callable[[torch.Tensor], bool]
_DEEPEST = 6  # how many steps of a backward pass one torch function may take


def note_late_write(
    recorder: Recorder, base: Base, exchanged: torch.Tensor | None = None, held: Collection[Handle] = ()
) -> None:
    """Gradients are refused if a backward pass reads what is written now; or this very object, which gets other memory:
    what looks at it keeps the old one.
    """
    recording = recorder.recording
    held = set(held) or {*base.held, base.handle}
    memory = storage_key(base.root)

    def is_it(tensor: torch.Tensor) -> bool:
        return storage_key(tensor) == memory if exchanged is None else tensor is exchanged

    readers = [r for r in recording.records if isinstance(r, CallRecord) and not held.isdisjoint(reads_of(r))]
    if any(_saves(recording, record, is_it, exchanged is not None) for record in readers):
        recording.one_way.append(LATE_WRITE)


def note_writes_from_outside(recorder: Recorder) -> None:
    """The same for what numpy and its like wrote, when the forward is over."""
    memory = recorder.memory
    for base in list(memory.bases.values()):
        if base.exposed is not None and not same_content(base.root, base.exposed):
            note_late_write(recorder, base)
    for base, held in memory.rewritten:
        note_late_write(recorder, base, held=held)


def _saves(recording: Recording, record: CallRecord, is_it: Is, as_object: bool) -> bool:
    """Did the call save what is asked for for its backward? Where gradients are off, torch does not tell."""
    given = [recording.values[h] for h in leaves(record.returns) if type(h) is Handle]
    if not recording.ambient[0]:
        return any(not _is_gone(t) and not is_it(t) and t.is_floating_point() for t in given)
    if any(_is_gone(value) for value in given):
        return any(h in recording.gradients for h in leaves(record.returns) if type(h) is Handle)
    if not as_object and any(_may_need_gradients_elsewhere(recording.values[h]) for h in reads_of(record)):
        return _would_save(recording, record, is_it)
    stops = {value.grad_fn for value in (recording.values[h] for h in reads_of(record)) if _has_history(value)}
    return any(_saved_below(value.grad_fn, is_it, stops, _DEEPEST) for value in given if _has_history(value))


def _may_need_gradients_elsewhere(value: Any) -> bool:
    """Torch saves less for what needs no gradient, and a replay may be given what does."""
    return not _is_gone(value) and not value.requires_grad and (value.is_floating_point() or value.is_complex())


def _would_save(recording: Recording, record: CallRecord, is_it: Is) -> bool:
    """Is what is asked for saved where all that the call reads needs gradients? The call is made once more to see."""
    if record.draws is not None:
        return True
    copies: dict[Handle, torch.Tensor] = {}
    asked: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if type(value) is not Handle:
            return value
        if value not in copies:
            tensor = recording.values[value]
            copy = copies[value] = tensor.detach().clone()
            if is_it(tensor):
                asked.append(copy)
            if copy.is_floating_point() or copy.is_complex():
                copy.requires_grad_()
        return copies[value]

    try:
        with torch.enable_grad():
            args = [thaw(value, leaf) for value in record.args]
            out = record.function(*args, **{key: thaw(value, leaf) for key, value in record.kwargs.items()})
    except Exception:
        return True

    def is_asked(tensor: torch.Tensor) -> bool:
        return any(storage_key(tensor) == storage_key(one) for one in asked)

    found: list[torch.Tensor] = []
    freeze_deep(out, found.append)
    return any(_saved_below(value.grad_fn, is_asked, set(), _DEEPEST) for value in found)


def _is_gone(value: Any) -> bool:
    return isinstance(value, Gone)


def _has_history(value: Any) -> bool:
    return not _is_gone(value) and value.requires_grad and history_of(value) is not None


def _saved_below(function: Any, is_it: Is, stops: set[Any], depth: int) -> bool:
    """Is what is asked for among what a step of a backward pass saved, or those that follow it within the same call?"""
    if function is None or function in stops or not depth:
        return False
    if any(map(is_it, _saved_by(function))):
        return True
    return any(_saved_below(below, is_it, stops, depth - 1) for below, _ in function.next_functions)


def _saved_by(function: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name in ("saved_tensors", *[name for name in dir(function) if name.startswith("_saved_")]):
        try:
            value = getattr(function, name, None)
        except RuntimeError:  # it was written in a way that torch notices, or let go of: torch raises in the backward
            continue
        values = value if isinstance(value, (tuple, list)) else (value,)
        found.extend(tensor for tensor in values if isinstance(tensor, torch.Tensor))
    return found
