"""How the layers of a program are called, and how they are found."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from internals import Label
from torch import nn
from torch.nn import functional as F

import replaylens as rl

ALEXNET = """
input_1_0 conv2d_1_1 relu_1_2 maxpool2d_1_3 conv2d_2_4 relu_2_5 maxpool2d_2_6 conv2d_3_7 relu_3_8 conv2d_4_9 relu_4_10
conv2d_5_11 relu_5_12 maxpool2d_3_13 adaptiveavgpool2d_1_14 flatten_1_15 dropout_1_16 linear_1_17 relu_6_18 dropout_2_19
linear_2_20 relu_7_21 linear_3_22 output_1_23
"""


@pytest.fixture(scope="module")
def alexnet():
    model = runpy.run_path(str(Path(__file__).parents[1] / "bench/models.py"))["AlexNet"](classes=10)
    return rl.capture(model.eval(), torch.randn(1, 3, 224, 224))


class DemoNetwork(nn.Module):
    """Of the paper's figure 1, as are the two below of figures 2 and 3."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(in_features=5, out_features=5)
        self.relu_module = nn.ReLU()
        self.register_buffer("example_buffer", torch.ones(5))

    def forward(self, x):
        x = x + 1
        x = self.relu_module(x)
        x = self.fc(x)
        x = nn.functional.relu(x)
        x = x + torch.randn(x.shape)
        y = x**2
        x = x / y
        x = x * self.example_buffer
        return x  # noqa: RET504 - as the figure has it


class RecurrentNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(in_features=5, out_features=5)

    def forward(self, x):
        for _ in range(3):
            x = self.fc(x)
            x = x + 1
            x = x * 2
        return x


class Submodule2(nn.Module):
    def forward(self, x):
        x = x + 2
        w = torch.cos(x)
        y = torch.sin(x)
        z = torch.tan(x)
        return w + y + z


class Submodule1(nn.Module):
    def __init__(self):
        super().__init__()
        self.submodule2 = Submodule2()

    def forward(self, x):
        return self.submodule2(x + 1) * 4


class NetworkOrganizationDemo(nn.Module):
    def __init__(self):
        super().__init__()
        self.submodule1 = Submodule1()

    def forward(self, x):
        x = x * 2 if torch.sum(x) > 0 else x + 1
        x = 1 / x + torch.log(x) + x**2
        x = self.submodule1(x)
        return (x + 1) * 2


def test_alexnet_has_the_labels_of_the_readme(alexnet):
    assert alexnet.layer_labels == ALEXNET.split()


@pytest.mark.parametrize("key", ["conv2d_3_7", "conv2d_3", "conv2d_3_7:1", "features.6", "features.6:1", 7, -17])
def test_a_layer_is_found_by_every_key_of_the_readme(alexnet, key):
    assert alexnet[key].label == "conv2d_3_7"
    assert key in alexnet["conv2d_3_7"].lookup_keys
    assert key in alexnet


@pytest.mark.parametrize("label", ALEXNET.split())
def test_every_lookup_key_of_a_layer_finds_it(alexnet, label):
    keys = alexnet[label].lookup_keys
    assert {alexnet[key].label for key in keys} == {label}
    assert alexnet[alexnet[label]].label == label
    assert alexnet[alexnet[label].short_label].label == label


LAST = {
    "features": "maxpool2d_3_13",
    "avgpool": "adaptiveavgpool2d_1_14",
    "classifier": "linear_3_22",
    "classifier.0": "dropout_1_16",
}


@pytest.mark.parametrize("module", LAST)
def test_a_module_is_its_last_operation(alexnet, module):
    label = LAST[module]
    assert alexnet[module].label == label
    assert f"{module}:1" in alexnet[label].output_of


def test_a_program_can_be_walked_layer_by_layer(alexnet):
    assert [layer.label for layer in alexnet] == ALEXNET.split() and len(alexnet) == 24


def test_layer_types_are_the_words_of_the_labels(alexnet):
    assert [layer.layer_type for layer in alexnet.layers] == [label.split("_")[0] for label in ALEXNET.split()]


