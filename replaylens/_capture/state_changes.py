"""What a forward changes in the state of the model.

In: a tracer whose forward is over, and the Snapshot of where it began. Out, in its recording: the places whose tensors
have another value, or where another tensor or none stands; copies of what stood there before and after, so that the
next forward of the model leaves the program unchanged; what each tensor of the model looked like, to notice later
changes; and the attributes that hold other Python objects now and that the code of the model reads. An attribute that
is only counted up or appended to decides nothing. Whether the next forward differs because of the others, only the
model can tell: see `Program.module`.

Also here: writes that torch does not notice, `weight.data.mul_(0.5)` after its use. If an earlier call saved that
memory, torch's own backward reads what stands there by then, while a program has the gradient of what was computed; so
gradients are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from itertools import takewhile
from typing import Any

import torch
from attrs import frozen
from torch import nn

from .._ir.autograd import history_of, saved_below
from .._ir.equality import python_attributes, same_content
from .._ir.memory import storage_of, version_of, versions_of, writable_copy
from .._ir.model_state import NO_RAW_STATE, PLAIN, PlaceNote, attribute_at, fused_steps, raw_states
from .._ir.node import TensorSpec
from .._ir.torch_private import without_function_modes
from .._ir.trees import ATOMS, freeze_deep, leaves, thaw
from .._ir.write import apply_view_step
from .._replay.layout_guards import geometry
from .aliasing import MADE_OUTSIDE_TORCH, Alias, Storage
from .provenance import ModuleTensors, Provenance, path_to
from .recorder import Recorder
from .recording import CallRecord, Freed, Recording, SourceRecord, ValueId, reads_of, value_ids_in
from .snapshot import Snapshot
from .user_code import forward_code, is_assigned_first, is_write_only

_MISSING = object()


def changed_attributes(recorder: Recorder, snapshot: Snapshot) -> list[tuple[Any, str]]:
    """(module, key) of the attributes that hold other Python objects or content now, and that the code reads."""
    unlike = [where for where in recorder.recording.state.unlike if where[0] is not None]
    found = {(id(module), key): (module, key) for module, key in (*_changed_attributes(snapshot), *unlike)}
    if not found:
        return []
    codes = forward_code(recorder.recording.model, recorder.origins.modules)
    return [
        (m, key) for m, key in found.values() if _is_of_user_class(vars(m).get(key)) or not is_write_only(key, codes)
    ]


def _is_of_user_class(value: Any) -> bool:
    """True for an object of a user's class, whose `update` or `append` may return anything."""
    return type(value).__module__ not in ("builtins", "collections", "numpy", "torch")


def _changed_attributes(snapshot: Snapshot) -> Iterator[tuple[Any, str]]:
    for module, first in snapshot.attributes:
        now = vars(module)
        if all(map(operator.is_, map(now.get, first), first.values())) and _has_keys(now, first, snapshot.skipped):
            continue
        for key in dict.fromkeys([*first, *now]):
            if key not in snapshot.skipped and not _is_same(first.get(key, _MISSING), now.get(key, _MISSING)):
                yield module, key
    for array in snapshot.changed_arrays():
        for module, first in snapshot.attributes:
            yield from ((module, key) for key, value in first.items() if path_to(array, value) is not None)
    for module, _, count in snapshot.plain_modules:
        if len(vars(module)) != count:
            yield from ((module, key) for key in list(vars(module))[count:] if type(vars(module)[key]) not in PLAIN)
    for container, content in snapshot.containers[: snapshot.module_containers]:
        if not _has_same_items(container, content):
            holder = snapshot.owners.get(id(container), container)
            for module, first in snapshot.attributes:
                yield from ((module, key) for key, value in first.items() if path_to(holder, value) is not None)


def _has_keys(now: dict[str, Any], first: dict[str, Any], skipped: frozenset[str]) -> bool:
    """True if a module has the same attributes as before, besides those skipped."""
    return first.keys() <= now.keys() and now.keys() - first.keys() <= skipped


def _is_same(old: Any, new: Any) -> bool:
    """True if code that reads it sees the same. Tensors in place of tensors, or of nothing, are compared elsewhere."""
    if old is new:
        return True
    if type(new) in PLAIN or type(old) in PLAIN:
        return all(value is None or value is _MISSING or isinstance(value, torch.Tensor) for value in (old, new))
    return type(old) is type(new) and type(new) in ATOMS and bool(old == new)


def _has_same_items(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in container and _is_item(value, container[key]) for key, value in content.items())
    return container == content if isinstance(container, set) else all(map(_is_item, content, container))


