"""Loops of trainings, each with its one difficulty: `LOOPS[name](run)` trains, and notes what must be the same.

`run.watch(model)` is a context manager around the part that is watched; in the plain run it does nothing.
`run.end(model, *optimizers)` notes what is left.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attrs import define, field
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, prune
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset
from training_witness import (
    MAKERS,
    Language,
    Perceptron,
    Recurrent,
    Witness,
    images,
    loss_of,
    note_generators,
    note_model,
    seed_all,
    sequences,
    tensors_of,
    tokens,
    trained,
    vectors,
)

import replaylens as rl

OPERATIONS = (
    "linear relu gelu softmax dropout conv2d batch_norm mul add sin tanh lstm gru_cell matmul masked_fill layer_norm "
    "embedding scaled_dot_product_attention sum stack"
).split()
KINDS = ("hooks", "nodes", "when", "paused", "everything")


class Convolved(nn.Module):
    """Batch norms, in-place functions on what others read, dropout, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.skip, self.drop = nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.1, inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        y = self.norm2(self.second(x))
        y += self.skip(x)
        return self.head(self.drop(F.relu_(y).mean((2, 3)) * 2))


@define
class Run:
    """One run of a loop: how it is watched, and what it left."""

    kind: str  # "plain", or one of KINDS
    folder: Path
    sink: Any = ()
    witness: Witness = field(factory=Witness)
    watches: list[rl.Watch] = field(factory=list)  # all that were opened
    found: list[dict[Any, Any]] = field(factory=list)  # the samples of each

    @contextmanager
    def watch(self, model: nn.Module, **wishes: Any) -> Iterator[rl.Watch | None]:
        """The watch of this kind of run; what nobody can follow is still watched by hooks."""
        if self.kind == "plain":
            yield None
            return
        with self.open(model, **wishes) as watch:
            self.watches.append(watch)
            with watch.paused() if self.kind == "paused" else nullcontext():
                yield watch
            self.found.append(samples(watch) if watch._session.ring is not None else {})

    def open(self, model: nn.Module, **wishes: Any) -> rl.Watch:
        usual: dict[str, Any] = {"layers": ["", "**"], "every": 2, "what": "all", "sink": list(self.sink)}
        why_no_nodes = wishes.pop("why_no_nodes", None)
        if self.kind == "when":
            return rl.watch(model, **{"when": third_step, "folder": self.folder, **only_steps(wishes)})
        if self.kind in ("nodes", "everything") and why_no_nodes is not None:
            with pytest.raises(rl.UnsupportedModel, match=why_no_nodes):
                rl.watch(model, "relu", sink=[])
        elif self.kind == "nodes":
            wishes["layers"] = list(OPERATIONS)
        elif self.kind == "everything":
            wishes["layers"] = ["", "**", *OPERATIONS]
        if self.kind == "everything":
            usual |= {"every": 1, "micro": "all", "rng": "all", "when": rl.NotFinite(), "folder": self.folder}
        return rl.watch(model, **{**usual, **wishes})

    def step(self, model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
        """The usual end of a step."""
        self.witness.note(f"loss {len(self.witness.hashes)}", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def end(self, *trained_ones: Any) -> None:
        """Note what is left: of models, of optimizers, of generators."""
        for number, one in enumerate(trained_ones):
            if isinstance(one, nn.Module):
                mine = Witness()
                note_model(mine, one)
                self.witness.hashes.update({f"{number} {name}": value for name, value in mine.hashes.items()})
            else:
                self.witness.note(f"{number} optimizer", list(one.state.values()))
        note_generators(self.witness)


def third_step(numbers: Any) -> bool:
    return numbers.step == 3


def only_steps(wishes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wishes.items() if name not in ("layers", "what", "every", "micro")}


def samples(watch: rl.Watch) -> dict[Any, Any]:
    """All samples that the ring still has, by step, name and kind: the first of each."""
    reader, found = watch._session.ring.reader(), {}
    while (sample := reader.take()) is not None:
        found.setdefault((sample.step, sample.name, sample.what), sample)
    return found


LOOPS: dict[str, Callable[[Run], None]] = {}


def loop(body: Callable[[Run], None]) -> Callable[[Run], None]:
    LOOPS[body.__name__] = body
    return body


def _of_witness(name: str) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        run.witness = trained(MAKERS[name], 6, lambda model, optimizer: run.watch(model))

    return body


LOOPS.update({name: _of_witness(name) for name in MAKERS})


def _convolved(change: Callable[[nn.Module], Any] = lambda model: None, **context: Any) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = Convolved()
        change(model)
        with torch.autocast("cpu", **context) if context else nullcontext():
            fit(run, model, images)

    return body


LOOPS.update(
    {
        "cnn": _convolved(),
        "cnn_autocast": _convolved(dtype=torch.bfloat16),
        "cnn_channels_last": _convolved(lambda model: model.to(memory_format=torch.channels_last)),
    }
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, 0.9)


def fit(
    run: Run,
    model: nn.Module,
    batch: Callable[[int], Any] = vectors,
    optimizer: Any = None,
    steps: int = 6,
    call: Callable[..., Any] | None = None,
    before_step: Callable[[], Any] = lambda: None,
    set_to_none: bool = True,
    **wishes: Any,
) -> None:
    """The plainest loop."""
    optimizer = optimizer or sgd(model)
    with run.watch(model, **wishes):
        for number in range(steps):
            inputs = batch(number)
            out = model(*inputs) if call is None else call(model, *inputs)
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(out).backward()
            before_step()
            run.witness.note(f"output {number}", list(tensors_of(out)))
            optimizer.step()
    run.end(model, optimizer)


# -- optimizers --------------------------------------------------------------------------------------------------------


def _with(kind: Any, **options: Any) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = Perceptron()
        fit(run, model, optimizer=kind(model.parameters(), **options))

    return body


LOOPS.update(
    {
        "fused_adamw": _with(torch.optim.AdamW, lr=0.01, fused=True),
        "fused_sgd": _with(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
        "foreach_adam": _with(torch.optim.Adam, lr=0.01, foreach=True, amsgrad=True),
        "foreach_sgd": _with(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True),
        "rmsprop_centered": _with(torch.optim.RMSprop, lr=0.01, centered=True),
        "adafactor": _with(torch.optim.Adafactor, lr=0.01),
    }
)


@loop
def fused_scaled(run: Run) -> None:
    """The fused optimizer divides gradients by the scale itself."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with run.watch(model):
        for number in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model(*vectors(number)))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    run.end(model, optimizer)


@loop
def skipped_by_a_scaler(run: Run) -> None:
    """Steps that the optimizer never sees, since a gradient overflowed."""
    model = Perceptron()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with run.watch(model):
        for number in range(8):
            optimizer.zero_grad()
            loss = loss_of(model(*vectors(number))) * (float("inf") if number in (1, 2) else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            run.witness.note(f"scale {number}", scaler.get_scale())
    run.end(model, optimizer)


@loop
def steps_left_out(run: Run) -> None:
    """The loop itself passes over batches, before the backward pass and after it."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(12):
            out = model(*vectors(number))
            if number % 4 == 1:
                continue
            loss_of(out).backward()
            if number % 4 != 2:
                optimizer.step()
                optimizer.zero_grad()
    run.end(model, optimizer)


@loop
def clipped(run: Run) -> None:
    model = Perceptron()
    fit(run, model, before_step=lambda: clip_grad_norm_(model.parameters(), 0.01))


@loop
def clipped_by_value(run: Run) -> None:
    model = Perceptron()
    fit(run, model, before_step=lambda: clip_grad_value_(model.parameters(), 0.001), set_to_none=False)


@loop
def two_optimizers(run: Run) -> None:
    model = Perceptron()
    pair = [torch.optim.SGD(model.layers.parameters(), 0.1), torch.optim.Adam(model.head.parameters(), 0.01)]
    with run.watch(model):
        for number in range(6):
            model.zero_grad()
            loss_of(model(*vectors(number))).backward()
            for optimizer in pair[: 1 + number % 2]:
                optimizer.step()
    run.end(model, *pair)


@loop
def optimizers_within_the_backward_pass(run: Run) -> None:
    """One of them for each parameter, stepped as soon as its gradient is there."""
    model = Perceptron()
    each = {p: torch.optim.Adam([p], 0.01, foreach=False) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in each:
        parameter.register_post_accumulate_grad_hook(hook)
    with run.watch(model):
        for number in range(6):
            loss_of(model(*vectors(number))).backward()
    run.end(model, *each.values())


@loop
def no_optimizer(run: Run) -> None:
    """Weights changed by hand: the clock never ticks."""
    model = Perceptron()
    with run.watch(model):
        for number in range(6):
            model.zero_grad()
            loss_of(model(*vectors(number))).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    run.end(model)


@loop
def lbfgs(run: Run) -> None:
    model = Perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    with run.watch(model):
        for number in range(4):
            (x,) = vectors(number)

            def closure(x=x):
                optimizer.zero_grad()
                loss = loss_of(model(x))
                loss.backward()
                return loss

            run.witness.note(f"loss {number}", optimizer.step(closure))
    run.end(model, optimizer)


@loop
def closures(run: Run) -> None:
    """Sharpness-aware: the optimizer runs the model twice within its step."""

    class Sharpness(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(p.grad, alpha=0.01)
            with torch.enable_grad():
                closure()
            return super().step()

    model = Perceptron()
    optimizer = Sharpness(model.parameters(), 0.1)
    with run.watch(model):
        for number in range(6):
            (x,) = vectors(number)

            def closure(x=x):
                optimizer.zero_grad()
                loss_of(model(x)).backward()

            optimizer.step(closure)
    run.end(model, optimizer)


@loop
def optimizer_made_within_the_watch(run: Run) -> None:
    model = Perceptron()
    with run.watch(model):
        optimizer = torch.optim.Adam(model.head.parameters(), 0.01)
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            if number == 2:
                optimizer.add_param_group({"params": model.layers.parameters()})
    run.end(model, optimizer)


@loop
def scheduled(run: Run) -> None:
    model = Perceptron()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    with run.watch(model):
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            schedule.step()
    run.end(model, optimizer)
    run.witness.note("schedule", schedule.state_dict())


@loop
def gan(run: Run) -> None:
    """Two models, two watches, each trained through the other."""
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
    judge = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizers = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.Adam(judge.parameters(), 0.01)
    with run.watch(maker), run.watch(judge):
        for number in range(6):
            fake = maker(torch.randn(8, 4))
            loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(*vectors(number))).mean()
            run.step(judge, optimizers[1], loss)
            run.step(maker, optimizers[0], F.softplus(-judge(fake)).mean())
    run.end(maker, judge, *optimizers)


# -- gradients ---------------------------------------------------------------------------------------------------------


@loop
def two_backward_passes(run: Run) -> None:
    """Through one graph, and a gradient taken apart from them."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            optimizer.zero_grad()
            out = model(*vectors(number))
            out.square().sum().backward(retain_graph=True)
            run.witness.note(f"apart {number}", torch.autograd.grad(out[0].sum(), model.head.weight, retain_graph=True))
            out.sin().sum().backward()
            optimizer.step()
    run.end(model, optimizer)


@loop
def gradient_penalty(run: Run) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            x = vectors(number)[0].requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            run.step(model, optimizer, out.mean() + (slope.norm(dim=1) - 1).square().mean())
    run.end(model, optimizer)


@loop
def second_order(run: Run) -> None:
    """A step of MAML: gradients of gradients with respect to the weights."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            weights = dict(model.named_parameters())
            inner = functional_call(model, weights, vectors(number)).square().mean()
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes)}
            run.step(model, optimizer, functional_call(model, moved, vectors(number)).square().mean())
    run.end(model, optimizer)


@loop
def truncated_backpropagation(run: Run) -> None:
    model = nn.GRU(16, 16, batch_first=True)
    optimizer = sgd(model)
    with run.watch(model):
        hidden = torch.zeros(1, 3, 16)
        for number in range(6):
            out, hidden = model(sequences(number)[0], hidden.detach())
            run.step(model, optimizer, out.square().mean())
    run.end(model, optimizer)


@loop
def hooks_of_the_users(run: Run) -> None:
    """That change outputs, gradients of modules and of parameters, for all modules too; some come and go."""
    model = Perceptron()
    model.layers[3].register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
    model.layers[3].register_full_backward_pre_hook(lambda module, got: (got[0] * 2,))
    model.head.register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True, always_call=True)
    model.layers[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    calls: list[str] = []
    everywhere = [
        nn.modules.module.register_module_forward_hook(lambda module, args, out: calls.append(type(module).__name__)),
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: None),
    ]
    try:
        fit(run, model)
    finally:
        for handle in everywhere:
            handle.remove()
    run.witness.note("calls", calls)


@loop
def tensor_hooks_of_the_users(run: Run) -> None:
    """On the very tensors that are watched."""
    model = Perceptron()
    seen: list[torch.Tensor] = []

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = model.layers(x)
        h.retain_grad()
        h.register_hook(lambda g: g * 3)
        seen.append(h)
        return model.head(h)

    fit(run, model, call=call)
    for number, one in enumerate(seen):
        run.witness.note(f"kept {number}", (one, one.grad))


@loop
def multi_gradient_hooks(run: Run) -> None:
    model = Perceptron()
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), seen.append)
    fit(run, model)
    handle.remove()
    run.witness.note("seen", seen)


