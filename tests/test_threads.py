"""What other threads of a forward read: content that leaves torch there is a fact, as it is in the forward's own thread.

The witness is the plain model on the same inputs.
"""

from __future__ import annotations

import _thread
import asyncio
import copy
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn

import replaylens as rl

Reads = Callable[[Tensor], float]
NUMBERS = torch.arange(4.0) + 1


def total(h: Tensor) -> float:
    return float(h.sum())


class Sums(threading.Thread):
    def __init__(self, h: Tensor) -> None:
        super().__init__()
        self.h = h

    def run(self) -> None:
        self.out = self.h.sum().item()


def by_a_thread(h: Tensor) -> float:
    thread = Sums(h)
    thread.start()
    thread.join()
    return thread.out


def by_a_function_in_a_thread(h: Tensor) -> float:
    out: list[float] = []
    thread = threading.Thread(target=lambda: out.append(total(h)))
    thread.start()
    thread.join()
    return out[0]


def by_a_timer(h: Tensor) -> float:
    out: list[float] = []
    timer = threading.Timer(0.001, lambda: out.append(total(h)))
    timer.start()
    timer.join()
    return out[0]


def by_a_thread_of_a_thread(h: Tensor) -> float:
    out: list[float] = []

    def outer() -> None:
        out.append(by_a_thread(h))

    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    return out[0]


def by_a_raw_thread(h: Tensor) -> float:
    out: list[float] = []
    done = _thread.allocate_lock()
    done.acquire()

    def job() -> None:
        out.append(total(h))
        done.release()

    _thread.start_new_thread(job, ())
    done.acquire()
    return out[0]


def by_a_pool(h: Tensor) -> float:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(total, h).result()


def by_a_map(h: Tensor) -> float:
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(float, h))


def by_a_truth_value(h: Tensor) -> float:
    with ThreadPoolExecutor(1) as pool:
        return 1.0 if pool.submit(lambda: bool((h > 0).all())).result() else -1.0


def by_numpy(h: Tensor) -> float:
    with ThreadPoolExecutor(1) as pool:
        return float(pool.submit(lambda: h.numpy().sum()).result())


def by_a_shape(h: Tensor) -> float:
    with ThreadPoolExecutor(1) as pool:
        return float(pool.submit(lambda: len(h[h > 0])).result())


def by_a_coroutine(h: Tensor) -> float:
    async def asked() -> float:
        return await asyncio.to_thread(total, h)

    return asyncio.run(asked())


def by_another_pool(h: Tensor) -> float:
    with ThreadPool(1) as pool:
        return pool.apply(total, (h,))


READERS: dict[str, Reads] = {name: f for name, f in list(globals().items()) if name.startswith("by_")}


@contextmanager
def workers() -> Iterator[dict[str, Reads]]:
    """Ways to have threads read that were there before the capture."""
    asked: queue.Queue[Any] = queue.Queue()
    answered: queue.Queue[float] = queue.Queue()
    box: list[Any] = []
    there, done = threading.Event(), threading.Event()

    def serve() -> None:
        while (h := asked.get()) is not None:
            answered.put(total(h))

    def wait() -> None:
        while there.wait() and box[0] is not None:
            there.clear()
            box[0] = total(box[0])
            done.set()

    def by_queues(h: Tensor) -> float:
        asked.put(h)
        return answered.get()

    def by_events(h: Tensor) -> float:
        box[:] = [h]
        there.set()
        done.wait()
        done.clear()
        return box[0]

    threads = [threading.Thread(target=job, daemon=True) for job in (serve, wait)]
    with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
        pool.submit(int).result()
        for thread in threads:
            thread.start()
        yield {
            "a pool": lambda h: pool.submit(total, h).result(),
            "a map of a pool": lambda h: sum(pool.map(float, h)),
            "another pool": lambda h: other.apply(total, (h,)),
            "queues": by_queues,
            "events": by_events,
        }
        asked.put(None)
        box[:] = [None]
        there.set()
        for thread in threads:
            thread.join()


def model_of(reads: Reads) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        h = x * 2
        return h * reads(h)

    return model


def assert_says_what_was_read(reads: Reads) -> None:
    model = model_of(reads)
    prog = rl.capture(model, NUMBERS)
    assert not prog(NUMBERS.clone()).diverged
    assert not prog.replay(patch={"mul_1": NUMBERS * 2}).diverged
    run = prog(-NUMBERS)
    assert_same(run.output, model(-NUMBERS))
    assert run.diverged and "another_thread" in str(run.departures[0])
    patch = {"mul_1": rl.Scale(-3)}
    run, wanted = prog.replay(patch=patch), (NUMBERS * -6) * reads(NUMBERS * -6)
    assert_same(run.output, wanted)
    assert run.diverged
    assert_same(rl.run(model, NUMBERS, patch=patch).output, wanted)
    assert rl.sweep(prog, variants={"a": patch, "b": {"mul_1": rl.Scale(1.0)}}, metric=torch.sum).departures.keys() == {
        "a"
    }
    for refused in (
        lambda: prog.replay(-NUMBERS, on_divergence="raise"),
        lambda: prog.with_patch(patch),
        lambda: prog.insert_after("mul_1", torch.neg),
        lambda: prog.function()(-NUMBERS),
        lambda: prog.module()(-NUMBERS),
        lambda: prog.slice()(-NUMBERS),
    ):
        with pytest.raises(rl.DivergedReplay):
            refused()


