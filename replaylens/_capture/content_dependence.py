"""Which calls depend on content in more than their values: in the shape they give, or in whether they raise.

In: the nodes of a Graph, once the forward is over. Out: the nodes, marked where the same call on other values can give
another shape; and completion guards, for calls that can raise on other values and whose result nothing needs (the model
may catch what they raise). Nothing is asked while the model runs: reading a shape stays free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
from attrs import evolve

from .._ir.node import Call, Guard, Node, Ref, TensorSpec, refs_in, specs_of
from .._ir.ops import OpInfo, Quirk, op_info
from .._ir.trees import Branch, leaves
from .._ir.write import Write, is_wrapper, original_call, original_target

Meaning = Callable[[Ref], TensorSpec]


def with_dynamic_shapes(nodes: list[Node]) -> list[Node]:
    """The nodes; `is_dynamic` is set on each call that can give another shape on other values."""
    places: dict[str, int] = {}

    def spec(ref: Ref) -> TensorSpec:
        if not places:
            places.update((node.name, number) for number, node in enumerate(nodes))
        return specs_of(nodes[places[ref.node]])[ref]

    made = list(nodes)
    for number, node in enumerate(nodes):
        if isinstance(node, Call) and (dynamic := _is_dynamic(node, spec)) != node.is_dynamic:
            made[number] = evolve(node, is_dynamic=dynamic)
    return made


def _is_dynamic(call: Call, spec: Meaning) -> bool:
    if call.is_dynamic and not _is_known(call.target.function):
        return True
    for known in call.spec:
        if known.stored is not None:
            return True
    if type(call) is Call and _never_decides(call.target.function, len(call.args), tuple([k for k, _ in call.kwargs])):
        return False
    if _keeps_shapes(call):
        return False
    function = original_call(call).target
    op = op_info(function)
    is_operator = function.is_property or function.short.startswith("__")  # of Python's
    return (not is_operator or op.has(Quirk.SHAPE_BY_INDEX)) and _decides(op, call, spec)


_SHAPE_RULES = frozenset(quirk for quirk in Quirk if quirk.name.startswith("SHAPE_BY_"))


def _is_known(function: Any) -> bool:
    """True if a function written in Python by torch stands for an operator, whose schema tells its shape."""
    home = getattr(function, "__module__", None) or ""
    return home.startswith(("torch.nn.functional", "torch._jit_internal")) and bool(op_info(function).giving)


@lru_cache(maxsize=65536)
def _never_decides(function: Any, count: int, keys: tuple[str, ...]) -> bool:
    """True if content decides the shape of no call of a function with so many arguments, and others by these names: it
    takes no number there that could be a tensor. One answer does for most calls of a program.
    """
    op = op_info(function)
    if is_wrapper(function) or _SHAPE_RULES & op.quirks or op.has_dynamic_shape:
        return False
    return op.is_pointwise or not any(_takes_number(op, place) for place in (*range(count), *keys))


def _keeps_shapes(call: Call) -> bool:
    """True for a write in place that gives nothing besides its targets: these keep their shape."""
    if not isinstance(call, Write) or call.writes_out:
        return False
    return not refs_in(call.gives.result)


def _decides(op: OpInfo, call: Call, spec: Meaning) -> bool:
    if not _SHAPE_RULES & op.quirks:
        if op.has_dynamic_shape or op.is_pointwise:
            return op.has_dynamic_shape
        return any(_is_number(leaf, spec) for leaf in _in_places_of_numbers(call))
    if op.has(Quirk.SHAPE_BY_INDEX):
        return any(_by_content(item, spec) for item in call.args[1:])
    if op.has(Quirk.SHAPE_BY_ENDS):
        return bool(call.refs)
    if op.has(Quirk.SHAPE_BY_CONDITION):
        return len(call.args) + len(call.kwargs) == 1
    numbers = [leaf for leaf in leaves(call.trees) if type(leaf) is int]
    if op.has(Quirk.SHAPE_BY_SIZES):
        return len(call.refs) > 1 or not numbers
    return op.has(Quirk.SHAPE_BY_LARGEST) and not any(number > 0 for number in numbers)


def _by_content(index: Any, spec: Meaning) -> bool:
    """True for a mask, or a slice whose ends are tensors; index tensors do not decide a shape."""
    if type(index) is Ref:
        return spec(index).dtype in (torch.bool, torch.uint8)
    if isinstance(index, Branch) and index.kind is slice:
        return any(type(item) is Ref for item in index.items)
    items = index.items if isinstance(index, Branch) else index if type(index) is tuple else ()
    return any(_by_content(item, spec) for item in items)


def _is_number(leaf: Any, spec: Meaning) -> bool:
    """True for a whole number that is a tensor: torch reads its content where it takes a number."""
    if type(leaf) is not Ref:
        return False
    known = spec(leaf)
    return not known.dtype.is_floating_point and not known.dtype.is_complex and prod(known.shape) == 1


def _in_places_of_numbers(call: Call) -> Iterator[Any]:
    """The arguments where the operator takes numbers, and those that its schema has no place for."""
    op = op_info(call.target)
    given: tuple[tuple[int | str, Any], ...] = (*enumerate(call.args), *call.kwargs)
    for place, arg in given:
        if _takes_number(op, place):
            yield from leaves(arg)


def _takes_number(op: OpInfo, place: int | str) -> bool:
    """True if an argument of an operator, by place or name, can be a whole number; or if its schema has none there."""
    return _places_of_numbers(op).get(place, True)


_NUMBERS = ("int", "SymInt", "number", "Scalar")  # in the words of a schema


@cache
def _places_of_numbers(op: OpInfo) -> dict[int | str, bool]:
    """Whether each argument of an operator takes whole numbers, by place and by name."""
    found: dict[int | str, bool] = {}
    for overload in op.giving:
        for number, argument in enumerate(overload._schema.arguments):
            takes = any(word in str(argument.type) for word in _NUMBERS)
            for place in (number, argument.name):
                found[place] = found.get(place, False) or takes
    return found


def completions(nodes: list[Node], needed: Iterable[str], catches: bool) -> Iterator[Guard]:
    """A guard for each call that can raise and that nothing needed depends on. `catches`: the model catches exceptions;
    otherwise calls that raise by layout or flags alone are left out.
    """
    raising = [(n, node) for n, node in enumerate(nodes) if isinstance(node, Call) and _can_raise(node, catches)]
    if not raising:
        return
    alive = set(needed)
    for node in reversed(nodes):
        if node.name in alive and isinstance(node, Call):
            alive.update(ref.node for ref in node.refs)
    for number, node in raising:
        if node.name not in alive and not node.is_dynamic:
            yield Guard(
                node.target,
                tuple(specs_of(node)),
                has_result=True,
                kind="completion",
                position=number + 1,
                scope=node.scope,
                source=node.source,
            )


def _can_raise(call: Call, by_layout: bool) -> bool:
    if by_layout and isinstance(call, Write) and call.writes_out:
        return True
    ways = _ways_to_raise(original_target(call).function)
    if not ways or (call.target.short == "__getitem__" and len(call.refs) == 1):  # by whole numbers and slices
        return False
    if Quirk.CAN_RAISE in ways or (by_layout and Quirk.CAN_RAISE_BY_LAYOUT in ways):
        return True
    return Quirk.CAN_RAISE_ON_INTEGERS in ways and not any(spec.is_differentiable for spec in call.spec)


@lru_cache(maxsize=65536)
def _ways_to_raise(function: Any) -> frozenset[Quirk]:
    return op_info(function).quirks & _RAISING


_RAISING = frozenset((Quirk.CAN_RAISE, Quirk.CAN_RAISE_BY_LAYOUT, Quirk.CAN_RAISE_ON_INTEGERS))
