"""Edits give new programs: what each means is what a hand-written model or a hook gives; the original never changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from internals import problems
from oracle import assert_same
from random_programs import programs
from torch import nn
from torch.nn import functional as F
from zoo import MODELS, is_refused_so, silence

import replaylens as rl


class Net(nn.Module):
    def __init__(self, act1=F.relu, act2=F.relu, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2, self.fc = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(64, 3)
        self.act1, self.act2, self.between = act1, act2, between or (lambda h: h)

    def forward(self, x):
        h = self.act1(self.conv1(x))
        h = self.between(h)
        return self.fc(self.act2(self.conv2(h)).flatten(1))


net, x = Net(), torch.randn(2, 2, 8, 8)
prog = rl.capture(net, x)
graph, output = prog.graph, prog.output.clone()


def by_hand(**changes):
    return Net(**changes)(x)


@pytest.fixture(autouse=True)
def the_original_is_untouched():
    yield
    assert prog.graph == graph and torch.equal(prog.output, output)
    assert torch.equal(prog.replay().output, output) and torch.equal(net(x), output)


def test_swap_by_type_by_label_by_module():
    assert torch.equal(prog.swap("relu", F.gelu).output, by_hand(act1=F.gelu, act2=F.gelu))
    assert torch.equal(prog.swap("relu_2", torch.tanh).output, by_hand(act2=torch.tanh))
    assert torch.equal(
        prog.swap("conv1", lambda x, w, b: F.conv2d(x, w, b) * 2).output, Net(lambda h: F.relu(2 * h))(x)
    )
    assert torch.equal(prog.swap(prog.find(op="relu"), nn.SiLU()).output, by_hand(act1=F.silu, act2=F.silu))


@pytest.mark.parametrize("function", [torch.relu_, nn.ReLU(inplace=True), lambda h: F.relu(h, inplace=True)])
def test_swap_of_what_wrote_in_place_gets_the_inputs(function):
    torch.manual_seed(0)
    inplace = rl.capture(Net(act1=function, act2=function), x)
    assert torch.equal(inplace.swap("relu", F.gelu).output, by_hand(act1=F.gelu, act2=F.gelu))


def test_a_swapped_in_module_trains():
    layer = nn.Linear(64, 3)
    swapped = prog.swap("linear_1", lambda h, w, b: layer(h))
    run = swapped.replay(grad=True)
    run.output.sum().backward()
    assert torch.equal(run.output.detach(), layer(F.relu(net.conv2(F.relu(net.conv1(x)))).flatten(1)).detach())
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0


def test_bypass_insert_after_rewire():
    assert torch.equal(prog.bypass("relu_2").output, by_hand(act2=lambda h: h))
    assert torch.equal(prog.insert_after("relu_1", lambda h: h * 2 + 1).output, by_hand(between=lambda h: h * 2 + 1))
    assert torch.equal(prog.rewire("conv2d_2", "relu_1", to="conv2d_1").output, by_hand(act1=lambda h: h))


def test_a_lesion_is_seen_at_the_layer_and_after_it():
    lesioned = prog.lesion("conv2d_2", "b [c] h w", c=[3])
    assert (lesioned["conv2d_2"].value[:, 3] == 0).all() and (lesioned["conv2d_2"].value[:, 0] != 0).any()
    handle = net.conv2.register_forward_hook(lambda module, args, y: y * torch.tensor([1.0, 1, 1, 0]).view(1, 4, 1, 1))
    assert torch.equal(lesioned.output, net(x))
    handle.remove()


def test_set_state():
    assert torch.equal(prog.set_state("fc.weight", torch.zeros(3, 64)).output, net.fc.bias.expand(2, 3))
    changed = Net()
    changed.conv1.weight.data.mul_(2)
    assert torch.equal(prog.set_state("conv1.weight", lambda w: w * 2).output, changed(x))


def test_an_edited_program_is_a_program():
    edited = prog.swap("relu_1", F.gelu).lesion("conv2d_2", "b [c] h w", c=[3])
    assert edited.history == ("captured", "swap('relu_1', gelu)", "lesion('conv2d_2', 'b [c] h w', c=[3])")
    assert "gelu(" in edited.code and "zero(conv2d_2_3_before" in edited.code
    y = torch.randn(2, 2, 8, 8)
    again = rl.capture(Net(act1=F.gelu), y).lesion("conv2d_2", "b [c] h w", c=[3])
    assert torch.equal(edited(y).output, again.output)
    assert torch.equal(edited.refresh().output, edited.output)
    assert edited.to(torch.float64).output.dtype == torch.float64
    assert torch.equal(edited.function()(y), again.output)
    assert not problems(edited.graph) and problems(prog.graph) == ()


def test_edits_at_different_nodes_commute():
    one = prog.swap("relu_1", torch.tanh).lesion("conv2d_2", "b [c] h w", c=1).bypass("relu_2")
    other = prog.bypass("relu_2").lesion("conv2d_2", "b [c] h w", c=1).swap("relu_1", torch.tanh)
    assert torch.equal(one.output, other.output)
    assert {node.name for node in one.graph} == {node.name for node in other.graph}


def test_with_patch_is_a_replay_with_the_patch_in_values_and_gradients():
    vector = torch.randn(4, 6, 6, requires_grad=True)
    for patch in (
        {"relu": rl.Scale(0.5)},
        {"conv1": rl.Add(vector), "fc.weight": rl.Zero("[o] i", o=1)},
        {"input_1": rl.Noise(0.1), "relu_2": [rl.Clamp(0, 1), rl.Scale(2.0)]},
        {"conv2d_1": torch.sin},
    ):
        patched, replayed = prog.with_patch(patch), prog.replay(patch=patch)
        assert torch.equal(patched.output, replayed.output)
        grads = []
        for run in (patched.replay(grad=True), prog.replay(patch=patch, grad=True)):
            net.zero_grad()
            run.output.sum().backward()
            grads.append([p.grad.clone() for p in net.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, cut=None):
        h = self.a(x)
        seen = h if cut is None else cut(h)
        return h + self.b(seen) + self.c(h)


def test_an_edge_is_what_one_reader_reads():
    model, x = Residual(), torch.randn(3, 4)
    program = rl.capture(model, x)
    edge = rl.Edge("linear_1", "linear_2")
    for patch, change in ((rl.Zero(), torch.zeros_like), (rl.Scale(3.0), lambda h: 3 * h), (torch.sin, torch.sin)):
        assert torch.equal(program.replay(patch={edge: patch}).output, model(x, change))
        assert torch.equal(program.with_patch({edge: patch}).output, model(x, change))
    with pytest.raises(rl.ReplaylensError, match="does not read"):
        program.replay(patch={rl.Edge("linear_2", "linear_3"): rl.Zero()})


def test_a_slice_is_a_program_and_a_module_trains_the_models_own_parameters():
    piece = prog.slice("relu_1", "relu_2")
    assert torch.equal(piece.output, prog["relu_2"].value) and len(piece.graph.calls) == 2
    assert torch.equal(piece(torch.zeros(2, 4, 6, 6)).output, F.relu(net.conv2(torch.zeros(2, 4, 6, 6))))
    tail = prog.module(from_="relu_1", to="linear_1")
    assert dict(tail.named_parameters()).keys() == {"conv2.weight", "conv2.bias", "fc.weight", "fc.bias"}
    assert all(p is dict(net.named_parameters())[name] for name, p in tail.named_parameters())
    trained = rl.capture(copied := Net(), x).module(from_="relu_1", to="linear_1")
    before = copied.fc.weight.clone()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    trained(prog["relu_1"].value).square().sum().backward()
    optimizer.step()
    assert not torch.equal(copied.fc.weight, before)
    assert torch.equal(trained(prog["relu_1"].value), copied.fc(F.relu(copied.conv2(prog["relu_1"].value)).flatten(1)))


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (lambda: prog.swap("nothing", F.gelu), rl.NoSuchLayer, "no layer is called 'nothing'"),
        (lambda: prog.swap("conv2d_1", lambda x, *rest: x), rl.ShapeMismatch, "what reads it was recorded with"),
        (lambda: prog.bypass("conv2d_1"), rl.ReplaylensError, "it cannot return that"),
        (
            lambda: prog.rewire("relu_1", "conv2d_2", to="relu_2"),
            rl.ReplaylensError,
            "relu_1_2 does not read conv2d_2_3",
        ),
        (lambda: prog.rewire("conv2d_2", "relu_1", to="relu_2"), rl.ReplaylensError, "conv2d_2_3|relu_2_4"),
        (lambda: prog.lesion("conv2d_2", "b [c] h w", c=9), rl.BadPart, "c=9 is outside of 0..3"),
        (lambda: rl.capture(nn.Sequential(net), x).swap("0", F.relu), rl.BadEdit, "'0' is a module of 6 operations"),
        (
            lambda: rl.capture(nn.Sequential(net), x).bypass("0"),
            rl.BadEdit,
            "Name the one that is meant, such as 'linear_1_6'",
        ),
        (lambda: prog.set_state("fc.nothing", torch.zeros(1)), rl.ReplaylensError, "fc.nothing"),
    ],
)
def test_mistakes_are_answered(edit, error, text):
    with pytest.raises(error, match=text):
        edit()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_with_patch_is_a_replay_with_the_patch(name):
    with silence():
        try:
            case = MODELS[name]()
            torch.manual_seed(1)
            program = rl.capture(case.model, *case.args, **case.kwargs)
        except Exception as error:
            if not is_refused_so(name, error):
                raise
            return
        before = program.graph
        for layer in program.layers[:: max(1, len(program.layers) // 4)]:
            is_float = isinstance(layer.value, torch.Tensor) and layer.value.is_floating_point()
            if layer.layer_type == "output" or not is_float or layer.value.layout is not torch.strided:
                continue
            patch = {layer.label: lambda value: value * 0.5 + 0.25}
            try:
                wanted = program.replay(patch=patch, on_divergence="raise").output
            except (rl.ReplaylensError, RuntimeError, IndexError, ValueError):
                continue  # leaves the recorded path, or the model itself raises on such values
            patched = program.with_patch(patch)
            assert_same(patched.output, wanted, f"with {layer.label} patched", loose=True)
            assert_same(patched.replay().output, patched.output, "replayed")
            assert not problems(patched.graph)
        assert program.graph == before


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(calm=True))
def test_swapping_an_operation_for_itself_changes_no_bit(program):
    try:
        captured = rl.capture(program, *program.inputs())
    except rl.CaptureError:
        assume(".data = " not in program.source)
        raise
    for kind, function in (("relu", torch.relu), ("sin", torch.sin), ("tanh", torch.tanh)):
        if any(layer.layer_type == kind for layer in captured.layers):
            assert_same(captured.swap(kind, function).output, captured.output, kind)


def branch(x):
    y = x * 2
    return y + 1 if y.sum() > 0 else y - 1


def test_a_slice_keeps_the_guards_on_its_way():
    program = rl.capture(branch, torch.ones(3))
    with pytest.raises(rl.DivergedReplay):
        program.slice("mul_1")(torch.full((3,), -2.0))
    with pytest.raises(rl.DivergedReplay):
        program.module("mul_1")(torch.full((3,), -2.0))
    assert torch.equal(program.slice("mul_1")(torch.full((3,), 5.0)).output, torch.full((3,), 6.0))


def test_what_is_inserted_after_a_view_whose_memory_is_written_later_is_not_lost():
    def model(x):
        y = x * 2
        v = y[0]
        y.add_(1)
        return v * 2 + y

    program = rl.capture(model, torch.ones(2, 2))
    with pytest.raises(rl.DivergedReplay, match="storage of getitem_1"):
        program.insert_after("getitem_1", lambda t: t * 100)


@pytest.mark.parametrize("choice", ["rerun", "typo", None])
def test_an_edit_goes_along_the_recorded_path_or_raises(choice):
    program = rl.capture(branch, torch.ones(3))
    for edit in (
        lambda: program.insert_after("mul_1", torch.neg, on_divergence=choice),
        lambda: program.with_patch({"mul_1": rl.Scale(-1.0)}, on_divergence=choice),
        lambda: program.swap("mul_1", lambda x: x * -2, on_divergence=choice),
    ):
        with pytest.raises(ValueError, match="on_divergence must be one of 'raise', 'ignore'"):
            edit()
    ignored = program.insert_after("mul_1", torch.neg, on_divergence="ignore")
    assert ignored.history[-1] == "insert_after('mul_1', neg, on_divergence='ignore')"


def test_edges_in_sweeps_and_live_runs():
    model, x = Residual(), torch.randn(3, 4)
    program = rl.capture(model, x)
    variants = {k: {rl.Edge("linear_1", "linear_2"): rl.Scale(k)} for k in (0.0, 2.0)} | {"no": {}}
    found = rl.sweep(program, variants=variants)
    for key, patch in variants.items():
        torch.testing.assert_close(found[key], program.replay(patch=patch).output)
    with pytest.raises(rl.ReplaylensError, match="cannot be patched while the model runs"):
        rl.run(model, x, patch={rl.Edge("linear_1", "linear_2"): rl.Zero()})


def test_gradients_through_an_edge():
    model, x = Residual(), torch.randn(3, 4)
    program = rl.capture(model, x)
    edge = {rl.Edge("linear_1", "linear_2"): rl.Scale(3.0)}
    found = program.grads(of=lambda y: y.square().sum(), at=["linear_1", "input_1"], patch=edge)
    fresh = x.clone().requires_grad_()
    model(fresh, lambda h: 3 * h).square().sum().backward()
    torch.testing.assert_close(found["input_1"], fresh.grad)


def _counting():
    calls = []
    return lambda value: value + (calls.append(None) or len(calls))


def _of_its_own_generator():
    generator = torch.Generator().manual_seed(3)
    return lambda value: value + torch.rand(value.shape, generator=generator)


IMPURE = {
    "counts": _counting,
    "draws by random": lambda: lambda value: value + random.random(),
    "draws by numpy": lambda: lambda value: value + float(np.random.rand()),
    "draws by its own generator": _of_its_own_generator,
}
PLACES = {
    "at a value": lambda prog, f: prog.with_patch({"relu_1": f}),
    "at a part": lambda prog, f: prog.with_patch({"relu_1": rl.Apply(f, "b [d]", d=1)}),
    "in a chain": lambda prog, f: prog.with_patch({"relu_1": rl.Scale(2.0) >> rl.Apply(f) >> rl.Clamp(max=9.0)}),
    "on an edge": lambda prog, f: prog.with_patch({rl.Edge("relu_1", "linear_2"): f}),
    "at an input": lambda prog, f: prog.with_patch({"input_1": f}),
    "at a parameter": lambda prog, f: prog.with_patch({"0.weight": f}),
    "twice": lambda prog, f: prog.with_patch({"relu_1": f}).with_patch({"linear_1": f}),
    "keeping little": lambda prog, f: prog.saving([]).with_patch({"relu_1": f}),
    "keeping little of it": lambda prog, f: prog.with_patch({"relu_1": f}).saving([]),
}
REPLAYS = {
    "whole": lambda edited, x: edited.replay(),
    "on another input": lambda edited, x: edited.replay(x * 2),
    "patched before": lambda edited, x: edited.replay(patch={"linear_1": lambda value: value * 2}),
    "from a layer": lambda edited, x: edited.replay(from_="linear_1"),
    "with gradients": lambda edited, x: edited.replay(grad=True),
    "keeping some": lambda edited, x: edited.replay(x * 2, keep=["linear_1"]),
}


@pytest.mark.parametrize("how", REPLAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", IMPURE)
def test_a_run_of_an_edit_has_what_led_to_its_output_whatever_its_function_gives_next_time(name, place, how):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    edited = PLACES[place](rl.capture(model, x), IMPURE[name]())
    run = REPLAYS[how](edited, x)
    late = run["linear_2"]
    assert torch.equal(late.tanh(), run.output)
    if place != "on an edge":
        assert torch.equal(model[2](run["relu_1"]), late)
    run["linear_1"]
    assert torch.equal(run["linear_2"], late) and torch.equal(edited.recover("linear_2").tanh(), edited.output)


def test_what_a_function_of_an_edit_gave_and_somebody_wrote_to_since_is_stale():
    model, x, given = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh()), torch.randn(2, 3), torch.zeros(2, 3)
    run = rl.capture(model, x).with_patch({"relu_1": lambda value: given}).replay()
    given.fill_(9)
    with pytest.raises(rl.StaleValue, match="relu_1"):
        run["relu_1"]


def test_a_check_says_that_the_function_of_an_edit_gives_something_else_each_time():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh()), torch.randn(2, 3)
    report = rl.capture(model, x).with_patch({"relu_1": _counting()}).check(progress=False)
    assert not report and "the function of the edit there gives something else each time" in str(report)
