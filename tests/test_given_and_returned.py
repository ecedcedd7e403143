"""What a model returns stays what it was, and what is given in place of a tensor is refused by its name.

The witness for an output is a copy of it, taken before the model runs again.
"""

import copy
import functools
import sys
from collections import OrderedDict, defaultdict, deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import replaylens as rl
from replaylens.errors import CaptureError, InputMismatch


class Counts(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.run = nn.Linear(4, 4), forward
        self.register_buffer("b", torch.zeros(4))
        self.register_buffer("c", torch.ones(4))

    def forward(self, x):
        return self.run(self, self.first(x))


def returns_its_buffer(self, h):
    self.b += 1
    return h + self.b, self.b


def returns_a_view_of_its_buffer(self, h):
    self.b.add_(1)
    return [h, {"part": self.b[1:3]}]


def returns_it_twice(self, h):
    self.b.add_(1)
    return self.b, h, (self.b, self.b.view(2, 2))


def returns_what_becomes_a_buffer(self, h):
    made = self.b + h.mean(0).detach()
    self.b.mul_(0)
    self.b = made
    return made


def returns_a_view_of_what_becomes_a_buffer(self, h):
    self.b.mul_(7)
    self.b = self.b + 1
    return self.b[:2], h


def returns_what_becomes_a_buffer_unwritten(self, h):
    self.b.add_(3)
    new = self.c + 1
    self.c = self.b
    self.b = new
    return new, self.c, h


def returns_a_parameter_written(self, h):
    self.first.bias.data.add_(1)
    return h, self.first.bias


def returns_a_buffer_with_a_history(self, h):
    self.b = self.b.detach().add_(1) * 1
    kept = self.b * h.sum()
    self.b = kept
    return kept


WAYS = (
    returns_its_buffer,
    returns_a_view_of_its_buffer,
    returns_it_twice,
    returns_what_becomes_a_buffer,
    returns_a_view_of_what_becomes_a_buffer,
    returns_what_becomes_a_buffer_unwritten,
    returns_a_parameter_written,
    returns_a_buffer_with_a_history,
)


def tensors_of(tree):
    return [one for one in torch.utils._pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_program_says_the_model_returned_outlives_the_models_next_forward(way):
    torch.manual_seed(0)
    model, x = Counts(way), torch.randn(3, 4)
    wanted = [one.detach().clone() for one in tensors_of(copy.deepcopy(model)(x))]
    prog = rl.capture(model, x)
    assert torch.utils._pytree.tree_structure(prog.output) == torch.utils._pytree.tree_structure(model(x))
    for found in (prog.output, prog.replay().output):
        assert all(torch.equal(one, other) for one, other in zip(tensors_of(found), wanted, strict=True))
    report = prog.check()
    assert report or report.stale, str(report)


def test_what_becomes_a_buffer_and_is_returned_keeps_its_gradients():
    model, x = Counts(returns_a_buffer_with_a_history), torch.randn(3, 4)
    model.b += 1
    other = copy.deepcopy(model)
    rl.capture(model, x).output.sum().backward()
    other(x).sum().backward()
    assert torch.equal(model.first.weight.grad, other.first.weight.grad)


def test_an_output_that_no_forward_writes_is_the_very_tensor_that_the_model_returned():
    made = []

    def forward(x):
        made.append(x * 2)
        return made[0]

    assert rl.capture(forward, torch.ones(2)).output is made[0]


GIVEN = (None, {"a": torch.ones(3, 4)}, (torch.ones(3, 4),), [1.0], 1.0, "x", object())


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("inputs", [None, "1"])
def test_a_function_says_which_argument_is_no_tensor(given, inputs):
    function = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(3, 4)).function(inputs=inputs)
    with pytest.raises(InputMismatch, match=r"argument for \w+ is (None|an? \w+);.*float32\[3, 4\].*\nGive a tensor"):
        function(given)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: type(given).__name__)
