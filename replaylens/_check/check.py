"""check: all laws of a program, and of a model and its program, as lists.

In: a program under check; a model under check. Out: a CheckReport. Nothing of the program is changed, nor any
generator. A new law is an entry of one of the lists here, or of `NODE_LAWS` if it is asked of each call by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import frozen

from .aten_audit import audit
from .hook_comparison import witness
from .model_under_test import ModelUnderTest
from .per_node import NODE_LAWS
from .program_under_test import ProgramUnderTest, saved_values, well_formed, whole_replay
from .replay_comparison import gradients, other_inputs
from .report import CheckReport, LawResult

T = TypeVar("T", ProgramUnderTest, ModelUnderTest)


@frozen
class Law(Generic[T]):
    """What holds of everything that is right: a name, the sentence that it holds, and how it is asked."""

    name: str
    sentence: str
    ask: Callable[[T], LawResult]

    def result(self, subject: T) -> LawResult:
        """What comes of asking it."""
        return self.ask(subject).of(self.name)


GRAPH = Law(
    "graph",
    "every value is made before it is read, by exactly one node; whatever the model returned, wrote or read in Python "
    "is the value of a node",
    well_formed,
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
    Law("completeness", "the ATen calls of a plain forward are those of a whole replay", audit),
    Law("witness", "forward hooks on every module see, bit for bit, the outputs that the program has", witness),
    Law("other inputs", "the model and a replay agree on inputs of the same shapes with other numbers", other_inputs),
    Law("gradients", "a backward pass gives what the model's own backward gives, bit for bit", gradients),
)


def check(program: ProgramUnderTest) -> CheckReport:
    """Ask every law of a program; of a graph that is not well formed no other can be asked."""
    require_sample(program.sample)
    graph = GRAPH.result(program)
    unasked = LawResult(skipped="the graph is not well formed")
    results = [graph if law is GRAPH else law.result(program) if graph else unasked.of(law.name) for law in LAWS]
    return CheckReport(program.graph.model_name, tuple(results))


def with_model(model: ModelUnderTest, report: CheckReport) -> CheckReport:
    """The report on its program with what plain forwards of the model say."""
    return report.and_(tuple([law.result(model) for law in MODEL_LAWS]))


def require_sample(sample: float | None) -> None:
    """Is it a number of nodes, or a share of them?"""
    is_number = isinstance(sample, (int, float)) and not isinstance(sample, bool)
    fits = is_number and (0 < sample <= 1 if isinstance(sample, float) else sample > 0)  # type: ignore[operator]
    if sample is not None and not fits:
        raise ValueError(f"sample is a number of nodes, or a share of them between 0 and 1, not {sample!r}.")
