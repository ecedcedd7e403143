"""A slice of a program is a program; a module of it trains the model's own parameters."""

import copy
import pickle

import pytest
import torch
from internals import problems
from oracle import assert_same
from torch import nn
from torch.nn import functional as F

import replaylens as rl


class Block(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.a = nn.Linear(size, size)
        self.b = nn.Linear(size, size)

    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def h():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(2))


def said(kind, action):
    with pytest.raises(kind) as error:
        action()
    assert error.type is kind
    return str(error.value)


# ---- slices --------------------------------------------------------------------------------------------------------


def test_a_slice_is_the_program_of_a_part(net, x, h):
    part = rl.capture(net, x).slice("layers.0", "layers.2")
    assert part.layer_labels[0] == "add_1_4" and "linear_1" not in part
    assert_same(part.output, net.layers[2](net.layers[1](net.layers[0](x))))
    assert_same(part.replay().output, part.output)
    assert_same(part(h).output, net.layers[2](net.layers[1](h)))
    assert part.history == ("captured", "slice(from_='layers.0', to='layers.2')")
    assert part.code.splitlines()[0] == "def Net(add_1_4):" and part.code.splitlines()[-1] == "    return add_3_12"
    assert list(part.state) == [f"layers.{n}.{p}" for n in (1, 2) for p in ("a.weight", "a.bias", "b.weight", "b.bias")]


def test_a_slice_may_begin_at_several_values_and_give_several(net, x, h):
    prog = rl.capture(net, x)
    part = prog.slice(["layers.0", "relu_2"], ["layers.1", "layers.2"])
    middle = x + net.layers[1].b(h)
    assert_same(part(x, h).output, (middle, net.layers[2](middle)))
    named = prog.slice("layers.0", {"mean": "layers.1", "all": "output"})
    assert_same(named(h).output, {"mean": net.layers[1](h), "all": net.head(net.layers[2](net.layers[1](h)))})


def test_a_slice_may_begin_at_the_input_and_end_at_the_output(net, x, h):
    prog = rl.capture(net, x)
    assert_same(prog.slice(to="layers.0")(h).output, net.layers[0](h))
    assert_same(prog.slice("layers.1")(h).output, net.head(net.layers[2](h)))
    assert prog.slice().graph == prog.graph


def test_what_passes_by_the_beginning_is_held_as_it_was_recorded(net, x, h):
    prog = rl.capture(net, x)
    part = prog.slice("relu_2", "layers.1")
    assert_same(part(h).output, net.layers[0](x) + net.layers[1].b(h))
    assert part["add_1"].layer_type == "constant"
    assert_same(part(h).output, prog.replay(patch={"relu_2": h}, to="add_2")["add_2"])


def test_what_is_made_of_parameters_alone_is_made_again(x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)))
    part = rl.capture(model, x).slice("relu_1")
    assert "1.parametrizations.weight.original0" in part.state
    part.replay(grad=True).output.sum().backward()
    assert model[1].parametrizations.weight.original0.grad.abs().sum() > 0


def test_a_slice_keeps_the_guards_on_its_way(x):
    def model(x):
        hidden = x.exp()
        if hidden.sum() > 0:
            hidden = hidden * 2
        rest = hidden.tanh()
        return rest if rest.mean() < 9 else hidden

    prog = rl.capture(model, x)
    assert len(prog.slice("exp_1").guards) == 2 and len(prog.slice(to="mul_1").guards) == 1
    assert len(prog.slice("mul_1").guards) == 1 and prog.slice("exp_1", "exp_1").guards == ()
    with pytest.raises(rl.DivergedReplay):
        prog.slice("exp_1", "mul_1")(-x.exp())


