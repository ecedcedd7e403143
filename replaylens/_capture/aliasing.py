"""In-place writes and views as pure calls: which memory a tensor looks at, and which value is in it now.

In: tensors as the model holds them. Out: the Handle of the value that each has at this moment. A storage is one Base
with a version; a tensor that shares it is an Entry with the chain of view steps that leads from the base. A write
makes the next version of the base; a view that is read later is derived again from it, by the same steps.

A tensor that shares memory with nothing (most do) is no more than its Handle: its Base is made when somebody asks.
Keyed by storage, not by id alone: an id is used again once its tensor dies, so everything known here is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field

from .._ir.autograd import history_of, new_parameter, standing
from .._ir.equality import same_content
from .._ir.runtime import as_strided_from
from .._ir.shared_memory import sparse_parts, storage_of, version_of
from .._ir.target import Target
from .._ir.torch_private import unset_fake_temporarily, without_function_modes
from .._ir.trees import Branch, freeze, leaves, remake, thaw
from .._ir.write import Hole, Step, packed, take_step, unpacked
from ..errors import CaptureError, UnannouncedWrite
from .recording import CallRecord, GuardRecord, Recording, SourceRecord, ValueId

FORKED = (
    "a detached alias that was written with what has gradients, and is read again after its memory was written "
    "elsewhere: torch keeps two histories of one memory. Compute with a copy."
)

OUTSIDE = "made outside torch"  # the origin of a constant


def detaches(function: Any) -> bool:
    """Does a gradient end at this view?"""
    return getattr(function, "__name__", "") == "detach" or getattr(function, "__self__", None) is torch.Tensor.data


def may_flow(recording: Recording, handle: ValueId) -> bool:
    """Can a gradient go back from a value to an input or a parameter, in a replay if not in this forward?"""
    made = {h: record for record in recording.records for h in leaves(record.returns) if type(h) is ValueId}
    stack, seen = [handle], {handle}
    while stack:
        record = made[stack.pop()]
        if isinstance(record, SourceRecord):
            if record.kind == "input" or record.tensor.requires_grad:
                return True
        elif (record.context[0] or not recording.ambient[0]) and not detaches(record.function):
            reads = leaves((*record.args, *(record.kwargs or {}).values()))
            above = {leaf for leaf in reads if type(leaf) is ValueId} - seen
            seen |= above
            stack.extend(above)
    return False


@define(eq=False)
class Storage:
    """One storage, and the value that it holds now."""

    root: torch.Tensor  # looks at all of it that the program knows
    handle: ValueId
    first: ValueId
    version: int = 0
    counter: int | None = 0  # torch's own write counter after the last write that was announced
    held: list[ValueId] = field(factory=list)  # recorded values that live in this memory
    derived: dict[Any, ValueId] = field(factory=dict)  # views of this version
    twin: Storage | None = None  # the same memory under another storage
    exposed: torch.Tensor | None = None  # the content when somebody outside torch got hold of the memory
    is_forked: bool = False  # written through a detached alias, with what may have a history
    is_told: bool = False  # ... and was told what is there, not the address alone
    is_kept: bool = False  # ... by an array that hung on the model, or was given to it, before the forward began


@define(eq=False)
class Alias:
    """One tensor object: the base it looks at, the view steps between, the value last read and when."""

    tensor: torch.Tensor
    base: Storage
    steps: tuple[Any, ...]
    handle: ValueId
    version: int

    @property
    def is_detached(self) -> bool:
        """Do gradients end on the way from the base, or go elsewhere?"""
        functions = [unpacked(step).function.function for step in self.steps]
        return any(function in (standing, new_parameter) or detaches(function) for function in functions)


@define(eq=False)
class AliasTracker:
    """Every tensor that the program knows, by identity and by storage."""

    recording: Recording
    live: dict[int, ValueId | Alias] = field(factory=dict)
    by_storage: dict[int, torch.Tensor] = field(factory=dict)  # of the values looked at so far, by storage
    looked_at: int = 0
    sources: dict[int, list[SourceRecord]] = field(factory=dict)  # inputs, state and constants, by storage
    shared_to: int = 0
    parted: bool = False  # a tensor object was given another geometry or other memory
    moved: set[int] = field(factory=set)  # those objects, by id
    begun: dict[int, int] = field(factory=dict)  # by id of what the model holds: its counter when it was first read
    written: list[ValueId] = field(factory=list)  # the first values of bases, once for each write
    bases: dict[int, Storage] = field(factory=dict)
    keep_alive: list[Any] = field(factory=list)
    rewritten: list[tuple[Storage, set[ValueId]]] = field(factory=list)  # by numpy, and the values that it held before
    same_as: dict[ValueId, ValueId] = field(factory=dict)  # values that differ from another in how gradients flow alone
    strayed: torch.Tensor | None = None  # came to look at this memory by a call that was not seen
    lent: set[int] = field(factory=set)  # storages of tensors that a sparse tensor was made of

    # -- reading -------------------------------------------------------------------------------------------------

    def know(self, tensor: torch.Tensor, handle: ValueId) -> None:
        """This object holds this value, in memory that nothing else looks at as far as anybody knows."""
        self.live[id(tensor)] = handle

    def read(self, tensor: torch.Tensor) -> ValueId | None:
        """The value that the tensor has now, or None for a tensor that was never seen."""
        known = self.live.get(id(tensor))
        if known is None or type(known) is ValueId:
            return known
        assert isinstance(known, Alias)
        base = known.base
        if base.exposed is not None:
            self._look_at_exposed(base)
        if known.version != base.version:
            if known.steps and known.version >= 0:
                self.recording.overwritten.add(known.handle)
            known.handle = self._derive(known) if known.steps else base.handle
            known.version = base.version
        return known.handle

    def same_content(self, handle: ValueId) -> list[ValueId]:
        """A value, and those that it only differs from in how gradients flow; the first of them last."""
        found = [handle]
        while (handle := self.same_as.get(handle, handle)) != found[-1]:
            found.append(handle)
        return found

    def take_back(self, first: int) -> None:
        """Forget every tensor first seen since a value of this number."""
        for key, known in list(self.live.items()):
            if (known.handle if isinstance(known, Alias) else known) >= first:
                del self.live[key]
        self.bases = {key: base for key, base in self.bases.items() if base.handle < first}
        for base in self.bases.values():
            base.held = [handle for handle in base.held if handle < first]
            base.derived = {key: handle for key, handle in base.derived.items() if handle < first}

    def entry(self, tensor: torch.Tensor) -> Alias:
        """The Entry of a known tensor, with its base."""
        known = self.live[id(tensor)]
        if isinstance(known, Alias):
            return known
        base = Storage(tensor, known, known, counter=self._counter(tensor, known), held=[known])
        if (key := storage_of(tensor)) is not None:
            self.bases[key] = base
        made = self.live[id(tensor)] = Alias(tensor, base, (), known, 0)
        return made

    def _counter(self, tensor: torch.Tensor, handle: ValueId) -> int:
        """Torch's write counter as it was when the value was recorded: a write since then was not seen."""
        noted = self.recording.versions[handle]
        return version_of(tensor) if noted < 0 or self.recording.values[handle] is not tensor else noted

    def share(self, base: Storage) -> None:
        """Before a first write: inputs and state that look at the same memory become views of the base."""
        if base.version or (key := storage_of(base.root)) is None:
            return
        records = self.recording.records
        for source in records[self.shared_to :]:
            if isinstance(source, SourceRecord) and (found := storage_of(source.tensor)) is not None:
                self.sources.setdefault(found, []).append(source)
        self.shared_to = len(records)
        for source in self.sources.get(key, ()):
            known = self.live.get(id(source.tensor))
            if source.tensor is base.root or known is None or (isinstance(known, Alias) and known.base is base):
                continue
            self.recording.aliased |= source.kind == "input" or self.is_input(base)
            if type(known) is ValueId and self._counter(source.tensor, known) != version_of(source.tensor):
                self.strayed = source.tensor
                return
            if isinstance(known, Alias):
                self.join(known.base, base)
            else:
                self.look(source.tensor, base, (geometry_step(source.tensor, base),), known)
        self.bases[key] = base

    def lend(self, made: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        """A sparse tensor was made: it may lie in the memory of what it was made of, which no view step says."""
        parts = {storage_of(part) for part in sparse_parts(made)}
        given = [part for tensor in tensors for part in (tensor, *sparse_parts(tensor))]
        self.lent.update(key for one in given if (key := storage_of(one)) is not None and key in parts)

    def is_lent(self, tensor: torch.Tensor) -> bool:
        """Does a sparse tensor lie in this memory besides others?"""
        return bool(self.lent) and any(storage_of(one) in self.lent for one in (tensor, *sparse_parts(tensor)))

    def join(self, other: Storage, base: Storage) -> None:
        """Two tensors over one memory were looked at apart from each other. From now on all are views of one."""
        step = geometry_step(other.root, base)
        for known in self.live.values():
            if isinstance(known, Alias) and known.base is other:
                known.base, known.steps, known.version = base, (step, *known.steps), base.version
        base.held.extend(other.held)

    def is_input(self, base: Storage) -> bool:
        """Is this the memory of an input?"""
        sources = (source for source in self.recording.records if isinstance(source, SourceRecord))
        return any(source.kind == "input" and source.tensor is base.root for source in sources)

    def base_at(self, key: int | None, among: Iterable[torch.Tensor] = ()) -> Storage | None:
        """The base with this storage; tensors that may look at it are asked first."""
        if key is None:
            return None
        if key not in self.bases:
            for tensor in among:
                if type(self.live.get(id(tensor))) is ValueId and storage_of(tensor) == key:
                    return self.entry(tensor).base
        return self.bases.get(key)

    def base_anywhere(self, tensor: torch.Tensor) -> Storage | None:
        """The base with this tensor's storage, whoever may hold it."""
        key = storage_of(tensor)
        if key is None or key in self.bases:
            return self.bases.get(key) if key is not None else None
        values, live = self.recording.values, self.live
        for handle in map(ValueId, range(self.looked_at, len(values))):
            if handle in self.recording.gone:
                continue
            if live.get(id(values[handle])) == handle and (found := storage_of(values[handle])) is not None:
                self.by_storage[found] = values[handle]
        self.looked_at = len(values)
        other = self.by_storage.get(key)
        return self.base_at(key, () if other is None else (other,))

    # -- views ---------------------------------------------------------------------------------------------------

    def look(self, tensor: torch.Tensor, base: Storage, steps: tuple[Any, ...], handle: ValueId) -> None:
        """This object is a view of a base: it was made by these steps and has this value."""
        self.live[id(tensor)] = Alias(tensor, base, steps, handle, base.version)
        base.held.append(handle)

    def step(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        source: torch.Tensor,
        part: tuple[int, ...],
    ) -> Any:
        """The view step that a call is, as a tree: its arguments with a hole where the viewed tensor stands."""

        def leaf(tensor: torch.Tensor) -> Any:
            return Hole.HERE if tensor is source else self.read(tensor)

        named = Branch(dict, tuple([freeze(value, leaf) for value in kwargs.values()]), tuple(kwargs))
        return step_tree(function, freeze(tuple(args), leaf), named, part, torch.is_grad_enabled())

    def part_step(self, source: torch.Tensor, part: torch.Tensor, name: str, args: Any, kwargs: Any, index: int) -> Any:
        """One output of `unbind`, `split` and their kin, as `select` or `narrow`: those may be written through."""
        if name == "unbind":
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return step_tree(torch.Tensor.select, (Hole.HERE, dim, index), None, (), torch.is_grad_enabled())
        differing = [d for d in range(source.dim()) if source.shape[d] != part.shape[d]]
        dim = differing[0] if differing else 0
        stride = source.stride(dim) if source.dim() else 1
        start = (part.storage_offset() - source.storage_offset()) // stride if stride and differing else 0
        return step_tree(
            torch.Tensor.narrow, (Hole.HERE, dim, start, part.shape[dim]), None, (), torch.is_grad_enabled()
        )

    def _derive(self, entry: Alias) -> ValueId:
        """A view read after its base was written: its steps again, on the base's present value."""
        with without_function_modes():
            return self._derive_unseen(entry)

    def _derive_unseen(self, entry: Alias) -> ValueId:
        if entry.base.is_forked and entry.is_detached:
            self.recording.one_way.append(FORKED)
        base, handle, tensor = entry.base, entry.base.handle, entry.base.root
        for number, step in enumerate(entry.steps):
            key = entry.steps[: number + 1]
            last = number + 1 == len(entry.steps)
            try:
                known = base.derived.get(key)
            except TypeError:  # an argument without a hash: derive it each time
                key, known = (object(),), None
            if known is None:
                with torch.no_grad():
                    tensor = entry.tensor if last else take_step(tensor, thaw(step, self._value))
                known = base.derived[key] = self._emit_step(step, handle, tensor)
                base.held.append(known)
            elif known in self.recording.gone and not last:
                with torch.no_grad():
                    tensor = take_step(tensor, thaw(step, self._value))
            if known not in self.recording.gone:
                tensor = self.recording.values[known]
            handle = known
        return handle

    def _emit_step(self, step: Any, source: ValueId, made: torch.Tensor) -> ValueId:
        function, args, kwargs, part, grad = unpacked(step)
        fill: Callable[[Any], Any] = lambda leaf: source if leaf is Hole.HERE else leaf  # noqa: E731
        handle = self.recording.keep(made)
        returns: Any = handle
        for index in reversed(part):
            returns = (*([None] * index), returns)
        record = CallRecord(
            function.function,
            function.short.replace("_", "").lower(),
            tuple([remake(arg, fill) for arg in args]),
            {key: remake(value, fill) for key, value in zip(kwargs.keys, kwargs.items, strict=True)},
            returns,
            (grad,),
            -1,
            None,
        )
        self.recording.records.append(record)
        return handle

    def _value(self, leaf: Any) -> Any:
        return self.recording.values[leaf] if type(leaf) is ValueId else leaf

    # -- writes --------------------------------------------------------------------------------------------------

    def preserve(self, base: Storage, content: torch.Tensor | None = None) -> None:
        """Copy what is recorded of this memory, just before it is overwritten. Only then: a value is kept by
        reference.
        """
        values, old = self.recording.values, (base.root if content is None else content)
        there = [handle for handle in base.held if handle not in self.recording.gone]
        there = [handle for handle in there if storage_of(values[handle]) == storage_of(base.root)]
        for handle in self.recording.spare.intersection(there) if content is None else ():  # else it is no call's work
            self.recording.let_go(handle)
        held = [handle for handle in there if handle not in self.recording.gone]
        base.held = []
        if not held:
            return
        for handle in held:  # a copy has no history
            if (history := history_of(values[handle])) is not None:
                self.recording.gradients[handle] = history
        with torch.no_grad():
            if storage_of(old) is None:
                for handle in held:
                    values[handle] = values[handle].clone()
                return
            copied = old.untyped_storage().clone()
            for handle in held:
                values[handle] = self._same_view(values[handle], copied)
                self.recording.versions[handle] = version_of(values[handle])

    @staticmethod
    def _same_view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same geometry over a copied storage."""
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return tensor.detach().clone()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        view = view.data  # its write counter is that of a new tensor: `set_` is no write of anybody's
        flag = tensor.requires_grad and view.is_floating_point()
        return view.requires_grad_() if flag else view  # the flag chooses kernels in a replay

    def wrote(self, base: Storage, handle: ValueId, counted: bool = True) -> None:
        """The base holds a new value. Beneath autograd torch counts the write only later: then its counter tells
        nothing.
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
                    "memory that two tensors, or a tensor and an array that the model keeps, look at through numpy, "
                    "dlpack or the like is written. "
                    "Which of them has which "
                    "value cannot be known. Use torch's own views, or copy."
                )
            base.exposed = base.root.detach().clone()
            position = len(self.recording.records) + 1  # when the call that wrote it is recorded
            guard = GuardRecord(torch.Tensor.numpy, [handle], {}, None, False, position, -1, None)
            self.recording.guards.append(guard)

    def overlapping(self, tensor: torch.Tensor) -> Storage | None:
        """A base that looks at the same addresses under another storage."""
        start, end = _addresses(tensor)
        for known in list(self.live.values()):
            other = known.tensor if isinstance(known, Alias) else self.recording.values[known]
            if other.layout is torch.strided and storage_of(other) is not None:
                first, last = _addresses(other)
                if first < end and start < last:
                    return self.entry(other).base if id(other) in self.live else None
        return None

    def uncount(self, firsts: list[ValueId]) -> None:
        """Torch's write counter of these bases tells nothing any more."""
        for base in self.bases.values():
            if base.first in firsts:
                base.counter = None

    def part_from(self, tensor: torch.Tensor) -> None:
        """Before a tensor object gets another geometry or storage: its recorded values go on in an alias."""
        self.parted = True
        self.moved.add(id(tensor))
        known = self.live.get(id(tensor))
        held = known.base.held if isinstance(known, Alias) else []
        plain = [known] if type(known) is ValueId else []
        for handle in (*held, *plain):
            if handle not in self.recording.gone and self.recording.values[handle] is tensor:
                self.recording.values[handle] = tensor.detach().requires_grad_(tensor.requires_grad)
        if isinstance(known, Alias) and known.base.root is tensor:
            known.base.root = tensor.detach()
        self.keep_alive.append(tensor)

    # -- memory that left torch ------------------------------------------------------------------------------------

    def expose(self, tensor: torch.Tensor, is_told: bool = True) -> None:
        """Somebody outside torch can write this memory from now on: its content is compared at each read. Is it told
        what is there now, so that a guard holds it?
        """
        base = self.entry(tensor).base
        base.is_told |= is_told
        if base.exposed is None:
            base.exposed = base.root.detach().clone()

    def expose_beside(self, tensor: torch.Tensor) -> None:
        """The same of all that was given or held in the storage of a tensor, which leaves torch whole."""
        sources = [record.tensor for record in self.recording.records if isinstance(record, SourceRecord)]
        for source in sources:
            if source is not tensor and id(source) in self.live and storage_of(source) == storage_of(tensor):
                self.expose(source)

    def require_announced(self, base: Storage) -> None:
        """Refuse what was written by somebody who knew no more than an address, or had hold of the memory before:
        nothing says what it was made of.
        """
        if base.is_kept:
            raise UnannouncedWrite(
                f"a tensor {tuple(base.root.shape)} was written by numpy, through an array over its memory that the "
                "model keeps or was given.\nLet the forward ask the tensor for its array (`tensor.numpy()`), or "
                "write by torch."
            )
        if not base.is_told:
            raise UnannouncedWrite(
                f"a tensor {tuple(base.root.shape)} was written through its address (`data_ptr()`), by something that "
                "was not seen.\nDeclare a custom operator that says what it writes (torch.library: mutates_args)."
            )

    def _look_at_exposed(self, base: Storage) -> None:
        """What was written from outside is a constant; torch did not see it, so that gradients go where they went."""
        assert base.exposed is not None
        with without_function_modes():
            if same_content(base.root, base.exposed):
                return
            self.require_announced(base)
            now, place = base.root.detach().clone(), base.handle
            self.rewritten.append((base, {*base.held, base.handle}))
            self.restore_held(base)
            handle = self.recording.keep(now)
            self.recording.records.append(
                SourceRecord("constant", handle, "written from outside torch, through numpy", None, now)
            )
            if base.root.requires_grad or may_flow(self.recording, place):
                content = handle
                handle = self.recording.keep(now.clone().requires_grad_(base.root.requires_grad))
                made = CallRecord(standing, "data", [place, content], {}, handle, (True,), -1, None)
                self.recording.records.append(made)
            self.wrote(base, handle)

    def restore_held(self, base: Storage) -> None:
        """The recorded values of memory that numpy has overwritten, from the copy that was taken of it."""
        assert base.exposed is not None
        with torch.no_grad():
            before = torch.empty(0, dtype=base.root.dtype, device=base.root.device)
            before.set_(base.root.untyped_storage().clone(), *_geometry(base.root))
            before.copy_(base.exposed)
        self.preserve(base, before)

    def unannounced(self) -> list[tuple[torch.Tensor, ValueId]]:
        """Tensors whose write counter moved without a call that says so."""
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
    """What was recorded of some memory, where a call may write: it was copied, in case that it does."""

    base: Storage
    version: int
    held: list[ValueId]
    values: dict[ValueId, tuple[torch.Tensor, int, str | None]]

    @staticmethod
    def of(memory: AliasTracker, base: Storage) -> CopiedBeforeWrite:
        known, values, versions = memory.recording.gradients, memory.recording.values, memory.recording.versions
        held = list(base.held)
        there = {h: (values[h], versions[h], known.get(h)) for h in held if h not in memory.recording.gone}
        memory.preserve(base)
        return CopiedBeforeWrite(base, version_of(base.root), held, there)

    def put_back(self, recording: Recording) -> None:
        """The values themselves, where nothing was written after all: what a parameter is, no copy of it is."""
        if self.version < 0 or version_of(self.base.root) != self.version:
            return
        self.base.held = [*self.held, *[handle for handle in self.base.held if handle not in self.held]]
        for handle, (value, version, history) in self.values.items():
            if handle not in recording.gone:
                recording.values[handle], recording.versions[handle] = value, version
                if history is None:
                    recording.gradients.pop(handle, None)


