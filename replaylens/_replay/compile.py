"""The compiler: a plan of a graph as steps over numbered slots.

In: a Plan of a Graph, and which values are patched. Out: Code. A step reads its arguments from slots by one
`itemgetter`. Patch functions stand in slots, too, so that all patches at the same values share one Code. The slots of
values and the steps of calls are made once per graph: a further plan only adds what dies, and where.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
)
from .._ir.trees import leaves, thaw, walk
from .._ir.util import cached_property
from .._ir.write import Write
from .alias_analysis import NO_REFS, detached_views
from .guards import departure
from .interpreter import Code, Env, Segment, Step
from .plan import Plan
from .rng_stream import drawing_as_the_user, has_own_generator, leave_generator_at, stream_of, with_generator_turn
from .traced_trees import built, is_plain, pattern_of

Patched = Mapping[int, tuple[Any, ...]]  # by position: which of its values are patched, as trees of Refs


@frozen
class Mode:
    """How a graph is compiled: which recorded contexts and draws hold in this replay."""

    grad: bool = False
    fresh: bool = False
    left: GeneratorLeft | None = None  # of fresh draws: where the user's generator is left
    places: Mapping[int, tuple[Ref, ...]] = MappingProxyType({})  # by position: values to take gradients at


AS_RECORDED = Mode()


class CompiledGraph:
    """What all plans of a graph share: the slots of its values, and the steps of its calls, each made when a plan first
    runs it.

    The slot of a node is its position. Literals have slots that are fixed from the beginning, so that two threads can
    make the same step.
    """

    def __init__(self, graph: Graph, is_traced: bool = False) -> None:
        self.graph = graph
        self.is_traced = is_traced  # torch.compile may trace it
        self.slots: dict[Ref, int] = {}
        self.refs: list[Ref] = []  # by position
        self.several: dict[int, tuple[tuple[Ref, int], ...]] = {}  # of calls that give several values: these, and slots
        self.freed: list[tuple[int, ...]] = []  # by position: the slots to free; none for the model's own tensors
        self.literals: dict[int, int] = {}  # the slot of the first literal of a call
        self.template: list[Any] = []
        self.keeping: list[Step | None] = [None] * len(graph)  # by position: the step that frees nothing
        self.freeing: list[Step | None] = [None] * len(graph)  # by position: the newest step that frees values
        self._lay_out()

    def _lay_out(self) -> None:
        count = len(self.graph)
        for position, node in enumerate(self.graph.nodes):
            ref, returns = Ref(node.name), node.returns if isinstance(node, Call) else None
            ref = returns if returns == ref else ref  # the same object is found faster
            self.slots[ref], slots = position, [position]
            self.refs.append(returns if type(returns) is Ref else ref)
            if isinstance(node, Call) and type(returns) is not Ref:
                refs = tuple(dict.fromkeys(refs_in(returns)))
                slots += range(count, count + len(refs))
                self.several[position] = tuple(zip(refs, slots[1:], strict=True))
                self.slots.update(self.several[position])
                count += len(refs)
            self.freed.append(() if isinstance(node, State) else tuple(slots))
            if isinstance(node, Call) and (literals := sum([type(arg) is not Ref for arg in node.args])):
                self.literals[position] = count
                count += literals
        self.empty = count  # a slot that holds nothing
        self.template = [None] * (count + 1)

    @cached_property
    def contexts(self) -> list[Context]:
        """By position: the recorded modes of calls; around other nodes those around the whole model."""
        return [node.context if isinstance(node, Call) else self.graph.outer_modes for node in self.graph.nodes]

    @cached_property
    def contexts_for_gradients(self) -> list[Context]:
        """The same without the modes that lay around the whole model."""
        ambient, known = self.graph.outer_modes, dict[int, Context]()
        for context in self.contexts:
            if id(context) not in known:
                grad, inference = context.grad or not ambient.grad, context.inference and not ambient.inference
                known[id(context)] = Context(grad, inference, context.autocast, context.settings)
        return [known[id(context)] for context in self.contexts]

    def step(self, position: int, dead: tuple[int, ...]) -> Step:
        """The step of a call that is the same in all plans, but for what is freed after it."""
        known = self.freeing[position] or self.keeping[position]
        if known is None:
            node, free = self.graph.nodes[position], itertools.count(self.literals.get(position, self.empty + 1))

            def literal(value: Any) -> int:
                slot = next(free)
                self.template[slot] = value
                return slot

            assert isinstance(node, Call) and node.draws is None and not node.through
            node = node.with_values(NO_REFS) if isinstance(node, Write) else node
            known = self.step_of(position, node, reader(node, self.slots, literal, {}, self.is_traced), dead)
        elif known.dead != dead:
            known = evolve(known, dead=dead)
        (self.freeing if dead else self.keeping)[position] = known
        return known

    def step_of(self, position: int, node: Call, made: Any, dead: tuple[int, ...]) -> Step:
        """A step of a call, made of how it reads its arguments and how it is made."""
        read, call = made
        parts = tuple([(ref.path, slot) for ref, slot in self.several.get(position, ())])
        return Step(node.name, read, call, position, parts, dead, node.source, is_node=True, empty=self.empty)


def compile_plan(
    compiled: CompiledGraph,
    plan: Plan,
    states: Mapping[str, torch.Tensor],
    recorded: Callable[[Ref], torch.Tensor],
    mode: Mode = AS_RECORDED,
    patched: Patched = MappingProxyType({}),
) -> Code:
    """Code for a plan. `states` are the generator states before the recorded draws, `recorded` gives the values that
    guards compare with.
    """
    return _Compiler(compiled, plan, states, recorded, mode, patched).code()


class _Compiler:
    """One plan while it is compiled."""

    def __init__(
        self,
        compiled: CompiledGraph,
        plan: Plan,
        states: Mapping[str, torch.Tensor],
        recorded: Callable[[Ref], torch.Tensor],
        mode: Mode,
        patched: Patched,
    ) -> None:
        self.compiled, self.plan, self.states, self.recorded = compiled, plan, states, recorded
        self.graph, self.slots = compiled.graph, compiled.slots
        self.mode, self.patched, self.run = mode, patched, frozenset(plan.run)
        self.first_literal, self.literals = len(compiled.template), list[Any]()
        self.contexts = compiled.contexts_for_gradients if mode.grad else compiled.contexts
        self.stream = stream_of(self.graph, self.run, mode.fresh, self._literal, self.slots, mode.left)
        self.departed = self._literal(None)
        self.functions = {(p, n): self._literal(None) for p, trees in patched.items() for n in range(len(trees))}
        self.steps: list[Step] = []
        self.modes: list[Context] = []  # of each step

    def _literal(self, value: Any) -> int:
        """A slot of this plan alone."""
        self.literals.append(value)
        return self.first_literal + len(self.literals) - 1

    def code(self) -> Code:
        """The whole Code. Guards come before the node at their position, patches after theirs."""
        graph, plan = self.graph, self.plan
        guards: dict[int, list[Guard]] = {}
        for number in plan.guards:
            guards.setdefault(graph.guards[number].position, []).append(graph.guards[number])
        dying, changed = self._dying(), frozenset(plan.patch)
        refs = {ref for trees in self.patched.values() for tree in trees for ref in refs_in(tree)}
        detached = {graph.positions[name]: views for name, views in detached_views(graph, refs).items()}
        own = {*guards, *changed, *detached, *self.mode.places, *graph.drawing}
        own.update([graph.positions[call.name] for call in graph.inner_gradients])
        steps, modes, freeing, keeping = self.steps, self.modes, self.compiled.freeing, self.compiled.keeping
        for position in sorted(self.run.union(guards, changed)):
            dead = dying.get(position, ())
            if position not in own:
                step = freeing[position] if dead else keeping[position]
                if step is None or step.dead != dead:
                    step = self.compiled.step(position, dead)
                steps.append(step)
                modes.append(self.contexts[position])
                continue
            for guard in guards.get(position, ()):
                self._add_guard(guard)
            trees = self.patched.get(position, ()) if position in changed else ()
            places = self.mode.places.get(position, ()) if position in self.run or trees else ()
            if position in self.run:
                self._add_call(position, detached.get(position, NO_REFS), () if trees or places else dead)
            if trees or places:
                self._add_patches(position, trees, places, dead)
        self._add_generator_exit()
        return self._made()

    def _dying(self) -> dict[int, tuple[int, ...]]:
        """What is freed after each step."""
        dying: dict[int, list[tuple[int, ...]]] = {}
        kept, freed = self.plan.kept, self.compiled.freed
        for position, last in self.plan.last_use.items():
            if position not in kept:
                dying.setdefault(last, []).append(freed[position])
        return {
            last: many[0] if len(many) == 1 else tuple(itertools.chain.from_iterable(many))
            for last, many in dying.items()
        }

    def _made(self) -> Code:
        graph, plan, slots = self.graph, self.plan, self.slots
        there = self.run.union(plan.supply) if self.mode.places else ()
        refs, several = self.compiled.refs, self.compiled.several
        supply = [several[p] if p in several else ((refs[p], slots[refs[p]]),) for p in plan.supply]
        return Code(
            (*self.compiled.template, *self.literals),
            tuple(_segments(self.modes, self.steps)),
            slots,
            tuple(itertools.chain.from_iterable(supply)),
            tuple([(*place, slot) for place, slot in self.functions.items()]),
            self.departed,
            tuple([graph.nodes[p].name for p in plan.run]),
            self.stream.sets,
            tuple([ref for position, refs in self.mode.places.items() if position in there for ref in refs]),
            self.stream.begun(graph),
        )

    def _add(self, context: Context, step: Step) -> None:
        self.steps.append(step)
        self.modes.append(context)

    def _add_guard(self, guard: Guard) -> None:
        slots, departed, recorded = self.slots, self.departed, self.recorded

        def check(env: Env) -> None:
            found = departure(guard, lambda ref: env[slots[ref]], recorded)
            if found is not None and env[departed] is not None:
                env[departed](found)

        self._add(NO_MODES, self._own_step("a guard", lambda env: (env,), check))

    def _add_call(self, position: int, detached: frozenset[Ref], dead: tuple[int, ...]) -> None:
        """A call of the model's, with its recorded draws or in its place in the generator's stream."""
        node, turn = self.graph.nodes[position], self.stream.turns.get(position)
        assert isinstance(node, Call)
        node = node.with_values(detached) if isinstance(node, Write) else node
        if turn is None:
            read, call = caller(node, self.slots, self._literal, self.states, self.compiled.is_traced)
        else:
            read, call = reader(node, self.slots, self._literal, {}, self.compiled.is_traced)
            read, call = with_generator_turn(
                read, call, turn, None if turn.begins is not None else self.states.get(node.draws or "")
            )
        if node.through:
            read, call = self._rerunning(node, read, call)
        self._add(self.contexts[position], self.compiled.step_of(position, node, (read, call), dead))

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

    def _add_patches(self, position: int, trees: Any, places: tuple[Ref, ...], dead: tuple[int, ...]) -> None:
        """What follows a node: its patches, and a node of its own in autograd's graph."""
        node, apply = self.graph.nodes[position], drawing_as_the_user(self.stream, _applied)
        after = [self._patch_step(node, *each, apply) for each in (self._functions(position) if trees else ())]
        if places:
            after.append(self._place_step(node, places, bool(trees)))
        after[-1] = evolve(after[-1], dead=dead)
        for step in after:
            self._add(self.contexts[position], step)

    def _patch_step(self, node: Node, tree: Any, function: int, apply: Callable[..., Any]) -> Step:
        """A patch reads values of a node as the model saw them, and replaces them."""
        slots = self.slots
        if type(tree) is Ref:
            return self._own_step(node.name, itemgetter(function, slots[tree]), apply, slots[tree])

        def read(env: Env) -> Any:
            return env[function], filled(tree, lambda ref: env[slots[ref]])

        parts = tuple([(path, slots[ref]) for path, ref in walk(tree) if type(ref) is Ref])
        return self._own_step(node.name, read, apply, None, parts)

    def _place_step(self, node: Any, refs: tuple[Ref, ...], patched: bool) -> Step:
        """Gives values of a node nodes of their own in autograd's graph. See `placed`."""
        slots = [self.slots[ref] for ref in refs]
        others = [self.slots[ref] for ref in node.refs] if isinstance(node, Call) else []
        if patched:
            others += slots  # a patch may give any object, also one that stands elsewhere
        read = (
            itemgetter(*slots, *others) if len(slots) + len(others) > 1 else itemgetter(slice(slots[0], slots[0] + 1))
        )
        if len(refs) == 1:
            return self._own_step(node.name, read, as_own_node, slots[0])
        parts = tuple([((number,), slot) for number, slot in enumerate(slots)])
        return self._own_step(node.name, read, partial(as_own_nodes, len(slots)), None, parts)

    def _add_generator_exit(self) -> None:
        left = self.stream.leaves
        if left is not None:
            slot = self._literal(self.states[left]) if isinstance(left, str) else left
            leave = self._own_step("the generator", partial(leave_generator_at, slot), _same)
            self._add(self.modes[-1] if self.modes else NO_MODES, leave)

    def _own_step(self, name: str, read: Any, call: Any, slot: int | None = None, parts: Any = ()) -> Step:
        """A step of this plan alone, which frees nothing."""
        slot = self._literal(None) if slot is None else slot
        return Step(name, read, call, slot, parts, (), empty=self.compiled.empty)


