"""Executors when something is wrong around them: tasks that outlive their call, functions that keep state, modules that
are others in the workers. Numbers are those of one process, or there is an error.
"""

from __future__ import annotations

import pytest
import torch
from internals import same

import replaylens as rl
from replaylens._scale.job_file import read_job


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 4)


# -- tasks that outlive their call -------------------------------------------------------------------------------------


class Holding:
    """An executor that fails, and whose worker goes on with a task once all is over."""

    def submit(self, function, path, digest, number):
        job = read_job(path, digest)
        work = job.setup(job.payload)
        self.late = lambda: work(job.tasks[number])
        raise ValueError("no more")


@pytest.mark.parametrize("kind", ["zarr", "npy"])
def test_a_task_that_outlives_its_extraction_writes_nothing(kind, tmp_path):
    to, rows = tmp_path / f"x.{kind}", torch.arange(60.0).reshape(20, 3)
    how = {"layers": ["linear_1"], "to": to, "batch_size": 2, "shard_bytes": 64}
    holding = Holding()
    with pytest.raises(ValueError, match="no more"):
        rl.extract(linear(0), rows, executor=holding, **how)
    with torch.no_grad():
        wanted = linear(1)(rows).numpy()
    rl.extract(linear(1), rows, overwrite=True, **how)
    assert holding.late() is None
    assert same(rl.Features.open(to)["linear_1"][:], wanted)
    assert [one.name for one in tmp_path.iterdir()] == [to.name]
