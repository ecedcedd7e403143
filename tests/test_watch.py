"""What a watch hands on is what the training computed; what it leaves behind is nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import replaylens as rl


def cnn(inplace=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace), nn.Flatten(), nn.Linear(8 * 64, 10)
    )


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count, *shape, classes=10):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(4, *shape, generator=generator)
        yield x, torch.randint(0, classes, (4,), generator=generator)


def train(model, data, optimizer=None, before_step=lambda step: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before_step(step)
        optimizer.step()


def samples(watch):
    """All samples that the ring still has, by step, name and kind."""
    watch._session.sampler.send_early()  # gradients that wait for a scaler
    reader, found = watch._session.ring.reader(), {}
    while (sample := reader.take()) is not None:
        assert (sample.step, sample.name, sample.what) not in found, "one value was sent twice"
        found[sample.step, sample.name, sample.what] = sample
    return found


def value(sample):
    return torch.from_numpy(sample.values.copy())


def names(found, what=None):
    return list(dict.fromkeys(name for _, name, kind in found if what in (None, kind)))


def hooks_on(model):
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks_with_kwargs",
    )
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


# -- values ------------------------------------------------------------------------------------------------------------


def test_activations_and_gradients_are_those_of_a_twin_that_retains_them():
    twin, kept = cnn(inplace=False), {}

    def keep(name):
        def hook(module, args, output):
            output.retain_grad()
            kept[name] = output

        return hook

    for name, module in twin.named_children():
        module.register_forward_hook(keep(name))
    train(twin, batches(1, 3, 8, 8))
    model = cnn(inplace=True)
    with rl.watch(model, ["*"], every=1, sink=[]) as watch:
        train(model, batches(1, 3, 8, 8))
        found = samples(watch)
    assert names(found) == list("01234")
    for name, tensor in kept.items():
        assert torch.equal(value(found[0, name, "activation"]), tensor.detach())
        assert torch.equal(value(found[0, name, "grad"]), tensor.grad)


def test_weights_their_gradients_and_updates_are_what_the_optimizer_has():
    model, seen = mlp(), {}

    def note(step):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        seen[step] = {name: (p.detach().clone(), p.grad.clone()) for name, p in model.named_parameters()}

    with rl.watch(model, every=1, what=("weight", "weight_grad", "update"), sink=[]) as watch:
        train(model, batches(3, 6, classes=3), before_step=note)
        found = samples(watch)
    after = dict(model.named_parameters())
    for name in after:
        for step in range(3):
            weight, gradient = seen[step][name]
            following = seen[step + 1][name][0] if step < 2 else after[name].detach()
            assert torch.equal(value(found[step, name, "weight"]), weight)
            assert torch.equal(value(found[step, name, "weight_grad"]), gradient)  # after clipping
            assert torch.equal(value(found[step, name, "update"]), following - weight)


def test_inputs_are_read_before_the_module_can_write_them():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
    with rl.watch(model, "1", every=1, what=("input", "activation"), sink=[]) as watch:
        model(torch.ones(2, 6))
        found = samples(watch)
    before, after = value(found[0, "1", "input"]), value(found[0, "1", "activation"])
    assert (before < 0).any() and torch.equal(before.relu(), after)


def test_accumulated_gradients_are_the_sum_and_the_first_micro_batch_is_sampled():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(batches(3, 6, classes=3))
    with rl.watch(model, ["", "0"], every=1, what="all", sink=[]) as watch:
        for x, y in data:
            F.cross_entropy(model(x), y).backward()
        total = model[0].weight.grad.clone()
        optimizer.step()
        found = samples(watch)
    assert torch.equal(value(found[0, "0.weight", "weight_grad"]), total)
    assert torch.equal(value(found[0, "Sequential", "input"]), data[0][0])


def test_every_micro_batch_is_sampled_where_that_is_asked():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(batches(3, 6, classes=3))
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # known to be none, so that no gradient waits for one
    with rl.watch(model, "0", every=1, micro="all", sink=[], scaler=scaler) as watch:
        for x, y in data:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        reader, found = watch._session.ring.reader(), []
        while (sample := reader.take()) is not None:
            found.append(sample)
    assert [(s.name, s.what) for s in found] == [("0", "activation"), ("0", "grad")] * 3
    torch.manual_seed(0)
    assert torch.equal(value(found[4]), F.linear(data[2][0], mlp()[0].weight, mlp()[0].bias))


@pytest.mark.parametrize("scaler", [True, False], ids=["told", "found"])
def test_gradients_of_a_scaled_loss_are_divided_by_its_scale(scaler):
    plain, scaled = mlp(), mlp()
    for model, scale in ((plain, torch.amp.GradScaler("cpu", enabled=False)), (scaled, torch.amp.GradScaler("cpu"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with rl.watch(
            model, "0", every=1, what=("grad", "weight_grad"), sink=[], scaler=scale if scaler else None
        ) as w:
            for x, y in batches(2, 6, classes=3):
                optimizer.zero_grad()
                scale.scale(F.cross_entropy(model(x), y)).backward()
                scale.step(optimizer)
                scale.update()
            found = samples(w)
        model.seen = [found[1, "0", "grad"], found[1, "0.weight", "weight_grad"]]
    for one, other in zip(plain.seen, scaled.seen):
        torch.testing.assert_close(value(one), value(other))


def test_gradients_wait_for_the_scaler_in_the_first_step_under_autocast():
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    kept = []
    model[0].register_forward_hook(lambda module, args, output: output.retain_grad() or kept.append(output))
    x, y = next(batches(1, 6, classes=3))
    with rl.watch(model, "0", every=1, what="grad", sink=[]) as watch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        found = samples(watch)
    assert torch.equal(value(found[0, "0", "grad"]).bfloat16(), kept[0].grad / 65536.0)


class Passes(nn.Module):
    """A module that is called three times, with several outputs."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.heads = Heads()

    def forward(self, x):
        h = torch.zeros(len(x), 4)
        for _ in range(3):
            h = self.cell(x, h)
        return self.heads(h)


