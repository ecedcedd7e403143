"""Two small models for the examples, each trained here in a few seconds on one core, reproducibly.

`stripes()`  a convolutional network that classifies the direction of stripes in a picture.
`induction()`  a two-layer attention-only transformer that continues a sequence it has seen before: after
    "... c a t ... c a" it predicts "t". That takes two heads, one in each layer, and patching finds them.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

# -- stripes ------------------------------------------------------------------------------------------------------------

DIRECTIONS = ("horizontal", "falling", "vertical", "rising")


def pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (count, 1, 16, 16) of noisy stripes, and the index of each one's direction."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.arange(count) % 4
    angle = direction * math.pi / 4
    phase, length = (torch.rand(count, 1, 1, generator=generator) for _ in range(2))
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    across = y * angle.cos()[:, None, None] - x * angle.sin()[:, None, None]
    picture = torch.sin(2 * math.pi * (across / (4 + 2 * length) + phase))
    return (picture + 0.5 * torch.randn(picture.shape, generator=generator))[:, None], direction


class Stripes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        return self.head(x.mean((2, 3)))


def stripes() -> Stripes:
    """The trained network."""
    torch.manual_seed(0)
    model = Stripes()
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for step in range(60):
        x, direction = pictures(64, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), direction).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


# -- induction ----------------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(z.transpose(1, 2).flatten(2))


class Induction(nn.Module):
    """Attention only: the output of each head is added to the residual stream."""

    def __init__(self, letters: int = 26, length: int = 15, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.position = nn.Embedding(length, width)
        self.attn1 = Attention(width, heads)
        self.attn2 = Attention(width, heads)
        self.unembed = nn.Linear(width, letters, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        x = x + self.attn1(x)
        x = x + self.attn2(x)
        return self.unembed(x)


def sequences(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences (count, 16) that repeat 4 to 8 different letters, and where the next letter is determined by the past."""
    order = torch.rand(count, 26, generator=generator).argsort(1)
    period = torch.randint(4, 9, (count, 1), generator=generator)
    return order.gather(1, torch.arange(16) % period), torch.arange(1, 16) > period


def induction() -> Induction:
    """The trained transformer."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, steps = Induction(), 300
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    for step in range(steps):
        tokens, is_told = sequences(64, generator)
        optimizer.param_groups[0]["lr"] = 2e-2 * min(1, (step + 1) / 50) * (1 - step / steps)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1])[is_told], tokens[:, 1:][is_told]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Pair:
    """A sequence that determines its next letter, and the same with one letter changed, so that it does not."""

    clean: torch.Tensor
    corrupt: torch.Tensor
    answer: int

    def metric(self, logits: torch.Tensor) -> torch.Tensor:
        """The logit of the answer at the last position, relative to the mean."""
        last = logits[0, -1]
        return last[self.answer] - last.mean()

    @property
    def letters(self) -> list[str]:
        """Each position with its letter: "0 h"; where the two differ, "6 a/z"."""
        pairs = enumerate(zip(words(self.clean), words(self.corrupt), strict=True))
        return [f"{n} {one}" if one == other else f"{n} {one}/{other}" for n, (one, other) in pairs]


def pair() -> Pair:
    """Clean "houseplhousep" determines l; in the corrupt one the first p is another letter, and nothing does."""
    clean, corrupt = (torch.tensor([[LETTERS.index(letter) for letter in word]]) for word in WORDS)
    return Pair(clean, corrupt, LETTERS.index("l"))


WORDS = ("housepl" + "housep", "housexl" + "housep")


def words(tokens: torch.Tensor) -> str:
    return "".join(LETTERS[token] for token in tokens.flatten().tolist())
