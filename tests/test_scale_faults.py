"""Executors when something is wrong around them: tasks that outlive their call, functions that keep state, modules that
are others in the workers. Numbers are those of one process, or there is an error.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from chaos_executor import CALM, World
from internals import same
from torch.utils._python_dispatch import TorchDispatchMode

import replaylens as rl
from replaylens._scale.job_file import read_job
from replaylens._scale.module_numbers import other_in_module, read_of_modules
from replaylens._scale.run_task import Answer
from replaylens.errors import BadExecutor, PlanDiffers


def calm():
    return World(0, kinds=CALM).make()


def program():
    torch.manual_seed(0)
    return rl.capture(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), torch.randn(5, 3))


def scales(count=4):
    return {n: {"0": rl.Scale(float(n))} for n in range(count)}


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 4)


# -- tasks that outlive their call -------------------------------------------------------------------------------------


class Holding:
    """An executor that fails, and whose worker goes on with a task once all is over."""

    def submit(self, function, path, digest, number):
        job = read_job(path, digest)
        work = job.setup(job.payload)
        self.late = lambda: work(job.tasks[number])
        raise ValueError("no more")


@pytest.mark.parametrize("kind", ["zarr", "npy"])
def test_a_task_that_outlives_its_extraction_writes_nothing(kind, tmp_path):
    to, rows = tmp_path / f"x.{kind}", torch.arange(60.0).reshape(20, 3)
    how = {"layers": ["linear_1"], "to": to, "batch_size": 2, "shard_bytes": 64}
    holding = Holding()
    with pytest.raises(ValueError, match="no more"):
        rl.extract(linear(0), rows, executor=holding, **how)
    with torch.no_grad():
        wanted = linear(1)(rows).numpy()
    rl.extract(linear(1), rows, overwrite=True, **how)
    assert holding.late() is None
    assert same(rl.Features.open(to)["linear_1"][:], wanted)
    assert [one.name for one in tmp_path.iterdir()] == [to.name]


# -- functions that keep state -----------------------------------------------------------------------------------------


def counting():
    count = [0]

    def metric(output):
        count[0] += 1
        return output.sum().item() + count[0]

    return metric


def counting_by_default():
    def metric(output, seen={}):  # noqa: B006
        seen["calls"] = seen.get("calls", 0) + 1
        return output.sum().item() + seen["calls"]

    return metric


def drawing():
    draws = torch.Generator().manual_seed(0)
    return lambda output: output.sum().item() + torch.rand((), generator=draws).item()


def drawing_in_python():
    return partial(lambda draws, output: output.sum().item() + draws.random(), random.Random(0))


def learning():
    norm = torch.nn.BatchNorm1d(4)
    return lambda output: norm(output).sum().item() + norm.running_mean.sum().item()


CALLS = 0


def counted_in_its_module(output):
    global CALLS
    CALLS += 1
    return output.sum().item() + CALLS


KEEPERS = [counting, counting_by_default, drawing, drawing_in_python, learning, lambda: counted_in_its_module]


@pytest.mark.parametrize("make", KEEPERS)
def test_a_function_that_keeps_state_is_refused_whatever_worker_does_its_tasks(make):
    with pytest.raises(PlanDiffers, match="keeps state from one call to the next, in `"):
        rl.sweep(program(), variants=scales(), metric=make(), memory=100, executor=calm())


def test_a_patch_a_reduction_and_data_that_keep_state_are_refused():
    count, draws = [0], torch.Generator().manual_seed(0)

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, row):
            return torch.randn(3, generator=draws_of_data)

    def patch(value):
        count[0] += 1
        return value * count[0]

    draws_of_data = torch.Generator().manual_seed(1)
    noisy = Noisy()
    noisy.draws = draws_of_data
    how = {"layers": ["linear_1"], "batch_size": 4, "shard_bytes": 64, "executor": calm()}
    with pytest.raises(PlanDiffers, match=r"patch` keeps state .* `count\[0\]`"):
        rl.sweep(program(), variants={n: {"0": patch} for n in range(3)}, metric=torch.sum, executor=calm())
    reduce = {"linear_1": lambda value: value + torch.randn(value.shape, generator=draws)}
    with pytest.raises(PlanDiffers, match="keeps state"):
        rl.extract(linear(0), torch.randn(20, 3), reduce=reduce, **how)
    with pytest.raises(PlanDiffers, match="a Noisy keeps state"):
        rl.extract(linear(0), noisy, **how)


def test_what_is_filled_in_once_is_no_state():
    class Rows(torch.utils.data.Dataset):
        reads, file, last = 0, None, None

        def __len__(self):
            return 20

        def __getitem__(self, row):
            self.file = self.file or [torch.full((3,), float(n)) for n in range(20)]
            self.reads, self.last = self.reads + 1, row
            return self.file[row]

    known = {}

    def metric(output):
        known.setdefault(len(output), float(len(output)))
        return (output * known[len(output)]).sum()

    prog, how = program(), {"layers": ["linear_1"], "batch_size": 4, "shard_bytes": 64}
    found = rl.sweep(prog, variants=scales(), metric=metric, memory=100, executor=calm())
    assert same(found.values, rl.sweep(prog, variants=scales(), metric=metric, memory=100).values)
    wanted = rl.extract(linear(0), Rows(), **how)["linear_1"][:]
    assert same(rl.extract(linear(0), Rows(), executor=calm(), **how)["linear_1"][:], wanted)


# -- modules that are others in the workers ----------------------------------------------------------------------------

LAB = """
import enum, functools, typing
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, field
from attrs import define

