"""`prog.module()` trains as the model does, or is refused: models whose forwards change what they read later.

The witness is the model itself, trained for four steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import replaylens as rl


class Model(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 4), nn.Linear(4, 4), run
        self.register_buffer("mean", torch.zeros(4))
        self.seen: list[Any] = []
        self.known: dict[Any, Any] = {}
        self.last: Any = torch.zeros(3, 4)
        self.queue: deque[Any] = deque(maxlen=2)
        self.count, self.first = 0, True

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


GROWING: dict[str, Callable[..., Any]] = {}
HONEST: dict[str, Callable[..., Any]] = {}
AGAIN: dict[str, Callable[..., Any]] = {}


def growing(run: Callable[..., Any]) -> Callable[..., Any]:
    GROWING[run.__name__] = run
    return run


def honest(run: Callable[..., Any]) -> Callable[..., Any]:
    HONEST[run.__name__] = run
    return run


def again(run: Callable[..., Any]) -> Callable[..., Any]:
    AGAIN[run.__name__] = run
    return run


@growing
def a_list_under_hasattr(m, x):
    if not hasattr(m, "log"):
        m.log = []
    m.log.append(m.a(x).detach())
    return m.b(sum(m.log))


@growing
def a_list_under_an_attribute_error(m, x):
    try:
        m.cache
    except AttributeError:
        m.cache = []
    m.cache.append(x.mean(0))
    return m.b(m.a(x)) + torch.stack(m.cache).mean(0)


@growing
def a_list_under_getattr(m, x):
    cache = getattr(m, "cache", None)
    if cache is None:
        cache = m.cache = []
    cache.append(x.mean(0))
    return m.b(m.a(x)) + torch.stack(cache).mean(0)


@growing
def a_list_by_setdefault(m, x):
    cache = m.__dict__.setdefault("cache", [])
    cache.append(x.mean(0))
    return m.b(m.a(x)) + torch.stack(cache).mean(0)


@growing
def a_list_that_was_there(m, x):
    m.seen.append(x.mean(0))
    return m.b(m.a(x)) + torch.stack(m.seen).mean(0)


@growing
def a_dict_that_remembers(m, x):
    y = m.b(m.a(x)) + m.known.get("last", 0)
    m.known["last"] = x.detach()
    return y


@growing
def a_queue(m, x):
    m.queue.append(x.detach())
    return m.b(m.a(x)) + sum(m.queue)


@growing
def a_number_that_scales(m, x):
    m.count += 1
    return m.b(m.a(x)) * m.count


@growing
def a_flag_of_the_first_call(m, x):
    first, m.first = m.first, False
    return m.b(m.a(x)) * (2 if first else 1)


@growing
def a_number_on_a_layer_of_torchs(m, x):
    m.a.calls = getattr(m.a, "calls", 0) + 1
    return m.b(m.a(x)) * m.a.calls


@honest
def a_counter_that_nothing_reads(m, x):
    m.count += 1
    return m.b(m.a(x))


@honest
def a_log_that_nothing_reads(m, x):
    h = m.a(x)
    m.seen.append(h.detach())
    return m.b(h)


@honest
def activations_that_are_kept_anew(m, x):
    m.kept = [m.a(x)]
    m.kept.append(m.b(m.kept[0]))
    return m.kept[-1]


@honest
def positions_that_are_cached(m, x):
    if x.shape not in m.known:
        m.known[x.shape] = torch.arange(4.0)
    return m.b(m.a(x) + m.known[x.shape])


@honest
def a_flag_that_decides_nothing(m, x):
    if m.first:
        m.first = False
    return m.b(m.a(x))


@honest
def a_tensor_that_is_exchanged_before_it_is_read(m, x):
    before, m.last = m.last, m.a(x).detach()
    return m.b(m.a(x)) + before


@honest
def a_buffer_assigned_behind_a_checkpoint(m, x):
    y = checkpoint(lambda h: m.b(m.a(h)), x, use_reentrant=False)
    m.mean = m.mean * 0.9 + y.detach().mean(0)
    return y


@honest
def a_buffer_assigned_in_a_checkpoint_of_other_things(m, x):
    def run(h):
        m.mean = m.a(h).detach().mean(0)
        return m.b(h)

    return checkpoint(run, x, use_reentrant=False)


@again
def a_buffer_assigned_in_a_checkpoint(m, x):
    def run(h):
        m.mean = m.mean * 0.9 + h.detach().mean(0)
        return m.b(h)

    return checkpoint(run, m.a(x), use_reentrant=False) + m.mean


@again
def a_buffer_assigned_in_a_reentrant_checkpoint(m, x):
    def run(h):
        m.mean = m.mean * 0.9 + h.detach().mean(0)
        return m.b(h)

    return checkpoint(run, m.a(x), use_reentrant=True) + m.mean


@again
def an_attribute_assigned_in_a_checkpoint(m, x):
    def run(h):
        m.last = m.last * 0.9 + h.detach()
        return m.b(h)

    return checkpoint(run, m.a(x), use_reentrant=False) + m.last


def made(run: Callable[..., Any]) -> tuple[Model, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    return Model(run), torch.randn(3, 4), [torch.randn(3, 4) for _ in range(4)]


def trained(model: Model, forward: Callable[..., Any], batches: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in batches:
        optimizer.zero_grad()
        forward(x).square().sum().backward()
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("name", GROWING)
def test_a_model_that_goes_on_otherwise_has_no_module(name):
    model, x, _ = made(GROWING[name])
    prog = rl.capture(model, x)
    held = dict(vars(model))
    with pytest.raises(rl.ReplaylensError, match="which it reads, and its next one"):
        prog.module()
    assert vars(model) == held


@pytest.mark.parametrize("name", HONEST)
def test_training_by_the_module_is_training_the_model(name):
    twin, x, batches = made(HONEST[name])
    twin(x)
    wanted = trained(twin, twin, batches)
    model, x, batches = made(HONEST[name])
    got = trained(model, rl.capture(model, x).module(), batches)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("name", AGAIN)
def test_what_a_checkpoint_assigns_of_what_stood_there_is_refused_with_gradients(name):
    model, x, batches = made(AGAIN[name])
    module = rl.capture(model, x).module()
    with pytest.raises(rl.NotDifferentiable, match="in a checkpoint"):
        module(batches[0])
    if "reentrant" in name:  # it goes by whether what it is given needs gradients
        return
    with torch.no_grad():
        twin, x, batches = made(AGAIN[name])
        twin(x)
        assert torch.equal(module(batches[0]), twin(batches[0]))


def test_a_forward_that_leaves_gradients_in_the_model_is_refused_with_gradients():
    def run(m, x):
        h = m.a(x)
        h.sum().backward(retain_graph=True)
        return m.b(h)

    model, x, batches = made(run)
    with pytest.raises(rl.NotDifferentiable, match="adds gradients to those of the model's parameters"):
        rl.capture(model, x).module()(batches[0])


def test_an_edited_program_cannot_ask_the_model():
    model, x, _ = made(GROWING["a_number_that_scales"])
    with pytest.raises(rl.ReplaylensError, match="only the model can tell"):
        rl.capture(model, x).bypass("mul_1").module()


def by_the_default_generator(m, x):
    torch.manual_seed(m.count)
    return m.b(x) * torch.rand(4)


def by_a_generator_of_its_own(m, x):
    return m.b(x) * torch.rand(4, generator=torch.Generator().manual_seed(m.count))


def in_a_fork(m, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(m.count)
        return nn.functional.dropout(m.b(x))


def in_place(m, x):
    torch.manual_seed(m.count)
    return m.b(x) * torch.zeros(4).uniform_()


def by_a_state_that_is_set(m, x):
    torch.set_rng_state(torch.Generator().manual_seed(m.count).get_state())
    return m.b(x) * torch.rand(4)


def for_those_who_come_later(m, x):
    torch.manual_seed(m.count)
    return m.b(x)


SEEDED = [
    *(by_the_default_generator, by_a_generator_of_its_own, in_a_fork, in_place, by_a_state_that_is_set),
    for_those_who_come_later,
]


@pytest.mark.parametrize("draws", SEEDED, ids=lambda draws: draws.__name__)
def test_a_number_that_the_forward_counts_up_is_no_seed_of_a_module(draws):
    def run(m, x):
        m.count += 1
        return draws(m, x)

    model, x, _ = made(run)
    with pytest.raises(rl.ReplaylensError, match="changes `count`, which it reads, and its next one"):
        rl.capture(model, x).module()


def test_a_seed_that_stays_the_same_is_one_of_a_module():
    def run(m, x):
        m.count += 1
        torch.manual_seed(7 + 0 * m.count)
        return m.b(x) * torch.rand(4)

    (model, x, _), (twin, _, _) = made(run), made(run)
    module = rl.capture(model, x).module()
    assert torch.equal(module(x), twin(x))
    assert torch.equal(torch.rand(4), (twin(x), torch.rand(4))[1])
