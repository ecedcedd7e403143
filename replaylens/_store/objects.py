"""Any object of replaylens as a file, as bytes, or as a pickle: which kinds there are, and how one is opened.

In: an object whose class was registered, or a file. Out: a file, or the object. A file that names functions which are
not torch's own is refused before anything of it is looked up; see allowed.py.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_char
from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch

from .._ir.struct import restored_struct
from .._ir.target import Target
from .._ir.torch_private import (
    OperatorDefinition,
    OpOverload,
    OpOverloadPacket,
    module_of_definition,
    module_of_operator,
    operator_definitions,
    outside_of_transforms,
    without_function_modes,
)
from .._ir.value_source import set_way_to_pickle
from .._version import __version__
from ..errors import BadFile, CannotSave, ReplaylensError, UnboundReference, UnlawfulGraph, UnresolvedTarget, Untrusted
from .allowed import needs_trust, trusted_target, untrusted
from .container import Block, Container, as_bytes, open_container, parsed_json, write
from .graphs import read_graph
from .pool import Pool, PoolReader
from .read_trees import TreeReader, bad, mapping, text, texts
from .references import References
from .write_trees import TreeWriter

Json = Any


PROGRAMS = ("program", "model history")  # kinds whose files hold a program


class Kind(NamedTuple):
    """A class whose objects can be written: its word, and the two ways. Writing gives the JSON once the blocks of the
    pool are known.
    """

    word: str
    cls: type
    write: Callable[[TreeWriter, Any], Callable[[], Json]]
    read: Callable[[TreeReader, Json], Any]


_by_word: dict[str, Kind] = {}
_by_class: dict[type, Kind] = {}


def register(kind: Kind) -> None:
    """Make a class known to files."""
    _by_word[kind.word] = _by_class[kind.cls] = kind


def _kind_of(what: Any) -> Kind:
    for cls in type(what).__mro__:
        if cls in _by_class:
            return _by_class[cls]
    known = ", ".join(sorted(_by_word))
    raise CannotSave(f"a {type(what).__name__} cannot be saved or pickled. What can: {known}.")


def is_program(what: Any) -> bool:
    """True for what a file holds as a program: a Program, a ModelHistory."""
    return any(cls in _by_class and _by_class[cls].word in PROGRAMS for cls in type(what).__mro__)


# -- writing -----------------------------------------------------------------------------------------------------------


def object_json(writer: TreeWriter, what: Any) -> Callable[[], Json]:
    """An object inside another one."""
    kind = _kind_of(what)
    finished = kind.write(writer, what)
    return lambda: {"kind": kind.word, "body": finished()}


def written(
    what: Any, finished_by: Callable[[TreeWriter], Callable[[], Json]] | None = None, is_pickled: bool = False
) -> _Written:
    """An object as a text and blocks. `finished_by` writes it otherwise than its kind does. In a pickle functions of
    the script itself are found by pickle's own rules.
    """
    kind = _kind_of(what)
    with _collecting_later(), without_function_modes(), outside_of_transforms(), _plainly():
        writer = TreeWriter(Pool(), is_pickled=is_pickled)
        try:
            finished = finished_by(writer) if finished_by is not None else kind.write(writer, what)
            blocks = writer.pool.blocks()
            body = {
                "made": made_by(),
                "tables": {name: t.rows for name, t in writer.tables.items()},
                "body": finished(),
            }
            words = json.dumps(body, separators=(",", ":"), allow_nan=False)
            if "\\ud" in words and not _is_whole(body):
                raise CannotSave(f"a text in it holds half of a character, which a {kind.word} in a file cannot.")
            made = _Written(kind.word, words, blocks, writer.callables)
            _require_readable(made)
            return made
        except RecursionError:
            raise CannotSave(f"a {kind.word} is nested deeper than Python's stack is. Nest less.") from None


def _require_readable(made: _Written) -> None:
    """Raise unless what was written is read: a reader believes little, and what it would refuse must not take the place
    of an older file. The tensors are read where they lie.
    """
    name = f"the {made.word}"
    try:
        given = parsed_json(made.text, name)
        pool = PoolReader(lambda number: made.blocks[number].memory, len(made.blocks))
        parsed = Parsed(name, made.word, TreeReader.checked_tables(given["tables"]), given["body"], pool)
        read_parsed(parsed, functions=made.functions, references=References(None))
    except UnboundReference:
        return  # it needs a program that it only names
    except (BadFile, UnlawfulGraph) as error:
        raise CannotSave(f"a file of it could not be read again, so none is written. {error}") from error


def _is_whole(body: Json) -> bool:
    """True if each character of all texts is one."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class _Written(NamedTuple):
    word: str
    text: str
    blocks: list[Block]
    functions: dict[str, Callable[..., Any]]  # those it names, by name

    def to(self, target: Any) -> None:
        """Write it to a file."""
        write(target, self.word, self.text, self.blocks)


