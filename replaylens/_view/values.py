"""What a value looks like: statistics, a histogram, feature maps and attention patterns.

In: a tensor. Out: plain data.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from .._ir.tolerances import SHARES
from .._ir.torch_private import pytree


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
    """The statistics of a tensor; None if it has no numbers. Complex numbers count by magnitude."""
    numbers = numbers_of(tensor)
    if numbers is None or not numbers.numel():
        return None
    numbers = numbers.reshape(-1)
    nans, infinities = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    finite = numbers[numbers.isfinite()] if nans or infinities else numbers
    if not finite.numel():
        nan = float("nan")
        return Statistics(numbers.numel(), nan, nan, nan, nan, 0.0, nans, infinities, ())
    least, greatest = float(finite.min()), float(finite.max())
    std, mean = (float(one) for one in torch.std_mean(finite, correction=0))
    return Statistics(
        count=numbers.numel(),
        mean=mean,
        std=std,
        least=least,
        greatest=greatest,
        zeros=float((numbers == 0).sum()) / numbers.numel(),
        nans=nans,
        infinities=infinities,
        histogram=_histogram(finite, least, greatest, bins),
    )


def _histogram(numbers: torch.Tensor, least: float, greatest: float, bins: int) -> tuple[int, ...]:
    if not greatest > least:
        return (numbers.numel(),)
    place = ((numbers - least) * (bins / (greatest - least))).to(torch.int64).clamp_(0, bins - 1)
    return tuple(torch.bincount(place, minlength=bins).tolist())


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
    numbers = numbers_of(tensor)
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
    if numbers.dim() < 3 or bool((numbers < 0).any()):
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
