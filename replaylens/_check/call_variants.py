"""The same call with one thing changed among its arguments.

In: a call. Out: calls that differ from it in one number or flag, or that read another value in one place. Whether they
can be made is for who runs them to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count as numbered
from typing import Any

from .._core.node import Call, Ref, remade
from .._core.trees import leaves
from .._core.write import Nth, Write, packed


def otherwise(node: Call) -> Iterator[Call]:
    """Calls that have another number, or the other flag, in one place."""
    for place, leaf in enumerate(leaves(node.trees)):
        yield from (remade(node, partial(_at, numbered(), place, other)) for other in _others(leaf))


def reading_elsewhere(node: Call, parent: Ref, other: Ref) -> Iterator[Call]:
    """Calls that read another value in one of several places where this one reads the parent."""
    count = node.refs.count(parent)
    for place in range(count if count > 1 else 0):
        change = partial(_instead, parent, other, place, iter(range(count)))
        yield remade(node, change)
    if isinstance(node, Write):
        given = node.arguments
        if parent in given.bases:
            yield from _writing_elsewhere(node, given.bases.index(parent), other)
        if parent in given.values:
            yield from _reading_apart(node, given.values.index(parent), other)


def _instead(parent: Ref, other: Ref, place: int, turns: Iterator[int], leaf: Any) -> Any:
    return other if type(leaf) is Ref and leaf == parent and next(turns) == place else leaf


def _writing_elsewhere(node: Write, base: int, other: Ref) -> Iterator[Call]:
    """For `x -= x`: what is written is also read, as another view of the same memory."""
    bases, args = node.arguments.bases, node.arguments.args
    for place, arg in enumerate(args[1:], 1):
        if (view := node.view(arg)) is not None and view.base == base:
            moved = packed(view._replace(base=len(bases)))
            yield node.given(bases=(*bases, other), args=(*args[:place], moved, *args[place + 1 :]))


def _reading_apart(node: Write, target: int, other: Ref) -> Iterator[Call]:
    """For `x -= x` on a view that is a tensor of its own by now: what is written is also read, as another such."""
    args, targets, values = node.arguments.args, node.arguments.targets, node.arguments.values
    for place, arg in enumerate(args[1:], 1):
        if arg == packed(Nth(target)):
            changed = (*args[:place], packed(Nth(len(targets))), *args[place + 1 :])
            yield node.given(args=changed, targets=(*targets, targets[target]), values=(*values, other))


def _others(leaf: Any) -> tuple[Any, ...]:
    if type(leaf) is bool:
        return (not leaf,)
    if type(leaf) is int:
        return leaf + 1, 1 - leaf, 0
    if type(leaf) is float:
        return leaf + 0.5, 0.5, -leaf - 1.0, leaf * 1e6
    return ()


def _at(numbers: Iterator[int], place: int, other: Any, leaf: Any) -> Any:
    return other if next(numbers) == place else leaf
