"""A capture with `save=`: drops values during the forward as soon as the model itself has dropped them.

In: a SaveSpec. Out: a tracer whose recording frees values while the model runs, so that peak memory is that of the
plain forward plus what is saved. Which layers a spec means is certain only when all have names; SaveGuess guesses, and
what it guessed wrong is recomputed at the end (see _replay/record.py).

A tensor may go when Python's reference count shows no reference but those of the capture. Torch counts its own
references (autograd, a view on its base) among them. A freed id may be given to another tensor, so everything keyed by
the id of a tensor goes with it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import define, field

from .._edit.select import SaveSpec
from .._ir.memory import storage_of, version_of
from .._ir.torch_private import storage_holders
from .._ir.trees import without_originals
from .aliasing import Alias, AliasTracker, Storage
from .dispatch import Rule
from .output_aliases import template_references
from .provenance import Provenance, StartMark
from .recorder import AliasOrigin, RetraceAtDispatch
from .recording import (
    CallRecord,
    Freed,
    Recording,
    SourceRecord,
    ValueId,
    value_ids_in,
    value_ids_with_paths,
)
from .scopes import addresses
from .tracer import Tracer

PATIENCE = 1 << 22  # bytes of new values before it is asked which have died
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
YOUNG_CHECKS = 4  # checks of a new tensor, one at each of the next times


def memory_saving_tracer(spec: SaveSpec) -> Callable[[Recording, Provenance, StartMark, bool, str], Tracer]:
    """Returns a factory of tracers that keep what a spec may mean."""
    return partial(MemorySavingTracer, spec)


def stop_observing(recording: Recording) -> None:
    """After the forward: a plain list of values again, so that nothing holds the tracer."""
    if isinstance(recording.values, _RecordedValues):
        recording.values.dropper.drop_at_end()
    recording.values = list(recording.values)


class MemorySavingTracer(Tracer):
    """The tracer of one capture with `save=`."""

    def __init__(
        self, spec: SaveSpec, recording: Recording, origins: Provenance, date: StartMark, deep: bool, unknown: str
    ) -> None:
        super().__init__(recording, origins, date, deep, unknown)
        guess = SaveGuess(spec, recording, addresses(origins.table) if spec.keys else {})
        self.dropper = ValueDropper(recording, self.memory, guess, self.in_trees, self.aliased, self.aliases)
        recording.values = _RecordedValues(self.dropper)

    def _fresh(self, rule: Rule, func: Any, args: Any, depth: int = 2, kwargs: Any = None) -> Any:
        dropper = self.dropper
        if dropper.new_bytes >= PATIENCE or dropper.counted < len(self.recording.values):
            dropper.drop_when_due()
        out = super()._fresh(rule, func, args, depth + 1, kwargs)
        if type(out) is _Tensor:
            dropper.new_bytes += _bytes_of(out)
            dropper.counted = len(self.recording.values)
        return out

    def _view(self, rule: Rule, func: Any, args: Any, depth: int = 2) -> Any:
        dropper = self.dropper
        if dropper.new_bytes >= PATIENCE or dropper.counted < len(self.recording.values):
            dropper.drop_when_due()
        return super()._view(rule, func, args, depth + 1)

    def read_all(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Every other operation begins here."""
        self.dropper.drop_when_due()
        return super().read_all(args, kwargs)


class SaveGuess:
    """Guesses which values a spec means while the model runs, by the names that layers get if there are no orphans."""

    def __init__(self, spec: SaveSpec, recording: Recording, modules: dict[int, str]) -> None:
        self.spec, self.recording, self.modules = spec, recording, modules
        self.of_kind: Counter[str] = Counter()
        self.total = -1
        self.parameters: set[ValueId] = set()
        self.names: dict[Any, tuple[tuple[str, ...], int]] = {}  # by function and parameters

    def wants(self, record: CallRecord | SourceRecord) -> bool:
        """True if the results of this record are to be kept. Those of no call always are."""
        if isinstance(record, SourceRecord):
            if record.kind == "parameter":
                self.parameters.add(record.returns)
            else:
                self._next_names(record.kind)
            return True
        return self.spec.may_mean(*self._layer_names(record)) if self.spec.keys else False

    def _layer_names(self, record: CallRecord) -> tuple[tuple[str, ...], int]:
        reads = value_ids_in(tuple(record.args))
        own = tuple(sorted(self.parameters.intersection(reads)))
        if not own:
            return self._next_names(record.kind)
        key = (id(record.function), record.kind, own)
        if key not in self.names:
            self.names[key] = self._next_names(record.kind)
        return self.names[key]

    def _next_names(self, kind: str) -> tuple[tuple[str, ...], int]:
        self.of_kind[kind] += 1
        self.total += 1
        number = f"{kind}_{self.of_kind[kind]}"
        return (kind, number, f"{number}_{self.total}"), self.total

    def wants_output(self, number: int) -> bool:
        """True if the output of a module call may be wanted by its address."""
        if not self.spec.keys:
            return False
        address = self.modules.get(id(self.recording.scopes[number].module), "")
        return bool(address) and self.spec.may_mean((address,))


