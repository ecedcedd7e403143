"""check: every law that a program can be held to without its model.

In: the record of a program, what the model returned, what is known of its layers. Out: a CheckReport. Nothing of the
program is changed, nor any generator; the laws are asked one after the other, the walk over the calls last.
"""

from __future__ import annotations

from typing import Any

from .._core.graph import Graph
from .._core.node import Call
from .._lens.lens import Lens
from .._many.progress import bar
from .._replay.record import Record
from .proven import Proven
from .report import CheckReport, Law
from .saved import saved_values, stale_values
from .structure import graph_law, metadata_law
from .walk import ALONE, DRAWS, NONSENSE, laws_of, walk
from .whole import NAME as WHOLE, whole_replay

_UNLAWFUL = "the graph is not well formed"


def check(
    record: Record, returned: Any, lens: Lens, as_captured: bool, sample: float | None, progress: bool | None
) -> CheckReport:
    """Ask every law. `as_captured`: no edit has put nodes between others, so that numbers run on."""
    graph = record.graph
    _require_sample(sample)
    lawful = graph_law(graph, as_captured)
    if lawful.failures:
        skipped = [Law(name, skipped=_UNLAWFUL) for name in (WHOLE, ALONE, NONSENSE, DRAWS, "saved values", "metadata")]
        return CheckReport(graph.model_name, (*skipped[:4], lawful, *skipped[4:]))
    stale = stale_values(record)
    chosen = _chosen(graph, sample)
    left_out = f"a sample of {len(chosen):,} of {len(graph.calls):,} nodes" if len(chosen) < len(graph.calls) else ""
    proven = Proven(record)
    whole = whole_replay(record, returned, stale, proven)
    with bar(len(chosen), progress, "node") as tick:
        walked = laws_of(walk(proven, stale, chosen, tick), left_out, len(graph.calls))
    others = (lawful, saved_values(record, stale), metadata_law(lens, as_captured))
    return CheckReport(graph.model_name, (whole, *walked, *others))


def _chosen(graph: Graph, sample: float | None) -> frozenset[int]:
    """The calls that are asked: all, or so many, spread evenly over the program; always the same."""
    calls = [position for position, node in enumerate(graph.nodes) if isinstance(node, Call)]
    if sample is None:
        return frozenset(calls)
    count = min(len(calls), sample if isinstance(sample, int) else max(1, round(sample * len(calls))))
    return frozenset([calls[(2 * number + 1) * len(calls) // (2 * count)] for number in range(count)])


def _require_sample(sample: float | None) -> None:
    is_number = isinstance(sample, (int, float)) and not isinstance(sample, bool)
    fits = is_number and (0 < sample <= 1 if isinstance(sample, float) else sample > 0)  # type: ignore[operator]
    if sample is not None and not fits:
        raise ValueError(f"sample is a number of nodes, or a share of them between 0 and 1, not {sample!r}.")
