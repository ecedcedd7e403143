"""The numbers of a sample: mean, spread, extremes, quantiles and a histogram.

In: a Sample. Out: Stats. All are of the finite values, with counts of the others; complex values count by their
magnitude. One sort gives nearly everything, and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .wire import Sample

BINS = 64
TAIL = 8  # of them, on a side where values lie far out
FAR = 4.0  # from the median, in spreads
SHARES = (0.05, 0.25, 0.50, 0.75, 0.95)
LARGEST = float(np.finfo(np.float64).max)

Array = NDArray[np.floating]


class Histogram(NamedTuple):
    """How many values lie between each two edges. The edges reach from the least to the greatest value; they are even
    as far as FAR spreads from the median and grow from there, so that one extreme does not empty all bins but two.
    """

    edges: tuple[float, ...]  # one more than counts
    counts: tuple[int, ...]


class Stats(NamedTuple):
    """What the finite values of a sample are like. None: there is none. Where only some values were sent, `norm`,
    `nans` and `infs` are scaled up to the whole tensor, unless the counts are known exactly.
    """

    mean: float | None
    std: float | None
    least: float | None
    most: float | None
    norm: float | None
    nans: int
    infs: int
    zeros: float | None  # share of the finite values
    quantiles: tuple[float, ...] | None  # at 5, 25, 50, 75, 95 percent
    histogram: Histogram | None

    @property
    def spread(self) -> float:
        """The standard deviation as far as the middle tells it, so that a few extremes do not; 0.0 if all are equal."""
        if self.quantiles is None or self.std is None:
            return 0.0
        low, first, _, third, high = self.quantiles
        return (third / 1.349 - first / 1.349) or (high / 3.29 - low / 3.29) or self.std


@np.errstate(all="ignore")  # what overflows on the way is clipped
def of(sample: Sample) -> Stats:
    """The numbers of a sample."""
    values = real(sample.values)
    ordered, nans, infs = finite_in_order(values)
    share = sample.size / values.size if sample.thinned and values.size else 1.0  # how many each value stands for
    nans = sample.nans if sample.nans is not None else round(nans * share)
    infs = sample.infs if sample.infs is not None else round(infs * share)
    if not ordered.size:
        return Stats(None, None, None, None, None, nans, infs, None, None, None)
    mean, std, norm = moments(ordered, share)
    least = extreme(sample.least, min, float(ordered[0]))
    most = extreme(sample.most, max, float(ordered[-1]))
    zeros = np.searchsorted(ordered, 0, "right") - np.searchsorted(ordered, 0, "left")
    quantiles = quantiles_of(ordered)
    stats = Stats(mean, std, least, most, norm, nans, infs, float(zeros / ordered.size), quantiles, None)
    return stats._replace(histogram=histogram_of(ordered, stats))


def real(values: NDArray[Any]) -> Array:
    """Values as floating point numbers; complex ones by their magnitude."""
    if values.dtype.kind == "c":
        return np.abs(values)
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)


def finite_in_order(values: Array) -> tuple[Array, int, int]:
    """The finite values, sorted, and how many are NaN and infinite."""
    ordered = np.sort(values, axis=None)
    infinite = np.array(np.inf, ordered.dtype)  # of the same type: else the whole array is converted
    first = np.searchsorted(ordered, -infinite, "right")
    last, end = (np.searchsorted(ordered, infinite, side) for side in ("left", "right"))
    return ordered[first:last], ordered.size - int(end), int(first + end - last)


def moments(ordered: Array, share: float) -> tuple[float, float, float]:
    """Mean, standard deviation and norm: of values divided by the largest one, so that no square overflows."""
    largest = float(max(abs(ordered[0]), abs(ordered[-1]))) or 1.0
    scaled = ordered.astype(np.float64) / largest
    mean = float(scaled.mean())
    norm = float(np.sqrt(np.dot(scaled, scaled) * share))
    scaled -= mean
    std = float(np.sqrt(np.dot(scaled, scaled) / scaled.size))
    return mean * largest, std * largest, min(norm * largest, LARGEST)


def extreme(exact: float | None, further: Callable[[float, float], float], seen: float) -> float:
    """The extreme of the whole tensor, where it is known and a number, else of the values that were sent."""
    return seen if exact is None or not np.isfinite(exact) else further(float(exact), seen)


def quantiles_of(ordered: Array) -> tuple[float, ...]:
    """Values of the sample at SHARES, between two where the share falls between them."""
    places = np.multiply(SHARES, ordered.size - 1)
    below = places.astype(np.intp)
    left, right = (ordered[np.minimum(below + more, ordered.size - 1)].astype(np.float64) for more in (0, 1))
    part = places - below
    return tuple((left * (1 - part) + right * part).tolist())


def histogram_of(ordered: Array, stats: Stats) -> Histogram:
    """Counts between BINS + 1 edges."""
    edges = edges_of(stats)
    inner = np.searchsorted(ordered, edges[1:-1].astype(ordered.dtype), "left")
    counts = np.diff(inner, prepend=0, append=ordered.size)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def edges_of(stats: Stats) -> NDArray[np.float64]:
    """Edges from the least to the greatest value, TAIL of the bins on each side for what lies far from the median."""
    assert stats.least is not None and stats.most is not None and stats.quantiles is not None
    least, most, middle, far = stats.least, stats.most, stats.quantiles[2], FAR * stats.spread
    if least == most:
        around = abs(least) / 2 or 0.5
        return np.clip(np.linspace(-1, 1, BINS + 1) * around + least, -LARGEST, LARGEST)
    if not 0 < far < LARGEST / 2:
        return between(least, most, BINS)
    low, high = max(least, middle - far), min(most, middle + far)
    left = middle - growing(far, middle - least)[::-1] if least < low else np.empty(0)
    right = middle + growing(far, most - middle) if high < most else np.empty(0)
    inner = between(low, high, BINS - left.size - right.size)
    edges = np.concatenate([left, inner, right])
    edges[0], edges[-1] = least, most
    return np.maximum.accumulate(np.clip(edges, least, most))


def between(low: float, high: float, bins: int) -> NDArray[np.float64]:
    """Even edges, also where the difference of their ends is more than the largest number."""
    part = np.linspace(0, 1, bins + 1)
    return low * (1 - part) + high * part


def growing(near: float, far: float) -> NDArray[np.float64]:
    """Distances that grow by one factor from `near`, left out, to `far`."""
    return np.geomspace(near, min(far, LARGEST), TAIL + 1)[1:]
