"""Values of any shape as a matrix to look at.

In: a sample. Out: a matrix, and words for what of the sample it shows. A matrix is itself; images and kernels become
tiles; of a batch of images the first is shown.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..statistics import real
from ..wire import Sample
from .canvas import Numbers

MOST_TILES = 256
MOST_SPREAD = 512  # rows and columns of what was thinned
PARAMETERS = "weight", "weight_grad", "update"


class Arranged(NamedTuple):
    """A matrix of the values; of a large one that was thinned, a smaller matrix, and the shape of the large one."""

    matrix: Numbers
    empty: NDArray[np.bool_] | None = None  # between tiles, where there is no value
    said: str = ""
    of: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it shows."""
        return self.of or self.matrix.shape


def arranged(sample: Sample, gap: int = 1) -> Arranged | None:
    """The values as a matrix, or None where their places are not known or there are none."""
    values: Any = real(sample.values)
    shape = [one for one in sample.shape if one != 1]
    if not values.size or not has_places(sample):
        return None
    if values.size != math.prod(shape):
        return spread(values, shape[0], shape[1], thinned_by(sample))
    values = values.reshape(shape)
    if values.ndim <= 2:
        return Arranged(values.reshape(1, -1) if values.ndim < 2 else values)
    if values.ndim == 4 and sample.what in PARAMETERS and values.shape[0] * values.shape[1] <= 16 * MOST_TILES:
        return tiled(values, gap, "")
    said = ""
    if values.ndim > 3 and sample.what not in PARAMETERS:
        said, values = f"item 0 of {values.shape[0]}", values[0]
    tiles = values.reshape(-1, *values.shape[-2:])
    if len(tiles) > MOST_TILES:
        said = f"{said}, " * bool(said) + f"{MOST_TILES} of {len(tiles)} maps"
        tiles = tiles[:MOST_TILES]
    wide = grid_of(len(tiles), *tiles.shape[1:])
    missing = -len(tiles) % wide
    empty = np.zeros(len(tiles) + missing, bool)
    empty[len(tiles) :] = True
    tiles = np.concatenate([tiles, np.zeros((missing, *tiles.shape[1:]), tiles.dtype)])
    return tiled(tiles.reshape(-1, wide, *tiles.shape[1:]), gap, said, empty.reshape(-1, wide))


def has_places(sample: Sample) -> bool:
    """Whether it is known which value lies where: of all values, or of each third one, say, of a matrix."""
    if sample.size != math.prod(sample.shape):
        return False  # of a sparse one, what is stored
    is_matrix = sum(one != 1 for one in sample.shape) == 2
    return sample.values.size == sample.size or (sample.thinned and is_matrix and thinned_by(sample) > 1)


def thinned_by(sample: Sample) -> int:
    """The step from each value that was sent to the next, in the order of memory; 0 if their number does not tell."""
    count = sample.values.size
    step = -(-sample.size // count) if count else 0
    return step if 0 < step < count and -(-sample.size // step) == count else 0


def spread(values: Any, rows: int, columns: int, step: int) -> Arranged:
    """A matrix of which each `step`-th value is known: at each place, the known one before it in its row, if there is
    one, else the one after it; and whatever is not finite.
    """
    down, across = min(rows, MOST_SPREAD), min(columns, MOST_SPREAD)
    begins = (np.arange(down) * rows // down)[:, None] * columns
    known = (begins + np.arange(across) * columns // across) // step
    known += (known * step < begins) & (known * step + step < begins + columns)
    matrix = values[np.minimum(known, values.size - 1)]
    wrong = np.nonzero(~np.isfinite(values))[0]
    row, column = np.divmod(wrong * step, columns)
    matrix[row * down // rows, column * across // columns] = values[wrong]
    return Arranged(matrix, None, f"one of {step} values, in the order of memory", (rows, columns))


def grid_of(count: int, height: int, width: int) -> int:
    """How many tiles stand beside each other: about as for a picture of three to four, with few places left empty."""
    best = max(math.sqrt(count * height / width * 4 / 3), 1.0)
    near = range(max(round(best * 0.7), 1), min(round(best * 1.4), count) + 1)
    return min(near, key=lambda wide: -count % wide / count + abs(math.log(wide / best)), default=count)


def tiled(tiles: Numbers, gap: int, said: str, missing: NDArray[np.bool_] | None = None) -> Arranged:
    """A matrix of matrices as one."""
    down, across, height, width = tiles.shape
    padded = np.zeros((down, height + gap, across, width + gap), tiles.dtype)
    padded[:, :height, :, :width] = tiles.transpose(0, 2, 1, 3)
    empty = np.ones(padded.shape, bool)
    empty[:, :height, :, :width] = False if missing is None else missing[:, None, :, None]
    form = down * (height + gap), across * (width + gap)
    last = slice(None, -gap or None)
    return Arranged(padded.reshape(form)[last, last], empty.reshape(form)[last, last], said)


def reduced(matrix: Numbers, height: int, width: int, middle: float) -> Numbers:
    """At most so many rows and columns. Of values that fall together, the one farthest from the middle is shown: single
    large ones stay, and a value that is not a number hides its neighbours.
    """
    for axis, most in enumerate((height, width)):
        if matrix.shape[axis] > most:
            begins = np.arange(most) * matrix.shape[axis] // most
            high, low = (one.reduceat(matrix, begins, axis) for one in (np.maximum, np.minimum))
            with np.errstate(all="ignore"):
                matrix = np.where(high - middle >= middle - low, high, low)
    return matrix
