"""The interpreter: an env, a read, a write and a loop. It knows nothing of patches.

In: a Plan of a Graph, compiled here into steps over numbered slots. Out: the env after the last step. All decisions
were taken before: what to run, what to supply, what to forget. A step reads its arguments from slots by one
`itemgetter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from attrs import define, evolve, frozen

from .._core.autograd import all_placed, placed
from .._core.graph import Graph
from .._core.node import NO_MODES, Call, Context, Generator, Guard, Left, Ref, Source, State, refs_in
from .._core.notes import add_note
from .._core.settings import settings, under
from .._core.torch_private import default_device, is_any_autocast_on
from .._core.trees import leaves, part_at, thaw, walk
from .._core.world import World, drawing_alone, surely
from .._core.write import Write
from .guards import Departure, departure, raised_at
from .parting import NONE, parted
from .plan import Plan
from .rng_stream import Turn, apart_from, has_own_generator, in_turn, left_at, outside, streamed

Env = list[Any]
Patches = Mapping[int, tuple[tuple[Any, Callable[..., Any]], ...]]  # position -> (which of its values, new from old)


@frozen(eq=False)
class Step:
    """One call: where its arguments stand, what is called, where its value goes, what dies after it."""

    name: str
    read: Callable[[Env], Any]
    call: Callable[..., Any]
    slot: int
    parts: tuple[tuple[tuple[int, ...], int], ...]
    dead: tuple[int, ...]
    source: Source | None = None
    is_node: bool = False  # the model's own operation; else a patch, a guard

    @property
    def note(self) -> str:
        """What is added to an exception that the call raises."""
        where = "\n" + self.source.indented if self.source is not None else ""
        return f"replaylens: raised by node {self.name} of the program{where}"

    def row(self, nothing: int) -> Any:
        """As the loop has it: with one slot that is forgotten, which for most is all, and what else there is to do.
        `nothing`: a slot in which nothing stands.
        """
        more = (self.parts, self.dead[1:]) if self.parts or len(self.dead) > 1 else None
        return self.read, self.call, self.slot, self.dead[0] if self.dead else nothing, more


@frozen(eq=False)
class Stretch:
    """Steps that run under the same modes, as rows: a loop over tuples is a quarter faster than one over attributes."""

    context: Context
    rows: tuple[Any, ...]
    notes: tuple[str, ...]  # for an exception, by row
    nodes: tuple[str, ...]  # the node that each row runs; empty where it is a patch or a guard


@frozen(eq=False)
class Code:
    """A compiled plan: the slots to begin with, and the stretches to run."""

    template: tuple[Any, ...]
    stretches: tuple[Stretch, ...]
    slots: dict[Ref, int]
    executed: tuple[str, ...]
    draws: bool
    places: tuple[Ref, ...] = ()  # the values at which gradients can be taken
    begun: tuple[tuple[str, int], ...] = ()  # of draws that may begin elsewhere than recorded: the slot of that state


def states_begun(code: Code, env: Env) -> dict[str, torch.Tensor]:
    """The states in which draws began that may have begun elsewhere than recorded, by key."""
    return {key: env[slot] for key, slot in code.begun if env[slot] is not None}


@define
class Mode:
    """How a graph is compiled: what of the recorded contexts and draws holds in this replay."""

    grad: bool = False
    fresh: bool = False
    left: Left | None = None  # of fresh draws: where the user's generator is left
    is_traced: bool = False  # torch.compile may look at it
    places: Mapping[int, tuple[Ref, ...]] = MappingProxyType({})  # by position: values to take gradients at
    on_departure: Callable[[Departure], None] | None = None


def interpret(code: Code, env: Env) -> Env:
    """Run the steps. Torch's modes are left as they were, wherever an interrupt comes."""
    if torch.compiler.is_compiling():
        return _interpret(code, env)
    world = World()
    try:
        return _interpret(code, env)
    except BaseException:
        surely(world.put_back)
        raise


