"""Which layers' values are to be saved.

In: the user's `save=`: "all", "none", names, types, parts of names, ordinals, functions of a layer, lists that mix
them. Out: a SaveSpec; and, once layers have names, the labels that it means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attrs import frozen

from .._ir.util import cached_property, matches
from ..errors import NoSuchLayer
from .select import Names, Selection, Where, is_named, sites

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


EVERYTHING = SaveSpec(everything=True)