@loop
def anomaly_mode(run: Run) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        fit(run, Convolved(), images)


@loop
def tensors_saved_elsewhere(run: Run) -> None:
    def call(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    fit(run, Convolved(), images, call=call)


@loop
def hidden_tensor_saved_on_packing(run: Run) -> None:
    """What is packed, and how often, is counted."""
    packs: list[Any] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packs.append((tuple(t.shape), t.dtype))
        return t.clone()

    def call(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return model(x)

    fit(run, Language(), tokens, call=call)
    run.witness.note("packs", repr(packs))


@loop
def gradients_as_views_of_one_bucket(run: Run) -> None:
    model = Perceptron()
    bucket = torch.zeros(sum(p.numel() for p in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.grad = bucket[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    fit(run, model, set_to_none=False, before_step=lambda: bucket.mul_(0.5))
    run.witness.note("bucket", bucket)


@loop
def frozen_layers(run: Run) -> None:
    model = Perceptron()
    model.layers.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    fit(run, model, optimizer=optimizer)


@loop
def thawed_later(run: Run) -> None:
    model = Perceptron()
    model.layers.requires_grad_(False)
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            model.layers.requires_grad_(number >= 3)
            run.step(model, optimizer, loss_of(model(*vectors(number))))
    run.end(model, optimizer)


# -- calls of the model ------------------------------------------------------------------------------------------------


@loop
def functional_calls(run: Run) -> None:
    model = Perceptron()
    fit(run, model, call=lambda model, x: functional_call(model, dict(model.named_parameters()), (x,)))


@loop
def other_weights_by_functional_calls(run: Run) -> None:
    """Copies in place of the model's own: buffers too."""
    model = Convolved()

    def call(model: nn.Module, x: torch.Tensor) -> Any:
        weights = {name: p * 1.5 for name, p in model.named_parameters()}
        return functional_call(model, (weights, {n: b.clone() for n, b in model.named_buffers()}), (x,))

    fit(run, model, images, call=call)


@loop
def gradients_by_a_transform(run: Run) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            weights = {name: p.detach() for name, p in model.named_parameters()}
            slopes = grad(lambda w, x: functional_call(model, w, (x,)).square().mean())(weights, *vectors(number))
            for name, parameter in model.named_parameters():
                parameter.grad = slopes[name]
            optimizer.step()
    run.end(model, optimizer)


@loop
def gradients_of_each_sample(run: Run) -> None:
    """vmap over grad over functional_call."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = sgd(model)

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (x[None],)).square().mean()

    with run.watch(model):
        for number in range(6):
            weights = {name: p.detach() for name, p in model.named_parameters()}
            slopes = vmap(grad(loss), in_dims=(None, 0))(weights, *vectors(number))
            for name, parameter in model.named_parameters():
                parameter.grad = slopes[name].clamp(-0.1, 0.1).mean(0)
            optimizer.step()
    run.end(model, optimizer)


@loop
def vmap_over_the_model(run: Run) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4))
    fit(run, model, call=lambda model, x: vmap(model, randomness="different")(x))


@loop
def forward_mode(run: Run) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def call(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.forward_ad.dual_level():
            out = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            return torch.autograd.forward_ad.unpack_dual(out)

    fit(run, model, call=lambda model, x: [*call(model, x)])


@loop
def jvp_of_the_model(run: Run) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    fit(run, model, call=lambda model, x: [*torch.func.jvp(model, (x,), (torch.ones_like(x),))])


@loop
def traced_meanwhile(run: Run) -> None:
    """jit.trace of the model, and of its copy, between steps."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            made = torch.jit.trace(model, vectors(number))
            run.witness.note(f"graph {number}", str(made.graph).count("aten::"))
            run.witness.note(f"traced {number}", made(*vectors(number)))
    run.end(model, optimizer)


@loop
def exported_meanwhile(run: Run) -> None:
    """torch.export and fx between steps: hooks must not be in what they make."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(4):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            traced = torch.fx.symbolic_trace(model)
            run.witness.note(f"fx {number}", traced.code)
            if number == 1:
                run.witness.note("exported", torch.export.export(model, vectors(number)).module()(*vectors(number)))
    run.end(model, optimizer)


@loop
def several_forwards(run: Run) -> None:
    """A step with two forwards and one backward; the same part of the model called alone."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            one, other = model(*vectors(number)), model(*vectors(number))
            alone = model.layers(*vectors(number))
            run.step(model, optimizer, (one - other).square().mean() + alone.sum())
    run.end(model, optimizer)


@loop
def only_parts_are_called(run: Run) -> None:
    model = Perceptron()
    fit(run, model, call=lambda model, x: model.head(model.layers(x)))


@loop
def forward_called_directly(run: Run) -> None:
    model = Perceptron()
    fit(run, model, call=lambda model, x: model.forward(x))


@loop
def a_call_of_its_own(run: Run) -> None:
    class Own(Perceptron):
        def __call__(self, x):
            return super().__call__(x) * 2

    fit(run, Own(), why_no_nodes="a `__call__` of its own")


@loop
def a_forward_of_the_instance(run: Run) -> None:
    """As accelerate puts one there."""
    model = Perceptron()
    before = model.forward
    model.forward = lambda x: before(x.double().float()) * 2
    fit(run, model)
    run.witness.note("forward", model.forward.__name__)


@loop
def two_threads_with_a_model_each(run: Run) -> None:
    """One is watched; the other trains at the same time."""
    models = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    data = [[torch.randn(8, 16) for _ in range(6)] for _ in range(2)]
    losses: list[list[torch.Tensor]] = [[], []]

    def work(at: int) -> None:
        for x in data[at]:
            optimizers[at].zero_grad()
            loss = loss_of(models[at](x))
            loss.backward()
            optimizers[at].step()
            losses[at].append(loss.detach())

    with run.watch(models[0]):
        threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run.end(*models, *optimizers)
    run.witness.note("losses", losses)


@loop
def evaluation_between_steps(run: Run) -> None:
    """Without gradients, in inference mode, in eval mode; an encoder has a fast path there, that hooks would close."""

    class Masked(nn.TransformerEncoder):
        def forward(self, x):
            return super().forward(x, src_key_padding_mask=torch.arange(x.shape[1]).expand(x.shape[:2]) > 4)

    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    encoder = Masked(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), encoder)
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*sequences(number))))
            model.eval()
            with torch.inference_mode():
                run.witness.note(f"inference {number}", model(*sequences(number)))
            with torch.no_grad():
                run.witness.note(f"no gradients {number}", model(*sequences(number)))
            model.train()
    run.end(model, optimizer)


# -- modes and settings ------------------------------------------------------------------------------------------------


@loop
def function_mode(run: Run) -> None:
    """A mode of the user's sees each function; it must see those of the training alone."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    model, mode = Convolved(), Mode()
    optimizer = sgd(model)
    with run.watch(model), mode:
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*images(number))))
    run.end(model, optimizer)
    run.witness.note("calls", mode.calls)


@loop
def dispatch_mode(run: Run) -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls.append(str(function))
            return function(*args, **(kwargs or {}))

    model, mode = Convolved(), Mode()
    optimizer = sgd(model)
    with run.watch(model), mode:
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*images(number))))
    run.end(model, optimizer)
    run.witness.note("calls", mode.calls)


@loop
def counted_operations(run: Run) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = Language()
    optimizer = sgd(model)
    with run.watch(model), FlopCounterMode(display=False) as counter:
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*tokens(number))))
    run.end(model, optimizer)
    run.witness.note("flops", counter.get_total_flops())
    run.witness.note("by module", repr({name: dict(found) for name, found in counter.get_flop_counts().items()}))


@loop
def default_device(run: Run) -> None:
    with torch.device("cpu"):
        fit(run, Perceptron())


@loop
def default_device_meta(run: Run) -> None:
    """New tensors would be without values, also those of a watch."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [vectors(number) for number in range(6)]
    torch.set_default_device("meta")
    try:
        with run.watch(model):
            for x in data:
                run.step(model, optimizer, loss_of(model(*x)))
    finally:
        torch.set_default_device(None)
    run.end(model, optimizer)


@loop
def default_dtype(run: Run) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        fit(run, Perceptron())
    finally:
        torch.set_default_dtype(torch.float32)


@loop
def deterministic_algorithms(run: Run) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        fit(run, Convolved(), images)
    finally:
        torch.use_deterministic_algorithms(False)


@loop
def autocast_within(run: Run) -> None:
    class Casting(Perceptron):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.layers(x)
            return self.head(h.float())

    fit(run, Casting())


@loop
def half_precision(run: Run) -> None:
    fit(run, Perceptron().bfloat16(), lambda number: (torch.randn(8, 16).bfloat16(),))


@loop
def double_precision(run: Run) -> None:
    fit(run, Convolved().double(), lambda number: (torch.randn(4, 3, 12, 12).double(),))


@loop
def multithreaded_autograd_off(run: Run) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        fit(run, Perceptron())


@loop
def other_generators(run: Run) -> None:
    """Python's and numpy's draw in the forward."""

    class Drawing(Perceptron):
        def forward(self, x):
            return super().forward(x * random.random() + float(np.random.rand()))

    fit(run, Drawing())


# -- models that change ------------------------------------------------------------------------------------------------


@loop
def averaged(run: Run) -> None:
    """An average of the weights, made by deepcopy; batch norms renewed in the end."""
    model = Convolved()
    optimizer = sgd(model)
    with run.watch(model):
        average = AveragedModel(model, avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new, use_buffers=True)
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*images(number))))
            average.update_parameters(model)
            run.witness.note(f"average {number}", average.eval()(*images(number)))
        average.train()
        update_bn([images(number)[0] for number in range(3)], average)
    run.end(model, average, optimizer)
    run.witness.note("text", repr(average))


