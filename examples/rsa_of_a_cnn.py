"""Compare the layers of a small convolutional network by their representational dissimilarity, whole and with a lesion.

python examples/rsa_of_a_cnn.py [features.zarr]
"""

import sys
import tempfile
from pathlib import Path

import rsatoolbox
from small_models import DIRECTIONS, pictures, stripes

import replaylens as rl

LAYERS = ["relu_1", "avgpool2d_1", "relu_2", "mean_1", "head"]

model = stripes()
x, direction = pictures(100, seed=1000)
labels = {
    "stimulus": [f"{DIRECTIONS[which]} {number // 4}" for number, which in enumerate(direction)],
    "direction": [DIRECTIONS[which] for which in direction],
}

# One pass over all pictures: an array a layer, and a row a picture. The files are zarr, which others open with xarray.
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "features.zarr"
features = rl.extract(model, x, LAYERS, to=folder, batch_size=25, labels=labels)
print(features)

# Two pictures are as unlike as 1 - the correlation of their activations. The model RDM says: same direction or not.
rdms = features.rdms(LAYERS)
wanted = rsatoolbox.rdm.RDMs((direction[:, None] != direction).double().numpy()[None])
table = rsatoolbox.rdm.compare(rdms, rdms, method="spearman")
to_direction = rsatoolbox.rdm.compare(rdms, wanted, method="spearman")[:, 0]
probes = rl.probe(features, "direction", LAYERS)

print("\nHow alike the layers are (Spearman correlation of their RDMs), how alike to the RDM of directions,")
print("and how often a linear probe finds the direction:\n")
print(f"{'':12}" + "".join(f"{layer:>12}" for layer in [*LAYERS, "direction", "probe"]))
for layer, row, share in zip(LAYERS, table, to_direction):
    print(f"{layer:12}" + "".join(f"{value:12.2f}" for value in [*row, share, probes.mean[layer]]))

# The same pictures without a channel. Nothing before it changes; what a layer behind it makes of the rest is seen.
print("\nWithout one channel of relu_1: how alike each layer is to itself in the whole network\n")
print(f"{'':12}" + "".join(f"{layer:>12}" for layer in LAYERS))
for channel in range(8):

    def without(prog, channel=channel):
        return prog.lesion("relu_1", "b [c] h w", c=[channel])

    hurt = rl.extract(model, x, LAYERS, batch_size=25, labels=labels, edit=without)
    row = [rsatoolbox.rdm.compare(hurt.rdms(layer), features.rdms(layer), method="spearman")[0, 0] for layer in LAYERS]
    print(f"channel {channel:<4}" + "".join(f"{value:12.2f}" for value in row))

# An RDM by hand, from hooks.
kept = []
hook = model.conv2.register_forward_hook(lambda module, inputs, output: kept.append(output.relu()))
model(x)
hook.remove()
by_hand = 1 - kept[0].flatten(1).double().corrcoef()
assert abs(rl.rdm(features["relu_2"]) - by_hand.numpy()).max() < 1e-5
print("\nThe RDM of relu_2, made by a hook and a correlation, is the same.")
print(f"Linear CKA of relu_1 and relu_2: {rl.cka(features['relu_1'], features['relu_2']):.2f}")
