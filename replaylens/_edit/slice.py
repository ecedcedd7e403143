"""A slice of a graph: from some values to others.

In: a Graph, the values where the slice begins and those that it gives. Out: a Graph with the former as inputs and the
latter as output, and exactly the nodes between. Whatever else it needs that depends on the whole program's inputs
becomes a constant; what is computed from parameters alone is computed in the slice too, so that it can be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen

from .._ir.autograd import with_gradient_hook
from .._ir.graph import Graph
from .._ir.label import name_beside, unused_name
from .._ir.node import Call, Const, Guard, Input, Node, Ref, State, refs_in, refs_of, specs_of
from .._ir.ops import Quirk, op_info_of_kind
from .._ir.runtime import alias
from .._ir.trees import Branch, map_leaves
from .._ir.validate import require_lawful
from ..errors import BadEdit
from .rewrite import guard_reading, reading


@frozen
class Slice:
    """A slice, and for each of its values the one of the whole graph that it is."""

    graph: Graph
    values: dict[Ref, Ref]


def slice_of(graph: Graph, starts: Sequence[Any] | None, output: Any, repeats: bool = False) -> Slice:
    """The slice from these values, or from the inputs, to a tree of values. One that `repeats` leaves the model's state
    as its next run needs it: it does what the model does until its return if it gives the output of the model, and
    otherwise what writes the state that it reads.
    """
    return _Slicing(graph, starts, output, repeats).made()


class _Slicing:
    """Which nodes a slice needs, which values become constants, and their names."""

    def __init__(self, graph: Graph, starts: Sequence[Any] | None, output: Any, repeats: bool) -> None:
        if repeats:
            output = map_leaves(output, lambda leaf: _hooked(graph, leaf) if type(leaf) is Ref else leaf)
        self.graph, self.starts, self.output = graph, starts, output
        given = set(refs_in(output))
        self.is_to_end = output == graph.output or (repeats and bool(given) and given.issuperset(graph.output_refs))
        inputs = [Ref(node.name) for node in graph.input_nodes]
        self.starts_once = tuple(dict.fromkeys(inputs if starts is None else refs_in(tuple(starts))))
        self._require_unwritten()
        self.dependents = self._dependents()
        self.of_inputs = graph.descendants([node.name for node in graph.input_nodes])
        self.nodes: set[str] = set()  # that come along
        self.constants: dict[Ref, None] = {}  # values that are constants
        self._take(refs_in(output))
        self._require_reached()
        self._require_whole_gradients()
        if repeats and self._draws_as_the_whole:
            self._take([ref for position in graph.drawn.values() for ref in refs_of(graph.nodes[position])])
        last = self._last()
        self._settle(last)
        while repeats and (late := self._written_late(last)):
            last = max(graph.positions[ref.node] for ref in late)
            self._take(late)
            self._settle(last)
        if repeats:
            self._require_own_state()

    def _settle(self, last: int) -> None:
        """Takes what is asked, written and copied up to a position."""
        graph = self.graph
        self.guards = [g for g in graph.guards if g.position <= last and self._can_change(g)]
        self.asked = [g for g in graph.asked if g.position <= last and (not g.refs or self._can_change(g))]
        self.changes = self._writes(last)
        self._take([ref for guard in (*self.guards, *self.asked) for ref in guard.refs])
        there = [g for g in graph.guards if g.kind == "shape" and g.position == last + 1 and self._can_change(g)]
        self.guards += [g for g in there if all(ref.node in self.nodes for ref in g.refs)]
        self._take([ref for _, ref in self.changes])
        self._take([ref for ref in graph.written if ref in self.dependents and self._is_copy(ref, last)])

    def _written_late(self, last: int) -> list[Ref]:
        """What the model writes behind a position to the state that the slice reads: the next run would read it."""
        graph, written = self.graph, {address for address, _ in self.changes}
        read = {
            address
            for node in map(graph.__getitem__, self.nodes)
            if isinstance(node, State)
            for address in (node.address, *node.aliases)
        }
        missing = [(address, ref) for address, ref in graph.changes if address in read - written]
        for address, ref in missing:
            if graph.positions[ref.node] <= last or (ref not in self.dependents and ref.node in self.of_inputs):
                raise BadEdit(
                    f"the model writes `{address}`, which a module from here reads, with {ref}, which is computed "
                    "beside or before its beginning: it would read the same in each call.\nBegin at the model's inputs."
                )
        return [ref for _, ref in missing]

    def _require_own_state(self) -> None:
        """Refuses to write state that constants were computed from: each run would write what follows from these."""
        for address, _ in self.changes if self.constants else ():
            read = [node.name for node in self.graph.state_nodes if address in (node.address, *node.aliases)]
            behind = self.graph.descendants(read)
            if held := next((ref for ref in self.constants if ref.node in behind), None):
                raise BadEdit(
                    f"the model writes `{address}` before the beginning of the module and behind it, and {held} would "
                    "be the recorded value in each call.\nBegin at the model's inputs."
                )

    @property
    def _draws_as_the_whole(self) -> bool:
        return self.is_to_end and self.starts is None

    def made(self) -> Slice:
        """The slice."""
        graph, starts = self.graph, self.starts
        called = self._names()
        refs = {ref: Ref(name) for ref, name in called.items()}
        swap = lambda leaf: refs.get(leaf, leaf) if type(leaf) is Ref else leaf  # noqa: E731
        nodes, places = self._nodes(called, refs)
        there = {*refs, *(ref for name in self.nodes for ref in refs_of(graph[name]))}
        guards = [evolve(guard_reading(guard, refs), position=places[guard.position]) for guard in self.guards]
        inputs = graph.inputs if starts is None else (map_leaves(tuple(starts), swap), Branch(dict, (), ()))
        made = evolve(
            graph,
            nodes=tuple(nodes),
            output=map_leaves(self.output, swap),
            inputs=inputs,
            guards=tuple(guards),
            asked=tuple([evolve(guard_reading(guard, refs), position=places[guard.position]) for guard in self.asked]),
            written=frozenset([refs.get(ref, ref) for ref in graph.written]) & {*there, *refs.values()},
            module_outputs=tuple(
                [(scope, map_leaves(t, swap)) for scope, t in graph.module_outputs if there.issuperset(refs_in(t))]
            ),
            changes=tuple([(address, refs.get(ref, ref)) for address, ref in self.changes]),
            detached_inputs=graph.detached_inputs
            if starts is None
            else frozenset([refs[ref] for ref in self.starts_once]),
            orphans=graph.orphans & {node.name for node in nodes},
            shares_inputs=graph.shares_inputs and starts is None,
            left=graph.left if self._draws_as_the_whole else None,
        )
        values = {ref: ref for node in made.nodes for ref in refs_of(node)} | {new: old for old, new in refs.items()}
        return Slice(require_lawful(made), values)

    def _dependents(self) -> set[Ref]:
        """Every value that depends on the starts, themselves included."""
        found = set(self.starts_once)
        for call in self.graph.calls:
            again = [ref for name in call.through for ref in refs_of(self.graph[name])]
            again += self._drawn_before(call)
            if any(ref in found for ref in (*call.refs, *again)):
                found.update(refs_of(call))
        return found

    def _can_change(self, guard: Guard) -> bool:
        """True if a guard reads what depends on the starts, or on parameters alone."""
        return any(ref in self.dependents or ref.node not in self.of_inputs for ref in guard.refs)

    def _take(self, stack: list[Ref]) -> None:
        """Add what these values need, back to the starts and to constants."""
        while stack:
            ref = stack.pop()
            if ref in self.starts_once or ref.node in self.nodes:
                continue
            if ref not in self.dependents and ref.node in self.of_inputs:
                self.constants[ref] = None
                continue
            self._take_node(self.graph[ref.node], stack)

    def _take_node(self, node: Node, stack: list[Ref]) -> None:
        self.nodes.add(node.name)
        if not isinstance(node, Call):
            return
        stack.extend(node.refs)
        stack.extend([ref for ref in self._drawn_before(node) if ref in self.dependents])
        if inside := [ref for ref in self.starts_once if ref.node in node.through]:
            raise BadEdit(
                f"{node.name} is a gradient that the model takes through {inside[0]}: a slice cannot begin there.\n"
                "Begin before it, or behind the gradient."
            )
        for name in node.through:  # nodes that it runs again keep their places: patches find them there
            if name not in self.nodes:
                self._take_node(self.graph[name], stack)

    def _drawn_before(self, node: Call) -> tuple[Ref, ...]:
        """The values of the draw that may shift this one."""
        before = self.graph.shifts.get(self.graph.positions[node.name])
        return refs_of(self.graph.nodes[before]) if before is not None else ()

    def _require_unwritten(self) -> None:
        """Refuse starts that share memory with what the model writes later: another value would not be
        written with it.
        """
        for ref in self.starts_once:
            node = self.graph[ref.node]
            if isinstance(node, Call) and node.is_overwritten:
                raise BadEdit(
                    f"the model writes the memory of {ref} later, and reads it again: a slice cannot begin there.\n"
                    "Begin before it, or behind the write."
                )
            if isinstance(node, Call) and node.is_shared:
                raise BadEdit(
                    f"`{node.scope}` returns {ref} in a container that something else holds too: what reads it "
                    "there is unknown, and a slice cannot begin there.\n"
                    f"Begin at {refs_in(node.args)[0]}, or behind it."
                )

    def _require_whole_gradients(self) -> None:
        """Refuse starts inside a gradient of the model that ends in the slice: it is that of the recorded value."""
        inside = [ref for ref in self.starts_once if _is_differentiated(self.graph[ref.node])]
        whole = self.output == self.graph.output
        if inside and (whole or not all(_is_differentiated(self.graph[name]) for name in self.nodes)):
            raise BadEdit(
                f"the model takes a gradient through {inside[0]}, which is of the recorded value: a slice cannot begin "
                "there.\nBegin before it, or behind the gradient."
            )

    def _is_copy(self, ref: Ref, last: int) -> bool:
        """True for a copy that would be a view, if its argument had another layout."""
        node = self.graph[ref.node]
        is_copy = isinstance(node, Call) and op_info_of_kind(node.kind).has(Quirk.COPY_OR_VIEW)
        return is_copy and self.graph.positions[ref.node] <= last

    def _require_reached(self) -> None:
        """Refuse starts that the output does not depend on."""
        read = {ref for name in self.nodes for ref in self.graph[name].refs} | set(refs_in(self.output))
        idle = [ref for ref in self.starts_once if ref not in read]
        if self.starts is not None and idle:
            ends = ", ".join(dict.fromkeys(str(ref) for ref in refs_in(self.output)))
            raise BadEdit(f"{ends} does not depend on {idle[0]}, where the slice was to begin.")

    def _last(self) -> int:
        """The position of the last node that the output needs; the end, if it is the program's own output."""
        graph = self.graph
        return len(graph) if self.is_to_end else max((graph.positions[n] for n in self.nodes), default=-1)

    def _writes(self, last: int) -> tuple[tuple[str, Ref], ...]:
        """The writes to state within the slice."""
        graph = self.graph
        first = -1 if self.starts is None else min(graph.positions[ref.node] for ref in self.starts_once)
        return tuple(
            (address, ref)
            for address, ref in graph.changes
            if first < graph.positions[ref.node] <= last and (ref in self.dependents or ref.node not in self.of_inputs)
        )

    def _names(self) -> dict[Ref, str]:
        """The name of the node for each start and each constant."""
        found: dict[Ref, str] = {}
        for ref in (*self.starts_once, *self.constants):
            whole = not ref.path and ref.node not in self.nodes
            part = "_".join(map(str, ref.path))
            found[ref] = ref.node if whole else unused_name(name_beside(ref.node, f"part_{part}"), self.graph.positions)
        return found

    def _nodes(self, called: dict[Ref, str], refs: dict[Ref, Ref]) -> tuple[list[Node], list[int]]:
        """The slice's nodes, and how many of them come before each position of the whole graph."""
        graph = self.graph
        nodes: list[Node] = []
        if self.starts is not None:
            for number, ref in enumerate(self.starts_once):
                nodes.append(Input(called[ref], (number,), specs_of(graph[ref.node])[ref]))
        places = [len(nodes)]
        held: dict[str, list[Node]] = {}
        for ref in self.constants:
            meaning = specs_of(graph[ref.node])[ref]
            held.setdefault(ref.node, []).append(Const(called[ref], f"recorded value of {ref}", meaning))
        for node in graph.nodes:
            if isinstance(node, Input) and self.starts is None:
                nodes.append(node)
            elif node.name in self.nodes:
                nodes.append(reading(node, refs))
            nodes.extend(held.get(node.name, ()))
            places.append(len(nodes))
        return nodes, places


def _is_differentiated(node: Node) -> bool:
    return isinstance(node, Call) and node.is_differentiated


def _hooked(graph: Graph, ref: Ref) -> Ref:
    """The value behind the hooks that the forward registers on it: gradients that arrive at it pass these."""
    found, same = ref, {ref}
    for call in graph.calls:
        function = call.target.function
        if function in (with_gradient_hook, alias) and call.args[0] in same:
            same.add(Ref(call.name))
            found = Ref(call.name) if function is with_gradient_hook else found
    return found
