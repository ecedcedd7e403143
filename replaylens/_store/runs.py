"""A run as JSON, and back: its program, and the values that differ from the recorded ones.

In, to write: a Run, and which values are wanted. Out: JSON; the tensors go to the writer's pool. In, to read: the same,
which may say anything. Out: a Run that answers what the first one did. Of its patches the words are left: a value that
is not in the file is NotSaved, and no function of the user's runs again. Where the model itself was run, the file has
the program of the path that it took, with SavedLivePatches in the place of the patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from attrs import evolve, field, frozen

from .._capture.rerun.live_patches import LivePatch, MatchingSites
from .._edit.patch import shown
from .._edit.select import SaveSpec
from .._ir.graph import Graph, InnerGradient
from .._ir.location import Location
from .._ir.memory import version_of
from .._ir.node import Call, Node, Ref, filled, refs_in, refs_of, specs_of
from .._ir.runtime import gathered
from .._ir.target import Target
from .._ir.trees import thaw
from .._ir.value_source import set_way_to_save
from .._replay.record import detached
from .._replay.request import Change, Request
from .._replay.supply import Origin, Run
from ..errors import CannotSave, NoSuchLayer, NotSaved, ReplaylensError, StaleValue
from .objects import Kind, object_json, register, save, written
from .pool import generator_state, natural
from .read_trees import TreeReader, bad, exactly, flag, items, optional, text
from .results import departure_json, parts, read_departure, read_program
from .write_trees import TreeWriter

Json = Any
Finished = Callable[[], Json]
Tensors = Mapping[Ref, torch.Tensor]


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_run(writer: TreeWriter, run: Run, values: Any = None) -> Finished:
    if run.origin is None:
        raise CannotSave("this run has no program of its own, with which it would be saved. Save one of prog.replay().")
    program, request = run.origin.program, run.origin.request
    selected = None if values is None else program._selected(SaveSpec.of(values))
    finished, path = object_json(writer, program), _nothing
    if run.program is not None:
        path = _write_path(writer, run, selected)
    graph = program.graph if run.program is None else run.program.graph
    with _positions(writer, graph):
        made = {
            "executed": [graph.positions[name] for name in run.executed],
            "departures": [departure_json(writer, one) for one in run.departures],
            "has_output": run._has_output,
            "values": [_value_row(writer, graph, ref, one) for ref, one in _held(run, selected).items()],
            "ends": [[writer.ref(ref), writer.pool.add(one, f"run/{ref}")] for ref, one in _ends(run, graph).items()],
            "state_changes": [
                [address, None if one is None else writer.pool.add(one, f"run/{address}")]
                for address, one in run.state_changes.items()
            ],
        }
    with _positions(writer, program.graph):
        asked = {
            "changed": [[position, _in_words(changes)] for position, changes in sorted(request.changed.items())],
            "given": sorted(request.given),
            "grad": request.grad,
            "ends": [[writer.ref(ref), _in_words([change])] for ref, change in request.ends.items()],
        }
    return lambda: {"program": finished(), "path": path(), **made, "asked": asked}


def _nothing() -> None:
    """No path of its own."""


def _value_row(writer: TreeWriter, graph: Graph, ref: Ref, value: torch.Tensor) -> Json:
    row = writer.pool.add(value, f"run/{ref}", specs_of(graph[ref.node]).get(ref))
    return [graph.positions[ref.node], list(ref.path), row]


def _in_words(changes: Iterable[Change]) -> list[str]:
    return [shown(change.what) for change in changes]


@contextmanager
def _positions(writer: TreeWriter, graph: Graph) -> Iterator[None]:
    before, writer.positions = writer.positions, graph.positions
    try:
        yield
    finally:
        writer.positions = before


def _held(run: Run, selected: Sequence[str] | None) -> dict[Ref, torch.Tensor]:
    """The values of a replay that are not the recorded ones: those that are selected, or all that it can give. Where
    the model itself was run, they are in the program of its path.
    """
    if run.program is not None:
        return {}
    if selected is None and isinstance(run._lookup, SavedValues):
        return dict(run._lookup.values)
    assert run.origin is not None
    graph, request = run.origin.program.graph, run.origin.request
    begun = _begun(graph, run.executed, request)
    touched = _touched(graph, begun)
    if selected is None:
        run.hold_all()
        wanted = {ref for position in touched for ref in refs_of(graph.nodes[position])}
    else:
        always = [*(graph.output_refs if run._has_output else ()), *[Ref(graph.nodes[p].name) for p in request.given]]
        every = (*always, *_refs_at(run.origin.program, selected))
        wanted = {ref for ref in every if graph.positions[ref.node] in touched}
    in_order = sorted(wanted, key=lambda ref: (graph.positions[ref.node], ref.path))
    needed = begun if selected is None else touched
    lacks = selected is None and request.fresh  # what was drawn afresh and not kept cannot be had again
    # The last one first: what it needs is computed in one go, and remembered.
    found = {ref: _value(run, ref, graph.positions[ref.node] in needed, lacks) for ref in reversed(in_order)}
    return {ref: value for ref in in_order if isinstance(value := found[ref], torch.Tensor)}


def _refs_at(program: Any, labels: Sequence[str]) -> list[Ref]:
    return [ref for label in labels for ref in refs_in(program._index.by_label[label].tree(program.graph))]


def _begun(graph: Graph, executed: Iterable[str], request: Request) -> set[int]:
    """The positions that a replay ran, or was given another value for."""
    return {graph.positions[name] for name in executed} | {*request.changed, *request.given}


def _value(run: Run, ref: Ref, is_needed: bool, lacks: bool) -> Any:
    """A value of a run; None for one that it lacks, or that nobody has asked for and whose computation raises."""
    try:
        return run._lookup(Location(ref.node, part=ref))
    except Exception as error:
        if is_needed and (isinstance(error, StaleValue) or not lacks):
            raise
        return None


def _touched(graph: Graph, begun: set[int]) -> frozenset[int]:
    """The positions whose values may be other than recorded: these, and what follows them."""
    marks = graph.marked_descendants([graph.nodes[position].name for position in begun])
    return frozenset(begun).union([position for position, mark in enumerate(marks) if mark])


def _ends(run: Run, graph: Graph) -> dict[Ref, torch.Tensor]:
    """The outputs, where some were patched themselves."""
    assert run.origin is not None
    if not (run.origin.request.ends and run._has_output):
        return {}
    return {ref: run._lookup(Location(ref.node, output=ref)) for ref in dict.fromkeys(graph.output_refs)}


def _write_path(writer: TreeWriter, run: Run, selected: Sequence[str] | None) -> Finished:
    """The program of the path that the model took. Patches in it are functions, of which the names are written."""
    assert run.origin is not None
    prog = run.program
    if selected is not None:
        find, labels = _finder(run.origin.program, prog), []
        for label in selected:
            with suppress(NoSuchLayer):  # it did not run on this path
                labels.append(find(label).node)
        prog = prog.saving(labels or "none")
    graph, names = prog.graph, {}
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        if isinstance(node, InnerGradient) and any(map(_is_live_patch, node.arguments.stretch.nodes)):
            raise CannotSave(
                f"a patch of this run stands inside {node.name}, a gradient that the model takes, and a file has no "
                "form for it.\nSave the tensors that you need: run.output, run[name]."
            )
        if isinstance(node, Call) and _is_live_patch(node):
            names[position] = node.target.name
            nodes[position] = evolve(node, target=Target.of(gathered))
    if names:
        prog = prog._derived(evolve(prog._record, graph=evolve(graph, nodes=tuple(nodes))), prog.output)
    finished = object_json(writer, prog)
    return lambda: {"program": finished(), "patches": [[position, name] for position, name in names.items()]}


def _is_live_patch(node: Node) -> bool:
    return isinstance(node, Call) and isinstance(node.target.function, (LivePatch, SavedLivePatch))


# -- reading -----------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class SavedLivePatch:
    """In the program of a live run that was loaded: a patch whose function is not in the file."""

    name: str

    def __call__(self, *values: Any) -> NoReturn:
        raise ReplaylensError(
            f"{self.name} cannot run: a file has what the patches of a live run gave, and not their functions.\n"
            "Begin behind it (from_=...), or replay the program that was patched."
        )


@frozen
class PatchInWords:
    """What a loaded run was patched with, as it prints."""

    words: str

    def __repr__(self) -> str:
        return self.words

    def __call__(self, value: Any) -> NoReturn:
        raise ReplaylensError(f"a loaded run has what its patches gave, and cannot apply {self.words} again.")


@frozen(eq=False)
class SavedValues:
    """The values of a run that was loaded, by name."""

    program: Any  # whose graph they are of
    values: Tensors  # where they are not the recorded ones
    ends: Tensors  # the outputs, where some were patched
    touched: frozenset[int]  # the positions where nothing but `values` is known
    find: Callable[[Any], Location]
    has_flags: bool  # of `requires_grad`, as a run with grad=True has them
    can_recompute: bool  # what the run did not change; patches of a live run cannot run again
    marks: Mapping[Ref, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "marks", {ref: version_of(one) for ref, one in self.values.items()})

    def __call__(self, name: Any) -> Any:
        at = name if isinstance(name, Location) else self.find(name)
        if (places := at.inner) is not None:
            return thaw(places, lambda leaf: self(leaf) if type(leaf) is Location else leaf)
        if at.output is not None and at.output in self.ends:
            return self.ends[at.output]
        return filled(at.tree(self.program.graph), partial(self.value, name=at.name))

    def output(self, ref: Ref) -> Any:
        """An output. A file has all of them, so that reading it runs nothing."""
        if ref in self.ends:
            return self.ends[ref]
        if ref not in self.values and ref not in self.program._record.values:
            bad(f"{ref} is an output, and has no value")
        return self.value(ref, str(ref))

    def value(self, ref: Ref, name: str) -> Any:
        """The value of a Ref."""
        record = self.program._record
        if (value := self.values.get(ref)) is not None:
            if version_of(value) != self.marks[ref]:
                raise StaleValue(
                    f"the value of `{name}` in this run was overwritten since it was loaded. Load it again."
                )
            return value
        is_known = ref in record.values
        if record.graph.positions[ref.node] in self.touched or not (is_known or self.can_recompute):
            raise _absent(name)
        if not is_known:
            return self.program._read(Location(ref.node, part=ref), again=True)
        return record.value(ref) if self.has_flags else detached(record.value(ref))


def _absent(name: str) -> NotSaved:
    return NotSaved(
        f"the value of `{name}` in this run is not in its file.\n"
        f"Save the run with it: run.save(path, values=[{name!r}]). A replay with fresh draws must keep it, too."
    )


def _read_run(reader: TreeReader, json: Json) -> Run:
    given = parts(json, _OF_RUN)
    program = read_program(reader, given["program"])
    path = optional(partial(_read_path, reader), given["path"])
    taken = program if path is None else path
    graph, asked = taken.graph, parts(given["asked"], {"changed", "given", "grad", "ends"})
    with _names(reader, program.graph):
        request = _read_request(reader, asked, program.graph)
    with _names(reader, graph):
        values, ends = _read_values(reader, graph, given["values"]), _read_ends(reader, graph, given["ends"])
        executed = tuple([graph.nodes[_position(graph, one)].name for one in items(given["executed"])])
        departures = tuple([read_departure(reader, one) for one in items(given["departures"])])
    if path is None:
        touched, find = _touched(graph, _begun(graph, executed, request)), program._index.find
    else:
        touched, find = frozenset[int](), _finder(program, path)
    lookup = SavedValues(taken, values, ends, touched, find, request.grad, path is None)
    has_output = flag(given["has_output"])
    return Run(
        executed,
        {text(a): optional(reader.pool.tensor, row) for a, row in _pairs(given["state_changes"])},
        departures,
        filled(graph.output, lookup.output) if has_output else None,
        has_output,
        lookup,
        program=path,
        origin=Origin(program, request, program._index.find),
    )


_OF_RUN = {
    *("program", "path", "executed", "departures", "state_changes", "has_output", "ends", "asked", "values"),
}


def _read_path(reader: TreeReader, json: Json) -> Any:
    given = parts(json, {"program", "patches"})
    prog = read_program(reader, given["program"])
    graph = prog.graph
    nodes = list(graph.nodes)
    for at, name in _pairs(given["patches"]):
        position = _position(graph, at)
        node = nodes[position]
        if not isinstance(node, Call):
            bad("a patch is said to be at what is no call")
        nodes[position] = evolve(node, target=Target(text(name), SavedLivePatch(text(name)), is_stable=False))
    if not items(given["patches"]):
        return prog
    return prog._derived(evolve(prog._record, graph=evolve(graph, nodes=tuple(nodes))), prog.output)


def _read_request(reader: TreeReader, given: Mapping[str, Json], graph: Graph) -> Request:
    """What a run was asked for, in words."""
    return Request(
        grad=flag(given["grad"]),
        changed={_position(graph, at): _changes(words) for at, words in _pairs(given["changed"])},
        given=dict.fromkeys([_position(graph, at) for at in items(given["given"])], torch.empty(0)),
        ends={_own_ref(reader, graph, at): change for at, words in _pairs(given["ends"]) for change in _changes(words)},
    )


def _changes(words: Json) -> tuple[Change, ...]:
    said = [PatchInWords(text(one)) for one in items(words)]
    return tuple([Change(one, True, None, one, one) for one in said])


def _read_values(reader: TreeReader, graph: Graph, json: Json) -> dict[Ref, torch.Tensor]:
    found: dict[Ref, torch.Tensor] = {}
    for row in items(json):
        at, path, place = exactly(row, 3)
        node = graph.nodes[_position(graph, at)]
        ref = Ref(node.name, tuple(map(natural, items(path))))
        spec = specs_of(node).get(ref)
        if spec is None or ref in found:
            bad(f"{ref} has two values in a run, or is none of its program")
        tensor = reader.pool.tensor(place, spec)
        if tensor.is_meta != (spec.device == "meta"):
            bad(f"{ref} is said to have no content in a run, or to have some")
        found[ref] = generator_state(reader.pool.copied(tensor)) if at in graph.state_of else tensor
    return found


def _read_ends(reader: TreeReader, graph: Graph, json: Json) -> dict[Ref, torch.Tensor]:
    return {_own_ref(reader, graph, ref): reader.pool.tensor(row) for ref, row in _pairs(json)}


def _own_ref(reader: TreeReader, graph: Graph, json: Json) -> Ref:
    ref = reader.ref(json)
    if ref not in graph.output_refs:
        bad(f"{ref} is said to be an output, and is none")
    return ref


def _position(graph: Graph, at: Json) -> int:
    if type(at) is not int or not 0 <= at < len(graph):
        bad("a run names a node that is not there")
    return at


@contextmanager
def _names(reader: TreeReader, graph: Graph) -> Iterator[None]:
    before, reader.names = reader.names, [node.name for node in graph.nodes]
    try:
        yield
    finally:
        reader.names = before


def _finder(program: Any, path: Any) -> Callable[[Any], Location]:
    """Where a name of a program lies in that of the path which a live run of it took."""
    places = MatchingSites(program.graph, path.graph)

    def find(name: Any) -> Location:
        if isinstance(name, str) and (name in path._index.module_places or name not in program):
            found: Location = path._index.find(name)
            return found
        at = places.of(program._index.find(name))
        if at is None:
            raise NoSuchLayer(f"{name!r} did not run on the path that the model took. `run.program` has that path.")
        return at

    return find


def _pairs(json: Json) -> list[list[Json]]:
    return [exactly(row, 2) for row in items(json)]


# ----------------------------------------------------------------------------------------------------------------------


def _save(what: Any, path: Any, values: Any = None) -> None:
    if isinstance(what, Run) and values is not None:
        written(what, partial(_write_run, run=what, values=values)).to(path)
    else:
        save(what, path)


register(Kind("run", Run, _write_run, _read_run))
set_way_to_save(_save)