def test_a_layer_names_its_module_and_the_modules_around_it(alexnet):
    layer = alexnet["conv2d_3_7"]
    assert layer.module == "features.6" and layer.modules == ("features:1", "features.6:1")
    assert layer.parents == ("maxpool2d_2_6",) and layer.children == ("relu_3_8",)
    assert alexnet["flatten_1"].module is None  # it ran in the model itself
    assert alexnet["output_1"].module is None and alexnet["output_1"].modules == ()


def test_the_demo_network_has_the_twelve_nodes_of_the_figure():
    prog = rl.capture(DemoNetwork(), torch.rand(5, 5))
    assert [label.replace("truediv", "div") for label in prog.layer_labels] == (
        "input_1_0 add_1_1 relu_1_2 linear_1_3 relu_2_4 randn_1_5 add_2_6 pow_1_7 div_1_8 buffer_1_9 mul_1_10 output_1_11"
    ).split()
    assert prog["linear_1_3"].parents == ("relu_1_2",) and prog["linear_1_3"].children == ("relu_2_4",)
    assert set(prog["pow_1_7"].children) == {prog[8].label} and set(prog[8].parents) == {"add_2_6", "pow_1_7"}
    assert prog["example_buffer"].label == "buffer_1_9"
    assert prog["relu_module"].label == "relu_1_2"


def test_a_submodule_is_found_where_the_figure_has_it():
    prog = rl.capture(NetworkOrganizationDemo(), torch.rand(5, 5))
    layer = prog["submodule1.submodule2"]
    assert (layer.label, len(prog), prog[-5].label, prog[16].label) == ("add_6_16", 21, "add_6_16", "add_6_16")
    assert layer.module == "submodule1.submodule2"
    assert set(layer.parents) == {"add_5_15", "tan_1_14"}  # the figure numbers breadth first, we in execution order


LABELS = {  # name -> layer, which pass, short, numbers
    "conv2d_3_7": ("conv2d_3_7", 1, "conv2d_3", (3, 7)),
    "linear_1_1:2": ("linear_1_1", 2, "linear_1:2", (1, 1)),
    "linear_1_1:2'": ("linear_1_1", 2, "linear_1:2'", (1, 1)),
    "hidden_l0_1_3:5": ("hidden_l0_1_3", 5, "hidden_l0_1:5", (1, 3)),
    "relu_1_2_before": ("relu_1_2_before", 1, "relu_1_2_before", None),
    "fc.weight": ("fc.weight", 1, "fc.weight", None),
    "features.6:2": ("features.6", 2, "features.6:2", None),
}


@pytest.mark.parametrize("name", LABELS)
def test_a_label_is_read_in_parts_and_printed_as_it_was(name):
    label = Label.of(name)
    assert str(label) == name and (label.layer, label.number, label.short, label.numbers) == LABELS[name]


@pytest.mark.parametrize("key", ["linear_1_1:2", "fc:2", 4, -7])
def test_a_pass_of_a_recurrent_layer_has_a_colon(key):
    prog = rl.capture(RecurrentNetwork(), torch.rand(5, 5))
    assert len(prog) == 11
    assert prog[key].label == "linear_1_1:2"


@pytest.mark.parametrize("name", ["linear_1_1", "linear_1"])
def test_a_recurrent_layer_without_its_pass_is_ambiguous(name):
    prog = rl.capture(RecurrentNetwork(), torch.rand(5, 5))
    with pytest.raises(rl.NoSuchLayer) as error:
        prog[name]
    assert str(error.value) == f"{name!r} runs 3 times: say which pass, 'linear_1_1:1' to 'linear_1_1:3'."
    assert name not in prog


def test_a_module_that_is_called_twice_is_ambiguous_without_its_call():
    prog = rl.capture(RecurrentNetwork(), torch.rand(5, 5))
    with pytest.raises(rl.NoSuchLayer, match=r"'fc' .* 3 times: say which .*'fc:1' to 'fc:3'"):
        prog["fc"]


