"""`rl.run(grad=True)` gives the model's gradients, or says that it cannot: what the forward changes is put back before
the caller's backward pass.

Witness: the plain model with hooks, and its own backward.
"""

import pytest
import torch
from torch import nn

import replaylens as rl

REFUSED, RIGHT = [], []


class Model(nn.Module):
    def __init__(self, does):
        super().__init__()
        torch.manual_seed(1)
        self.does, self.a, self.b = does, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("h", torch.ones(4))
        self.b.requires_grad_("thaw" not in does.__name__)

    def forward(self, x):
        return self.does(self, x)


def refused(function):
    REFUSED.append(function)
    return function


def right(function):
    RIGHT.append(function)
    return function


@refused
def a_weight_by_data(m, x):
    y = m.b(m.a(x))
    m.b.weight.data.mul_(0.5)
    return y


@refused
def a_weight_by_numpy(m, x):
    y = m.b(m.a(x))
    m.b.weight.detach().numpy()[:] *= 0.5
    return y


@refused
def a_buffer_by_data(m, x):
    y = m.a(x) * m.h
    m.h.data.mul_(0.5)
    return y


@refused
def weights_of_two_layers_by_data(m, x):
    y = m.b(m.a(x))
    for layer in (m.a, m.b):
        layer.weight.data.add_(1)
    return y


@refused
def thaws(m, x):
    m.b.requires_grad_(True)
    return m.b(m.a(x))


@refused
def thaws_a_weight_by_its_flag(m, x):
    m.b.weight.requires_grad = True
    return m.b(m.a(x))


@refused
def freezes_after_use(m, x):
    y = m.b(m.a(x))
    m.b.requires_grad_(False)
    return y


@right
def a_weight_before_its_use(m, x):
    m.b.weight.data.mul_(0.5)
    return m.b(m.a(x))


@right
def a_weight_exchanged(m, x):
    y = m.b(m.a(x))
    m.b.weight.data = m.b.weight.data * 0.5
    return y


@right
def a_bias_that_no_backward_reads(m, x):
    y = m.b(m.a(x))
    m.b.bias.data.mul_(0.5)
    return y


@right
def a_buffer_that_no_backward_reads(m, x):
    y = m.a(x) + m.h
    m.h.data.mul_(0.5)
    return y


@right
def freezes_before_use(m, x):
    m.b.requires_grad_(False)
    return m.b(m.a(x))


@right
def freezes_for_one_use(m, x):
    y = m.b(m.a(x))
    m.b.requires_grad_(False)
    y = m.b(y)
    m.b.requires_grad_(True)
    return y


@right
def thaws_for_one_use(m, x):
    m.b.requires_grad_(True)
    y = m.b(m.a(x))
    m.b.requires_grad_(False)
    return y


X = torch.ones(2, 4)
patched = pytest.mark.parametrize("patch", [{}, {"a": rl.Scale(0.5)}], ids=["plain", "patched"])


@patched
@pytest.mark.parametrize("does", REFUSED, ids=lambda does: does.__name__)
def test_what_the_models_backward_would_find_otherwise_is_refused(does, patch):
    model = Model(does)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(rl.NotDifferentiable):
        rl.run(model, X, patch=patch, grad=True)
    assert flags == [parameter.requires_grad for parameter in model.parameters()]
    assert torch.equal(rl.run(model, X).output, model(X))


@patched
@pytest.mark.parametrize("does", RIGHT, ids=lambda does: does.__name__)
def test_gradients_of_a_live_run_are_those_of_the_model(does, patch):
    model, plain = Model(does), Model(does)
    if patch:
        plain.a.register_forward_hook(lambda module, args, out: out * 0.5)
    plain(X).sum().backward()
    rl.run(model, X, patch=patch, grad=True).output.sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("does", [thaws, freezes_after_use, freezes_before_use, thaws_for_one_use])
def test_a_model_that_is_run_again_finds_the_flags_that_it_left(does):
    model, plain, x = Model(does), Model(does), torch.ones(1, 4)
    prog = rl.capture(model, X)
    plain(X)
    plain(x).sum().backward()
    prog.replay(x, grad=True).output.sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
