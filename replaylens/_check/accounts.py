"""Two lists of ATen calls, of a plain forward and of a replay, and what is left when all that is known is taken away.

In: the calls; those of the replay with their nodes. Out: an Account. A plain call that no replayed one answers was
missed by the program; a replayed one that no plain call answers is the program's own invention.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from .._core.node import Call, Guard
from .._core.ops import Quirk, info
from .._core.pure import blank, fill_new, filled, mutate, resized
from .._core.text import line
from .aten import Kernel, Sort
from .report import Finding
from .watch import Seen

NAME = "completeness"
COUNTED = frozenset((Sort.COMPUTE, Sort.CAST, Sort.FILL, Sort.READ))
# What purity may add, by the function of the node: a sort of calls that a plain forward need not have, and why.
ADDED: dict[Any, tuple[Sort, str]] = {
    blank: (Sort.FILL, "fills of memory that was undefined"),
    filled: (Sort.FILL, "fills of memory that was undefined"),
    resized: (Sort.FILL, "fills of memory that was undefined"),
    fill_new: (Sort.FILL, "fills of memory that was undefined"),
    mutate: (Sort.READ, "reads of indices for views that are derived again"),
}
META = "calls for tensors without content"
AGAIN = "calls that a gradient's stretch runs again"
CASTS = "casts that autocast's cache spared the plain forward"


@frozen
class Account:
    """What came of two counts."""

    asked: int
    leftover: tuple[Finding, ...]
    missing: Counter[Kernel]
    extra: Counter[Kernel]
    added: Counter[str]

    @property
    def words(self) -> str:
        """What the replay has more, and why."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self.added.most_common())
        return f"and a replay adds {counts}" if counts else ""


def account_of(plain: list[Seen], replayed: list[Seen], guards: tuple[Guard, ...] = ()) -> Account:
    """Plain calls against replayed ones."""
    opened = any("storage" in g.target.short and info(g.target).has(Quirk.EXPOSES_MEMORY) for g in guards)
    wanted = [s for s in plain if s.kernel.sort in COUNTED and not s.within and not (opened and _is_of_bytes(s.kernel))]
    given = [seen for seen in replayed if seen.kernel.sort in COUNTED and not seen.within and not _is_watched(seen)]
    mine, theirs = (Counter(seen.kernel for seen in calls) for calls in (given, wanted))
    again = _run_again(given)
    extra = mine - again - theirs
    added = Counter({AGAIN: again.total()})
    of_gradients = _gradients_of_gradients(given)
    for seen in given:
        if (reason := _reason(seen, of_gradients)) and extra[seen.kernel] > 0:
            extra[seen.kernel] -= 1
            added[reason] += 1
    missing, extra = (theirs - (mine - again)) | _forward_alone(wanted, given), +extra
    leftover = (
        *_findings(missing, wanted, given, "was missed: a plain forward makes {0} of these calls, a replay {1}"),
        *_findings(extra, given, wanted, "is too much: a replay makes {0} of these calls, a plain forward {1}"),
        *_in_other_modes(wanted, given),
    )
    return Account(theirs.total(), leftover, missing, extra, +added)


def _is_of_bytes(kernel: Kernel) -> bool:
    """Does it fill memory as bytes, as a storage's own `fill_` does? What the model got from there is guarded."""
    return kernel.sort is Sort.FILL and kernel.operands[0].startswith("uint8[")


def _is_watched(seen: Seen) -> bool:
    """Does a replay only compare what left torch there with what was recorded?"""
    return isinstance(seen.step, Guard) and seen.step.compares_content


def _forward_alone(wanted: list[Seen], given: list[Seen]) -> Counter[Kernel]:
    """What is missed if the calls that gradients make are left out: a stretch that runs again hides none of them."""
    forward = Counter(seen.kernel for seen in wanted if not seen.in_gradient)
    nodes = Counter(s.kernel for s in given if not (isinstance(s.step, Call) and s.step.through))
    return forward - nodes


