"""What a sweep will cost, and how it runs: which variants are stacked, in which passes, and which are replayed alone.

In: a PreparedProgram, and variants. Out: passes, and a Plan of their cost in forwards and bytes. Large passes are slow
once their values leave the processor's cache, so their size follows the largest value on the way. All is decided by
counts, never by a clock: a sweep runs the same way, and gives the same last bits, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from operator import add
from typing import Any

from attrs import frozen
from torch import Tensor

from .._edit.patch import Chain, Patch
from .._ir.label import Label
from .._ir.node import Call, Ref
from .engine import Variant
from .prepared_program import PreparedProgram

VALUE_BYTES = 16e6  # of the largest value of one pass, all its variants together
PASS_BYTES = 2e9  # of all values that live at once
CALL = 3e-6  # seconds of a call, of any size
BYTE = 1 / 5e9  # of a byte that is read or written
MULTIPLICATION = 2 / 3e10
STACKING = 0.16  # of the time for all that varies: to gather it, stack it, and look for the rows that differ


@frozen
class Plan:
    """What a sweep will cost, beforehand. `forwards` is an upper bound: equal rows are found only on the way."""

    variants: int
    passes: int  # of stacked variants
    largest_pass: int  # variants in one pass
    forwards: float  # in plain runs of the program
    peak_bytes: int  # of the values that one pass holds at once
    loop_forwards: float  # what replaying one by one from each change would cost
    replayed: tuple[Any, ...] = ()  # the variants that are replayed one by one, since that costs less than stacking
    replayed_from: tuple[str, ...] = ()  # the layers that these change first

    def __str__(self) -> str:
        cost = f"at most {self.forwards:.3g} forwards ({self.loop_forwards:.3g} one by one)"
        count = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        ways = [f"{_counted(self.variants - len(self.replayed))} in {count} of up to {self.largest_pass}"]
        if self.replayed:
            names, more = ", ".join(self.replayed_from[:3]), len(self.replayed_from) - 3
            where = names + (f" and {more} more layer{'s' * (more > 1)}" if more > 0 else "")
            replayed = f"{_counted(len(self.replayed))} replayed one by one, which costs less, from {where}"
            ways = [*(ways if self.passes else ()), replayed]
        return f"{', '.join(ways)}: {cost}, {self.peak_bytes / 1e6:.3g} MB at a time"


def _counted(variants: int) -> str:
    return "1 variant" if variants == 1 else f"{variants} variants"


@frozen(eq=False)
class Pass:
    """Variants that are stacked and run at once; or one that is replayed."""

    variants: tuple[Variant, ...]
    is_stacked: bool = True


@frozen(eq=False)
class Totals:
    """Sums over the nodes of a cone, by the position from which on they are counted."""

    largest: list[float]  # bytes of the largest value
    live: list[float]  # most bytes alive at once
    shared: list[float]  # seconds that stacked variants spend once: on calls, and on what does not vary
    varying: list[float]  # seconds that each variant spends on reading and writing what varies


def passes(
    program: PreparedProgram, variants: Sequence[Variant], memory: float | None, may_replay: bool = True
) -> list[Pass]:
    """The variants, ordered by their first change, in passes. Those with the same first change go the same way."""
    totals = totals_of(program)
    stacked: list[list[Variant]] = []
    replayed: list[Variant] = []
    for first, several in groupby(sorted(variants, key=lambda variant: variant.first), lambda variant: variant.first):
        group = list(several)
        if may_replay and not pays_to_stack(program, first, group, _capacity(totals, first, memory)):
            replayed += group
            continue
        for variant in group:
            if stacked and len(stacked[-1]) < _capacity(totals, stacked[-1][0].first, memory):
                stacked[-1].append(variant)
            else:
                stacked.append([variant])
    return [*[Pass(tuple(several)) for several in stacked], *[Pass((one,), False) for one in replayed]]


def _capacity(totals: Totals, first: int, memory: float | None) -> int:
    largest, live = max(totals.largest[first], 1.0), max(totals.live[first], 1.0)
    return max(1, int(min(VALUE_BYTES / largest, (memory or PASS_BYTES) / live)))


def pays_to_stack(program: PreparedProgram, first: int, group: Sequence[Variant], capacity: int) -> bool:
    """True if stacking variants that first change a value here costs no more than replaying each of them.

    Stacked, they share calls and what does not vary, such as weights, and rows that no change reaches or nobody reads
    are not computed. But what varies is gathered, stacked, and searched for the rows that differ. Multiplications do
    not count: many rows are multiplied sooner than few.
    """
    totals = totals_of(program)
    gain, cost = totals.shared[first + 1] * (1 - 1 / capacity), totals.varying[first + 1] * STACKING
    return gain >= cost or gain + _spared(program, first, group) >= cost


def _spared(program: PreparedProgram, first: int, group: Sequence[Variant]) -> float:
    """Seconds for rows that are as recorded, in the variants at both ends and in the middle of a group: a mean."""
    some = [group[number] for number in sorted({0, len(group) // 2, len(group) - 1})]
    return sum((1 - _touched(program, variant)) * _apart_seconds(program, first) for variant in some) / len(some)


def _touched(program: PreparedProgram, variant: Variant) -> float:
    """The share of rows that a variant changes, along the axis that is stacked, as far as its parts tell."""
    touched = 0.0
    for _, change in variant.changes:
        patches = change.what.patches if isinstance(change.what, Chain) else (change.what,)
        slot = program.slot[change.tree] if type(change.tree) is Ref else None
        axis = None if slot is None else program.row_axis(slot)
        for patch in patches:
            if slot is None or axis is None or not isinstance(patch, Patch) or patch.part is None:
                return 1.0
            marks = patch.part.mask(program.values[slot].shape).movedim(axis, 0).flatten(1).any(1)
            touched += float(marks.float().mean())
    return min(touched, 1.0)


def _apart_seconds(program: PreparedProgram, first: int) -> float:
    """Seconds of the nodes that leave the rows of the values at a position apart from each other."""
    if first not in program.apart:
        program.apart[first] = _sum_apart(program, first)
    return program.apart[first]


def _sum_apart(program: PreparedProgram, first: int) -> float:
    axes: dict[int, int | None] = {slot: program.row_axis(slot) for slot in program.gives(first)}
    seconds = 0.0
    for position in program.cone_of(frozenset((first,)))[0]:
        if position == first or not program.graph.call_marks[position]:
            continue
        step = program.step(position)
        mine = {number: axes[slot] for number, slot in enumerate(step.reads) if slot in axes}
        apart = [one for one in step.alignments if all(one.operands[n] == axis for n, axis in mine.items())]
        align = None if None in mine.values() else next((one for one in apart if step.holds(one)), None)
        axes |= zip(step.gives, align.outputs if align is not None else [None] * len(step.gives), strict=True)
        seconds += work(program, position) * read_part(program, position) if align is not None else 0.0
    return seconds


# ---- sums over a cone --------------------------------------------------------------------------------------------


def totals_of(program: PreparedProgram) -> Totals:
    """The sums of a program as it is prepared."""
    if not program.totals:
        program.totals.append(_totals(program))
    found: Totals = program.totals[0]
    return found


def _totals(program: PreparedProgram) -> Totals:
    cone, dying = program.cone_of(program.prepared)
    alive, held, changing = 0.0, {}, set[int]()
    made = [[0.0] * (len(program.graph) + 1) for _ in range(4)]
    for position in cone:
        slots = program.gives(position)
        changing.update(slots)
        for slot in slots:
            held[slot] = read_bytes(program, slot)
            alive += held[slot]
            made[0][position] = max(made[0][position], held[slot])
        made[1][position] = alive
        alive -= sum([held.pop(slot, 0.0) for slot in dying.get(position, ())])
        if program.graph.call_marks[position]:
            made[2][position], made[3][position] = _seconds(program, position, changing)
    for largest in made[:2]:
        largest[:] = _sums_from_end(largest, max)
    for total in made[2:]:
        total[:] = _sums_from_end(total, add)
    return Totals(*made)


def _sums_from_end(numbers: list[float], both: Callable[[float, float], float]) -> list[float]:
    return [*accumulate(reversed(numbers), both)][::-1]


def _seconds(program: PreparedProgram, position: int, changing: set[int]) -> tuple[float, float]:
    """Of a node: the seconds that stacked variants spend once or not at all, and those that each spends on reading and
    writing what varies.
    """
    step, part = program.step(position), read_part(program, position)
    fixed, varying = 0, sum(map(_bytes, step.results))
    for slot, value in zip(step.reads, step.recorded, strict=True):
        if slot in changing:
            varying += _bytes(value)
        else:
            fixed += _bytes(value)
    unread = (1 - part) * work(program, position) if part < 1 else 0.0
    return CALL + fixed * BYTE + unread, varying * part * BYTE


def _bytes(value: Tensor) -> int:
    return value.numel() * value.itemsize  # also of sparse ones


def read_bytes(program: PreparedProgram, slot: int) -> float:
    """The bytes of a value that anybody reads."""
    if slot not in program.wanted:
        return 0.0
    value, rows = program.values[slot], program.wanted[slot]
    part = 1.0 if rows is None else len(rows[1]) / max(value.shape[rows[0]], 1)
    return _bytes(value) * part


def read_part(program: PreparedProgram, position: int) -> float:
    """The share of what a node gives that is read."""
    rows = program.demanded(program.step(position))
    if rows is None:
        return 1.0
    return len(rows[1]) / max(program.step(position).results[0].shape[rows[0]], 1)


def work(program: PreparedProgram, position: int) -> float:
    """Seconds that a node takes, roughly."""
    step = program.step(position)
    read = sum(map(_bytes, (*step.recorded, *step.results)))
    return CALL + MULTIPLICATION * step.multiplications + BYTE * read


def seconds_from(program: PreparedProgram) -> list[float]:
    """What one variant that first changes a value at each position takes, roughly: which passes to run first."""
    made = [0.0] * (len(program.graph) + 1)
    for position in program.cone_of(program.prepared)[0]:
        made[position] = work(program, position) if program.graph.call_marks[position] else 0.0
    return _sums_from_end(made, add)


def sweep_plan(
    program: PreparedProgram, variants: Sequence[Variant], made: Sequence[Pass], keys: Sequence[Any]
) -> Plan:
    """What the variants will cost, run in these passes. `keys`: by the number of a variant."""
    graph, live = program.graph, totals_of(program).live
    costs = [work(program, position) if isinstance(node, Call) else 0.0 for position, node in enumerate(graph.nodes)]
    whole = max(sum(costs), 1e-12)
    replayed = [one.variants[0] for one in made if not one.is_stacked]
    alone = {variant.number for variant in replayed}
    after: dict[tuple[int, ...], tuple[float, float]] = {}
    at_once = one_by_one = 0.0
    for variant in variants:
        key = tuple(sorted({position for position, _ in variant.changes}))
        if key not in after:
            cone = [position for position in program.cone(key) if position not in key]
            read = sum(costs[position] * read_part(program, position) for position in cone)
            after[key] = read / whole, sum(costs[position] for position in cone) / whole
        at_once += after[key][variant.number in alone]
        one_by_one += after[key][1]
    stacked = [one for one in made if one.is_stacked]
    return Plan(
        len(variants),
        len(stacked),
        max([len(one.variants) for one in stacked], default=0),
        at_once,
        int(max([len(one.variants) * live[one.variants[0].first] for one in made], default=0.0)),
        one_by_one,
        tuple([keys[variant.number] for variant in replayed]),
        tuple(dict.fromkeys([Label.of(graph.nodes[variant.first].name).layer for variant in replayed])),
    )
