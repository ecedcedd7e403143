"""A program under test, and the laws of a program as a whole.

In: a record and what the model returned. Out: the results of three laws: a whole replay returns what the model
returned, the saved values are intact, the graph is well formed. The replay is the one that users run. It marks calls as
verified on the way: a call whose parents are verified read the recorded bits, and if it also gave the recorded bits,
the laws of single calls need not run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._ir.equality import difference, same, tensor_kind
from .._ir.graph import Graph
from .._ir.node import Call, Ref, State, specs_of
from .._ir.printer import expression
from .._ir.trees import Branch, freeze_deep, leaves, map_leaves, part_at
from .._ir.util import cached_property, notes_of
from .._ir.validate import misfits, problems, unguarded_shapes
from .._replay.interpreter import Code
from .._replay.record import Record
from .._replay.replay import replay
from .._replay.request import Request
from .._replay.supply import Run
from ..errors import DivergedReplay
from .foreseen import oversized
from .report import Finding, LawResult, finding_at, finding_at_name


@frozen(eq=False)
class ProgramUnderTest:
    """A program, and what is known in one check of it."""

    record: Record
    returned: Any  # what the model returned
    as_captured: bool  # no edit changed it since the capture
    sample: float | None = None  # how many calls are checked on their own, or what fraction of them
    progress: bool | None = None
    fewest_alike: float = 4  # from so many on, alike calls are tested together; infinite: each by itself
    many_operands: float = 16  # from so many on, the operands of one call are tested together; infinite: each by itself
    verified: set[int] = field(factory=set)  # positions of calls that reproduced their saved values in the whole replay
    per_node: dict[str, LawResult] = field(factory=dict)  # the results of the laws of single calls, from one walk

    @property
    def graph(self) -> Graph:
        return self.record.graph

    @cached_property
    def stale(self) -> frozenset[Ref]:
        """The values that were overwritten since they were recorded, which no other law can use."""
        return frozenset([ref for ref in self.record.values if self.record.stale(ref) is not None])

    @cached_property
    def chosen(self) -> frozenset[int]:
        """The calls that are checked on their own: all, or an even and reproducible sample."""
        calls = [position for position, node in enumerate(self.graph.nodes) if isinstance(node, Call)]
        if self.sample is None:
            return frozenset(calls)
        wanted = self.sample if isinstance(self.sample, int) else max(1, round(self.sample * len(calls)))
        count = min(len(calls), wanted)
        return frozenset([calls[(2 * number + 1) * len(calls) // (2 * count)] for number in range(count)])

    def verifying(self, code: Code) -> Code:
        """The code of a replay, wrapped to mark verified calls."""
        count = len(self.graph)
        return code.wrapped(lambda slot, call: VerifyingCall(self, slot, call) if slot < count else call)

    def is_right(self, position: int, node: Call, made: Any) -> bool:
        """True if a call gave the recorded bits, and read them."""
        saved = self.record.values
        gives = self.graph.gives[position]
        if node.through or not all(ref in saved for ref in (*self.graph.refs[position], *gives)):
            return False
        calls = [parent for parent in self.graph.parents[position] if isinstance(self.graph.nodes[parent], Call)]
        return self.verified.issuperset(calls) and all(same(part_at(made, ref.path), saved[ref]) for ref in gives)


@frozen(eq=False)
class VerifyingCall:
    """A call of the whole replay: it marks its node as verified where it gives the recorded bits."""

    program: ProgramUnderTest
    position: int
    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        before = torch.default_generator.get_state()
        made = self.call(*args)
        node = self.program.graph.nodes[self.position]
        if isinstance(node, Call) and self.program.is_right(self.position, node, made):
            drew = not torch.equal(before, torch.default_generator.get_state())
            if node.draws is not None or not drew:
                self.program.verified.add(self.position)
        return made


def whole_replay(program: ProgramUnderTest) -> LawResult:
    """Compare the output and the state changes of an unpatched replay; mark the calls that it verifies."""
    record, graph = program.record, program.graph
    asked, unit = len(graph.output_refs), f"outputs, {len(graph.changes)} state changes"
    if program.stale:
        return LawResult(skipped="a saved value was overwritten")
    try:
        run = replay(record, Request(whole=True, on_divergence="raise"), lambda name: name, program.verifying)
    except DivergedReplay as error:
        return LawResult(asked, (Finding("", f"leaves the recorded path: {_first_line(error)}"),), unit=unit)
    except Exception as error:
        name = next((words[1] for words in map(_node_of, notes_of(error)) if words), "")
        return LawResult(asked, (finding_at_name(graph, name, f"raises {type(error).__name__}"),), unit=unit)
    failures = (*_outputs(record, program.returned, run), *_changes(record, run))
    return LawResult(asked, failures, unit=unit, holds="bit for bit")


def _outputs(record: Record, returned: Any, run: Run) -> Iterator[Finding]:
    """Compare the output with what the model returned, and that with the saved values."""
    graph = record.graph
    mine, made = _opened(run.output)
    theirs, wanted = _opened(returned)
    if _shape_of(mine) != _shape_of(theirs):
        fact = f"the output is {_short(mine)}, and the model returned {_short(theirs)}"
        yield Finding("", fact)
        return
    refs = graph.output_refs if len(graph.output_refs) == len(made) else ()
    for number, (one, other) in enumerate(zip(made, wanted, strict=True)):
        name = refs[number].node if refs else ""
        if not same(one, other):
            yield _value_difference(graph, name, f"output {number + 1} is another than the model returned", one, other)
        elif refs and refs[number] in record.values and not same(record.values[refs[number]], other):
            yield _value_difference(graph, name, f"output {number + 1} was saved as another value", one, other)


def _changes(record: Record, run: Run) -> Iterator[Finding]:
    for address, ref in record.graph.changes:
        now = run.state_changes[address]
        if now is not None and ref in record.values and not same(now, record.values[ref]):
            fact = f"what the model writes to `{address}` comes out as another value"
            yield _value_difference(record.graph, ref.node, fact, now, record.values[ref])


def _value_difference(graph: Graph, name: str, fact: str, one: torch.Tensor, other: torch.Tensor) -> Finding:
    kinds = f": {tensor_kind(one)[:3]}, not {tensor_kind(other)[:3]}" if tensor_kind(one) != tensor_kind(other) else ""
    return finding_at_name(graph, name, fact + kinds, difference=difference(one, other))


def _opened(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree of an output and its tensors; a container that occurs twice contributes its tensors twice."""
    found: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> Ref:
        found.append(tensor)
        return Ref("value", (len(found),))

    tree = freeze_deep(output, leaf)
    places = [one for one in leaves(tree) if type(one) is Ref]
    numbers = count()
    counted = map_leaves(tree, lambda one: Ref("value", (next(numbers),)) if type(one) is Ref else one)
    return counted, [found[one.path[0] - 1] for one in places]


