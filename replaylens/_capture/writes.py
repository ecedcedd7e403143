"""The functional twin of a call that writes in place, where one exists that gives the very same bits.

In: the call. Out: a pure function and its arguments, or None: then `mutate` does it. A twin is only taken where neither
dtype nor memory layout can differ: the written tensor is dense, and no operand can promote it.

Calls that write in place, and calls that make a tensor object look at other memory.

In: such a call, with what it will write. Out: one pure call in the recording (a functional twin, or `mutate`), and the
new values of all memory that it wrote. Views that are read later are derived again by the memory.

The contract of the record of a `mutate`, whose arguments and results `WriteArguments` and `Written` name:

* What it reads are the bases, the values from outside, and the values of views that it was given. A view that lies in
  the written memory stands among the arguments as an `Nth`, so that it is derived from the copy that is written: were
  it given by its value, `x[:, 1:].add_(x[:, :-1])`, which reads what it has just written, would read what was there.
* It gives a new value for each base, and for each target that is a view. The value of a base is given though often
  nobody reads it (`y = x[0]; y.add_(1); return y`): what is read later of that memory, another view of it, or the
  state of the model, is derived from there, and when the call is recorded nobody knows whether that will come.
* A target that is a whole base has one value, not two: the base's.
* A functional twin gives the new value of the one base alone, and no view stands in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns as _now
from typing import Any, NamedTuple

import torch

from .._ir.autograd import standing
from .._ir.ops import Quirk, info, stems
from .._ir.runtime import clear, fill, fill_new, fills_memory, resized
from .._ir.shared_memory import fills_its_memory, storage_of, version_of
from .._ir.target import Target
from .._ir.torch_private import OpOverload, OpOverloadPacket, kernels
from .._ir.trees import Branch, freeze
from .._ir.write import Derived, Hole, Nth, WriteArguments, Written, mutate, packed, unpacked
from ..errors import CaptureError
from .aliasing import (
    FORKED,
    OUTSIDE,
    Alias,
    CopiedBeforeWrite,
    Storage,
    geometry_step,
    may_flow,
    may_overlap,
    step_tree,
)
from .checkpoints import beneath_checkpoint
from .dispatch import Handling, Rule
from .leaf_flags import turn
from .recorder import Recorder, geometry_of, number_parts, tensors_in
from .recording import PLAIN, CallRecord, SourceRecord, ValueId
from .rng import as_drawn
from .state_changes import note_late_write

_FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_DIFFERENTIABLE = _FLOATS | {torch.complex64, torch.complex128}

FunctionalVariant = tuple[Any, tuple[Any, ...], dict[str, Any]]


def functional_variant_of(
    func: Any, args: Any, kwargs: Any, target: torch.Tensor, others: list[torch.Tensor]
) -> FunctionalVariant | None:
    """A pure call that gives what the write leaves in its target."""
    op = info(func)
    name = op.name
    if isinstance(func, (OpOverload, OpOverloadPacket)) or kwargs.get("out") is not None:
        return None
    if type(target) not in (*PLAIN, torch.nn.Parameter) or not args or args[0] is not target:
        return None
    if target.layout is not torch.strided or not target.is_contiguous() or target.is_quantized:
        return None
    if name in ("zero_", "fill_") and not others:
        value = 0 if name == "zero_" else args[1] if len(args) > 1 else kwargs["value"]
        if target.dtype in _DIFFERENTIABLE:  # the history goes on, with a gradient of zeros
            return torch.fill, (target, value), {}
        return torch.full_like, (target, value), {}
    if target.dtype not in _FLOATS:
        return None
    if op.has(Quirk.EXACT_IN_PLACE) and not others:
        return _pure_function(func, name), args, kwargs
    if op.has(Quirk.EXACT_OF_TWO) and all(_fits(other, target) for other in others) and not _is_complex(args, kwargs):
        return getattr(torch.Tensor, stems(name)[-1]), args, kwargs
    if name == "masked_fill_" and all(_fits(other, target) or other.dtype is torch.bool for other in others):
        return torch.Tensor.masked_fill, args, kwargs
    return None


def _pure_function(func: Any, name: str) -> Any:
    """`torch.relu` for `torch.relu_`, `torch.Tensor.relu` for the method."""
    pure = name.rstrip("_")
    for place in (torch.Tensor, torch, kernels):
        if getattr(place, name, None) is func and hasattr(place, pure):
            return getattr(place, pure)
    return getattr(kernels, pure, None) or getattr(torch, pure)


def _fits(other: torch.Tensor, target: torch.Tensor) -> bool:
    """Neither promotes the target's dtype nor broadens its shape."""
    return (
        other.dtype == target.dtype
        and (other.dim() == 0 or other.shape == target.shape[target.dim() - other.dim() :])
        and (other.is_contiguous() and other.dim() <= target.dim())
    )


