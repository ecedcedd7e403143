"""What writes in place, under `no_grad` or by `out=`, does to gradients is what it does in the model.

The witness is the model itself, differentiated on other numbers than it was captured on. Each is captured on an input
that needs no gradients, on one that does, and where gradients are off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import replaylens as rl

Model = Callable[[Tensor], Tensor]


def under_no_grad(write: Callable[[Tensor], Any]) -> Model:
    """A model that writes a computed tensor where autograd does not look."""

    def model(x: Tensor) -> Tensor:
        y = x * 1.5
        with torch.no_grad():
            write(y)
        return y * y * x

    return model


def seen(write: Callable[[Tensor], Any]) -> Model:
    """A model that writes where autograd looks, and hands on what it wrote."""
    return lambda x: write(x * 1.5)


HIDDEN = {
    "clamp_": lambda y: y.clamp_(min=0),
    "clamp_min_": lambda y: y.clamp_min_(0.1),
    "relu_": lambda y: y.relu_(),
    "torch.relu_": lambda y: torch.relu_(y),
    "F.relu": lambda y: F.relu(y, inplace=True),
    "F.leaky_relu": lambda y: F.leaky_relu(y, 0.1, inplace=True),
    "F.silu": lambda y: F.silu(y, inplace=True),
    "sigmoid_": lambda y: y.sigmoid_(),
    "abs_": lambda y: y.abs_(),
    "neg_": lambda y: y.neg_(),
    "exp_": lambda y: y.exp_(),
    "round_": lambda y: y.round_(),
    "add_": lambda y: y.add_(1),
    "mul_": lambda y: y.mul_(2),
    "mul_ by a tensor": lambda y: y.mul_(torch.full((), 3.0)),
    "div_": lambda y: y.div_(2),
    "pow_": lambda y: y.pow_(2),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(2),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 3.0),
    "copy_": lambda y: y.copy_(y.flip(0)),
    "set by an item": lambda y: y.__setitem__(0, 3.0),
    "of a view": lambda y: y[1:].clamp_(min=0),
    "twice": lambda y: y.clamp_(min=0).add_(1),
    "out=": lambda y: torch.clamp(y, 0, 1, out=y),
}

SEEN = {
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(2.0),
    "fill_ and more": lambda y: y.fill_(2.0) * y,
    "fill_ by a tensor": lambda y: y.fill_(torch.tensor(2.0)),
    "torch.fill_": lambda y: torch.fill_(y, 2.0),
    "zero_ of a part": lambda y: (y[:2].zero_(), y)[1],
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 3.0),
    "round_": lambda y: y.round_(),
    "fill_ of integers": lambda y: y * y.long().fill_(3),
}

OUT = {
    "quantile": lambda x: torch.quantile(x, 0.5, out=torch.zeros(())),
    "nanquantile": lambda x: torch.nanquantile(x, 0.5, out=torch.zeros(())),
    "inner": lambda x: torch.inner(x, x, out=torch.zeros(4, 4)),
    "tensordot": lambda x: torch.tensordot(x, x, 2, out=torch.zeros(())),
    "diff of no order": lambda x: torch.diff(x, n=0, out=torch.zeros(4, 4)),
    "nuclear norm": lambda x: torch.norm(x, "nuc", out=torch.zeros(())),
    "cond": lambda x: torch.linalg.cond(x, out=torch.zeros(())),
    "linalg.norm": lambda x: torch.linalg.norm(x, out=torch.zeros(())),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, "nuc", out=torch.zeros(())),
    "tensorinv": lambda x: torch.linalg.tensorinv(x, 1, out=torch.zeros(4, 4)),
    "tensorsolve": lambda x: torch.linalg.tensorsolve(x, x[0], out=torch.zeros(4)),
    "ndtr": lambda x: torch.special.ndtr(x, out=torch.zeros(4, 4)),
    "of another size": lambda x: torch.quantile(x, 0.5, out=torch.zeros(0)),
    "of what has a history": lambda x: torch.inner(x, x, out=x * 2),
}

MODELS: dict[str, Model] = {
    **{f"{name} under no_grad": under_no_grad(write) for name, write in HIDDEN.items()},
    **{f"{name} with gradients": seen(write) for name, write in SEEN.items()},
    **{f"{name} by out=": function for name, function in OUT.items()},
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, torch.zeros(4, 4), x.abs()),
}


def gradient_of(function: Model, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output, and the gradient of a weighted sum of it; None where it needs none."""
    leaf = x.clone().requires_grad_()
    output = function(leaf)
    weights = torch.arange(1.0, output.numel() + 1).reshape(output.shape)
    return output, torch.autograd.grad((output * weights).sum(), leaf)[0] if output.requires_grad else None


def examples() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("captured", ["without a flag", "with a flag", "without gradients"])
@pytest.mark.parametrize("name", MODELS)
def test_a_write_leaves_the_gradients_that_it_leaves_in_the_model(name, captured):
    first, other = examples()
    output, wanted = gradient_of(MODELS[name], other)
    with torch.set_grad_enabled(captured != "without gradients"):
        prog = rl.capture(MODELS[name], first.clone().requires_grad_(captured == "with a flag"))
    try:
        again, got = gradient_of(lambda x: prog.replay(x, grad=True).output, other)
    except rl.NotDifferentiable:  # a no_grad block cannot be told from what lay around the capture
        assert captured == "without gradients"
        return
    assert torch.equal(again, output)
    assert again.requires_grad == output.requires_grad
    assert (got is None) == (wanted is None)
    assert got is None or wanted is None or torch.equal(got, wanted)


def kept_in_chunks(x: Tensor, weight: Tensor) -> Tensor:
    target = torch.tensor([0, 1, 2, 1])
    return F.linear_cross_entropy(x, weight, target, options=torch.nn.LinearCrossEntropyOptions()) * 2


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no such function")
@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("captured", [(False, False), (True, False), (False, True)])
def test_flags_that_torch_hands_on_to_a_kernel_are_facts(captured, asked):
    x, weight = examples()[0], torch.randn(3, 4)

    def taken(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_(flag) for t, flag in zip((x, weight), asked, strict=True)]
        return torch.autograd.grad(function(*leaves), [leaf for leaf in leaves if leaf.requires_grad])

    prog = rl.capture(
        kept_in_chunks, *[t.clone().requires_grad_(f) for t, f in zip((x, weight), captured, strict=True)]
    )
    got = taken(lambda *leaves: prog.replay(*leaves, grad=True).output)
    for one, other in zip(got, taken(kept_in_chunks), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no such function")
def test_a_kernel_that_was_told_that_no_gradient_will_be_asked_for_is_not_differentiated():
    x, weight = examples()[0], torch.randn(3, 4)
    with torch.no_grad():
        prog = rl.capture(kept_in_chunks, x, weight)
    with pytest.raises(rl.NotDifferentiable, match="told that no gradient will be asked for"):
        prog.replay(x.requires_grad_(), weight, grad=True)