class Heads(nn.Module):
    def forward(self, h):
        return {"a": h * 2, "b": (h + 1, None, "text"), "n": 3}


def test_passes_and_several_outputs_have_names_of_their_own():
    model = Passes()
    with rl.watch(model, ["cell", "heads"], every=1, sink=[]) as watch:
        model(torch.ones(2, 4))
        assert names(samples(watch)) == ["cell", "cell:2", "cell:3", "heads[a]", "heads[b][0]"]
    with rl.watch(model, "cell:2", every=1, sink=[]) as watch:
        model(torch.ones(2, 4))
        assert names(samples(watch)) == ["cell:2"]


def test_each_call_of_a_module_has_one_name_however_it_is_asked_for():
    model = Passes()
    with rl.watch(model, ["cell:3", "cell:1", "cell:9"], every=1, what="activation", sink=[]) as watch:
        train_on(model, 2)
        assert names(samples(watch)) == ["cell", "cell:3"]
        assert watch.names == ("cell", "cell:3", "cell:9")
        assert watch.stats().unseen == {"cell:9": "step 1 had 3 calls of this module."}
    with rl.watch(model, ["cell", "cell:2"], every=1, what="activation", sink=[]) as watch:
        train_on(model, 1)
        assert names(samples(watch)) == ["cell", "cell:2", "cell:3"]


def train_on(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4))["a"].sum().backward()
        optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_no_second_sample(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = mlp(), nn.Linear(3, 3)

        def forward(self, x):
            return self.last(checkpoint(self.inner, x, use_reentrant=reentrant))

    torch.manual_seed(0)
    model = Net()
    with rl.watch(model, "**", every=1, sink=[]) as watch:
        x = torch.randn(2, 6, requires_grad=True)
        model(x).sum().backward()
        found = samples(watch)  # asserts that none comes twice
    assert names(found, "activation") == ["inner.0", "inner.1", "inner.2", "inner", "last"]
    assert set(names(found, "grad")) == set(names(found, "activation"))


@pytest.mark.parametrize(("layers", "name"), [("0", "0"), ("relu", "relu_1")])
def test_a_forward_without_gradients_is_not_the_trainings(layers, name):
    model = mlp()
    with rl.watch(model, layers, every=1, sink=[]) as watch:
        for step in range(2):
            with torch.no_grad():
                model(torch.zeros(1, 6))
            train(model, batches(1, 6, classes=3))
            found = samples(watch)
            assert found[step, name, "activation"].shape == (4, 8)
            assert found[step, name, "grad"].shape == (4, 8)


def test_single_tensors_are_watched_by_the_name_that_they_are_given():
    model, prompt = mlp(), torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), prompt], lr=0.1)
    with rl.watch(model, {"prompt": prompt}, every=1, sink=[]) as watch:
        for x, y in batches(2, 6, classes=3):
            optimizer.zero_grad()
            F.cross_entropy(model(x + prompt), y).backward()
            gradient, before = prompt.grad.clone(), prompt.detach().clone()
            optimizer.step()
        found = samples(watch)
    assert torch.equal(value(found[1, "prompt", "activation"]), before)
    assert torch.equal(value(found[1, "prompt", "grad"]), gradient)
    assert not prompt._backward_hooks


