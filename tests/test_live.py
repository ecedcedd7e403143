"""Where a change leads away from the recorded path, a program gives what the model gives with the same change made by hand."""

import functools
import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same, belongings, generators, reseed, surroundings
from torch import nn
from torch.utils.checkpoint import checkpoint

import replaylens as rl


class Net(nn.Module):
    """A forward function with parts, built anew for each test, always with the same weights."""

    def __init__(self, steps, **parts):
        super().__init__()
        self.steps = steps
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.steps(self, *args, **kwargs)


def seeded(steps, **parts):
    torch.manual_seed(0)
    return Net(steps, **{name: part() for name, part in parts.items()}).eval()


def four():
    return nn.Linear(4, 4)


def x(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def hooked(model, change, *args, at="fc", on=None, **kwargs):
    """A plain forward with a module's output changed by a hook: in all of its calls, or in those of these numbers."""
    calls = 0

    def hook(module, args, output):
        nonlocal calls
        calls += 1
        return change(output) if on is None or calls in on else None

    handle = model.get_submodule(at).register_forward_hook(hook)
    try:
        return model(*args, **kwargs)
    finally:
        handle.remove()


# ---- paths ---------------------------------------------------------------------------------------------------------


def shrink(m, x):
    """A loop that runs until its value is small."""
    n = 0
    while x.norm().item() > 0.1 and n < 50:
        x, n = m.fc(x).tanh(), n + 1
    return x, n


def leave_early(m, x):
    for layer in (m.fc, m.two, m.three):
        x = layer(x)
        if x.mean() > 0:
            return x
    return x * 10


def route(m, x):
    """A mixture of experts, each row through the one that it is routed to."""
    choices = m.fc(x).argmax(1)
    return torch.stack([(m.two, m.three, m.four_, m.fc)[choice.item()](row) for row, choice in zip(x, choices)])


def decode(m, x):
    """Greedy decoding with a cache in a list, until a token ends it."""
    tokens, cache = [0], []
    while tokens[-1] != 3 and len(tokens) < 9:
        cache.append(m.fc(m.embed(torch.tensor(tokens[-1])) + x[0]))
        keys = torch.stack(cache)
        state = (keys @ keys[-1]).softmax(0) @ keys
        tokens.append(int(m.two(state).argmax()))
    return tokens, torch.stack(cache)


def decode_with_beams(m, x):
    beams = [((0,), torch.zeros(()))]
    for _ in range(4):
        grown = []
        for tokens, score in beams:
            scores = m.fc(m.embed(torch.tensor(tokens)).mean(0) + x[0]).log_softmax(0)
            grown += [((*tokens, token), score + scores[token]) for token in range(4)]
        beams = sorted(grown, key=lambda beam: -beam[1].item())[:2]
        if beams[0][0][-1] == 3:
            break
    return beams


def keep_the_positive(m, x):
    y = m.fc(x)
    kept = y[y > 0]
    return kept.sort().values, (y > 0).nonzero(), m.two(F.pad(kept, (0, 12 - len(kept))).view(3, 4))


def as_a_list(m, x):
    y = m.fc(x)
    return m.two(y) * sum(1 for row in y.tolist() for number in row if number > 0)


def through_numpy(m, x):
    return m.two(torch.from_numpy(np.sort(m.fc(x).detach().numpy(), axis=0)))


def from_python_numbers(m, x):
    return m.two(torch.tensor([row.max().item() for row in m.fc(x)])[:, None] * x)


PARTS = {"fc": four, "two": four, "three": four, "four_": four, "embed": lambda: nn.Embedding(4, 4)}
PATHS = {
    "shrink": lambda y: y * 0.2,
    "leave_early": lambda y: -y.abs(),
    "route": lambda y: -y,
    "decode": lambda y: y.flip(0),
    "decode_with_beams": lambda y: -y,
    "keep_the_positive": lambda y: y - 0.5,
    "as_a_list": lambda y: -y,
    "through_numpy": lambda y: -y,
    "from_python_numbers": lambda y: -y,
}


@pytest.mark.parametrize("name", PATHS)
def test_the_path_is_the_one_that_the_model_takes_with_the_change(name):
    model, change = seeded(globals()[name], **PARTS), PATHS[name]
    prog = rl.capture(model, x())
    run = prog.replay(patch={"fc": change})
    assert_same(run.output, detached(hooked(model, change, x())))
    assert run.diverged and run.departures[0].source.file == __file__
    assert_same(rl.run(model, x(), patch={"fc": change}).output, run.output)
    assert_same(prog.replay().output, detached(prog.output))


def detached(tree):
    if isinstance(tree, torch.Tensor):
        return tree.detach()
    return type(tree)(map(detached, tree)) if isinstance(tree, (list, tuple)) else tree


def sine_or_cosine(x):
    return x.sin() if x.sum() > 0 else x.cos()


def test_a_run_says_what_was_read_where_and_what_is_read_now():
    run = rl.capture(sine_or_cosine, torch.ones(3)).replay(-torch.ones(3))
    line = f"test_live.py:{sine_or_cosine.__code__.co_firstlineno + 1}    return x.sin() if x.sum() > 0 else x.cos()"
    (departure,) = run.departures
    assert str(departure) == f"`bool(gt_1_2)` was True when recorded, and is False now.\n    {line}"
    assert (departure.recorded, departure.new) == (True, False)
    assert [layer.layer_type for layer in run.program] == ["input", "sum", "gt", "cos", "output"]
    assert "diverged at 1 places" in repr(run)


def test_calling_a_program_on_inputs_of_another_path_gives_what_the_model_gives():
    model = seeded(leave_early, **PARTS)
    prog = rl.capture(model, x())
    for seed in range(5):
        assert_same(prog(x(seed)).output, model(x(seed)).detach())


def test_other_parameters_may_lead_another_way():
    model = seeded(leave_early, **PARTS)
    weight = -model.fc.weight.detach()
    run = rl.capture(model, x()).replay(state={"fc.weight": weight})
    wanted = torch.func.functional_call(model, {"fc.weight": weight}, (x(),))
    assert run.diverged
    assert_same(run.output, wanted.detach())


# ---- all passes ----------------------------------------------------------------------------------------------------


def grow(m, x):
    n = 0
    while x.norm() < 20 and n < 50:
        x, n = m.cell(x), n + 1
    return x, n


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(self.fc(x)) + x


@pytest.mark.parametrize(
    ("key", "module"),
    [("cell", "cell"), ("cell.fc", "cell.fc"), ("linear_1", "cell.fc"), ("linear", "cell.fc"), ("cell.f*", "cell.fc")],
)
def test_a_patch_for_all_passes_is_also_for_those_that_were_not_recorded(key, module):
    model = seeded(grow, cell=Cell)
    prog = rl.capture(model, x())
    run = prog.replay(patch={key: rl.Scale(0.8)})
    wanted = hooked(model, lambda y: 0.8 * y, x(), at=module)
    assert run.output[1] > prog.output[1] + 1
    assert_same(run.output, detached(wanted))
    assert not [one for one in run.departures if "patch" in one.what]


def test_a_patch_for_a_type_holds_for_operations_outside_of_modules_that_were_not_recorded():
    def forward(m, x):
        n = 0
        while x.norm() < 20 and n < 50:
            x, n = F.relu(F.linear(x, m.fc.weight)) + x, n + 1
        return x, n

    model = seeded(forward, fc=four)
    prog = rl.capture(model, x())
    plain = F.relu
    try:
        F.relu = lambda x: 0.5 * plain(x)
        wanted = model(x())
    finally:
        F.relu = plain
    assert wanted[1] > prog.output[1]
    assert_same(prog.replay(patch={"relu": rl.Scale(0.5)}).output, detached(wanted))
    doubled = prog.replay(patch={"linear_1": rl.Scale(0.5)})  # all passes of a layer outside of modules
    assert_same(doubled.output, detached(wanted))


def test_a_patch_for_one_pass_is_for_that_pass():
    model = seeded(grow, cell=Cell)
    prog = rl.capture(model, x())
    run = prog.replay(patch={"cell:2": rl.Scale(0.1)})
    wanted = hooked(model, lambda y: 0.1 * y, x(), at="cell", on=[2])
    assert run.output[1] > prog.output[1]
    assert_same(run.output, detached(wanted))


def test_a_patch_that_takes_from_another_program_is_for_the_recorded_passes():
    model = seeded(grow, cell=Cell)
    prog, small = rl.capture(model, x()), rl.capture(model, x() * 0.5)
    run = prog.replay(patch={"cell": rl.From(small)})
    values = iter([small[f"cell:{n}"].value for n in range(1, prog.output[1] + 1)])
    wanted = hooked(model, lambda y: next(values, y), x(), at="cell")
    assert run.output[1] > prog.output[1]
    assert_same(run.output, detached(wanted))


def doubled(module):
    return {name: value * 2 for name, value in module.named_parameters()}


def with_other_weights_and_plainly(m, x):
    return torch.func.functional_call(m.part, doubled(m.part), (x,)) + m.part(x)


def plainly_and_with_other_weights(m, x):
    return m.part(x) + torch.func.functional_call(m.part, doubled(m.part), (x,)).relu()


def both_ways_while_it_grows(m, x):
    n = 0
    while x.norm() < 50 and n < 20:
        x, n = torch.func.functional_call(m.part, doubled(m.part), (x,)) * m.part(x).sum(), n + 1
    return x, n


def as_an_ensemble_and_plainly(m, x):
    weights = {name: torch.stack([value, value * 2]) for name, value in m.part.named_parameters()}
    return torch.func.vmap(lambda each: torch.func.functional_call(m.part, each, (x,)))(weights).sum(0) + m.part(x)


def within_and_without_a_cache_of_weights(m, x):
    with nn.utils.parametrize.cached():
        y = m.part(x)
    return y + m.part(y)


BOTH_WAYS = (
    with_other_weights_and_plainly,
    plainly_and_with_other_weights,
    both_ways_while_it_grows,
    as_an_ensemble_and_plainly,
    within_and_without_a_cache_of_weights,
)


@pytest.mark.parametrize("number", [None, 1, 2])
@pytest.mark.parametrize("at", ["part", "part.0", "part.1"])
@pytest.mark.parametrize("forward", BOTH_WAYS)
def test_a_patch_at_a_module_is_at_its_calls_with_other_weights_too(forward, at, number):
    model = seeded(forward, part=lambda: nn.Sequential(four(), nn.Tanh()))
    key, on = (at, None) if number is None else (f"{at}:{number}", [number])
    wanted = detached(hooked(model, lambda y: y * 3, x(), at=at, on=on))
    assert_same(rl.run(model, x(), patch={key: lambda y: y * 3}).output, wanted)
    assert_same(rl.capture(model, x()).replay(patch={key: lambda y: y * 3}).output, wanted)
    more = torch.cat([x(), x(1)])
    wanted = detached(hooked(model, lambda y: y * 3, more, at=at, on=on))
    assert_same(rl.capture(model, x()).replay(more, patch={key: lambda y: y * 3}).output, wanted)


class Reads(nn.Module):
    """In some of its calls it reads what it hands on."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, reads=False):
        y = self.fc(x)
        if reads:
            self.read = y.sum()
        return y


def while_it_grows(reads):
    def forward(m, x):
        n = 0
        while x.abs().sum() < 300 and n < 12:
            x, n = m.part(x, reads(n)) + x, n + 1
        return x, n

    return forward


@pytest.mark.parametrize("at", ["part", "part.fc"])
@pytest.mark.parametrize(
    "reads", [lambda n: n == 0, lambda n: n % 2 == 0, lambda n: n % 2 == 1, lambda n: n > 2, lambda n: n > 5]
)
def test_a_patch_at_a_module_that_reads_what_it_hands_on_in_some_calls_is_made_once_in_each(reads, at):
    model = seeded(while_it_grows(reads), part=Reads)
    wanted = detached(hooked(model, lambda y: y * 0.3 + 0.1, x(), at=at))
    for run in (
        rl.run(model, x(), patch={at: lambda y: y * 0.3 + 0.1}),
        rl.capture(model, x()).replay(patch={at: lambda y: y * 0.3 + 0.1}),
    ):
        assert_same(run.output, wanted)


class OneOrTheOther(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y if x.sum() > 0 else y.tanh()


@pytest.mark.parametrize("number", [None, 1, 2, 3])
@pytest.mark.parametrize("shift", [-1, 1, 0.2])
def test_a_patch_at_a_module_is_for_what_it_hands_on_whichever_way_it_goes_inside(shift, number):
    def forward(m, x):
        return m.part(m.part(m.part(x) + m.two(x)))

    model = seeded(forward, part=OneOrTheOther, two=four)
    key, on = ("part", None) if number is None else (f"part:{number}", [number])
    model.two.register_forward_hook(lambda module, args, out: out - 10 * shift)
    wanted = detached(hooked(model, lambda y: y * 2 + shift, x(), at="part", on=on))
    model.two._forward_hooks.clear()
    patch = {key: lambda y: y * 2 + shift, "two": lambda y: y - 10 * shift}
    prog = rl.capture(model, x())
    for made in (lambda: rl.run(model, x(), patch=patch), lambda: prog.replay(patch=patch)):
        try:
            found = made().output
        except rl.DivergedReplay:  # the call was recorded, and goes another way inside
            continue
        assert_same(found, wanted)


class Around(nn.Module):
    """Calls itself, and hands on what that gives."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, deep=2):
        return self.fc(x) if deep == 0 else self(x, deep - 1)


@pytest.mark.parametrize(("number", "ends"), [(None, None), (1, [3]), (2, [2]), (3, [1])])
def test_a_module_that_hands_on_what_a_call_of_itself_gave_is_patched_in_both(number, ends):
    model = seeded(lambda m, x: m.part(x), part=Around)
    key = "part" if number is None else f"part:{number}"
    wanted = detached(hooked(model, lambda y: y * 3 - 1, x(), at="part", on=ends))
    assert_same(rl.run(model, x(), patch={key: lambda y: y * 3 - 1}).output, wanted)
    assert_same(rl.capture(model, x()).replay(patch={key: lambda y: y * 3 - 1}).output, wanted)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, count):
        y = self.fc(x)
        return tuple(y * (n + 1) for n in range(count))


