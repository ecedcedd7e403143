"""check_many: the check of each of many models, here or by the workers of an executor.

In: by name, functions that make a model and its inputs, or these. Out: CheckReports: a report for each, or the error
that kept a model from being checked. One that ends its process is such an error too, and the others are checked.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from attrs import field, frozen

from .._check.report import CheckReport
from .._ir.util import optional
from .._scale.distribute import Execution, distribute
from .._scale.run_task import Failure, failure_of
from .._sweep.batch_runner import progress_bar
from .._sweep.sweep_job import Surroundings
from .._sweep.task_draws import drawing_apart, seeds_now
from ..errors import LostWorkers, ReplaylensError
from ..program import check


@frozen(eq=False)
class NotChecked:
    """In the place of a report: the error that kept a model from being checked. It is not truthy."""

    error: BaseException

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return "".join(traceback.format_exception(self.error)).rstrip()

    @property
    def line(self) -> str:
        """The error in a line."""
        words = str(self.error).strip().partition("\n")[0]
        return f"{type(self.error).__name__}: {words}" if words else type(self.error).__name__


@frozen(eq=False, repr=False)
class CheckReports(Mapping[str, CheckReport | NotChecked]):
    """The reports of many models by name. Truthy if each was checked and every law holds."""

    _found: Mapping[str, CheckReport | NotChecked]
    execution: Execution | None = None  # where an executor ran them; None if they ran in this process

    def __getitem__(self, name: str) -> CheckReport | NotChecked:
        if name not in self._found:
            raise KeyError(f"no model is named {name!r}. There are: {', '.join(map(str, self._found))}.")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __bool__(self) -> bool:
        return all(self._found.values())

    @property
    def broken(self) -> dict[str, CheckReport]:
        """The reports of the models of which a law is broken, or a value is stale."""
        return {name: one for name, one in self.items() if isinstance(one, CheckReport) and not one}

    @property
    def errors(self) -> dict[str, BaseException]:
        """The errors of the models that could not be checked."""
        return {name: one.error for name, one in self.items() if isinstance(one, NotChecked)}

    def to_pandas(self) -> Any:
        """A row for each model: whether all laws hold, which are broken or were skipped, how many cases could not be
        decided, the error.
        """
        return optional("pandas", "pandas").DataFrame([_row(name, one) for name, one in self.items()])

    def __repr__(self) -> str:
        return f"<CheckReports: {self._headline}>"

    def __str__(self) -> str:
        wide = max(len(str(name)) for name in self)
        rows = [f"    {name!s:<{wide}}  {_line(one)}".rstrip() for name, one in self.items()]
        ran = [] if self.execution is None else [f"    run as {self.execution}"]
        details = [f"\n{name}\n{one}" for name, one in self.broken.items()]
        return "\n".join([f"Check of {self._headline}", *rows, *ran, *details])

    @property
    def _headline(self) -> str:
        models = f"{len(self)} model{'s' * (len(self) != 1)}"
        if self:
            return f"{models}: all laws hold."
        said = [f"{len(self.broken)} broken"] * bool(self.broken) + [f"{len(self.errors)} not checked"] * bool(
            self.errors
        )
        return f"{models}: {', '.join(said)}."


def _line(one: CheckReport | NotChecked) -> str:
    if isinstance(one, NotChecked):
        return f"not checked: {one.line}"
    return str(one).partition("\n")[0].partition(": ")[2]


def _row(name: str, one: CheckReport | NotChecked) -> dict[str, Any]:
    laws = one.laws if isinstance(one, CheckReport) else ()
    return {
        "model": name,
        "holds": bool(one),
        "broken": ", ".join([law.name for law in laws if not law]),
        "skipped": ", ".join([law.name for law in laws if law.skipped]),
        "undecided": sum(len(law.special) for law in laws),
        "error": one.line if isinstance(one, NotChecked) else "",
    }


def check_many(
    models: Any,
    *,
    sample: float | None = None,
    progress: bool | None = None,
    executor: Any = None,
    scratch: Any = None,
    retries: int = 3,
) -> CheckReports:
    """Check many models as `check` does: `check_many({"small": make_small, "large": (model, x)})`.

    A value is a function that returns `(model, *inputs)`, which is called where the model is checked, or such a tuple.
    Keywords of a forward go by `functools.partial(model, mask=mask)`. An error of one model stands in its place, and
    the others are checked. `executor` has each model checked by another process, as `sweep` says: functions are the
    better form there, since then no weights travel. A model that ends its worker is an error of that model.

    >>> found = check_many({"linear": lambda: (torch.nn.Linear(2, 3), torch.ones(1, 2)), "none": lambda: 1 / 0})
    >>> bool(found["linear"]), list(found.errors)
    (True, ['none'])
    """
    if not isinstance(models, Mapping) or not models:
        raise ReplaylensError("give the models by name: check_many({name: make}), where make() gives (model, *inputs).")
    if executor is not None:
        return _elsewhere(dict(models), sample, executor, scratch=scratch, retries=retries, progress=progress)
    found: dict[str, CheckReport | NotChecked] = {}
    with progress_bar(len(models), progress, "model") as tick:
        for name, one in models.items():
            try:
                found[name] = _checked(name, one, sample)
            except Exception as error:
                found[name] = NotChecked(error)
            tick(1)
    return CheckReports(found)


def _checked(name: str, given: Any, sample: float | None) -> CheckReport:
    made = given if isinstance(given, (tuple, list)) else given()
    if not isinstance(made, (tuple, list)) or not made or not callable(made[0]):
        raise TypeError(f"{name!r} is to be (model, *inputs), or a function that returns that; not {made!r:.80}.")
    return check(*made, sample=sample, progress=False)


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class ChecksJob:
    """What the checks of many models share."""

    may_keep_state: ClassVar[bool] = True  # a model is checked in one task, and by nobody else
    models: Mapping[str, Any]
    sample: float | None
    seeds: Mapping[str, int] = field(factory=seeds_now)
    surroundings: Surroundings = field(factory=Surroundings)


def begin_checks(job: ChecksJob) -> Callable[[int], CheckReport | Failure]:
    """The function that checks a model, in a process that checks some of them."""
    names = list(job.models)

    def work(number: int) -> CheckReport | Failure:
        name = names[number]
        try:
            with job.surroundings.entered():
                return drawing_apart(job.seeds, number, lambda: _checked(name, job.models[name], job.sample))[0]
        except Exception as error:
            return failure_of(error)

    return work


def _elsewhere(models: dict[str, Any], sample: float | None, executor: Any, **how: Any) -> CheckReports:
    """Models by the workers of an executor. Those that end their workers are left out, and the rest goes on."""
    names, job = list(models), ChecksJob(models, sample)
    found: dict[str, CheckReport | NotChecked] = {}
    before: list[Execution] = []
    while True:
        left = [number for number, name in enumerate(names) if name not in found]

        def receive(place: int, one: CheckReport | Failure, left: list[int] = left) -> None:
            found[names[left[place]]] = NotChecked(one.raised()) if isinstance(one, Failure) else one

        try:
            execution = distribute(executor, begin_checks, job, left, receive, unit="model", **how)
        except LostWorkers as error:
            if error.number is None or (not found and len(names) > 1):
                raise  # the workers themselves are at fault
            found[names[left[error.number]]] = NotChecked(error)
            if isinstance(error.execution, Execution):
                before.append(error.execution)
        else:
            return CheckReports({name: found[name] for name in names}, _together([*before, execution], len(names)))


def _together(several: list[Execution], tasks: int) -> Execution:
    """One after another, as one."""
    workers, threads = max(one.workers for one in several), max(one.threads for one in several)
    return Execution(
        several[0].engine, workers, threads, tasks, sum(one.resubmitted for one in several), several[0].idle
    )
