"""The inverse of write_trees.py: JSON of a file, which may say anything, as trees, leaves and shared facts.

In: parsed JSON, and the tables of a file. Out: what was written, or an error: BadFile where a row is none, Untrusted
for a function that a file may not name unasked. Nothing is imported, called or built that is not named here. A user's
classes come back as Structs.
"""

from __future__ import annotations

import re
import sys
from base64 import b64decode
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from attrs import define, evolve, field

from .._edit.part import Part
from .._edit.patch_ops import PatchOperand, PatchStep
from .._ir.graph import Graph
from .._ir.node import Context, Generator, Ref, Scope, Source, TensorSpec
from .._ir.settings import is_setting
from .._ir.struct import Struct, StructKeys, struct_class
from .._ir.target import Target
from .._ir.trees import BackReference, Branch, pytree_plan
from .._ir.write import Hole
from ..errors import BadFile
from .allowed import known_function
from .pool import PoolReader, device_named, dtype_named, natural, sizes
from .write_trees import CLASSES, CONTAINERS, CONTROLS, LAYOUTS, MEMORY_FORMATS, TABLES, VIEWS

Json = Any
_MOST_CLASSES = 2000
_LONGEST_RANGE = 2**24  # torch makes a list of it


def bad(fact: str) -> NoReturn:
    """Raise for a row that is none."""
    raise BadFile(fact)


def text(value: Any) -> str:
    """A text. What would steer a terminal, or turn the order of letters around, is in none."""
    if type(value) is not str:
        bad(f"{value!r:.40} is no text")
    if CONTROLS.search(value):
        bad(f"{value!a:.40} is a text that no screen shows as it is")
    return value


def line(value: Any) -> str:
    """A text of one line, such as a name."""
    if "\n" in text(value):
        bad(f"{value!r:.40} is no name")
    return str(value)


def flag(value: Any) -> bool:
    """A truth value."""
    if type(value) is not bool:
        bad(f"{value!r:.40} is no truth value")
    return value


def number(value: Any) -> float:
    """A number, or a word for one that JSON lacks."""
    if type(value) is list and len(value) == 2 and value[0] == "float" and value[1] in _WORDS_OF_FLOATS:
        return float(value[1])
    if type(value) not in (int, float):
        bad(f"{value!r:.40} is no number")
    return value


_WORDS_OF_FLOATS = ("nan", "inf", "-inf")


def items(value: Any, least: int = 0, most: int | None = None) -> list[Any]:
    """A list of so many items."""
    if type(value) is not list or len(value) < least or (most is not None and len(value) > most):
        bad(f"{value!r:.40} is no list of the right length")
    return value


def exactly(value: Any, count: int) -> list[Any]:
    """A list of exactly so many items."""
    return items(value, count, count)


def mapping(value: Any) -> dict[str, Any]:
    """A mapping."""
    if type(value) is not dict:
        bad(f"{value!r:.40} is no mapping")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Several texts."""
    return tuple(map(text, items(value)))


def optional(read: Callable[[Any], Any], value: Any) -> Any:
    """None, or what `read` makes of it."""
    return None if value is None else read(value)


def never_called(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of a function that a program only names."""
    raise TypeError("this function is known by its name alone")


@define(eq=False)
class Room:
    """How much may still be made of a file by naming things again. What stands there once can be referred to in a few
    characters, and is then shown, or walked through, each time: a long name, a container that holds another one twice.
    """

    text: int = 4_000_000  # characters that names and lines of code have where they are shown
    items: int = 100_000  # of containers that occur again
    depth: int = 200  # of trees
    classes: dict[tuple[str, ...], type[Struct]] = field(factory=dict)  # of the user's
    tables: Any = ()

    def say(self, *words: str) -> None:
        """A name or a line is shown. A hundred characters are what a reference takes itself."""
        self.text -= max(0, sum(map(len, words)) - 100)
        if self.text < 0:
            self.text, self.tables = self.text + 10 * _characters(self.tables), ()
            if self.text < 0:
                bad("the same long names are said over and over")

    def enter(self) -> None:
        """A container is opened."""
        self.depth -= 1
        if self.depth < 0:
            bad("a tree is nested deeper than 200 levels")

    def leave(self) -> None:
        """It is closed."""
        self.depth += 1

    def repeat(self, count: int) -> None:
        """A container with so many items, with all that is in it, occurs once more."""
        self.items -= count
        if self.items < 0:
            bad("the same containers occur over and over")

    def name_class(self, module: str, name: str, form: str) -> type[Struct]:
        """The class that stands for a user's."""
        found = self.classes.get((module, name, form))
        if found is None:
            found = self.classes[module, name, form] = struct_class(module, name, form)
            if len(self.classes) > _MOST_CLASSES:
                bad("more classes are named than anybody has")
        return found


