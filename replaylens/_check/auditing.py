"""Did everything that the model computed become part of the program?

In: a captured model. Out: a Law. The ATen calls of a plain forward and of a whole replay are counted, each reduced to
what it computes (see aten.py). The counts must be equal, but for what is accounted for: what purity adds, what a
gradient runs again, what content that left torch is compared with (see accounts.py). Nothing here looks at the
capture's own way of seeing calls: the dispatcher tells of each one.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

from attrs import evolve

from .._core.graph import Graph
from .._core.node import Call, Guard, Node
from .._core.ops import Quirk, info
from .._replay.interpreter import Code
from .._replay.replay import Record, execute
from .._replay.request import Request
from .accounts import NAME, Account, account_of
from .aten import Kernel
from .outputs import furthest
from .report import Finding, Law
from .subject import Subject, open_layers
from .watch import Seen, Watch

MOST_FUSED = 1e-3  # how far an open layer's output may be from the fused one's


def audit(subject: Subject) -> Law:
    """The calls of a plain forward against those of a whole replay."""
    plain, output = plain_calls(subject)
    fused = _fused(subject, plain, output)
    decided: frozenset[Kernel] = frozenset()
    with open_layers() if fused else nullcontext():
        if fused:
            closed, (plain, _) = plain, plain_calls(subject)
            decided = frozenset(seen.kernel for seen in closed) - {seen.kernel for seen in plain}
        account, note = _settled(subject, plain, decided)
    close = not any(_is_far(found.difference) for found in fused)
    return Law(
        NAME,
        asked=account.asked,
        failures=(*account.leftover, *(() if close else fused)),
        special=fused if close else (),
        note="; ".join([words for words in (note, account.words) if words]),
        unit="ATen calls",
        holds="each is in the program",
    )


def _settled(subject: Subject, plain: list[Seen], decided: frozenset[Kernel]) -> tuple[Account, str]:
    """A second look where something is left over: not all of it is the capture's doing.

    A first forward may fill a cache that lies outside of the model: then it makes other calls than a later one, for
    what does not depend on the inputs, and a second capture agrees. Some models do not do the same twice. `decided`:
    calls by which torch finds out whether a fused kernel will do; they are left out.
    """
    replayed = [seen for seen in replayed_calls(subject.record) if seen.kernel not in decided]
    account = account_of(plain, replayed, subject.record.graph.guards)
    if not (account.missing or account.extra):
        return account, ""
    second = subject.again()
    plain, later = plain_calls(second)[0], [s for s in replayed_calls(second.record) if s.kernel not in decided]
    again = account_of(plain, later, second.record.graph.guards)
    cold = account.extra <= _apart_from_inputs(replayed, subject.record.graph)
    if cold and not again.leftover and account.missing <= _apart_from_inputs(later, second.record.graph):
        return again, "of a second capture: the first one filled a cache that lies outside of the model"
    unsteady = account_of(plain, plain_calls(second)[0])
    if {*account.missing, *account.extra} <= {*unsteady.missing, *unsteady.extra}:
        return evolve(account, leftover=()), "the model's own plain forwards do not make the same calls each time"
    return account, ""


def _apart_from_inputs(replayed: list[Seen], graph: Graph) -> Counter[Kernel]:
    """The calls of nodes that no input reaches."""
    reached = graph.descendants([node.name for node in graph.input_nodes])
    return Counter(s.kernel for s in replayed if isinstance(s.step, Call) and s.step.name not in reached)


def plain_calls(subject: Subject) -> tuple[list[Seen], Any]:
    """The calls of a plain forward, and its output."""
    watch = Watch(Subject.forward.__code__)
    output = subject.forward(watch)
    return watch.seen, output


def replayed_calls(record: Record) -> list[Seen]:
    """The calls of a whole replay, each with the step that made it."""
    watch = Watch(_at.__code__)
    with watch:
        execute(record, Request(whole=True, on_divergence="ignore"), partial(_told, watch, record.graph))
    return watch.seen


def _told(watch: Watch, graph: Graph, code: Code) -> Code:
    """The same code, of which each step tells the watch for which node or guard it runs."""
    guards = iter(sorted(graph.guards, key=lambda guard: guard.position))

    def row(read: Any, call: Any, slot: int, *rest: Any) -> Any:
        step = graph.nodes[slot] if slot < len(graph) else next(guards)
        return read, partial(_at, watch, step, call), slot, *rest

    told = [evolve(stretch, rows=tuple([row(*one) for one in stretch.rows])) for stretch in code.stretches]
    return evolve(code, stretches=tuple(told))


def _at(watch: Watch, step: Node | Guard, call: Any, *args: Any) -> Any:
    watch.step = step
    return call(*args)


def _fused(subject: Subject, plain: list[Seen], output: Any) -> tuple[Finding, ...]:
    """Layers that a plain forward runs as one kernel, and how far that is from what was recorded."""
    calls = [seen for seen in plain if info(seen.kernel.name).has(Quirk.WHOLE_LAYER)]
    if not calls:
        return ()
    recorded = subject.record.graph.output, subject.record.value
    apart = furthest(output, *recorded)
    fact = "a plain forward runs it as one fused kernel, the program has it open"
    if _is_far(apart) and not _is_far(inside := furthest(output, *recorded, but_zeros=True)):
        apart = inside
        fact = (
            "a plain forward runs it as one fused kernel, which leaves zeros where tokens are padding; the program has "
            "it open, and other numbers there"
        )
    return tuple([Finding(NAME, seen.kernel.name, fact, seen.source, difference=apart) for seen in calls])


def _is_far(apart: float | None) -> bool:
    return apart is None or apart > MOST_FUSED
