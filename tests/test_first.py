"""prog.first(predicate): the first layer whose value, or whose gradient, satisfies a predicate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import replaylens as rl


class Splitting(nn.Module):
    """The logarithm of what is negative, behind integers, and behind a layer of several tensors."""

    def __init__(self):
        super().__init__()
        self.embed, self.lin = nn.Embedding(5, 3), nn.Linear(3, 4)
        nn.init.constant_(self.lin.bias, -100.0)

    def forward(self, tokens):
        left, right = self.lin(self.embed(tokens)).split(2, -1)
        return {"logs": torch.log(left) + right.sum(), "tokens": tokens}


TOKENS = torch.tensor([0, 1, 4])


def is_not_finite(value):
    return ~torch.isfinite(value)


def captured(**options):
    torch.manual_seed(0)
    return rl.capture(Splitting(), TOKENS, **options)


def test_it_is_the_first_in_the_order_of_the_program_with_its_line():
    first = captured().first(is_not_finite)
    assert first.label == "log_1_4" and 'torch.log(left) + right.sum(), "tokens"' in first.source.text


def test_without_one_there_is_none():
    assert captured().first(lambda value: value.numel() > 100) is None


def test_any_truth_value_is_an_answer_and_of_several_tensors_each_is_asked():
    prog = captured()
    assert prog.first(lambda value: value.dtype is torch.int64).label == "input_1_0"
    assert prog.first(lambda value: value.shape == (3, 2)).layer_type == "split"
    assert prog.first(lambda value: torch.zeros(0)) is None
    assert prog.first(lambda value: 0 if value.dim() == 1 else 1).label == "embedding_1_1"


@pytest.mark.parametrize("save", ["none", ["linear_1"]])
def test_values_that_were_not_kept_are_computed_again(save):
    prog = captured(save=save)
    assert prog.first(is_not_finite).label == "log_1_4" and not prog["log_1_4"].is_saved


def test_what_the_predicate_raises_is_its_own_with_the_layer():
    with pytest.raises(RuntimeError) as raised:
        captured().first(lambda value: value.std() > 1)
    assert raised.value.__notes__ == ["replaylens: raised by the predicate, at input_1_0, which holds int64[3]."]


def test_a_program_without_values_says_so():
    with pytest.raises(rl.NoValues, match="captured with fake=True"):
        captured(fake=True).first(is_not_finite)


class Rooted(nn.Module):
    def forward(self, x):
        y = 2 * x
        return torch.where(y > 0, y.sqrt(), 0.0).sum()


def test_with_grad_it_is_where_the_backward_pass_went_wrong():
    prog = rl.capture(Rooted(), torch.zeros(2, requires_grad=True))
    assert prog.first(is_not_finite) is None
    with pytest.raises(rl.NoGradient, match="the program had no backward pass"):
        prog.first(is_not_finite, grad=True)
    first = prog.backward().first(is_not_finite, grad=True)
    assert first.layer_type == "mul" and first.source.text.strip() == "y = 2 * x"
    assert prog.backward().first(lambda grad: grad.dtype is torch.int64, grad=True) is None


def test_a_loaded_program_and_an_edited_one_are_asked_like_any(tmp_path):
    prog = captured()
    prog.save(tmp_path / "program.rlp")
    assert rl.load(tmp_path / "program.rlp").first(is_not_finite).label == "log_1_4"
    assert prog.swap("log_1", torch.abs).first(is_not_finite) is None
