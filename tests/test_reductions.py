"""What is kept of a layer: einops reductions, a projection that is the same everywhere, functions, and dtypes."""

import hashlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import einops
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from internals import SRP, PerLayer, Reduction, function_text, require_fit, steps_of, torch_dtype
from torch import nn

from replaylens.errors import BadPart, NoSuchLayer


def reduced(value, reduce, dtype=None):
    return Reduction("layer", steps_of(reduce), torch_dtype(dtype))(value)


X = torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(0))

PATTERNS = [
    "b c h w -> b c",
    "b c h w -> b h",
    "b c h w -> b w c",
    "b c h w -> b (c h) w",
    "b c h w -> b (h c)",
    "b c h w -> b c 1 1",
    "b ... w -> b w",
    "b ... -> b",
    "b c ... -> b c",
    "b c ... -> b ... c",
    "b c h w -> b c h w",
    "b c h w -> b (c h w)",
]


@pytest.mark.parametrize("how", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_those_of_einops(pattern, how):
    assert torch.allclose(reduced(X, f"{pattern} : {how}"), einops.reduce(X, pattern, how), atol=1e-6)


@st.composite
def patterns(draw):
    names = draw(st.permutations("cdefg"))[: draw(st.integers(0, 4))]
    kept = draw(st.permutations(names))[: draw(st.integers(0, len(names)))]
    cut = draw(st.integers(0, len(kept)))
    right = [*kept[:cut], *([f"({' '.join(kept[cut:])})"] if len(kept) - cut > 1 else kept[cut:])]
    shape = [draw(st.integers(1, 3)) for _ in range(len(names) + 1)]
    return f"b {' '.join(names)} -> b {' '.join(right)}", shape


@settings(max_examples=80, deadline=None)
@given(patterns(), st.sampled_from(["mean", "sum", "max", "min"]))
def test_any_pattern_is_that_of_einops(drawn, how):
    pattern, shape = drawn
    value = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(pattern)))
    assert torch.allclose(reduced(value, f"{pattern} : {how}"), einops.reduce(value, pattern, how))


def test_the_mean_is_what_is_taken_where_nothing_is_said():
    assert torch.equal(reduced(X, "b c h w -> b c"), X.mean((2, 3)))
    assert torch.equal(reduced(X, "b c h w->b c:last"), X[:, :, -1, -1])
    assert torch.equal(reduced(X, "b c h w -> b w : first"), X[:, 0, 0])


def test_axes_of_patterns_name_those_of_the_array():
    def axes(pattern, count):
        return Reduction("layer", steps_of(pattern)).axes(count)

    assert axes("b c h w -> b (c h) w", 2) == ("c_h", "w")
    assert axes("b c h w -> b c 1 1", 3) == ("c", None, None)
    assert axes("b c time w -> b c time", 2) == ("c", None)  # `time` is that of passes
    assert axes("b c ... -> b c ...", 3) == (None, None, None)
    assert axes(None, 2) == (None, None)
    assert axes(["b c h w -> b c", SRP(4)], 1) == (None,)


BAD_PATTERNS = {
    "b c h w": r"is not a pattern. Write it as in einops",
    "pca": "is not a pattern. The axes of a PCA are known once all rows are",
    "b c h w -> b c : median": "reduces by 'median', which is none of mean, sum, max, min, first, last",
    "b (c h) w -> b c": "the left side packs axes",
    "b c h w -> b d": "the axis d is on the right side alone",
    "b c -> b ...": "`...` is on the right side alone",
    "b c h w -> c": "the first axis is not kept",
    "b c h w -> c b": "the first axis is not kept",
    "b c h w -> (b c)": "the first axis is not kept",
    "... c -> ... c": "the first axis is not kept",
    " -> ": "the first axis is not kept",
    "b c c -> b c": "the axis c occurs twice",
    "b [c] -> b": "brackets address parts",
}


@pytest.mark.parametrize("pattern", BAD_PATTERNS)
def test_what_is_no_pattern_is_told(pattern):
    with pytest.raises(BadPart, match=BAD_PATTERNS[pattern]):
        steps_of(pattern)


