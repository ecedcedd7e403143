"""What a model may be."""

from __future__ import annotations

import functools

import torch
from torch import nn, randn

from .case import Case, Net, batch, small, whole


@whole
def lambda_as_model():
    return Case(lambda x: x.tanh() * 2, batch())


def plain(x, y=None):
    return (x if y is None else x + y).sin().sum(1)


@whole
def function_as_model():
    return Case(plain, batch(), {"y": randn(4)})


@whole
def partial_as_model():
    return Case(functools.partial(plain, y=randn(4)), batch())


@whole
def partial_of_a_module():
    model = Net(lambda m, x, scale: m.fc(x) * scale, fc=nn.Linear(4, 4))
    return Case(functools.partial(model, scale=3.0), batch())


@whole
def builtin_as_model():
    return Case(torch.tanh, batch())


@whole
def method_as_model():
    return Case(nn.Linear(4, 4).forward, batch())


@whole
def closure_over_a_module():
    fc = nn.Linear(4, 4)
    return Case(lambda x: fc(x).relu(), batch())


class Affine:
    """Callable, and no module."""

    def __init__(self):
        self.weight = randn(4, 4)

    def __call__(self, x):
        return x @ self.weight + 1


@whole
def object_as_model():
    return Case(Affine(), batch())


class Loud(nn.Module):
    """A module with a __call__ of its own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def __call__(self, x):
        return super().__call__(x * 2) + 1

    def forward(self, x):
        return self.fc(x).tanh()


@whole
def call_overridden():
    return Case(nn.Sequential(Loud(), nn.ReLU()), batch())


@whole
def model_with_no_parameters():
    return Case(nn.Sequential(nn.Softmax(-1), nn.Flatten()), batch())


@whole
def model_of_one_op():
    return Case(nn.Linear(4, 4), batch())


@whole
def identity_model():
    return Case(nn.Identity(), batch())


@small(inputs=tuple)
def no_inputs(m):
    return m.fc(torch.ones(2, 4))


@small
def three_hundred_layers(m, x):
    for _ in range(300):
        x = m.fc(x).tanh()
    return x


@small(parts=lambda: {"deep": nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4))))})
def modules_deep_in_modules(m, x):
    return m.deep(m.fc(x))
