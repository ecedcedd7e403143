"""`fake=True`: the program of a forward that computes nothing."""

import copy
import re
import sys
import time
import weakref
from importlib.util import find_spec
from pathlib import Path

import oracle
import pytest
import torch
from oracle import assert_same
from torch import nn
from torch._subclasses import FakeTensorMode
from zoo import MODELS, is_refused_so, silence

import replaylens as rl

NO_VALUES = (
    "the program was captured with fake=True: it has structure and shapes but no values. Capture the model without it."
)


class Noted(nn.Module):
    """Draws, writes its buffers and its attributes, ties its weights."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.scale, self.seen, self.calls = torch.ones(4), [], 0

    def forward(self, x):
        self.calls += 1
        self.scale += 1
        x = torch.relu_(self.norm(self.first(x))) * self.scale
        self.seen.append(x)
        self.kept = nn.functional.dropout(x)
        return self.last(self.kept)[:, :2]


def facts(prog):
    return [(layer.label, layer.layer_type, layer.shape, layer.modules, layer.parents) for layer in prog]


def test_it_has_the_structure_and_the_shapes_of_a_real_one():
    torch.manual_seed(0)
    x = torch.ones(3, 4)
    fake, real = rl.capture(Noted(), x, fake=True), rl.capture(Noted(), x)
    assert facts(fake) == facts(real)
    assert fake.code == real.code
    assert str(fake) == re.sub(r"\n    Time: .*", "", str(real)).replace("15 (464 B) kept.", "0 (0 B) kept.")
    assert [layer.source for layer in fake] == [layer.source for layer in real]


def test_it_changes_nothing_of_the_model_and_the_inputs():
    torch.manual_seed(0)
    model, x = Noted(), torch.ones(3, 4)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    before = [oracle.belongings(model), oracle.surroundings(), oracle.generators()]
    rl.capture(model, x, fake=True)
    assert_same([oracle.belongings(model), oracle.surroundings(), oracle.generators()], before)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert (model.seen, model.calls, hasattr(model, "kept")) == ([], 0, False)
    assert type(model.first.weight) is nn.Parameter


def test_an_error_in_the_model_leaves_it_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    weight = model[0].weight
    with pytest.raises(RuntimeError) as error:
        rl.capture(model, torch.ones(2, 4), fake=True)
    note = "replaylens: it was run on fake tensors (fake=True), which not every operation supports."
    assert getattr(error.value, "__notes__", [note])[-1] == note  # Python 3.10 has no notes
    assert model[0].weight is weight


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.output,
        lambda p: p.inputs,
        lambda p: p.state,
        lambda p: p.state_changes,
        lambda p: p["linear_1"].value,
        lambda p: p.recover("linear_1"),
        lambda p: p.saving("all"),
        lambda p: p.replay(),
        lambda p: p(torch.ones(3, 4)),
        lambda p: p.replay(patch={"linear_1": rl.Zero()}),
        lambda p: p.replay_many({0: {"linear_1": rl.Zero()}}),
        lambda p: p.grads(of=torch.sum),
        lambda p: p.function(),
        lambda p: p.module(),
        lambda p: p.swap("relu", torch.tanh),
        lambda p: p.slice("linear_1"),
        lambda p: p.refresh(),
        lambda p: p.to(torch.float64),
    ],
)
def test_it_has_no_values_and_says_so(ask):
    prog = rl.capture(Noted(), torch.ones(3, 4), fake=True)
    with pytest.raises(rl.NoValues) as error:
        ask(prog)
    assert str(error.value) == NO_VALUES


def test_all_that_is_known_without_values_is_known_of_it():
    torch.manual_seed(0)
    model, x = Noted(), torch.ones(3, 4)
    model.first.bias.requires_grad_(False)
    model.unread = nn.Linear(2, 2)
    fake, real = rl.capture(model, x, fake=True), rl.capture(model, x)
    for name in ("total_params", "total_params_trainable", "parameter_reads", "flops", "macs", "uncounted"):
        assert getattr(fake, name) == getattr(real, name), name
    assert real.total_params_trainable == real.total_params - 4
    assert (fake.modules.rows, fake.params.rows) == (real.modules.rows, real.params.rows)
    assert [layer.steps_from_input for layer in fake] == [layer.steps_from_input for layer in real]
    assert [layer.creation_kwargs for layer in fake] == [layer.creation_kwargs for layer in real]
    assert fake.draw().source == real.draw().source
    assert "<details>" in fake._repr_html_() and copy.deepcopy(fake) is fake


def test_no_number_of_values_or_times_is_made_up():
    fake = rl.capture(Noted(), torch.ones(3, 4), fake=True)
    assert (fake.num_tensors_saved, fake.tensor_fsize_saved, fake.elapsed_time_function_calls) == (0, 0, 0)
    layer = fake["linear_1"]
    assert (layer.is_saved, layer.func_time_elapsed, layer.gradfunc_name, layer.func_rng_states) == (False,) + (
        None,
    ) * 3
    assert "(not kept)" in str(layer) and "Time:" not in str(layer)
    if find_spec("pandas"):
        frame = fake.to_pandas()
        assert len(frame) == len(fake) and not frame["is_saved"].any()


def test_nothing_is_saved_and_nothing_is_held():
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    refs = [weakref.ref(x), weakref.ref(model.weight)]
    prog = rl.capture(model, x, fake=True)
    assert prog.saved_labels == []
    assert not prog["linear_1"].is_saved
    del model, x
    assert [ref() for ref in refs] == [None, None]


def test_a_model_on_meta_may_be_given_inputs_of_anywhere():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10**6, 10**6), nn.ReLU())
        far = torch.ones(8, 10**6)
    for x in (torch.ones(1, 1).expand(8, 10**6), far):
        prog = rl.capture(model, x, fake=True)
        assert prog["relu_1"].shape == (8, 10**6)


def test_a_model_that_reads_contents_is_refused():
    def branching(x):
        return x * 2 if x.sum() > 0 else x

    def selecting(x):
        return x[x > 0]

    for model, what in ((branching, "aten._local_scalar_dense.default"), (selecting, "aten.nonzero.default")):
        with pytest.raises(rl.CaptureError) as error:
            rl.capture(model, torch.ones(3), fake=True)
        first, where, cure = str(error.value).splitlines()
        assert first == (
            f"the model reads the content of a tensor, or a shape depends on it ({what}), and fake tensors "
            "have no content."
        )
        assert "test_fake.py:" in where
        assert cure == "Capture it without fake=True."


def test_a_tensor_that_hangs_on_nothing_is_not_written():
    memory = torch.zeros(3)

    def remembering(x):
        memory.add_(x)
        return memory * 2

    with pytest.raises(rl.CaptureError) as error:
        rl.capture(remembering, torch.ones(3), fake=True)
    assert str(error.value).startswith(
        "`add` writes a tensor that is not a parameter, buffer or attribute of a module, and fake=True must not change it."
    )
    assert memory.tolist() == [0, 0, 0]


ODD = {  # where fake tensors are made, copied and differentiated otherwise than real ones
    "module_made_in_the_forward",
    "module_copied_in_the_forward",
    "noise_from_numpy_and_python",
    "forward_mode_dual",
    "vmap_with_a_write",
    "constants_from_everywhere",
    "write_through_a_parameter_alias",
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_it_is_as_a_real_one_or_refused_and_changes_nothing(name):
    with silence():
        try:
            for _ in range(2):  # a first run may fill caches
                case = MODELS[name]()
                oracle.reseed()
                real = rl.capture(case.model, *case.args, **case.kwargs)
        except Exception as refusal:
            if is_refused_so(name, refusal):
                pytest.skip(f"{refusal}")
            raise
        case = MODELS[name]()
        oracle.reseed()
        left = [oracle.belongings(case.model), oracle.copied_tree(case.args), oracle.generators()]
        try:
            fake = rl.capture(case.model, *case.args, fake=True, **case.kwargs)
        except Exception:  # torch's own refusals are of many kinds
            fake = None
        assert_same([oracle.belongings(case.model), case.args, oracle.generators()], left)
    if fake is not None and name not in ODD:
        assert [(layer.label, layer.shape) for layer in fake] == [(layer.label, layer.shape) for layer in real]


@pytest.mark.zoo
def test_seven_billion_parameters_take_seconds():
    sys.path.insert(0, str(Path(__file__).parent))
    import torchvision_ops  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008))
    assert sum(parameter.numel() for parameter in model.parameters()) > 6.7e9
    begin = time.perf_counter()
    prog = rl.capture(model, torch.zeros(1, 512, dtype=torch.long), fake=True, use_cache=False)
    assert time.perf_counter() - begin < 60  # 1.4 seconds on a quiet machine
    assert prog["lm_head"].shape == (1, 512, 32000)


def test_a_capture_under_a_fake_mode_of_the_users_has_the_structure():
    with FakeTensorMode():
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(2, 4)
        prog = rl.capture(model, x)
    assert prog.output.shape == (2, 4)
    assert [label.split("_")[0] for label in prog.layer_labels] == ["input", "linear", "dropout", "output"]
