"""Tasks on executors: each result once and as it is, whatever an executor does; and words for what cannot be."""

import asyncio
import copyreg
import os
import pickle
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from chaos_executor import CALM, ChaosExecutor, World
from internals import same

import replaylens as rl
from replaylens._scale.distribute import Execution, distribute
from replaylens._scale.executors import engine_of
from replaylens._scale.job_file import job_folder, read_job, write_job
from replaylens._scale.run_task import _dumped, loaded, run_task
from replaylens.errors import BadExecutor, LostWorkers

SEEDS = range(int(os.environ.get("REPLAYLENS_SEEDS", "500")))


def squares(payload):
    def work(task):
        if task in payload["bad"]:
            raise payload["bad"][task]
        return task * task

    return work


def replays(prog):
    return lambda factor: prog.replay(patch={"linear_1": rl.Scale(factor)}).output


def outcome(executor, tasks=range(12), bad=None, **how):
    """What is received, in order, and the execution."""
    received = Received()
    execution = distribute(executor, squares, {"bad": bad or {}}, tasks, received, **how)
    return received, execution


class Received(list):
    def __call__(self, *one):
        self.append(one)


def program():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    return rl.capture(model, torch.randn(2, 4))


# -- whatever an executor does -----------------------------------------------------------------------------------------


def test_each_result_is_received_once_whatever_the_executor_does():
    failed = losses = 0
    for seed in SEEDS:
        world, received = World(seed), Received()
        try:
            execution = distribute(world.make, squares, {"bad": {}}, range(12), received)
        except LostWorkers:
            assert max(world.losses.values()) == 4, seed
            failed += 1
        else:
            assert sorted(received) == [(n, n * n) for n in range(12)], seed
            assert max(world.losses.values(), default=0) <= 3, seed
            assert execution == Execution("ChaosExecutor", 1, torch.get_num_threads(), 12, world.losses.total()), seed
        assert len(received) == len(dict(received)), seed
        losses += world.losses.total()
    assert failed < len(SEEDS) / 10 and losses > len(SEEDS)


def test_an_error_of_the_work_is_raised_at_once_and_as_itself_whatever_the_executor_does():
    for seed in SEEDS:
        world, error = World(seed), ValueError("this one", seed)
        with pytest.raises((ValueError, LostWorkers)) as raised:
            outcome(world.make, bad={seed % 12: error})
        if raised.type is ValueError:
            assert raised.value.args == error.args, seed
            assert world.runs[seed % 12] <= 2 + world.losses[seed % 12], seed
        assert all(future.is_cancelled for future in world.under_way), seed


def test_a_task_that_is_always_lost_ends_the_work_with_the_executors_last_words():
    world = World(0, kinds=("lost before",), evil=1)
    with pytest.raises(LostWorkers) as error:
        outcome(world.make(), retries=2, unit="pass")
    lines = str(error.value).splitlines()
    assert world.losses[0] == 3
    assert lines[0] == "pass 0 was given out 3 times, and its worker was lost each time."
    assert lines[1].endswith(": gone")
    assert all(future.is_cancelled for future in world.under_way)


def test_a_broken_executor_that_nobody_can_make_again_ends_the_work():
    world = World(1, kinds=("broken",), evil=1)
    with pytest.raises(LostWorkers, match="BrokenProcessPool: all of it is gone"):
        outcome(world.make())


@pytest.mark.parametrize(("retries", "times"), [(0, 2), (1, 3), (3, 4)])
def test_of_tasks_that_break_their_pool_the_others_come_through(retries, times):
    broken = []

    class Pool(ChaosExecutor):
        def submit(self, function, *args):
            made = super().submit(function, *args)
            if args[2] == 5:
                made.kind = "broken"
            return made

    world, received = World(3, kinds=CALM), []

    def make():
        broken.append(1)
        world.process += 1
        return Pool(world, world.process)

    with pytest.raises(LostWorkers, match=rf"^task 5 was given out {times} times") as error:
        distribute(make, squares, {"bad": {}}, range(12), lambda *one: received.append(one), retries=retries)
    assert error.value.number == 5
    assert {number for number, _ in received} == {*range(12)} - {5}
    assert len(broken) == times + 1


