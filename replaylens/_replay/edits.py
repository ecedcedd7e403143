"""Edits of a program's record: patches, swaps and insertions, opened operations, bypasses, rewirings, state, slices.

In: a Record, and what is to change, as Refs, names of nodes, tensors and functions. Out: the Record of the edited
program, and its output. How graphs are rewritten is in `_edit`; here they get their values.

A function that is swapped in is recorded on the values that it gets at each site, and its calls are spliced in: its
parameters become state of the program, its draws are recorded, and its writes in place stay its own. An opened
operation computes the same in another order, so last bits differ: `departures_beyond_rounding` compares floating
numbers that left torch up to rounding, and booleans, integers, strings and shapes exactly. How a function is recorded
is not known here: the recorder is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from .._edit.arguments import Arguments, arguments_for, function_name
from .._edit.edges import OUTPUT, bypassed, rewired, with_edge_nodes
from .._edit.expand import as_called, expand as expanded
from .._edit.lower import alias_at, keeping_layouts, lower
from .._edit.patch import Patch, keeps_layout
from .._edit.rewrite import (
    Splice,
    insert_after,
    replace,
    rewire as rewire_readers,
    splice,
    spliced_leaf,
    spliced_names,
    unread_sources,
    without,
)
from .._edit.slice import slice_of
from .._edit.unwrite import with_plain_call
from .._ir.equality import REARRANGED, REARRANGED_NARROW, is_close_number, same_content
from .._ir.graph import Graph
from .._ir.interrupts import exclusive_generator
from .._ir.label import unused_name
from .._ir.location import Location
from .._ir.memory import writable_copy
from .._ir.node import Call, Const, Guard, Node, Ref, State, TensorSpec, filled, refs_in, refs_of, specs_of, value_of
from .._ir.runtime import alias
from .._ir.target import Target
from .._ir.trees import Branch, freeze_deep, thaw
from .._ir.write import original_call
from ..errors import BadEdit, DivergedReplay, ReplaylensError
from .alias_analysis import detached_views
from .apply_edit import DrawObserver, EditAdditions, apply_edit, require_edit_policy, returns_its_memory, shares_memory
from .deferred import version_mark
from .flag_guards import OuterModes, metadata_departures
from .guards import (
    Departure,
    aliasing_hazards,
    changed_answer,
    changed_content,
    diverged_error,
    guard_identity,
    raising_node,
    same_result,
)
from .inputs import new_state, state_node
from .interpreter import modes, recorded_environment
from .record import Record, Versions, recomputed, with_values
from .replay import execute
from .request import Request


def departures_beyond_rounding(old: Record, new: Record) -> Iterator[Departure]:
    """Guards of the old program that have another answer in the new one, beyond rounding."""
    left = list(old.graph.guards)
    for guard in new.graph.guards:
        if left and guard_identity(left[0]) == guard_identity(guard):
            yield from _guard_departures(left.pop(0), guard, old, new)


def _guard_departures(was: Guard, guard: Guard, old: Record, new: Record) -> Iterator[Departure]:
    if not was.compares_content:
        if not _is_close(was.result, guard.result):
            yield from filter(None, (changed_answer(was, guard.result),))
        return
    pairs = [(old.value(one), new.value(other)) for one, other in zip(was.refs, guard.refs, strict=False)]
    yield from filter(None, (changed_content(was, *pair) for pair in pairs if not _is_close(*pair)))


def _is_close(one: Any, other: Any) -> bool:
    """True for equal values, and for floating numbers that are equal up to rounding."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not one.is_floating_point() or one.shape != other.shape:
            return one.shape == other.shape and bool((one == other).all())
        return REARRANGED.holds(other.detach(), one.detach())
    if isinstance(one, float) and isinstance(other, float):
        return same_result(one, other) or is_close_number(one, other)
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return all(map(_is_close, one, other))
    return same_result(one, other)


Recorder = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Record]


