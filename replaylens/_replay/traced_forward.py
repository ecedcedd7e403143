"""A forward as torch.compile and torch.export trace it: its code, and little Python around it.

In: the Record of a program, and the places where a module holds the tensors that it reads. Out: the values of a run
that the tracers can follow, or None where what was given is not exactly of the recorded kind. What only a look at
numbers or at memory can decide cannot be traced: `untraceable` says what that is, and such programs run as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from attrs import evolve, frozen

from .._ir.autograd import as_leaf
from .._ir.graph import Graph
from .._ir.model_state import StatePlace
from .._ir.node import Call, Input, Node, Ref, State
from .._ir.ops import Quirk, op_info
from .._ir.target import Target
from .._ir.torch_private import functions
from .._ir.trees import ATOMS, named_items, thaw, walk
from .._ir.write import Write, WriteArguments, mutate_surely
from ..errors import ReplaylensError
from .interpreter import Code, unpack_and_free
from .layout_guards import depends_on_layout
from .record import Record
from .runner import initial_values
from .shaped_forward import code_of, require_trainable
from .traced_trees import built, is_plain, matches, pattern_of

PLAIN_MODULE = (torch.Tensor, torch.nn.Parameter)


class Place(Protocol):
    """Where a module holds a tensor, and the model too."""

    own: dict[str, Any]
    key: str
    model: StatePlace | None
    shared: torch.Tensor | None


@frozen
class HeldPlace:
    """A place, and the dict of the model in which its tensor stands."""

    place: Place
    home: dict[str, Any] | None
    key: str

    @staticmethod
    def of(place: Place) -> HeldPlace:
        """The place as it is; with no dict where the model has none for it alone."""
        if place.model is None:
            return HeldPlace(place, None, "")
        tried: tuple[Any, ...] = place.model.held  # those of TorchScript are no dicts
        there = (home for home in tried if isinstance(home, dict) and place.model.key in home)
        return HeldPlace(place, next(there, None), place.model.key)

    @property
    def is_known(self) -> bool:
        """True if the tensor can be read where it is."""
        return self.place.model is None or self.home is not None


@frozen
class Kind:
    """What is asked of a tensor before it goes into the code; None where anything will do."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None
    requires_grad: bool | None

    def fits(self, tensor: Any) -> bool:
        """True for a tensor like the recorded one."""
        if not isinstance(tensor, torch.Tensor):
            return False
        is_alike = (tensor.dtype, tensor.device, tuple(tensor.shape)) == (self.dtype, self.device, self.shape)
        lies_alike = self.stride is None or tensor.stride() == self.stride
        return is_alike and lies_alike and self.requires_grad in (None, tensor.requires_grad)


class TracedForward:
    """One recorded forward for one way of taking gradients."""

    def __init__(
        self, record: Record, code: Code, places: Mapping[str, HeldPlace], ends: Mapping[str, HeldPlace]
    ) -> None:
        graph = record.graph
        asks = bool(graph.asked) or depends_on_layout(graph)
        self.code, self.dtype = code, graph.default_dtype
        self.has_recurrent_kernels = any(call.target.short in _RECURRENT for call in graph.calls)
        self.inputs = pattern_of(graph.inputs, lambda ref: ref.node)
        self.given = {node.name: _kind(record, code, node, True, asks) for node in graph.input_nodes}
        self.held = tuple([(places[node.name], _kind(record, code, node, asks, asks)) for node in graph.state_nodes])
        constants = frozenset([node.name for node in graph.const_nodes])
        fixed = lambda ref: as_leaf(record.value(ref)) if ref.node in constants else None  # noqa: E731
        self.beginning = tuple(initial_values(code, fixed, None).env)
        self.output = pattern_of(graph.output, code.slots.__getitem__)
        ties = [(node.address, other) for node in graph.state_nodes for other in node.aliases]
        self.ties = tuple([(ends[one], ends[other]) for one, other in ties])
        self.changes = tuple([(ends[address], code.slots[ref]) for address, ref in graph.changes])

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """The output, in a tuple; None for inputs or state of another kind."""
        given: dict[str, Any] = {}
        if not matches(self.inputs, (args, kwargs), given) or torch.get_default_dtype() != self.dtype:
            return None
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return None
        if any(held_at(one) is not held_at(other) for one, other in self.ties):
            return None
        env = list(self.beginning)
        for name, kind in self.given.items():
            if not kind.fits(given[name]):
                return None
            env[kind.slot] = given[name]
        for place, kind in self.held:
            tensor = held_at(place)
            if not kind.fits(tensor) or any(tensor is one for one in given.values()):
                return None
            env[kind.slot] = tensor
        for segment in self.code.segments:
            with torch.set_grad_enabled(segment.context.grad):
                for read, call, slot, dead, rest in segment.rows:
                    env[slot] = call(*read(env))
                    if rest is not None:
                        unpack_and_free(env, slot, rest)
                    env[dead] = None
        if self.changes:
            with torch.no_grad():
                for place, slot in self.changes:
                    held_at(place).copy_(env[slot])
        return (built(self.output, env),)


