"""Interventions as JSON, and back: patches, mappings of them, selections and edits.

In, to write: what `prog.replay(patch=...)` takes, a Selection, or Edits. Out: JSON, in which texts and plain numbers
stand for themselves and everything else is a list that begins with a word; tensors go to the writer's pool. A program,
or a layer of one, is written as its digest, see references.py. In, to read: the same, which may say anything. Out:
objects that equal those that were written. A function is its name, and read as those of programs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from types import EllipsisType, MappingProxyType, NoneType
from typing import Any

import torch
from attrs import define, field, fields, frozen

from .._edit.edges import Edge
from .._edit.edit import Edit
from .._edit.part import Part
from .._edit.patch import (
    Add,
    Apply,
    Chain,
    Clamp,
    From,
    Mean,
    Noise,
    Patch,
    Project,
    Resample,
    Rotate,
    Scale,
    Set,
    Zero,
)
from .._edit.select import Selection, Where, selection_of
from .._ir.target import Target
from .._ir.torch_private import is_wrapped
from .._ir.value_source import ValueSource
from .._layers.layer import Layer, address_of, layer_at
from .._replay.supply import Run
from ..errors import CannotSave, UnboundReference
from .objects import Kind, register
from .read_trees import TreeReader, bad, exactly, items, mapping, text, texts
from .references import Named, References, is_program
from .write_trees import TreeWriter

Json = Any
_MOST = 2**62  # beyond which a number in JSON is a text
_LEAVES = (
    *(bool, int, float, complex, str, bytes, NoneType, slice, range, EllipsisType, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_WORDS_OF_LEAVES = frozenset("float int complex bytes numpy S range ... size dtype device layout format".split())
_NO_PATCHES = (str, Selection, Where, Edge, Part)  # which stand elsewhere
_IN_GENERAL = "A file holds patches, tensors, numbers, names of layers and of functions, and lists of these."


# -- writing -----------------------------------------------------------------------------------------------------------


@frozen
class _Place:
    """What is written just now, as errors name it."""

    name: str


@define(eq=False)
class _Writer:
    """Writes one object. `name` of a value is what viewers of the file show its tensors as."""

    trees: TreeWriter
    named: Named = field(factory=Named)

    def value(self, what: Any, name: str) -> Json:
        """Anything that stands in a patch, a mapping of them, or an edit."""
        if type(what).__module__ == "numpy" and hasattr(what, "dtype") and not isinstance(what, str):
            return self._of_numpy(what, name)
        for kinds, write in _FORMS:
            if isinstance(what, kinds):
                return write(self, what, name)
        if callable(what):
            return ["function", self._function(what)]
        raise self.refused(f"holds {_described(what)}, for which a file has no form", _IN_GENERAL)

    def refused(self, fact: str, cure: str) -> CannotSave:
        """The error for what is written just now."""
        return self.trees.refused(fact, cure)

    def leaf(self, what: Any, name: str) -> Json:
        """A number, a text, or another literal."""
        if isinstance(what, (slice, range)):
            ends = [None if end is None else index(end) for end in (what.start, what.stop, what.step)]
            self._require_modest(what, ends)
            what = slice(*ends) if isinstance(what, slice) else what
        return self.trees.value(str.__str__(what) if isinstance(what, str) else what)

    def _require_modest(self, what: Any, numbers: list[int | None]) -> None:
        if not all(map(_is_modest, numbers)):
            raise self.refused(f"counts up to more than 2 ** 62: {what}", "No tensor has so many numbers.")

    def tensor(self, tensor: torch.Tensor, name: str) -> Json:
        """A tensor."""
        try:
            return ["tensor", self.trees.pool.add(tensor, name)]
        except CannotSave:
            if is_wrapped(tensor):
                raise
            shown = _described(tensor) if type(tensor) is not torch.Tensor else f"a tensor of {tensor.layout}"
            cure = "Give a plain one: `tensor.as_subclass(torch.Tensor)`, or its numbers."
            raise self.refused(f"holds {shown}, and a file holds plain tensors", cure) from None

    def _of_numpy(self, what: Any, name: str) -> Json:
        if type(what).__name__ != "ndarray" and what.dtype.kind in "biuf":
            return self.leaf(what, name)
        try:
            return ["array", self.trees.pool.add(torch.from_numpy(what.copy()), name)]
        except (TypeError, ValueError):  # of objects, of dates, with its bytes in another order
            fact = f"holds {_described(what)} of {what.dtype}, for which a file has no form"
            raise self.refused(fact, _IN_GENERAL) from None

    def patch(self, patch: Patch, name: str) -> Json:
        """A patch: the name of its class, and its fields by name, without those that are None."""
        word = type(patch).__name__
        if PATCHES.get(word) is not type(patch):
            known = ", ".join(PATCHES)
            raise self.refused(f"is {_described(patch)}, a class that files do not know", f"They know {known}.")
        given = {one.name: getattr(patch, one.name) for one in fields(type(patch))}
        return [word, {key: self.value(one, f"{name}.{key}") for key, one in given.items() if one is not None}]

    def part(self, part: Part, name: str) -> Json:
        """A part of a tensor."""
        self._require_modest(part, _numbers_in(part))
        return self.trees.part(part)

    def program(self, program: Any, name: str) -> Json:
        """A program, or a run: what a patch takes its values from."""
        if isinstance(program, Run):
            cure = "Give its value, `run['relu_1']`; or the program with these patches, `prog.with_patch(...)`."
            raise self.refused("takes its values from a run, which has no digest to be found again by", cure)
        return ["program", self._number(program)]

    def _number(self, program: Any) -> int:
        if not is_program(program):
            raise self.refused(f"refers to {_described(program)}, which is no program", "Give its values.")
        return self.named.number(program, self.trees.at.name)

    def layer(self, layer: Layer, name: str) -> Json:
        """A layer: its program, and where it lies there."""
        if layer._program is None:
            raise self.refused(f"refers to {layer.label}, a layer of no program", "Take it from one: prog[name].")
        where, part = address_of(layer)
        return ["layer", self._number(layer._program), where, *([] if part is None else [list(part)])]

    def selection(self, selection: Selection, name: str) -> Json:
        """A selection: its program, and the labels."""
        return ["selection", self._number(selection.program), list(selection.labels)]

    def where(self, where: Where, name: str) -> Json:
        """A predicate."""
        return ["where", self._function(where.predicate)]

    def edge(self, edge: Edge, name: str) -> Json:
        """An edge."""
        if not _is_end(edge.sender) or not _is_end(edge.receiver):
            raise self.refused(f"is for {edge!r}, whose ends are no names of layers", _IN_GENERAL)
        return ["edge", self.value(edge.sender, name), self.value(edge.receiver, name)]

    def sequence(self, what: list[Any] | tuple[Any, ...], name: str) -> Json:
        """A list or a tuple."""
        word = "list" if isinstance(what, list) else "tuple"
        return [word, *[self.value(one, f"{name}.{number}") for number, one in enumerate(what)]]

    def mapping(self, what: Mapping[Any, Any], name: str) -> Json:
        """A mapping, within another object."""
        return ["dict", self.pairs(what, name)]

    def pairs(self, what: Mapping[Any, Any], name: str = "") -> Json:
        """The keys and values of a mapping of patches."""
        return [self._pair(key, value, name) for key, value in what.items()]

    def _pair(self, key: Any, value: Any, name: str) -> Json:
        inner = f"{name}.{key}" if name else str(key)
        place = f"{self.trees.at.name}, at {key!r:.100}," if name else f"the patch at {key!r:.100}"
        with self.trees.writing(_Place(place)):
            if not _is_key(key) and type(key).__module__ != "numpy":
                raise self.refused(f"has {_described(key)} for a key, which names no layer", _IN_GENERAL)
            if not name and isinstance(value, _NO_PATCHES):
                raise self.refused(f"is {value!r:.60}, which is no patch", "Give a patch, such as rl.Zero().")
            if not name and is_program(value):
                cure = "Save programs one by one, `prog.save(path)`; if you mean a patch, write rl.From(prog)."
                raise self.refused("is a program, which a mapping of patches would only name", cure)
            return [self.value(key, inner), self.value(value, inner)]

    def edit(self, edit: Edit, name: str) -> Json:
        """An edit: its method, and what it was given."""
        with self.trees.writing(_Place(f"the edit {edit!r:.100}")):
            args = [self.value(one, f"{name}.{number}") for number, one in enumerate(edit.args)]
            return [edit.method, args, {key: self.value(one, f"{name}.{key}") for key, one in edit.kwargs.items()}]

    def _function(self, function: Callable[..., Any]) -> int:
        if isinstance(function, torch.nn.Module):
            raise self.refused(
                f"holds {_described(function)}, a module, and a file holds functions by their names",
                "Give a function, or keep the edited program: prog.save(path).",
            )
        try:
            target = Target.of(function)
        except TypeError:  # it has no hash
            fact = f"holds {_described(function)}, which has no name to be found again by"
            raise self.refused(fact, _IN_GENERAL) from None
        return self.trees.target(target)


_FORMS: tuple[tuple[Any, Callable[[_Writer, Any, str], Json]], ...] = (
    (Patch, _Writer.patch),
    (torch.Tensor, _Writer.tensor),
    (Layer, _Writer.layer),
    (ValueSource, _Writer.program),
    (Selection, _Writer.selection),
    (Where, _Writer.where),
    (Edge, _Writer.edge),
    (Part, _Writer.part),
    (_LEAVES, _Writer.leaf),
    ((list, tuple), _Writer.sequence),
    (Mapping, _Writer.mapping),
)


def _described(what: Any) -> str:
    return _a(type(what).__qualname__)


def _a(word: str) -> str:
    return f"{'an' if word[:1] in 'AEIOUaeiou' else 'a'} {word}"


def _is_modest(number: int | None) -> bool:
    return number is None or -_MOST < number < _MOST


def _numbers_in(part: Part) -> list[int | None]:
    found: list[int | None] = [size for _, size in part.sizes_given]
    for _, where in part.indices:
        ends = (where.start, where.stop, where.step) if isinstance(where, slice) else where
        found += ends if isinstance(ends, tuple) else (ends,)
    return found


def _is_name(what: Any) -> bool:
    return isinstance(what, (str, int, Layer)) and not isinstance(what, bool)


def _is_end(what: Any) -> bool:
    return _is_name(what) or (isinstance(what, tuple) and all(map(_is_name, what)))


def _is_key(what: Any) -> bool:
    """True for a key of a mapping of patches."""
    return _is_name(what) or isinstance(what, (Edge, Selection, Where))


# -- reading -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Reader:
    """Reads one object. `programs` are those that it refers to."""

    trees: TreeReader
    programs: list[Any]

    def value(self, json: Json) -> Any:
        """Anything that stands in a patch, a mapping of them, or an edit."""
        if type(json) is not list:
            return json if type(json) is not dict else bad("a mapping stands where a value should")
        word = text(items(json, 1)[0])
        if word in _WORDS_OF_LEAVES:
            return self.trees.value(json)
        if word in PATCHES:
            return self.patch(json)
        if word not in _WORDS:
            bad(f"{word!r:.40} is no word of an intervention")
        return _WORDS[word](self, json)

    def patch(self, json: Json) -> Patch:
        """A patch."""
        word, said = exactly(json, 2)
        kind, given = PATCHES[word], mapping(said)
        names = [one.name for one in fields(kind)]
        if not {*given} <= {*names}:
            bad(f"{_a(word)} has no {', '.join({*given} - {*names})!r:.60}")
        found = {name: self.value(given[name]) if name in given else None for name in names}
        part = found.get("part")
        if part is not None and type(part) is not Part:
            bad(f"the part of {_a(word)} is none")
        return _MAKERS[kind](**found)

    def part(self, json: Json) -> Part:
        """A part of a tensor."""
        made = self.trees.part(json)
        _require(all(map(_is_modest, _numbers_in(made))), "an index is one that no tensor has")
        return made

    def tensor(self, json: Json) -> torch.Tensor:
        """A tensor."""
        return self.trees.pool.tensor(exactly(json, 2)[1])

    def array(self, json: Json) -> Any:
        """An array of numpy."""
        tensor = self.tensor(json)
        if (
            tensor.layout is not torch.strided
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.requires_grad
        ):
            bad("an array is said to be no array")
        return tensor.clone().numpy()

    def function(self, json: Json) -> Callable[..., Any]:
        """A function."""
        return self.trees.target(exactly(json, 2)[1]).function

    def program(self, json: Json) -> Any:
        """A program."""
        return self._program(exactly(json, 2)[1])

    def _program(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self.programs):
            bad(f"{number!r:.40} is no program that is named")
        return self.programs[number]

    def layer(self, json: Json) -> Layer:
        """A layer of a program."""
        _, number, name, *rest = items(json, 3, 4)
        program = self._program(number)
        if text(name) not in program:
            raise _absent(program, name)
        if not rest:
            return layer_at(program, name)
        node, *path = items(rest[0], 1)
        if text(node) not in program.graph or not all(type(step) is int for step in path):
            bad("a layer is said to be no part of its operation")
        found = layer_at(program, name, (node, *path))
        if found._place.part not in program.graph.gives[program.graph.positions[node]]:
            bad("a layer is said to be no part of its operation")
        return found

    def selection(self, json: Json) -> Selection:
        """Some layers of a program."""
        _, number, given = exactly(json, 3)
        program, labels = self._program(number), texts(given)
        if len({*labels}) != len(labels):
            bad("a layer is selected twice")
        known = {*program.layer_labels, *[node.name for node in program.graph.nodes]}
        if absent := [label for label in labels if label not in known]:
            raise _absent(program, absent[0])
        return selection_of(program, labels)

    def where(self, json: Json) -> Where:
        """A predicate."""
        return Where(self.function(json))

    def edge(self, json: Json) -> Edge:
        """An edge."""
        sender, receiver = map(self.value, exactly(json, 3)[1:])
        if not _is_end(sender) or not _is_end(receiver):
            bad("the end of an edge is no name of a layer")
        return Edge(sender, receiver)

    def list_of(self, json: Json) -> list[Any]:
        """A list."""
        return [self.value(one) for one in json[1:]]

    def mapping(self, json: Json) -> dict[Any, Any]:
        """A mapping."""
        return self.pairs(exactly(json, 2)[1])

    def pairs(self, json: Json) -> dict[Any, Any]:
        """The keys and values of a mapping of patches."""
        made: dict[Any, Any] = {}
        for row in items(json):
            key, value = map(self.value, exactly(row, 2))
            if not _is_key(key) and type(key).__module__ != "numpy":
                bad(f"{key!r:.40} is no name of a layer")
            if key in made:
                bad(f"there are two patches for {key!r:.40}")
            made[key] = value
        return made

    def edit(self, json: Json) -> Edit:
        """An edit."""
        method, args, kwargs = exactly(json, 3)
        return Edit(
            text(method),
            *[self.value(one) for one in items(args)],
            **{key: self.value(one) for key, one in mapping(kwargs).items()},
        )


_WORDS: dict[str, Callable[[_Reader, Json], Any]] = {
    "tensor": _Reader.tensor,
    "array": _Reader.array,
    "function": _Reader.function,
    "program": _Reader.program,
    "layer": _Reader.layer,
    "selection": _Reader.selection,
    "where": _Reader.where,
    "edge": _Reader.edge,
    "part": _Reader.part,
    "list": _Reader.list_of,
    "tuple": lambda reader, json: tuple(reader.list_of(json)),
    "dict": _Reader.mapping,
}


def _absent(program: Any, name: str) -> UnboundReference:
    return UnboundReference(
        f"{program!r} was given for a program that has the layer {name!r:.60}, and it has none.\n"
        "Give the program itself, or select again: prog.find(...)."
    )


# -- the fields of patches, which may say anything ---------------------------------------------------------------------


def _require(holds: bool, fact: str) -> None:
    if not holds:
        bad(fact)


def _seed(value: Any) -> Any:
    _require(hasattr(value, "__index__") and not isinstance(value, torch.Tensor), "a seed is no number")
    return value


def _order(value: Any) -> Any:
    _require(value is None or (type(value) is tuple and {*map(type, value)} <= {int}), "an order of rows is none")
    return value


def _axes(value: Any) -> Any:
    _require(type(value) is tuple and all(hasattr(one, "__index__") or type(one) is str for one in value), "no axes")
    return value


def _matrix(value: Any, most: int = 2, least: int = 2) -> torch.Tensor:
    is_one = isinstance(value, torch.Tensor) and least <= value.dim() <= most
    _require(is_one and (value.is_floating_point() or value.is_complex()), "a direction or a basis is none")
    return value


def _project(direction: Any, off: Any, along: Any, part: Part | None) -> Patch:
    is_word = type(along) is str and part is not None
    _require(type(off) is bool and (along is None or is_word or type(along) is int), "a direction lies along no axis")
    return _restored(Project, direction=_matrix(direction, least=1), off=off, along=along, part=part)


def _rotate(basis: Any, then: Any, part: Part | None) -> Patch:
    _require(isinstance(then, Patch), "the inside of a Rotate is no patch")
    return _restored(Rotate, basis=_matrix(basis), then=then, part=part)


def _chain(patches: Any) -> Patch:
    _require(type(patches) is tuple and all(isinstance(one, Patch) for one in patches), "a chain is none of patches")
    return Chain(patches)


def _restored(kind: Any, **given: Any) -> Any:
    """A patch from its fields. Its constructor would do algebra with tensors, which a file may say are of any size."""
    made = object.__new__(kind)
    made.__attrs_init__(**given)
    return made


_MAKERS: dict[type[Patch], Callable[..., Patch]] = {
    Set: lambda value, part: Set(value, part),
    Zero: lambda part: Zero(part),
    Mean: lambda over, of, part: Mean(_axes(over), part, of),
    From: lambda source, part: From(source, part),
    Resample: lambda permutation, seed, part: Resample(_order(permutation), part, seed=_seed(seed)),
    Add: lambda vector, part: Add(vector, part),
    Scale: lambda k, part: Scale(k, part),
    Noise: lambda std, seed, part: Noise(std, part, seed=_seed(seed)),
    Clamp: lambda min, max, part: Clamp(min, max, part),
    Project: _project,
    Rotate: _rotate,
    Apply: lambda fn, part: Apply(fn, part),
    Chain: _chain,
}
PATCHES = {kind.__name__: kind for kind in _MAKERS}


# -- what files know ---------------------------------------------------------------------------------------------------


def _kind(word: str, cls: type, write: Callable[[_Writer, Any], Json], read: Callable[[_Reader, Json], Any]) -> None:
    def written(trees: TreeWriter, what: Any) -> Callable[[], Json]:
        writer = _Writer(trees)
        with trees.writing(_Place(f"the patch {what!r:.100}" if word == "patch" else f"the {word}")):
            made = {"programs": writer.named.rows, "is": write(writer, what)}
        return lambda: made

    def opened(trees: TreeReader, json: Json) -> Any:
        given = mapping(json)
        _require({*given} == {"programs", "is"}, f"the {word} lacks a part, or has others")
        references = trees.references or References()
        return read(_Reader(trees, references.bound(given["programs"])), given["is"])

    register(Kind(word, cls, written, opened))


def _write_edits(writer: _Writer, edits: Any) -> Json:
    if strange := next((one for one in edits if not isinstance(one, Edit)), None):
        raise CannotSave(
            f"a {type(edits).__name__} is saved if it holds edits, and this one holds {_described(strange)}.\n"
            "Patches one after another are one patch: rl.Zero() >> rl.Add(1.0)."
        )
    word = "list" if isinstance(edits, list) else "tuple"
    return [word, *[writer.edit(one, f"{number}.{one.method}") for number, one in enumerate(edits)]]


def _read_edits(reader: _Reader, json: Json) -> Any:
    word, *rows = items(json, 1)
    _require(word in ("list", "tuple"), "the edits are no list")
    made = [reader.edit(row) for row in rows]
    return made if word == "list" else tuple(made)


def _read_patch(reader: _Reader, json: Json) -> Patch:
    made = reader.value(json)
    _require(isinstance(made, Patch), "the patch is none")
    return made


def _read_patches(reader: _Reader, json: Json) -> dict[Any, Any]:
    made = reader.pairs(json)
    _require(not any(isinstance(one, _NO_PATCHES) for one in made.values()), "a mapping has what is no patch")
    return made


def _read_selection(reader: _Reader, json: Json) -> Selection:
    _require(items(json, 1)[0] == "selection", "the selection is none")
    return reader.selection(json)


_kind("patch", Patch, lambda writer, patch: writer.patch(patch, patch.kind), _read_patch)
for _mapping in (MappingProxyType, dict):
    _kind("patches", _mapping, _Writer.pairs, _read_patches)
_kind("selection", Selection, lambda writer, one: writer.selection(one, ""), _read_selection)
_kind("edit", Edit, lambda writer, edit: writer.edit(edit, edit.method), _Reader.edit)
for _sequence in (list, tuple):
    _kind("edits", _sequence, _write_edits, _read_edits)
