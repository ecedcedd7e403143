"""What the layers of one program share: names, kin, module calls, costs. Worked out when first asked for.

In: a Record. Out: a Lens. A fact about one layer is a property of `Layer` (facts.py), a fact about the whole program
one of `Program` (history.py); both read here what is computed once for all layers.
"""

from __future__ import annotations

from attrs import frozen

from .._core.capture_metadata import Account, Parameter
from .._core.graph import Graph
from .._core.lazy import cached_property
from .._core.location import Location
from .._core.node import Ref, State, TensorMeaning, meanings_of, refs_in
from .._replay.record import Record
from .atlas import Atlas
from .conditionals import Conditionals
from .flops import Cost, cost_of
from .kin import Kin, kin_of
from .module_calls import ModuleCalls


@frozen(eq=False)
class Lens:
    """All that is known of a program and its recorded run, for people."""

    record: Record
    atlas: Atlas

    @property
    def graph(self) -> Graph:
        return self.atlas.graph

    @property
    def account(self) -> Account:
        return self.record.account

    @cached_property
    def kin(self) -> Kin:
        """Who reads whom, and how far each layer is from the inputs and the outputs."""
        return kin_of(self.atlas)

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

    def meanings(self, place: Location) -> tuple[TensorMeaning, ...]:
        """Shape and dtype of each of them."""
        return tuple([meanings_of(self.graph[ref.node])[ref] for ref in self.refs(place)])

    def meaning(self, place: Location) -> TensorMeaning | None:
        """Shape and dtype of its value, where that is a tensor; None for a container of tensors, even of one."""
        tree = place.tree(self.graph)
        return meanings_of(self.graph[place.node])[tree] if type(tree) is Ref else None

    def nbytes(self, place: Location) -> int:
        """How many bytes its values take."""
        return sum([meaning.nbytes for meaning in self.meanings(place)])

    def is_saved(self, place: Location) -> bool:
        """Are its values kept?"""
        return all(ref in self.record.values for ref in self.refs(place))
