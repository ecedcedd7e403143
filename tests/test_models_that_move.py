"""Models whose modules, parameters and buffers are put elsewhere, taken away or made: by the user after the capture, or
by their own forward.

Witness: the plain model, run as often.
"""

import copy

import pytest
import torch
from oracle import assert_same
from torch import nn
from torch.nn.utils import parametrize

import replaylens as rl


def x(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def two_layers(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=bias))


class Does(nn.Module):
    """A model that does what a function says, with parts of these names."""

    def __init__(self, does, **parts):
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.does(self, x)


def takes_the_bias(model):
    model[2].bias = None


def deletes_the_bias(model):
    del model[2].bias


def parametrizes(model):
    parametrize.register_parametrization(model[2], "weight", nn.Tanh())


def replaces_the_layer_by_one_without_bias(model):
    model[2] = nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize(
    "change", [takes_the_bias, deletes_the_bias, parametrizes, replaces_the_layer_by_one_without_bias]
)
@pytest.mark.parametrize("edited", [False, True])
def test_a_refresh_of_what_is_gone_says_capture_again(change, edited):
    model = two_layers()
    prog = rl.capture(model, x())
    if edited and change is not replaces_the_layer_by_one_without_bias:  # an edited program knows of no model
        prog = prog.swap("tanh_1", torch.tanh)
    change(model)
    with pytest.raises(
        rl.StaleValue, match=r"was removed or parametrized since the capture\.\nCapture the model again"
    ):
        prog.refresh()


def test_a_refresh_of_a_model_with_a_new_parameter_says_capture_again():
    model = two_layers(bias=False)
    prog = rl.capture(model, x())
    model[2].bias = nn.Parameter(torch.ones(4))
    with pytest.raises(rl.StaleValue, match=r"`2\.bias` now, and had none when it was captured\.\nCapture the model"):
        prog.refresh()


def steps(model):
    with torch.no_grad():
        model[2].weight.mul_(2)


def assigns(model):
    model[2].weight = nn.Parameter(torch.ones(4, 4))


def replaces_the_layer(model):
    model[2] = nn.Linear(4, 4)


def adds_a_probe(model):
    model[1].probe = nn.Linear(7, 7)


@pytest.mark.parametrize("change", [steps, assigns, replaces_the_layer, adds_a_probe])
def test_a_refreshed_program_is_the_model_as_it_is_now(change):
    model = two_layers()
    prog = rl.capture(model, x())
    change(model)
    fresh = prog.refresh()
    assert_same(fresh.output, model(x()))
    assert_same(fresh.replay().output, model(x()))
    assert_same(fresh.replay(x(1), patch={"tanh_1": rl.Scale(2.0)}).output, model[2](2 * model[1](model[0](x(1)))))


def test_a_refreshed_program_runs_the_model_with_what_it_holds_now():
    def does(m, x):
        return m.small(x) if x.sum() < 1000 else m.large(x)

    model = Does(does, small=nn.Linear(4, 4), large=nn.Linear(4, 4))
    prog = rl.capture(model, x())
    model.large, model.small.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))
    run = prog.refresh().replay(patch={"input_1": rl.Add(1e6)})
    assert run.diverged
    assert_same(run.output, model.large(x() + 1e6))


def test_a_refresh_that_leaves_the_path_says_capture_again():
    def does(m, x):
        while x.norm() < 10:
            x = x * m.w
        return x

    model = Does(does, w=nn.Parameter(torch.tensor(2.0)))
    prog = rl.capture(model, torch.ones(3))
    with torch.no_grad():
        model.w.fill_(3.0)
    with pytest.raises(rl.DivergedReplay, match="was True when recorded, and is False now") as caught:
        prog.refresh()
    assert "Capture the model again" in str(caught.value)
    assert "on_divergence" not in str(caught.value)


def exchanges(m, x):
    m.a, m.b = m.b, m.a
    return m.a(x) + 2 * m.b(x)


def turns_a_list(m, x):
    m.layers = nn.ModuleList(list(m.layers)[::-1])
    return m.layers[1](m.layers[0](x).relu())


def grows(m, x):
    if len(m.layers) < 3:
        m.layers.append(nn.Tanh())
    for layer in m.layers:
        x = layer(x)
    return x


