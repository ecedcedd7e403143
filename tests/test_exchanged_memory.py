"""Tensors of a model that get other memory or another size by a method that torch shows to nobody: `set_`, `resize_`.

The witness is the plain model on the new input.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import replaylens as rl


class Model(nn.Module):
    def __init__(self, forward, place):
        super().__init__()
        self.first, self.run = nn.Linear(4, 4), forward
        if place == "buffer":
            self.register_buffer("a", torch.zeros(4))
        elif place == "attribute":
            self.a = torch.zeros(4)
        elif place == "list":
            self.kept = [torch.zeros(4)]
        else:
            self.a = nn.Parameter(torch.zeros(4))

    @property
    def held(self):
        return self.kept[0] if hasattr(self, "kept") else self.a

    def forward(self, x):
        return self.run(self, x)


def set_before_it_is_read(self, x):
    with torch.no_grad():
        self.held.set_(self.first(x).mean(0).detach())
    return x + self.held


def set_and_written(self, x):
    with torch.no_grad():
        self.held.set_(self.first(x).mean(0).detach())
        self.held.mul_(2)
    return x + self.held


def set_after_it_was_read(self, x):
    before = x * self.held.sum()
    with torch.no_grad():
        self.held.set_(self.first(x).mean(0).detach())
    return before + self.held


def set_twice(self, x):
    with torch.no_grad():
        self.held.set_(self.first(x).mean(0).detach())
        self.held.set_(x.sum(0))
    return x + self.held


def set_to_a_view(self, x):
    with torch.no_grad():
        self.held.set_(self.first(x).detach()[0])
    return x + self.held


def made(forward, place):
    torch.manual_seed(0)
    return Model(forward, place)


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 4), torch.randn(2, 4)


SETTING = [set_before_it_is_read, set_and_written, set_after_it_was_read, set_twice, set_to_a_view]


@pytest.mark.parametrize("place", ["buffer", "attribute", "list"])
@pytest.mark.parametrize("forward", SETTING, ids=lambda forward: forward.__name__)
def test_what_set_gives_a_tensor_of_the_model_follows_new_inputs(forward, place, inputs):
    x, y = inputs
    wanted = made(forward, place)(y)
    prog = rl.capture(made(forward, place), x)
    assert torch.equal(prog.output, made(forward, place)(x))
    assert torch.equal(prog.replay(y).output, wanted)
    assert forward is set_after_it_was_read or torch.equal(prog.module()(y), wanted)  # it begins with what is there now
    assert torch.allclose(rl.sweep(prog, {0: {"input_1": y}})[0], wanted)


@pytest.mark.parametrize("forward", SETTING, ids=lambda forward: forward.__name__)
def test_a_parameter_that_set_gives_other_memory_is_refused(forward, inputs):
    with pytest.raises(rl.errors.UnannouncedWrite):
        rl.capture(made(forward, "parameter"), inputs[0])


@pytest.mark.parametrize("forward", SETTING, ids=lambda forward: forward.__name__)
def test_what_set_gives_a_buffer_is_a_change_of_state(forward, inputs):
    model = made(forward, "buffer")
    prog = rl.capture(model, inputs[0])
    assert torch.equal(prog.state_changes["a"], model.a)
    model(inputs[1])
    assert prog.check()


@pytest.mark.parametrize("place", ["buffer", "attribute", "list"])
def test_every_law_holds_of_a_model_that_sets_a_tensor_before_it_reads_it(place, inputs):
    model = made(set_before_it_is_read, place)
    memory = model.held.data_ptr()
    assert rl.check(model, inputs[0])
    assert model.held.data_ptr() == memory
    assert torch.equal(model.held, torch.zeros(4))


def grows(self, x):
    self.a.resize_(8).zero_()
    return self.first(x) + self.a.sum()


def shrinks(self, x):
    self.a.resize_(2)
    return self.first(x) + self.a.sum()


def turns(self, x):
    self.a.unsqueeze_(0)
    return self.first(x) + self.a


@pytest.mark.parametrize("forward", [grows, shrinks, turns], ids=lambda forward: forward.__name__)
def test_a_buffer_that_the_model_resizes_is_put_back_as_it_was(forward, inputs):
    model = made(forward, "buffer")
    before = torch.arange(4.0)
    model.a.copy_(before)
    assert rl.check(model, inputs[0])
    assert torch.equal(model.a, before)
    assert rl.check(model, inputs[0])


class Exchanges(nn.Module):
    """Another tensor becomes the buffer, and the one that was there is written; the next forward writes the other."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("a", torch.zeros(4))

    def forward(self, x):
        old = self.a
        self.a = self.l1(x).mean(0).detach()
        old.add_(5)
        return self.l2(x) + old + self.a


def test_a_program_outlives_a_forward_that_writes_what_became_a_buffer(inputs):
    model = Exchanges()
    assert rl.check(model, inputs[0])
    prog = rl.capture(model, inputs[0])
    mean, swept = prog["mean_1"].value.clone(), rl.sweep(prog, {0: {"l1": torch.neg}})[0]
    model(inputs[1])
    assert prog.check()
    assert torch.equal(rl.sweep(prog, {0: {"l1": torch.neg}})[0], swept)
    assert torch.equal(prog["mean_1"].value, mean)


def alias_given(x: torch.Tensor) -> torch.Tensor:
    value = x * 2
    alias = value.detach()
    alias.set_(x * 3)
    alias.add_(1)
    return value + alias


