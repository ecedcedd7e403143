"""`python bench/watch.py [mlp cnn gpt]`: what a watch costs a training, next to its budget.

Two copies of a model are trained in turns, a block of steps each, in one process on one thread: one plain, one watched.
The clock is the CPU time of that thread, so that children on the other core do not count; they do run, with a sink that
throws everything away. A ratio is the mean over all rounds without the largest and smallest twentieth, since what is
sampled every 20th step is no median's matter. "plain" against a second plain copy shows what noise is.
"""

import sys
import tempfile
from collections.abc import Callable
from time import thread_time

import torch
from torch import nn
from torch.nn import functional as F

import replaylens as rl

SECONDS = 20.0
BLOCK = 20  # steps, of which one is sampled where every=20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 12, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(5000, 768), nn.Sequential(*[Block(768) for _ in range(4)])
        self.head = nn.Linear(768, 5000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids)))


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(128, 784), torch.randint(0, 10, (128,))


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if after == 64 else []
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Flatten(), nn.Linear(64 * 256, 10))
    return model, torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Gpt(), torch.randint(0, 5000, (2, 32)), torch.randint(0, 5000, (2, 32))


MODELS = {"mlp": mlp, "cnn": cnn, "gpt": gpt}
ALL = ("activation", "grad", "input", "weight", "weight_grad", "update")
CASES: dict[str, tuple[dict, dict[str, float]]] = {  # what is watched, and the budget of each model
    "plain": ({}, {}),
    "paused": ({"every": 1}, {"mlp": 1.01, "cnn": 1.01, "gpt": 1.01}),
    "activation + grad, every 20": ({"every": 20}, {"mlp": 1.02, "cnn": 1.015, "gpt": 1.015}),
    "activation + grad, every 1": ({"every": 1}, {"mlp": 1.25, "cnn": 1.25, "gpt": 1.25}),
    "all kinds, every 20": ({"every": 20, "what": ALL}, {}),
    "when=NotFinite()": ({"when": "finite"}, {"mlp": 1.03, "cnn": 1.03, "gpt": 1.03}),
    "when=Above(grad_norm=)": ({"when": "norm"}, {"mlp": 1.06, "cnn": 1.06, "gpt": 1.06}),
    "operations, every 20": (
        {"every": 20, "layers": ["relu", "softmax", "gelu"]},
        {"mlp": 1.04, "cnn": 1.04, "gpt": 1.04},
    ),
    "operations, every 1": ({"every": 1, "layers": ["relu", "softmax", "gelu"]}, {"mlp": 1.5, "gpt": 1.2}),
}


def trainer(name: str) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return model, step


def watched(name: str, wishes: dict) -> tuple[Callable[[], None], rl.Watch]:
    model, step = trainer(name)
    when = {"finite": rl.NotFinite(), "norm": rl.Above(grad_norm=1e9)}.get(wishes.get("when", ""))
    if when is not None:
        return step, rl.watch(model, when=when, folder=tempfile.gettempdir())
    layers = wishes.get("layers", "**")
    if name == "cnn" and isinstance(layers, list):
        layers = ["relu"]
    if name == "mlp" and isinstance(layers, list):
        layers = ["relu"]
    return step, rl.watch(
        model, layers, **{k: v for k, v in wishes.items() if k != "layers"}, sink="null_sink:NullSink"
    )


def measured(one: Callable[[], None], other: Callable[[], None], seconds: float) -> float:
    """The ratio of two kinds of steps, in CPU time of this thread."""
    for _ in range(2 * BLOCK):
        one(), other()
    rounds: list[float] = []
    begin = thread_time()
    while thread_time() - begin < seconds or len(rounds) < 8:
        times = []
        for step in (one, other) if len(rounds) % 2 else (other, one):
            start = thread_time()
            for _ in range(BLOCK):
                step()
            times.append(thread_time() - start)
        first, second = times if len(rounds) % 2 else reversed(times)
        rounds.append(second / first)
    rounds.sort()
    cut = len(rounds) // 20
    kept = rounds[cut : len(rounds) - cut]
    return sum(kept) / len(kept)


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        print(f"{name}:")
        for case, (wishes, budgets) in CASES.items():
            _, plain = trainer(name)
            step, watch = (trainer(name)[1], None) if case == "plain" else watched(name, wishes)
            if case == "paused":
                watch.pause()
            found = measured(plain, step, SECONDS)
            budget = f", budget {budgets[name]:g}" if name in budgets else ""
            said = ""
            if watch is not None:
                stats = watch.stats()
                said = f"   ({stats.sent:,} samples, {stats.dropped:,} dropped)"
                watch.close()
            print(f"    {case:32s} {found:.3f}{budget}{said}", flush=True)


if __name__ == "__main__":
    main()
