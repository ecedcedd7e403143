"""The labels of nodes.

In: a NodeSummary of each node, in execution order. Out: a label for each. `relu_2_7` is the second relu and the seventh
layer, in execution order; inputs count from zero. Orphans, which neither derive from an input nor reach an output, are
not counted. The passes of one layer share a label and differ in the pass: `linear_1_1:1`, `linear_1_1:2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .._ir.label import primed
from .._ir.node_summary import NodeSummary
from .recurrence import Dataflow, same_layers


def labels(nodes: Sequence[NodeSummary], ends: set[int]) -> tuple[list[str], list[bool]]:
    """The label of each node, and which nodes are orphans. `ends` are the values of the outputs."""
    orphans = _orphans(nodes, ends)
    layers = same_layers(Dataflow(nodes, orphans))
    passes = Counter(layer for layer, node, orphan in zip(layers, nodes, orphans, strict=True) if not orphan)
    names: list[str] = []
    names_taken: set[str] = set()
    base: dict[int, str] = {}
    seen: Counter[int] = Counter()
    of_kind: Counter[str] = Counter()
    total = -1 if any(node.kind == "input" for node in nodes) else 0
    for node, layer, orphan in zip(nodes, layers, orphans, strict=True):
        if node.address is not None:
            name = node.address
        elif orphan:
            of_kind["orphan"] += 1
            name = f"{node.kind}_orphan_{of_kind['orphan']}"
        else:
            if layer not in base:
                of_kind[node.kind] += 1
                total += 1
                base[layer] = f"{node.kind}_{of_kind[node.kind]}_{total}"
            seen[layer] += 1
            name = base[layer] if passes[layer] == 1 else f"{base[layer]}:{seen[layer]}"
        names_taken.add(name := primed(name, names_taken))
        names.append(name)
    return names, orphans


def _orphans(nodes: Sequence[NodeSummary], ends: set[int]) -> list[bool]:
    """For each node whether it neither derives from an input nor reaches an output."""
    from_input: set[int] = set()
    for node in nodes:
        if node.kind == "input" or any(value in from_input for value in node.reads):
            from_input.update(node.gives)
    to_output = set(ends)
    for node in reversed(nodes):
        if any(value in to_output for value in node.gives):
            to_output.update(node.reads)
    known = from_input | to_output
    return [not any(value in known for value in node.gives) for node in nodes]
