"""Arguments, inputs and outputs as JSON: frozen trees, their leaves, and the facts that many nodes share.

In: trees of Refs and literals. Out: JSON in which numbers, texts, True, False and None stand for themselves, and
everything else is a list that begins with a word. Facts that recur (specs, scopes, lines of code, functions) are rows
of tables, each of which refers to earlier ones only. read_trees.py has the inverse of each function here.

Two kinds of places differ. What a call is given must come back as it was: what has no form here is refused, with the
node and its line. What only shows a structure, the inputs and outputs of models, is opened: an object of a user's class
becomes its name and its items.
"""

from __future__ import annotations

import linecache
import math
import re
from base64 import b64encode
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from attrs import define, field
from torch.nn.utils.rnn import PackedSequence

from .._edit.part import Part
from .._edit.patch_ops import PatchOperand, PatchStep
from .._ir.graph import Graph
from .._ir.node import Call, Context, Generator, Ref, Scope, Source, TensorSpec, scopes_beyond
from .._ir.struct import Struct, StructKeys, form_of, struct_word
from .._ir.target import Target
from .._ir.torch_private import pytree
from .._ir.trees import BackReference, Branch, attributes_of
from .._ir.write import DerivedView, Hole, TargetIndex, ViewStep, original_target
from ..errors import CannotSave
from .pool import Pool

Json = Any
Leaf = Callable[[Any], Json]
TABLES: tuple[str, ...] = ("files", "sources", "scopes", "contexts", "specs", "functions", "names")
LINES_AROUND = 3  # each line that ran an operation; of its callers the line alone is kept
_LONGEST_LINE = 1000  # characters of one
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # that steer a terminal

CLASSES: dict[str, type] = {  # that a file may name, and which come back as they are
    "torch.Tensor": torch.Tensor, "torch.nn.Parameter": torch.nn.Parameter, "int": int, "float": float, "bool": bool,
    "complex": complex, "str": str, "list": list, "tuple": tuple, "dict": dict, "set": set, "NoneType": type(None),
}  # fmt: skip
CLASS_WORDS = {kind: word for word, kind in CLASSES.items()}
CONTAINERS: dict[str, type] = {
    "OrderedDict": OrderedDict, "defaultdict": defaultdict, "deque": deque, "PackedSequence": PackedSequence,
    "mappingproxy": MappingProxyType, "list": list, "dict": dict, "tuple": tuple,
}  # fmt: skip
CONTAINERS |= {
    f"return_types.{name}": kind
    for name, kind in vars(torch.return_types).items()
    if isinstance(kind, type) and issubclass(kind, tuple)
}
CONTAINER_WORDS = {kind: word for word, kind in CONTAINERS.items()}
VIEWS: dict[str, type] = {"target": TargetIndex, "view": DerivedView, "step": ViewStep}
VIEW_WORDS = {kind: word for word, kind in VIEWS.items()}
MEMORY_FORMATS = {
    word: getattr(torch, word)
    for word in ("preserve_format", "contiguous_format", "channels_last", "channels_last_3d")
    if hasattr(torch, word)
}
LAYOUTS = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.layout)
}


@define(eq=False)
class Table:
    """Rows, each kept once, in the order in which they were asked for."""

    rows: list[Json] = field(factory=list)
    _numbers: dict[Any, int] = field(factory=dict)

    def number(self, key: Any, row: Callable[[], Json]) -> int:
        """The number of the row with this key."""
        known = self._numbers.get(key)
        if known is None:
            made = row()
            known = self._numbers[key] = len(self.rows)
            self.rows.append(made)
        return known


