"""Many replays at once give what replays one by one give."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from many_oracle import assert_at_once_is_one_by_one, packing_from, stacking_costs
from random_programs import programs
from torch import nn
from torch.nn import functional as F
from zoo import MODELS, is_refused_so, silence

import replaylens as rl

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def all_are_stacked():
    with stacking_costs(0.0):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_at_once_is_one_by_one(name):
    with silence():
        try:
            case = MODELS[name]()
            torch.manual_seed(1)
            prog = rl.capture(case.model, *case.args, **case.kwargs)
        except Exception as error:
            if not is_refused_so(name, error):
                raise
            return
        with packing_from(0.0):
            assert_at_once_is_one_by_one(prog, most=16)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_of_random_programs_too(program):
    try:
        prog = rl.capture(program, *program.inputs())
    except rl.CaptureError:
        assume(".data = " not in program.source)
        raise
    with packing_from(0.0):
        assert_at_once_is_one_by_one(prog, most=12)


class Attention(nn.Module):
    """A small transformer: causal attention, residual stream, unembedding."""

    def __init__(self, is_open: bool):
        super().__init__()
        self.is_open = is_open
        self.embed, self.unembed = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16), "mlp": nn.Linear(16, 16)}
            )
            for _ in range(3)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["out"](self.attend(block["qkv"](block["norm"](x))))
            x = x + F.gelu(block["mlp"](x))
        return self.unembed(x)

    def attend(self, qkv):
        q, k, v = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in qkv.chunk(3, -1)]
        if not self.is_open:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        mask = torch.full((q.shape[-2],) * 2, float("-inf")).triu(1)
        return ((q @ k.mT / 2 + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)


def last_logits(logits):
    return logits[:, -1, 3] - logits[:, -1, 5]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("worth", [0.0, 1e9])
def test_with_a_metric_that_reads_a_few_rows(is_open, batch, worth):
    torch.manual_seed(0)
    prog = rl.capture(Attention(is_open), torch.randint(0, 11, (batch, 7)))
    with packing_from(worth):
        for metric in (last_logits, lambda y: y[0, 2:4, :].sum(), lambda y: y.select(1, -2).amax(-1), torch.sum):
            assert assert_at_once_is_one_by_one(prog, metric, most=60) > 20


@pytest.mark.parametrize("is_open", [False, True])
def test_rows_before_a_causal_change_are_not_run(is_open):
    torch.manual_seed(0)
    prog = rl.capture(Attention(is_open), torch.randint(0, 11, (1, 64)))
    seen = []

    def change(value):
        new = value.clone()
        new[:, 60] = 0
        return new

    with packing_from(0.0):
        asked = prog.replay_many({"late": {"embedding_1": change}}, last_logits, dry=True)
        machine = asked.planned.batch.program
        step = machine.step(prog.graph.positions[prog["blocks.1.qkv"].label])
        call = step.call
        step.call = lambda values: seen.append(tuple(values[0].shape)) or call(values)
        asked.run()
    assert seen == [(1, 4, 16)]  # positions 60 to 63


def test_a_metric_that_reads_contents_in_python_runs_one_by_one_and_says_so():
    prog = rl.capture(nn.Linear(3, 3), torch.randn(2, 3))
    found = prog.replay_many(
        {1: {"linear_1": torch.zeros(2, 3)}, 2: {"linear_1": torch.ones(2, 3)}}, lambda y: y.sum().item()
    )
    assert found.values.tolist() == [0.0, 6.0]
    (note,) = found.one_by_one
    assert note.startswith("the metric: ") and " is read in Python (" in note


def assert_sweep_is_the_loop(function, inputs, site, part, patch, metric=None):
    prog = rl.capture(function, *inputs)
    found = rl.sweep(prog, site, part, patch, metric)
    for key in found:
        place = rl.Part(part, **dict(zip(found.axes[1:], key[1:])))
        output = prog.replay(patch={site: patch.within(place)}).output
        torch.testing.assert_close(found[key], output if metric is None else torch.as_tensor(metric(output)))
    return found


def test_einsum_that_repeats_an_axis_of_one():
    a, b = torch.randn(1, 2, 3, 4), torch.randn(3, 2, 3, 4)
    assert_sweep_is_the_loop(
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a * 1, b), (a, b), "mul_1", "b h [q] d", rl.Zero()
    )


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones])
def test_what_is_turned_round_is_no_row_also_where_all_numbers_are_alike(fill):
    assert_sweep_is_the_loop(lambda x: (x * 1).flip(0, 1), (fill(2, 4),), "mul_1", "b [c]", rl.Add(1.0))
    assert_sweep_is_the_loop(lambda x: (x * 1).roll(1, 1).cumsum(0), (fill(2, 4),), "mul_1", "b [c]", rl.Add(1.0))


def test_a_users_operation_is_not_torchs_of_the_same_name():
    @torch.library.custom_op("many_tests::clip", mutates_args=())
    def clip(x: torch.Tensor) -> torch.Tensor:
        return x * (1 / x.norm().clamp(min=1))

    for x in (torch.zeros(4, 5), torch.randn(4, 5) * 0.1):
        assert_sweep_is_the_loop(lambda x: clip(x * 1), (x,), "mul_1", "b [c]", rl.Add(100.0))


def test_an_edits_own_function_is_not_torchs_of_the_same_name():
    prog = rl.capture(nn.Linear(4, 4), torch.randn(3, 4)).with_patch({"linear_1": rl.Clamp(0.0, 0.1, "[b] c", b=1)})
    found = rl.sweep(prog, "input_1", "[b] c", rl.Scale(5.0))
    for key in found:
        wanted = prog.replay(patch={"input_1": rl.Scale(5.0, "[b] c", b=key[1])}).output
        torch.testing.assert_close(found[key], wanted)


def test_select_by_words():
    assert_sweep_is_the_loop(lambda x: (x * 1).select(dim=1, index=0), (torch.ones(2, 4),), "mul_1", "b [c]", rl.Zero())


def test_a_metric_may_hold_the_recorded_output_and_may_write():
    prog = rl.capture(nn.Linear(4, 3), torch.ones(2, 4))
    base = prog.output
    wanted = [(prog.replay(patch={"linear_1": rl.Zero("b [c]", c=c)}).output - base).abs().sum() for c in range(3)]
    found = rl.sweep(prog, "linear_1", "b [c]", rl.Zero(), metric=lambda y: (y - base).abs().sum())
    torch.testing.assert_close(found.values, torch.stack(wanted))
    before = base.clone()
    rl.sweep(prog, "linear_1", "b [c]", rl.Zero(), metric=lambda y: y.mul_(2).sum())
    rl.sweep(prog, "linear_1", "b [c]", rl.Zero(), metric=lambda y: y.mul_(2).sum().item())
    assert torch.equal(prog.output, before)


def test_numbers_in_the_structure_of_a_metric_are_each_variants_own():
    prog = rl.capture(lambda x: x * 2, torch.ones(2, 3))
    variants = {"a": {"mul_1": rl.Scale(0.25)}, "b": {"mul_1": rl.Scale(1.0)}, "end": {"output_1": torch.zeros(2, 3)}}
    found = rl.sweep(
        prog, variants=variants, metric=lambda y: {"loss": y.sum().item(), "most": int(y.max()), "row": y[0]}
    )
    assert found.values["loss"].tolist() == [3.0, 12.0, 0.0] and found["b"]["most"] == 2
    assert rl.sweep(prog, variants=variants, metric=lambda y: y.sum().item()).values.tolist() == [3.0, 12.0, 0.0]


def test_a_metric_that_draws_or_whose_shape_contents_decide_runs_one_by_one():
    prog = rl.capture(lambda x: x * 2, torch.tensor([1.0, -1.0, 1.0]))
    variants = {"a": {"mul_1": torch.neg}, "b": {"mul_1": torch.abs}, "none": {}}
    assert rl.sweep(prog, variants=variants, metric=lambda y: y[y > 0].sum()).values.tolist() == [2.0, 6.0, 4.0]
    drawn = rl.sweep(prog, variants=variants, metric=lambda y: torch.rand(()))
    assert len({*drawn.values.tolist()}) == 3


@pytest.mark.parametrize("variants", [{}, [], None])
def test_no_variants(variants):
    prog = rl.capture(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(rl.ReplaylensError, match=r"variants must be a non-empty mapping \{key: patches\}\."):
        prog.replay_many(variants)


def test_a_sweep_takes_a_tensor_in_the_place_of_a_factor():
    def model(x):
        one = torch.ones(1, 1, 1)
        return torch.baddbmm(one, one, one, beta=x[0], alpha=x[1])

    prog = rl.capture(model, torch.tensor([2.0, 1.0]))
    other = torch.tensor([3.0, 5.0])
    assert torch.equal(prog.replay_many({"other": {"input": other}}).values[0], model(other))


# -- facts that no content decides ---------------------------------------------------------------------------------------


class AsksForMemory(nn.Module):
    """Asks how memory lies, as attention of library models does by `contiguous` and `is_contiguous`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        h = (h if h.is_contiguous() else h * 2).transpose(0, 1).contiguous()
        return self.last(h if h.storage_offset() == 0 and h.stride()[-1] == 1 else h + 1)


