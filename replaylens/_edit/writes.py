"""Calls that write in place, taken apart: a pure call that gives the new value, and what writes it.

In: a Graph and the name of any call. Out: a Graph in which a plain call, of plain arguments, gives what that call gave;
who edits it need not know that the model wrote in place. In-place activations write what the plain call gives to the
memory that they wrote; a call that writes something by the way (the statistics of a batch norm) no longer does.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from .._core.graph import Graph
from .._core.label import beside, fresh
from .._core.node import Call, Node, Ref, State, meanings_of, value_of
from .._core.pure import Derived, Hole, Nth, differentiate_name, fill_new, mutate
from .._core.target import Target
from .._core.trees import Branch, remake
from ..errors import BadEdit
from .rewrite import replace


def with_plain(graph: Graph, name: str, still_writes: bool = True) -> tuple[Graph, str]:
    """The graph, and the name of the plain call in it that gives the value of a call.

    A call whose value is what it wrote goes on writing, what the plain call gives, unless it is not to.
    """
    node = graph[name]
    if not isinstance(node, Call):
        raise BadEdit(f"{name} is no operation, but {_what(node)}. Give it another value: set_state, with_patch.")
    if node.target.name == differentiate_name:
        raise BadEdit(f"{name} is a gradient that the model takes: nothing else can stand in its place.")
    if node.target.function is fill_new:
        function, _, args, kwargs = node.args
        named = tuple(zip(kwargs.keys or (), kwargs.items, strict=True))
        return replace(graph, {name: (evolve(node, target=function, args=args, kwargs=named),)}), name
    return _opened(graph, node, still_writes) if node.target.function is mutate else (graph, name)


def _what(node: Node) -> str:
    return f"the {node.kind} {node.address}" if isinstance(node, State) else f"an {type(node).__name__.lower()}"


def _opened(graph: Graph, call: Call, still_writes: bool) -> tuple[Graph, str]:
    function, bases, args, kwargs, targets, values = call.args
    read = _Views(graph, call)
    named = tuple([(k, read.plain(v)) for k, v in zip(kwargs.keys or (), kwargs.items, strict=True) if k != "out"])
    plain = evolve(
        call,
        target=function,
        args=tuple([read.plain(arg) for arg in args]),
        kwargs=named,
        returns=Ref(call.name),
        result=None,
        draws=None,
        is_overwritten=False,
        is_differentiated=False,
    )
    whole, (_, written, memory) = value_of(call), call.returns
    if type(whole) is not Ref or (whole in written and len(written) > 1):
        raise BadEdit(f"{call.name} writes {len(written)} tensors: nothing else can stand in its place.")
    plain = evolve(plain, meaning=(meanings_of(call)[whole],))
    if whole in written and still_writes:
        value = fresh(beside(call.name, "value"), graph.positions)
        copy = (Target.of(torch.Tensor.copy_), bases, (Branch(Nth, (0,)), Ref(value)), NO_KWARGS, targets, values)
        write = evolve(call, kind="copy", args=copy, draws=None, edited=f"was {call.kind}")
        return replace(graph, {call.name: (*read.made, evolve(plain, name=value, returns=Ref(value)), write)}), value
    before = {view: read.view(target) for view, target in zip(written, targets, strict=False)}
    before |= dict(zip(memory, bases, strict=True))
    made = replace(graph, {call.name: (*read.made, plain)}, {**before, whole: Ref(call.name)})
    states = {Ref(node.name): node.address for node in graph.state_nodes}
    return evolve(made, changes=tuple([(to, ref) for to, ref in made.changes if states.get(ref) != to])), call.name


NO_KWARGS = Branch(dict, (), ())


class _Views:
    """What a call that writes read, as values: views of the memory that it wrote are derived by calls of their own."""

    def __init__(self, graph: Graph, call: Call) -> None:
        _, self.bases, _, _, self.targets, self.values = call.args
        self.call, self.taken = call, set(graph.positions)
        self.made: list[Call] = []

    def plain(self, tree: Any) -> Any:
        """An argument, with Refs in the place of views and targets."""
        if type(tree) is tuple:
            return tuple([self.plain(item) for item in tree])
        if not isinstance(tree, Branch):
            return tree
        if tree.kind is Nth:
            number = tree.items[0]
            value = self.values[number]
            return value if type(value) is Ref else self.view(self.targets[number])
        return self.view(tree) if tree.kind is Derived else evolve(tree, items=self.plain(tree.items))

    def view(self, derived: Branch) -> Ref:
        """A view of memory that the call wrote, as it was before."""
        base, steps = derived.items
        ref: Ref = self.bases[base]
        for step in steps:
            ref = self._step(step, ref)
        return ref

    def _step(self, step: Branch, ref: Ref) -> Ref:
        function, args, kwargs, part, grad = step.items
        kind = function.short.replace("_", "").lower()
        name = fresh(f"{kind}_1_of_{self.call.name}", self.taken)
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
            tuple([remake(arg, fill) for arg in args]),
            tuple([(k, remake(v, fill)) for k, v in zip(kwargs.keys or (), kwargs.items, strict=True)]),
            returns=returns,
            meaning=self.call.meaning[:1],  # until it has run
            context=evolve(self.call.context, grad=grad),
            scope=self.call.scope,
            source=self.call.source,
        )
        self.made.append(made)
        return Ref(name, part)
