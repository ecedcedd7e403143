"""Along which axes a call treats rows alike: found by search, proved by running it.

In: the operands and results of a call. Out: Alignments. A call is aligned if each row of its result depends on the
same row of its operands alone, whatever the other rows are and however many: `op(x)[row r along b] == op(x[row r along
a])`. Then it can run on rows of any variants. Every way that the sizes allow is a candidate, and none is used before
it is proved, on made-up numbers, so that one proof serves all calls of these shapes. No operator is named here; the
operator book marks those of which a proof says nothing.

    F.linear(x, w, b)       x (3, 5, 4), w (6, 4), b (6,)  ->  (3, 5, 6)
    operands (0, None, None), outputs (0,)      rows of x along axis 0 give rows of the result along axis 0
    operands (None, 0, 0), outputs (2,)         rows of w and b give the last axis
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, islice, product
from math import inf, nan, prod
from numbers import Integral, Number
from typing import Any, NamedTuple, cast

import torch
from attrs import evolve, frozen

from .._ir.equality import BATCHED, BATCHED_NARROW, LIKELY
from .._ir.node import Call, Ref
from .._ir.ops import OpInfo, Quirk, op_info
from .._ir.trees import is_array, leaves
from .sparse_rows import index_tensor

Tensor = torch.Tensor
Shape = tuple[int, ...]
MAX_CANDIDATES = 80  # for one axis of what a call gives
ENOUGH = 6  # times four numbers, or answers of yes and no, that differ from row to row
MAX_TRIALS = 2 * ENOUGH  # at most
MIN_OF_INDICES = 8  # trials, where whole numbers or answers may be indices: what they lead to may be a single number
MAX_EXTRA = 1_000_000  # numbers in a trial of more rows than any number among the arguments ...
MAX_FOR_PLACES = 16_000_000  # ... and than any that is the length of no axis, and so may count rows
SPREAD = 1e4  # times the largest number among the arguments: how large rows are that must not matter
SMALL = 16_384  # numbers: so few of them are kept for other proofs
POOL = 4096  # numbers that are drawn at once for several proofs
PERIOD = 4093  # of them: a prime, so that rows of no usual length begin with the same ones
SCALES = (1.0, 1e3, -1e3, 1e-3)  # of the operands without rows, from trial to trial


@frozen
class Literals:
    """The numbers among the arguments of a call, beyond which it may do something else than in a trial."""

    largest: int = 0  # integer
    largest_place: int = 0  # the largest integer that is the length of no axis of what the call reads and gives
    spread: float = SPREAD

    @staticmethod
    def of(tree: Any, op: OpInfo, values: Sequence[Tensor]) -> Literals:
        """Those in these arguments of a call of an operation that reads and gives these values."""
        found = [abs(number) for number in _numbers_in(tree)]
        counts = [int(number) for number in found if isinstance(number, Integral)]
        takes_sizes = op.gives_view or op.has(Quirk.COPY_OR_VIEW) or op.has(Quirk.TAKES_SIZES)
        lengths = {length for value in values for length in value.shape} if takes_sizes else set()
        places = [number for number in counts if number not in lengths]
        most = max([float(number) for number in found if number < inf], default=0.0)
        spread = min(SPREAD * 10.0 ** len(str(int(most))), 1e30)
        return Literals(max(counts, default=0), max(places, default=0), spread)


NO_LITERALS = Literals()


def _numbers_in(tree: Any) -> Iterator[Any]:
    """The numbers among literals, also numpy's, and those in sizes and arrays."""
    for leaf in leaves(tree):
        if isinstance(leaf, Number) and not isinstance(leaf, bool):
            yield leaf
        elif isinstance(leaf, torch.Size) or is_array(cast(Any, type(leaf))):
            yield from [number for number in getattr(leaf, "flat", leaf) if isinstance(number, Number)]


@frozen
class Alignment:
    """The axis of rows in each operand and in each output. None: the operand has no rows, and must be as recorded."""

    operands: tuple[int | None, ...]
    outputs: tuple[int, ...]
    resizes: str = ""  # "reshape", "expand": the sizes that were written give way to those of the rows at hand


