"""What a well-formed Graph obeys.

In: a Graph. Out: every breach, in program order, as data. A builder asks before it gives a graph away, an edit after
every move.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from ..errors import UnlawfulGraph
from .graph import Graph
from .node import Call, Generator, Ref, meanings_of, refs_in
from .trees import leaves_of


@frozen
class Problem:
    """One breach: the node at which it shows, and what is wrong there."""

    node: str
    law: str
    fact: str

    def __str__(self) -> str:
        return f"{self.node}: {self.fact}"


def problems(graph: Graph) -> tuple[Problem, ...]:
    """All breaches of all laws, in program order."""
    found = (
        *_single_assignment(graph),
        *_reads_what_is_there(graph),
        *_draws_are_named(graph),
        *_guards_are_in_place(graph),
        *_runs_again_what_was_before(graph),
    )
    return tuple(sorted(found, key=lambda problem: graph.positions.get(problem.node, len(graph))))


def require_lawful(graph: Graph) -> Graph:
    """The graph itself, or `UnlawfulGraph` with the list of what is wrong."""
    if found := problems(graph):
        listing = "\n".join(f"  {problem}" for problem in found[:20])
        raise UnlawfulGraph(f"the graph breaks {len(found)} laws:\n{listing}")
    return graph


def _single_assignment(graph: Graph) -> Iterator[Problem]:
    seen: set[str] = set()
    for node in graph.nodes:
        if node.name in seen:
            yield Problem(node.name, "single assignment", "the name is given twice")
        seen.add(node.name)


def _reads_what_is_there(graph: Graph) -> Iterator[Problem]:
    parts: set[Ref] = set()
    for node in graph.nodes:
        if isinstance(node, Call):
            yield from (
                Problem(node.name, "order", f"reads {ref}, which no earlier node gives")
                for ref in node.refs
                if ref not in parts
            )
            if type(node.returns) is not Ref:
                parts.update(refs_in(node.returns))
        parts.add(Ref(node.name))
    ends = [ref for ref in graph.wanted_refs if ref not in parts]
    yield from (Problem("output", "order", f"gives {ref}, which no node gives") for ref in ends)


def _draws_are_named(graph: Graph) -> Iterator[Problem]:
    for call in graph.calls:
        if call.draws is None and leaves_of(Generator, call.args):
            yield Problem(call.name, "draws", "has a generator but no recorded state")


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


def unasked(graph: Graph) -> Iterator[Problem]:
    """Shapes that content decides and that no guard asks for: a program that was captured has none."""
    asked = {ref for guard in graph.guards if guard.kind == "shape" for ref in guard.refs}
    for call in graph.calls:
        if call.is_dynamic and not asked.issuperset(meanings_of(call)):
            yield Problem(call.name, "guard", "gives a shape that content decides, and no guard asks for it")


def _runs_again_what_was_before(graph: Graph) -> Iterator[Problem]:
    for position, node in enumerate(graph.nodes):
        for name in node.through if isinstance(node, Call) else ():
            if graph.positions.get(name, position) >= position:
                yield Problem(node.name, "order", f"runs {name} again, which does not run before it")