def made_by() -> dict[str, str]:
    """The versions that a file is written with."""
    return {"replaylens": __version__, "torch": str(torch.__version__).partition("+")[0]}


def save(what: Any, path: Any) -> None:
    """Write an object of replaylens to a file: a program, a run, a sweep, gradients, an attribution, a patch, a mapping
    of patches, a selection, edits. `replaylens.load` reads it.
    """
    if isinstance(what, (str, os.PathLike)):
        raise CannotSave(f"a {type(what).__name__} cannot be saved. The path comes second: save(what, path).")
    written(what).to(path)


# -- reading -----------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A file whose text was parsed."""

    container: Container
    made: Mapping[str, str]
    tables: Mapping[str, list[Json]]
    body: Json

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that its calls run."""
        return texts(self.tables["functions"])


def opened(source: Any, use_mmap: bool = True, header_only: bool = False) -> Opened:
    """A file, its text parsed and nothing of it believed."""
    container = open_container(source, use_mmap, header_only)
    with reading(container.name):
        given = mapping(parsed_json(container.text, container.name))
        if {*given} != {"made", "tables", "body"}:
            bad("the text of the file is not that of an object")
        made = {text(name): text(version) for name, version in mapping(given["made"]).items()}
        return Opened(container, made, TreeReader.checked_tables(given["tables"]), given["body"])


class reading:
    """A block in which whatever a file makes Python or torch raise is a BadFile that names it."""

    def __init__(self, name: str, noun: str = "file") -> None:
        self.name, self.noun = name, noun

    def __enter__(self) -> None:
        """Nothing is set up."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, BadFile) and not str(error).startswith(self.name):
            raise BadFile(f"{self.name} is no {self.noun} that replaylens wrote: {error}.") from None
        if isinstance(error, UnlawfulGraph) and not str(error).startswith(self.name):
            raise UnlawfulGraph(f"{self.name}: {error}") from None
        is_known = isinstance(error, (BadFile, UnlawfulGraph, Untrusted, UnresolvedTarget, UnboundReference))
        if is_known or not isinstance(error, _WHAT_FILES_RAISE):
            return
        fact = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadFile(f"{self.name} is no {self.noun} that replaylens wrote: {fact}") from error


_WHAT_FILES_RAISE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, RecursionError, OverflowError,
    AssertionError, ArithmeticError, ReplaylensError, MemoryError,
)  # fmt: skip


def load_object(
    source: Any,
    trust: Sequence[str] = (),
    verify: bool = True,
    use_mmap: bool = True,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    read: Callable[[TreeReader, str, Json], Any] | None = None,
    references: Any = None,
) -> Any:
    """The object in a file. `functions` are given by who trusts them; `read` reads it otherwise than its kind does.
    `references` gives the programs that it refers to.
    """
    needs_trust((), trust)  # whoever gives nonsense is told so, and not that the file is bad
    bound = References(references)
    with _collecting_later():
        file = opened(source, use_mmap)
        container = file.container
        with reading(container.name):
            if verify:
                container.verify()
        pool = PoolReader(container.block, len(container.entries))
        parsed = Parsed(container.name, container.kind, file.tables, file.body, pool)
        return read_parsed(parsed, trust, functions, read, bound)


class Parsed(NamedTuple):
    """What was parsed, of which nothing is believed yet, and where its tensors lie."""

    name: str
    kind: str
    tables: Mapping[str, list[Json]]
    body: Json
    pool: PoolReader
    noun: str = "file"  # what it is, in errors


def read_parsed(
    parsed: Parsed,
    trust: Sequence[str] = (),
    functions: Mapping[str, Callable[..., Any]] | None = None,
    read: Callable[[TreeReader, str, Json], Any] | None = None,
    references: References | None = None,
) -> Any:
    """The object in what was parsed."""
    given = functions or {}
    with reading(parsed.name, parsed.noun):
        names = [name for name in texts(parsed.tables["functions"]) if name not in given]
        resolve = _resolver(names, given, trust)
    around = reading(parsed.name, parsed.noun)
    with around, without_function_modes(), outside_of_transforms(), torch.inference_mode(False):
        reader = TreeReader(parsed.tables, parsed.pool, resolve, references=references)
        reader.graph = lambda inner: read_graph(reader, inner)
        return (read or read_kind)(reader, parsed.kind, parsed.body)


