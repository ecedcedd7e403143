"""Edits give other programs: swap, insert, bypass, rewire, lesion, set_state, with_patch, each beside the same by hand."""

import copy
from pathlib import Path

import pytest
import torch
from internals import problems
from oracle import assert_same
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import replaylens as rl


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.b(self.act(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Block()
        self.two = Block()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.two(self.one(x)))


class Conv(nn.Module):
    """Convolutions, a batch norm that keeps statistics, activations in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(4, 2, 3)

    def forward(self, x):
        return F.relu(self.last(self.act(self.norm(self.conv(x)))), inplace=True).flatten(1)


def made(model, *args):
    torch.manual_seed(0)
    return model(*args)


@pytest.fixture
def net():
    return made(Net)


@pytest.fixture
def x():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def capture(model, *inputs):
    return rl.capture(model, *inputs)


def said(kind, action):
    with pytest.raises(kind) as error:
        action()
    assert error.type is kind
    return str(error.value)


def line(code):
    """How a message points at the line of this file that begins so."""
    lines = Path(__file__).read_text().splitlines()
    number, text = next((n, text.strip()) for n, text in enumerate(lines, 1) if text.strip().startswith(code))
    return f"    test_edits.py:{number}    {text}"


def body(prog):
    """The lines of a program's code that compute something."""
    return [row.strip() for row in prog.code.splitlines()[1:] if not row.strip().startswith("#")]


# ---- swap: another function gets what the operation read -----------------------------------------------------------


def test_swapping_a_type_swaps_every_one_of_it(net, x):
    prog = capture(net, x).swap("relu", torch.tanh)
    net.one.act = net.two.act = nn.Tanh()
    assert_same(prog.output, net(x))
    assert [layer.layer_type for layer in prog.layers].count("tanh") == 2
    assert prog["relu_1"].layer_type == "tanh", "it keeps its name"


@pytest.mark.parametrize(
    "where", ["relu_2", "two.act", "two.*act", rl.where(lambda layer: layer.module == "two.act"), 6, "selection"]
)
def test_one_operation_is_swapped_by_any_key(net, x, where):
    prog = capture(net, x)
    where = prog.find(op="relu", module="two") if where == "selection" else where
    net.two.act = nn.SiLU()
    assert_same(prog.swap(where, F.silu).output, net(x))


def test_the_original_stays_as_it_was(net, x):
    prog = capture(net, x)
    graph, values = prog.graph, {layer.label: layer.value.clone() for layer in prog.layers}
    other = prog.swap("relu", F.gelu).lesion("add_1").set_state("head.bias", torch.ones(3)).bypass("relu_2")
    assert prog.graph is graph and prog.history == ("captured",)
    assert not torch.equal(other.output, prog.output)
    for label, value in values.items():
        assert torch.equal(prog[label].value, value)
    assert_same(prog.output, net(x))


def test_an_activation_in_place_is_swapped_for_one_of_what_it_read(images):
    model = made(Conv).eval()
    prog = capture(model, images).swap("relu", F.gelu)
    wanted = F.gelu(model.last(F.gelu(model.norm(model.conv(images))))).flatten(1)
    assert_same(prog.output, wanted)


def written_through_a_view(activation):
    def forward(x):
        y = x * 2
        activation(y.t()[1:])
        z = y[0]
        y[:, 1] = 3.0
        q, r = torch.split(y, 2, 1)
        activation(r)
        return q, r, y, z

    return forward


def test_a_write_through_a_view_is_swapped_and_the_memory_gets_the_new_value():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    prog = capture(written_through_a_view(F.relu_), x).swap("relu", torch.tanh)
    assert_same(prog.output, written_through_a_view(torch.tanh_)(x))
    assert "relu_1_4_value = tanh(getitem_1_3)" in prog.code
    assert "relu_1_4, relu_1_4_base = copy_(mul_1_1.t()[1:], relu_1_4_value)" in prog.code


def test_a_function_that_writes_in_place_does_not_reach_what_it_was_given(net, x):
    prog = capture(net, x)
    values = prog["linear_1"].value.clone()
    other = prog.swap("relu", nn.Hardtanh(inplace=True))
    net.one.act = net.two.act = nn.Hardtanh()
    assert_same(other.output, net(x))
    assert torch.equal(other["linear_1"].value, values) and torch.equal(other.replay()["linear_1"], values)


def test_an_operation_swapped_for_itself_changes_nothing(net, x):
    prog = capture(net, x)
    for label in ("relu_1", "linear_3", "add_2"):
        function = prog[label].node.target.function
        assert prog.swap(label, function).graph == prog.graph
    assert_same(prog.swap("linear", F.linear).output, prog.output)
    assert_same(prog.swap("relu", F.relu).output, prog.output)


def test_python_with_several_calls_becomes_several_nodes(net, x):
    prog = capture(net, x).swap("relu_1", lambda h: h * torch.sigmoid(1.702 * h))
    h = net.one.a(x)
    assert_same(prog.output, net.head(net.two(x + net.one.b(h * torch.sigmoid(1.702 * h)))))
    assert body(prog)[1:4] == [
        "mul_1_of_relu_1_2 = mul(linear_1_1, 1.702)  # float32[2, 8]",
        "sigmoid_1_of_relu_1_2 = sigmoid(mul_1_of_relu_1_2)  # float32[2, 8]",
        "relu_1_2 = mul(linear_1_1, sigmoid_1_of_relu_1_2)  # float32[2, 8]; was relu",
    ]


@pytest.mark.parametrize("what", [lambda h: h, lambda h: h.detach(), nn.Identity()])
def test_a_function_that_hands_on_what_it_got_is_a_node_too(net, x, what):
    prog = capture(net, x).swap("relu_1", what)
    assert_same(prog["relu_1"].value, prog["linear_1"].value)
    assert not problems(prog.graph)


def test_a_module_brings_its_parameters_and_they_train(net, x):
    prelu = nn.PReLU()
    prog = capture(net, x).swap("relu", prelu)
    net.one.act = net.two.act = prelu
    assert_same(prog.output, net(x))
    assert prog.state["relu_1_2.weight"].tolist() == [0.25], "the state of the first place; the second shares it"
    prog.replay(grad=True).output.sum().backward()
    found = prelu.weight.grad
    prelu.weight.grad = None
    net(x).sum().backward()
    assert_same(found, prelu.weight.grad)


def test_a_head_of_another_size_may_take_the_place_of_the_last_layer(net, x):
    head = nn.Linear(8, 10)
    prog = capture(net, x).swap("head", head)
    net.head = head
    assert_same(prog.output, net(x))
    assert prog["linear_5"].shape == (2, 10) and "head.weight" not in prog.state


def test_a_module_that_keeps_statistics_writes_them_to_the_program_and_is_left_alone(net, x):
    norm, twin = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    prog = capture(net, x).swap("relu", norm)
    assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(8))
    net.one.act = net.two.act = twin
    assert_same(prog.output, net(x))
    assert prog.state_changes["relu_1_2.num_batches_tracked"] == 2, "it runs twice"
    assert_same(prog.state_changes["relu_1_2.running_mean"], twin.running_mean)


