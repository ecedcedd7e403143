"""`python bench/scale.py [--quick]`: what it costs to hand work to other processes, and how far that goes.

First the CPU time of two workers and their driver, against the same work in one process, of one thread each. What starts
a worker (Python, imports) is measured by itself and counted in neither; what each job costs (reading it, preparing the
program) is counted. A process's time is the system's count of it, of everything that the engine started. Wall-clock time
stands beside it, and how much CPU two processes that only spin are given on this machine, for it cannot be better.

Then a simulation of up to 1,000 workers. Its passes are those of the plan, each measured in a worker; so are start-up,
preparation, sizes, and the driver's time per task with that many workers. What is assumed is named and printed: the
network, and how many workers share a machine.
"""

import argparse
import heapq
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time

import measure  # noqa: F401  one thread
import models
import torch
from attrs import evolve, frozen
from sweeps import ANSWER, OTHER, printed

import replaylens as rl
from replaylens._scale import run_task as worker_side
from replaylens._scale.distribute import distribute

BUDGETS = {"ProcessPoolExecutor": 1.15, "loky": 1.15, "Ray": 1.15, "Dask": 1.4}
ROUNDS = 3
SMALL = 20e6  # bytes of a pass, for more of them
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
NETWORK = 10e9 / 8  # bytes a second, from where the files lie to all machines together
WORKERS_PER_MACHINE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, ProcessPoolExecutor alone")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_grad_enabled(False)
    grid = Grid(options.quick)
    print_machine()
    print_start()
    print_sizes(grid)
    names = [*ENGINES][:1] if options.quick else [name for name, (package, _) in ENGINES.items() if find_spec(package)]
    print_costs("sweep", names, grid.sweep, 1 if options.quick else ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        print_costs(
            "extraction", names[:1], Extraction(Path(folder), options.quick).run, 1 if options.quick else ROUNDS
        )
    simulate(grid, options.quick)


# -- the work ----------------------------------------------------------------------------------------------------------


class Grid:
    """Every layer and position of a GPT-2's residual stream, as in `bench/sweeps.py`; clean and corrupt differ."""

    def __init__(self, quick: bool) -> None:
        torch.manual_seed(0)
        sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1000} if quick else {}
        model = models.gpt2(**sizes, bos_token_id=0, eos_token_id=0).eval()
        words = model.config.vocab_size
        clean = torch.randint(0, words, (1, 32))
        corrupt = (clean + torch.randint(1, words - 1, clean.shape)) % words
        self.good, self.bad = (rl.capture(lambda ids: model(ids).logits, ids) for ids in (clean, corrupt))
        layers = model.config.n_layer
        self.memory = 2e6 if quick else None  # bytes of a pass: a small model's plan has only one
        self.sites = ["transformer.drop", *[f"transformer.h.{layer}" for layer in range(layers - 1)]]

    def sweep(self, executor: object = None, **how: object) -> rl.Sweep:
        how = {"sites": self.sites, "part": "b [t] d", "memory": self.memory, **how}
        patch = rl.From(self.good)
        return rl.sweep(self.bad, patch=patch, metric=difference, executor=executor, progress=False, **how)


def difference(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, ANSWER] - logits[:, -1, OTHER]).sum()


class Extraction:
    """Pooled activations of a ResNet-18's stages, to disk."""

    def __init__(self, folder: Path, quick: bool) -> None:
        torch.manual_seed(0)
        self.model, self.folder, self.count = models.ResNet18().eval(), folder, 0
        self.images = torch.randn(64 if quick else 1536, 3, 64, 64)

    def run(self, executor: object = None) -> rl.Features:
        self.count += 1
        return rl.extract(
            self.model,
            self.images,
            ["stages.*", "fc"],
            to=self.folder / f"{self.count}.zarr",
            reduce={"stages.*": "b c h w -> b c"},
            batch_size=16,
            shard_bytes=60_000,
            progress=False,
            executor=executor,
        )


# -- the engines -------------------------------------------------------------------------------------------------------


@contextmanager
def processes() -> Iterator[object]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


@contextmanager
def loky() -> Iterator[object]:
    from loky import ProcessPoolExecutor as Pool

    with Pool(2) as pool:
        yield pool


@contextmanager
def ray() -> Iterator[object]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield rl.on_ray(num_cpus=1)
    finally:
        ray.shutdown()


