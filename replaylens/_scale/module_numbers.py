"""Code and numbers in modules that the functions of a job reach: are they in a worker what they are here?

In, here: the functions and classes that pickle sends by their names, and those that it sends whole. Out: digests of the
code of what is found by name, and of the numbers and tensors that it reads. In, there: these. Out: the first that is
another one. A worker imports a module anew, so what was set in it afterwards stays behind, what was edited meanwhile is
read as it is now, and the function would compute something else there without a word. Modules of Python and of
installed packages are not looked at.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import sys
from collections.abc import Iterable
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .._capture.user_code import closure_values, nested_code, user_function
from .._ir.equality import digest_of_bits

Name = tuple[str, str]  # a module, and a name in it
_LIBRARIES = ("builtins", "torch", "numpy", "replaylens", "functools", "operator", "attr")
_LARGE = 1 << 26  # bytes
_MOST = 5000  # names


def is_asked(what: Any) -> bool:
    """True for a function or a class that pickle may send by its name, and that is no library's we know."""
    is_either = isinstance(what, (FunctionType, type))
    return is_either and (getattr(what, "__module__", None) or "builtins").partition(".")[0] not in _LIBRARIES


@cache
def _is_library(module: str) -> bool:
    """True for a module of Python, of an installed package, or of this one."""
    top = module.partition(".")[0]
    if top in _LIBRARIES or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))


def is_of_user(what: Any) -> bool:
    """True for a function or a class of a module that the user wrote."""
    module = getattr(what, "__module__", None)
    return isinstance(what, (FunctionType, type)) and isinstance(module, str) and not _is_library(module)


def read_of_modules(by_name: Iterable[Any], whole: Iterable[Any]) -> dict[Name, str]:
    """Digests of what is found by name in workers: the code of functions and methods, and the numbers that these read.

    `by_name` are functions and classes that are sent as names, `whole` are functions that are sent with their code, of
    which only the modules are found by name that they ask for something.
    """
    stack = [(thing.__module__, thing.__qualname__) for thing in by_name]
    stack += [name for thing in whole for function in _functions(thing) for name in _of_modules(function)]
    found: dict[Name, str] = {}
    seen, written = set[Name](), set[str]()
    while stack and len(seen) < _MOST:
        name = stack.pop()
        if name in seen or _is_library(name[0]):
            continue
        seen.add(name)
        value = _value_of(name)
        if (digest := _digest(value)) is not None:
            found[name] = digest
        functions = _functions(value)
        for function in functions:
            written |= _written(function)
            stack += [*_of_globals(function), *_of_modules(function)]
        if functions and not _is_rewritten(name[0]) and not _is_generated(functions[0]):
            found[name] = _digest_of_code(functions[0])
        if is_of_user(value) and isinstance(value, type):
            stack += [(cls.__module__, f"{cls.__qualname__}.{key}") for cls in value.__mro__ for key in vars(cls)]
    return {name: one for name, one in found.items() if name[1].rpartition(".")[2] not in written}


def _value_of(name: Name) -> Any:
    """What a module has under a name; an Ellipsis if there is nothing."""
    value: Any = sys.modules.get(name[0], ...)
    for part in name[1].split("."):
        value = inspect.getattr_static(value, part, ...)
    return value


def _functions(thing: Any, depth: int = 4) -> list[FunctionType]:
    """The function that something is, and those that are in it where it is decorated."""
    if not isinstance(thing, (FunctionType, MethodType, staticmethod, classmethod, property)):
        thing = None if isinstance(thing, type) else inspect.getattr_static(thing, "__wrapped__", None)
    function = user_function(thing)
    if function is None or not depth:
        return []
    return [function, *[one for held in closure_values(function) for one in _functions(held, depth - 1)]]


def _names(function: FunctionType) -> list[str]:
    return list(dict.fromkeys([name for code in nested_code(function.__code__) for name in code.co_names]))


def _of_globals(function: FunctionType) -> list[Name]:
    """The names in its own module that a function asks for."""
    known, module = function.__globals__, str(function.__globals__.get("__name__"))
    is_there = vars(sys.modules[module]) is known if module in sys.modules else False
    return [(module, name) for name in _names(function) if is_there and name in known]


def _of_modules(function: FunctionType) -> list[Name]:
    """The names in other modules that a function asks for: `lab.patch`, `lab.part.K`."""
    names = _names(function)
    held = [function.__globals__.get(name) for name in names] + closure_values(function)
    modules = [one for one in held if isinstance(one, ModuleType)]
    found: list[Name] = []
    seen = set[str]()
    while modules:
        module = modules.pop()
        if module.__name__ in seen or _is_library(module.__name__):
            continue
        seen.add(module.__name__)
        inner = [(name, vars(module)[name]) for name in names if name in vars(module)]
        modules += [value for _, value in inner if isinstance(value, ModuleType)]
        found += [(module.__name__, name) for name, value in inner if not isinstance(value, ModuleType)]
    return found


def _is_rewritten(module: str) -> bool:
    """True for a module whose code pytest has altered as it was imported, in this process alone."""
    loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    return type(loader).__module__.startswith("_pytest.")


def _is_generated(function: FunctionType) -> bool:
    """True for a method that attrs or a dataclass has written: some hold numbers of this process alone."""
    return function.__code__.co_filename.startswith("<")


def _written(function: FunctionType) -> set[str]:
    """The names that a function sets itself, such as counters: they differ from process to process."""
    steps = [step for code in nested_code(function.__code__) for step in dis.get_instructions(code)]
    return {step.argval for step in steps if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR")}


def _digest_of_code(function: FunctionType) -> str:
    """A digest of what a function does, wherever it stands in its file."""
    inner = [_of_code(one.__code__) for one in _functions(function)]
    defaults = [_digest(one) for one in (function.__defaults__ or (), function.__kwdefaults__ or {})]
    return hashlib.sha256(repr((inner, defaults)).encode()).hexdigest()


def _of_code(code: CodeType) -> str:
    constants = [_of_code(one) if isinstance(one, CodeType) else _of_constant(one) for one in code.co_consts]
    return repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_flags))


def _of_constant(value: Any) -> str:
    if isinstance(value, frozenset):  # whose order is another one in each process
        return f"frozenset {sorted(map(_of_constant, value))}"
    return f"({', '.join(map(_of_constant, value))})" if isinstance(value, tuple) else repr(value)


def _digest(value: Any) -> str | None:
    """A digest of a number or of many; None for anything else."""
    if type(value) in (int, float, complex, bool):
        return repr(value)
    if type(value) is tuple:
        parts = [_digest(part) for part in value]
        return None if None in parts or not parts else repr(parts)
    if isinstance(value, torch.Tensor) and not value.is_meta and value.numel() * value.itemsize < _LARGE:
        return f"{value.dtype} {tuple(value.shape)} {digest_of_bits(value.detach())}"
    if f"{type(value).__module__}.{type(value).__qualname__}" == "numpy.ndarray" and value.nbytes < _LARGE:
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return None


def other_in_module(wanted: dict[Name, str]) -> str:
    """The first name under which this process has something else, as `module.name`; empty if there is none."""
    for name, digest in wanted.items():
        value = _value_of(name)
        functions = _functions(value)
        mine = _digest_of_code(functions[0]) if functions else _digest(value)
        if value is not ... and mine != digest:
            return ".".join(name)
    return ""
