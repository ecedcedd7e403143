"""sweep: a patch at every site and index, as a table; and what it says when it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from math import inf

import numpy as np
import pytest
import torch
from many_oracle import stacking_costs
from test_many import Attention, last_logits
from torch import nn
from torch.nn import functional as F

import replaylens as rl

torch.manual_seed(0)
model = Attention(is_open=False)
corrupt_ids, clean_ids = torch.randint(0, 11, (2, 1, 6))
clean, prog = rl.capture(model, clean_ids), rl.capture(model, corrupt_ids)
SITES = ["blocks.0.out", "blocks.1.out", "blocks.2.out"]


def hooked(site, change, metric=last_logits):
    handle = model.get_submodule(site).register_forward_hook(lambda module, args, output: change(output.clone()))
    with torch.no_grad():
        found = metric(model(corrupt_ids))
    handle.remove()
    return found


def test_every_site_and_position_is_what_a_hook_gives():
    found = rl.sweep(prog, SITES, part="b [t] d", patch=rl.From(clean), metric=last_logits)
    assert found.axes == ("site", "t") and found.names == (tuple(SITES), tuple(range(6)))
    assert found.grid.shape == (3, 6, 1) and len(found) == 18
    for site in SITES:
        for t in range(6):

            def change(output, site=site, t=t):
                output[:, t] = clean[site].value[:, t]
                return output

            torch.testing.assert_close(found[site, t], hooked(site, change))
    torch.testing.assert_close(found.baseline, last_logits(prog.output))


def test_every_head_of_a_packed_axis():
    site = "scaleddotproductattention"
    found = rl.sweep(prog, site, part="b [head] t d", patch=rl.Zero(), metric=lambda y: y[0, -1].sum())
    assert found.names[1] == (0, 1, 2, 3) and len(found.names[0]) == 3
    found = rl.sweep(prog, "blocks.1.qkv", "b t (three [head] d)", rl.Zero(), torch.sum, three=3, d=4)
    assert found.grid.shape == (1, 4)

    def second_head(output):
        output.unflatten(-1, (3, 4, 4))[..., 1, :] = 0
        return output

    torch.testing.assert_close(found["blocks.1.qkv", 1], hooked("blocks.1.qkv", second_head, torch.sum))


def test_any_list_of_variants():
    variants = {
        "none": {},
        "zero": {"blocks.0.out": rl.Zero()},
        "both": {"blocks.0.out": rl.Zero(), "blocks.2.mlp": rl.Scale(2.0)},
        "weights": {"blocks.1.mlp.weight": torch.zeros(16, 16)},
        "input": {"input_1": clean_ids},
        "all": {"layernorm": rl.Scale(0.5)},
    }
    found = rl.sweep(prog, variants=variants, metric=last_logits)
    assert found.axes == ("variant",) and list(found) == list(variants)
    for key, patch in variants.items():
        torch.testing.assert_close(found[key], last_logits(prog.replay(patch=patch).output))
    torch.testing.assert_close(found["input"], last_logits(clean.output))


def test_without_a_metric_the_outputs_are_kept():
    found = rl.sweep(prog, SITES, patch=rl.Zero())
    assert found.values.shape == (3, 1, 6, 11)
    torch.testing.assert_close(found["blocks.1.out"], prog.replay(patch={"blocks.1.out": rl.Zero()}).output)


def test_a_patch_at_the_output_itself():
    found = rl.sweep(prog, variants={"end": {"output_1": torch.zeros(1, 6, 11)}, "no": {}}, metric=torch.sum)
    assert found["end"] == 0 and found["no"] == prog.output.sum()


LATER = {
    "a function": lambda value: value - value.mean((1, 2), keepdim=True),
    "several": [rl.Scale(2.0), lambda value: value.flip(1)],
    "a mean": rl.Mean(over=(1,)),
    "other samples": rl.Resample(),
    "a direction": rl.Project(torch.eye(6)[:2] + 0.1),
    "number by number": rl.Scale(3.0) >> rl.Clamp(max=0.5),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("rows", [slice(-1, None), 1])
def test_a_later_patch_of_a_variant_reads_more_of_a_value_than_the_metric(name, rows):
    torch.manual_seed(0)
    layers = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 6)), torch.randn(3, 5, 4))
    variants = {
        "two": {"tanh_1": rl.Zero(), "linear_2": LATER[name]},
        "one": {"linear_2": LATER[name]},
        "part": {"linear_1": rl.Scale(3.0, "b [t] d", t=1), "linear_2": LATER[name]},
    }
    for metric in (lambda y: y[:, rows, 2].sum(), lambda y: y[1:2, :, 3].mean()):
        with stacking_costs(0.0):
            found = rl.sweep(layers, variants=variants, metric=metric)
        assert found.one_by_one == ()
        for key, patch in variants.items():
            torch.testing.assert_close(found[key], metric(layers.replay(patch=patch).output))


def test_a_plan_beforehand_in_forwards_and_bytes():
    asked = rl.sweep(prog, SITES, part="b [t] d", patch=rl.From(clean), metric=last_logits, dry=True)
    plan = asked.plan()
    assert (plan.variants, plan.passes, plan.largest_pass) == (18, 1, 18)
    assert 0 < plan.forwards < plan.loop_forwards < 18 and plan.peak_bytes > 0
    assert re.fullmatch(
        r"18 variants in 1 pass of up to 18: at most [\d.]+ forwards \([\d.]+ one by one\), [\d.e-]+ MB at a time",
        str(plan),
    )
    with pytest.raises(rl.ReplaylensError, match=r"created with dry=True and has not been run. Call .run\(\)."):
        asked.values
    assert "not run yet" in repr(asked)
    torch.testing.assert_close(asked.run().values, rl.sweep(prog, SITES, "b [t] d", rl.From(clean), last_logits).values)


def test_memory_bounds_a_pass():
    plans = [
        rl.sweep(prog, SITES, "b [t] d", rl.Zero(), last_logits, memory=memory, dry=True).plan()
        for memory in (20_000, 1e9)
    ]
    assert plans[0].peak_bytes <= 20_000 < plans[1].peak_bytes and plans[0].passes > plans[1].passes
    small = rl.sweep(prog, SITES, "b [t] d", rl.Zero(), last_logits, memory=20_000)
    torch.testing.assert_close(small.values, rl.sweep(prog, SITES, "b [t] d", rl.Zero(), last_logits).values)


def large_prog():
    torch.manual_seed(0)
    large = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    return rl.capture(large, torch.randn(5000, 8))


def test_variants_that_cost_less_one_by_one_are_replayed_and_the_plan_names_them():
    large = large_prog()
    variants = {
        "whole": {"linear_1": rl.Scale(2.0)},
        "whole, too": {"linear_1": rl.Zero()},
        "a column": {"tanh_1": rl.Zero("b [d]", d=1)},
        "two parts, and then the whole": {"tanh_1": [rl.Zero("[b] d", b=3), rl.Scale(2.0)]},
        "a row": {"linear_2": rl.Zero("[b] d", b=7)},
        "ten rows": {"linear_2": rl.Zero("[b] d", b=range(10))},
    }
    asked = rl.sweep(large, variants=variants, metric=torch.mean, dry=True)
    plan = asked.plan()
    assert plan.replayed == tuple(variants)[:4] and plan.replayed_from == ("linear_1_1", "tanh_1_2")
    assert (plan.variants, plan.passes, plan.largest_pass) == (6, 1, 2)
    assert re.fullmatch(
        r"2 variants in 1 pass of up to 2, 4 variants replayed one by one, which costs less, from linear_1_1, tanh_1_2:"
        r" at most [\d.]+ forwards \([\d.]+ one by one\), [\d.e-]+ MB at a time",
        str(plan),
    )
    found = asked.run()
    assert found.one_by_one == () and not found.departures
    for key, patch in variants.items():
        wanted = large.replay(patch=patch).output.mean()
        torch.testing.assert_close(found[key], wanted)
        assert key not in plan.replayed or torch.equal(found[key], wanted)
    only = rl.sweep(large, "linear_1", patch=rl.Zero(), metric=torch.mean, dry=True).plan()
    assert only.passes == 0 and str(only).startswith(
        "1 variant replayed one by one, which costs less, from linear_1_1:"
    )


def test_whole_numbers_that_lie_far_apart_have_a_digest():
    ids = torch.arange(12).view(4, 3)[2:3, 1]  # one number, and a stride of three

    def model(x):
        return F.embedding(ids, x)

    found = rl.capture(model, torch.arange(40.0).view(10, 4))
    swept = rl.sweep(found, "input_1", "[b] d", rl.Zero(), metric=torch.sum)
    assert swept.plan().passes == 1 and swept.one_by_one == ()
    for row in range(10):
        assert swept["input_1", row] == found.replay(patch={"input_1": rl.Zero("[b] d", b=row)}).output.sum()


@pytest.mark.parametrize("share", [0.0, inf])
def test_patches_and_metrics_are_called_as_often_whether_variants_are_stacked_or_replayed(share):
    large, seen = large_prog(), []

    def patch(value):
        seen.append("patch")
        return value * 2

    def metric(output):
        seen.append("metric")
        return output.mean()

    with stacking_costs(share):
        asked = rl.sweep(large, variants={n: {"linear_1": patch} for n in range(3)}, metric=metric, dry=True)
        assert bool(asked.plan().replayed) is (share == inf) and seen == ["metric"]
        asked.run()
    assert seen.count("patch") == 3 and seen.count("metric") == 3  # planned, captured, and of the baseline


@pytest.mark.parametrize("metric", [None, torch.sum, lambda y: y.sum().item(), lambda y: y.as_strided((3,), (1,))])
def test_stacked_and_replayed_are_the_same(metric):
    variants = {
        "part": {"blocks.0.out": rl.Zero("b [t] d", t=1)},
        "turned": {"blocks.1.out": lambda value: value.mT.contiguous().mT * 2},
        "two": {"blocks.0.out": rl.Scale(0.5), "blocks.2.mlp": rl.From(clean)},
        "last": {"linear_10": lambda value: value.mT.contiguous().mT * 2},
    }
    found = []
    for share in (0.0, inf):
        with stacking_costs(share):
            found.append(rl.sweep(prog, variants=variants, metric=metric))
    torch.testing.assert_close(found[0].values, found[1].values)
    for key, patch in variants.items():
        output = prog.replay(patch=patch).output
        wanted = output if metric is None else torch.as_tensor(metric(output.detach()))
        torch.testing.assert_close(found[1][key].float(), wanted.float())


def test_a_table_for_pandas():
    pandas = pytest.importorskip("pandas")
    table = rl.sweep(prog, SITES, part="b [t] d", patch=rl.Zero(), metric=last_logits).to_pandas()
    assert isinstance(table, pandas.DataFrame) and list(table.columns) == ["site", "t", "value", "change"]
    assert table.shape == (18, 4)
    assert table.change[4] == pytest.approx(table.value[4] - last_logits(prog.output).item())


def test_a_heatmap_of_what_changed():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    found = rl.sweep(prog, SITES, part="b [t] d", patch=rl.Zero(), metric=last_logits)
    ax = found.heatmap()
    assert ax.images[0].get_array().shape == (3, 6)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == SITES
    assert ax.get_xlabel() == "t" and ax.get_ylabel() == "site"


def test_the_farthest_first():
    found = rl.sweep(prog, SITES, part="b [t] d", patch=rl.Zero(), metric=last_logits)
    (first, change), *_ = found.top(3)
    assert abs(change) == (found.values - found.baseline).abs().max()
    assert str(first) in str(found) and "<Sweep of 18 variants (3 site x 6 t)>" in str(found)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        y = self.fc(x)
        return y * 2 if y.sum() > 0 else y - 1


@pytest.mark.parametrize("share", [0.0, inf])
def test_variants_that_leave_the_recorded_path(share):
    with stacking_costs(share):
        assert_variants_leave_the_recorded_path()


def assert_variants_leave_the_recorded_path():
    torch.manual_seed(0)
    branching = rl.capture(Branching(), torch.randn(2, 3))
    sign = 1.0 if branching.output.sum() > -6 and branching.guards[0].result else -1.0
    variants = {
        "stays": {"fc": rl.Set(torch.full((2, 3), sign))},
        "leaves": {"fc": rl.Set(torch.full((2, 3), -sign))},
    }
    with pytest.raises(
        rl.DivergedReplay, match="in the variant 'leaves', the change leads away from the recorded path"
    ):
        rl.sweep(branching, variants=variants, metric=torch.sum, on_divergence="raise")
    found = rl.sweep(branching, variants=variants, metric=torch.sum, on_divergence="ignore")
    assert list(found.departures) == ["leaves"] and "1 left the recorded path" in repr(found)
    for key, patch in variants.items():
        assert found[key] == branching.replay(patch=patch, on_divergence="ignore").output.sum()


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({}, rl.ReplaylensError, "give either sites and a patch, or variants="),
        ({"sites": SITES}, rl.ReplaylensError, "a sweep over sites needs a patch"),
        ({"variants": {}}, rl.ReplaylensError, "there are no variants to run"),
        ({"variants": {1: {}}, "patch": rl.Zero()}, rl.ReplaylensError, "variants already contain their patches"),
        ({"variants": {1: {}, (1, 2): {}}}, rl.ReplaylensError, "must all have the same length"),
        ({"sites": ["nowhere"], "patch": rl.Zero()}, rl.NoSuchLayer, "no layer is called 'nowhere'"),
        (
            {"sites": [*SITES, SITES[0]], "patch": rl.Zero()},
            rl.ReplaylensError,
            "blocks.0.out occurs twice among the sites",
        ),
        (
            {"sites": SITES, "patch": rl.Zero(), "d": 3},
            rl.BadPart,
            "d: these are axes of a pattern, but there is none",
        ),
        ({"sites": SITES, "part": "b [t]", "patch": rl.Zero()}, rl.BadPart, "b \\[t\\]"),
        (
            {"sites": SITES, "part": "b [t] d", "patch": rl.Zero("b [t] d", t=1)},
            rl.BadPart,
            "has a part already",
        ),
        ({"variants": {1: {"blocks.0.out": torch.zeros(2)}}}, rl.ShapeMismatch, "Give a tensor of shape"),
    ],
)
def test_mistakes_are_answered(asked, error, text):
    with pytest.raises(error, match=text):
        rl.sweep(prog, **asked)


def test_a_metric_that_reads_something_else_now_is_another_metric():
    chosen, weights = [3], torch.ones(11)
    metric = lambda y: (y[:, -1] * weights)[:, chosen[0]]  # noqa: E731
    for change in (lambda: None, lambda: chosen.__setitem__(0, 5), lambda: weights.mul_(2.0)):
        change()
        found = rl.sweep(prog, SITES, patch=rl.Zero(), metric=metric)
        for site in SITES:
            torch.testing.assert_close(found[site], metric(prog.replay(patch={site: rl.Zero()}).output))


def test_the_metrics_own_error_is_its_own():
    with pytest.raises(IndexError):
        rl.sweep(prog, SITES, patch=rl.Zero(), metric=lambda y: y[:, 99])


def test_nothing_of_the_program_or_the_generators_changes():
    state, values = torch.get_rng_state(), {key: value.clone() for key, value in prog.state.items()}
    rl.sweep(prog, SITES, part="b [t] d", patch=rl.Noise(0.1), metric=last_logits)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, prog.state[key]) for key, value in values.items())
    assert torch.equal(prog.replay().output, prog.output)


CHOSEN, ANSWERS, MASK = torch.arange(3), torch.tensor([1, 0, 4]), torch.tensor([True, False, True])
YES, NO = torch.tensor(True), torch.tensor(False)
INDEXING = {
    "tensors": lambda y: y[CHOSEN, -1, ANSWERS].mean(),
    "tensors_made_there": lambda y: y[torch.arange(3), -1, torch.tensor([1, 0, 4])],
    "lists": lambda y: y[[0, 1, 2], -1, [1, 0, 4]].sum(),
    "a_mask": lambda y: y[MASK].sum(),
    "a_mask_and_a_number": lambda y: y[MASK, -1, 2],
    "a_mask_of_two_axes": lambda y: y[:, -1][MASK[:, None].expand(3, 5)].sum(),
    "places_of_a_mask": lambda y: y[MASK.nonzero()[:, 0], 0],
    "gather": lambda y: y[:, -1].gather(1, ANSWERS[:, None]).mean(),
    "a_number_of_a_tensor": lambda y: y[0, -1, ANSWERS[0].item()],
    "an_int_of_a_tensor": lambda y: y[0, -1, int(ANSWERS[2])],
    "a_slice_to_a_tensor": lambda y: y[:, : ANSWERS[2]].sum(),
    "a_list_of_a_tensor": lambda y: sum(y[n, -1, answer] for n, answer in enumerate(ANSWERS.tolist())),
    "a_branch_on_a_mask": lambda y: y.sum() if MASK.any() else y.mean(),
    "a_mask_without_axes": lambda y: y[YES].sum(),
    "a_mask_without_axes_whole": lambda y: y[YES],
    "a_mask_without_axes_that_is_false": lambda y: y[NO],
    "a_python_bool": lambda y: y[True],
    "a_python_bool_that_is_false": lambda y: y[False],
    "a_mask_without_axes_and_a_tensor": lambda y: y[YES, ANSWERS % 3],
    "a_tensor_and_a_mask_without_axes": lambda y: y[CHOSEN, YES],
    "a_mask_without_axes_and_a_slice": lambda y: y[YES, 1:],
    "a_mask_without_axes_behind_an_ellipsis": lambda y: y[..., YES],
    "a_mask_without_axes_between": lambda y: y[MASK, YES, :, ANSWERS[1:]],
    "a_mask_without_axes_and_a_mask": lambda y: y[YES, MASK],
    "two_masks_without_axes": lambda y: y[YES, YES] + y[YES, True],
    "a_mask_without_axes_made_there": lambda y: y[MASK.any()],
    "a_mask_without_axes_of_a_number": lambda y: y.sum()[YES],
    "a_mask_of_three_axes": lambda y: y[None, (MASK[:, None, None] & (torch.arange(5) > 1)).expand(3, 4, 5)],
    "several": lambda y: {"a": y[CHOSEN, -1, ANSWERS], "b": y[MASK]},
}


@pytest.mark.parametrize("name", INDEXING)
def test_a_metric_that_indexes_by_tensors_of_its_own_runs_for_all_at_once(name):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
    prog, metric = rl.capture(model, torch.randn(3, 4, 4)), INDEXING[name]
    found = rl.sweep(prog, ["0", "1"], "b [t] d", rl.Zero(), metric=metric)
    assert found.one_by_one == ()
    for key in found:
        wanted = metric(prog.replay(patch={key[0]: rl.Zero("b [t] d", t=key[1])}).output)
        for got, one in zip(*[torch.utils._pytree.tree_leaves(tree) for tree in (found[key], wanted)], strict=True):
            assert got.shape == one.shape and torch.allclose(got, one)


def test_metrics_that_index_by_arrays_of_numpy_follow_one_another():
    torch.manual_seed(2)
    model, x = nn.Linear(4, 5), torch.randn(3, 4)
    prog, variants = rl.capture(model, x), {k: {"linear_1": rl.Scale(k)} for k in (1.0, 2.0)}
    for mask in ([True, False, True], [True, True, False]):
        found = rl.sweep(prog, variants=variants, metric=lambda y, mask=mask: y[np.array(mask)].sum())
        assert found.values.tolist() == pytest.approx([(model(x) * k)[mask].sum().item() for k in variants])


class Tapped(nn.Module):
    """`function(value, x)` of a value that is patched at `tap`."""

    def __init__(self, function):
        super().__init__()
        self.tap, self.function = nn.Tanh(), function

    def forward(self, x):
        return self.function(self.tap(x), x)


def quantized(scale, x):
    return torch.quantize_per_tensor(x, scale, torch.tensor(0), torch.qint8).dequantize()


ONE, ROWS, DOWN = torch.tensor([0]), torch.tensor([[0], [1]]), torch.ones(12, 4) * 0.1
ONE_NUMBER = {
    "index_fill": lambda h, x: x.index_fill(0, ONE, h.sum()),
    "index_fill_of_both": lambda h, x: h.index_fill(0, ONE, h.sum()),
    "index_fill_with_integers": lambda h, x: x.long().index_fill(0, ONE, (h.sum() * 9).long()),
    "index_fill_with_bools": lambda h, x: (x > 0).index_fill(0, ONE, h.sum() > 0) * 1.0,
    "index_fill_in_place": lambda h, x: (x * 1).index_fill_(0, ONE, h.mean()),
    "masked_fill": lambda h, x: x.masked_fill(x > 0, h.sum()),
    "masked_fill_with_integers": lambda h, x: x.long().masked_fill(x > 0, (h.sum() * 9).long()),
    "fill": lambda h, x: torch.fill(x, h.sum()),
    "fill_in_place": lambda h, x: (x * 1).fill_(h.sum()),
    "clamp": lambda h, x: x.clamp(h.min(), h.max()),
    "alpha": lambda h, x: torch.add(x, x, alpha=h.mean()),
    "the_value_of_addcmul": lambda h, x: torch.addcmul(x, x, x, value=h.mean()),
    "the_alpha_of_index_add": lambda h, x: torch.index_add(x, 0, ONE, x[:1], alpha=h.mean()),
    "index_put": lambda h, x: torch.index_put(x, (ONE,), h.sum()),
    "lerp": lambda h, x: torch.lerp(x, x * 2, h.mean()),
    "a_power": lambda h, x: x.abs() ** h.abs().mean(),
    "linspace": lambda h, x: torch.linspace(h.min(), h.max(), 5),
    "quantile": lambda h, x: torch.quantile(x, h.sigmoid()[0, 0]),
    "narrow": lambda h, x: x.narrow(1, (h.sum() > 0).long(), 2),
    "foreach": lambda h, x: torch._foreach_mul([x, x * 2], h.mean())[1],
    "offsets": lambda h, x: nn.functional.embedding_bag(
        (x > 0).long().flatten(), x, offsets=torch.stack([ONE[0], (h.sum() > 0).long() + 2])
    ),
    "a_fake_scale": lambda h, x: torch.fake_quantize_per_tensor_affine(
        x, h.abs().max() / 127 + 0.01, ONE.int(), -128, 127
    ),
    "a_scale_found_by_torch": lambda h, x: torch.quantize_per_tensor_dynamic(h, torch.qint8, False).dequantize(),
    "a_scale_that_is_read": lambda h, x: torch._choose_qparams_per_tensor(h)[0] * x,
    "a_scale_that_is_a_tensor": lambda h, x: quantized(h.abs().max() / 127 + 0.01, x),
    "scales_of_channels": lambda h, x: torch.quantize_per_channel(
        x, h.abs().amax(1) / 127 + 0.01, torch.zeros(2).long(), 0, torch.qint8
    ).dequantize(),
    "a_scale_that_is_fixed": lambda h, x: torch.quantize_per_tensor(h, 0.05, 0, torch.qint8).dequantize(),
}
X = torch.tensor([[1.0, -2.0, 3.0, 0.5], [-0.3, 0.7, 2.0, -1.0]])


@pytest.mark.filterwarnings("ignore:.*quanti")
@pytest.mark.parametrize("has_metric", [False, True])
@pytest.mark.parametrize("name", ONE_NUMBER)
def test_a_tensor_that_is_read_as_one_number_is_another_one_in_each_variant(name, has_metric):
    model = Tapped(ONE_NUMBER[name])
    metric = (lambda y: y.double().abs().sum()) if has_metric else None
    variants = {k: {"tap": rl.Scale(k)} for k in (0.5, -1.0, 3.0)}
    found = rl.sweep(rl.capture(model, X), variants=variants, metric=metric)
    for k in variants:
        with model.tap.register_forward_hook(lambda module, args, output, k=k: output * k):
            wanted = model(X)
        torch.testing.assert_close(found[k], wanted if metric is None else metric(wanted))


class Adding(torch.Tensor):
    """A tensor of which a product is one more."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out + 1 if func is torch.Tensor.mul else out


