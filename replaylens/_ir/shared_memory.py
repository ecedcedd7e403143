"""Which tensors are one object, and which share memory.

In: tensors by name. Out: pairs of names. A program remembers these facts of its inputs and its state: where one of them
is written, or asked for its address, tensors that share memory otherwise give other values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen

from .equality import same
from .torch_private import FakeTensor, is_wrapped

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


def begin_together(one: torch.Tensor, other: torch.Tensor) -> bool:
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


def fills_its_memory(tensor: torch.Tensor) -> bool:
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
