"""The model behind a program, to be captured on inputs of other shapes.

In: what the recorded forward began with, the shapes of the inputs of a program that was made from it, and these inputs.
Out: a Record of the model. A program that begins inside the model is given values of a layer: then the model's recorded
inputs are resized as these values are, since what a layer was computed from is not known.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from ..._ir.graph import Graph
from ..._ir.node import Ref
from ..._ir.trees import thaw_shared
from ..._replay.other_shapes import Shapes, changed_sizes, recorded_shapes, resized
from ..._replay.record import Record
from ...errors import InputMismatch
from ..snapshot import ForwardState
from .run import capture_on_other_inputs, prove


@frozen(eq=False)
class OriginModel:
    """A model, and what it was captured with. It holds no value of the capture but the inputs."""

    start: ForwardState
    graph: Graph
    inputs: dict[Ref, torch.Tensor]
    unproven: Record | None = None  # where the model was bound to a file

    @staticmethod
    def of(start: ForwardState, record: Record) -> OriginModel:
        """The model of a capture."""
        inputs = {ref: record.values[ref] for ref in [Ref(node.name) for node in record.graph.input_nodes]}
        return OriginModel(start, record.graph, inputs, None if start.is_proven else record)

    def captured_at(self, part: Graph, shapes: Shapes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        """The record of the model at the shapes that inputs of `part`, a program made from it, have."""
        if self.unproven is not None:
            prove(self.start, self.unproven)
        graph = self.graph
        if part.inputs != graph.inputs or part.input_nodes != graph.input_nodes:
            args, kwargs = self._resized_inputs(part, shapes)
        return capture_on_other_inputs(self.start, graph, args, kwargs)

    def _resized_inputs(self, part: Graph, shapes: Shapes) -> Any:
        """The recorded inputs with the sizes that the values of layers have now."""
        sizes = changed_sizes(recorded_shapes(part), shapes)
        graph = self.graph
        if _content_guards(graph) > _content_guards(part):
            raise InputMismatch(
                "The module begins inside the model, behind values that Python reads: what these would be for inputs "
                "of other sizes is not known."
            )
        several = [size for (_, size), new in sizes.items() if len(new) > 1]
        known = {(axis, size) for node in graph.input_nodes for axis, size in enumerate(node.spec.shape)}
        if several or not known.issuperset(sizes):
            raise InputMismatch(
                "The module begins inside the model, and which inputs of the model would give a layer that shape is "
                "not known: only a size that an input has on the same axis, such as that of the batch, can change."
            )
        return thaw_shared(graph.inputs, lambda leaf: resized(self.inputs[leaf], sizes) if type(leaf) is Ref else leaf)


def _content_guards(graph: Graph) -> int:
    return sum(guard.kind == "content" for guard in graph.guards)
