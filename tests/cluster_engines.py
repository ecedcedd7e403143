"""Real engines of two workers on this machine, as their own documents begin them, and the processes that they start."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import replaylens as rl

PACKAGES = {
    "processes": None,
    "loky": "loky",
    "dask": "distributed",
    "ray": "ray",
    "parsl": "parsl",
    "submitit": "submitit",
}


@contextmanager
def processes(folder: Path) -> Iterator[Any]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


@contextmanager
def loky(folder: Path) -> Iterator[Any]:
    from loky import get_reusable_executor

    try:
        yield get_reusable_executor(max_workers=2)
    finally:
        get_reusable_executor(max_workers=2).shutdown(kill_workers=True)


@contextmanager
def dask(folder: Path) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**settings, local_directory=str(folder)) as cluster, Client(cluster) as client:
        yield client


@contextmanager
def ray(folder: Path) -> Iterator[Any]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield rl.on_ray(num_cpus=1)
    finally:
        ray.shutdown()


@contextmanager
def parsl(folder: Path) -> Iterator[Any]:
    from parsl.concurrent import ParslPoolExecutor
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.providers import LocalProvider

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    workers = HighThroughputExecutor(
        label="here",
        address="127.0.0.1",
        max_workers_per_node=2,
        heartbeat_period=1,
        heartbeat_threshold=5,
        poll_period=10,
        provider=LocalProvider(init_blocks=1, max_blocks=1),
    )
    config = Config(executors=[workers], run_dir=str(folder / "parsl"), initialize_logging=False)
    with ParslPoolExecutor(config) as pool:
        yield pool


@contextmanager
def submitit(folder: Path) -> Iterator[Any]:
    from submitit import LocalExecutor
    from submitit.core.core import Job

    class Executor(LocalExecutor):
        """One that holds its jobs: of one that is forgotten while it runs, Python warns."""

        def submit(self, *args: Any) -> Any:
            jobs.append(super().submit(*args))
            return jobs[-1]

    jobs: list[Any] = []
    patience, Job._results_timeout_s = Job._results_timeout_s, 1  # for what a killed job may yet have written: 15 s
    try:
        yield Executor(folder / "submitit")
    finally:
        Job._results_timeout_s = patience
        for job in jobs:
            job._process.wait()


ENGINES = {maker.__name__: maker for maker in (processes, loky, dask, ray, parsl, submitit)}


def adopt_orphans() -> None:
    """Have this process be the parent of whatever its children leave behind, so that it is found below it."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def descendants() -> dict[int, str]:
    """The living processes that this one started, and those that these did: their numbers and commands.

    Trackers of shared memory are Python's own, one for each process that started others, and end when it does.
    """
    children: dict[int, list[int]] = {}
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                state, parent = (one / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended meanwhile
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(one.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return {pid: command for pid in found[1:] if "resource_tracker" not in (command := _command(pid))}


def _command(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
