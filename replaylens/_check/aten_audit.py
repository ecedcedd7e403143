"""Did everything that the model computed become part of the program?

In: a captured model. Out: a LawResult. The ATen calls of a plain forward and of a whole replay are counted, each
reduced to what it computes (see aten_calls.py). The counts must be equal, but for what is accounted for: what purity
adds, what a gradient runs again, what content that left torch is compared with. A plain call that no replayed one
answers was missed by the program; a replayed one that no plain call answers is the program's own invention. The tables
are data. Nothing here looks at the capture's own way of seeing calls: the dispatcher tells of each one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from attrs import evolve, frozen

from .._core.graph import Graph
from .._core.node import Call, Guard, Node
from .._core.ops import Quirk, info
from .._core.runtime import blank, fill_new, filled, resized
from .._core.text import line
from .._core.tolerances import FUSED_LAYER
from .._core.write import mutate
from .._replay.interpreter import Code
from .._replay.record import Record
from .._replay.replay import execute
from .._replay.request import Request
from .aten_calls import AtenCall, OpClass, OpSignature, Watch
from .model_under_test import ModelUnderTest, open_layers
from .output_comparison import furthest
from .report import Finding, LawResult


def audit(subject: ModelUnderTest) -> LawResult:
    """The calls of a plain forward against those of a whole replay."""
    plain, output = plain_calls(subject)
    fused = _fused(subject, plain, output)
    decided: frozenset[OpSignature] = frozenset()
    with open_layers() if fused else nullcontext():
        if fused:
            closed, (plain, _) = plain, plain_calls(subject)
            decided = frozenset(seen.signature for seen in closed) - {seen.signature for seen in plain}
        account, note = _settled(subject, plain, decided)
    close = not any(_is_far(found.difference) for found in fused)
    return LawResult(
        asked=account.asked,
        failures=(*account.leftover, *(() if close else fused)),
        special=fused if close else (),
        note="; ".join([words for words in (note, account.words) if words]),
        unit="ATen calls",
        holds="each is in the program",
    )


def _settled(subject: ModelUnderTest, plain: list[AtenCall], decided: frozenset[OpSignature]) -> tuple[Comparison, str]:
    """A second look where something is left over: not all of it is the capture's doing.

    A first forward may fill a cache that lies outside of the model: then it makes other calls than a later one, for
    what does not depend on the inputs, and a second capture agrees. Some models do not do the same twice. `decided`:
    calls by which torch finds out whether a fused kernel will do; they are left out.
    """
    replayed = [seen for seen in replayed_calls(subject.record) if seen.signature not in decided]
    account = comparison_of(plain, replayed, subject.record.graph.guards)
    if not (account.missing or account.extra):
        return account, ""
    second = subject.again()
    plain, later = plain_calls(second)[0], [s for s in replayed_calls(second.record) if s.signature not in decided]
    again = comparison_of(plain, later, second.record.graph.guards)
    cold = account.extra <= _apart_from_inputs(replayed, subject.record.graph)
    if cold and not again.leftover and account.missing <= _apart_from_inputs(later, second.record.graph):
        return again, "of a second capture: the first one filled a cache that lies outside of the model"
    unsteady = comparison_of(plain, plain_calls(second)[0])
    if {*account.missing, *account.extra} <= {*unsteady.missing, *unsteady.extra}:
        return evolve(account, leftover=()), "the model's own plain forwards do not make the same calls each time"
    return account, ""


def _apart_from_inputs(replayed: list[AtenCall], graph: Graph) -> Counter[OpSignature]:
    """The calls of nodes that no input reaches."""
    reached = graph.descendants([node.name for node in graph.input_nodes])
    return Counter(s.signature for s in replayed if isinstance(s.step, Call) and s.step.name not in reached)


def plain_calls(subject: ModelUnderTest) -> tuple[list[AtenCall], Any]:
    """The calls of a plain forward, and its output."""
    watch = Watch(ModelUnderTest.forward.__code__)
    output = subject.forward(watch)
    return watch.seen, output


def replayed_calls(record: Record) -> list[AtenCall]:
    """The calls of a whole replay, each with the step that made it."""
    watch = Watch(_at.__code__)
    with watch:
        execute(record, Request(whole=True, on_divergence="ignore"), partial(_told, watch, record.graph))
    return watch.seen


def _told(watch: Watch, graph: Graph, code: Code) -> Code:
    """The same code, of which each step tells the watch for which node or guard it runs."""
    guards = iter(sorted(graph.guards, key=lambda guard: guard.position))

    def step(slot: int) -> Node | Guard:
        return graph.nodes[slot] if slot < len(graph) else next(guards)

    return code.wrapped(lambda slot, call: partial(_at, watch, step(slot), call))


def _at(watch: Watch, step: Node | Guard, call: Any, *args: Any) -> Any:
    watch.step = step
    return call(*args)


def _fused(subject: ModelUnderTest, plain: list[AtenCall], output: Any) -> tuple[Finding, ...]:
    """Layers that a plain forward runs as one kernel, and how far that is from what was recorded."""
    calls = [seen for seen in plain if info(seen.signature.name).has(Quirk.WHOLE_LAYER)]
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
    return tuple([Finding(seen.signature.name, fact, seen.source, difference=apart) for seen in calls])


def _is_far(apart: float | None) -> bool:
    return apart is None or apart > FUSED_LAYER.absolute


COUNTED = frozenset((OpClass.COMPUTE, OpClass.CAST, OpClass.FILL, OpClass.READ))
# What purity may add, by the function of the node: a sort of calls that a plain forward need not have, and why.
ADDED: dict[Any, tuple[OpClass, str]] = {
    blank: (OpClass.FILL, "fills of memory that was undefined"),
    filled: (OpClass.FILL, "fills of memory that was undefined"),
    resized: (OpClass.FILL, "fills of memory that was undefined"),
    fill_new: (OpClass.FILL, "fills of memory that was undefined"),
    mutate: (OpClass.READ, "reads of indices for views that are derived again"),
}
META = "calls for tensors without content"
AGAIN = "calls that a gradient's stretch runs again"
CASTS = "casts that autocast's cache spared the plain forward"


@frozen
class Comparison:
    """What came of two counts."""

    asked: int
    leftover: tuple[Finding, ...]
    missing: Counter[OpSignature]
    extra: Counter[OpSignature]
    added: Counter[str]

    @property
    def words(self) -> str:
        """What the replay has more, and why."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self.added.most_common())
        return f"and a replay adds {counts}" if counts else ""


