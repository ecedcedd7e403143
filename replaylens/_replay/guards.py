"""Has the counterfactual left the recorded path?

In: a guard, or a call whose output's shape depends on content, and its values in this replay. Out: nothing while they
agree with the record; else a Departure: what diverged, where in the user's source, the recorded and the new value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen

from .._core.node import Call, Guard, Source
from .._core.pure import same_content
from .._core.text import expression
from ..errors import DivergedReplay


@frozen(eq=False)
class Departure:
    """One place where the model would have gone another way."""

    what: str
    recorded: Any
    new: Any
    source: Source | None = None

    def __str__(self) -> str:
        where = (
            f"\n    {self.source.file.rsplit('/', 1)[-1]}:{self.source.line}    {self.source.text}"
            if self.source
            else ""
        )
        return f"{self.what} was {_short(self.recorded)} when recorded, and is {_short(self.new)} now.{where}"


def same_result(one: Any, other: Any) -> bool:
    """Equal to the last bit; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    return bool(repr(one) == repr(other)) if isinstance(one, (float, complex)) else bool(one == other)


def guard_departure(guard: Guard, result: Any) -> Departure | None:
    """For a guard whose result is plain: does the model read something else now?"""
    if same_result(guard.result, result):
        return None
    return Departure(f"`{_words(guard)}`", guard.result, result, guard.source)


def content_departure(guard: Guard, recorded: torch.Tensor, new: torch.Tensor) -> Departure | None:
    """For a guard on content that left torch as a whole."""
    if same_content(recorded, new):
        return None
    return Departure(
        f"the content that `{_words(guard)}` took out of torch", _brief(recorded), _brief(new), guard.source
    )


def shape_departure(call: Call, shape: tuple[int, ...], new: tuple[int, ...]) -> Departure:
    return Departure(f"the shape of {call.name}", shape, new, call.source)


def misdirected(call: Call, is_constant: bool) -> Iterator[Departure]:
    """Where a new value of a call leads away from the path: its memory, or gradients that the model takes through it.

    `is_constant`: the model takes a gradient through the call, and nothing of its old value is in the new one.
    """
    if call.is_overwritten:
        what = f"the memory of {call.name}, which the model writes later and reads again,"
        yield Departure(what, "shared with it", "apart from it, as that of a patch is", call.source)
    if call.is_differentiated or is_constant:
        what = f"the gradient that the model takes through {call.name}"
        yield Departure(what, "of the recorded value", "of a patch", call.source)


def diverged(departure: Departure, which: str = "") -> DivergedReplay:
    return DivergedReplay(
        f"{which}the change leads away from the recorded path: {departure}\n"
        'Run the model itself with this change, or pass on_divergence="ignore" to go on along the recorded path.'
    )


def _words(guard: Guard) -> str:
    inner = ", ".join(expression(arg) for arg in guard.args)
    return f"{guard.target.short.strip('_')}({inner})"


def _brief(tensor: torch.Tensor) -> str:
    return str(tensor.detach().flatten()[:4].tolist()) if tensor.numel() <= 4 else f"a tensor {tuple(tensor.shape)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else text[:77] + "..."
