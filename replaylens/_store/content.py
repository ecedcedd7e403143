"""The content of tensors as a digest: dtype, shape and numbers, whatever the layout in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from ctypes import c_char
from typing import Any

import torch

from .._ir.memory import sparse_parts


def content_digest(tensor: torch.Tensor, known: bytes | None = None) -> bytes:
    """A digest that two tensors share if dtype, shape and every bit agree. `known` is that of the bytes alone, if
    somebody has it.
    """
    if known is None:
        bare = hashlib.sha256()
        for part in _parts(tensor.detach()):
            bare.update(part)
        known = bare.digest()
    said = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    return hashlib.sha256(said.encode() + known).digest()


def _parts(tensor: torch.Tensor) -> Iterator[Any]:
    """The bytes of a tensor, piece by piece."""
    if tensor.is_meta:
        return
    if tensor.layout is not torch.strided:
        for part in sparse_parts(tensor):
            yield from _parts(part)
    elif tensor.is_quantized:
        yield repr(tensor.qscheme()).encode()
        if tensor.qscheme() is torch.per_tensor_affine:
            yield repr((tensor.q_scale(), tensor.q_zero_point())).encode()
        else:
            yield from _parts(tensor.q_per_channel_scales())
            yield from _parts(tensor.q_per_channel_zero_points())
        yield from _parts(tensor.int_repr())
    else:
        if tensor._is_zerotensor():  # it has no memory
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            yield memoryview((c_char * (plain.numel() * plain.element_size())).from_address(plain.data_ptr()))
