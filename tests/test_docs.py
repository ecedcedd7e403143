"""Every Python block of README.md and docs/*.md runs, in order, each file in one namespace of its own.

A block is skipped when the comment `<!-- not run: REASON -->` stands above it. Pages may import the small models of the
examples.
"""

import re
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

# Blocks of every language are matched, so that a fence inside a block is not taken for one.
BLOCK = re.compile(
    r"""
    (?: ^\ * (?P<not_run> <!--\ not\ run:\ \S[^\n]*--> ) \s*\n )?
    ^\ * (?P<fence> `{3,} ) (?P<language> \w* ) [^\n]* \n
    (?P<code> .*? )
    ^\ * (?P=fence)\ *$
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    line: int  # where its code begins in the page
    code: str
    is_run: bool


def python_blocks(page: str) -> list[Block]:
    return [
        Block(page.count("\n", 0, found.start("code")) + 1, dedent(found["code"]), found["not_run"] is None)
        for found in BLOCK.finditer(page)
        if found["language"] == "python"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_python_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    # A module, not a bare dict: dataclasses, pickle and TorchScript look their classes up in it.
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    text, ran = page.read_text(encoding="utf-8"), 0
    for block in python_blocks(text):
        if block.is_run:
            # Pushed down to its own line, so that tracebacks and captured source lines point into the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), module.__dict__)
            ran += 1
    assert ran >= text.count("```python") - text.count("<!-- not run:")


def test_only_a_python_block_below_a_reason_is_skipped():
    page = """
```python
a = 1
```
<!-- not run: needs a network -->

```python
b = 2
```
```sh
<!-- not run: no comment, for it is inside a block -->
```
<!-- not run: -->
* in a list:
  ````python
  c = 3
  ```python
  ````
"""
    assert python_blocks(page) == [
        Block(3, "a = 1\n", is_run=True),
        Block(8, "b = 2\n", is_run=False),
        Block(16, "c = 3\n```python\n", is_run=True),
    ]
