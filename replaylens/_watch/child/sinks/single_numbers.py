"""The numbers of a sample one by one, for what draws curves; an event as text.

In: samples with their numbers. Out: `layer1.conv/activation/mean`, and so on; a number of the user's own is `loss`.
"""

from __future__ import annotations

import json

from ..statistics import Stats, real
from ..wire import Event, Sample
from .line_files import plain
from .new_files import title

NUMBERS = "mean std least most norm nans infs zeros".split()


def is_own_number(sample: Sample) -> bool:
    """Whether it is a number that the user logged, which stands for itself."""
    return sample.what == "scalar" and sample.size == sample.values.size == 1


def numbers_of(sample: Sample, stats: Stats) -> dict[str, float]:
    """Those that there are: of a sample without a finite value, only the counts. One of the user's own as it is."""
    if is_own_number(sample):
        return {title(sample.name): float(real(sample.values).item())}
    found = {name: getattr(stats, name) for name in NUMBERS}
    return {part_of(sample, name): float(number) for name, number in found.items() if number is not None}


def part_of(sample: Sample, name: str) -> str:
    """What one of a sample's numbers, or its histogram, is called."""
    return f"{title(sample.name)}/{sample.what}/{name}"


def text_of(event: Event) -> str:
    """The text of a note, or the facts of another event."""
    text = event.facts.get("text")
    return text if isinstance(text, str) else json.dumps(plain(event.facts), allow_nan=False)
