"""Extraction: the numbers of hooks on the plain model, whatever the data, the layers, the process; and files that are
whole, whenever it ends.
"""

import errno
import json
import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos_executor import World
from torch import nn
from torch.nn import functional as F

import replaylens as rl
from replaylens.errors import BadFile, BadPart, BadSource, InputMismatch, NoSuchLayer, PlanDiffers


@pytest.fixture(autouse=True)
def disk_of_memory(monkeypatch):
    """A process that is killed leaves what it wrote to the system: none of these tests pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda number: None)


class Cnn(nn.Module):
    """Two blocks; the ReLUs write in place, as they do in most networks."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)
        self.calls = 0

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        return self.fc(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, steps=4):
        super().__init__()
        self.inward, self.lateral, self.out = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.steps = steps

    def forward(self, x):
        state = torch.relu(self.inward(x))
        for _ in range(self.steps):
            state = torch.relu(self.lateral(state))
        return self.out(state)


def cnn():
    torch.manual_seed(0)
    model = Cnn()
    with torch.no_grad():
        for norm in (model.bn1, model.bn2):
            norm.running_mean.normal_()
            norm.weight.uniform_(0.5, 2)
    return model.eval()


def images(rows=23, seed=1):
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def by_hooks(model, batches, names):
    """What forward hooks see, copied at once."""
    found = {name: [] for name in names}
    with ExitStack() as stack, torch.no_grad():
        for name in names:

            def keep(module, args, value, name=name):
                found[name].append(value.clone())

            stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        for batch in batches:
            model(batch)
    return {name: torch.cat(values).numpy() for name, values in found.items()}


def same(features, wanted):
    return all(np.array_equal(features[name][...], values, equal_nan=True) for name, values in wanted.items())


def tree(folder):
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(Path(folder).rglob("*")) if one.is_file()}


NAMES = ["conv1", "bn1", "conv2", "bn2", "fc"]


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 23, 64])
@pytest.mark.parametrize("to", [None, "x.zarr", "x.npy"])
def test_features_are_what_hooks_on_the_model_see_bit_for_bit(to, batch_size, tmp_path):
    model, x = cnn(), images()
    where = to and tmp_path / to
    features = rl.extract(model, x, NAMES, to=where, batch_size=batch_size, shard_bytes=5000)
    assert same(features, by_hooks(model, x.split(batch_size), NAMES))
    assert list(features) == NAMES and features.rows == 23 and features.reruns == 0
    if to:
        assert same(rl.Features.open(where), dict(features.items()))


def test_the_value_before_a_relu_in_place_is_kept_as_it_was():
    model, x = cnn(), images(4)
    features = rl.extract(model, x, ["bn1", "relu_1"])
    assert (features["bn1"][...] < 0).any() and (features["relu_1"][...] >= 0).all()
    assert np.array_equal(features["bn1"][...].clip(0), features["relu_1"][...])


def test_passes_of_a_layer_are_an_axis_of_time_and_each_has_a_name():
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(7, 3)
    features = rl.extract(model, x, ["lateral", "lateral:2", "inward"], batch_size=3)
    state, steps = torch.relu(model.inward(x)), []
    for _ in range(4):
        steps.append(model.lateral(state))
        state = torch.relu(steps[-1])
    wanted = torch.stack(steps, 1).detach().numpy()
    assert features["lateral"].shape == (7, 4, 5) and features["lateral"].dims[1] == "time"
    assert np.allclose(features["lateral"][...], wanted, atol=1e-6)
    assert np.array_equal(features["lateral:2"][...], features["lateral"][:, 1])
    assert set(features) == {"lateral", "lateral:2", "inward"}


def test_layers_with_other_numbers_of_passes_have_other_axes_of_time(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Recurrent(2), Recurrent(3)

        def forward(self, x):
            return self.a(x) + self.b(x)

    features = rl.extract(Two(), torch.randn(4, 3), ["a.lateral", "b.lateral"], to=tmp_path / "x.zarr")
    assert [features[name].shape[1] for name in features] == [2, 3]
    assert features["a.lateral"].dims[1] != features["b.lateral"].dims[1]
    assert features["b.lateral:3"].shape == (4, 5)
    assert features.to_xarray()["b.lateral"].shape == (4, 3, 5)


def test_a_module_that_returns_several_tensors_gives_an_array_for_each(tmp_path):
    torch.manual_seed(0)

    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(3, 4)

        def forward(self, x):
            state = None
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state[0]

    model, x = Cells(), torch.randn(6, 5, 3)
    features = rl.extract(model, x, "cell", batch_size=4, to=tmp_path / "x.zarr")
    state, steps = None, []
    for step in x.unbind(1):
        state = model.cell(step, state)
        steps.append(state)
    assert [*features] == ["cell[0]", "cell[1]"]
    for name, part in (("cell[0]", 0), ("cell[1]", 1)):
        wanted = torch.stack([step[part] for step in steps], 1).detach().numpy()
        assert np.allclose(features[name][...], wanted, atol=1e-6) and features[name].has_time
        assert np.allclose(rl.extract(model, x, f"cell:2{name[4:]}")[f"cell:2{name[4:]}"][...], wanted[:, 1], atol=1e-6)
    chunks = rl.extract(nn.Sequential(Chunked()), torch.arange(12.0).view(2, 6), "chunk_1")
    assert [*chunks] == ["chunk_1[0]", "chunk_1[1]"] and chunks["chunk_1[1]"][1].tolist() == [9.0, 10.0, 11.0]


class Chunked(nn.Module):
    def forward(self, x):
        one, other = x.chunk(2, 1)
        return one + other


def test_globs_types_predicates_and_ordinals_name_layers():
    model, x = cnn(), images(4)
    wanted = by_hooks(model, [x], NAMES)
    for layers in ("conv*", "conv2d", ["conv1", "conv2"], rl.where(lambda layer: layer.layer_type == "conv2d")):
        found = rl.extract(model, x, layers)
        assert len(found) == 2
        assert all(np.array_equal(a[...], wanted[b]) for a, b in zip(found.values(), ("conv1", "conv2")))


def test_attention_patterns_of_an_expanded_program():
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v)

    model, x = Attention(), torch.randn(5, 6, 8)
    features = rl.extract(
        model, x, "pattern_1", batch_size=2, edit=lambda prog: prog.expand("scaleddotproductattention")
    )
    q, k, _ = model.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    pattern = (q @ k.transpose(-1, -2) / 2).softmax(-1).detach().numpy()
    assert np.allclose(features["pattern_1"][...], pattern, atol=1e-6)


