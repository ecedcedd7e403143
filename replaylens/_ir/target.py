"""A callable and the stable dotted name by which it is found again.

In: any callable that a model called. Out: a Target, equal to every other Target of the same name. What the call means
to the program (is it pure, does it draw) is not known here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from attrs import field, frozen

from ..errors import UnresolvedTarget
from .torch_private import OPERATOR_PLACES, OpOverload, OpOverloadPacket

_PLACES = (
    ("torch.Tensor", torch.Tensor),
    ("torch.nn.functional", torch.nn.functional),
    ("torch", torch),
    *OPERATOR_PLACES,
)


@frozen
class Target:
    """A function by its name. `Target.of(torch.relu).function is torch.relu`."""

    name: str
    function: Callable[..., Any] = field(eq=False, repr=False)
    is_stable: bool = field(default=True, eq=False, repr=False)

    @staticmethod
    def of(function: Callable[..., Any] | Target) -> Target:
        """The target of a function. Targets are cached for good."""
        return function if isinstance(function, Target) else _target_of(function)

    @staticmethod
    def named(name: str) -> Target:
        """The target that a name leads to, as after loading a saved program."""
        return Target(name, resolve(name))

    @property
    def short(self) -> str:
        """The last word of the name: `relu` for `torch.relu`, `T` for the property `torch.Tensor.T.__get__`."""
        return _short(self.name)

    @property
    def is_property(self) -> bool:
        return self.name.endswith(".__get__")

    @property
    def is_of_a_library(self) -> bool:
        """True for an operator in one of `torch.ops`' namespaces for libraries. It may have the name of one of torch's
        own, and mean something else.
        """
        return self.name.startswith("torch.ops.") and not self.name.startswith(("torch.ops.aten.", "torch.ops.prims."))


@lru_cache(maxsize=65536)
def _short(name: str) -> str:
    parts = name.split(".")
    if parts[-1] == "__get__":
        return parts[-2]
    return parts[3] if name.startswith("torch.ops.") and len(parts) > 3 else parts[-1]


def resolve(name: str) -> Callable[..., Any]:
    """The function that a dotted name leads to: the longest importable module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        try:
            for part in parts[cut:]:
                found = getattr(found, part)
        except AttributeError:
            continue
        return found
    raise UnresolvedTarget(f"no function is found under the name {name!r}. Import the module that defines it first.")


@lru_cache(maxsize=65536)
def _target_of(function: Callable[..., Any]) -> Target:
    for name in _candidates(function):
        try:
            found = resolve(name)
        except (UnresolvedTarget, AttributeError):
            continue
        if found is function or (name.endswith(("__get__", ".apply")) and found == function):
            return Target(name, function)
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module and qualified:
        return Target(f"{module}.{qualified}", function, is_stable=False)
    name = next((name for name in _candidates(function) if name.endswith(".apply")), repr(function))
    return Target(name, function, is_stable=False)


def _candidates(function: Any) -> list[str]:
    owner = getattr(function, "__self__", None)
    word = getattr(function, "__name__", "")
    if word in ("__get__", "__set__", "__delete__"):
        return [f"torch.Tensor.{getattr(owner, '__name__', '')}.{word}"]
    if isinstance(function, OpOverload):
        packet, overload = function._schema.name.replace("::", "."), function._overloadname
        return [f"torch.ops.{packet}.{overload}"]
    if isinstance(function, OpOverloadPacket):
        return [f"torch.ops.{function._qualified_op_name.replace('::', '.')}"]
    if word == "apply" and isinstance(owner, type):
        return [f"{owner.__module__}.{owner.__qualname__}.apply"]
    named = [f"{place}.{word}" for place, where in _PLACES if getattr(where, word, None) is function]
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module and qualified and "<" not in qualified:
        named.append(f"{module}.{qualified}")
    return named
