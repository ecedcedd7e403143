"""A patch that cannot take part in a gradient of the forward's own is said, whatever the entry: sweeps, functions, slices.

The witness is the plain model with a forward hook, and the replay of one patch.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import replaylens as rl
from tests.oracle import assert_same


class Inner(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.l1, self.l2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.way(self, self.l1(x)[0])


def jacrev(m, h):
    return torch.func.jacrev(lambda z: m.l2(z.relu()))(h)


def jacfwd(m, h):
    return torch.func.jacfwd(lambda z: m.l2(z.relu()))(h)


def grad(m, h):
    return torch.func.grad(lambda z: m.l2(z.relu()).pow(2).sum())(h)


def grad_and_value(m, h):
    found, value = torch.func.grad_and_value(lambda z: m.l2(z.sin()).pow(2).sum())(h)
    return found * value


def vjp(m, h):
    value, pull = torch.func.vjp(lambda z: m.l2(z.sin()).exp(), h)
    return pull(torch.ones_like(value))[0] + value


def jvp(m, h):
    value, push = torch.func.jvp(lambda z: m.l2(z.sin()).exp(), (h,), (torch.ones_like(h),))
    return value * push


def hessian(m, h):
    return torch.func.hessian(lambda z: m.l2(z.sin()).exp().sum())(h)


def of_each_row(m, h):
    return torch.func.vmap(torch.func.grad(lambda z: m.l2(z.sin()).exp().sum()))(torch.stack([h, h + 1]))


def autograd(m, h):
    z = h.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(m.l2(z.sin()).exp().sum() + z.sum(), z)[0] + h


WAYS = [jacrev, jacfwd, grad, grad_and_value, vjp, jvp, hessian, of_each_row, autograd]
PATCHES = {"zero": rl.Zero(), "scale": rl.Scale(2), "function": torch.neg, "add": rl.Add(torch.arange(4.0))}
HOOKS = {
    "zero": torch.zeros_like,
    "scale": lambda t: t * 2,
    "function": torch.neg,
    "add": lambda t: t + torch.arange(4.0),
}


def captured(way):
    torch.manual_seed(0)
    model, x = Inner(way), torch.randn(2, 4)
    return model, x, rl.capture(model, x)


def with_a_hook(model, x, name):
    handle = model.l2.register_forward_hook(lambda module, args, out: HOOKS[name](out))
    try:
        return model(x)
    finally:
        handle.remove()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("metric", [torch.sum, None, lambda out: float(out.sum())], ids=["sum", "none", "python"])
def test_a_sweep_says_what_a_replay_says(way, metric):
    model, x, prog = captured(way)
    for name, patch in PATCHES.items():
        for choice in ("raise", "rerun", "ignore"):
            try:
                run = prog.replay(patch={"l2": patch}, on_divergence=choice)
            except rl.DivergedReplay:
                with pytest.raises(rl.DivergedReplay):
                    rl.sweep(prog, variants={0: {"l2": patch}}, metric=metric, on_divergence=choice)
                continue
            found = rl.sweep(prog, variants={0: {"l2": patch}}, metric=metric, on_divergence=choice)
            wanted = run.output if metric is None else torch.as_tensor(metric(run.output))
            assert torch.allclose(found[0].to(wanted.dtype), wanted, atol=1e-5)
            assert bool(found.departures) == bool(run.departures)
            if choice != "ignore":
                assert torch.allclose(run.output, with_a_hook(model, x, name), atol=1e-5)


@pytest.mark.parametrize("way", [way for way in WAYS if way is not hessian], ids=lambda way: way.__name__)
def test_a_function_of_a_value_inside_a_gradient_says_that_it_misses_it(way):
    _, _, prog = captured(way)
    inside = [c.name for c in prog.graph.calls if c.is_differentiated and c.spec[0].device != "meta"]
    for name in inside:
        try:
            function = prog.function(inputs=[name])
        except rl.ReplaylensError:
            continue
        recorded = prog[name].value
        assert_same(function(recorded).detach(), prog.output.detach())
        with pytest.raises(rl.DivergedReplay, match="gradient that the model takes"):
            function(recorded + 1)
        with pytest.raises(rl.DivergedReplay, match="gradient that the model takes"):
            torch.func.vmap(function)(torch.stack([recorded, recorded]))
        with pytest.raises(rl.BadEdit):
            prog.slice(from_=name)


def test_a_function_of_a_value_before_a_gradient_is_the_models():
    model, x, prog = captured(grad)
    function = prog.function(inputs=["l1"])
    assert_same(function(model.l1(x + 1)).detach(), model(x + 1).detach())


class Handing(nn.Module):
    """What it is made of stands in a gradient that the forward takes."""

    def __init__(self, *inner):
        super().__init__()
        self.inner, self.l1 = nn.Sequential(*inner), nn.Linear(4, 4)

    def forward(self, x):
        return torch.func.grad(lambda z: self.inner(z).pow(2).sum())(self.l1(x))


class Reads(nn.Linear):
    """It reads what it hands on."""

    def forward(self, x):
        made = super().forward(x)
        self.size = made.detach().norm()
        return made


class Writes(nn.Linear):
    """It writes a part of what it hands on."""

    def forward(self, x):
        made = super().forward(x)
        made[:, 0].mul_(2)
        return made


HANDING = {
    "what its own backward reads": lambda: [nn.Tanh(), nn.Linear(4, 2)],
    "what it reads itself": lambda: [Reads(4, 4), nn.Linear(4, 2)],
    "what it writes in part": lambda: [Writes(4, 4), nn.Linear(4, 2)],
    "in place": lambda: [nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Linear(4, 2)],
    "its input": lambda: [nn.Identity(), nn.Linear(4, 2)],
    "its input in evaluation": lambda: [nn.Dropout().eval(), nn.Linear(4, 2)],
    "what an inner one hands on": lambda: [nn.Sequential(nn.Softmax(-1)), nn.Linear(4, 2)],
}


@pytest.mark.parametrize("what", HANDING)
@pytest.mark.parametrize("patch", [rl.Scale(0.5), torch.exp], ids=["scale", "exp"])
def test_a_patch_at_what_a_module_hands_on_inside_a_gradient_is_refused_too(what, patch):
    torch.manual_seed(0)
    model, x = Handing(*HANDING[what]()), torch.randn(2, 4)
    prog = rl.capture(model, x)
    assert_same(prog.output, model(x))
    for act in (
        lambda: prog.replay(patch={"inner.0": patch}),
        lambda: prog.replay(patch={"inner.0": patch}, on_divergence="raise"),
        lambda: prog.with_patch({"inner.0": patch}),
        lambda: rl.run(model, x, patch={"inner.0": patch}),
        lambda: rl.sweep(prog, variants={0: {"inner.0": patch}}, metric=torch.sum),
    ):
        with pytest.raises(rl.DivergedReplay, match=r"gradient that the model takes|lies inside torch\.func\.grad"):
            act()


def test_a_patch_before_modules_inside_a_gradient_is_the_models():
    for what in HANDING:
        torch.manual_seed(0)
        model, x = Handing(*HANDING[what]()), torch.randn(2, 4)
        prog = rl.capture(model, x)
        handle = model.l1.register_forward_hook(lambda module, args, out: out * 0.5)
        wanted = model(x)
        handle.remove()
        assert_same(prog.replay(patch={"l1": rl.Scale(0.5)}).output, wanted)


def test_a_live_run_patches_what_is_written_in_place_within_what_the_forward_differentiates():
    class Differentiates(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))

        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.f(x).pow(2).sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    model, x = Differentiates(), torch.randn(3, 4)
    found = rl.run(model, x, patch={"f.1": rl.Scale(0.5)}).output
    model.f[1].register_forward_hook(lambda module, args, out: out * 0.5)
    assert_same(found.detach(), model(x).detach())


class HandsOnItsGradient(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.mid, self.last, self.way = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), way

    def forward(self, x):
        h = self.first(x)
        y = self.last(self.mid(h)).pow(2).sum()
        if self.way == "backward":
            h.retain_grad()
            y.backward(inputs=[h])
            return h.grad if h.grad is not None else x
        if self.way == "several":
            return torch.autograd.grad(y, [h, self.last.weight])
        allowed = self.way == "allowed"
        (gradient,) = torch.autograd.grad(y, h, create_graph=self.way == "again", allow_unused=allowed)
        return h if gradient is None else gradient


@pytest.mark.parametrize("way", ["once", "again", "several", "allowed", "backward"])
def test_a_patch_that_cuts_off_a_gradient_which_the_model_hands_on_does_to_it_what_a_hook_does(way):
    model, x = HandsOnItsGradient(way), torch.randn(2, 3)
    prog = rl.capture(model, x)
    assert prog.check(progress=False)
    patch = {"mid": torch.zeros_like}
    handle = model.mid.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    try:
        wanted = model(x)
    except RuntimeError:
        wanted = None
    handle.remove()
    for found in (
        lambda: prog.replay(patch=patch),
        lambda: prog.replay(patch=patch, grad=True),
        lambda: prog.replay(patch=patch, from_="mid"),
        lambda: rl.run(model, x, patch=patch),
    ):
        if wanted is None:
            with pytest.raises(RuntimeError, match="not have been used"):
                found()
        else:
            assert torch.equal(found().output, wanted)
    with pytest.raises((rl.DivergedReplay, RuntimeError)):
        prog.replay(patch=patch, on_divergence="ignore")
    with pytest.raises(rl.DivergedReplay):
        prog.with_patch(patch)
    if wanted is None:
        with pytest.raises(RuntimeError, match="not have been used"):
            prog.replay_many({0: patch}, progress=False)
