"""The models of the benchmark: two CNNs, two that are nothing but overhead, one transformer; and transformers that
generate.

`build(name)` returns a model in eval mode and its arguments. `MIDDLE` names one module call about halfway through each,
where a replay starts.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AlexNet(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(image)).flatten(1))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut. Its ReLU and its sum write in place, like torchvision's."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or width_in != width:
            self.shortcut.append(nn.Conv2d(width_in, width, kernel_size=1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = pairwise((64, 64, 128, 256, 512))
        self.stages = nn.Sequential(
            *(
                nn.Sequential(ResidualBlock(width_in, width, 1 if i == 0 else 2), ResidualBlock(width, width, 1))
                for i, (width_in, width) in enumerate(widths)
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.avgpool(self.stages(self.stem(image))).flatten(1))


class MLP(nn.Module):
    """So little work per op that only overhead is measured."""

    def __init__(self, depth: int = 200, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class RNN(nn.Module):
    """The same two layers at every step: 500 passes of each."""

    def __init__(self, width: int = 32, steps: int = 500) -> None:
        super().__init__()
        self.steps = steps
        self.read = nn.Linear(width, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], x.shape[2])
        for t in range(self.steps):
            h = torch.tanh(self.read(x[:, t]) + self.hidden(h))
        return self.out(h)


def gpt2(**options: object) -> nn.Module:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import_module("torchvision_ops")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = import_module("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{"use_cache": False, **options}))


class Generating(nn.Module):
    """Greedy generation, with a cache."""

    def __init__(self, tokens: int, **options: object) -> None:
        super().__init__()
        self.model, self.tokens = gpt2(use_cache=True, **options), tokens

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.generate(ids, max_new_tokens=self.tokens, do_sample=False, pad_token_id=0)


TINY = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 100, "n_positions": 64}


BUILDERS = {
    "alexnet": lambda: (AlexNet(), (torch.randn(1, 3, 224, 224),)),
    "resnet18": lambda: (ResNet18(), (torch.randn(1, 3, 224, 224),)),
    "gpt2": lambda: (gpt2(), (torch.randint(0, 50257, (1, 64)),)),
    "generate": lambda: (Generating(20, **TINY), (torch.randint(0, 100, (1, 5)),)),
    "generate-gpt2": lambda: (Generating(10), (torch.randint(0, 50257, (1, 5)),)),
    "mlp200": lambda: (MLP(), (torch.randn(8, 64),)),
    "rnn500": lambda: (RNN(), (torch.randn(4, 500, 32),)),
}
MIDDLE = {  # module, which of its calls
    "alexnet": ("features.6", 1),
    "resnet18": ("stages.1", 1),
    "gpt2": ("transformer.h.5", 1),
    "mlp200": ("layers.99", 1),
    "rnn500": ("hidden", 250),
}
GENERATING = ("generate", "generate-gpt2")
NAMES = tuple(name for name in BUILDERS if name not in ("gpt2", *GENERATING) or find_spec("transformers"))


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, args = BUILDERS[name]()
    return model.eval(), args
