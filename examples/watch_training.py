"""Watch a small CNN learn: a page in the browser, a film, numbers in a file; and the step that went wrong, as a program.

python examples/watch_training.py [folder]
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import replaylens as rl

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "watched")
CLASSES = ["horizontal", "vertical", "diagonal", "disc"]


def shapes(count, generator):
    """Pictures of bars and discs in noise, and which they are."""
    labels = torch.randint(0, 4, (count,), generator=generator)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    centre = 4 + 8 * torch.rand(count, 2, 1, 1, generator=generator)
    dy, dx = y - centre[:, 0], x - centre[:, 1]
    forms = torch.stack([dy.abs() < 1.2, dx.abs() < 1.2, (dy - dx).abs() < 1.5, dy.square() + dx.square() < 12], 1)
    pictures = forms[torch.arange(count), labels].float()
    return (pictures + 0.4 * torch.randn(count, 16, 16, generator=generator))[:, None], labels


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.late = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.head = nn.Linear(16 * 4, 4)

    def forward(self, x):
        x = (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)  # a mistake: 0 / 0 if it is empty
        return self.head(F.adaptive_avg_pool2d(self.late(self.early(x)), 2).flatten(1))


torch.manual_seed(0)
model, generator = Net(), torch.Generator().manual_seed(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with rl.watch(
    model,
    ["early.0", "early.2", "late.0", "late.2", "head"],
    every=5,
    what=("activation", "grad", "weight"),
    sink=[folder / "numbers.jsonl", folder / "training.mp4"],
    when=rl.NotFinite(),  # the first step with a NaN or an infinity is written to a file
    folder=folder,
) as watch:
    for step in range(200):
        if step % 50 == 0:
            watch.note(f"epoch {step // 50}")
        pictures, labels = shapes(64, generator)
        if step == 137:
            pictures[7] = 0.0  # one empty picture in the data
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            print(f"step {step}: loss {loss:.3f}")

print(watch.stats())
[wrong] = watch.alarms
print(f"\nthe step that went wrong: {wrong.number}, in {wrong.path}: {wrong.reason}")

prog = rl.step(wrong.path).capture(Net())  # in any process that has the class
first = prog.first(lambda value: ~torch.isfinite(value))
print(f"the first value that is not finite: {first.label}, at {first.source}")
