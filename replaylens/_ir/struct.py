"""Struct: what stands for a container or object of a user's class in a program that was loaded from a file.

In: the name of a class, and items with their keys. Out: an inert object whose class bears that name, and whose items
are found by attribute, by key and by number. It has no methods of the original, and nothing of the user's is imported
or run to make it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from attrs import frozen

FORMS = ("mapping", "sequence", "object")
_NAME = re.compile(r"[\w<>]+(\.[\w<>]+)*")
_classes: WeakValueDictionary[tuple[str, str, str], type[Struct]] = WeakValueDictionary()


@frozen
class StructKeys:
    """In a frozen tree: the keys of a Struct whose original had none in the tree, as named tuples have none there."""

    keys: tuple[Any, ...]


class Struct:
    """A container or object of a class of the user's, opened: `out.logits`, `out["logits"]`, `out[0]`.

    Iteration goes over the keys of what was a mapping, and over the items of anything else. Items cannot be replaced.
    """

    __slots__ = ("_count", "_items", "_keys")
    _form: str = "object"
    _keys: tuple[Any, ...]  # one for each item
    _items: tuple[Any, ...]
    _count: int | None  # how many are elements, if the rest are attributes

    @classmethod
    def made(cls, keys: tuple[Any, ...], items: tuple[Any, ...], count: int | None = None) -> Struct:
        """A Struct of this class."""
        return cls.filled(cls.__new__(cls), keys, items, count)

    @staticmethod
    def filled(made: Struct, keys: tuple[Any, ...], items: tuple[Any, ...], count: int | None = None) -> Struct:
        """Fills an empty one, which may be among its own items."""
        object.__setattr__(made, "_keys", tuple(keys))
        object.__setattr__(made, "_items", tuple(items))
        object.__setattr__(made, "_count", count)
        return made

    def __getattr__(self, name: str) -> Any:
        if name in ("_keys", "_items", "_count"):  # it is being made
            raise AttributeError(name)
        for key, item in zip(self._keys, self._items, strict=True):
            if type(key) is str and key == name:
                return item
        if self._form == "mapping" and name in _MAPPING:
            return _MAPPING[name].__get__(self)
        known = ", ".join(str(key) for key in self._keys)
        raise AttributeError(
            f"{type(self).__name__} was loaded from a file: it has its items ({known}), and no {name!r}."
        )

    def __getitem__(self, key: Any) -> Any:
        if self._form == "mapping" or type(key) is str:
            for one, item in zip(self._keys, self._items, strict=True):
                if type(one) is type(key) and one == key:
                    return item
        if isinstance(key, (int, slice)):
            return self._items[: self._count][key]
        raise KeyError(key)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} was loaded from a file, and cannot be changed.")

    def __iter__(self) -> Iterator[Any]:
        return iter((self._keys if self._form == "mapping" else self._items)[: self._count])

    def __len__(self) -> int:
        return len(self._items[: self._count])

    def __contains__(self, key: Any) -> bool:
        return any(key is one or (type(key) is type(one) and key == one) for one in self._keys)

    def __repr__(self) -> str:
        words = [f"{key}={item!r}" for key, item in zip(self._keys, self._items, strict=True)]
        return f"{type(self).__name__}({', '.join(words)})"

    def __copy__(self) -> Struct:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self)
        name = kind.__module__, kind.__qualname__, kind._form
        return restored_struct, (*name, self._keys, self._items, self._count)


def _get(struct: Struct, key: Any, default: Any = None) -> Any:
    try:
        return struct[key]
    except KeyError:
        return default


_MAPPING: dict[str, Any] = {
    "keys": lambda struct: struct._keys[: struct._count],
    "values": lambda struct: struct._items[: struct._count],
    "items": lambda struct: tuple(zip(struct._keys, struct._items, strict=True))[: struct._count],
    "get": _get,
}


def struct_class(module: str, qualname: str, form: str) -> type[Struct]:
    """The class of Structs that stands for a user's class of this name."""
    if form not in FORMS or not _NAME.fullmatch(module) or not _NAME.fullmatch(qualname):
        raise ValueError(f"{module}.{qualname} is no name of a class")
    found = _classes.get((module, qualname, form))
    if found is None:
        body = {"__module__": module, "__qualname__": qualname, "__slots__": (), "_form": form}
        found = _classes[module, qualname, form] = type(qualname.rpartition(".")[2], (Struct,), body)
    return found


def restored_struct(module: str, qualname: str, form: str, keys: Any, items: Any, count: int | None) -> Struct:
    """A Struct from a pickle, or a copy."""
    return struct_class(module, qualname, form).made(tuple(keys), tuple(items), count)


def struct_word(name: Any) -> str:
    """The name of a class or its module, as `struct_class` takes it."""
    if not isinstance(name, str) or not name:
        return "unknown"
    return name if _NAME.fullmatch(name) else ".".join(re.sub(r"[^\w<>]", "_", word) or "_" for word in name.split("."))


def form_of(kind: type) -> str:
    """Which kind of container a class is."""
    if issubclass(kind, Struct):
        return kind._form
    if issubclass(kind, Mapping):
        return "mapping"
    return "sequence" if issubclass(kind, (tuple, list, set, frozenset)) or hasattr(kind, "maxlen") else "object"
