"""Gradients through a program are those of the model's own backward, bit for bit, or they are refused.

The witness is the model itself: a twin that is run plainly and differentiated. Every model is named for what is hard
about it, and is asked in several ways: the replay as it was captured, a replay on other inputs, the program as a module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import replaylens as rl
from tests.oracle import assert_same

# ---- custom functions that were bound before any capture -------------------------------------------------------------


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * torch.sigmoid(x)  # not the derivative: it must be this function's own


class SetUp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        return x.sin() * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 5 * grad * ctx.scale, None


class Defaults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int = 3) -> Tensor:
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.power, *[None] * (len(ctx.needs_input_grad) - 1)


class ViewOfIt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 7 * grad.view(3, 4)


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(x, y)
        return x * y, index, "a word", x + y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, one: Tensor, _index: Any, _word: Any, other: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return one * y + 2 * other, one * x - other


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 11 * grad


class DirtyByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        array = x.detach().numpy()
        np.exp(array, array)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Counts(torch.autograd.Function):
    """Writes a buffer, and gives it back beside its value."""

    @staticmethod
    def forward(ctx: Any, count: Tensor, x: Tensor) -> Any:
        count.add_(1)
        ctx.mark_dirty(count)
        return count, x * 2

    @staticmethod
    def backward(ctx: Any, _count: Any, grad: Tensor) -> Any:
        return None, 19 * grad


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (made,) = ctx.saved_tensors
        return grad * (1 - made * made)


class Reversed(torch.autograd.Function):
    """Gives its argument on, and turns the gradient round: the idiom of domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.scale * grad, None


class GivesItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 13 * grad


class Rounded(torch.autograd.Function):
    """The straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return swish(x) + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 17 * grad


IS_BOUND_TO_C = not hasattr(Swish.apply, "__func__")  # from torch 2.14 on: calls of `f = Swish.apply` are not shown
TAKES_WORDS = torch.__version__ >= "2.13"


def applied(kind: Any) -> Callable[..., Any]:
    """Its `apply`, bound before any capture where this torch shows calls of that."""
    return (lambda *args, **words: kind.apply(*args, **words)) if IS_BOUND_TO_C else kind.apply


swish, set_up, defaults, view_of_it, several = map(applied, (Swish, SetUp, Defaults, ViewOfIt, Several))
dirty, dirty_by_numpy, by_numpy, turned_round = map(applied, (Dirty, DirtyByNumpy, ByNumpy, Reversed))
gives_itself, rounded, inner = map(applied, (GivesItself, Rounded, Inner))


def activation(x: Tensor) -> Tensor:
    return swish(x)


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), swish

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.lin(x))


class Net(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(4, 4), nn.Linear(4, 2), between

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x)))


class Whole(nn.Module):
    """A forward that is handed its own layers."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.register_buffer("count", torch.zeros(()))

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


MODELS: dict[str, Callable[[], nn.Module]] = {}


def between(function: Callable[..., Any]) -> Callable[..., Any]:
    MODELS[function.__name__] = lambda: Net(function)
    return function


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    MODELS[function.__name__] = lambda: Whole(function)
    return function


MODELS["a_bound_function_stored_on_the_module"] = Stored
MODELS["a_bound_function_alone"] = lambda: Net(swish)


@between
def bound_at_the_top_of_the_file(h):
    return swish(h)


@between
def called_by_another_function(h):
    return activation(h) + activation(h * 2)


@between
def bound_with_set_up_context(h):
    return set_up(h)


@between
def bound_with_set_up_context_and_a_word(h):
    return set_up(h, **({"scale": 0.5} if TAKES_WORDS else {}))


@between
def bound_with_default_arguments(h):
    return defaults(h)


@between
def bound_with_another_argument(h):
    return defaults(h, 2)


@between
def bound_partly(h):
    return functools.partial(turned_round, h)(0.5)


@between
def bound_and_gives_a_view(h):
    return view_of_it(h).view(3, 4)


@between
def bound_with_several_outputs(h):
    product, index, word, total = several(h, h.tanh())
    return product + total.gather(1, index[:, None]) + len(word)


