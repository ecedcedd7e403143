"""`python bench/check.py [models]`: the cost of `prog.check()` as a ratio to the plain forward, next to its budget."""

import sys

import measure
import models
import torch

import replaylens as rl

BUDGETS = {"alexnet": 6.0, "resnet18": 6.0, "gpt2": 12.0}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or BUDGETS:
        model, args = models.build(name)
        with torch.no_grad():
            prog = rl.capture(model, *args)
            clocks = {
                "plain": measure.clock(lambda model=model, args=args: model(*args)),
                "check": measure.clock(lambda prog=prog: bool(prog.check(progress=False)) or fail(prog)),
            }
            times = measure.interleave(clocks, 20.0)
        budget = f"budget {BUDGETS[name]:g}" if name in BUDGETS else "no budget"
        print(f"{name}: check / plain forward = {measure.ratio(times, 'check', 'plain'):.2f}, {budget}")


def fail(prog: rl.Program) -> None:
    raise SystemExit(str(prog.check()))


if __name__ == "__main__":
    main()
