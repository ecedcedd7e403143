"""A training that is watched is the training, bit for bit: whatever it is, and however it is watched."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_loops import KINDS as DISTRIBUTED_KINDS
from torch import nn
from watched_loops import KINDS, LOOPS, Run, run_loop, samples

import replaylens as rl

MAIN = (
    "mlp cnn gpt lstm encoder cnn_autocast gpt_autocast gpt_scaled fused_adamw mlp_accumulated clipped gpt_checkpoints "
    "gpt_reentrant threaded raising drawn_tokens compiled compiled_earlier"
).split()  # in every way; the others by all at once, and in every way with `make zoo`
LIBRARIES = (
    "lightning_trainer lightning_callback lightning_by_hand lightning_half hugging_face_trainer hugging_face_callback "
    "hugging_face_checkpointed generated_text accelerated accelerated_half compiled_by_inductor"
).split()
SLOW = {"compiled_optimizer", "exported_meanwhile", "compiled_after_the_watch_began", "forked_workers"}
CASES = [
    pytest.param(
        name, kind, marks=[] if name in MAIN or (kind == "everything" and name not in SLOW) else [pytest.mark.zoo]
    )
    for name in LOOPS
    for kind in KINDS
]
# What a tensor class of the user's is told of a followed forward is also what following takes.
TOLD = {"logging_subclass"}


@cache
def unwatched(name: str) -> Run:
    run = run_loop(name, "plain", Path())
    assert name == "raising" or not run.witness.errors
    return run


def assert_same(plain: Run, watched: Run, left_out: tuple[str, ...] = ()) -> None:
    one, other = plain.witness, watched.witness
    differing = [key for key, value in one.hashes.items() if other.hashes.get(key) != value and key not in left_out]
    assert not differing
    assert other.hashes.keys() == one.hashes.keys()
    assert other.errors == one.errors and other.forwards == one.forwards


def assert_seen(run: Run) -> None:
    """What was asked for is there, or it is said why not."""
    for watch, found in zip(run.watches, run.found):
        stats = watch.stats()
        kinds = {kind for _, _, kind in found}
        assert not stats.faults
        if run.kind == "paused":
            assert stats.sent == 0
        elif run.kind == "when":
            assert [step.number for step in watch.alarms] == [3] or stats.unseen
        elif not stats.unseen:
            assert "activation" in kinds or kinds == {"weight", "weight_grad", "update"}
        if run.kind in ("hooks", "everything") and watch.step_number > 0:
            assert {"weight", "weight_grad", "update"} <= kinds or watch._session.wishes.clock != "optimizer"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_watched_training_is_the_same_bit_for_bit(name, kind, tmp_path, capsys):
    watched = run_loop(name, kind, tmp_path)
    assert_same(unwatched(name), watched, ("calls",) if name in TOLD and kind in ("nodes", "everything") else ())
    assert_seen(watched)


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_it_is_the_same_while_another_process_reads(name, tmp_path):
    watched = run_loop(name, "everything", tmp_path, [str(tmp_path / "run.jsonl")])
    assert_same(unwatched(name), watched)
    lines = list(map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines()))
    assert len({line.get("name") for line in lines}) > 10


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")  # the libraries' own warnings are not ours to mend
@pytest.mark.filterwarnings("error:::replaylens")  # ours are
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_watched_training_of_a_library_is_the_same(name, kind, tmp_path, capsys):
    from library_loops import LIBRARY_LOOPS

    plain, watched = (run_loop(name, one, tmp_path, loops=LIBRARY_LOOPS) for one in ("plain", kind))
    assert_same(plain, watched)
    assert_seen(watched)
    if kind == "when" and "inductor" not in name:
        assert [(step.number, step.exact) for watch in watched.watches for step in watch.alarms] == [(3, True)]


# -- several processes -------------------------------------------------------------------------------------------------


@cache
def told_by_ranks(name: str, folder: Path) -> list[dict[str, Any]]:
    """What each of two processes told of its trainings."""
    script = Path(__file__).with_name("distributed_loops.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, str(script), name, str(rank), port, str(folder)] for rank in range(2)]
    started = [subprocess.Popen(one, env=environment, stderr=subprocess.PIPE, text=True) for one in commands]
    try:
        told = [process.communicate(timeout=180)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(told)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder_of_ranks(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


RANKED = ["averaged", pytest.param("buckets", marks=pytest.mark.zoo), pytest.param("sharded", marks=pytest.mark.zoo)]


@pytest.mark.parametrize("kind", [kind for kind in DISTRIBUTED_KINDS if kind != "plain"])
@pytest.mark.parametrize("name", RANKED)
def test_a_training_of_two_processes_is_the_same_in_both(name, kind, folder_of_ranks):
    for rank in told_by_ranks(name, folder_of_ranks):
        watched = rank[kind]
        assert watched["hashes"] == rank["plain"]["hashes"]
        assert not watched["faults"]
        if kind in ("hooks", "everything"):
            assert len(watched["right"]) >= 3 and all(watched["right"])  # averaged gradients, as the optimizer has them
        if kind == "nodes" and name != "sharded":
            assert "softmax_1" in watched["names"]


@pytest.mark.parametrize("name", RANKED[:2])
def test_an_alarm_in_one_process_writes_its_file_and_holds_up_nobody(name, folder_of_ranks):
    first, second = told_by_ranks(name, folder_of_ranks)
    assert first["when"]["alarms"] == [] and second["when"]["alarms"] == ["step-3-rank1.pt"]
    assert second["when"]["files"] == ["step-3-rank1.pt"]


# -- values ------------------------------------------------------------------------------------------------------------


class Kept(nn.Module):
    """A model whose values are kept by their tensors."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.call = nn.Linear(16, 16), nn.Linear(16, 4), call

    def forward(self, x):
        return self.call(self, x)


