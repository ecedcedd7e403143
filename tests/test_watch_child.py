"""The process that reads samples is there when it is needed, harms nobody, and is gone afterwards."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import venv
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch

from replaylens._watch import child_process
from replaylens._watch.child import main
from replaylens._watch.child_process import start_children
from replaylens._watch.ring import Ring
from replaylens._watch.sink_specs import specs_of

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="elsewhere samples are read by a thread"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@contextmanager
def children(*sinks, slots=64, process=True, patience=3.0, **run):
    """A ring, and the children that write it to these sinks."""
    ring = Ring(slots=slots)
    made = start_children(ring, [spec for sink in sinks for spec in specs_of(sink)], process=process, run=run)
    try:
        assert all(child.wait_until_ready() or not child.status.alive for child in made)
        yield ring, made
    finally:
        for child in made:
            child.close(patience)
        ring.close()


def until(holds, patience=10.0):
    """Wait until something holds."""
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def send(ring, made, steps=range(10), size=4):
    for step in steps:
        ring.put(torch.full((size,), float(step)), "layer", "grad", step)
        for child in made:
            child.wake()


def has_read(child, ring):
    return lambda: child.status.received + child.status.dropped >= ring.sent


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def process_of(child):
    return child._worker._process.pid


numbers = count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the user's; gives a function that names a sink in it."""
    name = f"users_sinks_{os.getpid()}_{next(numbers)}"
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(source, sink="Sink"):
        (tmp_path / f"{name}.py").write_text(f"OUT = {str(tmp_path / 'out')!r}\n" + textwrap.dedent(source))
        return f"{name}:{sink}"

    return written


TELLING = """
    class Sink:
        def __init__(self):
            self.out = open(OUT, "a", buffering=1)
        def sample(self, sample):
            print("sample", sample.step, file=self.out)
        def event(self, event):
            print(event.kind, event.step, event.facts, file=self.out)
        def close(self):
            print("closed", file=self.out)
"""


def told(tmp_path):
    return (tmp_path / "out").read_text().splitlines()


# -- normal life -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="what a process takes is read in /proc")
def test_a_child_is_small_and_quick_and_knows_no_torch(tmp_path, module):
    sink = module("""
        import sys, resource
        class Sink:
            def __init__(self):
                with open(OUT, "w") as out:
                    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    print(size, sorted(sys.modules), file=out)
            def sample(self, sample): ...
    """)
    began = time.monotonic()
    with children(tmp_path / "run.jsonl", sink) as (_, made):
        took = time.monotonic() - began
        sizes = [int(Path(f"/proc/{process_of(one)}/status").read_text().split("VmHWM:")[1].split()[0]) for one in made]
        nice = {os.getpriority(os.PRIO_PROCESS, process_of(one)) for one in made}
        assert all(os.sched_getscheduler(process_of(one)) == os.SCHED_BATCH for one in made)
    assert max(sizes) < 40 * 1024 and min(nice) > os.getpriority(os.PRIO_PROCESS, 0)
    loaded = told(tmp_path)[0]
    assert "'numpy'" in loaded and not [one for one in ("'torch'", "'replaylens'", "'attr'") if one in loaded]
    assert took < 5  # 0.1 to 0.3 s on an idle machine


def test_all_samples_arrive_and_counts_say_so(tmp_path):
    with children(tmp_path / "run.jsonl", name="a run") as (ring, [child]):
        send(ring, [child], range(60))
        until(has_read(child, ring))
        now = child.status
        assert (now.received, now.dropped, now.faults, now.errors) == (60, 0, 0, {}) and now.alive and now.ready
        assert now.paths == {"jsonl": str(tmp_path / "run.jsonl")}
        until(lambda: [one["step"] for one in lines(tmp_path / "run.jsonl")] == [*range(60)])
    ended = child.status
    assert (ended.received, ended.dropped, ended.alive, ended.errors) == (60, 0, False, {})
    assert str(child.stats()) == "jsonl: 60 received, ended"


