"""Lesion every channel of a small convolutional network, one by one, and see which ones each stripe direction needs.

python examples/lesion_units.py
"""

import torch
from small_models import DIRECTIONS, pictures, stripes

import replaylens as rl

model = stripes()
x, direction = pictures(200, seed=1000)
prog = rl.capture(model, x)


def correct(logits):
    """The accuracy for each direction."""
    right = (logits.argmax(1) == direction).float()
    return torch.stack([right[direction == number].mean() for number in range(4)])


# All channels of both layers: 16 lesions, one call. The sweep runs over the bracketed axis `[c]`.
lesions = rl.sweep(prog, ["relu_1", "relu_2"], "b [c] h w", rl.Zero(), metric=correct)

print("Accuracy in %, for the whole network and without one channel:\n")
print(f"{'':12}" + "".join(f"{name:>12}" for name in DIRECTIONS))
print(f"{'whole':12}" + "".join(f"{100 * share:12.0f}" for share in lesions.baseline))
for layer, channel in lesions:
    print(f"{layer} c={channel}  " + "".join(f"{100 * share:12.0f}" for share in lesions[layer, channel]))

loss = lesions.baseline - lesions.grid  # (layer, channel, direction)
worst = loss[1].flatten().argmax()
channel, which = divmod(int(worst), 4)
print(f"\nThe strongest single lesion of relu_2: without channel {channel}, {DIRECTIONS[which]} stripes are")
print(f"recognised in {100 * lesions['relu_2', channel][which]:.0f}% of the pictures.")

# Two channels at once, in the centre only: another part of the same tensor.
part = rl.Part("b [c] [h] [w]", c=[channel, (channel + 1) % 8], h=slice(2, 6), w=slice(2, 6))
run = prog.replay(patch={"relu_2": rl.Zero(part)})
print(f"\n{rl.Zero(part)}\nleaves an accuracy of {100 * correct(run.output).mean():.0f}%.")

# The same by a hook. F.relu is no module that could be hooked, but -1 before it becomes 0 after it.
hook = model.conv2.register_forward_hook(
    lambda module, inputs, output: output.index_fill(1, torch.tensor(channel), -1.0)
)
by_hook = correct(model(x))
hook.remove()
assert torch.equal(by_hook, lesions["relu_2", channel])
print("\nThe same lesion, made by a hook on the model, gives the same accuracy.")
