"""A program as a file: what comes back is what was saved, also where the model's code is not; and nothing is lost when
saving fails.
"""

import copy
import enum
import errno
import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings
from hashlib import sha256
from pathlib import Path

import attrs
import pytest
import torch
from internals import container, freeze_deep, graphs, programs, same, write_trees
from loaded_elsewhere import bits, facts, replay_bits
from torch import nn
from zoo import CAPTURE_REFUSED, MODELS

import replaylens as rl
from replaylens.cli import main

TESTS = Path(__file__).parent
NOT_SAVED = {  # by name: what a file cannot hold
    "python_callbacks_that_write": "a lambda",
    "function_under_vmap": "cannot be found again by a name",
    "hook_on_a_tensor": "a lambda",
    "flexible_attention": "cannot be found again by a name",
    "tensor_subclass": "a file holds plain tensors alone",
    "tensor_subclass_with_a_protocol": "a file holds plain tensors alone",
    "tensor_subclass_inside": "a file holds plain tensors alone",
    "quantized_dynamic": "ScriptObject",
}
BY_STRUCT = ("namedtuple_in_and_out", "dataclass_in_and_out", "attrs_in_and_out", "object_in_and_out")


class Net(nn.Module):
    """Dropout, statistics that are written, a condition, a view that is written, a container of the user's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x, scale=1.0):
        x = self.norm(self.drop(self.first(x)))
        if x.sum() > 100:
            x = x - 1
        x = x * scale
        x[:, 0].mul_(2)
        return {"logits": self.last(x), "all": [x, x.t()]}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def prog(net):
    return rl.capture(net, torch.randn(3, 4), scale=0.5)


def saved(prog, **options):
    file = io.BytesIO()
    prog.save(file, **options)
    return file.getvalue()


def there_and_back(prog, **options):
    return rl.load(saved(prog), **options)


def captured(name):
    case = MODELS[name]()
    return rl.capture(case.model, *case.args, **case.kwargs)


# -- all models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every program of the zoo that can be saved, as a file; and what it gives, here and in a process without models."""
    place = tmp_path_factory.mktemp("files")
    expected, trusted, refused, progs = {}, {}, {}, {}
    for name in MODELS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                prog = captured(name)
            except Exception:  # a model that capture refuses
                continue
            try:
                prog.save(place / f"{name}.rlp")
            except rl.CannotSave as error:
                refused[name] = str(error)
                continue
            expected[name] = facts(prog, place)
            trusted[name] = [*rl.inspect(place / f"{name}.rlp").needs_trust]
    (place / "expected.json").write_text(json.dumps(trusted))
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(TESTS / "loaded_elsewhere.py"), str(place)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((place / "found.json").read_text())
    return place, expected, found, refused, trusted, progs


def test_nearly_all_models_are_saved_and_the_others_refused_by_name_and_line(folder):
    _, expected, _, refused, _, _ = folder
    assert refused.keys() == NOT_SAVED.keys()
    for name, words in NOT_SAVED.items():
        assert words in refused[name]
    assert len(expected) >= 0.95 * (len(expected) + len(refused))
    lines = [text for text in refused.values() if ".py:" in text]
    assert len(lines) == 5  # the others are inputs, which no line of the forward makes, and what torch itself runs


def test_a_process_without_the_model_gives_the_same_bits_and_writes_the_same_file(folder):
    _, expected, found, _, _, _ = folder
    wrong = {name: (expected[name], found[name]) for name in expected if expected[name] != found[name]}
    assert not wrong


def test_few_models_need_trust_and_only_for_functions_of_their_own(folder):
    _, _, _, _, trusted, _ = folder
    needy = {name: words for name, words in trusted.items() if words}
    assert len(needy) < 30
    assert all(word.startswith(("zoo", "torch.ops.zoo", "torch.Tensor")) for words in needy.values() for word in words)


def test_graphs_values_strides_and_flags_come_back(folder):
    place, _, _, _, trusted, progs = folder
    for name, prog in progs.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            back = rl.load(place / f"{name}.rlp", trust=trusted[name])
        assert back.graph == prog.graph, name
        assert back.history == prog.history
        ours, theirs = back._record.values, prog._record.values
        assert list(ours) == list(theirs)
        for ref, value in theirs.items():
            assert same(ours[ref], value), (name, ref)
            assert ours[ref].requires_grad == value.requires_grad, (name, ref)
            if value.layout is torch.strided:
                assert ours[ref].stride() == value.stride(), (name, ref)


def test_every_file_is_one_of_safetensors(folder):
    safetensors = pytest.importorskip("safetensors")
    place, expected, _, _, _, _ = folder
    for name in expected:
        with safetensors.safe_open(place / f"{name}.rlp", "pt") as file:
            assert file.metadata()["format"] == "replaylens"
            for key in file.keys():  # noqa: SIM118
                file.get_tensor(key)