def _characters(json: Json) -> int:
    """How many characters the texts in JSON have."""
    if type(json) is str:
        return len(json)
    held = json.values() if isinstance(json, Mapping) else json if type(json) is list else ()
    return sum(map(_characters, held))


@define(eq=False)
class TreeReader:
    """Reads trees. `functions` gives the Target of a function that is called, by its name."""

    tables: Mapping[str, list[Json]]
    pool: PoolReader
    functions: Callable[[str], Target]
    names: Sequence[str] = ()  # of the nodes of the graph that is read just now
    graph: Callable[[Json], Graph] | None = None
    references: Any = None  # the programs that may be referred to, see references.py
    known_objects: list[tuple[Any, int]] = field(factory=list)  # in a structure, by number: what was read, how large
    opened: int = 0  # in a structure: how many items were read
    room: Room = field(factory=Room)
    _facts: dict[str, list[Any]] = field(factory=dict)  # of each table: what its rows mean, as far as they were read
    _depths: list[int] = field(factory=list)  # of the scopes

    def __attrs_post_init__(self) -> None:
        self.room.tables = self.tables

    @staticmethod
    def checked_tables(value: Any) -> dict[str, list[Json]]:
        """The tables of a file, if they are some."""
        found = mapping(value)
        if {*found} != {*TABLES}:
            bad("the tables of the file are not those of this version")
        return {name: items(rows) for name, rows in found.items()}

    # -- facts that many nodes share -----------------------------------------------------------------------------------

    def _fact(self, table: str, at: Any, read: Callable[[Json], Any]) -> Any:
        """What a row of a table means. Rows refer to earlier ones, so they are read in order."""
        known, rows = self._facts.setdefault(table, []), self.tables[table]
        if type(at) is not int or not 0 <= at < len(rows):
            bad(f"{at!r:.40} is no row of the {table}")
        while len(known) <= at:
            known.append(read(rows[len(known)]))
        return known[at]

    def _earlier(self, table: str, at: Any) -> Any:
        known = self._facts[table]
        if at is None:
            return None
        if type(at) is not int or not 0 <= at < len(known):
            bad(f"a row of the {table} refers to {at!r:.40}, which does not come before it")
        return known[at]

    def spec(self, at: Any) -> TensorSpec:
        """The spec with this number."""
        return self._fact("specs", at, self._spec)

    def _spec(self, row: Json) -> TensorSpec:
        shape, dtype, device, strides, *rest = items(row, 4, 6)
        made = TensorSpec(sizes(shape), dtype_named(dtype), str(device_named(device)), optional(sizes, strides))
        if made.strides is not None and len(made.strides) != len(made.shape):
            bad("a shape has strides of another length")
        if not rest:
            return made
        stored, layout = exactly(rest, 2)
        return evolve(made, stored=optional(natural, stored), layout=_known(LAYOUTS, layout))

    def context(self, at: Any) -> Context:
        """The modes with this number."""
        return self._fact("contexts", at, self._context)

    def _context(self, row: Json) -> Context:
        grad, inference, autocast, settings = exactly(row, 4)
        cast = []
        for one in items(autocast):
            device, dtype, cached = exactly(one, 3)
            cast.append((device_named(device).type, dtype_named(dtype), flag(cached)))
        pairs = [(text(k), self.value(v)) for k, v in map(_pair, items(settings))]
        if not all(is_setting(name, value) for name, value in pairs):
            bad("a call is said to run under a switch that torch has not")
        return Context(flag(grad), flag(inference), tuple(cast), tuple(pairs))

    def source(self, at: Any) -> Source | None:
        """The line of code with this number."""
        found: Source | None = None if at is None else self._fact("sources", at, self._source)
        if found is not None:
            self.room.say(found.file, found.function, (found.saved or {}).get(found.line, ""))
        return found

    def _source(self, row: Json) -> Source:
        file, number, function, caller = exactly(row, 4)
        name, lines = self._fact("files", file, _file)
        return Source(name, natural(number), line(function), self._earlier("sources", caller), lines)

    def scope(self, at: Any) -> Scope | None:
        """The call of a module with this number."""
        found: Scope | None = None if at is None else self._fact("scopes", at, self._scope)
        if found is not None:
            self.room.say(found.address, found.kind)
        return found

    def _scope(self, row: Json) -> Scope:
        address, call, kind, parent, source = exactly(row, 5)
        if natural(call) < 1:
            bad("a module is said to be called for the 0th time")
        around = self._earlier("scopes", parent)
        self._depths.append(0 if parent is None else self._depths[parent] + 1)
        if self._depths[-1] > _DEEPEST_MODULE:
            bad("modules are nested deeper than any that has run")
        return Scope(line(address), call, line(kind), around, self.source(source))

    def target(self, at: Any) -> Target:
        """The function with this number."""
        return self._fact("functions", at, lambda row: self.functions(text(row)))

    def name(self, at: Any) -> Target:
        """The function with this number, of which only the name counts."""
        found: Target = self._fact(
            "names", at, lambda row: Target(text(row), known_function(text(row)) or never_called)
        )
        self.room.say(found.name)
        return found

    # -- trees ---------------------------------------------------------------------------------------------------------

    def ref(self, row: Json) -> Ref:
        """A Ref."""
        word, node, *path = items(row, 2)
        if word == "R":
            return Ref(line(node), tuple(map(natural, path)))
        if word != "r" or type(node) is not int or not 0 <= node < len(self.names):
            bad(f"{row!r:.40} is no value of a node")
        name = self.names[node]
        if len(name) > 100:  # asked here: most are short, and there are many
            self.room.say(name)
        return Ref(name, tuple(map(natural, path)))

    def value(self, json: Json) -> Any:
        """A tree of what a call is given."""
        kind = type(json)
        if kind is not list:
            return _plain(json) if kind is int or kind is dict else json
        if not json or type(json[0]) is not str:
            bad(f"{json!r:.40} is no argument")
        word = json[0]
        if word == "r":
            return self.ref(json)
        self.room.enter()
        made = self._tree(word, json)
        self.room.leave()
        return made

    def _tree(self, word: str, json: Json) -> Any:
        if word == "t":
            return tuple([self.value(item) for item in json[1:]])
        if word == "l" or word == "s":
            kind = list if word == "l" else slice
            return Branch(
                kind, tuple([self.value(item) for item in (json[1:] if word == "l" else exactly(json[1:], 3))])
            )
        if word == "d":
            keys = _spread(tuple(map(self.key, items(items(json, 2)[1]))))
            return Branch(dict, tuple([self.value(item) for item in exactly(json[2:], len(keys))]), keys)
        if word in VIEWS:
            count = len(VIEWS[word]._fields)  # type: ignore[attr-defined]
            return Branch(VIEWS[word], tuple([self.value(item) for item in exactly(json[1:], count)]))
        if word == "c":
            return self._container(json, self.value)
        return _known(_VALUES, word)(self, json)

    def key(self, json: Json) -> Any:
        """A key of a mapping."""
        found = self.value(json)
        hash(found)
        return found

    def part(self, json: Json) -> Part:
        """A part of a tensor."""
        _, pattern, indices, given = exactly(json, 4)
        pairs = [(text(k), self._index(v)) for k, v in map(_pair, items(indices))]
        return Part.restored(
            text(pattern), tuple(pairs), tuple([(text(k), natural(v)) for k, v in map(_pair, items(given))])
        )

    def _index(self, json: Json) -> Any:
        if type(json) is list and json and json[0] == "S":
            return self.value(json)
        if type(json) is list:
            return tuple([_whole(one) for one in items(json, 1)])
        return _whole(json)

    # -- structures ----------------------------------------------------------------------------------------------------

    def structure(self, json: Json, leaf: Callable[[Json], Any] | None = None) -> Any:
        """A tree of inputs or outputs. `leaf` reads what is no container."""
        before, self.known_objects = self.known_objects, []
        try:
            return self._opened(json, leaf or self._inert)
        finally:
            self.known_objects = before

    def _opened(self, json: Json, leaf: Callable[[Json], Any]) -> Any:
        self.room.enter()
        self.opened += 1
        word = json[0] if type(json) is list and json else None
        if word == "t":
            made: Any = tuple([self._opened(item, leaf) for item in json[1:]])
        elif word == "same":
            made = self._again(exactly(json, 2)[1])
        elif word != "c" and word not in _WITH_IDENTITY and word != "s":
            made = leaf(json)
        else:
            at, count = len(self.known_objects), self.opened
            self.known_objects.append(_UNFINISHED)
            is_container = word == "c" or word == "s"
            made = self._container(json, lambda item: self._opened(item, leaf)) if is_container else leaf(json)
            self.known_objects[at] = made, self.opened - count
        self.room.leave()
        return made

    def _again(self, at: Any) -> Any:
        """A container that was read before."""
        if type(at) is not int or not 0 <= at < len(self.known_objects) or self.known_objects[at] is _UNFINISHED:
            bad("a container is said to be one that was not read before")
        found, count = self.known_objects[at]
        self.room.repeat(count + 1)
        self.opened += count
        return found

    def _container(self, json: Json, read: Callable[[Json], Any]) -> Branch:
        if json[0] == "s":
            return Branch(slice, tuple(map(read, exactly(json[1:], 3))))
        _, words, keys, held, *rest = items(json, 4, 5)
        more = mapping(rest[0]) if rest else {}
        if not {*more} <= {"loop", "count", "factory", "most", "hidden"}:
            bad("a container has facts that none has")
        names = None if keys is None else _spread(tuple([self.structure(key) for key in items(keys)]))
        hash(names)
        filled = tuple(map(read, items(held)))
        if names is not None and len(names) != len(filled):
            bad("a container has other keys than items")
        loop, count = optional(natural, more.get("loop")), optional(natural, more.get("count"))
        if type(words) is str:
            return evolve(_builtin(words, names, filled, more), loop=loop)
        kind = self.room.name_class(*map(text, exactly(words, 3)))
        if names is None:
            bad("a container has no keys")
        if "hidden" in more:
            return Branch(kind, filled, None, StructKeys(names), loop=loop, count=count)
        return Branch(kind, filled, names, loop=loop, count=count)

    def _inert(self, json: Json) -> Any:
        """A leaf of a structure."""
        if type(json) is not list:
            return _plain(json)
        word = items(json, 1)[0]
        if word == "r" or word == "R":
            return self.ref(json)
        if word == "<":
            return BackReference(natural(exactly(json, 2)[1]))
        if word == "class" and len(json) == 3:
            return self.room.name_class(text(json[1]), text(json[2]), "object")
        if word == "set" or word == "frozenset":
            found = _spread(tuple([self._inert(item) for item in json[1:]]))
            return set(found) if word == "set" else frozenset(found)
        if word == "object":
            _, names, keys, held = exactly(json, 4)
            kind = self.room.name_class(*map(text, exactly(names, 3)))
            names_of = tuple([self._opened(key, self._inert) for key in items(keys)])
            return kind.made(names_of, tuple([self._opened(one, self._inert) for one in exactly(held, len(keys))]))
        if word == "L":
            return [self._opened(one, self._inert) for one in json[1:]]
        if word == "D":
            known = _spread(tuple([self._opened(key, self._inert) for key in items(items(json, 2)[1])]))
            return dict(
                zip(known, [self._opened(one, self._inert) for one in exactly(json[2:], len(known))], strict=True)
            )
        return _known(_VALUES, word)(self, json)


