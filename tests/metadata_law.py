"""What layers are called and how far they are from inputs and outputs, worked out anew in the simplest way.

In: a program. Out: what does not agree with that: labels, passes, module calls, lookups, parents and children,
distances. The shortest ways are counted by going outwards one step at a time, the longest by taking each layer only when
all that it comes from has been taken.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from internals import (
    Call,
    Finding,
    Graph,
    Input,
    Label,
    LayerIndex,
    Location,
    Node,
    ProgramFacts,
    Ref,
    Scope,
    Span,
    State,
    finding_at,
    finding_at_name,
    leaves,
    refs_in,
)

Reads = Mapping[str, Iterable[str]]  # label -> labels


def wrong_metadata(prog: Any) -> list[Finding]:
    """Where labels, passes, module calls, lookups and distances do not agree with one another."""
    lens, as_captured = prog._facts, prog.history == ("captured",)
    atlas, graph = lens.index, lens.graph
    found = [*_modules(graph, as_captured), *_passes(graph, as_captured), *_neighbours(atlas), *_lookups(atlas)]
    return [*found, *_distances(lens), *(_numbers(graph) if as_captured else ())]


def _numbers(graph: Graph) -> Iterator[Finding]:
    """Labels count layers in execution order, and those of each type."""
    total = -1 if graph.input_nodes else 0
    of_kind: Counter[str] = Counter()
    bases: set[str] = set()
    for node in graph.nodes:
        if not _is_numbered(graph, node):
            continue
        label, turn = Label.of(node.name)
        if label in bases:
            continue
        if turn not in ("", "1"):
            yield finding_at(node, "is the first of its layer to run, and is not called its first pass")
        bases.add(label)
        kind = "input" if isinstance(node, Input) else label.rsplit("_", 2)[0]
        if isinstance(node, Call) and node.kind != kind:
            yield finding_at(node, f"is called {label}, and its type is {node.kind}")
        total, of_kind[kind] = total + 1, of_kind[kind] + 1
        wanted = f"{kind}_{of_kind[kind]}_{total}"
        if label.rstrip("'") != wanted:
            yield finding_at(node, f"is called {label}, and its place is that of {wanted}")
            return  # all that follow are off by the same


def _is_numbered(graph: Graph, node: Node) -> bool:
    is_parameter = isinstance(node, State) and node.kind == "parameter"
    return node.name not in graph.orphans and not is_parameter


def _passes(graph: Graph, as_captured: bool) -> Iterator[Finding]:
    """Passes of a layer are numbered 1, 2, 3 in order, and are one function on the same parameters."""
    passes: dict[str, list[Call]] = {}
    for call in graph.calls:
        label = Label.of(call.name)
        if label.turn and call.edits is None:
            passes.setdefault(label.layer, []).append(call)
    for layer, calls in passes.items():
        numbers = [Label.of(call.name).number for call in calls]
        wanted = list(range(1, len(calls) + 1)) if as_captured else sorted(set(numbers))
        if numbers != wanted:
            wrong = next(call for call, one, other in zip(calls, numbers, [*wanted, 0], strict=False) if one != other)
            yield finding_at(wrong, f"the passes of {layer} are numbered {numbers}")
        kinds = {(call.target, _parameters(graph, call)) for call in calls if not call.edited}
        if len(kinds) > 1:
            yield finding_at(calls[-1], f"is a pass of {layer}, and not the same call as the others")


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
                yield finding_at(node, f"lies in module call {back[0]}, which had ended before")
            continue
        left.update(scope for scope in last if scope not in stack)
        entered.update(dict.fromkeys(stack))
        last = stack
    for scope in sorted({*entered, *(scope for scope, _ in graph.module_outputs)}, key=lambda scope: scope.call):
        wanted = calls.get(scope.address, 0) + 1
        if as_captured and scope.call > wanted and _has_address(scope):
            where = f"module call {scope} is recorded, and call {wanted} is not"
            yield Finding(str(scope), where, scope.source)
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
            yield Finding(str(scope), "two outputs are recorded for one call of this module", scope.source)
        seen.add(scope)
        for ref in refs_in(tree):
            node = graph[ref.node]
            inside = isinstance(node, Call) and node.scope is not None and scope in node.scope.stack
            if isinstance(node, Call) and not inside and _begins_after(graph, scope, ref.node) is False:
                fact = f"is the output of module call {scope}, and neither ran in it nor before it"
                yield finding_at(node, fact)


def _begins_after(graph: Graph, scope: Scope, name: str) -> bool | None:
    """Did a module call begin after a node had run? None where the call has no node of its own to tell by."""
    inside = [
        p
        for p, node in enumerate(graph.nodes)
        if isinstance(node, Call) and node.scope is not None and scope in node.scope.stack
    ]
    return min(inside) > graph.positions[name] if inside else None


def _neighbours(atlas: LayerIndex) -> Iterator[Finding]:
    """Who reads whom is the same from both sides, and what the graph says."""
    graph = atlas.graph
    children = {place.label: atlas.children(place) for place in atlas.places}
    parents = {place.label: atlas.parents(place) for place in atlas.places}
    for label, names in parents.items():
        for name in names:
            if name in children and label not in children[name]:
                yield finding_at_name(graph, name, f"{label} has it as a parent, and is no child of it")
    for label, names in children.items():
        for name in names:
            if name in parents and label not in parents[name]:
                yield finding_at_name(graph, name, f"{label} has it as a child, and is no parent of it")


def _lookups(atlas: LayerIndex) -> Iterator[Finding]:
    """Every layer is found by its label and by its ordinal, and by its short label where that is its own."""
    shorts = Counter(Label.of(label).short for label in atlas.order)
    for number, place in enumerate(atlas.places):
        names: list[Any] = [place.label, number, number - len(atlas.places)]
        names += [short] if shorts[short := Label.of(place.label).short] == 1 else []
        for name in names:
            if not _finds(atlas, name, place):
                yield finding_at_name(atlas.graph, place.node, f"{name!r} does not lead to {place.label}")


def _finds(atlas: LayerIndex, name: Any, place: Location) -> bool:
    try:
        found = atlas.find(name)
    except LookupError:
        return False
    return found.label == place.label or name in atlas.module_places or name in atlas.by_label


def _refs(tree: Any) -> list[Ref]:
    return [leaf for leaf in leaves(tree) if type(leaf) is Ref]


def _distances(lens: ProgramFacts) -> Iterator[Finding]:
    """What is wrong with the distances that layers have."""
    places, kin = lens.index.places, lens.topology
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
                yield finding_at_name(lens.graph, place.label, fact)


def _reads(lens: ProgramFacts) -> dict[str, set[str]]:
    """By layer: the layers that it reads; an output reads the layer that it hands on."""
    layers = {place.node for place in lens.index.places if place.output is None}
    found: dict[str, set[str]] = {}
    for place in lens.index.places:
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
