"""Torch functions written in Python, opened: a copy that does not ask whether somebody overrides it runs its body."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

_opened: dict[Any, Callable[..., Any]] = {}
_globals: dict[int, dict[str, Any]] = {}


def opened(function: FunctionType) -> Callable[..., Any]:
    """A copy of a Python-written torch function that does not ask whether somebody overrides it, and so runs its
    body.
    """
    made = _opened.get(function)
    if made is None:
        own = function.__globals__
        answers = _globals.get(id(own))
        if answers is None:
            no = {name: _never for name in own if name.startswith("has_torch_function")}
            answers = _globals[id(own)] = {**own, **no}
        made = FunctionType(function.__code__, answers, function.__name__, function.__defaults__, function.__closure__)
        made.__kwdefaults__ = function.__kwdefaults__
        _opened[function] = made
    return made


def _never(*values: Any) -> bool:
    return False
