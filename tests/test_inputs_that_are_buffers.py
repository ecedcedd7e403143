"""A model that is given its own buffer and writes there: a live run begins with both as they were recorded."""

import pytest
import torch
from torch import nn

import replaylens as rl


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.scale, self.steps = nn.Linear(4, 4), nn.Buffer(torch.randn(4, 4)), forward

    def forward(self, x):
        return self.steps(self, x)


def read_after(m, x):
    x += 1.0
    return m.fc(m.scale)


def read_alone(m, x):
    x += 1.0
    return m.fc(x)


def written_as_the_buffer(m, x):
    m.scale += 1.0
    return m.fc(x)


def written_twice(m, x):
    x += 1.0
    m.scale *= 2.0
    return m.fc(m.scale) + x


def read_before(m, x):
    y = m.fc(m.scale)
    x += 1.0
    return y + m.scale


def branches(m, x):
    x += 1.0
    return m.fc(m.scale) if x.sum() < 100 else m.fc(m.scale * 2) - x


MODELS = [read_after, read_alone, written_as_the_buffer, written_twice, read_before, branches]
WAYS = {"itself": lambda t: t, "detached": lambda t: t.detach(), "transposed": lambda t: t.t()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forward", MODELS)
@pytest.mark.parametrize("later", [False, True])
def test_on_other_inputs_the_buffer_begins_as_recorded(forward, way, later):
    model = Model(forward)
    prog = rl.capture(model, WAYS[way](model.scale))
    if later:
        model.scale.fill_(9.0)
    stands = model.scale.clone()
    other = torch.full((4, 4), 50.0)
    plain = Model(forward)
    wanted = plain(other.clone())
    for _ in range(2):
        run = prog.replay(other)
        assert torch.allclose(run.output, wanted)
        assert run.diverged
    assert torch.equal(model.scale, stands)
    assert torch.equal(other, torch.full((4, 4), 50.0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forward", MODELS)
@pytest.mark.parametrize("later", [False, True])
def test_on_the_recorded_inputs_a_live_run_writes_both(forward, way, later):
    model, plain = Model(forward), Model(forward)
    prog = rl.capture(model, WAYS[way](model.scale))
    if later:
        model.scale.fill_(9.0)
    plain.scale += 40.0
    wanted = plain(WAYS[way](plain.scale))
    run = prog.replay(patch={"input_1": lambda value: value + 40.0})
    assert torch.allclose(run.output, wanted)


def test_the_buffer_itself_may_be_given_again():
    model = Model(read_after)
    prog = rl.capture(model, model.scale)
    plain = Model(read_after)
    plain(plain.scale)
    wanted = plain(plain.scale)
    assert torch.allclose(prog.replay(model.scale).output, wanted)


def test_after_a_refresh_the_buffer_begins_as_it_is_then():
    model = Model(read_after)
    prog = rl.capture(model, model.scale)
    fresh = prog.refresh()
    wanted = Model(read_after)(torch.zeros(4, 4))
    assert torch.allclose(fresh.replay(torch.zeros(4, 4)).output, wanted)
