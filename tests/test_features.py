"""Features are read as numpy indexes, wherever they lie, whole or not ended yet; damage and lies in files are told.

Other programs read them alone, and the libraries that they are handed to get the numbers that are there.
"""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from internals import ArrayPlan, Features, LazyArray, clashes, extraction_plan, folder_name, row_labels, target_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import replaylens as rl
from replaylens.errors import BadFeatures, BadFile, BadSource, NoSuchLayer


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    """What a kill leaves is asked elsewhere: here files are only read."""
    monkeypatch.setattr(os, "fsync", lambda number: None)


RNG = np.random.default_rng(0)


def begun(path, arrays, labels=None, shard_rows=4, axes=None, done=None):
    """A folder of features, of which some shards are done; with the accounts, if it is not all of them."""
    axes = axes or {}
    plans = tuple(
        ArrayPlan(
            name, name, name, "activation", None, one.shape[1:], one.dtype.name, one.dtype.name,
            axes.get(name, (None,) * (one.ndim - 1)),
        )
        for name, one in arrays.items()
    )  # fmt: skip
    total = len(next(iter(arrays.values())))
    target = target_of(extraction_plan.Plan(plans, shard_rows, total, {"model": "Net"}), path)
    known = row_labels(labels, total)
    target.begin(known, True, False)
    accounts = {}
    for shard in range(-(-total // shard_rows)):
        if done is None or shard in done:
            rows = slice(shard * shard_rows, (shard + 1) * shard_rows)
            accounts[shard] = target.write(shard, {name: one[rows] for name, one in arrays.items()}, 0)
    return target, known, accounts


def written(path, arrays, labels=None, **options):
    """Features in a folder."""
    target, known, accounts = begun(path, arrays, labels, **options)
    return target.finish(len(next(iter(arrays.values()))), known, accounts)


def some(*shape, dtype="float32"):
    return RNG.normal(size=shape).astype(dtype)


ARRAYS = {
    "layer1": some(11, 3, 4),
    "relu_1": some(11, 2, 5),
    "fc": some(11, 6),
    "loss": some(11),
    "count": np.arange(22, dtype="int64").reshape(11, 2),
    "wave": (some(11, 2) + 1j * some(11, 2)).astype("complex64"),
    "mask": some(11, 3) > 0,
}
AXES = {"relu_1": ("time", "c"), "layer1": ("c", None)}
LABELS = {"stimulus": [f"picture é {number}" for number in range(11)], "category": [*"aabbccaabbc"], "hour": range(11)}
KINDS = ["features.zarr", "features.npy", None]


def made(kind, folder, arrays=ARRAYS, labels=LABELS, **options):
    options.setdefault("axes", AXES)
    return written(None if kind is None else folder / kind, arrays, labels, **options)


# -- indices ---------------------------------------------------------------------------------------------------------

INDICES = [
    0, -1, 10, np.int64(3), torch.tensor(4), (2, 1), (2, 1, 3), ..., (..., 1), (1, ...), None, (None, 2), (2, None),
    slice(None), slice(3), slice(-3, None), slice(2, 9, 3), slice(None, None, -1), slice(9, 1, -2), slice(20, 30),
    (slice(1, 5), 2), (slice(None), slice(0, 2)), (slice(None), slice(None, None, -1), -1), (..., None, 0),
    [1, 2], [5, 5, 0], [], np.array([[0, 10], [3, 3]]), torch.tensor([4, 1]), np.array([9, 0], "uint8"), [-1, -11],
    ([0, 5], 1), ([0, 5], slice(None), 1), ([0, 5], [1, 2]), ([[0], [7]], [0, 2]), (slice(2, 8), [2, 0]),
    (0, slice(None), [1, 1]), ([1, 2], slice(None), [0, 3]), (slice(None), 1, [0, 3]), ([9, 1], None, [0, 1]),
    np.arange(11) % 2 == 0, np.zeros(11, bool), [True] * 5 + [False] * 6, (np.arange(11) > 8, 1),
    (slice(None), np.array([True, False, True])), np.arange(33).reshape(11, 3) % 4 == 0,
    np.arange(132).reshape(11, 3, 4) % 7 == 0, (np.arange(11) < 3, [0, 1, 2]), (..., np.array([True, False] * 2)),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_rows", [1, 4, 11, 50])
def test_an_index_gives_what_it_gives_in_numpy(kind, shard_rows, tmp_path):
    array, lazy = ARRAYS["layer1"], made(kind, tmp_path, shard_rows=shard_rows)["layer1"]
    for index in INDICES:
        plain = index.numpy() if isinstance(index, torch.Tensor) else index
        wanted, found = array[plain], lazy[index]
        assert np.shape(found) == np.shape(wanted) and np.array_equal(found, wanted), index
        assert found.dtype == array.dtype and not np.shares_memory(np.asarray(found), lazy._chunks.chunk(0))


@pytest.fixture(scope="module")
def lying(tmp_path_factory):
    """Features in files, for many questions."""
    return made("features.zarr", tmp_path_factory.mktemp("lying"))


@pytest.fixture(scope="module")
def lying_flat(tmp_path_factory):
    """The same in a folder of .npy files."""
    return made("features.npy", tmp_path_factory.mktemp("lying"))


WRONG = [
    11,
    -12,
    [0, 11],
    (0, 3),
    (0, 0, 0, 0),
    1.5,
    "a",
    [1.0],
    True,
    (..., ...),
    np.ones(10, bool),
    np.ones((11, 2), bool),
]


@pytest.mark.parametrize("index", WRONG, ids=repr)
def test_an_index_that_numpy_refuses_is_refused(index, lying):
    with pytest.raises(IndexError):
        lying["layer1"][index]


@st.composite
def indices(draw, shape=(11, 3, 4)):
    parts = []
    for size in shape[: draw(st.integers(1, len(shape)))]:
        number = st.integers(-size, size - 1)
        cut = st.one_of(st.none(), st.integers(-size - 2, size + 2))
        step = st.one_of(st.none(), st.integers(-3, 3).filter(bool))
        parts.append(
            draw(st.one_of(number, st.builds(slice, cut, cut, step), st.lists(number, min_size=2, max_size=2)))
        )
    return tuple(parts)


@settings(max_examples=300, deadline=None)
@given(indices())
def test_any_index_gives_what_it_gives_in_numpy(lying, index):
    assert np.array_equal(lying["layer1"][index], ARRAYS["layer1"][index])


def test_only_the_chunks_that_are_asked_for_are_opened(tmp_path):
    features = made("features.zarr", tmp_path)
    (tmp_path / "features.zarr" / "fc" / "c" / "1" / "0").unlink()
    assert np.array_equal(features["fc"][:4], ARRAYS["fc"][:4]) and np.array_equal(
        features["fc"][[9, 2]], ARRAYS["fc"][[9, 2]]
    )
    with pytest.raises(BadFile, match="is missing, and the features are said to be complete"):
        features["fc"][3:5]


# -- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read(kind, tmp_path):
    features = made(kind, tmp_path)
    assert list(features) == list(ARRAYS) and len(features) == 7 and features.rows == 11 and features.is_complete
    for name, array in ARRAYS.items():
        lazy = features[name]
        assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.size, lazy.nbytes) == (
            array.shape, array.dtype, array.ndim, array.size, array.nbytes,
        )  # fmt: skip
        assert np.asarray(lazy).tobytes() == array.tobytes() and np.array_equal(np.array([*lazy]), array)
        assert (
            np.array_equal(np.concatenate([*lazy.chunks()]), array)
            and lazy.torch().numpy().tobytes() == array.tobytes()
        )
        assert np.asarray(lazy, "complex128").dtype == np.complex128
    assert features.labels["stimulus"].tolist() == LABELS["stimulus"]
    assert features.labels["hour"].dtype == np.int64 and features.labels["hour"].tolist() == list(range(11))
    assert features["layer1"].dims == ("stimulus", "layer1_c", "layer1_1")
    assert repr(features["fc"]) == "<LazyArray fc: float32 (11, 6), stimulus x fc_0>"


def test_an_array_of_files_is_no_view(lying):
    with pytest.raises(ValueError, match="'fc' lies in files: an array of it is a copy"):
        np.asarray(lying["fc"], copy=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 3), (0,), (3, 0), (3, 0, 2), (3,), (1, 1)])
