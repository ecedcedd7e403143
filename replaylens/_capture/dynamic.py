"""Does the shape of what a call gave depend on content? Known from the record, once the forward is over.

In: the nodes of a graph. Out: the same, the calls marked of which it does. Nothing is asked while the model runs: to
read a shape stays free. The tags and schemas of torch's operators decide, and a few names.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any

import torch
from attrs import evolve

from .._core.node import Call, Node, Ref, TensorMeaning, meanings_of, refs_in
from .._core.torch_private import OpOverload, OpOverloadPacket
from .._core.trees import Branch, leaves
from .._core.write import Write, original_call

Meaning = Callable[[Ref], TensorMeaning]

# What torch does not tag itself: Python spellings, and what gives or reads the stored elements of sparse tensors.
NAMES = frozenset(
    """nonzero argwhere masked_select unique unique_consecutive _unique _unique2 unique_dim unique_dim_consecutive
    bincount histogramdd _pack_padded_sequence _pad_packed_sequence coalesce _coalesced indices values _indices _values
    crow_indices col_indices ccol_indices row_indices to_sparse _to_sparse to_sparse_csr to_sparse_csc to_sparse_coo
    to_sparse_bsr to_sparse_bsc linalg_lstsq lstsq _ctc_loss sparse_resize_""".split()
)
ENDS = frozenset(("arange", "range"))
PARTED = frozenset("repeat_interleave tensor_split _nested_tensor_from_tensor_list".split())  # by a tensor of sizes
_NUMBERS = ("int", "SymInt", "number", "Scalar")  # in the words of a schema: where a tensor's content would be read


class Way(enum.Enum):
    """How content decides on a shape."""

    NEVER = "it does not"
    ALWAYS = "by its values, whatever the other arguments are"
    INDEX = "by a mask, or a slice whose ends are tensors"
    SEARCH = "by a condition alone: `where(c)`"
    PARTED = "by a second tensor, of sizes"
    CLASSES = "by the largest value, if the number of classes is not given"
    ENDS = "by any number that is a tensor"
    SIZES = "by a tensor in the place of a whole number"


def with_dynamic_shapes(nodes: list[Node]) -> list[Node]:
    """The nodes, those calls marked of which the same call on other values can give another shape."""
    places = {node.name: number for number, node in enumerate(nodes)}

    def meaning(ref: Ref) -> TensorMeaning:
        return meanings_of(nodes[places[ref.node]])[ref]

    marked = [(node, isinstance(node, Call) and _is_dynamic(node, meaning)) for node in nodes]
    return [
        evolve(node, is_dynamic=dynamic) if isinstance(node, Call) and dynamic != node.is_dynamic else node
        for node, dynamic in marked
    ]


def _is_dynamic(call: Call, meaning: Meaning) -> bool:
    if call.is_dynamic and not _is_known(call.target.function):
        return True
    for known in call.meaning:
        if known.stored is not None:
            return True
    if _keeps_shapes(call):
        return False
    way = way_of(original_call(call).target.function)
    return way is not Way.NEVER and _decides(way, call, meaning)


def _is_known(function: Any) -> bool:
    """Does a function that torch wrote in Python stand for an operator, whose schema tells?"""
    home = getattr(function, "__module__", None) or ""
    return home.startswith(("torch.nn.functional", "torch._jit_internal")) and bool(_overloads(function.__name__))


def _keeps_shapes(call: Call) -> bool:
    """A write in place that gives nothing besides what it wrote: that has the shape that it had."""
    if not isinstance(call, Write) or call.writes_out:
        return False
    return not refs_in(call.gives.result)


def _decides(way: Way, call: Call, meaning: Meaning) -> bool:
    if way is Way.NEVER:
        return False
    if way is Way.INDEX:
        return any(_by_content(item, meaning) for item in call.args[1:])
    if way is Way.ENDS:
        return bool(call.refs)
    if way is Way.SIZES:
        return any(_is_number(leaf, meaning) for leaf in _in_places_of_numbers(call))
    given = list(leaves(call.trees))
    if way is Way.SEARCH:
        return len(call.args) + len(call.kwargs) == 1
    if way is Way.PARTED:
        return len(call.refs) > 1 or not any(type(leaf) is int for leaf in given)
    if way is Way.CLASSES:
        return not any(type(leaf) is int and leaf > 0 for leaf in given)
    return True


def _by_content(index: Any, meaning: Meaning) -> bool:
    """A mask, or a slice between tensors; whole numbers only say where."""
    if type(index) is Ref:
        return meaning(index).dtype in (torch.bool, torch.uint8)
    if isinstance(index, Branch) and index.kind is slice:
        return any(type(item) is Ref for item in index.items)
    items = index.items if isinstance(index, Branch) else index if type(index) is tuple else ()
    return any(_by_content(item, meaning) for item in items)


def _is_number(leaf: Any, meaning: Meaning) -> bool:
    """A whole number that is a tensor: torch reads it where it wants a number."""
    if type(leaf) is not Ref:
        return False
    known = meaning(leaf)
    return not known.dtype.is_floating_point and not known.dtype.is_complex and prod(known.shape) == 1


def _in_places_of_numbers(call: Call) -> Iterator[Any]:
    """What stands where the operator takes numbers, or takes more than its schema has places for."""
    kinds = _kinds(call.target.function)
    for number, arg in enumerate(call.args):
        if kinds is None or number >= len(kinds[0]) or kinds[0][number]:
            yield from leaves(arg)
    for key, value in call.kwargs:
        if kinds is None or kinds[1].get(key, True):
            yield from leaves(value)


@cache
def way_of(function: Any) -> Way:
    """How content decides on the shape that a function gives."""
    is_overload = isinstance(function, OpOverload)
    name = function._schema.name.split("::")[-1] if is_overload else str(getattr(function, "__name__", ""))
    if name in ("__getitem__", "index"):
        return Way.INDEX
    if name in ("where", "one_hot"):
        return Way.SEARCH if name == "where" else Way.CLASSES
    if name.startswith("__"):  # operators and properties
        return Way.NEVER
    if name in PARTED:
        return Way.PARTED
    if name in ENDS:
        return Way.ENDS
    overloads = [function] if is_overload else _overloads(name)
    if name in NAMES or any(torch.Tag.dynamic_output_shape in overload.tags for overload in overloads):
        return Way.ALWAYS
    if overloads and all(torch.Tag.pointwise in overload.tags for overload in overloads):
        return Way.NEVER
    kinds = _kinds(function)
    return Way.SIZES if kinds is None or any((*kinds[0], *kinds[1].values())) else Way.NEVER


@cache
def _kinds(function: Any) -> tuple[tuple[bool, ...], dict[str, bool]] | None:
    """Which places of an operator take whole numbers, in order and by name; None where no schema is known."""
    is_overload = isinstance(function, OpOverload)
    overloads = [function] if is_overload else _overloads(str(getattr(function, "__name__", "")))
    if not overloads:
        return None
    by_place: dict[int, bool] = {}
    by_name: dict[str, bool] = {}
    for overload in overloads:
        for place, argument in enumerate(overload._schema.arguments):
            takes = any(word in str(argument.type) for word in _NUMBERS)
            by_place[place] = by_place.get(place, False) or takes
            by_name[argument.name] = by_name.get(argument.name, False) or takes
    return tuple(by_place.values()), by_name


def _overloads(name: str) -> list[Any]:
    """The operators of ATen that a function of this name stands for, in place or not."""
    found: list[Any] = []
    for spelling in dict.fromkeys((name, name.rstrip("_"))) if name and not name.startswith("__") else ():
        for place in (torch.ops.aten, torch.ops.prims):
            packet = getattr(place, spelling, None)
            if isinstance(packet, OpOverloadPacket):
                found.extend(getattr(packet, overload) for overload in packet.overloads())
    return [overload for overload in found if any("Tensor" in str(out.type) for out in overload._schema.returns)]