@between
def bound_and_made_by_numpy(h):
    return by_numpy(h * 1)


@between
def bound_and_turns_the_gradient_round(h):
    return turned_round(h, 0.3)


@between
def bound_and_gives_its_argument(h):
    return gives_itself(h) + h


@between
def bound_and_straight_through(h):
    return rounded(h * 4)


@between
def bound_inside_another(h):
    return inner(h)


@between
def bound_twice_on_one_value(h):
    return swish(h) * swish(h)


@between
def bound_in_a_comprehension(h):
    return sum([f(h) for f in (swish, rounded, gives_itself)])


@between
def bound_under_no_grad(h):
    with torch.no_grad():
        gate = swish(h)
    return gate * h


@between
def bound_and_mapped_by_torch_func(h):
    return torch.func.vmap(lambda row: SetUp.apply(row, 1.0))(h)


@between
def dirty_argument(h):
    h = h * 1
    out = dirty(h)
    return out + h


@between
def dirty_argument_that_numpy_wrote(h):
    return dirty_by_numpy(h * 0.5)


@between
def dirty_view(h):
    h = h * 1
    dirty(h[0])
    return h.sin()


@whole
def dirty_buffer(m, x):
    count, h = Counts.apply(m.count, m.a(x))
    return m.b(h) * count + m.count


# ---- parameters frozen for a while -----------------------------------------------------------------------------------


@whole
def frozen_module(m, x):
    m.a.requires_grad_(False)
    h = m.a(x).tanh()
    m.a.requires_grad_(True)
    return m.b(h)


@whole
def frozen_by_assignment(m, x):
    for p in m.a.parameters():
        p.requires_grad = False
    h = m.a(x).tanh()
    for p in m.a.parameters():
        p.requires_grad = True
    return m.b(h) + m.a(h)


@whole
def frozen_for_the_second_use(m, x):
    h = m.a(x).tanh()
    m.a.weight.requires_grad_(False)
    h = m.a(h)
    m.a.weight.requires_grad_(True)
    return h


@whole
def frozen_twice(m, x):
    for _ in range(2):
        m.a.weight.requires_grad = False
        x = m.a(x).tanh()
        m.a.weight.requires_grad = True
        x = m.a(x).sin()
    return x


@whole
def frozen_and_written(m, x):
    m.a.weight.requires_grad_(False)
    m.a.weight.mul_(1.5)
    h = m.a(x)
    m.a.weight.requires_grad_(True)
    return m.a(h)


@whole
def frozen_by_detach_in_place(m, x):
    m.a.weight.detach_()
    h = m.a(x)
    m.a.weight.requires_grad_()
    return m.b(h) + m.a(h)


@whole
def a_leaf_born_in_the_forward(m, x):
    shift = torch.zeros(4)
    h = x + shift
    shift.requires_grad_()
    return h * shift.exp()


@whole
def a_detached_value_that_needs_gradients_again(m, x):
    h = m.a(x).detach()
    y = h * 2
    h.requires_grad_()
    return y + h.tanh()


@whole
def an_input_frozen_in_the_forward(m, x):
    return m.a(x.detach()) + m.b(x)


@whole
def frozen_and_left_so(m, x):
    h = m.a(x)
    m.a.weight.requires_grad_(False)
    return m.b(h) + m.a(h)


@whole
def thawed_and_left_so(m, x):
    m.count.requires_grad_(False)
    h = m.a(x)
    m.b.bias.requires_grad_(False)
    y = m.b(h)
    m.b.bias.requires_grad_(True)
    return y * m.b.bias


# ---- hooks -----------------------------------------------------------------------------------------------------------


@whole
def a_hook_that_is_taken_away(m, x):
    h = m.a(x)
    handle = h.register_hook(lambda g: g * 100)
    y = h.tanh()
    handle.remove()
    return m.b(y)


@whole
def a_hook_that_stays(m, x):
    h = m.a(x)
    h.register_hook(lambda g: g * 100)
    return m.b(h.tanh())


@whole
def one_hook_stays_and_one_goes(m, x):
    h = m.a(x)
    h.register_hook(lambda g: g + 1)
    second = h.register_hook(lambda g: g * 100)
    y = m.b(h.tanh())
    second.remove()
    return y


