"""Tensors as values: equal when they are so bit for bit, and short in print.

In: a tensor, number or anything else that a patch holds. Out: what attrs compares and hashes in its place, and words.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.sameness import same


class _Content:
    """A tensor or number as what it is equal to: bit for bit."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and same(self.value, other.value)

    def __hash__(self) -> int:
        value = self.value
        return hash((tuple(value.shape), value.dtype)) if isinstance(value, torch.Tensor) else hash(repr(value))


def content(value: Any) -> Any:
    return _Content(value) if isinstance(value, (torch.Tensor, int, float, complex)) else value


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<tensor {tuple(value.shape)}>"
    if isinstance(value, tuple) and value and all(isinstance(one, str) for one in value):
        return repr(" ".join(value))
    name = getattr(value, "__name__", None) if callable(value) else None
    text = repr(value) if name is None else name
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"
