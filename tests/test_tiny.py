"""replaylens in eighty lines, to be read first and run first."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import replaylens as rl


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 8)
        self.decode = nn.Linear(8, 2)

    def forward(self, x):
        hidden = F.relu(self.encode(x))
        return self.decode(hidden)


torch.manual_seed(0)
net, x = Net(), torch.randn(3, 4)
prog = rl.capture(net, x)  # one line, and no change to the model


def test_a_program_has_a_layer_for_every_operation():
    assert prog.layer_labels == ["input_1_0", "linear_1_1", "relu_1_2", "linear_2_3", "output_1_4"]
    assert torch.equal(prog.output, net(x))


@pytest.mark.parametrize("name", ["linear_2_3", "linear_2", "linear_2_3:1", "decode", "decode:1", 3, -2])
def test_a_layer_is_found_by_its_label_its_module_and_its_place(name):
    assert prog[name].label == "linear_2_3"


def test_a_layer_knows_its_value_its_place_and_its_neighbours():
    relu = prog["relu_1"]
    assert torch.equal(relu.value, net.encode(x).relu())
    assert relu.parents == ("linear_1_1",) and relu.children == ("linear_2_3",)
    assert prog["linear_1"].module == "encode"
    assert relu.source.text == "hidden = F.relu(self.encode(x))"


def test_a_replay_runs_the_whole_program_or_what_follows_a_layer():
    assert prog.replay().executed == ("linear_1_1", "relu_1_2", "linear_2_3")
    assert prog.replay(from_="relu_1").executed == ("linear_2_3",)
    assert torch.equal(prog.replay(from_="relu_1").output, prog.output)


def test_a_patch_is_a_function_or_a_tensor_in_the_place_of_a_value():
    run = prog.replay(patch={"relu_1": lambda hidden: 2 * hidden})
    assert torch.equal(run.output, net.decode(2 * net.encode(x).relu()))
    assert torch.equal(run["linear_1"], prog["linear_1"].value)
    run = prog.replay(from_="relu_1", patch=torch.zeros(3, 8))
    assert torch.equal(run.output, net.decode.bias.expand(3, 2))


def test_a_program_takes_other_inputs_and_other_parameters():
    y = torch.randn(3, 4)
    assert torch.equal(prog(y).output, net(y))
    assert torch.equal(prog.replay(state={"decode.weight": torch.zeros(2, 8)}).output, net.decode.bias.expand(3, 2))


def test_gradients_flow_through_a_replay_as_through_the_model():
    prog.replay(grad=True).output.sum().backward()
    assert torch.equal(net.decode.bias.grad, torch.full((2,), 3.0))


def test_a_program_is_a_function_for_torch_func():
    slope = torch.func.grad(lambda hidden: prog.function(inputs=["relu_1"])(hidden).sum())
    torch.testing.assert_close(slope(prog["relu_1"].value), net.decode.weight.sum(0).expand(3, 8))


def test_a_mistake_is_answered_with_what_would_have_been_right():
    with pytest.raises(rl.NoSuchLayer, match="'relu_1"):
        prog["relu_3"]
    with pytest.raises(rl.InputMismatch, match="Give the recorded shape"):
        prog.replay(torch.randn(5, 4), on_divergence="raise")
