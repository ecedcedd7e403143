"""Randomness."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, randn

from .case import Case, batch, small, whole
from .state import images


@whole
def dropout_in_training():
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.4), nn.Linear(32, 4), nn.Dropout(0.2)).train()
    return Case(model, batch(), seeded=True)


@small(inputs=lambda: (randn(2, 4, 3, 3),), train=True, seeded=True)
def dropout_of_every_kind(m, x):
    x = F.dropout2d(x, 0.5) + F.alpha_dropout(x, 0.3, training=True)
    x = F.dropout(x, 0.5, inplace=True) + F.feature_alpha_dropout(x, 0.3, training=True)
    return m.fc(x.mean((2, 3)))


@whole
def rrelu_in_training():
    return Case(nn.Sequential(nn.Linear(4, 4), nn.RReLU(), nn.Linear(4, 2)).train(), batch(), seeded=True)


@small(seeded=True)
def gumbel_softmax_hard(m, x):
    return F.gumbel_softmax(m.fc(x), hard=True) @ m.fc.weight


@small(seeded=True)
def multinomial_choice(m, x):
    picked = torch.multinomial(m.fc(x).softmax(-1), 2, replacement=True)
    return x.gather(1, picked)


@small
def generator_made_in_the_forward(m, x):
    g = torch.Generator().manual_seed(11)
    return m.fc(x) + torch.rand(3, 4, generator=g) - torch.rand(3, 4, generator=g)


@small(parts=lambda: {"dice": torch.Generator().manual_seed(12)}, seeded=True)
def generator_held_by_the_model(m, x):
    return m.fc(x) + torch.randn(4, generator=m.dice) * torch.rand(4)


@small(seeded=True)
def bernoulli_in_place(m, x):
    keep = torch.empty(3, 1).bernoulli_(0.5)
    return m.fc(x) * keep.div_(0.5)


@small(seeded=True)
def random_fills(m, x):
    y = torch.empty(3, 4)
    y[0].normal_()
    y[1].uniform_(-1, 1)
    y[2].exponential_()
    return m.fc(x) + y + torch.poisson(y.abs())


@small(seeded=True)
def forked_generator(m, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        a = torch.rand(4)
    return m.fc(x) + a + torch.rand(4)


@small(seeded=True)
def seeded_in_the_forward(m, x):
    torch.manual_seed(3)
    return m.fc(x) + torch.randn(3, 4)


@small(seeded=True)
def same_draw_twice(m, x):
    state = torch.get_rng_state()
    a = torch.rand(4)
    torch.set_rng_state(state)
    return m.fc(x) + a - torch.rand(4) * 2


@small(seeded=True)
def shuffled_batch(m, x):
    order = torch.randperm(3)
    return m.fc(x[order])[order.argsort()] + torch.randint(0, 5, (3, 1))


@small(seeded=True)
def reparametrised_sample(m, x):
    mean, spread = m.fc(x).chunk(2, 1)
    return mean + spread.exp() * torch.randn_like(spread)


@small(seeded=True, escapes=True)
def distribution_sample(m, x):
    normal = torch.distributions.Normal(m.fc(x), F.softplus(x))
    sample = normal.rsample()
    return sample, normal.log_prob(sample)


@whole
def fractional_max_pool():
    return Case(nn.Sequential(nn.Conv2d(3, 4, 1), nn.FractionalMaxPool2d(2, output_size=3)), images(), seeded=True)


@small(seeded=True)
def noise_from_numpy_and_python(m, x):
    noise = torch.from_numpy(np.random.rand(4).astype(np.float32))
    return m.fc(x) + noise * random.random()


@small(seeded=True, train=True)
def stochastic_depth(m, x):
    for _ in range(4):
        if random.random() < 0.5:
            x = m.fc(x) + x
    return m.fc(x) * torch.bernoulli(torch.full((3, 1), 0.5))


@small(parts=lambda: {"rnn": nn.LSTM(4, 4, 2, dropout=0.5)}, train=True, seeded=True)
def lstm_with_dropout(m, x):
    return m.rnn(m.fc(x))[0]


@small(parts=lambda: {"drop": nn.Dropout(0.5)}, seeded=True, train=True)
def random_under_no_grad(m, x):
    with torch.no_grad():
        mask = m.drop(torch.ones(3, 4))
    return m.fc(x) * mask
