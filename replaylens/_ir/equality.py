"""Equality of values, to the last bit or within a tolerance. NaN equals NaN.

In: two tensors of any kind. Out: whether they are the same value, and if not, how far apart. Layout makes no
difference: what is compared is what can be read. Attributes that users set on tensors are compared as text.

What a replay promises and a check demands is equality to the last bit. Only where other kernels, or another order of
additions, compute mathematically equal results may last bits differ; all tolerances for that stand here, with their
reasons. The error of a sum scales with its largest summands, which may cancel: so a share of the largest number in the
tensor is allowed even for small numbers.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

import torch
from attrs import frozen

from .trees import fingerprint

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NOTES_OF_COMPILERS = ("_dynamo_", "_specialize_on", "_has_dynamo_dim_marking")
_FEW = 8  # along each axis of a tensor that is not small: what differs mostly does so there
_SMALL = 4096  # elements


def same(one: Any, other: Any, zeros: bool = False) -> bool:
    """True if dtype, shape and every bit agree; NaN equals NaN. With `zeros`, -0.0 equals 0.0 too."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or (type(one) is type(other) and repr(one) == repr(other))
    if one is other:
        return True
    if tensor_kind(one) != tensor_kind(other):
        return False
    if one.is_meta:
        return True
    if one.is_nested:
        pairs = list(zip(nested_parts(one), nested_parts(other), strict=False))
        return len(nested_parts(one)) == len(nested_parts(other)) and all(
            same(mine, theirs, zeros) for mine, theirs in pairs
        )
    mine, theirs = as_dense(one), as_dense(other)
    if mine.numel() > _SMALL:
        near = tuple([slice(0, _FEW) for _ in mine.shape])
        if not _agree(mine[near], theirs[near], zeros):
            return False
    return _agree(mine, theirs, zeros)


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


def tensor_kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What has to agree before numbers are compared."""
    shape = tensor.dim() if tensor.is_nested else tuple(tensor.shape)
    return shape, tensor.dtype, tensor.layout, tensor.device, tensor.is_nested


def nested_parts(nested: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(nested.detach().unbind())


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
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


def python_attributes(tensor: torch.Tensor) -> str | None:
    """What Python code has set on a tensor, as text that differs where it does. Tensors in it enter by content. What
    torch.compile notes there does not count.
    """
    own = [key for key in sorted(vars(tensor)) if not key.startswith(_NOTES_OF_COMPILERS)] if vars(tensor) else []
    return _shown({key: vars(tensor)[key] for key in own}) if own else None


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tensor_kind(value)} {digest_of_bits(value)}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_shown, value))})"
    if type(value) is dict:
        return f"dict({', '.join([f'{key!r}={_shown(item)}' for key, item in value.items()])})"
    return fingerprint(value)


def digest_of_bits(tensor: torch.Tensor) -> str:
    """A hash of every bit of a tensor."""
    if tensor.is_meta or tensor.is_nested:
        return "" if tensor.is_meta else " ".join(map(digest_of_bits, nested_parts(tensor)))
    numbers = as_dense(tensor).cpu().contiguous()
    return blake2b(numbers.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def difference(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """The largest absolute difference, if both are numbers of one shape."""
    if tensor_kind(one) != tensor_kind(other) or one.is_nested or one.is_meta or not one.numel():
        return None
    apart = (as_dense(one).to(torch.float64) - as_dense(other).to(torch.float64)).abs()
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


@frozen
class Tolerance:
    """How far numbers may be apart: a share of each, plus a share of the largest in their tensor, plus an amount."""

    of_each: float = 0.0
    of_largest: float = 0.0
    absolute: float = 0.0

    def holds(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """True if two tensors of one shape and dtype are this close. Shares are of the other; NaN equals NaN."""
        if torch.equal(one, other):
            return True
        amount = self.absolute + (self.of_largest * largest(other) if self.of_largest else 0.0)
        return torch.allclose(one, other, rtol=self.of_each, atol=amount, equal_nan=True)


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value in a tensor."""
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def is_close_number(one: float, other: float) -> bool:
    """True if a number that left torch is the same up to rounding. There is no tensor around it to scale by, so near
    zero a fixed amount is allowed.
    """
    return math.isclose(one, other, rel_tol=REARRANGED.of_largest, abs_tol=1e-6)


def unit_error(dtype: torch.dtype) -> float:
    """How far products of rows that are orthonormal in this dtype may be from one and zero."""
    return max(1e-4, 2 * torch.finfo(dtype).eps)


# One stretch of calls made twice on the same values. Kernels that add by atomics differ in the last bits.
REPEATED = Tolerance(of_each=1e-5, absolute=1e-7)

# A whole forward made twice: such differences have grown from layer to layer.
REPEATED_FORWARD = Tolerance(of_each=1e-3, absolute=1e-5)

# One thing computed by other operations: a fused kernel and its open form, additions in another order each time.
REARRANGED = Tolerance(of_largest=1e-3)
REARRANGED_NARROW = Tolerance(of_largest=0.05)  # where steps in between are rounded to 16 bits

# The same operation on another size of batch, as a proof that its rows are independent: one row mistaken for another
# is wrong by about as much as the numbers are large.
BATCHED = Tolerance(of_each=1e-4, of_largest=1e-4)
BATCHED_NARROW = Tolerance(of_each=2e-2, of_largest=2e-2)  # float16, bfloat16

# A cheap first test, which only saves proofs: what fails it is not tried, what passes is proved.
LIKELY = Tolerance(of_each=1e-3, absolute=1e-6)

# An amount, for outputs of layers that normalise: their numbers are about one.
FUSED_LAYER = Tolerance(absolute=1e-3)

# Rows of a picture that are taken for shares of one, also in bfloat16.
SHARES = Tolerance(absolute=1e-2)
