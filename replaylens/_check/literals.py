"""The same call with one thing changed among its arguments.

In: a call. Out: calls that differ from it in one number or flag, or that read another value in one place. Whether they
can be made is for who runs them to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from attrs import evolve

from .._core.node import Call, Ref
from .._core.pure import Derived, Nth, mutate
from .._core.trees import Branch, leaves, remake


def otherwise(node: Call) -> Iterator[Call]:
    """Calls that have another number, or the other flag, in one place."""
    words = tuple([key for key, _ in node.kwargs])
    tree = node.arguments
    for place, leaf in enumerate(leaves(tree)):
        for other in _others(leaf):
            args, values = _with(tree, place, other)
            yield evolve(node, args=args, kwargs=tuple(zip(words, values, strict=True)))


def reading_elsewhere(node: Call, parent: Ref, other: Ref) -> Iterator[Call]:
    """Calls that read another value in one of several places where this one reads the parent."""
    count = node.refs.count(parent)
    for place in range(count if count > 1 else 0):
        turns = iter(range(count))
        change = partial(_instead, parent, other, place, turns)
        kwargs = tuple([(key, remake(value, change)) for key, value in node.kwargs])
        yield evolve(node, args=tuple([remake(arg, change) for arg in node.args]), kwargs=kwargs)
    if node.target.function is mutate and parent in node.args[1]:
        yield from _writing_elsewhere(node, node.args[1].index(parent), other)
    if node.target.function is mutate and parent in node.args[-1]:
        yield from _reading_apart(node, node.args[-1].index(parent), other)


def _instead(parent: Ref, other: Ref, place: int, turns: Iterator[int], leaf: Any) -> Any:
    return other if type(leaf) is Ref and leaf == parent and next(turns) == place else leaf


def _writing_elsewhere(node: Call, base: int, other: Ref) -> Iterator[Call]:
    """For `x -= x`: what is written is also read, as another view of the same memory."""
    function, bases, args, kwargs, targets, values = node.args
    for place, arg in enumerate(args[1:], 1):
        view = targets[arg.items[0]] if isinstance(arg, Branch) and arg.kind is Nth else arg
        if isinstance(view, Branch) and view.kind is Derived and view.items[0] == base:
            moved = evolve(view, items=(len(bases), *view.items[1:]))
            changed = (*args[:place], moved, *args[place + 1 :])
            yield evolve(node, args=(function, (*bases, other), changed, kwargs, targets, values))


def _reading_apart(node: Call, target: int, other: Ref) -> Iterator[Call]:
    """For `x -= x` on a view that is a tensor of its own by now: what is written is also read, as another such."""
    function, bases, args, kwargs, targets, values = node.args
    for place, arg in enumerate(args[1:], 1):
        if isinstance(arg, Branch) and arg.kind is Nth and arg.items[0] == target:
            changed = (*args[:place], evolve(arg, items=(len(targets),)), *args[place + 1 :])
            yield evolve(node, args=(function, bases, changed, kwargs, (*targets, targets[target]), (*values, other)))


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
