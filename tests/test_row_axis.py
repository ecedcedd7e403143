"""A layer whose first axis is not that of the rows is never taken for one that has rows, however long it happens to be."""

import numpy as np
import pytest
import torch
from torch import nn

import replaylens as rl
from replaylens.errors import BadSource

X = torch.randn(12, 6, 3, generator=torch.Generator().manual_seed(0))


class Positions(nn.Module):
    """A table of positions, as many as there may be rows in a batch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3))

    def forward(self, x):
        return (x + self.table.relu()).tanh()


class Counted(nn.Module):
    """Positions that are counted in the forward."""

    def forward(self, x):
        return x + torch.arange(6.0).sqrt()[:, None]


class OverTime(nn.Module):
    """Time first, as recurrent layers have it."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 4)

    def forward(self, x):
        return self.rnn(x.transpose(0, 1))[0][-1]


class Centered(nn.Module):
    """A mean over the batch, of as many units as there may be rows."""

    def forward(self, x):
        return (x - x.mean((0, 2))[:, None]).relu()


HIDDEN = {
    "positions": (Positions, "relu_1"),
    "counted": (Counted, "sqrt_1"),
    "time": (OverTime, "rnn[0]"),
    "mean": (Centered, "mean_1"),
}


@pytest.mark.parametrize("batch_size", [6, 4, 12])
@pytest.mark.parametrize("kind", HIDDEN)
def test_an_axis_that_is_as_long_as_the_batch_is_not_taken_for_rows(kind, batch_size):
    model, layer = HIDDEN[kind]
    with pytest.raises(BadSource, match="its first axis is not that of the rows"):
        rl.extract(model(), X, layer, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [6, 4])
def test_a_function_puts_the_rows_first(batch_size):
    torch.manual_seed(0)
    model = OverTime()
    features = rl.extract(model, X, "rnn[0]", batch_size=batch_size, reduce=lambda value: value.transpose(0, 1))
    assert np.allclose(features["rnn[0]"][...], model.rnn(X.transpose(0, 1))[0].transpose(0, 1).detach(), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 6])
def test_layers_that_have_rows_are_taken_however_many_there_are(batch_size):
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    features = rl.extract(model, X, ["linear_1", "relu_1", "linear_2"], batch_size=batch_size)
    assert np.allclose(features["linear_2"][...], model(X).detach(), atol=1e-6)


def test_a_model_that_takes_one_number_of_rows_alone_is_believed():
    def fixed(x):
        return x.reshape(6, 18).relu()

    assert np.array_equal(rl.extract(fixed, X, "relu_1", batch_size=6)["relu_1"][...], X.reshape(12, 18).relu())
