"""LazyArray: an array in files, cut along its first axis, that is indexed as numpy indexes and read where it is asked.

In: where its chunks are, and an index. Out: an array of numpy's with what was asked for, a copy of its own. Only chunks
that hold rows of it are opened, by mapping them, so that only the pages asked for are read. Of files of other kinds,
and of what the numbers are, nothing is known here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from attrs import field, frozen

from ..errors import BadFeatures, BadFile
from .numpy_later import np
from .zarr_layout import ArrayLayout, fill_value, is_time

Array: TypeAlias = "np.ndarray[Any, Any]"


class Chunks(Protocol):
    """Where the chunks of an array are."""

    def chunk(self, number: int) -> Array | None:
        """The rows of a chunk, perhaps with more below them; None if they are not there yet."""
        ...


@frozen(eq=False)
class InMemory:
    """An array as its only chunk."""

    values: Array

    def chunk(self, number: int) -> Array | None:
        """All rows."""
        return self.values


@frozen(eq=False)
class ChunkFiles:
    """The chunks of one array of a zarr group: a file each, plain C bytes."""

    folder: Path
    layout: ArrayLayout
    is_complete: bool

    def chunk(self, number: int) -> Array | None:
        """The rows of a chunk as they lie in its file."""
        assert self.layout.dtype is not None
        path, shape = self.folder / self.layout.chunk_path(number), self.layout.chunk_shape
        dtype = self.layout.dtype.newbyteorder("<")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            if self.is_complete:
                raise BadFile(f"{path} is missing, and the features are said to be complete. {_CURE}") from None
            return None
        if size != math.prod(shape) * dtype.itemsize:
            raise BadFile(f"{path} holds {size} bytes, and a chunk of {shape} {dtype.name} has others. {_CURE}")
        return np.memmap(path, dtype, "r", shape=shape).view(np.ndarray) if size else np.empty(shape, dtype)


_CURE = "Extract them again with overwrite=True."


@frozen(eq=False)
class OneStep:
    """One step of arrays whose second axis is time."""

    chunks: Chunks
    step: int

    def chunk(self, number: int) -> Array | None:
        """The rows of a chunk at this step."""
        found = self.chunks.chunk(number)
        return None if found is None else found[:, self.step]


@frozen(eq=False, repr=False)
class LazyArray:
    """The values of a layer for all stimuli, read from files where they are asked for: `array[:10]`, `array[mask, 3]`.

    Any index that numpy takes gives the array that numpy gives. `numpy.asarray(array)` reads all of it, `.chunks()`
    piece by piece, `.torch()` gives a tensor. Rows that an unfinished extraction has not come to are NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...]
    chunk_rows: int
    _chunks: Chunks = field(alias="chunks")

    @classmethod
    def of(cls, name: str, values: Array, dims: tuple[str, ...]) -> LazyArray:
        """An array that is in memory, with the same interface."""
        return cls(name, values.shape, values.dtype, dims, max(len(values), 1), InMemory(values))

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its numbers take."""
        return self.size * self.dtype.itemsize

    @property
    def missing_rows(self) -> int:
        """How many rows an unfinished extraction has not come to."""
        spans = [range(start, min(start + self.chunk_rows, len(self))) for start in self._starts]
        return sum(len(span) for number, span in enumerate(spans) if self._chunks.chunk(number) is None)

    @property
    def has_time(self) -> bool:
        """True if its second axis is that of the passes of a layer."""
        return len(self.dims) > 1 and is_time(self.dims[1])

    def at_step(self, step: int) -> LazyArray:
        """What it is at one step of its time, from 0; named as the pass is, `relu_1:1`."""
        dims = (self.dims[0], *self.dims[2:])
        shape = (self.shape[0], *self.shape[2:])
        return LazyArray(
            f"{self.name}:{step + 1}", shape, self.dtype, dims, self.chunk_rows, OneStep(self._chunks, step)
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        read, then = _parsed(key, self.shape)
        rows, rest = read[0], tuple(read[1:])
        found = np.empty((len(rows), *map(_length, rest, self.shape[1:])), self.dtype)
        for number, begin, end in self._spans(rows):
            found[begin:end] = self._piece(number, rows[begin:end] - number * self.chunk_rows, rest)
        return found[then]

    def chunks(self) -> Iterator[Array]:
        """All rows, as many at a time as are in one file."""
        return (self[start : start + self.chunk_rows] for start in self._starts)

    def __iter__(self) -> Iterator[Any]:
        return (row for chunk in self.chunks() for row in chunk)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self.name!r} lies in files: an array of it is a copy.")
        found: Array = self[...]
        return found if dtype is None else found.astype(dtype, copy=False)

    def torch(self) -> torch.Tensor:
        """All of it as a tensor."""
        return torch.from_numpy(self[...])

    @property
    def _starts(self) -> range:
        return range(0, len(self), self.chunk_rows)

    def _spans(self, rows: Array) -> Iterator[tuple[int, int, int]]:
        """The chunks that hold rows, and from where to where among those asked for. The rows are in order."""
        numbers, begins = np.unique(rows // self.chunk_rows, return_index=True)
        ends = [*begins[1:].tolist(), len(rows)][: len(begins)]
        return zip(numbers.tolist(), begins.tolist(), ends, strict=True)

    def _piece(self, number: int, rows: Array, rest: tuple[Any, ...]) -> Any:
        """Some rows of a chunk, and of these what is asked for along the other axes."""
        chunk = self._chunks.chunk(number)
        if chunk is None:
            return self._absent(number)
        first, last = int(rows[0]), int(rows[-1])
        slices = slice(first, last + 1), *[one if type(one) is slice else slice(None) for one in rest]
        found = chunk[slices]
        if len(rows) <= last - first:
            found = found[rows - first]
        for axis, one in enumerate(rest, 1):
            found = found if type(one) is slice else found.take(one, axis)
        return found

    def _absent(self, number: int) -> Any:
        """What stands in the place of rows that are not there yet."""
        if self.dtype.kind in "fc":
            return fill_value(self.dtype)
        start = number * self.chunk_rows
        raise BadFeatures(
            f"rows {start} to {min(start + self.chunk_rows, len(self)) - 1} of {self.name!r} are not extracted yet, "
            f"and {self.dtype} has no NaN to stand for them. Run the same extract() again: it goes on where it stopped."
        )

    def __repr__(self) -> str:
        return f"<LazyArray {self.name}: {self.dtype} {self.shape}, {' x '.join(self.dims)}>"


# -- indices -----------------------------------------------------------------------------------------------------------


def _parsed(key: Any, shape: tuple[int, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """What is to be read along each axis, in order and once, and the index that makes of it what was asked for.

    Along the first axis it is the numbers of rows; along another a slice, or numbers.
    """
    read: list[Any] = []
    then: list[Any] = []
    for part in _spelled_out(key, shape):
        if part is None:
            then.append(None)
            continue
        found, after = _along(part, shape[len(read)], len(read))
        read.append(found)
        then.append(after)
    if type(read[0]) is slice:
        read[0] = np.arange(shape[0])[read[0]]
    return read, tuple(then)


def _spelled_out(key: Any, shape: tuple[int, ...]) -> list[Any]:
    """An index with a part for each axis: slices, numbers, arrays of these; and None for each new axis."""
    parts = list(map(_part, key if isinstance(key, tuple) else (key,)))
    dots = [place for place, part in enumerate(parts) if part is ...]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...').")
    axes = sum(0 if part is None or part is ... else part.ndim if _is_mask(part) else 1 for part in parts)
    if axes > len(shape):
        raise IndexError(f"too many indices: the array has {len(shape)} axes, and {axes} were indexed.")
    place = dots[0] if dots else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - axes)
    found: list[Any] = []
    axis = 0
    for part in parts:
        found.extend(_places(part, shape, axis) if _is_mask(part) else [part])
        axis += 0 if part is None else part.ndim if _is_mask(part) else 1
    return found


def _part(part: Any) -> Any:
    """A part of an index as numpy has it."""
    if part is None or part is ... or isinstance(part, slice):
        return part
    if isinstance(part, (bool, np.bool_)):
        raise IndexError(f"{part} is no index: a mask has a truth value for each row.")
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu().numpy()
    try:
        return operator.index(part)
    except TypeError:
        found = np.asarray(part)
    found = found.astype(np.intp) if not found.size and not isinstance(part, np.ndarray) else found
    if found.dtype.kind not in "iub":
        raise IndexError(f"only whole numbers, slices, masks, `...` and None are indices, not {part!r:.60}.")
    return found


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype.kind == "b"


def _places(mask: Array, shape: tuple[int, ...], axis: int) -> tuple[Array, ...]:
    """The indices along each axis of a mask where it is true."""
    covered = shape[axis : axis + mask.ndim]
    if mask.shape != covered:
        raise IndexError(f"a mask of shape {mask.shape} does not fit axes of sizes {covered}.")
    return mask.nonzero()


def _along(part: Any, size: int, axis: int) -> tuple[Any, Any]:
    """What to read along an axis, and how what was read is indexed then."""
    if isinstance(part, slice):
        places = range(size)[part]
        order = slice(None, None, -1 if places.step < 0 else None)
        places = places[::-1] if places.step < 0 else places
        return slice(places.start, places.stop, places.step), order
    given = np.asarray(part)
    wrong = given[(given < -size) | (given >= size)]
    if wrong.size:
        raise IndexError(f"index {wrong.flat[0]} is out of bounds for axis {axis} with size {size}.")
    if isinstance(part, int):
        return slice(part % size, part % size + 1), 0
    found, inverse = np.unique(given % max(size, 1), return_inverse=True)
    return found, inverse.reshape(given.shape)


def _length(read: Any, size: int) -> int:
    """How many numbers along an axis are read."""
    return len(range(size)[read]) if type(read) is slice else len(read)
