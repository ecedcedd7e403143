"""An ATen call reduced to what it computes, so that a program's calls and the model's own can be counted against
each other.

In: an operator and its arguments. Out: a Kernel: what sort of work it is, its name without the marks of writing, the
shapes and dtypes of the tensors that it reads.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from .._core.node import TensorMeaning
from .._core.ops import Quirk, info, stems
from .._core.torch_private import OpOverload


class Sort(enum.Enum):
    """What an ATen call is for. Only the first four are counted."""

    COMPUTE = "computes"
    CAST = "changes a dtype or a device"
    FILL = "fills memory with one number"
    READ = "hands content to Python"
    MOVE = "looks at memory, copies it or allocates it"


class Kernel(NamedTuple):
    """A call without what purity may change of it: `add_.Tensor` and `add.out` are `add` of the same operands."""

    sort: Sort
    name: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.operands)})"


QUIET = frozenset(("profiler",))  # namespaces of operators that only look on
UNSAFE = ("_unsafe_", "unsafe_")  # views that autograd may not see through


def kernel_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Kernel:
    """What a call was. `out` is what it gave."""
    if not isinstance(op, OpOverload):  # a higher-order operator
        return Kernel(Sort.COMPUTE, op.name(), tuple(map(described, _tensors((args, kwargs)))))
    sort, name = reduced(op)
    if sort is Sort.FILL:
        return Kernel(sort, "fill", tuple(map(described, _tensors(out))))
    operands = tuple(map(described, _operands(op, args, kwargs)))
    if sort is Sort.MOVE and info(name).has(Quirk.COPY) and (cast := _cast(name, args, out)):
        return Kernel(Sort.CAST, "cast", cast)
    return Kernel(sort, name, operands)


@cache
def reduced(op: Any) -> tuple[Sort, str]:
    """What sort of work an operator does, and its name without the marks of writing."""
    namespace, name = op._schema.name.split("::")
    name = _unmarked(namespace, name) if op._schema.is_mutable else name
    plain = info(name.removeprefix("new_").removesuffix("_like"))
    if plain.has(Quirk.FILL):
        return Sort.FILL, "fill"
    is_move = plain.has(Quirk.ALLOCATION) or info(name).has(Quirk.COPY) or info(op).reshapes
    if is_move or _is_view(namespace, op, name):
        return Sort.MOVE, name
    if op._schema.is_mutable or any("Tensor" in str(value.type) for value in op._schema.returns):
        return Sort.COMPUTE, name
    reads = namespace not in QUIET and (namespace != "aten" or info(op).is_data_dependent)
    return (Sort.READ if reads else Sort.MOVE), name


def _unmarked(namespace: str, name: str) -> str:
    """`add` for `add_`, `__and__` for `__iand__`, where there is such an operator."""
    return next((stem for stem in stems(name) if stem != name and hasattr(getattr(torch.ops, namespace), stem)), name)


def _is_view(namespace: str, op: Any, name: str) -> bool:
    """Does it look at an argument's memory, or copy what a view of it would show, or write there?"""
    plain = [name.removesuffix("_copy"), name.removesuffix("_scatter"), *(name.removeprefix(mark) for mark in UNSAFE)]
    viewing = [getattr(getattr(torch.ops, namespace), one, None) for one in plain if one != name]
    return info(op).gives_view or any(one is not None and info(one).gives_view for one in viewing)


def _cast(name: str, args: tuple[Any, ...], out: Any) -> tuple[str, ...]:
    """From what to what a copy takes numbers; nothing where they stay as they are."""
    source = args[1] if name == "copy" and len(args) > 1 else args[0] if args else None
    if not isinstance(source, torch.Tensor) or not isinstance(out, torch.Tensor):
        return ()
    same = source.dtype == out.dtype and source.device == out.device
    return () if same or out.is_meta else (described(source), str(out.dtype).removeprefix("torch."), str(out.device))


def _operands(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call reads, in the order of its schema: all but those that `out=` names."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.is_out:
            continue
        yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def described(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, in short."""
    return str(TensorMeaning.of(tensor))
