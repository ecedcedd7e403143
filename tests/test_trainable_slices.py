"""A module of a program is the model up to a layer: the same bits, gradients and statistics, at any size of batch that
leads to the same program; and an error that says why at any other.
"""

import copy
import functools
import gc
import subprocess
import sys
import weakref

import library_models
import pytest
import torch
from oracle import assert_same
from shaped_models import MODELS, REFUSED
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import replaylens as rl

SIZES = (2, 1, 3, 7, 2, 3)


def pictures(size, seed=0):
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


class Blocks(nn.Module):
    """A small residual network, of which each module counts its calls."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Dropout(0.3), nn.ReLU())
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.layer1(x)
        x = self.layer2(x)
        return self.fc(self.pool(x).flatten(1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Blocks()


def hooked(model, names, x):
    """What modules of a model give in one forward, by name, as hooks see it."""
    found = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: found.__setitem__(name, out.clone())
        )
    found["out"] = model(x)
    for name in names:
        model.get_submodule(name)._forward_hooks.clear()
    return found


def said(kind, action):
    with pytest.raises(kind) as error:
        action()
    assert error.type is kind
    return str(error.value)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def gradients(output, leaves):
    wanted = [leaf for leaf in tensors(output) if leaf.requires_grad]
    return torch.autograd.grad(sum(one.square().sum() for one in wanted), leaves, allow_unused=True)


# ---- other sizes of batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_the_model_at_other_sizes_of_batch_or_says_that_it_is_not(name):
    model, inputs = MODELS[name]()
    twin = copy.deepcopy(model)
    module = rl.capture(model, *inputs(2)).module()
    twin(*inputs(2))
    needs_grad = not name.startswith("Writes")
    for size in SIZES:
        given, same = ([x.requires_grad_(needs_grad) for x in inputs(size)] for _ in range(2))
        torch.manual_seed(size)
        if size in REFUSED[name]:
            with pytest.raises(rl.InputMismatch, match="computes something else"):
                module(*given)
            assert_same(torch.get_rng_state(), torch.manual_seed(size).get_state())
        else:
            found, state = module(*given), torch.get_rng_state()
            assert_same(given, list(inputs(size)))
            torch.manual_seed(size)
            wanted = twin(*same)
            assert_same(found, wanted)
            assert_same(state, torch.get_rng_state())
            pairs = (found, [*model.parameters(), *given]), (wanted, [*twin.parameters(), *same])
            found, wanted = [gradients(out, [leaf for leaf in leaves if leaf.requires_grad]) for out, leaves in pairs]
            assert_same(found, wanted)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def test_what_python_reads_holds_at_each_size_for_what_was_read_there():
    model, inputs = MODELS["read_in_python"]()
    module = rl.capture(model, *inputs(2)).module()
    assert_same(module(*inputs(3)), model(*inputs(3)))
    with pytest.raises(rl.DivergedReplay):
        module(inputs(3)[0] * 2)


def test_functions_partials_and_bound_methods_take_other_sizes_too(net):
    net.eval()
    scaled = functools.partial(lambda x, scale: net(x) * scale, scale=3)
    for called in (lambda x: net(x).relu(), scaled, net.forward, torch.relu, net.fc.forward):
        x = (lambda size, called=called: torch.randn(size, 6)) if called == net.fc.forward else pictures
        module = rl.capture(called, x(2)).module()
        for size in (2, 3):
            assert_same(module(given := x(size)), called(given))


def test_keywords_and_nested_inputs_keep_their_places(net):
    def model(pair, *, options):
        return {"sum": pair[0] + options["b"], "two": options["two"]}

    module = rl.capture(model, [torch.ones(2), None], options={"b": torch.ones(2), "two": 2}).module()
    for size in (2, 5):
        assert_same(
            module([torch.ones(size), None], options={"b": torch.ones(size), "two": 2}),
            {"sum": torch.full((size,), 2.0), "two": 2},
        )
    with pytest.raises(rl.InputMismatch, match="two"):
        module([torch.ones(2), None], options={"b": torch.ones(2), "two": 3})
    with pytest.raises(rl.InputMismatch):
        module([torch.ones(3), None], options={"b": torch.ones(3), "two": 3})
    with pytest.raises(rl.InputMismatch):
        module([torch.ones(3), torch.ones(3)], options={"b": torch.ones(3), "two": 2})


@pytest.mark.parametrize("train", [True, False])
def test_several_layers_at_once_are_what_hooks_see_and_train_the_model_as_hooks_do(net, train):
    twin = copy.deepcopy(net.train(train)).train(train)
    names = ["stem.0", "layer1", "layer2"]
    module = rl.capture(net, pictures(2)).module(outputs={name: name for name in names} | {"out": "output"})
    net.load_state_dict(twin.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (net, twin)]
    for step, size in enumerate((2, 3, 1, 7, 3)):
        torch.manual_seed(step)
        found = module(pictures(size, step))
        torch.manual_seed(step)
        wanted = hooked(twin, names, pictures(size, step))
        assert_same(found, {name: wanted[name] for name in found})
        for outputs, optimizer in zip((found, wanted), optimizers, strict=True):
            optimizer.zero_grad()
            outputs["out"].square().sum().backward()
            optimizer.step()
        assert_same(dict(net.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("name", ["stem.0", "layer1", "layer2", "fc"])
def test_gradients_of_any_layer_are_the_models(net, name):
    twin, x = copy.deepcopy(net), pictures(2)
    module = rl.capture(net, x).module(outputs=name)
    for size in (2, 5):
        torch.manual_seed(0)
        found = gradients(module(pictures(size)), list(net.parameters()))
        torch.manual_seed(0)
        kept = []
        hook = twin.get_submodule(name).register_forward_hook(lambda _, args, out, kept=kept: kept.append(out.clone()))
        twin(pictures(size))
        hook.remove()
        assert_same(found, gradients(kept, list(twin.parameters())))


# ---- what it returns -----------------------------------------------------------------------------------------------


def test_outputs_have_the_form_in_which_they_were_named(net):
    prog, x = rl.capture(net.eval(), pictures(2)), pictures(3)
    one, other, out = prog.module(outputs=("layer1", "layer2", "output"))(x)
    assert_same(out, net(x))
    assert_same(prog.module(outputs=["layer2", "layer1"])(x), [other, one])
    assert_same(prog.module(outputs="layer2")(x), other)
    assert_same(prog.module(outputs={"b": "layer2", "a": "layer1:1"})(x), {"b": other, "a": one})
    assert_same(prog.module()(x), out)
    assert_same(prog.module(to="layer1")(x), one)


def test_a_glob_or_a_type_is_a_dict_by_name_or_part_of_what_it_stands_in(net):
    prog, x = rl.capture(net.eval(), pictures(2)), pictures(3)
    both = prog.module(outputs="layer?")(x)
    assert list(both) == ["layer1", "layer2"]
    assert_same(prog.module(outputs=["layer?", "fc"])(x), [*both.values(), net(x)])
    assert_same(prog.module(outputs={"all": "layer?", "fc": "fc"})(x), {"all": tuple(both.values()), "fc": net(x)})
    assert list(prog.module(outputs="relu")(x)) == list(prog.names_of("relu")) != []
    assert_same(prog.module(outputs=prog.find(op="linear"))(x), {"linear_1_17": net(x)})


def test_passes_and_parts_of_what_modules_return_are_outputs():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            h = x
            for _ in range(3):
                h = F.relu(self.cell(h))
            return self.attention(h, h, h)[0]

    torch.manual_seed(0)
    model, x = Steps(), torch.randn(3, 5, 4)
    prog = rl.capture(model, torch.randn(2, 5, 4))
    first = F.relu(model.cell(x))
    third = F.relu(model.cell(F.relu(model.cell(first))))
    assert_same(prog.module(outputs=["relu_1:1", "relu_1:3"])(x), [first, third])
    assert list(prog.module(outputs="relu_1")(x)) == ["relu_1_2:1", "relu_1_2:2", "relu_1_2:3"]
    assert_same(prog.module(outputs={"w": "attention[1]"})(x)["w"], model.attention(third, third, third)[1])
    assert_same(prog.module(outputs="attention")(x), model.attention(third, third, third))


def test_nothing_runs_behind_the_latest_output(net):
    class Calls(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    prog, seen = rl.capture(net, pictures(2)), []
    for outputs in ("layer1", ["layer1", "layer2"], None):
        module = prog.module(outputs=outputs)
        module(pictures(2)), module(pictures(3))
        with Calls() as calls:
            module(pictures(2)), module(pictures(3))
        seen.append([calls.names.count(word) for word in ("conv2d", "dropout", "linear")])
    assert seen == [[4, 0, 0], [6, 2, 0], [6, 2, 2]]
    twin = copy.deepcopy(net)
    prog.module(outputs="stem")(pictures(2))
    assert net.stem[1].num_batches_tracked == twin.stem[1].num_batches_tracked + 1
    assert net.layer1[1].num_batches_tracked == twin.layer1[1].num_batches_tracked


# ---- where it begins -----------------------------------------------------------------------------------------------


def test_a_module_may_begin_at_layers_and_end_at_others(net):
    net.eval()
    prog = rl.capture(net, pictures(2))
    for size in (2, 1, 3, 7):
        x = pictures(size)
        early = net.stem(x)
        late = prog.module(inputs="stem", outputs={"late": "layer2"})(early)
        assert_same(late, {"late": net.layer2(early + net.layer1(early))})
        assert_same(prog.module(inputs=["stem", "layer1"])(early, net.layer1(early)), net(x))
        assert_same(prog.module(inputs="input_1", outputs="stem")(x), early)


def test_a_layer_passed_by_is_refused_at_another_size(net):
    module = rl.capture(net.eval(), pictures(2)).module(inputs="layer1")
    assert module(torch.randn(2, 6, 14, 14)).shape == (2, 4)
    found = said(rl.InputMismatch, lambda: module(torch.randn(3, 6, 14, 14)))
    assert "something else: where `relu_1_5  # const, float32[2, 6, 14, 14]` was, it has `relu_1_5  # const" in found
    other = said(rl.InputMismatch, lambda: module(torch.randn(2, 6, 12, 12)))
    assert "which inputs of the model would give a layer that shape is not known" in other


def test_sizes_of_a_layer_that_the_input_does_not_share_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1), nn.ReLU())
    module = rl.capture(model, torch.randn(2, 3, 4)).module(inputs="1")
    with pytest.raises(rl.InputMismatch, match="is not known"):
        module(torch.randn(9, 4))
    transposing = rl.capture(lambda x: x.transpose(0, 1).relu().tanh(), torch.randn(2, 2)).module(inputs="transpose_1")
    assert_same(transposing(torch.full((2, 2), 3.0)), torch.full((2, 2), 3.0).tanh())
    with pytest.raises(rl.InputMismatch):
        transposing(torch.randn(2, 5))


def test_a_number_that_python_read_before_the_beginning_is_not_known_at_other_sizes():
    def model(x):
        scale = x.max().item()
        return (x * 2).relu() * scale

    x = torch.tensor([[1.0], [5.0]])
    module = rl.capture(model, x).module(inputs="mul_1")
    assert_same(module(x), x * 5)
    assert "behind values that Python reads" in said(rl.InputMismatch, lambda: module(x[:1]))


# ---- errors --------------------------------------------------------------------------------------------------------


def test_wrong_ends_are_errors_that_say_why(net):
    prog = rl.capture(net, pictures(2))
    assert said(rl.NoSuchLayer, lambda: prog.module(outputs="layer7")).startswith("no layer is called 'layer7'.")
    assert said(rl.NoSuchLayer, lambda: prog.module(outputs={"a": "layer7.*"})).startswith("no layer is called")
    assert "does not depend on" in said(rl.BadEdit, lambda: prog.module(inputs="layer2", outputs="layer1"))
    assert said(rl.BadEdit, lambda: prog.module(inputs="layer2", outputs={"early": "stem", "late": "fc"})) == (
        "relu_1_7 does not depend on layer2, where the module begins: it would be the recorded value in each call.\n"
        "Leave it out, or begin before it."
    )
    assert said(TypeError, lambda: prog.module(inputs="stem", from_="stem")) == (
        "inputs= and from_= are two words for one thing. Give one of them."
    )
    for wrong in ({"inputs": {"a": "stem"}}, {"outputs": []}, {"outputs": {}}):
        with pytest.raises(TypeError, match=r"inputs= is a layer or a list of layers"):
            prog.module(**wrong)


def test_a_refusal_names_the_first_difference_and_the_lines_with_the_size():
    model, inputs = MODELS["another_path_of_one_size"]()
    module = rl.capture(model, *inputs(2)).module()
    assert said(rl.InputMismatch, lambda: module(*inputs(5))) == (
        "the input at args[0] is float32[5, 8] on cpu; the program was recorded with float32[2, 8] on cpu.\n"
        "With it the model computes something else: `tanh_1_4 = tanh(linear_2_3)  # float32[5, 8]` is there.\n"
        "Where the model takes this shape: capture it there, and make the module of that program."
    )
    model, inputs = MODELS["BufferOfTheBatch"]()
    assert "raises RuntimeError" in said(
        rl.InputMismatch,
        lambda: rl.capture(lambda x: x.view(2, -1) + torch.ones(2, 8), *inputs(2)).module()(*inputs(3)),
    )


def test_a_program_without_a_model_takes_the_recorded_sizes(net, tmp_path):
    net.eval()
    rl.capture(net, pictures(2)).save(tmp_path / "net.rlp")
    loaded = rl.load(tmp_path / "net.rlp").module(outputs="layer1")
    assert_same(loaded(pictures(2, 5)), rl.capture(net, pictures(2)).module(outputs="layer1")(pictures(2, 5)))
    assert "what was loaded without state=, moved or copied holds none" in said(
        rl.InputMismatch, lambda: loaded(pictures(3))
    )
    bound = rl.load(tmp_path / "net.rlp", state=net).module(outputs={"out": "output"})
    assert_same(bound(pictures(3)), {"out": net(pictures(3))})


# ---- edited programs -----------------------------------------------------------------------------------------------

EDITS = {
    "lesion": lambda prog: prog.lesion("layer1", "b [c] h w", c=[1, 3]),
    "swap": lambda prog: prog.swap("relu", F.gelu),
    "with_patch": lambda prog: prog.with_patch({"stem": lambda value: value / value.shape[0]}),
    "bypass": lambda prog: prog.bypass("layer1.1"),
    "insert_after": lambda prog: prog.insert_after("layer2", torch.tanh),
    "several": lambda prog: prog.lesion("layer1").swap("relu", F.silu).slice(to="layer2"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_program_has_its_edits_at_other_sizes_too(net, edit):
    net.eval()
    module = edit(rl.capture(net, pictures(2))).module()
    for size in (2, 1, 3, 7):
        x = pictures(size)
        wanted = edit(rl.capture(net, x))
        assert_same(module(x), wanted.output)
        leaves = [p for p in net.parameters() if p.requires_grad]
        assert_same(gradients(module(x), leaves), gradients(wanted.module()(x), leaves))


def test_a_module_that_was_swapped_in_trains_at_each_size(net):
    prelu = nn.PReLU()
    module = rl.capture(net.eval(), pictures(2)).swap("layer1.2", prelu).module()
    for size in (2, 3):
        prelu.weight.grad = None
        module(pictures(size)).sum().backward()
        found, prelu.weight.grad = prelu.weight.grad, None
        x = net.stem(pictures(size))
        x = net.layer2(x + prelu(net.layer1[:2](x)))
        net.fc(net.pool(x).flatten(1)).sum().backward()
        assert_same(found, prelu.weight.grad)


def test_an_edit_that_fits_one_size_alone_is_refused_at_others(net):
    prog = rl.capture(net.eval(), pictures(2))
    module = prog.with_patch({"stem": torch.zeros(2, 6, 14, 14)}).module()
    assert module(pictures(2)).shape == (2, 4)
    assert "the model, or an edit of its program, raises" in said(rl.InputMismatch, lambda: module(pictures(1)))


def test_expanded_attention_works_at_other_sizes():
    model, inputs = MODELS["AttendedByHand"]()
    module = rl.capture(model, *inputs(2)).expand("scaleddotproductattention").module(outputs={"pattern": "pattern_1"})
    for size in (2, 3):
        wanted = rl.capture(model, *inputs(size)).expand("scaleddotproductattention")["pattern_1"].value
        assert_same(module(*inputs(size)), {"pattern": wanted})


# ---- what it leaves alone, and what it shares ----------------------------------------------------------------------


def test_a_capture_at_another_size_changes_nothing(net):
    module = rl.capture(net, pictures(2)).module(outputs="layer2")
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    net.fc.register_forward_hook(lambda *_: None)
    net.eval(), net.stem.requires_grad_(False)
    net.layer1.note = ["mine"]
    twin, seen = copy.deepcopy(net), {name: sorted(vars(one)) for name, one in net.named_modules()}
    with pytest.raises(rl.InputMismatch):
        module(pictures(2).repeat(1, 2, 1, 1))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    module._at_other_shapes((pictures(5),), {}, "")
    assert_same(state, torch.get_rng_state())
    assert_same(dict(net.state_dict()), dict(twin.state_dict()))
    assert [p.grad is None for p in net.parameters()] == [p is not net.fc.weight for p in net.parameters()]
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in twin.parameters()]
    assert not net.training and len(net.fc._forward_hooks) == 1 and net.layer1.note == ["mine"]
    assert {name: sorted(vars(one)) for name, one in net.named_modules()} == seen


def test_a_size_first_met_in_inference_mode_or_without_gradients_trains_later(net):
    module = rl.capture(net.eval(), pictures(2)).module()
    with torch.inference_mode():
        assert_same(module(pictures(3)), net(pictures(3)))
    with torch.no_grad():
        assert not module(pictures(5)).requires_grad
    for size in (3, 5):
        leaves = list(net.parameters())
        assert_same(gradients(module(pictures(size)), leaves), gradients(net(pictures(size)), leaves))


def test_modes_around_the_capture_hold_at_other_sizes(net):
    net.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = rl.capture(net, pictures(2)).module()
        wanted = net(pictures(3))
    assert_same(module(pictures(3)), wanted)


def test_no_output_and_no_history_of_a_size_is_held(net):
    module = rl.capture(net.eval(), pictures(2)).module(outputs=["stem", "layer2"])
    first = nn.Conv2d(3, 3, 1)
    seen = []
    for size in (3, 4):
        given = first(pictures(size))
        outputs = module(given)
        seen += map(weakref.ref, (given, *outputs))
        del given, outputs
    gc.collect()
    assert [one() for one in seen] == [None] * 6


def test_what_a_capture_at_another_size_computes_is_freed_without_the_collector(net):
    module = rl.capture(net.eval(), pictures(2)).module(outputs=["stem", "layer2"])
    gc.collect()
    gc.disable()
    try:
        module(pictures(17))
        found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.dim() == 4]
        computed = [one.shape for one in found if one.shape[0] == 17 and one.shape[1] != 3]
    finally:
        gc.enable()
    assert not computed


def test_a_model_that_is_another_one_since_its_capture_is_not_asked_for_other_sizes(net):
    module = rl.capture(net.eval(), pictures(2)).module()
    before = module(pictures(3))
    net.layer1[0].padding = (2, 2)
    net.layer1[0].dilation = (2, 2)
    assert_same(module(pictures(3)), before)
    found = said(rl.InputMismatch, lambda: module(pictures(5)))
    assert "The model is another one since its capture: with the recorded inputs, where `conv2d_2_6 = " in found


def test_frozen_parameters_get_no_gradients_at_any_size(net):
    module = rl.capture(net, pictures(2)).module(outputs="layer2")
    net.stem.requires_grad_(False)
    for size in (2, 3):
        module(pictures(size)).sum().backward()
    assert all(p.grad is None for p in net.stem.parameters())
    assert all(p.grad is not None for p in net.layer2.parameters())


def test_copies_functional_calls_and_state_dicts_hold_at_other_sizes(net):
    net.eval()
    module = rl.capture(net, pictures(2)).module()
    twin = copy.deepcopy(module)
    zeros = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    x = pictures(3)
    assert_same(torch.func.functional_call(module, zeros, (x,)), torch.func.functional_call(net, zeros, (x,)))
    twin.load_state_dict(zeros)
    assert_same(twin(x), torch.zeros(3, 4))
    assert_same(module(x), net(x))
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
    assert_same(module(x), net(x))


def test_a_module_of_another_dtype_says_that_its_program_is_of_one(net):
    module = rl.capture(net.eval(), pictures(2)).module()
    module.double()
    assert net.fc.weight.dtype is torch.float64
    assert "is float64" in said(rl.StaleValue, lambda: module(pictures(2).double()))
    module.float()
    assert_same(module(pictures(3)), net(pictures(3)))
    again = rl.capture(net.double(), pictures(2).double()).module()
    assert_same(again(pictures(3).double()), net(pictures(3).double()))


def test_gradients_reach_the_input_at_other_sizes(net):
    module = rl.capture(net.eval(), pictures(2)).module(outputs="layer1")
    x, same = pictures(3).requires_grad_(), pictures(3).requires_grad_()
    assert_same(gradients(module(x * 1), [x]), gradients(net.layer1(net.stem(same * 1)), [same]))


# ---- compiled and exported -----------------------------------------------------------------------------------------

COMPILED = ["BufferCutToTheBatch", "ConvolutionalInTraining", "Dropped", "Encoder", "Tied", "chunked_by_the_batch"]
REASONS = {
    "WritesItsInput": "it writes its inputs",
    "KeptBetweenCalls": "it assigns or removes parameters or buffers, or gives them other memory",
    "read_in_python": "Python reads what the model computes (item)",
}


def assert_compiles(name, backend, sizes, fullgraph=False):
    torch.compiler.reset()
    model, inputs = MODELS[name]()
    twin = copy.deepcopy(model)
    module = rl.capture(model, *inputs(2)).module()
    twin(*inputs(2))
    compiled = torch.compile(module, backend=backend, fullgraph=fullgraph)
    for size in sizes:
        torch.manual_seed(size)
        if size in REFUSED[name]:
            with pytest.raises(rl.ReplaylensError):
                compiled(*inputs(size))
            continue
        found = compiled(*inputs(size))
        torch.manual_seed(size)
        wanted = twin(*inputs(size))
        assert_same(found, wanted)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
        if any(one.requires_grad for one in tensors(wanted)):
            pairs = [(found, model), (wanted, twin)]
            assert_same(*[gradients(out, [p for p in m.parameters() if p.requires_grad]) for out, m in pairs])


@pytest.mark.parametrize("name", COMPILED)
def test_a_module_compiles_whole_with_the_models_bits(name):
    assert_compiles(name, "eager", (2, 2), fullgraph=True)


def test_a_compiled_module_takes_other_sizes():
    assert_compiles("ConvolutionalInTraining", "aot_eager", (2, 3, 3))


@pytest.mark.zoo
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_any_module_compiles_or_runs_as_it_is(name, backend):
    assert_compiles(name, backend, (2, 2, 1, 1, 3, 3, 7, 2))


@pytest.mark.zoo
def test_inductor_compiles_a_module(net):
    torch.compiler.reset()
    module = rl.capture(net.eval(), pictures(2)).module(outputs={"early": "stem", "late": "layer2"})
    compiled = torch.compile(module)
    for size in (2, 3, 3):
        found, wanted = compiled(pictures(size)), module(pictures(size))
        torch.testing.assert_close(found, wanted)


def test_a_compiled_module_follows_the_model(net):
    torch.compiler.reset()
    module = rl.capture(net.eval(), pictures(2)).module()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert_same(compiled(pictures(2)), net(pictures(2)))
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()}, assign=True)
    assert_same(compiled(pictures(2)), net(pictures(2)))
    with torch.no_grad():
        net.fc.weight.add_(1)
    assert_same(compiled(pictures(2)), net(pictures(2)))
    assert not compiled(pictures(2)).requires_grad or torch.is_grad_enabled()


def test_a_compiled_module_of_tied_parameters_sees_that_they_are_tied_no_more():
    torch.compiler.reset()
    model, inputs = MODELS["Tied"]()
    module = rl.capture(model, *inputs(2)).module()
    compiled = torch.compile(module, backend="eager")
    assert_same(compiled(*inputs(2)), model(*inputs(2)))
    module.b.weight = nn.Parameter(model.b.weight.detach() * 2)
    with pytest.raises(rl.DivergedReplay, match="hold one tensor"):
        compiled(*inputs(2))


@pytest.mark.parametrize("name", ["BufferCutToTheBatch", "Encoder", "Recurrent", "RunningMean", "WritesAnActivation"])
def test_an_exported_module_gives_the_same_numbers(name):
    model, inputs = MODELS[name]()
    model.eval()
    twin = copy.deepcopy(model)
    module = rl.capture(model, *inputs(2)).module()
    model.load_state_dict(twin.state_dict())
    exported = torch.export.export(module, inputs(2))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert set(exported.state_dict) == set(module.state_dict())
    assert_same(exported.module()(*inputs(2)), twin(*inputs(2)))


def test_an_exported_slice_has_its_outputs_by_name_and_nothing_behind_them(net):
    module = rl.capture(net.eval(), pictures(2)).module(outputs={"early": "stem", "late": "layer2"})
    exported = torch.export.export(module, (pictures(2),))
    assert "fc.weight" not in exported.state_dict and "layer2.0.weight" in exported.state_dict
    x = pictures(2, 9)
    assert_same(exported.module()(x), module(x))
    module(pictures(5))
    larger = torch.export.export(module, (pictures(5),))
    assert_same(larger.module()(pictures(5, 1)), module(pictures(5, 1)))


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_exported_says_why(name):
    model, inputs = MODELS[name]()
    module = rl.capture(model, *inputs(2)).module()
    with pytest.raises(rl.ReplaylensError) as error:
        torch.export.export(module, inputs(2))
    assert str(error.value) == f"the module cannot be exported: {REASONS[name]}."


def test_an_export_has_one_size_of_batch(net):
    module = rl.capture(net.eval(), pictures(2)).module(outputs="layer2")
    with pytest.raises(rl.ReplaylensError, match="a program has numbers for its sizes") as error:
        torch.export.export(module, (pictures(2),), dynamic_shapes=(({0: torch.export.Dim.DYNAMIC},),))
    assert "export it at each size" in str(error.value)


# ---- models of libraries, and peers --------------------------------------------------------------------------------

LIBRARY = {
    "transformers/gpt2": (1,),  # a batch without padding needs no mask, and is another program
    "transformers/bert": (1,),
    "transformers/t5": (1,),
    "transformers/vit": (),
    "transformers/swin": (),
    "transformers/clip": (1,),
    "timm/resnet18": (),
    "timm/vit_tiny_patch16_224": (),
    "timm/efficientnet_b0": (),
    "timm/convnext_atto": (),
    "timm/mixer_s32_224": (),
    "torchvision/resnet18": (),
    "torchvision/swin_v2_t": (),
    "torchvision/shufflenet_v2_x0_5": (),
}


def resized(tree, size):
    """The inputs of a library model with other rows: those that there are again and again, and noise on them."""
    noise = torch.Generator().manual_seed(size)

    def of(leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != library_models.BATCH:
            return leaf
        rows = leaf[torch.arange(size) % library_models.BATCH]
        return rows + 0.1 * torch.randn(rows.shape, generator=noise) if rows.is_floating_point() else rows

    return tree_map(of, tree)


def first_of(output):
    return next(tensor for _, tensor in library_models.tensors_in(output)).clone()


@pytest.mark.zoo
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LIBRARY)
def test_modules_of_library_models_are_what_hooks_see_at_other_sizes(name, train):
    if not library_models.is_installed(name):
        pytest.skip("the library is not installed")
    model, args, kwargs = library_models.build(name)
    model.train(train)
    twin = copy.deepcopy(model)
    prog = rl.capture(model, *args, **kwargs)
    known = [n for n, _ in model.named_modules() if n and n in prog and isinstance(prog[n].value, torch.Tensor)]
    names = [known[0], known[len(known) // 2], known[-1]]
    module = prog.module(outputs={**{n: n for n in names}, "whole": "output"})
    model.load_state_dict(twin.state_dict())
    for size in (2, 1, 3, 7):
        (given, named), found = resized((args, kwargs), size), {}
        torch.manual_seed(size)
        if size in LIBRARY[name]:
            with pytest.raises(rl.InputMismatch, match="computes something else"):
                module(*given, **named)
            continue
        outputs = module(*given, **named)
        hooks = [
            twin.get_submodule(n).register_forward_hook(lambda m, i, o, n=n, f=found: f.__setitem__(n, first_of(o)))
            for n in names
        ]
        torch.manual_seed(size)
        whole = twin(*given, **named)
        for hook in hooks:
            hook.remove()
        assert_same({n: outputs[n] for n in names}, {n: found[n] for n in names})
        assert_same(*[[leaf for _, leaf in library_models.tensors_in(one)] for one in (outputs["whole"], whole)])
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.zoo
def test_what_the_page_of_extractors_says_of_torchvision_and_timm_is_so(net):
    pytest.importorskip("torchvision_ops")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    timm = pytest.importorskip("timm")
    net.eval()
    x = pictures(2)
    normed = net.stem[1](net.stem[0](x))
    theirs = extraction.create_feature_extractor(net, {"stem.1": "bn", "fc": "out"})(x)
    assert_same(theirs, {"bn": normed.relu(), "out": net(x)})
    ours = rl.capture(net, x).module(outputs={"bn": "stem.1", "out": "fc"})(x)
    assert_same(ours, {"bn": normed, "out": net(x)})
    asking = Asking()
    with pytest.raises(torch.fx.proxy.TraceError):
        extraction.create_feature_extractor(asking, ["fc"])
    assert_same(rl.capture(asking, torch.ones(2, 4)).module(outputs="fc")(torch.ones(2, 4)), asking(torch.ones(2, 4)))
    with pytest.raises(AttributeError):
        timm.create_model(net, features_only=True)


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x + 1 if x.mean() > 0 else x)


def test_the_compiler_is_not_imported_with_replaylens():
    """It takes seconds, in each worker of an executor as well."""
    code = "import sys, replaylens; print('torch._dynamo' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize("leave", ["replace", "delete"])
def test_a_submodule_that_the_model_has_no_more_keeps_its_tensors_at_other_sizes(net, leave):
    net.spare, net.eval().layer1[1].spare = nn.BatchNorm1d(4), nn.Linear(2, 2)
    module = rl.capture(net, pictures(2)).module(outputs=["stem", "fc"])
    recorded = module(pictures(2))
    old = [net.stem, net.layer1, net.spare]
    held = [dict(one.state_dict(keep_vars=True)) for one in old]
    if leave == "replace":
        net.stem, net.layer1, net.spare = copy.deepcopy(net.stem), nn.Identity(), nn.Linear(1, 1)
    else:
        del net.spare
    for size in (2, 5, 2):
        if leave == "replace" and size != 2:
            with pytest.raises(rl.InputMismatch, match="With it the model computes something else"):
                module(pictures(size))
        else:
            found = module(pictures(size))
            assert size != 2 or torch.equal(found[1], recorded[1])
        for one, then in zip(old, held, strict=True):
            now = dict(one.state_dict(keep_vars=True))
            assert now.keys() == then.keys() and all(now[key] is then[key] for key in then)


class Queue(nn.Module):
    """Counts and enqueues its keys after the logits; one branch draws, and returns nothing."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("queue", torch.zeros(4, 16))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        self.drop(x)
        query = self.query(x * self.count)
        logits = self.drop(query @ self.queue.clone())
        with torch.no_grad():
            self.count += self.drop(query).abs().mean()
            self.queue.copy_(torch.cat([self.queue[:, len(x) :], self.key(x).T], 1))
        return logits


