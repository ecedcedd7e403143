"""What CONTRIBUTING.md and docs/architecture.md say of the code is true of it."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "replaylens"


def generator():
    """docs/make_architecture.py as a module."""
    spec = importlib.util.spec_from_file_location("make_architecture", ROOT / "docs" / "make_architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = generator()
PAGE = MAKE.PAGE.read_text(encoding="utf-8")
POINTERS = [(found["path"], int(found["line"]), found["name"]) for found in MAKE.POINTER.finditer(PAGE)]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def tree_of_contributing():
    """The files that its tree names, by folder."""
    [block] = re.findall(
        r"```\nreplaylens/\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
    )
    folders, folder = {}, "."
    for line in block.splitlines():
        if found := re.match(r"  (_\S*|compat)/ ", line):
            folder = found[1]
        folders.setdefault(folder, []).extend(re.findall(r"\b(\w+)\.py", line))
    return {folder: sorted(names) for folder, names in folders.items()}


def test_the_tree_in_contributing_is_that_of_the_package():
    real = {}
    for path in FILES:
        real.setdefault(path.parent.relative_to(PACKAGE).as_posix(), []).append(path.stem)
    assert tree_of_contributing() == {folder: sorted(names) for folder, names in real.items()}


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(("path", "line", "name"), POINTERS)
def test_a_line_that_the_architecture_names_is_where_it_says(path, line, name):
    assert line == MAKE.line_of(path, name), "run `python docs/make_architecture.py`"


def test_the_architecture_lists_every_file():
    [listed] = MAKE.FILES.findall(PAGE)
    assert listed == MAKE.list_of_files(), "run `python docs/make_architecture.py`"


def test_the_architecture_follows_an_operation_through_capture_and_replay():
    folders = {Path(path).parent.name for path, _, _ in POINTERS}
    assert {"_capture", "_ir", "_layers", "_replay"} <= folders


def spoken_of(path):
    """The files that docstrings and comments of a file name, without their folders."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return {Path(name).name for text in texts for name in re.findall(r"(?<![\w/:.])([\w/]+\.py)\b", text)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_files_that_docstrings_and_comments_name_exist(path):
    names = {one.name for one in [*FILES, *(ROOT / "tests").rglob("*.py")]} | {"model.py"}  # a user's, in examples
    assert spoken_of(path) <= names
