"""What is computed once for all layers of a program: topology, module calls, conditions, costs, specs.

In: a Record and its LayerIndex. Out: ProgramFacts. The facts of one layer are properties of `Layer` (layer_facts.py),
those of a whole program are properties of `Program` (program_metadata.py); both read from here. Layers are in execution
order, so one or two passes over them make each table; sets of ancestors are bit sets, one integer per layer. Conditions
come from the guards of the capture, and are not guessed from layers without readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from attrs import frozen

from .._ir.capture_metadata import CaptureMetadata, ParameterInfo
from .._ir.graph import Graph
from .._ir.label import Label
from .._ir.location import Location
from .._ir.node import Call, Const, Guard, Input, Node, Ref, Scope, Source, State, TensorSpec, refs_in, specs_of
from .._ir.util import cached_property
from .._replay.record import Record
from .flops import Cost, cost_of
from .index import LayerIndex


@frozen
class Conditional:
    """One truth value that the model read: `if x.sum() > 0`, `while not done`, `a if flag else b`."""

    layer: str  # the layer that was tested
    value: bool
    source: Source | None  # the line that read it
    taken: Source | None  # the line that followed; None if the value was not tested at once

    def __str__(self) -> str:
        way = f", went on at line {self.taken.line}: {self.taken.text}" if self.taken else ""
        return f"{self.layer} was {self.value} at {self.source}: {self.source.text if self.source else ''}{way}"


@frozen(eq=False)
class Conditionals:
    """The conditions of a graph, computed on first use."""

    graph: Graph

    @cached_property
    def records(self) -> tuple[Conditional, ...]:
        """Every truth value that was read, in order."""
        return tuple([Conditional(g.refs[-1].node, g.result, g.source, g.taken) for g in self._guards])

    @cached_property
    def terminal_bools(self) -> tuple[str, ...]:
        """The layers with a single element that were read this way and by nothing else."""
        graph = self.graph
        read = dict.fromkeys([ref for guard in self._guards for ref in guard.refs if self._is_single(ref)])
        others = graph.orphans.union([ref.node for ref in graph.wanted_refs])
        return tuple(
            dict.fromkeys(
                ref.node
                for ref in read
                if isinstance(graph[ref.node], Call)
                and not graph.users[graph.positions[ref.node]]
                and ref.node not in others
            )
        )

    @cached_property
    def in_branch(self) -> frozenset[str]:
        """The layers that serve a condition and no output."""
        found = self.graph.ancestors(self.terminal_bools) - self._useful
        return frozenset([name for name in found if isinstance(self.graph[name], Call)])

    @cached_property
    def starts(self) -> tuple[tuple[str, str], ...]:
        """The edges into layers that serve only a condition, from layers that also serve an output."""
        graph = self.graph
        return tuple(
            [
                (before.name, node.name)
                for node, parents in zip(graph.nodes, graph.parents, strict=True)
                if node.name in self.in_branch
                for before in map(graph.nodes.__getitem__, parents)
                if before.name in self._useful
            ]
        )

    @cached_property
    def start_layers(self) -> frozenset[str]:
        """The first layers of each condition, where a drawing says IF."""
        return frozenset(name for _, name in self.starts)

    @cached_property
    def _useful(self) -> frozenset[str]:
        """The outputs and state changes of the model, and their ancestors."""
        return self.graph.ancestors([ref.node for ref in self.graph.wanted_refs])

    @property
    def _guards(self) -> list[Guard]:
        return [
            guard
            for guard in self.graph.guards
            if type(guard.result) is bool and guard.kind == "content" and guard.refs
        ]

    def _is_single(self, ref: Ref) -> bool:
        spec = specs_of(self.graph[ref.node]).get(ref)
        return spec is not None and prod(spec.shape) == 1


@frozen(eq=False)
class ModuleCalls:
    """All calls of modules in a forward, in order."""

    graph: Graph
    modules: dict[str, str]  # address -> class

    @cached_property
    def scopes(self) -> dict[str, Scope]:
        """Every call by name, outer calls before inner ones."""
        found: dict[str, Scope] = {}
        inner = [node.scope for node in self.graph.calls if node.scope is not None]
        for scope in (*inner, *(scope for scope, _ in self.graph.module_outputs)):
            chain: list[Scope] = []
            at: Scope | None = scope
            while at is not None and str(at) not in found:
                chain.append(at)
                at = at.parent
            found.update((str(one), one) for one in reversed(chain))
        return found

    @cached_property
    def types(self) -> dict[str, str]:
        """Every module of the model, and every other that was called: address -> class."""
        return self.modules | {s.address: s.kind for s in self.scopes.values() if s.address not in self.modules}

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of calls of each module."""
        found = dict.fromkeys(self.types, 0)
        for scope in self.scopes.values():
            found[scope.address] += 1
        return found

    @cached_property
    def children(self) -> dict[str, tuple[str, ...]]:
        """The direct sub-calls of each call."""
        found: dict[str, list[str]] = {name: [] for name in self.scopes}
        for name, scope in self.scopes.items():
            if scope.parent is not None:
                found[str(scope.parent)].append(name)
        return {name: tuple(names) for name, names in found.items()}

    @cached_property
    def top(self) -> tuple[str, ...]:
        """The calls that are in no other module call."""
        return tuple([name for name, scope in self.scopes.items() if scope.parent is None])

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of operations in each call, sub-calls included."""
        found = dict.fromkeys(self.scopes, 0)
        for node in self.graph.calls:
            for scope in _stack(node):
                found[str(scope)] += 1
        return found

    @cached_property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """By node: the calls that return its value, innermost first."""
        found: dict[str, list[str]] = {}
        for scope, tree in self.graph.module_outputs:
            for name in dict.fromkeys([leaf.node for leaf in refs_in(tree)]):
                found.setdefault(name, []).append(str(scope))
        return {name: tuple(calls) for name, calls in found.items()}

    def entered(self, node: Node, readers: Iterable[Node]) -> tuple[str, ...]:
        """The calls that a value enters: it was computed outside of them and is read inside."""
        own = {str(scope) for scope in _stack(node)}
        names = [str(scope) for reader in readers for scope in _stack(reader)]
        return tuple(dict.fromkeys([name for name in names if name not in own]))

    def bottom_level(self, node: Node) -> str | None:
        """The call that consists of this one operation and returns its value; None if there is none."""
        scope = node.scope if isinstance(node, Call) else None
        if scope is None or self.sizes[str(scope)] != 1 or str(scope) not in self.outputs.get(node.name, ()):
            return None
        return str(scope)


def _stack(node: Node) -> tuple[Scope, ...]:
    return node.scope.stack if isinstance(node, Call) and node.scope is not None else ()


Span = tuple[int, int] | None  # least and most steps; None if there is no path


@frozen(eq=False)
class Topology:
    """Parents and children of each layer, and what follows from them."""

    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]
    is_input: tuple[bool, ...]
    is_output: tuple[bool, ...]
    is_born: tuple[bool, ...]  # created inside the model, from no other layer

    @cached_property
    def from_input(self) -> tuple[Span, ...]:
        """The lengths of the shortest and the longest path from an input."""
        return _spans(range(len(self.parents)), self.parents, self.is_input)

    @cached_property
    def to_output(self) -> tuple[Span, ...]:
        """The lengths of the shortest and the longest path to an output."""
        return _spans(range(len(self.children) - 1, -1, -1), self.children, self.is_output)

    @cached_property
    def _roots(self) -> tuple[int, ...]:
        return tuple([number for number, parents in enumerate(self.parents) if not parents])

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple([number for number, is_end in enumerate(self.is_output) if is_end])

    @cached_property
    def _root_bits(self) -> tuple[int, ...]:
        return _bits(range(len(self.parents)), self.parents, self._roots)

    @cached_property
    def _end_bits(self) -> tuple[int, ...]:
        return _bits(range(len(self.children) - 1, -1, -1), self.children, self._ends)

    def roots_of(self, number: int) -> tuple[int, ...]:
        """The layers without parents that it derives from; itself, if it has none."""
        return tuple([root for bit, root in enumerate(self._roots) if self._root_bits[number] >> bit & 1])

    def ends_of(self, number: int) -> tuple[int, ...]:
        """The output layers that it leads to."""
        return tuple([end for bit, end in enumerate(self._ends) if self._end_bits[number] >> bit & 1])

    def siblings(self, number: int) -> tuple[int, ...]:
        """The layers that share a parent with it."""
        return _others(number, self.parents, self.children)

    def spouses(self, number: int) -> tuple[int, ...]:
        """The layers that share a child with it."""
        return _others(number, self.children, self.parents)


def topology_of(index: LayerIndex) -> Topology:
    """The topology of a program."""
    places = index.places
    ordinals = index.ordinals
    parents = [tuple([ordinals[label] for label in index.parents(place) if label in ordinals]) for place in places]
    children: list[list[int]] = [[] for _ in places]
    for number, above in enumerate(parents):
        for parent in above:
            children[parent].append(number)
    nodes = [index.graph[place.node] if place.output is None else None for place in places]
    return Topology(
        tuple(parents),
        tuple(map(tuple, children)),
        tuple([isinstance(node, Input) for node in nodes]),
        tuple([node is None for node in nodes]),
        tuple([_is_born(node) and not above for node, above in zip(nodes, parents, strict=True)]),
    )


def _is_born(node: object) -> bool:
    return isinstance(node, Call) or (isinstance(node, Const) and node.origin.startswith("made from"))


def _spans(order: range, before: Sequence[tuple[int, ...]], is_start: Sequence[bool]) -> tuple[Span, ...]:
    found: list[Span] = [None] * len(before)
    for number in order:
        known = [span for other in before[number] if (span := found[other]) is not None]
        if is_start[number]:
            found[number] = (0, 0)
        elif known:
            found[number] = min([least for least, _ in known]) + 1, max([most for _, most in known]) + 1
    return tuple(found)


def _bits(order: range, before: Sequence[tuple[int, ...]], marked: Sequence[int]) -> tuple[int, ...]:
    found = [0] * len(before)
    for bit, number in enumerate(marked):
        found[number] = 1 << bit
    for number in order:
        for other in before[number]:
            found[number] |= found[other]
    return tuple(found)


def _others(number: int, there: Sequence[tuple[int, ...]], back: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    found = {other for one in there[number] for other in back[one] if other != number}
    return tuple(sorted(found))


def passes_of_layers(graph: Graph) -> dict[str, int]:
    """The number of passes of each layer, by its label without the pass."""
    names = [Label.of(call.name).layer for call in graph.calls if call.name not in graph.orphans]
    return dict(Counter(names))


def max_recurrent_loops(graph: Graph) -> int:
    """The largest number of passes of any layer; 1 in a feedforward network."""
    return max(passes_of_layers(graph).values(), default=1)


def is_recurrent(graph: Graph) -> bool:
    """True if any layer runs more than once."""
    return max_recurrent_loops(graph) > 1


def is_branching(graph: Graph) -> bool:
    """True if any call or input is read by more than one layer, outputs included."""
    ends = Counter(ref.node for ref in dict.fromkeys(graph.output_refs))
    return any(
        len([user for user in users if graph.nodes[user].name not in graph.orphans]) + ends[node.name] > 1
        for node, users in zip(graph.nodes, graph.users, strict=True)
        if isinstance(node, (Call, Input)) and node.name not in graph.orphans
    )


@frozen(eq=False)
class ProgramFacts:
    """The facts that the layers of a program share, computed on first use."""

    record: Record
    index: LayerIndex

    @property
    def graph(self) -> Graph:
        return self.index.graph

    @property
    def account(self) -> CaptureMetadata:
        return self.record.account

    @cached_property
    def topology(self) -> Topology:
        """Parents, children and distances of the layers."""
        return topology_of(self.index)

    @cached_property
    def module_calls(self) -> ModuleCalls:
        """The nesting, sizes and outputs of module calls."""
        return ModuleCalls(self.graph, dict(zip(self.account.modules, self.account.classes, strict=True)))

    @cached_property
    def conditions(self) -> Conditionals:
        """The truth values that the model read, and the layers that serve them."""
        return Conditionals(self.graph)

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """The cost of each call, by node."""
        return {call.name: cost_of(call, self.graph) for call in self.graph.calls}

    @cached_property
    def parameters(self) -> dict[str, ParameterInfo]:
        """The model's parameters by each of their names, read or not."""
        read = {node.name: self._parameter(node) for node in self.graph.state_nodes if node.kind == "parameter"}
        known = (*read.values(), *self.account.unread)
        return read | {name: parameter for parameter in known for name in (parameter.address, *parameter.aliases)}

    def _parameter(self, node: State) -> ParameterInfo:
        tensor = self.record.values.get(Ref(node.name))
        trains = tensor.requires_grad if tensor is not None else node.name not in self.account.untrained
        return ParameterInfo(node.address, node.spec.shape, node.spec.dtype, trains, node.aliases)

    def refs(self, place: Location) -> tuple[Ref, ...]:
        """The values of a layer, as the model saw them."""
        return tuple(dict.fromkeys(refs_in(place.tree(self.graph))))

    def specs(self, place: Location) -> tuple[TensorSpec, ...]:
        """The spec of each value of a layer."""
        refs = self.refs(place)
        known = {name: specs_of(self.graph[name]) for name in {ref.node for ref in refs}}
        return tuple([known[ref.node][ref] for ref in refs])

    def spec(self, place: Location) -> TensorSpec | None:
        """The spec of its value if that is a tensor; None for a container of tensors, even of one."""
        tree = place.tree(self.graph)
        return specs_of(self.graph[place.node])[tree] if type(tree) is Ref else None

    def nbytes(self, place: Location) -> int:
        """The size of its values in bytes."""
        return sum([spec.nbytes for spec in self.specs(place)])

    def is_saved(self, place: Location) -> bool:
        """True if its values are kept."""
        return all(ref in self.record.values for ref in self.refs(place))