def test_arrays_of_no_rows_or_units(kind, shape, tmp_path):
    array = np.ones(shape, "float32")
    features = made(kind, tmp_path, {"fc": array}, None, shard_rows=2, axes={})
    assert features["fc"].shape == shape and np.array_equal(features["fc"][...], array)
    assert np.array_equal(features["fc"][:1], array[:1]) and features.X("fc").shape == (
        shape[0],
        array[:1].size if shape[0] else 0,
    )


def test_a_step_of_a_layer_is_an_array_by_the_name_of_the_pass(lying):
    assert lying["relu_1"].has_time and not lying["fc"].has_time
    assert np.array_equal(lying["relu_1:2"][...], ARRAYS["relu_1"][:, 1]) and "relu_1:2" in lying
    assert lying["relu_1:2"].dims == ("stimulus", "relu_1_c") and lying["relu_1:2"].name == "relu_1:2"
    for name in ("relu_1:3", "relu_1:0", "fc:1", "relu_1:x", ":", 3):
        assert name not in lying and lying.get(name) is None
        with pytest.raises(NoSuchLayer, match="no layer of these features is called"):
            lying[name]


def test_names_that_are_not_there_are_answered_with_the_nearest(lying):
    with pytest.raises(NoSuchLayer, match="The nearest names are 'layer1'"):
        lying["layer2"]
    assert lying.names_of() == list(ARRAYS)
    assert lying.names_of(["fc", "l*", "fc"]) == ["fc", "layer1", "loss"]
    with pytest.raises(NoSuchLayer):
        lying.names_of("nothing*")


