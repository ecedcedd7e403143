"""Along which axes calls treat rows alike: what the search finds, and that it is true."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from internals import Alignment, BatchedOp, PreparedProgram, close_across_batches as close, selected_rows
from many_oracle import stacking_costs
from torch.nn import functional as F

import replaylens as rl

Tensor = torch.Tensor
Case = tuple[Callable[..., Any], list[Any], str]


def of(*shape: int) -> Tensor:
    return torch.randn(shape)


def below(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape)


def lstm(x: Tensor, *rest: Tensor) -> Any:
    return torch.lstm(x, rest[:2], list(rest[2:]), True, 1, 0.0, False, False, True)


def cases() -> dict[str, Case]:
    q, k = of(2, 3, 5, 4), of(2, 3, 7, 4)
    image, norm = of(2, 6, 8, 9), (of(6), of(6).abs(), of(6), of(6))
    ids, x = below(11, 3, 5), of(3, 5, 4)
    cube = of(2, 3, 4, 5)
    square = of(3, 4, 4) + 5 * torch.eye(4)
    return {
        # the transformer's
        "embedding": (lambda i, w: F.embedding(i, w), [ids, of(11, 4)], ".0>0 .1>1 1.>2"),
        "linear": (F.linear, [x, of(6, 4), of(6)], "0..>0 1..>1 .00>2"),
        "linear of a square": (F.linear, [of(4, 4), of(4, 4), of(4)], "0..>0 .00>1"),
        "addmm": (torch.addmm, [of(6), of(5, 4), of(4, 6)], ".0.>0 0.1>1"),
        "matmul": (torch.matmul, [of(2, 3, 5, 4), of(2, 3, 4, 7)], "00>0 11>1 2.>2 .3>3"),
        "matmul with a matrix": (torch.matmul, [x, of(4, 7)], "0.>0 1.>1 .1>2"),
        "mm": (torch.mm, [of(3, 4), of(4, 5)], "0.>0 .1>1"),
        "bmm": (torch.bmm, [x, of(3, 4, 6)], "00>0 1.>1 .2>2"),
        "baddbmm": (torch.baddbmm, [of(3, 5, 6), x, of(3, 4, 6)], "000>0 11.>1 2.2>2"),
        "attention": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            [q, k, of(2, 3, 7, 4)],
            "000>0 111>1 2..>2 ..3>3",
        ),
        "causal attention": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            [q, of(2, 3, 5, 4), of(2, 3, 5, 4)],
            "000>0 111>1 ..3>3",
        ),
        "attention with a mask": (
            F.scaled_dot_product_attention,
            [q, k, of(2, 3, 7, 4), of(5, 7)],
            "000.>0 111.>1 2..0>2 ..3.>3",
        ),
        "attention with a mask of samples": (
            F.scaled_dot_product_attention,
            [q, k, of(2, 3, 7, 4), of(2, 1, 5, 7)],
            "0000>0 111.>1 2..2>2 ..3.>3",
        ),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [x, of(4), of(4)], "0..>0 1..>1"),
        "layer_norm of a square": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [of(4, 4), of(4), of(4)], "0..>0"),
        "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [x, of(4)], "0.>0 1.>1"),
        "gelu": (F.gelu, [x], "0>0 1>1 2>2"),
        "softmax of the last axis": (lambda x: x.softmax(-1), [x], "0>0 1>1"),
        "softmax of the first axis": (lambda x: x.softmax(0), [x], "1>1 2>2"),
        "softmax of the middle axis": (lambda x: x.softmax(1), [x], "0>0 2>2"),
        "log_softmax": (lambda x: F.log_softmax(x, -1), [x], "0>0 1>1"),
        "masked_fill": (lambda x, m: x.masked_fill(m, -1.0), [of(2, 3, 5, 5), of(5, 5) > 0], "0.>0 1.>1 20>2 31>3"),
        "tril": (torch.tril, [x], "0>0"),
        "a sum of one row and many": (torch.add, [x, of(1, 5, 1)], "0.>0 11>1 2.>2"),
        "a sum with a batch of one": (torch.add, [of(1, 5, 4), of(1, 5, 4)], ".0>0 0.>0 00>0 11>1 22>2"),
        "where": (torch.where, [of(5, 4) > 0, x, of()], ".0.>0 01.>1 12.>2"),
        # the CNN's
        "conv2d": (F.conv2d, [image, of(4, 6, 3, 3), of(4)], "0..>0 .00>1"),
        "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), [image, of(4, 3, 3, 3)], "0.>0"),
        "conv2d that keeps the size": (
            lambda x, w: F.conv2d(x, w, padding=1),
            [of(2, 6, 8, 8), of(6, 6, 3, 3)],
            "0.>0 .0>1",
        ),
        "conv1d": (F.conv1d, [of(2, 3, 9), of(5, 3, 2)], "0.>0 .0>1"),
        "conv_transpose2d": (F.conv_transpose2d, [image, of(6, 4, 3, 3)], "0.>0 .1>1"),
        "batch_norm": (
            lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
            [image, *norm],
            "0....>0 10000>1 2....>2 3....>3",
        ),
        "batch_norm of the batch": (lambda x: F.batch_norm(x, None, None, training=True), [image], "1>1"),
        "instance_norm": (F.instance_norm, [image], "0>0 1>1"),
        "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), [image, of(6), of(6)], "0..>0"),
        "max_pool2d": (lambda x: F.max_pool2d(x, 2), [image], "0>0 1>1"),
        "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [image], "0>0 1>1"),
        "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), [image], "0>0 1>1"),
        "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [image], "0>0 1>1"),
        "nearest interpolate": (lambda x: torch._C._nn.upsample_nearest2d(x, (16, 18)), [image], "0>0 1>1"),
        "unfold": (lambda x: F.unfold(x, 3), [image], "0>0"),
        "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [of(2, 8, 3, 5)], "0>0"),
        "local_response_norm": (lambda x: F.local_response_norm(x, 3), [image], "00>0 11>1 22>2 33>3"),
        "grid_sample": (
            lambda x, g: F.grid_sample(x, g, align_corners=False),
            [image, of(2, 4, 5, 2)],
            "00>0 1.>1 .1>2 .2>3",
        ),
        "dropout that is off": (lambda x: F.dropout(x, 0.5, False), [x], "0>0 1>1 2>2"),
        # shapes
        "reshape": (lambda x: x.reshape(3, 20), [x], "0>0"),
        "view": (lambda x: x.view(3, 5, 2, 2), [x], "0>0 1>1"),
        "flatten": (lambda x: x.flatten(1, 2), [cube], "0>0 3>2"),
        "unflatten": (lambda x: x.unflatten(-1, (2, 2)), [x], "0>0 1>1"),
        "unsqueeze": (lambda x: x.unsqueeze(1), [x], "0>0 1>2 2>3"),
        "squeeze": (lambda x: x.squeeze(), [of(3, 1, 4)], "0>0 2>1"),
        "permute": (lambda x: x.permute(2, 0, 1), [x], "2>0 0>1 1>2"),
        "transpose": (lambda x: x.transpose(1, 2), [x], "0>0 2>1 1>2"),
        "transpose of a square": (lambda x: x.transpose(0, 1), [of(4, 4)], "1>0 0>1"),
        "mT": (lambda x: x.mT, [x], "0>0 2>1 1>2"),
        "expand": (lambda x: x.expand(2, 3, 4), [of(3, 1)], "0>1"),
        "expand_as": (lambda x, y: x.expand_as(y), [of(3, 1), of(2, 3, 4)], "0.>1"),
        "repeat": (lambda x: x.repeat(2, 1, 3), [x], "1>1"),
        "cat": (lambda *every: torch.cat(every, 1), [of(3, 2, 4), of(3, 5, 4), of(3, 1, 4)], "000>0 222>2"),
        "stack": (lambda *every: torch.stack(every, 1), [of(3, 4), of(3, 4)], "00>0 11>2"),
        "pad": (lambda x: F.pad(x, (1, 2)), [x], "0>0 1>1"),
        "chunk": (lambda x: x.chunk(2, -1), [x], "0>00 1>11"),
        "split": (lambda x: x.split([2, 3], 1), [x], "0>00 2>22"),
        "unbind": (lambda x: x.unbind(1), [of(3, 2, 4)], "0>00 2>11"),
        "narrow": (lambda x: x.narrow(1, 1, 2), [x], "0>0 2>2"),
        "select": (lambda x: x.select(1, 2), [x], "0>0 2>1"),
        "an index": (lambda x: x[:, 2, None, 1:3], [x], "0>0"),
        "an index by numbers": (lambda x, i: x[:, i], [x, below(5, 7)], "0.>0 .0>1 2.>2"),
        "index_select": (lambda x, i: x.index_select(1, i), [x, below(5, 7)], "0.>0 .0>1 2.>2"),
        "gather": (lambda x, i: x.gather(1, i), [x, below(5, 3, 2, 4)], "00>0 .1>1 22>2"),
        "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), [x, below(5, 3, 2, 4)], "00>0 .1>1 22>2"),
        "scatter": (lambda x, i, y: x.scatter(1, i, y), [x, below(5, 3, 2, 4), of(3, 2, 4)], "000>0 222>2"),
        "roll": (lambda x: x.roll(1, 1), [x], "0>0 2>2"),
        "roll of all": (lambda x: x.roll(1), [x], ""),
        "flip": (lambda x: x.flip(0, 2), [x], "1>1"),
        # what goes along an axis
        "sum": (lambda x: x.sum((0, 2)), [cube], "1>0 3>1"),
        "mean": (lambda x: x.mean(1, keepdim=True), [x], "0>0 2>2"),
        "max": (lambda x: x.max(1), [x], "0>00 2>11"),
        "argmax": (lambda x: x.argmax(-1), [x], "0>0 1>1"),
        "var_mean": (lambda x: torch.var_mean(x, (0,)), [x], "1>00 2>11"),
        "any": (lambda x: x.any(1), [x > 0], "0>0 2>1"),
        "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=1), [x], "0>0 2>1"),
        "logsumexp": (lambda x: x.logsumexp(0), [x], "1>0 2>1"),
        "cumsum": (lambda x: x.cumsum(1), [x], "0>0 2>2"),
        "cumsum of zeros": (lambda x: x.cumsum(1), [torch.zeros(3, 4, dtype=torch.long)], "0>0"),
        "sort": (lambda x: x.sort(1), [x], "0>00 2>22"),
        "topk": (lambda x: x.topk(2, 1), [x], "0>00 2>22"),
        "glu": (lambda x: F.glu(x, -1), [x], "0>0 1>1"),
        "normalize": (lambda x: F.normalize(x, dim=1), [x], "00>0 11>1 22>2"),
        "median": (lambda x: x.median(1), [x], "0>00 2>11"),
        "fft": (lambda x: torch.fft.rfft(x, dim=1), [x], "0>0 2>2"),
        # products, solutions, recurrences
        "einsum": (lambda a, b: torch.einsum("bqd,bkd->bqk", a, b), [of(2, 5, 4), of(2, 7, 4)], "00>0 1.>1 .1>2"),
        "einsum with an axis of one": (
            lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
            [of(1, 2, 3, 4), of(3, 2, 3, 4)],
            ".0>0 11>1 2.>2 .2>3",
        ),
        "einsum of a diagonal": (lambda a: torch.einsum("bii->bi", a), [of(2, 3, 3)], "0>0"),
        "inverse": (torch.linalg.inv, [square], "0>0"),
        "solve": (torch.linalg.solve, [square, of(3, 4, 2)], "00>0 .2>2"),
        "det": (torch.linalg.det, [square], "0>0"),
        "cdist": (torch.cdist, [of(2, 5, 4), of(2, 7, 4)], ""),
        "lstm": (lstm, [x, of(1, 3, 4), of(1, 3, 4), of(16, 4), of(16, 4), of(16), of(16)], "011....>011"),
        "gru_cell": (torch.gru_cell, [of(3, 4), of(3, 5), of(15, 4), of(15, 5), of(15), of(15)], "00....>0"),
        # what is not a row, whatever the numbers are
        "isin": (torch.isin, [below(5, 4), 100 + below(5, 4)], ""),
        "isnan": (torch.isnan, [x], "0>0 1>1 2>2"),
        "equal numbers": (torch.eq, [x, of(3, 5, 4)], "00>0 11>1 22>2"),
        "a pad token": (lambda x: x == 100, [ids], "0>0 1>1"),
        "a convolution by zeros": (
            lambda x, w: F.conv2d(x, w, padding=1),
            [of(2, 6, 8, 8), torch.zeros(6, 6, 3, 3)],
            "0.>0 .0>1",
        ),
    }


torch.manual_seed(0)
CASES = cases()  # what is called, on what, and the alignments: axes of the operands > axes of the outputs


def last_step(function: Callable[..., Any], *inputs: Any) -> BatchedOp:
    """The last call of a function, ready to be run for many variants."""
    record = rl.capture(function, *inputs)._record
    machine = PreparedProgram(record, tuple(dict.fromkeys(record.graph.output_refs)))
    return machine.step(max(place for place, is_call in enumerate(record.graph.call_marks) if is_call))


def found(step: BatchedOp) -> list[Alignment]:
    return [align for align in step.alignments if step.holds(align)]


def written(align: Alignment) -> str:
    operands, outputs = [
        "".join("." if a is None else str(a) for a in axes) for axes in (align.operands, align.outputs)
    ]
    return f"{operands}>{outputs}"


@pytest.mark.parametrize("name", CASES)
def test_every_known_alignment_is_found(name):
    function, inputs, known = CASES[name]
    assert {*known.split()} <= {written(align) for align in found(last_step(function, *inputs))}


def few_rows() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Operations that mix rows, along axes so short that a few rows are all of them."""
    attention, found = F.scaled_dot_product_attention, {}
    for size in (1, 2, 3):
        x, heads, image = of(size, 5), of(1, 2, size, 8), of(2, 3, size)
        cases = {
            "attention to itself": (lambda x: attention(x, x, x), [heads]),
            "attention": (attention, [heads, of(1, 2, size, 8), of(1, 2, size, 8)]),
            "attention to one": (attention, [heads, of(1, 2, 1, 8), of(1, 2, 1, 8)]),
            "wide attention": (attention, [of(1, 1, size, 256), of(1, 1, size, 256), of(1, 1, size, 256)]),
            "narrow attention": (lambda x: attention(x, x, x), [of(size, size, 16).bfloat16()]),
            "attention with a mask": (attention, [heads, of(1, 2, size, 8), of(1, 2, size, 8), of(size, size)]),
            "attention with answers": (attention, [heads, heads + 1, heads - 1, torch.ones(size, size) > 0]),
            "softmax": (lambda x: x.softmax(0), [x]),
            "softmin": (lambda x: F.softmin(x, 0), [x]),
            "log_softmax": (lambda x: x.log_softmax(0), [x]),
            "logcumsumexp": (lambda x: x.logcumsumexp(0), [x]),
            "largest so far": (lambda x: x.cummax(0), [x]),
            "smallest so far": (lambda x: x.cummin(0), [x]),
            "a running product": (lambda x: x.cumprod(0), [x]),
            "sort": (lambda x: x.sort(0), [x]),
            "sort, largest first": (lambda x: x.sort(0, descending=True), [x]),
            "msort": (torch.msort, [x]),
            "topk of all": (lambda x: x.topk(len(x), 0), [x]),
            "whole numbers sorted": (lambda x: x.sort(0)[0], [below(5, size, 5)]),
            "max_pool1d": (lambda x: F.max_pool1d(x, 3, 1, 1), [image]),
            "max_pool1d, wide": (lambda x: F.max_pool1d(x, 5, 1, 2), [image]),
            "max_pool2d": (lambda x: F.max_pool2d(x, 3, 1, 1), [of(1, size, size)]),
            "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 1, 1), [image]),
            "lp_pool1d": (lambda x: F.lp_pool1d(x.abs(), 2, 1), [image]),
            "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [image, of(3, 3, 3)]),
            "interpolate": (lambda x: F.interpolate(x, size=x.shape[-1], mode="linear"), [image]),
            "renorm": (lambda x: x.renorm(2, 1, 50.0), [x]),
            "renorm that is wide": (lambda x: x.renorm(2, 1, 1e6), [x]),
            "normalize": (lambda x: F.normalize(x, dim=0, eps=30.0), [x]),
            "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [of(size + 1, 3, 2)]),
            "flip": (lambda x: x.flip(0), [x]),
            "roll": (lambda x: x.roll(600, 0), [x]),
            "the lower triangle": (lambda x: x.tril(), [x]),
            "the upper triangle, far off": (lambda x: x.triu(-600), [of(size + 5, 2048)]),
            "a product with itself": (lambda x: torch.addmm(x[:, : len(x)], x, x.t()), [x]),
            "scattered to the first": (
                lambda x, i: x.scatter_reduce(0, i, x, "amax"),
                [x, torch.zeros(size, 5, dtype=torch.long)],
            ),
            "scattered to the last": (
                lambda x, i, y: x.scatter_reduce(0, i, y, "sum"),
                [x, torch.full((size, 5), size - 1), of(size, 5)],
            ),
            "added to a row": (
                lambda x, i, y: x.index_add(0, i, y),
                [x, torch.zeros(size, dtype=torch.long), of(size, 5)],
            ),
            "gathered from the first": (
                lambda x, i: x.gather(0, i),
                [x, torch.zeros(size, 5, dtype=torch.long)],
            ),
            "the first taken": (lambda x, i: x.take_along_dim(i, 0), [x, torch.zeros(size, 1, dtype=torch.long)]),
            "singular values": (torch.linalg.svdvals, [of(size, size)]),
            "isin": (torch.isin, [below(3, size, 3), below(3, size, 3)]),
            "whole numbers, largest so far": (lambda x: x.cummax(0), [below(2, size, 5)]),
            "a sum of whole numbers": (lambda x: x.cumsum(0), [below(2, size, 5)]),
            "a product of whole numbers": (lambda x, y: x @ y, [below(5, size, 5), below(5, 5, size)]),
            "searchsorted": (lambda x, y: torch.searchsorted(x.sort(-1)[0], y), [x, of(size, 2)]),
            "einsum": (lambda x, y: torch.einsum("ij,ik->jk", x, y), [x, of(size, size)]),
        }
        found |= {f"{name}, {size}": case for name, case in cases.items()}
    return found


