"""The main workflow on an AlexNet with random weights: capture, inspect, lesion channels, replay, draw, and check.

Run `make demo`, or `python examples/demo.py`.
"""

import torch
from figure_models import AlexNet

import replaylens


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
print(f"    the output changes by up to {(run.output - prog.output).abs().max():.4f}")

try:
    prog.draw("demo_alexnet.svg")
    run.draw("demo_lesion.svg")
    print("    drawn: demo_alexnet.svg, and demo_lesion.svg with the change of each layer")
except replaylens.CannotDraw as missing:
    print(f"    no picture: {missing}")

with torch.no_grad():
    plain = model(image)
hook = model.features[7].register_forward_hook(lambda module, inputs, output: lesion(output.clone()))
with torch.no_grad():
    hooked = model(image)
hook.remove()
assert torch.equal(prog.output, plain), "the program's output is the model's, bit for bit"
assert torch.equal(prog.replay().output, plain), "and so is the output of a replay"
assert torch.equal(run.output, hooked), "and the lesion gives what a hook on the model gives"
print("\nThe same lesion, made by a hook on the model, gives the same output bit for bit.")

print()
print(prog.check())
