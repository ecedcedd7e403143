"""How many variants go into one pass, in which order, and what they cost.

In: a PreparedProgram and the positions of the variants. Out: chunks, and a Plan in forwards and bytes. Large chunks
are slow once their values leave the processor's cache, so the size follows the largest value on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from .._ir.node import Call
from .engine import Variant
from .prepared_program import PreparedProgram

VALUE_BYTES = 16e6  # of the largest value of one pass, all its variants together
PASS_BYTES = 2e9  # of all values that live at once


@frozen
class Plan:
    """What a sweep will cost, beforehand. `forwards` is an upper bound: equal rows are found only on the way."""

    variants: int
    passes: int
    largest_pass: int  # variants in one pass
    forwards: float  # in plain runs of the program
    peak_bytes: int  # of the values that one pass holds at once
    loop_forwards: float  # what replaying one by one from each change would cost

    def __str__(self) -> str:
        cost = f"at most {self.forwards:.3g} forwards ({self.loop_forwards:.3g} one by one)"
        count = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        passes = f"{self.variants} variants in {count} of up to {self.largest_pass}"
        return f"{passes}: {cost}, {self.peak_bytes / 1e6:.3g} MB at a time"


def chunks(program: PreparedProgram, variants: Sequence[Variant], memory: float | None) -> list[list[Variant]]:
    """The variants, ordered by their first change, in passes."""
    largest, live = sizes(program)
    found: list[list[Variant]] = []
    for variant in sorted(variants, key=lambda variant: variant.first):
        if found and len(found[-1]) < _capacity(largest, live, found[-1][0].first, memory):
            found[-1].append(variant)
        else:
            found.append([variant])
    return found


def _capacity(largest: list[float], live: list[float], first: int, memory: float | None) -> int:
    return max(1, int(min(VALUE_BYTES / max(largest[first], 1.0), (memory or PASS_BYTES) / max(live[first], 1.0))))


def sizes(program: PreparedProgram) -> tuple[list[float], list[float]]:
    """For each position: the bytes of the largest value from there on, and the most bytes alive at once."""
    if program.sizes is None:
        program.sizes = _sizes(program)
    return program.sizes


def _sizes(program: PreparedProgram) -> tuple[list[float], list[float]]:
    cone = program.cone(program.prepared)
    dying = program.deaths(cone)
    graph = program.graph
    gives: dict[int, float] = {}
    alive, peaks = 0.0, {}
    held: dict[int, float] = {}
    for position in cone:
        slots = program.gives(position)
        for slot in slots:
            held[slot] = read_bytes(program, slot)
        gives[position] = max([held[slot] for slot in slots], default=0.0)
        alive += sum(held[slot] for slot in slots)
        peaks[position] = alive
        alive -= sum(held.pop(slot, 0.0) for slot in dying.get(position, ()))
    largest, live = [0.0] * (len(graph) + 1), [0.0] * (len(graph) + 1)
    for position in range(len(graph) - 1, -1, -1):
        largest[position] = max(largest[position + 1], gives.get(position, 0.0))
        live[position] = max(live[position + 1], peaks.get(position, 0.0))
    return largest, live


def read_bytes(program: PreparedProgram, slot: int) -> float:
    """The bytes of a value that anybody reads."""
    if slot not in program.wanted:
        return 0.0
    value, rows = program.values[slot], program.wanted[slot]
    part = 1.0 if rows is None else len(rows[1]) / max(value.shape[rows[0]], 1)
    return value.numel() * value.itemsize * part


def plan(program: PreparedProgram, variants: Sequence[Variant], memory: float | None) -> Plan:
    """What the variants will cost."""
    made = chunks(program, variants, memory)
    _, live = sizes(program)
    graph = program.graph
    costs = [work(program, position) if isinstance(node, Call) else 0.0 for position, node in enumerate(graph.nodes)]
    whole = max(sum(costs), 1e-12)
    after: dict[tuple[int, ...], tuple[float, float]] = {}
    at_once = alone = 0.0
    for variant in variants:
        key = tuple(sorted({position for position, _ in variant.changes}))
        if key not in after:
            cone = [position for position in program.cone(key) if position not in key]
            read = sum(costs[position] * _read_part(program, position) for position in cone)
            after[key] = read / whole, sum(costs[position] for position in cone) / whole
        at_once, alone = at_once + after[key][0], alone + after[key][1]
    widest = max(made, key=len) if made else []
    peak = max((len(chunk) * live[chunk[0].first] for chunk in made), default=0.0)
    return Plan(len(variants), len(made), len(widest), at_once, int(peak), alone)


def _read_part(program: PreparedProgram, position: int) -> float:
    """The share of what a node gives that is read."""
    rows = program.demanded(program.step(position))
    if rows is None:
        return 1.0
    return len(rows[1]) / max(program.step(position).results[0].shape[rows[0]], 1)


def work(program: PreparedProgram, position: int) -> float:
    """Seconds that a node takes, roughly: 3 us, its multiplications at 30 a nanosecond, its bytes at 5."""
    step = program.step(position)
    read = sum(value.numel() * value.itemsize for value in (*step.recorded, *step.results))
    return 3e-6 + 2 * step.multiplications / 3e10 + read / 5e9
