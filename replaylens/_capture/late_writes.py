"""Memory that a backward pass still reads, written where torch does not notice: `weight.data.mul_(0.5)` after its use.

In: memory that is written through `.data` or by numpy, or exchanged. Out: whether a call before saved it, of what it
read or of what it gave. Torch's own backward then reads what is there by that time; a program has the gradient of what
was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from attrs import frozen

from .._core.autograd import history_of, saved_below
from .._core.sameness import same_content
from .._core.sharing import storage_of
from .._core.torch_private import without_function_modes
from .._core.trees import freeze_deep, thaw
from .builder import CallRecord, Gone, Handle, Recording, handles_in
from .recorder import Recorder
from .regions import reads_of
from .storage import Base

LATE_WRITE = (
    "memory that the model writes by .data or numpy after its use: torch's own backward reads what is there by then, "
    "without a sign. Write it before, or compute with a copy."
)
Is = Callable[[torch.Tensor], bool]


def note_late_write(
    recorder: Recorder, base: Base, exchanged: torch.Tensor | None = None, held: Collection[Handle] = ()
) -> None:
    """Gradients are refused if a backward pass reads what is written now; or this very object, which gets other memory:
    what looks at it keeps the old one.
    """
    recording = recorder.recording
    held = set(held) or {*base.held, base.handle}
    memory = recorder.storages_of(base)

    def is_it(tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in memory if exchanged is None else tensor is exchanged

    asked = _Asked(recorder, held, is_it, exchanged is not None)
    if asked.is_made_by_what_saved_it(base.root) or any(map(asked.is_saved_by, asked.records)):
        recording.one_way.append(LATE_WRITE)


def note_writes_from_outside(recorder: Recorder) -> None:
    """The same for what numpy and its like wrote, when the forward is over. What nobody read since is recorded as it
    was before.
    """
    memory = recorder.memory
    for base in list(memory.bases.values()):
        if base.exposed is not None and not same_content(base.root, base.exposed):
            memory.require_announced(base)
            note_late_write(recorder, base)
            memory.restore_held(base)
    for base, held in memory.rewritten:
        note_late_write(recorder, base, held=held)


@frozen(eq=False)
class _Asked:
    """What is asked for: the values that lie in some memory, or one object, which gets other memory."""

    recorder: Recorder
    held: set[Handle]
    is_it: Is
    as_object: bool

    @property
    def recording(self) -> Recording:
        """What was written down so far."""
        return self.recorder.recording

    @property
    def records(self) -> Iterator[CallRecord]:
        """The calls that read it or made it. A call keeps an alias of its result, which nobody exchanges."""
        for record in self.recording.records:
            if isinstance(record, CallRecord):
                made = () if self.as_object else _given(record)
                if not self.held.isdisjoint(reads_of(record)) or not self.held.isdisjoint(made):
                    yield record

    def is_made_by_what_saved_it(self, tensor: torch.Tensor) -> bool:
        """Does the history of what lies there now begin with a step that saved it?"""
        has_history = not self.as_object and _has_history(tensor)
        return has_history and saved_below(tensor.grad_fn, self.is_it, set())

    def is_saved_by(self, record: CallRecord) -> bool:
        """Did the call save it for its backward? Where nothing has a history, torch does not tell."""
        recording = self.recording
        given = [recording.values[h] for h in _given(record)]
        reads = [recording.values[h] for h in reads_of(record)]
        if not recording.ambient[0] or any(map(_may_need_gradients_elsewhere, reads)):
            return self.would_be_saved_by(record)
        if any(isinstance(value, Gone) for value in given):
            return any(h in recording.gradients for h in _given(record))
        stops = {value.grad_fn for value in reads if _has_history(value)}
        return any(saved_below(value.grad_fn, self.is_it, stops) for value in given if _has_history(value))

    def would_be_saved_by(self, record: CallRecord) -> bool:
        """Is it saved where all that the call reads needs gradients? The call is made once more to see."""
        if record.draws is not None:
            return True
        copies: dict[Handle, torch.Tensor] = {}
        asked: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if type(value) is not Handle:
                return value
            if value not in copies:
                tensor = self.recording.values[value]
                copy = copies[value] = tensor.detach().clone()
                if self.is_it(tensor) if self.as_object else value in self.held:
                    asked.append(copy)
                if copy.is_floating_point() or copy.is_complex():
                    copy.requires_grad_()
            return copies[value]

        try:
            with without_function_modes(), self.recorder.at_work(), torch.enable_grad():
                args = [thaw(value, leaf) for value in record.args]
                out = record.function(*args, **{key: thaw(value, leaf) for key, value in (record.kwargs or {}).items()})
        except Exception:
            return True
        found: list[torch.Tensor] = []
        freeze_deep(out, found.append)
        if not self.as_object:
            given = _given(record)
            is_plain = len(given) == len(found)
            made = [tensor for tensor, handle in zip(found, given, strict=False) if handle in self.held]
            asked.extend(made if is_plain else found)

        def is_asked(tensor: torch.Tensor) -> bool:
            return any(tensor is one if self.as_object else storage_of(tensor) == storage_of(one) for one in asked)

        return any(saved_below(value.grad_fn, is_asked, set()) for value in found)


def _given(record: CallRecord) -> list[Handle]:
    return handles_in(record.returns)


def _may_need_gradients_elsewhere(value: Any) -> bool:
    """Torch saves less for what needs no gradient, and a replay may be given what does."""
    return not isinstance(value, Gone) and not value.requires_grad and (value.is_floating_point() or value.is_complex())


def _has_history(value: Any) -> bool:
    return not isinstance(value, Gone) and value.requires_grad and history_of(value) is not None
