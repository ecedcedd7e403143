"""Small models, each with its own way to depend on the size of the batch, or to keep something between calls.

`MODELS` has a builder for each: it gives a model, and a function from a batch size to the arguments. `REFUSED` says at
which batch sizes a module of the program that was captured at a batch of two must refuse, because there the model
computes something else; everywhere else it must give the model's own bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Build = Callable[[], tuple[nn.Module, Callable[[int], tuple[Any, ...]]]]
MODELS: dict[str, Build] = {}
REFUSED: dict[str, tuple[int, ...]] = {}


def rows(size: int, *shape: int) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(size))


def case(*refused: int, shape: tuple[int, ...] = (8,)) -> Callable[[Any], Any]:
    """Registers a model: a class of modules, or a forward with an `nn.Linear(8, 8)` as `m.a` and another as `m.b`."""

    def register(made: Any) -> Any:
        def build() -> tuple[nn.Module, Callable[[int], tuple[Any, ...]]]:
            torch.manual_seed(0)
            model = made() if isinstance(made, type) else Plain(made)
            return model, lambda size: (rows(size, *shape),)

        MODELS[made.__name__] = build
        REFUSED[made.__name__] = refused
        return made

    return register


class Plain(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


# ---- sizes as numbers ------------------------------------------------------------------------------------------------


@case()
def viewed_by_the_batch(m, x):
    return m.b(F.relu(m.a(x)).view(x.shape[0], -1))


@case()
def viewed_with_the_rest_inferred(m, x):
    return m.b(F.relu(m.a(x)).reshape(-1, 8))


@case()
def viewed_as_a_size(m, x):
    return m.b(F.relu(m.a(x)).view(x.size()[:-1] + (2, 4)).reshape(x.size()))


@case()
def counted_rows(m, x):
    return m.b(F.relu(m.a(x))) + torch.arange(x.shape[0])[:, None]


@case()
def indexed_by_an_array(m, x):
    return m.b(F.relu(m.a(x)))[np.arange(x.shape[0])[::-1].copy()] * np.float64(x.shape[0])


@case()
def divided_by_the_batch(m, x):
    return m.b(F.relu(m.a(x))) / x.shape[0]


@case()
def scaled_by_a_root_of_the_batch(m, x):
    return m.b(F.relu(m.a(x))) * math.sqrt(len(x))


@case()
def filled_with_the_batch(m, x):
    return torch.full((x.size(0), 8), float(x.size(0))) + m.b(F.relu(m.a(x)))


@case()
def made_of_the_batch(m, x):
    return m.b(F.relu(m.a(x))) + torch.tensor([float(len(x))])


@case()
def mean_by_hand(m, x):
    return (m.b(F.relu(m.a(x))).sum(0) / x.shape[0]) + x


@case()
def numbers_chosen_by_the_batch(m, x):
    return m.b(F.relu(m.a(x))) * (2.0 if x.shape[0] > 4 else 3.0)


@case()
def expanded_to_the_batch(m, x):
    return torch.zeros(1, 8).expand(x.shape[0], 8) + m.b(F.relu(m.a(x)))


@case()
def linspaced(m, x):
    return m.b(F.relu(m.a(x))) * torch.linspace(0, 1, x.shape[0])[:, None]


@case()
def eye_of_the_batch(m, x):
    return torch.eye(x.shape[0]) @ m.b(F.relu(m.a(x)))


@case()
def masked_triangle(m, x):
    h = m.b(F.relu(m.a(x)))
    return h @ h.T * torch.tril(torch.ones(x.shape[0], x.shape[0]))


@case(1, 3, 7)
def python_list_of_the_batch(m, x):
    return m.b(F.relu(m.a(x))) + torch.tensor([float(i) for i in range(x.shape[0])])[:, None]


@case()
def repeated(m, x):
    return m.b(F.relu(m.a(x))).repeat(x.shape[0], 1)


@case()
def last_row_by_number(m, x):
    return m.b(F.relu(m.a(x)))[x.shape[0] - 1]


@case()
def first_half(m, x):
    return m.b(F.relu(m.a(x)))[: (x.shape[0] + 1) // 2]


@case()
def narrowed(m, x):
    return m.b(F.relu(m.a(x))).narrow(0, 0, x.shape[0])


@case()
def chosen_rows(m, x):
    return m.b(F.relu(m.a(x)))[torch.arange(x.shape[0]).flip(0)]


@case()
def rolled_by_the_batch(m, x):
    return m.b(F.relu(m.a(x))).roll(x.shape[0] // 2, 0)


@case()
def topped(m, x):
    return m.b(F.relu(m.a(x))).topk(min(3, x.shape[0]), 0).values


@case()
def flattened_whole(m, x):
    return m.b(F.relu(m.a(x))).flatten().cumsum(0)


@case()
def normalised_over_the_batch(m, x):
    h = m.b(F.relu(m.a(x)))
    return (h - h.mean(0)) / (h.std(0, unbiased=False) + 1)


@case()
def softmaxed_over_the_batch(m, x):
    return m.b(F.relu(m.a(x))).softmax(0)


# ---- another path ----------------------------------------------------------------------------------------------------


@case(7)
def another_path_of_large_batches(m, x):
    h = F.relu(m.a(x))
    if x.shape[0] > 4:
        h = h + 1
    return m.b(h)


@case(1, 3, 7)
def another_path_of_one_size(m, x):
    h = F.relu(m.a(x))
    return m.b(h) if x.shape[0] == 2 else m.b(h).tanh()


@case(1)
def another_activation_alone(m, x):
    return m.b(F.gelu(m.a(x)) if len(x) == 1 else F.relu(m.a(x)))


@case(1, 3, 7)
def looped_over_rows(m, x):
    return torch.stack([m.b(F.relu(m.a(row))) for row in x])


@case(1, 3, 7)
def chunked_by_the_batch(m, x):
    return torch.cat([m.b(F.relu(m.a(part))) for part in x.split(1)])


@case(1, 3, 7)
def unbound(m, x):
    return sum(F.relu(m.a(x)).unbind(0))


@case(3, 7)
def chunked_in_twos(m, x):
    return torch.cat([m.b(F.relu(m.a(part))) for part in x.split(2)])


@case(7)
def parameters_chosen_by_the_batch(m, x):
    return (m.a if x.shape[0] > 4 else m.b)(F.relu(m.a(x)))


@case(7)
def another_axis_of_large_batches(m, x):
    h = F.relu(m.a(x))
    return m.b(h).sum(dim=(0,) if x.shape[0] > 4 else (0, 1))


@case(7)
def another_mode_by_the_batch(m, x):
    return F.gelu(m.b(F.relu(m.a(x))), approximate="tanh" if x.shape[0] > 4 else "none")


@case()
def another_axis_by_number(m, x):
    h = m.b(F.relu(m.a(x)))
    return (h[:, :, None] * h[:, None, :]).softmax(1 if x.shape[0] > 4 else 2)


@case(1, 3, 7)
def returns_as_many_as_rows(m, x):
    return tuple(m.b(F.relu(m.a(x))).unbind(0))


@case(1)
def squeezed(m, x):
    h = m.b(F.relu(m.a(x))).squeeze()
    return h + 1 if h.dim() == 2 else h * 2


@case(7)
def returns_another_thing(m, x):
    h = m.b(F.relu(m.a(x)))
    return {"h": h} if x.shape[0] > 4 else [h]


@case(7)
def returns_the_hidden(m, x):
    h = F.relu(m.a(x))
    out = m.b(h)
    return h if x.shape[0] > 4 else out


@case(7)
def order_of_operands_by_the_batch(m, x):
    one, two = F.relu(m.a(x)), m.b(x)
    return one - two if x.shape[0] > 4 else two - one


# ---- what the model keeps --------------------------------------------------------------------------------------------


@case()
class CachedMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.masks = {}

    def forward(self, x):
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.arange(len(x)).float()[:, None]
        return F.relu(self.a(x)) + self.masks[len(x)]


@case(1, 3, 7)
class BufferOfTheBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(2.0)[:, None] + 1)

    def forward(self, x):
        return F.relu(self.a(x)) * (self.scale if x.shape[0] == 2 else 5.0)


@case()
class BufferCutToTheBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("table", rows(16, 8))

    def forward(self, x):
        return F.relu(self.a(x)) + self.table[: x.shape[0]]


@case()
class LearnedToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(rows(1, 1, 8))
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), x[:, None]], 1)
        return F.relu(self.a(h)).mean(1)


@case()
class LastBatchIsKept(nn.Module):
    """It remembers the size of the last batch, and does not read it."""

    def __init__(self):
        super().__init__()
        self.a, self.last = nn.Linear(8, 8), 0

    def forward(self, x):
        self.last = x.shape[0]
        return F.relu(self.a(x))


@case()
class RunningCount(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.shape[0]
        return F.relu(self.a(x)) + self.seen


@case()
class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return F.relu(self.a(x - self.mean))


@case(shape=(3, 8, 8))
class ConvolutionalInTraining(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 5),
        )


@case(shape=(3, 8, 8))
class ConvolutionalInEvaluation(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.eval()


@case()
class Dropped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4), nn.Dropout(0.1))


@case()
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        h = F.relu(self.a(x))
        return h + torch.randn(x.shape[0], 8) + torch.rand_like(h)


@case()
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


@case()
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        out, _ = self.lstm(x.unsqueeze(1).expand(-1, 4, -1))
        return self.head(F.relu(out[:, -1]))


@case()
class RecurrentByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        h = x.new_zeros(x.size(0), 8)
        for _ in range(3):
            h = self.cell(F.relu(x), h)
        return h


@case()
class FirstStateIsAParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cell = nn.Parameter(rows(1, 8)), nn.RNNCell(8, 8)

    def forward(self, x):
        return self.cell(F.relu(x), self.first.repeat(x.shape[0], 1))


@case()
class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = F.relu(x[:, None].expand(-1, 4, -1))
        return self.attention(h, h, h)


@case()
class AttendedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        b, t, h = x.shape[0], 4, 2
        q, k, v = self.qkv(F.relu(x[:, None].expand(b, t, 8))).view(b, t, 3, h, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 8)


@case()
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x):
        return F.relu(self.layer(x[:, None].expand(-1, 3, -1)))


@case()
class EnsembleOverTheBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(rows(3, 8, 8))

    def forward(self, x):
        return F.relu(torch.einsum("bi,eio->ebo", x, self.weights)).mean(0)


@case()
class GroupedByTheBatch(nn.Module):
    """A dynamic convolution: the rows of the batch are groups."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 24)

    def forward(self, x):
        kernels = F.relu(self.a(x)).view(x.shape[0], 8, 1, 3)[:, :, :, :].reshape(-1, 1, 3)
        return F.conv1d(x.reshape(1, -1, 1).expand(-1, -1, 5), kernels, groups=x.shape[0] * 8).view(x.shape[0], 8, 3)


@case()
class ChannelsShuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        b, c = F.relu(self.a(x)).shape
        return F.relu(self.a(x)).view(b, 2, c // 2).transpose(1, 2).contiguous().view(b, -1)


@case()
class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return F.relu(self.a(x))


@case()
class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return F.relu(self.a(x))


@case()
class SideBranchDraws(nn.Module):
    """What is not asked for draws numbers before what is asked for does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        side = F.dropout(self.b(x), 0.5, self.training)
        return F.relu(F.dropout(self.a(x), 0.5, self.training)), side


@case()
class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        x += 1
        return F.relu(self.a(x))


@case()
class WritesAnActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        h[:, 0] = float(x.shape[0])
        return F.relu(h.mul_(2))


@case(1, 3, 7)
class KeptBetweenCalls(nn.Module):
    """A hidden state of the batch's size, kept between the calls."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("h", torch.zeros(2, 8))

    def forward(self, x):
        h = self.h if self.h.shape[0] == x.shape[0] else x.new_zeros(x.shape[0], 8)
        self.h = torch.tanh(self.a(x) + h).detach()
        return F.relu(self.a(x) + self.h)


@case()
def read_in_python(m, x):
    h = F.relu(m.a(x))
    return m.b(h) * h.sum().item()
