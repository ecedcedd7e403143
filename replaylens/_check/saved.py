"""Is every saved value still what it was, and of the kind that the graph says?

In: a record. Out: a law, and the values that were overwritten, which no other law can be asked of.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve

from .._core.node import Ref, State, meanings_of
from .._replay.record import Record
from .findings import found_named
from .report import Finding, Law

NAME = "saved values"


def stale_values(record: Record) -> frozenset[Ref]:
    """The values that were overwritten since they were recorded."""
    return frozenset([ref for ref in record.values if record.stale(ref) is not None])


def saved_values(record: Record, stale: frozenset[Ref]) -> Law:
    """Nothing was overwritten, and shapes, types and devices are those of the graph."""
    found = (*_overwritten(record, stale), *_of_another_kind(record, stale))
    holds = "none overwritten, all of the recorded kind"
    missing = sum(ref not in record.values for node in record.graph.calls for ref in meanings_of(node))
    note = f"{missing:,} values were not kept" if missing else ""
    return Law(NAME, len(record.values), found, unit="values", holds=holds, note=note)


def _overwritten(record: Record, stale: frozenset[Ref]) -> Iterator[Finding]:
    for ref in record.values:
        if ref in stale:
            node = record.graph[ref.node]
            what = f"the {node.kind} `{node.address}`" if isinstance(node, State) else "its saved value"
            place = record.place_of(ref)
            own = isinstance(node, State) and place is not None and not place.is_as_it_was()
            fact = f"{what} {place.change if own and place is not None else 'was overwritten since the capture'}"
            yield evolve(found_named(record.graph, NAME, ref.node, fact), is_stale=True)


def _of_another_kind(record: Record, stale: frozenset[Ref]) -> Iterator[Finding]:
    for node in record.graph.nodes:
        for ref, meaning in meanings_of(node).items():
            value = record.values.get(ref)
            if not isinstance(value, torch.Tensor) or ref in stale:
                continue
            shape = tuple(value.shape) if not value.is_nested else ()
            mine, wanted = (shape, value.dtype, str(value.device)), (meaning.shape, meaning.dtype, meaning.device)
            if mine != wanted:
                yield found_named(
                    record.graph, NAME, node.name, f"{ref} was saved as {mine}, and is said to be {wanted}"
                )
