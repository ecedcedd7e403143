"""Patches on programs: which sites a key means, what a reference has there, and that a replay with a patch is what a
hook on the model that does the same by hand gives: values, gradients, batches.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from einops import rearrange
from oracle import assert_same
from torch import nn
from torch.nn import functional as F

import replaylens as rl


def x(*shape, seed=0):
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))


def said(kind, action):
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / 2).softmax(-1)
        return self.out(rearrange(weights @ v, "b h t d -> b t (h d)"))


class Transformer(nn.Module):
    """Two blocks, so that addresses, types and labels all name several layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(8), "attn": Attention(), "mlp": nn.Sequential(nn.Linear(8, 8), nn.GELU())}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x))
            x = x + block["mlp"](x)
        return self.head(x)


def transformer(seed=0):
    torch.manual_seed(seed)
    return Transformer()


MODEL = transformer()
LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if 'x + block["mlp"](x)' in line)
CLEAN, CORRUPT = x(4, 6, 8), x(4, 6, 8, seed=1)
PROG, OTHER = rl.capture(MODEL, CLEAN), rl.capture(MODEL, CORRUPT)


def hooked(model, address, change, *inputs, grad=False):
    """What the model gives when a forward hook replaces one module's output."""
    handle = model.get_submodule(address).register_forward_hook(lambda module, args, out: change(out))
    try:
        with torch.set_grad_enabled(grad):
            return model(*inputs)
    finally:
        handle.remove()


def placed(value, index, new):
    made = value.clone()
    made[index] = new
    return made


def along(value, *rows):
    return sum((value @ row / (row @ row))[..., None] * row for row in rows)


SITE = "blocks.1.mlp"
RECORDED, THERE = PROG[SITE].value, OTHER[SITE].value
V = x(8, seed=2)
ROWS = torch.linalg.qr(x(8, 2, seed=3)).Q.mT.contiguous()
LAST = (slice(None), -1)
HEAD = (slice(None), slice(None), slice(4, 8))  # "b t ([head] d)", head=1, d=4
ORDER = [3, 0, 1, 2]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