class Fragile(nn.Module):
    """Raises where the batch is too large for it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if len(x) > 6:
            raise RuntimeError("out of memory")
        return h


def test_a_forward_that_raised_and_an_evaluation_take_no_names_of_the_trainings():
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rl.watch(model, ["a", "tanh"], every=1, sink=[]) as watch:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model(torch.ones(8, 3))
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            model.eval()
            model(torch.ones(5, 3))
            model.train()
        reader, found = watch._session.ring.reader(), []
        while (sample := reader.take()) is not None:
            found.append((sample.step, sample.name, sample.what, sample.shape[0]))
    assert {one for one in found if one[3] == 4} == {
        (step, name, what, 4) for step in (0, 1) for name in ("a", "tanh_1") for what in ("activation", "grad")
    }
    assert {one for one in found if one[3] != 4} == {(0, "a", "activation", 8), (1, "a", "activation", 8)}


def test_a_part_without_gradients_of_a_trainings_forward_is_its_first_call():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                target = self.f(x)
            return self.f(x) - target + x

    model = Net()
    with rl.watch(model, "f", every=1, sink=[]) as watch:
        model(torch.ones(1, 3)).sum().backward()
        assert [key[1:] for key in samples(watch)] == [("f", "activation"), ("f:2", "activation"), ("f:2", "grad")]


def test_values_without_gradients_are_those_of_the_first_micro_batch_too():
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with rl.watch(model, "0", every=1, what=("input", "activation"), sink=[]) as watch:
        for number in range(3):
            model(torch.full((1, 3), float(number))).sum().backward()
        optimizer.step()
        found = samples(watch)
    assert list(found) == [(0, "0", "input"), (0, "0", "activation")]
    assert value(found[0, "0", "input"])[0, 0].item() == 0.0


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one of the same weights, which it moves half of the way back."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        weights = [p for group in self.inner.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in weights]
        self.inner.step()
        with torch.no_grad():
            for p, old in zip(weights, before):
                p.lerp_(old, 0.5)


def test_an_optimizer_within_another_ones_step_makes_no_step_of_its_own():
    model = mlp()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with rl.watch(model, "0", every=1, what=("weight", "update"), sink=[]) as watch:
        for x, y in batches(3, 6, classes=3):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found = samples(watch)
        assert watch.step_number == 3
    assert torch.equal(value(found[2, "0.weight", "weight"]), before)
    assert torch.equal(value(found[2, "0.weight", "update"]), model[0].weight.detach() - before)


@pytest.mark.parametrize("pattern", ["in the backward", "now and then", "in turns"])
def test_a_step_of_several_optimizers_ends_with_the_next_forward_at_the_latest(pattern):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    if pattern == "in the backward":
        for layer, optimizer in zip(model, pair):
            layer.weight.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    with rl.watch(model, ["", "0", "relu"], every=1, what=("input", "activation", "weight"), sink=[]) as watch:
        for number in range(6):
            with torch.no_grad():
                model[0].bias.fill_(number)
            model(torch.full((1, 2), float(number))).relu().sum().backward()
            chosen = {"now and then": [0, *[1] * (number % 3 == 0)], "in turns": [number % 2]}.get(pattern, [])
            for one in chosen:
                pair[one].step()
        found = samples(watch)
    assert [value(found[step, "Sequential", "input"])[0, 0].item() for step in range(6)] == [*range(6)]
    biases = {step: value(one)[0].item() for (step, name, _), one in found.items() if name == "0.bias"}
    assert biases == {step: float(step) for step in biases} and len(biases) >= 3


def test_operations_keep_their_steps_where_optimizers_take_turns():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    pair = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    with rl.watch(model, ["tanh"], every=1, what="activation", sink=[]) as watch:
        for number in range(4):
            model(torch.ones(number + 1, 3)).sum().backward()
            for optimizer in pair[: 1 + (number == 0)]:
                optimizer.step()
        assert {key[0]: one.shape[0] for key, one in samples(watch).items()} == {0: 1, 1: 2, 2: 3, 3: 4}


def test_a_module_that_takes_anothers_place_is_watched_there():
    model = mlp()
    with rl.watch(model, ["0", "2"], every=1, what=("activation", "weight"), sink=[]) as watch:
        train(model, batches(1, 6, classes=3))
        model[0] = nn.Linear(6, 8)
        data = list(batches(2, 6, classes=3))
        train(model, data)
        found = samples(watch)
        weight, bias = (value(found[2, f"0.{key}", "weight"]) for key in ("weight", "bias"))
        assert torch.equal(value(found[2, "0", "activation"]), F.linear(data[1][0], weight, bias))
        model.add_module("3", model[2])
        del model._modules["2"]
        train(model, data)
        assert watch.stats().unseen == {"2": "there is no such module any more."}


def test_no_two_values_have_one_name():
    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            self.Names = nn.Identity()

        def forward(self, x):
            return {0: self.Names(x * 1), "0": self.Names(x * 2)}

    model = Names()
    with rl.watch(model, ["", "Names"], every=1, what="activation", clock="forward", sink=[]) as watch:
        model(torch.ones(1))
        assert names(samples(watch)) == ["Names", "Names:2", "Names()[0]", "Names()['0']"]


def test_a_pass_of_what_is_watched_whole_is_not_removed_alone():
    model = mlp()
    with rl.watch(model, ["0", "2:2"], sink=[]) as watch:
        for layers, text in (("0:2", "'0:2' is not watched by itself"), ("0.weight", r"remove\('0'\)")):
            with pytest.raises(rl.NoSuchLayer, match=text):
                watch.remove(layers)
        watch.remove("2:2")
        assert watch.names == ("0",)


def test_a_watched_parameter_can_be_exchanged_by_torch():
    model = mlp()
    with rl.watch(model, {"w": model[0].weight}, sink=[]):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight.dtype == torch.float64


@pytest.mark.parametrize("case", ["first step not sampled", "resumed", "paused", "added", "asked"])
def test_the_scaler_is_met_whatever_happens_in_the_first_step(case):
    model = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    wishes = {"first step not sampled": {"every": lambda step: step > 0}, "resumed": {"start": 1, "every": 2}}
    with rl.watch(model, "", what="grad", sink=[], **{"every": 1, **wishes.get(case, {})}) as watch:
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            if not number and case == "paused":
                watch.pause()
                watch.resume()
            elif not number and case == "added":
                watch.add("")
            elif not number and case == "asked":
                watch.stats()
            scaler.step(optimizer)
            scaler.update()
        found = samples(watch)
    assert len(found) >= 2 and {value(one).item() for one in found.values()} == {1.0}


@pytest.mark.parametrize("clock", ["forward", "manual"])
def test_other_clocks_meet_the_scaler_too_and_mark_what_came_before(clock):
    model = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = global_hooks()
    with rl.watch(model, "", every=1, what="grad", sink=[], clock=clock) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(1, 1)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if clock == "manual":
                watch.step()
        found = samples(watch)
        assert global_hooks() == before
    assert [(value(one).item(), one.scaled) for one in found.values()] == [(1024.0, True), (1.0, False), (1.0, False)]


def test_a_first_step_that_the_scaler_skips_is_marked():
    model = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with rl.watch(model, "", every=1, what="grad", sink=[]) as watch:
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            if not number:
                model.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        found = samples(watch)
    assert [(value(one).item(), one.scaled) for one in found.values()] == [(1024.0, True), (1.0, False)]


def test_an_error_in_the_hooks_of_an_optimizer_stays_out_of_the_training():
    model = mlp()
    with rl.watch(model, "0", every=1, sink=[]) as watch:
        watch._session.clock.after = None  # not to be called
        train(model, batches(2, 6, classes=3))
        assert "clock" in watch.stats().faults


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_forward_that_is_interrupted_takes_no_names_either(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.fails = nn.Linear(3, 3), False

        def forward(self, x):
            h = torch.tanh(self.a(x))
            if self.fails:
                raise kind
            return h

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rl.watch(model, ["a", "tanh"], every=1, what="activation", sink=[]) as watch:
        for number in range(3):
            model.fails = number == 1
            with pytest.raises(kind) if model.fails else nullcontext():
                model(torch.full((1, 3), float(number)))
            model.fails = False
            with torch.no_grad():
                model(torch.full((5, 3), -1.0))
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        reader, found = watch._session.ring.reader(), []
        while (sample := reader.take()) is not None:
            found.append((sample.step, sample.name, sample.shape[0]))
    assert [one for one in found if one[0] == 1] == [(1, "a", 1), (1, "a", 2), (1, "tanh_1", 2)]
    assert not [one for one in found if one[2] == 5]


def test_an_evaluation_before_the_first_step_takes_no_names():
    model = mlp()
    with rl.watch(model, "2", every=1, what="activation", sink=[]) as watch:
        model.eval()(torch.zeros(7, 6))  # a sanity check, with gradients
        train(model.train(), batches(1, 6, classes=3))
        reader, found = watch._session.ring.reader(), []
        while (sample := reader.take()) is not None:
            found.append((sample.name, sample.shape[0]))
    assert found == [("2", 7), ("2", 4)]


def test_steps_of_several_optimizers_are_told_apart_where_only_parts_of_the_model_are_called():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    with rl.watch(model, "0", every=1, what=("activation", "weight"), sink=[]) as watch:
        for number in range(8):
            with torch.no_grad():
                model[0].bias.fill_(number)
            model[1](model[0](torch.ones(1, 2))).sum().backward()
            for optimizer in pair[: 1 + (number % 3 == 0)]:
                optimizer.step()
        found = samples(watch)
    assert {step: value(one)[0].item() for (step, name, _), one in found.items() if name == "0.bias"} == {
        step: float(step) for step in range(8)
    }
    for (step, name, what), one in found.items():
        if what == "activation":
            weight, bias = (value(found[step, f"0.{key}", "weight"]) for key in ("weight", "bias"))
            assert name == "0" and torch.equal(value(one), F.linear(torch.ones(1, 2), weight, bias))


def test_modules_and_parameters_that_change_places_are_watched_by_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with rl.watch(model, ["0", "1.weight"], every=1, what=("activation", "weight"), sink=[]) as watch:
        for number in range(4):
            if number == 2:
                model[0], model[1] = model[1], model[0]
            x = torch.full((1, 2), float(number + 1))
            model(x).sum().backward()
            optimizer.step()
            found = samples(watch)
            assert torch.equal(value(found[number, "0.weight", "weight"]), model[0].weight)
            assert torch.equal(value(found[number, "1.weight", "weight"]), model[1].weight)
            if (number, "0", "activation") in found:
                assert torch.equal(value(found[number, "0", "activation"]), F.linear(x, model[0].weight, model[0].bias))
    assert [step for step, name, _ in found if name == "0"] == [0, 1, 3]  # at 2 the hooks were on the other one


# -- which, and when ---------------------------------------------------------------------------------------------------


def test_steps_are_sampled_by_a_number_a_mapping_or_a_function():
    def sampled(every, steps=7):
        model = mlp()
        with rl.watch(model, ["0", "2"], every=every, what="activation", sink=[]) as watch:
            train(model, batches(steps, 6, classes=3))
            found = samples(watch)
        return [[step for step, name, _ in found if name == which] for which in ("0", "2")]

    assert sampled(3) == [[0, 3, 6], [0, 3, 6]]
    assert sampled({"0": 2, "*": 4}) == [[0, 2, 4, 6], [0, 4]]
    assert sampled(lambda step: step in (1, 5)) == [[1, 5], [1, 5]]


def test_forwards_are_steps_where_they_are_the_clock():
    model = mlp()
    with rl.watch(model, ["", "0"], every=2, what=("input", "activation", "grad"), clock="forward", sink=[]) as watch:
        with torch.no_grad():
            for _ in range(4):
                model(torch.zeros(1, 6))
        model(torch.zeros(1, 6)).sum().backward()
        found = samples(watch)
        assert watch.step_number == 4
    assert sorted({step for step, *_ in found}) == [0, 2, 4]
    assert (2, "Sequential", "input") in found and (4, "0", "grad") in found


def test_the_users_own_clock():
    model = mlp()
    with rl.watch(model, "0", every=2, clock="manual", sink=[]) as watch:
        for _ in range(4):
            model(torch.zeros(1, 6)).sum().backward()
            watch.step()
        assert [step for step, _, what in samples(watch) if what == "grad"] == [0, 2]
    with rl.watch(model, "0", sink=[]) as watch, pytest.raises(ValueError, match='clock="manual"'):
        watch.step()


def test_an_optimizer_of_another_model_is_not_its_clock():
    model, other = mlp(), mlp()
    with rl.watch(model, every=1, sink=[]) as watch:
        train(other, batches(3, 6, classes=3))
        assert watch.step_number == 0 and not samples(watch)
        train(model, batches(2, 6, classes=3))
        assert watch.step_number == 2


def test_two_optimizers_of_one_model_make_one_step():
    model = mlp()
    pair = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    with rl.watch(model, every=1, what="weight_grad", sink=[]) as watch:
        for x, y in batches(3, 6, classes=3):
            F.cross_entropy(model(x), y).backward()
            for optimizer in pair:
                optimizer.step()
        found = samples(watch)
    assert watch.step_number == 3
    assert {(step, name) for step, name, _ in found} >= {(1, "0.weight"), (1, "2.weight")}


def test_a_closure_is_run_within_the_step_whose_gradients_it_gives():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x, y = next(batches(1, 6, classes=3))
    last = []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        last[:] = [model[0].weight.grad.clone()]
        return loss

    with rl.watch(model, ["0"], every=1, what=("grad", "weight_grad", "update"), sink=[]) as watch:
        optimizer.step(closure)
        found = samples(watch)
    assert torch.equal(value(found[0, "0.weight", "weight_grad"]), last[0])
    assert (0, "0", "grad") in found and (0, "0.weight", "update") in found


def test_pausing_and_resuming():
    model = mlp()
    with rl.watch(model, "0", every=1, what="activation", sink=[]) as watch:
        train(model, batches(1, 6, classes=3))
        with watch.paused():
            train(model, batches(2, 6, classes=3))
            assert hooks_on(model) == 0
        train(model, batches(2, 6, classes=3))
        assert [step for step, *_ in samples(watch)] == [0, 3, 4]
        assert watch.step_number == 5


def test_a_discriminator_is_sampled_on_its_own_batches_where_the_generators_pass_is_paused():
    judge, maker = nn.Linear(4, 1), nn.Linear(2, 4)
    pair = torch.optim.SGD(judge.parameters(), lr=0.1), torch.optim.SGD(maker.parameters(), lr=0.1)
    with rl.watch(judge, every=1, what="input", sink=[]) as watch:
        for number in range(3):
            real = torch.full((1, 4), float(number))
            pair[0].zero_grad()
            judge(real).sum().backward()
            pair[0].step()
            with watch.paused():
                pair[1].zero_grad()
                judge(maker(torch.ones(1, 2))).sum().backward()
                pair[1].step()
        assert [value(one)[0, 0].item() for one in samples(watch).values()] == [0.0, 1.0, 2.0]


def test_a_tensor_that_is_trained_alone_is_its_clock():
    model, prompt = mlp().requires_grad_(False), torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.SGD([prompt], lr=0.1)
    with rl.watch(model, {"prompt": prompt}, every=1, sink=[]) as watch:
        for x, y in batches(2, 6, classes=3):
            optimizer.zero_grad()
            F.cross_entropy(model(x + prompt), y).backward()
            optimizer.step()
        assert sorted(samples(watch)) == [(s, "prompt", what) for s in (0, 1) for what in ("activation", "grad")]


def test_numbers_of_the_users_are_sent_beside_the_samples():
    model = mlp()
    with rl.watch(model, "0", every=10, sink=[]) as watch:
        for x, y in batches(3, 6, classes=3):
            loss = F.cross_entropy(model(x), y)
            watch.log(loss=loss, lr=0.1)
            train(model, [(x, y)])
        found = samples(watch)
        assert [found[step, "lr", "scalar"].values.item() for step in range(3)] == pytest.approx([0.1] * 3)
        assert watch.latest("loss", "scalar").values.item() == loss.item()
        watch.log(big=2**70)
        assert watch.latest("big", "scalar").values.item() == 2.0**70
        with pytest.raises(ValueError, match="takes a number"):
            watch.log(loss="high")
        with pytest.raises(ValueError, match="takes one number"):
            watch.log(loss=torch.ones(3))


def test_notes_are_on_the_samples_that_follow():
    model = mlp()
    with rl.watch(model, "0", every=1, what="activation", sink=[]) as watch:
        train(model, batches(1, 6, classes=3))
        watch.note("epoch 1")
        train(model, batches(1, 6, classes=3))
        assert [sample.note for sample in samples(watch).values()] == ["", "epoch 1"]


def test_names_come_and_go_while_the_model_trains():
    model = mlp()
    with rl.watch(model, "0", every=1, what="activation", sink=[]) as watch:
        train(model, batches(1, 6, classes=3))
        watch.add("2")
        train(model, batches(2, 6, classes=3))
        watch.remove("0")
        train(model, batches(2, 6, classes=3))
        assert watch.names == ("2",)
        found = samples(watch)
    assert {name for step, name, _ in found if step == 2} == {"0", "2"}
    assert {name for step, name, _ in found if step == 4} == {"2"}


def test_the_latest_sample_of_a_name():
    model = mlp()
    with rl.watch(model, every=2, sink=[]) as watch:
        train(model, batches(4, 6, classes=3))
        assert watch.latest("0").step == 2 and watch.latest("0", "grad").shape == (4, 8)
        assert watch.latest().name == "Sequential"
        for name, what, why in (
            ("0", "update", r"what=\('activation', 'grad'\)"),
            ("Sequentail", "grad", "it is not watched. The nearest are 'Sequential'"),
            ("0:2", "grad", "not sampled yet, or overwritten"),
        ):
            with pytest.raises(rl.NoSuchLayer, match=why):
                watch.latest(name, what)
    assert watch.latest("0").step == 2  # after the end too
    for use in (watch.pause, lambda: watch.note("x"), lambda: watch.add("0"), lambda: watch.keep(), watch.__enter__):
        with pytest.raises(ValueError, match="this watch is closed"):
            use()


def test_two_watches_on_one_model():
    model = mlp()
    with rl.watch(model, "0", every=1, sink=[]) as one, rl.watch(model, "2", every=2, sink=[]) as two:
        train(model, batches(4, 6, classes=3))
        assert names(samples(one)) == ["0"] and {step for step, *_ in samples(two)} == {0, 2}


# -- nothing is left ---------------------------------------------------------------------------------------------------


def global_hooks():
    from torch.optim import optimizer

    return len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)


def test_closing_leaves_nothing():
    model, before = mlp(), global_hooks()
    watch = rl.watch(model, every=1, what="all", sink=[], when=rl.NotFinite(), alarms=2)
    train(model, batches(2, 6, classes=3))
    assert hooks_on(model) and global_hooks() > before
    watch.close()
    watch.close()
    assert hooks_on(model) == 0 and global_hooks() == before
    assert "closed" in repr(watch)


def test_no_hook_is_on_the_model_between_sampled_steps():
    model = mlp()
    with rl.watch(model, every=3, sink=[]):
        train(model, batches(1, 6, classes=3))
        assert hooks_on(model) == 0
        train(model, batches(2, 6, classes=3))
        assert hooks_on(model) == 4 + 2  # of modules; of the model's calls


def test_a_gradient_hook_of_a_graph_that_outlives_the_watch_does_nothing():
    model = mlp()
    with rl.watch(model, every=1, sink=[]) as watch:
        loss = model(torch.ones(1, 6)).sum()
        sent = watch.stats().sent
    loss.backward()
    assert watch.stats().sent == sent


def test_copies_and_pickles_take_no_watch_along():
    model = mlp()
    with rl.watch(model, every=1, sink=[]) as watch:
        copied, buffer = copy.deepcopy(model), io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        again = pickle.loads(pickle.dumps(model))
        for one in (copied, loaded, again):
            assert torch.equal(one(torch.ones(1, 6)), model(torch.ones(1, 6)))
        assert b"replaylens" not in buffer.getvalue()
        assert len(names(samples(watch), "activation")) == 4 * 3  # three passes of the model itself, no copy's


def test_a_watch_does_not_keep_the_model_alive():
    model = mlp()
    gone = weakref.ref(model)
    watch = rl.watch(model, every=1, sink=[])
    train(model, batches(1, 6, classes=3))
    del model
    gc.collect()
    assert gone() is None and "closed" in repr(watch)


def test_an_error_of_the_model_is_its_own():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            self.inner(x)
            raise KeyError("mine")

    model = Failing()
    with rl.watch(model, every=1, sink=[]) as watch, pytest.raises(KeyError, match="mine") as caught:
        model(torch.ones(1, 6))
    assert not getattr(caught.value, "__notes__", ())
    assert hooks_on(model) == 0 and names(samples_of_closed(watch)) == []


def samples_of_closed(watch):
    return {}


def test_an_error_in_a_hook_ends_in_the_statistics(capsys):
    model = mlp()

    def never(step):
        raise ZeroDivisionError("in every=")

    with rl.watch(model, every=never, sink=[]) as watch:
        train(model, batches(3, 6, classes=3))
        assert "ZeroDivisionError: in every=" in watch.stats().faults["every"]
        assert "in every=" in str(watch.stats())
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_a_captured_model_may_be_watched_and_a_watched_one_captured():
    model = mlp()
    x = torch.ones(2, 6)
    plain = rl.capture(model, x)
    with rl.watch(model, every=1, sink=[]):
        prog = rl.capture(model, x)
    assert prog.code == plain.code and prog.check()


def test_a_name_that_is_no_operation_is_said_at_once_with_what_is_near(capsys):
    model = nn.Sequential()
    model.add_module("layer4", nn.Linear(6, 3))
    with rl.watch(model, ["layer5", "linear"], every=1, sink=[]) as watch:
        train(model, batches(2, 6, classes=3))
        assert names(samples(watch)) == ["linear_1"]
        assert "no operation is called 'layer5'" in str(watch.stats())
    said = capsys.readouterr().err
    assert said.count("'layer5'") == 1 and "Modules: 'layer4'." in said and "replaylens.probes(" in said


# -- said clearly ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "error", "text"),
    [
        ({"every": 0}, ValueError, "every=0: an interval is a whole number of steps, 1 or more"),
        ({"every": 2.5}, ValueError, "every=2.5"),
        ({"every": {"0": 3}}, ValueError, "every= says nothing of 'Sequential', '1'"),
        ({"what": "activatoin"}, ValueError, "Did you mean 'activation'"),
        ({"what": ()}, ValueError, "what= is empty"),
        ({"layers": "0.waight"}, rl.NoSuchLayer, "'0.weight'"),
        ({"layers": "blocks.*"}, rl.NoSuchLayer, "no module and no parameter of this Sequential"),
        ({"layers": lambda module: False}, rl.NoSuchLayer, "is true of none of the 4 modules"),
        ({"what": 5}, ValueError, "what=5 is nothing that can be watched"),
        ({"layers": torch.ones(2)}, rl.NoSuchLayer, "is no parameter of this Sequential. Give it a name"),
        ({"layers": 3}, TypeError, "layers= takes addresses"),
        ({"layers": {"a": 3}}, TypeError, "takes a tensor or a module, not int"),
        ({"layers": [nn.ReLU()]}, rl.NoSuchLayer, "is no module of this Sequential"),
        ({"clock": "steps"}, ValueError, "clock='steps': it is one of 'optimizer', 'forward', 'manual'"),
        ({"micro": "last"}, ValueError, "micro='last'"),
        ({"alarms": 0}, ValueError, "alarms=0"),
        ({"raw": 10}, ValueError, "raw=10"),
        ({"sink": "run.xlsx"}, ValueError, "run.xlsx"),
    ],
)
def test_bad_wishes_are_refused_before_anything_begins(wishes, error, text):
    model, before = mlp(), global_hooks()
    with pytest.raises(error) as caught:
        rl.watch(model, **{"sink": [], **wishes})
    assert text in str(caught.value)
    assert hooks_on(model) == 0 and global_hooks() == before


def test_something_else_than_a_module_is_refused():
    with pytest.raises(TypeError, match=r"takes an nn\.Module, not function"):
        rl.watch(lambda x: x)
