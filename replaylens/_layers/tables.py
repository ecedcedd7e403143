"""A table that prints, displays in notebooks, is indexed by its first column, and converts to a DataFrame.

In: names of columns, and rows.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from attrs import field, frozen

from .._ir.util import optional


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
