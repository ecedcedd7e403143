"""Tensors that replace those of the user while the model runs once more: other values, and copies that may be written.

In: the arguments of calls, with tensors that the model holds. Out: the same arguments with substitutes. No module is
touched: a parameter stays in place, tied ones too. Before the forward writes a tensor of the user, that tensor and all
its views get substitutes over a copy, so nothing of the user is ever written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field, frozen

from ..._ir.memory import span, storage_of, version_of, writable_copy
from ..._ir.torch_private import without_function_modes
from ..._ir.trees import thaw
from ..._ir.write import apply_view_step
from ..aliasing import Alias, Storage, geometry_step
from ..recorder import Recorder, geometry_of, tensors_in
from ..recording import SourceRecord, ValueId


@frozen(eq=False)
class PendingSubstitute:
    """A substitute that no call has read yet: what it replaces, and how its record begins at the first read."""

    kind: str
    where: Any
    originals: tuple[torch.Tensor, ...]
    value: torch.Tensor
    record_patch: Callable[[ValueId], None] | None = None  # of a patched one: called with the value that it replaces
    storages: tuple[int, ...] = ()  # of the originals, where other tensors may lie in the same memory


@define(eq=False)
class Substitutes:
    """The substitutes of tensors of the user, by id.

        self.w.mul_(2)      copy_before_write(w): by_id[w] = w', a copy; w itself stays as it is
        self.w[0] + x       resolve: reads w'[0]. A view that was made before gets a substitute over w', too
        replay(state={"w": v})   by_id[w] = v, pending until it is read; a write then adds by_id[v] = v', a copy

    So `by_id` holds chains, which `of` follows to their end. Every tensor over a storage in `copied_storages` has a
    substitute over the one copy, or gets it when it is first met (`resolve`): then one write is seen by all.
    """

    recorder: Recorder
    by_id: dict[int, torch.Tensor] = field(factory=dict)
    pending: dict[int, PendingSubstitute] = field(factory=dict)  # by the id of the substitute
    pending_by_storage: dict[int, torch.Tensor] = field(factory=dict)  # substitutes, by the storage that they replace
    kept: list[Any] = field(factory=list)  # keeps originals alive: an id is used again once its tensor dies
    is_users: dict[int, bool] = field(factory=dict)  # by storage
    scanned: int = 0  # the records before this number have entered `is_users`
    copied_storages: dict[int, tuple[Storage, torch.Tensor]] = field(factory=dict)  # -> the copy, and its root
    copy_ids: set[int] = field(factory=set)  # substitutes over such a copy

    def add_pending(self, tensor: torch.Tensor, pending: PendingSubstitute) -> None:
        """Registers a substitute that is recorded at its first read."""
        self.pending[id(tensor)] = pending
        self.kept.append(tensor)
        for original in pending.originals:
            self.replace(original, tensor)
        for key in pending.storages:
            self.pending_by_storage.setdefault(key, tensor)

    def replace(self, original: torch.Tensor, new: torch.Tensor) -> None:
        if original is not new:
            self.by_id[id(original)] = new
            self.kept.extend((original, new))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The substitute of a tensor; mostly the tensor itself."""
        while (other := self.by_id.get(id(tensor))) is not None:
            tensor = other
        return tensor

    def grad_leaf(self, tensor: torch.Tensor, names_inputs: bool) -> torch.Tensor:
        """Where gradients of a leaf accumulate: a leaf that replaces it, or if the call `names_inputs`, any."""
        found = other = tensor
        while (after := self.by_id.get(id(other))) is not None:
            other = after
            if (names_inputs or other.is_leaf) and other.requires_grad:
                found = other
        return found if (found.shape, found.dtype) == (tensor.shape, tensor.dtype) else tensor

    def for_query(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor that knows the autograd state: a copy made for writing has its own, a gradient is at the leaf."""
        if name == "grad" and tensor.is_leaf:
            return tensor
        while (other := self.by_id.get(id(tensor))) is not None and id(other) not in self.copy_ids:
            tensor = other
        return tensor

    def resolve(self, value: Any) -> Any:
        """The arguments with substitutes, also for tensors first seen after their memory was copied."""
        if self.copied_storages or self.pending_by_storage:
            for tensor in tensors_in((value,), {}):
                if id(tensor) not in self.recorder.memory.live:
                    self._resolve_new(tensor)
        return self.substitute(value)

    def _resolve_new(self, tensor: torch.Tensor) -> None:
        """Gives a new tensor over replaced or copied memory the value that stands there now."""
        key, other = storage_of(tensor) or 0, self.of(tensor)
        if (pending := self.pending.get(id(other))) is not None:
            if pending.record_patch is None and key in self.copied_storages and self.copied_storages[key][0].version:
                del self.pending[id(other)]
                self._add_late_alias(tensor)
            return
        if key in self.pending_by_storage:
            self.recorder.read(self.pending_by_storage[key])
        if key in self.copied_storages:
            self._add_late_alias(tensor)

    def substitute(self, value: Any) -> Any:
        """The arguments of a call with known substitutes; the same objects where there are none."""
        if not self.by_id:
            return value
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self.of(value)
        if kind in (tuple, list):
            items = [self.substitute(item) for item in value]
            return kind(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if kind is dict:
            named = {key: self.substitute(item) for key, item in value.items()}
            return named if any(named[key] is not value[key] for key in value) else value
        if kind is slice:
            return slice(*map(self.substitute, (value.start, value.stop, value.step)))
        return value

    def materialize(self, tensor: torch.Tensor) -> ValueId | None:
        """At the first read of a substitute: records what it replaces, and its patch."""
        pending = self.pending.pop(id(tensor), None)
        if pending is None:
            return None
        recorder, recording = self.recorder, self.recorder.recording
        handle = recorder.source(pending.kind, pending.originals[0], pending.where)
        recording.values[handle], recording.versions[handle] = pending.value, version_of(pending.value)
        if pending.record_patch is None:
            recorder.memory.register(tensor, handle)
        else:
            pending.record_patch(handle)
        for original in pending.originals:
            self.share(original, tensor)
        for key in pending.storages:
            self.pending_by_storage.pop(key, None)
            self._join_storage(key, tensor)
        return recorder.memory.read(tensor)

    def _join_storage(self, key: int, tensor: torch.Tensor) -> None:
        """Makes substitutes over one replaced storage views of the one that spans most of it."""
        base = self.recorder.memory.alias_of(tensor).base
        known, root = self.copied_storages.setdefault(key, (base, tensor))
        if known is not base and not known.version and span(root) < span(tensor):
            self.copied_storages[key] = base, tensor
            self.recorder.memory.merge(known, base)
        elif known is not base:
            self.recorder.memory.merge(base, known)

    def share(self, original: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gives both tensors one alias: one value now and after every write."""
        entry = self.recorder.memory.alias_of(tensor)
        self.recorder.memory.live[id(original)] = entry
        self.replace(original, tensor)

    # -- copy before write --------------------------------------------------------------------------------------------

    def copy_before_write(self, target: torch.Tensor) -> None:
        """If the memory is the user's, gives every tensor over it a substitute over a copy."""
        memory, key = self.recorder.memory, storage_of(target)
        if key is None or not self._is_users_storage(key):
            return
        base = memory.alias_of(target).base
        memory.join_aliases(base)
        self.copied_storages[key] = base, base.root
        with without_function_modes(), self.recorder.beneath_leaf():
            with torch.enable_grad():  # so that gradients still reach the user's own tensor
                root = writable_copy(base.root)
            self._move_aliases(base, root)
        memory.bases.pop(key, None)
        if (copied := storage_of(root)) is not None:
            memory.bases[copied] = base
            self.is_users[copied] = False

    def _add_late_alias(self, tensor: torch.Tensor) -> None:
        """Substitutes a tensor that the forward first reads after its memory was copied."""
        base, root = self.copied_storages[storage_of(tensor) or 0]
        memory = self.recorder.memory
        steps: tuple[Any, ...] = ()
        if geometry_of(tensor) != geometry_of(root):
            steps = (geometry_step(tensor, Storage(root, base.handle, base.first)),)
        with without_function_modes(), self.recorder.beneath_leaf():
            made = apply_view_step(base.root, thaw(steps[0], self._value)) if steps else base.root
        if id(made) not in memory.live:
            memory.register_view(made, base, steps, base.handle)
        if steps:
            memory.alias_of(made).version = -1  # never current: regenerated when it is read
        self.copy_ids.add(id(made))
        self.share(tensor, made)

    def alias_to(self, tensor: torch.Tensor, root: torch.Tensor) -> None:
        """From now on the tensor is an alias of the memory of `root`."""
        if tensor is root:
            return
        base = self.recorder.memory.alias_of(root).base
        self.copied_storages[storage_of(tensor) or 0] = base, root
        self._add_late_alias(tensor)

    def _move_aliases(self, base: Storage, root: torch.Tensor) -> None:
        """Regenerates all aliases of a storage over its copy."""
        memory = self.recorder.memory
        entries = {id(known): known for known in memory.live.values() if isinstance(known, Alias)}
        for entry in [entry for entry in entries.values() if entry.base is base]:
            made = root
            for step in entry.steps:
                one = thaw(step, self._value)
                with torch.set_grad_enabled(one.grad):
                    made = apply_view_step(made, one)
            self.replace(entry.tensor, made)
            self.copy_ids.add(id(made))
            memory.live[id(made)] = entry
            entry.tensor = made
        base.root, base.counter, base.held = root, version_of(root), []

    def _value(self, leaf: Any) -> Any:
        return self.recorder.recording.values[leaf] if type(leaf) is ValueId else leaf

    def _is_users_storage(self, key: int) -> bool:
        recording = self.recorder.recording
        for record in recording.records[self.scanned :]:
            if isinstance(record, SourceRecord) and (
                record.kind != "constant" or record.where == "older than the capture"
            ):
                for tensor in (record.tensor, recording.values[record.returns]):
                    if (storage := storage_of(tensor)) is not None:
                        self.is_users.setdefault(storage, True)
        self.scanned = len(recording.records)
        return self.is_users.get(key, False)
