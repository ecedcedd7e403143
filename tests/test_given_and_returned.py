"""What a model returns stays what it was, and what is given in place of a tensor is refused by its name.

The witness for an output is a copy of it, taken before the model runs again.
"""

import copy

import pytest
import torch
from torch import nn

import replaylens as rl
from replaylens.errors import CaptureError, InputMismatch


class Counts(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.run = nn.Linear(4, 4), forward
        self.register_buffer("b", torch.zeros(4))
        self.register_buffer("c", torch.ones(4))

    def forward(self, x):
        return self.run(self, self.first(x))


def returns_its_buffer(self, h):
    self.b += 1
    return h + self.b, self.b


def returns_a_view_of_its_buffer(self, h):
    self.b.add_(1)
    return [h, {"part": self.b[1:3]}]


def returns_it_twice(self, h):
    self.b.add_(1)
    return self.b, h, (self.b, self.b.view(2, 2))


def returns_what_becomes_a_buffer(self, h):
    made = self.b + h.mean(0).detach()
    self.b.mul_(0)
    self.b = made
    return made


def returns_a_view_of_what_becomes_a_buffer(self, h):
    self.b.mul_(7)
    self.b = self.b + 1
    return self.b[:2], h


def returns_what_becomes_a_buffer_unwritten(self, h):
    self.b.add_(3)
    new = self.c + 1
    self.c = self.b
    self.b = new
    return new, self.c, h


def returns_a_parameter_written(self, h):
    self.first.bias.data.add_(1)
    return h, self.first.bias


def returns_a_buffer_with_a_history(self, h):
    self.b = self.b.detach().add_(1) * 1
    kept = self.b * h.sum()
    self.b = kept
    return kept


WAYS = (
    returns_its_buffer,
    returns_a_view_of_its_buffer,
    returns_it_twice,
    returns_what_becomes_a_buffer,
    returns_a_view_of_what_becomes_a_buffer,
    returns_what_becomes_a_buffer_unwritten,
    returns_a_parameter_written,
    returns_a_buffer_with_a_history,
)


def tensors_of(tree):
    return [one for one in torch.utils._pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_program_says_the_model_returned_outlives_the_models_next_forward(way):
    torch.manual_seed(0)
    model, x = Counts(way), torch.randn(3, 4)
    wanted = [one.detach().clone() for one in tensors_of(copy.deepcopy(model)(x))]
    prog = rl.capture(model, x)
    assert torch.utils._pytree.tree_structure(prog.output) == torch.utils._pytree.tree_structure(model(x))
    for found in (prog.output, prog.replay().output):
        assert all(torch.equal(one, other) for one, other in zip(tensors_of(found), wanted, strict=True))
    report = prog.check()
    assert report or report.stale, str(report)


def test_what_becomes_a_buffer_and_is_returned_keeps_its_gradients():
    model, x = Counts(returns_a_buffer_with_a_history), torch.randn(3, 4)
    model.b += 1
    other = copy.deepcopy(model)
    rl.capture(model, x).output.sum().backward()
    other(x).sum().backward()
    assert torch.equal(model.first.weight.grad, other.first.weight.grad)


def test_an_output_that_no_forward_writes_is_the_very_tensor_that_the_model_returned():
    made = []

    def forward(x):
        made.append(x * 2)
        return made[0]

    assert rl.capture(forward, torch.ones(2)).output is made[0]


GIVEN = (None, {"a": torch.ones(3, 4)}, (torch.ones(3, 4),), [1.0], 1.0, "x", object())


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("inputs", [None, "1"])
def test_a_function_says_which_argument_is_no_tensor(given, inputs):
    function = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(3, 4)).function(inputs=inputs)
    with pytest.raises(InputMismatch, match=r"argument for \w+ is (None|an? \w+);.*float32\[3, 4\].*\nGive a tensor"):
        function(given)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: type(given).__name__)
def test_state_that_is_no_tensor_is_refused_by_its_address(given):
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(3, 4))
    with pytest.raises(
        InputMismatch, match=r"state at '0.weight' is (None|an? \w+);.*float32\[4, 4\].*\nGive a tensor"
    ):
        prog.replay(state={"0.weight": given})


@pytest.mark.parametrize("given", [torch.zeros(3, 3), torch.zeros(4, 4).double(), torch.zeros(4, 7)], ids=str)
def test_state_that_the_model_cannot_take_is_refused_by_its_address(given):
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(3, 4))
    with pytest.raises(InputMismatch, match=r"state at '0.weight' is .*recorded with float32\[4, 4\]") as refused:
        prog.replay(state={"0.weight": given})
    assert "capture again" in str(refused.value) and isinstance(refused.value.__cause__, RuntimeError)


def test_state_of_another_shape_that_the_model_can_take_is_given_to_it():
    model = nn.Embedding(4, 3)
    prog = rl.capture(model, torch.tensor([1, 2]))
    other = torch.randn(9, 3)
    assert torch.equal(prog.replay(state={"weight": other}).output, other[[1, 2]])


@pytest.mark.parametrize("depth", [200, 230])
def test_a_model_of_many_nested_modules_is_checked(depth):
    model = nn.Linear(4, 4)
    for _ in range(depth):
        model = nn.Sequential(model)
    assert rl.check(model, torch.randn(2, 4))


def nested(value, depth):
    for _ in range(depth):
        value = [value]
    return value


class Nests(nn.Module):
    def forward(self, x):
        return nested(x * 2, 600)


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Nests()

    def forward(self, x):
        made = self.inner(x)
        while isinstance(made, list):
            (made,) = made
        return made


@pytest.mark.parametrize("model", [Nests(), Unpacks()], ids=["output", "output of a module"])
def test_lists_too_deep_for_a_replay_are_refused_at_capture(model):
    with pytest.raises(CaptureError, match="nested deeper than Python's stack"):
        rl.capture(model, torch.ones(2))


def test_lists_nested_as_deep_as_there_is_room_for_are_captured():
    prog = rl.capture(lambda x: nested(x * 2, 300), torch.ones(2))
    assert prog.check() and len(prog.replay(torch.zeros(2)).output) == 1