def test_the_parts_of_a_node_that_gives_several_may_be_a_beginning(x):
    class Halves(nn.Module):
        def forward(self, x):
            return x.chunk(2, 1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.halves = Halves()

        def forward(self, x):
            a, b = self.halves(x)
            return a * 2 + b

    prog = rl.capture(Model(), x)
    one, two = torch.ones(2, 4), torch.zeros(2, 4)
    part = prog.slice("chunk_1")
    assert_same(part((one, two)).output, one * 2)
    assert not problems(part.graph)


def test_a_write_through_a_view_goes_to_what_a_slice_is_given():
    def model(x):
        y = x * 2
        z = y[1:]
        z.add_(1.0)
        return y, z

    x = torch.ones(3, 2)
    prog, other = rl.capture(model, x), torch.zeros(2, 2)
    assert_same(prog.slice("getitem_1")(other).output, prog.replay(patch={"getitem_1": other}).output)


def test_a_slice_without_a_way_is_an_error(net, x):
    prog = rl.capture(net, x)
    assert said(rl.BadEdit, lambda: prog.slice("layers.1", "layers.0")) == (
        "add_1_4 does not depend on add_2_8, where the slice was to begin."
    )
    with pytest.raises(rl.NoSuchLayer, match="no layer is called"):
        prog.slice("layers.7")


def test_a_slice_cannot_begin_at_memory_that_is_written_later():
    def model(x):
        y = x * 2
        z = y[0]
        y.add_(1.0)
        return z + 1

    assert said(rl.BadEdit, lambda: rl.capture(model, torch.ones(3, 2)).slice("getitem_1")) == (
        "the model writes the memory of getitem_1_2 later, and reads it again: a slice cannot begin there.\n"
        "Begin before it, or behind the write."
    )


def test_a_slice_cannot_begin_inside_a_gradient(x):
    def model(x):
        y = x.detach().requires_grad_()
        energy = y.square().tanh().sum()
        (slope,) = torch.autograd.grad(energy, y)
        return slope * 2

    prog = rl.capture(model, x)
    assert said(rl.BadEdit, lambda: prog.slice("square_1")) == (
        "grad_1_6 is a gradient that the model takes through square_1_3: a slice cannot begin there.\n"
        "Begin before it, or behind the gradient."
    )
    assert_same(prog.slice("grad_1")((x,)).output, x * 2)


# ---- modules -------------------------------------------------------------------------------------------------------


def test_a_module_holds_the_models_own_parameters_under_their_own_names(net, x, h):
    module = rl.capture(net, x).module("layers.0", "layers.2")
    assert_same(module(h), net.layers[2](net.layers[1](h)))
    names = [name for name, _ in net.named_parameters() if name.startswith(("layers.1", "layers.2"))]
    assert [name for name, _ in module.named_parameters()] == names
    assert all(module.get_parameter(name) is net.get_parameter(name) for name in names)
    assert module.layers[1].a.weight is net.layers[1].a.weight
    assert list(module.state_dict()) == names
    assert "Net: (add_1_4) -> (add_3_12)" in repr(module)


def test_a_module_of_the_whole_is_the_model(net, x, h):
    module = rl.capture(net, x).module()
    module.load_state_dict(net.state_dict())
    for inputs in (x, h):
        assert_same(module(inputs), net(inputs))


def test_training_a_module_trains_the_model(net, x, h):
    twin = copy.deepcopy(net)
    module = rl.capture(net, x).module("layers.0", "layers.2")
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (module, nn.ModuleList(twin.layers[1:]))]
    for _ in range(3):
        for optimizer, output in zip(optimizers, (module(h), twin.layers[2](twin.layers[1](h))), strict=True):
            optimizer.zero_grad()
            output.square().sum().backward()
            optimizer.step()
    for name, parameter in net.named_parameters():
        assert_same(parameter, twin.get_parameter(name), name)


def test_gradients_reach_what_a_module_is_given(net, x, h):
    h = h.requires_grad_()
    rl.capture(net, x).module("layers.2")(h).sum().backward()
    found, h.grad = h.grad, None
    net.head(h).sum().backward()
    assert_same(found, h.grad)


def test_a_module_called_without_gradients_makes_none(net, x, h):
    module = rl.capture(net, x).module("layers.2")
    with torch.no_grad():
        assert not module(h).requires_grad
    with torch.no_grad():
        prog = rl.capture(net, x)
    assert prog.module("layers.2")(h).requires_grad, "also of a program that was captured without"