def test_gradients_are_those_of_autograd():
    model, x = cnn(), images(6)
    features = rl.extract(
        model, x, ["conv2", "fc"], what=("activation", "grad"), of=lambda out: out[:, 2].sum(), batch_size=4
    )
    assert set(features) == {"conv2", "fc", "conv2.grad", "fc.grad"}
    kept = []
    hook = model.conv2.register_forward_hook(lambda module, args, value: kept.append(value))
    grads = [torch.autograd.grad(model(part)[:, 2].sum(), kept[-1:])[0] for part in x.split(4)]
    hook.remove()
    assert np.allclose(features["conv2.grad"][...], torch.cat(grads).numpy(), atol=1e-7)
    only = rl.extract(model, x, ["conv2"], what="grad", of=lambda out: out[:, 2].sum(), batch_size=4)
    assert list(only) == ["conv2.grad"] and np.array_equal(only["conv2.grad"][...], features["conv2.grad"][...])


def test_a_lesion_reaches_all_batches():
    model, x = cnn(), images()
    features = rl.extract(model, x, "fc", batch_size=4, edit=lambda prog: prog.lesion("relu_1", "b [c] h w", c=[1]))
    with torch.no_grad():
        hidden = F.relu(model.bn1(model.conv1(x)))
        hidden[:, 1] = 0
        wanted = model.fc(F.relu(model.bn2(model.conv2(hidden))).mean((2, 3)))
    assert np.allclose(features["fc"][...], wanted.numpy(), atol=1e-6)


def test_the_latest_layer_ends_the_work_and_the_model_runs_once_for_each_shape():
    class Counted(nn.Module):
        runs = 0

        def forward(self, x):
            Counted.runs += 1
            return x

    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), Counted(), nn.Linear(3, 3))
    rl.extract(model, torch.randn(41, 3), ["0"], batch_size=4)
    assert Counted.runs == 2  # of four rows, and of the last one


def test_batches_of_any_shape_have_a_program_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 4))
    batches = [torch.randint(20, (rows, length)) for rows, length in [(3, 5), (3, 7), (2, 5), (3, 5), (1, 1)]]
    features = rl.extract(model, iter(batches), "1", reduce="b t d -> b d")
    wanted = torch.cat([model(batch).mean(1) for batch in batches]).detach().numpy()
    assert np.allclose(features["1"][...], wanted, atol=1e-6) and features.rows == 12


def test_a_function_of_two_is_given_the_batch_such_as_its_mask():
    torch.manual_seed(0)

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 6), nn.Linear(6, 4)

        def forward(self, ids, mask):
            return self.out(self.embed(ids) * mask[..., None])

    model, lengths = Words(), [5, 2, 3, 4]
    ids = torch.stack([torch.arange(5) + n for n in range(4)])
    mask = torch.stack([(torch.arange(5) < n).long() for n in lengths])

    def mean(value, batch):
        weight = batch["mask"][..., None]
        return (value * weight).sum(1) / weight.sum(1)

    features = rl.extract(model, {"ids": ids, "mask": mask}, "embed", reduce=mean, batch_size=2)
    wanted = [model.embed(row[:n]).mean(0) for row, n in zip(ids, lengths)]
    assert np.allclose(features["embed"][...], torch.stack(wanted).detach().numpy(), atol=1e-6)


def test_a_projection_of_rows_of_another_size_is_refused():
    model = nn.Sequential(nn.Embedding(20, 6))
    batches = [torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)]
    with pytest.raises(BadSource, match="gives 42 numbers for each row of this batch, and 30"):
        rl.extract(model, iter(batches), "0", reduce=rl.SRP(8))
    assert rl.extract(model, iter(batches), "0", reduce=["b t d -> b d", rl.SRP(8)])["0"].shape == (4, 8)


