"""Custom autograd functions: each call is one node, which keeps its own backward.

In: a call of `Function.apply`. Out: one record in place of all that the body did: a pure call, or `mutate` where the
function returns an argument that it marked dirty. The body runs under the mode first, which shows what it reads and
writes; its records are then rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

import torch
from attrs import define

from .._ir.equality import same_content
from .._ir.interrupts import exclusive_generator
from .._ir.torch_private import peek_interpreter_stack, without_function_modes
from .._ir.write import WriteArguments, mutate
from ..errors import UnannouncedWrite
from .aliasing import Alias, AliasTracker, CopiedBeforeWrite, Storage
from .dispatch import Handling, Rule
from .recorder import Recorder, tensors_in
from .recording import Recording, SourceRecord, ValueId, reads_of, value_ids_in
from .user_code import identifiers, reachable_functions
from .writes import WriteCall, append_write, write_record

APPLY_BOUND_BEFORE = (
    "{name}: its `apply` was taken from its class before the capture (`f = {name}.apply`), and this torch does not "
    "show calls of it. Call it by its class: `{name}.apply(x)`."
)
_function_apply = torch.autograd.Function.__dict__["apply"]


def by_its_class(function: Any) -> Any:
    """An `apply` that was taken from its class earlier, as the class gives it now: calls of that one are seen."""
    if type(function) is not BuiltinMethodType or not isinstance(owner := function.__self__, type):
        return function
    return owner.apply if issubclass(owner, torch.autograd.Function) and function.__name__ == "apply" else function


def apply_call(tracer: Recorder, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a custom function, as one node if it reads nothing but its arguments. Otherwise its body's records stay, and
    gradients through them are refused.
    """
    is_whole = issubclass(kind, torch.autograd.Function)  # else a part of one, made by functorch
    if peek_interpreter_stack() is not None or tracer.in_leaf or not is_whole:
        return call(*args, **kwargs)
    if tracer.functorch:
        tracer.leave_functorch()
    if kind.__name__ == "CheckpointFunction" and kind.__module__ == "torch.utils.checkpoint":
        return _checkpointed(tracer, args[0], args[2:])
    if kind.__name__ == "BackwardHookFunction":
        tracer.recording.autograd.forward_only.append("a module's backward hook")
        return call(*args, **kwargs)
    if _reads_flags(kind):
        _ask_flags(tracer, args, kwargs)
    with exclusive_generator():  # it is one call, which may draw
        body = _Body(tracer, kind, args, kwargs)
        return body.ended(call(*args, **kwargs))


