"""Activation patching: find where, by layer and position, a transformer holds what it needs to continue a sequence.

python examples/activation_patching.py [picture.png]
"""

import importlib.util
import sys

from small_models import induction, pair

import replaylens as rl

model, words = induction(), pair()
clean, corrupt = rl.capture(model, words.clean), rl.capture(model, words.corrupt)
print("positions:", "  ".join(words.letters))
print(
    f"preference for the correct letter: clean {words.metric(clean.output):.1f}, corrupt {words.metric(corrupt.output):.1f}\n"
)

# The residual stream after the embedding and after each of the two attention layers, at every position: 39 patches.
stream = ["add_1", "add_2", "add_3"]
sweep = rl.sweep(corrupt, stream, "b [position] d", rl.From(clean), metric=words.metric)
print("plan:", sweep.plan(), "\n")

print("Corrupt run with one clean value patched in; preference recovered, in %:\n")
whole = float(words.metric(clean.output) - sweep.baseline)
print(f"{'':6}" + "".join(f"{letter:>8}" for letter in words.letters))
for site, row in zip(stream, sweep.grid):
    print(f"{site:6}" + "".join(f"{100 * float(value - sweep.baseline) / whole:8.0f}" for value in row))

places = [max(range(13), key=lambda position: float(sweep[site, position])) for site in stream]
print(f"\nThe clue moves: position {places[0]} -> {places[1]} -> {places[2]}.")
print("It starts at the letter that was changed. The first layer copies it to the next position (every letter learns")
print("its predecessor). The second layer finds it there and carries the answer to the end.")

if importlib.util.find_spec("matplotlib") is None:
    print("\nNo picture: matplotlib is not installed.")
else:
    import matplotlib

    matplotlib.use("Agg")
    picture = sys.argv[1] if len(sys.argv) > 1 else "activation_patching.png"
    ax = sweep.heatmap()
    ax.set_xticks(range(13), labels=words.letters)
    ax.set_yticks(range(3), labels=["embedding", "after layer 1", "after layer 2"])
    ax.set_title("clean values patched into the corrupt run")
    ax.figure.savefig(picture, dpi=120)
    print(f"\nPicture: {picture}")
