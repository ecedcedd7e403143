"""What became of a model's tensors since the capture, and what a forward leaves in them.

Witness: the plain model, run as often, or forward hooks on it.
"""

import copy

import pytest
import torch
from internals import model_state
from oracle import assert_same
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import replaylens as rl


def x(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


class Stateful(nn.Module):
    """A model that does what a function says, with buffers and attributes of these names."""

    def __init__(self, does, buffers=(), attributes=(), **more):
        super().__init__()
        self.does = does
        for number, name in enumerate(buffers):
            self.register_buffer(name, x(10 + number))
        for number, name in enumerate(attributes):
            setattr(self, name, x(20 + number))
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.does(self, x)


def hands_on(m, x):
    y = x + m.last - 2 * m.prev
    m.last, m.prev = x * 2, m.last
    return y


def exchanges(m, x):
    y = x + m.a - 2 * m.b
    m.a, m.b = m.b, m.a
    return y


def exchanges_unread(m, x):
    m.a, m.b = m.b, m.a
    return x * 3


def gives_two_one(m, x):
    y = x + m.a - 2 * m.b
    m.a = m.b = x * 2
    return y


def writes_only(m, x):
    m.a = x * 2
    m.b.copy_(x)
    return x + 1


def grows(m, x):
    y = x + m.a
    m.a = torch.cat([m.a[:1], y.sum(0, keepdim=True)]).sum(0, keepdim=True)
    return y


def counts(m, x):
    m.a.add_(1)
    return x * m.a


def reads_a_part(m, x):
    m.a.add_(x)
    return x + m.first


def reassigns_an_attribute(m, x):
    y = x + m.h
    m.h = m.h * 0.5 + x
    return y


def reassigns_in_containers(m, x):
    y = x + m.held[0] - m.held[1]["k"]
    m.held[0], m.held[1]["k"] = x * 2, m.held[1]["k"] + 1
    return y


def reassigns_a_pair(m, x):
    h, c = m.pair
    m.pair = (h + x, c * 0.5)
    return x + h - c


def registers(m, x):
    m.register_buffer("new", x * 2)
    return x + m.new


def shares_a_part():
    model = Stateful(reads_a_part, ["a"])
    model.register_buffer("first", model.a[:1])
    return model


def batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), Stateful(writes_only, ["a", "b"]))


MODELS = {
    "hands_on": lambda: Stateful(hands_on, ["last", "prev"]),
    "exchanges": lambda: Stateful(exchanges, ["a", "b"]),
    "exchanges_unread": lambda: Stateful(exchanges_unread, ["a", "b"]),
    "gives_two_one": lambda: Stateful(gives_two_one, ["a", "b"]),
    "writes_only": lambda: Stateful(writes_only, ["a", "b"]),
    "grows": lambda: Stateful(grows, ["a"]),
    "counts": lambda: Stateful(counts, ["a"]),
    "shares_a_part": shares_a_part,
    "reassigns_an_attribute": lambda: Stateful(reassigns_an_attribute, [], ["h"]),
    "reassigns_in_containers": lambda: Stateful(reassigns_in_containers, held=[x(1), {"k": x(2)}]),
    "reassigns_a_pair": lambda: Stateful(reassigns_a_pair, pair=(x(1), x(2))),
    "registers": lambda: Stateful(registers),
    "batch_norm": batch_norm,
    "spectral_norm": normed,
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


@every_model
def test_state_changes_are_all_that_the_forward_leaves_in_buffers(make):
    model, plain = make(), make()
    before, prog = buffers(plain), rl.capture(model, x())
    assert_same(prog.output, plain(x()))
    left = buffers(plain)
    written = {name for name, value in left.items() if name not in before or not torch.equal(value, before[name])}
    assert written <= set(prog.state_changes)
    for name in set(left) & set(prog.state_changes):
        assert_same(prog.state_changes[name], left[name], name)


@every_model
def test_a_program_survives_the_next_forwards_of_its_model(make):
    model = make()
    prog = rl.capture(model, x())
    model(x(1)), rl.capture(model, x(2)), rl.check(model, x(3))
    assert_same(prog.replay().output, prog.output)
    names = [call.name for call in prog.graph.calls if call.name not in prog.graph.orphans]
    for name in names:
        assert_same(prog.replay(from_=name).output, prog.output, name)
    assert prog.check(), str(prog.check())


@every_model
def test_a_model_that_writes_its_state_is_right_for_both_checks(make):
    model = make()
    assert rl.capture(model, x()).check()
    report = rl.check(make(), x())
    assert report, str(report)


@pytest.mark.parametrize("make", [one for name, one in MODELS.items() if name not in ("spectral_norm", "grows")])
def test_a_module_goes_on_where_its_model_stands_and_writes_the_models_own_state(make):
    model, plain = make(), make()
    module = rl.capture(model, x()).module()
    plain(x())
    for seed in (1, 2):
        assert_same(module(x(seed)), plain(x(seed)))
    assert_same(model(x(3)), plain(x(3)))  # the model itself stands where the module left it
    assert_same(module(x(4)), plain(x(4)))
    for name, value in plain.named_buffers():
        assert_same(dict(model.named_buffers())[name], value, name)


def sets_none(m, x):
    y = x + m.a
    m.a = None
    return y


def deletes(m, x):
    y = x + m.a
    del m.a
    return y


@pytest.mark.parametrize("does", [sets_none, deletes])
def test_a_buffer_that_is_taken_away_is_none_among_the_changes(does):
    model = Stateful(does, ["a"])
    prog = rl.capture(model, x())
    assert prog.state_changes == {"a": None} == prog.replay().state_changes
    assert prog.check() and rl.check(Stateful(does, ["a"]), x())
    with pytest.raises(rl.StaleValue, match="the buffer `a` was removed since the capture"):
        prog.module()(x())


def test_buffers_that_are_given_one_tensor_stay_two_for_other_state():
    model, plain = Stateful(gives_two_one, ["a", "b"]), Stateful(gives_two_one, ["a", "b"])
    plain.b = torch.ones(3, 4)
    prog = rl.capture(model, x())
    assert_same(prog.replay(state={"b": torch.ones(3, 4)}).output, plain(x()))


def test_programs_of_a_model_that_writes_its_buffers_can_be_compared():
    model, plain = batch_norm(), batch_norm()
    one, other = rl.capture(model, x()), rl.capture(model, x(1))
    normed = plain[0](x(1))
    assert_same(one.replay(patch={"batchnorm_1": rl.From(other)}).output, plain[1](normed))


# ---- stale --------------------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def steps(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def steps_fused(model):
    model(x()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step()


def is_given_other_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def is_written_through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(2)


def is_loaded_by_assignment(model):
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, assign=True)


def is_given_a_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters()) + 1
    nn.utils.vector_to_parameters(vector, model.parameters())


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def is_parametrized(model):
    for layer in (model[0], model[2]):
        nn.utils.parametrize.register_parametrization(layer, "weight", Twice())


