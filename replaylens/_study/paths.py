"""path_patch: what a sender does to the output along the direct paths into some receivers, and along no other.

In: two programs of one model, a sender, receivers, what is held. Out: the run in which the receivers alone have felt
the sender. It is two kinds of replay, one after the other; how a replay runs is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import frozen

from .._edit.edges import OUTPUT, Edge
from .._edit.part import Part
from .._edit.patch import From, Patch
from .._edit.select import Selection, Where
from .._ir.graph import Graph
from .._ir.node import Call, State
from .._ir.ops import Quirk, of_kind
from .._ir.runtime import alias
from .._layers.layer import Layer
from .._replay.supply import Run
from ..errors import ReplaylensError
from ..program import Program


def path_patch(
    clean: Program,
    corrupt: Program,
    sender: Any,
    receivers: Any,
    metric: Callable[[Any], Any] | None = None,
    *,
    hold: Any = None,
    on_divergence: str = "raise",
) -> Any:
    """The clean run in which the sender's corrupt value is felt through the receivers alone: a Run, or its metric.

    First each receiver is read in the clean run with the sender's corrupt value put in, while all that is held keeps
    its clean value. Then the clean run is made again with the receivers set to what was read, all else computed anew.

    Sender and receivers are layers, or parts of layers: `("attn_3", Part("b t ([head] d)", head=3, d=64))`. An edge is
    either, too: `Edge("norm_3", "query_3")` is what query_3 reads from norm_3, and only query_3. Several are given as a
    list, or as a mapping from layer to part.

    What is held decides what a direct path is. If nothing is said, it is every residual branch between sender and
    receiver: a summand that is made from what it is added to, by way of parameters. So a path leads through sums and
    normalisations, and through no other attention or feed-forward layer than the receiver's own. `hold="*.attn"` holds
    attention alone, and lets paths lead through feed-forward layers (as in the study of indirect objects);
    `hold=[]` holds nothing: every path to a receiver counts. By default a branch that the sender lies in is not held;
    a receiver is never held while it is read.
    """
    senders, targets = _spots(clean, sender), _spots(clean, receivers)
    held = None if hold is None else _spots(clean, hold)
    arrived: dict[str, Run] = {}
    for target in targets:
        if target.name not in arrived:
            felt, kept = _ways(clean.graph, senders, target, held)
            patch = {**_patches(kept, clean), **_patches(felt, corrupt)}
            arrived[target.name] = clean.replay(to=target.name, patch=patch, on_divergence=on_divergence)
    second: dict[Any, list[Patch]] = {}
    for target in targets:
        second.setdefault(target.key, []).append(From(arrived[target.name], target.part))
    run = clean.replay(patch=second, on_divergence=on_divergence)
    return run if metric is None else metric(run.output)


@frozen
class _Spot:
    """A layer, or what some layers read from it, or part of that."""

    key: Any  # in a mapping of patches
    name: str
    node: str
    part: Part | None = None
    readers: tuple[str, ...] = ()  # of an edge

    @property
    def starts(self) -> tuple[str, ...]:
        """Where a change there is felt first."""
        return self.readers or (self.node,)


def _spots(prog: Program, given: Any) -> list[_Spot]:
    """What a user names: a key of a mapping of patches, (key, part), a list of such, a mapping from keys to parts."""
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Part):
        pairs = [given]
    elif isinstance(given, (str, int, Selection, Where, Layer, Edge)) or not isinstance(given, Iterable):
        pairs = [(given, None)]
    else:
        return [spot for one in given for spot in _spots(prog, one)]
    return [spot for key, part in pairs for spot in _at(prog, key, part)]


def _at(prog: Program, key: Any, part: Part | None) -> list[_Spot]:
    if isinstance(key, Edge):
        several = key.receiver if isinstance(key.receiver, tuple) else (key.receiver,)
        readers = tuple([name if name == OUTPUT else prog[name].node.name for name in several])
        (name,) = prog.names_of(key.sender)
        return [_Spot(key, name, prog[name].node.name, part, readers)]
    return [_Spot(name, name, prog[name].node.name, part) for name in prog.names_of(key)]


def _patches(spots: list[_Spot], source: Program) -> dict[Any, list[Patch]]:
    found: dict[Any, list[Patch]] = {}
    for spot in spots:
        found.setdefault(spot.key, []).append(From(source, spot.part))
    return found


def _ways(
    graph: Graph, senders: list[_Spot], target: _Spot, held: list[_Spot] | None
) -> tuple[list[_Spot], list[_Spot]]:
    """For one receiver: the senders that reach it, and what is held between them and it."""
    starts, above = {name for spot in senders for name in spot.starts}, graph.ancestors([target.node])
    names = ", ".join(str(spot.key) for spot in senders)
    if target.node in starts and not target.readers and not any(target.node in spot.readers for spot in senders):
        raise ReplaylensError(f"{target.name} is both sender and receiver.")
    if not starts & above:
        raise ReplaylensError(f"{names} does not reach {target.key}.")
    between = (graph.descendants(starts & above) & above) - {*starts, target.node}
    if held is None:
        held = [_Spot(name, name, name) for name in residual_branches(graph, between, starts)]
    kept = [spot for spot in held if spot.node in between]
    walls = {spot.node: spot.name for spot in kept if spot.part is None and not spot.readers}
    if not _reaches(graph, starts & above, target.node, {*walls}):
        raise ReplaylensError(
            f"every way from {names} to {target.key} leads through what is held: {', '.join(walls.values())}.\n"
            "Hold less."
        )
    return [spot for spot in senders if not above.isdisjoint(spot.starts)], kept


def _reaches(graph: Graph, starts: set[str], end: str, walls: set[str]) -> bool:
    stack, seen = list(starts), set(starts)
    if end in seen:
        return True
    while stack:
        for position in graph.users[graph.positions[stack.pop()]]:
            name = graph.nodes[position].name
            if name == end:
                return True
            if name not in seen and name not in walls:
                seen.add(name)
                stack.append(name)
    return False


def residual_branches(graph: Graph, among: Iterable[str], around: Iterable[str] = ()) -> list[str]:
    """The summands that are made from what they are added to, by way of parameters, and that lie around no others."""
    weights, found = _weights(graph), []
    among = set(among)
    for node in graph.nodes:
        if not isinstance(node, Call) or not of_kind(node.kind).has(Quirk.JOIN):
            continue
        parts = list(dict.fromkeys(ref.node for ref in node.refs))
        for branch in [name for name in parts if name in among]:
            above = graph.ancestors([branch])
            streams = [root for name in parts if name != branch and (root := _root(graph, name)) in above]
            bodies = [above & graph.descendants([stream]) - {stream} for stream in streams]
            if any(_reads_any(graph, body, weights) and body.isdisjoint(around) for body in bodies):
                found.append(branch)
    return list(dict.fromkeys(found))


def _root(graph: Graph, name: str) -> str:
    """The value that a node hands on as it is."""
    node = graph[name]
    while isinstance(node, Call) and (node.target.function is alias or _hands_on(node.kind)):
        node = graph[node.refs[0].node]
    return node.name


def _hands_on(kind: str) -> bool:
    return kind == "to" or of_kind(kind).has(Quirk.DROPOUT)


def _weights(graph: Graph) -> frozenset[str]:
    """Parameters, and what is made from parameters and constants alone."""
    found: set[str] = set()
    fixed: set[str] = set()
    for position, node in enumerate(graph.nodes):
        parents = [graph.nodes[p].name for p in graph.parents[position]]
        if not isinstance(node, Call):
            fixed.update([node.name] if node not in graph.input_nodes else [])
            found.update([node.name] if isinstance(node, State) and node.kind == "parameter" else [])
        elif parents and fixed.issuperset(parents):
            fixed.add(node.name)
            found.update([node.name] if found.intersection(parents) else [])
    return frozenset(found)


def _reads_any(graph: Graph, body: Iterable[str], weights: frozenset[str]) -> bool:
    return any(graph.nodes[p].name in weights for name in body for p in graph.parents[graph.positions[name]])
