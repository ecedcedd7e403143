"""What nodes are called: the grammar of labels, and a label for each node of a program.

A label is `{type}_{n-th layer of its type}_{n-th layer}`, with `:pass` where a layer runs more than once; recurrence.py
says which calls are passes of one layer. Numbers count layers in execution order, after orphans (what neither comes
from an input nor reaches an output) are set aside. Inputs count from zero. A parameter is called by its address. What
edits add is named after what it stands beside (`relu_1_2_before`) or lies in (`matmul_1_of_lstm_1_3`), and a prime
marks a name that another has already. Calls of modules are written in the same way: `features.6:2`.

In: a label; or drafts of nodes in execution order, knowing only what each reads and gives. Out: its parts; or a label
for each. No tensor is touched here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from .drafts import Draft, Wires
from .recurrence import same_layers


class Label(NamedTuple):
    """The name of a node, or of a call of a module: the layer's, and which pass where it has several."""

    layer: str
    turn: str = ""  # the number of the pass, with its primes

    @staticmethod
    def of(name: str) -> Label:
        layer, _, turn = name.rpartition(":")
        return Label(layer, turn) if turn.rstrip("'").isdigit() and layer else Label(name)

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
        return str(Label(rest, self.turn)) if last.isdigit() and "_" in rest else str(self)

    @property
    def numbers(self) -> tuple[int, int] | None:
        """The numbers among the layers of its type and among all: (3, 7) for `conv2d_3_7`."""
        kind, *numbers = self.layer.rsplit("_", 2)
        is_numbered = len(numbers) == 2 and numbers[0].isdigit() and numbers[1].isdigit() and "." not in kind
        return (int(numbers[0]), int(numbers[1])) if is_numbered else None


def beside(name: str, word: str) -> str:
    """A name next to another one: `relu_1_2_before`; `linear_1_1_before:2` for a second pass."""
    layer, turn = Label.of(name)
    return str(Label(f"{layer}_{word}", turn))


def fresh(wanted: str, taken: Iterable[str]) -> str:
    """The name, or the first of `{name}_2`, `{name}_3` ... that nobody has."""
    names = taken if isinstance(taken, (set, frozenset, dict)) else set(taken)
    name, number = wanted, 2
    while name in names:
        name, number = beside(wanted, str(number)), number + 1
    return name


def primed(name: str, taken: Collection[str]) -> str:
    """The name, with as many primes as it needs to be nobody else's."""
    while name in taken:
        name += "'"
    return name


def labels(drafts: Sequence[Draft], ends: set[int]) -> tuple[list[str], list[bool]]:
    """A name for each draft, and which of them are orphans."""
    orphans = _orphans(drafts, ends)
    layers = same_layers(Wires(drafts, orphans))
    passes = Counter(layer for layer, draft, orphan in zip(layers, drafts, orphans, strict=True) if not orphan)
    names: list[str] = []
    names_taken: set[str] = set()
    base: dict[int, str] = {}
    seen: Counter[int] = Counter()
    of_kind: Counter[str] = Counter()
    total = -1 if any(draft.kind == "input" for draft in drafts) else 0
    for draft, layer, orphan in zip(drafts, layers, orphans, strict=True):
        if draft.address is not None:
            name = draft.address
        elif orphan:
            of_kind["orphan"] += 1
            name = f"{draft.kind}_orphan_{of_kind['orphan']}"
        else:
            if layer not in base:
                of_kind[draft.kind] += 1
                total += 1
                base[layer] = f"{draft.kind}_{of_kind[draft.kind]}_{total}"
            seen[layer] += 1
            name = base[layer] if passes[layer] == 1 else f"{base[layer]}:{seen[layer]}"
        names_taken.add(name := primed(name, names_taken))
        names.append(name)
    return names, orphans


def _orphans(drafts: Sequence[Draft], ends: set[int]) -> list[bool]:
    """What neither comes from an input nor reaches an output."""
    from_input: set[int] = set()
    for draft in drafts:
        if draft.kind == "input" or any(value in from_input for value in draft.reads):
            from_input.update(draft.gives)
    to_output = set(ends)
    for draft in reversed(drafts):
        if any(value in to_output for value in draft.gives):
            to_output.update(draft.reads)
    known = from_input | to_output
    return [not any(value in known for value in draft.gives) for draft in drafts]
