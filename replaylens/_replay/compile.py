"""The compiler: a plan of a graph as steps over numbered slots.

In: a Plan of a Graph, and which values are patched. Out: Code. A step reads its arguments from slots by one
`itemgetter`. Patch functions stand in slots, too, so that all patches at the same values share one Code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen

from .._ir.autograd import as_own_node, as_own_nodes
from .._ir.graph import Graph
from .._ir.node import (
    NO_MODES,
    Call,
    Context,
    Generator,
    GeneratorLeft,
    Guard,
    Node,
    Ref,
    State,
    filled,
    refs_in,
    refs_of,
)
from .._ir.trees import leaves, thaw, walk
from .._ir.write import Write
from .alias_analysis import NO_REFS, detached_views
from .guards import departure
from .interpreter import Code, Env, Segment, Step
from .plan import Plan
from .rng_stream import drawing_as_the_user, has_own_generator, leave_generator_at, stream_of, with_generator_turn

Patched = Mapping[int, tuple[Any, ...]]  # by position: which of its values are patched, as trees of Refs


@frozen
class Mode:
    """How a graph is compiled: which recorded contexts and draws hold in this replay."""

    grad: bool = False
    fresh: bool = False
    left: GeneratorLeft | None = None  # of fresh draws: where the user's generator is left
    is_traced: bool = False  # torch.compile may trace it
    places: Mapping[int, tuple[Ref, ...]] = MappingProxyType({})  # by position: values to take gradients at


AS_RECORDED = Mode()


def compile_plan(
    graph: Graph,
    plan: Plan,
    states: Mapping[str, torch.Tensor],
    recorded: Callable[[Ref], torch.Tensor],
    mode: Mode = AS_RECORDED,
    patched: Patched = MappingProxyType({}),
) -> Code:
    """Code for a plan. `states` are the generator states before the recorded draws, `recorded` gives the values that
    guards compare with.
    """
    return _Compiler(graph, plan, states, recorded, mode, patched).code()


class _Compiler:
    """One plan while it is compiled."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        states: Mapping[str, torch.Tensor],
        recorded: Callable[[Ref], torch.Tensor],
        mode: Mode,
        patched: Patched,
    ) -> None:
        self.graph, self.plan, self.states, self.recorded = graph, plan, states, recorded
        self.mode, self.patched, self.run = mode, patched, frozenset(plan.run)
        self.slot_map = slot_map = _Slots(graph)
        self.stream = stream_of(graph, plan.run, mode.fresh, slot_map.literal, slot_map.slots, mode.left)
        self.departed = slot_map.literal(None)
        self.functions = {(p, n): slot_map.literal(None) for p, trees in patched.items() for n in range(len(trees))}
        self.steps: list[tuple[Context, Step]] = []

    def code(self) -> Code:
        """The whole Code. Guards come before the node at their position, patches after theirs."""
        graph, plan = self.graph, self.plan
        guards: dict[int, list[Guard]] = {}
        for number in plan.guards:
            guards.setdefault(graph.guards[number].position, []).append(graph.guards[number])
        dying, changed = _dying(graph, plan, self.slot_map), frozenset(plan.patch)
        refs = {ref for trees in self.patched.values() for tree in trees for ref in refs_in(tree)}
        detached = detached_views(graph, refs)
        for position, node in enumerate(graph.nodes):
            for guard in guards.get(position, ()):
                self._add_guard(guard)
            trees = self.patched.get(position, ()) if position in changed else ()
            places = self.mode.places.get(position, ()) if position in self.run or trees else ()
            dead = dying.get(position, ())
            if position in self.run:
                assert isinstance(node, Call)
                self._add_call(
                    position,
                    (node.with_values(detached.get(node.name, NO_REFS)) if isinstance(node, Write) else node),
                    () if trees or places else dead,
                )
            if trees or places:
                self._add_patches(position, node, trees, places, dead)
        for guard in guards.get(len(graph), ()):
            self._add_guard(guard)
        self._add_generator_exit()
        return self._made()

    def _made(self) -> Code:
        graph, plan, slots = self.graph, self.plan, self.slot_map.slots
        there = self.run.union(plan.supply)
        nothing = self.slot_map.literal(None)
        return Code(
            tuple(self.slot_map.template),
            tuple(_segments(self.steps, nothing)),
            slots,
            tuple([(ref, slots[ref]) for position in plan.supply for ref in refs_of(graph.nodes[position])]),
            tuple([(*place, slot) for place, slot in self.functions.items()]),
            self.departed,
            tuple([graph.nodes[p].name for p in plan.run]),
            self.stream.sets,
            tuple([ref for position, refs in self.mode.places.items() if position in there for ref in refs]),
            self.stream.begun(graph),
        )

    def _add_guard(self, guard: Guard) -> None:
        slots, departed, recorded = self.slot_map.slots, self.departed, self.recorded

        def check(env: Env) -> None:
            found = departure(guard, lambda ref: env[slots[ref]], recorded)
            if found is not None and env[departed] is not None:
                env[departed](found)

        self.steps.append((NO_MODES, Step("a guard", lambda env: (env,), check, self.slot_map.literal(None), (), ())))

    def _add_call(self, position: int, node: Call, dead: tuple[int, ...]) -> None:
        """A call of the model's, with its recorded draws or in its place in the generator's stream."""
        slots, literal, turn = self.slot_map.slots, self.slot_map.literal, self.stream.turns.get(position)
        if turn is None:
            read, call = caller(node, slots, literal, self.states, self.mode)
        else:
            read, call = reader(node, slots, literal, {}, self.mode)
            read, call = with_generator_turn(
                read, call, turn, None if turn.begins is not None else self.states.get(node.draws or "")
            )
        if node.through:
            read, call = self._rerunning(node, read, call)
        slot, parts = slots[Ref(node.name)], self.slot_map.parts[node.name]
        step = Step(node.name, read, call, slot, parts, dead, node.source, is_node=True)
        self.steps.append((self._context(node.context), step))

    def _rerunning(self, node: Call, read: Any, call: Any) -> Any:
        """A call that reruns other nodes itself: it receives the patches at these, or is told that all of them have
        run.
        """
        positions = [self.graph.positions.get(name, -1) for name in node.through]  # an edit may have removed some
        inside = {n: [*self._functions(p)] for n, p in enumerate(positions) if p in self.patched}
        if inside:

            def reading(env: Env) -> Any:
                return read(env), {n: tuple([(tree, env[slot]) for tree, slot in each]) for n, each in inside.items()}

            def patched(given: Any, patches: Any) -> Any:
                return call(*given, patches=patches)

            return reading, patched
        is_alive = self.mode.grad and self.run.issuperset(positions)
        return read, partial(call, is_alive=True) if is_alive else call

    def _functions(self, position: int) -> Iterator[tuple[Any, int]]:
        """The patches at a node: the values that each is for, and the slot of its function."""
        for number, tree in enumerate(self.patched[position]):
            yield tree, self.functions[position, number]

    def _add_patches(
        self, position: int, node: Node, trees: Any, places: tuple[Ref, ...], dead: tuple[int, ...]
    ) -> None:
        """What follows a node: its patches, and a node of its own in autograd's graph."""
        apply = drawing_as_the_user(self.stream, _applied)
        after = [
            _patch_step(node, self.slot_map, *each, apply) for each in (self._functions(position) if trees else ())
        ]
        if places:
            after.append(_place_step(node, self.slot_map, places, bool(trees)))
        after[-1] = evolve(after[-1], dead=dead)
        context = self._context(node.context if isinstance(node, Call) else self.graph.outer_modes)
        self.steps.extend([(context, step) for step in after])

    def _add_generator_exit(self) -> None:
        left, literal = self.stream.leaves, self.slot_map.literal
        if left is not None:
            slot = literal(self.states[left]) if isinstance(left, str) else left
            leave = Step("the generator", partial(leave_generator_at, slot), _same, literal(None), (), ())
            self.steps.append((self.steps[-1][0] if self.steps else NO_MODES, leave))

    def _context(self, context: Context) -> Context:
        """The modes of a call in this replay: the recorded ones; for gradients without those that lay around the whole
        model.
        """
        if not self.mode.grad:
            return context
        ambient = self.graph.outer_modes
        grad, inference = context.grad or not ambient.grad, context.inference and not ambient.inference
        return Context(grad, inference, context.autocast, context.settings)


