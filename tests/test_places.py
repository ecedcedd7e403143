"""What names of places mean: what a module hands on, a module under each of its names, globs, types and state.

The witness is the plain model with a forward hook at the module.
"""

from collections import namedtuple
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import replaylens as rl

Pair = namedtuple("Pair", "left right")


@dataclass
class Out:
    main: torch.Tensor
    extra: dict


class Around(nn.Module):
    """A part between two layers; `read` says what the model makes of what the part handed on."""

    def __init__(self, part, read=None):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.part = part
        self.last = nn.Linear(3, 2)
        self.read = read or (lambda model, out: out)

    def forward(self, x):
        out = self.part(self.first(x))
        return self.last(self.read(self, out)).tanh()


class Part(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def keeps_its_output(self, x):
    self.kept = x.relu()
    return self.kept


def keeps_it_in_a_list(self, x):
    self.all = [x.relu()]
    self.kept = self.all[-1]
    return self.all[0]


def makes_an_auxiliary_loss(self, x):
    out = x.relu()
    self.kept = out.square().mean()
    return out


def reads_it_twice(self, x):
    out = x.relu()
    self.kept = out.sum() * out
    return out


def keeps_one_of_two(self, x):
    self.kept = x.relu()
    return self.kept, x.tanh()


def keeps_one_in_a_dict(self, x):
    self.kept = x.relu()
    return {"a": self.kept, "b": (x.tanh(), self.kept * 2)}


def keeps_one_in_a_dataclass(self, x):
    self.kept = x.relu()
    return Out(self.kept, {"more": x.tanh()})


def keeps_its_input(self, x):
    self.kept = x.mean()
    return x


def gives_a_named_tuple(self, x):
    self.kept = torch.zeros(())
    return Pair(x.relu(), x.tanh())


def keeps_a_view(self, x):
    out = x.relu()
    self.kept = out[0]
    return out


def total(out):
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, Out):
        return out.main + total(out.extra)
    values = list(out.values()) if isinstance(out, dict) else list(out)
    found = total(values[0])
    for value in values[1:]:
        found = found * 0.5 + total(value)
    return found


KEEPING = [
    keeps_its_output,
    keeps_it_in_a_list,
    makes_an_auxiliary_loss,
    reads_it_twice,
    keeps_one_of_two,
    keeps_one_in_a_dict,
    keeps_one_in_a_dataclass,
    keeps_its_input,
    gives_a_named_tuple,
    keeps_a_view,
]


def with_kept(model, out):
    return total(out) + model.part.kept


def mapped(function, out):
    """What a forward hook gives that changes every tensor of an output."""
    if isinstance(out, torch.Tensor):
        return function(out)
    if isinstance(out, dict):
        return {key: mapped(function, value) for key, value in out.items()}
    if isinstance(out, Out):
        return replace(out, main=mapped(function, out.main), extra=mapped(function, out.extra))
    items = [mapped(function, value) for value in out]
    return type(out)(*items) if hasattr(out, "_fields") else type(out)(items)


def hooked(model, address, function, *inputs):
    """The plain model, with a hook that changes what a module hands on."""
    handle = model.get_submodule(address).register_forward_hook(lambda m, i, out: mapped(function, out))
    try:
        return model(*inputs)
    finally:
        handle.remove()


def tripled(value):
    return value * 3 + 1


@pytest.fixture(params=KEEPING, ids=lambda keeping: keeping.__name__)
def model(request):
    torch.manual_seed(3)
    return Around(Part(request.param), with_kept)


@pytest.fixture
def x():
    torch.manual_seed(4)
    return torch.randn(2, 3)


@pytest.mark.parametrize("grad", [True, False])
def test_a_patch_at_a_module_changes_what_a_hook_there_changes(model, x, grad):
    with torch.set_grad_enabled(grad):
        prog = rl.capture(model, x)
        wanted = hooked(model, "part", tripled, x)
        assert torch.equal(prog.replay(patch={"part": tripled}).output, wanted)


def test_so_do_a_live_run_a_sweep_and_an_edit(model, x):
    wanted = hooked(model, "part", tripled, x)
    prog = rl.capture(model, x)
    assert torch.equal(rl.run(model, x, patch={"part": tripled}).output, wanted)
    assert torch.allclose(rl.sweep(prog, {"one": {"part": tripled}})["one"], wanted)
    edited = prog.with_patch({"part": tripled})
    assert torch.equal(edited.output, wanted)
    assert edited.check()