class Branching(nn.Module):
    """One of two ways, by the content of the batch."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        x = torch.tanh(self.one(x)) if x.sum() > 0 else torch.tanh(torch.relu(self.other(x)))
        return self.last(x)


def test_a_batch_that_leaves_the_path_is_run_by_the_model_and_counted(tmp_path):
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(20, 3)
    signs = [bool(part.sum() > 0) for part in x.split(2)]
    assert 0 < sum(signs) < 10
    features = rl.extract(model, x, ["last"], to=tmp_path / "x.zarr", batch_size=2, shard_bytes=16)
    assert np.array_equal(features["last"][...], torch.cat([model(part) for part in x.split(2)]).detach().numpy())
    assert features.reruns == signs.count(not signs[0]) and rl.Features.open(tmp_path / "x.zarr").reruns


def test_a_label_that_means_another_operation_on_another_path_is_refused():
    torch.manual_seed(0)
    model = Branching()
    up, down = torch.ones(2, 3), -torch.ones(2, 3)
    with pytest.raises(BadSource, match="tanh_1 is another operation in this batch than in the first"):
        rl.extract(model, torch.cat([up, down]), ["tanh_1"], batch_size=2)
    assert len(rl.extract(model, torch.cat([up, up]), ["tanh_1"], batch_size=2)["tanh_1"]) == 4


def test_a_path_that_the_size_of_the_batch_decides_is_the_models_own():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x) if x.shape[0] > 1 else self.fc(2 * x)

    torch.manual_seed(0)
    model, x = Alone(), torch.randn(5, 3)
    features = rl.extract(model, x, "fc", batch_size=2)
    assert np.array_equal(features["fc"][...], torch.cat([model(part) for part in x.split(2)]).detach().numpy())


class Remembering(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.calls = way, 0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        if self.way == "a buffer":
            self.seen += x.mean(0)
            return torch.tanh(x - self.seen)
        if self.way == "Python":
            self.calls += 1
            return torch.tanh(x * self.calls)
        if self.way == "numpy":
            return torch.tanh(x * np.random.rand())
        self.seen.copy_(x.mean(0))
        return torch.tanh(x - self.seen)


@pytest.mark.parametrize("way", ["a buffer", "Python", "numpy"])
def test_a_model_whose_batches_follow_one_another_is_refused(way):
    with pytest.raises(BadSource, match=r"same state|same ones"):
        rl.extract(Remembering(way), torch.randn(6, 3), "tanh_1", batch_size=2)


@pytest.mark.filterwarnings("ignore:the model is in training mode")
def test_a_model_that_writes_what_it_has_not_read_is_taken():
    model, x = Remembering("its own mean"), torch.randn(6, 3)
    wanted = torch.cat([torch.tanh(part - part.mean(0)) for part in x.split(2)]).numpy()
    assert np.allclose(rl.extract(model, x, "tanh_1", batch_size=2)["tanh_1"][...], wanted) and not model.seen.any()
    assert len(rl.extract(cnn().train(), images(8), NAMES, batch_size=4)) == 5


def test_layers_that_share_a_value_have_an_array_each_by_the_names_that_were_asked_for():
    model, x = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.ReLU()), torch.randn(5, 3)
    features = rl.extract(model, x, ["0", "0.0", "linear_1"])
    assert list(features) == ["0", "0.0", "linear_1"]
    assert np.array_equal(features["0"][...], features["0.0"][...])
    assert list(rl.extract(model, x, ["linear", "0.0", "lin*"])) == ["linear_1_1", "0.0"]


def test_a_sparse_layer_is_refused_with_the_way_to_make_numbers_of_it():
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse() * 2

    with pytest.raises(BadSource, match="gives a sparse tensor"):
        rl.extract(Sparse(), torch.eye(3), "mul_1")


# -- what is left alone ------------------------------------------------------------------------------------------------


TRAINS = pytest.mark.filterwarnings("ignore:the model is in training mode")


@TRAINS
def test_the_model_its_buffers_its_hooks_and_all_generators_are_left_as_they_were(tmp_path):
    model, x = cnn().train(), images()
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    seen = []
    model.conv1.register_forward_hook(lambda *args: seen.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    hooks, threads = len(model.conv1._forward_hooks), torch.get_num_threads()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
    rl.extract(model, loader, NAMES, to=tmp_path / "x.zarr")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all() and torch.get_num_threads() == threads
    assert model.training and len(model.conv1._forward_hooks) == hooks and model.conv2.weight.grad is None
    assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight)) and torch.is_grad_enabled()


@TRAINS
def test_batch_norm_in_training_takes_the_statistics_of_each_batch():
    model, x = cnn().train(), images(12)
    features = rl.extract(model, x, ["bn1"], batch_size=4)
    norm = [F.batch_norm(model.conv1(part), None, None, model.bn1.weight, model.bn1.bias, True) for part in x.split(4)]
    assert np.allclose(features["bn1"][...], torch.cat(norm).detach().numpy(), atol=1e-5)


def test_a_model_in_training_mode_is_told():
    with pytest.warns(UserWarning, match=r"training mode: bn1, bn2\. .*model\.eval\(\)"):
        rl.extract(cnn().train(), images(4), "fc")


@TRAINS
def test_each_batch_draws_numbers_of_its_own_and_the_same_ones_when_resumed(tmp_path):
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).train(), torch.ones(40, 4)
    torch.manual_seed(3)
    features = rl.extract(model, x, ["0", "1"], batch_size=8)
    parts = features["0"][...].reshape(5, 8, 4)
    assert len({part.tobytes() for part in parts}) == 5
    torch.manual_seed(3)
    assert same(rl.extract(model, x, ["0", "1"], batch_size=8), dict(features.items()))
    torch.manual_seed(3)
    stop_after(3, model, x, ["0", "1"], to=tmp_path / "x.zarr", batch_size=8, shard_bytes=128)
    torch.manual_seed(77)  # what was begun is gone on with
    resumed = rl.extract(model, x, ["0", "1"], to=tmp_path / "x.zarr", batch_size=8, shard_bytes=128)
    assert same(resumed, dict(features.items()))


def stop_after(rows, model, x, layers, **how):
    """An extraction whose data break."""

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, row):
            if row >= 8 * rows:
                raise OSError("the disk of the data went away")
            return x[row]

    with pytest.raises(OSError, match="went away"):
        rl.extract(model, Broken(), layers, **how)


def test_an_error_of_the_data_or_the_model_says_at_which_row_and_what_was_done_is_kept(tmp_path):
    model, x = cnn(), images(40)
    with pytest.raises(OSError, match="cannot read it") as error:
        rl.extract(model, Bad(x, 17), NAMES, to=tmp_path / "x.zarr", batch_size=4)
    assert any("row 16" in note for note in error.value.__notes__)
    bad = x.clone()
    bad[22] = float("nan")
    with pytest.raises(ValueError, match="no NaN") as error:
        rl.extract(Strict(), bad, ["fc"], batch_size=4)
    assert any("rows 20 to 23" in note for note in error.value.__notes__)


class Bad(torch.utils.data.Dataset):
    def __init__(self, x, row):
        self.x, self.row = x, row

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        if row == self.row:
            raise OSError("cannot read it")
        return self.x[row]


class Strict(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 2)

    def forward(self, x):
        if bool(x.isnan().any()):
            raise ValueError("no NaN, please")
        return self.fc(x.flatten(1))


# -- resumed -----------------------------------------------------------------------------------------------------------


HOW = {"batch_size": 4, "shard_bytes": 2000, "labels": {"stimulus": [f"image {n}" for n in range(40)]}}
KINDS = ["x.zarr", "x.npy"]


def whole(tmp_path, name="whole", kind="x.zarr", extract=None):
    """The files of an extraction that nobody interrupted."""
    torch.set_num_threads(1)
    folder = tmp_path / name / kind
    (extract or extract_again)(folder)
    return tree(folder)


def forked(work):
    """Runs in a child, which may be killed; how it ended."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return status


