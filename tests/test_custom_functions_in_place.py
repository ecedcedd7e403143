"""Custom autograd functions that write what they are given: gradients are the model's, and so is all that they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import replaylens as rl
from tests.gradient_witness import assert_same, leaf_of, made, taken, witness


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        return x.mul_(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return grad * w, (3 * grad).sum(0)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, w: Tensor) -> Any:
        ctx.mark_dirty(x, y)
        ctx.save_for_backward(w)
        return x.mul_(2), y.mul_(w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return grads[0] * 2, grads[1] * w, grads[1].sum(0)


class SavesWhatItWrote(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.exp_().mul_(w), w)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return grad * x * 0.5, (grad * x).sum(0)


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        x.mul_(w)
        return x, x.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> Any:
        if grad is None:
            return (other.expand(3, 4) * 7, other) if other is not None else (None, None)
        return grad * 5, None


def a_parameter(m, x):
    return Scale.apply(m.a(x), m.b.bias) + m.b(x)


def a_buffer(m, x):
    return Scale.apply(m.a(x), m.count)


def a_view(m, x):
    h = m.a(x)
    z = Scale.apply(h[:, :2], m.b.bias[:2])
    return h + z.sum()


def several(m, x):
    y, z = Both.apply(m.a(x), m.b(x), m.b.bias)
    return y * z + y


def what_it_wrote_is_saved(m, x):
    return SavesWhatItWrote.apply(m.a(x), m.b.bias)


def no_gradient_comes_to_one(m, x):
    return Undefined.apply(m.a(x), m.b.bias)[1] * m.b(x)


CASES = [a_parameter, a_buffer, a_view, several, what_it_wrote_is_saved, no_gradient_comes_to_one]


@pytest.mark.parametrize("forward", CASES)
def test_its_gradients_are_the_models(forward):
    output, wanted = witness(forward, on_first=False)
    model, first, other = made(forward)
    prog = rl.capture(model, leaf_of(first))
    x = leaf_of(other)
    got = prog.replay(x, grad=True, on_divergence="raise").output
    assert torch.equal(got, output)
    assert_same(wanted, taken(model, x, got))


@pytest.mark.parametrize("forward", CASES)
def test_the_model_is_checked(forward):
    model, first, _ = made(forward)
    assert rl.check(model, leaf_of(first))


def test_a_write_that_torch_refuses_leaves_a_parameter_what_it_is():
    def forward(m, x):
        try:
            m.a.weight.add_(1)
        except RuntimeError:
            return m.b(m.a(x)) * 2
        return m.b(m.a(x))

    output, wanted = witness(forward, on_first=False)
    model, first, other = made(forward)
    prog = rl.capture(model, leaf_of(first))
    x = leaf_of(other)
    got = prog.replay(x, grad=True, on_divergence="raise").output
    assert torch.equal(got, output)
    assert_same(wanted, taken(model, x, got))


def caught_gradient(m, x):
    h = m.a(x)
    try:
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    except RuntimeError:
        return m.b(h) * 2
    return m.b(h) * g


def caught_backward(m, x):
    h = m.a(x)
    try:
        h.sum().backward()
    except RuntimeError:
        return m.b(h) * 2
    return m.b(x)


def caught_write_to_a_weight(m, x):
    h = m.a(x)
    try:
        m.a.weight.add_(0.0)
    except RuntimeError:
        return m.b(h) * 2
    return m.b(h)


def caught_flag(m, x):
    h = m.a(x)
    try:
        h.requires_grad_(False)
    except RuntimeError:
        return m.b(h) * 2
    return m.b(h)


def caught_write_to_a_part(m, x):
    h = m.a(x)
    try:
        h.unbind(0)[0].mul_(2)
    except RuntimeError:
        return m.b(h) * 2
    return m.b(h)


def caught_copy(m, x):
    h = m.a(x)
    try:
        h.__deepcopy__({})
    except RuntimeError:
        return m.b(h) * 2
    return m.b(h)


@pytest.mark.parametrize(
    "forward",
    [
        caught_gradient,
        caught_backward,
        caught_write_to_a_weight,
        caught_flag,
        caught_write_to_a_part,
        caught_copy,
    ],
)
def test_what_autograd_refuses_and_the_model_catches_is_a_fact_without_gradients_too(forward):
    model, first, other = made(forward)
    with torch.no_grad():
        prog = rl.capture(model, first)
    with pytest.raises(rl.DivergedReplay):
        prog.replay(leaf_of(other), grad=True, on_divergence="raise")


def without_a_derivative(m, x):
    return torch.igamma(m.a(x).abs() + 1, m.b(x).abs())


def by_mkldnn(m, x):
    return m.a(x).to_mkldnn().sigmoid().to_dense()


@pytest.mark.parametrize(("forward", "why"), [(without_a_derivative, "igamma"), (by_mkldnn, "computes with mkldnn")])
def test_where_torch_has_no_backward_it_is_said(forward, why):
    model, first, _ = made(forward)
    prog = rl.capture(model, first)
    with pytest.raises(rl.NotDifferentiable, match="torch itself has no backward.*" + why):
        prog.grads(of=lambda output: output.sum())
