"""The smallest models, each named for its one difficulty.

`MODELS[name]()` builds a `Case`: a model and what to call it with. Every builder seeds torch, so two builds are
identical: one can be captured and the other run plainly beside it. Nothing here knows of replaylens.

Most models are one forward function; `m.fc` is a `Linear(4, 4)` and `x` is a `(3, 4)` batch unless it says otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import random
import threading
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor, nn, randn, tanh as tanh_by_another_name
from torch.autograd import Function, forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@frozen
class Case:
    """A model, what to call it with, and what a fair judge must know about it."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)
    seeded: bool = False  # draws random numbers
    stateful: bool = False  # its forward changes what it holds
    escapes: bool = False  # contents or inner gradients leave what is recorded: other values may need another path
    asks_identity: bool = False  # asks which object a tensor is
    loose: bool = False  # equal but for the last bits: the fused transformer path, DESIGN 4.1
    refusal: str = ""  # why a capture or a replay may refuse it


MODELS: dict[str, Callable[[], Case]] = {}


class Net(nn.Module):
    """A module whose forward is a function of the module, and whose parts are given."""

    def __init__(self, steps: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.steps = steps
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps(self, *args, **kwargs)


@contextmanager
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


with silence():
    import torch._decomp.decompositions_for_jvp


def whole(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a function that builds a Case: seeded, and in silence."""

    @functools.wraps(build)
    def seeded() -> Case:
        with silence():
            torch.manual_seed(0)
            return build()

    MODELS[build.__name__] = seeded
    return build


def batch() -> tuple[Tensor]:
    return (randn(3, 4),)


def small(steps=None, *, parts=dict, inputs=batch, kwargs=dict, train=False, **flags):
    """Register a forward function as a model: `steps(m, *inputs)`."""
    if steps is None:
        return functools.partial(small, parts=parts, inputs=inputs, kwargs=kwargs, train=train, **flags)

    def build() -> Case:
        model = Net(steps, fc=nn.Linear(4, 4), **parts()).train(train)
        return Case(model, tuple(inputs()), kwargs(), **flags)

    build.__name__ = steps.__name__
    whole(build)
    return steps


# ---- writes through views ------------------------------------------------------------------------------------------


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


# ---- writes to inputs ----------------------------------------------------------------------------------------------


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


# ---- kinds of write ------------------------------------------------------------------------------------------------


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


# ---- state: parameters, buffers, attributes ------------------------------------------------------------------------


def images() -> tuple[Tensor]:
    return (randn(2, 3, 6, 6),)


@whole
def batchnorm_in_training():
    return Case(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(), images(), stateful=True)


@small(parts=lambda: {"norm": nn.BatchNorm1d(4)}, train=True, stateful=True)
def batchnorm_called_twice(m, x):
    return m.norm(m.fc(m.norm(x)))


@whole
def batchnorm_with_cumulative_average():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)).train()
    return Case(model, batch(), stateful=True, escapes=True)


@whole
def batchnorm_without_statistics():
    return Case(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval(), batch())


@whole
def instancenorm_in_training():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)).train()
    return Case(model, images(), stateful=True)


@whole
def embedding_that_renormalises():
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 4))
    return Case(model, (torch.tensor([1, 4, 1]),), stateful=True)


@whole
def spectral_norm_in_training():
    return Case(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()).train(), batch(), stateful=True
    )


@whole
def weight_norm_parametrisation():
    return Case(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()), batch())


@whole
def orthogonal_parametrisation():
    return Case(nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh()), batch())


@small(parts=lambda: {"seen": nn.Buffer(torch.zeros(4))}, stateful=True)
def buffer_assigned(m, x):
    y = m.fc(x)
    m.seen = m.seen + y.detach().mean(0)
    return y - m.seen


@small(parts=lambda: {"seen": nn.Buffer(torch.zeros(4)), "count": nn.Buffer(torch.tensor(0))}, stateful=True)
def buffers_written(m, x):
    m.count += 1
    m.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return m.fc(x) / m.count + m.seen


@small(parts=lambda: {"slow": nn.Linear(4, 4)}, stateful=True)
def moving_average_of_the_weights(m, x):
    with torch.no_grad():
        for mine, theirs in zip(m.slow.parameters(), m.fc.parameters(), strict=True):
            mine.lerp_(theirs, 0.25)
    return m.slow(x) + m.fc(x)


@small(stateful=True)
def parameter_written(m, x):
    before = m.fc(x)
    with torch.no_grad():
        m.fc.weight.mul_(0.5)
    return before.detach() + m.fc(x)


@small(stateful=True)
def parameter_data_clamped(m, x):
    m.fc.weight.data.clamp_(-0.2, 0.2)
    return m.fc(x)


@small(stateful=True)
def parameter_replaced(m, x):
    m.fc.bias = nn.Parameter(m.fc.bias.detach() + 1, requires_grad=False)
    return m.fc(x)


@whole
def buffer_that_is_none():
    model = Net(lambda m, x: m.fc(x) if m.scale is None else m.fc(x) * m.scale, fc=nn.Linear(4, 4))
    model.register_buffer("scale", None)
    return Case(model, batch())


@whole
def buffer_that_is_not_saved():
    model = Net(lambda m, x: m.fc(x) * m.scale, fc=nn.Linear(4, 4))
    model.register_buffer("scale", torch.arange(4.0), persistent=False)
    return Case(model, batch())


@small(stateful=True)
def buffer_registered_in_the_forward(m, x):
    m.register_buffer("first", x.detach().mean(0))
    return m.fc(x - m.first)


@small(stateful=True)
def attribute_cached_in_the_forward(m, x):
    m.last = m.fc(x)
    return m.last * 2


@small(parts=lambda: {"scale": randn(4)})
def plain_tensor_attribute(m, x):
    return m.fc(x) * m.scale


@small(parts=lambda: {"scale": randn(4)}, stateful=True)
def plain_tensor_attribute_written(m, x):
    m.scale.add_(1.0)
    return m.fc(x) * m.scale


@small(parts=lambda: {"grids": [{"a": randn(4)}, (randn(4), None)]})
def tensors_deep_in_attributes(m, x):
    return m.fc(x) + m.grids[0]["a"] * m.grids[1][0]


@small(parts=lambda: {"weights": [randn(4, 4).requires_grad_(), randn(4, 4).requires_grad_()]})
def parameters_in_a_plain_list(m, x):
    return m.fc(x) @ m.weights[0] @ m.weights[1].t()


@small(parts=lambda: {"ws": nn.ParameterList([randn(4), randn(4)]), "by": nn.ParameterDict({"a": randn(4)})})
def parameter_list_and_dict(m, x):
    return sum(w * m.fc(x) for w in m.ws) - m.by["a"]


@small(parts=lambda: {"heads": nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})})
def module_dict(m, x):
    return {name: head(m.fc(x)) for name, head in m.heads.items()}


@small
def parameter_used_without_its_module(m, x):
    return x @ m.fc.weight + m.fc.bias


@small
def frozen_parameter(m, x):
    m.fc.bias.requires_grad_(False)
    return m.fc(x)


WORLD = torch.linspace(-1, 1, 4)


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.arange(float(n)).cos()


@small
def global_constant(m, x):
    return m.fc(x) + WORLD


@small
def cached_constant(m, x):
    return m.fc(x) * table(4) + table(4)[0]


@whole
def constant_in_a_closure():
    shift = randn(4)
    return Case(Net(lambda m, x: m.fc(x) + shift, fc=nn.Linear(4, 4)), batch())


@small(parts=lambda: {"emb": nn.Embedding(6, 4)}, inputs=lambda: (torch.tensor([[0, 3, 5]]),))
def tied_weights(m, ids):
    return F.linear(m.fc(m.emb(ids)), m.emb.weight)


@whole
def tied_parameter_two_names():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    return Case(nn.Sequential(a, nn.Tanh(), b), batch())


@whole
def module_under_two_names():
    a = nn.Linear(4, 4)
    return Case(nn.Sequential(a, nn.Tanh(), a), batch())


@small
def module_reused(m, x):
    for _ in range(3):
        x = m.fc(x).tanh()
    return x


@small
def module_made_in_the_forward(m, x):
    return nn.LayerNorm(4)(m.fc(x)) + nn.Linear(4, 4)(x).sum() * 0


@small
def module_copied_in_the_forward(m, x):
    twin = copy.deepcopy(m.fc)
    with torch.no_grad():
        twin.weight.zero_()
    return m.fc(x) + twin(x)


@small(seeded=True)
def initialised_in_the_forward(m, x):
    w = torch.empty(4, 4)
    nn.init.xavier_uniform_(w)
    nn.init.kaiming_uniform_(w[:2])
    nn.init.ones_(w[3])
    return m.fc(x) @ w


@small(parts=lambda: {"drop": nn.Dropout(0.5)}, train=True)
def mode_switched_in_the_forward(m, x):
    m.drop.eval()
    y = m.drop(m.fc(x))
    m.drop.train()
    return y


@whole
def lazy_module():
    return Case(
        nn.Sequential(nn.LazyLinear(5), nn.ReLU()),
        batch(),
        stateful=True,
        seeded=True,
        refusal="parameters are born in the first forward",
    )


@whole
def observers_of_quantisation():
    from torch.ao.quantization import FakeQuantize

    return Case(nn.Sequential(nn.Linear(4, 4), FakeQuantize()).train(), batch(), stateful=True)


@small(stateful=True)
def state_dict_loaded_in_the_forward(m, x):
    m.fc.load_state_dict({name: value * 0.5 for name, value in m.fc.state_dict().items()})
    return m.fc(x)


@small(parts=lambda: {"flat": nn.Parameter(randn(20))})
def parameter_in_one_piece(m, x):
    weight, bias = m.flat[:16].view(4, 4), m.flat[16:]
    return F.linear(m.fc(x), weight, bias)


def overlapping_buffers() -> dict[str, Tensor]:
    base = randn(6)
    return {"low": nn.Buffer(base[:4]), "high": nn.Buffer(base[2:])}


@small(parts=overlapping_buffers, stateful=True, refusal="buffers that overlap in part")
def buffers_that_overlap(m, x):
    m.low.mul_(2.0)
    m.high += 1.0
    return m.fc(x) + m.low * m.high


@whole
def input_that_is_a_parameter():
    model = nn.Linear(4, 4)
    return Case(Net(lambda m, x: m.fc(x * 2), fc=model), (model.weight,))


@small(parts=lambda: {"hidden": [nn.Linear(4, 4), nn.Linear(4, 4)]})
def modules_in_a_plain_list(m, x):
    for layer in m.hidden:
        x = layer(m.fc(x)).tanh()
    return x


@small(parts=lambda: {"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
def slice_of_a_module_list(m, x):
    for layer in m.layers[1:3]:
        x = layer(x)
    return m.layers[-1](x)


@small(parts=lambda: {"cached": parametrizations.weight_norm(nn.Linear(4, 4))})
def parametrisation_cached(m, x):
    with parametrize.cached():
        return m.cached(m.fc(x)) + m.cached(x * 2)


@whole
def forward_replaced_on_the_instance():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner = model[0].forward
    model[0].forward = lambda x: inner(x) * 2
    return Case(model, batch())


@small(train=True, parts=lambda: {"norm": nn.BatchNorm1d(4)}, stateful=True)
def functional_call_with_buffers(m, x):
    state = {name: t.detach().clone() for name, t in m.norm.named_buffers()}
    y = functional_call(m.norm, state, (m.fc(x),))
    return y + state["running_mean"]


# ---- randomness ----------------------------------------------------------------------------------------------------


@whole
def dropout_in_training():
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.4), nn.Linear(32, 4), nn.Dropout(0.2)).train()
    return Case(model, batch(), seeded=True)


@small(inputs=lambda: (randn(2, 4, 3, 3),), train=True, seeded=True)
def dropout_of_every_kind(m, x):
    x = F.dropout2d(x, 0.5) + F.alpha_dropout(x, 0.3, training=True)
    x = F.dropout(x, 0.5, inplace=True) + F.feature_alpha_dropout(x, 0.3, training=True)
    return m.fc(x.mean((2, 3)))


@whole
def rrelu_in_training():
    return Case(nn.Sequential(nn.Linear(4, 4), nn.RReLU(), nn.Linear(4, 2)).train(), batch(), seeded=True)


@small(seeded=True)
def gumbel_softmax_hard(m, x):
    return F.gumbel_softmax(m.fc(x), hard=True) @ m.fc.weight


@small(seeded=True)
def multinomial_choice(m, x):
    picked = torch.multinomial(m.fc(x).softmax(-1), 2, replacement=True)
    return x.gather(1, picked)


@small
def generator_made_in_the_forward(m, x):
    g = torch.Generator().manual_seed(11)
    return m.fc(x) + torch.rand(3, 4, generator=g) - torch.rand(3, 4, generator=g)


@small(parts=lambda: {"dice": torch.Generator().manual_seed(12)}, seeded=True)
def generator_held_by_the_model(m, x):
    return m.fc(x) + torch.randn(4, generator=m.dice) * torch.rand(4)


@small(seeded=True)
def bernoulli_in_place(m, x):
    keep = torch.empty(3, 1).bernoulli_(0.5)
    return m.fc(x) * keep.div_(0.5)


@small(seeded=True)
def random_fills(m, x):
    y = torch.empty(3, 4)
    y[0].normal_()
    y[1].uniform_(-1, 1)
    y[2].exponential_()
    return m.fc(x) + y + torch.poisson(y.abs())


@small(seeded=True)
def forked_generator(m, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        a = torch.rand(4)
    return m.fc(x) + a + torch.rand(4)


@small(seeded=True)
def seeded_in_the_forward(m, x):
    torch.manual_seed(3)
    return m.fc(x) + torch.randn(3, 4)


@small(seeded=True)
def same_draw_twice(m, x):
    state = torch.get_rng_state()
    a = torch.rand(4)
    torch.set_rng_state(state)
    return m.fc(x) + a - torch.rand(4) * 2


@small(seeded=True)
def shuffled_batch(m, x):
    order = torch.randperm(3)
    return m.fc(x[order])[order.argsort()] + torch.randint(0, 5, (3, 1))


@small(seeded=True)
def reparametrised_sample(m, x):
    mean, spread = m.fc(x).chunk(2, 1)
    return mean + spread.exp() * torch.randn_like(spread)


@small(seeded=True, escapes=True)
def distribution_sample(m, x):
    normal = torch.distributions.Normal(m.fc(x), F.softplus(x))
    sample = normal.rsample()
    return sample, normal.log_prob(sample)


@whole
def fractional_max_pool():
    return Case(nn.Sequential(nn.Conv2d(3, 4, 1), nn.FractionalMaxPool2d(2, output_size=3)), images(), seeded=True)


@small(seeded=True)
def noise_from_numpy_and_python(m, x):
    noise = torch.from_numpy(np.random.rand(4).astype(np.float32))
    return m.fc(x) + noise * random.random()


@small(seeded=True, train=True)
def stochastic_depth(m, x):
    for _ in range(4):
        if random.random() < 0.5:
            x = m.fc(x) + x
    return m.fc(x) * torch.bernoulli(torch.full((3, 1), 0.5))


@small(parts=lambda: {"rnn": nn.LSTM(4, 4, 2, dropout=0.5)}, train=True, seeded=True)
def lstm_with_dropout(m, x):
    return m.rnn(m.fc(x))[0]


@small(parts=lambda: {"drop": nn.Dropout(0.5)}, seeded=True, train=True)
def random_under_no_grad(m, x):
    with torch.no_grad():
        mask = m.drop(torch.ones(3, 4))
    return m.fc(x) * mask


# ---- gradients: modes, checkpoints, functions, hooks ---------------------------------------------------------------


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


# ---- torch.func ----------------------------------------------------------------------------------------------------


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


# ---- scripted, compiled, higher-order, custom ----------------------------------------------------------------------


def double_and_shift(x: Tensor, k: float) -> Tensor:
    if k > 1.0:
        return x * k + 1
    return x - k


@small(refusal="gradients of what TorchScript computes")
def scripted_function(m, x):
    return scripted()(m.fc(x), 2.0) * scripted()(x, 0.5)


@functools.lru_cache
def scripted():
    with silence():
        return torch.jit.script(double_and_shift)


@whole
def scripted_module():
    inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    return Case(nn.Sequential(nn.Linear(4, 4), inner, nn.Tanh()), batch())


@whole
def scripted_model():
    return Case(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))), batch())


@whole
def traced_submodule():
    inner = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()), randn(3, 4))
    return Case(Net(lambda m, x: m.inner(m.fc(x)) + x, fc=nn.Linear(4, 4), inner=inner), batch())


@whole
def scripted_batchnorm():
    inner = torch.jit.script(nn.BatchNorm1d(4).train())
    return Case(nn.Sequential(nn.Linear(4, 4), inner).train(), batch(), stateful=True)


@whole
def symbolic_trace():
    return Case(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))), batch())


@whole
def exported_model():
    exported = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), batch())
    return Case(exported.module(), batch(), escapes=True)


@whole
def compiled_submodule():
    torch.compiler.reset()
    inner = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    return Case(Net(lambda m, x: m.inner(x) + m.fc(x), fc=nn.Linear(4, 4), inner=inner), batch())


@whole
def compiled_in_place():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model[1].compile(backend="eager")
    return Case(model, batch())


@whole
def compiled_model():
    torch.compiler.reset()
    return Case(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager"), batch())


@whole
def compiled_function():
    torch.compiler.reset()
    gate = torch.compile(lambda a, b: a.sigmoid() * b, backend="eager")

    def forward(m, x):
        with silence():  # the compiler looks at `.grad`
            return gate(m.fc(x), x)

    return Case(Net(forward, fc=nn.Linear(4, 4)), batch())


@small(escapes=True)
def branch_by_cond(m, x):
    return torch.cond(x.sum() > 0, lambda t: m.fc(t).relu(), lambda t: m.fc(t).tanh(), (x,))


@small(inputs=lambda: (randn(1, 2, 8, 4),))
def flexible_attention(m, x):
    with silence():  # it warns that it is slow when it is not compiled
        q, k = m.fc(x).detach(), x.detach()  # on this device it has no backward
        return flex_attention(q, k, k, score_mod=lambda score, b, h, i, j: score + (i - j))


@torch.library.custom_op("zoo::shifted", mutates_args=())
def shifted(x: Tensor, by: float) -> Tensor:
    return x * 2 + by


shifted.register_autograd(lambda ctx, g: (g * 2, None))


@torch.library.custom_op("zoo::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, x: Tensor) -> None:
    total += x


@torch.library.custom_op("zoo::bump", mutates_args={"x"})
def bump(x: Tensor, by: float) -> Tensor:
    old = x.clone()
    x.numpy()[...] += by
    return old


LIBRARY = torch.library.Library("zoo", "FRAGMENT")
LIBRARY.define("halve(Tensor x) -> Tensor")
LIBRARY.impl("halve", lambda x: x / 2, "CompositeImplicitAutograd")


@small
def custom_op(m, x):
    return shifted(m.fc(x), 1.0) + torch.ops.zoo.shifted(x, 0.5)


@small
def custom_op_that_writes(m, x):
    total = torch.zeros(3, 4)
    accumulate(total, m.fc(x).detach())
    torch.ops.zoo.accumulate.default(total[1:], x[1:].detach())
    return total + m.fc(x)


@small
def custom_op_that_writes_unseen(m, x):
    y = m.fc(x).detach()
    v = y[0]
    old = bump(y, 3.0)
    return v + old + m.fc(x)


@small
def custom_op_of_a_library(m, x):
    return torch.ops.zoo.halve(m.fc(x))


@small
def aten_ops_by_hand(m, x):
    y = torch.ops.aten.addmm(m.fc.bias, x, m.fc.weight.t())
    torch.ops.aten.relu_.default(y)
    return torch.ops.aten.slice.Tensor(y, 1, 0, 2) + torch.ops.prims.sin(x)[:, :2]


class Tagged(Tensor):
    """A subclass that carries a word."""

    word = "tag"


class Logged(Tensor):
    """A subclass with its own __torch_function__."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@small(inputs=lambda: (randn(3, 4).as_subclass(Tagged),))
def tensor_subclass(m, x):
    return m.fc(x).relu() + 1


@small(inputs=lambda: (randn(3, 4).as_subclass(Logged),))
def tensor_subclass_with_a_protocol(m, x):
    return torch.cat([m.fc(x), x]) * 2


@small
def tensor_subclass_inside(m, x):
    y = m.fc(x).as_subclass(Tagged)
    return (y * 2).as_subclass(Tensor) + 1


class Wrapped(Tensor):
    """A subclass that holds another tensor and sees every ATen call."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, args)
        return torch.utils._pytree.tree_map_only(Tensor, Wrapped, func(*args, **(kwargs or {})))


@small(refusal="what a wrapper subclass does lies beneath torch functions")
def tensor_subclass_that_dispatches(m, x):
    y = Wrapped(m.fc(x).detach()) * 2
    return (y + 1).inner + m.fc(x)


class Halve(TorchDispatchMode):
    """A dispatch mode of the user's: every exponential is halved."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is torch.ops.aten.exp.default else out


@small(refusal="what a dispatch mode does lies beneath torch functions")
def dispatch_mode_of_the_users(m, x):
    with Halve():
        y = m.fc(x).exp()
    return y + x.exp()


class Negate(TorchFunctionMode):
    """A mode of the user's: every sine is its negative."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return -out if func is torch.sin else out


@small
def function_mode_of_the_users(m, x):
    with Negate():
        y = torch.sin(m.fc(x))
    return y + torch.sin(x)


@small
def default_device_inside(m, x):
    with torch.device("cpu"):
        return m.fc(x) + torch.ones(4)


@small(refusal="nothing is seen of what runs with torch functions disabled")
def torch_functions_disabled(m, x):
    with torch._C.DisableTorchFunction():
        y = x * 2
    return m.fc(y)


# ---- what a model may be -------------------------------------------------------------------------------------------


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


# ---- inputs and outputs --------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Parcel:
    body: Tensor
    label: str
    extras: dict


@frozen
class Crate:
    body: Tensor
    more: tuple


class Box:
    """An object of the user's, known to nobody."""

    def __init__(self, inside):
        self.inside = inside


@small(inputs=lambda: ({"x": randn(3, 4), "deep": [randn(4), (randn(4), "word")]},))
def nested_containers(m, d):
    y = m.fc(d["x"])
    return {"y": y, "more": [d["deep"][0] * 2, (y[0], None, d["deep"][1][1])]}


@small(inputs=lambda: (Pair(randn(3, 4), [randn(4)]),))
def namedtuple_in_and_out(m, p):
    return Pair(m.fc(p.left) + p.right[0], p.left)


@small(inputs=lambda: (Parcel(randn(3, 4), "in", {"k": randn(4)}),))
def dataclass_in_and_out(m, p):
    return Parcel(m.fc(p.body), "out", {"k": p.extras["k"] * 2})


@small(inputs=lambda: (Crate(randn(3, 4), (randn(4), 1)),))
def attrs_in_and_out(m, c):
    return Crate(m.fc(c.body) + c.more[0], (c.more[1], c.body * 2))


@small(inputs=lambda: (Box(randn(3, 4)),))
def object_in_and_out(m, b):
    return Box(m.fc(b.inside))


@small
def ordered_and_default_dicts(m, x):
    groups = defaultdict(list)
    groups["rows"].append(m.fc(x))
    return OrderedDict(b=x * 2, a=m.fc(x)), groups


@small(kwargs=lambda: {"scale": 3.0, "mask": torch.ones(3, 4), "extra": randn(4)})
def keyword_inputs(m, x, *, scale=1.0, mask=None, **rest):
    return m.fc(x) * scale * mask + rest["extra"]


@small(inputs=lambda: (randn(3, 4), None, 2, "mean"))
def inputs_that_are_not_tensors(m, x, mask, n, how):
    return getattr(m.fc(x) * n, how)(0) if mask is None else mask


@small
def outputs_that_are_not_tensors(m, x):
    return m.fc(x), None, "name", 3, 2.5, x.shape, torch.float32, slice(1, 2), {"n": x.shape[0]}


@small(escapes=True)
def output_that_left_torch(m, x):
    y = m.fc(x)
    return y.sum().item(), y.tolist(), y


@small
def integer_outputs(m, x):
    y = m.fc(x)
    return y.argmax(1), (y > 0), y.long()


@small
def same_tensor_returned_twice(m, x):
    y = m.fc(x)
    return y, [y, x], y


@small(inputs=lambda: [randn(3, 4)] * 2)
def same_tensor_given_twice(m, a, b):
    return m.fc(a) * b


@small(inputs=lambda: (randn(3, 4), randn(4), randn(4)))
def inputs_by_star(m, x, *shifts):
    return m.fc(x) + sum(shifts)


@small
def default_argument_that_is_a_tensor(m, x, shift=torch.ones(4)):  # noqa: B008
    return m.fc(x) + shift


@small
def input_returned(m, x):
    return x, m.fc(x)


@small
def view_of_the_input_returned(m, x):
    return x.t(), x[1], m.fc(x)


@small
def parameter_returned(m, x):
    return m.fc.weight, m.fc(x)


@small
def constant_returned(m, x):
    return torch.ones(2), m.fc(x), WORLD


@small
def view_and_base_returned(m, x):
    y = m.fc(x)
    return y, y.view(4, 3), y[0, 0]


@small
def empty_containers_returned(m, x):
    return [], {}, (), m.fc(x)


@small
def nothing_returned(m, x):
    m.fc(x)


@small(inputs=lambda: (randn(3, 4), randn(4)))
def unused_input_and_orphans(m, x, unused):
    m.fc(x).sin()
    return x * 2 + torch.ones(4)


@small(inputs=lambda: (torch.tensor(2.0), torch.zeros(0, 4)))
def scalars_and_empty_tensors(m, s, none):
    return m.fc(none).sum() + s, m.fc(none), none.mean(1) * s


@small(inputs=lambda: (randn(3, 4, requires_grad=True),))
def input_that_requires_grad(m, x):
    return m.fc(x).exp()


@small(inputs=lambda: (randn(4, 3).t(), randn(3, 8)[:, ::2], randn(4).expand(3, 4)))
def inputs_of_odd_geometry(m, turned, gaps, spread):
    return m.fc(turned) + gaps.contiguous() * spread, turned.is_contiguous()


# ---- control flow and contents that leave torch --------------------------------------------------------------------


@small(escapes=True)
def early_return(m, x):
    y = m.fc(x)
    if y.mean() > -100:
        return y
    return y * 0


@small(escapes=True)
def loop_until_small(m, x):
    while x.abs().max().item() > 0.1:
        x = x * 0.7
    return m.fc(x)


@small
def recursion(m, x, depth=3):
    return x if depth == 0 else m.fc(recursion(m, x, depth - 1)).tanh() + x


@small(escapes=True)
def branch_on_a_comparison(m, x):
    y = m.fc(x)
    return y.relu() * 2 if (y.sum() > 0 and y[0, 0] < 10) else y.tanh()


@small(escapes=True)
def float_of_a_tensor(m, x):
    return m.fc(x) * float(x.max()) + int(x.abs().sum())


@small(escapes=True)
def list_indexed_by_a_tensor(m, x):
    gains = [1.0, 2.0, 3.0, 4.0]
    return m.fc(x) * gains[m.fc(x)[0].argmax()]


@small(escapes=True)
def python_sorts_tensors(m, x):
    rows = sorted(m.fc(x), key=lambda row: row.sum())
    return torch.stack(rows) + max(x[:, 0]) + min(x.flatten().tolist())


@small(escapes=True)
def membership_and_equality(m, x):
    y = m.fc(x)
    return y * (2 if torch.equal(y, x) or 5.0 in y or torch.allclose(y, y * 2) else 3)


@small
def python_iterates(m, x):
    a, b, c = m.fc(x)
    return sum(row * k for k, row in enumerate(x)) + a * len(x) - b + c


@small
def generator_of_layers(m, x):
    def states(h):
        for _ in range(3):
            h = m.fc(h).tanh()
            yield h

    return torch.stack(list(states(x)))


@small(escapes=True)
def numpy_round_trip(m, x):
    a = np.tanh(m.fc(x).detach().numpy())
    return torch.from_numpy(a) + x


@small(escapes=True)
def numpy_functions_on_tensors(m, x):
    return np.sin(m.fc(x).detach()) + x * np.float32(2) + np.float64(0.5) * x


@small(refusal="what is loaded comes from nowhere", escapes=True)
def saved_and_loaded(m, x):
    file = io.BytesIO()
    torch.save(m.fc(x).detach(), file)
    file.seek(0)
    return torch.load(file) + x


@small(asks_identity=True)
def identity_is_asked(m, x):
    y = m.fc(x)
    same = y.contiguous() is y and y.to(torch.float32) is y and y.t()._base is y and y[0].data_ptr() == y.data_ptr()
    return y * 2 if same else y * 3


@small(escapes=True)
def copied_tensors(m, x):
    y = m.fc(x).detach()
    deep, flat = copy.deepcopy(y), copy.copy(y)
    y.zero_()
    return deep * 2 + flat + m.fc(x)


@small
def meta_tensors_inside(m, x):
    with torch.device("meta"):
        shape = (torch.ones(3, 4) @ torch.ones(4, 4)).shape
    return m.fc(x).reshape(shape)


@small(escapes=True)
def tensor_rebuilt_from_python(m, x):
    y = m.fc(x)
    top = [row.max().item() for row in y]
    return torch.tensor(top)[:, None] + y


@small
def tensor_of_scalar_tensors(m, x):
    y = m.fc(x).detach()
    return torch.tensor([y[0, 0], y[1, 1], 0.5, y[2, 3]]) + x


@small
def legacy_constructors(m, x):
    return m.fc(x) + torch.Tensor([1, 2, 3, 4]) * torch.FloatTensor(4).fill_(0.5) + torch.Tensor(x.detach())


@small
def constants_from_everywhere(m, x):
    ramp = torch.from_numpy(np.arange(4, dtype=np.float32))
    return m.fc(x) + ramp * torch.as_tensor([1.0, 0.0, 1.0, 0.0]) + x.new_tensor([0.5])


@small(escapes=True)
def tensors_as_sizes(m, x):
    n = (x[0, 0] > -100).long() * 2
    y = m.fc(x)
    return y[:n].reshape(n, 4) + torch.arange(n)[:, None], y.view(n * 2, 3)


@small(inputs=lambda: (randn(3, 4), torch.tensor(2)), escapes=True)
def tensors_as_integers(m, x, k):
    return m.fc(x).roll(int(k), 1)[:, :k].repeat(k, 1) + torch.zeros(k)


@small(escapes=True)
def shapes_that_depend_on_data(m, x):
    y = m.fc(x)
    i, j = torch.where(y > 0)
    return y[i, j].sum() + y[y < 0].prod(), y.nonzero(), y.round().unique(), y.masked_select(x > 0)


@small(inputs=lambda: (randn(3, 4), torch.tensor([2, 0, 1])), escapes=True)
def repeats_that_depend_on_data(m, x, counts):
    return m.fc(x).repeat_interleave(counts, 0), F.one_hot(counts), counts.bincount()


@small(escapes=True)
def exception_caught(m, x):
    y = m.fc(x)
    try:
        y @ x
    except RuntimeError:
        y = y + 1
    try:
        [][y.argmax()]
    except IndexError:
        y = y * 2
    return y


@small(escapes=True)
def assertions_on_contents(m, x):
    assert x.isfinite().all()
    torch._assert(x.shape[0] == 3, "three rows")
    return m.fc(x)


@small(escapes=True)
def printing_in_the_forward(m, x):
    y = m.fc(x)
    f"{y} {y.shape} {y[0, 0]:.3f}"
    return repr(y) and y * 2


@small(escapes=True)
def greedy_decoding(m, x):
    ids = x[:, :1].long()
    for _ in range(3):
        ids = torch.cat([ids, m.fc(x + ids.sum(1, keepdim=True)).argmax(1, keepdim=True)], 1)
        if (ids[:, -1] == 9).all():
            break
    return ids


@small(parts=lambda: {"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}, escapes=True)
def experts_chosen_by_content(m, x):
    choice, out = m.fc(x)[:, :3].argmax(1), torch.zeros(3, 4)
    for k, expert in enumerate(m.experts):
        rows = (choice == k).nonzero(as_tuple=True)[0]
        if rows.numel():
            out.index_add_(0, rows, expert(x[rows]))
    return out


@small(refusal="other threads are not seen")
def threads(m, x):
    results = {}
    workers = [threading.Thread(target=lambda k=k: results.update({k: m.fc(x + k)})) for k in range(3)]
    for worker in workers:
        worker.start()
        worker.join()
    return sum(results[k] for k in range(3))


@small
def thread_that_does_nothing_here(m, x):
    worker = threading.Thread(target=lambda: torch.ones(3) + 1)
    worker.start()
    y = m.fc(x)
    worker.join()
    return y


@contextmanager
def scaled(m):
    m.fc.gain, before = 2.0, getattr(m.fc, "gain", 1.0)
    yield
    m.fc.gain = before


@small
def context_manager_of_the_users(m, x):
    with scaled(m):
        y = m.fc(x) * m.fc.gain
    return y * m.fc.gain


@small
def function_by_another_name(m, x):
    unary = tanh_by_another_name
    return unary(m.fc(x)) + vars(torch)["sin"](x) + Tensor.cos(x)


# ---- numbers -------------------------------------------------------------------------------------------------------


@small
def complex_numbers(m, x):
    z = torch.polar(m.fc(x).abs(), x)
    return (z * z.conj()).real + torch.view_as_real(z.mT @ z).sum() + z.angle()


@small
def fourier(m, x):
    spectrum = torch.fft.rfft(m.fc(x), dim=1)
    return torch.fft.irfft(spectrum * 1j, n=4, dim=1) + torch.fft.fftshift(x)


@small
def stft_round_trip(m, x):
    wave = m.fc(x).flatten().repeat(4)
    window = torch.hann_window(8)
    spectrum = torch.stft(wave, 8, window=window, return_complex=True)
    return torch.istft(spectrum, 8, window=window)


@small
def sparse_matrix(m, x):
    where = torch.tensor([[0, 1, 2], [2, 0, 1]])
    s = torch.sparse_coo_tensor(where, x[:, 0], (3, 3), check_invariants=False).coalesce()
    return torch.sparse.mm(s, m.fc(x)) + s.to_dense().sum()


@small
def sparse_output(m, x):
    return m.fc(x).relu().to_sparse(), m.fc(x)


@small(refusal="nested tensors")
def nested_tensor(m, x):
    with silence():
        ragged = torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)
    return m.fc(ragged).values()


@small
def many_dtypes(m, x):
    y = m.fc(x)
    whole = (y * 10).int() & 7
    return y.half().double() + y.bfloat16().float() + whole + (y > 0) + y.to(torch.float64).sum()


@small
def half_precision_matmul(m, x):
    return m.fc(x).bfloat16() @ x.mT.bfloat16(), x.half().softmax(-1)


@whole
def double_precision_model():
    return Case(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), (randn(3, 4).double(),))


@whole
def quantized_dynamic():
    from torch.ao.quantization import quantize_dynamic

    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return Case(quantize_dynamic(plain, {nn.Linear}, torch.qint8), batch())


@small
def quantised_tensor(m, x):
    with silence():
        q = torch.quantize_per_tensor(m.fc(x), 0.1, 0, torch.qint8)
    return q.dequantize() + q.int_repr()


@small
def nans_and_infinities(m, x):
    y = m.fc(x)
    return y / 0, (y - 100).log(), y.masked_fill(x > 0, float("-inf")).softmax(1), torch.nan_to_num(y / 0)


@small
def einsum_and_tensordot(m, x):
    return torch.einsum("ij,kj,k->ik", m.fc(x), x, x[:, 0]), torch.einsum("ii", x[:, :3]), torch.tensordot(x, x, 2)


@small
def decompositions(m, x):
    a = m.fc(x)[:, :3] @ x[:, :3].mT + 3 * torch.eye(3)
    q, r = torch.linalg.qr(a)
    return torch.linalg.svdvals(a), q.abs() @ r.abs(), torch.linalg.solve(a, x), torch.linalg.det(a), a.inverse()


@small
def several_results(m, x):
    y = m.fc(x)
    top, order = y.topk(2)
    low = y.min(1)
    deviation, mean = torch.std_mean(y, 1)
    whole, part = torch.frexp(y)
    return top, order, y.sort(-1, descending=True), low.values, deviation + mean, y.aminmax(), part, y.cummax(0), whole


@small
def splits_and_joins(m, x):
    a, b = m.fc(x).split([1, 3], 1)
    c, d = x.tensor_split(2, 1)
    return torch.cat([a, b, c], 1), torch.stack([c, d]), torch.meshgrid(a[:, 0], d[0], indexing="ij"), x.unbind(1)


@small
def operators_from_the_right(m, x):
    y = m.fc(x)
    return (
        2 - y,
        1 / (y + 9),
        2**y,
        7 // (y.detach() + 9),
        5 % (y + 9),
        -y,
        abs(y),
        y @ x.mT,
        y[0].detach() // 0.3,
        ~(y > 0),
        True & (y > 0),
    )


@small
def losses(m, x):
    y, labels = m.fc(x), torch.tensor([0, 2, 3])
    return (
        F.cross_entropy(y, labels),
        F.mse_loss(y, x),
        F.nll_loss(y.log_softmax(1), labels, reduction="none"),
        F.huber_loss(y, x),
    )


# ---- layers --------------------------------------------------------------------------------------------------------


def words() -> tuple[Tensor]:
    return (randn(2, 5, 4),)


@small(parts=lambda: {"rnn": nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)}, inputs=words)
def lstm_bidirectional(m, x):
    out, (h, c) = m.rnn(m.fc(x))
    return out[:, -1].sum() + h[-1], c


@small(parts=lambda: {"gru": nn.GRU(4, 3), "rnn": nn.RNN(4, 3, nonlinearity="relu")}, inputs=words)
def gru_and_rnn(m, x):
    return m.gru(m.fc(x))[0], m.rnn(x, torch.zeros(1, 5, 3))[1]


@small(parts=lambda: {"cell": nn.LSTMCell(4, 3), "gru": nn.GRUCell(3, 3)}, inputs=words)
def cells_in_a_loop(m, x):
    h = c = g = x.new_zeros(2, 3)
    for step in m.fc(x).unbind(1):
        h, c = m.cell(step, (h, c))
        g = m.gru(h, g)
    return g


@small(parts=lambda: {"rnn": nn.LSTM(4, 3, batch_first=True)}, inputs=words)
def packed_sequence(m, x):
    packed = pack_padded_sequence(m.fc(x), torch.tensor([5, 3]), batch_first=True)
    out, (h, _) = m.rnn(packed)
    return pad_packed_sequence(out, batch_first=True)[0], h


def attention(**options: Any) -> dict[str, nn.Module]:
    return {"att": nn.MultiheadAttention(4, 2, batch_first=True, **options)}


@small(parts=attention, inputs=words, loose=True)
def attention_in_evaluation(m, x):
    y = m.fc(x)
    return m.att(y, y, y, need_weights=True)


@small(parts=lambda: attention(dropout=0.3), inputs=words, train=True, seeded=True)
def attention_in_training(m, x):
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return m.att(m.fc(x), x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


@small(parts=lambda: attention(add_bias_kv=True, add_zero_attn=True), inputs=words)
def attention_with_padding(m, x):
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return m.att(m.fc(x), x, x, key_padding_mask=padding)


def heads(m, x):
    q, k, v = (m.fc(x) * s for s in (1.0, 0.5, 2.0))
    return (t.view(2, 5, 2, 2).transpose(1, 2) for t in (q, k, v))


@small(inputs=words)
def scaled_dot_product_attention(m, x):
    q, k, v = heads(m, x)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril(), scale=0.3)
    return (causal + masked).transpose(1, 2).reshape(2, 5, 4)


@small(inputs=words, train=True, seeded=True)
def scaled_dot_product_attention_with_dropout(m, x):
    q, k, v = heads(m, x)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)