def _shape_of(tree: Any) -> Any:
    """The structure of an output: containers, tensors, plain values, and the class of anything else."""
    if type(tree) is tuple:
        return ("tuple", *map(_shape_of, tree))
    if isinstance(tree, Branch):
        return (tree.kind, tree.keys, *map(_shape_of, tree.items))
    is_plain = tree is None or isinstance(tree, (int, float, str, bool, complex, bytes, torch.dtype, torch.Size))
    return tree if type(tree) is Ref else repr(tree) if is_plain else type(tree)


def _short(tree: Any) -> str:
    held = sum(type(leaf) is Ref for leaf in leaves(tree))
    kind = tree.kind.__name__ if isinstance(tree, Branch) else type(tree).__name__
    return "a tensor" if type(tree) is Ref else f"a {kind} of {held} tensors" if held else expression(tree)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _node_of(note: str) -> tuple[str, str] | None:
    """The node that a note on an exception names."""
    start = "replaylens: raised by node "
    return ("node", note.removeprefix(start).partition(" ")[0]) if note.startswith(start) else None


def saved_values(program: ProgramUnderTest) -> LawResult:
    """Check that no value was overwritten, and that shapes, dtypes and devices are those of the graph."""
    record, stale = program.record, program.stale
    failures = (*_overwritten(record, stale), *_of_another_kind(record, stale))
    holds = "none overwritten, all of the recorded kind"
    missing = sum(ref not in record.values for node in record.graph.calls for ref in specs_of(node))
    note = f"{missing:,} values were not kept" if missing else ""
    return LawResult(len(record.values), failures, unit="values", holds=holds, note=note)


def _overwritten(record: Record, stale: frozenset[Ref]) -> Iterator[Finding]:
    for ref in record.values:
        if ref in stale:
            node = record.graph[ref.node]
            what = f"the {node.kind} `{node.address}`" if isinstance(node, State) else "its saved value"
            place = record.place_of(ref)
            own = isinstance(node, State) and place is not None and not place.is_recorded_tensor()
            fact = f"{what} {place.change if own and place is not None else 'was overwritten since the capture'}"
            yield evolve(finding_at_name(record.graph, ref.node, fact), is_stale=True)


def _of_another_kind(record: Record, stale: frozenset[Ref]) -> Iterator[Finding]:
    for node in record.graph.nodes:
        for ref, spec in specs_of(node).items():
            value = record.values.get(ref)
            if not isinstance(value, torch.Tensor) or ref in stale:
                continue
            shape = tuple(value.shape) if not value.is_nested else ()
            mine, wanted = (shape, value.dtype, str(value.device)), (spec.shape, spec.dtype, spec.device)
            if mine != wanted:
                yield finding_at_name(record.graph, node.name, f"{ref} was saved as {mine}, and is said to be {wanted}")


def is_well_formed(program: ProgramUnderTest) -> LawResult:
    """Check the invariants of graphs."""
    graph = program.graph
    failures = [
        finding_at_name(graph, problem.node, problem.fact) for problem in (*problems(graph), *unguarded_shapes(graph))
    ]
    if not failures:
        orphans = _orphans(graph) if program.as_captured else ()
        failures = [*[finding_at_name(graph, one.node, one.fact) for one in misfits(graph)], *orphans]
        failures = failures or (list(oversized(graph)) if program.record.is_from_file else [])
    return LawResult(len(graph), tuple(failures), unit="nodes", holds="well formed")


def _orphans(graph: Graph) -> Iterator[Finding]:
    """Check that exactly those nodes are orphans that neither derive from an input nor reach an output."""
    below = graph.descendants([node.name for node in graph.input_nodes])
    above = graph.ancestors([ref.node for ref in graph.wanted_refs])
    accounted = graph.orphans | above | below
    for node in graph.nodes:
        if node.name in graph.orphans and node.name in above:
            yield finding_at(node, "is set aside as an orphan, and reaches an output")
        if node.name in graph.orphans and node.name in below and isinstance(node, Call):
            yield finding_at(node, "is set aside as an orphan, and comes from an input")
        if isinstance(node, Call) and node.name not in accounted:
            yield finding_at(node, "comes from no input and reaches no output, and is not set aside")
