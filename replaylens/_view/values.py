"""What a value looks like, and how much two values differ.

In: tensors. Out: plain data: statistics, a histogram, feature maps and attention patterns; a LayerChange.
"""

from __future__ import annotations

from math import isfinite, sqrt
from typing import Any

import torch
from attrs import frozen

from .._ir.equality import SHARES
from .._ir.memory import span
from .._ir.torch_private import pytree


@frozen
class LayerChange:
    """How much one layer's value differs from the recorded one.

    `change` is the norm of the difference relative to the norm of the recorded value; for integers and bools it is the
    fraction of elements that differ. `largest` is the largest difference of two elements, `share` the fraction of
    elements that differ. They are None if the values cannot be compared; `note` says why.
    """

    label: str
    change: float | None
    largest: float | None = None
    share: float | None = None
    note: str = ""

    @property
    def is_changed(self) -> bool:
        """True if the values differ or could not be compared."""
        return self.change is None or bool(self.share)


def change_between(label: str, old: list[torch.Tensor], new: list[torch.Tensor]) -> LayerChange:
    """Compare two values of one layer. Equal infinities, and NaN in the place of NaN, are no difference."""
    shapes = [tuple(tensor.shape) for tensor in old], [tuple(tensor.shape) for tensor in new]
    if shapes[0] != shapes[1]:
        return LayerChange(label, None, note=f"was {_words(shapes[0])}, is {_words(shapes[1])}")
    before, after = _numbers(old), _numbers(new)
    if before.shape != after.shape:
        return LayerChange(label, None, note="of two kinds of tensors that cannot be compared")
    differs = (before != after) & ~(before.isnan() & after.isnan())
    if not bool(differs.any()):
        return LayerChange(label, 0.0, 0.0, 0.0)
    distance, share = (after - before)[differs].abs(), float(differs.double().mean())
    if not any(one.is_floating_point() or one.is_complex() for one in old):
        return LayerChange(label, share, float(distance.max()), share)
    length, size = float(distance.norm()), float(before[before.isfinite()].norm())
    return LayerChange(label, length / size if size else float("inf"), float(distance.max()), share)


def _numbers(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors as one vector of doubles. A meta tensor has none."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *map(_doubles, tensors)])


def _doubles(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return torch.empty(0, dtype=torch.float64)
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.cpu().to(torch.float64).reshape(-1)


def _words(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "no tensor"


@frozen
class Statistics:
    """A tensor in a few numbers. The histogram has bins of equal width from the least to the greatest number."""

    count: int
    mean: float
    std: float
    least: float
    greatest: float
    zeros: float  # the fraction of zeros
    nans: int
    infinities: int
    histogram: tuple[int, ...]


@frozen(eq=False)
class Pictures:
    """The two-dimensional content of a tensor as a stack of grids."""

    title: str
    names: tuple[str, ...]
    grids: torch.Tensor  # (picture, row, column)
    is_pattern: bool = False  # an attention pattern: every row sums to one


def statistics(tensor: torch.Tensor, bins: int = 24) -> Statistics | None:
    """The statistics of a tensor; None if it has no numbers, or they lie in far less memory than they take elsewhere.
    Complex numbers count by magnitude.
    """
    numbers = numbers_of(tensor) if not _is_mostly_repeats(tensor) else None
    if numbers is None or not numbers.numel():
        return None
    finite, count, nans, infinities = numbers.reshape(-1), numbers.numel(), 0, 0
    least, greatest = (float(end) for end in torch.aminmax(finite))
    if not (isfinite(least) and isfinite(greatest)):
        nans, infinities = int(finite.isnan().sum()), int(finite.isinf().sum())
        finite = finite[finite.isfinite()]
        if not finite.numel():
            nan = float("nan")
            return Statistics(count, nan, nan, nan, nan, 0.0, nans, infinities, ())
        least, greatest = (float(end) for end in torch.aminmax(finite))
    exact = finite.double()  # in which torch's own `std_mean` computes, at twenty times the cost
    mean = float(exact.mean()) if greatest > least else least
    apart = exact - mean
    return Statistics(
        count=count,
        mean=mean,
        std=sqrt(float(apart.dot(apart)) / finite.numel()),
        least=least,
        greatest=greatest,
        zeros=(finite.numel() - int(finite.count_nonzero())) / count,
        nans=nans,
        infinities=infinities,
        histogram=_histogram(finite, least, greatest, bins),
    )


def _histogram(numbers: torch.Tensor, least: float, greatest: float, bins: int) -> tuple[int, ...]:
    if not greatest > least:
        return (numbers.numel(),)
    place = (numbers - least).mul_(bins / (greatest - least)).to(torch.int32).clamp_(0, bins - 1)
    return tuple(torch.bincount(place, minlength=bins).tolist())


def _is_mostly_repeats(tensor: torch.Tensor) -> bool:
    """True if a large tensor has the same few numbers over and over, as one that was expanded has."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() < _LARGE:
        return False
    return tensor.numel() > 64 * span(tensor)


_LARGE = 2**24


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as real floats, complex numbers by magnitude; None for tensors without plain content."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return None
    tensor = tensor.detach().cpu()
    tensor = tensor.abs() if tensor.is_complex() else tensor
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def pictures(tensor: torch.Tensor, most: int = 8, side: int | None = None) -> Pictures | None:
    """The feature maps or attention patterns of the first sample; None if the tensor has none.

    At most `most` are returned; larger ones are averaged down to `side` rows and columns.
    """
    numbers = numbers_of(tensor) if not _is_mostly_repeats(tensor) else None
    if numbers is None or not numbers.numel() or numbers.dim() < 3 or min(numbers.shape[-2:]) < 2:
        return None
    is_pattern = _is_pattern(numbers)
    if numbers.dim() != 4 and not is_pattern:
        return None
    first = (0,) * (numbers.dim() - 3)
    shown = numbers[first][:most].float()
    which = ", ".join([*map(str, first), "0" if len(shown) == 1 else f"0:{len(shown)}"])
    more = f" of {numbers.shape[-3]}" if numbers.shape[-3] > most else ""
    title = f"{'patterns, whose rows sum to 1' if is_pattern else 'maps'}: value[{which}]{more}"
    return Pictures(title, tuple(map(str, range(len(shown)))), _smaller(shown, side), is_pattern)


def _is_pattern(numbers: torch.Tensor) -> bool:
    """True if all rows sum to one and no element is negative."""
    if numbers.dim() < 3 or bool(numbers.amin() < 0):
        return False
    return bool(((numbers.sum(-1) - 1).abs() < SHARES.absolute).all())


def _smaller(stack: torch.Tensor, side: int | None) -> torch.Tensor:
    if side is None or max(stack.shape[-2:]) <= side:
        return stack
    rows, columns = (min(side, size) for size in stack.shape[-2:])
    return torch.nn.functional.adaptive_avg_pool2d(torch.nan_to_num(stack)[None], (rows, columns))[0]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in the value of a layer."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
