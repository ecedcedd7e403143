"""Edges: the value that one node reads from another, and only that one."""

import pytest
import torch
from internals import problems
from oracle import assert_same
from torch import nn
from torch.nn import functional as F

import replaylens as rl

Edge = rl.Edge


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = Block(), Block(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.two(self.one(x)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prog(net, x):
    return rl.capture(net, x)


def said(kind, action):
    with pytest.raises(kind) as error:
        action()
    assert error.type is kind
    return str(error.value)


def test_only_the_receiver_reads_the_patched_value(net, x, prog):
    run = prog.replay(patch={Edge("one", "two.a"): rl.Zero()})
    stream = net.one(x)
    assert_same(run.output, net.head(stream + net.two.b(F.relu(net.two.a(torch.zeros_like(stream))))))
    assert_same(run["one"], stream, "the sender keeps its value")
    assert_same(run["add_2"], stream + run["two.b"])


def test_the_other_edge_is_the_rest(net, x, prog):
    run = prog.replay(patch={Edge("one", "add_2"): rl.Zero()})
    assert_same(run.output, net.head(net.two.b(F.relu(net.two.a(net.one(x))))))


def test_all_edges_of_a_node_are_the_node(prog):
    both = {Edge("one", "two.a"): rl.Scale(0.5), Edge("one", "add_2"): rl.Scale(0.5)}
    wanted = prog.replay(patch={"one": rl.Scale(0.5)}).output
    assert_same(prog.replay(patch=both).output, wanted)
    assert_same(prog.replay(patch={Edge("one", ["two.a", "add_2"]): rl.Scale(0.5)}).output, wanted)


def test_receivers_may_be_a_selection(prog):
    receivers = prog.find(where=lambda layer: "add_1_4" in layer.parents)
    assert receivers.labels == ("linear_3_5", "add_2_8")
    assert_same(
        prog.replay(patch={Edge("one", receivers): rl.Scale(0.5)}).output,
        prog.replay(patch={"one": rl.Scale(0.5)}).output,
    )


def test_a_reader_that_reads_a_value_twice_gets_both_patched(x):
    prog = rl.capture(lambda x: torch.mul(*[x.exp()] * 2) + x, x)
    assert_same(prog.replay(patch={Edge("exp_1", "mul_1"): rl.Scale(2.0)}).output, (2 * x.exp()) ** 2 + x)


def test_the_output_is_a_receiver(x):
    prog = rl.capture(lambda x: (x.exp(), x.exp().sum()), x)
    one, other = prog.replay(patch={Edge("exp_1", "output"): rl.Zero()}).output
    assert_same(one, torch.zeros(2, 8))
    assert_same(other, x.exp().sum())


def test_an_edge_takes_what_another_program_has_at_the_sender(net, prog):
    corrupt = rl.capture(net, torch.zeros(2, 8))
    run = prog.replay(patch={Edge("one", "two.a"): rl.From(corrupt)})
    assert_same(run.output, prog.replay(patch={Edge("one", "two.a"): corrupt["one"].value}).output)
    assert not torch.equal(run.output, prog.output)


def test_parts_of_an_edge_are_patched(net, x, prog):
    run = prog.replay(patch={Edge("one", "two.a"): rl.Zero("b [d]", d=[0, 1])})
    stream = net.one(x)
    cut = stream * torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1])
    assert_same(run.output, net.head(stream + net.two.b(F.relu(net.two.a(cut)))))


def test_edges_and_layers_are_patched_together_and_the_names_of_layers_stay(prog):
    run = prog.replay(patch={Edge("one", "two.a"): rl.Zero(), "relu*": rl.Scale(2.0), -2: rl.Add(1.0)})
    by_hand = prog.replay(patch={"two.a": F.linear(torch.zeros(2, 8), prog.state["two.a.weight"], prog.state["two.a.bias"]),
                                 "relu": rl.Scale(2.0), "head": rl.Add(1.0)})  # fmt: skip
    assert_same(run.output, by_hand.output)
    assert_same(run[-2], by_hand["head"])


