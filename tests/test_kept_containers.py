"""A module that keeps a tensor and hands it on within other containers: a patch reaches what is handed on alone.

A container that it both keeps and hands on is told apart by a live run, as by a hook that builds a new one; what has no
model to run is refused. The witness is the plain model with a forward hook at the module that maps over the output.
"""

import copy
from collections import OrderedDict, UserList, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import replaylens as rl

Pair = namedtuple("Pair", "left right")


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Holder:
    def __init__(self, value):
        self.value = value


CONTAINERS = {
    "list": lambda b: [b],
    "list of lists": lambda b: [[b]],
    "three lists": lambda b: [[[b]]],
    "tuple of a list": lambda b: ([b],),
    "list of a tuple of a list": lambda b: [([b],)],
    "dict of a list": lambda b: {"a": [b]},
    "list of a dict": lambda b: [{"b": b}],
    "dict of a dict": lambda b: {"a": {"b": b}},
    "ordered dict of one": lambda b: OrderedDict(a=OrderedDict(b=b)),
    "deque": lambda b: deque([b]),
    "list of a deque": lambda b: [deque([b])],
    "deque of a list": lambda b: deque([[b]]),
    "named tuple of a list": lambda b: Pair([b], 1),
    "named tuple of both": lambda b: Pair(b, [b]),
    "namespace of a list": lambda b: SimpleNamespace(a=[b]),
    "list of a namespace": lambda b: [SimpleNamespace(a=b)],
    "object of an object": lambda b: Holder(Holder(b)),
    "object with slots": lambda b: Slotted([b]),
    "list of a user's class": lambda b: UserList([b]),
    "twice": lambda b: [b, [b]],
}


