"""Which nodes must run, and when each value may be freed.

In: a Graph, the nodes wanted, the nodes whose values are known, the nodes that are changed. Out: a Plan. No tensor is
touched here, so plans are tested on graphs written by hand, and the interpreter has no decision left to take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from attrs import frozen

from .._ir.graph import Graph


@frozen
class Plan:
    """What to run. All numbers are positions of nodes in the graph."""

    run: tuple[int, ...]  # calls to execute, in order
    supply: tuple[int, ...]  # nodes whose known values are needed
    patch: tuple[int, ...]  # changed nodes that are needed, to be changed when their value is there
    guards: tuple[int, ...]  # guards to ask again, by their number
    last_use: dict[int, int]  # position -> position of the last node, patch or guard that reads it
    kept: frozenset[int]


def plan(
    graph: Graph,
    wanted: Iterable[int],
    known: frozenset[int] | bytearray,
    changed: Iterable[int],
    replaced: frozenset[int] = frozenset(),
    rerun_all: bool = False,
    keep: Iterable[int] = (),
    until: int | None = None,
    again: Iterable[int] = (),
    turns: Mapping[int, int] = MappingProxyType({}),
    last: Iterable[int] = (),
    heeded: Iterable[int] = (),
) -> Plan:
    """The causal cone: what a change can reach and the wanted nodes need, and what must run again for it.

    `known` marks nodes with a usable value; `changed` nodes get another value than the recorded one, for which
    `replaced` ones do not even need the old. With `rerun_all` every call is wanted, and only sources count as known.
    Nodes behind those in `again` run again on the same values, so they ask no guard. `turns` maps a draw to the draw
    before it in its stream: the earlier one runs wherever the later one does; without an entry it runs only where it
    may leave the generator in another state than recorded. Draws in `last` run for the state in which they leave the
    generator. Changed nodes in `heeded` are changed even if nobody wants them: a guarded fact depends on their value.
    """
    known_marks = bytearray(len(graph)) if not isinstance(known, bytearray) else known
    if known_marks is not known:
        for position in known:
            known_marks[position] = 1
    changed = tuple(sorted(set(changed)))
    dirty = _below(graph, changed)
    guards = _guards(graph, dirty, frozenset(changed), rerun_all, until)
    if again := tuple(again):
        dirty = _below(graph, (*changed, *again))
    ends = {*wanted, *last, *heeded} | {
        graph.positions[ref.node] for number in guards for ref in graph.guards[number].refs
    }
    if rerun_all and not replaced:
        marks, supply = bytearray(graph.call_marks), _sources(graph, ends)
    else:
        marks, supply = _needed(graph, ends, known_marks, dirty, frozenset(changed), turns, replaced, rerun_all)
    run = tuple([p for p, mark in enumerate(marks) if mark])
    patch = tuple(p for p in changed if marks[p] or supply[p] or p in replaced)
    kept = frozenset(keep) | frozenset(wanted)
    return Plan(
        run=run,
        supply=tuple([p for p, mark in enumerate(supply) if mark]),
        patch=patch,
        guards=guards,
        last_use=_last_uses(graph, run, guards),
        kept=kept,
    )


def _below(graph: Graph, changed: tuple[int, ...]) -> bytearray:
    """Marks the nodes whose value a change can alter. A changed node is marked only if another one reaches it."""
    marks, dependents = bytearray(len(graph)), graph.dependents
    stack = [user for position in changed for user in dependents[position]]
    while stack:
        position = stack.pop()
        if not marks[position]:
            marks[position] = 1
            stack.extend(dependents[position])
    return marks


def _guards(
    graph: Graph, dirty: bytearray, changed: frozenset[int], rerun_all: bool, until: int | None
) -> tuple[int, ...]:
    found = []
    for number, guard in enumerate(graph.guards):
        reads = [graph.positions[ref.node] for ref in guard.refs]
        reached = rerun_all or any(dirty[position] or position in changed for position in reads)
        if reached and (until is None or guard.position <= until):
            found.append(number)
    return tuple(found)


def _sources(graph: Graph, ends: set[int]) -> bytearray:
    """Marks every node that is no call and that something reads."""
    calls, users = graph.call_marks, graph.users
    return bytearray([not call and (bool(users[p]) or p in ends) for p, call in enumerate(calls)])


def _needed(
    graph: Graph,
    ends: set[int],
    known: bytearray,
    dirty: bytearray,
    changed: frozenset[int],
    turns: Mapping[int, int],
    replaced: frozenset[int],
    rerun_all: bool,
) -> tuple[bytearray, bytearray]:
    """Marks of what must run and of what must be supplied, walking back from the ends."""
    run, supply, needed = bytearray(len(graph)), bytearray(len(graph)), bytearray(len(graph))
    parents, is_call, shifts, state_of = graph.parents, graph.call_marks, graph.shifts, graph.state_of
    for end in ends:
        needed[end] = 1
    position = needed.rfind(1)
    while position >= 0:
        needed[position], below = 0, position
        if run[position] or supply[position] or position in replaced:
            pass
        elif not is_call[position] or (known[position] and not dirty[position] and not rerun_all):
            supply[position] = 1
            drawn = state_of.get(position) if not is_call[position] else None
            if drawn is not None and (dirty[drawn] or drawn in turns or (drawn in changed and not known[drawn])):
                needed[drawn], below = 1, max(below, drawn + 1)  # it may begin with another state than the one held
        else:
            run[position] = 1
            for parent in parents[position]:
                needed[parent] = 1
            before = turns.get(position, shifts.get(position)) if shifts or turns else None
            if before is not None and (dirty[before] or position in turns):
                needed[before], below = 1, max(below, before + 1)
        position = needed.rfind(1, 0, below)
    return run, supply


def _last_uses(graph: Graph, run: tuple[int, ...], guards: tuple[int, ...]) -> dict[int, int]:
    last, parents = dict[int, int](), graph.parents
    for position in run:
        last[position] = position
        for parent in parents[position]:
            last[parent] = position
    for number in guards:
        for ref in graph.guards[number].refs:
            position = graph.positions[ref.node]
            last[position] = max(last.get(position, -1), graph.guards[number].position)
    return last
