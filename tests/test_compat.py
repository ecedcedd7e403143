"""A TorchLens script runs after one changed import: `import replaylens.compat as tl`."""

import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import replaylens as rl
import replaylens.compat as tl

OFF = "Disable{}Function".format("Torch")  # as no name in the code says, so that the capture does not see it coming


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


NAMED = ["conv2d_3_7", "features", -5, "linear"]
OF_THE_README = ["conv2d_3_7", "maxpool2d_3_13", "linear_1_17", "dropout_2_19", "linear_2_20", "linear_3_22"]


def test_a_pass_of_a_recurrent_layer():
    model, x = SimpleRecurrent(), torch.rand(6, 5)
    history = tl.log_forward_pass(model, x, layers_to_save="all", vis_opt="none")
    assert torch.equal(history["linear_1_1:2"].tensor_contents, model.fc((model.fc(x) + 1) * 2))
    assert isinstance(history, rl.Program)


def test_the_layers_of_the_readme_are_listed_and_counted_alone(alexnet):
    history = tl.log_forward_pass(*alexnet, layers_to_save=NAMED)
    assert history.layer_labels == OF_THE_README
    assert [layer.label for layer in history] == history.layer_labels and len(history) == 6
    assert history[1].label == "maxpool2d_3_13" and history[-1].label == "linear_3_22"
    assert history["features.6"].label == "conv2d_3_7"
    with pytest.raises(IndexError, match="no layer 6: 6 layers were saved"):
        history[6]


def test_what_was_not_asked_for_is_not_kept_and_the_model_runs_once(alexnet):
    model, x = alexnet
    runs = []
    handle = model.register_forward_pre_hook(lambda *_: runs.append(1))
    history = tl.log_forward_pass(model, x, layers_to_save=NAMED)
    handle.remove()
    assert len(runs) == 1
    assert history["linear_1"].tensor_contents.shape == (1, 4096)
    with pytest.raises(rl.NotSaved) as error:
        history["relu_1"].tensor_contents
    assert str(error.value) == "the value of relu_1_2 was not saved. `prog.recover('relu_1_2')` computes it again."
    assert history.recover("relu_1").shape == (1, 64, 55, 55)


@pytest.mark.parametrize("nothing", [None, "none", []])
def test_metadata_lists_all_layers_and_keeps_none(alexnet, nothing):
    for history in (tl.get_model_metadata(*alexnet), tl.log_forward_pass(*alexnet, layers_to_save=nothing)):
        assert len(history.layer_labels) == len(history) == 24 and history.saved_labels == []
        assert history["conv2d_3_7"].num_params_total == 663936
        assert history["conv2d_3_7"].lookup_keys[:2] == (-17, 7) and history[-17].label == "conv2d_3_7"
        assert [layer.label for layer in history if layer.is_saved] == ["input_1_0", "linear_3_22", "output_1_23"]


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


def test_a_seed_is_for_numpy_and_python_too():
    def model(x):
        return x * float(np.random.rand()) * random.random()

    before = np.random.get_state()[1].copy()
    one, other = [tl.log_forward_pass(model, torch.ones(3), random_seed=5).output for _ in range(2)]
    assert torch.equal(one, other) and (np.random.get_state()[1] == before).all()


def test_what_is_no_way_to_draw_is_refused_before_the_model_runs():
    def model(x):
        raise AssertionError

    for draw in (tl.log_forward_pass, tl.show_model_graph):
        with pytest.raises(ValueError, match=r"^vis_opt must be one of 'none', 'unrolled', 'rolled', not 'flat'\.$"):
            draw(model, torch.ones(3), vis_opt="flat")


def test_activations_are_validated():
    assert tl.validate_model_activations(nn.Sequential(SimpleRecurrent(), nn.Dropout()), torch.rand(6, 5)) is True
    assert tl.validate_model_activations(lambda x, scale: x * scale, [torch.rand(3)], {"scale": 2}, random_seed=1)


def test_a_model_that_computes_behind_torchs_back_is_not_validated():
    def model(x):
        with getattr(torch._C, OFF)():
            scale = x.sum().item()
        return x * scale

    assert tl.validate_model_activations(model, torch.rand(3)) is False


def test_a_graph_is_drawn_and_given_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = tl.show_model_graph(SimpleRecurrent(), torch.rand(6, 5))
    assert (tmp_path / "graph.gv.pdf").read_bytes().startswith(b"%PDF") and "linear_1_1:4" in made.source
    assert tl.show_model_graph(SimpleRecurrent(), torch.rand(6, 5), vis_opt="none") is None


def test_a_forward_pass_is_drawn_where_and_as_it_is_asked(tmp_path):
    pictures = {}
    for opt in ("rolled", "unrolled", "none"):
        path = tmp_path / opt
        tl.log_forward_pass(
            SimpleRecurrent(),
            torch.rand(6, 5),
            layers_to_save="linear",
            vis_opt=opt,
            vis_outpath=path,
            vis_fileformat="svg",
            vis_direction="leftright",
        )
        pictures[opt] = (tmp_path / f"{opt}.svg").read_text() if opt != "none" else ""
    assert "linear_1_1:4" in pictures["unrolled"] and "linear_1_1:4" not in pictures["rolled"]
    assert not (tmp_path / "none.svg").exists()


def test_the_papers_names_are_there_too():
    history = tl.get_model_activations(SimpleRecurrent(), torch.rand(6, 5))
    assert history["linear_1:4"].tensor_contents.shape == (6, 5)
    assert tl.get_model_structure(SimpleRecurrent(), torch.rand(6, 5)).saved_labels == []
    assert tl.validate_saved_activations(SimpleRecurrent(), torch.rand(6, 5))


# ---- the README, snippet by snippet --------------------------------------------------------------------------------


@pytest.mark.zoo
def test_the_readme_runs_on_its_own_model(tmp_path, monkeypatch):
    import torchvision_ops  # noqa: F401

    # isort: split
    import torchvision

    monkeypatch.chdir(tmp_path)
    alexnet = torchvision.models.alexnet()
    x = torch.rand(1, 3, 224, 224)
    model_history = tl.log_forward_pass(alexnet, x, layers_to_save="all", vis_opt="unrolled")
    assert Path("graph.gv.pdf").exists()
    text = str(model_history)
    for said in ("24 tensors (4.8 MB)", "purely feedforward, without branching; 23 modules", "16 parameter operations"):
        assert said in text
    assert "61,100,840 numbers" in text and text.splitlines()[-1].split() == ["23:", "output_1_23"]
    assert model_history.layer_labels[14:18] == [
        "adaptiveavgpool2d_1_14",
        "flatten_1_15",
        "dropout_1_16",
        "linear_1_17",
    ]
    for key in ("conv2d_3_7", "conv2d_3", "conv2d_3_7:1", "features.6", 7, -17):
        assert model_history[key].label == "conv2d_3_7"
    assert model_history["conv2d_3_7"].tensor_contents.shape == (1, 384, 13, 13)
    model_history = tl.log_forward_pass(alexnet, x, vis_opt="unrolled", layers_to_save=NAMED)
    print(model_history.layer_labels)
    assert model_history.layer_labels == OF_THE_README
    entry = model_history["conv2d_3"].func_call_stack[0]
    assert Path(entry["call_fname"]).parts[-3:] == ("torchvision", "models", "alexnet.py")
    assert entry["function"] == "forward" and entry["code_context"][9] == "        x = self.features(x)\n"
    assert entry["call_linenum"] == 48
    assert tl.get_model_metadata(alexnet, x).total_params == 61100840
    assert tl.validate_model_activations(alexnet, x)
