"""Tensors' places in autograd's graph: leaves, histories, and what the nodes of a backward pass have saved.

Torch's backward reads saved tensors as they are when it runs. A write through `.data` or numpy advances no version
counter, so torch does not notice it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import NotDifferentiable
from .torch_private import outside_of_transforms, peek_interpreter_stack


def history_of(tensor: torch.Tensor) -> str | None:
    """The name of a tensor's `grad_fn`; None if it has none, or one that torch refuses to show."""
    try:
        return type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else None
    except RuntimeError:  # a view that was made without gradients and written with them
        return None


OTHER_SHAPE_OR_DTYPE = (
    "gradients of a tensor that was given other memory by `.data =`, of another shape or dtype, cannot be replayed.\n"
    "Assign numbers of the same shape and dtype, or another tensor."
)


class _WithHistoryOf(torch.autograd.Function):
    """One tensor's content with another's autograd history."""

    generate_vmap_rule = True

    @staticmethod
    def forward(place: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """The content."""
        return content.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Note the shapes and dtypes of both."""
        ctx.kinds = [(tuple(value.shape), value.dtype) for value in inputs]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient goes to the place, unchanged."""
        if ctx.kinds[0] != ctx.kinds[1]:
            raise NotDifferentiable(OTHER_SHAPE_OR_DTYPE)
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent of the place."""
        return None if tangents[0] is None else tangents[0].clone()


def with_history_of(place: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """What `place.data = content` makes of a tensor: new content, while the gradient goes where it went before."""
    if not place.requires_grad and peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return content.detach()
    return _WithHistoryOf.apply(place, content.detach())  # type: ignore[no-untyped-call]


def with_gradient_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> torch.Tensor:
    """The tensor with a hook on its gradient. Unchanged if it has this hook already, as a parameter can."""
    if not tensor.requires_grad or any(known is hook for known in (tensor._backward_hooks or {}).values()):
        return tensor
    same = tensor.view_as(tensor)
    same.register_hook(hook)
    return same


def requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that requires grad: a new leaf, if it did not. Inside a transform torch has no leaves."""
    if tensor.requires_grad:
        return tensor
    return fresh_leaf(tensor) if peek_interpreter_stack() is None else tensor.detach()


def new_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """What `nn.Parameter` makes of a tensor: a leaf of its own over the same memory."""
    if peek_interpreter_stack() is not None:
        return tensor.detach()
    is_kept = not tensor.is_inference() or torch.is_inference_mode_enabled()
    return tensor.detach().requires_grad_() if is_kept else fresh_leaf(tensor)


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same value without a history but with its `requires_grad`, on which torch's choice of kernels depends."""
    if not tensor.requires_grad or tensor.is_inference():
        return tensor
    with outside_of_transforms():  # recorded values are outside of a running transform, which forbids setting the flag
        return tensor.detach().requires_grad_()


def fresh_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same value as a leaf: gradients end here."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone().requires_grad_()
    return tensor.detach().requires_grad_()


def as_own_node(value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The value as a node of its own in autograd's graph, so that its gradient is that of what reads this node alone.

    A value without a history becomes a leaf. A call may return one of its arguments, as dropout does in eval mode:
    `others` are the tensors that it must not be identical with.
    """
    if not value.requires_grad:
        return fresh_leaf(value)
    for other in others:
        if other is value:
            with torch.enable_grad():
                return value.view_as(value) if value.layout is torch.strided else value.clone()
    return value


def as_own_nodes(count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first `count` values, each as a node of its own; an object that occurs several times stays one."""
    made: dict[int, torch.Tensor] = {}
    for value in values[:count]:
        if id(value) not in made:
            made[id(value)] = as_own_node(value, *values[count:])
    return tuple([made[id(value)] for value in values[:count]])


DEEPEST = 6  # how many steps of a backward pass one torch function may take


def saved_below(function: Any, is_it: Callable[[torch.Tensor], bool], stops: set[Any], depth: int = DEEPEST) -> bool:
    """True if the predicate holds for a tensor saved by this autograd node, or by those that follow it within the same
    call.
    """
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
        except RuntimeError:  # written in a way that torch notices, or freed: torch raises in the backward
            continue
        values = value if isinstance(value, (tuple, list)) else (value,)
        found.extend(tensor for tensor in values if isinstance(tensor, torch.Tensor))
    return found


class _RefusingGradient(torch.autograd.Function):
    """The same value; a gradient that reaches it is refused."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, why: str) -> torch.Tensor:
        """The value."""
        ctx.why = why
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refuse."""
        raise NotDifferentiable(ctx.why)


def refusing_gradient(value: torch.Tensor, why: str) -> torch.Tensor:
    """The value, through which taking a gradient raises `NotDifferentiable` with this reason."""
    return _RefusingGradient.apply(value, why) if value.requires_grad else value  # type: ignore[no-untyped-call]
