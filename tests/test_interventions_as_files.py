"""Patches, mappings of them, selections and edits as texts, files and pickles: what comes back equals what was given,
and does the same. What cannot be written is refused; what nobody wrote is not believed.
"""

import copy
import functools
import io
import json
import pickle
import random
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from types import MappingProxyType

import cloudpickle
import numpy as np
import pytest
import torch
from internals import EDITS as METHODS, Chain, Patch
from torch import nn
from torch.nn import functional as F

import replaylens as rl

FLIPPED = "test_interventions_as_files.flipped"


def flipped(value):
    return -value


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pair(nn.Module):
    def forward(self, x):
        return x.sin(), x.cos()


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down, self.pair = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3), Pair()

    def forward(self, x):
        left, right = self.pair(F.relu(self.up(x)))
        return self.down(F.relu(self.norm(left + right)))


@functools.cache
def program(seed=0):
    return rl.capture(Net(seed), numbers(3, 4, seed=7))


@functools.cache
def clean():
    return rl.capture(Net(0), numbers(3, 4, seed=8))


def as_text(what, folder, references=None, **how):
    return rl.from_json(rl.to_json(what), references=references, **how)


def as_text_and_file(what, folder, references=None, **how):
    path = folder / "tensors.rlp"
    return rl.from_json(rl.to_json(what, tensors=path), tensors=path, references=references, **how)


def as_file(what, folder, references=None, **how):
    rl.save(what, folder / "what.rlp")
    return rl.load(folder / "what.rlp", references=references, **how)


def as_pickle(what, folder, **how):
    return pickle.loads(pickle.dumps(what))


def as_cloudpickle(what, folder, **how):
    return pickle.loads(cloudpickle.dumps(what))


def as_copy(what, folder, **how):
    return copy.deepcopy(what)


FILES = [as_text, as_text_and_file, as_file]
WAYS = [*FILES, as_pickle, as_cloudpickle, as_copy]


def said(error, ask):
    with pytest.raises(error) as caught:
        ask()
    return str(caught.value)


# -- patches -----------------------------------------------------------------------------------------------------------

PARTS = {
    "whole": None,
    "columns": rl.Part("b [c]", c=[1, 2]),
    "a slice": rl.Part("b [c]", c=slice(0, 2)),
    "a mask": rl.Part("[b] c", b=torch.tensor([True, False, True])),
    "packed": rl.Part("b (c [d])", d=1, c=2),
    "the last": rl.Part("... [c]", c=-1),
    "steps": rl.Part("[b] [c]", b=slice(None, None, 2), c=slice(-3, None)),
}
KINDS = {
    "Set": lambda part: rl.Set(numbers(3, 4) if part is None else torch.tensor(0.5), part),
    "Set a number": lambda part: rl.Set(0.25, part),
    "Zero": lambda part: rl.Zero(part),
    "Mean": lambda part: rl.Mean(0, part),
    "Mean of": lambda part: rl.Mean((0,), part, of=numbers(5, 4)),
    "From": lambda part: rl.From(numbers(3, 4), part),
    "Resample": lambda part: rl.Resample(part=part, seed=3),
    "Resample in this order": lambda part: rl.Resample([2, 0, 1], part),
    "Add": lambda part: rl.Add(numbers(1), part),
    "Scale": lambda part: rl.Scale(0.5, part),
    "Noise": lambda part: rl.Noise(0.1, part, seed=3),
    "Clamp": lambda part: rl.Clamp(max=0.25, part=part),
    "Clamp by tensors": lambda part: rl.Clamp(torch.tensor(-0.1), torch.tensor(0.1), part),
    "Project": lambda part: rl.Project(numbers(3, seed=2), along=0, off=True) if part is None else None,
    "Project a part": lambda part: rl.Project(numbers(2, 3, seed=2), "[b] c", b=[0, 1, 2], along="b") if part else None,
    "Rotate": lambda part: rl.Rotate(torch.eye(4)[:2], rl.Zero()) if part is None else None,
    "Rotate a part": lambda part: (
        rl.Rotate(torch.eye(2), rl.Zero() >> rl.Add(1.0), "b [c]", c=[0, 1]) if part else None
    ),
    "Apply": lambda part: rl.Apply(torch.tanh, part),
    "Chain": lambda part: rl.Scale(2.0, part) >> rl.Add(numbers(1), part) >> rl.Clamp(min=0.0, part=part),
}
PATCHES = {
    f"{kind}, {where}": patch
    for kind, make in KINDS.items()
    for where, part in PARTS.items()
    if (patch := make(part)) is not None and (where in ("whole", "columns") or kind == "Zero")
}


def test_every_class_of_patches_is_among_the_examples():
    steps = [step for patch in PATCHES.values() for step in [patch, *getattr(patch, "patches", [])]]
    known = {kind for kind in vars(rl).values() if isinstance(kind, type) and issubclass(kind, Patch)} - {Patch}
    assert {*map(type, steps)} == known | {Chain}
    assert {kind for kind in known for step in steps if type(step) is kind and step.part} == known


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_comes_back_equal_and_gives_the_same_values(name, way, tmp_path):
    patch = PATCHES[name]
    made = way(patch, tmp_path)
    assert made == patch
    assert repr(made) == repr(patch)
    assert hash(made) == hash(patch)
    one, other = (program().replay(patch={"relu_1": each}) for each in (patch, made))
    assert torch.equal(one.output, other.output)
    assert not torch.equal(one.output, program().output)


@pytest.mark.parametrize("name", PATCHES)
def test_the_same_patch_has_the_same_text_and_file_also_when_it_was_read(name):
    text, files = rl.to_json(PATCHES[name]), [io.BytesIO(), io.BytesIO()]
    assert rl.to_json(rl.from_json(text)) == text
    for file, patch in zip(files, (PATCHES[name], rl.from_json(text)), strict=True):
        rl.save(patch, file)
    assert files[0].getvalue() == files[1].getvalue()


NUMBERS = [
    0,
    -0.0,
    1,
    True,
    2.5e-300,
    float("nan"),
    float("inf"),
    -float("inf"),
    1 + 2j,
    complex("nan"),
    2**70,
    -(2**63),
]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_number_comes_back_with_its_class(number, tmp_path):
    for way in FILES:
        found = way(rl.Set(number), tmp_path).value
        assert (type(found), repr(found)) == (type(number), repr(number))


