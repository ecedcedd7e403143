"""distribute: tasks to the workers of an executor, and their results as they come.

In: an executor, a function that prepares a worker, what it needs, and the tasks. Out: each result once, to the caller's
function and in the caller's thread, and an Execution that says where the work was done. What a task is, nobody knows
here. A task whose worker was lost is given to another one; an error of the work ends everything, and is raised as it
is. However the driver ends, nothing is left: no future, no process that we started, no file.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from attrs import define, field, frozen

from .._ir.torch_private import count_dispatch_modes
from .._ir.util import add_note
from .._sweep.batch_runner import progress_bar
from ..errors import BadExecutor, LostWorkers
from .executors import POOL, Engine, engine_of, guessed_workers, is_broken, is_lost
from .job_file import files_of, job_folder, write_job
from .run_task import Answer, loaded, run_task, wait_for_this_process

_TRIES = 2  # to bring files to a host
Setup = Callable[[Any], Callable[[Any], Any]]


@frozen
class Execution:
    """Where a piece of work was done, and on how many threads."""

    engine: str  # the kind of executor
    workers: int  # processes that gave results
    threads: int  # of each worker, which can be part of the bits
    tasks: int
    resubmitted: int = 0  # tasks whose worker was lost, each time it was
    idle: int = 0  # workers for which there was no task

    def __str__(self) -> str:
        again = f", {self.resubmitted} given out again" if self.resubmitted else ""
        again += f", {self.idle} more had nothing to do" if self.idle else ""
        many = [f"{n:,} {word}{'s' * (n != 1)}" for n, word in ((self.tasks, "task"), (self.workers, "worker"))]
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{many[0]} on {many[1]} of {self.engine}, {threads} each{again}"


def distribute(
    executor: Any,
    setup: Setup,
    payload: Any,
    tasks: Sequence[Any],
    receive: Callable[[int, Any], Any],
    *,
    scratch: Any = None,
    retries: int = 3,
    progress: bool | None = None,
    unit: str = "task",
    weights: Sequence[float] | None = None,
) -> Execution:
    """Run `setup(payload)(task)` for each task in the workers, and `receive(number, result)` here, as results come.

    `setup` is a function of a module that the workers can import; it runs once a process. The heaviest tasks go first.
    `scratch` is a folder that all workers see; where they do not, they are sent the bytes.
    """
    if type(retries) is not int or retries < 0:
        raise ValueError(f"retries={retries!r}: give how often a task may be lost, such as 3.")
    if count_dispatch_modes():
        raise BadExecutor(
            "a TorchDispatchMode is on around this call, which workers do not have: their numbers could be others. "
            "Leave it before, or run without executor=."
        )
    tasks = list(tasks)
    if weights is not None and len(weights) != len(tasks):
        raise ValueError(f"there are {len(weights)} weights for {len(tasks)} tasks.")
    order = sorted(range(len(tasks)), key=lambda number: -weights[number] if weights is not None else 0)
    engine = engine_of(executor)
    is_done = False
    try:
        with job_folder(scratch) as folder, progress_bar(len(tasks), progress, unit) as tick:
            path, digest = write_job(folder, setup, payload, tasks) if tasks else ("", "")
            driver = Drive(engine, path, digest, deque(order), retries, unit)
            driver.run(lambda number, result: (receive(number, result), tick(1)))
            is_done = True
            return driver.execution
    finally:
        engine.close(at_once=not is_done)
        wait_for_this_process()


@frozen(eq=False)
class Sent:
    """A task in the hands of the executor."""

    number: int
    future: Any
    generation: int  # of the executor that has it
    brings_to: str | None = None  # the host to which it brings files
    is_alone: bool = False  # nothing else is under way


@define(eq=False)
class Drive:
    """The loop of the driver: what waits, what is under way, what is done."""

    engine: Engine
    path: str
    digest: str
    waiting: deque[int]
    retries: int
    unit: str = "task"
    under_way: list[Sent] = field(factory=list, init=False)
    done: set[int] = field(factory=set, init=False)
    losses: dict[int, int] = field(factory=dict, init=False)
    workers: set[str] = field(factory=set, init=False)
    threads: int = field(default=0, init=False)
    known: int = field(default=0, init=False)  # workers, the most that the executor spoke of
    total: int = field(init=False)
    _suspects: deque[int] = field(factory=deque, init=False)  # each alone, when nothing else is under way
    _verdict: LostWorkers | None = field(default=None, init=False)  # on one of them, once the others are done
    _deliveries: dict[int, tuple[str, tuple[str, ...]]] = field(factory=dict, init=False)  # number -> host, digests
    _held: dict[str, list[int]] = field(factory=dict, init=False)  # host -> those that wait for files to come there
    _in_vain: int = field(default=0, init=False)  # files brought to a host that misses them as before
    _counted: int = field(default=0, init=False)
    _counted_at: float = field(default=-inf, init=False)
    _event: threading.Event = field(factory=threading.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.total = len(self.waiting)

    @property
    def execution(self) -> Execution:
        """What there is to say afterwards."""
        idle = max(0, self.known - self.total) if self.total else 0
        return Execution(self.engine.name, len(self.workers), self.threads, self.total, sum(self.losses.values()), idle)

    def run(self, receive: Callable[[int, Any], Any]) -> None:
        """Have every task done, each result received once."""
        try:
            while len(self.done) < self.total:
                self._fill()
                for sent in self._finished():
                    self.under_way.remove(sent)
                    self._take(sent, receive)
        except BaseException:
            self._cancel()
            raise

    # -- giving out ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give out tasks until each worker has one, and another one to go on with."""
        if any(sent.is_alone for sent in self.under_way):
            return
        window = 2 * max(self._count(), len(self.workers), 1)
        while self.waiting and len(self.under_way) < window:
            if not self._give(self.waiting.popleft()):
                return
        if not self.under_way and not self.waiting:
            if self._suspects:
                self._give(self._suspects.popleft(), is_alone=True)
            elif self._verdict is not None:
                raise self._verdict

    def _count(self) -> int:
        """How many workers there are. A cluster is asked once a second: it grows, and asking it takes time."""
        if time.monotonic() > self._counted_at + 1:
            known = self.engine.count()
            self.known, self._counted = max(self.known, known or 0), known or guessed_workers()
            self._counted_at = time.monotonic()
        return self._counted

    def _give(self, number: int, is_alone: bool = False) -> bool:
        """Submit a task. False if the executor broke meanwhile."""
        host, wanted = self._deliveries.get(number, (None, ()))
        more = (files_of(self.path, self.digest, wanted),) if host is not None else ()
        try:
            future = self.engine.submit(run_task, self.path, self.digest, number, *more)
        except Exception as error:
            if not is_lost(error):
                raise
            self._lost(Sent(number, None, self.engine.generation, is_alone=is_alone), error)
            return False
        self.under_way.append(Sent(number, future, self.engine.generation, host, is_alone))
        with suppress(AttributeError, NotImplementedError):
            future.add_done_callback(lambda _: self._event.set())
        return True

    def _finished(self) -> list[Sent]:
        """Those that are finished, once there are some."""
        patience = 0.001
        while True:
            self._event.clear()
            found = [sent for sent in self.under_way if sent.future.done()]
            if found or not self.under_way:
                return found
            self._event.wait(patience)
            patience = min(2 * patience, 0.1)

    def _cancel(self) -> None:
        for sent in self.under_way:
            with suppress(Exception):
                sent.future.cancel()

    # -- taking back ---------------------------------------------------------------------------------------------------

    def _take(self, sent: Sent, receive: Callable[[int, Any], Any]) -> None:
        try:
            answer = sent.future.result()
        except BaseException as error:
            if not is_lost(error):
                add_note(error, f"The executor raised this for {self.unit} {sent.number}, and not the work itself.")
                raise
            self._lost(sent, error)
            return
        finally:
            if sent.brings_to is not None:
                del self._deliveries[sent.number]
                self.waiting.extendleft(self._held.pop(sent.brings_to, ()))
        if not isinstance(answer, Answer) or answer.number != sent.number:
            self._lost(sent, RuntimeError("the executor gave what is no answer to it"))
        elif answer.missing:
            self._send_files(sent, answer)
        elif answer.failure is not None:
            raise answer.failure.raised()
        elif sent.number not in self.done:
            self._accept(answer, receive)

    def _accept(self, answer: Answer, receive: Callable[[int, Any], Any]) -> None:
        assert answer.result is not None
        self.done.add(answer.number)
        self.workers.add(answer.worker)
        self.threads = max(self.threads, answer.threads)
        receive(answer.number, loaded(answer.result))

    def _send_files(self, sent: Sent, answer: Answer) -> None:
        """Give a task out again with the files that its machine has not got; others there wait until they came."""
        if answer.host == sent.brings_to:
            self._in_vain += 1
            if self._in_vain > _TRIES:
                raise self._damaged(answer)
        if any(host == answer.host for host, _ in self._deliveries.values()):
            self._held.setdefault(answer.host, []).append(answer.number)
        else:
            self._deliveries[answer.number] = answer.host, answer.missing
            self.waiting.appendleft(answer.number)

    def _damaged(self, answer: Answer) -> BadExecutor:
        return BadExecutor(
            f"a worker on {answer.host} was sent the files of this job {self._in_vain} times, and they are not what "
            f"they were as the job began: {os.path.dirname(self.path)} was altered, or the worker keeps no files in "
            "its temporary folder.\nGive a folder that nothing else writes to in scratch=, one that all see; and "
            "look whether there is room on their disks."
        )

    def _lost(self, sent: Sent, error: BaseException) -> None:
        """A worker is gone. Its task is given to another one."""
        count = self.losses[sent.number] = self.losses.get(sent.number, 0) + 1
        if is_broken(error) and sent.generation == self.engine.generation and not self.engine.renew():
            raise self._error(sent.number, count, error) from error
        # A pool that breaks takes all tasks with it. The one that breaks it is found by running each alone.
        may_be_anothers_fault = is_broken(error) and not sent.is_alone
        if count > self.retries and not may_be_anothers_fault:
            found = self._error(sent.number, count, error)
            found.__cause__ = error
            if not self._suspects:
                raise self._verdict or found
            self._verdict = self._verdict or found
        elif is_broken(error) and count > min(1, self.retries):
            self._suspects.append(sent.number)
        else:
            self.waiting.appendleft(sent.number)

    def _error(self, number: int, count: int, error: BaseException) -> LostWorkers:
        times = "once" if count == 1 else f"{count} times"
        cure = "The system ends processes that take more memory than there is: see its log, and the workers'."
        if not self.workers and self.engine.name == "ProcessPoolExecutor":
            cure = (
                "No worker has answered at all. Where processes are spawned, a script's own work stands under\n"
                f"`if __name__ == '__main__':`, the `with {POOL} as pool:` included."
            )
        words = f"{type(error).__name__}: {str(error).strip() or 'no more was said'}"
        lost = LostWorkers(
            f"{self.unit} {number} was given out {times}, and its worker was lost each time.\n{words}\n{cure}"
        )
        lost.number, lost.execution = number, self.execution
        return lost