@pytest.mark.parametrize("outputs", [None, "output", ["output"], {"q": "query", "o": "output"}, ["drop:2"]])
def test_a_module_that_gives_the_models_output_writes_and_draws_what_the_model_does_until_its_return(outputs):
    torch.manual_seed(0)
    model = Queue()
    prog = rl.capture(model, torch.randn(2, 4))
    module, twin = prog.module(outputs=outputs), copy.deepcopy(model)
    for size in (2, 5, 2, 5):
        x = torch.randn(size, 4)
        module(x), twin(x)
        model.load_state_dict(twin.state_dict())
        torch.manual_seed(size)
        found = tree_leaves(module(x))[-1], torch.rand(3)
        torch.manual_seed(size)
        assert_same(found, (twin(x), torch.rand(3)))
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def test_a_module_writes_what_its_next_call_reads_and_no_more():
    torch.manual_seed(0)
    model = Queue().eval()
    module, twin = rl.capture(model, torch.randn(2, 4)).module(outputs=["query"]), copy.deepcopy(model)
    queue = model.queue.clone()
    for size in (2, 5, 2, 5):
        x = torch.randn(size, 4)
        assert_same(module(x)[0], hooked(copy.deepcopy(twin), ["query"], x)["query"])
        twin(x)
        assert model.count == twin.count and torch.equal(model.queue, queue)


