"""path_patch: the effect of a sender along its direct paths into some receivers, and along no other.

In: two programs of one model, senders, receivers, what is held. Out: the run in which only the receivers see the
sender's corrupt value, by one replay for each receiver and one for the output.
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
from .._ir.ops import Quirk, op_info_of_kind
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
    """The clean run in which the sender's corrupt value acts through the receivers alone: a Run, or its metric.

    First each receiver is evaluated in the clean run with the sender's corrupt value, while all that is held keeps its
    clean value. Then the clean run is replayed with the receivers set to these values, and everything else recomputed.

    Sender and receivers are layers, or parts of layers: `("attn_3", Part("b t ([head] d)", head=3, d=64))`. Either can
    be an edge: `Edge("norm_3", "query_3")` is what query_3 alone reads from norm_3. Several are given as a list, or as
    a mapping from layer to part.

    What is held defines direct paths. By default every residual branch between sender and receiver is held: a summand
    that is computed, with parameters, from what it is added to. So paths lead through sums and normalisations, but
    through no attention or feed-forward layer except the receiver's own. `hold="*.attn"` holds attention only, so that
    paths also lead through feed-forward layers, as in the study of indirect object identification; with `hold=[]` every
    path to a receiver counts. By default the sender's own branch is not held; a receiver is never held while it is
    evaluated.
    """
    senders, targets = _endpoints(clean, sender), _endpoints(clean, receivers)
    held = None if hold is None else _endpoints(clean, hold)
    first: dict[str, Run] = {}
    for target in targets:
        if target.name not in first:
            felt, kept = _felt_and_held(clean.graph, senders, target, held)
            patch = {**_patches(kept, clean), **_patches(felt, corrupt)}
            first[target.name] = clean.replay(to=target.name, patch=patch, on_divergence=on_divergence)
    second: dict[Any, list[Patch]] = {}
    for target in targets:
        second.setdefault(target.key, []).append(From(first[target.name], target.part))
    run = clean.replay(patch=second, on_divergence=on_divergence)
    return run if metric is None else metric(run.output)


@frozen
class _Endpoint:
    """A sender, a receiver, or what is held: a layer, an edge, or part of one."""

    key: Any  # its key in a mapping of patches
    name: str
    node: str
    part: Part | None = None
    readers: tuple[str, ...] = ()  # of an edge

    @property
    def starts(self) -> tuple[str, ...]:
        """The nodes that a change there reaches first."""
        return self.readers or (self.node,)


def _endpoints(prog: Program, given: Any) -> list[_Endpoint]:
    """The endpoints of a user's argument: a key of patches, (key, part), a list of these, or {key: part}."""
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Part):
        pairs = [given]
    elif isinstance(given, (str, int, Selection, Where, Layer, Edge)) or not isinstance(given, Iterable):
        pairs = [(given, None)]
    else:
        return [end for one in given for end in _endpoints(prog, one)]
    return [end for key, part in pairs for end in _at(prog, key, part)]


def _at(prog: Program, key: Any, part: Part | None) -> list[_Endpoint]:
    if isinstance(key, Edge):
        several = key.receiver if isinstance(key.receiver, tuple) else (key.receiver,)
        readers = tuple([name if name == OUTPUT else prog[name].node.name for name in several])
        (name,) = prog.names_of(key.sender)
        return [_Endpoint(key, name, prog[name].node.name, part, readers)]
    return [_Endpoint(name, name, prog[name].node.name, part) for name in prog.names_of(key)]


def _patches(endpoints: list[_Endpoint], source: Program) -> dict[Any, list[Patch]]:
    found: dict[Any, list[Patch]] = {}
    for end in endpoints:
        found.setdefault(end.key, []).append(From(source, end.part))
    return found


def _felt_and_held(
    graph: Graph, senders: list[_Endpoint], target: _Endpoint, held: list[_Endpoint] | None
) -> tuple[list[_Endpoint], list[_Endpoint]]:
    """For one receiver: the senders that reach it, and what is held between."""
    starts, above = {name for end in senders for name in end.starts}, graph.ancestors([target.node])
    names = ", ".join(str(end.key) for end in senders)
    if target.node in starts and not target.readers and not any(target.node in end.readers for end in senders):
        raise ReplaylensError(f"{target.name} is both sender and receiver.")
    if not starts & above:
        raise ReplaylensError(f"{names} does not reach {target.key}.")
    between = (graph.descendants(starts & above) & above) - {*starts, target.node}
    if held is None:
        held = [_Endpoint(name, name, name) for name in residual_branches(graph, between, starts)]
    kept = [end for end in held if end.node in between]
    blocked = {end.node: end.name for end in kept if end.part is None and not end.readers}
    if not _reaches(graph, starts & above, target.node, {*blocked}):
        raise ReplaylensError(
            f"every way from {names} to {target.key} leads through what is held: {', '.join(blocked.values())}.\n"
            "Hold less."
        )
    return [end for end in senders if not above.isdisjoint(end.starts)], kept


def _reaches(graph: Graph, starts: set[str], end: str, blocked: set[str]) -> bool:
    stack, seen = list(starts), set(starts)
    if end in seen:
        return True
    while stack:
        for position in graph.users[graph.positions[stack.pop()]]:
            name = graph.nodes[position].name
            if name == end:
                return True
            if name not in seen and name not in blocked:
                seen.add(name)
                stack.append(name)
    return False


def residual_branches(graph: Graph, among: Iterable[str], around: Iterable[str] = ()) -> list[str]:
    """The summands in `among` that are computed, with parameters, from what they are added to: `mlp` in `x + mlp(x)`.

    A branch that contains one of the nodes `around` does not count.
    """
    weights, found = _weights(graph), []
    among = set(among)
    for node in graph.nodes:
        if not isinstance(node, Call) or not op_info_of_kind(node.kind).has(Quirk.JOIN):
            continue
        parts = list(dict.fromkeys(ref.node for ref in node.refs))
        for branch in [name for name in parts if name in among]:
            above = graph.ancestors([branch])
            streams = [root for name in parts if name != branch and (root := _root(graph, name)) in above]
            bodies = [above & graph.descendants([stream]) - {stream} for stream in streams]
            if any(body.isdisjoint(around) and not weights.isdisjoint(_reads(graph, body)) for body in bodies):
                found.append(branch)
    return list(dict.fromkeys(found))


def _root(graph: Graph, name: str) -> str:
    """The node whose value a node passes on unchanged, but for casts and dropout."""
    node = graph[name]
    while isinstance(node, Call) and (
        node.target.function is alias or node.kind == "to" or op_info_of_kind(node.kind).has(Quirk.DROPOUT)
    ):
        node = graph[node.refs[0].node]
    return node.name


def _weights(graph: Graph) -> frozenset[str]:
    """Parameters, and what is computed from parameters and constants alone."""
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


def _reads(graph: Graph, body: Iterable[str]) -> Iterable[str]:
    return (graph.nodes[p].name for name in body for p in graph.parents[graph.positions[name]])
