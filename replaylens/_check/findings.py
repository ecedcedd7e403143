"""A finding at a node, with its line of the program and of the user's code."""

from __future__ import annotations

from typing import Any

from .._core.graph import Graph
from .._core.node import Node
from .._core.text import line
from .report import Finding

_LONGEST = 160


def found_at(graph: Graph, law: str, node: Node, fact: str, **more: Any) -> Finding:
    """A finding at a node of the graph."""
    text = line(node)
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return Finding(law, node.name, fact, getattr(node, "source", None), line=short, **more)


def found_named(graph: Graph, law: str, name: str, fact: str, **more: Any) -> Finding:
    """A finding at what has this name, whether or not the graph has such a node."""
    return found_at(graph, law, graph[name], fact, **more) if name in graph else Finding(law, name, fact, **more)
