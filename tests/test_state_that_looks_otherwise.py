"""Modules and refreshed programs begin where the model stands: with what the forward before has left in it.

Witness: the plain model, run as often.
"""

import pytest
import torch
from torch import nn

import replaylens as rl

OTHERWISE, ALIKE = [], []


def otherwise(function):
    """The next forward does another thing, or may: Python looks at more than the content of what stands there."""
    OTHERWISE.append(function)
    return function


def alike(function):
    """The next forward does what the last one did."""
    ALIKE.append(function)
    return function


class Model(nn.Module):
    """Does what a function says, with two rows of state in buffers, a parameter and attributes."""

    def __init__(self, does):
        super().__init__()
        torch.manual_seed(1)
        self.does, self.a = does, nn.Linear(4, 4)
        self.register_buffer("h", torch.zeros(1, 4))
        self.register_buffer("k", torch.arange(8.0).view(2, 4))
        self.register_buffer("v", self.k[:1])
        self.register_buffer("same", self.h)
        self.register_buffer("flag", torch.tensor(True))
        self.p = nn.Parameter(torch.ones(1, 4))
        self.t, self.held, self.known = torch.zeros(1, 4), [torch.zeros(1, 4)], {"k": torch.zeros(1, 4)}

    def forward(self, x):
        return self.does(self, x)


@otherwise
def a_memory_whose_length_is_read(m, x):
    m.k = torch.cat([m.k, m.a(x).detach()])
    return m.a(x) * len(m.k)


@otherwise
def a_memory_whose_shape_nobody_reads(m, x):
    m.k = torch.cat([m.k, m.a(x).detach()])
    return m.a(x) + m.k.mean(0)


@otherwise
def a_memory_cut_by_its_size(m, x):
    m.k = torch.cat([m.k, x])
    return m.a(x) + m.k[: m.k.size(0) - 1].sum(0) + torch.arange(m.k.shape[0]).float().sum()


@otherwise
def a_memory_that_shrinks(m, x):
    y = m.a(x) * m.k.numel()
    m.k = m.k[:1]
    return y


@otherwise
def a_buffer_of_which_python_reads_the_length_alone(m, x):
    y = m.a(x) * len(m.k)
    m.k = torch.ones(len(m.k) + 1, 4)
    return y


@otherwise
def a_buffer_of_which_python_reads_the_dtype_alone(m, x):
    y = m.a(x) * m.k.dtype.itemsize
    m.k = torch.ones(2, 4, dtype=torch.float64)
    return y


@otherwise
def a_buffer_of_which_python_reads_the_offset_alone(m, x):
    y = m.a(x) * (m.k.storage_offset() + 1)
    m.k = torch.ones(4, 4)[2:]
    return y


@otherwise
def a_buffer_of_which_python_reads_the_flag_alone(m, x):
    y = m.a(x) * (2 if m.k.requires_grad else 3)
    m.k = torch.ones(2, 4).requires_grad_()
    return y


@otherwise
def a_dtype(m, x):
    y = m.a(x) * m.k.element_size() + m.k.sum()
    m.k = m.k.double() if m.k.dtype == torch.float32 else m.k.float()
    return y.float()


@otherwise
def a_number_of_dimensions(m, x):
    y = m.a(x) * m.k.dim() + m.k.sum()
    m.k = m.k.view(8) if m.k.dim() == 2 else m.k.view(2, 4)
    return y


@otherwise
def strides(m, x):
    y = m.a(x) * m.k.stride(0)
    m.k = (m.k + 1).mT.contiguous().mT
    return y


@otherwise
def a_layout(m, x):
    y = m.a(x) * (2 if m.k.is_sparse else 3)
    m.k = m.k.to_sparse()
    return y


@otherwise
def a_flag_of_autograd(m, x):
    y = m.a(x) * (2 if m.k.requires_grad else 3) + m.k.sum()
    m.k = m.k.detach().clone().requires_grad_()
    return y


@otherwise
def a_truth_value(m, x):
    y = m.a(x) * (2 if m.flag else 3)
    m.flag = ~m.flag
    return y


@otherwise
def memory_given_by_data(m, x):
    m.k.data = torch.cat([m.k.data, torch.ones(1, 4)])
    return m.a(x) * m.k.shape[0]


@otherwise
def a_parameter_that_grows(m, x):
    m.p = nn.Parameter(torch.cat([m.p.detach(), torch.ones(1, 4)]))
    return m.a(x) * m.p.shape[0]


@otherwise
def an_attribute_that_grows(m, x):
    m.t = torch.cat([m.t, x])
    return m.a(x) * len(m.t)


@otherwise
def an_attribute_of_which_python_reads_the_length_alone(m, x):
    y = m.a(x) * len(m.t)
    m.t = torch.ones(len(m.t) + 1, 4)
    return y


@otherwise
def a_tensor_in_a_list_that_grows(m, x):
    m.held[0] = torch.cat([m.held[0], x])
    return m.a(x) * len(m.held[0])


