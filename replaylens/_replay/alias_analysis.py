"""Alias analysis: which views a patch or an edit has detached from their base, so that a later write in place goes to
the view alone.

In: a Graph and the values that are changed. Out: for each Write, the views among its operands that no longer alias
their base. No tensor is touched.

The analysis tracks, for each value, the changed values that it depends on. A view and its base agree on these as long
as they share memory; a view that depends on a change its base has not seen is a tensor of its own.

    x = relu(h)           # changed: {x}      x: {x}
    v = x[:, 0]           #                   v: {x}       from x, as x itself
    v.mul_(2)             # Write, base x     {x} - {x} = {}: v still aliases x, the write goes to x

    x = relu(h)           # changed: {v}      x: {}
    v = x[:, 0]           #                   v: {v}       replaced by the patch
    v.mul_(2)             # Write, base x     {v} - {} = {v}: v is detached, x keeps its old content

In the model, too, a forward hook that returns another tensor for `v` makes `v.mul_` write that tensor and not `x`.
"""

from __future__ import annotations

from collections.abc import Iterable

from .._ir.graph import Graph
from .._ir.node import Call, Ref, refs_in, refs_of
from .._ir.trees import leaves
from .._ir.write import Write, unpacked_place

Influences = dict[Ref, frozenset[Ref]]  # for a value the changed ones that it is made from; none where it is missing
NO_REFS: frozenset[Ref] = frozenset()


def detached_views(graph: Graph, changed: Iterable[Ref]) -> dict[str, frozenset[Ref]]:
    """By the name of each Write, the views that depend on a change their base does not depend on."""
    changed = graph.edited_refs.union(changed)
    if not changed or not writes_views(graph):
        return {}
    found: dict[str, frozenset[Ref]] = {}
    influences: Influences = {}
    for node in graph.nodes[min(graph.positions[ref.node] for ref in changed) :]:
        if isinstance(node, Write):
            views = _follow_write(node, influences)
            if views:
                found[node.name] = views
        elif isinstance(node, Call) and (dependencies := _union(influences, node.refs)):
            influences.update(dict.fromkeys(refs_of(node), dependencies))
        for ref in refs_of(node):
            if ref in changed:
                influences[ref] = influences.get(ref, NO_REFS) | {ref}
    return found


def writes_views(graph: Graph) -> bool:
    """True if the model writes through a view anywhere."""
    writes = [call for call in graph.calls if isinstance(call, Write)]
    return any(type(value) is Ref for write in writes for value in write.arguments.values)


def _union(influences: Influences, refs: Iterable[Ref]) -> frozenset[Ref]:
    return NO_REFS.union(*[influences.get(ref, NO_REFS) for ref in refs])


def _follow_write(call: Write, influences: Influences) -> frozenset[Ref]:
    """Propagates dependencies through a write, and returns its views that are detached from their base.

    A base that is written through a view that still aliases it depends on everything that is written; a base whose
    views are all detached stays as it was. A detached view takes its own dependencies instead of its base's.
    """
    arguments, values = call.arguments, call.arguments.values
    written, memory = call.gives.targets, call.gives.bases
    from_bases = [influences.get(base, NO_REFS) for base in arguments.bases]
    numbers = [unpacked_place(target).base for target in arguments.targets]
    from_values = [
        influences.get(v, NO_REFS) if type(v) is Ref else from_bases[n] for v, n in zip(values, numbers, strict=True)
    ]
    is_detached = [bool(one - from_bases[number]) for one, number in zip(from_values, numbers, strict=True)]
    from_values = [
        one if detached else from_bases[n] for one, detached, n in zip(from_values, is_detached, numbers, strict=True)
    ]
    from_arguments = _union(influences, refs_in((arguments.args, arguments.kwargs)))
    from_arguments = from_arguments.union(*from_values[len(written) :])  # views that it only reads
    for number, ref in enumerate(memory):
        is_written = any(n == number and not a for n, a in zip(numbers[: len(written)], is_detached, strict=False))
        influences[ref] = from_bases[number] | from_arguments if is_written else from_bases[number]
    for ref, one in zip(written, from_values, strict=False):
        influences[ref] = influences.get(ref, NO_REFS) | one | from_arguments if ref in memory else one | from_arguments
    for leaf in leaves(call.gives.result):
        if type(leaf) is Ref and leaf not in written and leaf not in memory:
            influences[leaf] = from_arguments.union(*from_values)
    return frozenset([v for v, detached in zip(values, is_detached, strict=True) if detached and type(v) is Ref])
