"""The parameters that a layer was computed with."""

from __future__ import annotations

from .._core.capture_metadata import Parameter
from .._core.node import State
from .facts import Facts


class ParameterFacts(Facts):
    """The parameters that it read."""

    __slots__ = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Each parameter that it read, once: address, shape, dtype, whether it is trained."""
        call = self._call
        if call is None:
            return ()
        nodes = [self._lens.graph[name] for name in dict.fromkeys([ref.node for ref in call.refs])]
        read = [node for node in nodes if isinstance(node, State) and node.kind == "parameter"]
        return tuple([self._lens.parameters[node.name] for node in read])