def candidates(
    node: Call,
    name: str,
    reads: Sequence[Tensor],
    results: Sequence[Tensor],
    unread: Collection[int],
    where: Sequence[int],
) -> tuple[Alignment, ...]:
    """Every alignment that the sizes allow, by the axes of the first result, the likeliest first. Empty if the call
    draws, or content or the user's own code decides: a proof would say nothing. `where`: the number of the value at
    each operand.
    """
    op = op_info(name)
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
        return _along_batch(node, reads, len(results))
    plain = _fitting(tuple([value.shape for value in reads]), tuple([one.shape for one in results]), frozenset(unread))
    if op.has(Quirk.ATTENTION):
        return tuple([align for align in plain if _is_of_attention(align, node, reads, where)])
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
    """The integers among the arguments of a call: a size written there holds for no other count of rows."""
    found = list(leaves(tree))
    return {int(number) for number in _numbers_in(found) if isinstance(number, Integral)}


def _keeps_order(align: Alignment, reads: Sequence[Tensor], result: Tensor, resizes: str) -> bool:
    """True if rows stay in place when another count of them is resized: `reshape` needs the same number of elements
    before and behind the axis, `expand` the same axis from the right.
    """
    number = next(n for n, axis in enumerate(align.operands) if axis is not None)
    shape, axis, output = reads[number].shape, align.operands[number] or 0, align.outputs[0]
    if resizes == "expand":
        return axis - len(shape) == output - result.dim()
    return prod(shape[:axis]) == prod(result.shape[:output])


def _along_batch(node: Call, reads: Sequence[Tensor], outputs: int) -> tuple[Alignment, ...]:
    """For recurrent functions over whole sequences: the batch axis of the input and of the states."""
    batch = 0 if node.args[-1] is True else 1
    if node.args[-1] not in (True, False) or reads[0].dim() != 3:
        return ()
    operands = [None if value.dim() != 3 else 1 if number else batch for number, value in enumerate(reads)]
    return (Alignment(tuple(operands), (batch, *[1] * (outputs - 1))),)


def _is_of_attention(align: Alignment, node: Call, reads: Sequence[Tensor], where: Sequence[int]) -> bool:
    """True for rows of samples or heads in query, key and value; of queries; and of what values hold. Kernels do not
    compare all sizes, and a mask that leaves one key hides how rows depend on each other.
    """
    if len(node.args) < 3 or any(type(arg) is not Ref for arg in node.args[:3]):
        return False
    query, key, value = (align.operands[number] for number in where[:3])
    rank = reads[where[0]].dim()
    if query is not None and query == key == value:
        return query < rank - 2 and all(reads[number].dim() == rank for number in where[:3])
    if key is not None or (query is not None and value is not None):
        return False
    return query == rank - 2 if query is not None else value == reads[where[2]].dim() - 1


@lru_cache(maxsize=4096)
def _fitting(reads: tuple[Shape, ...], results: tuple[Shape, ...], unread: frozenset[int]) -> tuple[Alignment, ...]:
    """Every alignment that the shapes allow, by the axes of the first result."""
    every = [islice(_fitting_along(reads, results, unread, axis), MAX_CANDIDATES) for axis in range(len(results[0]))]
    return tuple([Alignment(*axes) for several in every for axes in several])


def _fitting_along(
    reads: Sequence[Shape], results: Sequence[Shape], unread: Collection[int], axis: int
) -> Iterator[tuple[tuple[int | None, ...], tuple[int, ...]]]:
    """Axes of the size that the first result has along `axis`: in all operands, in the first or last ones, in any of
    them.
    """
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
    for operands in (*likely, *islice(product(*[[*way, None] for way in ways]), MAX_CANDIDATES)):
        if operands not in seen:
            seen.add(operands)
            yield from [(operands, output) for output in outputs]


