"""What is computed once for all layers of a program: names, topology, module calls, conditions, costs.

In: a Record. Out: ProgramFacts. The facts of one layer are properties of `Layer` (layer_facts.py), those of a whole
program are properties of `Program` (program_metadata.py); both read from here.
"""

from __future__ import annotations

from attrs import frozen

from .._ir.capture_metadata import CaptureMetadata, Parameter
from .._ir.graph import Graph
from .._ir.location import Location
from .._ir.node import Ref, State, TensorSpec, refs_in, specs_of
from .._ir.util import cached_property
from .._replay.record import Record
from .conditionals import Conditionals
from .flops import Cost, cost_of
from .index import LayerIndex
from .module_calls import ModuleCalls
from .topology import Topology, topology_of


@frozen(eq=False)
class ProgramFacts:
    """The facts that the layers of a program share, computed on first use."""

    record: Record
    index: LayerIndex

    @property
    def graph(self) -> Graph:
        return self.index.graph

    @property
    def account(self) -> CaptureMetadata:
        return self.record.account

    @cached_property
    def topology(self) -> Topology:
        """Parents, children and distances of the layers."""
        return topology_of(self.index)

    @cached_property
    def module_calls(self) -> ModuleCalls:
        """The nesting, sizes and outputs of module calls."""
        return ModuleCalls(self.graph, dict(zip(self.account.modules, self.account.classes, strict=True)))

    @cached_property
    def conditions(self) -> Conditionals:
        """The truth values that the model read, and the layers that serve them."""
        return Conditionals(self.graph)

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """The cost of each call, by node."""
        return {call.name: cost_of(call, self.graph) for call in self.graph.calls}

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The model's parameters by each of their names, read or not."""
        read = {node.name: self._parameter(node) for node in self.graph.state_nodes if node.kind == "parameter"}
        known = (*read.values(), *self.account.unread)
        return read | {name: parameter for parameter in known for name in (parameter.address, *parameter.aliases)}

    def _parameter(self, node: State) -> Parameter:
        tensor = self.record.values.get(Ref(node.name))
        trains = tensor.requires_grad if tensor is not None else node.name not in self.account.untrained
        return Parameter(node.address, node.meaning.shape, node.meaning.dtype, trains, node.aliases)

    def refs(self, place: Location) -> tuple[Ref, ...]:
        """The values of a layer, as the model saw them."""
        return tuple(dict.fromkeys(refs_in(place.tree(self.graph))))

    def specs(self, place: Location) -> tuple[TensorSpec, ...]:
        """The spec of each value of a layer."""
        return tuple([specs_of(self.graph[ref.node])[ref] for ref in self.refs(place)])

    def spec(self, place: Location) -> TensorSpec | None:
        """The spec of its value if that is a tensor; None for a container of tensors, even of one."""
        tree = place.tree(self.graph)
        return specs_of(self.graph[place.node])[tree] if type(tree) is Ref else None

    def nbytes(self, place: Location) -> int:
        """The size of its values in bytes."""
        return sum([spec.nbytes for spec in self.specs(place)])

    def is_saved(self, place: Location) -> bool:
        """True if its values are kept."""
        return all(ref in self.record.values for ref in self.refs(place))