def test_an_array_is_found_by_the_layer_and_by_the_label_that_it_is_of():
    rows = {
        "layer4": {"layer": "layer4", "label": "relu_9_31", "what": "activation"},
        "layer4.grad": {"layer": "layer4", "label": "relu_9_31", "what": "grad"},
        "lstm.0": {"layer": "lstm", "label": "lstm_1", "what": "activation"},
        "lstm.1": {"layer": "lstm", "label": "lstm_1", "what": "activation"},
    }
    features = Features.of({name: np.full((2, 1), place) for place, name in enumerate(rows)}, {}, {"arrays": rows})
    assert (
        features["relu_9_31"].name == features["relu_9"].name == "layer4"
        and features["layer4.grad"].name == "layer4.grad"
    )
    with pytest.raises(NoSuchLayer, match=r"'lstm' is several arrays: 'lstm\.0', 'lstm\.1'\. Name one"):
        features["lstm"]


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_copied_and_sent(kind, tmp_path):
    features = made(kind, tmp_path)
    for one in (copy.copy(features), copy.deepcopy(features), pickle.loads(pickle.dumps(features))):
        assert np.array_equal(one["fc"][...], ARRAYS["fc"]) and one.labels.keys() == features.labels.keys()
    assert kind is None or len(pickle.dumps(features)) < 500


def test_features_show_what_they_are(lying):
    text = str(lying)
    assert "<Features of Net: 7 arrays, 11 rows, in " in text and "labels: stimulus, category, hour" in text
    assert "relu_1  float32    (11, 2, 5)  stimulus x time x relu_1_c" in text
    assert "<table>" in lying._repr_html_() and repr(lying) in text


# -- names -----------------------------------------------------------------------------------------------------------

ODD_NAMES = [
    "a/b", "..", ".", "../../etc/passwd", "relu_1:3", "blocks.0.attn", "größe", "日本語", "a b", "a%2Fb", "zarr.json", "c",
    "__init__", "x" * 300, "é" * 120, "é" * 120 + "!", "-", "[i]*?", 'q"uote', "new\nline", "labels", "features.json",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS[:2])
def test_layers_of_any_name_have_files_of_their_own(kind, tmp_path):
    arrays = {name: np.full((3, 2), place, "float32") for place, name in enumerate(ODD_NAMES)}
    features = made(kind, tmp_path, arrays, {"b/../c": ["x", "y", "z"]}, axes={})
    assert list(features) == ODD_NAMES and features.labels["b/../c"].tolist() == ["x", "y", "z"]
    for name, array in arrays.items():
        assert np.array_equal(features[name][...], array), name
    assert {one.name for one in tmp_path.iterdir()} == {kind}
    assert all(len(one.name) <= 220 for one in tmp_path.rglob("*"))


def test_the_file_of_a_name_is_a_plain_name():
    assert folder_name("layer4.0.relu_1:3") == "layer4.0.relu_1:3"
    assert folder_name("a/b") == "a%2Fb" and folder_name("..") == "%2E." and folder_name("a%2Fb") == "a%252Fb"
    names = [folder_name(name) for name in ODD_NAMES]
    assert len({*names}) == len(names) and not {"zarr.json", "..", "."} & {*names}
    assert not any(name.startswith(("__", ".")) for name in names)


def test_names_that_differ_by_case_alone_are_told_apart():
    assert clashes(["fc", "FC", "fc2", "Fc"]) == [("fc", "FC"), ("fc", "Fc")]
    assert clashes(ODD_NAMES) == []


# -- not ended yet ---------------------------------------------------------------------------------------------------

FLOATS = {name: ARRAYS[name] for name in ("layer1", "relu_1", "fc", "wave")}


def test_what_an_extraction_has_not_come_to_is_nan(tmp_path):
    begun(tmp_path / "x.zarr", FLOATS, LABELS, axes=AXES, done=[0, 2])
    features = Features.open(tmp_path / "x.zarr")
    assert not features.is_complete and features.rows == 11 and "not complete" in repr(features)
    for name, array in FLOATS.items():
        wanted = array.copy()
        wanted[4:8] = np.nan
        assert np.array_equal(features[name][...], wanted, equal_nan=True)
        assert np.array_equal(features[name][[0, 5, 9]], wanted[[0, 5, 9]], equal_nan=True)
        assert features[name].missing_rows == 4
    assert features.labels["stimulus"].tolist() == LABELS["stimulus"]
    assert np.isnan(features["relu_1:1"][5]).all() and np.isnan(features.to_pandas("fc").iloc[5]).all()
    for ask in (features.X, features.to_rsatoolbox, features.rdms):
        with pytest.raises(BadFeatures, match="4 of 11 rows of 'fc' are not extracted yet"):
            ask("fc")