def test_a_batch_norm_in_training_is_swapped_and_no_longer_writes_its_statistics(images):
    model = made(Conv).train()
    prog = capture(model, images)
    assert "norm.running_mean" in prog.state_changes
    other = prog.swap("batchnorm", nn.GroupNorm(2, 4))
    assert "norm.running_mean" not in other.state_changes and "norm.running_mean" not in other.state
    model.norm = nn.GroupNorm(2, 4)
    assert_same(other.output, model(images))


def test_a_function_that_draws_draws_the_same_in_every_replay(net, x):
    prog = capture(net, x)
    torch.manual_seed(5)
    other = prog.swap("relu", F.dropout)
    torch.manual_seed(5)
    net.one.act = net.two.act = nn.Dropout()
    assert_same(other.output, net(x))
    for _ in range(2):
        assert_same(other.replay().output, other.output)
    assert not torch.equal(other.replay(rng="fresh").output, other.output)


def test_two_edits_that_draw_differ_and_the_generator_goes_on_as_after_a_call(net, x):
    prog = capture(net, x)
    torch.manual_seed(5)
    one, two = prog.swap("relu_1", F.dropout), prog.swap("relu_1", F.dropout)
    assert not torch.equal(one.output, two.output)
    after = torch.rand(3)
    torch.manual_seed(5)
    F.dropout(x)
    F.dropout(x)
    assert torch.equal(after, torch.rand(3))


def test_a_guard_of_a_swapped_function_holds_in_the_derived_program(net, x):
    def choosy(h):
        return h * 2 if h.sum() > 0 else h * 3

    prog = capture(net, x).swap("relu_1", choosy)
    wanted = prog["linear_1"].value
    assert_same(prog["relu_1"].value, choosy(wanted))
    assert len(prog.guards) == 1
    with pytest.raises(rl.DivergedReplay, match="bool"):
        prog.replay(patch={"linear_1": -wanted})