@whole
def a_hook_after_the_value_was_read(m, x):
    h = m.a(x)
    y = h.tanh()
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return m.b(y) + h


@whole
def a_hook_within_a_with_block(m, x):
    h = m.a(x)
    with h.register_hook(lambda g: g * 100):
        y = h.tanh()
    return m.b(y)


@whole
def a_hook_that_sees_and_changes_nothing(m, x):
    h, seen = m.a(x), []
    h.register_hook(lambda g: seen.append(g.shape))
    return m.b(h)


@whole
def a_hook_that_was_there_for_a_gradient_in_the_forward(m, x):
    h = m.a(x)
    handle = h.register_hook(lambda g: g * 3)
    (g,) = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
    handle.remove()
    return m.b(h) * g.sum()


@whole
def a_hook_on_a_parameter(m, x):
    if not m.a.weight._backward_hooks:
        m.a.weight.register_hook(lambda g: g * 100)
    return m.b(m.a(x))


@whole
def a_hook_on_a_parameter_that_is_taken_away(m, x):
    handle = m.a.weight.register_hook(lambda g: g * 100)
    h = m.a(x)
    handle.remove()
    return m.b(h)


@whole
def a_hook_on_the_input(m, x):
    x.register_hook(lambda g: g * 100)
    return m.b(m.a(x))


@whole
def a_hook_on_the_input_that_is_taken_away(m, x):
    with x.register_hook(lambda g: g * 100):
        return m.b(m.a(x))


@whole
def a_hook_on_a_step_of_the_backward(m, x):
    h = m.a(x)
    h.grad_fn.register_prehook(lambda grads: (grads[0] * 100,))
    return m.b(h)


# ---- writes in place whose backward is their own -----------------------------------------------------------------------

IN_PLACE = {
    "elu_": lambda h: F.elu_(h),
    "celu_": lambda h: torch.celu_(h, 0.7),
    "selu_": lambda h: torch.selu_(h),
    "elu_by_word": lambda h: F.elu(h, 1.3, inplace=True),
    "celu_by_word": lambda h: F.celu(h, 0.5, inplace=True),
    "selu_by_word": lambda h: F.selu(h, inplace=True),
    "leaky_relu_": lambda h: F.leaky_relu_(h, 0.2),
    "rrelu_": lambda h: F.rrelu_(h, 0.1, 0.3, training=True),
    "hardtanh_": lambda h: F.hardtanh_(h),
    "relu6_": lambda h: F.relu6(h, inplace=True),
    "threshold_": lambda h: F.threshold_(h, 0.1, 20.0),
    "sigmoid_": lambda h: h.sigmoid_(),
    "tanh_": lambda h: h.tanh_(),
    "silu_": lambda h: F.silu(h, inplace=True),
    "mish_": lambda h: F.mish(h, inplace=True),
    "hardswish_": lambda h: F.hardswish(h, inplace=True),
    "hardsigmoid_": lambda h: F.hardsigmoid(h, inplace=True),
    "exp_": lambda h: h.exp_(),
    "sqrt_": lambda h: (h * h).sqrt_(),
    "rsqrt_": lambda h: (h * h).rsqrt_(),
    "reciprocal_": lambda h: h.reciprocal_(),
    "log_": lambda h: (h * h).log_(),
    "sin_": lambda h: h.sin_(),
    "cos_": lambda h: h.cos_(),
    "square_": lambda h: h.square_(),
    "abs_": lambda h: h.abs_(),
    "erf_": lambda h: h.erf_(),
    "clamp_": lambda h: h.clamp_(-0.1, 0.2),
    "clamp_min_": lambda h: h.clamp_min_(0.1),
    "clamp_max_": lambda h: h.clamp_max_(0.1),
    "pow_": lambda h: h.pow_(3),
    "div_": lambda h: h.div_(h.detach() + 3),
    "mul_": lambda h: h.mul_(h.detach() + 3),
    "maximum_": lambda h: h.clamp_(min=torch.full_like(h, 0.1)),
    "itruediv": lambda h: h.__itruediv__(3.0),
    "masked_fill_": lambda h: h.masked_fill_(h.detach() > 0, 0.5),
    "logit_": lambda h: (h.sigmoid() * 1).logit_(1e-3),
    "tan_": lambda h: h.tan_(),
    "expm1_": lambda h: h.expm1_(),
    "log1p_": lambda h: (h * h).log1p_(),
    "sinh_": lambda h: h.sinh_(),
    "atan_": lambda h: h.atan_(),
    "digamma_": lambda h: (h * h + 1).digamma_(),
    "lerp_": lambda h: h.lerp_(h.detach() * 2, 0.3),
    "addcmul_": lambda h: h.addcmul_(h.detach(), h.detach(), value=0.3),
    "cumsum_": lambda h: h.cumsum_(1),
    "cumprod_": lambda h: h.cumprod_(1),
    "gelu_of_a_view": lambda h: F.elu_(h[1]) + h.sum(0),
}


