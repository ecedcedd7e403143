"""A sweep as another process gets it: how it is prepared there, and proof that it is the same.

In, here: a function that prepares the sweep, and what to compare. In, there: the same, from a pickle. Out, there: the
function that does a task. Results are the same to the last bit only if both processes run the same passes and the same
metric, so a process that would run other ones says so, and does nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._ir.graph import Graph
from .._ir.interrupts import restoring_modes
from .._ir.node import Context
from .._ir.settings import settings
from .._ir.struct import StructKeys
from .._ir.torch_private import is_any_autocast_on, pytree
from .._ir.trees import Branch, without_originals
from .._replay.interpreter import modes
from .._version import __version__
from ..errors import PlanDiffers
from .batch_runner import PassResult
from .sweep_runner import BatchedSweep, LaneResult, Likeness, copied_output
from .task_draws import drawing_apart, seeds_now


def versions() -> str:
    """What a process computes with."""
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    return f"replaylens {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {threads}"


def context_now() -> Context:
    """The modes and settings of this thread, which a metric may read. The default dtype is always among them."""
    cached, is_cast = torch.is_autocast_cache_enabled(), is_any_autocast_on()
    devices = [device for device in ("cpu", "cuda") if is_cast and torch.is_autocast_enabled(device)]
    autocast = tuple([(device, torch.get_autocast_dtype(device), cached) for device in devices])
    return Context(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, settings(_NO_DEFAULT))


_NO_DEFAULT = torch.bool  # which is never the default


@frozen
class Surroundings:
    """What a user's function may ask of the thread and the process around it, and kernels follow."""

    context: Context = field(factory=context_now)
    device: str = field(factory=lambda: str(torch.get_default_device()))
    is_deterministic: bool = field(factory=torch.are_deterministic_algorithms_enabled)
    only_warns: bool = field(factory=torch.is_deterministic_algorithms_warn_only_enabled)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A block in which all is as it was there."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        with modes(self.context), _default_device(self.device):
            try:
                _be_deterministic(self.is_deterministic, self.only_warns)
                yield
            finally:
                _be_deterministic(*before)


def _default_device(device: str) -> Any:
    return nullcontext() if str(torch.get_default_device()) == device else torch.device(device)


def _be_deterministic(wanted: bool, only_warns: bool) -> None:
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (wanted, only_warns):
        torch.use_deterministic_algorithms(wanted, warn_only=only_warns)


@frozen(eq=False)
class SweepJob:
    """What all tasks of a sweep share."""

    make: Callable[[], BatchedSweep]
    likeness: Likeness
    seeds: Mapping[str, int] = field(factory=seeds_now)
    surroundings: Surroundings = field(factory=Surroundings)
    versions: str = field(factory=versions)


def begin_sweep(job: SweepJob) -> Callable[[int], Any]:
    """The function that does a task of a sweep, in a process that does some of them."""

    def prepare() -> BatchedSweep:
        sweep = job.make()
        if unlike := job.likeness.unlike(sweep):
            raise PlanDiffers(
                f"a worker would run this sweep {unlike}.\nhere:      {job.versions}\nin the worker:  {versions()}\n"
                "Give both the same versions; a metric must compute the same wherever it is called: what it reads of a "
                "module is what the module is given as it is imported."
            )
        return sweep

    with job.surroundings.entered():
        sweep, _ = drawing_apart({}, 0, lambda: restoring_modes(prepare))

    def work(task: int) -> Any:
        with job.surroundings.entered():
            result, drew = drawing_apart(job.seeds, task, lambda: restoring_modes(lambda: sweep.task(task)))
            return _to_send(result if result is None else evolve(result, drew=drew))

    return work


def _to_send(result: Any) -> Any:
    """A result without more memory than it fills: a pickle holds the whole storage of a tensor."""
    if isinstance(result, PassResult):
        return evolve(result, rows={ref: (lanes, data.clone()) for ref, (lanes, data) in result.rows.items()})
    if isinstance(result, LaneResult):
        return evolve(result, value=copied_output(result.value))
    return result


@frozen(eq=False, repr=False)
class KeyText:
    """In the place of a key that need not be sent: its words, for errors."""

    text: str

    def __repr__(self) -> str:
        return self.text


def named_as(variants: Mapping[Any, Any]) -> dict[Any, Any]:
    """The patches of variants, whose keys may be anything."""
    return {KeyText(repr(key)): patches for key, patches in variants.items()}


def output_to_send(graph: Graph) -> Any:
    """The output of a program, if it is of classes that a file does not hold, and a metric may call methods of."""
    return _without_hollows(without_originals(graph.output)) if _has_classes(graph.output) else None


def _has_classes(tree: Any) -> bool:
    if type(tree) is tuple:
        return any(map(_has_classes, tree))
    return type(tree) is Branch and (tree.kind not in (list, dict) or any(map(_has_classes, tree.items)))


def _without_hollows(tree: Any) -> Any:
    """The same without empty objects of users' classes, which a pickle would ask for attributes that they lack."""
    if type(tree) is tuple:
        return tuple(map(_without_hollows, tree))
    if type(tree) is not Branch:
        return tree
    is_object = tree.count is None and not isinstance(tree.like, (pytree.TreeSpec, StructKeys))
    return evolve(tree, items=_without_hollows(tree.items), like=None if is_object else tree.like)
