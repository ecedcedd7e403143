"""The live page: HTTP on this machine only, for whoever knows the address.

In: samples and events (a sink of the child), requests of browsers. Out: the page, its stream of events. Every request
must name a loopback address as its host (a foreign name that leads here would be another site's), come from no other
site, and know the token; what changes something must carry a header that no form can send.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from .live_feed import Feed, message
from .statistics import Stats
from .wire import Event, Sample

HERE = "127.0.0.1"
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5}")  # any port: a tunnel may begin at another one
PORTS_TRIED = 20
MOST_BODY, MOST_THREADS, PATIENCE = 4096, 96, 10.0  # bytes; threads; seconds for a browser to move on
FRAMED_BY = "'self' http://127.0.0.1:* http://localhost:* https://localhost:* vscode-webview:"  # notebooks


@cache
def page() -> tuple[bytes, str]:
    """The page, and the policy that lets it load nothing, and run no script but its own."""
    text = (Path(__file__).parent / "web" / "live.html").read_text(encoding="utf-8")
    script, style = (_hash_of(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        f"base-uri 'none'; form-action 'none'; frame-ancestors {FRAMED_BY}"
    )
    return text.encode(), policy


def _hash_of(text: str, tag: str) -> str:
    content = text.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


class LiveServer:
    """The sink that serves the page. `url` is its address, `port` its port."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        page()  # read now: it may not be there any more when somebody asks
        before = urlsplit(str(run.get("url") or ""))  # of a child that this one stands in for: its pages look there
        token = parse_qs(before.query).get("token", [secrets.token_urlsafe(16)])[0]
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
    path = folder / f"replaylens-live-{os.getpid()}-{secrets.token_hex(4)}.url"
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


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection: the page, its events, its wishes."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    wbufsize = -1  # head and body in one packet
    get: ClassVar[dict[str, str]] = {"/": "_page", "/events": "_events"}
    post: ClassVar[dict[str, str]] = {"/pause": "_pause", "/look": "_look"}

    def do_GET(self) -> None:
        """The page and its events."""
        if answer := self._allowed(self.get):
            answer()

    def do_POST(self) -> None:
        """Wishes of the page: sent by its script alone, since no other site can set this header."""
        if (answer := self._allowed(self.post)) and (body := self._body()) is not None:
            try:
                answer(json.loads(body))
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
                self._refuse(400, "not understood")

    def _body(self) -> bytes | None:
        """What was sent; None if it was refused."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get("X-Watch") is None:
            self._refuse(403, "not sent by the page")
        elif not re.fullmatch("[0-9]{1,18}", length):
            self._refuse(411, "no length")
        elif int(length) > MOST_BODY:
            self._refuse(413, "too long")
        else:
            return self.rfile.read(int(length))
        return None

    def _allowed(self, answers: Mapping[str, str]) -> Callable[..., None] | None:
        """The function that answers this request; None if it was refused."""
        where = urlsplit(self.path)
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not HOSTS.fullmatch(host) or origin not in (None, f"http://{host}"):
            self._refuse(403, "not from here")
        elif where.path not in answers:
            self._refuse(404, "nothing here")
        elif not self._knows_token(where.query):
            self._refuse(403, "the address lacks the token: use the link that was printed")
        else:
            found: Callable[..., None] = getattr(self, answers[where.path])
            return found
        return None

    def _knows_token(self, query: str) -> bool:
        given = parse_qs(query).get("token", [""])[0]
        return secrets.compare_digest(given.encode("utf-8", "surrogateescape"), self.server.token.encode())

    def _page(self) -> None:
        text, _ = page()
        self._answer(200, text, "text/html; charset=utf-8")

    def _events(self) -> None:
        """All that happens, until the page leaves or the run ends."""
        self.close_connection = True
        self._head(200, "text/event-stream", None)
        feed = self.server.feed
        stream = feed.open()
        if stream is None:
            self.wfile.write(message("full", {}))
            return
        try:
            for said in feed.messages(stream):
                self.wfile.write(said)
                self.wfile.flush()
        except OSError:
            pass  # the page is gone
        finally:
            feed.leave(stream)

    def _pause(self, said: Any) -> None:
        done = self.server.feed.pause(bool(said["pause"]))
        self._answer(200 if done else 409, json.dumps({"done": done}).encode(), "application/json")

    def _look(self, said: Any) -> None:
        rows, opened = [int(row) for row in said["rows"]], said.get("open")
        self.server.feed.look(int(said["stream"]), rows, None if opened is None else int(opened))
        self._answer(200, b"{}", "application/json")

    def _refuse(self, code: int, why: str) -> None:
        """An answer without anything of the run; what else was sent is not read."""
        self.close_connection = True
        self._answer(code, f"{code}: {why}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self._head(code, kind, len(body))
        self.wfile.write(body)
        self.wfile.flush()

    def _head(self, code: int, kind: str, length: int | None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in (
            ("Content-Security-Policy", page()[1]),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        """Says nothing about this machine."""
        return "replaylens"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed: the terminal is the training's."""
