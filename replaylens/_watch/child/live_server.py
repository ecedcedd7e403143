"""The live page: HTTP on this machine only, for whoever knows the address.

In: samples and events (a sink of the child), requests of browsers. Out: the page, its stream of events. Every request
must name a loopback address as its host (a foreign name that leads here would be another site's), come from no other
site, and know the token; what changes something must carry a header that no form can send.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .live_feed import Feed, message
from .live_requests import Refused, Request, head_of_answer, read_body, read_request
from .statistics import Stats
from .wire import Event, Sample

HERE = "127.0.0.1"
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5}")  # any port: a tunnel may begin at another one
PORTS_TRIED = 20
MOST_BODY, MOST_THREADS, PATIENCE = 4096, 96, 10.0  # bytes; threads; seconds for a browser to move on
FRAMED_BY = "'self' http://127.0.0.1:* http://localhost:* https://localhost:* vscode-webview:"  # notebooks
ALWAYS = {
    "Content-Security-Policy": "default-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


@cache
def page() -> str:
    """The page, as it is in its file."""
    return (Path(__file__).parent / "web" / "live.html").read_text(encoding="utf-8")


def page_and_policy() -> tuple[bytes, str]:
    """The page, and the policy that lets it load nothing, and run no script but its own: the one that has the word."""
    word = os.urandom(16).hex()
    text = page().replace("<script>", f'<script nonce="{word}">', 1).replace("<style>", f'<style nonce="{word}">', 1)
    policy = (
        f"default-src 'none'; script-src 'nonce-{word}'; style-src 'nonce-{word}'; connect-src 'self'; img-src data:; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors {FRAMED_BY}"
    )
    return text.encode(), policy


class LiveServer:
    """The sink that serves the page. `url` is its address, `port` its port."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        page()  # read now: it may not be there any more when somebody asks
        before = urlsplit(str(run.get("url") or ""))  # of a child that this one stands in for: its pages look there
        token = parse_qs(before.query).get("token", [os.urandom(16).hex()])[0]
        self.feed = Feed(run)
        self._server = _server_at(before.port or int(options.get("port") or 0), self.feed, token)
        self.port = self._server.port
        self.url = f"http://{HERE}:{self.port}/?token={token}"
        self.url_file = _written(self.url, Path(options.get("folder") or tempfile.gettempdir()))
        self._server.start()

    def attach(self, status: Callable[[], Mapping[str, Any]], pause: Callable[[bool], None]) -> None:
        """What the child knows of all its sinks, and how the training is asked to pause."""
        self.feed.status, self.feed.pause_wanted = status, pause

    def sample(self, sample: Sample, stats: Stats) -> None:
        """Into the history of its row."""
        self.feed.sample(sample, stats)

    def event(self, event: Event) -> None:
        """Told at once."""
        self.feed.event(event)

    def flush(self) -> None:
        """Pages are told by a thread of their own."""

    def close(self) -> None:
        """Tell the pages, and be gone: the port, the threads, the file with the address. Twice is once."""
        with contextlib.suppress(OSError):
            self.url_file.unlink()
        self.feed.close()
        self._server.stop()


def _written(url: str, folder: Path) -> Path:
    """A new file with the address, for its owner's eyes only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"replaylens-live-{os.getpid()}-{os.urandom(4).hex()}.url"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(url + "\n")
    return path


def _server_at(asked: int, feed: Feed, token: str) -> _Server:
    """A server at the port asked for, else at the next free one; at any, if none is asked for."""
    for port in [*range(asked, min(asked + PORTS_TRIED, 65536)), 0] if asked else [0]:
        with contextlib.suppress(OSError):
            return _Server(port, feed, token)
    return _Server(0, feed, token)  # says why there is none


class _Server(ThreadingTCPServer):
    """One thread for each connection, and not without end."""

    allow_reuse_address = os.name != "nt"  # there it would mean that others may take the port as well
    daemon_threads = True
    timeout = 1.0  # seconds between two looks whether it is over
    block_on_close = False
    request_queue_size = 64

    def __init__(self, port: int, feed: Feed, token: str) -> None:
        self.feed, self.token = feed, token
        self._is_over = False
        self._room = threading.BoundedSemaphore(MOST_THREADS)
        super().__init__((HERE, port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        """Listen, in a thread."""
        self._thread = threading.Thread(target=self._accept, name="replaylens-http", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._is_over:
            self.handle_request()

    def stop(self) -> None:
        """Listen no more. The thread is woken by a connection of our own: to close what it waits for does not."""
        self._is_over = True
        with contextlib.suppress(OSError):
            socket.create_connection((HERE, self.port), timeout=1.0).close()
        self._thread.join(2.0)
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return not self._is_over

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no news."""


