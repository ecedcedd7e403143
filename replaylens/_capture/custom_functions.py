"""Custom autograd functions: each call of one is one node, which keeps its own backward.

In: a call of `Function.apply`. Out: its record, in the place of all that its body did; a pure call, or `mutate` where
it gave back an argument that it had marked dirty. Its body runs under the mode, so that what it reads and writes is
known.
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
from .._ir.torch_private import peek_interpreter_stack, without_function_modes
from .._ir.world import drawing_alone
from .._ir.write import WriteArguments, mutate
from ..errors import UnannouncedWrite
from .aliasing import Alias, AliasTracker, CopiedBeforeWrite, Storage
from .bytecode import words
from .dispatch import Handling, Rule
from .recorder import Recorder, tensors_in
from .recording import Recording, SourceRecord, ValueId, handles_in, reads_of
from .user_code import reached
from .writes import Writing, append_write, write_record

BOUND_BEFORE = (
    "{name}: its `apply` was taken from its class before the capture (`f = {name}.apply`), and this torch does not "
    "show calls of it. Call it by its class: `{name}.apply(x)`."
)
_function_apply = torch.autograd.Function.__dict__["apply"]


def by_its_class(function: Any) -> Any:
    """An `apply` that was taken from its class before, as the class gives it now: calls of that are shown."""
    if type(function) is not BuiltinMethodType or not isinstance(owner := function.__self__, type):
        return function
    return owner.apply if issubclass(owner, torch.autograd.Function) and function.__name__ == "apply" else function


def apply_call(tracer: Recorder, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A custom function: one node, if all that it reads are its arguments. Else the records of its body stay, and
    gradients through them are refused.
    """
    is_whole = issubclass(kind, torch.autograd.Function)  # else: a part of one, which functorch makes
    if peek_interpreter_stack() is not None or tracer.in_leaf or not is_whole:
        return call(*args, **kwargs)
    if tracer.functorch:
        tracer.leave_functorch()
    if kind.__name__ == "CheckpointFunction" and kind.__module__ == "torch.utils.checkpoint":
        return _checkpointed(tracer, args[0], args[2:])
    if kind.__name__ == "BackwardHookFunction":
        tracer.recording.one_way.append("a module's backward hook")
        return call(*args, **kwargs)
    if _is_told(kind):
        _ask_flags(tracer, args, kwargs)
    with drawing_alone():  # it is one call, which may draw
        body = _Body(tracer, kind, args, kwargs)
        return body.ended(call(*args, **kwargs))


