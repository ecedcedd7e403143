"""Text as masks that are laid over a picture."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray


@cache
def font(size: int) -> Any:
    """A font with many alphabets if the system has it, else the one that comes with Pillow."""
    fonts = import_module("PIL.ImageFont")
    try:
        return fonts.truetype("DejaVuSans.ttf", size)
    except OSError:
        return fonts.load_default(size)


@lru_cache(maxsize=1024)
def mask_of(text: str, size: int) -> NDArray[np.uint8]:
    """How much of each pixel a line of text covers, from 0 to 255."""
    letters = font(size)
    width, height = math.ceil(letters.getlength(text)) + 2, sum(letters.getmetrics())
    image = import_module("PIL.Image").new("L", (width, height))
    import_module("PIL.ImageDraw").Draw(image).text((1, 0), text, fill=255, font=letters)
    return np.asarray(image)


def width_of(text: str, size: int) -> float:
    return float(font(size).getlength(text))


@lru_cache(maxsize=1024)
def fitted(text: str, size: int, width: float) -> str:
    """The text, its middle left out where it is too long. Its end, which tells layers apart, stays longer."""
    text = "".join(one if one.isprintable() else " " for one in text)
    text = text[:400] + text[-400:] if len(text) > 800 else text
    if width_of(text, size) <= width:
        return text
    low, high = 0, len(text)
    while low < high:
        kept = (low + high + 1) // 2
        low, high = (kept, high) if width_of(shortened(text, kept), size) <= width else (low, kept - 1)
    return shortened(text, low)


def shortened(text: str, kept: int) -> str:
    """So many characters of it, and an ellipsis."""
    begin = kept * 2 // 5
    return f"{text[:begin]}…{text[len(text) - kept + begin :]}" if kept else ""