BY_HAND = {
    "set": (rl.Set(THERE), lambda y: THERE),
    "set_number": (rl.Set(1), lambda y: torch.ones_like(y)),
    "set_part": (rl.Set(V, "b [t] d", t=-1), lambda y: placed(y, LAST, V)),
    "zero": (rl.Zero(), lambda y: 0 * y),
    "zero_head": (rl.Zero("b t ([head] d)", head=1, d=4), lambda y: placed(y, HEAD, 0)),
    "mean": (rl.Mean(), lambda y: y.mean(0, keepdim=True).expand_as(y)),
    "mean_names": (rl.Mean("b t", part="b t [d]", d=3), lambda y: placed(y, (..., 3), y[..., 3].mean())),
    "mean_of_program": (rl.Mean(of=OTHER), lambda y: THERE.mean(0).expand_as(y)),
    "from_program": (rl.From(OTHER), lambda y: THERE),
    "from_part": (rl.From(OTHER, "b [t] d", t=[2, 0]), lambda y: placed(y, (slice(None), [2, 0]), THERE[:, [2, 0]])),
    "resample": (rl.Resample(ORDER), lambda y: y[ORDER]),
    "add": (rl.Add(V), lambda y: y + V),
    "add_part": (rl.Add(V, "b [t] d", t=-1), lambda y: placed(y, LAST, y[:, -1] + V)),
    "scale": (rl.Scale(0.5), lambda y: y * 0.5),
    "noise": (rl.Noise(0.1, seed=7), lambda y: y + 0.1 * drawn(4, 6, 8, seed=7)),
    "clamp": (rl.Clamp(max=0.1), lambda y: y.clamp(max=0.1)),
    "project": (rl.Project(V, off=True), lambda y: y - along(y, V)),
    "rotate": (rl.Rotate(ROWS, rl.From(OTHER)), lambda y: y + (THERE - y) @ ROWS.T @ ROWS),
    "apply": (rl.Apply(torch.tanh, "b [t] d", t=0), lambda y: placed(y, (slice(None), 0), y[:, 0].tanh())),
    "chain": (rl.Zero("b [t] d", t=0) >> rl.Add(V), lambda y: placed(y, (slice(None), 0), 0) + V),
    "list": ([rl.Scale(2.0), torch.sin], lambda y: (2 * y).sin()),
    "tensor": (THERE, lambda y: THERE),
    "layer": (OTHER[SITE], lambda y: THERE),
    "function": (torch.cos, torch.cos),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_patch_is_a_hook_that_does_the_same_by_hand(name):
    patch, change = BY_HAND[name]
    wanted = hooked(MODEL, SITE, change, CLEAN)
    torch.testing.assert_close(PROG.replay(patch={SITE: patch}).output, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(PROG.replay(from_=SITE, patch=patch).output, wanted, rtol=1e-5, atol=1e-5)
    run = PROG.replay(patch={SITE: patch}, keep="all")
    torch.testing.assert_close(run[SITE], change(RECORDED.clone()), rtol=1e-5, atol=1e-5)
    assert_same(PROG[SITE].value, RECORDED)


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_go_through_a_patch_as_through_the_hook(name):
    patch, change = BY_HAND[name]
    ours, plain = (CLEAN.clone().requires_grad_() for _ in range(2))
    weights = [*MODEL.parameters()]
    got = torch.autograd.grad(
        PROG.replay(ours, patch={SITE: patch}, grad=True).output.square().sum(), (ours, *weights), allow_unused=True
    )
    wanted = torch.autograd.grad(
        hooked(MODEL, SITE, change, plain, grad=True).square().sum(), (plain, *weights), allow_unused=True
    )
    for one, other in zip(got, wanted, strict=True):
        zero = torch.zeros(())  # a hook's 0 * y has a gradient of zeros, where a Zero has none
        torch.testing.assert_close(
            one if one is not None else zero.expand_as(other if other is not None else zero),
            other if other is not None else zero.expand_as(one if one is not None else zero),
            rtol=1e-4,
            atol=1e-4,
        )


def test_gradients_reach_what_is_in_a_patch():
    v, k, basis, source = (t.clone().requires_grad_() for t in (V, torch.tensor(0.5), ROWS, THERE))
    patch = rl.Rotate(basis, rl.From(source)) >> rl.Add(v, "b [t] d", t=-1) >> rl.Scale(k)
    got = torch.autograd.grad(PROG.replay(patch={SITE: patch}, grad=True).output.sum(), (v, k, basis, source))

    def change(y):
        y = y + (source - y) @ basis.T @ basis
        return placed(y, LAST, y[:, -1] + v) * k

    wanted = torch.autograd.grad(hooked(MODEL, SITE, change, CLEAN, grad=True).sum(), (v, k, basis, source))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_go_from_one_run_into_another():
    start = CLEAN.clone().requires_grad_()
    first = PROG.replay(start, grad=True)
    OTHER.replay(patch={SITE: rl.From(first)}, grad=True).output.sum().backward()
    plain = CLEAN.clone().requires_grad_()
    kept = []
    hooked(MODEL, SITE, lambda y: kept.append(y) or y, plain, grad=True)
    hooked(MODEL, SITE, lambda y: kept[0], CORRUPT, grad=True).sum().backward()
    torch.testing.assert_close(start.grad, plain.grad)


def test_a_direction_of_distributed_interchange_can_be_learned():
    """The one direction that carries the answer is found by gradients through replays alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.orthogonal_(model[0].weight)
    base, source = rl.capture(model, x(32, 4)), rl.capture(model, x(32, 4, seed=1))
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    for _ in range(300):
        swapped = base.replay(patch={"0": rl.Rotate(layer.weight, rl.From(source))}, grad=True).output
        loss = (swapped - source.output.detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-4
    found = layer.weight.detach()[0] @ model[1].weight.detach()[0] / model[1].weight.detach().norm()
    assert abs(found) > 0.99


# ---- many at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda v: rl.Set(v, "b [t] d", t=-1),
        lambda v: rl.Set(v.expand(4, 6, 8)),
        lambda v: rl.Add(v),
        lambda v: rl.Scale(v[0]),
        lambda v: lambda y: y * v,
        lambda v: rl.From(THERE * v),
        lambda v: rl.Noise(v.abs(), "b [t] d", t=0),
        lambda v: rl.Project(v, off=True),
    ],
)
def test_a_replay_may_be_vmapped_over_what_is_in_its_patch(make):
    vs = x(5, 8)

    def output(v):
        return PROG.replay(patch={SITE: make(v)}).output

    got = torch.func.vmap(output)(vs)
    torch.testing.assert_close(got, torch.stack([output(v) for v in vs]), rtol=1e-5, atol=1e-5)


def test_a_replay_may_be_differentiated_by_a_transform_through_its_patch():
    def loss(v):
        return PROG.replay(patch={SITE: rl.Add(v, "b [t] d", t=-1)}, grad=True).output.square().sum()

    vs = x(3, 8)
    v = vs[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(v), v)
    torch.testing.assert_close(torch.func.grad(loss)(vs[0]), wanted)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(vs)[0], wanted)


def test_a_transform_may_be_the_first_to_look_at_a_program():
    prog = rl.capture(MODEL, CLEAN)
    torch.func.vmap(lambda k: prog.replay(patch={SITE: rl.Scale(k)}).output)(x(2))
    assert_same(prog.replay().output, PROG.output)
    prog.replay(grad=True).output.sum().backward()


def test_a_patch_goes_before_a_function_of_a_program():
    function, patch = PROG.function(inputs=[SITE]), rl.Zero("b t ([head] d)", head=1, d=4)
    values = torch.stack([RECORDED, THERE])
    wanted = torch.stack([PROG.replay(patch={SITE: patch(value)}).output for value in values])
    torch.testing.assert_close(torch.func.vmap(lambda value: function(patch(value)))(values), wanted)


@pytest.mark.parametrize(
    "patch",
    [
        rl.Zero("b t ([head] d)", head=1, d=4),
        rl.Set(V, "b [t] d", t=[4, 1]),
        rl.From(THERE, "b [t] d", t=slice(1, 4)),
        rl.Mean("b t", part="b t [d]", d=0),
        rl.Rotate(ROWS, rl.From(THERE)) >> rl.Scale(2.0, "b [t] d", t=0) >> rl.Project(V, off=True),
        rl.Resample(ORDER),
        rl.Apply(torch.tanh, "b [t] d", t=0),
    ],
    ids=str,
)
def test_a_patch_may_be_compiled(patch):
    torch._dynamo.reset()
    function, args, kwargs = patch.terms()
    compiled = torch.compile(lambda value: function(value, *args, **kwargs), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(RECORDED), patch(RECORDED))


# ---- what a reference has -------------------------------------------------------------------------------------------


def test_a_reference_may_be_a_program_a_run_a_layer_or_a_tensor():
    run = PROG.replay(CORRUPT)
    with torch.no_grad():
        wanted = hooked(MODEL, SITE, lambda y: THERE, CLEAN)
    for reference in (OTHER, run, OTHER[SITE], THERE):
        assert_same(PROG.replay(patch={SITE: rl.From(reference)}).output, wanted)
        assert_same(PROG.replay(patch={SITE: reference}).output, wanted)
        mean = PROG.replay(patch={SITE: rl.Mean(of=reference)}).output
        assert_same(mean, PROG.replay(patch={SITE: THERE.mean(0).expand(4, 6, 8)}).output)


def test_patches_from_the_same_layer_are_equal():
    assert rl.From(PROG[SITE]) == rl.From(PROG["gelu_2"]) and hash(PROG[SITE]) == hash(PROG["gelu_2"])
    assert rl.From(PROG[SITE]) != rl.From(OTHER[SITE]) and rl.From(PROG) == rl.From(PROG) != rl.From(OTHER)


def test_a_layer_is_a_source_for_another_site():
    run = PROG.replay(patch={SITE: rl.From(PROG["blocks.0.mlp"])})
    assert_same(run.output, hooked(MODEL, SITE, lambda y: PROG["blocks.0.mlp"].value, CLEAN))


class Longer(Transformer):
    """Other labels, the same addresses."""

    def forward(self, x):
        return super().forward(x.add(0).relu().sub(1))


def test_a_reference_is_asked_by_the_name_that_the_user_wrote():
    model = Longer()
    other = rl.capture(model, CORRUPT)
    assert other[SITE].label != PROG[SITE].label
    run = PROG.replay(patch={SITE: rl.From(other)})
    assert_same(run.output, hooked(MODEL, SITE, lambda y: other[SITE].value, CLEAN))
    run = PROG.replay(patch={"blocks.*.mlp": rl.From(other)})
    assert_same(run["blocks.0.mlp"], other["blocks.0.mlp"].value)
    assert_same(run[SITE], other[SITE].value)


def test_a_reference_without_the_site_says_so():
    other = rl.capture(nn.Linear(4, 4), x())
    assert said(rl.NoSuchLayer, lambda: PROG.replay(patch={SITE: rl.From(other)})) == (
        "From(<Program of Linear: 1 calls, 3 layers>) takes what <Program of Linear: 1 calls, 3 layers> has at "
        "'blocks.1.mlp', and it has no such layer: no layer is called 'blocks.1.mlp'. `prog.layers` lists them all.\n"
        "Say which layer of it is meant: From(other['...'])."
    )


def test_a_reference_with_several_tensors_there_says_so():
    one, several = (
        rl.capture(nn.Sequential(nn.Linear(4, 4)), x(2, 3, 4)),
        rl.capture(nn.Sequential(nn.LSTM(4, 4)), x(2, 3, 4)),
    )
    assert said(rl.BadPatch, lambda: one.replay(patch={"0": rl.From(several)})).startswith(
        "the patch at `linear_1_1`: From(<Program of Sequential: 3 calls, 7 layers>) takes what <Program of Sequential: "
        "3 calls, 7 layers> has at '0', and that is 3 tensors; one is needed here.\n"
    )
    assert_same(one.replay(patch={"0": several["0"].value[0]}).output, several["0"].value[0])


def test_a_reference_of_another_shape_says_so():
    other = rl.capture(MODEL, x(4, 5, 8))
    text = said(rl.ShapeMismatch, lambda: PROG.replay(patch={SITE: rl.From(other, "b [t] d", t=-1)}))
    assert text.startswith(
        "the patch at `gelu_2_41`: From was given float32[4, 5, 8]; the value is float32[4, 6, 8].\n"
        "Give one of that shape and dtype: the part is taken of both.\n"
    ), text
    assert "> gelu_2_41 = gelu(" in text and "<- From(<Program of Transformer: " in text


def test_a_mean_may_be_over_a_reference_with_another_batch():
    many = rl.capture(MODEL, x(9, 6, 8, seed=5))
    run = PROG.replay(patch={SITE: rl.Mean(of=many)})
    assert_same(run.output, hooked(MODEL, SITE, lambda y: many[SITE].value.mean(0).expand_as(y), CLEAN))


# ---- which sites ----------------------------------------------------------------------------------------------------


def sites(key, prog=PROG):
    """The labels of the layers that a patch under this key is called for."""
    seen = []
    prog.replay(patch={key: lambda value: seen.append(value) or value})
    wanted = [site.label for site in prog._locations(key)]
    assert len(seen) == len(wanted)
    return wanted


KEYS = {
    "label": ("gelu_2_41", ["gelu_2_41"]),
    "short_label": ("gelu_2", ["gelu_2_41"]),
    "explicit_pass": ("gelu_2:1", ["gelu_2_41"]),
    "address": ("blocks.1.mlp", ["gelu_2_41"]),
    "address_and_call": ("blocks.1.mlp:1", ["gelu_2_41"]),
    "ordinal": (-2, ["linear_7_43"]),
    "type": ("gelu", ["gelu_1_20", "gelu_2_41"]),
    "glob_over_short_labels": ("gelu_?", ["gelu_1_20", "gelu_2_41"]),
    "glob_over_labels": ("gelu_*_20", ["gelu_1_20"]),
    "glob_over_addresses": ("blocks.*.attn.out", ["linear_2_17", "linear_5_38"]),
    "set_of_letters": ("softmax_[12]", ["softmax_1_13", "softmax_2_34"]),
    "parameter": ("head.weight", ["head.weight"]),
    "parameters": (PROG.find(state="blocks.?.norm.bias"), ["blocks.0.norm.bias", "blocks.1.norm.bias"]),
    "input": ("input_1", ["input_1_0"]),
    "type_of_inputs": ("input", ["input_1_0"]),
    "output": ("output_1", ["output_1_44"]),
    "type_of_outputs": ("output", ["output_1_44"]),
    "layer": (PROG["gelu_2"], ["gelu_2_41"]),
    "predicate": (rl.where(lambda layer: layer.layer_type == "softmax"), ["softmax_1_13", "softmax_2_34"]),
    "selection": (PROG.find(op="softmax"), ["softmax_1_13", "softmax_2_34"]),
}


@pytest.mark.parametrize("name", KEYS)
def test_what_a_key_means(name):
    key, wanted = KEYS[name]
    assert sites(key) == wanted


def test_a_key_that_finds_nothing_says_so():
    def ask(key):
        return said(rl.NoSuchLayer, lambda: PROG.replay(patch={key: rl.Zero()}))

    assert ask("gelo") == "no layer is called 'gelo'. The nearest names are 'gelu_2', 'gelu_1'."
    assert ask("blocks.9.*").startswith("no layer is called 'blocks.9.*'. The nearest names are 'blocks.")
    assert ask(rl.where(lambda layer: False)) == (
        "where(<lambda>) finds none of the 45 layers. `prog.layers` lists them all."
    )
    assert ask(PROG.find(op="relu")) == (
        "<Selection of 0 layers: none> finds none of the 45 layers. `prog.layers` lists them all."
    )
    assert ask(99) == "no layer 99: the program has 45 layers, 0 to 44."
    assert ask(1.5).startswith("a layer is named by a label")


def test_one_site_under_two_keys_is_an_error():
    for patch in ({"gelu_2": rl.Zero(), SITE: rl.Zero()}, {"gelu": rl.Zero(), "**.mlp": rl.Zero()}):
        first, second = map(repr, patch)
        text = said(rl.ReplaylensError, lambda patch=patch: PROG.replay(patch=patch))
        assert re.fullmatch(
            rf"two patches for gelu_\d_\d+, under {first} and {re.escape(second)}. Give one, or a list of both.", text
        )
    one = PROG.replay(patch={"head": rl.Scale(2.0), "output_1": rl.Add(1.0)}).output
    assert_same(one, 2 * PROG.output + 1)  # an output is another value than the node that gives it


def test_a_value_that_a_key_finds_twice_is_patched_once():
    prog = rl.capture(nn.Sequential(nn.Sequential(nn.Linear(4, 4))), x())
    assert_same(prog.replay(patch={"*": rl.Scale(2.0)}).output, 2 * prog.replay(2 * x()).output)
    assert_same(
        prog.replay(patch={rl.where(lambda layer: layer.layer_type != "input"): rl.Scale(2.0)}).output, 2 * prog.output
    )


def test_several_sites_in_one_mapping():
    run = PROG.replay(patch={"gelu": rl.Zero(), "blocks.?.attn.out": rl.Scale(0.5), "head.bias": rl.Add(1.0)})
    model = transformer()
    for block in model.blocks:
        block["mlp"].register_forward_hook(lambda module, args, out: 0 * out)
        block["attn"].out.register_forward_hook(lambda module, args, out: out * 0.5)
    with torch.no_grad():
        model.head.bias += 1
        assert_same(run.output, model(CLEAN))


# ---- selections -----------------------------------------------------------------------------------------------------


def found(**criteria):
    return list(PROG.find(**criteria).labels)


def test_finding_layers():
    assert found(op="gelu") == ["gelu_1_20", "gelu_2_41"]
    assert found(op="[gs]*", module="blocks.1.**") == ["softmax_2_34", "gelu_2_41"]
    assert found(module="blocks.1.mlp") == ["linear_6_40", "gelu_2_41"]
    assert found(module="blocks.?.mlp:1", op="linear") == ["linear_3_19", "linear_6_40"]
    assert found(input_of="gelu*") == ["linear_3_19", "linear_6_40"]
    assert found(input_of="blocks.1.attn") == ["layernorm_2_22"] == found(input_of="blocks.1.attn.qkv")
    assert found(input_of="head") == ["add_4_42"]
    assert found(where=lambda layer: layer.shape == (4, 6, 4)) == ["linear_7_43", "output_1_44"]
    assert found(op="linear", where=lambda layer: "attn.out" in (layer.module or "")) == ["linear_2_17", "linear_5_38"]
    assert found(op="relu") == []
    assert found() == PROG.layer_labels


def test_a_selection_is_a_value():
    gelus, second = PROG.find(op="gelu"), PROG.find(module="blocks.1.mlp")
    assert len(gelus) == 2 and [layer.label for layer in gelus] == list(gelus.labels)
    assert gelus[0].label == "gelu_1_20" and gelus[-1].layer_type == "gelu" and gelus[1:].labels == ("gelu_2_41",)
    assert gelus == PROG.find(op="gelu") and hash(gelus) == hash(PROG.find(op="gelu")) and gelus != second
    assert (gelus | second).labels == ("gelu_1_20", "linear_6_40", "gelu_2_41")
    assert (gelus & second).labels == ("gelu_2_41",) and (gelus - second).labels == ("gelu_1_20",)
    assert "gelu_1_20" in gelus and PROG["gelu_2"] in gelus and "gelu_1" not in gelus and PROG["head"] not in gelus
    assert repr(gelus) == "<Selection of 2 layers: gelu_1_20, gelu_2_41>"
    assert repr(PROG.find(op="linear")).endswith("linear_5_38, linear_6_40, ...>")
    with pytest.raises(AttributeError):
        gelus.labels = ()


def test_a_selection_counts():
    gelus = PROG.find(op="gelu")
    assert gelus.assert_count(2) is gelus
    assert said(rl.WrongCount, lambda: gelus.assert_count(3)) == "2 layers are selected, not 3: gelu_1_20, gelu_2_41."
    assert said(AssertionError, lambda: PROG.find(op="relu").assert_count(1)) == "0 layers are selected, not 1: none."


def test_a_selection_of_one_program_holds_for_another_with_the_same_labels():
    gelus = PROG.find(op="gelu")
    assert_same(OTHER.replay(patch={gelus: rl.Zero()}).output, OTHER.replay(patch={"gelu": rl.Zero()}).output)
    small = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.GELU()), x())
    assert said(rl.NoSuchLayer, lambda: small.replay(patch={gelus: rl.Zero()})).startswith(
        "no layer is called 'gelu_1_20'."
    )
    assert said(rl.NoSuchLayer, lambda: small.find(op="gelu") | gelus) == (
        "the selections are of different programs: one has no 'gelu_1_20'."
    )


def test_a_predicate_is_a_function():
    assert said(TypeError, lambda: rl.where("gelu")) == "where takes a function of a layer, not 'gelu'."


# ---- state, inputs, outputs -----------------------------------------------------------------------------------------


def test_a_patch_on_a_parameter_is_another_model():
    run = PROG.replay(patch={"head.weight": rl.Zero("o [i]", i=[3, 5]), "head.bias": rl.Set(1.0, "[o]", o=-1)})
    model = transformer()
    with torch.no_grad():
        model.head.weight[:, [3, 5]] = 0
        model.head.bias[-1] = 1
        assert_same(run.output, model(CLEAN))
    assert_same(PROG.state["head.weight"], MODEL.head.weight.detach())


def test_gradients_reach_a_parameter_through_a_patch_on_it():
    run = PROG.replay(patch={"head.weight": rl.Scale(2.0, "o [i]", i=3)}, grad=True)
    (got,) = torch.autograd.grad(run.output.sum(), MODEL.head.weight)
    factor = torch.ones(4, 8)
    factor[:, 3] = 2
    before = PROG["add_4"].value.sum((0, 1))
    torch.testing.assert_close(got, before.expand(4, 8) * factor)


def test_a_patch_on_a_buffer():
    model = nn.BatchNorm1d(4).eval()
    run = rl.capture(model, x()).replay(patch={"running_mean": rl.Set(0.5, "[c]", c=1)})
    mean = torch.tensor([0.0, 0.5, 0, 0])
    assert_same(run.output, F.batch_norm(x(), mean, torch.ones(4), model.weight.detach(), model.bias.detach()))


def test_a_patch_on_a_tied_parameter_holds_for_all_its_users():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    prog = rl.capture(model, x())
    for address in ("0.weight", "1.weight"):
        run = prog.replay(patch={address: rl.Zero()})
        assert_same(run.output, model[1].bias.detach().expand(3, 4))


def test_patches_on_inputs_and_outputs():
    prog = rl.capture(lambda a, b: (a + b, a * b), x(), x(seed=1))
    run = prog.replay(patch={"input_2": rl.Zero("b [c]", c=0), "output_2": rl.Scale(2.0)})
    b = placed(x(seed=1), (slice(None), 0), 0)
    assert_same(run.output, (x() + b, 2 * x() * b))
    swapped = prog.replay(patch={"input_1": rl.From(rl.capture(lambda a, b: (a + b, a * b), x(seed=2), x(seed=3)))})
    assert_same(swapped.output, (x(seed=2) + x(seed=1), x(seed=2) * x(seed=1)))


def test_token_ids_may_be_replaced_but_not_scaled():
    model, tokens = nn.Embedding(9, 3), torch.tensor([[1, 2, 3], [4, 5, 6]])
    prog = rl.capture(model, tokens)
    assert_same(
        prog.replay(patch={"input_1": rl.Set(7, "b [t]", t=-1)}).output,
        model(torch.tensor([[1, 2, 7], [4, 5, 7]])).detach(),
    )
    assert_same(prog.replay(patch={"input_1": rl.Resample([1, 0])}).output, model(tokens.flip(0)).detach())
    text = said(rl.BadPatch, lambda: prog.replay(patch={"input_1": rl.Add(1)}))
    assert text.startswith(
        "the patch at `input_1_0`: Add needs numbers of a floating type, and the value is torch.int64.\n"
    )


# ---- recurrent layers -----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Linear(4, 4)
        self.act = nn.Tanh()

    def forward(self, x):
        for _ in range(3):
            x = self.act(self.step(x))
        return x


def recurrent(change=None, passes=(1, 2, 3)):
    torch.manual_seed(0)
    model, calls = Recurrent(), []

    def hook(module, args, out):
        calls.append(out)
        return change(out) if change and len(calls) in passes else out

    model.step.register_forward_hook(hook)
    return model


def test_one_pass_of_a_recurrent_layer_or_all():
    prog = rl.capture(recurrent(), x())
    patch = rl.Zero("b [c]", c=1)
    for keys, passes in {
        ("linear_1_1:2", "linear_1:2", "step:2"): (2,),
        ("linear_1_1", "linear_1", "step", "linear", "step*", "linear_1*"): (1, 2, 3),
        ("step:[13]",): (1, 3),
    }.items():
        for key in keys:
            with torch.no_grad():
                wanted = recurrent(patch, passes)(x())
            assert_same(prog.replay(patch={key: patch}).output, wanted, key)
    assert {site.is_every_pass for site in prog._locations("step")} == {True}
    assert {site.is_every_pass for site in prog._locations("linear")} == {False}


def test_each_pass_takes_from_its_own_counterpart():
    prog, other = rl.capture(recurrent(), x()), rl.capture(recurrent(), x(seed=1))
    run = prog.replay(patch={"step": rl.From(other, "b [c]", c=1)}, keep="all")
    for number in (1, 2, 3):
        assert_same(run[f"step:{number}"][:, 1], other[f"step:{number}"].value[:, 1])


# ---- nodes that give several tensors --------------------------------------------------------------------------------


def test_a_patch_without_a_part_is_for_each_floating_tensor_of_a_node():
    prog, other = rl.capture(lambda x: x.chunk(2, 1), x()), rl.capture(lambda x: x.chunk(2, 1), x(seed=1))
    assert_same(prog.replay(patch={"chunk_1": rl.Scale(2.0)}).output, tuple((2 * x()).chunk(2, 1)))
    assert_same(prog.replay(patch={"chunk_1": rl.From(other)}).output, tuple(x(seed=1).chunk(2, 1)))
    assert_same(prog.replay(patch={"chunk_1": other["chunk_1"]}).output, tuple(x(seed=1).chunk(2, 1)))
    run = rl.capture(lambda x: tuple(x.max(1)), x()).replay(patch={"max_1": rl.Zero()})
    assert_same(run.output, (torch.zeros(3), x().max(1).indices))


def test_a_patch_with_a_part_names_one_of_several_tensors():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x):
            out, (hidden, cell) = self.lstm(x)
            return out, hidden, cell

    torch.manual_seed(0)
    model = Net()
    prog = rl.capture(model, x(2, 3, 4))
    text = said(rl.BadPatch, lambda: prog.replay(patch={"lstm_1": rl.Zero("b [t] d", t=-1)}))
    assert text.startswith(
        "the patch at `lstm_1_3`: lstm_1_3 gives 3 tensors, and Zero('b [t] d', t=-1) is for part of one. "
        "Name one of them by the address of a module that gives it, or patch what reads it.\n"
    )
    zeros = prog.replay(patch={"lstm_1": rl.Zero()}).output
    assert not any(tensor.any() for tensor in zeros)
    run = prog.replay(patch={"lstm_1": lambda values: (0 * values[0], *values[1:])})
    assert not run.output[0].any() and run.output[1].any()


def test_a_module_that_gives_one_of_several_tensors_names_it():
    class Half(nn.Module):
        def forward(self, parts):
            return parts[1]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pick = Half()

        def forward(self, x):
            parts = x.chunk(2, 1)
            return parts[0] * self.pick(parts)

    prog = rl.capture(Net(), x())
    left, right = x().chunk(2, 1)
    assert_same(prog.replay(patch={"pick": rl.Zero("b [c]", c=0)}).output, left * placed(right, (slice(None), 0), 0))
    assert_same(prog.replay(patch={prog["pick"]: rl.Scale(2.0)}).output, left * right * 2)


def test_a_node_that_gives_one_tensor_twice_is_patched():
    def model(a):
        torch._foreach_add_([a, a], 0.5)
        return a.relu()

    prog = rl.capture(model, x())
    assert_same(prog.replay(patch={"foreachadd_1": prog["foreachadd_1"].value}).output, prog.output)
    assert_same(prog.replay(patch={"foreachadd_1": rl.Scale(2.0)}).output, (2 * (x() + 1)).relu())


def test_several_integers_are_not_patched_in_silence():
    prog = rl.capture(lambda x: torch.nonzero(x > 0, as_tuple=True), x())
    text = said(rl.BadPatch, lambda: prog.replay(patch={"nonzero_1": rl.Zero()}))
    assert "none of a floating type. Give a tuple of tensors, or a function.\n" in text


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_in_a_patch_shows_where_it_stands():
    assert said(rl.BadPart, lambda: PROG.replay(patch={SITE: rl.Zero("b [t] d", t=7)})) == (
        "the patch at `gelu_2_41`: t=7 is outside of 0..5.\n"
        '    the part "b [t] d", t=7 of the shape (4, 6, 8)\n'
        f'    test_interventions.py:{LINE}    x = x + block["mlp"](x)\n'
        "    linear_6_40 = linear(add_3_39, blocks.1.mlp.0.weight, blocks.1.mlp.0.bias)  # float32[4, 6, 8]\n"
        "  > gelu_2_41 = gelu(linear_6_40, approximate='none')  # float32[4, 6, 8]   <- Zero('b [t] d', t=7)\n"
        "    add_4_42 = add(add_3_39, gelu_2_41)  # float32[4, 6, 8]"
    )


def test_a_part_that_does_not_fit_is_an_error_also_where_nothing_needs_the_value():
    def model(x):
        x.sin()
        return x.cos()

    prog = rl.capture(model, x())
    assert_same(prog.replay(patch={"sin_1": rl.Zero("b [c]", c=3)}).output, prog.output)
    assert said(rl.BadPart, lambda: prog.replay(patch={"sin_1": rl.Zero("b [c]", c=4)})).startswith(
        "the patch at `sin_1_1`: c=4 is outside of 0..3.\n"
    )


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (rl.Zero("b [t] d"), "[t] has no index: give t=.\n"),
        (rl.Set(V.double(), "b [t] d", t=0), "a tensor of torch.float64 was given for "),
        (rl.Set(0.5j), "0.5j was given for a tensor of torch.float32. Give a number.\n"),
        (rl.Add(x(5)), "Add was given float32[5]; the value is float32[4, 6, 8].\n"),
        (rl.Rotate(ROWS, rl.Zero("[k]", k=0)), "the pattern has 1 axis, and the tensor 3 axes.\n"),
        (
            rl.Apply(lambda y: y.sum(), "b [t] d", t=0),
            'Apply gives float32[]; the part "b [t] d", t=0 is float32[4, 8].',
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_patch_at_its_site(patch, text):
    assert said(rl.ReplaylensError, lambda: PROG.replay(patch={SITE: patch})).startswith(
        f"the patch at `gelu_2_41`: {text}"
    )


def test_the_texts_of_bare_tensors_are_those_of_explicit_ones():
    texts = {
        said(rl.ShapeMismatch, lambda patch=patch: PROG.replay(patch={SITE: patch}))
        for patch in (x(4, 6), rl.Set(x(4, 6)), rl.From(x(4, 6)), lambda y: x(4, 6))
    }
    (text,) = texts
    assert text.startswith(
        "the patch at `gelu_2_41` gives float32[4, 6]; what uses it was recorded with float32[4, 6, 8].\n"
    )


def test_a_number_is_no_bare_patch():
    assert said(rl.ShapeMismatch, lambda: PROG.replay(patch={SITE: 0.0})).startswith(
        "the patch at `gelu_2_41` gives float, not a tensor.\n"
    )


def test_the_exception_of_a_users_function_stays_its_own():
    with pytest.raises(ZeroDivisionError):
        PROG.replay(patch={SITE: rl.Apply(lambda y: 1 / 0, "b [t] d", t=0)})


# ---- what else a replay has to do with patches ----------------------------------------------------------------------


def test_a_value_before_a_patch_can_be_asked_for_on_new_inputs():
    run = PROG.replay(CORRUPT, patch={SITE: rl.Zero()})
    assert_same(run["blocks.0.mlp"], OTHER["blocks.0.mlp"].value)
    assert not run[SITE].any()


def test_patches_leave_generators_alone():
    state = torch.get_rng_state()
    first = PROG.replay(patch={SITE: rl.Noise(1.0) >> rl.Resample()}).output
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert_same(PROG.replay(patch={SITE: rl.Noise(1.0) >> rl.Resample()}).output, first)


def test_a_patch_may_be_used_on_tensors_of_several_shapes():
    patch = rl.Zero("... [d]", d=-1)
    for shape in ((4,), (3, 4), (2, 5, 6)):
        prog = rl.capture(torch.sin, x(*shape))
        assert_same(prog.replay(patch={"sin_1": patch}).output, placed(x(*shape).sin(), (..., -1), 0))


def test_a_patch_holds_in_a_program_captured_under_autocast_or_inference_mode():
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with mode:
            prog, other = rl.capture(MODEL, CLEAN), rl.capture(MODEL, CORRUPT)
            wanted = hooked(MODEL, SITE, lambda y, there=other[SITE].value: placed(y, LAST, there[:, -1]), CLEAN)
        patch = rl.From(other, "b [t] d", t=-1)
        assert_same(prog.replay(patch={SITE: patch}).output, wanted.detach())
        assert_same(patch.bound(lambda source: THERE)(RECORDED), placed(RECORDED, LAST, THERE[:, -1]))


def test_a_value_of_one_number_can_be_patched():
    prog = rl.capture(lambda x: x.mean() * x, x())
    assert_same(prog.replay(patch={"mean_1": rl.Set(2.0)}).output, 2 * x())
    assert_same(prog.replay(patch={"mean_1": rl.Add(1.0)}).output, (x().mean() + 1) * x())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_a_patch_in_every_floating_type(dtype):
    first, second, given, v = (x(*shape).to(dtype) for shape in ((4, 6), (6, 2), (3, 4), (6,)))
    prog = rl.capture(lambda given: (given @ first).tanh() @ second, given)
    for patch, change in (
        (rl.Zero("b [c]", c=[4, 1]), lambda y: placed(y, (slice(None), [4, 1]), 0)),
        (rl.Set(v, "[b] c", b=0), lambda y: placed(y, 0, v)),
        (rl.Add(v), lambda y: y + v),
        (rl.Scale(2, "b [c]", c=0), lambda y: placed(y, (slice(None), 0), y[:, 0] * 2)),
    ):
        assert_same(prog.replay(patch={"tanh": patch}).output, change((given @ first).tanh()) @ second)


def test_many_patches_at_once_equal_one_after_the_other():
    patch = {"gelu": rl.Scale(0.5), "softmax": rl.Zero("b [head] q k", head=1), "layernorm": rl.Add(V)}
    run = PROG.replay(patch=patch)
    function = {key: (lambda value, one=one: one(value)) for key, one in patch.items()}
    assert_same(run.output, PROG.replay(patch=function).output)
    assert math.isfinite(run.output.sum())


def test_writes_through_a_patched_view_stay_with_it_however_many():
    def model(x):
        y = x * 1
        line = y.diagonal()
        line[1] = line.flatten().mean()
        line.mul_(0.5)
        return y, line

    x, changed = torch.arange(9.0).view(3, 3), torch.tensor([1.0, 5.0, 3.0])
    y, line = rl.capture(model, x).replay(patch={"diagonal_1": changed}).output
    assert_same(y, x, "the memory that the view lay in")
    assert_same(line, torch.tensor([0.5, 1.5, 1.5]))


def reshaped(y, view):
    view.unsqueeze_(0)
    y.mul_(2)
    return view + 1


def assigned(y, view):
    other = torch.zeros(0)
    other.data = view
    y.mul_(2)
    return other + 1


@pytest.mark.parametrize("goes_on", [reshaped, assigned])
def test_a_patched_view_that_goes_on_by_another_geometry_does_not_see_writes_to_the_old_memory(goes_on):
    def model(x, by_hand=lambda view: view):
        y = x * 1
        return goes_on(y, by_hand(y.t()))

    prog, given = rl.capture(model, x()), x()
    wanted = model(given, lambda view: view * 0.5)
    assert_same(prog.replay(patch={"t_1": rl.Scale(0.5)}).output, wanted)
    assert "which the model modifies in place later and reads again" in said(
        rl.DivergedReplay, lambda: prog.replay(patch={"t_1": rl.Scale(0.5)}, on_divergence="raise")
    )


def test_in_the_gaps_of_the_memory_of_a_patched_value_stands_what_stood_there():
    def model(x):
        return (x * 1)[:, ::2].t().as_strided((3,), (1,), 0)

    prog, patch = rl.capture(model, x()), {"t_1": rl.Scale(2.0)}
    wanted = torch.stack([x()[0, 0] * 2, x()[0, 1], x()[0, 2] * 2])
    for _ in range(5):
        waste = torch.full((11,), 7.0)  # what new memory may hold
        del waste
        assert_same(prog.replay(patch=patch).output, wanted)
        waste = torch.full((11,), 7.0)
        del waste
        assert_same(rl.run(model, x(), patch=patch).output, wanted)


def test_two_views_of_a_patched_value_that_one_call_writes_stay_one_memory():
    def model(x, by_hand=lambda value: value):
        part = by_hand((x * 1)[1:])
        line = part.view(-1)
        torch._foreach_mul_([line, part], [line, line.view_as(part)])
        return part

    prog, wanted = rl.capture(model, x()), model(x(), lambda value: value * 2)
    assert_same(prog.replay(patch={"getitem_1": rl.Scale(2.0)}).output, wanted)


def test_a_write_through_a_patched_view_that_repeats_elements_does_not_reach_the_old_memory():
    def model(x, by_hand=lambda value: value):
        y = x * 1
        wide, other = by_hand(y.expand(2, 3, 4)), y.expand(2, 3, 4)
        wide.fill_(0.5)
        return wide * other

    prog, wanted = rl.capture(model, x()), model(x(), lambda value: value * 2)
    assert_same(prog.replay(patch={"expand_1": rl.Scale(2.0)}).output, wanted)