def expand(
    record: Record, names: Iterable[str], recorder: Recorder, on_divergence: str = "raise"
) -> tuple[Record, Any]:
    """The program with these calls opened. Numbers that left torch may differ as rounding lets them."""
    graph = record.graph
    whole = with_values(
        record, [ref for name in names for ref in (*graph.refs[graph.positions[name]], *refs_of(graph[name]))]
    )
    forms = {name: _record_open_form(whole, record.graph[name], recorder) for name in names}
    of_model = {id(tensor): Ref(name) for name, tensor in record.live.items()}
    shared: dict[str, dict[Ref, Ref]] = {}
    for name, form in forms.items():
        own = {Ref(node.name): of_model.get(id(form.values[Ref(node.name)])) for node in form.graph.const_nodes}
        shared[name] = {inner: ref for inner, ref in own.items() if ref is not None}
    made = expanded(graph, {name: form.graph for name, form in forms.items()}, shared)
    constants = {
        made.names[name][node.name]: form.values[Ref(node.name)]
        for name, form in forms.items()
        for node in form.graph.const_nodes
        if Ref(node.name) not in shared[name]
    }
    draws = {made.draws[name][key]: state for name, form in forms.items() for key, state in form.draws.items()}
    found, output = apply_edit(record, made.graph, EditAdditions(constants, draws=draws), "ignore")
    if on_divergence == "raise" and (away := next(departures_beyond_rounding(record, found), None)) is not None:
        raise diverged_error(away)
    return found, output


def _record_open_form(record: Record, call: Any, recorder: Recorder) -> Record:
    """The record of a call's open form on what the call was given, in its modes and with its draws."""
    assert isinstance(call, Call)
    given: dict[Ref, torch.Tensor] = {}  # one tensor for each value, and none for two

    def operand(ref: Ref) -> torch.Tensor:
        return given.setdefault(ref, record.value(ref).detach())

    args, kwargs = filled(call.args, operand), {key: filled(value, operand) for key, value in call.kwargs}
    with recorded_environment(call.draws is not None, record.graph), modes(call.context):
        if call.draws is not None:
            torch.default_generator.set_state(record.draws[call.draws])
        form = recorder(as_called(call), args, kwargs)
    for made, ref in zip(form.graph.output[0].items, specs_of(call), strict=True):
        _require_same(call, form.values[made], record.value(ref))
    held = {Ref(node.name): form.values[Ref(node.name)] for node in form.graph.const_nodes}
    return evolve(form, values=held)  # the rest comes again when the program is derived


def _require_same(call: Call, made: torch.Tensor, recorded: torch.Tensor) -> None:
    """Raises if an open form does not give what the call gave: a kernel may draw random numbers in its own way."""
    is_rough = bool(call.context.autocast) or recorded.dtype in (torch.float16, torch.bfloat16)
    both = made.detach().isfinite() & recorded.detach().isfinite()
    if not both.any():
        return
    away = float((made.detach() - recorded.detach())[both].abs().max())
    largest = float(recorded.detach()[both].abs().max())
    if away > (REARRANGED_NARROW if is_rough else REARRANGED).of_largest * largest:
        raise ReplaylensError(
            f"`{call.name}` cannot be expanded: open operations give values up to {away:.2g} away from what it gave "
            f"(at most {largest:.2g}).{' It draws random numbers in a way of its own.' if call.draws else ''}"
        )


DerivedRecord = tuple[Record, Any]
BoundPatches = Sequence[tuple[Location, Sequence[tuple[Any, Patch]]]]


@exclusive_generator()
def patch(record: Record, bound: BoundPatches, request: Request) -> DerivedRecord:
    """Patches put into the program: at each Location those for the values there.

    `request` is a replay with the same patches. It runs first, and raises for invalid patches.
    """
    require_edit_policy(request.on_divergence)
    watched = DrawObserver(record.draws)
    execute(record, request)
    on_divergence = request.on_divergence
    graph, names = record.graph, set()
    tensors: dict[str, torch.Tensor] = {}
    for name, patches in _by_node(graph, bound).items():
        made = lower(graph, name, patches)
        graph, tensors = made.graph, {**tensors, **made.tensors}
        names |= {name} if all(keeps_layout(patch) for _, patch in patches) else set()
    for ref, one in [pair for at, patches in bound if at.output is not None for pair in patches]:
        graph, (name,) = with_edge_nodes(graph, (ref if ref in graph.output_refs else Ref(ref.node),), (OUTPUT,))
        made = lower(graph, name, [(Ref(name), one)])
        graph, tensors = made.graph, {**tensors, **made.tensors}
        names |= {name} if keeps_layout(one) else set()
    added = EditAdditions(tensors, {name: tensor for name, tensor in tensors.items() if tensor.requires_grad})
    known = {id(call.spec) for call in record.graph.calls}  # also of those that go on under another name
    functions = {call.name for call in graph.edited if id(call.spec) not in known}

    def made_by(graph: Graph, on_divergence: str) -> DerivedRecord:
        return watched(graph, functions, lambda each: apply_edit(record, each, added, on_divergence))

    try:
        derived = made_by(graph, on_divergence)
    except (DivergedReplay, RuntimeError):  # perhaps by the memory layout alone, which is put right below
        if not (names := {name for name in names if type(value_of(graph[name])) is Ref}):
            raise
        return made_by(keeping_layouts(graph, names), on_divergence)
    other = _other_strides(record.graph, derived[0].graph, names)
    return made_by(keeping_layouts(graph, other), on_divergence) if other else derived


