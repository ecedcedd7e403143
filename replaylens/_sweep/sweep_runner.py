"""A sweep: variants of a program, each as a replay takes it, run together, with the metric as more program where
possible.

In: a record, the changes of each variant, how to capture a metric, and how to replay one variant alone. Out: Replays.
Variants that cannot be batched are replayed one by one, and the reason is reported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from .._edit.patch import calls_functions, keeps_layout, may_keep_values
from .._ir.equality import REARRANGED, digest_of_bits, same_content
from .._ir.graph import Graph
from .._ir.interrupts import restoring_modes
from .._ir.label import Label
from .._ir.memory import version_of
from .._ir.node import Call, Input, Ref, refs_in
from .._ir.ops import Quirk, op_info
from .._ir.runtime import addresses_memory
from .._ir.trees import freeze_deep, thaw
from .._ir.util import add_note
from .._ir.value_source import Saved
from .._ir.write import Write
from .._replay.alias_analysis import detached_views
from .._replay.flag_guards import guarded_changes
from .._replay.guards import Departure, diverged_error
from .._replay.record import Cache, Record
from .._replay.replay import hazards_of_changes
from .._replay.request import Change
from .._replay.resolve_patches import Changes
from .._replay.supply import Run
from ..errors import CaptureError, DivergedReplay, ReplaylensError
from .batch_runner import (
    Batch,
    Gathered,
    PassResult,
    Path,
    Replays,
    TensorSlot,
    as_tensors,
    have_one_structure,
    in_common_dtype,
    progress_bar,
    stacked_results,
    structure_of,
    variants_of,
    why_impure,
    with_fixed_masks,
    with_metric,
)
from .batched_ops import asks_for_layout
from .sweep_plan import Plan, seconds_from
from .task_draws import drawing_apart, go_on

Metric = Callable[[Any], Any]
_ALONE: Cache[None, str] = Cache()  # why nothing can go at once; empty where it can
_METRIC: Cache[None, tuple[Record, Record]] = Cache()  # of the last metric: its record, and that of both


@define(eq=False)
class BatchedSweep:
    """Variants to run together; those that change an output itself run alone."""

    record: Record
    keys: tuple[Any, ...]
    changes: Sequence[Changes]
    unbatchable: frozenset[int]  # numbers of variants that only a replay of their own can do
    metric: Metric | None
    output: Any  # of the program, as it was recorded
    capture: Callable[[Metric, Any], Record]
    alone: Callable[[int], Run]  # a variant in a replay of its own
    memory: float | None = None
    batch: Batch = field(init=False)
    is_program: bool = field(init=False)
    metric_reads_layout: bool = False
    notes: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        graph = self.record.graph
        why = _ALONE.get(self.record, None)
        if why is None:
            why = _ALONE.put(self.record, None, why_unbatchable(graph) or _why_subclass(self.record))
        if why:
            self.notes.append(f"everything: {why}")
            self.unbatchable = frozenset(range(len(self.keys)))
        self.unbatchable |= _asked_of(graph, self.changes)
        if aliased := [call for call in graph.calls if call.through or isinstance(call, Write)]:
            self._exclude(
                [n for n, each in enumerate(self.changes) if not is_batchable(graph, aliased, each)], _ALIASED
            )
        self._exclude([n for n, each in enumerate(self.changes) if _may_hand_on(each)], _HANDS_ON)
        self._exclude_above([call.name for call in graph.flag_readers], _ASKS_GRAD)
        self._exclude_above(_quantized(graph), _QUANTIZED)
        self.unbatchable |= {n for n, each in enumerate(self.changes) if any(hazards_of_changes(graph, each))}
        if graph.shifts:
            self._exclude([n for n, each in enumerate(self.changes) if _shifts_draws(graph, each)], _SHIFTING)
        whole = self._with_metric() if self.metric is not None else self.record
        self.is_program = whole is not None
        batchable = [number for number, each in enumerate(self.changes) if each and number not in self.unbatchable]
        every = variants_of(self.changes)
        grouped = [every[number] for number in batchable]
        ends = self._layout_ends()
        may_replay = not (ends and self.is_program)
        self.batch = Batch(whole or self.record, grouped, len(self.keys), self.memory, ends, may_replay)

    def _exclude_above(self, names: Sequence[str], why: str) -> None:
        """Leaves out the variants that reach one of these nodes: they are replayed alone."""
        if not names:
            return
        above = self.record.graph.marked_ancestors(names)
        self._exclude([n for n, each in enumerate(self.changes) if any(above[position] for position in each)], why)

    def _exclude(self, numbers: Sequence[int], why: str) -> None:
        self.unbatchable = self.unbatchable.union(numbers)
        nodes, positions = self.record.graph.nodes, [p for number in numbers for p in self.changes[number]]
        layers = dict.fromkeys(Label.of(nodes[position].name).layer for position in positions)  # whatever their passes
        self.notes.extend(f"{layer}: {why}" for layer in layers)

    def _with_metric(self) -> Record | None:
        """The program with the metric, if that is nothing but tensor operations."""
        assert self.metric is not None
        try:
            made = self.capture(self.metric, copied_output(self.output))
            why = (
                why_impure(made.graph)
                or why_unbatchable(made.graph)
                or _why_subclass(made)
                or _why_quantized(made.graph)
            )
            self.metric_reads_layout = reads_layout(made.graph)
            if self.metric_reads_layout and not why and any(map(_lies_otherwise_copied, tensors_in(self.output))):
                why = "how its argument lies in memory may matter, and that is a copy of the output"
        except CaptureError as error:
            why = str(error).partition("\n")[0]
        if why:
            self.notes.append(f"the metric: {why}")
            return None
        before, whole = _METRIC.get(self.record, None) or (None, None)
        if before is None or not _is_same_metric(
            before, made
        ):  # the same function may read another number or tensor now
            whole = with_metric(self.record, with_fixed_masks(made))
            _METRIC.put(self.record, None, (made, whole))
        return whole

    def _layout_ends(self) -> frozenset[Ref]:
        """The outputs of which the metric may read how they lie in memory."""
        reads = self.metric is not None and (self.metric_reads_layout or not self.is_program)
        return frozenset(self.record.graph.output_refs if reads else ())

    @property
    def plan(self) -> Plan:
        return self.batch.plan(self.keys)

    @property
    def fingerprint(self) -> str:
        """A digest of how it runs: of passes that are the same, results are the same to the last bit."""
        passes = [[one.is_stacked, [variant.number for variant in one.variants]] for one in self.batch.passes]
        whole, more = self.batch.record, self.batch.record.graph.nodes[len(self.record.graph) :]
        metric = [f"{node} {node.spec}" for node in more]
        held = [whole.value(Ref(node.name)) for node in more if not isinstance(node, Call)]
        made = [passes, sorted(self.unbatchable), self.is_program, metric, list(map(digest_of_bits, held))]
        return hashlib.sha256(json.dumps(made).encode()).hexdigest()

    def likeness(self, is_in_passes: bool = True) -> Likeness:
        """What another process must find as well to do some of the tasks."""
        if self.metric is None:
            return Likeness(self.fingerprint if is_in_passes else "")
        found = [self.baseline_apart() for _ in range(2 if self.reads_each else 1)]
        is_steady = all(are_near(found[0], other) for other in found)
        return Likeness(self.fingerprint if is_in_passes else "", found[0] if is_steady else None)

    def baseline_apart(self) -> Any:
        """The metric of the recorded output, where it draws the same numbers in each process."""
        return as_tensors(drawing_apart({}, 0, lambda: self._measured(self.output))[0])

    @property
    def reads_each(self) -> bool:
        """True if the metric is called with each output, being more than tensor operations."""
        return self.metric is not None and not self.is_program

    def run(self, tick: Callable[[int], None], elsewhere: Elsewhere | None = None) -> Replays:
        """Runs all of them, in the order of their keys; by `elsewhere`, if given, wherever that runs tasks."""
        self.record.require_steady()  # it may have been planned long ago
        baseline = self.output if self.metric is None else self._measured(self.output)
        ran = OneRun(self, tick, elsewhere)
        values = ran.at_once() if len(self.unbatchable) < len(self.keys) else REFUSED
        if values is REFUSED:
            return ran.replays(ran.all_alone(), baseline)
        for number in sorted({*self.unbatchable, *ran.departures}):
            values = _with_result(values, number, ran.alone(number), self.keys[number])
        return ran.replays(values, baseline)

    def task(self, number: int) -> Any:
        """What a task gives in another process: a pass, or the variant `-1 - number` by itself, if it can be run there.
        It cannot where it leaves the recorded path, and only this process holds the model.
        """
        if number >= 0:
            return self.pass_result(number)
        try:
            return self.lane_result(-1 - number)
        except DivergedReplay:
            return None

    def pass_result(self, number: int) -> PassResult:
        """What a pass gives. Whatever goes wrong in it goes right alone, or raises there."""
        try:
            found = self.batch.run(number)
            rows = {} if self.reads_each else self.batch.rows(found)
        except ReplaylensError:
            raise
        except Exception as error:
            return PassResult(refusal=f"together it raised {type(error).__name__}: {error}")
        results = self.batch.each(number, found, self._read) if self.reads_each else {}
        return PassResult(rows, results, found.departures, found.alone)

    def lane_result(self, number: int, suspected: Departure | None = None) -> LaneResult:
        """The result of a variant by itself. Its own replay decides whether it leaves the recorded path."""
        try:
            run = self.alone(number)
        except DivergedReplay as error:
            if suspected is None:
                raise
            raise diverged_error(suspected, f"in the variant {self.keys[number]!r}, ") from error
        except Exception as error:
            add_note(error, f"replaylens: raised in the variant {self.keys[number]!r}")
            raise
        try:
            value = self._measured(run.output)
        except Exception as error:
            add_note(error, f"replaylens: raised by the metric, of the variant {self.keys[number]!r}")
            raise
        return LaneResult(value, run.departures[0] if run.departures else None)

    def _read(self, number: int, output: Callable[[], Any]) -> Any:
        """What the metric reads of the output of a variant; of that of its own replay, if it raises."""
        try:
            return self._measured(output())
        except Exception:
            return self.lane_result(number).value

    def _measured(self, output: Any) -> Any:
        with torch.no_grad():
            return output if self.metric is None else copied_output(self.metric(copied_output(output)))


@frozen(eq=False)
class Likeness:
    """What a sweep is found to be in one process, and must be in another one that does some of its tasks."""

    passes: str = ""  # a digest of how it runs; empty if each variant runs alone
    baseline: Any = None  # of the metric, if it has one that gives the same whenever it is asked

    def unlike(self, sweep: BatchedSweep) -> str:
        """In which way a sweep is another one; empty if it is not."""
        if self.passes and sweep.fingerprint != self.passes:
            return "in other passes, or with another metric, and its last bits could differ"
        if self.baseline is not None and not are_near(self.baseline, sweep.baseline_apart()):
            return "with another metric, which gives something else for the output without any patch"
        return ""


def are_near(one: Any, other: Any) -> bool:
    """True if two results of a metric have one structure, and numbers that differ by rounding at most."""
    (_, mine), (_, theirs) = structure_of(one), structure_of(other)
    if not have_one_structure(mine, theirs):
        return False
    tensors = [(leaf, theirs[path]) for path, leaf in mine.items() if isinstance(leaf, torch.Tensor)]
    return all(a.dtype is b.dtype and _is_near(a, b) for a, b in tensors)


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or one.is_quantized or one.is_meta or not one.numel():
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return REARRANGED.holds(one.to(torch.complex128), other.to(torch.complex128))


REFUSED: Any = object()  # in the place of values


@frozen(eq=False)
class LaneResult:
    """The result of one variant by itself."""

    value: Any
    departure: Departure | None  # how it left the recorded path, if it did
    drew: frozenset[str] = frozenset()  # the generators of another process that functions of the user's drew from


Receive = Callable[[int, Any], None]  # the place of a task among those that were asked for, and what it gave
Elsewhere = Callable[[Likeness, Sequence[int], Sequence[float], Receive], Any]  # tasks, and how long each takes


@define(eq=False)
class OneRun:
    """One run of a sweep: what it has found so far."""

    sweep: BatchedSweep
    tick: Callable[[int], None]
    elsewhere: Elsewhere | None
    lanes: dict[int, LaneResult] = field(factory=dict)  # of variants that ran alone somewhere else
    departures: dict[int, Departure] = field(factory=dict)
    nodes_alone: dict[str, None] = field(factory=dict)  # the nodes that ran variant by variant
    execution: Any = None

    def at_once(self) -> Any:
        """The values of all variants, those that ran in passes in their places. REFUSED, and a note, if a pass could
        not be run.
        """
        sweep, batch = self.sweep, self.sweep.batch
        try:
            gathered = Gathered(batch, None if sweep.reads_each else batch.places())
            lanes = sorted(sweep.unbatchable) if self.elsewhere is not None else []
            tasks = [*range(len(batch.passes)), *[-1 - lane for lane in lanes]]
        except ReplaylensError:
            raise
        except Exception as error:
            return self._refused(f"together it raised {type(error).__name__}: {error}")
        self._do(tasks, gathered)
        batch.idle.clear()
        if gathered.refusal:
            return self._refused(gathered.refusal)
        self.departures |= gathered.departures
        self.nodes_alone |= gathered.alone
        if not sweep.reads_each:
            return gathered.stacked()
        blank = sweep._measured(sweep.output)
        return stacked_results([gathered.results.get(number, blank) for number in range(len(sweep.keys))])

    def _refused(self, why: str) -> Any:
        self.sweep.notes.append(f"everything: {why}")
        return REFUSED

    def _do(self, tasks: Sequence[int], gathered: Gathered | None) -> None:
        """Has these tasks done, each by another process or here, one after another."""
        drew: set[str] = set()

        def receive(place: int, result: Any) -> None:
            number = tasks[place]
            drew.update(() if result is None else result.drew)
            if number >= 0 and gathered is not None:
                gathered.put(number, result)
                self.tick(len(self.sweep.batch.passes[number].variants))
            elif result is not None:
                self.lanes[-1 - number] = result
                self.tick(1)

        if self.elsewhere is not None:
            likeness = self.sweep.likeness(gathered is not None)
            self.execution = self.elsewhere(likeness, tasks, self._weights(tasks), receive)
            go_on(drew)
            return
        for place, number in enumerate(tasks):
            result = self.sweep.pass_result(number)
            receive(place, result)
            if result.refusal:
                return

    def _weights(self, tasks: Sequence[int]) -> list[float]:
        """How long each task takes, roughly: the longest ones go first."""
        sweep, seconds = self.sweep, seconds_from(self.sweep.batch.program)

        def weight(number: int) -> float:
            if number < 0:
                return seconds[min(sweep.changes[-1 - number], default=0)]
            return sum(seconds[variant.first] for variant in sweep.batch.passes[number].variants)

        return list(map(weight, tasks))

    def all_alone(self) -> Any:
        """The values of all variants, each in a replay of its own."""
        count = len(self.sweep.keys)
        if self.elsewhere is not None:
            self._do([-1 - number for number in range(count)], None)
        results = []
        for number in range(count):
            is_new = number not in self.lanes
            results.append(self.alone(number))
            self.tick(int(is_new))
        return stacked_results(results)

    def alone(self, number: int) -> Any:
        """The result of a variant by itself."""
        suspected, found = self.departures.pop(number, None), self.lanes.pop(number, None)
        if found is None:
            found = self.sweep.lane_result(number, suspected)
        if found.departure is not None:
            self.departures[number] = found.departure
        return found.value

    def replays(self, values: Any, baseline: Any) -> Replays:
        """The results, with what there is to say of them."""
        sweep, names = self.sweep, dict.fromkeys(Label.of(name).layer for name in self.nodes_alone)
        notes = (*sweep.notes, *[f"{name}: no rule to run it for all at once" for name in names])
        departures = {sweep.keys[number]: self.departures[number] for number in sorted(self.departures)}
        return Replays(sweep.keys, values, baseline, departures, notes, self.execution)


def reads_layout(graph: Graph) -> bool:
    """True if a program may give other numbers where its inputs lie otherwise in memory."""
    return bool(graph.asked) or any(map(asks_for_layout, graph.calls))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of Python's."""
    found: list[torch.Tensor] = []
    freeze_deep(tree, found.append)
    return found


