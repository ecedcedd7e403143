"""A Scene as a self-contained HTML page, with a card for each layer and numbers laid over it.

In: a Scene, Layers, and a run, a sweep or a user's numbers. Out: HTML with its script, styles and data inside.
Everything that comes from the model (labels, addresses, lines of code) is data: it is in a block of JSON that it cannot
close, and the script inserts it as text, never as HTML. The content security policy of the page allows no loading, and
no script but its own, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, fields, frozen

from .._ir.node import Call, scopes_beyond
from .._layers.fields import page_card
from .._layers.index import LayerIndex
from .._layers.layer import Layer
from .._replay.supply import Run
from ..errors import CannotDraw, NotSaved
from .layered_layout import Rows, Track, frame_rows
from .scene import Arrow, Frame, Glyph, Scene
from .values import Pictures, Statistics, pictures, statistics, tensors_in

Card = dict[str, Any]
CallTable = list[tuple[str, int]]  # module calls, each with the number of the one around it, or -1
THUMBNAIL_SIDES = (32, 24, 16, 12, 8)  # of thumbnails; the largest that fits the budget is taken
MAX_THUMBNAILS = 8


def layer_cards(layers: Sequence[Layer], picture_bytes: int) -> dict[str, Card]:
    """A card for each layer: its facts, statistics and thumbnails of its value."""
    side, most = _side(layers, picture_bytes)
    return {layer.label: page_card(layer) | _of_value(layer, side, most) for layer in layers}


def number_module_calls(layers: Sequence[Layer], cards: Mapping[str, Card]) -> CallTable:
    """Every module call around these layers, once. Puts the number of the innermost one on each card."""
    table: CallTable = []
    numbers: dict[int, int] = {}  # by the id of the call
    for layer in layers:
        node = layer.node
        inner = node.scope if isinstance(node, Call) and layer.module is not None else None
        outer, new = scopes_beyond(numbers, inner)
        number = -1 if outer is None else numbers[id(outer)]
        for scope in new:
            table.append((str(scope), number))
            number = numbers[id(scope)] = len(table) - 1
        if number >= 0:
            cards[layer.label]["call"] = number
    return table


def _side(layers: Sequence[Layer], picture_bytes: int) -> tuple[int, int]:
    """The size of thumbnails and their number per layer, so that all fit the budget; (0, 0) if none do."""
    counts = [shape[-3] for layer in layers if (shape := layer.shape) is not None and len(shape) in (3, 4)]
    for most in (MAX_THUMBNAILS, 4, 2):
        for side in THUMBNAIL_SIDES:
            if sum(min(count, most) for count in counts) * side * side * 4 / 3 <= picture_bytes:
                return side, most
    return 0, 0


def _of_value(layer: Layer, side: int, most: int) -> Card:
    """Statistics and thumbnails of the recorded value."""
    try:
        tensors = tensors_in(layer.value)
    except NotSaved:
        return {"missing": "The value was not kept."}
    numbers = [_statistics(one) for tensor in tensors[:4] if (one := statistics(tensor))]
    shown = pictures(tensors[0], most, side) if tensors and side else None
    return ({"statistics": numbers} if numbers else {}) | ({"pictures": _pictures(shown)} if shown else {})


def _statistics(found: Statistics) -> Card:
    values = {field.name: getattr(found, field.name) for field in fields(Statistics)}
    return {name: rounded(one) if isinstance(one, float) else one for name, one in values.items()}


def _pictures(found: Pictures) -> Card:
    """Pictures as bytes, scaled from the least (0) to the greatest (255) finite element of all."""
    grids = found.grids.double()
    finite = grids[grids.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    low = 0.0 if found.is_pattern else low
    shades = torch.nan_to_num(grids - low, nan=0.0, posinf=high - low, neginf=0.0) * (255 / (high - low or 1.0))
    data = shades.round().clamp(0, 255).to(torch.uint8).flatten().tolist()
    return {
        "title": found.title,
        "names": found.names,
        "rows": grids.shape[-2],
        "columns": grids.shape[-1],
        "low": rounded(low),
        "high": rounded(high),
        "is_pattern": found.is_pattern,
        "data": base64.b64encode(bytes(data)).decode("ascii"),
    }


def rounded(number: float) -> float | None:
    """A number rounded to five digits; None if it is not finite, which JSON cannot express."""
    return float(f"{number:.5g}") if math.isfinite(number) else None


MOST_DETAILS = 1000  # of one layer


@frozen
class PageData:
    """The numbers that colour a page, by layer, and the details behind them for the cards."""

    numbers: Any = None
    legend: str = ""
    details: Any = None

    def named(self, scene: Scene) -> Scene:
        """The picture with the legend of these numbers."""
        return evolve(scene, legend=self.legend) if self.legend and scene.span is not None else scene


def page_data(index: LayerIndex, run: Any, sweep: Any, values: Any) -> PageData:
    """The numbers of a run, of a sweep, or of the user; at most one of them may be given."""
    given = [word for word, one in (("run", run), ("sweep", sweep), ("values", values)) if one is not None]
    if len(given) > 1:
        raise CannotDraw(
            f"a page can show one thing in colours, but {' and '.join(given)} were given. Give one of them."
        )
    if run is not None:
        if not isinstance(run, Run) or run.program is not None or run.origin is None:
            return PageData()  # `compose` raises the error
        numbers = {row.label: row.change for row in run.diff() if row.change is not None}
        return PageData(numbers, "change against the recorded run")
    if sweep is not None:
        return _of_sweep(index, sweep)
    return PageData(values)


def _of_sweep(index: LayerIndex, sweep: Any) -> PageData:
    """For each layer the largest change of the metric by magnitude; all of them for its card."""
    if missing := [word for word in ("axes", "keys", "values", "baseline") if not hasattr(type(sweep), word)]:
        raise CannotDraw(
            f"sweep= takes what replaylens.sweep gives, and a {type(sweep).__name__} has no {missing[0]}. Numbers by "
            "the names of layers are laid over a page by values=."
        )
    baseline = torch.as_tensor(sweep.baseline)
    numbers = torch.as_tensor(sweep.values)
    if baseline.numel() != 1 or numbers.numel() != len(sweep.keys):
        raise CannotDraw("a page shows one number per variant of a sweep. Give the sweep a metric that returns one.")
    changes = (numbers.reshape(-1).double() - baseline.double()).tolist()
    details: dict[str, list[Any]] = {}
    for key, change in zip(sweep.keys, changes, strict=True):
        site, *indices = key if isinstance(key, tuple) else (key,)
        words = [f"{axis} {index}" for axis, index in zip(sweep.axes[1:], indices, strict=False)]
        for label in _labels(index, site):
            details.setdefault(label, []).append([", ".join(words) or str(site), change])
    if not details:
        raise CannotDraw("no variant of this sweep is named by a layer, so it cannot be shown on layers.")
    greatest = {label: max((change for _, change in rows), key=abs) for label, rows in details.items()}
    shown = {
        label: [[word, rounded(change)] for word, change in rows[:MOST_DETAILS]] for label, rows in details.items()
    }
    return PageData(greatest, "change of the metric", shown)


def _labels(index: LayerIndex, site: Any) -> Iterable[str]:
    """The layer that the key of a variant names; none if the key is the user's own word."""
    known = isinstance(site, str) and (site in index.by_label or site in index.aliases)
    return [index.find(site).label] if known else []


