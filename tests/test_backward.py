"""`prog.backward`: the gradients that a backward pass leaves at every layer, as hooks on the tensors would see them."""

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same
from torch import nn
from zoo import CAPTURE_REFUSED, GRADIENTS_REFUSED, MODELS, is_refused_so, silence

import replaylens as rl


class Block(nn.Module):
    """A residual, a write in place, a view, dropout; and something that leads nowhere and something detached."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.note = lambda name, value: value

    def forward(self, x):
        a = self.note("linear_1", self.first(x))
        b = self.note("relu_1", F.relu(a))
        c = self.note("linear_2", self.second(b))
        d = self.note("dropout_1", F.dropout(c, 0.5))
        e = self.note("add_1", b + d)
        f = self.note("view_1", e.view(-1, 8))
        g = self.note("detach_1", f.detach())
        h = self.note("mul_1", f * g)
        self.note("sum_1", e.sum())  # nobody reads it
        return self.note("linear_3", self.last(h))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(3, 4)


def captured(model, x, **how):
    torch.manual_seed(2)
    return rl.capture(model, x, **how)


def hooked(model, x, of, start=None):
    """What hooks see in the model's own backward pass, from the output or from a value within."""
    torch.manual_seed(2)
    found, values = {}, {}

    def noting(name, value):
        values[name] = value
        if value.requires_grad:
            value.register_hook(lambda grad: found.__setitem__(name, grad.clone()))
        return value

    plain, model.note = model.note, noting
    output = model(x)
    model.note = plain
    of(output if start is None else values[start]).backward()
    model.zero_grad()
    return found


def weighted(value):
    return (value * torch.arange(float(value.numel())).reshape(value.shape)).sum()


