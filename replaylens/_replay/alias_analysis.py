"""Which views are no longer views: what a patch or an edit has parted from the memory that it lay in.

In: a Graph and the values that are changed. Out: for each call that writes through views, those that are tensors of
their own by now, as the one that a hook gives back: a write goes to them, not to the memory. No tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Iterable

from .._ir.graph import Graph
from .._ir.node import Call, Ref, refs_in, refs_of
from .._ir.trees import leaves
from .._ir.write import Write, unpacked

Influences = dict[Ref, frozenset[Ref]]  # for a value the changed ones that it is made from; none where it is missing
NONE: frozenset[Ref] = frozenset()


def detached_views(graph: Graph, changed: Iterable[Ref]) -> dict[str, frozenset[Ref]]:
    """By the name of the call that writes: the views that a change has reached which has not reached their memory."""
    changed = graph.edited_refs.union(changed)
    if not changed or not writes_views(graph):
        return {}
    found: dict[str, frozenset[Ref]] = {}
    influences: Influences = {}
    for node in graph.nodes[min(graph.positions[ref.node] for ref in changed) :]:
        if isinstance(node, Write):
            views = _write(node, influences)
            if views:
                found[node.name] = views
        elif isinstance(node, Call) and (above := _union(influences, node.refs)):
            influences.update(dict.fromkeys(refs_of(node), above))
        for ref in refs_of(node):
            if ref in changed:
                influences[ref] = influences.get(ref, NONE) | {ref}
    return found


def writes_views(graph: Graph) -> bool:
    """Does the model write through views at all?"""
    writes = [call for call in graph.calls if isinstance(call, Write)]
    return any(type(value) is Ref for write in writes for value in write.arguments.values)


def _union(influences: Influences, refs: Iterable[Ref]) -> frozenset[Ref]:
    return NONE.union(*[influences.get(ref, NONE) for ref in refs])


def _write(call: Write, influences: Influences) -> frozenset[Ref]:
    """What a write through views leaves of changes, where; and the views that are parted from their memory."""
    arguments, values = call.arguments, call.arguments.values
    written, memory = call.gives.targets, call.gives.bases
    above = [influences.get(base, NONE) for base in arguments.bases]
    numbers = [unpacked(target).base for target in arguments.targets]
    own = [influences.get(v, NONE) if type(v) is Ref else above[n] for v, n in zip(values, numbers, strict=True)]
    apart = [bool(one - above[number]) for one, number in zip(own, numbers, strict=True)]
    own = [one if is_apart else above[n] for one, is_apart, n in zip(own, apart, numbers, strict=True)]
    given = _union(influences, refs_in((arguments.args, arguments.kwargs)))
    given = given.union(*own[len(written) :])  # views that it only reads
    for number, ref in enumerate(memory):
        is_written = any(n == number and not a for n, a in zip(numbers[: len(written)], apart, strict=False))
        influences[ref] = above[number] | given if is_written else above[number]
    for ref, one in zip(written, own, strict=False):
        influences[ref] = influences.get(ref, NONE) | one | given if ref in memory else one | given
    for leaf in leaves(call.gives.result):
        if type(leaf) is Ref and leaf not in written and leaf not in memory:
            influences[leaf] = given.union(*own)
    return frozenset([v for v, is_apart in zip(values, apart, strict=True) if is_apart and type(v) is Ref])
