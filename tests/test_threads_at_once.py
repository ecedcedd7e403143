"""Threads that capture, replay and run one model at once, and plain threads beside them, find it as its user left it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from internals import interrupts as world, model_turns as turns, scopes
from torch import nn

import replaylens as rl

MODULE_CALL = nn.Module.__call__.__code__  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def often_switching() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    outer = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(outer)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Entries are what they were, locks are free, nobody waits."""
    yield
    assert nn.Module.__call__ is scopes._module_call and nn.Module.__call__.__code__ is MODULE_CALL
    assert not turns.turns and not turns._waiting and not world.generator_lock._is_owned()


def x() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def far(value: torch.Tensor) -> torch.Tensor:
    return value + 1_000


class Counting(nn.Module):
    """What it gives depends on how often it ran; a patch that leads away lets it count otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm, self.calls, self.seen = nn.Linear(4, 4), nn.BatchNorm1d(4), 0, []
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("far", torch.zeros(()))
        self.scale = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count = self.count + 1
        y = self.fc(x)
        is_far = y.sum() > 1_000
        y = self.norm(y)
        assert self.seen[-1] == self.calls
        if is_far:
            self.far = self.far + 1
            self.scale = self.scale * 2
        return y * self.calls + self.count + self.far * self.scale


class Drawing(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def wanted(model: nn.Module, count: int) -> list[torch.Tensor]:
    """What plain forwards give, one after another."""
    with torch.no_grad():
        return [model(x()) for _ in range(count)]


@contextmanager
def meanwhile(*works: Callable[[], Any]) -> Iterator[None]:
    """Other threads do this again and again."""
    stop, errors = threading.Event(), []

    def again(work: Callable[[], Any]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=again, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize(("kind", "training"), [(Counting, True), (Counting, False), (Drawing, False)])
def test_plain_forwards_beside_live_runs_give_what_they_give_alone(kind, training):
    expected = wanted(kind().train(training), 60)
    model = kind().train(training)
    prog = rl.capture(model, x())
    first = prog.replay(patch={"fc": far}).output

    def live() -> None:
        assert torch.equal(prog.replay(patch={"fc": far}).output, first)
        assert rl.run(model, x(), patch={"fc": far}).diverged

    with meanwhile(live, live):
        got = wanted(model, 59)
    assert all(torch.equal(one, other) for one, other in zip([prog.output, *got], expected, strict=True))
    assert model.calls == 60 and model.seen == list(range(1, 61)) and model.count == 60


def test_a_model_in_evaluation_that_was_captured_in_training_stays_in_evaluation_for_others():
    model = Counting()
    prog = rl.capture(model, x())
    model.eval()
    means = model.norm.running_mean.clone()

    with meanwhile(*[lambda: prog.replay(patch={"fc": far})] * 2):
        for _ in range(60):
            with torch.no_grad():
                model(x())
            assert not model.norm.training
    assert torch.equal(model.norm.running_mean, means)


def test_captures_beside_live_runs_are_those_of_plain_forwards():
    expected = wanted(Counting(), 31)
    model = Counting()
    prog = rl.capture(model, x())
    with meanwhile(*[lambda: prog.replay(patch={"fc": far})] * 2):
        for number in range(1, 31):
            again = rl.capture(model, x())
            assert torch.equal(again.output, expected[number])
            assert torch.equal(again.replay().output, expected[number])
            assert again.replay(patch={"fc": far}).diverged


def test_replays_beside_live_runs_do_not_take_what_those_change_for_stale():
    model = Counting()
    prog = rl.capture(model, x())
    with meanwhile(*[lambda: prog.replay(patch={"fc": far})] * 2):
        for _ in range(100):
            assert torch.equal(prog.replay().output, prog.output.detach())
            assert prog.replay(patch={"norm": far}).departures == ()


def test_draws_of_replays_captures_and_live_runs_do_not_meet():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout())
    branching = Drawing()
    prog = rl.capture(branching, x())
    first = prog.replay(patch={"fc": far}).output

    def live() -> None:
        assert torch.equal(prog.replay(patch={"fc": far}).output, first)

    def fresh() -> None:
        prog.replay(patch={"fc": far}, rng="fresh")

    with meanwhile(live, fresh):
        for _ in range(30):
            here = rl.capture(model, x())
            assert torch.equal(here.replay().output, here.output.detach())
            noisy = here.with_patch({"linear_1": lambda value: value + torch.rand(3, 4)})
            assert torch.equal(noisy.replay().output, noisy.output.detach())


def test_a_patch_that_draws_before_its_replay_leaves_the_path_draws_the_same_again():
    model = Counting()
    prog = rl.capture(model, x())
    drawn: list[torch.Tensor] = []

    def noisy(value: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(3, 4))
        return far(value) + drawn[-1]

    torch.manual_seed(3)
    assert prog.replay(patch={"fc": noisy}).diverged
    assert len(drawn) == 2 and torch.equal(*drawn)


def test_checks_beside_plain_forwards_and_live_runs_find_nothing():
    model = Counting()
    prog = rl.capture(model, x())
    done = []

    def plain() -> None:
        wanted(model, 1)
        done.append(1)

    with meanwhile(plain, lambda: prog.replay(patch={"fc": far})):
        for _ in range(2):
            assert rl.check(model, x(), progress=False)
    assert model.calls == 1 + len(done) == model.count


# ---- nobody waits for ever -------------------------------------------------------------------------------------------


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=60)


@pytest.mark.parametrize("where", [lambda work: work(), in_a_thread])
@pytest.mark.parametrize("what", ["plain", "capture"])
def test_a_patch_may_run_or_capture_the_model_itself_or_in_a_thread(where, what):
    model = Counting().eval()
    prog = rl.capture(model, x())
    works = {"plain": lambda: model.fc(x()), "capture": lambda: rl.capture(model.fc, x()).output}

    def patch(value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return far(value) + where(works[what])

    with torch.no_grad():
        added = model.fc(x())
    got = prog.replay(patch={"fc": patch})
    assert got.diverged
    assert torch.equal(got.output, prog.replay(patch={"fc": lambda value: far(value) + added}).output)


def test_a_patch_may_run_the_model_live_within_a_live_run():
    model = Counting().eval()
    prog = rl.capture(model, x())
    alone = prog.replay(patch={"fc": far}).output
    found = []

    def patch(value: torch.Tensor) -> torch.Tensor:
        found.append(rl.run(model.norm, x()).output)
        return far(value)

    assert torch.equal(prog.replay(patch={"fc": patch}).output, alone)
    assert len(found) == 2


def test_a_live_run_does_not_wait_for_a_forward_that_waits_for_it():
    model = Counting()
    prog = rl.capture(model, x())
    alone = prog.replay(patch={"fc": far}).output
    found = []
    model.fc.register_forward_hook(lambda *_: found.append(in_a_thread(lambda: prog.replay(patch={"fc": far}).output)))
    prog = rl.capture(Counting(), x())
    wanted(model, 1)
    assert len(found) == 1 and torch.equal(found[0], alone)


def test_a_forward_in_the_middle_of_which_a_live_run_is_asked_for_comes_to_its_end_first():
    model, inside = Counting(), threading.Event()
    prog = rl.capture(model, x())
    first, order = prog.replay(patch={"fc": far}).output, []

    def wait(*_: Any) -> None:
        inside.set()
        for _ in range(40):
            sum(range(100_000))
        order.append("forward")

    def live() -> None:
        inside.wait()
        assert torch.equal(prog.replay(patch={"fc": far}).output, first)
        order.append("live")

    handle = model.norm.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(wanted, model, 1), pool.submit(live)]
        inside.wait()
        handle.remove()
        [job.result() for job in jobs]
    assert order[0] == "forward" and model.calls == 2
