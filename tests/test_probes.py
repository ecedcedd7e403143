"""probes(model, x): everything that can be watched, by one forward of which nothing stays."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from replaylens._watch.probes import Probe, Probes, probes
from replaylens._watch.targets import targets_of
from replaylens.errors import NoSuchLayer


class Looping(nn.Module):
    """A module that runs three times, one that never runs, a value that no gradient comes back to."""

    def __init__(self):
        super().__init__()
        self.embed, self.lin, self.unused = nn.Embedding(5, 3), nn.Linear(3, 4), nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(4)
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.forwards = 0

    def forward(self, tokens, *, scale=1.0):
        self.forwards += 1
        x = self.norm(self.lin(self.embed(tokens))) * scale
        for _ in range(3):
            x = self.block(x) + 1
        left, _ = x.split(2, -1)
        return {"out": torch.softmax(left, -1), "aside": x.detach().exp()}


TOKENS = torch.tensor([0, 1, 4])


@pytest.fixture
def found():
    torch.manual_seed(0)
    return probes(Looping(), TOKENS, scale=2.0)


def test_modules_come_by_address_and_operations_by_name(found):
    assert found.modules.names == ["", "embed", "lin", "unused", "norm", "block", "block.0", "block.1"]
    assert found.operations.names == [
        "embedding_1", "linear_1", "add_1", "batchnorm_1", "mul_1", "relu_1", "dropout_1", "add_2", "split_1",
        "softmax_1", "detach_1", "exp_1",
    ]  # fmt: skip


def facts(probe):
    return probe.op, probe.value, probe.calls, probe.has_grad, probe.module


def test_of_each_is_known_what_it_gives_how_often_and_whether_a_gradient_comes_back(found):
    by_name = {probe.name: facts(probe) for probe in found}
    assert by_name["lin"] == ("Linear", "float32[3, 4]", 1, True, None)
    assert by_name["block.0"] == ("ReLU", "float32[3, 4]", 3, True, None)
    assert by_name["unused"] == ("Linear", "", 0, None, None)
    assert by_name["relu_1"] == ("relu", "float32[3, 4]", 3, True, "block.0")
    assert by_name["split_1"] == ("split", "float32[3, 2], float32[3, 2]", 1, True, "")
    assert by_name["exp_1"] == ("exp", "float32[3, 4]", 1, False, "") and not by_name["detach_1"][3]
    assert by_name[""] == ("Looping", "float32[3, 2], float32[3, 4]", 1, True, None)


def test_one_forward_is_run_and_nothing_of_it_stays():
    model = Looping()
    x = TOKENS.clone()
    (model(x)["out"].sum()).backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    hooks, calls, modes = [], [], (torch.is_grad_enabled(), model.training)
    model.lin.register_forward_hook(lambda *_: calls.append(1))
    before, generator = dict(vars(model)), torch.get_rng_state()
    probes(model, x)
    assert calls == [1] and torch.equal(generator, torch.get_rng_state()) and not hooks
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.norm.num_batches_tracked == 1 and vars(model) == before and model.forwards == 1
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert mine.keys() == grads.keys() and all(torch.equal(mine[name], grads[name]) for name in grads)
    assert modes == (torch.is_grad_enabled(), model.training) and torch.equal(x, TOKENS)


def test_gradients_are_those_of_a_training_also_where_none_are_taken():
    with torch.no_grad():
        assert probes(Looping(), TOKENS).grads.names == probes(Looping(), TOKENS).grads.names != []
    model = Looping().requires_grad_(False)
    assert probes(model, TOKENS).grads.names == []


def test_it_is_filtered_by_glob_by_kind_and_by_a_function(found):
    assert found["block.*"].names == ["block.0", "block.1"] and found["block.**"].names == ["block.0", "block.1"]
    assert found["softmax_1"].names == ["softmax_1"] and found["*_1"].modules.names == []
    assert found.where(lambda probe: probe.op == "ReLU").names == ["block.0"]
    assert found.modules.grads.names == ["", "embed", "lin", "norm", "block", "block.0", "block.1"]
    assert found[1:3].names == ["embed", "lin"] and found[0].kind == "module" and "lin" in found
    with pytest.raises(NoSuchLayer, match=r"nothing among the 20 names matches 'blocks\.\*'"):
        found["blocks.*"]


def test_it_prints_as_a_table_and_shows_as_one(found):
    lines = str(found["block.**"]).splitlines()
    assert lines == [
        "2 modules that can be watched in Looping.",
        "name     kind    operation  value          calls  gradient",
        "block.0  module  ReLU       float32[3, 4]  3      yes",
        "block.1  module  Dropout    float32[3, 4]  3      yes",
    ]
    assert repr(found) == str(found) and "<table>" in found._repr_html_() and len(found.table) == 20
    assert str(found).startswith("8 modules and 12 operations that can be watched in Looping.")


def test_it_is_what_layers_takes(found):
    targets = targets_of(Looping(), found["block.**"])
    assert [one.address for one in targets.modules] == ["block.0", "block.1"]
    targets = targets_of(Looping(), found)
    assert [one.address for one in targets.modules] == found.modules.names
    assert list(targets.nodes) == found.operations.names


def test_it_is_saved_as_text_and_read_again(found, tmp_path):
    path = tmp_path / "probes.txt"
    found.save(path)
    assert Probes.read(path).names == found.names
    lines = path.read_text().splitlines()
    assert lines[0] == '# What can be watched in Looping. `#` begins a comment; "" is the model itself.'
    assert "block.0      # ReLU, float32[3, 4]" in lines and "exp_1        # exp, float32[3, 4], no gradient" in lines


def test_a_list_may_be_edited_by_hand(tmp_path):
    path = tmp_path / "probes.txt"
    path.write_text('\n# mine\n  blocks.*   # all of them\nrelu_1\n""\nrelu_1\n')
    assert Probes.read(path).names == ["blocks.*", "relu_1", ""]
    assert str(Probes.read(path)).startswith("3 names that can be watched.")


def test_any_name_of_a_module_comes_back(tmp_path):
    names = ['a"b', "#first", "with # inside", " spaces ", "line\nbreak", "ü", ""]
    Probes(tuple(map(Probe, names))).save(tmp_path / "odd.txt")
    assert Probes.read(tmp_path / "odd.txt").names == names


class Threaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x):
        made = []
        thread = threading.Thread(target=lambda: made.append(self.lin(x)))
        thread.start()
        thread.join()
        return made[0] + 1


def test_a_model_whose_operations_cannot_be_seen_has_its_modules_and_the_reason():
    found = probes(Threaded(), torch.ones(1, 2))
    assert found.names == ["", "lin"] and "no recorded call in this thread made it" in found.missing
    assert "No operations: a tensor float32[1, 2]" in str(found)


def test_what_the_model_raises_is_the_models_own():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        probes(nn.Linear(2, 2), torch.ones(1, 3))
