"""What a page says of each layer: a card, as plain data that JSON can hold.

In: Layers, and how many bytes small pictures may take. Out: a dict for each label. Words are plain text here: whoever
shows them takes care that they stay text.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import torch

from .._core.graph import Graph
from .._core.node import Call, Node, State, TensorMeaning, meanings_of
from .._core.text import line
from .._lens.layers import Layer
from .._lens.units import human
from ..errors import NotSaved
from .scene import bytes_of
from .values import Pictures, Statistics, pictures, statistics, tensors_in

Card = dict[str, Any]
SIDES = (32, 24, 16, 12, 8)  # of small pictures, in numbers; the first that fits into what they may take
MOST_PICTURES = 8
LONGEST_TEXT = 300


def cards(graph: Graph, layers: Sequence[Layer], picture_bytes: int) -> dict[str, Card]:
    """A card for each layer. Its value is looked at once, and a few numbers and small pictures of it are kept."""
    side, most = _side(layers, picture_bytes)
    return {layer.label: _card(graph, layer, side, most) for layer in layers}


def _side(layers: Sequence[Layer], picture_bytes: int) -> tuple[int, int]:
    """How large pictures are, and how many of one layer, so that all of them fit; none, where even the least do not."""
    counts = [shape[-3] for layer in layers if (shape := layer.shape) is not None and len(shape) in (3, 4)]
    for most in (MOST_PICTURES, 4, 2):
        for side in SIDES:
            if sum(min(count, most) for count in counts) * side * side * 4 / 3 <= picture_bytes:
                return side, most
    return 0, 0


def _card(graph: Graph, layer: Layer, side: int, most: int) -> Card:
    node = layer.node
    found: Card = {
        "kind": layer.layer_type,
        "gives": [_meaning(meaning) for meaning in _meanings(layer)],
        "code": _cut(line(node)) if isinstance(node, Call) and layer.layer_type != "output" else "",
        "modules": layer.modules,
        "gives_module": layer.output_of,
        "parents": layer.parents,
        "children": layer.children,
        "parameters": [[one.address, _meaning(one.meaning)] for one in _parameters(graph, layer)],
        "note": _note(node),
    }
    if layer.source is not None:
        found["source"] = [str(layer.source), _cut(layer.source.text)]
    return {key: value for key, value in {**found, **_of_value(layer, side, most)}.items() if value not in ("", [], ())}


def _meanings(layer: Layer) -> list[TensorMeaning]:
    """What is known of the tensors that a layer gives."""
    known = meanings_of(layer.node)
    one = layer._place.tree(layer._atlas.graph)
    return [known[one]] if one in known else list(known.values())


def _parameters(graph: Graph, layer: Layer) -> list[State]:
    node = layer.node
    if not isinstance(node, Call) or layer.layer_type == "output":
        return []
    read = [graph[name] for name in dict.fromkeys(ref.node for ref in node.refs)]
    return [one for one in read if isinstance(one, State) and one.kind == "parameter"]


def _note(node: Node) -> str:
    if isinstance(node, State):
        return f"at {node.address}"
    if not isinstance(node, Call):
        return ""
    if node.target.name.endswith("scaled_dot_product_attention"):
        return "The attention pattern is inside this fused operation: prog.expand(...) makes it a layer."
    return node.edited


def _of_value(layer: Layer, side: int, most: int) -> Card:
    """What the recorded value looks like."""
    try:
        tensors = tensors_in(layer.value)
    except NotSaved:
        return {"missing": "The value was not kept."}
    found: Card = {"statistics": [_statistics(one) for tensor in tensors[:4] if (one := statistics(tensor))]}
    shown = pictures(tensors[0], most, side) if tensors and side else None
    return found | ({"pictures": _pictures(shown)} if shown else {})


def _statistics(found: Statistics) -> Card:
    return {
        "count": found.count,
        "mean": rounded(found.mean),
        "std": rounded(found.std),
        "least": rounded(found.least),
        "greatest": rounded(found.greatest),
        "zeros": rounded(found.zeros),
        "nans": found.nans,
        "infinities": found.infinities,
        "histogram": found.histogram,
    }


def _pictures(found: Pictures) -> Card:
    """Pictures as bytes, from the least number (0) to the greatest (255) of them all."""
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
    """A number in five digits; None where it is not finite, which JSON has no word for."""
    return float(f"{number:.5g}") if math.isfinite(number) else None


def _meaning(meaning: TensorMeaning) -> str:
    return f"{meaning}  {human(bytes_of(meaning))}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
