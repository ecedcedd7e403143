"""What a model can ask of its inputs without reading a number: a replay gives what the model gives, or says so.

The witness is the plain model on the same inputs. Inputs are made anew for each run, since models may write them.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn

import replaylens as rl

Make = Callable[[], tuple[Any, ...]]


def v(*numbers: float) -> Tensor:
    return torch.tensor([float(number) for number in numbers])


def numbered(tensors: Any) -> Tensor:
    """What depends on the order of tensors."""
    return sum((value.sum() * (number + 1) for number, value in enumerate(tensors)), torch.zeros(()))


def assert_goes_as_the_model(
    model: Callable[..., Any], recorded: Make, new: Make, is_one_program: bool = False
) -> rl.Run:
    """The value of the model on other inputs, found to be on another path; refused where that cannot be gone. A module
    goes it if the model, captured there, is the same program.
    """
    prog, wanted = rl.capture(model, *recorded()), model(*new())
    run = prog(*new())
    assert_same(run.output, wanted)
    assert run.diverged and run.departures
    with pytest.raises((rl.InputMismatch, rl.DivergedReplay)):
        prog.replay(*new(), on_divergence="raise")
    if is_one_program:
        assert_same(prog.module()(*new()), wanted)
    else:
        with pytest.raises((rl.InputMismatch, rl.DivergedReplay)):
            prog.module()(*new())
    try:
        ignored = prog.replay(*new(), on_divergence="ignore")
        assert ignored.departures
    except rl.InputMismatch:
        pass
    assert_same(prog(*recorded()).output, model(*recorded()))
    return run


# ---- another shape, dtype, class or structure ------------------------------------------------------------------------


@dataclass
class Pair:
    left: Any
    right: Any


@dataclass
class Settings:
    scale: float


class Named(nn.Module):
    """Goes by the order of its keywords."""

    def forward(self, **named: Tensor) -> Tensor:
        return numbered(named.values())


def by_dim(x: Tensor) -> Tensor:
    return (x * 2).sum() + x.dim() * 10 + x.is_floating_point()


def by_length(xs: Any) -> Tensor:
    return sum(xs) * len(xs) + isinstance(xs, list)


def masked(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return x if mask is None else x * mask


def of_pair(pair: Any) -> Tensor:
    return pair.left * 2 if pair.right is None else pair.left * pair.right


def scaled(x: Tensor, by: Any) -> Tensor:
    return x * (by.scale if isinstance(by, Settings) else by)


OTHER_INPUTS: dict[str, tuple[Callable[..., Any], Make, Make]] = {
    "longer": (by_dim, lambda: (v(1, 2),), lambda: (v(1, 2, 3),)),
    "of more dimensions": (by_dim, lambda: (v(1, 2),), lambda: (v(1, 2)[None],)),
    "empty": (by_dim, lambda: (v(1, 2),), lambda: (torch.zeros(0),)),
    "of integers": (by_dim, lambda: (v(1.0, 2.0),), lambda: (torch.tensor([1, 2]),)),
    "of doubles": (lambda x: x / 3, lambda: (v(1, 2),), lambda: (v(1, 2).double(),)),
    "a list for a tuple": (by_length, lambda: ((v(1), v(2)),), lambda: ([v(1), v(2)],)),
    "one more in a list": (by_length, lambda: ([v(1)],), lambda: ([v(1), v(2)],)),
    "one fewer in a list": (by_length, lambda: ([v(1), v(2)],), lambda: ([v(1)],)),
    "None for a tensor": (masked, lambda: (v(1), v(2)), lambda: (v(1), None)),
    "a tensor for None": (masked, lambda: (v(1), None), lambda: (v(1), v(2))),
    "an argument more": (masked, lambda: (v(1),), lambda: (v(1), v(2))),
    "an argument fewer": (masked, lambda: (v(1), v(2)), lambda: (v(1),)),
    "another number": (scaled, lambda: (v(1), 2), lambda: (v(1), 3)),
    "a float for an int": (scaled, lambda: (v(1).int(), 2), lambda: (v(1).int(), 2.0)),
    "another object": (scaled, lambda: (v(1), Settings(2)), lambda: (v(1), Settings(3))),
    "None in a dataclass": (of_pair, lambda: (Pair(v(1), v(2)),), lambda: (Pair(v(1), None),)),
    "a dict with another key": (
        lambda d: sum(d.values()) * len(d),
        lambda: ({"a": v(1)},),
        lambda: ({"a": v(1), "b": v(2)},),
    ),
    "a parameter": (
        lambda x: x * (2 if isinstance(x, nn.Parameter) else 3),
        lambda: (v(1),),
        lambda: (nn.Parameter(v(1), False),),
    ),
    "no parameter": (
        lambda x: x * (2 if type(x) is nn.Parameter else 3),
        lambda: (nn.Parameter(v(1), False),),
        lambda: (v(1),),
    ),
}


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_an_input_of_another_kind_is_given_to_the_model(name: str) -> None:
    assert_goes_as_the_model(*OTHER_INPUTS[name], is_one_program=name in ("longer", "empty"))


def test_a_departure_says_which_input_was_what() -> None:
    run = rl.capture(by_dim, v(1, 2))(v(1, 2, 3))
    assert str(run.departures[0]) == (
        "the input at args[0] was float32[2] on cpu when recorded, and is float32[3] on cpu now."
    )


def test_an_error_of_the_model_on_other_inputs_is_its_own_and_says_why_it_ran() -> None:
    prog = rl.capture(nn.Linear(2, 1), torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        prog(torch.ones(1, 3))
    assert any("because the input at args[0] was float32[1, 2]" in note for note in caught.value.__notes__)


def test_patches_are_made_in_the_run_on_inputs_of_another_shape() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    prog = rl.capture(net, torch.randn(2, 3))
    x = torch.randn(5, 3)
    handle = net[1].register_forward_hook(lambda m, a, out: out.index_fill(1, torch.tensor([2]), 0.0))
    wanted = net(x)
    handle.remove()
    for place in ("1", "relu_1"):
        run = prog.replay(x, patch={place: rl.Zero("b [c]", c=2)})
        assert_same(run.output, wanted.detach())
        assert run.diverged


def test_a_patched_input_is_found_among_inputs_of_another_structure() -> None:
    prog = rl.capture(lambda a, more: a * 2 + sum(more), v(1), [v(2)])
    run = prog.replay(v(1), [v(5), v(2)], patch={"input_1_0": rl.Scale(10)})
    assert_same(run.output, v(27))


def test_gradients_flow_to_inputs_of_another_shape() -> None:
    prog = rl.capture(lambda x: (x**2).sum(), v(1, 2))
    x = v(1, 2, 3).requires_grad_()
    prog.replay(x, grad=True).output.backward()
    assert_same(x.grad, v(2, 4, 6))


def test_state_of_another_shape_is_given_to_the_model() -> None:
    model = nn.Linear(2, 3)
    prog = rl.capture(model, x := torch.randn(4, 2))
    state = {"weight": torch.randn(5, 2), "bias": torch.randn(5)}
    assert_same(prog.replay(state=state).output, torch.func.functional_call(model, state, (x,)).detach())
    with pytest.raises(rl.InputMismatch, match="the state at 'weight' is float32"):
        prog.replay(state=state, on_divergence="raise")
    with pytest.raises(rl.InputMismatch, match="the state at 'weight' is float32"):
        prog.set_state("weight", torch.randn(5, 2))


@pytest.mark.parametrize("derived", ["edited", "sliced"])
def test_without_a_model_other_inputs_are_refused(derived: str) -> None:
    prog = rl.capture(by_dim, v(1, 2))
    made = prog.with_patch({"mul_1": rl.Scale(2)}) if derived == "edited" else prog.slice()
    with pytest.raises(rl.InputMismatch):
        made(v(1, 2, 3))


def test_a_function_refuses_arguments_of_another_shape_or_dtype() -> None:
    function = rl.capture(by_dim, v(1, 2)).function()
    for other in (v(1, 2, 3), v(1, 2).double()):
        with pytest.raises(rl.InputMismatch, match="the argument for input_1_0 is"):
            function(other)


def test_an_object_that_was_changed_in_place_is_another() -> None:
    settings = Settings(2.0)
    prog = rl.capture(scaled, v(1), settings)
    assert_same(prog(v(3), settings).output, v(6))
    settings.scale = 5.0
    assert_same(prog(v(3), settings).output, v(15))
    assert_same(prog(v(3), Settings(5.0)).output, v(15))
    with pytest.raises(rl.InputMismatch, match="which was changed since"):
        prog.replay(v(3), settings, on_divergence="raise")


# ---- the order of keys -----------------------------------------------------------------------------------------------


def first(d: Any) -> Any:
    return next(iter(d.values()))


REORDERED: dict[str, tuple[Callable[..., Any], Make, Make]] = {
    "dict": (lambda d: numbered(d.values()), lambda: ({"a": v(1), "b": v(5)},), lambda: ({"b": v(5), "a": v(1)},)),
    "nested": (
        lambda d: numbered(d["k"][0].values()),
        lambda: ({"k": [{"a": v(1), "b": v(5)}]},),
        lambda: ({"k": [{"b": v(5), "a": v(1)}]},),
    ),
    "of numbers": (
        lambda d, x: x * next(iter(d.values())),
        lambda: ({"a": 1, "b": 5}, v(1)),
        lambda: ({"b": 5, "a": 1}, v(1)),
    ),
    "OrderedDict": (
        lambda d: numbered(d.values()),
        lambda: (OrderedDict(a=v(1), b=v(5)),),
        lambda: (OrderedDict(b=v(5), a=v(1)),),
    ),
    "defaultdict": (
        lambda d: numbered(d.values()),
        lambda: (defaultdict(list, a=v(1), b=v(5)),),
        lambda: (defaultdict(list, b=v(5), a=v(1)),),
    ),
    "in a dataclass": (
        lambda pair: first(pair.left) * 1,
        lambda: (Pair({"a": v(1), "b": v(5)}, 0),),
        lambda: (Pair({"b": v(5), "a": v(1)}, 0),),
    ),
}


@pytest.mark.parametrize("name", REORDERED)
def test_keys_in_another_order_are_given_to_the_model_in_that_order(name: str) -> None:
    run = assert_goes_as_the_model(*REORDERED[name])
    assert "the order of the keys" in str(run.departures[0])


def test_keywords_in_another_order_matter_where_the_forward_can_see_it() -> None:
    prog = rl.capture(Named(), a=v(1), b=v(5))
    assert_same(prog(b=v(5), a=v(1)).output, Named()(b=v(5), a=v(1)))
    prog = rl.capture(lambda a, b: a - b, a=v(1), b=v(5))
    run = prog(b=v(5), a=v(1))
    assert not run.diverged and run.output == v(-4)


def test_an_ordered_dict_is_read_by_its_keys() -> None:
    prog = rl.capture(lambda d: d["a"] - d["b"], OrderedDict(a=v(1), b=v(5)))
    assert_same(prog.replay(OrderedDict(b=v(2), a=v(9)), on_divergence="ignore").output, v(7))


# ---- which inputs share memory ---------------------------------------------------------------------------------------


def writes_first(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return a + b


def writes_last(a: Tensor, b: Tensor) -> Tensor:
    b.mul_(3)
    return a + b


def asks_identity(a: Tensor, b: Tensor) -> Tensor:
    return a * (2 if a is b else 3) + b


def asks_address(a: Tensor, b: Tensor) -> Tensor:
    return a * (2 if a.data_ptr() == b.data_ptr() else 3) + b


def asks_storage(a: Tensor, b: Tensor) -> Tensor:
    return a * (2 if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() else 3) + b


def apart() -> tuple[Any, ...]:
    return v(1, 2), v(3, 4)


def one() -> tuple[Any, ...]:
    return (x := v(5, 6)), x


def over_one_memory() -> tuple[Any, ...]:
    return (x := v(5, 6)), x.view(2)


SHARING = {
    f"{does.__name__} {made.__name__}": (does, apart, made)
    for does in (writes_first, writes_last, asks_address)
    for made in (one, over_one_memory)
}
SHARING |= {
    "asks_identity, one": (asks_identity, apart, one),
    "asks_identity, two": (asks_identity, one, apart),
    "asks_address, two": (asks_address, one, apart),
    "asks_storage, one": (asks_storage, apart, one),
    "asks_storage, view": (asks_storage, apart, over_one_memory),
    "written when one, two": (writes_first, one, apart),
    "written when shared, two": (writes_first, over_one_memory, apart),
    "written, in a list": (
        lambda xs: writes_first(*xs),
        lambda: (list(apart()),),
        lambda: (list(over_one_memory()),),
    ),
}


@pytest.mark.parametrize("name", SHARING)
def test_inputs_that_share_memory_otherwise_are_given_to_the_model(name: str) -> None:
    assert_goes_as_the_model(*SHARING[name])


def test_inputs_may_share_memory_where_nothing_of_it_is_written() -> None:
    prog = rl.capture(lambda a, b: a * 2 + b, *apart())
    assert not prog(*over_one_memory()).diverged


def test_a_function_refuses_arguments_that_share_what_is_written() -> None:
    function = rl.capture(writes_first, *apart()).function()
    assert_same(function(*apart()), writes_first(*apart()))
    for made in (one, over_one_memory):
        with pytest.raises(rl.InputMismatch):
            function(*made())


class Counting(nn.Module):
    """Writes a buffer, and reads its input after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x * self.seen