FEW = few_rows()


@pytest.mark.parametrize("name", FEW)
def test_what_mixes_rows_has_no_alignment_along_short_axes_either(name):
    step, dice = last_step(*FEW[name][:1], *FEW[name][1]), random.Random(0)
    for align in found(step):
        for _ in range(30):
            assert holds_once(step, align, dice), align


@pytest.mark.parametrize("far", [600, 20000])  # of 20,000 rows there is no trial
def test_triangles_are_not_called_on_more_rows_than_reach_their_diagonal(far):
    step = last_step(lambda x: x.triu(-far), of(8, 2048))
    assert not step.holds(Alignment((0,), (0,)))
    assert step.holds(Alignment((0,), (0,), "reshape"))  # of eight rows each it gives every number as it is


@pytest.mark.parametrize("name", CASES)
def test_every_alignment_that_is_found_holds_for_other_numbers_and_other_counts_of_rows(name):
    function, inputs, _ = CASES[name]
    step, dice = last_step(function, *inputs), random.Random(0)
    for align in found(step):
        for _ in range(30):
            assert holds_once(step, align, dice), align


def holds_once(step: BatchedOp, align: Alignment, dice: random.Random) -> bool:
    """Are rows of three lanes, in any order, those of the lanes by themselves?"""
    fixed = [other(value) if dice.random() < 0.5 and value.is_floating_point() else value for value in step.recorded]
    lanes = [
        [fixed[n] if axis is None else other(v) for n, (v, axis) in enumerate(operands(step, align))] for _ in range(3)
    ]
    count = next(value.shape[axis] for value, axis in operands(step, align) if axis is not None)
    picked = [(dice.randrange(3), dice.randrange(count)) for _ in range(dice.randint(2, 2 * count + 3))]

    def rows(values: list[Tensor], axis: int) -> Tensor:
        return torch.cat([values[lane].narrow(axis, row, 1) for lane, row in picked], axis)

    some = [
        fixed[n] if axis is None else rows([lane[n] for lane in lanes], axis)
        for n, (_, axis) in enumerate(operands(step, align))
    ]
    wholes = [step.parts(step.call(lane)) for lane in lanes]
    result = step._resized(some, align, len(picked)) if align.resizes else step.call(some)
    return all(
        close(part, rows([whole[n] for whole in wholes], axis))
        for n, (part, axis) in enumerate(zip(step.parts(result), align.outputs))
    )


