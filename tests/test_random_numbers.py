"""Random numbers: fresh ones are those that the model would draw next, and a draw that takes more numbers shifts the rest.

The witness is the plain model, run from the same state of the same generators.
"""

from __future__ import annotations

import os
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import MODELS

import replaylens as rl
from tests.oracle import assert_same


def x():
    return torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) + 0.1


def other():
    return x() * 1.9 + 0.3


# ---- models that draw one number or another ---------------------------------------------------------------------------


def several(x):
    return F.dropout(x) + F.dropout(x) * torch.rand(5)


def one_that_nobody_reads(x):
    torch.rand(3)
    return F.dropout(x)


def seeded(x):
    torch.manual_seed(3)
    return F.dropout(x)


def seeded_by_the_generator_itself(x):
    noise = torch.rand(5)
    torch.default_generator.manual_seed(3)
    return noise + F.dropout(x)


def seeded_in_the_middle(x):
    noise = torch.rand(5)
    torch.random.manual_seed(3)
    return noise + F.dropout(x)


def forked_and_seeded(x):
    first = F.dropout(x)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.randn(5)
    return first + noise * F.dropout(x)


def forked(x):
    with torch.random.fork_rng():
        noise = torch.randn(5)
    return noise - torch.randn(5)


def restored(x):
    state = torch.get_rng_state()
    first = F.dropout(x)
    torch.rand(3)
    torch.set_rng_state(state)
    return torch.stack([first - F.dropout(x), F.dropout(x), first])


def restored_by_the_generator_itself(x):
    state = torch.default_generator.get_state()
    first = F.dropout(x)
    torch.default_generator.set_state(state)
    return torch.stack([first - F.dropout(x), F.dropout(x), first])


def a_generator_made_in_the_forward(x):
    own = torch.Generator().manual_seed(3)
    return torch.rand(5, generator=own) + F.dropout(x) * torch.rand(5, generator=own)


def a_generator_that_goes_on_from_the_global_one(x):
    own = torch.Generator()
    own.set_state(torch.get_rng_state())
    return torch.rand(5, generator=own) - torch.rand(5)


def a_generator_written_in_place(x):
    own = torch.Generator().manual_seed(3)
    return x + torch.empty(5).normal_(generator=own) + torch.empty(5).normal_()


def one_that_takes_as_many_as_it_needs(x):
    return torch.poisson(x * 3) + F.dropout(x) + torch.rand(5)


def one_that_reads_fresh_numbers_and_takes_as_many_as_it_needs(x):
    return torch.poisson(F.dropout(x) * 3) + F.dropout(x) + torch.rand(5)


class GeneratorOfTheModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        self.generator.manual_seed(3)
        return torch.rand(5, generator=self.generator) + F.dropout(x)


DRAWING = [
    several,
    one_that_nobody_reads,
    seeded,
    seeded_by_the_generator_itself,
    seeded_in_the_middle,
    forked_and_seeded,
    restored,
    restored_by_the_generator_itself,
    a_generator_made_in_the_forward,
    a_generator_that_goes_on_from_the_global_one,
    a_generator_written_in_place,
    one_that_takes_as_many_as_it_needs,
    one_that_reads_fresh_numbers_and_takes_as_many_as_it_needs,
    GeneratorOfTheModel(),
]


def captured(model, seed=0, drawn=2):
    torch.manual_seed(seed)
    torch.rand(drawn)
    return rl.capture(model, x())


def begun(seed=7):
    torch.manual_seed(seed)
    torch.rand(3)


@pytest.mark.parametrize("model", DRAWING, ids=lambda model: getattr(model, "__name__", type(model).__name__))
def test_fresh_draws_are_those_that_the_model_makes_next(model):
    prog = captured(model)
    for seed in range(3):
        begun(seed)
        wanted = model(x())
        begun(seed)
        assert_same(prog.replay(rng="fresh").output, wanted)
    assert_same(prog.replay().output, prog.output)


@pytest.mark.parametrize("model", DRAWING, ids=lambda model: getattr(model, "__name__", type(model).__name__))
def test_a_module_draws_what_the_model_draws_next(model):
    module = captured(model).module()
    for seed in range(3):
        begun(seed)
        wanted = model(other())
        begun(seed)
        assert_same(module(other()), wanted)


def a_layer_made_in_the_forward(x):
    return nn.Linear(5, 3)(x)


def initialised(x):
    return x @ nn.init.kaiming_uniform_(torch.empty(5, 5)) + nn.init.normal_(torch.empty(5))


def the_default_generator_by_name(x):
    return x + torch.rand(5, generator=torch.default_generator) * torch.empty(5).normal_(generator=None)


def one_that_nobody_reads_at_the_end(x):
    y = F.dropout(x)
    torch.rand(3)
    return y


def one_that_takes_as_many_as_it_needs_at_the_end(x):
    y = F.dropout(x)
    torch.poisson(x)
    return y


def seeded_at_the_end(x):
    y = F.dropout(x)
    torch.manual_seed(4)
    return y * 2


def seeded_alone(x):
    torch.manual_seed(4)
    return x * 2


def advanced_in_a_fork_alone(x):
    with torch.random.fork_rng():
        return F.dropout(x)


def put_back_at_the_end(x):
    first = torch.rand(5)
    state = torch.get_rng_state()
    second = torch.rand(5)
    torch.set_rng_state(state)
    return x + first * second


