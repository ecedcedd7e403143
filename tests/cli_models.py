"""Models that tests/test_cli.py names on the command line."""

import sys

import torch
from torch import nn

OFF = "Disable{}Function".format("Torch")  # as no name in the code says, so that the capture does not see it coming


linear = nn.Linear(4, 2)
not_a_model = 3


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def with_inputs() -> tuple:
    return nn.Embedding(10, 4), (torch.tensor([1, 2, 3]),)


def with_keywords() -> tuple:
    return scaled, (torch.ones(2, 3),), {"scale": 2.0}


def scaled(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    return x * scale


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.fc(x)
        with getattr(torch._C, OFF)():
            number = x.sum().item()
        return x * number


def hidden() -> nn.Module:
    return Hidden()


def leaves() -> nn.Module:
    sys.exit(0)
