"""Checkpoints of torch's, in a run that changes values: they would compute again in the backward, without the changes.

A checkpoint without reentry hooks in where autograd saves tensors, and saves none. Where these hooks are left alone,
autograd saves what it always saves, and the backward computes nothing again.
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

from .._core.torch_private import leave_saving_hooks_alone, top_saving_hooks

_hooks: Any = top_saving_hooks
_leave_hooks_alone: Any = leave_saving_hooks_alone


def nothing_computed_again() -> AbstractContextManager[Any]:
    """Within, a checkpoint that the model is in saves what it would else compute again."""
    return _saving_without_hooks() if in_checkpoint() else _AS_IT_IS


def in_checkpoint() -> bool:
    """Does a checkpoint keep tensors from being saved?"""
    hooks = _hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def beneath_checkpoint() -> bool:
    """Does a checkpoint run what runs now, of whatever kind, with gradients or without?"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            return True
        frame = frame.f_back
    return False


_FILE = inspect.unwrap(checkpoint).__code__.co_filename


def leave_checkpoints(error: BaseException) -> None:
    """Take off the hooks of checkpoints that an exception ended. Before torch 2.13 they stay on for as long as somebody
    holds the exception: the generator that would take them off is a variable of a frame in its traceback.
    """
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None or error.__traceback__ is None:
        return
    code = inspect.unwrap(module.checkpoint).__code__
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is code]
    for frame in reversed(frames):
        with suppress(RuntimeError):  # it runs: the exception is handled within
            frame.clear()


_AS_IT_IS = nullcontext()


@contextmanager
def _saving_without_hooks() -> Iterator[None]:
    """By a switch, not by taking hooks off: a checkpoint in another has two on the stack."""
    before = _leave_hooks_alone(True)
    try:
        yield
    finally:
        _leave_hooks_alone(before)
