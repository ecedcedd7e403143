"""Writes through views."""

from __future__ import annotations

import torch
from torch import nn, randn

from .case import silence, small


@small
def write_to_a_column(m, x):
    y = m.fc(x)
    y[:, 2] = -1.0
    return y * 3


@small
def write_through_transpose(m, x):
    y = m.fc(x)
    y.mT.mul_(2.0)
    return y.sigmoid()


@small
def write_through_diagonal(m, x):
    y = m.fc(x)
    y.diagonal().zero_()
    return y + x


@small
def write_through_narrow(m, x):
    y = m.fc(x)
    y.narrow(1, 1, 2).clamp_(min=0.1)
    return y


@small
def write_through_a_chain_of_views(m, x):
    y = m.fc(x)
    y.view(2, 6).t()[1:4].select(1, 0).add_(5.0)
    return y


@small
def write_through_unbind(m, x):
    y = m.fc(x).detach().clone()
    for i, row in enumerate(y.unbind(0)):
        row.add_(i)
    return y + m.fc(x)


@small
def write_through_chunks(m, x):
    y = m.fc(x).detach()
    left, right = y.chunk(2, 1)
    left.copy_(right)
    right.zero_()
    return y, m.fc(x)


@small
def write_through_detach(m, x):
    y = m.fc(x)
    y.detach().add_(1.0)
    return y * 2


@small
def write_through_data(m, x):
    y = m.fc(x)
    y.data[:, 0] = 7.0
    return y * 2


@small
def write_through_flatten(m, x):
    y = m.fc(x)
    y.flatten()[::3].neg_()
    return y


@small
def write_through_flatten_that_copied(m, x):
    y = m.fc(x)
    y.t().flatten().zero_()
    return y


@small
def write_through_as_strided(m, x):
    y = m.fc(x)
    y[1:].as_strided((3,), (4,), 1).fill_(9.0)
    return y


@small
def write_through_an_integer_view(m, x):
    bits = m.fc(x).detach().clone()
    bits.view(torch.int32).bitwise_and_(-65536)
    return bits + m.fc(x)


@small
def write_through_real_and_imag(m, x):
    z = torch.complex(m.fc(x), x)
    z.real.add_(1.0)
    z.imag[0] = 0.0
    return torch.view_as_real(z)


@small(refusal="the setter `.real =` is not seen by a function mode")
def write_through_the_real_setter(m, x):
    z = torch.complex(m.fc(x).detach(), x.detach())
    z.real = z.imag * 2
    return z.abs() + m.fc(x)


@small
def write_through_split_under_no_grad(m, x):
    y = m.fc(x)
    with torch.no_grad():
        y.split(2, 1)[1].mul_(0.0)
    return y + 1


@small
def write_through_a_parameter_alias(m, x):
    y = m.fc(x).detach()
    alias = nn.Parameter(y)
    with torch.no_grad():
        alias.add_(1.0)
    return y + m.fc(x)


@small
def write_through_expand(m, x):
    row = torch.zeros(1, 4)
    with silence():
        row.expand(3, 4).fill_(2.0)
    return m.fc(x) + row


@small
def write_to_the_base_then_read_old_views(m, x):
    y = m.fc(x)
    first, turned = y[0], y.t()
    y.mul_(3.0)
    return first + turned[:, 1]


@small
def write_to_a_sibling_view(m, x):
    y = m.fc(x)
    top, middle = y[:2], y[1:]
    top.add_(1.0)
    middle.mul_(2.0)
    top.sub_(0.5)
    return y, middle


@small
def write_to_overlapping_strides(m, x):
    y = m.fc(x).flatten()
    evens, head = y[::2], y.as_strided((4, 3), (2, 1))
    evens += 1.0
    return head * 2


@small
def write_while_a_reader_waits(m, x):
    y = m.fc(x)
    lazy = (y.t() for _ in range(1))
    y[1] = 0.0
    return next(lazy) + 1


@small
def write_then_return_the_view(m, x):
    y = m.fc(x)
    v = y[:, 1]
    y.add_(1.0)
    return v


@small
def view_under_no_grad_written_with_grad(m, x):
    y = torch.zeros(3, 4)
    with torch.no_grad():
        top = y[:2]
    y.add_(m.fc(x))
    return y.sum(), top.detach() * 2


@small
def write_under_no_grad_to_a_differentiable_base(m, x):
    y = m.fc(x)
    with torch.no_grad():
        y[:, :2] *= 0.5
    return (y * y).sum()


@small
def write_of_self_into_self(m, x):
    y = m.fc(x)
    y[1:] = y[:-1].clone()
    y[[0, 1]] = y[[1, 0]]
    return y


@small
def write_reads_its_own_diagonal(m, x):
    y = (m.fc(x)[:, :3] * 1.0).detach()
    y.addcmul_(y.diagonal().clone(), y.t().clone(), value=0.5)
    return y + m.fc(x)[:, :3]


@small
def write_that_changes_nothing(m, x):
    y = m.fc(x)
    v = y[0]
    y.add_(0.0)
    y.clamp_(-100.0, 100.0)
    return v


class WritesRows(nn.Module):
    """Owns a parameter, and gives a view that it wrote through."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(randn(4))

    def forward(self, y):
        rows = y[1:]
        rows.mul_(self.scale)
        return rows


@small(parts=lambda: {"rows": WritesRows()})
def write_through_what_a_write_gave(m, x):
    rows = m.rows(x * 1)
    rows.add_(1.0)
    return rows


@small(parts=lambda: {"rows": WritesRows()})
def write_of_a_view_to_its_own_place(m, x):
    y = x * 1
    y[1:] = m.rows(y)
    return y


@small(parts=lambda: {"rows": WritesRows()})
def write_of_a_view_to_another_place(m, x):
    y = x * 1
    y[:1] = m.rows(y)[1:]
    return y


@small(parts=lambda: {"rows": WritesRows()})
def write_of_a_view_to_where_it_is_read(m, x):
    y = x * 1
    rows = m.rows(y)
    y[:2, :2].add_(rows.diagonal())
    return y
