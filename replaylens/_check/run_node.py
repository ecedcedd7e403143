"""Running one call of a program on its own.

In: a record, a call, values for its arguments. Out: its values, computed under its own modes and with its own recorded
draw; and the spread of repeated runs. `Values` holds recomputed values of a walk until their last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from .._ir.autograd import as_leaf
from .._ir.equality import REARRANGED, as_dense, same
from .._ir.node import Call, Ref, refs_of
from .._ir.trees import part_at
from .._ir.write import Write
from .._replay.alias_analysis import NO_REFS
from .._replay.compile import caller
from .._replay.interpreter import modes
from .._replay.record import Record

Given = Mapping[Ref, torch.Tensor]


@frozen(eq=False)
class NodeRunner:
    """A call compiled to run on any argument values."""

    node: Call
    reads: tuple[Ref, ...]  # its arguments, each once
    gives: tuple[Ref, ...]
    read: Callable[[list[Any]], Any]
    call: Callable[..., Any]
    template: list[Any]

    def __call__(self, given: Given) -> dict[Ref, Any]:
        """The values of the call on these arguments."""
        env = [*(given[ref] for ref in self.reads), *self.template]
        with modes(self.node.context):
            made = self.call(*self.read(env))
        return {ref: part_at(made, ref.path) for ref in self.gives}


def node_runner(node: Call, draws: Mapping[str, torch.Tensor]) -> NodeRunner:
    """A runner for a call, with its recorded generator state or another one."""
    reads = tuple(dict.fromkeys(node.refs))
    slots = {ref: number for number, ref in enumerate(reads)}
    template: list[Any] = []

    def literal(value: Any) -> int:
        template.append(value)
        return len(reads) + len(template) - 1

    read, call = caller(node, slots, literal, dict(draws))
    return NodeRunner(node, reads, refs_of(node), read, call, template)


def as_in_replay(node: Call, apart: Mapping[str, frozenset[Ref]]) -> Call:
    """The call as an unpatched replay runs it: detached views that it writes through are read from their base."""
    return node.with_values(apart.get(node.name, NO_REFS)) if isinstance(node, Write) else node


class WalkValues:
    """The values of a program during a walk: the recorded ones, and those recomputed on the way."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.made: dict[Ref, Any] = {}
        self.last = [max(users, default=position) for position, users in enumerate(record.graph.users)]
        self.dying: dict[int, list[Ref]] = {}

    def __getitem__(self, ref: Ref) -> Any:
        """The value as a replay starts from it: a leaf, with its `requires_grad`."""
        value = self.made[ref] if ref in self.made else self.record.values[ref]
        return as_leaf(value) if isinstance(value, torch.Tensor) else value

    def __contains__(self, ref: Ref) -> bool:
        return ref in self.made or ref in self.record.values

    def keep(self, position: int, values: Mapping[Ref, Any]) -> None:
        """Keep the values that were not recorded until their last reader has run."""
        missing = {ref: value for ref, value in values.items() if ref not in self.record.values}
        self.made.update(missing)
        self.dying.setdefault(self.last[position], []).extend(missing)

    def forget(self, position: int) -> None:
        """Free the values that nothing after this position reads."""
        for ref in self.dying.pop(position, ()):
            del self.made[ref]


def with_other_draw(node: Call, draws: Mapping[str, torch.Tensor], seed: int) -> NodeRunner:
    """A runner for the call with another generator state."""
    assert node.draws is not None
    state = torch.Generator().manual_seed(seed).get_state()
    return node_runner(node, {**draws, node.draws: state})


_TIMES = 5


def spread_of_repetitions(runner: NodeRunner, given: Given, saved: Mapping[Ref, torch.Tensor]) -> float | None:
    """The spread over repeated runs, if every saved value lies within it; else None."""
    repeated = [runner(given) for _ in range(_TIMES)]
    spreads = [_spread([made[ref] for made in repeated], value) for ref, value in saved.items()]
    return None if any(spread is None for spread in spreads) else max(s for s in spreads if s is not None)


def _spread(repeated: list[Any], saved: torch.Tensor) -> float | None:
    first = repeated[0]
    if not all(isinstance(one, torch.Tensor) for one in repeated):
        return None
    if not saved.is_floating_point() or saved.is_nested or first.shape != saved.shape or first.dtype != saved.dtype:
        return None
    if all(same(first, other) for other in repeated[1:]):
        return None
    values = torch.stack([as_dense(one).to(torch.float64) for one in repeated])
    low, high, wanted = values.amin(0), values.amax(0), as_dense(saved).to(torch.float64)
    spread = float((high - low).max())
    is_among = bool(((wanted >= low - spread) & (wanted <= high + spread)).all())
    return spread if is_among and spread <= REARRANGED.of_largest * float(values.abs().max()) else None