THUMBNAIL_BYTES = 1_500_000  # the budget for thumbnails on a page
SCRIPTS = ("layout.js", "state.js", "picture.js", "card.js", "main.js")
Data = dict[str, Any]


def page(
    scene: Scene, rows: Mapping[str | None, Rows], by_label: Mapping[str, Card], calls: CallTable, details: Data | None
) -> str:
    """The page as text. `details` are the numbers behind the overlay, for the cards."""
    data = json.dumps(_data(scene, rows, by_label, details) | {"calls": calls}, separators=(",", ":"), allow_nan=False)
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
    """Write the page to a file, with cards for the layers in the picture."""
    seen = [layer for layer in layers if layer.label in scene.by_layer]
    cards = layer_cards(seen, THUMBNAIL_BYTES)
    made = page(scene, frame_rows(scene), cards, number_module_calls(seen, cards), details)
    found = Path(path)
    found.write_text(made, encoding="utf-8")
    return found


@cache
def _asset(name: str) -> str:
    return (files("replaylens._view") / "web" / name).read_text(encoding="utf-8")


def _inside_script(data: str) -> str:
    """JSON escaped so that it cannot close the script element around it, or open another."""
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
    shapes = ", ".join(["x".join(map(str, spec.shape)) or "scalar" for spec in glyph.specs[:4]])
    found = {
        "name": glyph.name,
        "kind": glyph.kind,
        "layers": glyph.layers,
        "frame": keys[glyph.frame] if glyph.frame is not None else "root",
        "module": glyph.module,
        "shape": shapes + (", ..." if len(glyph.specs) > 4 else ""),
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
    """The label of an arrow: its argument position, and the turns that it holds for."""
    leaves = f"out {','.join(map(str, arrow.leaves))}" if arrow.leaves else ""
    enters = f"in {','.join(map(str, arrow.enters))}" if arrow.enters else ""
    return " ".join(filter(None, [leaves, *arrow.parts, enters, ", ".join(arrow.places), arrow.note]))


def _rows(found: Rows, keys: Mapping[str, str]) -> list[Any]:
    """Rows as JSON: `g3` is a glyph, `f3` a frame, `~g3` a track from an item, `^g3` one from outside of the frame."""
    names = [[_name(item, keys) for item in row] for row in found.rows]
    return [names, found.links]


def _name(item: object, keys: Mapping[str, str]) -> str:
    if isinstance(item, Track):
        return f"{'^' if item.is_outside else '~'}{keys[item.key]}"
    return keys[str(item)]
