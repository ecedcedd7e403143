"""replay: run a program again, whole or in part, with changes.

In: the record of a forward pass and a Request. Out: a Run. What must run is decided in plan.py, how in interpreter.py;
here the request is translated into positions and values, and the result read back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from .._core.autograd import as_leaf, fresh_leaf, standing
from .._core.capture_metadata import NOTHING_KNOWN, Account
from .._core.copies import in_layout
from .._core.graph import Graph
from .._core.location import Location
from .._core.model_state import Standing, StatePlace, sight_of
from .._core.node import Call, Input, Ref, State, TensorMeaning, refs_of, value_of
from .._core.sameness import same_content
from .._core.sharing import begin_together
from .._core.torch_private import is_wrapped, peek_interpreter_stack
from .._core.trees import thaw
from .._core.turns import settled
from .._core.world import drawing_alone
from .._edit.lower import may_vary
from ..errors import InputMismatch, NotDifferentiable, ReplaylensError, StaleValue
from .deferred import Late, Remembered, mark_of
from .flag_guards import Around, Instead, departures as departures_of, heeded, noticing, require_as_asked
from .function import as_function
from .guards import Departure, LeftPath, diverged, misdirected, raising
from .inputs import require_arguments
from .interpreter import Code, Mode, Patches, compile_plan, interpret, recorded_world
from .parting import parted, writes_views
from .plan import Plan, plan
from .recover import recovered
from .request import Change, Request
from .run import Run


class Versions(dict[Ref, int]):
    """Torch's write counters of the recorded values: most are zero, and are not kept."""

    def __init__(self, pairs: Iterable[tuple[Ref, int]]) -> None:
        super().__init__([(ref, count) for ref, count in pairs if count])

    def __missing__(self, ref: Ref) -> int:
        return 0


@define(eq=False)
class Record:
    """A Graph with what is known of one run of it. Values are kept by reference, with torch's write counter
    beside them.
    """

    graph: Graph
    values: dict[Ref, torch.Tensor]
    versions: Versions
    draws: dict[str, torch.Tensor]
    live: dict[str, torch.Tensor] = field(
        factory=dict
    )  # by node name: the model's own parameters, and leaves among the inputs that the forward wrote
    plans: dict[Any, Any] = field(factory=dict)
    account: Account = NOTHING_KNOWN
    histories: frozenset[Ref] | None = None  # which values gradients flow through: see gradients.py
    saved: frozenset[str] | None = None  # the nodes whose values are to be kept, if not all are: see recover.py
    places: Mapping[str, StatePlace] = field(factory=dict)  # by address: where the model holds its tensors
    lent: Mapping[str, tuple[str, torch.Tensor]] = field(
        factory=dict
    )  # by address: tensors of the model in the memory of an input, that input, and what was there
    _watched: tuple[dict[str, StatePlace], dict[int, StatePlace]] | None = field(default=None, init=False)
    _standing: Standing | None = field(default=None, init=False)

    def value(self, ref: Ref) -> torch.Tensor:
        """A recorded value, if nobody overwrote it since; computed again, if it was not kept."""
        tensor = self.values.get(ref)
        if tensor is None:
            return recovered(self, [ref])[ref]
        if (reason := self.stale(ref)) is not None:
            raise StaleValue(reason)
        return tensor

    def stale(self, ref: Ref) -> str | None:
        """Why a recorded value does not hold any more."""
        if self.versions[ref] != version(self.values[ref]):
            return _stale_text(self.graph, ref)
        place = self.place_of(ref)
        if place is None or place.is_as_it_was():
            return None
        if settled(place.is_as_it_was):  # another thread ran the model once more, and had something else there
            return None
        return _stale_text(self.graph, ref, place)

    def place_of(self, ref: Ref) -> StatePlace | None:
        """Where the model holds the memory in which a recorded value lies, if that is to be as it was recorded."""
        by_name, by_storage = self.watched
        if not by_name:
            return None
        return by_name.get(ref.node) or by_storage.get(storage_of(self.values[ref]) or 0)

    @property
    def watched(self) -> tuple[dict[str, StatePlace], dict[int, StatePlace]]:
        """The places of `place_of`, by the name of a node and by storage."""
        if self._watched is None:
            self._watched = self._watch()
        return self._watched

    @property
    def standing(self) -> Standing:
        """Is all of that as it was recorded?"""
        if self._standing is None:
            self._standing = Standing(self.watched[0].values())
        return self._standing

    def _watch(self) -> tuple[dict[str, StatePlace], dict[int, StatePlace]]:
        """The state whose recorded values are the model's own tensors. What the forward writes is kept by value."""
        written = {*[address for address, _ in self.graph.changes], *self.graph.removed}
        by_name, by_storage = {}, {}
        for node in self.graph.state_nodes if self.places else ():
            place = self.places.get(node.address)
            own = place is not None and place.tensor is not None and place.tensor is self.live.get(node.name)
            if place is None or not own or not written.isdisjoint((node.address, *node.aliases)):
                continue
            by_name[node.name] = place
            if (key := storage_of(self.values[Ref(node.name)])) is not None:
                by_storage[key] = place
        return by_name, by_storage

    def steady_values(self) -> list[torch.Tensor]:
        """All recorded values without their histories, if nobody overwrote one since."""
        self.require_steady()
        return [tensor.detach() if tensor.requires_grad else tensor for tensor in self.values.values()]

    def require_steady(self) -> None:
        """Did nobody overwrite a recorded value?"""
        moved = any(self.versions[ref] != version(tensor) for ref, tensor in self.values.items())
        if moved or not self.standing:
            for ref in self.values:
                self.value(ref)  # raises for the one that was overwritten


