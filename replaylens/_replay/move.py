"""The same program on other tensors: refreshed after training, moved to another device, cast to another dtype; and
whether the model's state still lies as the recorded forward found it.

In: a Record, and what the model holds at its addresses now. Out: another Record whose values are those of a new run,
and its output; or a Departure for each fact of the state that differs and that the forward's own assignments could
have changed: its shape and dtype, whether two addresses hold one tensor, whether written state shares memory.

A module and a refreshed program begin where the model stands, after whatever earlier forwards assigned, so this is
checked each time. A forward that assigns nothing cannot have changed any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, NoReturn

import torch
from attrs import evolve
from torch import nn

from .._ir.autograd import as_leaf, with_history_of
from .._ir.graph import Graph
from .._ir.memory import Overlaps, Pair, storage_of, version_of
from .._ir.model_state import StatePlace, fused_steps, raw_state
from .._ir.node import Call, Node, Ref, State, TensorSpec, filled, refs_in, with_leaves
from ..errors import DivergedReplay, StaleValue
from .compile import CompiledGraph
from .flag_guards import OuterModes, require_same_answers
from .guards import Departure
from .plan import plan
from .record import Record, Versions, keeping_only
from .runner import run

At = Callable[[str], torch.Tensor | None]  # the tensor at an address now


class InitialStateLayout:
    """How the state was laid out when the recorded forward began."""

    def __init__(self, record: Record) -> None:
        graph = record.graph
        ends = {*[address for address, _ in graph.changes], *graph.removed}
        given = addresses_given_memory(graph)
        moved = graph.replaced | given
        nodes = graph.state_nodes
        self.graph = graph
        left = [node for node in nodes if not ends.isdisjoint((node.address, *node.aliases))]
        self.written_back = {node.name: node for node in left}
        self.tied = [node for node in nodes if node.aliases]
        self.moved = frozenset([node.name for node in nodes if not moved.isdisjoint((node.address, *node.aliases))])
        self.touched = graph.overlaps.touched | {ref.node for ref in graph.written}
        first = {node.name: record.live.get(node.name) for node in nodes if node.address not in given}
        known = {address for node in nodes for address in (node.address, *node.aliases)}
        # addresses that the forward did not read, but whose tensors it wrote in the memory of others
        self.written_with = {address for address, _ in graph.changes} - known - graph.replaced - given
        self.overlaps = self._overlapping({name: tensor for name, tensor in first.items() if tensor is not None})

    def departures(self, now: At) -> Iterator[Departure]:
        """Facts of that layout that differ for the tensors held now."""
        for node in self.written_back.values():
            yield from _kind_departures(node, now(node.address))
        for node in self.tied:
            for other in node.aliases:
                first, second = now(node.address), now(other)
                if first is not None and second is not None and first is not second:
                    yield Departure(f"whether `{node.address}` and `{other}` hold one tensor", "True", "False")
        if self.moved and self.touched:
            held = {node.name: now(node.address) for node in self.graph.state_nodes}
            meeting = self._overlapping({name: tensor for name, tensor in held.items() if tensor is not None})
            for one, other in sorted(meeting ^ self.overlaps):
                shared = ("apart", "shared") if (one, other) in meeting else ("shared", "apart")
                yield Departure(f"the memory of {one} and {other}, which the model writes,", *shared)
            both = [held[name] for name in self.moved & self.touched]
            memory = {storage_of(tensor) for tensor in both if tensor is not None}
            for address in sorted(self.written_with if memory else ()):
                if (tensor := now(address)) is not None and storage_of(tensor) not in memory:
                    yield Departure(f"the memory of {address}, which the model writes,", "shared", "apart")

    def _overlapping(self, tensors: dict[str, torch.Tensor]) -> frozenset[Pair]:
        """The pairs that share memory, where one is written and one is reassigned by the forward."""
        if not self.touched or not self.moved:
            return frozenset()
        found = Overlaps.among(tensors, self.moved.intersection(tensors), True).meeting
        return frozenset([pair for pair in found if not self.touched.isdisjoint(pair)])


def addresses_given_memory(graph: Graph) -> frozenset[str]:
    """The addresses whose tensors got other memory by `tensor.data = value`, and were not written."""
    return frozenset([address for address, ref in graph.changes if _is_exchanged(graph, ref)])


def _is_exchanged(graph: Graph, ref: Ref) -> bool:
    node = graph[ref.node]
    return isinstance(node, Call) and node.target.function in (with_history_of, torch.Tensor.detach)


def _kind_departures(node: State, tensor: torch.Tensor | None) -> Iterable[Departure]:
    """Another shape, dtype, device or layout: Python may have read it unseen."""
    if tensor is None:
        return ()
    now, then = TensorSpec.of(tensor), node.spec
    if (now.kind, now.layout) == (then.kind, then.layout):
        return ()
    was, is_now = (
        f"{one}{f' in {one.layout}' * (now.layout is not then.layout)} on {one.device}" for one in (then, now)
    )
    return (Departure(f"the {node.kind} `{node.address}`", was, is_now),)


def with_current_state(record: Record, model: Any) -> Record:
    """The record with the parameters and buffers that the model holds at their addresses now. With `model` None only
    the places are known where they were found.
    """
    if record.graph.path_varies:
        raise StaleValue(f"{record.graph.path_varies[0]}: the next one may take another path.\n{RECAPTURE}")
    live, places, module = dict(record.live), dict(record.places), model if isinstance(model, nn.Module) else None
    for node in record.graph.state_nodes:
        place = places.get(node.address)
        if (then := live.get(node.name)) is None or (module is None and place is not None and place.tensor is not then):
            continue
        if place is not None and (holder := _holder(module, node)) is not None:
            place = places[node.address] = evolve(place, held=(holder._parameters, holder._buffers))
        held = place.now() if place is not None else None
        if held is not None:
            live[node.name] = held
        elif place is not None and place.tensor is not None and node.name not in record.graph.written_state:
            raise StaleValue(f"the {node.kind} `{node.address}` {place.change}.\n{RECAPTURE}")
    for address in _new_state_addresses(record.graph, module) if module is not None else ():
        raise StaleValue(f"the model has `{address}` now, and had none when it was captured.\n{RECAPTURE}")
    names = [address for node in record.graph.state_nodes for address in (node.address, *node.aliases)]
    names += [address for address, _ in record.graph.changes]
    held_now = {address: _held_now(address, places, module) for address in names}
    for departure in InitialStateLayout(record).departures(held_now.get):
        _departed(departure)
    return evolve(record, live=live, places=places)


def _held_now(address: str, places: Mapping[str, StatePlace], module: nn.Module | None) -> torch.Tensor | None:
    """The tensor at an address now, in the module that the model has there."""
    place = places.get(address)
    holder = _module_at(module, address.split(".")[:-1]) if place is not None and place.kind != "attribute" else None
    if place is not None and holder is not None:
        place = evolve(place, held=(holder._parameters, holder._buffers))
    return place.now() if place is not None else None


RECAPTURE = "Capture the model again, as it is now."


def _holder(model: nn.Module | None, node: State) -> nn.Module | None:
    """The module that holds a parameter or buffer now, also where that module was replaced."""
    return None if node.kind == "attribute" else _module_at(model, node.address.split(".")[:-1])


def _module_at(model: nn.Module | None, path: Iterable[str]) -> nn.Module | None:
    """The module at an address now. The compiler's wrapper is no level of it."""
    try:
        holder = reduce(getattr, path, model)
    except AttributeError:
        return None
    while isinstance(holder, nn.Module) and "_orig_mod" in holder._modules:
        holder = holder._modules["_orig_mod"]
    return holder if isinstance(holder, nn.Module) else None


