"""Which layers a user's key means: a key of a mapping of patches, or a selection.

In: the names of a program's layers, and a key: a name, a type of operation, a glob, a predicate, a selection. Out:
Locations, each with the name to ask another program for; or an error that says what was found instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from attrs import evolve, field, frozen

from .._ir.graph import Graph
from .._ir.label import Label
from .._ir.location import Location
from .._ir.node import State
from .._ir.util import is_glob, matches
from ..errors import NoSuchLayer, WrongCount

CURE = (
    "Name the layers that have such axes, or find them: "
    "prog.find(op=..., where=lambda layer: len(layer.shape or ()) == 4)."
)


class Names(Protocol):
    """What selecting needs of the names of a program's layers."""

    @property
    def graph(self) -> Graph: ...
    @property
    def places(self) -> tuple[Location, ...]: ...
    @property
    def order(self) -> tuple[str, ...]: ...
    @property
    def by_label(self) -> dict[str, Location]: ...
    @property
    def aliases(self) -> dict[str, list[Location]]: ...
    @property
    def module_places(self) -> dict[str, Location]: ...
    @property
    def module_calls(self) -> dict[str, int]: ...
    @property
    def other_addresses(self) -> dict[str, tuple[str, ...]]: ...
    def find(self, name: Any) -> Location: ...
    def nearest(self, name: str) -> str: ...


@frozen
class Where:
    """A key for all layers for which a predicate holds."""

    predicate: Callable[[Any], Any]

    def __repr__(self) -> str:
        return f"where({getattr(self.predicate, '__name__', self.predicate)})"


def where(predicate: Callable[[Any], Any]) -> Where:
    """A key for all layers for which this holds: `{where(lambda layer: layer.layer_type == "relu"): Zero()}`."""
    if not callable(predicate):
        raise TypeError(f"where takes a function of a layer, not {predicate!r}.")
    return Where(predicate)


@frozen(repr=False)
class Selection:
    """Some layers of a program, in its order. A value with `len`, iteration, indexing, `|`, `&` and `-`, and a key of a
    mapping of patches.
    """

    labels: tuple[str, ...]
    _names: Names = field(eq=False)
    _layer: Callable[[str], Any] = field(eq=False)

    def assert_count(self, count: int) -> Selection:
        """Itself, if it has this many layers."""
        if len(self) != count:
            raise WrongCount(f"{len(self)} layers are selected, not {count}: {_some(self.labels)}.")
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[Any]:
        return map(self._layer, self.labels)

    def __getitem__(self, index: Any) -> Any:
        found = self.labels[index]
        return evolve(self, labels=found) if isinstance(index, slice) else self._layer(found)

    def __contains__(self, layer: object) -> bool:
        return getattr(layer, "label", layer) in self.labels

    def __or__(self, other: Selection) -> Selection:
        return self._of({*self.labels, *other.labels})

    def __and__(self, other: Selection) -> Selection:
        return self._of({*self.labels} & {*other.labels})

    def __sub__(self, other: Selection) -> Selection:
        return self._of({*self.labels} - {*other.labels})

    def _of(self, labels: set[str]) -> Selection:
        every = dict.fromkeys([*self._names.order, *[node.name for node in self._names.graph.state_nodes]])
        order = {label: number for number, label in enumerate(every)}
        if foreign := sorted(labels - {*order}):
            raise NoSuchLayer(f"the selections are of different programs: one has no {foreign[0]!r}.")
        return evolve(self, labels=tuple(sorted(labels, key=order.__getitem__)))

    def __repr__(self) -> str:
        return f"<Selection of {len(self)} layers: {_some(self.labels)}>"


def _some(labels: Iterable[str]) -> str:
    words = list(labels)
    return ", ".join([*words[:6], *(["..."] if len(words) > 6 else [])]) or "none"


def find(
    names: Names,
    layer: Callable[[str], Any],
    op: str | None = None,
    module: str | None = None,
    input_of: str | None = None,
    where: Callable[[Any], Any] | None = None,
    state: str | None = None,
) -> Selection:
    """The layers for which all that is given holds. Parameters and buffers are among them only by `state`."""
    fed = None if input_of is None else _inputs_of(names, layer, input_of)
    among = _computed(names, exact=op) if op or module else [*names.order]
    among = among if state is None else _state(names, state)
    found = [
        label
        for label in among
        if (op is None or matches(layer(label).layer_type, op))
        and (module is None or any(_is_in(names, module, call) for call in layer(label).modules))
        and (fed is None or label in fed)
        and (where is None or where(layer(label)))
    ]
    return Selection(tuple(found), names, layer)


def _computed(names: Names, exact: str | None = None) -> list[str]:
    """The layers that are no state of the model; those of exactly this type are among them, whatever they are."""
    found = [(label, names.by_label[label]) for label in names.order]
    return [label for label, place in found if not _is_state(names, place) or names.graph[place.node].kind == exact]  # type: ignore[union-attr]


def _is_state(names: Names, place: Location) -> bool:
    return place.output is None and isinstance(names.graph[place.node], State)


def _state(names: Names, pattern: str) -> list[str]:
    """The parameters and buffers that an address or a glob means."""
    return [
        node.name
        for node in names.graph.state_nodes
        if any(matches(name, pattern) for name in (node.address, *node.aliases, node.name))
    ]


def _is_in(names: Names, pattern: str, call: str) -> bool:
    """True if a glob matches a module call such as `features.6:1`, with or without its number, under any of
    its names.
    """
    address, number = Label.of(call)
    known = (address, *names.other_addresses.get(address, ()))
    return any(matches(one, pattern) or matches(f"{one}:{number}", pattern) for one in known)