def storage_of(tensor: torch.Tensor) -> int | None:
    """What names the memory that a tensor lies in."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse and nested ones have no one memory
        return None


OVERWRITTEN = -2  # in the place of a write counter: of a copy of what had been overwritten


def version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return -1


@frozen(eq=False)
class Executed:
    """What a request came to: the compiled plan, the env after its last step, where it left the recorded path."""

    request: Request
    wanted: frozenset[int]
    code: Code
    env: list[Any]
    once: frozenset[int]  # functions of an edit that ran: they may give something else when they are called again
    departures: list[Departure]
    patched: Remembered  # what the patches made
    given: dict[int, Any]  # how the given tensors looked when it began

    def __getitem__(self, ref: Ref) -> Any:
        return self.env[self.code.slots[ref]]


def execute(record: Record, request: Request, told: Callable[[Code], Code] | None = None) -> Executed:
    """Run what the request needs. `told` may put other code in its place, which does the same and tells of it."""
    departures: list[Departure] = []

    def departed(departure: Departure) -> None:
        if request.on_divergence == "raise":
            raise diverged(departure)
        if request.on_divergence == "rerun":
            raise LeftPath(departure)
        departures.append(departure)

    for mismatch in request.mismatches:
        if request.on_divergence == "raise" or (request.on_divergence == "ignore" and not mismatch.can_follow):
            raise InputMismatch(mismatch.text)
        departed(mismatch.departure)
    graph = record.graph
    wanted = _wanted(graph, request)
    record = _with_starts(record, request)
    left = graph.left if _leaves_generator(request) else None
    mode = Mode(request.grad, request.fresh, left, on_departure=departed)
    code, needed, once = _compiled(record, request, wanted, mode)
    require_differentiable(record, request)
    for departure in led_astray(graph, request.changed):
        departed(departure)
    for name in graph.drawn_elsewhere if request.fresh else ():
        departed(Departure(f"what `{name}` drew", "drawn in the forward", "others, which only the model can draw"))
    for name in graph.generator_read if request.fresh else ():
        departed(Departure(f"what `{name}` gave", "of the recorded state", "of one that only the model can read"))
    given = {Ref(graph.nodes[position].name): tensor for position, tensor in request.given.items()}
    around = Around.of_replay(graph, request.grad)
    if [*map(departed, departures_of(graph, record.values, given, around))]:
        request = evolve(request, given=_on_the_recorded_path(graph, request.given))

    changed = frozenset([ref for position in request.changed for ref in refs_of(graph.nodes[position])])
    instead = Instead(graph, record.values, around, changed.union(given), dict(given), dict(given))
    views = record.plans.get("views")
    if views is None and request.changed:
        views = record.plans["views"] = writes_views(graph)

    def patched(ref: Ref, old: Any, new: torch.Tensor) -> torch.Tensor:
        if views and _is_handed_back(old, new) and parted(graph, (ref,)):
            departed(Departure(f"the memory of {ref}, which the model writes through it,", "shared", "shared again"))
        found = [*map(departed, instead.departures(ref, old, new))]
        return instead.lay(ref) if found else new

    env = needed.begin(record, request, code)
    remembered, looks = Remembered(), {p: (mark_of(tensor), sight_of(tensor)) for p, tensor in request.given.items()}
    try:
        with (
            raising(graph, partial(_altered, graph, request), departed),
            _drawing_anew() if request.fresh else nullcontext(),
            recorded_world(code.draws, graph),
            _as_running(departed, request.changed, remembered),
            noticing(patched),
        ):
            interpret(told(code) if told is not None else code, env)
    except LeftPath:
        remembered.undraw()
        raise
    return Executed(request, wanted, code, env, once, departures, remembered, looks)


def _on_the_recorded_path(graph: Graph, given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What is given as it would have to lie in memory for the model to go this way."""
    strides = {position: graph.nodes[position].meaning.strides for position in given}  # type: ignore[union-attr]
    return {p: tensor if is_wrapped(tensor) else in_layout(tensor, strides[p]) for p, tensor in given.items()}