def test_a_pattern_that_does_not_fit_names_the_layer_and_its_shape():
    with pytest.raises(BadPart) as caught:
        reduced(X, "b t d -> b d")
    assert str(caught.value) == (
        "reduce='b t d -> b d : mean' does not fit layer, which gives (4, 6, 3, 5): the pattern has 3 axes, and the "
        "tensor 4 axes."
    )


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_values_of_any_dtype_have_a_mean(dtype):
    value = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    wanted = (value.to(torch.complex128) if dtype.is_complex else value.double()).mean(1)
    found = reduced(value, "b c -> b")
    assert torch.allclose(found.to(wanted.dtype), wanted, rtol=1e-2)
    assert found.dtype == (dtype if dtype.is_floating_point or dtype.is_complex else torch.float32)
    if not dtype.is_complex:
        assert torch.equal(reduced(value, "b c -> b : max"), value.amax(1))


# -- SRP -------------------------------------------------------------------------------------------------------------

MINE = """
def chosen(value, words={'b', 'a', 'c'}):
    return value if value in {'x', 'y', 'z'} else words
"""
FRESH = """
import sys
sys.path[:0] = sys.argv[1:]
from mine import chosen
from test_reductions import function_text, signs
print(function_text(chosen))
print(signs())
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The text of a function and signs of a projection in a fresh process with other hashes, and where the function is."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder), str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": "12"},
        capture_output=True,
        text=True,
        check=True,
    )
    return (*done.stdout.splitlines(), folder)


def signs(layer="layer4", seed=3, width=500):
    value = torch.eye(width, dtype=torch.float64)
    found = Reduction(layer, (SRP(8, seed=seed),))(value).numpy()
    return hashlib.sha256(np.sign(found).astype("int8").tobytes()).hexdigest()[:16]


def test_a_projection_is_the_same_on_every_day_and_in_every_process(elsewhere):
    torch.manual_seed(1)
    assert signs() == "de6fba5b9661229f"
    assert elsewhere[1] == "de6fba5b9661229f"


def test_another_layer_seed_or_width_has_another_projection():
    assert len({signs(), signs("layer3"), signs(seed=4), signs(width=501)}) == 4


def test_a_projection_draws_nothing():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    reduced(X, SRP(10))
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]


def test_distances_are_kept_as_well_as_by_scikit_learn():
    projection = pytest.importorskip("sklearn.random_projection", reason="scikit-learn is not installed")
    values = torch.randn(40, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[:, :50] *= 20  # few entries that matter
    true = torch.pdist(values)
    ours = torch.pdist(reduced(values, SRP(1024))) / true
    theirs = torch.pdist(
        torch.from_numpy(projection.SparseRandomProjection(1024, random_state=0).fit_transform(values))
    )
    errors = [(ratio - 1).abs().mean().item() for ratio in (ours, theirs / true)]
    assert errors[0] < 1.5 * errors[1] and errors[0] < 0.05
    assert abs(ours.mean().item() - 1) < 0.03


@pytest.mark.parametrize("width", [1, 2, 10, 77])
def test_squared_lengths_are_right_on_average_for_each_entry_of_a_layer(width):
    value = torch.eye(width, dtype=torch.float64)
    found = reduced(value, SRP(20_000)).square().sum(1)
    assert (found - 1).abs().max() < 0.1


def test_a_projection_keeps_as_many_numbers_as_it_says():
    srp = SRP(64)
    reduction = Reduction("layer", (srp,))
    reduction(torch.ones(2, 100, 100))
    [sums] = reduction._matrices.values()
    assert sums.places.shape == sums.weights.shape == (64, 100)  # 100 is the root of 10,000
    assert all(len({*row.tolist()}) == 100 for row in sums.places)
    dense = reduced(torch.eye(30), SRP(5, density=1.0))
    assert (dense != 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_a_projection_takes_real_numbers_of_any_dtype(dtype):
    found = reduced(torch.ones(3, 4, 5).to(dtype), SRP(7))
    assert found.shape == (3, 7) and found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)


def test_a_projection_of_odd_sizes():
    assert reduced(torch.ones(3), SRP(7)).shape == (3, 7)
    assert torch.equal(reduced(torch.ones(3, 0), SRP(7)), torch.zeros(3, 7))
    assert reduced(torch.ones(0, 4), SRP(7)).shape == (0, 7)
    with pytest.raises(TypeError, match="SRP projects real numbers") as caught:
        reduced(torch.ones(3, 4, dtype=torch.complex64), SRP(7))
    assert caught.value.__notes__ == ["replaylens: raised by reduce= for layer, which gives (3, 4) torch.complex64."]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_projection_is_its_weighted_sums_and_the_same_bits_by_any_threads(dtype):
    value = torch.randn(33, 3000, dtype=dtype, generator=torch.Generator().manual_seed(0))
    reduction, threads = Reduction("layer", (SRP(100),)), torch.get_num_threads()
    whole = reduction(value)
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(reduction(value), whole)
    finally:
        torch.set_num_threads(threads)
    [sums] = reduction._matrices.values()
    by_hand = (value[:, sums.places.long()] * sums.weights).sum(-1)
    assert torch.allclose(whole, by_hand, atol=1e-4)


def test_mistakes_in_a_projection_are_told():
    with pytest.raises(ValueError, match="SRP takes a number of entries"):
        SRP(0)
    with pytest.raises(ValueError, match="SRP takes a number of entries"):
        SRP(2.5)
    with pytest.raises(ValueError, match="density= is the share"):
        SRP(3, density=1.5)
    with pytest.raises(TypeError, match=r"takes a projection onto a number of entries: replaylens.SRP\(4096\)"):
        steps_of(SRP)


# -- functions, lists, mappings --------------------------------------------------------------------------------------


def test_steps_come_one_after_another():
    found = reduced(X, ["b c h w -> b c", torch.tanh, SRP(3)])
    assert torch.equal(found, reduced(torch.tanh(X.mean((2, 3))), SRP(3)))


def test_mistakes_in_functions_are_told():
    with pytest.raises(TypeError, match="returns float, not a tensor"):
        reduced(X, lambda value: value.mean().item())
    with pytest.raises(ZeroDivisionError) as caught:
        reduced(X, lambda value: value / (1 // 0))
    assert caught.value.__notes__ == [
        "replaylens: raised by reduce= for layer, which gives (4, 6, 3, 5) torch.float32."
    ]
    with pytest.raises(TypeError, match="reduce= takes a pattern as in einops"):
        steps_of(3)


def test_a_pca_is_refused_with_a_cure():
    decomposition = pytest.importorskip("sklearn.decomposition", reason="scikit-learn is not installed")
    for pca in (decomposition.PCA(3), decomposition.PCA):
        with pytest.raises(TypeError, match=r"PCA is fitted to all. .*Project first, reduce=SRP\(4096\)"):
            steps_of(pca)


def test_a_mapping_says_it_for_each_layer_names_before_globs():
    choices = PerLayer({"layer*": "b c h w -> b c", "layer1": None, "fc": SRP(3)}, steps_of)
    assert choices.of(("layer1",), ()) == ()
    assert [step.text for step in choices.of(("layer2",), ())] == ["b c h w -> b c : mean"]
    assert choices.of(("other",), ()) == ()
    with pytest.raises(NoSuchLayer, match="reduce= names 'fc', which is none of the extracted layers: layer1, layer2"):
        choices.require_used("reduce", ["layer1", "layer2"])
    assert choices.of(("linear_1", "fc"), ()) == (SRP(3),)
    choices.require_used("reduce", [])
    with pytest.raises(TypeError, match="has names of layers as its keys, not 3"):
        PerLayer({3: None}, steps_of)


def test_a_pattern_for_all_layers_leaves_those_that_have_nothing_to_be_reduced():
    choices = PerLayer("b c h w -> b c", steps_of)
    deep, flat = (Reduction(name, choices.of((name,), ())) for name in ("layer4", "fc"))
    value = torch.randn(2, 3)
    assert deep(X).shape == (4, 6) and torch.equal(flat(value), value)
    assert (deep.text, flat.text) == ("b c h w -> b c : mean", None)
    assert (deep.axes(1), flat.axes(1)) == (("c",), (None,))
    require_fit({"layer4": deep, "fc": flat})
    with pytest.raises(BadPart, match="reduce='b c h w -> b c : mean' does not fit any layer: fc have other axes"):
        require_fit({"fc": flat})
    with pytest.raises(BadPart, match=r"does not fit fc, which gives \(2, 3, 4\)"):
        flat(torch.randn(2, 3, 4))
    named = PerLayer({"fc": "b c h w -> b c"}, steps_of)
    with pytest.raises(BadPart, match=r"does not fit fc, which gives \(2, 3\)"):
        Reduction("fc", named.of(("fc",), ()))(value)


def test_a_glob_that_a_name_comes_before_is_not_unused():
    choices = PerLayer({"layer*": "b c -> b", "layer1": None}, steps_of)
    assert choices.of(("layer1",), ()) == ()
    choices.require_used("reduce", ["layer1"])


# -- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, "float16", np.float16, np.dtype("float16"), "torch.float16"])
def test_dtypes_are_said_as_in_torch_or_numpy(dtype):
    assert torch_dtype(dtype) is torch.float16


def test_dtypes_that_have_no_place_are_refused():
    with pytest.raises(TypeError, match="no numpy and no zarr has bfloat16"):
        torch_dtype(torch.bfloat16)
    with pytest.raises(TypeError, match="no numpy and no zarr has float8_e4m3fn"):
        torch_dtype(torch.float8_e4m3fn)
    for wrong in ("number", 3, np.dtype("datetime64[s]"), "nn"):
        with pytest.raises(TypeError, match="dtype= takes a dtype of torch or numpy"):
            torch_dtype(wrong)


def test_a_cast_rounds_and_never_overflows():
    assert reduced(torch.tensor([1.0001, 65504.0]), None, "float16").tolist() == [1.0, 65504.0]
    told = "layer gives -70000, and torch.float16 has no such number. Leave out dtype= for it, which stores it as it is"
    with pytest.raises(ValueError, match=re.escape(told)):
        reduced(torch.tensor([1.0, -70000.0]), None, "float16")
    inf = torch.tensor([1.0, torch.inf, torch.nan])
    assert reduced(inf, None, "float16").tolist()[:2] == [1.0, torch.inf]  # they were there before


LOSSES = {
    "float to int8": (torch.tensor([1.0, 128.0]), "int8"),
    "negative to unsigned": (torch.tensor([-1]), "uint8"),
    "signed to unsigned of the same size": (torch.tensor([-1], dtype=torch.int8), "uint8"),
    "nan to int": (torch.tensor([1.0, torch.nan]), "int32"),
    "inf to int": (torch.tensor([torch.inf]), "int64"),
    "int to half": (torch.tensor([100_000]), "float16"),
    "double to float": (torch.tensor([1e200], dtype=torch.float64), "float32"),
    "bfloat16 to half": (torch.tensor([1e30], dtype=torch.bfloat16), "float16"),
    "a share to int8": (torch.tensor([1.6, -3.0]), "int8"),
    "2 to bool": (torch.tensor([0.0, 2.0]), "bool"),
    "complex to float": (torch.tensor([1j]), "float32"),
    "complex double to complex": (torch.tensor([1e200j], dtype=torch.complex128), "complex64"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_cast_to_where_the_numbers_have_no_place_is_refused(kind):
    value, dtype = LOSSES[kind]
    with pytest.raises(ValueError, match=r"has no such number|has no imaginary part"):
        reduced(value, None, dtype)


def test_a_cast_to_where_they_have_a_place_is_done():
    assert reduced(torch.tensor([True, False]), None, "uint8").tolist() == [1, 0]
    assert reduced(torch.tensor([1.0, -3.0]), None, "int8").tolist() == [1, -3]
    assert reduced(torch.tensor([0.0, 1.0]), None, "bool").tolist() == [False, True]
    assert reduced(torch.tensor([2]), None, "complex64").tolist() == [2 + 0j]
    assert reduced(torch.ones(0, 3), None, "int8").shape == (0, 3)


# -- functions as texts ----------------------------------------------------------------------------------------------


def kept(count):
    return lambda value: value[:, :count]


def by_default(value, count=3):
    return value[:, :count]


SCALE = 2.0


def scaled(value):
    return value * SCALE


class Center:
    def __init__(self, mean):
        self.mean = mean

    def __call__(self, value):
        return value - self.mean

    def twice(self, value):
        return value - 2 * self.mean


def test_a_function_is_known_by_its_code_and_by_what_it_holds(monkeypatch):
    assert function_text(kept(3)) == function_text(kept(3)) != function_text(kept(4))
    assert function_text(partial(by_default, count=3)) != function_text(partial(by_default, count=4))
    assert function_text(Center(1.0)) == function_text(Center(1.0)) != function_text(Center(2.0))
    assert function_text(Center(1.0).twice) != function_text(Center(2.0).twice)
    assert function_text(Center(torch.ones(2))) != function_text(Center(torch.zeros(2)))
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert function_text(first) == function_text(first) != function_text(second)
    begun = function_text(scaled)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert function_text(scaled) != begun
    assert function_text(torch.tanh) == function_text(torch.tanh) != function_text(torch.sigmoid)
    assert "kept.<locals>.<lambda>" in function_text(kept(3))


def test_the_text_of_a_function_is_the_same_in_every_process(elsewhere, monkeypatch):
    monkeypatch.syspath_prepend(elsewhere[2])
    from mine import chosen

    assert function_text(chosen) == elsewhere[0]
