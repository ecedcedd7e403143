"""The loop that hands samples to sinks, in a process of its own or in a thread.

In: a ring, a page of status, lines from the training, descriptions of sinks. Out: calls of the sinks, each guarded:
what one raises is counted, and the others go on. The process lives as long as its standard input is open; then it reads
what is left, as far as there is time, and lets the sinks close.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from . import statistics, wire
from .sinks import make_sink

TICK = 0.5  # seconds: is the training still there?
FLUSH = 1.0
DRAIN = 0.5  # of the time that the training waits: to read what is left
CUT_OFF = 1.0  # to read it, where the training is gone
LAST_SAMPLE = 1.0  # more, for a sink that is in the middle of one
LAST_WORDS = 8.0  # more, to close
PATIENCE = 3  # faults in a row
MOST_TOLD = 64 * 1024  # bytes on standard error


class Inbox:
    """What the training tells, line by line, and that it is over. An empty line only wakes."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.news = threading.Event()
        self.is_over = False
        self.patience: float | None = None  # seconds that the training waits for the end

    def listen(self, descriptor: int) -> None:
        """Take lines until there will be no more: the work of a thread."""
        rest = b""
        with suppress(OSError):
            while not self.is_over and (chunk := os.read(descriptor, 65536)):
                *lines, rest = (rest + chunk).split(b"\n")
                self.tell(lines)
        self.end()

    def tell(self, lines: Sequence[bytes]) -> None:
        """Lines that have arrived."""
        for line in filter(None, lines):
            patience = wire.patience_of(line)
            if patience is None:
                self.lines.append(line)
            else:
                self.patience = patience
                self.end()
        self.news.set()

    def end(self) -> None:
        """Nothing more will come."""
        self.is_over = True
        self.news.set()

    @property
    def time_left(self) -> float:
        """How long what was sent may be read, after the end."""
        return CUT_OFF if self.patience is None else DRAIN * self.patience


class Guarded:
    """A sink that cannot harm others. After some faults in a row it is left alone, and not even closed: a library that
    could not write may end the process when it is called again.
    """

    def __init__(self, name: str, patience: int, faulty: Callable[[str, str], None]) -> None:
        self.name = name
        self.sink: Any = None
        self._patience, self._faulty = patience, faulty
        self._faults: dict[str, int] = {}

    def open(self, make: Callable[[], Any]) -> None:
        """Make the sink."""
        self.sink = self._guarded("open", 1, make)

    def call(self, method: str, *given: Any) -> None:
        """Call one of the sink's methods, if it has it and is not left alone."""
        found = getattr(self.sink, method, None)
        if found is not None:
            self._guarded(method, self._patience, found, *given)

    def _guarded(self, place: str, patience: int, work: Callable[..., Any], *given: Any) -> Any:
        try:
            result = work(*given)
        except BaseException as error:  # a user's sink may call `sys.exit`
            self._fault(place, patience, error)
            return None
        self._faults.pop(place, None)
        return result

    def _fault(self, place: str, patience: int, error: BaseException) -> None:
        count = self._faults[place] = self._faults.get(place, 0) + 1
        text = f"{place}: {type(error).__name__}: {error}"
        if count >= patience:
            self.sink = None
            text += wire.LEFT_ALONE
        self._faulty(self.name, text)


