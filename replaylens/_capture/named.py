"""Code that may have run although no call of torch's told of it: what code that did run calls by name.

In: the code that was seen to run, the model's function and the classes of its modules. Out: that code, the methods of
these classes and the functions of their modules that it names, and so on. Torch's own is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any


def named_code(ran: Iterable[CodeType], model: Any, kinds: Iterable[type]) -> Iterator[CodeType]:
    """The code that ran, and what it names."""
    methods = _methods(kinds)
    known = {id(one.__code__): one for many in methods.values() for one in many}
    if isinstance(model, FunctionType):
        known[id(model.__code__)] = model
    stack, seen = list(ran), set()
    while stack:
        code = stack.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        yield code
        found = [one for name in code.co_names for one in methods.get(name, ())]
        if (function := known.get(id(code))) is not None:
            found += _reached_by(function)
        known.update({id(one.__code__): one for one in found})
        stack.extend([one.__code__ for one in found])


def _methods(kinds: Iterable[type]) -> dict[str, list[FunctionType]]:
    """By name, the functions of these classes and of those that they are made from."""
    found: dict[str, list[FunctionType]] = {}
    bases = dict.fromkeys([base for kind in kinds for base in kind.__mro__])
    for base in bases:
        for name, value in () if _is_torch(base.__module__) else vars(base).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                found.setdefault(name, []).append(function)
    return found


def _reached_by(function: FunctionType) -> list[FunctionType]:
    """The user's functions that one calls by global names, or closes over."""
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    return [one for one in values if isinstance(one, FunctionType) and not _is_torch(one.__module__)]


def _is_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"