def geometry_step(tensor: torch.Tensor, base: Storage) -> Any:
    """A view by its geometry alone, relative to the base."""
    root = base.root
    if tensor.dtype != root.dtype:
        raise CaptureError(
            f"a tensor of {tensor.dtype} shares memory with one of {root.dtype} in a way that was not seen."
        )
    shift = tensor.storage_offset() - root.storage_offset()
    if shift < 0 or shift + _span(tensor) > _span(root):
        shapes = f"tensors of shapes {tuple(tensor.shape)} and {tuple(root.shape)}"
        if shift >= _span(root) or shift + _span(tensor) <= 0:
            raise CaptureError(
                f"{shapes} lie side by side in one storage, as parts of a larger tensor, and one of them was written. "
                "Give the model copies of them (`.clone()`), or the larger tensor."
            )
        raise CaptureError(
            f"{shapes} share a part of their memory, and one of them was written. Give the model inputs and buffers "
            "that do not overlap, or overlap wholly."
        )
    args = (Hole.HERE, tuple(tensor.shape), tensor.stride(), shift)
    return step_tree(as_strided_from, args, None, (), torch.is_grad_enabled())


def _geometry(tensor: torch.Tensor) -> tuple[Any, Any, Any]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor's storage takes: first, and first after."""
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


def step_tree(
    function: Callable[..., Any], args: Any, kwargs: Branch | None, part: tuple[int, ...], grad: bool
) -> Branch:
    return packed(Step(Target.of(function), args, kwargs or Branch(dict, (), ()), part, grad))


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do two tensors in one storage look at any same element? Yes, where that would be dear to find out."""
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
