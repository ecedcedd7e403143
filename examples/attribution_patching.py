"""Attribution patching: estimate the effect of all patches from one backward pass, and compare with the true effects.

python examples/attribution_patching.py
"""

import torch
from small_models import induction, pair

import replaylens as rl

model, words = induction(), pair()
clean, corrupt = rl.capture(model, words.clean), rl.capture(model, words.corrupt)

heads = ["scaleddotproductattention_1", "scaleddotproductattention_2"]
part = "b [head] [position] d"
true = rl.sweep(corrupt, heads, part, rl.From(clean), metric=words.metric)

guesses = {
    "attribution patching": rl.attribution(clean, corrupt, words.metric, at=heads, part=part),
    "integrated gradients": rl.attribution(clean, corrupt, words.metric, at=heads, part=part, method="integrated"),
}

print("Effect of patching one head at one position on the preference for the correct letter:\n")
print(f"{'head':>30} {'true':>8}" + "".join(f"{name:>24}" for name in guesses))
for (site, head, position), effect in true.top(6):
    guessed = "".join(f"{float(guess[site][head, position]):24.2f}" for guess in guesses.values())
    print(f"layer {site[-1]} head {head} at {words.letters[position]:>9} {effect:8.2f}{guessed}")

effects = (true.grid - true.baseline).flatten()
print()
for name, guess in guesses.items():
    found = torch.stack([guess[site] for site in heads]).flatten()
    agreement = torch.corrcoef(torch.stack([effects, found]))[0, 1]
    print(f"{name}: correlation with true patching over {len(found)} sites: {agreement:.3f}")
print(f"\nTrue patching: {true.plan()}.")
print("Attribution patching: one replay and one backward pass, for any number of sites.")
