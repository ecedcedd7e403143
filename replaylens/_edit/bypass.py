"""Makes a node return one of the values that it reads.

In: a Graph, the name of a call, and which of its values is meant if that is ambiguous. Out: a Graph in which the call
is an alias of that value. What the call wrote in place, it writes no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from .._ir.graph import Graph
from .._ir.node import Call, Const, Ref, State, TensorSpec, specs_of, value_of
from .._ir.printer import shape_of
from .._ir.runtime import alias
from .._ir.target import Target
from ..errors import BadEdit
from .rewrite import replace
from .unwrite import with_plain


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
    graph, name = with_plain(graph, node.name, still_writes=False)
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
        is_twice=False,
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
    return f"{call.name} gives {shape_of(call.meaning)}, and reads {reads}: it cannot return that."