def _by_node(graph: Graph, bound: BoundPatches) -> dict[str, list[tuple[Any, Patch]]]:
    found: dict[str, list[tuple[Any, Patch]]] = {}
    for at, patches in bound:
        if at.output is None:
            found.setdefault(at.node, []).extend(patches)
    return found


def _other_strides(old: Graph, new: Graph, names: Iterable[str]) -> list[str]:
    """The patches that gave another memory layout than the recorded one."""
    found = []
    for name in names:
        before = value_of(old[name]) if name in old else None
        if type(before) is Ref and type(value_of(new[name])) is Ref:
            wanted, now = specs_of(old[name])[before].strides, specs_of(new[name])[Ref(name)].strides
            if wanted is not None and now is not None and wanted != now:
                found.append(name)
    return found


def bypass(
    record: Record, names: Iterable[str], to: Any, resolve: Callable[[Any], Ref], on_divergence: str = "raise"
) -> DerivedRecord:
    """Nodes that pass on what they read."""
    graph = record.graph
    for name in names:
        graph = bypassed(graph, name, to, resolve)
    return apply_edit(record, without(graph, unread_sources(record.graph, graph)), on_divergence=on_divergence)


def rewire(record: Record, readers: Sequence[str], old: Ref, new: Ref, on_divergence: str = "raise") -> DerivedRecord:
    """Some nodes read another value instead of `old`."""
    graph = rewired(record.graph, readers, old, new)
    return apply_edit(record, without(graph, unread_sources(record.graph, graph)), on_divergence=on_divergence)


def with_state(
    record: Record, address: str, value: Any, nearest: Callable[[str], str], on_divergence: str
) -> DerivedRecord:
    """Another parameter or buffer, from now on the program's own: a tensor, or a function of the present one."""
    require_edit_policy(on_divergence)
    if not isinstance(value, torch.Tensor):
        node = state_node(record.graph, address, nearest)
        with torch.no_grad():
            value = value(record.value(Ref(node.name)).detach().clone())
    found = new_state(record.graph, {address: value}, nearest, record.account).fitting
    if not found:  # no operation reads it
        return apply_edit(record, record.graph, on_divergence=on_divergence)
    ((position, tensor),) = found.items()
    name = record.graph.nodes[position].name
    flag = record.values[Ref(name)].requires_grad  # torch chooses kernels by it
    held = tensor if tensor.is_inference() else tensor.detach().requires_grad_(flag)
    for departure in metadata_departures(
        record.graph, record.values, {Ref(name): held}, OuterModes.of_replay(record.graph, False)
    ):
        if on_divergence == "raise":
            raise diverged_error(departure)
    added = EditAdditions({name: held}, {name: tensor if tensor.requires_grad else held})
    return apply_edit(record, record.graph, added, on_divergence)


def tap(record: Record, sender: tuple[Ref, ...], readers: Sequence[str]) -> tuple[Record, Any, tuple[str, ...]]:
    """The program with a node for what some readers, and only they, read from another node."""
    graph, names = with_edge_nodes(record.graph, sender, readers)
    return (*apply_edit(record, graph), names)


def slice_record(record: Record, starts: Sequence[Any] | None, output: Any, repeats: bool = False) -> DerivedRecord:
    """The record of a slice of the program. Nothing runs: its values are those of the whole. `repeats`: as a module."""
    made = slice_of(record.graph, starts, output, repeats)
    sources = [Ref(node.name) for node in made.graph.nodes if not isinstance(node, Call)]
    record = with_values(record, [made.values[ref] for ref in sources])
    values = {new: record.values[old] for new, old in made.values.items() if old in record.values}
    stays = [node.name for node in made.graph.input_nodes if made.values[Ref(node.name)] == Ref(node.name)]
    names = {node.name for node in made.graph.state_nodes} | {node.name for node in made.graph.const_nodes}
    fresh = Record(
        made.graph,
        values,
        Versions((new, record.versions[old]) for new, old in made.values.items()),
        record.draws,
        {name: tensor for name, tensor in record.live.items() if name in names.union(stays)},
        account=record.account.untimed(),
        saved=record.saved,
        places=record.places,
    )
    missing = [ref for ref in refs_in(made.graph.output) if ref not in values]
    found = recomputed(fresh, missing) if missing else {}
    return fresh, filled(made.graph.output, lambda ref: found[ref] if ref in found else fresh.value(ref))


