"""Every name of every layer, and the lookup of layers by name.

In: a Graph and a name in any spelling: `conv2d_3_7`, `conv2d_3`, `conv2d_3_7:1`, `features.6`, `features.6:2`, `7`,
`-5`, `fc.weight`. Out: its Location, or an error that offers the nearest names.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from attrs import evolve, frozen

from .._ir.graph import Graph
from .._ir.label import Label
from .._ir.location import Location
from .._ir.node import Input, Ref, Scope, State, refs_in
from .._ir.trees import keyed_items, walk
from .._ir.util import cached_property, matches
from ..errors import NoSuchLayer


@frozen(eq=False)
class LayerIndex:
    """Every name of every layer of a graph, computed on first use."""

    graph: Graph

    @cached_property
    def places(self) -> tuple[Location, ...]:
        """The layers in order: inputs, calls, buffers and constants at their first use, then the outputs."""
        graph = self.graph
        found = [Location(node.name) for node in graph.nodes if self._is_layer(node.name)]
        number = max((numbers[1] for place in found if (numbers := Label.of(place.label).numbers)), default=-1)
        refs = list(dict.fromkeys(graph.output_refs))
        ends = [Location(ref.node, ref, label=f"output_{n + 1}_{number + n + 1}") for n, ref in enumerate(refs)]
        return (*found, *ends)

    @cached_property
    def order(self) -> tuple[str, ...]:
        return tuple([place.label for place in self.places])

    @cached_property
    def by_label(self) -> dict[str, Location]:
        found = {place.label: place for place in self.places}
        for node in self.graph.nodes:
            found.setdefault(node.name, Location(node.name))
        return found

    @cached_property
    def aliases(self) -> dict[str, list[Location]]:
        """The other names: short labels, explicit first passes, module addresses, addresses of state."""
        found: dict[str, list[Location]] = {}
        for place in self.places:
            layer, turn = Label.of(place.label)
            short = Label(layer).short
            for name in {short, layer, f"{short}:{turn or 1}", f"{layer}:{turn or 1}"} - {place.label}:
                found.setdefault(name, []).append(place)
        for node in self.graph.state_nodes:
            for name in (node.address, *node.aliases):
                if name != node.name:
                    found.setdefault(name, []).append(self.by_label[node.name])
        for name, place in self.module_places.items():
            found.setdefault(name, []).insert(0, place)
        return found

    @cached_property
    def module_places(self) -> dict[str, Location]:
        """The outputs of modules: `features.6`, `features.6:2` for its second call. If a module returns several
        tensors, each has a name of its own, too: `attn[0]`, `encoder[hidden]`.
        """
        found: dict[str, Location] = {}
        calls: dict[str, list[Location]] = {}
        for scope, tree in self.graph.module_outputs:
            if place := self._module_output(scope, tree):
                found[str(scope)] = place
                calls.setdefault(scope.address, []).append(place)
        found.update({address: places[0] for address, places in calls.items() if len(places) == 1})
        for address, place in list(found.items()):
            found.update(self._output_names(address, place))
        return self._under_each_address(found)

    def _under_each_address(self, found: dict[str, Any]) -> dict[str, Any]:
        """Extend a mapping keyed by names of modules, their calls and outputs by the modules' other addresses."""
        for name, place in list(found.items()) if self.other_addresses else ():
            address = re.split(r"[:\[]", name, maxsplit=1)[0]
            found.update({other + name[len(address) :]: place for other in self.other_addresses.get(address, ())})
        return found

    @cached_property
    def other_addresses(self) -> dict[str, tuple[str, ...]]:
        """By the first address of a module: its other addresses."""
        found: dict[str, tuple[str, ...]] = {}
        for other, first in self.graph.twice:
            found[first] = (*found.get(first, ()), other)
        return found

    def _module_output(self, scope: Scope, tree: Any) -> Location | None:
        """The location of the output of a module call."""
        refs = list(dict.fromkeys(refs_in(tree)))
        if not refs:
            return None
        place = evolve(self.by_label[refs[0].node], scope=scope)
        if len(refs) > 1:
            ways = {leaf: way for way, leaf in reversed(list(walk(tree, keyed_items))) if type(leaf) is Ref}
            return evolve(place, part=tree, names=tuple([_path_text(ways[ref]) for ref in refs]))
        if type(tree) is Ref and tree.path and tree != getattr(self.graph[tree.node], "result", None):
            return evolve(place, part=tree)
        return place

    def _output_names(self, address: str, place: Location) -> dict[str, Location]:
        """The names of the tensors that a module returned, if there are several."""
        pairs = zip(place.names, place.refs, strict=True) if place.names else ()
        return {f"{address}{way}": evolve(self.by_label[ref.node], part=ref, scope=place.scope) for way, ref in pairs}

    @cached_property
    def module_calls(self) -> dict[str, int]:
        """The number of calls of each module."""
        found: dict[str, int] = {}
        for scope, _ in self.graph.module_outputs:
            if scope is not None:
                found[scope.address] = found.get(scope.address, 0) + 1
        return self._under_each_address(found)

    def find(self, name: Any) -> Location:
        """The layer with this name. A layer of several passes needs the pass."""
        if isinstance(known := getattr(name, "_place", None), Location):
            return known if name._index is self else self.find(name.label)
        if type(name) is int:
            if not -len(self.order) <= name < len(self.order):
                raise NoSuchLayer(
                    f"no layer {name}: the program has {len(self.order)} layers, 0 to {len(self.order) - 1}."
                )
            return self.places[name]
        if not isinstance(name, str):
            raise NoSuchLayer(
                f"a layer is named by a label, a module address or an ordinal, not by {type(name).__name__} {name!r}."
            )
        if place := self.by_label.get(name):
            return place
        if not name:
            ends = ", ".join([repr(place.label) for place in self.places if place.output is not None])
            raise NoSuchLayer(f"'' is the model itself, not a layer. Its outputs: {ends or 'no tensor'}.")
        if places := self.aliases.get(name):
            if len(places) > 1 and name not in self.module_places:
                raise NoSuchLayer(
                    f"{name!r} runs {len(places)} times: say which pass, {places[0].label!r} to {places[-1].label!r}."
                )
            return places[0]
        if (calls := self.module_calls.get(name, 0)) > 1:
            raise NoSuchLayer(
                f"the module {name!r} runs {calls} times: say which call, '{name}:1' to '{name}:{calls}'."
            )
        if calls and name not in self.module_places:
            raise NoSuchLayer(
                f"the module {name!r} hands on no tensor of the program, by itself or in a container or object. "
                f"`prog.find(module={name!r})` lists what it computes."
            )
        if why := self._ambiguity(name):
            raise NoSuchLayer(why)
        raise NoSuchLayer(f"no layer is called {name!r}.{self.nearest(name)}")

    def _ambiguity(self, name: str) -> str:
        """Why a name that is not the name of a layer is one of several: a type or a glob. "" if it is neither."""
        found = [place for place in self.places if self._type_of(place) == name]
        if not found:
            names = (*self.by_label, *self.aliases, *self.module_places)
            is_one = "*" in name and any(matches(one, name) for one in names)
            return f"{name!r} is a glob, which may mean several layers: `prog.names_of({name!r})`." * is_one
        label = found[0].label
        several = f"{len(found)} layers, such as {label!r}" if len(found) > 1 else f"one layer, {label!r}"
        said = f"{name!r} is a type, of {several}, and no name of a layer. `prog.find({name!r})` lists them; "
        if found[0].output is None and isinstance(self.graph[found[0].node], State):
            return f"{said}their addresses, and `prog.find(state=...)`, are keys of patches."
        return f"{said}as a key of patches, `patch={{{name!r}: ...}}`, it means them all."

    def _type_of(self, place: Location) -> str:
        """The type of a layer, as in keys of patches."""
        node = self.graph[place.node]
        return (
            "output" if place.output is not None else "input" if isinstance(node, Input) else getattr(node, "kind", "")
        )

    def nearest(self, name: str) -> str:
        """The nearest names, as the end of an error message."""
        names = [*self.by_label, *self.aliases]
        close: list[str] = []
        for match in get_close_matches(name, names, n=12, cutoff=0.4):  # three layers, not three names of one
            place = self.by_label.get(match) or self.aliases[match][0]
            if len(close) < 3 and all(place != (self.by_label.get(o) or self.aliases[o][0]) for o in close):
                close.append(match)
        return f" The nearest names are {', '.join(map(repr, close))}." if close else " `prog.layers` lists them all."

    def parents(self, place: Location) -> tuple[str, ...]:
        if place.output is not None:
            return (place.node,)
        graph = self.graph
        names = [graph.nodes[p].name for p in graph.parents[graph.positions[place.node]]]
        return tuple([name for name in names if self._is_layer(name)])

    def _is_layer(self, name: str) -> bool:
        """True unless it is an orphan, a parameter or the node of an edge."""
        return name not in self.graph.orphans and getattr(self.graph[name], "kind", "") not in ("parameter", "edge")

    def children(self, place: Location) -> tuple[str, ...]:
        if place.output is not None:
            return ()
        graph = self.graph
        users = [name for p in graph.users[graph.positions[place.node]] if self._is_layer(name := graph.nodes[p].name)]
        return (*users, *self._ends.get(place.node, ()))

    @cached_property
    def _ends(self) -> dict[str, list[str]]:
        """By node: the program outputs that are its values."""
        found: dict[str, list[str]] = {}
        for place in self.places:
            if place.output is not None:
                found.setdefault(place.node, []).append(place.label)
        return found

    @cached_property
    def ordinals(self) -> dict[str, int]:
        """The position of each layer among all."""
        return {label: number for number, label in enumerate(self.order)}

    @cached_property
    def _names(self) -> dict[Any, list[str]]:
        """By location: the other names that belong to it alone."""
        found: dict[Any, list[str]] = {}
        for name, places in self.aliases.items():
            if (len(places) == 1 or name in self.module_places) and places[0].part is None:
                found.setdefault((places[0].node, places[0].output), []).append(name)
        return found

    @cached_property
    def passes(self) -> dict[str, tuple[str, ...]]:
        """The labels of the passes of each layer, by its label without the pass."""
        found: dict[str, list[str]] = {}
        for label in self.order:
            found.setdefault(Label.of(label).layer, []).append(label)
        return {layer: tuple(labels) for layer, labels in found.items()}  # which all passes of the layer share

    def keys_of(self, place: Location) -> tuple[Any, ...]:
        """Every name of a layer: its ordinals from the end and from the start, its label, all others."""
        number = self.ordinals.get(place.label)
        ordinals = [] if number is None else [number - len(self.order), number]
        return (*ordinals, place.label, *sorted(self._names.get((place.node, place.output), [])))


def _path_text(path: tuple[Any, ...]) -> str:
    """The path to one of several tensors: `[0]`, `[hidden][1]`."""
    return "".join([f"[{step}]" for step in path])