def test_parameters_stand_under_their_addresses_for_other_tools(prog, net, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    prog.save(tmp_path / "net.rlp")
    tensors = load_file(tmp_path / "net.rlp")
    assert torch.equal(tensors["first.weight"], net.first.weight)
    assert torch.equal(tensors["last.bias"], net.last.bias)


def test_each_tensor_begins_at_a_multiple_of_64_bytes(prog, tmp_path):
    prog.save(tmp_path / "net.rlp")
    for back in (rl.load(tmp_path / "net.rlp"), rl.load(tmp_path / "net.rlp", mmap=False), there_and_back(prog)):
        for value in back._record.values.values():
            assert value.untyped_storage().data_ptr() % 64 == 0 or not value.numel()


# -- a loaded program is the program -----------------------------------------------------------------------------------

USED = [name for name in MODELS if name not in NOT_SAVED and name not in CAPTURE_REFUSED][::7]


@pytest.mark.parametrize("name", USED)
def test_a_loaded_program_prints_draws_checks_and_differentiates_like_the_saved_one(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prog = captured(name)
        back = there_and_back(prog, trust=["zoo", "torch.ops.zoo"])
        assert str(back) == str(prog)
        assert back.code == prog.code
        assert repr(back.guards) == repr(prog.guards)
        assert back.layer_labels == prog.layer_labels
        assert [str(layer) for layer in back.layers] == [str(layer) for layer in prog.layers]
        assert str(back.check()) == str(prog.check())
        assert back.draw().source == prog.draw().source
        assert gradients(back) == gradients(prog)


def gradients(prog):
    try:
        grads = prog.grads(of=lambda out: total(out))
        return {label: bits_of(value) for label, value in grads.items()}, grads.without
    except Exception as error:
        return type(error).__name__, str(error)


def total(out):
    found = []

    def gather(value):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            [gather(item) for item in value.values()]
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            [gather(item) for item in value]
        elif hasattr(value, "_items"):
            [gather(item) for item in value._items]
        elif hasattr(type(value), "__attrs_attrs__"):  # which may have slots
            [gather(getattr(value, one.name)) for one in type(value).__attrs_attrs__]
        elif hasattr(value, "__dict__"):
            [gather(item) for item in vars(value).values()]

    gather(out)
    return sum(value.real.double().sum() for value in found if value.is_floating_point() or value.is_complex())


def bits_of(value):
    if isinstance(value, tuple):
        return tuple(map(bits_of, value))
    return None if value is None else (value.dtype, sha256(str(value.tolist()).encode()).hexdigest())


def test_a_loaded_program_is_swept_edited_and_patched_like_the_saved_one(prog):
    back, metric = there_and_back(prog), lambda out: out["logits"][0, 0]
    one, other = (rl.sweep(one, "linear_1", "b [unit]", rl.Zero(), metric=metric) for one in (prog, back))
    assert torch.equal(one.values, other.values)
    assert one.keys == other.keys
    for edit in (
        lambda one: one.bypass("mul_1"),
        lambda one: one.lesion("linear_1", "b [unit]", unit=[0, 2]),
        lambda one: one.set_state("last.bias", torch.zeros_like),
        lambda one: one.slice("linear_1", "mul_1"),
        lambda one: one.insert_after("linear_1", torch.sin),
        lambda one: one.with_patch({"linear_1": rl.Noise(0.5, seed=3)}),
    ):
        mine, theirs = edit(prog), edit(back)
        assert mine.history == theirs.history
        assert mine.code == theirs.code
        assert replay_bits(mine) == replay_bits(theirs)
        assert replay_bits(there_and_back(theirs)) == replay_bits(mine)  # and an edited one is a file as well
        assert there_and_back(mine).history == mine.history


def test_a_partial_replay_of_a_loaded_program_runs_only_what_follows(prog):
    back = there_and_back(prog)
    patch = {"linear_1": torch.zeros(3, 6)}
    one, other = prog.replay(patch=patch), back.replay(patch=patch)
    assert one.executed == other.executed
    assert same(one.output["logits"], other.output["logits"])


def test_an_edited_expanded_program_comes_back():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    prog = rl.capture(model, torch.randn(2, 5, 8)).expand("scaleddotproductattention").expand("layernorm")
    back = there_and_back(prog)
    assert back.graph == prog.graph
    assert replay_bits(back) == replay_bits(prog)
    patch = {"pattern_1": rl.Zero("b [head] q k", head=1)}
    assert same(back.replay(patch=patch).output, prog.replay(patch=patch).output)


def test_a_program_without_values_comes_back_as_one():
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(2, 4), fake=True)
    back = there_and_back(prog)
    assert str(back) == str(prog)
    with pytest.raises(rl.NoValues):
        back.replay()


def test_the_backward_pass_of_a_program_comes_back(prog):
    prog = prog.backward(of=lambda out: out["logits"].sum())
    back = there_and_back(prog)
    assert back["linear_1"].grad.equal(prog["linear_1"].grad)
    assert list(back.gradients) == list(prog.gradients)
    assert back.gradients.without == prog.gradients.without


# -- what is saved -----------------------------------------------------------------------------------------------------


def test_values_chooses_what_is_in_the_file_and_the_rest_is_computed_again(prog):
    small = rl.load(saved(prog, values="none"))
    assert small["linear_1"].is_saved is False
    assert same(small.recover("linear_1"), prog["linear_1"].value)
    some = rl.load(saved(prog, values=["linear_1"]))
    assert some["linear_1"].is_saved and not some["dropout_1"].is_saved
    assert len(saved(prog, values="none")) < len(saved(prog))
    assert replay_bits(small) == replay_bits(prog)
    assert small.digest == some.digest == prog.digest


def test_sources_can_be_left_out(prog):
    bare = saved(prog, sources=False)
    assert b"test_files" in saved(prog) and b"self.norm" in saved(prog)
    assert b".py" not in bare and b"self.norm" not in bare
    back = rl.load(bare)
    assert back["linear_1"].source is None
    assert back.digest == prog.digest and replay_bits(back) == replay_bits(prog)
    assert saved(back) == bare
    lines = [line for line in prog.code.split("\n") if "# test_files.py:" not in line]
    assert back.code.split("\n") == lines


def test_a_row_of_a_batch_does_not_drag_the_batch_into_the_file():
    batch = torch.randn(10_000, 8)
    prog = rl.capture(nn.Linear(8, 2), batch[3:4])
    assert len(saved(prog)) < 20_000
    assert same(there_and_back(prog).inputs[0], batch[3:4])


def test_values_that_share_memory_share_it_in_the_file_and_after_it(prog):
    back = there_and_back(prog)
    values = {str(ref): value for ref, value in back._record.values.items()}
    mine = {str(ref): value for ref, value in prog._record.values.items()}
    pairs = [(a, b) for a in mine for b in mine if a < b and shares(mine[a], mine[b])]
    assert pairs
    assert all(shares(values[a], values[b]) for a, b in pairs)


def shares(one, other):
    return one.numel() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_writes_to_a_loaded_value_stay_in_this_process(prog, tmp_path):
    prog.save(tmp_path / "net.rlp")
    before = (tmp_path / "net.rlp").read_bytes()
    rl.load(tmp_path / "net.rlp").inputs[0].fill_(7)
    assert (tmp_path / "net.rlp").read_bytes() == before


def test_a_value_that_was_overwritten_is_not_saved(net):
    x = torch.randn(3, 4)
    prog = rl.capture(net, x)
    with torch.no_grad():
        net.first.weight.add_(1)
    with pytest.raises(rl.StaleValue, match=r"first\.weight"):
        prog.save(io.BytesIO())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64,
                                   torch.complex64, torch.float8_e4m3fn, torch.uint32])  # fmt: skip
