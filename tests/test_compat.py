"""A TorchLens script runs after one changed import: `import replaylens.compat as tl`."""

import random
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import replaylens as rl
import replaylens.compat as tl


class SimpleRecurrent(nn.Module):
    """Of the README, as is the AlexNet below."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(in_features=5, out_features=5)

    def forward(self, x):
        for _ in range(4):
            x = self.fc(x)
            x = x + 1
            x = x * 2
        return x


@pytest.fixture(scope="module")
def alexnet():
    model = runpy.run_path(str(Path(__file__).parents[1] / "bench/models.py"))["AlexNet"](classes=10).eval()
    return model, torch.rand(1, 3, 224, 224)


def test_a_pass_of_a_recurrent_layer():
    model, x = SimpleRecurrent(), torch.rand(6, 5)
    history = tl.log_forward_pass(model, x, layers_to_save="all", vis_opt="none")
    assert torch.equal(history["linear_1_1:2"].tensor_contents, model.fc((model.fc(x) + 1) * 2))
    assert isinstance(history, rl.Program)


def test_the_layers_of_the_readme_are_listed_and_counted_alone(alexnet):
    history = tl.log_forward_pass(*alexnet, layers_to_save=["conv2d_3_7", "features", -5, "linear"])
    assert history.layer_labels == [
        "conv2d_3_7",
        "maxpool2d_3_13",
        "linear_1_17",
        "dropout_2_19",
        "linear_2_20",
        "linear_3_22",
    ]
    assert [layer.label for layer in history] == history.layer_labels and len(history) == 6
    assert history[1].label == "maxpool2d_3_13" and history[-1].label == "linear_3_22"
    assert history["features.6"].label == "conv2d_3_7"
    with pytest.raises(IndexError, match="no layer 6: 6 layers were saved"):
        history[6]


def test_metadata_lists_all_layers(alexnet):
    history = tl.get_model_metadata(*alexnet)
    assert len(history.layer_labels) == 24
    assert history["conv2d_3_7"].num_params_total == 663936
    assert history["conv2d_3_7"].lookup_keys[:2] == (-17, 7)


def test_several_inputs_come_as_a_list_and_by_name():
    def model(x, y, scale):
        return x + y * scale

    history = tl.log_forward_pass(model, [torch.ones(2), torch.ones(2)], {"scale": 3})
    assert history.output.tolist() == [4.0, 4.0]


def test_a_seed_gives_the_same_draws_and_leaves_the_generators_alone():
    torch.manual_seed(0)
    before, python = torch.get_rng_state(), random.getstate()
    outputs = [tl.log_forward_pass(lambda x: x + torch.rand(3), torch.ones(3), random_seed=5).output for _ in range(2)]
    assert torch.equal(*outputs)
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == python
    assert tl.log_forward_pass(nn.ReLU(), torch.ones(3), random_seed=5).random_seed_used == 5


def test_what_is_no_way_to_draw_is_refused():
    with pytest.raises(ValueError, match=r"^vis_opt must be 'none', 'unrolled' or 'rolled', not 'flat'\.$"):
        tl.log_forward_pass(nn.ReLU(), torch.ones(3), vis_opt="flat")


@pytest.mark.skipif(not hasattr(rl.Program, "check"), reason="comes with Program.check")
def test_activations_are_validated():
    assert tl.validate_model_activations(SimpleRecurrent(), torch.rand(6, 5)) is True


@pytest.mark.skipif(not hasattr(rl.Program, "draw"), reason="comes with Program.draw")
def test_a_graph_is_drawn(tmp_path):
    assert tl.show_model_graph(SimpleRecurrent(), torch.rand(6, 5), vis_outpath=str(tmp_path / "graph")) is None