def _interpret(code: Code, env: Env) -> Env:
    """Run the steps. Values that nothing needs any more are forgotten at once: that is speed, not only memory."""
    for stretch in code.stretches:
        row: Any = None
        try:
            with modes(stretch.context):
                for row in stretch.rows:
                    read, call, slot, dead, more = row
                    env[slot] = call(*read(env))
                    if more is not None:
                        _part_and_forget(env, slot, more)
                    env[dead] = None
        except Exception as error:
            if row is not None:
                number = next(n for n, other in enumerate(stretch.rows) if other is row)
                raised_at(error, stretch.nodes[number])
                add_note(error, stretch.notes[number])
            raise
    return env


def _part_and_forget(env: Env, slot: int, more: Any) -> None:
    parts, dead = more
    for path, part in parts:
        env[part] = part_at(env[slot], path)
    for other in dead:
        env[other] = None


def compile_plan(
    graph: Graph,
    plan: Plan,
    states: dict[str, torch.Tensor],
    mode: Mode,
    patches: Patches,
    recorded: Callable[[Ref], torch.Tensor],
) -> Code:
    """Steps for a plan. Patches are steps like others: they read a slot and write it."""
    layout = _Layout(graph)
    run = set(plan.run)
    stream = streamed(graph, plan.run, mode.fresh, layout.literal, layout.slots, mode.left)
    guards: dict[int, list[Guard]] = {}
    for number in plan.guards:
        guards.setdefault(graph.guards[number].position, []).append(graph.guards[number])
    made: list[tuple[Context, Step]] = []
    dying = _deaths(graph, plan, layout)
    changed = {leaf for patch in patches.values() for tree, _ in patch for leaf in leaves(tree) if type(leaf) is Ref}
    apart = parted(graph, changed)
    for position in range(len(graph) + 1):
        for guard in guards.get(position, ()):
            made.append((NO_MODES, _guard_step(guard, layout, mode, recorded)))
        if position == len(graph):
            break
        node = graph.nodes[position]
        dead = dying.get(position, ())
        patch = patches.get(position, ()) if position in plan.patch else ()
        place = mode.places.get(position, ()) if position in run or patch else ()
        if position in run:
            assert isinstance(node, Call)
            here = () if patch or place else dead
            turn = stream.turns.get(position)
            written = node.keeping(apart.get(node.name, NONE)) if isinstance(node, Write) else node
            step = _call_step(written, layout, states, mode, here, turn)
            if inside := _patches_inside(graph, node, patches):
                step = evolve(step, call=partial(step.call, patches=inside))
            elif mode.grad and node.through and all(graph.positions.get(name) in run for name in node.through):
                step = evolve(step, call=partial(step.call, is_alive=True))
            made.append((_context(node.context, graph.ambient, mode), step))
        after = [_patch_step(node, layout, tree, apart_from(stream, change)) for tree, change in patch]
        if place:
            after.append(_place_step(node, layout, place, bool(patch)))
        if after:
            after[-1] = evolve(after[-1], dead=dead)
            context = _context(node.context if isinstance(node, Call) else graph.ambient, graph.ambient, mode)
            made.extend([(context, step) for step in after])
    if stream.leaves is not None:
        slot = layout.literal(states[stream.leaves]) if isinstance(stream.leaves, str) else stream.leaves
        leave = Step("the generator", partial(left_at, slot), _same, layout.literal(None), (), ())
        made.append((made[-1][0] if made else NO_MODES, leave))
    executed = tuple([graph.nodes[p].name for p in plan.run])
    there = run.union(plan.supply)
    places = tuple([ref for position, refs in mode.places.items() if position in there for ref in refs])
    nothing = layout.literal(None)
    template = tuple(layout.template)
    stretches = _stretches(made, nothing)
    return Code(template, stretches, layout.slots, executed, stream.sets, places, stream.begun(graph))