LEAVING = [
    *DRAWING,
    a_layer_made_in_the_forward,
    initialised,
    the_default_generator_by_name,
    one_that_nobody_reads_at_the_end,
    one_that_takes_as_many_as_it_needs_at_the_end,
    seeded_at_the_end,
    seeded_alone,
    advanced_in_a_fork_alone,
    put_back_at_the_end,
]


@pytest.mark.parametrize("model", LEAVING, ids=lambda model: getattr(model, "__name__", type(model).__name__))
def test_fresh_replays_and_calls_of_a_module_are_the_models_calls_one_after_another(model):
    prog = captured(model)
    module = prog.module()
    given = other()
    begun()
    wanted = [model(given) for _ in range(3)]
    state = torch.get_rng_state()
    for call in (module, lambda given: prog.replay(given, rng="fresh").output):
        begun()
        assert_same([call(given) for _ in range(3)], wanted)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_part_of_a_program_leaves_no_seed_behind_that_was_given_in_another_part():
    prog = captured(seeded_at_the_end)
    begun()
    prog.replay(to="dropout_1", rng="fresh")
    assert torch.initial_seed() == 7
    begun()
    prog.slice(to="dropout_1").module()(x())
    assert torch.initial_seed() == 7


def test_what_the_forward_seeds_stays_though_the_caller_gave_the_same_seed_before():
    torch.manual_seed(3)
    prog = rl.capture(seeded, x())
    assert_same(prog.replay(rng="fresh").output, prog.output)
    torch.manual_seed(3)
    prog = rl.capture(several, x())
    assert not torch.equal(prog.replay(rng="fresh").output, prog.output)


def test_a_forward_that_asks_for_a_new_seed_gets_one():
    def model(x):
        torch.seed()
        return F.dropout(x)

    prog = captured(model)
    assert not torch.equal(prog.replay(rng="fresh").output, prog.replay(rng="fresh").output)


def test_fresh_draws_behind_a_fork_differ_each_time():
    prog = captured(forked)
    assert_same(prog.replay(rng="fresh").output, torch.zeros(5))
    noise = [prog.replay(rng="fresh", to="randn_1")["randn_1"] for _ in range(2)]
    assert not torch.equal(*noise)


def test_a_generator_that_the_model_holds_is_left_alone_and_one_of_the_callers_is_not():
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x):
            return x + torch.rand(5, generator=self.generator)

    model = Held()
    prog = rl.capture(model, x())
    state = model.generator.get_state()
    fresh = [prog.replay(rng="fresh").output for _ in range(2)]
    assert_same(model.generator.get_state(), state)
    assert_same(fresh, [model(x())] * 2)
    assert_same(prog.replay().output, prog.output)
    generator = torch.Generator().manual_seed(5)
    prog = rl.capture(lambda x, generator: x + torch.rand(5, generator=generator), x(), generator=generator)
    assert not torch.equal(prog.replay(rng="fresh").output, prog.output)


def held_by(attribute):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = attribute(torch.Generator().manual_seed(5))

        def forward(self, x):
            kept = self.kept
            while not isinstance(kept, torch.Generator):
                kept = kept[0] if isinstance(kept, (list, tuple)) else next(iter(vars_of(kept).values()))
            return x + torch.empty(5).normal_(generator=kept) * F.dropout(x)

    return Held()


def vars_of(kept):
    return kept if isinstance(kept, dict) else vars(kept)


class Holder:
    def __init__(self, generator):
        self.generator = generator


GLOBAL = torch.Generator().manual_seed(6)
SETTINGS = Holder(torch.Generator().manual_seed(7))
NOISE = partial(torch.rand, generator=torch.Generator().manual_seed(8))


def noise():
    return torch.rand(5, generator=GLOBAL)


def of_a_helpers_global(x):
    return x + noise()


def of_a_globals_attribute(x):
    return x + torch.rand(5, generator=SETTINGS.generator)


def of_a_partial(x):
    return x + NOISE(5)


class OfTheClass(nn.Module):
    generator = torch.Generator().manual_seed(9)

    def forward(self, x):
        return x + torch.randn(5, generator=self.generator)