def test_a_patch_at_a_module_is_for_all_that_it_hands_on_in_calls_that_give_one_or_several_tensors():
    model = seeded(lambda m, x: [m.part(x, count) for count in (1, 2, 1, 3)], part=Several)
    wanted = model(x())
    wanted = [tuple((y * 3).detach() for y in each) for each in wanted]
    assert_same(rl.run(model, x(), patch={"part": lambda y: y * 3}).output, wanted)
    assert_same(rl.capture(model, x()).replay(patch={"part": lambda y: y * 3}).output, wanted)


class Twice(nn.Module):
    """Hands on one tensor as two."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y, [y]


TWICE_AND_WRITTEN = {
    "one": lambda a, b: (a.add_(1), b)[1],
    "the other": lambda a, b: (b.mul_(2), a)[1],
    "a view": lambda a, b: (a[0].zero_(), b)[1],
    "by out=": lambda a, b: (torch.add(a, 1, out=a), b)[1],
    "by .data": lambda a, b: (a.data.zero_(), b)[1],
    "where values lead": lambda a, b: a.relu_() + b if a.sum() > 0 else b,
}


@pytest.mark.parametrize("name", TWICE_AND_WRITTEN)
def test_a_patch_where_a_module_hands_on_one_tensor_twice_is_refused_if_one_of_them_is_written(name):
    def forward(m, x):
        a, (b,) = m.part(x)
        return TWICE_AND_WRITTEN[name](a, b) + 0

    model = seeded(forward, part=Twice)
    with torch.no_grad():
        prog, wanted = rl.capture(model, x()), hooked(model, lambda y: y + 5, x(), at="part.fc")
        for make in (
            lambda: prog.replay(patch={"part": lambda y: y + 5}),
            lambda: rl.run(model, x(), patch={"part": lambda y: y + 5}),
        ):
            with pytest.raises(
                rl.DivergedReplay, match="`part` returns one tensor twice, and one of the two is written"
            ):
                make()
        assert_same(prog.replay(patch={"linear_1": lambda y: y + 5}).output, wanted)


def test_a_patch_where_a_module_hands_on_one_tensor_twice_is_for_both():
    def forward(m, x):
        a, (b,) = m.part(x)
        return a.sin(), b.cos()

    model = seeded(forward, part=Twice)
    wanted = detached(hooked(model, lambda y: y + 5, x(), at="part.fc"))
    assert_same(rl.capture(model, x()).replay(patch={"part": lambda y: y + 5}).output, wanted)
    assert_same(rl.run(model, x(), patch={"part": lambda y: y + 5}).output, wanted)


def test_an_iterator_among_the_inputs_is_refused_where_more_than_one_forward_would_read_it():
    def forward(m, rows):
        total = sum(m.fc(row) for row in rows["all"])
        return total if total.sum() > 100 else -total

    model, rows = seeded(forward, fc=four), [row.clone() for row in x()]
    patch, wanted = {"fc": lambda y: y + 1000}, seeded(forward, fc=four)
    for make in (iter, reversed, lambda rows: (row for row in rows), lambda rows: map(torch.sin, rows)):
        for ask in (rl.run, rl.check):
            with pytest.raises(rl.CaptureError, match=r"the inputs contain an iterator .*\nPass a list of its items"):
                ask(model, {"all": make(rows)})
        prog = rl.capture(model, {"all": make(rows)})
        with pytest.raises(rl.DivergedReplay, match="the recorded forward has exhausted"):
            prog.replay(patch=patch)
        again = prog.replay({"all": make(rows)}, patch=patch)
        assert_same(again.output, detached(hooked(wanted, patch["fc"], {"all": make(rows)})))
    assert_same(rl.run(model, {"all": rows}, patch=patch).output, detached(hooked(wanted, patch["fc"], {"all": rows})))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("at", ["script", "fc"])
def test_a_script_that_compiles_itself_anew_between_the_two_runs_is_no_other_model(at, before):
    model = seeded(lambda m, x: m.script(x) + m.fc(x), script=lambda: torch.jit.script(Scripted()), fc=four)
    for _ in range(before):
        model(x())
    run = rl.run(model, x(), patch={at: rl.Scale(2.0)})
    values = {"script": model.script(x()), "fc": model.fc(x())}
    assert_same(run.output, detached(sum(value * (1 + (at == name)) for name, value in values.items())))


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).relu()


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, skips=False):
        return x.sin() if skips else self.fc(x)


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else self.other(x)


@pytest.mark.parametrize("number", [None, 1, 2, 3])
@pytest.mark.parametrize("shift", [10, -10])
def test_what_a_call_of_a_module_runs_now_and_another_one_ran_then_is_no_part_of_that_one(shift, number):
    def skips(m, x):
        y = m.two(x)
        y = m.part(m.part(y, bool(y.sum() > 0)), bool(y.sum() < 0))
        return m.part(y), m.part.fc(y)

    def switches(m, x):
        return m.part(m.part(m.part(m.two(x))))

    for forward, part in ((skips, Skips), (switches, Switch)):
        model = seeded(forward, part=part, two=four)
        key, on = ("part", None) if number is None else (f"part:{number}", [number])
        model.two.register_forward_hook(lambda module, args, out: out + shift)
        wanted = detached(hooked(model, lambda y: shift - y, x(), at="part", on=on))
        model.two._forward_hooks.clear()
        patch = {key: lambda y: shift - y, "two": lambda y: y + shift}
        assert_same(rl.run(model, x(), patch=patch).output, wanted)
        assert_same(rl.capture(model, x()).replay(patch=patch).output, wanted)


def test_gradients_go_through_a_patch_at_a_module_that_writes_its_input():
    model, inputs = seeded(lambda m, x: x + m.part(m.fc(x)), part=lambda: nn.ReLU(True), fc=four), x().requires_grad_()
    wanted = hooked(model, lambda y: y * 2 - 1, inputs, at="part")
    run = rl.run(model, inputs, patch={"part": lambda y: y * 2 - 1}, grad=True)
    assert_same(run.output, wanted)
    assert_same(*[torch.autograd.grad(y.square().sum(), [inputs, *model.parameters()]) for y in (run.output, wanted)])


def test_a_glob_means_modules_that_run_on_the_path_taken_now_and_what_they_are_to_give_is_not_known():
    experts = nn.ModuleList([four() for _ in range(4)])

    def forward(m, x):
        return torch.stack([m.experts[int(n)](row) for row, n in zip(x, m.fc(x).argmax(1), strict=True)])

    model = seeded(forward, fc=four, experts=lambda: experts)
    with torch.no_grad():
        model.fc.bias.copy_(torch.tensor([100.0, 0, 0, 0]))
    patch = {"experts.*": rl.Scale(2.0)}
    wanted = detached(model(x()) * 2)
    assert_same(rl.run(model, x(), patch=patch).output, wanted)
    for make in (rl.run, lambda model, x, patch: rl.capture(model, x).replay(patch=patch)):
        with pytest.raises(
            rl.DivergedReplay,
            match=r"`experts\.\d` runs on the path that the model takes now, matches .* and did not run when it was recorded",
        ):
            make(model, x(), patch={**patch, "fc": lambda y: -y})


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, again=False):
        if not again:
            self.held = self.fc(x)
        return self.held


class Through(nn.Module):
    def forward(self, *, x):
        return x


@pytest.mark.parametrize("number", [None, 1, 2])
def test_what_several_calls_of_a_module_hand_on_is_patched_in_each(number):
    def cached(m, x):
        return m.part(x) - 2 * m.part(x, True)

    def through(m, x):
        y = m.fc(x)
        return m.part(x=y) + 2 * m.part(x=y)

    def through_twice(m, x):
        return m.part(x=m.part(x=m.fc(x))) + 1

    for forward, part in ((cached, Cached), (through, Through), (through_twice, Through)):
        model = seeded(forward, part=part, fc=four)
        key, on = ("part", None) if number is None else (f"part:{number}", [number])
        wanted = detached(hooked(model, lambda y: y * 3 - 1, x(), at="part", on=on))
        assert_same(rl.run(model, x(), patch={key: lambda y: y * 3 - 1}).output, wanted)
        assert_same(rl.capture(model, x()).replay(patch={key: lambda y: y * 3 - 1}).output, wanted)


def two_ways(m, x):
    """Beyond 100 another way is taken: no patch but a great one leads there."""
    y = m.fc(x)
    return m.two(y) if y.sum() < 100 else m.three(y)


def far(y):
    return y + 1000


def test_a_patch_on_a_path_not_taken_is_a_departure():
    prog = rl.capture(seeded(two_ways, **PARTS), x())
    run = prog.replay(patch={"fc": far, "two": torch.zeros_like})
    assert (
        str(run.departures[-1]) == "the patch at linear_2_4 was reached when recorded, and is on a path not taken now."
    )
    assert run["three"].shape == (3, 4)
    with pytest.raises(rl.NoSuchLayer, match="did not run on the path that the model took"):
        run["linear_2_4"]


def test_a_run_whose_patches_were_all_on_a_path_not_taken_is_an_error():
    prog = rl.capture(sine_or_cosine, torch.ones(3))
    with pytest.raises(rl.DivergedReplay, match="never reaches sin_1_3: nothing was patched"):
        prog.replay(-torch.ones(3), patch={"sin_1": torch.zeros_like})


def test_a_forward_that_does_not_end_with_the_change_is_an_error():
    def forward(x):
        while x.norm() < 10:
            x = x * 2
        return x

    with pytest.raises(rl.DivergedReplay, match="a hundred times as many as were recorded, and has not finished"):
        rl.capture(forward, torch.ones(3)).replay(patch={"mul_1": torch.zeros_like})


# ---- places --------------------------------------------------------------------------------------------------------


def branches(y):
    """Something that every patch of these tests changes is read."""
    return y.sin() if y.sum().item() == 12345 else y * 1


def test_patches_at_an_input_at_an_output_and_at_both():
    prog = rl.capture(lambda x: branches(x * 2), torch.ones(3))
    run = prog.replay(patch={"input_1": lambda x: x + 1, "output_1": lambda y: y * 10})
    assert_same(run.output, torch.full((3,), 40.0))
    assert_same([run["input_1"], run["output_1"], run["mul_1"]], [torch.full((3,), n) for n in (2.0, 40.0, 4.0)])


def test_a_patch_at_a_tied_parameter_is_at_all_its_addresses():
    def forward(m, x):
        y = F.linear(m.one(x), m.two.weight)
        return y if y.sum() > 0 else -y

    model = seeded(forward, one=four, two=four)
    model.two.weight = model.one.weight
    held = model.one.weight
    change = {"two.weight": lambda weight: weight * -3}
    run = rl.capture(model, x()).replay(patch=change)
    assert run.diverged and model.one.weight is held and model.two.weight is held
    wanted = torch.func.functional_call(model, {"one.weight": held * -3}, (x(),), tie_weights=True)
    assert_same(run.output, wanted.detach())
    assert_same(run["one.weight"], held.detach() * -3)


def test_patches_at_a_buffer_and_at_a_tensor_that_hangs_on_a_module():
    def forward(m, x):
        return branches(x * m.scale + m.shifts[0])

    model = seeded(forward)
    model.register_buffer("scale", torch.tensor(2.0))
    model.shifts = [torch.tensor(1.0)]
    prog = rl.capture(model, torch.ones(3))
    assert_same(prog.replay(patch={"scale": torch.tensor(5.0)}).output, torch.full((3,), 6.0))
    assert_same(prog.replay(patch={"shifts[0]": torch.tensor(5.0)}).output, torch.full((3,), 7.0))
    assert_same([model.scale, model.shifts], [torch.tensor(2.0), [torch.tensor(1.0)]])


def test_a_patch_at_a_constant_that_is_older_than_the_forward():
    table = torch.arange(3.0)
    prog = rl.capture(lambda x: branches(x + table), torch.ones(3))
    assert_same(prog.replay(patch={"constant_1": rl.Scale(2.0)}).output, torch.tensor([1.0, 3.0, 5.0]))
    assert_same(table, torch.arange(3.0))


class Most(nn.Module):
    """Of the two values of its one operation it gives the first."""

    def forward(self, x):
        return x.max(1).values


def test_patches_at_several_values_and_at_one_of_several():
    def forward(m, x):
        low, high = m.fc(x).chunk(2, 1)
        return low, branches(high), m.most(low)

    model = seeded(forward, fc=four, most=Most)
    prog = rl.capture(model, x())
    run = prog.replay(patch={"chunk_1": lambda parts: (parts[0] * 2, parts[1] * 3), "most": lambda most: most + 1})
    low, high = model.fc(x()).chunk(2, 1)
    most = (low * 2).max(1)
    assert run.diverged
    assert_same(run.output, detached((low * 2, high * 3, most.values + 1)))
    assert_same(run["most"], (most.values + 1).detach())
    assert_same(tuple(run["max_1"]), (run["most"], most.indices))
    assert_same(run["chunk_1"], detached((low * 2, high * 3)))


def test_a_patch_at_a_write_in_place_is_seen_by_all_who_read_that_memory():
    def forward(x):
        y = x * 1
        top = y[0]
        y.add_(1.0)
        return branches(top + y), y

    prog = rl.capture(forward, x())
    run = prog.replay(patch={"add_1": lambda y: y * 2})
    y = (x() + 1) * 2
    assert run.diverged
    assert_same(run.output, (y[0] + y, y))


def test_a_patched_view_is_a_tensor_of_its_own():
    def forward(x):
        y = x * 1
        top = y[:1]
        top.add_(1.0)
        return y, branches(top)

    run = rl.capture(forward, x()).replay(patch={"getitem_1": lambda top: top * 2})
    assert run.diverged
    assert_same(run.output, (x(), x()[:1] * 2 + 1))


def test_a_module_that_hands_its_input_on_is_patched_alone():
    def forward(m, x):
        y = m.fc(x)
        return branches(m.same(m.drop(y))) + y

    model = seeded(forward, fc=four, same=nn.Identity, drop=nn.Dropout)
    for name in "same", "drop":
        run = rl.capture(model, x()).replay(patch={name: lambda y: y * 2})
        y = model.fc(x()).detach()
        assert run.diverged
        assert_same(run.output, y * 2 + y)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, slope):
        return slope * 3 * ctx.saved_tensors[0] ** 2


def test_a_custom_function_is_patched_as_a_whole():
    run = rl.capture(lambda x: branches(Cube.apply(x) * 2), torch.ones(3)).replay(patch={"cube_1": lambda y: y + 1})
    assert run.diverged
    assert_same(run.output, torch.full((3,), 4.0))


def test_from_and_to_work_on_another_path():
    def forward(m, x):
        return m.four_(two_ways(m, x)).sin()

    model = seeded(forward, **PARTS)
    run = rl.capture(model, x()).replay(from_="fc", patch=far, to="four_")
    wanted = model.three(model.fc(x()) + 1000)
    assert run.diverged
    assert_same([run["three"], run["four_"]], [wanted.detach(), model.four_(wanted).detach()])
    with pytest.raises(rl.NotSaved):
        run.output


def test_a_sampled_patch_leaves_the_models_own_draws_as_they_are():
    def forward(m, x):
        return branches(m.drop(m.fc(x)))

    model = seeded(forward, fc=four, drop=nn.Dropout).train()
    prog = rl.capture(model, x())
    kept = prog["drop"].value != 0
    run = prog.replay(patch={"fc": lambda y: torch.rand_like(y) + 1})
    assert run.diverged
    assert_same(run["drop"] != 0, kept)


# ---- where it begins, and what it leaves ----------------------------------------------------------------------------


class Everything(nn.Module):
    """Draws, writes, counts, keeps, switches: and then branches on what it has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.register_buffer("seen", torch.zeros(()))
        self.count, self.kept, self.table, self.dice = 0, [], {"a": {1}}, torch.Generator().manual_seed(3)
        self.cache, self.array, self.rng = Cache(), np.zeros(2), np.random.default_rng(4)
        self.fc.weight.grad = torch.ones(4, 4)

    def forward(self, x, memory):
        self.count += 1
        self.kept.append(self.count)
        self.table["a"].add(self.count)
        self.table[self.count] = x
        self.cache.values.append(self.count)
        self.array += self.rng.random()
        self.seen += 1
        x.add_(1)
        memory.append(len(memory))
        self.drop.p = 0.25
        self.register_buffer("late", torch.ones(()))
        self.fc.weight.requires_grad_(False)
        y = self.drop(self.norm(self.fc(x)))
        y = y + torch.randn(4, generator=self.dice) * random.random() * np.random.rand() * self.count
        return (y.relu() if y.sum().item() > 1000 else y.tanh()) * self.seen * len(self.cache.values) * self.array[0]


