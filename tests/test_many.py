"""Many replays at once give what replays one by one give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from many_oracle import assert_at_once_is_one_by_one, packing_from
from random_programs import programs
from torch import nn
from torch.nn import functional as F
from zoo import MODELS, silence

import replaylens as rl

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", MODELS)
def test_at_once_is_one_by_one(name):
    with silence():
        try:
            case = MODELS[name]()
            torch.manual_seed(1)
            prog = rl.capture(case.model, *case.args, **case.kwargs)
        except (rl.CaptureError, RuntimeError):
            assert case.refusal or name == "out_where_a_gradient_would_flow"
            return
        with packing_from(0.0):
            assert_at_once_is_one_by_one(prog, most=16)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_of_random_programs_too(program):
    try:
        prog = rl.capture(program, *program.inputs())
    except rl.CaptureError:
        assume(".data = " not in program.source)
        raise
    with packing_from(0.0):
        assert_at_once_is_one_by_one(prog, most=12)


class Attention(nn.Module):
    """A small transformer: causal attention, residual stream, unembedding."""

    def __init__(self, is_open: bool):
        super().__init__()
        self.is_open = is_open
        self.embed, self.unembed = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16), "mlp": nn.Linear(16, 16)}
            )
            for _ in range(3)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["out"](self.attend(block["qkv"](block["norm"](x))))
            x = x + F.gelu(block["mlp"](x))
        return self.unembed(x)

    def attend(self, qkv):
        q, k, v = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in qkv.chunk(3, -1)]
        if not self.is_open:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        mask = torch.full((q.shape[-2],) * 2, float("-inf")).triu(1)
        return ((q @ k.mT / 2 + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)


def last_logits(logits):
    return logits[:, -1, 3] - logits[:, -1, 5]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("worth", [0.0, 1e9])
def test_with_a_metric_that_reads_a_few_rows(is_open, batch, worth):
    torch.manual_seed(0)
    prog = rl.capture(Attention(is_open), torch.randint(0, 11, (batch, 7)))
    with packing_from(worth):
        for metric in (last_logits, lambda y: y[0, 2:4, :].sum(), lambda y: y.select(1, -2).amax(-1), torch.sum):
            assert assert_at_once_is_one_by_one(prog, metric, most=60) > 20


@pytest.mark.parametrize("is_open", [False, True])
def test_rows_before_a_causal_change_are_not_run(is_open):
    torch.manual_seed(0)
    prog = rl.capture(Attention(is_open), torch.randint(0, 11, (1, 64)))
    seen = []

    def change(value):
        new = value.clone()
        new[:, 60] = 0
        return new

    with packing_from(0.0):
        asked = prog.replay_many({"late": {"embedding_1": change}}, last_logits, dry=True)
        machine = asked.together.many.machine
        step = machine.step(prog.graph.positions[prog["blocks.1.qkv"].label])
        call = step.call
        step.call = lambda values: seen.append(tuple(values[0].shape)) or call(values)
        asked.run()
    assert seen == [(1, 4, 16)]  # positions 60 to 63


def test_a_metric_that_reads_contents_in_python_runs_one_by_one_and_says_so():
    prog = rl.capture(nn.Linear(3, 3), torch.randn(2, 3))
    found = prog.replay_many(
        {1: {"linear_1": torch.zeros(2, 3)}, 2: {"linear_1": torch.ones(2, 3)}}, lambda y: y.sum().item()
    )
    assert found.values.tolist() == [0.0, 6.0]
    assert found.one_by_one == ("the metric: it reads contents in Python",)