@contextmanager
def _drawing_anew() -> Iterator[None]:
    """What a replay draws from the user's generator before it leaves its path is drawn again by the model."""
    with drawing_alone():
        state = torch.default_generator.get_state()
        try:
            yield
        except LeftPath:
            torch.default_generator.set_state(state)
            raise


def _altered(graph: Graph, request: Request) -> list[str]:
    """The nodes that may have another value than the recorded one to begin with."""
    drawn = [call.name for call in graph.calls if call.draws is not None] if request.fresh else []
    again = [
        call.name for call in graph.calls if not {graph.positions[n] for n in call.through}.isdisjoint(request.changed)
    ]
    return [*(graph.nodes[position].name for position in (*request.changed, *request.given)), *drawn, *again]


def _with_starts(record: Record, request: Request) -> Record:
    """With the values that gradients end at, where a replay begins at one: what came before has no part in them."""
    starts = request.start if request.grad and not request.at else ()
    refs = [ref for position in starts for ref in refs_of(record.graph.nodes[position])]
    if all(ref in record.values for ref in refs):
        return record
    found = recovered(record, [ref for ref in refs if ref not in record.values])
    return evolve(record, values={**record.values, **found}, plans={})


def replay(
    record: Record, request: Request, resolve: Callable[[Any], Location], told: Callable[[Code], Code] | None = None
) -> Run:
    """Run what the request needs. `resolve` finds what a user's name means, for the Run's own lookups."""
    ran = execute(record, request, told)
    graph, request, code, env = record.graph, ran.request, ran.code, ran.env
    finish = _same if request.grad else _detached_leaf
    late = Late(ran, record, supply, _known, finish)

    def by_name(name: Any) -> Any:
        at = name if isinstance(name, Location) else resolve(name)
        return _read(graph, late, ended, at)

    def get(leaf: Any) -> Any:
        return finish(env[code.slots[leaf]]) if type(leaf) is Ref else leaf

    def end(leaf: Any) -> Any:
        return ended[leaf] if type(leaf) is Ref and leaf in ended else get(leaf)

    has_output = request.to is None
    ended = {ref: finish(change(env[code.slots[ref]])) for ref, change in request.ends.items()} if has_output else {}
    output = thaw(graph.output, end) if has_output else None
    changes: dict[str, Any] = {address: get(ref) for address, ref in graph.changes} if has_output else {}
    changes |= dict.fromkeys(graph.removed) if has_output else {}
    return Run(code.executed, changes, tuple(ran.departures), output, has_output, by_name, late.everything)


def _read(graph: Graph, late: Late, ended: Mapping[Ref, Any], at: Location) -> Any:
    """What a run has at a place."""
    if (places := at.inner) is not None:
        return thaw(places, lambda leaf: _read(graph, late, ended, leaf) if type(leaf) is Location else leaf)
    if at.output is not None and at.output in ended:
        return ended[at.output]
    return late(graph.positions[at.node], at.tree(graph))