def test_so_does_a_live_run_after_the_path_was_left(x):
    def read(model, out):
        return out * 2 + model.part.kept if out.sum() > 0 else out - model.part.kept

    model = Around(Part(keeps_its_output), read)
    prog = rl.capture(model, x)
    run = prog.replay(patch={"part": lambda value: -value - 1})
    assert run.diverged
    assert torch.equal(run.output, hooked(model, "part", lambda value: -value - 1, x))


def test_gradients_of_a_patched_module_are_those_with_a_hook(model, x):
    prog = rl.capture(model, x)
    hooked(model, "part", tripled, x).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    prog.replay(patch={"part": tripled}, grad=True).output.sum().backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, grad)


def test_a_program_of_such_a_model_holds_every_law(model, x):
    assert rl.check(model, x)


def test_when_one_call_gives_several_a_patch_changes_all(x):
    model = Around(Part(lambda self, x: x.chunk(2)), lambda model, out: total(out))
    patch = {"part": rl.Scale(3)}
    wanted = hooked(model, "part", lambda value: value * 3, x)
    prog = rl.capture(model, x)
    assert torch.equal(prog.replay(patch=patch).output, wanted)
    assert torch.equal(rl.run(model, x, patch=patch).output, wanted)


def test_a_run_reads_what_the_module_handed_on(model, x):
    seen = []
    handle = model.part.register_forward_hook(lambda m, i, out: seen.append(out))
    model(x)
    handle.remove()
    prog = rl.capture(model, x)
    found, wanted = prog.replay()["part"], seen[0]
    assert type(found) is type(wanted)
    assert torch.equal(total(found), total(wanted))


def test_nested_modules_that_hand_on_one_value_are_patched_each_at_its_own_end(x):
    def outer(self, x):
        out = self.inner(x)
        self.kept = out.mean()
        return out

    model = Around(Part(outer), with_kept)
    model.part.inner = Part(reads_it_twice)
    prog = rl.capture(model, x)
    for address in ("part", "part.inner"):
        assert torch.equal(prog.replay(patch={address: tripled}).output, hooked(model, address, tripled, x))
        assert torch.equal(rl.run(model, x, patch={address: tripled}).output, hooked(model, address, tripled, x))


def test_a_parameter_that_a_module_returns_is_patched_where_it_was_returned_to(x):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return self.weight

    model = Around(Table(), lambda model, out: out + model.part.weight * 2)
    prog = rl.capture(model, x)
    assert torch.equal(prog.replay(patch={"part": tripled}).output, hooked(model, "part", tripled, x))
    assert torch.equal(rl.run(model, x, patch={"part": tripled}).output, hooked(model, "part", tripled, x))


def test_a_module_that_keeps_its_output_for_nobody_has_no_node_more(x):
    model = Around(Part(keeps_its_output))
    assert rl.capture(model, x).layer_labels == "input_1_0 linear_1_1 relu_1_2 linear_2_3 tanh_1_4 output_1_5".split()


def test_what_only_the_module_itself_reads_cannot_be_patched_by_its_address(x):
    model = Around(Part(reads_it_twice), lambda model, out: model.part.kept)
    with pytest.raises(rl.errors.BadPatch, match="nothing outside of the module reads what 'part' returns"):
        rl.capture(model, x).replay(patch={"part": tripled})


# ---- several tensors --------------------------------------------------------------------------------------------------


def test_each_of_several_tensors_has_a_name(x):
    prog = rl.capture(Around(Part(keeps_one_in_a_dict), with_kept), x)
    assert prog.replay(patch={"part[b][0]": tripled})["part[b][0]"].equal(tripled(prog["part[b][0]"].value))
    assert [layer.layer_type for layer in prog["part"].parts] == ["identity", "tanh", "mul"]


@pytest.mark.parametrize("what", [rl.Zero("b [c]", c=1), torch.zeros(2, 3)])
def test_a_patch_for_one_tensor_says_the_names_of_several(x, what):
    prog = rl.capture(Around(Part(keeps_one_of_two), with_kept), x)
    with pytest.raises(rl.errors.BadPatch, match=r"'part' returns 2 tensors.*'part\[0\]'.*'part\[1\]'"):
        prog.replay(patch={"part": what})