def test_what_was_sent_just_before_the_end_is_written(tmp_path):
    with children(tmp_path / "run.jsonl") as (ring, made):
        for step in range(60):
            ring.put(torch.ones(60_000), "layer", "grad", step)
        for child in made:
            child.event("note", step=60, text="the last one")
    written = lines(tmp_path / "run.jsonl")
    assert [one["step"] for one in written] == [*range(61)] and written[-1]["facts"] == {"text": "the last one"}


def test_what_is_lost_before_the_child_is_ready_is_counted(tmp_path):
    ring = Ring(slots=8)
    [child] = start_children(ring, specs_of(tmp_path / "run.jsonl"))
    send(ring, [child], range(20))
    child.close()
    assert (child.status.received, child.status.dropped) == (8, 12)
    ring.close()


def test_events_come_in_order_and_after_the_samples_before_them(tmp_path, module):
    with children(module(TELLING)) as (ring, [child]):
        for step in range(50):
            send(ring, [child], [step])
            child.event("note", step=step, text="é" * 100)
            until(has_read(child, ring)) if step % 10 == 0 else None
    *written, last = told(tmp_path)
    samples = [line for line in written if line.startswith("sample")]
    notes = [line for line in written if line.startswith("note")]
    assert samples == [f"sample {step}" for step in range(50)] and last == "closed"
    assert notes == [f"note {step} {{'text': {'é' * 100!r}}}" for step in range(50)]
    assert all(written.index(note) > written.index(sample) for note, sample in zip(notes, samples))


def test_facts_of_a_run_may_be_long(tmp_path, module):
    sink = module("""
        class Sink:
            def event(self, event):
                open(OUT, "w").write(str(len(event.facts["names"])))
    """)
    names = [f"blocks.{one}.attention" for one in range(100_000)]
    with children(sink, modules=names) as (_, [child]):
        child.event("names", names=names)
    assert told(tmp_path) == ["100000"] and not child.status.errors


def test_the_live_page_can_ask_for_a_pause():
    with children("live") as (_, [child]):
        page, _, query = child.status.url.partition("?")
        for wanted in (True, False):
            body, headers = json.dumps({"pause": wanted}).encode(), {"X-Watch": "1"}
            with urlopen(Request(f"{page}pause?{query}", body, headers), timeout=5) as answer:
                assert answer.status == 200
            until(lambda wanted=wanted: child.wants_pause == child.status.wants_pause == wanted)
    assert child.status.url is None


SCRIPT = """
import sys, json, torch
from replaylens._watch.ring import Ring
from replaylens._watch.child_process import start_children
from replaylens._watch.sink_specs import specs_of
ring = Ring()
[child] = start_children(ring, specs_of({path!r}))
assert child.why_thread is None
for step in range(10):
    ring.put(torch.ones(3), "layer", "grad", step)
    child.wake()
child.close()
"""


def test_a_child_starts_from_scripts_without_a_guard_from_standard_input_and_from_cells(tmp_path):
    (tmp_path / "statistics.py").write_text("raise ImportError('not the one of Python')")
    sources = {way: SCRIPT.format(path=str(tmp_path / f"{way}.jsonl")) for way in ("script", "input", "-c", "cell")}
    (tmp_path / "script.py").write_text(sources["script"])
    python = [sys.executable, "-W", "ignore"]
    started = [
        subprocess.Popen([*python, *arguments], stdin=subprocess.PIPE, text=True, cwd=tmp_path)
        for arguments in (["script.py"], ["-"], ["-c", sources["-c"]])
    ]
    for process in started:
        process.communicate(sources["input"])
    exec(compile(sources["cell"], "<cell>", "exec"), {"__name__": "__main__"})
    assert [process.returncode for process in started] == [0, 0, 0]
    assert [len(lines(tmp_path / f"{way}.jsonl")) for way in sources] == [10] * 4


# -- sinks that fail -----------------------------------------------------------------------------------------------------------