def _is_complex(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, complex) for value in (*args, *kwargs.values()))


WRITTEN_STANDING = (
    "a write through a tensor that was given other memory by `.data =`: where its gradient goes cannot be said. Write "
    "before the assignment, or assign a copy."
)
FunctionalCall = tuple[Any, list[Any], dict[str, Any]]  # a function that writes nothing, and what it is given
_grad_enabled = torch.is_grad_enabled
_DETACH = step_tree(torch.Tensor.detach, (Hole.HERE,), None, (), True)


class Writing(NamedTuple):
    """A call that writes: what it was called with, and which memory it writes."""

    func: Any
    args: Any
    kwargs: Any
    tensors: list[torch.Tensor]  # all that it was given
    targets: list[torch.Tensor]  # those of them that it writes, each object once
    entries: list[Alias]  # where each target lies
    bases: list[Storage]  # the memory that they lie in, each once

    @staticmethod
    def of(recorder: Recorder, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Writing:
        targets = list({id(target): target for target in targets}.values())
        entries = [recorder.memory.entry(target) for target in targets]
        bases = list({id(entry.base): entry.base for entry in entries}.values())
        return Writing(func, args, kwargs, tensors_in(args, kwargs), targets, entries, bases)


def write(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Any:
    """A call that writes in place: its functional twin, or `mutate`; afterwards its bases have new values.

    The order of the steps, where each relies on those before it:

    1. All arguments are read first. That gives a tensor that came from nowhere its source, and derives views that are
       out of date; both are calls of their own, which must stand before this one.
    2. What may share memory with a target is known by then: it is given an entry in the same base, else nobody would
       know that this write changes it.
    3. The bases are shared (`share`): inputs and state in the same memory become views of it. From here on the memory
       has one value, which is what the record reads.
    4. The record is made. It may derive views that only the call reads, which then lie in the written memory, too.
    5. So the recorded values that lie in these bytes are copied after it (`preserve`, by `Copied`): just before the
       call, since a value is kept by reference for as long as nothing overwrites it.
    6. The call runs. Has it raised without writing, the values themselves are put back in the place of the copies.
    7. The memory is told that it was written, then the targets are given their new values: those of its next version.
    """
    tensors = tensors_in(args, kwargs)
    for tensor in tensors:
        recorder.read(tensor)
    writing = Writing.of(recorder, func, args, kwargs, targets)
    targets, entries, bases = writing.targets, writing.entries, writing.bases
    site = recorder.site()
    draw = recorder.draws.around(rule.may_draw, func, args, kwargs)
    for tensor in tensors:  # any argument may share memory with a target
        if recorder.base_of(tensor) is None and any(storage_of(tensor) == storage_of(b.root) for b in bases):
            recorder.memory.entry(tensor)
    for base in bases:
        recorder.memory.share(base)
    if recorder.memory.strayed is not None:
        recorder.written_unseen(recorder.memory.strayed)
    if any(map(_is_standing, [step for entry in entries for step in entry.steps])):
        recorder.recording.one_way.append(WRITTEN_STANDING)
    for base in bases:  # else this write would hide it
        if base.counter is not None and version_of(base.root) != base.counter:
            recorder.written_unseen(base.root)
    if any(recorder.memory.is_lent(base.root) for base in bases):
        raise CaptureError(
            f"`{rule.kind}` writes memory that a sparse tensor was made of.{recorder.where()}\n"
            "A program cannot say that both change. Make the sparse tensor of a copy (`values.clone()`)."
        )
    for base in {id(entry.base): entry.base for entry in entries if _is_by_data(entry)}.values():
        note_late_write(recorder, base)
    _note_forks(recorder, writing)
    record = write_record(recorder, writing, draw.draws is not None)
    geometry = [geometry_of(target) for target in targets]
    counters = [version_of(base.root) for base in bases]
    copied = [CopiedBeforeWrite.of(recorder.memory, base) for base in bases]
    try:
        start = _now()
        out = draw(func, args, kwargs)
        recorder.took = _now() - start
    except Exception as error:
        if any(
            counter == -1 or version_of(base.root) != counter for base, counter in zip(bases, counters, strict=True)
        ):
            raise CaptureError(
                f"`{rule.kind}` wrote a part and then raised {error!r}; what it left cannot be known."
            ) from error
        for one in copied:
            one.put_back(recorder.recording)
        raise
    if [geometry_of(target) for target in targets] != geometry:
        return _outgrown(recorder, rule, writing, out, site)
    append_write(recorder, rule, writing, record, out, site, draw.key)
    return out


def _note_forks(recorder: Recorder, writing: Writing) -> None:
    """What is written through a detached alias has a history there, and another one, or none, elsewhere in memory."""
    recording = recorder.recording
    tensors, bases = writing.tensors, writing.bases
    there = [recorder.memory.entry(tensor) for tensor in tensors if recorder.base_of(tensor) in bases]
    detached = [entry for entry in there if entry.is_detached]
    if any(entry.base.is_forked for entry in detached):  # it is derived from the memory again, to be written
        recording.one_way.append(FORKED)
    written = [entry for entry in detached if any(entry.tensor is target for target in writing.targets)]
    if written and (_grad_enabled() or not recording.ambient[0]):
        others = [t for t in tensors if not any(t is entry.tensor for entry in detached)]
        if any(may_flow(recording, recorder.read(tensor)) for tensor in others):
            for entry in written:
                entry.base.is_forked = True


def _is_standing(step: Any) -> bool:
    return unpacked(step).function.function is standing


def _in_memory(steps: tuple[Any, ...]) -> tuple[Any, ...]:
    """The steps that lead to memory: what `.data =` gave a tensor is written there, whatever its history."""
    return tuple([_DETACH if _is_standing(step) else step for step in steps])


def _is_by_data(entry: Alias) -> bool:
    """Is it an alias of a tensor by `.data`, whose writes torch does not count?"""
    return any(getattr(unpacked(step).function.function, "__self__", None) is torch.Tensor.data for step in entry.steps)


def write_record(recorder: Recorder, writing: Writing, may_draw: bool) -> WriteArguments | FunctionalCall:
    """What the pure call for a write reads, before it happens: what `mutate` is given, or a functional twin's call."""
    func, args, kwargs, tensors, targets, entries, bases = writing
    shared = [t for t in tensors if recorder.base_of(t) in bases and not any(t is x for x in targets)]
    if len(targets) == 1 and not entries[0].steps and not shared and not may_draw:
        target = targets[0]
        lost = _may_have_history(recorder, target) and not _grad_enabled()
        others = [tensor for tensor in tensors if tensor is not target]
        if not lost and (twin := functional_variant_of(func, args, kwargs, target, others)) is not None:
            function, arguments, named = twin
            return function, *recorder.read_all(arguments, named)
    numbers = {id(base): number for number, base in enumerate(bases)}
    sources = [t for t in shared if recorder.memory.entry(t).steps and not _reads_apart(func, args, t, targets)]
    viewed = [*targets, *{id(source): source for source in sources}.values()]
    entries = [*entries, *[recorder.memory.entry(source) for source in viewed[len(targets) :]]]
    recorder.recording.overwritten.update(_parting(recorder, [entry for entry in entries if entry.steps]))

    def leaf(tensor: torch.Tensor) -> Any:
        for number, one in enumerate(viewed):
            if tensor is one:
                return packed(Nth(number))
        base = recorder.base_of(tensor)
        if base is not None and id(base) in numbers and not recorder.memory.entry(tensor).steps:
            return packed(Derived(numbers[id(base)], ()))
        return recorder.read(tensor)

    tree = Branch(dict, tuple([freeze(value, leaf) for value in kwargs.values()]), tuple(kwargs))
    written = tuple([packed(Derived(numbers[id(e.base)], _in_memory(e.steps))) for e in entries])
    return WriteArguments(
        function=Target.of(func),
        bases=tuple([base.handle for base in bases]),
        args=tuple([freeze(value, leaf) for value in args]),
        kwargs=tree,
        targets=written,
        values=tuple([entry.handle if entry.steps and not _repeats(entry.tensor) else None for entry in entries]),
    )


def _may_have_history(recorder: Recorder, target: torch.Tensor) -> bool:
    """Can a replay have gradients flow through what is written? A write that autograd does not see keeps them."""
    may = recorder.recording.ambient[0] and (target.is_floating_point() or target.is_complex())
    return target.requires_grad or may


def _parting(recorder: Recorder, views: list[Alias]) -> set[ValueId]:
    """The values that cannot be patched before a call that writes these views: they would be one memory no more.

    So it is with what several of them are views of, and with a view that repeats elements, of which is no copy.
    """
    several = views if len(views) > 1 else []
    above = Counter(handle for view in several for handle in _lineage(recorder, view.handle))
    repeating = {view.handle for view in views if _repeats(view.tensor)}
    return repeating | {handle for handle, count in above.items() if count > 1}


def _lineage(recorder: Recorder, view: ValueId) -> set[ValueId]:
    """A view, and the views that it is one of."""
    found, stack = set(), [view]
    while stack:
        if (handle := stack.pop()) not in found:
            found.add(handle)
            stack.extend(recorder.recording.view_of.get(handle, ()))
    return found


def _reads_apart(func: Any, args: Any, source: torch.Tensor, targets: Any) -> bool:
    """Is it all the same whether a source that lies in the written memory is read from there or from a copy?

    So it is where the call writes nothing of what it reads, or copies each element to where it is.
    """
    copies = func is torch.Tensor.copy_
    if func is torch.Tensor.__setitem__ and isinstance(args[0][args[1]], torch.Tensor):
        part = args[0][args[1]]
        if copies := storage_of(part) == storage_of(args[0]):
            targets = [part]
    return not any(may_overlap(source, t) and not (copies and geometry_of(source) == geometry_of(t)) for t in targets)


def _repeats(tensor: torch.Tensor) -> bool:
    """Does one element stand in several places, as in an expanded tensor? No copy of it can be written as it is."""
    return tensor.layout is torch.strided and any(
        n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def append_write(
    recorder: Recorder,
    rule: Rule,
    writing: Writing,
    record: WriteArguments | FunctionalCall,
    out: Any,
    site: Any,
    key: str | None,
) -> None:
    """Write down a call that wrote, and what holds from then on. `key`: of the generator's state before it drew."""
    for base in writing.bases:
        recorder.memory.wrote(base, recorder.recording.keep(base.root), not recorder.in_aten)
    whole = tuple([base.handle for base in writing.bases])
    if beneath_checkpoint():
        again = {id(base.root): None for base in writing.bases}
        recorder.recording.written_again.update(again | dict.fromkeys(whole))
    views = _renewed(recorder, writing.targets, writing.entries)
    if not isinstance(record, WriteArguments):
        function, reads, named = record
        recorder.append(function, rule, reads, named, whole[0], site, key, False, writing.func)
        return
    fresh: dict[int, ValueId] = {}
    besides = number_parts(out, partial(_fresh_result, recorder, writing.tensors, fresh), ())

    def seen(tensor: torch.Tensor) -> Any:
        return fresh.get(id(tensor)) or recorder.read(tensor)

    result = freeze(out, seen) if tensors_in((out,), {}) else (views[0] if len(views) == 1 else views)
    reads, returns = list(_with_generator(record, key)), tuple(Written(besides, views, whole))
    kind, scope, inside, took = rule.kind, recorder.scope, recorder.differentiating, recorder.took
    context = recorder.context()
    made = CallRecord(mutate, kind, reads, {}, returns, context, scope, site, key, False, result, (), inside, took)
    recorder.took = 0
    recorder.recording.records.append(made)


def _renewed(recorder: Recorder, targets: Any, entries: Any) -> tuple[ValueId, ...]:
    """The values that hold after a write: of what it was told to write, which may be views."""
    views = []
    for target, entry in zip(targets, entries, strict=True):
        before = entry.handle
        entry.handle = recorder.recording.keep(target) if entry.steps else entry.base.handle
        entry.version = entry.base.version
        views.append(entry.handle)
        if entry.steps:
            recorder.recording.view_of[entry.handle] = (before,)
            entry.base.held.append(entry.handle)
    return tuple(views)


def _fresh_result(
    recorder: Recorder, tensors: Any, fresh: dict[int, ValueId], tensor: torch.Tensor, part: Any
) -> ValueId | None:
    """What a call that wrote gave besides; None for what it was given."""
    memory = recorder.memory
    if memory.live.get(id(tensor)) is not None and any(tensor is other for other in tensors):
        return None
    base = memory.base_at(storage_of(tensor), tensors)
    handle = fresh[id(tensor)] = recorder.recording.keep(tensor)
    if base is None:
        memory.know(tensor, handle)
    else:
        memory.look(tensor, base, (geometry_step(tensor, base),), handle)
    return handle


def _with_generator(record: WriteArguments, key: str | None) -> WriteArguments:
    """The arguments with a generator of the recorded state in the place of the user's."""
    words = record.kwargs
    if key is None or "generator" not in (words.keys or ()):
        return record
    items = [as_drawn(v, key) if k == "generator" else v for k, v in zip(words.keys, words.items, strict=True)]
    return record._replace(kwargs=Branch(dict, tuple(items), words.keys))


def _outgrown(recorder: Recorder, rule: Rule, writing: Writing, out: Any, site: Any) -> Any:
    """`out=` of another size: torch gave it new memory, so it is an output like any other."""
    given = writing.kwargs.get("out")
    outs = list(given) if isinstance(given, (tuple, list)) else [given]
    if given is None or any(len(_entries_on(recorder, recorder.memory.entry(t).base)) > 1 for t in writing.targets):
        raise CaptureError(f"`{rule.kind}` changed the size of memory that other tensors look at.{recorder.where()}")
    if rule.is_undefined:
        raise CaptureError(
            f"`{rule.kind}(out=...)` gives its target new memory, whose content is undefined.{recorder.where()}\n"
            f"Leave `out=` away: what `{rule.kind}` gives alone is the same in every replay."
        )
    named = {key: value for key, value in writing.kwargs.items() if key != "out"}
    reads, read_named = recorder.read_all(writing.args, named)
    for target in outs:
        _forget(recorder, target)
    returns = recorder.outputs(out)
    dtypes = tuple([target.dtype for target in outs])
    recorder.append(fill_new, rule, [Target.of(writing.func), dtypes, *reads], read_named, returns, site, None, False)
    return out


def _entries_on(recorder: Recorder, base: Storage) -> list[Alias]:
    return [entry for entry in recorder.memory.live.values() if isinstance(entry, Alias) and entry.base is base]


def _forget(recorder: Recorder, tensor: torch.Tensor) -> None:
    known = recorder.memory.live.pop(id(tensor), None)
    if isinstance(known, Alias):
        recorder.memory.bases = {key: base for key, base in recorder.memory.bases.items() if base is not known.base}
    recorder.memory.keep_alive.append(tensor)
    recorder.memory.moved.add(id(tensor))


def reshape(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """`t_()`, `unsqueeze_()`: the object looks at the same memory in another way from now on."""
    tensor = args[0]
    if func.__name__ == "detach_" and tensor.is_leaf and tensor.requires_grad:
        return turn(recorder, func, args, kwargs)
    recorder.require_single(tensor, rule)
    recorder.read(tensor)
    entry = recorder.memory.entry(tensor)
    pure = getattr(torch.Tensor, func.__name__[:-1]) if not isinstance(func, OpOverload) else None
    if pure is None:
        pure = getattr(torch.ops.aten, func._schema.name.split("::")[1][:-1])
    with torch.enable_grad():
        step = recorder.memory.step(pure, args, kwargs, tensor, ())
    site, source = recorder.site(), entry.handle
    base, steps = entry.base, entry.steps
    recorder.memory.part_from(tensor)
    out = func(*args, **kwargs)
    if func.__name__ == "as_strided_":
        steps, step = (), geometry_step(tensor, base)
    handle = recorder.recording.keep(tensor)
    if entry.steps:
        recorder.recording.view_of[handle] = (source,)
    recorder.memory.look(tensor, base, (*steps, step), handle)
    base.counter = version_of(base.root)
    fill: Callable[[Any], Any] = lambda leaf: source if leaf is Hole.HERE else leaf  # noqa: E731
    reads = [fill(value) for value in unpacked(step).args]
    recorder.append(unpacked(step).function.function, rule, reads, {}, handle, site, None, False, func)
    if tensor.requires_grad:
        _keep_history(recorder)
    return out


def _keep_history(recorder: Recorder) -> None:
    """The object of the last call keeps its history, also where gradients are off."""
    record = recorder.recording.records[-1]
    if isinstance(record, CallRecord):
        recorder.recording.records[-1] = record._replace(context=(True, *record.context[1:]))


def assign(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """`t.data = u`, `t.set_(u)`: the object looks at other memory from now on."""
    tensor, value = args[0], args[1] if len(args) > 1 else kwargs.get("source")
    recorder.require_single(tensor, rule)
    old = recorder.read(tensor)
    left = recorder.memory.entry(tensor).base
    is_raw = not isinstance(value, torch.Tensor) or len(args) > 2
    if is_raw and (tensor.requires_grad or may_flow(recorder.recording, old)):
        raise _raw(recorder, rule)
    source = old if is_raw else recorder.read(value)
    note_late_write(recorder, left, replaced=tensor)
    is_announced = left.counter == version_of(left.root)
    recorder.memory.part_from(tensor)
    result = func(*args, **kwargs)
    if is_announced:  # its aliases are counted with it, though nothing was written; beneath autograd only later
        left.counter = None if recorder.in_aten else version_of(left.root)
    if is_raw:
        recorder.memory.live.pop(id(tensor))
        found = recorder.memory.base_anywhere(tensor)
        if found is None:
            raise _raw(recorder, rule)
        if _is_from_outside(recorder, found):
            handle = recorder.source("constant", tensor, OUTSIDE)
            late = recorder.in_aten and not tensor.is_inference()  # beneath autograd it is counted only later
            recorder.recording.versions[handle] += late
        else:
            recorder.alias_without_call(tensor, found)
        return result
    base, steps = recorder.memory.entry(value).base, recorder.memory.entry(value).steps
    straight = tensor.requires_grad or may_flow(recorder.recording, old)  # the gradient goes where it went before
    step = step_tree(standing, (old, Hole.HERE), None, (), True) if straight else _DETACH
    handle = recorder.recording.keep(tensor)
    if steps:
        recorder.recording.view_of[handle] = (source,)
    recorder.memory.look(tensor, base, (*steps, step), handle)
    function, reads = (standing, [old, source]) if straight else (torch.Tensor.detach, [source])
    recorder.append(function, Rule(Handling.LEAF, "data"), reads, {}, handle, recorder.site(), None, False)
    if straight:
        _keep_history(recorder)
    return result


def _is_from_outside(recorder: Recorder, base: Storage) -> bool:
    """Is it memory that something outside of torch has filled, and that no tensor of the forward looks at, as that of
    which `torch.load` makes tensors?
    """
    if base.version or base.root.numel():
        return False
    sources = [r for r in recorder.recording.records if isinstance(r, SourceRecord) and r.returns == base.first]
    return any(record.kind == "constant" for record in sources)


def _raw(recorder: Recorder, rule: Rule) -> CaptureError:
    return CaptureError(f"`{rule.kind}` gives a tensor raw memory, which a program cannot say.{recorder.where()}")


def resize(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    recorder.read(tensor)
    before, room = geometry_of(tensor), tensor.untyped_storage().nbytes()
    if kwargs.get("memory_format") is not None:  # then it lies anew also where its shape stays, if it lay otherwise
        recorder.ask("layout", torch.Tensor.stride, (tensor,), {}, tensor.stride())
    recorder.memory.part_from(tensor)
    recorder.memory.preserve(recorder.memory.entry(tensor).base)
    result = func(*args, **kwargs)
    if geometry_of(tensor) == before:
        return result
    if len(_entries_on(recorder, recorder.memory.entry(tensor).base)) > 1:
        raise CaptureError(f"`{rule.kind}` changed the size of memory that other tensors look at.{recorder.where()}")
    source = recorder.memory.entry(tensor).handle
    _forget(recorder, tensor)
    is_filled = fills_memory()
    if tensor.numel() > recorder.recording.values[source].numel() and tensor.untyped_storage().nbytes() == room:
        raise CaptureError(
            f"`{rule.kind}` makes a tensor look again at memory that it had let go.{recorder.where()}\n"
            "Which numbers are there cannot be said. Keep the larger tensor, and look at a part of it."
        )
    was = recorder.recording.values[source]
    if not fills_its_memory(was) and tensor.numel():
        raise CaptureError(
            f"`{rule.kind}` makes a tensor look at memory between its own numbers.{recorder.where()}\n"
            "Which numbers are there cannot be said. Resize a contiguous copy."
        )
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    (fill if is_filled else clear)(flat[was.numel() :])
    handle = recorder.recording.keep(tensor)
    recorder.memory.know(tensor, handle)
    reads: list[Any] = [source, tuple(tensor.shape), is_filled, tensor.stride()]
    reads = reads[: 4 if not tensor.is_contiguous() else 3 if is_filled else 2]
    recorder.append(resized, rule, reads, {}, handle, recorder.site(), None, False)
    return result
