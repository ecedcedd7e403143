"""Attention and normalizations as the open torch operations that their fused forms stand for.

In: the arguments of a fused function. Out: what it returns, and names for what it hides. Attention: the `scores`,
scaled and masked, and the `pattern`, their softmax, of shape (..., heads, queries, keys). Normalizations: the `scale`
by which features are multiplied, one number for each group normalized together, and the `normalized` features before
weight and bias. Plain functions of tensors.

A query that may attend to nothing gets zeros and passes no gradient on, as in the fused functions: hence
`torch._safe_softmax`. Half precision is computed in float32 in between, as they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, gelu, layer_norm, linear, relu

from ..._ir.torch_private import safe_softmax


class Opened(NamedTuple):
    """What a fused function returns, and named values inside it: tensors, or lists of steps with the same names in
    each.
    """

    result: Any
    named: dict[str, Any]


def in_full(tensor: Tensor) -> Tensor:
    """Half precision as float32: fused functions compute so, and round once at the end."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def open_layer_norm(
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
    return _normalized(input, {"centered": centered, "scale": scale, "normalized": centered * scale}, weight, bias)


def open_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Opened:
    """`x / sqrt(mean(x * x) + eps) * weight` over the last dimensions."""
    x, dims = in_full(input), tuple(range(-len(normalized_shape), 0))
    scale = torch.rsqrt((x * x).mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    return _normalized(input, {"scale": scale, "normalized": x * scale}, weight, None)


def _normalized(input: Tensor, named: dict[str, Any], weight: Tensor | None, bias: Tensor | None) -> Opened:
    output = named["normalized"]
    if weight is not None:
        output = output * weight
    if bias is not None:
        output = output + bias
    return Opened(output.to(input.dtype), named)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Opened:
    """`softmax(query @ key.T * scale + mask) @ value`."""
    dtype = query.dtype
    query, key, value = in_full(query), in_full(key), in_full(value)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = torch.where(past, scores, -torch.inf)
    if attn_mask is not None:
        is_allowed = attn_mask.dtype is torch.bool
        scores = torch.where(attn_mask, scores, -torch.inf) if is_allowed else scores + attn_mask
    pattern = safe_softmax(scores, -1)
    used = dropout(pattern, dropout_p) if dropout_p > 0 else pattern
    output = used @ value
    return Opened(output.to(dtype), {"scores": scores, "pattern": pattern})


def flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Opened:
    """The ATen operator beneath it on a CPU, which also returns what its backward needs."""
    output, named = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return Opened((output, torch.logsumexp(named["scores"], -1)), named)


def attention_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Opened:
    """The ATen operator that also returns the pattern, after dropout."""
    if dropout_mask is not None:
        raise NotImplementedError("attention with a dropout mask of its own")
    output, named = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return Opened((output, named["pattern"]), named)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Opened:
    """Attention whose scores and mask are given by functions of a score, a batch, a head, a query and a key.

    They are called once, on all scores and on indices that broadcast with them.
    """
    dtype = query.dtype
    query, key, value = [in_full(given) for given in (query, key, value)]
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaled = query @ key.transpose(-2, -1) * scale
    sizes = enumerate(scaled.shape)
    places = [torch.arange(n, device=query.device).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in sizes]
    changed = score_mod(scaled, *places, *score_mod_other_buffers).expand(scaled.shape)
    scores = torch.where(block_mask[-1](*places, *mask_mod_other_buffers), changed, -torch.inf)
    pattern = safe_softmax(scores, -1)
    given = (pattern @ value).to(dtype), torch.logsumexp(scores, -1) / math.log(2), scores.amax(-1) / math.log(2)
    return Opened(given, {"scores": scores, "pattern": pattern})


def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Opened:
    """The fast path of `nn.MultiheadAttention`: (batch, length, features), True in a mask excludes a key.

    Unlike the others it gives NaN for a query that may attend to nothing.
    """
    thirds = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    projected = [linear(given, weight, bias) for given, weight, bias in thirds]
    q, k, v = [made.unflatten(-1, (num_head, -1)).transpose(1, 2) for made in projected]
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(embed_dim // num_head))
    if mask is not None:
        is_padding = mask_type == 1 and mask.dim() == 2
        scores = scores.masked_fill(mask[:, None, None, :] if is_padding else mask, -torch.inf)
    pattern = torch.softmax(scores, -1)
    heads = pattern @ v
    output = linear(heads.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    weights = (pattern.mean(1) if average_attn_weights else pattern) if need_weights else None
    return Opened((output, weights), {"scores": scores, "pattern": pattern, "heads": heads})


def transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Opened:
    """The fast path of `nn.TransformerEncoderLayer`: attention and a feed-forward network, each added to its input."""
    named: dict[str, Any] = {}

    def attend(x: Tensor) -> Tensor:
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        (output, _), inner = native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type
        )
        named.update(inner, attended=output)
        return output

    def feed_forward(x: Tensor) -> Tensor:
        act: Callable[[Tensor], Tensor] = gelu if use_gelu else relu
        named["neurons"] = act(linear(x, ffn_weight_1, ffn_bias_1))
        return linear(named["neurons"], ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        middle = src + attend(norm_1(src))
        return Opened(middle + feed_forward(norm_2(middle)), {**named, "middle": middle})
    middle = norm_1(src + attend(src))
    return Opened(norm_2(middle + feed_forward(middle)), {**named, "middle": middle})
