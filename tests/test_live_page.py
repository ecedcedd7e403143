"""The live page of a watch: who is let in, what a page is told, what it shows, and that neither end grows.

The last part is the page in headless Chromium, as a person uses it (`make zoo`).
"""

import base64
import http.client
import json
import os
import re
import shutil
import socket
import stat
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from replaylens._watch.child import live_feed, live_history, live_picture, live_server, statistics
from replaylens._watch.child.live_link import is_elsewhere, link_html, link_text
from replaylens._watch.child.live_server import LiveServer
from replaylens._watch.child.wire import Event, Sample

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")

try:
    from selenium import webdriver
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    webdriver = None

RUN = {"name": "a run", "model": "Net", "started": 0.0}


def sample(name="one", step=0, values=(0.0, 1.0, 2.0), what="activation", **facts):
    values = np.asarray(values, np.float32)
    whole = {"shape": values.shape, "size": values.size, "thinned": False, "scaled": False, "note": ""} | facts
    return Sample(
        name, what, step, 0, 0.0, values, whole["shape"], "float32", whole["size"], whole["thinned"],
        None, None, None, None, whole["scaled"], whole["note"],
    )  # fmt: skip


def give(server, *args, **facts):
    one = sample(*args, **facts)
    server.sample(one, statistics.of(one))


def happen(server, kind, step=0, **facts):
    server.event(Event(kind, step, 0.0, facts))


@contextmanager
def serving(folder, options=(), run=RUN):
    made = LiveServer({"folder": folder, **dict(options)}, run)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as made:
        yield made


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
    return found


def query(server):
    return "?" + urlsplit(server.url).query