def extract_little(folder):
    """Two shards of two layers: few writes."""
    return little(folder)


def little(folder, **how):
    return rl.extract(
        cnn(), images(8), ["conv1", "fc"], to=folder, batch_size=4, shard_bytes=2000, labels=LITTLE, **how
    )


LITTLE = {"stimulus": [f"image {n}" for n in range(8)]}


def extract_again(folder):
    return rl.extract(cnn(), images(40), NAMES, to=folder, **HOW)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_each_point_between_two_writes_to_the_disk_it_goes_on_to_the_same_bytes(kind, tmp_path, monkeypatch):
    wanted = whole(tmp_path, kind=kind, extract=extract_little)
    points = count_points(tmp_path / "count" / kind, monkeypatch)
    assert points > 15
    for point in range(points):
        folder = tmp_path / str(point) / kind

        def killed(folder=folder, point=point):
            die_at(point)
            extract_little(folder)

        assert forked(killed) == signal.SIGKILL
        extract_little(folder)
        assert tree(folder) == wanted, point
        assert [one.name for one in folder.parent.iterdir()] == [kind]


POINTS = ("fsync", "replace")


def count_points(folder, monkeypatch):
    count = []
    with monkeypatch.context() as patch:
        for name in POINTS:
            known = getattr(os, name)
            patch.setattr(os, name, lambda *args, known=known: (count.append(1), known(*args))[1])
        extract_little(folder)
    return len(count)


def die_at(point):
    """End this process by SIGKILL just before the n-th time that something goes to the disk."""
    count = iter(range(10**6))

    def dying(known):
        def call(*args):
            if next(count) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return known(*args)

        return call

    for name in POINTS:
        setattr(os, name, dying(getattr(os, name)))


def test_killed_twenty_times_at_random_moments_it_goes_on_to_the_same_bytes(tmp_path):
    wanted, chance = whole(tmp_path), random.Random(0)
    folder, kills = tmp_path / "killed" / "x.zarr", 0
    for _ in range(200):
        child = os.fork()
        if not child:
            extract_again(folder)
            os._exit(0)
        timer = threading.Timer(chance.uniform(0.0, 0.06), os.kill, (child, signal.SIGKILL))
        timer.start()
        _, status = os.waitpid(child, 0)
        timer.cancel()
        timer.join()
        kills += status == signal.SIGKILL
        if status == 0:
            assert tree(folder) == wanted
            folder = tmp_path / f"killed {kills}" / "x.zarr"
        if kills >= 20:
            break
    assert kills >= 20
    extract_again(folder)
    assert tree(folder) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_says_so_and_loses_nothing(kind, tmp_path, monkeypatch):
    wanted, folder = whole(tmp_path, kind=kind), tmp_path / "full" / kind
    for period in (7, 5, 3):
        count = iter(range(10**6))

        def full(number, known=os.fsync, count=count, period=period):
            if next(count) % period == period - 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return known(number)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left") as error:
                extract_again(folder)
        assert any("run the same extract() again" in note for note in error.value.__notes__)
    extract_again(folder)
    assert tree(folder) == wanted