class DrawnThenSeeded(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        first = torch.rand(5, generator=self.generator)
        return x + first * torch.rand(5, generator=self.generator.manual_seed(2))


HOLDING = {
    "in a list": lambda: held_by(lambda g: [g]),
    "in a dict of lists": lambda: held_by(lambda g: {"a": [g]}),
    "in a tuple": lambda: held_by(lambda g: (g,)),
    "in an object": lambda: held_by(Holder),
    "a global of a helper": lambda: of_a_helpers_global,
    "an attribute of a global": lambda: of_a_globals_attribute,
    "in a partial": lambda: of_a_partial,
    "of the class": OfTheClass,
    "drawn from and then seeded": DrawnThenSeeded,
}


@pytest.mark.parametrize("case", HOLDING)
@pytest.mark.parametrize("earlier", [0, 2])
def test_a_generator_that_is_kept_between_forwards_gives_its_next_numbers_and_is_not_moved(case, earlier):
    model = HOLDING[case]()
    for _ in range(earlier):
        model(x())
    prog = rl.capture(model, x())
    begun()
    fresh = [prog.replay(rng="fresh").output]
    begun()
    fresh.append(prog.replay(rng="fresh").output)
    begun()
    assert_same(fresh, [model(x())] * 2)
    assert_same(prog.replay().output, prog.output)
    with pytest.raises(rl.DivergedReplay, match=r"what `torch\.Generator` drew"):
        prog.replay(rng="fresh", on_divergence="raise")
    with pytest.raises(rl.ReplaylensError, match=r"draws numbers by torch\.Generator"):
        prog.module()


def test_draws_that_began_in_one_state_still_do_behind_the_layer_that_a_fresh_replay_begins_at():
    def model(x):
        start = F.dropout(x.exp())
        state = torch.get_rng_state()
        first = F.dropout(start.sin())
        torch.set_rng_state(state)
        return first - F.dropout(start.sin())

    prog = captured(model)
    for _ in range(3):
        run = prog.replay(from_="dropout_1", rng="fresh", keep="all")
        assert_same(run.output, torch.zeros_like(x()))
        assert not torch.equal(run["dropout_2"], prog["dropout_2"].value)


def test_an_edited_program_draws_anew_too_and_each_call_something_else():
    prog = captured(several).swap("dropout", lambda t: t + torch.randn(4, 5))
    run, again = [prog.replay(rng="fresh", keep="all") for _ in range(2)]
    assert not torch.equal(run.output, again.output)
    noise = [run["add_1"] - x(), run["add_2"] - x()] if "add_1" in prog and "add_2" in prog else None
    assert noise is None or not torch.equal(*noise)


# ---- numbers that torch does not draw ----------------------------------------------------------------------------------


def of_numpy(x):
    return F.dropout(x) + float(np.random.rand())


def of_python(x):
    return F.dropout(x) + random.random()


def of_numpys_second_normal_number(x):
    return x + np.random.randn()


@pytest.mark.parametrize("model", [of_numpy, of_python, of_numpys_second_normal_number])
def test_fresh_numbers_of_other_generators_are_drawn_by_the_model_itself(model):
    np.random.seed(1)
    np.random.randn()
    prog = captured(model)

    def begin():
        begun()
        random.seed(5)
        np.random.seed(5)

    begin()
    wanted = [model(x()), model(x())]
    begin()
    assert_same([prog.replay(rng="fresh").output for _ in wanted], wanted)
    assert_same(prog.replay().output, prog.output)


def test_where_no_model_can_draw_such_numbers_this_is_said():
    prog = captured(of_numpy)
    with pytest.raises(rl.DivergedReplay, match="what `numpy` drew"):
        prog.replay(rng="fresh", on_divergence="raise")
    with pytest.raises(rl.DivergedReplay, match="what `numpy` drew"):
        prog.with_patch({"dropout_1": rl.Zero()}).replay(rng="fresh")
    with pytest.raises(rl.ReplaylensError, match="draws numbers by numpy"):
        prog.module()
    assert prog.replay(rng="fresh", on_divergence="ignore").diverged


def test_generators_that_nobody_draws_from_are_not_named():
    np.random.seed(1)
    np.random.randn()
    prog = captured(several)
    assert prog.graph.other_random_sources == ()


# ---- draws that take as many numbers as contents ask -------------------------------------------------------------------


def behind_gamma(x):
    return torch._standard_gamma(x) * 0 + torch.rand(5)


def behind_dirichlet(x):
    return torch.distributions.Dirichlet(x).sample() * 0 + torch.rand(5)


def behind_beta(x):
    return torch.distributions.Beta(x, x + 1).rsample() + torch.rand(5)


def behind_binomial(x):
    return torch.binomial(torch.full_like(x, 9), x / 10) + torch.randn(5)


def behind_student(x):
    return torch.distributions.StudentT(x + 1).rsample() + torch.rand(5)


def behind_rrelu(x):
    return torch.rrelu(x - 0.7, training=True) + torch.rand(5)


def behind_rrelu_in_place(x):
    h = x - 0.7
    F.rrelu_(h, training=True)
    return h + torch.rand(5)


def behind_von_mises(x):
    return torch.distributions.VonMises(x, x + 1).sample() + torch.rand(5)


def in_a_stream_of_its_own(x):
    own = torch.Generator().manual_seed(2)
    return torch.poisson(x * 3, generator=own) + torch.rand(5, generator=own)


def behind_one_that_nobody_reads(x):
    torch.poisson(x * 3)
    return x + torch.rand(5)


def a_write_behind_one(x):
    h = torch.empty(5)
    torch.poisson(x * 4)
    h.normal_()
    return x + h


def a_chain(x):
    counts = torch.poisson(x * 3)
    drawn = torch.multinomial(counts + 1, 2).float().mean()
    return F.dropout(x) * drawn + torch.bernoulli(x / 10)


def past_a_restored_state(x):
    state = torch.get_rng_state()
    lost = torch.poisson(x * 3) * 0
    behind = torch.rand(5)
    torch.set_rng_state(state)
    return lost + behind + torch.rand(5)


SHIFTED = [
    behind_gamma,
    behind_dirichlet,
    behind_beta,
    behind_binomial,
    behind_student,
    behind_rrelu,
    behind_rrelu_in_place,
    behind_von_mises,
    in_a_stream_of_its_own,
    behind_one_that_nobody_reads,
    a_write_behind_one,
    a_chain,
    past_a_restored_state,
]

ENTRIES = {
    "new inputs": lambda prog: prog.replay(other()).output,
    "a call": lambda prog: prog(other()).output,
    "gradients": lambda prog: prog.replay(other(), grad=True).output,
    "a patch": lambda prog: prog.replay(patch={"input_1": other()}).output,
    "a function": lambda prog: prog.function()(other()),
    "a slice": lambda prog: prog.slice("input_1").replay(other()).output,
    "an edit": lambda prog: prog.with_patch({"input_1": other()}).output,
    "an edit, replayed": lambda prog: prog.with_patch({"input_1": other()}).replay().output,
    "an edit, refreshed": lambda prog: prog.with_patch({"input_1": other()}).refresh().output,
    "a sweep": lambda prog: prog.replay_many({"a": {"input_1": other()}, "b": {"input_1": x()}}).values[0],
    "nothing saved": lambda prog: prog.saving("none").replay(other()).output,
}


@pytest.mark.parametrize("model", SHIFTED)
def test_a_draw_that_takes_more_numbers_shifts_those_behind_it(model):
    prog = captured(model)
    captured(lambda x: x)  # the generator, where that capture began
    wanted = model(other())
    outside = torch.get_rng_state()
    for entry, run in ENTRIES.items():
        assert_same(run(prog), wanted, entry)
        assert torch.equal(torch.get_rng_state(), outside), entry
    captured(lambda x: x)
    assert_same(rl.run(model, x(), patch={"input_1": other()}).output, wanted)
    assert_same(prog.replay().output, prog.output)


@pytest.mark.parametrize("model", [behind_gamma, a_write_behind_one, in_a_stream_of_its_own])
def test_edited_and_moved_programs_know_where_their_draws_begin(model):
    prog = captured(model)
    assert prog.check()
    assert prog.with_patch({"input_1": other()}).check()
    assert rl.check(model, x())


def test_a_patch_that_stops_a_draw_shifts_those_behind_it():
    def model(rate):
        return torch.poisson(rate.relu() * 5), torch.rand(5)

    prog = captured(model)
    captured(lambda x: x)
    rest = torch.rand(5)  # of a rate of zero no number is taken
    assert_same(prog.replay(patch={"relu_1": rl.Zero()}).output[1], rest)
    swept = prog.replay_many({"zero": {"relu_1": rl.Zero()}, "none": {}}, lambda out: out[1])
    assert_same(swept.values, torch.stack([rest, prog.output[1]]))


def test_draws_that_shapes_alone_decide_stay_where_they_were_and_are_not_run_again():
    prog = captured(lambda x: torch.bernoulli(x / 10) + torch.rand(5))
    assert "rand_1_3" not in prog.replay(other()).executed
    assert prog.graph.shifts == {}


def test_gradients_behind_a_shifted_draw_are_the_models():
    def model(x):
        torch.poisson(x.detach() * 3)
        return x * torch.rand(5)

    prog = captured(model)
    captured(lambda x: x)
    given = other().requires_grad_()
    model(given).sum().backward()
    grads = prog.grads(other(), of=lambda out: out.sum(), at=["input_1"])
    assert_same(grads["input_1"], given.grad)


# ---- patches that draw -------------------------------------------------------------------------------------------------


def test_a_patch_draws_from_the_users_generator_and_not_what_the_model_draws_next():
    prog = captured(lambda x: torch.randn(4, 5) + F.relu(x) + torch.randn(4, 5))
    torch.manual_seed(9)
    noise = [torch.randn(4, 5), torch.randn(4, 5)]
    torch.manual_seed(9)
    runs = [prog.replay(patch={"relu_1": lambda h: torch.randn(4, 5)}, keep="all") for _ in noise]
    assert_same([run["relu_1"] for run in runs], noise)
    for run in runs:
        assert_same(run["randn_2"], prog["randn_2"].value)


def noisy(h):
    return h + torch.rand(5)


def noisy_twice(h):
    return h * torch.rand(5) + torch.randn(5)


def as_many_as_it_needs(h):
    return h + torch.poisson(h.abs() * 4)


class Between(nn.Module):
    """A layer to be patched, with draws before and behind it."""

    def __init__(self, branches=False):
        super().__init__()
        self.layer, self.branches = nn.Linear(5, 5), branches

    def forward(self, x):
        first = torch.rand(5)
        h = self.layer(x + first)
        if self.branches and h.sum() > 1000:
            h = h * 2
        return first, h, F.dropout(h), torch.randn(5)


PATCHES = [noisy, noisy_twice, as_many_as_it_needs, nn.Dropout()]


def hooked(model, patch, given):
    handle = model.layer.register_forward_hook(lambda module, args, out: patch(out))
    try:
        return model(given)
    finally:
        handle.remove()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: getattr(patch, "__name__", "module"))