def test_tensors_of_any_dtype_come_back(dtype):
    x = torch.arange(6).reshape(2, 3).to(dtype)
    back = there_and_back(rl.capture(lambda x: (x.clone(), x.t(), x[:, :1]), x))
    assert [same(one, other) for one, other in zip(back.output, (x, x.t(), x[:, :1]))] == [True] * 3
    assert back.output[1].stride() == (1, 3)


def test_odd_numbers_and_texts_come_back():
    def model(x):
        x = x.clamp(-0.0, float("inf")).nan_to_num(float("inf")) * complex(1, -0.0)
        return x, {"a b": -0.0, 'q"\\\n': float("nan"), ("t", 1): 2**80, None: ..., "\N{SNOWMAN}": b"\x00\xff"}

    back = there_and_back(rl.capture(model, torch.randn(3)))
    assert str(back.output[1]) == str(model(torch.ones(1))[1])


def test_half_of_a_character_is_refused():
    with pytest.raises(rl.CannotSave, match="a text in it holds half of a character"):
        saved(rl.capture(lambda x: {"\ud800": x + 1}, torch.ones(2)))


def test_a_large_number_of_digits_is_refused():
    with pytest.raises(rl.CannotSave, match="a number has 301 bits; a file holds up to 256"):
        saved(rl.capture(lambda x: (x + 1, 2**300), torch.ones(2)))


# -- containers of the user's ------------------------------------------------------------------------------------------


def test_containers_of_the_users_come_back_as_structures_with_their_names():
    for name in BY_STRUCT:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prog = captured(name)
            back = there_and_back(prog)
        out, was = back.output, prog.output
        assert type(out).__name__ == type(was).__name__
        assert type(out) is not type(was)
        assert back.replay(on_divergence="raise").output is not None
        assert type(back.replay().output) is type(out)


def test_a_structure_answers_attribute_key_and_number_and_has_no_methods():
    from collections import namedtuple

    Pair = namedtuple("Pair", "first second")
    prog = rl.capture(lambda x: Pair(x + 1, {"deep": x * 2}), torch.ones(2))
    out = there_and_back(prog).output
    assert torch.equal(out.first, torch.full((2,), 2.0))
    assert out["first"] is out[0] is out.first
    one, second = out
    assert one is out[0]
    assert second["deep"] is out.second["deep"]
    assert len(out) == 2
    assert repr(out).startswith("Pair(first=tensor(")
    with pytest.raises(
        AttributeError, match=r"Pair was loaded from a file: it has its items \(first, second\), and no"
    ):
        _ = out._asdict
    with pytest.raises(AttributeError, match="cannot be changed"):
        out.first = 1


def test_what_torch_and_python_know_comes_back_as_itself():
    from collections import OrderedDict, defaultdict, deque

    def model(x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 1]), batch_first=True)
        return OrderedDict(a=x), defaultdict(list, b=x), deque([x], 3), torch.sort(x), packed, slice(1, x, None)

    out = there_and_back(rl.capture(model, torch.randn(2, 3))).output
    kinds = [OrderedDict, defaultdict, deque, torch.return_types.sort, nn.utils.rnn.PackedSequence, slice]
    assert [type(one) for one in out] == kinds
    assert out[1].default_factory is list and out[2].maxlen == 3
    assert nn.utils.rnn.pad_packed_sequence(out[4], batch_first=True)[0].shape == (2, 2)


def test_a_container_that_holds_itself_comes_back():
    def model(x):
        ring = [x + 1]
        ring.append(ring)
        return ring

    out = there_and_back(rl.capture(model, torch.ones(2))).output
    assert out[1] is out
    assert torch.equal(out[0], torch.full((2,), 2.0))


# -- divergence, and a model at hand -----------------------------------------------------------------------------------


def test_without_its_model_a_divergence_raises(prog):
    back = there_and_back(prog)
    assert prog.replay(patch={"mul_1": rl.Scale(2.0)}).diverged is False
    with pytest.raises(rl.DivergedReplay):
        back.replay(patch={"batchnorm_1": lambda value: value + 100})
    run = back.replay(patch={"batchnorm_1": lambda value: value + 100}, on_divergence="ignore")
    assert run.diverged


def test_with_its_model_it_is_run_again(prog, net):
    patch = {"batchnorm_1": lambda value: value + 100}
    wanted = prog.replay(patch=patch)
    for options in ({}, {"values": "none", "state": False}):
        before = {key: value.clone() for key, value in net.state_dict().items()}
        back = rl.load(saved(prog, **options), state=net)
        run = back.replay(patch=patch)
        assert run.diverged and wanted.diverged
        assert same(run.output["logits"], wanted.output["logits"])
        assert all(same(value, before[key]) for key, value in net.state_dict().items())


def test_a_bound_program_gives_its_gradients_to_the_model(prog, net):
    net.zero_grad()
    prog.replay(grad=True).output["logits"].sum().backward()
    wanted = net.first.weight.grad.clone()
    for state in (net, {**dict(net.named_parameters()), **dict(net.named_buffers())}):
        net.zero_grad()
        rl.load(saved(prog, state=False), state=state).replay(grad=True).output["logits"].sum().backward()
        assert same(net.first.weight.grad, wanted)


def test_the_module_of_a_bound_program_has_the_models_own_parameters(prog, net):
    module = rl.load(saved(prog), state=net).module()
    assert module.first.weight is net.first.weight
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]