@whole
def transformer_encoder_in_evaluation():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 2).eval(), words(), loose=True)


@whole
def transformer_in_training():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True, norm_first=True)
    return Case(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), words(), seeded=True)


@small(
    parts=lambda: {"dec": nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)}, inputs=words, loose=True
)
def transformer_decoder(m, x):
    return m.dec(m.fc(x), x)


@whole
def convolutions():
    return Case(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3, padding="same", padding_mode="circular"),
            nn.ConvTranspose2d(6, 4, 2, stride=2, output_padding=1),
            nn.Conv2d(4, 4, 1, dilation=2, bias=False),
            nn.GroupNorm(2, 4),
            nn.PReLU(),
        ),
        images(),
    )


@whole
def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)).eval()
    return Case(model.to(memory_format=torch.channels_last), (randn(2, 3, 6, 6).to(memory_format=torch.channels_last),))


@small(inputs=images)
def resampling(m, x):
    up = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    grid = F.affine_grid(torch.eye(2, 3)[None].repeat(2, 1, 1), [2, 3, 4, 4], align_corners=False)
    return m.fc(F.grid_sample(F.pad(up, (1, 1, 0, 2), "reflect"), grid, align_corners=False))


@small(inputs=images)
def patches(m, x):
    columns = F.unfold(x, 2, stride=2)
    back = F.fold(columns * 2, (6, 6), 2, stride=2)
    return m.fc(columns[..., :4]), F.pixel_unshuffle(back, 2), F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2)


