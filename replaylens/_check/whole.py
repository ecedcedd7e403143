"""Does a whole replay give the recorded output?

In: a record and what the model returned. Out: a law. The replay is the one that users run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

from .._core.graph import Graph
from .._core.node import Ref
from .._core.notes import notes_of
from .._core.sameness import difference, kind_of, same
from .._core.text import expression
from .._core.trees import Branch, freeze_deep, leaves, remake
from .._replay.record import Record
from .._replay.replay import replay
from .._replay.request import Request
from .._replay.run import Run
from ..errors import DivergedReplay
from .findings import found_named
from .proven import Proven
from .report import Finding, Law

NAME = "whole replay"


def whole_replay(record: Record, returned: Any, stale: frozenset[Ref], proven: Proven) -> Law:
    """The output and the state changes of a replay without changes. Which calls it ran rightly goes to `proven`."""
    graph = record.graph
    asked, unit = len(graph.output_refs), f"outputs, {len(graph.changes)} state changes"
    if stale:
        return Law(NAME, skipped="a saved value was overwritten")
    try:
        run = replay(record, Request(whole=True, on_divergence="raise"), lambda name: name, proven.told)
    except DivergedReplay as error:
        return Law(NAME, asked, (Finding(NAME, "", f"leaves the recorded path: {_first_line(error)}"),), unit=unit)
    except Exception as error:
        name = next((words[1] for words in map(_node_of, notes_of(error)) if words), "")
        return Law(NAME, asked, (found_named(graph, NAME, name, f"raises {type(error).__name__}"),), unit=unit)
    found = (*_outputs(record, returned, run), *_changes(record, run))
    return Law(NAME, asked, tuple(found), unit=unit, holds="bit for bit")


def _outputs(record: Record, returned: Any, run: Run) -> Iterator[Finding]:
    """The output against what the model returned, and that against what was saved of it."""
    graph = record.graph
    mine, made = _opened(run.output)
    theirs, wanted = _opened(returned)
    if _shape_of(mine) != _shape_of(theirs):
        fact = f"the output is {_short(mine)}, and the model returned {_short(theirs)}"
        yield Finding(NAME, "", fact)
        return
    refs = graph.output_refs if len(graph.output_refs) == len(made) else ()
    for number, (one, other) in enumerate(zip(made, wanted, strict=True)):
        name = refs[number].node if refs else ""
        if not same(one, other):
            yield _apart(graph, name, f"output {number + 1} is another than the model returned", one, other)
        elif refs and refs[number] in record.values and not same(record.values[refs[number]], other):
            yield _apart(graph, name, f"output {number + 1} was saved as another value", one, other)


def _changes(record: Record, run: Run) -> Iterator[Finding]:
    for address, ref in record.graph.changes:
        now = run.state_changes[address]
        if now is not None and ref in record.values and not same(now, record.values[ref]):
            fact = f"what the model writes to `{address}` comes out as another value"
            yield _apart(record.graph, ref.node, fact, now, record.values[ref])


def _apart(graph: Graph, name: str, fact: str, one: torch.Tensor, other: torch.Tensor) -> Finding:
    kinds = f": {kind_of(one)[:3]}, not {kind_of(other)[:3]}" if kind_of(one) != kind_of(other) else ""
    return found_named(graph, NAME, name, fact + kinds, difference=difference(one, other))


def _opened(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree of an output, and its tensors: those of a container that stands in two places, twice."""
    found: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> Ref:
        found.append(tensor)
        return Ref("value", (len(found),))

    tree = freeze_deep(output, leaf)
    places = [one for one in leaves(tree) if type(one) is Ref]
    numbers = count()
    counted = remake(tree, lambda one: Ref("value", (next(numbers),)) if type(one) is Ref else one)
    return counted, [found[one.path[0] - 1] for one in places]


def _shape_of(tree: Any) -> Any:
    """Containers, and what stands in them: tensors, plain values, and of anything else its class."""
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
    """The node that an exception's note names."""
    start = "replaylens: raised by node "
    return ("node", note.removeprefix(start).partition(" ")[0]) if note.startswith(start) else None