def test_the_heaviest_tasks_go_first_and_no_more_than_two_for_each_worker_are_under_way():
    world, most, order = World(4, kinds=CALM), [], []

    class Watching(ChaosExecutor):
        def submit(self, function, *args):
            order.append(args[2])
            made = super().submit(function, *args)
            most.append(len(self.world.under_way))
            return made

    outcome(Watching(world, 1), weights=[n % 5 for n in range(12)])
    assert order == sorted(range(12), key=lambda n: -(n % 5))
    assert max(most) == 2  # of a world with one worker


def test_no_tasks_need_no_executor_to_do_anything():
    assert outcome(World(0).make(), tasks=[]) == ([], Execution("ChaosExecutor", 0, 0, 0))


def test_an_error_of_who_receives_ends_the_work():
    world = World(8, kinds=CALM)

    def full(number, result):
        raise OSError(28, "no space left")

    with pytest.raises(OSError, match="no space left"):
        distribute(world.make(), squares, {"bad": {}}, range(12), full)
    assert world.under_way and all(future.is_cancelled for future in world.under_way)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_no_future_no_executor_and_no_file(stop, tmp_path):
    world, made = World(9, kinds=CALM), []

    def make():
        made.append(world.make())
        return made[-1]

    def receive(number, result):
        assert list(tmp_path.iterdir())
        raise stop

    with pytest.raises(stop):
        distribute(make, squares, {"bad": {}}, range(12), receive, scratch=tmp_path)
    assert all(future.is_cancelled for future in world.under_way)
    assert [one.is_shut for one in made] == [True]
    assert not list(tmp_path.iterdir())


def test_an_executor_of_the_users_is_not_shut_down():
    pool = World(2, kinds=CALM).make()
    outcome(pool)
    assert not pool.is_shut


# -- errors ------------------------------------------------------------------------------------------------------------


