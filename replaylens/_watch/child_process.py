"""Starts the processes that read the samples, and ends them.

In: a Ring and descriptions of sinks. Out: Children: one process for all plain sinks, one more for each that runs native
code or a user's; a thread where there can be no process. A child's standard input carries events, wakes it, and is its
lifeline: when it closes, for whatever reason, the child ends. So nothing is left behind, however the training ends, and
nothing is waited for but in `close()`.

A child starts from the folder child/ alone: without replaylens and torch, and without the program that runs, so that it
needs no `__main__` guard, and starts from standard input, `-c` and notebooks as well.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from attrs import define, field, frozen

from .._ir.interrupts import after_fork
from .._ir.util import optional
from .child import wire
from .ring import Ring, above_standard
from .watch_stats import SinkStats

FOLDER = Path(__file__).parent / "child"
# A batch process that is woken waits for its turn. Any other takes the core that woke it, the training's where no other
# is free: to wake it then costs the training 1.4 ms in place of 0.04.
BOOT = """\
import os, sys
try:
    os.nice(5)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
except (AttributeError, OSError):
    pass
sys.path[:1] = filter(None, sys.path[:1])
import json, types
_, folder, config, ring, index, parent = sys.argv
sys.argv[:] = ["replaylens-watch"]
with open(int(config), encoding="utf-8") as file:
    config = json.load(file)
