"""print(prog): what a forward pass was, on one screen.

In: a Graph and the sizes of its values. Out: text, and the same as HTML.
"""

from __future__ import annotations

import html
from math import prod
from typing import Any

import torch

from .._core.graph import Graph
from .._core.node import Call
from .layers import Atlas


def summary(graph: Graph, atlas: Atlas, most: int = 60) -> str:
    """A short summary: sizes, parameters, guards, the layers in order."""
    count = sum(len(node.meaning) for node in graph.calls)
    size = sum(_size(meaning) for call in graph.calls for meaning in call.meaning)
    parameters = [node for node in graph.state_nodes if node.kind == "parameter"]
    numbers = sum(prod(node.meaning.shape) for node in parameters)
    rows = [
        f"Program of {graph.model_name}: {len(graph.calls)} calls, {len(atlas.order)} layers.",
        f"    {count} tensors ({human(size)}) computed; {numbers:,} numbers in {len(parameters)} parameters.",
    ]
    if graph.guards:
        rows.append(f"    {len(graph.guards)} times the model read content in Python; a change there is a divergence.")
    if graph.changes:
        rows.append(f"    The model writes {', '.join(address for address, _ in graph.changes[:6])}.")
    rows.append("    Layers:")
    labels = list(atlas.order)
    width = len(str(len(labels)))
    shown = labels if len(labels) <= most else [*labels[: most // 2], None, *labels[-most // 2 :]]
    for number, label in _numbered(shown, len(labels)):
        rows.append(f"        {number:{width}d}: {label}" if label else f"        {'...':>{width}}")
    return "\n".join(rows)


def _numbered(shown: list[Any], total: int) -> list[tuple[int, Any]]:
    gap = shown.index(None) if None in shown else len(shown)
    head = list(enumerate(shown[:gap]))
    tail = shown[gap + 1 :]
    return [*head, *([(0, None)] if tail else []), *((total - len(tail) + n, label) for n, label in enumerate(tail))]


def as_html(graph: Graph, atlas: Atlas) -> str:
    """The summary for a notebook: a table of layers that unfolds."""
    head, *_ = summary(graph, atlas).split("    Layers:")
    rows = []
    for number, place in enumerate(atlas.places):
        node = graph[place.node]
        meanings = ", ".join(map(str, node.meaning)) if isinstance(node, Call) else str(node.meaning)
        inside = isinstance(node, Call) and node.scope is not None and place.output is None
        module = node.scope.address if inside else ""  # type: ignore[union-attr]
        cells = (str(number), place.label, meanings, module)
        rows.append(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        )
    table = "<table><tr><th>#</th><th>layer</th><th>value</th><th>module</th></tr>" + "".join(rows) + "</table>"
    return f"<pre>{html.escape(head.rstrip())}</pre><details><summary>{len(rows)} layers</summary>{table}</details>"


def human(size: int) -> str:
    """A number of bytes for people."""
    amount = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 1024 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return ""


def _size(meaning: Any) -> int:
    return int(prod(meaning.shape)) * torch.empty((), dtype=meaning.dtype).element_size()
