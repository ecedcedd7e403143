"""The summary of a program: the text of `print(prog)`, and HTML with a table of all layers.

In: the facts of a program. Out: text on one screen.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from textwrap import wrap
from typing import Any

from .._ir.graph import Graph
from .._ir.label import Label
from .format import Table, format_bytes, format_duration, format_flops, format_passes
from .program_metadata import ProgramMetadata

WIDTH = 110


def summary(prog: ProgramMetadata, most: int = 48) -> str:
    """The facts of the program, one line each; then the tree of modules and the layers in order."""
    return "\n".join([*_head(prog), *_modules(prog, most // 3), "    Layers:", *_layers(prog, most)])


def _head(prog: ProgramMetadata) -> list[str]:
    graph = prog._facts.graph
    rows = [
        f"Program of {graph.model_name}: {len(graph.calls)} calls, {len(prog._facts.index.order)} layers.",
        f"Structure: {_structure(prog)}; {_module_count(prog)}.",
        f"{format_passes(prog.num_tensors_total, 'tensor')} ({format_bytes(prog.tensor_fsize_total)}) computed; "
        f"{prog.num_tensors_saved:,} ({format_bytes(prog.tensor_fsize_saved)}) kept{_named(prog)}.",
        f"{format_passes(prog.parameter_reads, 'parameter operation')}; {prog.total_params:,} numbers "
        f"({format_bytes(prog.total_params_fsize)}) in {format_passes(prog.total_param_tensors, 'parameter')}.",
        _cost(prog),
        f"Random seed: {prog.random_seed_used}",
    ]
    if inside := prog.elapsed_time_function_calls:
        rows.append(f"Time: {format_duration(prog.elapsed_time_total)}, {format_duration(inside)} of it in operations")
    if graph.guards:
        rows.append(f"{_facts(graph)}: a replay in which it changes has left the recorded path.")
    if graph.changes:
        rows.append(f"The model writes {', '.join(address for address, _ in graph.changes[:6])}.")
    return "\n    ".join(rows).split("\n")


def _facts(graph: Graph) -> str:
    """The guards of the recorded path, counted by kind."""
    counts = Counter(guard.kind for guard in graph.guards)
    read = counts.pop("content", 0)
    words = [f"Content read in Python {format_passes(read, 'time')}"] if read else []
    others = ", ".join(format_passes(count, kind) for kind, count in sorted(counts.items()))
    return ", and ".join([*words, *([f"{'facts' if read else 'Facts'} that may be read ({others})"] if others else [])])


def _named(prog: ProgramMetadata) -> str:
    """The number of layers that `save=` selected, unless it selected all."""
    named = prog.saved_labels if prog._facts.record.saved is not None else []
    return f", {format_passes(len(named), 'layer')} of it by `save=`" if named else ""


def _structure(prog: ProgramMetadata) -> str:
    loops = f"recurrent (at most {prog.model_max_recurrent_loops} passes)"
    words = [loops if prog.model_is_recurrent else "purely feedforward"]
    words.append("with branching" if prog.model_is_branching else "without branching")
    return ", ".join([*words, *(["with conditions"] if prog.model_has_conditional_branching else [])])


def _module_count(prog: ProgramMetadata) -> str:
    calls = prog._facts.module_calls.counts
    idle = sum(1 for count in calls.values() if not count)
    return format_passes(len(calls), "module") + (f", {idle} of them not called" if idle else "")


def _cost(prog: ProgramMetadata) -> str:
    unknown = prog.uncounted
    least = "at least " if unknown else ""
    more = f"; not counted: {', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}" if unknown else ""
    return f"Cost: {least}{format_flops(prog.flops, prog.macs)}{more}"


def _modules(prog: ProgramMetadata, most: int) -> list[str]:
    """The tree of module calls by address; leaves share lines."""
    calls = prog._facts.module_calls
    below: dict[str, dict[str, None]] = {}
    for scope in calls.scopes.values():
        below.setdefault(scope.parent.address if scope.parent else "", {}).setdefault(scope.address)
    lines = _tree(below)
    rows = list(islice(lines, most))
    if not rows:
        return []
    if more := sum(1 for _ in lines):  # not kept: the deepest lines are as long as they are deep
        rows[-1] = f"        ... ({more + 1} more lines)"
    return ["    Module hierarchy:", *rows]


def _tree(below: dict[str, dict[str, None]]) -> Iterator[str]:
    """The lines of the modules below `""`, each module's own indented below it. They may be nested deeply."""
    path, leaves = {"": iter(below.get("", {}))}, list[str]()
    while path:
        pad, parent = "    " * (len(path) + 1), next(reversed(path))
        inner = None
        for address in path[parent]:
            if address in below and address not in path:
                inner = address
                break
            leaves.append(address)
        if leaves:
            yield from wrap(", ".join(leaves), WIDTH, initial_indent=pad, subsequent_indent=pad)
            leaves.clear()
        if inner is None:
            del path[parent]
        else:
            yield f"{pad}{inner}:"
            path[inner] = iter(below[inner])


def _layers(prog: ProgramMetadata, most: int) -> list[str]:
    labels, passes = prog._facts.index.order, prog._facts.index.passes
    width = len(str(len(labels)))
    numbers: list[int | None] = list(range(len(labels)))
    if len(labels) > most:
        numbers = [*numbers[: most // 2], None, *numbers[-most // 2 :]]
    rows = []
    for number in numbers:
        if number is None:
            rows.append(f"        {'...':>{width}}")
            continue
        layer, turn = Label.of(labels[number])
        several = f"  (pass {turn} of {len(passes[layer])})" if turn else ""
        rows.append(f"        {number:{width}d}: {labels[number]}{several}")
    return rows


def as_html(prog: ProgramMetadata) -> str:
    """The summary for a notebook: its first lines, and tables that unfold."""
    rows: list[tuple[Any, ...]] = []
    for number, place in enumerate(prog._facts.index.places):
        layer = prog._layer(place)
        specs = ", ".join(map(str, prog._facts.specs(place)))
        rows.append((number, place.label, specs, layer.module, str(layer.source.text) if layer.source else ""))
    layers = Table(("#", "layer", "value", "module", "line"), tuple(rows))._repr_html_()
    head = html.escape("\n".join(_head(prog)))
    modules = prog.modules
    return (
        f"<pre>{head}</pre><details><summary>{len(modules)} modules</summary>{modules._repr_html_()}</details>"
        f"<details><summary>{len(rows)} layers</summary>{layers}</details>"
    )
