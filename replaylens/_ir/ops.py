"""The operator book: what is known of a torch function, from its schemas, its tags, and `quirks.py`.

In: a function, a method, a property, an operator, a Target, or a name. Out: an OpInfo, computed at the first question
and cached. New operators of torch or of a library are treated rightly by their schemas and tags, without a line here;
`quirks.py` says how to add what these do not tell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from attrs import Factory, field, frozen

from .quirks import UNLIKE_THEIR_SCHEMAS, Quirk as Quirk
from .target import Target
from .torch_private import OpOverload, OpOverloadPacket, has_kernel

_MOVING: frozenset[Quirk] = frozenset(
    (Quirk.FREE, Quirk.COPY, Quirk.COPY_OR_VIEW, Quirk.FILL, Quirk.ALLOCATION, Quirk.PART)
)


def _by(fact: Callable[[OpInfo], Any]) -> Any:
    return field(init=False, repr=False, default=Factory(fact, takes_self=True))


@frozen(eq=False)
class OpInfo:
    """What is known of one torch function."""

    name: str
    is_torchs: bool  # else a library's: what is known of torch's names does not apply
    overloads: tuple[Any, ...]  # ATen's under its name, or its own
    packet: tuple[Any, ...]  # all overloads of that name, as tags may be on others
    quirks: frozenset[Quirk] = _by(lambda op: _quirks(op))
    giving: tuple[Any, ...] = _by(lambda op: tuple(filter(_gives_tensors, op.overloads)))  # without those with `out=`
    tags: str = _by(lambda op: str([one.tags for one in op.overloads]))
    is_pointwise: bool = _by(lambda op: bool(op.giving) and all("pointwise" in str(one.tags) for one in op.giving))
    is_reduction: bool = _by(lambda op: "Tag.reduction" in op.tags)
    draws: bool = _by(lambda op: "nondeterministic_seeded" in op.tags)
    writes: bool = _by(lambda op: any(one._schema.is_mutable for one in op.overloads))
    writes_others: bool = _by(lambda op: any(map(_writes_others, op.overloads)))  # than its first argument and `out=`
    is_in_place: bool = _by(lambda op: _is_in_place(op.name))
    reshapes: bool = _by(lambda op: op.is_in_place and "inplace_view" in op.tags)  # and keeps the content
    gives_view: bool = _by(lambda op: any(_is_view(out) for one in op.overloads for out in one._schema.returns))
    gives_several_views: bool = _by(lambda op: op.has(Quirk.SPLITTING) or any(map(_splits, op.giving)))
    returns_fresh: bool = _by(lambda op: not op.draws and _returns_fresh(op))
    has_dynamic_shape: bool = _by(
        lambda op: op.has(Quirk.DYNAMIC_SHAPE) or any("dynamic_output" in str(one.tags) for one in op.packet)
    )
    is_data_dependent: bool = _by(lambda op: op.has(Quirk.DATA_DEPENDENT) or "data_dependent" in op.tags)
    reads_content: bool = _by(lambda op: op.has(Quirk.READS_CONTENT) or op.is_data_dependent)
    reads_shape_of_first: bool = _by(
        lambda op: op.has(Quirk.SHAPE_OF_FIRST) or op.name.endswith("_like") or op.name.startswith("new_")
    )
    reads_shape_of_second: bool = _by(lambda op: op.has(Quirk.SHAPE_OF_SECOND) or op.name.endswith("_as"))
    is_free: bool = _by(lambda op: bool(_MOVING & op.quirks) or op.reads_shape_of_first or op.gives_view)

    def has(self, quirk: Quirk) -> bool:
        """True if the function is in this group."""
        return quirk in self.quirks

    def given(self, word: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
        """The value that a call passes for an argument, by its name in the schema."""
        places = [argument.name for one in self.overloads[:1] for argument in one._schema.arguments]
        place = places.index(word) if word in places else len(args)
        return args[place] if place < len(args) else kwargs.get(word, default)


def op_info(function: Any) -> OpInfo:
    """What is known of a function, of a Target, or of a name."""
    if type(function) is Target:
        function = function.function
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return _of_operator(function)
    if type(function) is not str:
        is_property = getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__")
        owner = getattr(function.__self__, "fget", function.__self__) if is_property else function
        function = str(getattr(owner, "__name__", ""))
    return _of_name(function)


def kind_of(name: str) -> str:
    """What people call an operation: `maxpool2d` for `max_pool2d`, `getitem` for `__getitem__`, `add` for `add_`."""
    return name.replace("_", "").lower() or "call"


def op_info_of_kind(kind: str) -> OpInfo:
    """What is known of the function that people call so."""
    return _of_name(_by_kind().get(kind, kind))


@cache
def _by_kind() -> dict[str, str]:
    """The shortest name of each kind: `add` of `add`, `add_` and `__add__`."""
    names = {name for place in (torch.nn.functional, torch, torch.Tensor, torch.ops.aten) for name in dir(place)}
    names.update(name for quirk in Quirk for name in quirk.names)
    return {kind_of(name): name for name in sorted(names, key=lambda name: (-len(name), name))}


@cache
def _of_name(name: str) -> OpInfo:
    found: tuple[Any, ...] = ()
    for place in (torch.ops.aten, torch.ops.prims):
        packets = [getattr(place, stem, None) for stem in dict.fromkeys(stems(name))]
        found = found or tuple([one for packet in packets for one in _overloads(packet)])
    return OpInfo(name, True, found, found)


@cache
def _of_operator(operator: Any) -> OpInfo:
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    namespace, name = packet._qualified_op_name.split("::")
    every = _overloads(packet)
    return OpInfo(name, namespace in _TORCHS, every if packet is operator else (operator,), every)


_TORCHS = ("aten", "prim", "prims")


def _overloads(packet: Any) -> tuple[Any, ...]:
    is_packet = isinstance(packet, OpOverloadPacket)
    return tuple([getattr(packet, overload) for overload in packet.overloads()]) if is_packet else ()


def _quirks(op: OpInfo) -> frozenset[Quirk]:
    known = (op.name, *stems(op.name)) if op.is_torchs else ()
    names = {*known, *(name.removeprefix("linalg_") for name in known)}
    return frozenset([quirk for quirk in Quirk if not names.isdisjoint(quirk.names)])


def stems(name: str) -> tuple[str, ...]:
    """An operation's name without the marks of writing and of Python operators: `add` for `add_` and `__iadd__`."""
    if not name.startswith("__") or name == "__index__":  # which gives a number, and is not `index`
        return name, name.rstrip("_") if name != "__index__" else name
    plain = f"__{name[3:]}"
    plain = plain if hasattr(torch.Tensor, plain) else name
    return plain, plain.strip("_")