def test_an_input_over_the_memory_of_a_buffer_that_is_written_is_given_to_the_model() -> None:
    model, twin = Counting(), Counting()
    prog, _ = rl.capture(model, v(1, 2)), twin(v(1, 2))
    wanted = twin(twin.seen.view(2))
    assert_same(rl.capture(Counting(), v(1, 2)).output, v(2, 4))
    with pytest.raises(rl.InputMismatch):
        prog.replay(model.seen.view(2), on_divergence="raise")
    del wanted


# ---- how a tensor lies in memory -------------------------------------------------------------------------------------


def square() -> Tensor:
    return torch.arange(16.0).reshape(4, 4)


def turned(x: Tensor) -> Tensor:
    """The same numbers, column by column."""
    return x.t().contiguous().t()


def image() -> Tensor:
    return torch.arange(32.0).reshape(1, 2, 4, 4)


def channels_last() -> Tensor:
    return image().contiguous(memory_format=torch.channels_last)


def is_format(x: Tensor) -> Tensor:
    return x * (2 if x.is_contiguous(memory_format=torch.channels_last) else 3)


def adds_in_a_reshape(x: Tensor) -> Tensor:
    y = x.clone(memory_format=torch.preserve_format)
    y.reshape(-1).add_(1)
    return y


def adds_in_a_flattened(x: Tensor) -> Tensor:
    y = x * 1
    y.flatten().mul_(2)
    return y + 1