def led_astray(graph: Graph, changed: Mapping[int, tuple[Change, ...]]) -> Iterator[Departure]:
    """Patches through which the model takes gradients in a way that they cannot take part in."""
    for position, changes in changed.items():
        node = graph.nodes[position]
        if graph.shares_inputs and isinstance(node, Input):
            yield Departure(f"the memory of {node.name}", "shared with what is written", "apart from it")
        constant = not all(change.follows for change in changes) and bool(_rerun_by(graph, node.name))
        if isinstance(node, Call):
            yield from misdirected(node, constant)


def _rerun_by(graph: Graph, name: str) -> list[str]:
    """The calls that take a gradient through a node by running it again."""
    return [call.name for call in graph.calls if name in call.through]


def _is_handed_back(old: Any, new: torch.Tensor) -> bool:
    """Does a patch hand on the very memory that it was given?"""
    if new is old:
        return True
    dense = isinstance(old, torch.Tensor) and new.layout is old.layout is torch.strided
    return dense and storage_of(new) == storage_of(old)


def _same(value: Any) -> Any:
    return value


def _detached_leaf(value: Any) -> Any:
    return detached(value) if isinstance(value, torch.Tensor) else value


def _wanted(graph: Graph, request: Request) -> frozenset[int]:
    if request.to is not None:
        return frozenset((request.to,))
    return frozenset([graph.positions[ref.node] for ref in (graph.output_refs if request.at else graph.wanted_refs)])


def _leaves_generator(request: Request) -> bool:
    """Is the user's generator left where the model leaves it? A part of the program leaves it behind its last draw."""
    return request.fresh and request.to is None and not request.start


def _places(graph: Graph, request: Request) -> dict[int, tuple[Ref, ...]]:
    """The values at which a request asks for gradients, by position."""
    places: dict[int, tuple[Ref, ...]] = {}
    for ref in sorted(request.at, key=lambda ref: (graph.positions[ref.node], ref.path)):
        position = graph.positions[ref.node]
        places[position] = (*places.get(position, ()), ref)
    return places


def _compiled(record: Record, request: Request, wanted: frozenset[int], mode: Mode) -> _Entry:
    """The compiled plan for this kind of request. Patches and `departed` are looked up when it runs, so that it
    is cached.
    """
    graph = record.graph
    changed = frozenset((*request.changed, *request.given, *request.start))
    trees = tuple([(p, tuple([change.tree for change in changes])) for p, changes in sorted(request.changed.items())])
    key = (
        changed,
        frozenset(request.given),
        trees,
        wanted,
        request.keep,
        request.grad,
        request.fresh,
        request.whole,
        request.to,
        request.at,
    )
    entry = record.plans.get(key)
    if entry is None:
        known = _known(record, request)
        drawn = graph.drawn.values() if request.fresh else ()
        fresh = [position for position in drawn if _is_drawn_anew(graph, request, position)]
        places, varying = _places(graph, request), [p for p, node in enumerate(graph.nodes) if may_vary(node)]
        made = plan(
            graph,
            wanted,
            known,
            (*changed, *fresh),
            rerun_all=request.whole,
            keep=request.keep.union(places, varying),
            until=request.to,
            again=places,
            turns=graph.turns if request.fresh and not request.start else {},
            last=graph.last_drawn if _leaves_generator(request) else (),
            heeded=heeded(graph, request.changed, request.to),
        )
        _require_reached(graph, request, made)
        patches = {
            p: tuple([(c.tree, _patch_of_now(p, n)) for n, c in enumerate(changes)])
            for p, changes in request.changed.items()
        }
        boxed_mode = evolve(mode, places=places, on_departure=lambda departure: _running.stack[-1][0](departure))
        code = compile_plan(graph, made, record.draws, boxed_mode, patches, lambda ref: record.value(ref))
        refs = [ref for position in made.supply for ref in refs_of(graph.nodes[position])]
        needed = _Supply(refs, [code.slots[ref] for ref in refs], request)
        if len(record.plans) >= 64:
            record.plans.pop(next(iter(record.plans)))
        entry = record.plans[key] = (code, needed, frozenset(varying).intersection(made.run))
    return entry


def _require_reached(graph: Graph, request: Request, made: Plan) -> None:
    again = {name for position in made.run for name in graph.nodes[position].through}  # type: ignore[union-attr]
    names = {position: graph.nodes[position].name for position in request.changed}
    unreached = [name for position, name in names.items() if position not in made.patch and name not in again]
    if unreached and request.to is not None:
        raise ReplaylensError(
            f"the patch at {unreached[0]} would do nothing: {graph.nodes[request.to].name}, which is asked for, "
            "does not need it."
        )


