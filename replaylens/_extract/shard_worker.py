"""A shard as a task for another process: which holds the programs, and not the model.

In, here: the data, the programs, the wish, and where shards go. In, there: the same, from a job; and numbers of shards.
Out, there: what is said of a shard that was written, or its arrays. None for a shard that only the model can make: it
has a batch of a shape that was not foreseen, or one that leaves the recorded path. None and no file, too, for one of an
extraction that is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from .._ir.node import Context
from .._replay.interpreter import modes
from .._sweep.sweep_job import context_now
from ..errors import BadSource
from .batch_reader import BatchReader
from .feature_folder import Account, Array, Memory, Target
from .layer_values import LayerValues, Left, Route, Wish
from .shard_files import Superseded
from .shards import Shard, ShardBuilder, values_of


@frozen(eq=False)
class ShardJob:
    """What all tasks of an extraction share."""

    reader: BatchReader
    wish: Wish
    routes: tuple[tuple[Any, Route], ...]
    target: Target
    seeds: Mapping[str, int]
    context: Context = field(factory=context_now)

    @staticmethod
    def of(reader: BatchReader, values: LayerValues, target: Target) -> ShardJob:
        """What is sent; the target is lent. Of a program that is cut the whole is needed for gradients alone."""
        has_grads = "grad" in values.wish.what
        routes = [(key, route if has_grads else evolve(route, whole=None)) for key, route in values.routes.items()]
        return ShardJob(reader.again(), values.wish, tuple(routes), target, values.seeds)


@frozen(eq=False)
class ShardAnswer:
    """What became of a shard: its account if it is on the disk, else its arrays."""

    account: Account
    arrays: dict[str, Array] | None


def prepared(job: ShardJob) -> Callable[[int], ShardAnswer | None]:
    """The function that makes a shard."""
    values = LayerValues(job.wish, OrderedDict(job.routes), seeds=job.seeds)

    def work(number: int) -> ShardAnswer | None:
        with modes(job.context):
            try:
                return _answer(job, _shard(job, values, number))
            except (Left, Superseded):
                return None

    return work


def _shard(job: ShardJob, values: LayerValues, number: int) -> Shard:
    plan = job.target.plan
    rows = plan.rows_of(number)
    builder = ShardBuilder(plan, lambda other: other != number)
    for batch in job.reader.read(rows.start, rows.stop):
        for shard in builder.add(batch.first, values_of(values, batch, plan)):
            return shard
    raise BadSource(f"the data ended before row {rows.stop} in a worker, and in the driver they have {plan.total}.")


def _answer(job: ShardJob, shard: Shard) -> ShardAnswer:
    if isinstance(job.target, Memory):
        account = {"rows": len(next(iter(shard.arrays.values()))), "reruns": shard.reruns, "files": {}}
        return ShardAnswer(account, dict(shard.arrays))
    return ShardAnswer(job.target.write(shard.number, shard.arrays, shard.reruns), None)
