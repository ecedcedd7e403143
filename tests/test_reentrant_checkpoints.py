"""A reentrant checkpoint has gradients as in the model: none, where none of its arguments needs them."""

from __future__ import annotations

import pytest
import torch
from gradient_witness import assert_same, leaf_of, made, taken, witness
from torch.utils.checkpoint import checkpoint

import replaylens as rl


def given_nothing_with_gradients(m, x):
    return m.b(checkpoint(lambda t: m.a(t).tanh(), x.detach(), use_reentrant=True)) + x


def given_what_needs_gradients(m, x):
    return checkpoint(lambda t: m.b(t).tanh(), m.a(x), use_reentrant=True)


def given_one_that_needs_gradients(m, x):
    return checkpoint(lambda t, u: m.b(t).tanh() * u, m.a(x).detach(), x, use_reentrant=True)


REENTRANT = [given_nothing_with_gradients, given_what_needs_gradients, given_one_that_needs_gradients]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("forward", REENTRANT, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("flag", [True, False])
def test_a_reentrant_checkpoint_has_gradients_only_where_an_argument_needs_them(forward, flag):
    output, wanted = witness(forward, on_first=False)
    model, first, other = made(forward)
    prog = rl.capture(model, first.clone().requires_grad_(flag))
    x = leaf_of(other)
    again = prog.replay(x, grad=True).output
    assert torch.equal(again, output)
    assert_same(wanted, taken(model, x, again))
