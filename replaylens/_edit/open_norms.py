"""Normalisations as the open torch operations that their fused forms stand for.

In: the arguments of a fused function. Out: what it gives, and names for what it hides: the `scale` by which features
are multiplied (one number for each group that is normalised together), and the `normalized` features, before weight
and bias. Plain functions of tensors; nothing of graphs is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .open_form import Opened, in_full


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Opened:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimensions."""
    x, dims = in_full(input), tuple(range(-len(normalized_shape), 0))
    centered = x - x.mean(dims, keepdim=True)
    scale = torch.rsqrt((centered * centered).mean(dims, keepdim=True) + eps)
    return _opened(input, {"centered": centered, "scale": scale, "normalized": centered * scale}, weight, bias)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Opened:
    """`x / sqrt(mean(x * x) + eps) * weight` over the last dimensions."""
    x, dims = in_full(input), tuple(range(-len(normalized_shape), 0))
    scale = torch.rsqrt((x * x).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return _opened(input, {"scale": scale, "normalized": x * scale}, weight, None)


def _opened(input: Tensor, named: dict[str, Any], weight: Tensor | None, bias: Tensor | None) -> Opened:
    output = named["normalized"]
    if weight is not None:
        output = output * weight
    if bias is not None:
        output = output + bias
    return Opened(output.to(input.dtype), named)