def _is_in_place(name: str) -> bool:
    if not name.startswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))


_FRESH = frozenset((Quirk.ONE_KERNEL, Quirk.KERNEL_BY_PRODUCTS, Quirk.ATTENTION))
# Composites; and kernels for sparse tensors, whose results may share indices with their arguments.
_MAY_ALIAS = ("CompositeImplicitAutograd", "SparseCPU", "SparseCsrCPU")


def _returns_fresh(op: OpInfo) -> bool:
    """True if its output is new memory whatever it is given. The schema of a single kernel says if it returns an alias;
    that of a composite function does not.
    """
    if op.name.startswith("__") or _FRESH & op.quirks:
        return not op.name.startswith("__")
    is_alike = not any(family in op.name for family in UNLIKE_THEIR_SCHEMAS)
    is_plain = not (op.name.startswith("_") or op.is_in_place or op.has(Quirk.UNDEFINED))
    return is_alike and is_plain and bool(op.giving) and all(map(_is_fresh, op.giving))


def _is_fresh(overload: Any) -> bool:
    schema = overload._schema
    reads = any("Tensor" in str(argument.type) for argument in schema.arguments)
    if not reads or schema.is_mutable or any(out.alias_info is not None for out in schema.returns):
        return False
    try:
        return not any(has_kernel(overload.name(), key) for key in _MAY_ALIAS)
    except RuntimeError:  # one of TorchScript's alone
        return False


def _writes_others(overload: Any) -> bool:
    others = overload._schema.arguments[1:]
    return not _writes_out(overload) and any(one.alias_info is not None and one.alias_info.is_write for one in others)


def _writes_out(overload: Any) -> bool:
    return any(argument.is_out for argument in overload._schema.arguments)


def _is_view(out: Any) -> bool:
    return out.alias_info is not None and not out.alias_info.is_write


def _splits(overload: Any) -> bool:
    schema = overload._schema
    is_of_one = bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor"
    return is_of_one and any(_is_view(out) and "List" in str(out.type) for out in schema.returns)


def _gives_tensors(overload: Any) -> bool:
    return not _writes_out(overload) and any("Tensor" in str(out.type) for out in overload._schema.returns)
