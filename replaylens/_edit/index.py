"""Indices of axes as plain numbers: what a user gives, frozen.

In: numbers, lists, ranges, slices, tensors of positions, masks. Out: an int, a tuple of ints or a slice, and its text.
Whether an axis is that long is not known here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from ..errors import BadPart
from .pattern import Pattern

Index = int | tuple[int, ...] | slice
Indices = tuple[tuple[str, Index], ...]
Sizes = tuple[tuple[str, int], ...]


def frozen_axes(pattern: Pattern, axes: Mapping[str, Any]) -> tuple[Indices, Sizes]:
    """Indices of bracketed axes and sizes of others, in the order of the pattern."""
    bracketed = {name.word: name.is_bracketed for name in pattern.names}
    if unknown := next((word for word in axes if word not in bracketed), None):
        has = f"its axes are {', '.join(bracketed)}" if bracketed else "it names no axis"
        raise BadPart(f'no axis of "{pattern}" is called {unknown!r}: {has}.')
    indices: dict[str, Index] = {}
    sizes: dict[str, int] = {}
    try:
        for word in [word for word in bracketed if word in axes]:
            if bracketed[word]:
                indices[word], length = _frozen_index(word, axes[word])
                if length is not None:
                    sizes[word] = length
            else:
                sizes[word] = _frozen_size(word, axes[word])
    except BadPart as error:
        raise BadPart(f'{error}.\n    in the part "{pattern}"') from None
    return tuple(indices.items()), tuple(sizes.items())


def _frozen_index(name: str, given: Any) -> tuple[Index, int | None]:
    """An index as plain numbers; for a mask also its length, which is the size of the axis."""
    index = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(index, slice):
        return slice(*[None if e is None else operator.index(e) for e in (index.start, index.stop, index.step)]), None
    if isinstance(index, (list, tuple, range)):
        if not len(index):
            raise BadPart(f"{name}=[] selects nothing")
        if all(isinstance(one, bool) for one in index):
            found = tuple([position for position, mark in enumerate(index) if mark])
            if not found:
                raise BadPart(f"{name} is a mask without a True: it selects nothing")
            return found, len(index)
        if all(_is_number(one) for one in index):
            return tuple([operator.index(one) for one in index]), None
    elif _is_number(index):
        return operator.index(index), None
    raise BadPart(
        f"{name}={described(given)} is no index: give a number, a list of them, a slice, or a mask of one axis"
    )


def _frozen_size(name: str, given: Any) -> int:
    size = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(size, (list, tuple, range, slice)):
        raise BadPart(
            f"{name}={described(given)} is an index, and {name} is not addressed: write [{name}] to address it"
        )
    if not _is_number(size) or size < 1:
        raise BadPart(f"{name}={described(given)} is no size of an axis: {name} is not in brackets")
    return operator.index(size)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def index_text(index: Index) -> str:
    if isinstance(index, slice):
        ends = (index.start, index.stop) if index.step is None else (index.start, index.stop, index.step)
        return f"slice({', '.join(map(str, ends))})"
    if isinstance(index, int):
        return str(index)
    shown = list(chain(index[:6], () if len(index) <= 8 else ("...",), index[-2:] if len(index) > 8 else index[6:]))
    return f"[{', '.join(map(str, shown))}]"
