"""Models that train a parameter of their own in each forward, run once more: on other inputs, with patches.

The witness is a copy of the plain model, as it was before the capture, with a forward hook where a patch is meant.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import replaylens as rl
from tests.oracle import assert_same

OPTIMIZERS = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "fused": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda own: torch.optim.Adam(own, lr=0.1),
    "foreach": lambda own: torch.optim.Adam(own, lr=0.1, foreach=True),
    "by hand": None,
    "by data": None,
}


class Trains(nn.Module):
    def __init__(self, by, rounds=1, asked=True):
        super().__init__()
        self.a, self.w, self.by, self.rounds, self.asked = (
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(4)),
            by,
            rounds,
            asked,
        )
        self.optimizer = OPTIMIZERS[by]([self.w]) if OPTIMIZERS[by] else None

    def forward(self, x):
        for _ in range(self.rounds):
            self.w.grad = None
            loss = (self.a(x.detach()) * self.w).pow(2).mean()
            loss.backward(inputs=[self.w] if self.asked else None)
            if self.optimizer is not None:
                self.optimizer.step()
            elif self.by == "by hand":
                with torch.no_grad():
                    self.w.sub_(self.w.grad * 0.1)
            else:
                self.w.data -= 0.1 * self.w.grad
        return self.a(x) * self.w


def built(*args):
    torch.manual_seed(0)
    return Trains(*args), torch.randn(3, 4), torch.randn(5, 4)


def hooked(model, x):
    model = deepcopy(model)
    model.a.register_forward_hook(lambda module, args, out: out * 0.5)
    return model(x)


@pytest.mark.parametrize("by", OPTIMIZERS)
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "all"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["fresh", "warm"])
def test_a_model_that_trains_itself_is_run_again_from_where_it_began(by, rounds, asked, is_warm):
    model, x, longer = built(by, rounds, asked)
    if is_warm:
        model(x)
        model.zero_grad()
    before = deepcopy(model)
    prog = rl.capture(model, x)
    assert_same(prog.output, deepcopy(before)(x))
    kept = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    for given in (x, x + 1, longer):
        assert_same(prog.replay(given).output, deepcopy(before)(given))
        assert_same(prog.replay(given, patch={"a": rl.Scale(0.5)}).output, hooked(before, given))
    for name, p in model.named_parameters():
        assert torch.equal(p, kept[name][0])
        assert p.grad is kept[name][1]
    assert_same(rl.run(deepcopy(before), x, patch={"a": rl.Scale(0.5)}).output, hooked(before, x))


@pytest.mark.parametrize("by", OPTIMIZERS)
def test_an_optimizer_that_the_model_holds_is_checked_from_where_it_began(by):
    model, x, _ = built(by)
    report = rl.check(model, x)
    assert report, report
