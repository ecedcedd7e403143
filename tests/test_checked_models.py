"""The page of the models that were checked says what the tests check. See test_library_models.py for the checks."""

from pathlib import Path

import library_models

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def test_the_page_lists_every_library_model_that_is_checked():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    listed = [line.split("|")[1].strip() for line in lines if line.count("|") == 7 and "---" not in line]
    assert sorted(name for name in listed if name != "model") == sorted(
        n.partition("/")[2] for n in library_models.NAMES
    )


def test_no_model_of_the_page_fails():
    assert "**no**" not in PAGE.read_text(encoding="utf-8")
