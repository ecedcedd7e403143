"""Splits an in-place call into a plain call that gives the new value, and the write of it.

In: a Graph and the name of any call. Out: a Graph in which a plain call, of plain arguments, gives what that call gave,
so that whoever edits it need not know of in-place writes. An in-place activation then writes what the plain call gives;
a call with a side effect (the statistics of a batch norm) loses it.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from .._ir.graph import Graph, InnerGradient
from .._ir.label import name_beside, unused_name
from .._ir.node import Call, Node, Ref, State, specs_of, value_of
from .._ir.runtime import fill_new
from .._ir.target import Target
from .._ir.trees import Branch, map_leaves
from .._ir.write import (
    DerivedView,
    Hole,
    TargetIndex,
    ViewStep,
    Write,
    as_plain_call,
    original_call,
    packed_place,
    unpacked_place,
)
from ..errors import BadEdit
from .rewrite import replace


def with_plain_call(graph: Graph, name: str, still_writes: bool = True) -> tuple[Graph, str]:
    """The graph, and the name of the plain call in it that gives the value of a call.

    A call whose value is what it wrote still writes the plain call's result, unless `still_writes` is False.
    """
    node = graph[name]
    if not isinstance(node, Call):
        raise BadEdit(f"{name} is not an operation but {_what(node)}. Give it another value: set_state, with_patch.")
    if isinstance(node, InnerGradient):
        raise BadEdit(f"{name} is a gradient that the model takes: it cannot be replaced.")
    if node.target.function is fill_new:
        function, args, _ = original_call(node)
        return replace(graph, {name: (evolve(node, target=function, args=args),)}), name
    return _split(graph, node, still_writes) if isinstance(node, Write) else (graph, name)


def _what(node: Node) -> str:
    return f"the {node.kind} {node.address}" if isinstance(node, State) else f"an {type(node).__name__.lower()}"


def _split(graph: Graph, call: Write, still_writes: bool) -> tuple[Graph, str]:
    function, args, kwargs = original_call(call)
    read = _Views(graph, call)
    plain = as_plain_call(
        call,
        target=function,
        args=tuple([read.plain(arg) for arg in args]),
        kwargs=tuple([(key, read.plain(value)) for key, value in kwargs.items() if key != "out"]),
        returns=Ref(call.name),
        result=None,
        draws=None,
        is_overwritten=False,
        is_differentiated=False,
    )
    whole, written, memory = value_of(call), call.gives.targets, call.gives.bases
    if type(whole) is not Ref or (whole in written and len(written) > 1):
        raise BadEdit(f"{call.name} writes {len(written)} tensors: it cannot be replaced.")
    plain = evolve(plain, spec=(specs_of(call)[whole],))
    if whole in written and still_writes:
        value = unused_name(name_beside(call.name, "value"), graph.positions)
        copy = {
            "function": Target.of(torch.Tensor.copy_),
            "args": (packed_place(TargetIndex(0)), Ref(value)),
            "kwargs": NO_KWARGS,
        }
        write = evolve(call.given(**copy), kind="copy", draws=None, edited=f"was {call.kind}")
        return replace(graph, {call.name: (*read.made, evolve(plain, name=value, returns=Ref(value)), write)}), value
    before = {
        view: read.view(unpacked_place(target)) for view, target in zip(written, call.arguments.targets, strict=False)
    }
    before |= dict(zip(memory, call.arguments.bases, strict=True))
    made = replace(graph, {call.name: (*read.made, plain)}, {**before, whole: Ref(call.name)})
    states = {Ref(node.name): node.address for node in graph.state_nodes}
    return evolve(made, changes=tuple([(to, ref) for to, ref in made.changes if states.get(ref) != to])), call.name


NO_KWARGS = Branch(dict, (), ())


class _Views:
    """What an in-place call read, as values: views of the storage that it wrote are derived by calls of their own."""

    def __init__(self, graph: Graph, call: Write) -> None:
        self.call, self.taken = call, set(graph.positions)
        self.made: list[Call] = []

    def plain(self, tree: Any) -> Any:
        """An argument with Refs in the place of views and targets."""
        if type(tree) is tuple:
            return tuple([self.plain(item) for item in tree])
        if not isinstance(tree, Branch):
            return tree
        if (value := self.call.value(tree)) is not None:
            return value
        view = self.call.view(tree)
        return evolve(tree, items=self.plain(tree.items)) if view is None else self.view(view)

    def view(self, derived: DerivedView) -> Ref:
        """A view of the storage that the call wrote, as it was before."""
        ref: Ref = self.call.arguments.bases[derived.base]
        for step in derived.steps:
            ref = self._step(unpacked_place(step), ref)
        return ref

    def _step(self, step: ViewStep, ref: Ref) -> Ref:
        function, args, kwargs, part, grad = step
        kind = function.short.replace("_", "").lower()
        name = unused_name(f"{kind}_1_of_{self.call.name}", self.taken)
        self.taken.add(name)

        def fill(leaf: Any) -> Any:
            return ref if leaf is Hole.HERE else leaf

        returns: Any = Ref(name, part)
        for index in reversed(part):
            returns = (*([None] * index), returns)
        made = Call(
            name,
            kind,
            function,
            tuple([map_leaves(arg, fill) for arg in args]),
            tuple([(k, map_leaves(v, fill)) for k, v in zip(kwargs.keys or (), kwargs.items, strict=True)]),
            returns=returns,
            spec=self.call.spec[:1],  # until it has run
            context=evolve(self.call.context, grad=grad),
            scope=self.call.scope,
            source=self.call.source,
        )
        self.made.append(made)
        return Ref(name, part)