class Strange(Exception):
    """An error that no pickle gives back."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Held(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def locked(payload):
    def work(task):
        raise Held

    return work


def exits(payload):
    def work(task):
        sys.exit(3)

    return work


def unpicklable_result(payload):
    return lambda task: threading.Lock()


def test_an_error_has_the_lines_of_the_worker_as_a_note():
    with pytest.raises(ZeroDivisionError, match="by nothing") as error:
        outcome(World(0).make(), bad={3: ZeroDivisionError("by nothing")})
    [note] = error.value.__notes__
    assert note.startswith("In a worker:\nTraceback") and 'raise payload["bad"][task]' in note


def test_notes_on_an_error_come_along():
    error = KeyError("layer")
    error.add_note("variant 'a'") if hasattr(error, "add_note") else error.__dict__.update(__notes__=["variant 'a'"])
    with pytest.raises(KeyError) as raised:
        outcome(World(0).make(), bad={0: error})
    assert raised.value.__notes__[0] == "variant 'a'"


def test_an_error_that_cannot_be_sent_comes_in_words():
    with pytest.raises(RuntimeError, match="Held: holds a lock") as error:
        distribute(World(0).make(), locked, None, [0], print)
    assert "In a worker" in error.value.__notes__[0]


def test_a_worker_that_would_exit_says_so_to_the_driver(monkeypatch):
    lossy = lambda error: (Exception.__new__, (type(error),))  # as libraries install for all errors  # noqa: E731
    monkeypatch.setitem(copyreg.dispatch_table, SystemExit, lossy)
    with pytest.raises(SystemExit) as error:
        distribute(World(0).make(), exits, None, [0], print)
    assert error.value.code == 3


def test_a_result_that_cannot_be_sent_is_an_error_of_the_work():
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        distribute(World(0).make(), unpicklable_result, None, [0], print)


def test_an_error_of_the_executors_own_is_not_taken_for_a_lost_worker():
    class Odd(ChaosExecutor):
        def submit(self, function, *args):
            made = Future()
            made.set_exception(RuntimeError("no module named replaylens"))
            return made

    with pytest.raises(RuntimeError, match="no module named replaylens") as error:
        outcome(Odd(World(0), 1))
    assert error.value.__notes__ == ["The executor raised this for task 0, and not the work itself."]


# -- what is sent ------------------------------------------------------------------------------------------------------


def files(folder):
    return sorted(path.suffix for path in Path(folder).iterdir())


def test_a_program_goes_to_a_file_once_and_stays_one_object(tmp_path):
    prog, other = program(), program()
    with job_folder(tmp_path) as folder:
        path, digest = write_job(folder, replays, [prog, {"again": prog}, rl.From(prog), other], [])
        assert files(folder) == ["", ".rlp", ".rlp"]
        assert len(Path(path).read_bytes()) < 2000
        [one, inside, patch, _] = read_job(path, digest).payload
        assert inside["again"] is one and patch.source is one
        assert same(one.output, prog.output)


def test_a_task_is_a_few_hundred_bytes_however_large_the_model_is(tmp_path):
    scratch = tmp_path / "a-rather-long-name-of-a-folder-on-a-shared-file-system" / "of-a-project" / "scratch"
    sizes = []

    class Measuring(ChaosExecutor):
        def submit(self, function, *args):
            sizes.append(len(pickle.dumps((function, args))))
            return super().submit(function, *args)

    torch.manual_seed(0)
    prog = rl.capture(torch.nn.Sequential(torch.nn.Linear(512, 512)), torch.randn(2, 512))
    got = {}
    pool = Measuring(World(0, kinds=CALM), 1)
    distribute(pool, replays_first, prog, [torch.ones(1000)] * 3, got.__setitem__, scratch=scratch)
    assert len(sizes) == 3 and max(sizes) < 500


def replays_first(prog):
    return lambda task: prog.replay().output + task[0]


@pytest.mark.parametrize(
    "result",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.randn(1000, 1000)[3],
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([float("nan"), -0.0]),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([True, False]),
        torch.ones(3).expand(2, 3),
    ],
    ids=lambda value: f"{value.dtype}-{tuple(value.shape)}-{tuple(value.stride())}".replace("torch.", ""),
)
def test_results_come_as_they_are_and_without_the_memory_that_they_are_views_of(result):
    data = _dumped(result)
    back = loaded(data)
    assert same(back, result) and type(back) is type(result) and back.requires_grad == result.requires_grad
    assert back.is_conj() == result.is_conj() and back.stride() == result.stride()
    assert len(data) < 8000


def test_lambdas_and_functions_of_a_script_are_sent_by_cloudpickle():
    pytest.importorskip("cloudpickle")
    got = {}
    distribute(World(0).make(), lambda_user, {"read": lambda value: value + 1}, [1, 2], got.__setitem__)
    assert got == {0: 2, 1: 3}


def lambda_user(payload):
    return lambda task: payload["read"](task)


def test_without_cloudpickle_a_lambda_is_refused_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(rl.CannotSave) as error:
        distribute(World(0).make(), lambda_user, {"read": [len, lambda value: value]}, [1], print)
    assert "<lambda> (['read'][1]) cannot be sent to another process: " in str(error.value)
    assert str(error.value).endswith(
        "Lambdas and functions of a script need cloudpickle: pip install 'replaylens[scale]'"
    )


def test_what_cannot_be_sent_is_named():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    pool = World(0).make()
    with pytest.raises(rl.CannotSave) as error:
        distribute(pool, squares, {"model": Model(), "bad": {}}, [1], print)
    assert str(error.value) == (
        "a lock (['model'].lock) cannot be sent to another process: cannot pickle '_thread.lock' object\n"
        "Build it in the function that uses it, or run without executor=, in this process."
    )
    assert not pool.world.futures


def test_a_program_that_cannot_be_a_file_is_refused_in_the_words_of_save():
    pool = World(0).make()
    prog = program().with_patch({"relu_1": lambda value: value})
    with pytest.raises(rl.CannotSave) as error:
        distribute(pool, replays, prog, [1.0], print)
    with pytest.raises(rl.CannotSave) as saved:
        prog.save(os.devnull)
    assert str(error.value) == f"{saved.value}\nWithout executor= nothing is sent, and it runs in this process."


def test_what_is_kept_of_killed_drivers_is_removed(tmp_path):
    done = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with done:
        pid = done.submit(os.getpid).result()
    with job_folder(tmp_path) as folder:
        left = folder.with_name(folder.name.replace(f"-{os.getpid()}-", f"-{pid}-"))
        left.mkdir()
        other = tmp_path / "replaylens-another-machine-1-abcd"
        other.mkdir()
        with job_folder(tmp_path) as second:
            assert {*tmp_path.iterdir()} == {folder, second, other}


# -- executors ---------------------------------------------------------------------------------------------------------


def test_a_pool_of_threads_gives_the_bits_of_this_thread_and_leaves_its_number_of_threads():
    prog, got, threads = program(), {}, torch.get_num_threads()
    state = torch.get_rng_state()
    with ThreadPoolExecutor(3) as pool:
        execution = distribute(pool, replays, prog, [0.5, 1.0, 2.0], got.__setitem__)
    work = replays(prog)
    assert all(same(got[n], work(factor)) for n, factor in enumerate([0.5, 1.0, 2.0]))
    assert execution == Execution("ThreadPoolExecutor", 1, threads, 3)
    assert torch.get_num_threads() == threads and same(torch.get_rng_state(), state)
    assert (
        str(execution) == f"3 tasks on 1 worker of ThreadPoolExecutor, {threads} thread each" + "s" * 0 or threads > 1
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only there processes are forked")
def test_a_pool_that_forks_is_refused():
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool, pytest.raises(BadExecutor) as error:
        outcome(pool)
    assert str(error.value) == (
        "this ProcessPoolExecutor forks its processes, and a process that is forked after torch has used its threads "
        "can hang.\nGive one that spawns them: ProcessPoolExecutor(8, mp_context=get_context('spawn'))"
    )


class LocalCluster:
    """Named as Dask's."""


