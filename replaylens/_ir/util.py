"""A mapping that nobody can change. Copies of it, and what is loaded of a pickle, are plain ordered dicts.

Properties that are worked out when they are first asked for.

Python's own hold a lock on 3.10 and 3.11, one for all objects of a class: a child that is forked while another thread
works one out would wait for ever. What two threads work out at once here is the same twice.

Libraries that only some functions need.

Notes on exceptions, which Python shows beneath them; before Python 3.11 they are kept, for those who look.

In: an exception and a line on it. Out: the exception has it in `__notes__`.

Globs of dotted names: `*` stays within one level, `**` crosses dots.

In: a pattern and a name. Out: does it match? `layer4.*` means `layer4.0`, not `layer4.0.conv1`; `layer4.**` both;
`**.attn` every module called `attn`, on whatever level. `?` is one sign that is no dot, `[ab]` one of these.
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
    """Named values, to be read."""

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
    """As Python's own from 3.12 on."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        found = instance.__dict__
        assert self.attrname is not None
        if self.attrname not in found:
            found[self.attrname] = self.func(instance)
        return found[self.attrname]


def optional(module: str, extra: str) -> Any:
    """A library, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"this needs {name}: pip install 'replaylens[{extra}]'") from error


def add_note(error: BaseException, note: str) -> None:
    """What replaylens knows of an exception that is not its own. One that takes no notes stays as it is."""
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
    """Does a word have a sign of a glob?"""
    return any(sign in word for sign in SIGNS)


def matches(name: str, pattern: str) -> bool:
    """Does the whole name match?"""
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
