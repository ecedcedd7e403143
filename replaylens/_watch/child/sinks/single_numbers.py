"""The numbers of a sample one by one, for what draws curves; an event as text."""

from __future__ import annotations

import json

from ..statistics import Stats
from ..wire import Event
from .line_files import plain

NUMBERS = "mean std least most norm nans infs zeros".split()


def numbers_of(stats: Stats) -> dict[str, float]:
    """Those that there are: of a sample without a finite value, only the counts."""
    found = {name: getattr(stats, name) for name in NUMBERS}
    return {name: float(number) for name, number in found.items() if number is not None}


def text_of(event: Event) -> str:
    """The text of a note, or the facts of another event."""
    text = event.facts.get("text")
    return text if isinstance(text, str) else json.dumps(plain(event.facts), allow_nan=False)