TENSORS = {
    "float64": lambda: numbers(2, 3).double(),
    "bfloat16": lambda: numbers(2, 3).bfloat16(),
    "float8": lambda: numbers(2, 3).to(torch.float8_e4m3fn),
    "bool": lambda: numbers(2, 3) > 0,
    "int16": lambda: torch.arange(-3, 3, dtype=torch.int16),
    "complex": lambda: torch.complex(numbers(3), numbers(3, seed=1)),
    "conjugated": lambda: torch.complex(numbers(3), numbers(3, seed=1)).conj(),
    "NaN": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
    "of no axis": lambda: torch.tensor(2.0),
    "empty": lambda: torch.zeros(0, 3),
    "in columns": lambda: numbers(3, 2).t(),
    "every second": lambda: numbers(9)[::2],
    "expanded": lambda: numbers(1, 3).expand(4, 3),
    "a row of a large one": lambda: numbers(1000, 3)[500],
    "a leaf": lambda: numbers(3).requires_grad_(),
    "a parameter": lambda: nn.Parameter(numbers(3)),
    "with a history": lambda: numbers(3).requires_grad_() * 2,
    "sparse": lambda: torch.tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse(),
    "meta": lambda: torch.empty(2, 3, device="meta"),
}


@pytest.mark.parametrize("way", FILES)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_to_the_last_bit(name, way, tmp_path):
    patch = rl.Set(TENSORS[name]())
    made, given = way(patch, tmp_path).value, patch.value
    assert rl.Set(made) == patch
    assert made.requires_grad == given.requires_grad
    if given.layout is torch.strided:
        assert made.stride() == given.stride()
    if not given.is_meta and given.layout is torch.strided and given.numel():
        assert made.data_ptr() % 16 == given.data_ptr() % 16


def test_one_tensor_in_several_patches_is_written_once_and_shares_its_memory_again():
    vector = numbers(500)
    text = rl.to_json({"a": rl.Add(vector), "b": rl.Scale(vector[100:])})
    assert len(text) < 500 * 4 * 4 / 3 + 600
    made = rl.from_json(text)
    made["a"].vector[100] = 7.0
    assert made["b"].k[0] == 7.0


def test_a_row_of_a_large_tensor_does_not_bring_the_others():
    assert len(rl.to_json(rl.Add(numbers(100_000, 3)[500]))) < 1000


def test_a_large_tensor_in_a_text_begins_where_kernels_like_it():
    assert all(rl.from_json(rl.to_json(rl.Add(numbers(n)))).vector.data_ptr() % 64 == 0 for n in (3, 100, 5000))


# -- mappings ----------------------------------------------------------------------------------------------------------


MAPPINGS = {
    "nothing": lambda prog: {},
    "names": lambda prog: {"relu_1": rl.Zero(), "up": rl.Scale(2.0), 3: rl.Add(1.0), "*norm*": rl.Clamp(max=0.5)},
    "a tensor": lambda prog: {"relu_1": numbers(3, 4)},
    "several for one": lambda prog: {"relu_1": [rl.Scale(2.0), numbers(3, 4), torch.tanh, [rl.Zero("b [c]", c=1)]]},
    "a function": lambda prog: {"relu_1": torch.tanh, "down.weight": F.gelu},
    "an edge": lambda prog: {rl.Edge("relu_1", "sin_1"): rl.Zero(), rl.Edge("linear_2", ["output"]): rl.Scale(2.0)},
    "a tuple for a module": lambda prog: {"pair": (numbers(3, 4), numbers(3, 4, seed=1))},
    "where": lambda prog: {rl.where(torch.relu): rl.Zero()},
    "a selection": lambda prog: {prog.find(op="relu"): rl.Zero("b [c]", c=0)},
    "a layer": lambda prog: {prog["relu_1"]: prog["sin_1"]},
    "an output of a module": lambda prog: {prog["pair[1]"]: clean()["pair[1]"]},
    "programs": lambda prog: {"relu_1": rl.From(clean()), "up": rl.From(clean()), "norm": rl.Mean(of=clean())},
    "inside others": lambda prog: {"relu_1": rl.Rotate(torch.eye(4)[1:], rl.From(clean()["sin_1"])) >> rl.Scale(2.0)},
    "an edge between layers": lambda prog: {rl.Edge(prog["relu_1"], (prog["sin_1"], "cos_1")): rl.Zero()},
    "variants": lambda prog: {"one": {"relu_1": rl.Zero()}, "two": {"relu_1": [rl.Add(1.0)], "up": torch.tanh}},
}
NOT_REPLAYED = ["where", "variants"]


def assert_alike(one, other):
    """Equality to the bit, where `==` of tensors would give a tensor."""
    assert rl.Edit("with_patch", one) == rl.Edit("with_patch", other)


@pytest.mark.parametrize("way", FILES)
@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_comes_back_equal_and_gives_the_same_values(name, way, tmp_path):
    patch = MAPPINGS[name](program())
    made = way(patch, tmp_path, references=[program(), clean()])
    assert_alike(made, patch)
    assert [*map(str, made)] == [*map(str, patch)]
    if name not in NOT_REPLAYED:
        assert torch.equal(program().replay(patch=made).output, program().replay(patch=patch).output)


@pytest.mark.parametrize("way", [as_pickle, as_cloudpickle, as_copy])
@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_is_pickled_and_copied_with_the_programs_that_it_refers_to(name, way, tmp_path):
    patch = MAPPINGS[name](program())
    made = way(patch, tmp_path)
    assert [*map(repr, made)] == [*map(repr, patch)]
    if name not in NOT_REPLAYED:
        assert torch.equal(program().replay(patch=made).output, program().replay(patch=patch).output)


def test_a_cloudpickle_takes_patches_with_lambdas():
    made = pickle.loads(cloudpickle.dumps({"relu_1": rl.Apply(lambda value: value * 3), "up": [lambda v: -v]}))
    given = {"relu_1": lambda value: value * 3, "up": lambda v: -v}
    assert torch.equal(program().replay(patch=made).output, program().replay(patch=given).output)


def test_a_mapping_of_another_class_comes_back_as_a_dict(tmp_path):
    class Patches(dict):
        pass

    for kind in (Patches, MappingProxyType):
        made = as_file(kind({"relu_1": rl.Zero()}), tmp_path)
        assert type(made) is dict
        assert made == {"relu_1": rl.Zero()}


