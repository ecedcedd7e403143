"""Checkpoints (torch.utils.checkpoint) in a live run: in the backward they would recompute without the patches.

A non-reentrant checkpoint hooks in where autograd saves tensors, and saves none. Where these hooks are disabled
autograd saves as usual, and the backward recomputes nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch.utils.checkpoint import checkpoint

from .._ir.torch_private import leave_saving_hooks_alone, top_saving_hooks
from .recorder import Recorder
from .recording import Recording, SourceRecord, ValueId, handles_in, parts_of
from .user_code import code_of

_hooks: Any = top_saving_hooks
_ignore_hooks: Any = leave_saving_hooks_alone


def without_recomputation() -> AbstractContextManager[Any]:
    """While a checkpoint around the model saves what it would otherwise recompute."""
    return _saving_without_hooks() if in_checkpoint() else _UNCHANGED


def in_checkpoint() -> bool:
    """True if a checkpoint keeps autograd from saving tensors."""
    hooks = _hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def beneath_checkpoint() -> bool:
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
        made = {int(h): n for n, record in enumerate(recording.records) for _, h in parts_of(record.returns)}
        places = {(id(module), key) for (module, key), _ in recording.state.changes}
        for _, last in recording.state.changes:
            inside = made.get(int(last)) in recording.checkpoints.records or not recording.checkpoints.records
            found[id(last)] |= inside and _is_made_of(recording, made, last, places)
    return [where for where, last in recording.state.changes if found[id(last)]]


def _may_checkpoint_unseen(recorder: Recorder) -> bool:
    """True if the code names a checkpoint where gradients are off, and a checkpoint leaves no mark."""
    if recorder.recording.ambient[0] or not recorder.recording.state.changes:
        return False
    code = code_of(recorder.recording.model, recorder.origins.modules)
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
            stack.extend(int(leaf) for leaf in handles_in(trees))
    return False


_CHECKPOINT_FILE = inspect.unwrap(checkpoint).__code__.co_filename


def leave_checkpoints(error: BaseException) -> None:
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