class Loop:
    """Reads samples and lines, and calls the sinks."""

    def __init__(
        self,
        reader: wire.Reader,
        page: wire.StatusPage,
        inbox: Inbox,
        chores: Callable[[], None] = lambda: None,
        pages: Sequence[wire.StatusPage] = (),  # of all children, for a sink that shows them
    ) -> None:
        self._reader, self._page, self._inbox, self._chores = reader, page, inbox, chores
        self._pages = pages
        self._names: Sequence[str] = ()  # of the children
        self._received, self._dropped = page.received, page.dropped  # by a process that ended before its time
        self._events: deque[tuple[int, wire.Event]] = deque()  # each with the number of samples before it
        self._sinks: list[Guarded] = []
        self._errors: dict[str, str] = {}
        self._ticked = self._flushed = time.monotonic()
        self.is_closing = False

    def run(self, specs: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> None:
        """Open the sinks, and work until it is over."""
        self._names = run.get("readers", ())
        self._open(specs, run)
        self._page.state = wire.READY
        while not self._inbox.is_over:
            if not self._advance():
                self._rest()
            self._tick()
        self._drain()
        self.is_closing = True
        self._call("close")
        self._page.state = wire.ENDED

    def _open(self, specs: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> None:
        for spec, name in zip(specs, wire.names_of(specs), strict=True):
            sink = Guarded(name, 1 if spec["kind"] == "film" else PATIENCE, self._faulty)
            self._sinks.append(sink)
            sink.open(lambda spec=spec: make_sink(spec, run))  # type: ignore[misc]
        self._call("attach", self._facts, self._ask_for_pause)
        self._say()

    def _call(self, method: str, *given: Any) -> None:
        for sink in self._sinks:
            sink.call(method, *given)

    # -- one sample ----------------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """The next sample, after the events that were before it. False: there is none."""
        sample = self._reader.take()
        self._note_counts()
        self._take_events(self._reader.cursor - (sample is not None))
        if sample is not None and any(one.sink is not None for one in self._sinks):
            self._hand_on(sample)
        return sample is not None

    def _note_counts(self) -> None:
        """Said before the sinks see the sample: if it ends this process, the next one begins after it."""
        self._page.cursor = self._reader.cursor
        self._page.received = self._received + self._reader.received
        self._page.dropped = self._dropped + self._reader.dropped

    def _hand_on(self, sample: wire.Sample) -> None:
        try:
            stats = statistics.of(sample)
        except Exception as error:
            self._faulty("statistics", f"{sample.name}: {type(error).__name__}: {error}")
        else:
            self._call("sample", sample, stats)

    def _take_events(self, seen: int) -> None:
        while self._inbox.lines:
            kind, step, moment, before, facts = json.loads(self._inbox.lines.popleft())
            self._events.append((before, wire.Event(kind, step, moment, facts)))
        while self._events and self._events[0][0] <= seen:
            self._call("event", self._events.popleft()[1])

    def _drain(self) -> None:
        """What was sent until the end, as far as there is time."""
        deadline = time.monotonic() + self._inbox.time_left
        while time.monotonic() < deadline and self._advance():
            pass
        self._reader.skip()
        self._note_counts()
        self._take_events(self._reader.cursor)

    # -- between samples -----------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Sleep until there is news."""
        self._flush()
        self._page.is_asleep = True
        self._inbox.news.clear()
        if self._reader.head == self._reader.cursor and not self._inbox.lines and not self._inbox.is_over:
            self._inbox.news.wait(TICK)
        self._page.is_asleep = False

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        self._call("flush")

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._flushed >= FLUSH:
            self._flush()
        if now - self._ticked >= TICK:
            self._ticked = now
            self._chores()

    # -- status --------------------------------------------------------------------------------------------------------

    def _faulty(self, name: str, text: str) -> None:
        self._page.faults += 1
        self._errors[name] = text
        self._say()

    def _say(self) -> None:
        sinks = {one.name: one.sink for one in self._sinks if one.sink is not None}
        url = next((sink.url for sink in sinks.values() if getattr(sink, "url", None)), None)
        paths = {name: str(sink.path) for name, sink in sinks.items() if getattr(sink, "path", None)}
        passing = [str(sink.url_file) for sink in sinks.values() if getattr(sink, "url_file", None)]
        self._page.say({"errors": self._errors, "url": url, "paths": paths, "passing": passing})

    def _facts(self) -> dict[str, Any]:
        """For a sink that shows them."""
        readers = [_told(name, page) for name, page in zip(self._names, self._pages, strict=False)]
        own = {**_told("", self._page), "errors": {**self._errors}, "wants_pause": bool(self._page.wants_pause)}
        return {**own, "readers": readers} if readers else own

    def _ask_for_pause(self, wanted: bool) -> None:
        self._page.wants_pause = wanted


def _told(name: str, page: wire.StatusPage) -> dict[str, Any]:
    """What a child says of itself."""
    errors = (page.said() or {}).get("errors", {})
    return {"name": name, "received": page.received, "dropped": page.dropped, "faults": page.faults, "errors": errors}


# -- as a process ------------------------------------------------------------------------------------------------------


def main(config: Mapping[str, Any], ring: int, index: int, parent: int) -> None:
    """The child. `ring` is the descriptor of the memory, `index` its page of status, `parent` the training."""
    faulthandler.enable()
    memory = mmap.mmap(ring, 0)
    os.close(ring)
    page = wire.StatusPage(memory, index)
    inbox = Inbox()
    _end_on_signals(inbox)
    pages = [wire.StatusPage(memory, number) for number in range(len(config["run"].get("readers", ())))]
    loop = Loop(wire.Reader(memory, page.cursor), page, inbox, lambda: _chores(inbox, parent), pages)
    threading.Thread(target=_live_and_die, args=(inbox, loop, parent), name="replaylens-lifeline", daemon=True).start()
    loop.run(config["specs"], config["run"])


def _end_on_signals(inbox: Inbox) -> None:
    """Where a whole job is told to end, its files should have their ends. Nothing may be locked here."""

    def end(*ignored: Any) -> None:
        inbox.is_over = True

    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)


def _live_and_die(inbox: Inbox, loop: Loop, parent: int) -> None:
    """Listen as long as the training lives. Then no sink may hold up the end: who waits for it ends it by force."""
    inbox.listen(0)
    deadline = time.monotonic() + (inbox.patience or 0.0)
    while time.monotonic() < deadline and os.getppid() == parent:
        time.sleep(TICK)
    time.sleep(CUT_OFF + LAST_SAMPLE)
    if loop.is_closing:
        time.sleep(LAST_WORDS)
    os._exit(os.EX_UNAVAILABLE)


def _chores(inbox: Inbox, parent: int) -> None:
    """A process forked from the training may hold the other end of standard input open: who is the parent now?"""
    if os.getppid() != parent:
        inbox.end()
    if os.fstat(2).st_size > MOST_TOLD:
        os.ftruncate(2, 0)
