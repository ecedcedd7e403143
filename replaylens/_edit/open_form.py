"""What the open form of a fused function gives, and what all of them need.

An open form is a plain function that takes what the fused one takes, and is written in open torch operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Opened(NamedTuple):
    """What the fused function gives, and the values inside that have a name.

    A name stands for a tensor, or for a list of steps: dicts of names and tensors, the same in each.
    """

    result: Any
    named: dict[str, Any]


def in_full(tensor: Tensor) -> Tensor:
    """Half precision in float32: fused functions compute so, and round once at the end."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
