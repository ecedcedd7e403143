"""Which calls are passes of one layer.

In: the Wires of a program. Out: for each node, the first one that is the same layer. The three rules are those of the
paper: calls of one function on the same parameters are passes of one layer; so are, around these, calls that are alike
and joined to them alike, and on from there; and so are the calls of a stretch of calls without parameters that follows
itself directly (XYZXYZXYZ, but not XYZAXYZBXYZ), with what is joined to them alike.

Two calls are alike as drafts.py has it. Time grows with the number of nodes, times its logarithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .loops import loops
from .wires import Wires


def same_layers(wires: Wires) -> list[int]:
    """For each position the first one that is the same layer; itself, where a layer runs once."""
    groups = Groups(wires)
    for one, other in (*_on_the_same_parameters(wires), *loops(wires)):
        groups.join(one, other)
    first: dict[int, int] = {}
    return [first.setdefault(groups.find(position), position) for position in range(len(wires.drafts))]


def _on_the_same_parameters(wires: Wires) -> Iterator[tuple[int, int]]:
    first: dict[Any, int] = {}
    for position, (draft, own) in enumerate(zip(wires.drafts, wires.parameters, strict=True)):
        if own and wires.is_call[position]:
            before = first.setdefault((draft.function, draft.kind, own), position)
            if before != position:
                yield before, position


class Groups:
    """Calls that are one layer. Where two are, what is joined to them alike and is alike is one layer too."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._root = list(range(len(wires.drafts)))
        self._around: dict[int, dict[Any, int]] = {}  # of a group: a neighbour for each way to be joined to it

    def find(self, position: int) -> int:
        root = self._root
        while root[position] != position:
            root[position] = position = root[root[position]]
        return position

    def join(self, one: int, other: int) -> None:
        """Make two calls one layer, and all that follows from it. The smaller group moves, so that few calls do."""
        pending = [(one, other)]
        while pending:
            large, small = map(self.find, pending.pop())
            if large == small:
                continue
            around, more = self._neighbours(large), self._neighbours(small)
            if len(around) < len(more):
                large, small, around, more = small, large, more, around
            self._root[small] = large
            for joined, neighbour in more.items():
                other = around.setdefault(joined, neighbour)
                if other != neighbour:
                    pending.append((other, neighbour))
            self._around[large] = around

    def _neighbours(self, group: int) -> dict[Any, int]:
        known = self._around.pop(group, None)
        return self._wires.neighbours(group) if known is None else known