def comparison_of(plain: list[AtenCall], replayed: list[AtenCall], guards: tuple[Guard, ...] = ()) -> Comparison:
    """Plain calls against replayed ones."""
    opened = any("storage" in g.target.short and info(g.target).has(Quirk.EXPOSES_MEMORY) for g in guards)
    wanted = [
        s for s in plain if s.signature.sort in COUNTED and not s.within and not (opened and _is_of_bytes(s.signature))
    ]
    given = [seen for seen in replayed if seen.signature.sort in COUNTED and not seen.within and not _is_watched(seen)]
    mine, theirs = (Counter(seen.signature for seen in calls) for calls in (given, wanted))
    again = _run_again(given)
    extra = mine - again - theirs
    added = Counter({AGAIN: again.total()})
    of_gradients = _gradients_of_gradients(given)
    for seen in given:
        if (reason := _reason(seen, of_gradients)) and extra[seen.signature] > 0:
            extra[seen.signature] -= 1
            added[reason] += 1
    missing, extra = (theirs - (mine - again)) | _forward_alone(wanted, given), +extra
    leftover = (
        *_findings(missing, wanted, given, "was missed: a plain forward makes {0} of these calls, a replay {1}"),
        *_findings(extra, given, wanted, "is too much: a replay makes {0} of these calls, a plain forward {1}"),
        *_in_other_modes(wanted, given),
    )
    return Comparison(theirs.total(), leftover, missing, extra, +added)


def _is_of_bytes(signature: OpSignature) -> bool:
    """Does it fill memory as bytes, as a storage's own `fill_` does? What the model got from there is guarded."""
    return signature.sort is OpClass.FILL and signature.operands[0].startswith("uint8[")


def _is_watched(seen: AtenCall) -> bool:
    """Does a replay only compare what left torch there with what was recorded?"""
    return isinstance(seen.step, Guard) and seen.step.compares_content