def test_words_and_numbers_of_numpy_are_names_of_layers(tmp_path):
    given = {np.str_("relu_1"): rl.Zero(), np.int64(3): rl.Set(np.float32(0.5))}
    assert as_text(given, tmp_path) == {"relu_1": rl.Zero(), 3: rl.Set(0.5)}


# -- selections --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_selection_comes_back_with_its_layers(way, tmp_path):
    given = program().find(op="linear")[::-1]
    made = way(given, tmp_path, references=program())
    assert isinstance(made, rl.Selection)
    assert made == given
    assert [torch.equal(one.value, other.value) for one, other in zip(made, given, strict=True)] == [True, True]
    assert made | made.program.find(op="relu") == given | program().find(op="relu")


def test_a_selection_of_parameters_comes_back(tmp_path):
    given = program().find(state="*.weight")
    assert as_text(given, tmp_path, references=program()) == given
    assert len(given) == 3


def test_the_selections_and_layers_in_one_pickle_share_one_program():
    relus, layer = program().find(op="relu"), program()["relu_1"]
    one, other, prog = pickle.loads(pickle.dumps((relus, layer, program())))
    assert one.program is other._program is prog


# -- what refers to programs -------------------------------------------------------------------------------------------


def test_a_patch_names_its_program_by_digest_and_model():
    text = rl.to_json({"relu_1": rl.From(clean()), "up": rl.Mean(of=clean())})
    assert json.loads(text)["body"]["programs"] == [{"program": clean().digest, "model": "Net"}]
    assert len(text) < 600


@pytest.mark.parametrize("way", FILES)
def test_a_program_is_found_among_several_and_captured_again_and_loaded(way, tmp_path):
    clean().save(tmp_path / "clean.rlp")
    again, loaded = rl.capture(Net(0), numbers(3, 4, seed=8)), rl.load(tmp_path / "clean.rlp")
    for one in (again, loaded):
        for given in (one, [program(), one], (one,), {clean().digest: one}, {clean().digest: one, "other": program()}):
            assert way(rl.From(clean()), tmp_path, references=given).source is one


@pytest.mark.parametrize("way", FILES)
def test_a_program_that_was_not_given_is_said(way, tmp_path):
    patch = {"relu_1": rl.From(clean()), "up": program()["sin_1"]}
    assert said(rl.UnboundReference, lambda: way(rl.From(clean()), tmp_path)) == (
        "what is read takes values or layers from a program that was not given:\n"
        f"    Net, digest {clean().digest}\n"
        "Give the program, captured again or loaded: references=prog, or a list of several."
    )
    assert said(rl.UnboundReference, lambda: way(patch, tmp_path, references=[])) == (
        "what is read takes values or layers from 2 programs that were not given:\n"
        f"    Net, digest {clean().digest}\n"
        f"    Net, digest {program().digest}\n"
        "Give the program, captured again or loaded: references=prog, or a list of several."
    )


@pytest.mark.parametrize("way", FILES)
def test_another_program_is_not_taken_for_the_one_that_was_saved_unless_the_user_says_so(way, tmp_path):
    other = program(1)
    assert said(rl.UnboundReference, lambda: way(rl.From(clean()), tmp_path, references=other)) == (
        "what is read takes values or layers from a program that was not given:\n"
        f"    Net, digest {clean().digest}\n"
        "given were:\n"
        f"    Net, digest {other.digest}\n"
        "Another input, and other weights, make another digest. If one program is to stand for another, say so: "
        f"references={{'{clean().digest}': prog}}."
    )
    assert way(rl.From(clean()), tmp_path, references={clean().digest: other}).source is other
    relus = way(clean().find(op="relu"), tmp_path, references={clean().digest: other})
    assert relus == other.find(op="relu")
    assert relus.program is other


def test_a_program_that_is_to_stand_for_another_must_have_its_layers(tmp_path):
    other = rl.capture(nn.Linear(4, 4), numbers(3, 4))
    given = {"references": {clean().digest: other}}
    for what, label in ((clean().find(op="relu"), "relu_1_2"), ({clean()["sin_1"]: rl.Zero()}, "sin_1_3")):
        assert said(rl.UnboundReference, lambda what=what: as_file(what, tmp_path, **given)) == (
            f"<Program of Linear: 1 calls, 3 layers> was given for a program that has the layer '{label}', and it has "
            "none.\nGive the program itself, or select again: prog.find(...)."
        )


@pytest.mark.parametrize("given", [3, "prog", ["prog"], {"digest": 3}, "layer"])
def test_references_are_programs(given, tmp_path):
    given = program()["relu_1"] if given == "layer" else given
    for ask in (lambda: rl.from_json(rl.to_json(rl.Zero()), references=given), lambda: rl.load("?", references=given)):
        text = said(TypeError, ask)
        assert text.startswith("references= takes a program, a list of them, or a mapping from digests to them, not ")


# -- functions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", FILES)
def test_a_function_of_the_users_is_found_by_its_name_by_who_trusts_it(way, tmp_path):
    patch = {"relu_1": flipped, "up": rl.Apply(flipped, "b [c]", c=1), rl.where(flipped): rl.Zero()}
    assert_alike(way(patch, tmp_path, trust=["test_interventions_as_files"]), patch)
    assert_alike(way(patch, tmp_path, trust=FLIPPED), patch)
    assert said(rl.Untrusted, lambda: way(patch, tmp_path)) == (
        f"The file calls functions that need your trust: {FLIPPED}.\n"
        'If you know what they do, load it with trust=["test_interventions_as_files"].'
    )


@pytest.mark.parametrize("name", ["os.system", "no_such_module.f", "torch.load", "builtins.eval", "replaylens.capture"])
def test_a_name_in_a_text_imports_and_runs_nothing(name):
    text = rl.to_json({"relu_1": torch.tanh}).replace("torch.tanh", name)
    before = {*sys.modules}
    with pytest.raises(rl.Untrusted):
        rl.from_json(text)
    assert {*sys.modules} == before


# -- edits -------------------------------------------------------------------------------------------------------------