def operands(step: BatchedOp, align: Alignment) -> list[tuple[Tensor, int | None]]:
    return list(zip(step.recorded, align.operands))


def other(value: Tensor) -> Tensor:
    """Other numbers of a kind; indices are some of those that there were."""
    if value.is_floating_point() or value.is_complex():
        return (torch.randn(value.shape) * random.choice((0.3, 1, 3, 100))).to(value)
    if value.dtype is torch.bool:
        return torch.rand(value.shape) < random.random()
    return value.reshape(-1)[torch.randint(value.numel(), value.shape)]


MASK = torch.tensor([True, False, True, True])
BY_CONTENT = {
    "masked_scatter": (torch.masked_scatter, of(4, 3), of(4, 3) > 0, of(4, 3)),
    "index_put by a mask": (lambda x, m, v: torch.index_put(x, (m,), v), of(4), MASK, of(3)),
    "masked_select": (torch.masked_select, of(4), torch.ones(4, dtype=torch.bool)),
    "an index by a mask": (lambda x, m: x[m], of(4), torch.ones(4, dtype=torch.bool)),
    "nonzero": (torch.nonzero, torch.ones(2, 2)),
    "unique": (lambda x: x.unique(), torch.arange(4.0)),
    "unique_consecutive": (torch.unique_consecutive, torch.arange(4.0)),
    "bincount": (torch.bincount, torch.arange(4)),
    "repeat_interleave": (torch.repeat_interleave, of(4), torch.ones(4, dtype=torch.long)),
    "embedding_bag": (lambda i, w, o: F.embedding_bag(i, w, o), below(5, 4), of(5, 3), torch.arange(4)),
    "ctc_loss": (
        lambda x, y, i, t: torch.ctc_loss(x, y, i, t, reduction=0),
        of(5, 2, 4),
        1 + below(3, 2, 2),
        torch.tensor([5, 5]),
        torch.tensor([2, 1]),
    ),
    "dropout": (lambda x: F.dropout(x, 0.5, True), of(4, 3)),
    "bernoulli": (torch.bernoulli, torch.rand(4, 3)),
}


