"""Call sites: where an operation stands in a forward.

In: a Graph, or a recording while it grows. Out: a CallSite for each call: the n-th operation of its kind that a line of
code makes in a call of a module. Two forwards of one model have the same call sites as long as they take the same path,
and again wherever they do the same thing after their paths parted; labels, which count through the whole program, would
not agree. Views that are regenerated after a write have none: no line of the model makes them.

Passes of a loop beyond the recorded ones have sites that no node was recorded at. LoopPasses finds the layer of such an
operation by its line: where a line ran the same layers in turn, pass after pass, it goes on in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from attrs import define, field, frozen

from ..._ir.graph import Graph
from ..._ir.label import Label
from ..._ir.location import Location
from ..._ir.node import Call, Input, Node, Ref, Scope, Source, State, refs_in
from ..._ir.runtime import alias
from ...errors import DivergedReplay
from ..output_aliases import is_handing
from ..recording import CallRecord, Recording, SourceRecord
from ..scopes import user_line

AnyPatch = Any  # a LivePatch, which this module only passes on


@frozen
class SourceLine:
    """Operations of one kind that one line of code makes in one module."""

    address: str
    kind: str
    source: Source | None


@define(eq=False)
class LoopPasses:
    """Patches of further passes: by line, those of the layers that take turns there; None for no order."""

    cycles: dict[SourceLine, tuple[AnyPatch | None, ...] | None] = field(factory=dict)
    kinds: frozenset[str] = frozenset()
    seen: Counter[Any] = field(factory=Counter)

    def next(self, site: CallSite, source: Callable[[], Source | None], is_recorded: bool) -> AnyPatch | None:
        """The patch of the next operation at its line, if its layer takes turns there."""
        if site.kind not in self.kinds:
            return None
        line = SourceLine(site.address, site.kind, source())
        if line not in self.cycles:
            return None
        number = self.seen[line, site.call]
        self.seen[line, site.call] += 1
        cycle = self.cycles[line]
        if cycle is None and not is_recorded:
            raise DivergedReplay(
                f"the model goes on longer with this change, and {line.source} ran `{line.kind}` for several layers "
                "in no fixed order, so that the next one is unknown. Name the passes to patch."
            )
        return None if cycle is None else cycle[number % len(cycle)]


def loop_passes_of(graph: Graph, sites: Mapping[int, CallSite], patches: Mapping[int, AnyPatch]) -> LoopPasses:
    """The LoopPasses of patches for all passes of a layer, given by the position of each pass."""
    looping = {p: patch for p, patch in patches.items() if p in sites and Label.of(graph.nodes[p].name).turn}
    lines = {_line(graph, sites, position) for position in looping}
    by_layer = {Label.of(graph.nodes[position].name).layer: patch for position, patch in looping.items()}
    ran: dict[SourceLine, dict[int, list[str]]] = {}
    for position, site in sites.items() if lines else ():
        if (line := _line(graph, sites, position)) in lines:
            ran.setdefault(line, {}).setdefault(site.call, []).append(Label.of(graph.nodes[position].name).layer)
    cycles = {line: _cycle(list(calls.values())) for line, calls in ran.items()}
    found = {
        line: None if cycle is None else tuple([by_layer.get(layer) for layer in cycle])
        for line, cycle in cycles.items()
    }
    return LoopPasses(found, frozenset(line.kind for line in lines))


def _cycle(calls: list[list[str]]) -> list[str] | None:
    """The layers that take turns in each call of a module; None if they have no such order."""
    longest: list[str] = max(calls, key=len)
    cycle = list(dict.fromkeys(longest))
    in_order = all(layer == cycle[number % len(cycle)] for call in calls for number, layer in enumerate(call))
    return cycle if in_order else None


def _line(graph: Graph, sites: Mapping[int, CallSite], position: int) -> SourceLine:
    node = graph.nodes[position]
    assert isinstance(node, Call)
    return SourceLine(sites[position].address, node.kind, node.source)


@frozen
class CallSite:
    """An operation in a call of a module; the root module has no address."""

    address: str
    call: int
    kind: str
    source: Source | None
    number: int

    @property
    def any_call(self) -> CallSite:
        """The same operation in any call of the module."""
        return CallSite(self.address, 0, self.kind, self.source, self.number)


def call_sites(graph: Graph) -> dict[int, CallSite]:
    """The call site of each call of a graph, by position."""
    seen: Counter[Any] = Counter()
    found: dict[int, CallSite] = {}
    for position, node in enumerate(graph.nodes):
        if is_handed_on(node):
            found[position] = handoff_site(*_key(node.scope), node.args[1])
        elif isinstance(node, Call) and (node.scope is not None or node.source is not None):
            found[position] = _next(seen, _key(node.scope), node.kind, node.source)
    return found


def is_handed_on(node: Node) -> TypeGuard[Call]:
    """True if a node is the alias of a value that a module returns."""
    return isinstance(node, Call) and node.target.function is alias and len(node.args) == 2


def handoff_site(address: str, call: int, number: int) -> CallSite:
    """The call site at which a module returns its n-th value."""
    return CallSite(address, call, "identity", None, -1 - number)


def _key(scope: Scope | None) -> tuple[str, int]:
    return (scope.address, scope.call) if scope is not None else ("", 0)


def _next(seen: Counter[Any], scope: tuple[str, int], kind: str, source: Source | None) -> CallSite:
    seen[scope, kind, source] += 1
    return CallSite(*scope, kind, source, seen[scope, kind, source])


@frozen(eq=False)
class CallSiteCounter:
    """The call sites of the records of a recording, in the order in which these come."""

    recording: Recording
    addresses: dict[int, str]  # by the id of a module
    seen: Counter[Any] = field(factory=Counter)
    scopes: list[tuple[str, int]] = field(factory=list)
    calls: Counter[int] = field(factory=Counter)

    def next(self, record: CallRecord | SourceRecord) -> CallSite | None:
        if isinstance(record, SourceRecord) or (record.scope < 0 and record.site is None):
            return None
        if is_handing(record):
            return handoff_site(*self.scope_of(record.scope), record.args[1])
        source = user_line(self.recording, record.site, record.scope)
        return _next(self.seen, self.scope_of(record.scope), record.kind, source)

    def scope_of(self, number: int) -> tuple[str, int]:
        """The address and call number that the frozen Scope will have; see `recording.addresses`."""
        scopes = self.recording.scopes
        for record in scopes[len(self.scopes) :]:
            module = record.module
            self.calls[id(module)] += not record.is_void
            address = self.addresses.get(id(module), f"<{type(module).__name__}>")
            self.scopes.append((address, self.calls[id(module)]) if address else ("", 0))
        return self.scopes[number] if number >= 0 else ("", 0)


class MatchingSites:
    """Maps a Location in one program to the same Location in another run of the model, patched or not."""

    def __init__(self, graph: Graph, other: Graph) -> None:
        self.graph, self.other = graph, other
        self.sites = call_sites(graph)
        self.names: dict[Any, str] = {site: other.nodes[position].name for position, site in call_sites(other).items()}
        for node in other.nodes:
            if isinstance(node, (Input, State)):
                self.names[_source_key(node)] = node.name
        self.patches = {call.edits: call for call in other.calls if call.edits is not None}

    def of(self, at: Location) -> Location | None:
        """The same Location, if the other run reached it."""
        if at.output is not None:
            return self._output(at.output)
        node, position = self.graph[at.node], self.graph.positions[at.node]
        name = self.names.get(self.sites.get(position) if isinstance(node, Call) else _source_key(node))
        if name is None:
            return None
        patch = self.patches.get(name)
        if at.part is None:
            return Location(name if patch is None else patch.name)
        part = Ref(name, at.part.path)
        if patch is not None and part in patch.args:
            returns = refs_in(patch.returns)
            return Location(patch.name, part=returns[patch.args.index(part)])
        return Location(name, part=part)

    def _output(self, ref: Ref) -> Location | None:
        own, theirs = (list(dict.fromkeys(graph.output_refs)) for graph in (self.graph, self.other))
        number = own.index(ref)
        return Location(theirs[number].node, output=theirs[number]) if number < len(theirs) else None


def _source_key(node: Node) -> Any:
    return type(node), node.path if isinstance(node, Input) else getattr(node, "address", node.name)
