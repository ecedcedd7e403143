"""Steering: add a direction to the residual stream to make the transformer prefer another letter.

python examples/steering.py
"""

import torch
from small_models import LETTERS, induction, sequences, words

import replaylens as rl

model = induction()
tokens, _ = sequences(2000, torch.Generator().manual_seed(7))
prog = rl.capture(model, tokens[:, :15])

# The direction of a letter: the mean of the stream where the model predicts it, minus the mean elsewhere.
stream, said = prog["add_3"].value[:, -1], prog.output[:, -1].argmax(-1)
letter = LETTERS.index("q")
direction = stream[said == letter].mean(0) - stream[said != letter].mean(0)
print(
    f"direction of {LETTERS[letter]!r}: length {direction.norm():.1f}; the stream itself: {stream.norm(dim=-1).mean():.1f}\n"
)


def share(logits):
    """How often the letter ranks first, and its mean probability."""
    last = logits[:, -1]
    return torch.stack([(last.argmax(-1) == letter).float().mean(), last.softmax(-1)[:, letter].mean()])


# Patches are values: a dict of them defines a sweep. Only the last position is steered.
strengths = [-2.0, -1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0]
part = rl.Part("b [t] d", t=-1)
sweep = rl.sweep(prog, variants={k: {"add_3": rl.Add(k * direction, part)} for k in strengths}, metric=share)
for k in strengths:
    first, probability = sweep[k].tolist()
    print(
        f"{k:+5.2f} x direction: says {LETTERS[letter]!r} in {100 * first:5.1f}%  {'#' * round(40 * first):40} mean probability {probability:.2f}"
    )

# The opposite: project the direction off. What does the model say now where it said the letter?
lost = prog.replay(patch={"add_3": rl.Project(direction, part, off=True)}).output[:, -1].argmax(-1)
among = said == letter
print(
    f"\nProjected off: of {int(among.sum())} sequences where it said {LETTERS[letter]!r}, it says so in {int((lost[among] == letter).sum())}."
)
print(
    f"The others are hardly affected: {100 * float((lost == said)[~among].float().mean()):.1f}% of them get the same letter as before."
)

# On one sequence.
one = rl.capture(model, tokens[:1, :15])
for k in (0.0, 1.0):
    run = one.replay(patch={"add_3": rl.Add(k * direction, part)})
    print(f"{words(one.inputs[0])} -> {words(run.output[0, -1].topk(3).indices)}   with {k:.0f} x direction")
