"""Where the rows of an extraction come from: loaders, datasets, tensors, folders of pictures, generators of batches.

In: what a user gives as `data=`. Out: a DataSource: batches in a fixed order, from any row on where the data allow it.
A batch is what the data give; how a model is called with it is in model_inputs.py.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from .._ir.util import add_note, optional
from ..errors import BadSource
from .numpy_later import np

DEFAULT_BATCH = 64
PICTURES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))
SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
SHUFFLES = (
    "the loader shuffles: another pass gives the rows in another order, so that nobody could say which row is which. "
    "Give a DataLoader with shuffle=False, or the dataset itself."
)


@frozen
class Stretch:
    """A batch as the data give it, and the number of its first row."""

    first: int
    given: Any
    rows: int | None = None  # how many rows it should have, where that is known


@define(eq=False)
class DataSource:
    """Rows in a fixed order, in batches."""

    total: int | None = None  # rows in all, where that is known beforehand
    batch_size: int | None = None  # None: batches come as they are, of any size
    is_one_pass: bool = False
    labels: dict[str, Sequence[Any]] = field(factory=dict)  # what the data say of their rows

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Stretch]:
        """The batches that hold these rows, in order; the first may begin before `start`. One-pass data begin anew
        where they can, and otherwise go on.
        """
        raise NotImplementedError


@define(eq=False)
class ItemSource(DataSource):
    """Rows that can be fetched by number."""

    fetch: Callable[[range], Any] = field(kw_only=True)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Stretch]:
        assert self.total is not None and self.batch_size is not None
        end = self.total if stop is None else min(stop, self.total)
        for first in range(start - start % self.batch_size, end, self.batch_size):
            rows = range(first, min(first + self.batch_size, self.total))
            yield Stretch(first, self.fetch(rows), len(rows))


@define(eq=False)
class LoaderSource(DataSource):
    """A DataLoader over a dataset whose items have numbers: its batches, from any one on."""

    loader: DataLoader[Any] = field(kw_only=True)
    ends: list[int] | None = field(kw_only=True)  # the row behind each batch, unless all are of one size
    _sampled: list[list[Any]] = field(kw_only=True, factory=list)  # the items of each of these

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Stretch]:
        if self.total == 0:
            return
        number = self._batch_at(start)
        first = self._first_row(number)
        is_theirs = number == 0 and getattr(self.loader, "in_order", True)
        for given in _quietly(self.loader if is_theirs else self._loader_from(number)):
            rows = self._first_row(number + 1) - first
            yield Stretch(first, given, rows)
            first, number = first + rows, number + 1
            if stop is not None and first >= stop:
                return

    def _batch_at(self, row: int) -> int:
        if self.ends is not None:
            return bisect_right(self.ends, row)
        assert self.batch_size is not None
        return row // self.batch_size

    def _first_row(self, number: int) -> int:
        assert self.total is not None
        if self.ends is not None:
            return self.ends[number - 1] if number else 0
        assert self.batch_size is not None
        return min(number * self.batch_size, self.total)

    def _loader_from(self, number: int) -> DataLoader[Any]:
        """A loader of the batches from this one on."""
        old = self.loader
        if self.ends is not None:
            batches: Any = self._sampled[number:]
        else:
            rows = range(number * (self.batch_size or 0), self.total or 0)
            batches = BatchSampler(rows, self.batch_size or 1, drop_last=False)
        return DataLoader(
            old.dataset,
            batch_sampler=batches,
            num_workers=old.num_workers,
            collate_fn=old.collate_fn,
            pin_memory=old.pin_memory,
            timeout=old.timeout,
            worker_init_fn=old.worker_init_fn,
            multiprocessing_context=old.multiprocessing_context,
            generator=old.generator,
            prefetch_factor=old.prefetch_factor,
        )


@define(eq=False)
class StreamSource(DataSource):
    """Batches as they come, which can only be gone through from the beginning."""

    source: Iterable[Any] = field(kw_only=True)
    count_rows: Callable[[Any], int] = field(kw_only=True)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Stretch]:
        first = 0
        for given in _quietly(self.source):
            yield Stretch(first, given)
            first += self.count_rows(given)


def data_source(data: Any, batch_size: int | None = None, transform: Any = None) -> DataSource:
    """The rows of what a user gives as `data=`."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"batch_size= is a number of rows, not {batch_size!r:.60}.")
    if isinstance(data, (str, Path)):
        return _folder(Path(data), batch_size, transform)
    if transform is not None:
        raise TypeError("transform= is for a folder of pictures. A dataset has its own.")
    if isinstance(data, DataLoader):
        return _loader(data, batch_size)
    if _is_tensor(data) or _is_tuple_of_tensors(data):
        return _columns(data, batch_size)
    if hasattr(data, "with_format"):
        return _hugging_face(data, batch_size)
    if isinstance(data, Mapping):
        return _columns(data, batch_size)
    if isinstance(data, IterableDataset):
        return _loader(DataLoader(data, batch_size=batch_size or DEFAULT_BATCH), None)
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        if not hasattr(data, "__len__"):
            raise BadSource(f"the dataset {type(data).__name__} has no length. Give it `__len__`, or a loader of it.")
        return ItemSource(len(data), batch_size or DEFAULT_BATCH, fetch=Items(data))
    if hasattr(data, "__iter__"):
        return _stream(data, batch_size)
    raise TypeError(
        "data= takes a DataLoader, a Dataset, tensors, a list of items, an iterable of batches, or the path of a "
        f"folder of pictures, not {data!r:.80}."
    )