EDITS = {
    "with_patch": lambda prog: prog.with_patch({"relu_1": rl.Zero("b [c]", c=1), "up": numbers(3, 4)}),
    "with_patch from another": lambda prog: prog.with_patch({"relu_1": rl.From(clean()), "norm": clean()["norm"]}),
    "with_patch at an edge": lambda prog: prog.with_patch({rl.Edge("relu_1", "sin_1"): rl.Scale(2.0)}),
    "with_patch of a selection": lambda prog: prog.with_patch({program().find(op="relu"): torch.tanh}),
    "lesion": lambda prog: prog.lesion("relu_1"),
    "lesion of a part": lambda prog: prog.lesion("relu_1", "b [made]", made=[0, 2], on_divergence="ignore"),
    "lesion by a mask": lambda prog: prog.lesion("relu_1", "b [c]", c=torch.tensor([True, False, False, True])),
    "lesion by an array": lambda prog: prog.lesion("relu_1", "b [c]", c=np.array([1, 3])),
    "lesion of a slice": lambda prog: prog.lesion("relu_1", "b [c]", c=slice(np.int64(1), None)),
    "lesion of a Part": lambda prog: prog.lesion("relu_1", rl.Part("b [c]", c=0)),
    "swap": lambda prog: prog.swap("relu", F.gelu),
    "swap without arguments": lambda prog: prog.swap("norm", torch.tanh, with_args=False),
    "insert_after": lambda prog: prog.insert_after("relu_1", torch.tanh),
    "insert_after several": lambda prog: prog.insert_after(program()["relu_1"], torch.tanh, on_divergence="ignore"),
    "expand": lambda prog: prog.expand("layernorm"),
    "bypass": lambda prog: prog.bypass("relu_1"),
    "bypass to": lambda prog: prog.bypass("add_1", to=1),
    "rewire": lambda prog: prog.rewire("add_1", "cos_1", to="relu_1"),
    "rewire several": lambda prog: prog.rewire(["sin_1", "cos_1"], "relu_1", to="linear_1"),
    "set_state": lambda prog: prog.set_state("up.weight", numbers(4, 4)),
    "set_state by a function": lambda prog: prog.set_state("up.weight", torch.tanh),
    "slice": lambda prog: prog.slice("relu_1", {"a": "norm", "b": ("sin_1", "cos_1")}),
    "slice of everything": lambda prog: prog.slice(),
    "several": lambda prog: prog.swap("relu", torch.tanh).lesion("up", "b [c]", c=0).slice(to="norm"),
}


def outputs(prog):
    found = prog.output
    flat = [*found["b"], found["a"]] if isinstance(found, dict) else [found]
    return [tensor.tolist() for tensor in flat]


def test_every_edit_is_among_the_examples():
    assert {edit.method for make in EDITS.values() for edit in make(program()).edits} == {*METHODS}


@pytest.mark.parametrize("name", EDITS)
def test_the_edits_of_a_program_do_the_same_to_another(name):
    make, other = EDITS[name], program(1)
    edits = make(program()).edits
    assert outputs(other.apply(edits)) == outputs(make(other))
    assert other.apply(edits).edits == make(other).edits == edits
    assert other.apply(edits).history == make(other).history


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_prints_as_the_history_shows_it(name):
    made = EDITS[name](program())
    assert ("captured", *map(repr, made.edits)) == made.history


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EDITS)
def test_edits_come_back_equal_and_do_the_same(name, way, tmp_path):
    made = EDITS[name](program())
    edits = way(made.edits, tmp_path, references=[program(), clean()])
    assert outputs(program().apply(edits)) == outputs(made)
    if way in FILES:
        assert edits == made.edits
        assert hash(edits) == hash(made.edits)


def test_edits_are_equal_by_content():
    edit = rl.Edit("with_patch", {"relu_1": numbers(3)})
    assert edit == rl.Edit("with_patch", {"relu_1": numbers(3)})
    assert hash(edit) == hash(rl.Edit("with_patch", {"relu_1": numbers(3)}))
    for other in (
        rl.Edit("with_patch", {"relu_1": numbers(3, seed=1)}),
        rl.Edit("with_patch", {"relu_2": numbers(3)}),
        rl.Edit("with_patch", {"relu_1": [numbers(3)]}),
        rl.Edit("with_patch", {"relu_1": 1.0}),
        rl.Edit("with_patch", {"relu_1": numbers(3)}, on_divergence="ignore"),
        rl.Edit("lesion", {"relu_1": numbers(3)}),
        rl.Edit("lesion", np.zeros(3)),
    ):
        assert edit != other
    assert rl.Edit("lesion", "a", c=np.arange(3)) == rl.Edit("lesion", "a", c=np.arange(3))
    assert rl.Edit("lesion", "a", c=np.arange(3)) != rl.Edit("lesion", "a", c=np.arange(3.0))
    assert rl.Edit("lesion", "a", c=1) != rl.Edit("lesion", "a", c=True)


def test_an_edit_is_what_it_was_whatever_becomes_of_the_mapping():
    patch = {"relu_1": [rl.Zero()]}
    made = program().with_patch(patch)
    patch["relu_1"].append(rl.Add(1.0))
    patch["up"] = rl.Zero()
    assert made.edits == (rl.Edit("with_patch", {"relu_1": [rl.Zero()]}),)


def test_one_edit_is_applied_by_itself_and_a_list_in_order(tmp_path):
    swap, lesion = program().swap("relu", torch.tanh).lesion("up").edits
    assert outputs(swap(program())) == outputs(program().apply(swap)) == outputs(program().swap("relu", torch.tanh))
    assert program().apply([lesion, swap]).edits == (lesion, swap)
    assert program().apply([]).edits == ()
    for way in FILES:
        assert way(swap, tmp_path) == swap
        assert way([lesion, swap], tmp_path) == [lesion, swap]
        assert way((), tmp_path) == ()
    assert said(TypeError, lambda: program().apply(["swap"])) == (
        "apply takes edits, as `prog.edits` has them, not 'swap'."
    )
    assert said(rl.BadEdit, lambda: rl.Edit("save", "x.rlp")) == (
        "'save' is no edit of a program. The edits: with_patch, lesion, swap, insert_after, expand, bypass, rewire, "
        "set_state, slice."
    )


def test_edits_are_kept_by_what_is_made_of_a_program():
    made = program().lesion("relu_1")
    kept = (rl.Edit("lesion", "relu_1"),)
    assert program().edits == ()
    for other in (made.saving("none"), made.to(torch.float64), copy.deepcopy(made), made.refresh(), made.backward()):
        assert other.edits == kept


def test_a_loaded_program_has_its_edits_as_text_and_says_so(tmp_path):
    made = program().lesion("relu_1").swap("relu_2", lambda value: value)
    text = (
        "the program was loaded from a file, which has its {} edits as text, `prog.history`, and not what they were "
        "given.\nSave the edits as well: replaylens.save(prog.edits, 'edits.rlp')."
    )
    for loaded in (as_file(made, tmp_path), pickle.loads(pickle.dumps(made))):
        assert loaded.history == made.history
        assert said(rl.NotSaved, lambda loaded=loaded: loaded.edits) == text.format(2)
        assert said(rl.NotSaved, lambda loaded=loaded: loaded.lesion("up").edits) == text.format(3)
    assert as_file(program(), tmp_path).edits == ()