def test_a_sink_that_raises_is_left_alone_after_three_faults_and_the_others_go_on(tmp_path, module):
    sink = module("""
        class Sink:
            calls = 0
            def sample(self, sample):
                Sink.calls += 1
                open(OUT, "w").write(str(Sink.calls))
                raise ValueError("not like this")
            def close(self):
                open(OUT, "w").write("closed")
    """)
    with children([tmp_path / "a.jsonl", sink, tmp_path / "b.jsonl"]) as (ring, made):
        assert [child.kinds for child in made] == [("jsonl", "jsonl"), ("own",)]
        send(ring, made)
        until(lambda: all(has_read(child, ring)() for child in made))
        assert [child.status.received for child in made] == [10, 10] and made[1].status.alive
    assert told(tmp_path) == ["3"] and len(lines(tmp_path / "a.jsonl")) == len(lines(tmp_path / "b.jsonl")) == 10
    assert made[0].status.faults == 0 and made[1].status.faults == 3
    assert made[1].status.errors == {sink: "sample: ValueError: not like this (it is left alone now)"}


def test_a_sink_that_fails_from_time_to_time_is_called_again(tmp_path, module):
    sink = module("""
        import sys
        class Sink:
            def sample(self, sample):
                print(sample.step, file=open(OUT, "a"))
                if sample.step % 3: sys.exit("this one not")
    """)
    with children(sink) as (ring, made):
        send(ring, made)
    assert told(tmp_path) == [str(step) for step in range(10)]
    assert made[0].status.errors == {sink: "sample: SystemExit: this one not"} and made[0].status.faults == 6


def test_a_film_is_not_touched_again_after_its_first_fault():
    faults = []
    for kind, wanted in [("film", 1), ("csv", main.PATIENCE)]:
        sink = main.Guarded(kind, 1 if kind == "film" else main.PATIENCE, lambda *fault: faults.append(fault))
        sink.open(
            lambda: type("Sink", (), {"sample": lambda self: 1 / 0, "close": lambda self: faults.append("closed")})()
        )
        for _ in range(5):
            sink.call("sample")
        sink.call("close")
        assert [name for name, _ in faults] == [kind] * wanted
        faults.clear()


