"""Where in a generator's stream each draw of a replay begins.

In: a graph, the positions that run, and whether draws are fresh. Out: a Stream: which draws begin where another one
ended, in slots of the env, and in which state the user's generator is left.

A recorded draw begins in its recorded state; behind a draw that may have taken more or fewer numbers than recorded, it
begins where that one ends. Fresh draws continue from the user's generator as the model's would: states that the
forward seeded stay, and draws that began in one state still do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from attrs import field, frozen

from .._ir.graph import Graph
from .._ir.interrupts import after_fork, generator_lock, reset_lock
from .._ir.node import Call, Generator, GeneratorLeft, Ref
from .._ir.torch_private import is_wrapped
from .._ir.trees import leaves_of
from ..errors import BadPatch

user_states: list[
    torch.Tensor
] = []  # the user's states of the global generator while replays set it; under `one_draws`


def _reset_in_child() -> None:
    """In a forked child: a thread of the parent may have been replaying; the generator is the user's again."""
    if not generator_lock._is_owned():  # type: ignore[attr-defined]
        reset_lock(generator_lock)
        if user_states:
            torch.default_generator.set_state(user_states[0])
            user_states.clear()


after_fork(_reset_in_child)
_START = ""  # the state in which the user's generator was when the replay began


@frozen
class Turn:
    """One draw: the slot of the state in which it begins, and the slot for the state in which it ends."""

    begins: int | None = None
    ends: int | None = None
    starts: int | None = None  # the slot for the state before it, from which all fresh draws go on
    continues: bool = False  # the generator is where it should be
    key: str = ""  # of a draw whose forerunner does not run: it has a stream of its own, made of the start and this
    own: bool = False  # it draws from a generator of its own
    held: tuple[int, ...] = ()  # the slots of the state that it begins with, for calls that run it again themselves


@frozen
class Stream:
    """The turns by position; whether the global generator is set; and the state in which the user's is left: its
    slot, or the key of a recorded one.
    """

    turns: dict[int, Turn] = field(factory=dict)
    sets: bool = False
    leaves: int | str | None = None
    is_fresh: bool = False

    def begun(self, graph: Graph) -> tuple[tuple[str, int], ...]:
        """For draws that may begin elsewhere than recorded: their key, and the slot of the state in which they
        begin.
        """
        keys = {position: key for key, position in graph.drawn.items()}
        return tuple([(keys[p], turn.begins) for p, turn in self.turns.items() if turn.begins is not None])


def has_own_generator(node: Call) -> bool:
    """True if a call draws from a generator among its arguments."""
    return bool(leaves_of(Generator, node.trees))


def stream_of(
    graph: Graph,
    run: Set[int],
    fresh: bool,
    literal: Callable[[Any], int],
    slots: Mapping[Ref, int],
    left: GeneratorLeft | None = None,
) -> Stream:
    """The stream of the draws that run. `left`: where the user's generator is to be left, if known."""
    drawing = [p for p in graph.drawing if p in run]
    held = {p: tuple([slots[ref] for ref in graph.states[p]]) for p in drawing if p in graph.states}
    if fresh and drawing:
        return _fresh(graph, drawing, literal, held, left)
    if fresh:
        return Stream() if left is None or left.fixed is None else Stream({}, True, left.fixed, True)
    shifts = {p: graph.shifts[p] for p in drawing if p in graph.shifts}
    there = set(drawing).intersection(shifts.values())
    if not there:
        return Stream(sets=bool(drawing))
    ends = {p: literal(None) for p in sorted(there)}
    turns = {
        p: Turn(
            begins=ends.get(shifts.get(p, -1)),
            ends=ends.get(p),
            own=has_own_generator(graph.nodes[p]),
            held=held.get(p, ()) if shifts.get(p, -1) in ends else (),
        )
        for p in drawing
        if p in ends or shifts.get(p, -1) in ends
    }
    return Stream(turns, True)


def _fresh(
    graph: Graph,
    drawing: list[int],
    literal: Callable[[Any], int],
    held: Mapping[int, tuple[int, ...]],
    left: GeneratorLeft | None,
) -> Stream:
    """The stream of fresh draws: in the model's order, from the state of the user's generator."""
    begins = {p: _begin_of(graph, p, set(drawing)) for p in drawing}
    own = {p for p in drawing if has_own_generator(graph.nodes[p])}  # type: ignore[arg-type]
    continuing, last, at = _continuing(graph, [p for p in drawing if p not in own], begins)
    end = _end(graph, drawing, left, last)
    sets = len(continuing) + len(own) < len(drawing) or (left is not None and end != at)
    wanted = {begins[p] for p in drawing if p not in continuing} | ({end} if sets else set())
    fixed = left.fixed if left is not None and end == left.fixed else None
    start = literal(None) if any(type(begin) is str for begin in wanted - {fixed}) else None
    slots: dict[Any, int | None] = {p: literal(None) for p in drawing if p in wanted}
    turns: dict[int, Turn] = {}
    for number, p in enumerate(drawing):
        begin = None if p in continuing else begins[p]
        turns[p] = Turn(
            begins=start if type(begin) is str else slots.get(begin),
            ends=slots.get(p),
            starts=start if number == 0 else None,
            continues=p in continuing,
            key=begin if type(begin) is str else "",
            own=p in own,
            held=held.get(p, ()) if begin is not None or p in continuing else (),
        )
    return Stream(turns, sets, (fixed or slots.get(end, start)) if sets else None, True)


