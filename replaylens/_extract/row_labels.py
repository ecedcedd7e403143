"""Labels of rows, as users give them: numbers as an array, all else as texts.

In: a mapping from names to a value for each row. Out: the same as arrays and lists of str, and a digest of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import BadSource
from .numpy_later import np
from .zarr_layout import text_bytes

Labels = dict[str, Any]


def row_labels(given: Any, rows: int | None) -> Labels:
    """Labels that fit so many rows, where their number is known."""
    if given is None:
        return {}
    if not hasattr(given, "items"):
        raise TypeError(f"labels= is a mapping from names to a value for each row, not {given!r:.60}.")
    found = {_name(name): _values(name, values) for name, values in given.items()}
    if rows is not None:
        require_rows(found, rows)
    return found


def require_rows(labels: Labels, rows: int) -> None:
    """Raise unless each label has a value for each row."""
    for name, values in labels.items():
        if len(values) != rows:
            raise BadSource(f"the label {name!r} has {len(values)} values, and the data have {rows} rows.")


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"labels have names, and {name!r} is none.")
    return name


def _values(name: str, values: Any) -> Any:
    found = _array(name, values)
    if found.ndim != 1:
        raise BadSource(
            f"the label {name!r} has values of shape {found.shape[1:]} for each row. Give one number or text."
        )
    if found.dtype.kind in "biu":
        return np.ascontiguousarray(found)
    if found.dtype.kind == "f":
        return np.ascontiguousarray(found, found.dtype if found.dtype.itemsize <= 8 else np.float64)
    return [_text(one) for one in found]


def _text(value: Any) -> str:
    """A value as a text that UTF-8 can write."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return text.encode("utf-8", "backslashreplace").decode()


def _array(name: str, values: Any) -> np.ndarray[Any, Any]:
    """What is given for the rows, as an array; what is no number stays as it is."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise TypeError(f"the label {name!r} is {values!r:.60}, and no list of a value for each row.")
    if hasattr(values, "__array__"):
        return np.asarray(values)
    try:
        return np.asarray(list(values))
    except ValueError as error:
        raise BadSource(f"the label {name!r} has values of several sizes. Give one number or text a row.") from error


def digest_of(label: Any) -> str:
    """A digest of a label."""
    if isinstance(label, list):
        return hashlib.sha256(text_bytes(label)).hexdigest()[:16]
    head = json.dumps([label.dtype.str, len(label)])
    return hashlib.sha256(head.encode() + label.tobytes()).hexdigest()[:16]


def known_labels(given: Mapping[str, Any] | None, of_source: Mapping[str, Any], rows: int | None) -> Labels:
    """The labels that the data bring, and those that the user gives, which come first."""
    mine = row_labels(given, rows)
    brought = {name: values if rows is None else values[:rows] for name, values in of_source.items()}
    return {**mine, **row_labels({name: one for name, one in brought.items() if name not in mine}, rows)}