@otherwise
def a_tensor_in_a_dict_of_which_python_reads_the_length_alone(m, x):
    y = m.a(x) * len(m.known["k"])
    m.known["k"] = torch.ones(len(m.known["k"]) + 1, 4)
    return y


@otherwise
def two_of_different_shapes_that_change_places(m, x):
    y = m.a(x) * len(m.h)
    m.h, m.k = m.k, m.h
    return y


@otherwise
def what_hangs_on_a_tensor(m, x):
    y = m.a(x) * getattr(m.k, "tag", 3)
    m.k = m.k + 1
    m.k.tag = 2
    return y


@otherwise
def how_often_it_was_written(m, x):
    y = m.a(x) * (m.k._version + 1)
    m.k.add_(1)
    return y


@otherwise
def whether_two_are_one(m, x):
    y = m.a(x) * (2 if m.t is m.k else 3)
    m.t = m.k
    return y


@otherwise
def one_that_becomes_two(m, x):
    y = m.a(x) + m.h - m.same
    m.h = m.h + 1
    return y


@otherwise
def one_that_becomes_two_and_is_written(m, x):
    y = m.a(x) + m.h - m.same
    m.same = m.same.clone()
    m.h.add_(1)
    return y


@otherwise
def two_that_become_one_and_are_written(m, x):
    m.t.add_(1)
    y = m.a(x) + m.p.detach() + m.h
    m.t = m.h
    return y


@otherwise
def a_view_of_what_is_written_that_becomes_a_copy(m, x):
    m.k.add_(1)
    y = m.a(x) + m.v
    m.v = torch.zeros(1, 4)
    return y


@otherwise
def a_tensor_that_becomes_a_view_of_what_is_written(m, x):
    m.h.add_(1)
    y = m.a(x) + m.v
    m.v = m.h[:]
    return y


@alike
def a_memory_of_one_length(m, x):
    m.k = torch.cat([m.k, x])[-2:]
    return m.a(x) * m.k.shape[0] + m.k.sum(0)


@alike
def a_stash_that_nothing_reads(m, x):
    m.t = m.a(x)
    return m.t * 2


@alike
def a_buffer_for_what_comes_next(m, x):
    m.h = m.a(x).mean()
    return m.h * x


@alike
def a_flag_that_is_turned_before_it_is_asked(m, x):
    m.k = (m.k + 1).detach().requires_grad_()
    return m.a(x) * (2 if m.k.requires_grad else 3)


@alike
def two_that_become_one_and_are_read(m, x):
    y = m.a(x) + m.t - m.v
    m.t = m.v
    return y


@alike
def two_that_change_places(m, x):
    y = m.a(x) + m.t - 2 * m.v
    m.t, m.v = m.v, m.t
    return y


@alike
def a_mean_that_runs(m, x):
    m.k.mul_(0.9).add_(x.mean(0))
    return m.a(x) + m.k.sum(0)


def x(seed):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


both = pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])


@both
@pytest.mark.parametrize("does", OTHERWISE, ids=lambda does: does.__name__)
def test_a_module_does_not_begin_with_state_that_looks_otherwise_than_recorded(does, grad):
    with torch.set_grad_enabled(grad):
        model, plain = Model(does), Model(does)
        prog = rl.capture(model, x(0))
        plain(x(0))
        with pytest.raises(rl.ReplaylensError):
            all(torch.equal(prog.module()(x(seed)), plain(x(seed))) for seed in (1, 2, 3))


@pytest.mark.parametrize("does", OTHERWISE, ids=lambda does: does.__name__)
def test_a_program_is_not_refreshed_on_state_that_looks_otherwise_than_recorded(does):
    with pytest.raises(rl.ReplaylensError):
        rl.capture(Model(does), x(0)).refresh()


@pytest.mark.parametrize("does", OTHERWISE, ids=lambda does: does.__name__)
def test_a_replay_begins_where_the_recorded_forward_began_all_the_same(does):
    prog, plain = rl.capture(Model(does), x(0)), Model(does)
    assert torch.equal(prog.replay(y := x(1)).output, plain(y))


@both
@pytest.mark.parametrize("does", ALIKE, ids=lambda does: does.__name__)
def test_a_module_goes_on_with_state_that_looks_as_it_did(does, grad):
    with torch.set_grad_enabled(grad):
        model, plain = Model(does), Model(does)
        module = rl.capture(model, x(0)).module()
        plain(x(0))
        for seed in (1, 2, 3):
            assert torch.equal(module(x(seed)), plain(x(seed)))
        for name, value in plain.named_buffers():
            assert torch.equal(dict(model.named_buffers())[name], value), name


def test_a_module_goes_on_when_the_model_is_put_back_to_where_it_began():
    model = Model(a_memory_whose_length_is_read)
    first = model.k
    module = rl.capture(model, x(0)).module()
    with pytest.raises(rl.DivergedReplay, match="the buffer `k` was float32"):
        module(x(1))
    model.k = first
    assert torch.equal(module(x(1)), Model(a_memory_whose_length_is_read)(x(1)))