@define(eq=False)
class ValueDropper:
    """Drops unwanted values whose tensors only the capture still references.

    Nothing is looked at before new values fill `PATIENCE` bytes: a model of small tensors pays nothing. Most tensors
    die within a few calls, so a new one is checked `YOUNG_CHECKS` times; then it is old. One pass over all old tensors
    costs `len(old)` checks; it runs once `skipped_checks`, which grows by `YOUNG_CHECKS` at a time, has reached that
    number. So checks cost little, however many tensors a model keeps alive.
    """

    recording: Recording
    memory: AliasTracker
    guess: SaveGuess
    in_trees: Counter[int]
    aliased: set[int]
    aliases: dict[int, AliasOrigin]
    watched: dict[int, list[ValueId]] = field(factory=dict)  # by id of a tensor of which no value is wanted
    young: dict[int, int] = field(factory=dict)  # id -> checks so far
    old: dict[int, None] = field(factory=dict)
    skipped_checks: int = 0
    new_bytes: int = 0  # of values[:counted] since the last look
    counted: int = 0
    records_seen: int = 0
    outputs_seen: int = 0

    def drop_when_due(self) -> None:
        """Drops what has died, if new values fill enough memory by now."""
        values = self.recording.values
        for number in range(self.counted, len(values)):
            self.new_bytes += _bytes_of(_raw_value(values, number))
        self.counted = len(values)
        if self.new_bytes >= PATIENCE:
            self.new_bytes = 0
            self._look_at_new()
            self._drop_unreferenced()

    def drop_at_end(self) -> None:
        """Drops what has died, if it fills enough memory."""
        values = self.recording.values
        held = [*[handles[0] for handles in self.watched.values()], *range(self.counted, len(values))]
        if self.new_bytes + sum([_bytes_of(_raw_value(values, number)) for number in held]) >= PATIENCE:
            self._look_at_new()
            for number in reversed([*self.old, *self.young]):
                self._drop_if_unreferenced(number)

    def _look_at_new(self) -> None:
        """Notes which of the values that have come since the last look are wanted."""
        records, outputs = self.recording.records, self.recording.scope_outputs
        for record in records[self.records_seen :]:
            note = self._keep if self.guess.wants(record) else self._watch
            for _, handle in value_ids_with_paths(record.returns):
                note(handle)
        self.records_seen = len(records)
        for number in range(self.outputs_seen, len(outputs)):
            scope, tree, *facts = outputs[number]
            if type(tree) is not ValueId:  # else it holds no container of the model's
                outputs[number] = (scope, kept := without_originals(tree), *facts)
                self.in_trees.subtract(template_references(tree))
                self.in_trees.update(template_references(kept))
            if self.guess.wants_output(scope):
                for handle in value_ids_in(tree):
                    self._keep(handle)
        self.outputs_seen = len(outputs)

    def _watch(self, handle: ValueId) -> None:
        self.recording.unwanted.add(handle)
        tensor: Any = _raw_value(self.recording.values, handle)
        if type(tensor) is Freed:
            return
        if id(tensor) not in self.watched:
            self.watched[id(tensor)] = []
            self.young[id(tensor)] = 0
        if handle not in self.watched[id(tensor)]:  # a write gives one value at several places
            self.watched[id(tensor)].append(handle)

    def _keep(self, handle: ValueId) -> None:
        self.recording.unwanted.discard(handle)
        self._unwatch(id(_raw_value(self.recording.values, handle)))

    def rollback(self, first: int) -> None:
        """The values from this number on were taken back."""
        gone, spare, records = self.recording.freed, self.recording.unwanted, self.recording.records
        for handle in [handle for handle in gone if handle >= first]:
            del gone[handle]
        spare.difference_update([handle for handle in spare if handle >= first])
        for number, handles in list(self.watched.items()):
            handles[:] = [handle for handle in handles if handle < first]
            if not handles:
                self._unwatch(number)
        self.counted, self.records_seen = min(self.counted, first), min(self.records_seen, len(records))
        while self.records_seen and max(value_ids_in(records[self.records_seen - 1].returns), default=-1) >= first:
            self.records_seen -= 1

    def _drop_unreferenced(self) -> None:
        """Drops what only the capture references: checks every young tensor, and the old ones now and then."""
        for number, checks in list(self.young.items()):
            if self._drop_if_unreferenced(number):
                continue
            if checks + 1 < YOUNG_CHECKS:
                self.young[number] = checks + 1
            else:
                del self.young[number]
                self.old[number] = None
        self.skipped_checks += YOUNG_CHECKS
        if self.skipped_checks >= len(self.old):
            self.skipped_checks = 0
            for number in reversed(list(self.old)):  # views before their bases
                self._drop_if_unreferenced(number)

    def _unwatch(self, number: int) -> None:
        self.watched.pop(number, None)
        self.young.pop(number, None)
        self.old.pop(number, None)

    def _drop_if_unreferenced(self, number: int) -> bool:
        """Drops a tensor unless something besides the capture references it; True if it is no longer watched."""
        values, known = self.recording.values, self.memory.live.get(number)
        tensor: Any = known.tensor if isinstance(known, Alias) else None if known is None else _raw_value(values, known)
        if id(tensor) != number:  # its values were copied before a write, and the tensor itself is gone
            self._unwatch(number)
            return True
        is_root = isinstance(known, Alias) and known.tensor is known.base.root
        recorded = [handle for handle in self.watched[number] if _raw_value(values, handle) is tensor]
        key = storage_of(tensor) if self.memory.by_storage else None
        is_listed = key is not None and self.memory.by_storage.get(key) is tensor
        own = (
            _ALONE  # the local name, and the argument of getrefcount
            + len(recorded)  # recording.values, once for each handle
            + isinstance(known, Alias)  # Alias.tensor
            + is_root  # Storage.root
            + is_listed  # memory.by_storage
        )
        if sys.getrefcount(tensor) != own:
            return False
        if (is_root or type(known) is ValueId) and _has_other_aliases(tensor):
            return False
        if isinstance(known, Alias) and is_root and not self._forget_base(known):
            return False
        self._require_no_unseen_write(tensor, known)
        for handle in recorded:
            self.recording.free(handle)
        if key is not None and is_listed:
            del self.memory.by_storage[key]
        self.memory.live.pop(number, None)
        self.aliased.discard(number)
        self.aliases.pop(number, None)
        self._unwatch(number)
        return True

    def _forget_base(self, root: Alias) -> bool:
        """Forgets a storage; False if an alias, numpy or its like still uses it."""
        if root.base.exposed is not None or root.base.twin is not None:
            return False
        key = storage_of(root.base.root) or 0
        is_listed = self.memory.bases.get(key) is root.base
        if sys.getrefcount(root.base) != _BASE_ALONE + is_listed:  # Alias.base, getrefcount; memory.bases
            return False
        if is_listed:
            del self.memory.bases[key]
        return True

    def _require_no_unseen_write(self, tensor: torch.Tensor, known: ValueId | Alias | None) -> None:
        """Retraces if the tensor was written unseen: once it is dropped, nothing can tell any more."""
        if isinstance(known, Alias):
            counted = known.base.counter if tensor is known.base.root else None
        else:
            counted = self.recording.versions[known] if known is not None else None
        if counted is not None and version_of(tensor) != counted:
            raise RetraceAtDispatch


