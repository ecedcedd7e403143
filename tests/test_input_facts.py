"""What a model can ask of its inputs without reading a number: a replay gives what the model gives, or says so.

The witness is the plain model on the same inputs. Inputs are made anew for each run, since models may write them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def assert_goes_as_the_model(model: Callable[..., Any], recorded: Make, new: Make) -> rl.Run:
    """The value of the model on other inputs, found to be on another path; refused where that cannot be gone."""
    prog, wanted = rl.capture(model, *recorded()), model(*new())
    run = prog(*new())
    assert_same(run.output, wanted)
    assert run.diverged and run.departures
    for refused in (lambda: prog.replay(*new(), on_divergence="raise"), lambda: prog.module()(*new())):
        with pytest.raises((rl.InputMismatch, rl.DivergedReplay)):
            refused()
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
    assert_goes_as_the_model(*OTHER_INPUTS[name])


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
