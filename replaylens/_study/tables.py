"""Results of a study as tables and arrays of other libraries: pandas, xarray.

In: tensors by name, one entry for each variant, and what the variants are called along each axis. Out: columns of a
DataFrame, or an xarray object. Half precision is widened, since neither library has all of torch's dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._ir.trees import freeze_deep, named_items, thaw, walk
from .._ir.util import optional

Key = tuple[Any, ...]  # of a variant: a word for each axis
_WIDENED = {torch.complex32: torch.complex64}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as numpy has it: dense, on the CPU, without a history, in a dtype that numpy knows."""
    found = tensor.detach().cpu()
    found = found.dequantize() if found.is_quantized else found
    found = found if found.layout is torch.strided else found.to_dense()
    if found.is_floating_point() and found.dtype not in (torch.float16, torch.float32, torch.float64):
        found = found.float()
    return found.to(_WIDENED.get(found.dtype, found.dtype)).resolve_conj().resolve_neg()


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The same in a dtype whose differences are numbers again: those of bytes would begin anew below 0."""
    found = plain(tensor)
    if found.is_complex() or found.dtype in (torch.float32, torch.float64):
        return found
    return found.float() if found.is_floating_point() else found.long()


def parts_of(values: Any) -> dict[str, Any]:
    """The leaves of a result by their paths, `{"loss": ...}`, `{"hidden.0": ...}`; one tensor is `{"": ...}`."""
    held: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> _Held:
        held.append(tensor)
        return _Held(tensor)

    found = walk(freeze_deep(values, leaf), named_items)
    return {".".join(map(str, path)): one.tensor if type(one) is _Held else one for path, one in found}


class _Held:
    """A tensor as the leaf of a tree."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def entry_of(values: Any, number: int) -> Any:
    """One entry of a result whose tensors have the variants along their first axis."""
    if isinstance(values, torch.Tensor):
        return values[number]
    tree = freeze_deep(values, lambda tensor: _Held(tensor[number]))
    return thaw(tree, lambda leaf: leaf.tensor if type(leaf) is _Held else leaf)


def names_along(keys: Sequence[Key]) -> tuple[tuple[Any, ...], ...]:
    """For each axis the names along it."""
    return tuple([tuple(dict.fromkeys(column)) for column in zip(*keys, strict=True)])


def in_order(keys: Sequence[Key], wanted: Sequence[Key]) -> list[int] | None:
    """Where these keys are, if all are there and no others."""
    places = {key: number for number, key in enumerate(keys)}
    if len(places) != len(wanted) or not all(key in places for key in wanted):
        return None
    return [places[key] for key in wanted]


def coordinate(names: Sequence[Any]) -> Any:
    """Names along an axis as an array: of words or of whole numbers, if they are nothing else."""
    numpy = optional("numpy", "xarray")
    if {*map(type, names)} in ({str}, {int}):
        return numpy.array(names)
    made = numpy.empty(len(names), dtype=object)
    for number, name in enumerate(names):
        made[number] = name
    return made


def variable(tensor: Any, dims: Sequence[str], prefix: str, attributes: Mapping[str, Any]) -> Any:
    """An array with these axes first, as xarray takes it: dims, numbers, attributes."""
    numbers = plain(tensor).numpy()
    rest = [f"{prefix}dim_{number}" for number in range(numbers.ndim - len(dims))]
    while taken := [name for name in rest if name in dims]:
        rest = [f"{name}_" if name in taken else name for name in rest]
    return [*dims, *rest], numbers, {name: attribute(value) for name, value in attributes.items()}


def attribute(value: Any) -> Any:
    """A value as an attribute: a number or an array, if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    found = plain(value)
    return found.item() if found.numel() == 1 else found.numpy()
