"""The main job on AlexNet with random weights: capture, look, lesion a channel, replay, and prove that it was right.

Run it by `make demo`, or `python examples/demo.py`.
"""

import torch
from torch import nn

import replaylens


class AlexNet(nn.Module):
    """Krizhevsky's one-tower network, as it is usually written."""

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


def lesion(activation):
    """Silence two channels."""
    activation[:, [3, 7]] = 0
    return activation


torch.manual_seed(0)
model, image = AlexNet().eval(), torch.rand(1, 3, 224, 224)

prog = replaylens.capture(model, image)
print(prog)
print()
print(prog["conv2d_3_7"])

run = prog.replay(from_="relu_3", patch=lesion)
print(f"\nA lesion of two channels at relu_3 executes {len(run.executed)} of {len(prog.graph.calls)} calls:")
print("   ", ", ".join(run.executed[:4]), "...")
print(f"    the output moves by {(run.output - prog.output).abs().max():.4f}")

with torch.no_grad():
    plain = model(image)
hook = model.features[7].register_forward_hook(lambda module, inputs, output: lesion(output.clone()))
with torch.no_grad():
    hooked = model(image)
hook.remove()
assert torch.equal(prog.output, plain), "the program's output is the model's, to the last bit"
assert torch.equal(prog.replay().output, plain), "and so is a replay's"
assert torch.equal(run.output, hooked), "and the lesion's is what a hook on the model gives"
print("\nThe same lesion by a hook on the model gives the same output, bit for bit.")

print()
print(prog.check())