def _new_state_addresses(graph: Graph, model: nn.Module) -> Iterator[str]:
    """Parameters and buffers that modules of the forward have now, and had not when it was captured."""
    known = {*graph.unread, *[address for node in graph.state_nodes for address in (node.address, *node.aliases)]}
    known |= {address for address, _ in graph.changes} | {*graph.removed}
    for address in dict.fromkeys(["", *[scope.address for scope, _ in graph.module_outputs]]):
        module, prefix = _module_at(model, address.split(".") if address else ()), f"{address}." if address else ""
        for held in (module._parameters, module._buffers) if module is not None else ():
            for key, tensor in held.items():
                if tensor is not None and prefix + key not in known:
                    yield prefix + key


def rerun(
    record: Record, sources: dict[Ref, torch.Tensor] | None = None, graph: Graph | None = None
) -> tuple[Record, Any]:
    """A Record of the whole program run on these sources (the current ones by default), and its output."""
    is_refreshed, graph = sources is None, graph or record.graph
    if sources is None:
        sources = {}
        for node in graph.nodes:
            if not isinstance(node, Call):
                ref = Ref(node.name)
                held = record.live.get(node.name) if isinstance(node, State) else None
                sources[ref] = _current_source(record, node, record.values[ref] if held is None else held)
    if is_refreshed:
        require_same_answers(graph, record.values, sources, OuterModes.of_replay(graph, False))
    made = plan(graph, range(len(graph)), bytearray(len(graph)), (), rerun_all=True, keep=range(len(graph)))
    ran = run(
        CompiledGraph(graph),
        made,
        record.draws,
        lambda ref: as_leaf(sources[ref]),
        record.values.__getitem__,
        _departed,
    )
    values = ran.tensors(ran.code.slots)
    for ref in map(Ref, graph.written_state):  # it is kept by value, for the model writes it again
        if ref in values and ref in sources:
            values[ref] = values[ref].detach().clone()
    graph = with_specs_of(graph, values)
    live = {name: tensor for name, tensor in record.live.items() if sources.get(Ref(name)) is tensor}
    fresh = Record(
        graph,
        values,
        Versions((ref, version_of(tensor)) for ref, tensor in values.items()),
        {**record.draws, **ran.states_begun},
        live,
        account=record.account.untimed(),
        places=_current_places(record, live),
        lent=_current_lent(record, values),
    )
    fresh = fresh if record.saved is None else keeping_only(fresh, record.saved)
    return fresh, filled(graph.output, values.__getitem__)


