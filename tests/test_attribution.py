"""What patching each layer would do to a metric, estimated from gradients, beside what it does."""

import functools

import pytest
import torch
from oracle import assert_same
from torch import nn
from torch.nn import functional as F

import replaylens as rl

SUMS = 7


def x(seed=0, *shape):
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """Blocks that add to a stream."""

    def __init__(self, width=16, depth=3):
        super().__init__()
        self.read = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.write = nn.Linear(width, 1)

    def forward(self, x):
        x = self.read(x)
        for block in self.blocks:
            x = x + block(x)
        return self.write(x)


class Block(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mixed = nn.Identity()

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(d, -1))
        pattern = (q @ k.mT / (d // self.heads) ** 0.5).softmax(-1)
        x = x + self.out(self.mixed((pattern @ v).transpose(1, 2).reshape(b, t, d)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Adder(nn.Module):
    """A transformer of two blocks, which learns `a + b` modulo seven."""

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(SUMS + 1, width), nn.Parameter(torch.randn(3, width) * 0.3)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.unembed = nn.LayerNorm(width), nn.Linear(width, SUMS)

    def forward(self, tokens):
        return self.unembed(self.norm(self.blocks(self.embed(tokens) + self.place)))[:, -1]


def trained(model, inputs, targets, loss, steps, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return model.eval()


@functools.cache
def curve():
    """A residual network that has learned a smooth function, clean and corrupt."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 4)
    targets = 2 * inputs[:, :1].sin() + inputs[:, 1:2] * inputs[:, 2:3]
    model = trained(Residual(), inputs, targets, F.mse_loss, 200, 1e-2)
    given = torch.randn(1, 4)
    return rl.capture(model, given), rl.capture(model, given + 0.5 * torch.randn(1, 4))


@functools.cache
def sums():
    """Pairs of questions that a transformer has learned to answer."""
    torch.manual_seed(0)
    numbers = torch.cartesian_prod(torch.arange(SUMS), torch.arange(SUMS))
    tokens = torch.cat([numbers, torch.full((len(numbers), 1), SUMS)], 1)
    model = trained(Adder(), tokens, numbers.sum(1) % SUMS, F.cross_entropy, 120, 3e-3)
    assert (model(tokens).argmax(1) == numbers.sum(1) % SUMS).all()
    progs = [rl.capture(model, tokens[n : n + 1]) for n in (3, 12, 20, 31, 40)]
    return list(zip(progs[1:], progs[:-1]))


def better_answer(clean, corrupt):
    right, wrong = clean.output.argmax(), corrupt.output.argmax()
    return lambda out: out[0, right] - out[0, wrong]


def patched(clean, corrupt, metric, label, part=None):
    """What patching does."""
    run = corrupt.replay(patch={label: rl.From(clean, part)})
    return (metric(run.output) - metric(corrupt.output)).detach()


def correlation(one, other):
    return torch.corrcoef(torch.stack([one, other]))[0, 1]


# ---- is it right? ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["patching", "integrated"])
def test_it_is_exact_where_the_model_is_linear(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Flatten(), nn.Linear(24, 1)).double()
    clean, corrupt = rl.capture(model, x(0, 2, 3, 4).double()), rl.capture(model, x(1, 2, 3, 4).double())
    found = rl.attribution(clean, corrupt, torch.sum, method=method, steps=2)
    assert list(found) == list(corrupt.layer_labels)
    for label, score in found.items():
        torch.testing.assert_close(score, patched(clean, corrupt, torch.sum, label))
    scores = rl.attribution(clean, corrupt, torch.sum, ["0", "1"], method=method, steps=2, part="b [t] [c]")
    for label, score in scores.items():
        for t, c in [(0, 0), (2, 7)]:
            part = rl.Part("b [t] [c]", t=t, c=c)
            torch.testing.assert_close(score[t, c], patched(clean, corrupt, torch.sum, label, part))


def test_it_agrees_with_patching_each_unit_of_a_trained_network():
    clean, corrupt = curve()
    found = rl.attribution(clean, corrupt, torch.sum, ["read", "blocks.**"], part="b [c]")
    truth = {
        label: torch.stack(
            [patched(clean, corrupt, torch.sum, label, rl.Part("b [c]", c=c)) for c in range(len(score))]
        )
        for label, score in found.items()
    }
    assert len(torch.cat(list(truth.values()))) == 16 + 3 * (32 + 32 + 16)
    assert correlation(torch.cat(list(found.values())), torch.cat(list(truth.values()))) > 0.95


def test_the_integrated_score_of_a_layer_is_what_patching_it_does():
    clean, corrupt = curve()
    found = rl.attribution(clean, corrupt, torch.sum, method="integrated", steps=64)
    truth = torch.stack([patched(clean, corrupt, torch.sum, label) for label in found])
    torch.testing.assert_close(torch.stack(list(found.values())), truth, rtol=1e-3, atol=1e-4)
    once = rl.attribution(clean, corrupt, torch.sum)
    assert (torch.stack(list(once.values())) - truth).abs().max() > 0.05


def test_integrated_scores_agree_with_patching_each_position_of_a_trained_transformer():
    estimates, integrals, truth = [], [], []
    sites = ["blocks.0.out", "blocks.0.down", "blocks.1.out", "blocks.1.down"]
    for clean, corrupt in sums():
        metric = better_answer(clean, corrupt)
        once = rl.attribution(clean, corrupt, metric, sites, part="b [t] d")
        whole = rl.attribution(clean, corrupt, metric, sites, part="b [t] d", method="integrated", steps=8)
        for label, score in whole.items():
            estimates.append(once[label])
            integrals.append(score)
            truth += [patched(clean, corrupt, metric, label, rl.Part("b [t] d", t=t)) for t in range(3)]
    truth = torch.stack(truth)
    assert correlation(torch.cat(integrals), truth) > 0.97
    assert correlation(torch.cat(estimates), truth) < correlation(torch.cat(integrals), truth)


def test_the_heads_of_a_layer_make_up_the_layer():
    clean, corrupt = sums()[0]
    metric = better_answer(clean, corrupt)
    heads = rl.attribution(clean, corrupt, metric, "blocks.*.mixed", part="b [t] ([head] d)", d=8)
    assert heads["blocks.0.mixed"].shape == (3, 4)
    whole = rl.attribution(clean, corrupt, metric, "blocks.*.mixed")
    for label in whole:
        torch.testing.assert_close(heads[label].sum(), whole[label])
        assert abs(heads.total[label] - whole.total[label]) < 1e-5
    one = rl.attribution(clean, corrupt, metric, "blocks.*.mixed", part=rl.Part("b [t] ([head] d)", d=8, head=2, t=-1))
    torch.testing.assert_close(one["blocks.1.mixed"], heads["blocks.1.mixed"][2, 2])


# ---- what comes out ----------------------------------------------------------------------------------------------------


def small():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return rl.capture(model, x()), rl.capture(model, x(1))


def test_a_score_is_the_change_times_the_gradient():
    clean, corrupt = small()
    found = rl.attribution(clean, corrupt, torch.sum)
    gradient = corrupt.grads(of=torch.sum)["tanh_1"]
    products = (clean["tanh_1"].value - corrupt["tanh_1"].value) * gradient
    assert_same(found["tanh_1_2"], products.sum())
    parts = rl.attribution(clean, corrupt, torch.sum, "tanh_1", part="[b] [c]", c=[-1, 0])
    assert_same(parts["1"], products[:, [-1, 0]])
    assert_same(rl.attribution(clean, corrupt, torch.sum, "tanh_1", part="b [c]")["1"], products.sum(0))


def test_the_metrics_of_both_runs_are_kept():
    clean, corrupt = small()
    found = rl.attribution(clean, corrupt, torch.sum)
    assert (found.clean, found.corrupt) == (clean.output.sum().item(), corrupt.output.sum().item())
    torch.testing.assert_close(found.total["output_1_4"], found.clean - found.corrupt)


def test_a_run_will_do_as_the_clean_side():
    clean, corrupt = small()
    run = clean.replay()
    assert_same(dict(rl.attribution(run, corrupt, torch.sum)), dict(rl.attribution(clean, corrupt, torch.sum)))


def test_the_largest_scores_come_first():
    clean, corrupt = small()
    found = rl.attribution(clean, corrupt, torch.sum, ["0", "1"], part="b [c]")
    top = found.top(3)
    every = torch.cat([found["0"], found["1"]])
    assert [abs(score) for _, _, score in top] == sorted(every.abs().tolist(), reverse=True)[:3]
    label, (c,), score = top[0]
    assert found[label][c].item() == score


def test_scores_are_a_table():
    clean, corrupt = small()
    found = rl.attribution(clean, corrupt, torch.sum, ["0", "1"], part="b [c]", c=[1, 3])
    frame = found.to_pandas()
    assert list(frame.columns) == ["layer", "c", "score"]
    assert list(frame["layer"]) == ["linear_1_1"] * 2 + ["tanh_1_2"] * 2 and list(frame["c"]) == [1, 3, 1, 3]
    assert frame["score"].tolist() == torch.cat([found["0"], found["1"]]).tolist()


def test_scores_are_printed_with_the_largest_first():
    clean, corrupt = small()
    found = rl.attribution(clean, corrupt, torch.sum, ["0", "1"], part="b [c]")
    head, columns, first, *_ = str(found).splitlines()
    assert (
        head
        == repr(found)
        == (f'<Attribution by patching of {found.corrupt:.6g} -> {found.clean:.6g} to 2 layers over "b [c]">')
    )
    assert columns.split() == ["layer", "c", "effect"]
    assert first.split() == [found.top(1)[0][0], str(found.top(1)[0][1][0]), f"{found.top(1)[0][2]:+.6g}"]


def test_a_layer_of_several_tensors_has_the_sum_of_their_scores():
    def model(x):
        left, right = (x * 2).split(2, 1)
        return left.sum() + 3 * right.sum()

    clean, corrupt = rl.capture(model, x()), rl.capture(model, x(1))
    for method in "patching", "integrated":
        found = rl.attribution(clean, corrupt, lambda out: out, method=method, steps=1)
        torch.testing.assert_close(found["split_1"], clean.output - corrupt.output)


# ---- what has no score --------------------------------------------------------------------------------------------------


def test_layers_without_a_gradient_or_without_the_part_are_left_out_with_the_reason():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))
    clean, corrupt = (rl.capture(model, torch.tensor([tokens])) for tokens in ([0, 1, 2], [0, 3, 2]))
    found = rl.attribution(clean, corrupt, torch.sum, part="b [t] d")
    assert list(found) == ["embedding_1_1"]
    assert_same(found["embedding_1"][[0, 2]], torch.zeros(2))
    assert found.without["input_1_0"] == "it holds int64, which has no gradient"
    assert found.without["linear_1_3"].startswith("the part at `linear_1_3`")
    with pytest.raises(rl.NoGradient, match=r"^input_1_0 has no score: it holds int64"):
        found["input_1"]


def test_a_part_that_does_not_fit_a_layer_asked_for_is_an_error():
    clean, corrupt = small()
    with pytest.raises(rl.BadPart, match=r"^the part at `tanh_1_2`: "):
        rl.attribution(clean, corrupt, torch.sum, "tanh_1", part="b [t] d")
    with pytest.raises(rl.BadPart, match="names an axis, and there is no pattern"):
        rl.attribution(clean, corrupt, torch.sum, c=3)


def test_runs_of_different_shapes_cannot_be_compared():
    _, corrupt = small()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(rl.ShapeMismatch) as error:
        rl.attribution(rl.capture(model, x(0, 5, 4)), corrupt, torch.sum, "tanh_1")
    assert str(error.value) == (
        "tanh_1_2 is (5, 4) in the clean run and (3, 4) in the corrupt one.\nCapture both on inputs of the same shapes."
    )


def test_a_run_of_another_model_lacks_layers():
    _, corrupt = small()
    with pytest.raises(rl.NoSuchLayer):
        rl.attribution(rl.capture(torch.sin, x()), corrupt, torch.sum)


def test_a_method_has_one_of_two_names():
    clean, corrupt = small()
    with pytest.raises(ValueError, match=r"^method must be 'patching' or 'integrated', not 'ig'\.$"):
        rl.attribution(clean, corrupt, torch.sum, method="ig")


def test_a_metric_gives_one_number():
    clean, corrupt = small()
    with pytest.raises(rl.BadMetric):
        rl.attribution(clean, corrupt, lambda out: out)
