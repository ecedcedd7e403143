"""A Graph as readable Python: one line a node, the user's source line above each block.

In: a Graph. Out: text. `print(prog.code)` and the listings in error messages consist of the same lines.
"""

from __future__ import annotations

from keyword import iskeyword
from typing import Any

import torch

from .graph import Graph, InnerGradient
from .node import Call, Generator, Node, Ref, TensorSpec, identifier
from .target import Target
from .trees import Branch
from .write import DerivedView, Hole, Write, original_call, unpacked_place


def program_code(graph: Graph) -> str:
    """The whole program as a Python function. Parameters appear under their dotted names."""
    arguments = ", ".join(identifier(node.name) for node in graph.input_nodes)
    name = graph.model_name if graph.model_name.isidentifier() and not iskeyword(graph.model_name) else "program"
    lines, last = [f"def {name}({arguments}):"], None
    for node in graph.nodes:
        if not isinstance(node, Call):
            continue
        if node.source is not None and node.source != last:
            lines.append(f"    # {node.source.inline}")
        last = node.source
        lines.append(f"    {node_line(node)}")
    for address, ref in graph.changes:
        lines.append(f"    # the model writes {address} <- {ref}")
    lines.append(f"    return {expression(graph.output)}")
    return _without_paths("\n".join(lines), graph)


def _without_paths(text: str, graph: Graph) -> str:
    """The code with two names instead of paths for a write: what it wrote, and the base."""
    for call in graph.calls:
        if isinstance(call, Write) and len(call.arguments.bases) == 1 and call.result in (None, Ref(call.name, (1, 0))):
            name = identifier(call.name)
            text = text.replace(f"{name}[1][0]", name)
            if f"{name}[2][0]" in text:
                text = text.replace(f"{name}[2][0]", f"{name}_base")
                text = text.replace(f"    {name} = ", f"    {name}, {name}_base = ")
    return text


def node_line(node: Node) -> str:
    """A node as an assignment, with the shape of what it gives."""
    shapes = ", ".join(map(str, node.spec)) if isinstance(node, Call) else str(node.spec)
    if not isinstance(node, Call):
        return f"{identifier(node.name)}  # {type(node).__name__.lower()}, {shapes}"
    left = f"{identifier(node.name)} = {call_expression(node)}"
    was = node.edited if node.edits is None else ""  # a patch says it in its own words
    notes = [note for note in (shapes, "draws" if node.draws else "", was) if note]
    return f"{left}  # {'; '.join(notes)}" if notes else left


def call_expression(node: Call) -> str:
    if isinstance(node, InnerGradient):
        return f"gradient({', '.join(map(str, dict.fromkeys(node.refs)))})"
    target, args, kwargs = original_call(node)
    write = node if isinstance(node, Write) else None
    words = [expression(arg, write) for arg in args]
    short = target.short
    if target.is_property and words:
        return f"{words[0]}.{short}"
    if short == "__getitem__" and len(args) == 2:
        return f"{words[0]}[{_index(args[1])}]"
    if short == "__setitem__" and len(args) == 3:
        return f"setitem({words[0]}, ({_index(args[1], True)},), {words[2]})"
    words.extend(f"{key}={expression(value, write)}" for key, value in kwargs.items())
    return f"{short.strip('_') if short.startswith('__') else short}({', '.join(words)})"


def expression(tree: Any, write: Write | None = None) -> str:
    """A tree of Refs and literals as Python."""
    if isinstance(tree, Ref):
        return str(tree)
    if type(tree) is tuple:
        inner = ", ".join(expression(item, write) for item in tree)
        return f"({inner},)" if len(tree) == 1 else f"({inner})"
    if isinstance(tree, Branch):
        return _branch(tree, write)
    if isinstance(tree, Generator):
        return "generator"
    if tree is ...:
        return "..."
    if isinstance(tree, torch.Size):
        return str(tuple(tree))
    if isinstance(tree, Target):
        return tree.short
    if isinstance(tree, Graph):
        return "program"
    text = repr(tree)
    return text if len(text) <= 60 and not text.startswith("<") else f"{type(tree).__name__}(...)"


def _branch(tree: Branch, write: Write | None) -> str:
    words = [expression(item, write) for item in tree.items]
    if tree.kind is list:
        return f"[{', '.join(words)}]"
    if tree.kind is slice:
        return f"slice({', '.join(words)})"
    if tree.kind is dict:
        return "{" + ", ".join(f"{key!r}: {word}" for key, word in zip(tree.keys or (), words, strict=True)) + "}"
    if write is not None and (view := write.view(tree)) is not None:
        return _view(view, write.arguments.bases)
    keys = tree.keys or (None,) * len(words)
    return f"{tree.kind.__name__}({', '.join(f'{k}={w}' if k else w for k, w in zip(keys, words, strict=True))})"


def _view(view: DerivedView, bases: tuple[Any, ...]) -> str:
    """A view of a written storage: `linear_1_1.t()[0]`."""
    text = expression(bases[view.base])
    for step in view.steps:
        function, args, kwargs, part, _ = unpacked_place(step)
        others = [expression(arg) for arg in args if arg is not Hole.HERE]
        if function.short == "__getitem__" and len(args) == 2:
            text = f"{text}[{_index(args[1])}]"
        elif function.is_property:
            text = f"{text}.{function.short}"
        else:
            named = [f"{k}={expression(v)}" for k, v in zip(kwargs.keys or (), kwargs.items, strict=True)]
            text = f"{text}.{function.short}({', '.join([*others, *named])})"
        text += "".join(f"[{index}]" for index in part)
    return text


def _index(tree: Any, in_call: bool = False) -> str:
    if type(tree) is tuple and tree:
        return ", ".join(_index(item, in_call) for item in tree)
    if isinstance(tree, Branch) and tree.kind is slice and not in_call:
        start, stop, step = ("" if item is None else expression(item) for item in tree.items)
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return "..." if tree is ... else expression(tree)


def listing(graph: Graph, name: str, note: str = "", around: int = 1) -> str:
    """The lines around a node, with an arrow at it, for error messages."""
    position = graph.positions[name]
    node = graph.nodes[position]
    source = node.source if isinstance(node, Call) else None
    calls = [p for p, other in enumerate(graph.nodes) if isinstance(other, Call) or p == position]
    at = calls.index(position)
    rows = []
    for p in calls[max(0, at - around) : at + around + 1]:
        other = graph.nodes[p]
        mark, end = (">", f"   <- {note}" if note else "") if p == position else (" ", "")
        rows.append(f"  {mark} {node_line(other)}{end}")
    return "\n".join([*([source.indented] if source else []), *rows])


def specs_text(meaning: tuple[TensorSpec, ...]) -> str:
    return ", ".join(map(str, meaning))
