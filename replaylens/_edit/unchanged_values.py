"""Which values of an edited graph are those of the graph before.

In: two graphs, the second made from the first. Out: for each value that must come out the same, the old one that it is.
A node gives the same value if it is the same call on the same values, whatever their names are now.
"""

from __future__ import annotations

from collections.abc import Container

from attrs import evolve

from .._ir.graph import Graph
from .._ir.node import Call, Node, Ref, refs_of
from .._ir.runtime import alias
from .rewrite import reading, renamed


def unchanged_values(old: Graph, new: Graph, others: Container[str] = ()) -> dict[Ref, Ref]:
    """Ref in the new graph -> Ref in the old one. `others` names sources that hold another tensor now."""
    known: dict[Ref, Ref] = {}
    was = origins(old, new)
    for node in new.nodes:
        if node.name in others or not all(ref in known for ref in (*node.refs, *_drawn_before(new, node))):
            continue
        if node.name not in was:
            if isinstance(node, Call) and node.target.function is alias:
                known[Ref(node.name)] = known[node.refs[0]]
            continue
        origin = was[node.name]
        before = old[origin]
        if _gives_the_same(node, before, known):
            as_before = refs_of(renamed(node, origin))
            known.update(zip(refs_of(node), as_before, strict=True))
    return known


def origins(old: Graph, new: Graph) -> dict[str, str]:
    """For each node of the new graph its name in the old one, if it was there, in the new order.

    A patch takes the name of the node that it patches, which lives on under the name in the patch's `edits`.
    """
    now = {call.edits: call.name for call in new.calls if call.edits is not None and call.edits not in old}
    found: dict[str, str] = {}
    for node in new.nodes:
        name = node.name
        while name in now:
            name = now[name]
        if name in old:
            found[node.name] = name
    return found


def _drawn_before(graph: Graph, node: Node) -> tuple[Ref, ...]:
    """The values of the draw that may shift this one."""
    before = graph.shifts.get(graph.positions[node.name]) if graph.shifts else None
    return refs_of(graph.nodes[before]) if before is not None else ()


def _gives_the_same(node: Node, before: Node, known: dict[Ref, Ref]) -> bool:
    if node is before:
        return all(known[ref] == ref for ref in node.refs)
    again = reading(renamed(node, before.name), known)
    if isinstance(again, Call) and isinstance(before, Call):
        again = evolve(again, edited=before.edited, edits=before.edits)
    try:
        return bool(again == before)
    except Exception:  # an argument of a user's class, whose comparison fails
        return False