@pytest.mark.parametrize("name", BY_CONTENT)
def test_nothing_is_found_where_content_or_chance_decides(name):
    function, *inputs = BY_CONTENT[name]
    assert not found(last_step(function, *inputs))


def test_nothing_is_found_in_an_operation_that_is_not_torchs():
    @torch.library.custom_op("alignment_tests::mixing", mutates_args=())
    def mixing(x: Tensor) -> Tensor:
        return x + x.mean(0)

    assert not last_step(mixing, of(4, 3)).alignments


MIXING = {
    "a little of the mean": lambda x: x + 0.01 * x.mean(0),
    "the largest": lambda x: x / x.abs().max().clamp(min=1),
    "the row before": lambda x: x + x.roll(1, 0),
    "turned round": lambda x: x.flip(0),
    "a running sum": lambda x: x.cumsum(0),
    "where it stands": lambda x: x * (torch.arange(len(x))[:, None] < 5),
    "the first row": lambda x: torch.cat((x[:1] * 2, x[1:])),
    "how many there are": lambda x: x * len(x),
    "no more than there were": lambda x: x[:4],
    "three rows are special": lambda x: x.flip(0) if len(x) == 3 else x,
    "a row that is negative": lambda x: x * (1 if (x.sum(1) > 0).all() else 2),
    "a row too many": lambda x: torch.cat((x, x[:1])),
    "an error": lambda x: x.reshape(4, 3),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_kernel_that_mixes_rows_has_none(name):
    step = last_step(torch.asinh, of(4, 3))
    assert step.holds(Alignment((0,), (0,)))
    step.signature.proved.clear()  # what is known of it is shared by all calls of these shapes
    step.call = lambda values: MIXING[name](values[0])
    before = step.signature.alignments
    try:
        assert not step.holds(Alignment((0,), (0,))) and not step.has_rows(0, 0)
    finally:
        step.signature.alignments = before
        step.signature.proved.clear()


BOUNDING = {
    "a bound that no number reached": lambda x: x.clamp(-1e4, 1e4),
    "numbers that may be missing": lambda x: x.nansum(0, keepdim=True),
    "a sign that was not there": lambda x: x.norm(dim=0, keepdim=True),
    "a norm in another shape": lambda x: x.norm(dim=0),
    "what is no number": torch.nan_to_num,
}


@pytest.mark.parametrize("name", BOUNDING)
def test_what_gave_its_numbers_as_they_were_may_not_always(name):
    assert not any(align.resizes for align in found(last_step(BOUNDING[name], torch.rand(1, 5) + 1)))


def test_a_view_of_the_same_shape_takes_other_rows_too():
    step = last_step(lambda x: x.view(-1, 5, 4), of(1, 5, 4))
    assert {"0>0", "1>1"} <= {written(align) for align in found(step)}


TAKING = {
    "a number": (lambda x: x[:, 2], (1, (2,))),
    "a last number": (lambda x: x[..., -1], (2, (3,))),
    "a slice": (lambda x: x[:, 1:3], (1, (1, 2))),
    "every other": (lambda x: x[:, ::2], (1, (0, 2, 4))),
    "numbers": (lambda x: x[1, 2, 3], (0, (1,))),
    "select": (lambda x: x.select(dim=2, index=-2), (2, (2,))),
    "narrow": (lambda x: x.narrow(1, 3, 2), (1, (3, 4))),
    "a diagonal": (lambda x: x.diagonal(dim1=1, dim2=2), (1, (0, 1, 2, 3))),
    "a copy": (lambda x: x[:, [1, 2]], None),
    "a sum": (lambda x: x.sum(1), None),
    "what is largest": (lambda x: x.amax(1), None),
}


@pytest.mark.parametrize("name", TAKING)
def test_the_rows_that_a_view_takes_are_known_of_its_memory(name):
    function, rows = TAKING[name]
    assert selected_rows(last_step(function, of(3, 5, 4))) == rows


def test_what_was_proved_serves_every_call_of_the_same_kind_and_no_other():
    one, same, longer = [last_step(torch.tanh, of(*shape)).signature for shape in ((4, 3), (4, 3), (5, 3))]
    assert one is same and one is not longer


def test_a_proof_leaves_the_generator_and_the_modes_alone():
    step, state = last_step(torch.atan2, of(4, 3), of(4, 3)), torch.get_rng_state()
    with torch.enable_grad():
        assert found(step) and torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state())