@define(eq=False)
class TreeWriter:
    """Writes trees. `pool` gets what tensors stand among them; `at` is the node that is written just now."""

    pool: Pool
    tables: dict[str, Table] = field(factory=lambda: {name: Table() for name in TABLES})
    at: Any = None
    callables: dict[str, Callable[..., Any]] = field(factory=dict)  # those that are named, by name
    is_pickled: bool = False  # else no function may be one of the script that runs
    with_sources: bool = True  # else lines of code are left out
    positions: Mapping[str, int] = field(factory=dict)  # of the nodes of the graph that is written just now
    graph: Callable[[Graph], Json] | None = None  # how a graph among arguments is written
    known_objects: dict[int, tuple[Any, int]] = field(factory=dict)  # in a structure: by id, and its number
    _within: set[int] = field(factory=set)  # the objects that are opened just now, by id
    _known_facts: dict[int, tuple[Any, int]] = field(factory=dict)  # scopes by id, and their numbers
    _known_lines: dict[int, tuple[Any, int | None]] = field(factory=dict)  # sources likewise, not those of callers

    # -- facts that many nodes share -----------------------------------------------------------------------------------

    def spec(self, spec: TensorSpec) -> int:
        """The number of a spec."""

        def row() -> Json:
            strides = None if spec.strides is None else list(spec.strides)
            made = [list(spec.shape), _word(spec.dtype), spec.device, strides]
            if spec.stored is None and spec.layout is torch.strided:
                return made
            return [*made, spec.stored, _word(spec.layout)]

        return self.tables["specs"].number(spec, row)

    def context(self, context: Context) -> int:
        """The number of the modes of a call."""
        autocast = [[device, _word(dtype), cached] for device, dtype, cached in context.autocast]
        row = [context.grad, context.inference, autocast, [[k, self.value(v)] for k, v in context.settings]]
        return self.tables["contexts"].number(repr(row), lambda: row)

    def source(self, source: Source | None) -> int | None:
        """The number of a line of code."""
        if source is None or not self.with_sources:
            return None
        if (known := self._known_lines.get(id(source))) is not None:
            return known[1]
        number: int | None = None
        for one in reversed(source.stack):
            row = [self._file(one, LINES_AROUND if one is source else 0), one.line, one.function, number]
            number = self.tables["sources"].number(tuple(row), lambda row=row: row)  # type: ignore[misc]
        self._known_lines[id(source)] = source, number
        return number

    def _file(self, source: Source, around: int) -> int:
        table = self.tables["files"]
        number = table.number(source.file, lambda: [source.file, {}])
        lines = table.rows[number][1]
        for near in range(max(1, source.line - around), source.line + around + 1):
            if str(near) not in lines:
                known = source.saved
                text = linecache.getline(source.file, near) if known is None else known.get(near, "")
                if text:
                    lines[str(near)] = CONTROLS.sub(" ", text.rstrip("\n"))[:_LONGEST_LINE]
        return number

    def scope(self, scope: Scope | None) -> int | None:
        """The number of a call of a module."""
        if scope is None:
            return None
        if (known := self._known_facts.get(id(scope))) is not None:
            return known[1]
        around, inner = scopes_beyond(self._known_facts, scope)
        number = None if around is None else self._known_facts[id(around)][1]
        for one in inner:
            row = [one.address, one.call, one.kind, number, self.source(one.source)]
            number = self.tables["scopes"].number(tuple(row), lambda row=row: row)  # type: ignore[misc]
            self._known_facts[id(one)] = one, number
        return number

    def target(self, target: Target) -> int:
        """The number of a function that a call runs."""
        if not target.is_stable:
            raise self.refused(f"runs {_shown(target)}, which cannot be found again by a name", _NAME_IT)
        if target.name.startswith("__main__.") and not self.is_pickled:
            raise self.refused(
                f"is given {_shown(target)} of the script itself, which no other process finds", _NAME_IT
            )
        self.callables[target.name] = target.function
        return self.tables["functions"].number(target.name, lambda: target.name)

    def name(self, target: Target) -> int:
        """The number of a function that is named and never run."""
        return self.tables["names"].number(target.name, lambda: target.name)

    # -- trees ---------------------------------------------------------------------------------------------------------

    def ref(self, ref: Ref) -> Json:
        """A Ref: the position of its node, and its path; by name where there is no such node."""
        position = self.positions.get(ref.node)
        return ["r", position, *ref.path] if position is not None else ["R", ref.node, *ref.path]

    def value(self, tree: Any) -> Json:
        """A tree of what a call is given."""
        kind = type(tree)
        if kind is Ref:
            return self.ref(tree)
        if kind in _PLAIN:
            return _plain(tree)
        if kind is tuple:
            return ["t", *map(self.value, tree)]
        if kind is Branch:
            return self._branch(tree)
        found = self._literal(tree)
        if found is None:
            found = self._of_replaylens(tree)
        if found is None and callable(tree) and not isinstance(tree, torch.Tensor):
            return self._function(tree)
        if found is None:
            raise self.refused(f"is given {_what(tree)}, for which a file has no form", _LEAVE_IT)
        return found

    def _branch(self, tree: Branch) -> Json:
        if tree.kind in VIEW_WORDS:
            return [VIEW_WORDS[tree.kind], *map(self.value, tree.items)]
        if tree.kind is dict:
            return ["d", [self.value(key) for key in tree.keys or ()], *map(self.value, tree.items)]
        if tree.kind is list or tree.kind is slice:
            return ["l" if tree.kind is list else "s", *map(self.value, tree.items)]
        if issubclass(tree.kind, tuple) and tree.kind not in CONTAINER_WORDS:
            self._require_torchs(tree.kind)
            return ["t", *map(self.value, tree.items)]  # a named one: torch reads it as a tuple
        return self._container(tree, self.value)

    def _literal(self, leaf: Any) -> Json:
        kind = type(leaf)
        if kind in _LITERALS:
            return _LITERALS[kind](leaf)
        if isinstance(leaf, type) and leaf in CLASS_WORDS:
            return ["class", CLASS_WORDS[leaf]]
        if kind.__module__ == "numpy":
            return self._of_numpy(leaf)
        if kind is list or kind is dict:
            items = leaf.values() if kind is dict else leaf
            made = [self.value(one) for one in items]
            return ["L", *made] if kind is list else ["D", [self.value(key) for key in leaf], *made]
        if isinstance(leaf, (bool, int, float, str)):  # of a class of the user's: torch reads it as a number
            self._require_torchs(kind)
            base = next(base for base in (bool, int, float, str) if isinstance(leaf, base))
            return _plain(base(leaf))
        return None

    def _require_torchs(self, kind: type) -> None:
        """Raise unless the call that is given something of this class is torch's, which does not ask for the class."""
        target = original_target(self.at) if isinstance(self.at, Call) else getattr(self.at, "target", None)
        if target is None or not target.name.startswith(("torch.", "replaylens.")) or target.is_of_a_library:
            raise self.refused(
                f"is given a {kind.__qualname__}, and may ask for its class, which no file holds", _LEAVE_IT
            )

    def _of_numpy(self, leaf: Any) -> Json:
        if type(leaf).__name__ == "ndarray":
            try:
                tensor = torch.from_numpy(leaf.copy())
            except TypeError:
                return None
            return ["array", self.pool.add(tensor, self._place())]
        number = leaf.item() if hasattr(leaf, "item") else None
        return ["numpy", leaf.dtype.name, _plain(number)] if type(number) in _PLAIN else None

    def _of_replaylens(self, leaf: Any) -> Json:
        kind = type(leaf)
        if kind is Hole:
            return ["hole"]
        if kind is Target:
            return ["F", self.target(leaf)]
        if kind is Generator:
            return ["generator", leaf.key]
        if kind is Part:
            return self.part(leaf)
        if kind is PatchStep:
            pairs = [[key, self.value(value)] for key, value in leaf.kwargs]
            return ["patch", self.target(leaf.target), [self.value(arg) for arg in leaf.args], pairs]
        if kind is PatchOperand:
            return ["operand", leaf.number]
        if isinstance(leaf, Graph) and self.graph is not None:
            return ["graph", self.graph(leaf)]
        return None

    def part(self, part: Part) -> Json:
        """A part of a tensor."""
        indices = [
            [name, list(index) if isinstance(index, tuple) else self.value(index)] for name, index in part.indices
        ]
        return ["part", part.pattern, indices, [list(pair) for pair in part.sizes_given]]

    def _function(self, function: Any) -> Json:
        target = Target.of(function)
        if not target.is_stable:
            raise self.refused(f"is given {_shown(target)}, which cannot be found again by a name", _NAME_IT)
        return ["f", self.target(target)]

    # -- structures: inputs and outputs of models ----------------------------------------------------------------------

    def structure(self, tree: Any, leaf: Leaf | None = None) -> Json:
        """A tree of inputs or outputs, with `leaf` for what is no container. What occurs twice is written once."""
        before, self.known_objects = self.known_objects, {}
        try:
            return self._opened(tree, leaf or self._inert)
        finally:
            self.known_objects = before

    def _opened(self, tree: Any, leaf: Leaf) -> Json:
        kind = type(tree)
        if kind is tuple:
            return ["t", *[self._opened(item, leaf) for item in tree]]
        if kind in _WITHOUT_IDENTITY or isinstance(tree, type):
            return leaf(tree)
        if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and (made := self._of_numpy(tree)) is not None:
            return made
        number = len(self.known_objects)
        if id(tree) in self._within:  # it holds itself: within it stands its name
            self.known_objects[-1 - number] = tree, number
            return ["object", [*class_name(kind), form_of(kind)], [], []]
        if (known := self.known_objects.get(id(tree))) is not None:
            return ["same", known[1]]
        self.known_objects[id(tree)] = tree, number
        if kind is not Branch:
            return leaf(tree)
        return self._container(tree, lambda item: self._opened(item, leaf))

    def _container(self, tree: Branch, write: Leaf) -> Json:
        """A container: a word for its class, or the name and form of a user's; keys, items and the rest."""
        keys, like = tree.keys, tree.like
        more: dict[str, Json] = {}
        if tree.loop is not None:
            more["loop"] = tree.loop
        if tree.count is not None:
            more["count"] = tree.count
        if tree.kind is slice:
            return ["s", *map(write, tree.items)]
        if tree.kind in CONTAINER_WORDS and tree.count is None:
            words: Json = CONTAINER_WORDS[tree.kind]
            if tree.kind is OrderedDict:
                keys = like.context
            elif tree.kind is defaultdict:
                more["factory"] = CLASS_WORDS.get(like.context[0], "")
                keys = like.context[1]
            elif tree.kind is deque:
                more["most"] = like.context
        else:
            words = [*class_name(tree.kind), form_of(tree.kind)]
            keys, hidden = _struct_keys(tree)
            if hidden:
                more["hidden"] = 1
        made = [
            "c",
            words,
            None if keys is None else [self.structure(key) for key in keys],
            list(map(write, tree.items)),
        ]
        return [*made, more] if more else made

    def _inert(self, leaf: Any) -> Json:
        """A leaf of a structure. What no form is known for is said by the name of its class, and its attributes."""
        kind = type(leaf)
        if kind is Ref:
            return self.ref(leaf)
        if kind in _PLAIN:
            return _plain(leaf)
        if kind is BackReference:
            return ["<", leaf.loop]
        if isinstance(leaf, type):
            return ["class", CLASS_WORDS[leaf]] if leaf in CLASS_WORDS else ["class", *class_name(leaf)]
        if kind in _LITERALS:
            return _LITERALS[kind](leaf)
        if (kind is set or kind is frozenset) and len(leaf) < 2:  # the order of others is not that of other processes
            return ["set" if kind is set else "frozenset", *map(self._inert, leaf)]
        if kind.__module__ == "numpy" and (made := self._of_numpy(leaf)) is not None:
            return made
        self._within.add(id(leaf))
        try:
            if kind is list:
                return ["L", *[self._opened(item, self._inert) for item in leaf]]
            if kind is dict:
                keys = [self._opened(key, self._inert) for key in leaf]
                return ["D", keys, *[self._opened(item, self._inert) for item in leaf.values()]]
            return self._object(leaf)
        finally:
            self._within.discard(id(leaf))

    def _object(self, leaf: Any) -> Json:
        if isinstance(leaf, Struct):
            pairs, form = list(zip(leaf._keys, leaf._items, strict=True)), leaf._form
        else:
            pairs = [] if callable(leaf) or isinstance(leaf, torch.nn.Module) else attributes_of(leaf)
            form = form_of(type(leaf))
            if isinstance(leaf, Mapping):
                pairs = [*leaf.items(), *pairs]
            elif form == "sequence":
                pairs = [*enumerate(leaf), *pairs]
        if len(self._within) > _DEEPEST or len(self.known_objects) > _MOST_OBJECTS:
            pairs = []  # more than anybody would look at
        kind = leaf if callable(leaf) and hasattr(leaf, "__qualname__") else type(leaf)
        keys = [self._opened(key, self._inert) for key, _ in pairs]
        return ["object", [*class_name(kind), form], keys, [self._opened(item, self._inert) for _, item in pairs]]

    # -- errors --------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, node: Any) -> Iterator[None]:
        """A block in which this node is written, for errors."""
        before, self.at = self.at, node
        try:
            yield
        finally:
            self.at = before

    def _place(self) -> str:
        return getattr(self.at, "name", "") or "a value"

    def refused(self, fact: str, cure: str) -> CannotSave:
        """The error: which node, which line, and what to do."""
        node = self.at
        source = getattr(node, "source", None)
        line = f"\n{source.indented}" if source is not None else ""
        return CannotSave(f"{self._place()} {fact}.{line}\n{cure}")


