"""Held: what a program holds, and what a user's words for places in it mean. Nothing is run here.

In: a captured forward, or the record that an edit gave. Out: layers by any of their names, the sites that a key of
patches means, requests in positions and tensors. What is done with them is for `Program`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import RLock
from typing import Any, cast

import torch
from attrs import evolve

from ._capture.capture import Captured, record_of
from ._edit.bind import refers
from ._edit.edges import Edge
from ._edit.save_spec import SaveSpec
from ._edit.select import Selection, Where, find, is_named, sites
from ._ir.graph import Graph
from ._ir.label import Label
from ._ir.location import Location
from ._ir.node import Call, Input, Ref, refs_in
from ._ir.torch_private import outside_of_transforms
from ._ir.trees import thaw
from ._ir.util import cached_property, is_glob
from ._ir.value_source import ValueSource
from ._ir.world import freed, in_children
from ._layers.index import LayerIndex
from ._layers.layer import Layer
from ._layers.name_resolution import NameResolver, as_list
from ._layers.program_facts import ProgramFacts
from ._layers.program_metadata import ProgramMetadata
from ._replay.gradients import Grads, GradTargets, grad_targets
from ._replay.inputs import GivenInputs, made_ordinary, new_inputs, new_state
from ._replay.record import Record, detached
from ._replay.request import HandOffChange, LivePatchScope, Request
from ._replay.resolve_patches import changes_of
from ._replay.retention import with_values
from ._view.value_plots import plot_value
from .errors import NoGradient, NoSuchLayer, NotSaved, NoValues, ReplaylensError

_freezing = RLock()  # two threads may ask a program for its graph at once
in_children(partial(freed, _freezing))


class ProgramBase(ProgramMetadata, ValueSource):
    """The record of a forward, and the names for what is in it."""

    def __init__(
        self, captured: Captured | None, record: Record | None, outline: Record | None, grads: Grads | None
    ) -> None:
        self._captured = captured
        self._given = record
        self._outline = outline  # of a forward that computed nothing
        self._grads = grads  # of the backward pass that it had
        self._edges: dict[Edge, tuple[Location, ...]] = {}  # nodes of their own for what one node reads from another

    @property
    def graph(self) -> Graph:
        """The program's structure: nodes in order, no tensors."""
        return self._told.graph

    @property
    def layers(self) -> list[Layer]:
        """Every layer in execution order, inputs and outputs included."""
        return [self._layer(place) for place in self._atlas.places]

    @property
    def layer_labels(self) -> list[str]:
        return list(self._atlas.order)

    def __getitem__(self, name: Any) -> Layer:
        return self._layer(self._atlas.find(name))

    def __contains__(self, name: Any) -> bool:
        try:
            self._atlas.find(name)
        except NoSuchLayer:
            return False
        return True

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self._atlas.order)

    def find(
        self,
        op: str | None = None,
        module: str | None = None,
        input_of: str | None = None,
        where: Callable[[Layer], Any] | None = None,
        state: str | None = None,
    ) -> Selection:
        """The layers for which all of this holds, as a value: for patches, for iteration, for `assert_count`.

        `op` is a type of operation, `module` the address of a module that they ran in, `input_of` a layer or module
        that reads them; all three may be globs: `*` stays within one level of an address (`"layer4.*"`), `**` crosses
        dots. `where` is a function of a layer. `state` means parameters and buffers, by their address or a glob;
        without it none of them is found.
        """
        return find(self._atlas, self.__getitem__, op, module, input_of, where, state)

    def names_of(self, key: Any) -> tuple[str, ...]:
        """The names of the layers that a key of a mapping of patches means: of a glob, a type, a selection, a name."""
        return tuple([site.name for site in self._sites(key)])

    @property
    def gradients(self) -> Grads:
        """The gradients of the backward pass that this program had, by layer; and why some have none."""
        if self._grads is None:
            raise NoGradient(
                "no gradient is here: the program had no backward pass. `prog.backward(of=...)` gives one that had."
            )
        return self._grads

    # -- below ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _record(self) -> Record:
        if self._given is not None:
            return self._given
        if self._outline is not None:
            raise NoValues(
                "the program was captured with fake=True: it has structure and shapes, and no values. "
                "Capture the model without it."
            )
        with _freezing, outside_of_transforms():  # the program outlives the transform that asks for it first
            if (known := vars(self).get("_record")) is None:
                assert self._captured is not None
                known = vars(self)["_record"] = record_of(self._captured)
                self._captured = None
        return cast(Record, known)

    @property
    def _told(self) -> Record:
        """What is known of the forward, with its values or without."""
        return self._outline or self._record

    @cached_property
    def _atlas(self) -> LayerIndex:
        return LayerIndex(self.graph)

    def _layer(self, place: Location) -> Layer:
        return Layer(self._lens, place, self._read, self._gradient, plot_value)

    @cached_property
    def _lens(self) -> ProgramFacts:
        return ProgramFacts(self._told, self._atlas)

    def _gradient(self, label: str) -> Any:
        return self.gradients[label]

    def _meant(self, wish: SaveSpec) -> tuple[str, ...]:
        """The labels of the layers that a wish means."""
        return wish.labels(self._atlas, self.__getitem__)

    def _read(self, place: Location, again: bool = False) -> Any:
        """The recorded value of a layer. `again`: also if it must be computed again."""
        record, tree = self._record, place.tree(self.graph)
        missing = [leaf for leaf in refs_in(tree) if leaf not in record.values]
        if missing and not again:
            name = place.node
            raise NotSaved(f"the value of {name} was not saved. `prog.recover({name!r})` computes it again.")
        record = with_values(record, missing)
        return thaw(tree, lambda leaf: detached(record.value(leaf)) if type(leaf) is Ref else leaf)

    def _site(self, name: Any) -> Location:
        found = self._atlas.find(name)
        return evolve(found, name=name) if isinstance(name, str) else found

    def _sites(self, key: Any) -> tuple[Location, ...]:
        if isinstance(key, Edge):
            return self._edges[key]
        if type(key) is not str:
            return sites(self._atlas, self.__getitem__, key)
        known = self._named_sites.get(key)
        if known is None:
            known = self._named_sites[key] = sites(self._atlas, self.__getitem__, key)
        return known

    @cached_property
    def _named_sites(self) -> dict[str, tuple[Location, ...]]:
        """What names were found to mean: a sweep asks for the same ones again and again."""
        return {}

    @cached_property
    def _words(self) -> NameResolver:
        return NameResolver(self._atlas, self._sites)

    def _value_for(self, name: str) -> Any:
        return self[name]._value_for(name)

    def _positions(self, names: Any) -> list[int]:
        """Where layers lie; of a module that hands on several tensors, each of them."""
        return [self.graph.positions[one.node] for name in as_list(names) for one in self._atlas.find(name).each]

    def _inputs(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> GivenInputs:
        if not inputs and not named:
            return GivenInputs()
        args, kwargs = made_ordinary(self.graph, (inputs, named))
        return new_inputs(self.graph, args, kwargs, self._record.live)

    def _request(
        self,
        inputs: tuple[Any, ...],
        named_inputs: dict[str, Any],
        from_: Any,
        patch: Any,
        state: Mapping[str, torch.Tensor] | None,
        on_divergence: str,
        **more: Any,
    ) -> Request:
        """What a user asks for, in positions and tensors."""
        given = self._inputs(inputs, named_inputs)
        other = GivenInputs()
        if state:
            other = new_state(self.graph, dict(state), self._atlas.nearest, self._record.account)
        start = self._site(from_) if from_ is not None else None
        if start and (inputs or named_inputs):
            raise ReplaylensError(
                "from_= begins at a recorded value, and new inputs change what comes before it. Give one."
            )
        changed, ends = changes_of(self.graph, patch, start, self._sites)
        asks = (start or changed or ends or given.tensors or other.tensors or given.mismatches or other.mismatches) or (
            more.get("to") is not None or more.get("fresh")
        )
        return Request(
            changed=changed,
            ends=ends,
            given={**given.tensors, **other.tensors},
            mismatches=(*given.mismatches, *other.mismatches),
            inputs=given.whole,
            start=tuple([self.graph.positions[one.node] for one in start.each]) if start else (),
            on_divergence=on_divergence,
            whole=not asks,
            beyond=partial(self._beyond, dict(patch) if isinstance(patch, Mapping) else patch),
            **more,
        )

    def _asked(self, at: Any, from_: Any) -> GradTargets:
        """The layers at which gradients are asked for."""
        labels, named = self._everywhere.labels, frozenset[str]()
        if at is not None:
            one_key = isinstance(at, (str, int, Selection, Where, Layer))
            sites = {key: self._sites(key) for key in ([at] if one_key else at)}
            pairs = [(one, is_named(key, site)) for key, found in sites.items() for site in found for one in site.each]
            named = frozenset([one.label for one, is_one in pairs if is_one])
            labels = {one.label: one for one, _ in pairs}
        elif from_ is None:
            return self._everywhere
        if from_ is not None:
            begin = self._atlas.find(from_).node
            below = self.graph.descendants([begin])
            beside = [label for label, one in labels.items() if one.node not in below]
            if at is not None and beside:
                raise ReplaylensError(f"{beside[0]} does not follow {begin}, which is where from_= begins.")
            labels = {label: one for label, one in labels.items() if label not in beside}
        return grad_targets(self._record, labels, named)

    @cached_property
    def _everywhere(self) -> GradTargets:
        """The inputs, and every layer that the forward computed."""
        computed = [place for place in self._atlas.places if isinstance(self.graph[place.node], (Call, Input))]
        return grad_targets(self._record, {place.label: place for place in computed}, ())

    def _beyond(self, patch: Any) -> LivePatchScope:
        """Which patches hold beyond what was recorded, where the model itself is run: those for all passes of a layer,
        and those for a type of operation. What takes from another program at each site does not: it has none there.
        """
        pairs = patch.items() if isinstance(patch, Mapping) else ()
        keys = [key for key, what in pairs if not refers(what)]
        found = {key: self._sites(key) for key in keys if isinstance(key, str) and not Label.of(key).turn}
        nodes = {key: [self.graph[one.node] for s in of_key for one in s.each] for key, of_key in found.items()}
        kinds = [key for key, of in nodes.items() if all(isinstance(n, Call) and n.kind == key != n.name for n in of)]
        return LivePatchScope(
            every=frozenset(self.graph.positions[node.name] for of_key in nodes.values() for node in of_key),
            kinds=frozenset(kind for kind in kinds if kind not in self._atlas.module_calls),
            globs=tuple([key for key in found if is_glob(key) and self._is_of_modules(found[key])]),
            hands=tuple([hand for key, _ in pairs for hand in self._hands(key, key in found)]),
        )

    def _is_of_modules(self, found: tuple[Location, ...]) -> bool:
        return any(site.scope is not None and site.name not in self._atlas.by_label for site in found)

    def _hands(self, key: Any, is_every: bool) -> Iterator[HandOffChange]:
        """What a key means of what modules hand on, where it names modules."""
        trees = {str(scope): tree for scope, tree in self.graph.module_outputs}
        for site in self._sites(key) if isinstance(key, str) else ():
            if (scope := site.scope) is None or site.name in self._atlas.by_label:
                continue
            refs = refs_in(trees[str(scope)])
            count = len(set(refs))
            for one in site.each:
                ref = one.part if type(one.part) is Ref else refs[0]
                yield HandOffChange(scope.address, scope.call, refs.index(ref), count, ref, is_every)

    def _keep(self, keep: Any) -> frozenset[int]:
        if keep in ("all", "everything"):
            return frozenset(range(len(self.graph)))
        if keep is None or keep == "output":
            return frozenset()
        if callable(keep):
            keep = [layer for layer in self.layers if keep(layer)]
        return frozenset(self._positions(keep))