def _resizes(reads: Sequence[Tensor], results: Sequence[Tensor], unread: Collection[int]) -> str:
    """How a call gives its operand in another shape, if it does: then sizes among its arguments may stand for other
    rows.
    """
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
    """True if a call gives every number unchanged, also numbers that it might bound, round or replace."""
    number = next(n for n, axis in enumerate(align.operands) if axis is not None)
    value, generator = reads[number], torch.Generator().manual_seed(0)
    made = torch.randn(value.shape, generator=generator)
    made = made * 10 ** (torch.rand(value.shape, generator=generator) * 60 - 30)
    if value.dtype is torch.bool:
        made = made > 0
    elif not _is_real(value):  # also the least and the largest numbers that there are
        ends = torch.iinfo(value.dtype)
        made = torch.randint(max(ends.min, -(2**62)), min(ends.max, 2**62), value.shape, generator=generator)
        made.view(-1)[::3], made.view(-1)[1::3] = ends.min, min(ends.max, 2**63 - 1)
    for odd in (None, nan, inf, -inf) if _is_real(value) else (None,):
        wide = (made if odd is None else torch.full_like(made, odd)).to(value.device, value.dtype)
        try:
            result = call([*reads[:number], wide, *reads[number + 1 :]])
        except Exception:  # it computes something, and not of these numbers
            return False
        moved = wide.reshape(result.shape) if align.resizes == "reshape" else wide.expand(result.shape)
        if not torch.equal(result, moved) and not (moved.isnan().all() and result.isnan().all()):
            return False
        if result.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr():
            return True  # a view of these shapes is one of any content
    return True


# ---- proofs ------------------------------------------------------------------------------------------------------

RunRows = Callable[[Sequence[Tensor], int | None], list[Tensor]]  # on so many rows; None: as it was called


def is_proved(
    align: Alignment, reads: Sequence[Tensor], run: RunRows, literals: Literals, is_pointwise: Callable[[], bool]
) -> bool:
    """True if an alignment holds on other numbers. Trials go on until there is enough evidence: one is enough if
    many results differ from row to row. Where all rows come out alike, as of `x == 0`, torch's own tag decides.
    """
    evidence, integral = 0, all(value.is_cpu and not _is_real(value) for value in reads)
    least = 1 if all(map(_is_real, reads)) else MIN_OF_INDICES
    for number in range(MAX_TRIALS):
        try:
            weight = _trial(align, reads, run, literals, number, integral)
        except Exception:  # whatever it is, the call does not take rows in this way
            if not integral:
                return False
            integral = False  # or some of the whole numbers are indices
            continue
        if weight is None:
            return False
        evidence += weight
        if evidence >= ENOUGH and number + 1 >= least:
            return True
    return evidence > 1 or is_pointwise()


