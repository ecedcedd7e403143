"""The moves that every edit consists of (replace nodes, read another value, remove, splice, prune), and which
values an edit leaves alone.

In: a lawful Graph and a change. Out: a lawful Graph. Nodes that an edit does not touch keep their names, guards keep
their places, and calls that run others again (a gradient inside the forward) run what is now in their place. No tensor
is touched here: specs of changed nodes are updated when the edited graph runs. A node gives the same value before and
after an edit if it is the same call on the same values, whatever their names are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from .._ir.graph import Graph, InnerGradient
from .._ir.label import Label, unused_name
from .._ir.node import (
    Call,
    Const,
    Generator,
    Guard,
    Input,
    Node,
    Ref,
    State,
    TensorSpec,
    refs_in,
    refs_of,
    specs_of,
    value_of,
    with_leaves,
)
from .._ir.runtime import alias, gathered
from .._ir.target import Target
from .._ir.trees import Branch, keyed_items, leaves, map_leaves, walk
from .._ir.validate import require_lawful
from ..errors import ReplaylensError

Refs = Mapping[Ref, Ref]
NO_REFS: Mapping[Any, Any] = MappingProxyType({})


# -- names and values of nodes -----------------------------------------------------------------------------------------


def renamed(node: Node, name: str) -> Node:
    """The same node under another name."""
    if not isinstance(node, Call):
        return evolve(node, name=name)
    own = lambda leaf: evolve(leaf, node=name) if type(leaf) is Ref and leaf.node == node.name else leaf  # noqa: E731
    return evolve(node, name=name, returns=map_leaves(node.returns, own), result=map_leaves(node.result, own))


def reading(node: Node, refs: Refs) -> Node:
    """The same node, reading other values; the node itself if it reads none of these."""
    if not isinstance(node, Call) or not any(ref in refs for ref in node.refs):
        return node
    return with_leaves(node, _swap(refs))


def _swap(refs: Refs) -> Any:
    return lambda leaf: refs.get(leaf, leaf) if type(leaf) is Ref else leaf


# -- the moves ---------------------------------------------------------------------------------------------------------


def replace(graph: Graph, instead: Mapping[str, Sequence[Node]], refs: Refs = NO_REFS, **changes: Any) -> Graph:
    """Put other nodes in the place of some: for each name, the nodes that take its place, in order.

    All other nodes, guards and outputs read through `refs`. `changes` are other fields of the graph, taken as they are.
    """
    nodes: list[Node] = []
    places = [0]
    for node in graph.nodes:
        nodes.extend(instead[node.name] if node.name in instead else (reading(node, refs),))
        places.append(len(nodes))
    guards, asked = ([_moved_guard(guard, places, refs) for guard in many] for many in (graph.guards, graph.asked))
    fields: dict[str, Any] = {"guards": tuple(guards), "asked": tuple(asked)}
    if graph.written.intersection(refs):
        fields["written"] = frozenset([refs.get(ref, ref) for ref in graph.written])
    if refs:
        swap = _swap(refs)
        fields["output"] = map_leaves(graph.output, swap)
        fields["module_outputs"] = tuple([(scope, map_leaves(tree, swap)) for scope, tree in graph.module_outputs])
        fields["changes"] = tuple([(address, refs.get(ref, ref)) for address, ref in graph.changes])
    return require_lawful(recompute_region(graph, evolve(graph, **{"nodes": tuple(nodes), **fields, **changes}), refs))


def _moved_guard(guard: Guard, places: Sequence[int], refs: Refs) -> Guard:
    guard, position = guard_reading(guard, refs), places[guard.position]
    return evolve(guard, position=position) if position != guard.position else guard


def guard_reading(guard: Guard, refs: Refs) -> Guard:
    """The same guard, reading other values."""
    return with_leaves(guard, _swap(refs)) if any(ref in refs for ref in guard.refs) else guard


def insert_after(graph: Graph, name: str, nodes: Sequence[Node], refs: Refs = NO_REFS) -> Graph:
    """Insert nodes behind one. Everything else reads through `refs`; the node and the new ones read as they are."""
    return replace(graph, {name: (graph[name], *nodes)}, refs)


def rewire(graph: Graph, readers: Iterable[str], refs: Refs) -> Graph:
    """Let some nodes, or the program's "output", read other values; everything else reads what it read."""
    names = set(readers)
    instead = {name: (reading(graph[name], refs),) for name in names if name != "output"}
    return replace(graph, instead, output=map_leaves(graph.output, _swap(refs)) if "output" in names else graph.output)


def remove(graph: Graph, name: str, refs: Refs) -> Graph:
    """Remove a node; `refs` says what is read in the place of each of its values."""
    return replace(graph, {name: ()}, refs)


