"""What patches may take values from: a Program, a Run, a Layer. Patches know no more of these than this base class."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn

import torch
from attrs import fields, frozen

from ..errors import NotPickled
from .trees import freeze_deep, thaw


class Unpickled:
    """Base class of what holds functions of the user and of torch: it can be copied, but not pickled."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        what = f"a {type(self).__name__}"
        raise NotPickled(
            f"{what} holds functions, and cannot be pickled or saved by torch.save: that is not supported yet.\n"
            "Save the tensors that you need (`layer.value`, `run.output`), or capture again where it is to be used."
        )

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The same with tensors of its own. Programs, functions and requests that it refers to are not copied."""
        made = memo[id(self)] = object.__new__(type(self))
        for one in fields(type(self)):  # type: ignore[arg-type]
            object.__setattr__(made, one.name, _copied(getattr(self, one.name), memo))
        return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Unpickled):
        return deepcopy(value, memo)
    if type(value) not in (dict, list, tuple) and not isinstance(value, torch.Tensor):
        return value
    return thaw(freeze_deep(value, lambda tensor: _Tensor(_copy_of(tensor, memo))), _plain)


def _copy_of(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:  # the copy of one with a history has the history too
        memo[id(tensor)] = tensor.clone() if tensor.grad_fn is not None else deepcopy(tensor, memo)
    copied: torch.Tensor = memo[id(tensor)]
    return copied


@frozen(eq=False)
class _Tensor:
    tensor: torch.Tensor


def _plain(leaf: Any) -> Any:
    return leaf.tensor if type(leaf) is _Tensor else leaf


class ValueSource(Unpickled):
    """Base class of what `From(...)` and `Mean(of=...)` read. Subclasses say which value they have under a name."""

    __slots__ = ()

    def _value_for(self, name: str) -> Any:
        """Its value at the site of this name, or an error that says it has none."""
        raise NotImplementedError
