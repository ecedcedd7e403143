"""Colours of values, as tables, and the few colours of everything around them."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]
Colours = NDArray[np.uint8]

BACKGROUND: Colour = (16, 18, 23)
PANEL: Colour = (26, 29, 36)
GRID: Colour = (62, 68, 80)
FAINT: Colour = (150, 158, 172)
INK: Colour = (235, 237, 240)
ACCENT: Colour = (110, 180, 255)
ALARM: Colour = (255, 84, 84)
LATE: Colour = (255, 176, 66)
NOT_A_NUMBER: Colour = (255, 0, 190)  # in no table: what is not finite is seen at once
INFINITE: Colour = (255, 60, 30)
MINUS_INFINITE: Colour = (0, 220, 255)

LIT = 85  # of 255

ANCHORS = {  # evenly spaced, from the least value to the greatest
    "viridis": "440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725",
    "magma": "000004 180f3d 440f76 721f81 9e2f7f cd4071 f1605d fd9668 feca8d fcfdbf",
    "inferno": "000004 1b0c41 4a0c6b 781c6d a52c60 cf4446 ed6925 fb9b06 f7d13d fcffa4",
    "turbo": "30123b 4145ab 4675ed 39a2fc 1bcfd4 24eca6 61fc6c a4fc3b d1e834 f3c63a fe9b2d f36315 d93806 b11901 7a0402",
    "coolwarm": "3b4cc0 6788ee 9abbff c9d7f0 dddddd f0cdbb f7a889 e26952 b40426",
    "grey": "0a0a0a f5f5f5",
}


@cache
def table(name: str) -> Colours:
    """256 colours, from the least value to the greatest."""
    anchors = np.array([tuple(bytes.fromhex(one)) for one in ANCHORS[name].split()], float)
    places = np.linspace(0, len(anchors) - 1, 256)
    return np.stack([np.interp(places, range(len(anchors)), one) for one in anchors.T], -1).round().astype(np.uint8)


def lit(name: str) -> Colours:
    """Those of the table that are seen on a dark ground."""
    colours = table(name)
    return colours[colours @ np.array([0.21, 0.72, 0.07]) > LIT]


def coloured(shares: NDArray[np.floating], name: str) -> Colours:
    """Values from 0 to 1 as colours; NaN as the first one."""
    places = np.nan_to_num(shares * 255 + 0.5).clip(0, 255).astype(np.uint8)
    return table(name)[places]