class Cache:
    def __init__(self):
        self.values = []


def test_a_live_run_begins_where_the_recorded_forward_began_and_leaves_all_as_it_is():
    twin, model, memory, given = Everything(), Everything(), [7], x()
    reseed()
    wanted = hooked(twin, far, x(), [7], at="drop")
    reseed()
    prog = rl.capture(model, given, memory)
    model.eval()  # what is done to the model later is not undone, and plays no part
    model.count = 77
    reseed(5)
    before, held, state, around = belongings(model), list(memory), generators(), surroundings()
    for _ in range(2):
        run = prog.replay(patch={"drop": far})
        assert run.diverged
        assert_same(run.output, wanted.detach())
        assert_same(run.state_changes["norm.running_mean"], twin.norm.running_mean)
        assert_same(run.state_changes["seen"], twin.seen)
        assert_same(belongings(model), before)
        assert_same(generators(), state)
        assert_same(surroundings(), around)
        assert_same([given, memory], [x() + 1, held])


def test_what_is_no_longer_on_the_model_is_left_as_it_is_by_now():
    model = Everything()
    prog = rl.capture(model, x(), [7])
    kept, array, rng = model.kept, model.array, model.rng
    model.kept, model.array, model.rng = [], np.ones(2), np.random.default_rng(9)
    kept.append(5)
    array += 3
    rng.random()
    held = [*kept], array.tolist(), rng.bit_generator.state
    assert prog.replay(patch={"drop": far}).diverged
    assert ([*kept], array.tolist(), rng.bit_generator.state) == held