K, NAMES = 2.0, {"a", "b", "c"}

@dataclass
class Data:
    a: int = 1
    b: list = field(default_factory=list)

@define
class Made:
    a: int = 1
    def all(self): return self.a in {3, 1, "x", None}

class Colour(enum.Enum):
    RED = 1

class Pair(typing.NamedTuple):
    a: int = 1

Other = namedtuple("Other", "a b")

@functools.lru_cache
def known(n): return n * FACTOR

@contextmanager
def block():
    yield

class Base:
    gain = 1.0
    def of(self, v): return v * self.gain
    @property
    def name(self): return "FACTOR"

class Patch(Base):
    calls = 0
    def __call__(self, v):
        with block():
            assert Data() and Made().all() and Colour.RED and Pair() and Other(1, 2) and v is not None
            return self.of(v) * known(1)

def _inner(v): return v * FACTOR
def patch(v): return _inner(v) * K
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A module of the user's, which can be written anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(factor):
        (tmp_path / "lab_of_mine.py").write_text(LAB.replace("FACTOR", str(factor)))
        importlib.invalidate_caches()

    write(2)
    module = importlib.import_module("lab_of_mine")
    module.write = write
    yield module
    del sys.modules["lab_of_mine"]


@pytest.mark.parametrize("make", [lambda lab: lab.patch, lambda lab: lab.Patch(), lambda lab: lambda v: lab.patch(v)])
def test_a_module_that_is_another_one_in_the_workers_is_refused_and_one_that_is_the_same_is_not(make, lab):
    variants, metric = {0: {"0": make(lab)}}, torch.sum
    prog, wanted = program(), rl.sweep(program(), variants=variants, metric=metric).values
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert same(rl.sweep(prog, variants=variants, metric=metric, executor=pool).values, wanted)
        lab.write(3)
        importlib.reload(lab)
        with pytest.raises(PlanDiffers, match=r"`lab_of_mine.* is another one in a worker"):
            rl.sweep(prog, variants={0: {"0": make(lab)}}, metric=metric, executor=pool)


def test_whatever_a_function_reaches_in_a_module_is_compared(lab, monkeypatch):
    whole = lambda v: lab.patch(v) * lab.K  # noqa: E731
    for by_name, code, name, value in (
        ([lab.patch], [], "_inner", lambda v: v),
        ([lab.patch], [], "K", 4.0),
        ([], [whole], "K", 4.0),
        ([], [whole], "_inner", lambda v: v),
        ([lab.Patch], [], "Base.gain", 4.0),
        ([lab.Patch], [], "Base.of", lambda self, v: v),
        ([lab.Patch], [], "Made.all", lambda self: True),
        ([lab.Patch], [], "known", lambda n: n),
    ):
        wanted = read_of_modules(by_name, code)
        assert other_in_module(wanted) == "", name
        holder, _, last = name.rpartition(".")
        with monkeypatch.context() as patched:
            patched.setattr(getattr(lab, holder) if holder else lab, last, value)
            assert other_in_module(wanted) == f"lab_of_mine.{name}"


# -- the driver's own process, and damaged files -----------------------------------------------------------------------


def test_after_an_error_no_task_runs_in_this_process_any_more():
    def patch(number):
        def slow(value):
            time.sleep(0.3 if number != 1 else 0.1)
            return value * (1 if number != 1 else 1 / 0)

        return slow

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ZeroDivisionError):
            rl.sweep(program(), variants={n: {"0": patch(n)} for n in range(4)}, metric=torch.sum, executor=pool)
        torch.set_rng_state(before)
        time.sleep(0.5)
        assert torch.equal(torch.get_rng_state(), before)


class Lacking:
    """An executor whose worker never finds the files that it is sent."""

    given = 0

    def submit(self, function, path, digest, number, files=None):
        self.given += 1
        assert self.given < 50
        found = Future()
        found.set_result(Answer(number, "far", 1, missing=(digest,)))
        return found


def test_files_that_stay_missing_wherever_they_are_sent_are_an_error():
    lacking = Lacking()
    with pytest.raises(BadExecutor, match="a worker on far was sent the files of this job 3 times"):
        rl.sweep(program(), variants=scales(), metric=torch.sum, memory=100, executor=lacking)


def test_a_dispatch_mode_around_the_call_is_refused():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    prog = rl.capture(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with ThreadPoolExecutor(1) as pool, Mode(), pytest.raises(rl.BadExecutor, match="TorchDispatchMode is on"):
        rl.sweep(prog, variants={0: {"linear_1": rl.Scale(2.0)}}, metric=torch.sum, executor=pool)