BECAME = [
    steps,
    steps_fused,
    nn.Module.double,
    nn.Module.half,
    is_given_other_data,
    is_written_through_data,
    is_loaded_by_assignment,
    is_given_a_vector,
    is_parametrized,
]

ASKED = {
    "replay": lambda p: p.replay(),
    "new inputs": lambda p: p(x(1)),
    "from": lambda p: p.replay(from_="linear_1"),
    "patch": lambda p: p.replay(patch={"relu_1": lambda value: value + 1}),
    "gradients": lambda p: p.replay(grad=True),
    "grads": lambda p: p.grads(of=lambda out: out.sum()),
    "function": lambda p: p.function()(x()),
    "sweep": lambda p: p.replay_many({1: {"relu_1": rl.Zero()}, 2: {"relu_1": rl.Scale(2.0)}}),
    "swap": lambda p: p.swap("relu", torch.tanh),
    "with_patch": lambda p: p.with_patch({"relu_1": rl.Zero()}),
    "deepcopy": lambda p: copy.deepcopy(p).replay(from_="linear_1"),
    "tree_map": lambda p: pytree.tree_map(torch.clone, p).replay(from_="linear_1"),
    "unflatten": lambda p: pytree.tree_unflatten(*pytree.tree_flatten(p)).replay(from_="linear_1"),
    "to": lambda p: p.to(torch.float64),
    "value": lambda p: p["0.weight"].value,
}


@pytest.mark.parametrize(
    ("became", "is_used"), [*[(one, False) for one in BECAME], (is_given_other_data, True), (steps_fused, True)]
)
def test_whatever_became_of_the_parameters_the_program_is_stale(became, is_used):
    for ask in ASKED.values():
        model = net()
        prog = rl.capture(model, x())
        if is_used:
            ask(prog)
        became(model)
        with pytest.raises(rl.StaleValue):
            ask(prog)
    report = prog.check()
    assert not report and "since the capture" in str(report)


@pytest.mark.parametrize("became", BECAME)
def test_a_check_says_which_values_are_stale_by_what_and_the_cure(became):
    model = net()
    prog = rl.capture(model, x())
    became(model)
    report = prog.check()
    headline, cure, *_ = str(report).splitlines()
    assert headline.startswith("Check of Sequential: stale: the parameter `0.weight` was ")
    assert headline.endswith("more.") and "since the capture" in headline and "`prog = prog.refresh()`" in cure
    assert "broken" not in str(report).lower() and not report
    assert {finding.law for finding in report.failures} == {"saved values"} and report.failures == report.stale
    assert repr(report) == f"<CheckReport: {headline}>"


