"""Along which axes a call treats rows alike: found by search, proved by running it.

In: what a call reads and gives. Out: Alignments. A call is aligned when it gives the same row, whatever the other rows
are and however many: `op(x)[row r along b] == op(x[row r along a])`. Then it can be called on rows from anywhere. Every
way that the sizes allow is a candidate, and none is trusted before it is proved: on numbers made for that, so that one
proof serves all calls of these shapes. No operator is known here but those of which a proof would say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, islice, product
from math import inf, nan, prod
from typing import Any, NamedTuple

import torch
from attrs import evolve, frozen

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
POOL = 4096  # numbers that are drawn at once for several proofs
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
    plain = _fitting(tuple([value.shape for value in reads]), tuple([one.shape for one in results]), frozenset(unread))
    resizes = _resizes(reads, results, unread) if len(reads) == 1 or not node.is_dynamic else ""
    if not resizes:
        return plain
    written = _sizes_in((node.args, node.kwargs))
    found: list[Alignment] = []
    for axis, several in groupby(plain, lambda align: align.outputs[0]):
        mine = list(several)
        resized = [evolve(align, resizes=resizes) for align in mine if _keeps_order(align, reads, results[0], resizes)]
        length = results[0].shape[axis]
        found += [*resized, *mine] if length > 1 and length in written else [*mine, *resized]
    return tuple(found)


def _sizes_in(tree: Any) -> set[int]:
    """The integers among the arguments of a call: a size that is written there holds for no other count of rows."""
    found = list(leaves(tree))
    return {
        size for leaf in found if type(leaf) in (int, torch.Size) for size in ((leaf,) if type(leaf) is int else leaf)
    }


def _keeps_order(align: Alignment, reads: Sequence[Tensor], result: Tensor, resizes: str) -> bool:
    """True if rows stay in place when another count of them is resized: `reshape` needs the same number of elements
    before and behind the axis, `expand` the same axis from the right.
    """
    number = next(n for n, axis in enumerate(align.operands) if axis is not None)
    shape, axis, output = reads[number].shape, align.operands[number] or 0, align.outputs[0]
    if resizes == "expand":
        return axis - len(shape) == output - result.dim()
    return prod(shape[:axis]) == prod(result.shape[:output])


def _of_samples(node: Call, reads: Sequence[Tensor], outputs: int) -> tuple[Alignment, ...]:
    """For recurrent functions over whole sequences: the samples, in the input and in the states."""
    batch = 0 if node.args[-1] is True else 1
    if node.args[-1] not in (True, False) or reads[0].dim() != 3:
        return ()
    operands = [None if value.dim() != 3 else 1 if number else batch for number, value in enumerate(reads)]
    return (Alignment(tuple(operands), (batch, *[1] * (outputs - 1))),)


@lru_cache(maxsize=4096)
def _fitting(reads: tuple[Shape, ...], results: tuple[Shape, ...], unread: frozenset[int]) -> tuple[Alignment, ...]:
    """Every alignment that the shapes allow, by the axes of the first result."""
    every = [islice(_fitting_along(reads, results, unread, axis), MOST_CANDIDATES) for axis in range(len(results[0]))]
    return tuple([Alignment(*axes) for several in every for axes in several])


def _fitting_along(
    reads: Sequence[Shape], results: Sequence[Shape], unread: Collection[int], axis: int
) -> Iterator[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """Axes of the size that the first result has here: in all operands, in the first or last ones, in any of them."""
    size, right = results[0][axis], axis - len(results[0])

    def fitting(shape: Shape) -> list[int]:
        same = [number for number, length in enumerate(shape) if length == size]
        rank = len(shape)
        return sorted(same, key=lambda number: (number - rank != right, number != axis)) if len(same) > 1 else same

    ways: list[list[int | None]] = [[] if n in unread else [*fitting(value)] for n, value in enumerate(reads)]
    outputs: list[tuple[int, ...]] = [(axis,)]
    if len(results) > 1:
        others = [sorted(fitting(one), key=axis.__ne__) for one in results[1:]]
        outputs = [(axis, *rest) for rest in islice(product(*others), 8)]
    count, every = len(ways), [way[0] if way else None for way in ways]
    if sum(map(bool, ways)) == 1:  # the same as below, sooner
        (place,) = [number for number, way in enumerate(ways) if way]
        for axis_of_it in ways[place]:
            operands = (*[None] * place, axis_of_it, *[None] * (count - place - 1))
            yield from [(operands, output) for output in outputs]
        return
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
    if value.dim() > result.dim() or any(
        size not in (1, wanted) for size, wanted in zip(reversed(value.shape), reversed(result.shape), strict=False)
    ):
        return ""
    return "expand" if torch.equal(value.expand(result.shape), result) else ""


def only_moves(align: Alignment, reads: Sequence[Tensor], call: Callable[[Sequence[Tensor]], Tensor]) -> bool:
    """Does a call give every number as it is, in another shape? Also those that it might bound, round or replace."""
    number = next(n for n, axis in enumerate(align.operands) if axis is not None)
    value, generator = reads[number], torch.Generator().manual_seed(0)
    made = torch.randn(value.shape, generator=generator)
    made = made * 10 ** (torch.rand(value.shape, generator=generator) * 60 - 30)
    if not _is_real(value):
        made = made.clamp(-100, 100)
    for odd in (None, nan, inf, -inf) if _is_real(value) else (None,):
        wide = (made if odd is None else torch.full_like(made, odd)).to(value.device, value.dtype)
        result = call([*reads[:number], wide, *reads[number + 1 :]])
        moved = wide.reshape(result.shape) if align.resizes == "reshape" else wide.expand(result.shape)
        if not torch.equal(result, moved) and not (moved.isnan().all() and result.isnan().all()):
            return False
        if result.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr():
            return True  # a view of these shapes is one of any content
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
    is_on_cpu = all(value.is_cpu for value in reads)
    if not is_on_cpu and _may_miss(align, reads):
        return None
    if most < count or (most + 2) * sum(value.numel() for value, _ in pairs) > MOST_EXTRA * count:
        most = count
    integral = is_on_cpu and not any(map(_is_real, reads))
    made = [_made(value, axis, most, number * 101 + place, integral) for place, (value, axis) in enumerate(operands)]
    few, whole, many = zip(*made, strict=True)
    orders = _orders(count, most, reads[0].device)
    some = run(few, orders.few.numel())
    if any(part.dim() <= axis for part, axis in zip(some, align.outputs, strict=True)):
        return None
    wholes = run(whole, None)
    if not _are_rows_of(wholes, some, align.outputs, orders.known_few, 1):
        return None
    if not _are_rows_of(wholes, run(many, orders.many.numel()), align.outputs, orders.known_many, 2):
        return None
    told, known = 0, orders.known_few.numel() + orders.known_many.numel()
    for part, axis in zip(some, align.outputs, strict=True):
        if told <= ENOUGH and not _looks_alike(part.narrow(axis, 0, 1), part.narrow(axis, 1, 1)):
            told = max(told, 1, part.numel() // part.shape[axis] * known // 4 if _is_real(part) else 0)
    return told


def _are_rows_of(
    wholes: Sequence[Tensor], parts: Sequence[Tensor], axes: Sequence[int], rows: Tensor, others: int
) -> bool:
    """True if each part holds these rows of a whole, behind so many others that are not compared."""
    count = rows.numel()
    for part, whole, axis in zip(parts, wholes, axes, strict=True):
        if part.shape[axis] != others + count:
            return False
        if not close(part.narrow(axis, others, count), whole.index_select(axis, rows)):
            return False
    return True


class _Orders(NamedTuple):
    """Which rows the three runs of a trial take, of `count` rows and two others behind them."""

    few: Tensor  # one of the others, and a few
    whole: Tensor  # all but the others
    many: Tensor  # both others, and more than `most`
    known_few: Tensor  # without the others
    known_many: Tensor


@lru_cache(maxsize=256)
def _orders(count: int, most: int, device: torch.device) -> _Orders:
    few = numbers([count, count - 1, 0] if count != 3 else [count, 0], device)  # never as many as there were
    many = numbers([count + 1, count, *[row % count for row in reversed(range(most))]], device)
    return _Orders(few, numbers(range(count), device), many, few[1:], many[2:])


def _looks_alike(one: Tensor, other: Tensor) -> bool:
    if not _is_real(one):
        return torch.equal(one, other)
    pairs = zip(one.flatten()[:16].tolist(), other.flatten()[:16].tolist(), strict=True)  # most often these tell
    if any(abs(mine - theirs) > LIKELY.absolute + LIKELY.of_each * abs(theirs) for mine, theirs in pairs):
        return False
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


@lru_cache(maxsize=16)
def _pool(seed: int) -> Tensor:
    return torch.rand(POOL, generator=torch.Generator().manual_seed(seed)).add_(0.1)


@lru_cache(maxsize=64)
def _reals(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, axis: int | None, most: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    longer = shape if axis is None else (*shape[:axis], shape[axis] + 2, *shape[axis + 1 :])
    count = prod(longer)
    if count <= POOL:
        made = _pool(seed)[:count].view(longer).clone()
    else:
        made = torch.rand(longer, generator=torch.Generator().manual_seed(seed)).add_(0.1)
    if axis is not None:
        made.narrow(axis, shape[axis], 2).sub_(0.5).clamp_(min=0).mul_(-30)
    made = (torch.complex(made, made * made) if dtype.is_complex else made).to(device, dtype)
    return (made, made, made) if axis is None else _in_orders(made, axis, most)


def _in_orders(made: Tensor, axis: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    few, whole, many, *_ = _orders(made.shape[axis] - 2, most, made.device)
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
