"""The clock of a watch: which step of the training it is.

In: a model. Out: calls before and after each step of its optimizers. Nothing is asked of the user's loop: torch calls
hooks of all optimizers, and those that hold none of the model's parameters are passed over. Where several optimizers
train one model, a step ends when all have stepped that did so in the step before; or, at the latest, when one of them
is about to step for the second time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from attrs import define, field
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._ir.torch_private import graph_task, without_function_modes

Closure = Callable[..., Any]

_FRAMES = 12  # from the optimizer's hook to the scaler that called the optimizer: five in torch 2.13


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer trains."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """The closure that an optimizer's step was given, which runs the model within it."""
    found = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found if callable(found) else None


@define(eq=False)
class OptimizerClock:
    """Counts the steps of a model's optimizers, whoever calls them, and whenever they are made."""

    model: ReferenceType[nn.Module]
    before: Callable[[Optimizer, Closure | None], Closure | None]  # it may give another closure, to be run in its place
    after: Callable[[Optimizer, bool], None]  # True: it ran a closure
    step: int = 0  # those that have ended
    others: Callable[[], list[torch.Tensor]] = list  # tensors that are watched as well, and no parameters of the model
    is_in_step: bool = False
    _sole: ReferenceType[Optimizer] | None = None  # the one that made the step before alone: nothing else is asked then
    failed: Callable[[Exception], None] = lambda error: None  # a hook of ours raised
    late: Callable[[], None] = lambda: None  # a step has ended, which is noticed when the next one nearly has
    _hooked: CodeType | None = None  # of torch's function around `step`, which calls hooks
    _nests: bool = False  # some optimizer's step calls another one of its own
    _own: WeakSet[Optimizer] = field(factory=WeakSet)
    _stepped: WeakSet[Optimizer] = field(factory=WeakSet)  # in this step
    _has_ended: bool = False  # a step
    _foreign: WeakKeyDictionary[Optimizer, int] = field(factory=WeakKeyDictionary)  # with their groups, when asked
    _handles: list[Any] = field(factory=list)

    @staticmethod
    def of(
        model: nn.Module,
        before: Callable[[Optimizer, Closure | None], Closure | None],
        after: Callable[[Optimizer, bool], None],
        step: int = 0,
        others: Callable[[], list[torch.Tensor]] = list,
    ) -> OptimizerClock:
        """A running clock, which begins with this step."""
        clock = OptimizerClock(ref(model), before, after, step, others)
        clock._handles.append(register_optimizer_step_pre_hook(clock._pre))
        clock._handles.append(register_optimizer_step_post_hook(clock._post))
        return clock

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __deepcopy__(self, memo: Any) -> OptimizerClock:
        return self  # torch copies no hooks of all optimizers; who copies these means the same clock

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled must not have this hook in it
            return None
        try:
            return self._begins(optimizer, args, kwargs, sys._getframe(1))
        except Exception as error:  # never into the training
            self.failed(error)
            return None

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._ends(optimizer, args, kwargs, sys._getframe(1))
        except Exception as error:
            self.failed(error)

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any, hooked: FrameType) -> Any:
        self._hooked = hooked.f_code
        if self.is_in_step and self._is_within_a_step(hooked.f_back):
            self._nests = True
            return None
        is_sole = self._sole is not None and self._sole() is optimizer
        if not is_sole and not self._is_ours(optimizer):
            return None
        self.is_in_step = True
        if not is_sole:
            self._sole = None
            if optimizer in self._stepped:
                self.end()
                self.late()
        closure = self.before(optimizer, closure_of(args, kwargs))
        if closure is None:
            return None
        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any, hooked: FrameType) -> None:
        if self._nests and self._is_within_a_step(hooked.f_back):
            return
        is_sole = self._sole is not None and self._sole() is optimizer
        if not is_sole and not self._is_ours(optimizer):
            return
        self.is_in_step = False
        if is_sole:
            self.step += 1
        else:
            self._stepped.add(optimizer)
            if self._own <= self._stepped and (self._has_ended or self._have_all_stepped()):
                self.end()
        self.after(optimizer, closure_of(args, kwargs) is not None)

    @property
    def is_pending(self) -> bool:
        """True if some optimizers have stepped, and others may yet: the next forward ends the step, if not they do."""
        if self.is_in_step and not self._is_within_a_step(sys._getframe(1)):
            self.is_in_step = False  # that step raised
        return bool(self._stepped) and not self.is_in_step

    def end(self) -> None:
        """The step ends."""
        self.step += 1
        self._has_ended, self._stepped = True, WeakSet()
        self._sole = ref(next(iter(self._own))) if len(self._own) == 1 else None

    def _have_all_stepped(self) -> bool:
        """False if a parameter with a gradient is another optimizer's, or the gradients are still being computed."""
        model = self.model()
        if model is None or graph_task() != -1:
            return model is None
        own = {id(parameter) for optimizer in self._stepped for parameter in parameters_of(optimizer)}
        with without_function_modes():
            return all(id(one) in own or one.grad is None for one in model.parameters())

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """True if the optimizer trains a parameter of the model, or a watched tensor: asked once, and when it gets new
        groups.
        """
        if optimizer in self._own:
            return True
        groups = len(optimizer.param_groups)
        model = self.model()
        if model is None or self._foreign.get(optimizer) == groups:
            return False
        own = {*map(id, model.parameters()), *map(id, self.others())}
        if any(id(parameter) in own for parameter in parameters_of(optimizer)):
            self._own.add(optimizer)
            return True
        self._foreign[optimizer] = groups
        return False

    def _is_within_a_step(self, frame: FrameType | None) -> bool:
        """True within the step of one of these optimizers: in its closure, in the step of its base class, or of an
        optimizer that it holds.
        """
        while frame is not None:
            if frame.f_code is self._hooked and frame.f_locals.get("self") in self._own:
                return True
            frame = frame.f_back
        return False


def scaler_above(frame: FrameType | None) -> GradScaler | None:
    """The GradScaler that called the optimizer, if one did."""
    for _ in range(_FRAMES):
        if frame is None:
            return None
        found = frame.f_locals.get("self") if frame.f_code in _SCALER_CODES else None
        if isinstance(found, GradScaler):
            return found
        frame = frame.f_back
    return None


_SCALER_CODES = (GradScaler.step.__code__,)
