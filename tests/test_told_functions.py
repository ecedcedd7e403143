"""Custom functions whose forward goes by whether gradients are needed: `ctx.needs_input_grad`, `x.requires_grad`.

Witness: the plain model with forward hooks, and its own backward.
"""

import pytest
import torch
from torch import nn

import replaylens as rl


def function(forward):
    body = {"forward": staticmethod(forward), "backward": staticmethod(lambda ctx, g: g * 2)}
    return type("Told", (torch.autograd.Function,), body)


def is_needed(ctx):
    return ctx.needs_input_grad[0]


class BySetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = 2.0 if ctx.needs_input_grad[0] else 3.0

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor


TOLD = {
    "needs_input_grad": function(lambda ctx, x: x * (2.0 if ctx.needs_input_grad[0] else 3.0)),
    "any_of_them": function(lambda ctx, x: x * (2.0 if any(ctx.needs_input_grad) else 3.0)),
    "by_a_helper": function(lambda ctx, x: x * (2.0 if is_needed(ctx) else 3.0)),
    "by_its_name": function(lambda ctx, x: x * (2.0 if getattr(ctx, "needs_input_grad")[0] else 3.0)),  # noqa: B009
    "requires_grad": function(lambda ctx, x: x * (2.0 if x.requires_grad else 3.0)),
    "is_leaf": function(lambda ctx, x: x * (2.0 if x.is_leaf else 3.0)),
    "grad_fn": function(lambda ctx, x: x * (2.0 if x.grad_fn is None else 3.0)),
    "in_setup_context": BySetup,
}


class Model(nn.Module):
    def __init__(self, told, place):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.told, self.place = nn.Linear(4, 4), nn.Linear(4, 4), told, place

    def forward(self, x):
        if self.place == "first":
            return self.b(self.a(self.told.apply(x)))
        h = self.a(x)
        return self.b(self.told.apply(h.detach() if self.place == "cut" else h))


X, Y = torch.ones(2, 4), torch.arange(8.0).view(2, 4)
told = pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
place = pytest.mark.parametrize("place", ["between", "first", "cut"])


def hooked(model, change, x=X):
    handle = model.a.register_forward_hook(lambda module, args, out: change(out))
    try:
        return model(x)
    finally:
        handle.remove()


def given_or_refused(work):
    try:
        return work()
    except rl.ReplaylensError:
        return None


@told
@place
def test_variants_of_a_model_with_such_a_function_are_those_of_the_model(told, place):
    model = Model(told, place)
    prog, fixed = rl.capture(model, X), torch.full((2, 4), 0.3)
    patches = {"half": rl.Scale(0.5), "same": rl.Scale(1.0), "fixed": fixed}
    hooks = {"half": lambda h: h * 0.5, "same": lambda h: h * 1.0, "fixed": lambda h: fixed.clone()}
    swept = rl.sweep(prog, variants={key: {"a": patch} for key, patch in patches.items()}, metric=torch.sum)
    for key, hook in hooks.items():
        wanted = hooked(model, hook).sum().detach()
        assert torch.allclose(swept[key], wanted)
        assert torch.allclose(prog.replay(patch={"a": patches[key]}).output.sum(), wanted)
        made = given_or_refused(lambda key=key: prog.with_patch({"a": patches[key]}))
        assert made is None or torch.allclose(made.output.sum(), wanted)


@told
@pytest.mark.parametrize("at", ["b.weight", "a.weight"])
@pytest.mark.parametrize("x", [X, Y], ids=["recorded", "new"])
def test_gradients_are_those_of_the_value_that_such_a_function_gives_in_the_model(told, x, at):
    model = Model(told, "between")
    prog = rl.capture(model, X)
    assert torch.equal(prog.replay(x).output, model(x))
    for patch, hook in (({}, lambda h: h), ({"a": rl.Scale(0.5)}, lambda h: h * 0.5)):
        model.zero_grad()
        hooked(model, hook, x).sum().backward()
        assert torch.allclose(
            prog.grads(x, of=torch.sum, at=[at], patch=patch)[at], dict(model.named_parameters())[at].grad
        )


@pytest.mark.parametrize("name", sorted(TOLD.keys() - {"is_leaf", "grad_fn"}))
def test_a_gradient_that_such_a_function_would_be_told_of_is_refused(name):
    prog = rl.capture(Model(TOLD[name], "first"), X)
    with pytest.raises(rl.DivergedReplay, match="requires_grad"):
        prog.grads(of=torch.sum, at=["input_1_0"])
    with torch.no_grad():
        prog = rl.capture(Model(TOLD[name], "between"), X)
    with pytest.raises(rl.NotDifferentiable, match="asks whether gradients are needed"):
        prog.function()
    with pytest.raises(rl.DivergedReplay, match="requires_grad"):
        prog.grads(of=torch.sum, at=["b.weight"])


def test_such_a_function_that_asks_nothing_runs_with_the_others():
    model = Model(function(lambda ctx, x: x * 2.0), "between")
    prog = rl.capture(model, X)
    assert not prog.graph.flag_readers
    with torch.no_grad():
        assert torch.equal(rl.capture(model, X).function()(Y), model(Y))