@pytest.mark.parametrize("name", READERS)
def test_content_that_a_thread_of_the_forward_reads_is_a_fact(name: str) -> None:
    assert_says_what_was_read(READERS[name])


@pytest.mark.parametrize("name", ["a pool", "a map of a pool", "another pool", "queues", "events"])
def test_content_that_a_thread_reads_which_was_there_before_is_a_fact(name: str) -> None:
    with workers() as made:
        assert_says_what_was_read(made[name])


def test_a_thread_that_reads_no_content_leaves_no_fact() -> None:
    with workers() as made:
        there = made["a pool"]
        assert there(NUMBERS) == 10.0

    def model(x: Tensor) -> Tensor:
        out: list[int] = []
        thread = threading.Thread(target=lambda: out.append(x.shape[0] + x.dim()))
        thread.start()
        thread.join()
        return x * out[0]

    prog = rl.capture(model, NUMBERS)
    assert not prog.guards and not prog(-NUMBERS).diverged and prog.check()


def test_a_fact_of_another_thread_names_the_line_that_leads_there() -> None:
    (guard,) = rl.capture(model_of(by_a_pool), NUMBERS).guards
    assert guard.source is not None and guard.source.function == "by_a_pool"
    assert "read_in_another_thread(mul_1_1)" in str(rl.capture(model_of(by_a_pool), NUMBERS).guards)


def test_a_program_whose_forward_has_threads_is_checked_and_copied_as_others_are() -> None:
    for reads in (by_a_pool, by_another_pool):
        prog = rl.capture(model_of(reads), NUMBERS, save=[])
        assert prog.check()
        run = copy.deepcopy(prog)(-NUMBERS)
        assert run.diverged
        assert torch.equal(run.output, model_of(reads)(-NUMBERS))


class Gated(nn.Module):
    """A parameter and a counter that only another thread reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        with ThreadPoolExecutor(1) as pool:
            gate, count = pool.submit(lambda: (float(self.gate.sum()), float(self.count))).result()
        return x * self.weight * gate * count


def test_state_that_only_another_thread_reads_is_a_fact() -> None:
    model = Gated()
    prog = rl.capture(model, NUMBERS)
    run = prog.replay(state={"gate": torch.full((2,), 3.0)})
    assert run.diverged
    assert_same(run.output.detach(), NUMBERS * 6)
    assert_same(prog.replay(state={"count": torch.tensor(4.0)}).output.detach(), NUMBERS * 2 * 5)
    assert_same(prog.replay(-NUMBERS).output.detach(), -NUMBERS * 2)
    assert float(model.count) == 1.0


def test_a_thread_that_was_there_cannot_read_what_stands_for_the_models_own() -> None:
    with workers() as made:
        model = Gated()
        model.forward = lambda x: x * model.weight * made["queues"](model.gate * 1)  # type: ignore[method-assign]
        prog = rl.capture(model, NUMBERS)
        with pytest.raises(rl.DivergedReplay, match="a thread that was started before it"):
            prog.replay(state={"weight": torch.ones(4) * 2, "gate": torch.ones(2) * 2})
        assert_same(prog.replay(NUMBERS * 2).output.detach(), NUMBERS * 4)


def test_threads_are_as_they_were_after_a_capture() -> None:
    def entries() -> tuple[Any, ...]:
        return (
            threading.Thread.start,
            threading.Condition.wait,
            threading.Condition.notify,
            _thread.start_new_thread,
            ThreadPoolExecutor.submit,
        )

    before = entries()
    rl.capture(model_of(by_a_pool), NUMBERS)
    assert entries() == before
    with pytest.raises(ZeroDivisionError):
        rl.capture(lambda x: by_a_thread(x) / 0, NUMBERS)
    assert entries() == before


def test_a_job_that_outlives_the_forward_goes_on() -> None:
    go, found = threading.Event(), []
    threads = []

    def late(x: Tensor) -> None:
        go.wait()
        found.append(total(x))

    def model(x: Tensor) -> Tensor:
        thread = threading.Thread(target=partial(late, x))
        threads.append(thread)
        thread.start()
        return x * 2

    prog = rl.capture(model, NUMBERS)
    go.set()
    threads[0].join()
    assert found == [10.0] and not prog.guards


def test_the_same_exception_comes_out_of_a_job() -> None:
    def model(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            try:
                return x * pool.submit(lambda: 1 / int((x < 0).sum())).result()
            except ZeroDivisionError:
                return x

    prog = rl.capture(model, NUMBERS)
    assert_same(prog.output, NUMBERS)
    assert_same(prog(-NUMBERS).output, -NUMBERS / 4)


def test_a_patch_of_the_users_may_wait_for_another_thread_while_the_model_runs():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            h = self.linear(x)
            return h if h.sum() < 1000 else h * 2

    model, x, woken = Branches(), torch.randn(2, 4), threading.Event()
    prog = rl.capture(model, x)

    def far(value):
        thread = threading.Thread(target=woken.set)
        thread.start()
        woken.wait()
        thread.join()
        return value * 0 + 1e6

    run = prog.replay(patch={"linear": far})
    assert run.diverged and torch.equal(run.output, torch.full((2, 4), 2e6))