class _RecordedValues(list[Any]):
    """The recorded values. Reading a dropped one retraces the model with all values kept."""

    def __init__(self, dropper: ValueDropper) -> None:
        self.dropper = dropper

    def __getitem__(self, index: Any) -> Any:
        value = list.__getitem__(self, index)
        if type(value) is Freed:
            raise RetraceAtDispatch
        return value

    def __delitem__(self, index: Any) -> None:
        list.__delitem__(self, index)
        self.dropper.rollback(index.start)


_raw_value = list.__getitem__  # of the recorded values, also of one that was dropped


def _bytes_of(value: Any) -> int:
    """The size of a recorded value; parameters stay whatever happens, and of sparse tensors it is not known."""
    if type(value) is _Parameter or type(value) is Freed:
        return 0
    return value.nbytes if value.layout is torch.strided else PATIENCE


def _has_other_aliases(tensor: torch.Tensor) -> bool:
    """True if another tensor uses this storage, recorded or not; a hidden base made by a kernel does not count."""
    try:
        others = _storage_use_count(tensor) - _STORAGE_ALONE
    except (RuntimeError, NotImplementedError):  # sparse and nested tensors
        return False
    return others != 0 and (others != 1 or _base_use_count(tensor) != _HIDDEN)


def _base_use_count(view: torch.Tensor) -> int:
    return 0 if view._base is None else view._base._use_count()  # type: ignore[attr-defined]


def _storage_use_count(tensor: torch.Tensor) -> int:
    return int(storage_holders(tensor.untyped_storage()._cdata))


def _alone() -> tuple[int, int, int, int]:
    """The counts of a tensor, a Storage, its memory and a hidden base to which nothing else refers."""
    tensor, root, view = torch.empty(0), torch.empty(0), torch.empty(2).view(2, 1)
    entry = Alias(root, Storage(root, ValueId(0), ValueId(0)), (), ValueId(0), 0)
    return sys.getrefcount(tensor), sys.getrefcount(entry.base), _storage_use_count(root), _base_use_count(view)


_ALONE, _BASE_ALONE, _STORAGE_ALONE, _HIDDEN = _alone()