@contextmanager
def _plainly() -> Iterator[None]:
    """A block outside of inference mode, without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _collecting_later() -> Iterator[None]:
    """A block in which Python's garbage collector does not run: thousands of new objects, none of them garbage, would
    have it look at all of torch's.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _resolver(
    names: list[str], given: Mapping[str, Callable[..., Any]], trust: Sequence[str]
) -> Callable[[str], Target]:
    """The functions of a file, by name; Untrusted, before any is looked up, if some may not be."""
    if strange := needs_trust(names, trust):
        raise untrusted(strange)
    found = {name: trusted_target(name, trust) for name in names}
    found |= {name: Target(name, function) for name, function in given.items()}
    return lambda name: found[name]


def read_kind(reader: TreeReader, word: str, body: Json) -> Any:
    """An object of the kind with this word."""
    if word not in _by_word:
        bad(f"it holds a {word!r:.40}, which this version of replaylens does not know")
    return _by_word[word].read(reader, body)


def read_object(reader: TreeReader, json: Json) -> Any:
    """An object inside another one."""
    given = mapping(json)
    return read_kind(reader, text(given["kind"]), given["body"])


# -- pickles -----------------------------------------------------------------------------------------------------------


class _Payload:
    """The bytes of a file within a pickle, in the form that suits its protocol."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol >= 5:
            return _bytes_of, (PickleBuffer(self.data),)
        if protocol >= 3:
            return _bytes_of, (bytes(self.data),)
        return _bytes_of, (torch.frombuffer(self.data, dtype=torch.uint8),)  # protocol 2 writes bytes as text


def _bytes_of(data: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        return data
    plain = data.detach().cpu().contiguous()
    if plain.dtype is not torch.uint8 or not plain.numel():
        raise BadFile("a pickle holds something other than the bytes of a file")
    return bytes((c_char * plain.numel()).from_address(plain.data_ptr()))


def pickled(what: Any, protocol: Any) -> Any:
    """What pickle writes for an object: the bytes of its file, and the functions that are not torch's own, which pickle
    finds by its own rules.
    """
    made = written(what, is_pickled=True)
    return unpickled, (_Payload(as_bytes(made.word, made.text, made.blocks)), strange_functions(made))


def strange_functions(made: _Written) -> dict[str, Any]:
    """The functions that are not torch's own, by name, as pickle takes them."""
    return {name: _as_pickled(name, made.functions[name]) for name in needs_trust(made.functions)}


def _as_pickled(name: str, function: Callable[..., Any]) -> Any:
    is_operator = isinstance(function, (OpOverload, OpOverloadPacket))
    return _Operator(name, module_of_operator(function)) if is_operator else function


class _Operator:
    """In a pickle: an operator that was registered with torch, which pickle takes by no rule of its own."""

    def __init__(self, name: str, module: str | None) -> None:
        self.name, self.module = name, module

    def __reduce__(self) -> Any:
        return operator_named, (self.name, self.module)


def operator_named(name: str, module: str | None) -> Callable[..., Any]:
    """A registered operator. `module` is the one that registers it, if that is known."""
    if module is not None:
        with suppress(ImportError):
            importlib.import_module(module)
    return Target.named(name).function


def reduced_operator(what: Any) -> Any:
    """How a pickler takes an operator that was registered with torch, or its definition; None of anything else."""
    if isinstance(what, (OpOverload, OpOverloadPacket)):
        return operator_named, (Target.of(what).name, module_of_operator(what))
    if OperatorDefinition is not None and type(what) is OperatorDefinition:
        name = next((name for name, known in operator_definitions.items() if known is what), None)
        return None if name is None else (_definition_named, (name, module_of_definition(what)))
    return None


def _definition_named(name: str, module: str | None) -> Any:
    operator_named(f"torch.ops.{name.replace('::', '.')}", module)
    return operator_definitions[name]


def unpickled(data: Any, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """An object from a pickle."""
    return load_object(data, functions=functions)


set_way_to_pickle(pickled)
torch.serialization.add_safe_globals([unpickled, _bytes_of, restored_struct])