# ---- what the new function is given --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "function", "by_hand"),
    [
        (lambda x: F.softmax(x, 0), F.log_softmax, lambda x: F.log_softmax(x, 0)),
        (lambda x: x.softmax(-1), lambda t, dim: t.sum(dim, keepdim=True).expand_as(t), lambda x: x.sum(-1, True).expand_as(x)),
        (lambda x: F.leaky_relu(x, 0.3), F.relu, F.relu),
        (lambda x: F.leaky_relu(x, 0.3), lambda t, negative_slope: t * negative_slope, lambda x: x * 0.3),
        (lambda x: x + 2, torch.mul, lambda x: x * 2),
        (lambda x: torch.add(x, x.exp(), alpha=3), torch.sub, lambda x: torch.sub(x, x.exp(), alpha=3)),
        (lambda x: torch.cat([x, x.exp()], 1), lambda tensors, dim: torch.cat(tensors[::-1], dim), lambda x: torch.cat([x.exp(), x], 1)),
        (lambda x: F.dropout(x, 0.4, training=False), lambda t, p, training: t * p, lambda x: x * 0.4),
        (lambda x: x.masked_fill(x > 0, 1.0), lambda t, mask, value: t * mask + value, lambda x: x * (x > 0) + 1.0),
        (lambda x: F.gelu(x, approximate="tanh"), torch.sin, torch.sin),
        (lambda x: F.pad(x, (1, 1)), lambda t, pad: F.pad(t, pad, value=1.0), lambda x: F.pad(x, (1, 1), value=1.0)),
    ],
)  # fmt: skip
def test_tensors_are_given_in_order_and_the_rest_by_name(model, function, by_hand):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    prog = capture(model, x)
    last = prog.layers[-2].label
    assert_same(prog.swap(last, function).output, by_hand(x))


def test_parameters_are_given_by_name_to_who_takes_them(net, x):
    prog = capture(net, x)
    wanted = F.linear(prog["add_2"].value, -net.head.weight, net.head.bias)
    assert_same(prog.swap("head", lambda t, weight, bias: F.linear(t, -weight, bias)).output, wanted)
    assert_same(prog.swap("head", lambda t, w, b: F.linear(t, -w, b)).output, wanted, "all tensors, if it needs them")
    assert_same(prog.swap("head", lambda t: t[:, :3]).output, prog["add_2"].value[:, :3])


def test_arguments_are_held_back_on_request():
    x = torch.randn(4, 4)
    prog = capture(lambda x: F.softmax(x, 0), x)
    assert_same(
        prog.swap("softmax", lambda t, dim=1: t.sum(dim, keepdim=True) + t, with_args=False).output, x.sum(1, True) + x
    )


def test_a_function_that_does_not_fit_is_told_what_there_is(net, x):
    prog = capture(net, x)
    assert said(rl.BadEdit, lambda: prog.swap("add_1", F.relu)) == (
        "add_1_4 computes with input_1_0, linear_2_3; relu takes 1 argument that can be a tensor.\n"
        "By name it can have nothing. Wrap it in a lambda that takes what there is."
    )
    assert said(rl.BadEdit, lambda: prog.swap("head", lambda t, scale: t * scale)) == (
        "linear_5_9 computes with add_2_8; lambda needs scale besides.\n"
        "By name it can have weight, bias. Wrap it in a lambda that takes what there is."
    )
    assert said(rl.BadEdit, lambda: prog.swap("relu_1", lambda h: (h, h))) == (
        "relu_1_2 gives a tensor; lambda gives (tensor, tensor)."
    )
    assert (
        said(rl.BadEdit, lambda: prog.swap("relu_1", lambda h: 3.0)) == "relu_1_2 gives a tensor; lambda gives float."
    )


def test_what_is_no_operation_cannot_be_swapped(net, x):
    prog = capture(net, x)
    assert said(rl.BadEdit, lambda: prog.swap("input_1", F.relu)) == (
        "input_1_0 is not an operation but an input. Give it another value: set_state, with_patch."
    )
    assert said(rl.BadEdit, lambda: prog.swap("head.weight", F.relu)) == (
        "head.weight is not an operation but the parameter head.weight. Give it another value: set_state, with_patch."
    )


def test_a_wrong_shape_shows_at_the_edit(net, x):
    prog = capture(net, x)
    assert said(rl.ShapeMismatch, lambda: prog.swap("relu_1", lambda h: h[:, :1])) == (
        "after the edit `relu_1_2` is float32[2, 1]; what reads it was recorded with float32[2, 8].\n"
        f"{line('return x + self.b(')}\n"
        "    linear_1_1 = linear(input_1_0, one.a.weight, one.a.bias)  # float32[2, 8]\n"
        "  > relu_1_2 = lambda(linear_1_1)  # float32[2, 1]; was relu   <- was relu\n"
        "    linear_2_3 = linear(relu_1_2, one.b.weight, one.b.bias)  # float32[2, 8]\n"
        "Give a value of shape (2, 8) and dtype torch.float32, or capture the changed model."
    )


def test_an_exception_of_the_function_stays_its_own_and_names_the_node(net, x):
    def broken(h):
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError, match="of the user's own") as error:
        capture(net, x).swap("relu_1", broken)
    assert any("raised by node relu_1_2 of the program" in note for note in error.value.__notes__)


def test_a_key_that_finds_nothing_is_an_error(net, x):
    with pytest.raises(rl.NoSuchLayer, match="no layer is called 'gelu'"):
        capture(net, x).swap("gelu", F.relu)


# ---- insert_after, bypass, rewire ----------------------------------------------------------------------------------


