"""Gradients and layers as JSON, and back; and what several kinds of results say: departures, structures of tensors.

In, to write: such an object. Out: JSON; its tensors go to the writer's pool. In, to read: the same, which may say
anything. Out: the object. A layer has its program in its file, gradients the graph of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from .._ir.node import Ref, filled, refs_in, specs_of
from .._ir.trees import freeze_deep
from .._layers.index import LayerIndex
from .._layers.layer import Layer, address_of, layer_at
from .._replay.gradients import Grads
from .._replay.guards import Departure
from ..errors import CannotSave
from .grads import grads_json, read_grads
from .graphs import graph_json, read_graph
from .objects import PROGRAMS, Kind, object_json, read_kind, read_object, register
from .pool import natural
from .read_trees import TreeReader, bad, exactly, items, mapping, optional, text
from .write_trees import CLASS_WORDS, TreeWriter

Json = Any
Finished = Callable[[], Json]


# -- structures, departures --------------------------------------------------------------------------------------------


def structure_json(writer: TreeWriter, value: Any, name: str) -> Json:
    """A tensor, or a structure of tensors, numbers and words. Classes of the user's are opened, as outputs are."""
    rows: list[Json] = []

    def leaf(tensor: torch.Tensor) -> Ref:
        rows.append(writer.pool.add(tensor, f"{name}/{len(rows)}" if rows else name))
        return Ref("tensor", (len(rows) - 1,))

    tree = freeze_deep(value, leaf)
    return [writer.structure(tree), rows]


def read_structure(reader: TreeReader, json: Json) -> Any:
    """The inverse of `structure_json`."""
    tree, rows = exactly(json, 2)
    tensors = [reader.pool.tensor(row) for row in items(rows)]
    found = reader.structure(tree)
    if not all(ref.node == "tensor" and len(ref.path) == 1 and ref.path[0] < len(tensors) for ref in refs_in(found)):
        bad("a result has a tensor that is not there")
    return filled(found, lambda ref: tensors[ref.path[0]])


def departure_json(writer: TreeWriter, one: Departure) -> Json:
    """A Departure as JSON."""
    answers = [_answer_json(writer, answer) for answer in (one.recorded, one.new)]
    return [one.what, *answers, writer.source(one.source), one.kind, one.cure]


def read_departure(reader: TreeReader, json: Json) -> Departure:
    """The Departure that JSON is."""
    what, recorded, new, source, kind, cure = exactly(json, 6)
    was, now = reader.value(recorded), reader.value(new)
    return Departure(text(what), was, now, reader.source(source), text(kind), text(cure))


def _answer_json(writer: TreeWriter, answer: Any) -> Json:
    """What Python read; as it prints, where a file has no form for it."""
    if _is_plain(answer):
        with suppress(CannotSave):  # a number too large
            return writer.value(answer)
    return writer.value(str(answer))


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if isinstance(value, type):
        return value in CLASS_WORDS
    return type(value) in _PLAIN


_PLAIN = frozenset(
    (int, float, bool, str, type(None), complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
    + (torch.Size,)
)


def parts(json: Json, names: set[str]) -> dict[str, Json]:
    """The parts of a result, which are these."""
    given = mapping(json)
    if {*given} != names:
        bad("a result lacks a part, or has others")
    return given


def read_program(reader: TreeReader, json: Json) -> Any:
    """A program inside a result."""
    given = parts(json, {"kind", "body"})
    if given["kind"] not in ("program", MODEL_HISTORY):
        bad("a result is that of something else than a program")
    return read_object(reader, given)


# -- gradients ---------------------------------------------------------------------------------------------------------


def _write_grads(writer: TreeWriter, grads: Grads) -> Finished:
    """Gradients, with the graph of their program: by it layers are found, and missing gradients explained."""
    index = getattr(grads._find, "__self__", None)
    graph = index.graph if isinstance(index, LayerIndex) else grads.blockers.graph
    made = {"graph": graph_json(writer, graph), "grads": grads_json(writer, grads, graph)}
    return lambda: made


def _read_grads(reader: TreeReader, json: Json) -> Grads:
    given = parts(json, {"graph", "grads"})
    graph = read_graph(reader, given["graph"])
    grads = read_grads(reader, given["grads"], graph, LayerIndex(graph).find)
    return bad("the metric of gradients is no number") if grads.metric.is_meta else grads


# -- layers ------------------------------------------------------------------------------------------------------------


def _write_layer(writer: TreeWriter, layer: Layer) -> Finished:
    name, part = address_of(layer)
    finished = object_json(writer, layer._program)
    return lambda: {"program": finished(), "name": name, "part": part}


def _read_layer(reader: TreeReader, json: Json) -> Layer:
    given = parts(json, {"program", "name", "part"})
    program = read_program(reader, given["program"])
    part = optional(partial(items, least=1), given["part"])
    if part is not None and Ref(text(part[0]), tuple(map(natural, part[1:]))) not in specs_of(program.graph[part[0]]):
        bad("a layer is a part of what no node gives")
    return layer_at(program, text(given["name"]), part)


# -- programs of replaylens.compat -------------------------------------------------------------------------------------

MODEL_HISTORY = PROGRAMS[1]


class _ModelHistory:
    """Stands for the class of replaylens.compat where that was not imported: its files hold a program."""


def _write_history(writer: TreeWriter, prog: _ModelHistory) -> Finished:
    raise NotImplementedError


# ----------------------------------------------------------------------------------------------------------------------


register(Kind("gradients", Grads, _write_grads, _read_grads))
register(Kind("layer", Layer, _write_layer, _read_layer))
register(Kind(MODEL_HISTORY, _ModelHistory, _write_history, lambda reader, json: read_kind(reader, "program", json)))
torch.serialization.add_safe_globals([layer_at])
