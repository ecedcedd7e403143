"""CheckReport: the result of a check, law by law.

In: the result of each law. Out: a report that is truthy if every law holds, prints as a short table, and is plain data.
This module does not know how a law is checked.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from attrs import evolve, frozen

from .._ir.graph import Graph
from .._ir.node import Node, Source
from .._ir.printer import node_line as line_of
from .._ir.util import optional


@frozen
class Finding:
    """One violation of a law; or, in `LawResult.special`, one case that could not be decided, and why."""

    node: str  # "" if it concerns no single node
    fact: str
    source: Source | None = None
    parent: str = ""  # the value that was replaced, if one was
    difference: float | None = None  # the largest absolute difference, if numbers differ
    line: str = ""  # the node as a line of the program
    is_stale: bool = False  # overwritten or replaced since the capture, so not a fault of the program
    law: str = ""  # filled in by `LawResult.of`

    def __str__(self) -> str:
        far = f" (by at most {self.difference:.3g})" if self.difference is not None else ""
        rows = [f"{self.node or 'the program'}: {self.fact}{far}", f"    {self.line}" if self.line else ""]
        return "\n".join([row for row in (*rows, self.source.indented if self.source else "") if row])


def finding_at_name(graph: Graph, name: str, fact: str, **more: Any) -> Finding:
    """A finding at the node of this name, with its line of the program; at the bare name if there is no such node."""
    return finding_at(graph[name], fact, **more) if name in graph else Finding(name, fact, **more)


def finding_at(node: Node, fact: str, **more: Any) -> Finding:
    """A finding at a node, with its line of the program and its line of the user's code."""
    text = line_of(node)
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return Finding(node.name, fact, getattr(node, "source", None), line=short, **more)


_LONGEST = 160


