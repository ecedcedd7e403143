"""A Graph: nodes in execution order and the tree of outputs. Structure only: comparable, printable, hashable.

In: nodes and trees of Refs. Out: lookups that any pass needs (positions, users, cones), computed once. What the values
are, and how people call the nodes, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from attrs import field, frozen

from .node import NO_MODES, Call, Const, Context, GeneratorLeft, Guard, Input, Node, Ref, Scope, State, refs_in, refs_of
from .ops import Quirk, of_kind
from .shared_memory import NO_OVERLAPS, Overlaps
from .util import cached_property


@frozen
class Graph:
    """A pure program. Every node reads only nodes before it; the output is a tree of Refs and plain values."""

    nodes: tuple[Node, ...]
    output: Any
    inputs: Any = ()  # (args, kwargs) as a tree of Refs to Input nodes
    guards: tuple[Guard, ...] = ()
    asked: tuple[Guard, ...] = ()  # what no content decides: layouts, flags, modes that the model asks for
    module_outputs: tuple[tuple[Scope, Any], ...] = ()
    changes: tuple[tuple[str, Ref], ...] = ()  # what the model wrote: address of a parameter or buffer -> its new value
    replaced: frozenset[str] = frozenset()  # of these, where it assigned another tensor and did not write in place
    computed_again: tuple[str, ...] = ()  # of these, what a checkpoint wrote: the model's backward writes it once more
    removed: tuple[str, ...] = ()  # addresses where it put None, or that it deleted
    not_again: tuple[str, ...] = ()  # why the model's next forward may take another path, in words
    collects: bool = False  # its forward leaves gradients in the model's parameters, by `.backward()`
    altered: tuple[str, ...] = field(default=(), eq=False)  # counters, lists and the like that it changes and reads
    orphans: frozenset[str] = frozenset()  # neither come from an input nor reach an output
    written: frozenset[Ref] = frozenset()  # the first values of memory that the model writes
    asks_identity: bool = False  # code that ran asks whether one object is another
    catches: bool = False  # code that ran catches exceptions
    is_deep: bool = False  # of ATen calls throughout, below what a function mode shows: TorchScript and the like
    apart: frozenset[Ref] = frozenset()  # inputs of a slice: values that are no views here of what they were views of
    shares_inputs: bool = False  # an input shares memory with other input or state that was written: no others will do
    overlaps: Overlaps = NO_OVERLAPS  # which inputs share memory, and of which that matters
    literals: tuple[tuple[tuple[Any, ...], str], ...] = ()  # plain objects among the inputs: way to one, and how it was
    takes_any_keyword: bool = False  # the forward can see the order of its keywords
    one_way: tuple[str, ...] = ()  # custom functions whose backward could not be kept
    drawn_elsewhere: tuple[str, ...] = ()  # what drew numbers besides torch: "random", "numpy"
    generator_read: tuple[str, ...] = ()  # how the forward read the state or the seed of torch's generator
    left: GeneratorLeft | None = None  # where it leaves torch's generator, if it moved it
    ambient: Context = NO_MODES  # the modes around the whole model
    default_dtype: torch.dtype = torch.float32
    default_device: str = "cpu"
    model_name: str = field(default="", eq=False)
    twice: tuple[tuple[str, str], ...] = ()  # of a module that stands at several addresses: another one, and its first
    unread: frozenset[str] = field(default=frozenset(), eq=False)  # addresses of state that the forward did not read

    def __getitem__(self, name: str) -> Node:
        return self.nodes[self.positions[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.positions

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def positions(self) -> dict[str, int]:
        return {node.name: position for position, node in enumerate(self.nodes)}

    @cached_property
    def refs(self) -> tuple[tuple[Ref, ...], ...]:
        """What each node reads."""
        return tuple([node.refs for node in self.nodes])

    @cached_property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the nodes that each node reads, each once, in the order of its arguments."""
        where = self.positions
        return tuple([tuple(dict.fromkeys([where[ref.node] for ref in refs])) for refs in self.refs])

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the nodes that read each node."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for position, parents in enumerate(self.parents):
            for parent in parents:
                found[parent].append(position)
        return tuple([tuple(users) for users in found])

    @cached_property
    def is_ordinary(self) -> bool:
        """Was it recorded outside of inference mode, and is no tensor asked whether it was made there?"""
        return not self.ambient.inference and all(guard.target.short != "is_inference" for guard in self.asked)

    @cached_property
    def drawn(self) -> dict[str, int]:
        """The position of each draw, by the key of its generator's state."""
        return {node.draws: p for p, node in enumerate(self.nodes) if isinstance(node, Call) and node.draws is not None}

    @cached_property
    def last_drawn(self) -> tuple[int, ...]:
        """The position of the draw behind which the forward leaves torch's generator, if it is one of these."""
        key = self.left.follows if self.left is not None else None
        return (self.drawn[key],) if key is not None and key in self.drawn else ()

    @cached_property
    def turns(self) -> dict[int, int]:
        """Of each draw that goes on in a stream where another call left it: that one's position."""
        follows = {p: self.nodes[p].follows for p in self.drawn.values()}
        found = {p: self.drawn[key] for p, key in follows.items() if key is not None and key in self.drawn}
        return {position: before for position, before in found.items() if before < position}

    @cached_property
    def states(self) -> dict[int, tuple[Ref, ...]]:
        """By draw: the values that hold the state which it began with, for calls that run it again themselves."""
        found: dict[int, list[Ref]] = {}
        for call in self.again:
            given = call.arguments
            held = dict(zip(given.states.keys or (), given.states.items, strict=True))
            for name, inner in zip(call.through, given.stretch.calls, strict=True):
                if inner.draws is not None and name in self.positions:
                    found.setdefault(self.positions[name], []).append(held[inner.draws])
        return {position: tuple(dict.fromkeys(refs)) for position, refs in found.items()}

    @cached_property
    def state_of(self) -> dict[int, int]:
        """The same the other way: of each such value, by its position, the draw."""
        return {self.positions[ref.node]: position for position, refs in self.states.items() for ref in refs}

    @cached_property
    def again(self) -> tuple[InnerGradient, ...]:
        """The calls that run others of this graph again themselves."""
        return tuple([call for call in self.calls if isinstance(call, InnerGradient) and call.through])

    def is_run_again(self, name: str) -> bool:
        """Does a call take a gradient through a node by running it again?"""
        return any(name in call.through for call in self.again)

    @cached_property
    def told(self) -> tuple[Call, ...]:
        """The custom functions that may ask whether gradients are needed of what they are given, and go by that."""
        flags = {ref for guard in self.asked if guard.kind == "flags" for ref in guard.refs}
        calls = (
            [node for node in self.nodes if isinstance(node, Call) and flags.intersection(node.refs)] if flags else []
        )
        return tuple([call for call in calls if _is_custom(call)])

    @cached_property
    def shifts(self) -> dict[int, int]:
        """Those turns where the call before may take more or fewer numbers than it did, or was itself shifted."""
        found: dict[int, int] = {}
        for position, before in self.turns.items():
            if before in found or not of_kind(self.nodes[before].kind).has(Quirk.DRAWS_BY_SHAPE):
                found[position] = before
        return found

    @cached_property
    def reached(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the nodes whose values depend on each: its users, calls that run it again themselves, and
        draws that it may shift.
        """
        again: dict[int, list[int]] = {}
        for position, before in self.shifts.items():
            again.setdefault(before, []).append(position)
        for call in self.again:
            for name in call.through:
                again.setdefault(self.positions[name], []).append(self.positions[call.name])
        return (
            tuple([(*users, *again[p]) if p in again else users for p, users in enumerate(self.users)])
            if again
            else self.users
        )

    @cached_property
    def output_refs(self) -> tuple[Ref, ...]:
        return tuple(refs_in(self.output))

    @cached_property
    def wanted_refs(self) -> tuple[Ref, ...]:
        """All that a whole run is for: the outputs and the new values of what the model wrote."""
        return (*self.output_refs, *(ref for _, ref in self.changes))

    @cached_property
    def written_state(self) -> frozenset[str]:
        """The names of the state at whose addresses the forward leaves something else."""
        ends = {*[address for address, _ in self.changes], *self.removed}
        return frozenset([node.name for node in self.state_nodes if not ends.isdisjoint((node.address, *node.aliases))])

    @cached_property
    def call_marks(self) -> bytearray:
        """A one for each position that holds a call."""
        return bytearray([isinstance(node, Call) for node in self.nodes])

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return tuple([node for node in self.nodes if isinstance(node, Call)])

    @cached_property
    def edited(self) -> tuple[Call, ...]:
        """The calls that an edit put in the place of what was recorded."""
        return tuple([call for call in self.calls if call.edited])

    @cached_property
    def edited_refs(self) -> frozenset[Ref]:
        """The values that are not what was recorded, or not from where it was: a write goes to them, not to a base."""
        return self.apart.union([ref for call in self.edited for ref in refs_of(call)])

    @cached_property
    def input_nodes(self) -> tuple[Input, ...]:
        return tuple([node for node in self.nodes if isinstance(node, Input)])

    @cached_property
    def state_nodes(self) -> tuple[State, ...]:
        return tuple([node for node in self.nodes if isinstance(node, State)])

    @cached_property
    def state_by_name(self) -> dict[str, State]:
        """By address, by further address, and by the name of the node."""
        named = [(name, node) for node in self.state_nodes for name in (node.address, *node.aliases, node.name)]
        return dict(named)

    @cached_property
    def const_nodes(self) -> tuple[Const, ...]:
        return tuple([node for node in self.nodes if isinstance(node, Const)])

    def descendants(self, names: Iterable[str]) -> frozenset[str]:
        """Every node that one of these can reach, themselves included."""
        marks = self._spread([self.positions[name] for name in names], self.reached)
        return frozenset([node.name for node, mark in zip(self.nodes, marks, strict=True) if mark])

    def ancestors(self, names: Iterable[str]) -> frozenset[str]:
        """Every node that reaches one of these, themselves included."""
        marks = self._spread([self.positions[name] for name in names], self.parents)
        return frozenset([node.name for node, mark in zip(self.nodes, marks, strict=True) if mark])

    def marked_ancestors(self, names: Iterable[str]) -> bytearray:
        """A one for each position whose node reaches one of these, themselves included."""
        return self._spread([self.positions[name] for name in names], self.parents)

    def _spread(self, start: list[int], along: tuple[tuple[int, ...], ...]) -> bytearray:
        marks, stack = bytearray(len(self.nodes)), list(start)
        while stack:
            position = stack.pop()
            if not marks[position]:
                marks[position] = 1
                stack.extend(along[position])
        return marks

    def __repr__(self) -> str:
        calls, inputs, state = len(self.calls), len(self.input_nodes), len(self.state_nodes)
        return f"<Graph of {self.model_name or 'a model'}: {calls} calls, {inputs} inputs, {state} state tensors>"


def _is_custom(call: Call) -> bool:
    """Is it a custom `autograd.Function`, by itself or as a write?"""
    owners = [getattr(target.function, "__self__", None) for target in call.functions]
    return any(isinstance(owner, type) and issubclass(owner, torch.autograd.Function) for owner in owners)


class GradientArguments(NamedTuple):
    """What `differentiate` is given, in its order. In a node trees of Refs, in a recording of Handles."""

    stretch: Graph  # from what is differentiated by to what is differentiated: (outputs, by what) is its output
    starts: Any  # its first inputs, from which gradients can flow
    others: Any  # its other inputs
    cotangents: Any  # a Ref or None for each output
    states: Any  # of the generator, by the keys of the draws in the stretch
    keep_graph: bool  # it is differentiated again
    there: Any  # then: the output of the stretch as the program itself computes it


@frozen
class InnerGradient(Call):
    """A gradient that the model takes inside its forward: it runs the calls in `through` again, as its stretch. One
    that stands in a stretch itself has none: its own stretch is all that it knows.

    Of `y = x.sin(); (g,) = torch.autograd.grad(y, x, v)` the last is

        InnerGradient(name="grad_1_2", through=("sin_1_1",), args=GradientArguments(
            stretch=<call_0 = sin(value_0); return (call_0,), (value_0,)>, starts=(x,), others=(), cotangents=(v,),
            states={}, keep_graph=False, there=(),
        ), returns=(grad_1_2[0],))
    """

    @property
    def arguments(self) -> GradientArguments:
        """Its arguments by name."""
        return GradientArguments(*self.args)