def test_a_file_without_state_says_so_where_state_is_needed(prog, net):
    back = rl.load(saved(prog, state=False))
    assert back["linear_1"].value.equal(prog["linear_1"].value)
    with pytest.raises(rl.NotSaved) as caught:
        back.replay()
    assert str(caught.value) == (
        "the parameter `first.weight` is not in the file: it was saved with state=False.\n"
        "`replaylens.load(path, state=model)` binds a model, or its state_dict, to it."
    )
    with pytest.raises(rl.NotSaved, match="not in the file"):
        _ = back["first.weight"].value
    assert replay_bits(rl.load(saved(prog, state=False), state=net.state_dict())) == replay_bits(prog)
    assert saved(back) == saved(prog, state=False)


def test_a_file_without_state_is_replayed_on_state_that_is_given():
    torch.manual_seed(0)
    one, other = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    x = torch.randn(3, 4)
    for options in ({"values": "none", "state": False}, {"state": False}):
        back = rl.load(saved(rl.capture(one, x), **options))
        state = other.state_dict()
        assert same(back.replay(state=state).output, other(x).detach())
        assert same(back.replay(state=state, to="relu_1")["relu_1"], other[:2](x).detach())
        assert same(back.replay(state=state)["relu_1"], other[:2](x).detach())
        with pytest.raises(rl.NotSaved, match=r"the parameter `0\.bias` is not in the file"):
            back.replay(state={"0.weight": state["0.weight"]})
        other.zero_grad()
        back.replay(state=dict(other.named_parameters()), grad=True).output.sum().backward()
        assert other[0].weight.grad is not None


class Rotary(nn.Module):
    """A buffer that no state_dict has, an attribute, and one that is written."""

    def __init__(self):
        super().__init__()
        self.fc, self.hung = nn.Linear(4, 4), torch.arange(4.0)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.fc(x) * self.angles * self.scale + self.hung + self.count


def test_what_no_state_dict_has_stays_in_a_file_without_state():
    torch.manual_seed(0)
    model, x = Rotary(), torch.randn(2, 4)
    prog = rl.capture(model, x)
    bare = saved(prog, values="none", state=False)
    held = {node.address for node in prog.graph.state_nodes if node.name in rl.inspect(bare).saved}
    assert held == {"angles", "hung", "count"}
    for state in (model, model.state_dict(), dict(model.named_parameters()) | dict(model.named_buffers())):
        back = rl.load(bare, state=state)
        assert replay_bits(back) == replay_bits(prog)
    back = rl.load(bare, state=model.state_dict())
    module = back.module()
    assert all(parameter.requires_grad for parameter in module.parameters())
    module(x).sum().backward()
    assert module.fc.weight.grad is not None
    assert back.replay(state={**model.state_dict(), "fc.bias": torch.zeros(4)}).output.shape == (2, 4)
    state = {name: value for name, value in model.state_dict().items() if name != "count"}
    assert same(rl.load(bare).replay(state=state).output, prog.output.detach())