def test_whole_numbers_have_nothing_to_stand_for_what_is_missing(tmp_path):
    begun(tmp_path / "x.zarr", {"count": ARRAYS["count"]}, done=[0])
    array = Features.open(tmp_path / "x.zarr")["count"]
    assert np.array_equal(array[:4], ARRAYS["count"][:4])
    with pytest.raises(BadFeatures, match="rows 4 to 7 of 'count' are not extracted yet, and int64 has no NaN"):
        array[3:5]


def test_a_label_that_the_data_bring_is_nan_where_they_were_not_read(tmp_path):
    label = np.arange(11)
    plans = (
        ArrayPlan("fc", "fc", "fc", "activation", None, (6,), "float32", "float32", (None,)),
        ArrayPlan("target", "", "", "label", None, (), "int64", "int64", (), is_label=True),
    )
    target = target_of(extraction_plan.Plan(plans, 4, 11, {"model": "Net"}), tmp_path / "x.zarr")
    target.begin({}, True, False)
    accounts = {0: target.write(0, {"fc": ARRAYS["fc"][:4], "target": label[:4]}, 0)}
    found = Features.open(tmp_path / "x.zarr").labels["target"]
    assert found[:4].tolist() == [0, 1, 2, 3] and np.isnan(found[4:]).all() and len(found) == 11
    for shard in (1, 2):
        rows = slice(4 * shard, 4 * shard + 4)
        accounts[shard] = target.write(shard, {"fc": ARRAYS["fc"][rows], "target": label[rows]}, 0)
    features = target.finish(11, {}, accounts)
    assert list(features) == ["fc"] and features.labels["target"].dtype == np.int64
    assert features.labels["target"].tolist() == [*range(11)]


# -- damage and lies -------------------------------------------------------------------------------------------------


