"""A Scene as one page that explores it: HTML with its script, its styles and its data inside, and nothing outside.

In: a Scene, its rows, a card for each layer. Out: HTML. Everything that comes from the model (labels, addresses, lines
of code) is data: it stands in a block of JSON that cannot end early, and the script writes it as text, never as HTML.
The page may load nothing, and runs no script but its own, which its hash names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from .._lens.layers import Layer
from .cards import Card, cards, rounded
from .ranks import Rows, Way, rows_of
from .scene import Arrow, Frame, Glyph, Scene

PICTURE_BYTES = 1_500_000  # what small pictures may take of a page
SCRIPTS = ("layout.js", "state.js", "picture.js", "card.js", "main.js")
Data = dict[str, Any]


def page(
    scene: Scene, rows: Mapping[str | None, Rows], by_label: Mapping[str, Card], details: Data | None = None
) -> str:
    """The whole page as text. `details` are what lies over the picture, for the cards."""
    data = json.dumps(_data(scene, rows, by_label, details), separators=(",", ":"), allow_nan=False)
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "TITLE": html.escape(scene.totals.model or "program"),
        "HASH": digest,
        "STYLE": _asset("page.css"),
        "DATA": _inside_script(data),
        "SCRIPT": script,
    }
    text = _asset("page.html")
    before, *pieces = text.split("{{")
    return before + "".join(parts[piece.split("}}", 1)[0]] + piece.split("}}", 1)[1] for piece in pieces)


def save_page(path: str | PathLike[str], scene: Scene, layers: Sequence[Layer], details: Any) -> Path:
    """The page in a file, with cards for the layers that the picture has."""
    seen = [layer for layer in layers if layer.label in scene.by_layer]
    made = page(scene, rows_of(scene), cards(seen, PICTURE_BYTES), details)
    found = Path(path)
    found.write_text(made, encoding="utf-8")
    return found


def _asset(name: str) -> str:
    return (files("replaylens._view") / "web" / name).read_text(encoding="utf-8")


def _inside_script(data: str) -> str:
    """JSON in which nothing can end the block that it stands in, or begin another."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(scene: Scene, rows: Mapping[str | None, Rows], by_label: Mapping[str, Card], details: Data | None) -> Data:
    keys = {glyph.key: f"g{number}" for number, glyph in enumerate(scene.glyphs)}
    keys |= {frame.key: f"f{number}" for number, frame in enumerate(scene.frames)}
    totals = scene.totals
    return {
        "model": totals.model,
        "module": scene.module,
        "totals": [totals.tensors, totals.tensor_bytes, totals.parameters, totals.parameter_bytes],
        "glyphs": [_glyph(glyph, keys) for glyph in scene.glyphs],
        "frames": [_frame(frame, keys) for frame in scene.frames],
        "arrows": [[keys[arrow.tail], keys[arrow.head], _words(arrow), sorted(arrow.roles)] for arrow in scene.arrows],
        "rows": {"root" if frame is None else keys[frame]: _rows(found, keys) for frame, found in rows.items()},
        "cards": dict(by_label),
        "overlay": {"legend": scene.legend, "span": scene.span, "details": details} if scene.span is not None else None,
    }


def _glyph(glyph: Glyph, keys: Mapping[str, str]) -> Data:
    shapes = ", ".join(["x".join(map(str, meaning.shape)) or "scalar" for meaning in glyph.meanings[:4]])
    found = {
        "name": glyph.name,
        "kind": glyph.kind,
        "layers": glyph.layers,
        "frame": keys[glyph.frame] if glyph.frame is not None else "root",
        "module": glyph.module,
        "shape": shapes + (", ..." if len(glyph.meanings) > 4 else ""),
        "times": glyph.times,
        "roles": sorted(glyph.roles),
        "note": glyph.note,
    }
    if glyph.value is not None:
        found["value"] = rounded(glyph.value) if isfinite(glyph.value) else str(glyph.value)
    return found


def _frame(frame: Frame, keys: Mapping[str, str]) -> Data:
    return {
        "name": frame.name,
        "kind": frame.kind,
        "frame": keys[frame.parent] if frame.parent is not None else "root",
        "times": frame.times,
        "calls": frame.calls,
        "roles": sorted(frame.roles),
    }


def _words(arrow: Arrow) -> str:
    """What is said of an arrow: its place among the arguments, and the turns for which it holds."""
    leaves = f"out {','.join(map(str, arrow.leaves))}" if arrow.leaves else ""
    enters = f"in {','.join(map(str, arrow.enters))}" if arrow.enters else ""
    return " ".join(filter(None, [leaves, *arrow.parts, enters, ", ".join(arrow.places), arrow.note]))


def _rows(found: Rows, keys: Mapping[str, str]) -> list[Any]:
    """`g3` is a glyph, `f3` a frame, `~g3` the way of lines from one; `^g3` from one outside of the frame."""
    names = [[_name(item, keys) for item in row] for row in found.rows]
    return [names, found.links]


def _name(item: object, keys: Mapping[str, str]) -> str:
    if isinstance(item, Way):
        return f"{'^' if item.is_outside else '~'}{keys[item.key]}"
    return keys[str(item)]