@loop
def copied_in_the_middle(run: Run) -> None:
    """Copies are trained on: by deepcopy, by torch.save, by a state."""
    model = Convolved()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(3):
            run.step(model, optimizer, loss_of(model(*images(number))))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = copy.deepcopy(model), torch.load(buffer, weights_only=False), Convolved()
        other[2].load_state_dict(model.state_dict())
        stepped = [sgd(one) for one in other]
        for one in stepped:
            one.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for number in range(3):
            for one, steps in zip((model, *other), (optimizer, *stepped)):
                run.step(one, steps, loss_of(one(*images(number))))
    run.end(model, optimizer, *other, *stepped)


@loop
def copied_within_a_forward(run: Run) -> None:
    """A momentum encoder that is copied while the forward of the first step runs."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = Perceptron(), None

        def forward(self, x):
            if self.target is None:
                self.target = copy.deepcopy(self.online).requires_grad_(False)
            with torch.no_grad():
                wanted = self.target(x)
            return (self.online(x) - wanted).square()

    model = Momentum()
    fit(run, model, optimizer=sgd(model))


@loop
def loaded_in_the_middle(run: Run) -> None:
    """Weights and the optimizer's state are put back to those of an earlier step."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with run.watch(model):
        for number in range(8):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            if number == 2:
                state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if number == 5:
                model.load_state_dict(state[0], assign=True)
                optimizer = torch.optim.AdamW(model.parameters(), 0.01)
                optimizer.load_state_dict(state[1])
    run.end(model, optimizer)