@frozen
class LawResult:
    """The outcome of one law. `asked` counts the cases that were checked, in units of `unit`."""

    asked: int = 0
    failures: tuple[Finding, ...] = ()
    special: tuple[Finding, ...] = ()
    skipped: str = ""
    note: str = ""
    unit: str = ""
    holds: str = "holds"  # shown if nothing failed
    name: str = ""  # filled in by `of`

    def __bool__(self) -> bool:
        return not self.failures

    def of(self, name: str) -> LawResult:
        """The same result, labelled with the name of its law."""
        failures, special = (tuple([evolve(one, law=name) for one in some]) for some in (self.failures, self.special))
        return evolve(self, name=name, failures=failures, special=special)

    @property
    def stale(self) -> tuple[Finding, ...]:
        """The values that were overwritten or replaced since they were recorded."""
        return tuple([finding for finding in self.failures if finding.is_stale])

    @property
    def breaches(self) -> int:
        """The number of violations, stale values not counted."""
        return len(self.failures) - len(self.stale)

    @property
    def reasons(self) -> dict[str, int]:
        """The reasons of the undecided cases with their counts, most common first."""
        return dict(Counter(finding.fact for finding in self.special).most_common())

    @property
    def result(self) -> str:
        """The outcome in a few words."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        words = [f"STALE: {len(self.stale)}" if self.stale else "" if self.failures else self.holds]
        words.append(f"BROKEN {self.breaches} times" if self.breaches else "")
        if self.special:
            words.append(f"{len(self.special)} special ({_counted(self.reasons)})")
        return "; ".join([word for word in (*words, self.note) if word])


@frozen(repr=False)
class CheckReport:
    """The result of a check. Truthy if no law is broken and nothing is stale; a law that was skipped says why.

    `report["each node alone"]` is one law, `report.failures` every violation, `report.special` every case that could
    not be decided, with its reason.
    """

    model_name: str
    laws: tuple[LawResult, ...]

    def __bool__(self) -> bool:
        return all(self.laws)

    def __getitem__(self, name: str) -> LawResult:
        names = [law.name for law in self.laws]
        if name not in names:
            raise KeyError(f"no law is named {name!r}. There are: {', '.join(names)}.")
        return self.laws[names.index(name)]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Every violation and every stale value, law by law, in program order."""
        return tuple([finding for law in self.laws for finding in law.failures])

    @property
    def stale(self) -> tuple[Finding, ...]:
        """The values that were overwritten or replaced since they were recorded."""
        return tuple([finding for law in self.laws for finding in law.stale])

    @property
    def special(self) -> tuple[Finding, ...]:
        """Every case that could not be decided, with its reason."""
        return tuple([finding for law in self.laws for finding in law.special])

    def and_(self, laws: tuple[LawResult, ...]) -> CheckReport:
        """The report extended by the results of more laws."""
        return evolve(self, laws=(*self.laws, *laws))

    def to_pandas(self) -> Any:
        """A row for every violation and every special case, as a pandas DataFrame."""
        rows = [_row(finding, "stale" if finding.is_stale else "broken") for finding in self.failures]
        rows += [_row(finding, "special") for finding in self.special]
        return optional("pandas", "pandas").DataFrame(rows, columns=list(_COLUMNS))

    def __str__(self) -> str:
        return "\n".join([self._headline, *self._table, *self._listing])

    def __repr__(self) -> str:
        return f"<CheckReport: {self._headline.splitlines()[0]}>"

    def _repr_html_(self) -> str:
        text = str(self).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return f"<pre>{text}</pre>"

    @property
    def _headline(self) -> str:
        broken = sum(bool(law.breaches) for law in self.laws)
        unasked = sum(bool(law.skipped) for law in self.laws)
        name = f"Check of {self.model_name or 'a function'}:"
        if self.stale:
            name = f"{name} stale: {_what_is_stale(self.stale)}"
            rest = "All other checked laws hold." if not broken else f"Besides, {_laws(broken, len(self.laws))}"
            return f"{name}\n{CURE}\n{rest}"
        if broken:
            return f"{name} {_laws(broken, len(self.laws))}"
        return f"{name} all laws hold." if not unasked else f"{name} all checked laws hold; {unasked} skipped."

    @property
    def _table(self) -> list[str]:
        asked = [_count(law) if law.unit or law.asked else "" for law in self.laws]
        wide = max([len(law.name) for law in self.laws], default=0)
        wider = max(map(len, asked), default=0)
        rows = zip(self.laws, asked, strict=True)
        return [f"    {law.name:<{wide}}  {count:<{wider}}  {law.result}".rstrip() for law, count in rows]

    @property
    def _listing(self) -> list[str]:
        shown = [f"\n{finding.law}: {finding}" for finding in self.failures[:_SHOWN]]
        left = len(self.failures) - len(shown)
        return [*shown, *([f"\n... and {left} more in report.failures"] if left else [])]


def _laws(broken: int, count: int) -> str:
    return f"{broken} of {count} laws {'is' if broken == 1 else 'are'} broken."


def _what_is_stale(found: tuple[Finding, ...]) -> str:
    """The first stale value, what happened to it, and how many more there are."""
    first, more = found[0].fact.replace("its saved value", f"the recorded value of `{found[0].node}`"), len(found) - 1
    return f"{first}; so {'is' if more == 1 else 'are'} {more} more." if more else f"{first}."


def _count(law: LawResult) -> str:
    """The number of cases in words: `1 output, 0 state changes`, `8 parents`."""
    word, comma, rest = law.unit.partition(",")
    word = word[:-1] if law.asked == 1 and word.endswith("s") else word
    return f"{law.asked:,} {word}{comma}{rest}".rstrip()


_SHOWN = 20
CURE = (
    "`prog = prog.refresh()` runs the program again on what is there now; a model of other shapes or dtypes has to be "
    "captured again."
)
_COLUMNS = ("kind", "law", "node", "parent", "fact", "difference", "line", "file", "source_line")


def _row(finding: Finding, kind: str) -> tuple[Any, ...]:
    source = (finding.source.file, finding.source.line) if finding.source is not None else (None, None)
    return (kind, finding.law, finding.node, finding.parent, finding.fact, finding.difference, finding.line, *source)


def _counted(reasons: dict[str, int]) -> str:
    shown = list(reasons.items())[:_REASONS]
    more = len(reasons) - len(shown)
    words = [f"{count} {fact}" for fact, count in shown]
    return ", ".join([*words, *([f"{more} other reasons"] if more else [])])


_REASONS = 4