@frozen(eq=False)
class SwapSite:
    """A plain call that a function replaces, and what the function is given there."""

    name: str
    given: Arguments
    edited: str
    wanted: TensorSpec | None = None  # of its value, where no recorded node says so


def swap(
    record: Record,
    names: Iterable[str],
    function: Callable[..., Any],
    recorder: Recorder,
    with_args: bool = True,
    on_divergence: str = "raise",
) -> tuple[Record, Any]:
    """A function in place of some calls."""
    graph, sites = record.graph, []
    for name in names:
        node = graph[name]
        while isinstance(node, Call) and node.edits is not None:  # a patch: what it patches is meant
            node = graph[node.edits]
        if is_call_of(node, function):
            continue
        graph, plain = with_plain_call(graph, node.name)
        call = graph[plain]
        assert isinstance(call, Call)
        wanted = call.spec[0] if plain != node.name else None
        sites.append(SwapSite(plain, arguments_for(graph, call, function, with_args), f"was {call.kind}", wanted))
    return _recorded(record, graph, sites, function, recorder, on_divergence)


def is_call_of(node: Node, function: Callable[..., Any]) -> bool:
    """True if this is the very call that a swap for the function would give."""
    return isinstance(node, Call) and original_call(node).target.function is function


def insert(
    record: Record,
    refs: Iterable[Ref],
    ends: Iterable[Ref],
    function: Callable[..., Any],
    recorder: Recorder,
    on_divergence: str = "raise",
) -> tuple[Record, Any]:
    """A function behind some values: all their readers read its result instead. Behind those in `ends`, only the
    output of the program does.
    """
    graph, sites = record.graph, []
    now: dict[Ref, Ref] = {}  # what the output gives by then
    for ref, is_end in (*[(ref, False) for ref in refs], *[(ref, True) for ref in ends]):
        ref = now.get(ref, ref)
        node = graph[ref.node]
        if isinstance(node, Call) and on_divergence == "raise":
            for departure in aliasing_hazards(node, False):
                raise diverged_error(departure)
        name = unused_name(f"{function_name(function).lower().replace('_', '')}_after_{ref.node}", graph.positions)
        place = alias_at(graph, name, ref, node)
        if is_end:
            graph = rewire_readers(insert_after(graph, node.name, (place,)), (OUTPUT,), {ref: Ref(name)})
        else:
            kept = {"module_outputs": graph.module_outputs, "changes": graph.changes}
            asked = _asked_again(graph, ref)
            graph = replace(graph, {node.name: (node, place)}, {ref: Ref(name)}, **kept)
            graph = evolve(graph, guards=tuple(sorted((*graph.guards, *asked), key=lambda guard: guard.position)))
            now[ref] = Ref(name)
        sites.append(SwapSite(name, Arguments((ref,)), f"inserted after {ref}", place.spec[0]))
    made, output = _recorded(record, graph, sites, function, recorder, on_divergence)
    if on_divergence == "raise" and detached_views(made.graph, ()):
        for site in sites:
            call, (given,) = made.graph[site.name], site.given.args
            if isinstance(call, Call) and shares_memory(made.values, (Ref(site.name),), (given,)):
                raise diverged_error(returns_its_memory(call))
    return made, output


def _asked_again(graph: Graph, ref: Ref) -> list[Guard]:
    """A guard on the shape of a value, where content decides it: a function is recorded for one shape of what it is
    given, and its result, of which the model's own guard asks from now on, may have the same shape for any.
    """
    for guard in graph.guards:
        if guard.kind == "shape" and ref in guard.refs:
            sizes = guard.result[guard.refs.index(ref)]
            position = graph.positions[ref.node] + 1
            return [evolve(guard, target=Target.of(alias), args=(ref,), kwargs=(), result=(sizes,), position=position)]
    return []