def adds_in_a_contiguous(x: Tensor) -> Tensor:
    y = x * 1
    y.contiguous().mul_(2)
    return y


def looks_by_geometry(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (4, 1)) + 0


def suppresses(x: Tensor) -> Tensor:
    try:
        return x.view(16).reshape(4, 4) * 2
    except RuntimeError:
        return x * 3


class AsksInside(nn.Module):
    """A layer that asks for the layout of what another one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.turn(x).t()
        return y * (2 if y.is_contiguous() else 3)


LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "is_contiguous": (lambda x: x * (2 if x.is_contiguous() else 3), square, lambda: turned(square())),
    "not contiguous": (lambda x: x * (2 if x.is_contiguous() else 3), lambda: turned(square()), square),
    "of a view": (lambda x: x * (2 if x.t().is_contiguous() else 3), square, lambda: turned(square())),
    "of a computed value": (lambda x: x * (2 if (x + 1).is_contiguous() else 3), square, lambda: turned(square())),
    "in a module": (AsksInside(), square, lambda: turned(square())),
    "channels_last": (is_format, image, channels_last),
    "not channels_last": (is_format, channels_last, image),
    "of a convolution": (
        lambda x: is_format(torch.nn.functional.conv2d(x, torch.ones(3, 2, 2, 2))),
        image,
        channels_last,
    ),
    "stride": (lambda x: x * x.stride()[0], square, lambda: turned(square())),
    "stride of a dimension": (lambda x: x * x.stride(-1), square, lambda: turned(square())),
    "zero strides": (
        lambda x: x * (5 if 0 in x.stride() else 1),
        square,
        lambda: torch.arange(4.0).expand(4, 4),
    ),
    "storage_offset": (lambda x: x + x.storage_offset(), lambda: square()[1:].clone(), lambda: square()[1:]),
    "dim_order": (lambda x: x * x.dim_order()[1], image, channels_last),
    "as_strided": (looks_by_geometry, square, lambda: turned(square())),
    "suggest_memory_format": (
        lambda x: x * (2 if torch._prims_common.suggest_memory_format(x) is torch.channels_last else 3),
        image,
        channels_last,
    ),
    "a view of a reshape": (adds_in_a_reshape, square, lambda: turned(square())),
    "a copy of a reshape": (adds_in_a_reshape, lambda: turned(square()), square),
    "a view of flatten": (adds_in_a_flattened, square, lambda: turned(square())),
    "contiguous, itself": (adds_in_a_contiguous, square, lambda: turned(square())),
    "contiguous, a copy": (adds_in_a_contiguous, lambda: turned(square()), square),
    "contiguous is": (lambda x: x * (2 if x.contiguous() is x else 3), square, lambda: turned(square())),
    "an error that is caught": (suppresses, square, lambda: turned(square())),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_input_that_lies_otherwise_in_memory_is_given_to_the_model_where_it_asks(name: str) -> None:
    model, recorded, new = LAYOUTS[name]
    assert_goes_as_the_model(model, lambda: (recorded(),), lambda: (new(),))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("given", ["a tensor", "a function"])
def test_a_patch_that_lies_otherwise_in_memory_is_what_a_hook_would_give(name: str, given: str) -> None:
    model, recorded, new = LAYOUTS[name]
    prog, wanted = rl.capture(model, recorded()), model(new())
    patch = {"input_1_0": new() if given == "a tensor" else lambda value: new()}
    run = prog.replay(patch=patch)
    assert_same(run.output, wanted)
    assert run.diverged
    assert_same(rl.run(model, recorded(), patch=patch).output, wanted)
    for refused in (
        lambda: prog.replay(patch=patch, on_divergence="raise"),
        lambda: prog.with_patch(patch),
        lambda: prog.replay_many({"a": patch}, on_divergence="raise"),
    ):
        with pytest.raises(rl.DivergedReplay):
            refused()
    swept = prog.replay_many({"a": patch, "b": {"input_1_0": recorded()}}).values
    if wanted.shape == prog.output.shape:
        assert_same(swept[0], wanted)
        assert_same(swept[1], prog.output)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_function_and_a_slice_refuse_what_lies_otherwise(name: str) -> None:
    model, recorded, new = LAYOUTS[name]
    prog = rl.capture(model, recorded())
    for call in (prog.function(), prog.slice()):
        with pytest.raises(rl.DivergedReplay):
            call(new())
    assert_same(prog.function()(recorded()), model(recorded()))


def test_a_layout_that_nobody_asks_for_leads_nowhere() -> None:
    for model in (
        lambda x: x.reshape(16) * 2,
        lambda x: (x.t() @ x).relu(),
        lambda x: x * x.size(0) * x.dim(),
    ):
        run = rl.capture(model, square())(turned(square()))
        assert not run.diverged
        assert_same(run.output, model(turned(square())))


def test_a_layout_question_with_the_same_answer_leads_nowhere() -> None:
    prog = rl.capture(lambda x: x * (2 if x.is_contiguous() else 3), square())
    assert not prog(torch.arange(20.0).reshape(5, 4)[1:]).diverged
    assert not prog.replay(patch={"input_1_0": rl.Scale(2)}).diverged
    assert prog.check()


def test_what_was_asked_of_memory_is_among_the_guards() -> None:
    prog = rl.capture(lambda x: x * x.stride(0), square())
    (guard,) = prog.guards
    assert (guard.kind, guard.result) == ("layout", 4)
    departure = prog(turned(square())).departures[0]
    assert str(departure).startswith("`stride(input_1_0, 0)` was 4 when recorded, and is 1 now.")


def test_state_that_lies_otherwise_is_given_to_the_model_where_it_asks() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(square())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight * (2 if self.weight.is_contiguous() else 3)

    prog = rl.capture(Holds(), x := torch.ones(4, 4))
    run = prog.replay(state={"weight": turned(square())})
    assert run.diverged
    assert_same(run.output, x @ square() * 3)


# ---- flags and modes -------------------------------------------------------------------------------------------------


def plain() -> Tensor:
    return v(1, 2)


def needing() -> Tensor:
    return v(1, 2).requires_grad_()


def computed() -> Tensor:
    return needing() * 1


def inferred() -> Tensor:
    with torch.inference_mode():
        return v(1, 2)


def with_gradient() -> Tensor:
    x = needing()
    x.sum().backward()
    return x


FLAGS: dict[str, tuple[Callable[..., Any], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "requires_grad": (lambda x: x * (2 if x.requires_grad else 3), plain, needing),
    "no requires_grad": (lambda x: x * (2 if x.requires_grad else 3), needing, plain),
    "of a computed value": (lambda x: x * (2 if (x * 1).requires_grad else 3), plain, needing),
    "is_leaf": (lambda x: x * (2 if x.is_leaf else 3), plain, computed),
    "is_leaf of a computed value": (lambda x: x * (2 if (x + 1).is_leaf else 3), plain, needing),
    "grad_fn": (lambda x: x * (2 if x.grad_fn is None else 3), plain, computed),
    "grad_fn of a computed value": (lambda x: x * (2 if (x + 1).grad_fn is None else 3), plain, needing),
    "is_inference": (lambda x: x * (2 if x.is_inference() else 3), plain, inferred),
    "torch.is_inference": (lambda x: x * (2 if torch.is_inference(x) else 3), plain, inferred),
    "grad": (lambda x: x * (2 if x.grad is not None else 3), needing, with_gradient),
    "no grad": (lambda x: x * (2 if x.grad is None else 3), with_gradient, needing),
}


def same_numbers(got: Tensor, wanted: Tensor) -> None:
    assert_same(got.detach().clone(), wanted.detach().clone())


@pytest.mark.parametrize("name", FLAGS)
def test_an_input_with_other_flags_is_given_to_the_model_where_it_asks(name: str) -> None:
    model, recorded, new = FLAGS[name]
    prog, wanted = rl.capture(model, recorded()), model(new())
    for grad in (False, True):
        run = prog.replay(new(), grad=grad)
        same_numbers(run.output, wanted)
        assert run.diverged
        with pytest.raises(rl.DivergedReplay):
            prog.replay(new(), grad=grad, on_divergence="raise")
    for call in (prog.module(), prog.function(), prog.slice()):
        with pytest.raises(rl.DivergedReplay):
            call(new())
    same_numbers(prog.module()(recorded()), model(recorded()))


def test_a_patch_without_a_history_is_what_a_hook_would_give() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.neg()
        return y * (2 if y.requires_grad else 3)

    prog = rl.capture(model, needing())
    for grad in (False, True):
        run = prog.replay(patch={"neg_1": v(5, 6)}, grad=grad)
        same_numbers(run.output, v(15, 18))
        same_numbers(prog.replay(patch={"neg_1": lambda y: y.detach()}, grad=grad).output, v(-3, -6))
        assert not prog.replay(patch={"neg_1": rl.Scale(2)}, grad=grad).diverged
    with pytest.raises(rl.DivergedReplay):
        prog.with_patch({"neg_1": v(5, 6)})


def asks_the_mode(x: Tensor) -> Tensor:
    y = x * (2 if torch.is_grad_enabled() else 3)
    return y + 1


def helper_asks() -> bool:
    return torch.is_grad_enabled()


def asks_by_a_helper(x: Tensor) -> Tensor:
    return x * (2 if helper_asks() else 3)


def asks_for_inference(x: Tensor) -> Tensor:
    return x * (2 if torch.is_inference_mode_enabled() else 3)


def asks_in_a_lambda(x: Tensor) -> Tensor:
    return (lambda: x * (2 if torch.is_grad_enabled() else 3))()


@pytest.mark.parametrize("model", [asks_the_mode, asks_in_a_lambda])
def test_a_question_for_the_mode_stands_on_the_line_that_asks(model: Any) -> None:
    (line,) = {guard.source.line for guard in rl.capture(model, plain()).guards}
    assert line == model.__code__.co_firstlineno + 1


class AsksTheMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (2 if torch.is_grad_enabled() else 3)


@pytest.mark.parametrize("model", [asks_the_mode, asks_by_a_helper, AsksTheMode()], ids=["itself", "helper", "module"])
def test_gradients_of_a_forward_that_asked_for_the_mode_without_them_are_those_of_the_model(model: Any) -> None:
    with torch.no_grad():
        prog = rl.capture(model, plain())
    assert_same(prog.replay().output, prog.output.detach())
    run = prog.replay(needing(), grad=True)
    same_numbers(run.output, model(plain()))
    assert run.diverged and run.output.requires_grad
    for refused in (
        lambda: prog.replay(grad=True, on_divergence="raise"),
        lambda: prog.grads(of=torch.sum, at="input_1"),
        lambda: prog.module()(plain()),
        lambda: prog.function()(plain()),
    ):
        with pytest.raises(rl.DivergedReplay):
            refused()
    with torch.no_grad():
        same_numbers(prog.module()(plain()), model(plain()))


@pytest.mark.parametrize("model", [asks_the_mode, asks_by_a_helper, AsksTheMode()], ids=["itself", "helper", "module"])
def test_a_module_run_without_gradients_refuses_where_the_model_asked_for_them(model: Any) -> None:
    prog = rl.capture(model, plain())
    with torch.no_grad():
        for call in (prog.module(), prog.function()):
            with pytest.raises(rl.DivergedReplay):
                call(plain())


def test_inference_mode_is_asked_for_too() -> None:
    with torch.inference_mode():
        prog = rl.capture(asks_for_inference, plain())
    run = prog.replay(plain(), grad=True)
    assert run.diverged
    same_numbers(run.output, v(3, 6))


def test_what_a_model_asks_of_the_mode_is_among_the_guards() -> None:
    (guard,) = rl.capture(asks_the_mode, plain()).guards
    assert (guard.kind, guard.result, guard.source.function) == ("mode", True, "asks_the_mode")


def test_a_plain_number_of_another_sign_of_zero_is_another_input():
    def model(x, number):
        return x * math.copysign(1, number)

    prog = rl.capture(model, torch.ones(2), 0.0)
    run = prog.replay(torch.ones(2), -0.0)
    assert torch.equal(run.output, model(torch.ones(2), -0.0)) and run.departures


# ---- marks: what a tensor carries besides its numbers ----------------------------------------------------------------


def complexes() -> Tensor:
    return torch.complex(v(1, 2), v(3, 4))


def marked(mark: Callable[[Tensor], Any]) -> Tensor:
    x = v(3, 4).requires_grad_()
    mark(x)
    return x


def holding(**attributes: Any) -> Tensor:
    x = v(3, 4)
    vars(x).update(attributes)
    return x


def of_gradient(factor: float) -> Tensor:
    x = needing()
    (x * factor).sum().backward()
    return x


def sparse() -> Tensor:
    return torch.eye(3)[0].to_sparse()


def chosen(asked: Any) -> int:
    return 2 if asked else 3


MARKS: dict[str, tuple[Callable[..., Any], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "is_conj": (lambda x: x.real * chosen(x.is_conj()), complexes, lambda: complexes().conj()),
    "is_conj of a view": (lambda x: x.real * chosen(x[:1].is_conj()), complexes, lambda: complexes().conj()),
    "is_neg": (lambda x: x * chosen(x.is_neg()), plain, lambda: complexes().conj().imag),
    "is_coalesced": (
        lambda x: x.to_dense() * chosen(x.is_coalesced()),
        lambda: sparse().coalesce(),
        lambda: uncoalesced(),
    ),
    "_nnz": (lambda x: x.to_dense() * x._nnz(), lambda: sparse(), lambda: torch.ones(3).to_sparse()),
    "is_sparse": (lambda x: x.sum() * chosen(x.is_sparse), lambda: torch.ones(3), lambda: sparse()),
    "not is_sparse": (lambda x: x.sum() * chosen(x.is_sparse), lambda: sparse(), lambda: torch.ones(3)),
    "layout": (
        lambda x: x.to_dense() * chosen(x.layout is torch.sparse_csr),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).to_sparse(),
    ),
    "q_scale": (lambda x: x.dequantize() * x.q_scale(), lambda: quantized(0.5), lambda: quantized(0.25)),
    "_version": (lambda x: x * chosen(x._version), plain, lambda: plain().add_(1)),
    "_is_view": (lambda x: x * chosen(x._is_view()), plain, lambda: v(5, 6, 7)[:2]),
    "_base": (lambda x: x * chosen(x._base is None), plain, lambda: v(5, 6, 7)[:2]),
    "is_shared": (lambda x: x * chosen(x.is_shared()), plain, lambda: plain().share_memory_()),
    "output_nr": (
        lambda x: x * chosen(x.output_nr),
        computed,
        lambda: torch.ones(2, 2, requires_grad=True).unbind()[1],
    ),
    "_backward_hooks": (
        lambda x: x * chosen(x._backward_hooks),
        needing,
        lambda: marked(lambda x: x.register_hook(lambda grad: grad)),
    ),
    "_post_accumulate_grad_hooks": (
        lambda x: x * chosen(x._post_accumulate_grad_hooks),
        needing,
        lambda: marked(lambda x: x.register_post_accumulate_grad_hook(lambda tensor: None)),
    ),
    "numbers of a gradient": (lambda x: x * x.grad, lambda: of_gradient(2), lambda: of_gradient(3)),
    "an attribute": (lambda x: x * chosen(getattr(x, "tag", 0)), plain, lambda: holding(tag=1)),
    "another attribute": (lambda x: x * x.tag, lambda: holding(tag=2), lambda: holding(tag=3)),
    "a tensor as attribute": (lambda x: x * x.mask, lambda: holding(mask=v(1, 0)), lambda: holding(mask=v(0, 1))),
}


def uncoalesced() -> Tensor:
    return torch.sparse_coo_tensor([[0, 0]], [0.5, 0.5], (3,))


def quantized(scale: float) -> Tensor:
    return torch.quantize_per_tensor(v(1, 2), scale, 0, torch.qint8)


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*quantize:UserWarning")
def test_an_input_that_carries_another_mark_is_given_to_the_model_where_that_can_be_asked(name: str) -> None:
    model, recorded, new = MARKS[name]
    prog, wanted = rl.capture(model, recorded()), model(new())
    run = prog(new())
    assert run.diverged
    same_numbers(run.output.to_dense(), wanted.to_dense())
    for refused in (
        lambda: prog.replay(new(), on_divergence="raise"),
        lambda: prog.module()(new()),
        lambda: prog.function()(new()),
    ):
        with pytest.raises((rl.DivergedReplay, rl.InputMismatch)):
            refused()


def test_a_conjugated_patch_is_to_the_model_what_a_hook_gives() -> None:
    def model(x: Tensor) -> Tensor:
        return x.real * chosen(x.is_conj())

    prog = rl.capture(model, complexes())
    run = prog.replay(patch={"input_1_0": complexes().conj()})
    assert run.diverged
    assert_same(run.output, v(2, 4))


class HoldsAndAsks(nn.Module):
    def __init__(self, asks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(3))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held.sum() * self.asks(self.held)


OF_STATE: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "shape": (lambda held: held.shape[0], torch.ones(5)),
    "size": (lambda held: held.size(0), torch.ones(5)),
    "len": (len, torch.ones(5)),
    "numel": (lambda held: held.numel(), torch.ones(5)),
    "dim": (lambda held: held.dim(), torch.ones(3, 1)),
    "a new tensor of its shape": (lambda held: torch.zeros(held.shape).numel(), torch.ones(5)),
    "dtype": (lambda held: chosen(held.dtype is torch.float32), torch.ones(3).double()),
    "is_floating_point": (lambda held: chosen(held.is_floating_point()), torch.ones(3).long()),
    "is_sparse": (lambda held: chosen(held.is_sparse), torch.ones(3).to_sparse()),
    "stride": (lambda held: held.stride(0), torch.ones(6)[::2]),
    "requires_grad": (lambda held: chosen(held.requires_grad), torch.ones(3, requires_grad=True)),
}


@pytest.mark.parametrize("name", OF_STATE)
def test_what_the_model_asks_of_other_state_is_answered_by_that(name: str) -> None:
    """Shapes and their like are read of the object, which is the model's own."""
    asks, other = OF_STATE[name]
    model = HoldsAndAsks(asks)
    prog = rl.capture(model, plain())
    wanted = torch.func.functional_call(model, {"held": other}, (plain(),))
    run = prog.replay(state={"held": other})
    assert run.diverged
    same_numbers(run.output, wanted)
    assert_same(prog.replay().output, plain() * 3 * asks(torch.ones(3)))


