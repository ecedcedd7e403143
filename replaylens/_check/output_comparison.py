"""Comparing what a model returned with what its program recorded.

In: a Python value, and the tree of Refs that it should equal. Out: the difference, in words and as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import frozen

from .._ir.equality import difference, same
from .._ir.node import Ref, TensorSpec
from .._ir.torch_private import is_wrapped, unwrapped
from .._ir.trees import Branch, freeze_deep

_PLAIN = (bool, int, float, complex, str)
Recorded = Callable[[Ref], torch.Tensor]


@frozen(eq=False)
class _TensorLeaf:
    """A tensor as a leaf of a frozen tree."""

    tensor: torch.Tensor


def copied(value: Any) -> Any:
    """A frozen copy of a value, which no later forward can change."""
    return freeze_deep(value, lambda tensor: _TensorLeaf(tensor.detach().clone()))


def apart(tree: Any, value: Any) -> bool:
    """True if some tensor of a value differs from the one in a frozen copy made by `copied`."""
    pairs = _pairs(tree, freeze_deep(value, _leaf_tensors))
    return any(
        isinstance(a, _TensorLeaf) and isinstance(b, _TensorLeaf) and not same(a.tensor, b.tensor) for a, b in pairs
    )


def unlike(value: Any, tree: Any, recorded: Recorded) -> tuple[str, float | None]:
    """The first difference from a tree of recorded values, in words and as a number; ("", None) if there is none."""
    for mine, theirs in _pairs(freeze_deep(value, _leaf_tensors), tree):
        if isinstance(mine, _TensorLeaf) and isinstance(theirs, Ref):
            wanted = recorded(theirs)
            if not same(mine.tensor, wanted):
                one, other = str(TensorSpec.of(mine.tensor)), str(TensorSpec.of(wanted))
                return "other numbers" if one == other else f"{one}, not {other}", difference(mine.tensor, wanted)
        elif isinstance(mine, _TensorLeaf):
            return "a tensor that is no value of the program", None
        elif isinstance(theirs, Ref):
            return "no tensor where one was recorded", None
        elif _shape(mine) != _shape(theirs):
            return "another structure", None
        elif type(mine) in _PLAIN and repr(mine) != repr(theirs):
            return f"{mine!r}, not {theirs!r}", None
    return "", None


def side_by_side(value: Any, tree: Any) -> list[tuple[torch.Tensor, Ref]]:
    """The tensors in a value, each with the Ref that it should equal."""
    pairs = _pairs(freeze_deep(value, _leaf_tensors), tree)
    return [
        (mine.tensor, theirs) for mine, theirs in pairs if isinstance(mine, _TensorLeaf) and isinstance(theirs, Ref)
    ]


def furthest(value: Any, tree: Any, recorded: Recorded, but_zeros: bool = False) -> float | None:
    """The largest absolute difference over all tensors; None if it has no number. With `but_zeros` rows that are all
    zeros in the value are ignored.
    """
    pairs = [
        (mine.tensor, recorded(theirs))
        for mine, theirs in _pairs(freeze_deep(value, _leaf_tensors), tree)
        if isinstance(mine, _TensorLeaf) and isinstance(theirs, Ref)
    ]
    found = [difference(one, _zero_where(one, other) if but_zeros else other) for one, other in pairs]
    return None if not found or None in found else max(number for number in found if number is not None)


def _zero_where(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other` with zeros in those rows in which `one` is all zeros."""
    if one.shape != other.shape or not one.dim() or one.layout is not torch.strided or one.is_nested:
        return other
    return other.detach().masked_fill(~(one != 0).any(-1, keepdim=True), 0)


def _leaf_tensors(tensor: torch.Tensor) -> _TensorLeaf:
    """The plain tensor beneath functorch's wrappers, since that is what is recorded."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return _TensorLeaf(tensor)


def _pairs(mine: Any, theirs: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of two trees in pairs. Where their structures differ, the pair holds the two subtrees."""
    if _shape(mine) != _shape(theirs) or _shape(mine) is None:
        yield mine, theirs
        return
    items = (tree if type(tree) is tuple else tree.items for tree in (mine, theirs))
    for one, other in zip(*items, strict=True):
        yield from _pairs(one, other)


def _shape(tree: Any) -> Any:
    """The kind, length and keys of a container; None for a leaf."""
    if type(tree) is tuple:
        return tuple, len(tree)
    return (_named(tree.kind), len(tree.items), tree.keys) if isinstance(tree, Branch) else None


def _named(kind: type) -> tuple[str, str]:
    """A class by name, because a forward may define its own class anew each time."""
    return kind.__module__, kind.__qualname__
