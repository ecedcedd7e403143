"""What autograd does not see leaves gradients where they went in the model: writes by numpy, `.data =`, detached aliases.

The witness is the model itself, run plainly and differentiated. What a backward would read late is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradient_witness import assert_same, leaf_of, made, taken, witness
from torch import Tensor, nn
from torch.autograd import Function

import replaylens as rl


class Exponential(Function):
    """Saves what it gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def doubled(tensor: Tensor) -> None:
    array = tensor.detach().numpy()
    array *= 2


OUTSIDE: dict[str, Callable[..., Any]] = {}
EXCHANGED: dict[str, Callable[..., Any]] = {}
LATE: dict[str, Callable[..., Any]] = {}


def among(table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        table[function.__name__] = function
        return function

    return noted


# ---- written from outside torch --------------------------------------------------------------------------------------


@among(OUTSIDE)
def a_value_that_is_used_on(m, x):
    h = m.a(x)
    doubled(h)
    return m.b(h)


@among(OUTSIDE)
def a_value_whose_square_is_given(m, x):
    h = m.a(x)
    array = h.detach().numpy()
    np.exp(array, array)
    return h * h


@among(OUTSIDE)
def a_value_that_nothing_saved_before(m, x):
    h = m.a(x)
    y = h * 3
    doubled(h)
    return y + h


@among(OUTSIDE)
def a_value_by_data(m, x):
    h = m.a(x)
    array = h.data.numpy()
    array[0, 1] = 3
    return m.b(h) * h


@among(OUTSIDE)
def a_value_by_force(m, x):
    h = m.a(x)
    array = h.numpy(force=True)
    array *= 2
    return m.b(h)


@among(OUTSIDE)
def a_value_by_dlpack(m, x):
    h = m.a(x)
    array = np.from_dlpack(h.detach())
    array *= 2
    return m.b(h)


@among(OUTSIDE)
def a_value_by_a_memoryview(m, x):
    h = m.a(x)
    memoryview(h.detach().numpy()).cast("B").cast("f")[0] = 5.0
    return m.b(h)


@among(OUTSIDE)
def a_value_by_its_storage(m, x):
    h = m.a(x)
    h.untyped_storage().fill_(0)
    return m.b(h) + h


@among(OUTSIDE)
def a_view(m, x):
    h = m.a(x)
    doubled(h[0])
    return m.b(h)


@among(OUTSIDE)
def what_a_view_looks_at(m, x):
    h = m.a(x)
    view = h[0]
    doubled(h)
    return m.b(h) + view


@among(OUTSIDE)
def a_turned_value(m, x):
    h = m.a(x).t()
    y = h + 1
    doubled(h)
    return m.b(h.t()) + y.t()


@among(OUTSIDE)
def a_complex_value(m, x):
    z = torch.complex(m.a(x), m.b(x))
    array = z.detach().numpy()
    array *= 1j
    return torch.view_as_real(z).sum(-1)


@among(OUTSIDE)
def a_value_written_by_torch_afterwards(m, x):
    h = m.a(x)
    doubled(h)
    h.mul_(3)
    return m.b(h)


@among(OUTSIDE)
def a_value_that_nothing_reads_afterwards(m, x):
    h = m.a(x)
    y = h + 1
    doubled(h)
    return y


@among(OUTSIDE)
def what_is_returned(m, x):
    y = m.b(m.a(x))
    doubled(y)
    return y


@among(OUTSIDE)
def a_parameter(m, x):
    doubled(m.b.weight)
    return m.b(m.a(x))


@among(OUTSIDE)
def the_input(m, x):
    doubled(x)
    return m.b(m.a(x))


# ---- exchanged memory ------------------------------------------------------------------------------------------------


@among(EXCHANGED)
def a_parameter_before_its_use(m, x):
    m.b.weight.data = m.b.weight.data * 2
    return m.b(m.a(x))


@among(EXCHANGED)
def a_bias_after_its_use(m, x):
    y = m.b(m.a(x))
    m.b.bias.data = m.b.bias.data * 2
    return y


@among(EXCHANGED)
def a_parameter_for_a_while(m, x):
    own = m.b.weight.data
    m.b.weight.data = (own * 8).round() / 8
    y = m.b(m.a(x))
    m.b.weight.data = own
    return y


@among(EXCHANGED)
def two_parameters(m, x):
    m.a.weight.data, m.b.weight.data = m.b.weight.data, m.a.weight.data
    return m.b(m.a(x))


@among(EXCHANGED)
def two_parameters_and_back(m, x):
    p, q = m.a.weight, m.b.weight
    p.data, q.data = q.data, p.data
    y = m.b(m.a(x))
    p.data, q.data = q.data, p.data
    return y


@among(EXCHANGED)
def a_parameter_for_a_computed_value(m, x):
    m.b.weight.data = m.a.weight * x.mean()
    return m.b(m.a(x))


@among(EXCHANGED)
def a_value(m, x):
    h = m.a(x)
    h.data = h.data * 2
    return h * h


@among(EXCHANGED)
def a_value_between_uses(m, x):
    h = m.a(x)
    y = h + 1
    h.data = h.data * 2
    return m.b(h) + y


@among(EXCHANGED)
def a_value_twice(m, x):
    h = m.a(x)
    h.data = h.data * 2
    y = h + 1
    h.data = h.data + 1
    return m.b(h) + y


@among(EXCHANGED)
def a_value_added_to(m, x):
    h = m.a(x)
    h.data += x.data
    return m.b(h)


@among(EXCHANGED)
def a_value_whose_maker_saved_it(m, x):
    h = m.a(x).exp()
    h.data = h.data * 2
    return m.b(h)


@among(EXCHANGED)
def a_value_for_one_with_a_history(m, x):
    h, other = m.a(x), x.sin()
    h.data = other
    return m.b(h) + other


@among(EXCHANGED)
def a_view_of_a_value(m, x):
    h = m.a(x)
    view = h[0]
    view.data = view.data * 2
    return m.b(h) + view


@among(EXCHANGED)
def a_tensor_without_a_history(m, x):
    c = torch.zeros(3, 4)
    c.data = m.a(x)
    return m.b(c) + c * x


@among(EXCHANGED)
def the_given_leaf(m, x):
    x.data = x.data * 2
    return m.b(m.a(x))


@among(EXCHANGED)
def the_given_leaf_written(m, x):
    x.data.mul_(2)
    return m.b(m.a(x))


# ---- written where a backward reads it late --------------------------------------------------------------------------


def late(make: Callable[[Tensor], Tensor], write: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = make(m.a(x))
        write(h)
        return m.b(h)

    return forward


MAKERS = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "softmax": lambda h: h.softmax(-1),
    "sqrt": lambda h: h.abs().sqrt(),
    "a custom function": Exponential.apply,
    "a view of exp": lambda h: h.exp().view(12).view(3, 4),
    "exp_": lambda h: h.exp_(),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(*[h[None, None]] * 3)[0, 0],
}
WRITERS = {
    "numpy": doubled,
    "data": lambda h: h.data.mul_(2),
    "data of a view": lambda h: h[0].data.mul_(2),
    "storage": lambda h: h.untyped_storage().fill_(0),
}
LATE.update({f"{one} by {other}": late(MAKERS[one], WRITERS[other]) for one in MAKERS for other in WRITERS})


# ---- how it is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OUTSIDE, *EXCHANGED])
def test_a_write_that_autograd_does_not_see_leaves_gradients_where_they_went(name):
    forward = {**OUTSIDE, **EXCHANGED}[name]
    output, wanted = witness(forward, on_first=True)
    model, first, _ = made(forward)
    x = leaf_of(first)
    again = rl.capture(model, x).replay(grad=True).output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))