def test_a_live_run_of_a_model_alone_changes_nothing_of_it():
    twin, model, memory, given = Everything(), Everything(), [7], x()
    reseed()
    wanted = hooked(twin, lambda y: y + 5000, x(), [7], at="drop")
    reseed()
    before, state = belongings(model), generators()
    for _ in range(2):
        run = rl.run(model, given, memory, patch={"drop": lambda y: y + 5000})
        assert_same(run.output, wanted.detach())
        assert_same(belongings(model), before)
        assert_same(generators(), state)
        assert_same([given, memory], [x(), [7]])


class Fails(Exception):
    pass


def fail(y):
    raise Fails


@pytest.mark.parametrize("patch", [{"fc": fail}, {"fc": lambda y: y[0]}, {"drop": lambda y: y * torch.nan}])
def test_a_live_run_that_fails_leaves_nothing_behind(patch):
    model = Everything()
    model.norm.register_forward_hook(lambda module, args, output: fail(output) if output.isnan().any() else None)
    model.drop.register_forward_hook(lambda module, args, output: fail(output) if output.isnan().any() else None)
    given = x()
    before, around = belongings(model), surroundings()
    with pytest.raises((Fails, rl.ShapeMismatch)):
        rl.run(model, given, [], patch={**patch, "norm": lambda y: y * torch.nan})
    assert_same(belongings(model), before)
    assert_same(surroundings(), around)
    assert_same(given, x())


