"""The functions of the user that a forward may run: those of the classes of its modules, and the functions that running
code refers to.

A function *refers to* the globals that its code names and the variables that it closes over. Functions of torch and of
replaylens are left out everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any

from .bytecode import is_torch_code, nested, uses_of


def users_function(thing: Any) -> FunctionType | None:
    """The function of the user behind a method, a property, or a decorator of torch."""
    if isinstance(thing, (MethodType, staticmethod, classmethod)):
        thing = thing.__func__
    elif isinstance(thing, property):
        thing = thing.fget
    while isinstance(thing, FunctionType) and is_torch_code(thing.__code__):
        thing = vars(thing).get("__wrapped__")
    return thing if isinstance(thing, FunctionType) else None


def closed_over(function: FunctionType) -> list[Any]:
    """The closure values of a function, as far as they are set."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found


def named_by(function: FunctionType) -> list[Any]:
    """What a function refers to."""
    known = function.__globals__
    named = [known[name] for code in nested(function.__code__) for name in code.co_names if name in known]
    return [*named, *closed_over(function)]


def reached(things: Iterable[Any]) -> list[FunctionType]:
    """The functions among these things, and those that they refer to, transitively."""
    found: dict[int, FunctionType] = {}
    stack = list(things)
    while stack:
        function = users_function(stack.pop())
        if function is not None and id(function) not in found:
            found[id(function)] = function
            stack.extend(named_by(function))
    return list(found.values())


def code_of(model: Any, modules: Collection[Any]) -> list[CodeType]:
    """All code that a forward of a model may run."""
    holders = [vars(thing) for module in modules for thing in (module, *type(module).__mro__)]
    things = [model, *[thing for held in holders for name, thing in held.items() if name != "__init__"]]
    return [code for function in reached(things) for code in nested(function.__code__)]


class Methods:
    """The functions of some classes and their bases, and the model if it is a function."""

    def __init__(self, model: Any, kinds: Iterable[type]) -> None:
        self.by_name: dict[str, list[FunctionType]] = {}
        bases = dict.fromkeys([base for kind in kinds for base in kind.__mro__])
        for base in bases:
            for name, value in () if base.__module__.partition(".")[0] == "torch" else vars(base).items():
                if (function := users_function(value)) is not None:
                    self.by_name.setdefault(name, []).append(function)
        known = [one for many in self.by_name.values() for one in many]
        self.by_code = {id(one.__code__): one for one in (*known, users_function(model)) if one is not None}


def named_code(ran: Iterable[CodeType], methods: Methods) -> Iterator[CodeType]:
    """Code that ran, and code that it may have run unseen: methods that it names, functions it refers to."""
    known = dict(methods.by_code)
    stack, seen = list(ran), set()
    while stack:
        code = stack.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        yield code
        found = [one for name in code.co_names for one in methods.by_name.get(name, ())]
        if (function := known.get(id(code))) is not None:
            found += filter(None, map(users_function, named_by(function)))
        known.update({id(one.__code__): one for one in found})
        stack.extend([one.__code__ for one in found])


# -- attributes of modules ---------------------------------------------------------------------------------------------

_BY_NAME = frozenset(("hasattr", "getattr", "get_buffer", "get_parameter"))
_OF_ALL = frozenset(
    "vars __dict__ _buffers _parameters buffers named_buffers parameters named_parameters state_dict".split()
)


def is_stored_first(key: str, codes: Iterable[CodeType]) -> bool:
    """True if all code that names the attribute begins by assigning it. Code that tests first (`if self.h is None`,
    `hasattr`) may take another path next time; so may code in which no assignment is found.
    """
    found = {_first_use(code, key) for code in codes}
    return "stores" in found and "reads" not in found


def _first_use(code: CodeType, key: str) -> str:
    if not _OF_ALL.isdisjoint(code.co_names):
        return "reads"
    first = next(iter(uses_of(code, key)), "")
    if first == "spells":
        return "stores" if _BY_NAME.isdisjoint(code.co_names) else "reads"
    return "reads" if first == "feeds" else first


def is_only_fed(key: str, codes: Iterable[CodeType]) -> bool:
    """True if all code that names the attribute only assigns it, counts it up or adds items to it."""
    found: set[str] = set()
    for code in codes:
        found.update(uses_of(code, key) if {"__dict__", "vars"}.isdisjoint(code.co_names) else ("reads",))
    return bool(found) and found <= {"stores", "feeds"}