def _trial(
    align: Alignment, reads: Sequence[Tensor], run: RunRows, literals: Literals, number: int, integral: bool
) -> int | None:
    """Runs a few rows, the whole, and more rows than the whole has, in another order. None if any row comes out
    different; else how much evidence that is.

    The few and the many hold rows that are not in the whole. A sum, a largest number and a softmax see one that is far
    above all others, a smallest number sees one that is below: else `softmax` over two rows, or `max_pool1d`, would
    pass for a function of each.
    """
    operands = list(zip(reads, align.operands, strict=True))
    pairs = [(value, axis) for value, axis in operands if axis is not None]
    count = pairs[0][0].shape[pairs[0][1]]
    if not all(value.is_cpu for value in reads) and _may_miss(align, reads):
        return None
    length = (
        count if align.resizes else _rows_beyond(literals, count, sum(value.numel() for value, _ in pairs) // count)
    )
    if length is None:
        return None
    made = [
        _trial_values(
            value, axis, length, number * 101 + place, integral, literals.spread, SCALES[number % len(SCALES)]
        )
        for place, (value, axis) in enumerate(operands)
    ]
    few, whole, many = zip(*made, strict=True)
    orders = _row_orders(count, length, reads[0].device)
    some = run(few, orders.few.rows.numel())
    if any(part.dim() <= axis for part, axis in zip(some, align.outputs, strict=True)):
        return None
    wholes = run(whole, None)
    if not _are_rows_of(wholes, some, align.outputs, orders.few):
        return None
    if not _are_rows_of(wholes, run(many, orders.many.rows.numel()), align.outputs, orders.many):
        return None
    evidence, known = 0, orders.few.rows.numel() + orders.many.rows.numel() - 3
    for part, axis in zip(some, align.outputs, strict=True):
        if evidence <= ENOUGH and not _are_alike(part.narrow(axis, 0, 1), part.narrow(axis, 1, 1)):
            evidence = max(evidence, 1, part.numel() // part.shape[axis] * known // 4 if _is_real(part) else 0)
    return evidence


def _rows_beyond(literals: Literals, count: int, size: int) -> int | None:
    """How many rows of this size reach beyond all numbers among the arguments, where these may count rows: what
    `triu(x, -600)` does shows in no fewer. None if they would take too much memory.
    """
    if (literals.largest + 2) * size <= MAX_EXTRA:
        return max(literals.largest, count)
    fits = literals.largest_place < count or (literals.largest_place + 2) * size <= MAX_FOR_PLACES
    return max(literals.largest_place, count) if fits else None


def _are_rows_of(wholes: Sequence[Tensor], parts: Sequence[Tensor], axes: Sequence[int], order: _RowOrder) -> bool:
    """True if each part holds the rows of a whole that `order` names, besides others, which are not compared."""
    for part, whole, axis in zip(parts, wholes, axes, strict=True):
        if part.shape[axis] != order.rows.numel():
            return False
        if not close_across_batches(part.index_select(axis, order.places), whole.index_select(axis, order.compared)):
            return False
    return True


class _RowOrder(NamedTuple):
    """Which rows a run takes."""

    rows: Tensor
    places: Tensor  # where among these those stand that are compared: rows of the whole
    compared: Tensor  # which rows these are

    @staticmethod
    def of(rows: Tensor, count: int) -> _RowOrder:
        places = (rows < count).nonzero()[:, 0]
        return _RowOrder(rows, places, rows[places])


class _RowOrders(NamedTuple):
    """Which rows the three runs of a trial take, of `count` rows and two others behind them: one with large numbers,
    one with negative and zero ones. The others stand before some rows, and every place has a row that is compared: an
    index among the arguments may lead anywhere.
    """

    few: _RowOrder  # the large one, and a few
    whole: Tensor  # all but the others
    many: _RowOrder  # both others, and `length` more


@lru_cache(maxsize=256)
def _row_orders(count: int, length: int, device: torch.device) -> _RowOrders:
    few = index_tensor([count, count - 1, 0] if count != 3 else [count, 0], device)  # never as many as there were
    first, *rest = [row % count for row in reversed(range(max(length, 2)))]
    many = index_tensor([first, count + 1, count, *rest], device)
    return _RowOrders(_RowOrder.of(few, count), index_tensor(range(count), device), _RowOrder.of(many, count))


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """True if two rows are equal, or nearly so: they tell nothing about which row is which."""
    if not _is_real(one):
        return torch.equal(one, other)
    pairs = zip(one.flatten()[:16].tolist(), other.flatten()[:16].tolist(), strict=True)  # most often these differ
    if any(abs(mine - theirs) > LIKELY.absolute + LIKELY.of_each * abs(theirs) for mine, theirs in pairs):
        return False
    return LIKELY.holds(one, other)


def _may_miss(align: Alignment, reads: Sequence[Tensor]) -> bool:
    """True if fixed indices may point beyond fewer rows. Off the CPU, that ends the process."""
    return any(
        axis is None and value.dim() and not value.is_floating_point() and value.dtype is not torch.bool
        for value, axis in zip(reads, align.operands, strict=True)
    )


def _trial_values(
    value: Tensor, axis: int | None, length: int, seed: int, integral: bool, spread: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers for one operand of a trial: a few rows, the whole, and more, as `_row_orders` says.

    Operands without rows get made-up numbers, too: a convolution by zeros has rows along any axis, and another one of
    the same shapes has not. Whole numbers without rows stay as they are, and a proof is for these alone.
    """
    if _is_real(value):
        kept = value.numel() <= SMALL and (axis is None or length == value.shape[axis])
        make = _reals if kept else _reals.__wrapped__
        numbers = make(value.shape, value.dtype, value.device, axis, 0 if axis is None else length, seed, spread)
        return numbers if axis is not None or scale == 1 else (numbers[0] * scale,) * 3
    if axis is None:
        return value, value, value
    generator, count = torch.Generator().manual_seed(seed), value.shape[axis]
    shape = (*value.shape[:axis], count + 2, *value.shape[axis + 1 :])
    if value.dtype is torch.bool:  # some rows of one answer alone: for `any` and `all`
        ones = [length if number == axis else 1 for number, length in enumerate(shape)]
        often = torch.rand(ones, generator=generator) * 1.6 - 0.3
        return _select_rows((torch.rand(shape, generator=generator) < often).to(value.device), axis, length)
    made = _indices(value.reshape(-1), shape, axis, generator, integral).to(value.device)
    return _select_rows(made, axis, length)


def _indices(flat: Tensor, shape: Sequence[int], axis: int, generator: torch.Generator, integral: bool) -> Tensor:
    """Whole numbers, none but those that there were, since they may be indices; with `integral` also some beyond. The
    rows at the end, which are not in the whole, have numbers that are in no other row.
    """
    known = flat.unique()
    if integral:
        ends = torch.iinfo(flat.dtype)
        far = torch.tensor([max(ends.min, -100_000), min(ends.max, 100_000)], dtype=flat.dtype, device=flat.device)
        known = torch.cat((known, known[:1] - 1, known[-1:] + 1, far))
    known = known[torch.randperm(len(known), generator=generator)]
    fewer = torch.randint((len(known) + 1) // 2, shape, generator=generator)
    every = torch.randint(len(known), shape, generator=generator)
    is_other = torch.arange(shape[axis]) >= shape[axis] - 2
    return known[torch.where(is_other.view(-1, *[1] * (len(shape) - axis - 1)), every, fewer)]


@lru_cache(maxsize=16)
def _pool(seed: int) -> Tensor:
    return torch.rand(POOL, generator=torch.Generator().manual_seed(seed)).add_(0.1)


@lru_cache(maxsize=64)
def _reals(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    axis: int | None,
    length: int,
    seed: int,
    spread: float,
) -> tuple[Tensor, Tensor, Tensor]:
    longer = shape if axis is None else (*shape[:axis], shape[axis] + 2, *shape[axis + 1 :])
    count = prod(longer)
    if count <= POOL:
        made = _pool(seed)[:count].view(longer).clone()
    else:  # the same numbers again and again, but no two rows alike
        made = _pool(seed)[:PERIOD].repeat(count // PERIOD + 1)[:count].view(longer).clone()
    if axis is not None:
        made.narrow(axis, shape[axis], 1).mul_(spread)
        made.narrow(axis, shape[axis] + 1, 1).sub_(0.5).clamp_(min=0).mul_(-spread)
    made = (torch.complex(made, made * made) if dtype.is_complex else made).to(device, dtype)
    return (made, made, made) if axis is None else _select_rows(made, axis, length)


def _select_rows(made: Tensor, axis: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    few, whole, many = _row_orders(made.shape[axis] - 2, length, made.device)
    return made.index_select(axis, few.rows), made.index_select(axis, whole), made.index_select(axis, many.rows)


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def close_across_batches(one: Tensor, other: Tensor) -> bool:
    """True if equal up to what another batch size does to the last bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not _is_real(one):
        return bool(torch.equal(one, other))
    return (BATCHED_NARROW if one.dtype in (torch.bfloat16, torch.float16) else BATCHED).holds(one, other)