def _written(name: str) -> Callable[[Tensor], Tensor]:
    return lambda h: IN_PLACE[name](h * 1.5)


for _name in IN_PLACE:
    MODELS[f"in_place_{_name}"] = functools.partial(lambda name: Net(_written(name)), _name)


# ---- memory that a backward pass reads later -----------------------------------------------------------------------


@whole
def a_weight_scaled_by_data_after_its_use(m, x):
    y = m.b(m.a(x).tanh())
    m.b.weight.data.mul_(0.5)
    return y


@whole
def a_weight_scaled_by_data_before_its_use(m, x):
    m.b.weight.data.mul_(0.5)
    return m.b(m.a(x).tanh())


@whole
def a_weight_exchanged_by_data_after_its_use(m, x):
    y = m.b(m.a(x).tanh())
    m.b.weight.data = m.b.weight.data * 0.5
    return y


@whole
def a_factor_exchanged_by_data_after_its_use(m, x):
    y = m.b(m.a(x).tanh() * m.b.bias)
    m.b.bias.data = m.b.bias.data * 0.5
    return y


@whole
def a_weight_copied_into_by_data_after_its_use(m, x):
    y = m.b(m.a(x).tanh())
    m.b.weight.data.copy_(torch.ones(4, 4))
    return y


@whole
def an_activation_scaled_by_data_after_its_use(m, x):
    h = m.a(x)
    y = h * h
    h.data.mul_(0.5)
    return m.b(y)


@whole
def a_weight_written_by_numpy_after_its_use(m, x):
    y = m.b(m.a(x).tanh())
    array = m.b.weight.detach().numpy()
    array *= 0.5
    return y


@whole
def a_bias_scaled_by_data_after_its_use(m, x):
    y = m.b(m.a(x).tanh())
    m.b.bias.data.mul_(0.5)  # nothing reads a bias in the backward
    return y


@whole
def a_part_of_a_weight_written_by_data_after_its_use(m, x):
    y = m.b(m.a(x).tanh())
    m.b.weight.data[0] = 3.0
    return y


# ---- gradients that the forward takes --------------------------------------------------------------------------------


@whole
def the_gradient_of_an_activation_by_backward(m, x):
    h = m.a(x)
    h.retain_grad()
    h.sin().sum().backward(inputs=[h], retain_graph=True)
    return m.b(h) * h.grad


@whole
def the_gradient_of_an_input_by_backward(m, x):
    z = x.detach().requires_grad_()
    m.a(z).sin().sum().backward(inputs=[z])
    return m.b(x) * z.grad


@whole
def a_gradient_that_is_unused(m, x):
    z = x * 2
    g, none = torch.autograd.grad(m.a(z).sin().sum(), [z, m.b.weight], create_graph=True, allow_unused=True)
    return m.b(g) if none is None else g


@whole
def a_gradient_that_is_made_zeros(m, x):
    z = x * 2
    grads = torch.autograd.grad(
        m.a(z).sin().sum(), [z, m.b.weight], create_graph=True, allow_unused=True, materialize_grads=True
    )
    return m.b(grads[0]) + grads[1].sum()


