"""Arrays of numpy's that a model reads: a program holds what was in them when they were read.

The witness is the plain model, and what it gave.
"""

from __future__ import annotations

import array

import numpy as np
import pytest
import torch
from torch import nn

import replaylens as rl
from tests.oracle import assert_same

READS = {
    "as_tensor": lambda h, numbers, places: h + torch.as_tensor(numbers),
    "from_numpy": lambda h, numbers, places: h + torch.from_numpy(numbers)[None],
    "tensor": lambda h, numbers, places: h + torch.tensor(numbers),
    "new_tensor": lambda h, numbers, places: h + h.new_tensor(numbers),
    "index": lambda h, numbers, places: h[:, places],
    "frombuffer": lambda h, numbers, places: h + torch.frombuffer(numbers, dtype=torch.float32),
    "array": lambda h, numbers, places: h + torch.tensor(array.array("f", numbers.tolist())),
}


class Held(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.a, self.way = nn.Linear(4, 4), way
        self.numbers, self.places = np.ones(4, np.float32), np.array([0, 1])

    def forward(self, x):
        return READS[self.way](self.a(x), self.numbers, self.places)


class Counts(Held):
    """It writes its array in each forward, in place, or puts another there."""

    def __init__(self, way, in_place):
        super().__init__(way)
        self.in_place = in_place

    def forward(self, x):
        made = super().forward(x)
        if self.in_place:
            self.numbers += 1
            self.places[:] = self.places + 1
        else:
            self.numbers, self.places = self.numbers + 1, self.places + 1
        return made


def built(kind, *args):
    torch.manual_seed(0)
    return kind(*args), torch.randn(3, 4)


@pytest.mark.parametrize("way", READS)
def test_an_array_that_is_written_after_the_capture_is_in_the_program_as_it_was(way):
    model, x = built(Held, way)
    prog = rl.capture(model, x)
    wanted, other = model(x), torch.randn(3, 4)
    there = model(other)
    model.numbers[:], model.places[:] = 7, 3
    assert_same(prog.replay().output, wanted)
    assert_same(prog.replay(other).output, there)
    assert prog.check()


@pytest.mark.parametrize("way", READS)
def test_an_array_among_the_inputs_that_is_written_later_is_in_the_program_as_it_was(way):
    torch.manual_seed(0)
    layer, x, numbers, places = nn.Linear(4, 4), torch.randn(3, 4), np.ones(4, np.float32), np.array([0, 1])

    def model(x, numbers, places):
        return READS[way](layer(x), numbers, places)

    prog = rl.capture(model, x, numbers, places)
    wanted = model(x, numbers, places)
    numbers[:], places[:] = 7, 3
    assert_same(prog.replay().output, wanted)
    assert prog.check()
    assert_same(prog.replay(x, numbers, places).output, model(x, numbers, places))


@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_whose_array_changes_in_each_forward_is_no_module(way, in_place):
    model, x = built(Counts, way, in_place)
    wanted = built(Counts, way, in_place)[0](x)
    prog = rl.capture(model, x)
    assert_same(prog.output, wanted)
    assert_same(prog.replay().output, wanted)
    assert prog.check()
    with pytest.raises(rl.ReplaylensError, match="computes something other than"):
        prog.module()


def test_a_model_whose_array_changes_and_comes_to_the_same_is_a_module():
    class Fills(Held):
        def forward(self, x):
            self.numbers[:] = 2
            return self.a(x) + torch.tensor(self.numbers)

    model, x = built(Fills, "tensor")
    assert_same(rl.capture(model, x).module()(x + 1), model(x + 1))


def test_an_input_beside_an_array_can_be_patched():
    x = torch.randn(3)
    prog = rl.capture(lambda x, array: x * float(array[0]), x, np.arange(1.0, 4.0))
    assert torch.equal(prog.replay(patch={"input_1": lambda t: t + 1}).output, x + 1)