@pytest.mark.parametrize("branches", [False, True])
def test_a_patch_of_a_run_draws_as_a_forward_hook_does(patch, branches):
    model = Between(branches)
    far = (lambda h: patch(h) + 1000) if branches else patch
    begun()
    wanted = hooked(model, far, x())
    begun()
    start = torch.get_rng_state()
    run = rl.run(model, x(), patch={"layer": far})
    assert_same(run.output, tuple(t.detach() for t in wanted))
    assert_same(run.program.replay().output, run.output)
    assert torch.equal(torch.get_rng_state(), start)
    begun()
    given = rl.capture(model, x()).replay(patch={"layer": far}, rng="fresh").output
    begun()
    model(x())
    assert_same(given, tuple(t.detach() for t in hooked(model, far, x())))


def test_patches_of_inputs_and_of_a_seeded_model_draw_as_they_would_before_it():
    def model(x):
        h = x.neg()
        torch.manual_seed(3)
        return h, torch.rand(5)

    begun()
    wanted = [noisy(x()), torch.randn(5)]
    begun()
    run = rl.run(lambda x: (x * 1, torch.randn(5)), x(), patch={"input_1": noisy})
    assert_same(list(run.output), wanted)
    begun()
    wanted = noisy(-x())
    begun()
    assert_same(rl.run(model, x(), patch={"neg": noisy}).output[0], wanted)
    assert_same(rl.run(model, x(), patch={"neg": noisy}).output[1], model(x())[1])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: getattr(patch, "__name__", "module"))
