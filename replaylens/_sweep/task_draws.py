"""Random numbers of tasks: streams of their own, which follow from the states of the user's generators.

In, here: those generators, torch's, Python's and numpy's. In, there: the number of a task. Out: what the task gives,
and which generators it drew from. Processes that start alike have generators in one state, so that without this all of
them would draw the same. The streams do not depend on which process does a task, nor on how many there are.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from .._ir.interrupts import run_then, user_generator_state

T = TypeVar("T")


class _Source(NamedTuple):
    """A global generator: its state, read and set; how it is seeded; and one number drawn from it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]
    draw: Callable[[], Any]


def _sources() -> dict[str, _Source]:
    """The generators that there are in this process."""
    torchs = torch.default_generator
    found = {
        "torch": _Source(torchs.get_state, torchs.set_state, torchs.manual_seed, lambda: torch.rand(())),
        "random": _Source(random.getstate, random.setstate, random.seed, random.random),
    }
    if torch.cuda.is_initialized():
        cuda = torch.cuda
        write, seed = cuda.set_rng_state_all, cuda.manual_seed_all
        found["cuda"] = _Source(cuda.get_rng_state_all, write, seed, lambda: torch.rand((), device="cuda"))
    if "numpy" in sys.modules:
        drawing = sys.modules["numpy"].random
        found["numpy"] = _Source(
            drawing.get_state, drawing.set_state, lambda seed: drawing.seed(seed % 2**32), drawing.random_sample
        )
    return found


def _digest(*parts: Any) -> int:
    text = repr([part.tolist() if isinstance(part, torch.Tensor) else part for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _told(state: Any) -> Any:
    """A state as what two equal ones have in common."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, (tuple, list)):
        return [_told(part) for part in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


def seeds_now() -> dict[str, int]:
    """What the streams of tasks follow from. Nothing is drawn."""
    states = {name: source.read() for name, source in _sources().items()}
    states["torch"] = user_generator_state()
    return {name: _digest(name, _told(state)) for name, state in states.items()}


def drawing_apart(seeds: Mapping[str, int], task: int, work: Callable[[], T]) -> tuple[T, frozenset[str]]:
    """What a task gives, and from which generators it drew; they are left as they were."""
    sources = _sources()
    before = {name: source.read() for name, source in sources.items()}

    def leave() -> None:
        for name, state in before.items():
            sources[name].write(state)

    def run() -> tuple[T, frozenset[str]]:
        for name, source in sources.items():
            source.seed(_digest(seeds.get(name, name), task))
        seeded = {name: _told(source.read()) for name, source in sources.items()}
        made = work()
        return made, frozenset([name for name, source in sources.items() if _told(source.read()) != seeded[name]])

    return run_then(run, leave)


def go_on(names: Iterable[str]) -> None:
    """Move generators on from which tasks drew, so that the next sweep draws other numbers."""
    sources = _sources()
    for name in {*names} & {*sources}:
        sources[name].draw()