def test_tied_parameters_are_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(6, 4)
            self.out = nn.Linear(4, 6, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, ids):
            return self.out(self.emb(ids))

    model, ids = Tied(), torch.tensor([[0, 3, 5]])
    module = rl.capture(model, ids).module()
    assert len(list(module.parameters())) == 1
    assert list(module.state_dict()) == list(model.state_dict())
    assert module.out.weight is module.emb.weight is model.emb.weight
    assert_same(module(ids), model(ids))
    twin = copy.deepcopy(module)
    assert twin.out.weight is twin.emb.weight and twin.out.weight is not model.emb.weight


def test_a_module_in_training_writes_its_statistics_and_draws_anew(x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.BatchNorm1d(8))
    twin = copy.deepcopy(model)
    module = rl.capture(model, x).module("0")
    twin(x)
    for _ in range(2):
        torch.manual_seed(3)
        found = module(x)
        torch.manual_seed(3)
        assert_same(found, twin[3](twin[2](twin[1](x))))
    assert not torch.equal(module(x), module(x))
    twin[3](twin[2](twin[1](x))), twin[3](twin[2](twin[1](x)))
    assert_same(model[1].running_mean, twin[1].running_mean)
    assert model[3].num_batches_tracked == 5
    assert [name for name, _ in module.named_buffers()] == [
        f"{n}.{b}" for n in (1, 3) for b in ("num_batches_tracked", "running_mean", "running_var")
    ]


def test_a_module_works_under_functional_call_and_vmap(net, x):
    module = rl.capture(net, x).module("layers.0")
    zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    assert_same(torch.func.functional_call(module, zeros, (x,)), torch.zeros(2, 3))
    many = torch.randn(5, 2, 8)
    found = torch.func.vmap(module)(many)
    torch.testing.assert_close(found, torch.stack([module(one) for one in many]))


def test_a_copy_of_a_module_has_parameters_of_its_own(net, x, h):
    module = rl.capture(net, x).module("layers.0")
    twin = copy.deepcopy(module).eval()
    assert not twin.training
    assert list(twin.state_dict()) == list(module.state_dict())
    with torch.no_grad():
        twin.head.bias.add_(1)
    torch.testing.assert_close(twin(h), module(h) + 1)


def test_a_module_cannot_be_pickled_and_says_what_can(net, x, tmp_path):
    module = rl.capture(net, x).module("layers.0")
    wanted = (
        "a module made from a program holds the model's functions, and cannot be pickled or saved as it is.\n"
        "Save its state_dict(), and load that into a module made again: prog.module(...).load_state_dict(...)."
    )
    assert said(rl.ReplaylensError, lambda: pickle.dumps(module)) == wanted
    assert said(rl.ReplaylensError, lambda: torch.save(module, tmp_path / "module.pt")) == wanted
    torch.save(module.state_dict(), tmp_path / "state.pt")
    module.load_state_dict(torch.load(tmp_path / "state.pt"))


def test_a_module_takes_the_recorded_kind_of_input_and_the_recorded_path(net, x):
    module = rl.capture(net, x).module("layers.0")
    assert_same(module(h := torch.randn(5, 8)), net.head(net.layers[2](net.layers[1](h))))
    with pytest.raises(rl.InputMismatch, match="Give the recorded shape and dtype"):
        module(x.double())

    def choosy(x):
        return x * 2 if x.sum() > 0 else x * 3

    module = rl.capture(choosy, torch.ones(2)).module()
    with pytest.raises(rl.DivergedReplay):
        module(-torch.ones(2))


def test_a_module_of_an_edited_program_trains_what_the_edit_brought(net, x, h):
    prelu = nn.PReLU()
    module = rl.capture(net, x).swap("relu", prelu).module("layers.1")
    assert module.get_parameter("relu_1_2.weight") is prelu.weight
    module(h).sum().backward()
    assert prelu.weight.grad is not None


def test_a_module_sees_parameters_that_are_put_in_the_place_of_others(net, x, h):
    module = rl.capture(net, x).module("layers.2")
    module.head.bias = nn.Parameter(torch.ones(3))
    assert_same(module(h), F.linear(h, net.head.weight, torch.ones(3)))