@pytest.mark.parametrize("wide", [1, 3, 7, 64, 100])
@pytest.mark.parametrize("begin", [1, 2, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8])
def test_writes_through_data_are_noticed_behind_the_first_bytes(wide, begin, dtype):
    model = Stateful(lambda m, x: x + m.weight.sum(), weight=nn.Buffer(torch.ones(100, wide).to(dtype)))
    prog = rl.capture(model, x())
    assert prog.check() and torch.equal(prog.replay().output, prog.output)
    model.weight.data[begin:].mul_(2)
    with pytest.raises(rl.StaleValue):
        prog.replay()
    assert prog.check().stale
    assert_same(prog.refresh().output, model(x()))


@pytest.mark.parametrize(
    "change", [lambda w: w.T, lambda w: w[:, ::2], lambda w: w[:1].expand(4, 4), lambda w: w[0, 0]]
)
def test_tensors_that_do_not_fill_their_memory_are_watched_within_it(change):
    whole = torch.ones(4, 4)
    model = Stateful(lambda m, x: x + m.weight.sum(), weight=nn.Buffer(change(whole)))
    prog = rl.capture(model, x())
    assert_same(prog.replay().output, model(x()))
    whole.data.mul_(2)
    with pytest.raises(rl.StaleValue):
        prog.replay()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last(h if h.sum() > 0 else h * 2)


LEADS_AWAY = {
    "shape": lambda p: p.replay(torch.cat([x(), x(1)])),
    "dtype": lambda p: p.replay(x().double()),
    "patch": lambda p: p.replay(patch={"linear_1": torch.neg}),
    "sweep": lambda p: p.replay_many({1: {"linear_1": torch.neg}, 2: {"linear_1": rl.Scale(-2.0)}}),
    "gradients": lambda p: p.replay(patch={"linear_1": torch.neg}, grad=True),
}


@pytest.mark.parametrize("ask", LEADS_AWAY.values(), ids=LEADS_AWAY)
@pytest.mark.parametrize(
    "became", [one for one in BECAME if one not in (steps_fused, is_parametrized, is_given_a_vector)]
)
def test_a_live_run_does_not_put_old_parameters_back(became, ask):
    model = Branches()
    prog = rl.capture(model, x())
    became(model)
    held = dict(model.named_parameters())
    with pytest.raises(rl.StaleValue):
        ask(prog)
    assert all(held[name] is tensor for name, tensor in model.named_parameters())


def test_a_live_run_takes_given_parameters_for_those_that_were_replaced():
    model = Branches()
    prog = rl.capture(model, x())
    state = {name: tensor.detach() + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    both = torch.cat([x(), x(1)])
    assert_same(prog.replay(both, state=state).output, model(both))


@pytest.mark.parametrize(
    "of", [lambda p: p, lambda p: p.swap("relu", nn.functional.relu), lambda p: p.slice("linear_1")]
)
def test_a_module_holds_what_its_model_holds_after_a_load_by_assignment(of):
    model = net()
    module = of(rl.capture(model, x())).module()
    is_loaded_by_assignment(model)
    theirs = dict(model.named_parameters())
    assert all(tensor is theirs[name] for name, tensor in module.named_parameters())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in module.state_dict().items())
    is_loaded_by_assignment(model)
    assert module[2].weight is model[2].weight
    is_loaded_by_assignment(model)
    module.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()})
    assert not model[2].weight.any()


def test_buffers_that_are_one_by_assignment_are_not_given_other_state_by_one_name():
    model = Stateful(gives_two_one, ("a", "b"))
    model(x())
    prog = rl.capture(model, x())
    with pytest.raises(rl.InputMismatch, match="were one tensor when the model was captured"):
        prog.replay(state={"b": x(3)})
    both = Stateful(gives_two_one, ("a", "b"))
    both.a = both.b = x(3)
    assert_same(prog.replay(state={"a": x(3), "b": x(3)}).output, both(x()))


@pytest.mark.parametrize("became", [steps, is_given_other_data, is_loaded_by_assignment])
def test_a_refreshed_program_is_that_of_the_present_parameters(became):
    model = net()
    prog = rl.capture(model, x())
    became(model)
    fresh = prog.refresh()
    assert_same(fresh.output, model(x()))
    assert_same(fresh.replay(from_="linear_1").output, model(x()))
    became(model)
    with pytest.raises(rl.StaleValue):
        fresh.replay()