_UNFINISHED = (None, 0)
_DEEPEST_MODULE = 4096


def _spread(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """The keys of a mapping or a set. Those whose hashes a writer can choose to be all the same are not many."""
    if sum(type(key) not in _OWN_HASH and not (type(key) is int and abs(key) < 2**60) for key in keys) > _MOST_KEYS:
        bad("a mapping has more keys than anybody makes that are neither texts nor numbers")
    return tuple([text(key) if type(key) is str else key for key in keys])


_OWN_HASH, _MOST_KEYS = frozenset((str, bytes, bool, float, type(None))), 2000
_WITH_IDENTITY = frozenset(("set", "frozenset", "object", "L", "D", "generator", "array"))


def _plain(json: Json) -> Any:
    """A value that stands for itself. Larger numbers are written otherwise."""
    if type(json) is dict:
        bad("a mapping stands where a value should")
    if type(json) is int and not -_LARGE < json < _LARGE:
        bad("a number is larger than those that stand for themselves")
    return json


_LARGE = 2**62


def _known(table: Mapping[str, Any], word: Any) -> Any:
    if type(word) is not str or word not in table:
        bad(f"{word!r:.40} is no word of a file")
    return table[word]


def _pair(row: Any) -> tuple[Any, Any]:
    one, other = exactly(row, 2)
    return one, other


def _whole(value: Any) -> int:
    if type(value) is not int:
        bad(f"{value!r:.40} is no whole number")
    return value


def _file(row: Json) -> tuple[str, dict[int, str]]:
    name, lines = exactly(row, 2)
    found = {}
    for at, words in mapping(lines).items():
        if not (at.isascii() and at.isdigit() and len(at) < 10):
            bad("a line of code has no number")
        if type(words) is not str:
            bad("a line of code is no text")
        found[int(at)] = CONTROLS.sub(" ", words) + "\n"
    return line(name), found


def _builtin(word: str, keys: Any, held: tuple[Any, ...], more: dict[str, Any]) -> Branch:
    """A container of Python or torch, whose class is known."""
    kind = _known(CONTAINERS, word)
    if kind is dict:
        return Branch(dict, held, keys if keys is not None else bad("a dict has no keys"))
    places = range(len(held))
    if kind is OrderedDict or kind is defaultdict:
        if keys is None or len({*keys}) != len(held):
            bad("a mapping has other keys than items")
        pairs = zip(keys, places, strict=True)
        if kind is OrderedDict:
            return pytree_plan(OrderedDict(pairs), held)
        factory = more.get("factory")
        return pytree_plan(defaultdict(_known(CLASSES, factory) if factory else None, pairs), held)
    if kind is deque:
        most = optional(natural, more.get("most"))
        if most is not None and most < len(held):
            bad("a deque has more items than it can hold")
        return pytree_plan(deque(places, most), held)
    if kind is MappingProxyType and len(held) != 1:
        bad("a read-only mapping holds several mappings")
    if word.startswith("return_types."):
        return pytree_plan(kind(places), held)
    return Branch(kind, held)


# -- leaves ------------------------------------------------------------------------------------------------------------


def _numpy(reader: TreeReader, json: Json) -> Any:
    _, name, value = exactly(json, 3)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        bad("holds a number of numpy, which is not imported. Import numpy first")
    if not re.fullmatch(r"u?int(8|16|32|64)|float(16|32|64)|complex(64|128)|bool", text(name)):
        bad(f"{name!r:.40} is no dtype of numpy that a file names")
    return numpy.dtype(name).type(number(value) if type(value) is not bool else value)


def _array(reader: TreeReader, json: Json) -> Any:
    return reader.pool.copied(reader.pool.tensor(exactly(json, 2)[1])).clone().numpy()


def _integer(reader: TreeReader, json: Json) -> int:
    digits = text(exactly(json, 2)[1])
    if not re.fullmatch(r"-?0x[0-9a-f]{1,64}", digits):
        bad(f"{digits!r:.40} is no number")
    return int(digits, 16)


def _range(reader: TreeReader, json: Json) -> range:
    made = range(*[_whole(one) for one in exactly(json[1:], 3)])
    if made[_LONGEST_RANGE:]:
        bad("a range has more numbers than anybody indexes by")
    return made


def _patch(reader: TreeReader, json: Json) -> PatchStep:
    _, target, args, kwargs = exactly(json, 4)
    pairs = [(text(k), reader.value(v)) for k, v in map(_pair, items(kwargs))]
    return PatchStep(reader.target(target), tuple([reader.value(arg) for arg in items(args)]), tuple(pairs))


def _graph(reader: TreeReader, json: Json) -> Graph:
    if reader.graph is None:
        bad("a program stands where none can")
    return reader.graph(exactly(json, 2)[1])


def _class(reader: TreeReader, json: Json) -> type:
    return _known(CLASSES, exactly(json, 2)[1])


def _bytes(reader: TreeReader, json: Json) -> bytes:
    return b64decode(text(exactly(json, 2)[1]), validate=True)


_VALUES: dict[str, Callable[[TreeReader, Json], Any]] = {
    "R": lambda reader, json: reader.ref(json),
    "L": lambda reader, json: [reader.value(item) for item in json[1:]],
    "D": lambda reader, json: dict(
        zip(map(reader.key, items(json[1])), map(reader.value, exactly(json[2:], len(json[1]))), strict=True)
    ),
    "S": lambda reader, json: slice(*[optional(_whole, one) for one in exactly(json[1:], 3)]),
    "F": lambda reader, json: reader.target(exactly(json, 2)[1]),
    "f": lambda reader, json: reader.target(exactly(json, 2)[1]).function,
    "hole": lambda reader, json: Hole.HERE,
    "generator": lambda reader, json: Generator(text(exactly(json, 2)[1])),
    "part": lambda reader, json: reader.part(json),
    "patch": _patch,
    "operand": lambda reader, json: PatchOperand(natural(exactly(json, 2)[1])),
    "graph": _graph,
    "array": _array,
    "numpy": _numpy,
    "class": _class,
    "float": lambda reader, json: number(json),
    "int": _integer,
    "complex": lambda reader, json: complex(*map(number, exactly(json[1:], 2))),
    "bytes": _bytes,
    "...": lambda reader, json: ...,
    "dtype": lambda reader, json: dtype_named(exactly(json, 2)[1]),
    "device": lambda reader, json: device_named(exactly(json, 2)[1]),
    "layout": lambda reader, json: _known(LAYOUTS, exactly(json, 2)[1]),
    "format": lambda reader, json: _known(MEMORY_FORMATS, exactly(json, 2)[1]),
    "size": lambda reader, json: torch.Size([_whole(one) for one in json[1:]]),
    "range": _range,
}
