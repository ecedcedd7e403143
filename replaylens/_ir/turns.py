"""A model is one thread's while it is run once more: what hangs on it is changed meanwhile, and put back.

In: threads that come to a module, and one that wants some modules for itself. It waits until no other thread is in the
middle of them; whoever comes later waits until it is done. Nobody waits for a thread that stands still: that one may be
waiting for the one that waits, as where a patch hands its work to another thread. After a fork what a thread that is
not there had changed is put back.

    thread A, in `model(x)`           thread B, `rl.run(model, x)`         thread C
    in the model's middle             a Turn: waits for A to leave         comes to the model, and waits for B's turn
    leaves it                         is_alone: changes, runs, puts back   ...
                                      over                                 goes on, and finds the model as it was
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, chain, repeat, starmap, takewhile, tee
from operator import is_not, itemgetter, methodcaller
from threading import Event, enumerate as living, get_ident
from time import monotonic, sleep
from types import CodeType, FrameType
from typing import Any, TypeVar

from attrs import define, field

from .world import ending, in_children, let_go, one_draws, uncollected

T = TypeVar("T")


def _nothing() -> None:
    """Nothing was changed yet."""


@define(eq=False)
class Turn:
    """Some modules, by id, and the thread that has them for itself."""

    thread: int
    modules: frozenset[int]
    undo: Callable[[], None] = _nothing  # puts back what the thread has changed so far
    is_alone: bool = False  # nobody else is in the middle of them
    over: Event = field(factory=Event)
    among: set[int] = field(factory=set)  # other threads that it waits for itself, as it seems


turns: list[Turn] = []  # those that are taken, and those that wait for other threads to leave
calls: dict[CodeType, Callable[[dict[str, Any]], Iterable[int]]] = {}  # what is inside which modules while it runs
_waiting: dict[object, int] = {}  # threads that wait here, and run nothing
_begun = [0]  # how many threads have had modules for themselves


def with_turn(
    modules: Callable[[], Iterable[Any]],
    work: Callable[[Turn], T],
    told: Callable[[], Any] = _nothing,
    left: Callable[[], Any] = _nothing,
) -> T:
    """What some work gives, while no other thread is in the middle of these modules, or comes to them. `told` lets
    them ask, `left` lets them go by. A function, for an interrupt can come between a block and its `__exit__`.
    """
    turn, draws = Turn(get_ident(), frozenset()), one_draws._is_owned()  # type: ignore[attr-defined]

    def leave() -> None:
        _waiting.pop(turn, None)
        if turn in turns:
            turns.remove(turn)
        turn.over.set()
        if not draws:
            let_go(one_draws)
        left()

    def take() -> T:
        _waiting[turn] = turn.thread
        if not draws:
            one_draws.acquire()
        turn.modules = frozenset(map(id, modules()))
        turns.append(turn)
        told()
        _await_others(turn, draws)
        _waiting.pop(turn)
        return work(turn)

    return ending(take, leave)


def _await_others(turn: Turn, draws: bool) -> None:
    """Until no thread is in the middle of the modules, but for those that stand still. Others may draw meanwhile, if
    this thread was not drawing already.
    """
    standing: dict[int, _Standing] = {}
    while [other for other in _inside(turn) if not standing.setdefault(other, _Standing(other)).still()]:
        if not draws:
            one_draws.release()
        sleep(0.001)
        if not draws:
            one_draws.acquire()
    _begun[0] += 1
    turn.is_alone = True


def _inside(turn: Turn) -> list[int]:
    """The other threads that are in the middle of its modules."""
    stacks, idle = _stacks(), {turn.thread, *list(_waiting.values())}
    return [thread for thread, frames in stacks if thread not in idle and _are_inside(frames, turn.modules)]


def _stacks() -> list[tuple[int, list[FrameType]]]:
    """The frames of each thread. In C alone, and without the collector, which runs Python code of anybody's: where
    another thread goes on meanwhile, what is behind one of its frames is garbage.
    """
    one, other = tee(chain.from_iterable(map(methodcaller("items"), starmap(sys._current_frames, ((),)))))
    upwards = map(chain, zip(map(itemgetter(1), other)), repeat(repeat("f_back")))
    stacks = map(takewhile, repeat(partial(is_not, None)), map(accumulate, upwards, repeat(getattr)))
    pairs = zip(map(itemgetter(0), one), map(list, stacks))  # noqa: B905
    return uncollected(partial(list, pairs))


def _own_stack() -> list[FrameType]:
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _are_inside(frames: list[FrameType], modules: frozenset[int]) -> bool:
    return any(
        (among := calls.get(frame.f_code)) is not None and not modules.isdisjoint(among(frame.f_locals))
        for frame in frames
    )


def come(modules: Iterable[int]) -> None:
    """Called where a call of these modules begins, in each thread: lets those that have them for themselves end first.

    One that does not have them yet waits for this thread, if it is in the middle of them, or draws.
    """
    modules, called_by = frozenset(modules), sys._getframe(1)
    while turn := next((turn for turn in list(turns) if _comes_first(turn, modules, called_by)), None):
        _await(turn)


def _comes_first(turn: Turn, modules: frozenset[int], called_by: FrameType) -> bool:
    here = get_ident()
    if turn.thread == here or here in turn.among or turn.modules.isdisjoint(modules):
        return False
    if turn.is_alone:
        return True
    outer = _own_stack()
    del outer[: outer.index(called_by) + 1]
    return not (one_draws._is_owned() or _are_inside(outer, turn.modules))  # type: ignore[attr-defined]


def settled(judge: Callable[[], T]) -> T:
    """The answer to a question about what hangs on models, as it is while no other thread has changed it."""
    here = get_ident()
    while True:
        before = _begun[0]
        turn = next((t for t in list(turns) if t.is_alone and t.thread != here and here not in t.among), None)
        if turn is not None:
            _await(turn)
            continue
        answer = judge()
        if _begun[0] == before:
            return answer


def _await(turn: Turn) -> None:
    here, standing, token = get_ident(), _Standing(turn.thread), object()

    def wait() -> None:
        _waiting[token] = here
        while not turn.over.wait(0.02) and turn in turns:
            if standing.still():
                turn.among.add(here)
                return

    ending(wait, partial(_waiting.pop, token, None))


class _Standing:
    """Has a thread been standing still, so that it may be waiting for this one?"""

    def __init__(self, thread: int) -> None:
        self.thread, self.done = thread, 0
        self.worked = self.awake = monotonic()
        known = next((one for one in living() if one.ident == thread), None)
        self.path = f"/proc/self/task/{known.native_id}/stat" if known is not None else ""

    def still(self) -> bool:
        """Asked again and again: for a quarter of a second it has been in one of Python's own ways to wait, or for two
        it had no work for a processor.
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
    """The work of a thread so far, in hundredths of a second; 0 on systems that do not tell it."""
    try:
        with open(path, "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])


def _in_a_child() -> None:
    """The other threads are not there: what they had changed is put back for them."""
    for turn in [turn for turn in reversed(turns) if turn.thread != get_ident()]:
        turns.remove(turn)
        turn.undo()
    for turn in turns:
        turn.over = Event()
    for token in [token for token, thread in list(_waiting.items()) if thread != get_ident()]:
        del _waiting[token]


in_children(_in_a_child)
