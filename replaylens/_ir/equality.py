"""Bitwise equality of values, where NaN equals NaN.

In: two tensors of any kind. Out: whether they are the same value, and if not, how far apart. Layout makes no
difference: what is compared is what can be read. Attributes that users set on tensors are compared as text.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

from .trees import fingerprint

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_FEW = 8  # along each axis: what differs mostly does so there


def same(one: Any, other: Any, zeros: bool = False) -> bool:
    """True if dtype, shape and every bit agree; NaN equals NaN. With `zeros`, -0.0 equals 0.0 too."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or (type(one) is type(other) and repr(one) == repr(other))
    if one is other:
        return True
    if kind_of(one) != kind_of(other):
        return False
    if one.is_meta:
        return True
    if one.is_nested:
        pairs = list(zip(parts_of(one), parts_of(other), strict=False))
        return len(parts_of(one)) == len(parts_of(other)) and all(same(mine, theirs, zeros) for mine, theirs in pairs)
    mine, theirs = plain(one), plain(other)
    near = tuple([slice(0, _FEW) for _ in mine.shape])
    return _agree(mine[near], theirs[near], zeros) and _agree(mine, theirs, zeros)


def same_content(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if every number agrees, where NaN equals NaN and 0.0 equals -0.0. Also works for tensors under a capture."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.is_meta:
        return other.is_meta
    one, other = one.detach(), other.detach()
    if one.layout is not torch.strided or one.is_quantized:
        one, other = (one.dequantize(), other.dequantize()) if one.is_quantized else (one.to_dense(), other.to_dense())
    return bool(((one == other) | ((one != one) & (other != other))).all())


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What has to agree before numbers are compared."""
    shape = tensor.dim() if tensor.is_nested else tuple(tensor.shape)
    return shape, tensor.dtype, tensor.layout, tensor.device, tensor.is_nested


def parts_of(nested: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(nested.detach().unbind())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any kind as a dense one of plain numbers."""
    tensor = tensor.detach()
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        return tensor.dequantize()  # not its integers: they mean other numbers on another scale
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def attached(tensor: torch.Tensor) -> str | None:
    """What Python code has set on a tensor, as text that differs where it does. Tensors in it enter by content."""
    own = vars(tensor)
    return _shown({key: own[key] for key in sorted(own)}) if own else None


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{kind_of(value)} {_digest(value)}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_shown, value))})"
    if type(value) is dict:
        return f"dict({', '.join([f'{key!r}={_shown(item)}' for key, item in value.items()])})"
    return fingerprint(value)


def _digest(tensor: torch.Tensor) -> str:
    """A hash of every bit of a tensor."""
    if tensor.is_meta or tensor.is_nested:
        return "" if tensor.is_meta else " ".join(map(_digest, parts_of(tensor)))
    numbers = plain(tensor).cpu().contiguous()
    return blake2b(numbers.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def difference(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """The largest absolute difference, if both are numbers of one shape."""
    if kind_of(one) != kind_of(other) or one.is_nested or one.is_meta or not one.numel():
        return None
    apart = (plain(one).to(torch.float64) - plain(other).to(torch.float64)).abs()
    return float(torch.nan_to_num(apart, nan=float("inf")).max())


def _agree(one: torch.Tensor, other: torch.Tensor, zeros: bool) -> bool:
    """True if all bits agree, or both are NaN."""
    word = one.dtype if one.dtype == torch.bool else _WORDS[one.element_size()]
    if torch.equal(one.view(word), other.view(word)):
        return True
    if not one.is_floating_point():
        return False
    wide = torch.promote_types(one.dtype, torch.float32) if one.element_size() > 1 else torch.float32
    mine, theirs = one.to(wide), other.to(wide)
    equal = mine == theirs if zeros else one.view(word) == other.view(word)
    return bool((equal | (torch.isnan(mine) & torch.isnan(theirs))).all())