@pytest.mark.parametrize("save", ["all", "none"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_every_layer_has_the_gradient_that_a_hook_would_see(model, x, save, mode):
    wanted = hooked(model, x, weighted)
    assert {"linear_1", "relu_1", "dropout_1", "add_1", "view_1", "mul_1", "linear_3"} <= set(wanted)
    with mode():
        prog = captured(model, x, save=save).backward(of=weighted)
        for name, grad in wanted.items():
            assert_same(prog[name].grad, grad, name)
        assert prog["input_1"].grad.shape == (3, 4)


@pytest.mark.parametrize("start", ["relu_1", "add_1", "mul_1"])
def test_a_backward_pass_begins_at_any_layer(model, x, start):
    wanted = hooked(model, x, weighted, start)
    prog = captured(model, x)
    back = prog.backward(of=weighted, from_layer=start)
    for name, grad in wanted.items():
        assert_same(back[name].grad, grad, name)
    assert not back["linear_3"].grad.any()  # what comes later has no part in it
    wanted = hooked(model, x, torch.sum, start)
    for back in (prog.backward(of=start), prog.backward(from_layer=start), prog.backward(from_layer=prog[start])):
        assert_same(back["linear_1"].grad, wanted["linear_1"])
        assert_same(back[start].grad, torch.ones(3, 8))


def test_without_a_function_it_is_the_sum(model, x):
    prog = captured(model, x)
    assert_same(prog.backward()["linear_1"].grad, prog.backward(of=torch.sum)["linear_1"].grad)


def test_the_program_stays_as_it_was_and_the_model_collects_nothing(model, x):
    prog = captured(model, x)
    back = prog.backward(of=weighted)
    assert back is not prog
    assert (back.graph, back.output is prog.output) == (prog.graph, True)
    assert back.history == ("captured", "backward(weighted)")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(back["relu_1"].value, prog["relu_1"].value)
    with pytest.raises(rl.NoGradient) as error:
        _ = prog["relu_1"].grad
    assert str(error.value) == (
        "the program had no backward pass, so there are no gradients. `prog.backward(of=...)` runs one; "
        "`step.capture(model, backward=True)` has those of a step that a watch kept."
    )


def test_gradients_are_saved_selectively(model, x):
    prog = captured(model, x)
    back = prog.backward(of=weighted, save=["relu", "first", -4, "first.weight"])
    whole = prog.backward(of=weighted)
    assert list(back.gradients) == ["linear_1_1", "relu_1_2", "mul_1_8", "first.weight"]
    assert_same(back["first"].grad, whole["linear_1"].grad)
    (wanted,) = torch.autograd.grad(weighted(prog.replay(grad=True).output), model.first.weight)
    assert_same(back.gradients["first.weight"], wanted)
    with pytest.raises(rl.NoGradient) as error:
        _ = back["linear_3"].grad
    assert str(error.value).startswith("the gradient at linear_3_10 was not asked for. It was at linear_1_1, relu_1_2")


def test_a_parameter_is_saved_beside_all_layers(model, x):
    prog = captured(model, x)
    back = prog.backward(of=weighted, save=["all", "first.weight"])
    assert list(back.gradients) == [*prog.backward(of=weighted).gradients, "first.weight"]


def test_a_function_asks_for_what_hooks_would_see_and_no_more():
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    prog = rl.capture(normed, torch.rand(3, 4))
    back = prog.backward(save=lambda layer: True)
    assert (
        list(back.gradients)
        == list(prog.backward().gradients)
        == ["input_1_0", "linear_1_1", "batchnorm_1_4", "output_1_5"]
    )
    assert set(back.gradients.without) == {"buffer_1_2", "buffer_2_3"}


def test_where_no_gradient_comes_back_the_layer_says_why(model, x):
    back = rl.capture(lambda x: F.relu(x).detach() * x, x).backward()
    assert_same(back["input_1"].grad, F.relu(x))
    with pytest.raises(rl.NoGradient) as error:
        _ = back["relu_1"].grad
    assert str(error.value).startswith("no gradient reaches relu_1_1: detached in detach_1_2 (test_backward.py:")
    assert list(back.gradients.without) == ["relu_1_1", "detach_1_2"]


def test_a_start_that_is_no_one_number_is_an_error(model, x):
    with pytest.raises(rl.BadMetric) as error:
        rl.capture(lambda x: (x * 2, x), x).backward()
    assert str(error.value) == (
        "a gradient begins at one tensor, and this is a tuple. Say which number of it is meant: "
        "of=lambda value: value[0].sum()."
    )
    with pytest.raises(TypeError) as error:
        captured(model, x).backward(of="relu_1", from_layer="add_1")
    assert str(error.value) == "of= is a function of the value of from_layer=, not 'relu_1'."


def test_a_program_that_had_a_backward_pass_can_do_all_that_it_could(model, x):
    prog = captured(model, x)
    back = prog.backward()
    assert_same(back.replay(patch={"relu_1": rl.Zero()}).output, prog.replay(patch={"relu_1": rl.Zero()}).output)
    again = back.with_patch({"relu_1": rl.Scale(0.0)}).backward()
    assert not again["linear_1"].grad.any()
    with pytest.raises(rl.NoGradient):
        _ = back.with_patch({"relu_1": rl.Zero()})["linear_1"].grad


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_grads_gives_however_little_was_saved(name):
    with silence():
        case = MODELS[name]()
        try:
            torch.manual_seed(1)
            prog = rl.capture(case.model, *case.args, **case.kwargs)
            if not prog.graph.output_refs:
                pytest.skip("it returns no tensor")
            end = prog.graph.output_refs[0]
            wanted = prog.backward(from_layer=end.node)
        except Exception as refusal:
            value = prog[end.node].value if isinstance(refusal, rl.BadMetric) else torch.zeros(())
            is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
            if not is_number or is_refused_so(name, refusal, CAPTURE_REFUSED, GRADIENTS_REFUSED):
                pytest.skip(f"{refusal}")
            raise
        found = prog.saving("none").backward(from_layer=end.node)
        assert_same(dict(found.gradients), dict(wanted.gradients))
        assert found.gradients.without == wanted.gradients.without


class Retaining(nn.Module):
    """Reads gradients that computed values keep."""

    def __init__(self, does):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.does = nn.Linear(4, 4), nn.Linear(4, 4), does

    def forward(self, x):
        return self.does(self, x)


def one_that_is_kept(m, x):
    h = m.a(x)
    h.retain_grad()
    h.pow(2).sum().backward(retain_graph=True)
    made = h.grad * 2
    m.zero_grad()
    return made + m.a(x)


def two_that_are_kept(m, x):
    h = m.a(x)
    h.retain_grad()
    g = m.b(torch.tanh(h))
    g.retain_grad()
    g.pow(2).sum().backward()
    return h.grad + g.grad + x


def one_that_is_added_to(m, x):
    h = m.a(x)
    h.retain_grad()
    h.pow(2).sum().backward(retain_graph=True)
    h.pow(3).sum().backward()
    return h.grad


def one_that_no_gradient_reaches(m, x):
    h, k = m.a(x), m.b(x)
    h.retain_grad()
    k.retain_grad()
    k.pow(2).sum().backward()
    return k.grad * (2 if h.grad is None else 3)


def one_of_a_part(m, x):
    h = m.a(x)
    row = h[0]
    row.retain_grad()
    (row * h.sum()).sum().backward()
    return x * row.grad


RETAINING = (
    one_that_is_kept,
    two_that_are_kept,
    one_that_is_added_to,
    one_that_no_gradient_reaches,
    one_of_a_part,
)


@pytest.mark.parametrize("does", RETAINING, ids=lambda does: does.__name__)
def test_gradients_that_computed_values_keep_are_the_models(does):
    x, y = (torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    prog = rl.capture(Retaining(does), x)
    assert torch.equal(prog.output.detach(), Retaining(does)(x).detach())
    assert torch.equal(prog.replay(y).output.detach(), Retaining(does)(y).detach())
    hooked = Retaining(does)
    hooked.a.register_forward_hook(lambda module, args, output: output * 2)
    wanted = hooked(x).detach()
    assert torch.equal(prog.replay(patch={"a": rl.Scale(2.0)}).output.detach(), wanted)
    assert torch.equal(rl.run(Retaining(does), x, patch={"a": rl.Scale(2.0)}).output.detach(), wanted)
    assert prog.check()
    assert rl.check(Retaining(does), x)
