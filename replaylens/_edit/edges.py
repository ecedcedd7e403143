"""Edges: what one node reads from another, and reading another value instead.

In: a Graph, a value, and its readers. Out: a Graph in which they read it through a node of its own, or read another
value; or an error that says what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, field, frozen

from .._ir.graph import Graph, InnerGradient
from .._ir.label import fresh
from .._ir.node import Call, Ref, specs_of
from .._ir.runtime import alias
from .._ir.target import Target
from ..errors import BadEdit, ShapeMismatch
from .rewrite import insert_after, replace, rewire

OUTPUT = "output"


def _as_key(name: Any) -> Any:
    return tuple(name) if isinstance(name, list) else name


@frozen
class Edge:
    """The value that a receiver, and nobody else, reads from a sender: a key of a mapping of patches.

    Both are named as layers are. There may be several receivers, and `"output"` is the program's own output.

    >>> Edge("relu_1", "linear_2")
    Edge('relu_1', 'linear_2')
    """

    sender: Any
    receiver: Any = field(converter=_as_key)

    def __repr__(self) -> str:
        return f"Edge({self.sender!r}, {self.receiver!r})"


def tapped(graph: Graph, sender: tuple[Ref, ...], readers: Sequence[str]) -> tuple[Graph, tuple[str, ...]]:
    """The graph with a node for what some nodes read from one, read by them alone; and the names of such nodes.

    A sender of several values gets one node for each value that they read.
    """
    require_readers(graph, sender, readers)
    read = [ref for ref in sender if any(ref in reads_of(graph, reader) for reader in readers)]
    names: list[str] = []
    for ref in read:
        who = readers[0] if len(readers) == 1 else f"{readers[0]}_and_{len(readers) - 1}_more"
        part = "".join(f"_{step}" for step in ref.path)
        name = fresh(f"{ref.node.replace(':', '_p')}{part}_to_{who.replace(':', '_p')}", graph.positions)
        node = graph[ref.node]
        copy = Call(
            name,
            "edge",
            Target.of(alias),
            (ref,),
            returns=Ref(name),
            meaning=(specs_of(node)[ref],),
            context=node.context if isinstance(node, Call) else graph.ambient,
            scope=node.scope if isinstance(node, Call) else None,
            source=node.source if isinstance(node, Call) else None,
        )
        graph = rewire(insert_after(graph, node.name, (copy,)), readers, {ref: Ref(name)})
        names.append(name)
    return graph, tuple(names)


def is_tap(call: Any) -> bool:
    """True for a node that stands for an edge, as long as nothing has patched it."""
    return isinstance(call, Call) and call.kind == "edge" and call.target.function is alias


def reads_of(graph: Graph, reader: str) -> tuple[Ref, ...]:
    """The values that a node, or the program's output, reads, each once."""
    if reader == OUTPUT:
        return tuple(dict.fromkeys(graph.output_refs))
    node = graph[reader]
    return tuple(dict.fromkeys(node.refs)) if isinstance(node, Call) else ()


def require_readers(graph: Graph, sender: Sequence[Ref], readers: Sequence[str]) -> None:
    """Raise unless each of them reads from the sender."""
    for reader in readers:
        reads = reads_of(graph, reader)
        if not any(ref in reads for ref in sender):
            who, what = ("The output", "is made of") if reader == OUTPUT else (reader, "reads")
            listed = ", ".join(dict.fromkeys(str(ref) for ref in reads)) or "nothing"
            raise BadEdit(f"{who} does not read {sender[0].node}: it {what} {listed}.")
        node = graph[reader] if reader != OUTPUT else None
        if isinstance(node, InnerGradient):
            raise BadEdit(
                f"{reader} is a gradient that the model takes through {sender[0].node}: it reads no copy of it."
            )


def rewired(graph: Graph, readers: Sequence[str], old: Ref, new: Ref) -> Graph:
    """The graph in which some nodes, or the output, read another value in place of this one."""
    require_readers(graph, (old,), readers)
    for reader in readers:
        if reader != OUTPUT and graph.positions[new.node] >= graph.positions[reader]:
            if reader in graph.ancestors([new.node]):
                raise BadEdit(f"{reader} cannot read {new}, which is made from {reader} itself.")
            raise BadEdit(f"{reader} cannot read {new}, which runs after it.")
    before, after = specs_of(graph[old.node])[old], specs_of(graph[new.node])[new]
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise ShapeMismatch(
            f"{new} is {after}; {', '.join(readers)} reads {old}, which is {before}.\n"
            f"Give a value of shape {before.shape} and dtype {before.dtype}."
        )
    made = rewire(graph, readers, {old: new})
    calls = [call for call in made.calls if call.name in readers]
    return replace(made, {call.name: (evolve(call, edited=f"reads {new}, not {old}"),) for call in calls})
