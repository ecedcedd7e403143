"""The interpreter: an env and a loop. It knows nothing of patches.

In: Code, and an env of its slots to begin with. Out: the env after the last step. All decisions were taken before:
what runs (plan.py), which slot holds what (compile.py), which values it begins with (runner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._ir.graph import Graph
from .._ir.interrupts import exclusive_generator, restoring_modes
from .._ir.node import Context, Ref, Source
from .._ir.settings import settings, under_settings
from .._ir.torch_private import default_device, is_any_autocast_on
from .._ir.trees import part_at
from .._ir.util import add_note
from .guards import mark_raising_node
from .rng_stream import user_states

Env = list[Any]


@frozen(eq=False)
class Step:
    """One call: the slots of its arguments, the function, the slot of its value, the slots freed after it."""

    name: str
    read: Callable[[Env], Any]
    call: Callable[..., Any]
    slot: int
    parts: tuple[tuple[tuple[int, ...], int], ...]
    dead: tuple[int, ...]
    source: Source | None = None
    is_node: bool = False  # the model's own operation; else a patch, a guard
    empty: int = field(kw_only=True)  # a slot that holds nothing
    row: Any = field(init=False)  # the step as the loop reads it: one slot to free, which is all for most steps, and
    # what else there is to do

    @row.default
    def _row(self) -> Any:
        rest = (self.parts, self.dead[1:]) if self.parts or len(self.dead) > 1 else None
        return self.read, self.call, self.slot, self.dead[0] if self.dead else self.empty, rest

    @property
    def note(self) -> str:
        """The note added to an exception that the call raises."""
        where = "\n" + self.source.indented if self.source is not None else ""
        return f"replaylens: raised by node {self.name} of the program{where}"


@frozen(eq=False)
class Segment:
    """Steps under the same modes, as rows: a loop over tuples is a quarter faster than one over attributes."""

    context: Context
    rows: tuple[Any, ...]
    steps: tuple[Step, ...]


@frozen(eq=False)
class Code:
    """A compiled plan: the initial slots, which of them to fill, and the segments to run."""

    template: tuple[Any, ...]
    segments: tuple[Segment, ...]
    slots: dict[Ref, int]
    supply: tuple[tuple[Ref, int], ...]  # the initial values, and their slots
    patches: tuple[tuple[int, int, int], ...]  # of each patch: its position, its number there, the slot of its function
    departed: int  # the slot of the callback for departures
    executed: tuple[str, ...]
    draws: bool
    places: tuple[Ref, ...] = ()  # the values at which gradients can be taken
    begun: tuple[tuple[str, int], ...] = ()  # of draws that may begin elsewhere than recorded: the slot of that state

    def wrapped(self, wrap: Callable[[int, Any], Any]) -> Code:
        """The same code with `wrap(slot, call)` in place of each call; `slot` is where the call writes."""

        def around(read: Any, call: Any, slot: int, *rest: Any) -> Any:
            return read, wrap(slot, call), slot, *rest

        segments = [evolve(one, rows=tuple([around(*row) for row in one.rows])) for one in self.segments]
        return evolve(self, segments=tuple(segments))


def interpret(code: Code, env: Env) -> Env:
    """Runs the steps. Torch's modes are restored wherever an interrupt comes."""
    if torch.compiler.is_compiling():
        return _interpret(code, env)
    return restoring_modes(partial(_interpret, code, env))


def _interpret(code: Code, env: Env) -> Env:
    """Runs the steps. Values that nothing needs any more are freed at once: that is speed, too, not only memory."""
    for segment in code.segments:
        row: Any = None
        try:
            with modes(segment.context):
                for row in segment.rows:
                    read, call, slot, dead, rest = row
                    env[slot] = call(*read(env))
                    if rest is not None:
                        unpack_and_free(env, slot, rest)
                    env[dead] = None
        except Exception as error:
            if row is not None:
                step = segment.steps[next(n for n, other in enumerate(segment.rows) if other is row)]
                mark_raising_node(error, step.name if step.is_node else "")
                add_note(error, step.note)
            raise
    return env


def unpack_and_free(env: Env, slot: int, rest: Any) -> None:
    """What follows a call of several values: each into its slot, and what nothing needs any more is let go."""
    parts, dead = rest
    for path, part in parts:
        env[part] = part_at(env[slot], path)
    for other in dead:
        env[other] = None


def modes(context: Context) -> Any:
    """The grad, inference and autocast modes and kernel settings of a segment; a null context if they are on
    already.
    """
    if torch.compiler.is_compiling():
        return torch.set_grad_enabled(context.grad)
    autocast = is_any_autocast_on()
    if context.inference or torch.is_inference_mode_enabled() or context.autocast or autocast or context.settings:
        return _entered_modes(context)
    if settings():
        return _entered_modes(context)
    if torch.is_grad_enabled() != context.grad:
        return torch.set_grad_enabled(context.grad)
    return nullcontext()


@contextmanager
def _entered_modes(context: Context) -> Any:
    with ExitStack() as stack:
        if context.settings or settings():
            stack.enter_context(under_settings(context.settings))
        stack.enter_context(torch.inference_mode(context.inference))
        stack.enter_context(torch.set_grad_enabled(context.grad))
        for device in ("cpu", "cuda"):
            wanted = next((mode for mode in context.autocast if mode[0] == device), None)
            if wanted is not None:
                stack.enter_context(torch.autocast(device, dtype=wanted[1], cache_enabled=wanted[2]))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def recorded_environment(draws: bool, graph: Graph) -> Any:
    """Within, the recorded default dtype and device hold; the generators are restored afterwards."""
    if torch.compiler.is_compiling():
        return nullcontext()
    same = torch.get_default_dtype() == graph.default_dtype and default_device() == graph.default_device
    return nullcontext() if same and not draws else _recorded_world(draws, graph)


@contextmanager
def _recorded_world(draws: bool, graph: Graph) -> Any:
    dtype, default = torch.get_default_dtype(), graph.default_device
    device = torch.device(default) if default_device() != default else nullcontext()
    with exclusive_generator() if draws else nullcontext():
        before, depth = torch.default_generator.get_state() if draws else None, len(user_states)

        def restore() -> None:
            if len(user_states) > depth:
                torch.default_generator.set_state(user_states[depth])
                del user_states[depth:]
            if torch.get_default_dtype() != dtype:
                torch.set_default_dtype(dtype)

        try:
            try:
                if before is not None:
                    user_states.append(before)
                if graph.default_dtype != dtype:
                    torch.set_default_dtype(graph.default_dtype)
                with device:
                    yield
            finally:
                restore()
        finally:  # again: an interrupt may have come before, or in it
            restore()