# ---- whole sweeps: what a proof must not take for granted -------------------------------------------------------------


class After(torch.nn.Module):
    """A function of a value that is patched, and of buffers."""

    def __init__(self, function, **buffers):
        super().__init__()
        self.value, self.function = torch.nn.Identity(), function
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, x, *more):
        return self.function(self, self.value(x * 1), *more)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.long)


def tap(size):
    kernel = torch.zeros(size, size, 3)
    kernel[:, :, 1] = torch.randn(size, size) / 12
    return kernel


def set_along(letters, axis, size, values):
    pattern = " ".join(f"[{one}]" if one == letters[axis] else one for one in letters)
    return {(n, v): {"value": rl.Set(v, pattern, **{letters[axis]: n})} for n in range(size) for v in values}


def scaled(count):
    return {n: {"value": rl.Scale(1 + n / 100)} for n in range(count)}


ONE, THREE = torch.tensor([[[0, 1, 0]]]), torch.tensor([[[1, 1, 1]]])
MASKS = {"one key": torch.tensor([[True, False, False]]), "all keys": torch.ones(1, 3) > 0}
attention = F.scaled_dot_product_attention


def two_convolutions(one, two, x, length):
    model = After(lambda m, x: F.conv1d(F.conv1d(x, m.one, padding=1), m.two, padding=1), one=one, two=two)
    return model, [x], set_along("bct", 2, length, (3, 50))