def test_a_limit_of_the_kernel_on_the_size_of_files_is_met_as_a_full_disk(tmp_path):
    wanted, folder = whole(tmp_path), tmp_path / "limited" / "x.zarr"

    def limited():
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            extract_again(folder)
        except OSError as error:
            os._exit(7 if error.errno == errno.EFBIG else 8)

    assert os.waitstatus_to_exitcode(forked(limited)) == 7
    extract_again(folder)
    assert tree(folder) == wanted


def test_another_plan_is_refused_and_both_are_shown(tmp_path):
    folder = tmp_path / "x.zarr"
    torch.set_num_threads(1)
    stop_at_shard(folder, 2)
    changed = cnn()
    with torch.no_grad():
        changed.fc.bias += 1
    cases = {
        "weights": lambda: rl.extract(changed, images(40), NAMES, to=folder, **HOW),
        "first_batch": lambda: rl.extract(cnn(), images(40, seed=2), NAMES, to=folder, **HOW),
        "total": lambda: rl.extract(cnn(), images(39), NAMES, to=folder, batch_size=4, shard_bytes=2000),
        "arrays.conv1": lambda: rl.extract(cnn(), images(40), NAMES[1:], to=folder, **HOW),
        "arrays.conv1.reduce": lambda: rl.extract(
            cnn(), images(40), NAMES, to=folder, reduce={"conv1": "b c h w -> b c"}, **HOW
        ),
        "arrays.fc.dtype": lambda: rl.extract(cnn(), images(40), NAMES, to=folder, dtype={"fc": "float16"}, **HOW),
        "batch_size": lambda: rl.extract(cnn(), images(40), NAMES, to=folder, **{**HOW, "batch_size": 2}),
        "shard_rows": lambda: rl.extract(cnn(), images(40), NAMES, to=folder, **{**HOW, "shard_bytes": 9000}),
    }
    before = tree(folder)
    for word, begin in cases.items():
        with pytest.raises(PlanDiffers) as error:
            begin()
        assert any(line.strip().startswith(f"{word}") for line in str(error.value).splitlines()), (word, error.value)
        assert tree(folder) == before
    assert same(extract_again(folder), by_hooks(cnn(), images(40).split(4), NAMES))


def stop_at_shard(folder, shard):
    """An extraction that ended after so many shards."""

    def killed():
        die_at_shard(shard)
        extract_again(folder)

    assert forked(killed) == signal.SIGKILL