def prune(graph: Graph, keep: Iterable[str] = ()) -> Graph:
    """Remove what no output, guard or write to state needs and `keep` does not name. Inputs stay."""
    ends = [
        ref.node
        for ref in (*graph.wanted_refs, *(ref for guard in (*graph.guards, *graph.asked) for ref in guard.refs))
    ]
    needed = set(graph.ancestors([*ends, *keep]))
    for call in reversed(graph.calls):  # a node that is run again elsewhere keeps its place here: patches find it there
        if call.name in needed and call.through:
            needed |= graph.ancestors(call.through)
    return without(graph, {n.name for n in graph.nodes if n.name not in needed and not isinstance(n, Input)})


def without(graph: Graph, names: Iterable[str]) -> Graph:
    """Remove nodes that nothing reads any more, and what was known of them alone."""
    gone = frozenset(names)
    if not gone:
        return graph
    outputs = tuple([(scope, tree) for scope, tree in graph.module_outputs if not gone & _nodes_in(tree)])
    return replace(graph, dict.fromkeys(gone, ()), module_outputs=outputs, orphans=graph.orphans - gone)


def _nodes_in(tree: Any) -> set[str]:
    return {leaf.node for leaf in refs_in(tree)}


def unread_sources(old: Graph, new: Graph) -> frozenset[str]:
    """State and constants that something read before an edit, and nothing reads after it."""
    read = {ref.node for refs in new.refs for ref in refs} | {ref.node for ref in new.wanted_refs}
    read.update(ref.node for guard in (*new.guards, *new.asked) for ref in guard.refs)
    before = {old.nodes[p].name for p, users in enumerate(old.users) if users}
    sources: tuple[State | Const, ...] = (*new.state_nodes, *new.const_nodes)
    return frozenset([node.name for node in sources if node.name not in read and node.name in before])


# -- a graph in the place of a node ------------------------------------------------------------------------------------


@frozen
class Splice:
    """How a graph takes the place of a node.

    `given` is what its inputs stand for: by default the tensors that the node reads, each once. `shared` are values
    that the program already has: their nodes do not come along. `names` are the names of some of the new nodes, `draws`
    other keys for generator states.
    """

    given: tuple[Ref, ...] | None = None
    shared: Mapping[Ref, Ref] = NO_REFS
    names: Mapping[str, str] = NO_REFS
    draws: Mapping[str, str] = NO_REFS
    edited: str = ""


def splice(graph: Graph, name: str, sub: Graph, how: Splice = Splice()) -> Graph:
    """The calls of a graph in the place of one node.

    The output of `sub` is the node's value: a tensor for a tensor; for a node of several values a tree of the same
    shape. New nodes are called `matmul_1_of_{name}` and have the node's scope and source. The last one carries its name
    if it gives its value; else one more does, which gathers the parts. State and constants of `sub` come along.
    """
    return splice_all(graph, {name: (sub, how)})


def splice_all(graph: Graph, subs: Mapping[str, tuple[Graph, Splice]]) -> Graph:
    """Graphs in the places of several nodes, in one move. Their new names must be distinct."""
    instead: dict[str, Sequence[Node]] = {}
    guards: list[tuple[str, Guard]] = []  # with the first of the new nodes, from which they are counted
    moved: dict[str, Sequence[Node]] = {}
    for name, (sub, how) in subs.items():
        node = graph[name]
        assert isinstance(node, Call)
        called, swap = spliced_names(graph, name, sub, how), spliced_leaf(graph, name, sub, how)
        nodes = [_spliced_node(inner, node, called, swap, how) for inner in sub.nodes if inner.name in called]
        if name not in called.values():
            nodes.append(_gather(node, sub, swap, how.edited))
        reads = [ref for new in nodes if isinstance(new, Call) for ref in new.refs]
        late = [source for source in _sources_behind(graph, name, reads) if source.name not in moved]
        moved.update({source.name: () for source in late})
        instead[name] = (*late, *nodes)
        guards += [(nodes[0].name, _spliced_guard(guard, sub, called, nodes, swap)) for guard in sub.guards]
    made = replace(graph, {**instead, **moved})
    placed = [evolve(guard, position=guard.position + made.positions[first]) for first, guard in guards]
    return require_lawful(
        evolve(
            made,
            guards=tuple(sorted((*made.guards, *placed), key=lambda guard: guard.position)),
            forward_only=(*made.forward_only, *[word for sub, _ in subs.values() for word in sub.forward_only]),
        )
    )


def _sources_behind(graph: Graph, name: str, reads: Iterable[Ref]) -> list[Node]:
    """State and constants that stand behind a node that now reads them."""
    behind = dict.fromkeys(ref.node for ref in reads if graph.positions.get(ref.node, -1) > graph.positions[name])
    return [graph[other] for other in behind]


