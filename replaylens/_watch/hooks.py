"""Hooks as a watch puts them on: nothing of them raises into the training, or goes with a copy of the model.

In: functions to be called. Out: hooks; and what a hook can know of the moment in which it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import FrameType
from typing import Any
from weakref import ref

import torch
from attrs import define
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from .._ir.torch_private import graph_task


class Tap:
    """A hook. Copies and pickles of a module have in its place one that does nothing, and needs no replaylens."""

    __slots__ = ("call",)
    __torch_unserializable__ = True  # a tensor that has one can be saved, and torch says nothing of it

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a graph that is compiled has nothing of it
        try:
            self.call(*given)
        except Exception as error:  # never into the training
            say(f"a hook failed: {type(error).__name__}: {error}")

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes anything, gives None


@define(eq=False)
class CompiledCall:
    """Hooks of a module that `module.compile()` has compiled: around what it made, for the module's own hooks are part
    of that. Copies and pickles of a module leave it out, as they do with what was compiled.
    """

    module: ref[nn.Module]
    before: Callable[..., None]  # (module, args, kwargs)
    call: Callable[..., Any]  # the compiled one
    after: Callable[..., None]  # (module, args, output)

    @staticmethod
    def around(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> CompiledCall:
        """Put the hooks on."""
        compiled = module._compiled_call_impl
        assert compiled is not None
        made = CompiledCall(ref(module), before, compiled, after)
        module._compiled_call_impl = made
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        self.before(module, args, kwargs)
        output = self.call(*args, **kwargs)
        self.after(module, args, output)
        return output

    def remove(self) -> None:
        """Take them off, from below others too."""
        module = self.module()
        above = None if module is None else module._compiled_call_impl
        if above is self and module is not None:
            module._compiled_call_impl = self.call
        while isinstance(above, CompiledCall) and above.call is not self:
            above = above.call
        if isinstance(above, CompiledCall):
            above.call = self.call


def say(text: str) -> None:
    """Tell whoever trains, on standard error. It does no harm where there is none."""
    with suppress(Exception):
        print(f"replaylens: {text}", file=sys.stderr)


def is_no_forward() -> bool:
    """True where a module's call is none of the training's: a graph is traced, or a checkpoint computes again."""
    return graph_task() != -1 or torch.jit.is_tracing()


def is_called_above(module: nn.Module, frame: FrameType | None) -> bool:
    """True if, besides the innermost one, another call of this module runs."""
    calls = 0
    while frame is not None:
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def is_checkpointed(frame: FrameType | None) -> bool:
    """True within a reentrant checkpoint, which computes without gradients first."""
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = CheckpointFunction.forward.__code__