def pair():
    torch.manual_seed(0)
    return {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


MOVING = {
    "exchanges": lambda: Does(exchanges, **pair()),
    "turns_a_list": lambda: Does(turns_a_list, layers=nn.ModuleList(pair().values())),
    "grows": lambda: Does(grows, layers=nn.ModuleList(pair().values())),
}


@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING)
def test_a_model_that_moves_its_modules_is_checked_where_it_begins(make):
    model = make()
    for _ in range(2):
        report = rl.check(model, x())
        assert report, str(report)
        model(x())


@pytest.mark.parametrize("make", MOVING.values(), ids=MOVING)
def test_a_model_that_moves_its_modules_has_no_module_that_goes_one_path(make):
    prog = rl.capture(make(), x())
    with pytest.raises(rl.ReplaylensError, match="other submodules, or changed their places"):
        prog.module()
    with pytest.raises(rl.StaleValue, match="Capture the model again"):
        prog.refresh()


def test_a_model_that_moves_its_modules_is_run_from_where_it_began():
    def does(m, x):
        m.a, m.b = m.b, m.a
        h = m.a(x)
        return h * 2 if h.sum() > 1000 else h + 2 * m.b(x)

    model = Does(does, **pair())
    plain, first = copy.deepcopy(model), model.a
    plain.b.register_forward_hook(lambda module, args, output: output + 1e6)
    run = rl.run(model, x(), patch={"b": rl.Add(1e6)})
    assert model.a is first
    want = plain(x())
    assert_same(run.output, want)
    prog = rl.capture(model, x())
    assert model.b is first
    run = prog.replay(patch={"b": rl.Add(1e6)})
    assert run.diverged
    assert model.b is first
    assert_same(run.output, want)


def test_a_second_look_begins_with_the_modules_of_the_first():
    def does(m, x):
        m.layers.append(nn.Tanh())
        for layer in m.layers:
            x = layer(x)
        return x + getattr(torch, "Float" + "Tensor")([1.0])  # is seen by a second look alone

    model = Does(does, layers=nn.ModuleList([nn.Linear(4, 4)]))
    prog = rl.capture(model, x())
    assert len(model.layers) == 2
    assert [layer.layer_type for layer in prog.layers if layer.layer_type == "tanh"] == ["tanh"]


def exchanges_parameters(m, x):
    m.a, m.b = m.b, m.a
    return m.a * x + 2 * m.b


def exchanges_and_reads_one(m, x):
    m.a, m.b = m.b, m.a
    return m.a * x


@pytest.mark.parametrize("does", [exchanges_parameters, exchanges_and_reads_one])
def test_parameters_that_change_places_have_the_names_under_which_they_stood_first(does):
    model = Does(does, a=nn.Parameter(torch.ones(4)), b=nn.Parameter(torch.full((4,), 2.0)))
    plain = copy.deepcopy(model)
    report = rl.check(model, x())
    assert report, str(report)
    module = rl.capture(model, x()).module()
    plain(x())
    for seed in (1, 2, 3):
        assert_same(module(x(seed)), plain(x(seed)))
    assert_same(model(x(4)), plain(x(4)))


def test_parameters_that_change_places_are_run_from_where_they_stood():
    def does(m, x):
        m.a, m.b = m.b, m.a
        h = m.a * x
        return h * 2 if h.sum() > 1000 else h * m.b

    model = Does(does, a=nn.Parameter(torch.ones(4)), b=nn.Parameter(torch.full((4,), 2.0)))
    run = rl.capture(model, x()).replay(patch={"mul_1_1": rl.Add(1e6)})
    assert run.diverged
    assert_same(run.output, (2 * x() + 1e6) * 2)


def asks_for_none(m, x):
    if m.h is None:
        m.h = torch.zeros(4)
    m.h = m.h + x.mean(0)
    return x + m.h


def asks_by_name(m, x):
    if not hasattr(m, "h"):
        m.register_buffer("h", torch.zeros(4))
    m.h = m.h + x.mean(0)
    return x + m.h


def asks_later(m, x):
    before, m.h = m.h, x.mean(0)
    return x if before is None else x + before


def asks_for_all(m, x):
    y = x if dict(m.named_buffers()) else x * 2
    m.h = x.mean(0)
    return y + m.h


def makes_a_parameter(m, x):
    if m.w is None:
        m.w = nn.Parameter(torch.full((4,), 3.0))
    return x * m.w


