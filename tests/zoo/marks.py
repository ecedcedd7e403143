"""Views of several tensors, memory that others see, forwards that leave marks."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from .case import Case, Net, batch, small, whole


@small
def meshgrid_of_what_is_written_later(m, x):
    y = m.fc(x) * 1
    rows, _ = torch.meshgrid(y[0], y[1], indexing="ij")
    y[0] = 1.0
    return rows * 1


@small
def broadcast_of_what_is_written_later(m, x):
    y = m.fc(x) * 1
    whole_, row = torch.broadcast_tensors(y, y[:1])
    y.mul_(2)
    return whole_ * 1, row * 1


@small
def einsum_view_written(m, x):
    y = m.fc(x) * 1
    torch.einsum("ij->ji", y).add_(1)
    return y


@small(escapes=True)
def numpy_sees_a_later_write(m, x):
    room = torch.zeros(3, 4)
    seen = room.numpy()
    room.copy_(m.fc(x).detach())
    return x * float(seen.max())


@small(escapes=True, refusal="two tensors over one array of numpy's")
def numpy_seen_through_two_tensors(m, x):
    room = np.zeros((3, 4), dtype=np.float32)
    first = torch.from_numpy(room)
    first += m.fc(x).detach()
    return m.fc(torch.from_numpy(room))


@small(refusal="the old dlpack pair hides its calls")
def dlpack_pair(m, x):
    y = m.fc(x).detach()
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y)) * 2


@small
def backward_on_a_detached_leaf(m, x):
    with torch.enable_grad():
        leaf = m.fc(x).detach().requires_grad_()
        leaf.square().sum().backward()
    return leaf.grad + leaf.detach()


@small
def backward_from_what_no_grad_made(m, x):
    with torch.no_grad():
        y = m.fc(x)
    with torch.enable_grad():
        y.requires_grad_()
        m.fc(y).sum().backward()
    m.fc.weight.grad = m.fc.bias.grad = None
    return y.grad * 2


def counted_model(steps):
    """A model that counts its forwards in Python."""

    def build() -> Case:
        model = Net(steps, fc=nn.Linear(4, 4))
        model.forwards, model.seen = 0, []
        return Case(model, batch(), stateful=True)

    build.__name__ = steps.__name__
    whole(build)
    return steps


@counted_model
def counter_and_a_legacy_constructor(m, x):
    m.forwards += 1
    m.seen.append(len(m.seen))
    return m.fc(x) * m.forwards + torch.Tensor([1.0]) * len(m.seen)


@counted_model
def counter_and_a_constructor_that_is_not_named(m, x):
    m.forwards += 1
    make = getattr(torch, "Float" + "Tensor")
    return m.fc(x) * m.forwards + make([1.0]) + random.random()


@whole
def ring_of_differentiable_rows():
    def steps(m, x):
        rows = []
        for turn, row in enumerate(x):
            m.kept.index_copy_(0, torch.tensor([turn % 2]), m.fc(row)[None])  # the buffer has a history from here on
            rows.append(m.kept.sum(0))
        return torch.stack(rows)

    model = Net(steps, fc=nn.Linear(4, 4))
    model.register_buffer("kept", torch.zeros(2, 4))
    return Case(model, batch(), stateful=True)


@small(stateful=True)
def weight_exchanged_by_data_and_put_back(m, x):
    own = m.fc.weight.data
    m.fc.weight.data = torch.ones(4, 4) * 2 + 1
    other = m.fc(x).detach()
    m.fc.weight.data = own
    return other + m.fc(x)


@small(stateful=True)
def weight_exchanged_by_data_without_gradients(m, x):
    with torch.no_grad():
        own = m.fc.weight.data
        m.fc.weight.data = own * 2 + 1
    other = m.fc(x)  # its gradient goes to the weight, whatever the weight holds now
    m.fc.weight.data = own
    return other + m.fc(x) ** 2


@whole
def list_that_a_module_keeps_and_hands_on():
    def keeps(m, x):
        m.kept = [m.fc(x), x.tanh()]
        return m.kept

    def steps(m, x):
        made = m.part(x)
        made.append(made[0] * made[1])
        return sum(made) + 2 * m.part.kept[0]

    return Case(Net(steps, part=Net(keeps, fc=nn.Linear(4, 4))), batch())