@whole
def a_batch_of_gradients(m, x):
    z = x * 2
    y = m.a(z).sin()
    eye = torch.eye(3)[:, :, None].expand(3, 3, 4)
    (g,) = torch.autograd.grad(y, z, eye, is_grads_batched=True, create_graph=True)
    return m.b(g.sum(0)) + y


@whole
def a_gradient_penalty(m, x):
    z = x * 1.5
    y = m.b(m.a(z).tanh())
    (g,) = torch.autograd.grad(y.sum(), z, create_graph=True)
    return y + (g.norm(2, 1) - 1).square().mean()


@whole
def a_hessian_vector_product(m, x):
    z = x * 1.5
    y = m.b(m.a(z).tanh()).sin().sum()
    (g,) = torch.autograd.grad(y, z, create_graph=True)
    (v,) = torch.autograd.grad((g * torch.arange(4.0)).sum(), z, create_graph=True)
    return v + y


@whole
def a_step_of_meta_learning(m, x):
    loss = m.a(x).tanh().square().mean()
    weight, bias = torch.autograd.grad(loss, [m.a.weight, m.a.bias], create_graph=True)
    return F.linear(x, m.a.weight - 0.1 * weight, m.a.bias - 0.1 * bias).tanh()


@whole
def a_gradient_that_stops(m, x):
    z = x * 1.5
    (g,) = torch.autograd.grad(m.a(z).sin().sum(), z, retain_graph=True)
    return m.b(z) * g


@whole
def a_parameter_of_a_computed_value(m, x):
    h = m.a(x)
    return m.b(nn.Parameter(h * 2)) * m.b(h)


@whole
def a_parameter_of_a_computed_value_that_is_returned(m, x):
    h = m.a(x)
    w = nn.Parameter(h * 2)
    return (m.b(w) * m.b(h)).sum(1, keepdim=True) + w


@whole
def a_subclass_of_a_computed_value(m, x):
    return m.b(m.a(x).as_subclass(nn.Parameter))


@whole
def a_parameter_of_a_weight(m, x):
    return F.linear(x, nn.Parameter(m.a.weight)) + m.a(x)


@whole
def two_parameters_of_one_value(m, x):
    h = m.a(x)
    return m.b(nn.Parameter(h) * nn.Parameter(h[:], requires_grad=False) * h)


@whole
def a_parameter_that_an_inner_loop_learns(m, x):
    w = nn.Parameter(m.a.weight * 2)
    for _ in range(2):
        (g,) = torch.autograd.grad(F.linear(x, w).tanh().square().sum(), w, create_graph=True)
        w = w - 0.1 * g
    return m.b(F.linear(x, w))


@whole
def energies_and_forces(m, x):
    energy = m.b(F.silu(m.a(x))).sum(1)
    (force,) = torch.autograd.grad(energy, x, torch.ones_like(energy), create_graph=True)
    return torch.cat((energy[:, None], -force), 1)


@whole
def a_penalty_on_the_gradients_of_all_weights(m, x):
    loss = m.b(m.a(x).tanh()).square().mean()
    found = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
    return loss + sum(g.square().sum() for g in found)


@whole
def gradients_of_two_stretches_that_share_one(m, x):
    h = m.a(x).tanh()
    first, second = m.b(h).sum(), h.square().sum()
    (g,) = torch.autograd.grad([first, second], [x], create_graph=True)
    (k,) = torch.autograd.grad(first, h, create_graph=True)
    return g * h + k * h


REFUSED = {
    "a_weight_scaled_by_data_after_its_use",
    "a_factor_exchanged_by_data_after_its_use",
    "a_weight_copied_into_by_data_after_its_use",
    "an_activation_scaled_by_data_after_its_use",
    "a_part_of_a_weight_written_by_data_after_its_use",
    "a_hook_after_the_value_was_read",
    "a_hook_on_a_step_of_the_backward",
    "a_weight_written_by_numpy_after_its_use",
    "a_hook_that_was_there_for_a_gradient_in_the_forward",
}


WRITING = {name for name in MODELS if "scaled_by_data" in name or "_by_data_" in name or "_by_numpy_after" in name} | {
    "frozen_and_written",
    "dirty_buffer",
}


