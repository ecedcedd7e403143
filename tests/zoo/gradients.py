"""Gradients: modes, checkpoints, functions, hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function, forward_ad
from torch.func import vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .case import Case, Net, batch, small, whole


@small
def no_grad_block(m, x):
    with torch.no_grad():
        target = m.fc(x)
    return (m.fc(x) - 2 * target).square()


@small
def inference_mode_block(m, x):
    with torch.inference_mode():
        size = x.abs().mean()
    return m.fc(x) + x.new_full((4,), 2.0) * size.clone()


@small
def grad_modes_nested(m, x):
    with torch.no_grad():
        a = m.fc(x)
        with torch.enable_grad():
            b = m.fc(x)
            with torch.set_grad_enabled(False):
                c = m.fc(x)
    return a * b * c


@torch.no_grad()
def frozen_step(m, x):
    return m.fc(x).tanh()


@small
def grad_mode_by_decorator(m, x):
    return frozen_step(m, x) + m.fc(x)


@small
def grad_mode_switched_by_calls(m, x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = m.fc(x)
    torch.set_grad_enabled(before)
    return y * m.fc(x)


@small
def inference_tensor_returned(m, x):
    with torch.inference_mode():
        y = m.fc(x)
        y.add_(1.0)
    return y, m.fc(x)


@small
def default_dtype_changed(m, x):
    torch.set_default_dtype(torch.float64)
    wide = torch.ones(4) / 3
    torch.set_default_dtype(torch.float32)
    return m.fc(x) * wide


@small
def gradient_retained(m, x):
    y = m.fc(x)
    if y.requires_grad:
        y.retain_grad()
    return y.sigmoid()


@small
def autocast_block(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.fc(x)
        with torch.autocast("cpu", enabled=False):
            y = y.float() + m.fc(x)
        z = y @ x.mT
    return y.sum() + z.float()


@small
def detached_branch(m, x):
    y = m.fc(x)
    return y + (y.round() - y).detach()


@small
def requires_grad_in_the_forward(m, x):
    leaf = x.detach().requires_grad_()
    return m.fc(leaf) * x


@small
def checkpoint_without_reentry(m, x):
    return checkpoint(lambda t: m.fc(t).tanh(), x, use_reentrant=False) * 2


@small
def checkpoint_with_reentry(m, x):
    return checkpoint(lambda t: m.fc(t).tanh(), m.fc(x), use_reentrant=True) * 2


@small(seeded=True)
def checkpoint_with_dropout(m, x):
    return checkpoint(lambda t: F.dropout(m.fc(t), 0.5), x, use_reentrant=False)


def gradient_of(values, leaf, **how):
    return torch.autograd.grad(values.sum(), leaf, **how)[0]


@small(seeded=True)
def checkpoint_that_the_forward_differentiates(m, x):
    leaf = x.detach().requires_grad_()
    out = checkpoint(lambda t: Cube.apply(F.dropout(m.fc(t)).tanh(), 0.5), leaf, use_reentrant=False)
    return m.fc(out.detach() + gradient_of(out, leaf))


@small(seeded=True)
def reentrant_checkpoint_that_the_forward_differentiates(m, x):
    leaf = x.detach().requires_grad_()
    out = checkpoint(lambda t: F.dropout(m.fc(t)).tanh(), leaf, use_reentrant=True)
    out.sum().backward(inputs=None)
    return m.fc(x) + out.detach() + leaf.grad


@whole
def checkpoint_of_a_sequence():
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return Case(Net(lambda m, x: checkpoint_sequential(m.layers, 2, x, use_reentrant=False), layers=layers), batch())


class Cube(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x * x * g, None


class Sign(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.5, 0.5)


class Reverse(Function):
    """A gradient reversal that gives its input back."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -g


