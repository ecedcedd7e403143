"""How features lie in a zarr v3 group: names of files, metadata documents, and the bytes of a chunk.

In: names, shapes, dtypes, texts. Out: documents (plain dicts, JSON texts) and bytes, and the same read back. No file is
touched here. An array is cut along its first axis alone, its chunks are plain C bytes, uncompressed, so that a chunk
can be mapped into memory; what is missing of the last chunk, or of an extraction that has not ended, is NaN (0 for
integers).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from .numpy_later import np

FORMAT = 1
ROWS = "stimulus"  # the name of the first axis of every array

_LONGEST = 200  # bytes of a file's name: of 255 that most systems take, with room for ".npy"
_OTHER = re.compile(r"[^A-Za-z0-9._:-]")
_KINDS = "biufc"


@frozen
class ArrayLayout:
    """One array of a group: its shape, dtype (None for text), the rows of a chunk, and the names of its axes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    chunk_rows: int
    dims: tuple[str, ...]

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of every chunk, the last one included."""
        return self.chunk_rows, *self.shape[1:]

    @property
    def chunks(self) -> int:
        """How many chunks the array has."""
        return math.ceil(self.shape[0] / self.chunk_rows)

    def chunk_path(self, number: int) -> str:
        """Where a chunk is, below the folder of its array: `c/3/0/0`."""
        return "/".join(["c", str(number), *["0"] * (len(self.shape) - 1)])


def folder_name(array: str) -> str:
    """The name of an array as that of a file: what is no letter, digit or one of `._-:` is written as %XX, and so is
    what zarr keeps for itself. The end of a name that no file may have is a digest.
    """
    name = _OTHER.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), array)
    if name[:1] == "." or name[:2] == "__" or name.casefold() == "zarr.json":
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return (
        name if len(name) <= _LONGEST else f"{name[: _LONGEST - 18]}%{hashlib.sha256(array.encode()).hexdigest()[:17]}"
    )


def clashes(arrays: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of arrays that would be one file where upper and lower case are one."""
    known: dict[str, str] = {}
    found = []
    for array in arrays:
        other = known.setdefault(folder_name(array).casefold(), array)
        if other != array:
            found.append((other, array))
    return found


def fill_value(dtype: np.dtype[Any]) -> Any:
    """What stands where nothing was written: NaN, or 0 for what has no NaN."""
    return dtype.type(math.nan if dtype.kind in "fc" else 0)


# -- documents -------------------------------------------------------------------------------------------------------


def json_text(document: Any) -> str:
    """A document as the text of its file; the same document gives the same text."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What `zarr.json` of the group holds."""
    return {"attributes": dict(attributes), "zarr_format": 3, "node_type": "group"}


def array_document(layout: ArrayLayout) -> dict[str, Any]:
    """What `zarr.json` of an array holds, as zarr itself writes it."""
    dtype = layout.dtype
    return {
        "shape": list(layout.shape),
        "data_type": "string" if dtype is None else _dtype_name(dtype),
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [max(size, 1) for size in layout.chunk_shape]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "" if dtype is None else _FILLS[dtype.kind],
        "codecs": [{"name": "vlen-utf8", "configuration": {}} if dtype is None else _bytes_codec(dtype)],
        "attributes": {},
        "dimension_names": list(layout.dims),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


_FILLS: dict[str, Any] = {"b": False, "i": 0, "u": 0, "f": "NaN", "c": ["NaN", "NaN"]}


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _KINDS:
        raise TypeError(f"values of dtype {dtype} have no place in a zarr array. Give numbers, truth values or text.")
    return str(dtype.name)


def _bytes_codec(dtype: np.dtype[Any]) -> dict[str, Any]:
    return {"name": "bytes"} if dtype.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}


def read_array_document(document: Mapping[str, Any]) -> ArrayLayout:
    """The array that a `zarr.json` describes. Raises ValueError at one that is not as this module writes it."""
    kind = document["data_type"]
    dtype = None if kind == "string" else np.dtype(kind)
    shape, chunk = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
    if not all(type(size) is int and 0 <= size < 2**62 for size in (*shape, *chunk)) or math.prod(shape) >= 2**62:
        raise ValueError(f"no array has the shape {shape} in chunks of {chunk}.")
    names = document["dimension_names"]
    if not all(type(name) is str for name in names) or len(names) != len(shape):
        raise ValueError(f"its axes have the names {names}.")
    layout = ArrayLayout(tuple(shape), dtype, chunk[0], tuple(names))
    if array_document(layout) != {**document, "attributes": {}}:
        raise ValueError("the array is cut or encoded in another way than replaylens does. Open it with zarr.")
    return layout


# -- chunks ----------------------------------------------------------------------------------------------------------


def chunk_parts(rows: np.ndarray[Any, Any], layout: ArrayLayout) -> list[bytes | memoryview]:
    """The rows of a chunk as its file holds them, uncopied, and what fills up one that is not full."""
    assert layout.dtype is not None
    whole = np.ascontiguousarray(rows, layout.dtype.newbyteorder("<"))
    parts: list[bytes | memoryview] = [whole.reshape(-1).view(np.uint8).data] if whole.size else []
    if missing := layout.chunk_rows - len(whole):
        rest = np.full((missing, *layout.shape[1:]), fill_value(layout.dtype), whole.dtype)
        parts.append(rest.tobytes())
    return parts


def chunk_bytes(rows: np.ndarray[Any, Any], layout: ArrayLayout) -> bytes:
    """The bytes of a chunk."""
    return b"".join(chunk_parts(rows, layout))


def text_bytes(texts: Iterable[str]) -> bytes:
    """Texts as the chunk of a `vlen-utf8` array."""
    encoded = [text.encode() for text in texts]
    parts = [struct.pack("<I", len(encoded))]
    for one in encoded:
        parts += struct.pack("<I", len(one)), one
    return b"".join(parts)


def read_text_bytes(data: bytes) -> list[str]:
    """The texts in the chunk of a `vlen-utf8` array. Raises ValueError if it is cut off."""
    try:
        (count,) = struct.unpack_from("<I", data)
        texts, place = [], 4
        for _ in range(count):
            (size,) = struct.unpack_from("<I", data, place)
            if place + 4 + size > len(data):
                raise ValueError("the texts of a label are cut off.")
            texts.append(data[place + 4 : place + 4 + size].decode())
            place += 4 + size
    except struct.error:
        raise ValueError("the texts of a label are cut off.") from None
    return texts


# -- axes ------------------------------------------------------------------------------------------------------------


def is_time(axis: str | None) -> bool:
    """True for the axis of the passes of a layer, whose name is not that of one array."""
    return axis == "time" or re.fullmatch(r"time_of_\d+", axis or "") is not None


def dimension_names(array: str, axes: Sequence[str | None]) -> tuple[str, ...]:
    """The names of all axes of an array, of which those behind the first are given: unlike those of any other array,
    `fc_0`, or `fc_c` where the axis has a name. Only that of the passes of a layer is one for all arrays.
    """
    shared = sum(map(is_time, axes))
    names = [
        axis if is_time(axis) else f"{array}_{number if axis is None else axis}"
        for number, axis in enumerate(axes, -shared)
    ]
    return ROWS, *[str(name) for name in names]
