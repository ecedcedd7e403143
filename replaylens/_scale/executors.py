"""The executors that people have, as one kind of thing: it takes work, says how many workers it has, and can be had
again after it broke.

In: anything with `submit(fn, *args)`, or a function that makes one. Out: an Engine. Executors are known by the names of
their classes, so that none of their libraries is imported here; one that is not known gets what is common to all.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from attrs import define, field, frozen

from ..errors import BadExecutor

POOL = "ProcessPoolExecutor(8, mp_context=get_context('spawn'))"
_LOST = frozenset(
    """BrokenExecutor BrokenProcessPool TerminatedWorkerError WorkerCrashedError ActorDiedError NodeDiedError
    LocalRayletDiedError ObjectLostError OwnerDiedError OutOfMemoryError KilledWorker CancelledError LostRun
    ConnectionError CommClosedError EOFError WorkerLost ManagerLost WorkerDied UncompletedJobError FailedJobError
    NannyDied TaskPlacementGroupRemoved TaskCancelledError""".split()
)
_BROKEN = frozenset(["BrokenExecutor", "BrokenProcessPool", "TerminatedWorkerError"])


def is_lost(error: BaseException) -> bool:
    """True if an executor says that a worker is gone, rather than that something is wrong with the work."""
    return any(cls.__name__ in _LOST for cls in type(error).__mro__)


def is_broken(error: BaseException) -> bool:
    """True if an executor says that it takes no more work."""
    return any(cls.__name__ in _BROKEN for cls in type(error).__mro__)


@frozen(eq=False)
class Kind:
    """What is special about the executors of one class."""

    name: str
    count: Callable[[Any], Any]  # how many tasks it runs at once
    options: Mapping[str, Any] = field(factory=dict)  # for its submit
    again: Callable[[Any], Any] | None = None  # one like it
    is_shared: bool = False  # what `again` gives belongs to everybody, and is not ours to shut down
    refuse: Callable[[Any], None] = lambda executor: None


def _most_workers(executor: Any) -> Any:
    return getattr(executor, "_max_workers", None)


def _pool_again(executor: Any) -> Any:
    """A ProcessPoolExecutor with the settings of another one."""
    settings = {
        "max_workers": executor._max_workers,
        "mp_context": executor._mp_context,
        "initializer": executor._initializer,
        "initargs": executor._initargs,
    }
    if getattr(executor, "_max_tasks_per_child", None) is not None:
        settings["max_tasks_per_child"] = executor._max_tasks_per_child
    return _base_of(executor, "concurrent.futures.process.ProcessPoolExecutor")(**settings)


def _refuse_fork(executor: Any) -> None:
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise BadExecutor(
            "this ProcessPoolExecutor forks its processes, and a process that is forked after torch has used its "
            f"threads can hang.\nGive one that spawns them: {POOL}"
        )


def _loky_again(executor: Any) -> Any:
    module = sys.modules[_base_of(executor, "loky.reusable_executor._ReusablePoolExecutor").__module__]
    return module.get_reusable_executor(**_settings_of_loky(executor))


def _loky_pool_again(executor: Any) -> Any:
    return _base_of(executor, "loky.process_executor.ProcessPoolExecutor")(**_settings_of_loky(executor))


def _settings_of_loky(executor: Any) -> dict[str, Any]:
    names = ("max_workers", "context", "timeout", "initializer", "initargs", "env")
    return {name: getattr(executor, f"_{name}") for name in names if hasattr(executor, f"_{name}")}


def _refuse_asynchronous(client: Any) -> None:
    if getattr(client, "asynchronous", False):
        raise BadExecutor("this Client of Dask is asynchronous. Give one that is not: Client(..., asynchronous=False)")


def _refuse_kernel(kernel: Any) -> None:
    raise BadExecutor(
        "submit of a DataFlowKernel of Parsl takes other arguments than a function's. Give\n"
        "parsl.concurrent.ParslPoolExecutor(dfk=kernel)"
    )


def _threads_of_dask(client: Any) -> int:
    return sum(client.ncores().values())


_KINDS = {
    "concurrent.futures.process.ProcessPoolExecutor": Kind(
        "ProcessPoolExecutor", _most_workers, again=_pool_again, refuse=_refuse_fork
    ),
    "concurrent.futures.thread.ThreadPoolExecutor": Kind("ThreadPoolExecutor", _most_workers),
    "loky.reusable_executor._ReusablePoolExecutor": Kind("loky", _most_workers, again=_loky_again, is_shared=True),
    "loky.process_executor.ProcessPoolExecutor": Kind("loky", _most_workers, again=_loky_pool_again),
    "parsl.dataflow.dflow.DataFlowKernel": Kind("Parsl", _most_workers, refuse=_refuse_kernel),
    "parsl.concurrent.ParslPoolExecutor": Kind("Parsl", lambda executor: None),
    "distributed.client.Client": Kind("Dask", _threads_of_dask, options={"pure": False}, refuse=_refuse_asynchronous),
}


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("joblib.externals.")


def _base_of(executor: Any, name: str) -> Any:
    return next(cls for cls in type(executor).__mro__ if _name_of(cls) == name)


def _kind_of(executor: Any) -> Kind:
    for cls in type(executor).__mro__:
        if _name_of(cls) in _KINDS:
            return _KINDS[_name_of(cls)]
    name = getattr(executor, "engine_name", None) or type(executor).__name__
    return Kind(name, lambda one: one.workers() if hasattr(one, "workers") else _most_workers(one))


@define(eq=False)
class Engine:
    """An executor in use."""

    executor: Any
    kind: Kind
    make: Callable[[], Any] | None = None
    is_ours: bool = False
    generation: int = 0  # how often it was had again

    @property
    def name(self) -> str:
        """What people call it."""
        return self.kind.name

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        """A future of a call."""
        future = self.executor.submit(function, *args, **self.kind.options)
        if not all(callable(getattr(future, name, None)) for name in ("done", "result")):
            raise BadExecutor(
                f"what submit of this {type(self.executor).__name__} gives is of class {type(future).__name__}, and "
                "has no done() and result(): it is no future."
            )
        return future

    def count(self) -> int | None:
        """How many tasks run at once; None if the executor does not say."""
        with suppress(Exception):
            known = self.kind.count(self.executor)
            return int(known) if known else None
        return None

    def renew(self) -> bool:
        """Have one like it in its place after it broke. False if there is no way to."""
        make = self.make or (self.kind.again and (lambda: self.kind.again(self.executor)))  # type: ignore[misc]
        if not make:
            return False
        made = make()
        self.close()
        self.executor, self.kind = made, _kind_of(made)
        self.is_ours = self.make is not None or not self.kind.is_shared
        self.generation += 1
        return True

    def close(self, at_once: bool = False) -> None:
        """Shut down an executor that we made; `at_once` ends its processes, whatever they do."""
        if not self.is_ours:
            return
        self.is_ours = False
        if at_once:
            for process in list((getattr(self.executor, "_processes", None) or {}).values()):
                with suppress(Exception):
                    process.terminate()
        for name in ("shutdown", "close"):
            if callable(shut := getattr(self.executor, name, None)):
                shut()
                return


def engine_of(given: Any) -> Engine:
    """The engine of an executor, or of a function that makes one."""
    if isinstance(given, (type, ModuleType)) or not hasattr(given, "submit"):
        return _made_by(given)
    kind = _kind_of(given)
    kind.refuse(given)
    return Engine(given, kind)


def require_executor(given: Any) -> None:
    """Raise if something is neither an executor nor a function that may make one; nothing is made."""
    if isinstance(given, (type, ModuleType)) or not hasattr(given, "submit"):
        if isinstance(given, (type, ModuleType)) or not callable(given) or _needs_arguments(given):
            raise BadExecutor(_cure(given))
    else:
        _kind_of(given).refuse(given)


def _made_by(given: Any) -> Engine:
    require_executor(given)
    made = given()
    if not hasattr(made, "submit"):
        raise BadExecutor(f"the function given as executor= gave {_shown(made)}. {_cure(made)}")
    kind = _kind_of(made)
    kind.refuse(made)
    return Engine(made, kind, make=given, is_ours=True)


def _needs_arguments(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return True
    return False


def _cure(given: Any) -> str:
    """What is wrong with something that takes no work, and what to give."""
    name = given.__name__ if isinstance(given, (type, ModuleType)) else type(given).__name__
    said = f"executor= takes something with submit(fn, *args), and not {_shown(given)}."
    word = (given if isinstance(given, str) else name).lower()
    if isinstance(given, type) and hasattr(given, "submit"):
        return f"{said} Make one: {name}(...)"
    if "ray" in word:
        return f"{said} For Ray: executor=replaylens.on_ray(num_cpus=1)"
    if any(known in word for known in ("dask", "distributed", "cluster")):
        return f"{said} For Dask: executor=Client(cluster), of dask.distributed"
    if any(known in word for known in ("joblib", "parallel", "loky")):
        return f"{said} For joblib: executor=loky.get_reusable_executor(max_workers=8)"
    return f"{said} Processes of this machine: executor={POOL}"


def _shown(given: Any) -> str:
    if isinstance(given, ModuleType):
        return f"the module {given.__name__}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, (str, int, float, bool)) else f"a {type(given).__name__}"


def guessed_workers() -> int:
    """How many workers an executor may have that does not say."""
    return os.cpu_count() or 1
