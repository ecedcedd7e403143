"""Are the files of features those that were written? One digest in their attributes is of all that shards hold.

In: the folder of a complete extraction, and its attributes. Out: nothing, or an error that names what is wrong.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadFeatures, BadFile
from .numpy_later import np
from .zarr_layout import folder_name, json_text

Files = dict[str, list[Any]]  # of one shard: for each file where its part ends, and the digest of that


def digest_of(shards: Iterable[Files]) -> str:
    """One digest of the files of all shards, in their order."""
    return hashlib.sha256(json_text(list(shards)).encode()).hexdigest()


def require_as_written(folder: Path, attributes: Mapping[str, Any]) -> None:
    """Raise unless the files hold what the extraction wrote."""
    if not attributes.get("complete") or "digest" not in attributes:
        raise BadFeatures(f"{folder} is not complete, and has no digest yet. Run the same extract() again.")
    try:
        found = digest_of(_shards(folder, attributes))
    except OSError as error:
        raise BadFile(f"{folder} cannot be read: {error}. Extract it again with overwrite=True.") from error
    if found != attributes["digest"]:
        raise BadFile(f"the files in {folder} are not those that were written. Extract it again with overwrite=True.")


def _shards(folder: Path, attributes: Mapping[str, Any]) -> Iterator[Files]:
    plan, rows = attributes["plan"], attributes["rows"]
    read = _chunk if (folder / "zarr.json").is_file() else _stretch
    for shard in range(math.ceil(rows / plan["shard_rows"])):
        span = range(shard * plan["shard_rows"], min((shard + 1) * plan["shard_rows"], rows))
        yield dict(read(folder, name, row, shard, span, rows) for name, row in plan["arrays"].items())


def _chunk(folder: Path, array: str, row: Any, shard: int, span: range, rows: int) -> tuple[str, list[Any]]:
    name = "/".join([folder_name(array), "c", str(shard), *["0"] * len(row["shape"])])
    data = (folder / name).read_bytes()
    return name, [len(data), hashlib.sha256(data).hexdigest()]


def _stretch(folder: Path, array: str, row: Any, shard: int, span: range, rows: int) -> tuple[str, list[Any]]:
    name = ("labels/" if row["what"] == "label" else "") + f"{folder_name(array)}.npy"
    row_bytes = math.prod(row["shape"]) * np.dtype(row["dtype"]).itemsize
    start = (folder / name).stat().st_size - rows * row_bytes
    with open(folder / name, "rb") as file:
        file.seek(start + span.start * row_bytes)
        data = file.read(len(span) * row_bytes)
    return name, [start + span.stop * row_bytes, hashlib.sha256(data).hexdigest()]
