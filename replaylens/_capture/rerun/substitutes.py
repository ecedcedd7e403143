"""What stands for the user's tensors while the model runs once more: other values, and copies that may be written.

In: calls with the tensors that the model holds. Out: the same calls with other tensors in their place. No module is
touched: a parameter stays where it is, tied ones too, and each torch call is given what stands for it. A tensor of the
user's that the forward is about to write gets a copy first, and so do all views of it, so that nothing of the user's is
ever written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field, frozen

from ..._ir.copies import writable_copy
from ..._ir.shared_memory import span, storage_of, version_of
from ..._ir.torch_private import without_function_modes
from ..._ir.trees import thaw
from ..._ir.write import take_step
from ..aliasing import Alias, Storage, geometry_step
from ..recorder import Recorder, geometry_of, tensors_in
from ..recording import SourceRecord, ValueId


@frozen(eq=False)
class PendingSubstitute:
    """A stand-in that no call has read yet: what it stands for, and how its record begins when one does."""

    kind: str
    where: Any
    originals: tuple[torch.Tensor, ...]
    value: torch.Tensor
    record_patch: Callable[[ValueId], None] | None = (
        None  # a patched one's: records the patch, given the Handle of the value
    )
    storages: tuple[int, ...] = ()  # storages in which the originals lay: what else lies there changes with them


@define(eq=False)
class Substitutes:
    """For objects of the user's, by id, the tensors that stand for them."""

    recorder: Recorder
    by_id: dict[int, torch.Tensor] = field(factory=dict)
    pending: dict[int, PendingSubstitute] = field(factory=dict)  # by the id of the stand-in
    kept: list[Any] = field(factory=list)  # originals: an id is used again once its tensor dies
    pending_by_storage: dict[int, torch.Tensor] = field(
        factory=dict
    )  # by such a storage: the stand-in, until it is read
    is_users: dict[int, bool] = field(factory=dict)  # by storage: is it the user's?
    scanned: int = 0
    copied_storages: dict[int, tuple[Storage, torch.Tensor]] = field(
        factory=dict
    )  # storages of which there is a copy now
    copy_ids: set[int] = field(factory=set)  # stand-ins over such a copy, by id

    def add_pending(self, tensor: torch.Tensor, pending: PendingSubstitute) -> None:
        """A stand-in that is to be read, if the forward comes to it."""
        self.pending[id(tensor)] = pending
        self.kept.append(tensor)
        for original in pending.originals:
            self.replace(original, tensor)
        for key in pending.storages:
            self.pending_by_storage.setdefault(key, tensor)

    def replace(self, original: torch.Tensor, new: torch.Tensor) -> None:
        """From now on this stands for the object."""
        if original is not new:
            self.by_id[id(original)] = new
            self.kept.extend((original, new))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor: mostly it does so itself."""
        while (other := self.by_id.get(id(tensor))) is not None:
            tensor = other
        return tensor

    def grad_leaf(self, tensor: torch.Tensor, names_inputs: bool) -> torch.Tensor:
        """What collects gradients in the place of a leaf: a leaf, or where a call asks for it, what stands for it."""
        found = other = tensor
        while (after := self.by_id.get(id(other))) is not None:
            other = after
            if (names_inputs or other.is_leaf) and other.requires_grad:
                found = other
        return found if (found.shape, found.dtype) == (tensor.shape, tensor.dtype) else tensor

    def for_query(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """What knows the answer to a question about autograd: a copy of what is written has flags of its own, and
        gradients are at the leaf itself.
        """
        if name == "grad" and tensor.is_leaf:
            return tensor
        while (other := self.by_id.get(id(tensor))) is not None and id(other) not in self.copy_ids:
            tensor = other
        return tensor

    def resolve(self, value: Any) -> Any:
        """A call's arguments as `among` gives them; tensors that are met now and lie in memory that was copied have
        stand-ins from now on.
        """
        if self.copied_storages or self.pending_by_storage:
            for tensor in tensors_in((value,), {}):
                if id(tensor) not in self.recorder.memory.live:
                    self._resolve_new(tensor)
        return self.substitute(value)

    def _resolve_new(self, tensor: torch.Tensor) -> None:
        """Its value is what stands in its memory by now, where another tensor there has a stand-in."""
        key, stand_in = storage_of(tensor) or 0, self.of(tensor)
        if (pending := self.pending.get(id(stand_in))) is not None:
            if pending.record_patch is None and key in self.copied_storages and self.copied_storages[key][0].version:
                del self.pending[id(stand_in)]
                self._add_late_alias(tensor)
            return
        if key in self.pending_by_storage:
            self.recorder.read(self.pending_by_storage[key])
        if key in self.copied_storages:
            self._add_late_alias(tensor)

    def substitute(self, value: Any) -> Any:
        """A call's arguments with the stand-ins in them; the very same objects where there are none."""
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
        """The first read of a stand-in: the record of what it stands for, and of its patch."""
        pending = self.pending.pop(id(tensor), None)
        if pending is None:
            return None
        recorder, recording = self.recorder, self.recorder.recording
        handle = recorder.source(pending.kind, pending.originals[0], pending.where)
        recording.values[handle], recording.versions[handle] = pending.value, version_of(pending.value)
        if pending.record_patch is None:
            recorder.memory.know(tensor, handle)
        else:
            pending.record_patch(handle)
        for original in pending.originals:
            self.share(original, tensor)
        for key in pending.storages:
            self.pending_by_storage.pop(key, None)
            self._join_storage(key, tensor)
        return recorder.memory.read(tensor)

    def _join_storage(self, key: int, tensor: torch.Tensor) -> None:
        """What is in this memory is what this stand-in and others look at: views of the one that looks at most."""
        base = self.recorder.memory.entry(tensor).base
        known, root = self.copied_storages.setdefault(key, (base, tensor))
        if known is not base and not known.version and span(root) < span(tensor):
            self.copied_storages[key] = base, tensor
            self.recorder.memory.join(known, base)
        elif known is not base:
            self.recorder.memory.join(base, known)

    def share(self, original: torch.Tensor, tensor: torch.Tensor) -> None:
        """Both objects have one value, now and after every write."""
        entry = self.recorder.memory.entry(tensor)
        self.recorder.memory.live[id(original)] = entry
        self.replace(original, tensor)

    # -- copies of what the forward writes -----------------------------------------------------------------------------

    def copy_before_write(self, target: torch.Tensor) -> None:
        """Before a write: if this memory is the user's, every tensor over it gets a stand-in over a copy."""
        memory, key = self.recorder.memory, storage_of(target)
        if key is None or not self._is_users_storage(key):
            return
        base = memory.entry(target).base
        memory.share(base)
        self.copied_storages[key] = base, base.root
        with without_function_modes(), self.recorder.at_work():
            with torch.enable_grad():  # the way of gradients to the user's own tensor stays open
                root = writable_copy(base.root)
            self._move_aliases(base, root)
        memory.bases.pop(key, None)
        if (copied := storage_of(root)) is not None:
            memory.bases[copied] = base
            self.is_users[copied] = False

    def _add_late_alias(self, tensor: torch.Tensor) -> None:
        """A buffer, or a view of one, that the forward had not read when another over the same memory was written."""
        base, root = self.copied_storages[storage_of(tensor) or 0]
        memory = self.recorder.memory
        steps: tuple[Any, ...] = ()
        if geometry_of(tensor) != geometry_of(root):
            steps = (geometry_step(tensor, Storage(root, base.handle, base.first)),)
        with without_function_modes(), self.recorder.at_work():
            made = take_step(base.root, thaw(steps[0], self._value)) if steps else base.root
        if id(made) not in memory.live:
            memory.look(made, base, steps, base.handle)
        if steps:
            memory.entry(made).version = -1  # to be derived when it is read
        self.copy_ids.add(id(made))
        self.share(tensor, made)

    def alias_to(self, tensor: torch.Tensor, root: torch.Tensor) -> None:
        """From now on the object looks at the memory of another."""
        if tensor is root:
            return
        base = self.recorder.memory.entry(root).base
        self.copied_storages[storage_of(tensor) or 0] = base, root
        self._add_late_alias(tensor)

    def _move_aliases(self, base: Storage, root: torch.Tensor) -> None:
        memory = self.recorder.memory
        entries = {id(known): known for known in memory.live.values() if isinstance(known, Alias)}
        for entry in [entry for entry in entries.values() if entry.base is base]:
            made = root
            for step in entry.steps:
                one = thaw(step, self._value)
                with torch.set_grad_enabled(one.grad):
                    made = take_step(made, one)
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
