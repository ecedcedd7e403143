"""A program as a pure function of tensors, and as a tree of them."""

import copy
from contextlib import suppress

import pytest
import torch
from oracle import assert_same
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves, tree_map

import replaylens as rl


def x(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def in_place(x):
    y = x.sin()
    y[:, 1:].mul_(x[:, :1])
    y[0] += 1
    return y.sum(1)


def with_outputs(x, y):
    return {"sum": x + y, "rest": [x.sin(), 3]}


def stops(x):
    with torch.no_grad():
        y = x.exp()
    return x * y


FUNCTIONS = {
    "sequential": model(),
    "in_place": in_place,
    "stops_gradients": stops,
    "softmax": lambda x: x.softmax(1) @ x.T,
}


# ---- what a function is --------------------------------------------------------------------------------------------


def test_a_function_takes_the_inputs_and_gives_the_output_of_the_model():
    f = rl.capture(with_outputs, x(), y=x(1)).function()
    assert_same(f(x(2), x(3)), with_outputs(x(2), x(3)))


def test_a_function_takes_and_gives_any_layers():
    prog = rl.capture(model(), x())
    hidden, final = prog.function(inputs=["0"], outputs=["tanh_1", "2"])(torch.ones(3, 8))
    assert_same([hidden, final], [torch.ones(3, 8).tanh(), model()[2](torch.ones(3, 8).tanh())])
    assert_same(prog.function("0", "tanh_1")(torch.zeros(3, 8)), torch.zeros(3, 8))


def test_a_function_does_not_run_what_its_arguments_stand_for():
    prog = rl.capture(lambda x: x.sqrt().sin(), -x().abs())
    assert not prog.function(inputs=["sqrt_1"])(x().abs()).isnan().any()


def test_a_function_takes_parameters_by_their_addresses():
    prog = rl.capture(net := model(), x())
    f = prog.function(inputs=["input_1", "2.weight", "2.bias"])
    state = {"2.weight": torch.ones(2, 8), "2.bias": torch.zeros(2)}
    assert_same(f(x(1), *state.values()), functional_call(net, state, x(1)))


def test_a_function_called_with_too_few_tensors_says_how_many_it_takes():
    with pytest.raises(TypeError) as error:
        rl.capture(with_outputs, x(), x(1)).function()(x())
    assert str(error.value) == "the function takes 2 tensors, and was given 1."


def test_a_function_of_a_layer_that_does_not_exist_offers_others():
    prog = rl.capture(model(), x())
    for ask in {"inputs": ["tanh_2"]}, {"outputs": ["tanh_2"]}:
        with pytest.raises(rl.NoSuchLayer, match="'tanh_1_2'"):
            prog.function(**ask)


def test_a_function_has_no_effects():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    prog = rl.capture(net, x())
    held, state, given = net[0].running_mean.clone(), torch.get_rng_state(), x(1)
    f = prog.function()
    assert_same(f(given), f(given))
    assert_same([net[0].running_mean, torch.get_rng_state(), given], [held, state, x(1)])


def test_a_guard_holds_in_a_function_too():
    f = rl.capture(lambda x: x.sin() if x.sum() > 0 else x.cos(), torch.ones(3)).function()
    assert_same(f(torch.ones(3) * 2), (torch.ones(3) * 2).sin())
    with pytest.raises(rl.DivergedReplay):
        f(-torch.ones(3))


# ---- transforms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_grad_is_that_of_the_model(name):
    function = FUNCTIONS[name]
    f = rl.capture(function, x()).function()
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x(1)), grad(lambda x: function(x).sum())(x(1)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jvp_is_that_of_the_model(name):
    function = FUNCTIONS[name]
    f = rl.capture(function, x()).function()
    torch.testing.assert_close(jvp(f, (x(1),), (x(2),)), jvp(function, (x(1),), (x(2),)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacrev_is_that_of_the_model(name):
    function = FUNCTIONS[name]
    torch.testing.assert_close(jacrev(rl.capture(function, x()).function())(x(1)), jacrev(function)(x(1)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_a_loop(name):
    f = rl.capture(FUNCTIONS[name], x()).function()
    many = torch.stack([x(seed) for seed in range(5)])
    torch.testing.assert_close(vmap(f)(many), torch.stack([FUNCTIONS[name](one) for one in many]))


def test_vmap_over_a_layer_shares_what_comes_before_it():
    prog = rl.capture(net := model(), x())
    many = torch.randn(6, 3, 8)
    torch.testing.assert_close(vmap(prog.function(inputs=["tanh_1"]))(many), net[2](many))


def test_per_sample_gradients_of_parameters():
    net = model()
    f = rl.capture(net, x()[:1]).function(inputs=["input_1", "0.weight"])
    ours = vmap(grad(lambda weight, row: f(row, weight).sum()), (None, 0))(net[0].weight, x()[:, None])
    plain = vmap(grad(lambda weight, row: functional_call(net, {"0.weight": weight}, row).sum()), (None, 0))
    torch.testing.assert_close(ours, plain(net[0].weight, x()[:, None]))


def test_transforms_nest():
    f = rl.capture(in_place, x()).function()
    hessian = torch.func.jacfwd(jacrev(lambda x: f(x).sum()))
    torch.testing.assert_close(hessian(x(1)), torch.func.jacfwd(jacrev(lambda x: in_place(x).sum()))(x(1)))


def test_grad_with_respect_to_a_layer_in_the_middle():
    prog = rl.capture(net := model(), x())
    slope = grad(lambda hidden: prog.function(inputs=["tanh_1"])(hidden).sum())(prog["tanh_1"].value)
    torch.testing.assert_close(slope, net[2].weight.sum(0).expand(3, 8))


def test_plain_autograd_goes_through_a_function():
    start = x(1).requires_grad_()
    rl.capture(model(), x()).function()(start).sum().backward()
    plain = x(1).requires_grad_()
    model()(plain).sum().backward()
    assert_same(start.grad, plain.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_compiles_whole_or_where_the_model_writes_in_place_in_parts(name):
    torch.compiler.reset()
    f = torch.compile(rl.capture(FUNCTIONS[name], x()).function(), backend="eager", fullgraph=name != "in_place")
    assert_same(f(x(1)), FUNCTIONS[name](x(1)))
    assert_same(f(x(2)), FUNCTIONS[name](x(2)))


# ---- a program as a tree of tensors --------------------------------------------------------------------------------


def test_the_leaves_of_a_program_are_its_tensors():
    prog = rl.capture(net := model(), x())
    found = tree_leaves(prog)
    assert all(isinstance(leaf, torch.Tensor) for leaf in found)
    assert any(torch.equal(leaf, net[0].weight) for leaf in found)


def test_a_program_maps_to_a_program():
    prog = rl.capture(model(), x())
    same = tree_map(lambda tensor: tensor.clone(), prog)
    assert isinstance(same, rl.Program) and same.layer_labels == prog.layer_labels
    assert_same([same.output, same.replay().output, same["0"].value], [prog.output, prog.output, prog["0"].value])
    assert_same(same(x(1)).output, model()(x(1)))


def test_a_mapped_program_computes_with_what_it_was_given():
    prog = rl.capture(model(), x())
    zero = tree_map(torch.zeros_like, prog)
    assert_same(zero.replay().output, torch.zeros(3, 2))
    assert_same(prog.replay().output, model()(x()))


def test_a_program_can_be_copied_deeply():
    prog = rl.capture(net := model(), x())
    prog.replay()
    copied = copy.deepcopy(prog)
    with torch.no_grad():
        net[0].weight.zero_()
    assert_same([copied.output.detach(), copied.replay().output], [prog.output.detach()] * 2)


def test_a_program_moves_to_another_dtype():
    prog = rl.capture(net := model(), x())
    double = prog.to(torch.float64)
    assert_same(double.output, model().double()(x().double()))
    assert_same(double(x(1).double()).output, model().double()(x(1).double()))
    assert prog.output.dtype is torch.float32 and net[0].weight.dtype is torch.float32
    assert double.history == ("captured", "to(torch.float64)")


def test_a_program_that_makes_tensors_moves_with_them():
    def adds_ones(x):
        return x + torch.ones(3, 4) + torch.arange(4)

    double = rl.capture(adds_ones, x()).to(torch.float64)
    assert_same(double.output, adds_ones(x().double()))


def test_a_program_moves_to_another_device():
    prog = rl.capture(lambda x: model().to("meta")(x) if x.is_meta else x + torch.zeros(4, device=x.device), x())
    assert prog.to("meta").output.device.type == "meta"


def test_a_moved_program_is_one_of_its_own():
    prog = rl.capture(net := model(), x())
    double = prog.to(torch.float64)
    with torch.no_grad():
        net[0].weight.zero_()
    assert_same(double.replay().output, double.output)


# ---- after a step of training ---------------------------------------------------------------------------------------


def trained_one_step(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


ASK = {
    "replay": lambda prog: prog.replay(),
    "replay_on_other_inputs": lambda prog: prog(x(1)),
    "replay_from_a_layer": lambda prog: prog.replay(from_="tanh_1"),
    "function": lambda prog: prog.function(),
    "value": lambda prog: prog["0.weight"].value,
}


@pytest.mark.parametrize("use", [False, True], ids=["before_its_first_use", "after_a_replay"])
@pytest.mark.parametrize("how", ASK)
def test_after_a_step_a_program_is_stale(how, use):
    prog = rl.capture(net := model(), x())
    if use:
        ASK[how](prog)
    trained_one_step(net)
    with pytest.raises(rl.StaleValue):
        ASK[how](prog)


def test_after_a_step_what_needs_no_parameter_is_not_stale():
    prog = rl.capture(net := nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x())
    wanted = [prog.output, net[0](x()).detach()]
    trained_one_step(net)
    assert_same([prog.replay(from_="0").output, prog["0"].value], wanted)
    assert_same(prog.output, wanted[0])


def test_after_a_step_a_replay_on_given_parameters_is_not_stale():
    prog = rl.capture(net := model(), x())
    prog.replay()
    trained_one_step(net)
    assert_same(prog.replay(state=dict(net.named_parameters())).output, net(x()).detach())


def test_a_function_computes_with_the_recorded_parameters_or_says_that_they_are_gone():
    prog = rl.capture(net := model(), x())
    f, wanted = prog.function(), prog.output.detach()
    trained_one_step(net)
    with suppress(rl.StaleValue):
        assert_same(f(x()).detach(), wanted)


def test_a_refreshed_program_is_not_stale():
    prog = rl.capture(net := model(), x())
    trained_one_step(net)
    fresh = prog.refresh()
    assert_same([fresh.output, fresh.replay().output], [net(x()), net(x()).detach()])
    assert_same(fresh(x(1)).output, net(x(1)).detach())
    assert fresh.history == ("captured", "refreshed") and prog.history == ("captured",)


def test_a_refreshed_program_still_gives_gradients_to_the_model():
    prog = rl.capture(net := model(), x())
    trained_one_step(net)
    prog.refresh().replay(grad=True).output.sum().backward()
    got = net[0].weight.grad.clone()
    net.zero_grad()
    net(x()).sum().backward()
    assert_same(got, net[0].weight.grad)


def test_a_program_can_be_trained_through():
    net, plain = model(), model()
    prog = rl.capture(net, x())
    for _ in range(3):
        for one in net, plain:
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            optimizer.zero_grad()
            (prog.replay(grad=True).output if one is net else one(x())).square().sum().backward()
            optimizer.step()
        prog = prog.refresh()
    assert_same(net.state_dict(), plain.state_dict())


def test_a_refreshed_program_follows_the_buffers_of_the_model():
    net = nn.BatchNorm1d(4)
    prog = rl.capture(net.eval(), x())
    with torch.no_grad():
        net.running_mean.fill_(3)
    assert_same(prog.refresh().output, net(x()).detach())


def test_a_function_of_inputs_over_one_memory_that_is_written_is_refused():
    def model(x, y):
        x.add_(1)
        return x * 1, y * 1

    given = torch.arange(6.0)
    function = rl.capture(model, given[:3], given[:3].view(3)).function()
    for inputs in ((given[:3], given[1:4]), (given[:3], given[:3].view(3))):
        with pytest.raises(rl.InputMismatch, match="shared its memory"):
            function(*inputs)
