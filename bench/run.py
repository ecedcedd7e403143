"""`python bench/run.py [models] [--quick]`: the cost of replaylens as ratios to the plain model, next to its budgets.

TorchLens fills the last column if it is installed. measure.py explains how each figure
is obtained.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import measure
import models
import torch

import replaylens as rl
from replaylens._replay.plan import plan

CNNS = ("alexnet", "resnet18")
PACKAGE = "package"  # the row that belongs to no model
NOISE = 0.02  # how much a figure varies between runs when nothing has changed


class Measure(NamedTuple):
    text: str
    budgets: dict[str, float]  # by model


MEASURES = {
    "noise": Measure("plain forward / itself: the noise", {}),
    "capture": Measure(
        "capture / plain forward",
        {
            "alexnet": 1.1,
            "resnet18": 1.15,
            "gpt2": 1.08,
            "mlp200": 2.3,
            "rnn500": 2.5,
            "generate": 5.0,
            "generate-gpt2": 1.5,
        },
    ),
    "keeping": Measure("capture / plain forward that keeps its activations", dict.fromkeys(CNNS, 1.1)),
    "grad": Measure("capture / plain forward, gradients on", dict.fromkeys(CNNS, 1.1) | {"gpt2": 1.25, "mlp200": 2.5}),
    "nothing": Measure('capture with save="none" / capture', dict.fromkeys(models.NAMES, 1.0)),
    "replay": Measure("full replay / plain forward", dict.fromkeys((*CNNS, "gpt2"), 1.0) | {"mlp200": 0.7}),
    "middle": Measure("replay from the middle / the ops after it", dict.fromkeys(models.NAMES, 1.1)),
    "grads": Measure("gradients at every node / plain forward", dict.fromkeys(("resnet18", "gpt2", "mlp200"), 2.7)),
    "graph": Measure("the graph, built on first access / plain forward", {"mlp200": 4.0}),
    "plan": Measure("planning a full replay, us per node", dict.fromkeys(models.NAMES, 1.0)),
    "first": Measure("first full replay minus a later one, us per node", {}),
    "site": Measure(
        "first replay at a new site minus a later one, us per node", dict.fromkeys(("mlp200", "rnn500"), 1.0)
    ),
    "lookup": Measure("a value that was not kept / a replay with keep= that name", dict.fromkeys(models.NAMES, 1.0)),
    "peak": Measure("peak bytes of capture / (plain forward + activations)", dict.fromkeys(models.NAMES, 1.05)),
    "bytes": Measure("bytes kept per op besides activations", dict.fromkeys(models.NAMES, 2048)),
    "bytes_used": Measure("the same, with all names and one compiled replay", {}),
    "loop": Measure("graph and labels of 20,000 operations in a loop of 5,000 iterations, seconds", {PACKAGE: 2.0}),
    "page": Measure("the page of a program, seconds", {"gpt2": 0.3}),
    "import": Measure("import beyond torch, seconds", {PACKAGE: 0.12}),
    "uncompiled": Measure("the same where Python has not compiled the package, seconds", {PACKAGE: 0.25}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="model", help=f"any of {', '.join(models.NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, more noise")
    options = parser.parse_args()
    seconds = 3.0 if options.quick else 15.0

    values: dict[tuple[str, str], float] = {}
    peers: dict[tuple[str, str], str] = {}
    for name in options.names or models.NAMES:
        print(f"measuring {name} ...", file=sys.stderr)
        values |= {(key, name): value for key, value in figures(name, seconds)}
        peers |= {(key, name): cell for key, cell in torchlens_cells(name, seconds).items()}
    values["loop", PACKAGE] = median([loop_seconds() for _ in range(3)])
    values["import", PACKAGE] = measure.import_seconds("replaylens", "capture")
    values["uncompiled", PACKAGE] = measure.import_seconds("replaylens", "capture", compiled=False)
    if has_torchlens():
        peers["import", PACKAGE] = f"{measure.import_seconds('torchlens', 'trace'):.3g}"

    heading = ("", "model", "replaylens", "budget", "holds", "TorchLens")
    in_order = sorted(values, key=lambda row: list(MEASURES).index(row[0]))
    print(table([heading, *(cells(*row, values[row], peers.get(row, "")) for row in in_order)]))


def figures(name: str, seconds: float) -> Iterator[tuple[str, float]]:
    model, args = models.build(name)
    with torch.no_grad():
        if name in models.GENERATING:
            clocks = {
                "plain": measure.clock(lambda: model(*args)),
                "capture": measure.clock(lambda: rl.capture(model, *args)),
            }
            yield "capture", measure.ratio(measure.interleave(clocks, seconds), "capture", "plain")
            return
        yield from ratios(model, args, models.MIDDLE[name], seconds)
        yield "page", page_seconds(rl.capture(model, *args))
        yield from planning(rl.capture(model, *args))
        yield "peak", peak_ratio(model, args)
        yield "bytes", bytes_an_op(model, args, used=False)
        yield "bytes_used", bytes_an_op(model, args, used=True)
    with torch.enable_grad():
        clocks = {
            "plain": measure.clock(lambda: model(*args)),
            "capture": measure.clock(lambda: rl.capture(model, *args)),
        }
        yield "grad", measure.ratio(measure.interleave(clocks, seconds), "capture", "plain")


def ratios(model: torch.nn.Module, args: tuple, site: tuple[str, int], seconds: float) -> Iterator[tuple[str, float]]:
    prog = rl.capture(model, *args)
    label = "{}:{}".format(*site)

    def metric(output: object) -> torch.Tensor:
        return getattr(output, "logits", output).flatten()[-1]

    def clock_of_graph() -> float:
        fresh = rl.capture(model, *args)
        return measure.clock(lambda: fresh.graph)()

    changed, late = {label: prog[label].value * 0.5}, prog.graph.calls[len(prog.graph.calls) * 3 // 4].name
    times = measure.interleave(
        {
            "plain": measure.clock(lambda: model(*args)),
            "plain again": measure.clock(lambda: model(*args)),
            "keeping": measure.clock_keeping(model, args),
            "after": measure.clock_after(model, args, site),
            "capture": measure.clock(lambda: rl.capture(model, *args)),
            "nothing": measure.clock(lambda: rl.capture(model, *args, save="none")),
            "graph": clock_of_graph,
            "grads": measure.clock(lambda: prog.grads(of=metric)),
            "replay": measure.clock(lambda: prog.replay(keep="output")),
            "middle": measure.clock(lambda: prog.replay(from_=label, patch=changed, keep="output")),
            "keep": measure.clock(lambda: prog.replay(patch=changed, keep=late)),
            "lookup": lambda: (run := prog.replay(patch=changed)) and measure.clock(lambda: run[late])(),
        },
        seconds,
    )
    yield "noise", measure.ratio(times, "plain again", "plain")
    yield "capture", measure.ratio(times, "capture", "plain")
    yield "keeping", measure.ratio(times, "capture", "keeping")
    yield "nothing", measure.ratio(times, "nothing", "capture")
    yield "graph", measure.ratio(times, "graph", "plain")
    yield "grads", measure.ratio(times, "grads", "plain")
    yield "replay", measure.ratio(times, "replay", "plain")
    yield "middle", measure.ratio(times, "middle", "after")
    yield "lookup", measure.ratio(times, "lookup", "keep")


def page_seconds(prog: rl.Program) -> float:
    """The first page of a program whose graph and labels exist."""
    len(prog.layers)
    with TemporaryDirectory() as folder:
        return measure.clock(lambda: prog.page(Path(folder) / "page.html"))()


def planning(prog: rl.Program) -> Iterator[tuple[str, float]]:
    """A plan that runs every call; and everything that a program does on its first replay only: plan, compile, cache."""
    graph = prog.graph
    prog.replay()
    wanted = [graph.positions[ref.node] for ref in graph.wanted_refs]
    known = bytearray(b"\1" * len(graph))

    def first() -> float:
        prog._record.caches.clear()
        del prog._record.compiled
        return measure.clock(prog.replay)()

    clocks = {
        "plan": measure.clock(lambda: plan(graph, wanted, known, (), rerun_all=True)),
        "first": first,
        "later": measure.clock(prog.replay),
    }
    times = measure.interleave(clocks, seconds=1)
    yield "plan", 1e6 * median(times["plan"]) / len(graph)
    yield "first", 1e6 * (median(times["first"]) - median(times["later"])) / len(graph)
    yield "site", 1e6 * median(site_seconds(prog)) / len(graph)


def site_seconds(prog: rl.Program, most: int = 40) -> Iterator[float]:
    """What a first replay at a site costs beyond a later one, for sites in the first half of a program."""
    names = [call.name for call in prog.graph.calls if len(call.spec) == 1 and call.spec[0].dtype.is_floating_point]
    for name in names[: len(names) // 2][:: max(1, len(names) // 2 // most)]:
        patched = measure.clock(lambda name=name: prog.replay(patch={name: rl.Scale(0.5)}))
        first, _, later = patched(), patched(), patched()
        yield first - later


def peak_ratio(model: torch.nn.Module, args: tuple) -> float:
    def forward() -> object:
        return model(*args)

    forward()
    rl.capture(model, *args)  # warm up both sides
    plain = measure.peak_bytes(forward) + measure.activation_bytes(forward)
    return measure.peak_bytes(lambda: rl.capture(model, *args)) / plain


def bytes_an_op(model: torch.nn.Module, args: tuple, *, used: bool) -> float:
    """For a program with its graph and values; and for one that also holds its names and a compiled replay."""

    def program() -> rl.Program:
        prog = rl.capture(model, *args)
        assert prog._record.graph
        if used:
            len(prog.layers)
            prog.replay()
        return prog

    return measure.python_bytes(program) / len(program().graph.calls)


def loop_seconds(rounds: int = 5000) -> float:
    """From a finished capture to its names, for a loop over one layer."""
    layer = torch.nn.Linear(4, 4)

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(rounds):
            x = torch.tanh(layer(x) * 0.5) + 1
        return x

    with torch.no_grad():
        prog = rl.capture(model, torch.ones(1, 4))
    seconds = measure.clock(lambda: prog.graph)()
    assert prog.layer_labels[-2] == f"add_1_4:{rounds}"
    return seconds


def torchlens_cells(name: str, seconds: float) -> dict[str, str]:
    """TorchLens's cells by measure, from a separate process."""
    if not has_torchlens() or name in models.GENERATING:
        return {}
    script = Path(__file__).with_name("torchlens_figures.py")
    run = subprocess.run([sys.executable, script, name, str(seconds)], stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


def has_torchlens() -> bool:
    return find_spec("torchlens") is not None


def cells(key: str, model: str, value: float, peer: str) -> tuple[str, ...]:
    text, budgets = MEASURES[key]
    budget = budgets.get(model)
    return text, model, number(value), "" if budget is None else f"{budget:g}", verdict(value, budget), peer


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def verdict(value: float, budget: float | None) -> str:
    if budget is None:
        return ""
    return "yes" if value <= budget else "nearly" if value <= budget * (1 + NOISE) else "NO"


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


if __name__ == "__main__":
    main()