def die_at_shard(shard):
    known = os.replace

    def call(source, to):
        if str(to).endswith(f"{shard}.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        known(source, to)

    os.replace = call


def test_a_half_done_extraction_can_be_read_and_says_what_is_missing(tmp_path):
    folder = tmp_path / "x.zarr"
    torch.set_num_threads(1)
    stop_at_shard(folder, 3)
    features = rl.Features.open(folder)
    wanted = by_hooks(cnn(), images(40).split(4), NAMES)
    done = len(features["fc"]) - features["fc"].missing_rows
    assert not features.is_complete and 0 < done < 40
    assert np.array_equal(features["fc"][:done], wanted["fc"][:done])


def test_a_torn_account_of_a_shard_makes_it_anew(tmp_path):
    wanted, folder = whole(tmp_path), tmp_path / "torn" / "x.zarr"
    stop_at_shard(folder, 4)
    for path, content in ((0, b'{"rows": 4'), (1, b""), (2, b'{"rows": 4, "files": [], "reruns": 0}')):
        (folder.with_name("x.zarr.progress") / "done" / f"{path}.json").write_bytes(content)
    extract_again(folder)
    assert tree(folder) == wanted


def test_a_lost_or_cut_file_of_a_shard_that_was_done_is_made_anew(tmp_path):
    wanted, folder = whole(tmp_path), tmp_path / "cut" / "x.zarr"
    stop_at_shard(folder, 4)
    pieces = sorted((folder / "fc" / "c").rglob("0"))
    os.truncate(next(one for one in pieces if one.is_file()), 3)
    next(one for one in (folder / "conv1").rglob("*") if one.is_file() and one.name == "0").unlink()
    extract_again(folder)
    assert tree(folder) == wanted


def test_a_complete_extraction_is_read_and_nothing_runs(tmp_path):
    model, x = cnn(), images(8)
    first = rl.extract(model, x, "fc", to=tmp_path / "x.zarr")
    stamp = {path: path.stat().st_mtime_ns for path in (tmp_path / "x.zarr").rglob("*")}
    again = rl.extract(model, x, "fc", to=tmp_path / "x.zarr")
    assert same(again, dict(first.items()))
    assert stamp == {path: path.stat().st_mtime_ns for path in (tmp_path / "x.zarr").rglob("*")}
    with pytest.raises(PlanDiffers, match="other labels 'stimulus'"):
        rl.extract(model, x, "fc", to=tmp_path / "x.zarr", labels={"stimulus": range(8)})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        rl.extract(model, x, "fc", to=tmp_path / "x.zarr", resume=False)
    values = again["fc"][...]
    other = rl.extract(model, images(8, seed=5), "fc", to=tmp_path / "x.zarr", overwrite=True)
    assert not np.array_equal(other["fc"][...], values)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_and_not_ours_is_never_touched(kind, tmp_path):
    folder = tmp_path / kind
    folder.mkdir()
    (folder / "thesis.txt").write_text("all of it")
    for how in ({}, {"overwrite": True}, {"resume": False}):
        with pytest.raises(FileExistsError):
            rl.extract(cnn(), images(4), "fc", to=folder, **how)
    assert (folder / "thesis.txt").read_text() == "all of it" and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_overwriting_is_refused_where_it_would_remove_a_file_of_the_users(kind, tmp_path):
    folder = tmp_path / kind
    rl.extract(cnn(), images(8), ["fc"], to=folder, labels={"stimulus": range(8)})
    before = tree(folder)
    for name in ("notes.txt", "fc/c/notes.txt", "mine/0.npy"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
        with pytest.raises(FileExistsError, match=f"{name}, which no extraction wrote"):
            rl.extract(cnn(), images(8), ["conv1"], to=folder, overwrite=True)
        (folder / name).unlink()
        assert tree(folder) == before
    progress = folder.with_name(f"{kind}.progress")
    for name in ("new", "done"):
        (progress / name).mkdir(parents=True, exist_ok=True)
        (progress / name / "mine.txt").write_text("mine")
    rl.extract(cnn(), images(8), ["conv1"], to=folder, overwrite=True)
    assert {**tree(progress)} == {"new/mine.txt": b"mine", "done/mine.txt": b"mine"}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_overwritten_by_a_call_that_cannot_work(kind, tmp_path):
    folder = tmp_path / kind
    rl.extract(cnn(), images(8), ["fc"], to=folder)
    before = tree(folder)
    for how in ({"executor": 3}, {"shard_bytes": -3}, {"labels": {"x": [1]}}, {"reduce": "b c h w -> b c"}):
        with pytest.raises((TypeError, ValueError)):
            rl.extract(cnn(), images(8), ["fc"], to=folder, overwrite=True, **how)
        assert tree(folder) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_complete", [True, False])
def test_killed_while_it_overwrites_it_can_be_begun_and_overwritten_again(is_complete, kind, tmp_path):
    wanted = whole(tmp_path, kind=kind, extract=extract_little)
    for point in range(200):
        folder = tmp_path / f"{is_complete} {point}" / kind
        if is_complete:
            of_before(folder)
        else:
            assert forked(lambda folder=folder: (die_at_shard(1), of_before(folder))) == signal.SIGKILL

        def overwritten(folder=folder, point=point):
            audited = iter(range(10**6))

            def hook(event, args):
                if event in EVENTS and any(str(folder.parent) in str(one) for one in args) and next(audited) == point:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            little(folder, overwrite=True)

        status = forked(overwritten)
        with pytest.raises(PlanDiffers) if folder_is_begun_otherwise(folder, status) else ExitStack():
            extract_little(folder)
        little(folder, overwrite=True)
        assert tree(folder) == wanted, point
        if status == 0:
            assert point > 15
            break
    else:
        raise AssertionError("it never ended")


EVENTS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate")


def folder_is_begun_otherwise(folder, status):
    """True if what is left is of the plan before."""
    found = rl._extract.feature_folder.begun_plan(folder) if folder.parent.exists() else None
    return status != 0 and found is not None and found["total"] == 12


def of_before(folder):
    return rl.extract(cnn(), images(12), ["conv1"], to=folder, batch_size=4, shard_bytes=2000)


def test_a_stream_that_ends_before_what_is_done_is_refused(tmp_path):
    model, x, folder = cnn(), images(40), tmp_path / "x.zarr"

    def stream(rows, breaks=None):
        for number, part in enumerate(x[:rows].split(4)):
            if number == breaks:
                raise OSError("the stream broke")
            yield part

    with pytest.raises(OSError, match="broke"):
        rl.extract(model, stream(40, 7), NAMES, to=folder, shard_bytes=2000)
    before = tree(folder)
    with pytest.raises(BadSource, match=r"ended after 12 rows, and 2\d are done already"):
        rl.extract(model, stream(12), NAMES, to=folder, shard_bytes=2000)
    assert {name: data for name, data in tree(folder).items() if "/c/" in name} == {
        name: data for name, data in before.items() if "/c/" in name
    }
    features = rl.extract(model, stream(40), NAMES, to=folder, shard_bytes=2000)
    assert same(features, by_hooks(model, x.split(4), NAMES)) and features.rows == 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_total", [True, False])
def test_a_bit_that_flipped_is_found(has_total, kind, tmp_path):
    folder, data = tmp_path / kind, torch.utils.data.TensorDataset(images(23), torch.arange(23))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    features = rl.extract(
        cnn(), loader if has_total else iter(loader), NAMES, to=folder, shard_bytes=2000, labels={"x": range(23)}
    )
    features.verify()
    for path in folder.rglob("*"):
        if path.is_file() and ("/c/" in str(path) or path.suffix == ".npy") and not {"x", "x.npy"} & {*path.parts}:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]))
            with pytest.raises(BadFile, match="not those that were written"):
                features.verify()
            path.write_bytes(whole)
    features.verify()