def _lies_otherwise_copied(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.detach().clone().stride() != tensor.stride()


def _is_same_metric(before: Record, now: Record) -> bool:
    """True if two captures of a metric compute the same from the same values."""
    try:
        if before.graph != now.graph or before.draws or now.draws:
            return False
    except ValueError:  # an argument that has no one truth value: an array of numpy's
        return False
    refs = [ref for ref in now.values if not isinstance(now.graph[ref.node], Input)]
    return all(
        before.versions[ref] == version_of(before.values[ref]) and same_content(before.values[ref], now.values[ref])
        for ref in refs
    )


def _quantized(graph: Graph) -> list[str]:
    """The nodes with quantized results: values on several scales cannot be stacked."""
    pairs = [
        (node.name, one) for node in graph.nodes for one in (node.spec if isinstance(node, Call) else (node.spec,))
    ]
    return list(dict.fromkeys([name for name, one in pairs if one.dtype in _ON_A_SCALE]))


def _why_quantized(graph: Graph) -> str:
    found = _quantized(graph)
    return f"{found[0]} is quantised, on a scale of its own for each variant" if found else ""


def _why_subclass(record: Record) -> str:
    """Why values of a user's tensor class cannot be batched: a stack of them does not do what the class does in
    torch's functions.
    """
    for ref, value in record.values.items():
        if type(value) is not torch.Tensor and _overrides_functions(type(value)):
            return f"{ref} is a {type(value).__name__}, which changes what torch's functions do"
    return ""


def _overrides_functions(kind: Any) -> bool:
    """True if a tensor class itself decides what torch's functions do with it."""
    doors = getattr(kind.__torch_function__, "__func__", kind.__torch_function__), kind.__torch_dispatch__
    return any(door not in _PLAIN_DOORS for door in doors)


def _shifts_draws(graph: Graph, changes: Changes) -> bool:
    """True if a variant may make a call take more or fewer random numbers, so that later draws differ."""
    below = graph.descendants([graph.nodes[position].name for position in changes])
    return any(graph.nodes[before].name in below for before in graph.shifts.values())


def _asked_of(graph: Graph, changes: Sequence[Changes]) -> frozenset[int]:
    """The variants with questions that a batch cannot answer: a change on which only a guarded fact depends, or
    flags that the model asks for and a patch may alter. Memory layouts are checked where variants start.
    """
    places = {position for each in changes for position in each}
    needed = graph.marked_ancestors([ref.node for ref in graph.wanted_refs])
    only = {position for position in guarded_changes(graph, places) if not needed[position]}
    flags = [guard for guard in graph.asked if guard.kind == "flags" and guard.refs]
    catches = bool(graph.catches and graph.asked)
    above = graph.marked_ancestors([ref.node for guard in flags for ref in guard.refs])
    flagged = {position for position in places if above[position] or (catches and graph.dependents[position])}
    return frozenset(
        number
        for number, each in enumerate(changes)
        if not only.isdisjoint(each)
        or any(not all(map(_keeps_flags, each[position])) for position in flagged.intersection(each))
    )


def _keeps_flags(change: Change) -> bool:
    """True if the new value needs gradients exactly where the old one does."""
    return change.follows and keeps_layout(change.what) and not any(tensor.requires_grad for tensor in change.holds)


def why_unbatchable(graph: Graph) -> str:
    """Why nothing of this program can be batched; empty if something can."""
    for call in graph.calls:
        for function in call.functions:
            if addresses_memory(function):
                return f"{call.name} looks at memory by its geometry"
            if op_info(function).has(Quirk.CALLBACK):
                return f"{call.name} calls Python for every number"
        if any(meaning.strides is None for meaning in call.spec):
            return f"{call.name} gives a tensor that is not dense"
    return ""


def is_batchable(graph: Graph, aliased: Sequence[Call], changes: Changes) -> bool:
    """True if a variant can be batched. False where a call must know its patches: one that takes a gradient through
    patched values, or that writes through a view which a patch detaches from its base.
    """
    if not aliased:
        return True
    names = {graph.nodes[position].name for position in changes}
    values = {ref for several in changes.values() for one in several for ref in refs_in(one.tree)}
    return not (any(names.intersection(call.through) for call in aliased) or detached_views(graph, values))


_PLAIN_DOORS: tuple[Any, ...] = (
    torch.Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch.nn.Parameter.__torch_function__,
    torch.Tensor.__torch_dispatch__,
)
_ON_A_SCALE = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))
_QUANTIZED = "patched there, quantised values have another scale"
_SHIFTING = "patched there, a draw takes more or fewer random numbers, and later draws shift"
_ASKS_GRAD = "a custom function behind it asks whether gradients are needed, and a batch runs without"
_HANDS_ON = "one patch function may read what another one kept"
_ALIASED = "patched there, a gradient that the model takes itself changes, or a view is detached from its base"