SWEEPS = {
    "numbers of numpy": lambda: (
        After(lambda m, x: F.conv1d(x, m.w, padding=np.int64(32), dilation=np.int64(32)), w=of(4, 4, 3)),
        [of(1, 4, 8)],
        set_along("bct", 2, 8, (-2.0, 2.0)) | {n: {"value": rl.Scale(n)} for n in range(2, 40)},
    ),
    "a bound of numpy": lambda: (
        After(lambda m, x: x.renorm(2, 1, np.float64(1e6))),
        [of(2, 5)],
        set_along("td", 0, 2, (-2.0, 3e6)),
    ),
    "a dilation as long as an axis": lambda: (
        After(lambda m, x: F.conv1d(x, m.w, padding=512, dilation=512), w=of(8, 512, 3)),
        [of(4, 512, 5)],
        scaled(300),
    ),
    "whole numbers that are bounded": lambda: (
        After(lambda m, x: x.clamp(max=128) * 2),
        [torch.arange(128) % 7],
        set_along("t", 0, 3, (500,)),
    ),
    "a kernel of whole numbers, then another": lambda: two_convolutions(ONE, THREE, torch.arange(6).view(1, 1, 6), 6),
    "the other way round": lambda: two_convolutions(THREE, ONE, torch.arange(6).view(1, 1, 6), 6),
    "a large kernel that mixes nothing, then another": lambda: two_convolutions(
        tap(160), of(160, 160, 3) / 20, of(1, 160, 5), 5
    ),
    "the other large one first": lambda: two_convolutions(of(160, 160, 3) / 20, tap(160), of(1, 160, 5), 5),
    "zeros added, then numbers": lambda: (
        After(lambda m, x: x.index_add(0, m.i, m.z).index_add(0, m.i, m.z + 5), i=zeros(2), z=zeros(2, 3)),
        [torch.arange(12).view(4, 3)],
        set_along("td", 0, 4, (3, 9)),
    ),
    "the least at one place": lambda: (
        After(lambda m, x: x.scatter_reduce(0, m.i, m.y, "amin"), i=zeros(1, 1), y=torch.tensor([[0.2]])),
        [of(1, 3)],
        {v: {"value": rl.Set(v)} for v in (-3.0, -0.5, 0.5, 3.0)},
    ),
    "the least of whole numbers": lambda: (
        After(lambda m, x: x.index_reduce(0, m.i, m.y, "amin"), i=zeros(1), y=torch.full((1, 3), 50)),
        [torch.arange(12).view(4, 3)],
        set_along("td", 0, 4, (-300, 300)),
    ),
    "distances of many": lambda: (
        After(lambda m, x: torch.cdist(x, m.a), a=of(4, 3) * 2 + 50),
        [of(6, 3) * 2 + 50],
        set_along("nc", 0, 6, (50.0, 51.0)) | scaled(20),
    ),
    **{
        f"attention to {name}": lambda mask=mask: (
            After(lambda m, x, mask: attention(x, x.sin(), x.cos(), attn_mask=mask)),
            [of(1, 2, 3, 8), mask],
            set_along("bhtd", 3, 8, (-2.0, 3.0)),
        )
        for name, mask in MASKS.items()
    },
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_gives_what_each_of_its_replays_gives(name):
    torch.manual_seed(0)
    model, inputs, variants = SWEEPS[name]()
    prog = rl.capture(model, *inputs)
    with stacking_costs(0.0):
        found = prog.replay_many(variants)
    for key, patch in variants.items():
        assert torch.allclose(found[key], prog.replay(patch=patch).output, rtol=1e-4, atol=1e-4), key