_Entry = tuple[Code, "_Supply", frozenset[int]]


class _Supply:
    """Which recorded values a plan begins with. Those that are the same in every replay are prepared once."""

    def __init__(self, refs: list[Ref], slots: list[int], request: Request) -> None:
        self.all = list(zip(refs, slots, strict=True))
        self.same: list[Ref] = []
        self.others: list[tuple[Ref, int]] = []  # given ones, and what is a leaf of its own in each replay
        self.is_live = request.grad and not request.at  # the model's own parameters collect the gradients
        self.kept: tuple[list[torch.Tensor], list[int], Standing, list[Any]] | None = None

    def begin(self, record: Record, request: Request, code: Code) -> list[Any]:
        """The env to begin with. Plans are kept apart by which nodes are given."""
        if self.kept is None:
            return self._prepared(record, request, code)
        tensors, versions, standing, kept = self.kept
        moved = -1 not in versions and [tensor._version for tensor in tensors] != versions
        if moved or not standing:
            if self.is_live:
                return self._filled(record, request, code)
            for ref in self.same:
                record.value(ref)  # raises for the one that was overwritten
        env = kept.copy()
        for ref, slot in self.others:
            env[slot] = supply(record, request, ref)
        return env

    def _prepared(self, record: Record, request: Request, code: Code) -> list[Any]:
        """The first env, of which the next ones keep what is the same."""
        env, positions = self._filled(record, request, code), record.graph.positions
        given = {ref for ref, _ in self.all if positions[ref.node] in request.given}
        same = {ref: slot for ref, slot in self.all if ref not in given and self._is_same(record, ref, env[slot])}
        self.others = [(ref, slot) for ref, slot in self.all if ref not in same]
        self.same = list(same)
        tensors, versions = [record.values[ref] for ref in same], [record.versions[ref] for ref in same]
        kept = env.copy()
        for _, slot in self.others:
            kept[slot] = None
        self.kept = tensors, versions, Standing(_places_of(record, same)), kept
        return env

    def _is_same(self, record: Record, ref: Ref, value: torch.Tensor) -> bool:
        """Does each replay begin with this very object? For gradients only with the model's own, where they stand."""
        if not self.is_live:
            return True
        return value is record.live.get(ref.node) and record.place_of(ref) is not None

    def _filled(self, record: Record, request: Request, code: Code) -> list[Any]:
        env = list(code.template)
        for ref, slot in self.all:
            env[slot] = supply(record, request, ref)
        return env


def _places_of(record: Record, refs: Iterable[Ref]) -> list[StatePlace]:
    """The places of the model's in whose memory these values lie."""
    found = {id(place): place for ref in refs if (place := record.place_of(ref)) is not None}
    return list(found.values())


class _Running(threading.local):
    """What the replays that run in this thread are for, the innermost last: cached code looks its patches up here."""

    def __init__(self) -> None:
        self.stack: list[tuple[Callable[[Departure], None], dict[int, tuple[Change, ...]], Remembered]] = []


_running = _Running()


@contextmanager
def _as_running(
    departed: Callable[[Departure], None], changed: dict[int, tuple[Change, ...]], patched: Remembered
) -> Iterator[None]:
    depth = len(_running.stack)
    try:
        try:
            _running.stack.append((departed, changed, patched))
            yield
        finally:
            del _running.stack[depth:]
    finally:  # again: an interrupt may have come before, or in it
        del _running.stack[depth:]


def _patch_of_now(position: int, number: int) -> Callable[..., Any]:
    def patch(value: Any) -> Any:
        _, changed, patched = _running.stack[-1]
        change = changed[position][number]
        return change(value) if change.is_steady else patched.note(position, number, patched.drawing(change, value))

    return patch


def _known(record: Record, request: Request) -> bytearray:
    """Marks of the nodes with usable values. With gradients only sources and the start are: all else must have a
    history.
    """
    graph = record.graph
    marks = bytearray(len(graph))
    for position, node in enumerate(graph.nodes):
        if not isinstance(node, Call):
            marks[position] = 1
        elif request.fresh and _is_drawn_anew(graph, request, position):
            continue
        elif not request.grad or request.at or position in request.start:
            marks[position] = all(ref in record.values for ref in refs_of(node))
    return marks


