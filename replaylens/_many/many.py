"""Many replays at once: the variants in passes, and what came of each, in their own order.

In: a record (with the metric, if there is one, as its last nodes), and for each variant its changes. Out: the values of
the output for each, stacked. What a variant that left the recorded path gives is asked of `alone`, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen

from .._core.node import Ref
from .._core.torch_private import pytree
from .._core.trees import freeze_deep, thaw
from .._replay.guards import Departure
from .._replay.record import Cache, Record
from .._replay.request import Change
from ..errors import BadMetric
from .chunks import Plan, chunks, plan
from .delta import Delta, dense, lane_value
from .engine import Variant, run
from .machine import Machine

Changes = dict[int, tuple[Change, ...]]
_MACHINE: Cache[None, Machine] = Cache()


@define(eq=False)
class Many:
    """Variants of one record, to be run together."""

    record: Record
    variants: list[Variant]
    count: int  # of all variants, those among them that are run elsewhere
    memory: float | None = None
    machine: Machine = field(init=False)
    departures: dict[int, Departure] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        graph = self.record.graph
        known = _MACHINE.get(self.record, None)
        if known is None:
            known = _MACHINE.put(self.record, None, Machine(self.record, tuple(dict.fromkeys(graph.output_refs))))
        else:
            self.record.require_steady()
        self.machine = known
        self.machine.prepare([position for variant in self.variants for position, _ in variant.changes])

    @property
    def plan(self) -> Plan:
        return plan(self.machine, self.variants, self.memory)

    def run(self, tick: Callable[[int], None]) -> Iterator[tuple[list[int], dict[Ref, Delta]]]:
        """Pass by pass: which variants, and where the output's values differ. Those that departed are left out."""
        for chunk in chunks(self.machine, self.variants, self.memory):
            found = run(self.machine, chunk, self.departures.__setitem__)
            yield [variant.number for variant in chunk], found
            tick(len(chunk))

    def stacked(self, tick: Callable[[int], None]) -> Any:
        """The output for every variant: its tensors with the variants as a new first axis."""
        refs = self.machine.ends
        count = self.count
        made = {ref: self._recorded(ref).expand(count, *self._recorded(ref).shape).clone() for ref in refs}
        for _, found in self.run(tick):
            for ref, delta in found.items():
                whole = dense(delta, self._recorded(ref))
                made[ref][list(whole.pairs.lanes)] = whole.data
        return thaw(self.record.graph.output, lambda leaf: made[leaf] if type(leaf) is Ref else leaf)

    def each(self, read: Callable[[Any], Any], tick: Callable[[int], None]) -> list[Any]:
        """`read` of every variant's output, one by one; None for those that departed."""
        results: list[Any] = [None] * self.count
        tree = self.record.graph.output
        for lanes, found in self.run(tick):
            for lane in lanes:
                if lane not in self.departures:
                    results[lane] = read(thaw(tree, self._reader(found, lane)))
        return results

    def _reader(self, found: dict[Ref, Delta], lane: int) -> Callable[[Any], Any]:
        def leaf(value: Any) -> Any:
            if type(value) is not Ref:
                return value
            delta = found.get(value)
            return self._recorded(value) if delta is None else lane_value(delta, lane, self._recorded(value))

        return leaf

    def _recorded(self, ref: Ref) -> torch.Tensor:
        return self.machine.values[self.machine.slot[ref]]


def variants_of(changes: Sequence[Changes]) -> list[Variant]:
    """Variants from what a replay takes: position -> changes."""
    return [
        Variant(number, tuple([(position, change) for position, several in each.items() for change in several]))
        for number, each in enumerate(changes)
    ]


@frozen(eq=False)
class Replays:
    """What many replays at once gave: `values[n]` belongs to `keys[n]`."""

    keys: tuple[Any, ...]
    values: Any  # a tensor with the variants along its first axis, or a structure of such
    baseline: Any  # the same without any change
    departures: dict[Any, Departure]  # the variants that left the recorded path
    one_by_one: tuple[str, ...]  # what could not be run for all variants at once, and why

    def __getitem__(self, key: Any) -> Any:
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
        return torch.tensor(value) if type(value) in (int, bool) else value

    return pytree.tree_map(leaf, result)


def stacked_results(results: Sequence[Any]) -> Any:
    """Results of the same structure as one, whose tensors and numbers have one more axis in front."""
    columns: list[list[torch.Tensor]] = []
    tree: Any = None
    for result in reversed([as_tensors(result) for result in results]):
        column: list[torch.Tensor] = []
        tree = freeze_deep(result, partial(_slot, column))
        columns.insert(0, column)
    if not columns[0]:
        raise BadMetric(f"a metric must give tensors or numbers, not {type(results[0]).__name__}.")
    stacks = [torch.stack(several) for several in zip(*columns, strict=True)]
    return thaw(tree, lambda leaf: stacks[leaf.number] if type(leaf) is Slot else leaf)


def _slot(column: list[torch.Tensor], tensor: torch.Tensor) -> Slot:
    column.append(tensor.detach())
    return Slot(len(column) - 1)


@frozen
class Slot:
    """Where a tensor stood."""

    number: int