# -- refusals ----------------------------------------------------------------------------------------------------------


class Flip(rl.Patch):
    pass


class Steered(torch.Tensor):
    pass


def local():
    def inner(value):
        return value

    return inner


NAME_IT = "Define the function in a module, with `def`, and give that one: a file holds its name."
IN_GENERAL = "A file holds patches, tensors, numbers, names of layers and of functions, and lists of these."
PLAIN = "Give a plain one: `tensor.as_subclass(torch.Tensor)`, or its numbers."
REFUSED = {
    "a lambda": (
        lambda: {"up": rl.Zero(), "relu_1": lambda value: value},
        f"the patch at 'relu_1' runs a lambda, which cannot be found again by a name.\n{NAME_IT}",
    ),
    "a local function": (
        lambda: {"relu_1": [rl.Zero(), local()]},
        f"the patch at 'relu_1' runs `inner`, which cannot be found again by a name.\n{NAME_IT}",
    ),
    "a lambda in a patch": (
        lambda: rl.Zero() >> rl.Apply(lambda value: value),
        f"the patch Zero() >> Apply(<lambda>) runs a lambda, which cannot be found again by a name.\n{NAME_IT}",
    ),
    "a partial": (
        lambda: {"relu_1": functools.partial(torch.clamp, max=1)},
        f"the patch at 'relu_1' runs a partial, which cannot be found again by a name.\n{NAME_IT}",
    ),
    "a predicate": (
        lambda: {rl.where(lambda layer: True): rl.Zero()},
        f"the patch at where(<lambda>) runs a lambda, which cannot be found again by a name.\n{NAME_IT}",
    ),
    "a lambda in an edit": (
        lambda: program().swap("relu", lambda value: value).edits,
        f"the edit swap('relu', lambda) runs a lambda, which cannot be found again by a name.\n{NAME_IT}",
    ),
    "a lambda in a patch of an edit": (
        lambda: program().with_patch({"relu_1": lambda value: value}).edits,
        "the edit with_patch(<dict>), at 'relu_1', runs a lambda, which cannot be found again by a name.\n" + NAME_IT,
    ),
    "a module": (
        lambda: program().swap("relu", nn.GELU()).edits,
        "the edit swap('relu', GELU) holds a GELU, a module, and a file holds functions by their names.\n"
        "Give a function, or keep the edited program: prog.save(path).",
    ),
    "a run": (
        lambda: {"relu_1": rl.From(program().replay())},
        "the patch at 'relu_1' takes its values from a run, which has no digest to be found again by.\n"
        "Give its value, `run['relu_1']`; or the program with these patches, `prog.with_patch(...)`.",
    ),
    "a program that cannot be saved": (
        lambda: {"relu_1": rl.From(clean().with_patch({"up": lambda value: value}))},
        "the patch at 'relu_1' refers to <Program of Net: 9 calls, 11 layers>, of which a file cannot be sure: "
        "linear_1_1 is given a lambda, which cannot be found again by a name.",
    ),
    "another class of patches": (
        lambda: {"relu_1": Flip()},
        "the patch at 'relu_1' is a Flip, a class that files do not know.\nThey know Set, Zero, Mean, From, Resample, "
        "Add, Scale, Noise, Clamp, Project, Rotate, Apply, Chain.",
    ),
    "another class of tensors": (
        lambda: rl.Set(numbers(3).as_subclass(Steered)),
        f"the patch Set(<tensor (3,)>) holds a Steered, and a file holds plain tensors.\n{PLAIN}",
    ),
    "a nested tensor": (
        lambda: {"relu_1": torch.nested.nested_tensor([numbers(3)], layout=torch.jagged)},
        f"the patch at 'relu_1' holds a NestedTensor, and a file holds plain tensors.\n{PLAIN}",
    ),
    "a text": (
        lambda: {"relu_1": "zero"},
        "the patch at 'relu_1' is 'zero', which is no patch.\nGive a patch, such as",
    ),
    "a key that names nothing": (
        lambda: {("a", "b"): rl.Zero()},
        f"the patch at ('a', 'b') has a tuple for a key, which names no layer.\n{IN_GENERAL}",
    ),
    "an edge of other things": (
        lambda: {rl.Edge(None, "relu_1"): rl.Zero()},
        f"the patch at Edge(None, 'relu_1') is for Edge(None, 'relu_1'), whose ends are no names of layers.\n{IN_GENERAL}",
    ),
    "a set": (
        lambda: rl.Edit("rewire", {"sin_1"}, "relu_1", to="up"),
        f"the edit rewire({{'sin_1'}}, 'relu_1', to='up') holds a set, for which a file has no form.\n{IN_GENERAL}",
    ),
    "an array of objects": (
        lambda: rl.Edit("lesion", "relu_1", "b [c]", c=np.array([None])),
        "the edit lesion('relu_1', 'b [c]', c=array([None], dtype=object)) holds a ndarray of object, for which a file "
        f"has no form.\n{IN_GENERAL}",
    ),
    "an index beyond all": (
        lambda: rl.Zero("b [c]", c=slice(0, 2**62)),
        "the patch Zero('b [c]', c=slice(0, 4611686018427387904)) counts up to more than 2 ** 62: "
        '"b [c]", c=slice(0, 4611686018427387904).\nNo tensor has so many numbers.',
    ),
    "a number beyond all": (lambda: rl.Set(2**300), "a number has 301 bits; a file holds up to 256."),
    "patches in a list": (
        lambda: [rl.Zero(), rl.Add(1.0)],
        "a list is saved if it holds edits, and this one holds a Zero.\n"
        "Patches one after another are one patch: rl.Zero() >> rl.Add(1.0).",
    ),
    "patches nested too deep": (
        lambda: functools.reduce(lambda inner, _: rl.Rotate(torch.eye(2), inner), range(2000), rl.Zero()),
        "a patch is nested deeper than Python's stack is. Nest less.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_with_its_place_and_a_cure(name, tmp_path):
    make, text = REFUSED[name]
    what = make()
    rl.save(rl.Zero(), tmp_path / "old.rlp")
    for ask in (
        lambda: rl.to_json(what),
        lambda: rl.save(what, tmp_path / "old.rlp"),
        lambda: rl.to_json(what, tensors=tmp_path / "old.rlp"),
    ):
        assert said(rl.CannotSave, ask).startswith(text)
    assert rl.load(tmp_path / "old.rlp") == rl.Zero()


def test_what_is_no_object_of_replaylens_is_refused():
    for what in (torch.ones(2), 3, "zero", print):
        assert said(rl.CannotSave, lambda what=what: rl.to_json(what)).startswith(
            f"a {type(what).__name__} cannot be saved or pickled. What can: "
        )


def test_a_tensor_under_a_transform_is_refused():
    texts = []

    def inside(value):
        texts.append(said(rl.CannotSave, lambda: rl.to_json({"relu_1": value})))
        return value

    torch.func.vmap(inside)(numbers(2, 3))
    assert texts == ["relu_1 is inside a transform of torch.func. Save outside of it."]


# -- texts and files that are not what was written ---------------------------------------------------------------------


def test_a_text_is_ascii_on_one_line_and_says_what_it_is():
    text = rl.to_json({"ümlaut\n": rl.Zero()})
    assert text.isascii()
    assert "\n" not in text
    assert rl.from_json(text) == {"ümlaut\n": rl.Zero()}
    given = json.loads(text)
    assert (given["format"], given["version"], given["kind"]) == ("replaylens", 1, "patches")


def test_a_text_can_be_written_by_hand():
    text = """{"format": "replaylens", "version": 1, "kind": "patches", "made": {}, "tables": {},
               "body": {"programs": [], "is": [["relu_1", ["Zero", {"part": ["part", "b [c]", [["c", [1]]], []]}]]]}}"""
    assert rl.from_json(text) == {"relu_1": rl.Zero("b [c]", c=[1])}


def test_any_object_that_a_file_holds_may_be_a_text(tmp_path):
    back = as_text(program(), tmp_path)
    assert torch.equal(back.replay().output, program().output)
    assert back.digest == program().digest


@pytest.mark.parametrize("what", [b"{}", None, Path("x.json")])
def test_from_json_takes_a_text(what):
    assert said(TypeError, lambda: rl.from_json(what)) == (
        f"from_json takes the text that to_json gave, not {what!r}. A file is read by load."
    )


def test_the_tensors_of_a_text_are_those_of_its_file(tmp_path):
    path, other = tmp_path / "steer.rlp", tmp_path / "other.rlp"
    patch = {"relu_1": rl.Add(numbers(300))}
    text = rl.to_json(patch, tensors=path)
    assert len(text) < 500
    assert_alike(rl.load(path), patch)
    assert said(rl.UnboundReference, lambda: rl.from_json(text)) == (
        "its tensors are in another file, 'steer.rlp'. Say where: tensors='steer.rlp'."
    )
    rl.save({"relu_1": rl.Add(numbers(300, seed=1))}, other)
    digests = [json.loads(rl.to_json(given, tensors=tmp_path / "x.rlp"))["tensors"]["digest"] for given in
               ({"relu_1": rl.Add(numbers(300, seed=1))}, patch)]  # fmt: skip
    assert said(rl.BadFile, lambda: rl.from_json(text, tensors=other)) == (
        f"{other} is another file than the text was written with: its digest is {digests[0]}, and the text names "
        f"{digests[1]}."
    )
    assert said(rl.ReplaylensError, lambda: rl.from_json(rl.to_json(patch), tensors=path)) == (
        "the text names no file of tensors, as it holds them itself. Leave tensors= out."
    )
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    assert "is damaged: the bytes of 'relu_1.vector' are not those that were written" in said(
        rl.BadFile, lambda: rl.from_json(text, tensors=path)
    )


def test_a_file_shows_its_tensors_under_the_names_of_their_layers(tmp_path):
    given = {"relu_1": rl.Add(numbers(3)) >> rl.Clamp(max=numbers(3, seed=1)), "up": [numbers(2)]}
    rl.save(given, tmp_path / "what.rlp")
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(tmp_path / "what.rlp", "pt") as file:
        names = [name for name in file.keys() if not name.startswith("_pad/")]  # noqa: SIM118 - it is no mapping
        assert sorted(names) == ["relu_1.patches.0.vector", "relu_1.patches.1.max", "up.0"]
        assert torch.equal(file.get_tensor("up.0"), numbers(2))


def altered(path, value):
    """A text of a patch with something else at a path."""

    def make():
        said = json.loads(rl.to_json({"relu_1": rl.Add(numbers(2), "b [c]", c=[0, 1]), "up": rl.From(clean())}))
        at = said
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        return json.dumps(said)

    return make


FIRST = ("body", "is", 0, 1)
BAD = {
    "no JSON": (lambda: "{", "holds a text that is no JSON of replaylens: Expecting property name"),
    "a list": (lambda: "[]", "[] is no mapping"),
    "another format": (altered(["format"], "x"), "it does not say that it is a text of replaylens"),
    "no version": (altered(["version"], "1"), "it does not say that it is a text of replaylens"),
    "more parts": (altered(["more"], 1), "it lacks a part, or has others"),
    "another kind": (altered(["kind"], "x"), "it holds a 'x', which this version of replaylens does not know"),
    "a kind that it is not": (altered(["kind"], "selection"), "the selection is none"),
    "other tables": (altered(["tables"], {"x": []}), "the tables of the file are not those of this version"),
    "other tensors": (altered(["tensors"], {"file": "x"}), "it does not say where its tensors are"),
    "half a byte": (altered(["tensors", "blocks", 0], "AB=="), "a tensor ends in the middle of a byte"),
    "no base64": (altered(["tensors", "blocks", 0], "?"), "Error: "),
    "too few bytes": (altered(["tensors", "blocks", 0], "AAAA"), "a tensor is said to reach beyond its memory"),
    "another body": (altered(["body"], []), "[] is no mapping"),
    "no digest": (
        altered(["body", "programs", 0, "program"], "x"),
        "a program is named by something that is no digest",
    ),
    "an unknown word": (altered([*FIRST, 0], "Kill"), "'Kill' is no word of an intervention"),
    "a word of programs": (altered(FIRST, ["graph", {}]), "'graph' is no word of an intervention"),
    "a field too many": (altered([*FIRST, 1, "x"], 1), "an Add has no 'x'"),
    "a field too few": (altered([*FIRST, 1], {}), "BadPatch: Add takes a tensor or a number, not None."),
    "a part that is none": (altered([*FIRST, 1, "part"], 3), "the part of an Add is none"),
    "a part of nothing": (altered([*FIRST, 1, "part", 1], "b ["), "BadPart: "),
    "an axis that is none": (altered([*FIRST, 1, "part", 2, 0, 0], "x"), "BadPart: the pattern"),
    "no program": (altered(["body", "is", 1, 1, 1, "source"], ["program", 1]), "1 is no program that is named"),
    "a key twice": (altered(["body", "is", 1, 0], "relu_1"), "there are two patches for 'relu_1'"),
    "a key that is none": (altered(["body", "is", 1, 0], None), "None is no name of a layer"),
    "an edge of nothing": (altered(["body", "is", 1, 0], ["edge", "a", None]), "the end of an edge is no name"),
    "an unlawful Resample": (altered(FIRST, ["Resample", {"seed": 0, "permutation": ["tuple", 0, 0]}]), "BadPatch: "),
    "an order of words": (altered(FIRST, ["Resample", {"seed": 0, "permutation": ["tuple", "a"]}]), "an order of rows"),
    "a seed that is none": (altered(FIRST, ["Resample", {"seed": "0"}]), "a seed is no number"),
    "a Noise below zero": (altered(FIRST, ["Noise", {"std": -1, "seed": 0}]), "BadPatch: Noise of a deviation below"),
    "a Clamp of nothing": (altered(FIRST, ["Clamp", {}]), "BadPatch: Clamp without a bound"),
    "a Mean over nothing": (altered(FIRST, ["Mean", {"over": ["tuple"]}]), "BadPatch: Mean over no axis"),
    "a Mean over floats": (altered(FIRST, ["Mean", {"over": ["tuple", 0.5]}]), "no axes"),
    "a Project of a number": (altered(FIRST, ["Project", {"direction": 3, "off": True}]), "a direction or a basis"),
    "a Project along nothing": (
        altered(
            FIRST, ["Project", {"direction": ["tensor", [0, 0, 0, "float32", [2], [1]]], "off": True, "along": "c"}]
        ),
        "a direction lies along no axis",
    ),
    "a Rotate of a vector": (
        altered(FIRST, ["Rotate", {"basis": ["tensor", [0, 0, 0, "float32", [2], [1]]], "then": ["Zero", {}]}]),
        "a direction or a basis",
    ),
    "a Chain of numbers": (altered(FIRST, ["Chain", {"patches": ["tuple", 1]}]), "a chain is none of patches"),
    "an Apply of a tensor": (altered(FIRST, ["Apply", {"fn": 3}]), "BadPatch: Apply takes a function"),
    "a function that is none": (altered(FIRST, ["function", 0]), "0 is no row of the functions"),
    "an array that is none": (
        altered(FIRST, ["array", [0, 0, 0, "float32", [100000, 100000], [0, 0]]]),
        "an array is said to be no array",
    ),
    "a mapping": (altered(FIRST, {}), "a mapping stands where a value should"),
    "nested too deep": (
        lambda: rl.to_json({"a": [1]}).replace('["list", 1]', '["list", ' * 5000 + "1" + "]" * 5000),
        "RecursionError",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_text_that_nobody_wrote_is_a_bad_file(name):
    make, fact = BAD[name]
    text = said(rl.BadFile, lambda: rl.from_json(make(), references=clean()))
    assert text.startswith("what was given")
    assert fact in text or fact == "RecursionError"


def test_a_newer_text_says_who_reads_it():
    assert said(rl.BadFile, altered_version) == (
        "what was given has version 2 of the format; this replaylens reads up to 1.\n"
        "A newer replaylens reads it: pip install -U replaylens"
    )


def altered_version():
    rl.from_json(altered(["version"], 2)())


def test_an_edit_that_is_none_is_a_bad_file():
    text = rl.to_json(rl.Edit("lesion", "relu_1")).replace("lesion", "save")
    assert "BadEdit: 'save' is no edit of a program" in said(rl.BadFile, lambda: rl.from_json(text))


RICH = {
    "patches": lambda: {
        "relu_1": rl.Set(numbers(2, 3), "b [c] (h [w])", c=[0, 2], w=slice(0, 4, 2), h=2) >> rl.Clamp(max=float("inf")),
        3: [rl.Noise(0.5, seed=1), torch.tanh, rl.Rotate(torch.eye(3)[:2], rl.From(clean()["pair[0]"]))],
        rl.Edge("relu_1", ("sin_1", "cos_1")): rl.Project(numbers(3), along="c", part="b [c]", c=0),
        clean().find(op="relu"): rl.Mean("b c", "b [c]", of=clean(), c=1),
        clean()["sin_1"]: (numbers(2).double(), torch.tensor([True])),
        rl.where(torch.relu): rl.Resample([1, 0, 2]),
    },
    "edits": lambda: (
        program()
        .with_patch({"relu_1": rl.Zero("b [c]", c=1), clean()["up"]: clean()})
        .swap("relu", F.gelu)
        .lesion("up", "b [c]", c=np.array([1, 3]))
        .set_state("down.bias", numbers(3))
        .edits
    ),
}
OTHERS = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**62,
    1e308,
    "",
    "x",
    "relu_1",
    "tensor",
    "program",
    "Zero",
    "float32",
    [],
    {},
    [[]],
]


def mutant(said, chance):
    """The text with one to three places altered: replaced, removed, doubled, or swapped for another part of it."""
    for _ in range(chance.randint(1, 3)):
        places = [*branches(said)]
        at, key = chance.choice(places)
        at_other, key_other = chance.choice(places)
        kind = chance.randrange(4)
        if kind == 0:
            at[key] = chance.choice(OTHERS)
        elif kind == 1:
            del at[key]
        elif kind == 2:
            at[key] = copy.deepcopy(at_other[key_other])
        elif isinstance(at, list):
            at.insert(key, copy.deepcopy(at[key]))
    return said


def branches(tree):
    pairs = [*tree.items()] if isinstance(tree, dict) else [*enumerate(tree)]
    for key, item in pairs:
        yield tree, key
        if isinstance(item, (dict, list)):
            yield from branches(item)


@pytest.mark.parametrize("name", RICH)
def test_an_altered_text_is_another_lawful_one_or_refused(name):
    text = rl.to_json(RICH[name]())
    chance, references, loaded = random.Random(5), [clean(), program()], 0
    assert_alike(rl.from_json(text, references=references), RICH[name]())
    for _ in range(400):
        altered = json.dumps(mutant(json.loads(text), chance))
        try:
            made = rl.from_json(altered, references=references)
        except (rl.BadFile, rl.Untrusted, rl.UnboundReference):
            continue
        loaded += 1
        repr(made), str(made)
        if isinstance(made, (dict, tuple, Patch, rl.Selection)):
            assert_alike(rl.from_json(rl.to_json(made), references=references), made)
    assert 10 < loaded < 200


@pytest.mark.parametrize("name", RICH)
def test_a_text_with_other_characters_is_refused_or_lawful(name):
    text, chance = rl.to_json(RICH[name]()), random.Random(6)
    for _ in range(150):
        at = chance.randrange(len(text))
        cut = text[:at] if chance.random() < 0.2 else text[:at] + chance.choice('0[]{}",:\\Zx\n\x00é') + text[at + 1 :]
        try:
            repr(rl.from_json(cut, references=[clean(), program()]))
        except (rl.BadFile, rl.Untrusted, rl.UnboundReference):
            continue


def test_a_text_takes_no_more_memory_than_what_is_in_it():
    """Shapes that a few bytes are said to have are not gone through."""
    row = '["tensor", [0, 0, 0, "float32", [1000000, 1000000], [0, 0]]]'
    zeros = b64encode(bytes(4)).decode()
    for body in (
        f'["Project", {{"direction": {row}, "off": true}}]',
        f'["Rotate", {{"basis": {row}, "then": ["Zero", {{}}]}}]',
        f'["Set", {{"value": {row}}}]',
    ):
        made = rl.from_json(
            f'{{"format": "replaylens", "version": 1, "kind": "patch", "made": {{}}, "tables": {{}}, "body": '
            f'{{"programs": [], "is": {body}}}, "tensors": {{"blocks": ["{zeros}"]}}}}'
        )
        assert "1000000" in repr(made)


# -- what was written once ----------------------------------------------------------------------------------------------


def first_version():
    """What tests/golden/interventions_1.json holds: it was written by version 1 of the format, and is read for ever."""
    some, part = torch.arange(4.0), rl.Part("b ([c] d)", c=[0, 1], d=2)
    patches = {
        "linear_1": [rl.Set(some), rl.Set(float("inf"), part), rl.Zero(part), some, torch.tanh],
        "relu": rl.Mean((0,)) >> rl.Mean("b d", part, of=some) >> rl.From(some) >> rl.From(clean(), part),
        3: [rl.Resample(seed=2), rl.Resample([1, 0], part), rl.Noise(0.5, seed=1), rl.Noise(some, part)],
        rl.Edge("relu_1", ("sin_1", "cos_1")): [
            rl.Add(1 + 2j),
            rl.Scale(some, part),
            rl.Clamp(-1, max=some, part=part),
        ],
        clean().find(op="linear"): [rl.Project(some, along=-1, off=True), rl.Project(some, part, along="d")],
        clean()["pair[1]"]: rl.Rotate(torch.eye(2), rl.Apply(torch.tanh), "[b] c", b=slice(None, -1)),
        rl.where(torch.relu): (some.double(), [some > 1, some.requires_grad_()]),
        "a program": clean(),
    }
    edits = (
        rl.Edit("with_patch", {"relu_1": rl.Zero()}, on_divergence="ignore"),
        rl.Edit("lesion", "relu_1", "b [c]", c=np.arange(2)),
        rl.Edit("swap", clean()["relu_1"], F.gelu, with_args=False),
        rl.Edit("slice", from_=["relu_1"], to={"a": "up", "b": None}),
    )
    return {"patches": patches, "selection": clean().find(state="*.bias"), "edits": edits}


GOLDEN = Path(__file__).parent / "golden" / "interventions_1.json"


@pytest.mark.parametrize("name", ["patches", "selection", "edits"])
def test_a_text_of_the_first_version_is_read(name):
    text, wanted = json.dumps(json.loads(GOLDEN.read_text())[name]), first_version()[name]
    [*digests] = {one["program"] for one in json.loads(text)["body"]["programs"]}
    made = rl.from_json(text, references=dict.fromkeys(digests, clean()))
    if isinstance(wanted, tuple):
        assert made == wanted
    assert_alike(made, wanted)


# -- another process ---------------------------------------------------------------------------------------------------


def test_a_fresh_process_reads_what_this_one_wrote(tmp_path):
    patch = {"relu_1": rl.From(clean(), "b [c]", c=[0, 2]) >> rl.Scale(2.0), "up": rl.Add(numbers(4))}
    edited = program().swap("relu", F.gelu).set_state("down.bias", numbers(3))
    (tmp_path / "patch.json").write_text(rl.to_json(patch, tensors=tmp_path / "steer.rlp"))
    rl.save(edited.edits, tmp_path / "edits.rlp")
    rl.save(program().find(op="relu"), tmp_path / "relus.rlp")
    (tmp_path / "patch.pickle").write_bytes(pickle.dumps(patch))
    program().save(tmp_path / "prog.rlp")
    clean().save(tmp_path / "clean.rlp")
    code = f"""
import os, pickle, replaylens as rl
os.chdir({str(tmp_path)!r})
prog, clean = rl.load("prog.rlp"), rl.load("clean.rlp")
patch = rl.from_json(open("patch.json").read(), tensors="steer.rlp", references=clean)
print(prog.replay(patch=patch).output.tolist())
print(prog.replay(patch=pickle.load(open("patch.pickle", "rb"))).output.tolist())
print(prog.apply(rl.load("edits.rlp")).output.tolist())
print([layer.value.tolist() for layer in rl.load("relus.rlp", references=prog)])
"""
    made = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    wanted = program().replay(patch=patch).output.tolist()
    relus = [layer.value.tolist() for layer in program().find(op="relu")]
    assert made.stdout.splitlines() == [*map(str, [wanted, wanted, edited.output.tolist(), relus])]


def test_a_mapping_of_programs_is_not_taken_for_patches(tmp_path):
    with pytest.raises(rl.CannotSave) as caught:
        rl.save({"clean": clean()}, tmp_path / "study.rlp")
    assert str(caught.value) == (
        "the patch at 'clean' is a program, which a mapping of patches would only name.\n"
        "Save programs one by one, `prog.save(path)`; if you mean a patch, write rl.From(prog)."
    )
    assert not [*tmp_path.iterdir()]
