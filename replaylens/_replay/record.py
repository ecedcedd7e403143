"""Record: what is known of one run of a program, what was computed from that, and which values it keeps.

In: a Graph, the values of a run of it, and where the model holds its own tensors. Out: a value, if nobody overwrote it
since, recomputed if it was not kept; or StaleValue with the reason. Compiled plans and the like are kept with the
record, each kind in a Cache of the module that makes it.

A record may keep few values: those asked for, and those that must exist: inputs, state and constants, which nothing
computes; outputs and writes; contents that the model read in Python, which guards compare; results of an edit's
functions, which may differ when called again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from attrs import define, evolve, field, frozen

from .._edit.lower import may_vary
from .._ir.autograd import as_leaf, history_of
from .._ir.capture_metadata import NO_METADATA, CaptureMetadata
from .._ir.graph import Graph
from .._ir.memory import storage_of, version_of, versions_of
from .._ir.model_state import StateCheck, StatePlace
from .._ir.model_turns import read_undisturbed
from .._ir.node import Call, Ref, State, TensorSpec, refs_of
from .._ir.runtime import addresses_memory
from .._ir.trees import without_originals
from .._ir.util import cached_property
from ..errors import NotSaved, StaleValue
from .compile import CompiledGraph
from .plan import plan
from .runner import run

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_FEW = 16  # one value asked by itself costs as much as so many asked at once
OVERWRITTEN = -2  # in the place of a write counter: of a copy of what had been overwritten


class Versions(dict[Ref, int]):
    """Torch's write counters of the recorded values. Most are zero, and are not stored."""

    def __init__(self, pairs: Iterable[tuple[Ref, int]]) -> None:
        super().__init__([(ref, count) for ref, count in pairs if count])

    def __missing__(self, ref: Ref) -> int:
        return 0


@frozen(eq=False)
class Cache(Generic[K, V]):
    """What a module derives from records, kept with each record: the newest values, by key. The module owns the
    Cache, which carries the types; the values die with their record.
    """

    size: int = 64

    def get(self, record: Record, key: K) -> V | None:
        """The value kept for a record under a key."""
        return record.caches.get(self, NO_ENTRIES).get(key)

    def put(self, record: Record, key: K, value: V) -> V:
        """Keeps a value; the oldest one makes room."""
        kept = record.caches.setdefault(self, {})
        if len(kept) >= self.size and key not in kept:
            kept.pop(next(iter(kept)), None)
        kept[key] = value
        return value


NO_ENTRIES: dict[Any, Any] = {}


