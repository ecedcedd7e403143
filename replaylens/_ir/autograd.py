"""Tensors' places in autograd's graph: leaves, histories, and what the steps of a backward pass have saved.

Torch reads what a step (`grad_fn`) saved in its backward as it is by then; a write by `.data` or numpy moves no counter
that it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import NotDifferentiable
from .torch_private import outside_of_transforms, peek_interpreter_stack


def history_of(tensor: torch.Tensor) -> str | None:
    """What autograd would do for a tensor, by name; None where it has no history, or one that torch will not show."""
    try:
        return type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else None
    except RuntimeError:  # a view that was made without gradients and written with them
        return None


OTHER_KIND = (
    "gradients of a tensor that was given other memory by `.data =`, of another shape or dtype, cannot be replayed.\n"
    "Assign numbers of the same shape and dtype, or another tensor."
)


class _Standing(torch.autograd.Function):
    """One tensor's content, another one's place in the history."""

    generate_vmap_rule = True

    @staticmethod
    def forward(place: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """The content."""
        return content.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Of what kind both are."""
        ctx.kinds = [(tuple(value.shape), value.dtype) for value in inputs]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """To the place, unchanged."""
        if ctx.kinds[0] != ctx.kinds[1]:
            raise NotDifferentiable(OTHER_KIND)
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent of the place."""
        return None if tangents[0] is None else tangents[0].clone()


def standing(place: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """What `place.data = content` makes of a tensor: the new content, the gradient goes where it went."""
    if not place.requires_grad and peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return content.detach()
    return _Standing.apply(place, content.detach())  # type: ignore[no-untyped-call]


def hooked(tensor: torch.Tensor, hook: Callable[..., Any]) -> torch.Tensor:
    """The tensor, with a hook on the gradient that comes back to it. A parameter of the model's may have it already."""
    if not tensor.requires_grad or any(known is hook for known in (tensor._backward_hooks or {}).values()):
        return tensor
    same = tensor.view_as(tensor)
    same.register_hook(hook)
    return same


def needing(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that needs gradients: a leaf, if it did not. A transform has no leaves of torch's own."""
    if tensor.requires_grad:
        return tensor
    return fresh_leaf(tensor) if peek_interpreter_stack() is None else tensor.detach()


def new_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """What `nn.Parameter` makes of a tensor: a leaf of its own, over the same memory."""
    if peek_interpreter_stack() is not None:
        return tensor.detach()
    is_kept = not tensor.is_inference() or torch.is_inference_mode_enabled()
    return tensor.detach().requires_grad_() if is_kept else fresh_leaf(tensor)


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same value without a history, and with its flag: torch chooses kernels by whether a tensor needs
    gradients.
    """
    if not tensor.requires_grad or tensor.is_inference():
        return tensor
    with (
        outside_of_transforms()
    ):  # a recorded value stands outside of what runs now, and such a transform forbids the flag
        return tensor.detach().requires_grad_()


def fresh_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same value as a leaf of autograd's graph: gradients end here."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone().requires_grad_()
    return tensor.detach().requires_grad_()


def placed(value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The value at a place of its own in autograd's graph: the gradient there is that of what reads this node alone.

    What has no history becomes a leaf. A call may give one of its arguments back, the very object (dropout in eval
    mode does): `others` are those that it must be told from.
    """
    if not value.requires_grad:
        return fresh_leaf(value)
    for other in others:
        if other is value:
            with torch.enable_grad():
                return value.view_as(value) if value.layout is torch.strided else value.clone()
    return value


def all_placed(count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first `count` values, each at a place of its own; one object that stands several times stays one."""
    made: dict[int, torch.Tensor] = {}
    for value in values[:count]:
        if id(value) not in made:
            made[id(value)] = placed(value, *values[count:])
    return tuple([made[id(value)] for value in values[:count]])


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