@loop
def modules_come_and_go(run: Run) -> None:
    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(9):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            if number == 2:
                model.layers.append(nn.Linear(32, 32))
                optimizer.add_param_group({"params": model.layers[-1].parameters()})
            if number == 4:
                model.head = nn.Linear(32, 4)
                optimizer.add_param_group({"params": model.head.parameters()})
            if number == 6:
                model.layers[1] = nn.Tanh()
                del model.layers[-2]
    run.end(model, optimizer)


@loop
def dtype_changed_in_the_middle(run: Run) -> None:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with run.watch(model):
        for number in range(6):
            run.step(model, optimizer, loss_of(model(vectors(number)[0].to(model.head.weight.dtype))))
            if number == 2:
                model.double()
    run.end(model, optimizer)


@loop
def lazy_modules(run: Run) -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(inplace=True), nn.LazyLinear(4))
    with run.watch(model):
        loss_of(model(*vectors(0))).backward()
        optimizer = sgd(model)
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
    run.end(model, optimizer)


@loop
def spectral_norm(run: Run) -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4))
    fit(run, model)


@loop
def weight_norm(run: Run) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4))
    fit(run, model)


@loop
def cached_parametrizations(run: Run) -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4))
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            with nn.utils.parametrize.cached():
                loss = loss_of(model(*vectors(number)))
            run.step(model, optimizer, loss)
    run.end(model, optimizer)