def _kind(record: Record, code: Code, node: Input | State, with_stride: bool, with_flag: bool) -> Kind:
    ref, spec = Ref(node.name), node.spec
    then = record.values[ref]
    stride = then.stride() if with_stride and then.layout is torch.strided else None
    flag = then.requires_grad if with_flag else None
    return Kind(code.slots[ref], spec.shape, spec.dtype, torch.device(spec.device), stride, flag)


def held_at(held: HeldPlace) -> Any:
    """The tensor at a place: that of the model, unless the module was given another one."""
    place = held.place
    mine = place.own[place.key]
    if held.home is None or mine is not place.shared:
        return mine
    return held.home[held.key]


def has_symbols(value: Any) -> bool:
    """True for a tensor of which sizes are left open."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


# -- what cannot be traced ---------------------------------------------------------------------------------------------


def traced_forward(
    record: Record, grad: bool, places: Mapping[str, Place], ends: Mapping[str, Place], exchanged: bool
) -> TracedForward | str:
    """The forward for the tracers, with gradients or without; or why there is none."""
    held, left = [{name: HeldPlace.of(place) for name, place in each.items()} for each in (places, ends)]
    code = code_of(evolve(record, graph=_for_tracers(record.graph)), grad, is_traced=True)
    why = _untraceable(record.graph, exchanged)
    if code.draws:
        why = "what it leaves out draws random numbers before what it computes does"
    written = [ends[address].model for address, _ in record.graph.changes]
    if any(place is not None and place.kind not in ("parameter", "buffer") for place in written):
        why = "it writes tensors that are no parameters or buffers"
    if any(one.layout is not torch.strided or one.is_nested for one in _sources(record)):
        why = "it reads sparse or nested tensors"
    if not all(place.is_known for place in (*held.values(), *left.values())):
        why = "it reads tensors that are no parameters or buffers"
    try:
        if grad:
            require_trainable(record.graph)
        return why or TracedForward(record, code, held, left)
    except ReplaylensError as error:
        return str(error)


def _sources(record: Record) -> list[torch.Tensor]:
    """What the forward reads that no call computes."""
    refs = [Ref(node.name) for node in record.graph.nodes if not isinstance(node, Call)]
    return [record.values[ref] for ref in refs if ref in record.values]


def _untraceable(graph: Graph, exchanged: bool) -> str:
    """Why a program cannot be traced; empty if it can."""
    if (reads := next((guard for guard in graph.guards if guard.kind != "shape"), None)) is not None:
        return f"Python reads what the model computes ({reads.target.short})"
    if any(call.context.autocast or call.context.inference or call.context.settings for call in graph.calls):
        return "parts of it run under autocast, inference mode or settings of kernels"
    if graph.replaced or graph.removed or exchanged:
        return "it assigns or removes parameters or buffers, or gives them other memory"
    overlaps = graph.overlaps
    if graph.shares_inputs or overlaps.meeting or overlaps.same:
        return "its inputs share memory with each other or with the model"
    if any(node.name in overlaps.touched for node in graph.input_nodes):
        return "it writes its inputs"
    if any(isinstance(call, Write) and _may_copy(call) for call in graph.calls):
        return "it writes through what may be a view or a copy"
    return _odd_containers(graph)


def _for_tracers(graph: Graph) -> Graph:
    """The graph with functions that can be traced: writes that compare no addresses, and ATen's operators in the place
    of what torch wraps in Python.
    """

    def traceable(node: Node) -> Node:
        if not isinstance(node, Call):
            return node
        other = _ATEN.get(node.target.function) if node.target.is_stable else None
        target = _SURE if isinstance(node, Write) else node.target if other is None else Target.of(other)
        return evolve(node, target=target)

    return evolve(graph, nodes=tuple(map(traceable, graph.nodes)))


_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))  # which torch.compile never traces
_SURE = Target.of(mutate_surely)
_WRAPPED = ("einsum", "split")
_ATEN: dict[Any, Any] = {getattr(functions, word): getattr(torch.ops.aten, word) for word in _WRAPPED}
_ATEN[torch.Tensor.unflatten] = torch.ops.aten.unflatten


def _may_copy(call: Write) -> bool:
    """True if what a call writes may be a copy of what is behind it, with other layouts."""
    targets = thaw(WriteArguments(*call.args).targets, lambda leaf: leaf)
    return any(op_info(step.function).has(Quirk.COPY_OR_VIEW) for target in targets for step in target.steps)


def _odd_containers(graph: Graph) -> str:
    trees = {"inputs are": graph.inputs, "output is": graph.output}
    for what, tree in trees.items():
        leaves = [leaf for _, leaf in walk(tree, named_items) if type(leaf) is not Ref]
        if not is_plain(tree) or (what == "inputs are" and any(type(leaf) not in ATOMS for leaf in leaves)):
            return f"its {what} in other containers than lists, tuples and dicts, or objects are among them"
    if graph.literals or any(node.python_type not in (None, *PLAIN_MODULE) for node in graph.input_nodes):
        return "its inputs have attributes, or classes of their own"
    return ""
