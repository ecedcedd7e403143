"""Sizes, counts and times as text, and tables that print, display in notebooks and convert to DataFrames."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from attrs import field, frozen

from .._ir.util import optional


def format_bytes(size: int) -> str:
    """A number of bytes."""
    amount = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 1024 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return ""


def format_count(count: int) -> str:
    """A large number: `1.43 G`."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {letter}" if count < 999.5 * limit else f"{count / limit:.0f} {letter}"
    return str(count)


def format_flops(flops: int, macs: int) -> str:
    """What an operation, or a model, costs: `1.42 GFLOPs (710 M multiply-adds)`."""
    words = f"{format_count(flops)}{'' if flops >= 1e3 else ' '}FLOPs"
    return f"{words} ({format_count(macs)} multiply-adds)" if macs else words


def format_passes(count: int, thing: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """A time: `0.288 s`, `31.4 ms`, `8.3 us`."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


@frozen(repr=False, eq=False)
class Table:
    """Rows with named columns. `table["layer4.1"]` is a row as a dict, `table.column("type")` a column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    aliases: Mapping[str, str] = field(factory=dict)  # further names of rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __getitem__(self, name: Any) -> dict[str, Any]:
        for row in self.rows:
            if row[0] == self.aliases.get(name, name):
                return dict(zip(self.columns, row, strict=True))
        close = get_close_matches(str(name), [str(row[0]) for row in self.rows], n=3)
        more = f" The nearest names are {', '.join(map(repr, close))}." if close else ""
        raise KeyError(f"no row of this table has the {self.columns[0]} {name!r}.{more}")

    def column(self, name: str) -> list[Any]:
        """The cells of a column."""
        return [row[self.columns.index(name)] for row in self.rows]

    def to_pandas(self) -> Any:
        """The table as a DataFrame."""
        return optional("pandas", "pandas").DataFrame(list(self.rows), columns=list(self.columns))

    def __str__(self) -> str:
        cells = [self.columns, *[tuple(map(_cell, row)) for row in self.rows]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join([f"<th>{html.escape(name)}</th>" for name in self.columns])
        body = "".join(["<tr>" + "".join(map(_html_cell, row)) + "</tr>" for row in self.rows])
        return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], str):
        return ", ".join(value)
    return "" if value is None or value == () else str(value).removeprefix("torch.")


def _html_cell(value: Any) -> str:
    return f"<td style='text-align:left'>{html.escape(_cell(value))}</td>"
