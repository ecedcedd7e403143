"""Layer: one layer of a program, as users see it.

In: the ProgramFacts of a program and a Location in it. Out: the facts of the layer there (layer_facts.py), its value,
its gradient and its plot.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from attrs import evolve, field, frozen

from .._ir.location import Location
from .._ir.value_source import ValueSource
from .fields import layer_card
from .index import LayerIndex
from .layer_facts import LayerFacts
from .program_facts import ProgramFacts


@frozen(repr=False)
class Layer(LayerFacts, ValueSource):
    """One layer of a program: its label, its value, its facts and its neighbours."""

    _facts: ProgramFacts
    _place: Location
    _read: Callable[..., Any] = field(repr=False)
    _grad: Callable[[str], Any] = field(repr=False)
    _plot: Callable[..., Any] = field(repr=False)

    @property
    def _index(self) -> LayerIndex:
        return self._facts.index

    @property
    def parts(self) -> tuple[Layer, ...]:
        """For an operation that returned several tensors, a Layer for each; otherwise the layer itself."""
        refs = self._facts.refs(self._place)
        if len(refs) == 1:
            return (self,)
        return tuple([evolve(self, place=self._place.of(ref, ref.node)) for ref in refs])

    @property
    def grad(self) -> Any:
        """Its gradient in the backward pass that the program had: `prog.backward(of=...)` gives such a program."""
        return self._grad(self.label)

    def plot(self, kind: str | None = None, ax: Any = None, **options: Any) -> Any:
        """Its value by matplotlib: feature maps or attention patterns where it has them, else a histogram.

        `kind` says which: "maps", "attention", "histogram". Options go to matplotlib. Gives the Axes.
        """
        return self._plot(self.label, self.value, kind, ax, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """The same layer of a copy of its program."""
        program = getattr(self._read, "__self__", None)
        made: Layer = deepcopy(program, memo)._layer(self._place) if program is not None else self
        return made

    def _value_for(self, name: str) -> Any:
        return self._read(self._place, again=True)

    def __repr__(self) -> str:
        shape = f" {tuple(self.shape)}" if self.shape is not None else ""
        return f"<Layer {self.label}: {self.layer_type}{shape}{f' in {self.module}' if self.module else ''}>"

    def __str__(self) -> str:
        return layer_card(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
