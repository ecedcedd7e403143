"""Follow the representation of a recurrent network over its time steps, with its lateral connections and without them.

python examples/rsa_over_time.py
"""

import rsatoolbox
import torch
from small_models import DIRECTIONS, pictures
from torch import nn
from torch.nn import functional as F

import replaylens as rl

STEPS = 6


class Recurrent(nn.Module):
    """One layer that reads the picture and, again and again, itself."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Conv2d(1, 8, 5, padding=2)
        self.lateral = nn.Conv2d(8, 8, 5, padding=2, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        drive, state = self.below(x), x.new_zeros(len(x), 8, 16, 16)
        for _ in range(STEPS):
            state = F.relu(drive + self.lateral(state))
        return self.head(state.mean((2, 3)))


def noisy(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes in so much noise that one look does not tell their direction."""
    x, direction = pictures(count, seed)
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)), direction


torch.manual_seed(0)
model = Recurrent()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(100):
    x, direction = noisy(64, seed=step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), direction).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
model.eval().requires_grad_(False)

x, direction = noisy(160, seed=1000)
labels = {"stimulus": list(range(160)), "direction": [DIRECTIONS[which] for which in direction]}
wanted = rsatoolbox.rdm.RDMs((direction[:, None] != direction).double().numpy()[None])  # same direction or not


def measured(edit=None):
    """The features of a network, how alike each two of its steps are, how alike each is to the RDM of directions."""
    # relu_1 runs in every step: its array has an axis "time".
    features = rl.extract(model, x, ["relu_1", "head"], batch_size=40, labels=labels, edit=edit)
    rdms = features.rdms("relu_1")
    compare = rsatoolbox.rdm.compare
    return features, compare(rdms, rdms, method="corr"), compare(rdms, wanted, method="corr")[:, 0]


def shown(features, table, to_direction):
    right = (features["head"].torch().argmax(1) == direction).float().mean()
    probes = rl.probe(features, "direction", "relu_1", cv=4)
    print(
        f"{100 * right:.0f}% right. The correlation of the RDMs of its steps, with that of directions, and a probe:\n"
    )
    print(f"{'':10}" + "".join(f"{name:>10}" for name in [*probes, "direction", "probe"]))
    for name, row, share in zip(probes, table, to_direction):
        print(f"{name:10}" + "".join(f"{value:10.2f}" for value in [*row, share, probes.mean[name]]))


whole, without = measured(), measured(lambda prog: prog.lesion("conv2d_2"))
print(whole[0]["relu_1"], "\n")
print("The whole network:", end=" ")
shown(*whole)
print("\nWithout lateral connections:", end=" ")
shown(*without)

first, last = whole[2][0], whole[2][-1]
print(f"\nRecurrence sorts the pictures by direction: {first:.2f} at the first step, {last:.2f} at the last.")
for step in range(1, STEPS + 1):
    assert torch.equal(whole[0]["relu_1:1"].torch(), without[0][f"relu_1:{step}"].torch())
print("The first step is the same in both, bit for bit; without lateral connections so are all the others.")