def tensor_at(x: torch.Tensor) -> torch.Tensor:
    held, given = torch.zeros(0), x * 3
    held.set_(given, 2, (3, 2), (4, 1))
    given.mul_(2)
    held.add_(1)
    return given + held.sum()


def storage_read(x: torch.Tensor) -> torch.Tensor:
    held, given = torch.zeros(0), x * 3
    held.set_(given.untyped_storage(), 0, (3, 2), (4, 1))
    given.mul_(2)
    return held + 1


def storage_written(x: torch.Tensor) -> torch.Tensor:
    held, given = torch.zeros(0), x * 3
    held.set_(source=given.untyped_storage(), storage_offset=2, size=(3, 2), stride=(4, 1))
    held.mul_(2)
    given.add_(1)
    return given + held.sum()


@pytest.mark.parametrize("forward", [alias_given, tensor_at, storage_read, storage_written])
def test_set_leaves_aliases_as_they_are_and_may_give_a_part_of_memory(forward: Callable[[Any], Any]) -> None:
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    prog = rl.capture(forward, x)
    assert torch.equal(prog.replay().output, forward(x))
    assert torch.equal(prog.replay(other).output, forward(other))
    assert prog.check()


def test_set_to_memory_that_no_tensor_of_the_forward_has_is_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        held = torch.zeros(0).set_(torch.zeros(4).untyped_storage().clone(), 0, (4,), (1,))
        return x + held

    with pytest.raises(rl.CaptureError, match="raw memory"):
        rl.capture(forward, torch.randn(3, 4))


def _exchanges(self, x):
    self.a.data = self.a + 1
    return self.first(x) + self.a


def _exchanges_and_writes(self, x):
    y = self.first(x)
    self.a.data = y.sum(0).detach()
    self.a.add_(1)
    return y


def _exchanges_a_weight(self, x):
    self.first.weight.data = self.first.weight.data * 0.5
    return self.first(x)


def _exchanges_without_reading(self, x):
    self.a.data = x.sum(0)
    return self.first(x)


def _turns_its_buffer(self, x):
    self.a.unsqueeze_(0)
    return self.first(x) + self.a


@pytest.mark.parametrize(
    "forward",
    [_exchanges, _exchanges_and_writes, _exchanges_a_weight, _exchanges_without_reading, _turns_its_buffer],
)
def test_a_live_run_tells_of_tensors_that_were_given_other_memory(forward):
    x, other = torch.randn(2, 4), torch.randn(3, 4)
    model = Model(forward, "buffer")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain = copy.deepcopy(model)
    wanted = plain(other)
    now = plain.state_dict()
    changed = {k for k in now if now[k].shape != before[k].shape or not torch.equal(now[k], before[k])}
    prog = rl.capture(copy.deepcopy(model), x)
    for run in (prog.replay(other), rl.run(model, other)):
        assert torch.equal(run.output, wanted)
        assert set(run.state_changes) == changed
        assert all(torch.equal(run.state_changes[key], now[key]) for key in changed)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_live_run_in_which_nobody_sees_that_memory_is_set_is_refused():
    def forward(self, x):
        self.a.set_(self.a + 1)
        return self.first(x) + self.a

    model = Model(forward, "buffer")
    prog = rl.capture(model, torch.randn(2, 4))
    with pytest.raises((rl.UnannouncedWrite, rl.StaleValue)):
        prog.replay(torch.randn(3, 4))


def _exchanges_after_it_is_used(self, x):
    y = self.first(x)
    self.first.weight.data = self.first.weight.data * 0.5
    return y.sin()


def _exchanges_between_two_uses(self, x):
    y = self.first(x)
    self.first.weight.data, self.first.bias.data = self.first.weight.data * 0.5, self.first.bias.data + 1
    return self.first(y)


@pytest.mark.parametrize("forward", [_exchanges_after_it_is_used, _exchanges_between_two_uses, _exchanges_a_weight])
def test_gradients_through_a_module_are_the_models_where_the_forward_exchanges_memory_by_data(forward):
    model = Model(forward, "buffer")
    module = rl.capture(copy.deepcopy(model), torch.randn(2, 4)).module()
    module.load_state_dict(model.state_dict(), strict=False)
    for _ in range(3):
        found = []
        x = torch.randn(2, 4)
        for one in (model, module):
            given = x.clone().requires_grad_()
            one.zero_grad()
            out = one(given)
            out.sum().backward()
            weights = [one.first.weight, one.first.bias]
            found.append([out, given.grad, *[w.grad for w in weights], *[w.detach().clone() for w in weights]])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _keeps_its_weight(self, x):
    self.kept = self.first.weight
    return self.first(x)


def _keeps_its_layer(self, x):
    self.second = self.first
    return self.first(x)


def _leaves_a_larger_buffer(self, x):
    self.a.resize_(9)
    return self.first(x)


def _leaves_undefined_memory(self, x):
    self.a = torch.empty(9)
    return self.first(x)


@pytest.mark.parametrize(
    "forward", [_keeps_its_weight, _keeps_its_layer, _leaves_a_larger_buffer, _leaves_undefined_memory]
)
def test_what_a_forward_keeps_under_other_names_or_leaves_undefined_is_no_fault_to_a_check(forward):
    model, x = Model(forward, "buffer"), torch.randn(2, 4)
    report = rl.check(copy.deepcopy(model), x, progress=False)
    assert report, str(report)
    (weight,) = [n for n in rl.capture(model, x).graph.state_nodes if n.address == "first.weight"]
    assert weight.aliases == ()