def spliced_names(graph: Graph, name: str, sub: Graph, how: Splice = Splice()) -> dict[str, str]:
    """The name of each node of `sub` that comes along, when it is spliced in the place of a node."""
    taken, last = set(graph.positions), _last(graph[name], sub)
    found: dict[str, str] = {}
    for node in sub.nodes:
        if isinstance(node, Input) or Ref(node.name) in how.shared:
            continue
        if node.name == last:
            found[node.name] = name
        elif node.name in how.names:
            found[node.name] = how.names[node.name]
        else:
            found[node.name] = unused_name(f"{Label.of(node.name).short}_of_{name}", taken)
        taken.add(found[node.name])
    return found


def spliced_leaf(graph: Graph, name: str, sub: Graph, how: Splice = Splice()) -> Callable[[Any], Any]:
    """A function from a Ref or generator of `sub` to that of the program."""
    node = graph[name]
    assert isinstance(node, Call)
    given = tuple(dict.fromkeys(node.refs)) if how.given is None else how.given
    if len(given) != len(sub.input_nodes):
        raise ValueError(f"{node.name} gives {len(given)} tensors to a graph of {len(sub.input_nodes)} inputs.")
    starts = {start.name: ref for start, ref in zip(sub.input_nodes, given, strict=True)}
    called = spliced_names(graph, node.name, sub, how)

    def swap(leaf: Any) -> Any:
        if type(leaf) is Ref:
            known = starts.get(leaf.node) or how.shared.get(leaf)
            return evolve(leaf, node=called[leaf.node]) if known is None else known
        return Generator(how.draws.get(leaf.key, leaf.key)) if type(leaf) is Generator else leaf

    return swap


def _spliced_node(inner: Node, node: Call, called: Mapping[str, str], swap: Callable[[Any], Any], how: Splice) -> Node:
    """A node of `sub` as it is in the program."""
    if not isinstance(inner, Call):
        return renamed(inner, called[inner.name])
    return with_leaves(
        inner,
        swap,
        name=called[inner.name],
        returns=map_leaves(inner.returns, swap),
        result=map_leaves(inner.result, swap),
        through=tuple([called[name] for name in inner.through]),
        draws=how.draws.get(inner.draws, inner.draws) if inner.draws is not None else None,
        follows=_draw_before(inner, node, how),
        is_seeded=node.is_seeded if node.draws is not None else inner.is_seeded,
        scope=node.scope,
        source=node.source,
        edited=how.edited if called[inner.name] == node.name else inner.edited,
    )


def _draw_before(inner: Call, node: Call, how: Splice) -> str | None:
    """The draw before one of `sub`. Its first draw follows what the node's own did, or starts a stream of its own."""
    if inner.draws is None:
        return None
    if inner.follows is not None:
        return how.draws.get(inner.follows, inner.follows)
    return node.follows if node.draws is not None else f"start_of_{node.name}"


def _gather(node: Call, sub: Graph, swap: Callable[[Any], Any], edited: str) -> Call:
    """The node that gives the output of `sub` where none of its calls does."""
    parts = refs_in(sub.output)
    known = {ref: meaning for inner in sub.nodes for ref, meaning in specs_of(inner).items()}
    output, meaning = map_leaves(sub.output, swap), tuple([known[ref] for ref in parts])
    call = Call(
        node.name, "alias", Target.of(alias), (output,), returns=Ref(node.name), spec=meaning, context=node.context,
        scope=node.scope, source=node.source, edited=edited,
    )  # fmt: skip
    wanted = value_of(node)
    if type(output) is Ref and type(wanted) is Ref:
        return call
    several = output.items if isinstance(output, Branch) else output
    if (
        type(wanted) is not tuple
        or type(several) is not tuple
        or [p for p, _ in walk(wanted, keyed_items)] != [p for p, _ in walk(several, keyed_items)]
    ):
        raise ValueError(f"{node.name} gives {len(list(leaves(wanted)))} tensors, the graph in its place {len(parts)}.")
    return evolve(call, kind="gathered", target=Target.of(gathered), args=several, returns=wanted)


def _last(node: Node, sub: Graph) -> str | None:
    """The call of a graph that gives its output as it is, in the shape of what a node gives."""
    first = next(iter(refs_in(sub.output)), None)
    call = sub[first.node] if first is not None else None
    if not isinstance(call, Call) or value_of(call) != sub.output:
        return None
    return call.name if value_of(renamed(call, node.name)) == value_of(node) else None


def _spliced_guard(
    guard: Guard, sub: Graph, called: Mapping[str, str], nodes: Sequence[Node], swap: Callable[[Any], Any]
) -> Guard:
    """A guard of a spliced graph: behind the last of the new nodes that came before it."""
    before = {called[node.name] for node in sub.nodes[: guard.position] if node.name in called}
    position = max((number + 1 for number, node in enumerate(nodes) if node.name in before), default=0)
    return with_leaves(guard, swap, position=position)


