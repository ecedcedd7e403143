"""The arguments of a recorded call, and how another function in its place is given them.

In: a recorded call and a function. Out: the function's arguments as trees of Refs. It gets the tensors that the call
computes with, in order. What else the call was given (parameters and buffers, numbers, flags) it gets by name, where
its signature has that name: `dim` of a softmax, `kernel_size` of a pooling, `weight` and `bias` of a linear layer.
Signatures are those of Python functions and of torch's schemas, whose pairs of names for one thing (`self` and `input`,
`train` and `training`) are treated as one name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen

from .._ir.graph import Graph
from .._ir.node import Call, Ref, State, refs_in
from .._ir.ops import op_info
from ..errors import BadEdit

_SAME = {"self": "input", "train": "training"}


@frozen
class SignatureParameter:
    """One argument that a function takes."""

    name: str  # as it is written in a call
    canonical: str  # one name for what torch calls by several
    is_needed: bool
    by_name_only: bool = False
    is_rest: bool = False  # *args

    @staticmethod
    def of(name: str, is_needed: bool, by_name_only: bool = False, is_rest: bool = False) -> SignatureParameter:
        return SignatureParameter(name, canonical(name), is_needed, by_name_only, is_rest)


def canonical(name: str) -> str:
    """One name for what torch calls by several."""
    return _SAME.get(name, name)


def parameters(function: Callable[..., Any], tensors: int = 1) -> tuple[SignatureParameter, ...] | None:
    """What a function takes; for a torch function with several overloads, the one that begins with this
    many tensors.
    """
    if isinstance(function, torch.nn.Module):
        function = function.forward
    found = _of_signature(function)
    if found is not None and not all(one.is_rest or one.by_name_only for one in found):
        return found
    return _of_schema(function, tensors) or _of_overrides(function) or found


def _of_signature(function: Callable[..., Any]) -> tuple[SignatureParameter, ...] | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    listed = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
    return tuple(
        [
            SignatureParameter.of(
                one.name,
                one.default is one.empty and one.kind != one.VAR_POSITIONAL,
                one.kind == one.KEYWORD_ONLY,
                one.kind == one.VAR_POSITIONAL,
            )
            for one in listed
        ]
    )


def _of_schema(function: Callable[..., Any], tensors: int) -> tuple[SignatureParameter, ...] | None:
    """By the name of a torch function: its overload that begins with this many tensors, else its first."""
    word = getattr(function, "__name__", "").strip("_")
    module = getattr(function, "__module__", None) or getattr(getattr(function, "__objclass__", None), "__module__", "")
    if not word or not str(module or "torch").startswith("torch"):
        return None
    forms = [[one for one in overload._schema.arguments if one.name != "out"] for overload in op_info(word).overloads]
    fitting = [form for form in forms if all("Tensor" in str(argument.type) for argument in form[:tensors])]
    if not forms:
        return None
    form = next((one for one in fitting if len(one) >= tensors), forms[0])
    return tuple([SignatureParameter.of(a.name, not a.has_default_value(), a.kwarg_only) for a in form])


def _of_overrides(function: Callable[..., Any]) -> tuple[SignatureParameter, ...] | None:
    """The signature that torch itself keeps to test that a function can be overridden."""
    known = torch.overrides.get_testing_overrides().get(function)
    return _of_signature(known) if known is not None else None


_NEVER = frozenset(("inplace", "out"))  # the new value is a value of its own


@frozen
class Arguments:
    """Arguments as trees of Refs and literals."""

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def in_order(self) -> tuple[Ref, ...]:
        """The values among them, in order."""
        return tuple(refs_in((self.args, tuple(value for _, value in self.kwargs))))

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The values among them, each once."""
        return tuple(dict.fromkeys(self.in_order))


@frozen
class _GivenArgument:
    """One argument of a recorded call."""

    name: str  # "" where nothing knows it
    tree: Any
    has_tensor: bool
    is_computed: bool  # not parameters and buffers alone


def arguments_for(graph: Graph, call: Call, function: Callable[..., Any], with_args: bool = True) -> Arguments:
    """The arguments of a function in the place of a call; without `with_args` only the tensors that the call computes
    with.
    """
    given = given_to(graph, call)
    computed = tuple([one.tree for one in given if one.is_computed])
    accepted = parameters(function, len(computed))
    if accepted is None or not with_args:
        return Arguments(computed)
    accepted = tuple([one for one in accepted if one.name not in _NEVER])
    positional = [one for one in accepted if not one.by_name_only and not one.is_rest]
    named = _by_name(given, (*positional[len(computed) :], *(one for one in accepted if one.by_name_only)))
    filled = {one.name for one in positional[: len(computed)]} | set(named)
    missing = [one.name for one in accepted if one.is_needed and one.name not in filled]
    roomy = any(one.is_rest for one in accepted) or len(computed) <= len(positional)
    if roomy and not missing:
        return Arguments(computed, tuple(named.items()))
    tensors = tuple([one.tree for one in given if one.has_tensor])
    needed = sum(one.is_needed for one in positional)
    if len(computed) < len(tensors) <= len(positional) and needed <= len(tensors):
        return Arguments(tensors)
    raise BadEdit(_misfit_text(call, function, given, positional, missing))


def _by_name(given: Iterable[_GivenArgument], wanted: Iterable[SignatureParameter]) -> dict[str, Any]:
    known = {one.name: one.tree for one in given if one.name and not one.is_computed}
    found = {one.name: known[one.canonical] for one in wanted if one.canonical in known}
    return {name: tree for name, tree in found.items() if tree is not None}


def given_to(graph: Graph, call: Call) -> tuple[_GivenArgument, ...]:
    """The arguments of a call, with their names in its signature."""
    count = sum(bool(refs_in(arg)) for arg in call.args)
    names = [one.canonical for one in parameters(call.target.function, count) or () if not one.is_rest]
    pairs = [(names[n] if n < len(names) else "", tree) for n, tree in enumerate(call.args)]
    pairs += [(canonical(key), tree) for key, tree in call.kwargs]
    found = []
    for name, tree in pairs:
        refs = refs_in(tree)
        is_computed = any(not isinstance(graph[ref.node], State) for ref in refs)
        found.append(_GivenArgument(name, tree, bool(refs), is_computed))
    return tuple(found)


def _misfit_text(
    call: Call,
    function: Callable[..., Any],
    given: Iterable[_GivenArgument],
    positional: list[SignatureParameter],
    missing: list[str],
) -> str:
    computed = [", ".join(map(str, refs_in(one.tree))) for one in given if one.is_computed]
    others = [one.name for one in given if one.name and not one.is_computed]
    number = f"{len(positional)} argument{'s' * (len(positional) != 1)}"
    takes = f"needs {', '.join(missing)} besides" if missing else f"takes {number} that can be a tensor"
    return (
        f"{call.name} computes with {', '.join(computed) or 'no tensor'}; "
        f"{function_name(function)} {takes}.\n"
        f"By name it can have {', '.join(others) or 'nothing'}. Wrap it in a lambda that takes what there is."
    )


def function_name(function: Callable[..., Any]) -> str:
    """What people call a function: `gelu`, `lambda`, `Linear`."""
    inner = getattr(function, "func", function)
    word = getattr(inner, "__name__", type(inner).__name__)
    return str(word).strip("<>")
