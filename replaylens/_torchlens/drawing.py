"""Drawings with TorchLens's options: `vis_opt`, `vis_nesting_depth`, `vis_outpath`.

In: a Program and these options. Out: the picture, also written to a file. No viewer is opened.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any

from graphviz import FORMATS, Source

OPTIONS = ("none", "unrolled", "rolled")
DIRECTIONS = {"bottomup": "BT", "topdown": "TB", "leftright": "LR"}


def visualize(
    prog: Any,
    vis_opt: str = "unrolled",
    vis_nesting_depth: int = 1000,
    vis_outpath: str | PathLike[str] = "graph.gv",
    vis_fileformat: str = "pdf",
    vis_buffer_layers: bool = False,
    vis_direction: str = "bottomup",
) -> Source | None:
    """Draw the program and write it to a file, `graph.gv.pdf` by default. None if `vis_opt` is "none"."""
    require_known(vis_opt, vis_direction)
    if vis_opt == "none":
        return None
    path, kind = _file(fspath(vis_outpath), vis_fileformat)
    source: Source = prog.draw(
        path,
        format=kind,
        rolled=vis_opt == "rolled",
        depth=vis_nesting_depth,
        buffers=vis_buffer_layers,
        direction=DIRECTIONS[vis_direction],
    )
    return source


def require_known(vis_opt: str, vis_direction: str) -> None:
    """Raise unless the options are valid; called before the model runs."""
    if vis_opt not in OPTIONS:
        raise ValueError(f"vis_opt must be one of {', '.join(map(repr, OPTIONS))}, not {vis_opt!r}.")
    if vis_direction not in DIRECTIONS:
        raise ValueError(f"vis_direction must be one of {', '.join(map(repr, DIRECTIONS))}, not {vis_direction!r}.")


def _file(path: str, kind: str) -> tuple[str, str]:
    """The file name and format. A suffix that is an image format decides the format; else the format is appended."""
    ending = Path(path).suffix.removeprefix(".")
    return (path, ending) if ending in FORMATS and ending not in ("gv", "dot") else (f"{path}.{kind}", kind)
