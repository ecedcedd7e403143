"""Where something is in a program, and by what name it was asked for.

In: what the names of a program's layers, and the keys of a mapping of patches, resolve to. Out: Locations: a node,
which of its values is meant, and their tree.
"""

from __future__ import annotations

from typing import Any

from attrs import Factory, evolve, field, frozen

from .graph import Graph
from .node import Arg, Ref, Scope, refs_in, value_of
from .trees import map_leaves


@frozen
class Location:
    """A layer: a node of the graph, the program's n-th output that it gives, or part of what it gives."""

    node: str
    output: Ref | None = None
    part: Arg = None  # a module's output: one of several values of the node, or a tree of values of several nodes
    label: str = Factory(lambda self: self.node, takes_self=True)
    scope: Scope | None = field(default=None, eq=False)  # for a module's output: the module's call
    names: tuple[str, ...] = ()  # for a tree of several values: the name of each, in order
    name: str = field(default=Factory(lambda self: self.label, takes_self=True), eq=False)  # in other programs and runs
    is_every_pass: bool = field(default=False, eq=False)  # named without its pass: other runs may have more

    def tree(self, graph: Graph) -> Arg:
        """The value there: a Ref, or a tree of Refs."""
        return self.output or self.part or value_of(graph[self.node])

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The values of a tree of several, each once."""
        return tuple(dict.fromkeys(refs_in(self.part)))

    @property
    def each(self) -> tuple[Location, ...]:
        """The location of each tensor, if a module returns several; else itself."""
        if not self.names:
            return (self,)
        return tuple([self.of(ref, f"{self.name}{way}") for way, ref in zip(self.names, self.refs, strict=True)])

    def of(self, ref: Ref, name: str) -> Location:
        """The location of one of several values."""
        return evolve(self, label=ref.node, node=ref.node, part=ref, names=(), name=name)

    @property
    def inner(self) -> Any:
        """For a tree of values: the same tree with the location of each. Else None."""
        if self.part is None or type(self.part) is Ref:
            return None
        return map_leaves(self.part, lambda one: Location(one.node, part=one) if type(one) is Ref else one)
