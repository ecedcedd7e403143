"""What the forward may change besides tensors, so that a second look begins where the first did.

In: the model's modules and the inputs, before the first look. Out: a Snapshot, which can be put back: attributes of
modules that are not torch's own, the content of lists, dicts and sets among them and among the inputs; and the states
of the generators of Python and numpy.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

_REGISTERED = frozenset(("_modules", "_parameters", "_buffers"))


class Snapshot:
    """Shallow copies of what Python code in a forward usually changes."""

    def __init__(self, modules: Iterable[nn.Module], inputs: Any) -> None:
        self.attributes = [
            (module, {key: value for key, value in vars(module).items() if key not in _REGISTERED})
            for module in modules
            if not type(module).__module__.startswith("torch.nn.")
        ]
        self.containers: list[tuple[Any, Any]] = []
        for _, attributes in self.attributes:
            for value in attributes.values():
                self._note(value, 3)
        self._note(inputs, 4)

    def _note(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in (list, dict, set):
            self.containers.append((value, kind(value)))
        if depth and kind in (list, dict, tuple):
            for item in value.values() if kind is dict else value:
                self._note(item, depth - 1)

    def put_back(self) -> None:
        """Everything noted as it was."""
        for module, attributes in self.attributes:
            now = vars(module)
            for key in [key for key in now if key not in attributes and key not in _REGISTERED]:
                del now[key]
            now.update(attributes)
        for container, content in self.containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


class Dice:
    """The states of the generators that torch does not know."""

    def __init__(self) -> None:
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random if numpy is not None else None
        self.state = self.numpy.get_state() if self.numpy is not None else None

    def put_back(self) -> None:
        """Both as they were."""
        random.setstate(self.python)
        if self.numpy is not None:
            self.numpy.set_state(self.state)