def mended(path, change):
    """A JSON file, changed."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def attributes(document):
    return document["attributes"]["replaylens"]


def shape(value):
    return lambda document: document.update(shape=value)


DAMAGE = {
    "a chunk that is cut off": lambda at: (at / "fc/c/1/0").write_bytes(b"short"),
    "a chunk that is too long": lambda at: (at / "fc/c/1/0").write_bytes(bytes(97)),
    "a chunk that is not there": lambda at: (at / "fc/c/1/0").unlink(),
    "an array that is not there": lambda at: (at / "fc/zarr.json").unlink(),
    "no JSON": lambda at: (at / "fc/zarr.json").write_text("{"),
    "no text": lambda at: (at / "fc/zarr.json").write_bytes(b"\xff\xfe"),
    "nested JSON": lambda at: (at / "fc/zarr.json").write_text("[" * 100_000),
    "a group that is no JSON": lambda at: (at / "zarr.json").write_text("{'a'"),
    "a list": lambda at: (at / "fc/zarr.json").write_text("[]"),
    "numbers of five thousand digits": lambda at: (at / "fc/zarr.json").write_text(f'{{"shape": [{"9" * 5000}]}}'),
    "another array": lambda at: (at / "fc/zarr.json").write_text((at / "category/zarr.json").read_text()),
    "a huge shape": lambda at: mended(at / "fc/zarr.json", shape([10**30, 6])),
    "too many rows": lambda at: mended(at / "fc/zarr.json", shape([10**15, 6])),
    "a row less": lambda at: mended(at / "fc/zarr.json", shape([10, 6])),
    "negative rows": lambda at: mended(at / "fc/zarr.json", shape([-11, 6])),
    "half a row": lambda at: mended(at / "fc/zarr.json", shape([11.0, 6])),
    "rows that are true": lambda at: mended(at / "fc/zarr.json", shape([True, 6])),
    "no shape": lambda at: mended(at / "fc/zarr.json", shape([])),
    "a shape of words": lambda at: mended(at / "fc/zarr.json", shape("ab")),
    "another width": lambda at: mended(at / "fc/zarr.json", shape([11, 7])),
    "objects": lambda at: mended(at / "fc/zarr.json", lambda one: one.update(data_type="object")),
    "no dtype": lambda at: mended(at / "fc/zarr.json", lambda one: one.update(data_type=["f4", 3])),
    "other numbers": lambda at: mended(at / "fc/zarr.json", lambda one: one.update(data_type="float64")),
    "compressed": lambda at: mended(at / "fc/zarr.json", lambda one: one["codecs"].append({"name": "zstd"})),
    "axes without names": lambda at: mended(at / "fc/zarr.json", lambda one: one.update(dimension_names=[None, None])),
    "axes that are numbers": lambda at: mended(at / "fc/zarr.json", lambda one: one.update(dimension_names=3)),
    "chunks of nothing": lambda at: mended(at / "fc/zarr.json", lambda one: one.update(chunk_grid=None)),
    "a newer format": lambda at: mended(at / "zarr.json", lambda one: attributes(one).update(format=99)),
    "a format of words": lambda at: mended(at / "zarr.json", lambda one: attributes(one).update(format="1")),
    "arrays that are a list": lambda at: mended(at / "zarr.json", lambda one: attributes(one).update(arrays=["fc"])),
    "arrays of nothing": lambda at: mended(at / "zarr.json", lambda one: attributes(one).update(arrays={"fc": None})),
    "a layer that is not there": lambda at: mended(
        at / "zarr.json", lambda one: attributes(one)["arrays"].update(x={})
    ),
    "a layer elsewhere": lambda at: mended(
        at / "zarr.json", lambda one: attributes(one)["arrays"].update({"../y": {}})
    ),
    "a layer without a name": lambda at: mended(
        at / "zarr.json", lambda one: attributes(one)["arrays"].update({"": {}})
    ),
    "labels that are no texts": lambda at: mended(at / "zarr.json", lambda one: attributes(one).update(labels=[3])),
    "a label that is not there": lambda at: mended(at / "zarr.json", lambda one: attributes(one)["labels"].append("x")),
    "rows of words": lambda at: mended(at / "zarr.json", lambda one: attributes(one).update(rows="11")),
    "other rows": lambda at: mended(at / "zarr.json", lambda one: attributes(one).update(rows=12)),
    "no word of it": lambda at: mended(at / "zarr.json", lambda one: one.update(attributes={})),
    "attributes that are a list": lambda at: mended(at / "zarr.json", lambda one: one.update(attributes=[1])),
    "texts that are cut off": lambda at: (at / "category/c/0").write_bytes((at / "category/c/0").read_bytes()[:-1]),
    "more texts than there are": lambda at: (at / "category/c/0").write_bytes(b"\xff\xff\xff\xff"),
    "texts of another kind": lambda at: (at / "category/c/0").write_bytes(b"\x01\0\0\0\x01\0\0\0\xff"),
    "fewer texts": lambda at: (at / "category/c/0").write_bytes(b"\x01\0\0\0\x01\0\0\0a"),
    "no texts": lambda at: (at / "category/c/0").unlink(),
    "numbers of a label that are not there": lambda at: (at / "hour/c/0").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_and_lies_are_told_and_nothing_outside_is_read(kind, lying, tmp_path):
    at = shutil.copytree(lying.path, tmp_path / "x.zarr")
    shutil.copytree(at / "fc", tmp_path / "y")  # what a lie may point to
    assert np.array_equal(Features.open(at)["fc"][...], ARRAYS["fc"])
    DAMAGE[kind](at)
    with pytest.raises((BadFile, BadFeatures)):
        Features.open(at)["fc"][...]


NPY_DAMAGE = {
    "cut off": lambda at: (at / "fc.npy").write_bytes((at / "fc.npy").read_bytes()[:-1]),
    "empty": lambda at: (at / "fc.npy").write_bytes(b""),
    "not there": lambda at: (at / "fc.npy").unlink(),
    "a label that is not there": lambda at: (at / "labels" / "hour.npy").unlink(),
    "objects": lambda at: np.save(at / "fc.npy", np.array([None] * 11), allow_pickle=True),
    "other rows": lambda at: np.save(at / "fc.npy", np.ones((10, 6))),
    "a huge shape": lambda at: (at / "fc.npy").write_bytes(
        (at / "fc.npy").read_bytes().replace(b"(11, 6), }      ", b"(11, 6000000), }")
    ),
    "no header": lambda at: (at / "fc.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00__import__('os')"),
    "no JSON": lambda at: (at / "features.json").write_text("{"),
}


@pytest.mark.parametrize("kind", NPY_DAMAGE)
def test_damage_of_npy_files_is_told(kind, lying_flat, tmp_path):
    at = shutil.copytree(lying_flat.path, tmp_path / "x.npy")
    before = (at / "fc.npy").read_bytes()
    NPY_DAMAGE[kind](at)
    assert kind != "a huge shape" or before != (at / "fc.npy").read_bytes()
    with pytest.raises((BadFile, BadFeatures)):
        Features.open(at)["fc"][...]


def test_folders_of_others_are_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="there are no features at"):
        Features.open(tmp_path / "x.zarr")
    (tmp_path / "x.zarr").mkdir()
    with pytest.raises(BadFeatures, match=r"has neither a zarr\.json nor a features\.json"):
        Features.open(tmp_path / "x.zarr")
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    zarr.open_group(tmp_path / "y.zarr", mode="w").create_array("fc", data=ARRAYS["fc"])
    with pytest.raises(BadFeatures, match="holds no features of replaylens"):
        Features.open(tmp_path / "y.zarr")


# -- read by others --------------------------------------------------------------------------------------------------

ALONE = """
import sys, warnings
warnings.simplefilter("error")
import numpy as np
import xarray, zarr
found = xarray.open_zarr(sys.argv[1], consolidated=False)
group = zarr.open_group(sys.argv[1], mode="r")
assert sorted(group.array_keys()) == sorted(found.variables), (sorted(group.array_keys()), sorted(found.variables))
assert sorted(found.coords) == ["category", "hour", "stimulus"], sorted(found.coords)
assert all(np.array_equal(group[name][...], found[name].values, equal_nan=True) for name in found.data_vars)
assert not any(name.split(".")[0] in ("replaylens", "torch") for name in sys.modules)
plain = {name: np.array(one.values.tolist()) if name in found.coords else one.values for name, one in found.variables.items()}
np.savez(sys.argv[2], **plain, dims=str(dict(found.sizes)))
"""


@pytest.mark.parametrize("done", [None, [0, 2]])
def test_xarray_and_zarr_alone_read_the_same_bits_without_a_warning(done, tmp_path):
    pytest.importorskip("xarray", reason="xarray is not installed")
    pytest.importorskip("zarr", reason="zarr is not installed")
    target, known, accounts = begun(tmp_path / "x.zarr", ARRAYS, LABELS, axes=AXES, done=done)
    if done is None:
        target.finish(11, known, accounts)
    command = [sys.executable, "-c", ALONE, str(tmp_path / "x.zarr"), str(tmp_path / "found.npz")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    found = np.load(tmp_path / "found.npz", allow_pickle=True)
    for name, array in ARRAYS.items():
        wanted = array.copy()
        if done is not None:
            wanted[4:8] = np.nan if array.dtype.kind in "fc" else 0
        assert found[name].dtype == array.dtype and np.array_equal(
            found[name], wanted, equal_nan=array.dtype.kind in "fc"
        )
    assert found["stimulus"].tolist() == LABELS["stimulus"] and found["hour"].tolist() == [*range(11)]
    assert "'time': 2" in str(found["dims"])


def test_our_documents_are_those_that_zarr_itself_writes(tmp_path):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    made("x.zarr", tmp_path)
    group = zarr.open_group(tmp_path / "theirs.zarr", mode="w")
    for name, array in ARRAYS.items():
        ours = json.loads((tmp_path / "x.zarr" / name / "zarr.json").read_text())
        one = group.create_array(
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=(4, *array.shape[1:]),
            compressors=None,
            filters=None,
            fill_value={"f": np.nan, "c": complex(np.nan, np.nan)}.get(array.dtype.kind, 0),
            dimension_names=ours["dimension_names"],
        )
        one[...] = array
        assert json.loads((tmp_path / "theirs.zarr" / name / "zarr.json").read_text()) == ours
        for chunk in (tmp_path / "x.zarr" / name / "c").rglob("*"):
            place = chunk.relative_to(tmp_path / "x.zarr")
            theirs = tmp_path / "theirs.zarr" / place
            if chunk.is_file() and place.parts[2] != "2":  # what lies behind the last row is anything
                assert chunk.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("kind", KINDS[1:2])
def test_a_folder_of_npy_files_is_read_by_numpy_alone(kind, tmp_path):
    made(kind, tmp_path)
    for name, array in ARRAYS.items():
        found = np.load(tmp_path / kind / f"{name}.npy", mmap_mode="r")
        assert found.dtype == array.dtype and np.array_equal(found, array)
    assert np.load(tmp_path / kind / "labels" / "category.npy").tolist() == LABELS["category"]


# -- handed over -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_xarray_gets_lazy_arrays_with_labels_as_coordinates(kind, tmp_path):
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    features = made(kind, tmp_path)
    found = features.to_xarray()
    assert isinstance(found, xarray.Dataset) and {*found.data_vars} == {*ARRAYS} and {*found.coords} == {*LABELS}
    for name, array in ARRAYS.items():
        assert np.array_equal(found[name].values, array) and found[name].dims == features[name].dims
    pytest.importorskip("dask.array", reason="dask is not installed")
    assert found["layer1"].chunks[0] == ((4, 4, 3) if kind == "features.zarr" else (11,))
    assert np.allclose(found["fc"].mean("stimulus").values, ARRAYS["fc"].mean(0), atol=1e-6)
    assert list(features.to_xarray(["fc", "l*"]).data_vars) == ["fc", "layer1", "loss"]
    assert found["fc"].sel(stimulus="picture é 3").shape == (6,)
    assert json.loads(found.attrs["replaylens"])["rows"] == 11 and found.attrs["model"] == "Net"


def test_what_xarray_gets_is_what_it_opens(tmp_path):
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    pytest.importorskip("zarr", reason="zarr is not installed")
    features = made("x.zarr", tmp_path)
    opened = xarray.open_zarr(tmp_path / "x.zarr", consolidated=False)
    xarray.testing.assert_equal(opened.load(), features.to_xarray().load())


def test_pandas_gets_a_row_for_each_stimulus(lying):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = lying.to_pandas("fc")
    assert frame.shape == (11, 6) and frame.index.names == ["stimulus", "category", "hour"]
    assert np.array_equal(frame.to_numpy(), ARRAYS["fc"])
    frame = lying.to_pandas("layer1")
    assert frame.columns.names == ["c", "1"] and np.array_equal(frame[(2, 3)].to_numpy(), ARRAYS["layer1"][:, 2, 3])
    assert lying.to_pandas("relu_1").columns.names == ["time", "c"]
    assert lying.to_pandas("loss").columns.tolist() == ["value"]
    bare = Features.of({"fc": ARRAYS["fc"]}, {}, {})
    assert isinstance(bare.to_pandas("fc").index, pandas.RangeIndex) and bare.to_pandas("fc").index.name == "stimulus"


def test_scikit_learn_gets_a_matrix(lying):
    assert np.array_equal(lying.X("layer1"), ARRAYS["layer1"].reshape(11, 12))
    assert lying.X("loss").shape == (11, 1) and lying.X("relu_1:2").shape == (11, 5)


def rsatoolbox():
    return pytest.importorskip("rsatoolbox", reason="rsatoolbox is not installed")


def test_rsatoolbox_gets_a_dataset_with_descriptors(lying):
    rsatoolbox()
    found = lying.to_rsatoolbox("layer1", session=3)
    assert found.descriptors == {"layer": "layer1", "session": 3} and found.measurements.dtype == np.float64
    assert np.array_equal(found.measurements, ARRAYS["layer1"].reshape(11, 12))
    assert (
        list(found.obs_descriptors["category"]) == LABELS["category"] and len(found.channel_descriptors["unit"]) == 12
    )
    assert found.subset_obs("category", "a").n_obs == 4
    in_time = lying.to_rsatoolbox("relu_1")
    assert in_time.measurements.shape == (11, 5, 2) and list(in_time.time_descriptors["time"]) == [0, 1]
    assert np.array_equal(in_time.measurements[..., 1], ARRAYS["relu_1"][:, 1])


def test_rdms_are_those_of_rsatoolbox_one_for_each_layer(lying):
    toolbox = rsatoolbox()
    found = lying.rdms(["layer1", "fc", "relu_1"])
    assert found.rdm_descriptors["layer"] == ["layer1", "fc", "relu_1:1", "relu_1:2"] and found.n_rdm == 4
    for place, array in enumerate((ARRAYS["layer1"], ARRAYS["fc"], ARRAYS["relu_1"][:, 0], ARRAYS["relu_1"][:, 1])):
        wanted = 1 - np.corrcoef(array.reshape(11, -1).astype(np.float64))
        assert np.allclose(found.get_matrices()[place], wanted, atol=1e-12)
    assert list(found.pattern_descriptors["stimulus"]) == LABELS["stimulus"]
    assert found.subset("layer", "fc").n_rdm == 1
    same = toolbox.rdm.compare(found, found, method="spearman")
    assert np.allclose(np.diag(same), 1) and same.shape == (4, 4)
    by_category = lying.rdms("fc", descriptor="category")
    assert by_category.n_cond == 3 and list(by_category.pattern_descriptors["category"]) == ["a", "b", "c"]
    bare = Features.of({"fc": ARRAYS["fc"]}, {}, {}).rdms()
    assert np.array_equal(bare.dissimilarities, lying.rdms("fc").dissimilarities)
    squared = lying.rdms("fc", method="euclidean").get_matrices()[0]
    wanted = ((ARRAYS["fc"][:, None].astype(np.float64) - ARRAYS["fc"]) ** 2).mean(2)
    assert np.allclose(squared, wanted)


def test_what_cannot_be_compared_is_told(lying):
    rsatoolbox()
    with pytest.raises(BadFeatures, match="wave holds complex numbers"):
        lying.to_rsatoolbox("wave")
    with pytest.raises(BadFeatures, match="there is no layer to compare"):
        Features.of({}, {}, {}).rdms()
    wrong = Features.of({"fc": np.array([[1, np.inf], [1, 2.0], [3, 4]])}, {}, {})
    with pytest.raises(BadFeatures, match="1 of the 3 rows of 'fc' hold NaN or infinities"):
        wrong.rdms()


MISSING = {
    "xarray": ("to_xarray", (), "extract"),
    "pandas": ("to_pandas", ("fc",), "pandas"),
    "rsatoolbox": ("rdms", ("fc",), "rsa"),
}


@pytest.mark.parametrize("library", MISSING)
def test_a_library_that_is_missing_is_named_with_its_extra(library, lying, monkeypatch):
    method, arguments, extra = MISSING[library]
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"this needs {library}: pip install 'replaylens\[{extra}\]'"):
        getattr(lying, method)(*arguments)


def test_without_dask_xarray_gets_arrays_of_numpy(lying, monkeypatch):
    pytest.importorskip("xarray", reason="xarray is not installed")
    monkeypatch.setattr("replaylens._extract.handover.find_spec", lambda name: None)
    found = lying.to_xarray("fc")
    assert isinstance(found["fc"].data, np.ndarray) and np.array_equal(found["fc"].values, ARRAYS["fc"])


def test_a_lazy_array_in_memory_is_one_of_files():
    array = LazyArray.of("fc", ARRAYS["fc"], ("stimulus", "fc_0"))
    assert array.chunk_rows == 11 and array.missing_rows == 0 and len([*array.chunks()]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        array.torch()[0] = 0
    assert ARRAYS["fc"][0].any()


def test_a_layer_that_is_called_as_an_axis_of_another_is_read_by_xarray(tmp_path):
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    arrays = {"linear": some(11, 3, 4), "linear_1": some(11, 2), "linear_0": some(11), "time": some(11, 2, 2)}
    features = made("x.zarr", tmp_path, arrays, axes={"time": ("time", "stimulus")})
    found = features.to_xarray()
    opened = xarray.open_zarr(tmp_path / "x.zarr", consolidated=False)
    for name, array in arrays.items():
        assert np.array_equal(found[name].values, array) and np.array_equal(opened[name].values, array)


def test_names_that_would_be_one_file_are_told(tmp_path):
    with pytest.raises(BadSource, match="'fc' and 'FC' differ by upper and lower case alone"):
        made("x.zarr", tmp_path, {"fc": ARRAYS["fc"], "FC": ARRAYS["fc"]}, axes={})
    with pytest.raises(BadSource, match="'fc' and 'Fc' differ by upper and lower case alone"):
        made("x.zarr", tmp_path, {"fc": ARRAYS["fc"]}, {"Fc": range(11)}, axes={})


# -- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Multiple pattern descriptors found")  # of its own concat
def test_a_movie_of_rdms_has_those_of_the_steps(lying):
    toolbox = rsatoolbox()
    movie = toolbox.rdm.calc_rdm_movie(lying.to_rsatoolbox("relu_1"), method="correlation", time_descriptor="time")
    assert np.allclose(movie.dissimilarities, lying.rdms("relu_1").dissimilarities)


def test_one_call_from_a_loader_to_rdms(tmp_path):
    rsatoolbox()
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("xarray", reason="xarray is not installed")
    torch.manual_seed(0)
    blocks = {"layer1": nn.Conv2d(3, 4, 3), "layer4": nn.Conv2d(4, 5, 3), "pool": nn.AdaptiveAvgPool2d(1)}
    model = nn.Sequential(OrderedDict(**blocks, flat=nn.Flatten(), fc=nn.Linear(5, 6)))
    images = torch.randn(10, 3, 8, 8)
    labels = pandas.DataFrame({"stimulus": [f"{number}.png" for number in range(10)], "session": [1, 2] * 5})
    features = rl.extract(
        model,
        DataLoader(TensorDataset(images, torch.arange(10)), batch_size=4),
        layers=["layer*", "fc"],
        to=tmp_path / "features.zarr",
        reduce="b c h w -> b c",
        batch_size=4,
        labels=labels,
        resume=True,
    )
    with torch.no_grad():
        early = model[0](images)
        late, logits = model[1](early).mean((2, 3)), model(images)
    assert [*features] == ["layer1", "layer4", "fc"]
    assert np.allclose(features["layer4"][...], late, atol=1e-6) and np.allclose(features.X("fc"), logits, atol=1e-6)
    assert features["fc"].dims == ("stimulus", "fc_0") and features["layer1"].dims == ("stimulus", "layer1_c")
    assert {name: one.tolist() for name, one in features.labels.items()} == {
        **labels.to_dict("list"),
        "target": list(range(10)),
    }
    assert features.to_xarray()["fc"].sel(stimulus="3.png").shape == (6,)
    assert features.to_rsatoolbox("fc").n_obs == 10
    found = features.rdms(["layer1", "fc"])
    assert found.rdm_descriptors["layer"] == ["layer1", "fc"]
    wanted = 1 - np.corrcoef(early.mean((2, 3)).double())
    assert np.allclose(found.get_matrices()[0], wanted, atol=1e-5)