class Named(torch.Tensor):
    pass


def test_what_a_class_of_tensors_makes_of_torchs_functions_is_made_in_sweeps():
    model = Tapped(lambda h, x: h.as_subclass(Adding).mul(2))
    found = rl.sweep(rl.capture(model, X), variants={1: {"tap": rl.Scale(0.5)}}, metric=torch.sum)
    torch.testing.assert_close(found[1], (X.tanh() + 1).sum())
    assert "Adding" in str(found.one_by_one)


def test_a_class_of_tensors_that_makes_nothing_else_of_them_goes_together():
    model = Tapped(lambda h, x: h.as_subclass(Named).mul(2))
    found = rl.sweep(rl.capture(model, X), variants={1: {"tap": rl.Scale(0.5)}}, metric=torch.sum)
    torch.testing.assert_close(found[1], X.tanh().sum().as_subclass(Named))
    assert found.one_by_one == ()


def test_a_metric_that_quantises_or_makes_a_class_of_tensors_is_asked_of_each_variant():
    prog = rl.capture(Tapped(lambda h, x: h * 2), X)
    variants = {k: {"tap": rl.Scale(k)} for k in (0.5, -1.0, 3.0)}
    metrics = [lambda y: y.as_subclass(Adding).mul(2), lambda y: y.index_fill(0, ONE, y.sum())]
    for metric in metrics:
        found = rl.sweep(prog, variants=variants, metric=metric)
        for k in variants:
            torch.testing.assert_close(found[k], metric(X.tanh() * k * 2), check_dtype=False)


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        (lambda y: y.sum().item(), "is read in Python"),
        (lambda y: y[y > 0].sum(), "has a shape that depends on contents"),
        (lambda y: y.sum() * torch.rand(()), "draws random numbers, by rand"),
        (lambda y: y.shape[0], "gives what is no tensor"),
    ],
)
def test_a_metric_that_runs_one_by_one_says_why(metric, why):
    prog = rl.capture(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), torch.randn(3, 4))
    (note,) = rl.sweep(prog, ["0", "1"], patch=rl.Zero(), metric=metric).one_by_one
    assert note.startswith("the metric: ") and why in note