def _departed(departure: Departure) -> NoReturn:
    raise DivergedReplay(
        f"the program would leave the recorded path: {departure}\nCapture the model again: it goes another way now."
    )


def _current_lent(record: Record, values: dict[Ref, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
    """What the model holds in the memory of inputs, as those are now."""
    now = {address: (name, first, values[Ref(name)]) for address, (name, first) in record.lent.items()}
    return {a: (n, t if t.stride() == first.stride() else first) for a, (n, first, t) in now.items()}


def _current_source(record: Record, node: Node, tensor: torch.Tensor) -> torch.Tensor:
    """A source as it is now, if it is of the recorded kind."""
    assert not isinstance(node, Call)
    now, then = TensorSpec.of(tensor), node.spec
    if now.kind != then.kind:
        what = f"the {node.kind} `{node.address}`" if isinstance(node, State) else f"`{node.name}`"
        raise StaleValue(
            f"{what} is {now} on {now.device} now, and the program was recorded with {then}.\n"
            "Capture the model again, on inputs that fit it."
        )
    return tensor


def _current_places(record: Record, live: Mapping[str, torch.Tensor]) -> dict[str, StatePlace]:
    """The places of the model's tensors, as they look now."""
    found = dict(record.places)
    for node in record.graph.state_nodes:
        tensor, place = live.get(node.name), record.places.get(node.address)
        if tensor is not None and place is not None:
            found[node.address] = evolve(place, tensor=tensor, look=raw_state(tensor), steps=fused_steps())
    return found


def with_specs_of(graph: Graph, values: Mapping[Ref, torch.Tensor]) -> Graph:
    """The graph with the specs of these values. Nodes without values keep theirs."""
    nodes: list[Node] = []
    for node in graph.nodes:
        refs = refs_in(node.returns) if isinstance(node, Call) else [Ref(node.name)]
        if not all(ref in values for ref in refs):
            nodes.append(node)
            continue
        found = tuple([TensorSpec.of(values[ref]) for ref in refs])
        old = node.spec if isinstance(node, Call) else (node.spec,)
        changed: Any = {"spec": found if isinstance(node, Call) else found[0]}
        nodes.append(evolve(node, **changed) if found != old else node)
    return (
        evolve(graph, nodes=tuple(nodes)) if any(a is not b for a, b in zip(nodes, graph.nodes, strict=True)) else graph
    )


def move(record: Record, *args: Any, **kwargs: Any) -> tuple[Record, Any]:
    """A Record on another device or in another dtype: floating sources are cast, devices in arguments replaced."""
    probe = torch.empty(0).to(*args, **kwargs)
    sources = {}
    for node in record.graph.nodes:
        if not isinstance(node, Call):
            tensor = record.value(Ref(node.name))
            cast = tensor.to(*args, **kwargs) if tensor.is_floating_point() else tensor.to(probe.device)
            sources[Ref(node.name)] = cast
    return rerun(record, sources, _on_device(record.graph, probe.device))


def _on_device(graph: Graph, device: torch.device) -> Graph:
    def leaf(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    nodes = [with_leaves(node, leaf) if isinstance(node, Call) else node for node in graph.nodes]
    return evolve(graph, nodes=tuple(nodes))
