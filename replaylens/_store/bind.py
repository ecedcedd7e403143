"""A program that was loaded, bound to a model or a state_dict: its parameters are the model's own.

In: the record of a file, and what holds the tensors now. Out: the record on these tensors, to which gradients lead and
which its modules train; and for a model the state in which its forward begins, so that a replay that leaves the
recorded path can run it. What is bound must hold the very numbers that the values of the file were computed from, and
lie there as they lay: another model is refused.

A file does not say everything that a forward begins with. Where the model draws from generators of its own, keeps
Python state that it changes, or reads tensors that hang on no module, it is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import nn

from .._capture.provenance import Provenance
from .._capture.scopes import addresses
from .._capture.snapshot import ForwardState, RngState, Snapshot
from .._ir.equality import same
from .._ir.label import Naming
from .._ir.memory import have_same_address, version_of
from .._ir.model_state import StatePlace, attribute_at, beginning_of, fused_steps, raw_state
from .._ir.node import Const, Generator, Ref, State, TensorSpec
from .._ir.struct import Struct
from .._ir.trees import Branch, leaves, thaw_shared
from .._replay.record import Record, Versions
from ..errors import InputMismatch, NoValues, StaleValue
from .content import content_digest

Held = tuple[torch.Tensor, tuple[dict[str, Any], ...], str]  # a tensor, the dicts that may hold it, and its key there


def bound(record: Record, state: Any, has_values: bool = True) -> Record:
    """The record on the parameters and buffers of a model, or of a mapping from addresses to tensors."""
    if not has_values:
        raise NoValues("the program was captured with fake=True: it has no values, and nothing can be bound to it.")
    holder = _ModelHolder(state) if not isinstance(state, Mapping) else _MappingHolder(state)
    values, live, places = dict(record.values), {}, {}
    for node in record.graph.state_nodes:
        found = holder.at(node, node.name not in record.absent)
        if found is None:
            continue
        tensor, held, key = found
        _require_recorded(record, node, tensor)
        if isinstance(state, Mapping) and not tensor.requires_grad and _flag(record, node):
            if node.name not in record.graph.written_state:  # of a state_dict, to which no gradient leads
                values[Ref(node.name)] = tensor.detach().requires_grad_()
            continue
        live[node.name] = tensor
        if node.name not in record.graph.written_state:
            values[Ref(node.name)] = _with_recorded_flag(record, node, tensor)
        look = raw_state(tensor)
        for address in (node.address, *node.aliases):
            places[address] = StatePlace(key, node.kind, tensor, held, look, fused_steps())
    for address in (*[address for address, _ in record.graph.changes], *record.graph.removed):
        if address not in places and (home := holder.home(address)) is not None:
            places[address] = StatePlace(home[1], home[2], None, home[0])
    versions = Versions([(ref, version_of(tensor)) for ref, tensor in values.items()])
    order = {Ref(node.name): values[Ref(node.name)] for node in record.graph.state_nodes if Ref(node.name) in values}
    return evolve(record, values={**values, **order}, versions=versions, live=live, places=places, absent={})


def bound_to_itself(record: Record) -> Record:
    """The record with its own parameters and buffers in the place of a model's: a module of the program trains these,
    and whoever writes them, seen by torch or not, makes what was computed from them stale.
    """
    values, live, places, steps = dict(record.values), {}, {}, fused_steps()
    for node in record.graph.state_nodes:
        ref = Ref(node.name)
        tensor = values.get(ref)
        if tensor is None or node.name in record.graph.written_state:
            continue
        if node.kind == "parameter":
            values[ref] = tensor = nn.Parameter(tensor.detach(), tensor.requires_grad)
        live[node.name], look = tensor, beginning_of(tensor)
        held = (dict.fromkeys((node.address, *node.aliases), tensor),)
        for address in held[0]:
            places[address] = StatePlace(address, "parameter", tensor, held, look, steps)
    return evolve(record, values=values, live=live, places=places)


class _MappingHolder:
    """The tensors of a state_dict."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        wrong = next((key for key, value in state.items() if not isinstance(value, torch.Tensor)), None)
        if wrong is not None:
            raise InputMismatch(f"state= has no tensor at {wrong!r}. Give a model, or its state_dict().")
        self.state = dict(state)

    def at(self, node: State, is_there: bool) -> Held | None:
        """The tensor for a node, under any of its addresses; None for what no state_dict has. `is_there`: the file has
        it.
        """
        names = (node.address, *node.aliases)
        given = [name for name in names if name in self.state]
        if not given:
            return (
                None
                if node.kind == "attribute" or (node.kind == "buffer" and is_there)
                else _missing(node, "state= has")
            )
        if not all(have_same_address(self.state[given[0]], self.state[name]) for name in given[1:]):
            raise InputMismatch(
                f"{' and '.join(given)} were one tensor, and state= has several. Give the same for all."
            )
        return self.state[given[0]], (self.state,), given[0]

    def home(self, address: str) -> tuple[tuple[dict[str, Any], ...], str, str] | None:
        """What would hold a tensor at an address that the forward writes and does not read."""
        return ((self.state,), address, "buffer") if address in self.state else None