def _inputs_of(names: Names, layer: Callable[[str], Any], pattern: str) -> set[str]:
    """The layers read by what the pattern means: by a layer, by its label, or from outside by a module."""
    found: set[str] = set()
    meant = {site.label for site in _by_labels(names, pattern)}
    for label in names.order:
        reader = layer(label)
        calls = {call for call in reader.modules if _is_in(names, pattern, call)}
        for parent in reader.parents if label in meant or calls else ():
            if parent in names.order and (label in meant or calls - {*layer(parent).modules}):
                found.add(parent)
    return found


def sites(names: Names, layer: Callable[[str], Any], key: Any) -> tuple[Location, ...]:
    """The locations that a key of a mapping means, in the program's order. A key that finds nothing is an error."""
    if isinstance(key, Selection):
        found = [names.find(label) for label in key.labels]
    elif isinstance(key, Where):
        found = [place for place in names.places if key.predicate(layer(place.label))]
    elif isinstance(key, str):
        found = _named(names, layer, key)
    else:
        found = [names.find(key)]
    if not found:
        raise NoSuchLayer(f"{key!r} finds none of the {len(names.order)} layers. `prog.layers` lists them all.")
    return _distinct(names, found)


def _named(names: Names, layer: Callable[[str], Any], key: str) -> list[Location]:
    """The locations that a name means: exactly that layer, all its passes, all of a type, or all that a
    glob matches.
    """
    if key in names.by_label or key in names.module_places:
        return [evolve(names.find(key), name=key)]
    if places := names.aliases.get(key):
        several = len(places) > 1
        return [evolve(p, name=p.label if several else key, is_every_pass=several) for p in places]
    if (calls := names.module_calls.get(key, 0)) > 1:
        addresses = [f"{key}:{number}" for number in range(1, calls + 1)]
        return [evolve(names.find(address), name=address, is_every_pass=True) for address in addresses]
    computed = [place for place in names.places if not _is_state(names, place)]
    if of_type := [place for place in computed if layer(place.label).layer_type == key]:
        return of_type
    if is_glob(key) and (matched := _by_glob(names, key)):
        return matched
    if why := _why_none(names, key):
        raise NoSuchLayer(why)
    return [evolve(names.find(key), name=key)]  # raises, and offers the nearest names


def _why_none(names: Names, key: str) -> str:
    """Why a type or a glob finds no layer; empty if unknown."""
    if found := _state(names, key) or [node.name for node in names.graph.state_nodes if node.kind == key]:
        return (
            f"{key!r} finds no layer that the model computed, but only its state: {_some(found)}. Parameters and "
            "buffers are meant by their addresses, or by prog.find(state='...')."
        )
    wider = key.replace("**", "*").replace("*", "**")
    deeper = [name for name in names.module_places if matches(name, wider)] if "*" in key else []
    if not deeper:
        return ""
    return f"{key!r} finds nothing: `*` stays within one level of an address. {wider!r} finds {_some(deeper)}."


def is_named(key: Any, site: Location) -> bool:
    """True if a key names this very layer, or all its passes, and is not a type, a glob or a selection."""
    return site.is_every_pass or not isinstance(key, (str, Selection, Where)) or site.name == key


def _by_glob(names: Names, pattern: str) -> list[Location]:
    """The outputs of all modules, and all layers, that a glob matches; parameters and buffers excluded."""
    every = {
        f"{address}:{number}"
        for address, calls in names.module_calls.items()
        if calls > 1 and matches(address, pattern)
        for number in range(1, calls + 1)
    }
    places = names.module_places.items()
    known = {address: place for address, place in places if address in every or matches(address, pattern)}
    modules = [
        evolve(place, name=name, is_every_pass=name in every)
        for name, place in known.items()
        if not _has_shorter_name(name, known)
    ]
    return [*modules, *_by_labels(names, pattern)]


def _has_shorter_name(address: str, known: dict[str, Any]) -> bool:
    """True for the longer of two names: `features.6:1` of a module that is called once."""
    return address.rpartition(":")[0] in known


def _by_labels(names: Names, pattern: str) -> list[Location]:
    """The layers whose labels, in any of their forms, a glob matches."""
    other: dict[str, list[str]] = {}
    for alias, places in names.aliases.items():
        for place in places:
            if alias not in names.module_places:
                other.setdefault(place.label, []).append(alias)
    return [
        place
        for place in names.places
        if not _is_state(names, place)
        and any(matches(name, pattern) for name in (place.label, *other.get(place.label, ())))
    ]


def _distinct(names: Names, found: list[Location]) -> tuple[Location, ...]:
    """Without second names of one value: a program's output is also a node, a part lies within its node."""
    if len(found) == 1:
        return tuple(found)
    whole = {site.node for site in found if site.output is None and site.part is None}
    several = [site for site in found if site.names]
    found = [site for site in found if not site.names]
    kept: dict[Any, Location] = {}
    for site in several:  # a module's output takes precedence over the layers that give it
        if not any({*site.refs} & {*other.refs} for other in kept.values()):
            kept[site.refs] = site
            nodes = {ref.node for ref in site.refs}
            whole |= nodes
            found = [other for other in found if other.node not in nodes]
    for site in found:
        is_within = site.part is not None and site.node in whole
        is_end = site.output is not None and any(other.output is None and other.node == site.node for other in found)
        if not is_within and not is_end:
            kept.setdefault((site.node, site.output, site.part), site)
    order = names.graph.positions
    return tuple(sorted(kept.values(), key=lambda site: (site.output is not None, order[site.node])))
