"""What the layers of one program share: names, kin, module calls, costs. Worked out when first asked for.

In: a Record. Out: a Lens. A fact about one layer is a property of `Layer` (facts.py), a fact about the whole program
one of `Program` (history.py); both read here what is computed once for all layers.
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
    """All that is known of a program and its recorded run, for people."""

    record: Record
    atlas: LayerIndex

    @property
    def graph(self) -> Graph:
        return self.atlas.graph

    @property
    def account(self) -> CaptureMetadata:
        return self.record.account

    @cached_property
    def kin(self) -> Topology:
        """Who reads whom, and how far each layer is from the inputs and the outputs."""
        return topology_of(self.atlas)

    @cached_property
    def module_calls(self) -> ModuleCalls:
        """Which module calls lie in which, and what each of them computes."""
        return ModuleCalls(self.graph, dict(zip(self.account.modules, self.account.classes, strict=True)))

    @cached_property
    def conditions(self) -> Conditionals:
        """Which truth values the model read, and what it computed for them."""
        return Conditionals(self.graph)

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """What each call costs, by the name of its node."""
        return {call.name: cost_of(call, self.graph) for call in self.graph.calls}

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The model's parameters by every name that they have, read or not."""
        read = {node.name: self._parameter(node) for node in self.graph.state_nodes if node.kind == "parameter"}
        known = (*read.values(), *self.account.unread)
        return read | {name: parameter for parameter in known for name in (parameter.address, *parameter.aliases)}

    def _parameter(self, node: State) -> Parameter:
        tensor = self.record.values.get(Ref(node.name))
        trains = tensor.requires_grad if tensor is not None else node.name not in self.account.untrained
        return Parameter(node.address, node.meaning.shape, node.meaning.dtype, trains, node.aliases)

    def refs(self, place: Location) -> tuple[Ref, ...]:
        """The values that a layer gives, as the model saw them."""
        return tuple(dict.fromkeys(refs_in(place.tree(self.graph))))

    def meanings(self, place: Location) -> tuple[TensorSpec, ...]:
        """Shape and dtype of each of them."""
        return tuple([specs_of(self.graph[ref.node])[ref] for ref in self.refs(place)])

    def meaning(self, place: Location) -> TensorSpec | None:
        """Shape and dtype of its value, where that is a tensor; None for a container of tensors, even of one."""
        tree = place.tree(self.graph)
        return specs_of(self.graph[place.node])[tree] if type(tree) is Ref else None

    def nbytes(self, place: Location) -> int:
        """How many bytes its values take."""
        return sum([meaning.nbytes for meaning in self.meanings(place)])

    def is_saved(self, place: Location) -> bool:
        """Are its values kept?"""
        return all(ref in self.record.values for ref in self.refs(place))
