"""Further rounds of a loop: which layer is an operation that the recorded forward did not come to?

In: the record's Graph with the Spots of its calls, and what is meant for all passes of layers. Out: Rounds, which are
told each operation of a live run in order. A layer is known again by its line of code: where a line ran the same
operations in turn, round after round, the next one is the next in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field, frozen

from .._core.graph import Graph
from .._core.label import Label
from .._core.node import Call, Source
from ..errors import DivergedReplay
from .spots import Spot

Aim = Any  # what is meant for an operation; only handed on here


@frozen
class Line:
    """Operations of one kind that one line of code makes in one module."""

    address: str
    kind: str
    source: Source | None


@define(eq=False)
class Rounds:
    """What is meant for further rounds, by lines; what comes in turn there, or None where there is no order."""

    turns: dict[Line, tuple[Aim | None, ...] | None] = field(factory=dict)
    kinds: frozenset[str] = frozenset()
    seen: Counter[Any] = field(factory=Counter)

    def next(self, spot: Spot, source: Callable[[], Source | None], is_recorded: bool) -> Aim | None:
        """What is meant for the operation that follows, if it is one of a further round."""
        if spot.kind not in self.kinds:
            return None
        line = Line(spot.address, spot.kind, source())
        if line not in self.turns:
            return None
        number = self.seen[line, spot.call]
        self.seen[line, spot.call] += 1
        turn = self.turns[line]
        if turn is None and not is_recorded:
            raise DivergedReplay(
                f"the model goes on longer with this change, and {line.source} ran `{line.kind}` for several layers "
                "without an order that would tell which one comes next. Name the passes that are to be patched."
            )
        return None if turn is None else turn[number % len(turn)]


def rounds_of(graph: Graph, where: Mapping[int, Spot], meant: Mapping[int, Aim]) -> Rounds:
    """The Rounds of the patches for all passes of a layer, by the position of each pass."""
    looping = {p: aim for p, aim in meant.items() if p in where and Label.of(graph.nodes[p].name).turn}
    lines = {_line(graph, where, position) for position in looping}
    aims = {Label.of(graph.nodes[position].name).layer: aim for position, aim in looping.items()}
    ran: dict[Line, dict[int, list[str]]] = {}
    for position, spot in where.items() if lines else ():
        if (line := _line(graph, where, position)) in lines:
            ran.setdefault(line, {}).setdefault(spot.call, []).append(Label.of(graph.nodes[position].name).layer)
    turns = {line: _turn(list(calls.values())) for line, calls in ran.items()}
    found = {line: None if turn is None else tuple([aims.get(layer) for layer in turn]) for line, turn in turns.items()}
    return Rounds(found, frozenset(line.kind for line in lines))


def _turn(calls: list[list[str]]) -> list[str] | None:
    """The layers that come in turn in each call of a module; None if they come in no order."""
    longest: list[str] = max(calls, key=len)
    turn = list(dict.fromkeys(longest))
    in_order = all(layer == turn[number % len(turn)] for call in calls for number, layer in enumerate(call))
    return turn if in_order else None


def _line(graph: Graph, where: Mapping[int, Spot], position: int) -> Line:
    node = graph.nodes[position]
    assert isinstance(node, Call)
    return Line(where[position].address, node.kind, node.source)