def test_parameters_are_as_they_were_recorded():
    model = seeded(two_ways, **PARTS)
    prog, wanted = rl.capture(model, x()), hooked(model, far, x()).detach()
    weight = model.fc.weight
    model.fc.weight = nn.Parameter(torch.zeros(4, 4))  # another object: it is not silently put aside for the run
    with pytest.raises(rl.StaleValue, match=r"fc.weight. was replaced since the capture"):
        prog.replay(patch={"fc": far})
    model.fc.weight = weight
    assert_same(prog.replay(patch={"fc": far}).output, wanted)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(rl.StaleValue, match=r"fc.weight. was overwritten since the capture"):
        prog.replay(patch={"fc": far})


def test_a_refreshed_program_runs_its_model_on_what_is_there_now():
    model = seeded(two_ways, **PARTS)
    prog = rl.capture(model, x())
    with torch.no_grad():
        model.fc.weight.mul_(2)
    run = prog.refresh().replay(patch={"fc": far})
    assert run.diverged
    assert_same(run.output, hooked(model, far, x()).detach())


def test_a_model_that_does_something_else_by_now_is_found_out():
    model = seeded(leave_early, **PARTS)
    prog = rl.capture(model, x())
    model.fc.forward = lambda value: F.linear(value + 1, model.fc.weight, model.fc.bias)
    with pytest.raises(rl.StaleValue, match="it no longer does what was recorded"):
        prog.replay(patch={"fc": lambda y: -y.abs()})


