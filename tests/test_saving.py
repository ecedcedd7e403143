"""`save=`: which values a program keeps, and that a program that keeps little can do all that one that keeps all can."""

import copy
import gc
import random
import weakref

import oracle
import pytest
import torch
import torch.nn.functional as F
from internals import PATIENCE, format_bytes, memory_saving
from oracle import assert_same
from torch import nn
from zoo import MODELS, silence

import replaylens as rl


class Small(nn.Module):
    """AlexNet's shape in small: features, a flattening, a classifier with dropout."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 1, 8, 8)


def in_training(model, x, save):
    """A capture of a twin in training mode, which draws and writes statistics."""
    torch.manual_seed(3)
    return rl.capture(copy.deepcopy(model).train(), x, save=save)


# ---- which values ----------------------------------------------------------------------------------------------------


CONVS, RELUS, NORM = ["conv2d_1_1", "conv2d_2_3"], ["relu_1_2", "relu_2_10"], "batchnorm_1_6"
DROPOUT, LINEARS = "dropout_1_8", ["linear_1_9", "linear_2_11"]


@pytest.mark.parametrize(
    ("save", "labels"),
    [
        ("none", []),
        (None, []),
        ([], []),
        ("conv2d_2_3", ["conv2d_2_3"]),
        ("conv2d_2", ["conv2d_2_3"]),
        ("conv", CONVS),
        ("relu", RELUS),
        ("features", [NORM]),
        ("features.1", ["relu_1_2"]),
        ("feat", ["conv2d_1_1", "relu_1_2", "conv2d_2_3", NORM]),
        ("linear_?_*", LINEARS),
        (9, ["linear_1_9"]),
        (-3, ["relu_2_10"]),
        (lambda layer: layer.shape == (2, 8), ["linear_1_9", "relu_2_10"]),
        (rl.where(lambda layer: layer.children == ("dropout_1_8",)), ["flatten_1_7"]),
        (["conv2d_2_3", "features", -5, "linear"], ["conv2d_2_3", NORM, DROPOUT, *LINEARS]),
        (["none", ["relu"]], RELUS),
    ],
)
def test_save_takes_labels_addresses_ordinals_types_parts_of_names_and_functions_of_a_layer(model, x, save, labels):
    prog = rl.capture(model, x, save=save)
    there = ["input_1_0", "buffer_1_4", "buffer_2_5", "linear_2_11", "output_1_12"]  # what has to be
    assert prog.saved_labels == labels
    assert [label for label in prog.layer_labels if prog[label].is_saved] == sorted(
        {*there, *labels}, key=prog.layer_labels.index
    )
    whole = rl.capture(model, x)
    assert prog.code == whole.code
    for label in labels:
        assert_same(prog[label].value, whole[label].value, label)


@pytest.mark.parametrize("save", ["all", ["conv", "all"]])
def test_all_is_everything(model, x, save):
    prog = rl.capture(model, x, save=save)
    assert prog.saved_labels == prog.layer_labels == rl.capture(model, x).saved_labels
    assert prog.saving("all") is prog


def test_a_value_that_was_not_saved_says_how_to_get_it(model, x):
    prog = rl.capture(model, x, save="none")
    with pytest.raises(rl.NotSaved) as error:
        _ = prog["conv2d_2"].value
    assert str(error.value) == "the value of conv2d_2_3 was not saved. `prog.recover('conv2d_2_3')` computes it again."


def test_what_is_kept_is_counted_as_it_is_and_what_is_not_is_still_known(model, x):
    prog, whole = rl.capture(model, x, save="conv2d_2"), rl.capture(model, x)
    kept = [layer.value for layer in prog if layer.is_saved]
    assert (prog.num_tensors_saved, prog.tensor_fsize_saved) == (len(kept), sum(value.nbytes for value in kept))
    assert prog.num_tensors_total == whole.num_tensors_total
    assert f"{len(kept)} ({format_bytes(prog.tensor_fsize_saved)}) kept, 1 layer of it by `save=`.\n" in str(prog)
    for name in ("gradfunc_name", "creation_kwargs", "tensor_shape", "tensor_fsize", "flops", "steps_from_input"):
        assert [getattr(layer, name) for layer in prog] == [getattr(layer, name) for layer in whole], name
    assert prog["relu_1"].gradfunc_name == "ReluBackward0" and "(not kept)" in str(prog["relu_1"])
    with pytest.raises(rl.NotSaved) as error:
        _ = prog["relu_1"].creation_args
    assert str(error.value).endswith("`prog.recover('conv2d_1_1')` computes it again.")


def test_a_name_that_means_nothing_is_an_error(model, x):
    with pytest.raises(rl.NoSuchLayer) as error:
        rl.capture(model, x, save=["relu", "conv2d_7"])
    assert str(error.value).startswith("no layer is called 'conv2d_7'. The nearest names are 'conv2d_2'")
    with pytest.raises(TypeError) as error:
        rl.capture(model, x, save=3.5)
    assert str(error.value) == (
        "save= takes 'all', 'none', names of layers, types, parts of names, ordinals, functions of a layer, or a list "
        "of these, not 3.5."
    )


def test_passes_of_a_layer_and_orphans_do_not_lead_the_names_astray():
    shared, other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(x):
        torch.zeros(2).exp()  # leads nowhere: it counts for no name
        for _ in range(3):
            x = shared(x).tanh()
        return other(x).tanh()

    prog = rl.capture(forward, torch.ones(1, 3), save=["linear_1:2", "linear_2", "tanh_2"])
    whole = rl.capture(forward, torch.ones(1, 3))
    for label in prog.saved_labels:
        assert_same(prog[label].value, whole[label].value, label)
    assert prog.saved_labels == [whole[name].label for name in ("linear_1:2", "linear_2", "tanh_2")]


# ---- the model is run once, and memory follows -----------------------------------------------------------------------


class Counting(nn.Module):
    """Fifty steps. Notes how often it ran, and how many of its earlier values were alive at each step."""

    def __init__(self, step):
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step
        self.calls, self.alive = 0, []

    def forward(self, x):
        self.calls += 1
        refs = []
        for _ in range(50):
            x = self.step(self.linear(x))
            self.alive.append(sum(ref() is not None for ref in refs))
            refs.append(weakref.ref(x))
        return x.sum()


STEPS = {
    "out of place": torch.tanh,
    "in place": torch.relu_,
    "through a view": lambda x: x.view(2, 8).mul(0.9).view(4, 4),
    "through a kernel's own view": lambda x: F.linear(x.view(2, 2, 4), torch.eye(4)).reshape(4, 4),
    "opened": lambda x: F.normalize(x),
    "written": lambda x: x.index_fill(0, torch.tensor([1]), 0.5).add_(1),
    "dropped in evaluation": lambda x: F.dropout(x.exp(), training=False) / 9,
    "concatenated": lambda x: torch.cat([x[:, :2], x[:, 2:] * 2], 1),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_not_wanted_is_let_go_of_while_the_model_runs(step, mode):
    with mode():
        model = Counting(STEPS[step])
        rl.capture(model, torch.randn(4, 4), save="none")
        assert model.calls == 1
        assert max(model.alive[-20:]) <= 4
        model = Counting(STEPS[step])
        rl.capture(model, torch.randn(4, 4), save="all")
        assert max(model.alive) == 49


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_small_values_may_stay_until_they_fill_four_megabytes(mode, monkeypatch):
    monkeypatch.setattr(memory_saving, "PATIENCE", PATIENCE)  # conftest.py has values dropped at once
    with mode():
        small, large = Counting(torch.tanh), Counting(torch.tanh)
        rl.capture(small, torch.randn(4, 4), save="none")
        rl.capture(large, torch.randn(2**18, 4), save="none")  # of four megabytes each
    assert max(small.alive) == 49
    assert max(large.alive[-20:]) <= 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_at_the_end_no_four_megabytes_are_left(mode, monkeypatch):
    monkeypatch.setattr(memory_saving, "PATIENCE", PATIENCE)
    with mode():
        for size in (2**12, 2**16, 2**20):  # 48 of them fill .8, 12, 200 megabytes
            made = []

            def model(x, made=made):
                for _ in range(48):
                    x = x.tanh()
                    made.append(weakref.ref(x))
                return x.sum()

            prog = rl.capture(model, torch.randn(size), save="none")
            assert sum(one() is not None for one in made) * size * 4 < PATIENCE
            assert prog.output.shape == ()


def test_of_what_is_wanted_no_more_is_kept_while_the_model_runs():
    with torch.no_grad():
        model = Counting(torch.tanh)
        prog = rl.capture(model, torch.randn(4, 4), save=["tanh_1:3", "tanh_1:7"])
    assert model.calls == 1
    assert max(model.alive) <= 4
    assert len(prog.saved_labels) == 2


def test_a_program_that_saved_nothing_holds_no_value_and_no_history():
    refs = []

    def forward(x):
        for _ in range(5):
            x = torch.tanh(x * 2)
            refs.append(weakref.ref(x))
        return x.sum()

    x = torch.randn(3, requires_grad=True)
    gc.collect()
    gc.disable()  # nothing may hang in a cycle
    try:
        prog = rl.capture(forward, x, save="none")
        assert [ref() for ref in refs] == [None] * 5
    finally:
        gc.enable()
    assert prog.output.grad_fn is None
    prog.replay(grad=True).output.backward()
    assert x.grad is not None


class Result:
    """What a model may return: an object of a class of its own."""

    def __init__(self, value, hidden):
        self.value, self.hidden = value, hidden


def test_objects_that_the_model_returns_hold_no_history_either():
    refs = []

    class Inner(nn.Module):
        def forward(self, x):
            y = torch.tanh(x * 2)
            refs.append(weakref.ref(y))
            return Result(y.exp(), [y])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            inner = self.inner(x)
            return Result(inner.value * 2, [inner.value.sum()])

    prog = rl.capture(Outer(), torch.randn(3, requires_grad=True), save="none")
    assert [ref() for ref in refs] == [None]
    assert type(prog.output) is Result
    assert prog.output.value.grad_fn is None
    assert_same(prog.replay().output, prog.output)


def test_a_small_part_of_a_large_tensor_does_not_keep_all_of_it():
    prog = rl.capture(lambda x: ((x * 2)[0, :5] + 1).sum(), torch.ones(1000, 50), save="getitem")
    (label,) = prog.saved_labels
    assert prog[label].value.untyped_storage().nbytes() == 5 * 4
    assert prog[label].value.tolist() == [2.0] * 5


# ---- what was not saved is computed again ----------------------------------------------------------------------------


def test_recover_gives_the_value_of_a_layer_and_of_several_by_their_labels(model, x):
    prog, whole = (in_training(model, x, save) for save in ("none", "all"))
    assert_same(prog.recover("conv2d_2"), whole["conv2d_2"].value)
    assert_same(prog.recover("features.1"), whole["features.1"].value)
    found = prog.recover("dropout_1", "linear")  # the very draws
    assert list(found) == [layer.label for layer in whole if layer.layer_type in ("dropout", "linear")]
    for label, value in found.items():
        assert_same(value, whole[label].value, label)
    assert list(prog.recover("all")) == prog.layer_labels
    assert prog.saved_labels == []


def test_saving_gives_the_same_program_with_other_values(model, x):
    prog = rl.capture(model, x, save="none")
    more = prog.saving(["conv"])
    assert (prog.saved_labels, more.saved_labels) == ([], CONVS)
    assert_same(more["conv2d_1"].value, rl.capture(model, x)["conv2d_1"].value)
    assert prog.saving("all").saved_labels == prog.layer_labels
    assert rl.capture(model, x).saving("relu").saved_labels == RELUS


def test_recovering_from_parameters_that_have_changed_is_refused(model, x):
    prog = rl.capture(model, x, save="none")
    with torch.no_grad():
        model.features[0].weight.mul_(2)
    with pytest.raises(rl.StaleValue):
        prog.recover("conv2d_2")
    whole = rl.capture(model, x)
    assert_same(prog.refresh().recover("conv2d_2"), whole["conv2d_2"].value)
    assert prog.refresh().saved_labels == []


# ---- every feature ---------------------------------------------------------------------------------------------------


def total(output):
    return output.pow(2).sum()


def shift(value):
    return value * 0.5 + 0.1


WAYS = {
    "replay": lambda p: p.replay().output,
    "from a layer": lambda p: p.replay(from_="conv2d_2").output,
    "a patch": lambda p: p.replay(patch={"relu_1": shift}).output,
    "a patch of a part": lambda p: p.replay(patch={"conv2d_2": rl.Zero("b [c] h w", c=2)}).output,
    "from another program": lambda p: p.replay(patch={"relu_1": p["conv2d_1"]}).output,
    "a run's values": lambda p: p.replay(patch={"relu_1": shift}, keep="all")["linear_1"],
    "a run's values that it did not keep": lambda p: p.replay(patch={"linear_1": shift})["conv2d_2"],
    "stopping early": lambda p: p.replay(to="conv2d_2")["conv2d_2"],
    "gradients": lambda p: dict(p.grads(of=total)),
    "gradients from a layer": lambda p: dict(p.grads(of=total, from_="conv2d_2", at=["linear_1"])),
    "a function": lambda p: p.function(["conv2d_2"], ["linear_2"])(p.recover("conv2d_2") * 2),
    "its gradient": lambda p: torch.func.grad(lambda v: p.function(["relu_1"])(v).sum())(p.recover("relu_1")),
    "many": lambda p: (
        p.replay_many({n: {"conv2d_2": rl.Zero("b [c] h w", c=n)} for n in range(3)}, metric=total).values
    ),
    "with a patch": lambda p: p.with_patch({"relu_1": rl.Scale(0.5)}).replay().output,
    "with a patch, recovered": lambda p: p.with_patch({"relu_1": rl.Scale(0.5)}).recover("linear_1"),
    "a swap": lambda p: p.swap("relu_2", F.gelu).recover("all"),
    "an insertion": lambda p: p.insert_after("conv2d_2", shift).output,
    "a slice": lambda p: p.slice("relu_1", "linear_1").replay().output,
    "a slice of a slice": lambda p: p.slice("relu_1", "linear_2").slice("conv2d_2").recover("linear_1"),
    "a module": lambda p: p.module("conv2d_2")(p.recover("conv2d_2")),
    "other state": lambda p: p.set_state("classifier.1.bias", shift).replay().output,
    "refreshed": lambda p: p.refresh().recover("linear_1"),
    "moved": lambda p: p.to(torch.float64).recover("linear_1"),
    "an edge": lambda p: p.replay(patch={rl.Edge("relu_1", "conv2d_2"): shift}).output,
    "state changes": lambda p: p.state_changes,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("save", ["none", ["conv2d_1", "linear"]])
def test_what_works_on_a_program_works_on_one_that_saved_little(model, x, way, save):
    little, whole = (in_training(model, x, how) for how in (save, "all"))
    torch.manual_seed(5)
    wanted = WAYS[way](whole)
    torch.manual_seed(5)
    assert_same(WAYS[way](little), wanted)


def test_gradients_from_a_layer_that_was_not_saved_end_there(model, x):
    for save in ("none", "all"):
        prog = rl.capture(model, x, save=save)
        model.zero_grad()
        prog.replay(from_="linear_1", grad=True).output.sum().backward()
        assert model.features[0].weight.grad is None
        assert model.classifier[3].weight.grad is not None


def test_an_edit_of_a_program_that_saved_little_saves_little(model, x):
    prog = rl.capture(model, x, save=["linear"])
    for edited in (prog.with_patch({"relu_1": rl.Zero()}), prog.swap("relu_2", F.gelu), prog.refresh()):
        assert edited.saved_labels == LINEARS
        assert not edited["conv2d_1"].is_saved


def test_attention_opens_in_a_program_that_saved_nothing():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    little, whole = (in_training(model, torch.ones(2, 3, 8), save) for save in ("none", "all"))
    opened = whole.expand("scaleddotproductattention")
    assert_same(little.expand("scaleddotproductattention").recover("all"), opened.recover("all"))
    assert "pattern_1" in opened


def test_a_sweep_is_the_same(model, x):
    found = [
        rl.sweep(rl.capture(model, x, save=save), "conv2d", part="b [c] h w", patch=rl.Zero(), metric=total).values
        for save in ("none", "all")
    ]
    assert_same(*found)


def test_attributions_are_the_same(model, x):
    found = []
    for save in ("none", "all"):
        clean, corrupt = (rl.capture(model, inputs, save=save) for inputs in (x, x * 0.5 + 0.2))
        found.append(rl.attribution(clean, corrupt, total))
    assert_same(dict(found[0].scores), dict(found[1].scores))


DELICATE = ("write", "place", "view", "draw", "dropout", "buffer", "state", "alias", "grad", "norm", "vmap", "numpy")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if any(w in n for w in DELICATE) else pytest.mark.zoo) for n in MODELS]
)
def test_a_program_that_saved_nothing_is_the_same_program(name):
    found = []
    for save in ("all", "all", "none"):  # a first run may fill caches, and have torch compile a script
        with silence():
            case = MODELS[name]()
            oracle.reseed()
            try:
                prog = rl.capture(case.model, *case.args, save=save, **case.kwargs)
            except Exception as refusal:  # whatever it is, it does not depend on what is saved
                found.append((type(refusal),))
            else:
                found.append((prog, oracle.belongings(case.model), oracle.generators(), case.args))
    (whole, *left), (little, *left_too) = found[1:]
    if isinstance(whole, type):
        assert little is whole
        return
    assert little.layer_labels == whole.layer_labels
    assert_same(left_too, left, "what the capture left")
    assert_same(little.output, whole.output)
    with silence():
        values = little.recover("all")
    for layer in whole.layers:
        if not layer.layer_type.startswith(oracle.UNINITIALISED):
            assert_same(values[layer.label], layer.value, layer.label)


def a_third(layer):
    return random.Random(layer.label).random() < 0.3


@pytest.mark.zoo
@pytest.mark.parametrize("save", ["none", a_third], ids=["none", "a third"])
@pytest.mark.parametrize("name", MODELS)
def test_every_law_holds_for_a_program_that_saved_little(name, save):
    broken, _ = oracle.broken_laws(MODELS[name], tuple([oracle.saving(save, law) for law in oracle.LAWS]))
    assert not broken


class WritesAPart(nn.Module):
    """Torch refuses to show the `grad_fn` of the part: it was made with gradients, and written without them."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(2))

    def forward(self, x):
        part = self.p.split(1)[0]
        with torch.no_grad():
            part.mul_(2)
        return x + self.p


def test_a_model_that_writes_a_part_of_a_parameter_saves_nothing_too():
    wanted = WritesAPart()(torch.ones(2))
    assert torch.equal(rl.capture(WritesAPart(), torch.ones(2), save="none").output, wanted)


@pytest.mark.parametrize("save", ["all", "none", ["1"], ["relu_1"]], ids=str)
def test_an_edited_program_is_as_old_as_its_values(save):
    """A value that an edit runs again has a write counter of its own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Tanh(), nn.Linear(3, 3))
    edited = rl.capture(model, torch.ones(1, 3), save=save).with_patch({"3": lambda value: value * 2})
    handle = model[2].register_forward_hook(lambda module, args, output: output * 2)
    wanted = model(torch.ones(1, 3)) * 2
    handle.remove()
    assert torch.equal(edited.replay(patch={"2": lambda value: value * 2}).output, wanted)
