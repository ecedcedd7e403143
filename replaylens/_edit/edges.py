"""Edges: what one node reads from another. Reading another value instead, and nodes that are bypassed.

In: a Graph, a value, and its readers. Out: a Graph in which they read it through a node of its own, or read another
value, or in which a call is an alias of a value that it reads; or an error that says what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve, field, frozen

from .._ir.graph import Graph, InnerGradient
from .._ir.label import unused_name
from .._ir.node import Call, Const, Ref, State, TensorSpec, specs_of, value_of
from .._ir.printer import specs_text
from .._ir.runtime import alias
from .._ir.target import Target
from ..errors import BadEdit, ShapeMismatch
from .rewrite import insert_after, replace, rewire
from .unwrite import with_plain_call

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


def with_edge_nodes(graph: Graph, sender: tuple[Ref, ...], readers: Sequence[str]) -> tuple[Graph, tuple[str, ...]]:
    """The graph with a node for what some nodes read from one, read by them alone; and the names of such nodes.

    A sender of several values gets one node for each value that they read.
    """
    require_readers(graph, sender, readers)
    read = [ref for ref in sender if any(ref in reads_of(graph, reader) for reader in readers)]
    names: list[str] = []
    for ref in read:
        who = readers[0] if len(readers) == 1 else f"{readers[0]}_and_{len(readers) - 1}_more"
        part = "".join(f"_{step}" for step in ref.path)
        name = unused_name(f"{ref.node.replace(':', '_p')}{part}_to_{who.replace(':', '_p')}", graph.positions)
        node = graph[ref.node]
        copy = Call(
            name,
            "edge",
            Target.of(alias),
            (ref,),
            returns=Ref(name),
            spec=(specs_of(node)[ref],),
            context=node.context if isinstance(node, Call) else graph.outer_modes,
            scope=node.scope if isinstance(node, Call) else None,
            source=node.source if isinstance(node, Call) else None,
        )
        graph = rewire(insert_after(graph, node.name, (copy,)), readers, {ref: Ref(name)})
        names.append(name)
    return graph, tuple(names)


def is_edge_node(call: Any) -> bool:
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


def bypassed(graph: Graph, name: str, to: Any, resolve: Callable[[Any], Ref]) -> Graph:
    """The graph in which the call returns a value that it reads: the only one of its shape, or the one that `to` names
    or numbers.
    """
    node = graph[name]
    while isinstance(node, Call) and node.edits is not None:  # a patch stands for what it patches
        node = graph[node.edits]
    if isinstance(node, Call) and node.target.function is alias:
        return graph
    if isinstance(node, Call) and type(value_of(node)) is not Ref:
        raise BadEdit(f"{node.name} gives several tensors, and can return only one. Bypass what reads it.")
    graph, name = with_plain_call(graph, node.name, still_writes=False)
    call = graph[name]
    assert isinstance(call, Call)
    ref = _handed_on(graph, call, to, resolve)
    made = evolve(
        call,
        kind="alias",
        target=Target.of(alias),
        args=(ref,),
        kwargs=(),
        draws=None,
        is_dynamic=False,
        is_overwritten=False,
        is_differentiated=False,
        is_shared=False,
        has_duplicate_outputs=False,
        edited=f"was {call.kind}",
    )
    return replace(graph, {name: (made,)})


def _handed_on(graph: Graph, call: Call, to: Any, resolve: Callable[[Any], Ref]) -> Ref:
    read = tuple(dict.fromkeys(call.refs))
    computed = [ref for ref in read if not isinstance(graph[ref.node], (State, Const))] or list(read)
    if to is not None:
        ref = _named(call, computed, read, to, resolve)
        if _kind(graph, ref) != _kind(graph, Ref(call.name)):
            raise BadEdit(_misfit_text(graph, call, [ref]))
        return ref
    fitting = [ref for ref in computed if _kind(graph, ref) == _kind(graph, Ref(call.name))]
    if not fitting:
        raise BadEdit(_misfit_text(graph, call, computed))
    if len(fitting) > 1:
        first = fitting[0]
        raise BadEdit(
            f"{call.name} reads {len(fitting)} values of its shape: {', '.join(map(str, fitting))}.\n"
            f"Say which one it should return: bypass({call.name!r}, to={computed.index(first)}), or to={first.node!r}."
        )
    return fitting[0]


def _named(call: Call, computed: list[Ref], read: tuple[Ref, ...], to: Any, resolve: Callable[[Any], Ref]) -> Ref:
    if type(to) is int:
        if not -len(computed) <= to < len(computed):
            raise BadEdit(f"{call.name} has no input {to}: it computes with {', '.join(map(str, computed)) or 'none'}.")
        return computed[to]
    ref = resolve(to)
    if ref not in read:
        raise BadEdit(f"{call.name} does not read {ref}: it reads {', '.join(map(str, read)) or 'nothing'}.")
    return ref


def _kind(graph: Graph, ref: Ref) -> Any:
    meaning = specs_of(graph[ref.node])[ref]
    return meaning.shape, meaning.dtype, meaning.device


def _misfit_text(graph: Graph, call: Call, refs: list[Ref]) -> str:
    def shown(ref: Ref) -> str:
        found: TensorSpec = specs_of(graph[ref.node])[ref]
        return f"{ref} ({found})"

    reads = ", ".join(map(shown, refs)) or "nothing"
    return f"{call.name} gives {specs_text(call.spec)}, and reads {reads}: it cannot return that."
