"""Has a module kept what it hands on? Asked of Python's count of references to it.

In: a module's output as it leaves the module. Out: the same output in which other tensors may stand. A container that
the module has kept as well stays as it is: what is put into it, the module would see. Of records nothing is known here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .._core.trees import ATOMS
from .storage import Entry, Memory

_references = sys.getrefcount
New = Callable[[torch.Tensor, int], torch.Tensor]


def references_of(memory: Memory, tensor: torch.Tensor) -> int:
    """How many references to a tensor are those of a recording, of its memory, and of torch."""
    known, values = memory.live.get(id(tensor)), memory.recording.values
    found = int(_TORCH_COUNTS and _is_held_by_torch(tensor))
    if not isinstance(known, Entry):
        return found + (known is not None and _at(values, known) is tensor)
    base = known.base
    found += (known.tensor is tensor) + (base.root is tensor)
    found += any(listed is tensor for listed in memory.by_storage.values())
    return found + sum(_at(values, handle) is tensor for handle in {*base.held, known.handle, base.handle})


def _at(values: list[Any], handle: int) -> Any:
    return list.__getitem__(values, handle)


def _is_held_by_torch(tensor: torch.Tensor) -> bool:
    return bool(tensor._use_count() > 1)  # type: ignore[attr-defined]


def renewed(value: Any, beyond: int, new: New) -> Any:
    """A module's output with `new(tensor, beyond)` in the place of each tensor; `beyond` counts the references that
    are not the output's own. Tuples are made again; what can be written is written where nobody else holds it.
    """
    if isinstance(value, torch.Tensor):
        return new(value, beyond)
    if type(value) in ATOMS or isinstance(value, (type, torch.nn.Module)):
        return value
    if isinstance(value, tuple):
        return _tuple_renewed(value, new)
    if beyond <= 0:
        _write(value, new)
    return value


def _tuple_renewed(value: Any, new: New) -> Any:
    items = []
    for item in value:
        items.append(renewed(item, _references(item) - _WITHIN, new))
    if all(item is other for item, other in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if type(value) is tuple else value


def _write(value: Any, new: New) -> None:
    """Put new tensors into a list, a dict, or an object with attributes."""
    if isinstance(value, list):
        for number in range(len(value)):
            item = value[number]
            if (made := renewed(item, _references(item) - _WITHIN, new)) is not item:
                value[number] = made
    elif isinstance(value, dict):
        own = getattr(value, "__dict__", {})
        for key in list(value):
            item = value[key]
            twice = own.get(key) is item
            if (made := renewed(item, _references(item) - _WITHIN - twice, new)) is not item:
                value[key] = made
                if twice:
                    own[key] = made
    elif type(value).__module__ not in ("builtins", "numpy", "torch"):
        own = getattr(value, "__dict__", {})
        for key in list(own):
            item = own[key]
            if (made := renewed(item, _references(item) - _WITHIN, new)) is not item:
                own[key] = made


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


BARE, ALONE, _WITHIN, _TORCH_COUNTS = _counted()
