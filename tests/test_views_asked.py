"""Models that ask whether a value is a view: what `reshape` and its like give hangs on how memory lies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import replaylens as rl

X = torch.arange(8.0).view(2, 4).clone()
ASKED = {
    "_base of reshape": lambda x: x.reshape(-1)._base is not None,
    "_is_view of reshape": lambda x: x.reshape(-1)._is_view(),
    "_base of flatten": lambda x: x.flatten()._base is not None,
    "_base of a view of reshape": lambda x: x.reshape(-1).view(4, 2)._base.shape == x.shape,
    "_is_view of contiguous": lambda x: x.T.contiguous()._is_view(),
    "_base of ravel": lambda x: x.ravel()._base is not None,
    "elements that are one": lambda x: bool(torch._debug_has_internal_overlap(x)),
    "strides of numpy": lambda x: x.detach().numpy().strides[0] > 8,
    "flags of numpy": lambda x: bool(x.detach().numpy().flags["C_CONTIGUOUS"]),
}
LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(2, 4),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, :4],
}


class Asks(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.tap, self.ask = nn.Tanh(), ask

    def forward(self, x):
        return x * (2.0 if self.ask(self.tap(x)) else 3.0)


def refused(make):
    try:
        return make()
    except (rl.DivergedReplay, rl.InputMismatch):
        return None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ASKED)
def test_whether_an_input_is_viewed_or_copied_is_what_it_is_in_the_model(name, layout):
    ask, other = ASKED[name], LAYOUTS[layout](X)

    def model(x):
        return x * (2.0 if ask(x) else 3.0)

    for keeping in ({}, {"save": "none"}):
        prog = rl.capture(model, X, **keeping)
        assert torch.equal(prog.replay(other).output, model(other))
        strict = refused(lambda prog=prog: prog.replay(other, on_divergence="raise").output)
        assert strict is None or torch.equal(strict, model(other))
    pure = refused(lambda: rl.capture(model, X).function()(other))
    assert pure is None or torch.equal(pure, model(other))
    module = refused(lambda: rl.capture(model, X).module()(other))
    assert module is None or torch.equal(module, model(other))
    assert torch.equal(rl.run(model, other).output, model(other)) and rl.check(model, X)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ASKED)
def test_whether_a_patched_value_is_viewed_or_copied_is_what_it_is_in_the_model(name, layout):
    model, lay = Asks(ASKED[name]), LAYOUTS[layout]
    with model.tap.register_forward_hook(lambda module, args, output: lay(output)):
        wanted = model(X)
    prog = rl.capture(model, X)
    ways = {
        "replay": lambda: prog.replay(patch={"tap": lay}),
        "raising": lambda: prog.replay(patch={"tap": lay}, on_divergence="raise"),
        "few kept": lambda: rl.capture(model, X, save="none").replay(patch={"tap": lay}),
        "insert_after": lambda: prog.insert_after("tap", lay),
        "with_patch": lambda: prog.with_patch({"tap": lay}),
        "live": lambda: rl.run(model, X, patch={"tap": lay}),
    }
    for way, make in ways.items():
        found = refused(make)
        assert found is None or torch.equal(found.output, wanted), way
    swept = rl.sweep(prog, variants={"other": {"tap": lay}, "same": {"tap": rl.Scale(1.0)}})
    assert torch.equal(swept["other"], wanted) and torch.equal(swept["same"], prog.output)


def test_a_tensor_in_the_place_of_a_view_is_none_whether_it_needs_gradients_or_not():
    class Viewing(nn.Module):
        def forward(self, x):
            return x.view(-1).view(2, 4)

    model = Asks(lambda h: h._base is not None)
    model.tap, start = Viewing(), X.clone().requires_grad_()
    prog = rl.capture(model, start)
    for patch in (torch.zeros(2, 4), torch.clone, lambda value: value.detach().clone()):
        assert torch.equal(prog.replay(patch={"tap": patch}).output, X * 3)