def test_a_patch_that_leads_the_model_elsewhere_draws_from_the_users_generator_too(patch):
    prog = captured(Between(branches=True))
    layer = prog["layer"].value
    begun()
    wanted, state = patch(layer) + 1000, torch.get_rng_state()
    begun()
    run = prog.replay(patch={"layer": lambda h: patch(h) + 1000})
    assert run.diverged
    assert_same(run["layer"], wanted)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same([run.output[0], run.output[3]], [prog.output[0], prog.output[3]])
    assert_same(run.program.replay().output, run.output)


EDITED = {
    "a function": lambda prog, patch: prog.with_patch({"layer": patch}),
    "a function of a part": lambda prog, patch: prog.with_patch({"layer": rl.Apply(patch, "b f")}),
    "several": lambda prog, patch: prog.with_patch({"layer": rl.Apply(patch) >> rl.Scale(2) >> rl.Apply(patch)}),
    "of an input": lambda prog, patch: prog.with_patch({"input_1": patch}),
    "of two layers": lambda prog, patch: prog.with_patch({"input_1": patch, "layer": patch}),
    "one after the other": lambda prog, patch: prog.with_patch({"layer": patch}).with_patch({"layer": patch}),
}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: getattr(patch, "__name__", "module"))
@pytest.mark.parametrize("edit", EDITED)
def test_a_program_edited_by_a_function_that_draws_gives_its_output_again(patch, edit, tmp_path):
    prog = captured(Between())
    begun()
    edited = EDITED[edit](prog, patch)
    assert_same(edited.output[0], prog.output[0])
    assert not torch.equal(edited.output[1], prog.output[1])
    for _ in range(2):
        state = torch.get_rng_state()
        assert_same(edited.replay().output, edited.output)
        assert_same(edited.function()(x()), edited.output)
        assert_same(edited.refresh().output, edited.output)
        assert_same(edited.slice("input_1").output, edited.output)
        assert_same(edited.replay_many({"a": {}}, lambda out: out[1]).values[0], edited.output[1])
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
    assert edited.check()
    fresh = []
    for seed in (9, 9, 10):
        torch.manual_seed(seed)
        fresh.append(edited.replay(rng="fresh").output[1])
    assert torch.equal(fresh[0], fresh[1]) and not torch.equal(fresh[0], fresh[2])
    torch.manual_seed(9)
    module = edited.module()
    assert not torch.equal(module(x())[1], module(x())[1])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: getattr(patch, "__name__", "module"))
def test_an_edit_draws_what_a_replay_with_the_same_patch_draws(patch):
    prog = captured(Between())
    begun()
    wanted = prog.replay(patch={"layer": patch}).output
    state = torch.get_rng_state()
    begun()
    assert_same(prog.with_patch({"layer": patch}).output, wanted)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_edit_of_several_values_that_draws_gives_its_output_again():
    prog = captured(lambda x: (*x.max(dim=1), torch.rand(4)))
    begun()
    edited = prog.with_patch({"max_1": lambda pair: (pair[0] + torch.rand(4), pair[1])})
    assert_same(edited.replay().output, edited.output)
    assert not torch.equal(edited.replay(rng="fresh").output[0], edited.output[0])
    assert edited.check()


# ---- gradients that the forward takes through what it draws ----------------------------------------------------------------


class DrawsItsMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def own_generator(t):
    own = torch.Generator()
    own.set_state(torch.get_rng_state())
    return F.dropout(t) * torch.bernoulli(t / 10, generator=own)


def reentrant(t):
    return checkpoint(F.dropout, t, use_reentrant=True)


DIFFERENTIATED = {
    "dropout": F.dropout,
    "dropout in place": lambda t: F.dropout(t * 1, inplace=True) ** 2,
    "two": lambda t: F.dropout(t) * F.dropout(t.exp()),
    "bernoulli": lambda t: t * torch.bernoulli(t / 10),
    "numbers like it": lambda t: t * torch.rand_like(t),
    "numbers": lambda t: t * torch.rand(5),
    "attention": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None], dropout_p=0.5),
    "rrelu": lambda t: F.rrelu(t - 0.5, training=True),
    "a custom function": lambda t: DrawsItsMask.apply(t) * t,
    "a checkpoint": lambda t: checkpoint(F.dropout, t, use_reentrant=False),
    "behind what takes as many as it needs": lambda t: F.dropout(t) + 0 * torch.poisson(t.detach() * 3) * F.dropout(t),
    "seeded in the middle": lambda t: F.dropout(t) * F.dropout(torch.manual_seed(3) and t),
    "a generator of its own": own_generator,
}