@contextmanager
def dask() -> Iterator[object]:
    from distributed import Client, LocalCluster

    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**settings) as cluster, Client(cluster) as client:
        yield client


ENGINES = {
    "ProcessPoolExecutor": ("concurrent", processes),
    "loky": ("loky", loky),
    "Ray": ("ray", ray),
    "Dask": ("distributed", dask),
}


# -- clocks ------------------------------------------------------------------------------------------------------------


def children() -> list[Path]:
    """What this process has started, and what that has."""
    parents: dict[str, list[str]] = {}
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                parents.setdefault((one / "stat").read_text().rpartition(")")[2].split()[1], []).append(one.name)
            except OSError:  # it has ended
                continue
    found = [str(os.getpid())]
    for one in found:
        found += parents.get(one, [])
    return [Path("/proc", one) for one in found[1:]]


def children_seconds() -> float:
    """CPU seconds of what this process has started, of those that live and of those that have ended."""
    ended, ticks = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    for one in children():
        try:
            ticks += sum(map(int, (one / "stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK") + ended.ru_utime + ended.ru_stime


@frozen
class Cost:
    """Seconds of a piece of work."""

    driver: float
    workers: float
    wall: float


def cost(work: Callable[[], object]) -> Cost:
    before, driver, wall = children_seconds(), process_time(), perf_counter()
    work()
    wall, driver = perf_counter() - wall, process_time() - driver
    time.sleep(0.1)  # workers finish with what they sent
    return Cost(driver, children_seconds() - before, wall)


def spun(count: int, seconds: float = 2.0) -> float:
    """The CPU seconds that this many processes get each second, if they do nothing but spin."""
    code = f"import time; end = time.time() + {seconds}\nwhile time.time() < end: pass\nprint(time.process_time())"
    run = [subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) for _ in range(count)]
    return sum(float(one.communicate()[0]) for one in run) / seconds


# -- what is printed ---------------------------------------------------------------------------------------------------


def print_machine() -> None:
    one, two = spun(1), spun(2)
    said = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2g}"
    print(f"This machine: {said}; of a spinning process each second gets {one:.2f} s of CPU, two together {two:.2f}.")
    print(f"Wall-clock times of two workers can be {one / two:.2f} of one process's at best, while that is so.\n")


def print_start() -> None:
    found = fresh_seconds()
    print(f"A worker starts in {found['python']:.2f} s of CPU (Python), {found['torch']:.2f} (import torch),")
    print(f"{found['replaylens']:.2f} (import replaylens). Not in the ratios below.\n")


def fresh_seconds(repeats: int = 5) -> dict[str, float]:
    """CPU seconds of the steps of a start, in fresh processes that find compiled files of Python's."""
    code = "import time; a = time.process_time(); import torch; b = time.process_time(); import replaylens\n"
    code += "print(a, b - a, time.process_time() - b)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    rows = [list(map(float, run().stdout.split())) for _ in range(1 + repeats)][1:]
    return dict(zip(("python", "torch", "replaylens"), map(median, zip(*rows, strict=True)), strict=True))


def print_sizes(grid: Grid) -> None:
    seen = Inline()
    plan = grid.sweep(seen).plan()
    with tempfile.TemporaryDirectory() as folder:
        files = Inline()
        extraction = Extraction(Path(folder), True)
        extraction.run(files)
    rows = [("bytes", "tasks", "of a task", "of the job's file", "of programs' files", "of all results")]
    rows += [(f"sweep, {plan.variants} variants", *seen.row()), ("extraction, 64 images", *files.row())]
    printed(rows)


class Inline:
    """An executor that runs each task where it is submitted, and weighs what would be sent."""

    def __init__(self) -> None:
        self.tasks: list[int] = []
        self.results: list[int] = []
        self.files: dict[str, int] = {}

    def submit(self, function: Callable, *args: object) -> object:
        self.tasks.append(len(pickle.dumps((function, args))))
        self.files = {one.name: one.stat().st_size for one in Path(str(args[0])).parent.iterdir()}
        answer = function(*args)
        self.results.append(len(pickle.dumps(answer)))
        return Done(answer)

    def row(self) -> tuple[str, ...]:
        programs = sum(size for name, size in self.files.items() if name.endswith(".rlp"))
        sizes = max(self.tasks), self.files["job"], programs, sum(self.results)
        return tuple([f"{number:,}" for number in (len(self.tasks), *sizes)])