def ask(server, method="GET", path="/", token=True, headers=(), body=None):
    """An answer: its number, its headers, its text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path + (query(server) if token else ""), body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def post(server, path, said, **headers):
    return ask(server, "POST", path, headers={"X-Watch": "1", **headers}, body=json.dumps(said))[0]


class Page:
    """A page that looks: the messages that it hears."""

    def __init__(self, server):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        self.connection.request("GET", "/events" + query(server))
        self.answer = self.connection.getresponse()

    def hear(self):
        """The next message, or None at the end."""
        kind = None
        while line := self.answer.readline():
            word, _, rest = line.decode().rstrip("\n").partition(": ")
            if word == "event":
                kind = rest
            elif word == "data":
                return kind, json.loads(rest)
        return None

    def hear_until(self, kind):
        """Everything up to a message of this kind."""
        heard = [self.hear()]
        while heard[-1] is not None and heard[-1][0] != kind:
            heard.append(self.hear())
        return heard

    def close(self):
        self.answer.close()
        self.connection.close()


@contextmanager
def looking(server):
    page = Page(server)
    try:
        yield page
    finally:
        page.close()


def numbers(text):
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, live_history.LAST)


# -- who is let in ----------------------------------------------------------------------------------------------------

GUARD = {"X-Watch": "1"}
ANSWERS = {
    "the printed address": (200, {}),
    "the page by another loopback name": (200, {"headers": {"Host": "localhost:80"}}),
    "a tunnel that begins at another port": (200, {"headers": {"Host": "127.0.0.1:9999"}}),
    "no token": (403, {"token": False}),
    "a wrong token": (403, {"path": "/?token=guess&", "token": False}),
    "a token with strange letters": (403, {"path": "/?token=%FF%C3%A4&", "token": False}),
    "a foreign name that leads here": (403, {"headers": {"Host": "evil.com"}}),
    "a foreign name with the port": (403, {"headers": {"Host": "evil.com:8123"}}),
    "a name that begins like ours": (403, {"headers": {"Host": "127.0.0.1.evil.com:80"}}),
    "a host without a port": (403, {"headers": {"Host": "127.0.0.1"}}),
    "another site": (403, {"headers": {"Origin": "http://evil.com"}}),
    "another program on this machine": (403, {"headers": {"Origin": "http://127.0.0.1:1"}}),
    "a page of no origin": (403, {"headers": {"Origin": "null"}}),
    "events without the token": (403, {"path": "/events", "token": False}),
    "a wish without the header": (403, {"method": "POST", "path": "/pause", "body": '{"pause": true}'}),
    "a wish without the token": (403, {"method": "POST", "path": "/pause", "headers": GUARD, "body": "{}", "token": False}),
    "a long wish": (413, {"method": "POST", "path": "/pause", "headers": GUARD, "body": "x" * 5000}),
    "a wish of no length": (411, {"method": "POST", "path": "/pause", "headers": {**GUARD, "Content-Length": "-1"}}),
    "a wish that is no JSON": (400, {"method": "POST", "path": "/pause", "headers": GUARD, "body": "{"}),
    "a wish for nothing": (400, {"method": "POST", "path": "/pause", "headers": GUARD, "body": "[]"}),
    "a look at endless rows": (400, {"method": "POST", "path": "/look", "headers": GUARD, "body": '{"rows": [Infinity]}'}),
    "a preflight": (501, {"method": "OPTIONS"}),
    "a put": (501, {"method": "PUT"}),
    "a file": (404, {"path": "/../../etc/passwd"}),
    "a file, written otherwise": (404, {"path": "/%2e%2e/%2e%2e/etc/passwd"}),
    "a post to the page": (404, {"method": "POST", "path": "/", "headers": GUARD, "body": "{}"}),
    "a wish by a link": (404, {"path": "/pause"}),
}  # fmt: skip


@pytest.mark.parametrize("what", ANSWERS)
def test_requests_are_answered_with(what, server):
    number, asked = ANSWERS[what]
    got, headers, text = ask(server, **asked)
    assert got == number
    assert "Access-Control-Allow-Origin" not in headers
    if number != 200:
        assert "a run" not in text
        assert urlsplit(server.url).query not in text


HOST = b"Host: 127.0.0.1:80\r\n"
UNUSUAL = {
    b"": b"",
    b"\r\n\r\n": b"400",
    b"GET / HTTP/1.1\r\n" + HOST: b"400",  # and no more
    b"GET http://127.0.0.1/ HTTP/1.1\r\n" + HOST + b"\r\n": b"400",
    b"GET / HTTP/2\r\n" + HOST + b"\r\n": b"400",
    b"GET /\x00 HTTP/1.1\r\n" + HOST + b"\r\n": b"400",
    b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n": b"400",
    b"GET / HTTP/1.1\r\n" + HOST + b" folded\r\n\r\n": b"400",
    b"GET / HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n": b"400",
    b"GET / HTTP/1.1\r\nHost : 127.0.0.1:80\r\n\r\n": b"400",
    b"GET / HTTP/1.1\r\n\r\n": b"403",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n": b"431",
    b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % n for n in range(200)) + b"\r\n": b"431",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": b"400",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 90: b"",  # https
    b"\xff" * 20000: b"431",
}


@pytest.mark.parametrize("sent", UNUSUAL, ids=range(len(UNUSUAL)))
def test_a_request_that_no_browser_would_send_is_refused(sent, server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer[9:12] == UNUSUAL[sent]
    assert b"text/html" not in answer
    assert ask(server)[0] == 200


def test_a_body_in_chunks_is_refused(server):
    headers = {"X-Watch": "1", "Transfer-Encoding": "chunked"}
    assert ask(server, "POST", "/pause", headers=headers, body=iter([b'{"pause": true}']))[0] == 411


def test_a_wrong_wish_changes_nothing(server):
    asked = []
    server.attach(dict, asked.append)
    for what, (number, facts) in ANSWERS.items():
        if facts.get("path") == "/pause":
            assert ask(server, **facts)[0] == number, what
    assert asked == []


def test_the_page_may_load_nothing_and_run_only_its_own_script(server):
    _, headers, text = ask(server)
    policy = headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        [nonce] = re.findall(f'<{tag} nonce="([0-9a-f]{{32}})">', text)
        assert f"{tag}-src 'nonce-{nonce}'" in policy
        assert nonce not in ask(server)[2]  # another one each time
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Server" not in headers
    assert re.findall("https?://[^'\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_only_this_machine_can_connect(server):
    assert server._server.server_address[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it tells this machine's own address
            own = probe.getsockname()[0]
        except OSError:
            pytest.skip("this machine has no address")
    if not own.startswith("127."):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((own, server.port), timeout=5)


def test_a_port_that_is_taken_gives_the_next_free_one(tmp_path):
    with serving(tmp_path) as first, serving(tmp_path, {"port": first.port}) as second:
        assert first.port < second.port <= first.port + live_server.PORTS_TRIED
        assert f"(port {first.port} is taken)" in link_text(second.url, asked=first.port)


def test_a_child_that_stands_in_for_another_is_found_where_that_was(tmp_path):
    with serving(tmp_path) as first:
        url = first.url
    with serving(tmp_path, run={**RUN, "url": url}) as second:
        assert second.url == url
        assert ask(second)[0] == 200


def test_the_address_is_in_a_file_for_its_owner_and_goes_with_the_run(tmp_path):
    with serving(tmp_path / "new") as made:
        [path] = (tmp_path / "new").iterdir()
        assert path.read_text() == made.url + "\n"
        if os.name != "nt":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list((tmp_path / "new").iterdir()) == []


def test_two_runs_have_two_tokens(tmp_path):
    with serving(tmp_path) as one, serving(tmp_path) as other:
        assert urlsplit(one.url).query != urlsplit(other.url).query
        assert ask(other, path="/" + query(one), token=False)[0] == 403


def test_idle_connections_do_not_shut_others_out(server):
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(60)]
    try:
        assert ask(server)[0] == 200
    finally:
        for one in idle:
            one.close()


def test_more_connections_than_threads_are_turned_away_and_those_before_still_answered(server, monkeypatch):
    idle = [
        socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(live_server.MOST_THREADS + 20)
    ]
    try:
        until(lambda: threading.active_count() >= live_server.MOST_THREADS)
        assert threading.active_count() < live_server.MOST_THREADS + 15
    finally:
        for one in idle:
            one.close()
    until(lambda: threading.active_count() < 20)
    assert ask(server)[0] == 200


# -- what a page is told ----------------------------------------------------------------------------------------------


def test_a_page_is_told_all_that_was_before_it_came(server):
    for step in range(3):
        give(server, "a.b", step, [step, step + 2.0])
    give(server, "a.b", 3, [5.0, float("nan")], what="grad")
    happen(server, "note", 1, text="epoch 2")
    happen(server, "alarm", 3, reason="not finite", path="runs/step-3.pt")
    with looking(server) as page:
        hello, first, second, ready = [data for _, data in page.hear_until("ready")]
    assert hello["run"] == {"name": "a run", "model": "Net", "started": 0.0}
    assert hello["notes"] == [{"step": 1, "text": "epoch 2"}]
    assert [(one["step"], one["reason"], one["path"]) for one in hello["alarms"]] == [
        (3, "not finite", "runs/step-3.pt")
    ]
    assert ready == {}
    assert (first["name"], first["what"], first["history"]["steps"]) == ("a.b", "activation", [0, 1, 2])
    points = numbers(first["history"]["points"])
    assert points[:, live_history.MEAN].tolist() == [1.0, 2.0, 3.0]
    assert points[:, [live_history.QUANTILES, -1]].tolist() == [[0, 2], [1, 3], [2, 4]]
    assert first["numbers"] == [3.0, 1.0, 2.0, 4.0, pytest.approx(20**0.5, rel=1e-4), 0.0]
    assert (second["what"], second["wrong"]) == ("grad", [1, 0, 3, 3, 1])


def test_a_page_is_told_what_is_new(server):
    give(server, "a", 0)
    with looking(server) as page:
        page.hear_until("ready")
        give(server, "a", 1, [4.0, 6.0])
        give(server, "b", 1)
        [(_, points)] = [one for one in page.hear_until("points") if one[0] == "points"]
        assert [(one["name"], one["seen"], one["step"]) for one in points] == [("a", 2, 1), ("b", 1, 1)]
        assert numbers(points[0]["point"])[0, live_history.MEAN] == 5.0
        happen(server, "alarm", 1, reason="gradient norm 2e9", path="runs/step-1.pt")
        assert page.hear_until("alarm")[-1][1]["path"] == "runs/step-1.pt"
        happen(server, "pause", 1)
        assert page.hear_until("status")[-1][1]["paused"] is True


def test_the_page_knows_what_the_child_knows_of_its_sinks(server):
    server.attach(
        lambda: {"received": 7, "dropped": 2, "faults": 1, "errors": {"csv": "disk full"}}, lambda wanted: None
    )
    with looking(server) as page:
        said = page.hear()[1]["status"]
    assert (said["received"], said["dropped"], said["errors"]) == (7, 2, {"csv": "disk full"})


def test_a_pause_is_asked_of_the_training(server):
    asked = []
    assert post(server, "/pause", {"pause": True}) == 409  # nobody is there who could
    server.attach(dict, asked.append)
    with looking(server) as page:
        page.hear_until("ready")
        assert post(server, "/pause", {"pause": True}) == 200
        assert page.hear_until("status")[-1][1]["wants_pause"] is True
        assert post(server, "/pause", {"pause": False}, Origin=f"http://127.0.0.1:{server.port}") == 200
    assert asked == [True, False]


def test_the_ninth_page_is_told_that_there_are_eight(server):
    pages = [Page(server) for _ in range(live_feed.MOST_STREAMS)]
    try:
        with looking(server) as ninth:
            assert ninth.hear() == ("full", {})
    finally:
        for page in pages:
            page.close()
    for _ in range(3):  # the server notices as it writes that a page is gone
        happen(server, "note", 1, text=str(time.monotonic()))
    until(lambda: not server.feed._streams or happen(server, "note", 1, text=str(time.monotonic())))
    with looking(server) as page:
        assert page.hear()[0] == "hello"


def test_no_text_of_the_run_can_forge_a_message(server):
    name = "a\n\nevent: end\ndata: {}\n\n\r\r</script>\u2028"
    give(server, name, 0, note="x\n\nevent: end\ndata: {}")
    with looking(server) as page:
        heard = page.hear_until("ready")
    assert [kind for kind, _ in heard] == ["hello", "row", "ready"]
    assert heard[1][1]["name"] == name


def test_the_note_of_samples_marks_the_step_where_it_began(server):
    for step in range(4):
        give(server, "a", step, note="" if step < 2 else "epoch 3")
    give(server, "b", 3, note="epoch 3")
    assert list(server.feed.history.notes) == [{"step": 2, "text": "epoch 3"}]


def test_pages_hear_that_the_run_has_ended_and_what_came_last(tmp_path):
    with serving(tmp_path) as made, looking(made) as page:
        page.hear_until("ready")
        give(made, "late", 9)
        closing = threading.Thread(target=made.close)
        closing.start()
        heard = page.hear_until("end")
        closing.join(10)
        assert [data[0]["name"] for kind, data in heard if kind == "points"] == ["late"]
        assert heard[-1] == ("end", {"step": 9})
        assert page.hear() is None


def test_after_the_end_nothing_is_left(tmp_path):
    before = threading.active_count()
    with serving(tmp_path) as made:
        port = made.port
        with looking(made) as page:
            page.hear_until("ready")
    until(lambda: threading.active_count() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_page_that_does_not_read_is_let_go_and_holds_nobody_up(server):
    feed = server.feed
    stream = feed.open()
    for n in range(live_feed.MOST_WAITING + 50):
        happen(server, "note", n, text=str(n))
    assert not stream.is_open
    assert sum(1 for _ in stream.messages()) == live_feed.MOST_WAITING  # and then it ends
    feed.leave(stream)


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_a_picture_is_made_only_of_rows_that_somebody_sees(server, monkeypatch):
    made = []
    draw = live_feed.picture_of
    monkeypatch.setattr(live_feed, "picture_of", lambda one: made.append(one.name) or draw(one))
    give(server, "a", 0, np.eye(4))
    give(server, "b", 0, np.eye(4))
    with looking(server) as page:
        stream = page.hear_until("ready")[0][1]["stream"]
        assert post(server, "/look", {"stream": stream, "rows": [1], "open": None}) == 200
        for step in range(3):
            give(server, "a", step, np.eye(4))
            give(server, "b", step, np.eye(4))
        picture = page.hear_until("picture")[-1][1]
        assert (picture["id"], picture["rows"], picture["columns"], picture["words"]) == (1, 4, 4, "4 × 4")
    assert set(made) == {"b"}


def test_a_row_that_comes_into_view_shows_the_newest_sample(server):
    with looking(server) as page:
        stream = page.hear_until("ready")[0][1]["stream"]
        give(server, "a", 3, np.eye(4))
        post(server, "/look", {"stream": stream, "rows": [0], "open": None})
        assert page.hear_until("picture")[-1][1]["step"] == 3
    until(lambda: happen(server, "note", 1, text=str(time.monotonic())) or not server.feed._streams)
    assert server.feed._kept == {} and server.feed._kept_bytes == 0


def test_values_kept_for_pictures_are_bounded(server, monkeypatch):
    monkeypatch.setattr(live_feed, "MOST_KEPT", 10_000)
    with looking(server) as page:
        page.hear_until("ready")
        for n in range(100):
            give(server, f"row {n % 60}", n, np.ones(100))
        assert len(server.feed._kept) == 25
        assert server.feed._kept_bytes == sum(one.values.nbytes for one in server.feed._kept.values()) == 10_000


def test_there_are_at_most_five_pictures_a_second_and_every_row_has_its_turn(server):
    for n in range(12):
        give(server, f"row {n}", 0, np.eye(3))
    with looking(server) as page:
        stream = page.hear_until("ready")[0][1]["stream"]
        post(server, "/look", {"stream": stream, "rows": list(range(12)), "open": None})
        begun, drawn = time.monotonic(), []
        while len(drawn) < 8:
            for n in range(12):
                give(server, f"row {n}", 1, np.eye(3))
            drawn.append(page.hear_until("picture")[-1][1]["id"])
        assert time.monotonic() - begun > 7 * live_feed.TICK - 0.05
    assert len(set(drawn)) == 8


def drawn(values, **facts):
    found = live_picture.picture_of(sample(values=values, **facts))
    shades = np.frombuffer(base64.b64decode(found["data"]), np.uint8).reshape(found["rows"], found["columns"])
    return found, shades


def test_a_matrix_is_drawn_as_it_is():
    found, shades = drawn([[0.0, 1.0], [2.0, 4.0]])
    assert found["words"] == "2 × 2"
    assert shades[0, 0] == 0 and shades[1, 1] == live_picture.SHADES
    assert shades[0, 0] < shades[0, 1] < shades[1, 0] < shades[1, 1]


def test_signed_values_are_centred_at_zero():
    found, shades = drawn([[-1.0, 0.0, 3.0]])
    assert found["low"] == -found["high"] and found["high"] == pytest.approx(3.0, rel=0.05)
    assert abs(int(shades[0, 1]) - live_picture.SHADES / 2) <= 1


def test_maps_are_tiled_with_gaps_that_are_no_values():
    for what in ("activation", "weight"):
        values = np.ones((4, 4, 5, 5)) * np.arange(1, 5)[:, None, None]
        found, shades = drawn(values, what=what)
        across = np.flatnonzero((shades == live_picture.GAP).all(0))
        assert across.tolist() == ([5] if what == "activation" else [5, 11, 17])
        assert not (shades == live_picture.WRONG).any()
    assert found["words"] == "16 maps of 5 × 5"


def test_a_nan_is_seen_however_large_the_value():
    values = np.zeros((500, 700))
    values[333, 444] = np.nan
    found, shades = drawn(values)
    assert max(shades.shape) <= live_picture.SIDE + 1
    assert (shades == live_picture.WRONG).sum() == 1
    assert "mean of 4 × 6" in found["words"]


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((0, 3)), np.float32(3), np.zeros(7), np.full((3, 3), np.nan), np.full((2, 2), np.inf), np.zeros((1,) * 9),
        np.zeros((2, 3, 4, 5, 6)), np.array([[3e38, -3e38]]), np.zeros((1, 9000)), np.zeros((300, 2, 2)), np.zeros((3, 1, 40, 1)),
    ],
    ids=lambda values: str(values.shape),
)  # fmt: skip
@pytest.mark.parametrize("what", ["activation", "weight"])
def test_every_value_has_a_small_picture_or_none(values, what):
    found = live_picture.picture_of(sample(values=values, what=what))
    assert (found is None) == (np.size(values) < 2)
    if found:
        assert len(base64.b64decode(found["data"])) == found["rows"] * found["columns"] <= (live_picture.SIDE + 1) ** 2
        json.dumps(found, allow_nan=False)


def test_a_thinned_value_is_drawn_at_its_places():
    whole = np.arange(2 * 6 * 20 * 20.0).reshape(2, 6, 20, 20)
    found, shades = drawn(whole.reshape(-1)[::7], shape=whole.shape, size=whole.size, thinned=True)
    _, exact = drawn(whole)
    assert found["words"] == "[0]: 6 maps of 20 × 20; one of 7 values, in the order of memory"
    assert shades.shape == exact.shape and (shades == live_picture.GAP).sum() == (exact == live_picture.GAP).sum()
    assert np.abs(shades.astype(int) - exact).max() <= 2  # the one before, at most 6 of 2,400


def test_a_large_thinned_matrix_has_a_small_picture():
    rows, columns, step = 5000, 3000, 229
    places = np.arange(0, rows * columns, step)
    _, shades = drawn(np.sqrt(places // columns), shape=(rows, columns), size=rows * columns, thinned=True)
    assert max(shades.shape) <= live_picture.SIDE
    assert (np.diff(shades[:, 50].astype(int)) >= 0).all() and shades[0, 50] < shades[-1, 50]


def test_other_values_are_drawn_line_by_line():
    found, _ = drawn(np.arange(100.0), shape=(2000,), size=2000, thinned=True)
    assert (found["rows"], found["columns"], found["words"]) == (10, 10, "100 of 2,000 values, line by line")
    assert drawn(np.arange(30.0), shape=(50, 40), size=2000)[0]["words"] == "30 of 2,000 values, line by line"  # sparse


# -- a bounded memory -------------------------------------------------------------------------------------------------


def track_of(count, **changed):
    track = live_history.Track()
    for step in range(count):
        one = sample(step=step, values=changed.get(step, [0.0, 1.0]))
        track.add(step, live_history.point_of(statistics.of(one)))
    return track


def test_a_long_history_is_thinned_by_powers_of_two():
    track = track_of(3000)
    assert live_history.MOST_POINTS // 2 < track.used <= live_history.MOST_POINTS
    assert track.stride == 16
    assert track.steps[: track.used].tolist() == [*range(15, 2999, 16), 2999]
    assert len(track.points) == live_history.MOST_POINTS
    assert np.allclose(track.points[: track.used, live_history.MEAN], 0.5)


def test_no_nan_and_no_extreme_is_lost_by_thinning():
    wrong = [np.nan, np.inf, 2.0, -5.0]
    track = live_history.Track()
    for step in range(1000):
        values = wrong if step == 700 else [np.nan, np.nan] if step in (20, 21, 22, 23) else [0.0, 1.0]
        track.add(step, live_history.point_of(statistics.of(sample(values=values))))
    points = track.points[: track.used]
    at = int(np.searchsorted(track.steps[: track.used], 700))
    assert points[at, [live_history.NANS, live_history.INFS, live_history.QUANTILES, -1]].tolist() == [1, 1, -5, 2]
    assert points[5, live_history.NANS] == 2 and np.isnan(
        points[5, live_history.MEAN]
    )  # steps 20 to 23: none was finite
    assert np.isfinite(np.delete(points, 5, 0)[:, live_history.MEAN]).all()


def test_a_distribution_is_kept_by_its_quantiles():
    values = np.random.default_rng(0).standard_normal(20000).astype("f4") ** 3  # heavy tails
    point = live_history.point_of(statistics.of(sample(values=values)))
    exact = np.quantile(values, live_history.LEVELS)
    assert np.abs(np.arcsinh(point[live_history.QUANTILES :]) - np.arcsinh(exact)).max() < 0.1


@pytest.mark.parametrize("values", [[1e300, -1e300], [3e38, 1.0], [5.0] * 9, [0.0], [], [np.nan], [np.inf, 1.0]])
def test_every_sample_can_be_told(server, values):
    one = sample()._replace(values=np.array(values), size=len(values), shape=(len(values),))
    server.sample(one, statistics.of(one))
    with looking(server) as page:
        [row] = [data for kind, data in page.hear_until("ready") if kind == "row"]
    assert not np.isinf(numbers(row["history"]["points"])).any()


def test_rows_beyond_the_most_are_counted(server, monkeypatch):
    monkeypatch.setattr(live_history, "MOST_ROWS", 5)
    for n in range(8):
        give(server, f"row {n}")
    with looking(server) as page:
        heard = page.hear_until("ready")
    assert sum(kind == "row" for kind, _ in heard) == 5
    assert heard[0][1]["status"]["beyond"] == 3


def test_marks_are_bounded(server):
    for n in range(live_history.MOST_MARKS + 50):
        happen(server, "note", n, text=f"epoch {n}")
        happen(server, "alarm", n, reason="again", path="")
    assert len(server.feed.history.notes) == len(server.feed.history.alarms) == live_history.MOST_MARKS


# -- how a person gets there ------------------------------------------------------------------------------------------

URL = "http://127.0.0.1:8123/?token=abc"


def test_the_link_is_printed_with_the_tunnel_where_one_is_needed():
    assert link_text(URL, environment={}) == f"watching: {URL}"
    far = {"SSH_CONNECTION": "10.0.0.9 50000 10.0.0.4 2222", "USER": "ada"}
    assert (
        link_text(URL, environment=far).splitlines()[1].endswith("ssh -N -L 8123:127.0.0.1:8123 ada@10.0.0.4 -p 2222")
    )
    assert not is_elsewhere({}) and is_elsewhere(far) and is_elsewhere({"JUPYTERHUB_USER": "ada"})


def test_a_notebook_shows_the_page_where_it_can_be_reached():
    assert f'src="{URL}"' in link_html(URL, environment={})
    far = link_html(URL, environment={"SSH_CONNECTION": "1 2 3 22", "USER": "<b>"})
    assert "<iframe" not in far and "ssh -N -L" in far and "<b>" not in far


# -- the page in a browser --------------------------------------------------------------------------------------------

in_browser = [
    pytest.mark.zoo,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER and webdriver),
        reason="no headless browser: needs chromium, chromedriver (apt install chromium chromium-driver) and selenium",
    ),
]


def browser_test(function):
    for mark in in_browser:
        function = mark(function)
    return function


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def opened(browser, server):
    """Open the page of the server, and see that its console stayed empty and that it asked nobody else."""

    def open_page(size=(1400, 900)):
        shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
        browser.get(server.url)
        until(lambda: browser.find_element(By.TAG_NAME, "html").get_attribute("data-ready") == "yes")
        return browser

    browser.get("about:blank")
    browser.get_log("browser")
    yield open_page
    assert browser.get_log("browser") == []
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert [one for one in asked if not one.startswith((f"http://127.0.0.1:{server.port}/", "data:"))] == []
    browser.execute_script("sessionStorage.clear()")
    browser.get("about:blank")


def fill(server, steps=6, bad=()):
    """A small model: samples of two kinds in two blocks, some of them with NaN."""
    rng = np.random.default_rng(0)
    for step in range(0, 20 * steps, 20):
        for name in ("stem", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head"):
            for what in ("activation", "grad"):
                values = rng.standard_normal((8, 12)).astype("f4")
                values[0, 0] = np.nan if (name, what) in bad and step >= 40 else 0
                give(server, name, step, values, what=what)


def words_of(browser, css):
    """The texts of elements, all at one moment: rows are put anew while the run goes on."""
    return browser.execute_script(f"return [...document.querySelectorAll({css!r})].map((one) => one.innerText.trim())")


def keep(browser, name):
    if folder := os.environ.get("REPLAYLENS_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"live_{name}.png"))


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()


def inked(browser, css):
    """How many pixels of a canvas are not empty."""
    return browser.execute_script(
        "const c = document.querySelector(arguments[0]); if (!c.width) return 0;"
        "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((one, n) => n % 4 === 3 && one).length",
        css,
    )


@browser_test
def test_rows_appear_are_drawn_and_go_on(opened, server):
    fill(server)
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 12)
    for part in ("spark", "strip"):
        until(lambda part=part: inked(browser, f".row canvas.{part}") > 500)
    assert "step 100" in browser.find_element(By.ID, "totals").text
    give(server, "stem", 2000, np.full((8, 12), 7.0))
    until(lambda: "mean 7 ± 0" in browser.find_element(By.CSS_SELECTOR, ".row").text.replace("\n", " "))
    until(lambda: inked(browser, ".row canvas.picture") > 500)
    until(lambda: "step 2,000" in browser.find_element(By.ID, "totals").text)
    keep(browser, "rows")


@browser_test
def test_the_history_is_there_after_a_reload(opened, server):
    fill(server)
    browser = opened()
    points = "return [...ROWS.values()].map((row) => row.track.used)"
    until(lambda: browser.execute_script(points) == [6] * 12)
    give(server, "stem", 120, np.ones((8, 12)))
    until(lambda: browser.execute_script(points)[0] == 7)
    browser = opened()
    until(lambda: browser.execute_script(points) == [7] + [6] * 11)


@browser_test
def test_the_button_pauses_and_resumes_the_training(opened, server):
    asked = []
    server.attach(dict, asked.append)
    fill(server, 1)
    browser = opened()
    button = browser.find_element(By.ID, "pause")
    button.click()
    until(lambda: button.text == "Resume sampling")
    assert "paused" in browser.find_element(By.ID, "totals").text
    button.click()
    until(lambda: button.text == "Pause sampling")
    assert asked == [True, False]


@browser_test
def test_wrong_values_are_marked_with_their_step(opened, server):
    fill(server, bad={("blocks.1.attn", "grad")})
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 12)
    assert words_of(browser, ".row .badge.wrong") == ["1 NaN since 40"]
    assert words_of(browser, ".group .badge.wrong") == ["wrong values in 1"] * 2  # blocks, and blocks.1
    browser.find_element(By.ID, "only-wrong").click()
    until(lambda: len(words_of(browser, ".row")) == 1)
    row = browser.find_element(By.CSS_SELECTOR, ".row")
    assert "wrong values since step 40" in row.get_attribute("aria-label")
    row.click()
    until(
        lambda: (
            "1 NaN now. Wrong values in 4 samples: first at step 40, last at step 100."
            in browser.find_element(By.ID, "large-wrong").text
        )
    )


@browser_test
def test_numbers_of_ones_own_are_lines_above_the_modules(opened, server):
    fill(server)
    for step in range(100):
        give(server, "train.loss", step, np.float32(2.3 / (1 + step) if step != 50 else np.nan), what="scalar")
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 13)
    assert browser.execute_script("return document.querySelector('#rows').firstElementChild.row.name") == "train.loss"
    assert words_of(browser, ".row b")[0] == "train.loss" and words_of(browser, ".row .numbers")[0] == "now\n0.023"
    until(lambda: inked(browser, ".row canvas.spark") > 500)
    row = browser.find_element(By.CSS_SELECTOR, ".row")
    assert not any(row.find_element(By.CSS_SELECTOR, f"canvas.{part}").is_displayed() for part in ("strip", "picture"))
    browser.find_element(By.CSS_SELECTOR, ".row").click()
    until(lambda: inked(browser, "#bands") > 500)
    assert not browser.find_element(By.ID, "now").is_displayed()
    assert not browser.find_element(By.ID, "norm").is_displayed()
    assert words_of(browser, "#readout") == ["step 99 · 0.023"]
    keep(browser, "number")
    browser.find_elements(By.CSS_SELECTOR, ".row")[2].click()
    until(lambda: browser.find_element(By.ID, "norm").is_displayed())


@browser_test
def test_a_wrong_sample_is_marked_at_its_own_step(opened, server):
    for step in [*range(0, 100, 5), 400, *range(405, 500, 5)]:
        give(server, "layer", step, [np.nan if step == 400 else 1.0, 2.0, 3.0])
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 1)
    marked = (
        "const canvas = document.querySelector('.row canvas.' + arguments[0]), scale = devicePixelRatio;"
        "const line = canvas.getContext('2d').getImageData(0, canvas.height - 2, canvas.width, 1).data;"
        "const red = channels('wrong'), found = [];"
        "for (let x = 0; x < canvas.width; x++)"
        " if (red.every((one, c) => Math.abs(one - line[4 * x + c]) < 30) && line[4 * x + 3] > 200) found.push(x / canvas.width);"
        "return found"
    )
    for part in ("spark", "strip"):
        found = until(lambda part=part: browser.execute_script(marked, part))
        assert min(found) > 0.78 and max(found) < 0.84, found  # 400 of 495


@browser_test
def test_the_ends_of_an_axis_are_told_apart(opened, server):
    give(server, "layer", 0, [1.0])
    browser = opened()
    for low, high, said in (
        (1.0, 1.004, ["1", "1.004"]),
        (-0.5, 0.5, ["−0.5", "0.5"]),
        (0.0, 3.14159, ["0", "3.1"]),
        (1234567, 1234999, ["1.2346e6", "1.2350e6"]),
        (2.0, 2.0, ["2", "2"]),
        (1e-9, 1.001e-9, ["1.000e−9", "1.001e−9"]),
    ):
        found = browser.execute_script("return ends(arguments[0], arguments[1])", low, high)
        assert (found[0] != found[1]) == (low != high) and found == said, found


@browser_test
def test_modules_fold_and_are_searched_filtered_and_sorted(opened, server):
    fill(server)
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 12)
    assert [one.split("\n")[1] for one in words_of(browser, ".group")] == ["blocks", "blocks.0", "blocks.1"]
    browser.find_elements(By.CSS_SELECTOR, ".group")[1].click()
    until(lambda: len(words_of(browser, ".row")) == 8)
    browser.find_element(By.ID, "fold").click()
    until(lambda: len(words_of(browser, ".row")) == 4)
    press(browser, "/")
    press(browser, "mlp grad")
    until(lambda: len(words_of(browser, ".row")) == 2)  # what is looked for is not hidden in a folded module
    browser.find_element(By.ID, "search").send_keys(Keys.CONTROL, "a")
    press(browser, Keys.BACKSPACE)
    browser.find_element(By.ID, "unfold").click()
    browser.find_element(By.CSS_SELECTOR, '[data-kind="grad"]').click()
    until(lambda: len(words_of(browser, ".row")) == 6)
    give(server, "head", 200, np.full((8, 12), 1e6))
    until(lambda: browser.execute_script("return [...ROWS.values()].some((row) => row.facts.numbers[4] > 1e5)"))
    browser.find_element(By.CSS_SELECTOR, '#sort option[value="norm"]').click()
    until(lambda: words_of(browser, ".row b")[0] == "head")
    assert words_of(browser, ".group") == []


@browser_test
def test_the_keyboard_suffices(opened, server):
    fill(server)
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 12)
    press(browser, "/", Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    focused = "return document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    assert "blocks" in browser.execute_script(focused)
    press(browser, Keys.ARROW_LEFT)
    until(lambda: len(words_of(browser, ".row")) == 4)
    press(browser, Keys.ARROW_RIGHT)
    until(lambda: len(words_of(browser, ".row")) == 12)
    press(browser, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    until(lambda: words_of(browser, "#large-name") == ["blocks.0.attn"])
    press(browser, Keys.ARROW_DOWN)
    until(lambda: "grad" in words_of(browser, "#large-kind")[0])
    press(browser, Keys.ESCAPE)
    until(lambda: not browser.find_element(By.ID, "large").is_displayed())
    assert "blocks.0.attn, grad" in browser.execute_script(focused)


@browser_test
def test_a_row_opens_as_a_large_view(opened, server):
    fill(server)
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 12)
    browser.find_elements(By.CSS_SELECTOR, ".row")[2].click()
    give(server, "blocks.0.attn", 120, np.eye(9))
    until(lambda: browser.find_element(By.ID, "heat").is_displayed())
    for canvas in ("bands", "bins", "norm", "heat"):
        until(lambda canvas=canvas: inked(browser, f"#{canvas}") > 200)
    assert "float32[9, 9]" in words_of(browser, "#large-kind")[0]
    assert words_of(browser, "#heat-words") == ["Step 120. 9 × 9."]
    browser.find_element(By.ID, "bands").send_keys(Keys.ARROW_LEFT)
    assert words_of(browser, "#readout")[0].startswith("step 100")
    keep(browser, "large")


@browser_test
def test_alarms_name_their_step_file_and_why(opened, server):
    fill(server)
    happen(server, "alarm", 80, reason="not finite: blocks.0", path="/runs/step-80.pt")
    browser = opened()
    happen(server, "alarm", 100, reason="gradient norm", path='/runs/"step-100".pt')
    until(lambda: len(words_of(browser, "#alarms li")) == 2)
    first, second = words_of(browser, "#alarms li")
    assert "Step 100" in first and "gradient norm" in first
    assert "Step 80" in second and "not finite: blocks.0" in second and "/runs/step-80.pt" in second
    browser.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for button in browser.find_elements(By.CSS_SELECTOR, "#alarms li:first-child button"):
        button.click()
        until(lambda button=button: button.text == "Copied")
    assert browser.execute_script("return window.copied") == 'replaylens.step("/runs/\\"step-100\\".pt")'
    assert browser.title.startswith("\u26a0")


@browser_test
def test_names_are_text_and_nothing_else(opened, server):
    name = "</script><img src=x onerror=document.title='owned'>.deep"
    give(server, name, 0)
    give(server, "</script><b>", 0, note="<i>note</i>")
    happen(server, "alarm", 0, reason="<img src=x onerror=alert(1)>", path="<u>")
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 2)
    assert words_of(browser, ".row b")[0] == name
    assert browser.find_elements(By.CSS_SELECTOR, "img, .row i, #alarms u, .row b b") == []
    browser.find_element(By.CSS_SELECTOR, ".row").click()
    until(lambda: words_of(browser, "#large-name") == [name])


@browser_test
def test_the_page_can_be_used_after_the_run_has_ended(opened, server):
    fill(server)
    browser = opened()
    until(lambda: len(words_of(browser, ".row")) == 12)
    server.close()
    until(lambda: "The run has ended, at step 100." in browser.find_element(By.ID, "banner").text)
    assert not browser.find_element(By.ID, "pause").is_enabled()
    browser.find_elements(By.CSS_SELECTOR, ".row")[0].click()
    until(lambda: inked(browser, "#bands") > 500)
    press(browser, "/", "mlp")
    until(lambda: len(words_of(browser, ".row")) == 4)
    keep(browser, "ended")


@browser_test
@pytest.mark.parametrize("width", [1400, 390, 320])
def test_nothing_reaches_beyond_the_screen(opened, server, width):
    fill(server, bad={("stem", "grad")})
    give(server, "a" * 300, 3)
    happen(server, "alarm", 80, reason="b" * 300, path="/c" * 200)
    browser = opened((width, 800))
    until(lambda: len(words_of(browser, ".row")) == 13)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(wide) <= 0
    browser.execute_script("document.querySelector('.row').click()")
    until(lambda: browser.find_element(By.ID, "large").is_displayed())
    assert browser.execute_script(wide) <= 0
    lines = (
        "return [...document.querySelectorAll('#facts dd')].filter((one) => one.scrollWidth > one.clientWidth).length"
    )
    give(server, "a" * 300, 9, np.array([-2.1416e-7, 2.1417e-7, 0.00214169]))
    until(lambda: browser.execute_script("return [...ROWS.values()].some((row) => row.facts.step === 9)"))
    browser.execute_script("open([...ROWS.values()].find((row) => row.facts.step === 9)); drawLarge();")
    assert browser.execute_script(lines) == 0
    browser.find_element(By.ID, "close").click()


@browser_test
def test_the_page_keeps_a_bounded_history(opened, server):
    give(server, "a", 0)
    browser = opened()
    found = browser.execute_script(
        "const track = new Track(), point = new Float32Array(WIDTH).fill(1);"
        "for (let step = 0; step < 20000; step++) { point[NANS] = step === 12345 ? 3 : 0; track.add(step, point, 1); }"
        "const wrong = track.steps.findIndex((_, n) => track.at(n, NANS) > 0);"
        "return [track.used, track.stride, track.points.length / WIDTH, track.steps[wrong - 1] < 12345, track.steps[wrong] >= 12345, track.at(wrong, NANS)]"
    )
    assert found[0] <= 512 and found[1:] == [64, 512, True, True, 3]


@browser_test
def test_two_hundred_rows_are_told_and_found(opened, server):
    for step in range(2):
        for n in range(200):
            give(server, f"blocks.{n // 8}.part{n % 8}", step, np.ones(5) * n)
    browser = opened()
    until(lambda: browser.execute_script("return document.querySelectorAll('.row').length") == 200, 30)
    press(browser, "/", "blocks.24.part7")
    until(lambda: words_of(browser, ".row b") == ["part7"] or words_of(browser, ".row b") == ["blocks.24.part7"])


def test_who_sends_a_byte_now_and_then_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(live_server, "PATIENCE", 0.3)
    server = live_server.LiveServer({}, {})
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            ended = time.monotonic() + 5
            while time.monotonic() < ended:
                try:
                    connection.sendall(b"G")
                except OSError:
                    break
                time.sleep(0.05)
            assert time.monotonic() < ended
    finally:
        server.close()
