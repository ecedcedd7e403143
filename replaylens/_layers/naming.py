"""The labels of nodes, and which calls are passes of one layer.

In: a NodeSummary of each node, in execution order. Out: a label for each. `relu_2_7` is the second relu and the seventh
layer, in execution order; inputs count from zero. Orphans, which neither derive from an input nor reach an output, are
not counted. The passes of one layer share a label and differ in the pass: `linear_1_1:1`, `linear_1_1:2`.

The three rules for passes are those of the TorchLens paper. Calls of one function on the same parameters are passes of
one layer. So are, around these, equivalent calls (`Dataflow.key`) that are connected to them in the same way, and so on
outwards. And so are the calls of a sequence without parameters that directly repeats (XYZXYZXYZ, but not XYZAXYZBXYZ),
with what is connected to them.

Repetition is found as follows. The program is cut into chains by putting each call behind the deepest call that it
reads. So what a loop carries from one iteration to the next lies on one chain, and what feeds it from the side does
not. On a chain, calls with parameters are left out, and the rest is searched for squares: a sequence of calls, directly
followed by equivalent ones that read, each in its place, the same values or the corresponding ones of the next
iteration. Candidates for the length of an iteration are the distances between equivalent calls, and between equivalent
runs of 2, 4, 8 ... calls: an iteration that is not itself a repetition contains a unique run, and the distance from it
to its next occurrence is the length. The time is O(n log n) in the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .._ir.label import NodeSummary, primed_name
from .._ir.ops import Quirk, op_info_of_kind
from .._ir.util import cached_property

ValueOf = tuple[int, int]  # a value: the position of the node that gives it, and which of its values it is


class Dataflow:
    """Which node reads which. A call is a node that is neither a source nor an orphan."""

    def __init__(self, nodes: Sequence[NodeSummary], orphans: Sequence[bool]) -> None:
        self.nodes = nodes
        makers: dict[int, ValueOf] = {}
        for position, node in enumerate(nodes):
            for part, value in enumerate(node.gives):
                makers.setdefault(value, (position, part))
        self.is_call = [d.function is not None and not lost for d, lost in zip(nodes, orphans, strict=True)]
        self.parents: list[tuple[ValueOf, ...]] = [
            tuple([makers[v] for v in d.reads if v in makers]) if d.reads else () for d in nodes
        ]
        named = {position for position, node in enumerate(nodes) if node.address is not None}
        read = [[p for p, _ in parents if p in named] if parents else () for parents in self.parents]
        self.parameters = [tuple(sorted({*own})) if own else () for own in read]
        self._keys: list[int | None] = [None] * len(nodes)
        self._known: dict[Any, int] = {}

    @cached_property
    def users(self) -> list[list[tuple[int, int, int]]]:
        """For each node its readers: their position, the slot among what they read, and which value they read."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.nodes]
        for reader, parents in enumerate(self.parents):
            if self.is_call[reader]:
                for slot, (position, part) in enumerate(parents):
                    found[position].append((reader, slot, part))
        return found

    def key(self, position: int) -> int:
        """A number that equivalent calls share: the same function with the same non-tensor arguments on the same
        parameters, and not in modules with different parameters.
        """
        known = self._keys[position]
        if known is None:
            node = self.nodes[position]
            own, home = self.parameters[position], self._owners(node.modules)
            key: Any = (node.kind, node.function, own, home, node.literals())
            try:
                hash(key)
            except TypeError:
                key = (node.kind, position)  # an unhashable argument: equivalent to no other call
            known = self._keys[position] = self._known.setdefault(key, len(self._known))
        return known

    def neighbours(self, position: int) -> dict[Any, int]:
        """The calls that a call reads and those that read it, by the kind of connection and their key."""
        found: dict[Any, int] = {}
        for slot, (parent, part) in enumerate(self.parents[position]):
            if self.is_call[parent]:
                found["reads", slot, part, self.key(parent)] = parent
        seen: Counter[Any] = Counter()
        for user, slot, part in self.users[position]:
            joined = ("is read", slot, part, self.key(user))
            found[joined, seen[joined]] = user
            seen[joined] += 1
        return found

    def _owners(self, modules: tuple[str, ...]) -> frozenset[int]:
        """The parameters of the innermost module around a call that has any. They keep two blocks of one class apart,
        also in calls that read no parameter.
        """
        return next((owned for address in reversed(modules) if (owned := self._owned.get(address))), frozenset())

    @cached_property
    def _owned(self) -> dict[str, frozenset[int]]:
        """The parameters that are read within each module."""
        found: dict[str, set[int]] = {}
        for node, own in zip(self.nodes, self.parameters, strict=True):
            for address in node.modules if own else ():
                found.setdefault(address, set()).update(own)
        return {address: frozenset(own) for address, own in found.items()}


