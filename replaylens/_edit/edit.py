"""Edit: one edit of a program as data, such as `swap('relu_1', gelu)`: the method, and what it was given.

In: the name of a method of Program, and its arguments. Out: a value that compares by content, prints as the call that
it is, and makes the same edit of another program. What an edit does is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

from .._ir.equality import same
from ..errors import BadEdit
from .arguments import function_name
from .patch import Patch, shown

EDITS = ("with_patch", "lesion", "swap", "insert_after", "expand", "bypass", "rewire", "set_state", "slice")


class _Contents:
    """Arguments that equal others if their tensors agree bit for bit: what attrs compares in the place of a field."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Contents) and _alike(self.value, other.value)

    def __hash__(self) -> int:
        return len(self.value)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, (torch.Tensor, int, float, complex)) or isinstance(other, torch.Tensor):
        return same(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if hasattr(one, "tobytes"):  # an array of numpy
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return bool(one == other)


def _held(value: Any) -> Any:
    """Containers of the edit's own: what a user does to his mapping later is no part of the edit."""
    if type(value) is dict:
        return {key: _held(item) for key, item in value.items()}
    return type(value)(map(_held, value)) if type(value) in (list, tuple) else value


@frozen(init=False, repr=False)
class Edit:
    """One edit of a program, as data. `prog.edits` lists those that a program has had; `edit(other)` makes the same
    edit of another program, and `other.apply(prog.edits)` all of them.

    Edits compare by content, and print as `prog.history` shows them. Tensors and functions are held, not copied.

    >>> Edit("bypass", "relu_1")
    bypass('relu_1')
    """

    method: str
    args: tuple[Any, ...] = field(eq=_Contents)
    kwargs: Mapping[str, Any] = field(eq=_Contents)

    def __init__(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        if method not in EDITS:
            raise BadEdit(f"{method!r:.60} is no edit of a program. The edits: {', '.join(EDITS)}.")
        self.__attrs_init__(method, _held(args), _held(kwargs))

    def __call__(self, program: Any) -> Any:
        """The program with this edit."""
        return getattr(program, self.method)(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        # How a swapped function is called is no part of the text, which names what was swapped for what.
        said = {key: value for key, value in self.kwargs.items() if (self.method, key) != ("swap", "with_args")}
        words = [*map(argument_text, self.args), *(f"{key}={argument_text(value)}" for key, value in said.items())]
        return f"{self.method}({', '.join(words)})"


def argument_text(value: Any) -> str:
    """An argument of an edit, as the history of the program shows it."""
    is_function = callable(value) and not isinstance(value, (Patch, torch.Tensor))
    return function_name(value) if is_function else shown(value)
