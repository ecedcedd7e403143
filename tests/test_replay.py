"""What a replay runs, what it gives, and what it leaves alone."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from internals import Ref, Request, execute, plan, reader
from oracle import assert_same, belongings, generators, surroundings
from torch import nn
from torch.nn import functional as F

import replaylens as rl


def x(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def forks(x):
    left, right = x.sin(), x.cos()
    both = left + right
    return both.tanh(), right.exp()


def mlp(*, train=False, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 2))
    return model.train(train)


def double(value):
    return 2 * value


# ---- the causal cone, and nothing else -----------------------------------------------------------------------------


def test_a_replay_without_arguments_runs_everything():
    run = rl.capture(forks, x()).replay()
    assert run.executed == ("sin_1_1", "cos_1_2", "add_1_3", "tanh_1_4", "exp_1_5")
    assert_same(run.output, forks(x()))


@pytest.mark.parametrize(
    ("start", "executed"),
    [
        ("input_1_0", ("sin_1_1", "cos_1_2", "add_1_3", "tanh_1_4", "exp_1_5")),
        ("sin_1", ("add_1_3", "tanh_1_4")),
        ("cos_1", ("add_1_3", "tanh_1_4", "exp_1_5")),
        ("add_1", ("tanh_1_4",)),
        ("exp_1", ()),
        ("output_1", ()),
    ],
)
def test_a_replay_from_a_layer_runs_what_follows_it_and_nothing_else(start, executed):
    prog = rl.capture(forks, x())
    run = prog.replay(from_=start)
    assert run.executed == executed
    assert_same(run.output, prog.output)
    assert prog.replay(patch={start: double}).executed == executed


def test_two_patches_run_what_either_can_reach():
    run = rl.capture(forks, x()).replay(patch={"add_1": double, "exp_1": torch.zeros_like})
    assert run.executed == ("tanh_1_4",)
    assert_same(run.output, ((2 * (x().sin() + x().cos())).tanh(), torch.zeros(3, 4)))


def test_what_does_not_reach_the_output_is_not_run():
    def model(x):
        x.sin().exp()
        return x.cos()

    prog = rl.capture(model, x())
    assert prog(x(1)).executed == ("cos_1_3",)
    assert prog.replay(from_="sin_1").executed == ()


def test_a_replay_to_a_layer_stops_there():
    prog = rl.capture(forks, x())
    run = prog.replay(x(1), to="add_1")
    assert run.executed == ("sin_1_1", "cos_1_2", "add_1_3")
    assert_same(run["add_1"], x(1).sin() + x(1).cos())
    with pytest.raises(rl.NotSaved):
        run.output


def test_a_change_of_one_input_leaves_alone_what_the_other_reaches():
    prog = rl.capture(lambda a, b: (a.sin().exp(), b.cos()), x(), x(1))
    assert prog.replay(patch={"input_2": double}).executed == ("cos_1_4",)


def test_a_change_of_one_parameter_runs_what_it_reaches():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    run = rl.capture(model, x()).replay(state={"2.bias": torch.zeros(4)})
    assert run.executed == ("linear_2_3", "relu_2_4")


def test_new_draws_run_what_follows_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU())
    assert rl.capture(model, x()).replay(rng="fresh").executed == ("dropout_1_2", "relu_1_3")


def test_a_whole_forward_of_a_hundred_layers_resumes_at_the_last():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)])
    assert rl.capture(model, x()).replay(from_="linear_99").executed == ("linear_100_100",)


def runs_of(function, action):
    """How often a Python function ran within an action."""
    count = 0

    def see(frame, event, arg):
        nonlocal count
        count += event == "call" and frame.f_code is function.__code__

    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_a_replay_of_a_kind_is_planned_once():
    prog = rl.capture(forks, x())

    def once(factor):
        return lambda: prog.replay(patch={"add_1": lambda value: factor * value})

    assert [runs_of(plan, once(factor)) for factor in (2, 3, 4)] == [1, 0, 0]
    assert_same(once(5)().output[0], (5 * (x().sin() + x().cos())).tanh())


def test_a_call_is_compiled_once_for_all_plans():
    prog = rl.capture(forks, x())

    def at(site, **more):
        return lambda: prog.replay(patch={site: double}, **more)

    assert [runs_of(reader, at(site)) for site in ("sin_1", "cos_1", "input_1")] == [2, 1, 2]
    assert [runs_of(reader, at(site, keep="all")) for site in ("sin_1", "cos_1", "input_1")] == [0, 0, 0]


def test_a_value_that_was_not_kept_is_planned_once_for_all_runs_of_a_kind():
    model = mlp()
    prog = rl.capture(model, x())

    def replayed(factor, **more):
        return prog.replay(patch={"linear_1": lambda value: factor * value}, **more)

    runs = [replayed(factor) for factor in range(5)]
    assert [runs_of(plan, lambda run=run: run["batchnorm_1"]) for run in runs] == [1, 0, 0, 0, 0]
    for factor, run in enumerate(runs):
        assert_same(run["batchnorm_1"], replayed(factor, keep="batchnorm_1")["batchnorm_1"])
        assert_same(run["relu_1"], replayed(factor, keep="relu_1")["relu_1"])
    late = replayed(7)
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(rl.StaleValue, match="overwritten"):
        late["batchnorm_1"]


def everything(x):
    """Parts, writes through views, draws, literals, modes, and content that is read."""
    low, high = x.chunk(2, dim=1)
    base = torch.cat([high, low * 3.0], 1)
    base[:, 1].add_(low[:, 0], alpha=2)
    noise = torch.rand_like(base) + F.dropout(base, 0.5)
    with torch.no_grad():
        scale = base.sum(dim=[0, 1])
    if float(base.sum()) > -1e9:
        noise = noise.clamp(-1, 2) * scale
    return noise.max(dim=1), base


@pytest.mark.parametrize("options", [{}, {"keep": "all"}, {"grad": True}, {"on_divergence": "ignore"}], ids=str)
def test_plans_that_share_compiled_calls_give_what_each_gives_alone(options):
    def captured():
        torch.manual_seed(0)
        return rl.capture(everything, x().requires_grad_())

    prog = captured()
    for site in prog.layer_labels[:-1]:
        for patch in (double, rl.Zero()):
            with suppress(rl.ReplaylensError):
                alone = captured().replay(patch={site: patch}, **options)
                together = prog.replay(patch={site: patch}, **options)
                assert_same(together.output, alone.output)
                assert together.executed == alone.executed
                assert_same(together["mul_1"], alone["mul_1"])


def test_a_value_is_forgotten_after_its_last_use():
    prog = rl.capture(lambda x: x.sin().cos().exp().tanh(), x())

    def there(**more):
        ran = execute(prog._record, Request(whole=True, **more))
        return [ran[Ref(call.name)] is not None for call in prog.graph.calls]

    assert there() == [False, False, False, True]
    assert there(keep=frozenset([prog.graph.positions["sin_1_1"]])) == [True, False, False, True]


# ---- patches -------------------------------------------------------------------------------------------------------


def test_a_patch_sees_the_value_that_earlier_patches_left():
    run = rl.capture(lambda x: (x + 1) * 3, x()).replay(patch={"add_1": double, "mul_1": lambda value: value - 1})
    assert_same(run.output, 2 * (x() + 1) * 3 - 1)


@pytest.mark.parametrize("site", ["input_1", "0.weight", "0", "2", "4", "output_1"])
def test_a_patch_may_stand_at_any_value(site):
    prog = rl.capture(mlp(), x())
    run = prog.replay(patch={site: torch.zeros_like(prog[site].value)})
    changed = prog.replay(patch={site: torch.zeros_like})
    assert_same(run.output, changed.output)
    assert not torch.equal(run.output, prog.output)
    assert_same(run[site], torch.zeros_like(prog[site].value))


def test_a_patch_at_an_output_changes_that_output_alone():
    run = rl.capture(lambda x: (y := x.sin(), y.cos()), x()).replay(patch={"output_1": torch.zeros_like})
    assert_same(run.output, (torch.zeros(3, 4), x().sin().cos()))


def test_a_patch_for_several_values_gives_as_many():
    prog = rl.capture(lambda x: torch.cat([part.exp() for part in x.chunk(2, 1)], 1), x())
    run = prog.replay(patch={"chunk_1": lambda parts: (parts[1], parts[0])})
    assert_same(run.output, x().roll(2, 1).exp())


def test_a_patch_at_one_call_of_a_module_leaves_the_others_alone():
    fc = nn.Linear(4, 4)
    prog = rl.capture(nn.Sequential(fc, nn.Tanh(), fc), x())
    run = prog.replay(patch={"0:2": torch.zeros_like})
    assert run.executed == () and not run.output.any()
    assert_same(prog.replay(patch={"0:1": torch.zeros_like}).output, fc(torch.zeros(3, 4)).detach())


def test_a_start_and_a_patch_elsewhere_combine():
    prog = rl.capture(forks, x())
    assert prog.replay(from_="sin_1", patch={"exp_1": double}).executed == ("add_1_3", "tanh_1_4")


def test_a_value_of_one_program_is_a_patch_for_another():
    clean, corrupt = rl.capture(model := mlp(), x()), rl.capture(model, x(1))
    run = corrupt.replay(patch={"0": clean["0"].value})
    assert_same(run.output, clean.output)


def test_a_patch_that_writes_in_place_hurts_nobody():
    prog = rl.capture(forks, x())
    recorded = prog["cos_1"].value.clone()
    for _ in range(2):
        run = prog.replay(patch={"cos_1": lambda value: value.zero_()})
        assert_same(run.output, (x().sin().tanh(), torch.ones(3, 4)))
    assert_same(prog["cos_1"].value, recorded)
    assert_same(prog.replay().output, prog.output)


def test_a_patch_that_keeps_its_argument_cannot_reach_the_run_through_it():
    held = []
    run = rl.capture(forks, x()).replay(patch={"sin_1": lambda value: held.append(value) or value}, keep="all")
    held[0].zero_()
    assert_same(run["tanh_1"], (x().sin() + x().cos()).tanh())
    assert_same(rl.capture(forks, x()).replay()["sin_1"], x().sin())


def test_a_tensor_given_as_patch_is_never_written():
    value = torch.ones(3, 4)
    run = rl.capture(lambda x: x.sin().add_(1).mul_(2), x()).replay(from_="sin_1", patch=value)
    assert_same(run.output, torch.full((3, 4), 4.0))
    assert_same(value, torch.ones(3, 4))


def test_a_patch_before_a_write_in_place_is_written_in_its_turn():
    def model(x):
        y = x.sin()
        z = y[0]
        y.mul_(3)
        return z + 1

    run = rl.capture(model, x()).replay(patch={"sin_1": torch.ones(3, 4)})
    assert_same(run.output, torch.full((4,), 4.0))


def test_a_patch_that_cannot_be_reached_is_no_silent_nothing():
    prog = rl.capture(forks, x())
    with pytest.raises(rl.ReplaylensError):
        prog.replay(to="sin_1", patch={"cos_1": double})


def test_a_patch_may_itself_replay_the_program():
    prog = rl.capture(forks, x())

    def nested(value):
        prog.replay(patch={"sin_1": torch.zeros_like, "add_1": torch.zeros_like})
        return value

    run = prog.replay(patch={"sin_1": nested, "add_1": double})
    assert_same(run.output[0], (2 * (x().sin() + x().cos())).tanh())


def test_replays_of_one_program_in_several_threads_do_not_meet():
    prog, together = rl.capture(torch.sin, x()), threading.Barrier(3, timeout=10)

    def work(number):
        patch = {
            "input_1": lambda value: together.wait() * value,
            "sin_1": lambda value: torch.full_like(value, number),
        }
        return [prog.replay(patch=patch).output[0, 0].item() for _ in range(5)]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [[number] * 5 for number in range(3)]


# ---- inputs, state, draws ------------------------------------------------------------------------------------------


def scaled(pair, *, scale, mode="mul"):
    return {mode: getattr(pair[0] + pair[1], mode)(scale)}


def test_other_inputs_have_the_structure_of_the_recorded_ones():
    prog = rl.capture(scaled, [x(), x(1)], scale=x(2), mode="sub")
    assert_same(prog([x(3), x(4)], scale=x(5), mode="sub").output, scaled([x(3), x(4)], scale=x(5), mode="sub"))
    assert_same(prog.replay().output, scaled([x(), x(1)], scale=x(2), mode="sub"))


def test_a_keyword_of_the_model_may_be_called_like_an_option_of_replay():
    def model(x, state, keep):
        return x * state + keep

    prog = rl.capture(model, x(), state=x(1), keep=x(2))
    assert_same(prog(x(3), state=x(4), keep=x(5)).output, model(x(3), x(4), x(5)))


def test_other_inputs_may_lie_otherwise_in_memory():
    prog = rl.capture(lambda x: x.reshape(12).relu(), x())
    other = torch.randn(4, 3).t()
    assert_same(prog(other).output, other.reshape(12).relu())


def test_other_inputs_are_never_written():
    prog, other = rl.capture(lambda x: x.add_(1).mul_(2), x()), x(1)
    assert_same(prog(other).output, (x(1) + 1) * 2)
    assert_same(other, x(1))


def test_other_parameters_may_be_given_by_any_of_their_addresses():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for address in "0.weight", "1.weight":
        run = rl.capture(model, x()).replay(state={address: torch.eye(4)})
        assert_same(run.output, x() + model[0].bias + model[1].bias)


def test_other_buffers_may_be_given():
    model = nn.BatchNorm1d(4).eval()
    run = rl.capture(model, x()).replay(state={"running_mean": torch.ones(4)})
    assert_same(run.output, F.batch_norm(x(), torch.ones(4), torch.ones(4), model.weight, model.bias))


def test_draws_are_replayed_whatever_the_generator_does_meanwhile():
    prog = rl.capture(mlp(train=True), x())
    torch.manual_seed(99)
    assert_same(prog.replay().output, prog.output)
    assert_same(prog.replay(from_="2").output, prog.output)


def test_fresh_draws_are_those_of_the_global_generator():
    model = nn.Dropout()
    prog = rl.capture(model, x())
    torch.manual_seed(5)
    first, second = prog.replay(rng="fresh").output, prog.replay(rng="fresh").output
    torch.manual_seed(5)
    assert_same(first, model(x()))
    assert_same(second, model(x()))


def test_a_generator_of_the_models_own_is_neither_needed_nor_moved():
    generator = torch.Generator().manual_seed(3)
    prog = rl.capture(lambda x: x + torch.randn(3, 4, generator=generator), x())
    state = generator.get_state()
    assert_same(prog.replay().output, prog.output)
    assert not torch.equal(prog.replay(rng="fresh").output, prog.output)
    assert torch.equal(generator.get_state(), state)


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["output", "all", ["add_1", "cos_1"], lambda layer: layer.layer_type == "sin"])
def test_every_value_can_be_asked_for_whatever_was_kept(keep):
    run = rl.capture(forks, x()).replay(patch={"sin_1": double}, keep=keep)
    left, right = 2 * x().sin(), x().cos()
    assert_same([run[name] for name in ("sin_1", "cos_1", "add_1", "tanh_1", "exp_1", "output_2")],
                [left, right, left + right, (left + right).tanh(), right.exp(), right.exp()])  # fmt: skip


def test_a_value_that_a_run_did_not_keep_is_that_of_the_run_and_not_the_recorded_one():
    prog = rl.capture(mlp(train=True), x())
    run, kept = prog(x(1)), prog.replay(x(1), keep="all")
    assert_same(run["0"], prog.replay(x(1), to="0")["0"])
    for layer in prog.layers:
        assert_same(run[layer.label], kept[layer.label], layer.label)


def test_a_fresh_value_that_was_not_kept_is_not_drawn_again():
    run = rl.capture(mlp(train=True), x()).replay(rng="fresh")
    with pytest.raises(rl.ReplaylensError, match="fresh draws cannot be repeated"):
        run["3"]


def test_recorded_values_are_those_of_their_moment():
    def model(x):
        y = x.sin()
        y.add_(1)
        y[0] = 7
        return y.relu_()

    prog = rl.capture(model, x())
    assert_same(prog["sin_1"].value, x().sin())
    assert_same(prog["add_1"].value, x().sin() + 1)


def test_nothing_that_a_replay_does_changes_a_recorded_value():
    prog = rl.capture(mlp(train=True), x())
    recorded = {layer.label: layer.value.clone() for layer in prog.layers}
    prog.replay()
    prog.replay(x(1), grad=True).output.sum().backward()
    prog.replay(patch={"0": lambda value: value.fill_(9)}, keep="all")
    prog.replay(rng="fresh", state={"4.bias": torch.ones(2)})
    assert_same({layer.label: layer.value for layer in prog.layers}, recorded)


def test_an_output_that_is_no_tensor_comes_back_as_it_was():
    prog = rl.capture(lambda x: {"y": (x.sin(), None, "word"), "n": 3, "x": x}, x())
    assert_same(prog(x(1)).output, {"y": (x(1).sin(), None, "word"), "n": 3, "x": x(1)})


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_gradients_reach_inputs_parameters_and_patches():
    model, start, patch = mlp(), x().requires_grad_(), torch.ones(3, 8, requires_grad=True)
    prog = rl.capture(model, start)
    prog.replay(grad=True).output.sum().backward()
    got = [start.grad.clone(), model[0].weight.grad.clone()]
    model.zero_grad()
    start.grad = None
    model(start).sum().backward()
    assert_same(got, [start.grad, model[0].weight.grad])
    prog.replay(patch={"0": patch}, grad=True).output.sum().backward()
    wanted = torch.ones(3, 8, requires_grad=True)
    model[1:](wanted).sum().backward()
    assert_same(patch.grad, wanted.grad)


def test_gradients_go_through_a_patch_that_is_a_function():
    start = x().requires_grad_()
    rl.capture(torch.sin, x()).replay(start, patch={"input_1": torch.square}, grad=True).output.sum().backward()
    torch.testing.assert_close(start.grad, 2 * x() * x().square().cos())


def test_gradients_reach_other_parameters_that_are_given():
    weight = torch.eye(4, requires_grad=True)
    model = nn.Linear(4, 4)
    rl.capture(model, x()).replay(state={"weight": weight}, grad=True).output.sum().backward()
    torch.testing.assert_close(weight.grad, x().sum(0).expand(4, 4))
    assert model.weight.grad is None and model.bias.grad is not None


def test_every_value_of_a_run_with_gradients_has_its_history():
    run = rl.capture(forks, x()).replay(x(1).requires_grad_(), grad=True, keep="all")
    (slope,) = torch.autograd.grad(run["tanh_1"].sum(), run["add_1"])
    torch.testing.assert_close(slope, 1 - run["tanh_1"].square())


def test_without_gradients_nothing_has_a_history():
    run = rl.capture(mlp(), x().requires_grad_()).replay(keep="all")
    assert not run.output.requires_grad and not run["0"].requires_grad and not run["input_1"].requires_grad


def stops(x):
    with torch.no_grad():
        y = x.exp()
    return x.sin() * y + x.cos().detach()


def test_gradients_stop_where_the_model_stops_them():
    ours, plain = x().requires_grad_(), x().requires_grad_()
    rl.capture(stops, x()).replay(ours, grad=True).output.sum().backward()
    stops(plain).sum().backward()
    assert_same(ours.grad, plain.grad)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
def test_a_stop_that_a_capture_without_gradients_cannot_see_is_no_silent_gradient(outer):
    with outer():
        prog = rl.capture(stops, x())
    ours, plain = x().requires_grad_(), x().requires_grad_()
    stops(plain).sum().backward()
    with suppress(rl.NotDifferentiable):
        prog.replay(ours, grad=True).output.sum().backward()
        assert_same(ours.grad, plain.grad)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
def test_what_was_captured_without_gradients_gives_them(outer):
    model = mlp()
    with outer():
        prog = rl.capture(model, x())
    prog.replay(x(), grad=True).output.sum().backward()
    got = model[4].weight.grad.clone()
    model.zero_grad()
    model(x()).sum().backward()
    assert_same(got, model[4].weight.grad)


def test_gradients_can_be_taken_twice():
    start = x().requires_grad_()
    (slope,) = torch.autograd.grad(
        rl.capture(torch.sin, x()).replay(start, grad=True).output.sum(), start, create_graph=True
    )
    (bend,) = torch.autograd.grad(slope.sum(), start)
    torch.testing.assert_close(bend, -x().sin())


# ---- what is left alone --------------------------------------------------------------------------------------------


def test_what_the_model_writes_is_an_output_of_the_run_and_leaves_the_model_alone():
    model, plain = mlp(train=True), mlp(train=True)
    prog = rl.capture(model, x())
    held = belongings(model)
    plain(x())
    assert_same(sorted(prog.state_changes.items()), sorted(plain[1].named_buffers("1")))
    fresh = mlp(train=True)
    fresh(x(1))  # from the recorded state, not from the present one
    assert_same(sorted(prog(x(1)).state_changes.items()), sorted(fresh[1].named_buffers("1")))
    assert_same(belongings(model), held)


def test_a_replay_leaves_model_generators_and_surroundings_alone():
    prog = rl.capture(model := mlp(train=True), x())
    before = belongings(model), generators(), surroundings()
    prog.replay()
    prog.replay(x(1), patch={"0": double}, keep="all", state={"4.bias": torch.ones(2)})
    prog.replay(grad=True)
    with pytest.raises(rl.ShapeMismatch):
        prog.replay(patch={"3": torch.zeros(1)})
    assert_same((belongings(model), generators(), surroundings()), before)


def makes_tensors(x):
    return F.linear(x, torch.ones(4, 4), torch.arange(4.0))


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default_device": lambda: torch.device("meta"),
    "default_dtype": lambda: default_dtype(torch.float64),
}


@contextmanager
def default_dtype(dtype):
    outer = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(outer)


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_is_the_same_whatever_mode_it_is_asked_for_under(mode):
    prog, other = rl.capture(makes_tensors, x()), x(1)
    with MODES[mode]():
        got = prog.replay().output, prog(other).output
    assert_same(got, (makes_tensors(x()), makes_tensors(other)))


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_remembers_the_mode_of_the_capture(mode):
    with MODES[mode]():
        start = x().to(torch.get_default_device(), torch.get_default_dtype())
        prog, wanted = rl.capture(makes_tensors, start), makes_tensors(start)
    assert_same(prog.replay().output, wanted)


@pytest.mark.parametrize("collect", [True, False], ids=["by_the_collector", "at_once"])
def test_nothing_is_alive_when_program_and_run_are_dropped(collect):
    prog = rl.capture(mlp(train=True), x())
    run = prog.replay(patch={"0": double}, keep="all")
    values = [
        prog.output,
        run.output,
        *(prog[name].value for name in ("0", "1", "3")),
        *(run[name] for name in ("0", "3")),
    ]
    alive = [weakref.ref(thing) for value in values for thing in (value, value.untyped_storage())]
    alive += [weakref.ref(prog), weakref.ref(run)]
    gc.collect()
    gc.disable()
    try:
        del prog, run, values
        if collect:
            gc.collect()
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def test_a_replay_that_fails_leaves_nothing_alive():
    prog, held = rl.capture(forks, x()), []
    with pytest.raises(ZeroDivisionError):
        prog.replay(x(1), patch={"add_1": lambda value: held.append(weakref.ref(value)) or 1 / 0}, keep="all")
    gc.collect()
    assert held[0]() is None


def test_a_layer_of_another_program_is_a_patch():
    model = mlp()
    clean, corrupt = rl.capture(model, x()), rl.capture(model, x(1))
    assert_same(corrupt.replay(patch={"0": clean["0"]}).output, clean.output)


def test_gradients_can_be_taken_with_respect_to_any_value_of_a_run():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    run = rl.capture(model, x()).replay(grad=True)
    (slope,) = torch.autograd.grad(run.output.sum(), run["linear_1"])
    hidden = model[0](x())
    assert_same(slope, torch.autograd.grad(model[1](hidden).sum(), hidden)[0])


def test_a_refreshed_program_has_the_parameters_that_the_model_holds_now():
    model = torch.nn.Linear(4, 3)
    prog = rl.capture(model, torch.ones(2, 4))
    model.weight = torch.nn.Parameter(torch.zeros(3, 4))
    assert torch.equal(prog.refresh().output, model(torch.ones(2, 4)))


def test_a_write_by_index_that_reads_its_own_memory_reads_it_while_it_writes():
    def model(x, scale=1.0):
        y = (torch.zeros(15) + x.sum() * scale).as_strided((2, 2, 2), (8, 4, 2))  # with gaps: torch does not refuse it
        y = y.copy_(x * scale)
        y[torch.tensor([1, 0])] = y[:]
        return y

    prog = rl.capture(model, torch.arange(8.0).view(2, 2, 2))
    others = torch.arange(8.0).view(2, 2, 2) * 3 + 1
    assert_same(prog.replay(others).output, model(others))


class Holder(nn.Module):
    """Has a tensor that is no buffer, in a list too, and does with it and its input what it is told."""

    def __init__(self, does):
        super().__init__()
        self.does, self.own, self.kept = does, torch.arange(4.0), [torch.ones(4)]

    def forward(self, x):
        return self.does(self, x)


def writes_its_own(m, x):
    m.own.add_(1)
    m.kept[0].add_(1)
    return x * 2


def writes_the_input(m, x):
    x.add_(1)
    return m.own * 2, m.kept[0] * 2


def writes_through_views_of_both(m, x):
    view, mine, kept = x[1:], m.own[1:], m.kept[0][1:]
    mine.add_(1)
    kept.add_(1)
    return view * 2 + x.sum()


def writes_nothing(m, x):
    return x * 2 + m.own + m.kept[0]


GIVEN = {
    "attribute": lambda m: m.own,
    "view of an attribute": lambda m: m.own.view(4),
    "kept in a list": lambda m: m.kept[0],
    "detached from what is kept in a list": lambda m: m.kept[0].detach(),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("does", [writes_its_own, writes_the_input, writes_through_views_of_both])
def test_an_input_over_the_memory_of_the_models_own_tensor_that_is_written_can_be_no_other(does, mode, given):
    with mode():
        plain, model, live = Holder(does), Holder(does), Holder(does)
        prog, wanted = rl.capture(model, given(model)), plain(given(plain))
        assert_same(prog.output, wanted)
        assert_same(prog.replay().output, wanted)
        assert_same(rl.run(live, given(live)).output, wanted, "live")
        with pytest.raises(rl.InputMismatch, match="shared its memory"):
            prog.replay(torch.ones(4), on_divergence="raise")


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_an_input_over_the_memory_of_the_models_own_tensor_may_be_another_where_nothing_is_written(given):
    model = Holder(writes_nothing)
    assert_same(rl.capture(model, given(model)).replay(torch.ones(4) * 5).output, model(torch.ones(4) * 5))


@pytest.mark.parametrize("of", ["own", "the input"])
def test_an_input_that_is_the_models_own_tensor_is_not_given_other_memory(of):
    def assigns(m, x):
        (m.own if of == "own" else x).data = x * 2
        return x + m.own

    model = Holder(assigns)
    with pytest.raises(rl.CaptureError, match="an input that is the model's own tensor"):
        rl.capture(model, model.own)


IN_INFERENCE_MODE = {
    "an input": lambda prog, model, x: (prog.replay(x * 2).output, model(x * 2)),
    "a call": lambda prog, model, x: (prog(x * 2).output, model(x * 2)),
    "an input with other strides": lambda prog, model, x: (
        prog.replay((x * 2).t().contiguous().t()).output,
        model((x * 2).t().contiguous().t()),
    ),
    "an input of another shape": lambda prog, model, x: (
        prog.replay(torch.cat([x, x])).output,
        model(torch.cat([x, x])),
    ),
    "with gradients": lambda prog, model, x: (prog.replay(x * 2, grad=True).output, model(x * 2)),
    "a tensor": lambda prog, model, x: (prog.replay(patch={"relu_1": x * 2}).output, model[2](x * 2)),
    "Add": lambda prog, model, x: (
        prog.replay(patch={"relu_1": rl.Add(x * 2) >> rl.Scale(2.0)}).output,
        model[2]((model[:2](x) + x * 2) * 2.0),
    ),
    "Project": lambda prog, model, x: (
        prog.replay(patch={"relu_1": rl.Project(x[0] * 2)}).output,
        model[2](rl.Project(x[0] * 2)(model[:2](x))),
    ),
    "state": lambda prog, model, x: (
        prog.replay(state={"2.weight": model[2].weight * 2}).output,
        torch.nn.functional.linear(model[:2](x), model[2].weight * 2, model[2].bias),
    ),
    "an edit": lambda prog, model, x: (prog.with_patch({"relu_1": x * 2}).replay(x).output, model[2](x * 2)),
    "many": lambda prog, model, x: (prog.replay_many({0: {"relu_1": x * 2}}).values[0], model[2](x * 2)),
    "a slice": lambda prog, model, x: (prog.slice(from_="relu_1").replay(x * 2).output, model[2](x * 2)),
}


@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("name", IN_INFERENCE_MODE)
def test_a_program_replays_within_inference_mode_on_what_is_made_there(name, without):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(2, 3)
    with torch.set_grad_enabled(not without):
        prog = rl.capture(model, x)
    with torch.inference_mode():
        got, wanted = IN_INFERENCE_MODE[name](prog, model, x)
        assert torch.equal(got, wanted)


def test_an_edit_that_is_made_within_inference_mode_can_be_replayed_outside_of_it():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(2, 3)
    prog = rl.capture(model, x)
    with torch.inference_mode():
        edited, run = prog.with_patch({"relu_1": rl.Scale(2.0) >> rl.Add(x * 2)}), prog.replay(x * 2)
    assert torch.equal(edited.replay(x * 3).output, model[2](model[:2](x * 3) * 2.0 + x * 2))
    assert torch.equal(run["relu_1"], model[:2](x * 2)), "asked for later"


def test_an_inference_tensor_that_is_given_outside_of_inference_mode_is_none_to_the_model_either():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with torch.inference_mode():
        other = x * 2
    with pytest.raises(RuntimeError, match="cannot be saved for backward"):
        model(other)
    with pytest.raises(RuntimeError, match="cannot be saved for backward"):
        rl.capture(model, x).replay(other)