MAX_FEEDER_DEPTH = 50  # how far back the calls that feed two iterations are compared


def loops(dataflow: Dataflow) -> Iterator[tuple[int, int]]:
    """Pairs of calls that are at the same place of two successive iterations of a loop."""
    for chain in _chains(dataflow):
        for run in _runs(dataflow, chain):
            yield from _LoopBody(dataflow, run).pairs()


def _chains(dataflow: Dataflow) -> list[list[int]]:
    """The calls in chains: each behind the deepest call that it reads, unless a longer chain continues that one."""
    count = len(dataflow.nodes)
    depth, height, before = [0] * count, [0] * count, [-1] * count
    calls = [position for position, is_call in enumerate(dataflow.is_call) if is_call]
    for position in calls:
        deepest, parent = 0, -1
        for other, _ in dataflow.parents[position]:
            if depth[other] > deepest:
                deepest, parent = depth[other], other
        depth[position], before[position] = deepest + 1, parent
    behind = [-1] * count
    for position in reversed(calls):
        parent = before[position]
        if parent >= 0 and height[position] >= height[parent]:
            behind[parent], height[parent] = position, height[position] + 1
    return [_along(behind, p) for p in calls if before[p] < 0 or behind[before[p]] != p]


def _along(behind: list[int], position: int) -> list[int]:
    found = []
    while position >= 0:
        found.append(position)
        position = behind[position]
    return found


def _runs(dataflow: Dataflow, chain: list[int]) -> Iterator[list[int]]:
    """The runs of a chain in which every call occurs again. The cheap test, by function, comes first."""
    without = _cut(chain, lambda position: None if dataflow.parameters[position] else dataflow.nodes[position].function)
    for run in without:
        yield from _cut(run, dataflow.key)


def _cut(chain: Sequence[int], name: Any) -> Iterator[list[int]]:
    """The runs of two or more calls between those whose name is None or unique."""
    names = [name(position) for position in chain]
    counts = Counter(names)
    found: list[int] = []
    for position, own in zip(chain, names, strict=True):
        if own is not None and counts[own] > 1:
            found.append(position)
            continue
        if len(found) > 1:
            yield found
        found = []
    if len(found) > 1:
        yield found


