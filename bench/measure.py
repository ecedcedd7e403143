"""How things are measured here: time, memory and import, each in the way that repeats best on a shared machine.

Time is CPU time of this process on one thread: while another process has the core, the clock stands still. All contestants
run once a round, in an order that is shuffled anew, and a ratio is the median of the ratios within each round: slow drift
(temperature, caches, neighbours) touches both sides alike. What a call gives is dropped after the clock has stopped.

Memory is counted, not sampled: every allocation and release by torch's CPU allocator, in order, as its profiler reports
them. Resident sizes would tell more about malloc than about us. Python's own objects are counted by tracemalloc.
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
Clock = Callable[[], float]  # does something, and gives the CPU seconds that it took
Times = dict[str, list[float]]


def interleave(clocks: dict[str, Clock], seconds: float, least_rounds: int = 5) -> Times:
    """What each clock says, round by round, for about so many seconds in all. One round before is for warming up."""
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
    """A forward pass that keeps what every module without children gives: the least that a capture must do."""

    def timed() -> float:
        kept: list = []
        with ExitStack() as hooks:
            for leaf in leaves:
                hooks.callback(leaf.register_forward_hook(lambda _module, _args, output: kept.append(output)).remove)
            return clock(lambda: model(*args))()

    leaves = [module for module in model.modules() if not list(module.children())]
    return timed


def clock_after(model: nn.Module, args: tuple, site: tuple[str, int]) -> Clock:
    """Of a forward pass, what comes after one call of a module: what a replay from there should cost."""
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
    """The most that torch's CPU allocator had given out at once during the call, beyond what it had before."""
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
    """The size of everything that the torch calls of a forward pass compute, each new storage and each write counted once."""
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
    """What the Python objects weigh that the call's result keeps alive; what C++ holds for them is not counted."""
    call()  # fills the caches that are kept anyway
    gc.collect()
    tracemalloc.start()
    result = call()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return kept


def import_seconds(package: str, name: str, repeats: int = 7) -> float:
    """CPU seconds of `from package import name` in a fresh process that has imported torch. The name is that of the
    capture, because a package can put off its imports until it is used.
    """
    load = f"from {package} import {name}"
    code = f"import torch, time; start = time.process_time(); {load}; print(time.process_time() - start)"
    run = [sys.executable, "-c", code]
    return median(float(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(repeats))


@contextmanager
def quiet() -> Iterator[None]:
    """The profiler's own lines on the error stream, which come from C++, go nowhere."""
    stream = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stream, 2)
        os.close(stream)


torch.set_num_threads(1)
