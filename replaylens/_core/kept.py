"""A mapping that nobody can change. Copies of it, and what is loaded of a pickle, are plain ordered dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Kept(Mapping[str, T]):
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
