"""Where an operation stands in a forward: the n-th of its kind that a line of code makes in a call of a module.

In: a Graph, or a recording while it grows. Out: a Spot for each call. Two forwards of one model have the same Spots
where they take the same path, and beyond it where they still do the same thing: labels, which count through the whole
program, would not agree. Views that are derived again after a write have none: no line of the model calls them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeGuard

from attrs import field, frozen

from .._core.graph import Graph
from .._core.location import Location
from .._core.node import Call, Input, Node, Ref, Scope, Source, State, refs_in
from .._core.runtime import alias
from .builder import CallRecord, Recording, SourceRecord, user_line
from .output_aliases import is_handing


@frozen
class Spot:
    """An operation of a module call; the root's has no address."""

    address: str
    call: int
    kind: str
    source: Source | None
    number: int

    @property
    def any_call(self) -> Spot:
        """The same operation in whichever call of the module."""
        return Spot(self.address, 0, self.kind, self.source, self.number)


def spots(graph: Graph) -> dict[int, Spot]:
    """Where each call of a graph stands, by its position."""
    seen: Counter[Any] = Counter()
    found: dict[int, Spot] = {}
    for position, node in enumerate(graph.nodes):
        if is_handed_on(node):
            found[position] = handing_spot(*_of_scope(node.scope), node.args[1])
        elif isinstance(node, Call) and (node.scope is not None or node.source is not None):
            found[position] = _next(seen, _of_scope(node.scope), node.kind, node.source)
    return found


def is_handed_on(node: Node) -> TypeGuard[Call]:
    """Does a node stand for what a module hands on?"""
    return isinstance(node, Call) and node.target.function is alias and len(node.args) == 2


def handing_spot(address: str, call: int, number: int) -> Spot:
    """Where a module hands on the n-th of its values."""
    return Spot(address, call, "identity", None, -1 - number)


def _of_scope(scope: Scope | None) -> tuple[str, int]:
    return (scope.address, scope.call) if scope is not None else ("", 0)


def _next(seen: Counter[Any], scope: tuple[str, int], kind: str, source: Source | None) -> Spot:
    seen[scope, kind, source] += 1
    return Spot(*scope, kind, source, seen[scope, kind, source])


@frozen(eq=False)
class Counted:
    """The Spots of a recording, one record after the other as they come."""

    recording: Recording
    addresses: dict[int, str]  # id of a module -> dotted address
    seen: Counter[Any] = field(factory=Counter)
    scopes: list[tuple[str, int]] = field(factory=list)
    calls: Counter[int] = field(factory=Counter)

    def next(self, record: CallRecord | SourceRecord) -> Spot | None:
        """The Spot of the record that follows."""
        if isinstance(record, SourceRecord) or (record.scope < 0 and record.site is None):
            return None
        if is_handing(record):
            return handing_spot(*self.place(record.scope), record.args[1])
        source = user_line(self.recording, record.site, record.scope)
        return _next(self.seen, self.place(record.scope), record.kind, source)

    def place(self, number: int) -> tuple[str, int]:
        """How a frozen Scope will be called; see builder.py."""
        scopes = self.recording.scopes
        for record in scopes[len(self.scopes) :]:
            module = record.module
            self.calls[id(module)] += not record.is_void
            address = self.addresses.get(id(module), f"<{type(module).__name__}>")
            self.scopes.append((address, self.calls[id(module)]) if address else ("", 0))
        return self.scopes[number] if number >= 0 else ("", 0)


class Counterparts:
    """For places in one program, the same places in another run of the model, patched there or not."""

    def __init__(self, one: Graph, other: Graph) -> None:
        self.one, self.other = one, other
        self.spots = spots(one)
        self.names: dict[Any, str] = {spot: other.nodes[position].name for position, spot in spots(other).items()}
        for node in other.nodes:
            if isinstance(node, (Input, State)):
                self.names[_source(node)] = node.name
        self.patches = {call.edits: call for call in other.calls if call.edits is not None}

    def of(self, at: Location) -> Location | None:
        """The same place, if the other run came to it."""
        if at.output is not None:
            return self._output(at.output)
        node, position = self.one[at.node], self.one.positions[at.node]
        name = self.names.get(self.spots.get(position) if isinstance(node, Call) else _source(node))
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
        mine, theirs = (list(dict.fromkeys(graph.output_refs)) for graph in (self.one, self.other))
        number = mine.index(ref)
        return Location(theirs[number].node, output=theirs[number]) if number < len(theirs) else None


def _source(node: Node) -> Any:
    return type(node), node.path if isinstance(node, Input) else getattr(node, "address", node.name)