def test_a_model_of_another_dtype_has_to_be_captured_again():
    model = net()
    prog = rl.capture(model, x())
    module = prog.module()
    model.double()
    for ask in (prog.refresh, prog.replay, lambda: module(x()), lambda: prog.module()(x())):
        with pytest.raises(rl.StaleValue, match="Capture the model again"):
            ask()


def test_what_was_planned_before_the_parameters_changed_is_stale():
    model = net()
    prog = rl.capture(model, x())
    planned, function = prog.replay_many({1: {"relu_1": rl.Zero()}}, dry=True), prog.function()
    leaves, spec = pytree.tree_flatten(prog)
    steps(model)
    for ask in (planned.run, lambda: function(x()), pytree.tree_unflatten(leaves, spec).replay):
        with pytest.raises(rl.StaleValue):
            ask()


def test_a_copy_of_a_program_outlives_the_model():
    model = net()
    prog = rl.capture(model, x())
    twin, wanted = copy.deepcopy(prog), prog.output.clone()
    steps(model)
    assert_same(twin.replay(from_="linear_1").output, wanted)


# ---- what a run says later ----------------------------------------------------------------------------------------


def deep():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_a_patch_is_not_asked_again_for_what_a_run_says_later():
    model, made = deep(), []

    def random(value):
        made.append(torch.randn_like(value))
        return made[-1]

    prog = rl.capture(model, x())
    run = prog.replay(patch={"linear_1": random})
    values = [run[label] for label in prog.layer_labels]
    run.diff()
    assert len(made) == 1
    assert_same(values[-1], model[1:](made[0]))
    assert_same(run["linear_2"], model[1:3](made[0]))
    assert_same(prog.replay(patch={"linear_2": rl.From(run)}).output, run.output)


def test_asking_for_many_values_computes_each_once():
    model, ran = deep(), []
    prog = rl.capture(model, x()).swap("tanh", lambda value: ran.append(1) or value.tanh())
    run = prog.replay(x(1))
    for label in prog.layer_labels:
        run[label]
    run.diff()
    seen = {label: run[label] for label in prog.layer_labels}
    kept = prog.replay(x(1), keep="all")
    for label, value in seen.items():
        assert_same(value, kept[label], label)


GIVEN = {
    "input": lambda prog, t: prog.replay(t),
    "state": lambda prog, t: prog.replay(state={"0.weight": t}),
    "patch": lambda prog, t: prog.replay(patch={"linear_1": t}),
    "set": lambda prog, t: prog.replay(patch={"linear_1": rl.Set(t)}),
}


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_what_was_given_and_written_since_is_not_read_as_it_is_now(give):
    prog = rl.capture(deep(), torch.ones(4, 4))
    tensor = torch.randn(4, 4)
    run, held = give(prog, tensor), give(prog, tensor).hold_all()
    wanted = held["relu_1"].clone()
    tensor.zero_()
    assert_same(held["relu_1"], wanted)
    with pytest.raises(rl.StaleValue, match="was overwritten since the replay"):
        run["relu_1"]


def test_what_patches_made_of_given_tensors_is_remembered():
    model = deep()
    prog, vector = rl.capture(model, x()), torch.ones(4)
    run = prog.replay(patch={"linear_1": rl.Add(vector)})
    vector.zero_()
    assert_same(run["linear_2"], model[1:3](model[0](x()) + 1))


def test_a_kept_value_that_was_written_is_stale():
    prog = rl.capture(deep(), x())
    run = prog.replay(x(1), keep="all")
    run["tanh_1"].zero_()
    with pytest.raises(rl.StaleValue):
        run["tanh_1"]


# ---- what an input is, when a patch stands in its place ----------------------------------------------------------


class Own(torch.Tensor):
    pass


def with_a_gradient(value):
    value = value.clone().requires_grad_()
    value.sum().backward()
    return value


ASKS_AN_INPUT = {
    "isinstance": lambda x: x * 2 if isinstance(x, nn.Parameter) else x * 3,
    "type": lambda x: x * 2 if type(x) is torch.Tensor else x * 3,
    "class": lambda x: x * 2 if x.__class__.__name__ == "Tensor" else x * 3,
    "grad": lambda x: x * 2 if x.grad is None else x * 3,
    "content of grad": lambda x: x * 2 if x.grad is None else x * x.grad.sum().item(),
    "is_leaf": lambda x: x * 2 if x.is_leaf else x * 3,
    "requires_grad": lambda x: x * 2 if x.requires_grad else x * 3,
    "grad_fn": lambda x: x * 2 if x.grad_fn is None else x * 3,
    "behind a module": lambda x: nn.ReLU()(x) if isinstance(x, nn.Parameter) else x.tanh(),
}

