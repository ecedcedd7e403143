"""Small helpers that know nothing of programs: a read-only mapping, lock-free cached properties, optional libraries,
notes on exceptions on every Python, and globs of dotted names.

In a glob, `*` stays within one level and `**` crosses dots: `layer4.*` means `layer4.0` but not `layer4.0.conv1`;
`layer4.**` means both; `**.attn` every module called `attn`, on any level. `?` is one character other than a dot,
`[ab]` one of these.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")


class FrozenMapping(Mapping[str, T]):
    """A read-only mapping. Copies of it, and what is loaded from a pickle, are plain ordered dicts."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, T]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> T:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, other: Mapping[str, T]) -> dict[str, T]:
        return {**self._values, **other}

    def __repr__(self) -> str:
        return repr(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self._values.items())  # torch.load takes such a one unasked


T_co = TypeVar("T_co", covariant=True)


class cached_property(functools.cached_property[T_co]):
    """Python's own as of 3.12. Before, it held one lock for all objects of a class, and a child forked while another
    thread held it would wait forever. Here two threads may compute the same value twice.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        found = instance.__dict__
        assert self.attrname is not None
        if self.attrname not in found:
            found[self.attrname] = self.func(instance)
        return found[self.attrname]


def optional(module: str, extra: str) -> Any:
    """A library, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"this needs {name}: pip install 'replaylens[{extra}]'") from error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception that is not replaylens's own. One that takes no notes stays as it is."""
    with suppress(AttributeError, TypeError):
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]


def notes_of(error: BaseException) -> tuple[str, ...]:
    """The notes on an exception."""
    return tuple(getattr(error, "__notes__", ()))


SIGNS = "*?["


def is_glob(word: str) -> bool:
    """True if a word contains a glob character."""
    return any(sign in word for sign in SIGNS)


def matches(name: str, pattern: str) -> bool:
    """True if the whole name matches."""
    return _compiled(pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(map(_part, parts)), re.DOTALL)


def _part(part: str) -> str:
    known = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    if part in known:
        return known[part]
    if part.startswith("[") and part.endswith("]") and len(part) > 2:
        inside = part[1:-1].replace("\\", "\\\\")
        return f"[^{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
    return re.escape(part)