@frozen(eq=False)
class Done:
    """A future that has come."""

    answer: object

    def done(self) -> bool:
        return True

    def result(self) -> object:
        return self.answer


def print_costs(name: str, engines: list[str], work: Callable[[object], object], rounds: int) -> None:
    """CPU and wall-clock of two workers and their driver, in turns with one process. The budget is that of the workers;
    what the driver does (the plan, the file of the programs) is the same for any number of them.
    """
    head = name, "one process, CPU s", "workers", "/ one", "budget", "driver", "all / one", "wall s", "/ one process"
    rows = [head]
    for engine in engines:
        with ENGINES[engine][1]() as executor:
            work(executor), work(None)
            pairs = [(cost(partial(work, executor)), cost(partial(work, None))) for _ in range(rounds)]
        columns = [
            *(f"{median(one.driver for _, one in pairs):.2f}", f"{median(two.workers for two, _ in pairs):.2f}"),
            f"{median(two.workers / one.driver for two, one in pairs):.2f}",
            BUDGETS[engine] if rounds > 1 else "(too small)",
            f"{median(two.driver for two, _ in pairs):.2f}",
            f"{median((two.workers + two.driver) / one.driver for two, one in pairs):.2f}",
            *(
                f"{median(two.wall for two, _ in pairs):.2f}",
                f"{median(two.wall / one.wall for two, one in pairs):.2f}",
            ),
        ]
        rows.append((engine, *columns))
        print("  ".join(map(str, rows[-1])), file=sys.stderr)
    printed(rows)


# -- a thousand workers ------------------------------------------------------------------------------------------------


@frozen
class Measured:
    """What the simulation stands on."""

    passes: tuple[float, ...]  # seconds of each, in the order in which they are given out
    start: float  # seconds of Python and imports
    begin: float  # seconds of the driver before it gives out the first task: the plan, the files
    prepare: float  # seconds from the first task of a job to its first pass
    file_bytes: int  # of the job and its programs, which go to each machine once
    result_bytes: int  # of one task, the mean
    driver: dict[int, float]  # by number of workers: the driver's seconds per task


def simulate(grid: Grid, quick: bool) -> None:
    print(
        "Up to 1,000 workers, simulated. Measured: each pass in a worker, start-up, preparation, sizes, and the driver's"
    )
    print(
        f"time per task. Assumed: a network of {NETWORK * 8 / 1e9:g} Gbit/s, {WORKERS_PER_MACHINE} workers to a machine.\n"
    )
    driver = {count: driver_seconds(count, 500 if quick else 3000) for count in WORKERS}
    start = sum(fresh_seconds().values())
    small = (grid.memory or SMALL) / (2 if quick else 1)
    plans = {"as planned": {}, f"memory={small:g}, smaller passes": {"memory": small}}
    if not quick:
        plans["each head at each position"] = {"sites": "scaleddotproductattention_*", "part": "b [head] [t] d"}
    for name, how in plans.items():
        found = evolve(measured_plan(grid, how), start=start, driver=driver)
        print_simulation(name, found)


def measured_plan(grid: Grid, how: dict[str, object]) -> Measured:
    """The passes of a sweep, each timed in a worker, one after another."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        timing = Timing(pool)
        grid.sweep(timing, **how)
    first, *rest = timing.times
    return Measured(
        passes=tuple([seconds for _, seconds in (first, *rest)]),
        start=0.0,
        begin=timing.before,
        prepare=first[0],
        file_bytes=timing.bytes,
        result_bytes=round(sum(timing.sizes) / len(timing.sizes)),
        driver={},
    )


class Timing:
    """An executor of one worker, which says how long each task took there."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool, self.bytes, self.begun, self.before = pool, 0, process_time(), 0.0
        self.times: list[tuple[float, float]] = []
        self.sizes: list[int] = []

    def submit(self, function: Callable, *args: object) -> object:
        self.before = self.before or process_time() - self.begun
        self.bytes = sum(one.stat().st_size for one in Path(str(args[0])).parent.iterdir())
        preparation, seconds, answer = self.pool.submit(timed, function, args).result()
        self.times.append((preparation, seconds))
        self.sizes.append(len(pickle.dumps(answer)))
        return Done(answer)