@loop
def pruned(run: Run) -> None:
    model = Perceptron()
    prune.l1_unstructured(model.head, "weight", 0.5)
    fit(run, model)


@loop
def sparse_embeddings(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(32, 16, sparse=True), nn.Flatten(), nn.Linear(160, 4))
    optimizers = torch.optim.SparseAdam(model[0].parameters(), 0.01), torch.optim.Adam(model[2].parameters(), 0.01)
    with run.watch(model):
        for number in range(6):
            model.zero_grad()
            loss_of(model(*tokens(number))).backward()
            for optimizer in optimizers:
                optimizer.step()
    run.end(model, *optimizers)


@loop
def complex_parameters(run: Run) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(9, dtype=torch.cfloat)), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16))

    model = Spectral()
    fit(run, model, optimizer=torch.optim.Adam(model.parameters(), 0.01))


@loop
def subclassed_tensors(run: Run) -> None:
    class Named(torch.Tensor):
        pass

    fit(run, Perceptron(), lambda number: (vectors(number)[0].as_subclass(Named),))


@loop
def logging_subclass(run: Run) -> None:
    """A tensor of the user's that sees each function applied to it."""
    calls: list[str] = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            calls.append(getattr(function, "__name__", str(function)))
            return super().__torch_function__(function, types, args, kwargs or {})

    fit(run, Perceptron(), lambda number: (vectors(number)[0].as_subclass(Logged),))
    run.witness.note("calls", calls)


