"""Values that lie in memory otherwise than the recorded ones: a replay has the bits of the model, or says that it left.

The witness is the plain model, run on the same tensors as they lie, with a forward hook where something is patched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn

import replaylens as rl


def noisy(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def with_gaps(x: Tensor) -> Tensor:
    wide = noisy(*x.shape[:-1], 3 * x.shape[-1])
    wide[..., 1::3] = x
    return wide[..., 1::3]


def behind_others(x: Tensor) -> Tensor:
    memory = noisy(x.numel() + 5)
    memory[5:] = x.reshape(-1)
    return memory[5:].view(x.shape)


LYING: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "inside out": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": with_gaps,
    "behind others": behind_others,
    "expanded": lambda x: x[:1].expand_as(x),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
}


class Convolves(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv, self.norm, self.last = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.relu = nn.ReLU(inplace)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.norm(self.conv(x)))).flatten(1).cumsum(1)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm, self.q, self.k, self.o = nn.LayerNorm(16), *(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k = (one(h).unflatten(-1, (4, 4)).transpose(1, 2) for one in (self.q, self.k))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, q)
        return x + self.o(a.transpose(1, 2).contiguous().flatten(2))


MODULES: dict[str, tuple[nn.Module, Tensor]] = {
    "convolutions": (Convolves(), noisy(3, 4, 9, 9)),
    "convolutions in place": (Convolves(inplace=True), noisy(3, 4, 9, 9)),
    "attention": (Attends(), noisy(3, 7, 16)),
}
MODELS: dict[str, tuple[Any, Tensor]] = {
    **MODULES,
    "a sum of all": (lambda x: x.sum(), noisy(3, 4, 9, 9)),
    "sums of rows": (lambda x: (x * x.mean(0)).sum((0, 1)).std(), noisy(3, 7, 16)),
    "a product": (lambda x: (x @ x.t() @ x).sum(0), noisy(33, 65)),
    "a product of a contiguous": (lambda x: (x.contiguous() @ x.t()).contiguous().sum(0), noisy(33, 65)),
    "softmax": (lambda x: x.softmax(-1) @ x.softmax(0).t(), noisy(33, 65)),
    "reshape": (lambda x: x.reshape(-1).cumsum(0), noisy(33, 65)),
    "in place": (lambda x: x.clone().add_(1).mul_(x).sum(0), noisy(33, 65)),
    "in place, seen by a view": (lambda x: (x * 1).add_(1).relu_().t().reshape(-1).cumsum(0), noisy(33, 65)),
    "memory_format": (lambda x: x.to(memory_format=torch.channels_last).sum((0, 1)), noisy(3, 4, 9, 9)),
    "like it": (lambda x: (torch.zeros_like(x) + x).reshape(-1).cumsum(0), noisy(33, 65)),
    "numpy": (lambda x: torch.from_numpy(x.numpy() * 2).sum(0), noisy(33, 65)),
    "vmap": (lambda x: torch.func.vmap(lambda row: (row @ row.t()).reshape(-1).sum())(x), noisy(3, 7, 16)),
    "a contiguous under vmap": (
        lambda x: torch.func.vmap(lambda row: (row.contiguous() * 2).sum())(x),
        noisy(3, 7, 16),
    ),
    "a gradient": (lambda x: torch.func.grad(lambda y: (y.sin() @ y.t()).sum())(x), noisy(33, 65)),
    "group norm": (lambda x: torch.nn.functional.group_norm(x, 2), noisy(3, 4, 9, 9)),
    "norms": (lambda x: x.norm() + x.norm(dim=0), noisy(33, 65)),
    "as_strided": (lambda x: x.as_strided((3, 3), (2, 1)).sum(), noisy(33, 65)),
}


def lies_as(got: Tensor, wanted: Tensor) -> None:
    assert_same(got.detach(), wanted.detach())
    assert got.stride() == wanted.stride()


@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("name", MODELS)
def test_a_replay_of_an_input_that_lies_otherwise_has_the_bits_of_the_model(name: str, lying: str) -> None:
    model, recorded = MODELS[name]
    new = LYING[lying](recorded)
    prog, wanted = rl.capture(model, recorded), model(new)
    lies_as(prog(new).output, wanted)
    lies_as(rl.run(model, new).output, wanted)
    lies_as(prog.replay(patch={"input_1_0": new}).output, wanted)
    for call in (
        lambda: prog.replay(new, on_divergence="raise").output,
        lambda: prog.function()(new),
        lambda: prog.module()(new),
        lambda: prog.slice()(new).output,
        lambda: prog.with_patch({"input_1_0": new}).output,
    ):
        with suppress(rl.DivergedReplay):
            lies_as(call(), wanted)


@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("name", MODULES)
def test_a_patch_that_lies_otherwise_has_the_bits_of_a_hook(name: str, lying: str) -> None:
    model, x = MODULES[name]
    prog = rl.capture(model, x)
    for address, module in model.named_children():
        new = LYING[lying](prog[address].value.detach() * 1.25)
        if lying == "expanded" and name == "convolutions in place":
            continue  # torch refuses to write it
        memory = torch.empty(0).set_(new.untyped_storage().clone())
        given = memory.as_strided(new.shape, new.stride(), new.storage_offset())  # the model may write it
        hook = module.register_forward_hook(lambda *_, given=given: given)
        wanted = model(x)
        hook.remove()
        patch = {address: new}
        lies_as(prog.replay(patch=patch).output, wanted)
        lies_as(prog.replay(patch={address: lambda _, new=new: new}).output, wanted)
        lies_as(rl.run(model, x, patch=patch).output, wanted)
        for call in (
            lambda patch=patch: prog.replay(patch=patch, on_divergence="raise").output,
            lambda patch=patch: prog.with_patch(patch).output,
            lambda address=address, new=new: prog.function([address])(new),
            lambda address=address, new=new: prog.slice(address, "output")(new).output,
        ):
            with suppress(rl.DivergedReplay):
                lies_as(call(), wanted)


@pytest.mark.parametrize("lying", [lying for lying in LYING if lying != "expanded"])
@pytest.mark.parametrize("name", MODULES)
def test_state_that_lies_otherwise_has_the_bits_of_the_model_with_it(name: str, lying: str) -> None:
    model, x = MODULES[name]
    prog = rl.capture(model, x)
    for address, parameter in model.named_parameters():
        if parameter.dim() < 2 and lying not in ("with gaps", "behind others"):
            continue
        new = LYING[lying](parameter.detach() * 1.25)
        wanted = torch.func.functional_call(model, {address: new}, (x,))
        lies_as(prog.replay(state={address: new}).output, wanted)
        with suppress(rl.DivergedReplay):
            lies_as(prog.set_state(address, new).output, wanted)


def test_where_contiguous_gave_the_very_same_tensor_another_layout_leads_away() -> None:
    """The copy that it gives now is no call of the program, and what reads it rounds otherwise."""

    def model(x: Tensor) -> Tensor:
        return x.contiguous().view(-1) * 2

    x = noisy(4, 4)
    run = rl.capture(model, x)(x.t())
    assert run.diverged
    lies_as(run.output, model(x.t()))


def test_memory_of_which_no_view_can_be_made_raises_what_the_model_raises() -> None:
    def model(x: Tensor) -> Tensor:
        return x.view(16) * 2

    x = noisy(4, 4)
    prog = rl.capture(model, x)
    for call in (model, prog, rl.capture(model, x).replay, lambda t: prog.replay(patch={"input_1_0": t})):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            call(x.t())
    for refused in (prog.function(), prog.module(), prog.slice()):
        with pytest.raises((RuntimeError, rl.DivergedReplay), match="view size is not compatible"):
            refused(x.t())


def test_an_input_whose_elements_are_one_in_memory_is_written_only_where_torch_does() -> None:
    def model(x: Tensor) -> Tensor:
        return x.add_(1).sum()

    def through_a_view(x: Tensor) -> Tensor:
        x[:, 0].mul_(2)
        return x.sum()

    for one in (model, through_a_view):
        prog = rl.capture(one, noisy(4, 4))
        for call in (one, prog, lambda x, one=one: rl.run(one, x).output):
            with pytest.raises(RuntimeError, match="single memory location"):
                call(noisy(1, 4).expand(4, 4))


def test_windows_over_one_memory_are_patched_number_by_number() -> None:
    """They overlap: what is written into one of them would stand in the next, too."""

    def model(x: Tensor) -> Tensor:
        return x.unfold(0, 3, 1) * 1

    prog = rl.capture(model, torch.arange(6.0))
    windows = torch.arange(6.0).unfold(0, 3, 1)
    patch = {"unfold_1": rl.Scale(2, "[t] w", t=1)}
    wanted = windows.clone()
    wanted[1] *= 2
    assert_same(prog.replay(patch=patch).output, wanted)
    assert_same(prog.with_patch(patch).output, wanted)
    assert_same(rl.run(model, torch.arange(6.0), patch=patch).output, wanted)


def test_what_stands_in_the_gaps_of_a_patched_value_is_what_stood_there() -> None:
    def model(x: Tensor) -> Tensor:
        y = (x * 1)[:, ::2]
        return y.as_strided((8, 5), (6, 1)) + 0

    x = noisy(8, 6)
    prog, wanted = rl.capture(model, x), x[:, :5].clone()
    wanted[:, ::2] *= 2
    assert_same(prog.replay(patch={"getitem_1": rl.Scale(2)}).output, wanted)
    assert_same(prog.with_patch({"getitem_1": rl.Scale(2)}).output, wanted)
    assert_same(rl.run(model, x, patch={"getitem_1": rl.Scale(2)}).output, wanted)


def test_a_path_that_goes_on_in_spite_of_a_layout_lies_as_the_recorded_one() -> None:
    def model(x: Tensor) -> Tensor:
        return x.view(16) * (2 if x.is_contiguous() else 3)

    x = noisy(4, 4)
    prog = rl.capture(model, x)
    for run in (
        prog.replay(x.t(), on_divergence="ignore"),
        prog.replay(patch={"input_1_0": x.t()}, on_divergence="ignore"),
    ):
        assert run.departures
        assert_same(run.output, x.t().reshape(16) * 2)


def test_an_edit_that_lays_a_value_out_otherwise_is_refused_where_the_program_goes_by_memory() -> None:
    def turned(t: Tensor) -> Tensor:
        return t.t().contiguous().t()

    prog = rl.capture(lambda x: torch.func.vmap(lambda row: row.reshape(-1).sum())(x.neg()), noisy(4, 4))
    with pytest.raises(rl.DivergedReplay, match="takes apart"):
        prog.insert_after("neg_1", turned)
    assert prog.insert_after("neg_1", lambda t: t * 2)
    written = rl.capture(lambda x: x.neg().add_(1).cumsum(0), noisy(4, 4))
    with pytest.raises(rl.DivergedReplay, match="the model writes"):
        written.insert_after("neg_1", turned)


def test_a_module_whose_state_was_laid_out_otherwise_since_refuses_where_that_matters() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", noisy(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.held.as_strided((2, 2), (2, 1)).sum()

    model = Holds()
    module = rl.capture(model, x := noisy(4, 4)).module()
    assert_same(module(x), model(x))
    model.held = model.held.t().contiguous().t()
    with pytest.raises(rl.DivergedReplay, match="laid out"):
        module(x)


RESIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "smaller": lambda x: x.clone().resize_(2, 2) * 1,
    "of the same size": lambda x: (x * 1).resize_((8, 2)) + 0,
    "of the same shape": lambda x: (x * 1).resize_(4, 4) + 0,
    "as another": lambda x: (x * 1).resize_as_(torch.ones(3)) * 1,
    "as another, of ATen's": lambda x: torch.ops.aten.resize(x * 1, [2, 2]) * 1,
    "in another format": lambda x: (x * 1).resize_(1, 2, 2, 2, memory_format=torch.channels_last) * 1,
    "after a write": lambda x: torch.empty_like(x).copy_(x).resize_(3) * 1,
}


@pytest.mark.parametrize("name", RESIZES)
def test_a_tensor_that_is_resized_has_its_numbers_as_they_lie_in_memory(name: str) -> None:
    model, x = RESIZES[name], noisy(4, 4)
    prog, wanted = rl.capture(model, x), model(x.t())
    assert_same(prog.replay(x.t()).output, wanted)
    assert_same(prog.replay(patch={"input_1": Tensor.t}).output, wanted)
    assert_same(prog.replay_many({0: {"input_1": Tensor.t}}, progress=False)[0], wanted)
    for found in (lambda: prog.with_patch({"input_1": Tensor.t}).output, lambda: prog.function()(x.t())):
        with suppress(rl.DivergedReplay):
            assert_same(found(), wanted)
    turned = rl.capture(model, x.t())
    assert_same(turned.replay().output, wanted)
    assert_same(turned.replay(x.clone()).output, model(x))
    assert turned.check(progress=False)


def test_a_format_that_is_given_where_the_shape_stays_is_asked_for() -> None:
    def model(x: Tensor) -> Tensor:
        return (x * 1).resize_(1, 4, 2, 2, memory_format=torch.contiguous_format) * 1

    x = noisy(1, 4, 2, 2)
    other = x.to(memory_format=torch.channels_last)
    assert_same(rl.capture(model, x).replay(other).output, model(other))
