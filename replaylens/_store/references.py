"""Programs that a file refers to and does not hold: their digests, written and found again.

In, to write: programs. Out: their digests and names. In, to read: digests, and the programs that a reader was given.
Out: the program for each digest, or an error that says which is missing. A patch may take its values from a program of
any size; the patch is small, and its file as well.
"""

from __future__ import annotations

from collections.abc import Mapping, ValuesView
from typing import Any

from attrs import define, field

from .._ir.util import cached_property
from .._ir.value_source import ValueSource
from ..errors import CannotSave, UnboundReference
from .read_trees import bad, items, mapping, text

Json = Any


@define(eq=False)
class Named:
    """The programs that are named in what is written, each once."""

    rows: list[Json] = field(factory=list)
    _known: dict[int, tuple[Any, int]] = field(factory=dict)  # by id, with the program, so that no other takes its id

    def number(self, program: Any, place: str) -> int:
        """The number of a program. `place` says what refers to it, for errors."""
        if id(program) not in self._known:
            try:
                row = {"program": program.digest, "model": program.model_name}
            except CannotSave as error:
                raise CannotSave(f"{place} refers to {program!r}, of which a file cannot be sure: {error}") from None
            if row not in self.rows:
                self.rows.append(row)
            self._known[id(program)] = program, self.rows.index(row)
        return self._known[id(program)][1]


class References:
    """The programs that a reader was given: one, several, or a mapping from digests."""

    def __init__(self, given: Any = None) -> None:
        is_mapping = isinstance(given, Mapping)
        several = given.values() if is_mapping else () if given is None else given
        every = several if isinstance(several, (list, tuple, set, frozenset, ValuesView)) else (several,)
        if not all(map(is_program, every)):
            raise TypeError(
                f"references= takes a program, a list of them, or a mapping from digests to them, not {given!r:.60}."
            )
        self.programs = tuple(every)
        self.said = dict(given) if is_mapping else None

    @cached_property
    def by_digest(self) -> dict[str, Any]:
        """The programs by their digests. A mapping is taken at its word: the user has said which stands for which."""
        return {program.digest: program for program in self.programs} if self.said is None else self.said

    def bound(self, rows: Json) -> list[Any]:
        """The programs that a file names."""
        wanted = []
        for row in map(mapping, items(rows)):
            if {*row} != {"program", "model"}:
                bad("a program is named by other things than its digest and its model")
            wanted.append((text(row["program"]), text(row["model"])))
        if not all(len(digest) == 64 and digest.isalnum() for digest, _ in wanted):
            bad("a program is named by something that is no digest")
        missing = [(digest, model) for digest, model in wanted if digest not in self.by_digest]
        if missing:
            raise UnboundReference(self._missing_text(missing))
        return [self.by_digest[digest] for digest, _ in wanted]

    def _missing_text(self, missing: list[tuple[str, str]]) -> str:
        names = [f"    {model or 'a program'}, digest {digest}" for digest, model in missing]
        fact = "a program that was" if len(missing) == 1 else f"{len(missing)} programs that were"
        lines = [f"what is read takes values or layers from {fact} not given:", *names]
        if self.by_digest:
            lines += [
                "given were:",
                *[f"    {one.model_name}, digest {digest}" for digest, one in self.by_digest.items()],
            ]
            lines.append(
                "Another input, and other weights, make another digest. If one program is to stand for another, say"
                f" so: references={{{missing[0][0]!r}: prog}}."
            )
        else:
            lines.append("Give the program, captured again or loaded: references=prog, or a list of several.")
        return "\n".join(lines)


def is_program(what: Any) -> bool:
    """True for a Program."""
    return isinstance(what, ValueSource) and hasattr(type(what), "digest")
