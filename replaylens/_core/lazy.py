"""Properties that are worked out when they are first asked for.

Python's own hold a lock on 3.10 and 3.11, one for all objects of a class: a child that is forked while another thread
works one out would wait for ever. What two threads work out at once here is the same twice.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

T_co = TypeVar("T_co", covariant=True)


class cached_property(functools.cached_property[T_co]):
    """As Python's own from 3.12 on."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        found = instance.__dict__
        assert self.attrname is not None
        if self.attrname not in found:
            found[self.attrname] = self.func(instance)
        return found[self.attrname]