def test_several_tensors_can_be_given_for_several(x):
    model = Around(Part(keeps_one_of_two), with_kept)
    prog, news = rl.capture(model, x), (torch.ones(2, 3), torch.zeros(2, 3))
    handle = model.part.register_forward_hook(lambda m, i, out: news)
    wanted = model(x)
    handle.remove()
    assert torch.equal(prog.replay(patch={"part": news}).output, wanted)


def test_several_tensors_are_taken_from_another_program(x):
    model = Around(Part(keeps_one_of_two), with_kept)
    prog, other = rl.capture(model, x), rl.capture(model, x * 2 + 1)
    news = iter([layer.value for layer in other["part"].parts])
    wanted = hooked(model, "part", lambda value: next(news), x)
    assert torch.equal(prog.replay(patch={"part": rl.From(other)}).output, wanted)


def test_gradients_and_slices_of_several(x):
    prog = rl.capture(Around(Part(gives_a_named_tuple), with_kept), x)
    grads = prog.grads(of=lambda out: out.sum(), at="part")
    assert grads["part[1]"].shape == (2, 3)
    assert len(prog.function(outputs="part")(x)) == 2
    assert prog.replay(to="part")["part"].right.equal(prog["part[1]"].value)
    assert prog.slice(to="part").output[1].equal(prog["part[1]"].value)
    assert prog.replay(from_="part", patch=tripled).output.equal(prog.replay(patch={"part": tripled}).output)


RECURRENT = {
    "an lstm on a batch": (lambda: nn.LSTM(3, 4, batch_first=True), (2, 5, 3)),
    "an lstm on one sequence": (lambda: nn.LSTM(3, 4), (5, 3)),
    "a gru on a batch": (lambda: nn.GRU(3, 4), (5, 2, 3)),
    "a gru on one sequence": (lambda: nn.GRU(3, 4), (5, 3)),
    "chunks": (lambda: Part(lambda self, x: x.chunk(3, -1)), (2, 3)),
    "a module that gives them in another order": (lambda: Part(lambda self, x: x.chunk(3, -1)[::-1]), (2, 3)),
    "a dict of chunks": (lambda: Part(lambda self, x: dict(zip("abc", x.chunk(3, -1), strict=True))), (2, 3)),
}


class Sums(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return sum(value.exp().sum() for value in torch.utils._pytree.tree_leaves(self.part(x)))


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_function_at_a_module_is_called_with_each_tensor_whatever_computed_them(kind):
    torch.manual_seed(1)
    make, shape = RECURRENT[kind]
    model, x = Sums(make()), torch.randn(shape)
    shapes = []

    def noted(value):
        shapes.append(tuple(value.shape))
        return value * 2

    handle = model.part.register_forward_hook(lambda m, i, out: torch.utils._pytree.tree_map(noted, out))
    wanted, seen = model(x), [*shapes]
    handle.remove()
    prog, patch = rl.capture(model, x), {"part": noted}
    values = [*torch.utils._pytree.tree_leaves(prog["part"].value)]
    assert [tuple(value.shape) for value in values] == seen
    for run in (
        lambda: prog.replay(patch=patch).output,
        lambda: rl.run(model, x, patch=patch).output,
        lambda: rl.sweep(prog, {"one": patch})["one"],
    ):
        shapes.clear()
        assert torch.allclose(run(), wanted)
        assert shapes == seen
    assert torch.equal(prog.with_patch(patch).output, wanted)
    assert torch.equal(prog.insert_after("part", noted).output, wanted)
    assert torch.allclose(rl.sweep(prog, dict.fromkeys(range(3), patch))[2], wanted)


def test_at_the_label_of_an_operation_that_gives_several_a_function_gets_the_tuple():
    model, x = Sums(nn.LSTM(3, 4)), torch.randn(5, 2, 3)
    prog, kinds = rl.capture(model, x), []
    patch = {"lstm_1": lambda values: (kinds.append([type(v) for v in values]), values)[1]}
    assert torch.equal(prog.replay(patch=patch).output, prog.output)
    assert torch.allclose(rl.sweep(prog, dict.fromkeys(range(2), patch))[1], prog.output)
    assert torch.equal(rl.run(model, x, patch=patch).output, prog.output)
    assert kinds == [[torch.Tensor] * 3] * 4


# ---- one module under several names -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.fc(x)).relu()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Block()
        self.b = self.a
        self.c = nn.Sequential(Block(), Block())
        self.head = nn.Linear(3, 3)
        self.head.weight = self.a.fc.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.c(self.b(x)))


