"""A Graph as JSON, and back: a short row for each node, and by name what few graphs have.

In, to write: a Graph. Out: JSON, in which nodes refer to each other by position. In, to read: such JSON, which may say
anything. Out: a Graph that obeys the laws of validate.py, or BadFile, or UnlawfulGraph. What is at its default is not
written, so that fields which come later change no file of before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from attrs import fields

from .._ir.graph import Graph, InnerGradient
from .._ir.memory import NO_OVERLAPS, Overlaps
from .._ir.node import Call, Const, GeneratorLeft, Guard, Input, Node, Ref, Scope, State
from .._ir.settings import DEFAULT_DTYPES
from .._ir.validate import require_sound
from .._ir.write import Write
from .pool import device_named, dtype_named, natural
from .read_trees import TreeReader, bad, exactly, flag, items, line, mapping, optional, text, texts
from .write_trees import CLASS_WORDS, CLASSES, TreeWriter, class_name

Json = Any
_CALLS: dict[str, type[Call]] = {"call": Call, "write": Write, "gradient": InnerGradient}
_CALL_WORDS = {kind: word for word, kind in _CALLS.items()}


class FieldForm(NamedTuple):
    """How a field is written and read."""

    write: Callable[[TreeWriter, Any], Json]
    read: Callable[[TreeReader, Json], Any]


def _pair_of(row: Json) -> list[Json]:
    return exactly(row, 2)


def _module(reader: TreeReader, at: Json) -> Scope:
    return reader.scope(at) or bad("an output is that of no module")


def _refs(writer: TreeWriter, refs: Any) -> Json:
    return sorted([writer.ref(ref) for ref in refs], key=repr)


def _pairs(reader: TreeReader, json: Json) -> frozenset[tuple[str, str]]:
    return frozenset([(text(one), text(other)) for one, other in (exactly(row, 2) for row in items(json))])


FLAG = FieldForm(lambda writer, value: value, lambda reader, json: flag(json))
TEXT = FieldForm(lambda writer, value: value, lambda reader, json: text(json))
TEXTS = FieldForm(lambda writer, value: list(value), lambda reader, json: texts(json))
NAMES = FieldForm(lambda writer, value: sorted(value), lambda reader, json: frozenset(texts(json)))
REFS = FieldForm(_refs, lambda reader, json: frozenset([reader.ref(one) for one in items(json)]))
CONTEXT = FieldForm(lambda writer, value: writer.context(value), lambda reader, json: reader.context(json))
SPEC = FieldForm(lambda writer, value: writer.spec(value), lambda reader, json: reader.spec(json))
TREE = FieldForm(lambda writer, value: writer.value(value), lambda reader, json: reader.value(json))
NAMED_TREES = FieldForm(
    lambda writer, value: [[key, writer.value(tree)] for key, tree in value],
    lambda reader, json: tuple([(text(k), reader.value(v)) for k, v in (exactly(row, 2) for row in items(json))]),
)
SCOPE = FieldForm(lambda writer, value: writer.scope(value), lambda reader, json: reader.scope(json))
SOURCE = FieldForm(lambda writer, value: writer.source(value), lambda reader, json: reader.source(json))
STRUCTURE = FieldForm(lambda writer, value: writer.structure(value), lambda reader, json: reader.structure(json))

CALL_FIELDS: dict[str, FieldForm] = {
    "kwargs": NAMED_TREES,
    "result": TREE,
    "draws": TEXT,
    "follows": TEXT,
    "is_seeded": FLAG,
    "is_dynamic": FLAG,
    "through": TEXTS,
    "is_overwritten": FLAG,
    "is_differentiated": FLAG,
    "is_shared": FLAG,
    "has_duplicate_outputs": FLAG,
    "edited": TEXT,
    "edits": TEXT,
}
GUARD_FIELDS: dict[str, FieldForm] = {
    "kwargs": NAMED_TREES,
    "result": TREE,
    "has_result": FLAG,
    "kind": TEXT,
    "position": FieldForm(lambda writer, value: value, lambda reader, json: natural(json)),
    "taken": SOURCE,
    "scope": SCOPE,
    "source": SOURCE,
}


# -- nodes -------------------------------------------------------------------------------------------------------------


def _given(writer: TreeWriter, node: Any, forms: dict[str, FieldForm]) -> dict[str, Json]:
    """The fields that are not at their defaults, by name."""
    defaults = _DEFAULTS[type(node)]
    found = {}
    for name, form in forms.items():
        value = getattr(node, name)
        if value is not defaults[name] and not (type(value) is type(defaults[name]) and value == defaults[name]):
            found[name] = form.write(writer, value)
    return {name: json for name, json in found.items() if json is not None}  # a line of code that is left out


def _read_given(reader: TreeReader, json: Json, forms: dict[str, FieldForm]) -> dict[str, Any]:
    given = mapping(json)
    if unknown := given.keys() - forms.keys():
        bad(f"has {min(unknown)!r:.40}, which this version does not know")
    return {name: forms[name].read(reader, value) for name, value in given.items()}


_DEFAULTS: dict[type, dict[str, Any]] = {
    kind: {one.name: one.default for one in fields(kind)} for kind in (Call, Write, InnerGradient, Guard)
}


def _node_row(writer: TreeWriter, node: Node) -> Json:
    with writer.writing(node):
        if isinstance(node, Call):
            return _call_row(writer, node)
        if isinstance(node, Input):
            kind = node.python_type
            known = None if kind is None else CLASS_WORDS.get(kind) or list(class_name(kind))
            return ["input", node.name, writer.structure(node.path), writer.spec(node.spec), known]
        if isinstance(node, State):
            row = ["state", node.name, node.kind, writer.spec(node.spec)]
            aliases = list(node.aliases)
            return row if node.name == node.address and not aliases else [*row, node.address, aliases]
        return ["const", node.name, node.origin, writer.spec(node.spec), writer.source(node.source)]


def _call_row(writer: TreeWriter, node: Call) -> Json:
    row = [
        _CALL_WORDS[type(node)], node.name, node.kind, writer.target(node.target), list(map(writer.value, node.args)),
        [writer.spec(spec) for spec in node.spec], writer.context(node.context), writer.scope(node.scope),
        writer.source(node.source),
    ]  # fmt: skip
    more = _given(writer, node, CALL_FIELDS)
    if node.returns != Ref(node.name):
        more["returns"] = writer.value(node.returns)
    return [*row, more] if more else row


def _read_node(reader: TreeReader, row: Json, name: str) -> Node:
    word = row[0]
    if type(word) is str and word in _CALLS:
        return _read_call(reader, row, name)
    if word == "input":
        _, _, path, spec, kind = exactly(row, 5)
        steps = reader.structure(path)
        if type(steps) is not tuple:
            bad("an input has no path")
        steps = tuple([line(step) if type(step) is str else natural(step) for step in steps])
        return Input(name, steps, reader.spec(spec), optional(partial(_python_type, reader), kind))
    if word == "state":
        _, _, kind, spec, *where = items(row, 4, 6)
        address, aliases = exactly(where, 2) if where else (name, [])
        if kind not in ("parameter", "buffer", "attribute"):
            bad(f"{kind!r:.40} is no kind of state")
        return State(name, line(address), kind, reader.spec(spec), texts(aliases))
    if word != "const":
        bad(f"{word!r:.40} is no kind of node")
    _, _, origin, spec, source = exactly(row, 5)
    return Const(name, text(origin), reader.spec(spec), reader.source(source))


def _read_call(reader: TreeReader, row: Json, name: str) -> Call:
    word, _, kind, target, args, specs, context, scope, source, *rest = items(row, 9, 10)
    more = dict(mapping(rest[0])) if rest else {}
    returns = reader.value(more.pop("returns")) if "returns" in more else Ref(name)
    return _CALLS[word](
        name,
        line(kind),
        reader.target(target),
        tuple(map(reader.value, items(args))),
        returns=returns,
        spec=tuple(map(reader.spec, items(specs))),
        context=reader.context(context),
        scope=reader.scope(scope),
        source=reader.source(source),
        **_read_given(reader, more, CALL_FIELDS),
    )


def _python_type(reader: TreeReader, json: Json) -> type:
    if type(json) is str:
        return CLASSES[json] if json in CLASSES else bad(f"{json!r:.40} is no class of tensors")
    module, name = exactly(json, 2)
    return reader.room.name_class(text(module), text(name), "object")


# -- guards ------------------------------------------------------------------------------------------------------------


def _guard_row(writer: TreeWriter, guard: Guard) -> Json:
    with writer.writing(guard):
        named = guard.compares_content or guard.kind in ("shape", "completion")
        target = ["named", writer.name(guard.target)] if named else writer.target(guard.target)
        return [target, list(map(writer.value, guard.args)), _given(writer, guard, GUARD_FIELDS)]


def _read_guard(reader: TreeReader, row: Json) -> Guard:
    target, args, given = exactly(row, 3)
    more = _read_given(reader, given, GUARD_FIELDS)
    named = type(target) is list
    function = reader.name(exactly(target, 2)[1]) if named else reader.target(target)
    guard = Guard(function, tuple(map(reader.value, items(args))), **more)
    if named and not (guard.compares_content or guard.kind in ("shape", "completion")):
        bad("a fact is to be asked of a function that is known by its name alone")
    return guard


# -- the graph ---------------------------------------------------------------------------------------------------------


def _overlaps_json(writer: TreeWriter, value: Overlaps) -> Json:
    return [sorted(map(list, value.same)), sorted(map(list, value.meeting)), sorted(value.touched)]


def _read_overlaps(reader: TreeReader, json: Json) -> Overlaps:
    same, meeting, touched = exactly(json, 3)
    return Overlaps(_pairs(reader, same), _pairs(reader, meeting), frozenset(texts(touched)))


def _read_left(reader: TreeReader, json: Json) -> GeneratorLeft:
    follows, fixed = exactly(json, 2)
    return GeneratorLeft(optional(text, follows), optional(text, fixed))


GRAPH_FIELDS: dict[str, FieldForm] = {
    "inputs": STRUCTURE,
    "guards": FieldForm(
        lambda writer, value: [_guard_row(writer, one) for one in value],
        lambda reader, json: tuple([_read_guard(reader, row) for row in items(json)]),
    ),
    "asked": FieldForm(
        lambda writer, value: [_guard_row(writer, one) for one in value],
        lambda reader, json: tuple([_read_guard(reader, row) for row in items(json)]),
    ),
    "module_outputs": FieldForm(
        lambda writer, value: [[writer.scope(scope), writer.structure(tree)] for scope, tree in value],
        lambda reader, json: tuple(
            [(_module(reader, scope), reader.structure(tree)) for scope, tree in map(_pair_of, items(json))]
        ),
    ),
    "changes": FieldForm(
        lambda writer, value: [[address, writer.ref(ref)] for address, ref in value],
        lambda reader, json: tuple([(text(k), reader.ref(v)) for k, v in (exactly(row, 2) for row in items(json))]),
    ),
    "replaced": NAMES,
    "recomputed_writes": TEXTS,
    "removed": TEXTS,
    "path_varies": TEXTS,
    "collects": FLAG,
    "altered": TEXTS,
    "orphans": NAMES,
    "written": REFS,
    "asks_identity": FLAG,
    "catches": FLAG,
    "is_deep": FLAG,
    "detached_inputs": REFS,
    "shares_inputs": FLAG,
    "overlaps": FieldForm(_overlaps_json, _read_overlaps),
    "literals": FieldForm(
        lambda writer, value: [[writer.structure(path), known] for path, known in value],
        lambda reader, json: tuple(
            [(reader.structure(path), text(known)) for path, known in (exactly(row, 2) for row in items(json))]
        ),
    ),
    "takes_any_keyword": FLAG,
    "forward_only": TEXTS,
    "other_random_sources": TEXTS,
    "generator_read": TEXTS,
    "left": FieldForm(lambda writer, value: [value.follows, value.fixed], _read_left),
    "outer_modes": CONTEXT,
    "default_dtype": FieldForm(
        lambda writer, value: str(value).removeprefix("torch."), lambda reader, json: dtype_named(json)
    ),
    "default_device": FieldForm(lambda writer, value: value, lambda reader, json: str(device_named(json))),
    "model_name": TEXT,
    "twice": FieldForm(
        lambda writer, value: list(map(list, value)),
        lambda reader, json: tuple([(text(k), text(v)) for k, v in (exactly(row, 2) for row in items(json))]),
    ),
    "unread": NAMES,
}
_DEFAULTS[Graph] = {one.name: one.default for one in fields(Graph)} | {"overlaps": NO_OVERLAPS}


def graph_json(writer: TreeWriter, graph: Graph) -> Json:
    """A graph as JSON."""
    before = writer.positions
    writer.positions, writer.graph = graph.positions, lambda inner: graph_json(writer, inner)
    try:
        nodes = [_node_row(writer, node) for node in graph.nodes]
        with writer.writing(None):
            return {"nodes": nodes, "output": writer.structure(graph.output), **_given(writer, graph, GRAPH_FIELDS)}
    finally:
        writer.positions = before


_MOST_NAMES = 100_000  # that the other addresses of shared modules make, one for each of their calls


def read_graph(reader: TreeReader, json: Json) -> Graph:
    """The graph that JSON is, if it is a lawful one."""
    given = dict(mapping(json))
    rows, output = items(given.pop("nodes", None)), given.pop("output", None)
    before = reader.names
    reader.room.text += 500 * len(rows)
    reader.names, reader.graph = [line(items(row, 2)[1]) for row in rows], lambda inner: read_graph(reader, inner)
    try:
        names: Sequence[str] = reader.names
        nodes = tuple([_read_node(reader, row, name) for row, name in zip(rows, names, strict=True)])
        graph = Graph(nodes, reader.structure(output), **_read_given(reader, given, GRAPH_FIELDS))
    finally:
        reader.names = before
    if graph.default_dtype not in DEFAULT_DTYPES:
        bad("the default dtype is none that can be one")
    others = Counter([first for _, first in graph.twice])
    if sum([others[scope.address] for scope, _ in graph.module_outputs]) > _MOST_NAMES:
        bad("modules have more names than anybody gives")
    return require_sound(graph)
