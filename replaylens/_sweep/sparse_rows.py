"""Where the values of many variants differ from the recorded one: rows, each belonging to a variant.

A Delta holds one tensor for all variants of a chunk. Along `axis`, instead of the recorded rows, it has the rows that
differ, of whichever variant: `pairs` says which row of which variant each is. Everything else is as recorded. With
`axis` None the variants are stacked in front, each with its whole value. An operation that treats rows alike can run
on such a tensor as it is, whether it holds one row of each of a thousand variants or all rows of one.

A recorded 2x3 value, and the variants (lanes) 0 and 1, which differ in the capital letters:

    recorded     lane 0       lane 1
    a b c        a b c        a Q c
    d e f        D e f        d e f

    dense            axis None, pairs (0,0) (1,0)          a b c / D e f  and  a Q c / d e f, stacked
    folded, axis 0   pairs (0,0) (0,1) (1,0) (1,1)         a b c / D e f / a Q c / d e f
    packed, axis 0   pairs (0,1) (1,0)                     D e f / a Q c           only rows that differ
    packed, axis 1   pairs (0,0) (1,1)                     a Q / D e               columns of lane 0, lane 1
    chosen, axis 0, rows (1,)   pairs (0,1) (1,1)          D e f / d e f           row 1 of every lane

The operations themselves are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from attrs import frozen

from .._ir.util import cached_property

Tensor = torch.Tensor


@frozen(eq=False, slots=False)
class Pairs:
    """(variant, row) pairs, sorted by variant, then by row. `count` rows make a whole value.

    Where every variant has all its rows, only `whole` is kept, and the tensors are made on demand.
    """

    count: int
    whole: tuple[int, ...] | None = None
    codes: Tensor | None = None  # variant * count + row
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return len(self.whole or ()) * self.count if self.codes is None else self.codes.numel()

    @cached_property
    def code(self) -> Tensor:
        if self.codes is not None:
            return self.codes
        first = index_tensor(self.whole or (), self.device) * self.count
        return (first[:, None] + torch.arange(self.count, device=self.device)).flatten()

    @cached_property
    def rows(self) -> Tensor:
        return self.code % self.count

    @cached_property
    def variants(self) -> Tensor:
        return self.code // self.count

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """The variants that have a row here, in order."""
        return tuple(torch.unique_consecutive(self.variants).tolist()) if self.whole is None else self.whole

    @property
    def is_whole(self) -> bool:
        return self.codes is None


class Delta(NamedTuple):
    """A value of many variants: `data` has the recorded shape, with a row for each pair along `axis`."""

    axis: int | None
    pairs: Pairs
    data: Tensor

    @property
    def is_dense(self) -> bool:
        return self.pairs.is_whole


def stacked(lanes: tuple[int, ...], data: Tensor) -> Delta:
    """Whole values of some variants, stacked in front."""
    return Delta(None, Pairs(1, lanes, device=data.device), data)


class Scratch:
    """Memory that is used again: memory returned to the system comes back page by page, at a cost."""

    def __init__(self) -> None:
        self.free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self.lent: list[Tensor] = []

    def copies(self, recorded: Tensor, count: int) -> Tensor:
        """`count` copies of a value, in free memory if there is any."""
        shape = (count, *recorded.shape)
        ready = self.free.get((shape, recorded.dtype))
        made = ready.pop() if ready else torch.empty(shape, dtype=recorded.dtype, device=recorded.device)
        self.lent.append(made)
        return made.copy_(recorded.contiguous())  # strides of its own would make it ten times as slow

    def take_back(self, results: Sequence[Delta]) -> None:
        """Frees what was lent, unless a result lies in it."""
        in_use = {delta.data.untyped_storage().data_ptr() for delta in results}
        for made in self.lent:
            if made.untyped_storage().data_ptr() not in in_use:
                ready = self.free.setdefault((tuple(made.shape), made.dtype), [])
                if len(ready) < 4:
                    ready.append(made)
        self.lent.clear()


def dense(delta: Delta, recorded: Tensor, scratch: Scratch | None = None) -> Delta:
    """The same with every variant's whole value, stacked in front; rows that did not differ are as recorded."""
    if delta.axis is None:
        return delta
    axis, pairs, lanes = delta.axis, delta.pairs, delta.pairs.lanes
    if pairs.is_whole:
        return stacked(lanes, _unfolded(delta.data, axis, len(lanes), pairs.count))
    data = (scratch or Scratch()).copies(recorded, len(lanes))
    places = torch.searchsorted(index_tensor(lanes, recorded.device), pairs.variants)
    data.movedim(axis + 1, 1).index_put_((places, pairs.rows), delta.data.movedim(axis, 0))
    return stacked(lanes, data)


def _unfolded(data: Tensor, axis: int, lanes: int, count: int) -> Tensor:
    if axis == 0:
        return data.reshape(lanes, count, *data.shape[1:])
    shape = (*data.shape[:axis], lanes, count, *data.shape[axis + 1 :])
    return data.reshape(shape).movedim(axis, 0)


