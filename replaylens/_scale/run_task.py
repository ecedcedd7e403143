"""What runs in a worker: one task of a job, and an answer that says how it went.

In: the path of a job, its digest, and the number of a task. Out: an Answer. Nothing is raised here but an interrupt: an
error of the work itself travels as data, so that whatever the executor raises is the executor's own. A process keeps
the last jobs that it prepared, runs one task at a time on one thread, and ends when its driver has died.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from attrs import evolve, frozen

from .._ir.util import add_note
from .job_file import Driver, Job, Missing, cloudpickle, host, keep, read_job
from .own_state import KeptState


@frozen(eq=False)
class Prepared:
    """A job that a process is ready to do tasks of."""

    work: Callable[[Any], Any]
    job: Job
    kept: KeptState
    is_seen: bool  # its file is, by this process


_KEPT = 2  # jobs that a process stays prepared for
_prepared: OrderedDict[str, Prepared] = OrderedDict()
_turns = [threading.RLock()]  # threads of one process take turns: they share torch's generators


def _in_a_fork() -> None:
    _turns[:] = [threading.RLock()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)


@frozen(eq=False)
class Failure:
    """An error of the work: itself where it can be pickled, and in words."""

    error: bytes | None
    words: str
    trace: str

    def raised(self) -> BaseException:
        """The error, with the lines of the worker as a note."""
        made = self._itself() or RuntimeError(self.words)
        add_note(made, f"In a worker:\n{self.trace}")
        return made

    def _itself(self) -> BaseException | None:
        with suppress(Exception):  # its class may be known to the workers alone
            return None if self.error is None else loaded(self.error)
        return None


@frozen(eq=False)
class Answer:
    """What a worker says of a task."""

    number: int
    host: str
    pid: int
    threads: int = 0
    result: bytes | None = None
    failure: Failure | None = None
    missing: tuple[str, ...] = ()

    @property
    def worker(self) -> str:
        """The process that says it."""
        return f"{self.host}:{self.pid}"


def run_task(path: str, digest: str, number: int, files: dict[str, bytes] | None = None) -> Answer:
    """Run one task of a job. `files` are those that the machine said it has not got."""
    answer = Answer(number, host(), os.getpid())
    with _turns[0]:
        try:
            if files is not None:
                keep(files)
            ready = _ready_for(path, digest)
            result = ready.work(ready.job.tasks[number])
            ready.kept.require_same()
            result = _dumped(result)
            return evolve(answer, result=result, threads=torch.get_num_threads())
        except Missing as missing:
            return evolve(answer, missing=missing.digests)
        except (Exception, SystemExit) as error:
            return evolve(answer, failure=failure_of(error))


def wait_for_this_process() -> None:
    """Wait for a task that runs in a thread of this process: it holds torch's generators. Those that wait for their
    turn find that their job is over.
    """
    with _turns[0]:
        pass


def _ready_for(path: str, digest: str) -> Prepared:
    """A job, prepared once."""
    if digest not in _prepared:
        job = read_job(path, digest)
        _enter(job.driver)
        kept = KeptState(job.payload)  # before the functions are called for the first time
        _prepared[digest] = Prepared(job.setup(job.payload), job, kept, os.path.exists(path))
    _prepared.move_to_end(digest)
    while len(_prepared) > _KEPT:
        _prepared.popitem(last=False)
    ready = _prepared[digest]
    if ready.is_seen and not os.path.exists(path):
        raise FileNotFoundError(f"{path} is gone: the job is over, and nobody waits for the rest of it.")
    if not ready.job.driver.is_here and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    return ready


def _enter(driver: Driver) -> None:
    """Make the process one of workers: one thread, and no life beyond its driver's."""
    if driver.is_here:
        return
    torch.set_num_threads(1)
    if is_child_of(driver):
        name = f"replaylens: until {driver.pid} ends"
        if not any(one.name == name for one in threading.enumerate()):
            threading.Thread(target=_end_with, args=(driver.pid,), name=name, daemon=True).start()


def is_child_of(driver: Driver) -> bool:
    """True if this process was started by the driver on the same machine."""
    parent = multiprocessing.parent_process()
    return driver.host == host() and driver.pid in (os.getppid(), parent and parent.pid)


def _end_with(pid: int) -> None:
    """End this process once its parent has ended: the queue that it waits at would never close."""
    parent = multiprocessing.parent_process()
    by_name = parent is not None and parent.pid == pid
    while os.getppid() == pid or (by_name and parent is not None and parent.is_alive()):
        time.sleep(0.2)
    os._exit(1)


# -- what is sent back -------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """A pickler that sends of a tensor what is in it, and not all of the memory that it is a view of; and an error
    as its class says, whatever else the process has installed for errors.
    """

    def reducer_override(self, what: Any) -> Any:
        if isinstance(
            what, BaseException
        ):  # by its own rule: a library's for all of them would lose `code` and the like
            return what.__reduce_ex__(5)
        if type(what) is not torch.Tensor or what.layout is not torch.strided or what.device.type != "cpu":
            return NotImplemented
        if what.requires_grad or what.is_conj() or what.is_neg() or what.is_quantized or not what.is_contiguous():
            return NotImplemented
        flat = what.reshape(-1).view(torch.uint8) if what.numel() else torch.empty(0, dtype=torch.uint8)
        return _tensor_of, (flat.numpy().tobytes(), what.dtype, tuple(what.shape))


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    with torch.device("cpu"):  # whatever the default is
        made = torch.empty(shape, dtype=dtype)  # whose memory is aligned as torch aligns it
        if data:
            made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return made


def _dumped(what: Any) -> bytes:
    """A result as bytes. The executor's own way would send tensors by handles of memory, which die with a worker."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(what)
        return buffer.getvalue()
    except Exception:
        if (library := cloudpickle()) is None:
            raise
        return library.dumps(what, protocol=5)


def loaded(data: bytes) -> Any:
    """A result from its bytes."""
    return pickle.loads(data)


def failure_of(error: BaseException) -> Failure:
    """An error as data that another process can have."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    words = traceback.format_exception_only(type(error), error)[0].rstrip()
    return Failure(_as_it_is(error), words, trace)


def _as_it_is(error: BaseException) -> bytes | None:
    """An error as bytes that give it back; None where its class does not allow that."""
    try:
        data = _dumped(error)
        again = loaded(data)
        return data if type(again) is type(error) and str(again) == str(error) else None
    except Exception:
        return None