# ---- sweeps among sweeps ---------------------------------------------------------------------------------------------


def _lesions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    prog = rl.capture(model, torch.randn(3, 4))
    early = {d: {"linear_1": rl.Zero("b [d]", d=d)} for d in range(4)}
    late = {d: {"linear_2": rl.Zero("b [d]", d=d)} for d in range(3)}
    return prog, early, late


def _one_by_one(prog, variants):
    return {key: float(prog.replay(patch=patch).output.sum()) for key, patch in variants.items()}


def _as_numbers(sweep):
    return {key: pytest.approx(float(sweep[key]), rel=1e-6) for key in sweep.keys}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the last first"])
def test_planned_sweeps_of_one_program_know_nothing_of_each_other(order):
    prog, *variants = _lesions()
    planned = [rl.sweep(prog, variants=some, metric=torch.sum, dry=True) for some in variants]
    for number in order:
        assert _one_by_one(prog, variants[number]) == _as_numbers(planned[number].run())


def test_a_patch_that_sweeps_the_same_program():
    prog, early, late = _lesions()

    def halved(value):
        rl.sweep(prog, variants=late)
        return value * 0.5

    made = rl.sweep(prog, variants={"half": {"linear_1": halved}, "double": {"linear_1": rl.Scale(2.0)}, **early})
    wanted = {"half": {"linear_1": rl.Scale(0.5)}, "double": {"linear_1": rl.Scale(2.0)}, **early}
    for key, patch in wanted.items():
        torch.testing.assert_close(made[key], prog.replay(patch=patch).output)


