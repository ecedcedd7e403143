"""A dependency test of all operands of one call at once, by marked numbers that come out of it.

In: a call with its recorded arguments, such as a `stack` of a thousand tensors. Out: those of which it is proved that
the value depends on them. To replace one at a time would take as many runs of a call as it has operands.

Every operand is filled with numbers that occur nowhere else. If one of them comes out, unchanged, the call has read it.
A sum might meet such a number by accident; so the call is run twice, on other numbers, and a proof is a place in the
value where both times a number of the same operand stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ir.node import Ref
from .dependency_test import Trial

_NUMBERS = 2**23  # between 1 and 2 there are so many float32
_STRIDES = (5_000_011, 6_700_417)  # odd: each turn takes the numbers in another order


def moved_operands(trial: Trial) -> frozenset[Ref]:
    """The arguments of which some number comes out where it came out before."""
    refs = [ref for ref, value in trial.given.items() if _can_be_marked(value)]
    sizes = [trial.given[ref].numel() for ref in refs]
    if not refs or sum(sizes) > _NUMBERS // 8:
        return frozenset()
    owners = torch.repeat_interleave(torch.tensor(sizes))
    try:
        first, second = [_origins(trial, refs, sizes, owners, stride) for stride in _STRIDES]
    except Exception:  # other numbers that the call refuses
        return frozenset()
    agreed = [one[one == other] for one, other in zip(first, second, strict=True) if one.shape == other.shape]
    return frozenset([refs[number] for part in agreed for number in part.unique().tolist() if number >= 0])


def _can_be_marked(value: Any) -> bool:
    is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_nested
    return is_plain and value.dtype in (torch.float32, torch.float64) and value.device.type == "cpu"


def _origins(trial: Trial, refs: list[Ref], sizes: list[int], owners: Tensor, stride: int) -> list[Tensor]:
    """For each number in the value of the call, the operand that it came from; -1 if it is none of theirs."""
    codes = torch.arange(1, len(owners) + 1) * stride % _NUMBERS
    parts = (1 + codes / _NUMBERS).split(sizes)
    marked = {
        ref: part.to(trial.given[ref].dtype).view(trial.given[ref].shape) for ref, part in zip(refs, parts, strict=True)
    }
    made = trial.runner({**trial.given, **marked}).values()
    ordered, order = codes.sort()
    found = []
    for value in made:
        if not _can_be_marked(value):
            continue
        number = (value.detach().reshape(-1).to(torch.float64) - 1) * _NUMBERS
        place = torch.searchsorted(ordered, number.nan_to_num(-1.0).clamp(-1, _NUMBERS).to(torch.int64))
        place = place.clamp(max=len(ordered) - 1)
        found.append(torch.where(ordered[place] == number, owners[order[place]], -1))
    return found