def _recorded(
    record: Record,
    graph: Graph,
    sites: list[SwapSite],
    function: Callable[..., Any],
    recorder: Recorder,
    on_divergence: str,
) -> tuple[Record, Any]:
    """The graph with the calls of the function at each site, as recorded in one run through all of them."""
    with exclusive_generator():
        trial = _SwapTrial(graph, function, recorder)
        places = {site.name: (trial.place(site),) for site in sites}
        wanted = {Ref(site.name): site.wanted for site in sites if site.wanted is not None}
        trial.run(record, replace(graph, places), wanted, on_divergence)
    spliced = _SplicedGraph(record, graph)
    for site in sites:
        spliced.splice_in(site, trial.seen[site.name])
    made = without(spliced.graph, unread_sources(record.graph, spliced.graph))
    return apply_edit(record, made, EditAdditions(spliced.values, spliced.live, spliced.draws), on_divergence, wanted)


# -- seeing what the function does -------------------------------------------------------------------------------------


@define(eq=False)
class _SwapTrial:
    """One run in which the function itself stands at its sites, and is recorded at each."""

    graph: Graph
    function: Callable[..., Any]
    recorder: Recorder
    seen: dict[str, Record] = field(factory=dict)
    generator: torch.Tensor = field(factory=lambda: torch.default_generator.get_state())

    def place(self, site: SwapSite) -> Call:
        """The call that stands at a site during the trial."""
        call = self.graph[site.name]
        assert isinstance(call, Call)

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._watch(call, site, args, kwargs)

        target = Target(function_name(self.function), watched, is_stable=False)
        plain = evolve(call, target=target, draws=None, is_dynamic=False, edited=site.edited)
        return evolve(plain, args=site.given.args, kwargs=site.given.kwargs)

    def run(self, record: Record, graph: Graph, wanted: Mapping[Ref, TensorSpec], on_divergence: str) -> None:
        """Runs what the sites can reach. The function draws from the generators as it would anywhere."""
        try:
            apply_edit(record, graph, on_divergence="ignore", wanted=wanted)
        except ReplaylensError:
            raise
        except Exception as error:  # of the model's own operation, perhaps: then it is a departure
            node = graph[name] if (name := raising_node(error)) in graph else None
            if on_divergence == "ignore" or node is None or (isinstance(node, Call) and node.edited):
                raise
            apply_edit(record, graph, wanted=wanted)
            raise
        torch.default_generator.set_state(self.generator)

    def _watch(self, call: Call, site: SwapSite, args: Any, kwargs: Any) -> Any:
        order = iter(site.given.in_order)
        copies: dict[Ref, torch.Tensor] = {}  # one for each value that it is given, and for one given twice
        originals: dict[Ref, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            ref = next(order)
            if ref not in copies:
                copies[ref], originals[ref] = writable_copy(tensor), tensor
            return copies[ref]

        given, named = thaw(freeze_deep((args, kwargs), copy), lambda leaf: leaf)
        outside = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator)
        try:
            marks = [(tensor, copies[ref].detach(), version_mark(copies[ref])) for ref, tensor in originals.items()]
            seen = self.recorder(self.function, given, named)
            if any(version_mark(there) == mark and not same_content(there, tensor) for tensor, there, mark in marks):
                seen = evolve(seen, graph=evolve(seen.graph, forward_only=(*seen.graph.forward_only, _UNSEEN)))
            self.seen[call.name] = seen
        finally:
            self.generator = torch.default_generator.get_state()
            torch.default_generator.set_state(outside)
        _restore_buffers(seen)
        _require_alike(call, seen.graph.output, self.function)
        return filled(seen.graph.output, seen.values.__getitem__)


_UNSEEN = (
    "a function that writes what it is given by .data or numpy: torch's own backward reads what is there by then, "
    "without a sign. Let it compute with a copy."
)


def _restore_buffers(seen: Record) -> None:
    """Undoes what the function wrote to its own buffers: an edit leaves the function as it was."""
    names = {node.address: node.name for node in seen.graph.state_nodes}
    with torch.no_grad():
        for address, _ in seen.graph.changes:
            if (name := names.get(address)) is not None and name in seen.live:
                seen.live[name].copy_(seen.values[Ref(name)])


def _require_alike(call: Call, output: Any, function: Callable[..., Any]) -> None:
    """Raises unless the function gives as many tensors as the call, in the same order."""
    before, after = _shape(value_of(call)), _shape(output)
    if before != after:
        raise BadEdit(f"{call.name} gives {_shape_text(before)}; {function_name(function)} gives {_shape_text(after)}.")


