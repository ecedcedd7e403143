"""Numbers in modules that the functions of a job read: are they in a worker what they are here?

In, here: the functions and classes that pickle sends by their names. Out: digests of the numbers and tensors that they
read of their modules. In, there: these. Out: the first that is another one. A worker imports a module anew, so what was
set in it afterwards stays behind, and the function would compute something else there without a word.
"""

from __future__ import annotations

import dis
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch

from .._capture.user_code import nested_code, reachable_functions, user_function
from .._ir.equality import digest_of_bits

Name = tuple[str, str]  # a module, and a name in it
_LIBRARIES = ("builtins", "torch", "numpy", "replaylens", "functools", "operator", "attr")
_LARGE = 1 << 26  # bytes


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


def numbers_read(things: Iterable[Any]) -> dict[Name, str]:
    """Digests of the numbers that functions and classes, and what these call in their own modules, read there."""
    named = list(things)
    modules = {thing.__module__ for thing in named}
    found: dict[Name, str] = {}
    written: set[Name] = set()
    for function in reachable_functions([inner for thing in named for inner in _functions(thing)]):
        module = str(function.__globals__.get("__name__"))
        if module in modules:
            written |= {(module, name) for name in _written(function)}
            found |= {(module, name): digest for name, digest in _read(function)}
    return {name: digest for name, digest in found.items() if name not in written}


def _functions(thing: Any) -> Iterator[FunctionType]:
    held = vars(thing).values() if isinstance(thing, type) else [thing]
    yield from [function for one in held if (function := user_function(one)) is not None]


def _read(function: FunctionType) -> Iterator[tuple[str, str]]:
    known = function.__globals__
    for name in dict.fromkeys([name for code in nested_code(function.__code__) for name in code.co_names]):
        if name in known and (digest := _digest(known[name])) is not None:
            yield name, digest


def _written(function: FunctionType) -> set[str]:
    """The globals that a function sets itself, such as counters: they differ from process to process."""
    steps = [step for code in nested_code(function.__code__) for step in dis.get_instructions(code)]
    return {step.argval for step in steps if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}


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


def other_number(wanted: dict[Name, str]) -> str:
    """The first number that is another one in this process, as `module.name`; empty if there is none."""
    for (module, name), digest in wanted.items():
        held = vars(sys.modules[module]) if module in sys.modules else {}
        if name in held and _digest(held[name]) != digest:
            return f"{module}.{name}"
    return ""
