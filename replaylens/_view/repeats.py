"""Blocks of layers that repeat one after another, to be drawn once.

In: a LayerGraph and its Graph. Out: for each layer of a repetition the layer of the first one that it is drawn as. Two
blocks are equal if they have the same operations on the same shapes with the same non-tensor arguments, in modules of
the same classes, and the same links inside. Links to the outside may differ; arrows name the turns that they hold for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import Factory, define, field, frozen

from .._ir.graph import Graph
from .._ir.node import Call, Ref, Scope
from .._ir.trees import map_leaves
from .._ir.util import cached_property
from .layer_graph import LayerGraph, LayerMark

FEWEST = 3  # repetitions of a block that is no module; two are as often a coincidence
LONGEST = 24  # items, operations or modules, in a repeated block


@frozen
class RepeatFrame:
    """The frame of a repeated block that is no module."""

    key: str
    turn: str
    depth: int  # the number of module calls around it


@frozen
class Repeats:
    """Which layers are drawn as which, and the frames that this adds."""

    first: Mapping[str, str]  # a layer -> the layer of the first repetition that it is drawn as
    bands: Mapping[
        str, tuple[RepeatFrame, ...]
    ]  # by layer: the frames of repeated blocks that are no modules, outermost first
    folded: frozenset[str] = frozenset()  # the module calls that are repetitions


NO_REPEATS: Repeats = Repeats({}, {})


@define(eq=False)
class _Block:
    """A module call, or the whole program, with its items in order."""

    scope: Scope | None = None
    depth: int = 0
    items: list[_Block | LayerMark] = Factory(list)
    marks: list[LayerMark] = field(factory=list)  # all its layers, at any depth
    sign: Any = None  # a key that equal blocks share


def repeats(graph: Graph, drawn: LayerGraph) -> Repeats:
    """The repeated blocks of a program."""
    return _Search(graph, drawn).found()


@frozen(eq=False)
class _Search:
    graph: Graph
    drawn: LayerGraph
    first: dict[str, str] = field(factory=dict)
    windows: dict[str, str] = field(factory=dict)  # a layer -> the repetition around it
    bands: dict[str, list[RepeatFrame]] = field(factory=dict)
    folded: set[str] = field(factory=set)

    def found(self) -> Repeats:
        blocks = self._blocks()
        for block in reversed(blocks):  # those inside of one come after it
            inside = tuple([self._sign(one) for one in block.items])
            block.sign = hash((block.scope.kind if block.scope else "", inside, self._wiring([block])))
        pending = blocks[:1]
        while pending:
            pending.extend(reversed(self._search(pending.pop())))
        bands = {mark.label: tuple(self._bands(mark.label)) for mark in self.drawn.marks}
        for label in list(self.first):
            self.first[label] = self._resolved(label)
        self._sources()
        return Repeats(self.first, bands, frozenset(self.folded))

    def _bands(self, label: str) -> list[RepeatFrame]:
        """The bands around a layer: its own, and those inside of the repetition that it is drawn as."""
        own = self.bands.get(label, [])
        if label not in self.first:
            return own
        keys = {band.key for band in own}
        inner = [band for band in self._bands(self.first[label]) if band.key not in keys]
        return own + [RepeatFrame(band.key, f"{band.turn} in {self.windows[label]}", band.depth) for band in inner]

    def _resolved(self, label: str) -> str:
        while label in self.first:
            label = self.first[label]
        return label

    def _blocks(self) -> list[_Block]:
        """The whole program, and each module call behind the one around it. They may be nested deeply."""
        root = _Block()
        blocks: dict[str, _Block] = {}
        for mark in self.drawn.marks:
            if "operation" not in mark.roles:
                continue
            at = root
            at.marks.append(mark)
            for scope in mark.scopes:
                if str(scope) in self.drawn.single:
                    break
                if str(scope) not in blocks:
                    blocks[str(scope)] = _Block(scope, at.depth + 1)
                    at.items.append(blocks[str(scope)])
                at = blocks[str(scope)]
                at.marks.append(mark)
            at.items.append(mark)
        return [root, *blocks.values()]

    def _search(self, block: _Block) -> list[_Block]:
        """Find repetitions among the items of a block. Returns those that are drawn, to be searched inside."""
        signs = [self._sign(item) for item in block.items]
        drawn: list[_Block] = []
        n = 0
        while n < len(block.items):
            period, times = self._repeat(block.items, signs, n)
            if times > 1:
                self._fold(block, n, period, times)
            drawn += [item for item in block.items[n : n + period] if isinstance(item, _Block)]
            n += period * times
        return drawn

    def _repeat(self, items: list[_Block | LayerMark], signs: list[Any], start: int) -> tuple[int, int]:
        """The length of the shortest repeated sequence from `start` and its number of repetitions; (1, 1) if none."""
        for period in range(1, min(LONGEST, (len(items) - start) // 2) + 1):
            here = signs[start : start + period]
            if here != signs[start + period : start + 2 * period]:
                continue
            if len(_marks(items[start : start + period])) < 2:
                continue
            is_module = period == 1 and isinstance(items[start], _Block)
            if not is_module and not self._is_chain(items[start : start + 2 * period]):
                continue
            wiring, times = self._wiring(items[start : start + period]), 1
            while True:
                at = start + times * period
                if signs[at : at + period] != here or self._wiring(items[at : at + period]) != wiring:
                    break
                times += 1
            if times >= (2 if is_module else FEWEST):
                return period, times
        return 1, 1

    def _is_chain(self, items: list[_Block | LayerMark]) -> bool:
        """True if the first half of the items is connected, and the second half reads from it."""
        labels = [mark.label for mark in _marks(items)]
        first, second = labels[: len(labels) // 2], labels[len(labels) // 2 :]
        reads = {tail for label in second for tail, _ in self._reads.get(label, ())}
        return not reads.isdisjoint(first) and self._is_one_piece(first)

    def _is_one_piece(self, labels: list[str]) -> bool:
        piece: dict[str, set[str]] = {}
        for label in labels:
            joined = {label}.union(*(piece[tail] for tail, _ in self._reads.get(label, ()) if tail in piece))
            piece |= dict.fromkeys(joined, joined)
        return len(piece[labels[0]]) == len(labels)

    def _fold(self, block: _Block, start: int, period: int, times: int) -> None:
        whole = _marks(block.items[start : start + period])
        for turn in range(times):
            items = block.items[start + turn * period : start + (turn + 1) * period]
            for mark, model in zip(_marks(items), whole, strict=True):
                if turn:
                    self.first[mark.label] = model.label
                    self.windows[mark.label] = f"{whole[0].label} {turn}"
                if period > 1:
                    band = RepeatFrame(f"repeat {whole[0].label}", f"{whole[0].label} {turn}", block.depth)
                    self.bands.setdefault(mark.label, []).append(band)
            if period == 1 and isinstance(items[0], _Block):
                self.folded.add(str(items[0].scope))

    def _sign(self, item: _Block | LayerMark) -> Any:
        """A key that equal items share."""
        return self._signs[item.label] if isinstance(item, LayerMark) else item.sign

    @cached_property
    def _signs(self) -> dict[str, Any]:
        return {mark.label: self._of_mark(mark) for mark in self.drawn.marks if "operation" in mark.roles}

    def _of_mark(self, mark: LayerMark) -> Any:
        position = self.graph.positions.get(mark.node)  # None for layers of the other program of a difference
        node = self.graph.nodes[position] if position is not None else None
        given = repr(map_leaves((node.args, node.kwargs), _blank)) if isinstance(node, Call) else ""
        specs = [(one.shape, str(one.dtype)) for one in mark.specs]
        parameters = [one.spec.shape for one in mark.parameters]
        kinds = [scope.kind for scope in mark.scopes if str(scope) in self.drawn.single]
        return hash((mark.kind, given, str(specs), str(parameters), str(kinds), mark.roles, mark.note))

    def _wiring(self, items: list[_Block | LayerMark]) -> tuple[Any, ...]:
        """The links inside of a sequence of items, by index; reads from the outside count as -1."""
        number = {mark.label: n for n, mark in enumerate(_marks(items))}
        return tuple(
            tuple([(number.get(tail, -1), place) for tail, place in self._reads.get(label, ())]) for label in number
        )

    @cached_property
    def _reads(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for link in self.drawn.links:
            found.setdefault(link.head, []).append((link.tail, link.place + link.part))
        return found

    def _sources(self) -> None:
        """Draw buffers and constants as one if corresponding layers of the repetitions read them."""
        readers: dict[str, set[tuple[str, str]]] = {}
        for link in self.drawn.links:
            if "operation" not in self.drawn.by_label[link.tail].roles:
                readers.setdefault(link.tail, set()).add((self.first.get(link.head, link.head), link.place))
        known: dict[Any, str] = {}
        for label, read in readers.items():
            mark = self.drawn.by_label[label]
            if mark.roles & {"buffer", "constant"}:
                sign = (frozenset(read), mark.kind, str(mark.specs))
                if known.setdefault(sign, label) != label:
                    self.first[label] = known[sign]


def _marks(items: list[_Block | LayerMark]) -> list[LayerMark]:
    return [mark for item in items for mark in (item.marks if isinstance(item, _Block) else (item,))]


def _blank(leaf: Any) -> Any:
    return "·" if type(leaf) is Ref else leaf


def frames_at_depth(bands: tuple[RepeatFrame, ...], depth: int) -> Iterator[RepeatFrame]:
    """The bands directly inside of a module call at this depth."""
    return (band for band in bands if band.depth == depth)