def test_an_edge_may_begin_at_an_input_a_parameter_or_one_of_several_values(net, x, prog):
    run = prog.replay(patch={Edge("input_1", "one.a"): rl.Zero()})
    assert_same(run["one"], x + net.one.b(F.relu(net.one.a(torch.zeros_like(x)))))
    run = prog.replay(patch={Edge("head.bias", "head"): rl.Zero()})
    assert_same(run.output, F.linear(prog["add_2"].value, net.head.weight, torch.zeros(3)))
    parts = rl.capture(lambda x: (torch.add(*x.chunk(2, 1)), x), x)
    assert_same(parts.replay(patch={Edge("chunk_1", "add_1"): rl.Scale(2.0)}).output, (2 * sum(x.chunk(2, 1)), x))


def test_an_edge_in_a_program_is_a_line_of_it(prog):
    other = prog.with_patch({Edge("one", "two.a"): rl.Zero()})
    assert not problems(other.graph)
    assert_same(other.output, prog.replay(patch={Edge("one", "two.a"): rl.Zero()}).output)
    assert other.history[-1] == "with_patch({Edge('one', 'two.a'): Zero()})"
    lines = [row.strip() for row in other.code.splitlines()]
    assert "add_1_4_to_linear_3_5 = zero(add_1_4)  # float32[2, 8]; Zero()" in lines
    assert "linear_3_5 = linear(add_1_4_to_linear_3_5, two.a.weight, two.a.bias)  # float32[2, 8]" in lines
    assert "add_2_8 = add(add_1_4, linear_4_7)  # float32[2, 8]" in lines
    assert_same(other["add_1_4_to_linear_3_5"].value, torch.zeros(2, 8))


def test_gradients_go_through_an_edge_as_by_hand(net, x, prog):
    scale = torch.tensor(0.5, requires_grad=True)
    prog.replay(patch={Edge("one", "two.a"): rl.Scale(scale)}, grad=True).output.sum().backward()
    found = (scale.grad, net.one.a.weight.grad)
    scale.grad, net.one.a.weight.grad = None, None
    stream = net.one(x)
    net.head(stream + net.two.b(F.relu(net.two.a(stream * scale)))).sum().backward()
    for one, other in zip(found, (scale.grad, net.one.a.weight.grad), strict=True):
        torch.testing.assert_close(one, other)


def test_new_inputs_and_edges_go_together(net, prog):
    other = torch.randn(2, 8)
    run = prog.replay(other, patch={Edge("one", "two.a"): rl.Zero()})
    stream = net.one(other)
    assert_same(run.output, net.head(stream + net.two.b(F.relu(net.two.a(torch.zeros_like(stream))))))


def test_a_sender_that_is_not_read_is_an_error_that_says_what_is(prog):
    patch = {Edge("relu_1", "two.a"): rl.Zero()}
    wanted = "linear_3_5 does not read relu_1_2: it reads add_1_4, two.a.weight, two.a.bias."
    assert said(rl.BadEdit, lambda: prog.replay(patch=patch)) == wanted
    assert said(rl.BadEdit, lambda: prog.with_patch(patch)) == wanted
    assert said(rl.BadEdit, lambda: prog.replay(patch={Edge("relu_1", "output"): rl.Zero()})) == (
        "The output does not read relu_1_2: it is made of linear_5_9."
    )
    assert said(rl.BadEdit, lambda: prog.replay(patch={Edge("relu_1", "input_1"): rl.Zero()})) == (
        "input_1_0 does not read relu_1_2: it reads nothing."
    )
    with pytest.raises(rl.NoSuchLayer, match="relu_9"):
        prog.replay(patch={Edge("relu_9", "output"): rl.Zero()})


def test_an_edge_into_a_gradient_of_the_models_own_is_refused(x):
    def model(x):
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(y.square().sum(), y)
        return slope

    prog = rl.capture(model, x)
    assert said(rl.BadEdit, lambda: prog.replay(patch={Edge("requiresgrad_1", "grad_1"): rl.Zero()})) == (
        "grad_1_5 is a gradient that the model takes through requiresgrad_1_2: it reads no copy of it."
    )
    assert said(rl.BadEdit, lambda: prog.replay(patch={Edge("detach_1", "grad_1"): rl.Zero()})) == (
        "grad_1_5 does not read detach_1_1: it reads requiresgrad_1_2."
    )


def test_an_edge_compares_and_prints():
    assert Edge("a", ["b", "c"]) == Edge("a", ("b", "c")) and hash(Edge("a", ["b"])) == hash(Edge("a", ("b",)))
    assert repr(Edge("relu_1", "linear_2")) == "Edge('relu_1', 'linear_2')"