def _forward_alone(wanted: list[AtenCall], given: list[AtenCall]) -> Counter[OpSignature]:
    """What is missed if the calls that gradients make are left out: a stretch that runs again hides none of them."""
    forward = Counter(seen.signature for seen in wanted if not seen.in_gradient)
    nodes = Counter(s.signature for s in given if not (isinstance(s.step, Call) and s.step.through))
    return forward - nodes


def _run_again(given: list[AtenCall]) -> Counter[OpSignature]:
    """The calls of nodes that take a gradient by running a stretch of the program again."""
    at: defaultdict[str, Counter[OpSignature]] = defaultdict(Counter)
    gradients: dict[str, Call] = {}
    for seen in given:
        if isinstance(seen.step, Call):
            at[seen.step.name][seen.signature] += 1
            if seen.step.through:
                gradients[seen.step.name] = seen.step
    found: Counter[OpSignature] = Counter()
    for name, call in gradients.items():
        stretch = sum((at[inner] for inner in call.through), Counter())
        found += at[name] & stretch
    return found


def _gradients_of_gradients(given: list[AtenCall]) -> set[str]:
    """The nodes that take a gradient through another one: that runs its own stretch beside theirs, and is
    differentiated with it, so that steps of the backward come twice as well.
    """
    through = {seen.step.name: seen.step.through for seen in given if isinstance(seen.step, Call) and seen.step.through}
    return {name for name, inner in through.items() if not through.keys().isdisjoint(inner)}


def _reason(seen: AtenCall, of_gradients: set[str]) -> str:
    """Why a replay may make this call where a plain forward does not; nothing if it may not."""
    if not isinstance(seen.step, Call):
        return ""
    if seen.step.name in of_gradients:
        return AGAIN
    if seen.step.meaning and all(meaning.device == "meta" for meaning in seen.step.meaning):
        return META
    sort, reason = ADDED.get(seen.step.target.function, (None, ""))
    if seen.signature.sort is sort:
        return reason
    return CASTS if seen.signature.sort is OpClass.CAST and seen.step.context.autocast else ""


def _in_other_modes(wanted: list[AtenCall], given: list[AtenCall]) -> Iterator[Finding]:
    """Calls that are as many on both sides, but with gradients on where the other has them off. Guards and gradients
    have modes of their own.
    """
    mine = [seen for seen in given if isinstance(seen.step, Call) and not seen.step.through]
    theirs = [seen for seen in wanted if not seen.in_gradient]
    here, there = (Counter(seen.signature for seen in calls) for calls in (mine, theirs))
    on_here, on_there = (Counter(seen.signature for seen in calls if seen.builds) for calls in (mine, theirs))
    free = {seen.signature for seen in (*mine, *theirs) if seen.builds is None}
    for signature in here:
        is_asked = signature.sort is OpClass.COMPUTE and signature not in free and here[signature] == there[signature]
        if is_asked and on_here[signature] != on_there[signature]:
            on = f"{on_here[signature]} of these calls in a replay, in {on_there[signature]} in a plain forward"
            node = _first_otherwise(
                [s for s in mine if s.signature == signature], [s for s in theirs if s.signature == signature]
            )
            yield Finding(node.name, f"`{signature}`: gradients are on in {on}", node.source, line=line(node))


def _first_otherwise(mine: list[AtenCall], theirs: list[AtenCall]) -> Call:
    """The node of the first call that is in other modes than its like; both come in the order in which they ran."""
    pairs = zip(mine, theirs, strict=True)
    found: Any = next(one.step for one, other in pairs if one.builds is not other.builds)
    return found


def _findings(
    left: Counter[OpSignature], those: list[AtenCall], others: list[AtenCall], fact: str
) -> Iterator[Finding]:
    """What is left over, each with the lines from which one side called it oftener than the other."""
    for signature in left:
        mine, theirs = ([seen for seen in calls if seen.signature == signature] for calls in (those, others))
        lines = Counter(seen.source for seen in mine)
        surplus = lines - Counter(seen.source for seen in theirs) or lines
        words = f"`{signature}` {fact.format(len(mine), len(theirs))}"
        for source in surplus:
            step = next(seen.step for seen in mine if seen.source == source)
            node = step if isinstance(step, Call) else None
            yield Finding(node.name if node else "", words, source, line=line(node) if node is not None else "")
