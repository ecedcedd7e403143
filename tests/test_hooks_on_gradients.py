"""Hooks on gradients act in a replay as they do in the model, or gradients are refused.

The witness is the model itself, run plainly and differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradient_witness import assert_same, leaf_of, made, taken, witness
from torch import Tensor
from torch.nn.modules import module as of_all_modules

import replaylens as rl


def three_hooks(m, x):
    h = m.a(x)
    for hook in (lambda g: g * 2, lambda g: g + 1, lambda g: g**3):
        h.register_hook(hook)
    return m.b(h)


def three_hooks_and_one_is_taken_away(m, x):
    h = m.a(x)
    h.register_hook(lambda g: g * 2)
    second = h.register_hook(lambda g: g - 3)
    h.register_hook(lambda g: g**3)
    second.remove()
    return m.b(h)


def one_is_taken_away_before_another_comes(m, x):
    h = m.a(x)
    first = h.register_hook(lambda g: g * 2)
    h.register_hook(lambda g: g + 1)
    first.remove()
    h.register_hook(lambda g: g**3)
    return m.b(h)


def two_hooks_with_a_write_between(m, x):
    h = m.a(x)
    h.register_hook(lambda g: g * 2)
    h.mul_(2)
    h.register_hook(lambda g: g + 1)
    return m.b(h)


def two_hooks_on_the_input(m, x):
    x.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: g + 1)
    return m.b(m.a(x))


def a_hook_that_reads_a_parameter(m, x):
    h = m.a(x)
    m.last = h.detach()
    h.register_hook(lambda g: g * m.a.bias)
    return m.b(h)


HOOKED = [
    three_hooks,
    three_hooks_and_one_is_taken_away,
    one_is_taken_away_before_another_comes,
    two_hooks_with_a_write_between,
    two_hooks_on_the_input,
    a_hook_that_reads_a_parameter,
]


@pytest.mark.parametrize("forward", HOOKED, ids=lambda forward: forward.__name__)
def test_a_gradient_comes_to_hooks_in_the_order_in_which_they_were_registered(forward):
    for on_first in (True, False):
        output, wanted = witness(forward, on_first)
        model, first, other = made(forward)
        prog = rl.capture(model, leaf_of(first))
        x = leaf_of(first if on_first else other)
        again = prog.replay(x, grad=True, on_divergence="raise").output
        assert torch.equal(again, output)
        assert_same(wanted, taken(model, x, again))


class Scaled:
    def __init__(self, by: Tensor) -> None:
        self.by = by

    def __call__(self, grad: Tensor) -> Tensor:
        return grad * self.by


def times(grad: Tensor, by: Tensor) -> Tensor:
    return grad * by


def hooks_that_read(m: Any, x: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Hooks that name a tensor of the forward in every way."""
    computed = m.b(x).detach().mean()
    m.last = computed
    yield lambda g: g * computed
    yield lambda g: g * x.detach()
    yield lambda g, by=computed: g * by
    yield functools.partial(times, by=computed)
    yield Scaled(computed)
    yield Scaled(computed).__call__
    yield lambda g: g * m.last
    yield lambda g: times(g, [computed][0])
    yield lambda g: (lambda: g * computed)()


@pytest.mark.parametrize("number", range(9))
def test_a_hook_that_reads_what_the_forward_computes_is_refused(number):
    def forward(m, x):
        h = m.a(x)
        h.register_hook(list(hooks_that_read(m, x))[number])
        return m.b(h)

    model, first, _ = made(forward)
    with pytest.raises(rl.NotDifferentiable, match="a hook that reads tensors"):
        rl.capture(model, first).replay(grad=True)


def test_a_hook_that_reads_what_is_computed_after_it_is_refused():
    def forward(m, x):
        h = m.a(x)
        h.register_hook(lambda g: g * later)
        later = m.b(x).detach()
        return m.b(h)

    model, first, _ = made(forward)
    with pytest.raises(rl.NotDifferentiable, match="a hook that reads tensors"):
        rl.capture(model, first).replay(grad=True)


# ---- hooks on modules ------------------------------------------------------------------------------------------------


def twice(module: Any, first: Any, *more: Any) -> Any:
    return tuple([None if gradient is None else gradient * 2 for gradient in first])


def plain(m, x):
    return m.b(m.a(x).tanh())


OWN = ["register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]
OF_ALL = ["register_module_full_backward_hook", "register_module_full_backward_pre_hook"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("register", [*OWN, *OF_ALL])
def test_hooks_on_the_backward_of_modules_are_refused_of_whatever_kind(register, with_gradients):
    model, first, _ = made(plain)
    handle = getattr(model.a, register)(twice) if register in OWN else getattr(of_all_modules, register)(twice)
    try:
        with torch.set_grad_enabled(with_gradients):
            prog = rl.capture(model, leaf_of(first))
    finally:
        handle.remove()
    with pytest.raises(rl.NotDifferentiable, match="a module's backward hook"):
        prog.replay(grad=True)