@pytest.mark.parametrize("captured", ["without a flag", "without gradients"])
@pytest.mark.parametrize(
    "name", [name for name in (*OUTSIDE, *EXCHANGED) if "input" not in name and "leaf" not in name]
)
def test_so_it_is_where_the_capture_knew_of_no_gradients(name, captured):
    forward = {**OUTSIDE, **EXCHANGED}[name]
    output, wanted = witness(forward, on_first=True)
    model, first, _ = made(forward)
    with torch.set_grad_enabled(captured == "without a flag"):
        prog = rl.capture(model, first)
    x = leaf_of(first)
    again = prog.replay(x, grad=True, on_divergence="raise").output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))


@pytest.mark.parametrize("name", EXCHANGED)
def test_memory_that_is_exchanged_has_the_gradients_of_the_model_on_new_inputs(name):
    output, wanted = witness(EXCHANGED[name], on_first=False)
    model, first, other = made(EXCHANGED[name])
    prog = rl.capture(model, leaf_of(first))
    x = leaf_of(other)
    again = prog.replay(x, grad=True, on_divergence="raise").output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))


@pytest.mark.parametrize("name", [name for name in EXCHANGED if "leaf" not in name])
def test_a_patch_before_memory_is_exchanged_has_the_gradients_of_a_hook(name):
    output, wanted = witness(EXCHANGED[name], on_first=True, hook=torch.sin)
    model, first, _ = made(EXCHANGED[name])
    x = leaf_of(first)
    again = rl.capture(model, x).replay(patch={"a": torch.sin}, grad=True, on_divergence="raise").output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))