def test_a_metric_that_sweeps_the_same_program():
    prog, early, late = _lesions()

    def metric(output):
        rl.sweep(prog, variants=late)
        return output.sum().item()

    made = rl.sweep(prog, variants=early, metric=metric, memory=1.0)  # in several passes
    assert _one_by_one(prog, early) == _as_numbers(made)


@pytest.mark.parametrize("how", ["sweep", "replay_many"])
def test_a_metric_that_changes_after_the_plan_is_the_one_that_runs(how):
    prog, early, _ = _lesions()
    weight, factor = torch.ones(3), [2.0]

    def metric(output):
        return (output * weight * factor[0]).sum()

    planned = (rl.sweep if how == "sweep" else rl.Program.replay_many)(prog, variants=early, metric=metric, dry=True)
    weight.fill_(5.0)
    factor[0] = 3.0
    made = planned.run()
    wanted = torch.stack([metric(prog.replay(patch=patch).output) for patch in early.values()])
    torch.testing.assert_close(made.values, wanted)
    torch.testing.assert_close(made.baseline, metric(prog.output))


class RoundsWhatIsSmall(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        y = self.l(x)
        return (y.double() * 10 + 1).round().long() if y.sum() < 4 else y.sigmoid()


def test_a_variant_that_departs_to_another_dtype_is_not_rounded():
    torch.manual_seed(0)
    prog = rl.capture(RoundsWhatIsSmall(), torch.randn(2, 4))
    variants = {"same": {"l": rl.Scale(0.5)}, "departs": {"l": rl.Set(torch.full((2, 4), 0.8))}}
    for metric in (None, torch.sum):
        made = rl.sweep(prog, variants=variants, metric=metric)
        for key, patch in variants.items():
            output = prog.replay(patch=patch).output
            torch.testing.assert_close(made[key], (output if metric is None else output.sum()).to(made.values.dtype))


def test_a_metric_of_whole_numbers_and_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Doubles()).eval()
    prog = rl.capture(model, torch.randn(2, 4))

    def share(output):
        found = (output > 50).float().mean().item()
        return found or 0

    variants = {"same": {"0": rl.Scale(0.5)}, "departs": {"0": rl.Set(torch.tensor([[30.0, 30.0, 30.0, 20.0]] * 2))}}
    made = rl.sweep(prog, variants=variants, metric=share)
    assert [made[key].item() for key in variants] == [0, 0.75]


