"""`python bench/files.py [models]`: what it costs to save and load a program, next to its budget.

Saving and loading are compared with `torch.save` and `torch.load(mmap=True)` of the same tensors in one list. The files
lie in memory (/dev/shm) where there is such a folder, so that no disk is measured. `verify` is the speed of the digests
alone: a load with them less one without.

Of the two that write, the best of several in a row counts: on a virtual machine the pages of a new file are slow to
have (five times the rest) where the host has taken them back meanwhile, which is luck and no work of either.
"""

import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import measure
import models
import torch
from torch import nn

import replaylens as rl

MODELS = ("lstm", "resnet18", "gpt2")
SAVE, LOAD, VERIFY, HEADER, MAPPED = 2.0, 1.0, 1e9, 500.0, 0.020
LARGE = 20_000_000  # bytes: below, what a file costs beyond its tensors is most of it, and the ratios are shown alone


def main() -> None:
    torch.set_num_threads(1)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for name in sys.argv[1:] or MODELS:
        with torch.no_grad(), tempfile.TemporaryDirectory(dir=folder) as place:
            print_costs(name, Path(place))


def build(name: str) -> tuple[nn.Module, tuple]:
    if name == "lstm":
        torch.manual_seed(0)
        return nn.LSTM(32, 64, batch_first=True).eval(), (torch.randn(2, 16, 32),)
    return models.build(name)


def print_costs(name: str, place: Path) -> None:
    model, args = build(name)
    prog = rl.capture(model, *args)
    ours, theirs = place / "ours.rlp", place / "theirs.pt"
    tensors = [*prog._record.values.values()]
    clocks = {
        "save": measure.clock(lambda: prog.save(ours)),
        "torch.save": measure.clock(lambda: torch.save(tensors, theirs)),
        "load": measure.clock(lambda: rl.load(ours, verify=False)),
        "verified": measure.clock(lambda: rl.load(ours)),
        "torch.load": measure.clock(lambda: torch.load(theirs, mmap=True)),
    }
    clocks["save"](), clocks["torch.save"]()
    times = measure.interleave(clocks, 20.0)
    for name_of_clock in ("save", "torch.save"):  # by itself, several times in a row: see above
        times[name_of_clock] = [clocks[name_of_clock]() for _ in range(8)]
    info = rl.inspect(ours)
    verify = median(one - other for one, other in zip(times["verified"], times["load"], strict=True))
    load = median(times["load"])
    rows = [
        ("save / torch.save", min(times["save"]) / min(times["torch.save"]), SAVE, "{:.2f}"),
        ("load without digests / torch.load(mmap)", measure.ratio(times, "load", "torch.load"), LOAD, "{:.2f}"),
        ("header bytes per node", info.header_bytes / len(info.layers), HEADER, "{:.0f}"),
    ]
    print(
        f"{name}: {info.nbytes / 1e6:.1f} MB, {len(info.layers)} nodes; torch.save makes {theirs.stat().st_size / 1e6:.1f} MB"
    )
    for what, found, budget, form in rows:
        print(f"    {what} = {form.format(found)}, budget {budget:g}")
    if info.nbytes > LARGE:
        print(f"    digests at {info.nbytes / verify / 1e9:.2f} GB/s, budget {VERIFY / 1e9:g}")
    budget = f", budget {MAPPED * 1e3:g}" if name == "gpt2" else ""
    print(f"    mapped in {load * 1e3:.2f} ms{budget}; saved in {min(times['save']) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