# ---- how it is asked -------------------------------------------------------------------------------------------------


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name](), torch.randn(3, 4, requires_grad=True)


def projected(output: Any) -> Tensor | None:
    outputs = [t for t in (output if isinstance(output, tuple) else (output,)) if t.requires_grad]
    made = torch.Generator().manual_seed(1)
    return sum([(t * torch.randn(t.shape, generator=made)).sum() for t in outputs]) if outputs else None


def gradients(model: nn.Module, x: Tensor, output: Any) -> dict[str, Tensor | None]:
    """What one backward pass leaves in the parameters and the input; afterwards they are empty again."""
    leaves = {"x": x, **dict(model.named_parameters())}
    for leaf in leaves.values():
        leaf.grad = None
    number = projected(output)
    if number is not None:
        number.backward()
    found = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return found


def assert_alike(
    mine: Any,
    theirs: Any,
    got: dict[str, Tensor | None],
    wanted: dict[str, Tensor | None],
) -> None:
    assert mine.requires_grad == theirs.requires_grad
    assert torch.equal(mine, theirs)
    for name, gradient in wanted.items():
        other = got[name]
        assert (gradient is None) == (other is None), f"{name}: {other}, not {gradient}"
        assert gradient is None or torch.equal(gradient, other), f"{name}: {other}, not {gradient}"


def refused_or(name: str, ask: Callable[[], None]) -> None:
    if name not in REFUSED:
        return ask()
    with pytest.raises((rl.NotDifferentiable, rl.DivergedReplay)):  # what numpy wrote holds for recorded numbers only
        ask()
    return None


@pytest.mark.parametrize("name", MODELS)
def test_a_replay_has_the_gradients_of_the_model(name):
    model, x = made(name)
    output = model(x)
    wanted = gradients(model, x, output)
    twin, y = made(name)
    prog = rl.capture(twin, y)

    def ask() -> None:
        again = prog.replay(grad=True).output
        assert_alike(again, output, gradients(twin, y, again), wanted)

    refused_or(name, ask)


@pytest.mark.parametrize("name", MODELS)
def test_a_replay_on_other_inputs_has_the_gradients_of_the_model(name):
    model, x = made(name)
    with torch.no_grad():
        x.mul_(0.7).add_(0.1)
    twin, first = made(name)
    torch.manual_seed(5)
    prog = rl.capture(twin, first)
    torch.manual_seed(5)
    if name in WRITING:
        model(first)
    output = model(x)
    wanted = gradients(model, x, output)
    y = x.detach().clone().requires_grad_()

    def ask() -> None:
        now = prog.refresh() if name in WRITING else prog  # it goes on from what the first forward left
        again = now.replay(y, grad=True, on_divergence="raise").output
        assert_alike(again, output, gradients(twin, y, again), wanted)

    refused_or(name, ask)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WRITING and name != "in_place_rrelu_"])
def test_the_module_of_a_program_has_the_gradients_of_the_model(name):
    model, x = made(name)
    output = model(x)
    wanted = gradients(model, x, output)
    twin, y = made(name)
    prog = rl.capture(twin, y)

    def ask() -> None:
        again = prog.module()(y)
        assert_alike(again, output, gradients(twin, y, again), wanted)

    refused_or(name, ask)


# ---- patches in what the forward differentiates ----------------------------------------------------------------------


