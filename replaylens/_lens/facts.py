"""The base of the files facts_*.py: each is a part of `Layer`, the facts of one subject.

A part reads two things: the Lens that all layers of a program share, and the Location of its own layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._core.location import Location
from .._core.node import Call, Node
from .lens import Lens


class Facts:
    """What every part of a Layer can read."""

    __slots__ = ()
    _lens: Lens
    _place: Location
    _read: Callable[[Location], Any]

    @property
    def node(self) -> Node:
        """The node of the graph whose value it is."""
        return self._lens.graph[self._place.node]

    @property
    def _call(self) -> Call | None:
        """The call that computed it; None for inputs, buffers, constants, and for outputs, which hand a value on."""
        node = self.node
        return node if isinstance(node, Call) and self._place.output is None else None

    @property
    def ordinal(self) -> int | None:
        """Its position among the layers, from 0; None for parameters and orphans, which are no layers."""
        return self._lens.atlas.ordinals.get(self._place.label)

    def _labels(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple([self._lens.atlas.order[number] for number in numbers])
