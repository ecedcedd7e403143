"""Dataflow between nodes, as naming sees it: who made a value, who reads it, which calls are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .drafts import Draft
from .lazy import cached_property

Made = tuple[int, int]  # a value: the position of the draft that made it, and which of what that gives


class Wires:
    """How drafts are joined. A call is a draft that is neither a source nor set aside."""

    def __init__(self, drafts: Sequence[Draft], orphans: Sequence[bool]) -> None:
        self.drafts = drafts
        makers: dict[int, Made] = {}
        for position, draft in enumerate(drafts):
            for part, value in enumerate(draft.gives):
                makers.setdefault(value, (position, part))
        self.is_call = [d.function is not None and not lost for d, lost in zip(drafts, orphans, strict=True)]
        self.parents: list[tuple[Made, ...]] = [tuple([makers[v] for v in d.reads if v in makers]) for d in drafts]
        self.parameters = [
            tuple(sorted({p for p, _ in parents if drafts[p].address is not None})) for parents in self.parents
        ]
        self._keys: list[int | None] = [None] * len(drafts)
        self._known: dict[Any, int] = {}

    @cached_property
    def users(self) -> list[list[tuple[int, int, int]]]:
        """For each draft who reads it: the reader's position, the place among what that reads, which value is read."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.drafts]
        for reader, parents in enumerate(self.parents):
            if self.is_call[reader]:
                for slot, (position, part) in enumerate(parents):
                    found[position].append((reader, slot, part))
        return found

    def key(self, position: int) -> int:
        """Equal numbers for calls that are alike: the same function with the same arguments besides tensors, on the
        same parameters if any, and not in modules whose parameters differ.
        """
        known = self._keys[position]
        if known is None:
            draft = self.drafts[position]
            own, home = self.parameters[position], self._home(draft.modules)
            key: Any = (draft.kind, draft.function, own, home, draft.literals())
            try:
                hash(key)
            except TypeError:
                key = (draft.kind, position)  # it has an argument that cannot be compared: it is like no other
            known = self._keys[position] = self._known.setdefault(key, len(self._known))
        return known

    def neighbours(self, position: int) -> dict[Any, int]:
        """The calls that a call reads and those that read it, by how they are joined and what they are."""
        found: dict[Any, int] = {}
        for slot, (parent, part) in enumerate(self.parents[position]):
            if self.is_call[parent]:
                found["reads", slot, part, self.key(parent)] = parent
        seen: Counter[Any] = Counter()
        for user, slot, part in self.users[position]:
            joined = ("is read", slot, part, self.key(user))
            found[joined, seen[joined]] = user
            seen[joined] += 1
        return found

    def _home(self, modules: tuple[str, ...]) -> frozenset[int]:
        """The parameters of the innermost module around a call that has any: two blocks of one class with parameters
        of their own are two blocks, and so are the calls in them that read no parameter.
        """
        return next((owned for address in reversed(modules) if (owned := self._owned.get(address))), frozenset())

    @cached_property
    def _owned(self) -> dict[str, frozenset[int]]:
        """The parameters that are read within each module."""
        found: dict[str, set[int]] = {}
        for draft, own in zip(self.drafts, self.parameters, strict=True):
            for address in draft.modules if own else ():
                found.setdefault(address, set()).update(own)
        return {address: frozenset(own) for address, own in found.items()}
