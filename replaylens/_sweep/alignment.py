"""Along which axes a call treats rows alike: found by search, proved by running it.

In: what a call reads and gives. Out: Alignments. A call is aligned when it gives the same row, whatever the other rows
are and however many: `op(x)[row r along b] == op(x[row r along a])`. Then it can be called on rows from anywhere. Every
way that the sizes allow is a candidate, and none is trusted before it is proved: on numbers made for that, so that one
proof serves all calls of these shapes. No operator is known here but those of which a proof would say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from math import inf, nan
from typing import Any

import torch
from attrs import frozen

from .._ir.node import Call
from .._ir.ops import Quirk, info
from .._ir.tolerances import BATCHED, BATCHED_NARROW, LIKELY
from .._ir.trees import leaves
from .sparse_rows import numbers

Tensor = torch.Tensor
Shape = tuple[int, ...]
MOST_CANDIDATES = 80  # for one axis of what a call gives
ENOUGH = 6  # times four numbers, or answers of yes and no, that differ from row to row
TRIALS = 2 * ENOUGH  # at most
MOST_EXTRA = 1_000_000  # numbers in a trial of more rows than any number among the arguments
SMALL = 16_384  # numbers: so few of them are kept for other proofs
LARGE = 65_536  # numbers: what is larger, and changes nothing, is taken as it was recorded


@frozen
class Alignment:
    """Along which axis each operand's rows are those of each output. None: it has no rows, and must be as recorded."""

    operands: tuple[int | None, ...]
    outputs: tuple[int, ...]
    resizes: str = ""  # "reshape", "expand": the sizes that were written give way to those of the rows at hand


def candidates(
    node: Call, name: str, reads: Sequence[Tensor], results: Sequence[Tensor], unread: Collection[int]
) -> tuple[Alignment, ...]:
    """Every way in which sizes allow rows, by the axes of the first result; for each the likeliest first. None where
    a call draws, or content or the user's own code decides: there a proof would say nothing.
    """
    op = info(name)
    if (
        not name
        or op.has(Quirk.MIXES_ROWS)
        or name.endswith("_backward")
        or node.draws is not None
        or node.through
        or not results
    ):
        return ()
    if any(not value.numel() or value.layout is not torch.strided for value in (*reads, *results)):
        return ()
    if any(callable(leaf) and not isinstance(leaf, type) for leaf in leaves((node.args, node.kwargs))):
        return ()
    if node.is_dynamic:
        if name not in ("getitem", "unflatten"):
            return ()
        unread = range(1, len(reads))  # what these look at decides nothing: only where to look does
    if op.has(Quirk.RECURRENT):  # their kernels compare no sizes, and read past the end: only one way may be tried
        return _of_samples(node, reads, len(results))
    resizes = _resizes(reads, results, unread) if len(reads) == 1 or not node.is_dynamic else ""
    found: list[Alignment] = []
    for axis in range(results[0].dim()):
        plain = [Alignment(*axes) for axes in islice(_fitting(reads, results, unread, axis), MOST_CANDIDATES)]
        if resizes:
            found += [Alignment(align.operands, align.outputs, resizes) for align in plain]
        found += plain
    return tuple(found)


def _of_samples(node: Call, reads: Sequence[Tensor], outputs: int) -> tuple[Alignment, ...]:
    """For recurrent functions over whole sequences: the samples, in the input and in the states."""
    batch = 0 if node.args[-1] is True else 1
    if node.args[-1] not in (True, False) or reads[0].dim() != 3:
        return ()
    operands = [None if value.dim() != 3 else 1 if number else batch for number, value in enumerate(reads)]
    return (Alignment(tuple(operands), (batch, *[1] * (outputs - 1))),)


