"""Gradients as JSON, and back: the values of a Grads, and what explains the missing ones.

In, to write: a Grads, and the graph of the program that the file holds. Out: JSON; tensors go to the writer's pool.
In, to read: the same. What a graph itself says of its gradients is not written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from .._ir.graph import Graph
from .._ir.location import Location
from .._ir.node import Ref, refs_in, specs_of
from .._replay.gradients import GradientBlockers, Grads, GradTargets, partial_gradients
from .read_trees import TreeReader, bad, exactly, flag, items, mapping, optional, text, texts
from .write_trees import TreeWriter

Json = Any


def grads_json(writer: TreeWriter, grads: Grads, graph: Graph) -> Json:
    """A Grads as JSON."""
    before, writer.positions = writer.positions, graph.positions
    try:
        blockers, asked = grads.blockers, grads.asked
        own = blockers.graph.output is not graph.output
        return {
            "metric": writer.pool.add(grads.metric, "metric"),
            "labels": [[label, location_json(writer, place)] for label, place in asked.labels.items()],
            "refs": _refs(writer, asked.refs),
            "values": _gradients(writer, grads.values_by_ref, graph),
            "ends": _gradients(writer, grads.values_at_ends, graph),
            "flows": _refs(writer, blockers.flows),
            "read": sorted(blockers.read),
            "reached": sorted(blockers.reached),
            "replaced": sorted(blockers.replaced),
            **({"output": writer.structure(blockers.graph.output)} if own else {}),
        }
    finally:
        writer.positions = before


def _refs(writer: TreeWriter, refs: Any) -> Json:
    return sorted([writer.ref(ref) for ref in refs], key=repr)


def _gradients(writer: TreeWriter, found: Any, graph: Graph) -> Json:
    return [
        [writer.ref(ref), None if one is None else writer.pool.add(one, f"{ref}.grad")] for ref, one in found.items()
    ]


def location_json(writer: TreeWriter, place: Location) -> Json:
    """A Location as JSON."""
    more: dict[str, Json] = {}
    if place.output is not None:
        more["output"] = writer.ref(place.output)
    if place.part is not None:
        more["part"] = writer.structure(place.part)
    if place.label != place.node:
        more["label"] = place.label
    if place.scope is not None:
        more["scope"] = writer.scope(place.scope)
    if place.names:
        more["names"] = list(place.names)
    if place.name != place.label:
        more["name"] = place.name
    if place.is_every_pass:
        more["is_every_pass"] = True
    return [place.node, more] if more else [place.node]


def read_grads(reader: TreeReader, json: Json, graph: Graph, find: Callable[[Any], Location]) -> Grads:
    """The Grads that JSON is. `find` gives the location of a name."""
    before, reader.names = reader.names, [node.name for node in graph.nodes]
    try:
        given = mapping(json)
        if not _NEEDED <= {*given} <= _NEEDED | {"output"}:
            bad("gradients lack a part, or have others")
        if "output" in given:
            output = reader.structure(given["output"])
            if not all(_is_given(graph, ref) for ref in refs_in(output)):
                bad("gradients are those of an output that no node gives")
            graph = evolve(graph, output=output, changes=())
        hidden = partial_gradients(graph)
        labels = dict([_label(reader, row, graph) for row in items(given["labels"])])
        blockers = GradientBlockers(
            graph,
            flows=_read_refs(reader, given["flows"], graph),
            read=_read_names(given["read"], graph),
            reached=_read_names(given["reached"], graph),
            hidden=hidden,
            replaced=_read_names(given["replaced"], graph),
        )
        metric = reader.pool.tensor(given["metric"])
        if metric.numel() != 1 or not metric.is_floating_point():
            bad("the metric of gradients is no number")
        asked = GradTargets(labels, _read_refs(reader, given["refs"], graph), hidden)
        values, ends = (_read_gradients(reader, given[word], graph) for word in ("values", "ends"))
        return Grads(metric, asked, find, values, ends, blockers)
    finally:
        reader.names = before


_NEEDED = {"metric", "labels", "refs", "values", "ends", "flows", "read", "reached", "replaced"}


def _is_given(graph: Graph, ref: Ref) -> bool:
    return ref.node in graph and ref in graph.gives[graph.positions[ref.node]]


def _read_refs(reader: TreeReader, json: Json, graph: Graph) -> frozenset[Ref]:
    found = frozenset([reader.ref(one) for one in items(json)])
    if not all(_is_given(graph, ref) for ref in found):
        bad("gradients are those of values that no node gives")
    return found


def _read_names(json: Json, graph: Graph) -> frozenset[str]:
    found = frozenset(texts(json))
    if not all(name in graph for name in found):
        bad("gradients are those of nodes that are not there")
    return found


def _read_gradients(reader: TreeReader, json: Json, graph: Graph) -> dict[Ref, torch.Tensor | None]:
    found: dict[Ref, torch.Tensor | None] = {}
    for row in items(json):
        where, place = exactly(row, 2)
        ref = reader.ref(where)
        if not _is_given(graph, ref):
            bad("a gradient is that of a value that no node gives")
        gradient = optional(reader.pool.tensor, place)
        if gradient is not None and tuple(gradient.shape) != specs_of(graph[ref.node])[ref].shape:
            bad(f"the gradient at {ref} has another shape than its value")
        found[ref] = gradient
    return found


def _label(reader: TreeReader, row: Json, graph: Graph) -> tuple[str, Location]:
    label, place = exactly(row, 2)
    return text(label), read_location(reader, place, graph)


def read_location(reader: TreeReader, json: Json, graph: Graph) -> Location:
    """The Location that JSON is."""
    node, *rest = items(json, 1, 2)
    given = mapping(rest[0]) if rest else {}
    if text(node) not in graph or not {*given} <= _OF_LOCATION:
        bad("a layer lies at a node that is not there")
    get = given.get
    label = text(get("label", node))
    output, part = optional(reader.ref, get("output")), optional(reader.structure, get("part"))
    place = Location(
        node, output, part, label, scope=reader.scope(get("scope")), names=texts(get("names", [])),
        name=text(get("name", label)), is_every_pass=flag(get("is_every_pass", False)),
    )  # fmt: skip
    refs = [*([output] if output is not None else []), *refs_in(part)]
    if not all(_is_given(graph, ref) for ref in refs) or (part is not None and not refs_in(part)):
        bad("a layer lies at a value that no node gives")
    return place


_OF_LOCATION = {"output", "part", "label", "scope", "names", "name", "is_every_pass"}