def _is_tensor(given: Any) -> bool:
    return isinstance(given, (torch.Tensor, np.ndarray))


def _is_tuple_of_tensors(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) > 0 and all(_is_tensor(one) for one in data)


@frozen(eq=False)
class Items:
    """Items of a dataset by number, stacked."""

    data: Any

    def __call__(self, rows: range) -> Any:
        return _collated([self.data[row] for row in rows])


@frozen(eq=False)
class Slices:
    """Rows of a dataset that gives whole batches by itself."""

    data: Any

    def __call__(self, rows: range) -> Any:
        return _stacked(self.data[rows.start : rows.stop])


@frozen(eq=False)
class Columns:
    """Rows of tensors: of one, of a tuple or of a mapping of them."""

    data: Any

    def __call__(self, rows: range) -> Any:
        if isinstance(self.data, Mapping):
            return {key: self._cut(column, rows) for key, column in self.data.items()}
        if isinstance(self.data, tuple):
            return tuple([self._cut(column, rows) for column in self.data])
        return self._cut(self.data, rows)

    def _cut(self, column: Any, rows: range) -> Any:
        found = column[rows.start : rows.stop]
        return torch.as_tensor(np.array(found)) if isinstance(found, np.ndarray) else found


def _collated(items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except (TypeError, RuntimeError) as error:
        raise BadSource(
            f"items of the data cannot be stacked: {error}\nMake tensors of one size of them (a transform that crops "
            "or pads), or give a DataLoader with a collate_fn that makes batches."
        ) from error


def _columns(data: Any, batch_size: int | None) -> DataSource:
    """Tensors whose first axis are the rows."""
    named = dict(data) if isinstance(data, Mapping) else dict(enumerate(data if isinstance(data, tuple) else [data]))
    sizes = {_length(name, column) for name, column in named.items()}
    if len(sizes) != 1:
        raise BadSource(f"the tensors of the data have {sorted(sizes)} rows. Their first axis must be the same rows.")
    fetch = Columns(named if isinstance(data, Mapping) else data)
    return ItemSource(sizes.pop(), batch_size or DEFAULT_BATCH, fetch=fetch)


def _length(name: Any, column: Any) -> int:
    """How many rows a column has."""
    if _is_tensor(column) and column.ndim:
        return len(column)
    if isinstance(column, list):
        return len(column)
    found = "one number" if _is_tensor(column) else type(column).__name__
    raise BadSource(
        f"the data have columns, and that of {name!r} is {found}. Give tensors whose first axis are the rows."
    )


def _hugging_face(data: Any, batch_size: int | None) -> DataSource:
    """A dataset of Hugging Face, whose columns come as tensors."""
    if isinstance(data, Mapping):
        raise BadSource(
            f"the data have the splits {', '.join(map(repr, data))}. Give one: data[{next(iter(data), '')!r}]."
        )
    size = batch_size or DEFAULT_BATCH
    if not hasattr(data, "__len__"):
        known = getattr(getattr(data, "_formatting", None), "format_type", None)
        stream = data if known is not None else data.with_format("torch")
        return StreamSource(None, None, True, source=_Batches(stream, size), count_rows=rows_of)
    shown = getattr(data, "format", None) or {}
    return ItemSource(len(data), size, fetch=Slices(data if shown.get("type") else data.with_format("torch")))


@frozen(eq=False)
class _Batches:
    """The batches of a streamed dataset of Hugging Face."""

    data: Any
    size: int

    def __iter__(self) -> Iterator[Any]:
        return map(_stacked, self.data.iter(batch_size=self.size))


def _stacked(batch: Any) -> Any:
    """A batch of columns, of which those that are lists of tensors of one size become tensors."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: _stacked_column(column) for name, column in batch.items()}


def _stacked_column(column: Any) -> Any:
    if not isinstance(column, list) or not column or not all(_is_tensor(one) for one in column):
        return column
    tensors = [torch.as_tensor(one) for one in column]
    is_even = len({(one.shape, one.dtype) for one in tensors}) == 1
    return torch.stack(tensors) if is_even else column


def _stream(data: Iterable[Any], batch_size: int | None) -> DataSource:
    if batch_size is not None:
        raise BadSource(
            "an iterable gives whole batches, which are taken as they come: batch_size= has no meaning for it. Give a "
            "list of items, or a Dataset, for batches of a size of yours."
        )
    return StreamSource(None, None, True, source=data, count_rows=rows_of)


def rows_of(given: Any) -> int:
    """How many rows a batch has: the size of the first axis of its first tensor."""
    leaf = next(batch_tensors(given), None)
    if leaf is None:
        raise BadSource(
            f"a batch holds no tensor with a first axis, which would be that of the rows: {given!r:.80}. Give data "
            "whose batches hold tensors: tokens in place of texts, pictures through a transform."
        )
    return len(leaf)


def batch_tensors(given: Any) -> Iterator[Any]:
    """The tensors of a batch that have a first axis; columns come before what is within lists."""
    if _is_tensor(given):
        if given.ndim:
            yield given
        return
    items = list(given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ())
    for one in sorted(items, key=lambda one: not _is_tensor(one)):
        yield from batch_tensors(one)


# -- loaders ---------------------------------------------------------------------------------------------------------


def _loader(loader: DataLoader[Any], batch_size: int | None) -> DataSource:
    if batch_size is not None and batch_size != loader.batch_size:
        raise BadSource(f"the loader makes batches of {loader.batch_size}, and batch_size={batch_size} was asked for.")
    sampler = loader.batch_sampler
    if (
        sampler is None
        or isinstance(loader.dataset, IterableDataset)
        or type(loader).__iter__ is not DataLoader.__iter__
    ):
        return _loader_stream(loader)
    inner = getattr(sampler, "sampler", None)
    if type(sampler) is BatchSampler and isinstance(inner, SequentialSampler):
        count = len(inner)
        total = count - count % sampler.batch_size if sampler.drop_last else count
        return LoaderSource(total, sampler.batch_size, loader=loader, ends=None)
    batches = _require_order(loader, sampler)
    ends = list(accumulate(map(len, batches)))
    return LoaderSource(ends[-1] if ends else 0, None, loader=loader, ends=ends, sampled=batches)


def _loader_stream(loader: DataLoader[Any]) -> DataSource:
    """A loader whose batches cannot be told beforehand."""
    if not getattr(loader, "in_order", True) and loader.num_workers > 1:
        raise BadSource("the loader has in_order=False: its workers' batches come as they end. Give in_order=True.")
    if not isinstance(loader.dataset, IterableDataset):
        _require_order(loader, loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    return StreamSource(None, None, True, source=loader, count_rows=rows_of)


def _require_order(loader: DataLoader[Any], sampler: Iterable[Any]) -> list[Any]:
    """What a sampler gives, which must be the same each time."""
    if isinstance(getattr(sampler, "sampler", sampler), SHUFFLED):
        raise BadSource(SHUFFLES)
    with _generators_as_they_are(loader):
        found, again = [[one.tolist() if _is_tensor(one) else one for one in sampler] for _ in range(2)]
    if found != again:
        raise BadSource(SHUFFLES)
    return found


def _quietly(source: Iterable[Any]) -> Iterator[Any]:
    """The items. A loader draws a seed for its workers from a generator of the user's, which is put back."""
    if not isinstance(source, DataLoader):
        yield from source
        return
    with _generators_as_they_are(source):
        items = iter(source)
    yield from items


@contextmanager
def _generators_as_they_are(loader: DataLoader[Any]) -> Iterator[None]:
    """What is drawn within has not been drawn afterwards."""
    generators = [torch.default_generator, *([loader.generator] if loader.generator is not None else [])]
    before, of_python, of_numpy = [one.get_state() for one in generators], random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for one, state in zip(generators, before, strict=True):
            one.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


# -- folders ---------------------------------------------------------------------------------------------------------


def _folder(folder: Path, batch_size: int | None, transform: Any) -> DataSource:
    """The pictures below a folder, in the order of their paths."""
    if not folder.is_dir():
        raise BadSource(f"{str(folder)!r} is no folder. data= takes the path of a folder of pictures.")
    if not callable(transform):
        raise BadSource(
            "a folder of pictures needs transform=, which makes the tensor of a picture: "
            "transform=torchvision.models.ResNet18_Weights.DEFAULT.transforms()."
        )
    found = [one.relative_to(folder) for one in folder.rglob("*") if one.suffix.lower() in PICTURES and one.is_file()]
    paths = sorted([one.as_posix() for one in found if not any(part.startswith(".") for part in one.parts)])
    if not paths:
        raise BadSource(f"there are no pictures below {str(folder)!r}: no {', '.join(sorted(PICTURES))}.")
    labels: dict[str, Sequence[Any]] = {"stimulus": paths}
    if any("/" in path for path in paths):
        labels["category"] = [path.partition("/")[0] if "/" in path else "" for path in paths]
    pictures = Pictures(str(folder), tuple(paths), transform)
    return ItemSource(len(paths), batch_size or DEFAULT_BATCH, labels=labels, fetch=pictures)


@frozen(eq=False)
class Pictures:
    """Pictures of a folder, stacked as tensors."""

    folder: str
    paths: tuple[str, ...]
    transform: Callable[[Any], Any]

    def __call__(self, rows: range) -> Any:
        return _collated([self._tensor(self.paths[row]) for row in rows])

    def _tensor(self, path: str) -> Any:
        image = optional("PIL.Image", "extract")
        try:
            with image.open(Path(self.folder, path)) as picture:
                return self.transform(picture.convert("RGB"))
        except Exception as error:
            add_note(error, f"replaylens: raised for the picture {path}.")
            raise