def _run_again(given: list[Seen]) -> Counter[Kernel]:
    """The calls of nodes that take a gradient by running a stretch of the program again."""
    at: defaultdict[str, Counter[Kernel]] = defaultdict(Counter)
    gradients: dict[str, Call] = {}
    for seen in given:
        if isinstance(seen.step, Call):
            at[seen.step.name][seen.kernel] += 1
            if seen.step.through:
                gradients[seen.step.name] = seen.step
    found: Counter[Kernel] = Counter()
    for name, call in gradients.items():
        stretch = sum((at[inner] for inner in call.through), Counter())
        found += at[name] & stretch
    return found


def _gradients_of_gradients(given: list[Seen]) -> set[str]:
    """The nodes that take a gradient through another one: that runs its own stretch beside theirs, and is
    differentiated with it, so that steps of the backward come twice as well.
    """
    through = {seen.step.name: seen.step.through for seen in given if isinstance(seen.step, Call) and seen.step.through}
    return {name for name, inner in through.items() if not through.keys().isdisjoint(inner)}


def _reason(seen: Seen, of_gradients: set[str]) -> str:
    """Why a replay may make this call where a plain forward does not; nothing if it may not."""
    if not isinstance(seen.step, Call):
        return ""
    if seen.step.name in of_gradients:
        return AGAIN
    if seen.step.meaning and all(meaning.device == "meta" for meaning in seen.step.meaning):
        return META
    sort, reason = ADDED.get(seen.step.target.function, (None, ""))
    if seen.kernel.sort is sort:
        return reason
    return CASTS if seen.kernel.sort is Sort.CAST and seen.step.context.autocast else ""


def _in_other_modes(wanted: list[Seen], given: list[Seen]) -> Iterator[Finding]:
    """Calls that are as many on both sides, but with gradients on where the other has them off. Guards and gradients
    have modes of their own.
    """
    mine = [seen for seen in given if isinstance(seen.step, Call) and not seen.step.through]
    theirs = [seen for seen in wanted if not seen.in_gradient]
    here, there = (Counter(seen.kernel for seen in calls) for calls in (mine, theirs))
    on_here, on_there = (Counter(seen.kernel for seen in calls if seen.builds) for calls in (mine, theirs))
    free = {seen.kernel for seen in (*mine, *theirs) if seen.builds is None}
    for kernel in here:
        is_asked = kernel.sort is Sort.COMPUTE and kernel not in free and here[kernel] == there[kernel]
        if is_asked and on_here[kernel] != on_there[kernel]:
            on = f"{on_here[kernel]} of these calls in a replay, in {on_there[kernel]} in a plain forward"
            node = _first_otherwise([s for s in mine if s.kernel == kernel], [s for s in theirs if s.kernel == kernel])
            yield Finding(NAME, node.name, f"`{kernel}`: gradients are on in {on}", node.source, line=line(node))


def _first_otherwise(mine: list[Seen], theirs: list[Seen]) -> Call:
    """The node of the first call that is in other modes than its like; both come in the order in which they ran."""
    pairs = zip(mine, theirs, strict=True)
    found: Any = next(one.step for one, other in pairs if one.builds is not other.builds)
    return found


def _findings(left: Counter[Kernel], those: list[Seen], others: list[Seen], fact: str) -> Iterator[Finding]:
    """What is left over, each with the lines from which one side called it oftener than the other."""
    for kernel in left:
        mine, theirs = ([seen for seen in calls if seen.kernel == kernel] for calls in (those, others))
        lines = Counter(seen.source for seen in mine)
        surplus = lines - Counter(seen.source for seen in theirs) or lines
        words = f"`{kernel}` {fact.format(len(mine), len(theirs))}"
        for source in surplus:
            step = next(seen.step for seen in mine if seen.source == source)
            node = step if isinstance(step, Call) else None
            yield Finding(NAME, node.name if node else "", words, source, line=line(node) if node is not None else "")
