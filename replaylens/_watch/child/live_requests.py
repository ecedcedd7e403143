"""A request of a browser, read strictly: what is unusual is refused, since only our own page asks.

In: what a connection sends. Out: a Request, or Refused. `http.server` would read the same, and bring seven megabytes of
mail and cryptography along, which a watch of a training does not need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from io import BufferedIOBase
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

LONGEST_LINE, MOST_LINES = 8192, 100
FIRST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):[ \t]*(.*?)[ \t]*")


class Refused(Exception):
    """A request that gets no more than a number and a reason."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


class Request(NamedTuple):
    """What was asked."""

    method: str
    path: str
    token: str
    headers: Mapping[str, str]  # by names in small letters


def read_request(stream: BufferedIOBase) -> Request | None:
    """The next request; None where the connection ends before it."""
    first = _line(stream)
    if first is None:
        return None
    found = FIRST_LINE.fullmatch(first)
    if found is None:
        raise Refused(400, "no request")
    method, where = found.groups()
    parts = urlsplit("http://here" + where)
    return Request(method, parts.path, parse_qs(parts.query).get("token", [""])[0], _headers(stream))


def _headers(stream: BufferedIOBase) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(MOST_LINES):
        line = _line(stream)
        if line == "":
            return headers
        found = HEADER.fullmatch(line or "")
        if found is None or found[1].lower() in headers:  # of two hosts or lengths, who knows which others believe
            raise Refused(400, "headers that are none, or twice")
        headers[found[1].lower()] = found[2]
    raise Refused(431, "too many headers")


def _line(stream: BufferedIOBase) -> str | None:
    """A line without its end; None at the end of all."""
    line = stream.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise Refused(431, "a line is too long")
    return line.decode("latin-1").rstrip("\r\n") if line.endswith(b"\n") else None


def read_body(request: Request, stream: BufferedIOBase, most: int) -> bytes:
    """What was sent with it."""
    length = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers or not re.fullmatch("[0-9]{1,18}", length):
        raise Refused(411, "no length")
    if int(length) > most:
        raise Refused(413, "too long")
    return stream.read(int(length))


def head_of_answer(code: int, headers: Mapping[str, str]) -> bytes:
    """The first lines of an answer."""
    lines = [f"HTTP/1.1 {code} {HTTPStatus(code).phrase}", *[f"{name}: {value}" for name, value in headers.items()]]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
