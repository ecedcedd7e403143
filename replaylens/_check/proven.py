"""Which calls did a whole replay run on the saved values of what they read, and with their own saved values as outcome?

In: a record, and the code of a replay of it. Out: code that does the same and looks on. What was seen there need not be
run a second time: a call is given the same bits, and gave the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import define, field

from .._core.node import Call, refs_of
from .._core.sameness import same
from .._core.trees import part_at
from .._replay.interpreter import Code
from .._replay.record import Record


@define
class Proven:
    """The positions of the calls that were seen to be right. One object for each check."""

    record: Record
    positions: set[int] = field(factory=set)

    def told(self, code: Code) -> Code:
        """The same code, of which each call is looked at."""
        count = len(self.record.graph)
        return code.wrapped(lambda slot, call: partial(self._looked_at, slot, call) if slot < count else call)

    def _looked_at(self, position: int, call: Any, *args: Any) -> Any:
        before = torch.default_generator.get_state()
        made = call(*args)
        node = self.record.graph.nodes[position]
        if isinstance(node, Call) and self._is_right(position, node, made):
            drew = not torch.equal(before, torch.default_generator.get_state())
            if node.draws is not None or not drew:
                self.positions.add(position)
        return made

    def _is_right(self, position: int, node: Call, made: Any) -> bool:
        graph, saved = self.record.graph, self.record.values
        if node.through or not all(ref in saved for ref in (*node.refs, *refs_of(node))):
            return False
        calls = [parent for parent in graph.parents[position] if isinstance(graph.nodes[parent], Call)]
        return self.positions.issuperset(calls) and all(
            same(part_at(made, ref.path), saved[ref]) for ref in refs_of(node)
        )