SPARSE = ("is_coalesced", "_nnz", "is_sparse", "not is_sparse", "layout")


@pytest.mark.parametrize("name", [name for name in MARKS if name not in SPARSE])
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_a_patch_that_carries_another_mark_is_what_a_hook_gives_or_refused(name: str) -> None:
    model, recorded, new = MARKS[name]
    prog, wanted = rl.capture(model, recorded()), model(new())
    for call in (
        lambda: prog.replay(patch={"input_1_0": new()}).output,
        lambda: rl.run(model, recorded(), patch={"input_1_0": new()}).output,
        lambda: prog.with_patch({"input_1_0": new()}).output,
        lambda: prog.replay_many({"a": {"input_1_0": new()}}).values[0],
    ):
        with suppress(rl.DivergedReplay):
            same_numbers(call(), wanted)


# ---- which key, which object, in which order -------------------------------------------------------------------------


class Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Count(IntEnum):
    ONE = 1
    __str__ = int.__repr__  # as from Python 3.11 on


def twice(value: Any) -> tuple[Any, Any]:
    return value, value


def by_its_key(given: Any) -> Tensor:
    """What depends on what the one key of a mapping is."""
    key = next(iter(given))
    return next(iter(given.values())) * {"True": 2, "1": 3, "1.0": 5, "-0.0": 7, "0.0": 11}[str(key)]


