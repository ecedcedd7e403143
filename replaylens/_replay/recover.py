"""Values that were not kept, computed again from those that were.

In: what is known of a run, and the Refs whose values are asked for. Out: those values, without histories: the very ones
that the model had, draws included. Only what they need is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from .._core.graph import Graph
from .._core.node import Call, Ref, refs_of
from .._core.pure import as_leaf
from .plan import plan
from .runner import run


class Known(Protocol):
    """What is known of a run of a graph: see Record."""

    @property
    def graph(self) -> Graph: ...
    @property
    def values(self) -> Mapping[Ref, torch.Tensor]: ...
    @property
    def draws(self) -> dict[str, torch.Tensor]: ...
    def value(self, ref: Ref) -> torch.Tensor: ...


def recovered(known: Known, refs: Iterable[Ref]) -> dict[Ref, torch.Tensor]:
    """The values at these Refs, of which none was kept."""
    graph, wanted = known.graph, list(dict.fromkeys(refs))
    positions = {graph.positions[ref.node] for ref in wanted}
    there = bytearray([not isinstance(n, Call) or all(r in known.values for r in refs_of(n)) for n in graph.nodes])
    made = plan(graph, positions, there, ())
    with torch.inference_mode(False):
        ran = run(graph, made, known.draws, lambda ref: as_leaf(known.value(ref)), known.value)
    return {ref: as_leaf(ran[ref]) for ref in wanted}
