"""A picture to draw on, or a part of one: text, lines, areas, colours of values.

All drawing is a few operations on arrays; nothing is drawn pixel by pixel, and edges are smooth.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .colormaps import BACKGROUND, INK, Colour, Colours
from .lettering import fitted, mask_of

Numbers = NDArray[np.floating]


class Canvas:
    """Rows of pixels. A part of it shares its memory."""

    def __init__(self, pixels: Colours) -> None:
        self.pixels = pixels
        self.height, self.width = pixels.shape[:2]

    @classmethod
    def new(cls, width: int, height: int, colour: Colour = BACKGROUND) -> Canvas:
        return cls(np.full((height, width, 3), colour, np.uint8))

    def part(self, left: float, top: float, right: float, bottom: float) -> Canvas:
        """The pixels between these borders, as far as they are here."""
        left, right = (min(max(round(one), 0), self.width) for one in (left, right))
        top, bottom = (min(max(round(one), 0), self.height) for one in (top, bottom))
        return Canvas(self.pixels[int(top) : int(bottom), int(left) : int(right)])

    def fill(self, colour: Colour) -> None:
        self.pixels[:] = np.full((self.width, 3), colour, np.uint8)  # whole rows: four times as fast

    def blend(self, cover: Numbers | NDArray[np.uint8], colour: Colour, left: int = 0, top: int = 0) -> None:
        """Lay a colour over the pixels, as far as they are covered: from 0 to 1, or to 255 in bytes."""
        part = self.pixels[max(top, 0) : top + cover.shape[0], max(left, 0) : left + cover.shape[1]]
        cover = cover[max(-top, 0) :, max(-left, 0) :][: part.shape[0], : part.shape[1], None]
        share = cover.astype(np.float32) / (255 if cover.dtype == np.uint8 else 1)
        part[:] = (part + share * (np.array(colour, np.float32) - part) + 0.5).astype(np.uint8)

    def text(self, text: str, x: float, y: float, size: int = 12, colour: Colour = INK, align: float = 0.0) -> float:
        """A line of text below y: it begins at x, or with `align=1` ends there. Gives its width."""
        text = fitted(text, size, max(self.width, 0))
        if not text or not self.height:
            return 0.0
        mask = mask_of(text, size)
        left = round(min(max(x - align * mask.shape[1], 0), self.width - mask.shape[1]))
        self.blend(mask, colour, left, round(y))
        return float(mask.shape[1])

    def columns(self, top: Numbers, bottom: Numbers, colour: Colour, cover: float = 1.0) -> None:
        """Fill each column of pixels from `top` to `bottom`; where one is NaN, not at all."""
        rows = np.arange(self.height, dtype=np.float32)[:, None]
        top, bottom = (np.nan_to_num(one, nan=-1e4).astype(np.float32) for one in (top, bottom))
        part = np.minimum(bottom - rows, 1) - np.maximum(top - rows, 0)
        self.blend(part.clip(0, 1) * np.float32(cover), colour)

    def curve(self, ys: Numbers, colour: Colour, width: float = 1.6) -> None:
        """A line through a y of each column. It breaks where one is NaN."""
        before = np.concatenate([ys[:1], ys[:-1]])
        middle = np.where(np.isnan(before), ys, (ys + before) / 2)
        after = np.concatenate([middle[1:], ys[-1:]])
        after = np.where(np.isnan(after), ys, after)
        self.columns(
            np.fmin(np.fmin(middle, after), ys) - width / 2, np.fmax(np.fmax(middle, after), ys) + width / 2, colour
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: Colour, cover: float = 1.0) -> None:
        """A smooth straight line, one pixel wide."""
        if not np.isfinite([x, y, to_x, to_y]).all():
            return
        long = max(abs(to_x - x), abs(to_y - y), 1e-6)
        part = np.linspace(0, 1, min(math.ceil(long) + 1, 8192))
        xs, ys = x + part * (to_x - x), y + part * (to_y - y)
        steep = abs(to_y - y) > abs(to_x - x)
        across = xs if steep else ys
        low = np.floor(across).astype(int)
        along = np.round(ys if steep else xs).astype(int)
        for place, share in ((low, 1 - (across - low)), (low + 1, across - low)):
            self.dots(*((place, along) if steep else (along, place)), share * cover, colour)

    def dots(self, xs: NDArray[np.intp], ys: NDArray[np.intp], cover: Numbers, colour: Colour | Colours) -> None:
        """Blend single pixels; those outside are left out."""
        inside = (xs >= 0) & (ys >= 0) & (xs < self.width) & (ys < self.height)
        ys, xs, share = ys[inside], xs[inside], cover[inside, None]
        shade = np.asarray(colour, np.float64)
        shade = shade[inside] if shade.ndim == 2 else shade
        old = self.pixels[ys, xs]
        self.pixels[ys, xs] = (old + share * (shade - old) + 0.5).astype(np.uint8)

    def lay(self, pixels: Colours, cover: Numbers) -> None:
        """Lay another picture of this size over this one, as far as it covers. Most pixels are covered whole or not."""
        np.copyto(self.pixels, pixels, where=(cover >= 1)[..., None])
        edge = np.nonzero((cover > 0) & (cover < 1))
        old = self.pixels[edge]
        self.pixels[edge] = (old + cover[edge][:, None] * (pixels[edge] - old.astype(np.float32)) + 0.5).astype(
            np.uint8
        )

    def put(self, pixels: Colours, left: float = 0, top: float = 0) -> None:
        """Copy pixels in, as far as they fit."""
        x, y = round(left), round(top)
        part = self.pixels[y : y + pixels.shape[0], x : x + pixels.shape[1]]
        part[:] = pixels[: part.shape[0], : part.shape[1]]


def short(number: float) -> str:
    """A number in few characters."""
    text = f"{number:.3g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
