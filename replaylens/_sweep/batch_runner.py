"""Batches: the variants of one record in passes, with the metric as more program, and their results in order.

In: a record, the record of a metric on its output if there is one, and the changes of each variant. Out: the values of
the output for each variant, stacked; beforehand a Plan. Metric nodes follow the model's own, so that a sweep sees what
the metric reads and computes nothing else. Variants that leave the recorded path are reported, and left to the caller.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from numbers import Number
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from .._ir.graph import Graph
from .._ir.memory import keep_freed_memory, version_of, with_layout_of
from .._ir.node import Call, Const, Generator, Guard, Input, Node, Ref, Source, TensorSpec, filled, refs_in, with_leaves
from .._ir.torch_private import pytree
from .._ir.trees import freeze_deep, is_array, keyed_items, leaves, map_leaves, named_items, thaw, walk
from .._ir.validate import require_lawful
from .._ir.value_source import Saved
from .._replay.guards import Departure, RerunRequired
from .._replay.record import Cache, Record, Versions
from .._replay.replay import execute
from .._replay.request import Request
from .._replay.resolve_patches import Changes
from ..errors import BadMetric
from .engine import Variant, run_chunk
from .prepared_program import PreparedProgram
from .sparse_rows import Delta, dense, lane_value, stacked
from .sweep_plan import Pass, Plan, passes, sweep_plan


def with_metric(record: Record, metric: Record) -> Record:
    """The record of a program that goes on to compute the metric."""
    graph, more = record.graph, metric.graph
    outputs = dict(walk(graph.output, keyed_items))
    known = {ref.node: outputs[path[2:]] for path, ref in walk(more.inputs, keyed_items) if type(ref) is Ref}
    names = {node.name: f"metric.{node.name}" for node in more.nodes if node.name not in known}

    def renamed(leaf: Any) -> Any:
        if type(leaf) is Ref:
            return known[leaf.node] if leaf.node in known else Ref(names[leaf.node], leaf.path)
        return Generator(f"metric.{leaf.key}") if type(leaf) is Generator else leaf

    added = [_renamed(node, names[node.name], renamed) for node in more.nodes if not isinstance(node, Input)]
    joined = require_lawful(
        evolve(graph, nodes=(*graph.nodes, *added), output=map_leaves(more.output, renamed), changes=())
    )
    values = dict(record.values)
    values.update({renamed(ref): tensor for ref, tensor in metric.values.items() if ref.node in names})
    versions = Versions((ref, count) for ref, count in record.versions.items())
    versions.update({renamed(ref): count for ref, count in metric.versions.items() if ref.node in names})
    draws = {**record.draws, **{f"metric.{key}": state for key, state in metric.draws.items()}}
    return Record(joined, values, versions, draws, record.live, places=record.places)


def _renamed(node: Node, name: str, renamed: Any) -> Node:
    if not isinstance(node, Call):
        return evolve(node, name=name)
    return with_leaves(
        node,
        renamed,
        name=name,
        returns=map_leaves(node.returns, renamed),
        result=map_leaves(node.result, renamed),
        draws=None if node.draws is None else f"metric.{node.draws}",
        follows=None if node.draws is None else f"metric.{node.follows or 'start'}",
        through=tuple([f"metric.{inner}" for inner in node.through]),
    )


def why_impure(graph: Graph) -> str:
    """Why a metric is more than tensor operations that are the same for every variant; empty if it is not. Reads of
    its own tensors are the same for all.
    """
    varying = graph.descendants([node.name for node in graph.input_nodes])
    if draws := [call for call in graph.calls if call.draws is not None]:
        return f"it draws random numbers, by {draws[0].kind}{_at(draws[0].source)}"
    for guard in graph.guards:
        if any(ref.node in varying for ref in _operands_of_answer(graph, guard)):
            what = "has a shape that depends on contents" if guard.kind == "shape" else "is read in Python"
            return f"{guard.refs[0].node} {what}{_at(guard.source)}"
    if graph.changes:
        return f"it writes to {graph.changes[0][0]}"
    ends = list(leaves(graph.output))
    return "" if ends and all(type(leaf) is Ref for leaf in ends) else "it gives what is no tensor"


def _at(source: Source | None) -> str:
    return f" ({source})" if source is not None else ""


def _operands_of_answer(graph: Graph, guard: Guard) -> tuple[Ref, ...]:
    """What a guard's answer depends on: for an index by a mask, the mask."""
    if guard.kind != "shape":
        return guard.refs
    calls = [node for ref in guard.refs if isinstance(node := graph[ref.node], Call)]
    trees = [call.args[1:] if call.kind in ("getitem", "maskedselect") else (call.args, call.kwargs) for call in calls]
    return tuple(refs_in(tuple(trees)))