def _is_drawn_anew(graph: Graph, request: Request, position: int) -> bool:
    """Does a fresh replay draw there? Not what a seed fixed, nor the layer on whose recorded value it begins."""
    node = graph.nodes[position]
    return isinstance(node, Call) and bool(node.draws) and not node.is_seeded and position not in request.start


def supply(record: Record, request: Request, ref: Ref) -> Any:
    """The value that a replay begins with: a given one, else the recorded one."""
    position = record.graph.positions[ref.node]
    given = request.given.get(position)
    if request.at:  # a history begins there, and nowhere else
        value = record.value(ref) if given is None else given
        return fresh_leaf(value) if ref in request.at else value.clone() if value.is_inference() else value.detach()
    if given is not None:
        return given if request.grad else _flagged(given, record.values[ref])
    if request.grad and (live := record.live.get(ref.node)) is not None:
        recorded = record.value(ref)
        if begin_together(live, recorded):
            return live
        node = record.graph.nodes[position]
        if isinstance(node, State) and not _is_written(record.graph, node):
            raise StaleValue(_stale_text(record.graph, ref))
        if live.grad_fn is not None:  # a buffer with the history of what was written into it since
            return recorded
        return standing(live, recorded)
    value = record.value(ref)
    if request.grad and value.is_inference():
        return value.clone()
    return value if ref.node in record.live or (request.grad and value.is_leaf) else as_leaf(value)


def _is_written(graph: Graph, node: State) -> bool:
    """Does the forward leave another value at a place of this state?"""
    written = {*[address for address, _ in graph.changes], *graph.removed}
    return not written.isdisjoint((node.address, *node.aliases))


