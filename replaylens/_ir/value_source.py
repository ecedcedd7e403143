"""What can be saved; and what patches may take values from: a Program, a Run, a Layer. Patches know no more of these
than their base class.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from attrs import fields, frozen

from .trees import freeze_deep, thaw


class Saved:
    """Base class of what can be saved to a file, and so be pickled: its pickle is that file. See _store/objects.py."""

    __slots__ = ()

    def save(self, path: Any) -> None:
        """Write it to one file, which `replaylens.load(path)` reads. An older file is replaced once it is whole."""
        self._save_to(path)

    def _save_to(self, path: Any, **how: Any) -> None:
        _way_to_save[0](self, path, **how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _way_to_pickle[0](self, protocol)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The same with tensors of its own. Programs, functions and requests that it refers to are not copied."""
        made = memo[id(self)] = object.__new__(type(self))
        for one in fields(type(self)):  # type: ignore[arg-type]
            object.__setattr__(made, one.name, _copied(getattr(self, one.name), memo))
        return made


_way_to_pickle: list[Callable[[Any, Any], Any]] = []
_way_to_save: list[Callable[..., None]] = []


def set_way_to_pickle(way: Callable[[Any, Any], Any]) -> None:
    """Say how such objects are pickled: `way(what, protocol)` gives what `__reduce_ex__` gives."""
    _way_to_pickle[:] = [way]


def set_way_to_save(way: Callable[..., None]) -> None:
    """Say how such objects are saved: `way(what, path, ...)` writes a file."""
    _way_to_save[:] = [way]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Saved):
        return deepcopy(value, memo)
    if type(value) not in (dict, list, tuple) and not isinstance(value, torch.Tensor):
        return value
    return copied(value, memo)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A structure with tensors of its own."""
    return thaw(freeze_deep(value, lambda tensor: _Tensor(_copy_of(tensor, memo))), _plain)


def _copy_of(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:  # the copy of one with a history has the history too
        memo[id(tensor)] = tensor.clone() if tensor.grad_fn is not None else deepcopy(tensor, memo)
    made: torch.Tensor = memo[id(tensor)]
    return made


@frozen(eq=False)
class _Tensor:
    tensor: torch.Tensor


def _plain(leaf: Any) -> Any:
    return leaf.tensor if type(leaf) is _Tensor else leaf


class ValueSource(Saved):
    """Base class of what `From(...)` and `Mean(of=...)` read. Subclasses say which value they have under a name."""

    __slots__ = ()

    def _value_for(self, name: str) -> Any:
        """Its value at the site of this name, or an error that says it has none."""
        raise NotImplementedError
