"""Path patching: find out whether the first layer reaches the second through its queries, keys or values.

python examples/path_patching.py
"""

from small_models import induction, pair

import replaylens as rl

model, words = induction(), pair()
clean, corrupt = rl.capture(model, words.clean), rl.capture(model, words.corrupt)
before = float(words.metric(clean.output))
print(f"preference for the correct letter: clean {before:.1f}, corrupt {words.metric(corrupt.output):.1f}\n")

# The sender is one head of layer 1, with its corrupt value. Only the receiver sees it.
receivers = {
    "queries of layer 2": "attn2.q",
    "keys of layer 2": "attn2.k",
    "values of layer 2": "attn2.v",
    "logits, directly": "unembed",
}
print(f"{'corrupt':>10} felt only through" + " " * 10 + "preference")
for head in (0, 1):
    sender = "scaleddotproductattention_1", rl.Part("b [head] t d", head=head)
    for name, receiver in receivers.items():
        found = rl.path_patch(clean, corrupt, sender, receiver, words.metric)
        print(f"    head {head}  {name:22} {found:8.1f}  {'#' * round(max(0.0, before - float(found)) * 2)}")

print("\nThe second layer looks for positions whose keys encode the preceding letter. Head 0 of layer 1 writes that.")

# A single edge: what the keys read from the sum, and no other reader.
run = clean.replay(patch={rl.Edge("add_2", "attn2.k"): rl.From(corrupt)})
print(f"\nOnly the edge from the stream after layer 1 to the keys is corrupt: {words.metric(run.output):.1f}")
for receiver in ("attn2.q", "attn2.v"):
    run = clean.replay(patch={rl.Edge("add_2", receiver): rl.From(corrupt)})
    print(f"only the edge to {receiver}: {words.metric(run.output):.1f}")
