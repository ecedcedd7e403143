"""Alias analysis during a capture: which storage a tensor looks at, and which value is in it now.

In: tensors as the model holds them. Out: the ValueId of the value that each holds at this moment. It is what torch's
functionalization does, at the level of torch functions: a write gives its storage a new version, and a view that is
read later is regenerated from it, by its own view steps.

    x = torch.zeros(4)     0 = zeros        Storage(root=x, handle=0, version=0)
    y = x[:2]              1 = 0[:2]        Alias(y, steps=([:2],), handle=1, version=0)
    x.add_(1)              2 = add(0, 1)    Storage(handle=2, version=1); values[0], values[1] are copied first
    y.sum()                3 = 2[:2]        y.version 0 != 1, so y is regenerated: Alias(y, handle=3, version=1)
                           4 = sum(3)

Invariants:

* `alias.version == alias.base.version` <=> `alias.handle` is the value that the tensor holds now. `read` makes it so.
  A version of -1 is never equal: the alias was made by no call and has no value of its own yet.
* `base.handle` is the value of the whole storage at `base.version`; `base.first` the one it had at version 0.
* `base.held` lists the recorded values whose tensors still lie in these bytes: `copy_on_write` must give each a copy
  before the next write, else the write would change what was recorded.
* `base.derived` holds the views that were regenerated at this version only, by their steps: two aliases with the same
  steps share a value. `note_write` empties it.
* `base.counter` is torch's own write counter after the last write that was announced; a tensor whose counter differs
  was written by a call that nobody saw. None: the counter tells nothing here.
* `base.twin` is another Storage over the same bytes (numpy, dlpack). No view step leads from one to the other, so that
  such memory must not be written.
* `base.exposed` is a copy of the content since somebody outside torch can write it: `read` compares the two.

A tensor that shares memory with nothing (most do) is its ValueId alone in `live`; its Storage is made when needed.
Tensors are looked up by id, which is used again once a tensor dies: everything known here is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from attrs import define, field

from .._ir.autograd import new_parameter, with_history_of
from .._ir.equality import same_content
from .._ir.memory import sparse_parts, storage_of, version_of
from .._ir.runtime import as_strided_from
from .._ir.target import Target
from .._ir.torch_private import unset_fake_temporarily, without_function_modes
from .._ir.trees import Branch, freeze, map_leaves, thaw
from .._ir.write import Hole, ViewStep, apply_view_step, packed_place, unpacked_place
from ..errors import CaptureError, UnannouncedWrite
from .recording import CallRecord, GuardRecord, Recording, SourceRecord, ValueId, reads_of

FORKED_HISTORY = (
    "a detached alias that was written with what has gradients, and is read again after its memory was written "
    "elsewhere: torch keeps two histories of one memory. Compute with a copy."
)

MADE_OUTSIDE_TORCH = "made outside torch"  # the origin of a constant


def detaches(function: Any) -> bool:
    """True if gradients end at this view."""
    return getattr(function, "__name__", "") == "detach" or getattr(function, "__self__", None) is torch.Tensor.data


def may_have_gradient(recording: Recording, handle: ValueId) -> bool:
    """True if, in this forward or in a replay, a gradient can flow from a value back to an input or a parameter."""
    producers = recording.producers()
    stack, seen = [handle], {handle}
    while stack:
        record = recording.records[producers[stack.pop()]]
        if isinstance(record, SourceRecord):
            if record.kind == "input" or record.tensor.requires_grad:
                return True
        elif (record.context[0] or not recording.outer_modes[0]) and not detaches(record.function):
            above = set(reads_of(record)) - seen
            seen |= above
            stack.extend(above)
    return False


@define(eq=False)
class Storage:
    """One storage and the value that it holds now. The invariants stand at the head of this file."""

    root: torch.Tensor  # covers all of the storage that the program knows
    handle: ValueId
    first: ValueId
    version: int = 0
    counter: int | None = 0
    held: list[ValueId] = field(factory=list)
    derived: dict[Any, ValueId] = field(factory=dict)
    twin: Storage | None = None
    exposed: torch.Tensor | None = None
    has_uncounted_alias: bool = False  # `x.data`: torch counts writes to it and to the others apart
    is_forked: bool = False  # written through a detached alias, with a value that may have a gradient history
    is_content_read: bool = False  # exposed, and a guard holds the content; else its address alone was read
    is_kept: bool = False  # exposed by an array that existed, on the model or among the inputs, before the forward


@define(eq=False)
class Alias:
    """One tensor object: its base, the view steps that lead from there, the value it had when last read."""

    tensor: torch.Tensor
    base: Storage
    steps: tuple[Any, ...]
    handle: ValueId
    version: int

    @property
    def is_detached(self) -> bool:
        """True if gradients do not flow from the tensor to its base."""
        functions = [unpacked_place(step).function.function for step in self.steps]
        return any(function in (with_history_of, new_parameter) or detaches(function) for function in functions)


@define(eq=False)
class AliasTracker:
    """Every tensor that the program knows, by identity and by storage."""

    recording: Recording
    live: dict[int, ValueId | Alias] = field(factory=dict)  # by id of the tensor
    bases: dict[int, Storage] = field(factory=dict)  # by storage_of the root
    written: list[ValueId] = field(factory=list)  # `first` of the storage, once for each write
    by_storage: dict[int, torch.Tensor] = field(factory=dict)  # the last of values[:indexed_to] in each storage
    indexed_to: int = 0
    sources: dict[int, list[SourceRecord]] = field(factory=dict)  # of records[:sources_indexed_to], by storage
    sources_indexed_to: int = 0
    counters_at_start: dict[int, int] = field(factory=dict)  # of sources by id: the write counter at their first read
    has_detached: bool = False  # a tensor object was given another geometry or other memory ...
    detached: set[int] = field(factory=set)  # ... and its id
    external_writes: list[tuple[Storage, set[ValueId]]] = field(factory=list)  # by numpy, and the values held before
    same_data_as: dict[ValueId, ValueId] = field(factory=dict)  # a value -> one that differs in gradients alone
    unseen_alias: torch.Tensor | None = None  # a source that was given this memory by a call that was not seen
    in_sparse: set[int] = field(factory=set)  # storages of tensors that a sparse tensor was made of
    keep_alive: list[Any] = field(factory=list)

    # -- reading -------------------------------------------------------------------------------------------------

    def register(self, tensor: torch.Tensor, handle: ValueId) -> None:
        """This tensor holds this value, in memory that no other known tensor looks at."""
        self.live[id(tensor)] = handle

    def read(self, tensor: torch.Tensor) -> ValueId | None:
        """The value that the tensor holds now; None for a tensor that was never seen."""
        known = self.live.get(id(tensor))
        if known is None or type(known) is ValueId:
            return known
        assert isinstance(known, Alias)
        base = known.base
        if base.exposed is not None:
            self._check_exposed(base)
        if known.version != base.version:
            if known.steps and known.version >= 0:
                self.recording.aliasing.overwritten.update(self.equal_values(known.handle))
            with without_function_modes():
                known.handle = self.regenerate_view(known) if known.steps else base.handle
            known.version = base.version
        return known.handle

    def equal_values(self, handle: ValueId) -> list[ValueId]:
        """A value, then those that it differs from only in how gradients flow, the first of them last."""
        found = [handle]
        while (handle := self.same_data_as.get(handle, handle)) != found[-1]:
            found.append(handle)
        return found

    def rollback(self, first: int) -> None:
        """Forget every tensor and storage that was first seen at value `first` or later."""
        for key, known in list(self.live.items()):
            if (known.handle if isinstance(known, Alias) else known) >= first:
                del self.live[key]
        self.bases = {key: base for key, base in self.bases.items() if base.handle < first}
        for base in self.bases.values():
            base.held = [handle for handle in base.held if handle < first]
            base.derived = {key: handle for key, handle in base.derived.items() if handle < first}

    def alias_of(self, tensor: torch.Tensor) -> Alias:
        """The Alias of a known tensor, whose Storage is made here if the tensor shared memory with nothing so far."""
        known = self.live[id(tensor)]
        if isinstance(known, Alias):
            return known
        base = Storage(tensor, known, known, counter=self._counter(tensor, known), held=[known])
        if (key := storage_of(tensor)) is not None:
            self.bases[key] = base
        made = self.live[id(tensor)] = Alias(tensor, base, (), known, 0)
        return made

    def _counter(self, tensor: torch.Tensor, handle: ValueId) -> int:
        """The tensor's write counter when the value was recorded: a later write was not seen."""
        noted = self.recording.versions[handle]
        return version_of(tensor) if noted < 0 or self.recording.values[handle] is not tensor else noted

    def join_aliases(self, base: Storage) -> None:
        """Before the first write to a storage: the inputs and state in the same memory become views of it."""
        if base.version or (key := storage_of(base.root)) is None:
            return
        records = self.recording.records
        for source in records[self.sources_indexed_to :]:
            if isinstance(source, SourceRecord) and (found := storage_of(source.tensor)) is not None:
                self.sources.setdefault(found, []).append(source)
        self.sources_indexed_to = len(records)
        for source in self.sources.get(key, ()):
            known = self.live.get(id(source.tensor))
            if source.tensor is base.root or known is None or (isinstance(known, Alias) and known.base is base):
                continue
            self.recording.aliasing.shares_inputs |= source.kind == "input" or self.is_input(base)
            if type(known) is ValueId and self._counter(source.tensor, known) != version_of(source.tensor):
                self.unseen_alias = source.tensor
                return
            if isinstance(known, Alias):
                self.merge(known.base, base)
            else:
                self.register_view(source.tensor, base, steps_to(source.tensor, base), known)
        self.bases[key] = base

    def note_sparse(self, made: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        """A sparse tensor may lie in the memory of the tensors it was made of, which no view step can express."""
        parts = {storage_of(part) for part in sparse_parts(made)}
        given = [part for tensor in tensors for part in (tensor, *sparse_parts(tensor))]
        self.in_sparse.update(key for one in given if (key := storage_of(one)) is not None and key in parts)

    def is_in_sparse(self, tensor: torch.Tensor) -> bool:
        """True if a sparse tensor shares this memory."""
        return bool(self.in_sparse) and any(
            storage_of(one) in self.in_sparse for one in (tensor, *sparse_parts(tensor))
        )

    def merge(self, other: Storage, base: Storage) -> None:
        """All views of `other`, which was tracked apart though it lies in the same memory, become views of `base`."""
        steps = steps_to(other.root, base)
        for known in self.live.values():
            if isinstance(known, Alias) and known.base is other:
                known.base, known.steps, known.version = base, (*steps, *known.steps), base.version
        base.held.extend(other.held)
        base.has_uncounted_alias |= other.has_uncounted_alias

    def is_input(self, base: Storage) -> bool:
        """True if this is the memory of an input."""
        sources = (source for source in self.recording.records if isinstance(source, SourceRecord))
        return any(source.kind == "input" and source.tensor is base.root for source in sources)

    def storage_at(self, key: int | None, among: Iterable[torch.Tensor] = ()) -> Storage | None:
        """The Storage with this key. If there is none yet, it is made of the first of these tensors that lies there."""
        if key is None:
            return None
        if key not in self.bases:
            for tensor in among:
                if type(self.live.get(id(tensor))) is ValueId and storage_of(tensor) == key:
                    return self.alias_of(tensor).base
        return self.bases.get(key)

    def find_storage(self, tensor: torch.Tensor) -> Storage | None:
        """The Storage that this tensor lies in, among those of all recorded values."""
        key = storage_of(tensor)
        if key is None or key in self.bases:
            return self.bases.get(key) if key is not None else None
        values, live = self.recording.values, self.live
        for handle in map(ValueId, range(self.indexed_to, len(values))):
            if handle in self.recording.freed:
                continue
            if live.get(id(values[handle])) == handle and (found := storage_of(values[handle])) is not None:
                self.by_storage[found] = values[handle]
        self.indexed_to = len(values)
        other = self.by_storage.get(key)
        return self.storage_at(key, () if other is None else (other,))

    # -- views ---------------------------------------------------------------------------------------------------

    def register_view(self, tensor: torch.Tensor, base: Storage, steps: tuple[Any, ...], handle: ValueId) -> None:
        """This tensor is a view of a base by these steps, and has this value."""
        self.live[id(tensor)] = Alias(tensor, base, steps, handle, base.version)
        base.held.append(handle)
        base.has_uncounted_alias |= bool(steps) and unpacked_place(steps[-1]).function.function == _DATA

    def view_step(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        source: torch.Tensor,
        part: tuple[int, ...],
    ) -> Any:
        """A call as a view step: a tree of its arguments with a hole where the viewed tensor stands."""

        def leaf(tensor: torch.Tensor) -> Any:
            return Hole.HERE if tensor is source else self.read(tensor)

        named = Branch(dict, tuple([freeze(value, leaf) for value in kwargs.values()]), tuple(kwargs))
        return packed_step(function, freeze(tuple(args), leaf), named, part, torch.is_grad_enabled())

    @staticmethod
    def select_step(source: torch.Tensor, part: torch.Tensor, name: str, args: Any, kwargs: Any, index: int) -> Any:
        """One output of `unbind`, `split` and the like as `select` or `narrow`, since autograd allows no write through
        views of a multi-output call.
        """
        if name == "unbind":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return packed_step(torch.Tensor.select, (Hole.HERE, dim, index), None, (), torch.is_grad_enabled())
        differing = [d for d in range(source.dim()) if source.shape[d] != part.shape[d]]
        dim = differing[0] if differing else 0
        stride = source.stride(dim) if source.dim() else 1
        start = (part.storage_offset() - source.storage_offset()) // stride if stride and differing else 0
        return packed_step(
            torch.Tensor.narrow, (Hole.HERE, dim, start, part.shape[dim]), None, (), torch.is_grad_enabled()
        )

    def regenerate_view(self, alias: Alias) -> ValueId:
        """Record the steps of a view again on its base's present value, and return the view's new value. Prefixes of
        steps that another view of this version has in common are not recorded twice.
        """
        if alias.base.is_forked and alias.is_detached:
            self.recording.autograd.forward_only.append(FORKED_HISTORY)
        base, handle, tensor = alias.base, alias.base.handle, alias.base.root

        def value(leaf: Any) -> Any:
            return self.recording.values[leaf] if type(leaf) is ValueId else leaf

        for number, step in enumerate(alias.steps):
            key = alias.steps[: number + 1]
            last = number + 1 == len(alias.steps)
            try:
                known = base.derived.get(key)
            except TypeError:  # an argument without a hash: derive it each time
                key, known = (object(),), None
            if known is None:
                with torch.no_grad():
                    tensor = alias.tensor if last else apply_view_step(tensor, thaw(step, value))
                known = base.derived[key] = self._emit_step(step, handle, tensor)
                base.held.append(known)
            elif known in self.recording.freed and not last:
                with torch.no_grad():
                    tensor = apply_view_step(tensor, thaw(step, value))
            if known not in self.recording.freed:
                tensor = self.recording.values[known]
            handle = known
        return handle

    def _emit_step(self, step: Any, source: ValueId, made: torch.Tensor) -> ValueId:
        """Record one view step as a call of its own."""
        function, args, kwargs, part, grad = unpacked_place(step)
        fill = partial(filled_hole, source)
        handle = self.recording.keep(made)
        returns: Any = handle
        for index in reversed(part):
            returns = (*([None] * index), returns)
        kind, reads = function.short.replace("_", "").lower(), tuple([map_leaves(arg, fill) for arg in args])
        named = {key: map_leaves(value, fill) for key, value in zip(kwargs.keys, kwargs.items, strict=True)}
        record = CallRecord(function.function, kind, reads, named, returns, (grad,), -1, None)
        self.recording.records.append(record)
        return handle

    # -- writes --------------------------------------------------------------------------------------------------

    def copy_on_write(self, base: Storage, content: torch.Tensor | None = None) -> None:
        """Copy the recorded values that lie in this memory, just before it is written. `content`: the memory before the
        write, if it has happened.

        Values are kept by reference until then, so a capture that writes nothing copies nothing.
        """
        recording, values, key = self.recording, self.recording.values, storage_of(base.root)
        held = [h for h in base.held if h not in recording.freed and storage_of(values[h]) == key]
        if content is None:
            for handle in recording.unwanted.intersection(held):
                recording.free(handle)
            held = [handle for handle in held if handle not in recording.freed]
        base.held = []
        if not held:
            return
        for handle in held:
            recording.note_history(handle)
        old = base.root if content is None else content
        with torch.no_grad():
            if storage_of(old) is None:
                for handle in held:
                    values[handle] = values[handle].clone()
                return
            if held == [base.handle] and values[base.handle] is old and is_all_of_its_storage(old):
                values[base.handle] = copied = old.detach().clone().requires_grad_(old.requires_grad)
                recording.versions[base.handle] = version_of(copied)
                return
            copied = old.untyped_storage().clone()
            for handle in held:
                values[handle] = self._same_view(values[handle], copied)
                recording.versions[handle] = version_of(values[handle])

    @staticmethod
    def _same_view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same geometry over a copy of the storage."""
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor.detach().clone()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        view = view.data  # with the write counter of a new tensor: `set_` counted one
        flag = tensor.requires_grad and view.is_floating_point()
        return view.requires_grad_() if flag else view  # the flag chooses kernels in a replay

    def note_write(self, base: Storage, handle: ValueId, counted: bool = True) -> None:
        """The storage holds a new value. `counted`: torch has counted the write; beneath autograd it does so only
        later, and the counter then tells nothing.
        """
        self.written.append(base.first)
        base.version += 1
        base.handle = handle
        base.counter = version_of(base.root) if counted and base.counter is not None else None
        base.derived.clear()
        base.held.append(handle)
        if base.exposed is not None:
            if base.twin is not None or base.is_kept:
                raise CaptureError(
                    "memory that two tensors, or a tensor and an array that the model holds, share through numpy, "
                    "dlpack or the like is written. Which of them holds which value cannot be known. Use views made by "
                    "torch, or copy."
                )
            base.exposed = base.root.detach().clone()
            position = len(self.recording.records) + 1  # when the call that wrote it is recorded
            guard = GuardRecord(torch.Tensor.numpy, [handle], {}, None, False, position, -1, None)
            self.recording.guards.append(guard)

    def overlapping_storage(self, tensor: torch.Tensor) -> Storage | None:
        """A known base over the same addresses, under another storage object."""
        start, end = _addresses(tensor)
        for known in list(self.live.values()):
            other = known.tensor if isinstance(known, Alias) else self.recording.values[known]
            if other.layout is torch.strided and storage_of(other) is not None:
                first, last = _addresses(other)
                if first < end and start < last:
                    return self.alias_of(other).base if id(other) in self.live else None
        return None

    def distrust_counter(self, firsts: list[ValueId]) -> None:
        """Stop comparing torch's write counter for the bases with these first values."""
        for base in self.bases.values():
            if base.first in firsts:
                base.counter = None

    def detach_alias(self, tensor: torch.Tensor) -> None:
        """Before a tensor object gets another geometry or storage: its recorded values move to an alias of what it is
        now.
        """
        self.has_detached = True
        self.detached.add(id(tensor))
        known = self.live.get(id(tensor))
        held = known.base.held if isinstance(known, Alias) else []
        plain = [known] if type(known) is ValueId else []
        for handle in (*held, *plain):
            if handle not in self.recording.freed and self.recording.values[handle] is tensor:
                self.recording.values[handle] = tensor.detach().requires_grad_(tensor.requires_grad)
        if isinstance(known, Alias) and known.base.root is tensor:
            known.base.root = tensor.detach()
        self.keep_alive.append(tensor)

    # -- memory that left torch ------------------------------------------------------------------------------------

    def expose(self, tensor: torch.Tensor, is_content_read: bool = True) -> None:
        """From now on code outside torch can write this memory: each `read` compares its content. `is_content_read`: a
        guard holds the content; otherwise only the address was read.
        """
        base = self.alias_of(tensor).base
        base.is_content_read |= is_content_read
        if base.exposed is None:
            base.exposed = base.root.detach().clone()

    def expose_whole_storage(self, tensor: torch.Tensor) -> None:
        """Expose all sources in a tensor's storage, whose storage object was read."""
        sources = [record.tensor for record in self.recording.records if isinstance(record, SourceRecord)]
        for source in sources:
            if source is not tensor and id(source) in self.live and storage_of(source) == storage_of(tensor):
                self.expose(source)

    def require_announced(self, base: Storage) -> None:
        """Refuse a write through an address or through an array that existed before the forward: nothing says which
        values it was made of.
        """
        if base.is_kept:
            raise UnannouncedWrite(
                f"a tensor {tuple(base.root.shape)} was written by numpy, through an array over its memory that the "
                "model holds or was given.\n"
                "Call `tensor.numpy()` inside the forward, or write through torch."
            )
        if not base.is_content_read:
            raise UnannouncedWrite(
                f"a tensor {tuple(base.root.shape)} was written through its address (`data_ptr()`), by code that the "
                "capture did not see.\n"
                "Declare a custom operator that says what it writes (torch.library: mutates_args)."
            )

    def _check_exposed(self, base: Storage) -> None:
        """Record content that was written from outside as a constant. Torch did not see the write, so gradients go
        where they went before it.
        """
        assert base.exposed is not None
        with without_function_modes():
            if same_content(base.root, base.exposed):
                return
            self.require_announced(base)
            now, place = base.root.detach().clone(), base.handle
            self.external_writes.append((base, {*base.held, base.handle}))
            self.restore_exposed(base)
            handle = self.recording.keep(now)
            self.recording.records.append(
                SourceRecord("constant", handle, "written from outside torch, through numpy", None, now)
            )
            if base.root.requires_grad or may_have_gradient(self.recording, place):
                content = handle
                handle = self.recording.keep(now.clone().requires_grad_(base.root.requires_grad))
                made = CallRecord(with_history_of, "data", [place, content], {}, handle, (True,), -1, None)
                self.recording.records.append(made)
            self.note_write(base, handle)

    def restore_exposed(self, base: Storage) -> None:
        """Give the recorded values of overwritten memory their content back, from the copy that `expose` took."""
        assert base.exposed is not None
        with torch.no_grad():
            before = torch.empty(0, dtype=base.root.dtype, device=base.root.device)
            before.set_(base.root.untyped_storage().clone(), *_geometry(base.root))
            before.copy_(base.exposed)
        self.copy_on_write(base, before)

    def unannounced_writes(self) -> list[tuple[torch.Tensor, ValueId]]:
        """Tensors whose write counter moved though no call announced a write."""
        found = []
        values, versions = self.recording.values, self.recording.versions
        for known in self.live.values():
            if type(known) is ValueId:
                if version_of(values[known]) != versions[known]:
                    found.append((values[known], known))
            elif isinstance(known, Alias) and known.tensor is known.base.root and known.base.counter is not None:
                if version_of(known.tensor) == known.base.counter:
                    continue
                found.append((known.tensor, known.base.handle))
        return found


@define(eq=False)
class CopiedBeforeWrite:
    """The recorded values in memory that a call may write. They are copied before the call; if it wrote nothing,
    `put_back` restores the tensors themselves: no copy of a parameter is a parameter.
    """

    base: Storage
    version: int
    held: list[ValueId]
    values: dict[ValueId, tuple[torch.Tensor, int, str | None]]

    @staticmethod
    def of(memory: AliasTracker, base: Storage) -> CopiedBeforeWrite:
        recording, held = memory.recording, list(base.held)
        known, values, versions = recording.autograd.histories, recording.values, recording.versions
        there = {h: (values[h], versions[h], known.get(h)) for h in held if h not in recording.freed}
        memory.copy_on_write(base)
        return CopiedBeforeWrite(base, version_of(base.root), held, there)

    def put_back(self, recording: Recording) -> None:
        """Restore the tensors, if nothing was written."""
        if self.version < 0 or version_of(self.base.root) != self.version:
            return
        self.base.held = [*self.held, *[handle for handle in self.base.held if handle not in self.held]]
        for handle, (value, version, history) in self.values.items():
            if handle not in recording.freed:
                recording.values[handle], recording.versions[handle] = value, version
                if history is None:
                    recording.autograd.histories.pop(handle, None)


def is_all_of_its_storage(tensor: torch.Tensor) -> bool:
    """True if a clone has the same geometry, over memory of its own with nothing else in it."""
    if type(tensor) is not torch.Tensor or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    return not tensor.is_quantized and tensor.untyped_storage().nbytes() == tensor.nbytes


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def steps_to(tensor: torch.Tensor, base: Storage) -> tuple[Any, ...]:
    """The steps from a base to a tensor that lies in its memory by no call: a buffer over `weight.data`, which has no
    gradient.
    """
    step = geometry_step(tensor, base)
    if tensor.requires_grad or not base.root.requires_grad:
        return (step,)
    return step, packed_step(torch.Tensor.detach, (Hole.HERE,), None, (), torch.is_grad_enabled())


def geometry_step(tensor: torch.Tensor, base: Storage) -> Any:
    """A view by its geometry alone, relative to the base."""
    root = base.root
    if (tensor.is_conj(), tensor.is_neg()) != (root.is_conj(), root.is_neg()):
        raise CaptureError(
            f"a conjugated or negated view {tuple(tensor.shape)} shares memory as no program can express it.\n"
            "Take a copy of it: `.resolve_conj()`, `.resolve_neg()`."
        )
    if tensor.dtype != root.dtype:
        raise CaptureError(
            f"a tensor of {tensor.dtype} shares memory with one of {root.dtype} by a call that the capture did not see."
        )
    shift = tensor.storage_offset() - root.storage_offset()
    if shift < 0 or shift + _span(tensor) > _span(root):
        shapes = f"tensors of shapes {tuple(tensor.shape)} and {tuple(root.shape)}"
        if shift >= _span(root) or shift + _span(tensor) <= 0:
            raise CaptureError(
                f"{shapes} are neighbouring parts of one storage, and one of them was written. Give the model copies "
                "of them (`.clone()`), or the larger tensor."
            )
        raise CaptureError(
            f"{shapes} partly overlap in memory, and one of them was written. Give the model inputs and buffers "
            "that do not overlap, or overlap entirely."
        )
    args = (Hole.HERE, tuple(tensor.shape), tensor.stride(), shift)
    return packed_step(as_strided_from, args, None, (), torch.is_grad_enabled())


def _geometry(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's storage, and the first one past it."""
    try:
        start = tensor.untyped_storage().data_ptr()
        return start, start + tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return 0, 0


def _span(tensor: torch.Tensor) -> int:
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )


def filled_hole(value: Any, leaf: Any) -> Any:
    """A leaf of a view step; `value` where the step has its hole."""
    return value if leaf is Hole.HERE else leaf


def packed_step(
    function: Callable[..., Any], args: Any, kwargs: Branch | None, part: tuple[int, ...], grad: bool
) -> Branch:
    return packed_place(ViewStep(Target.of(function), args, kwargs or Branch(dict, (), ()), part, grad))


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """False if two tensors in one storage certainly share no element. True also where that would be expensive to find
    out.
    """
    if not one.numel() or not other.numel():
        return False
    if one.dtype != other.dtype:
        return True
    low = min(one.storage_offset(), other.storage_offset())
    starts = [tensor.storage_offset() - low for tensor in (one, other)]
    size = max(starts[0] + _span(one), starts[1] + _span(other))
    if min(starts[0] + _span(one), starts[1] + _span(other)) <= max(starts):
        return False
    if size > 10_000_000:
        return True
    with unset_fake_temporarily():
        marks = torch.zeros(size, dtype=torch.bool)
        marks.as_strided(one.shape, one.stride(), starts[0]).fill_(True)
        return bool(marks.as_strided(other.shape, other.stride(), starts[1]).any())