class Doubles(nn.Module):
    def forward(self, y):
        return y if y.sum() < 100 else y * 2


def test_numbers_that_no_common_dtype_holds_are_refused():
    torch.manual_seed(0)
    prog = rl.capture(RoundsWhatIsSmall(), torch.randn(2, 4))
    large = rl.Set(torch.full((2, 4), -float(2**24 + 2)))
    with pytest.raises(rl.DivergedReplay, match=r"tensors of the dtypes \[torch.float32\]"):
        rl.sweep(prog, variants={"large": {"l": large}, "departs": {"l": rl.Set(torch.full((2, 4), 0.8))}})


class GivesTwoInSomeOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.o = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.l(x)
        return {"a": self.o(y), "b": y} if y.sum() > 0 else {"b": y, "a": self.o(y)}


def gain_and_loss(output):
    gain, loss = output["b"].max().item(), output["b"].min().item()
    return {"gain": gain, "loss": loss} if gain > 3 else {"loss": loss, "gain": gain}


@pytest.mark.parametrize("metric", [None, gain_and_loss], ids=["the output", "a metric"])
def test_results_are_put_together_by_their_keys(metric):
    torch.manual_seed(0)
    prog = rl.capture(GivesTwoInSomeOrder(), torch.randn(2, 4))
    variants = {number: {"l": rl.Add(number)} for number in (-5.0, 5.0)}
    made = rl.sweep(prog, variants=variants, metric=metric)
    for key, patch in variants.items():
        output = prog.replay(patch=patch).output
        wanted = output if metric is None else {k: torch.tensor(v).double() for k, v in metric(output).items()}
        torch.testing.assert_close(made[key], wanted)


