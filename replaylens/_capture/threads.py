"""What other threads of a forward read: a function mode sees its own thread only.

In: threads that a forward starts, jobs that it submits to pools, threads that it wakes or waits for. Out: of a thread
that it starts, and of a job, each tensor of the capture that is read there, seen by a mode in that thread; of a thread
that existed before, that it may have read anything. While captures run, the entries below are patched: they look for a
capture in their own thread, and otherwise pass on, as in scopes.py.
"""

from __future__ import annotations

import _thread
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread, get_ident
from types import FrameType
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

Job = Callable[..., Any]


class Forward(Protocol):
    """A capture, as other threads see it."""

    def handing_over(self) -> Any: ...

    def read_elsewhere(self, func: Any, args: Any, kwargs: Any, site: Any) -> tuple[Any, Any]: ...

    def met_another_thread(self) -> None: ...


class ForwardThreads:
    """One forward, and how many of its jobs run in other threads."""

    def __init__(self, forward: Forward | None) -> None:
        self.forward = forward  # None once it is over, and while a patch of the user runs
        self.running_jobs = 0
        self.handing_over_threads: set[int] = set()  # inside one entry, which may call others of them

    def wrap(self, job: Job) -> Job:
        """The job, run under a mode that sees its reads. It may end after the forward, which then ignores them."""
        self.running_jobs += 1
        site = self.forward.handing_over() if self.forward is not None else None

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with belonging_to(self), _JobMode(self, site):
                    return job(*args, **kwargs)
            finally:
                self.running_jobs -= 1

        return run

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """While this thread starts or wakes others for a wrapped job."""
        self.handing_over_threads.add(get_ident())
        try:
            yield
        finally:
            self.handing_over_threads.discard(get_ident())

    def note_unseen_thread(self) -> None:
        """A thread whose reads are not seen was woken or waited for."""
        if self.forward is not None:
            self.forward.met_another_thread()


class _JobMode(TorchFunctionMode):
    """Sees what a job reads."""

    def __init__(self, elsewhere: ForwardThreads, site: Any) -> None:
        super().__init__()
        self.elsewhere, self.site = elsewhere, site

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forward, kwargs = self.elsewhere.forward, kwargs or {}
        if forward is not None:
            args, kwargs = forward.read_elsewhere(func, args, kwargs, self.site)
        return func(*args, **kwargs)


_stacks: dict[int, list[ForwardThreads]] = {}  # by thread, the innermost last


@contextmanager
def belonging_to(elsewhere: ForwardThreads) -> Iterator[None]:
    """While what this thread does with other threads belongs to a forward."""
    here = get_ident()
    stack = _stacks.setdefault(here, [])
    depth = len(stack)
    try:
        try:
            stack.append(elsewhere)
            yield
        finally:
            _leave(here, depth)
    finally:  # again: an interrupt may have hit before it or within it
        _leave(here, depth)


def _leave(here: int, depth: int) -> None:
    stack = _stacks.get(here, [])
    del stack[depth:]
    if not stack:
        _stacks.pop(here, None)


@contextmanager
def running_forward(forward: Forward) -> Iterator[None]:
    """While the forward runs in this thread."""
    elsewhere = ForwardThreads(forward)
    try:
        with belonging_to(elsewhere):
            yield
    finally:
        elsewhere.forward = None


def _current() -> ForwardThreads | None:
    """The forward of this thread, unless it is handing over a job just now."""
    here = get_ident()
    stack = _stacks.get(here)
    return stack[-1] if stack and here not in stack[-1].handing_over_threads else None


_STANDARD = sysconfig.get_paths()["stdlib"]


def frame_outside_stdlib(frame: FrameType) -> FrameType:
    """The first frame outwards that is not in the standard library: `Queue.put` is."""
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if not file.startswith(_STANDARD) or "site-packages" in file:
            return found
        found = found.f_back
    return frame


# -- entries -----------------------------------------------------------------------------------------------------------

_originals: dict[str, Any] = {}  # what the entries were


def _traced_start(self: Thread) -> None:
    elsewhere = _current()
    if elsewhere is None:
        return _originals["start"](self)
    run = elsewhere.wrap(self.run)

    def once() -> None:
        vars(self).pop("run", None)
        run()

    self.run = once  # type: ignore[method-assign]
    with elsewhere.handing_over():
        return _originals["start"](self)


def _traced_start_new_thread(function: Job, *more: Any) -> Any:
    elsewhere = _current()
    return _originals["start_new_thread"](function if elsewhere is None else elsewhere.wrap(function), *more)


def _traced_submit(self: Any, fn: Job, /, *args: Any, **kwargs: Any) -> Any:
    elsewhere = _current()
    if elsewhere is None:
        return _originals["submit"](self, fn, *args, **kwargs)
    with elsewhere.handing_over():
        return _originals["submit"](self, elsewhere.wrap(fn), *args, **kwargs)


def _traced_wait(self: Condition, timeout: float | None = None) -> bool:
    elsewhere = _current()
    is_idle = elsewhere is not None and not elsewhere.running_jobs
    woken: bool = _originals["wait"](self, timeout)
    if elsewhere is not None and is_idle:
        elsewhere.note_unseen_thread()
    return woken


def _traced_notify(self: Condition, n: int = 1) -> None:
    if self._waiters and (elsewhere := _current()) is not None:  # type: ignore[attr-defined]
        elsewhere.note_unseen_thread()
    _originals["notify"](self, n)


def _entries() -> Iterator[tuple[Any, str, Any]]:
    yield Thread, "start", _traced_start
    yield Condition, "wait", _traced_wait
    yield Condition, "notify", _traced_notify
    yield _thread, "start_new_thread", _traced_start_new_thread
    if (pools := sys.modules.get("concurrent.futures.thread")) is not None:
        yield pools.ThreadPoolExecutor, "submit", _traced_submit


def put_in() -> None:
    """Patches the entries."""
    for owner, name, replacement in _entries():
        if (there := vars(owner)[name]) is not replacement:
            _originals[name] = there
            setattr(owner, name, replacement)


def take_out() -> None:
    """Restores the entries."""
    for owner, name, replacement in _entries():
        if vars(owner)[name] is replacement:
            setattr(owner, name, _originals[name])


def in_a_child() -> None:
    """After a fork: only the forking thread is left."""
    for other in [thread for thread in _stacks if thread != get_ident()]:
        del _stacks[other]
