"""Sweeps on executors: the bits of one process, whatever is swept and whatever becomes of the workers; and what is said
where that cannot be.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos_executor import CALM, ChaosExecutor, World
from internals import freeze_deep, same
from many_oracle import stacking_costs, variants as many_variants
from test_many import Attention, last_logits
from test_sweep import Branching
from torch import nn
from torch.nn import functional as F
from zoo import MODELS, is_refused_so, silence

import replaylens as rl
from replaylens._scale.job_file import job_folder
from replaylens.errors import LostWorkers, PlanDiffers

TESTS = Path(__file__).parent
SITES = ["blocks.0.out", "blocks.1.out", "blocks.2.out"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As many as workers have: last bits may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as made:
        yield made


def calm():
    return World(0, kinds=CALM).make()


def bits(result):
    """A result as text: structure, and tensors by dtype and bits."""
    tensors = []
    tree = freeze_deep(result, tensors.append)
    return f"{tree}", tensors


def assert_same_bits(one, other, where=""):
    (tree, mine), (tree_2, theirs) = bits(one), bits(other)
    assert tree == tree_2, where
    assert all(map(same, mine, theirs)), where


def assert_is_the_same(found, wanted, where=""):
    assert_same_bits(found.values, wanted.values, where)
    assert_same_bits(found.baseline, wanted.baseline, where)
    assert found.keys == wanted.keys and found.one_by_one == wanted.one_by_one, where
    assert {key: str(one) for key, one in found.departures.items()} == {
        key: str(one) for key, one in wanted.departures.items()
    }, where


# -- what is swept -----------------------------------------------------------------------------------------------------


def transformer(ids=0, is_open=False):
    torch.manual_seed(0)
    model = Attention(is_open)
    torch.manual_seed(ids)
    return rl.capture(model, torch.randint(0, 11, (1, 6)))


def lesions(prog, **more):
    return {(site, t): {site: rl.Zero("b [t] d", t=t)} for site in SITES for t in range(6)} | more


def positions(metric, **more):
    prog = transformer()
    return prog, lesions(prog), metric, more


Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor

    def gain(self):
        return self.logits.sum() - self.hidden.sum()


class Gives(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.l, self.o, self.kind = nn.Linear(4, 4), nn.Linear(4, 3), kind

    def forward(self, x):
        h = self.l(x)
        return self.kind(self.o(h.relu()), h)


def gives(kind, metric):
    torch.manual_seed(0)
    prog = rl.capture(Gives(kind), torch.randn(3, 4))
    return prog, {n: {"l": rl.Scale(n / 3)} for n in range(7)}, metric, {}


def every_kind_of_patch():
    prog, clean = transformer(), transformer(1)
    run = clean.replay(patch={"blocks.0.mlp": rl.Zero()}, keep="all")
    direction = torch.randn(16)
    variants = {
        "none": {},
        "another program": {"blocks.0.out": rl.From(clean)},
        "part of another": {"blocks.1.out": rl.From(clean, "b [t] d", t=(1, 4))},
        "a run": {"blocks.1.out": rl.From(run)},
        "a layer": {"blocks.1.out": clean["blocks.1.out"]},
        "a lambda": {"blocks.1.mlp": lambda value: value * 2 - direction},
        "a function of torch": {"gelu": torch.tanh},
        "several": {"blocks.0.out": [rl.Scale(2.0), rl.Clamp(max=0.1)], "blocks.2.mlp": rl.Noise(0.3)},
        "turned": {"blocks.2.mlp": rl.Rotate(torch.eye(16)[:3], rl.From(clean))},
        "a glob": {"blocks.*.mlp": rl.Zero()},
        "a predicate": {rl.where(lambda layer: layer.layer_type == "gelu"): rl.Scale(0.5)},
        "found": {prog.find("layernorm"): rl.Scale(0.5)},
        "weights": {"blocks.1.mlp.weight": torch.zeros(16, 16)},
        "input": {"input_1": torch.randint(0, 11, (1, 6), generator=torch.Generator().manual_seed(3))},
        "the output": {"output_1": torch.ones(1, 6, 11)},
        "an edge": {rl.Edge("blocks.2.norm", "blocks.2.qkv"): rl.From(clean)},
        "mean": {"blocks.0.qkv": rl.Mean(over=(1,))},
    }
    return prog, variants, last_logits, {}


def leaving(on_divergence, metric=torch.sum):
    torch.manual_seed(0)
    prog = rl.capture(Branching(), torch.randn(2, 3))
    return prog, {n: {"fc": rl.Set(torch.full((2, 3), n))} for n in (-2.0, -1.0, 1.0, 2.0)}, metric, on_divergence


def unbatchable():
    prog, clean = transformer(), transformer(1)
    kept = {}
    hand = {"blocks.0.out": lambda value: kept.setdefault("it", value), "blocks.1.out": lambda value: kept.pop("it")}
    ends = {("end", n): {"output_1": torch.full((1, 6, 11), float(n))} for n in range(3)}
    return prog, lesions(prog, **{"hand on": hand, "clean": {"blocks.0.out": rl.From(clean)}}) | ends, None, {}


def dropouts():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    prog = rl.capture(model, torch.randn(2, 3, 4))
    sites = [layer.label for layer in prog.layers if layer.layer_type in ("linear", "dropout")]
    return prog, {site: {site: rl.Noise(0.5)} for site in sites}, torch.sum, {}


def half(edit):
    def make():
        prog = edit(transformer(is_open=True))
        sites = [layer.label for layer in prog.layers if layer.layer_type == "linear"][:6]
        return prog, {site: {site: rl.Scale(0.5)} for site in sites}, torch.sum, {}

    return make


def loaded(prog):
    held = io.BytesIO()
    pickle.dump(prog, held)
    return pickle.loads(held.getvalue())


def squared(value):
    return value * value


def as_numpy(logits):
    return np.float32(logits.detach().numpy()[:, -1].max())


def structure(logits):
    return {"most": logits.max(), "row": (logits[0, -1], logits.argmax(-1)), "n": 3}


CASES = {
    "a metric of tensors": lambda: positions(last_logits),
    "a metric in Python": lambda: positions(lambda logits: logits.sum().item()),
    "a metric in numpy": lambda: positions(as_numpy),
    "a metric of several": lambda: positions(structure),
    "whole outputs": lambda: positions(None),
    "many passes": lambda: positions(last_logits, memory=20_000),
    "many passes of a metric in Python": lambda: positions(as_numpy, memory=20_000),
    "every kind of patch": every_kind_of_patch,
    "a data class": lambda: gives(Output, Output.gain),
    "a data class in Python": lambda: gives(Output, lambda out: out.gain().item()),
    "a data class kept": lambda: gives(Output, None),
    "a named tuple": lambda: gives(Pair, lambda out: out.logits.sum() - out.hidden[0, 0]),
    "a named tuple kept": lambda: gives(Pair, None),
    "a dictionary": lambda: gives(lambda a, b: {"b": b, "a": [a]}, None),
    "those that leave": lambda: (*leaving("rerun")[:3], {"on_divergence": "rerun"}),
    "those that leave, in Python": lambda: (*leaving("rerun", lambda y: y.sum().item())[:3], {}),
    "those that leave and are not followed": lambda: (*leaving("ignore")[:3], {"on_divergence": "ignore"}),
    "those that go alone": unbatchable,
    "dropout": dropouts,
    "an edited program": half(lambda prog: prog.swap("gelu", F.relu).lesion("blocks.1.mlp")),
    "a program with a function": half(lambda prog: prog.with_patch({"gelu_1": squared})),
    "an expanded program": half(lambda prog: prog.expand("layernorm")),
    "a slice": half(lambda prog: prog.slice(to="blocks.2.mlp")),
    "a loaded program": half(loaded),
    "a program without values": half(lambda prog: prog.saving("none")),
    "a program with some values": half(lambda prog: prog.saving(["linear"])),
}


@pytest.mark.parametrize("share", [0.0, float("inf")], ids=["stacked", "replayed"])
@pytest.mark.parametrize("name", CASES)
def test_whatever_is_swept_an_executor_gives_the_bits_of_one_process(name, share):
    prog, variants, metric, more = CASES[name]()
    with stacking_costs(share):
        wanted = prog.replay_many(variants, metric, **more)
        found = prog.replay_many(variants, metric, **more, executor=calm())
    assert wanted.execution is None and found.execution.engine == "ChaosExecutor" and found.execution.tasks
    assert_is_the_same(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_so_do_other_processes(name, pool):
    prog, variants, metric, more = CASES[name]()
    wanted = prog.replay_many(variants, metric, **more)
    found = prog.replay_many(variants, metric, **more, executor=pool)
    assert found.execution.engine == "ProcessPoolExecutor" and found.execution.threads == 1
    assert_is_the_same(found, wanted)


def test_so_do_executors_that_lose_double_delay_and_exchange_tasks():
    prog, variants, metric, _ = CASES["many passes"]()
    variants |= {("end", 0): {"output_1": torch.zeros(1, 6, 11)}}
    wanted, resubmitted, lost = prog.replay_many(variants, metric, memory=5_000), 0, 0
    for seed in range(20):
        try:
            found = prog.replay_many(variants, metric, memory=5_000, executor=World(seed).make)
        except LostWorkers:
            lost += 1
            continue
        assert_is_the_same(found, wanted, seed)
        resubmitted += found.execution.resubmitted
    assert resubmitted > 20 and lost < 5


def swept(name, executor):
    with silence():
        try:
            case = MODELS[name]()
            torch.manual_seed(1)
            prog = rl.capture(case.model, *case.args, **case.kwargs)
        except Exception as error:
            if not is_refused_so(name, error):
                raise
            return None
        asked = {key: patch for key, patch in many_variants(prog, 16).items() if is_possible(prog, patch)}
        if not asked:
            return None
        wanted = prog.replay_many(asked, on_divergence="raise")
        try:
            found = prog.replay_many(asked, on_divergence="raise", executor=executor)
        except rl.CannotSave:
            return "cannot be sent"
    assert_same_bits(found.values, wanted.values, name)
    return "well"


def is_possible(prog, patch):
    try:
        return prog.replay(patch=patch, on_divergence="raise") is not None
    except (rl.ReplaylensError, RuntimeError, IndexError, ValueError):
        return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MODELS)[::9])
def test_the_smallest_models_of_each_difficulty_do(name):
    swept(name, calm())


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
def test_all_of_them_do_in_other_processes(pool):
    found = {name: swept(name, pool) for name in MODELS}
    unsent = {name for name, how in found.items() if how == "cannot be sent"}
    assert unsent <= {
        *("python_callbacks_that_write", "function_under_vmap", "hook_on_a_tensor", "flexible_attention"),
        *("tensor_subclass", "tensor_subclass_with_a_protocol", "tensor_subclass_inside", "quantized_dynamic"),
    }
    assert list(found.values()).count("well") > 250


@pytest.mark.parametrize("metric", [last_logits, lambda logits: logits[0, -1, 3].item()], ids=["tensors", "Python"])
def test_sites_and_parts_go_as_variants_do(pool, metric):
    prog, clean = transformer(), transformer(1)
    wanted = rl.sweep(prog, SITES, "b [t] d", rl.From(clean), metric)
    for found in (
        rl.sweep(prog, SITES, "b [t] d", rl.From(clean), metric, executor=pool),
        rl.sweep(prog, SITES, "b [t] d", rl.From(clean), metric, dry=True).run(executor=pool),
    ):
        assert_same_bits(found.values, wanted.values)
        assert_same_bits(found.grid, wanted.grid)
        assert found.names == wanted.names and found.execution.tasks >= 1


class Key:
    """A key that nothing can pickle, and whose words are its own."""

    def __init__(self, name):
        self.name, self.lock = name, threading.Lock()

    def __repr__(self):
        return f"<key {self.name}>"


def test_keys_may_be_anything_since_they_stay_here(pool):
    prog = transformer()
    keys = [Key("a"), Key("b"), len, rl.Zero()]
    found = prog.replay_many({key: {"blocks.0.out": rl.Scale(n)} for n, key in enumerate(keys)}, executor=pool)
    assert found.keys == tuple(keys) and found[keys[1]].shape == (1, 6, 11)

    def metric(logits):
        if logits.isnan().any():
            raise ArithmeticError("no number")
        return logits.sum().item()

    nan = {key: {"blocks.0.out": rl.Scale(float("nan") if key is keys[1] else 1.0)} for key in keys}
    with pytest.raises(ArithmeticError) as error:
        prog.replay_many(nan, metric, executor=pool)
    assert "replaylens: raised by the metric, of the variant <key b>" in error.value.__notes__


# -- modes and settings ------------------------------------------------------------------------------------------------


def mode_reader(logits):
    """What a metric may ask of the modes around it, none of which is part of a program."""
    made = torch.ones(2) @ torch.ones(2, 2)
    return {
        "sum": logits.sum().item() + float(made.sum()),
        "dtype": torch.zeros(1) + 1,
        "product": (logits[0] @ logits[0].mT)[0, 0],
    }


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("metric", [torch.sum, mode_reader])
def test_modes_around_a_sweep_hold_for_its_metric_in_other_processes(name, metric, pool):
    with MODES[name]():
        prog = transformer()
        wanted = prog.replay_many(lesions(prog), metric)
        found = prog.replay_many(lesions(prog), metric, executor=pool)
    assert_is_the_same(found, wanted)


def test_so_does_the_wish_for_deterministic_kernels(pool):
    prog = transformer()

    def asked(logits):
        return [
            float(torch.are_deterministic_algorithms_enabled()),
            float(torch.is_deterministic_algorithms_warn_only_enabled()),
            logits.sum().item(),
        ]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        wanted = prog.replay_many(lesions(prog), asked)
        found = prog.replay_many(lesions(prog), asked, executor=pool)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_is_the_same(found, wanted)
    assert [stack[0].item() for stack in found.values[:2]] == [1.0, 1.0]
    after = prog.replay_many(lesions(prog), asked, executor=pool)
    assert [stack[0].item() for stack in after.values[:2]] == [0.0, 0.0]


def test_so_does_the_default_device(pool):
    prog = transformer()

    def asked(logits):
        if torch.empty(()).device.type != "meta":
            raise AssertionError("another device")
        return logits.sum(), logits.sum().item()

    with torch.device("meta"):
        found = prog.replay_many(lesions(prog), asked, executor=pool)
    assert found.values[0].device.type == "cpu" and found.execution.tasks
    with pytest.raises(AssertionError, match="another device"):
        prog.replay_many(lesions(prog), asked)


@pytest.mark.parametrize("metric", [lambda logits: logits.sum() * torch.tensor(0.1), mode_reader])
def test_so_does_the_default_dtype(metric, pool):
    prog = transformer()
    torch.set_default_dtype(torch.float64)
    try:
        wanted = prog.replay_many(lesions(prog), metric)
        found = prog.replay_many(lesions(prog), metric, executor=pool)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_is_the_same(found, wanted)
    assert_is_the_same(prog.replay_many(lesions(prog), metric, executor=pool), prog.replay_many(lesions(prog), metric))


def test_threads_that_take_turns_leave_the_generators_and_modes_of_this_one_alone():
    prog, variants, metric, _ = CASES["a metric in Python"]()
    wanted, states = prog.replay_many(variants, metric, memory=5_000), (torch.get_rng_state(), random.getstate())
    with ThreadPoolExecutor(3) as threads:
        found = prog.replay_many(variants, metric, memory=5_000, executor=threads)
    assert_is_the_same(found, wanted)
    assert same(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# -- random numbers ----------------------------------------------------------------------------------------------------


def drawn(logits):
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("what", ["a metric", "a patch"])
def test_what_draws_draws_other_numbers_in_each_task_and_the_same_with_any_workers(what, pool):
    prog = transformer()
    variants, metric = lesions(prog), drawn
    if what == "a patch":
        noisy = lambda value: value + torch.randn(value.shape)  # noqa: E731
        variants, metric = {n: {"blocks.0.out": noisy} for n in range(18)}, torch.sum
    found = []
    for executor in (pool, calm(), ThreadPoolExecutor(2)):
        seed_all(7)
        found += [prog.replay_many(variants, metric, memory=5_000, executor=executor) for _ in range(2)]
    first, second, *others = [one.values for one in found]
    assert_same_bits(others, [first, second] * 2)
    for stream in [first] if what == "a patch" else first:
        assert len({*stream.tolist()}) == 18
    assert not any(same(a, b) for a, b in zip(bits(first)[1], bits(second)[1]))
    seed_all(8)
    other = prog.replay_many(variants, metric, memory=5_000, executor=calm()).values
    assert not any(same(a, b) for a, b in zip(bits(first)[1], bits(other)[1]))


def test_generators_stay_where_they_are_if_nothing_draws(pool):
    prog, variants, metric, _ = dropouts()
    seed_all(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    prog.replay_many(variants, metric, executor=pool)
    prog.replay_many(variants, lambda y: y.sum().item(), executor=calm())
    assert same(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


# -- errors ------------------------------------------------------------------------------------------------------------


def fails_at_zero(logits):
    if logits[0, 0].sum() == 0:
        raise ZeroDivisionError("nothing there")
    return logits.sum().item()


def failing_patch(value):
    raise KeyError("the patch's own")


WAYS = {
    "a metric": (lambda: lesions(None, bad={"output_1": torch.zeros(1, 6, 11)}), fails_at_zero, ZeroDivisionError),
    "a metric in a pass": (
        lambda: lesions(None, bad={"unembed.weight": torch.zeros(11, 16), "unembed.bias": torch.zeros(11)}),
        fails_at_zero,
        ZeroDivisionError,
    ),
    "a patch": (lambda: lesions(None, bad={"blocks.0.out": failing_patch}), torch.sum, KeyError),
}


@pytest.mark.parametrize("share", [0.0, float("inf")], ids=["stacked", "replayed"])
@pytest.mark.parametrize("name", WAYS)
def test_an_error_names_its_variant_and_is_not_tried_again(name, share):
    make, metric, kind = WAYS[name]
    prog, notes = transformer(), []
    for executor in (None, (world := World(0, kinds=CALM)).make()):
        with pytest.raises(kind) as error, stacking_costs(share):
            prog.replay_many(make(), metric, executor=executor)
        notes.append([note for note in error.value.__notes__ if "variant" in note and "In a worker" not in note])
    [note] = notes[0]
    assert note.endswith("the variant 'bad'") and notes[0] == notes[1]
    assert max(world.runs.values()) <= (2 if name == "a patch" else 1)  # once in a pass, and once alone


def test_an_error_in_another_process_has_its_lines(pool):
    prog = transformer()
    make, metric, kind = WAYS["a metric in a pass"]
    with pytest.raises(kind, match="nothing there") as error:
        prog.replay_many(make(), metric, executor=pool)
    assert any("fails_at_zero" in note and note.startswith("In a worker:") for note in error.value.__notes__)
    assert_is_the_same(prog.replay_many(lesions(prog), metric, executor=pool), prog.replay_many(lesions(prog), metric))


def test_a_variant_that_may_not_leave_the_path_is_named(pool):
    prog, variants, metric, _ = leaving("raise")
    said = []
    for executor in (None, pool):
        with pytest.raises(rl.DivergedReplay, match="in the variant ") as error:
            prog.replay_many(variants, metric, on_divergence="raise", executor=executor)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_without_cloudpickle_a_lambda_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    world, prog = World(0, kinds=CALM), transformer()
    with pytest.raises(rl.CannotSave) as error:
        prog.replay_many(lesions(prog), lambda logits: logits.sum(), executor=world.make())
    assert "<lambda>" in str(error.value) and str(error.value).endswith("pip install 'replaylens[scale]'")
    assert not world.futures
    prog.replay_many(lesions(prog), last_logits, executor=world.make())


def test_a_program_that_cannot_be_a_file_is_refused_in_the_words_of_save():
    prog = transformer().with_patch({"gelu_1": lambda value: value})
    with pytest.raises(rl.CannotSave, match=r"cannot be found again by a name[\s\S]*Without executor= nothing is sent"):
        prog.replay_many({0: {"blocks.0.out": rl.Zero()}}, executor=calm())


def test_a_stale_program_is_refused_as_without_an_executor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    prog = rl.capture(model, torch.ones(2, 3))
    clean = rl.capture(model, torch.zeros(2, 3))
    asked = rl.sweep(prog, "linear_1", "b [c]", rl.From(clean), torch.sum, dry=True)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    said = []
    for executor in (None, calm()):
        with pytest.raises(rl.StaleValue) as error:
            asked.run(executor=executor)
        said.append(str(error.value))
    assert said[0] == said[1]


# -- another metric over there -----------------------------------------------------------------------------------------

FACTOR = [1.0]


def by_number(logits):
    return (logits * FACTOR[0]).sum()


def by_number_in_python(logits):
    return float(logits.sum()) * FACTOR[0]


@pytest.mark.parametrize("metric", [by_number, by_number_in_python])
def test_a_metric_that_reads_what_was_changed_here_alone_is_noticed(metric, pool):
    prog = transformer()
    FACTOR[0] = 3.0
    try:
        with pytest.raises(PlanDiffers) as error:
            prog.replay_many(lesions(prog), metric, executor=pool)
    finally:
        FACTOR[0] = 1.0
    lines = str(error.value).splitlines()
    assert lines[0].startswith("a worker would run this sweep ") and "with another metric" in lines[0]
    assert lines[1].startswith("here:      replaylens ") and lines[2].startswith("in the worker:  replaylens ")
    prog.replay_many(lesions(prog), metric, executor=pool)


STRENGTH, DIRECTION = 1.0, torch.ones(16)


def steered(value):
    return value + strength() * DIRECTION


def strength():
    return STRENGTH


@pytest.mark.parametrize(("name", "value"), [("STRENGTH", 2.0), ("DIRECTION", torch.zeros(16))])
def test_a_number_that_a_patch_reads_of_its_module_must_be_the_same_in_workers(name, value, pool, monkeypatch):
    prog = transformer()
    variants = {n: {"blocks.0.out": [rl.Scale(n), steered]} for n in range(3)}
    wanted = prog.replay_many(variants)
    assert_is_the_same(prog.replay_many(variants, executor=pool), wanted)
    monkeypatch.setitem(globals(), name, value)
    with pytest.raises(PlanDiffers, match=rf"`test_scaled_sweeps.{name}`, which a function of this job reads, is anot"):
        prog.replay_many(variants, executor=pool)
    assert_is_the_same(prog.replay_many(variants, executor=calm()), prog.replay_many(variants))
    by_value = {n: {"blocks.0.out": lambda value: value + STRENGTH * DIRECTION} for n in range(3)}
    assert_is_the_same(prog.replay_many(by_value, executor=calm()), prog.replay_many(by_value))


def test_variants_that_are_changed_after_the_plan_are_those_of_the_plan(pool):
    prog = transformer()
    variants = lesions(prog)
    asked = rl.sweep(prog, variants=variants, metric=last_logits, dry=True)
    variants[SITES[0], 0] = {SITES[0]: rl.Scale(9.0)}
    assert_same_bits(asked.run(executor=pool).values, asked.run().values)


def test_a_metric_that_never_gives_the_same_is_not_compared(pool):
    prog = transformer()
    found = prog.replay_many(lesions(prog), lambda logits: [logits.sum().item(), time.perf_counter()], executor=pool)
    assert found.values[0].shape == (18,)


def test_what_a_metric_holds_goes_with_it(pool):
    prog, base, weight = transformer(), transformer(1).output, torch.randn(11)
    model = nn.Linear(11, 2)
    for metric in (
        lambda logits: (logits - base).abs().sum(),
        lambda logits: model(logits * weight).sum(),
        lambda logits: model(logits).sum().item(),
    ):
        wanted = prog.replay_many(lesions(prog), metric)
        assert_is_the_same(prog.replay_many(lesions(prog), metric, executor=pool), wanted)


@torch.library.custom_op("scaled_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_operators_that_were_registered_with_torch_go_to_other_processes(pool):
    prog = rl.capture(lambda x: doubled(x * 1) + 1, torch.ones(2, 3))
    variants = {n: {"mul_1": [rl.Scale(n), torch.ops.aten.neg.default]} for n in range(4)}
    for metric in (torch.sum, lambda y: doubled(y).sum(), lambda y: torch.ops.scaled_tests.doubled(y)):
        wanted = prog.replay_many(variants, metric)
        assert_is_the_same(prog.replay_many(variants, metric, executor=calm()), wanted)
        assert_is_the_same(prog.replay_many(variants, metric, executor=pool), wanted)
    assert same(pickle.loads(pickle.dumps(prog)).replay().output, prog.output)


# -- passes and tasks --------------------------------------------------------------------------------------------------


def test_passes_do_not_depend_on_the_workers_and_a_smaller_memory_makes_more():
    prog, made = transformer(), []
    for memory in (None, 20_000):
        with stacking_costs(0.0):
            pool = World(3, kinds=CALM).make()
            made.append(rl.sweep(prog, SITES, "b [t] d", rl.Zero(), last_logits, memory=memory, executor=pool))
    few, many = made
    assert few.plan().passes == few.execution.tasks == 1 and few.execution.idle == 3
    assert str(few).splitlines()[-1] == (
        "  run as 1 task on 1 worker of ChaosExecutor, 1 thread each, 3 more had nothing to do; a smaller memory= makes "
        "more passes"
    )
    assert many.plan().passes == many.execution.tasks == 4 and many.execution.idle == 0
    assert str(many).splitlines()[-1] == (
        f"  run as {many.execution.tasks} tasks on 1 worker of ChaosExecutor, 1 thread each"
    )
    alone = rl.sweep(prog, SITES, "b [t] d", rl.Zero(), last_logits)
    assert alone.execution is None and "run as" not in str(alone)


def test_where_it_ran_is_kept_in_a_file(tmp_path):
    prog = transformer()
    found = rl.sweep(prog, SITES, "b [t] d", rl.Zero(), last_logits, executor=World(3, kinds=CALM).make())
    rl.save(found, tmp_path / "sweep.rlp")
    assert rl.load(tmp_path / "sweep.rlp").execution == found.execution
    assert str(rl.load(tmp_path / "sweep.rlp")) == str(found)


def test_a_task_is_under_500_bytes_however_large_model_and_metric_are(tmp_path):
    sizes = []

    class Measuring(ChaosExecutor):
        def submit(self, function, *args):
            sizes.append(len(pickle.dumps((function, args))))
            return super().submit(function, *args)

    weight = torch.randn(300, 300)
    torch.manual_seed(0)
    prog = rl.capture(nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)), torch.randn(2, 300))
    scratch = tmp_path / "a-folder-with-a-rather-long-name" / "on-a-shared-file-system" / "of-a-project"
    pool = Measuring(World(0, kinds=CALM), 1)
    variants = {n: {"linear_1": rl.Set(torch.randn(2, 300))} for n in range(9)}
    with stacking_costs(float("inf")):
        prog.replay_many(variants, lambda y: (y @ weight).sum(), executor=pool, scratch=scratch)
    assert len(sizes) == 9 and max(sizes) < 500
    assert not list(scratch.iterdir())


def test_more_threads_in_a_worker_are_put_to_one_and_what_a_metric_sets_is_told(pool):
    prog = transformer()

    def threads(logits):
        return torch.get_num_threads() + 0 * logits.sum().item()

    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (3,)) as other:
        found = prog.replay_many(lesions(prog), threads, memory=5_000, executor=other)
        assert {*found.values.tolist()} == {1.0} and found.execution.threads == 1

        def sets_threads(logits):
            torch.set_num_threads(2)
            return logits.sum().item()

        assert prog.replay_many(lesions(prog), sets_threads, executor=other).execution.threads == 2
        torch.set_num_threads(1)
        assert prog.replay_many(lesions(prog), threads, executor=other).execution.threads == 1


def test_a_progress_bar_counts_variants(capsys):
    pytest.importorskip("tqdm")
    prog, clean = transformer(), transformer(1)
    variants = lesions(prog, end={"output_1": torch.zeros(1, 6, 11)}, clean={"blocks.0.out": rl.From(clean)})
    prog.replay_many(variants, last_logits, memory=5_000, progress=True, executor=calm())
    last = capsys.readouterr().err.split("\r")[-1]
    assert "20/20" in last and "variant" in last


# -- the end -----------------------------------------------------------------------------------------------------------

DRIVER = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import torch
import replaylens as rl
from slow_metric import slow

if __name__ == "__main__":
    torch.set_num_threads(1)
    prog = rl.capture(torch.nn.Linear(3, 3), torch.ones(2, 3))
    variants = {n: {"linear_1": rl.Scale(n)} for n in range(400)}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        try:
            rl.sweep(prog, variants=variants, metric=slow, memory=1, executor=pool, scratch=sys.argv[1])
        finally:
            print("left", flush=True)
"""
SLOW = """
import os, sys, time

def slow(logits):
    if __name__ != "__main__" and sys.argv[-1:] and os.getppid() != 1:
        with open(os.environ["PIDS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
    time.sleep(0.05)
    return logits.sum().item()
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


ONE = "the driver", "a kill"  # that get one process alone


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
@pytest.mark.parametrize("how", ["the terminal", *[pytest.param(how, marks=pytest.mark.zoo) for how in ONE]])
def test_an_interrupt_leaves_no_process_and_no_file(how, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "slow_metric.py").write_text(SLOW)
    pids, scratch = tmp_path / "pids", tmp_path / "scratch"
    environment = {**os.environ, "PIDS": str(pids), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "driver.py"), str(scratch)]
    driver = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def workers():
        found = {int(line) for line in pids.read_text().split()} if pids.exists() else set()
        return found - {driver.pid}

    try:
        assert until(lambda: len(workers()) == 2)
        assert len(list(scratch.iterdir())) == 1
        if how == "the terminal":
            os.killpg(driver.pid, signal.SIGINT)
        else:
            os.kill(driver.pid, signal.SIGINT if how == "the driver" else signal.SIGKILL)
        out, err = driver.communicate(timeout=60)
        assert until(lambda: not any(map(is_alive, workers())), 20)
    finally:
        driver.kill()
        for pid in filter(is_alive, workers()):
            os.kill(pid, signal.SIGKILL)
    if how == "a kill":
        with job_folder(scratch):
            assert len(list(scratch.iterdir())) == 1  # what was left is removed by the next one
        return
    assert driver.returncode != 0 and "KeyboardInterrupt" in err and "left" in out
    assert not list(scratch.iterdir())
