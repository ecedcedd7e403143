"""A Scene as a picture: a `graphviz.Source`, and a file where one is asked for.

In: a Scene and a user's wishes. Out: what a notebook shows. Drawing needs graphviz's program `dot`; the text does not.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import graphviz
from attrs import frozen

from ..errors import CannotDraw
from .dot import Labels, Styles, Writer
from .scene import Glyph, Scene
from .theme import THEMES, Theme

DIRECTIONS = ("TB", "BT", "LR", "RL")
TEXTS = ("dot", "gv")


@frozen
class Wishes:
    """How a picture is to look, and where it is to go."""

    path: str | PathLike[str] | None = None
    format: str | None = None
    direction: str = "TB"
    theme: str | Theme = "paper"
    labels: Labels | str | None = None
    style: Styles | None = None


def draw(scene: Scene, wishes: Wishes) -> graphviz.Source:
    """The picture; written to a file too, in the format that its name says."""
    if wishes.direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, not {wishes.direction!r}.")
    writer = Writer(_theme(wishes.theme), wishes.direction, _labels(wishes.labels), wishes.style)
    source = graphviz.Source(writer.dot(scene))
    if wishes.path is not None:
        _save(source, Path(wishes.path), wishes.format)
    return source


def _theme(theme: str | Theme) -> Theme:
    if isinstance(theme, Theme):
        return theme
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(map(repr, THEMES))}, or a Theme, not {theme!r}.")
    return THEMES[theme]


def _labels(labels: Labels | str | None) -> Labels | None:
    if not isinstance(labels, str):
        return labels
    if labels not in LABELS:
        raise ValueError(f"labels must be one of {', '.join(map(repr, LABELS))}, or a function, not {labels!r}.")
    return LABELS[labels]


def _name_only(glyph: Glyph) -> Any:
    return f"{glyph.name} (x{glyph.times})" if glyph.times > 1 else glyph.name


LABELS: dict[str, Labels | None] = {"full": None, "name": _name_only}


def _save(source: graphviz.Source, path: Path, format: str | None) -> None:
    kind = format or path.suffix.removeprefix(".")
    if kind in TEXTS:
        path.write_text(source.source, encoding="utf-8")
        return
    if kind not in graphviz.FORMATS:
        raise CannotDraw(
            f"no picture can be written in the format {kind!r} ({path.name}). Give a name that ends in .svg, .png, "
            '.pdf or .dot, or format="svg".'
        )
    try:
        picture = source.pipe(format=kind)
    except graphviz.ExecutableNotFound as error:
        raise CannotDraw(
            "drawing needs graphviz's program `dot`, which pip does not bring: install the system package `graphviz` "
            "(apt install graphviz, brew install graphviz). A path that ends in .dot is written without it."
        ) from error
    path.write_bytes(picture)