@whole
def pooling():
    return Case(
        nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(2), nn.LPPool2d(2, 2)
        ),
        images(),
    )


@small(inputs=images)
def pooling_with_places(m, x):
    y, places = F.max_pool2d(x * m.fc.weight.sum(), 2, return_indices=True)
    return F.max_unpool2d(y, places, 2), F.adaptive_max_pool2d(x, 2, return_indices=True)


@small(
    parts=lambda: {"bag": nn.EmbeddingBag(6, 4, mode="max")},
    inputs=lambda: (torch.tensor([0, 2, 5, 1]), torch.tensor([0, 2])),
)
def embedding_bag(m, ids, starts):
    return m.fc(m.bag(ids, starts))


@small
def norms(m, x):
    y = F.layer_norm(m.fc(x), (4,), m.fc.bias)
    return (
        F.rms_norm(y, (4,)),
        F.normalize(x, dim=1),
        y.norm(),
        F.local_response_norm(x[:, None], 2),
        y.norm(p=1, dim=0),
    )


@small
def activations(m, x):
    y = m.fc(x)
    kinds = (
        F.gelu,
        F.elu,
        F.celu,
        F.selu,
        F.mish,
        F.softplus,
        F.hardswish,
        F.logsigmoid,
        F.softsign,
        F.tanhshrink,
        F.relu6,
    )
    return [f(y) for f in kinds], F.glu(y), F.softmin(y, 1), F.threshold(y, 0.1, 2.0), F.prelu(y, m.fc.bias[:1])