class ReverseView(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -2 * g


class DoubleInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return 20 * g


class SinAndOrder(Function):
    """Two outputs, of which one has no gradient, with the context set up apart."""

    @staticmethod
    def forward(x, options):
        return x.sin() * options["gain"], x.argsort(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, options = inputs
        ctx.gain = options["gain"]
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        return ctx.gain * g * ctx.saved_tensors[0].cos(), None


class SwapPair(Function):
    @staticmethod
    def forward(ctx, a, b):
        return b * 2, a * 3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, ga, gb):
        return gb * 7, ga * 11


class UsesAnother(Function):
    @staticmethod
    def forward(ctx, x):
        return Sign.apply(x) * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


@small
def function_of_ones_own(m, x):
    return Cube.apply(m.fc(x), 0.5).sum(1)


@small
def function_straight_through(m, x):
    return Sign.apply(m.fc(x)) * x


@small
def function_that_gives_its_input_back(m, x):
    y = m.fc(x)
    return Reverse.apply(y) + ReverseView.apply(y) + Reverse.apply(x)


@small(refusal="gradients through a function that marks its input as written")
def function_that_writes_its_input(m, x):
    y = m.fc(x)
    DoubleInPlace.apply(y)
    return y + 1


@small
def function_with_a_context_apart(m, x):
    y, order = SinAndOrder.apply(m.fc(x), {"gain": 3.0})
    return y.gather(1, order)


@small
def function_of_two(m, x):
    a, b = SwapPair.apply(m.fc(x), x)
    return a - b


@small
def function_in_a_function(m, x):
    return UsesAnother.apply(m.fc(x))


@small
def function_under_no_grad(m, x):
    with torch.no_grad():
        y = Cube.apply(m.fc(x), 2.0)
    return y + Reverse.apply(m.fc(x))


class Twice(Function):
    """Fit for vmap, and careful about what it is asked."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * 2 + y, 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, _):
        return (g * 2 if ctx.needs_input_grad[0] else None), g


@small
def function_that_gives_a_number(m, x):
    y, k = Twice.apply(m.fc(x), x.detach())
    return y * k


@small
def function_under_vmap(m, x):
    return vmap(lambda row: Twice.apply(m.fc(row), row)[0] + 1)(x)


@small(escapes=True)
def function_differentiated_twice(m, x):
    y = m.fc(x)
    with torch.enable_grad():
        y = y if y.requires_grad else y.requires_grad_()
        (g,) = torch.autograd.grad(Cube.apply(y, 1.0).sum(), y, create_graph=True)
    return g + y


@small(escapes=True)
def gradient_inside(m, x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(m.fc(leaf).tanh().sum(), leaf)
    return m.fc(x) - 0.1 * g


@small(escapes=True)
def gradient_inside_kept_differentiable(m, x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(m.fc(leaf).tanh().square().sum(), leaf, create_graph=True)
    return x - 0.1 * g


@small(escapes=True, refusal="it asks whether its input requires gradients")
def gradient_penalty(m, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.clone().requires_grad_()
        y = F.layer_norm(m.fc(x), (4,)).sin().sum(1)
        (g,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    return y + (g.norm(dim=1) - 1) ** 2


@small(escapes=True)
def backward_inside(m, x):
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        m.fc(leaf).sigmoid().sum().backward(inputs=[leaf])
    return m.fc(x) + leaf.grad


@small(stateful=True, escapes=True)
def backward_inside_fills_parameter_gradients(m, x):
    with torch.enable_grad():
        m.fc(x.detach()).square().sum().backward()
    y = m.fc(x) - m.fc.weight.grad[0]
    m.zero_grad()
    return y


@small(stateful=True, escapes=True)
def optimiser_steps_inside(m, x):
    inner = torch.optim.SGD(m.fc.parameters(), lr=0.1, momentum=0.9)
    with torch.enable_grad():
        for _ in range(2):
            inner.zero_grad()
            m.fc(x.detach()).square().mean().backward()
            inner.step()
    inner.zero_grad()
    return m.fc(x)


@small(escapes=True)
def langevin_steps(m, x):
    for _ in range(3):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.fc(x).square().sum()
            x = x - 0.05 * torch.autograd.grad(energy, x)[0]
    return x


@small
def hook_on_a_tensor(m, x):
    y = m.fc(x)
    if y.requires_grad:
        y.register_hook(lambda g: g * 3)
    return y.tanh()


@whole
def hook_on_the_backward_of_a_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[1].register_full_backward_hook(lambda mod, gi, go: tuple(g * 2 if g is not None else g for g in gi))
    return Case(model, batch(), refusal="gradients through a hook on the backward")


@whole
def hooks_that_change_values():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda mod, args, out: out * 2 + 1)
    model[2].register_forward_pre_hook(lambda mod, args: (args[0] - 1,))
    return Case(model, batch())


@whole
def hooks_that_take_keywords():
    model = Net(lambda m, x, scale: m.fc(x) * scale, fc=nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda mod, a, k: (a, {"scale": k["scale"] + 1}), with_kwargs=True)
    model.register_forward_hook(lambda mod, a, k, out: (out, k["scale"]), with_kwargs=True)
    return Case(model, batch(), {"scale": 2.0})


@small(refusal="gradients through hooks on what was saved")
def saved_tensor_hooks(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 2):
        y = m.fc(x).square()
    return y.sum(1)


@small(escapes=True)
def forward_mode_dual(m, x):
    with forward_ad.dual_level():
        y = m.fc(forward_ad.make_dual(x, torch.ones_like(x))).tanh()
        value, tangent = forward_ad.unpack_dual(y)
    return value + tangent


@small(escapes=True, refusal="it asks whether its input requires gradients")
def jacobian_of_autograd(m, x):
    with torch.enable_grad():
        return torch.autograd.functional.jacobian(lambda t: m.fc(t).tanh().sum(0), x, create_graph=True).sum(0)