@pytest.mark.parametrize("name", ["a_value_that_is_used_on", "a_view", "a_value_by_its_storage"])
def test_what_numpy_wrote_with_a_patch_is_asked_of_the_model_with_its_gradients(name):
    output, wanted = witness(OUTSIDE[name], on_first=True, hook=torch.sin)
    model, first, _ = made(OUTSIDE[name])
    x = leaf_of(first)
    prog = rl.capture(model, x)
    with pytest.raises(rl.DivergedReplay):
        prog.replay(patch={"a": torch.sin}, grad=True, on_divergence="raise")
    again = prog.replay(patch={"a": torch.sin}, grad=True).output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))


@pytest.mark.parametrize("name", LATE)
def test_a_write_to_what_its_maker_saved_is_refused(name):
    model, first, _ = made(LATE[name])
    for flag in (True, False):
        prog = rl.capture(model, first.clone().requires_grad_(flag))
        with pytest.raises(rl.NotDifferentiable, match="memory that the model writes"):
            prog.replay(grad=True)
    with torch.no_grad():
        prog = rl.capture(model, first)
    with pytest.raises(rl.NotDifferentiable, match="memory that the model writes"):
        prog.replay(grad=True)


KEEPING = {
    "linear": lambda h: h * 1,
    "a maximum": lambda h: h.max(1, keepdim=True)[0].expand(3, 4).clone(),
    "parts put together": lambda h: torch.cat([h[:1], h[1:]]),
    "a write": lambda h: torch.zeros(3, 4).index_put((torch.arange(3),), h),
}


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_write_to_what_nobody_saved_is_not_refused(name, with_gradients):
    forward = late(KEEPING[name], WRITERS["data"])
    output, wanted = witness(forward, on_first=True)
    model, first, _ = made(forward)
    x = leaf_of(first)
    with torch.set_grad_enabled(with_gradients):
        prog = rl.capture(model, first)
    again = prog.replay(x, grad=True).output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))


def test_values_are_recorded_as_they_were_before_numpy_wrote_them():
    model, first, _ = made(OUTSIDE["a_value_that_nothing_reads_afterwards"])
    prog = rl.capture(model, first)
    assert torch.equal(prog["a"].value, model.a(first))
    assert torch.equal(prog.replay(from_="a").output, prog.output)


def by_its_address(m, x):
    h = m.a(x)
    ctypes.c_float.from_address(h.data_ptr()).value = 9.0
    return m.b(h)


def by_its_address_and_unread(m, x):
    h = m.a(x)
    y = h + 1
    ctypes.c_float.from_address(h.data_ptr()).value = 9.0
    return y


@pytest.mark.parametrize("forward", [by_its_address, by_its_address_and_unread])
def test_a_write_through_an_address_is_refused(forward):
    model, first, _ = made(forward)
    with pytest.raises(rl.errors.UnannouncedWrite, match="through its address"):
        rl.capture(model, first)


def of_another_shape(m, x):
    m.b.bias.data = m.b.bias.data[:1].clone()
    return m.a(x) + m.b.bias


def of_another_dtype(m, x):
    m.b.weight.data = m.b.weight.data.double()
    return nn.functional.linear(m.a(x).double(), m.b.weight)


@pytest.mark.parametrize("forward", [of_another_shape, of_another_dtype])
def test_the_gradient_of_a_tensor_that_data_makes_one_of_another_kind_is_refused(forward):
    model, first, _ = made(forward)
    output = rl.capture(model, first).replay(grad=True).output
    with pytest.raises(rl.NotDifferentiable, match="of another shape or dtype"):
        output.sum().backward()


def written_after_it_was_exchanged(m, x):
    h = m.a(x)
    h.data = h.data * 2
    h.mul_(3)
    return m.b(h)


def test_a_write_to_exchanged_memory_has_the_values_of_the_model_and_no_gradients():
    model, first, other = made(written_after_it_was_exchanged)
    prog = rl.capture(model, first)
    assert torch.equal(prog.replay(other).output, model(other))
    with pytest.raises(rl.NotDifferentiable, match="given other memory"):
        prog.replay(grad=True)


# ---- two histories of one memory -------------------------------------------------------------------------------------