def by_grad(draw, x):
    h = x.detach().requires_grad_()
    y = draw(h)
    (g,) = torch.autograd.grad(y.sum(), h)
    return y.detach(), g, torch.rand(3)


def by_backward(draw, x):
    h = x.detach().requires_grad_()
    y = draw(h)
    y.sum().backward()
    return h.grad * torch.rand(5)


def twice(draw, x):
    h = x.detach().requires_grad_()
    y = draw(h**3)
    (g,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    (second,) = torch.autograd.grad((g**2).sum(), h)
    return second


WAYS = [(way, case) for way in (by_grad, by_backward, twice) for case in DIFFERENTIATED]


@pytest.mark.parametrize(("way", "case"), [*WAYS, (by_backward, "a reentrant checkpoint")])
def test_a_gradient_within_the_forward_is_taken_through_what_was_drawn_in_this_replay(way, case):
    model = partial(way, DIFFERENTIATED.get(case, reentrant))
    prog, module = captured(model), captured(model).module()
    for seed in range(2):
        begun(seed)
        wanted = model(x())
        begun(seed)
        assert_same(prog.replay(rng="fresh").output, wanted)
        begun(seed)
        assert_same(module(x()), wanted)
    assert_same(prog.replay().output, prog.output)
    assert prog.check()


def shifted_gradient(x):
    h = x.detach().requires_grad_()
    torch.poisson(x * 3)
    y = F.dropout(h.exp())
    (g,) = torch.autograd.grad(y.sum(), h)
    return y.detach(), g


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "a sweep"])
def test_a_gradient_goes_through_a_draw_where_another_one_shifted_it(entry):
    prog = captured(shifted_gradient)
    captured(lambda x: x)
    assert_same(ENTRIES[entry](prog), shifted_gradient(other()))
    edited = prog.with_patch({"input_1": other()})
    assert edited.check()


@pytest.mark.parametrize("first", ["poisson_1", "dropout_1", "grad_1"])
def test_what_is_asked_of_a_run_later_was_drawn_in_it(first):
    prog = captured(shifted_gradient)
    captured(lambda x: x)
    counts = torch.poisson(other() * 3)
    captured(lambda x: x)
    wanted = dict(zip(("dropout_1", "grad_1"), shifted_gradient(other()), strict=True)) | {"poisson_1": counts}
    for how in ({}, {"to": "poisson_1"}, {"keep": ["poisson_1"]}, {"keep": ["dropout_1"]}):
        run = prog.replay(other(), **how)
        for name in (first, *wanted):
            (value,) = run[name] if isinstance(run[name], tuple) else (run[name],)
            assert_same(value.detach(), wanted[name])


def test_what_a_draw_gave_is_as_recorded_where_a_fresh_replay_begins_at_it():
    prog = captured(several)
    run = prog.replay(from_="dropout_1", rng="fresh", keep="all")
    assert_same(run["dropout_1"], prog["dropout_1"].value)
    assert not torch.equal(run["dropout_2"], prog["dropout_2"].value)


# ---- forwards that read the generator itself ---------------------------------------------------------------------------


def the_seed(x):
    return x * (torch.initial_seed() % 7 + 1)


def the_seed_by_the_generator(x):
    return x * (torch.default_generator.initial_seed() % 7 + 1)


def seed_of_torch():
    return torch.initial_seed() % 7 + 1


def the_seed_by_a_helper(x):
    return x * seed_of_torch()


def a_generator_of_the_same_seed(x):
    return x + torch.rand(5, generator=torch.Generator().manual_seed(torch.initial_seed()))


def a_copied_generator(x):
    return x + torch.rand(5, generator=torch.default_generator.clone_state()) + torch.rand(5)


def a_generator_in_the_same_state(x):
    own = torch.Generator()
    own.set_state(torch.get_rng_state())
    return x + torch.rand(5, generator=own)


def a_generator_in_the_same_state_later(x):
    noise = torch.rand(5)
    own = torch.Generator()
    own.set_state(torch.default_generator.get_state())
    return x * noise + torch.rand(5, generator=own)


def the_state_as_a_tensor(x):
    return x + torch.get_rng_state()[:5] / 255


def the_state_as_a_number(x):
    return x + int(torch.get_rng_state()[9])


def the_state_as_bytes(x):
    torch.rand(3)
    return x + sum(torch.get_rng_state().numpy().tobytes()) % 11


def the_state_as_a_list(x):
    torch.rand(3)
    return x * torch.default_generator.get_state().tolist()[20]


class OfTheModel(nn.Module):
    def forward(self, x):
        return F.dropout(x) + self.number()

    def number(self):
        return torch.initial_seed() % 5


class OfTheModelUnderADecorator(nn.Module):
    def forward(self, x):
        return F.dropout(x) + self.number()

    @torch.no_grad()
    def number(self):
        return torch.initial_seed() % 5


STATE = torch.Generator().manual_seed(0).get_state()


def a_state_from_outside(x):
    torch.set_rng_state(STATE)
    return F.dropout(x)


def seeded_by_the_default_generator(x):
    torch.default_generator.manual_seed(0)
    return F.dropout(x)


READING = [
    the_seed,
    the_seed_by_the_generator,
    the_seed_by_a_helper,
    a_generator_of_the_same_seed,
    a_copied_generator,
    a_generator_in_the_same_state,
    a_generator_in_the_same_state_later,
    the_state_as_a_tensor,
    the_state_as_a_number,
    the_state_as_bytes,
    the_state_as_a_list,
    OfTheModel(),
    OfTheModelUnderADecorator(),
    a_state_from_outside,
    seeded_by_the_default_generator,
]


