"""What an extraction will write: its arrays, the rows of a shard, and the document by which it is known again.

In: the values of the first batch, and what the user asked for. Out: a Plan, pure data. Two plans that agree give the
same files to the last byte; where they differ, `differences` shows both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen

from .._ir.label import Label
from ..errors import BadSource
from .numpy_later import np
from .zarr_layout import ArrayLayout, dimension_names

SHARD_BYTES = 16 * 2**20  # of the largest array; of all arrays together at most 16 times that
SHARD_ROWS = 4096  # of small arrays: what a kill loses is at most that
STORED_AS = {torch.bfloat16: "float32", torch.complex32: "complex64"}


@frozen
class ArrayPlan:
    """One array: what is in it, and the shape of a row."""

    name: str
    layer: str
    label: str
    what: str
    reduce: str | None
    shape: tuple[int, ...]
    dtype: str
    computed_as: str  # the dtype of the values, which may have no place in a file
    axes: tuple[str | None, ...]
    is_label: bool = False

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of its axes."""
        return dimension_names(self.name, self.axes)

    def layout(self, rows: int, chunk_rows: int) -> ArrayLayout:
        """Where it lies in a zarr group."""
        return ArrayLayout((rows, *self.shape), np.dtype(self.dtype), chunk_rows, self.dims)

    @property
    def row(self) -> dict[str, Any]:
        """What the attributes say of it."""
        said = {
            "layer": self.layer,
            "what": self.what,
            "reduce": self.reduce,
            "label": self.label,
            "dims": list(self.dims),
        }
        return said | (
            {"stored_as": f"{self.dtype}, computed as {self.computed_as}"} if self.computed_as != self.dtype else {}
        )


@frozen
class Plan:
    """All arrays of an extraction, its shards, and the document that must agree for a resume."""

    arrays: tuple[ArrayPlan, ...]
    shard_rows: int
    total: int | None
    document: dict[str, Any]

    @property
    def features(self) -> tuple[ArrayPlan, ...]:
        """The arrays that are no labels."""
        return tuple([one for one in self.arrays if not one.is_label])

    def shards(self, total: int) -> int:
        """The number of shards of so many rows."""
        return math.ceil(total / self.shard_rows)

    def rows_of(self, shard: int, total: int | None = None) -> range:
        """The rows of a shard, which the last row of all cuts off."""
        first = shard * self.shard_rows
        end = first + self.shard_rows
        known = self.total if total is None else total
        return range(first, end if known is None else min(end, known))


def array_dtype(tensor: torch.Tensor, name: str) -> tuple[str, str]:
    """The dtype in which a tensor is stored, and its own."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "sparse"
        cure = "dequantize" if tensor.is_quantized else "to_dense"
        raise BadSource(f"{name} gives a {kind} tensor. Make numbers of it: reduce={{{name!r}: torch.Tensor.{cure}}}.")
    own = str(tensor.dtype).removeprefix("torch.")
    stored = STORED_AS.get(tensor.dtype, "float32" if own.startswith("float8") else own)
    try:
        np.dtype(stored)
    except TypeError:
        raise BadSource(
            f"{name} gives {tensor.dtype}, which no array can hold. Make numbers of it by reduce= or dtype=."
        ) from None
    return stored, own


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor on the host, as they are stored."""
    stored, own = array_dtype(tensor, "a layer")
    found = tensor.detach().cpu()
    if stored != own:
        found = found.to(getattr(torch, stored))
    return found.resolve_conj().resolve_neg().numpy()


def time_axes(arrays: Mapping[str, tuple[bool, int]]) -> dict[str, str]:
    """The name of the axis of the passes of each layer: `time`, unless another layer has another number of passes."""
    sizes = [size for is_series, size in arrays.values() if is_series]
    return {
        name: "time" if size == sizes[0] else f"time_of_{size}"
        for name, (is_series, size) in arrays.items()
        if is_series
    }


def shard_rows(arrays: tuple[ArrayPlan, ...], batch_rows: int, total: int | None, shard_bytes: int | None) -> int:
    """How many rows a shard has: whole batches, as many as its bytes allow."""
    most = int(shard_bytes or SHARD_BYTES)
    largest = max([one.row_bytes for one in arrays], default=1) or 1
    every = sum([one.row_bytes for one in arrays]) or 1
    rows = min(most // largest, 16 * most // every, SHARD_ROWS)
    rows = max(rows - rows % batch_rows, batch_rows)
    return rows if total is None else max(1, min(rows, total))


def require_shard_bytes(given: Any) -> None:
    """Raise unless `shard_bytes=` is a number of bytes."""
    if given is not None and (not isinstance(given, (int, float)) or isinstance(given, bool) or not given >= 1):
        raise ValueError(f"shard_bytes= is the size of a shard in bytes, such as 16_000_000, not {given!r:.60}.")


def differences(begun: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Lines that show where two documents differ: what was begun, and what is asked for."""
    one, other = dict(_lines(begun)), dict(_lines(asked))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return [f"{key}: begun with {_shown(one.get(key))}, asked for {_shown(other.get(key))}" for key in keys]


def _lines(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _lines(one, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def pass_of(name: str) -> str:
    """The layer of a name, without its pass."""
    return Label.of(name).layer
