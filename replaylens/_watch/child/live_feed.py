"""What the pages that look at a run are told: first everything that is known, then what is new.

In: samples and events from the child's loop; which rows a page shows. Out: server-sent events, in the queue of each
page. A thread of its own tells five times a second what came meanwhile, and sleeps while nobody looks. Only then, of a
row that is on somebody's screen, and at most one each time, a picture is made.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .live_history import MOST_ROWS, History
from .live_picture import picture_of
from .statistics import Stats
from .wire import Event, Sample

MOST_STREAMS, MOST_WAITING, MOST_LOOKED = 8, 300, 40
MOST_KEPT = 16 << 20  # bytes of values, of which a picture may be wanted
TICK, STATUS_EVERY, STILL_HERE = 0.2, 5, 10.0  # seconds; ticks; seconds

Status = Callable[[], Mapping[str, Any]]


def message(kind: str, data: Any) -> bytes:
    """A server-sent event. JSON has no line breaks, so that no text can begin another one."""
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()


class Stream:
    """A page that looks. What it is told waits here; one that does not read is let go, and asks again."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.looked: frozenset[int] = frozenset()
        self.opened: int | None = None
        self.is_open = True
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING + 1)

    def tell(self, said: bytes | None) -> None:
        """Put a message in the queue; None ends the stream."""
        if said is not None and self._waiting.qsize() >= MOST_WAITING:
            self.is_open, said = False, None
        try:
            self._waiting.put_nowait(said)
        except queue.Full:  # it was ended already
            self.is_open = False

    def messages(self) -> Iterator[bytes]:
        """What is to be sent, as it comes; a sign of life where nothing comes."""
        while True:
            try:
                said = self._waiting.get(timeout=STILL_HERE)
            except queue.Empty:
                said = b": still here\n\n"
            if said is None:
                return
            yield said


