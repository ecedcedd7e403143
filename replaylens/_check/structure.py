"""Is the graph well formed, and do names, passes, module calls and distances agree with one another?

In: a graph; what its layers share. Out: two laws. Everything is worked out anew here, in the simplest way, so that a
fault in how it was worked out before is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .._core.graph import Graph
from .._core.laws import problems, unasked
from .._core.node import Call, Input, Node, Ref, Scope, State, refs_in, refs_of
from .._lens.layers import Atlas, Place, short
from .._lens.lens import Lens
from .distances import distances
from .findings import found_at, found_named
from .report import Finding, Law

GRAPH, METADATA = "graph", "metadata"


def graph_law(graph: Graph, as_captured: bool) -> Law:
    """What every graph obeys."""
    found = [found_named(graph, GRAPH, problem.node, problem.fact) for problem in (*problems(graph), *unasked(graph))]
    if not found:
        found = [*_dangling(graph), *_meanings(graph), *_state(graph), *(_orphans(graph) if as_captured else ())]
    return Law(GRAPH, len(graph), tuple(found), unit="nodes", holds="well formed")


def _dangling(graph: Graph) -> Iterator[Finding]:
    """Everything beside the nodes speaks of values that nodes give."""
    given = {ref for node in graph.nodes for ref in (*refs_of(node), Ref(node.name))}
    places: list[tuple[str, Any]] = [("the inputs", graph.inputs), ("the output", graph.output)]
    places += [(f"the output of module {scope}", tree) for scope, tree in graph.module_outputs]
    places += [(f"the new value of `{address}`", ref) for address, ref in graph.changes]
    for what, tree in places:
        for ref in refs_in(tree):
            if ref not in given:
                yield Finding(GRAPH, ref.node, f"{what} is {ref}, which no node gives")
    for name in sorted(graph.orphans - graph.positions.keys()):
        yield Finding(GRAPH, name, "is set aside as an orphan, and is no node")
    for ref in dict.fromkeys(refs_in(graph.inputs)):
        if ref in given and not isinstance(graph[ref.node], Input):
            yield found_at(graph, GRAPH, graph[ref.node], "stands among the inputs, and is none")


def _meanings(graph: Graph) -> Iterator[Finding]:
    """Each tensor that a call gives has its shape and type, and what the model saw of it is among what it gives."""
    for call in graph.calls:
        count = len(refs_in(call.returns))
        if count != len(call.meaning):
            yield found_at(graph, GRAPH, call, f"gives {count} tensors, and says of {len(call.meaning)} what they are")
        for ref in (*refs_in(call.returns), *refs_in(call.result)):
            if ref.node != call.name:
                yield found_at(graph, GRAPH, call, f"gives {ref}, which is another node's")


def _state(graph: Graph) -> Iterator[Finding]:
    seen: Counter[str] = Counter(name for node in graph.state_nodes for name in (node.address, *node.aliases))
    for address, count in seen.items():
        if count > 1:
            yield Finding(GRAPH, address, f"{count} nodes are the state at `{address}`")


def _orphans(graph: Graph) -> Iterator[Finding]:
    """Set aside is just what neither comes from an input nor reaches an output."""
    below = graph.descendants([node.name for node in graph.input_nodes])
    above = graph.ancestors([ref.node for ref in graph.wanted_refs])
    for node in graph.nodes:
        if node.name in graph.orphans and node.name in above:
            yield found_at(graph, GRAPH, node, "is set aside as an orphan, and reaches an output")
        if node.name in graph.orphans and node.name in below and isinstance(node, Call):
            yield found_at(graph, GRAPH, node, "is set aside as an orphan, and comes from an input")
        if isinstance(node, Call) and node.name not in graph.orphans | above | below:
            yield found_at(graph, GRAPH, node, "comes from no input and reaches no output, and is not set aside")


def metadata_law(lens: Lens, as_captured: bool) -> Law:
    """Labels, passes, module calls, lookups and distances agree."""
    atlas, graph = lens.atlas, lens.graph
    found = [*_modules(graph, as_captured), *_passes(graph, as_captured), *_neighbours(atlas), *_lookups(atlas)]
    found += distances(lens, METADATA)
    if as_captured:
        found += _numbers(graph)
    calls = len(graph.module_outputs)
    unit = f"layers, {calls:,} module calls"
    return Law(METADATA, len(atlas.order), tuple(found), unit=unit, holds="labels, passes, modules, distances agree")


def _numbers(graph: Graph) -> Iterator[Finding]:
    """Labels count layers in execution order, and those of each type."""
    total = -1 if graph.input_nodes else 0
    of_kind: Counter[str] = Counter()
    bases: set[str] = set()
    for node in graph.nodes:
        if not _is_numbered(graph, node):
            continue
        label, _, number = node.name.partition(":")
        if label in bases:
            continue
        if number not in ("", "1"):
            yield found_at(graph, METADATA, node, "is the first of its layer to run, and is not called its first pass")
        bases.add(label)
        kind = "input" if isinstance(node, Input) else label.rsplit("_", 2)[0]
        if isinstance(node, Call) and node.kind != kind:
            yield found_at(graph, METADATA, node, f"is called {label}, and its type is {node.kind}")
        total, of_kind[kind] = total + 1, of_kind[kind] + 1
        wanted = f"{kind}_{of_kind[kind]}_{total}"
        if label.rstrip("'") != wanted:
            yield found_at(graph, METADATA, node, f"is called {label}, and its place is that of {wanted}")
            return  # all that follow are off by the same


def _is_numbered(graph: Graph, node: Node) -> bool:
    is_parameter = isinstance(node, State) and node.kind == "parameter"
    return node.name not in graph.orphans and not is_parameter


def _passes(graph: Graph, as_captured: bool) -> Iterator[Finding]:
    """Passes of a layer are numbered 1, 2, 3 in order, and are one function on the same parameters."""
    passes: dict[str, list[Call]] = {}
    for call in graph.calls:
        label, colon, number = call.name.partition(":")
        if colon and number.rstrip("'").isdigit() and call.edits is None:
            passes.setdefault(label, []).append(call)
    for label, calls in passes.items():
        numbers = [int(call.name.partition(":")[2].rstrip("'")) for call in calls]
        wanted = list(range(1, len(calls) + 1)) if as_captured else sorted(set(numbers))
        if numbers != wanted:
            wrong = next(call for call, one, other in zip(calls, numbers, [*wanted, 0], strict=False) if one != other)
            yield found_at(graph, METADATA, wrong, f"the passes of {label} are numbered {numbers}")
        kinds = {(call.target, _parameters(graph, call)) for call in calls if not call.edited}
        if len(kinds) > 1:
            yield found_at(graph, METADATA, calls[-1], f"is a pass of {label}, and not the same call as the others")


def _parameters(graph: Graph, call: Call) -> frozenset[str]:
    states = [graph[ref.node] for ref in call.refs]
    return frozenset([node.name for node in states if isinstance(node, State) and node.kind == "parameter"])


def _modules(graph: Graph, as_captured: bool) -> Iterator[Finding]:
    """Module calls are numbered in order, nest as calls do, and give what was computed in them or handed on."""
    calls: dict[str, int] = {}
    entered: dict[Scope, None] = {}
    last: tuple[Scope, ...] = ()
    left: set[Scope] = set()
    for node in graph.calls:
        if node.scope is None:  # of no module, or a view that is made anew after a write, wherever that was
            continue
        stack = node.scope.stack
        if back := [scope for scope in stack if scope in left]:
            if as_captured and _has_address(back[0]):
                yield found_at(graph, METADATA, node, f"lies in module call {back[0]}, which had ended before")
            continue
        left.update(scope for scope in last if scope not in stack)
        entered.update(dict.fromkeys(stack))
        last = stack
    for scope in sorted({*entered, *(scope for scope, _ in graph.module_outputs)}, key=lambda scope: scope.call):
        wanted = calls.get(scope.address, 0) + 1
        if as_captured and scope.call > wanted and _has_address(scope):
            where = f"module call {scope} is recorded, and call {wanted} is not"
            yield Finding(METADATA, str(scope), where, scope.source)
        calls[scope.address] = max(scope.call, wanted)
    if as_captured:
        yield from _given_by_modules(graph)


def _has_address(scope: Scope) -> bool:
    """Does the module hang on the model? Others of a class have one name among them."""
    return not scope.address.startswith("<")


def _given_by_modules(graph: Graph) -> Iterator[Finding]:
    seen: set[Scope] = set()
    for scope, tree in graph.module_outputs:
        if scope in seen and _has_address(scope):
            yield Finding(METADATA, str(scope), "two outputs are recorded for one call of this module", scope.source)
        seen.add(scope)
        for ref in refs_in(tree):
            node = graph[ref.node]
            inside = isinstance(node, Call) and node.scope is not None and scope in node.scope.stack
            if isinstance(node, Call) and not inside and _begins_after(graph, scope, ref.node) is False:
                fact = f"is the output of module call {scope}, and neither ran in it nor before it"
                yield found_at(graph, METADATA, node, fact)


def _begins_after(graph: Graph, scope: Scope, name: str) -> bool | None:
    """Did a module call begin after a node had run? None where the call has no node of its own to tell by."""
    inside = [
        p
        for p, node in enumerate(graph.nodes)
        if isinstance(node, Call) and node.scope is not None and scope in node.scope.stack
    ]
    return min(inside) > graph.positions[name] if inside else None


def _neighbours(atlas: Atlas) -> Iterator[Finding]:
    """Who reads whom is the same from both sides, and what the graph says."""
    graph = atlas.graph
    children = {place.label: atlas.children(place) for place in atlas.places}
    parents = {place.label: atlas.parents(place) for place in atlas.places}
    for label, names in parents.items():
        for name in names:
            if name in children and label not in children[name]:
                yield found_named(graph, METADATA, name, f"{label} has it as a parent, and is no child of it")
    for label, names in children.items():
        for name in names:
            if name in parents and label not in parents[name]:
                yield found_named(graph, METADATA, name, f"{label} has it as a child, and is no parent of it")


def _lookups(atlas: Atlas) -> Iterator[Finding]:
    """Every layer is found by its label and by its ordinal, and by its short label where that is its own."""
    shorts = Counter(short(label) for label in atlas.order)
    for number, place in enumerate(atlas.places):
        names: list[Any] = [place.label, number, number - len(atlas.places)]
        names += [short(place.label)] if shorts[short(place.label)] == 1 else []
        for name in names:
            if not _finds(atlas, name, place):
                yield found_named(atlas.graph, METADATA, place.node, f"{name!r} does not lead to {place.label}")


def _finds(atlas: Atlas, name: Any, place: Place) -> bool:
    try:
        found = atlas.find(name)
    except LookupError:
        return False
    return found.label == place.label or name in atlas.module_places or name in atlas.by_label