WRONG = {
    "8": (8, "not 8. Processes of this machine: executor=ProcessPoolExecutor(8, mp_context=get_context('spawn'))"),
    "dask": ("dask", "not 'dask'. For Dask: executor=Client(cluster), of dask.distributed"),
    "ray": ("ray", "not 'ray'. For Ray: executor=replaylens.on_ray(num_cpus=1)"),
    "cluster": (LocalCluster(), "not a LocalCluster. For Dask: executor=Client(cluster), of dask.distributed"),
    "module": (asyncio, "not the module asyncio. Processes of this machine: "),
    "class": (ThreadPoolExecutor, "not the class ThreadPoolExecutor. Make one: ThreadPoolExecutor(...)"),
    "function": (
        lambda: 3,
        "the function given as executor= gave 3. executor= takes something with submit(fn, *args), and not 3. Proc",
    ),
    "needs more": (lambda count: 3, "not a function. Processes"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_what_takes_no_work_is_refused_with_what_to_give(given, words):
    with pytest.raises(BadExecutor) as error:
        outcome(given)
    assert words in str(error.value) and isinstance(error.value, TypeError)


def test_what_gives_no_futures_is_refused():
    class Eager:
        def submit(self, function, *args):
            return function(*args)

    with pytest.raises(BadExecutor, match=r"what submit of this Eager gives is of class Answer, and has no done\(\)"):
        outcome(Eager())


@pytest.mark.parametrize("retries", [-1, 1.5, None, True])
def test_retries_is_a_number_of_times(retries):
    with pytest.raises(ValueError, match=f"retries={retries}: give how often a task may be lost"):
        outcome(World(0).make(), retries=retries)


def test_a_process_keeps_the_last_jobs_that_it_prepared(tmp_path):
    prepared.clear()
    with job_folder(tmp_path) as folder:
        jobs = []
        for name in "abc":
            (folder / name).mkdir()
            jobs.append(write_job(folder / name, counted, name, [1, 2]))
        for job in [jobs[0], jobs[1], jobs[0], jobs[2], jobs[0], jobs[1]]:
            assert run_task(*job, 1).failure is None
    assert prepared == ["a", "b", "c", "b"]


prepared = []


def counted(payload):
    prepared.append(payload)
    return lambda task: task


def test_an_engine_knows_how_many_workers_there_are():
    assert engine_of(ThreadPoolExecutor(3)).count() == 3
    assert engine_of(World(2).make()).count() == 3
    assert engine_of(World(2).make).is_ours
