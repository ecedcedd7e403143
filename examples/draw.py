"""Draw the pictures of docs/drawing.md into a folder: `python examples/draw.py docs/pictures`. Needs graphviz's `dot`.

The models of published figures, a lesion and its effect, a diff of two programs, a number for each layer, and a
transformer of 60 blocks folded into one.
"""

import sys
from pathlib import Path

import torch
from figure_models import AlexNet, DemoNetwork, NetworkOrganizationDemo, RecurrentNetwork
from small_models import pictures, stripes
from torch import nn
from torch.nn import functional as F

import replaylens as rl

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "pictures")
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
x = torch.rand(5, 5)


def drawn(name, source):
    print(f"{name:24s} {source.source.count('label=') - 1:4d} labels")


def draw(name, prog, **options):
    drawn(name, prog.draw(folder / f"{name}.svg", **options))


# The figures.
draw("demo_network", rl.capture(DemoNetwork(), x))
recurrent = rl.capture(RecurrentNetwork(), x)
draw("recurrent_unrolled", recurrent)
draw("recurrent_rolled", recurrent, rolled=True)
organization = rl.capture(NetworkOrganizationDemo(), x)
draw("network_organization", organization)
draw("one_module", organization, module="submodule1.submodule2", direction="LR")
draw("alexnet", rl.capture(AlexNet().eval(), torch.rand(1, 3, 224, 224)))

# A lesion in a network that classifies the direction of stripes: how much each layer changes.
cnn, (images, _) = stripes(), pictures(32, seed=1)
prog = rl.capture(cnn, images)
run = prog.replay(patch={"relu_1": rl.Zero("b [c] h w", c=[0, 1, 2])})
drawn("lesion", run.draw(folder / "lesion.svg", direction="LR"))

# The same lesion as an edit, with another nonlinearity, as a diff against the original.
edited = prog.lesion("relu_1", "b [c] h w", c=[0, 1, 2]).swap("relu_2", F.gelu)
draw("difference", edited, against=prog, direction="LR")

# A number for each layer: the mean magnitude of its value.
draw("values", prog, values=lambda layer: layer.value.abs().mean(), labels="name", direction="LR")

# A transformer of 60 blocks: two thousand operations.
blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 60, enable_nested_tensor=False)
large = rl.capture(blocks.eval(), torch.rand(1, 6, 16))
print(f"{len(large.graph.calls)} operations:")
draw("folded", large, fold=True, depth=3)
