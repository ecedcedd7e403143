"""`python bench/growth.py [--most N]`: how the cost of each task grows with the number of operations.

A chain (every operation reads the one before) and a wide graph (every operation reads the input, and a sum reads them all) of
1,000 operations and ten times as many each time, up to 100,000. The exponent is that of the last two sizes: 1 is a cost
in proportion, 2 four times the cost for twice the size. The budget is 1.1.
"""

import argparse
import gc
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import measure
import torch

import replaylens as rl
from replaylens._replay.plan import plan

BUDGET = 1.1


def chain(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = x.tanh()
        return x

    return model


def wide(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * number for number in range(count)]).sum(0)

    return model


class Nested(torch.nn.Module):
    """Modules within modules: one operation in each, `count` deep."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = Nested(count - 1) if count else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.tanh())


SHAPES = {"chain": chain, "wide": wide}


def tasks(model: Callable[..., torch.Tensor], x: torch.Tensor) -> dict[str, Callable[[rl.Program], object]]:
    """What is measured, each on a program of its own that has its graph, except where the graph is what is measured."""

    def planned(prog: rl.Program) -> object:
        graph = prog.graph
        wanted = [graph.positions[ref.node] for ref in graph.wanted_refs]
        return plan(graph, wanted, bytearray(b"\1" * len(graph)), (), rerun_all=True)

    def page(prog: rl.Program) -> object:
        with tempfile.TemporaryDirectory() as folder:
            return prog.page(Path(folder) / "page.html")

    return {
        "capture": lambda prog: rl.capture(model, x),
        "graph and labels": lambda prog: len(rl.capture(model, x).layer_labels),
        "plan": planned,
        "first replay": lambda prog: prog.replay(),
        "replay with a patch": lambda prog: prog.replay(patch={prog.layer_labels[1]: torch.zeros_like}),
        "print": lambda prog: str(prog),
        "code": lambda prog: prog.code,
        "DataFrame": lambda prog: prog.to_pandas(),
        "swap": lambda prog: prog.swap(prog.layer_labels[1], torch.sin),
        "slice": lambda prog: prog.slice(prog.layer_labels[1]),
        "check": lambda prog: prog.check(),
        "page": page,
    }


def seconds(shape: str, task: str, count: int) -> float:
    model, x = SHAPES[shape](count), torch.ones(2)
    prog = rl.capture(model, x)
    len(prog.layer_labels)
    run = tasks(model, x)[task]
    gc.collect()
    gc.disable()  # what a collection costs depends on everything else in the process
    try:
        return measure.clock(lambda: run(prog))()
    finally:
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help="some of the tasks; default: all")
    parser.add_argument("--most", type=int, default=100_000, help="operations of the largest graph")
    options = parser.parse_args()
    sizes = [1000 * 10**power for power in range(6) if 1000 * 10**power <= options.most]
    print("seconds".ljust(36), *[f"{size:>9,}" for size in sizes], " exponent")
    with torch.no_grad():
        for shape in SHAPES:
            for task in tasks(torch.tanh, torch.ones(1)):
                if options.tasks and task not in options.tasks:
                    continue
                seconds(shape, task, 100)
                took = [min(seconds(shape, task, size) for _ in range(2 if size > 10_000 else 3)) for size in sizes]
                exponent = math.log10(took[-1] / took[-2]) if len(took) > 1 else math.nan
                verdict = "" if math.isnan(exponent) or exponent <= BUDGET else f"  above {BUDGET}"
                print(f"{shape}: {task}".ljust(36), *[f"{one:9.3f}" for one in took], f"{exponent:9.2f}{verdict}")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
