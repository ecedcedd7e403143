"""`rl.check` finds a program whose gradients are not the model's: each fault that there was, put back, breaks its law."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from internals import Call, Quirk, model_under_test, op_info as info, writes, writes as twins
from oracle import assert_same, belongings, generators
from torch import Tensor, nn

import replaylens as rl


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


tripled = Tripled.apply if hasattr(Tripled.apply, "__func__") else lambda x: Tripled.apply(x)


class Net(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 4), nn.Linear(4, 2), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def with_a_bound_function(m, x):
    return m.b(tripled(m.a(x)))


def with_a_frozen_layer(m, x):
    m.a.requires_grad_(False)
    h = m.a(x)
    m.a.requires_grad_(True)
    return m.b(h)


def with_a_hook_that_goes(m, x):
    h = m.a(x)
    handle = h.register_hook(lambda g: g * 100)
    y = m.b(h)
    handle.remove()
    return y


def with_a_hook_that_stays(m, x):
    h = m.a(x)
    h.register_hook(lambda g: g * 100)
    return m.b(h)


def with_elu_in_place(m, x):
    return m.b(F.elu(m.a(x) * 3, inplace=True))


def with_a_late_write(m, x):
    h = m.a(x)
    y = h * h
    h.data.mul_(0.5)
    return m.b(y)


def with_a_stopped_gradient(m, x):
    with torch.no_grad():
        gate = m.a(x).sigmoid()
    return m.b(x * gate), gate


def with_a_gradient_inside(m, x):
    h = m.a(x)
    (g,) = torch.autograd.grad(m.b(h).sin().sum(), h, create_graph=True)
    return m.b(h).sum() + g.norm()


MODELS = [
    *(with_a_bound_function, with_a_frozen_layer, with_a_hook_that_goes, with_a_hook_that_stays, with_elu_in_place),
    *(with_a_stopped_gradient, with_a_gradient_inside),
]


def law_of(run: Any, **words: Any) -> Any:
    torch.manual_seed(0)
    return rl.check(Net(run), torch.randn(3, 4), **words)["gradients"]


@pytest.mark.parametrize("run", MODELS)
def test_the_gradients_of_an_honest_program_are_the_models(run):
    law = law_of(run)
    assert law
    assert not law.skipped
    assert law.asked == 5  # four parameters and the input


def passed_by(*args: Any) -> Any:
    """`requires_grad_`, as if it were nothing to a program."""
    _, func, given, kwargs = args
    return func(*given, **kwargs)


def as_exact_in_place(function):
    op = copy(info(function))
    if op.name == "elu_":
        object.__setattr__(op, "quirks", op.quirks | {Quirk.EXACT_IN_PLACE})
    return op


FAULTS = {
    "a bound function is not seen": (
        with_a_bound_function,
        lambda patch: patch(
            "replaylens._capture.tracer.apply_call", lambda tracer, kind, call, args, kwargs: call(*args)
        ),
    ),
    "a frozen layer is read as ever": (
        with_a_frozen_layer,
        lambda patch: patch("replaylens._capture.tracer.set_requires_grad", passed_by),
    ),
    "a thawed layer stays frozen": (
        with_a_frozen_layer,
        lambda patch: patch("replaylens._capture.autograd_effects._set_value", lambda recorder, tensor, handle: None),
    ),
    "a hook that went stays": (
        with_a_hook_that_goes,
        lambda patch: patch("replaylens._capture.autograd_effects._remove_hook", lambda recording, handle: None),
    ),
    "a hook that stays goes": (
        with_a_hook_that_stays,
        lambda patch: patch(
            "replaylens._capture.autograd_effects.with_gradient_hook", lambda tensor, hook: tensor.view_as(tensor)
        ),
    ),
    "elu in place is elu": (
        with_elu_in_place,
        lambda patch: (
            patch("replaylens._capture.writes.op_info", as_exact_in_place),
            patch("replaylens._capture.writes._pure_variant", writes._pure_variant.__wrapped__),  # not from its cache
        ),
    ),
    "a late write is not looked for": (
        with_a_late_write,
        lambda patch: patch("replaylens._capture.writes.check_late_write", lambda *args, **words: None),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_finds_each_fault_that_there_was(fault, monkeypatch):
    run, break_ = FAULTS[fault]
    break_(monkeypatch.setattr)
    assert not law_of(run)


def without_gradients(call: Call) -> Call:
    return evolve(call, context=evolve(call.context, grad=False))


MUTATIONS = {
    "a call runs without gradients": lambda graph: [
        without_gradients(n) if isinstance(n, Call) and n.kind == "linear" and n.name.startswith("linear_2") else n
        for n in graph.nodes
    ],
    "a block without gradients runs with them": lambda graph: [
        evolve(n, context=evolve(n.context, grad=True)) if isinstance(n, Call) else n for n in graph.nodes
    ],
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_law_finds_a_mutation_of_the_program(mutation, monkeypatch):
    record_of = model_under_test.record_of

    def mutated(captured: Any) -> Any:
        made = record_of(captured)
        return evolve(made, graph=evolve(made.graph, nodes=tuple(MUTATIONS[mutation](made.graph))))

    monkeypatch.setattr(model_under_test, "record_of", mutated)
    assert not law_of(with_a_stopped_gradient)


def test_where_gradients_are_refused_the_law_says_why_it_was_not_asked():
    law = law_of(with_a_late_write)
    assert law
    assert law.skipped.startswith("gradients through memory that the model writes by .data or numpy after its use")


def test_where_gradients_are_off_the_law_is_not_asked():
    with torch.no_grad():
        assert law_of(with_a_bound_function).skipped == "gradients are off; check the model with them on"


def test_the_law_leaves_no_trace():
    torch.manual_seed(0)
    model, x = Net(with_a_frozen_layer), torch.randn(3, 4, requires_grad=True)
    model.a.weight.grad = torch.ones(4, 4)
    before, state, given = belongings(model), generators(), x.detach().clone()
    assert rl.check(model, x)
    assert_same(belongings(model), before)
    assert_same(generators(), state)
    assert x.grad is None
    assert torch.equal(x, given)


def asks_the_input(m, x):
    return m.a(x) * (2 if x.requires_grad else 3)


def asks_what_comes_of_the_input(m, x):
    return m.a(x) * (2 if (x * 2).grad_fn is None else 3)


@pytest.mark.parametrize("run", [asks_the_input, asks_what_comes_of_the_input])
def test_inputs_of_a_model_that_asks_whether_they_need_gradients_stay_as_they_were_given(run):
    law = law_of(run)
    assert law
    assert law.asked == 4  # the parameters


def test_a_model_that_asks_for_flags_and_has_no_parameters_is_not_asked_and_the_law_says_why():
    law = rl.check(lambda x: x * (2 if x.requires_grad else 3), torch.randn(3))["gradients"]
    assert law
    assert law.skipped.startswith("the model goes another way where an input needs gradients: it asks for `")
    assert "requires_grad" in law.skipped


def test_a_fault_is_not_hidden_where_only_inputs_as_they_were_given_are_taken(monkeypatch):
    monkeypatch.setattr("replaylens._capture.tracer.set_requires_grad", passed_by)

    def run(m, x):
        return asks_the_input(m, x) + with_a_frozen_layer(m, x).sum()

    assert not law_of(run)


def written_under_no_grad(m, x):
    h = m.a(x) * 1
    with torch.no_grad():
        h.clamp_(min=0)
    return m.b(h * h)


def filled(m, x):
    return m.a(x).clone().zero_()


def made_by_out(m, x):
    return torch.quantile(m.a(x), 0.5, out=torch.zeros(()))


def without_its_history(monkeypatch):
    monkeypatch.setattr("replaylens._capture.writes._may_need_gradient", lambda recorder, target: False)


@pytest.mark.parametrize("run", [written_under_no_grad, filled, made_by_out])
def test_writes_keep_the_history_that_they_keep_in_the_model(run):
    assert law_of(run)


def test_the_law_finds_a_write_under_no_grad_that_cuts_the_history(monkeypatch):
    without_its_history(monkeypatch)
    assert not law_of(written_under_no_grad)


def test_the_law_finds_a_fill_that_cuts_the_history(monkeypatch):
    monkeypatch.setattr(twins, "_DIFFERENTIABLE", frozenset())
    assert not law_of(filled)


class HoldsAPartOfItsWeight(nn.Module):
    """Buffers over the memory of a parameter, which has no part in their gradients."""

    def __init__(self, first):
        super().__init__()
        self.w, self.first = nn.Parameter(torch.ones(2, 2)), first
        self.register_buffer("row", self.w.data[0])
        self.register_buffer("all", self.w.data)

    def forward(self, x):
        if self.first:
            x = x * getattr(self, self.first).sum()
        with torch.no_grad():
            self.w.add_(1)
        return x + self.row + self.w.sum() + self.all.sum()


@pytest.mark.parametrize("first", ["", "w", "row", "all"])
def test_a_buffer_over_a_parameters_memory_hands_it_no_gradient(first):
    witness, model = HoldsAPartOfItsWeight(first), HoldsAPartOfItsWeight(first)
    witness(torch.ones(2)).sum().backward()
    prog = rl.capture(model, torch.ones(2))
    prog.replay(grad=True).output.sum().backward()
    assert torch.equal(model.w.grad, witness.w.grad)