def with_fixed_masks(record: Record) -> Record:
    """The record of a metric, with indices by its own masks replaced by the positions they choose."""
    graph = record.graph
    varying = graph.descendants([node.name for node in graph.input_nodes])
    nodes: list[Node] = []
    values: dict[Ref, torch.Tensor] = {}

    def chosen(item: Any) -> Any:
        """An index by a mask as indices, one for each of its axes; without axes, it is a Python bool: a new axis."""
        if type(item) is not Ref or item.node in varying or record.values[item].dtype is not torch.bool:
            return (item,)
        if record.values[item].ndim == 0:
            return (bool(record.values[item]),)
        found = record.values[item].nonzero(as_tuple=True)
        names = [f"{item.node}_axis_{len(values) + n}" for n in range(len(found))]
        nodes.extend([Const(name, "a mask", TensorSpec.of(tensor)) for name, tensor in zip(names, found, strict=True)])
        values.update({Ref(name): tensor for name, tensor in zip(names, found, strict=True)})
        return tuple([Ref(name) for name in names])

    for node in graph.nodes:
        if isinstance(node, Call) and node.kind == "getitem" and node.is_dynamic:
            index = node.args[1] if type(node.args[1]) is tuple else (node.args[1],)
            items = tuple([one for item in index for one in chosen(item)])
            node = evolve(node, args=(node.args[0], items), is_dynamic=False)
        nodes.append(node)
    if all(node is old for node, old in zip(nodes, graph.nodes, strict=False)):
        return record
    versions = Versions((*record.versions.items(), *[(ref, version_of(tensor)) for ref, tensor in values.items()]))
    return Record(evolve(graph, nodes=tuple(nodes)), {**record.values, **values}, versions, record.draws)


PATIENCE = 2.0  # seconds before a bar is shown that was not asked for


@contextmanager
def progress_bar(total: int | None, wanted: bool | None, unit: str = "variant") -> Iterator[Callable[[int], None]]:
    """`tick(n)`: n more are done, of `total` if that is known. `wanted` None: a bar on a terminal or in a notebook, if
    it takes long.
    """
    if wanted is False or (wanted is None and not _is_interactive()):
        yield lambda count: None
        return
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError:
        if wanted:
            raise ImportError("a progress bar needs tqdm: pip install 'replaylens[progress]'") from None
        yield lambda count: None
        return
    with tqdm(total=total, unit=unit, delay=0 if wanted else PATIENCE) as shown:
        yield lambda count: shown.update(count) and None


def _is_interactive() -> bool:
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)


_PROGRAMS: Cache[None, PreparedProgram] = Cache()
NO_ROWS: Mapping[Any, Any] = {}
Rows = tuple[tuple[int, ...], torch.Tensor]  # variants, and their values stacked
ReadOutput = Callable[[int, Callable[[], Any]], Any]  # of a variant, and a function that gives its output


@frozen(eq=False)
class Found:
    """What one pass found."""

    deltas: dict[Ref, Delta]  # where the output differs
    departures: dict[int, Departure]  # the variants that left the recorded path
    alone: tuple[str, ...]  # the nodes that ran variant by variant


@frozen(eq=False)
class PassResult:
    """What one pass gives, as data that another process can send."""

    rows: Mapping[Ref, Rows] = NO_ROWS  # where the output differs
    results: Mapping[int, Any] = NO_ROWS  # by variant, what was read of its output, if each is read by itself
    departures: Mapping[int, Departure] = NO_ROWS  # the variants that left the recorded path, which have no result
    alone: tuple[str, ...] = ()  # the nodes that ran variant by variant
    refusal: str = ""  # why the pass could not be run, if so: then there is nothing else
    drew: frozenset[str] = frozenset()  # the generators of another process that functions of the user's drew from


@define(eq=False)
class Gathered:
    """The results of passes, put into their places as they come, in any order."""

    batch: Batch
    places: dict[Ref, torch.Tensor] | None  # None: each output is read by itself
    results: dict[int, Any] = field(factory=dict)  # by variant
    passes: dict[int, PassResult] = field(factory=dict)  # by number, without what was put into its place

    def put(self, number: int, result: PassResult) -> None:
        """Takes the result of a pass."""
        for ref, (lanes, data) in result.rows.items():
            assert self.places is not None
            self.places[ref][list(lanes)] = data
        self.results |= result.results
        self.passes[number] = evolve(result, rows=NO_ROWS, results=NO_ROWS)

    @property
    def refusal(self) -> str:
        """Why the first pass that could not be run could not."""
        return next((self.passes[number].refusal for number in sorted(self.passes) if self.passes[number].refusal), "")

    @property
    def departures(self) -> dict[int, Departure]:
        """The variants that left the recorded path."""
        return {lane: left for number in sorted(self.passes) for lane, left in self.passes[number].departures.items()}

    @property
    def alone(self) -> dict[str, None]:
        """The nodes that ran variant by variant, in the order of the passes."""
        return dict.fromkeys([name for number in sorted(self.passes) for name in self.passes[number].alone])

    def stacked(self) -> Any:
        """The output for every variant: its tensors, with the variants as a new first axis."""
        assert self.places is not None
        return filled(self.batch.record.graph.output, self.places.__getitem__)