def test_state_that_is_no_tensor_is_refused_by_its_address(given):
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(3, 4))
    with pytest.raises(
        InputMismatch, match=r"state at '0.weight' is (None|an? \w+);.*float32\[4, 4\].*\nGive a tensor"
    ):
        prog.replay(state={"0.weight": given})


@pytest.mark.parametrize("given", [torch.zeros(3, 3), torch.zeros(4, 4).double(), torch.zeros(4, 7)], ids=str)
def test_state_that_the_model_cannot_take_is_refused_by_its_address(given):
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(3, 4))
    with pytest.raises(InputMismatch, match=r"state at '0.weight' is .*recorded with float32\[4, 4\]") as refused:
        prog.replay(state={"0.weight": given})
    assert "capture again" in str(refused.value) and isinstance(refused.value.__cause__, RuntimeError)


def test_state_of_another_shape_that_the_model_can_take_is_given_to_it():
    model = nn.Embedding(4, 3)
    prog = rl.capture(model, torch.tensor([1, 2]))
    other = torch.randn(9, 3)
    assert torch.equal(prog.replay(state={"weight": other}).output, other[[1, 2]])


# Python 3.12 has no room for more: its stack of calls in C, which no limit of a user's widens, is the shortest.
@pytest.mark.parametrize("depth", [150] if sys.version_info[:2] == (3, 12) else [200, 230])
def test_a_model_of_many_nested_modules_is_checked(depth):
    model = nn.Linear(4, 4)
    for _ in range(depth):
        model = nn.Sequential(model)
    assert rl.check(model, torch.randn(2, 4))


def nested(value, depth):
    for _ in range(depth):
        value = [value]
    return value


class Nests(nn.Module):
    def forward(self, x):
        return nested(x * 2, 600)


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Nests()

    def forward(self, x):
        made = self.inner(x)
        while isinstance(made, list):
            (made,) = made
        return made


@pytest.mark.parametrize("model", [Nests(), Unpacks()], ids=["output", "output of a module"])
def test_lists_too_deep_for_a_replay_are_refused_at_capture(model):
    with pytest.raises(CaptureError, match="nested deeper than Python's stack"):
        rl.capture(model, torch.ones(2))


def test_lists_nested_as_deep_as_there_is_room_for_are_captured():
    prog = rl.capture(lambda x: nested(x * 2, 300), torch.ones(2))
    assert prog.check() and len(prog.replay(torch.zeros(2)).output) == 1


# ---- containers that torch does not know ------------------------------------------------------------------------------


class Named(dict):
    """A dict that says more than it holds."""

    def __setitem__(self, key, value):
        raise TypeError("written once")


class Ordered(OrderedDict):
    pass


class Counted(defaultdict):
    pass


class Listed(list):
    pass


class Fixed(tuple):
    def __new__(cls, items, more=None):
        made = super().__new__(cls, items)
        made.more = more
        return made


class Queue(deque):
    pass


class Bag(set):
    pass


CONTAINERS = {
    "a class of dicts": lambda h: Named(a=h, b=[h + 1]),
    "a class of ordered dicts": lambda h: Ordered(a=h, b=(h + 1,)),
    "a class of default dicts": lambda h: Counted(list, a=h),
    "a class of lists": lambda h: Listed([h, h + 1]),
    "a class of tuples": lambda h: Fixed([h], more=h + 1),
    "a class of queues": lambda h: Queue([h, h + 1], 3),
    "a set": lambda h: {h},
    "a frozen set": lambda h: frozenset([h]),
    "a class of sets": lambda h: Bag([h]),
    "a mapping that cannot be written": lambda h: MappingProxyType({"a": h, "b": {"c": h + 1}}),
    "a slice": lambda h: slice(h, h + 1),
    "a list of a class of dicts": lambda h: [Listed([Named(a=h)])],
}


