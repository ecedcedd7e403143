"""Where the model's Python branched on a tensor: the layers that it read, and where computing them begins.

In: a Graph with its guards. Out: names of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from .._core.graph import Graph

BOOL = "torch.Tensor.__bool__"


def conditions(graph: Graph) -> dict[str, str]:
    """The nodes whose value Python read as true or false and that nothing else uses, and what they were."""
    ends = {ref.node for ref in graph.wanted_refs}
    found = {}
    for guard in graph.guards:
        for ref in guard.refs if guard.target.name == BOOL else ():
            if not graph.users[graph.positions[ref.node]] and ref.node not in ends and ref.node not in graph.orphans:
                found[ref.node] = str(guard.result)
    return found


def branch_starts(graph: Graph, names: Iterable[str]) -> frozenset[tuple[str, str]]:
    """The steps from what the output is computed from to what only a condition is computed from."""
    used = graph.marked_ancestors([ref.node for ref in graph.wanted_refs])
    aside = graph.marked_ancestors(list(names))
    return frozenset(
        (graph.nodes[parent].name, graph.nodes[p].name)
        for p in range(len(graph))
        if aside[p] and not used[p]
        for parent in graph.parents[p]
        if used[parent]
    )
