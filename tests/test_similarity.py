"""Dissimilarity matrices, CKA and linear probes are what their formulas and scikit-learn give; mistakes are told."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from internals import Features, cka, probe, rdm

import replaylens as rl
from replaylens.errors import BadFeatures, NoSuchLayer

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 5)), RNG.normal(size=(12, 7))

pytest.importorskip("sklearn", reason="scikit-learn is not installed")


# -- rdm -------------------------------------------------------------------------------------------------------------


def test_an_rdm_is_one_minus_the_correlation():
    pytest.importorskip("rsatoolbox", reason="rsatoolbox is not installed")
    assert np.allclose(rdm(X), 1 - np.corrcoef(X))
    assert np.allclose(rdm(torch.from_numpy(X).float()), 1 - np.corrcoef(X), atol=1e-6)
    deep = RNG.normal(size=(6, 2, 3, 4)).astype("float16")
    assert np.allclose(rdm(deep), 1 - np.corrcoef(deep.reshape(6, -1).astype(float)))
    squared = ((X[:, None] - X) ** 2).mean(2)
    assert np.allclose(rdm(X, "euclidean"), squared)
    features = Features.of({"fc": X}, {}, {})
    assert np.array_equal(rdm(features["fc"]), features.rdms("fc").get_matrices()[0])


# -- cka -------------------------------------------------------------------------------------------------------------


def plain_cka(x, y):
    """Kornblith et al. 2019, equation 3, through kernels."""
    center = np.eye(len(x)) - 1 / len(x)

    def hsic(one, other):
        return np.trace(one @ one.T @ center @ other @ other.T @ center)

    return hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))


def unbiased_hsic(x, y):
    """Song et al. 2012, equation 5, with the diagonals of both kernels taken out."""
    n, one = np.longdouble(len(x)), np.ones(len(x), np.longdouble)
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)  # it takes large numbers from each other
    kernel, other = x @ x.T, y @ y.T
    np.fill_diagonal(kernel, 0)
    np.fill_diagonal(other, 0)
    whole = (one @ kernel @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
    return float((np.trace(kernel @ other) + whole - 2 / (n - 2) * (one @ kernel @ other @ one)) / (n * (n - 3)))


def unbiased_cka(x, y):
    return unbiased_hsic(x, y) / math.sqrt(unbiased_hsic(x, x) * unbiased_hsic(y, y))


def counted_hsic(x, y):
    """The same as the mean over all four different stimuli, by counting."""
    n, kernel, other = len(x), x @ x.T, y @ y.T
    terms = [
        kernel[i, j] * (other[i, j] + other[q, r] - 2 * other[i, q])
        for i in range(n) for j in range(n) for q in range(n) for r in range(n)
        if len({i, j, q, r}) == 4
    ]  # fmt: skip
    return np.mean(terms)


@pytest.mark.parametrize("units", [(5, 7), (5, 40), (40, 50), (1, 1)])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_cka_is_its_formula(units, shift):
    x, y = (RNG.normal(size=(12, count)) + shift for count in units)
    assert cka(x, y) == pytest.approx(plain_cka(x, y), rel=1e-9)
    if unbiased_hsic(x, x) > 1e-9 < unbiased_hsic(y, y):
        assert cka(x, y, unbiased=True) == pytest.approx(unbiased_cka(x, y), rel=1e-6, abs=1e-9)


def test_the_unbiased_formula_is_the_mean_over_all_four_stimuli():
    x, y = X[:7], Y[:7]
    assert unbiased_hsic(x, y) == pytest.approx(counted_hsic(x, y))
    wanted = counted_hsic(x, y) / math.sqrt(counted_hsic(x, x) * counted_hsic(y, y))
    assert cka(x, y, unbiased=True) == pytest.approx(wanted)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(4, 20), st.integers(1, 30), st.integers(1, 30))
def test_cka_of_any_sizes_is_its_formula(seed, rows, first, second):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, first)), rng.normal(size=(rows, second))
    assert cka(x, y) == pytest.approx(plain_cka(x, y), rel=1e-7, abs=1e-12)
    assert cka(x, y) == pytest.approx(cka(y, x)) and 0 <= cka(x, y) <= 1 + 1e-12


def test_cka_knows_no_rotation_shift_or_scale():
    turn = np.linalg.qr(RNG.normal(size=(5, 5)))[0]
    assert cka(X, 3 * X @ turn + 7) == pytest.approx(1) and cka(X, 3 * X @ turn + 7, unbiased=True) == pytest.approx(1)


def test_without_bias_noise_is_not_alike():
    x, y = RNG.normal(size=(30, 2000)), RNG.normal(size=(30, 2000))
    assert cka(x, y) > 0.9 and abs(cka(x, y, unbiased=True)) < 0.1


def test_what_does_not_vary_is_like_nothing():
    for rows in range(4, 12):
        for value in (0.1, 1 / 3, 1e9 / 7):
            same = np.full((rows, 3), value)
            assert math.isnan(cka(same, X[:rows])) and math.isnan(cka(X[:rows], same, unbiased=True))


def test_what_cannot_be_compared_is_told():
    with pytest.raises(BadFeatures, match="cka compares the same stimuli: x has 12 rows, y has 11"):
        cka(X, Y[:11])
    with pytest.raises(BadFeatures, match="cka needs 2 stimuli or more, and there are 1"):
        cka(X[:1], Y[:1])
    with pytest.raises(BadFeatures, match="cka without bias needs 4 stimuli or more, and there are 3"):
        cka(X[:3], Y[:3], unbiased=True)
    with pytest.raises(BadFeatures, match="x is one number"):
        cka(3.0, Y)
    for wrong in (np.nan, np.inf):
        with pytest.raises(BadFeatures, match="1 of the 12 rows of y hold NaN or infinities"):
            cka(X, np.where(np.arange(12)[:, None] == 3, wrong, Y))
    for value in (X + 1j, torch.from_numpy(X + 1j)):
        with pytest.raises(BadFeatures, match="x holds complex numbers"):
            cka(value, Y)


# -- probe -----------------------------------------------------------------------------------------------------------

KIND = np.repeat([*"abc"], 20)
SIZE = RNG.normal(size=60)
LAYERS = {
    "noise": RNG.normal(size=(60, 8)),
    "kind": RNG.normal(size=(60, 8)) + 2 * np.eye(8)[np.repeat([0, 1, 2], 20)],
    "size": np.concatenate([RNG.normal(size=(60, 3)), SIZE[:, None] + 0.1 * RNG.normal(size=(60, 1))], 1),
    "steps": RNG.normal(size=(60, 2, 4)),
}
ATTRIBUTES = {"arrays": {"steps": {"dims": ["stimulus", "time", "steps_0"]}}}
FEATURES = Features.of(LAYERS, {"kind": KIND, "size": SIZE, "half": np.arange(60) % 2}, ATTRIBUTES)


def by_hand(values, wanted, folds=5):
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    is_class = wanted.dtype.kind in "US"
    last = LogisticRegression(max_iter=5000) if is_class else RidgeCV(alphas=np.logspace(-2, 6, 9))
    cut = (StratifiedKFold if is_class else KFold)(folds, shuffle=True, random_state=0)
    return cross_val_score(make_pipeline(StandardScaler(), last), values.reshape(60, -1), wanted, cv=cut)


def test_a_probe_of_classes_is_that_of_scikit_learn():
    found = probe(FEATURES, "kind")
    assert list(found) == ["noise", "kind", "size", "steps:1", "steps:2"] and len(found) == 5
    for layer in ("noise", "kind", "size"):
        assert np.array_equal(found[layer], by_hand(LAYERS[layer], KIND))
    assert np.array_equal(found["steps:2"], by_hand(LAYERS["steps"][:, 1], KIND))
    assert found.best == "kind" and found.mean["kind"] > 0.8 and found.scoring == "accuracy"
    assert found.chance == pytest.approx(1 / 3) and found.std["kind"] == found["kind"].std()


def test_a_probe_of_numbers_is_that_of_scikit_learn():
    found = probe(FEATURES, SIZE, ["size", "noise"])
    assert list(found) == ["size", "noise"]
    for layer in found:
        assert np.array_equal(found[layer], by_hand(LAYERS[layer], SIZE))
    assert found.scoring == "r2" and found.mean["size"] > 0.9 > 0.3 > found.mean["noise"] and found.chance < 0.05


def test_a_probe_takes_a_model_folds_scores_and_groups():
    from sklearn.model_selection import GroupKFold, cross_val_score
    from sklearn.svm import LinearSVC

    found = probe(
        LAYERS,
        KIND,
        "kind",
        LinearSVC(random_state=0),
        GroupKFold(2),
        scoring="balanced_accuracy",
        groups=np.arange(60) % 4,
    )
    wanted = cross_val_score(
        LinearSVC(random_state=0),
        LAYERS["kind"],
        KIND,
        cv=GroupKFold(2),
        scoring="balanced_accuracy",
        groups=np.arange(60) % 4,
    )
    assert np.array_equal(found["kind"], wanted) and found.scoring == "balanced_accuracy"
    assert np.array_equal(probe(FEATURES, "kind", "kind", cv=2)["kind"], by_hand(LAYERS["kind"], KIND, 2))


def test_probes_draw_nothing_and_give_the_same_each_time():
    before = np.random.get_state()[1].tolist(), torch.get_rng_state()
    first, second = probe(FEATURES, "kind", "kind"), probe(FEATURES, "kind", "kind")
    assert np.array_equal(first["kind"], second["kind"])
    assert np.random.get_state()[1].tolist() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert not np.array_equal(first["kind"], probe(FEATURES, "kind", "kind", seed=3)["kind"])


def test_probes_are_shown_as_a_table():
    found = probe(FEATURES, "half", ["noise", "kind"])
    title, head, *rows = str(found).splitlines()
    assert title == "Linear probes of 2 layers, accuracy over 5 folds (chance 0.500):"
    assert head.split() == ["layer", "score", "std"] and [row.split()[0] for row in rows] == ["noise", "kind"]
    assert found._repr_html_().startswith("<div>Linear probes") and repr(found) == str(found)
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = found.to_pandas()
    assert frame["score"].tolist() == [*found.mean.values()] and frame["layer"].tolist() == ["noise", "kind"]


def test_mistakes_in_probes_are_told():
    with pytest.raises(
        BadFeatures, match=r"there is no label 'type' to take as target. There are: 'kind', 'size', 'half'"
    ):
        probe(FEATURES, "type")
    with pytest.raises(BadFeatures, match="the target has 59 entries, and 'noise' has 60 rows"):
        probe(FEATURES, SIZE[:59])
    with pytest.raises(BadFeatures, match=r"target= has shape \(60, 1\)"):
        probe(FEATURES, SIZE[:, None])
    with pytest.raises(NoSuchLayer):
        probe(FEATURES, "kind", "fc")
    with pytest.raises(BadFeatures, match="'x' hold NaN or infinities"):
        probe({"x": np.full((60, 2), np.nan)}, SIZE)


@pytest.mark.parametrize(
    ("library", "ask"), [("sklearn", lambda: probe(FEATURES, "kind")), ("rsatoolbox", lambda: rdm(X))]
)
def test_a_library_that_is_missing_is_named_with_its_extra(library, ask, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"this needs {library}: pip install 'replaylens\[rsa\]'"):
        ask()


def test_all_layers_at_once_or_a_name_are_no_values_of_stimuli():
    features = rl.Features.of({"0": np.eye(3), "1": np.eye(3)}, {}, {})
    for wrong, words in ((features, "all layers"), ("fc", "the name of a layer")):
        with pytest.raises(rl.BadFeatures, match=words):
            rl.cka(wrong, wrong)
        with pytest.raises(rl.BadFeatures, match=words):
            rl.rdm(wrong)
