"""Torch.func."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from .case import silence, small


@small
def vmap_over_rows(m, x):
    return vmap(lambda row: m.fc(row).tanh() * row.sum())(x) + 1


@small
def vmap_over_columns(m, x):
    return vmap(lambda col, c: col * c + m.fc.bias[0], in_dims=(1, None), out_dims=1)(m.fc(x), x[:, 0])


@small
def vmap_nested(m, x):
    return vmap(vmap(lambda s: s * m.fc.weight.sum() + 1))(m.fc(x))


@small
def vmap_with_a_write(m, x):
    def row(t):
        t = t.clone()
        t[0] = t[1:].sum()
        return t.mul_(2)

    return vmap(row)(m.fc(x))


@small
def vmap_that_ignores_its_input(m, x):
    return vmap(lambda row: m.fc.bias)(x) + m.fc(x)


@small(seeded=True)
def vmap_with_randomness(m, x):
    return vmap(lambda row: row + torch.randn(4), randomness="different")(m.fc(x))


@small(escapes=True)
def grad_of_a_function(m, x):
    return grad(lambda t: m.fc(t).sin().sum())(x) + m.fc(x)


@small(escapes=True)
def gradients_of_each_sample(m, x):
    weights = dict(m.fc.named_parameters())

    def loss(w, row):
        return functional_call(m.fc, w, (row,)).square().sum()

    per_row = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    return per_row["weight"].norm(dim=(1, 2)), per_row["bias"]


@small(escapes=True)
def jvp_and_vjp(m, x):
    out, tangent = jvp(lambda t: m.fc(t).exp(), (x,), (torch.ones_like(x),))
    back, pull = vjp(lambda t: m.fc(t).tanh(), x)
    return out + tangent + back * pull(torch.ones_like(back))[0]


@small(escapes=True)
def jacobians_of_both_modes(m, x):
    def f(row):
        return m.fc(row).sin()

    return jacrev(f)(x[0]) @ torch.func.jacfwd(f)(x[1])


@small(escapes=True)
def hessian_inside(m, x):
    return torch.func.hessian(lambda row: m.fc(row).pow(3).sum())(x[0]) + m.fc(x)[0]


@small(escapes=True, refusal="it traces with modes of its own")
def linearised(m, x):
    with silence():  # torch.fx warns of its own constants
        out, push = torch.func.linearize(lambda t: m.fc(t).tanh(), x)
    return out + push(x * 2)


@small
def functional_call_with_other_weights(m, x):
    return functional_call(m.fc, {"weight": m.fc.weight.mT * 2}, (x,)).relu()


@small(parts=lambda: {"crowd": nn.ModuleList(nn.Linear(4, 2) for _ in range(3))})
def ensemble_by_stacked_state(m, x):
    params, buffers = torch.func.stack_module_state(list(m.crowd))
    shell = copy.deepcopy(m.crowd[0]).to("meta")
    return vmap(lambda p, b: functional_call(shell, (p, b), (m.fc(x),)))(params, buffers)


@small
def vmap_and_then_inference_mode(m, x):
    y = vmap(torch.sin)(m.fc(x))
    with torch.inference_mode():
        y = y.cos()
    return y.clone() + m.fc(x)


@small
def vmap_in_inference_mode_and_again_outside(m, x):
    with torch.inference_mode():
        y = vmap(torch.sin)(m.fc(x))
    return vmap(torch.cos)(y.clone() * m.fc.weight.sum())


@small
def vmap_with_inference_mode_inside(m, x):
    def row(t):
        with torch.inference_mode():
            s = t.sin()
        return s.clone() * t

    return vmap(row)(x.detach()) + m.fc(x)