def _patches_inside(graph: Graph, node: Call, patches: Patches) -> Patches:
    """Patches at nodes that a call runs again itself, by their number among them."""
    positions = [graph.positions.get(name, -1) for name in node.through]  # in a stretch not all of them need stand
    return {number: patches[position] for number, position in enumerate(positions) if position in patches}


def _stretches(made: Sequence[tuple[Context, Step]], nothing: int) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    group: list[Step] = []
    last: Context | None = None
    for context, step in made:
        if context != last and group:
            found.append(_stretch(last, group, nothing))
            group = []
        last = context
        group.append(step)
    if group:
        found.append(_stretch(last, group, nothing))
    return tuple(found)


def _stretch(context: Context | None, steps: list[Step], nothing: int) -> Stretch:
    rows, notes = tuple([step.row(nothing) for step in steps]), tuple([step.note for step in steps])
    return Stretch(context or NO_MODES, rows, notes, tuple([step.name if step.is_node else "" for step in steps]))


class _Layout:
    """Which slot each value, part of a value and literal has."""

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


def _deaths(graph: Graph, plan: Plan, layout: _Layout) -> dict[int, tuple[int, ...]]:
    """What is forgotten after each step. The model's own tensors are not: it holds them."""
    dying: dict[int, list[int]] = {}
    for position, last in plan.last_use.items():
        if position not in plan.kept and not isinstance(graph.nodes[position], State):
            dying.setdefault(last, []).extend(layout.of_position[position])
    return {last: tuple(slots) for last, slots in dying.items()}


def _call_step(
    node: Call,
    layout: _Layout,
    states: dict[str, torch.Tensor],
    mode: Mode,
    dead: tuple[int, ...],
    turn: Turn | None = None,
) -> Step:
    if turn is None:
        read, call = caller(node, layout.slots, layout.literal, states, mode)
    else:
        read, call = reader(node, layout.slots, layout.literal, {}, mode)
    if turn is not None:
        read, call = in_turn(read, call, turn, None if turn.begins is not None else states.get(node.draws or ""))
    slot, parts = layout.slots[Ref(node.name)], layout.parts[node.name]
    return Step(node.name, read, call, slot, parts, dead, node.source, is_node=True)


def caller(
    node: Call, slots: dict[Ref, int], literal: Callable[[Any], int], states: dict[str, torch.Tensor], mode: Mode
) -> Any:
    """How a call gets its arguments from the env, and how it is made, with its recorded draws: (read, call)."""
    read, call = reader(node, slots, literal, states, mode)
    if node.draws is not None and not has_own_generator(node):
        call = _drawing(call, states[node.draws])
    return read, call


def reader(
    node: Call,
    slots: dict[Ref, int],
    literal: Callable[[Any], int],
    states: Mapping[str, torch.Tensor],
    mode: Mode,
) -> Any:
    """How a call gets its arguments from the env: (read, call). A generator of its own is in the recorded state."""
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
            return partial(_pick, tuple(flat)), function
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


def _pick(slots: tuple[int, ...], env: Env) -> list[Any]:
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


def _drawing(call: Callable[..., Any], state: torch.Tensor) -> Callable[..., Any]:
    def draw(*args: Any) -> Any:
        torch.default_generator.set_state(state)
        return call(*args)

    return draw


def _guard_step(guard: Guard, layout: _Layout, mode: Mode, recorded: Callable[[Ref], torch.Tensor]) -> Step:
    slots = layout.slots

    def ask(env: Env) -> None:
        found = departure(guard, lambda ref: env[slots[ref]], recorded)
        if found is not None and mode.on_departure is not None:
            mode.on_departure(found)

    return Step("a guard", lambda env: (env,), ask, layout.literal(None), (), ())


