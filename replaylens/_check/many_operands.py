"""A dependency test of all operands of one call at once, by marked numbers that come out of it.

In: a call with its recorded arguments, such as a `stack` of a thousand tensors. Out: those of which it is proved that
the value depends on them. To replace one at a time would take as many runs of a call as it has operands.

Every operand is filled with random numbers that occur nowhere else. If one of them comes out unchanged, the call has
read it. Arithmetic may meet such a number by accident, so the call is run on several fillings: a proof is a place in
its value where the number of one and the same element stands in all of them. Even with a million elements and as many
places, this happens by accident less than once in a billion calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ir.node import Ref
from .dependency_test import Trial

_NUMBERS = 2**23  # between 1 and 2 there are so many float32
_MOST = 2**20  # elements of all operands
_FILLINGS = 3


def moved_operands(trial: Trial) -> frozenset[Ref]:
    """The arguments of which some number comes out of the call as it is."""
    refs = [ref for ref, value in trial.given.items() if _can_be_marked(value)]
    sizes = [trial.given[ref].numel() for ref in refs]
    if not 0 < sum(sizes) <= _MOST:
        return frozenset()
    generator = torch.Generator().manual_seed(0)
    try:
        fillings = [_sources(trial, refs, sizes, _codes(sum(sizes), generator)) for _ in range(_FILLINGS)]
    except Exception:  # other numbers that the call refuses
        return frozenset()
    owners, found = torch.repeat_interleave(torch.tensor(sizes, device="cpu")), set()
    for first, *others in zip(*fillings, strict=True):
        if all(first.shape == other.shape for other in others):
            steady = torch.stack([first >= 0, *[first == other for other in others]]).all(0)
            found.update(owners[first[steady]].unique().tolist())
    return frozenset([refs[owner] for owner in found])


def _can_be_marked(value: Any) -> bool:
    is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_nested
    return is_plain and value.dtype in (torch.float32, torch.float64) and value.device.type == "cpu"


def _codes(count: int, generator: torch.Generator) -> Tensor:
    """Random whole numbers below `_NUMBERS`, no two of them equal."""
    step = _NUMBERS // count
    order = torch.randperm(count, generator=generator, device="cpu")
    return order * step + torch.randint(step, (count,), generator=generator, device="cpu")


def _sources(trial: Trial, refs: list[Ref], sizes: list[int], codes: Tensor) -> list[Tensor]:
    """For each number in the value of the call, the number of the element that it came from; -1 if from none."""
    parts = zip(refs, (1 + codes.to(torch.float64) / _NUMBERS).split(sizes), strict=True)
    marked = {ref: part.to(trial.given[ref].dtype).view(trial.given[ref].shape) for ref, part in parts}
    made = [value.detach() for value in trial.runner({**trial.given, **marked}).values() if _can_be_marked(value)]
    ordered, order = codes.sort()
    found = []
    for value in made:
        number = (value.reshape(-1).to(torch.float64) - 1) * _NUMBERS
        near = torch.searchsorted(ordered, number.nan_to_num(-1.0).clamp(-1, _NUMBERS).to(torch.int64))
        near = near.clamp(max=len(ordered) - 1)
        found.append(torch.where(ordered[near] == number, order[near], -1))
    return found