def _end(graph: Graph, drawing: list[int], left: GeneratorLeft | None, last: Any) -> Any:
    """Where the user's generator is left: behind a draw; in a state that a seed fixed (its key); or behind the last
    unseeded draw, if the model does not say.
    """
    if left is None:
        return last
    if graph.last_draw and graph.last_draw[0] in drawing:
        return graph.last_draw[0]
    if left.fixed is not None:
        return left.fixed
    is_own = any(graph.nodes[p].edited for p in drawing)  # type: ignore[union-attr]
    return _START if left.follows is None and not is_own else last


def _continuing(graph: Graph, drawing: list[int], begins: dict[int, Any]) -> tuple[set[int], Any, Any]:
    """The draws for which the global generator is already in place; the last draw that continues the user's state;
    and the draw behind which the generator ends.
    """
    at: Any = _START  # where the generator is, as far as draws of the program have moved it
    last: Any = _START
    continuing: set[int] = set()
    for p in drawing:
        if begins[p] is not None and begins[p] == at:
            continuing.add(p)
        at = p
        last = last if graph.nodes[p].is_seeded else p  # type: ignore[union-attr]
    return continuing, last, at


def _begin_of(graph: Graph, position: int, drawing: set[int]) -> Any:
    """The draw behind which one begins, the key of its own stream, or None for the recorded state."""
    node = graph.nodes[position]
    assert isinstance(node, Call)
    before = graph.turns.get(position)
    if before in drawing:
        return before if not node.is_seeded or position in graph.shifts else None
    return None if node.is_seeded else node.follows or _START


def with_generator_turn(
    read: Callable[..., Any], call: Callable[..., Any], turn: Turn, recorded: torch.Tensor | None
) -> Any:
    """How a call that draws reads its arguments, and how it is made, in its turn: (read, call)."""

    def reading(env: list[Any]) -> Any:
        return env, read(env)

    def drawing(env: list[Any], given: Any) -> Any:
        generator = _generator_in(given) if turn.own else torch.default_generator
        if turn.starts is not None:
            env[turn.starts] = torch.default_generator.get_state()
        if not turn.continues:
            state: Any = recorded if turn.begins is None else env[turn.begins]
            generator.set_state(_own_stream(state, turn.key) if turn.key else state)
        if turn.held:
            state = generator.get_state()
            for slot in turn.held:
                env[slot] = state
        value = call(*given)
        if turn.ends is not None:
            env[turn.ends] = generator.get_state()
        return value

    return reading, drawing


def _generator_in(given: Any) -> torch.Generator:
    """The generator among the arguments of a call."""
    stack = list(given)
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Generator):
            return value
        if isinstance(value, (tuple, list)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
    return torch.default_generator


_HEAD = "<QiiQ"  # of a state of the CPU's generator: seed, numbers left in the block, is it seeded, place in the block
_BLOCK = 624


def checked_state(state: torch.Tensor) -> torch.Tensor:
    """A value of the program as the state of a generator, in memory of its own; raises if it is none.

    Torch counts the offset of a view in whole states instead of bytes, and believes what the bytes say of the place of
    the next number: it would read beyond the memory of the tensor, or of its own.
    """
    if torch.compiler.is_compiling():
        return state
    if (why := _why_no_state(state)) is not None:
        raise BadPatch(
            f"what stands for the recorded state of a generator is none: {why}. The model draws from it again when it "
            "takes a gradient.\nGive what `torch.Generator().manual_seed(0).get_state()` gives, for any seed."
        )
    return state if state.is_contiguous() and state.storage_offset() == 0 else state.contiguous().clone()


def _why_no_state(state: torch.Tensor) -> str | None:
    if is_wrapped is not None and is_wrapped(state):
        return "it differs from sample to sample under a transform of torch.func"
    if type(state) is not torch.Tensor:
        return None  # a fake one, which is never read
    wanted = torch.default_generator.get_state()
    if state.dtype is not torch.uint8 or state.device.type != "cpu":
        return f"it is {state.dtype} on {state.device}, not bytes on the CPU"
    if state.shape != wanted.shape:  # of a generator of another device, whose states are a seed and an offset
        return None
    _, left, seeded, place = struct.unpack(_HEAD, bytes(state[: struct.calcsize(_HEAD)].tolist()))
    if seeded != 1 or not 0 < left <= _BLOCK or left + place > _BLOCK + 1:
        return f"number {place} of {_BLOCK} would come next, with {left} left"
    return None


def _own_stream(state: torch.Tensor, key: str) -> torch.Tensor:
    """A state for each key, the same for the same start."""
    digest = blake2b(key.encode(), key=bytes(state.numpy()[-64:]), digest_size=8)
    digest.update(state.numpy().tobytes())
    return torch.Generator().manual_seed(int.from_bytes(digest.digest(), "little") >> 1).get_state()


def leave_generator_at(slot: int, env: list[Any]) -> tuple[Any, ...]:
    """Leaves the user's generator where the model leaves it."""
    if user_states and env[slot] is not None:
        user_states[-1] = env[slot]
    return (None,)


def drawing_as_the_user(stream: Stream, patch: Callable[..., Any]) -> Callable[..., Any]:
    """A patch that draws from the user's generator, and not from the state in which the model's draws left it."""
    if stream.is_fresh or not stream.sets:
        return patch

    def patched(*values: Any) -> Any:
        if not user_states:
            return patch(*values)
        with as_the_user():
            return patch(*values)

    return patched


@contextmanager
def as_the_user() -> Iterator[None]:
    """Within, the generator is the user's; afterwards it is as before."""
    before, depth = torch.default_generator.get_state(), len(user_states)
    try:
        torch.default_generator.set_state(user_states[-1])
        yield
    finally:
        if len(user_states) == depth:  # else an interrupt has ended what this is within
            user_states[-1] = torch.default_generator.get_state()
        torch.default_generator.set_state(before)