def test_only_a_program_that_holds_its_model_can_run_it():
    model = seeded(leave_early, **PARTS)
    prog = rl.capture(model, x()).to(torch.float64)
    with pytest.raises(rl.DivergedReplay):
        prog.replay(patch={"fc": lambda y: -y.abs()})
    with pytest.raises(rl.ReplaylensError, match="runs the model itself, which this program does not hold"):
        prog.replay(patch={"fc": lambda y: -y.abs()}, on_divergence="rerun")


def test_fresh_draws_are_drawn_anew():
    def forward(m, x):
        return branches(m.drop(m.fc(x)))

    model = seeded(forward, fc=four, drop=nn.Dropout).train()
    prog = rl.capture(model, x())
    reseed()
    runs = [prog.replay(patch={"fc": torch.ones_like}, rng="fresh").output for _ in range(2)]
    reseed()
    model.fc.register_forward_hook(lambda module, args, output: torch.ones_like(output))
    assert_same(runs, [model(x()), model(x())])


def test_live_runs_in_several_threads_do_not_meet():
    model = Everything()
    prog = rl.capture(model, x(), [7])
    before, wanted = belongings(model), prog.replay(patch={"drop": far}).output

    def rerun(_):
        return prog.replay(patch={"drop": far}).output, rl.run(model, x(), [7], patch={"drop": far}).diverged

    with ThreadPoolExecutor(4) as pool:
        for output, diverged in pool.map(rerun, range(12)):
            assert diverged
            assert_same(output, wanted)
    assert_same(belongings(model), before)


def test_nothing_holds_on_to_a_live_run():
    model = seeded(leave_early, **PARTS)
    prog, big = rl.capture(model, x()), torch.ones(3, 4)
    run = prog.replay(patch={"fc": lambda y: -big})
    held = [weakref.ref(run), weakref.ref(run.output), weakref.ref(big), weakref.ref(model)]
    del run, prog, model
    big = None
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_gradients_flow_to_inputs_to_patches_and_to_the_models_own_parameters():
    model = seeded(two_ways, **PARTS)
    given, shift = x().requires_grad_(), torch.full((4,), 1000.0, requires_grad=True)
    with torch.no_grad():
        prog = rl.capture(model, given)
    run = prog.replay(patch={"fc": lambda y: y.sin() + shift}, grad=True)
    leaves = [given, shift, model.fc.weight, model.two.weight, model.three.bias]
    got = torch.autograd.grad(run.output.sin().sum(), leaves, allow_unused=True)
    plain = hooked(model, lambda y: y.sin() + shift, given)
    wanted = torch.autograd.grad(plain.sin().sum(), leaves, allow_unused=True)
    assert run.diverged
    assert_same(got, wanted)
    assert all(leaf.grad is None for leaf in leaves)
    assert not prog.replay(patch={"fc": far}).output.requires_grad


def with_reentry(m, x):
    return checkpoint(lambda x: m.fc(x).tanh().sin(), x, use_reentrant=True)


def without_reentry(m, x):
    return checkpoint(lambda x: m.fc(x).tanh().sin(), x, use_reentrant=False)


def one_in_another(m, x):
    inner = lambda x: m.fc(x).tanh()  # noqa: E731
    return checkpoint(lambda x: checkpoint(inner, x.exp(), use_reentrant=False).sin(), x, use_reentrant=False)


