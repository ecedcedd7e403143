"""Patches that give the numbers that were recorded: what a hook gives is a tensor of its own all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import replaylens as rl


class HandsOn(nn.Module):
    def forward(self, x):
        return x


class Views(nn.Module):
    def forward(self, x):
        return x.view(-1).view(2, 4)


class Shared(nn.Module):
    """`write` sees a value, and what `site` makes of it, which shares its memory."""

    def __init__(self, site, write):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.site, self.write = nn.Linear(4, 4), nn.Linear(4, 4), site, write

    def forward(self, x):
        return self.write(self, self.a(x) * 1)


def double(value):
    return value.mul_(2)


def inner_gradient(m, h):
    loss = m.b(torch.tanh(m.site(h) * 1)).sum() + h.pow(2).sum()
    return h * torch.autograd.grad(loss, h)[0]


WRITES = {
    "through what the site gives": lambda m, h: (double(m.site(h)), m.b(h))[1],
    "through a view of that": lambda m, h: (double(m.site(h)[0]), m.b(h))[1],
    "of what both read": lambda m, h: (lambda y: (double(y), m.b(h) + y)[1])(m.site(h)),
    "to what the site was given": lambda m, h: (lambda y: (double(h), m.b(y))[1])(m.site(h)),
    "to a part of that": lambda m, h: (lambda y: (double(h[0]), m.b(y))[1])(m.site(h)),
    "without gradients": lambda m, h: (double(m.site(h.detach())), m.b(h))[1],
    "of numbers": lambda m, h: (m.site(h).__setitem__(0, 7.0), m.b(h))[1],
    "none, but a gradient inside": inner_gradient,
}
EQUAL = {
    "Scale": (lambda prog, clean: rl.Scale(1.0), lambda value: value * 1),
    "Add": (lambda prog, clean: rl.Add(0.0), lambda value: value + 0),
    "a part": (lambda prog, clean: rl.Scale(1.0, "a [b]", b=0), lambda value: value * 1),
    "a function": (lambda prog, clean: lambda value: value * 1, lambda value: value * 1),
    "clone": (lambda prog, clean: torch.clone, torch.clone),
    "what was recorded": (lambda prog, clean: clean["site"].value.detach().clone(), lambda v: v.detach().clone()),
    "From another": (lambda prog, clean: rl.From(clean), lambda value: value.detach().clone()),
    "From itself": (lambda prog, clean: rl.From(prog), lambda value: value.detach().clone()),
    "a chain": (lambda prog, clean: [rl.Scale(1.0), lambda value: value], lambda value: value * 1),
    "the value itself": (lambda prog, clean: lambda value: value, lambda value: value),
    "a view of it": (lambda prog, clean: lambda value: value[:], lambda value: value[:]),
    "detach": (lambda prog, clean: lambda value: value.detach(), lambda value: value.detach()),
}


@pytest.mark.parametrize("site", [HandsOn, Views, nn.Identity])
@pytest.mark.parametrize("equal", EQUAL)
@pytest.mark.parametrize("write", WRITES)
def test_a_patch_of_the_recorded_numbers_shares_memory_as_what_a_hook_gives_does(write, equal, site):
    x = torch.tensor([[1.0, -2.0, 3.0, 0.5], [-0.3, 0.7, 2.0, -1.0]])
    make, hook = EQUAL[equal]
    model = Shared(site(), WRITES[write])
    prog, clean = rl.capture(model, x), rl.capture(model, x)
    patch = {"site": make(prog, clean)}
    with model.site.register_forward_hook(lambda module, args, output: hook(output)):
        wanted = model(x)

    def edited(make):  # it has no model to run, and may refuse
        try:
            return make()
        except rl.DivergedReplay:
            return None

    prog.replay(patch={"site": lambda value: value})  # what it handed back says nothing of the next patch
    assert torch.equal(prog.replay(patch=patch).output, wanted)
    assert torch.equal(rl.run(model, x, patch=patch).output, wanted)
    swept = rl.sweep(prog, variants={"equal": patch, "half": {"site": rl.Scale(0.5)}})
    assert torch.equal(swept["equal"], wanted)
    ways = [lambda: prog.with_patch(patch), lambda: prog.replay(patch=patch, on_divergence="raise")]
    if equal in ("a function", "clone", "the value itself", "a view of it", "detach"):
        ways.append(lambda: prog.insert_after("site", patch["site"]))
    for found in map(edited, ways):
        assert found is None or torch.equal(found.output, wanted)
        assert not isinstance(found, rl.Program) or torch.equal(found.replay(x.clone()).output, wanted)