sys.path += [path for path in config["path"] if path not in sys.path]
package = sys.modules["replaylens_child"] = types.ModuleType("replaylens_child")
package.__path__ = [folder]
from replaylens_child.main import main
main(config, int(ring), int(index), int(parent))
"""
ENVIRONMENT = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "VECLIB", "NUMEXPR")}
LOOK = 0.5  # seconds between two looks whether it lives
PATIENCE = 3.0  # seconds to end in
PATIENCE_WITH = {"film": 6.0, "wandb": 20.0, "trackio": 20.0}  # by kind: what they write when they close takes longer
FORCE = 0.2  # of them, to be ended by force
MOST_WAITING = 1 << 20  # bytes of events for a child that does not read
CLOSED = -1, 0  # in place of a page's version and the number of errors on this side
UNHURRIED = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_NOSIGNAL", 0)


@frozen
class Status:
    """How a child is doing."""

    received: int = 0
    dropped: int = 0
    faults: int = 0
    errors: dict[str, str] = field(factory=dict)  # the last one of each sink; of "process", how that ended
    ready: bool = False
    alive: bool = False
    url: str | None = None
    wants_pause: bool = False
    paths: dict[str, str] = field(factory=dict)  # of files, by sink


class Worker(Protocol):
    """What reads the ring."""

    def tell(self, line: bytes) -> bool:
        """Hand on a line without waiting; an empty one only wakes. False: too many wait already."""

    def how_it_ended(self) -> str | None:
        """None while it lives."""

    def end(self, deadline: float) -> str | None:
        """Have it end, and at the deadline by force; what is to be said of that."""

    def forget(self) -> None:
        """In a forked process: it belongs to another."""


# -- a process ---------------------------------------------------------------------------------------------------------


@define(eq=False)
class ProcessWorker:
    """A process, and this end of its standard input."""

    _process: subprocess.Popen[bytes]
    _line: socket.socket  # not a pipe: where SIGPIPE has its default action, a write to a dead child would end us
    _said: int  # what it says on standard error: a file without a name
    _waiting: bytearray = field(factory=bytearray)
    _is_sending: bool = False

    @classmethod
    def start(cls, ring: Ring, index: int, specs: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> ProcessWorker:
        """A new process; OSError where there can be none."""
        facts = {"path": [str(one) for one in sys.path], "specs": specs, "run": run}
        config = above_standard(unnamed_file(json.dumps(facts, default=str).encode()))
        said = above_standard(unnamed_file())
        ours, theirs = socket.socketpair()
        numbers = map(str, (config, ring.fd, index, os.getpid()))
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(FOLDER), *numbers],
                stdin=theirs.fileno(), stdout=None if is_users(specs) else subprocess.DEVNULL, stderr=said,
                pass_fds=(config, ring.fd), start_new_session=True, env=child_environment(),
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(said)
            raise
        finally:
            theirs.close()
            os.close(config)
        return cls(process, ours, said)

    def tell(self, line: bytes) -> bool:
        if len(self._waiting) > MOST_WAITING:
            return False
        if line or not self._waiting:
            self._waiting += line + b"\n"
        self._send()
        return True

    def _send(self) -> None:
        """As much as goes. Where a signal's handler comes here in the middle of it, its lines are sent by that."""
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while self._waiting:
                sent = self._line.send(self._waiting[:65536], UNHURRIED)
                del self._waiting[:sent]
        except BlockingIOError:
            pass
        finally:
            self._is_sending = False

    def how_it_ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        how = f"it ended with code {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"it was ended by {signal.Signals(-code).name}"
        words = self._last_words()
        return f"{how} ({words})" if words else how

    @property
    def has_failed_in_python(self) -> bool:
        """True if to start it again would be in vain."""
        return self._process.returncode == 1

    def _last_words(self) -> str:
        said = os.pread(self._said, 1 << 16, 0).decode("utf-8", "replace") if self._said >= 0 else ""
        lines = [line for line in said.splitlines() if line.strip()]
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        return (fatal or lines or [""])[-1].strip()

    def end(self, deadline: float) -> str | None:
        with suppress(OSError):
            self.tell(wire.end_line(deadline - time.monotonic()))
            while self._waiting and time.monotonic() < deadline - FORCE and self._process.poll() is None:
                time.sleep(0.005)
                self._send()
        self._line.close()
        said = None
        try:
            self._process.wait(max(0.0, deadline - FORCE - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            said = "it did not end in time and was killed: what its sinks had not written is lost"
            with suppress(subprocess.TimeoutExpired):  # in the kernel, on a disk that does not answer
                self._process.wait(FORCE)
        if said is None and self._process.returncode:
            said = self.how_it_ended()
        self._close_said()
        return said

    def _close_said(self) -> None:
        descriptor, self._said = self._said, -1
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        self._line.close()
        self._process.returncode = 0  # else it would be waited for


def child_environment() -> dict[str, str]:
    """One thread to a process, and an end where the program ends."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONINSPECT"}, **ENVIRONMENT}


def is_users(specs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a user's code is among the sinks: what it prints is seen."""
    return any(spec["kind"] == "own" for spec in specs)


def unnamed_file(content: bytes = b"") -> int:
    """The descriptor of a file that has no name, at its beginning."""
    with suppress(OSError, AttributeError):
        return _written(os.memfd_create("replaylens-watch"), content)
    with tempfile.TemporaryFile() as file:
        return _written(os.dup(file.fileno()), content)


def _written(descriptor: int, content: bytes) -> int:
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


# -- a thread ----------------------------------------------------------------------------------------------------------


class ThreadWorker:
    """The same loop in this process."""

    has_failed_in_python = True

    def __init__(self, ring: Ring, index: int, specs: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> None:
        optional("numpy", "watch")
        main = import_module(".child.main", __package__)  # here only: it needs numpy
        self._error: str | None = None
        self._inbox = main.Inbox()
        page = ring.status_page(index)
        pages = [ring.status_page(number) for number in range(len(run.get("readers", ())))]
        loop = main.Loop(ring.reader(page.cursor), page, self._inbox, pages=pages)
        self._thread = threading.Thread(target=self._run, args=(loop, specs, run), name="replaylens-watch", daemon=True)
        self._thread.start()

    def _run(self, loop: Any, specs: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> None:
        try:
            loop.run(specs, run)
        except BaseException as error:
            self._error = f"it ended with {type(error).__name__}: {error}"

    def tell(self, line: bytes) -> bool:
        self._inbox.tell([line])
        return True

    def how_it_ended(self) -> str | None:
        return None if self._thread.is_alive() else self._error or "it ended"

    def end(self, deadline: float) -> str | None:
        self.tell(wire.end_line(deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return "it did not end in time and is left behind" if self._thread.is_alive() else self._error

    def forget(self) -> None: ...


# -- either ------------------------------------------------------------------------------------------------------------


@define(eq=False)
class Child:
    """Reads the ring for some sinks. A process that dies is started again, once."""

    ring: Ring
    specs: list[dict[str, Any]]
    index: int = 0
    run: Mapping[str, Any] = field(factory=dict)
    why_thread: str | None = None  # and not a process
    _page: wire.StatusPage | None = field(default=None, init=False)  # None: closed
    _worker: ProcessWorker | ThreadWorker | None = field(default=None, init=False)  # None: dead, or closed
    _lock: Any = field(factory=threading.RLock, init=False)
    _look_at: float = field(default=0.0, init=False)
    _deaths: int = field(default=0, init=False)
    _lost_events: int = field(default=0, init=False)
    _errors: dict[str, str] = field(factory=dict, init=False)
    _told: dict[str, str] = field(factory=dict, init=False)  # of all errors, those that were given as news
    _told_at: tuple[int, int] | None = field(default=None, init=False)
    _said: dict[str, Any] = field(factory=dict, init=False)
    _last: Status | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._page = self.ring.status_page(self.index)
        self._start()
        _open_children.add(self)

    def _start(self) -> None:
        run = {**self.run, "url": self._said.get("url")}  # where pages look that a child before has served
        if self.why_thread is None:
            try:
                self._worker = ProcessWorker.start(self.ring, self.index, self.specs, run)
                return
            except OSError as error:
                self.why_thread = f"no process could be started: {error}"
        self._worker = ThreadWorker(self.ring, self.index, self.specs, run)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its sinks."""
        return tuple([spec["kind"] for spec in self.specs])

    # -- while the training runs ---------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There are samples. Where the child is awake, or its process lives, this costs nothing."""
        page = self._page
        if page is None:
            return
        if page.is_asleep:
            page.is_asleep = 0  # by this end too: until it runs, it is told once
            self._tell(b"")
        elif time.monotonic() >= self._look_at:
            self._look()

    def event(self, kind: str, step: int = 0, **facts: Any) -> None:
        """Something happened: the sinks are told after the samples until now. What is lost is counted."""
        line = json.dumps([kind, step, self.ring.now(), self.ring.sent, facts], default=str)
        if self._page is not None and not self._tell(line.encode()):
            self._lost_events += 1
            self._errors["events"] = f"{self._lost_events} were lost: the child does not read"

    def news(self) -> dict[str, str]:
        """Errors that this has not given before: the first one of each sink, and that it is left alone; how the process
        ended. Where there is none, this costs nothing.
        """
        page = self._page
        at = (page.version, self._deaths + bool(self._lost_events)) if page is not None else CLOSED
        if at == self._told_at:
            return {}
        self._told_at = at
        now = self._status_of(page) if page is not None else self._last or Status()
        news = {name: text for name, text in now.errors.items() if is_news(name, text, self._told.get(name))}
        self._told.update(news)
        return news

    def _tell(self, line: bytes) -> bool:
        with self._lock:
            try:
                return self._worker is None or self._worker.tell(line)
            except OSError:
                self._look()
                return False

    def _look(self) -> None:
        """Is it alive? It may have gone so far only that nobody reads, and is looked at again soon."""
        self._look_at = time.monotonic() + LOOK
        with self._lock:
            how = self._worker.how_it_ended() if self._worker is not None else None
            if how is not None:
                self._revive(how)

    def _revive(self, how: str) -> None:
        page, worker = self._page, self._worker
        if page is None or worker is None:
            return
        self._deaths += 1
        worker.end(time.monotonic())
        self._remove_files(page)
        self._worker, self._errors["process"] = None, how
        if self._deaths > 1 or (worker.has_failed_in_python and page.state == wire.STARTING):
            return
        self._errors["process"] = f"{how}; started again"
        page.state, page.is_asleep = wire.STARTING, 0
        self._start()

    @property
    def wants_pause(self) -> bool:
        """Whether somebody asks, on a page, that nothing be sampled."""
        page = self._page
        return page is not None and bool(page.wants_pause)

    @property
    def status(self) -> Status:
        """How it is doing; after the end, how it did."""
        page = self._page
        if page is None:
            return self._last or Status()
        self._look()
        return self._status_of(page)

    def _status_of(self, page: wire.StatusPage) -> Status:
        self._said = page.said() or self._said
        is_alive = self._worker is not None
        dropped = page.dropped if is_alive else max(page.dropped, self.ring.sent - page.received)
        return Status(
            page.received,
            dropped,
            page.faults + self._deaths,
            {**self._said.get("errors", {}), **self._errors},
            is_alive and page.state == wire.READY,
            is_alive,
            self._said.get("url") if is_alive else None,
            bool(page.wants_pause),
            self._said.get("paths", {}),
        )

    def stats(self) -> SinkStats:
        """The same, for `w.stats()`."""
        now = self.status
        names = tuple(wire.names_of(self.specs))
        return SinkStats(names, now.received, now.dropped, now.faults, now.errors, now.alive, now.url, self.why_thread)

    def wait_until_ready(self, patience: float = 10.0) -> bool:
        """Wait until the sinks are open; False if that takes longer, or fails. The training has no need to."""
        deadline = time.monotonic() + patience
        while (now := self.status).alive and not now.ready and time.monotonic() < deadline:
            time.sleep(0.005)
        return now.ready

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, patience: float | None = None) -> None:
        """Have what was sent written, and end. Whatever a sink does, this takes no longer than `patience` seconds; how
        many these are depends on the sinks, if it is not said.
        """
        if patience is None:
            patience = max(PATIENCE_WITH.get(kind, PATIENCE) for kind in self.kinds)
        with self._lock:
            page, self._page = self._page, None
            worker, self._worker = self._worker, None
        if page is None:
            return
        how = worker.end(time.monotonic() + patience) if worker is not None else None
        if how is not None:
            self._errors["process"] = how
        self._last = self._status_of(page)
        self._remove_files(page)

    def _remove_files(self, page: wire.StatusPage) -> None:
        """Those that are of use only while the child lives: one that is ended by force leaves them."""
        self._said = page.said() or self._said
        for path in self._said.get("passing", ()):
            with suppress(OSError):
                os.unlink(path)

    def forget(self) -> None:
        """In a forked process: nothing reaches the child from here."""
        worker, self._worker, self._page = self._worker, None, None
        if worker is not None:
            worker.forget()


def is_news(name: str, text: str, told: str | None) -> bool:
    """Whether an error says more than the one that was told of this sink, or of the process."""
    if told is None or name == "process":
        return text != told
    return text.endswith(wire.LEFT_ALONE) and not told.endswith(wire.LEFT_ALONE)


_open_children: WeakSet[Child] = WeakSet()


def _forget_children() -> None:
    for child in tuple(_open_children):
        child.forget()


after_fork(_forget_children)


def start_children(
    ring: Ring, specs: Sequence[dict[str, Any]], *, process: bool = True, run: Mapping[str, Any] | None = None
) -> list[Child]:
    """The children for these sinks: one for all that are plain, one for each that is not, threads where it must be."""
    groups = [[spec for spec in specs if not spec["own_process"] and spec["in_thread"] is None]]
    groups += [[spec] for spec in specs if spec not in groups[0]]
    groups = [group for group in groups if group]
    if len(groups) > wire.CHILDREN:
        raise ValueError(f"{len(specs)} sinks need {len(groups)} processes; there can be {wire.CHILDREN}.")
    why = why_no_process(ring) if process else "process=False"
    facts = {**(run or {}), "readers": [", ".join(wire.names_of(group)) for group in groups]}
    children: list[Child] = []
    try:
        for index, group in enumerate(groups):
            children.append(Child(ring, group, index, facts, group[0]["in_thread"] or why))
    except BaseException:
        for child in children:
            child.close(0.5)
        raise
    return children


def why_no_process(ring: Ring) -> str | None:
    """Why no other process can read the ring; None if one can."""
    if os.name != "posix":
        return "on this system, a process cannot be handed a descriptor"
    if not sys.executable:
        return "Python is embedded in another program: sys.executable is empty"
    if getattr(sys, "frozen", False):
        return "this program is frozen, and brings no Python to start"
    if ring.fd < 0:
        return "no file can be made here, through which a process could read"
    return None if FOLDER.is_dir() else "replaylens is in an archive"
