"""A training by two processes, run once for each way to watch it: `python distributed_loops.py LOOP RANK PORT FOLDER`.

Written to the folder: by rank, what each run left, what its watch saw, and the files of its alarms, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_witness import Perceptron, loss_of, note_generators, seed_all
from watched_loops import Run

import replaylens as rl

warnings.simplefilter("ignore")
KINDS = ("plain", "hooks", "nodes", "when", "paused", "everything")


def averaged(run: Run, rank: int, buckets: bool = False) -> dict[str, Any]:
    """DDP: two micro-batches a step, gradients exchanged with the second one alone."""
    model = Perceptron()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=buckets)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    seed_all(10 + rank)
    gradients: list[torch.Tensor] = []
    with run.watch(wrapped, **wishes(run, rank)) as watch:
        for _ in range(6):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped(torch.randn(8, 16))).backward()
            loss_of(wrapped(torch.randn(8, 16))).backward()
            gradients.append(model.head.weight.grad.clone())
            optimizer.step()
    run.end(model, optimizer)
    return seen_of(run, watch, "head.weight", gradients)


def sharded(run: Run, rank: int) -> dict[str, Any]:
    """FSDP2: each process has a half of each parameter."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    seed_all(10 + rank)
    gradients: list[torch.Tensor] = []
    with run.watch(model, **wishes(run, rank)) as watch:
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(model(torch.randn(8, 16))).backward()
            gradients.append(model[2].weight.grad.to_local().clone())
            optimizer.step()
    for name, parameter in model.named_parameters():
        run.witness.note(name, parameter.to_local())
        run.witness.note(f"gradient {name}", parameter.grad.to_local())
    note_generators(run.witness)
    return seen_of(run, watch, "2.weight", gradients)


def wishes(run: Run, rank: int) -> dict[str, Any]:
    """All ranks send samples. An alarm is on the second one alone."""
    when = {"when": lambda numbers: rank == 1 and numbers.step == 3} if run.kind == "when" else {}
    return {"ranks": "all", **when}


def seen_of(run: Run, watch: rl.Watch | None, name: str, gradients: list[torch.Tensor]) -> dict[str, Any]:
    """What the watch saw of a parameter's gradients, and whether that is right."""
    found = run.found[-1] if run.found else {}
    kept = {step: one for (step, at, kind), one in found.items() if (at, kind) == (name, "weight_grad")}
    right = [torch.equal(torch.from_numpy(one.values.copy()), gradients[step]) for step, one in kept.items()]
    return {
        "right": right,
        "names": sorted({at for _, at, _ in found}),
        "files": sorted(path.name for path in run.folder.glob("*.pt")) if run.folder.exists() else [],
        "alarms": [Path(step.path or "none").name for step in watch.alarms] if watch is not None else [],
        "faults": watch.stats().faults if watch is not None else {},
    }


def main(name: str, rank: int, port: str, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    told: dict[str, Any] = {}
    for kind in KINDS:
        seed_all()
        run = Run(kind, folder / f"{name}-{kind}")
        seen = LOOPS[name](run, rank)
        dist.barrier()
        told[kind] = {"hashes": run.witness.hashes, **seen}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


LOOPS = {"averaged": averaged, "buckets": partial(averaged, buckets=True), "sharded": sharded}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