def _may_hand_on(changes: Changes) -> bool:
    """True if several functions of one variant may hand something on to each other: in a pass, those of all variants at
    one place run before those at the next.
    """
    of_functions = [each for each in changes.values() if any(calls_functions(change.what) for change in each)]
    return len(of_functions) > 1 and any(may_keep_values(change.what) for each in of_functions for change in each)


def copied_output(output: Any) -> Any:
    """A copy of the output in its own memory: a metric may write to it, and may keep the recorded one besides. So may
    it write what it gave once more.
    """
    return thaw(freeze_deep(output, lambda tensor: tensor.detach().clone()), lambda leaf: leaf)


def _with_result(values: Any, number: int, result: Any, key: Any) -> Any:
    """The results with one variant's own in its place."""
    (tree, stacks), (_, mine) = structure_of(values), structure_of(as_tensors(result))
    others = {path: leaf[0] if isinstance(leaf, torch.Tensor) else leaf for path, leaf in stacks.items()}
    if not have_one_structure(others, mine):
        raise _unlike_others(key, "shapes", mine, others)
    made = dict(stacks)
    for path, stack in stacks.items():
        if isinstance(stack, torch.Tensor):
            common = in_common_dtype((stack, mine[path]))
            if common is None:
                raise _unlike_others(key, "dtypes", mine, others)
            made[path], one = common
            made[path][number] = one
    if all(made[path] is stack for path, stack in stacks.items()):
        return values
    return thaw(tree, lambda leaf: made[leaf.path] if type(leaf) is TensorSlot else leaf)