@pytest.mark.parametrize("drawn", [0, 2])
@pytest.mark.parametrize("model", READING, ids=lambda model: getattr(model, "__name__", type(model).__name__))
def test_what_a_forward_reads_of_the_generator_is_read_anew_or_said(model, drawn):
    prog = captured(model, drawn=drawn)
    begun()
    wanted = [model(x()) for _ in range(2)]
    begun()
    fresh = [prog.replay(rng="fresh") for _ in range(2)]
    assert_same([run.output for run in fresh], wanted)
    assert_same(prog.replay().output, prog.output)
    begun()
    if not prog.graph.generator_read:
        module = prog.module()
        assert_same([module(x()) for _ in range(2)], wanted)
        return
    assert all(run.diverged for run in fresh)
    with pytest.raises(rl.DivergedReplay, match=r"what `.*` gave"):
        prog.replay(rng="fresh", on_divergence="raise")
    with pytest.raises(rl.ReplaylensError, match="reads or sets the state of torch's generator"):
        prog.module()


@pytest.mark.parametrize("model", [restored, forked_and_seeded, a_generator_made_in_the_forward, several])
def test_a_state_that_is_put_back_is_no_read_of_it_though_nothing_was_drawn_since_the_seed(model):
    prog = captured(model, drawn=0)
    assert prog.graph.generator_read == ()
    torch.manual_seed(7)
    wanted = model(x())
    torch.manual_seed(7)
    assert_same(prog.replay(rng="fresh").output, wanted)


def test_numbers_that_nobody_was_seen_to_draw_are_drawn_by_the_model_itself():
    def model(x):
        torch.default_generator.set_state(torch.Generator().manual_seed(0).get_state())
        return F.dropout(x)

    advanced = torch.Generator().manual_seed(0)
    torch.rand(9, generator=advanced)
    hidden = advanced.get_state()

    def jumping(x):
        torch.set_rng_state(hidden)
        return F.dropout(x)

    for forward in (model, jumping):
        prog = captured(forward)
        begun()
        wanted = forward(x())
        begun()
        assert_same(prog.replay(rng="fresh").output, wanted)


def _by_numpy(x):
    return x * float(np.random.default_rng().random())


def _by_no_seed(x):
    return x * float(np.random.default_rng(None).random())


def _by_a_seed_of_none(x):
    return x * float(np.random.default_rng(seed=None).random())


def _by_a_helper(x):
    return x * _unseeded_number()


def _unseeded_number():
    return float(np.random.RandomState().rand())


def _by_python(x):
    return x * random.Random().random()


def _by_a_local_name(x):
    from random import Random

    return x * Random().random()  # Python 3.13 loads both at once


def _by_the_system(x):
    return x * int.from_bytes(os.urandom(4), "little")


def _by_a_new_seed(x):
    generator = torch.Generator()
    generator.seed()
    return x * torch.rand(4, generator=generator)


UNSEEDED = [
    _by_numpy,
    _by_no_seed,
    _by_a_seed_of_none,
    _by_a_helper,
    _by_python,
    _by_a_local_name,
    _by_the_system,
    _by_a_new_seed,
]


@pytest.mark.parametrize("model", UNSEEDED)
def test_a_generator_that_the_forward_makes_without_a_seed_draws_anew_in_fresh_replays(model):
    prog = rl.capture(model, torch.ones(4))
    assert torch.equal(prog.replay().output, prog.output)
    runs = [prog.replay(rng="fresh") for _ in range(3)]
    assert all(run.diverged for run in runs)
    assert len({tuple(run.output.tolist()) for run in runs}) == 3
    with pytest.raises(rl.DivergedReplay, match="only the model can draw"):
        prog.replay(rng="fresh", on_divergence="raise")
    with pytest.raises(rl.ReplaylensError, match="draws numbers by"):
        prog.module()


def _by_seeded_ones(x):
    generator = torch.Generator().manual_seed(3)
    number = np.random.default_rng(0).random() + random.Random(1).random() + np.random.RandomState(seed=2).rand()
    return x * float(number) * torch.rand(4, generator=generator)


def test_a_generator_that_the_forward_makes_with_a_seed_draws_the_same_in_fresh_replays():
    prog = rl.capture(_by_seeded_ones, torch.ones(4))
    run = prog.replay(rng="fresh")
    assert not run.departures
    assert torch.equal(run.output, prog.output)
    prog.module()