@loop
def inputs_written_by_the_model(run: Run) -> None:
    class Writing(Perceptron):
        def forward(self, x):
            x.mul_(0.5).clamp_(-1, 1)
            return super().forward(x)

    fit(run, Writing())


@loop
def outputs_written_by_the_loop(run: Run) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out[0] = 0
        out.mul_(2)
        out[:, 1].relu_()
        return out

    fit(run, model, call=call)


@loop
def views_and_inplace_functions(run: Run) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.split, self.act = nn.Linear(16, 16), Split(), nn.ReLU(inplace=True)

        def forward(self, x):
            h = self.first(x)
            a, _ = self.split(h)
            a.add_(1)
            self.act(h[:, 8:].mul(2))
            h[:, :4] *= 2
            return h

    class Split(nn.Module):
        def forward(self, x):
            return x[:, :8], x.view(-1)[:8]

    fit(run, Views())


@loop
def outputs_of_all_kinds(run: Run) -> None:
    from dataclasses import dataclass

    @dataclass
    class Found:
        logits: torch.Tensor
        again: dict[str, Any]

    class Many(Perceptron):
        def forward(self, x):
            out = super().forward(x)
            return Found(
                out, {"sparse": torch.eye(3).to_sparse(), "none": None, "rest": (out[:0], 3, "text", out.sum())}
            )

    model = Many()
    fit(run, model, call=lambda model, x: (found := model(x)).logits * found.again["rest"][-1])


@loop
def nested_models(run: Run) -> None:
    """The watched model is a part of the one that is trained."""
    inner = Perceptron()
    outer = nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(4, 4))
    optimizer = sgd(outer)
    with run.watch(inner):
        for number in range(6):
            run.step(outer, optimizer, loss_of(outer(*vectors(number))))
    run.end(outer, optimizer)


@loop
def shared_modules(run: Run) -> None:
    layer = nn.Linear(16, 16)
    fit(run, nn.Sequential(layer, nn.ReLU(inplace=True), layer, nn.Sequential(layer, nn.Dropout(0.1))))


@loop
def two_watches(run: Run) -> None:
    model = Convolved()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(3):
            run.step(model, optimizer, loss_of(model(*images(number))))
        with run.watch(model):
            for number in range(4):
                run.step(model, optimizer, loss_of(model(*images(number))))
        run.step(model, optimizer, loss_of(model(*images(0))))
    run.end(model, optimizer)


@loop
def data_parallel(run: Run) -> None:
    model = Perceptron()
    wrapped = nn.DataParallel(model)
    optimizer = sgd(model)
    with run.watch(wrapped):
        for number in range(6):
            run.step(model, optimizer, loss_of(wrapped(*vectors(number))))
    run.end(model, optimizer)


# -- errors and interrupts ---------------------------------------------------------------------------------------------


