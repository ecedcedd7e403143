"""In which modules a layer was computed, which it goes into, and of which it is the output."""

from __future__ import annotations

from .._core.label import Label
from .facts import Facts


class ModuleFacts(Facts):
    """The module calls around a layer."""

    __slots__ = ()

    @property
    def module(self) -> str | None:
        """The address of the innermost module call that it ran in, such as `features.6`; None outside all modules."""
        call = self._call
        return call.scope.address if call is not None and call.scope is not None else None

    @property
    def modules(self) -> tuple[str, ...]:
        """All module calls that it ran in, outermost first: `("layer1:1", "layer1.0:1")`."""
        call = self._call
        return tuple(map(str, call.scope.stack)) if call is not None and call.scope is not None else ()

    @property
    def output_of(self) -> tuple[str, ...]:
        """The module calls of which it is the output, innermost first."""
        return self._lens.module_calls.outputs.get(self._place.node, ()) if self._place.output is None else ()

    @property
    def input_of(self) -> tuple[str, ...]:
        """The module calls that it goes into: it was computed outside of them and is read inside."""
        if self._place.output is not None:
            return ()
        graph = self._lens.graph
        readers = [graph.nodes[position] for position in graph.users[graph.positions[self._place.node]]]
        return self._lens.module_calls.entered(self.node, readers)

    @property
    def is_whole_module(self) -> bool:
        """Is it all that its innermost module call computed, and what that returned?"""
        return self._whole_call is not None

    @property
    def _whole_call(self) -> str | None:
        return self._lens.module_calls.bottom_level(self.node) if self._place.output is None else None


def addresses_of(calls: tuple[str, ...]) -> list[str]:
    """The modules that were called, without the number of the call."""
    return list(dict.fromkeys([Label.of(call).layer for call in calls]))
