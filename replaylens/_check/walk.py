"""One walk over a program, call by call: does each give its own value, does all that it reads matter, are draws known?

In: a record, which calls are asked. Out: three laws. Values that were not kept are computed on the way and forgotten
after their last use, so that the walk needs no second copy of the activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import define, evolve, field

from .._core.graph import Graph
from .._core.node import Call, Ref, State, identifier, refs_of
from .._core.sameness import difference, same
from .._edit.lower import may_vary
from .._replay.interpreter import recorded_world
from .._replay.parting import parted
from .._replay.record import Record
from .alone import Alone, Values, as_replayed, drawing_otherwise, ready
from .findings import found_at
from .kernels import varies
from .literals import otherwise
from .nonsense import others_than
from .perturbing import UNREAD, Trial, unseen
from .proven import Proven
from .report import Finding, Law

ALONE, NONSENSE, DRAWS = "each node alone", "nonsense parents", "draws"
_STALE = "a value that it reads or gives was overwritten since"


@define
class Walk:
    """What was found so far. One object for each walk."""

    record: Record
    proven: set[int]  # calls that are known to give their saved values on saved values
    stale: frozenset[Ref]
    values: Values
    apart: Mapping[str, frozenset[Ref]]  # views that an edit has parted from their memory, by the call that writes
    alone: list[Finding] = field(factory=list)
    nonsense: list[Finding] = field(factory=list)
    draws: list[Finding] = field(factory=list)
    specials: dict[str, list[Finding]] = field(factory=lambda: {ALONE: [], NONSENSE: [], DRAWS: []})
    asked: dict[str, int] = field(factory=lambda: {ALONE: 0, NONSENSE: 0, DRAWS: 0})

    @property
    def graph(self) -> Graph:
        return self.record.graph


def walk(proven: Proven, stale: frozenset[Ref], chosen: frozenset[int], tick: Callable[[int], None]) -> Walk:
    """Ask each chosen call, in order. What a whole replay proved of it is not run again."""
    record = proven.record
    made = Walk(record, proven.positions, stale, Values(record), parted(record.graph, ()))
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")  # nonsense makes calls complain
        for position, node in enumerate(record.graph.nodes):
            if isinstance(node, Call):
                _visit(made, position, node, position in chosen)
            made.values.forget(position)
            if position in chosen:
                tick(1)
    return made


def _visit(walk: Walk, position: int, node: Call, is_asked: bool) -> None:
    kept = all(ref in walk.record.values for ref in refs_of(node))
    if kept and not is_asked:
        return
    if any(ref in walk.stale for ref in (*node.refs, *refs_of(node))):
        walk.specials[ALONE].append(found_at(walk.graph, ALONE, node, _STALE))
        return
    with recorded_world(True, walk.graph):
        before = torch.default_generator.get_state()
        alone = ready(as_replayed(node, walk.apart), walk.record.draws)
        given = {ref: walk.values[ref] for ref in dict.fromkeys(node.refs)}
        own = position in walk.proven
        value = {ref: walk.record.values[ref] for ref in alone.gives} if own else _run(walk, alone, given)
        if isinstance(value, Exception):
            fact = f"raises {type(value).__name__} on the saved values of its parents"
            walk.alone.append(found_at(walk.graph, ALONE, node, fact))
            return
        walk.values.keep(position, value)
        if is_asked:
            is_drawn = node.draws is None and not torch.equal(before, torch.default_generator.get_state())
            _ask(walk, node, alone, given, value, is_drawn)


def _run(walk: Walk, alone: Alone, given: dict[Ref, Any]) -> dict[Ref, Any] | Exception:
    """What a call gives on its parents' values. One that reads the memory around a view gets the view made anew, where
    the saved one is a copy that lies by itself.
    """
    value, saved = _run_on(alone, given), walk.record.values
    if not isinstance(value, Exception) and all(same(value[ref], saved[ref]) for ref in alone.gives if ref in saved):
        return value
    remade = _in_memory(walk, given)
    again = _run_on(alone, remade) if remade is not None else value
    if remade is None or isinstance(again, Exception):
        return value
    given.update(remade)
    return again


def _run_on(alone: Alone, given: dict[Ref, Any]) -> dict[Ref, Any] | Exception:
    try:
        return alone(given)
    except Exception as error:
        return error


def _in_memory(walk: Walk, given: dict[Ref, Any], depth: int = 4) -> dict[Ref, Any] | None:
    """The same values, as views of the memory that they are made from; None where no parent can be made so."""
    found = {ref: made for ref in given if (made := _view(walk, ref, depth)) is not None}
    return {**given, **found} if found else None


def _view(walk: Walk, ref: Ref, depth: int) -> Any:
    node = walk.graph[ref.node]
    if not isinstance(node, Call) or not depth or any(other not in walk.values for other in node.refs):
        return None
    given = {other: walk.values[other] for other in node.refs}
    given = _in_memory(walk, given, depth - 1) or given
    made = _run_on(ready(as_replayed(node, walk.apart), walk.record.draws), given)
    if isinstance(made, Exception) or not isinstance(made[ref], torch.Tensor) or made[ref]._base is None:
        return None
    return made[ref] if same(made[ref], walk.values[ref]) else None


def _ask(walk: Walk, node: Call, alone: Alone, given: dict[Ref, Any], value: dict[Ref, Any], is_drawn: bool) -> None:
    if is_drawn:
        walk.asked[DRAWS] += 1
        fact = "draws random numbers, and no state of the generator is recorded"
        walk.draws.append(found_at(walk.graph, DRAWS, node, fact))
        return
    _ask_alone(walk, node, alone, given, value)
    trial = Trial(alone, given, value, walk.record.draws)
    if node.draws is not None:
        _ask_draws(walk, node, trial)
    _ask_parents(walk, node, trial)


def _ask_alone(walk: Walk, node: Call, alone: Alone, given: dict[Ref, Any], value: dict[Ref, Any]) -> None:
    saved = {ref: walk.record.values[ref] for ref in alone.gives if ref in walk.record.values}
    if not saved:
        walk.specials[ALONE].append(found_at(walk.graph, ALONE, node, "its value was not kept"))
        return
    walk.asked[ALONE] += 1
    wrong = [ref for ref in saved if not same(value[ref], saved[ref])]
    if not wrong:
        return
    if (spread := varies(alone, given, {ref: saved[ref] for ref in wrong})) is not None:
        fact = "its kernel is not deterministic: the saved value lies within what repetitions give"
        walk.specials[ALONE].append(found_at(walk.graph, ALONE, node, fact, difference=spread))
        return
    far = [d for ref in wrong if (d := difference(value[ref], saved[ref])) is not None]
    fact = f"gives another value than the saved one{_other_kind(value[wrong[0]], saved[wrong[0]])}"
    if may_vary(node) and not all(same(one, value[ref]) for ref, one in alone(given).items() if ref in wrong):
        fact += ": the function of the edit there gives something else each time that it is called"
    walk.alone.append(found_at(walk.graph, ALONE, node, fact, difference=max(far, default=None)))


def _other_kind(made: Any, saved: torch.Tensor) -> str:
    if not isinstance(made, torch.Tensor):
        return f": a {type(made).__name__}, no tensor"
    facts = [
        f"{word} {new}, not {old}"
        for word, new, old in (
            ("shape", tuple(made.shape), tuple(saved.shape)),
            ("dtype", made.dtype, saved.dtype),
            ("layout", made.layout, saved.layout),
        )
        if not made.is_nested and new != old
    ]
    return f": {', '.join(facts)}" if facts else ""


def _ask_parents(walk: Walk, node: Call, trial: Trial) -> None:
    for parent in trial.given:
        walk.asked[NONSENSE] += 1
        used = trial if parent in trial.alone.reads else evolve(trial, alone=ready(node, walk.record.draws))
        if (found := unseen(used, parent)) is None:
            continue
        finding = found_at(walk.graph, NONSENSE, node, found.reason or UNREAD, parent=_named(walk.graph, found.parent))
        (walk.specials[NONSENSE] if found.reason else walk.nonsense).append(finding)


def _named(graph: Graph, ref: Ref) -> str:
    node = graph[ref.node]
    return node.address if isinstance(node, State) else identifier(ref.node) + str(ref)[len(identifier(ref.node)) :]


def _ask_draws(walk: Walk, node: Call, trial: Trial) -> None:
    """Another state of the generator gives another value, or it is known why not."""
    walk.asked[DRAWS] += 1
    if not _draws_differ(walk, node, trial):
        walk.specials[DRAWS].append(found_at(walk.graph, DRAWS, node, _why_draws_are_unseen(walk, node, trial)))


def _draws_differ(walk: Walk, node: Call, trial: Trial, seeds: Iterable[int] = range(16)) -> bool:
    made = (evolve(trial, alone=drawing_otherwise(trial.alone.node, walk.record.draws, seed)) for seed in seeds)
    return any(one.changes({}) for one in made)


def _why_draws_are_unseen(walk: Walk, node: Call, trial: Trial) -> str:
    if all(isinstance(made, torch.Tensor) and not made.numel() for made in trial.value.values()):
        return "the value has no elements"
    for ref, value in trial.given.items():
        for made in others_than(value):
            if (moved := trial.moved({ref: made})) is not None and _draws_differ(walk, node, moved, range(4)):
                return "hidden by what it reads"
    for other in otherwise(trial.alone.node):
        moved = evolve(trial, alone=ready(other, walk.record.draws)).moved({})
        if moved is not None and _draws_differ(walk, other, moved, range(4)):
            return "hidden by a number among its arguments"
    return "what it draws does not show in its value"


def laws_of(walk: Walk, left_out: str, total: int) -> tuple[Law, ...]:
    """The three laws that a walk asked."""
    special: Mapping[str, tuple[Finding, ...]] = {name: tuple(found) for name, found in walk.specials.items()}
    spreads = [finding.difference for finding in special[ALONE] if finding.difference is not None]
    varied = f"{len(spreads)} differ between repetitions by at most {max(spreads):.2g}" if spreads else ""
    notes = "; ".join([word for word in (left_out, varied) if word])
    nodes = f"of {total:,} nodes" if left_out else "nodes"
    seen = walk.asked[NONSENSE] - len(walk.nonsense) - len(special[NONSENSE])
    return (
        Law(ALONE, walk.asked[ALONE], tuple(walk.alone), special[ALONE], note=notes, unit=nodes, holds="bit for bit"),
        Law(
            NONSENSE,
            walk.asked[NONSENSE],
            tuple(walk.nonsense),
            special[NONSENSE],
            note=left_out,
            unit="parents",
            holds=f"{seen:,} change the value",
        ),
        Law(DRAWS, walk.asked[DRAWS], tuple(walk.draws), special[DRAWS], unit="draws", holds="come out the same"),
    )
