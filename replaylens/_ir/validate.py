"""The laws of a well-formed Graph.

In: a Graph. Out: every violation, in program order, as data. Whoever builds a graph checks it before handing it on, and
every edit checks what it made. The laws:

- each name is given once, and each value is read after the node that gives it;
- a call that takes a generator names the generator's recorded state;
- a guard stands behind the nodes that it reads;
- a call that runs others again stands behind them;
- `Write` and `InnerGradient` have the arguments that their classes describe, and no other call runs `mutate`;
- a call that stands for the model's own call of a function has that function first.

One more holds of captured graphs and of edited ones: each shape that depends on content has a guard, which a patch
takes over from the value that it stands for (`unguarded_shapes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from attrs import frozen

from ..errors import UnlawfulGraph
from .graph import GradientArguments, Graph, InnerGradient
from .node import Call, Generator, Input, Ref, refs_in, specs_of
from .target import Target
from .trees import ATOMS, Branch, leaves, leaves_of
from .write import (
    DerivedView,
    Hole,
    TargetIndex,
    ViewStep,
    Write,
    WriteArguments,
    WriteResults,
    is_wrapper,
    mutate,
    places_in,
    unpacked_place,
)

MUTATE = Target.of(mutate)
_well_formed: WeakValueDictionary[int, Call] = WeakValueDictionary()  # writes are frozen, so each is checked once


@frozen
class Problem:
    """One violation: the node at which it shows, the law, and the fact."""

    node: str
    law: str
    fact: str

    def __str__(self) -> str:
        return f"{self.node}: {self.fact}"


def problems(graph: Graph) -> tuple[Problem, ...]:
    """All violations of all laws, in program order."""
    found = (
        *_single_assignment(graph),
        *_reads_what_is_there(graph),
        *_draws_are_named(graph),
        *_guards_are_in_place(graph),
        *_runs_again_what_was_before(graph),
        *_kinds_of_call_are_well_formed(graph),
    )
    return tuple(sorted(found, key=lambda problem: graph.positions.get(problem.node, len(graph))))


def require_lawful(graph: Graph) -> Graph:
    """The graph itself, or `UnlawfulGraph` with a list of what is wrong."""
    if found := problems(graph):
        listing = "\n".join(f"  {problem}" for problem in found[:20])
        raise UnlawfulGraph(f"the graph breaks {len(found)} laws:\n{listing}")
    return graph


def _single_assignment(graph: Graph) -> Iterator[Problem]:
    seen: set[str] = set()
    for node in graph.nodes if len({node.name for node in graph.nodes}) < len(graph) else ():
        if node.name in seen:
            yield Problem(node.name, "single assignment", "the name is given twice")
        seen.add(node.name)


def _reads_what_is_there(graph: Graph) -> Iterator[Problem]:
    names: set[str] = set()
    parts: set[Ref] = set()

    def is_given(ref: Ref) -> bool:
        return ref.node in names if not ref.path else ref in parts

    for node, refs in zip(graph.nodes, graph.refs, strict=True):
        if isinstance(node, Call):
            for ref in refs:
                if not (ref in parts if ref.path else ref.node in names):
                    yield Problem(node.name, "order", f"reads {ref}, which no earlier node gives")
            if type(node.returns) is not Ref:
                parts.update(refs_in(node.returns))
        names.add(node.name)
    ends = [ref for ref in graph.wanted_refs if not is_given(ref)]
    yield from (Problem("output", "order", f"gives {ref}, which no node gives") for ref in ends)


def _draws_are_named(graph: Graph) -> Iterator[Problem]:
    for call in graph.calls:
        if call.draws is None and not _PLAIN.issuperset(map(type, call.args)) and leaves_of(Generator, call.args):
            yield Problem(call.name, "draws", "has a generator but no recorded state")


_PLAIN = ATOMS | {Ref}


def _guards_are_in_place(graph: Graph) -> Iterator[Problem]:
    for guard in graph.guards:
        what = f"`{guard.target.short}`"
        if not 0 <= guard.position <= len(graph):
            yield Problem("guard", "order", f"{what} lies at {guard.position}, outside of 0..{len(graph)}")
        yield from (
            Problem(ref.node, "order", f"{what} reads {ref}, which no node before it gives")
            for ref in guard.refs
            if graph.positions.get(ref.node, len(graph)) >= guard.position
        )


def unguarded_shapes(graph: Graph) -> Iterator[Problem]:
    """Shapes that depend on content and that no guard checks: a program has none. A patch gives a value of the same
    shape, and the model's Python reads that of the patch.
    """
    asked = {ref for guard in graph.guards if guard.kind == "shape" for ref in guard.refs}
    patches = {call.edits: call for call in graph.calls if call.edits is not None}

    def is_asked(call: Call) -> bool:
        patch = patches.get(call.name)
        if patch is None:
            return asked.issuperset(specs_of(call))
        return not asked.isdisjoint(specs_of(patch)) or is_asked(patch)

    for call in graph.calls:
        if call.is_dynamic and not is_asked(call):
            yield Problem(call.name, "guard", "gives a shape that content decides, and no guard asks for it")


# -- what fits together ------------------------------------------------------------------------------------------------


def misfits(graph: Graph) -> Iterator[Problem]:
    """Facts of a graph that obeys the laws, and that do not fit together: references to what no node gives, specs of
    other values. Passes keep them; so only checks and loaded programs are asked.
    """
    yield from _dangling(graph)
    yield from _specs(graph)
    yield from _state(graph)


def require_sound(graph: Graph) -> Graph:
    """The graph itself, or `UnlawfulGraph`: the laws, and everything that must fit together."""
    require_lawful(graph)
    if found := [*misfits(graph), *_nowhere(graph)]:
        listing = "\n".join(f"  {problem}" for problem in found[:20])
        raise UnlawfulGraph(f"the graph does not fit together in {len(found)} places:\n{listing}")
    return graph


def _is_given(graph: Graph, ref: Ref) -> bool:
    return ref.node in graph and (not ref.path or ref in graph.gives[graph.positions[ref.node]])


def _dangling(graph: Graph) -> Iterator[Problem]:
    """References to missing nodes in the inputs, outputs, state changes and orphans."""
    places: list[tuple[str, Any]] = [("the inputs", graph.inputs), ("the output", graph.output)]
    places += [(f"the output of module {scope}", tree) for scope, tree in graph.module_outputs]
    places += [(f"the new value of `{address}`", ref) for address, ref in graph.changes]
    for what, tree in places:
        for ref in refs_in(tree):
            if not _is_given(graph, ref):
                yield Problem(ref.node, "reference", f"{what} is {ref}, which no node gives")
    for name in sorted(graph.orphans - graph.positions.keys()):
        yield Problem(name, "reference", "is set aside as an orphan, and is no node")
    for ref in dict.fromkeys(refs_in(graph.inputs)):
        if _is_given(graph, ref) and not isinstance(graph[ref.node], Input):
            yield Problem(ref.node, "reference", "stands among the inputs, and is none")


def _specs(graph: Graph) -> Iterator[Problem]:
    """Calls whose specs do not match their values, and values that belong to another node."""
    for call in graph.calls:
        count = len(refs_in(call.returns))
        if count != len(call.spec):
            yield Problem(call.name, "spec", f"gives {count} tensors, and says of {len(call.spec)} what they are")
        for ref in (*refs_in(call.returns), *refs_in(call.result)):
            if ref.node != call.name:
                yield Problem(call.name, "spec", f"gives {ref}, which is another node's")


def _state(graph: Graph) -> Iterator[Problem]:
    seen = Counter(name for node in graph.state_nodes for name in (node.address, *node.aliases))
    for address, nodes in seen.items():
        if nodes > 1:
            yield Problem(address, "state", f"{nodes} nodes are the state at `{address}`")


def _nowhere(graph: Graph) -> Iterator[Problem]:
    """What only a file can have: facts about values that no node gives, and inputs that lie elsewhere."""
    for guard in (*graph.guards, *graph.asked):
        for ref in guard.refs:
            if not _is_given(graph, ref):
                yield Problem(ref.node, "reference", f"`{guard.target.short}` asks of {ref}, which no node gives")
        if not 0 <= guard.position <= len(graph):
            yield Problem("guard", "order", f"lies at {guard.position}, outside of 0..{len(graph)}")
    for call in graph.calls:
        for ref in refs_in(call.returns):
            if not _leads_to(call.returns, ref):
                yield Problem(call.name, "reference", f"{ref} does not lie where it says")
        shown = refs_in(call.result)
        if call.result is not None and not shown:
            yield Problem(call.name, "reference", "shows nothing of what it gives")
        for ref in shown:
            if not _is_given(graph, ref):
                yield Problem(call.name, "reference", f"shows {ref}, which it does not give")
    given = {ref.node for ref in refs_in(graph.inputs)}
    for node in graph.input_nodes if graph.inputs else ():
        if node.name not in given:
            yield Problem(node.name, "reference", "is an input, and stands nowhere among them")
    for ref in sorted(graph.detached_inputs, key=str):
        if not _is_given(graph, ref):
            yield Problem(ref.node, "reference", "is an input of a slice, and no node")


def _leads_to(tree: Any, ref: Ref) -> bool:
    """True if the path of a Ref leads to it in the tree of what its node returns."""
    for step in ref.path:
        items = tree if type(tree) is tuple else tree.items if type(tree) is Branch else ()
        if not 0 <= step < len(items):
            return False
        tree = items[step]
    return bool(tree == ref)


def _runs_again_what_was_before(graph: Graph) -> Iterator[Problem]:
    for position, node in enumerate(graph.nodes) if any(call.through for call in graph.calls) else ():
        for name in node.through if isinstance(node, Call) else ():
            if graph.positions.get(name, position) >= position:
                yield Problem(node.name, "order", f"runs {name} again, which does not run before it")


def _kinds_of_call_are_well_formed(graph: Graph) -> Iterator[Problem]:
    for call in graph.calls:
        if isinstance(call, Write):
            if _well_formed.get(id(call)) is not call:
                faults = [Problem(call.name, "write", fact) for fact in _faults_of_write(call)]
                yield from faults
                if not faults:
                    _well_formed[id(call)] = call
        elif isinstance(call, InnerGradient):
            yield from (Problem(call.name, "inner gradient", fact) for fact in _faults_of_gradient(call))
        elif call.target == MUTATE:
            yield Problem(call.name, "write", "writes in place and is no Write")
        elif is_wrapper(call.target.function) and not isinstance(next(iter(call.args), None), Target):
            yield Problem(call.name, "wrapper", f"stands for a call of a function, and {call.target.short} has none")
        elif call.through:
            yield Problem(call.name, "inner gradient", "runs others again and is no InnerGradient")


def _faults_of_write(write: Write) -> Iterator[str]:
    if write.target != MUTATE:
        yield f"is a Write and calls {write.target.short}"
    if len(write.args) != len(WriteArguments._fields) or write.kwargs:
        yield f"is given {len(write.args)} arguments, not {', '.join(WriteArguments._fields)}"
        return
    given = write.arguments
    bases, targets, values = given.bases, given.targets, given.values
    if not isinstance(given.function, Target):
        yield f"calls {given.function!r:.40}, which is no function by name"
    if not _is_dict(given.kwargs):
        yield "has keyword arguments without names"
    if not {*map(type, (bases, targets, values, given.args))} <= {tuple}:
        yield "has arguments that are no tuples"
        return
    if type(bases) is not tuple or not bases or len({*bases}) < len(bases) or {*map(type, bases)} != {Ref}:
        yield "has bases that are not one value each"
    stand = places_in((given.args, given.kwargs))
    views = [*map(unpacked_place, targets), *[place for place in stand if type(place) is DerivedView]]
    if not all(type(view) is DerivedView and _is_number(view.base, len(bases)) for view in views):
        yield "has a target that is a view of no base"
    elif not all(type(view.steps) is tuple and all(map(_is_step, view.steps)) for view in views):
        yield "has a view that is not one of one tensor"
    if not all(_is_number(place.number, len(targets)) for place in stand if type(place) is TargetIndex):
        yield "has an argument that is none of its targets"
    if len(values) != len(targets) or not {*map(type, values)} <= {Ref, type(None)}:
        yield f"has {len(values)} values for {len(targets)} targets"
    gives = write.returns if type(write.returns) is tuple else ()
    is_whole = len(gives) == len(WriteResults._fields) and len(write.gives.bases) == len(bases)
    if not is_whole or not 0 < len(write.gives.targets) <= len(targets):
        yield "does not give what it wrote, and each base"


def _is_number(value: Any, count: int) -> bool:
    return type(value) is int and 0 <= value < count


def _is_dict(tree: Any) -> bool:
    return type(tree) is Branch and tree.kind is dict and all(type(key) is str for key in tree.keys or ())


def _is_step(tree: Any) -> bool:
    """True for a call that makes a view of one tensor."""
    if not (type(tree) is Branch and tree.kind is ViewStep and len(tree.items) == len(ViewStep._fields)):
        return False
    function, args, kwargs, part, grad = tree.items
    fits = type(function) is Target and type(args) is tuple and _is_dict(kwargs) and type(grad) is bool
    is_part = type(part) is tuple and {*map(type, part)} <= {int}
    return fits and is_part and [*leaves(tree.items)].count(Hole.HERE) == 1


def _faults_of_gradient(call: InnerGradient) -> Iterator[str]:
    if len(call.args) != len(GradientArguments._fields) or not isinstance(call.args[0], Graph):
        yield f"is given {len(call.args)} arguments, not {', '.join(GradientArguments._fields)}"
        return
    given, stretch = call.arguments, call.arguments.stretch
    if len(stretch.input_nodes) != len(given.starts) + len(given.others):
        yield "does not give its stretch each input"
    if call.through and len(stretch.calls) != len(call.through):
        yield f"runs {len(call.through)} nodes again, and has {len(stretch.calls)} in its stretch"
    if type(stretch.output) is not tuple or len(stretch.output) != 2 or len(stretch.output[0]) != len(given.cotangents):
        yield "does not have a cotangent for each output of its stretch"
    if missing := {inner.draws for inner in stretch.calls if inner.draws} - set(given.states.keys or ()):
        yield f"has no state for {', '.join(sorted(missing))}"
    if bool(given.there) != given.keep_graph:
        yield "has the values of its stretch exactly where it is not differentiated again"
