"""Perturbed values: tensors of the same kind, shape and range as a given one, with other content.

In: a tensor. Out: replacements, those most likely to be noticed first. Random content repeats a small pool of numbers,
because fresh random numbers for the weights of a large model cost more than its forward pass; a large tensor is first
replaced by a view that costs nothing: of nonsense that all tensors of a check share, or, where that is too short, of
its own numbers in another order. The global generators are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import isfinite, prod
from typing import Any
from weakref import WeakValueDictionary

import torch

from .._ir.torch_private import quantized_per_channel, quantized_per_tensor

_LARGE = 2**18  # elements from which on a view is tried first
_MOST_SHARED = 2**22  # elements of shared nonsense
_POOL = 65521  # a prime, so that the repeated pool does not align with the rows of a tensor
_RANGE_SAMPLE = 4096  # elements that the range of a large tensor is estimated from


def perturbed(value: torch.Tensor, wide: bool = True) -> Iterator[torch.Tensor]:
    """Replacements for a value. `wide` allows integers just outside of its range."""
    for made in _unflagged(value, wide):
        yield _with_flag(made, value)


def hinted_values(value: torch.Tensor, hints: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Replacements that a comparison may react to: constants and other arguments of the call."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not is_plain or value.is_nested or value.is_quantized or not value.numel():
        return
    for hint in hints:
        if isinstance(hint, torch.Tensor):
            if hint.dtype == value.dtype and hint.shape == value.shape and hint.layout is torch.strided:
                yield _with_flag(hint.detach().clone(), value)
        elif _holds(value.dtype, hint):
            yield _with_flag(torch.full_like(value.detach(), hint), value)


def _unflagged(value: torch.Tensor, wide: bool) -> Iterator[torch.Tensor]:
    flat = value.detach()
    if type(flat) not in (torch.Tensor, torch.nn.Parameter):
        yield from _of_a_subclass(flat)
    elif flat.is_nested:
        yield from _nested(flat, wide)
    elif flat.layout is not torch.strided:
        yield from _of_another_layout(flat, wide)
    elif flat.is_quantized:
        yield from _quantized(flat)
    elif flat.numel():
        yield from _dense(flat.resolve_conj().resolve_neg(), wide)


def _dense(value: torch.Tensor, wide: bool) -> Iterator[torch.Tensor]:
    if value.numel() >= _LARGE:
        yield from _views(value)
    if value.dtype == torch.bool:
        yield from (_bools(value, 0), ~value, _rolled(value), torch.ones_like(value), torch.zeros_like(value))
        yield _one_flipped(value)  # for calls that accept no more trues than there are elements for them
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        yield from _numbers(value)
    else:
        yield from _integers(value, wide)


_nonsense: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()


def shared_nonsense(values: Iterable[Any]) -> torch.Tensor | None:
    """Nonsense for all large tensors among these values, as far as it goes. It is shared as long as it is held."""
    size = max([value.numel() for value in values if _can_share(value)], default=0)
    if not size:
        return None
    with torch.inference_mode(False), torch.no_grad():
        made = _repeated(_pool(0), torch.empty(size, device="cpu"), torch.float32)
    _nonsense["cpu"] = made
    return made


def _can_share(value: Any) -> bool:
    """True for large tensors that kernels would copy if they were reordered; matrix products read any order."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_nested:
        return False
    is_float = value.dtype == torch.float32 and value.device.type == "cpu"
    return is_float and value.dim() > 2 and _LARGE <= value.numel() <= _MOST_SHARED


