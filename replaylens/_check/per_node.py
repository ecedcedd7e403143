"""The laws of single calls: each reproduces its value, depends on all that it reads, and has its draws recorded.

In: a program under test. Out: the result of each law in `NODE_LAWS`, all from one walk over the calls. Values that were
not kept are recomputed on the way and freed after their last use, so the walk needs no second copy of the activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from .._edit.lower import may_vary
from .._ir.equality import difference, same
from .._ir.graph import Graph
from .._ir.node import Call, Ref, State, identifier
from .._replay.alias_analysis import NO_REFS, detached_views
from .._replay.interpreter import recorded_environment
from .._replay.record import Record
from .._sweep.batch_runner import progress_bar
from .alike_calls import dependent_calls
from .dependency_test import INDEPENDENT, Trial, undetected, with_other_literals
from .many_operands import moved_operands
from .perturbations import perturbed, shared_nonsense
from .program_under_test import ProgramUnderTest
from .report import Finding, LawResult, finding_at
from .run_node import NodeRunner, WalkValues, as_in_replay, node_runner, spread_of_repetitions, with_other_draw


@define
class Tally:
    """What one law has found so far."""

    asked: int = 0
    failures: list[Finding] = field(factory=list)
    special: list[Finding] = field(factory=list)


@frozen(eq=False)
class NodeRun:
    """One call, run on its own on the saved values of its arguments."""

    record: Record
    node: Call
    is_proved: bool = False  # it reproduced its value, and depends on all that it reads: it was not run again
    is_stale: bool = False  # a value that it reads or returns was overwritten, so it was not run
    error: Exception | None = None  # what the call raised
    draws_unrecorded: bool = False
    moved: frozenset[Ref] = NO_REFS  # of its arguments, those whose numbers are proved to come out of it
    trial: Trial | None = None  # the call, its arguments and its value; None if nothing further can be tried


@frozen(eq=False)
class NodeLaw:
    """A law of single calls. `ask` adds its findings at one call to a tally, which `result` turns into a LawResult.

    To add a law, add an entry to `NODE_LAWS`; nothing else lists them.
    """

    name: str
    sentence: str
    ask: Callable[[NodeRun, Tally], None]
    result: Callable[[Tally, ProgramUnderTest], LawResult]

    def of(self, program: ProgramUnderTest) -> LawResult:
        """The result of this law. The first law that is checked walks the program for all of them."""
        if not program.per_node:
            program.per_node.update(_walk(program))
        return program.per_node[self.name]


def _walk(program: ProgramUnderTest) -> dict[str, LawResult]:
    """Check the chosen calls in order. A call that the whole replay already verified is not run again."""
    walk, chosen = _Walk(program), program.chosen
    tallies = [(law, Tally()) for law in NODE_LAWS]
    with (
        progress_bar(len(chosen), program.progress, "node") as tick,
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # perturbed arguments make calls warn
        proved = dependent_calls(program)
        for position, node in enumerate(program.graph.nodes):
            if isinstance(node, Call) and position in proved:
                run = NodeRun(program.record, node, is_proved=True)
                for law, tally in tallies:
                    law.ask(run, tally)
            elif isinstance(node, Call) and walk.is_needed(position):
                with recorded_environment(True, program.graph):
                    run = walk.run(position, node)
                    is_asked = position in chosen or run.is_stale or run.error is not None
                    for law, tally in tallies if is_asked else ():
                        _ask(law, run, tally)
            walk.values.forget(position)
            if position in chosen:
                tick(1)
    return {law.name: law.result(tally, program) for law, tally in tallies}


def _ask(law: NodeLaw, run: NodeRun, tally: Tally) -> None:
    """Check one law at one call. A function that a file names may return what no capture has, and fail anywhere."""
    try:
        law.ask(run, tally)
    except Exception as error:
        tally.failures.append(finding_at(run.node, f"raises {type(error).__name__} while it is checked"))


class _Walk:
    """Runs the calls of a program one by one, in order."""

    def __init__(self, program: ProgramUnderTest) -> None:
        self.program, self.record, self.graph = program, program.record, program.graph
        self.values = WalkValues(self.record)
        self.nonsense = shared_nonsense(self.record.values.values())
        self.detached = detached_views(self.graph, ())  # by write: the views that an edit took off its storage

    def is_needed(self, position: int) -> bool:
        """True if the call is to be checked, or a value of it was not kept and must be recomputed."""
        return position in self.program.chosen or any(
            ref not in self.record.values for ref in self.graph.gives[position]
        )

    def run(self, position: int, node: Call) -> NodeRun:
        """Run a call on its parents' values, unless it is verified already."""
        try:
            return self._run(position, node)
        except Exception as error:
            return NodeRun(self.record, node, error=error)

    def _run(self, position: int, node: Call) -> NodeRun:
        if any(ref in self.program.stale for ref in (*self.graph.refs[position], *self.graph.gives[position])):
            return NodeRun(self.record, node, is_stale=True)
        before = torch.default_generator.get_state()
        runner = node_runner(as_in_replay(node, self.detached), self.record.draws)
        given = {ref: self.values[ref] for ref in dict.fromkeys(node.refs)}
        is_verified = position in self.program.verified
        value = {ref: self.record.values[ref] for ref in runner.gives} if is_verified else self._value(runner, given)
        if isinstance(value, Exception):
            return NodeRun(self.record, node, error=value)
        self.values.keep(position, value)
        if node.draws is None and not torch.equal(before, torch.default_generator.get_state()):
            return NodeRun(self.record, node, draws_unrecorded=True)
        trial = Trial(runner, given, value, self.record.draws)
        moved = moved_operands(trial) if len(given) >= self.program.many_operands else NO_REFS
        return NodeRun(self.record, node, moved=moved, trial=trial)

    def _value(self, runner: NodeRunner, given: dict[Ref, Any]) -> dict[Ref, Any] | Exception:
        """The value of a call on its parents' values, or what it raised.

        A saved view is a copy without the storage around it. A call that looks beyond its argument (`as_strided`)
        therefore gives another value on it, and is tried again on views that are remade from their bases.
        """
        value, saved = _value_or_error(runner, given), self.record.values
        if not isinstance(value, Exception) and all(
            same(value[ref], saved[ref]) for ref in runner.gives if ref in saved
        ):
            return value
        remade = self._remade_views(given)
        again = _value_or_error(runner, remade) if remade is not None else value
        if remade is None or isinstance(again, Exception):
            return value
        given.update(remade)
        return again

    def _remade_views(self, given: dict[Ref, Any], depth: int = 4) -> dict[Ref, Any] | None:
        """The same values, as views of their bases where that is possible; None if it is possible for none."""
        remade = {ref: made for ref in given if (made := self._remade_view(ref, depth)) is not None}
        return {**given, **remade} if remade else None

    def _remade_view(self, ref: Ref, depth: int) -> Any:
        node = self.graph[ref.node]
        if not isinstance(node, Call) or not depth or any(other not in self.values for other in node.refs):
            return None
        given = {other: self.values[other] for other in node.refs}
        given = self._remade_views(given, depth - 1) or given
        made = _value_or_error(node_runner(as_in_replay(node, self.detached), self.record.draws), given)
        if isinstance(made, Exception) or not isinstance(made[ref], torch.Tensor) or made[ref]._base is None:
            return None
        return made[ref] if same(made[ref], self.values[ref]) else None