def with_empty_buffer(does):
    model = Does(does)
    model.register_buffer("h", None)
    return model


def with_empty_parameter(does):
    model = Does(does)
    model.register_parameter("w", None)
    return model


ASKING = {
    "none": lambda: with_empty_buffer(asks_for_none),
    "name": lambda: Does(asks_by_name),
    "later": lambda: with_empty_buffer(asks_later),
    "all": lambda: with_empty_buffer(asks_for_all),
    "attribute": lambda: Does(asks_for_none, h=None),
    "parameter": lambda: with_empty_parameter(makes_a_parameter),
    "inside": lambda: nn.Sequential(with_empty_buffer(asks_for_none)),
}


@pytest.mark.parametrize("make", ASKING.values(), ids=ASKING)
def test_a_forward_that_asks_whether_something_stands_there_has_a_module_once_it_does(make):
    model, plain = make(), make()
    with pytest.raises(rl.ReplaylensError, match="of which there was none when it began"):
        rl.capture(model, x()).module()
    module = rl.capture(model, x()).module()
    plain(x()), plain(x())
    for seed in (1, 2, 3):
        assert_same(module(x(seed)), plain(x(seed)))


def keeps_its_mean(m, x):
    m.h = x.mean(0)
    return x + m.h


def registers(m, x):
    m.register_buffer("h", x.mean(0))
    return x + m.h


@pytest.mark.parametrize(
    "make", [lambda: with_empty_buffer(keeps_its_mean), lambda: Does(keeps_its_mean, h=None), lambda: Does(registers)]
)
def test_a_forward_that_makes_what_it_keeps_each_time_has_a_module_at_once(make):
    model, plain = make(), make()
    module = rl.capture(model, x()).module()
    plain(x())
    for seed in (1, 2):
        assert_same(module(x(seed)), plain(x(seed)))


def puts_another(m, x):
    y = m.a(x)
    m.a = nn.Linear(4, 4)
    return m.a(y)


def takes_one_away(m, x):
    y = m.layers[1](x)
    m.layers.pop(1)
    return y


def deletes(m, x):
    y = m.a(x)
    del m.a
    return y


def makes_a_norm(m, x):
    m.a.norm = nn.BatchNorm1d(4)
    return m.a.norm(x)


def puts_it_at_two_places(m, x):
    m.b = m.a
    return m.b(x)


EXCHANGING = {
    **MOVING,
    "puts_another": lambda: Does(puts_another, **pair()),
    "takes_one_away": lambda: Does(takes_one_away, layers=nn.ModuleList(pair().values())),
    "deletes": lambda: Does(deletes, **pair()),
    "makes_a_norm": lambda: Does(makes_a_norm, **pair()),
    "puts_it_at_two_places": lambda: Does(puts_it_at_two_places, **pair()),
}


@pytest.mark.parametrize("make", EXCHANGING.values(), ids=EXCHANGING)
def test_a_forward_that_exchanges_modules_changes_the_state_at_their_addresses(make):
    def state(model):
        return {key: value.clone() for key, value in model.state_dict().items()}

    plain, model = make(), make()
    first = state(plain)
    torch.manual_seed(1)
    plain(x())
    last = state(plain)
    torch.manual_seed(1)
    changes = rl.capture(model, x()).replay().state_changes
    assert {key for key in changes if changes[key] is None} == first.keys() - last.keys()
    differ = {key for key, value in last.items() if key not in first or not torch.equal(first[key], value)}
    assert differ <= changes.keys() <= first.keys() | last.keys()
    for key in last.keys() & changes.keys():
        assert_same(changes[key], last[key])


class HasAPartOfABuffer(nn.Module):
    """The first forward takes the buffer away from the part of it: what the next one writes, the part does not see."""

    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.ones(3))
        self.register_buffer("part", self.b[1:])

    def forward(self, x):
        old = self.b
        self.b = self.b * 2
        old.add_(1)
        return x + self.part.sum()


def test_a_part_of_a_buffer_that_the_forward_moved_away_from_it():
    witness, model = HasAPartOfABuffer(), HasAPartOfABuffer()
    wanted = [witness(torch.zeros(1)) for _ in range(2)]
    prog = rl.capture(model, torch.zeros(1))
    assert torch.equal(prog.output, wanted[0])
    with pytest.raises(rl.DivergedReplay, match="the memory of part"):
        prog.refresh()
