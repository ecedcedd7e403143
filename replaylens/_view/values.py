"""What a value looks like: a few numbers, a histogram, small pictures of what is two-dimensional in it.

In: a tensor. Out: plain data. What it is the value of is not known here, nor how pictures are painted.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from .._ir.tolerances import SHARES
from .._ir.torch_private import pytree


@frozen
class Statistics:
    """A tensor in a few numbers. The bins of the histogram are of one width, from the least to the greatest number."""

    count: int
    mean: float
    std: float
    least: float
    greatest: float
    zeros: float  # the share of numbers that are zero
    nans: int
    infinities: int
    histogram: tuple[int, ...]


@frozen(eq=False)
class Pictures:
    """What is two-dimensional in a tensor, as a stack of grids of numbers."""

    title: str
    names: tuple[str, ...]
    grids: torch.Tensor  # (picture, row, column)
    is_pattern: bool = False  # every row sums to one: what attends to what


def statistics(tensor: torch.Tensor, bins: int = 24) -> Statistics | None:
    """The tensor in a few numbers; None where it holds none. Of complex numbers it is their size."""
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
    """The tensor as real numbers that can be counted with; None where it is of no such kind."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return None
    tensor = tensor.detach().cpu()
    tensor = tensor.abs() if tensor.is_complex() else tensor
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def pictures(tensor: torch.Tensor, most: int = 8, side: int | None = None) -> Pictures | None:
    """Its feature maps or patterns of attention, those of the first sample; None where it has none.

    More than `most` are left out; what has more rows or columns than `side` is averaged down to it.
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
    """Do all rows sum to one, with no number below zero?"""
    if numbers.dim() < 3 or bool((numbers < 0).any()):
        return False
    return bool(((numbers.sum(-1) - 1).abs() < SHARES.absolute).all())


def _smaller(stack: torch.Tensor, side: int | None) -> torch.Tensor:
    if side is None or max(stack.shape[-2:]) <= side:
        return stack
    rows, columns = (min(side, size) for size in stack.shape[-2:])
    return torch.nn.functional.adaptive_avg_pool2d(torch.nan_to_num(stack)[None], (rows, columns))[0]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a layer's value: one, or several in a structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
