"""Calls that write in place, or give a tensor other memory, as one pure call each.

In: such a call, with the tensors that it will write. Out: one call in the recording, and the new values of all memory
that it wrote. That call is the functional variant of the write (`torch.relu` for `torch.relu_`) where one gives the
very same bits, and else `mutate`, which runs the write on copies. Views that are read later are regenerated
(aliasing.py).

A functional variant is used only where dtype and memory layout cannot differ: the target is dense, and no operand
promotes it. A function that is missing among those with variants is never wrong, only slower to replay.

The contract of the record of a `mutate`, whose arguments and results `WriteArguments` and `Written` name:

* It reads the bases, the values from outside, and the values of the views it was given. A view in the written memory
  stands among the arguments as an `Nth`, so that it is taken from the copy that is written: `x[:, 1:].add_(x[:, :-1])`
  reads what it has just written, and the recorded value of `x[:, :-1]` is the one before.
* It gives a new value for each base, and one for each target that is a view. A base's value is given although often
  nobody reads it (`y = x[0]; y.add_(1); return y`): other views and the state of the model are regenerated from it, and
  when the call is recorded nobody knows whether one will be read.
* A target that is a whole base has one value, not two: the base's.
* A functional variant gives the new value of the one base, and reads no view of it.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from time import perf_counter_ns as _now
from typing import Any, NamedTuple

import torch

from .._ir.autograd import with_history_of
from .._ir.memory import is_dense, storage_of, version_of
from .._ir.ops import Quirk, op_info, stems
from .._ir.runtime import fill_new, fill_uninitialized, fills_uninitialized, resized, zero_uninitialized
from .._ir.target import Target
from .._ir.torch_private import OpOverload, OpOverloadPacket, kernels
from .._ir.trees import ATOMS, Branch, freeze
from .._ir.write import (
    DerivedView,
    Hole,
    TargetIndex,
    WriteArguments,
    WriteResults,
    mutate,
    packed_place,
    unpacked_place,
)
from ..errors import CaptureError, ReplaylensError
from .aliasing import (
    FORKED_HISTORY,
    MADE_OUTSIDE_TORCH,
    Alias,
    CopiedBeforeWrite,
    Storage,
    filled_hole,
    geometry_step,
    is_all_of_its_storage,
    may_have_gradient,
    may_overlap,
    packed_step,
)
from .autograd_effects import called_by_checkpoint, set_requires_grad
from .dispatch import Handling, Rule
from .recorder import Recorder, geometry_of, result_tree, tensors_in
from .recording import PLAIN, CallRecord, SourceRecord, ValueId
from .rng import recorded_generator
from .state_changes import check_late_write

_FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_DIFFERENTIABLE = _FLOATS | {torch.complex64, torch.complex128}

FunctionalVariant = tuple[Any, tuple[Any, ...], dict[str, Any]]


def functional_variant_of(
    func: Any, args: Any, kwargs: Any, target: torch.Tensor, others: list[torch.Tensor]
) -> FunctionalVariant | None:
    """A pure call that gives the same bits as the write leaves in its target; None if there is none."""
    op = op_info(func)
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
    pure, takes_tensors = _pure_variant(func)
    fits = not others or (takes_tensors and all(_fits_target(other, target) for other in others))
    if pure is not None and fits and not (takes_tensors and _is_complex(args, kwargs)):
        return pure, args, kwargs
    if name == "masked_fill_" and all(_fits_target(other, target) or other.dtype is torch.bool for other in others):
        return torch.Tensor.masked_fill, args, kwargs
    return None


def _pure_function(func: Any, name: str) -> Any:
    """`torch.relu` for `torch.relu_`, `torch.Tensor.relu` for the method."""
    pure = name.rstrip("_")
    for place in (torch.Tensor, torch, kernels):
        if getattr(place, name, None) is func and hasattr(place, pure):
            return getattr(place, pure)
    return getattr(kernels, pure, None) or getattr(torch, pure)


def _fits_target(other: torch.Tensor, target: torch.Tensor) -> bool:
    """True if this operand neither promotes the target's dtype nor broadens its shape."""
    return (
        other.dtype == target.dtype
        and (other.dim() == 0 or other.shape == target.shape[target.dim() - other.dim() :])
        and (other.is_contiguous() and other.dim() <= target.dim())
    )


