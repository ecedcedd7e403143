"""Does a backward pass through the program give what one through the model gives?

In: a captured model. Out: a Law. One random number is made of the outputs of a plain forward, and of those of a replay,
with the same coefficients. It must need gradients where the model's does, and give every parameter and every input the
same ones. Nothing collects gradients, and the model is afterwards as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen

from .._capture.origins import Origins
from .._capture.scopes import addresses
from .._core.node import Ref
from .._core.sameness import difference, same
from .._core.trees import thaw_shared
from .._replay.flag_guards import Around, departures
from .._replay.replay import execute
from .._replay.request import Request
from ..errors import DivergedReplay, NotDifferentiable, StaleValue
from .outputs import side_by_side
from .report import Finding, Law
from .subject import UNSTEADY, Subject, open_layers

NAME = "gradients"


def gradients(subject: Subject) -> Law:
    """A plain forward and a replay, both differentiated."""
    if not subject.record.graph.ambient.grad or subject.record.graph.ambient.inference:
        return Law(NAME, skipped="gradients are off; check the model with them on")
    values = [subject.record.values[Ref(node.name)] for node in subject.record.graph.input_nodes]
    if any(value.grad_fn is not None for value in values):
        return Law(NAME, skipped="an input has a history of its own, which ends where a program begins")
    flagged = _inputs(subject, True)
    away = _led_away(subject, flagged)
    law = None if away else _asked(subject, flagged)
    if law is None:
        law = _asked(subject, _inputs(subject, False))
        if away and (law is None or not (law.asked or law.skipped)):
            return Law(NAME, skipped=away)
    if law is None:
        return Law(NAME, skipped="the model cannot be run and differentiated a second time")
    if law:
        return law
    return Law(NAME, law.asked, special=(Finding(NAME, "", UNSTEADY),)) if subject.is_unsteady else law


def _led_away(subject: Subject, inputs: dict[str, torch.Tensor]) -> str:
    """Why the model would go another way on these inputs than it was captured; empty if it would not."""
    record = subject.record
    given: dict[Ref, torch.Tensor] = {Ref(name): value for name, value in inputs.items()}
    found = next(departures(record.graph, record.values, given, Around.now()), None)
    return f"the model goes another way where an input needs gradients: it asks for {found.what}" if found else ""


@frozen(eq=False)
class _Backward:
    """What one backward pass gave: by name of a leaf, or of an output."""

    gradients: Mapping[str, torch.Tensor | None]
    needing: Mapping[str, bool]  # do the outputs need gradients?


def _inputs(subject: Subject, flagged: bool) -> dict[str, torch.Tensor]:
    """Copies of the inputs, which need gradients as the recorded ones do; or all that can."""
    record, alone = subject.record, subject.lone_inputs
    values = {node.name: record.values[Ref(node.name)] for node in record.graph.input_nodes if node.name in alone}
    plain = {name: value for name, value in values.items() if type(value) is torch.Tensor and not value.is_inference()}
    return {
        name: value.detach().clone().requires_grad_(value.requires_grad or flagged)
        for name, value in plain.items()
        if value.is_floating_point() and value.layout is torch.strided and not value.is_quantized
    }


def _asked(subject: Subject, inputs: dict[str, torch.Tensor]) -> Law | None:
    """The law on these inputs; None where the model refuses them, or goes another way."""
    graph = subject.record.graph
    values = {node.name: subject.record.values[Ref(node.name)] for node in graph.input_nodes}
    given = thaw_shared(graph.inputs, lambda leaf: (values | inputs)[leaf.node] if type(leaf) is Ref else leaf)
    twins = {n: value.detach().clone().requires_grad_(value.requires_grad) for n, value in inputs.items()}
    again = {graph.positions[name]: twin for name, twin in twins.items()}
    try:
        subject.begin()
        leaves = _leaves(subject, inputs)  # before the forward, which may make others
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
        return Law(NAME, skipped=str(error).partition("\n")[0])
    leaves |= {name: twin for name, twin in twins.items() if name in leaves}
    try:
        found = _backward([(str(ref), ran[ref]) for _, ref in pairs], leaves)
    except Exception as error:
        return Law(NAME, len(leaves), (Finding(NAME, "", f"a replay's backward raises {type(error).__name__}"),))
    return _compared(wanted, found)


def _leaves(subject: Subject, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves that collect gradients: the inputs, the model's parameters, what else it holds."""
    named = addresses(Origins(subject.model).table)
    found = {name: value for name, value in inputs.items() if value.requires_grad}
    for node in subject.record.graph.state_nodes:
        if (tensor := subject.record.live.get(node.name)) is not None:
            found[node.address] = tensor
    for module in Origins(subject.model).modules:
        for key, tensor in module._parameters.items():
            if tensor is not None:
                found.setdefault(f"{named[id(module)]}.{key}".lstrip("."), tensor)
    once = {id(tensor): name for name, tensor in found.items()}
    return {name: t for name, t in found.items() if t.requires_grad and t.is_leaf and once[id(t)] == name}


def _backward(outputs: Sequence[tuple[str, torch.Tensor]], leaves: dict[str, torch.Tensor]) -> _Backward:
    """One backward pass from a random number of the outputs: the same for the same shapes."""
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


def _compared(wanted: _Backward, found: _Backward) -> Law:
    failures = []
    for name, needs in wanted.needing.items():
        if found.needing[name] != needs:
            words = ("needs", "does not") if needs else ("does not need", "does")
            failures.append(Finding(NAME, name, f"the model's output {words[0]} gradients, a replay's {words[1]}"))
    for name, gradient in wanted.gradients.items():
        other = found.gradients[name]
        if gradient is None or other is None:
            if gradient is not other:
                words = ("none", "one") if gradient is None else ("one", "none")
                fact = f"the model gives {name} {words[0]} as its gradient, a replay {words[1]}"
                failures.append(Finding(NAME, "", fact))
        elif not same(gradient, other):
            far = difference(gradient, other)
            failures.append(Finding(NAME, "", f"the gradient of {name} is another than the model's", difference=far))
    return Law(NAME, len(wanted.gradients), tuple(failures), unit="leaves", holds="the model's own, bit for bit")
