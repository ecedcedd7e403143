"""The laws that the model and a replay agree on other inputs and on gradients.

In: a captured model. Out: a LawResult. What the model read from its inputs behind torch's back (numpy where torch
functions are switched off, raw pointers) is a constant in the program, so a replay on other inputs differs from the
model. If the model takes another path on them, the replay says so, and nothing is compared. For gradients the outputs
of a plain forward and of a replay are each reduced to one number with the same random coefficients. No `.grad` is
touched, and the model is left as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from .._capture.provenance import Provenance
from .._capture.scopes import addresses
from .._ir.equality import difference, same
from .._ir.node import Ref
from .._ir.trees import thaw_shared
from .._replay.flag_guards import OuterModes, departures
from .._replay.record import Record
from .._replay.replay import execute
from .._replay.request import Request
from ..errors import DivergedReplay, NotDifferentiable, StaleValue
from .model_under_test import UNSTEADY, ModelUnderTest, open_layers
from .output_comparison import side_by_side, unlike
from .perturbations import wide
from .report import Finding, LawResult


def gradients(subject: ModelUnderTest) -> LawResult:
    """Compare the gradients of a plain forward with those of a replay."""
    if not subject.record.graph.ambient.grad or subject.record.graph.ambient.inference:
        return LawResult(skipped="gradients are off; check the model with them on")
    values = [subject.record.values[Ref(node.name)] for node in subject.record.graph.input_nodes]
    if any(value.grad_fn is not None for value in values):
        return LawResult(skipped="an input has a history of its own, which ends where a program begins")
    flagged = _inputs(subject, True)
    away = _path_change(subject, flagged)
    law = None if away else _gradients_on(subject, flagged)
    if law is None:
        law = _gradients_on(subject, _inputs(subject, False))
        if away and (law is None or not (law.asked or law.skipped)):
            return LawResult(skipped=away)
    if law is None:
        return LawResult(skipped="the model cannot be run and differentiated a second time")
    if law:
        return law
    return LawResult(law.asked, special=(Finding("", UNSTEADY),)) if subject.is_nondeterministic else law


def _path_change(subject: ModelUnderTest, inputs: dict[str, torch.Tensor]) -> str:
    """Why the model would take another path on these inputs; "" if it would not."""
    record = subject.record
    given: dict[Ref, torch.Tensor] = {Ref(name): value for name, value in inputs.items()}
    found = next(departures(record.graph, record.values, given, OuterModes.now()), None)
    return f"the model goes another way where an input needs gradients: it asks for {found.what}" if found else ""


@frozen(eq=False)
class _Backward:
    """The result of one backward pass."""

    gradients: Mapping[str, torch.Tensor | None]  # by leaf
    needing: Mapping[str, bool]  # by output: whether it requires a gradient


def _inputs(subject: ModelUnderTest, flagged: bool) -> dict[str, torch.Tensor]:
    """Copies of the replaceable inputs with their `requires_grad`, or with it set wherever possible if `flagged`."""
    record, names = subject.record, subject.replaceable_inputs
    values = {node.name: record.values[Ref(node.name)] for node in record.graph.input_nodes if node.name in names}
    plain = {name: value for name, value in values.items() if type(value) is torch.Tensor and not value.is_inference()}
    return {
        name: value.detach().clone().requires_grad_(value.requires_grad or flagged)
        for name, value in plain.items()
        if value.is_floating_point() and value.layout is torch.strided and not value.is_quantized
    }


def _gradients_on(subject: ModelUnderTest, inputs: dict[str, torch.Tensor]) -> LawResult | None:
    """The law on these inputs; None if the model refuses them or takes another path."""
    graph = subject.record.graph
    values = {node.name: subject.record.values[Ref(node.name)] for node in graph.input_nodes}
    given = thaw_shared(graph.inputs, lambda leaf: (values | inputs)[leaf.node] if type(leaf) is Ref else leaf)
    copies = {n: value.detach().clone().requires_grad_(value.requires_grad) for n, value in inputs.items()}
    again = {graph.positions[name]: copy for name, copy in copies.items()}
    try:
        subject.begin()
        leaves = _leaves(subject, inputs)  # before the forward, which may create others
        output = subject.forward(open_layers(), given=given)
        pairs = side_by_side(output, graph.output)
        wanted = _backward([(str(ref), tensor) for tensor, ref in pairs], leaves)
        subject.begin()
    except Exception:
        return None
    try:
        ran = execute(subject.record, Request(given=again, grad=True, whole=True, on_divergence="raise"))
    except DivergedReplay:
        return None
    except (NotDifferentiable, StaleValue) as error:
        return LawResult(skipped=str(error).partition("\n")[0])
    leaves |= {name: copy for name, copy in copies.items() if name in leaves}
    try:
        found = _backward([(str(ref), ran[ref]) for _, ref in pairs], leaves)
    except Exception as error:
        return LawResult(len(leaves), (Finding("", f"a replay's backward raises {type(error).__name__}"),))
    return _compared(wanted, found)


def _leaves(subject: ModelUnderTest, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves that receive gradients: inputs, parameters, and other state of the model."""
    named = addresses(Provenance(subject.model).table)
    found = {name: value for name, value in inputs.items() if value.requires_grad}
    for node in subject.record.graph.state_nodes:
        if (tensor := subject.record.live.get(node.name)) is not None:
            found[node.address] = tensor
    for module in Provenance(subject.model).modules:
        for key, tensor in module._parameters.items():
            if tensor is not None:
                found.setdefault(f"{named[id(module)]}.{key}".lstrip("."), tensor)
    once = {id(tensor): name for name, tensor in found.items()}
    return {name: t for name, t in found.items() if t.requires_grad and t.is_leaf and once[id(t)] == name}


