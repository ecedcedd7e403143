"""The topology of a program: parents and children of layers, distances, recurrence and branching.

In: a LayerIndex, a Graph. Out: a Topology, by ordinal. Layers are in execution order, so one or two passes over them
make each table. Sets of ancestors are bit sets, one integer per layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from .._ir.graph import Graph
from .._ir.label import Label
from .._ir.node import Call, Const, Input
from .._ir.util import cached_property
from .index import LayerIndex

Span = tuple[int, int] | None  # least and most steps; None if there is no path


@frozen(eq=False)
class Topology:
    """Parents and children of each layer, and what follows from them."""

    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]
    is_input: tuple[bool, ...]
    is_output: tuple[bool, ...]
    is_born: tuple[bool, ...]  # created inside the model, from no other layer

    @cached_property
    def from_input(self) -> tuple[Span, ...]:
        """The lengths of the shortest and the longest path from an input."""
        return _spans(range(len(self.parents)), self.parents, self.is_input)

    @cached_property
    def to_output(self) -> tuple[Span, ...]:
        """The lengths of the shortest and the longest path to an output."""
        return _spans(range(len(self.children) - 1, -1, -1), self.children, self.is_output)

    @cached_property
    def _roots(self) -> tuple[int, ...]:
        return tuple([number for number, parents in enumerate(self.parents) if not parents])

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple([number for number, is_end in enumerate(self.is_output) if is_end])

    @cached_property
    def _root_bits(self) -> tuple[int, ...]:
        return _bits(range(len(self.parents)), self.parents, self._roots)

    @cached_property
    def _end_bits(self) -> tuple[int, ...]:
        return _bits(range(len(self.children) - 1, -1, -1), self.children, self._ends)

    def roots_of(self, number: int) -> tuple[int, ...]:
        """The layers without parents that it derives from; itself, if it has none."""
        return tuple([root for bit, root in enumerate(self._roots) if self._root_bits[number] >> bit & 1])

    def ends_of(self, number: int) -> tuple[int, ...]:
        """The output layers that it leads to."""
        return tuple([end for bit, end in enumerate(self._ends) if self._end_bits[number] >> bit & 1])

    def siblings(self, number: int) -> tuple[int, ...]:
        """The layers that share a parent with it."""
        return _others(number, self.parents, self.children)

    def spouses(self, number: int) -> tuple[int, ...]:
        """The layers that share a child with it."""
        return _others(number, self.children, self.parents)


def topology_of(index: LayerIndex) -> Topology:
    """The topology of a program."""
    places = index.places
    ordinals = index.ordinals
    parents = [tuple([ordinals[label] for label in index.parents(place) if label in ordinals]) for place in places]
    children: list[list[int]] = [[] for _ in places]
    for number, above in enumerate(parents):
        for parent in above:
            children[parent].append(number)
    nodes = [index.graph[place.node] if place.output is None else None for place in places]
    return Topology(
        tuple(parents),
        tuple(map(tuple, children)),
        tuple([isinstance(node, Input) for node in nodes]),
        tuple([node is None for node in nodes]),
        tuple([_is_born(node) and not above for node, above in zip(nodes, parents, strict=True)]),
    )


def _is_born(node: object) -> bool:
    return isinstance(node, Call) or (isinstance(node, Const) and node.origin.startswith("made from"))


def _spans(order: range, before: Sequence[tuple[int, ...]], is_start: Sequence[bool]) -> tuple[Span, ...]:
    found: list[Span] = [None] * len(before)
    for number in order:
        known = [span for other in before[number] if (span := found[other]) is not None]
        if is_start[number]:
            found[number] = (0, 0)
        elif known:
            found[number] = min([least for least, _ in known]) + 1, max([most for _, most in known]) + 1
    return tuple(found)


def _bits(order: range, before: Sequence[tuple[int, ...]], marked: Sequence[int]) -> tuple[int, ...]:
    found = [0] * len(before)
    for bit, number in enumerate(marked):
        found[number] = 1 << bit
    for number in order:
        for other in before[number]:
            found[number] |= found[other]
    return tuple(found)


def _others(number: int, there: Sequence[tuple[int, ...]], back: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    found = {other for one in there[number] for other in back[one] if other != number}
    return tuple(sorted(found))


def passes(graph: Graph) -> dict[str, int]:
    """The number of passes of each layer, by its label without the pass."""
    names = [Label.of(call.name).layer for call in graph.calls if call.name not in graph.orphans]
    return dict(Counter(names))


def max_recurrent_loops(graph: Graph) -> int:
    """The largest number of passes of any layer; 1 in a feedforward network."""
    return max(passes(graph).values(), default=1)


def is_recurrent(graph: Graph) -> bool:
    """True if any layer runs more than once."""
    return max_recurrent_loops(graph) > 1


def is_branching(graph: Graph) -> bool:
    """True if any call or input is read by more than one layer, outputs included."""
    ends = Counter(ref.node for ref in dict.fromkeys(graph.output_refs))
    return any(
        len([user for user in users if graph.nodes[user].name not in graph.orphans]) + ends[node.name] > 1
        for node, users in zip(graph.nodes, graph.users, strict=True)
        if isinstance(node, (Call, Input)) and node.name not in graph.orphans
    )
