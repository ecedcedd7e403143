"""`python bench/check.py [models]`: the cost of `prog.check()` as a ratio to the plain forward, next to its budget; and
how it grows from 1,000 to 10,000 operations, in a chain and in a wide graph.
"""

import sys
from collections.abc import Callable
from statistics import median

import measure
import models
import torch
from torch import Tensor

import replaylens as rl

BUDGETS = {"mlp200": 30.0, "rnn500": 60.0, "alexnet": 4.5, "resnet18": 4.5, "gpt2": 4.5}
FEW, MANY, MOST_GROWTH = 1_000, 10_000, 12.0


def chain(x: Tensor, count: int) -> Tensor:
    """Operations that each read the one before."""
    for _ in range(count // 2):
        x = torch.relu(x) + 1
    return x


def wide(x: Tensor, count: int) -> Tensor:
    """Operations that read one input, and one that reads half of them."""
    return torch.stack([torch.relu(x + number) for number in range(count // 2)])


GROWTHS: dict[str, Callable[[Tensor, int], Tensor]] = {"chain": chain, "wide": wide}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or (*BUDGETS, *GROWTHS):
        with torch.no_grad():
            print_growth(name) if name in GROWTHS else print_ratio(name)


def print_ratio(name: str) -> None:
    model, args = models.build(name)
    clocks = {"plain": measure.clock(lambda: model(*args)), "check": clock_of_check(rl.capture(model, *args))}
    times = measure.interleave(clocks, 20.0)
    budget = f"budget {BUDGETS[name]:g}" if name in BUDGETS else "no budget"
    print(f"{name}: check / plain forward = {measure.ratio(times, 'check', 'plain'):.2f}, {budget}")


def print_growth(name: str) -> None:
    x = torch.randn(4, 4)
    clocks = {str(count): clock_of_check(rl.capture(GROWTHS[name], x, count)) for count in (FEW, MANY)}
    times = measure.interleave(clocks, 10.0)
    seconds = median(times[str(MANY)])
    growth = measure.ratio(times, str(MANY), str(FEW))
    print(f"{name}: check of {MANY:,} / {FEW:,} operations = {growth:.2f}, budget {MOST_GROWTH:g}; {seconds:.2f} s")


def clock_of_check(prog: rl.Program) -> measure.Clock:
    return measure.clock(lambda: bool(prog.check(progress=False)) or fail(prog))


def fail(prog: rl.Program) -> None:
    raise SystemExit(str(prog.check()))


if __name__ == "__main__":
    main()
