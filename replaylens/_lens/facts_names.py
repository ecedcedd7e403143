"""How a layer is called: its label, its numbers, its passes."""

from __future__ import annotations

from typing import Any

from .._core.label import Label
from .._core.node import Call, Input, State
from .facts import Facts


class NameFacts(Facts):
    """Label, type, numbers, passes."""

    __slots__ = ()

    @property
    def label(self) -> str:
        """Its full label, such as `conv2d_3_7`, with its pass where it has several: `linear_1_1:2`."""
        return self._place.label

    @property
    def short_label(self) -> str:
        """The label without the number among all layers: `conv2d_3`."""
        return Label.of(self.label).short

    @property
    def layer_type(self) -> str:
        """What kind of operation it is: `conv2d`, `relu`, `input`, `output`, `buffer`."""
        if self._place.output is not None:
            return "output"
        node = self.node
        return node.kind if isinstance(node, (Call, State)) else "input" if isinstance(node, Input) else "constant"

    @property
    def type_number(self) -> int | None:
        """How many layers of its type there are up to it: 3 for `conv2d_3_7`."""
        return self._numbers[0]

    @property
    def total_number(self) -> int | None:
        """How many layers there are up to it: 7 for `conv2d_3_7`."""
        return self._numbers[1]

    @property
    def _numbers(self) -> tuple[int | None, int | None]:
        return (Label.of(self.label).numbers if self.ordinal is not None else None) or (None, None)

    @property
    def pass_number(self) -> int:
        """Which pass of its layer it is, from 1."""
        return Label.of(self.label).number

    @property
    def passes(self) -> tuple[str, ...]:
        """The labels of all passes of its layer, its own among them."""
        return tuple(self._lens.atlas.passes.get(Label.of(self.label).layer, (self.label,)))

    @property
    def lookup_keys(self) -> tuple[Any, ...]:
        """Every name under which the program finds it."""
        return self._lens.atlas.keys_of(self._place)
