"""Where samples go: one class for each kind of sink, imported only where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from ..statistics import Stats
from ..wire import Event, Sample

KINDS = {
    "jsonl": ".line_files:JsonLines",
    "csv": ".line_files:CommaSeparated",
    "film": ".film_maker:FilmMaker",
    "live": "..live_server:LiveServer",
    "tensorboard": ".board:Board",
    "trackio": ".trackers:Trackio",
    "wandb": ".trackers:Wandb",
    "own": ".own_sink:OwnSink",
}


class Sink(Protocol):
    """What is told of every sample and event. What it raises is counted, and does not reach the training."""

    def sample(self, sample: Sample, stats: Stats) -> None: ...

    def event(self, event: Event) -> None: ...

    def flush(self) -> None:
        """Called when nothing is to be read, and every second."""

    def close(self) -> None: ...


def make_sink(spec: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> Sink:
    """The sink that a spec describes (see sink_specs.py), for a run: its name and that of its model."""
    module, _, name = KINDS[spec["kind"]].partition(":")
    made: Sink = getattr(import_module(module, __package__), name)(spec["options"], run or {})
    return made