def test_two_processes_on_one_folder_do_no_harm(tmp_path):
    wanted = whole(tmp_path)
    for number in range(6):
        folder = tmp_path / f"both {number}" / "x.zarr"
        children = []
        for _ in range(2):
            child = os.fork()
            if not child:
                try:
                    extract_again(folder)
                except BaseException:
                    import traceback

                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        assert tree(folder) == wanted
        assert [one.name for one in folder.parent.iterdir()] == ["x.zarr"]


def test_a_stream_goes_on_from_what_is_done_and_does_not_compute_it_again(tmp_path):
    model, x, folder = cnn(), images(40), tmp_path / "x.zarr"

    def stream(stop):
        for number, part in enumerate(x.split(4)):
            if number == stop:
                raise OSError("the stream broke")
            yield part

    with pytest.raises(OSError, match="broke"):
        rl.extract(model, stream(7), NAMES, to=folder, shard_bytes=2000)
    features = rl.extract(model, stream(None), NAMES, to=folder, shard_bytes=2000)
    assert same(features, by_hooks(model, x.split(4), NAMES)) and features.rows == 40
    assert json.loads((folder / "zarr.json").read_text())["attributes"]["replaylens"]["complete"]


def test_a_stream_with_a_total_ends_there_or_says_that_it_is_too_short():
    x = images(20)
    assert rl.extract(cnn(), iter(x.split(4)), "fc", total=10).rows == 10
    with pytest.raises(BadSource, match="ended after 20 rows"):
        rl.extract(cnn(), iter(x.split(4)), "fc", total=21)


def test_a_total_takes_the_first_rows_of_any_data_in_whole_batches(tmp_path):
    model, x = cnn(), images(20)
    wanted = by_hooks(model, x[:12].split(4), ["fc"])["fc"][:10]
    loader = torch.utils.data.DataLoader(x, batch_size=4)
    for data in (loader, iter(x.split(4))):
        assert np.array_equal(rl.extract(model, data, "fc", total=10)["fc"][...], wanted)
    assert rl.extract(model, x, "fc", total=10, batch_size=4)["fc"].shape == (10, 5)


def test_batches_that_do_not_fit_shards_are_cut_and_the_bits_stay(tmp_path):
    model, x = cnn(), images(40)
    sizes = [3, 5, 1, 9, 2, 7, 4, 9]
    sampler = [list(range(sum(sizes[:n]), sum(sizes[: n + 1]))) for n in range(len(sizes))]
    loader = torch.utils.data.DataLoader(x, batch_sampler=sampler)
    wanted = by_hooks(model, x.split(sizes), NAMES)
    features = rl.extract(model, loader, NAMES, to=tmp_path / "x.zarr", shard_bytes=3000)
    assert same(features, wanted) and features["conv1"].chunk_rows < 9
    threads = ThreadPoolExecutor(2)
    assert same(rl.extract(model, loader, NAMES, to=tmp_path / "y.zarr", shard_bytes=3000, executor=threads), wanted)


# -- by workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_an_executor_does_the_files_are_those_of_one_process(seed, tmp_path):
    wanted = whole(tmp_path)
    folder = tmp_path / "far" / "x.zarr"
    rl.extract(cnn(), images(40), NAMES, to=folder, executor=World(seed, evil=0.1).make, **HOW)
    assert tree(folder) == wanted


def test_workers_give_arrays_where_nothing_is_written():
    model, x = cnn(), images(23)
    features = rl.extract(model, x, NAMES, batch_size=4, shard_bytes=2000, executor=World(1, evil=0).make)
    assert same(features, by_hooks(model, x.split(4), NAMES))


def test_what_only_the_model_can_make_is_made_where_it_is(tmp_path):
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(20, 3)
    wanted = torch.cat([model(part) for part in x.split(2)]).detach().numpy()
    how = {"batch_size": 2, "shard_bytes": 16}
    features = rl.extract(model, x, ["last"], to=tmp_path / "x.zarr", executor=World(2, evil=0.1).make, **how)
    assert np.array_equal(features["last"][...], wanted) and features.reruns
    rl.extract(model, x, ["last"], to=tmp_path / "y.zarr", **how)
    assert tree(tmp_path / "x.zarr") == tree(tmp_path / "y.zarr")


@pytest.mark.filterwarnings("ignore:the model is in training mode")
def test_draws_are_the_same_whoever_makes_a_shard(tmp_path):
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).train(), torch.ones(40, 4)
    for name, executor in (("x.zarr", None), ("y.zarr", World(3, evil=0.1).make), ("z.zarr", World(4, evil=0).make)):
        torch.manual_seed(5)
        rl.extract(
            model,
            x,
            ["0", "1"],
            to=tmp_path / name,
            batch_size=4,
            shard_bytes=128,
            executor=executor,
            reduce={"1": lambda value: value + torch.rand(value.shape)},
        )
    assert tree(tmp_path / "x.zarr") == tree(tmp_path / "y.zarr") == tree(tmp_path / "z.zarr")