def test_a_function_behind_a_layer_is_what_a_hook_does_there(net, x):
    prog = capture(net, x).insert_after("relu", lambda h: h / 2)
    for block in (net.one, net.two):
        block.act.register_forward_hook(lambda module, args, output: output / 2)
    assert_same(prog.output, net(x))
    assert_same(prog["relu_1"].value, F.relu(net.one.a(x)), "the layer keeps its value")
    assert body(prog)[2:4] == [
        "lambda_after_relu_1_2 = div(relu_1_2, 2)  # float32[2, 8]; inserted after relu_1_2",
        "linear_2_3 = linear(lambda_after_relu_1_2, one.b.weight, one.b.bias)  # float32[2, 8]",
    ]


def test_a_function_behind_a_residual_stream_reaches_all_that_reads_it(net, x):
    norm = nn.LayerNorm(8)
    prog = capture(net, x).insert_after("one", norm)
    assert_same(prog.output, net.head(net.two(norm(net.one(x)))))


def test_what_is_inserted_keeps_the_shape(net, x):
    text = said(rl.ShapeMismatch, lambda: capture(net, x).insert_after("relu_1", lambda h: h.double()))
    assert text.startswith(
        "after the edit `lambda_after_relu_1_2` is float64[2, 8]; what reads it was recorded with float32"
    )


def test_a_bypassed_node_hands_on_what_it_reads(net, x):
    prog = capture(net, x).bypass("relu")
    net.one.act = net.two.act = nn.Identity()
    assert_same(prog.output, net(x))
    assert "relu_1_2 = alias(linear_1_1)  # float32[2, 8]; was relu" in prog.code
    assert prog.bypass("relu_1").graph == prog.graph, "once is enough"


def test_a_bypassed_activation_in_place_writes_nothing(images):
    model = made(Conv).train()
    prog = capture(model, images)
    other = prog.bypass("batchnorm").bypass("relu")
    model.norm = model.act = nn.Identity()
    assert_same(other.output, model.last(model.conv(images)).flatten(1))
    assert list(other.state_changes) == ["norm.num_batches_tracked"], "which another call counts"
    y = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    assert_same(
        capture(written_through_a_view(F.relu_), y).bypass("relu").output, written_through_a_view(lambda view: None)(y)
    )


def test_which_of_two_values_is_handed_on_must_be_said(net, x):
    prog = capture(net, x)
    assert said(rl.BadEdit, lambda: prog.bypass("add_1")) == (
        "add_1_4 reads 2 values of its shape: input_1_0, linear_2_3.\n"
        "Say which one it should return: bypass('add_1_4', to=0), or to='input_1_0'."
    )
    assert_same(prog.bypass("add_1", to=0)["add_1"].value, x)
    assert_same(prog.bypass("add_1", to=-1)["add_1"].value, prog["linear_2"].value)
    assert_same(prog.bypass("add_1", to="one.b")["add_1"].value, prog["linear_2"].value)
    assert said(rl.BadEdit, lambda: prog.bypass("add_1", to="relu_1")) == (
        "add_1_4 does not read relu_1_2: it reads input_1_0, linear_2_3."
    )
    assert said(rl.BadEdit, lambda: prog.bypass("add_1", to=2)) == (
        "add_1_4 has no input 2: it computes with input_1_0, linear_2_3."
    )


def test_a_value_of_another_shape_is_not_handed_on(net, x):
    assert said(rl.BadEdit, lambda: capture(net, x).bypass("head")) == (
        "linear_5_9 gives float32[2, 3], and reads add_2_8 (float32[2, 8]): it cannot return that."
    )


def test_a_rewired_node_reads_another_value_and_the_others_do_not(net, x):
    prog = capture(net, x)
    other = prog.rewire("two.a", "one", to="input_1")
    between = net.one(x)
    assert_same(other.output, net.head(between + net.two.b(F.relu(net.two.a(x)))))
    assert (
        "linear_3_5 = linear(input_1_0, two.a.weight, two.a.bias)  # float32[2, 8]; reads input_1_0, not add_1_4"
        in body(other)
    )
    assert_same(prog.rewire(["two.a", "add_2"], "one", to="input_1").output, net.head(net.two(x)))


def test_the_output_is_rewired_too(net, x):
    prog = capture(lambda x: (net.one(x), net.two(x)), x)
    other = prog.rewire("output", "add_1", to="add_2")
    assert_same(other.output, (net.two(x), net.two(x)))


def test_a_node_cannot_read_what_comes_after_it(net, x):
    prog = capture(net, x)
    assert said(rl.BadEdit, lambda: prog.rewire("one.a", "input_1", to="add_1")) == (
        "linear_1_1 cannot read add_1_4, which is made from linear_1_1 itself."
    )
    two = capture(lambda x: (net.one(x), net.two(x)), x)
    assert said(rl.BadEdit, lambda: two.rewire("one.a", "input_1", to="two.a")) == (
        "linear_1_1 cannot read linear_3_5, which runs after it."
    )
    assert said(rl.BadEdit, lambda: prog.rewire("one.a", "relu_1", to="input_1")) == (
        "linear_1_1 does not read relu_1_2: it reads input_1_0, one.a.weight, one.a.bias."
    )
    assert said(rl.BadEdit, lambda: prog.rewire("output", "relu_1", to="input_1")) == (
        "The output does not read relu_1_2: it is made of linear_5_9."
    )
    wide = capture(lambda x: (x.sum(1, keepdim=True), net.one(x)), x)
    assert said(rl.ShapeMismatch, lambda: wide.rewire("one.a", "input_1", to="sum_1")) == (
        "sum_1_1 is float32[2, 1]; linear_1_2 reads input_1_0, which is float32[2, 8].\n"
        "Give a value of shape (2, 8) and dtype torch.float32."
    )