def _value_or_error(runner: NodeRunner, given: Mapping[Ref, Any]) -> dict[Ref, Any] | Exception:
    try:
        return runner(given)
    except Exception as error:
        return error


def _ask_alone(run: NodeRun, tally: Tally) -> None:
    """Check that the call reproduces its own saved value."""
    node, trial = run.node, run.trial
    if run.is_stale:
        tally.special.append(finding_at(node, "a value that it reads or gives was overwritten since"))
    elif run.error is not None:
        tally.failures.append(finding_at(node, f"raises {type(run.error).__name__} on the saved values of its parents"))
    elif run.is_proved:
        tally.asked += 1
    elif trial is not None:
        saved = {ref: run.record.values[ref] for ref in trial.runner.gives if ref in run.record.values}
        if not saved:
            tally.special.append(finding_at(node, "its value was not kept"))
            return
        tally.asked += 1
        if wrong := {ref: value for ref, value in saved.items() if not same(trial.value[ref], value)}:
            _record_mismatch(node, trial, wrong, tally)


def _record_mismatch(node: Call, trial: Trial, saved: Mapping[Ref, torch.Tensor], tally: Tally) -> None:
    """Record a call that does not reproduce these saved values: a failure, unless its kernel is nondeterministic."""
    if (spread := spread_of_repetitions(trial.runner, trial.given, saved)) is not None:
        fact = "its kernel is nondeterministic: the saved value lies within the spread of repetitions"
        tally.special.append(finding_at(node, fact, difference=spread))
        return
    first, value = next(iter(saved)), trial.value
    fact = f"gives another value than the saved one{_spec_difference(value[first], saved[first])}"
    if may_vary(node) and not all(
        same(one, value[ref]) for ref, one in trial.runner(trial.given).items() if ref in saved
    ):
        fact += ": the function of the edit there gives something else each time that it is called"
    made = {ref: value[ref] for ref in saved if isinstance(value[ref], torch.Tensor)}
    far = [d for ref, one in made.items() if (d := difference(one, saved[ref])) is not None]
    tally.failures.append(finding_at(node, fact, difference=max(far, default=None)))