class AsksForFlags(nn.Module):
    """Goes another way where no gradients are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        return self.last(h) if h.requires_grad else self.last(h) * 2


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval()


ASKING = {
    "memory": (AsksForMemory, torch.Size([4, 4])),
    "flags": (AsksForFlags, torch.Size([4, 4])),
    "encoder": (encoder, torch.Size([1, 4, 4])),
}
FAITHFUL = {
    "a scale": lambda other, site: rl.Scale(2.0),
    "a sum": lambda other, site: rl.Add(torch.ones(other[site].value.shape[-1])),
    "a part": lambda other, site: rl.Zero("... [d]", d=1),
    "a part of another": lambda other, site: rl.From(other, "... [d]", d=(0, 2)),
}
WHOLE = {
    "another": lambda other, site: rl.From(other),
    "nothing": lambda other, site: rl.Zero(),
    "a tensor": lambda other, site: torch.ones_like(other[site].value).detach(),
    "a function": lambda other, site: torch.relu,
    "a transposed tensor": lambda other, site: torch.ones_like(other[site].value).detach().mT.contiguous().mT,
    "a function that transposes": lambda other, site: lambda value: (value * 3).mT.contiguous().mT,
    "a part of a larger one": lambda other, site: lambda value: torch.stack([value, value * 2])[1],
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ASKING)
def test_variants_of_a_model_that_asks_for_what_no_content_decides_are_as_in_replays_of_their_own(name, grad):
    build, shape = ASKING[name]
    torch.manual_seed(0)
    model = build()
    with torch.set_grad_enabled(grad):
        prog, other = (rl.capture(model, torch.randn(shape)) for _ in range(2))
    sites = [call.name for call in prog.graph.calls if call.kind == "linear"]
    variants = {
        (what, site): {site: make(other, site)} for what, make in {**FAITHFUL, **WHOLE}.items() for site in sites
    }
    assert prog.graph.asked
    swept = prog.replay_many(variants)
    for key, patch in variants.items():
        alone = prog.replay(patch=patch)
        assert torch.allclose(swept[key], alone.output, rtol=1e-5, atol=1e-6), key
        assert (
            [str(swept.departures[key])] == [str(d) for d in alone.departures[:1]]
            if alone.departures
            else (key not in swept.departures)
        )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ASKING)
def test_variants_that_alter_no_answer_run_together(name, grad):
    build, shape = ASKING[name]
    model = build()
    with torch.set_grad_enabled(grad):
        prog, other = (rl.capture(model, torch.randn(shape)) for _ in range(2))
    sites = [call.name for call in prog.graph.calls if call.kind == "linear"]
    several = FAITHFUL if name != "memory" else {**FAITHFUL, "another": WHOLE["another"], "nothing": WHOLE["nothing"]}
    variants = {(what, site): {site: make(other, site)} for what, make in several.items() for site in sites}
    assert prog.replay_many(variants, dry=True).plan.variants == len(variants)


# -- how values lie in memory --------------------------------------------------------------------------------------------


class Behind(nn.Module):
    """A function behind a linear layer and a module that hooks can be on."""

    def __init__(self, function):
        super().__init__()
        self.first, self.site, self.function = nn.Linear(4, 4), nn.Identity(), function

    def forward(self, x):
        return self.function(self.site(self.first(x) * 1))


def written(view):
    """A function that writes through a view, or what may be one, of its own copy."""

    def function(h):
        h = h.softmax(0)
        view(h)[::2].mul_(-3.0)
        return h

    function.__name__ = view.__name__
    return function


THROUGH = {
    "reshape": lambda h: h.reshape(-1),
    "reshape to more axes": lambda h: h.reshape(-1, 2),
    "flatten": lambda h: h.flatten(),
    "flatten of some rows": lambda h: h[1:].flatten(),
    "ravel": lambda h: h.ravel(),
    "view": lambda h: h.view(-1),
    "reshape_as": lambda h: h.reshape_as(torch.empty(2, 6)),
    "view_as": lambda h: h.view_as(torch.empty(6, 2)),
    "contiguous": lambda h: h.contiguous(),
    "to": lambda h: h.to(torch.float32),
    "a copy of a transposed one": lambda h: h.t().reshape(-1),
    "twice": lambda h: h.t().t().flatten().narrow(0, 1, 5),
}


@pytest.mark.parametrize("way", THROUGH)
def test_writes_through_what_may_be_a_view_or_a_copy_are_those_of_the_model(way):
    torch.manual_seed(0)
    model, x = Behind(written(THROUGH[way])).eval(), torch.randn(3, 4)
    prog = rl.capture(model, x)
    factors = (0.5, -1.5, 0.0, 1.0)
    for name in ("first.weight", "first.bias"):
        found = prog.replay_many({k: {name: rl.Scale(k)} for k in factors})
        for k in factors:
            other = copy.deepcopy(model)
            with torch.no_grad():
                other.get_parameter(name).mul_(k)
                torch.testing.assert_close(found[k], other(x))
        assert not any(note.startswith("mul") for note in found.one_by_one)  # the write itself is one for all
    columns = {n: {"site": rl.Set(2.0, "a [b]", b=n)} for n in range(4)}
    found = prog.replay_many(columns)
    for n, patch in columns.items():
        torch.testing.assert_close(found[n], prog.replay(patch=patch).output)
        with hook(model.site, lambda o, n=n: torch.where(torch.arange(4) == n, 2.0, o)), torch.no_grad():
            torch.testing.assert_close(found[n], model(x))


@contextmanager
def hook(module, change):
    handle = module.register_forward_hook(lambda module, args, output: change(output))
    try:
        yield
    finally:
        handle.remove()


@torch.library.custom_op("many_tests::by_layout", mutates_args=())
def by_layout(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if x.is_contiguous() else 3.0)


class WritesInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        x.reshape(-1)[::2] = 5.0
        return x


LAID = {
    "turned": lambda o: (o * 2).t().contiguous().t(),
    "dense": lambda o: o.contiguous() * 2,
    "with gaps": lambda o: torch.stack((o, o * 3), -1)[..., 1],
    "expanded": lambda o: o[:, :1].expand(o.shape),
}
READING = {
    "dropout": lambda h: F.dropout(h, 0.5, True),
    "dropout behind others": lambda h: F.dropout(h.relu() + 1, 0.5, True),
    "dropout of a turned one": lambda h: F.dropout(h.t(), 0.5, True),
    "dropout of an expanded one": lambda h: F.dropout(h[:, :1].expand(h.shape[0], 7), 0.5, True),
    "dropout of windows": lambda h: F.dropout(h.unfold(1, 2, 1), 0.5, True),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.5, True),
    "rand_like": lambda h: h + torch.rand_like(h),
    "randint_like": lambda h: h + torch.randint_like(h, 9),
    "normal_": lambda h: (h * 1).normal_() + h,
    "exponential_ of a clone": lambda h: h.clone().exponential_() + h,
    "uniform_ of an empty one": lambda h: torch.empty_like(h).uniform_() + h,
    "an operator of a library": lambda h: by_layout(h),
    "a function of autograd": lambda h: WritesInside.apply(h),
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("what", READING)
def test_what_reads_the_memory_of_a_patched_value_reads_it_as_the_patch_laid_it(what, is_turned):
    torch.manual_seed(0)
    turn = (lambda h: h.t().contiguous().t() * 1) if is_turned else (lambda h: h)
    model, x = Behind(READING[what]), torch.randn(3, 4)
    model.site.forward = turn
    torch.manual_seed(1)
    prog = rl.capture(model, x)
    changes = {**LAID, "scaled": lambda o: o * 2.0}
    patches = {name: {"site": rl.Scale(2.0) if name == "scaled" else change} for name, change in changes.items()}
    found = prog.replay_many(patches)
    for name, change in changes.items():
        torch.manual_seed(1)
        with hook(model.site, change), torch.no_grad():
            wanted = model(x)
        torch.testing.assert_close(found[name], wanted, msg=f"{what}, {name}")
        torch.testing.assert_close(found[name], prog.replay(patch=patches[name]).output)


def test_patches_in_another_layout_before_the_dropout_of_a_transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True, norm_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), torch.randn(2, 3, 4)
    prog = rl.capture(model, x)
    sites = [layer.label for layer in prog.layers if layer.layer_type != "output" and layer.value.dim() > 1]
    patches = {site: {site: lambda value: value.contiguous() * 0.5} for site in sites}
    found = prog.replay_many(patches)
    for site, patch in patches.items():
        torch.testing.assert_close(found[site], prog.replay(patch=patch).output, msg=site)


def of_softmax(h):
    h = h.softmax(0)
    h.reshape(-1)[::3] = 5.0
    return h


def of_a_clone(h):
    h = h.clone()
    h.reshape(-1)[::3] = 5.0
    return h


def by_contiguity(h):
    return h * 2 if h.is_contiguous() else h * 3


@pytest.mark.parametrize("function", [of_softmax, of_a_clone, by_contiguity])
def test_functions_of_the_users_see_each_variant_as_its_replay_lays_it(function):
    torch.manual_seed(0)
    prog = rl.capture(Behind(torch.sin), torch.randn(3, 4))
    patches = {k: {"first.weight": rl.Scale(k)} for k in (0.5, -1.0, 2.0)}
    patches |= {name: {"first": change} for name, change in LAID.items()}
    for edited in (prog.swap("sin_1", function), prog.with_patch({"sin_1": function})):
        possible = {key: patch for key, patch in patches.items() if gives(edited, patch)}
        assert len(possible) > 4
        assert_replays(edited, possible)
    assert_replays(prog, {key: {**patch, "sin_1": function} for key, patch in patches.items()})
    with pytest.raises(rl.ReplaylensError, match="wrote into a copy"):
        prog.swap("sin_1", of_a_clone).replay_many({"turned": {"first": LAID["turned"]}})


def gives(prog, patch):
    try:
        return prog.replay(patch=patch) is not None
    except rl.ReplaylensError:
        return False


def assert_replays(prog, patches, metric=None):
    found = prog.replay_many(patches, metric)
    for key, patch in patches.items():
        output = prog.replay(patch=patch).output
        wanted = output if metric is None else torch.as_tensor(metric(output.detach().clone()))
        torch.testing.assert_close(found[key], wanted, msg=str(key), check_dtype=False)


METRICS = {
    "writes": lambda y: of_a_clone(y).sum(),
    "writes its argument": lambda y: y.reshape(-1)[::3].mul_(-3).sum() + y.sum(),
    "asks": lambda y: by_contiguity(y).sum(),
    "in Python": lambda y: of_a_clone(y).sum().item(),
    "asks in Python": lambda y: by_contiguity(y).sum().item(),
}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "last", [torch.sin, torch.t, lambda h: h[:, 1:3], lambda h: h[:, :1].expand(3, 4), lambda h: h.softmax(0)]
)
def test_metrics_see_each_output_as_its_replay_lays_it(metric, last):
    torch.manual_seed(0)
    prog = rl.capture(Behind(last), torch.randn(3, 4))
    patches = {k: {"first.weight": rl.Scale(k)} for k in (0.5, -1.0, 2.0)}
    assert_replays(prog, patches | {name: {"first": change} for name, change in LAID.items()}, METRICS[metric])
