"""A program as the text and the blocks of a file, and back: its graph, its values, its draws and its account.

In, to write: a Record, and what a Program adds to it. Out: a text and Blocks. In, to read: a Container, which may say
anything. Out: the same data, whose values lie in the memory of the file; every number in it was compared with the
graph. What needs the model (its class, its code, its own tensors) is not in a file: see bind.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, fields, frozen

from .._ir.autograd import history_of
from .._ir.capture_metadata import CaptureMetadata, ParameterInfo
from .._ir.graph import Graph
from .._ir.memory import storage_of, version_of
from .._ir.node import Call, Ref, State, TensorSpec, specs_of
from .._ir.trees import ADDRESS
from .._layers.index import LayerIndex
from .._replay.gradients import Grads
from .._replay.record import Record, Versions, always_kept, looks_at_memory, with_values
from .content import content_digest
from .grads import grads_json, read_grads
from .graphs import graph_json, read_graph
from .pool import Pool, dtype_named, generator_state, natural, sizes
from .read_trees import TreeReader, bad, exactly, flag, items, mapping, number, optional, text, texts
from .write_trees import TreeWriter

Json = Any


@frozen(eq=False)
class ProgramData:
    """What a file says of a program."""

    record: Record
    history: tuple[str, ...]
    has_values: bool = True  # else it was captured without computing
    grads: Grads | None = None  # of its backward pass
    digest: str = ""  # of what it computes; "" if it was not read from a file


# -- writing -----------------------------------------------------------------------------------------------------------


def program_json(writer: TreeWriter, data: ProgramData, left_out: Iterable[str] = ()) -> Callable[[], Json]:
    """What a file says of a program, without the state at these nodes. The tensors go to the writer's pool; the
    function gives the JSON once its blocks are known.
    """
    record = _with_what_must_be(data.record) if data.has_values else data.record
    record.require_steady()
    writer.pool.keeps_slack |= any(map(looks_at_memory, record.graph.calls))
    values = _without(record, left_out)
    rows = [(ref, _value_row(writer, record, ref)) for ref in values]
    made = {
        "graph": graph_json(writer, record.graph),
        "draws": [[key, writer.pool.add(state, f"draw/{key}")] for key, state in record.draws.items()],
        "account": _account_json(writer, record),
        "history": list(data.history),
        "saved": None if record.saved is None else sorted(record.saved),
        "has_values": data.has_values,
        "grads": None if data.grads is None else grads_json(writer, data.grads, record.graph),
    }
    positions = record.graph.positions

    def finished() -> Json:
        said = [[positions[ref.node], *([list(ref.path)] if ref.path else []), row] for ref, row in rows]
        known = writer.pool.sum_of
        digests = {name: b64encode(one).decode() for name, one in _state_digests(record, values, known).items()}
        return {**made, "values": said, "state": digests, "digest": program_digest(record, known)}

    return finished


def _with_what_must_be(record: Record) -> Record:
    """The record with the values of outputs and the like, which a slice of a program that saved little may lack."""
    kept = [ref for ref in always_kept(record.graph) if isinstance(record.graph[ref.node], Call)]
    return with_values(record, kept) if any(ref not in record.values for ref in kept) else record


def _value_row(writer: TreeWriter, record: Record, ref: Ref) -> Json:
    node = record.graph[ref.node]
    name = node.address if isinstance(node, State) else str(ref)
    with writer.writing(node):
        return writer.pool.add(record.values[ref], name, specs_of(node).get(ref))


def state_of_models(graph: Graph, persistent: Callable[[str], bool]) -> list[str]:
    """The nodes of state that a model, or its state_dict, has again: parameters, and buffers that are `persistent`.
    State that the forward writes is not among them, for a model has what came later.
    """
    return [
        node.name
        for node in graph.state_nodes
        if node.name not in graph.written_state
        and (node.kind == "parameter" or (node.kind == "buffer" and persistent(node.address)))
    ]


def _without(record: Record, names: Iterable[str]) -> dict[Ref, torch.Tensor]:
    """The values without the state at these nodes, and without what lies in its memory."""
    graph, left_out = record.graph, {*map(Ref, names)}
    if not left_out:
        return record.values
    held = {storage_of(record.values[ref]) for ref in left_out if ref in record.values} - {None}
    always = {*always_kept(graph)} - left_out

    def stays(ref: Ref, tensor: torch.Tensor) -> bool:
        return ref not in left_out and (ref in always or storage_of(tensor) not in held)

    return {ref: tensor for ref, tensor in record.values.items() if stays(ref, tensor)}


def _state_digests(record: Record, values: Mapping[Ref, torch.Tensor], known: KnownSum) -> dict[str, bytes]:
    """The digests of state that is not among these values, by node: whoever binds a model to the file can tell that it
    is the right one.
    """
    return {
        node.name: _digest_at(record, node.name, known)
        for node in record.graph.state_nodes
        if Ref(node.name) not in values
    }


def _digest_at(record: Record, name: str, known: KnownSum) -> bytes:
    if Ref(name) not in record.values:
        return record.absent.get(name, b"")
    tensor = record.value(Ref(name))  # which raises if it was overwritten
    return content_digest(tensor, known(tensor))


_SHOWN = re.compile(" at 0x[0-9a-fA-F]+")  # an address, as Python shows it
KnownSum = Callable[[torch.Tensor], "bytes | None"]


def program_digest(record: Record, known: KnownSum = lambda tensor: None) -> str:
    """A digest of what a program computes: its graph without lines of code, and the content of what it starts from. It
    is the same whichever values are kept, and whoever captured it. `known` gives digests that somebody has.
    """
    found = _graph_sum(record)
    for node in record.graph.nodes:
        if not isinstance(node, Call):
            found.update(_digest_at(record, node.name, known))
    for key, state in record.draws.items():
        found.update(key.encode() + content_digest(state, known(state)))
    return found.hexdigest()


def graph_digest(record: Record) -> str:
    """A digest of what a program computes, whatever it starts from, and whatever it draws."""
    return _graph_sum(record).hexdigest()


def _graph_sum(record: Record) -> Any:
    """The sum of a graph without lines of code."""
    pool = Pool()
    writer = TreeWriter(pool, with_sources=False, is_pickled=True)
    literals = tuple([(path, ADDRESS.sub(" at", _SHOWN.sub(" at", known))) for path, known in record.graph.literals])
    made = graph_json(writer, evolve(record.graph, model_name="", literals=literals))
    blocks = pool.blocks()
    found = hashlib.sha256(json.dumps([made, {name: table.rows for name, table in writer.tables.items()}]).encode())
    for block in blocks:
        found.update(block.sum)
    return found


def _account_json(writer: TreeWriter, record: Record) -> Json:
    account = record.account
    histories = {ref: known for ref, value in record.values.items() if (known := _history(record, ref, value))}
    gradients = {**histories, **account.gradients}
    given: dict[str, Json] = {
        "originals": {n: writer.name(target) for n, target in account.originals.items() if n in record.graph},
        "gradients": [[writer.ref(ref), word] for ref, word in gradients.items() if ref.node in record.graph],
        "nanoseconds": list(account.nanoseconds) if len(account.nanoseconds) == len(record.graph) else [],
        "modules": list(account.modules),
        "classes": list(account.classes),
        "unread": list(map(_parameter_row, account.unread)),
        "unread_buffers": list(map(_parameter_row, account.unread_buffers)),
        "untrained": sorted(account.untrained),
        "called_from": writer.source(account.called_from),
        "seed": account.seed,
        "began": account.began,
        "seconds": account.seconds,
    }
    return {name: value for name, value in given.items() if value not in (None, [], {})}


def _history(record: Record, ref: Ref, value: torch.Tensor) -> str | None:
    return history_of(value) if isinstance(record.graph[ref.node], Call) else None


def _parameter_row(one: ParameterInfo) -> Json:
    dtype = str(one.dtype).removeprefix("torch.")
    return [one.address, list(one.shape), dtype, one.is_trainable, list(one.aliases)]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_program(reader: TreeReader, json: Json) -> ProgramData:
    """What a file says of a program, if it fits together."""
    given = mapping(json)
    if {*given} != _PARTS:
        bad("the parts of a program are not those of this version")
    graph = read_graph(reader, given["graph"])
    has_values = flag(given["has_values"])
    values = _read_values(reader, graph, given["values"])
    draws = {}
    for row in items(given["draws"]):
        key, state = exactly(row, 2)
        draws[text(key)] = reader.pool.generator_state(state)
    digests = {name: b64decode(text(one), validate=True) for name, one in mapping(given["state"]).items()}
    saved = optional(lambda names: frozenset(texts(names)), given["saved"])
    record = Record(
        graph,
        values,
        Versions([(ref, version_of(tensor)) for ref, tensor in values.items()]),
        draws,
        account=_read_account(reader, graph, given["account"]),
        saved=saved,
        is_from_file=True,
        absent=digests,
    )
    if has_values:
        _require_whole(record, digests)
    elif values or draws:
        bad("a program that was captured without computing has values")
    grads = optional(lambda one: read_grads(reader, one, graph, LayerIndex(graph).find), given["grads"])
    digest = text(given["digest"])
    return ProgramData(record, texts(given["history"]) or bad("a program has no history"), has_values, grads, digest)


_PARTS = {"graph", "draws", "account", "history", "saved", "has_values", "grads", "values", "state", "digest"}


def _read_values(reader: TreeReader, graph: Graph, rows: Json) -> dict[Ref, torch.Tensor]:
    found: dict[Ref, torch.Tensor] = {}
    reader.pool.expect([row[-1] for row in items(rows) if type(row) is list and row])
    for row in rows:
        at, *path, place = items(row, 2, 3)
        if type(at) is not int or not 0 <= at < len(graph):
            bad("a value is said to be that of no node")
        node = graph.nodes[at]
        ref = Ref(node.name, tuple(map(natural, items(path[0]))) if path else ())
        spec = specs_of(node).get(ref)
        if spec is None or ref in found:
            bad(f"{ref} has two values, or is none of the program")
        tensor = reader.pool.tensor(place, spec)
        if len(place) > 3 and not _fits(tensor, spec):  # others are made as the spec says
            bad(f"{ref} is said to be {spec}, and has another value")
        found[ref] = generator_state(reader.pool.copied(tensor)) if at in graph.state_of else tensor
    return found


def _fits(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    mine = TensorSpec.of(tensor)
    return (mine.shape, mine.dtype, mine.layout) == (spec.shape, spec.dtype, spec.layout)


def _require_whole(record: Record, absent: Mapping[str, bytes]) -> None:
    """Raise unless a program has the values that nothing computes, and the draws that it makes."""
    graph = record.graph
    for ref in always_kept(graph):
        node = graph[ref.node]
        if ref not in record.values and not (isinstance(node, State) and node.name in absent):
            bad(f"{ref} has no value, and nothing computes it")
    if record.saved is None and not absent:
        missing = next((ref for node in graph.calls for ref in specs_of(node) if ref not in record.values), None)
        if missing is not None:
            bad(f"{missing} has no value, and all are said to be there")
    for call in graph.calls:
        if call.draws is not None and call.draws not in record.draws:
            bad(f"{call.name} draws from a state that is not there")
    if graph.left is not None and graph.left.fixed is not None and graph.left.fixed not in record.draws:
        bad("the generator is left in a state that is not there")


def _read_account(reader: TreeReader, graph: Graph, json: Json) -> CaptureMetadata:
    given = mapping(json)
    if not {*given} <= {one.name for one in fields(CaptureMetadata)}:
        bad("the account has parts that this version does not know")
    get = given.get
    modules, classes = texts(get("modules", [])), texts(get("classes", []))
    nanoseconds = [natural(one) for one in items(get("nanoseconds", []))]
    gradients = [
        (reader.ref(ref), text(word)) for ref, word in (exactly(row, 2) for row in items(get("gradients", [])))
    ]
    if len(modules) != len(classes) or len(nanoseconds) not in (0, len(graph)):
        bad("the account is one of another program")
    if not all(ref.node in graph for ref, _ in gradients) or not {*mapping(get("originals", {}))} <= {*graph.positions}:
        bad("the account is one of another program")
    return CaptureMetadata(
        seed=optional(_whole_number, get("seed")),
        began=float(number(get("began", 0.0))),
        seconds=float(number(get("seconds", 0.0))),
        nanoseconds=array("q", nanoseconds) if nanoseconds else (),
        originals=MappingProxyType({name: reader.name(at) for name, at in mapping(get("originals", {})).items()}),
        gradients=MappingProxyType(dict(gradients)),
        modules=modules,
        classes=classes,
        unread=_read_parameters(get("unread", [])),
        unread_buffers=_read_parameters(get("unread_buffers", [])),
        untrained=frozenset(texts(get("untrained", []))),
        called_from=reader.source(get("called_from")),
    )


def _whole_number(value: Json) -> int:
    if type(value) is not int:
        bad("the seed is no number")
    return value


def _read_parameters(rows: Json) -> tuple[ParameterInfo, ...]:
    found = []
    for row in items(rows):
        address, shape, dtype, trains, aliases = exactly(row, 5)
        found.append(ParameterInfo(text(address), sizes(shape), dtype_named(dtype), flag(trains), texts(aliases)))
    return tuple(found)