@pytest.mark.parametrize("make", [lambda: np.random.default_rng(0), lambda: random.Random(0)], ids=["numpy", "random"])
def test_a_generator_of_others_that_the_model_keeps_is_drawn_from_by_the_model_alone(make):
    class Draws(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = make()

        def forward(self, x):
            return x * self.generator.random()

    model, plain = Draws(), Draws()
    prog = rl.capture(model, torch.ones(4))
    assert torch.equal(prog.output, plain(torch.ones(4)))
    run = prog.replay(rng="fresh")
    assert run.diverged
    assert torch.equal(run.output, plain(torch.ones(4)))
    assert not prog.replay().departures


def test_a_fresh_replay_from_a_layer_draws_the_same_whatever_was_patched_there_before():
    prog = rl.capture(several, x())

    def from_there():
        torch.manual_seed(5)
        return prog.replay(from_="dropout_1_1", patch=x(), rng="fresh"), torch.get_rng_state()

    prog.replay(patch={"dropout_1_1": x()}, rng="fresh")
    after, left = from_there()
    prog = rl.capture(several, x())
    first, left_first = from_there()
    assert after.executed == first.executed
    assert_same(after.output, first.output)
    assert_same(left, left_first)


# ---- a recorded state that is a value of the program ---------------------------------------------------------------


def with_a_recorded_state():
    """A program that draws again when it takes a gradient, from a state that is one of its constants."""
    case = MODELS["checkpoint_that_the_forward_differentiates"]()
    prog = rl.capture(case.model, *case.args)
    (label,) = [label for label in prog.layer_labels if label.startswith("constant") and prog[label].shape == (5056,)]
    return prog, label


def with_bytes(state, at, number):
    made = state.clone()
    made[at : at + 4] = torch.tensor(list(number.to_bytes(4, "little")), dtype=torch.uint8)
    return made


NO_STATES = {
    "zeros": torch.zeros_like,
    "all bits": lambda state: torch.full_like(state, 255),
    "a place behind the block": lambda state: with_bytes(with_bytes(state, 8, 624), 16, 624),
    "none left": lambda state: with_bytes(state, 8, 0),
    "not seeded": lambda state: with_bytes(state, 12, 0),
}


@pytest.mark.parametrize("name", NO_STATES)
def test_what_is_no_state_of_a_generator_never_reaches_torch(name):
    prog, label = with_a_recorded_state()
    state = NO_STATES[name](prog[label].value)
    told = r"is none: number \d+ of 624 would come next, with -?\d+ left(?s:.*)Give what `torch.Generator"
    ways = {
        "replay": lambda: prog.replay(patch={label: state}),
        "ignoring": lambda: prog.replay(patch={label: state}, on_divergence="ignore"),
        "fresh": lambda: prog.replay(patch={label: lambda value: state}, rng="fresh", on_divergence="ignore"),
        "with_patch": lambda: prog.with_patch({label: state}),
        "insert_after": lambda: prog.insert_after(label, lambda value: state),
        "function": lambda: prog.function([label])(state),
        "slice": lambda: prog.slice(label)(state),
        "sweep": lambda: prog.replay_many({"one": {label: state}, "other": {label: prog[label].value}}),
    }
    for way in ways.values():
        with pytest.raises(rl.BadPatch, match=told):
            way()
    with pytest.raises(rl.BadPatch) as caught:
        ways["replay"]()
    note = f"raised by node {next(name for name in prog.layer_labels if name.startswith('grad'))} "
    assert note in getattr(caught.value, "__notes__", [note])[0]  # Python 3.10 has no notes


def test_any_state_of_a_generator_may_stand_for_the_recorded_one_however_it_lies():
    prog, label = with_a_recorded_state()
    states = [torch.Generator().manual_seed(seed).get_state() for seed in range(4)]
    outputs = [prog.replay(patch={label: state}).output for state in states]
    assert not torch.equal(outputs[0], outputs[1])
    rows, columns = torch.stack(states), torch.stack(states, 1)
    for number, output in enumerate(outputs):
        assert torch.equal(prog.replay(patch={label: rows[number]}).output, output)
        assert torch.equal(prog.replay(patch={label: columns[:, number]}, on_divergence="ignore").output, output)
    found = prog.replay_many({number: {label: state} for number, state in enumerate(states)})
    assert torch.equal(found.values, torch.stack(outputs))


def test_a_state_that_differs_from_sample_to_sample_is_refused():
    prog, label = with_a_recorded_state()
    states = torch.stack([torch.Generator().manual_seed(seed).get_state() for seed in range(2)])
    with pytest.raises(rl.BadPatch, match="it differs from sample to sample"):
        torch.func.vmap(prog.function([label]), randomness="same")(states)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Monitored(nn.Module):
    """The output needs `a` alone, and the model draws for `b` before it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Noise(), Noise(), nn.Tanh()

    def forward(self, x):
        self.c(self.b(x))
        return self.a(x)


@pytest.mark.parametrize("keep", ["all", ["b"], ["b", "c"], ["c"]], ids=str)
def test_fresh_numbers_are_those_of_the_model_also_where_the_output_needs_none(keep):
    wanted, model, handles = {}, Monitored(), []
    for name in ("a", "b", "c"):

        def hook(module, args, output, name=name):
            return wanted.update({name: output})

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    torch.manual_seed(5)
    model(x())
    for handle in handles:
        handle.remove()
    torch.manual_seed(0)
    prog = rl.capture(model, x())
    torch.manual_seed(5)
    run = prog.replay(rng="fresh", keep=keep)
    assert torch.equal(run.output, wanted["a"])
    for name in "abc" if keep == "all" else keep:
        assert torch.equal(run[name], wanted[name])


@pytest.mark.parametrize("name", ["b", "c"])
def test_a_fresh_number_that_was_not_kept_is_no_recorded_one(name):
    prog = rl.capture(Monitored(), x())
    with pytest.raises(rl.ReplaylensError, match=r"fresh draws cannot be repeated. Pass keep="):
        prog.replay(rng="fresh")[name]
    torch.testing.assert_close(prog.replay(rng="fresh")["input_1"], x())
