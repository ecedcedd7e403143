"""A metric as more program: what it computes of the output becomes nodes after the model's own.

In: the record of a program, and the record of the metric on that program's output. Out: one record of both, whose
output is the metric's. So a sweep sees what the metric reads, and computes nothing else.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from .._core.graph import Graph
from .._core.laws import require_lawful
from .._core.node import Call, Generator, Input, Node, Ref
from .._core.trees import paths, remake
from .._replay.replay import Record, Versions


def with_metric(record: Record, metric: Record) -> Record:
    """The record of a program that goes on to compute the metric."""
    graph, more = record.graph, metric.graph
    outputs = dict(paths(graph.output))
    known = {ref.node: outputs[path[2:]] for path, ref in paths(more.inputs) if type(ref) is Ref}
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
    return Record(joined, values, versions, draws)


def _moved(node: Node, name: str, moved: Any) -> Node:
    if not isinstance(node, Call):
        return evolve(node, name=name)
    return evolve(
        node,
        name=name,
        args=tuple([remake(arg, moved) for arg in node.args]),
        kwargs=tuple([(key, remake(value, moved)) for key, value in node.kwargs]),
        returns=remake(node.returns, moved),
        result=remake(node.result, moved),
        draws=None if node.draws is None else f"metric.{node.draws}",
        follows=None if node.draws is None else f"metric.{node.follows or 'start'}",
        through=tuple([f"metric.{inner}" for inner in node.through]),
    )


def is_pure(graph: Graph) -> bool:
    """Is a metric nothing but tensor operations, the same for every variant, whatever the contents?"""
    ends = [leaf for _, leaf in paths(graph.output)]
    is_plain = not graph.guards and not graph.changes and not any(call.draws is not None for call in graph.calls)
    return is_plain and bool(ends) and all(type(leaf) is Ref for leaf in ends)
