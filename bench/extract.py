"""`python bench/extract.py [--quick]`: what an extraction costs, next to its budget.

CPU time of this process on one thread, in turns: the whole dataset by plain forwards, by forward hooks that write into
`numpy.memmap`s, and by `replaylens.extract`. Each writes the same numbers. "early" asks for the first layers alone. What
files cost is the difference between an extraction to disk and the same one that is thrown away after each shard. Memory
is the peak of a fresh process for each number of rows.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import process_time

import measure
import models
import numpy as np
import torch
from torch import nn

import replaylens as rl

Reduction = Callable[[torch.Tensor], torch.Tensor]


class Task:
    """A model, batches, and layers with what is kept of each."""

    def __init__(
        self, model: nn.Module, data: torch.Tensor, batch: int, layers: list[str], pattern: str | None
    ) -> None:
        self.model, self.data, self.batch, self.layers, self.pattern = model.eval(), data, batch, layers, pattern
        self.folder = Path(tempfile.mkdtemp(prefix="replaylens-bench-"))

    def plain(self) -> None:
        with torch.no_grad():
            for start in range(0, len(self.data), self.batch):
                self.model(self.data[start : start + self.batch])

    def hooks(self) -> None:
        """What people write themselves: hooks, the same reduction, and a memmap for each layer."""
        axes = {"b c h w -> b c": (2, 3), "b t d -> b d": (1,), None: ()}[self.pattern]
        found: dict[str, torch.Tensor] = {}
        maps: dict[str, np.memmap] = {}

        def hook(name: str) -> Callable[..., None]:
            def keep(_module: nn.Module, _args: tuple, value: torch.Tensor) -> None:
                value = value[0] if isinstance(value, tuple) else value
                found[name] = value.mean(axes) if axes and value.ndim > max(axes) else value

            return keep

        with ExitStack() as stack, torch.no_grad():
            for name in self.layers:
                stack.callback(self.model.get_submodule(name).register_forward_hook(hook(name)).remove)
            for start in range(0, len(self.data), self.batch):
                self.model(self.data[start : start + self.batch])
                for name, value in found.items():
                    if name not in maps:
                        shape = (len(self.data), *value.shape[1:])
                        maps[name] = np.lib.format.open_memmap(self.folder / f"{name}.npy", "w+", np.float32, shape)
                    maps[name][start : start + self.batch] = value.numpy()
        for memory in maps.values():
            memory.flush()

    def extract(self, **options: object) -> None:
        to = self.folder / "features.zarr"
        shutil.rmtree(to, ignore_errors=True)
        reduce = {name: self.pattern for name in self.layers if name not in ("fc",)} if self.pattern else None
        rl.extract(
            self.model,
            self.data,
            self.layers,
            to=to,
            reduce=reduce,
            batch_size=self.batch,
            progress=False,
            resume=False,
            **options,
        )

    def close(self) -> None:
        shutil.rmtree(self.folder)


def resnet(batches: int, layers: list[str]) -> Task:
    torch.manual_seed(0)
    model = models.build("resnet18")[0]
    return Task(model, torch.randn(8 * batches, 3, 112, 112), 8, layers, "b c h w -> b c")


BLOCKS = [f"stages.{stage}.{block}" for stage in range(4) for block in range(2)]


class Tokens(nn.Module):
    """A transformer's blocks alone, on vectors."""

    def __init__(self, blocks: int = 8, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
                for _ in range(blocks)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def tokens(batches: int, layers: list[str], pattern: str | None) -> Task:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # hooks would turn it off, and plain forwards not
    return Task(Tokens(), torch.randn(4 * batches, 64, 256), 4, layers, pattern)


def tasks(quick: bool) -> dict[str, tuple[Task, float]]:
    """By name, with the budget: of hooks at full depth, of a forward for early layers."""
    batches, every = 10 if quick else 100, [f"blocks.{number}" for number in range(8)]
    return {
        "ResNet-18, 8 blocks and fc, pooled": (resnet(batches, [*BLOCKS, "fc"]), 1.05),
        "ResNet-18, the first 2 blocks, pooled": (resnet(batches, BLOCKS[:2]), 0.5),
        "transformer, 8 blocks, unreduced": (tokens(batches, every, None), 1.05),
        "transformer, blocks 0 to 2 of 8, mean over tokens": (tokens(batches, every[:3], "b t d -> b d"), 0.5),
    }


def costs(quick: bool) -> None:
    print(f"{'':52} hooks / plain   extract / plain   extract / hooks   budget")
    for name, (task, budget) in tasks(quick).items():
        contestants = {"plain": task.plain, "hooks": task.hooks, "extract": task.extract}
        clocks = {word: measure.clock(call) for word, call in contestants.items()}
        times = measure.interleave(clocks, 1.0, least_rounds=3 if quick else 5)
        of_plain, of_hooks = measure.ratio(times, "extract", "plain"), measure.ratio(times, "extract", "hooks")
        against = "of hooks" if budget > 1 else "of a forward"
        print(
            f"{name:52} {measure.ratio(times, 'hooks', 'plain'):13.2f} {of_plain:17.2f} {of_hooks:17.2f}   {budget} {against}"
        )
        task.close()


def files(quick: bool) -> None:
    """What shards of 8 MB cost beside writing the same bytes to one memmap."""
    torch.manual_seed(0)
    task = Task(
        nn.Sequential(nn.Linear(512, 512), *[nn.Linear(512, 512) for _ in range(7)]),
        torch.randn(16000, 512),
        250,
        [*"01234567"],
        None,
    )
    clocks = {
        "in memory": measure.clock(
            lambda: rl.extract(task.model, task.data, task.layers, batch_size=250, progress=False)
        ),
        "8 MB shards": measure.clock(lambda: task.extract(shard_bytes=8_000_000)),
        "hooks": measure.clock(task.hooks),
    }
    times = measure.interleave(clocks, 1.0, least_rounds=3 if quick else 7)
    print(
        f"\n8 linear layers of 512 units, 16,000 rows, 262 MB: shards of 8 MB / hooks and memmap"
        f" {measure.ratio(times, '8 MB shards', 'hooks'):.2f}; / kept in memory {measure.ratio(times, '8 MB shards', 'in memory'):.2f} (budget 1.1)"
    )
    task.close()


CHILD = """
import sys, torch, replaylens as rl
torch.set_num_threads(1)
class Rows(torch.utils.data.Dataset):
    def __len__(self): return int(sys.argv[1])
    def __getitem__(self, row): return torch.full((3, 32, 32), float(row % 97))
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2)).eval()
rl.extract(model, Rows(), ["conv2d*"], to=sys.argv[2], reduce="b c h w -> b c h", batch_size=50, progress=False)
print([int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def memory(quick: bool) -> None:
    """The peak of a process that extracts few rows, and many."""
    found = []
    for rows in (400, 4_000) if quick else (400, 4_000, 40_000):
        with tempfile.TemporaryDirectory(prefix="replaylens-bench-") as folder:
            run = [sys.executable, "-c", CHILD, str(rows), f"{folder}/x.zarr"]
            found.append(
                f"{rows:,} rows {subprocess.run(run, capture_output=True, check=True, text=True).stdout.strip()} MB"
            )
    print(f"\npeak memory of the process: {', '.join(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten batches instead of a hundred")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = process_time()
    for part in (costs, files, memory):
        part(options.quick)
    print(f"\n{process_time() - began:.0f} CPU seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