def _patch_step(node: Any, layout: _Layout, tree: Any, patch: Callable[..., Any]) -> Step:
    """A patch reads values of a node as the model saw them, and puts others in their place."""
    if type(tree) is Ref:
        slot = layout.slots[tree]
        return Step(node.name, itemgetter(slice(slot, slot + 1)), patch, slot, (), ())
    scratch = layout.literal(None)

    def read(env: Env) -> Any:
        return (thaw(tree, lambda leaf: env[layout.slots[leaf]] if type(leaf) is Ref else leaf),)

    parts = tuple([(path, layout.slots[ref]) for path, ref in walk(tree) if type(ref) is Ref])
    return Step(node.name, read, patch, scratch, parts, ())


def _place_step(node: Any, layout: _Layout, refs: tuple[Ref, ...], patched: bool) -> Step:
    """Gives values of a node places of their own in autograd's graph. See `placed`."""
    slots = [layout.slots[ref] for ref in refs]
    others = [layout.slots[ref] for ref in node.refs] if isinstance(node, Call) else []
    if patched:
        others += slots  # a patch may give any object, also one that stands elsewhere
    read = itemgetter(*slots, *others) if len(slots) + len(others) > 1 else itemgetter(slice(slots[0], slots[0] + 1))
    if len(refs) == 1:
        return Step(node.name, read, placed, slots[0], (), ())
    parts = tuple([((number,), slot) for number, slot in enumerate(slots)])
    return Step(node.name, read, partial(all_placed, len(slots)), layout.literal(None), parts, ())


def _context(context: Context, ambient: Context, mode: Mode) -> Context:
    """The modes of a call in this replay: those recorded; for gradients without what lay around the whole model."""
    if mode.grad:
        grad, inference = context.grad or not ambient.grad, context.inference and not ambient.inference
        return Context(grad, inference, context.autocast, context.settings)
    return context


def modes(context: Context) -> Any:
    """The grad, inference and autocast modes and the kernels that a stretch runs under; nothing at all where they are
    on already.
    """
    if torch.compiler.is_compiling():
        return torch.set_grad_enabled(context.grad)
    autocast = is_any_autocast_on()
    if context.inference or torch.is_inference_mode_enabled() or context.autocast or autocast or context.settings:
        return _all_modes(context)
    if settings():
        return _all_modes(context)
    if torch.is_grad_enabled() != context.grad:
        return torch.set_grad_enabled(context.grad)
    return nullcontext()


@contextmanager
def _all_modes(context: Context) -> Any:
    with ExitStack() as stack:
        if context.settings or settings():
            stack.enter_context(under(context.settings))
        stack.enter_context(torch.inference_mode(context.inference))
        stack.enter_context(torch.set_grad_enabled(context.grad))
        for device in ("cpu", "cuda"):
            wanted = next((mode for mode in context.autocast if mode[0] == device), None)
            if wanted is not None:
                stack.enter_context(torch.autocast(device, dtype=wanted[1], cache_enabled=wanted[2]))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def recorded_world(draws: bool, graph: Graph) -> Any:
    """The generators are put back afterwards; the recorded default dtype and device hold meanwhile."""
    if torch.compiler.is_compiling():
        return nullcontext()
    same = torch.get_default_dtype() == graph.default_dtype and default_device() == graph.default_device
    return nullcontext() if same and not draws else _recorded_world(draws, graph)


@contextmanager
def _recorded_world(draws: bool, graph: Graph) -> Any:
    dtype, default = torch.get_default_dtype(), graph.default_device
    device = torch.device(default) if default_device() != default else nullcontext()
    with drawing_alone() if draws else nullcontext():
        before, depth = torch.default_generator.get_state() if draws else None, len(outside)

        def leave() -> None:
            if len(outside) > depth:
                torch.default_generator.set_state(outside[depth])
                del outside[depth:]
            if torch.get_default_dtype() != dtype:
                torch.set_default_dtype(dtype)

        try:
            try:
                if before is not None:
                    outside.append(before)
                if graph.default_dtype != dtype:
                    torch.set_default_dtype(graph.default_dtype)
                with device:
                    yield
            finally:
                leave()
        finally:  # again: an interrupt may have come before, or in it
            leave()