class Stumbling(nn.Module):
    """Raises what it is told, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.error: BaseException | None = None
        self.in_backward = False

    def forward(self, x):
        h = F.dropout(self.norm(self.first(x)), 0.2)
        if self.error is not None and not self.in_backward:
            raise self.error
        if self.error is not None:
            h.register_hook(self._stumble)
        return self.second(h)

    def _stumble(self, gradient):
        raise self.error


def _stumbling(kind: type[BaseException], in_backward: bool) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = Stumbling()
        model.in_backward = in_backward
        optimizer = sgd(model)
        with run.watch(model):
            for number in range(9):
                model.error = kind("mine") if number in (2, 3, 6) else None
                try:
                    run.step(model, optimizer, loss_of(model(*vectors(number))))
                except kind as error:
                    run.witness.note(f"error {number}", f"{error!r} {getattr(error, '__notes__', ())}")
        run.end(model, optimizer)

    return body


LOOPS.update(
    {
        "error_in_the_forward": _stumbling(ValueError, False),
        "error_in_the_backward": _stumbling(ValueError, True),
        "interrupt_in_the_forward": _stumbling(KeyboardInterrupt, False),
        "interrupt_in_the_backward": _stumbling(KeyboardInterrupt, True),
        "exit_in_the_forward": _stumbling(SystemExit, False),
    }
)


@loop
def out_of_memory_and_again(run: Run) -> None:
    """The loop tries a batch again in halves."""
    model = Stumbling()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            (x,) = vectors(number)
            model.error = torch.OutOfMemoryError("CUDA out of memory") if number in (2, 4) else None
            optimizer.zero_grad()
            try:
                loss_of(model(x)).backward()
            except torch.OutOfMemoryError:
                model.error = None
                optimizer.zero_grad()
                for half in x.chunk(2):
                    loss_of(model(half)).backward()
            optimizer.step()
    run.end(model, optimizer)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16) + index + random.random()


@loop
def forked_workers(run: Run) -> None:
    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model):
        for epoch in range(2):
            workers = DataLoader(Numbers(), 8, shuffle=True, num_workers=2, multiprocessing_context="fork")
            for number, x in enumerate(workers):
                run.step(model, optimizer, loss_of(model(x)))
                run.witness.note(f"batch {epoch} {number}", x)
    run.end(model, optimizer)


# -- torch.compile -----------------------------------------------------------------------------------------------------


WEIGHTS = {"layers": ["**"], "what": ("weight", "weight_grad", "update")}


def _compiled(before: bool, method: bool = False, part: bool = False) -> Callable[[Run], None]:
    """Watched before the first forward of the compiled model, or after it."""

    def body(run: Run) -> None:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 4))
        called: nn.Module = model
        if part:
            model[1] = torch.compile(model[1], backend="aot_eager")
        elif method:
            model.compile(backend="aot_eager")
        else:
            called = torch.compile(model, backend="aot_eager")
        optimizer = sgd(model)
        if not before:
            run.step(model, optimizer, loss_of(called(*vectors(0))))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with run.watch(called, why_no_nodes="compile", **WEIGHTS):
            for number in range(6):
                run.step(model, optimizer, loss_of(called(*vectors(number))))
        run.witness.note("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs)
        run.witness.note("breaks", repr(dict(torch._dynamo.utils.counters["graph_break"])))
        run.end(model, optimizer)
        torch._dynamo.reset()

    return body


LOOPS.update(
    {
        "compiled": _compiled(True),
        "compiled_earlier": _compiled(False),
        "compiled_by_its_method": _compiled(True, method=True),
        "compiled_by_its_method_earlier": _compiled(False, method=True),
        "compiled_in_part": _compiled(True, part=True),
    }
)


@loop
def compiled_optimizer(run: Run) -> None:
    torch._dynamo.reset()
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    with run.watch(model):
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model(*vectors(number))).backward()
            step()
    run.end(model, optimizer)
    torch._dynamo.reset()


@loop
def compiled_after_the_watch_began(run: Run) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = sgd(model)
    with run.watch(model):
        called = torch.compile(model, backend="aot_eager")
        for number in range(6):
            run.step(model, optimizer, loss_of(called(*vectors(number))))
    run.end(model, optimizer)
    torch._dynamo.reset()


# -- generation --------------------------------------------------------------------------------------------------------


@loop
def drawn_tokens(run: Run) -> None:
    """Forwards are the clock; what is drawn is the same."""
    model = Language().eval()
    index = torch.randint(0, 32, (1, 1))
    with run.watch(model, clock="forward"), torch.no_grad():
        for _ in range(9):
            logits = model(F.pad(index, (0, 10 - index.shape[1])))[:, index.shape[1] - 1]
            index = torch.cat([index, torch.multinomial(F.softmax(logits, -1), 1)], 1)
    run.witness.note("tokens", index)
    run.end(model)


@loop
def forwards_as_clock_of_a_training(run: Run) -> None:
    fit(run, Convolved(), images, clock="forward")


@loop
def clock_by_hand(run: Run) -> None:
    model = Recurrent()
    optimizer = sgd(model)
    with run.watch(model, clock="manual") as watch:
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*sequences(number))))
            if watch is not None:
                watch.step()
    run.end(model, optimizer)


@loop
def watched_and_captured(run: Run) -> None:
    """A program is captured in the middle of the training, and another watch comes and goes."""
    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(6):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            if number == 2:
                with suppress(Exception):
                    rl.capture(copy.deepcopy(model).eval(), *vectors(number))
                with rl.watch(model.layers, every=1, sink=[]):
                    model.layers(*vectors(number))
    run.end(model, optimizer)


# -- more of what trainings do -----------------------------------------------------------------------------------------


@loop
def muon_and_adamw(run: Run) -> None:
    """Matrices by one optimizer, the rest by another, after one backward pass."""
    model = Language()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    own = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in own]
    pair = [torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(rest, 0.01)]
    with run.watch(model):
        for number in range(6):
            model.zero_grad()
            loss_of(model(*tokens(number))).backward()
            for optimizer in pair:
                optimizer.step()
    run.end(model, *pair)


def fit_scripted(run: Run, model: nn.Module) -> None:
    """TorchScript calls no hooks: its weights are seen, and the rest is refused."""
    if run.kind in ("when", "everything"):
        with pytest.raises(rl.UnsupportedModel, match="is TorchScript, which calls no hooks"):
            rl.watch(model, when=rl.NotFinite(), folder=run.folder)
        run.kind = "hooks"
    fit(run, model, layers=None, why_no_nodes="TorchScript")


@loop
def scripted(run: Run) -> None:
    with torch.jit.optimized_execution(False):  # whose fusions come after some runs, and stay
        fit_scripted(run, torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))))


@loop
def a_part_that_is_scripted(run: Run) -> None:
    with torch.jit.optimized_execution(False):
        inner = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
        fit_scripted(run, nn.Sequential(inner, nn.Dropout(0.1), nn.Linear(16, 4)))


@loop
def an_ensemble_by_vmap(run: Run) -> None:
    models = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(models)
    optimizer = torch.optim.SGD(stacked.values(), 0.1)
    with run.watch(models[0], clock="manual") as watch:
        for number in range(6):
            out = vmap(lambda w, x: functional_call(models[0], w, (x,)), (0, None))(stacked, *vectors(number))
            run.step(models[0], optimizer, out.square().mean())
            if watch is not None:
                watch.step()
    run.end(optimizer, *models)


@loop
def curvature(run: Run) -> None:
    """The product of the Hessian and a vector: forward mode over reverse mode."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(4):
            (x,) = vectors(number)
            run.step(model, optimizer, loss_of(model(x)))
            slope = grad(lambda x: model(x).square().mean())
            run.witness.note(f"curvature {number}", torch.func.jvp(slope, (x,), (torch.ones_like(x),)))
    run.end(model, optimizer)


