"""Models from published figures of computational graphs, all small except AlexNet.

`DemoNetwork`: a tensor that depends on no input, a buffer, and a division, whose arguments are ordered.
`RecurrentNetwork`: three passes of one layer.
`NetworkOrganizationDemo`: nested modules, branches, and a condition.
`AlexNet`: Krizhevsky's one-tower network, as usually implemented.
"""

import torch
from torch import nn


class DemoNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu_module = nn.ReLU()
        self.fc = nn.Linear(5, 5)
        self.register_buffer("example_buffer", torch.ones(5))

    def forward(self, x):
        x = self.fc(self.relu_module(x + 1))
        x = nn.functional.relu(x)
        x = x + torch.randn(x.shape)
        return x / x**2 * self.example_buffer


class RecurrentNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        for _ in range(3):
            x = (self.fc(x) + 1) * 2
        return x


class Inner(nn.Module):
    def forward(self, x):
        x = x + 2
        return torch.cos(x) + torch.sin(x) + torch.tan(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.submodule2 = Inner()

    def forward(self, x):
        return self.submodule2(x + 1) * 4


class NetworkOrganizationDemo(nn.Module):
    def __init__(self):
        super().__init__()
        self.submodule1 = Outer()

    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        else:
            x = x + 1
        x = 1 / x + torch.log(x) + x**2
        return (self.submodule1(x) + 1) * 2


class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True)),
            *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
            nn.Linear(4096, 1000),
        )

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))