def found_in(value):
    """The tensors of these containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, slice):
        return [value.start, value.stop]
    if isinstance(value, (dict, MappingProxyType)):
        return [one for item in value.values() for one in found_in(item)]
    more = [value.more] if isinstance(value, Fixed) else []
    return [one for item in [*value, *more] for one in found_in(item)]


class Packs(nn.Module):
    def __init__(self, pack):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.pack = nn.Linear(3, 3), pack

    def forward(self, x):
        return self.pack(self.first(x))


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_a_model_returns_in_a_container_of_any_class_is_of_this_replay(container):
    model, x = Packs(CONTAINERS[container]), torch.randn(2, 3)
    prog = rl.capture(model, x)
    for found, wanted in (
        (prog.replay(2 * x).output, model(2 * x)),
        (prog.replay(patch={"first": rl.Scale(3)}).output, model.pack(model.first(x) * 3)),
        (rl.run(model, x, patch={"first": rl.Scale(3)}).output, model.pack(model.first(x) * 3)),
        (rl.capture(model, x, save=[]).output, model(x)),
    ):
        assert type(found) is type(wanted)
        pairs = zip(found_in(found), found_in(wanted), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) and found_in(wanted)
    assert getattr(prog.replay(2 * x).output, "maxlen", 3) == 3
    assert rl.check(model, x)


@pytest.mark.parametrize("container", CONTAINERS)
def test_so_is_what_a_module_hands_on_in_one_and_it_is_patched_there(container):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Packs(CONTAINERS[container])

        def forward(self, x):
            return sum(found_in(self.part(x)))

    model, x = Net(), torch.randn(2, 3)
    wanted = sum(one * 3 for one in found_in(model.part(x)))
    prog = rl.capture(model, x)
    assert torch.equal(prog.replay(patch={"part": rl.Scale(3)}).output, wanted)
    assert torch.equal(rl.run(model, x, patch={"part": rl.Scale(3)}).output, wanted)


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_given_in_one_is_an_input(container):
    make = CONTAINERS[container]
    x = torch.randn(2, 3)
    prog = rl.capture(lambda given: sum(found_in(given)) * 2, make(x))
    assert torch.equal(prog.replay(make(3 * x)).output, sum(found_in(make(3 * x))) * 2)


CLOSED = {
    "function": lambda h: lambda: h,
    "partial": lambda h: functools.partial(torch.add, h),
    "builtin_function_or_method": lambda h: h.sum,
    "list_iterator": lambda h: iter([h]),
    "dict_values": lambda h: {"a": h}.values(),
    "map": lambda h: map(torch.neg, [h]),
    "ndarray": lambda h: np.array([Counts, [h]], dtype=object),
    "ValueError": lambda h: ValueError(h),
    "ParameterList": lambda h: nn.ParameterList([nn.Parameter(h.detach().clone())]),
    "tensor as a key": lambda h: {"a": {h: 1}},
}


@pytest.mark.parametrize("what", CLOSED)
def test_what_a_model_computed_and_returns_where_no_replay_could_put_another_is_refused(what):
    with pytest.raises(CaptureError, match=rf"the model returned an? {what}.*a replay could not replace it"):
        rl.capture(Packs(lambda h: (h, CLOSED[what](h))), torch.randn(2, 3))


def test_functions_and_modules_that_hold_nothing_of_the_forward_are_returned_as_they_are():
    model = Packs(None)
    model.pack = lambda h: (h, torch.relu, model.first, model.forward, nn.Linear, functools.partial(F.gelu), iter([1]))
    prog = rl.capture(model, x := torch.randn(2, 3))
    assert prog.output[2] is model.first
    assert torch.equal(prog.replay(2 * x).output[0], model.first(2 * x))


class Appends(nn.Module):
    """Appends to one of its containers, and reads the other."""

    def __init__(self):
        super().__init__()
        self.part = nn.Identity()

    def forward(self, a, b):
        h = self.part(a[0] * 2)
        if h.sum() < 1000:
            a.append(h)
        else:
            a.extend([h, h])
        return b[-1] * len(b)


def twice():
    given = [torch.ones(2)]
    return given, given


@pytest.mark.parametrize("factor", [3.0, 3000.0])
def test_a_container_that_is_given_twice_is_one_container_in_live_runs(factor):
    model = Appends()
    hook = model.part.register_forward_hook(lambda module, args, out: out * factor)
    expected = model(*twice())
    hook.remove()
    patch = {"part": rl.Scale(factor)}
    assert torch.equal(rl.run(model, *twice()).output, model(*twice()))
    assert torch.equal(rl.run(model, *twice(), patch=patch).output, expected)
    prog = rl.capture(model, *twice())
    assert torch.equal(prog.replay(patch=patch).output, expected)
    assert torch.equal(rl.capture(model, [torch.ones(2)], [torch.ones(2)]).replay(*twice()).output, model(*twice()))


def test_an_object_whose_attributes_are_one_dict_is_so_in_live_runs():
    class Thing:
        def __init__(self):
            self.one = self.other = {"a": torch.zeros(2)}

    def model(thing):
        thing.one["a"] = thing.one["a"] + 2
        return thing.other["a"]

    assert torch.equal(rl.run(model, Thing()).output, model(Thing()))


@pytest.mark.parametrize("share", [lambda t: torch.from_numpy(t.numpy()), torch.from_dlpack], ids=["numpy", "dlpack"])
def test_inputs_over_one_memory_that_torch_does_not_know_of_are_refused_where_it_is_written(share):
    def writes(a, b):
        a.mul_(2)
        return a + b

    def both():
        tensor = torch.ones(3)
        return tensor, share(tensor)

    for ask in (rl.capture, rl.run, rl.capture(writes, torch.ones(3), torch.ones(3)).replay):
        with pytest.raises(rl.CaptureError, match="shares memory with another tensor of the forward"):
            ask(*both()) if ask not in (rl.capture, rl.run) else ask(writes, *both())
    assert torch.equal(rl.capture(lambda a, b: a + b, *both()).output, torch.full((3,), 2.0))


class Holds(torch.nn.Module):
    """A model that does what a function says, with these tensors and arrays."""

    def __init__(self, does, **things):
        super().__init__()
        self.does = does
        for name, thing in things.items():
            if type(thing) is torch.Tensor:
                self.register_buffer(name, thing)
            else:
                setattr(self, name, thing)

    def forward(self, *args):
        return self.does(self, *args)


def _writes_the_input(m, x):
    return x.mul_(2)


def _writes_the_buffer(m, x):
    m.b.mul_(2)
    return x + 1


OVER_ONE_MEMORY = {
    "an unread buffer": lambda one, two: (Holds(_writes_the_input, b=one), two),
    "an unread parameter": lambda one, two: (Holds(_writes_the_input, p=torch.nn.Parameter(one)), two),
    "an unread input": lambda one, two: (Holds(lambda m, x: m.b.mul_(2), b=one), two),
    "two buffers": lambda one, two: (Holds(_writes_the_buffer, b=one, c=two), torch.ones(3)),
    "a buffer and a parameter": lambda one, two: (
        Holds(_writes_the_buffer, b=one, c=torch.nn.Parameter(two, requires_grad=False)),
        torch.ones(3),
    ),
}


@pytest.mark.parametrize("make", OVER_ONE_MEMORY.values(), ids=OVER_ONE_MEMORY)
@pytest.mark.parametrize("share", [lambda t: torch.from_numpy(t.numpy()), torch.from_dlpack], ids=["numpy", "dlpack"])
def test_what_the_model_holds_over_memory_that_is_written_is_refused_where_nothing_reads_it(share, make):
    tensor = torch.ones(3)
    model, x = make(tensor, share(tensor))
    with pytest.raises(rl.CaptureError, match="shares memory with another tensor of the forward"):
        rl.capture(model, x)


def _numpy_writes_between(m, x):
    y = m.b + x
    m.array *= 2
    return y + m.b


def _numpy_writes_unread(m, x):
    m.array[0] = 7
    return x + 1


def _torch_writes_and_numpy_reads(m, x):
    m.b.add_(x)
    return x * float(m.array[0])


KEPT_ARRAYS = {
    "written between": (_numpy_writes_between, "written by numpy, through an array"),
    "written unread": (_numpy_writes_unread, "written by numpy, through an array"),
    "read by numpy": (_torch_writes_and_numpy_reads, "an array that the model holds"),
}


@pytest.mark.parametrize(("does", "why"), KEPT_ARRAYS.values(), ids=KEPT_ARRAYS)
def test_memory_that_is_written_beneath_an_array_which_the_model_keeps_is_refused(does, why):
    buffer = torch.ones(3)
    with pytest.raises((rl.CaptureError, rl.UnannouncedWrite), match=why):
        rl.capture(Holds(does, b=buffer, array=buffer.numpy()), torch.ones(3))


def test_an_array_that_the_model_keeps_over_a_buffer_is_no_matter_where_nothing_is_written():
    buffer = torch.ones(3)
    model = Holds(lambda m, x: x * float(m.array[0]) + m.b, b=buffer, array=buffer.numpy()[::-1])
    assert torch.equal(rl.capture(model, torch.ones(3)).replay(torch.zeros(3)).output, torch.ones(3))


def _item(x, y):
    y.numpy()[0] = 5
    return x + y


def _past_a_read(x, y):
    before = x * 2
    y.detach().numpy()[0] = 5
    return before + x


def _memoryview(x, y):
    memoryview(y.numpy())[0] = 5.0
    return x * 2


def _storage(x, y):
    before = x * 2
    y.untyped_storage().fill_(0)
    return before + x + y


_SHARING = {
    "a view": lambda: (given := torch.arange(3.0), given.view(3)),
    "two aliases": lambda: ((given := torch.arange(3.0)).detach(), given.detach()),
    "a part of each": lambda: ((given := torch.arange(4.0))[:3], given[1:]),
}


@pytest.mark.parametrize("sharing", _SHARING)
@pytest.mark.parametrize("write", [_item, _past_a_read, _memoryview, _storage])
def test_inputs_over_one_memory_that_numpy_writes_are_refused(write, sharing):
    with pytest.raises(rl.CaptureError, match="shares it"):
        rl.capture(write, *_SHARING[sharing]())


def test_inputs_side_by_side_or_given_twice_may_be_written_by_numpy():
    for write in (_item, _past_a_read, _memoryview, _storage):
        for given in (lambda: ((both := torch.arange(6.0))[:3], both[3:]), lambda: [torch.arange(3.0)] * 2):
            wanted = write(*given())
            assert torch.equal(rl.capture(write, *given()).replay().output, wanted)


def test_buffers_over_one_memory_that_numpy_writes_are_refused():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.arange(3.0))
            self.register_buffer("b", self.a.view(3))

        def forward(self, x):
            y = self.a * x
            self.b.numpy()[0] = 5
            return y + self.a

    with pytest.raises(rl.CaptureError, match="a buffer"):
        rl.capture(Shares(), torch.ones(3))


class _WithoutAHash:
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("cannot be compared")


BESIDE = {
    "an array": np.ones(3),
    "a set": {1, 2},
    "a bytearray": bytearray(b"ab"),
    "arrays in a dict": {"a": np.ones(2), "b": {1}},
    "an object without a hash": _WithoutAHash(),
}


@pytest.mark.parametrize("name", BESIDE)
def test_an_input_is_patched_whatever_stands_beside_it(name):
    x, beside = torch.randn(2, 3), BESIDE[name]
    prog, double = rl.capture(lambda t, k: t.relu() + 1, x, beside), {"input_1": lambda t: t * 2}
    wanted = (x * 2).relu() + 1
    assert torch.equal(prog.replay(patch=double, on_divergence="raise").output, wanted)
    assert torch.equal(prog.replay(patch={"input_1": torch.nn.Parameter(x * 2)}).output, wanted)
    edited = prog.with_patch(double)
    assert torch.equal(edited.output, wanted) and torch.equal(edited.replay(x, beside).output, wanted)
