"""An edit's functions that draw: which of them do, and the state of the generator before each.

In: an edited graph, and how its record is derived. Out: that record, in which each function of the edit that drew is a
draw as recorded ones are. It draws from the user's generator; drawn anew, it has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._core.graph import Graph
from .._core.label import fresh
from .._core.node import Call, Node
from .._core.target import Target
from .._edit.rewrite import replace
from .record import Record

Derived = tuple[Record, Any]


@frozen(eq=False)
class Watched:
    """Functions of an edit, watched while its record is derived."""

    before: Mapping[str, torch.Tensor]  # the states that are kept already, by key
    start: torch.Tensor = field(factory=lambda: torch.default_generator.get_state())
    now: list[torch.Tensor] = field(factory=list)  # the user's generator
    states: dict[str, torch.Tensor] = field(factory=dict)  # of nodes that drew

    def __call__(self, graph: Graph, names: set[str], derived: Callable[[Graph], Derived]) -> Derived:
        """What `derived` makes of the graph, whose calls of these names are watched."""
        self.now[:] = [self.start]
        self.states.clear()
        calls = {name: call for name in names if isinstance(call := graph[name], Call)}
        watched = replace(graph, {name: (self._watching(call),) for name, call in calls.items()}) if calls else graph
        record, output = derived(watched)
        torch.default_generator.set_state(self.now[0])
        if not calls:
            return record, output
        keys = {name: fresh(f"draw_of_{name}", self.before) for name in self.states}
        draws = {**record.draws, **{keys[name]: state for name, state in self.states.items()}}

        def plain(node: Node) -> Node:
            if node.name not in calls or not isinstance(node, Call):
                return node
            key = keys.get(node.name)
            follows = None if key is None else f"start_of_{node.name}"
            return evolve(node, target=calls[node.name].target, draws=key, follows=follows)

        made = evolve(record.graph, nodes=tuple(map(plain, record.graph.nodes)))
        return evolve(record, graph=made, draws=draws), output

    def _watching(self, call: Call) -> Call:
        function = call.target.function

        def watch(*args: Any, **kwargs: Any) -> Any:
            outside, state = torch.default_generator.get_state(), self.now[0]
            torch.default_generator.set_state(state)
            try:
                return function(*args, **kwargs)
            finally:
                self.now[0] = torch.default_generator.get_state()
                torch.default_generator.set_state(outside)
                if not torch.equal(self.now[0], state):
                    self.states[call.name] = state

        return evolve(call, target=Target(call.target.name, watch, is_stable=False))
