"""Aliases of module outputs: where a forward hook on a module would change less than a patch of the value it returns.

In: a Recording whose forward is over. Out: the same Recording, in which the output of a module has a value of its own
(an alias, as the output of `nn.Identity` is) where the value itself has other readers:

- something read it before the module returned, and something reads it afterwards;
- the module wrote it through a view of its memory;
- somebody else holds the container in which it is returned, or a view of it is used after a later write.
  Which of the two is read then is unknown, and the alias is marked.

    def forward(self, x):              h = relu(x)
        h = relu(x)                    m = mean(h)
        self.seen = h.mean()           out = identity(h)     <- a hook on the module changes this, and not m
        return h

Aliases that a capture made as a precaution, and that distinguish nothing, are removed again.

The first part runs while the model does: `renewed` puts aliases into the output of a module, and learns from Python's
reference counts whether anything else holds its containers.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

import torch
from attrs import define, evolve

from .._ir.graph import GradientArguments, Graph
from .._ir.memory import storage_of
from .._ir.node import Call, Node, Ref, with_leaves
from .._ir.runtime import alias
from .._ir.target import Target
from .._ir.torch_private import without_function_modes
from .._ir.trees import ATOMS, Branch, attributes_of, leaves, map_leaves, own_attribute, own_attributes
from .._ir.util import cached_property
from .._ir.write import mutate
from .aliasing import Alias, AliasTracker
from .freeze import frozen_context, stale_views
from .recording import (
    Addresses,
    CallRecord,
    GuardRecord,
    Recording,
    ValueId,
    reads_of,
    value_ids_in,
    value_ids_with_paths,
)

_references = sys.getrefcount


class Replacement(Protocol):
    """Makes the replacement of a tensor in an output; `kept` handles a container that somebody else holds."""

    def __call__(self, tensor: torch.Tensor, outside: int, /) -> torch.Tensor: ...

    def kept(self, container: Any) -> Any: ...


def references_of(memory: AliasTracker, tensor: torch.Tensor) -> int:
    """How many references to a tensor are those of a recording, of its alias tracker, and of torch."""
    known, values = memory.live.get(id(tensor)), memory.recording.values
    found = int(_TORCH_COUNTS and _is_held_by_torch(tensor))
    if not isinstance(known, Alias):
        return found + (known is not None and _at(values, known) is tensor)
    base = known.base
    found += (known.tensor is tensor) + (base.root is tensor)
    if memory.by_storage:
        with without_function_modes():  # the model did not ask
            found += memory.by_storage.get(storage_of(tensor) or 0) is tensor
    return found + sum(_at(values, handle) is tensor for handle in {*base.held, known.handle, base.handle})


def _at(values: list[Any], handle: int) -> Any:
    return list.__getitem__(values, handle)


def _is_held_by_torch(tensor: torch.Tensor) -> bool:
    return bool(tensor._use_count() > 1)  # type: ignore[attr-defined]


def replace_tensors(value: Any, outside: int, new: Replacement, in_trees: Mapping[int, int]) -> Any:
    """A module's output with `new(tensor, outside)` in place of each tensor.

    `outside`: references that are not the output's own. Tuples are rebuilt; a mutable container is changed in place if
    nobody else holds it, and replaced by `new.kept(container)` otherwise. `in_trees`: how many references to an object,
    by id, frozen trees hold.
    """
    if isinstance(value, torch.Tensor):
        return new(value, outside)
    if type(value) in ATOMS or isinstance(value, (type, torch.nn.Module)):
        return value
    outside -= in_trees.get(id(value), 0)
    if isinstance(value, (tuple, frozenset)):
        return _rebuilt(value, outside, new, in_trees)
    if outside > 0 or isinstance(value, (set, slice, MappingProxyType)):
        return new.kept(value)
    _replace_items(value, new, in_trees)
    return value


def _rebuilt(value: Any, outside: int, new: Replacement, in_trees: Mapping[int, int]) -> Any:
    """An immutable container around other items. Whoever holds the tuple holds its items."""
    items = []
    for item in value:
        count = _references(item) - _WITHIN
        items.append(replace_tensors(item, count + max(outside, 0), new, in_trees))
    if all(item is other for item, other in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if type(value) in (tuple, frozenset) or hasattr(type(value), "n_sequence_fields"):
        return type(value)(items)
    made = (tuple if isinstance(value, tuple) else frozenset).__new__(type(value), items)
    for name, item in attributes_of(value):
        object.__setattr__(made, name, item)
    return made


def _replace_items(value: Any, new: Replacement, in_trees: Mapping[int, int]) -> None:
    """Puts replacements into a list, a dict, or an object with attributes."""
    if isinstance(value, (list, deque)):
        put: Any = list.__setitem__ if isinstance(value, list) else deque.__setitem__
        for number in range(len(value)):
            item = value[number]
            count = _references(item) - _WITHIN
            if (made := replace_tensors(item, count, new, in_trees)) is not item:
                put(value, number, made)
    elif isinstance(value, dict):
        attributes = own_attributes(value)
        for key in dict.keys(value):
            item = dict.__getitem__(value, key)
            twice = attributes.get(key) is item
            count = _references(item) - _WITHIN
            if (made := replace_tensors(item, count - twice, new, in_trees)) is not item:
                dict.__setitem__(value, key, made)
                if twice:
                    attributes[key] = made
    elif type(value).__module__ not in ("builtins", "numpy", "torch"):
        for name in [name for name, _ in attributes_of(value)]:
            item = own_attribute(value, name, None)
            count = _references(item) - _WITHIN
            if (made := replace_tensors(item, count, new, in_trees)) is not item:
                object.__setattr__(value, name, made)


def template_references(tree: Any) -> Counter[int]:
    """How many references to each object, by id, a frozen tree holds as templates."""
    held: Counter[int] = Counter()
    seen: set[int] = set()
    stack = [tree]
    while stack:
        part = stack.pop()
        if type(part) is tuple:
            stack.extend(part)
        elif type(part) is Branch:
            if part.like is not None and id(part) not in seen:
                held[id(part.like)] += 1
            seen.add(id(part))
            stack.extend(part.items)
    return held


def _reference_baselines() -> tuple[int, int, int, bool]:
    """As this Python and torch count: references to what a name holds, to what a list holds as well, to an item of a
    container that a name holds; and whether torch counts its own reference.
    """
    out = torch.empty(2)
    bare = _references(out)
    values = [out]
    alone = _references(out)
    view = out.view(1, 2)
    counts = _references(out) > alone
    del view, out
    for item in values:
        within = _references(item)
    return bare, alone, within, counts


def _caller_references() -> int:
    """How many references to the result of a module a call `x = module(x)` itself holds."""
    found = []

    def listen(called: Any, call: Any, args: Any, kwargs: Any) -> Any:
        out = call(called, *args, **kwargs)
        found.append(_references(out) - NAME_REFERENCES)
        return out

    class Called:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return listen(self, lambda self, value: value, args, kwargs)

    def rebinds(called: Any) -> None:
        value = object()
        value = called(value)

    rebinds(Called())
    return found[0]


NAME_REFERENCES, LISTED_REFERENCES, _WITHIN, _TORCH_COUNTS = _reference_baselines()
CALLER_REFERENCES = _caller_references()


def is_output_alias(record: Any) -> TypeGuard[CallRecord]:
    """True for the record of an alias of a module output."""
    return isinstance(record, CallRecord) and record.function is alias and len(record.args) == 2


def add_output_aliases(recording: Recording) -> list[list[ValueId]]:
    """Gives module outputs aliases where they need them, and nowhere else; does so once. Returns what each record then
    reads.
    """
    if recording.hand_offs.is_settled:
        return recording.reads()
    recording.hand_offs.is_settled = True
    known = recording.addresses() if recording.addresses else Addresses({})
    recording.addresses = lambda: known
    roots = {number for number, address in known.modules.items() if not address}
    last_writes = {first: number for number, first in enumerate(recording.aliasing.writes)}

    def written_later(held: Mapping[ValueId, tuple[ValueId, int]]) -> set[ValueId]:
        return {handle for handle, (first, count) in held.items() if last_writes.get(first, -1) >= count}

    returned_twice = written_later(recording.hand_offs.twice)
    if returned_twice:
        recording.hand_offs.written_twice |= {
            r.returns for r in recording.records if is_output_alias(r) and r.returns in returned_twice
        }
    found = _Reads(recording)
    if redundant := found.redundant(written_later(recording.hand_offs.views)):
        _remove(recording, redundant)
        found = _Reads(recording)
    outputs = enumerate(recording.scope_outputs)
    inner = [(turn, *one) for turn, one in outputs if id(recording.scopes[one[0]].module) not in roots]
    if new := _missing_aliases(recording, found, inner, returned_twice):
        _insert(recording, new)
    return recording.reads() if new else found.read


@define(eq=False)
class _NewAlias:
    """An alias to insert."""

    at: int
    old: ValueId  # what the module returned
    source: ValueId  # its name until then: itself, or the alias of an inner module
    handle: ValueId
    scope: int
    number: int
    turn: int  # number of the module call, in order of return


class _Reads:
    """Where each module output is read, by position among the records."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.read = recording.reads()
        self.end = len(recording.records)
        self.aliases = [
            (position, record) for position, record in enumerate(recording.records) if is_output_alias(record)
        ]
        returned = {leaf for _, tree, *_ in recording.scope_outputs for leaf in value_ids_in(tree)}
        self.of: dict[ValueId, list[int]] = {handle: [] for handle in returned}
        for _, record in self.aliases:
            self.of.setdefault(record.args[0], [])
            self.of.setdefault(record.returns, [])
        self.made: dict[ValueId, int] = {}
        of = self.of
        self.written_memory: set[ValueId] = set()  # of bases that calls wrote through views
        for position, item in enumerate(recording.records):
            returns = item.returns
            if type(returns) is not ValueId:
                self.made.update((h, position) for _, h in value_ids_with_paths(returns) if h in of)
            elif returns in of:
                self.made[returns] = position
            if isinstance(item, CallRecord):
                self._note(position, self.read[position])
                if item.function is mutate and item.result is not None:
                    self.written_memory.update(
                        {h for _, h in value_ids_with_paths(item.returns)}.difference(leaves(item.result))
                    )
        for guard in recording.guards:
            self._note(guard.position, value_ids_in((*guard.args, *(guard.kwargs or {}).values())))
        self._note(self.end, value_ids_in((recording.output, tuple([last for _, last in recording.state.changes]))))
        for positions in self.of.values() if recording.guards else ():
            positions.sort()

    def _note(self, position: int, read: Iterable[ValueId]) -> None:
        for handle in read:
            if handle in self.of:
                self.of[handle].append(position)

    def is_differentiated(self, handle: ValueId) -> bool:
        """True if a call inside torch.func.grad or a similar transform computed it."""
        record = self.recording.records[self.made[handle]] if handle in self.made else None
        return isinstance(record, CallRecord) and record.is_differentiated

    def redundant(self, written_views: set[ValueId]) -> set[int]:
        """Positions of aliases that distinguish nothing: only they read their value, or nothing reads either later.
        `written_views`: aliases of views whose memory is written later, which reads the base alone.
        """
        found: set[int] = set()
        patched = set(self.recording.patched.values())
        late = stale_views(self.recording)
        for position, record in self.aliases:
            if (
                position in patched
                or record.returns in late
                or record.returns in self.recording.hand_offs.written_twice
                or record.returns in written_views
            ):
                continue
            if record.is_differentiated and not self.is_differentiated(record.args[0]):
                continue
            reads = self.of[record.args[0]]
            is_last = not self.of[record.returns] and reads[-1] <= position
            if reads == [position] or (is_last and not self._is_read_outside(record, position, reads)):
                found.add(position)
        return found

    def _is_read_outside(self, output: CallRecord, position: int, reads: Iterable[int]) -> bool:
        """True if a call outside of the module read the value before the module returned it."""
        records, scopes, inside = self.recording.records, self.recording.scopes, {output.scope}
        for number in reads:
            reader = records[number] if number < position else None
            if not isinstance(reader, CallRecord) or output.args[0] not in reads_of(reader):
                continue
            scope, above = reader.scope, []
            while scope >= 0 and scope not in inside:
                above.append(scope)
                scope = scopes[scope].parent
            if scope < 0:
                return True
            inside.update(above)
        return False


