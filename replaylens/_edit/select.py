"""Which layers a user's key means: a key of a mapping of patches, of `save=`, or a selection.

In: the names of a program's layers, and a key: a name, a type of operation, a glob, a predicate, a selection; for
`save=` also "all", "none", parts of names, ordinals and lists. Out: Locations, each with the name to ask another
program for, or the labels to save; or an error that says what was found instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from attrs import evolve, field, frozen

from .._ir.graph import Graph
from .._ir.label import Label
from .._ir.location import Location
from .._ir.node import State
from .._ir.util import cached_property, is_glob, matches
from ..errors import NoSuchLayer, WrongCount

NAMING_CURE = (
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

    @property
    def program(self) -> Any:
        """The program whose layers they are."""
        return getattr(self._layer, "__self__", None)

    def __reduce__(self) -> Any:
        """Its pickle is that of the program, and the labels."""
        return selection_of, (self.program, self.labels)


def selection_of(program: Any, labels: Iterable[str]) -> Selection:
    """The layers of a program that have these labels, which it must have."""
    return evolve(program.find(), labels=tuple(labels))


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


_WHOLE = ("all", "none")
_LABEL = re.compile(r"[a-z0-9]+_\d+(_\d+)?(:\d+)?")  # a whole label, never part of one


@frozen
class SaveSpec:
    """What is to be saved: everything, or what these keys mean."""

    keys: tuple[Any, ...] = ()
    everything: bool = False

    @staticmethod
    def of(save: Any) -> SaveSpec:
        """The meaning of a user's `save=`."""
        keys = list(_flat(save))
        words = {key for key in keys if isinstance(key, str)}
        return SaveSpec(tuple([key for key in keys if not (isinstance(key, str) and key in _WHOLE)]), "all" in words)

    @cached_property
    def _words(self) -> tuple[frozenset[str], tuple[str, ...]]:
        """The names that are meant literally, and those that need only be part of one."""
        words = [key if isinstance(key, str) else getattr(key, "label", "") for key in self.keys]
        exact = {word.partition(":")[0] for word in words if word}
        return frozenset(exact), tuple([word for word in words if word and not _LABEL.fullmatch(word)])

    def may_mean(self, names: Iterable[str], ordinal: int | None = None) -> bool:
        """True if it may mean a layer of these names, as far as is known while the model runs. Functions
        are not asked.
        """
        exact, loose = self._words
        if ordinal is not None and ordinal in [key for key in self.keys if type(key) is int]:
            return True
        return any(name in exact or any(word in name or matches(name, word) for word in loose) for name in names)

    def labels(self, names: Names, layer: Callable[[str], Any]) -> tuple[str, ...]:
        """The labels of the layers that it means. A key that finds nothing is an error."""
        if self.everything:
            return names.order
        found = {label for key in self.keys for label in _labels_of(names, layer, key)}
        return tuple([label for label in names.order if label in found])

    def names_itself(self, names: Names, layer: Callable[[str], Any]) -> tuple[str, ...]:
        """The labels of layers that it names one by one: not by type, part of a name, or function."""
        found: list[str] = []
        for key in self.keys:
            is_loose = callable(key) or isinstance(key, (Selection, Where))
            if not is_loose and (not isinstance(key, str) or _is_known(names, key)):
                meant = [site for site in sites(names, layer, key) if is_named(key, site)]
                found += [one.label for site in meant for one in site.each]
        return tuple(found)


def _is_known(names: Names, key: str) -> bool:
    return key in names.by_label or key in names.aliases or key in names.module_calls


def _flat(save: Any) -> Iterator[Any]:
    """The single keys of a `save=`."""
    if isinstance(save, (list, tuple, set, frozenset)):
        for key in save:
            yield from _flat(key)
    elif type(save) in (str, int) or isinstance(save, (Selection, Where)) or callable(save) or hasattr(save, "label"):
        yield save
    elif save is not None:
        raise TypeError(
            "save= takes 'all', 'none', names of layers, types, parts of names, ordinals, functions of a layer, or a "
            f"list of these, not {save!r}."
        )


def _labels_of(names: Names, layer: Callable[[str], Any], key: Any) -> list[str]:
    """The labels that one key means: first as any key of layers; failing that, as a part of names."""
    if callable(key) and not isinstance(key, (Selection, Where)):
        return [label for label in names.order if key(layer(label))]
    if isinstance(key, (Selection, Where)) and not len(getattr(key, "labels", "x")):
        return []
    try:
        return [one.label for site in sites(names, layer, key) for one in site.each]
    except NoSuchLayer:
        found = [label for label in names.order if _has_part(layer(label), key)] if isinstance(key, str) else []
        if not found or _LABEL.fullmatch(key):
            raise
        return found


def _has_part(layer: Any, word: str) -> bool:
    """True if the word is part of the layer's label, or of the address of a module whose output it is."""
    return bool(word) and any(word in name for name in (layer.label, *layer.output_of))


SAVE_EVERYTHING = SaveSpec(everything=True)