def test_gradients_edits_projections_and_labels_of_the_data_come_from_workers_too(tmp_path):
    data = torch.utils.data.TensorDataset(images(23), torch.arange(23))
    how = {
        "what": ("activation", "grad"),
        "of": lambda out: out[:, 1].sum(),
        "edit": lambda prog: prog.lesion("relu_1", "b [c] h w", c=[1]),
        "reduce": {"conv1": [rl.SRP(7)], "conv1.grad": "b c h w -> b c : max"},
        "dtype": {"fc": "float16"},
        "batch_size": 4,
        "shard_bytes": 500,
    }
    one = rl.extract(cnn(), data, ["conv1", "fc"], to=tmp_path / "x.zarr", **how)
    rl.extract(cnn(), data, ["conv1", "fc"], to=tmp_path / "y.zarr", executor=World(5, evil=0.1).make, **how)
    assert tree(tmp_path / "x.zarr") == tree(tmp_path / "y.zarr")
    assert one["conv1"].shape == (23, 7) and one["conv1.grad"].shape == (23, 4) and one["fc"].dtype == np.float16
    assert one.labels["target"].tolist() == list(range(23))


def test_a_stream_cannot_be_shared_out():
    with pytest.raises(BadSource, match="needs rows by number"):
        rl.extract(cnn(), iter(images().split(4)), "fc", executor=ThreadPoolExecutor(1))


# -- said clearly ------------------------------------------------------------------------------------------------------


def test_bad_words_are_answered_with_what_to_give(tmp_path):
    model, x = cnn(), images(8)
    cases = [
        ({"layers": "conv9"}, NoSuchLayer, "conv9"),
        ({"layers": []}, NoSuchLayer, "names no layer"),
        ({"layers": nn.Conv2d}, TypeError, "conv2d"),
        ({"layers": "fc", "to": "features.h5"}, ValueError, "features.zarr"),
        ({"layers": "fc", "to": 3}, ValueError, "features.zarr"),
        ({"layers": "fc", "what": "gradient"}, ValueError, "'activation', 'grad'"),
        ({"layers": "fc", "what": "grad"}, TypeError, "of="),
        ({"layers": "fc", "of": torch.sum}, TypeError, "what="),
        ({"layers": "fc", "reduce": "b c h w -> b c"}, BadPart, "fc"),
        ({"layers": "fc", "reduce": {"conv*": "b c h w -> b c"}}, NoSuchLayer, "conv"),
        ({"layers": "fc", "total": 9}, BadSource, "have 8"),
        ({"layers": "fc", "total": 0}, ValueError, "total="),
        ({"layers": "fc", "labels": {"stimulus": [1]}}, BadSource, "'stimulus' has 1"),
        ({"layers": "fc", "labels": {"fc": range(8)}}, BadSource, "a layer and of a label"),
        ({"layers": "fc", "edit": lambda prog: None}, TypeError, "NoneType"),
        ({"layers": "fc", "batch_size": 0}, ValueError, "batch_size="),
    ]
    for how, error, words in cases:
        with pytest.raises(error, match=words):
            rl.extract(model, x, **how)
    with pytest.raises(BadSource, match="no rows"):
        rl.extract(model, x[:0], "fc")


def test_a_layer_without_an_axis_of_rows_is_refused_with_its_shape():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.relu(x).mean() + torch.tanh(x)

    with pytest.raises(BadSource, match=r"mean_1 gives \(\) for a batch of 4 rows"):
        rl.extract(Odd(), torch.ones(4, 3), ["mean_1"])


def test_rows_of_another_length_than_those_of_the_first_batch_are_refused_with_a_way_out():
    model = nn.Sequential(nn.Embedding(20, 6))
    with pytest.raises(BadSource, match=r"gives \(7, 6\) for each row of this batch, and \(5, 6\)") as error:
        rl.extract(model, iter([torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)]), "0")
    assert "b t d -> b d" in str(error.value)


def test_a_program_takes_the_place_of_a_model_in_its_own_shape_and_others_if_it_holds_the_model(tmp_path):
    model, x = cnn(), images(10)
    prog = rl.capture(model, x[:4])
    wanted = by_hooks(model, x.split(4), NAMES)
    assert same(rl.extract(prog, x, NAMES, batch_size=4), wanted)
    hurt = prog.lesion("relu_1")
    assert same(
        rl.extract(hurt, x[:8], ["fc"], batch_size=4),
        dict(rl.extract(model, x[:8], ["fc"], batch_size=4, edit=lambda p: p.lesion("relu_1")).items()),
    )
    with pytest.raises(InputMismatch, match="Give extract the model"):
        rl.extract(hurt, x, ["fc"], batch_size=4)
    prog.save(tmp_path / "x.rlp")
    assert same(
        rl.extract(rl.load(tmp_path / "x.rlp"), x[:8], NAMES, batch_size=4), {k: v[:8] for k, v in wanted.items()}
    )
