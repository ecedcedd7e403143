"""Whether two forwards of a model compute the same.

In: the Records of a forward and of a later one on the same inputs. Out: where the later one differs. Something it finds
on the model that the first made from numbers alone (position ids, a mask) is a cache, and the same. What was made from
inputs, parameters or draws is not: on other inputs the first would make another.
"""

from __future__ import annotations

from typing import Any

from ..._ir.equality import same_content
from ..._ir.graph import Graph
from ..._ir.node import Call, Const, Guard, Input, Node, Ref, State, refs_in
from ..._ir.trees import fingerprint, map_leaves
from ..._ir.util import cached_property
from ..._replay.record import Record


class ForwardComparison:
    """Compares two forwards backwards from their outputs."""

    def __init__(self, first: Record, later: Record) -> None:
        self.first, self.later = first, later

    def difference(self) -> str:
        one, two = self.first.graph, self.later.graph
        written = dict(one.changes), dict(two.changes)
        if written[0].keys() != written[1].keys():
            return "writes other tensors"
        if not self._leaves_same_state():
            return "leaves torch's generator in another state"
        ends = [(ref, written[1][address]) for address, ref in written[0].items()]
        if _skeleton(one.output) != _skeleton(two.output):
            return "returns another structure"
        return self._walked([*zip(refs_in(one.output), refs_in(two.output), strict=True), *ends])

    def difference_beside(self) -> str:
        """How what Python reads in them differs, and what they draw."""
        one, two = self.first.graph, self.later.graph
        if [*map(_question, one.guards)] != [*map(_question, two.guards)]:
            return "reads other contents in Python"
        draws = [[graph.nodes[p].draws for p in graph.drawing] for graph in (one, two)]
        if len(draws[0]) != len(draws[1]) or not all(map(self._is_same_state, *draws)):
            return "draws other random numbers"
        pairs = zip(one.guards, two.guards, strict=True)
        return self._walked([pair for before, after in pairs for pair in zip(before.refs, after.refs, strict=True)])

    def _walked(self, stack: list[tuple[Ref, Ref]]) -> str:
        """Where what leads to these values differs."""
        one, two = self.first.graph, self.later.graph
        seen: set[tuple[Ref, Ref]] = set()
        while stack:
            pair = stack.pop()
            if pair in seen or self._is_cached(*pair):
                continue
            seen.add(pair)
            before, after = one[pair[0].node], two[pair[1].node]
            if pair[0].path != pair[1].path or not self._is_alike(before, after):
                return f"computes something other than {before.name}"
            stack.extend(zip(before.refs, after.refs, strict=True))
        return ""

    def _is_alike(self, before: Node, after: Node) -> bool:
        if isinstance(before, Call) and isinstance(after, Call):
            return (
                before.target == after.target
                and before.context == after.context
                and self._draws_alike(before, after)
                and _skeleton((before.args, tuple(before.kwargs))) == _skeleton((after.args, tuple(after.kwargs)))
                and len(before.refs) == len(after.refs)
            )
        if isinstance(before, Input) and isinstance(after, Input):
            return before.path == after.path
        if isinstance(before, State) and isinstance(after, State):
            return (before.kind, before.address) == (after.kind, after.address)
        if isinstance(before, Const) and isinstance(after, Const):
            values = self.first.value(Ref(before.name)), self.later.value(Ref(after.name))
            if before.origin.startswith("older"):  # the same object, wherever it comes from
                return values[0] is values[1]
            return same_content(*values)
        return False

    def _draws_alike(self, before: Call, after: Call) -> bool:
        """True if seeded draws begin in the same state: the seed may be a number that the forward counts up."""
        if before.draws is None or after.draws is None or before.is_seeded != after.is_seeded:
            return before.draws is after.draws is None
        return not before.is_seeded or self._is_same_state(before.draws, after.draws)

    def _leaves_same_state(self) -> bool:
        """True if torch's generator is left in the same state where a seed determines it."""
        one, two = (
            graph.left.fixed if graph.left is not None else None for graph in (self.first.graph, self.later.graph)
        )
        return one is two is None if one is None or two is None else self._is_same_state(one, two)

    def _is_same_state(self, before: str, after: str) -> bool:
        return same_content(self.first.draws[before], self.later.draws[after])

    def _is_cached(self, before: Ref, after: Ref) -> bool:
        """True if the later forward finds what the first made from numbers alone."""
        found = self.later.graph[after.node]
        is_found = (isinstance(found, State) and found.kind != "parameter") or isinstance(found, Const)
        if not is_found or before.node not in self._constant_calls:
            return False
        return same_content(self.first.value(before), self.later.value(after))

    @cached_property
    def _constant_calls(self) -> frozenset[str]:
        """The nodes of the first forward that depend on no input, state, draw or older tensor."""
        found: set[str] = set()
        for node in self.first.graph.nodes:
            if isinstance(node, Call):
                own = node.draws is None and all(ref.node in found for ref in node.refs)
            else:
                own = isinstance(node, Const) and not node.origin.startswith("older")
            if own:
                found.add(node.name)
        return frozenset(found)


def _question(guard: Guard) -> Any:
    """What a guard asks, and the recorded answer, without the names of values."""
    args = _skeleton((guard.args, tuple([value for _, value in guard.kwargs])))
    return guard.target.name, guard.kind, args, len(guard.refs), type(guard.result), repr(guard.result)


def _skeleton(tree: Any) -> Any:
    """A tree without the names of its Refs; graphs in it are not compared, arrays are by content."""
    return map_leaves(tree, _skeleton_leaf)


def _skeleton_leaf(leaf: Any) -> Any:
    if type(leaf) is Ref:
        return _ANY_REF
    if type(leaf) is Graph:
        return _ANY_GRAPH
    return fingerprint(leaf) if type(leaf).__module__ == "numpy" else leaf


_ANY_REF, _ANY_GRAPH = Ref("here"), "a stretch"