def _segments(modes: Sequence[Context], steps: Sequence[Step]) -> Iterator[Segment]:
    """The steps, cut where the modes change."""
    starts = [n for n, mode in enumerate(modes) if n == 0 or (mode is not modes[n - 1] and mode != modes[n - 1])]
    for start, end in itertools.pairwise((*starts, len(steps))):
        part = tuple(steps[start:end])
        yield Segment(modes[start], tuple([step.row for step in part]), part)


def caller(
    node: Call,
    slots: dict[Ref, int],
    literal: Callable[[Any], int],
    states: Mapping[str, torch.Tensor],
    is_traced: bool = False,
) -> Any:
    """How a call reads its arguments, and how it is made, with its recorded draws: (read, call)."""
    read, call = reader(node, slots, literal, states, is_traced)
    if node.draws is not None and not has_own_generator(node):
        call = _with_recorded_draw(call, states[node.draws])
    return read, call


def reader(
    node: Call,
    slots: dict[Ref, int],
    literal: Callable[[Any], int],
    states: Mapping[str, torch.Tensor],
    is_traced: bool,
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
        if is_traced:  # the compiler does not know itemgetters
            return partial(_read_slots, tuple(flat)), function
        if len(flat) == 1:
            return itemgetter(slice(flat[0], flat[0] + 1)), function  # a list of one, to be starred like a tuple
        return itemgetter(*flat), function
    trees = (node.args, tuple([value for _, value in node.kwargs]))
    if is_traced and is_plain(trees, (list, dict, slice, tuple)) and Generator not in map(type, leaves(trees)):
        given = pattern_of(node.args, slots.__getitem__)
        named = tuple([(key, pattern_of(value, slots.__getitem__)) for key, value in node.kwargs])
        return partial(_read_trees, given, () if plain else named), partial(_call_with, function)

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


def _read_trees(given: Any, named: Any, env: Env) -> Any:
    return built(given, env), {key: built(pattern, env) for key, pattern in named}


def _call_with(function: Callable[..., Any], args: Any, kwargs: Any, **more: Any) -> Any:
    return function(*args, **kwargs, **more)


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
