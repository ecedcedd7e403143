"""Measure time, memory and import, each in the way that is most repeatable on a shared machine.

Time is the CPU time of this process on one thread: the clock stops while another process has the core. All contestants run
once per round, in a newly shuffled order, and a ratio is the median of the ratios within each round, so that slow drift
(temperature, caches, neighbours) affects both sides alike. Results are dropped after the clock has stopped.

Memory is counted, not sampled: every allocation and release by torch's CPU allocator, in order, as its profiler reports
them. Resident sizes would reveal more about malloc than about us. Python's own objects are counted by tracemalloc.
"""

import gc
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

Call = Callable[[], object]
Clock = Callable[[], float]  # does something, and returns the CPU seconds it took
Times = dict[str, list[float]]


def interleave(clocks: dict[str, Clock], seconds: float, least_rounds: int = 5) -> Times:
    """The reading of each clock, round by round, for about this many seconds in total, after one warm-up round."""
    names, times = list(clocks), {name: [] for name in clocks}
    shuffle = random.Random(0).shuffle
    for name in names:
        clocks[name]()
    end = process_time() + seconds
    while process_time() < end or len(times[names[0]]) < least_rounds:
        shuffle(names)
        for name in names:
            times[name].append(clocks[name]())
    return times


def ratio(times: Times, name: str, base: str) -> float:
    return median(mine / other for mine, other in zip(times[name], times[base], strict=True))


def clock(call: Call) -> Clock:
    def timed() -> float:
        start = process_time()
        result = call()
        seconds = process_time() - start
        del result
        return seconds

    return timed


def clock_keeping(model: nn.Module, args: tuple) -> Clock:
    """A forward pass that keeps the output of every leaf module: the least that a capture must do."""

    def timed() -> float:
        kept: list = []
        with ExitStack() as hooks:
            for leaf in leaves:
                hooks.callback(leaf.register_forward_hook(lambda _module, _args, output: kept.append(output)).remove)
            return clock(lambda: model(*args))()

    leaves = [module for module in model.modules() if not list(module.children())]
    return timed


def clock_after(model: nn.Module, args: tuple, site: tuple[str, int]) -> Clock:
    """The part of a forward pass after one call of a module: what a replay from there should cost."""
    path, number = site

    def timed() -> float:
        starts: list[float] = []
        hook = model.get_submodule(path).register_forward_hook(lambda *_: starts.append(process_time()))
        result = model(*args)
        end = process_time()
        hook.remove()
        del result
        return end - starts[number - 1]

    return timed


def peak_bytes(call: Call) -> int:
    """The peak of torch's CPU allocator during the call, beyond what was allocated before."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call()
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del result
    return peak


def activation_bytes(call: Call) -> int:
    """The size of everything that the torch calls of a forward pass compute; each new storage and write counts once."""
    with Activations() as seen:
        call()
    return seen.bytes


class Activations(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.versions: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no storage gets the address of a dead one

    def __torch_function__(self, function, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self.versions.setdefault(value.untyped_storage().data_ptr(), value._version)
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.count(value)
        return result

    def count(self, value: Tensor) -> None:
        address = value.untyped_storage().data_ptr()
        if address not in self.versions:
            self.bytes += value.untyped_storage().nbytes()
        elif self.versions[address] < value._version:
            self.bytes += value.nbytes
        self.versions[address] = value._version
        self.alive.append(value)


def python_bytes(call: Call) -> int:
    """The size of the Python objects kept alive by the call's result, without what C++ holds for them."""
    call()  # fills caches that persist anyway
    gc.collect()
    tracemalloc.start()
    result = call()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return kept


def import_seconds(package: str, name: str, repeats: int = 7, *, compiled: bool = True) -> float:
    """CPU seconds of `from package import name` in a fresh process that has imported torch.

    The name is that of the capture, because a package can defer its imports until first use. `compiled=False`: Python
    finds no compiled files of the package and writes none.
    """
    load = f"from {package} import {name}"
    hide = "" if compiled else f"import sys; sys.dont_write_bytecode = True; sys.pycache_prefix = {os.devnull!r}; "
    code = f"import torch, time; {hide}start = time.process_time(); {load}; print(time.process_time() - start)"
    run = [sys.executable, "-c", code]
    return median(float(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(repeats))


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what the profiler writes to stderr from C++."""
    stream = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stream, 2)
        os.close(stream)


torch.set_num_threads(1)