@pytest.fixture
def shared():
    torch.manual_seed(1)
    return Shared().eval()


@pytest.mark.parametrize("name", ["b", "b.fc", "b.norm", "b:1", "b.fc.weight", "b.norm.running_mean"])
def test_a_shared_module_is_found_by_each_of_its_names(shared, x, name):
    prog = rl.capture(shared, x)
    assert name in prog
    assert prog[name].label == prog["a" + name[1:]].label


def test_a_shared_module_is_patched_by_each_of_its_names(shared, x):
    prog = rl.capture(shared, x)
    for name in ("b", "b.fc"):
        wanted = hooked(shared, name, tripled, x)
        assert torch.equal(prog.replay(patch={name: tripled}).output, wanted)
        assert torch.equal(rl.run(shared, x, patch={name: tripled}).output, wanted)
        assert torch.equal(prog.replay()[name], prog["a" + name[1:]].value)
    assert prog.find(module="b").labels == prog.find(module="a").labels
    assert len(prog.names_of("b.*")) == len(prog.names_of("a.*")) == 2
    assert rl.capture(shared, x, save="b.fc")["a.fc"].value is not None


def test_a_whole_state_dict_is_other_state(shared, x):
    prog = rl.capture(shared, x)
    other = Shared().eval()
    assert torch.equal(prog.replay(state=other.state_dict()).output, other(x))


def test_two_values_for_one_tied_tensor_are_refused(shared, x):
    state = shared.state_dict() | {"head.weight": torch.zeros(3, 3)}
    with pytest.raises(rl.errors.InputMismatch, match="are one tensor of the model, and two values are given"):
        rl.capture(shared, x).replay(state=state)


def test_a_model_with_a_shared_block_holds_every_law(shared, x):
    assert rl.check(shared, x)


# ---- globs, types, state ----------------------------------------------------------------------------------------------


def test_a_star_stays_within_one_level_and_two_cross_dots(shared, x):
    prog = rl.capture(shared, x)
    assert prog.names_of("c.*") == ("c.0", "c.1")
    assert prog.names_of("c.**") == ("c.0.fc", "c.0.norm", "c.0", "c.1.fc", "c.1.norm", "c.1")
    assert prog.names_of("**.fc")[1:] == ("c.0.fc", "c.1.fc")
    assert prog.names_of("c.?.fc") == prog.names_of("c.[01].fc") == ("c.0.fc", "c.1.fc")
    assert prog.names_of("c.[!0].fc") == ("c.1.fc",)


def test_a_glob_changes_no_state(shared, x):
    prog = rl.capture(shared, x)
    zeroed = dict.fromkeys(("c.0", "c.1"), torch.zeros_like)
    assert torch.equal(prog.replay(patch={"c.*": rl.Zero()}).output, prog.replay(patch=zeroed).output)
    assert not any(layer.label.startswith("buffer") for layer in [*prog.find("*"), *prog.find(module="**")])
    assert not any(name.startswith("buffer") for name in [*prog.names_of("*"), *prog.names_of("**")])


@pytest.mark.parametrize("key", ["**.running_*", "buffer", "buffer_*", "a.norm.*"])
def test_a_glob_or_a_type_that_finds_state_alone_says_how_state_is_meant(shared, x, key):
    with pytest.raises(rl.errors.NoSuchLayer, match=r"only its state.*prog\.find\(state="):
        rl.capture(shared, x).replay(patch={key: rl.Zero()})


def test_state_is_found_by_address_and_by_state(shared, x):
    prog = rl.capture(shared, x)
    assert prog.find(state="c.*.norm.running_mean").assert_count(2)
    wanted = prog.replay(state={f"c.{n}.norm.running_mean": torch.zeros(3) for n in (0, 1)}).output
    assert torch.equal(prog.replay(patch={prog.find(state="c.**.running_mean"): rl.Zero()}).output, wanted)
    assert len(prog.find("linear") | prog.find(state="**.fc.weight")) == 4 + 3


