"""How alike two representations are: dissimilarity matrices by rsatoolbox, and linear CKA.

In: values of one layer, a row for each stimulus: tensors, arrays, lazy ones. Out: a matrix of stimuli, or one number.
All is computed in float64, and units lie along whatever axes there are behind the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .._ir.util import optional
from ..errors import BadFeatures
from .handover import real_numbers, require_finite
from .lazy_array import Array
from .numpy_later import np


def rdm(x: Any, method: str = "correlation", **options: Any) -> Array:
    """The dissimilarity of each pair of stimuli, as a square matrix: `rdm(features["fc"])`.

    rsatoolbox computes it, by any method that its calc_rdm has: "correlation", "euclidean" (squared, a unit), "poisson"
    ... `features.rdms(layers)` gives its own RDMs, with labels, for its comparisons.
    """
    values = matrix(x, "x")
    dataset = optional("rsatoolbox.data", "rsa").Dataset(values)
    found: Array = optional("rsatoolbox.rdm", "rsa").calc_rdm(dataset, method, **options).get_matrices()[0]
    return found


def cka(x: Any, y: Any, unbiased: bool = False) -> float:
    """Linear centered kernel alignment of two representations of the same stimuli: 1 if one is the other, rotated and
    scaled as a whole.

    With few stimuli and many units it is near 1 even for noise; `unbiased=True` takes that out (Song et al. 2012), and
    may be below 0. NaN where one of them is the same for all stimuli.

    >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [3.0, 5.0]])
    >>> round(cka(x, 3 * x), 6)
    1.0
    """
    first, second = matrix(x, "x"), matrix(y, "y")
    if len(first) != len(second):
        raise BadFeatures(f"cka compares the same stimuli: x has {len(first)} rows, y has {len(second)}.")
    if len(first) < (least := 4 if unbiased else 2):
        raise BadFeatures(f"cka{' without bias' * unbiased} needs {least} stimuli or more, and there are {len(first)}.")
    first, second = _centered(first), _centered(second)
    both, alone = _alignment(first, second, unbiased), [_alignment(one, one, unbiased) for one in (first, second)]
    return both / math.sqrt(alone[0] * alone[1]) if min(alone) > 0 else math.nan


def _centered(x: Array) -> Array:
    """Units without their means; zeros where one is the same for all stimuli, which the mean may miss by a rounding."""
    return np.where(np.ptp(x, 0) > 0, x - x.mean(0), 0.0)


def _alignment(x: Array, y: Array, unbiased: bool) -> float:
    """The Hilbert-Schmidt independence criterion of two centered matrices, up to a factor of the number of rows.

    Without bias the products of a stimulus with itself are left out. With columns that are centered, all that is left
    of the sums over rows of such matrices is what stood on their diagonals.
    """
    found = _squared_products(x, y)
    if not unbiased:
        return found
    rows, own, others = len(x), (x**2).sum(1), (y**2).sum(1)
    shared = rows / (rows - 2) * float(own @ others)
    return found - shared + float(own.sum() * others.sum()) / ((rows - 1) * (rows - 2))


def _squared_products(x: Array, y: Array) -> float:
    """The sum of squares of `x.T @ y`, by units or by stimuli, of whichever there are fewer."""
    if x.shape[1] * y.shape[1] <= len(x) ** 2:
        return float(((x.T @ y) ** 2).sum())
    return float(((x @ x.T) * (y @ y.T)).sum())


def matrix(x: Any, name: str) -> Array:
    """Stimuli and units, in float64. Raises if a value is missing."""
    if isinstance(x, (Mapping, str)):
        raise BadFeatures(
            f"{name} is {'the name of a layer' if isinstance(x, str) else 'all layers'}. Give the values of one: "
            "features['fc']; or take features.rdms() for all of them."
        )
    given = x.detach().cpu() if isinstance(x, torch.Tensor) else np.asarray(x)
    if isinstance(given, torch.Tensor):
        given = (given if given.is_complex() else given.double()).resolve_conj().resolve_neg().numpy()
    if not given.ndim:
        raise BadFeatures(
            f"{name} is one number, and no values of stimuli: give an array with a row for each stimulus."
        )
    values = real_numbers(given.reshape(len(given), -1 if given.size else 0), name)
    require_finite(values, name)
    return values