def test_a_sink_that_cannot_be_opened_is_said_and_the_others_work(tmp_path):
    spec = {**specs_of(tmp_path / "a.jsonl")[0], "options": {"path": "/proc/no/run.jsonl"}}
    ring = Ring()
    [child] = start_children(ring, [spec, *specs_of(tmp_path / "b.jsonl")])
    assert child.wait_until_ready()
    send(ring, [child])
    child.close()
    ring.close()
    assert len(lines(tmp_path / "b.jsonl")) == 10 and child.status.received == 10
    assert list(child.status.errors) == ["jsonl 1"] and child.status.errors["jsonl 1"].startswith("open: ")
    assert str(child.stats()).startswith("jsonl 1, jsonl 2: 10 received, ended\n    jsonl 1 failed: open: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_a_fault_like_any_other(tmp_path, module):
    sink = module("""
        class Sink:
            def sample(self, sample):
                with open("/dev/full", "w") as out:
                    out.write("x")
    """)
    with children([sink, tmp_path / "run.jsonl"]) as (ring, made):
        send(ring, made)
    assert "No space left on device (it is left alone now)" in made[1].status.errors[sink]
    assert len(lines(tmp_path / "run.jsonl")) == 10


def test_a_file_that_must_not_grow_ends_with_a_whole_line(tmp_path):
    """The limit of this process is the child's too: lines beyond it fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ring = Ring()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
        [child] = start_children(ring, specs_of([tmp_path / "a.jsonl"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert child.wait_until_ready()
    send(ring, [child], range(50))
    child.close()
    ring.close()
    assert 0 < len(lines(tmp_path / "a.jsonl")) < 10 and (tmp_path / "a.jsonl").stat().st_size <= 2048
    assert "(it is left alone now)" in child.status.errors["jsonl"] and child.status.received == 50


def test_a_sink_that_ends_its_process_takes_no_other_along_and_is_started_again_once(tmp_path, module):
    sink = module("""
        import os
        class Sink:
            def sample(self, sample):
                print(sample.step, file=open(OUT, "a", buffering=1))
                if sample.step in (3, 7): os.abort()
    """)
    with children([sink, tmp_path / "run.jsonl"], slots=1024) as (ring, made):
        plain, own = made
        assert own.kinds == ("own",)
        send(ring, made, range(5))
        until(lambda: "started again" in own.status.errors.get("process", ""))
        assert own.status.alive and own.wait_until_ready()
        send(ring, made, range(5, 10))
        until(lambda: not own.status.alive)
        send(ring, made, range(10, 15))
        assert own.status.received + own.status.dropped == ring.sent and own.status.received == 8
        assert not own.wait_until_ready()
    assert told(tmp_path) == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert own.status.errors["process"] == "it was ended by SIGABRT (Fatal Python error: Aborted)"
    assert own.status.faults == 2 and len(lines(tmp_path / "run.jsonl")) == 15 and plain.status.faults == 0


def test_a_hung_sink_holds_up_nobody_and_is_ended_by_force(tmp_path, module):
    sink = module("""
        import time
        class Sink:
            def sample(self, sample): time.sleep(1000)
            def close(self): time.sleep(1000)
    """)
    with children([sink, tmp_path / "run.jsonl"], patience=1.0) as (ring, made):
        pids = [process_of(child) for child in made]
        began = time.monotonic()
        send(ring, made, range(200))
        assert time.monotonic() - began < 2
        until(has_read(made[0], ring))
        began = time.monotonic()
        made[1].close(0.5)
        assert time.monotonic() - began < 1
    assert made[1].status.errors["process"].startswith("it did not end in time and was killed")
    assert (made[1].status.received, made[1].status.dropped) == (1, 199)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert len(lines(tmp_path / "run.jsonl")) == made[0].status.received


def test_a_tracker_has_longer_to_end_than_a_sink_of_ones_own(tmp_path, module):
    hangs = module("""
        import time
        class Sink:
            def close(self): time.sleep(1000)
            def sample(self, sample): pass
    """)
    slow = module("""
        import time
        class Sink:
            def sample(self, sample): pass
            def close(self):
                time.sleep(3.5)
                open(OUT, "w").write("closed")
    """)
    ring = Ring()
    made = start_children(ring, [spec for sink in (hangs, slow) for spec in specs_of(sink)])
    made[1].specs[0]["kind"] = "wandb"  # in this process only: what it writes at its end takes as long
    assert all(child.wait_until_ready() for child in made)
    send(ring, made)
    began = time.monotonic()
    made[0].close()
    assert 2.5 < time.monotonic() - began < 4
    made[1].close()
    ring.close()
    assert made[0].status.errors["process"].startswith("it did not end in time and was killed")
    assert made[1].status.errors == {} and told(tmp_path) == ["closed"]


def test_who_waits_longer_loses_nothing_of_a_slow_sink(tmp_path, module):
    slow = module("""
        import time
        def sink(sample):
            time.sleep(0.06)
            print(sample.step, file=open(OUT, "a"))
    """, "sink")  # fmt: skip
    with children(slow, patience=20.0) as (ring, [child]):
        send(ring, [child], range(40))
    assert (child.status.received, child.status.dropped) == (40, 0)
    assert told(tmp_path) == [str(step) for step in range(40)]


def test_an_orphan_does_not_wait_as_long_as_its_parent_wished(tmp_path, module):
    hangs = module("class Sink:\n    def sample(self, sample): __import__('time').sleep(1000)\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, threading, torch\nfrom replaylens._watch.child_process import start_children\n"
        "from replaylens._watch.ring import Ring\nfrom replaylens._watch.sink_specs import specs_of\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\nring = Ring()\n"
        f"[child] = start_children(ring, specs_of({hangs!r}))\nchild.wait_until_ready()\n"
        "ring.put(torch.ones(3), 'layer', 'grad', 0)\nchild.wake()\n"
        "while not child.status.received: pass\n"
        "print(child._worker._process.pid, flush=True)\n"
        "threading.Timer(0.3, lambda: os._exit(0)).start()\nchild.close(600)\n"
    )
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    until(lambda: not Path(f"/proc/{int(said)}").exists(), 8.0)


def test_errors_are_news_once(tmp_path, module):
    sink = module("""
        import os
        class Sink:
            def sample(self, sample):
                if sample.step == 9: os.abort()
                raise ValueError(f"not step {sample.step}")
    """)
    with children([sink, tmp_path / "run.jsonl"], slots=1024) as (ring, [plain, own]):
        assert plain.news() == own.news() == {}
        send(ring, [plain, own], range(1))
        until(lambda: own.status.faults)
        assert own.news() == {sink: "sample: ValueError: not step 0"} and own.news() == {}
        send(ring, [plain, own], range(1, 2))
        until(lambda: own.status.faults == 2)
        assert own.news() == {}  # the same again
        send(ring, [plain, own], range(2, 5))
        until(lambda: own.status.faults == 3)
        assert own.news() == {sink: "sample: ValueError: not step 2 (it is left alone now)"} and own.news() == {}
        os.kill(process_of(own), signal.SIGKILL)
        until(lambda: own.status.errors.get("process"))
        assert own.news() == {"process": "it was ended by SIGKILL; started again"}
        assert own.wait_until_ready()
        send(ring, [plain, own], [9])
        until(lambda: not own.status.alive)
    assert own.news()["process"].startswith("it was ended by SIGABRT") and own.news() == plain.news() == {}


def test_what_went_wrong_at_the_end_is_news_after_it(module):
    sink = module("class Sink:\n    def sample(self, sample): pass\n    def close(self): 1 / 0\n")
    with children(sink) as (ring, [child]):
        send(ring, [child])
        assert child.news() == {}
    assert child.news() == {sink: "close: ZeroDivisionError: division by zero"} and child.news() == {}


def test_to_ask_for_news_costs_next_to_nothing(tmp_path):
    with children(tmp_path / "run.jsonl") as (_, [child]):
        child.news()
        began = time.perf_counter()
        for _ in range(1000):
            child.news()
        assert time.perf_counter() - began < 0.02


def test_the_address_of_a_killed_page_is_in_no_file_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with children("live") as (_, [child]):
        assert len(list(tmp_path.glob("*.url"))) == 1
        os.kill(process_of(child), signal.SIGKILL)
        until(lambda: "started again" in child.status.errors.get("process", ""))
        assert child.wait_until_ready()
        [path] = tmp_path.glob("*.url")
        assert path.read_text().strip() == child.status.url
        os.kill(process_of(child), signal.SIGKILL)
    assert not list(tmp_path.glob("*.url"))


def test_a_slow_sink_loses_samples_and_no_other_does(tmp_path, module):
    sink = module("import time\ndef sink(sample): time.sleep(0.02)\n", "sink")
    with children([sink, tmp_path / "run.jsonl", tmp_path / "run.csv"]) as (ring, made):
        for step in range(300):
            send(ring, made, [step])
            until(lambda step=step: made[0].status.received > step - 30)
        until(lambda: made[0].status.received == 300)
    assert made[0].status.dropped == 0 and made[1].status.dropped > 50
    assert made[1].status.received + made[1].status.dropped == 300 and made[1].status.errors == {}


def test_events_for_a_child_that_does_not_read_are_kept_and_then_counted(module):
    sink = module("import time\ndef sink(sample): time.sleep(1000)\n", "sink")
    with children(sink, patience=0.3) as (ring, [child]):
        send(ring, [child], range(1))
        until(lambda: child.status.received == 1)
        os.kill(process_of(child), signal.SIGSTOP)
        began = time.monotonic()
        for step in range(3000):
            child.event("note", step=step, text="x" * 1000)
        assert time.monotonic() - began < 2
        assert child.status.errors["events"].endswith("were lost: the child does not read")


# -- processes that die ----------------------------------------------------------------------------------------------------------


def test_a_killed_child_is_started_again_and_writes_a_file_of_its_own(tmp_path):
    with children(tmp_path / "run.jsonl") as (ring, [child]):
        send(ring, [child])
        until(has_read(child, ring))
        os.kill(process_of(child), signal.SIGKILL)
        until(lambda: "started again" in child.status.errors.get("process", ""))
        assert child.wait_until_ready()
        send(ring, [child], range(10, 20))
        until(has_read(child, ring))
        assert child.status.received == 20 and child.status.dropped == 0
    assert [one["step"] for one in lines(tmp_path / "run.jsonl")] == [*range(10)]
    assert [one["step"] for one in lines(tmp_path / "run-2.jsonl")] == [*range(10, 20)]
    assert child.status.errors == {"process": "it was ended by SIGKILL; started again"}


def test_a_child_killed_while_it_reads_leaves_the_ring_as_it_is(tmp_path):
    with children(tmp_path / "run.jsonl", slots=8) as (ring, [child]):
        reader = ring.reader()
        for round in range(2):
            killer = threading.Timer(0.05, os.kill, (process_of(child), signal.SIGKILL))
            killer.start()
            while killer.is_alive() or (not round and child.status.faults == 0):
                send(ring, [child], [0], size=60_000)
                sample = reader.take()
                assert sample.values.size == 60_000
            killer.join()
            child.wait_until_ready() if not round else until(lambda: not child.status.alive)
        send(ring, [child], range(20))
        assert child.status.received + child.status.dropped == ring.sent
    for path in tmp_path.glob("*.jsonl"):
        lines(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_where_a_whole_job_is_told_to_end_sinks_write_their_ends(tmp_path, module, number):
    with children(module(TELLING)) as (ring, [child]):
        send(ring, [child])
        until(has_read(child, ring))
        os.kill(process_of(child), number)
        until(lambda: told(tmp_path)[-1] == "closed")
    assert told(tmp_path)[:10] == [f"sample {step}" for step in range(10)]


def test_a_dead_child_does_not_end_a_training_whose_broken_pipes_do(tmp_path):
    """`signal(SIGPIPE, SIG_DFL)` is in many scripts whose output is piped."""
    previous = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with children(tmp_path / "run.jsonl") as (ring, [child]):
            for _ in range(2):
                os.kill(process_of(child), signal.SIGKILL)
                before = child._deaths
                while child._deaths == before:
                    send(ring, [child], [0])
                    child.event("note", text="still here")
            assert not child.status.alive
    finally:
        signal.signal(signal.SIGPIPE, previous)


def test_a_forked_process_reaches_no_child_and_keeps_none_alive(tmp_path):
    with children(tmp_path / "run.jsonl") as (ring, [child]):
        send(ring, [child])
        with child._lock:  # as if another thread were about to wake it
            forked = os.fork()
            if not forked:
                ring.put(torch.ones(3), "forked", "grad", 0)
                child.wake()
                child.event("note", text="forked")
                child.close()
                time.sleep(1000)
                os._exit(0)
        try:
            send(ring, [child], range(10, 20))
            began = time.monotonic()
            child.close()
            assert time.monotonic() - began < 2 and "process" not in child.status.errors
        finally:
            os.kill(forked, signal.SIGKILL)
            os.waitpid(forked, 0)
    assert [one["step"] for one in lines(tmp_path / "run.jsonl")] == [*range(20)]


def test_children_leave_no_descriptor_no_process_and_no_thread(tmp_path):
    def state():
        gc.collect()
        processes = {
            pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        }
        return sorted(os.listdir("/proc/self/fd")), threading.active_count(), processes

    before = state()
    for step in range(6):
        with children(tmp_path / f"{step}.jsonl", tmp_path / f"{step}.csv", process=step > 1) as (ring, made):
            send(ring, made)
        assert all(child.status.received == 10 for child in made)
    assert state() == before


def test_closing_again_and_using_what_is_closed_is_harmless(tmp_path):
    with children(tmp_path / "run.jsonl") as (ring, [child]):
        send(ring, [child])
    child.close()
    child.wake()
    child.event("note", text="too late")
    assert child.status.received == 10 and not child.wants_pause and not child.status.alive


# -- where there can be no process -------------------------------------------------------------------------------------------------


def no_python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")


def no_such_program(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")


def frozen(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)


def no_file(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")


WITHOUT = {
    no_python: "Python is embedded in another program: sys.executable is empty",
    no_such_program: "no process could be started: [Errno 2] No such file or directory: '/no/python'",
    frozen: "this program is frozen, and brings no Python to start",
    no_file: "no file can be made here, through which a process could read",
}


@pytest.mark.parametrize("hindered", WITHOUT, ids=lambda one: one.__name__)
def test_without_a_process_a_thread_does_the_same_and_says_why(tmp_path, monkeypatch, hindered):
    hindered(monkeypatch)
    with children(tmp_path / "run.jsonl") as (ring, [child]):
        send(ring, [child])
        child.event("note", step=10, text="in a thread")
        assert child.stats().why_thread == WITHOUT[hindered]
        until(has_read(child, ring))
    assert [one["step"] for one in lines(tmp_path / "run.jsonl")] == [*range(11)]
    assert (child.status.received, child.status.alive, child.status.errors) == (10, False, {})


def test_a_thread_can_be_asked_for_and_a_sink_of_this_program_needs_one(tmp_path):
    got = []
    with children([lambda sample: got.append(sample.step), tmp_path / "run.jsonl"], process=False) as (ring, made):
        send(ring, made)
    assert got == [*range(10)] and len(lines(tmp_path / "run.jsonl")) == 10
    assert made[0].why_thread == "process=False"
    assert "is defined inside a function" in made[1].why_thread


def test_a_thread_whose_sink_hangs_is_left_behind():
    goes_on, asked = threading.Event(), threading.Event()

    def sink(sample):
        asked.set()
        goes_on.wait()

    with children(sink, patience=0.2) as (ring, [child]):
        send(ring, [child])
        assert asked.wait(10)
    assert child.status.errors == {"process": "it did not end in time and is left behind"}
    assert (child.status.received, child.status.dropped) == (1, 9)
    goes_on.set()


def test_a_python_without_numpy_is_said_and_not_tried_again(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    specs = specs_of(tmp_path / "run.jsonl")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.setattr(sys, "path", [one for one in sys.path if "site-packages" not in one])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ring = Ring()
    [child] = start_children(ring, specs)
    until(lambda: not child.status.alive)
    send(ring, [child])
    assert child.status.errors == {"process": "it ended with code 1 (ModuleNotFoundError: No module named 'numpy')"}
    assert (child.status.received, child.status.dropped, child.status.faults) == (0, 10, 1)
    child.close()
    ring.close()


def test_too_many_sinks_are_refused_before_any_is_opened(module):
    with (
        pytest.raises(ValueError, match="16 sinks need 16 processes; there can be 15"),
        children([module(TELLING)] * 16),
    ):
        pass
    assert not [child for child in child_process._open_children if child.status.alive]


@pytest.mark.parametrize("closed", ["0", "0, 1, 2"])
def test_a_daemon_whose_standard_streams_are_closed_is_watched_too(closed, tmp_path):
    script = f"""
import os
for stream in ({closed},):
    os.close(stream)
from pathlib import Path
from replaylens._watch.child_process import start_children
from replaylens._watch.ring import Ring
from replaylens._watch.sink_specs import specs_of
import torch
ring = Ring()
[child] = start_children(ring, specs_of({str(tmp_path / "run.jsonl")!r}))
ring.put(torch.ones(3), "x", "activation", 0)
child.close()
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert [one["name"] for one in lines(tmp_path / "run.jsonl")] == ["x"]