_NAME_IT = "Define the function in a module, with `def`, and give that one: a file holds its name."
_LEAVE_IT = "Save a slice of the program without this node: prog.slice(to=...)."
_MOST_OBJECTS, _DEEPEST = 5_000, 8


def _plain(value: Any) -> Json:
    """A number, text, truth value or None."""
    if type(value) is float and not math.isfinite(value):
        return ["float", repr(value)]
    if type(value) is int and not -(2**62) < value < 2**62:
        if value.bit_length() > 256:
            raise CannotSave(f"a number has {value.bit_length()} bits; a file holds up to 256.")
        return ["int", hex(value)]
    return value


_PLAIN = frozenset((int, float, bool, str, type(None)))


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")


_LITERALS: dict[type, Callable[[Any], Json]] = {
    complex: lambda value: ["complex", _plain(value.real), _plain(value.imag)],
    bytes: lambda value: ["bytes", b64encode(value).decode()],
    type(...): lambda value: ["..."],
    torch.dtype: lambda value: ["dtype", _word(value)],
    torch.device: lambda value: ["device", str(value)],
    torch.layout: lambda value: ["layout", _word(value)],
    torch.memory_format: lambda value: ["format", _word(value)],
    torch.Size: lambda value: ["size", *value],
    range: lambda value: ["range", value.start, value.stop, value.step],
    slice: lambda value: ["S", _plain(value.start), _plain(value.stop), _plain(value.step)],
}


_WITHOUT_IDENTITY = _PLAIN | {Ref, BackReference, *_LITERALS}  # what a reader does not number


def _struct_keys(tree: Branch) -> tuple[tuple[Any, ...] | None, bool]:
    """The keys of a user's container, and whether they are hidden: a tree of it shows numbers."""
    if tree.keys is not None:
        return tree.keys, False
    if isinstance(tree.like, StructKeys):
        return tree.like.keys, True
    names = getattr(tree.kind, "_fields", None)
    if names is not None and len(names) == len(tree.items):
        return tuple(names), True
    context = tree.like.context if isinstance(tree.like, pytree.TreeSpec) else None
    is_named = isinstance(context, (list, tuple)) and len(context) == len(tree.items)
    return (tuple(context or ()) if is_named else tuple(range(len(tree.items)))), True


def class_name(kind: Any) -> tuple[str, str]:
    """Module and name of a class, as a Struct bears them."""
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)
    return struct_word(module), struct_word(name)


def _shown(target: Target) -> str:
    words = target.name.rpartition(".")[2]
    if "lambda" in words:
        return "a lambda"
    return f"`{words}`" if words.isidentifier() else f"a {type(target.function).__name__}"


def _what(value: Any) -> str:
    name = type(value).__qualname__
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"
