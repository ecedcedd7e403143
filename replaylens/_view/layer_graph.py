"""Every layer of a program and every link between two, before any are drawn as one.

In: a Graph and its LayerIndex. Out: a LayerGraph. grouping.py decides what is drawn as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from .._ir.graph import Graph
from .._ir.location import Location
from .._ir.node import Call, Input, Node, Ref, Scope, State, TensorSpec, refs_in, scopes_beyond, specs_of, value_of
from .._ir.ops import Quirk, op_info_of_kind
from .._ir.trees import Branch
from .._ir.util import cached_property
from .._ir.write import Write, original_call
from .._layers.index import LayerIndex
from .._layers.program_facts import Conditionals
from .scene import NO_ROLES, Roles

MODIFYING_EDITS = ("was ", "reads ")  # descriptions of edits that modify a call and add none


@frozen
class LayerMark:
    """One layer to be drawn."""

    label: str
    node: str
    kind: str
    scopes: tuple[Scope, ...] = ()  # the module calls around it, outermost first
    specs: tuple[TensorSpec, ...] = ()
    parameters: tuple[State, ...] = ()
    roles: Roles = NO_ROLES
    note: str = ""
    source: str = ""
    layer: str = ""  # its label in the program, if that differs: of layers outside of the module that is drawn


@frozen
class LayerLink:
    """One layer reads another."""

    tail: str
    head: str
    place: str = ""
    part: str = ""
    roles: Roles = NO_ROLES
    edge: str = ""  # the node of a patchable edge
    note: str = ""


@frozen(eq=False)
class LayerGraph:
    """All layers and links of a program."""

    marks: tuple[LayerMark, ...]
    links: tuple[LayerLink, ...]

    @cached_property
    def by_label(self) -> dict[str, LayerMark]:
        return {mark.label: mark for mark in self.marks}

    @cached_property
    def single(self) -> frozenset[str]:
        """The module calls of a single operation, which is drawn as a box without a frame."""
        own = [mark for mark in self.marks if "operation" in mark.roles and "patch" not in mark.roles]
        inner = Counter([str(mark.scopes[-1]) for mark in own if mark.scopes])
        outer: set[str] = set()  # the calls around these
        seen: set[int] = set()
        for mark in own:
            for scope in reversed(mark.scopes[:-1]):
                if id(scope) in seen:
                    break
                seen.add(id(scope))
                outer.add(str(scope))
        return frozenset([name for name, count in inner.items() if count == 1 and name not in outer])


def layer_graph(graph: Graph, index: LayerIndex, with_buffers: bool = True) -> LayerGraph:
    """The layers of a program and what each reads."""
    hidden = frozenset() if with_buffers else _for_buffers(graph)
    places = [place for place in index.places if place.output is not None or place.node not in hidden]
    drawn = {place.label for place in places}
    made = _LayerGraphBuilder(graph, index, hidden)
    marks = tuple([made.mark(place) for place in places])
    links = [link for place in places for link in made.links(place) if link.tail in drawn]
    return LayerGraph(marks, tuple(dict.fromkeys(links)))


def _for_buffers(graph: Graph) -> frozenset[str]:
    """The buffers, and what is computed from them only to be written back."""
    buffers = [node.name for node in graph.state_nodes if node.kind == "buffer"]
    used = graph.marked_ancestors([ref.node for ref in graph.output_refs])
    derived = graph.descendants(buffers).difference(graph.descendants([node.name for node in graph.input_nodes]))
    return frozenset(buffers).union([name for name in derived if not used[graph.positions[name]]])


@frozen(eq=False)
class _LayerGraphBuilder:
    graph: Graph
    index: LayerIndex
    hidden: frozenset[str]

    @cached_property
    def conditions(self) -> dict[str, str]:
        """The layers that serve only as a condition, with the value that was read."""
        said = {record.layer: str(record.value) for record in self._conditionals.records}
        return {layer: said[layer] for layer in self._conditionals.terminal_bools}

    @cached_property
    def branch_starts(self) -> frozenset[tuple[str, str]]:
        return frozenset(self._conditionals.starts)

    @cached_property
    def _conditionals(self) -> Conditionals:
        return Conditionals(self.graph)

    @cached_property
    def from_inputs(self) -> frozenset[str]:
        return self.graph.descendants([node.name for node in self.graph.input_nodes])

    @cached_property
    def behind_edits(self) -> frozenset[str]:
        """The descendants of edited calls."""
        edited = [call.name for call in self.graph.edited]
        return self.graph.descendants(edited).difference(edited)

    @cached_property
    def replaced(self) -> frozenset[str]:
        """The calls that patches replaced."""
        return frozenset([call.edits for call in self.graph.calls if call.edits is not None])

    @cached_property
    def drawn(self) -> frozenset[str]:
        return frozenset([place.node for place in self.index.places if place.output is None])

    def mark(self, place: Location) -> LayerMark:
        node = self.graph[place.node]
        if place.output is not None:
            spec = specs_of(node).get(place.output)
            return LayerMark(place.label, place.node, "output", (), _known(spec), roles=frozenset({"output"}))
        if isinstance(node, Call):
            return self._operation(place, node)
        is_buffer = isinstance(node, State) and node.kind == "buffer"
        kind = "input" if isinstance(node, Input) else "buffer" if is_buffer else "constant"
        scopes = () if kind == "input" else self._scopes_of_readers(node)
        note = node.address if isinstance(node, State) else ""
        return LayerMark(place.label, place.node, kind, scopes, (node.spec,), roles=frozenset({kind}), note=note)

    def _operation(self, place: Location, node: Call) -> LayerMark:
        parameters = self._parameters(node)
        roles = {
            "operation": True,
            "parameters": bool(parameters),
            "internal": node.name not in self.from_inputs,
            "boolean": node.name in self.conditions,
            "edited": bool(node.edited),
            "rerun": node.name in self.behind_edits,
            "before": node.name in self.replaced,
            "patch": bool(node.edited) and not node.edited.startswith(MODIFYING_EDITS),
        }
        return LayerMark(
            label=place.label,
            node=place.node,
            kind=node.kind,
            scopes=self._stack(node),
            specs=self._given(node),
            parameters=parameters,
            roles=frozenset([role for role, holds in roles.items() if holds]),
            note=f"{node.kind}, {node.edited}"
            if node.edited.startswith("was ")
            else node.edited or self.conditions.get(node.name, ""),
            source=node.source.inline if node.source is not None else "",
        )

    def _stack(self, node: Call) -> tuple[Scope, ...]:
        """The module calls around a call, outermost first."""
        known = self._stacks
        outer, new = scopes_beyond(known, node.scope)
        found = () if outer is None else known[id(outer)]
        for scope in new:
            found = known[id(scope)] = (*found, scope)
        return found

    @cached_property
    def _stacks(self) -> dict[int, tuple[Scope, ...]]:
        return {}

    def _given(self, node: Call) -> tuple[TensorSpec, ...]:
        """The specs of the tensors of a call that the model saw."""
        known = specs_of(node)
        refs = dict.fromkeys(refs_in(value_of(node)))
        return tuple([known[ref] for ref in refs if ref in known])

    def _parameters(self, node: Call) -> tuple[State, ...]:
        read = [self.graph[name] for name in dict.fromkeys(ref.node for ref in node.refs)]
        return tuple([one for one in read if isinstance(one, State) and one.kind == "parameter"])

    def _scopes_of_readers(self, node: Node) -> tuple[Scope, ...]:
        """The module calls around all readers of a buffer or constant; of a buffer, only those that own it."""
        users = [self.graph.nodes[p] for p in self.graph.users[self.graph.positions[node.name]]]
        stacks = [self._stack(user) for user in users if isinstance(user, Call)]
        scopes = common_prefix(stacks)
        if isinstance(node, State):
            scopes = tuple([scope for scope in scopes if f"{node.address}.".startswith(f"{scope.address}.")])
        return scopes

    def links(self, place: Location) -> Iterator[LayerLink]:
        """What a layer reads."""
        if place.output is not None:
            yield from self._from(place.output, place.label)
            return
        node = self.graph[place.node]
        if not isinstance(node, Call):
            return
        named = _arguments(node)
        several = len({ref for ref, _ in named if ref.node in self.drawn and ref.node not in self.hidden}) > 1
        in_order = op_info_of_kind(node.kind).has(Quirk.COMMUTATIVE) and not dict(node.kwargs).get("alpha")
        for ref, word in named:
            yield from self._from(ref, place.label, word if several and not in_order else "")

    def _from(self, ref: Ref, head: str, word: str = "", edge: str = "") -> Iterator[LayerLink]:
        """The link from the layer of a value; nodes of patchable edges are passed through."""
        tail = self.graph[ref.node]
        if ref.node in self.drawn:
            roles = {
                "if": (ref.node, head) in self.branch_starts,
                "internal": isinstance(tail, Call) and ref.node not in self.from_inputs,
            }
            several = isinstance(tail, Call) and type(value_of(tail)) is not Ref and ref.path
            part = "".join(f"[{step}]" for step in ref.path) if several else ""
            yield LayerLink(
                ref.node, head, word, part, frozenset([role for role, is_so in roles.items() if is_so]), edge
            )
        elif isinstance(tail, Call):
            for before in dict.fromkeys(tail.refs):
                yield from self._from(before, head, word, ref.node)


def common_prefix(stacks: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The longest common prefix of several stacks."""
    found: list[Any] = []
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        found.append(level[0])
    return tuple(found)


def _arguments(node: Call) -> list[tuple[Ref, str]]:
    """Each value that a call reads, with its argument position in the call as the user wrote it."""
    _, args, kwargs = original_call(node)
    found = []
    for word, tree in [*((f"arg {n}", arg) for n, arg in enumerate(args)), *kwargs.items()]:
        found += list(_places(tree, word, node))
    known = {ref for ref, _ in found}
    return found + [(ref, "") for ref in dict.fromkeys(node.refs) if ref not in known]


def _places(tree: Any, word: str, call: Call) -> Iterator[tuple[Ref, str]]:
    if type(tree) is Ref:
        yield tree, word
    elif type(tree) is tuple:
        for number, item in enumerate(tree):
            yield from _places(item, f"{word}[{number}]", call)
    elif isinstance(call, Write) and (view := call.view(tree)) is not None:
        yield call.arguments.bases[view.base], word
    elif isinstance(tree, Branch):
        for key, item in zip(tree.keys or range(len(tree.items)), tree.items, strict=True):
            yield from _places(item, f"{word}[{key}]", call)


def _known(spec: TensorSpec | None) -> tuple[TensorSpec, ...]:
    return () if spec is None else (spec,)