def test_the_keys_of_a_sweep_are_names(shared, x):
    prog = rl.capture(shared, x)
    assert list(rl.sweep(prog, "c.*", patch=rl.Zero())) == ["c.0", "c.1"]
    assert list(rl.sweep(prog, "linear", patch=rl.Zero())) == list(prog.find("linear").labels)


def test_a_type_is_no_name_and_says_so(shared, x):
    with pytest.raises(rl.errors.NoSuchLayer, match=r"'linear' is a type, of 4 layers.*prog\.find\('linear'\)"):
        rl.capture(shared, x)["linear"]


@pytest.mark.parametrize(("name", "said"), [("input", "one layer, 'input_1_0'"), ("output", "one layer, 'output_1_")])
def test_the_types_of_inputs_and_outputs_are_types(shared, x, name, said):
    prog = rl.capture(shared, x)
    with pytest.raises(rl.errors.NoSuchLayer, match=f"'{name}' is a type, of {said}"):
        prog[name]
    assert prog.replay(patch={name: rl.Scale(2)}).output is not None


def test_the_type_of_buffers_is_no_key_of_patches_and_says_what_is(shared, x):
    with pytest.raises(rl.errors.NoSuchLayer, match=r"'buffer' is a type.*`prog\.find\(state=\.\.\.\)`, are keys"):
        rl.capture(shared, x)["buffer"]


@pytest.mark.parametrize("gives", [lambda x: (y for y in x), lambda x: lambda: x, lambda x: iter([x]), lambda x: None])
def test_a_module_that_hands_on_no_tensor_says_so(gives, x):
    model = Around(Part(lambda self, x: gives(x.relu())), lambda model, out: torch.ones(3))
    prog = rl.capture(model, x)
    for asked in (lambda: prog["part"], lambda: prog.replay(patch={"part": tripled})):
        with pytest.raises(
            rl.errors.NoSuchLayer, match=r"'part' hands on no tensor of the program.*find\(module='part'"
        ):
            asked()


@pytest.mark.parametrize("name", ["c.*", "**.fc", "linear_*", "c.0:*"])
def test_a_glob_is_no_name_and_says_how_to_list_what_it_means(shared, x, name):
    with pytest.raises(rl.errors.NoSuchLayer, match=r"is a glob, which may mean several layers: `prog\.names_of"):
        rl.capture(shared, x)[name]


def test_a_glob_that_ends_too_early_says_that_a_star_stays_within_a_level(shared, x):
    with pytest.raises(rl.errors.NoSuchLayer, match=r"stays within one level of an address. '\*\*fc' finds a\.fc"):
        rl.capture(shared, x).names_of("*fc")


# ---- numbers of calls -------------------------------------------------------------------------------------------------


class Attempts(nn.Module):
    """Calls its layers with a mask that they do not take, and then without."""

    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList([layer, nn.Linear(3, 3)])

    def forward(self, x):
        for layer in self.layers:
            try:
                x = layer(x, mask=None)
            except TypeError:
                x = layer(x)
        return x + self.layers[0](x)


@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))])
def test_a_call_that_raised_before_it_computed_anything_has_no_number(x, layer):
    model = Attempts(layer)
    prog = rl.capture(model, x)
    assert {"layers.0:1", "layers.0:2", "layers.1", "layers.1:1"} <= set(prog._index.module_places)
    assert "layers.0:3" not in prog and "layers.1:2" not in prog
    patch = {"layers.0:2": tripled}
    assert torch.equal(rl.run(model, x, patch=patch).output, prog.replay(patch=patch).output)
    assert rl.check(model, x)


def test_a_module_that_its_own_pre_hook_calls_is_numbered_alike_everywhere(x):
    model = Around(nn.Linear(3, 3))
    calling = []

    def before(module, args):
        if not calling:
            calling.append(1)
            out = module(args[0])
            calling.clear()
            return out * 2
        return None

    model.part.register_forward_pre_hook(before)
    prog = rl.capture(model, x)
    for call in ("part:1", "part:2"):
        run = rl.run(model, x, patch={call: tripled})
        assert torch.equal(run.output, prog.replay(patch={call: tripled}).output)
    assert rl.check(model, x)


