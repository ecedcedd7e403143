"""One call of a program, run by itself.

In: a record, a call, values for what it reads. Out: what it gives on them, in its own modes and with its own draw; how
far its values lie apart when it is repeated. A value that was not kept is computed on the way, and forgotten after its
last use. Why anybody asks is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from .._ir.autograd import as_leaf
from .._ir.equality import plain, same
from .._ir.node import Call, Ref, refs_of
from .._ir.tolerances import REARRANGED
from .._ir.trees import part_at
from .._ir.write import Write
from .._replay.alias_analysis import NONE
from .._replay.compile import Mode, caller
from .._replay.interpreter import modes
from .._replay.record import Record

Given = Mapping[Ref, torch.Tensor]


@frozen(eq=False)
class NodeRunner:
    """A call, made ready to be run on any values."""

    node: Call
    reads: tuple[Ref, ...]  # what it reads, each once
    gives: tuple[Ref, ...]
    read: Callable[[list[Any]], Any]
    call: Callable[..., Any]
    template: list[Any]

    def __call__(self, given: Given) -> dict[Ref, Any]:
        """Its values on these."""
        env = [*(given[ref] for ref in self.reads), *self.template]
        with modes(self.node.context):
            made = self.call(*self.read(env))
        return {ref: part_at(made, ref.path) for ref in self.gives}


def ready(node: Call, draws: Mapping[str, torch.Tensor]) -> NodeRunner:
    """A call with its recorded draws, or with others."""
    reads = tuple(dict.fromkeys(node.refs))
    slots = {ref: number for number, ref in enumerate(reads)}
    template: list[Any] = []

    def literal(value: Any) -> int:
        template.append(value)
        return len(reads) + len(template) - 1

    read, call = caller(node, slots, literal, dict(draws), Mode())
    return NodeRunner(node, reads, refs_of(node), read, call, template)


def as_replayed(node: Call, apart: Mapping[str, frozenset[Ref]]) -> Call:
    """The call as a replay without patches makes it: views that it writes through are read in their base."""
    return node.keeping(apart.get(node.name, NONE)) if isinstance(node, Write) else node


class Values:
    """The values of a program while it is walked: recorded ones, and those that were computed on the way."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.made: dict[Ref, Any] = {}
        self.last = [max(users, default=position) for position, users in enumerate(record.graph.users)]
        self.dying: dict[int, list[Ref]] = {}

    def __getitem__(self, ref: Ref) -> Any:
        """The value, as a replay begins with it: without a history, with its flag."""
        value = self.made[ref] if ref in self.made else self.record.values[ref]
        return as_leaf(value) if isinstance(value, torch.Tensor) else value

    def __contains__(self, ref: Ref) -> bool:
        return ref in self.made or ref in self.record.values

    def keep(self, position: int, values: Mapping[Ref, Any]) -> None:
        """Hold what nobody recorded, until its last reader has run."""
        missing = {ref: value for ref, value in values.items() if ref not in self.record.values}
        self.made.update(missing)
        self.dying.setdefault(self.last[position], []).extend(missing)

    def forget(self, position: int) -> None:
        """Drop what nothing after this position reads."""
        for ref in self.dying.pop(position, ()):
            del self.made[ref]


def drawing_otherwise(node: Call, draws: Mapping[str, torch.Tensor], seed: int) -> NodeRunner:
    """The call with another state of its generator."""
    assert node.draws is not None
    state = torch.Generator().manual_seed(seed).get_state()
    return ready(node, {**draws, node.draws: state})


_TIMES = 5


def spread_of_repetitions(alone: NodeRunner, given: Given, saved: Mapping[Ref, torch.Tensor]) -> float | None:
    """The spread over repetitions, where every saved value lies within it."""
    repeated = [alone(given) for _ in range(_TIMES)]
    spreads = [_spread([made[ref] for made in repeated], value) for ref, value in saved.items()]
    return None if any(spread is None for spread in spreads) else max(s for s in spreads if s is not None)


def _spread(repeated: list[Any], saved: torch.Tensor) -> float | None:
    first = repeated[0]
    if not saved.is_floating_point() or saved.is_nested or first.shape != saved.shape or first.dtype != saved.dtype:
        return None
    if all(same(first, other) for other in repeated[1:]):
        return None
    values = torch.stack([plain(one).to(torch.float64) for one in repeated])
    low, high, wanted = values.amin(0), values.amax(0), plain(saved).to(torch.float64)
    spread = float((high - low).max())
    is_among = bool(((wanted >= low - spread) & (wanted <= high + spread)).all())
    return spread if is_among and spread <= REARRANGED.of_largest * float(values.abs().max()) else None
