"""Edits of a program's record: patches put into it, fused operations opened, nodes bypassed and rewired, other
state, slices.

In: a Record, and what is to change, as Refs, names of nodes and tensors. Out: the Record of the edited program, and
its output. How graphs are rewritten is in `_edit`; here they get their values.

An opened operation computes the same in another order, so last bits differ: `departures_beyond_rounding` compares
floating numbers that left torch up to rounding, and booleans, integers, strings and shapes exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve

from .._edit.bypass import bypassed
from .._edit.edges import OUTPUT, rewired, tapped
from .._edit.expand import as_called, expand as expanded
from .._edit.lower import in_their_layout, lower
from .._edit.patch import Patch, keeps_layout
from .._edit.rewrite import unread_sources, without
from .._edit.slice import slice_of
from .._ir.graph import Graph
from .._ir.location import Location
from .._ir.node import Call, Guard, Ref, filled, refs_of, specs_of, value_of
from .._ir.tolerances import REARRANGED, REARRANGED_NARROW, is_close_number
from .._ir.world import drawing_alone
from ..errors import DivergedReplay, ReplaylensError
from .apply_edit import EditAdditions, Watched, apply_edit, require_choice
from .flag_guards import OuterModes, departures
from .guards import Departure, changed, changed_content, diverged, place, same_result
from .inputs import new_state, state_called
from .interpreter import modes, recorded_world
from .record import Record, Versions
from .replay import execute
from .request import Request
from .retention import with_values


def departures_beyond_rounding(old: Record, new: Record) -> Iterator[Departure]:
    """Guards of the old program that have another answer in the new one, beyond rounding."""
    left = list(old.graph.guards)
    for guard in new.graph.guards:
        if left and place(left[0]) == place(guard):
            yield from _guard_departures(left.pop(0), guard, old, new)


def _guard_departures(was: Guard, guard: Guard, old: Record, new: Record) -> Iterator[Departure]:
    if not was.compares_content:
        if not _is_close(was.result, guard.result):
            yield from filter(None, (changed(was, guard.result),))
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
        raise diverged(away)
    return found, output


def _record_open_form(record: Record, call: Any, recorder: Recorder) -> Record:
    """The record of a call's open form on what the call was given, in its modes and with its draws."""
    assert isinstance(call, Call)
    given: dict[Ref, torch.Tensor] = {}  # one tensor for each value, and none for two

    def operand(ref: Ref) -> torch.Tensor:
        return given.setdefault(ref, record.value(ref).detach())

    args, kwargs = filled(call.args, operand), {key: filled(value, operand) for key, value in call.kwargs}
    with recorded_world(call.draws is not None, record.graph), modes(call.context):
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


Made = tuple[Record, Any]
Bound = Sequence[tuple[Location, Sequence[tuple[Any, Patch]]]]


@drawing_alone()
def patch(record: Record, bound: Bound, request: Request) -> Made:
    """Patches put into the program: at each Location those for the values there.

    `request` is a replay with the same patches. It runs first, and raises for invalid patches.
    """
    require_choice(request.on_divergence)
    watched = Watched(record.draws)
    execute(record, request)
    on_divergence = request.on_divergence
    graph, names = record.graph, set()
    tensors: dict[str, torch.Tensor] = {}
    for name, patches in _by_node(graph, bound).items():
        made = lower(graph, name, patches)
        graph, tensors = made.graph, {**tensors, **made.tensors}
        names |= {name} if all(keeps_layout(patch) for _, patch in patches) else set()
    for ref, one in [pair for at, patches in bound if at.output is not None for pair in patches]:
        graph, (name,) = tapped(graph, (ref if ref in graph.output_refs else Ref(ref.node),), (OUTPUT,))
        made = lower(graph, name, [(Ref(name), one)])
        graph, tensors = made.graph, {**tensors, **made.tensors}
        names |= {name} if keeps_layout(one) else set()
    added = EditAdditions(tensors, {name: tensor for name, tensor in tensors.items() if tensor.requires_grad})
    known = {id(call.meaning) for call in record.graph.calls}  # also of those that go on under another name
    functions = {call.name for call in graph.edited if id(call.meaning) not in known}

    def made_by(graph: Graph, on_divergence: str) -> Made:
        return watched(graph, functions, lambda each: apply_edit(record, each, added, on_divergence))

    try:
        derived = made_by(graph, on_divergence)
    except (DivergedReplay, RuntimeError):  # perhaps by the memory layout alone, which is put right below
        if not (names := {name for name in names if type(value_of(graph[name])) is Ref}):
            raise
        return made_by(in_their_layout(graph, names), on_divergence)
    other = _other_strides(record.graph, derived[0].graph, names)
    return made_by(in_their_layout(graph, other), on_divergence) if other else derived


def _by_node(graph: Graph, bound: Bound) -> dict[str, list[tuple[Any, Patch]]]:
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
) -> Made:
    """Nodes that pass on what they read."""
    graph = record.graph
    for name in names:
        graph = bypassed(graph, name, to, resolve)
    return apply_edit(record, without(graph, unread_sources(record.graph, graph)), on_divergence=on_divergence)


def rewire(record: Record, readers: Sequence[str], old: Ref, new: Ref, on_divergence: str = "raise") -> Made:
    """Some nodes read another value instead of `old`."""
    graph = rewired(record.graph, readers, old, new)
    return apply_edit(record, without(graph, unread_sources(record.graph, graph)), on_divergence=on_divergence)


def with_state(record: Record, address: str, value: Any, nearest: Callable[[str], str], on_divergence: str) -> Made:
    """Another parameter or buffer, from now on the program's own: a tensor, or a function of the present one."""
    require_choice(on_divergence)
    if not isinstance(value, torch.Tensor):
        node = state_called(record.graph, address, nearest)
        with torch.no_grad():
            value = value(record.value(Ref(node.name)).detach().clone())
    found = new_state(record.graph, {address: value}, nearest, record.account).fitting
    if not found:  # no operation reads it
        return apply_edit(record, record.graph, on_divergence=on_divergence)
    ((position, tensor),) = found.items()
    name = record.graph.nodes[position].name
    flag = record.values[Ref(name)].requires_grad  # torch chooses kernels by it
    held = tensor if tensor.is_inference() else tensor.detach().requires_grad_(flag)
    for departure in departures(
        record.graph, record.values, {Ref(name): held}, OuterModes.of_replay(record.graph, False)
    ):
        if on_divergence == "raise":
            raise diverged(departure)
    added = EditAdditions({name: held}, {name: tensor if tensor.requires_grad else held})
    return apply_edit(record, record.graph, added, on_divergence)


def tap(record: Record, sender: tuple[Ref, ...], readers: Sequence[str]) -> tuple[Record, Any, tuple[str, ...]]:
    """The program with a node for what some readers, and only they, read from another node."""
    graph, names = tapped(record.graph, sender, readers)
    return (*apply_edit(record, graph), names)


def cut_out(record: Record, starts: Sequence[Any] | None, output: Any) -> Made:
    """The record of a slice of the program. Nothing runs: its values are those of the whole."""
    made = slice_of(record.graph, starts, output)
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
    return fresh, filled(made.graph.output, fresh.value)
