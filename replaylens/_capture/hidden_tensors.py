"""Tensors in what a model returned that no frozen tree shows: in closures, iterators, keys, arrays of objects.

In: a leaf of a frozen output. Out: the tensors behind it. A program could put no other ones there. Of records nothing
is known here.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .._core.trees import ATOMS, attributes_of

_MOST = 10_000  # objects that are looked at: what holds more is a world of its own
_PYTHONS_OWN = frozenset(("builtins", "itertools", "collections"))


def behind(value: Any, own: frozenset[int]) -> Iterator[torch.Tensor]:
    """The tensors that can be reached from an object, but not through those whose ids are `own`."""
    stack, seen = [] if id(value) in own else [value], {id(value): value}
    while stack and len(seen) < _MOST:
        for item in _held(stack.pop()):
            if isinstance(item, torch.Tensor):
                yield item
            elif type(item) not in ATOMS and id(item) not in seen and id(item) not in own:
                seen[id(item)] = item
                stack.append(item)


def _held(value: Any) -> list[Any]:
    """What an object holds itself."""
    if isinstance(value, (type, ModuleType)):
        return []
    if isinstance(value, FunctionType):
        cells = [item for cell in value.__closure__ or () for item in gc.get_referents(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if type(value).__module__ == "numpy":
        return [*value.flat] if getattr(getattr(value, "dtype", None), "hasobject", False) else []
    if isinstance(value, BaseException):
        return [*value.args, *vars(value).values()]
    below = gc.get_referents(value) if type(value).__module__ in _PYTHONS_OWN else []
    inner = [*dict.items(value)] if isinstance(value, dict) else [*value] if isinstance(value, (list, tuple)) else []
    return [*below, *inner, *[item for _, item in attributes_of(value)]]