def read_after_another_write(m, x):
    h = m.a(x)
    alias = h.detach()
    alias.mul_(m.b(x))
    h.add_(1)
    return m.b(h) + alias


def written_twice(m, x):
    h = m.a(x)
    alias = h.detach()
    alias.mul_(m.b(x))
    alias.add_(x)
    return m.b(h) + alias


def written_through_a_view(m, x):
    h = m.a(x)
    alias = h.data
    alias[0].add_(m.b(x)[0])
    return m.b(h) + alias


@pytest.mark.parametrize("forward", [read_after_another_write, written_twice, written_through_a_view])
def test_a_detached_alias_with_a_history_of_its_own_is_refused_where_it_would_be_lost(forward):
    model, first, _ = made(forward)
    with pytest.raises(rl.NotDifferentiable, match="two histories of one memory"):
        rl.capture(model, first).replay(grad=True)


def written_once(m, x):
    h = m.a(x)
    alias = h.detach()
    alias.mul_(m.b(x))
    return m.b(h) + alias


def written_in_a_loop_with_numbers(m, x):
    h = m.a(x)
    for row in range(3):
        h.data[row] *= 2
    return m.b(h)


@pytest.mark.parametrize("forward", [written_once, written_in_a_loop_with_numbers])
def test_a_detached_alias_that_is_written_has_the_gradients_of_the_model(forward):
    output, wanted = witness(forward, on_first=True)
    model, first, _ = made(forward)
    x = leaf_of(first)
    again = rl.capture(model, x).replay(grad=True).output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))


# ---- patches and edits -----------------------------------------------------------------------------------------------


def by_data(value: Tensor) -> Tensor:
    value.data.mul_(2)
    return value


def by_numpy(value: Tensor) -> Tensor:
    doubled(value)
    return value


class Middle(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(4, 4), middle, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


@pytest.mark.parametrize("write", [by_data, by_numpy])
def test_a_patch_that_writes_what_the_call_before_it_saved_has_values_and_no_gradients(write):
    torch.manual_seed(0)
    model, x = Middle(nn.Tanh()), torch.randn(3, 4)
    prog = rl.capture(model, x)
    model.middle.register_forward_hook(lambda module, args, out: write(out.detach()))
    wanted = model(x)
    for run in (prog.replay(patch={"middle": write}, grad=True), prog.with_patch({"middle": write}).replay(grad=True)):
        assert torch.equal(run.output, wanted)
        with pytest.raises(rl.NotDifferentiable, match="a patch that writes its value"):
            run.output.sum().backward()
    with pytest.raises(rl.NotDifferentiable, match="a function that writes what it is given"):
        prog.insert_after("tanh_1", write).replay(grad=True)


@pytest.mark.parametrize("write", [by_data, by_numpy])
def test_a_patch_that_writes_what_nobody_saved_has_the_gradients_of_a_hook(write):
    torch.manual_seed(0)
    model, x = Middle(nn.Identity()), torch.randn(3, 4)
    prog = rl.capture(model, x)
    run = prog.replay(patch={"a": write}, grad=True)
    run.output.sum().backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.a.register_forward_hook(lambda module, args, out: write(out))
    model(x).sum().backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(got, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["a_value", "a_value_twice", "a_parameter_for_a_while"])
def test_a_forward_derivative_goes_where_the_gradient_goes(name):
    model, first, _ = made(EXCHANGED[name])
    function, tangent = rl.capture(model, first).function(), torch.ones(3, 4)
    _, got = torch.func.jvp(function, (first,), (tangent,))
    x = leaf_of(first)
    weights = torch.arange(12.0).reshape(3, 4)
    (gradient,) = torch.autograd.grad((function(x) * weights).sum(), x)
    assert torch.allclose((got * weights).sum(), (gradient * tangent).sum(), 1e-4)


@pytest.mark.parametrize("how", ["itself", "a view", "out"])
def test_what_was_computed_from_data_before_the_tensor_was_written_is_refused(how):
    """Torch counts writes to `x.data` and to `x` apart: its backward reads what is there by then."""

    def model(x, weight):
        y = x.data @ weight
        with torch.no_grad():
            if how == "itself":
                x.add_(1)
            elif how == "a view":
                x[0].mul_(2)
            else:
                torch.add(x[0], 1, out=x[0])
        return y

    x, weight = torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)
    prog = rl.capture(model, x, weight)
    with pytest.raises(rl.NotDifferentiable, match=r"\.data or numpy after its use"):
        prog.replay(grad=True)
