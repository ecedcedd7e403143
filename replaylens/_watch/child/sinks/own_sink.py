"""A user's class or function as a sink.

In: where it is (`module:qualname`, and the folders where the training looks for modules), or the object itself. A class
is made without arguments; its methods `sample(sample, stats)`, `event(event)`, `flush()`, `close()` are optional. A
function is called with each sample, and with its numbers if it takes two arguments.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from typing import Any

from ..statistics import Stats
from ..wire import Event, Sample


class OwnSink:
    """Calls what the user gave."""

    def __init__(self, options: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        given = options["object"] if "object" in options else found(options["target"], options["folders"])
        self._own = own = given() if inspect.isclass(given) else given
        called = getattr(own, "sample", None) or (own if callable(own) else None)
        if called is None and not callable(getattr(own, "event", None)):
            raise TypeError(
                f"{options['label']} as a sink has neither `sample` nor `event`. Give its class a method "
                "`sample(self, sample, stats)`, or pass a function of a sample."
            )
        self._sample: Callable[..., object] | None = called
        self._both = called is not None and takes_two(called)

    def sample(self, sample: Sample, stats: Stats) -> None:
        if self._sample is not None:
            self._sample(sample, stats) if self._both else self._sample(sample)

    def event(self, event: Event) -> None:
        self._call("event", event)

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *args: object) -> None:
        method = getattr(self._own, name, None)
        if callable(method):
            method(*args)


def found(target: str, folders: list[str]) -> Any:
    """What `module:qualname` names, also in the folders where the training process would find it."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    module, _, name = target.partition(":")
    return reduce(getattr, name.split("."), import_module(module))


def takes_two(function: Callable[..., object]) -> bool:
    """Whether a function can be called with a sample and its numbers."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True