def test_a_part_that_does_not_fit_one_of_many_names_the_layer_its_line_and_the_cure(x):
    prog = rl.capture(Around(nn.Flatten(0), lambda model, out: out.view(2, 3)), x)
    with pytest.raises(rl.errors.BadPart) as patched:
        prog.replay(patch={"linear_*": rl.Zero("b c [t]", t=0)})
    with pytest.raises(rl.errors.BadPart) as swept:
        rl.sweep(prog, "linear", "b c [t]", rl.Zero())
    for error in (patched, swept):
        assert "the pattern has 3 axes, and the tensor 2 axes" in str(error.value)
        assert "prog.find(op=..., where=lambda layer: len(layer.shape or ()) == 4)" in str(error.value)
    assert "test_places.py:" in str(swept.value) and "linear_1_1" in str(swept.value)
    assert "test_places.py:" in str(patched.value) and "'linear_*' means this layer too" in str(patched.value)


class Repeated(nn.Module):
    """A layer that runs several times."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = self.l(x)
        return x


class Blocks(nn.Module):
    """The n-th block runs its layer n times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Repeated(), Repeated(), Repeated()])

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x, number + 1)
        return x


@pytest.mark.parametrize(
    ("key", "calls"), [("blocks.1.l", 2), ("blocks.*.l", 6), ("**.l", 6), ("blocks.[12].l", 5), ("blocks.2.l:[13]", 2)]
)
def test_a_glob_means_all_calls_of_each_module_that_it_matches(key, calls):
    model, seen = Blocks(), []
    prog = rl.capture(model, torch.ones(2, 4))
    prog.replay(patch={key: lambda value: (seen.append(1), value)[1]})
    assert len(seen) == calls
    hooked = [
        module.register_forward_hook(lambda *given: given[2] * 0)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    if calls == 6:
        assert torch.equal(prog.replay(patch={key: rl.Zero()}).output, model(torch.ones(2, 4)))
    assert len(hooked) == 3


# ---- what shares memory with what is handed on ------------------------------------------------------------------------

CONSTANT = torch.arange(3.0)


def its_view_is_kept(self, x):
    out = x.relu()
    self.kept = out[0]
    return out


def a_view_of_its_view_is_kept(self, x):
    out = x.relu()
    self.kept = out.view(-1)[2:5]
    return out


def what_it_is_a_view_of_is_kept(self, x):
    self.kept = x.relu()
    return self.kept[0]


def a_view_of_own_memory_is_written(self, x):
    self.kept = x.tanh()
    out = x.relu()
    out[0].mul_(2)
    return out


def parts_of_own_memory_are_copied_to(self, x):
    self.kept = out = torch.zeros(2, 3)
    out[:1].copy_(x[:1])
    out[1:].copy_(x[1:] * 2)
    return out


def a_constant_is_given(self, x):
    self.kept = x.tanh()
    return CONSTANT


def nothing_more(model, out):
    return out + 10 * model.part.kept


def then_it_is_written(model, out):
    out.add_(1)
    return out + 10 * model.part.kept


def then_a_row_of_it_is_written(model, out):
    out[0] = 7.0
    return out + 10 * model.part.kept


def then_what_is_kept_is_written(model, out):
    model.part.kept.add_(1)
    return out + 10 * model.part.kept


def edited_or_refused(prog, patch):
    """The edited program, or None where an edit refuses what only the model can do."""
    try:
        return prog.with_patch(patch)
    except rl.errors.DivergedReplay:
        return None


MEMORY = [
    its_view_is_kept,
    a_view_of_its_view_is_kept,
    what_it_is_a_view_of_is_kept,
    a_view_of_own_memory_is_written,
    parts_of_own_memory_are_copied_to,
]


@pytest.mark.parametrize(
    "read", [nothing_more, then_it_is_written, then_a_row_of_it_is_written, then_what_is_kept_is_written]
)
@pytest.mark.parametrize("part", MEMORY)
def test_a_patch_parts_what_is_handed_on_from_the_memory_that_it_was_in(part, read, x):
    model = Around(Part(part), read)
    prog, patch, wanted = rl.capture(model, x), {"part": tripled}, hooked(model, "part", tripled, x)
    assert torch.equal(prog.output, model(x))
    assert torch.equal(prog.replay(patch=patch).output, wanted)
    assert torch.equal(rl.run(model, x, patch=patch).output, wanted)
    assert torch.allclose(rl.sweep(prog, dict.fromkeys((1, 2), patch))[2], wanted)
    edited = edited_or_refused(prog, patch)
    assert edited is None or torch.equal(edited.output, wanted)
    assert torch.equal(prog.replay(2 * x, patch=patch).output, hooked(model, "part", tripled, 2 * x))


class Beside(nn.Module):
    """Goes on with what its part gave, and with what that was given."""

    def __init__(self, part, then=lambda out, given: out + 10 * given):
        super().__init__()
        self.first, self.part, self.then = nn.Linear(3, 3), part, then

    def forward(self, x):
        given = self.first(x)
        return self.then(self.part(given), given)


GIVEN_BACK = {
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu in place, inside": lambda: nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(inplace=True))),
    "a product in place": lambda: Part(lambda self, x: x.mul_(2)),
    "a row in place": lambda: Part(lambda self, x: (x[0].mul_(2), x)[1]),
    "a row that is set": lambda: Part(lambda self, x: (x.__setitem__(0, 3.0), x)[1]),
    "dropout in evaluation": lambda: nn.Dropout(0.5).eval(),
    "the very tensor": lambda: Part(lambda self, x: x),
    "the very tensor, after something": lambda: Part(lambda self, x: (x.relu(), x)[1]),
    "the very tensor in a tuple": lambda: Part(lambda self, x: (x,)),
}


def both(out, given):
    return total(out) + 10 * given


def out_written(out, given):
    total(out).add_(1)
    return total(out) + 10 * given


def given_written(out, given):
    given.add_(1)
    return total(out) + 10 * given


def out_alone(out, given):
    return total(out) * 2


@pytest.mark.parametrize("then", [both, out_written, given_written, out_alone])
@pytest.mark.parametrize("part", GIVEN_BACK)
def test_a_patch_where_a_module_gives_back_what_it_was_given_leaves_that_as_it_is(part, then, x):
    model = Beside(GIVEN_BACK[part](), then)
    prog, patch, wanted = rl.capture(model, x), {"part": tripled}, hooked(model, "part", tripled, x)
    assert torch.equal(prog.output, model(x))
    assert torch.equal(prog.replay(patch=patch).output, wanted)
    assert torch.equal(rl.run(model, x, patch=patch).output, wanted)
    assert torch.allclose(rl.sweep(prog, {"one": patch})["one"], wanted)
    assert rl.check(model, x)


def test_a_module_in_place_whose_input_nobody_reads_again_has_no_node_more(x):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True))
    assert not any("identity" in label for label in rl.capture(model, x).layer_labels)


