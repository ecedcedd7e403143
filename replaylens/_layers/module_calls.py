"""The calls of modules: their nesting, sizes, inputs and outputs.

In: a Graph and the model's modules. Out: ModuleCalls, in which `layer1.0:2` is the second call of `layer1.0`.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from .._ir.graph import Graph
from .._ir.node import Call, Node, Scope, refs_in
from .._ir.util import cached_property


@frozen(eq=False)
class ModuleCalls:
    """All calls of modules in a forward, in order."""

    graph: Graph
    modules: dict[str, str]  # address -> class

    @cached_property
    def scopes(self) -> dict[str, Scope]:
        """Every call by name, outer calls before inner ones."""
        found: dict[str, Scope] = {}
        inner = [node.scope for node in self.graph.calls if node.scope is not None]
        for scope in (*inner, *(scope for scope, _ in self.graph.module_outputs)):
            chain: list[Scope] = []
            at: Scope | None = scope
            while at is not None and str(at) not in found:
                chain.append(at)
                at = at.parent
            found.update((str(one), one) for one in reversed(chain))
        return found

    @cached_property
    def types(self) -> dict[str, str]:
        """Every module of the model, and every other that was called: address -> class."""
        return self.modules | {s.address: s.kind for s in self.scopes.values() if s.address not in self.modules}

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of calls of each module."""
        found = dict.fromkeys(self.types, 0)
        for scope in self.scopes.values():
            found[scope.address] += 1
        return found

    @cached_property
    def children(self) -> dict[str, tuple[str, ...]]:
        """The direct sub-calls of each call."""
        found: dict[str, list[str]] = {name: [] for name in self.scopes}
        for name, scope in self.scopes.items():
            if scope.parent is not None:
                found[str(scope.parent)].append(name)
        return {name: tuple(names) for name, names in found.items()}

    @cached_property
    def top(self) -> tuple[str, ...]:
        """The calls that are in no other module call."""
        return tuple([name for name, scope in self.scopes.items() if scope.parent is None])

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of operations in each call, sub-calls included."""
        found = dict.fromkeys(self.scopes, 0)
        for node in self.graph.calls:
            for scope in _stack(node):
                found[str(scope)] += 1
        return found

    @cached_property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """By node: the calls that return its value, innermost first."""
        found: dict[str, list[str]] = {}
        for scope, tree in self.graph.module_outputs:
            for name in dict.fromkeys([leaf.node for leaf in refs_in(tree)]):
                found.setdefault(name, []).append(str(scope))
        return {name: tuple(calls) for name, calls in found.items()}

    def entered(self, node: Node, readers: Iterable[Node]) -> tuple[str, ...]:
        """The calls that a value enters: it was computed outside of them and is read inside."""
        own = {str(scope) for scope in _stack(node)}
        names = [str(scope) for reader in readers for scope in _stack(reader)]
        return tuple(dict.fromkeys([name for name in names if name not in own]))

    def bottom_level(self, node: Node) -> str | None:
        """The call that consists of this one operation and returns its value; None if there is none."""
        scope = node.scope if isinstance(node, Call) else None
        if scope is None or self.sizes[str(scope)] != 1 or str(scope) not in self.outputs.get(node.name, ()):
            return None
        return str(scope)


def _stack(node: Node) -> tuple[Scope, ...]:
    return node.scope.stack if isinstance(node, Call) and node.scope is not None else ()
