"""Exclusive access of one thread to a model, while what hangs on the model is changed for a live run and put back.

This is a readers-writer lock whose readers take nothing: whether a thread is inside a forward is read off its stack, so
that an ordinary `model(x)` costs only a look at an (almost always empty) list.

    thread A, in `model(x)`           thread B, `rl.run(model, x)`         thread C
    inside the model                  takes a Turn, waits for A            calls the model, waits for B's turn
    leaves it                         is_exclusive: changes, runs, restores    ...
                                      done                                 goes on, and finds the model as it was

Guaranteed: while a Turn `is_exclusive`, no other thread runs or enters its modules; when it ends, for whatever reason,
the modules are as before; after a fork, the child undoes what threads of the parent had changed. Not guaranteed:
exclusion of a thread that stands still. It may itself be waiting for the owner, as where a patch hands work to another
thread, so nobody waits for it: deadlock is worse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, repeat, starmap, takewhile, tee
from operator import is_not, itemgetter, methodcaller
from threading import Event, enumerate as living, get_ident
from time import monotonic, sleep
from types import CodeType, FrameType
from typing import Any, TypeVar

from attrs import define, field

from .interrupts import after_fork, generator_lock, release_fully, run_then, without_collector

T = TypeVar("T")


def _nothing() -> None:
    """Do nothing."""


@define(eq=False)
class Turn:
    """Exclusive access of one thread to some modules, given by id: taken, or waited for."""

    thread: int
    modules: frozenset[int]
    undo: Callable[[], None] = _nothing  # puts back what the thread has changed so far
    is_exclusive: bool = False  # no other thread is inside them
    done: Event = field(factory=Event)
    waits_for: set[int] = field(factory=set)  # threads that seem to be waited for by the owner, and so do not wait


turns: list[Turn] = []  # taken, or waiting for other threads to leave
modules_inside: dict[
    CodeType, Callable[[dict[str, Any]], Iterable[int]]
] = {}  # code -> the modules, by id, that a frame of it is inside, from its locals
_waiting: dict[object, int] = {}  # threads that wait here, and so run nothing
_begun = [0]  # how many turns have become exclusive


def with_turn(
    modules: Callable[[], Iterable[Any]],
    work: Callable[[Turn], T],
    install: Callable[[], Any] = _nothing,
    uninstall: Callable[[], Any] = _nothing,
) -> T:
    """Return `work(turn)`, run while no other thread is inside these modules or enters them. `install` makes calls of
    the modules wait for turns, `uninstall` stops that. A function and not a context manager, as an interrupt can come
    between a block and its `__exit__`.
    """
    turn, draws = Turn(get_ident(), frozenset()), generator_lock._is_owned()  # type: ignore[attr-defined]

    def leave() -> None:
        _waiting.pop(turn, None)
        if turn in turns:
            turns.remove(turn)
        turn.done.set()
        if not draws:
            release_fully(generator_lock)
        uninstall()

    def take() -> T:
        _waiting[turn] = turn.thread
        if not draws:
            generator_lock.acquire()
        turn.modules = frozenset(map(id, modules()))
        turns.append(turn)
        install()
        _wait_for_others(turn, draws)
        _waiting.pop(turn)
        return work(turn)

    return run_then(take, leave)


def _wait_for_others(turn: Turn, draws: bool) -> None:
    """Wait until no thread is inside the modules, except threads that stand still. Others may draw random numbers
    meanwhile, unless this thread already was doing so.
    """
    standing: dict[int, _StandstillWatch] = {}
    while [other for other in _inside(turn) if not standing.setdefault(other, _StandstillWatch(other)).still()]:
        if not draws:
            generator_lock.release()
        sleep(0.001)
        if not draws:
            generator_lock.acquire()
    _begun[0] += 1
    turn.is_exclusive = True


def _inside(turn: Turn) -> list[int]:
    """The other threads that are inside its modules."""
    stacks, idle = _stacks(), {turn.thread, *list(_waiting.values())}
    try:
        return [thread for thread, frames in stacks if thread not in idle and _are_inside(frames, turn.modules)]
    finally:
        _release(stacks, turn.thread)


def _stacks() -> list[tuple[int, list[FrameType]]]:
    """The frames of each thread. Computed in C alone with the collector off: if another thread ran meanwhile, the links
    behind its frames would be garbage.
    """
    one, other = tee(chain.from_iterable(map(methodcaller("items"), starmap(sys._current_frames, ((),)))))
    upwards = map(chain, zip(map(itemgetter(1), other)), repeat(repeat("f_back")))
    stacks = map(takewhile, repeat(partial(is_not, None)), map(accumulate, upwards, repeat(getattr)))
    pairs = zip(map(itemgetter(0), one), map(list, stacks))  # noqa: B905
    return without_collector(partial(list, pairs))


def _release(stacks: list[tuple[int, list[FrameType]]], own: int) -> None:
    """Empties the list, and the frames of this thread that have ended: these hold themselves, and so all that those
    below them do, until the collector runs.
    """
    ended = [frame for thread, frames in stacks if thread == own for frame in frames if frame.f_code in _LISTING]
    stacks.clear()
    for frame in ended:
        with suppress(RuntimeError):  # it still runs
            frame.clear()


_LISTING = (_stacks.__code__, without_collector.__code__)


def _own_stack() -> list[FrameType]:
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _are_inside(frames: list[FrameType], modules: frozenset[int]) -> bool:
    return any(
        (among := modules_inside.get(frame.f_code)) is not None and not modules.isdisjoint(among(frame.f_locals))
        for frame in frames
    )


def wait_for_turns(modules: Iterable[int]) -> None:
    """Wait for threads with exclusive access to these modules. Called in each thread where a call of the modules
    begins.

    A thread whose access is not yet exclusive waits for this one instead, if this one is inside the modules or is
    drawing.
    """
    modules, called_by = frozenset(modules), sys._getframe(1)
    while turn := next((turn for turn in list(turns) if _comes_first(turn, modules, called_by)), None):
        _wait_for(turn)


def _comes_first(turn: Turn, modules: frozenset[int], called_by: FrameType) -> bool:
    here = get_ident()
    if turn.thread == here or here in turn.waits_for or turn.modules.isdisjoint(modules):
        return False
    if turn.is_exclusive:
        return True
    outer = _own_stack()
    del outer[: outer.index(called_by) + 1]
    return not (generator_lock._is_owned() or _are_inside(outer, turn.modules))  # type: ignore[attr-defined]


def read_undisturbed(judge: Callable[[], T]) -> T:
    """Return `judge()`, an answer about what hangs on models, computed while no other thread had changed it."""
    here = get_ident()
    while True:
        before = _begun[0]
        turn = next((t for t in list(turns) if t.is_exclusive and t.thread != here and here not in t.waits_for), None)
        if turn is not None:
            _wait_for(turn)
            continue
        answer = judge()
        if _begun[0] == before:
            return answer


def _wait_for(turn: Turn) -> None:
    here, standing, token = get_ident(), _StandstillWatch(turn.thread), object()

    def wait() -> None:
        _waiting[token] = here
        while not turn.done.wait(0.02) and turn in turns:
            if standing.still():
                turn.waits_for.add(here)
                return

    run_then(wait, partial(_waiting.pop, token, None))


class _StandstillWatch:
    """Tells whether a thread has been standing still, and so may be waiting for this one."""

    def __init__(self, thread: int) -> None:
        self.thread, self.done = thread, 0
        self.worked = self.awake = monotonic()
        known = next((one for one in living() if one.ident == thread), None)
        self.path = f"/proc/self/task/{known.native_id}/stat" if known is not None else ""

    def still(self) -> bool:
        """True if, over repeated calls, it has been in one of Python's own waiting functions for a quarter of a second,
        or has used no processor time for two.
        """
        now, frame = monotonic(), sys._current_frames().get(self.thread)
        if frame is None:
            return True
        if frame.f_globals.get("__name__") not in _WAITS:
            self.awake = now
        done = _done(self.path) or hash((id(frame), frame.f_lasti))
        if not self.done <= done <= self.done + 1:
            self.done, self.worked = done, now
        return now - self.awake > 0.25 or now - self.worked > 2.0


_WAITS = frozenset(("threading", "queue", "selectors"))


def _done(path: str) -> int:
    """The processor time of a thread so far in hundredths of a second; 0 on systems that do not tell."""
    try:
        with open(path, "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])


def _undo_in_child() -> None:
    """Undo, in a forked child, what threads that do not exist here had changed."""
    for turn in [turn for turn in reversed(turns) if turn.thread != get_ident()]:
        turns.remove(turn)
        turn.undo()
    for turn in turns:
        turn.done = Event()
    for token in [token for token, thread in list(_waiting.items()) if thread != get_ident()]:
        del _waiting[token]


after_fork(_undo_in_child)
