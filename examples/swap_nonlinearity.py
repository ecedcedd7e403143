"""Swap the nonlinearity: measure what a trained network keeps of its accuracy under another activation function.

python examples/swap_nonlinearity.py
"""

import torch
from small_models import pictures, stripes
from torch.nn import functional as F

import replaylens as rl

model = stripes()
x, direction = pictures(200, seed=1000)
prog = rl.capture(model, x)


def right(program):
    return 100 * float((program.output.argmax(1) == direction).float().mean())


# The new function gets relu's input, not its output.
programs = {
    "relu, as trained": prog,
    "gelu everywhere": prog.swap("relu", F.gelu),
    "silu everywhere": prog.swap("relu", F.silu),
    "tanh in the first layer": prog.swap("relu_1", torch.tanh),
    "softplus everywhere": prog.swap("relu", F.softplus),
    "none in the first layer": prog.bypass("relu_1"),
    "none at all": prog.bypass("relu"),
}
for name, program in programs.items():
    print(f"{name:26} {right(program):5.0f}% right")

gelu = programs["gelu everywhere"]
print(f"\nHistory: {' -> '.join(gelu.history)}\n")
print("\n".join(line for line in gelu.code.splitlines() if "relu" in line or "gelu" in line))

# The same by hand.
with torch.no_grad():
    features = F.gelu(model.conv2(F.avg_pool2d(F.gelu(model.conv1(x)), 2)))
    assert torch.equal(gelu.output, model.head(features.mean((2, 3))))
assert torch.equal(prog.output, model(x)), "the original program is unchanged"
print("\nThe same forward with gelu, written by hand, gives the same output bit for bit.")

# A derived program can be trained: as a module it has the model's own parameters (here, those of a new copy).
module = rl.capture(stripes().requires_grad_(), pictures(64, seed=0)[0]).swap("relu", F.softplus).module()
optimizer = torch.optim.Adam(module.parameters(), 2e-2)
for step in range(30):
    pictures_, directions = pictures(64, seed=step)
    optimizer.zero_grad()
    F.cross_entropy(module(pictures_), directions).backward()
    optimizer.step()
pictures_, directions = pictures(64, seed=2000)
share = 100 * float((module(pictures_).argmax(1) == directions).float().mean())
print(f"\nWith softplus instead of relu, after 30 steps of training: {share:.0f}% right")
