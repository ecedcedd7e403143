"""What the steps of a backward pass have saved, and values from which none goes back.

In: a step (`grad_fn`), and a question about tensors. Out: is one of those that it saved meant? Torch reads them in its
backward as they are by then; a write by `.data` or numpy moves no counter that it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import NotDifferentiable

DEEPEST = 6  # how many steps of a backward pass one torch function may take


def saved_below(function: Any, is_it: Callable[[torch.Tensor], bool], stops: set[Any], depth: int = DEEPEST) -> bool:
    """Is what is asked for among what a step of a backward pass saved, or those that follow it within the same call?"""
    if function is None or function in stops or not depth:
        return False
    if any(map(is_it, _saved_by(function))):
        return True
    return any(saved_below(below, is_it, stops, depth - 1) for below, _ in function.next_functions)


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


class _NoWayBack(torch.autograd.Function):
    """The same value; a gradient that comes back to it is refused."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, why: str) -> torch.Tensor:
        """The value."""
        ctx.why = why
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """None is right."""
        raise NotDifferentiable(ctx.why)


def without_way_back(value: torch.Tensor, why: str) -> torch.Tensor:
    """The value. Who takes a gradient through it is told why there is none."""
    return _NoWayBack.apply(value, why) if value.requires_grad else value  # type: ignore[no-untyped-call]
