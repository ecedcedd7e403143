"""The grammar of parts: `"b [t] ([head] d)"`, one side of an einops pattern whose bracketed axes are addressed.

In: a pattern, a shape, the sizes that were given. Out: the axes of the shape in the pattern's words, packed axes
unpacked. Indices and tensors are not known here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from attrs import frozen

from ..errors import BadPart

_TOKEN = re.compile(r"\s*(\.\.\.|[()\[\]]|\w+)")


@frozen
class Name:
    """An axis as written in the pattern. `1` is the name of an axis of size one."""

    word: str
    is_bracketed: bool = False

    def __str__(self) -> str:
        return f"[{self.word}]" if self.is_bracketed else self.word


@frozen
class Pattern:
    """What each axis of a tensor consists of: one name, or several that are packed. None stands for `...`."""

    groups: tuple[tuple[Name, ...] | None, ...]
    packed: tuple[bool, ...]

    @property
    def names(self) -> tuple[Name, ...]:
        return tuple([name for group in self.groups for name in group or () if name.word != "1"])

    def __str__(self) -> str:
        words = ["..." if group is None else " ".join(map(str, group)) for group in self.groups]
        return " ".join(f"({word})" if packed else word for word, packed in zip(words, self.packed, strict=True))


class Axis(NamedTuple):
    """One unpacked axis of a shape: its name, its size, and the tensor's axis that it is part of."""

    name: str
    size: int
    within: int
    is_bracketed: bool = False


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """The pattern that a text writes, or an error that shows why it is not one."""
    groups: list[tuple[Name, ...] | None] = []
    packed: list[bool] = []
    inside: list[Name] | None = None
    tokens = _tokens(text)
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "(" and inside is None:
            inside = []
        elif token == ")" and inside is not None:
            groups.append(tuple(inside))
            packed.append(True)
            inside = None
        elif token == "..." and inside is None:
            if None in groups:
                raise _unreadable(text, "`...` occurs twice")
            groups.append(None)
            packed.append(False)
        elif token == "[" or token.isidentifier() or token == "1":
            if token == "[" and (position + 1 >= len(tokens) or tokens[position + 1] != "]"):
                raise _unreadable(text, "a bracket holds one name")
            name = Name(tokens[position], True) if token == "[" else Name(token)
            position += 2 if token == "[" else 0
            if not name.word.isidentifier() and (name.is_bracketed or name.word != "1"):
                raise _unreadable(text, f"{name.word!r} is not the name of an axis")
            if inside is not None:
                inside.append(name)
            else:
                groups.append((name,))
                packed.append(False)
        else:
            raise _unreadable(text, _reason(token, inside is not None))
    if inside is not None:
        raise _unreadable(text, "a parenthesis is not closed")
    made = Pattern(tuple(groups), tuple(packed))
    words = [name.word for name in made.names]
    if twice := next((word for word in words if words.count(word) > 1), None):
        raise _unreadable(text, f"the axis {twice} occurs twice")
    return made


def _tokens(text: str) -> list[str]:
    found, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise _unreadable(text, f"{text[position:].strip()[0]!r} has no meaning")
        found.append(match[1])
        position = match.end()
    return found


def _reason(token: str, packed: bool) -> str:
    if token == "(":
        return "parentheses are nested"
    if token == "...":
        return "`...` is inside parentheses"
    if token == ")":
        return "a parenthesis is closed that was not opened"
    return "a bracket is closed that was not opened" if token == "]" else f"{token!r} is not the name of an axis"


def _unreadable(text: str, fact: str) -> BadPart:
    return BadPart(
        f'{fact} in the pattern "{text}".\nWrite it as in einops, with the addressed axes in brackets: "b [c] h w".'
    )


def axes_of(pattern: Pattern, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The axes of a shape in the pattern's words. In each packed group the size of one axis is inferred."""
    named = len(pattern.groups) - (None in pattern.groups)
    if len(shape) < named or (len(shape) > named and None not in pattern.groups):
        least = "at least " if None in pattern.groups else ""
        raise BadPart(f"the pattern has {least}{_count(named)}, and the tensor {_count(len(shape))}")
    found: list[Axis] = []
    at = 0
    for group in pattern.groups:
        if group is None:
            more = len(shape) - named
            found.extend(Axis(f"...{n}", shape[at + n], at + n) for n in range(more))
            at += more
        else:
            found.extend(_unpacked(group, at, shape[at], sizes))
            at += 1
    return tuple(found)


def _count(axes: int) -> str:
    return "1 axis" if axes == 1 else f"{axes} axes"


def _unpacked(group: tuple[Name, ...], at: int, whole: int, sizes: Mapping[str, int]) -> list[Axis]:
    known = {name.word: 1 if name.word == "1" else sizes[name.word] for name in group if name.word in ("1", *sizes)}
    unknown = [name.word for name in group if name.word not in known]
    product = math.prod([known[name.word] for name in group if name.word in known])
    masked = {name.word for name in group if name.is_bracketed}  # sizes of others are given as such
    words = {
        word: f"a mask of {size} for {word}" if word in masked else f"{word}={size}" for word, size in known.items()
    }
    told = ", ".join(text for word, text in words.items() if word != "1")
    if len(unknown) > 1:
        some = " and ".join([", ".join(unknown[:-1]), unknown[-1]])
        raise BadPart(
            f"the sizes of {some} cannot be inferred from axis {at}, which is {whole}: "
            f"give {'one' if len(unknown) == 2 else f'{len(unknown) - 1}'} of them"
        )
    if not unknown and product != whole:
        wanted = told if len(group) == 1 and told else f"({' '.join(map(str, group))}) {told}".strip()
        raise BadPart(f"axis {at} is {whole}, not {product}: {wanted} does not fit")
    if unknown and (product == 0 or whole % product):
        raise BadPart(f"axis {at} is {whole}, which {told} does not divide")
    if unknown:
        known[unknown[0]] = whole // product
    return [Axis(name.word, known[name.word], at, name.is_bracketed) for name in group]