def _shape(tree: Any) -> Any:
    """The containers of a tree, with a dot for each tensor."""
    if type(tree) is Ref:
        return "."
    is_sequence = isinstance(tree, Branch) and issubclass(tree.kind, (list, tuple))
    items = tree.items if is_sequence else tree if type(tree) is tuple else None
    return type(tree).__name__ if items is None else tuple(map(_shape, items))


def _shape_text(shape: Any) -> str:
    if shape == ".":
        return "a tensor"
    return str(shape).replace("'.'", "tensor").replace(",)", ")") if isinstance(shape, tuple) else str(shape)


# -- putting it there --------------------------------------------------------------------------------------------------


class _SplicedGraph:
    """The graph as it grows, and the tensors of what was spliced into it."""

    def __init__(self, record: Record, graph: Graph) -> None:
        self.graph, self.record = graph, record
        self.values: dict[str, torch.Tensor] = {}
        self.live: dict[str, torch.Tensor] = {}
        self.draws: dict[str, torch.Tensor] = {}
        live = [(node, record.live[node.name]) for node in graph.state_nodes if node.name in record.live]
        self.now = {id(tensor): Ref(node.name) for node, tensor in live}  # what a tensor of the model's own holds
        self.home = {id(tensor): node.address for node, tensor in live}

    def splice_in(self, site: SwapSite, seen: Record) -> None:
        """Splices the calls recorded at a site into it."""
        owner, tensors = site.name, _sources(seen)
        shared = {Ref(name): ref for name, tensor in tensors.items() if (ref := self.now.get(id(tensor))) is not None}
        names = {
            node.name: unused_name(f"{owner}.{node.address}", self.graph.positions)
            for node in seen.graph.state_nodes
            if node.kind == "parameter"
        }
        keys = {key: unused_name(f"{key}_of_{owner}", {**self.record.draws, **self.draws}) for key in seen.draws}
        sub, how = _addressed(seen.graph, owner), Splice(site.given.refs, shared, names, keys, site.edited)
        called = spliced_names(self.graph, owner, sub, how)
        there = spliced_leaf(self.graph, owner, sub, how)
        self.graph = splice(self.graph, owner, sub, how)
        self.draws.update({keys[key]: state for key, state in seen.draws.items()})
        homes = {node.name: node.address for node in sub.state_nodes}
        for name, tensor in tensors.items():
            if name not in called:
                continue
            self.values[called[name]] = seen.values[Ref(name)]
            self.now[id(tensor)] = Ref(called[name])
            if name in homes:
                self.home[id(tensor)] = homes[name]
            if name in seen.live or tensor.requires_grad:
                self.live[called[name]] = tensor
        self._take_writes(sub, tensors, there)

    def _take_writes(self, sub: Graph, tensors: Mapping[str, torch.Tensor], there: Callable[[Any], Any]) -> None:
        """The program takes over what the function writes to its own buffers; the next site reads it from there."""
        held = {node.address: tensors[node.name] for node in sub.state_nodes}
        changes = dict(self.graph.changes)
        for address, ref in sub.changes:
            tensor = held.get(address)
            if tensor is None:
                changes[address] = there(ref)
            else:
                changes[self.home[id(tensor)]] = self.now[id(tensor)] = there(ref)
        self.graph = evolve(self.graph, changes=tuple(changes.items()))


def _sources(seen: Record) -> dict[str, torch.Tensor]:
    """The very tensors that the function read besides its arguments, by the nodes that stand for them."""
    nodes: tuple[State | Const, ...] = (*seen.graph.state_nodes, *seen.graph.const_nodes)
    return {node.name: seen.live.get(node.name, seen.values[Ref(node.name)]) for node in nodes}


def _addressed(graph: Graph, owner: str) -> Graph:
    """The graph with its state under addresses of the program: those of the function, behind the name of the site."""

    def moved(node: Node) -> Node:
        if not isinstance(node, State):
            return node
        return evolve(node, address=f"{owner}.{node.address}", aliases=tuple([f"{owner}.{a}" for a in node.aliases]))

    changes = tuple([(f"{owner}.{address}", ref) for address, ref in graph.changes])
    return evolve(graph, nodes=tuple(map(moved, graph.nodes)), changes=changes)