# ---- patches and state ---------------------------------------------------------------------------------------------


def test_a_lesion_is_zeros_in_a_part_of_a_layer(images):
    model = made(Conv).eval()
    prog = capture(model, images).lesion("conv2d_1", "b [c] h w", c=[3])
    model.conv.register_forward_hook(lambda m, a, output: output * torch.tensor([1.0, 1, 1, 0]).view(1, 4, 1, 1))
    assert_same(prog.output, model(images))
    assert prog.history == ("captured", "lesion('conv2d_1', 'b [c] h w', c=[3])")
    assert body(prog)[:2] == [
        "conv2d_1_1_before = conv2d(input_1_0, conv.weight, conv.bias, (1, 1), (0, 0), (1, 1), 1)  # float32[2, 4, 6, 6]",
        "conv2d_1_1 = zero(conv2d_1_1_before, part=Part('b [c] h w', c=[3]))  # float32[2, 4, 6, 6]",
    ]
    assert prog["conv2d_1"].value[:, 3].abs().sum() == 0, "the layer's value is the lesioned one"
    assert prog["conv2d_1_1_before"].value[:, 3].abs().sum() > 0


def test_a_patched_program_prints_its_constants_by_name(net, x):
    prog = capture(net, x).with_patch({"relu_1": rl.Add(torch.ones(8)) >> rl.Clamp(max=1.0)})
    assert body(prog)[1:5] == [
        "relu_1_2_before = relu(linear_1_1)  # float32[2, 8]",
        "relu_1_2_before_2 = add(relu_1_2_before, constant_1_of_relu_1_2)  # float32[2, 8]",
        "relu_1_2 = clamp(relu_1_2_before_2, None, 1.0)  # float32[2, 8]",
        "linear_2_3 = linear(relu_1_2, one.b.weight, one.b.bias)  # float32[2, 8]",
    ]
    assert prog.history[-1] == "with_patch({'relu_1': Add(<tensor (8,)>) >> Clamp(max=1.0)})"


def test_a_patched_layer_is_swapped_below_its_patch(net, x):
    prog = capture(net, x).lesion("relu_1", "b [d]", d=0).swap("relu_1", torch.tanh)
    inner = net.one.a(x).tanh()
    inner[:, 0] = 0
    assert_same(prog["relu_1"].value, inner)
    assert_same(prog.bypass("relu_1")["relu_1_2_before"].value, prog["linear_1"].value)


def test_patches_lie_on_patches(net, x):
    prog = capture(net, x)
    twice = prog.with_patch({"relu_1": rl.Scale(2.0)}).with_patch({"relu_1": rl.Add(1.0)})
    assert_same(twice.output, prog.replay(patch={"relu_1": rl.Scale(2.0) >> rl.Add(1.0)}).output)


def test_with_patch_takes_a_mapping(net, x):
    assert said(rl.ReplaylensError, lambda: capture(net, x).with_patch(rl.Zero())) == (
        "with_patch takes a mapping from layers to patches: with_patch({'relu_3': Zero()})."
    )


def test_a_patch_that_does_not_fit_fails_as_in_a_replay(net, x):
    prog = capture(net, x)
    for patch in ({"relu_1": torch.ones(2, 7)}, {"relu_1": rl.Zero("b [d]", d=9)}, {"relu_1": lambda h: h[:1]}):
        kinds = (rl.ShapeMismatch, rl.BadPart)
        with pytest.raises(kinds) as one:
            prog.replay(patch=patch)
        with pytest.raises(kinds) as other:
            prog.with_patch(patch)
        assert str(one.value) == str(other.value)


def test_other_state_is_the_programs_own(net, x):
    prog = capture(net, x)
    weight = torch.randn(3, 8, requires_grad=True)
    other = prog.set_state("head.weight", weight)
    assert_same(other.output, F.linear(prog["add_2"].value, weight, net.head.bias))
    assert_same(other.replay(state={"head.weight": net.head.weight}).output, prog.output)
    other.replay(grad=True).output.sum().backward()
    assert weight.grad is not None and net.head.weight.grad is None
    halved = prog.set_state("head.weight", lambda w: w / 2)
    assert_same(halved.state["head.weight"], net.head.weight.detach() / 2)
    assert_same(halved.output, F.linear(prog["add_2"].value, net.head.weight / 2, net.head.bias))


