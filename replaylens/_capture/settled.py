"""Does a forward look whether something stands in its modules before it puts it there?

In: the functions that may have run, and the name of a parameter or buffer that the forward made. Out: whether each of
them that speaks of it begins by making it. One that asks first (`if self.h is None`, `hasattr`) takes another path next
time; so may one in which nobody is seen to make it.
"""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from .builder import is_torch_code

_BY_NAME = frozenset(("hasattr", "getattr", "get_buffer", "get_parameter"))
_OF_ALL = frozenset(
    "vars __dict__ _buffers _parameters buffers named_buffers parameters named_parameters state_dict".split()
)


def is_made_unasked(key: str, model: Any, modules: Collection[Any]) -> bool:
    """Is a name in modules first written in all code of a model that speaks of it?"""
    found = {_first_use(code, key) for code in code_of(model, modules)}
    return "store" in found and "load" not in found


def code_of(model: Any, modules: Collection[Any]) -> Iterator[CodeType]:
    """All code of a model that a forward may run: the user's, not torch's."""
    holders = [vars(thing) for module in modules for thing in (module, *type(module).__mro__)]
    functions = [model, *[thing for held in holders for name, thing in held.items() if name != "__init__"]]
    return (code for function in reached(functions) for code in _codes(function.__code__))


@lru_cache(maxsize=4096)
def _first_use(code: CodeType, key: str) -> str:
    if _OF_ALL.intersection(code.co_names) or matches_classes(code, key):
        return "load"
    if key not in code.co_names and key not in code.co_consts:
        return ""
    for instruction in dis.get_instructions(code):
        if instruction.argval != key:
            continue
        if instruction.opname == "STORE_ATTR":
            return "store"
        if instruction.opname == "LOAD_CONST":
            return "load" if _BY_NAME.intersection(code.co_names) else "store"
        return "load"
    return ""


@lru_cache(maxsize=4096)
def matches_classes(code: CodeType, key: str) -> bool:
    """Does a `case Class(key=...)` ask for this attribute, or one by position, of which the class alone knows?"""
    if dis.opmap["MATCH_CLASS"] not in code.co_code[::2]:
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    patterns = [number for number, step in enumerate(steps) if step.opname == "MATCH_CLASS"]
    return any(steps[number].arg or key in steps[number - 1].argval for number in patterns)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code and those within it: lambdas, comprehensions."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def reached(functions: Iterable[Any]) -> list[FunctionType]:
    """These functions and, of the user's, those that they name."""
    found: dict[int, FunctionType] = {}
    stack = list(functions)
    while stack:
        function = stack.pop()
        function = getattr(function, "__func__", getattr(function, "fget", None) or function)
        if not isinstance(function, FunctionType) or id(function) in found or is_torch_code(function.__code__):
            continue
        found[id(function)] = function
        for code in _codes(function.__code__):
            stack.extend(function.__globals__.get(name) for name in code.co_names)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                stack.append(cell.cell_contents)
    return list(found.values())
