"""TensorBoard's event files: the numbers of each sample as curves, its histogram, notes and alarms as text.

In: samples with their numbers. Out: a folder for this run alone. TensorBoard's own writer needs neither torch nor
TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..statistics import Histogram, Stats
from ..wire import Event, Sample
from .new_files import numbered
from .single_numbers import is_own_number, numbers_of, part_of, text_of

LARGEST = 3.4e38  # curves are of 32 bits, and who reads histograms multiplies their edges


class Board:
    """A folder of TensorBoard. One that has events of an earlier run already stays as it is."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        folder = Path(options["folder"])
        self.path = next(one for one in numbered(folder) if not any(one.glob("*tfevents*")))
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2")
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._tensors = import_module("tensorboard.compat.proto.tensor_pb2")
        self._writer = writer.EventFileWriter(str(self.path))

    def sample(self, sample: Sample, stats: Stats) -> None:
        """All of a sample as one event."""
        Value = self._summary.Summary.Value
        numbers = numbers_of(sample, stats)
        values = [Value(tag=tag, simple_value=bounded(number)) for tag, number in numbers.items()]
        if stats.histogram is not None and not is_own_number(sample):
            values.append(Value(tag=part_of(sample, "histogram"), histo=self._bars(stats.histogram, stats)))
        self._add(values, sample.step, sample.time)

    def event(self, event: Event) -> None:
        """Text, for those who look there."""
        text = self._tensors.TensorProto(dtype=7, string_val=[text_of(event).encode()])  # 7: strings
        text.tensor_shape.dim.add(size=1)
        value = self._summary.Summary.Value(tag=f"watch/{event.kind}", tensor=text)
        value.metadata.plugin_data.plugin_name = "text"
        self._add([value], event.step, event.time)

    def _bars(self, histogram: Histogram, stats: Stats) -> Any:
        count, mean, std = sum(histogram.counts), bounded(stats.mean or 0.0), bounded(stats.std or 0.0)
        edges = [bounded(edge) for edge in histogram.edges]
        return self._summary.HistogramProto(
            min=edges[0], max=edges[-1], num=count, sum=mean * count, sum_squares=(std**2 + mean**2) * count,
            bucket_limit=edges[1:], bucket=histogram.counts,
        )  # fmt: skip

    def _add(self, values: list[Any], step: int, time: float) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._events.Event(step=step, wall_time=time, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def bounded(number: float) -> float:
    """A number as 32 bits have it. What is not finite stays so."""
    return number if not math.isfinite(number) else max(min(number, LARGEST), -LARGEST)