@define(eq=False)
class Record:
    """A Graph with what is known of one run of it. Values are kept by reference, with torch's write counters."""

    graph: Graph
    values: dict[Ref, torch.Tensor]
    versions: Versions
    draws: dict[str, torch.Tensor]
    live: dict[str, torch.Tensor] = field(
        factory=dict
    )  # by node name: the model's own parameters, and leaves among the inputs that the forward wrote
    account: CaptureMetadata = NO_METADATA
    histories: frozenset[Ref] | None = None  # which values gradients flow through: see gradients.py
    saved: frozenset[str] | None = None  # the nodes whose values are to be kept, if not all are: see keeping_only
    places: Mapping[str, StatePlace] = field(factory=dict)  # by address: where the model holds its tensors
    lent: Mapping[str, tuple[str, torch.Tensor]] = field(
        factory=dict
    )  # by address: tensors of the model in the memory of an input, that input, and what was there
    is_from_file: bool = False  # else a capture, or edits of one, have made it
    absent: Mapping[str, bytes] = field(factory=dict)  # by node: digests of state that a file was saved without
    caches: dict[Cache[Any, Any], dict[Any, Any]] = field(factory=dict, init=False)  # of this very record alone

    def value(self, ref: Ref) -> torch.Tensor:
        """A recorded value, if nobody overwrote it since; recomputed, if it was not kept."""
        tensor = self.values.get(ref)
        if tensor is None and ref.node in self.absent:
            raise NotSaved(absent_text(self.graph, ref))
        if tensor is None:
            return recomputed(self, [ref])[ref]
        if (reason := self.stale(ref)) is not None:
            raise StaleValue(reason)
        return tensor

    def require_state(self) -> None:
        """Raises where a file was saved without the state, and none was given since."""
        for node in self.graph.state_nodes if self.absent else ():
            if Ref(node.name) not in self.values:
                raise NotSaved(absent_text(self.graph, Ref(node.name)))

    def reading(self, count: int) -> Callable[[Ref], torch.Tensor]:
        """`value`, for this many: where that is quicker, all values of the record are asked at once."""
        if count * _FEW < len(self.values) or not self.steady:
            return self.value
        return lambda ref: found if (found := self.values.get(ref)) is not None else self.value(ref)

    def stale(self, ref: Ref) -> str | None:
        """Why a recorded value no longer holds; None if it does."""
        if self.versions[ref] != version_of(self.values[ref]):
            return stale_text(self.graph, ref)
        place = self.place_of(ref)
        if place is None or place.is_recorded_tensor():
            return None
        if read_undisturbed(place.is_recorded_tensor):  # another thread was running the model, and has put it back
            return None
        return stale_text(self.graph, ref, place)

    def place_of(self, ref: Ref) -> StatePlace | None:
        """The place in the model whose memory a recorded value shares, if that must be unchanged."""
        by_name, by_storage = self.watched
        if not by_name:
            return None
        return by_name.get(ref.node) or by_storage.get(storage_of(self.values[ref]) or 0)

    @cached_property
    def watched(self) -> tuple[dict[str, StatePlace], dict[int, StatePlace]]:
        """The places of state whose recorded values are the model's own tensors, by the name of a node and by
        storage. State that the forward writes is kept by value.
        """
        by_name, by_storage = {}, {}
        for node in self.graph.state_nodes if self.places else ():
            place = self.places.get(node.address)
            own = place is not None and place.tensor is not None and place.tensor is self.live.get(node.name)
            if place is None or not own or node.name in self.graph.written_state:
                continue
            by_name[node.name] = place
            if (key := storage_of(self.values[Ref(node.name)])) is not None:
                by_storage[key] = place
        return by_name, by_storage

    @cached_property
    def compiled(self) -> CompiledGraph:
        """What all replays share of the compiled program."""
        return CompiledGraph(self.graph)

    @cached_property
    def held(self) -> bytes:
        """Marks of the nodes that have all their values, or are no calls."""
        values, nodes = self.values, self.graph.nodes
        return bytes([not isinstance(node, Call) or all(ref in values for ref in refs_of(node)) for node in nodes])

    @cached_property
    def steady(self) -> Steady:
        """Whether all values are as they were recorded."""
        return Steady(self, self.values)

    def steady_values(self) -> list[torch.Tensor]:
        """All recorded values without their histories; raises if one was overwritten."""
        self.require_steady()
        return [tensor.detach() if tensor.requires_grad else tensor for tensor in self.values.values()]

    def require_steady(self) -> None:
        """Raises if a recorded value was overwritten."""
        if not self.steady:
            self.steady.require(self)


class Steady:
    """Whether some recorded values are unchanged: asked at each replay, so for all at once."""

    def __init__(self, record: Record, refs: Iterable[Ref]) -> None:
        self.refs = list(refs)
        self.tensors, self.versions = [record.values[r] for r in self.refs], [record.versions[r] for r in self.refs]
        places = {id(place): place for ref in self.refs if (place := record.place_of(ref)) is not None}
        self.standing = StateCheck(places.values())

    def __bool__(self) -> bool:
        return versions_of(self.tensors) == self.versions and bool(self.standing)

    def require(self, record: Record) -> None:
        """Raises for the value that was overwritten."""
        for ref in self.refs:
            record.value(ref)


def recomputed(record: Record, refs: Iterable[Ref]) -> dict[Ref, torch.Tensor]:
    """The values at these Refs, recomputed: the very ones that the model had, draws included, without histories.
    Only what they need runs.
    """
    graph, wanted = record.graph, list(dict.fromkeys(refs))
    positions = {graph.positions[ref.node] for ref in wanted}
    made = plan(graph, positions, bytearray(record.held), ())
    with torch.inference_mode(False):
        ran = run(record.compiled, made, record.draws, lambda ref: as_leaf(record.value(ref)), record.value)
    return {ref: as_leaf(ran[ref]) for ref in wanted}


def absent_text(graph: Graph, ref: Ref) -> str:
    """Why there is no value of a state that a file was saved without."""
    node = graph[ref.node]
    what = f"the {node.kind} `{node.address}`" if isinstance(node, State) else f"`{ref.node}`"
    return (
        f"{what} is not in the file: it was saved with state=False.\n"
        "`replaylens.load(path, state=model)` binds a model, or its state_dict, to it."
    )


