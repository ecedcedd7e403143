"""How a layer was computed: the function, its arguments, where in the user's code, how long it took, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.location import Location
from .._core.node import Generator, Ref, Source
from .._core.target import Target
from .calls import Made, hands_on_what_it_wrote, made_by_model
from .facts import Facts
from .flops import FREE, Cost


class CallFacts(Facts):
    """The function, its arguments, its source, its time, its cost."""

    __slots__ = ()

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function that the model called: of a write in place, the one that writes."""
        return target.function if (target := self._target) is not None else None

    @property
    def function_name(self) -> str | None:
        """Its name: `conv2d`, `relu_`, `__add__`."""
        return target.short if (target := self._target) is not None else None

    @property
    def _target(self) -> Target | None:
        return made.target if (made := self._made) is not None else None

    @property
    def _made(self) -> Made | None:
        call = self._call
        if call is None:
            return None
        return made_by_model(call, None if call.edited else self._lens.account.originals.get(call.name))

    @property
    def is_inplace(self) -> bool:
        """Did the model's function write into a tensor that was there, and hand that on?"""
        call = self._call
        if call is None or call.edited:
            return False
        return call.name in self._lens.account.originals or hands_on_what_it_wrote(call)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments, tensors by their recorded values."""
        return self._made.filled(self._leaf)[0] if self._made is not None else ()

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments, tensors by their recorded values."""
        return self._made.named(self._leaf) if self._made is not None else {}

    @property
    def plain_arguments(self) -> tuple[Any, ...]:
        """The positional arguments that hold no tensor."""
        return self._made.plain(self._leaf)[0] if self._made is not None else ()

    @property
    def plain_keywords(self) -> dict[str, Any]:
        """The keyword arguments that hold no tensor."""
        return self._made.plain(self._leaf)[1] if self._made is not None else {}

    def _leaf(self, leaf: Any) -> Any:
        if type(leaf) is Ref:
            return self._read(Location(leaf.node, part=leaf))
        if isinstance(leaf, Target):
            return leaf.function
        return None if isinstance(leaf, Generator) else leaf

    @property
    def source(self) -> Source | None:
        """The line of the user's code that ran it."""
        return getattr(self.node, "source", None) if self._place.output is None else None

    @property
    def stack(self) -> tuple[Source, ...]:
        """The user's lines that led to it, from its own outwards to the one that called `capture` and beyond."""
        outside = self._lens.account.called_from
        around = outside.stack if outside is not None else ()
        return (*self.source.stack, *around) if self.source is not None else ()

    @property
    def seconds(self) -> float | None:
        """How long its function ran; None where no clock was read, as in programs made by an edit."""
        taken, graph = self._lens.account.nanoseconds, self._lens.graph
        return taken[graph.positions[self._place.node]] / 1e9 or None if taken and self._call is not None else None

    @property
    def generator_state(self) -> torch.Tensor | None:
        """The state of the random generator when it drew; None where nothing random was drawn."""
        call = self._call
        return self._lens.record.draws.get(call.draws) if call is not None and call.draws is not None else None

    @property
    def _cost(self) -> Cost:
        return self._lens.costs[self._place.node] if self._call is not None else FREE

    @property
    def flops(self) -> int | None:
        """Floating-point operations, a multiplication with its addition as two; None where they are not known."""
        return self._cost.flops

    @property
    def macs(self) -> int | None:
        """Multiplications with an addition, of matrix products and convolutions; None where they are not known."""
        return self._cost.macs
