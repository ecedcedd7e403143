"""What kind of network a program is: does it run layers again, does it branch?

In: a Graph. Out: counts and answers. Whether it takes decisions is said in conditionals.py.
"""

from __future__ import annotations

from collections import Counter

from .._core.graph import Graph
from .._core.label import Label
from .._core.node import Call, Input


def passes(graph: Graph) -> dict[str, int]:
    """How often each layer runs, by its label without the pass."""
    names = [Label.of(call.name).layer for call in graph.calls if call.name not in graph.orphans]
    return dict(Counter(names))


def max_recurrent_loops(graph: Graph) -> int:
    """The most passes of any layer: 1 in a feedforward network."""
    return max(passes(graph).values(), default=1)


def is_recurrent(graph: Graph) -> bool:
    """Does any layer run more than once?"""
    return max_recurrent_loops(graph) > 1


def is_branching(graph: Graph) -> bool:
    """Does anything but parameters, buffers and constants go to more than one layer, outputs included?"""
    ends = Counter(ref.node for ref in dict.fromkeys(graph.output_refs))
    return any(
        len([user for user in users if graph.nodes[user].name not in graph.orphans]) + ends[node.name] > 1
        for node, users in zip(graph.nodes, graph.users, strict=True)
        if isinstance(node, (Call, Input)) and node.name not in graph.orphans
    )