def by_what_they_are(one: Any, other: Any) -> Tensor:
    return sum(tensors_in(one)) * (2 if one is other else 3)


def tensors_in(value: Any) -> list[Tensor]:
    return [value.tensor] if isinstance(value, Held) else [*value.values()] if isinstance(value, dict) else [*value]


def by_its_place(x: Tensor, one: Any, other: Any) -> Tensor:
    return x * (2 if one is other else 3)


def by_the_first(x: Tensor, given: Any) -> Tensor:
    return x * (next(iter(given)) + 1)


def by_the_first_within(x: Tensor, given: Any) -> Tensor:
    return x * (next(iter(given[0])) + 1)


def written_through_another(one: list[Any], other: list[Any]) -> Tensor:
    one.append(1)
    return one[0] * len(other)


T, NUMBERS, OTHERS = v(1, 2), np.ones(2), np.ones(2)
OTHER_OBJECTS: dict[str, tuple[Callable[..., Any], Make, Make]] = {
    "True for 1": (by_its_key, lambda: ({1: T},), lambda: ({True: T},)),
    "1.0 for 1": (by_its_key, lambda: ({1: T},), lambda: ({1.0: T},)),
    "an enum for True": (by_its_key, lambda: ({True: T},), lambda: ({Count.ONE: T},)),
    "-0.0 for 0.0": (by_its_key, lambda: ({0.0: T},), lambda: ({-0.0: T},)),
    "a key of an OrderedDict": (by_its_key, lambda: (OrderedDict({1: T}),), lambda: (OrderedDict({True: T}),)),
    "a key of a defaultdict": (
        by_its_key,
        lambda: (defaultdict(list, {1: T}),),
        lambda: (defaultdict(list, {True: T}),),
    ),
    "one list for two": (by_what_they_are, lambda: ([T], [T]), lambda: twice([v(3, 4)])),
    "two lists for one": (by_what_they_are, lambda: twice([T]), lambda: ([v(3, 4)], [v(3, 4)])),
    "one dict for two": (by_what_they_are, lambda: ({"a": T}, {"a": T}), lambda: twice({"a": T})),
    "two objects for one": (by_what_they_are, lambda: twice(Held(T)), lambda: (Held(T), Held(T))),
    "two lists for one that is written": (written_through_another, lambda: twice([T]), lambda: ([T], [T])),
    "two arrays for one": (by_its_place, lambda: (T, NUMBERS, NUMBERS), lambda: (T, NUMBERS, OTHERS)),
    "one list of numbers for two": (by_its_place, lambda: (T, [1], [1]), lambda: (T, *twice([1]))),
    "a set in another order": (by_the_first, lambda: (T, {8, 0}), lambda: (T, {0, 8})),
    "a frozen set in another order": (by_the_first, lambda: (T, frozenset((8, 0))), lambda: (T, frozenset((0, 8)))),
    "a set in a list": (by_the_first_within, lambda: (T, [{8, 0}]), lambda: (T, [{0, 8}])),
}


