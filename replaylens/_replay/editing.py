"""Edits of a program's record: patches put into it, nodes bypassed and rewired, other state, slices.

In: a Record, and what is to be another, as Refs, names of nodes and tensors. Out: the Record of the edited program, and
what it returns. How a graph is rewritten is in `_edit`; here it gets its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .._core.graph import Graph
from .._core.location import Location
from .._core.node import Call, Ref, meanings_of, value_of
from .._core.trees import thaw
from .._core.world import drawing_alone
from .._edit.bypass import bypassed
from .._edit.cut import cut
from .._edit.edges import OUTPUT, rewired, tapped
from .._edit.lower import in_their_layout, lower
from .._edit.patch import Patch, keeps_layout
from .._edit.rewrite import unread_sources, without
from ..errors import DivergedReplay
from .derive import Added, derive, require_choice
from .edit_draws import Watched
from .flag_guards import Around, departures
from .guards import diverged
from .inputs import new_state, state_called
from .keeping import with_values
from .record import Record, Versions
from .replay import execute
from .request import Request

Made = tuple[Record, Any]
Bound = Sequence[tuple[Location, Sequence[tuple[Any, Patch]]]]


@drawing_alone()
def patch(record: Record, bound: Bound, request: Request) -> Made:
    """Patches put into the program: at each place those of the values that lie there.

    `request` asks for a replay with the same patches. It is made first: it says what is wrong with them.
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
    added = Added(tensors, {name: tensor for name, tensor in tensors.items() if tensor.requires_grad})
    known = {id(call.meaning) for call in record.graph.calls}  # also of those that go on under another name
    functions = {call.name for call in graph.edited if id(call.meaning) not in known}

    def made_by(graph: Graph, on_divergence: str) -> Made:
        return watched(graph, functions, lambda each: derive(record, each, added, on_divergence))

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
    """The patches that gave another memory layout than was recorded."""
    found = []
    for name in names:
        before = value_of(old[name]) if name in old else None
        if type(before) is Ref and type(value_of(new[name])) is Ref:
            wanted, now = meanings_of(old[name])[before].strides, meanings_of(new[name])[Ref(name)].strides
            if wanted is not None and now is not None and wanted != now:
                found.append(name)
    return found


def bypass(
    record: Record, names: Iterable[str], to: Any, resolve: Callable[[Any], Ref], on_divergence: str = "raise"
) -> Made:
    """Nodes that hand on what they read."""
    graph = record.graph
    for name in names:
        graph = bypassed(graph, name, to, resolve)
    return derive(record, without(graph, unread_sources(record.graph, graph)), on_divergence=on_divergence)


def rewire(record: Record, readers: Sequence[str], old: Ref, new: Ref, on_divergence: str = "raise") -> Made:
    """Some nodes read another value in the place of one."""
    graph = rewired(record.graph, readers, old, new)
    return derive(record, without(graph, unread_sources(record.graph, graph)), on_divergence=on_divergence)


def with_state(record: Record, address: str, value: Any, nearest: Callable[[str], str], on_divergence: str) -> Made:
    """Another parameter or buffer, the program's own from now on: a tensor, or a function of the present one."""
    require_choice(on_divergence)
    if not isinstance(value, torch.Tensor):
        node = state_called(record.graph, address, nearest)
        with torch.no_grad():
            value = value(record.value(Ref(node.name)).detach().clone())
    found = new_state(record.graph, {address: value}, nearest, record.account).fitting
    if not found:  # no operation reads it
        return derive(record, record.graph, on_divergence=on_divergence)
    ((position, tensor),) = found.items()
    name = record.graph.nodes[position].name
    held = _with_flag(tensor, record.values[Ref(name)].requires_grad)
    for departure in departures(record.graph, record.values, {Ref(name): held}, Around.of_replay(record.graph, False)):
        if on_divergence == "raise":
            raise diverged(departure)
    added = Added({name: held}, {name: tensor if tensor.requires_grad else held})
    return derive(record, record.graph, added, on_divergence)


def _with_flag(tensor: torch.Tensor, flag: bool) -> torch.Tensor:
    """The content without a history; torch chooses kernels by whether a tensor needs gradients."""
    return tensor if tensor.is_inference() else tensor.detach().requires_grad_(flag)


def tap(record: Record, sender: tuple[Ref, ...], readers: Sequence[str]) -> tuple[Record, Any, tuple[str, ...]]:
    """The program with a node for what some nodes, and only they, read from another."""
    graph, names = tapped(record.graph, sender, readers)
    return (*derive(record, graph), names)


def cut_out(record: Record, starts: Sequence[Any] | None, output: Any) -> Made:
    """The record of a slice of the program. Nothing runs: its values are those of the whole."""
    made = cut(record.graph, starts, output)
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
    return fresh, thaw(made.graph.output, lambda leaf: fresh.value(leaf) if type(leaf) is Ref else leaf)
