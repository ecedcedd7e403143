"""What arguments a function takes, as far as anything knows: a Python function's own signature, torch's schema.

In: any callable. Out: its parameters in order, or None. Torch's names for one thing (`self` and `input`, `train` and
`training`) are one name here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

from .._core.ops import info

_SAME = {"self": "input", "train": "training"}


@frozen
class Parameter:
    """One argument that a function takes."""

    name: str  # as it is written in a call
    meaning: str  # one name for what torch calls by several
    is_needed: bool
    by_name_only: bool = False
    is_rest: bool = False  # *args

    @staticmethod
    def of(name: str, is_needed: bool, by_name_only: bool = False, is_rest: bool = False) -> Parameter:
        return Parameter(name, meaning(name), is_needed, by_name_only, is_rest)


def meaning(name: str) -> str:
    return _SAME.get(name, name)


def parameters(function: Callable[..., Any], tensors: int = 1) -> tuple[Parameter, ...] | None:
    """What a function takes; of a torch function with several forms the one that begins with so many tensors."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    found = _of_signature(function)
    if found is not None and not all(one.is_rest or one.by_name_only for one in found):
        return found
    return _of_schema(function, tensors) or _of_overrides(function) or found


def _of_signature(function: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    listed = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
    return tuple(
        [
            Parameter.of(
                one.name,
                one.default is one.empty and one.kind != one.VAR_POSITIONAL,
                one.kind == one.KEYWORD_ONLY,
                one.kind == one.VAR_POSITIONAL,
            )
            for one in listed
        ]
    )


def _of_schema(function: Callable[..., Any], tensors: int) -> tuple[Parameter, ...] | None:
    """By the name of a torch function: its form that begins with this number of tensors, else its first."""
    word = getattr(function, "__name__", "").strip("_")
    module = getattr(function, "__module__", None) or getattr(getattr(function, "__objclass__", None), "__module__", "")
    if not word or not str(module or "torch").startswith("torch"):
        return None
    forms = [[one for one in overload._schema.arguments if one.name != "out"] for overload in info(word).overloads]
    fitting = [form for form in forms if all("Tensor" in str(argument.type) for argument in form[:tensors])]
    if not forms:
        return None
    form = next((one for one in fitting if len(one) >= tensors), forms[0])
    return tuple([Parameter.of(a.name, not a.has_default_value(), a.kwarg_only) for a in form])


def _of_overrides(function: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    """The signature that torch itself keeps of it, to test that it can be overridden."""
    known = torch.overrides.get_testing_overrides().get(function)
    return _of_signature(known) if known is not None else None