def test_a_constant_that_a_module_returns_and_others_read_is_patched_where_it_was_returned_to(x):
    model = Around(Part(a_constant_is_given), lambda model, out: out + 10 * CONSTANT)
    prog, patch, wanted = rl.capture(model, x), {"part": tripled}, hooked(model, "part", tripled, x)
    assert torch.equal(prog.replay(patch=patch).output, wanted)
    assert torch.equal(prog.with_patch(patch).output, wanted)
    assert torch.equal(rl.run(model, x, patch=patch).output, wanted)


class AsItIs(nn.Module):
    def forward(self, weight):
        return weight


@pytest.mark.parametrize("address", ["part.parametrizations.weight.0", "part.parametrizations.weight"])
def test_a_parametrization_that_gives_the_parameter_itself_is_patched_and_the_parameter_is_not(address, x):
    part = nn.Linear(3, 3)
    torch.nn.utils.parametrize.register_parametrization(part, "weight", AsItIs())
    model = Around(part, lambda model, out: out + model.part.parametrizations.weight.original.sum())
    prog, patch, wanted = rl.capture(model, x), {address: tripled}, hooked(model, address, tripled, x)
    assert torch.equal(prog.replay(patch=patch).output, wanted)
    assert torch.equal(rl.run(model, x, patch=patch).output, wanted)


@pytest.mark.parametrize("then", ["the buffer", "what was given"])
def test_a_buffer_that_is_given_and_written_later_is_patched_as_a_hook_patches_it(then, x):
    def read(model, out):
        (model.part.table if then == "the buffer" else out).add_(1)
        return out + 10 * model.part.table

    def make():
        torch.manual_seed(0)
        part = Part(lambda self, x: self.table)
        part.register_buffer("table", torch.arange(3.0))
        return Around(part, read)

    prog, patch, wanted = rl.capture(make(), x), {"part": tripled}, hooked(make(), "part", tripled, x)
    assert torch.equal(prog.replay(patch=patch).output, wanted)
    assert torch.equal(rl.run(make(), x, patch=patch).output, wanted)