def stale_text(graph: Graph, ref: Ref, place: StatePlace | None = None) -> str:
    node = graph[ref.node]
    what = f"the {node.kind} `{node.address}`" if isinstance(node, State) else f"the recorded value of `{ref.node}`"
    how = "was overwritten since the capture, by an optimizer's step or an operation in place"
    now = place.now() if place is not None else None
    if place is not None and isinstance(node, State):
        how = place.change
        meaning = TensorSpec.of(now) if now is not None else None
        if meaning is None or meaning.kind != node.spec.kind:
            is_now = "" if meaning is None else f": it is {meaning} on {meaning.device}, and was {node.spec}"
            return f"{what} {how}{is_now}.\nCapture the model again, on inputs that fit it."
    return (
        f"{what} {how}.\n"
        "`prog = prog.refresh()` runs the program again on what is there now; `state={...}` gives "
        "other parameters to one replay."
    )


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The value without a history."""
    return tensor.detach() if tensor.requires_grad else tensor


def with_values(record: Record, refs: Iterable[Ref]) -> Record:
    """The record with these values, too."""
    missing = [ref for ref in refs if ref not in record.values]
    if not missing:
        return record
    found = recomputed(record, missing)
    counts = Versions([*record.versions.items(), *((ref, version_of(tensor)) for ref, tensor in found.items())])
    return evolve(record, values={**record.values, **found}, versions=counts)


def completed_record(record: Record) -> Record:
    """The record with every value, in the order of the nodes."""
    if record.saved is None:
        return record
    refs = [ref for node in record.graph.nodes for ref in refs_of(node)]
    whole = with_values(record, refs)
    return evolve(whole, values={ref: whole.values[ref] for ref in refs}, saved=None)


def keeping_only(record: Record, names: frozenset[str]) -> Record:
    """The record with the values of these nodes, and those that must exist. No value holds a history, nor much more
    memory than it fills.
    """
    graph = record.graph
    refs = dict.fromkeys([r for node in graph.nodes if node.name in names for r in refs_of(node)] + always_kept(graph))
    whole = with_values(record, refs)
    made = {ref: as_leaf(whole.values[ref]) for ref in refs if isinstance(graph[ref.node], Call)}
    small = {ref: whole.value(ref).detach().clone() for ref in _small_parts(graph, made)}
    small = {ref: tensor.requires_grad_(made[ref].requires_grad) for ref, tensor in small.items()}
    values = {ref: small.get(ref, made.get(ref, whole.values[ref])) for ref in refs}
    counts = Versions((ref, version_of(small[ref]) if ref in small else whole.versions[ref]) for ref in refs)
    account = evolve(record.account, gradients={**_histories(record), **record.account.gradients})
    return evolve(record, graph=_without_objects(graph), values=values, versions=counts, account=account, saved=names)


def _histories(record: Record) -> dict[Ref, str]:
    """The autograd functions of values that are about to lose their histories."""
    found = {ref: history_of(value) for ref, value in record.values.items() if isinstance(record.graph[ref.node], Call)}
    return {ref: history for ref, history in found.items() if history is not None}


def _without_objects(graph: Graph) -> Graph:
    """The graph without the model's own objects: the tensors in them hold histories."""
    output, inside = (
        without_originals(graph.output),
        tuple([(scope, without_originals(tree)) for scope, tree in graph.module_outputs]),
    )
    pairs = zip(inside, graph.module_outputs, strict=True)
    if output is graph.output and all(one[1] is other[1] for one, other in pairs):
        return graph
    return evolve(graph, output=output, module_outputs=inside)


def always_kept(graph: Graph) -> list[Ref]:
    """The values that nothing computes, or that guards compare."""
    compared = [ref for guard in graph.guards if guard.compares_content for ref in guard.refs]
    sources = [Ref(node.name) for node in graph.nodes if not isinstance(node, Call)]
    varying = [ref for node in graph.calls if may_vary(node) for ref in refs_of(node)]
    return [*sources, *graph.wanted_refs, *compared, *varying]


def _small_parts(graph: Graph, values: dict[Ref, torch.Tensor]) -> Iterator[Ref]:
    """The values whose storage is more than twice as large as all that is kept of it."""
    sizes: Counter[int] = Counter()
    dense = {ref: tensor for ref, tensor in values.items() if _is_dense(tensor)}
    for tensor in dense.values():
        sizes[tensor.untyped_storage()._cdata] += tensor.nbytes
    large = [
        ref
        for ref, tensor in dense.items()
        if tensor.untyped_storage().nbytes() > 2 * sizes[tensor.untyped_storage()._cdata] + 1024
    ]
    if large and not any(looks_at_memory(call) for call in graph.calls):
        yield from large


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if a copy has the same strides."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return plain and not tensor.is_conj() and not tensor.is_neg() and tensor.is_contiguous()


def looks_at_memory(call: Call) -> bool:
    """True if a call reads memory by strides of its own, beyond what it is given."""
    return any(addresses_memory(target) or "set_" in target.short for target in call.functions)