@define(eq=False)
class Batch:
    """Variants of one record that run together."""

    record: Record
    variants: list[Variant]
    count: int  # of all variants, those among them that are run elsewhere
    memory: float | None = None
    layout_ends: frozenset[Ref] = frozenset()  # values of which the metric may read how they lie in memory
    may_replay: bool = True  # the metric, if it is part of the record, reads nothing of how its argument lies
    program: PreparedProgram = field(init=False)
    idle: list[PreparedProgram] = field(init=False, factory=list)  # each with memory of its own, for the next pass
    _passes: list[Pass] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        graph = self.record.graph
        known = _PROGRAMS.get(self.record, None)
        if known is None:
            known = _PROGRAMS.put(
                self.record, None, PreparedProgram(self.record, tuple(dict.fromkeys(graph.output_refs)))
            )
        else:
            self.record.require_steady()
        self.program = known.prepared_for(
            [position for variant in self.variants for position, _ in variant.changes],
            [ref for variant in self.variants if len(variant.changes) > 1 for ref in variant.read_by_changes],
        )

    @property
    def passes(self) -> list[Pass]:
        """How the variants run."""
        if self._passes is None:
            self._passes = passes(self.program, self.variants, self.memory, self.may_replay)
        return self._passes

    def plan(self, keys: Sequence[Any]) -> Plan:
        """What they will cost. `keys`: of all variants, by their numbers."""
        return sweep_plan(self.program, self.variants, self.passes, keys)

    def run(self, number: int) -> Found:
        """Runs one pass. Several threads may run passes at a time."""
        departures: dict[int, Departure] = {}
        try:
            program = self.idle.pop()
        except IndexError:
            keep_freed_memory()
            program = self.program.with_own_memory()
        program.alone, one = {}, self.passes[number]
        if one.is_stacked:
            deltas = run_chunk(program, one.variants, departures.__setitem__, self.layout_ends)
        else:
            deltas = self._replayed(one.variants[0], departures)
        self.idle.append(program)
        return Found(deltas, departures, tuple(program.alone))

    def rows(self, found: Found) -> dict[Ref, Rows]:
        """What a pass found, as whole values."""
        wholes = {ref: dense(delta, self._recorded(ref)) for ref, delta in found.deltas.items()}
        return {ref: (whole.pairs.lanes, whole.data) for ref, whole in wholes.items()}

    def each(self, number: int, found: Found, read: ReadOutput) -> dict[int, Any]:
        """What is read of each output of a pass, by variant, without those that left the recorded path."""
        lanes = [variant.number for variant in self.passes[number].variants]
        return {lane: read(lane, partial(self._output, found, lane)) for lane in lanes if lane not in found.departures}

    def _replayed(self, variant: Variant, departures: dict[int, Departure]) -> dict[Ref, Delta]:
        """Where the output of one variant differs, by a replay."""
        try:
            ran = execute(self.record, Request(changed=variant.changed, on_divergence="rerun"))
        except RerunRequired as left:
            departures[variant.number] = left.departure
            return {}
        found = {}
        for ref in self.program.ends:
            value, recorded = ran[ref].detach(), self._recorded(ref)
            if ref in self.layout_ends and value.stride() != recorded.stride():
                what = f"the memory layout of {ref}"
                departures[variant.number] = Departure(what, recorded.stride(), value.stride())
                return {}
            found[ref] = stacked((variant.number,), value[None])
        return found

    def places(self) -> dict[Ref, torch.Tensor]:
        """The output once for every variant, as it was recorded: where the rows of passes belong."""
        recorded = {ref: self._recorded(ref) for ref in self.program.ends}
        return {ref: value.expand(self.count, *value.shape).clone() for ref, value in recorded.items()}

    def _output(self, found: Found, lane: int) -> Any:
        """The output of one variant."""
        return filled(self.record.graph.output, partial(self._value, found.deltas, lane))

    def _value(self, found: dict[Ref, Delta], lane: int, ref: Ref) -> torch.Tensor:
        delta, recorded = found.get(ref), self._recorded(ref)
        return recorded if delta is None else with_layout_of(lane_value(delta, lane, recorded), recorded)

    def _recorded(self, ref: Ref) -> torch.Tensor:
        return self.program.values[self.program.slot[ref]]


