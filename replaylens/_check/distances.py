"""Are layers as far from the inputs and the outputs as they say?

In: what the layers of a program share. Out: findings. Counted anew from what each call reads: the shortest ways by
going outwards one step at a time, the longest by taking each layer only when all that it comes from has been taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .._core.node import Call, Input
from .._lens.kin import Span
from .._lens.lens import Lens
from .findings import found_named
from .report import Finding

Reads = Mapping[str, Iterable[str]]  # label -> labels


def distances(lens: Lens, law: str) -> Iterator[Finding]:
    """What is wrong with the distances that layers have."""
    places, kin = lens.atlas.places, lens.kin
    reads = _reads(lens)
    inputs = [place.label for place in places if place.output is None and isinstance(lens.graph[place.node], Input)]
    outputs = [place.label for place in places if place.output is not None]
    ways: tuple[tuple[str, tuple[Span, ...], Mapping[str, Span]], ...] = (
        ("from an input", kin.from_input, _steps(inputs, reads)),
        ("to an output", kin.to_output, _steps(outputs, _reversed(reads))),
    )
    for where, said, counted in ways:
        for place, span in zip(places, said, strict=True):
            if span != (true := counted.get(place.label)):
                fact = f"says that it has {_worded(span)} {where}; counted anew, it has {_worded(true)}"
                yield found_named(lens.graph, law, place.label, fact)


def _reads(lens: Lens) -> dict[str, set[str]]:
    """By layer: the layers that it reads; an output reads the layer that it hands on."""
    layers = {place.node for place in lens.atlas.places if place.output is None}
    found: dict[str, set[str]] = {}
    for place in lens.atlas.places:
        node = lens.graph[place.node]
        if place.output is not None:
            found[place.label] = {place.node} & layers
        else:
            found[place.label] = {ref.node for ref in node.refs} & layers if isinstance(node, Call) else set()
    return found


def _reversed(reads: Reads) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {label: set() for label in reads}
    for label, others in reads.items():
        for other in others:
            found[other].add(label)
    return found


def _steps(starts: list[str], reads: Reads) -> Mapping[str, Span]:
    """By layer that a start leads to: the least steps, and the most."""
    readers = _reversed(reads)
    least = dict.fromkeys(starts, 0)
    queue = list(starts)
    for label in queue:
        for reader in readers[label]:
            if reader not in least:
                least[reader] = least[label] + 1
                queue.append(reader)
    most, ready = dict.fromkeys(starts, 0), list(starts)
    waits = {label: sum(other in least for other in reads[label]) for label in least}
    for label in ready:
        for reader in readers[label]:
            most[reader] = max(most.get(reader, 0), most[label] + 1)
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return {label: (least[label], most[label]) for label in least}


def _worded(span: Span) -> str:
    if span is None:
        return "no way"
    return f"ways of {span[0]} to {span[1]} steps"