class _ModelHolder:
    """The tensors of a model, at the addresses that a capture of it would give them."""

    def __init__(self, model: Any) -> None:
        if not callable(model):
            raise InputMismatch(f"state= takes a model or its state_dict, not a {type(model).__name__}.")
        origins = Provenance(model)
        named = addresses(origins.table)
        self.modules = {named[id(module)]: module for module in origins.modules}
        self.name = type(model).__name__

    def at(self, node: State, is_there: bool) -> Held | None:
        """The tensor for a node; an error if the model has none."""
        found = [self._at(address, node) for address in (node.address, *node.aliases)]
        first = found[0]
        if first is None:
            return None if node.kind == "attribute" else _missing(node, f"the {self.name} has")
        if not all(other is not None and other[0] is first[0] for other in found):
            names = " and ".join((node.address, *node.aliases))
            raise InputMismatch(f"{names} were one tensor, and the {self.name} holds several. Tie them as they were.")
        return first

    def _at(self, address: str, node: State) -> Held | None:
        module, key = self._module(address)
        if module is None:
            return None
        if node.kind == "attribute":
            tensor, held = attribute_at(vars(module), key), (vars(module),)
        else:
            held = (module._parameters, module._buffers)  # type: ignore[assignment]
            tensor = next((of[key] for of in held if of.get(key) is not None), None)
        return None if tensor is None else (tensor, held, key)

    def home(self, address: str) -> tuple[tuple[dict[str, Any], ...], str, str] | None:
        """What would hold a tensor at an address that the forward writes and does not read."""
        module, key = self._module(address)
        if module is None:
            return None
        if key in module._buffers or key in module._parameters:
            return (module._parameters, module._buffers), key, "buffer"
        return (vars(module),), key, "attribute"

    def _module(self, address: str) -> tuple[nn.Module | None, str]:
        steps = address.split(".")
        for count in range(len(steps) - 1, -1, -1):
            if (module := self.modules.get(".".join(steps[:count]))) is not None:
                return module, ".".join(steps[count:])
        return None, address


def _missing(node: State, who: str) -> Held:
    raise InputMismatch(
        f"{who} no {node.kind} `{node.address}`, which the program was computed with: {node.spec}.\n"
        "Give the model whose forward was recorded, or its state_dict()."
    )


def _require_recorded(record: Record, node: State, tensor: torch.Tensor) -> None:
    """Raise unless a tensor is what the forward read at a node."""
    now = TensorSpec.of(tensor)
    if (now.kind, now.layout, now.strides) != (node.spec.kind, node.spec.layout, node.spec.strides):
        lies = "" if now.kind != node.spec.kind else f", in strides {now.strides} and not {node.spec.strides}"
        raise InputMismatch(
            f"the {node.kind} `{node.address}` is {now} on {now.device}; the program was computed with {node.spec} on "
            f"{node.spec.device}{lies}.\nGive the model whose forward was recorded, or its state_dict()."
        )
    if node.name in record.graph.written_state:
        return  # what the forward began with is in the file; the model holds what later ones have written
    saved = record.values.get(Ref(node.name))
    is_same = same(saved, tensor) if saved is not None else content_digest(tensor) == record.absent.get(node.name)
    if not is_same:
        raise StaleValue(
            f"the {node.kind} `{node.address}` holds other numbers than the values of the file were computed from.\n"
            "Bind the model as it was then; or load the file without state=, and give these to one replay: "
            "prog.replay(state=model.state_dict())."
        )


def _with_recorded_flag(record: Record, node: State, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a leaf of its own, with the flag that it had when the forward ran."""
    made = tensor.detach()
    return made.requires_grad_() if _flag(record, node) else made


def _flag(record: Record, node: State) -> bool:
    """The `requires_grad` of a tensor when the forward ran."""
    saved = record.values.get(Ref(node.name))
    if saved is not None:
        return saved.requires_grad
    return node.kind == "parameter" and node.spec.is_differentiable and node.name not in record.account.untrained


# -- the model, to be run again ----------------------------------------------------------------------------------------


def forward_state(record: Record, history: tuple[str, ...], model: Any, naming: Naming) -> ForwardState | None:
    """What the forward of a bound model begins with; None where the file does not say everything that it needs, or
    has a program that is no longer the model's.
    """
    is_whole = history[0] == "captured" and all(step.startswith("backward(") for step in history[1:])
    if isinstance(model, Mapping) or not is_whole or _why_not(record) is not None:
        return None
    args, kwargs = thaw_shared(record.graph.inputs, lambda leaf: record.values[leaf] if type(leaf) is Ref else leaf)
    rng = RngState()
    first = next((call for call in record.graph.calls if call.draws is not None), None)
    knows = first is not None and first.draws is not None and first.follows is None and not first.is_seeded
    if first is not None and first.draws is not None and knows:
        rng.torch = record.draws[first.draws]
    snapshot = Snapshot(Provenance(model).modules, (args, kwargs))
    return ForwardState(model, naming, snapshot, rng, is_proven=False, knows_generator=knows)


def _why_not(record: Record) -> str | None:
    """Why the model of a loaded program cannot be run again."""
    graph = record.graph
    if graph.other_random_sources or graph.generator_read or graph.altered or graph.path_varies:
        return "it keeps or draws what a file does not hold"
    if any(isinstance(node, Const) and node.origin == "older than the capture" for node in graph.nodes):
        return "it reads tensors that no module holds"
    if any(type(leaf) is Generator for call in graph.calls for leaf in leaves(call.trees)):
        return "it draws from a generator of its own"
    if graph.shares_inputs or any(call.edited for call in graph.calls) or _holds_structs(graph.inputs):
        return "its inputs are not as they were"
    return None


def _holds_structs(tree: Any) -> bool:
    if type(tree) is Branch:
        return issubclass(tree.kind, Struct) or any(map(_holds_structs, tree.items))
    if type(tree) is tuple:
        return any(map(_holds_structs, tree))
    return isinstance(tree, Struct)