def folded(delta: Delta, axis: int, recorded: Tensor, scratch: Scratch | None = None) -> Delta:
    """The same with all rows of each variant along an axis."""
    if delta.axis == axis and delta.pairs.is_whole:
        return delta
    whole = dense(delta, recorded, scratch)
    lanes, count = whole.pairs.lanes, recorded.shape[axis]
    data = whole.data if axis == 0 else whole.data.movedim(0, axis)
    shape = (*recorded.shape[:axis], len(lanes) * count, *recorded.shape[axis + 1 :])
    return Delta(axis, Pairs(count, lanes, device=data.device), data.reshape(shape))


def packed(delta: Delta, axis: int, recorded: Tensor, rows: Sequence[int] | None = None) -> Delta:
    """Only the rows along an axis that differ from the recorded ones, of the `rows` that anybody reads."""
    whole = dense(delta, recorded)
    data = whole.data.movedim(axis + 1, 1)
    where = None if rows is None else index_tensor(rows, recorded.device)
    mine = recorded.movedim(axis, 0)
    if where is not None:
        data, mine = data.index_select(1, where), mine.index_select(0, where)
    marks = _rows_that_differ(data, mine)
    lanes = index_tensor(whole.pairs.lanes, data.device)
    at = marks.nonzero()
    found = at[:, 1] if where is None else where[at[:, 1]]
    pairs = Pairs(recorded.shape[axis], None, lanes[at[:, 0]] * recorded.shape[axis] + found)
    return Delta(axis, pairs, data[at[:, 0], at[:, 1]].movedim(0, axis))