def _checkpointed(tracer: Recorder, body: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """The body of a reentrant checkpoint is the model's own, and recorded openly. It has gradients only where one of
    the tensors that it is given needs them.
    """
    is_needed = any(tensor.requires_grad for tensor in _ask_flags(tracer, given, {}))
    first = len(tracer.recording.records)
    try:
        with nullcontext() if is_needed else torch.no_grad():
            return body(*given)
    finally:
        tracer.recording.checkpointed.update(range(first, len(tracer.recording.records)))


def _ask_flags(tracer: Recorder, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What is given to a function that asks whether gradients are needed: of each tensor that is a fact."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        asks: Any = torch.Tensor.requires_grad
        tracer.ask("flags", asks.__get__, (tensor,), {}, tensor.requires_grad)
    return tensors


@lru_cache(maxsize=4096)
def _is_told(kind: Any) -> bool:
    """Does the forward of a custom function read `ctx.needs_input_grad`?"""
    bodies = [vars(one).get(name) for one in kind.__mro__ for name in ("forward", "setup_context")]
    return any("needs_input_grad" in words(function.__code__) for function in reached(bodies))


@define(eq=False)
class _Stood:
    """How an argument's memory stood before the body ran."""

    entry: Alias
    handle: ValueId
    version: int
    base: Storage
    held: list[ValueId]
    base_handle: ValueId
    base_version: int
    exposed: torch.Tensor | None

    @staticmethod
    def of(memory: AliasTracker, tensor: torch.Tensor) -> _Stood:
        entry = memory.entry(tensor)
        base = entry.base
        return _Stood(
            entry, entry.handle, entry.version, base, list(base.held), base.handle, base.version, base.exposed
        )

    def put_back(self) -> None:
        """As if the body had not run yet. What numpy wrote is told by what was there when it got hold of it."""
        self.entry.handle, self.entry.version = self.handle, self.version
        self.base.handle, self.base.version = self.base_handle, self.base_version
        self.base.held = list(self.held)
        self.base.derived.clear()

    @property
    def is_rewritten_unseen(self) -> bool:
        """Did numpy or its like write it?"""
        return self.base.exposed is not None and not same_content(self.base.root, self.base.exposed)


class _Body:
    """The body of a custom function while it runs, and what becomes of its records."""

    def __init__(self, tracer: Recorder, kind: type, args: Any, kwargs: Any) -> None:
        self.tracer, self.kind, self.args, self.kwargs = tracer, kind, args, kwargs
        recording, memory = tracer.recording, tracer.memory
        with without_function_modes(), tracer.at_work():
            self.reads, self.named = tracer.read_all(args, kwargs)
            self.state = torch.default_generator.get_state()
            self.tensors = tensors_in(args, kwargs)
            self.is_kept = _marks_dirty(kind)
            self.copied: list[CopiedBeforeWrite] = []
            if self.is_kept:
                for base in {id(base): base for base in [memory.entry(t).base for t in self.tensors]}.values():
                    memory.share(base)
                    self.copied.append(CopiedBeforeWrite.of(memory, base))
            self.stood = [_Stood.of(memory, tensor) for tensor in self.tensors]
        self.site = tracer.site()
        self.mark = (len(recording.records), len(recording.guards), len(recording.values))
        self.writes = len(memory.written)

    def ended(self, out: Any) -> Any:
        """What the body gave; its records are taken back if one call can stand for them."""
        tracer, recording, memory = self.tracer, self.tracer.recording, self.tracer.memory
        own = {int(h) for h in handles_in((*self.reads, *self.named.values()))}
        wrote = [first for first in memory.written[self.writes :] if first < self.mark[2]]
        with without_function_modes(), tracer.at_work():
            unseen = [stood for stood in self.stood if stood.is_rewritten_unseen]
            for copied in self.copied:
                if not any(stood.base is copied.base for stood in unseen):
                    copied.put_back(recording)
            dirty = [t for t in tensors_in((out,), {}) if any(t is given for given in self.tensors)]
        is_closed = _is_closed(recording, self.mark, own) and _is_plain(self.args, self.kwargs)
        self._require_announced(dirty, unseen)
        if (wrote and not dirty) or not is_closed:
            memory.uncount(wrote)  # torch counts the write of a dirty argument once more
            if any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in self.args):
                recording.one_way.append(self.kind.__name__)
            return out
        self._take_back(dirty, unseen)
        with without_function_modes(), tracer.at_work():
            self._write_down(out, dirty)
        return out

    def _require_announced(self, dirty: list[torch.Tensor], unseen: list[_Stood]) -> None:
        """All that was written is marked dirty, and what it held before is known."""
        marked = [self.tracer.memory.entry(tensor).base for tensor in dirty]
        if all(any(stood.base is base for base in marked) for stood in unseen) or self.tracer.in_aten:
            return
        raise UnannouncedWrite(
            f"{self.kind.__name__} wrote one of its arguments through numpy or the like, and does not mark it dirty."
            f"{self.tracer.where()}\nCall ctx.mark_dirty(x) and return x, or let it write a copy."
        )

    def _take_back(self, dirty: list[torch.Tensor], unseen: list[_Stood]) -> None:
        """Forget what the body did; what it wrote is as it was before."""
        recording, memory, (records, guards, values) = self.tracer.recording, self.tracer.memory, self.mark
        if not self.is_kept:
            for stood in unseen:
                memory.restore_held(stood.base)
        if dirty:
            del memory.written[self.writes :]
            for stood in self.stood:
                stood.put_back()
        memory.take_back(values)
        del recording.records[records:], recording.guards[guards:]
        del recording.values[values:], recording.versions[values:]
        recording.overwritten = {handle for handle in recording.overwritten if handle < values}
        recording.hooks = [hook for hook in recording.hooks if hook[0] < values]
        for table in (recording.view_of, recording.gradients, memory.same_as):
            for handle in [handle for handle in table if handle >= values]:
                del table[handle]

    def _write_down(self, out: Any, dirty: list[torch.Tensor]) -> None:
        """The one call that stands for it."""
        tracer, whole = self.tracer, _function_apply.__get__(None, self.kind)
        key = tracer.draws.keep(torch.default_generator, self.state)
        rule = Rule(Handling.LEAF, self.kind.__name__.lower().replace("_", "") or "function", is_dynamic=True)
        if dirty:
            return self._write_down_write(whole, rule, out, dirty, key)
        returns = tracer.results(out, whole, self.args, self.kwargs, self.tensors)
        if returns is not None:
            tracer.append(whole, rule, self.reads, self.named, returns, self.site, key, True)
        return None

    def _write_down_write(self, whole: Any, rule: Rule, out: Any, dirty: list[torch.Tensor], key: Any) -> None:
        """A call that wrote what it marked dirty."""
        tracer = self.tracer
        writing = Writing.of(tracer, whole, self.args, self.kwargs, dirty)
        exposed = [base for base in writing.bases if base.exposed is not None]
        for base in exposed:  # what was written from outside is the call's own value now
            base.exposed = None
        for base in writing.bases:
            tracer.memory.share(base)
        append_write(tracer, rule, writing, write_record(tracer, writing, True), out, self.site, key)
        for base in exposed:
            base.exposed = base.root.detach().clone()


def _marks_dirty(kind: Any) -> bool:
    """Does a custom function say that it writes its arguments?"""
    bodies = [getattr(getattr(kind, name, None), "__code__", None) for name in ("forward", "setup_context")]
    return any("mark_dirty" in code.co_names for code in bodies if code is not None)


def _is_closed(recording: Recording, mark: tuple[int, int, int], own: set[int]) -> bool:
    """Did the body read nothing but its arguments, and what was made of them?"""
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
    """Can these arguments be given again? Modules and functions among them may read anything."""
    values = (*args, *kwargs.values())
    return not any(isinstance(value, torch.nn.Module) or hasattr(value, "__code__") for value in values)
