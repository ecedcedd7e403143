"""Laws over random programs: what eager torch gives is what a replay gives.

`REPLAYLENS_EXAMPLES=20000 pytest tests/test_random_programs.py` looks further than the quick suite, and elsewhere
each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from internals import writes_views
from oracle import as_it_lies, assert_same, assert_same_gradients, gradients
from random_programs import Program, programs, twin
from torch.utils._pytree import tree_map

import replaylens as rl

EXAMPLES = os.environ.get("REPLAYLENS_EXAMPLES")
many = settings(
    max_examples=int(EXAMPLES or 100),
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
pytestmark = pytest.mark.filterwarnings("ignore")  # eager torch warns of what some programs do


def captured(program: Program, model: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
    """A capture. It may refuse what assigns `.data` of a tensor that others share, and nothing else."""
    try:
        return rl.capture(model, *inputs)
    except rl.CaptureError:
        assume(".data = " not in program.source)
        raise


def eager(program: Program, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """What the program gives, or None where these values make it raise."""
    try:
        return program(*inputs)
    except (RuntimeError, IndexError):
        return None


@many
@given(programs())
def test_a_replay_gives_what_eager_gives(program):
    wanted = program(*program.inputs())
    prog = captured(program, program, program.inputs())
    assert_same(prog.output, wanted, "captured")
    assert_same(prog.replay().output, wanted, "replayed")
    others = program.inputs(seed=1)
    if (wanted := eager(program, *others)) is not None:
        assert_same(prog.replay(*others).output, wanted, "replayed on other inputs")


@many
@given(programs())
def test_a_replay_from_the_middle_gives_what_the_whole_gives(program):
    prog = captured(program, program, program.inputs())
    for layer in prog.layers[:: max(1, len(prog.layers) // 5)]:
        assert_same(prog.replay(from_=layer.label).output, prog.output, f"from {layer.label}")
        patch = {layer.label: tree_map(as_it_lies, layer.value)}
        try:
            itself = prog.replay(patch=patch)
            wanted = prog.output  # but where the model writes to views: a tensor in the place of one is none
            if itself.departures or writes_views(prog.graph):
                wanted = rl.run(program, *program.inputs(), patch=patch).output
        except (rl.DivergedReplay, RuntimeError):  # it looks beyond the memory of what is there instead
            assert writes_views(prog.graph) or any(call.is_overwritten for call in prog.graph.calls)
            continue
        assert_same(itself.output, wanted, f"{layer.label} set to itself")


@many
@given(programs(calm=True))
def test_gradients_through_a_replay_are_those_of_eager(program):
    inputs, fresh = program.inputs(), program.inputs()
    try:
        wanted = gradients(program(*inputs), inputs, program)
    except RuntimeError:
        return  # a value that its backward needs was overwritten
    prog = captured(program, program, program.inputs())
    assert_same_gradients(gradients(prog.replay(*fresh, grad=True).output, fresh, program), wanted)


@many
@given(programs())
def test_writes_to_inputs_are_seen_and_never_repeated_by_a_replay(program):
    plain = [twin(x.detach()) for x in program.inputs()]
    try:
        wanted = program.body(*plain)
    except RuntimeError:
        return
    given_inputs = [twin(x.detach()) for x in program.inputs()]
    prog = captured(program, program.body, given_inputs)
    assert_same(prog.output, wanted, "captured")
    assert_same(given_inputs, plain, "inputs after the capture")
    others = [twin(x.detach()) for x in program.inputs()]
    assert_same(prog.replay(*others).output, wanted, "replayed on the same values")
    assert_same(prog.replay().output, wanted, "replayed")
    assert_same(others, [x.detach() for x in program.inputs()], "inputs of a replay")
    assert_same(given_inputs, plain, "inputs after the replays")
