"""The clock of a watch: which step of the training it is.

In: a model. Out: calls before and after each step of its optimizers. Nothing is asked of the user's loop: torch calls
hooks of all optimizers, and those that hold none of the model's parameters are passed over. Where several optimizers
train one model, a new step begins when one of them steps for the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType
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

_FRAMES = 12  # from the optimizer's hook to the scaler that called the optimizer: five in torch 2.13


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer trains."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@define(eq=False)
class OptimizerClock:
    """Counts the steps of a model's optimizers, whoever calls them, and whenever they are made."""

    model: ReferenceType[nn.Module]
    before: Callable[[Optimizer], None]
    after: Callable[[Optimizer], None]
    step: int = 0  # those that have ended
    is_in_step: bool = False
    _own: WeakSet[Optimizer] = field(factory=WeakSet)
    _stepped: WeakSet[Optimizer] = field(factory=WeakSet)  # those that have stepped in this round
    _foreign: WeakKeyDictionary[Optimizer, int] = field(factory=WeakKeyDictionary)  # with their groups, when asked
    _handles: list[Any] = field(factory=list)

    @staticmethod
    def of(
        model: nn.Module, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None], step: int = 0
    ) -> OptimizerClock:
        """A running clock, which begins with this step."""
        clock = OptimizerClock(ref(model), before, after, step)
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

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self.is_in_step = True
            self.before(optimizer)

    def _post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self.is_in_step = False
        if not self._stepped or optimizer in self._stepped:
            self.step += 1
            self._stepped.clear()
        self._stepped.add(optimizer)
        self.after(optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """True if the optimizer trains a parameter of the model: asked once, and when it gets new groups."""
        if optimizer in self._own:
            return True
        groups = len(optimizer.param_groups)
        model = self.model()
        if model is None or self._foreign.get(optimizer) == groups:
            return False
        own = set(map(id, model.parameters()))
        if any(id(parameter) in own for parameter in parameters_of(optimizer)):
            self._own.add(optimizer)
            return True
        self._foreign[optimizer] = groups
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
