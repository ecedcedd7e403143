"""Calls that run others again (a gradient taken inside the forward), after those others have changed.

In: the graph before an edit and after it. Out: the edited graph, in which such a call holds the stretch as it is now.
How a gradient is taken is not known here: a stretch is a Graph among the call's arguments, with what goes into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from .._core.graph import Graph, InnerGradient
from .._core.node import Call, Input, Node, Ref, TensorMeaning, refs_in, remade
from .._core.trees import leaves, remake
from ..errors import ReplaylensError


def run_again(old: Graph, new: Graph, refs: Mapping[Ref, Ref]) -> Graph:
    """The new graph, its calls with a `through` brought up to date. `refs`: values that are other ones everywhere."""
    fixed = {
        call.name: _with_stretch(old, new, call, refs)
        for call in new.again
        if call.name in old and _has_changed(old, new, call, refs)
    }
    if not fixed:
        return new
    return evolve(new, nodes=tuple([fixed.get(node.name, node) for node in new.nodes]))


def _has_changed(old: Graph, new: Graph, call: InnerGradient, refs: Mapping[Ref, Ref]) -> bool:
    others = any(ref.node in call.through for ref in refs)
    return others or call is not old[call.name] or any(n not in new or new[n] is not old[n] for n in call.through)


def _with_stretch(old: Graph, new: Graph, call: InnerGradient, refs: Mapping[Ref, Ref]) -> Call:
    given = call.arguments
    stretch, roots, states = given.stretch, given.starts, given.states
    outer = _outward(call, refs)
    members = _members(old, new, call, {leaf.node for leaf in leaves(remake(stretch.output[0], outer))}, roots)
    names = {member.name for member in members}
    if missing := [m.name for m in members if m.draws is not None and m.draws not in (states.keys or ())]:
        raise ReplaylensError(
            f"{missing[0]} would draw random numbers inside a gradient that the model takes ({call.name}); that cannot "
            "be taken again."
        )
    reads = [ref for member in members for ref in member.refs]
    reads += refs_in(remake(stretch.output, outer))
    further = tuple(dict.fromkeys(ref for ref in reads if ref.node not in names and ref not in roots))
    made = _stretch_of(new, stretch, (*roots, *further), members, outer)
    there = remake(stretch.output, outer) if given.keep_graph else ()
    args = given._replace(stretch=made, others=further, there=there)
    return evolve(call, args=tuple(args), through=tuple([m.name for m in members]))


def _outward(call: InnerGradient, refs: Mapping[Ref, Ref]) -> Any:
    """What a Ref inside the stretch stands for outside."""
    stretch, reads = call.arguments.stretch, (*call.arguments.starts, *call.arguments.others)
    given = {node.name: ref for node, ref in zip(stretch.input_nodes, reads, strict=True)}
    called = {inner.name: name for inner, name in zip(stretch.calls, call.through, strict=True)}

    def outer(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf
        found = given[leaf.node] if leaf.node in given else evolve(leaf, node=called[leaf.node])
        return refs.get(found, found)

    return outer


def _members(old: Graph, new: Graph, call: InnerGradient, ends: Iterable[str], roots: Iterable[Ref]) -> list[Call]:
    """The calls of the stretch: those that were in it, and new ones on a way from its start to its ends."""
    stay = {name for name in call.through if name in new}
    below = new.descendants([*stay, *(ref.node for ref in roots)])
    above = new.ancestors(ends)
    here = new.calls[: new.calls.index(call)] if call in new.calls else new.calls
    return [c for c in here if c.name in stay or (c.name not in old and c.name in below and c.name in above)]


def _stretch_of(new: Graph, stretch: Graph, reads: tuple[Ref, ...], members: list[Call], outer: Any) -> Graph:
    inside: dict[Ref, Ref] = {ref: Ref(f"value_{number}") for number, ref in enumerate(reads)}
    called = {member.name: f"call_{number}" for number, member in enumerate(members)}

    def inner(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf
        return inside[leaf] if leaf in inside else evolve(leaf, node=called[leaf.node])

    nodes: list[Node] = [Input(inside[ref].node, (n,), _meaning(new, ref)) for n, ref in enumerate(reads)]
    for member in members:
        nodes.append(
            remade(
                member,
                inner,
                name=called[member.name],
                returns=remake(member.returns, inner),
                result=None,
                scope=None,
                source=None,
            )
        )
    output = remake(remake(stretch.output, outer), inner)
    return evolve(stretch, nodes=tuple(nodes), output=output)


def _meaning(graph: Graph, ref: Ref) -> TensorMeaning:
    node = graph[ref.node]
    if not isinstance(node, Call):
        return node.meaning
    refs = refs_in(node.returns)
    return node.meaning[refs.index(ref)]
