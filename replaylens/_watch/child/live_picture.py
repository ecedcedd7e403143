"""The newest value of a row as a small heat map.

In: the values of a sample. Out: bytes, one a pixel, and what they mean. Feature maps are tiled; where a map is larger
than its place, a pixel is the mean of a block, so that one NaN shows. Gaps between tiles are no values.
"""

from __future__ import annotations

import base64
from math import ceil, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .statistics import real
from .wire import Sample

SIDE = 128  # pixels of a picture, at most
GAP, WRONG, SHADES = 255, 254, 253  # bytes: between tiles; NaN or infinite; 0 to SHADES are values
PARAMETERS = ("weight", "weight_grad", "update")

Values = NDArray[np.floating]


@np.errstate(all="ignore")
def picture_of(sample: Sample) -> dict[str, Any] | None:
    """A heat map for JSON, or None where there is nothing to see: a single number, an empty tensor."""
    values = real(sample.values)
    if values.size < 2:
        return None
    maps, words = _maps(values, sample)
    grid, block = _tiled(maps)
    shades, low, high = _shades(grid)
    return {
        "step": sample.step,
        "rows": grid.shape[0],
        "columns": grid.shape[1],
        "low": low,
        "high": high,
        "words": words + (f"; a pixel is the mean of {block[0]} × {block[1]}" if max(block) > 1 else ""),
        "data": base64.b64encode(shades.tobytes()).decode("ascii"),
    }


def _maps(values: Values, sample: Sample) -> tuple[Values, str]:
    """Matrices to be tiled, (maps, rows, columns), and what they are."""
    if values.shape == sample.shape:
        layout, words = _layout(sample.shape, sample.what)
        count = layout[0] * layout[1] * layout[2]
        return values.reshape(-1)[:count].reshape(layout), words
    step = -(-sample.size // values.size)
    if sample.thinned and len(sample.shape) > 1 and -(-sample.size // step) == values.size:
        layout, words = _layout(sample.shape, sample.what)
        return _spread(values, layout, step), f"{words}; one of {step} values, in the order of memory"
    width = min(SIDE, ceil(sqrt(values.size)))  # of a sparse or a long one
    used = values.size // width * width
    return values[:used].reshape(1, -1, width), f"{used:,} of {sample.size:,} values, line by line"


def _layout(shape: tuple[int, ...], what: str) -> tuple[tuple[int, int, int], str]:
    """Which maps are shown, (maps, rows, columns), from the first value on, and what they are."""
    if len(shape) < 2:
        return (1, 1, prod(shape)), f"{prod(shape):,} values"
    rows, columns = shape[-2:]
    if len(shape) == 2:
        return (1, rows, columns), f"{rows:,} × {columns:,}"
    first = 0 if what in PARAMETERS else max(1, len(shape) - 3)  # of a batch, the first; of images, all channels
    maps = prod(shape[first:-2])
    most = max(1, min(maps, (SIDE // (min(max(rows, columns), 24) + 1)) ** 2))
    which = f"{most} of {maps} maps" if most < maps else f"{most} maps" if most > 1 else "one map"
    where = f"[{', '.join(['0'] * first)}]: " if first else ""
    return (most, rows, columns), f"{where}{which} of {rows:,} × {columns:,}"


def _spread(values: Values, layout: tuple[int, int, int], step: int) -> Values:
    """Maps of which each `step`-th value is known: at each pixel, the one before it."""
    maps, rows, columns = layout
    down, across = np.arange(0, rows, ceil(rows / SIDE)), np.arange(0, columns, ceil(columns / SIDE))
    places = (np.arange(maps)[:, None, None] * rows + down[:, None]) * columns + across
    return values[np.minimum(places // step, values.size - 1)]


def _tiled(maps: Values) -> tuple[Values, tuple[int, int]]:
    """The maps side by side in about a square, infinity between them; and the block that a pixel is the mean of."""
    count, rows, columns = maps.shape
    across = min(count, max(1, round(sqrt(count * rows / columns))))
    down = ceil(count / across)
    block = _block(rows, (SIDE + 1) // down - (count > 1)), _block(columns, (SIDE + 1) // across - (count > 1))
    maps = _means(maps, *block)
    _, rows, columns = maps.shape
    grid = np.full((down * (rows + 1) - 1, across * (columns + 1) - 1), np.inf)
    for n, one in enumerate(maps):
        top, left = n // across * (rows + 1), n % across * (columns + 1)
        grid[top : top + rows, left : left + columns] = np.where(np.isfinite(one), one, np.nan)
    return grid, block


def _block(size: int, room: int) -> int:
    return ceil(size / max(1, room))


def _means(maps: Values, down: int, across: int) -> Values:
    """The mean of each block; the last ones may be smaller."""
    for axis, size in ((1, down), (2, across)):
        if size > 1:
            starts = np.arange(0, maps.shape[axis], size)
            counts = np.diff(starts, append=maps.shape[axis])
            shape = [1, 1, 1]
            shape[axis] = -1
            maps = np.add.reduceat(maps / counts.repeat(counts).reshape(shape), starts, axis=axis)
    return maps


def _shades(grid: Values) -> tuple[NDArray[np.uint8], float, float]:
    """A byte a pixel, and the values of the lowest and the highest. Signed values are centred at zero; a few extremes
    do not flatten the rest.
    """
    finite = grid[np.isfinite(grid)]
    low, high = (float(one) for one in np.quantile(finite, (0.01, 0.99))) if finite.size else (0.0, 0.0)
    if low < 0:
        high = max(-low, high)
        low = -high
    if low == high:
        low, high = (0.0, 2 * high) if high > 0 else (-1.0, 1.0)
    scaled = (np.nan_to_num(grid, nan=0.0, posinf=0.0, neginf=0.0) - low) * (SHADES / (high - low))
    shades = np.clip(np.round(scaled), 0, SHADES).astype(np.uint8)
    shades[np.isnan(grid)], shades[np.isinf(grid)] = WRONG, GAP
    return shades, _short(low), _short(high)


def _short(number: float) -> float:
    return float(f"{number:.4g}")
