"""Kinds of write."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import randn

from .case import small


@small
def setitem_mask_scalar(m, x):
    y = m.fc(x)
    y[y < 0] = 0.25
    return y


@small
def setitem_mask_tensor(m, x):
    y = m.fc(x)
    y[torch.tensor([True, False, True])] = x[:2]
    return y


@small
def setitem_index_tensor(m, x):
    y = m.fc(x)
    y[torch.tensor([2, 0])] = x[:2] * 2
    return y


@small
def setitem_mixed_index(m, x):
    y = torch.zeros(2, 3, 4)
    y[..., [0, 2], None, 1:3] = m.fc(x)[:2, None, None, :2]
    y[1, ::2, -1] = x[:2, 0]
    return y


@small
def setitem_broadcast(m, x):
    y = m.fc(x)
    y[:, 1:] = x[:, :1]
    y[0] = x.sum()
    return y


@small
def setitem_with_an_index_tensor_scalar(m, x):
    y = m.fc(x)
    y[torch.tensor(1)] = 3.0
    y[:, torch.tensor(2)] += 1.0
    return y


@small
def augmented_slices(m, x):
    y = m.fc(x)
    y[1:] += x[0]
    y[:, 0] *= x[:, 1]
    y[[0, 2]] -= 1.0
    return y


@small
def every_augmented_operator(m, x):
    y = m.fc(x)
    y += x
    y -= 0.5
    y *= x
    y /= 3
    y **= 2
    k = torch.arange(4)
    k //= 2
    k %= 2
    k <<= 3
    k |= 1
    k ^= 7
    flags = k > 2
    flags &= k < 12
    return y * k + flags


@small
def index_put_accumulate(m, x):
    y = m.fc(x)
    y.index_put_((torch.tensor([0, 0, 2]), torch.tensor([1, 1, 3])), x[:, 0], accumulate=True)
    return y


@small
def index_writes(m, x):
    y, i = m.fc(x), torch.tensor([2, 0])
    y.index_add_(0, i, x[:2])
    y.index_copy_(1, i, x[:, :2])
    y.index_fill_(0, torch.tensor([1]), 0.5)
    return y


@small
def scatter_writes(m, x):
    y, i = m.fc(x), torch.tensor([[0, 1, 2, 0]])
    y.scatter_(0, i, x[:1])
    y.scatter_add_(0, i, x[:1] * 2)
    y.scatter_reduce_(0, i, x[1:2], "amax")
    return y


@small
def masked_writes(m, x):
    y = m.fc(x)
    y.masked_fill_(x > 0.5, 0.0)
    y.masked_scatter_(x < -0.5, x.sin())
    return y


@small
def copy_between_dtypes(m, x):
    half = torch.zeros(3, 4, dtype=torch.float16)
    half.copy_(m.fc(x))
    back = torch.zeros(3, 4, dtype=torch.float64)
    back[:2].copy_(half[1:])
    return back + x


@small
def comparison_in_place(m, x):
    y = m.fc(x)
    y.gt_(0.0)
    return y * x


@small
def fill_with_a_tensor(m, x):
    y = torch.empty(3, 4)
    y.fill_(m.fc(x).sum())
    y[0].zero_()
    return y + x


@small
def fill_diagonal_put_and_tril(m, x):
    y = m.fc(x)
    y.fill_diagonal_(1.0)
    y.put_(torch.tensor([1, 6]), x[0, :2])
    y.tril_(1)
    return y.cumsum_(0)


@small
def foreach_writes(m, x):
    pair = [m.fc(x), x * 2]
    torch._foreach_mul_(pair, 0.5)
    torch._foreach_add_(pair, [x, m.fc(x)], alpha=2)
    return pair


@small
def activations_in_place(m, x):
    y = F.relu(m.fc(x), inplace=True)
    y = F.hardtanh(y + x, inplace=True)
    return F.leaky_relu_(F.silu(y - 0.5, inplace=True), 0.1)


@small
def accumulator_in_a_loop(m, x):
    total = torch.zeros(3, 4)
    for k in range(4):
        x = m.fc(x)
        total += x * k
    return total


@small(inputs=lambda: (randn(2, 3, 4).to(memory_format=torch.contiguous_format).transpose(1, 2),))
def write_to_a_permuted_tensor(m, x):
    y = x * m.fc.weight.sum()
    y.masked_fill_(y > 0, 1.0).index_add_(1, torch.tensor([0]), y[:, 1:2].clone())
    return y.contiguous().view(2, 12)


@small
def out_into_a_fresh_tensor(m, x):
    with torch.no_grad():
        room = torch.empty(3, 4)
        torch.mul(m.fc(x), 2.0, out=room)
        torch.exp(room, out=room)
    return room + x


@small
def out_where_a_gradient_would_flow(m, x):
    y = m.fc(x)  # torch refuses this with gradients on
    room = torch.empty_like(y)
    torch.mul(y, y, out=room)
    return torch.sub(room, y, out=room).tanh()


@small
def out_into_a_view(m, x):
    room = torch.zeros(3, 6)
    with torch.no_grad():
        torch.add(m.fc(x), 1.0, out=room[:, 1:5])
    return room


@small
def out_that_resizes(m, x):
    room = torch.empty(0)
    with torch.no_grad():
        torch.cat([x, m.fc(x)], out=room)
    return room * 2


@small
def out_of_two_results(m, x):
    values, places = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int64)
    with torch.no_grad():
        torch.sort(m.fc(x), dim=1, out=(values, places))
    return values.gather(1, places)


@small
def out_into_its_own_argument(m, x):
    with torch.no_grad():
        y = m.fc(x)
        v = y[1]
        torch.cumsum(y, 0, out=y)
    return v + x


@small
def transpose_in_place(m, x):
    y = m.fc(x)
    alias = y[0]
    y.t_()
    y[1].add_(1.0)
    return y, alias


@small
def squeeze_and_unsqueeze_in_place(m, x):
    y = m.fc(x)
    y.unsqueeze_(1).mul_(2.0)
    assert y.shape == (3, 1, 4)
    return y.squeeze_(1)


@small(refusal="a storage that is resized while others look at it")
def resize_in_place(m, x):
    y = m.fc(x).detach().clone()
    y.resize_(2, 3)
    return y + m.fc(x)[:2, :3]


@small
def data_replaced(m, x):
    y = m.fc(x).detach()
    twice = y * 2
    y.data = y.data + 1
    y.data.mul_(3.0)
    return y + twice


@small
def data_replaced_by_another_shape(m, x):
    y = m.fc(x).detach()
    y.data = torch.cat([y, y])
    return y * 2


@small
def storage_replaced(m, x):
    y = m.fc(x).detach()
    y.set_((x * 2).detach())
    return y + m.fc(x)


@small(refusal="numpy writes without a word to torch", escapes=True)
def write_through_numpy(m, x):
    y = m.fc(x).detach()
    y.numpy()[1] = 4.0
    return y * 2


@small(refusal="a storage writes without a word to torch", escapes=True)
def write_through_the_storage(m, x):
    y = m.fc(x).detach()
    y.untyped_storage().fill_(0)
    return y + 1


@small(refusal="numpy writes without a word to torch", escapes=True)
def history_past_a_write_by_numpy(m, x):
    y = m.fc(x)
    array = y.detach().numpy()
    array *= 2
    return m.fc(y)


@small
def memory_exchanged_twice_by_data(m, x):
    y = m.fc(x)
    y.data = y.data * 2
    z = y + 1
    y.data = y.data + 1
    return m.fc(y) + z


@small(refusal="the failing call has written half of its targets")
def foreach_that_fails_half_way(m, x):
    a, b = m.fc(x).detach(), torch.zeros(5)
    with suppress(RuntimeError):
        torch._foreach_add_([a, b], [x, x])
    return a + m.fc(x)


@small
def python_callbacks_that_write(m, x):
    y = m.fc(x).detach()
    y.apply_(lambda v: v * 2)
    y.map_(x.detach(), lambda a, b: a - b)
    return y + m.fc(x)


@small
def constant_made_and_written(m, x):
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    mask[2:] = 0.5
    return m.fc(x) * mask


@small
def cache_written_step_by_step(m, x):
    keys = x.new_zeros(4, 4)
    outs = []
    for t, row in enumerate(x):
        keys[t] = m.fc(row)
        outs.append((keys[: t + 1] @ row).softmax(0) @ keys[: t + 1])
    return torch.stack(outs)


@small
def gradient_enters_by_a_write(m, x):
    canvas = torch.ones(4, 4)
    canvas[:3] = m.fc(x)
    canvas.diagonal().mul_(x[0])
    return canvas.logsumexp(0)


@small
def write_to_temporaries_that_die(m, x):
    y = m.fc(x)
    for k in range(4):
        (x * k).t().add_(1.0)
        y = y + (y * k).mul_(0.1)
    return y