def recompute_region(old: Graph, new: Graph, refs: Mapping[Ref, Ref]) -> Graph:
    """The new graph with its calls that run others again updated. `refs`: values replaced by others everywhere."""
    fixed = {
        call.name: _with_stretch(old, new, call, refs)
        for call in new.inner_gradients
        if call.name in old and _has_changed(old, new, call, refs)
    }
    if not fixed:
        return new
    return evolve(new, nodes=tuple([fixed.get(node.name, node) for node in new.nodes]))


def _has_changed(old: Graph, new: Graph, call: InnerGradient, refs: Mapping[Ref, Ref]) -> bool:
    others = any(ref.node in call.through for ref in refs)
    return others or call is not old[call.name] or any(n not in new or new[n] is not old[n] for n in call.through)


def _with_stretch(old: Graph, new: Graph, call: InnerGradient, refs: Mapping[Ref, Ref]) -> Call:
    given = call.arguments
    stretch, roots, states = given.stretch, given.starts, given.states
    outer = _outward(call, refs)
    members = _members(old, new, call, {leaf.node for leaf in leaves(map_leaves(stretch.output[0], outer))}, roots)
    names = {member.name for member in members}
    if missing := [m.name for m in members if m.draws is not None and m.draws not in (states.keys or ())]:
        raise ReplaylensError(
            f"{missing[0]} would draw random numbers inside a gradient that the model takes ({call.name}); that cannot "
            "be taken again."
        )
    reads = [ref for member in members for ref in member.refs]
    reads += refs_in(map_leaves(stretch.output, outer))
    further = tuple(dict.fromkeys(ref for ref in reads if ref.node not in names and ref not in roots))
    made = _stretch_of(new, stretch, (*roots, *further), members, outer)
    there = map_leaves(stretch.output, outer) if given.keep_graph else ()
    args = given._replace(stretch=made, others=further, there=there)
    return evolve(call, args=tuple(args), through=tuple([m.name for m in members]))


def _outward(call: InnerGradient, refs: Mapping[Ref, Ref]) -> Any:
    """A function from a Ref inside the stretch to that of the program."""
    stretch, reads = call.arguments.stretch, (*call.arguments.starts, *call.arguments.others)
    given = {node.name: ref for node, ref in zip(stretch.input_nodes, reads, strict=True)}
    called = {inner.name: name for inner, name in zip(stretch.calls, call.through, strict=True)}

    def outer(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf
        found = given[leaf.node] if leaf.node in given else evolve(leaf, node=called[leaf.node])
        return refs.get(found, found)

    return outer


def _members(old: Graph, new: Graph, call: InnerGradient, ends: Iterable[str], roots: Iterable[Ref]) -> list[Call]:
    """The calls of the stretch: those that were in it, and new ones on a path from its start to its ends."""
    stay = {name for name in call.through if name in new}
    below = new.descendants([*stay, *(ref.node for ref in roots)])
    above = new.ancestors(ends)
    here = new.calls[: new.calls.index(call)] if call in new.calls else new.calls
    return [c for c in here if c.name in stay or (c.name not in old and c.name in below and c.name in above)]


def _stretch_of(new: Graph, stretch: Graph, reads: tuple[Ref, ...], members: list[Call], outer: Any) -> Graph:
    inside: dict[Ref, Ref] = {ref: Ref(f"value_{number}") for number, ref in enumerate(reads)}
    called = {member.name: f"call_{number}" for number, member in enumerate(members)}

    def inner(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf
        return inside[leaf] if leaf in inside else evolve(leaf, node=called[leaf.node])

    nodes: list[Node] = [Input(inside[ref].node, (n,), _spec_of(new, ref)) for n, ref in enumerate(reads)]
    for member in members:
        nodes.append(
            with_leaves(
                member,
                inner,
                name=called[member.name],
                returns=map_leaves(member.returns, inner),
                result=None,
                scope=None,
                source=None,
            )
        )
    output = map_leaves(map_leaves(stretch.output, outer), inner)
    return evolve(stretch, nodes=tuple(nodes), output=output)


def _spec_of(graph: Graph, ref: Ref) -> TensorSpec:
    node = graph[ref.node]
    if not isinstance(node, Call):
        return node.spec
    refs = refs_in(node.returns)
    return node.spec[refs.index(ref)]


def unchanged_values(old: Graph, new: Graph, others: Container[str] = ()) -> dict[Ref, Ref]:
    """Ref in the new graph -> Ref in the old one. `others` names sources that hold another tensor now."""
    known: dict[Ref, Ref] = {}
    was = old_names(old, new)
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


def old_names(old: Graph, new: Graph) -> dict[str, str]:
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