class Rebinds(nn.Module):
    """Calls modules in place as they are mostly called: nobody holds what they were given."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.drop = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(0.1, inplace=True)
        self.seq = nn.Sequential(nn.Linear(3, 3), nn.Hardtanh(inplace=True), nn.ReLU6(inplace=True))

    def forward(self, x):
        x = self.first(x)
        x = self.act(x)
        x += 1
        x = self.seq(self.act(self.first(x)))
        return self.drop(x)


def test_modules_in_place_that_are_called_one_after_the_other_stay_plain_operations(x):
    model = Rebinds().eval()
    prog = rl.capture(model, x)
    assert not any(label.startswith(("identity", "alias")) for label in prog.layer_labels)
    for address in ("act:1", "act:2", "seq.1", "seq", "drop"):
        patch = {address: tripled}
        assert torch.equal(prog.replay(patch=patch).output, rl.run(model, x, patch=patch).output)
    assert torch.equal(prog.replay(patch={"seq.1": tripled}).output, hooked(model, "seq.1", tripled, x))


def test_an_empty_tuple_may_stand_behind_the_call_of_a_module_in_place(x):
    class Joins(Rebinds):
        def forward(self, x):
            x = self.first(x)
            return self.joined(self.act(x), ())

        def joined(self, value, more):
            return sum(more, value)

    model = Joins().eval()
    patch = {"act": tripled}
    assert torch.equal(rl.capture(model, x).replay(patch=patch).output, rl.run(model, x, patch=patch).output)


def test_a_name_that_others_hold_keeps_what_a_module_in_place_was_given(x):
    class Holds(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.first, self.part, self.how = nn.Linear(3, 3), nn.ReLU(inplace=True), how

        def forward(self, x):
            given = self.first(x)
            held = [given] if self.how == "list" else given if self.how == "name" else None
            self.held = given if self.how == "attribute" else None
            given = self.part(given)
            other = held[0] if self.how == "list" else held if self.how == "name" else self.held
            return given + 10 * other

    for how in ("list", "name", "attribute"):
        model = Holds(how)
        prog, wanted = rl.capture(model, x), hooked(model, "part", tripled, x)
        assert torch.equal(prog.replay(patch={"part": tripled}).output, wanted)
        assert torch.equal(rl.run(model, x, patch={"part": tripled}).output, wanted)


class Keeps(nn.Module):
    """What it gives, it keeps as well; nobody reads what it hands on, but for `reads`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.kept = self.linear(x)
        return x * 2, self.kept


@pytest.mark.parametrize("patch", [rl.Zero(), rl.Scale(3.0), lambda t: t + 1], ids=["zero", "scale", "function"])
def test_what_a_module_kept_is_as_it_was_where_nobody_reads_what_it_handed_on(patch):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Keeps()

        def forward(self, x):
            y, _ = self.part(x)
            return y + self.part.kept

    model, x = Outer(), torch.randn(2, 4)
    prog = rl.capture(model, x)
    change = {rl.Zero: torch.zeros_like, rl.Scale: lambda t: t * 3.0}.get(type(patch), patch)
    hook = model.part.register_forward_hook(lambda module, args, out: tuple(map(change, out)))
    expected = model(x)
    hook.remove()
    assert torch.equal(prog.replay(patch={"part": patch}).output, expected)
    assert torch.equal(rl.run(model, x, patch={"part": patch}).output, expected)
    assert torch.equal(prog.with_patch({"part": patch}).replay().output, expected)


CONJUGATED = {
    "a parameter": lambda z: nn.Parameter(z.conj(), requires_grad=False),
    "a subclass": lambda z: z.conj().as_subclass(torch.Tensor),
    "negated": lambda z: torch._neg_view(z.real * 1).as_subclass(torch.Tensor),
}


@pytest.mark.parametrize("name", CONJUGATED)
def test_a_conjugated_view_that_no_call_makes_is_refused(name):
    def model(x):
        return CONJUGATED[name](torch.complex(x, x + 1))

    with pytest.raises(rl.CaptureError, match=r"(?s)conjugated or negated view .*`\.resolve_conj\(\)`"):
        rl.capture(model, torch.ones(2))