def timed(function: Callable, args: tuple) -> tuple[float, float, object]:
    """A task in a worker, whose preparation is timed by itself."""
    begin = thread_time()
    worker_side._ready_for(*args[:2])
    middle = thread_time()
    answer = function(*args)
    return middle - begin, thread_time() - middle, answer


def driver_seconds(workers: int, tasks: int) -> float:
    """CPU seconds of the driver per task: to give it out, to see that it has come, and to take it in."""
    null = Null(workers)
    begin = process_time()
    distribute(null, nothing, None, range(tasks), lambda number, result: None, progress=False)
    return (process_time() - begin) / tasks


def nothing(payload: object) -> Callable[[object], None]:
    return lambda task: None


class Null:
    """An executor whose tasks take no time; one is finished each time that the driver looks."""

    def __init__(self, count: int) -> None:
        self.count, self.next = count, 0
        self.result = worker_side._dumped(torch.zeros(40))

    def workers(self) -> int:
        return self.count

    def submit(self, function: Callable, path: str, digest: str, number: int) -> object:
        return Came(self, worker_side.Answer(number, "nowhere", 1, 1, self.result), number)


@frozen(eq=False)
class Came:
    """A future that is done when it is its turn."""

    null: Null
    answer: object
    number: int

    def done(self) -> bool:
        return self.number <= self.null.next

    def result(self) -> object:
        self.null.next = max(self.null.next, self.number + 1)
        return self.answer


@frozen
class Outcome:
    """A simulated run."""

    seconds: float
    parts: dict[str, float]  # what it could not be shorter than, by what it is


def run(found: Measured, workers: int, *, is_warm: bool) -> Outcome:
    """Tasks in order to whichever worker is free; the driver does one thing at a time."""
    machines = -(-workers // WORKERS_PER_MACHINE)
    transfer = found.file_bytes * machines / NETWORK
    per_task = found.driver[workers] + found.result_bytes / NETWORK
    ready = found.begin + transfer + found.prepare + (0.0 if is_warm else found.start)
    free = [ready] * min(workers, len(found.passes))
    driver = end = found.begin
    for seconds in sorted(found.passes, reverse=True):
        driver += per_task
        begin = max(heapq.heappop(free), driver)
        heapq.heappush(free, begin + seconds)
        end = max(end, begin + seconds)
    parts = {
        "the passes themselves": sum(found.passes) / workers,
        "the longest pass": max(found.passes),
        "start-up and preparation": ready - transfer - found.begin,
        "the driver's plan and files": found.begin,
        "the files' way": transfer,
        "the driver's tasks": per_task * len(found.passes),
    }
    return Outcome(end, parts)


def print_simulation(name: str, found: Measured) -> None:
    total, count = sum(found.passes), len(found.passes)
    print(f"{name}: {count} passes, {total:.2f} s in all, {min(found.passes):.3f} to {max(found.passes):.3f} s each;")
    print(
        f"the driver's plan and files {found.begin:.2f} s, start {found.start:.2f} s, preparation {found.prepare:.2f} s, files {found.file_bytes / 1e6:.0f} MB to a machine,"
    )
    print(f"{found.result_bytes:,} bytes of a result.")
    rows = [("workers", "s, cold", "efficiency", "s, warm", "efficiency", "driver, ms a task", "what bounds it, warm")]
    bend = None
    for workers in WORKERS:
        cold, warm = (run(found, workers, is_warm=is_warm) for is_warm in (False, True))
        why = max(warm.parts, key=warm.parts.__getitem__)
        good = [f"{total / workers / one.seconds:.2f}" for one in (cold, warm)]
        seconds = [f"{one.seconds:.2f}" for one in (cold, warm)]
        rows.append((workers, seconds[0], good[0], seconds[1], good[1], f"{found.driver[workers] * 1e3:.3f}", why))
        if bend is None and total / workers / warm.seconds < 0.5:
            bend = workers, warm
    printed(rows)
    if bend is not None:
        workers, warm = bend
        least = sorted(warm.parts.items(), key=lambda part: -part[1])
        print(f"Warm, half of the time is lost with {workers} and more. What takes time there, in seconds:")
        print("; ".join(f"{what} {seconds:.2f}" for what, seconds in least), end=".\n")
        if workers > count:
            print(f"There are {count} passes: more workers than that have nothing to do.")
        print()


if __name__ == "__main__":
    main()
