"""Where the model branched on a tensor in Python, and which layers serve only such a condition.

In: a Graph. Out: Conditionals. Its records say which layer was read, its value, the line that read it and the line that
followed. They come from the guards of the capture, and are not guessed from layers without readers.
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

    layer: str  # the layer that was tested
    value: bool
    source: Source | None  # the line that read it
    taken: Source | None  # the line that followed; None if the value was not tested at once

    def __str__(self) -> str:
        way = f", went on at line {self.taken.line}: {self.taken.text}" if self.taken else ""
        return f"{self.layer} was {self.value} at {self.source}: {self.source.text if self.source else ''}{way}"


@frozen(eq=False)
class Conditionals:
    """The conditions of a graph, computed on first use."""

    graph: Graph

    @cached_property
    def records(self) -> tuple[Conditional, ...]:
        """Every truth value that was read, in order."""
        return tuple([Conditional(g.refs[-1].node, g.result, g.source, g.taken) for g in self._guards])

    @cached_property
    def terminal_bools(self) -> tuple[str, ...]:
        """The layers with a single element that were read this way and by nothing else."""
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
        """The layers that serve a condition and no output."""
        found = self.graph.ancestors(self.terminal_bools) - self._useful
        return frozenset([name for name in found if isinstance(self.graph[name], Call)])

    @cached_property
    def starts(self) -> tuple[tuple[str, str], ...]:
        """The edges into layers that serve only a condition, from layers that also serve an output."""
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
        """The first layers of each condition, where a drawing says IF."""
        return frozenset(name for _, name in self.starts)

    @cached_property
    def _useful(self) -> frozenset[str]:
        """The outputs and state changes of the model, and their ancestors."""
        return self.graph.ancestors([ref.node for ref in self.graph.wanted_refs])

    @property
    def _guards(self) -> list[Guard]:
        return [
            guard
            for guard in self.graph.guards
            if type(guard.result) is bool and guard.kind == "content" and guard.refs
        ]

    def _is_single(self, ref: Ref) -> bool:
        spec = specs_of(self.graph[ref.node]).get(ref)
        return spec is not None and prod(spec.shape) == 1