class Twice(nn.Module):
    """Differentiates what lies between h and y, so many times. `hook` changes a layer's output, as a hook would."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        y = self.c(self.b(h).sin()).tanh()
        (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
        if self.how == "once":
            return g
        if self.how == "by backward":
            z = h.detach().requires_grad_()
            self.c(self.b(z).sin()).tanh().sum().backward(inputs=[z], create_graph=True)
            return torch.autograd.grad(z.grad.square().sum(), z)[0]
        if self.how == "penalty":
            return torch.autograd.grad(y.sum() + g.norm(), [h, self.b.weight])
        (second,) = torch.autograd.grad((g * torch.arange(4.0)).sum(), h, create_graph=True)
        if self.how == "three times":
            return torch.autograd.grad(second.square().sum(), h)[0]
        return second


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("how", ["once", "twice", "by backward", "penalty", "three times"])
@pytest.mark.parametrize("place", ["b", "c"])
def test_a_patch_in_a_stretch_that_is_differentiated_twice_is_what_a_hook_gives_or_flagged(how, place):
    torch.manual_seed(0)
    model, x = Twice(how), torch.randn(3, 4)
    prog = rl.capture(model, x)
    handle = getattr(model, place).register_forward_hook(lambda module, args, out: out.square())
    wanted = model(x)
    handle.remove()
    patch = {place if how != "by backward" else f"{place}:*": torch.square}
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    got = prog.replay(patch=patch).output
    for one, other in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
        assert torch.allclose(one, other, 1e-5, 1e-6)
    if how != "once":
        with pytest.raises(rl.DivergedReplay):
            prog.replay(patch=patch, on_divergence="raise")


@pytest.mark.parametrize("how", ["twice", "penalty", "three times"])
def test_an_edit_in_a_stretch_that_is_differentiated_twice_is_refused(how):
    prog = rl.capture(Twice(how), torch.randn(3, 4))
    with pytest.raises(rl.DivergedReplay):
        prog.swap("tanh", torch.sigmoid)


def test_a_swap_for_a_bound_custom_function_has_its_own_backward():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    prog = rl.capture(model, x).swap("relu", Swish.apply)
    prog.replay(grad=True).output.sum().backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model[2](Swish.apply(model[0](x))).sum().backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(got, model.parameters(), strict=True))


def test_a_custom_function_that_writes_its_argument_by_numpy_and_does_not_say_so_is_refused():
    class Unsaid(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            array, double = x.detach().numpy(), x * 2
            array += 1
            return double

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def model(x):
        h = x * 1
        return Unsaid.apply(h) + h

    with pytest.raises(rl.CaptureError, match="without marking it dirty"):
        rl.capture(model, torch.randn(3))


def test_what_a_bound_custom_function_wrote_by_numpy_follows_new_inputs_and_patches_without_gradients():
    def model(x):
        h = x * 1
        return dirty_by_numpy(h) + h

    x = torch.randn(3)
    with torch.no_grad():
        prog = rl.capture(model, x)
        other = x + 1
        assert torch.equal(prog.replay(other, on_divergence="raise").output, model(other))
        patched = prog.replay(patch={"mul_1": torch.zeros_like}, on_divergence="raise").output
    assert torch.equal(patched, torch.full((3,), 2.0))
    assert prog.check()


def test_a_capture_leaves_no_trace_on_custom_functions():
    kinds = torch.autograd.function._SingleLevelFunction, torch.autograd.Function, torch.autograd.function.FunctionMeta
    before = [dict(vars(kind)) for kind in kinds]
    rl.capture(activation, torch.randn(3))
    assert [dict(vars(kind)) for kind in kinds] == before


BOUND = [kind.apply for kind in (Swish, SetUp, Defaults, ViewOfIt, ByNumpy, GivesItself, Rounded, Inner, Dirty)]


@pytest.mark.parametrize("apply", BOUND, ids=lambda apply: apply.__self__.__name__)
def test_a_function_whose_apply_was_taken_before_has_its_values_and_its_own_backward_or_is_refused(apply):
    def model(x):
        return apply(x * 2) * 3

    torch.manual_seed(0)
    x, other = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    if IS_BOUND_TO_C and apply.__self__ is Dirty:
        with pytest.raises(rl.CaptureError):
            rl.capture(model, x)
        return
    prog = rl.capture(model, x)
    assert torch.equal(prog.output, model(x))
    assert torch.equal(prog.replay(other).output, model(other))
    assert torch.equal(prog.replay(patch={"mul_1": rl.Scale(2.0)}).output, apply(x * 2 * 2) * 3)
    assert torch.equal(rl.run(model, x, patch={"mul_1": rl.Scale(2.0)}).output, apply(x * 2 * 2) * 3)
    asks = [lambda: prog.replay(grad=True), lambda: rl.run(model, x, patch={"input_1_0": rl.Scale(1.0)}, grad=True)]
    for ask in asks:
        if IS_BOUND_TO_C:
            with pytest.raises(rl.NotDifferentiable, match=r"Call it by its class: `\w+\.apply\(x\)`"):
                ask()
        else:
            assert torch.equal(*[torch.autograd.grad(y.sum(), x)[0] for y in (ask().output, model(x))])


def test_an_apply_that_is_captured_or_put_in_by_itself_is_called_by_its_class():
    x = torch.randn(3, requires_grad=True)
    run = rl.capture(Swish.apply, x).replay(grad=True)
    assert torch.equal(*[torch.autograd.grad(y.sum(), x)[0] for y in (run.output, Swish.apply(x))])


@pytest.mark.parametrize("name", sorted(name for name in REFUSED if "_after_its_use" in name))
def test_a_late_write_is_refused_too_where_it_was_captured_on_an_input_that_needs_no_gradient(name):
    model, x = made(name)
    prog = rl.capture(model, x.detach())
    with pytest.raises(rl.NotDifferentiable, match="memory that the model writes"):
        prog.replay(x, grad=True)


class WrittenAfterTheFirstUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.a.weight.data.mul_(2)
        return self.b(h)


def test_a_first_layer_whose_weight_is_written_after_its_use_is_refused_whatever_the_input_needed():
    x = torch.randn(3, 4)
    for captured_on in (x, x.clone().requires_grad_()):
        prog = rl.capture(WrittenAfterTheFirstUse(), captured_on)
        with pytest.raises(rl.NotDifferentiable, match="memory that the model writes"):
            prog.replay(x.clone().requires_grad_(), grad=True)


class CountsInCheckpoints(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.fc, self.norm = reentrant, nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        def inner(t):
            return self.norm(self.fc(t)).tanh()

        return inner(x) if self.reentrant is None else checkpoint(inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_whose_model_writes_buffers_again_in_its_backward_is_refused_with_gradients(reentrant, grad):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model, witness = CountsInCheckpoints(reentrant), CountsInCheckpoints(reentrant)
    with torch.set_grad_enabled(grad):
        prog = rl.capture(model, x)
        witness(x)
    with pytest.raises(rl.NotDifferentiable, match=r"writes norm\.running_mean and .* in a checkpoint"):
        prog.module()(x)
    with torch.no_grad():
        assert_same(prog.module()(x), witness(x))
    assert_same(dict(model.named_buffers()), dict(witness.named_buffers()))
    model.eval(), witness.eval()
    module = rl.capture(model, x).module()
    module(x).sum().backward()
    witness(x).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in witness.parameters()])


def test_a_module_is_trained_as_the_model_where_no_checkpoint_writes():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    model, witness = CountsInCheckpoints(None), CountsInCheckpoints(None)
    module = rl.capture(model, x).module()
    witness(x)
    for call in (module, witness):
        call(x).sum().backward()
    assert_same(dict(model.named_buffers()), dict(witness.named_buffers()))


class KeepsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x)
        return self.kept


class ReadsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.sum = y.detach().sum()
        return y


def differentiated(m, x):
    h = m.a(x)
    energy = m.k(m.k(h.relu())).square().sum()
    (g,) = torch.autograd.grad(energy, h, create_graph=True)
    return m.k(g) * h


@pytest.mark.parametrize("kind", [KeepsIt, ReadsIt])
def test_a_stretch_that_is_differentiated_may_hold_what_modules_keep_or_read(kind):
    def made() -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        model = Whole(differentiated)
        model.k = kind()
        return model, torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    twin, _, y = made()
    twin.k.register_forward_hook(lambda module, args, out: out * 2)
    output = twin(y)
    wanted = gradients(twin, y, output)
    model, x, y = made()
    prog = rl.capture(model, x)
    again = prog.replay(y, patch={"k": lambda value: value * 2}, grad=True, on_divergence="raise").output
    assert torch.equal(again, output)
    assert_alike(again, output, gradients(model, y, again), wanted)
    assert torch.equal(prog.swap("relu_1", torch.relu).replay().output, prog.output)
