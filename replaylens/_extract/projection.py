"""SRP: a sparse random projection of a layer onto a few thousand numbers, the same in every process and on every day.

In: a value, a tensor of rows. Out: its rows, projected. Places and signs come from a digest of the layer's name, the
sizes and the seed, and never from a generator of the user's: workers, resumed extractions and other layers' order
change nothing. It is not scikit-learn's matrix, which depends on its version; distances between rows are kept as well
as by that one.
"""

from __future__ import annotations

import hashlib
import math

import torch
from attrs import frozen
from torch.nn.functional import embedding_bag

from .numpy_later import np

_IN_FULL = (torch.float32, torch.float64)


@frozen
class SRP:
    """A sparse random projection onto `width` numbers: `reduce=replaylens.SRP(4096)`.

    Each of them is a sum of some entries of the layer with random signs, `density` of all, by default one over the root
    of their number. Distances between rows are kept within a few per cent at a width of some thousand.

    >>> SRP(2, seed=1)
    SRP(width=2, seed=1, density=None)
    """

    width: int
    seed: int = 0
    density: float | None = None

    def __attrs_post_init__(self) -> None:
        if any(type(one) is not int for one in (self.width, self.seed)) or self.width < 1:
            raise ValueError(f"SRP takes a number of entries, one or more, and a whole number as seed, not {self!r}.")
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(
                f"density= is the share of a layer's entries in each sum, above 0 and at most 1, not {self.density!r}."
            )


@frozen(eq=False)
class Sums:
    """A sparse matrix whose rows have one number of entries each: where they are, and what they are."""

    places: torch.Tensor
    weights: torch.Tensor


Matrices = dict[tuple[SRP, int, torch.device, torch.dtype], Sums]


def projected(srp: SRP, value: torch.Tensor, layer: str, matrices: Matrices) -> torch.Tensor:
    """The rows of a layer's value, projected, in float32 (float64 stays). What is drawn is kept in `matrices`."""
    if value.is_complex():
        raise TypeError("SRP projects real numbers. Put `torch.view_as_real` before it.")
    rows = value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
    full = rows if rows.dtype in _IN_FULL else rows.float()
    if not full.numel():
        return full.new_zeros(len(full), srp.width)
    key = srp, full.shape[1], full.device, full.dtype
    if key not in matrices:
        drawn = _drawn(srp, layer, full.shape[1])
        matrices[key] = Sums(drawn.places.to(full.device), drawn.weights.to(full.device, full.dtype))
    sums = matrices[key]
    # Weighted sums of rows, several times as fast as a product with a sparse tensor.
    found = embedding_bag(sums.places, full.detach().t().contiguous(), per_sample_weights=sums.weights, mode="sum")
    return found.t().contiguous()


def _drawn(srp: SRP, layer: str, width: int) -> Sums:
    """The projection of one layer of this width, in float64: in each row one entry of each of `count` stretches of the
    layer, so that none is taken twice. It is as large as the root of its stretch, so that squared lengths are right on
    average, whatever the layer holds.
    """
    density = 1 / math.sqrt(width) if srp.density is None else srp.density
    count = min(width, max(1, round(width * density)))
    said = f"replaylens.SRP {layer} {width} {srp.width} {srp.seed} {count}"
    seed = int.from_bytes(hashlib.sha256(said.encode()).digest(), "little")
    drawn = np.random.Philox(key=seed % 2**128).random_raw(srp.width * count).reshape(srp.width, count)
    begin = np.arange(count, dtype=np.int64) * width // count
    sizes = np.diff(begin, append=width)
    places = begin + ((drawn >> np.uint64(1)) % sizes.astype(np.uint64)).astype(np.int64)
    weights = np.where(drawn & np.uint64(1), 1.0, -1.0) * np.sqrt(sizes / srp.width)
    small = np.int32 if width < 2**31 else np.int64
    return Sums(torch.from_numpy(places.astype(small)), torch.from_numpy(weights))