@pytest.mark.parametrize("name", OTHER_OBJECTS)
def test_a_key_an_object_or_an_order_that_is_another_is_a_fact(name: str) -> None:
    assert_goes_as_the_model(*OTHER_OBJECTS[name], is_one_program=name == "two objects for one")


@pytest.mark.parametrize("name", OTHER_OBJECTS)
def test_the_same_keys_objects_and_orders_are_no_departure(name: str) -> None:
    model, recorded, new = OTHER_OBJECTS[name]
    for make in (recorded, new):
        prog = rl.capture(model, *make())
        assert not prog.replay(*make(), on_divergence="raise").departures
        assert_same(prog.module()(*make()), model(*make()))
        assert rl.check(model, *make())


def test_values_that_nobody_can_write_may_be_one_or_several() -> None:
    prog = rl.capture(by_its_place, T, (1, 2), (1, 2))
    assert not prog.replay(T, *twice((1, 2))).departures
    assert not rl.capture(by_its_place, T, None, None).replay(v(3, 4), None, None).departures


def test_an_edited_program_knows_which_inputs_were_one_object() -> None:
    prog = rl.capture(lambda one, other: torch.relu(one[0]) * (2 if one is other else 3), *twice([T]))
    for edited in (prog.with_patch({"input_1_0": rl.Scale(2.0)}), prog.insert_after("relu_1", torch.neg)):
        assert not edited.replay(*twice([T]), on_divergence="raise").departures
        with pytest.raises(rl.InputMismatch, match="are one object"):
            edited.replay([T], [T])