def beside_hooks_for_saved_tensors(m, x):
    def steps(x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return m.fc(x).tanh()

    return checkpoint(lambda x: steps(x.exp()).sin(), x, use_reentrant=False)


def of_a_custom_function(m, x):
    return checkpoint(lambda x: Cube.apply(m.fc(x).tanh()).sin(), x, use_reentrant=False)


def of_rows_at_once(m, x):
    rows = torch.func.vmap(lambda row: row.sin() * row.exp())
    return checkpoint(lambda x: rows(m.fc(x)).tanh(), x, use_reentrant=False)


CHECKPOINTED = [
    with_reentry,
    without_reentry,
    one_in_another,
    beside_hooks_for_saved_tensors,
    of_a_custom_function,
    of_rows_at_once,
]


@pytest.mark.parametrize("patch", [rl.Scale(3.0), torch.tanh, lambda y: y * y.sin()], ids=["scale", "tanh", "several"])
@pytest.mark.parametrize("block", CHECKPOINTED, ids=lambda block: block.__name__)
def test_a_checkpoint_computes_nothing_again_without_the_patch(block, patch):
    def forward(m, x):
        y = block(m, x)
        return y.exp() if y.sum() < 100 else y

    model = seeded(forward, fc=four)
    leaves = [x().requires_grad_(), *model.parameters()]
    found = []
    for run in (lambda: rl.run(model, leaves[0], patch={"fc": patch}, grad=True).output, lambda: model(leaves[0])):
        run().sum().backward()
        found.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
        model.fc.register_forward_hook(lambda module, args, output: patch(output))
    assert_same(*found)


@torch.jit.script
def scripted(x):
    return x.sin() * x.exp()


def test_a_checkpoint_of_what_lies_beneath_torchs_functions_is_refused():
    def forward(m, x):
        return checkpoint(lambda x: scripted(m.fc(x)).tanh(), x, use_reentrant=False)

    model = seeded(forward, fc=four)
    with pytest.raises(rl.NotDifferentiable) as caught:
        rl.run(model, x(), patch={"fc": rl.Scale(3.0)}, grad=True)
    assert str(caught.value) == (
        "the model checkpoints (torch.utils.checkpoint) ATen calls beneath torch's functions, and recomputes them "
        "without the patches in the backward pass. Turn checkpoints off for this run."
    )
    assert_same(rl.run(model, x(), patch={"fc": rl.Scale(3.0)}).output, hooked(model, lambda y: 3 * y, x()).detach())


def test_gradients_are_taken_at_values_of_another_path():
    model = seeded(two_ways, **PARTS)
    run = rl.capture(model, x()).replay(patch={"fc": far}, grad=True)
    (slope,) = torch.autograd.grad(run.output.sum(), run["fc"])
    assert_same(slope, model.three.weight.detach().sum(0).expand(3, 4).contiguous())


# ---- rl.run --------------------------------------------------------------------------------------------------------


def test_a_run_of_a_model_without_patches_is_a_plain_forward():
    model = seeded(leave_early, **PARTS)
    run = rl.run(model, x())
    assert not run.diverged and run.departures == ()
    assert_same(run.output, model(x()).detach())


def test_a_name_that_a_model_does_not_have_offers_the_nearest():
    with pytest.raises(rl.NoSuchLayer, match="'fc'"):
        rl.run(seeded(leave_early, **PARTS), x(), patch={"fcc": torch.zeros_like})


def test_keywords_of_the_models_own_that_clash_are_bound_before():
    def forward(x, patch):
        return x + patch

    model = functools.partial(forward, patch=2.0)
    assert_same(rl.run(model, torch.ones(2), patch={"add_1": lambda y: y * 10}).output, torch.full((2,), 30.0))


@pytest.mark.parametrize(
    "patch",
    [
        rl.Zero("b [d]", d=2),
        rl.Set(5.0, "b [d]", d=[0, 1]),
        rl.Scale(-1.0) >> rl.Add(torch.full((4,), 1000.0)),
        rl.Noise(3.0, seed=1),
        rl.Clamp(-0.1, 0.1),
    ],
    ids=repr,
)
def test_patches_as_data_act_live(patch):
    model = seeded(two_ways, **PARTS)
    assert_same(rl.run(model, x(), patch={"fc": patch}).output, hooked(model, patch, x()).detach())


def test_activation_patching_on_another_path():
    model = seeded(two_ways, **PARTS)
    clean = rl.capture(model, x() + 1000)
    run = rl.capture(model, x()).replay(patch={"fc": rl.From(clean, "[b] d", b=1)})
    wanted = model.fc(x())
    wanted[1] = clean["fc"].value[1]
    assert run.diverged == bool(wanted.sum() >= 100)
    assert_same(run.output, (model.three if run.diverged else model.two)(wanted).detach())


def test_a_part_of_a_value_of_another_shape_than_recorded_is_patched():
    def forward(m, x):
        y = m.fc(x)
        return m.two(y[y.sum(1) > 2])

    model = seeded(forward, **PARTS)
    prog = rl.capture(model, x())
    run = prog.replay(patch={"fc": far, "two": rl.Zero("b [d]", d=1)})
    wanted = model.two(model.fc(x()) + 1000).detach()
    wanted[:, 1] = 0
    assert prog.output.shape != run.output.shape == (3, 4)
    assert_same(run.output, wanted)
    assert str(run.departures[0]).startswith("the shape of getitem_1_4 was (")
    with pytest.raises(
        rl.ShapeMismatch, match=r"but the value on the path that the model takes now is float32\[3, 4\]"
    ):
        prog.replay(patch={"fc": far, "two": lambda y: y[:1]})


def test_a_place_inside_a_gradient_transform_is_refused():
    def forward(x):
        y = torch.func.grad(lambda x: x.sin().sum())(x)
        return y.relu() if y.sum() > 0 else y

    with pytest.raises(rl.DivergedReplay) as caught:
        rl.capture(forward, x()).replay(patch={"sin_1": torch.zeros_like})
    assert str(caught.value).splitlines()[-1] == (
        "the patch at sin_1_1 cannot be applied while the model runs: it lies inside torch.func.grad or a similar "
        "transform, whose gradient would belong to another value."
    )


def test_what_no_live_run_can_patch_is_patched_in_a_replay_where_that_keeps_the_path():
    def forward(x):
        y = x * 1
        top = y[0]
        y.add_(1)
        return top * 2

    patch = {"getitem_2": lambda top: top + 1}
    assert_same(rl.run(forward, x(), patch=patch).output, rl.capture(forward, x()).replay(patch=patch).output)


def test_modules_that_a_patch_calls_are_none_of_the_models():
    model, other = seeded(leave_early, **PARTS), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    run = rl.run(model, x(), patch={"fc": lambda y: -other(y)})
    assert_same(run.output, hooked(model, lambda y: -other(y), x()).detach())
    assert "relu" not in {layer.layer_type for layer in run.program}


# ---- hooks that the forward itself installs ------------------------------------------------------------------------


def installs_hooks_once(m, x):
    if not hasattr(m, "installed"):
        m.installed = True
        m.fc.register_forward_hook(lambda module, args, output: output * 2)
        m.fc.register_forward_pre_hook(lambda module, args: args[0] + 1)
    y = m.fc(x)
    return y if y.sum() < 100 else y - 1


def installs_hooks_and_hides_a_call(m, x):
    return installs_hooks_once(m, x) + getattr(torch, "Ten" + "sor")([1.0, 2.0, 3.0, 4.0])


def removes_a_hook(m, x):
    y = m.fc(x)
    if not hasattr(m, "handle"):
        m.handle = m.fc.register_forward_hook(lambda module, args, output: output * 2)
    else:
        m.handle.remove()
    y = m.fc(y)
    return y if y.sum() < 100 else y - 1


def hooks_of(model):
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


@pytest.mark.parametrize("runs_before", [0, 1])
@pytest.mark.parametrize("steps", [installs_hooks_once, installs_hooks_and_hides_a_call, removes_a_hook])
def test_hooks_that_a_forward_installs_or_removes_are_installed_once(steps, runs_before):
    plain, model, live = (seeded(steps, fc=four) for _ in range(3))
    for one in (plain, model, live):
        for _ in range(runs_before):
            one(x())
    wanted, prog = plain(x()), rl.capture(model, x())
    assert_same(prog.output, wanted)
    assert hooks_of(model) == hooks_of(plain)

    def far(value):
        return value * 0 + 1000

    before = hooks_of(live)
    run = rl.run(live, x(), patch={"linear_1": far})
    assert hooks_of(live) == before
    assert_same(prog.replay(patch={"linear_1": far}).output, run.output, "the model run again")
    assert hooks_of(model) == hooks_of(plain)
    assert_same(model(x()), plain(x()), "the model afterwards")


def test_a_model_run_again_has_the_hooks_of_its_first_run():
    model, changed = seeded(installs_hooks_once, fc=four), seeded(installs_hooks_once, fc=four)
    changed.fc.register_forward_hook(lambda module, args, output: output * 0 + 1000)
    run = rl.capture(model, x()).replay(patch={"linear_1": lambda value: value * 0 + 1000})
    assert run.diverged
    assert_same(run.output, changed(x()))


def test_a_model_run_again_is_without_hooks_that_were_added_since():
    model, given = seeded(leave_early, **PARTS), x()
    prog, wanted = rl.capture(model, given), hooked(model, lambda y: -y.abs(), given)
    model.fc.register_forward_pre_hook(lambda module, args: args[0] + 1)
    assert_same(prog.replay(patch={"fc": lambda y: -y.abs()}).output, wanted.detach())
    assert hooks_of(model)[1] == (0, 1)


def test_a_patch_stays_with_its_line_where_the_model_takes_a_branch_before_it():
    def forward(x, at=lambda name, value: value):
        a = at("sin", x.sin())
        if a.sum() < 0:
            a = F.relu(a) + 1
        return at("relu", F.relu(a)) * 2 + a

    changes = {"sin": lambda value: -value, "relu": lambda value: value + 5}
    wanted = forward(torch.ones(3), lambda name, value: changes[name](value))
    patch = {"sin_1": changes["sin"], "relu_1": changes["relu"]}
    assert_same(rl.capture(forward, torch.ones(3)).replay(patch=patch).output, wanted)
    assert_same(rl.run(forward, torch.ones(3), patch=patch).output, wanted)


class Holds(nn.Module):
    """A model with tensors of its own, several of which look at one memory."""

    def __init__(self, does, hands_on=nn.Identity):
        super().__init__()
        torch.manual_seed(1)
        self.does, self.fc, self.o = does, nn.Linear(4, 4), hands_on()
        self.register_buffer("h", torch.ones(4))
        self.register_buffer("v", self.h[:])
        self.register_buffer("part", self.h[:2])
        self.t, self.held = self.h[:], [self.h[:]]

    def forward(self, x):
        return self.does(self, x)


class HandsOn(nn.Module):
    def forward(self, x):
        return x


def hands_a_buffer_on(m, x):
    k = m.o(m.h)
    m.h.add_(1)
    return m.fc(x) * k


def hands_a_view_on(m, x):
    k = m.o(m.v)
    m.h.add_(1)
    return m.fc(x) * k


def hands_on_what_was_written(m, x):
    m.h.add_(1)
    return m.fc(x) * m.o(m.v)


def writes_what_was_handed_on(m, x):
    k = m.o(m.h)
    y = m.fc(x) * m.h
    k.add_(1)
    return y * m.h


def hands_an_attribute_on(m, x):
    k = m.o(m.t)
    m.t.add_(1)
    return m.fc(x) * k


def reads_a_view_of_what_it_writes(m, x):
    m.h.add_(1)
    return m.fc(x) * m.v


def reads_a_view_first(m, x):
    k = m.v * 1
    m.h.add_(1)
    return m.fc(x) * k * m.v


def writes_a_view(m, x):
    y = m.fc(x) * m.h
    m.v.add_(1)
    return y * m.h


def reads_an_attribute_over_it(m, x):
    m.h.add_(1)
    return m.fc(x) * m.t


def writes_what_is_in_a_list(m, x):
    m.held[0].add_(1)
    return m.fc(x) * m.h


def reads_a_part(m, x):
    m.h.add_(1)
    return m.fc(x)[..., :2] * m.part


def writes_a_part(m, x):
    m.h[1:].mul_(m.fc(x).detach().mean())
    return m.fc(x) * m.v


HOLDING = [
    *(hands_a_buffer_on, hands_a_view_on, hands_on_what_was_written, writes_what_was_handed_on, hands_an_attribute_on),
    *(reads_a_view_of_what_it_writes, reads_a_view_first, writes_a_view, reads_an_attribute_over_it),
    *(writes_what_is_in_a_list, reads_a_part, writes_a_part),
]


@pytest.mark.parametrize("again", [False, True], ids=["", "after another forward"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("at", ["o", "fc"])
@pytest.mark.parametrize("hands_on", [nn.Identity, HandsOn])
@pytest.mark.parametrize("does", HOLDING, ids=lambda does: does.__name__)
def test_a_model_that_is_run_again_begins_where_the_recorded_forward_began(does, hands_on, at, rows, again):
    if at == "o" and "hand" not in does.__name__:
        at = "fc"
    model, plain = Holds(does, hands_on), Holds(does, hands_on)
    prog, other = rl.capture(model, torch.ones(2, 4)), torch.arange(4.0 * rows).view(rows, 4)
    if again:
        model(other)
    before = [value.clone() for value in model.state_dict().values()]
    getattr(plain, at).register_forward_hook(lambda module, args, out: out * 0.5)
    assert_same(prog.replay(other, patch={at: rl.Scale(0.5)}).output, plain(other).detach())
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize("hands_on", [nn.Identity, HandsOn])
@pytest.mark.parametrize("does", HOLDING, ids=lambda does: does.__name__)
def test_a_model_that_writes_what_it_hands_on_is_right_for_the_check(does, hands_on):
    assert rl.check(Holds(does, hands_on), torch.ones(2, 4))


class WritesWhatItIsGiven(nn.Module):
    """A module that writes its argument and returns it; the caller holds the argument, and writes the output."""

    def __init__(self, argument, then):
        super().__init__()
        self.relu, self.argument, self.then = nn.ReLU(inplace=True), argument, then

    def forward(self, x):
        given = self.argument(x * 1.0)
        out = self.relu(given)
        return given, self.then(out), x


ARGUMENTS = {
    "fresh": lambda y: y,
    "a view": lambda y: y[0:],
    "a part": lambda y: y[1:],
    "a view of a view": lambda y: y[0:].view(-1),
    "of another shape": lambda y: y.t(),
}
WRITES = {"adds": lambda out: out.add_(0.5), "sets": lambda out: out.fill_(3.0), "reads": lambda out: out + 0.5}


@pytest.mark.parametrize("then", WRITES)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_patch_at_a_module_that_writes_its_argument_leaves_the_argument(argument, then):
    def change(value):
        return value * 2 + 1

    values, model = torch.randn(3, 3), WritesWhatItIsGiven(ARGUMENTS[argument], WRITES[then])
    handle = model.relu.register_forward_hook(lambda module, args, output: change(output))
    wanted = model(values)
    handle.remove()
    assert_same(rl.run(model, values, patch={"relu": change}).output, wanted)
    assert_same(rl.capture(model, values).replay(patch={"relu": change}).output, wanted)


class HandsOn(nn.Module):
    def forward(self, x):
        return x


class HandsOnTwice(nn.Module):
    """Nobody reads what the second module returns."""

    def __init__(self, what):
        super().__init__()
        self.a, self.b, self.p, self.what = HandsOn(), HandsOn(), nn.Parameter(torch.ones(2)), what

    def forward(self, x):
        own = self.p if self.what == "a parameter" else x * 1.0
        first = self.a(own)
        self.b(own)
        return x * 0, first


@pytest.mark.parametrize("save", ["all", "none"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("what", ["a parameter", "a value"])
def test_a_patch_at_a_module_that_nobody_reads_changes_nothing_of_what_others_handed_on(what, grad, save):
    with torch.set_grad_enabled(grad):
        model = HandsOnTwice(what)
        prog = rl.capture(model, torch.ones(2), save=save)
        assert_same(prog.replay(patch={"b": lambda value: value * 10}).output, model(torch.ones(2)))
        changed = prog.replay(patch={"a": lambda value: value * 10}).output
    assert changed[1].tolist() == [10, 10]


class WritesWhatAnotherHandedOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = HandsOn(), nn.ReLU(inplace=True)

    def forward(self, x):
        first = self.a(x)
        second = self.b(x)
        first[..., 1:3] = 0.125
        return first, second, x * 1


def test_a_module_that_writes_what_another_handed_on_is_run_again():
    """The live run writes where the recorded one could call the plain function."""

    def change(value):
        return value * 10

    model = WritesWhatAnotherHandedOn()
    handle = model.b.register_forward_hook(lambda module, args, output: change(output))
    wanted = model(torch.ones(4))
    handle.remove()
    assert_same(rl.capture(model, torch.ones(4)).replay(patch={"b": change}).output, wanted)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_patched_output_that_is_turned_into_a_leaf_is_apart_from_what_is_written_later(argument):
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            whole = x * 1.0
            out = self.relu(ARGUMENTS[argument](whole)).requires_grad_()
            whole.fill_(0.7)
            return out * 1, whole * 1

    def change(value):
        return value * 2 + 1

    values, model = torch.randn(3, 3), Turns()
    with torch.no_grad():
        handle = model.relu.register_forward_hook(lambda module, args, output: change(output))
        wanted = model(values)
        handle.remove()
        assert_same(rl.capture(model, values).replay(patch={"relu": change}).output, wanted)
        assert_same(rl.run(model, values, patch={"relu": change}).output, wanted)
