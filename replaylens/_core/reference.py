"""Reference: something that has values of its own, which a patch may take: a Program, a Run, a Layer.

It stands this low because patches know no more of it than this.
"""

from __future__ import annotations

from typing import Any


class Reference:
    """A base for what `From(...)` and `Mean(of=...)` read. Its subclasses say which value they have under a name."""

    __slots__ = ()

    def _value_for(self, name: str) -> Any:
        """The value that it has at the site of this name, or an error that says so if it has none."""
        raise NotImplementedError
