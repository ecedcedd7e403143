"""Which arrays the layers asked for give: their names, passes and tensors in one program.

In: a program, and `layers=`. Out: an Asked for each layer, by the name under which it is stored, and the program cut
behind them, whose output they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve, frozen

from .._edit.select import Selection, Where, where
from .._ir.label import Label
from .._ir.location import Location
from .._ir.node import Call, State, refs_in
from .._ir.trees import freeze_deep
from .._ir.util import is_glob
from .._layers.name_resolution import as_list
from ..errors import BadSource, NoSuchLayer


@frozen
class Asked:
    """A layer that is extracted: the name of its array, and its passes by the names that the program knows."""

    name: str
    label: str
    places: tuple[str, ...]
    is_series: bool  # of passes, along an axis of their own
    kinds: tuple[str, ...]  # which operation each place is, in words; empty for what is named by its module
    words: tuple[str, ...] = ()  # the user's


def asked_layers(prog: Any, layers: Any) -> tuple[Asked, ...]:
    """The layers that a user's words mean, in the order of the words, each once."""
    keys = _keys(layers)
    found: dict[str, tuple[Asked, Any]] = {}
    for key in keys:
        for one in _of_key(prog, key):
            # What a glob or type finds has one array, whatever else finds it; what is named has its own by that name.
            places = tuple([prog._index.find(place) for place in one.places])
            is_module = not any(one.kinds)
            is_named = is_module or (isinstance(key, str) and one.name.partition("[")[0] == key.partition("[")[0])
            known = next((name for name, (_, other) in found.items() if other == places and not is_named), one.name)
            asked = found[known][0] if known in found else one
            words = (*asked.words, *([key] if isinstance(key, str) else []))
            found[known] = evolve(asked, words=words), places
    if not found:
        raise NoSuchLayer(
            "layers= names no layer that is computed; parameters and buffers are the same for all rows. Give names, "
            "globs or types: layers=['layer*', 'fc']."
        )
    return tuple([asked for asked, _ in found.values()])


def _keys(layers: Any) -> list[Any]:
    if layers is None or isinstance(layers, (float, bytes)):
        raise NoSuchLayer(f"layers= is {layers!r:.60}. Give names, globs or types: layers=['layer*', 'fc'].")
    is_one = callable(layers) or isinstance(layers, (Where, Selection))
    return [layers] if is_one else as_list(layers)


def words_of(layers: Any) -> list[str]:
    """The names among what a user asks for; none if that is more than names."""
    keys = _keys(layers)
    return keys if all(isinstance(key, str) for key in keys) else []


def _of_key(prog: Any, key: Any) -> Iterable[Asked]:
    if isinstance(key, type):
        raise TypeError(
            f"layers= takes the type of an operation by name, such as 'conv2d', not the class {key.__name__}. Modules "
            "are named by address, also with globs: 'layer*', 'blocks.*.attn'."
        )
    if callable(key) and not isinstance(key, (Where, Selection)):
        key = where(key)
    sites = [one for one in _locations(prog, key) if not _is_state(prog, one)]
    if isinstance(key, str) and Label.of(key).turn:
        return _asked(prog, key, sites[:1])
    groups: dict[str, list[Location]] = {}
    for site in sites:
        groups.setdefault(Label.of(site.name).layer, []).append(site)
    if isinstance(key, str) and len(groups) == 1 and not is_glob(key) and all(site.is_every_pass for site in sites):
        groups = {key: next(iter(groups.values()))}
    return [one for name, group in groups.items() for one in _asked(prog, name, group)]


def _locations(prog: Any, key: Any) -> Iterable[Location]:
    found: Iterable[Location] = prog._locations(key)
    return found


def _is_state(prog: Any, site: Location) -> bool:
    return site.output is None and site.part is None and isinstance(prog.graph[site.node], State)


def _asked(prog: Any, name: str, group: list[Location]) -> list[Asked]:
    """The arrays of one layer, whose passes these are: several, if it is a module that gives several tensors."""
    ordered = sorted(group, key=lambda site: Label.of(site.name).number)
    is_series, ways = len(group) > 1, ordered[0].names or ("",)
    if any((site.names or ("",)) != ways for site in ordered):
        raise NoSuchLayer(f"the passes of {name!r} give unlike numbers of tensors. Name one pass: {ordered[0].name!r}.")
    own = name if is_series or not Label.of(ordered[0].name).turn else ordered[0].name
    label = Label.of(ordered[0].label).layer if is_series else ordered[0].label
    kinds = _kinds(prog, ordered)
    return [Asked(own + way, label, tuple([site.name + way for site in ordered]), is_series, kinds) for way in ways]


def nodes_of(prog: Any, asked: Iterable[Asked]) -> frozenset[str]:
    """The nodes whose values layers are."""
    sites = [prog._index.find(place) for one in asked for place in one.places]
    return frozenset([one.node for site in sites for one in site.each])


def _kinds(prog: Any, group: list[Location]) -> tuple[str, ...]:
    """Labels count operations, so that on another path the same label may be another operation: which one each is."""
    return tuple(["" if site.scope is not None else _kind(prog.graph, site.node) for site in group])


def _kind(graph: Any, name: str) -> str:
    """An operation in words: what it is, where it stands, and what it reads."""
    node = graph[name]
    read = [_words(graph[ref.node]) for ref in dict.fromkeys(refs_in(getattr(node, "trees", ())))]
    return f"{_words(node)}, of {', '.join(read)}" if read else _words(node)


def _words(node: Any) -> str:
    if isinstance(node, State):
        return node.address
    facts = [getattr(node, name, None) for name in ("target", "scope", "source")]
    target, *places = [str(getattr(one, "name", one)) for one in facts]
    return " ".join([target if isinstance(node, Call) else node.name, *[place for place in places if place != "None"]])


def require_same(first: tuple[Asked, ...], other: tuple[Asked, ...]) -> None:
    """Raise if a label means another operation in the program of another batch."""
    known = {one.name: one for one in first}
    for one in other:
        was = known.get(one.name, one)
        for place, then, now in zip(one.places, was.kinds, one.kinds, strict=False):
            if then != now:
                raise BadSource(
                    f"{place} is another operation in this batch than in the first, as the model takes another path:\n"
                    f"    first: {then}\n    now:   {now}\n"
                    "Labels count the operations that ran. Name the layer by the address of its module."
                )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in what a layer gives, in order."""
    found: list[torch.Tensor] = []
    freeze_deep(value, found.append)
    return found


def named_values(asked: Asked, passes: list[Any]) -> dict[str, list[torch.Tensor]]:
    """The tensors of a layer, one for each pass, by the name of their array, out of what each pass gave."""
    tensors = [tensors_in(one) for one in passes]
    count = len(tensors[0])
    if any(len(one) != count for one in tensors):
        raise NoSuchLayer(
            f"the passes of {asked.name!r} give unlike numbers of tensors. Name one pass: {asked.places[0]!r}."
        )
    names = [asked.name] if count == 1 else [f"{asked.name}[{number}]" for number in range(count)]
    return {name: [one[number] for one in tensors] for number, name in enumerate(names)}
