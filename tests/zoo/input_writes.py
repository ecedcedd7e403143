"""Writes to inputs."""

from __future__ import annotations

from torch import Tensor, nn, randn

from .case import Case, Net, small, whole


@small(stateful=True)
def write_to_an_input(m, x):
    x.add_(1.0)
    return m.fc(x)


@small(stateful=True)
def write_to_a_view_of_an_input(m, x):
    x.t()[0].zero_()
    return m.fc(x), x


def overlapping() -> tuple[Tensor, Tensor]:
    base = randn(4, 4)
    return base[:3], base[1:]


@small(inputs=overlapping, stateful=True, refusal="inputs that overlap in part")
def write_to_inputs_that_overlap(m, a, b):
    a.mul_(2.0)
    return m.fc(b)


@small(inputs=lambda: (randn(3, 8)[:, ::2],), stateful=True)
def write_to_an_input_with_gaps(m, x):
    x[1] = 0.5
    return m.fc(x)


@small(inputs=lambda: [randn(3, 4)] * 2, stateful=True)
def write_to_an_input_given_twice(m, a, b):
    a.add_(1.0)
    return m.fc(b)


@whole
def write_to_an_input_that_is_a_buffer():
    def forward(m, x):
        x += 1.0
        return m.fc(m.scale)

    model = Net(forward, fc=nn.Linear(4, 4), scale=nn.Buffer(randn(3, 4)))
    return Case(model, (model.scale,), stateful=True, refusal="other inputs are not the buffer")