@small(parts=lambda: {"mix": nn.Bilinear(4, 4, 2)})
def bilinear_and_distances(m, x):
    return m.mix(m.fc(x), x), F.cosine_similarity(m.fc(x), x), torch.cdist(m.fc(x), x), F.pairwise_distance(x, m.fc(x))


# ---- views of several tensors, memory that others see, forwards that leave marks --------------------------------------


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


# -- how they are refused ------------------------------------------------------------------------------------------------

# The class of the error that a capture raises, and words of it: a refusal of another kind is a fault.
CAPTURE_REFUSED = {
    "write_to_inputs_that_overlap": ("CaptureError: share a part of their memory",),
    "foreach_that_fails_half_way": ("CaptureError: wrote a part and then raised",),
    "lazy_module": ("UnsupportedModel: has no parameters yet",),
    "buffers_that_overlap": ("CaptureError: share a part of their memory",),
    "linearised": ("CaptureError: a dispatch mode of the model's own is on",),
    "tensor_subclass_that_dispatches": ("UnknownOrigin: nothing in this thread was seen to make it",),
    "dispatch_mode_of_the_users": ("CaptureError: a dispatch mode of the model's own is on",),
    "threads": ("UnknownOrigin: nothing in this thread was seen to make it",),
    "nested_tensor": (
        "UnknownOrigin: nothing in this thread was seen to make it",
        "CaptureError: the forward computes with nested tensors",
    ),
    "numpy_seen_through_two_tensors": ("CaptureError: shares its memory with another one through numpy",),
    "dlpack_pair": ("CaptureError: shares its memory with another one through numpy",),
}
# The same of gradients.
GRADIENTS_REFUSED = {
    "hook_on_the_backward_of_a_module": ("NotDifferentiable: a module's backward hook",),
    "saved_tensor_hooks": ("NotDifferentiable: saved_tensors_hooks",),
    "scripted_function": ("NotDifferentiable: a scripted function",),
    "shapes_that_depend_on_data": ("NotDifferentiable: torch itself has no backward for a call",),
    "operators_from_the_right": ("NotDifferentiable: torch itself has no backward for a call",),
    "aten_ops_by_hand": ("RuntimeError: no autograd formula was registered",),
}


def is_refused_so(name: str, error: BaseException, *tables: Mapping[str, tuple[str, ...]]) -> bool:
    """Is this the error by which a model of the zoo is refused; or the one that the model raises by itself?"""
    written = [text.partition(": ") for table in tables or (CAPTURE_REFUSED,) for text in table.get(name, ())]
    if any(type(error).__name__ == kind and words in str(error) for kind, _, words in written):
        return True
    case = MODELS[name]()
    try:
        with silence():
            case.model(*case.args, **case.kwargs)
    except Exception as plain:
        return type(plain) is type(error) and str(plain).splitlines()[:1] == str(error).splitlines()[:1]
    return False