class Nested(nn.Module):
    """Checkpoints within checkpoints; some operations are kept."""

    def __init__(self, kinds: tuple[str, str]) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.2)
        self.norm, self.kinds = nn.BatchNorm1d(16), kinds

    def forward(self, x):
        return self._checkpointed(self.kinds[0], self._outer, x.requires_grad_())

    def _outer(self, x):
        return self.drop(self._checkpointed(self.kinds[1], self._inner, self.norm(self.first(x))))

    def _inner(self, x):
        return self.drop(torch.tanh(self.second(x)))

    def _checkpointed(self, kind, call, x):
        if kind != "selective":
            return checkpoint(call, x, use_reentrant=kind == "reentrant")
        kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
        return checkpoint(call, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(kept))


def _nested(*kinds: str) -> Callable[[Run], None]:
    return lambda run: fit(run, Nested(kinds))


LOOPS.update(
    {
        "checkpoints_in_checkpoints": _nested("plain", "plain"),
        "reentrant_in_checkpoints": _nested("plain", "reentrant"),
        "checkpoints_in_reentrant": _nested("reentrant", "plain"),
        "reentrant_in_reentrant": _nested("reentrant", "reentrant"),
        "selective_checkpoints": _nested("plain", "selective"),
    }
)


@loop
def packed_sequences(run: Run) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 2]), batch_first=True)
            return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])[0])

    fit(run, Packed(), sequences)


@loop
def ragged_sequences(run: Run) -> None:
    """Nested tensors of the jagged layout: a class that sees each operator."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))

    def call(model: nn.Module, *parts: torch.Tensor) -> Any:
        out = model(torch.nested.nested_tensor(list(parts), layout=torch.jagged))
        return out.values()

    fit(run, model, lambda number: [torch.randn(n, 16) for n in (3, 5, 1)], call=call)


@loop
def differentiable_optimizer(run: Run) -> None:
    """The update itself is differentiated."""
    model = nn.Linear(16, 4)
    with run.watch(model):
        for number in range(4):
            rate = torch.tensor(0.1, requires_grad=True)
            moved = [p.detach().clone().requires_grad_() for p in model.parameters()]
            copies = [p.clone() for p in moved]
            F.linear(*vectors(number), *copies).square().mean().backward(inputs=copies)
            optimizer = torch.optim.SGD(copies, rate, differentiable=True)
            optimizer.step()
            F.linear(*vectors(number), *copies).square().mean().backward()
            run.witness.note(f"rate {number}", rate.grad)
            run.witness.note(f"first {number}", moved[0].grad)
            run.step(model, sgd(model), loss_of(model(*vectors(number))))
    run.end(model)


@loop
def mixed_devices_and_meta(run: Run) -> None:
    """The shapes are asked of a meta copy, and fake tensors are run, between steps."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model):
        for number in range(4):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
            run.witness.note(
                f"shape {number}", tuple(copy.deepcopy(model).to("meta")(torch.ones(2, 16, device="meta")).shape)
            )
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                run.witness.note(f"fake {number}", tuple(model(mode.from_tensor(torch.ones(3, 16))).shape))
    run.end(model, optimizer)


@loop
def profiled(run: Run) -> None:
    model = Perceptron()
    optimizer = sgd(model)
    with run.watch(model), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(4):
            run.step(model, optimizer, loss_of(model(*vectors(number))))
    run.end(model, optimizer)
    run.witness.note("products", sum(event.count for event in profile.key_averages() if event.key == "aten::addmm"))


def run_loop(name: str, kind: str, folder: Path, sink: Any = (), loops: Any = LOOPS) -> Run:
    """Run a loop with all generators at the same beginning."""
    seed_all()
    run = Run(kind, folder, sink)
    loops[name](run)
    return run