def _missing_aliases(
    recording: Recording, found: _Reads, returned: list[Any], returned_twice: set[ValueId]
) -> list[_NewAlias]:
    """The aliases to insert, in the order in which the modules returned."""
    new: list[_NewAlias] = []
    before: set[tuple[int, ValueId]] = set()  # (module, value) returned before
    now: dict[ValueId, tuple[ValueId, int]] = {}  # value -> its alias, and from which position on
    patched = {handle for n in recording.patched for _, handle in value_ids_with_paths(recording.records[n].returns)}
    count = len(recording.values)
    views = _Views(recording)
    for turn, scope, tree, end, shared in returned:
        every = value_ids_in(tree)
        numbers: dict[ValueId, int] = {}
        for number, leaf in enumerate(every):
            numbers.setdefault(leaf, number)
        for leaf, number in numbers.items():
            positions = found.of[leaf]
            source, since = now.get(leaf) or (leaf, found.made.get(leaf, 0))
            is_read = (
                len(positions) > 1 and positions[-1] >= end and any(since <= position < end for position in positions)
            )
            is_memory = leaf in found.written_memory and leaf not in now
            module = id(recording.scopes[scope].module)
            is_again = (module, leaf) in before
            before.add((module, leaf))
            is_twice = (
                leaf in returned_twice and leaf not in recording.hand_offs.written_twice and every.count(leaf) > 1
            )
            is_within = (
                scope in recording.hand_offs.differentiated and leaf not in now and not found.is_differentiated(leaf)
            )
            if leaf in patched or not (is_read or is_memory or is_again or is_twice or is_within or leaf in shared):
                continue
            handle = ValueId(count + len(new))
            new.append(_NewAlias(end, leaf, source, handle, scope, number, turn))
            now[leaf] = (handle, end)
            if is_twice:
                recording.hand_offs.written_twice.add(handle)
            if leaf in shared:
                recording.hand_offs.shared.add(handle)
            elif is_read and any(_is_used_after_write(recording, view, end) for view in views.of(leaf, end)):
                recording.aliasing.overwritten.add(handle)
    return new