def _views(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Other content for a large tensor in no memory of its own."""
    shared = _nonsense.get("cpu") if _can_share(value) and _is_dense(value) else None
    if shared is not None and value.numel() <= shared.numel():
        yield shared.as_strided(value.shape, value.stride())
    elif (reordered := _reordered(value)) is not None:
        yield reordered


def _numbers(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Floats and complex numbers: within the range, far around it, negated; then milder ones for narrow domains."""
    low, high = _range(value)
    span = (high - low) or abs(high) or 1.0
    yield _uniform(value, low, low + span, 1)
    yield _uniform(value, low - 4 * span - 1, high + 4 * span + 1, 2)
    number = value.to(compute_dtype(value.dtype))
    yield (number * -1.5 - span).to(value.dtype)
    yield (number * 2).to(value.dtype)
    yield (number + _uniform(number, 0.0, 0.01 * span, 3)).to(value.dtype)
    yield _uniform(value, high + 1, high + 2 + 10 * span, 4)


def _integers(value: torch.Tensor, wide: bool) -> Iterator[torch.Tensor]:
    """Integers within the range and at its ends. 64-bit unsigned integers are treated as signed ones."""
    low, high = (int(end) for end in _range(value))
    number = value.to(torch.int64)
    yield _whole(value, low, high, 1)
    yield (low - number + high).to(value.dtype)  # low + high first could overflow
    yield _rolled(value)
    yield from (torch.full_like(number, end).to(value.dtype) for end in dict.fromkeys((low, high)))
    if wide:
        most = min(high + 1, torch.iinfo(value.dtype).max, torch.iinfo(torch.int64).max)
        yield _whole(value, low, most, 2)
        yield from (torch.full_like(number, end).to(value.dtype) for end in (0, most))


def _one_flipped(value: torch.Tensor) -> torch.Tensor:
    """The same values with the first one flipped."""
    flat = value.reshape(-1).clone()
    flat[0] = ~flat[0]
    return flat.view(value.shape)


def _rolled(value: torch.Tensor) -> torch.Tensor:
    """The same values, each moved by one position."""
    return value.reshape(-1).roll(1).view(value.shape)


def non_finite(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """NaN and infinities, for calls that test for them."""
    if value.dtype.is_floating_point and value.layout is torch.strided and value.numel():
        for number in (float("nan"), float("inf"), float("-inf")):
            yield _with_flag(torch.full_like(value, number), value)


def _holds(dtype: torch.dtype, number: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).min <= number <= torch.finfo(dtype).max  # some narrow floats have no negatives
    if not float(number).is_integer():
        return False
    return dtype == torch.bool or torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _of_a_subclass(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Replacements for a tensor subclass, of which only arithmetic is assumed."""
    makers: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda one: next(_unflagged(one.as_subclass(torch.Tensor), True)).as_subclass(type(one)),
        lambda one: one * -1.5 - 1,
        lambda one: one * 2,
    )
    yield from _that_can_be_made(value, makers)


def _nested(value: torch.Tensor, wide: bool) -> Iterator[torch.Tensor]:
    if value.layout is torch.jagged:
        for numbers in _unflagged(value.values(), wide):
            yield torch.nested.nested_tensor_from_jagged(numbers, value.offsets())  # type: ignore[attr-defined]
        return
    for made in zip(*[_unflagged(part, wide) for part in value.unbind()], strict=False):
        yield torch.nested.as_nested_tensor(list(made))


def _of_another_layout(value: torch.Tensor, wide: bool) -> Iterator[torch.Tensor]:
    """Replacements for sparse and mkldnn tensors: other values at the same indices, then other indices too."""
    shape = tuple(value.shape)
    if value.layout is torch.sparse_coo:
        for made in _unflagged(value._values(), wide):
            yield torch.sparse_coo_tensor(value._indices(), made, shape, is_coalesced=value.is_coalesced())
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        for made in _unflagged(value.values(), wide):
            yield torch.sparse_compressed_tensor(
                value.crow_indices(), value.col_indices(), made, shape, layout=value.layout
            )
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        for made in _unflagged(value.values(), wide):
            yield torch.sparse_compressed_tensor(
                value.ccol_indices(), value.row_indices(), made, shape, layout=value.layout
            )
    else:
        yield from _that_can_be_made(value, (lambda one: (one.to_dense() * -1.5 - 1).to_mkldnn(),))
        return
    yield from _that_can_be_made(value, (_in_other_places,))


def _in_other_places(value: torch.Tensor) -> torch.Tensor:
    """A sparse tensor rolled by one row."""
    block = tuple(value.values().shape[-2:]) if value.layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    dense = value.to_dense().roll(1, 0)
    if value.layout is torch.sparse_coo:
        return dense.to_sparse(value.sparse_dim())
    return dense.to_sparse(layout=value.layout, blocksize=block)


def _quantized(value: torch.Tensor) -> Iterator[torch.Tensor]:
    codes = value.int_repr()
    for made in _unflagged(codes, False):
        if value.qscheme() == torch.per_tensor_affine:
            yield quantized_per_tensor(made, value.q_scale(), value.q_zero_point())
        elif value.qscheme() == torch.per_channel_affine:
            scales = value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis()
            yield quantized_per_channel(made, *scales)


def _that_can_be_made(value: torch.Tensor, makers: Iterable[Callable[[torch.Tensor], Any]]) -> Iterator[torch.Tensor]:
    for make in makers:
        try:
            made = make(value)
        except Exception:
            continue
        if isinstance(made, torch.Tensor) and made.shape == value.shape and made.dtype == value.dtype:
            yield made


def _with_flag(made: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The replacement with the `requires_grad` of the original, by which torch chooses kernels."""
    made = made.detach()
    if value.requires_grad and not value.is_inference() and not made.is_inference():
        made.requires_grad_()
    return made


def _reordered(value: torch.Tensor) -> torch.Tensor | None:
    """A view of a large tensor that has its values in another order."""
    sizes = tuple(value.shape)
    if not value.is_contiguous() or value.dim() < 2 or sorted(sizes)[-2] < 2:
        return None
    strides = tuple([prod(sizes[:axis]) for axis in range(len(sizes))])
    made = value.as_strided(sizes, strides)
    near = tuple([slice(0, 8) for _ in sizes])
    return None if torch.equal(made[near], value[near]) else made


def _range(value: torch.Tensor) -> tuple[float, float]:
    """The least and the greatest finite element; of large tensors an estimate from a sample."""
    flat = value.detach()
    if 0 in flat.stride():
        flat = flat[tuple([slice(0, 1) if step == 0 else slice(None) for step in flat.stride()])]
    most = _RANGE_SAMPLE if value.dtype.is_floating_point or value.dtype.is_complex else 2**22
    if flat.numel() > most and flat.is_contiguous():
        flat = flat.view(-1)[:: flat.numel() // most]
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    if not flat.is_floating_point():
        flat = flat.to(torch.int64)
    elif flat.dtype not in (torch.float32, torch.float64):
        flat = flat.to(torch.float64)
    ends = _ends(flat)
    if not all(map(isfinite, ends)):
        flat = flat[flat.isfinite()]
        ends = _ends(flat) if flat.numel() else (-1.0, 1.0)
    return ends


def _ends(numbers: torch.Tensor) -> tuple[float, float]:
    low, high = numbers.aminmax()
    return low.item(), high.item()


def _uniform(value: torch.Tensor, low: float, high: float, turn: int) -> torch.Tensor:
    """Uniform numbers between two bounds, in the memory layout of the value."""
    if value.is_complex():
        real = torch.view_as_real(value)
        return torch.view_as_complex(_uniform(real, low, high, turn).contiguous())
    dtype = compute_dtype(value.dtype)
    limit = torch.finfo(value.dtype).max
    low, high = max(low, -limit), min(high, limit)
    numbers = _some(value, turn).to(dtype) * (high - low) + low
    return _repeated(numbers, value, dtype).to(value.dtype)


def _whole(value: torch.Tensor, low: int, high: int, turn: int) -> torch.Tensor:
    steps = _some(value, turn).to(torch.float64) * float(high - low + 1)
    numbers = steps.floor().to(torch.int64).add_(low).clamp_(low, high)
    return _repeated(numbers, value, torch.int64).to(value.dtype)


def _bools(value: torch.Tensor, turn: int) -> torch.Tensor:
    return _repeated(_some(value, turn) < 0.5, value, torch.bool)


def _repeated(numbers: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers repeated to the size of the value, with its strides if it is dense."""
    count = value.numel()
    flat = torch.empty(count, dtype=dtype, device=value.device)
    numbers = numbers.to(device=value.device)
    whole = count // _POOL * _POOL
    if whole:
        flat[:whole].view(-1, _POOL).copy_(numbers)
    flat[whole:].copy_(numbers[: count - whole])
    return flat.as_strided(value.shape, value.stride()) if _is_dense(value) else flat.view(value.shape)


def _is_dense(value: torch.Tensor) -> bool:
    """True if its elements fill its memory without gaps or overlaps."""
    steps = sorted([(step, size) for step, size in zip(value.stride(), value.shape, strict=True) if size > 1])
    expected = 1
    for step, size in steps:
        if step != expected:
            return False
        expected *= size
    return True


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype to compute in: narrow floats support no arithmetic."""
    if dtype.is_complex:
        return torch.complex64 if dtype is torch.complex32 else dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def _some(value: torch.Tensor, turn: int) -> torch.Tensor:
    return _pool(turn)[: value.numel()]


@cache
def _pool(turn: int) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(turn)
        return torch.rand(_POOL, generator=generator, dtype=torch.float32, device="cpu")