def _backward(outputs: Sequence[tuple[str, torch.Tensor]], leaves: dict[str, torch.Tensor]) -> _Backward:
    """One backward pass from a random combination of the outputs, the same for the same shapes."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # a backward may draw
    roots, weights = [], []
    for _, output in outputs:
        weight = torch.randn(output.shape, generator=draw, dtype=torch.float64) if not output.is_nested else None
        if output.requires_grad and weight is not None:
            roots.append(output)
            weights.append(weight.to(output.dtype).to(output.device))
    if not roots or not leaves:
        return _Backward(dict.fromkeys(leaves), {name: output.requires_grad for name, output in outputs})
    made = torch.autograd.grad(roots, list(leaves.values()), weights, allow_unused=True)
    return _Backward(dict(zip(leaves, made, strict=True)), {name: output.requires_grad for name, output in outputs})


def _compared(wanted: _Backward, found: _Backward) -> LawResult:
    failures = []
    for name, needs in wanted.needing.items():
        if found.needing[name] != needs:
            words = ("needs", "does not") if needs else ("does not need", "does")
            failures.append(Finding(name, f"the model's output {words[0]} gradients, a replay's {words[1]}"))
    for name, gradient in wanted.gradients.items():
        other = found.gradients[name]
        if gradient is None or other is None:
            if gradient is not other:
                words = ("none", "one") if gradient is None else ("one", "none")
                fact = f"the model gives {name} {words[0]} as its gradient, a replay {words[1]}"
                failures.append(Finding("", fact))
        elif not same(gradient, other):
            far = difference(gradient, other)
            failures.append(Finding("", f"the gradient of {name} is another than the model's", difference=far))
    return LawResult(len(wanted.gradients), tuple(failures), unit="leaves", holds="the model's own, bit for bit")


def other_inputs(subject: ModelUnderTest) -> LawResult:
    """Compare a plain forward with a replay on other inputs than the recorded ones."""
    record = subject.record
    values = {node.name: record.values[Ref(node.name)] for node in record.graph.input_nodes}
    names = subject.replaceable_inputs
    others = {
        name: other for name, value in values.items() if name in names and (other := _other_value(value)) is not None
    }
    if not others:
        return LawResult(skipped="no input holds numbers that could be others")
    given = thaw_shared(record.graph.inputs, lambda leaf: (values | others)[leaf.node] if type(leaf) is Ref else leaf)
    others = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in others.items()}
    try:
        output = subject.forward(open_layers(), given=given)
    except Exception as error:
        return _undecided(len(others), f"the model refuses them ({type(error).__name__})")
    law = _replay_agrees(record, others, output)
    return law if law or not subject.is_nondeterministic else _undecided(len(others), UNSTEADY)


def _replay_agrees(record: Record, others: dict[str, torch.Tensor], output: Any) -> LawResult:
    graph = record.graph
    given = {graph.positions[name]: value for name, value in others.items()}
    try:
        ran = execute(record, Request(given=given, on_divergence="raise"))
    except DivergedReplay:
        return _undecided(len(others), "the model takes another path on them, and a replay says so")
    fact, apart = unlike(output, graph.output, lambda ref: ran[ref])
    words = (
        f"on other inputs the model's own output is {fact}: something that depends on the inputs was recorded as a "
        "constant"
    )
    failures = (Finding("", words, difference=apart),) if fact else ()
    return LawResult(len(others), failures, unit="inputs", holds="the model and a replay agree on others")


def _undecided(count: int, reason: str) -> LawResult:
    return LawResult(count, special=(Finding("", reason),), unit="inputs", holds="nothing seen")


def _other_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Another value of the same dtype, shape and range; None if none is certain to be valid."""
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
