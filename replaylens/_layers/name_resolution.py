"""Resolution of names that users give to edits, into nodes and Refs.

In: names of layers, keys of mappings of patches, lists and selections of them. Out: the nodes and Refs that an edit
works on. Patches, values and Programs are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from .._edit.edges import OUTPUT
from .._edit.select import Selection, is_named
from .._ir.location import Location
from .._ir.node import Call, Ref, refs_in
from .._ir.runtime import alias
from .._ir.trees import Branch
from ..errors import BadEdit
from .index import LayerIndex
from .layer import Layer


@frozen(eq=False)
class NameResolver:
    """Resolves names in one program."""

    index: LayerIndex
    sites: Callable[[Any], Iterable[Location]]

    def nodes(self, key: Any) -> list[str]:
        """The nodes that a key means, each once."""
        return list(dict.fromkeys(one.node for site in self.sites(key) for one in site.each))

    def operations(self, key: Any) -> list[str]:
        """The nodes that a key means. A module is accepted only if it has a single operation, not for its last one."""
        found: list[str] = []
        places = tuple(self.sites(key))
        named = {one.node for site in places if site.output is None for one in site.each}
        for site in places:
            if site.output is not None and site.node not in named:
                self._require_read_by_output_alone(site)
            every = [call for call in self.index.graph.calls if self._runs_in(call, site)]
            inside = [call.name for call in every if not _is_output_alias(call)]
            if len(inside) > 1:
                some = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
                raise BadEdit(
                    f"{site.name!r} is a module of {len(inside)} operations ({some}), and this edit is of one. "
                    f"Name the one that is meant, such as {site.label!r}, which gives the module's output."
                )
            found.extend(inside if len(every) > 1 else [one.node for one in site.each])
        return list(dict.fromkeys(found))

    def _runs_in(self, call: Call, site: Location) -> bool:
        """True if the location is named by a module, and the call runs in it."""
        if site.name in self.index.by_label or site.name not in self.index.module_places or call.scope is None:
            return False
        return any(site.name in (scope.address, str(scope)) for scope in call.scope.stack)

    def _require_read_by_output_alone(self, site: Location) -> None:
        """Raises if the operation behind an output of the program gives something that others read too."""
        graph, node = self.index.graph, self.index.graph[site.node]
        users = [graph.nodes[position].name for position in graph.users[graph.positions[site.node]]]
        ends = [one.label for one in self.index.places if one.output is not None and one.node == site.node]
        asked = ["a guard"] * any(ref.node == site.node for guard in graph.guards for ref in guard.refs)
        held = [f"the state {address}" for address, ref in graph.changes if ref.node == site.node]
        others = [*users, *[label for label in ends if label != site.label], *asked, *held]
        if isinstance(node, Call) and others:
            raise BadEdit(
                f"{site.label} is what {site.node} gives, and {others[0]} reads that too. Name the operation, "
                f"{site.node!r}, to change it for all; to change the output alone: insert_after, with_patch."
            )

    def values(self, key: Any) -> tuple[list[Ref], list[Ref]]:
        """The values that a key means: those of layers, and those that only the program's output reads. Each location
        must give one tensor.
        """
        places = [(one, self._single(one)) for site in self.sites(key) for one in site.each]
        return [ref for one, ref in places if one.output is None], [
            ref for one, ref in places if one.output is not None
        ]

    def ref(self, name: Any) -> Ref:
        """The value of a layer that gives one tensor."""
        return self._single(self.index.find(name))

    def parts(self, name: Any) -> tuple[Ref, ...]:
        """All values of a layer."""
        return tuple(refs_in(self.index.find(name).tree(self.index.graph)))

    def readers(self, names: Any, refs: Sequence[Ref]) -> list[str]:
        """The nodes with these names that read some values, where `"output"` is the output of the program."""
        found = [self.index.find(name) if name != OUTPUT else None for name in as_list(names)]
        for place in found:
            if place is not None and place.output is not None and place.output not in refs:
                raise BadEdit(f"{place.label} does not read {refs[0].node}: it is {place.output}.")
        return [OUTPUT if place is None or place.output is not None else place.node for place in found]

    def edge(self, sender: Any, receiver: Any) -> tuple[tuple[Ref, ...], list[str]]:
        """The values of a sender that its receivers read, and the receivers."""
        refs = self.parts(sender)
        readers = self.readers(receiver, refs)
        if OUTPUT in as_list(receiver) or OUTPUT not in readers:
            return refs, readers
        wanted = {self.index.find(name).output for name in as_list(receiver)} - {None}
        others = [ref for ref in self.index.graph.output_refs if ref in refs and ref not in wanted]
        if others and set(readers) != {OUTPUT}:
            raise BadEdit(
                f"{others[0]} is an output too, which {receiver!r} does not name. Give an edge for each of them."
            )
        return tuple([ref for ref in refs if ref not in others]), list(dict.fromkeys(readers))

    def starts(self, names: Any) -> list[Any] | None:
        """The values at which a slice begins; None for the inputs of the program."""
        return None if names is None else [self.index.find(name).tree(self.index.graph) for name in as_list(names)]

    def end(self, names: Any) -> Any:
        """The tree of values that a slice returns."""
        if names is None or (isinstance(names, str) and names == OUTPUT):
            return self.index.graph.output
        if isinstance(names, Mapping):
            return Branch(dict, tuple([self.end(name) for name in names.values()]), tuple(names))
        if isinstance(names, (list, tuple, Selection)):
            return tuple([self.end(name) for name in names])
        return self.index.find(names).tree(self.index.graph)

    def outputs(self, names: Any) -> Any:
        """The tree of values that a module returns: lists, tuples and dicts of layers as they were given. What means
        several layers, such as a glob, is a dict by name, part of the list around it, or a tuple in a dict.
        """
        if isinstance(names, Mapping):
            return Branch(dict, tuple([self._in_dict(name) for name in names.values()]), tuple(names))
        if isinstance(names, (list, tuple)):
            found = tuple([tree for name in names for tree in self._trees(name).values()])
            return Branch(list, found) if isinstance(names, list) else found
        trees = self._trees(names)
        return self._in_dict(names) if self._is_one(names) else Branch(dict, tuple(trees.values()), tuple(trees))

    def _in_dict(self, name: Any) -> Any:
        trees = tuple(self._trees(name).values())
        return trees[0] if self._is_one(name) else trees

    def _is_one(self, name: Any) -> bool:
        """True if a name is that of one layer, and not a glob or a type, whatever these find."""
        if name is None or (isinstance(name, str) and name == OUTPUT):
            return True
        first, *others = self.sites(name)
        return not others and is_named(name, first)

    def _trees(self, name: Any) -> dict[str, Any]:
        """The values that a name means, by the names of their layers."""
        if name is None or (isinstance(name, str) and name == OUTPUT):
            return {OUTPUT: self.index.graph.output}
        return {site.name: site.tree(self.index.graph) for site in self.sites(name)}

    def _single(self, place: Location) -> Ref:
        tree = place.tree(self.index.graph)
        if type(tree) is not Ref:
            raise BadEdit(f"{place.label} gives several tensors: name one of them by its module.")
        return tree


def _is_output_alias(call: Call) -> bool:
    """True for an alias node, which only names the output of a module."""
    return call.target.function is alias and len(call.args) == 2


def as_list(names: Any) -> list[Any]:
    """One name, or several in any container."""
    return [names] if isinstance(names, (str, int, Layer)) else list(names)