def test_a_module_whose_state_is_written_beside_its_beginning_is_refused():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            y = self.fc(x) + self.total
            self.total += x.sum()
            return y

    prog = rl.capture(Beside(), torch.ones(2, 4))
    with pytest.raises(rl.BadEdit, match=r"the model writes `total`, .*\n.*Begin at the model's inputs"):
        prog.module(inputs="fc")
    assert prog.module(outputs="fc")(torch.ones(3, 4)).shape == (3, 4)
    norm = nn.BatchNorm1d(4)
    twice = rl.capture(nn.Sequential(norm, nn.Linear(4, 4), norm), torch.randn(2, 4))
    with pytest.raises(rl.BadEdit, match=r"writes `0.running_mean` before the beginning of the module and behind it"):
        twice.module(inputs="1")


class Scaled(nn.Module):
    """Scales gradients by hooks on what its layers return."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda grad: grad * 0.1)
        h.register_hook(torch.sin)
        return self.b(h)


@pytest.mark.parametrize("outputs", [["a", "output"], ["a.1", "b"], ["a"], ["output"]])
def test_gradients_that_arrive_at_a_returned_layer_pass_the_hooks_of_the_forward(outputs):
    torch.manual_seed(0)
    model = Scaled()
    module, twin = rl.capture(model, torch.randn(2, 4)).module(outputs=outputs), copy.deepcopy(model)
    for size in SIZES:
        x, grads = torch.randn(size, 4), []
        theirs = copy.deepcopy(twin)
        found = hooked(theirs, [name for name in outputs if name != "output"], x)
        for one, values in ((model, module(x)), (theirs, [found.get(n, found["out"]) for n in outputs])):
            model.zero_grad()
            sum((value * (n + 1)).sum() for n, value in enumerate(values)).backward()
            grads.append([p.grad for p in one.parameters()])
        assert_same(*grads)


def test_an_odd_first_call_at_a_size_leaves_nothing_behind_for_later_ones(net):
    net.eval()
    prog = rl.capture(net, pictures(2))

    def labelled(module, x):
        x.label = "cat"
        with pytest.raises(rl.InputMismatch, match="other Python attributes"):
            module(x)

    def marked(module, x):
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(module(x), net(x))

    def hooks_around(module, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.double(), lambda tensor: tensor.float()):
            module(x).sum().backward()

    for odd in (labelled, marked, hooks_around):
        module = prog.module()
        for size in (2, 3, 5):
            odd(module, pictures(size))
            for _ in range(2):
                assert_gradients_agree(module, net, pictures(size, 1))


def assert_gradients_agree(module, model, x):
    grads = []
    for forward in (module, model):
        model.zero_grad()
        forward(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert_same(*grads)


def test_gradients_that_the_models_own_hooks_change_are_refused_at_each_size():
    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
                return self.fc(x).sigmoid()

    module = rl.capture(Packs(), torch.ones(2, 4)).module()
    for size in (2, 3, 2, 3):
        with torch.autograd.graph.save_on_cpu(), pytest.raises(rl.NotDifferentiable, match="saved_tensors_hooks"):
            module(torch.ones(size, 4))


@pytest.mark.parametrize("options", [{"early_stop": True}, {"early_stop": False}])
def test_a_module_runs_in_a_checkpoint_at_any_size(net, options):
    module = rl.capture(net.eval(), pictures(2)).module()
    for size in (2, 3, 2, 3):
        grads = []
        for forward in (module, net):
            net.zero_grad()
            x = pictures(size).requires_grad_()
            checkpoint(forward, x, use_reentrant=False, **options).square().sum().backward()
            grads.append([x.grad, *[p.grad for p in net.parameters()]])
        assert_same(*grads)


def test_a_refused_call_draws_nothing():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(4, 4), nn.Dropout()

        def forward(self, x):
            h = self.drop(self.fc(x))
            return h * 2 if x.sum() > 0 else h

    module = rl.capture(Asks(), torch.ones(2, 4)).module()
    for size in (2, 5, 5):
        before = torch.get_rng_state()
        with pytest.raises((rl.DivergedReplay, rl.InputMismatch)):
            module(-torch.ones(size, 4))
        assert torch.equal(torch.get_rng_state(), before)
        module(torch.ones(size, 4))
        assert not torch.equal(torch.get_rng_state(), before)