def _spec_difference(made: Any, saved: torch.Tensor) -> str:
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


def _alone_result(tally: Tally, program: ProgramUnderTest) -> LawResult:
    spreads = [finding.difference for finding in tally.special if finding.difference is not None]
    varied = f"{len(spreads)} differ between repetitions by at most {max(spreads):.2g}" if spreads else ""
    note = "; ".join([word for word in (_left_out(program), varied) if word])
    unit = f"of {len(program.graph.calls):,} nodes" if _left_out(program) else "nodes"
    return _result(tally, note=note, unit=unit, holds="bit for bit")


def _left_out(program: ProgramUnderTest) -> str:
    chosen, calls = len(program.chosen), len(program.graph.calls)
    return f"a sample of {chosen:,} of {calls:,} nodes" if chosen < calls else ""


def _result(tally: Tally, **words: str) -> LawResult:
    return LawResult(tally.asked, tuple(tally.failures), tuple(tally.special), **words)


def _ask_parents(run: NodeRun, tally: Tally) -> None:
    """Check that the value of the call depends on everything that it reads."""
    if run.is_proved:
        tally.asked += len({*run.node.refs})
    if run.trial is None:
        return
    for parent in run.trial.given:
        tally.asked += 1
        if parent in run.moved:
            continue
        is_read = parent in run.trial.runner.reads
        trial = run.trial if is_read else evolve(run.trial, runner=node_runner(run.node, run.record.draws))
        if (why := undetected(trial, parent)) is not None:
            name = _name_of(run.record.graph, parent)
            (tally.special if why.reason else tally.failures).append(
                finding_at(run.node, why.reason or INDEPENDENT, parent=name)
            )


def _name_of(graph: Graph, ref: Ref) -> str:
    node = graph[ref.node]
    return node.address if isinstance(node, State) else identifier(ref.node) + str(ref)[len(identifier(ref.node)) :]


def _parents_result(tally: Tally, program: ProgramUnderTest) -> LawResult:
    seen = tally.asked - len(tally.failures) - len(tally.special)
    return _result(tally, note=_left_out(program), unit="parents", holds=f"{seen:,} change the value")


def _ask_draws(run: NodeRun, tally: Tally) -> None:
    """Check that draws have a recorded generator state, and that another state gives another value."""
    if run.draws_unrecorded:
        tally.asked += 1
        tally.failures.append(finding_at(run.node, "draws random numbers, and no state of the generator is recorded"))
    elif run.trial is not None and run.node.draws is not None:
        tally.asked += 1
        if not _draws_differ(run.trial, range(16)):
            tally.special.append(finding_at(run.node, _why_draws_are_unseen(run.trial)))


def _draws_differ(trial: Trial, seeds: Iterable[int] = range(4)) -> bool:
    made = (evolve(trial, runner=with_other_draw(trial.runner.node, trial.draws, seed)) for seed in seeds)
    return any(one.changes({}) for one in made)


def _why_draws_are_unseen(trial: Trial) -> str:
    if all(isinstance(made, torch.Tensor) and not made.numel() for made in trial.value.values()):
        return "the value has no elements"
    for ref, value in trial.given.items():
        for made in perturbed(value):
            if (moved := trial.moved({ref: made})) is not None and _draws_differ(moved):
                return "hidden by what it reads"
    for other in with_other_literals(trial.runner.node):
        moved = evolve(trial, runner=node_runner(other, trial.draws)).moved({})
        if moved is not None and _draws_differ(moved):
            return "hidden by a number among its arguments"
    return "its value does not depend on what it draws"


def _draws_result(tally: Tally, program: ProgramUnderTest) -> LawResult:
    return _result(tally, unit="draws", holds="come out the same")


NODE_LAWS: tuple[NodeLaw, ...] = (
    NodeLaw(
        "each node alone",
        "every call, run by itself on the saved values of its arguments, reproduces its own saved value",
        _ask_alone,
        _alone_result,
    ),
    NodeLaw(
        "nonsense parents",
        "replacing any one value that a call reads (parameters included) with nonsense changes the result",
        _ask_parents,
        _parents_result,
    ),
    NodeLaw(
        "draws",
        "a call that draws random numbers gives another value under another generator state; no call draws without a "
        "recorded state",
        _ask_draws,
        _draws_result,
    ),
)