def _segments(made: Sequence[tuple[Context, Step]], nothing: int) -> Iterator[Segment]:
    for context, group in groupby(made, itemgetter(0)):
        steps = tuple([step for _, step in group])
        yield Segment(context, tuple([step.row(nothing) for step in steps]), steps)


class _Slots:
    """The slot of each value, part of a value and literal."""

    def __init__(self, graph: Graph) -> None:
        self.slots: dict[Ref, int] = {}
        self.parts: dict[str, tuple[tuple[tuple[int, ...], int], ...]] = {}
        self.of_position: list[tuple[int, ...]] = []
        self.template: list[Any] = [None] * len(graph)
        for position, node in enumerate(graph.nodes):
            self.slots[Ref(node.name)] = position
            parts = []
            if isinstance(node, Call) and type(node.returns) is not Ref:
                for ref in dict.fromkeys(refs_in(node.returns)):
                    self.slots[ref] = len(self.template)
                    parts.append((ref.path, len(self.template)))
                    self.template.append(None)
            self.parts[node.name] = tuple(parts)
            self.of_position.append((position, *(slot for _, slot in parts)))

    def literal(self, value: Any) -> int:
        self.template.append(value)
        return len(self.template) - 1


def _dying(graph: Graph, plan: Plan, slot_map: _Slots) -> dict[int, tuple[int, ...]]:
    """What is freed after each step. The model's own tensors are not: the model holds them."""
    dying: dict[int, list[int]] = {}
    for position, last in plan.last_use.items():
        if position not in plan.kept and not isinstance(graph.nodes[position], State):
            dying.setdefault(last, []).extend(slot_map.of_position[position])
    return {last: tuple(slots) for last, slots in dying.items()}