def is_same(one: bytes, other: bytes) -> bool:
    """Whether two secrets are one, told in the same time wherever they differ."""
    return len(one) == len(other) and sum(a ^ b for a, b in zip(one, other, strict=True)) == 0


class _Timely(io.RawIOBase):
    """What a connection sends within some seconds, however slowly it comes."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._ends = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request takes too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(StreamRequestHandler):
    """Answers one request: the page, its events, its wishes."""

    server: _Server
    timeout = PATIENCE
    wbufsize = -1  # head and body in one packet

    def setup(self) -> None:
        """Read within a time."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Timely(self.connection, PATIENCE))

    def handle(self) -> None:
        """Read, answer, leave."""
        with contextlib.suppress(OSError):  # a browser that went away is no news
            try:
                if request := read_request(self.rfile):
                    self._answer_to(request)
            except Refused as refused:
                self._send(refused.code, f"{refused}\n".encode(), "text/plain; charset=utf-8")
                self._read_on()

    def _answer_to(self, request: Request) -> None:
        answers: dict[str, dict[str, Callable[..., None]]] = {
            "GET": {"/": self._page, "/events": self._events},
            "POST": {"/pause": self._pause, "/look": self._look},
        }
        if request.method not in answers:
            raise Refused(501, "not understood")
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not HOSTS.fullmatch(host) or origin not in (None, f"http://{host}"):
            raise Refused(403, "not from here")
        answer = answers[request.method].get(request.path)
        if answer is None:
            raise Refused(404, "nothing here")
        if not is_same(request.token.encode(), self.server.token.encode()):
            raise Refused(403, "the address lacks the token: use the link that was printed")
        wish = self._wish(request)
        self.connection.settimeout(PATIENCE)
        answer(*wish)

    def _wish(self, request: Request) -> tuple[Any, ...]:
        """What the page's script sent with it: no other site can set this header."""
        if request.method == "GET":
            return ()
        if "x-watch" not in request.headers:
            raise Refused(403, "not sent by the page")
        try:
            said = json.loads(read_body(request, self.rfile, MOST_BODY))
        except (ValueError, RecursionError):
            raise Refused(400, "not understood") from None
        if not isinstance(said, dict):
            raise Refused(400, "not understood")
        return (said,)

    def _page(self) -> None:
        text, policy = page_and_policy()
        self._send(200, text, "text/html; charset=utf-8", {"Content-Security-Policy": policy})

    def _events(self) -> None:
        """All that happens, until the page leaves or the run ends."""
        self.wfile.write(head_of_answer(200, {"Content-Type": "text/event-stream", **ALWAYS}))
        feed = self.server.feed
        stream = feed.open()
        if stream is None:
            self.wfile.write(message("full", {}))
            return
        try:
            for said in feed.messages(stream):
                self.wfile.write(said)
                self.wfile.flush()
        finally:
            feed.leave(stream)

    def _pause(self, said: dict[str, Any]) -> None:
        if not isinstance(said.get("pause"), bool):
            raise Refused(400, "pause, or not?")
        if not self.server.feed.pause(said["pause"]):
            raise Refused(409, "nobody can be asked")
        self._send(200, b"{}", "application/json")

    def _look(self, said: dict[str, Any]) -> None:
        rows, opened, stream = said.get("rows"), said.get("open"), said.get("stream")
        if not isinstance(rows, list) or not isinstance(stream, int) or not isinstance(opened, int | None):
            raise Refused(400, "look at what?")
        self.server.feed.look(stream, [row for row in rows if isinstance(row, int)], opened)
        self._send(200, b"{}", "application/json")

    def _send(self, code: int, body: bytes, kind: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **ALWAYS, **more}
        self.wfile.write(head_of_answer(code, headers) + body)
        self.wfile.flush()

    def _read_on(self) -> None:
        """Read what else was sent, a little: a connection that is closed before takes its answer along."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(0.2)
        for _ in range(16):
            if not self.connection.recv(65536):
                return
