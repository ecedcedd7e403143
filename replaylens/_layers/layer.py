"""Layer: one layer of a program, as users see it.

In: the ProgramFacts of a program and a Location in it. Out: the facts of the layer there (layer_facts.py), its value,
its gradient and its plot.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

from attrs import evolve, field, frozen

from .._ir.location import Location
from .._ir.node import Ref
from .._ir.value_source import ValueSource
from ..errors import CannotSave, NoSuchLayer
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

    @property
    def _program(self) -> Any:
        """The program that it is a layer of, if there is one."""
        return getattr(self._read, "__self__", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its program, and where it lies there: the layers in one pickle share one program."""
        if self._program is None:
            raise CannotSave(
                f"{self.label} is pickled with its program, and it has none. Take it from one: prog[name]."
            )
        return layer_at, (self._program, *address_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """The same layer of a copy of its program."""
        made: Layer = deepcopy(self._program, memo)._layer(self._place) if self._program is not None else self
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


Address = tuple[str, tuple[Any, ...] | None]  # a name; and, for one of several values there, its node and path


def address_of(layer: Layer) -> Address:
    """Where a layer lies in its program, in words that `layer_at` finds again."""
    place, find = layer._place, layer._index.find
    names = [place.label] if place.scope is None else [str(place.scope), place.label]
    for name in names:
        with suppress(NoSuchLayer):
            found = find(name)
            if found == place:
                return name, None
            if type(place.part) is Ref and found.of(place.part, place.part.node) == place:
                return name, (place.part.node, *place.part.path)
    raise CannotSave(f"{layer.label} is a part of a layer that no name of its program leads to. Save the program.")


def layer_at(program: Any, name: str, part: tuple[Any, ...] | None = None) -> Layer:
    """The layer of a program at an address."""
    place = program._index.find(name)
    made: Layer = program._layer(place if part is None else place.of(Ref(part[0], tuple(part[1:])), part[0]))
    return made