class _Views:
    """Which values share memory; computed when first asked."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def of(self, handle: ValueId, end: int) -> list[ValueId]:
        """The values over the same memory as `handle` that were made before position `end`."""
        if not self._is_written or (key := self._key(handle)) is None:
            return []
        return [other for other, made in self._by_memory.get(key, ()) if made < end and other != handle]

    @cached_property
    def _is_written(self) -> bool:
        records = self.recording.records
        return bool(self.recording.aliasing.overwritten) or any(getattr(r, "function", None) is mutate for r in records)

    @cached_property
    def _by_memory(self) -> dict[int, list[tuple[ValueId, int]]]:
        found: dict[int, list[tuple[ValueId, int]]] = {}
        for position, record in enumerate(self.recording.records):
            for _, handle in value_ids_with_paths(record.returns):
                if (key := self._key(handle)) is not None:
                    found.setdefault(key, []).append((handle, position))
        return found

    def _key(self, handle: ValueId) -> int | None:
        return None if handle in self.recording.freed else storage_of(self.recording.values[handle])


def _is_used_after_write(recording: Recording, view: ValueId, end: int) -> bool:
    """True if a view is read again, or written through, after its memory was written."""
    if view in recording.aliasing.overwritten:
        return True
    late = (r for r in recording.records[end:] if isinstance(r, CallRecord) and r.function is mutate)
    return any(view in leaves(tuple(record.args)) for record in late)


def _insert(recording: Recording, new: list[_NewAlias]) -> None:
    """Inserts aliases between the records; later records read them."""
    before: dict[int, list[int]] = {}
    of_value: dict[ValueId, list[_NewAlias]] = {}
    for number, one in enumerate(new):
        _duplicate_value(recording, one.old, one.handle)
        before.setdefault(one.at, []).append(number)
        of_value.setdefault(one.old, []).append(one)

    def name(handle: ValueId, end: int, number: str = "at") -> ValueId:
        """The last alias of a value before a position (or the end of a module call), or the value itself."""
        return next((one.handle for one in reversed(of_value.get(handle, ())) if getattr(one, number) <= end), handle)

    name_then = partial(name, number="turn")

    records: list[Any] = []
    where: list[int] = []  # new position of each old record, and of the end
    at: dict[int, int] = {}  # position of each new alias
    for position in range(len(recording.records) + 1):
        for number in before.get(position, ()):
            at[number] = len(records)
            records.append(_alias(recording, new[number]))
        where.append(len(records))
        if position < len(recording.records):
            record = _read_at(recording.records[position], name, position)
            records.append(_insert_in_gradient(recording, record, position, new, where, at))
    recording.records = records
    returned = [_renamed(tree, name_then, turn) for turn, (_, tree, *_) in enumerate(recording.scope_outputs)]
    _renumber(recording, where, name)
    ends = [(scope, end) for scope, _, end, _ in recording.scope_outputs]
    recording.scope_outputs = [(scope, tree, end, ()) for (scope, end), tree in zip(ends, returned, strict=True)]


def _duplicate_value(recording: Recording, old: ValueId, new: ValueId) -> None:
    """Stores one value under a second number."""
    values: list[Any] = recording.values
    list.append(values, list.__getitem__(values, old))
    recording.versions.append(recording.versions[old])
    if old in recording.freed:
        recording.freed[new] = recording.freed[old]
    if old in recording.autograd.histories:
        recording.autograd.histories[new] = recording.autograd.histories[old]


def _renumber(recording: Recording, where: list[int], name: _NameAt) -> None:
    """Updates everything besides the records that refers to positions or values."""
    end = len(where)
    recording.patched = {where[n]: where[of] for n, of in recording.patched.items()}
    guards = [_read_at(guard, name, guard.position) for guard in recording.guards]
    recording.guards = [guard._replace(position=where[min(guard.position, end - 1)]) for guard in guards]
    recording.asked = [
        one._replace(
            handle=None if one.handle is None else name(ValueId(one.handle), one.position),
            position=where[min(one.position, end - 1)],
        )
        for one in recording.asked
    ]
    recording.output = _renamed(recording.output, name, end)
    recording.state.changes = [(place, _renamed(last, name, end)) for place, last in recording.state.changes]
    recording.scope_outputs = [
        (scope, _renamed(tree, name, stop), where[stop], _renamed(shared, name, stop))
        for scope, tree, stop, shared in recording.scope_outputs
    ]


_NameAt = Callable[[ValueId, int], ValueId]  # (value, position) -> its name there


def _renamed(tree: Any, name: _NameAt, position: int) -> Any:
    """A tree with the names that its values have at a position."""
    return map_leaves(tree, lambda leaf: name(leaf, position) if type(leaf) is ValueId else leaf)


def _read_at(record: Any, name: _NameAt, position: int) -> Any:
    """A record or guard that reads values by the names that they have at a position."""
    if not isinstance(record, (CallRecord, GuardRecord)):
        return record
    kwargs = record.kwargs or {}
    read = [leaf for leaf in leaves((tuple(record.args), tuple(kwargs.values()))) if type(leaf) is ValueId]
    if all(name(handle, position) == handle for handle in read):
        return record
    named = {key: _renamed(value, name, position) for key, value in kwargs.items()}
    return record._replace(args=[_renamed(arg, name, position) for arg in record.args], kwargs=named)


def _alias(recording: Recording, one: _NewAlias) -> CallRecord:
    """The record of an alias of a module output. Gradients pass through it, wherever the module stands."""
    context, within = _context_of_alias(recording), one.scope in recording.hand_offs.differentiated
    args = [one.source, one.number]
    return CallRecord(alias, "identity", args, {}, one.handle, context, one.scope, None, is_differentiated=within)


def _context_of_alias(recording: Recording) -> Any:
    return (True, *recording.outer_modes[1:]) if not recording.outer_modes[1] else recording.outer_modes


def _insert_in_gradient(
    recording: Recording, record: Any, position: int, new: list[_NewAlias], where: list[int], at: dict[int, int]
) -> Any:
    """The record of an inner gradient whose recomputed stretch has the new aliases made by then."""
    if not isinstance(record, CallRecord) or not record.through:
        return record
    arguments = GradientArguments(*record.args)
    stretch = arguments.stretch
    made: dict[ValueId, Ref] = {}
    for number, inner in zip(record.through, stretch.calls, strict=True):
        made.update({h: Ref(inner.name, path) for path, h in value_ids_with_paths(recording.records[number].returns)})
    own = {number: one for number, one in enumerate(new) if one.old in made and one.at <= position}
    handles = {ref: handle for handle, ref in made.items()}
    made.update({one.handle: Ref(f"handed_{number}") for number, one in own.items()})

    def names_at(turn: int) -> Callable[[Any], Any]:
        """Names the values of the stretch as a record reads them."""

        def read(leaf: Any) -> Any:
            passed = [one for one in own.values() if one.at <= turn and one.old == handles.get(leaf)]
            return made[passed[-1].handle] if type(leaf) is Ref and passed else leaf

        return read

    calls = dict(zip(record.through, stretch.calls, strict=True))
    nodes: list[Node] = [node for node in stretch.nodes if not isinstance(node, Call)]
    turns = [*[(one.at, 0, number) for number, one in own.items()], *[(n, 1, n) for n in record.through]]
    for turn, is_call, number in sorted(turns):  # aliases come before the record at their position
        if is_call:
            nodes.append(with_leaves(calls[turn], names_at(turn)))
        else:
            one, name = own[number], f"handed_{number}"
            context = frozen_context(_context_of_alias(recording))
            args, meaning = (made[one.source], one.number), (recording.spec(one.old),)
            target = Target.of(alias)
            nodes.append(Call(name, "identity", target, args, (), Ref(name), spec=meaning, context=context))
    through = tuple(sorted([*[where[n] for n in record.through], *[at[number] for number in own]]))
    graph = evolve(stretch, nodes=tuple(nodes), output=map_leaves(stretch.output, names_at(position)))
    return record._replace(args=[*arguments._replace(stretch=graph)], through=through)


def _remove(recording: Recording, redundant: set[int]) -> None:
    """Removes aliases: their readers read the original value."""
    replaced: dict[ValueId, ValueId] = {}
    for position in sorted(redundant):
        record = recording.records[position]
        if is_output_alias(record):
            replaced[record.returns] = replaced.get(record.args[0], record.args[0])
    name: _NameAt = lambda handle, position: replaced.get(handle, handle)  # noqa: E731
    kept = [n for n in range(len(recording.records)) if n not in redundant]
    where = [bisect_left(kept, n) for n in range(len(recording.records) + 1)]
    recording.records = [_remove_from_gradient(_read_at(recording.records[n], name, n), redundant, where) for n in kept]
    _renumber(recording, where, name)
    of = recording.aliasing.view_of.items()
    recording.aliasing.view_of = {handle: tuple([replaced.get(one, one) for one in views]) for handle, views in of}


def _remove_from_gradient(record: Any, redundant: set[int], where: list[int]) -> Any:
    """The record of an inner gradient whose recomputed stretch has lost the removed aliases."""
    if not isinstance(record, CallRecord) or not record.through:
        return record
    args = record.args
    if not redundant.isdisjoint(record.through):
        arguments = GradientArguments(*args)
        removed: dict[Ref, Ref] = {}
        for number, inner in zip(record.through, arguments.stretch.calls, strict=True):
            if number in redundant:
                removed[Ref(inner.name)] = removed.get(inner.args[0], inner.args[0])
        args = [*arguments._replace(stretch=_remove_nodes(arguments.stretch, removed))]
    return record._replace(args=args, through=tuple([where[n] for n in record.through if n not in redundant]))


def _remove_nodes(stretch: Graph, removed: dict[Ref, Ref]) -> Graph:
    """The stretch without some aliases: their readers read the original value."""
    read = lambda leaf: removed.get(leaf, leaf) if type(leaf) is Ref else leaf  # noqa: E731
    kept = [node for node in stretch.nodes if Ref(node.name) not in removed]
    nodes = [with_leaves(node, read) if isinstance(node, Call) else node for node in kept]
    return evolve(stretch, nodes=tuple(nodes), output=map_leaves(stretch.output, read))
