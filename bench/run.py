"""`python bench/run.py [models] [--quick]`: what replaylens costs, as ratios to the plain model, beside its budgets.

The budgets are those of the design. TorchLens fills the last column where it is installed. How each figure comes about is
said in measure.py.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import measure
import models
import torch

import replaylens as rl

CNNS = ("alexnet", "resnet18")
PACKAGE = "package"  # the row that is of no model


class Measure(NamedTuple):
    text: str
    budgets: dict[str, float]  # by model


MEASURES = {
    "noise": Measure("plain forward / itself: the noise", {}),
    "capture": Measure("capture / plain forward", {"gpt2": 1.25, "mlp200": 2.5}),
    "keeping": Measure("capture / plain forward that keeps its activations", dict.fromkeys(CNNS, 1.1)),
    "grad": Measure("capture / plain forward, gradients on", dict.fromkeys(CNNS, 1.1) | {"gpt2": 1.25, "mlp200": 2.5}),
    "replay": Measure("full replay / plain forward", dict.fromkeys((*CNNS, "gpt2"), 1.0) | {"mlp200": 0.75}),
    "middle": Measure("replay from the middle / the ops after it", dict.fromkeys(models.NAMES, 1.1)),
    "plan": Measure("planning a replay, us a node", dict.fromkeys(models.NAMES, 1.0)),
    "peak": Measure("peak bytes of capture / (plain forward + activations)", dict.fromkeys(models.NAMES, 1.05)),
    "bytes": Measure("bytes kept an op besides activations", dict.fromkeys(models.NAMES, 2048)),
    "import": Measure("import beyond torch, seconds", {PACKAGE: 0.15}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="model", help=f"of {', '.join(models.NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, more noise")
    options = parser.parse_args()
    seconds = 2.0 if options.quick else 15.0

    rows = []
    for name in options.names or models.NAMES:
        print(f"measuring {name} ...", file=sys.stderr)
        peer = torchlens_cells(name, seconds)
        rows += [row(key, name, value, peer) for key, value in figures(name, seconds)]
    rows.append(row("import", PACKAGE, measure.import_seconds("replaylens"), torchlens_import()))
    rows.sort(key=lambda cells: [m.text for m in MEASURES.values()].index(cells[0]))
    print(table([("", "model", "replaylens", "budget", "holds", "TorchLens"), *rows]))


def figures(name: str, seconds: float) -> Iterator[tuple[str, float]]:
    model, args = models.build(name)
    with torch.no_grad():
        yield from ratios(model, args, models.MIDDLE[name], seconds)
        prog = rl.capture(model, *args)
        #yield "plan", measure.planning_seconds(prog) * 1e6 / len(prog.graph.nodes)
        yield "peak", peak_ratio(model, args)
        yield "bytes", measure.python_bytes(lambda: looked_at(rl.capture(model, *args))) / len(prog.layers)
    with torch.enable_grad():
        clocks = {
            "plain": measure.clock(lambda: model(*args)),
            "capture": measure.clock(lambda: rl.capture(model, *args)),
        }
        yield "grad", measure.ratio(measure.interleave(clocks, seconds), "capture", "plain")


def ratios(model: torch.nn.Module, args: tuple, site: tuple[str, int], seconds: float) -> Iterator[tuple[str, float]]:
    prog = rl.capture(model, *args)
    label = "{}:{}".format(*site)
    changed = {label: prog[label].value * 0.5}
    times = measure.interleave(
        {
            "plain": measure.clock(lambda: model(*args)),
            "plain again": measure.clock(lambda: model(*args)),
            "keeping": measure.clock_keeping(model, args),
            "after": measure.clock_after(model, args, site),
            "capture": measure.clock(lambda: rl.capture(model, *args)),
            "replay": measure.clock(lambda: prog.replay(keep="output")),
            "middle": measure.clock(lambda: prog.replay(from_=label, patch=changed, keep="output")),
        },
        seconds,
    )
    yield "noise", measure.ratio(times, "plain again", "plain")
    yield "capture", measure.ratio(times, "capture", "plain")
    yield "keeping", measure.ratio(times, "capture", "keeping")
    yield "replay", measure.ratio(times, "replay", "plain")
    yield "middle", measure.ratio(times, "middle", "after")


def peak_ratio(model: torch.nn.Module, args: tuple) -> float:
    plain = measure.peak_bytes(lambda: model(*args)) + measure.activation_bytes(lambda: model(*args))
    return measure.peak_bytes(lambda: rl.capture(model, *args)) / plain


def looked_at(prog: rl.Program) -> rl.Program:
    """With all that a program computes when it is first asked: it keeps that too."""
    prog.graph, prog.layers, prog.replay()
    return prog


def torchlens_cells(name: str, seconds: float) -> dict[str, str]:
    """By measure. TorchLens has a process of its own, and time enough for a handful of rounds."""
    if find_spec("torchlens") is None:
        return {}
    script = Path(__file__).with_name("torchlens_figures.py")
    run = subprocess.run([sys.executable, script, name, str(seconds)], stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


def torchlens_import() -> dict[str, str]:
    return {"import": f"{measure.import_seconds('torchlens'):.3g}"} if find_spec("torchlens") else {}


def row(key: str, model: str, value: float, peer: dict[str, str]) -> tuple[str, ...]:
    text, budgets = MEASURES[key]
    if model not in budgets:
        return text, model, f"{value:.3g}", "", "", peer.get(key, "")
    holds = "yes" if value <= budgets[model] else "NO"
    return text, model, f"{value:.3g}", f"{budgets[model]:g}", holds, peer.get(key, "")


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows)


if __name__ == "__main__":
    main()
