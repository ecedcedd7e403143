"""The page of the models that were checked says what the tests check. See test_library_models.py for the checks."""

import re
from pathlib import Path

import library_models

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
COLUMNS = ["model", "calls", "arguments replaced", "of these without effect", "holds", "remarks"]


LIBRARIES, _, REFUSED = PAGE.partition("\n## Refused\n")


def rows() -> list[dict[str, str]]:
    """The rows of the table of every library, by the names of its columns."""
    found, columns = [], None
    for line in LIBRARIES.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and columns is None:
            columns = cells
        elif not cells:
            columns = None
        elif not all(re.fullmatch(":?-+:?", cell) for cell in cells):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


def test_every_table_of_the_page_has_the_columns_that_are_read_here():
    assert rows() and REFUSED
    assert all(list(row) == COLUMNS for row in rows())


def test_the_page_lists_every_library_model_that_is_checked():
    assert sorted(row["model"] for row in rows()) == sorted(name.partition("/")[2] for name in library_models.NAMES)
    stated = re.findall(r"^## \S+: (\d+)$", PAGE, re.MULTILINE)
    assert sum(map(int, stated)) == len(rows())


def test_every_model_of_the_page_holds_and_was_asked_something():
    assert [row["model"] for row in rows() if row["holds"] != "yes"] == []
    asked = [(int(row["calls"]), int(row["arguments replaced"]), int(row["of these without effect"])) for row in rows()]
    assert all(calls > 0 and replaced > idle >= 0 for calls, replaced, idle in asked)
