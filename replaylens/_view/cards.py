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

from .._lens.fields import on_page
from .._lens.layers import Layer
from ..errors import NotSaved
from .values import Pictures, Statistics, pictures, statistics, tensors_in

Card = dict[str, Any]
SIDES = (32, 24, 16, 12, 8)  # of small pictures, in numbers; the first that fits into what they may take
MOST_PICTURES = 8


def cards(layers: Sequence[Layer], picture_bytes: int) -> dict[str, Card]:
    """A card for each layer. Its value is looked at once, and a few numbers and small pictures of it are kept."""
    side, most = _side(layers, picture_bytes)
    return {layer.label: on_page(layer) | _of_value(layer, side, most) for layer in layers}


def _side(layers: Sequence[Layer], picture_bytes: int) -> tuple[int, int]:
    """How large pictures are, and how many of one layer, so that all of them fit; none, where even the least do not."""
    counts = [shape[-3] for layer in layers if (shape := layer.shape) is not None and len(shape) in (3, 4)]
    for most in (MOST_PICTURES, 4, 2):
        for side in SIDES:
            if sum(min(count, most) for count in counts) * side * side * 4 / 3 <= picture_bytes:
                return side, most
    return 0, 0


def _of_value(layer: Layer, side: int, most: int) -> Card:
    """What the recorded value looks like."""
    try:
        tensors = tensors_in(layer.value)
    except NotSaved:
        return {"missing": "The value was not kept."}
    numbers = [_statistics(one) for tensor in tensors[:4] if (one := statistics(tensor))]
    shown = pictures(tensors[0], most, side) if tensors and side else None
    return ({"statistics": numbers} if numbers else {}) | ({"pictures": _pictures(shown)} if shown else {})


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
