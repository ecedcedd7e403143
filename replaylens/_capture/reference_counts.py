"""Has a module kept what it hands on? Asked of Python's count of references to it.

In: a module's output as it leaves the module. Out: the same output in which other tensors may stand. What is put into a
container that somebody else holds as well, they would see: whoever asks is told of it. Of records nothing is known.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from .._core.sharing import storage_of
from .._core.torch_private import without_function_modes
from .._core.trees import ATOMS, Branch, attributes_of, own, own_attributes
from .storage import Entry, Memory

_references = sys.getrefcount


class New(Protocol):
    """What stands in the place of what a module gives."""

    def __call__(self, tensor: torch.Tensor, beyond: int) -> torch.Tensor: ...

    def kept(self, container: Any) -> Any: ...


def references_of(memory: Memory, tensor: torch.Tensor) -> int:
    """How many references to a tensor are those of a recording, of its memory, and of torch."""
    known, values = memory.live.get(id(tensor)), memory.recording.values
    found = int(_TORCH_COUNTS and _is_held_by_torch(tensor))
    if not isinstance(known, Entry):
        return found + (known is not None and _at(values, known) is tensor)
    base = known.base
    found += (known.tensor is tensor) + (base.root is tensor)
    if memory.by_storage:
        with without_function_modes():  # what is looked at here, the model did not ask
            found += memory.by_storage.get(storage_of(tensor) or 0) is tensor
    return found + sum(_at(values, handle) is tensor for handle in {*base.held, known.handle, base.handle})


def _at(values: list[Any], handle: int) -> Any:
    return list.__getitem__(values, handle)


def _is_held_by_torch(tensor: torch.Tensor) -> bool:
    return bool(tensor._use_count() > 1)  # type: ignore[attr-defined]


def renewed(value: Any, beyond: int, new: New, ours: Mapping[int, int]) -> Any:
    """A module's output with `new(tensor, beyond)` in the place of each tensor; `beyond` counts the references that
    are not the output's own. Tuples are made again; what can be written is written where nobody else holds it, and is
    `new.kept(container)` elsewhere. `ours`: how many references to an object, by its id, are those of frozen trees.
    """
    if isinstance(value, torch.Tensor):
        return new(value, beyond)
    if type(value) in ATOMS or isinstance(value, (type, torch.nn.Module)):
        return value
    beyond -= ours.get(id(value), 0)
    if isinstance(value, (tuple, frozenset)):
        return _made_again(value, beyond, new, ours)
    if beyond > 0 or isinstance(value, (set, slice, MappingProxyType)):
        return new.kept(value)
    _write(value, new, ours)
    return value


def _made_again(value: Any, beyond: int, new: New, ours: Mapping[int, int]) -> Any:
    """What cannot be written, around other items. Who has kept the tuple has kept what is in it."""
    items = []
    for item in value:
        count = _references(item) - _WITHIN
        items.append(renewed(item, count + max(beyond, 0), new, ours))
    if all(item is other for item, other in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if type(value) in (tuple, frozenset) or hasattr(type(value), "n_sequence_fields"):
        return type(value)(items)
    made = (tuple if isinstance(value, tuple) else frozenset).__new__(type(value), items)
    for name, item in attributes_of(value):
        object.__setattr__(made, name, item)
    return made


def _write(value: Any, new: New, ours: Mapping[int, int]) -> None:
    """Put new tensors into a list, a dict, or an object with attributes."""
    if isinstance(value, (list, deque)):
        put: Any = list.__setitem__ if isinstance(value, list) else deque.__setitem__
        for number in range(len(value)):
            item = value[number]
            count = _references(item) - _WITHIN
            if (made := renewed(item, count, new, ours)) is not item:
                put(value, number, made)
    elif isinstance(value, dict):
        attributes = own_attributes(value)
        for key in dict.keys(value):
            item = dict.__getitem__(value, key)
            twice = attributes.get(key) is item
            count = _references(item) - _WITHIN
            if (made := renewed(item, count - twice, new, ours)) is not item:
                dict.__setitem__(value, key, made)
                if twice:
                    attributes[key] = made
    elif type(value).__module__ not in ("builtins", "numpy", "torch"):
        _write_attributes(value, new, ours)


def _write_attributes(value: Any, new: New, ours: Mapping[int, int]) -> None:
    for name in [name for name, _ in attributes_of(value)]:
        item = own(value, name, None)
        count = _references(item) - _WITHIN
        if (made := renewed(item, count, new, ours)) is not item:
            object.__setattr__(value, name, made)


def objects_held(tree: Any) -> Counter[int]:
    """How many references to each object, by its id, a frozen tree holds, to copy from it later."""
    held: Counter[int] = Counter()
    seen: set[int] = set()
    stack = [tree]
    while stack:
        part = stack.pop()
        if type(part) is tuple:
            stack.extend(part)
        elif type(part) is Branch:
            if part.like is not None and id(part) not in seen:
                held[id(part.like)] += 1
            seen.add(id(part))
            stack.extend(part.items)
    return held


def _counted() -> tuple[int, int, int, bool]:
    """As this Python and this torch count: references to what a name holds, to what a list holds as well, to an item of
    a container that a name holds; and does torch count its own hold on a tensor among them?
    """
    out = torch.empty(2)
    bare = _references(out)
    values = [out]
    alone = _references(out)
    view = out.view(1, 2)
    counts = _references(out) > alone
    del view, out
    for item in values:
        within = _references(item)
    return bare, alone, within, counts


def _given() -> int:
    """How many references to what a module gives back are those of a call `x = module(x)`."""
    found = []

    def listen(called: Any, call: Any, args: Any, kwargs: Any) -> Any:
        out = call(called, *args, **kwargs)
        found.append(_references(out) - BARE)
        return out

    class Called:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return listen(self, lambda self, value: value, args, kwargs)

    def rebinds(called: Any) -> None:
        value = object()
        value = called(value)

    rebinds(Called())
    return found[0]


BARE, ALONE, _WITHIN, _TORCH_COUNTS = _counted()
GIVEN = _given()
