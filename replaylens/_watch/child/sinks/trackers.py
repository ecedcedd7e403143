"""Weights & Biases and trackio: the numbers of all samples of a step, logged together.

In: samples with their numbers. Out: a run of the project. Both may start processes or threads of their own; `close`
ends them. A step is logged when a sample of a later one arrives, since neither takes a step in parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..statistics import Stats
from ..wire import Event, Sample
from .single_numbers import is_own_number, numbers_of, part_of, text_of


class Tracker:
    """What the two have in common."""

    def __init__(self, library: str) -> None:
        self._library = import_module(library)
        self._step = 0
        self._waiting: dict[str, Any] = {}

    def sample(self, sample: Sample, stats: Stats) -> None:
        """Its numbers, among those of its step."""
        self._at(sample.step)
        self._waiting.update(numbers_of(sample, stats))
        if stats.histogram is not None and not is_own_number(sample):
            bars = self._library.Histogram(np_histogram=(list(stats.histogram.counts), list(stats.histogram.edges)))
            self._waiting[part_of(sample, "histogram")] = bars

    def event(self, event: Event) -> None:
        """Text among the numbers of its step."""
        self._at(event.step)
        self._waiting[f"watch/{event.kind}"] = text_of(event)

    def _at(self, step: int) -> None:
        if step > self._step:
            self._log()
            self._step = step

    def _log(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._library.log(waiting, step=self._step)

    def flush(self) -> None:
        """Nothing: the step may not be over."""

    def close(self) -> None:
        """The last step, and the end of the run."""
        self._log()
        self._library.finish()


class Wandb(Tracker):
    """A run of Weights & Biases; offline if `WANDB_MODE` says so."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        super().__init__("wandb")
        settings = self._library.Settings(console="off", x_disable_stats=True, x_disable_machine_info=True, silent=True)
        self._library.init(
            project=options["project"], name=run.get("name") or None, config=said(run), settings=settings
        )

    def close(self) -> None:
        super().close()
        self._library.teardown()  # its process


class Trackio(Tracker):
    """A run of trackio, in its local database."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        super().__init__("trackio")
        self._library.init(project=options["project"], name=run.get("name") or None, config=said(run), embed=False)


def said(run: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the run, as its configuration."""
    return {key: value for key, value in run.items() if isinstance(value, (str, int, float))}