def _is_complex(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, complex) for value in (*args, *kwargs.values()))


WRITTEN_THROUGH_DATA = (
    "a write through a tensor that was given other memory by `.data =`: where its gradient goes cannot be said. Write "
    "before the assignment, or assign a copy."
)
FunctionalCall = tuple[Any, list[Any], dict[str, Any]]  # a pure function, its arguments, its keywords
_grad_enabled = torch.is_grad_enabled
NOT_WHOLE = object()
_DETACH = packed_step(torch.Tensor.detach, (Hole.HERE,), None, (), True)


class WriteCall(NamedTuple):
    """A call that writes: its arguments, and the memory that it writes."""

    func: Any
    args: Any
    kwargs: Any
    tensors: list[torch.Tensor]  # all tensors among its arguments
    targets: list[torch.Tensor]  # those of them that it writes, each object once
    aliases: list[Alias]  # the Alias of each target
    bases: list[Storage]  # their storages, each once

    @staticmethod
    def of(recorder: Recorder, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> WriteCall:
        targets = list({id(target): target for target in targets}.values())
        aliases = [recorder.memory.alias_of(target) for target in targets]
        bases = list({id(alias.base): alias.base for alias in aliases}.values())
        return WriteCall(func, args, kwargs, tensors_in(args, kwargs), targets, aliases, bases)


def write_whole(recorder: Recorder, rule: Rule, func: Any, args: Any) -> Any:
    """`write` for the commonest write: of a tensor that is all of its storage, of which nothing has made a view, by a
    function with a functional variant. NOT_WHOLE, with nothing changed, where it is another one.
    """
    target, recording, memory = args[0], recorder.recording, recorder.memory
    base = _whole_storage(recorder, target)
    if base is None or (reads := _reads_of_variant(recorder, func, args, target)) is None:
        return NOT_WHOLE
    site, held, version = recorder.site(), base.handle, base.counter
    recording.note_history(held)
    with torch.no_grad():
        copied = target.clone()
    values, versions = recording.values, recording.versions
    before = versions[held]
    values[held] = copied.requires_grad_() if target.requires_grad else copied
    versions[held] = version_of(copied)
    base.held = []
    try:
        start = _now()
        out = func(*args)
        recorder.took = _now() - start
    except Exception as error:
        if version_of(target) != version:
            raise _half_written(rule, error) from error
        values[held], versions[held], base.held = target, before, [held]
        raise
    memory.note_write(base, recording.keep(target))
    if called_by_checkpoint():
        recording.checkpoints.written.update({id(base.root): None, base.handle: None})
    alias = memory.live[id(target)]
    assert isinstance(alias, Alias)
    alias.handle, alias.version = base.handle, base.version
    recorder.append(_pure_variant(func)[0], rule, reads, {}, base.handle, site, None, False, func)
    return out


def _whole_storage(recorder: Recorder, target: Any) -> Storage | None:
    """The Storage of a tensor that is all of it, and that nothing else is known to share."""
    memory = recorder.memory
    known = memory.live.get(id(target))
    if known is None or type(target) is not torch.Tensor or memory.in_sparse or recorder.recording.unwanted:
        return None
    alias = memory.alias_of(target)
    base = alias.base
    if alias.steps or alias.version != base.version or base.root is not target:
        return None
    if (version := version_of(target)) < 0 or version != base.counter:
        return None
    if base.version == 0:
        memory.join_aliases(base)
    is_alone = base.held == [base.handle] and base.exposed is None and base.twin is None and not base.is_forked
    if not is_alone or memory.unseen_alias is not None or not is_all_of_its_storage(target):
        return None
    is_lost = not _grad_enabled() and _may_need_gradient(recorder, target)
    is_own = recorder.recording.values[base.handle] is target
    return base if is_own and not is_lost and target.dtype in _FLOATS else None


def _reads_of_variant(recorder: Recorder, func: Any, args: Any, target: torch.Tensor) -> list[Any] | None:
    """What the functional variant of a write reads; None if there is none, or another argument shares the memory."""
    pure, takes_tensors = _pure_variant(func)
    if pure is None:
        return None
    reads: list[Any] = [recorder.read(target)]
    for value in args[1:]:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not takes_tensors or not _fits_target(value, target) or storage_of(value) == storage_of(target):
                return None
            reads.append(recorder.read(value))
        elif kind in ATOMS and kind is not complex:
            reads.append(value)
        else:
            return None
    return reads


@cache
def _pure_variant(func: Any) -> tuple[Any, bool]:
    """The function that gives what this one leaves in its target, and whether it takes further tensors; or None."""
    op = op_info(func)
    if isinstance(func, (OpOverload, OpOverloadPacket)) or not (
        op.has(Quirk.EXACT_IN_PLACE) or op.has(Quirk.EXACT_OF_TWO)
    ):
        return None, False
    if op.has(Quirk.EXACT_IN_PLACE):
        return _pure_function(func, op.name), False
    return getattr(torch.Tensor, stems(op.name)[-1]), True


def _half_written(rule: Rule, error: Exception) -> CaptureError:
    return CaptureError(
        f"`{rule.kind}` wrote a part of its target and then raised {error!r}; what it left there is unknown."
    )


def write(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Any:
    """Record a call that writes in place, run it, and give its bases and targets their new values.

    Each step relies on those before it:

    1. All arguments are read. That records the source of a tensor nobody has read, and regenerates stale views: calls
       of their own, which must stand before this one.
    2. Every argument in a target's storage gets an Alias of the same base; otherwise this write would not change its
       value.
    3. The bases' aliases are joined (`join_aliases`): inputs and state in the same memory become views of one base.
       From here on the memory has one value, which the record reads.
    4. The record is made. It may regenerate views that only the call reads; these lie in the written memory, too.
    5. So the recorded values in these bytes are copied only now (`copy_on_write`), just before the call.
    6. The call runs. If it raises without having written, the copies are replaced by the tensors themselves again.
    7. The storages get their next version, then the targets their values in that version.
    """
    tensors = tensors_in(args, kwargs)
    for tensor in tensors:
        recorder.read(tensor)
    writing = WriteCall.of(recorder, func, args, kwargs, targets)
    targets, aliases, bases = writing.targets, writing.aliases, writing.bases
    site = recorder.site()
    draw = recorder.draws.around(rule.may_draw, func, args, kwargs)
    for tensor in tensors:  # any argument may share memory with a target
        if recorder.base_of(tensor) is None and any(storage_of(tensor) == storage_of(b.root) for b in bases):
            recorder.memory.alias_of(tensor)
    for base in bases:
        recorder.memory.join_aliases(base)
    if recorder.memory.unseen_alias is not None:
        recorder.refuse_unseen_write(recorder.memory.unseen_alias)
    if any(map(_keeps_old_history, [step for alias in aliases for step in alias.steps])):
        recorder.recording.autograd.forward_only.append(WRITTEN_THROUGH_DATA)
    for base in bases:  # an unseen write, which this one would hide
        if base.counter is not None and version_of(base.root) != base.counter:
            recorder.refuse_unseen_write(base.root)
    if any(recorder.memory.is_in_sparse(base.root) for base in bases):
        raise recorder.refusal_here(
            f"`{rule.kind}` writes memory that a sparse tensor was made of.",
            "A program cannot express that both change. Make the sparse tensor from a copy (`values.clone()`).",
        )
    for base in {id(b): b for b in bases if b.has_uncounted_alias}.values():
        check_late_write(recorder, base)
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
            raise _half_written(rule, error) from error
        for one in copied:
            one.put_back(recorder.recording)
        raise
    if [geometry_of(target) for target in targets] != geometry:
        return _reallocated(recorder, rule, writing, out, site)
    append_write(recorder, rule, writing, record, out, site, draw.key)
    return out


def _note_forks(recorder: Recorder, writing: WriteCall) -> None:
    """A write through a detached alias gives memory two gradient histories: the alias's, and that of its base. Mark
    such storages, and refuse gradients where one is used.
    """
    recording = recorder.recording
    tensors, bases = writing.tensors, writing.bases
    there = [recorder.memory.alias_of(tensor) for tensor in tensors if recorder.base_of(tensor) in bases]
    detached = [alias for alias in there if alias.is_detached]
    if any(alias.base.is_forked for alias in detached):  # it is regenerated from the base, to be written
        recording.autograd.forward_only.append(FORKED_HISTORY)
    written = [alias for alias in detached if any(alias.tensor is target for target in writing.targets)]
    if written and (_grad_enabled() or not recording.outer_modes[0]):
        others = [t for t in tensors if not any(t is alias.tensor for alias in detached)]
        if any(may_have_gradient(recording, recorder.read(tensor)) for tensor in others):
            for alias in written:
                alias.base.is_forked = True


def _keeps_old_history(step: Any) -> bool:
    return unpacked_place(step).function.function is with_history_of


def _without_history(steps: tuple[Any, ...]) -> tuple[Any, ...]:
    """The steps that lead to the memory of a tensor that `.data =` moved, without the history that it kept."""
    return tuple([_DETACH if _keeps_old_history(step) else step for step in steps])


def write_record(recorder: Recorder, writing: WriteCall, may_draw: bool) -> WriteArguments | FunctionalCall:
    """What the pure call reads, before the write: the arguments of `mutate`, or a call of the functional variant."""
    func, args, kwargs, tensors, targets, aliases, bases = writing
    shared = [t for t in tensors if recorder.base_of(t) in bases and not any(t is x for x in targets)]
    if len(targets) == 1 and not aliases[0].steps and not shared and not may_draw:
        target = targets[0]
        lost = _may_need_gradient(recorder, target) and not _grad_enabled()
        others = [tensor for tensor in tensors if tensor is not target]
        if not lost and (variant := functional_variant_of(func, args, kwargs, target, others)) is not None:
            function, arguments, named = variant
            return function, *recorder.read_all(arguments, named)
    numbers = {id(base): number for number, base in enumerate(bases)}
    sources = [t for t in shared if recorder.memory.alias_of(t).steps and not _may_read_copy(func, args, t, targets)]
    viewed = [*targets, *{id(source): source for source in sources}.values()]
    aliases = [*aliases, *[recorder.memory.alias_of(source) for source in viewed[len(targets) :]]]
    recorder.recording.aliasing.overwritten.update(_unpatchable(recorder, [alias for alias in aliases if alias.steps]))

    def leaf(tensor: torch.Tensor) -> Any:
        for number, one in enumerate(viewed):
            if tensor is one:
                return packed_place(TargetIndex(number))
        base = recorder.base_of(tensor)
        if base is not None and id(base) in numbers and not recorder.memory.alias_of(tensor).steps:
            return packed_place(DerivedView(numbers[id(base)], ()))
        return recorder.read(tensor)

    tree = Branch(dict, tuple([freeze(value, leaf) for value in kwargs.values()]), tuple(kwargs))
    written = tuple([packed_place(DerivedView(numbers[id(e.base)], _without_history(e.steps))) for e in aliases])
    return WriteArguments(
        function=Target.of(func),
        bases=tuple([base.handle for base in bases]),
        args=tuple([freeze(value, leaf) for value in args]),
        kwargs=tree,
        targets=written,
        values=tuple(
            [alias.handle if alias.steps and not _repeats_elements(alias.tensor) else None for alias in aliases]
        ),
    )


def _may_need_gradient(recorder: Recorder, target: torch.Tensor) -> bool:
    """True if gradients flow through the target in a replay. A write that autograd does not see keeps its history."""
    may = recorder.recording.outer_modes[0] and (target.is_floating_point() or target.is_complex())
    return target.requires_grad or may


def _unpatchable(recorder: Recorder, views: list[Alias]) -> set[ValueId]:
    """Values that cannot be patched before a call that writes these views, since the patch would break their aliasing.

    They are whatever several of the views are views of, and views that repeat elements, which cannot be copied as they
    are.
    """
    several = views if len(views) > 1 else []
    above = Counter(handle for view in several for handle in _views_above(recorder, view.handle))
    repeating = {view.handle for view in views if _repeats_elements(view.tensor)}
    return repeating | {handle for handle, count in above.items() if count > 1}


def _views_above(recorder: Recorder, view: ValueId) -> set[ValueId]:
    """A view, and all views that it was made of."""
    found, stack = set(), [view]
    while stack:
        if (handle := stack.pop()) not in found:
            found.add(handle)
            stack.extend(recorder.recording.aliasing.view_of.get(handle, ()))
    return found


def _may_read_copy(func: Any, args: Any, source: torch.Tensor, targets: Any) -> bool:
    """True if an argument in the written memory can be read from a copy as well.

    It can where the call overwrites nothing of it, or copies each element onto itself.
    """
    copies = func is torch.Tensor.copy_
    if func is torch.Tensor.__setitem__ and isinstance(args[0][args[1]], torch.Tensor):
        part = args[0][args[1]]
        if copies := storage_of(part) == storage_of(args[0]):
            targets = [part]
    return not any(may_overlap(source, t) and not (copies and geometry_of(source) == geometry_of(t)) for t in targets)


def _repeats_elements(tensor: torch.Tensor) -> bool:
    """True if one element stands at several indices, as in an expanded tensor: torch refuses to write such a view."""
    return tensor.layout is torch.strided and any(
        n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def append_write(
    recorder: Recorder,
    rule: Rule,
    writing: WriteCall,
    record: WriteArguments | FunctionalCall,
    out: Any,
    site: Any,
    key: str | None,
) -> None:
    """Record a call that has written, and the values that hold from then on. `key`: of the generator's state
    before it.
    """
    for base in writing.bases:
        recorder.memory.note_write(base, recorder.recording.keep(base.root), not recorder.in_aten)
    whole = tuple([base.handle for base in writing.bases])
    if called_by_checkpoint():
        again = {id(base.root): None for base in writing.bases}
        recorder.recording.checkpoints.written.update(again | dict.fromkeys(whole))
    views = _new_values(recorder, writing.targets, writing.aliases)
    if not isinstance(record, WriteArguments):
        function, reads, named = record
        recorder.append(function, rule, reads, named, whole[0], site, key, False, writing.func)
        return
    fresh: dict[int, ValueId] = {}
    besides = result_tree(out, partial(_fresh_result, recorder, writing.tensors, fresh), ())

    def seen(tensor: torch.Tensor) -> Any:
        return fresh.get(id(tensor)) or recorder.read(tensor)

    result = freeze(out, seen) if tensors_in((out,), {}) else (views[0] if len(views) == 1 else views)
    reads, returns = list(_with_generator(record, key)), tuple(WriteResults(besides, views, whole))
    kind, scope, inside, took = rule.kind, recorder.scope, recorder.differentiating, recorder.took
    context = recorder.context()
    made = CallRecord(mutate, kind, reads, {}, returns, context, scope, site, key, False, result, (), inside, took)
    recorder.took = 0
    recorder.recording.records.append(made)


def _new_values(recorder: Recorder, targets: Any, aliases: Any) -> tuple[ValueId, ...]:
    """The value of each target after the write."""
    views = []
    for target, alias in zip(targets, aliases, strict=True):
        before = alias.handle
        alias.handle = recorder.recording.keep(target) if alias.steps else alias.base.handle
        alias.version = alias.base.version
        views.append(alias.handle)
        if alias.steps:
            recorder.recording.aliasing.view_of[alias.handle] = (before,)
            alias.base.held.append(alias.handle)
    return tuple(views)


def _fresh_result(
    recorder: Recorder, tensors: Any, fresh: dict[int, ValueId], tensor: torch.Tensor, part: Any
) -> ValueId | None:
    """The value of a tensor that the call returned besides; None for one of its arguments."""
    memory = recorder.memory
    if memory.live.get(id(tensor)) is not None and any(tensor is other for other in tensors):
        return None
    base = memory.storage_at(storage_of(tensor), tensors)
    handle = fresh[id(tensor)] = recorder.recording.keep(tensor)
    if base is None:
        memory.register(tensor, handle)
    else:
        memory.register_view(tensor, base, (geometry_step(tensor, base),), handle)
    return handle


def _with_generator(record: WriteArguments, key: str | None) -> WriteArguments:
    """The arguments with the recorded state of the generator in place of the user's generator."""
    words = record.kwargs
    if key is None or "generator" not in (words.keys or ()):
        return record
    items = [
        recorded_generator(v, key) if k == "generator" else v for k, v in zip(words.keys, words.items, strict=True)
    ]
    return record._replace(kwargs=Branch(dict, tuple(items), words.keys))


def _reallocated(recorder: Recorder, rule: Rule, writing: WriteCall, out: Any, site: Any) -> Any:
    """`out=` of another size: torch gave it new memory, so it is an output like any other."""
    given = writing.kwargs.get("out")
    outs = list(given) if isinstance(given, (tuple, list)) else [given]
    if given is None or any(len(_aliases_on(recorder, recorder.memory.alias_of(t).base)) > 1 for t in writing.targets):
        raise recorder.refusal_here(f"`{rule.kind}` changed the size of memory that other tensors share.")
    if rule.is_undefined:
        raise recorder.refusal_here(
            f"`{rule.kind}(out=...)` gives its target new memory, whose content is undefined.",
            f"Omit `out=`: the result of `{rule.kind}` alone is the same in every replay.",
        )
    named = {key: value for key, value in writing.kwargs.items() if key != "out"}
    reads, read_named = recorder.read_all(writing.args, named)
    for target in outs:
        _forget(recorder, target)
    returns = recorder.outputs(out)
    dtypes = tuple([target.dtype for target in outs])
    recorder.append(fill_new, rule, [Target.of(writing.func), dtypes, *reads], read_named, returns, site, None, False)
    return out


def _aliases_on(recorder: Recorder, base: Storage) -> list[Alias]:
    return [alias for alias in recorder.memory.live.values() if isinstance(alias, Alias) and alias.base is base]


def _forget(recorder: Recorder, tensor: torch.Tensor) -> None:
    known = recorder.memory.live.pop(id(tensor), None)
    if isinstance(known, Alias):
        recorder.memory.bases = {key: base for key, base in recorder.memory.bases.items() if base is not known.base}
    recorder.memory.keep_alive.append(tensor)
    recorder.memory.detached.add(id(tensor))


def reshape(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """`t_()`, `unsqueeze_()`: from now on the tensor object is another view of the same memory."""
    tensor = args[0]
    if func.__name__ == "detach_" and tensor.is_leaf and tensor.requires_grad:
        return set_requires_grad(recorder, func, args, kwargs)
    recorder.require_single(tensor, rule)
    recorder.read(tensor)
    alias = recorder.memory.alias_of(tensor)
    pure = getattr(torch.Tensor, func.__name__[:-1]) if not isinstance(func, OpOverload) else None
    if pure is None:
        pure = getattr(torch.ops.aten, func._schema.name.split("::")[1][:-1])
    with torch.enable_grad():
        step = recorder.memory.view_step(pure, args, kwargs, tensor, ())
    site, source = recorder.site(), alias.handle
    base, steps = alias.base, alias.steps
    recorder.memory.detach_alias(tensor)
    out = func(*args, **kwargs)
    if func.__name__ == "as_strided_":
        steps, step = (), geometry_step(tensor, base)
    handle = recorder.recording.keep(tensor)
    if alias.steps:
        recorder.recording.aliasing.view_of[handle] = (source,)
    recorder.memory.register_view(tensor, base, (*steps, step), handle)
    base.counter = version_of(base.root)
    reads = [filled_hole(source, value) for value in unpacked_place(step).args]
    recorder.append(unpacked_place(step).function.function, rule, reads, {}, handle, site, None, False, func)
    if tensor.requires_grad:
        _keep_history(recorder)
    return out


def _keep_history(recorder: Recorder) -> None:
    """The last call is recorded with gradients on: its tensor object keeps its history though they are off."""
    record = recorder.recording.records[-1]
    if isinstance(record, CallRecord):
        recorder.recording.records[-1] = record._replace(context=(True, *record.context[1:]))


def assign(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """`t.data = u`, `t.set_(u)`: from now on the tensor object has other memory."""
    tensor, value = args[0], args[1] if len(args) > 1 else kwargs.get("source")
    recorder.require_single(tensor, rule)
    old = recorder.read(tensor)
    left = recorder.memory.alias_of(tensor).base
    is_raw = not isinstance(value, torch.Tensor) or len(args) > 2
    if is_raw and (tensor.requires_grad or may_have_gradient(recorder.recording, old)):
        raise _raw_memory(recorder, rule)
    source = old if is_raw else recorder.read(value)
    check_late_write(recorder, left, replaced=tensor)
    is_announced = left.counter == version_of(left.root)
    recorder.memory.detach_alias(tensor)
    result = func(*args, **kwargs)
    if is_announced:  # its aliases are counted with it, though nothing was written; beneath autograd only later
        left.counter = None if recorder.in_aten else version_of(left.root)
    if is_raw:
        recorder.memory.live.pop(id(tensor))
        found = recorder.memory.find_storage(tensor)
        if found is None:
            raise _raw_memory(recorder, rule)
        if _is_from_outside(recorder, found):
            handle = recorder.source("constant", tensor, MADE_OUTSIDE_TORCH)
            late = recorder.in_aten and not tensor.is_inference()  # beneath autograd it is counted only later
            recorder.recording.versions[handle] += late
        else:
            recorder.alias_without_call(tensor, found)
        return result
    base, steps = recorder.memory.alias_of(value).base, recorder.memory.alias_of(value).steps
    straight = tensor.requires_grad or may_have_gradient(
        recorder.recording, old
    )  # the gradient goes where it went before
    step = packed_step(with_history_of, (old, Hole.HERE), None, (), True) if straight else _DETACH
    handle = recorder.recording.keep(tensor)
    if steps:
        recorder.recording.aliasing.view_of[handle] = (source,)
    recorder.memory.register_view(tensor, base, (*steps, step), handle)
    function, reads = (with_history_of, [old, source]) if straight else (torch.Tensor.detach, [source])
    recorder.append(function, Rule(Handling.LEAF, "data"), reads, {}, handle, recorder.site(), None, False)
    if straight:
        _keep_history(recorder)
    return result


def _is_from_outside(recorder: Recorder, base: Storage) -> bool:
    """True for memory that code outside torch filled and no tensor of the forward shares, as in `torch.load`."""
    if base.version or base.root.numel():
        return False
    sources = [r for r in recorder.recording.records if isinstance(r, SourceRecord) and r.returns == base.first]
    return any(record.kind == "constant" for record in sources)


def _raw_memory(recorder: Recorder, rule: Rule) -> ReplaylensError:
    return recorder.refusal_here(f"`{rule.kind}` gives a tensor raw memory, which a program cannot express.")


def resize(recorder: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """`t.resize_(...)`: the elements that are new are cleared or filled, as torch's deterministic mode does."""
    tensor = args[0]
    recorder.read(tensor)
    before, room = geometry_of(tensor), tensor.untyped_storage().nbytes()
    if kwargs.get("memory_format") is not None:  # a new layout is applied even if the shape stays
        recorder.ask("layout", torch.Tensor.stride, (tensor,), {}, tensor.stride())
    recorder.memory.detach_alias(tensor)
    recorder.memory.copy_on_write(recorder.memory.alias_of(tensor).base)
    result = func(*args, **kwargs)
    if geometry_of(tensor) == before:
        return result
    if len(_aliases_on(recorder, recorder.memory.alias_of(tensor).base)) > 1:
        raise recorder.refusal_here(f"`{rule.kind}` changed the size of memory that other tensors share.")
    source = recorder.memory.alias_of(tensor).handle
    _forget(recorder, tensor)
    is_filled = fills_uninitialized()
    if tensor.numel() > recorder.recording.values[source].numel() and tensor.untyped_storage().nbytes() == room:
        raise recorder.refusal_here(
            f"`{rule.kind}` makes a tensor cover memory again that it had given up.",
            "Its content is unknown. Keep the larger tensor, and use a slice of it.",
        )
    was = recorder.recording.values[source]
    if not is_dense(was) and tensor.numel():
        raise recorder.refusal_here(
            f"`{rule.kind}` makes a tensor cover memory between its own elements.",
            "Its content is unknown. Resize a contiguous copy.",
        )
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    (fill_uninitialized if is_filled else zero_uninitialized)(flat[was.numel() :])
    handle = recorder.recording.keep(tensor)
    recorder.memory.register(tensor, handle)
    reads: list[Any] = [source, tuple(tensor.shape), is_filled, tensor.stride()]
    reads = reads[: 4 if not tensor.is_contiguous() else 3 if is_filled else 2]
    recorder.append(resized, rule, reads, {}, handle, recorder.site(), None, False)
    return result