class _LoopBody:
    """A run of a chain, searched for repetition."""

    def __init__(self, dataflow: Dataflow, calls: list[int]) -> None:
        self.dataflow, self.calls = dataflow, calls
        self.place = {position: number for number, position in enumerate(calls)}
        self.known: dict[tuple[int, int, int], bool] = {}

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Each call of an iteration with the corresponding one of the next."""
        names = [self.dataflow.key(position) for position in self.calls]
        fed = [(name, *self._feeders(number)) for number, name in enumerate(names)]
        tried: set[tuple[int, int]] = set()
        for start, length in (
            *repeat_distances(names),
            *(repeat_distances(fed) if len({*fed}) > len({*names}) else ()),
        ):
            if (start, length) not in tried:
                first, last = self._extent(start, length)
                tried.update([(number, length) for number in range(first, last)])
                if last - first >= length:
                    yield from ((self.calls[n], self.calls[n + length]) for n in range(first, last))

    def _feeders(self, number: int) -> tuple[Any, ...]:
        """The keys of what a call reads from outside of the run."""
        parents = self.dataflow.parents[self.calls[number]]
        aside = [(p, part) for p, part in parents if p not in self.place]
        return tuple([(self.dataflow.key(p), -1) if self.dataflow.is_call[p] else (p, part) for p, part in aside])

    def _extent(self, start: int, length: int) -> tuple[int, int]:
        """The longest range around `start` whose calls correspond to those `length` further on."""
        first = last = start
        while first > 0 and self._corresponds(first - 1, length):
            first -= 1
        while last + length < len(self.calls) and self._corresponds(last, length):
            last += 1
        return first, last

    def _corresponds(self, number: int, length: int) -> bool:
        """True if the call `length` further on is equivalent, and reads what the next iteration would."""
        dataflow, one, other = self.dataflow, self.calls[number], self.calls[number + length]
        if dataflow.key(one) != dataflow.key(other) or not self._same_module(one, other, length):
            return False  # two successive modules are no loop, however similar
        is_same_line = dataflow.nodes[one].site is not None and dataflow.nodes[one].site == dataflow.nodes[other].site
        reads = zip(dataflow.parents[one], dataflow.parents[other], strict=True)
        return all(
            old == new
            or self._is_carried(old[0], new[0], number, length)
            or (is_same_line and self._is_fed_alike(old[0], new[0]))
            or (old[1] == new[1] and self._is_alike(old[0], new[0], number, length))
            for old, new in reads
        )

    def _same_module(self, one: int, other: int, length: int) -> bool:
        """True if two calls run in the same module. In iterations of several calls one may be wrapped in a module of
        its own, as if a loop uses `self.relu` in one iteration and `F.relu` in the next.
        """
        inner, outer = sorted(
            (self.dataflow.nodes[one].modules, self.dataflow.nodes[other].modules), key=len, reverse=True
        )
        return inner == outer or (length > 1 and len(inner) == len(outer) + 1 and inner[: len(outer)] == outer)

    def _is_carried(self, old: int, new: int, number: int, length: int) -> bool:
        """True if `new` is to the next iteration what `old` is to this one, or to a value from before the loop."""
        to, at = self.place.get(new, -1), self.place.get(old)
        return to >= number and (at is None or to - at == length)

    def _is_fed_alike(self, old: int, new: int) -> bool:
        """True if two iterations read two results of one function, two parts of one tensor, two constants or two
        inputs. That is a loop only if one line runs repeatedly: `a + f(b) + f(c)` is none.
        """
        dataflow = self.dataflow
        if not (dataflow.is_call[old] and dataflow.is_call[new]):
            return old == new or dataflow.nodes[old].kind == dataflow.nodes[new].kind in ("constant", "input")
        if old == new or dataflow.key(old) == dataflow.key(new):
            return True
        kind, parents = dataflow.nodes[old].kind, dataflow.parents
        is_part = kind == dataflow.nodes[new].kind and op_info_of_kind(kind).has(Quirk.PART)
        return is_part and parents[old][:1] == parents[new][:1]

    def _is_alike(self, old: int, new: int, number: int, length: int, deepest: int = MAX_FEEDER_DEPTH) -> bool:
        """True if two calls outside of the run are equivalent, on the same or on corresponding values."""
        dataflow = self.dataflow
        if (
            not deepest
            or not (dataflow.is_call[old] and dataflow.is_call[new])
            or dataflow.key(old) != dataflow.key(new)
        ):
            return False
        known = self.known.get((old, new, length))
        if known is None:
            known = self.known[old, new, length] = all(
                a == b
                or self._is_carried(a[0], b[0], number, length)
                or (a[1] == b[1] and self._is_alike(a[0], b[0], number, length, deepest - 1))
                for a, b in zip(dataflow.parents[old], dataflow.parents[new], strict=True)
            )
        return known


def repeat_distances(names: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Positions of repeated names and the distance to the next occurrence; then of runs of 2, 4, 8 ... names."""
    length = 1
    while names:
        last: dict[Any, int] = {}
        for number, name in enumerate(names):
            if name in last:
                yield last[name], number - last[name]
            last[name] = number
        if len(last) == len(names):
            return
        rank = {name: number for number, name in enumerate(last)}
        names = [(rank[one], rank[two]) for one, two in zip(names, names[length:], strict=False)]
        length *= 2