def plainly(model, x):
    return model.second(torch.tanh(model.first(x)))


def in_parts(reentrant):
    def call(model, x):
        h = torch.utils.checkpoint.checkpoint(model.first, x.requires_grad_(), use_reentrant=reentrant)
        return model.second(torch.tanh(h))

    return call


def in_half(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plainly(model, x)


def twice(model, x):
    return model.second(torch.tanh(model.first(torch.tanh(model.first(x)))))


@pytest.mark.parametrize("call", [plainly, in_parts(False), in_parts(True), in_half, twice])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_values_and_gradients_are_those_that_tensors_retain(call, scale):
    """The twin keeps them, without checkpoints and without a scale."""
    twin, kept = Kept({in_half: in_half, twice: twice}.get(call, plainly)), {}

    def keep(name):
        def hook(module, args, output):
            output.retain_grad()
            kept[name if name not in kept else f"{name}:2"] = output

        return hook

    for name, module in twin.named_children():
        module.register_forward_hook(keep(name))
    model = Kept(call)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    twin(x.clone()).float().square().sum().backward()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", scale, enabled=scale > 1)
    with rl.watch(model, ["first", "second"], every=1, what="all", sink=[], scaler=scaler) as watch:
        scaler.scale(model(x.clone()).float().square().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        found = samples(watch)
    assert {name for _, name, kind in found if kind == "activation"} == set(kept)
    for name, tensor in kept.items():
        assert torch.equal(value(found[0, name, "activation"]), tensor.detach().float())
        assert torch.equal(value(found[0, name, "grad"]), tensor.grad.float())
    for name, parameter in twin.named_parameters():
        assert torch.equal(value(found[0, name, "weight_grad"]), parameter.grad)


def value(sample):
    return torch.from_numpy(sample.values.copy())


def test_gradients_that_a_closure_computes_are_those_of_its_step():
    """As in Lightning, whose optimizers run the model within their step."""
    model = Kept(plainly)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen.append(model.first.weight.grad.clone())
        return loss

    with rl.watch(model, "first", every=1, what="all", sink=[]) as watch:
        for at in range(3):
            optimizer.step(closure) if at % 2 else optimizer.step(closure=closure)
        found = samples(watch)
    for step, gradient in enumerate(seen):
        assert torch.equal(value(found[step, "first.weight", "weight_grad"]), gradient)
        change = value(found[step, "first.weight", "update"])
        assert torch.allclose(change, -0.1 * gradient, atol=1e-6)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_step_whose_closure_runs_the_model_is_judged_before_its_weights_change(is_named, tmp_path, capsys):
    model = Kept(plainly)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    states = []

    def closure():
        optimizer.zero_grad()
        states.append(model.first.weight.detach().clone())
        loss = model(torch.randn(8, 16)).square().sum()
        loss.backward()
        return loss

    with rl.watch(model, when=lambda numbers: numbers.step == 2, folder=tmp_path) as watch:
        for _ in range(4):
            optimizer.step(closure=closure) if is_named else optimizer.step(closure)
    (step,) = watch.alarms
    assert step.number == 2 and step.exact
    assert torch.equal(step.state["first.weight"], states[2])


def test_a_step_of_several_optimizers_ends_with_the_last_of_them():
    model = Kept(plainly)
    pair = [torch.optim.SGD(model.first.parameters(), 0.1), torch.optim.Adam(model.second.parameters())]
    seen = []
    with rl.watch(model, ["first", "second"], every=2, what="weight_grad", sink=[]) as watch:
        for _ in range(5):
            model.zero_grad()
            model(torch.randn(8, 16)).square().sum().backward()
            seen.append({name: p.grad.clone() for name, p in model.named_parameters()})
            for optimizer in pair:
                optimizer.step()
        assert watch.step_number == 5
        found = samples(watch)
    assert {step for step, _, _ in found} == {0, 2, 4}
    for (step, name, _), sample in found.items():
        assert torch.equal(value(sample), seen[step][name])


def test_a_step_within_a_step_is_none():
    class Louder(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # whose class has the hooks from now on
    model = Kept(plainly)
    optimizer = Louder(model.parameters(), 0.1)
    with rl.watch(model, every=1, sink=[]) as watch:
        for _ in range(3):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
        assert watch.step_number == 3


def test_what_is_in_a_compiled_model_is_refused_with_the_reason():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(rl.UnsupportedModel, match=r"layers='0': torch\.compile has made one piece .* Weights, their"):
        rl.watch(compiled, "0", sink=[])
    model.compile(backend="eager")
    with pytest.raises(rl.UnsupportedModel, match=r"layers='1': torch\.compile has made one piece"):
        rl.watch(model, "1", sink=[])


def test_hooks_of_a_model_compiled_by_its_method_come_and_go(tmp_path):
    """Two watches, closed in the order in which they were opened; nothing is left around the compiled call."""
    model = Kept(plainly)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    one, two = (rl.watch(model, when=rl.NotFinite(), folder=tmp_path) for _ in range(2))
    assert model._compiled_call_impl is not compiled
    one.close()
    model(torch.randn(2, 16))
    two.close()
    assert model._compiled_call_impl is compiled


def test_a_trace_and_an_export_have_nothing_of_a_watch_in_them(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plain = operations_in_what_is_made_of(model)
    with rl.watch(model, ["", "**", "tanh"], every=1, what="all", sink=[], when=rl.NotFinite(), folder=tmp_path):
        assert operations_in_what_is_made_of(model) == plain
        assert torch.equal(
            torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 4)), model(torch.ones(1, 4))
        )


def operations_in_what_is_made_of(model):
    traced = torch.jit.trace(model, torch.ones(1, 4)).inlined_graph
    exported = torch.export.export(model, (torch.ones(1, 4),)).graph_module.graph
    return str(traced).count("aten::"), [str(node.target) for node in exported.nodes]
