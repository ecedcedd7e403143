"""Another function in place of an operation, or behind a value: recorded on the values that it gets there, and
spliced.

In: a Record, the nodes, and a function: torch's, a module, any Python. Out: the Record of a program in which the calls
of that function stand there. Its parameters become state of the program, its draws are recorded, and its writes in
place stay its own. How a function is recorded is not known here: the recorder is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from .._edit.arguments import Arguments, fitted, name_of
from .._edit.rewrite import Splice, inward, names_within, replace, splice, unread_sources, without
from .._edit.unwrite import with_plain
from .._ir.copies import writable_copy
from .._ir.equality import same_content
from .._ir.graph import Graph
from .._ir.label import fresh
from .._ir.node import Call, Const, Node, Ref, State, TensorSpec, filled, specs_of, value_of
from .._ir.runtime import alias
from .._ir.target import Target
from .._ir.trees import Branch, freeze_deep, thaw
from .._ir.world import drawing_alone
from .._ir.write import original_call
from ..errors import BadEdit, ReplaylensError
from .alias_analysis import detached_views
from .apply_edit import EditAdditions, apply_edit, handed_back, shares_memory
from .deferred import mark_of
from .edits import Recorder
from .guards import diverged, misdirected, node_of
from .record import Record


@frozen(eq=False)
class SwapSite:
    """A plain call that a function replaces, and what the function is given there."""

    name: str
    given: Arguments
    edited: str
    wanted: TensorSpec | None = None  # of its value, where no recorded node says so


def swap(
    record: Record,
    names: Iterable[str],
    function: Callable[..., Any],
    recorder: Recorder,
    with_args: bool = True,
    on_divergence: str = "raise",
) -> tuple[Record, Any]:
    """A function in place of some calls."""
    graph, sites = record.graph, []
    for name in names:
        node = graph[name]
        while isinstance(node, Call) and node.edits is not None:  # a patch: what it patches is meant
            node = graph[node.edits]
        if is_call_of(node, function):
            continue
        graph, plain = with_plain(graph, node.name)
        call = graph[plain]
        assert isinstance(call, Call)
        wanted = call.meaning[0] if plain != node.name else None
        sites.append(SwapSite(plain, fitted(graph, call, function, with_args), f"was {call.kind}", wanted))
    return _recorded(record, graph, sites, function, recorder, on_divergence)


def is_call_of(node: Node, function: Callable[..., Any]) -> bool:
    """True if this is the very call that a swap for the function would give."""
    return isinstance(node, Call) and original_call(node).target.function is function


def insert(
    record: Record,
    refs: Iterable[Ref],
    function: Callable[..., Any],
    recorder: Recorder,
    on_divergence: str = "raise",
) -> tuple[Record, Any]:
    """A function behind some values: all their readers read its result instead."""
    graph, sites = record.graph, []
    for ref in refs:
        node = graph[ref.node]
        if isinstance(node, Call) and on_divergence == "raise":
            for departure in misdirected(node, False):
                raise diverged(departure)
        name = fresh(f"{name_of(function).lower().replace('_', '')}_after_{ref.node}", graph.positions)
        meaning = specs_of(node)[ref]
        place = Call(
            name,
            "alias",
            Target.of(alias),
            (ref,),
            returns=Ref(name),
            meaning=(meaning,),
            context=node.context if isinstance(node, Call) else graph.ambient,
            scope=node.scope if isinstance(node, Call) else None,
            source=node.source if isinstance(node, Call) else None,
        )
        kept = {"module_outputs": graph.module_outputs, "changes": graph.changes}
        graph = replace(graph, {node.name: (node, place)}, {ref: Ref(name)}, **kept)
        sites.append(SwapSite(name, Arguments((ref,)), f"inserted after {ref}", meaning))
    made, output = _recorded(record, graph, sites, function, recorder, on_divergence)
    if on_divergence == "raise" and detached_views(made.graph, ()):
        for site in sites:
            call, (given,) = made.graph[site.name], site.given.args
            if isinstance(call, Call) and shares_memory(made.values, (Ref(site.name),), (given,)):
                raise diverged(handed_back(call))
    return made, output


def _recorded(
    record: Record,
    graph: Graph,
    sites: list[SwapSite],
    function: Callable[..., Any],
    recorder: Recorder,
    on_divergence: str,
) -> tuple[Record, Any]:
    """The graph with the calls of the function at each site, as recorded in one run through all of them."""
    with drawing_alone():
        trial = _SwapTrial(graph, function, recorder)
        places = {site.name: (trial.place(site),) for site in sites}
        wanted = {Ref(site.name): site.wanted for site in sites if site.wanted is not None}
        trial.run(record, replace(graph, places), wanted, on_divergence)
    spliced = _SplicedGraph(record, graph)
    for site in sites:
        spliced.splice_in(site, trial.seen[site.name])
    made = without(spliced.graph, unread_sources(record.graph, spliced.graph))
    return apply_edit(record, made, EditAdditions(spliced.values, spliced.live, spliced.draws), on_divergence, wanted)


# -- seeing what the function does -------------------------------------------------------------------------------------


@define(eq=False)
class _SwapTrial:
    """One run in which the function itself stands at its sites, and is recorded at each."""

    graph: Graph
    function: Callable[..., Any]
    recorder: Recorder
    seen: dict[str, Record] = field(factory=dict)
    generator: torch.Tensor = field(factory=lambda: torch.default_generator.get_state())

    def place(self, site: SwapSite) -> Call:
        """The call that stands at a site during the trial."""
        call = self.graph[site.name]
        assert isinstance(call, Call)

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._watch(call, site, args, kwargs)

        target = Target(name_of(self.function), watched, is_stable=False)
        plain = evolve(call, target=target, draws=None, is_dynamic=False, edited=site.edited)
        return evolve(plain, args=site.given.args, kwargs=site.given.kwargs)

    def run(self, record: Record, graph: Graph, wanted: Mapping[Ref, TensorSpec], on_divergence: str) -> None:
        """Runs what the sites can reach. The function draws from the generators as it would anywhere."""
        try:
            apply_edit(record, graph, on_divergence="ignore", wanted=wanted)
        except ReplaylensError:
            raise
        except Exception as error:  # of the model's own operation, perhaps: then it is a departure
            node = graph[name] if (name := node_of(error)) in graph else None
            if on_divergence == "ignore" or node is None or (isinstance(node, Call) and node.edited):
                raise
            apply_edit(record, graph, wanted=wanted)
            raise
        torch.default_generator.set_state(self.generator)

    def _watch(self, call: Call, site: SwapSite, args: Any, kwargs: Any) -> Any:
        order = iter(site.given.in_order)
        copies: dict[Ref, torch.Tensor] = {}  # one for each value that it is given, and for one given twice
        originals: dict[Ref, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            ref = next(order)
            if ref not in copies:
                copies[ref], originals[ref] = writable_copy(tensor), tensor
            return copies[ref]

        given, named = thaw(freeze_deep((args, kwargs), copy), lambda leaf: leaf)
        outside = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator)
        try:
            marks = [(tensor, copies[ref].detach(), mark_of(copies[ref])) for ref, tensor in originals.items()]
            seen = self.recorder(self.function, given, named)
            if any(mark_of(there) == mark and not same_content(there, tensor) for tensor, there, mark in marks):
                seen = evolve(seen, graph=evolve(seen.graph, one_way=(*seen.graph.one_way, _UNSEEN)))
            self.seen[call.name] = seen
        finally:
            self.generator = torch.default_generator.get_state()
            torch.default_generator.set_state(outside)
        _restore_buffers(seen)
        _require_alike(call, seen.graph.output, self.function)
        return filled(seen.graph.output, seen.values.__getitem__)


_UNSEEN = (
    "a function that writes what it is given by .data or numpy: torch's own backward reads what is there by then, "
    "without a sign. Let it compute with a copy."
)


def _restore_buffers(seen: Record) -> None:
    """Undoes what the function wrote to its own buffers: an edit leaves the function as it was."""
    names = {node.address: node.name for node in seen.graph.state_nodes}
    with torch.no_grad():
        for address, _ in seen.graph.changes:
            if (name := names.get(address)) is not None and name in seen.live:
                seen.live[name].copy_(seen.values[Ref(name)])


def _require_alike(call: Call, output: Any, function: Callable[..., Any]) -> None:
    """Raises unless the function gives as many tensors as the call, in the same order."""
    before, after = _shape(value_of(call)), _shape(output)
    if before != after:
        raise BadEdit(f"{call.name} gives {_shape_text(before)}; {name_of(function)} gives {_shape_text(after)}.")


def _shape(tree: Any) -> Any:
    """The containers of a tree, with a dot for each tensor."""
    if type(tree) is Ref:
        return "."
    is_sequence = isinstance(tree, Branch) and issubclass(tree.kind, (list, tuple))
    items = tree.items if is_sequence else tree if type(tree) is tuple else None
    return type(tree).__name__ if items is None else tuple(map(_shape, items))


def _shape_text(shape: Any) -> str:
    if shape == ".":
        return "a tensor"
    return str(shape).replace("'.'", "tensor").replace(",)", ")") if isinstance(shape, tuple) else str(shape)


# -- putting it there --------------------------------------------------------------------------------------------------


class _SplicedGraph:
    """The graph as it grows, and the tensors of what was spliced into it."""

    def __init__(self, record: Record, graph: Graph) -> None:
        self.graph, self.record = graph, record
        self.values: dict[str, torch.Tensor] = {}
        self.live: dict[str, torch.Tensor] = {}
        self.draws: dict[str, torch.Tensor] = {}
        live = [(node, record.live[node.name]) for node in graph.state_nodes if node.name in record.live]
        self.now = {id(tensor): Ref(node.name) for node, tensor in live}  # what a tensor of the model's own holds
        self.home = {id(tensor): node.address for node, tensor in live}

    def splice_in(self, site: SwapSite, seen: Record) -> None:
        """Splices the calls recorded at a site into it."""
        owner, tensors = site.name, _sources(seen)
        shared = {Ref(name): ref for name, tensor in tensors.items() if (ref := self.now.get(id(tensor))) is not None}
        names = {
            node.name: fresh(f"{owner}.{node.address}", self.graph.positions)
            for node in seen.graph.state_nodes
            if node.kind == "parameter"
        }
        keys = {key: fresh(f"{key}_of_{owner}", {**self.record.draws, **self.draws}) for key in seen.draws}
        sub, how = _addressed(seen.graph, owner), Splice(site.given.refs, shared, names, keys, site.edited)
        called = names_within(self.graph, owner, sub, how)
        there = inward(self.graph, owner, sub, how)
        self.graph = splice(self.graph, owner, sub, how)
        self.draws.update({keys[key]: state for key, state in seen.draws.items()})
        homes = {node.name: node.address for node in sub.state_nodes}
        for name, tensor in tensors.items():
            if name not in called:
                continue
            self.values[called[name]] = seen.values[Ref(name)]
            self.now[id(tensor)] = Ref(called[name])
            if name in homes:
                self.home[id(tensor)] = homes[name]
            if name in seen.live or tensor.requires_grad:
                self.live[called[name]] = tensor
        self._take_writes(sub, tensors, there)

    def _take_writes(self, sub: Graph, tensors: Mapping[str, torch.Tensor], there: Callable[[Any], Any]) -> None:
        """The program takes over what the function writes to its own buffers; the next site reads it from there."""
        held = {node.address: tensors[node.name] for node in sub.state_nodes}
        changes = dict(self.graph.changes)
        for address, ref in sub.changes:
            tensor = held.get(address)
            if tensor is None:
                changes[address] = there(ref)
            else:
                changes[self.home[id(tensor)]] = self.now[id(tensor)] = there(ref)
        self.graph = evolve(self.graph, changes=tuple(changes.items()))


def _sources(seen: Record) -> dict[str, torch.Tensor]:
    """The very tensors that the function read besides its arguments, by the nodes that stand for them."""
    nodes: tuple[State | Const, ...] = (*seen.graph.state_nodes, *seen.graph.const_nodes)
    return {node.name: seen.live.get(node.name, seen.values[Ref(node.name)]) for node in nodes}


def _addressed(graph: Graph, owner: str) -> Graph:
    """The graph with its state under addresses of the program: those of the function, behind the name of the site."""

    def moved(node: Node) -> Node:
        if not isinstance(node, State):
            return node
        return evolve(node, address=f"{owner}.{node.address}", aliases=tuple([f"{owner}.{a}" for a in node.aliases]))

    changes = tuple([(f"{owner}.{address}", ref) for address, ref in graph.changes])
    return evolve(graph, nodes=tuple(map(moved, graph.nodes)), changes=changes)