class Feed:
    """The history of a run, and those who are told of it."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        started = time.time() if run.get("started") is None else run["started"]
        self.run = {"name": run.get("name"), "model": run.get("model"), "started": started}
        self.status: Status = dict  # what the child knows of its sinks
        self.pause_wanted: Callable[[bool], None] | None = None  # tells the training that it should not sample
        self.history = History()
        self._session = os.urandom(4).hex()
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._opened = 0
        self._pending: dict[int, Sample] = {}  # by row, of which a picture is wanted; the longest waiting first
        self._kept: dict[int, Sample] = {}  # by row, the newest ones, as long as pages look
        self._kept_bytes = 0
        self._looked: frozenset[int] = frozenset()
        self._wants_pause = False
        self._received = 0
        self._counts: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=6)
        self._somebody, self._closed = threading.Event(), threading.Event()
        self._teller = threading.Thread(target=self._tell_on, name="replaylens-live", daemon=True)
        self._teller.start()

    # -- from the child's loop ------------------------------------------------------------------------------------

    def sample(self, sample: Sample, stats: Stats) -> None:
        """One more sample."""
        with self._lock:
            self._received += 1
            row = self.history.sample(sample, stats, bool(self._streams))
            if row is not None and self._streams:
                self._keep(row.identity, sample)
            self._tell("note", self.history.note(sample.step, sample.note))

    def event(self, event: Event) -> None:
        """A note, an alarm, a pause: told at once."""
        with self._lock:
            if event.kind == "alarm":
                self._tell("alarm", self.history.alarm(event))
            elif event.kind in ("pause", "resume"):
                self.history.paused = event.kind == "pause"
                self._tell("status", self._facts())
            elif event.kind in ("note", "epoch"):
                text = event.facts.get("text") or event.facts.get("epoch") or ""
                self._tell("note", self.history.note(event.step, str(text)))

    def close(self, patience: float = 1.0) -> None:
        """Say that the run has ended, and wait until the pages have heard it."""
        with self._lock:
            self._tell("points", self.history.news() or None)
            self._tell("status", self._facts())
            self._tell("end", {"step": self.history.step})
            self._closed.set()
            self._somebody.set()
            for stream in self._streams.values():
                stream.tell(None)
        self._teller.join(patience)
        deadline = time.monotonic() + patience
        while self._streams and time.monotonic() < deadline:
            time.sleep(0.01)

    # -- from the threads of the server ---------------------------------------------------------------------------

    def open(self) -> Stream | None:
        """A stream for one more page, or None if there are too many, or the run has ended."""
        with self._lock:
            if len(self._streams) >= MOST_STREAMS or self._closed.is_set():
                return None
            self._opened += 1
            stream = self._streams[self._opened] = Stream(self._opened)
            self._somebody.set()
            return stream

    def messages(self, stream: Stream) -> Iterator[bytes]:
        """All that a page is told, as long as it looks. Rows are written as they are sent: together they are large."""
        with self._lock:
            notes, alarms = list(self.history.notes), list(self.history.alarms)
            rows, facts = list(self.history.rows.values()), self._facts()
        about = {"run": self.run, "session": self._session, "stream": stream.number, "rows": len(rows)}
        yield message("hello", {**about, "notes": notes, "alarms": alarms, "status": facts})
        for row in rows:
            with self._lock:
                whole = row.whole()
            yield message("row", whole)
        yield message("ready", {})
        yield from stream.messages()

    def leave(self, stream: Stream) -> None:
        """A page looks no more."""
        with self._lock:
            stream.is_open = False
            self._streams.pop(stream.number, None)
            self._look_anew()
            if not self._streams:
                self._somebody.clear()
                self._kept, self._kept_bytes = {}, 0
                self.history.forget_news()

    def look(self, number: int, rows: Iterable[int], opened: int | None) -> None:
        """What a page shows: pictures are made of these rows, and of the opened one first."""
        with self._lock:
            if stream := self._streams.get(number):
                stream.looked, stream.opened = frozenset(list(rows)[:MOST_LOOKED]), opened
                self._look_anew()

    def pause(self, wanted: bool) -> bool:
        """Ask the training to sample no more, or again; False if it cannot be asked."""
        if self.pause_wanted is None:
            return False
        self.pause_wanted(wanted)
        with self._lock:
            self._wants_pause = wanted
            self._tell("status", self._facts())
        return True

    # -- pictures -------------------------------------------------------------------------------------------------

    def _keep(self, row: int, sample: Sample) -> None:
        """For a picture: now, if a page shows the row, or when one will."""
        before = self._kept.pop(row, None)
        self._kept[row] = sample
        self._kept_bytes += sample.values.nbytes - (before.values.nbytes if before is not None else 0)
        while self._kept_bytes > MOST_KEPT:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept))).values.nbytes
        if row in self._looked:
            self._pending[row] = sample

    def _look_anew(self) -> None:
        before = self._looked
        opened = {stream.opened for stream in self._streams.values() if stream.opened is not None}
        self._looked = frozenset().union(opened, *(stream.looked for stream in self._streams.values()))
        self._pending = {row: sample for row, sample in self._pending.items() if row in self._looked}
        self._pending |= {row: self._kept[row] for row in self._looked - before if row in self._kept}

    def _next_picture(self, ticks: int) -> tuple[int, Sample] | None:
        """The row whose picture is due: each second time an opened one, else that which waits longest."""
        if not self._pending:
            return None
        opened = [stream.opened for stream in self._streams.values() if stream.opened in self._pending]
        row = opened[0] if opened and ticks % 2 and opened[0] is not None else next(iter(self._pending))
        return row, self._pending.pop(row)

    # -- telling --------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, data: Any) -> None:
        """Put a message in every queue; with the lock held."""
        if data is not None and self._streams:
            said = message(kind, data)
            for stream in self._streams.values():
                stream.tell(said)

    def _tell_on(self) -> None:
        """The thread: what is new, as long as somebody looks."""
        ticks = 0
        while not self._closed.wait(TICK):
            self._somebody.wait()
            ticks += 1
            self._tick(ticks)

    def _tick(self, ticks: int) -> None:
        with self._lock:
            self._tell("points", self.history.news() or None)
            if ticks % STATUS_EVERY == 0:
                self._tell("status", self._facts())
            wanted = self._next_picture(ticks)
        if wanted is None:
            return
        identity, sample = wanted
        picture = picture_of(sample)
        if picture is not None:
            with self._lock:
                self._tell("picture", {"id": identity, **picture})

    def _facts(self) -> dict[str, Any]:
        """How the run is doing, for JSON."""
        now = time.monotonic()
        self._counts.append((now, self._received))
        since, before = self._counts[0]
        return {
            "step": self.history.step,
            "rate": round((self._received - before) / max(now - since, TICK), 1),
            "paused": self.history.paused,
            "wants_pause": self._wants_pause,
            "can_pause": self.pause_wanted is not None,
            "beyond": len(self.history.beyond),
            "most": MOST_ROWS,
            **self.status(),
        }