def test_an_output_of_a_loaded_program_is_copied_and_pickled():
    case = MODELS["namedtuple_in_and_out"]()
    back = there_and_back(rl.capture(case.model, *case.args, **case.kwargs))
    for again in (copy.deepcopy(back.output), pickle.loads(pickle.dumps(back.output)), through_torch(back.output)):
        assert type(again) is type(back.output)
        assert [same(one, other) for one, other in zip(again, back.output)] == [True] * len(back.output)


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def test_a_function_of_the_script_is_refused_and_pickled(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """import io, pickle, torch
import replaylens as rl
def twice(x):
    return x * 2
prog = rl.capture(torch.nn.ReLU(), torch.ones(2)).with_patch({"relu_1": twice})
try:
    prog.save(io.BytesIO())
except rl.CannotSave as error:
    print(error)
print(torch.equal(pickle.loads(pickle.dumps(prog)).replay().output, prog.output))
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert first == "relu_1_1 is given `twice` of the script itself, which no other process finds."
    assert last == "True"


def test_a_module_that_is_not_there_is_said_to_be_missing_and_not_the_file_bad(prog):
    swapped = saved(prog.with_patch({"linear_1": doubled}))
    moved = swapped.replace(b"test_files.doubled", b"test_lifes.doubled")
    with pytest.raises(rl.BadFile, match="is damaged"):
        rl.load(moved, trust=["test_lifes"])
    patch = rl.to_json(rl.Apply(doubled)).replace("test_files.", "test_lifes.")
    with pytest.raises(rl.UnresolvedTarget, match=r"no function is found under the name 'test_lifes\.doubled'"):
        rl.from_json(patch, trust=["test_lifes"])


@pytest.mark.parametrize(
    "use",
    [
        lambda prog: prog.check(),
        lambda prog: prog.grads(of=lambda out: out["logits"].sum()),
        lambda prog: prog.function()(prog.inputs[0]),
        lambda prog: prog.module(),
        lambda prog: rl.sweep(prog, "linear_1", "b [unit]", rl.Zero()),
        lambda prog: prog.refresh(),
        lambda prog: prog.to(torch.float64),
        lambda prog: prog.state,
        lambda prog: prog.set_state("last.bias", torch.zeros_like),
        lambda prog: prog.lesion("linear_1"),
    ],
)
def test_whatever_needs_state_says_that_the_file_has_none(prog, use):
    with pytest.raises(rl.NotSaved, match="is not in the file: it was saved with state=False"):
        use(rl.load(saved(prog, state=False)))


def test_a_bound_program_notices_that_its_model_was_trained(prog, net):
    back = rl.load(saved(prog, state=False), state=net)
    with torch.no_grad():
        net.first.weight.add_(1)
    with pytest.raises(rl.StaleValue, match=r"first\.weight"):
        back.replay()


def test_new_inputs_fit_a_loaded_program_if_they_print_as_the_recorded_ones_did():
    class Options:
        def __init__(self, factor):
            self.factor = factor

    def model(x, options):
        return x * options.factor

    back = there_and_back(rl.capture(model, torch.ones(2), Options(3)))
    assert torch.equal(back.replay(torch.full((2,), 2.0), Options(3)).output, torch.full((2,), 6.0))
    with pytest.raises(rl.InputMismatch):
        back.replay(torch.ones(2), Options(4))


def test_an_object_that_holds_itself_is_opened_once():
    class Node:
        def __init__(self):
            self.depth, self.next, self.items = 1, self, [self]

    prog = rl.capture(lambda x, node: (x + node.depth, node), torch.ones(2), Node())
    back = there_and_back(prog)
    assert back.output[1].depth == 1
    assert saved(back) == saved(prog)


def test_another_model_is_refused(prog, net):
    torch.manual_seed(1)
    for options in ({}, {"state": False}):
        with pytest.raises(rl.StaleValue, match=r"`first\.weight` holds other numbers"):
            rl.load(saved(prog, **options), state=Net())
    with pytest.raises(rl.InputMismatch, match=r"the Linear has no parameter `first\.weight`"):
        rl.load(saved(prog), state=nn.Linear(2, 2))
    with pytest.raises(rl.InputMismatch, match=r"state= has no parameter `first\.weight`"):
        rl.load(saved(prog), state={})
    with pytest.raises(rl.InputMismatch, match="takes a model or its state_dict, not a int"):
        rl.load(saved(prog), state=3)
    other = Net()
    other.first = nn.Linear(4, 7)
    with pytest.raises(rl.InputMismatch, match=r"`first\.weight` is float32\[7, 4\]"):
        rl.load(saved(prog), state=other)


def test_a_model_that_does_something_else_is_not_run(prog, net):
    back = rl.load(saved(prog), state=net.eval())
    with pytest.raises(rl.StaleValue, match="the model that was given by state= is not the one that was recorded"):
        back.replay(patch={"batchnorm_1": lambda value: value + 100})


def test_a_deep_copy_still_runs_its_model_on_the_numbers_of_then(prog, net):
    from copy import deepcopy

    patch = {"batchnorm_1": lambda value: value + 100}
    wanted, copy = prog.replay(patch=patch), deepcopy(prog)
    with torch.no_grad():
        net.first.weight.add_(1)
    run = copy.replay(patch=patch)
    assert run.diverged
    assert same(run.output["logits"], wanted.output["logits"])
    with pytest.raises(rl.StaleValue):
        prog.replay(patch=patch)


# -- trust -------------------------------------------------------------------------------------------------------------


def doubled(x):
    return x * 2


def test_a_function_that_is_not_torchs_needs_trust(prog):
    swapped = prog.swap("dropout", nn.functional.relu).with_patch({"linear_1": doubled})
    with pytest.raises(rl.Untrusted, match="test_files"):
        rl.load(saved(swapped))
    back = rl.load(saved(swapped), trust=["test_files"])
    assert replay_bits(back) == replay_bits(swapped)


def test_a_lambda_is_refused_with_its_node_its_line_and_the_way_out(prog):
    with pytest.raises(rl.CannotSave) as caught:
        saved(prog.with_patch({"linear_1": lambda value: value * 2}))
    text = str(caught.value)
    assert text.startswith("linear_1_1 is given a lambda, which cannot be found again by a name.\n    test_files.py:")
    assert text.endswith("Define the function in a module, with `def`, and give that one: a file holds its name.")


# -- the file itself ---------------------------------------------------------------------------------------------------


def test_no_fact_of_a_program_is_left_out_of_its_file():
    written = {
        graphs.Graph: {*graphs.GRAPH_FIELDS, "nodes", "output"},
        graphs.Call: {*graphs.CALL_FIELDS, "name", "kind", "target", "args", "returns", "spec", "context", "scope", "source"},
        graphs.Guard: {*graphs.GUARD_FIELDS, "target", "args"},
        graphs.Input: {"name", "path", "spec", "python_type"},
        graphs.State: {"name", "address", "kind", "spec", "aliases"},
        graphs.Const: {"name", "origin", "spec", "source"},
        graphs.GeneratorLeft: {"follows", "fixed"},
        graphs.Overlaps: {"same", "meeting", "touched"},
        write_trees.TensorSpec: {"shape", "dtype", "device", "strides", "stored", "layout"},
        write_trees.Context: {"grad", "inference", "autocast", "settings"},
        write_trees.Scope: {"address", "call", "kind", "parent", "source"},
        write_trees.Source: {"file", "line", "function", "caller", "saved"},
        programs.CaptureMetadata: {
            "seed", "began", "seconds", "nanoseconds", "originals", "gradients", "modules", "classes", "unread",
            "unread_buffers", "untrained", "called_from",
        },
    }  # fmt: skip
    for kind, names in written.items():
        assert {field.name for field in attrs.fields(kind)} == names, kind


def test_one_program_is_the_same_bytes_each_time_and_after_loading(prog):
    assert saved(prog) == saved(prog) == saved(there_and_back(prog))


def test_a_path_bytes_and_file_objects_are_the_same(prog, tmp_path):
    path = tmp_path / "net.rlp"
    prog.save(str(path))
    assert path.read_bytes() == saved(prog)
    with open(path, "rb") as file:
        assert rl.load(file).digest == prog.digest
    for source in (path, str(path), path.read_bytes(), bytearray(path.read_bytes())):
        assert rl.load(source).digest == prog.digest
    assert rl.load(path, mmap=False, verify=False).digest == prog.digest


def test_the_digest_tells_programs_apart_and_not_how_they_are_kept(net):
    net.eval()
    x = torch.randn(3, 4)
    one, again = rl.capture(net, x), rl.capture(net, x)
    first = one.digest
    assert first == again.digest == one.saving("none").digest == there_and_back(one).digest
    assert first != rl.capture(net, x + 1).digest
    assert first != one.bypass("mul_1").digest
    with torch.no_grad():
        net.last.bias.add_(1)
    assert first != rl.capture(net, x).digest
    with pytest.raises(rl.StaleValue):
        _ = one.digest


def test_an_older_file_stays_whole_when_saving_is_killed(prog, tmp_path):
    path = tmp_path / "net.rlp"
    prog.save(path)
    whole, pause = path.read_bytes(), random.Random(0)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    prog.save(path)
            finally:
                os._exit(1)
        time.sleep(pause.uniform(0.001, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert path.read_bytes() == whole
        assert rl.load(path).digest == prog.digest


@pytest.mark.parametrize("after", range(0, 20_000, 1000))
def test_an_older_file_stays_whole_on_a_full_disk(prog, tmp_path, monkeypatch, after):
    path = tmp_path / "net.rlp"
    path.write_bytes(b"what was there before")
    left, write = [after], container._Whole.write

    def full(self, data):
        view = memoryview(data)
        if len(view) > left[0]:
            write(self, view[: left[0]])
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(view)
        write(self, view)

    monkeypatch.setattr(container._Whole, "write", full)
    with pytest.raises(OSError, match="No space left"):
        prog.save(path)
    assert path.read_bytes() == b"what was there before"
    assert os.listdir(tmp_path) == ["net.rlp"]


def test_a_limit_of_the_kernels_on_files_leaves_the_older_one(prog, tmp_path):
    import resource

    path = tmp_path / "net.rlp"
    prog.save(path)
    whole = path.read_bytes()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
            try:
                prog.save(path)
            except OSError as error:
                status = 0 if error.errno == errno.EFBIG else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["net.rlp"]


def test_the_mode_of_an_older_file_and_a_link_to_it_stay(prog, tmp_path):
    path, link = tmp_path / "net.rlp", tmp_path / "link.rlp"
    path.write_bytes(b"")
    path.chmod(0o640)
    link.symlink_to(path)
    prog.save(link)
    assert link.is_symlink()
    assert rl.load(path).digest == prog.digest
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_folder_is_not_overwritten(prog, tmp_path):
    with pytest.raises(IsADirectoryError, match="Give the name of a file"):
        prog.save(tmp_path)


def test_what_is_no_file_of_replaylens_is_said_to_be_none(prog, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"a": torch.zeros(3)}, tmp_path / "plain.safetensors")
    with pytest.raises(rl.BadFile, match="it is a safetensors file without a program"):
        rl.load(tmp_path / "plain.safetensors")
    torch.save({"a": torch.zeros(3)}, tmp_path / "x.pt")
    for content in (
        b"",
        b"short",
        (tmp_path / "x.pt").read_bytes(),
        b"\xff" * 100,
        saved(prog)[:-1],
        saved(prog) + b" ",
    ):
        with pytest.raises(rl.BadFile):
            rl.load(content)
    with pytest.raises(FileNotFoundError):
        rl.load(tmp_path / "nowhere.rlp")


def test_each_altered_byte_of_a_tensor_is_noticed(prog):
    whole = saved(prog)
    info = rl.inspect(whole)
    pick = random.Random(0)
    for at in [pick.randrange(info.header_bytes, len(whole)) for _ in range(100)]:
        broken = bytearray(whole)
        broken[at] ^= 1 << pick.randrange(8)
        with pytest.raises(rl.BadFile, match="is damaged"):
            rl.load(broken)


def test_a_newer_version_is_said_to_be_newer(prog):
    newer = saved(prog).replace(b'"version":"1"', b'"version":"2"')
    with pytest.raises(rl.BadFile, match=r"has version 2 of the format; this replaylens reads up to 1\."):
        rl.load(newer)


def test_the_usual_mistakes_are_said_to_be_what_they_are(prog, tmp_path):
    def said(error, use):
        with pytest.raises(error) as caught:
            use()
        return str(caught.value)

    save_file = pytest.importorskip("safetensors.torch").save_file
    for count in range(1, 9):  # wherever its tensors begin
        save_file({"a" * count: torch.zeros(3)}, tmp_path / "plain.safetensors")
        text = said(rl.BadFile, lambda: rl.load(tmp_path / "plain.safetensors"))
        assert "was not written by replaylens: it is a safetensors file without a program" in text
    torch.save(torch.zeros(3), tmp_path / "x.pt")
    assert said(rl.BadFile, lambda: rl.load(tmp_path / "x.pt")).endswith(
        "x.pt is no file of replaylens, but a zip or a pickle: `torch.load` reads what `torch.save` wrote."
    )
    (tmp_path / "x.json").write_text(rl.to_json(rl.Zero()))
    assert said(rl.BadFile, lambda: rl.load(tmp_path / "x.json")).endswith(
        "x.json is no file of replaylens, but a text: `replaylens.from_json` reads what `to_json` wrote."
    )
    assert said(rl.CannotSave, lambda: rl.save("x.rlp", prog)) == (
        "a str cannot be saved. The path comes second: save(what, path)."
    )
    assert said(TypeError, lambda: prog.save(tmp_path / "y.rlp", state=nn.ReLU())) == (
        "state= is True or False, not ReLU(). A model is bound by load(path, state=model)."
    )
    folder = tmp_path / "none"
    assert said(FileNotFoundError, lambda: prog.save(folder / "y.rlp")) == (
        f"there is no folder {str(folder)!r} to save 'y.rlp' in. Make it first."
    )
    rl.save(rl.Zero(), tmp_path / "zero.rlp")
    assert said(rl.InputMismatch, lambda: rl.load(tmp_path / "zero.rlp", state=nn.ReLU())) == (
        "state= is for programs, and this is a file of kind 'patch'. Load it without state=."
    )


def test_inspect_says_which_program_a_result_is_of_and_a_patch_refers_to(prog, tmp_path):
    prog.replay(patch={"linear_1": rl.Zero()}).save(tmp_path / "run.rlp")
    info = rl.inspect(tmp_path / "run.rlp")
    assert (info.kind, info.model, info.digest) == ("run", "Net", prog.digest)
    rl.save({"linear_1": rl.From(prog)}, tmp_path / "patch.rlp")
    info = rl.inspect(tmp_path / "patch.rlp")
    assert info.refers_to == (prog.digest,) and prog.digest in str(info)


# -- what a file says of itself ----------------------------------------------------------------------------------------


def test_inspect_reads_the_header_alone(prog, tmp_path):
    path = tmp_path / "net.rlp"
    prog.save(path)
    info = rl.inspect(path)
    assert info.kind == "program" and info.model == "Net" and info.digest == prog.digest
    assert info.history == ("captured",)
    assert info.layers[0] == "input_1_0" and len(info.saved) == len(info.layers)
    assert "first.weight" in info.state and info.has_state
    assert info.needs_trust == ()
    assert info.nbytes == path.stat().st_size
    assert info.tensors["first.weight"] == ("F32", (6, 4), 96)
    damaged = path.read_bytes()[: info.header_bytes] + b"\x01" * (info.nbytes - info.header_bytes)
    assert rl.inspect(damaged).layers == info.layers
    assert not rl.inspect(saved(prog, state=False)).has_state
    swapped = prog.with_patch({"linear_1": doubled})
    assert rl.inspect(saved(swapped)).needs_trust == ("test_files.doubled",)


def test_the_command_line_takes_files(prog, tmp_path, capsys):
    path = tmp_path / "net.rlp"
    prog.save(path)

    def ask(*words):
        status = main([*map(str, words)])
        return status, *capsys.readouterr()

    assert ask("show", path) == (0, f"{prog}\n", "")
    assert ask("show", path, "--code") == (0, f"{prog.code}\n", "")
    assert ask("show", path, "--header") == (0, f"{rl.inspect(path)}\n", "")
    assert ask("check", path) == (0, f"{prog.check()}\n", "")
    nowhere = tmp_path / "nowhere.rlp"
    assert ask("check", nowhere) == (2, "", f"replaylens: {nowhere}: No such file or directory.\n")
    said = "replaylens: --input is for models; a file has its own inputs.\n"
    assert ask("show", path, "--input", "1,2") == (2, "", said)
    assert ask("show", "zoo:MODELS", "--header") == (
        2,
        "",
        "replaylens: --header is for files, and 'zoo:MODELS' is none.\n",
    )
    prog.with_patch({"linear_1": doubled}).save(path)
    assert ask("show", path)[0] == 2
    assert ask("show", path, "--trust", "test_files")[0] == 0


# -- files of earlier versions -----------------------------------------------------------------------------------------

FILES = TESTS / "files"


@pytest.mark.parametrize("path", sorted(FILES.glob("program_*.rlp")), ids=lambda path: path.stem)
def test_a_file_of_each_version_loads_for_ever(path):
    """`tests/make_files.py` made them, each once, when its version was new. They are never made again."""
    expected = json.loads(path.with_suffix(".json").read_text())
    back = rl.load(path)
    assert back.digest == expected["digest"]
    assert back.code == expected["code"]
    assert [*back.history] == expected["history"]
    assert stored_bits(back) == expected["values"]
    for got, wanted in zip(output_tensors(back.replay().output), output_tensors(back.output), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)  # other machines have other kernels: no bits here
    assert back.lesion("linear_1").history[-1] == "lesion('linear_1')"
    grads = back.grads(of=lambda out: out["logits"].sum())
    assert [*grads] == expected["gradients"]


def stored_bits(prog):
    return {str(ref): bits(value) for ref, value in prog._record.values.items()}


def output_tensors(value):
    found = []
    freeze_deep(value, found.append)
    return found


def test_the_newest_version_has_a_file():
    assert (FILES / f"program_{container.VERSION}.rlp").exists()


# -- found from outside ------------------------------------------------------------------------------------------------


def test_loaded_values_that_share_memory_share_a_write_counter():
    back = there_and_back(rl.capture(lambda x: (x * 2).view(-1), torch.ones(2, 2)))
    back.output.add_(100)
    with pytest.raises(rl.StaleValue, match="mul_1_1"):
        _ = back["mul_1"].value
    with pytest.raises(rl.StaleValue):
        back.replay(from_="mul_1")


@pytest.mark.parametrize("copy_of", [there_and_back, lambda prog: pickle.loads(pickle.dumps(prog))])
def test_what_is_done_to_the_parameters_of_a_loaded_program_is_noticed(copy_of):
    torch.manual_seed(0)
    x = torch.randn(3, 2)
    prog = rl.capture(nn.Linear(2, 2), x)
    trained, written = copy_of(prog), copy_of(prog)
    module = trained.module()
    optimizer = torch.optim.Adam(module.parameters(), 0.1, fused=True)
    module(x).sum().backward()
    optimizer.step()
    written.state["weight"].data.mul_(3)
    for back in (trained, written):
        with pytest.raises(rl.StaleValue, match="weight"):
            back.replay()
        with pytest.raises(rl.StaleValue, match="weight"):
            saved(back)
    assert same(trained.refresh().output, module(x).detach())


def test_a_frozen_parameter_stays_frozen_in_the_module_of_a_loaded_program():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    module = there_and_back(rl.capture(model, torch.ones(1, 2))).module()
    assert {name: one.requires_grad for name, one in module.named_parameters()} == {
        name: one.requires_grad for name, one in model.named_parameters()
    }


def test_memory_that_left_torch_stays_a_fact():
    numpy = pytest.importorskip("numpy")

    def model(x):
        return torch.from_numpy(numpy.asarray(x).flatten("K"))

    x = torch.arange(6.0).view(2, 3)
    other = x.t().contiguous().t()
    prog = rl.capture(model, x)
    with pytest.raises(rl.DivergedReplay):
        there_and_back(prog).replay(other)
    assert same(rl.load(saved(prog), state=model).replay(other).output, model(other))


class Until(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        while x.norm() < self.limit:
            x = x * 2
        return x


class Drawing(nn.Module):
    def forward(self, x):
        torch.rand(2)
        return torch.dropout(x, 0.5, True) if x.sum() > 0 else x


class Dropping(nn.Module):
    def forward(self, x):
        return torch.dropout(x, 0.5, True) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "other", "factor"),
    [
        (Until(10), Until(12), 20),
        (lambda x: x if x.max() < 5 else -x, lambda x: x if x.min() < 5 else -x, 20),
        (lambda x: x * 2 if x.sum() > 0 else x, lambda x: x * 2, -20),
        (Dropping(), Drawing(), -20),
    ],
    ids=["a limit", "another question", "no question", "another draw"],
)
def test_a_model_that_differs_in_what_python_reads_or_draws_is_not_run(model, other, factor):
    prog, x = rl.capture(model, torch.ones(2)), factor * torch.ones(2)
    assert prog.replay(x).diverged
    assert rl.load(saved(prog), state=model).replay(x).diverged
    with pytest.raises(rl.StaleValue, match="is not the one that was recorded"):
        rl.load(saved(prog), state=other).replay(x)


def test_numbers_that_a_file_cannot_know_are_not_drawn():
    class Noisy(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else x + torch.rand(2)

    back = rl.load(saved(rl.capture(Noisy(), torch.ones(2))), state=Noisy())
    with pytest.raises(rl.DivergedReplay, match="draws random numbers where the recorded forward drew none"):
        back.replay(-torch.ones(2))


def test_a_bound_slice_is_not_the_model():
    class Halved(nn.Module):
        def forward(self, x):
            hidden = torch.relu(x)
            return hidden if x.sum() > 0 else hidden * 2

    model = Halved()
    part = rl.capture(model, torch.ones(2)).slice(to="relu_1")
    with pytest.raises(rl.DivergedReplay):
        rl.load(saved(part), state=model).replay(torch.tensor([1.0, -3.0]))


def test_a_slice_is_saved_as_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(2, 4)
    for prog in (rl.capture(model, x), rl.capture(model, x, save="none")):
        for part in (prog.slice(to="linear_1"), prog.slice("relu_1"), prog.slice("linear_1", "relu_1")):
            back = there_and_back(part)
            assert same(back.output, part.output)
            assert replay_bits(back) == replay_bits(part)


def test_inputs_are_compared_by_what_is_known_of_them():
    from decimal import Decimal

    numpy = pytest.importorskip("numpy")
    x = torch.ones(6)
    back = there_and_back(rl.capture(lambda x, d: x * float(d), x, Decimal("2.5")))
    for number in [Decimal(3) for _ in range(300)]:
        with pytest.raises(rl.InputMismatch):
            back.replay(x, number)
    back = there_and_back(rl.capture(lambda x, a: x.reshape(*a.shape).sum(0), x, numpy.zeros((2, 3))))
    assert back.replay(x, numpy.zeros((2, 3))).output.shape == (3,)
    with pytest.raises(rl.InputMismatch):
        back.replay(x, numpy.zeros((3, 2)))
    back = there_and_back(rl.capture(lambda x, act: act(x), x, torch.nn.functional.relu))
    assert same(back.replay(-x, torch.nn.functional.relu).output, torch.zeros(6))
    with pytest.raises(rl.InputMismatch):
        back.replay(-x, torch.nn.functional.gelu)
    names = {"a", "bb", "ccc"}  # another process walks over them in another order
    back = there_and_back(rl.capture(lambda x, names: x * len(names), x, names))
    with pytest.raises(rl.InputMismatch):
        back.replay(x, names)


def test_the_digest_holds_no_address():
    class Kind(enum.Enum):
        ONE = 1
        TWO = 2

    def digest():
        return rl.capture(lambda x, kind, thing: x * kind.value, torch.ones(2), Kind.TWO, object()).digest

    kept = [object() for _ in range(50)]
    assert digest() == digest()
    assert kept
    back = there_and_back(rl.capture(lambda x, kind: x * kind.value, torch.ones(2), Kind.TWO))
    assert same(back.replay(torch.ones(2), Kind.TWO).output, torch.full((2,), 2.0))
    with pytest.raises(rl.InputMismatch):
        back.replay(torch.ones(2), Kind.ONE)


def test_what_stands_beside_a_structure_that_holds_itself_stays_where_it_is():
    class Kind(enum.Enum):
        ONE = 1
        TWO = 2

    class Node:
        def __init__(self, parent=None):
            self.parent, self.child = parent, self if parent is None else None
            self.near = [parent, {"me": self}]

    def model(x):
        ring = [x]
        ring.append(ring)
        first = Node()
        first.child = Node(first)
        return ring, Kind.ONE, Kind.TWO, Kind.ONE, first, numpy_number(), Kind.TWO

    prog = rl.capture(model, torch.ones(1))
    back = there_and_back(prog)
    assert [back.output[n]._name_ for n in (1, 2, 3, 6)] == ["ONE", "TWO", "ONE", "TWO"]
    assert back.output[0][1] is back.output[0]
    assert back.output[5] == numpy_number()
    assert type(back.output[4].child).__name__ == "Node"
    assert saved(back) == saved(prog)


def numpy_number():
    return pytest.importorskip("numpy").float64(0.5)


def test_arguments_whose_class_a_function_of_the_users_may_ask_for_are_refused():
    class Mode(enum.IntEnum):
        A = 1

    with pytest.raises(rl.CannotSave, match="Mode, and may ask for its class, which no file holds"):
        saved(rl.capture(lambda x: Twice.apply(x, Mode.A), torch.ones(2)))
    assert same(there_and_back(rl.capture(lambda x: x + Mode.A, torch.ones(2))).output, torch.full((2,), 2.0))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mode):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def test_tensors_without_memory_are_saved():
    prog = rl.capture(lambda x: x + 1, torch._efficientzerotensor((3,)))
    assert same(there_and_back(prog).output, torch.ones(3))
    assert there_and_back(prog).digest == prog.digest


def test_a_pipe_is_written_to_and_not_replaced(prog, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    child = os.fork()
    if child == 0:
        try:
            data = path.read_bytes()
            (tmp_path / "read.rlp").write_bytes(data)
        finally:
            os._exit(0)
    prog.save(path)
    os.waitpid(child, 0)
    assert path.is_fifo()
    assert rl.load(tmp_path / "read.rlp").digest == prog.digest


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "old.rlp"
    path.write_bytes(b"old")
    odd = torch.tensor([2, 3], dtype=torch.uint8).view(torch.bool)
    with pytest.raises(rl.CannotSave, match="could not be read again, so none is written"):
        rl.capture(lambda x: x.clone(), odd).save(path)
    assert path.read_bytes() == b"old"
