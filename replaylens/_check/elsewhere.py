"""Does the program say what the model says on inputs that it was not captured on?

In: a captured model. Out: a Law. What the model took from its inputs behind torch's back (numpy where torch functions
are switched off, raw pointers) stands in the program as a constant: a replay on other inputs then gives something else
than the model. Where the model reads content in Python and goes another way, a replay says so, and nothing can be
compared.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.node import Ref
from .._core.trees import thaw_shared
from .._replay.record import Record
from .._replay.replay import execute
from .._replay.request import Request
from ..errors import DivergedReplay
from .nonsense import wide
from .outputs import unlike
from .report import Finding, Law
from .subject import UNSTEADY, Subject, open_layers

NAME = "other inputs"


def other_inputs(subject: Subject) -> Law:
    """A plain forward and a replay, both on other inputs than the recorded ones."""
    record = subject.record
    values = {node.name: record.values[Ref(node.name)] for node in record.graph.input_nodes}
    alone = subject.lone_inputs
    others = {name: other for name, value in values.items() if name in alone and (other := _other(value)) is not None}
    if not others:
        return Law(NAME, skipped="no input holds numbers that could be others")
    given = thaw_shared(record.graph.inputs, lambda leaf: (values | others)[leaf.node] if type(leaf) is Ref else leaf)
    others = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in others.items()}
    try:
        output = subject.forward(open_layers(), given=given)
    except Exception as error:
        return _unseen(len(others), f"the model refuses them ({type(error).__name__})")
    law = _compared(record, others, output)
    return law if law or not subject.is_unsteady else _unseen(len(others), UNSTEADY)


def _compared(record: Record, others: dict[str, torch.Tensor], output: Any) -> Law:
    graph = record.graph
    given = {graph.positions[name]: value for name, value in others.items()}
    try:
        ran = execute(record, Request(given=given, on_divergence="raise"))
    except DivergedReplay:
        return _unseen(len(others), "the model takes another path on them, and a replay says so")
    fact, apart = unlike(output, graph.output, lambda ref: ran[ref])
    words = (
        f"on other inputs the model's own output is {fact}: something that depends on the inputs was recorded as a "
        "constant"
    )
    failures = (Finding(NAME, "", words, difference=apart),) if fact else ()
    return Law(NAME, len(others), failures, unit="inputs", holds="the model and a replay agree on others")


def _unseen(count: int, reason: str) -> Law:
    return Law(NAME, count, special=(Finding(NAME, "", reason),), unit="inputs", holds="nothing seen")


def _other(tensor: torch.Tensor) -> torch.Tensor | None:
    """Another value of the same dtype, shape and range; None where there is none that would surely be valid."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.dtype is torch.bool:
        return None
    rolled = tensor.detach().flatten().roll(1).reshape(tensor.shape)
    if tensor.is_floating_point() or tensor.is_complex():
        rolled = rolled.to(wide(tensor.dtype)) * 0.75 + 0.1
    elif torch.equal(rolled, tensor):
        return None
    made = torch.empty_like(tensor).copy_(rolled)
    return made.requires_grad_(tensor.requires_grad)