def test_the_second_call_of_a_module_without_parameters_is_found_by_its_colon():
    model = nn.Sequential(nn.Linear(2, 2), act := nn.ReLU(), nn.Linear(2, 2), act)
    prog = rl.capture(model, torch.ones(1, 2))
    assert prog["1:1"].label == "relu_1_2" and prog["1:2"].label == "relu_2_4"


def test_two_modules_with_one_weight_share_one_entry_of_state():
    encode, decode = nn.Linear(3, 3), nn.Linear(3, 3)
    decode.weight = encode.weight
    prog = rl.capture(nn.Sequential(encode, decode), torch.ones(1, 3))
    assert set(prog.state) == {"0.weight", "0.bias", "1.bias"}
    assert prog["1.weight"].label == prog["0.weight"].label == "0.weight"
    assert prog["0.weight"].children == ("linear_1_1", "linear_2_2")


def test_parameters_and_buffers_are_found_by_their_addresses():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    prog = rl.capture(model, torch.ones(4, 2))
    assert torch.equal(prog["0.weight"].value, model[0].weight)
    assert prog["0.weight"].layer_type == "parameter"
    assert prog["1.running_mean"].layer_type == "buffer"
    assert not any("weight" in label for label in prog.layer_labels)  # a parameter is no layer


def test_orphans_are_set_aside_and_take_no_numbers():
    def model(x):
        torch.ones(3).sin()
        return x.sin()

    assert rl.capture(model, torch.ones(3)).layer_labels == ["input_1_0", "sin_1_1", "output_1_2"]


def test_several_outputs_are_numbered_in_the_order_of_the_output():
    prog = rl.capture(lambda x: {"b": x.cos(), "a": [x.sin(), 7]}, torch.ones(3))
    assert prog.layer_labels == ["input_1_0", "cos_1_1", "sin_1_2", "output_1_3", "output_2_4"]
    assert prog["output_2"].parents == ("sin_1_2",)


def test_a_name_that_is_not_found_is_answered_with_the_three_nearest_layers(alexnet):
    with pytest.raises(rl.NoSuchLayer) as error:
        alexnet["conv2d_3_8"]
    name, *offered = re.findall("'(.+?)'", str(error.value))
    assert str(error.value) == f"no layer is called {name!r}. The nearest names are {', '.join(map(repr, offered))}."
    assert name == "conv2d_3_8" and offered[0] == "conv2d_3_7"
    assert len({alexnet[other].label for other in offered}) == 3
    assert name not in alexnet


def test_a_module_that_is_not_found_is_answered_with_the_nearest_module(alexnet):
    with pytest.raises(
        rl.NoSuchLayer, match=r"no layer is called 'feature\.6'\. The nearest names are 'features\.6', "
    ):
        alexnet["feature.6"]


@pytest.mark.parametrize("place", [24, -25])
def test_a_place_that_does_not_exist_is_answered_with_those_that_do(alexnet, place):
    with pytest.raises(rl.NoSuchLayer) as error:
        alexnet[place]
    assert str(error.value) == f"no layer {place}: the program has 24 layers, 0 to 23."


def test_a_torch_function_written_in_python_is_opened_into_its_builtins():
    prog = rl.capture(lambda x: F.normalize(torch.relu_(x + 1)), torch.ones(2, 3))
    types = [layer.layer_type for layer in prog.layers]
    assert types == ["input", "add", "relu", "linalgvectornorm", "clampmin", "expandas", "div", "output"]


def test_a_parameter_is_one_whatever_it_is_called():
    prog = rl.capture(nn.MultiheadAttention(4, 2).eval(), *[torch.ones(2, 1, 4)] * 3)
    assert prog["in_proj_weight"].layer_type == "parameter"


def test_what_a_patched_pass_was_before_is_called_the_same_in_live_runs_and_in_edits():
    model, x, patch = RecurrentNetwork(), torch.rand(5, 5), {"linear_1_1:2": rl.Zero()}
    live, edited = rl.run(model, x, patch=patch).program, rl.capture(model, x).with_patch(patch)
    assert "linear_1_1_before:2" in live and "linear_1_1_before:2" in edited