def _checkpointed(tracer: Recorder, body: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """The body of a reentrant checkpoint is the model's own code, and recorded openly. It has gradients only if one of
    the tensors it is given needs them.
    """
    is_needed = any(tensor.requires_grad for tensor in _ask_flags(tracer, given, {}))
    first = len(tracer.recording.records)
    try:
        with nullcontext() if is_needed else torch.no_grad():
            return body(*given)
    finally:
        tracer.recording.checkpoints.records.update(range(first, len(tracer.recording.records)))


def _ask_flags(tracer: Recorder, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Record that the `requires_grad` of each argument was read, by a function that asks whether gradients are
    needed.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        asks: Any = torch.Tensor.requires_grad
        tracer.ask("flags", asks.__get__, (tensor,), {}, tensor.requires_grad)
    return tensors


@lru_cache(maxsize=4096)
def _reads_flags(kind: Any) -> bool:
    """True if the forward of a custom function reads `ctx.needs_input_grad`."""
    bodies = [vars(one).get(name) for one in kind.__mro__ for name in ("forward", "setup_context")]
    return any("needs_input_grad" in identifiers(function.__code__) for function in reachable_functions(bodies))


@define(eq=False)
class _MemoryState:
    """The memory of an argument as it was before the body ran."""

    alias: Alias
    handle: ValueId
    version: int
    base: Storage
    held: list[ValueId]
    base_handle: ValueId
    base_version: int
    exposed: torch.Tensor | None

    @staticmethod
    def of(memory: AliasTracker, tensor: torch.Tensor) -> _MemoryState:
        alias = memory.alias_of(tensor)
        base = alias.base
        return _MemoryState(
            alias, alias.handle, alias.version, base, list(base.held), base.handle, base.version, base.exposed
        )

    def put_back(self) -> None:
        """Restore it. A write by numpy is found again later, by the copy taken when the memory was exposed."""
        self.alias.handle, self.alias.version = self.handle, self.version
        self.base.handle, self.base.version = self.base_handle, self.base_version
        self.base.held = list(self.held)
        self.base.derived.clear()

    @property
    def is_rewritten_unseen(self) -> bool:
        """True if numpy or the like wrote this memory."""
        return self.base.exposed is not None and not same_content(self.base.root, self.base.exposed)


class _Body:
    """The body of a custom function while it runs, and what becomes of its records."""

    def __init__(self, tracer: Recorder, kind: type, args: Any, kwargs: Any) -> None:
        self.tracer, self.kind, self.args, self.kwargs = tracer, kind, args, kwargs
        recording, memory = tracer.recording, tracer.memory
        with without_function_modes(), tracer.beneath_leaf():
            self.reads, self.named = tracer.read_all(args, kwargs)
            self.rng_state = torch.default_generator.get_state()
            self.tensors = tensors_in(args, kwargs)
            self.is_kept = _marks_dirty(kind)
            self.copied: list[CopiedBeforeWrite] = []
            if self.is_kept:
                for base in {id(base): base for base in [memory.alias_of(t).base for t in self.tensors]}.values():
                    memory.join_aliases(base)
                    self.copied.append(CopiedBeforeWrite.of(memory, base))
            self.states = [_MemoryState.of(memory, tensor) for tensor in self.tensors]
        self.site = tracer.site()
        self.mark = (len(recording.records), len(recording.guards), len(recording.values))
        self.writes = len(memory.written)

    def ended(self, out: Any) -> Any:
        """Return the body's output. Its records are rolled back if one call can stand for them."""
        tracer, recording, memory = self.tracer, self.tracer.recording, self.tracer.memory
        own = {int(h) for h in value_ids_in((*self.reads, *self.named.values()))}
        wrote = [first for first in memory.written[self.writes :] if first < self.mark[2]]
        with without_function_modes(), tracer.beneath_leaf():
            unseen = [state for state in self.states if state.is_rewritten_unseen]
            for copied in self.copied:
                if not any(state.base is copied.base for state in unseen):
                    copied.put_back(recording)
            dirty = [t for t in tensors_in((out,), {}) if any(t is given for given in self.tensors)]
        is_closed = _is_closed(recording, self.mark, own) and _is_plain(self.args, self.kwargs)
        self._require_announced(dirty, unseen)
        if (wrote and not dirty) or not is_closed:
            memory.distrust_counter(wrote)  # torch counts the write of a dirty argument once more
            if any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in self.args):
                recording.autograd.forward_only.append(self.kind.__name__)
            return out
        self._rollback(dirty, unseen)
        with without_function_modes(), tracer.beneath_leaf():
            self._record(out, dirty)
        return out

    def _require_announced(self, dirty: list[torch.Tensor], unseen: list[_MemoryState]) -> None:
        """Refuse writes through numpy to arguments that are not marked dirty."""
        marked = [self.tracer.memory.alias_of(tensor).base for tensor in dirty]
        if all(any(state.base is base for base in marked) for state in unseen) or self.tracer.in_aten:
            return
        raise self.tracer.refusal_here(
            f"{self.kind.__name__} wrote one of its arguments through numpy or the like without marking it dirty.",
            "Call ctx.mark_dirty(x) and return x, or write a copy.",
            kind=UnannouncedWrite,
        )

    def _rollback(self, dirty: list[torch.Tensor], unseen: list[_MemoryState]) -> None:
        """Forget what the body recorded, and restore the memory of what it wrote."""
        recording, memory, (records, guards, values) = self.tracer.recording, self.tracer.memory, self.mark
        if not self.is_kept:
            for state in unseen:
                memory.restore_exposed(state.base)
        if dirty:
            del memory.written[self.writes :]
            for state in self.states:
                state.put_back()
        memory.rollback(values)
        del recording.records[records:], recording.guards[guards:]
        del recording.values[values:], recording.versions[values:]
        recording.aliasing.overwritten = {handle for handle in recording.aliasing.overwritten if handle < values}
        recording.autograd.hooks = [hook for hook in recording.autograd.hooks if hook[0] < values]
        for table in (recording.aliasing.view_of, recording.autograd.histories, memory.same_data_as):
            for handle in [handle for handle in table if handle >= values]:
                del table[handle]

    def _record(self, out: Any, dirty: list[torch.Tensor]) -> None:
        """Record the one call that stands for the body."""
        tracer, whole = self.tracer, _function_apply.__get__(None, self.kind)
        key = tracer.draws.keep(torch.default_generator, self.rng_state)
        rule = Rule(Handling.LEAF, self.kind.__name__.lower().replace("_", "") or "function", is_dynamic=True)
        if dirty:
            return self._record_write(whole, rule, out, dirty, key)
        returns = tracer.results(out, whole, self.args, self.kwargs, self.tensors)
        if returns is not None:
            tracer.append(whole, rule, self.reads, self.named, returns, self.site, key, True)
        return None

    def _record_write(self, whole: Any, rule: Rule, out: Any, dirty: list[torch.Tensor], key: Any) -> None:
        """Record it as a write of the arguments marked dirty."""
        tracer = self.tracer
        writing = WriteCall.of(tracer, whole, self.args, self.kwargs, dirty)
        exposed = [base for base in writing.bases if base.exposed is not None]
        for base in exposed:  # what numpy wrote in the body is now a result of the call
            base.exposed = None
        for base in writing.bases:
            tracer.memory.join_aliases(base)
        append_write(tracer, rule, writing, write_record(tracer, writing, True), out, self.site, key)
        for base in exposed:
            base.exposed = base.root.detach().clone()


def _marks_dirty(kind: Any) -> bool:
    """True if a custom function calls `ctx.mark_dirty`."""
    bodies = [getattr(getattr(kind, name, None), "__code__", None) for name in ("forward", "setup_context")]
    return any("mark_dirty" in code.co_names for code in bodies if code is not None)


def _is_closed(recording: Recording, mark: tuple[int, int, int], own: set[int]) -> bool:
    """True if the body read nothing but its arguments, and what it made of them."""
    for record in recording.records[mark[0] :]:
        if isinstance(record, SourceRecord):
            if record.kind != "constant":
                return False
            continue
        bases = {int(h) for h in WriteArguments(*record.args).bases} if record.function is mutate else set()
        if any(int(h) < mark[2] and int(h) not in own and int(h) not in bases for h in reads_of(record)):
            return False
    return True


def _is_plain(args: Any, kwargs: Any) -> bool:
    """True if these arguments can be passed again: modules and functions among them may read anything."""
    values = (*args, *kwargs.values())
    return not any(isinstance(value, torch.nn.Module) or hasattr(value, "__code__") for value in values)
