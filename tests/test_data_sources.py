"""Whatever is given as data has one order of rows, from any row on, draws nothing, and can be sent to other processes."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from internals import Forward, call_with, data_source, digest_of, known_labels, row_labels
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import replaylens as rl
from replaylens.errors import BadSource, PlanDiffers

X = torch.arange(22.0).reshape(11, 2)
Y = torch.arange(11)


class Pairs(Dataset):
    """Items with a label."""

    def __len__(self):
        return 11

    def __getitem__(self, row):
        return X[row], int(Y[row])


class Bare(Dataset):
    """Items alone."""

    def __len__(self):
        return 11

    def __getitem__(self, row):
        return X[row]


class Stream(IterableDataset):
    """Items one after another."""

    def __iter__(self):
        return iter(X)


class Noisy(Bare):
    """Items that draw numbers."""

    def __getitem__(self, row):
        return X[row] + torch.rand(2)


def doubled(items):
    return default_collate(items) * 2


def lost(items):
    return default_collate(items[:-1])


def net(x):
    return x


FORWARD = Forward.of(net)


def first(value):
    """The input in a batch."""
    if isinstance(value, dict):
        return first(next(iter(value.values())))
    return value[0] if isinstance(value, (tuple, list)) else value


def rows(source, start=0, stop=None):
    """All rows from a number on, after their numbers were checked."""
    found, at = [], None
    for stretch in source.batches(start, stop):
        part = torch.as_tensor(first(stretch.given))
        assert at is None or stretch.first == at
        assert stretch.rows in (None, len(part))
        at = stretch.first + len(part)
        found.append(part[max(start - stretch.first, 0) :])
    return torch.cat(found)


def hugging_face(**options):
    datasets = pytest.importorskip("datasets", reason="the library of Hugging Face is not installed")
    return datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist(), "text": [*"abcdefghijk"]}, **options)


KINDS = {
    "loader": lambda: DataLoader(Bare(), batch_size=4),
    "loader of two workers": lambda: DataLoader(Bare(), batch_size=4, num_workers=2),
    "loader of persistent workers": lambda: DataLoader(Bare(), batch_size=4, num_workers=2, persistent_workers=True),
    "loader whose workers take no turns": lambda: DataLoader(Bare(), batch_size=2, num_workers=2, in_order=False),
    "loader of pairs": lambda: DataLoader(Pairs(), batch_size=4),
    "loader of a part": lambda: DataLoader(Subset(Pairs(), range(11)), batch_size=4),
    "loader of a sampler": lambda: DataLoader(Bare(), batch_size=4, sampler=range(11)),
    "loader of a batch sampler": lambda: DataLoader(
        Bare(), batch_sampler=BatchSampler(SequentialSampler(Y), 3, drop_last=False)
    ),
    "loader of uneven batches": lambda: DataLoader(Bare(), batch_sampler=[[0], [1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]),
    "loader of tensors as indices": lambda: DataLoader(Bare(), batch_sampler=list(torch.arange(11).split(4))),
    "loader with its own generator": lambda: DataLoader(Bare(), batch_size=4, generator=torch.Generator()),
    "loader of single items in batches": lambda: DataLoader(list(X.split(4)), batch_size=None),
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=4),
    "dataset": Bare,
    "dataset of pairs": Pairs,
    "tensor dataset": lambda: TensorDataset(X, Y),
    "stream": Stream,
    "tensor": lambda: X,
    "array": lambda: X.numpy(),
    "tuple": lambda: (X, Y),
    "mapping": lambda: {"x": X, "y": Y},
    "mapping of lists besides": lambda: {"x": X, "text": [*"abcdefghijk"]},
    "list of items": lambda: list(X),
    "list of pairs": lambda: [(x, int(y)) for x, y in zip(X, Y)],
    "generator of batches": lambda: (one for one in X.split(4)),
    "iterator of a list of batches": lambda: iter([(x, y) for x, y in zip(X.split(5), Y.split(5))]),
    "hugging face": hugging_face,
    "hugging face, torch": lambda: hugging_face().with_format("torch"),
    "hugging face, numpy": lambda: hugging_face().with_format("numpy"),
    "hugging face, streamed": lambda: hugging_face().to_iterable_dataset(),
    "hugging face, streamed, torch": lambda: hugging_face().to_iterable_dataset().with_format("torch"),
    "loader of hugging face": lambda: DataLoader(hugging_face().with_format("torch"), batch_size=4),
    "loader of hugging face, streamed": lambda: DataLoader(
        hugging_face().to_iterable_dataset().with_format("torch"), batch_size=4
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_data_give_all_rows_in_order_and_touch_no_generator(kind):
    data = KINDS[kind]()
    generators = [torch.default_generator, *filter(None, [getattr(data, "generator", None)])]
    before = [one.get_state() for one in generators], random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(rows(data_source(data)), X)
    after = [one.get_state() for one in generators], random.getstate(), np.random.get_state()[1].tolist()
    assert all(map(torch.equal, before[0], after[0])) and before[1:] == after[1:]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "workers" not in kind])
@pytest.mark.parametrize("start", [1, 4, 7, 10])
def test_rows_can_be_had_from_any_one_on(kind, start):
    source = data_source(KINDS[kind]())
    if source.is_one_pass:
        assert torch.equal(rows(source), X)  # the reader leaves out what it does not want
    else:
        assert source.total == 11
        assert torch.equal(rows(source, start), X[start:])
        assert torch.equal(rows(source, 0, start)[:start], X[:start])


@pytest.mark.parametrize("kind", ["loader", "loader of uneven batches", "tensor", "dataset", "mapping", "hugging face"])
def test_a_batch_is_the_same_wherever_the_reading_begins(kind):
    source = data_source(KINDS[kind]())
    whole = {one.first: first(one.given) for one in source.batches()}
    for start in range(11):
        for one in source.batches(start):
            assert torch.equal(torch.as_tensor(first(one.given)), torch.as_tensor(whole[one.first]))


def test_a_loader_of_workers_goes_on_from_the_middle():
    source = data_source(KINDS["loader of persistent workers"]())
    assert torch.equal(rows(source, 9), X[9:])
    assert torch.equal(rows(source), X)


SENT = [kind for kind in KINDS if "generator" not in kind and "iterator" not in kind and "streamed" not in kind]


@pytest.mark.parametrize("kind", SENT)
def test_sources_can_be_sent_to_other_processes(kind):
    there = pickle.loads(pickle.dumps(data_source(KINDS[kind]())))
    assert torch.equal(rows(there), X)


def test_batches_have_the_size_that_was_asked_for():
    assert [one.rows for one in data_source(X, 4).batches()] == [4, 4, 3]
    assert [one.rows for one in data_source(Pairs(), 11).batches()] == [11]
    assert data_source(X).batch_size == 64


def test_drop_last_drops_the_last_rows():
    source = data_source(DataLoader(Bare(), batch_size=4, drop_last=True))
    assert source.total == 8
    assert torch.equal(rows(source), X[:8]) and torch.equal(rows(source, 5), X[5:8])


def test_a_collate_function_is_the_loaders_own():
    source = data_source(DataLoader(Bare(), batch_size=4, collate_fn=doubled))
    assert torch.equal(rows(source), 2 * X) and torch.equal(rows(source, 6), 2 * X[6:])


def test_a_collate_function_that_loses_rows_is_told():
    [*_, last] = data_source(DataLoader(Bare(), batch_size=4, collate_fn=lost)).batches()
    with pytest.raises(
        BadSource, match=r"a batch has 3 rows, and the model is given tensors of 2\. .* keep all of them"
    ):
        call_with(last.given, FORWARD, None, last.rows)


def test_data_that_draw_draw_from_the_generators_as_in_any_loop():
    torch.manual_seed(0)
    plain = torch.cat(list(DataLoader(Noisy(), batch_size=4)))
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # the seed that a loader draws for its workers
    assert torch.equal(torch.cat([Noisy()[row][None] for row in range(11)]), plain)
    torch.manual_seed(0)
    again = rows(data_source(Noisy()))
    torch.manual_seed(0)
    assert torch.equal(torch.cat([Noisy()[row][None] for row in range(11)]), again)


SHUFFLED = {
    "shuffle": lambda: DataLoader(Bare(), batch_size=4, shuffle=True),
    "of single items": lambda: DataLoader(list(X.split(4)), batch_size=None, shuffle=True),
    "random sampler": lambda: DataLoader(Bare(), batch_size=4, sampler=RandomSampler(Bare())),
    "random part": lambda: DataLoader(Bare(), batch_size=4, sampler=SubsetRandomSampler([3, 5])),
    "weighted": lambda: DataLoader(Bare(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 11, 5)),
    "batch sampler": lambda: DataLoader(Bare(), batch_sampler=BatchSampler(RandomSampler(Bare()), 4, True)),
    "a sampler of one's own": lambda: DataLoader(Bare(), batch_size=4, sampler=Drawn()),
}


class Drawn:
    """A sampler that draws."""

    def __iter__(self):
        return iter(random.sample(range(11), 11))

    def __len__(self):
        return 11


@pytest.mark.parametrize("kind", SHUFFLED)
def test_shuffled_rows_are_refused(kind):
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(BadSource, match="the loader shuffles: another pass gives the rows in another order"):
        data_source(SHUFFLED[kind]())
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


class NoLength(Dataset):
    def __getitem__(self, row):
        return X[row]


MISTAKES = {
    "nothing": (None, TypeError, "data= takes a DataLoader, a Dataset, tensors"),
    "a number": (3, TypeError, "not 3"),
    "no length": (NoLength(), BadSource, "NoLength has no length"),
    "tensors of unlike lengths": ((X, Y[:5]), BadSource, r"have \[5, 11\] rows"),
    "a mapping of one number": ({"x": torch.tensor(3)}, BadSource, "that of 'x' is one number"),
    "a tensor without axes": (torch.tensor(3), BadSource, "is one number"),
    "a mapping of texts": ({"x": X, "name": "abc"}, BadSource, "that of 'name' is str"),
    "no folder": ("nowhere/at/all", BadSource, "'nowhere/at/all' is no folder"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_what_is_no_data_is_told(kind):
    data, error, text = MISTAKES[kind]
    with pytest.raises(error, match=text):
        data_source(data)


def test_mistakes_in_what_goes_with_the_data_are_told():
    with pytest.raises(ValueError, match="batch_size= is a number of rows, not 0"):
        data_source(X, 0)
    with pytest.raises(ValueError, match="batch_size= is a number of rows, not True"):
        data_source(X, True)
    with pytest.raises(BadSource, match="the loader makes batches of 4, and batch_size=5 was asked for"):
        data_source(DataLoader(Bare(), batch_size=4), 5)
    with pytest.raises(BadSource, match="an iterable gives whole batches, which are taken as they come"):
        data_source(iter([X]), 4)
    with pytest.raises(TypeError, match="transform= is for a folder of pictures"):
        data_source(X, None, net)
    with pytest.raises(BadSource, match=r"in_order=False: its workers' batches come as they end"):
        data_source(DataLoader(Stream(), batch_size=2, num_workers=2, in_order=False))


def test_items_that_do_not_stack_are_told_with_the_cure():
    with pytest.raises(BadSource, match=r"items of the data cannot be stacked: .*\nMake tensors of one size of them"):
        rows(data_source([torch.ones(2), torch.ones(3)]))


def test_a_batch_without_tensors_is_told():
    [stretch] = data_source(["a text", "another"]).batches()
    with pytest.raises(BadSource, match="the model is given tensors of none"):
        call_with(stretch.given, FORWARD, None, stretch.rows)
    with pytest.raises(BadSource, match="a batch holds no tensor with a first axis"):
        list(data_source(iter([["a text"]])).batches())


def test_splits_of_hugging_face_are_no_columns():
    datasets = pytest.importorskip("datasets", reason="the library of Hugging Face is not installed")
    with pytest.raises(BadSource, match=r"the data have the splits 'train'. Give one: data\['train'\]"):
        data_source(datasets.DatasetDict({"train": hugging_face()}))


def test_pictures_of_hugging_face_come_as_tensors_or_as_the_transform_makes_them():
    datasets = pytest.importorskip("datasets", reason="the library of Hugging Face is not installed")
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    pictures = [image.fromarray(np.full((4, 5, 3), shade, np.uint8)) for shade in range(5)]
    data = datasets.Dataset.from_dict({"image": pictures}, features=datasets.Features({"image": datasets.Image()}))
    found = rows(data_source(data, 2))
    assert found.shape == (5, 3, 4, 5) and found[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    data.set_transform(lambda rows: {"pixels": [torch.tensor(np.array(one)).float() for one in rows["image"]]})
    assert rows(data_source(data, 2)).shape == (5, 4, 5, 3)


# -- folders of pictures ---------------------------------------------------------------------------------------------


def as_tensor(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    names = ["b/2.png", "b/10.PNG", "a/deep/1.jpg", "a/0.bmp", "top.gif", ".hidden/x.png", "a/._0.png"]
    for shade, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((3, 4, 3), 10 * shade, np.uint8)).save(path)
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    return tmp_path


def test_pictures_of_a_folder_come_in_the_order_of_their_paths_with_their_category(folder):
    source = data_source(folder, 2, as_tensor)
    assert source.labels["stimulus"] == ["a/0.bmp", "a/deep/1.jpg", "b/10.PNG", "b/2.png", "top.gif"]
    assert source.labels["category"] == ["a", "a", "b", "b", ""]
    assert rows(source)[:, 0, 0, 0].tolist() == [30, 20, 10, 0, 40]
    assert rows(pickle.loads(pickle.dumps(source)), 3).shape == (2, 3, 3, 4)
    assert "category" not in data_source(folder / "b", None, as_tensor).labels


def test_mistakes_with_folders_are_told(folder):
    with pytest.raises(BadSource, match="a folder of pictures needs transform="):
        data_source(folder)
    (folder / "empty").mkdir()
    with pytest.raises(BadSource, match="there are no pictures below"):
        data_source(folder / "empty", None, as_tensor)
    with pytest.raises(BadSource, match="cannot be stacked"):
        rows(data_source(folder, None, lambda picture: picture))


def test_a_damaged_picture_is_named(folder):
    (folder / "a" / "0.bmp").write_bytes(b"BM no picture")
    with pytest.raises(OSError, match="cannot identify") as caught:
        rows(data_source(folder, None, as_tensor))
    assert caught.value.__notes__ == ["replaylens: raised for the picture a/0.bmp."]


# -- how the model is called -----------------------------------------------------------------------------------------


def two(x, y):
    return x


def optional_mask(x, mask=None):
    return x


def keywords(pixels, *, size=None):
    return pixels


def some_keywords(pixels=None, **options):
    return pixels


def anything(*args, **kwargs):
    return args


def shown(given, model, inputs=None):
    """Arguments, keywords and labels, in short."""
    call = call_with(given, Forward.of(model), inputs)
    assert call.rows == 11
    return len(call.args), [*call.kwargs], {name: one.tolist() for name, one in call.labels.items()}


NUMBERS = list(range(11))


def test_what_of_a_batch_is_the_input_and_what_is_a_label_of_its_rows():
    assert shown(X, net) == (1, [], {})
    assert shown([X], net) == (1, [], {})
    assert shown([X, Y], net) == (1, [], {"target": NUMBERS})
    assert shown((X, Y), optional_mask) == (1, [], {"target": NUMBERS})
    assert shown((X, Y), torch.nn.Linear(2, 2)) == (1, [], {"target": NUMBERS})
    assert shown((X, X), net) == (1, [], {})
    assert shown((X, ["a"] * 11), net) == (1, [], {})
    assert shown((X, X), two) == (2, [], {})
    assert shown({"x": X, "label": Y, "text": ["a"] * 11}, net) == (0, ["x"], {"label": NUMBERS})
    assert shown({"text": ["a"] * 11, "x": X}, anything) == (0, ["x"], {})
    assert shown({"pixels": X, "label": Y}, keywords) == (0, ["pixels"], {"label": NUMBERS})
    assert shown({"pixels": X, "label": Y}, some_keywords) == (0, ["pixels"], {"label": NUMBERS})
    assert shown({"image": X, "label": Y}, some_keywords) == (0, ["image", "label"], {})


def test_inputs_says_what_the_model_is_given():
    assert shown((X, Y), two, 0) == (1, [], {"target": NUMBERS})
    assert shown((Y, X), net, 1) == (1, [], {"target": NUMBERS})
    assert shown((Y, X), net, -1) == (1, [], {"target": NUMBERS})
    assert shown((X, Y, X), two, [0, 2]) == (2, [], {"target": NUMBERS})
    assert shown({"image": X, "label": Y}, net, "image") == (1, [], {"label": NUMBERS})
    assert shown({"x": X, "y": X, "label": Y}, anything, ["x", "y"]) == (0, ["x", "y"], {"label": NUMBERS})
    assert shown((X, Y), net, lambda batch: batch[0]) == (1, [], {})
    assert shown((X, X, Y), two, lambda batch: batch[:2]) == (2, [], {})
    assert shown((X, Y), keywords, lambda batch: {"pixels": batch[0]}) == (0, ["pixels"], {})


def test_a_program_takes_what_it_was_captured_with():
    found = Forward.of(rl.capture(optional_mask, X, mask=Y))
    assert (found.required, found.names) == (1, {"mask"})
    assert shown((X, Y), rl.capture(net, X)) == (1, [], {"target": NUMBERS})
    with pytest.raises(BadSource, match="the batch has 'x', and the model takes no keywords"):
        shown({"x": X}, rl.capture(net, X))


WRONG_BATCHES = {
    "three things": ((X, X, Y), net, None, "a batch holds 3 things, and the model needs 1"),
    "any number": ((X, Y), anything, None, "a batch holds 2 things, and the model takes any number of them"),
    "other names": ({"image": X}, keywords, None, "has 'image', and the model takes pixels, size.*inputs='image'"),
    "no such key": ({"image": X}, net, "pixels", "inputs='pixels' is not in the batch: KeyError"),
    "no such place": ((X, Y), net, 2, "inputs=2 is not in the batch: IndexError"),
}


@pytest.mark.parametrize("kind", WRONG_BATCHES)
def test_a_batch_that_does_not_say_what_the_input_is_is_told(kind):
    given, model, inputs, text = WRONG_BATCHES[kind]
    with pytest.raises(BadSource, match=text):
        shown(given, model, inputs)


def test_arrays_become_tensors_at_round_addresses():
    array = np.arange(23.0, dtype=np.float32)[1:].reshape(11, 2)[:, ::-1]
    array.flags.writeable = False
    [found] = call_with(array, FORWARD, None).args
    assert np.array_equal(found.numpy(), array) and found.data_ptr() % 64 == 0
    [found] = call_with(torch.arange(23.0)[1:].reshape(11, 2), FORWARD, None).args
    assert found.data_ptr() % 64 == 0 and found[0].tolist() == [1.0, 2.0]


# -- labels ----------------------------------------------------------------------------------------------------------


def test_labels_are_numbers_or_texts():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    given = {
        "number": [1, 2],
        "share": torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
        "flag": np.array([True, False]),
        "text": ["é", "b"],
        "path": [Path("a/b"), Path("c")],
        "mixed": [1, "a"],
        "none": [1, None],
        "made": (name for name in "xy"),
        "series": pandas.Series(["p", "q"], index=[5, 6]),
        "kind": pandas.Categorical(["p", "q"]),
        "day": np.array(["2026-01-02", "2026-01-03"], "datetime64[D]"),
        "bytes": [b"a", b"b"],
        "odd": ["\udcff", "b"],
        "long": np.array([1, 2], np.longdouble),
    }
    found = row_labels(given, 2)
    assert {name: list(value) for name, value in found.items()} == {
        "number": [1, 2],
        "share": [0.5, 1.0],
        "flag": [True, False],
        "text": ["é", "b"],
        "path": ["a/b", "c"],
        "mixed": ["1", "a"],
        "none": ["1", "None"],
        "made": ["x", "y"],
        "series": ["p", "q"],
        "kind": ["p", "q"],
        "day": ["2026-01-02", "2026-01-03"],
        "bytes": ["a", "b"],
        "odd": ["\\udcff", "b"],
        "long": [1.0, 2.0],
    }
    assert [found[name].dtype.name for name in ("number", "share", "flag", "long")] == [
        "int64",
        "float32",
        "bool",
        "float64",
    ]


def test_mistakes_in_labels_are_told():
    with pytest.raises(BadSource, match="the label 'a' has 2 values, and the data have 3 rows"):
        row_labels({"a": [1, 2]}, 3)
    with pytest.raises(BadSource, match=r"the label 'a' has values of shape \(2,\) for each row"):
        row_labels({"a": torch.ones(3, 2)}, 3)
    with pytest.raises(BadSource, match="the label 'a' has values of several sizes"):
        row_labels({"a": [[1], [1, 2]]}, 2)
    with pytest.raises(TypeError, match="the label 'a' is 'abc', and no list"):
        row_labels({"a": "abc"}, 3)
    with pytest.raises(TypeError, match="labels have names, and 3 is none"):
        row_labels({3: [1]}, 1)
    with pytest.raises(TypeError, match="labels= is a mapping"):
        row_labels([1, 2], 2)


def test_the_users_labels_come_before_those_of_the_data():
    found = known_labels({"stimulus": ["x", "y"]}, {"stimulus": ["a", "b", "c"], "category": ["k", "k", "l"]}, 2)
    assert found == {"stimulus": ["x", "y"], "category": ["k", "k"]}


def test_the_digest_of_a_label_is_that_of_its_values():
    one = digest_of(np.array([1, 2]))
    assert one == digest_of(np.array([1, 2])) != digest_of(np.array([1, 3]))
    assert one != digest_of(np.array([1.0, 2.0]))
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])


def test_a_source_that_was_sent_draws_nothing_in_a_fresh_process(tmp_path):
    (tmp_path / "source").write_bytes(pickle.dumps(data_source((X, Y), 4)))
    code = (
        "import pickle, sys, torch; before = torch.get_rng_state();"
        "found = pickle.load(open(sys.argv[1], 'rb'));"
        "print([one.given[0].shape[0] for one in found.batches(5)], torch.equal(before, torch.get_rng_state()))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "source"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[4, 3] True"


# -- extracted -------------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A model whose layer says what row it was given."""

    def forward(self, x):
        return (2 * x).relu()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_extracted_of_any_data_are_their_rows(kind):
    features = rl.extract(Doubled(), KINDS[kind](), "relu_1", shard_bytes=24, inputs=INPUTS.get(kind))
    assert np.array_equal(features["relu_1"][...], 2 * X.numpy())
    labels = {name: one.tolist() for name, one in features.labels.items()}
    assert labels in ({}, {"target": NUMBERS}, {"label": NUMBERS}, {"y": NUMBERS})


INPUTS = {"mapping": "x"}


def test_a_folder_of_pictures_is_extracted_with_its_paths(folder):
    features = rl.extract(Doubled(), folder, "relu_1", transform=as_tensor, batch_size=2, reduce="b c h w -> b")
    assert features["relu_1"][...].tolist() == [60, 40, 20, 0, 80]
    assert features.labels["category"].tolist() == ["a", "a", "b", "b", ""]


def test_data_that_are_other_data_when_an_extraction_is_gone_on_with_are_told(tmp_path):
    torch.manual_seed(0)
    features = rl.extract(Doubled(), Noisy(), "relu_1", to=tmp_path / "x.zarr", batch_size=4)
    assert features.is_complete
    with pytest.raises(PlanDiffers, match="first_batch: begun with"):
        rl.extract(Doubled(), Noisy(), "relu_1", to=tmp_path / "x.zarr", batch_size=4)


def test_a_label_of_the_data_that_is_called_as_a_layer_is_told():
    with pytest.raises(BadSource, match="'relu_1' is the name of a layer and of a label"):
        rl.extract(Doubled(), {"x": X, "relu_1": Y}, "relu_1")
