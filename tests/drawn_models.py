"""Small models, and what is drawn of them: `PICTURES[name]()` gives the text that stands in `golden/name.dot`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import replaylens as rl

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import figure_models as figures

PICTURES: dict[str, Callable[[], str]] = {}


def picture(make):
    PICTURES[make.__name__] = lambda: make().source
    return make


def captured(model, *args, **kwargs):
    torch.manual_seed(0)
    return rl.capture(model, *(args or (torch.rand(5, 5),)), **kwargs)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.register_buffer("gain", torch.ones(width))

    def forward(self, x, mask):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.gain * mask


class Stack(nn.Module):
    def __init__(self, blocks=4, width=4):
        super().__init__()
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(F.relu(x))


def stack(blocks=4):
    """Every weight a half: numbers that are drawn are the same on every machine."""
    model = Stack(blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return captured(model, torch.arange(6.0).view(2, 3))


class Shared(nn.Module):
    """One module, called from two others."""

    def __init__(self):
        super().__init__()
        self.core = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
        self.left, self.right = nn.Sequential(self.core, nn.Tanh()), nn.Sequential(self.core, nn.Sigmoid())

    def forward(self, x):
        return self.right(self.left(x))


class Many(nn.Module):
    """Several inputs and outputs, a call that gives several tensors, a write in place, an edge used twice."""

    def forward(self, x, scale):
        left, right = x.split(2)
        left = left * left
        right = torch.cat([left, right - scale])
        right[0] = 1.0
        return {"left": left, "both": (right, scale / left)}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(x)


class Towers(nn.Module):
    """A row of layers that is repeated, and is no module of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(5, 5), nn.ReLU())])

    def forward(self, x):
        return self.layers(x).sum()


# -- the figures --------------------------------------------------------------------------------------------------------


@picture
def demo_network():
    return captured(figures.DemoNetwork()).draw()


@picture
def recurrent_network():
    return captured(figures.RecurrentNetwork()).draw()


@picture
def recurrent_network_rolled():
    return captured(figures.RecurrentNetwork()).draw(rolled=True)


@picture
def network_organization():
    return captured(figures.NetworkOrganizationDemo()).draw()


@picture
def alexnet():
    with torch.device("meta"):
        model, image = figures.AlexNet().eval(), torch.empty(1, 3, 224, 224)
    return captured(model, image).draw()


# -- one difficulty each ------------------------------------------------------------------------------------------------


@picture
def several_inputs_and_outputs():
    return captured(Many(), torch.ones(4, 3), torch.ones(())).draw()


@picture
def a_module_called_from_two_others():
    return captured(Shared()).draw(rolled=True)


@picture
def batch_norm_that_writes_its_buffers():
    return captured(Normed().train()).draw()


@picture
def batch_norm_without_its_buffers():
    return captured(Normed().train()).draw(buffers=False)


@picture
def modules_as_one_box_each():
    return stack(2).draw(depth=1, direction="LR", theme="dark")


@picture
def one_module_alone():
    return stack(2).draw(module="blocks.1", buffers=False)


@picture
def repeated_blocks_once():
    return stack(5).draw(fold=True)


@picture
def a_repeated_row_that_is_no_module():
    return captured(Towers()).draw(fold=True, gradients=True)


@picture
def edited():
    return stack(2).swap("relu", F.gelu).lesion("blocks.0", "b [d]", d=[1]).draw()


@picture
def difference():
    prog = stack(2)
    return prog.swap("relu", F.gelu).lesion("blocks.0").draw(against=prog, labels="name")


@picture
def replay():
    return stack(3).replay(patch={"blocks.1": rl.Zero()}).draw(fold=True, labels="name")


@picture
def coloured_by_numbers():
    return stack(2).draw(depth=1, values={"blocks.0": -1.0, "blocks.1": 2.0, "head": 0.5})