def _flagged(given: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """A given value without a history, and with the flag that the recorded one had."""
    if given.is_inference():
        return given
    hidden = peek_interpreter_stack() is not None  # a transform forbids the flag
    return given.detach() if hidden else given.detach().requires_grad_(recorded.requires_grad)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same value without a history."""
    return tensor.detach() if tensor.requires_grad else tensor


def require_differentiable(record: Record, request: Request) -> None:
    if request.grad and record.graph.one_way:
        words = sorted(set(record.graph.one_way))
        if told := [word for word in words if ": " in word]:
            what, _, why = told[0].partition(": ")
            raise NotDifferentiable(f"gradients through {what} cannot be replayed: {why}")
        names = ", ".join(words)
        raise NotDifferentiable(
            f"gradients through {names} cannot be replayed: only the forward of this custom function "
            "could be recorded, because it "
            "reads tensors that are not its arguments, or the model was captured without gradients "
            "and has no_grad blocks of its own."
        )


def function_of(record: Record, inputs: list[int], outputs: list[int] | None, grad: bool = True) -> Callable[..., Any]:
    """The pure function from some nodes' values to the output, or to some nodes' values."""
    graph = record.graph
    require_differentiable(record, Request(grad=True))
    for call in graph.told if grad and not graph.ambient.grad else ():
        raise NotDifferentiable(
            f"{call.name} asks whether gradients are needed, and the program was captured without: as a function of "
            "torch.func it would be told otherwise. Capture it with gradients on."
        )
    wanted = outputs if outputs is not None else [graph.positions[ref.node] for ref in graph.output_refs]

    def departed(departure: Departure) -> None:
        raise diverged(departure)

    mode = Mode(grad, is_traced=True, on_departure=departed)
    known = bytearray([1 if not isinstance(node, Call) or _saved(record, node) else 0 for node in graph.nodes])
    for position in inputs:
        known[position] = 1
    made = plan(graph, wanted, known, inputs)
    places: Patches = dict.fromkeys(inputs, ())
    code = compile_plan(graph, made, record.draws, mode, places, record.value)
    slots = [code.slots[_only_ref(graph, position)] for position in inputs]
    supplied = {
        code.slots[ref]: record.value(ref) if ref.node in record.live else as_leaf(record.value(ref))
        for position in made.supply
        if position not in inputs
        for ref in refs_of(graph.nodes[position])
    }

    trees = [graph.output] if outputs is None else [value_of(graph.nodes[position]) for position in outputs]
    read = [_reader(tree, code.slots) for tree in trees]

    def finish(env: list[Any]) -> Any:
        return read[0](env) if len(read) == 1 else tuple([one(env) for one in read])

    pure = as_function(code, supplied, slots, finish, graph, _watch(record, made.supply, inputs))
    names = [graph.nodes[position].name for position in inputs]

    def function(*tensors: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
            return pure(*tensors)
        with raising(graph, lambda: names, departed):
            return pure(*tensors)

    return function


def _reader(tree: Any, slots: dict[Ref, int]) -> Callable[[list[Any]], Any]:
    """How a tree of Refs is read from the env; plain ones in a way that the compiler can follow."""
    if type(tree) is Ref:
        slot = slots[tree]
        return lambda env: env[slot]
    if type(tree) is tuple and all(type(item) is Ref for item in tree):
        several = [slots[item] for item in tree]
        return lambda env: tuple([env[slot] for slot in several])
    return lambda env: thaw(tree, lambda leaf: env[slots[leaf]] if type(leaf) is Ref else leaf)


def _watch(record: Record, supply: tuple[int, ...], inputs: list[int]) -> Callable[[Sequence[torch.Tensor]], None]:
    """Asks whether a value that a function holds was overwritten since, and whether its arguments fit."""
    refs = [ref for position in supply if position not in inputs for ref in refs_of(record.graph.nodes[position])]
    tensors, versions = [record.values[ref] for ref in refs], [record.versions[ref] for ref in refs]
    standing = Standing(_places_of(record, refs))
    names = [record.graph.nodes[position].name for position in inputs]
    astray = _astray(record.graph, inputs)

    def watch(arguments: Sequence[torch.Tensor]) -> None:
        require_arguments(record.graph, names, arguments, record.live)
        given = {Ref(name): tensor for name, tensor in zip(names, arguments, strict=True)}
        for number, (ref, departure) in astray.items():
            if peek_interpreter_stack() is not None or not same_content(record.value(ref), arguments[number]):
                raise diverged(departure)
        require_as_asked(record.graph, record.values, given)
        moved = -1 not in versions and [tensor._version for tensor in tensors] != versions
        if moved or not standing:
            for ref in refs:
                record.value(ref)  # raises for the one that was

    return watch


def _astray(graph: Graph, inputs: list[int]) -> dict[int, tuple[Ref, Departure]]:
    """The arguments of a function, by number, for which another value than the recorded one leads away."""
    found: dict[int, tuple[Ref, Departure]] = {}
    for number, position in enumerate(inputs):
        node = graph.nodes[position]
        for departure in misdirected(node, bool(_rerun_by(graph, node.name))) if isinstance(node, Call) else ():
            found[number] = _only_ref(graph, position), departure
    return found


def _saved(record: Record, node: Any) -> bool:
    return all(ref in record.values for ref in refs_of(node))


def _only_ref(graph: Graph, position: int) -> Ref:
    tree = value_of(graph.nodes[position])
    if type(tree) is not Ref:
        raise ReplaylensError(
            f"{graph.nodes[position].name} gives several tensors; a function's input must be one tensor."
        )
    return tree


def _stale_text(graph: Graph, ref: Ref, place: StatePlace | None = None) -> str:
    node = graph[ref.node]
    what = f"the {node.kind} `{node.address}`" if isinstance(node, State) else f"the recorded value of `{ref.node}`"
    how = "was overwritten since the capture, by an optimizer's step or an operation in place"
    now = place.now() if place is not None else None
    if place is not None and isinstance(node, State):
        how = place.change
        meaning = TensorMeaning.of(now) if now is not None else None
        if meaning is None or (meaning.shape, meaning.dtype, meaning.device) != _kind(node.meaning):
            is_now = "" if meaning is None else f": it is {meaning} on {meaning.device}, and was {node.meaning}"
            return f"{what} {how}{is_now}.\nCapture the model again, on inputs that fit it."
    return (
        f"{what} {how}.\n"
        "`prog = prog.refresh()` runs the program again on what is there now; `state={...}` gives "
        "other parameters to one replay."
    )


def _kind(meaning: TensorMeaning) -> tuple[Any, ...]:
    return meaning.shape, meaning.dtype, meaning.device
