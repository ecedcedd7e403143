"""Trainings that are run twice, watched and not: everything that they leave must be equal, bit for bit.

`trained(make, steps, watching)` runs a training and gives a Witness: a hash of each parameter, buffer, gradient, state
of the optimizer and of the generators, what the model returned, and how often its forward ran. `watching(model, optimizer)`
is a context manager around the loop. `MAKERS` are small trainings, each with its one difficulty.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import define, field
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


@define
class Training:
    """A model, its data and how it is stepped."""

    model: nn.Module
    batches: Callable[[int], tuple[Any, ...]]  # the inputs of a step
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9)
    autocast: torch.dtype | None = None
    scaler: bool = False
    accumulate: int = 1
    call: Callable[..., Any] | None = None  # in place of `model(*inputs)`


@define
class Witness:
    """What a training left: hashes by name, in order; the errors that reached the loop."""

    hashes: dict[str, str] = field(factory=dict)
    errors: list[tuple[type, str, tuple[str, ...]]] = field(factory=list)
    forwards: int = 0

    def note(self, name: str, value: Any) -> None:
        self.hashes[name] = digest(value)


def digest(value: Any) -> str:
    """A hash of the bits of a tensor, or of anything that holds some."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return digest(value.to_dense())
        if value.is_quantized:
            return digest(value.int_repr())
        if value.is_nested:
            return digest(list(value.unbind()))
        if value.is_meta:
            return str((value.shape, value.dtype))
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        bits = bytes(plain.view(torch.uint8).tolist() if plain.numel() < 64 else plain.view(torch.uint8).numpy())
        return hashlib.sha256(repr((tuple(value.shape), value.dtype, value.requires_grad)).encode() + bits).hexdigest()
    if isinstance(value, dict):
        return digest([(key, digest(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, set)):
        return hashlib.sha256("".join([digest(item) for item in value]).encode()).hexdigest()
    if isinstance(value, (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.tobytes()).hexdigest()
    held = getattr(value, "__dict__", None)
    return f"{type(value).__name__} {digest(held) if held else ''}"


def tensors_of(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """The tensors in an output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
        yield from tensors_of(vars(value), depth - 1)


def loss_of(out: Any) -> torch.Tensor | None:
    """Some number that depends on all floating-point tensors of an output."""
    parts = [t for t in tensors_of(out) if t.requires_grad and t.layout is torch.strided and not t.is_nested]
    losses = [(t.abs() if t.is_complex() else t).float().square().mean() for t in parts if t.numel()]
    return sum(losses[1:], losses[0]) if losses else None


def seed_all(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def note_generators(witness: Witness) -> None:
    witness.note("torch's generator", torch.get_rng_state())
    witness.note("Python's generator", repr(random.getstate()))
    witness.note("numpy's generator", repr(np.random.get_state()))


def note_model(witness: Witness, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        witness.note(f"parameter {name}", parameter)
        witness.note(f"gradient {name}", parameter.grad)
    for name, buffer in model.named_buffers():
        witness.note(f"buffer {name}", buffer)


Watching = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


def unwatched(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    return nullcontext()


def trained(make: Callable[[], Training], steps: int = 6, watching: Watching = unwatched) -> Witness:
    """What is left after some steps of a training."""
    seed_all()
    training = make()
    model, witness = training.model.train(), Witness()
    optimizer = training.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=training.scaler, init_scale=1024.0)
    before = type(model).forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        witness.forwards += 1
        return before(self, *args, **kwargs)

    counted.__signature__ = None  # type: ignore[attr-defined]
    del counted.__signature__  # type: ignore[attr-defined]
    type(model).forward = counted  # type: ignore[method-assign]
    try:
        with watching(model, optimizer):
            for step in range(steps):
                optimizer.zero_grad()
                for part in range(training.accumulate):
                    try:
                        _forward_and_backward(training, model, scaler, witness, step * training.accumulate + part)
                    except Exception as error:
                        notes = tuple(getattr(error, "__notes__", ()))
                        witness.errors.append((type(error), str(error), notes))
                scaler.step(optimizer)
                scaler.update()
    finally:
        type(model).forward = before  # type: ignore[method-assign]
    note_model(witness, model)
    witness.note("optimizer", [digest(state) for state in optimizer.state.values()])
    witness.note("scale", scaler.get_scale())
    note_generators(witness)
    return witness


def _forward_and_backward(training: Training, model: nn.Module, scaler: Any, witness: Witness, number: int) -> None:
    inputs = training.batches(number)
    is_cast = training.autocast is not None
    with torch.autocast("cpu", dtype=training.autocast or torch.bfloat16, enabled=is_cast):
        out = model(*inputs) if training.call is None else training.call(model, *inputs)
        loss = loss_of(out)
    witness.note(f"output {number}", list(tensors_of(out)))
    if loss is not None:
        scaler.scale(loss).backward()


def vectors(number: int) -> tuple[torch.Tensor]:
    return (torch.randn(8, 16),)


def images(number: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 3, 12, 12),)


def tokens(number: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 32, (2, 10)),)


def sequences(number: int) -> tuple[torch.Tensor]:
    return (torch.randn(3, 7, 16),)


# -- models ------------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.head(self.layers(x)), dim=-1)


class Convolutional(nn.Module):
    """Batch norms, in-place functions, dropout, an identity among three readers of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.skip, self.drop = nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.first(x)))
        again = self.skip(x)
        a = torch.sin(x * 1.3)
        b = torch.cos(again * 0.7)
        y = self.norm2(self.second(x)) + a * 0.1 + b * 0.1 + torch.tanh(x)
        y.relu_()
        y += again
        return self.head(self.drop(y).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        pattern = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training)
        x = x + self.out((pattern @ v).transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A small GPT with attention by hand and tied weights; `checkpoints`: which kind."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, 16), nn.Parameter(torch.randn(10, 16) * 0.1)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.embed(index) + self.place
        for block in self.blocks:
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An LSTM, a cell in a loop whose length varies, and an output that is a dict."""

    def __init__(self, varies: bool = False) -> None:
        super().__init__()
        self.lstm, self.cell, self.varies = nn.LSTM(16, 16, batch_first=True), nn.GRUCell(16, 16), varies

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found, (hidden, _) = self.lstm(x)
        state = hidden[-1]
        for number in range(2 + int(x[0, 0, 0] > 0) if self.varies else 3):
            state = torch.tanh(self.cell(found[:, number], state))
        return {"state": state, "all": (found, [hidden])}


class Threaded(nn.Module):
    """Computes a part in a thread: a capture refuses in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, found = self.drop(self.norm(x)), []
        thread = threading.Thread(target=lambda: found.append(torch.relu(self.first(h))))
        thread.start()
        thread.join()
        return self.second(self.drop(found[0]))


class Raising(Perceptron):
    """Raises in every third forward, after it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = F.dropout(x, 0.5)
        if self.count % 3 == 1:
            return x @ torch.ones(3, 3)
        if self.count % 3 == 2:
            raise ValueError("the model's own")
        return super().forward(x)


class Keeping(nn.Module):
    """Keeps what it returns, a list too, and looks at it again; its aliases would be others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.kept, self.last = nn.Linear(16, 16), nn.Linear(16, 16), [], None

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.last = F.dropout(self.first(x), 0.5, training=False)
        self.kept = [self.last, self.second(self.last)]
        return self.kept


class Differentiating(nn.Module):
    """Takes a gradient inside the forward, and draws before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.2).requires_grad_()
        energy = self.first(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.second(F.dropout(force, 0.2) + x)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = torch.relu(self.layer(x))
        return self(x, depth - 1) if depth else x


class Hooked(Perceptron):
    """Hooks of the user's on modules and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_hook(lambda module, given, out: out * 1.5)
        self.layers[3].register_forward_pre_hook(lambda module, given: (given[0] + 0.1,))
        self.head.register_full_backward_hook(lambda module, into, outof: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return self.head(h)


def packed(model: nn.Module, x: torch.Tensor) -> Any:
    """The call under the user's own saved-tensor hooks."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return model(x)


def checkpointed(reentrant: bool) -> Callable[..., Any]:
    """The whole model in a checkpoint."""

    def call(model: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    return call


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


MAKERS: dict[str, Callable[[], Training]] = {
    "mlp": lambda: Training(Perceptron(), vectors),
    "mlp_adam": lambda: Training(Perceptron(), vectors, _adam),
    "mlp_accumulated": lambda: Training(Perceptron(), vectors, accumulate=3),
    "cnn": lambda: Training(Convolutional(), images),
    "cnn_autocast": lambda: Training(Convolutional(), images, autocast=torch.bfloat16),
    "cnn_channels_last": lambda: Training(
        Convolutional().to(memory_format=torch.channels_last),
        lambda n: (images(n)[0].contiguous(memory_format=torch.channels_last),),
    ),
    "gpt": lambda: Training(Language(), tokens, _adam),
    "gpt_autocast": lambda: Training(Language(), tokens, autocast=torch.bfloat16),
    "gpt_scaled": lambda: Training(Language(), tokens, autocast=torch.float16, scaler=True),
    "gpt_checkpoints": lambda: Training(Language("plain"), tokens, _adam),
    "gpt_reentrant": lambda: Training(Language("reentrant"), tokens, _adam),
    "gpt_checkpoints_autocast": lambda: Training(Language("plain"), tokens, autocast=torch.bfloat16),
    "mlp_in_a_checkpoint": lambda: Training(Perceptron(), vectors, call=checkpointed(False)),
    "mlp_in_a_reentrant_checkpoint": lambda: Training(Perceptron(), vectors, call=checkpointed(True)),
    "mlp_packed": lambda: Training(Perceptron(), vectors, call=packed),
    "lstm": lambda: Training(Recurrent(), sequences),
    "lstm_varies": lambda: Training(Recurrent(varies=True), sequences),
    "encoder": lambda: Training(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), sequences
    ),
    "threaded": lambda: Training(Threaded(), vectors),
    "raising": lambda: Training(Raising(), vectors),
    "keeping": lambda: Training(Keeping(), vectors),
    "differentiating": lambda: Training(Differentiating(), vectors),
    "recursive": lambda: Training(Recursive(), vectors),
    "hooked": lambda: Training(Hooked(), vectors),
}