def _rows_that_differ(data: Tensor, recorded: Tensor) -> Tensor:
    """For each variant and row, whether any bit differs. Eight bytes at once, where the memory allows."""
    wide = _has_words(data) and _has_words(recorded)
    differs = data.view(torch.int64) != recorded.view(torch.int64) if wide else bits(data) != bits(recorded)
    if differs.dim() == 2:
        return differs
    variants, rows, numbers = differs.flatten(2).shape
    if numbers and numbers % 8 == 0:
        differs = differs.reshape(-1).view(torch.int64).view(variants, rows, numbers // 8)
    return differs.flatten(2).any(2)


def _has_words(tensor: Tensor) -> bool:
    """True if each row along the last axis consists of whole words of eight bytes."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or tensor.stride(-1) != 1:
        return False
    several = 8 // tensor.itemsize
    places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(place % several == 0 for place in places)


def chosen(delta: Delta, axis: int, recorded: Tensor, rows: Sequence[int]) -> Delta:
    """Some rows along an axis, of every variant that has them."""
    where = index_tensor(rows, recorded.device)
    if delta.axis == axis:
        return marked_pairs(delta, torch.isin(delta.pairs.rows, where))
    whole = dense(delta, recorded)
    lanes, count = whole.pairs.lanes, recorded.shape[axis]
    data = whole.data.index_select(axis + 1, where)
    code = (index_tensor(lanes, recorded.device)[:, None] * count + where).flatten()
    data = (data if axis == 0 else data.movedim(0, axis)).reshape(
        *recorded.shape[:axis], len(lanes) * len(rows), *recorded.shape[axis + 1 :]
    )
    return Delta(axis, Pairs(count, None, code), data)


def marked_pairs(delta: Delta, marks: Tensor) -> Delta:
    """Only the marked pairs."""
    assert delta.axis is not None
    if bool(marks.all()):
        return delta
    where = marks.nonzero().flatten()
    return Delta(
        delta.axis, Pairs(delta.pairs.count, None, delta.pairs.code[where]), delta.data.index_select(delta.axis, where)
    )


def without_lanes(delta: Delta, lanes: Iterable[int]) -> Delta | None:
    """The same without some variants; None if nothing is left."""
    dropped, pairs = set(lanes), delta.pairs
    if min(dropped) > pairs.lanes[-1] or not dropped & set(pairs.lanes):
        return delta
    if pairs.is_whole:
        left = [number for number, lane in enumerate(pairs.lanes) if lane not in dropped]
        if not left:
            return None
        names = tuple([pairs.lanes[number] for number in left])
        where, axis = index_tensor(left, delta.data.device), delta.axis
        if axis is None:
            return stacked(names, delta.data.index_select(0, where))
        rows = _unfolded(delta.data, axis, len(pairs.lanes), pairs.count).index_select(0, where)
        shape = (*delta.data.shape[:axis], len(left) * pairs.count, *delta.data.shape[axis + 1 :])
        data = (rows if axis == 0 else rows.movedim(0, axis)).reshape(shape)
        return Delta(axis, Pairs(pairs.count, names, device=data.device), data)
    marks = ~torch.isin(pairs.variants, index_tensor(sorted(dropped), delta.data.device))
    return marked_pairs(delta, marks) if bool(marks.any()) else None


def joined(one: Delta, other: Delta, recorded: Tensor) -> Delta:
    """Two Deltas of different variants as one, in the first one's form."""
    if one.axis is None:
        more, at = dense(other, recorded), 0
    elif other.axis == one.axis:
        more, at = other, one.axis
    else:
        more, at = folded(other, one.axis, recorded), one.axis
    data = torch.cat((one.data, more.data), at)
    if one.pairs.is_whole and more.pairs.is_whole:
        lanes = (*one.pairs.lanes, *more.pairs.lanes)
        if one.pairs.lanes[-1] > more.pairs.lanes[0]:
            return _in_order(one.axis, lanes, one.pairs.count, data)
        return Delta(one.axis, Pairs(one.pairs.count, lanes, device=data.device), data)
    code = torch.cat((one.pairs.code, more.pairs.code))
    order = torch.argsort(code)
    return Delta(one.axis, Pairs(one.pairs.count, None, code[order]), data.index_select(at, order))


def _in_order(axis: int | None, lanes: tuple[int, ...], count: int, data: Tensor) -> Delta:
    order = sorted(range(len(lanes)), key=lanes.__getitem__)
    names = tuple([lanes[number] for number in order])
    rows = (index_tensor(order, data.device)[:, None] * count + torch.arange(count, device=data.device)).flatten()
    return Delta(axis, Pairs(count, names, device=data.device), data.index_select(axis or 0, rows))


def on_common_pairs(
    deltas: Sequence[Delta | None], recorded: Sequence[Tensor | None]
) -> tuple[Pairs, list[Tensor | None]]:
    """The union of the pairs of several Deltas, and the rows of each for all these pairs: its own or the recorded
    ones.

    Each Delta lies along its own axis; rows of the same number belong together.
    """
    present = [delta for delta in deltas if delta is not None]
    if len(present) == 1:
        return present[0].pairs, [None if delta is None else delta.data for delta in deltas]
    pairs = _union([delta.pairs for delta in present])
    found: list[Tensor | None] = []
    for delta, mine in zip(deltas, recorded, strict=True):
        if delta is None or delta.pairs is pairs:
            found.append(None if delta is None else delta.data)
        else:
            assert mine is not None
            found.append(_rows_for(delta, pairs, mine))
    return pairs, found


def _union(all_pairs: list[Pairs]) -> Pairs:
    first = all_pairs[0]
    if all(pairs is first for pairs in all_pairs):
        return first
    if all(pairs.is_whole for pairs in all_pairs):
        if all(pairs.lanes == first.lanes for pairs in all_pairs):
            return first
        lanes = tuple(sorted({lane for pairs in all_pairs for lane in pairs.lanes}))
        return Pairs(first.count, lanes, device=first.device)
    if all(len(pairs) == len(first) and torch.equal(pairs.code, first.code) for pairs in all_pairs):
        return first
    return Pairs(first.count, None, torch.unique(torch.cat([pairs.code for pairs in all_pairs])))


def _rows_for(delta: Delta, pairs: Pairs, recorded: Tensor) -> Tensor:
    """A Delta's rows for a larger set of pairs: those it lacks are the recorded rows."""
    if len(delta.pairs) == len(pairs):
        return delta.data  # the same pairs, in another object
    at = torch.searchsorted(pairs.code, delta.pairs.code)
    if delta.axis is None:
        data = recorded.expand(len(pairs), *recorded.shape).clone()
        return data.index_copy_(0, at, delta.data)
    data = rows_of(recorded, delta.axis, pairs).clone()
    return data.index_copy_(delta.axis, at, delta.data)


def rows_of(recorded: Tensor, axis: int, pairs: Pairs) -> Tensor:
    """The recorded rows at the rows of the pairs."""
    if pairs.count == 1:
        return recorded.expand(*recorded.shape[:axis], len(pairs), *recorded.shape[axis + 1 :])
    return recorded.index_select(axis, pairs.rows)


def lane_value(delta: Delta, lane: int, recorded: Tensor) -> Tensor:
    """One variant's whole value."""
    if lane > delta.pairs.lanes[-1] or lane not in delta.pairs.lanes:
        return recorded
    if delta.axis is None:
        return delta.data[delta.pairs.lanes.index(lane)]
    if delta.pairs.is_whole:
        number, count = delta.pairs.lanes.index(lane), delta.pairs.count
        return delta.data.narrow(delta.axis, number * count, count)
    where = (delta.pairs.variants == lane).nonzero().flatten()
    value = recorded.clone()
    return value.index_copy_(delta.axis, delta.pairs.rows[where], delta.data.index_select(delta.axis, where))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: minus zero differs from zero, and a NaN equals itself."""
    if tensor.is_floating_point() and (kind := _INTEGERS.get(tensor.itemsize)) is not None:
        return tensor.view(kind)
    return (
        torch.view_as_real(tensor.resolve_conj()).view(_INTEGERS[tensor.itemsize // 2])
        if tensor.is_complex()
        else tensor
    )


def index_tensor(values: Sequence[int], device: torch.device | str) -> Tensor:
    """Indices as a tensor."""
    return torch.tensor(values, dtype=torch.long, device=device)
