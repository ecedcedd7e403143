"""The main job on AlexNet with random weights: capture, look, lesion a channel, replay, draw, and prove that it was right.

Run it by `make demo`, or `python examples/demo.py`.
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
print(f"    the output moves by {(run.output - prog.output).abs().max():.4f}")

try:
    prog.draw("demo_alexnet.svg")
    run.draw("demo_lesion.svg")
    print("    drawn to demo_alexnet.svg, and how much each layer changed to demo_lesion.svg")
except replaylens.CannotDraw as missing:
    print(f"    no picture: {missing}")

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