def mapped(function, value):
    """What a forward hook gives that changes every tensor, in new containers."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple, deque)):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((key, mapped(function, item)) for key, item in value.items())
    if isinstance(value, Slotted):
        return Slotted(mapped(function, value.value))
    if hasattr(value, "__dict__"):
        made = copy.copy(value)
        vars(made).update({key: mapped(function, item) for key, item in vars(value).items()})
        return made
    return value


def tensors_of(value):
    found = []
    mapped(lambda tensor: found.append(tensor) or tensor, value)
    return found


class Keeps(nn.Module):
    def __init__(self, container, keep):
        super().__init__()
        self.container, self.keep = container, keep

    def forward(self, x):
        made = x.relu()
        self.kept = self.keep(made)
        return self.container(made)


class HandsOn(nn.Module):
    """Hands on the very container that its part gave, and keeps what is in it."""

    def __init__(self, container):
        super().__init__()
        self.inner = Keeps(container, lambda b: None)

    def forward(self, x):
        out = self.inner(x)
        self.kept = tensors_of(out)[0]
        return out


class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        out = tensors_of(self.part(x))
        return sum(out) + 10 * sum(tensors_of(self.part.kept))


def hooked(model, x):
    handle = model.part.register_forward_hook(lambda module, args, out: mapped(torch.neg, out))
    try:
        return model(x)
    finally:
        handle.remove()


KEEPS = {"the tensor": lambda b: b, "a list of it": lambda b: [b], "a dict of it": lambda b: {"k": b}}


@pytest.fixture
def x():
    return torch.tensor([1.0, 2.0, -3.0])


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_patch_leaves_what_the_module_keeps_as_a_hook_leaves_it(container, keep, x):
    model = Net(Keeps(CONTAINERS[container], KEEPS[keep]))
    wanted = hooked(model, x)
    prog = rl.capture(model, x)
    assert torch.equal(prog.output, model(x))
    assert torch.equal(prog.replay(patch={"part": torch.neg}).output, wanted)
    assert torch.equal(prog.with_patch({"part": torch.neg}).output, wanted)
    assert torch.equal(rl.run(model, x, patch={"part": torch.neg}).output, wanted)
    assert torch.equal(rl.sweep(prog, {0: {"part": torch.neg}})[0], wanted)


@pytest.mark.parametrize("container", CONTAINERS)
def test_so_it_does_where_the_container_came_from_a_part_of_the_module(container, x):
    model = Net(HandsOn(CONTAINERS[container]))
    wanted = hooked(model, x)
    prog = rl.capture(model, x)
    assert torch.equal(prog.replay(patch={"part": torch.neg}).output, wanted)
    assert torch.equal(rl.capture(model, x, save=["part"]).replay(patch={"part": torch.neg}).output, wanted)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_module_that_keeps_nothing_has_no_node_more(container, x):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Keeps(CONTAINERS[container], lambda b: None)

        def forward(self, x):
            return sum(tensors_of(self.part(x)))

    assert "identity" not in str(rl.capture(Plain(), x))


def test_every_law_holds_of_a_module_that_keeps_what_it_hands_on(x):
    assert rl.check(Net(Keeps(CONTAINERS["dict of a list"], KEEPS["the tensor"])), x)


# ---- the very container that the module keeps -------------------------------------------------------------------------


@dataclass(frozen=True)
class Out:
    main: torch.Tensor
    extra: dict


KEPT = CONTAINERS | {
    "dataclass": lambda b: Out(b, {"more": b * 2}),
    "tuple of a list and a tensor": lambda b: ([b], b * 2),
    "one list twice": lambda b: [[b]] * 2,
}


class KeepsWhole(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.container = container

    def forward(self, x):
        self.kept = self.container(x.relu())
        return self.kept


@pytest.mark.parametrize("container", KEPT)
def test_a_patch_where_a_module_keeps_the_very_container_that_it_hands_on_is_made_by_the_model(container, x):
    model = Net(KeepsWhole(KEPT[container]))
    wanted, patch = hooked(model, x), {"part": torch.neg}
    prog = rl.capture(model, x)
    run = prog.replay(patch=patch)
    assert torch.equal(run.output, wanted)
    assert run.diverged
    assert torch.equal(rl.run(model, x, patch=patch).output, wanted)
    assert torch.equal(rl.sweep(prog, {"negated": patch})["negated"], wanted)
    assert torch.equal(rl.capture(model, x, save=[]).replay(patch=patch).output, wanted)
    assert torch.equal(prog.replay(2 * x, patch=patch).output, hooked(model, 2 * x))


@pytest.mark.parametrize("container", ["list", "dict of a list", "object of an object", "dataclass"])
def test_without_a_model_such_a_patch_is_refused_and_the_layer_named_that_all_read(container, x):
    model = Net(KeepsWhole(KEPT[container]))
    prog = rl.capture(model, x)
    said = r"what `part:1` returns in a container that something else holds as well was relu_1_1 for all(.|\n)*"
    said += "A patch at `relu_1_1` changes it for all that read it"
    for asked in (
        lambda: prog.replay(patch={"part": torch.neg}, on_divergence="raise"),
        lambda: prog.with_patch({"part": torch.neg}),
        lambda: prog.insert_after("part", torch.neg),
        lambda: prog.slice().replay(patch={"part": torch.neg}),
    ):
        with pytest.raises(rl.errors.DivergedReplay, match=said):
            asked()
    both = prog.replay(patch={"relu_1": torch.neg}, on_divergence="raise")
    assert torch.equal(both.output, -model(x))


def test_what_needs_to_know_who_reads_a_shared_container_says_that_nobody_does(x):
    prog = rl.capture(Net(KeepsWhole(KEPT["list"])), x)
    with pytest.raises(rl.errors.BadEdit, match=r"a slice cannot begin there\.\nBegin at relu_1_1"):
        prog.slice(from_="part")
    with pytest.raises(rl.errors.NoGradient, match="At relu_1_1 is the gradient of all that read it"):
        prog.grads(of=torch.sum, at="part")["part"]
    with pytest.raises(rl.errors.DivergedReplay, match="returns in a container"):
        prog.function(inputs="part")(x)
    swapped = prog.swap("part", torch.tanh)
    assert torch.equal(swapped.output, x.tanh() + 10 * x.tanh())


@pytest.mark.parametrize("container", KEPT)
def test_every_law_holds_of_a_module_that_keeps_the_very_container(container, x):
    assert rl.check(Net(KeepsWhole(KEPT[container])), x)


def appends(made, kept):
    made.append(made[0] * 2)
    return sum(made) + 10 * sum(kept)


def replaces(made, kept):
    made[0] = made[0] * 2
    return sum(made) + 10 * sum(kept)


def takes_out(made, kept):
    first = made.pop(0)
    return first + 10 * sum(kept)


def clears(made, kept):
    made.clear()
    return torch.ones(3) + 10 * sum(kept)


@pytest.mark.parametrize("then", [appends, replaces, takes_out, clears])
def test_what_a_parent_does_to_the_container_it_does_to_the_hooks_one(then, x):
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = KeepsWhole(lambda b: [b, b.exp()])

        def forward(self, x):
            return then(self.part(x), self.part.kept)

    model = Parent()
    wanted = hooked(model, x)
    prog = rl.capture(model, x)
    assert torch.equal(prog.output, model(x))
    assert torch.equal(prog.replay(patch={"part": torch.neg}).output, wanted)
    assert torch.equal(rl.run(model, x, patch={"part": torch.neg}).output, wanted)


def test_a_container_that_came_from_outside_and_is_handed_back_is_another_one_for_the_caller(x):
    class Fills(nn.Module):
        def forward(self, x, bag):
            bag.append(x.relu())
            return bag

    class Gives(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Fills()

        def forward(self, x):
            bag = [x.exp()]
            out = self.part(x, bag)
            return sum(out) + 10 * sum(bag)

    model = Gives()
    wanted = hooked(model, x)
    prog = rl.capture(model, x)
    assert torch.equal(prog.replay(patch={"part": torch.neg}).output, wanted)
    assert torch.equal(rl.run(model, x, patch={"part": torch.neg}).output, wanted)
    one = prog.replay(patch={"part[1]": torch.neg}).output
    assert torch.equal(one, x.exp() - x.relu() + 10 * (x.exp() + x.relu()))


def test_modules_that_hand_on_one_shared_container_are_patched_each_at_its_own_end(x):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = KeepsWhole(lambda b: [b])

        def forward(self, x):
            self.kept = self.inner(x)
            return self.kept

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Outer()

        def forward(self, x):
            return self.part(x)[0] + 10 * self.part.kept[0] + 100 * self.part.inner.kept[0]

    model, r = Whole(), x.relu()
    prog = rl.capture(model, x)
    wanted = {"part": -r + 10 * r + 100 * r, "part.inner": -r - 10 * r + 100 * r}
    for address, output in wanted.items():
        assert torch.equal(prog.replay(patch={address: torch.neg}).output, output)
        assert torch.equal(rl.run(model, x, patch={address: torch.neg}).output, output)
    assert torch.equal(prog.replay(patch={"relu_1": torch.neg}).output, -111 * r)
