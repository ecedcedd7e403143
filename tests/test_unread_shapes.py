"""Shapes and dtypes that Python alone reads: a value of another kind is refused, though no operation meets it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import replaylens as rl


class Asks(nn.Module):
    """`ask` reads a value of which no operation need be."""

    def __init__(self, ask):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.ask, self.w = nn.Linear(4, 4), ask, nn.Parameter(torch.ones(2, 4))
        self.register_buffer("h", torch.ones(2, 4))

    def forward(self, x):
        return x * self.ask(self, x)


def wider(value):
    return torch.cat([value, value])


def made_of(value):
    value + 1
    return len(value)


OTHERS = {
    "len": (lambda m, x: len(m.a(x)), wider),
    "shape": (lambda m, x: m.a(x).shape[0], wider),
    "numel": (lambda m, x: m.a(x).numel(), wider),
    "dim": (lambda m, x: m.a(x).dim(), lambda value: value[None]),
    "a comparison": (lambda m, x: 2.0 if m.a(x).shape == x.shape else 3.0, wider),
    "a loop": (lambda m, x: sum(1 for _ in m.a(x)), wider),
    "dtype": (lambda m, x: 2.0 if m.a(x).dtype == torch.float32 else 3.0, torch.Tensor.double),
    "finfo": (lambda m, x: torch.finfo(m.a(x).dtype).bits, torch.Tensor.double),
    "element_size": (lambda m, x: m.a(x).element_size(), torch.Tensor.double),
    "nbytes": (lambda m, x: m.a(x).nbytes, torch.Tensor.double),
    "is_complex": (lambda m, x: 2.0 if m.a(x).is_complex() else 3.0, lambda value: value.to(torch.complex64)),
    "is_floating_point": (lambda m, x: 2.0 if m.a(x).is_floating_point() else 3.0, torch.Tensor.long),
    "result_type": (lambda m, x: 2.0 if torch.result_type(m.a(x), 1.0) == torch.float32 else 3.0, torch.Tensor.double),
    "device": (lambda m, x: 2.0 if m.a(x).device.type == "cpu" else 3.0, lambda value: value.to("meta")),
    "beside a call that nothing reads": (lambda m, x: made_of(m.a(x)), wider),
    "of what is made of it": (lambda m, x: len(F.relu(m.a(x))), wider),
}
WAYS = {
    "replay": lambda model, x, prog, patch: prog.replay(patch={"a": patch}),
    "on new inputs": lambda model, x, prog, patch: prog.replay(x.clone(), patch={"a": patch}),
    "on the recorded path": lambda model, x, prog, patch: prog.replay(patch={"a": patch}, on_divergence="ignore"),
    "a tensor": lambda model, x, prog, patch: prog.replay(patch={"a": patch(model.a(x).detach())}),
    "with gradients": lambda model, x, prog, patch: prog.replay(patch={"a": patch}, grad=True),
    "drawn anew": lambda model, x, prog, patch: prog.replay(patch={"a": patch}, rng="fresh"),
    "few values kept": lambda model, x, prog, patch: rl.capture(model, x, save="none").replay(patch={"a": patch}),
    "with_patch": lambda model, x, prog, patch: prog.with_patch({"a": patch}),
    "insert_after": lambda model, x, prog, patch: prog.insert_after("a", patch),
    "swap": lambda model, x, prog, patch: prog.swap("linear_1", lambda x, w, b: patch(F.linear(x, w, b))),
    "sweep": lambda model, x, prog, patch: rl.sweep(prog, variants={1: {"a": patch}, 2: {"a": rl.Scale(0.5)}}),
    "grads": lambda model, x, prog, patch: prog.grads(of=torch.sum, patch={"a": patch}),
    "live": lambda model, x, prog, patch: rl.run(model, x, patch={"a": patch}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_patch_of_another_kind_is_refused_where_python_alone_reads_what_it_changes(name, way):
    ask, patch = OTHERS[name]
    model, x = Asks(ask), torch.ones(2, 4)
    with pytest.raises(rl.ShapeMismatch):
        WAYS[way](model, x, rl.capture(model, x), patch)


@pytest.mark.parametrize("way", WAYS)
def test_a_patch_of_the_same_kind_is_none_where_python_alone_reads_what_it_changes(way):
    model, x = Asks(OTHERS["len"][0]), torch.ones(2, 4)
    found = WAYS[way](model, x, rl.capture(model, x), lambda value: value * 3)
    if hasattr(found, "output"):
        assert torch.equal(found.output, x * 2)


STATES = {
    "len": (lambda m, name: len(getattr(m, name)), torch.ones(3, 4)),
    "element_size": (lambda m, name: getattr(m, name).element_size(), torch.ones(2, 4).double()),
    "shape": (lambda m, name: getattr(m, name).shape[-1], torch.ones(2, 5)),
}


@pytest.mark.parametrize("address", ["h", "w"])
@pytest.mark.parametrize("name", STATES)
def test_state_of_another_kind_is_refused_where_no_operation_reads_it(name, address):
    ask, other = STATES[name]
    prog = rl.capture(Asks(lambda m, x: ask(m, address)), torch.ones(2, 4))
    for way in (lambda: prog.replay(state={address: other}), lambda: prog.set_state(address, other)):
        with pytest.raises(rl.InputMismatch):
            way()


def test_state_of_the_same_kind_that_nothing_reads_is_passed_over():
    model = Asks(lambda m, x: len(m.a(x)))
    prog = rl.capture(model, torch.ones(2, 4))
    assert torch.equal(prog.replay(state=model.state_dict()).output, prog.output)
