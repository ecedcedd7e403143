"""Of a product whose columns are read by few, only these are computed: an unembedding for the logits of two words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from internals import Alignment, Ref, narrowed_product
from many_oracle import packing_from, stacking_costs
from torch import Tensor, nn
from torch.nn import functional as F

import replaylens as rl

WORDS = 40


class Unembedded(nn.Module):
    """Values of 6 numbers at each position, and then `product(x, weight, bias)`, which gives one number for each word."""

    def __init__(self, product: Callable[..., Tensor], is_turned: bool = False) -> None:
        super().__init__()
        self.first, self.mix = nn.Linear(4, 6), nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn((6, WORDS) if is_turned else (WORDS, 6)))
        self.bias = nn.Parameter(torch.randn(WORDS))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.product(x + self.mix(x).cumsum(-2), self.weight, self.bias)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "linear": (F.linear, False),
    "linear without bias": (lambda x, w, b: F.linear(x, w), False),
    "addmm": (lambda x, w, b: torch.addmm(b, x.view(-1, 6), w).view(*x.shape[:2], WORDS), True),
    "matmul": (lambda x, w, b: x @ w, True),
    "matmul with what is turned round": (lambda x, w, b: x @ w.mT, False),
}
METRICS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "two words at the last position": (lambda y: y[:, -1, 3] - y[:, -1, 17], (3, 17)),
    "first the position": (lambda y: y[:, -1][:, 5].sum(), (5,)),
    "a slice of words everywhere": (lambda y: y[..., 30:33].square().sum(), (30, 31, 32)),
    "words by a list, which is no view": (lambda y: y[0, :, [1, 2, 39]].exp(), ()),
    "all words": (lambda y: y[:, -1].log_softmax(-1)[:, 3], ()),
    "all of them": (lambda y: y.sum(), ()),
    "half of the words": (lambda y: y[..., ::2].sum(), ()),
}


def captured(product: str = "linear", shape: tuple[int, ...] = (2, 5, 4)) -> rl.Program:
    torch.manual_seed(0)
    return rl.capture(Unembedded(*PRODUCTS[product]), torch.randn(shape))


def assert_is_the_loop(prog: rl.Program, variants: dict[str, Any], metric: Callable[[Tensor], Any]) -> list[int]:
    """That the sweep is the loop, and how many columns its narrowed product computes."""
    with packing_from(0.0), stacking_costs(0.0):
        asked = prog.replay_many(variants, metric, dry=True)
        found, seen = asked.run(), []
        for key, patch in variants.items():
            torch.testing.assert_close(found[key], metric(prog.replay(patch=patch).output))
        if (narrowed := asked.planned.batch.program.narrowed) is not None:
            call = narrowed.narrow.call
            narrowed.narrow.call = lambda given: seen.append(given) or call(given)
            asked.run()
            assert all(given[place].shape[:1] != (WORDS,) for given in seen for place in narrowed.weights)
            return narrowed.columns.tolist() if seen else []
    return []


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("metric", METRICS)
def test_only_the_columns_that_the_metric_reads(product, metric):
    read, columns = METRICS[metric]
    prog = captured(product)
    variants = {
        "part": {"tanh_1": rl.Zero("b [t] d", t=2)},
        "whole": {"linear_1": rl.Scale(0.5)},
        "a function": {"linear_2": lambda value: value.flip(-1)},
        "nothing": {"tanh_1": rl.Scale(1.0)},
    }
    assert tuple(assert_is_the_loop(prog, variants, read)) == columns


@pytest.mark.parametrize(
    ("metric", "rows"),
    [
        (lambda y: y[:, -1, 3], (1, (4,))),
        (lambda y: y[:, -1][:, 3], (1, (4,))),
        (lambda y: y[..., 3][:, -1], (1, (4,))),
        (lambda y: y[1][-1][3], (0, (1,))),
        (lambda y: y[..., 3], (2, (3,))),
    ],
)
def test_of_what_is_selected_step_by_step_rows_come_first_and_columns_last(metric, rows):
    prog = captured()
    assert assert_is_the_loop(prog, {"whole": {"tanh_1": rl.Scale(0.5)}}, metric) == [3]
    with packing_from(0.0):
        machine = prog.replay_many({0: {"tanh_1": rl.Zero()}}, metric, dry=True).planned.batch.program
    assert machine.wanted[machine.slot[Ref(prog["linear_3"].label)]] == rows


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 5, 4), (3, 1, 4)])
def test_of_single_rows(shape):
    variants = {"whole": {"tanh_1": rl.Scale(0.5)}, "row": {"linear_1": rl.Zero("b [t] d", t=0)}}
    assert assert_is_the_loop(captured(shape=shape), variants, lambda y: y[:, -1, 3] - y[:, -1, 17]) == [3, 17]


AT_THE_PRODUCT = {
    "number by number": (rl.Scale(2.0), [3, 17]),
    "a function": (lambda value: value - value.mean(-1, keepdim=True), []),
    "whole": (rl.Zero(), [3, 17]),
}


@pytest.mark.parametrize("name", AT_THE_PRODUCT)
def test_patches_of_the_product_itself(name):
    patch, columns = AT_THE_PRODUCT[name]
    prog = captured()
    variants = {"before": {"tanh_1": rl.Zero("b [t] d", t=2)}, "two": {"tanh_1": rl.Scale(0.5), "linear_3": patch}}
    assert assert_is_the_loop(prog, variants, lambda y: y[:, -1, 3] - y[:, -1, 17]) == columns


def test_patched_weights_are_multiplied_whole():
    variants = {"weights": {"weight": rl.Scale(2.0)}, "values": {"tanh_1": rl.Scale(0.5)}}
    assert assert_is_the_loop(captured(), variants, lambda y: y[:, -1, 3] - y[:, -1, 17]) == []


def product_step(prog: rl.Program) -> Any:
    with packing_from(0.0):
        machine = prog.replay_many({0: {"tanh_1": rl.Zero()}}, dry=True).planned.batch.program
        return machine.step(prog.graph.positions[prog["linear_3"].label])


def test_columns_that_are_not_proved_are_not_left_out():
    step = product_step(captured())
    columns = Alignment((None, 0, 0), (2,))
    assert columns in step.alignments and narrowed_product(step, 2, (3, 17), (1, 2)) is not None
    assert narrowed_product(step, 2, (3, 17), (1,)) is None  # the bias changes
    other = evolve(step, results=(step.results[0] + 0.1,))  # the whole product has something else there
    assert narrowed_product(other, 2, (3, 17), (1, 2)) is None


def test_a_false_alignment_of_a_square_is_seen():
    torch.manual_seed(0)
    square = rl.capture(lambda x, w: F.linear(x, w), torch.randn(3, WORDS), torch.randn(WORDS, WORDS))
    machine = square.replay_many({0: {"input_1": rl.Zero()}}, dry=True).planned.batch.program
    step = machine.step(len(square.graph) - 1)
    false = evolve(step, signature=evolve(step.signature, alignments=(Alignment((None, 1), (1,)),)))
    assert narrowed_product(step, 1, (3, 17), (1,)) is not None and narrowed_product(false, 1, (3, 17), (1,)) is None
