"""Copies of tensors in the same memory layout, or in a given one."""

from __future__ import annotations

from typing import Any

import torch

from .shared_memory import overlaps_itself
from .torch_private import is_batched, negative_view, peek_interpreter_stack


def writable_copy(tensor: torch.Tensor, batched: torch.Tensor | None = None) -> torch.Tensor:
    """A copy with the same strides, the bytes in its gaps included."""
    if batched is not None and not is_batched(tensor):
        one = batched.detach().reshape(-1)[:1].sum().to(tensor.dtype)
        never = torch.zeros((), dtype=torch.bool, device=tensor.device)
        return torch.where(never, one, tensor)
    if tensor.is_conj():
        return writable_copy(tensor.conj()).conj()
    if tensor.is_neg():
        return negative_view(writable_copy(negative_view(tensor)))
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.clone()
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def copy_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and storage offset."""
    offset = tensor.storage_offset() if tensor.layout is torch.strided else 0
    if tensor.is_conj():
        return copy_in_place(tensor.conj()).conj()
    if tensor.is_neg():
        return negative_view(copy_in_place(negative_view(tensor)))
    copy = writable_copy(tensor)
    if not offset or copy.stride() != tensor.stride():
        return copy
    span = 1 + sum((size - 1) * stride for size, stride in zip(copy.shape, copy.stride(), strict=True))
    flat = torch.cat((copy.new_zeros(offset), copy.as_strided((span,), (1,), copy.storage_offset())))
    return flat.as_strided(tensor.shape, tensor.stride(), offset)


def detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout, without autograd history."""
    made = tensor.detach()
    if made.layout is not torch.strided or made.is_quantized or made.is_contiguous() or made.is_meta:
        return made.clone()
    spread = torch.empty(0, dtype=made.dtype, device=made.device).set_(made.untyped_storage().clone())
    return spread.as_strided(made.shape, made.stride(), made.storage_offset())


def in_layout(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor with other strides; unchanged if these would make elements overlap."""
    if strides is None or tensor.layout is not torch.strided or tensor.stride() == strides:
        return tensor
    place = tensor.detach().new_empty_strided(tuple(tensor.shape), strides)
    return tensor if overlaps_itself(place) else place.zero_().copy_(tensor)  # in a way that gradients can go


def as_it_lay(old: Any, new: Any) -> Any:
    """The new tensor in the memory layout of the old one, whose gaps keep their content, as `as_strided` may read them.
    Gradients flow to the new tensor.
    """
    if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)) and len(old) == len(new):
        return tuple([as_it_lay(one, other) for one, other in zip(old, new, strict=True)])
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or _lie_alike(old, new):
        return new
    if peek_interpreter_stack() is not None or overlaps_itself(old):
        return new
    return copy_in_place(old.detach()).copy_(new)


def _lie_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.layout is not torch.strided or new.layout is not torch.strided or old.shape != new.shape:
        return True
    return old.stride() == new.stride()
