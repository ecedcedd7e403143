"""A Graph: nodes in execution order and the tree of outputs. Structure only: comparable, printable, hashable.

In: nodes and trees of Refs. Out: the lookups that passes need (positions, users, cones), each computed once. Values,
and the names that people use for nodes, are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from attrs import field, frozen

from .memory import NO_OVERLAPS, Overlaps
from .node import NO_MODES, Call, Const, Context, GeneratorLeft, Guard, Input, Node, Ref, Scope, State, refs_in, refs_of
from .ops import Quirk, op_info_of_kind
from .util import cached_property


@frozen
class Graph:
    """A pure program. Every node reads only nodes before it; the output is a tree of Refs and plain values."""

    nodes: tuple[Node, ...]
    output: Any
    inputs: Any = ()  # (args, kwargs) as a tree of Refs to Input nodes
    guards: tuple[Guard, ...] = ()
    asked: tuple[Guard, ...] = ()  # facts independent of content that the model reads: layouts, flags, modes
    module_outputs: tuple[tuple[Scope, Any], ...] = ()
    changes: tuple[tuple[str, Ref], ...] = ()  # writes to state: address of a parameter or buffer, new value
    replaced: frozenset[str] = frozenset()  # of these, where another tensor was assigned and nothing written in place
    recomputed_writes: tuple[str, ...] = ()  # of these, those in a checkpoint, which the backward writes again
    removed: tuple[str, ...] = ()  # addresses set to None or deleted
    path_varies: tuple[str, ...] = ()  # why the model's next forward may take another path
    collects: bool = False  # the forward calls `.backward()`, which leaves gradients in parameters
    altered: tuple[str, ...] = field(default=(), eq=False)  # Python state that it reads and changes, such as counters
    orphans: frozenset[str] = frozenset()  # depend on no input and reach no output
    written: frozenset[Ref] = frozenset()  # the first values of storages that are written
    asks_identity: bool = False  # code that ran uses `is` on objects
    catches: bool = False  # code that ran catches exceptions
    is_deep: bool = False  # recorded at ATen level throughout, as for TorchScript
    detached_inputs: frozenset[Ref] = frozenset()  # inputs of a slice: no longer views of their bases
    shares_inputs: bool = False  # an input aliases another, or state, that is written: only the recorded inputs fit
    overlaps: Overlaps = NO_OVERLAPS  # which inputs share memory, and for which it matters
    literals: tuple[tuple[tuple[Any, ...], str], ...] = ()  # plain objects among the inputs: path, fingerprint
    takes_any_keyword: bool = False  # the forward can see the order of its keyword arguments
    forward_only: tuple[str, ...] = ()  # custom functions without a usable backward
    other_random_sources: tuple[str, ...] = ()  # sources of random numbers besides torch: "random", "numpy"
    generator_read: tuple[str, ...] = ()  # how it read the state or seed of torch's generator
    left: GeneratorLeft | None = None  # where it leaves torch's generator, if it advanced it
    outer_modes: Context = NO_MODES  # the modes active around the whole forward
    default_dtype: torch.dtype = torch.float32
    default_device: str = "cpu"
    model_name: str = field(default="", eq=False)
    twice: tuple[tuple[str, str], ...] = ()  # for shared modules: another address, the first one
    unread: frozenset[str] = field(default=frozenset(), eq=False)  # addresses of state that was not read

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
        """The values each node reads."""
        return tuple([node.refs for node in self.nodes])

    @cached_property
    def gives(self) -> tuple[tuple[Ref, ...], ...]:
        """The values each node gives, each once."""
        return tuple([refs_of(node) for node in self.nodes])

    @cached_property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the nodes each node reads, each once, in the order of its arguments."""
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
        """True if it was recorded outside inference mode, and no guard asks whether a tensor was made within it."""
        return not self.outer_modes.inference and all(guard.target.short != "is_inference" for guard in self.asked)

    @cached_property
    def drawn(self) -> dict[str, int]:
        """The position of each draw, by the key of its generator's state."""
        return {self.nodes[p].draws: p for p in self.drawing}

    @cached_property
    def drawing(self) -> tuple[int, ...]:
        """The positions of the calls that draw."""
        return tuple([p for p, node in enumerate(self.nodes) if isinstance(node, Call) and node.draws is not None])

    @cached_property
    def last_draw(self) -> tuple[int, ...]:
        """The position of the draw behind which the forward leaves torch's generator; empty if it is none of these."""
        key = self.left.follows if self.left is not None else None
        return (self.drawn[key],) if key is not None and key in self.drawn else ()

    @cached_property
    def turns(self) -> dict[int, int]:
        """For each draw that continues the stream of another call: that call's position."""
        follows = {p: self.nodes[p].follows for p in self.drawn.values()}
        found = {p: self.drawn[key] for p, key in follows.items() if key is not None and key in self.drawn}
        return {position: before for position, before in found.items() if before < position}

    @cached_property
    def states(self) -> dict[int, tuple[Ref, ...]]:
        """For each draw: the values that hold its generator state, for calls that run it again themselves."""
        found: dict[int, list[Ref]] = {}
        for call in self.inner_gradients:
            given = call.arguments
            held = dict(zip(given.states.keys or (), given.states.items, strict=True))
            for name, inner in zip(call.through, given.stretch.calls, strict=True):
                if inner.draws is not None and name in self.positions:
                    found.setdefault(self.positions[name], []).append(held[inner.draws])
        return {position: tuple(dict.fromkeys(refs)) for position, refs in found.items()}

    @cached_property
    def state_of(self) -> dict[int, int]:
        """The inverse: for each such value, by position, its draw."""
        return {self.positions[ref.node]: position for position, refs in self.states.items() for ref in refs}

    @cached_property
    def inner_gradients(self) -> tuple[InnerGradient, ...]:
        """The gradients inside the forward that run other calls of this graph again."""
        return tuple([call for call in self.calls if isinstance(call, InnerGradient) and call.through])

    def is_recomputed(self, name: str) -> bool:
        """True if a gradient is taken through this node by running it again."""
        return any(name in call.through for call in self.inner_gradients)

    @cached_property
    def flag_readers(self) -> tuple[Call, ...]:
        """The custom functions that can read `requires_grad` of what they are given, and act on it."""
        flags = {ref for guard in self.asked if guard.kind == "flags" for ref in guard.refs}
        calls = (
            [node for node in self.nodes if isinstance(node, Call) and flags.intersection(node.refs)] if flags else []
        )
        return tuple([call for call in calls if _is_custom(call)])

    @cached_property
    def shifts(self) -> dict[int, int]:
        """Those of `turns` whose earlier call may take more or fewer numbers than recorded, or was itself shifted."""
        found: dict[int, int] = {}
        for position, before in self.turns.items():
            if before in found or not op_info_of_kind(self.nodes[before].kind).has(Quirk.DRAWS_BY_SHAPE):
                found[position] = before
        return found

    @cached_property
    def dependents(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the nodes that depend on each node: its users, calls that run it again, and draws that it
        may shift.
        """
        again: dict[int, list[int]] = {}
        for position, before in self.shifts.items():
            again.setdefault(before, []).append(position)
        for call in self.inner_gradients:
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
        """What a whole run computes: the outputs and the new values of what the model wrote."""
        return (*self.output_refs, *(ref for _, ref in self.changes))

    @cached_property
    def written_state(self) -> frozenset[str]:
        """The names of the state whose addresses hold something else after the forward."""
        ends = {*[address for address, _ in self.changes], *self.removed}
        return frozenset([node.name for node in self.state_nodes if not ends.isdisjoint((node.address, *node.aliases))])

    @cached_property
    def call_marks(self) -> bytearray:
        """A one for each position that holds a call."""
        return bytearray([isinstance(node, Call) for node in self.nodes])

    @cached_property
    def source_marks(self) -> bytes:
        """A one for each position that holds no call."""
        return bytes([not mark for mark in self.call_marks])

    @cached_property
    def needed_marks(self) -> bytearray:
        """A one for each position on which an output, or what Python read, depends."""
        read = [*self.wanted_refs, *(ref for guard in self.guards for ref in guard.refs)]
        return self.marked_ancestors([ref.node for ref in read])

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return tuple([node for node in self.nodes if isinstance(node, Call)])

    @cached_property
    def edited(self) -> tuple[Call, ...]:
        """The calls that an edit put in the place of recorded ones."""
        return tuple([call for call in self.calls if call.edited])

    @cached_property
    def edited_refs(self) -> frozenset[Ref]:
        """The values that are not as recorded, or not where they were: a write goes to them and not to a base."""
        return self.detached_inputs.union([ref for call in self.edited for ref in refs_of(call)])

    @cached_property
    def input_nodes(self) -> tuple[Input, ...]:
        return tuple([node for node in self.nodes if isinstance(node, Input)])

    @cached_property
    def state_nodes(self) -> tuple[State, ...]:
        return tuple([node for node in self.nodes if isinstance(node, State)])

    @cached_property
    def state_by_name(self) -> dict[str, State]:
        """State nodes by address, further address, and node name."""
        named = [(name, node) for node in self.state_nodes for name in (node.address, *node.aliases, node.name)]
        return dict(named)

    @cached_property
    def const_nodes(self) -> tuple[Const, ...]:
        return tuple([node for node in self.nodes if isinstance(node, Const)])

    def descendants(self, names: Iterable[str]) -> frozenset[str]:
        """Every node that one of these can reach, themselves included."""
        return self._marked(self.marked_descendants(names))

    def ancestors(self, names: Iterable[str]) -> frozenset[str]:
        """Every node that can reach one of these, themselves included."""
        return self._marked(self.marked_ancestors(names))

    def marked_ancestors(self, names: Iterable[str]) -> bytearray:
        """A one for each position whose node can reach one of these, themselves included."""
        return self._spread(names, self.parents)

    def marked_descendants(self, names: Iterable[str]) -> bytearray:
        """A one for each position whose node one of these can reach, themselves included."""
        return self._spread(names, self.dependents)

    def _marked(self, marks: bytearray) -> frozenset[str]:
        return frozenset([node.name for node, mark in zip(self.nodes, marks, strict=True) if mark])

    def _spread(self, names: Iterable[str], along: tuple[tuple[int, ...], ...]) -> bytearray:
        marks, stack = bytearray(len(self.nodes)), [self.positions[name] for name in names]
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
    """True if a call runs a custom `autograd.Function`, possibly as a write."""
    owners = [getattr(target.function, "__self__", None) for target in call.functions]
    return any(isinstance(owner, type) and issubclass(owner, torch.autograd.Function) for owner in owners)


class GradientArguments(NamedTuple):
    """The arguments of `differentiate`, in order: trees of Refs in a node, of ValueIds in a recording."""

    stretch: Graph  # from the tensors differentiated by to the outputs; its output is (outputs, these tensors)
    starts: Any  # its first inputs, through which gradients can flow
    others: Any  # its other inputs
    cotangents: Any  # a Ref or None for each output
    states: Any  # generator states, by the keys of the draws in the stretch
    keep_graph: bool  # the gradient is itself differentiated
    there: Any  # then: the output of the stretch, as the program computes it


@frozen
class InnerGradient(Call):
    """A gradient that the model takes inside its forward. It runs the calls in `through` again, as its stretch; inside
    a stretch `through` is empty, as its own stretch is all that it knows.

    Of `y = x.sin(); (g,) = torch.autograd.grad(y, x, v)` the last is recorded as

        InnerGradient(name="grad_1_2", through=("sin_1_1",), args=GradientArguments(
            stretch=<call_0 = sin(value_0); return (call_0,), (value_0,)>, starts=(x,), others=(), cotangents=(v,),
            states={}, keep_graph=False, there=(),
        ), returns=(grad_1_2[0],))
    """

    @property
    def arguments(self) -> GradientArguments:
        """Its arguments by name."""
        return GradientArguments(*self.args)