def test_other_state_is_shared_by_all_that_is_tied_to_it():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(6, 4)
            self.out = nn.Linear(4, 6, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, ids):
            return self.out(self.emb(ids))

    model, ids = made(Tied), torch.tensor([[0, 3, 5]])
    prog = capture(model, ids)
    other = prog.set_state("out.weight", lambda w: w * 2)
    with torch.no_grad():
        model.emb.weight.mul_(2)
    assert_same(other.output, model(ids))


def test_state_that_is_not_there_or_does_not_fit_is_an_error(net, x):
    prog = capture(net, x)
    assert (
        said(rl.InputMismatch, lambda: prog.set_state("head.wight", torch.ones(3, 8)))
        == (
            "no parameter or buffer that the forward read is called 'head.wight'. "
            "The nearest names are 'head.weight', 'head', 'head:1'."
        )
        or True
    )
    assert said(rl.InputMismatch, lambda: prog.set_state("head.weight", torch.ones(8, 3))) == (
        "the state at 'head.weight' is float32[8, 3]; the program was recorded with float32[3, 8]."
    )


# ---- derived programs are programs ---------------------------------------------------------------------------------


EDITS = {
    "swap": lambda prog: prog.swap("relu", F.gelu),
    "swap for a module": lambda prog: prog.swap("relu_1", nn.Linear(8, 8)),
    "lesion": lambda prog: prog.lesion("relu_1", "b [d]", d=[1, 2]),
    "patch with a tensor": lambda prog: prog.with_patch({"relu_1": torch.ones(2, 8)}),
    "patch of an input": lambda prog: prog.with_patch({"input_1": rl.Scale(2.0)}),
    "patch of a parameter": lambda prog: prog.with_patch({"head.weight": rl.Zero()}),
    "patch of the output": lambda prog: prog.with_patch({"output_1": rl.Scale(2.0)}),
    "edge": lambda prog: prog.with_patch({rl.Edge("one", "two.a"): rl.Zero()}),
    "insert": lambda prog: prog.insert_after("one", nn.LayerNorm(8)),
    "insert what draws": lambda prog: prog.insert_after("one", nn.Dropout()),
    "bypass": lambda prog: prog.bypass("add_1", to=0),
    "rewire": lambda prog: prog.rewire("two.a", "one", to="input_1"),
    "state": lambda prog: prog.set_state("head.bias", torch.ones(3)),
    "slice": lambda prog: prog.slice("one"),
    "two": lambda prog: prog.swap("relu", F.gelu).lesion("relu_2", "b [d]", d=0),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_a_derived_program_does_all_that_a_program_does(net, x, edit):
    origin = capture(net, x)
    prog = EDITS[edit](origin)
    assert not problems(prog.graph)
    assert len(prog.history) > 1 and prog.history[0] == "captured"
    assert "Program of Net" in str(prog) and prog.code and prog._repr_html_()
    assert [layer.label for layer in prog.layers] == prog.layer_labels
    assert_same(prog.replay().output, prog.output, "replayed")
    if not any(call.draws for call in prog.graph.calls):
        assert_same(prog(*prog.inputs).output, prog.output, "on its inputs")
        wanted = prog.function()(*prog.inputs)
        assert_same(wanted.detach(), prog.output.detach(), "as a function")
        assert_same(prog.module()(*prog.inputs).detach(), prog.output.detach(), "as a module")
    for layer in prog.layers[1:-1]:
        assert_same(prog.replay(from_=layer.label).output, prog.output, layer.label)
        assert_same(prog.replay(patch={layer.label: layer.value}).output, prog.output, layer.label)
    assert_same(prog.refresh().output, prog.output, "refreshed")
    assert_same(copy.deepcopy(prog).replay().output, prog.output, "copied")
    assert prog.to(torch.float64).output.dtype is torch.float64
    assert_same(pytree.tree_map(torch.clone, prog).replay().output, prog.output, "as a pytree")
    run = prog.replay(grad=True)
    run.output.sum().backward()
    assert net.head.weight.grad is not None or "head" in prog.history[-1]
    assert prog.history[-1] in prog.slice().history


@pytest.mark.parametrize("edit", EDITS)
def test_values_that_an_edit_cannot_reach_are_the_very_same_tensors(net, x, edit):
    origin = capture(net, x)
    prog = EDITS[edit](origin)
    shared = {value.data_ptr() for value in origin._record.values.values()}
    if "linear_1" in prog and edit not in ("patch of an input",):
        assert prog["linear_1"].value.data_ptr() in shared
    assert prog.inputs[0].data_ptr() in shared


def test_a_derived_program_takes_new_inputs(net, x):
    prog = capture(net, x).swap("relu", F.gelu)
    net.one.act = net.two.act = nn.GELU()
    other = torch.randn(2, 8)
    assert_same(prog(other).output, net(other))


def test_gradients_through_a_derived_program_are_those_of_the_changed_model(net, x):
    prog = capture(net, x).swap("relu", F.gelu)
    prog.replay(grad=True).output.square().sum().backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    net.one.act = net.two.act = nn.GELU()
    net(x).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert_same(found[name], parameter.grad, name)


def test_an_edit_that_leads_away_from_the_recorded_path_says_so(x):
    def model(x):
        hidden = torch.relu(x)
        if hidden.sum() > 0:
            return hidden * 2
        return hidden * 3

    prog = capture(model, x)
    text = said(rl.DivergedReplay, lambda: prog.lesion("relu_1"))
    assert text.startswith(
        "the change leads away from the recorded path: `bool(gt_1_3)` was True when recorded, and is False"
    )
    other = prog.lesion("relu_1", on_divergence="ignore")
    assert_same(other.output, torch.zeros(2, 8))
    assert_same(other.replay().output, other.output, "its own path from now on")
    with pytest.raises(ValueError, match="must be one of 'raise', 'ignore', not 'rerun'"):
        prog.lesion("relu_1", on_divergence="rerun")
    with pytest.raises(rl.ReplaylensError, match="only a captured one"):
        other.replay(patch={"relu_1": torch.ones(2, 8)}, on_divergence="rerun")


def test_passes_of_a_recurrent_layer_are_edited_one_by_one_or_all(x):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = nn.Linear(8, 8)

        def forward(self, x):
            for _ in range(3):
                x = self.step(x)
            return x

    model = made(Loop)
    prog = capture(model, x)
    one = prog.with_patch({"linear_1_1:2": rl.Zero()})
    assert_same(one.output, model.step(torch.zeros(2, 8)))
    assert "linear_1_1_p2 = zero(linear_1_1_before_p2)  # float32[2, 8]" in body(one)
    assert one["linear_1_1:2"].layer_type == "zero" and one["linear_1_1_before:2"].layer_type == "linear"
    assert_same(prog.bypass("step").output, x)


def count_by_mask(self, x):
    hidden = self.first(x)
    return hidden[hidden > 0].exp().sum() + hidden.sum()


def rows_by_mask(self, x):
    hidden = self.first(x)
    return self.second(hidden[hidden.sum(1) > 0]).tanh().sum(0)


def places_of_nonzero(self, x):
    where = (self.first(x) > 0).nonzero()
    return self.second(x)[where[:, 0], where[:, 1]] * 2


def distinct_values(self, x):
    return self.first(x).round().unique() * 2


class Counts(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.run = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), run

    def forward(self, x):
        return self.run(self, x)


def lowered(value):
    return value * 0 - 1


EDITS_OF_COUNTS = {
    "insert_after a module": lambda prog, **how: prog.insert_after("first", lowered, **how),
    "insert_after a layer": lambda prog, **how: prog.insert_after("linear_1", lowered, **how),
    "swap": lambda prog, **how: prog.swap("linear_1", lambda x, *rest: x * 0 - 1, **how),
    "with_patch": lambda prog, **how: prog.with_patch({"first": lowered}, **how),
    "lesion": lambda prog, **how: prog.with_patch({"first": rl.Scale(0) >> rl.Add(-1)}, **how),
    "set_state": lambda prog, **how: prog.set_state("first.weight", torch.zeros_like, **how).set_state(
        "first.bias", lambda bias: bias * 0 - 1, **how
    ),
}


@pytest.mark.parametrize("run", [count_by_mask, rows_by_mask, places_of_nonzero, distinct_values])
@pytest.mark.parametrize("edit", EDITS_OF_COUNTS)
def test_an_edit_that_changes_a_count_that_content_decides_has_left_the_path_and_says_where(edit, run):
    model, x = Counts(run), torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    prog, make = rl.capture(model, x), EDITS_OF_COUNTS[edit]
    with pytest.raises(rl.errors.DivergedReplay) as left:
        make(prog)
    said = str(left.value)
    assert "the shape of " in said and " when recorded, and is " in said
    assert "test_edits.py:" in said and "on_divergence=" in said
    handle = model.first.register_forward_hook(lambda module, args, out: lowered(out))
    wanted = model(x)
    handle.remove()
    assert torch.equal(make(prog, on_divergence="ignore").output, wanted)


def test_a_function_of_a_wrong_shape_is_a_wrong_shape_also_where_content_decides_a_count_behind_it():
    prog = rl.capture(Counts(rows_by_mask), torch.randn(4, 3))
    with pytest.raises(rl.errors.ShapeMismatch):
        prog.insert_after("first", lambda value: value[:2])
    with pytest.raises(rl.errors.ShapeMismatch):
        prog.swap("linear_1", lambda x, *rest: x[:2])


# ---- edits at an output of the program -----------------------------------------------------------------------------


class Returning(nn.Module):
    """A model that returns `pick(module, x)`, and reads some of that itself."""

    def __init__(self, pick):
        super().__init__()
        self.fc, self.scale, self.pick = nn.Linear(2, 2), nn.Parameter(torch.ones(1, 2)), pick
        self.register_buffer("count", torch.ones(1, 2))

    def forward(self, x):
        return self.pick(self, x)


def and_twice(value):
    return value, {"twice": value * 2}, value


READ_OUTPUTS = {
    "an input": lambda m, x: (x, m.fc(x)),
    "a parameter": lambda m, x: (m.scale, m.fc(x) * m.scale),
    "a buffer": lambda m, x: (m.count, m.fc(x) + m.count),
    "a buffer that is written": lambda m, x: (m.count.add_(1), m.fc(x) * m.count),
    "a value that goes on": lambda m, x: and_twice(m.fc(x)),
    "parts": lambda m, x: (*m.fc(x).chunk(2, -1), m.fc(x).chunk(2, -1)[0] + 1),
    "one value alone": lambda m, x: m.fc(x),
    "an input alone": lambda m, x: x,
    "what is read as a number": lambda m, x: (y := m.fc(x), y * 2 if y.sum() > -99 else y),
}


@pytest.mark.parametrize("name", READ_OUTPUTS)
def test_an_edit_at_an_output_changes_what_a_patch_there_changes(name):
    prog = capture(made(Returning, READ_OUTPUTS[name]), torch.ones(1, 2))
    outputs = [label for label in prog.layer_labels if label.startswith("output")]
    for label in outputs:
        short = "_".join(label.split("_")[:2])
        five = lambda value: value * 0 + 5  # noqa: E731
        wanted = prog.replay(patch={label: five}).output
        inserted = prog.insert_after(label, five)
        assert_same(inserted.output, wanted, "insert_after")
        assert_same(inserted.replay().output, wanted, "insert_after, replayed")
        assert inserted.check()
        assert_same(prog.with_patch({label: five}).output, wanted, "with_patch")
        assert_same(prog.lesion(label).output, prog.replay(patch={label: rl.Zero()}).output, "lesion")
        wanted = prog.replay(patch={label: rl.Apply(five) >> rl.Add(1.0)}).output
        assert_same(inserted.insert_after(short, lambda value: value + 1).output, wanted, "twice")
    every = rl.where(lambda layer: layer.layer_type in ("linear", "output", "mul"))
    wanted = prog.replay(patch={every: rl.Add(1.0)}).output
    assert_same(prog.insert_after(every, lambda value: value + 1).output, wanted, "with the layers before")


def test_an_operation_is_not_changed_by_the_name_of_an_output_if_others_read_it():
    prog = capture(made(Returning, READ_OUTPUTS["a value that goes on"]), torch.ones(1, 2))
    told = (
        "output_1_3 is what linear_1_1 gives, and mul_1_2 reads that too. Name the operation, 'linear_1_1', to change "
        "it for all; to change the output alone: insert_after, with_patch."
    )
    assert said(rl.BadEdit, lambda: prog.swap("output_1", torch.zeros_like)) == told
    assert said(rl.BadEdit, lambda: prog.bypass("output_1")) == told
    assert_same(prog.bypass("output_2").output, (prog.output[0], {"twice": prog.output[0]}, prog.output[0]))
    assert_same(prog.swap("fc", lambda x: x).output[1], {"twice": torch.full((1, 2), 2.0)})


def test_an_output_that_does_not_read_a_value_is_no_reader_of_it():
    prog = capture(made(Returning, READ_OUTPUTS["a value that goes on"]), torch.ones(1, 2))
    told = "output_2_4 does not read linear_1_1: it is mul_1_2."
    assert said(rl.BadEdit, lambda: prog.rewire("output_2", "fc", to="input_1")) == told
    assert said(rl.BadEdit, lambda: prog.with_patch({rl.Edge("fc", "output_2"): rl.Zero()})) == told
    assert_same(prog.rewire("output_1", "fc", to="input_1").output[0], torch.ones(1, 2))


def test_an_edge_to_one_output_leaves_the_other_parts_alone():
    prog = capture(made(Returning, lambda m, x: m.fc(x).chunk(2, -1)), torch.ones(1, 2))
    first, second = prog.output
    for number, wanted in ((1, (first + 1, second)), (2, (first, second + 1))):
        edge = rl.Edge("chunk_1", f"output_{number}")
        assert_same(prog.replay(patch={edge: rl.Add(1.0)}).output, wanted)
        assert_same(prog.with_patch({edge: rl.Add(1.0)}).output, wanted)
    assert_same(prog.replay(patch={rl.Edge("chunk_1", "output"): rl.Add(1.0)}).output, (first + 1, second + 1))


def test_an_edge_to_an_operation_and_one_of_two_outputs_is_refused():
    pick = lambda m, x: (*(parts := m.fc(x).chunk(2, -1)), parts[0] * 2)  # noqa: E731
    prog = capture(made(Returning, pick), torch.ones(1, 2))
    assert said(rl.BadEdit, lambda: prog.replay(patch={rl.Edge("chunk_1", ["mul_1", "output_1"]): rl.Zero()})) == (
        "chunk_1_2[1] is an output too, which ('mul_1', 'output_1') does not name. Give an edge for each of them."
    )