def caller(
    node: Call, slots: dict[Ref, int], literal: Callable[[Any], int], states: Mapping[str, torch.Tensor], mode: Mode
) -> Any:
    """How a call reads its arguments, and how it is made, with its recorded draws: (read, call)."""
    read, call = reader(node, slots, literal, states, mode)
    if node.draws is not None and not has_own_generator(node):
        call = _with_recorded_draw(call, states[node.draws])
    return read, call


def reader(
    node: Call,
    slots: dict[Ref, int],
    literal: Callable[[Any], int],
    states: Mapping[str, torch.Tensor],
    mode: Mode,
) -> Any:
    """How a call reads its arguments, and how it is made: (read, call). Its own generators are set to the recorded
    state.
    """
    function = node.target.function
    found = [_slot(arg, slots, literal) for arg in node.args]
    flat = [slot for slot in found if slot is not None]
    plain = all(not _has_leaf(value) for _, value in node.kwargs)
    if node.kwargs and plain:
        function = partial(function, **{key: thaw(value, _same) for key, value in node.kwargs})
    if plain and len(flat) == len(found):
        if not flat:
            return (lambda env: ()), function
        if mode.is_traced:  # the compiler does not know itemgetters
            return partial(_read_slots, tuple(flat)), function
        if len(flat) == 1:
            return itemgetter(slice(flat[0], flat[0] + 1)), function  # a list of one, to be starred like a tuple
        return itemgetter(*flat), function

    def read(env: Env) -> Any:
        def leaf(value: Any) -> Any:
            if type(value) is Ref:
                return env[slots[value]]
            return _generator(states.get(value.key)) if type(value) is Generator else value

        args = [thaw(arg, leaf) for arg in node.args]
        return args, {} if plain else {key: thaw(value, leaf) for key, value in node.kwargs}

    def call(args: Any, kwargs: Any, **more: Any) -> Any:
        return function(*args, **kwargs, **more)

    return read, call


def _read_slots(slots: tuple[int, ...], env: Env) -> list[Any]:
    return [env[slot] for slot in slots]


def _same(leaf: Any) -> Any:
    return leaf


def _has_leaf(tree: Any) -> bool:
    return any(type(leaf) in (Ref, Generator) for leaf in leaves(tree))


def _slot(arg: Any, slots: dict[Ref, int], literal: Callable[[Any], int]) -> int | None:
    if type(arg) is Ref:
        return slots[arg]
    return None if _has_leaf(arg) else literal(thaw(arg, _same))


def _generator(state: torch.Tensor | None) -> torch.Generator:
    generator = torch.Generator()
    return generator if state is None else generator.set_state(state)


def _with_recorded_draw(call: Callable[..., Any], state: torch.Tensor) -> Callable[..., Any]:
    def draw(*args: Any) -> Any:
        torch.default_generator.set_state(state)
        return call(*args)

    return draw


def _applied(patch: Callable[[Any], Any], value: Any) -> Any:
    return patch(value)


def _patch_step(node: Node, slot_map: _Slots, tree: Any, function: int, apply: Callable[..., Any]) -> Step:
    """A patch reads values of a node as the model saw them, and replaces them."""
    if type(tree) is Ref:
        slot = slot_map.slots[tree]
        return Step(node.name, itemgetter(function, slot), apply, slot, (), ())

    def read(env: Env) -> Any:
        return env[function], filled(tree, lambda ref: env[slot_map.slots[ref]])

    parts = tuple([(path, slot_map.slots[ref]) for path, ref in walk(tree) if type(ref) is Ref])
    return Step(node.name, read, apply, slot_map.literal(None), parts, ())


def _place_step(node: Any, slot_map: _Slots, refs: tuple[Ref, ...], patched: bool) -> Step:
    """Gives values of a node nodes of their own in autograd's graph. See `placed`."""
    slots = [slot_map.slots[ref] for ref in refs]
    others = [slot_map.slots[ref] for ref in node.refs] if isinstance(node, Call) else []
    if patched:
        others += slots  # a patch may give any object, also one that stands elsewhere
    read = itemgetter(*slots, *others) if len(slots) + len(others) > 1 else itemgetter(slice(slots[0], slots[0] + 1))
    if len(refs) == 1:
        return Step(node.name, read, as_own_node, slots[0], (), ())
    parts = tuple([((number,), slot) for number, slot in enumerate(slots)])
    return Step(node.name, read, partial(as_own_nodes, len(slots)), slot_map.literal(None), parts, ())
