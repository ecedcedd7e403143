"""How tensors lie in memory: which are one object or share a storage, and copies in a given layout.

In: tensors by name. Out: pairs of names. A program remembers these facts of its inputs and its state: where one of them
is written, or asked for its address, tensors that share memory otherwise give other values. Copies keep the strides,
and the bytes in gaps between elements, as `as_strided` can read these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen

from .equality import same
from .torch_private import FakeTensor, is_batched, is_wrapped, negative_view, peek_interpreter_stack

Pair = tuple[str, str]


def storage_of(tensor: torch.Tensor) -> int | None:
    """An identifier of the storage that a tensor lies in; None for tensors without a single one."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse and nested ones have no one memory
        return None


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's write counter; -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """The write counters of many tensors."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Lets the process keep some of the memory that it frees, for the values to come: else each page of a large one
    costs a fault. Glibc returns what exceeds twice the largest block that was ever freed, if that was at most 32 MB:
    one is, and never touched. Other allocators are not moved by it.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


@frozen
class Overlaps:
    """Pairs of names, each in alphabetical order."""

    same: frozenset[Pair] = frozenset()  # the same object
    meeting: frozenset[Pair] = frozenset()  # different objects that share an element
    touched: frozenset[str] = frozenset()  # written by the model, or asked for their address

    @staticmethod
    def among(tensors: Mapping[str, torch.Tensor], new: frozenset[str], deep: bool) -> Overlaps:
        """The facts of the tensors in `new`, with each other and with all others; with `deep` of their memory too."""
        same: set[Pair] = set()
        by_id: dict[int, str] = {}
        for name in sorted(new):
            first = by_id.setdefault(id(tensors[name]), name)
            if first != name:
                same.add((first, name))
        return Overlaps(frozenset(same), _meeting(tensors, new) if deep else frozenset())


NO_OVERLAPS = Overlaps()


def _meeting(tensors: Mapping[str, torch.Tensor], new: frozenset[str]) -> frozenset[Pair]:
    extents = {name: found for name, tensor in tensors.items() if (found := extent(tensor)) is not None}
    pairs = (
        (one, other)
        for one in new.intersection(extents)
        for other in extents
        if (other not in new or one < other) and _cross(extents[one], extents[other])
    )
    return frozenset((min(pair), max(pair)) for pair in pairs if _meet(tensors[pair[0]], tensors[pair[1]]))


def extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first address that a tensor occupies and the first after it; None where there is none to compare."""
    if is_wrapped(tensor) or tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # fake and other tensors without memory
        return None
    return (start, start + span(tensor) * tensor.element_size()) if start else None


def have_same_address(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors begin at the same address. For sparse ones all their parts; for others without an address
    their content is compared.
    """
    try:
        return one.data_ptr() == other.data_ptr()
    except RuntimeError:
        pass
    parts = list(zip(sparse_parts(one), sparse_parts(other), strict=False))
    if one.layout is not other.layout or not parts:
        return same(one, other)
    return all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in parts)


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse one consists of; none for any other."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def span(tensor: torch.Tensor) -> int:
    """The number of elements of its memory from its first to its last element, inclusive."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if two of its elements may share memory, as in expanded tensors and those that `unfold` gives."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    room = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < room:
            return True
        room += (size - 1) * stride
    return False


def is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements lie side by side, in any order, without a gap."""
    if tensor.layout is not torch.strided:
        return False
    return not tensor.numel() or (span(tensor) == tensor.numel() and not overlaps_itself(tensor))


def _cross(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors whose extents overlap share an element, or if finding out would be expensive."""
    if one.dtype != other.dtype or span(one) + span(other) > 10_000_000:
        return True
    shift = (other.data_ptr() - one.data_ptr()) // one.element_size()
    marks = torch.zeros(max(span(one), span(other)) + abs(shift), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), max(-shift, 0)).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), max(shift, 0)).any())


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


def copy_with_offset(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and storage offset."""
    offset = tensor.storage_offset() if tensor.layout is torch.strided else 0
    if tensor.is_conj():
        return copy_with_offset(tensor.conj()).conj()
    if tensor.is_neg():
        return negative_view(copy_with_offset(negative_view(tensor)))
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


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor with other strides; unchanged if these would make elements overlap."""
    if strides is None or tensor.layout is not torch.strided or tensor.stride() == strides:
        return tensor
    place = tensor.detach().new_empty_strided(tuple(tensor.shape), strides)
    return tensor if overlaps_itself(place) else place.zero_().copy_(tensor)  # in a way that gradients can go


def with_layout_of(tensor: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """The tensor in the memory layout of another one, of which elements may share memory; unchanged where its own
    elements that would share memory differ.
    """
    if tensor.stride() == recorded.stride() or not recorded.numel():
        return tensor
    shape, strides = tuple(recorded.shape), recorded.stride()
    if not overlaps_itself(recorded):
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    at = torch.arange(span(recorded), device=tensor.device).as_strided(shape, strides)
    flat = tensor.new_zeros(span(recorded))
    flat[at.flatten()] = tensor.flatten()
    made = flat.as_strided(shape, strides)
    return made if same(made, tensor) else tensor


def stack_with_layout_of(stack: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor | None:
    """Tensors stacked in front, one after the other in memory, each in the memory layout of the recorded one; None
    where elements of that share memory.
    """
    if not recorded.numel():
        return stack
    if overlaps_itself(recorded):
        return None
    strides = (span(recorded), *recorded.stride())
    if stack.stride() == strides:
        return stack
    return torch.empty_strided(tuple(stack.shape), strides, dtype=stack.dtype, device=stack.device).copy_(stack)


def in_layout_of(old: Any, new: Any) -> Any:
    """The new tensor in the memory layout of the old one, whose gaps keep their content, as `as_strided` may read them.
    Gradients flow to the new tensor.
    """
    if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)) and len(old) == len(new):
        return tuple([in_layout_of(one, other) for one, other in zip(old, new, strict=True)])
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or _lie_alike(old, new):
        return new
    if peek_interpreter_stack() is not None or overlaps_itself(old):
        return new
    return copy_with_offset(old.detach()).copy_(new)


def _lie_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.layout is not torch.strided or new.layout is not torch.strided or old.shape != new.shape:
        return True
    return old.stride() == new.stride()
