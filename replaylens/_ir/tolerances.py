"""All tolerances of the package, with their reasons.

What a replay promises and a check demands is equality to the last bit (equality.py). Only where other kernels, or
another order of additions, compute mathematically equal results may last bits differ. The error of a sum scales with
its largest summands, which may cancel: so a share of the largest number in the tensor is allowed even for small
numbers.
"""

from __future__ import annotations

import math

import torch
from attrs import frozen


@frozen
class Tolerance:
    """How far numbers may be apart: a share of each, plus a share of the largest in their tensor, plus an amount."""

    of_each: float = 0.0
    of_largest: float = 0.0
    absolute: float = 0.0

    def holds(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """True if two tensors of one shape and dtype are this close. Shares are of the other; NaN equals NaN."""
        if torch.equal(one, other):
            return True
        amount = self.absolute + (self.of_largest * largest(other) if self.of_largest else 0.0)
        return torch.allclose(one, other, rtol=self.of_each, atol=amount, equal_nan=True)


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value in a tensor."""
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def is_close_number(one: float, other: float) -> bool:
    """True if a number that left torch is the same up to rounding. There is no tensor around it to scale by, so near
    zero a fixed amount is allowed.
    """
    return math.isclose(one, other, rel_tol=REARRANGED.of_largest, abs_tol=1e-6)


def unit_error(dtype: torch.dtype) -> float:
    """How far products of rows that are orthonormal in this dtype may be from one and zero."""
    return max(1e-4, 2 * torch.finfo(dtype).eps)


# One stretch of calls made twice on the same values. Kernels that add by atomics differ in the last bits.
REPEATED = Tolerance(of_each=1e-5, absolute=1e-7)

# A whole forward made twice: such differences have grown from layer to layer.
REPEATED_FORWARD = Tolerance(of_each=1e-3, absolute=1e-5)

# One thing computed by other operations: a fused kernel and its open form, additions in another order each time.
REARRANGED = Tolerance(of_largest=1e-3)
REARRANGED_NARROW = Tolerance(of_largest=0.05)  # where steps in between are rounded to 16 bits

# The same operation on another size of batch, as a proof that its rows are independent: one row mistaken for another
# is wrong by about as much as the numbers are large.
BATCHED = Tolerance(of_each=1e-4, of_largest=1e-4)
BATCHED_NARROW = Tolerance(of_each=2e-2, of_largest=2e-2)  # float16, bfloat16

# A cheap first test, which only saves proofs: what fails it is not tried, what passes is proved.
LIKELY = Tolerance(of_each=1e-3, absolute=1e-6)

# An amount, for outputs of layers that normalise: their numbers are about one.
FUSED_LAYER = Tolerance(absolute=1e-3)

# Rows of a picture that are taken for shares of one, also in bfloat16.
SHARES = Tolerance(absolute=1e-2)