def same_layers(dataflow: Dataflow) -> list[int]:
    """For each position the first one of the same layer; itself if the layer runs once."""
    groups = LayerGroups(dataflow)
    for one, other in (*_on_the_same_parameters(dataflow), *loops(dataflow)):
        groups.join(one, other)
    first: dict[int, int] = {}
    return [first.setdefault(groups.find(position), position) for position in range(len(dataflow.nodes))]


def _on_the_same_parameters(dataflow: Dataflow) -> Iterator[tuple[int, int]]:
    first: dict[Any, int] = {}
    for position, (node, own) in enumerate(zip(dataflow.nodes, dataflow.parameters, strict=True)):
        if own and dataflow.is_call[position]:
            before = first.setdefault((node.function, node.kind, own), position)
            if before != position:
                yield before, position


class LayerGroups:
    """A union-find of layers. Joining two calls also joins equivalent neighbours that are connected to them alike."""

    def __init__(self, dataflow: Dataflow) -> None:
        self._dataflow = dataflow
        self._root = list(range(len(dataflow.nodes)))
        self._around: dict[int, dict[Any, int]] = {}  # by group: one neighbour for each kind of connection

    def find(self, position: int) -> int:
        root = self._root
        while root[position] != position:
            root[position] = position = root[root[position]]
        return position

    def join(self, one: int, other: int) -> None:
        """Make two calls one layer, with all consequences. The smaller group moves into the larger one."""
        pending = [(one, other)]
        while pending:
            large, small = map(self.find, pending.pop())
            if large == small:
                continue
            around, more = self._neighbours(large), self._neighbours(small)
            if len(around) < len(more):
                large, small, around, more = small, large, more, around
            self._root[small] = large
            for joined, neighbour in more.items():
                other = around.setdefault(joined, neighbour)
                if other != neighbour:
                    pending.append((other, neighbour))
            self._around[large] = around

    def _neighbours(self, group: int) -> dict[Any, int]:
        known = self._around.pop(group, None)
        return self._dataflow.neighbours(group) if known is None else known


def label_nodes(nodes: Sequence[NodeSummary], ends: set[int]) -> tuple[list[str], list[bool]]:
    """The label of each node, and which nodes are orphans. `ends` are the values of the outputs."""
    orphans = _orphans(nodes, ends)
    layers = same_layers(Dataflow(nodes, orphans))
    passes = Counter([layer for layer, orphan in zip(layers, orphans, strict=True) if not orphan])
    names: list[str] = []
    names_taken: set[str] = set()
    base: dict[int, str] = {}
    seen: Counter[int] = Counter()
    of_kind: Counter[str] = Counter()
    total = -1 if any(node.kind == "input" for node in nodes) else 0
    for node, layer, orphan in zip(nodes, layers, orphans, strict=True):
        if node.address is not None:
            name = node.address
        elif orphan:
            of_kind["orphan"] += 1
            name = f"{node.kind}_orphan_{of_kind['orphan']}"
        else:
            if layer not in base:
                of_kind[node.kind] += 1
                total += 1
                base[layer] = f"{node.kind}_{of_kind[node.kind]}_{total}"
            seen[layer] += 1
            name = base[layer] if passes[layer] == 1 else f"{base[layer]}:{seen[layer]}"
        if name in names_taken:
            name = primed_name(name, names_taken)
        names_taken.add(name)
        names.append(name)
    return names, orphans


def _orphans(nodes: Sequence[NodeSummary], ends: set[int]) -> list[bool]:
    """For each node whether it neither derives from an input nor reaches an output."""
    from_input: set[int] = set()
    for node in nodes:
        if node.kind == "input" or not from_input.isdisjoint(node.reads):
            from_input.update(node.gives)
    to_output = set(ends)
    for node in reversed(nodes):
        if not to_output.isdisjoint(node.gives):
            to_output.update(node.reads)
    known = from_input | to_output
    return [known.isdisjoint(node.gives) for node in nodes]
