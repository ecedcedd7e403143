"""Layer: the view of one node for a person, and the ways to find it.

In: a Graph and a name in any of a user's spellings: `conv2d_3_7`, `conv2d_3`, `conv2d_3_7:1`, `features.6`,
`features.6:2`, `7`, `-5`, `fc.weight`. Out: the node that it means, or an error that offers the nearest names.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from attrs import evolve, field, frozen

from .._core.graph import Graph
from .._core.node import Call, Input, Node, Ref, Source, State
from .._core.reference import Reference
from .._core.text import line
from .._core.trees import leaves
from ..errors import NoSuchLayer


@frozen
class Place:
    """Where a layer lies: a node of the graph, or the n-th output of the program."""

    label: str
    node: str
    output: Ref | None = None
    part: Ref | None = None  # of several values that the node gives, the one that a module's address means


@frozen(repr=False)
class Layer(Reference):
    """One layer of a program: its label, its value, where it lies and what is next to it."""

    _atlas: Atlas
    _place: Place
    _read: Callable[[Ref | None, str], Any] = field(repr=False)
    _plot: Callable[..., Any] = field(repr=False)

    @property
    def label(self) -> str:
        """Its full label, such as `conv2d_3_7`, with its pass where it has several: `linear_1_1:2`."""
        return self._place.label

    @property
    def short_label(self) -> str:
        """The label without the number among all layers: `conv2d_3`."""
        return short(self.label)

    @property
    def node(self) -> Node:
        return self._atlas.graph[self._place.node]

    @property
    def layer_type(self) -> str:
        """What kind of operation it is: `conv2d`, `relu`, `input`, `output`, `buffer`."""
        if self._place.output is not None:
            return "output"
        node = self.node
        return node.kind if isinstance(node, (Call, State)) else "input" if isinstance(node, Input) else "constant"

    @property
    def value(self) -> Any:
        """The tensor that it gave when the program was recorded (a tuple of tensors, where it gives several)."""
        return self._read(self._place.output or self._place.part, self._place.node)

    @property
    def module(self) -> str | None:
        """The address of the innermost module call that it ran in, such as `features.6`; None outside all modules."""
        node = self.node
        return node.scope.address if isinstance(node, Call) and node.scope and self._place.output is None else None

    @property
    def modules(self) -> tuple[str, ...]:
        """All module calls that it ran in, outermost first: `("layer1:1", "layer1.0:1")`."""
        node = self.node
        inside = isinstance(node, Call) and node.scope is not None and self._place.output is None
        return tuple(map(str, node.scope.stack)) if inside else ()  # type: ignore[union-attr]

    @property
    def output_of(self) -> tuple[str, ...]:
        """The module calls of which it is the output."""
        return self._atlas.output_of.get(self._place.node, ()) if self._place.output is None else ()

    @property
    def source(self) -> Source | None:
        """The line of the user's code that ran it."""
        return getattr(self.node, "source", None) if self._place.output is None else None

    @property
    def parents(self) -> tuple[str, ...]:
        """The labels of the layers that it reads."""
        return self._atlas.parents(self._place)

    @property
    def children(self) -> tuple[str, ...]:
        """The labels of the layers that read it."""
        return self._atlas.children(self._place)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its value; None where it gives several tensors."""
        node = self.node
        if not isinstance(node, Call):
            return node.meaning.shape
        wanted = self._place.output or self._place.part or node.result or node.returns
        refs = [leaf for leaf in leaves(node.returns) if type(leaf) is Ref]
        return node.meaning[refs.index(wanted)].shape if wanted in refs else None

    @property
    def lookup_keys(self) -> tuple[Any, ...]:
        """Every name under which the program finds it."""
        return self._atlas.keys_of(self._place)

    def plot(self, kind: str | None = None, ax: Any = None, **options: Any) -> Any:
        """Its value by matplotlib: feature maps or attention patterns where it has them, else a histogram.

        `kind` says which: "maps", "attention", "histogram". Options go to matplotlib. Gives the Axes.
        """
        return self._plot(self.label, self.value, kind, ax, options)

    def _value_for(self, name: str) -> Any:
        return self.value

    def __repr__(self) -> str:
        return (
            f"<Layer {self.label}: {self.layer_type}{self._shape_text()}{f' in {self.module}' if self.module else ''}>"
        )

    def __str__(self) -> str:
        atlas = self._atlas
        rows = [
            f"Layer {self.label}, operation {atlas.order.index(self._place.label) + 1}/{len(atlas.order)}:"
            if self._place.label in atlas.order
            else f"{self.layer_type.capitalize()} {self.label}:"
        ]
        node = self.node
        rows.append(f"    Output: {', '.join(map(str, node.meaning)) if isinstance(node, Call) else node.meaning}")
        if isinstance(node, Call):
            rows.append(f"    Function: {line(node)}")
        for word, names in (
            ("Parents", self.parents),
            ("Children", self.children),
            ("Output of modules", self.output_of),
        ):
            rows.append(f"    {word}: {', '.join(names) or 'none'}")
        if self.module:
            rows.append(f"    Computed inside module: {self.module}")
        if self.source:
            rows.append(f"    Source: {self.source}  {self.source.text}")
        rows.append(f"    Lookup keys: {', '.join(map(str, self.lookup_keys))}")
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _shape_text(self) -> str:
        return f" {tuple(self.shape)}" if self.shape is not None else ""


@frozen(eq=False)
class Atlas:
    """Every name of every layer of a graph, worked out when first asked for."""

    graph: Graph

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The layers in order: inputs, calls, buffers and constants where they were first read, then the outputs."""
        graph = self.graph
        found = [Place(node.name, node.name) for node in graph.nodes if self._is_layer(node.name)]
        number = max((_total(place.label) for place in found), default=-1)
        refs = list(dict.fromkeys(graph.output_refs))
        ends = [Place(f"output_{n + 1}_{number + n + 1}", ref.node, ref) for n, ref in enumerate(refs)]
        return (*found, *ends)

    @cached_property
    def order(self) -> tuple[str, ...]:
        return tuple([place.label for place in self.places])

    @cached_property
    def by_label(self) -> dict[str, Place]:
        found = {place.label: place for place in self.places}
        for node in self.graph.nodes:
            found.setdefault(node.name, Place(node.name, node.name))
        return found

    @cached_property
    def aliases(self) -> dict[str, list[Place]]:
        """Every other spelling: short labels, explicit first passes, module addresses, addresses of state."""
        found: dict[str, list[Place]] = {}
        for place in self.places:
            label, _, call = place.label.partition(":")
            bare = {short(label), label} if call else {short(place.label), label}
            names = bare | ({f"{label}:1", f"{short(label)}:1"} if not call else {f"{short(label)}:{call}"})
            for name in names - {place.label}:
                found.setdefault(name, []).append(place)
        for node in self.graph.state_nodes:
            for name in (node.address, *node.aliases):
                if name != node.name:
                    found.setdefault(name, []).append(self.by_label[node.name])
        for name, place in self.module_places.items():
            found.setdefault(name, []).insert(0, place)
        return found

    @cached_property
    def module_places(self) -> dict[str, Place]:
        """`features.6`, and `features.6:2` for its second call: the layer of the module's output."""
        found: dict[str, Place] = {}
        calls: dict[str, list[Place]] = {}
        for scope, tree in self.graph.module_outputs:
            refs = [leaf for leaf in leaves(tree) if type(leaf) is Ref]
            if refs:
                place = self.by_label[refs[0].node]
                if type(tree) is Ref and tree.path and tree != getattr(self.graph[tree.node], "result", None):
                    place = evolve(place, part=tree)
                found[str(scope)] = place
                calls.setdefault(scope.address, []).append(place)
        found.update({address: places[0] for address, places in calls.items() if len(places) == 1})
        return found

    @cached_property
    def module_calls(self) -> dict[str, int]:
        """How often each module was called."""
        found: dict[str, int] = {}
        for scope, _ in self.graph.module_outputs:
            if scope is not None:
                found[scope.address] = found.get(scope.address, 0) + 1
        return found

    @cached_property
    def output_of(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for scope, tree in self.graph.module_outputs:
            for ref in (leaf for leaf in leaves(tree) if type(leaf) is Ref):
                if scope is not None:
                    found.setdefault(ref.node, []).append(str(scope))
        return {label: tuple(names) for label, names in found.items()}

    def find(self, name: Any) -> Place:
        """The layer that a name means; several passes of a layer need the pass."""
        if isinstance(name, Layer):
            return name._place if name._atlas is self else self.find(name.label)
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
        raise NoSuchLayer(f"no layer is called {name!r}.{self.nearest(name)}")

    def nearest(self, name: str) -> str:
        """The three nearest names, as the end of an error's text."""
        names = [*self.by_label, *self.aliases]
        close: list[str] = []
        for match in get_close_matches(name, names, n=12, cutoff=0.4):  # three layers, not three names of one
            place = self.by_label.get(match) or self.aliases[match][0]
            if len(close) < 3 and all(place is not (self.by_label.get(o) or self.aliases[o][0]) for o in close):
                close.append(match)
        return f" The nearest names are {', '.join(map(repr, close))}." if close else " `prog.layers` lists them all."

    def parents(self, place: Place) -> tuple[str, ...]:
        if place.output is not None:
            return (place.node,)
        graph = self.graph
        names = [graph.nodes[p].name for p in graph.parents[graph.positions[place.node]]]
        return tuple([name for name in names if self._is_layer(name)])

    def _is_layer(self, name: str) -> bool:
        """Orphans, parameters and what stands for an edge are no layers."""
        return name not in self.graph.orphans and getattr(self.graph[name], "kind", "") not in ("parameter", "edge")

    def children(self, place: Place) -> tuple[str, ...]:
        if place.output is not None:
            return ()
        graph = self.graph
        users = [name for p in graph.users[graph.positions[place.node]] if self._is_layer(name := graph.nodes[p].name)]
        return (*users, *(end.label for end in self.places if end.output is not None and end.node == place.node))

    def keys_of(self, place: Place) -> tuple[Any, ...]:
        names = sorted(
            {
                name
                for name, places in self.aliases.items()
                if places[0] is place and (len(places) == 1 or name in self.module_places)
            }
        )
        ordinals = (
            [self.order.index(place.label) - len(self.order), self.order.index(place.label)]
            if place.label in self.order
            else []
        )
        return (*ordinals, place.label, *names)


def short(label: str) -> str:
    """`conv2d_3` for `conv2d_3_7`, `linear_1:2` for `linear_1_1:2`."""
    name, colon, call = label.partition(":")
    parts = name.rsplit("_", 1)
    return (parts[0] if len(parts) == 2 and parts[1].isdigit() and "_" in parts[0] else name) + colon + call


def _total(label: str) -> int:
    last = label.partition(":")[0].rsplit("_", 1)[-1]
    return int(last) if last.isdigit() and "." not in label else -1
