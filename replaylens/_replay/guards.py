"""Has the counterfactual left the recorded path?

In: a guard, or a call whose output's shape depends on content, and its values in this replay. Out: nothing while they
agree with the record; else a Departure: what diverged, where in the user's source, the recorded and the new value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import frozen

from .._core.graph import Graph
from .._core.node import Call, Guard, Ref, Source
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


class LeftPath(Exception):
    """A replay found that it has left the recorded path, and somebody above can run the model instead."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(str(departure))
        self.departure = departure


def diverged(departure: Departure, which: str = "") -> DivergedReplay:
    return DivergedReplay(
        f"{which}the change leads away from the recorded path: {departure}\n"
        'on_divergence="rerun" runs the model itself with this change, where a program still holds its model; '
        '"ignore" goes on along the recorded path.'
    )


def departures(one: Graph, other: Graph, recorded: Value, new: Value) -> tuple[Departure, ...]:
    """Where another run of the model, with its own graph, read something else than the recorded run did: as far as the
    two paths are one.
    """
    found: list[Departure] = []
    pairs = zip(_asked(one), _asked(other), strict=False)
    for mine, theirs in pairs:
        if _place(mine) != _place(theirs):
            break
        found.extend(_departures_at(mine, theirs, recorded, new))
    return tuple(found)


Value = Callable[[Ref], torch.Tensor]


def _asked(graph: Graph) -> Iterator[Guard | Call]:
    """What decides on a path, in order: content that left torch, shapes that depend on content."""
    guards: dict[int, list[Guard]] = {}
    for guard in graph.guards:
        guards.setdefault(guard.position, []).append(guard)
    for position in range(len(graph) + 1):
        yield from guards.get(position, ())
        if position < len(graph) and isinstance(node := graph.nodes[position], Call) and node.is_dynamic:
            yield node


def _place(asked: Guard | Call) -> Any:
    return type(asked), asked.target.name, asked.source, str(asked.scope)


def _departures_at(mine: Any, theirs: Any, recorded: Value, new: Value) -> Iterator[Departure]:
    if isinstance(mine, Call):
        for one, other in zip(mine.meaning, theirs.meaning, strict=False):
            if one.shape != other.shape:
                yield shape_departure(mine, one.shape, other.shape)
    elif mine.has_result:
        if (departure := guard_departure(mine, theirs.result)) is not None:
            yield departure
    else:
        for one, other in zip(mine.refs, theirs.refs, strict=False):
            if (departure := content_departure(mine, recorded(one), new(other))) is not None:
                yield departure


def _words(guard: Guard) -> str:
    inner = ", ".join(expression(arg) for arg in guard.args)
    return f"{guard.target.short.strip('_')}({inner})"


def _brief(tensor: torch.Tensor) -> str:
    return str(tensor.detach().flatten()[:4].tolist()) if tensor.numel() <= 4 else f"a tensor {tuple(tensor.shape)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else text[:77] + "..."
