"""Does a kernel give another value each time?

In: a call that did not give its saved value. Out: how far its values lie apart when it is repeated, if they do and the
saved one lies among them; None where that is no excuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._core.node import Ref
from .._core.sameness import plain, same
from .alone import Alone, Given

_TIMES = 5
_MOST = 1e-3  # how far repetitions may lie apart, as a share of the largest number in them


def varies(alone: Alone, given: Given, saved: Mapping[Ref, torch.Tensor]) -> float | None:
    """The spread over repetitions, where every saved value lies within it."""
    repeated = [alone(given) for _ in range(_TIMES)]
    spreads = [_spread([made[ref] for made in repeated], value) for ref, value in saved.items()]
    return None if any(spread is None for spread in spreads) else max(s for s in spreads if s is not None)


def _spread(repeated: list[Any], saved: torch.Tensor) -> float | None:
    first = repeated[0]
    if not saved.is_floating_point() or saved.is_nested or first.shape != saved.shape or first.dtype != saved.dtype:
        return None
    if all(same(first, other) for other in repeated[1:]):
        return None
    values = torch.stack([plain(one).to(torch.float64) for one in repeated])
    low, high, wanted = values.amin(0), values.amax(0), plain(saved).to(torch.float64)
    spread = float((high - low).max())
    is_among = bool(((wanted >= low - spread) & (wanted <= high + spread)).all())
    return spread if is_among and spread <= _MOST * float(values.abs().max()) else None
