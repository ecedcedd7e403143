"""Does a custom `autograd.Function` read a value in its backward alone?

In: a call made ready, the values that it was recorded with, one of these. Out: whether a gradient goes to it, or other
numbers in it give other gradients. Its forward may hand on one argument and keep another for the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import evolve

from .._core.node import Call, Ref
from .._core.sameness import same
from .alone import Given, ready

Gradients = dict[Ref, torch.Tensor | None]


def is_foreign(node: Call) -> bool:
    """Is it a call of code that is not torch's: of a custom function, or of an operator of another library?"""
    name = node.target.name
    return is_custom(node) or (name.startswith("torch.ops.") and not name.startswith(_OWN_OPERATORS))


_OWN_OPERATORS = ("torch.ops.aten.", "torch.ops.prims.", "torch.ops.quantized.")


def is_custom(node: Call) -> bool:
    """Is it a call of a custom function, which has a backward of its own?"""
    owner = getattr(node.target.function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def is_read_backward(
    node: Call, draws: Mapping[str, torch.Tensor], given: Given, parent: Ref, others: Iterable[torch.Tensor]
) -> bool:
    """Is a value that its forward does not show read in its backward?"""
    if not is_custom(node):
        return False
    recorded = _gradients(node, draws, given)
    own = recorded.get(parent)
    if own is not None and bool(own.any()):
        return True
    found = (_gradients(node, draws, {**given, parent: other}) for other in others)
    return any(not _agree(recorded, one) for one in found if one)


def _gradients(node: Call, draws: Mapping[str, torch.Tensor], given: Given) -> Gradients:
    """The gradients of the sum of what it gives, at all that it reads; none where it cannot be made on these values."""
    numbers = {ref: value for ref, value in given.items() if value.is_floating_point() or value.is_complex()}
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {ref: value.detach().clone().requires_grad_() for ref, value in numbers.items()}
            context = evolve(node.context, grad=True, inference=False)
            made = ready(evolve(node, context=context), draws)({**given, **leaves})
            ends = [end.sum().abs() if end.is_complex() else end.sum() for end in _differentiable(made.values())]
            found = torch.autograd.grad(ends, list(leaves.values()), allow_unused=True)
    except Exception:
        return {}
    return dict(zip(leaves, found, strict=True))


def _differentiable(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _agree(one: Gradients, other: Gradients) -> bool:
    return all((one[ref] is other[ref]) or _equal(one[ref], other[ref]) for ref in one if ref in other)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and same(one, other)
