"""A program under check: its record, what is asked of it, and which of its calls need not be run a second time.

In: a record, what the model returned. Out: what the laws of a program are asked of. A call that a whole replay ran on
the saved values of what it reads, and that gave its own, is verified: it is given the same bits, and gave the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from .._core.graph import Graph
from .._core.lazy import cached_property
from .._core.node import Call, Ref, refs_of
from .._core.sameness import same
from .._core.trees import part_at
from .._replay.interpreter import Code
from .._replay.record import Record
from .report import LawResult


@frozen(eq=False)
class ProgramUnderTest:
    """A program, and what one check of it knows. One object for each check."""

    record: Record
    returned: Any  # what the model returned
    as_captured: bool  # no edit has put nodes between others, so that numbers run on
    sample: float | None = None  # how many calls are asked by themselves, or which share of them
    progress: bool | None = None
    verified: set[int] = field(factory=set)  # positions of calls that were seen to give their saved values
    per_node: dict[str, LawResult] = field(factory=dict)  # of the one walk that asks all laws of single calls

    @property
    def graph(self) -> Graph:
        return self.record.graph

    @cached_property
    def stale(self) -> frozenset[Ref]:
        """The values that were overwritten since they were recorded: no other law can be asked of them."""
        return frozenset([ref for ref in self.record.values if self.record.stale(ref) is not None])

    @cached_property
    def chosen(self) -> frozenset[int]:
        """The calls that are asked by themselves: all, or so many, spread evenly over the program; always the same."""
        calls = [position for position, node in enumerate(self.graph.nodes) if isinstance(node, Call)]
        if self.sample is None:
            return frozenset(calls)
        wanted = self.sample if isinstance(self.sample, int) else max(1, round(self.sample * len(calls)))
        count = min(len(calls), wanted)
        return frozenset([calls[(2 * number + 1) * len(calls) // (2 * count)] for number in range(count)])

    def verifying(self, code: Code) -> Code:
        """The same code of a replay, which notes the calls that are right."""
        count = len(self.graph)
        return code.wrapped(lambda slot, call: partial(self._run, slot, call) if slot < count else call)

    def _run(self, position: int, call: Any, *args: Any) -> Any:
        before = torch.default_generator.get_state()
        made = call(*args)
        node = self.graph.nodes[position]
        if isinstance(node, Call) and self._is_right(position, node, made):
            drew = not torch.equal(before, torch.default_generator.get_state())
            if node.draws is not None or not drew:
                self.verified.add(position)
        return made

    def _is_right(self, position: int, node: Call, made: Any) -> bool:
        saved = self.record.values
        if node.through or not all(ref in saved for ref in (*node.refs, *refs_of(node))):
            return False
        calls = [parent for parent in self.graph.parents[position] if isinstance(self.graph.nodes[parent], Call)]
        return self.verified.issuperset(calls) and all(
            same(part_at(made, ref.path), saved[ref]) for ref in refs_of(node)
        )
