"""The grammar of labels: the names of nodes, and of calls of modules.

A label is `{type}_{n-th layer of its type}_{n-th layer}`, with `:pass` where a layer runs more than once. A parameter
is named by its address. What edits add is named after the node beside it (`relu_1_2_before`) or around it
(`matmul_1_of_lstm_1_3`); a prime marks a name that was taken. Calls of modules look alike: `features.6:2`.

Which node gets which label is decided in _layers/naming.py: a capture is handed that function, a `Naming`, and gives it
a `NodeSummary` of each node, so that it needs to know nothing of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class Label(NamedTuple):
    """The name of a node, or of a call of a module: the layer's, and which pass where it has several."""

    layer: str
    turn: str = ""  # the number of the pass, with its primes

    @staticmethod
    def of(name: str) -> Label:
        layer, _, turn = name.rpartition(":")
        return Label(layer, turn) if _is_number(turn.rstrip("'")) and layer else Label(name)

    def __str__(self) -> str:
        return f"{self.layer}:{self.turn}" if self.turn else self.layer

    @property
    def number(self) -> int:
        """The number of the pass, from 1."""
        return int(self.turn.rstrip("'") or 1)

    @property
    def short(self) -> str:
        """Without the number among all layers: `conv2d_3` for `conv2d_3_7`, `linear_1:2` for `linear_1_1:2`."""
        rest, _, last = self.layer.rpartition("_")
        return str(Label(rest, self.turn)) if _is_number(last) and "_" in rest else str(self)

    @property
    def numbers(self) -> tuple[int, int] | None:
        """The numbers among the layers of its type and among all layers: (3, 7) for `conv2d_3_7`."""
        kind, *numbers = self.layer.rsplit("_", 2)
        is_numbered = len(numbers) == 2 and all(map(_is_number, numbers)) and "." not in kind
        return (int(numbers[0]), int(numbers[1])) if is_numbered else None


def _is_number(word: str) -> bool:
    """True for a number as labels have it: `²` is a digit as well, and no number."""
    return word.isascii() and word.isdigit() and len(word) < 19


def name_beside(name: str, word: str) -> str:
    """A name derived from another one: `relu_1_2_before`; `linear_1_1_before:2` for a second pass."""
    layer, turn = Label.of(name)
    return str(Label(f"{layer}_{word}", turn))


def unused_name(wanted: str, taken: Iterable[str]) -> str:
    """The name, or the first of `{name}_2`, `{name}_3` ... that is not taken."""
    names = taken if isinstance(taken, (set, frozenset, dict)) else set(taken)
    name, number = wanted, 2
    while name in names:
        name, number = name_beside(wanted, str(number)), number + 1
    return name


def primed_name(name: str, taken: Collection[str]) -> str:
    """The name, with as many primes as make it unique."""
    while name in taken:
        name += "'"
    return name


class NodeSummary(NamedTuple):
    """What naming needs to know of a node: its type, and the numbers of the values that it reads and gives."""

    kind: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    function: Callable[..., Any] | None = None
    address: str | None = None  # of a parameter, which is named by it and counts as no layer
    modules: tuple[str, ...] = ()  # the addresses of the modules that it ran in, outermost first
    site: Hashable = None  # the place in the code that ran it
    literals: Callable[[], Any] = tuple  # its arguments without the tensors


# From the nodes in execution order, and the numbers of the values that the model returned or wrote: a name for each
# node, and which of them are orphans.
Naming = Callable[[Sequence[NodeSummary], set[int]], tuple[list[str], list[bool]]]
