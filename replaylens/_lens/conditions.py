"""Which layers decide over a branch of the user's Python: single booleans that `if` read.

In: a Graph and the kin of its layers. Out: Conditions, by ordinal.
"""

from __future__ import annotations

from math import prod

import torch
from attrs import frozen

from .._core.graph import Graph
from .atlas import Atlas
from .kin import Kin


@frozen(eq=False)
class Conditions:
    """`ends` are the booleans, `inside` all that was computed for them alone, `starts` where that begins."""

    ends: frozenset[int]
    inside: frozenset[int]
    starts: frozenset[int]


def conditions_of(graph: Graph, kin: Kin, atlas: Atlas) -> Conditions:
    """What decides over branches: from each boolean back to what leads to an output."""
    ends: set[int] = set()
    for guard in graph.guards:
        for ref in guard.refs:
            number = atlas.ordinals.get(ref.node)
            is_bool = guard.target.short == "__bool__" and number is not None and not kin.children[number]
            if is_bool and number is not None and _is_one_boolean(graph, ref.node):
                ends.add(number)
    inside, starts, stack = set(ends), set(), list(ends)
    while stack:
        number = stack.pop()
        for parent in kin.parents[number]:
            if kin.to_output[parent] is not None:
                starts.add(number)
            elif parent not in inside:
                inside.add(parent)
                stack.append(parent)
    return Conditions(frozenset(ends), frozenset(inside), frozenset(starts))


def _is_one_boolean(graph: Graph, name: str) -> bool:
    meaning = graph[name].meaning
    (one,) = meaning if isinstance(meaning, tuple) and len(meaning) == 1 else (None,)
    return one is not None and one.dtype is torch.bool and prod(one.shape) == 1