def test_a_metric_that_gives_other_words_for_other_variants_is_refused():
    torch.manual_seed(0)
    prog = rl.capture(GivesTwoInSomeOrder(), torch.randn(2, 4))

    def metric(output):
        total = output["b"].sum().item()
        return ("up" if total > 0 else "down", total)

    with pytest.raises(rl.ReplaylensError, match=r"(one structure for all variants|another structure)"):
        rl.sweep(prog, variants={number: {"l": rl.Add(number)} for number in (-5.0, 5.0)}, metric=metric)


# ---- functions that keep something -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, inf], ids=["stacked", "replayed"])
@pytest.mark.parametrize("at", [("linear_1",), ("linear_1", "relu_1")], ids=["one site", "two sites"])
def test_a_patch_function_may_fill_one_tensor_again_and_again(at, share):
    prog, *_ = _lesions()
    kept = torch.empty(3, 4)

    def scaled(factor):
        return lambda value: kept.copy_(value.detach() * factor)

    variants = {(site, factor): {site: scaled(factor)} for site in at for factor in (0.0, 1.0, 2.0, 3.0)}
    with stacking_costs(share):
        made = rl.sweep(prog, variants=variants, metric=torch.sum)
    assert _one_by_one(prog, variants) == _as_numbers(made)


@pytest.mark.parametrize("rate", [0.0, 0.1], ids=["draws nothing", "draws itself"])
def test_a_patch_function_draws_from_the_users_generator(rate):
    """In each pass, and in each sweep, other numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate) if rate else nn.ReLU(), nn.Linear(8, 8)).train()
    prog = rl.capture(model, torch.randn(4, 8))
    variants = {number: {"linear_1": lambda value: value + torch.randn(value.shape)} for number in range(20)}
    torch.manual_seed(7)
    first, second = (rl.sweep(prog, variants=variants, metric=torch.sum, memory=1000.0) for _ in range(2))
    assert first.plan().passes > 1 or first.plan().replayed
    assert len({*first.values.tolist(), *second.values.tolist()}) == 40
    torch.manual_seed(7)
    torch.testing.assert_close(rl.sweep(prog, variants=variants, metric=torch.sum, memory=1000.0).values, first.values)


def test_a_metric_may_fill_one_tensor_again_and_again():
    prog, early, _ = _lesions()
    kept = torch.zeros(2)

    def metric(output):
        kept[0], kept[1] = output.sum().item(), output.max().item()
        return kept

    made = rl.sweep(prog, variants=early, metric=metric)
    for key, patch in early.items():
        torch.testing.assert_close(made[key], metric(prog.replay(patch=patch).output))
    torch.testing.assert_close(made.baseline, metric(prog.output))


def test_a_metric_of_complex_numbers():
    prog, early, _ = _lesions()

    def metric(output):
        return output.sum().item(), complex(output[0, 0].item(), 1.0)

    made = rl.sweep(prog, variants=early, metric=metric)
    for key, patch in early.items():
        wanted = metric(prog.replay(patch=patch).output)
        assert [part.item() for part in made[key]] == [pytest.approx(part, rel=1e-6) for part in wanted]


@pytest.mark.parametrize("other", [lambda y: y.mean(0).numpy(), lambda y: Fraction(1, 3)], ids=["array", "fraction"])
def test_what_is_neither_a_tensor_nor_a_number_is_refused_beside_one(other):
    prog, early, _ = _lesions()
    with pytest.raises(rl.BadMetric, match=r"a metric must give tensors or numbers, not (ndarray|Fraction)"):
        rl.sweep(prog, variants=early, metric=lambda output: (output.sum().item(), other(output.detach())))


def test_patch_functions_may_hand_a_value_on():
    """As two hooks do, by what both refer to."""
    prog, *_ = _lesions()
    kept = {}

    def keep(value):
        kept["before"] = value
        return value

    variants = {
        number: {"linear_1": rl.Add(number) >> rl.Apply(keep), "relu_1": lambda value: F.gelu(kept["before"])}
        for number in (-1.0, 0.0, 1.0)
    }
    made = rl.sweep(prog, variants=variants, metric=torch.sum)
    assert _one_by_one(prog, variants) == _as_numbers(made)
    assert "linear_1_1: one patch function may read what another one kept" in made.one_by_one


def test_plain_functions_at_several_places_are_stacked():
    prog, *_ = _lesions()
    variants = {n: {"linear_1": lambda v, n=n: v * n, "relu_1": torch.tanh} for n in range(3)}
    made = rl.sweep(prog, variants=variants, metric=torch.sum)
    assert _one_by_one(prog, variants) == _as_numbers(made) and made.one_by_one == ()


def test_a_given_tensor_is_as_it_was_when_its_variant_began():
    """A function of a later variant fills it."""
    prog, *_ = _lesions()
    given = torch.ones(3, 4)
    fills = lambda value: given.fill_(100.0) * 0 + value.detach()  # noqa: E731
    variants = {"set": {"linear_1": rl.Set(given)}, "fills": {"linear_1": fills}}
    wanted = _one_by_one(prog, variants)
    given.fill_(1.0)
    with stacking_costs(0.0):
        assert wanted == _as_numbers(rl.sweep(prog, variants=variants, metric=torch.sum))


def test_last_bits_do_not_depend_on_whether_the_user_has_called_vmap():
    """Whose first call registers rules with torch. So it is asked in a process of its own."""
    script = (
        "import torch, replaylens as rl\n"
        "from torch.nn import functional as F\n"
        "torch.manual_seed(0)\n"
        "x, labels = torch.randn(3, 4), torch.tensor([0, 2, 3])\n"
        "prog = rl.capture(lambda x: F.cross_entropy(x * 1, labels), x)\n"
        "variants = {n: {'mul_1': rl.Scale(n / 7)} for n in range(40)}\n"
        "first = prog.replay_many(variants).values\n"
        "torch.func.vmap(lambda row: row + 1)(x)\n"
        "again = rl.capture(lambda x: F.cross_entropy(x * 1, labels), x)\n"
        "assert torch.equal(again.replay_many(variants).values, first)\n"
    )
    made = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
