"""Do two runs of a program go the same way, although values differ in their last bits?

In: the Records of a program and of one made from it that must compute the same, such as one with a fused operation
opened. Out: where the second has left the path of the first. Numbers that left torch may differ as rounding lets them;
everything that decides a way (booleans, integers, strings, shapes) is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._core.node import Guard
from .._core.tolerances import REARRANGED, is_close_number
from .guards import Departure, changed, changed_content, place, same_result
from .record import Record


def departures_beyond_rounding(old: Record, new: Record) -> Iterator[Departure]:
    """Guards of the old program that are answered otherwise in the new one."""
    left = list(old.graph.guards)
    for guard in new.graph.guards:
        if left and place(left[0]) == place(guard):
            yield from _beyond(left.pop(0), guard, old, new)


def _beyond(was: Guard, guard: Guard, old: Record, new: Record) -> Iterator[Departure]:
    if not was.compares_content:
        if not _is_close(was.result, guard.result):
            yield from filter(None, (changed(was, guard.result),))
        return
    pairs = [(old.value(one), new.value(other)) for one, other in zip(was.refs, guard.refs, strict=False)]
    yield from filter(None, (changed_content(was, *pair) for pair in pairs if not _is_close(*pair)))


def _is_close(one: Any, other: Any) -> bool:
    """Equal; or floating numbers that are so up to rounding."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not one.is_floating_point() or one.shape != other.shape:
            return one.shape == other.shape and bool((one == other).all())
        return REARRANGED.holds(other.detach(), one.detach())
    if isinstance(one, float) and isinstance(other, float):
        return same_result(one, other) or is_close_number(one, other)
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return all(map(_is_close, one, other))
    return same_result(one, other)
