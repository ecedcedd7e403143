"""The lists of laws, and the checks that go through them.

In: a program or a model under test. Out: a CheckReport. Neither the program nor any random generator is changed. To
add a law, add an entry to one of the lists here, or to `NODE_LAWS` if the law is about each call on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import frozen

from .aten_audit import audit_aten_calls
from .model_comparison import compare_with_hooks, gradients_agree, other_inputs_agree
from .model_under_test import ModelUnderTest
from .per_node import NODE_LAWS
from .program_under_test import ProgramUnderTest, is_well_formed, saved_values, whole_replay
from .report import CheckReport, Finding, LawResult

T = TypeVar("T", ProgramUnderTest, ModelUnderTest)


@frozen
class Law(Generic[T]):
    """A property of every correct program: its name, what it asserts, and the function that checks it."""

    name: str
    sentence: str
    ask: Callable[[T], LawResult]

    def result(self, subject: T) -> LawResult:
        """The result of checking it, under its name."""
        return self.ask(subject).of(self.name)


GRAPH = Law(
    "graph",
    "every value is made before it is read, by exactly one node; whatever the model returned, wrote or read in Python "
    "is the value of a node; no call gives far more than is said of it",
    is_well_formed,
)
LAWS: tuple[Law[ProgramUnderTest], ...] = (
    Law(
        "whole replay",
        "a replay without changes returns what the model returned, in the same structure, and writes what the model "
        "wrote",
        whole_replay,
    ),
    *[Law(law.name, law.sentence, law.of) for law in NODE_LAWS],
    GRAPH,
    Law(
        "saved values",
        "none was overwritten since the capture, and all have the shape, dtype and device that the program states",
        saved_values,
    ),
)
MODEL_LAWS: tuple[Law[ModelUnderTest], ...] = (
    Law("completeness", "the ATen calls of a plain forward are those of a whole replay", audit_aten_calls),
    Law(
        "witness",
        "forward hooks on every module see, bit for bit, the outputs that the program has",
        compare_with_hooks,
    ),
    Law(
        "other inputs",
        "the model and a replay agree on inputs of the same shapes with other numbers",
        other_inputs_agree,
    ),
    Law("gradients", "a backward pass gives what the model's own backward gives, bit for bit", gradients_agree),
)


def check(program: ProgramUnderTest) -> CheckReport:
    """Check every law of a program. If the graph is not well formed, the other laws are skipped."""
    require_sample(program.sample)
    graph = GRAPH.result(program)
    unasked = LawResult(skipped="the graph is not well formed")
    results = [graph if law is GRAPH else _result(law, program) if graph else unasked.of(law.name) for law in LAWS]
    return CheckReport(program.graph.model_name, tuple(results))


def _result(law: Law[ProgramUnderTest], program: ProgramUnderTest) -> LawResult:
    """The result of a law. A program of a file can say anything, and so make anything fail that looks at its values."""
    try:
        return law.result(program)
    except Exception as error:
        return LawResult(failures=(Finding("", f"raises {type(error).__name__} while it is checked"),)).of(law.name)


def check_model(model: ModelUnderTest, report: CheckReport) -> CheckReport:
    """Add the laws that need plain forward passes of the model to the report on its program."""
    return report.and_(tuple([law.result(model) for law in MODEL_LAWS]))


def require_sample(sample: float | None) -> None:
    """Raise unless `sample` is None, a number of nodes, or a fraction of them."""
    is_number = isinstance(sample, (int, float)) and not isinstance(sample, bool)
    fits = is_number and (0 < sample <= 1 if isinstance(sample, float) else sample > 0)  # type: ignore[operator]
    if sample is not None and not fits:
        raise ValueError(f"sample is a number of nodes, or a share of them between 0 and 1, not {sample!r}.")
