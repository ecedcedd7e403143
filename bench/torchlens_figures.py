"""TorchLens on the same models: `python bench/torchlens_figures.py alexnet 15` prints its table cells as JSON.

It runs in a separate process, because TorchLens wraps torch's functions and leaves them wrapped: the plain forward is timed
before TorchLens is imported.
"""

import json
import sys
import warnings
from importlib import import_module
from statistics import median

import measure
import models
import torch


@torch.no_grad()
def cells(name: str, seconds: float) -> dict[str, str]:
    model, args = models.build(name)
    module, number = models.MIDDLE[name]
    forward, rest = measure.clock(lambda: model(*args)), measure.clock_after(model, args, (module, number))
    plain = {key: median(times) for key, times in measure.interleave({"all": forward, "rest": rest}, seconds).items()}

    tl = import_module("torchlens")
    replayable = tl.options.CaptureOptions(intervention_ready=True)
    in_place = tl.options.InterventionOptions(engine="replay", confirm_mutation=True)

    trace = tl.trace(model, args, capture=replayable)
    site = trace.find_sites(tl.module(module), max_fanout=number * 2)[number - 1]

    clocks = {
        "capture": measure.clock(lambda: tl.trace(model, args)),
        "replayable": measure.clock(lambda: tl.trace(model, args, capture=replayable)),
        "replay": measure.clock(lambda: trace.do(site, lambda out, *, hook: out * 0.5, intervention=in_place)),
    }
    theirs = {key: median(times) for key, times in measure.interleave(clocks, seconds, least_rounds=1).items()}
    kept = measure.python_bytes(lambda: tl.trace(model, args, capture=replayable)) / len(trace.layer_list)
    return {
        "capture": f"{theirs['capture'] / plain['all']:.1f}, replayable {theirs['replayable'] / plain['all']:.1f}",
        "middle": f"{theirs['replay'] / plain['rest']:.2f}",
        "bytes": f"{kept:.0f}",
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(cells(sys.argv[1], float(sys.argv[2]))))
