"""The same call with one of its plain numbers changed.

In: a call. Out: calls that differ from it in one number or flag among its arguments. Whether they can be made is for
who runs them to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from .._core.node import Call
from .._core.trees import leaves, remake


def otherwise(node: Call) -> Iterator[Call]:
    """Calls that have another number, or the other flag, in one place."""
    words = tuple([key for key, _ in node.kwargs])
    tree = (node.args, tuple([value for _, value in node.kwargs]))
    for place, leaf in enumerate(leaves(tree)):
        for other in _others(leaf):
            args, values = _with(tree, place, other)
            yield evolve(node, args=args, kwargs=tuple(zip(words, values, strict=True)))


def _others(leaf: Any) -> tuple[Any, ...]:
    if type(leaf) is bool:
        return (not leaf,)
    if type(leaf) is int:
        return leaf + 1, 1 - leaf, 0
    if type(leaf) is float:
        return leaf + 0.5, 0.5, -leaf - 1.0, leaf * 1e6
    return ()


def _with(tree: Any, place: int, other: Any) -> Any:
    count = iter(range(10**9))
    return remake(tree, lambda leaf: other if next(count) == place else leaf)