def _is_item(old: Any, new: Any) -> bool:
    """True if items of a container are the same. A tensor that replaces one of its spec is known by its place."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old is new or TensorSpec.of(old) == TensorSpec.of(new)
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return False
    return _is_same(old, new)


LATE_WRITE = (
    "memory that the model writes by .data or numpy after its use: torch's own backward silently reads what is there "
    "by then. Write it before, or compute with a copy."
)
IsMatch = Callable[[torch.Tensor], bool]


def check_late_write(
    recorder: Recorder, base: Storage, replaced: torch.Tensor | None = None, held: Collection[ValueId] = ()
) -> None:
    """Refuses gradients if a backward reads the memory that is written now. `replaced`: the object that gets other
    memory.
    """
    if recorder.only_follows:
        return
    recording = recorder.recording
    held = set(held) or {*base.held, base.handle}
    memory = recorder.known_storages_of(base)

    def matches(tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in memory if replaced is None else tensor is replaced

    query = _SavedQuery(recorder, held, matches, replaced is not None)
    if query.is_made_by_what_saved_it(base.root) or any(map(query.is_saved_by, query.records)):
        recording.autograd.forward_only.append(LATE_WRITE)


def check_outside_writes(recorder: Recorder) -> None:
    """The same, at the end of the forward, for writes by numpy and its like. Values that nothing has read since are
    recorded as they were before.
    """
    memory = recorder.memory
    for base in list(memory.bases.values()):
        if base.exposed is not None and not same_content(base.root, base.exposed):
            memory.require_announced(base)
            check_late_write(recorder, base)
            memory.restore_exposed(base)
    for base, held in memory.external_writes:
        check_late_write(recorder, base, held=held)


@frozen(eq=False)
class _SavedQuery:
    """The search for calls that saved certain values for their backward; `by_identity`: a certain tensor object."""

    recorder: Recorder
    held: set[ValueId]
    matches: IsMatch
    by_identity: bool

    @property
    def records(self) -> Iterator[CallRecord]:
        """The calls that read or made it. A tensor object only counts as read: calls save an alias of their result."""
        for record in self.recorder.recording.records:
            if isinstance(record, CallRecord):
                made = () if self.by_identity else _results(record)
                if not self.held.isdisjoint(reads_of(record)) or not self.held.isdisjoint(made):
                    yield record

    def is_made_by_what_saved_it(self, tensor: torch.Tensor) -> bool:
        """True if the history of this tensor begins with a step that saved it."""
        has_history = not self.by_identity and _has_history(tensor)
        return has_history and saved_below(tensor.grad_fn, self.matches, set())

    def is_saved_by(self, record: CallRecord) -> bool:
        """True if the call saved it for its backward."""
        recording = self.recorder.recording
        given = [recording.values[h] for h in _results(record)]
        reads = [recording.values[h] for h in reads_of(record)]
        if not recording.outer_modes[0] or any(map(_may_require_grad_in_replays, reads)):
            return self.would_be_saved_by(record)
        if any(isinstance(value, Freed) for value in given):
            return any(h in recording.autograd.histories for h in _results(record))
        stops = {value.grad_fn for value in reads if _has_history(value)}
        return any(saved_below(value.grad_fn, self.matches, stops) for value in given if _has_history(value))

    def would_be_saved_by(self, record: CallRecord) -> bool:
        """True if the call saves it where all that it reads requires gradients: the call is made once more to see."""
        if record.draws is not None:
            return True
        copies: dict[ValueId, torch.Tensor] = {}
        query: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if type(value) is not ValueId:
                return value
            if value not in copies:
                tensor = self.recorder.recording.values[value]
                copy = copies[value] = tensor.detach().clone()
                if self.matches(tensor) if self.by_identity else value in self.held:
                    query.append(copy)
                if copy.is_floating_point() or copy.is_complex():
                    copy.requires_grad_()
            return copies[value]

        try:
            with without_function_modes(), self.recorder.beneath_leaf(), torch.enable_grad():
                args = [thaw(value, leaf) for value in record.args]
                out = record.function(*args, **{key: thaw(value, leaf) for key, value in (record.kwargs or {}).items()})
        except Exception:
            return True
        found: list[torch.Tensor] = []
        freeze_deep(out, found.append)
        if not self.by_identity:
            given = _results(record)
            is_plain = len(given) == len(found)
            made = [tensor for tensor, handle in zip(found, given, strict=False) if handle in self.held]
            query.extend(made if is_plain else found)

        def is_asked(tensor: torch.Tensor) -> bool:
            return any(tensor is one if self.by_identity else storage_of(tensor) == storage_of(one) for one in query)

        return any(saved_below(value.grad_fn, is_asked, set()) for value in found)


def _results(record: CallRecord) -> list[ValueId]:
    return value_ids_in(record.returns)


def _may_require_grad_in_replays(value: Any) -> bool:
    """True for a value without gradient, for which torch saves less, but to which a replay may give one."""
    return (
        not isinstance(value, Freed) and not value.requires_grad and (value.is_floating_point() or value.is_complex())
    )


def _has_history(value: Any) -> bool:
    return not isinstance(value, Freed) and value.requires_grad and history_of(value) is not None


Where = tuple[Any, str]  # module, and name or path of a tensor there
FirstValues = dict[int, ValueId]  # by id of a tensor of the model: its value when first read


def held_tensor(module: Any, key: str) -> torch.Tensor | None:
    """The parameter or buffer that a module has under this name now."""
    for tensors in (module._parameters, module._buffers):
        if key in tensors:
            return tensors[key]
    return None


Counters = tuple[list[torch.Tensor], list[int]]


def version_counters(origins: Provenance, snapshot: Snapshot) -> Counters:
    """The tensors that the model holds as a forward begins, and their version counters."""
    tensors = tensors_at_start(origins, snapshot)
    return tensors, versions_of(tensors)


def tensors_at_start(origins: Provenance, snapshot: Snapshot) -> list[torch.Tensor]:
    """The parameters, buffers and other tensors that the modules had when the forward began."""
    buffers = [tensor for _, _, held in origins.begun for tensor in held.values()]
    others = [value for _, attributes in snapshot.attributes for value in attributes.values() if type(value) in PLAIN]
    return [tensor for tensor in (*origins.parameters_at_start, *buffers, *others) if tensor is not None]


def require_writes_recorded(recorder: Recorder, counters: Counters) -> None:
    """Refuses a forward in which something unseen wrote or moved a tensor of the model before it was read."""
    tensors, then = counters
    if (now := versions_of(tensors)) == then:
        return
    for tensor, before, after in zip(tensors, then, now, strict=True):
        if after != before and not _is_recorded_write(recorder, tensor, before):
            recorder.deep |= isinstance(tensor, nn.Parameter)  # its content is lost: no retrace can start there
            recorder.refuse_unseen_write(tensor)


def _is_recorded_write(recorder: Recorder, tensor: torch.Tensor, counter: int) -> bool:
    memory, recording = recorder.memory, recorder.recording
    known = memory.live.get(id(tensor))
    by_script = recorder.has_scripts and isinstance(known, Alias) and known.base.version > 0
    if recorder.substitute_for(tensor) is not tensor and not by_script:
        return False  # recorded writes go to its substitute, except those of TorchScript
    if (first := memory.counters_at_start.get(id(tensor))) is not None:
        silent = isinstance(tensor, nn.Parameter) and type(known) is ValueId and recording.values[known] is tensor
        return first == counter and not silent  # other tensors are read at the end
    if known is not None or id(tensor) in memory.detached:
        return True
    base = memory.bases.get(storage_of(tensor) or 0)
    return base is not None and base.version > 0


def record_changes(recorder: Recorder, snapshot: Snapshot) -> None:
    """Records which parameters, buffers and other tensors of the model have changed since the start."""
    recording, memory = recorder.recording, recorder.memory
    same, same_buffers = recorder.origins.same_parameters(), recorder.origins.same_buffers()
    unwritten = same and not memory.written and not memory.has_detached
    sources = recorder.stateful if unwritten else [r for r in recording.records if isinstance(r, SourceRecord)]
    first_values: FirstValues = {id(s.tensor): s.returns for s in sources if s.kind not in ("input", "constant")}
    live = memory.live
    for source in list(sources):
        if source.kind == "parameter":
            now = held_tensor(*source.where)
            if now is not source.tensor or live.get(id(now)) != source.returns:
                _compare(recorder, source.where, source.tensor, now, first_values)
    if not unwritten:
        _compare_replaced_parameters(recorder, sources, first_values)
    for module, _, buffers in () if unwritten and same_buffers else recorder.origins.begun:
        tensors = module._buffers
        for key, first in buffers.items():
            now = held_tensor(module, key) if key in tensors else None
            known = first_values.get(id(now)) if now is first else None
            if (now is not first or not unwritten) and (known is None or live.get(id(now)) != known):
                _compare(recorder, (module, key), first, now, first_values)
    begun = recorder.origins.begun_by_module
    for module, key, now in () if same_buffers else recorder.origins.buffers():
        if key not in begun.get(id(module), ()):
            _compare(recorder, (module, key), None, now, first_values)
    if rearranged := list(recorder.origins.rearranged()):
        _compare_moved_modules(recorder)
    if recorder.leaves_changes:
        made = (*(() if same and same_buffers else recorder.origins.born()), *_new_attributes(snapshot))
        codes = forward_code(recording.model, recorder.origins.modules) if made else []
        recording.state.born.extend(
            where for where in made if not is_assigned_first(where[1], codes)
        )  # it may be tested
        recording.state.rearranged.extend(rearranged)
    _compare_attributes(recorder, snapshot, [s for s in sources if s.kind == "attribute"], first_values)


def _new_attributes(snapshot: Snapshot) -> Iterator[Where]:
    """Attributes of modules that are tensors now and were absent or None."""
    for module, first in snapshot.attributes:
        now = vars(module)
        if not PLAIN.isdisjoint(map(type, now.values())):
            yield from ((module, key) for key in now if first.get(key) is None and type(now[key]) in PLAIN)


def _compare_replaced_parameters(recorder: Recorder, sources: list[SourceRecord], first_values: FirstValues) -> None:
    """Compares parameters that the forward did not read but replaced, and new ones."""
    seen = {_key(source.where) for source in sources if source.kind == "parameter"}
    for module, key, first in recorder.origins.parameters_elsewhere():
        if (id(module), key) not in seen:
            _compare(recorder, (module, key), first, held_tensor(module, key), first_values)
    for module, key, now in recorder.origins.new_parameters():
        _compare(recorder, (module, key), None, now, first_values)


def _compare_moved_modules(recorder: Recorder) -> None:
    """Compares tensors of modules that moved or were replaced, by address."""
    recording, origins = recorder.recording, recorder.origins
    sources = [record for record in recording.records if isinstance(record, SourceRecord)]
    first_values = {id(s.tensor): s.returns for s in sources if s.kind not in ("input", "constant")}
    first, now = origins.tree_at_start(), origins.tree_now()
    moved = {id(module) for a in {*first, *now} for module in _replaced_modules(first.get(a), now.get(a))}
    recording.state.changes = [note for note in recording.state.changes if id(note[0][0]) not in moved]
    recording.state.removed = [where for where in recording.state.removed if id(where[0]) not in moved]
    recording.state.replaced = [where for where in recording.state.replaced if id(where[0]) not in moved]
    for address in dict.fromkeys([*first, *now]):
        (before, held_then), (after, held_now) = first.get(address, (None, {})), now.get(address, (None, {}))
        for key in dict.fromkeys([*held_then, *held_now]) if {id(before), id(after)} & moved else ():
            where, tensor = f"{address}.{key}".lstrip("."), held_now.get(key)
            _compare(recorder, (None, where), held_then.get(key), tensor, first_values)
            if tensor is not None:
                recording.state.moved[where] = tensor


def _replaced_modules(first: ModuleTensors | None, now: ModuleTensors | None) -> Iterator[nn.Module]:
    """The modules at an address, then and now, if they differ."""
    if first is None or now is None or first[0] is not now[0]:
        yield from (place[0] for place in (first, now) if place is not None)


def _compare_attributes(
    recorder: Recorder, snapshot: Snapshot, sources: list[SourceRecord], first_values: FirstValues
) -> None:
    """Compares other tensors that hang on modules: those that were read, and those that were replaced."""
    seen = set()
    for source in sources:
        module, path = source.where
        seen.add((id(module), path))
        now = attribute_at(vars(module), path) if isinstance(module, nn.Module) else source.tensor
        _compare(recorder, source.where, source.tensor, now, first_values)
    for module, attributes in snapshot.attributes:
        for key, first in attributes.items():
            is_replaced = type(first) in PLAIN and (now := vars(module).get(key)) is not first
            if is_replaced and (id(module), key) not in seen and id(module) in recorder.origins.known_modules:
                _compare(recorder, (module, key), first, now if isinstance(now, torch.Tensor) else None, first_values)


def _compare(
    recorder: Recorder, where: Where, first: torch.Tensor | None, now: torch.Tensor | None, first_values: FirstValues
) -> None:
    """Records what became of the tensor at a place."""
    if now is None:
        if first is not None:
            recorder.recording.state.removed.append(where)
        return
    last = _final_value(recorder, now, is_same=now is first)
    if last is None:
        return
    same = recorder.memory.equal_values(last)
    if first is not None and first_values.get(id(first)) in same:
        return
    last = same[-1]
    recorder.recording.state.changes.append((where, last))
    if now is not first:
        recorder.recording.state.replaced.append(where)
        if first is not None and _differs_beyond_content(recorder, first, now, id(first) in first_values):
            recorder.recording.state.unlike.append(where)


def _differs_beyond_content(recorder: Recorder, first: torch.Tensor, now: torch.Tensor, is_read: bool) -> bool:
    """True if Python code may notice the replacement by something that no State node holds: class and attributes of a
    tensor that the forward read; everything but content of one that it did not.
    """
    if type(first) is not type(now) or python_attributes(first) != python_attributes(now):
        return True
    if is_read:
        return False
    return storage_of(first) in recorder.memory.bases or _metadata(first) != _metadata(now)


def _metadata(tensor: torch.Tensor) -> Any:
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_inference()
    return TensorSpec.of(tensor), geometry(tensor) if tensor.layout is torch.strided else None, flags


def _final_value(recorder: Recorder, now: torch.Tensor, is_same: bool) -> ValueId | None:
    """The value of a tensor at the end; None for one that stands where it stood, unwritten."""
    memory = recorder.memory
    if (known := memory.read(recorder.substitute_for(now))) is not None:
        return known
    if not is_same:
        return recorder.read(now)
    base = memory.bases.get(storage_of(now) or 0) if memory.written else None
    return recorder.read(now) if base is not None and base.version else None


def copy_changed_state(recorder: Recorder) -> None:
    """Copies what stood before and stands now where the forward wrote: the model will write there again."""
    recording, memory = recorder.recording, recorder.memory
    if not recording.state.changes and not recording.state.removed:
        return
    read = {_key(record.where): record for record in recorder.stateful}
    for where in (*[where for where, _ in recording.state.changes], *recording.state.removed):
        record = read.get(_key(where))
        if record is None:
            continue
        known = memory.live.get(id(record.tensor))
        if id(record.tensor) in memory.detached:  # its alias belongs to its present memory
            _keep_copy(recorder, record.returns)
        elif isinstance(known, Alias) and known.base.version:
            memory.copy_on_write(known.base)
        elif recording.values[record.returns] is record.tensor:
            if isinstance(known, Alias) and not known.steps:
                memory.copy_on_write(known.base)
            else:
                _keep_copy(recorder, record.returns)
    begun = {id(record.tensor) for record in recording.records if isinstance(record, SourceRecord)}
    begun |= {id(tensor) for tensor in recorder.origins.parameters_at_start}
    for where, handle in recording.state.changes:
        now = recording.state.moved[where[1]] if where[0] is None else tensor_at(where)
        known = memory.live.get(id(now))
        if isinstance(known, Alias) and known.base.version:
            memory.copy_on_write(known.base)
        elif where[0] is None and id(now) in begun:
            continue  # it was part of the model before
        elif where[0] is None or _key(where) in read or held_tensor(*where) is not None:  # else: a stashed activation
            if isinstance(known, Alias) and id(known.base.root) not in begun:
                memory.copy_on_write(known.base)  # its sources share that memory
            else:
                _keep_copy(recorder, handle)


def copy_exposed_memory(recorder: Recorder) -> None:
    """Copies what shares memory with numpy arrays and their like: their owner may write there unnoticed."""
    recording, memory = recorder.recording, recorder.memory
    for record in recording.records if memory.bases else ():  # an exposed tensor has a base
        if type(record) is SourceRecord and record.where == MADE_OUTSIDE_TORCH:
            known = memory.live.get(id(record.tensor))
            if isinstance(known, Alias):
                memory.copy_on_write(known.base)


def copy_aliased_output(recorder: Recorder, output: Any) -> Any:
    """The output of the model, with copies of what lies in memory that its next forward writes."""
    recording = recorder.recording
    if not recorder.leaves_changes or not (recording.state.changes or recording.state.removed):
        return output
    written = {
        storage_of(now)
        for where, handle in recording.state.changes
        if (now := tensor_at(where)) is not None and _is_copied(recording, handle, now)
    }
    tree, copies = freeze_deep(output, _Returned), dict[int, torch.Tensor]()
    for one, handle in zip(leaves(tree), leaves(recording.output), strict=True):
        if type(one) is _Returned and (storage_of(one.tensor) in written or _is_copied(recording, handle, one.tensor)):
            copies[id(one.tensor)] = _returned_copy(one.tensor)
    if not copies:
        return output
    return thaw(tree, lambda leaf: copies.get(id(leaf.tensor), leaf.tensor) if type(leaf) is _Returned else leaf)


@frozen(eq=False)
class _Returned:
    tensor: torch.Tensor


def _is_copied(recording: Recording, handle: ValueId, tensor: torch.Tensor) -> bool:
    """True if the recording holds a copy of this value instead of the tensor."""
    if handle in recording.freed or (key := storage_of(tensor)) is None:
        return False
    return storage_of(recording.values[handle]) != key


def _returned_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad_fn is not None:
        return tensor.clone()
    with torch.no_grad():
        copy = writable_copy(tensor.detach())
    return copy.requires_grad_() if tensor.requires_grad else copy


def _key(where: Where) -> tuple[int, str]:
    return id(where[0]), where[1]


def tensor_at(where: Where) -> torch.Tensor | None:
    """The tensor that stands at a place now."""
    module, key = where
    if not isinstance(module, nn.Module):
        return None
    return now if (now := held_tensor(module, key)) is not None else attribute_at(vars(module), key)


def _keep_copy(recorder: Recorder, handle: ValueId) -> None:
    """Stores a copy of a value instead of the tensor that the model holds."""
    recording = recorder.recording
    if handle in recording.freed:
        return
    value = recording.values[handle]
    if (history := history_of(value)) is not None:
        recording.autograd.histories[handle] = history
    with torch.no_grad():
        copy = writable_copy(value.detach())
    flag = value.requires_grad and copy.is_floating_point() and not copy.is_inference()
    recording.values[handle] = copy.requires_grad_() if flag else copy
    recording.versions[handle] = version_of(recording.values[handle])


def record_state_in_inputs(recorder: Recorder) -> None:
    """Records which tensors of the model that the forward wrote lie in the memory of an input."""
    recording, memory = recorder.recording, recorder.memory
    recording_value = lambda leaf: recording.values[leaf] if type(leaf) is ValueId else leaf  # noqa: E731
    given = {}
    for record in recording.records if recording.aliasing.shares_inputs or recording.state.changes else ():
        if isinstance(record, SourceRecord) and record.kind == "input":
            given[storage_of(record.tensor)] = record
    for where, _ in recording.state.changes if given else ():
        now = tensor_at(where)
        known = memory.live.get(id(now))
        if now is None or not isinstance(known, Alias) or (source := given.get(storage_of(now))) is None:
            continue
        with torch.no_grad():
            first = writable_copy(recording.values[known.base.first].detach())
            for step in known.steps:
                first = apply_view_step(first, thaw(step, recording_value))
        recording.state.in_inputs.append((where, source.returns, first))


def detach_inputs(recording: Recording) -> None:
    """Stores inputs as tensors of our own: `x.data = other` gives the user's tensor other memory."""
    values = recording.values
    is_input = lambda record: type(record) is SourceRecord and record.kind == "input"  # noqa: E731
    for record in takewhile(is_input, recording.records):  # inputs come first
        value = values[record.returns]
        if type(value) is torch.Tensor and not value.requires_grad and not value.is_inference():
            recording.input_facts.copies[record.returns] = value.detach()


def _is_at_module(record: SourceRecord) -> bool:
    return record.kind not in ("input", "constant") and isinstance(record.where[0], nn.Module)


def record_places(recorder: Recorder) -> None:
    """Records where the model holds what the forward read or wrote, and what stands there."""
    recording = recorder.recording
    recording.state.fused_steps = fused_steps()
    sources = [record for record in recording.records if type(record) is SourceRecord]
    found = [record for record in sources if record[0] == "parameter" or _is_at_module(record)]
    looks = raw_states([record.tensor for record in found])
    others: list[PlaceNote] = []
    begun = recorder.origins.begun_by_module if recording.state.changes or recording.state.removed else {}
    for where in (*[where for where, _ in recording.state.changes], *recording.state.removed):
        module, key = where
        if isinstance(module, nn.Module):
            own = key in module._buffers or key in module._parameters or key in begun.get(id(module), ())
            others.append((where, "buffer" if own else "attribute", None, NO_RAW_STATE))
    recording.state.places = lambda: (
        *[(record.where, record.kind, record.tensor, look) for record, look in zip(found, looks(), strict=True)],
        *others,
    )
