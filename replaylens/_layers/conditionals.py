"""Where the model read a truth value to choose its way, and what it computed for that alone.

In: a Graph. Out: Conditionals, whose records say which layer was read, what it said, at which line, and where the model
went on. That a value was read is known here, not guessed from a layer that nothing else reads.
"""

from __future__ import annotations

from math import prod

from attrs import frozen

from .._ir.graph import Graph
from .._ir.node import Call, Guard, Ref, Source, specs_of
from .._ir.util import cached_property


@frozen
class Conditional:
    """One truth value that the model read: `if x.sum() > 0`, `while not done`, `a if flag else b`."""

    layer: str  # the layer that was read
    value: bool
    source: Source | None  # the line that read it
    taken: Source | None  # the line that it went on to; None where the value was not tested then and there

    def __str__(self) -> str:
        way = f", went on at line {self.taken.line}: {self.taken.text}" if self.taken else ""
        return f"{self.layer} was {self.value} at {self.source}: {self.source.text if self.source else ''}{way}"


@frozen(eq=False)
class Conditionals:
    """The decisions of a graph, worked out when first asked for."""

    graph: Graph

    @cached_property
    def records(self) -> tuple[Conditional, ...]:
        """Every truth value that was read, in the order in which that happened."""
        return tuple([Conditional(g.refs[-1].node, g.result, g.source, g.taken) for g in self._guards])

    @cached_property
    def terminal_bools(self) -> tuple[str, ...]:
        """The layers of a single value that were read so, and that nothing else reads."""
        graph = self.graph
        read = dict.fromkeys([ref for guard in self._guards for ref in guard.refs if self._is_single(ref)])
        others = graph.orphans.union([ref.node for ref in graph.wanted_refs])
        return tuple(
            dict.fromkeys(
                ref.node
                for ref in read
                if isinstance(graph[ref.node], Call)
                and not graph.users[graph.positions[ref.node]]
                and ref.node not in others
            )
        )

    @cached_property
    def in_branch(self) -> frozenset[str]:
        """The layers that are computed to evaluate a condition, and for nothing that the model gives."""
        graph = self.graph
        found = graph.ancestors(self.terminal_bools) - self._useful
        return frozenset([name for name in found if isinstance(graph[name], Call)])

    @cached_property
    def starts(self) -> tuple[tuple[str, str], ...]:
        """Where a condition's own layers begin: (the layer that also serves an output, the first that does not)."""
        graph = self.graph
        return tuple(
            [
                (before.name, node.name)
                for node, parents in zip(graph.nodes, graph.parents, strict=True)
                if node.name in self.in_branch
                for before in map(graph.nodes.__getitem__, parents)
                if before.name in self._useful
            ]
        )

    @cached_property
    def start_layers(self) -> frozenset[str]:
        """The first layers of each condition: where a drawing says IF."""
        return frozenset(name for _, name in self.starts)

    @cached_property
    def _useful(self) -> frozenset[str]:
        """What the model gives or writes, and all that it comes from."""
        return self.graph.ancestors([ref.node for ref in self.graph.wanted_refs])

    @property
    def _guards(self) -> list[Guard]:
        return [
            guard
            for guard in self.graph.guards
            if type(guard.result) is bool and guard.kind == "content" and guard.refs
        ]

    def _is_single(self, ref: Ref) -> bool:
        meaning = specs_of(self.graph[ref.node]).get(ref)
        return meaning is not None and prod(meaning.shape) == 1
