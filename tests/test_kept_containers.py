"""A module that keeps a tensor and hands it on within other containers: a patch reaches what is handed on alone.

The witness is the plain model with a forward hook at the module that maps over the output.
"""

import copy
from collections import OrderedDict, UserList, deque, namedtuple
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
