"""extract(model, data, layers): activations of many layers over a whole dataset, on disk or in memory.

In: a model, data, and what to keep of which layers. Out: Features. One batch after another is replayed as far as the
latest of the layers, reduced, and kept in shards, each of which is whole or not there. What runs is said in
`layer_values.py`, what is written in `feature_folder.py`; workers of an executor make whole shards: `shard_worker.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field

from .._ir.util import add_note
from .._scale.distribute import distribute
from .._scale.executors import require_executor
from .._sweep.batch_runner import progress_bar
from .._sweep.task_draws import seeds_now
from ..errors import BadExecutor, BadSource, PlanDiffers
from .batch_reader import Batch, BatchReader, reader_of
from .data_source import data_source
from .extraction_plan import Plan, require_shard_bytes
from .feature_folder import Account, Target, begun_plan, require_target, target_of
from .features import Features
from .first_batch import Asked, plan_of
from .layer_values import LayerValues, RouteMaker, Wish
from .model_inputs import Forward
from .numpy_later import np
from .reduction import PerLayer, steps_of, torch_dtype
from .row_labels import known_labels, require_rows
from .shard_worker import ShardAnswer, ShardJob, prepared
from .shards import BatchValues, Shard, ShardBuilder, as_stored, values_of


def extract(
    model: Any,
    data: Any,
    layers: Any,
    *,
    to: Any = None,
    reduce: Any = None,
    dtype: Any = None,
    batch_size: int | None = None,
    labels: Mapping[str, Any] | None = None,
    what: Any = "activation",
    of: Callable[[Any], Any] | None = None,
    edit: Callable[[Any], Any] | None = None,
    inputs: Any = None,
    transform: Callable[[Any], Any] | None = None,
    total: int | None = None,
    shard_bytes: int | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: bool | None = None,
    executor: Any = None,
    scratch: Any = None,
    retries: int = 3,
) -> Features:
    """What layers of a model compute for each row of a dataset: a mapping from layers to arrays, one row per stimulus.

    `data` is a DataLoader, a Dataset (also of Hugging Face), tensors, a list of items, an iterable of batches, or a
    folder of pictures with `transform=`. `layers` are names, globs, types, passes, or predicates, as patches take them;
    a layer of several passes has them along an axis `time`. The model runs once for each shape of batch; batches are
    replayed as far as the latest layer. Model, buffers and generators are left as they are.

    `to="x.zarr"` writes a zarr group and `to="x.npy"` a folder of arrays, in whole shards: what was killed goes on
    where it stopped, and gives the same bytes. `reduce` is a pattern of einops ("b c h w -> b c", "b t d -> b d :
    max"), `SRP(4096)`, a function, a list of these, or a mapping from layers to them; `dtype` what is stored. `what`
    may also be "grad", with `of=` a number of the output. `edit` makes a program of each capture:
    `lambda prog: prog.expand("scaleddotproductattention")`. `inputs` says what of a batch the model is given.

    `labels` are names and a value for each row; `batch_size` is that of data which make no batches themselves, `total`
    how many rows are taken. What was begun at `to` is gone on with (`resume=False`: refused; `overwrite=True`: removed
    first). `shard_bytes` is what a kill loses at most, for the largest array. `executor` makes shards in other
    processes, as in `replaylens.sweep`, where `scratch` and `retries` are explained.

    >>> features = extract(torch.nn.Linear(2, 3), torch.ones(5, 2), "linear_1")
    >>> features["linear_1"].shape
    (5, 3)
    """
    require_target(to)
    require_shard_bytes(shard_bytes)
    if executor is not None:
        require_executor(executor)
    if isinstance(model, type):
        raise TypeError(f"the model is the class {model.__name__}. Give one of its objects: {model.__name__}(...)")
    warn_of_training(model)
    wish = Wish(layers, _what(what, of), of, PerLayer(reduce, steps_of), PerLayer(dtype, torch_dtype))
    source = data_source(data, batch_size, transform)
    if executor is not None and source.is_one_pass:
        raise BadSource(
            "the data can be gone through once, from the beginning, and executor= needs rows by number. Give a "
            "Dataset, a DataLoader of one, or tensors; or run without executor=."
        )
    reader = reader_of(source, Forward.of(model), inputs, total)
    known = known_labels(labels, source.labels, reader.total)
    begun = None if overwrite or not resume else begun_plan(to)
    seeds = (begun or {}).get("seeds") or seeds_now()
    values = LayerValues(wish, make=RouteMaker(model, edit, wish), seeds=seeds)
    alike = _one_thread if _has_own_threads(executor) else _any_threads
    with alike():
        first = reader.first()
        asked = Asked(source.batch_size, reader.total, shard_bytes, torch.get_num_threads(), edit, inputs, known)
        found = values(first.call, first.first)
        plan = plan_of(first, found[0], values, asked)
        target = target_of(plan, to)
        done = target.begin(known, resume, overwrite)
        if done is None:
            return _as_labelled(Features.open(target.path), known)
        run = Extraction(reader, values, target, done, {first.first: as_stored(*found, first.call, plan)})
        del found
        if executor is not None:
            run.elsewhere(executor, progress, scratch, retries)
        run.here(progress if executor is None else False)
    require_rows(known, run.rows)
    return target.finish(run.rows, known, run.accounts)


def warn_of_training(model: Any) -> None:
    """Warn of layers whose rows are not what the model gives for them alone."""
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    found = [name or type(one).__name__ for name, one in modules if one.training and isinstance(one, _IN_TRAINING)]
    if found:
        warnings.warn(
            f"the model is in training mode: {', '.join(found[:3])}{' ...' * (len(found) > 3)}. Batch norm takes the "
            "statistics of each batch, and dropout draws. Call model.eval() first, for the trained model's numbers.",
            stacklevel=3,
        )


_IN_TRAINING = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout),
)


def _has_own_threads(executor: Any) -> bool:
    """True if the work is done in other processes, each of which has one thread."""
    return executor is not None and type(executor).__name__ != "ThreadPoolExecutor"


@contextmanager
def _one_thread() -> Iterator[None]:
    """What runs here has as many threads as a worker, since the number can be part of the bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _any_threads() -> Iterator[None]:
    yield


def _what(what: Any, of: Any) -> tuple[str, ...]:
    found = (what,) if isinstance(what, str) else tuple(what)
    if not found or set(found) - {"activation", "grad"}:
        raise ValueError(f"what= is 'activation', 'grad', or both, not {what!r:.60}.")
    if "grad" in found and not callable(of):
        raise TypeError("what='grad' needs of=, a number of the output: of=lambda out: out[:, 3].sum().")
    if "grad" not in found and of is not None:
        raise TypeError("of= is the number that gradients are of, and what= asks for no 'grad'.")
    return found


def _as_labelled(features: Features, labels: Mapping[str, Any]) -> Features:
    """Features that were there before, if their labels are those of now."""
    for name, label in labels.items():
        if name not in features.labels or not np.array_equal(features.labels[name], np.asarray(label)):
            raise PlanDiffers(
                f"{features.path} is complete, and has other labels {name!r} than those given now. Pass overwrite=True "
                "to extract it again, or another name in to=."
            )
    return features


@define(eq=False)
class Extraction:
    """One run: the shards that are done, and how the others come to be."""

    reader: BatchReader
    values: LayerValues
    target: Target
    accounts: dict[int, Account]
    known: dict[int, BatchValues]  # by the first row of a batch: those that are computed already
    _ended_at: int = field(default=0, init=False)  # the rows of data whose number nobody knew
    _done_before: int = field(default=0, init=False)  # the row behind those that another run has made

    def __attrs_post_init__(self) -> None:
        if self.reader.total is None:  # the last shard may have been cut off by an end that is none
            full = self.plan.shard_rows
            self.accounts = {shard: one for shard, one in self.accounts.items() if one["rows"] == full}
        self._done_before = max([(shard + 1) * self.plan.shard_rows for shard in self.accounts], default=0)

    @property
    def plan(self) -> Plan:
        """What is written."""
        return self.target.plan

    @property
    def rows(self) -> int:
        """The rows in all."""
        return self._ended_at if self.plan.total is None else self.plan.total

    def here(self, progress: bool | None) -> None:
        """Make all shards that are not done, in this process."""
        missing = self._missing()
        if self.plan.total is not None and not missing:
            return
        with progress_bar(self.plan.total, progress, "row") as tick:
            tick(sum(one["rows"] for one in self.accounts.values()))
            if self.plan.total is None or self.reader.source.is_one_pass:
                self._make(self.reader.read(), tick)
                self._require_no_fewer()
            else:
                for rows in self._stretches(missing):
                    self._make(self.reader.read(rows.start, rows.stop), tick)

    def _missing(self) -> list[int]:
        count = 0 if self.plan.total is None else self.plan.shards(self.plan.total)
        return [shard for shard in range(count) if shard not in self.accounts]

    def _stretches(self, shards: Iterable[int]) -> Iterator[range]:
        """The rows of shards, those of neighbours together."""
        found: range | None = None
        for shard in shards:
            rows = self.plan.rows_of(shard)
            if found is not None and rows.start == found.stop:
                found = range(found.start, rows.stop)
                continue
            if found is not None:
                yield found
            found = rows
        if found is not None:
            yield found

    def _make(self, batches: Iterator[Batch], tick: Callable[[int], None]) -> None:
        """Make the shards that these batches fill, and that are not done."""
        builder = ShardBuilder(self.plan, self.accounts.__contains__)
        for batch in batches:
            self._ended_at = batch.end
            if builder.wants(batch.first, batch.end):
                for shard in builder.add(batch.first, self._values_of(batch)):
                    self._keep(shard, tick)
        for shard in builder.rest():
            if self.plan.total is not None:
                raise BadSource(
                    f"the data ended after {self._ended_at} rows, and said that there are {self.plan.total}."
                )
            self._keep(shard, tick)

    def _require_no_fewer(self) -> None:
        """Raise if data whose length nobody knew end before rows that are done."""
        if self.plan.total is None and self._ended_at < self._done_before:
            raise BadSource(
                f"the data ended after {self._ended_at} rows, and {self._done_before} are done already, of an earlier "
                "run. Give all of the data; or overwrite=True, to begin anew with what there is."
            )

    def _values_of(self, batch: Batch) -> BatchValues:
        if (known := self.known.pop(batch.first, None)) is not None:
            return known
        try:
            return values_of(self.values, batch, self.plan)
        except Exception as error:
            add_note(error, f"replaylens: raised for rows {batch.first} to {batch.end - 1} of the data.")
            raise

    def _keep(self, shard: Shard, tick: Callable[[int], None]) -> None:
        account = self.accounts[shard.number] = self.target.write(shard.number, shard.arrays, shard.reruns)
        tick(account["rows"])

    # -- by workers ----------------------------------------------------------------------------------------------------

    def elsewhere(self, executor: Any, progress: bool | None, scratch: Any, retries: int) -> None:
        """Have the workers of an executor make what they can. The rest, which needs the model, is left to `here`."""
        missing = self._missing()
        if not missing:
            return
        self._foresee(missing[-1])

        def receive(place: int, answer: ShardAnswer | None) -> None:
            if answer is not None:
                self._take(missing[place], answer)

        how = {"scratch": scratch, "retries": retries, "progress": progress, "unit": "shard"}
        with self.target.lent() as target:
            job = ShardJob.of(self.reader, self.values, target)
            distribute(executor, prepared, job, missing, receive, **how)

    def _foresee(self, shard: int) -> None:
        """Have a program for the last batch as well, which may be shorter than the others."""
        rows = self.plan.rows_of(shard)
        for batch in self.reader.read(max(rows.start, rows.stop - 1), rows.stop):
            self.values.route(batch.call)

    def _take(self, shard: int, answer: ShardAnswer) -> None:
        """What a worker made of a shard."""
        if answer.arrays is not None:
            self.target.write(shard, answer.arrays, answer.account["reruns"])
        elif not self.target.has(answer.account):
            raise BadExecutor(
                f"a worker has written shard {shard}, and its files are not here. Workers write their shards "
                "themselves: to= must be in a folder that all of them see."
            )
        self.accounts[shard] = answer.account