def _unlike_others(key: Any, what: str, mine: dict[Path, Any], others: dict[Path, Any]) -> DivergedReplay:
    def facts(leaves: dict[Path, Any]) -> Any:
        tensors = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
        return [tuple(tensor.shape) if what == "shapes" else tensor.dtype for tensor in tensors]

    text = (
        f"gives tensors of the {what} {facts(mine)}, where the others give {facts(others)}"
        if facts(mine) != facts(others)
        else "gives another structure than the others"
    )
    return DivergedReplay(
        f"the variant {key!r} leaves the recorded path and {text}: they cannot be stacked.\n"
        "Pass a metric that gives the same for all, or replay this variant alone."
    )


@frozen(eq=False)
class PendingSweep(Saved):
    """Many replays that were asked for, and have not run yet."""

    make: Callable[[], BatchedSweep]  # anew for each run: a metric may read other numbers than when it was planned
    planned: BatchedSweep
    on_executor: Callable[..., Elsewhere | None]  # where the tasks run, by executor, scratch and retries

    @property
    def plan(self) -> Plan:
        """What it will cost."""
        return self.planned.plan

    def run(
        self, progress: bool | None = None, *, executor: Any = None, scratch: Any = None, retries: int = 3
    ) -> Replays:
        """Runs them, in this process or by an executor. A progress bar shows if it takes long and tqdm is installed."""
        elsewhere = self.on_executor(executor, scratch, retries)
        return run_sweep(restoring_modes(self.make), progress, elsewhere)

    def run_now(self, progress: bool | None, executor: Any, scratch: Any, retries: int) -> Replays:
        """The same just after planning: nothing can have changed."""
        return run_sweep(self.planned, progress, self.on_executor(executor, scratch, retries))


def run_sweep(sweep: BatchedSweep, progress: bool | None, elsewhere: Elsewhere | None) -> Replays:
    """Runs a sweep that was just prepared."""
    with progress_bar(len(sweep.keys), progress) as tick:
        return restoring_modes(lambda: sweep.run(tick, elsewhere))
