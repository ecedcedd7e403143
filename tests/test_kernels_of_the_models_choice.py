"""What a forward lets torch compute with: attention kernels, mkldnn, tiny numbers, the default dtype.

The witness is the plain model: a replay gives its bits, whatever is set around the replay, and leaves that as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import replaylens as rl


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q = self.a(x).view(1, 3, 11, 64)
        return F.scaled_dot_product_attention(q, q, q)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x)


class Chooses(Attends):
    """One attention by the plain kernel, one by torch's choice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            plain = self.attend(x)
        return plain * 3 + self.attend(plain.reshape(33, 64))


class Switches(Attends):
    """The same by the switch itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.backends.cuda.flash_sdp_enabled()
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            return self.attend(x)
        finally:
            torch.backends.cuda.enable_flash_sdp(before)


class Flushes(Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_flush_denormal(True)
        try:
            tiny = self.a(x) * 1e-38 * 1e-2
        finally:
            torch.set_flush_denormal(False)
        return tiny * 1e38 + self.a(x)


class Doubles(Attends):
    """Another default dtype, which a division of whole numbers asks for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            third = torch.tensor([1, 2, 5]) / 3 + torch.tensor([2]).sqrt()
        finally:
            torch.set_default_dtype(torch.float32)
        return self.a(x).double().sum() * third


class Verifies(Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.sparse.check_sparse_tensor_invariants():
            sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), self.a(x)[0, :2], (2, 2))
        return self.a(x)[:, :2] @ sparse.to_dense()


MODELS = [Chooses, Switches, Flushes, Doubles, Verifies]


def made(kind: type[Attends]) -> tuple[Attends, torch.Tensor]:
    torch.manual_seed(0)
    return kind(), torch.randn(33, 64)


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


AROUND = [lambda: sdpa_kernel(SDPBackend.MATH), flushing]


@pytest.mark.parametrize("kind", MODELS)
def test_a_replay_takes_the_kernels_that_the_forward_took(kind: type[Attends]) -> None:
    model, x = made(kind)
    prog, other = rl.capture(model, x), torch.randn(33, 64)
    assert torch.equal(prog.replay().output, model(x))
    assert torch.equal(prog.replay(other).output, model(other))
    assert torch.equal(prog.module()(other), model(other))
    assert torch.equal(prog.function()(other), model(other))
    hooked = deepcopy(model)
    hooked.a.register_forward_hook(lambda module, given, value: value * 0.5)
    assert torch.equal(prog.replay(patch={"a": rl.Scale(0.5)}).output, hooked(x))
    assert torch.equal(prog.with_patch({"a": rl.Scale(0.5)}).output, hooked(x))
    assert prog.check()
    assert rl.check(model, x)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_go_through_the_kernels_that_the_forward_took(kind: type[Attends]) -> None:
    model, x = made(kind)
    model(x).sum().backward()
    grads = rl.capture(deepcopy(model), x).grads(of=torch.sum, at=["a.weight"])
    assert torch.equal(grads["a.weight"], model.a.weight.grad)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", [Attends, *MODELS])
def test_what_is_set_around_a_replay_changes_nothing_and_is_left(
    kind: type[Attends], around: Callable[[], object]
) -> None:
    model, x = made(kind)
    prog, wanted = rl.capture(model, x), model(x)
    with around():  # type: ignore[attr-defined]
        before = torch.backends.cuda.flash_sdp_enabled(), 2.0**-1022 * torch.tensor(0.5).item()
        assert torch.equal(prog.replay(patch={"a": lambda value: value}).output, wanted)
        assert before == (torch.backends.cuda.flash_sdp_enabled(), 2.0**-1022 * torch.tensor(0.5).item())
    assert torch.equal(prog.replay().output, wanted)


def test_what_was_set_around_the_capture_holds_in_its_replays() -> None:
    model, x = made(Attends)
    with sdpa_kernel(SDPBackend.MATH):
        prog, wanted = rl.capture(model, x), model(x)
    assert not torch.equal(wanted, model(x))
    assert torch.equal(prog.replay().output, wanted)
    assert prog.check()


def test_an_error_in_a_replay_leaves_the_switches() -> None:
    model, x = made(Chooses)
    prog = rl.capture(model, x)
    with pytest.raises(ZeroDivisionError):
        prog.replay(patch={"scaleddotproductattention_1": lambda value: 1 / 0})
    assert torch.backends.cuda.flash_sdp_enabled()


def test_threads_that_want_other_kernels_have_their_own_and_leave_none() -> None:
    model, x = made(Attends)
    with sdpa_kernel(SDPBackend.MATH):
        plain, wanted = rl.capture(model, x), model(x)
    usual = rl.capture(model, x)
    results: list[bool] = []

    def replays(prog: rl.Program, output: torch.Tensor) -> None:
        results.extend(torch.equal(prog.replay().output, output) for _ in range(20))

    both = [threading.Thread(target=replays, args=one) for one in ((plain, wanted), (plain, wanted))]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(results) == 40
    assert all(results)
    assert torch.equal(usual.replay().output, model(x))
    assert torch.backends.cuda.flash_sdp_enabled()
