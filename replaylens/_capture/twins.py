"""The functional twin of a call that writes in place, where one exists that gives the very same bits.

In: the call. Out: a pure function and its arguments, or None: then `mutate` does it. A twin is only taken where neither
dtype nor memory layout can differ: the written tensor is dense, and no operand can promote it.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.ops import Quirk, info, stems
from .._core.torch_private import OpOverload, OpOverloadPacket, kernels
from .builder import PLAIN

_FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_DIFFERENTIABLE = _FLOATS | {torch.complex64, torch.complex128}

Twin = tuple[Any, tuple[Any, ...], dict[str, Any]]


def twin_of(func: Any, args: Any, kwargs: Any, target: torch.Tensor, others: list[torch.Tensor]) -> Twin | None:
    """A pure call that gives what the write leaves in its target."""
    op = info(func)
    name = op.name
    if isinstance(func, (OpOverload, OpOverloadPacket)) or kwargs.get("out") is not None:
        return None
    if type(target) not in (*PLAIN, torch.nn.Parameter) or not args or args[0] is not target:
        return None
    if target.layout is not torch.strided or not target.is_contiguous() or target.is_quantized:
        return None
    if name in ("zero_", "fill_") and not others:
        value = 0 if name == "zero_" else args[1] if len(args) > 1 else kwargs["value"]
        if target.dtype in _DIFFERENTIABLE:  # the history goes on, with a gradient of zeros
            return torch.fill, (target, value), {}
        return torch.full_like, (target, value), {}
    if target.dtype not in _FLOATS:
        return None
    if op.has(Quirk.EXACT_IN_PLACE) and not others:
        return _pure_function(func, name), args, kwargs
    if op.has(Quirk.EXACT_OF_TWO) and all(_fits(other, target) for other in others) and not _is_complex(args, kwargs):
        return getattr(torch.Tensor, stems(name)[-1]), args, kwargs
    if name == "masked_fill_" and all(_fits(other, target) or other.dtype is torch.bool for other in others):
        return torch.Tensor.masked_fill, args, kwargs
    return None


def _pure_function(func: Any, name: str) -> Any:
    """`torch.relu` for `torch.relu_`, `torch.Tensor.relu` for the method."""
    pure = name.rstrip("_")
    for place in (torch.Tensor, torch, kernels):
        if getattr(place, name, None) is func and hasattr(place, pure):
            return getattr(place, pure)
    return getattr(kernels, pure, None) or getattr(torch, pure)


def _fits(other: torch.Tensor, target: torch.Tensor) -> bool:
    """Neither promotes the target's dtype nor broadens its shape."""
    return (
        other.dtype == target.dtype
        and (other.dim() == 0 or other.shape == target.shape[target.dim() - other.dim() :])
        and (other.is_contiguous() and other.dim() <= target.dim())
    )


def _is_complex(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, complex) for value in (*args, *kwargs.values()))