def variants_of(changes: Sequence[Changes]) -> list[Variant]:
    """Variants from the changes of replays: position -> changes."""
    return [
        Variant(number, tuple([(position, change) for position, several in each.items() for change in several]))
        for number, each in enumerate(changes)
    ]


@frozen(eq=False)
class Replays(Saved):
    """The results of many replays at once: `values[n]` belongs to `keys[n]`."""

    keys: tuple[Any, ...]
    values: Any  # a tensor with the variants along its first axis, or a structure of such
    baseline: Any  # the same without any change
    departures: dict[Any, Departure]  # the variants that left the recorded path
    one_by_one: tuple[str, ...]  # what could not be run for all variants at once, and why
    execution: Any = None  # an Execution, if an executor ran them: where, and by how many workers

    def __getitem__(self, key: Any) -> Any:
        if key not in self.keys:
            raise KeyError(f"{key!r} is not among the {len(self.keys)} variants, such as {self.keys[0]!r}.")
        number = self.keys.index(key)
        return pytree.tree_map(lambda value: value[number] if isinstance(value, torch.Tensor) else value, self.values)

    def __len__(self) -> int:
        return len(self.keys)


def as_tensors(result: Any) -> Any:
    """A result with its numbers as tensors."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) and hasattr(value, "item") and getattr(value, "shape", None) == ():
            value = value.item()  # a number of numpy's
        if type(value) is float:
            return torch.tensor(value, dtype=torch.float64)
        if type(value) is complex:
            return torch.tensor(value, dtype=torch.complex128)
        is_tensor = isinstance(value, torch.Tensor)
        is_other = isinstance(value, Number) or is_array(type(value))  # type: ignore[arg-type]
        if is_other and not is_tensor and type(value) not in (int, bool):
            raise BadMetric(f"a metric must give tensors or numbers, not {type(value).__name__}.")
        return torch.tensor(value) if type(value) in (int, bool) else value

    return pytree.tree_map(leaf, result)


def stacked_results(results: Sequence[Any]) -> Any:
    """Results of one structure as one, whose tensors and numbers have a new first axis."""
    found = [structure_of(as_tensors(result)) for result in results]
    (tree, column), columns = found[0], [held for _, held in found]
    if not any(isinstance(leaf, torch.Tensor) for leaf in column.values()):
        raise BadMetric(f"a metric must give tensors or numbers, not {type(results[0]).__name__}.")
    for other, result in zip(columns, results, strict=True):
        if not have_one_structure(column, other):
            raise BadMetric(f"a metric must give one structure for all variants, not {results[0]!r} and {result!r}.")
    stacks: dict[Path, Any] = {}
    for path, leaf in column.items():
        if isinstance(leaf, torch.Tensor):
            several = in_common_dtype([held[path] for held in columns])
            if several is None:
                raise BadMetric(f"a metric must give one dtype: no dtype holds all of {[c[path] for c in columns]}.")
            stacks[path] = torch.stack(several)
    return thaw(tree, lambda leaf: stacks[leaf.path] if type(leaf) is TensorSlot else leaf)


Path = tuple[Any, ...]


def structure_of(result: Any) -> tuple[Any, dict[Path, Any]]:
    """A result as a tree whose tensors are TensorSlots, and its leaves by path: the order of keys does not matter."""
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> TensorSlot:
        tensors.append(tensor.detach())
        return TensorSlot((len(tensors) - 1,))

    tree = freeze_deep(result, slot)
    paths = list(walk(tree, named_items))
    held = {path: tensors[leaf.path[0]] if type(leaf) is TensorSlot else leaf for path, leaf in paths}
    slots = iter([path for path, leaf in paths if type(leaf) is TensorSlot])
    return map_leaves(tree, lambda leaf: TensorSlot(next(slots)) if type(leaf) is TensorSlot else leaf), held


def have_one_structure(one: dict[Path, Any], other: dict[Path, Any]) -> bool:
    """True if two results have leaves at the same paths: tensors of one shape, or equal objects."""
    if one.keys() != other.keys():
        return False
    pairs = [(leaf, other[path]) for path, leaf in one.items()]
    return all(
        isinstance(b, torch.Tensor) and a.shape == b.shape
        if isinstance(a, torch.Tensor)
        else type(a) is type(b) and a == b
        for a, b in pairs
    )


def in_common_dtype(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The tensors in one dtype that holds their numbers exactly; None if there is none."""
    wide = reduce(torch.promote_types, dict.fromkeys([tensor.dtype for tensor in tensors]))
    made = [tensor.to(wide) for tensor in tensors]
    pairs = zip(tensors, made, strict=True)
    kept = (old.dtype is wide or torch.equal(new.to(old.dtype), old) for old, new in pairs)
    return made if all(kept) else None


@frozen
class TensorSlot:
    """The place of a tensor in a tree."""

    path: Path
