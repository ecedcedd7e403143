"""A metric as more program: what it computes of the output becomes nodes after the model's own.

In: the record of a program, and the record of the metric on that program's output. Out: one record of both, whose
output is the metric's. So a sweep sees what the metric reads, and computes nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from .._core.graph import Graph
from .._core.laws import require_lawful
from .._core.node import Call, Const, Generator, Guard, Input, Node, Ref, Source, TensorMeaning, refs_in, remade
from .._core.sharing import version_of
from .._core.trees import keyed, leaves, remake, walk
from .._replay.record import Record, Versions


def with_metric(record: Record, metric: Record) -> Record:
    """The record of a program that goes on to compute the metric."""
    graph, more = record.graph, metric.graph
    outputs = dict(walk(graph.output, keyed))
    known = {ref.node: outputs[path[2:]] for path, ref in walk(more.inputs, keyed) if type(ref) is Ref}
    names = {node.name: f"metric.{node.name}" for node in more.nodes if node.name not in known}

    def moved(leaf: Any) -> Any:
        if type(leaf) is Ref:
            return known[leaf.node] if leaf.node in known else Ref(names[leaf.node], leaf.path)
        return Generator(f"metric.{leaf.key}") if type(leaf) is Generator else leaf

    added = [_moved(node, names[node.name], moved) for node in more.nodes if not isinstance(node, Input)]
    joined = require_lawful(evolve(graph, nodes=(*graph.nodes, *added), output=remake(more.output, moved), changes=()))
    values = dict(record.values)
    values.update({moved(ref): tensor for ref, tensor in metric.values.items() if ref.node in names})
    versions = Versions((ref, count) for ref, count in record.versions.items())
    versions.update({moved(ref): count for ref, count in metric.versions.items() if ref.node in names})
    draws = {**record.draws, **{f"metric.{key}": state for key, state in metric.draws.items()}}
    return Record(joined, values, versions, draws, record.live, places=record.places)


def _moved(node: Node, name: str, moved: Any) -> Node:
    if not isinstance(node, Call):
        return evolve(node, name=name)
    return remade(
        node,
        moved,
        name=name,
        returns=remake(node.returns, moved),
        result=remake(node.result, moved),
        draws=None if node.draws is None else f"metric.{node.draws}",
        follows=None if node.draws is None else f"metric.{node.follows or 'start'}",
        through=tuple([f"metric.{inner}" for inner in node.through]),
    )


def why_impure(graph: Graph) -> str:
    """Why a metric is not nothing but tensor operations, the same for every variant, whatever the contents; else
    empty. What it reads of tensors of its own is the same for all.
    """
    varying = graph.descendants([node.name for node in graph.input_nodes])
    if draws := [call for call in graph.calls if call.draws is not None]:
        return f"it draws random numbers, by {draws[0].kind}{_at(draws[0].source)}"
    for guard in graph.guards:
        if any(ref.node in varying for ref in _deciding(graph, guard)):
            what = "has a shape that depends on contents" if guard.kind == "shape" else "is read in Python"
            return f"{guard.refs[0].node} {what}{_at(guard.source)}"
    if graph.changes:
        return f"it writes to {graph.changes[0][0]}"
    ends = list(leaves(graph.output))
    return "" if ends and all(type(leaf) is Ref for leaf in ends) else "it gives what is no tensor"


def _at(source: Source | None) -> str:
    return f" ({source})" if source is not None else ""


def _deciding(graph: Graph, guard: Guard) -> tuple[Ref, ...]:
    """What a guard's answer depends on: of an index by a mask it is the mask."""
    if guard.kind != "shape":
        return guard.refs
    calls = [node for ref in guard.refs if isinstance(node := graph[ref.node], Call)]
    trees = [call.args[1:] if call.kind in ("getitem", "maskedselect") else (call.args, call.kwargs) for call in calls]
    return tuple(refs_in(tuple(trees)))


def with_fixed_masks(record: Record) -> Record:
    """The record of a metric in which an index by a mask of its own is one by the places that are chosen."""
    graph = record.graph
    varying = graph.descendants([node.name for node in graph.input_nodes])
    nodes: list[Node] = []
    values: dict[Ref, torch.Tensor] = {}

    def chosen(item: Any) -> Any:
        """An index by a mask as indices, one for each of its axes."""
        if type(item) is not Ref or item.node in varying or record.values[item].dtype is not torch.bool:
            return (item,)
        found = record.values[item].nonzero(as_tuple=True)
        names = [f"{item.node}_axis_{len(values) + n}" for n in range(len(found))]
        nodes.extend(
            [Const(name, "a mask", TensorMeaning.of(tensor)) for name, tensor in zip(names, found, strict=True)]
        )
        values.update({Ref(name): tensor for name, tensor in zip(names, found, strict=True)})
        return tuple([Ref(name) for name in names])

    for node in graph.nodes:
        if isinstance(node, Call) and node.kind == "getitem" and node.is_dynamic:
            index = node.args[1] if type(node.args[1]) is tuple else (node.args[1],)
            items = tuple([one for item in index for one in chosen(item)])
            node = evolve(node, args=(node.args[0], items), is_dynamic=False)
        nodes.append(node)
    if not values:
        return record
    versions = Versions((*record.versions.items(), *[(ref, version_of(tensor)) for ref, tensor in values.items()]))
    return Record(evolve(graph, nodes=tuple(nodes)), {**record.values, **values}, versions, record.draws)
