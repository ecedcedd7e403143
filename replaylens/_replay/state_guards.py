"""Does the model hold now what the recorded forward found, in all but content?

In: a Record, and what stands at addresses of its model now. Out: a Departure for each fact of the state that the
forward exchanges which is another: its shape and dtype, whether two places hold one tensor, whether what is written
shares memory with another. A module and a refreshed program begin where the model stands, with what the forward before
has left there, so that it is asked each time; of a forward that exchanges nothing there is nothing to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from .._core.autograd import standing
from .._core.graph import Graph
from .._core.node import Call, Ref, State, TensorMeaning
from .._core.sharing import Overlaps, Pair
from .guards import Departure
from .record import Record

At = Callable[[str], torch.Tensor | None]  # what stands at an address now


class Begun:
    """How the state lay with which the recorded forward began."""

    def __init__(self, record: Record) -> None:
        graph = record.graph
        ends = {*[address for address, _ in graph.changes], *graph.removed}
        given = exchanged(graph)
        moved = graph.replaced | given
        nodes = graph.state_nodes
        self.graph = graph
        left = [node for node in nodes if not ends.isdisjoint((node.address, *node.aliases))]
        self.left = {node.name: node for node in left}
        self.tied = [node for node in nodes if node.aliases]
        self.moved = frozenset([node.name for node in nodes if not moved.isdisjoint((node.address, *node.aliases))])
        self.touched = graph.overlaps.touched | {ref.node for ref in graph.written}
        first = {node.name: record.live.get(node.name) for node in nodes if node.address not in given}
        self.meeting = self._meeting({name: tensor for name, tensor in first.items() if tensor is not None})

    def departures(self, now: At) -> Iterator[Departure]:
        """What is otherwise with what stands there now."""
        for node in self.left.values():
            yield from _other_kind(node, now(node.address))
        for node in self.tied:
            for other in node.aliases:
                first, second = now(node.address), now(other)
                if first is not None and second is not None and first is not second:
                    yield Departure(f"whether `{node.address}` and `{other}` hold one tensor", "True", "False")
        if self.moved and self.touched:
            held = {node.name: now(node.address) for node in self.graph.state_nodes}
            meeting = self._meeting({name: tensor for name, tensor in held.items() if tensor is not None})
            for one, other in sorted(meeting ^ self.meeting):
                shared = ("apart", "shared") if (one, other) in meeting else ("shared", "apart")
                yield Departure(f"the memory of {one} and {other}, which the model writes,", *shared)

    def _meeting(self, tensors: dict[str, torch.Tensor]) -> frozenset[Pair]:
        """The pairs that share memory, of which one is written, and one exchanged."""
        if not self.touched or not self.moved:
            return frozenset()
        found = Overlaps.among(tensors, self.moved.intersection(tensors), True).meeting
        return frozenset([pair for pair in found if not self.touched.isdisjoint(pair)])


def exchanged(graph: Graph) -> frozenset[str]:
    """The addresses of what `tensor.data = value` gave other memory, and did not write."""
    return frozenset([address for address, ref in graph.changes if _is_exchanged(graph, ref)])


def _is_exchanged(graph: Graph, ref: Ref) -> bool:
    node = graph[ref.node]
    return isinstance(node, Call) and node.target.function in (standing, torch.Tensor.detach)


def _other_kind(node: State, tensor: torch.Tensor | None) -> Iterable[Departure]:
    """Another shape, dtype, device or layout: Python may have read it, and nobody sees that."""
    if tensor is None:
        return ()
    now, then = TensorMeaning.of(tensor), node.meaning
    kinds = [(one.shape, one.dtype, one.device, one.layout) for one in (now, then)]
    if kinds[0] == kinds[1]:
        return ()
    was, is_now = (
        f"{one}{f' in {one.layout}' * (now.layout is not then.layout)} on {one.device}" for one in (then, now)
    )
    return (Departure(f"the {node.kind} `{node.address}`", was, is_now),)