GIVEN = {
    "parameter": lambda v: nn.Parameter(v + 1),
    "frozen parameter": lambda v: nn.Parameter(v + 1, requires_grad=False),
    "subclass": lambda v: (v + 1).as_subclass(Own),
    "with a gradient": with_a_gradient,
    "leaf": lambda v: (v + 1).requires_grad_(),
    "no leaf": lambda v: (v + 1).requires_grad_() * 1,
    "plain": lambda v: v + 1,
}

PATCHED = {
    "replay": lambda p, f, v: p.replay(patch={"input_1": v}).output,
    "raise": lambda p, f, v: p.replay(patch={"input_1": v}, on_divergence="raise").output,
    "function": lambda p, f, v: p.replay(patch={"input_1": lambda old: v}).output,
    "gradients": lambda p, f, v: p.replay(patch={"input_1": v}, grad=True).output,
    "run": lambda p, f, v: rl.run(f, x(), patch={"input_1": v}).output,
    "sweep": lambda p, f, v: p.replay_many({1: {"input_1": v}, 2: {"input_1": x()}}).values[0],
    "with_patch": lambda p, f, v: p.with_patch({"input_1": v}).output,
    "new input": lambda p, f, v: p(v).output,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("asks", ASKS_AN_INPUT.values(), ids=ASKS_AN_INPUT)
def test_a_patch_at_an_input_is_to_the_model_what_was_given(asks, give):
    value = give(x())
    wanted = asks(value).detach().as_subclass(torch.Tensor)
    prog = rl.capture(asks, x())
    for name, ask in PATCHED.items():
        try:
            found = ask(prog, asks, value)
        except rl.DivergedReplay:
            assert name in ("raise", "with_patch")
            continue
        except rl.InputMismatch:
            assert name == "raise"
            continue
        assert torch.equal(found.detach().as_subclass(torch.Tensor), wanted), name


def test_a_model_that_writes_what_it_is_given_does_not_write_the_patch():
    def writes(x):
        with torch.no_grad():
            x.mul_(2)
        return x + 1 if isinstance(x, nn.Parameter) else x - 1

    value = nn.Parameter(x())
    run = rl.run(writes, x(3), patch={"input_1": value})
    assert_same(run.output, x() * 2 + 1)
    assert_same(value.detach(), x())


def test_gradients_of_a_live_run_reach_the_leaf_that_an_input_was_patched_with():
    asks, value = ASKS_AN_INPUT["isinstance"], nn.Parameter(x() + 1)
    run = rl.capture(asks, x()).replay(patch={"input_1": value}, grad=True)
    run.output.sum().backward()
    assert_same(value.grad, torch.full((3, 4), 2.0))


# ---- what an edit's function gives, where the model asks later ----------------------------------------------------


def views_or_not(x):
    try:
        return x.tanh().view(-1)[:4] + x
    except RuntimeError:
        return x * 3


def leaves_or_not(x):
    y = x.tanh()
    return y * (2 if y.is_leaf else 3)


def has_function_or_not(x):
    y = x.tanh()
    return y * (2 if y.grad_fn is None else 3)


def steps_or_not(x):
    y = x.tanh()
    return y * (2 if 0 in y.stride() else 3)


def begins_or_not(x):
    y = x.tanh()
    return y + y.storage_offset()


INSERTED = [
    (views_or_not, lambda v: v.t().contiguous().t()),
    (leaves_or_not, lambda v: x().requires_grad_() * 1),
    (has_function_or_not, lambda v: x().requires_grad_() * 1),
    (steps_or_not, lambda v: torch.arange(4.0).expand(3, 4)),
    (begins_or_not, lambda v: torch.arange(20.0)[5:17].view(3, 4)),
]


@pytest.mark.parametrize(("asks", "gives"), INSERTED)
def test_what_an_inserted_function_gives_is_asked_what_the_model_asks(asks, gives):
    prog = rl.capture(asks, x())
    with pytest.raises(rl.DivergedReplay):
        prog.insert_after("tanh_1", gives)
    with pytest.raises(rl.DivergedReplay):
        prog.swap("tanh_1", gives)


class Held(nn.Module):
    """A parameter, a buffer and an attribute, all square."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        make = lambda seed: torch.randn(4, 4, dtype=dtype, generator=torch.Generator().manual_seed(seed))  # noqa: E731
        self.w = nn.Parameter(make(0))
        self.register_buffer("b", make(1))
        self.c = make(2)

    def forward(self, x):
        return torch.tanh(x @ self.w) @ self.b + self.c


SEEN_OTHERWISE = {
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(4, 4),
    "a part": lambda t: t[:, :1],
    "with a sign to come": torch._neg_view,
    "another overlap": lambda t: t.as_strided((4, 4), (1, 1)),
}


@pytest.mark.parametrize("guards", ["in C", "one by one"])
@pytest.mark.parametrize("place", ["w", "b", "c"])
@pytest.mark.parametrize("change", SEEN_OTHERWISE)
def test_the_same_memory_seen_otherwise_is_stale(change, place, guards, monkeypatch):
    if guards == "one by one":
        monkeypatch.setattr("replaylens._ir.model_state.TensorGuards", None)
    for asked_before in (False, True):
        model, x = Held(), torch.randn(4, 4)
        prog = rl.capture(model, x)
        if asked_before:
            prog.replay(patch={"input_1": rl.Scale(2.0)})
        tensor = getattr(model, place)
        tensor.data = SEEN_OTHERWISE[change](tensor.data)
        for ask in (
            lambda: prog.replay(),  # noqa: B023
            lambda: prog.replay(patch={"input_1": rl.Scale(2.0)}),  # noqa: B023
            lambda: prog.replay(torch.ones(4, 4)),  # noqa: B023
            lambda: copy.deepcopy(prog).replay(),  # noqa: B023
        ):
            with pytest.raises(rl.StaleValue):
                ask()
        assert not prog.check() and prog.check().stale


def test_a_conjugate_in_the_place_of_a_parameter_is_stale():
    model, x = Held(torch.complex64), torch.randn(4, 4, dtype=torch.complex64)
    prog = rl.capture(model, x)
    model.w.data = model.w.data.conj()
    with pytest.raises(rl.StaleValue):
        prog.replay()


def test_a_flag_or_a_mode_does_not_make_a_parameter_stale():
    model, x = Held(), torch.randn(4, 4)
    prog = rl.capture(model, x)
    expected = prog.replay().output
    model.w.requires_grad_(False)
    assert torch.equal(prog.replay().output, expected)
    with torch.inference_mode():
        assert torch.equal(prog.replay().output, expected)
    with torch.autocast("cpu"):
        assert torch.equal(prog.replay().output, expected)
    assert prog.check()


def test_a_program_keeps_the_input_that_it_was_given_when_its_object_gets_another_memory():
    model, x = Held(), torch.randn(4, 4)
    prog = rl.capture(model, x)
    expected = prog.output.clone()
    x.data = torch.zeros(4, 4)
    assert torch.equal(prog.replay().output, expected)
    assert torch.equal(prog.replay(from_="tanh_1", patch=lambda t: t * 1).output, expected)
    assert prog.check()


@pytest.mark.parametrize("given", ["input", "state", "patch"])
def test_what_was_given_to_a_run_and_is_seen_otherwise_since_is_stale(given):
    model, x, y = Held(), torch.randn(4, 4), torch.randn(4, 4)
    prog = rl.capture(model, x)
    ask = {
        "input": lambda: prog.replay(y),
        "state": lambda: prog.replay(state={"w": y}),
        "patch": lambda: prog.replay(patch={"matmul_1": y}),
    }[given]
    expected, run = ask()["tanh_1"].clone(), ask()
    assert torch.equal(ask()["tanh_1"], expected)
    y.data = y.data.t()
    with pytest.raises(rl.StaleValue):
        run["tanh_1"]


HOLDING = {
    "clamp": lambda t: rl.Clamp(min=t),
    "clamp above": lambda t: rl.Clamp(max=t),
    "clamp of a part": lambda t: rl.Clamp(t[:1], None, "b [c]", c=1),
    "clamp last": lambda t: [rl.Scale(2.0), rl.Clamp(min=t)],
    "clamp rotated": lambda t: rl.Rotate(torch.eye(4)[:2], rl.Clamp(min=t[:2])),
    "mean of a tensor": lambda t: rl.Mean(of=t.expand(3, 4)),
    "add": rl.Add,
    "scale": rl.Scale,
    "noise": rl.Noise,
    "project": rl.Project,
    "rotate": lambda t: rl.Rotate(torch.eye(4)[:2], rl.Add(t[:2])),
}


@pytest.mark.parametrize("make", HOLDING.values(), ids=HOLDING)
def test_a_patch_that_holds_a_tensor_gives_later_what_it_gave_then(make):
    torch.manual_seed(0)
    model, tensor = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(4)
    run = rl.capture(model, x()).replay(patch={"0": make(tensor)})
    tensor.fill_(9.0)
    assert_same(run["0"].relu(), run.output)


@pytest.mark.parametrize("make", [lambda other: rl.Mean(of=other), lambda other: rl.From(other, "b [c]", c=1)])
def test_a_patch_that_takes_from_a_program_gives_later_what_it_gave_then(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    other = rl.capture(model, x(1))
    run = rl.capture(model, x()).replay(patch={"0": make(other)})
    other["0"].value.fill_(9.0)
    assert_same(run["0"].relu(), run.output)


@pytest.mark.parametrize("make", HOLDING.values(), ids=HOLDING)
def test_a_patch_that_nothing_needed_is_made_of_a_tensor_as_it_was_in_the_replay(make):
    def does(m, x):
        m.unread(x)
        return m.read(x)

    tensor = torch.ones(4)
    model = Stateful(does, unread=nn.Linear(4, 4), read=nn.Linear(4, 4))
    prog = rl.capture(model, x())
    wanted = prog.replay(patch={"unread": make(torch.ones(4))})["unread"].clone()
    run = prog.replay(patch={"unread": make(tensor)})
    tensor.fill_(9.0)
    assert_same(run["unread"], wanted)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_step_that_writes_one_row_of_an_embedding_is_seen(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 4))
    prog = rl.capture(model, torch.arange(20))
    other = rl.capture(model[1], torch.ones(2, 16))
    model[0](torch.tensor([500])).sum().backward()
    assert_same(prog.refresh().replay().output, model(torch.arange(20)))  # a gradient is no step
    prog, other = rl.capture(model, torch.arange(20)), rl.capture(model[1], torch.ones(2, 16))  # nobody asks them yet
    kind(model.parameters(), lr=0.1, fused=True).step()
    for ask in (lambda: prog.replay(torch.arange(20)), lambda: prog.state["0.weight"]):
        with pytest.raises(rl.StaleValue, match=r"0\.weight"):
            ask()
    assert_same(other.replay(torch.zeros(2, 16)).output, model[1](torch.zeros(2, 16)))  # had no gradient, took no step
    assert_same(prog.refresh().replay(torch.tensor([500])).output, model(torch.tensor([500])))


def test_a_bias_that_is_written_by_data_at_one_place_is_seen():
    model, given = nn.Linear(8, 64), torch.ones(2, 8)
    for place in range(64):
        prog = rl.capture(model, given)
        model.bias.data[place] += 1
        with pytest.raises(rl.StaleValue):
            prog.replay(torch.zeros(2, 8))


def test_one_number_of_a_matrix_that_is_written_by_data_is_found_by_a_check():
    model = nn.Linear(64, 64)
    prog = rl.capture(model, torch.ones(2, 64))
    model.weight.data[3, 3] += 1
    assert not prog.check()


@pytest.mark.parametrize("words", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_in_a_forward_steps_in_a_replay_as_in_the_model(kind, words):
    def does(m, x):
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(m.layer.parameters(), lr=0.1, **more, **words)
        for _ in range(2):
            m.layer(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return m.layer(x)

    torch.manual_seed(0)
    model = Stateful(does, layer=nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    prog = rl.capture(model, x())
    assert_same(prog.replay(x().clone()).output, prog.output)
    run = prog.replay(x(1))
    assert_same(run.output, plain(x(1)))
    assert_same(run.state_changes, {f"layer.{name}": value for name, value in plain.layer.named_parameters()})


def test_a_parameter_of_a_new_name_is_a_state_change():
    def does(m, x):
        m.tied = m.layer.weight
        m.layers.append(nn.Parameter(x.sum(0).detach()))
        return x @ m.tied + m.layers[1]

    model = Stateful(does, layer=nn.Linear(4, 4), layers=nn.ParameterList([torch.ones(4)]))
    prog = rl.capture(model, x())
    assert_same(prog.state_changes, {"tied": model.layer.weight, "layers.1": model.layers[1]})


def test_a_live_run_of_a_model_that_makes_its_parameters_anew_leaves_them_as_they_were():
    def does(m, x):
        y = m.layer(x)
        m.layer.reset_parameters()
        nn.init.ones_(m.layer.weight)
        return y + m.layer(x)

    model = Stateful(does, layer=nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    run = rl.run(model, x())
    assert_same(dict(model.state_dict()), dict(before))
    torch.manual_seed(1)
    assert_same(run.output, plain(x()))


def test_a_live_run_leaves_no_buffer_that_its_forward_registers_in_a_layer_of_torchs():
    def does(m, x):
        m.layer.register_buffer("mask", x.sum(0))
        return m.layer(x) * m.layer.mask

    model = Stateful(does, layer=nn.Linear(4, 4))
    rl.run(model, x())
    assert "mask" not in dict(model.layer.named_buffers())
    prog = rl.capture(model, x())
    mask = model.layer.mask
    assert prog.replay(torch.ones(2, 4)).diverged
    assert model.layer.mask is mask


class Cache:
    def __init__(self):
        self.keys = []

    def update(self, x):
        self.keys.append(x)
        return torch.cat(self.keys)


def has_a_place(m, x):
    y = x * m.place
    m.place += 1
    return y


def keeps_a_list(m, x):
    m.kept.append(x)
    return torch.cat(m.kept)


def keeps_by_size(m, x):
    if len(x) not in m.kept:
        m.kept[len(x)] = torch.ones(len(x), 1)
    return x * m.kept[len(x)]


def is_first(m, x):
    m.first, was = False, m.first
    return x * 2 if was else x


def stores_where_a_part_says(m, x):
    y = x.clone()
    y[m.place.real] = 0
    m.place += 1
    return y


class Matched(Stateful):
    __match_args__ = ("calls",)


def asks_by_a_pattern(m, x):
    match m:
        case Stateful(calls=0):
            x = x * 2
    m.calls += 1
    return x


def asks_by_a_place_in_a_pattern(m, x):
    match m:
        case Matched(0):
            x = x * 2
    m.calls += 1
    return x


GO_ON = {
    "stores_where_a_part_says": lambda: Stateful(stores_where_a_part_says, place=0),
    "asks_by_a_pattern": lambda: Stateful(asks_by_a_pattern, calls=0),
    "asks_by_a_place_in_a_pattern": lambda: Matched(asks_by_a_place_in_a_pattern, calls=0),
    "has_a_place": lambda: Stateful(has_a_place, place=1),
    "keeps_a_list": lambda: Stateful(keeps_a_list, kept=[]),
    "keeps_an_object": lambda: Stateful(lambda m, x: m.kept.update(x), kept=Cache()),
    "is_first": lambda: Stateful(is_first, first=True),
}


@pytest.mark.parametrize("make", GO_ON.values(), ids=GO_ON)
def test_a_forward_that_goes_by_attributes_which_it_changes_has_no_module_and_no_refreshed_program(make):
    prog = rl.capture(make(), x())
    assert_same(prog.replay(x(1)).output, make()(x(1)))
    for ask in (prog.module, prog.refresh):
        with pytest.raises(rl.ReplaylensError, match="which it reads, and its next one"):
            ask()


def test_a_forward_that_finds_what_it_had_made_of_numbers_alone_has_both():
    model = Stateful(keeps_by_size, kept={})
    prog = rl.capture(model, x())
    assert_same(prog.module()(x(1)), model(x(1)))
    assert_same(prog.refresh().output, prog.output)


def counts_and_stores(m, x):
    m.calls += 1
    m.times = m.times + 1
    m.seen.append(x.sum())
    m.last["x"] = x
    m.size = len(x)
    return x * m.size


FOR_ALL_THAT = {
    "counts_and_stores": lambda: Stateful(counts_and_stores, calls=0, times=0, seen=[], last={}, size=0),
    "keeps_by_size": lambda: Stateful(keeps_by_size, kept={}),
}


@pytest.mark.parametrize("make", FOR_ALL_THAT.values(), ids=FOR_ALL_THAT)
def test_a_forward_that_counts_and_stores_in_attributes_and_goes_on_as_it_did_has_a_module(make):
    model = make()
    prog = rl.capture(model, x())
    assert_same(prog.module()(x(1)), model(x(1)))
    assert_same(prog.refresh().replay(x(1)).output, model(x(1)))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer_in_a_live_run_makes_no_program_stale(fused):
    def steps(m, x):
        m.layer(x).pow(2).sum().backward()
        m.optimizer.step()
        m.optimizer.zero_grad()
        return m.layer(x)

    model = Stateful(steps, layer=nn.Linear(4, 4))
    model.optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1, fused=fused)
    prog = rl.capture(model.layer, x())
    rl.run(model, x())
    assert_same(prog.replay(x(1)).output, model.layer(x(1)))
    model(x())
    with pytest.raises(rl.StaleValue):
        prog.replay(x(1))


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def wrapped():
    found = []
    torch.vmap(lambda row: found.append(row * 1) or row)(torch.ones(2, 3))
    return found[0]


OF_NO_ADDRESS = {
    "sparse": lambda: torch.ones(3).to_sparse(),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "fake": fake,
    "wrapped": wrapped,
}


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("make", OF_NO_ADDRESS.values(), ids=OF_NO_ADDRESS)
def test_a_tensor_without_an_address_may_have_the_id_of_one_that_was_looked_at(make, guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(model_state, "TensorGuards", None)
    went, came = torch.ones(3), make()
    model_state.raw_state(went)
    model_state.raw_states([went, torch.ones(3)])
    for table in (model_state._known, model_state._together):
        monkeypatch.setitem(table, id(came), table[id(went)])
    assert [look[2] for look in model_state.raw_states([came, came])()] == [None, None]
    assert model_state.raw_state(came)[2] is None
