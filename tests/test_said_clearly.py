"""What users give that cannot be, and what they copy: an error of ours that says what is wrong, or a copy that works."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from oracle import assert_same
from torch import nn

import replaylens as rl


def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def captured():
    torch.manual_seed(0)
    return rl.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x())


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copied_run_has_an_output_of_its_own():
    run = captured().replay(patch={"linear_1": rl.Scale(2.0)}, grad=True)
    other = copy.deepcopy(run)
    assert_same(other.output, run.output)
    assert other.output is not run.output
    assert other.output.grad_fn is not None
    assert_same(other["linear_1"], run["linear_1"])
    kept = run.output.detach().clone()
    other.output.detach().zero_()
    assert torch.equal(run.output, kept)


def test_a_copied_layer_is_one_of_a_copied_program():
    layer = captured()["relu_1"]
    other = copy.deepcopy(layer)
    assert other.label == layer.label
    assert_same(other.value, layer.value)
    other.value.zero_()
    assert layer.value.any()


def test_a_copied_sweep_has_the_same_values():
    sweep = rl.sweep(captured(), ["relu_1"], "b [u]", rl.Zero(), metric=torch.sum)
    assert_same(copy.deepcopy(sweep).values, sweep.values)


def test_the_state_of_a_program_can_be_copied_and_saved():
    prog, file = captured(), io.BytesIO()
    torch.save(prog.state, file)
    file.seek(0)
    for other in (copy.deepcopy(prog.state), pickle.loads(pickle.dumps(prog.state)), torch.load(file)):
        assert {**other}.keys() == {**prog.state}.keys()
        assert all(torch.equal(other[name], prog.state[name]) for name in prog.state)
        assert_same(prog.replay(state=other).output, prog.output)
    with pytest.raises(TypeError):
        prog.state["0.weight"] = torch.zeros(4, 4)


# -- the address of the model itself -----------------------------------------------------------------------------------


ASKED = {
    "layer": lambda prog: prog[""],
    "patch": lambda prog: prog.replay(patch={"": rl.Zero()}),
    "keep": lambda prog: prog.replay(keep=[""]),
    "from": lambda prog: prog.replay(from_="", patch=x()),
    "live": lambda prog: rl.run(nn.Linear(4, 4), x(), patch={"": rl.Zero()}),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_the_address_of_the_model_itself_is_no_layer_and_its_outputs_are_named(ask):
    with pytest.raises(rl.NoSuchLayer, match=r"^'' is the model itself, not a layer\. Its outputs: 'output_1_"):
        ask(captured())


# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric",
    [lambda y: y.detach().numpy().sum(), lambda y: np.int64(3), lambda y: np.bool_(True), lambda y: np.array(2)],
)
def test_numbers_of_numpy_are_numbers_to_a_sweep(metric):
    sweep = rl.sweep(captured(), variants={"a": {"relu_1": rl.Scale(1.0)}}, metric=metric)
    assert sweep["a"].item() == pytest.approx(float(metric(captured().output)))


@pytest.mark.parametrize("what", [None, "a word"])
def test_what_is_no_number_is_a_bad_metric(what):
    with pytest.raises(rl.BadMetric, match="a metric must give tensors or numbers, not"):
        rl.sweep(captured(), variants={"a": {"relu_1": rl.Scale(1.0)}}, metric=lambda y: what)


# -- patches -----------------------------------------------------------------------------------------------------------


GIVEN = {
    "sparse": (lambda t: t.to_sparse(), "of the layout torch.sparse_coo; what uses it was recorded with a dense one"),
    "compressed": (lambda t: t.to_sparse_csr(), "of the layout torch.sparse_csr"),
    "meta": (lambda t: t.to("meta"), "on meta; what uses it was recorded on cpu"),
}
WAYS = {
    "replay": lambda patch: captured().replay(patch=patch),
    "edit": lambda patch: captured().with_patch(patch),
    "run": lambda patch: rl.run(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x(), patch=patch),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("make", "fact"), GIVEN.values(), ids=GIVEN)
def test_a_patch_that_nothing_can_read_is_refused_where_it_is(way, make, fact):
    for patch in (make(x()), lambda value: make(value.detach())):
        with pytest.raises(rl.ShapeMismatch, match=fact):
            way({"linear_1": patch})


def test_a_dense_tensor_may_stand_in_the_place_of_a_sparse_one():
    prog = rl.capture(lambda x: torch.sparse.mm(x.to_sparse(), x.t()), x())
    assert_same(prog.replay(patch={"tosparse_1": x() * 2}).output, (x() * 2) @ x().t())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_direction_that_is_no_direction_is_a_bad_patch(number):
    with pytest.raises(rl.BadPatch, match="holds NaN or infinite numbers"):
        rl.Project(torch.full((4,), number))


def test_a_function_that_is_given_too_few_tensors_says_so():
    with pytest.raises(rl.InputMismatch, match="the function takes 1 tensors, and was given 0"):
        captured().function()()


def test_a_mask_of_another_length_is_called_a_mask():
    with pytest.raises(rl.BadPart, match="axis 1 is 4, not 2: a mask of 2 for c does not fit"):
        captured().replay(patch={"linear_1": rl.Zero("b [c]", c=torch.tensor([True, False]))})
    with pytest.raises(rl.BadPart, match="axis 1 is 4, which a mask of 3 for h does not divide"):
        captured().replay(patch={"linear_1": rl.Zero("b ([h] d)", h=torch.tensor([True, False, True]))})