def _fitting(
    reads: Sequence[Tensor], results: Sequence[Tensor], unread: Collection[int], axis: int
) -> Iterator[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """Axes of the size that the first result has here: in all operands, in the first or last ones, in any of them."""
    size, right = results[0].shape[axis], axis - results[0].dim()

    def fitting(value: Tensor) -> list[int]:
        same = [number for number, length in enumerate(value.shape) if length == size]
        rank = value.dim()
        return sorted(same, key=lambda number: (number - rank != right, number != axis)) if len(same) > 1 else same

    ways: list[list[int | None]] = [[] if n in unread else [*fitting(value)] for n, value in enumerate(reads)]
    outputs: list[tuple[int, ...]] = [(axis,)]
    if len(results) > 1:
        others = [sorted(fitting(one), key=axis.__ne__) for one in results[1:]]
        outputs = [(axis, *rest) for rest in islice(product(*others), 8)]
    count, every = len(ways), [way[0] if way else None for way in ways]
    likely = [(*every[:n], *[None] * (count - n)) for n in range(count, 0, -1)]
    likely += [(*[None] * n, *every[n:]) for n in range(1, count)]
    seen: set[Any] = {(None,) * count}
    for operands in (*likely, *islice(product(*[[*way, None] for way in ways]), MOST_CANDIDATES)):
        if operands not in seen:
            seen.add(operands)
            yield from [(operands, output) for output in outputs]


def _resizes(reads: Sequence[Tensor], results: Sequence[Tensor], unread: Collection[int]) -> str:
    """Does a call give what it reads in another shape? Then the sizes among its arguments may be for other rows."""
    rest = [value for number, value in enumerate(reads) if number not in unread]
    if len(rest) != 1 or len(results) != 1 or rest[0].dtype != results[0].dtype:
        return ""
    (value,), (result,) = rest, results
    if value.numel() == result.numel():
        return "reshape" if torch.equal(value.reshape(result.shape), result) else ""
    try:
        return "expand" if torch.equal(value.expand(result.shape), result) else ""
    except RuntimeError:
        return ""


def only_moves(align: Alignment, reads: Sequence[Tensor], call: Callable[[Sequence[Tensor]], Tensor]) -> bool:
    """Does a call give every number as it is, in another shape? Also those that it might bound, round or replace."""
    number = next(n for n, axis in enumerate(align.operands) if axis is not None)
    value, generator = reads[number], torch.Generator().manual_seed(0)
    made = torch.randn(value.shape, generator=generator)
    made = made * 10 ** (torch.rand(value.shape, generator=generator) * 60 - 30)
    if not _is_real(value):
        made = made.clamp(-100, 100)
    odd = [torch.full_like(made, number) for number in (nan, inf, -inf)] if _is_real(value) else []
    for wide in [one.to(value.device, value.dtype) for one in (made, *odd)]:
        result = call([*reads[:number], wide, *reads[number + 1 :]])
        moved = wide.reshape(result.shape) if align.resizes == "reshape" else wide.expand(result.shape)
        if not torch.equal(result, moved) and not (moved.isnan().all() and result.isnan().all()):
            return False
    return True


# ---- proofs ------------------------------------------------------------------------------------------------------

Run = Callable[[Sequence[Tensor], int | None], list[Tensor]]  # on so many rows; None: as it was called


def proves(align: Alignment, reads: Sequence[Tensor], run: Run, most: int, is_pointwise: Callable[[], bool]) -> bool:
    """Is an alignment true? Tried on other numbers until they have told: once where those that come out differ from row
    to row, more often where they are few. Where all are alike, of `x == 0` say, torch's own word counts.

    `most`: the largest number among the arguments.
    """
    told = 0
    for number in range(TRIALS):
        try:
            weight = _trial(align, reads, run, most, number)
        except Exception:  # whatever it is, the call does not take rows in this way
            return False
        if weight is None:
            return False
        told += weight
        if told >= ENOUGH:
            return True
    return told > 1 or is_pointwise()


def _trial(align: Alignment, reads: Sequence[Tensor], run: Run, most: int, number: int) -> int | None:
    """Run on a few rows, on the whole, and on more rows than the whole has, in another order: None if any row is
    another one then, else how much that tells.
    """
    operands = list(zip(reads, align.operands, strict=True))
    pairs = [(value, axis) for value, axis in operands if axis is not None]
    count = pairs[0][0].shape[pairs[0][1]]
    if not all(value.is_cpu for value in reads) and _may_miss(align, reads):
        return None
    if most < count or (most + 2) * sum(value.numel() for value, _ in pairs) > MOST_EXTRA * count:
        most = count
    integral = all(value.is_cpu and not _is_real(value) for value in reads)
    made = [_made(value, axis, most, number * 101 + place, integral) for place, (value, axis) in enumerate(operands)]
    few, whole, many = zip(*made, strict=True)
    few_rows, _, many_rows, known = _orders(count, most, reads[0].device)
    some = run(few, len(few_rows))
    shapes = [(part.dim() > axis and part.shape[axis]) for part, axis in zip(some, align.outputs, strict=True)]
    if any(length != len(few_rows) for length in shapes):
        return None
    wholes, more, told = run(whole, None), run(many, len(many_rows)), 0
    for first, middle, last, axis in zip(some, wholes, more, align.outputs, strict=True):
        if last.shape[axis] != len(many_rows):
            return None
        mine = torch.cat((first.narrow(axis, 1, len(few_rows) - 1), last.narrow(axis, 2, len(many_rows) - 2)), axis)
        if not close(mine, middle.index_select(axis, known)):
            return None
        if told <= ENOUGH and not _looks_alike(first.narrow(axis, 0, 1), first.narrow(axis, 1, 1)):
            told = max(told, 1, mine.numel() // 4 if _is_real(first) else 0)
    return told


@lru_cache(maxsize=256)
def _orders(count: int, most: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of so many rows and two others behind them: a few, all but the others, and more than `most`; and which of all
    rows, one after another, the few and the more are, the others left out.
    """
    few = [count - 1, 0] if count != 3 else [0]  # never as many as there were
    many = [row % count for row in reversed(range(most))]
    orders = [count, *few], range(count), [count + 1, count, *many], [*few, *many]
    few_rows, whole, many_rows, known = [numbers(order, device) for order in orders]
    return few_rows, whole, many_rows, known


def _looks_alike(one: Tensor, other: Tensor) -> bool:
    if not _is_real(one):
        return torch.equal(one, other)
    return LIKELY.holds(one, other)


def _may_miss(align: Alignment, reads: Sequence[Tensor]) -> bool:
    """May indices that stay point behind rows that are fewer? Elsewhere than on a CPU that ends the process."""
    return any(
        axis is None and value.dim() and not value.is_floating_point() and value.dtype is not torch.bool
        for value, axis in zip(reads, align.operands, strict=True)
    )


def _made(value: Tensor, axis: int | None, most: int, seed: int, integral: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers in an operand's place: a few rows of them, the whole, and more, as `_orders` says. Rows beside those of
    the whole have other signs and sizes, and some are zero.

    Also what changes nothing is made up: a convolution by zeros has rows, and another one of the same shapes has none.
    """
    if _is_real(value) and (axis is not None or value.numel() <= LARGE or not _is_telling(value)):
        kept = value.numel() <= SMALL and (axis is None or most == value.shape[axis])
        make = _reals if kept else _reals.__wrapped__
        return make(value.shape, value.dtype, value.device, axis, 0 if axis is None else most, seed)
    if axis is None:
        return value, value, value
    generator, count = torch.Generator().manual_seed(seed), value.shape[axis]
    shape = (*value.shape[:axis], count + 2, *value.shape[axis + 1 :])
    if value.dtype is torch.bool:  # some rows of one answer alone: for `any` and `all`
        ones = [length if number == axis else 1 for number, length in enumerate(shape)]
        often = torch.rand(ones, generator=generator) * 1.6 - 0.3
        return _in_orders((torch.rand(shape, generator=generator) < often).to(value.device), axis, most)
    flat = value.reshape(-1)  # indices may be no others than those that were there
    made = flat[torch.randint(len(flat), shape, generator=generator).to(value.device)]
    if integral and bool((flat == flat[0]).all()):
        made = made + torch.randint(-1, 2, shape, generator=generator).to(value.dtype)
    return _in_orders(made, axis, most)


@lru_cache(maxsize=64)
def _reals(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, axis: int | None, most: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    longer = shape if axis is None else (*shape[:axis], shape[axis] + 2, *shape[axis + 1 :])
    made = torch.rand(longer, generator=generator).add_(0.1)
    if axis is not None:
        made.narrow(axis, shape[axis], 2).sub_(0.5).clamp_(min=0).mul_(-30)
    made = (torch.complex(made, made * made) if dtype.is_complex else made).to(device, dtype)
    return (made, made, made) if axis is None else _in_orders(made, axis, most)


def _in_orders(made: Tensor, axis: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    few, whole, many, _ = _orders(made.shape[axis] - 2, most, made.device)
    return made.index_select(axis, few), made.index_select(axis, whole), made.index_select(axis, many)


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _is_telling(value: Tensor) -> bool:
    """Are a large value's numbers as good as random ones? Not where most are zero, say."""
    generator = torch.Generator().manual_seed(0)
    places = [torch.randint(size, (256,), generator=generator) for size in value.shape]
    return value[tuple(places)].unique().numel() > 64


def close(one: Tensor, other: Tensor) -> bool:
    """Equal but for what another size of a batch does to the last bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not _is_real(one):
        return bool(torch.equal(one, other))
    return (BATCHED_NARROW if one.dtype in (torch.bfloat16, torch.float16) else BATCHED).holds(one, other)
