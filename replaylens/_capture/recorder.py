"""One operation: read its arguments, run it, record it.

In: a call and its Rule. Out: records in the Recording, values in the AliasTracker. tracer.py decides which calls are
operations; writes.py records those that write.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from time import perf_counter_ns as _now
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._ir.autograd import new_parameter
from .._ir.memory import storage_of, version_of
from .._ir.node import SAME_TENSOR
from .._ir.ops import op_info
from .._ir.runtime import blank, blank_filled, fill_uninitialized, fills_uninitialized, zero_uninitialized
from .._ir.settings import Settings, settings
from .._ir.target import Target
from .._ir.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    is_any_autocast_on,
    pop_function_mode,
    push_function_mode,
    top_saving_hooks,
)
from .._ir.trees import ATOMS, freeze
from .._ir.write import Hole
from ..errors import CaptureError, ReplaylensError, UnannouncedWrite, UnknownOrigin
from .aliasing import MADE_OUTSIDE_TORCH, Alias, AliasTracker, Storage, geometry_step, packed_step
from .dispatch import Rule, is_new_memory
from .provenance import Provenance, StartMark, is_older, thread_fingerprint
from .questions import Query
from .recording import PLAIN, VALUE_IDS, CallRecord, CodePosition, GuardRecord, Recording, SourceRecord, ValueId
from .rng import DrawLog, recorded_generator
from .scopes import callers, user_frame, user_line
from .user_code import is_torch_code

_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_autocast = is_any_autocast_on
_dispatch_modes = count_dispatch_modes
_saved_hooks = top_saving_hooks
_push = push_function_mode
_pop = pop_function_mode
_tuple = tuple.__new__
_Tensor, _Parameter = torch.Tensor, nn.Parameter
_HOME = __file__.rsplit("/", 2)[0] + "/"


_NUMBERS = (bool, int, float, complex, str)
_ANSWERS = (bool, int, str, tuple, torch.layout)


class RetraceAtDispatch(BaseException):
    """Raised where a tensor was made in the forward and the function layer did not see how: the model is run once more,
    and every ATen call is recorded.
    """


class ThreadRead(NamedTuple):
    """A tensor that another thread read, its value then if known, and where; no tensor stands for any."""

    tensor: torch.Tensor | None
    handle: ValueId | None
    position: int
    site: CodePosition | None


class AliasOrigin(NamedTuple):
    """Describes an alias that the model got in place of the very object: how many aliases lie between, and what
    autograd said of the object.
    """

    depth: int
    is_view: bool
    requires_grad: bool

    def original(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """The leaf that the alias stands for; otherwise the grad_fn of the object, and its number among that node's
        outputs.
        """
        node: Any = tensor.grad_fn
        number = 0
        for _ in range(self.depth if node is not None else 0):
            node, number = node.next_functions[0]
        return getattr(node, "variable", node), number


class Recorder(TorchFunctionMode):
    """The state of a capture and its basic steps: the recording, the alias tracker, and where the model is."""

    # Attribute lookup is fast while an object's dict has at most thirty keys: these are kept out of it.
    __slots__ = (
        "depth",
        "elsewhere",
        "forward",
        "forwards",
        "has_scripts",
        "in_trees",
        "plain_contexts",
        "started_at",
        "took",
    )
    leaves_changes = True  # the forward's writes to the model are kept
    only_follows = False  # the forward is somebody else's: nothing is computed beside it, and nothing filled

    def __init__(self, recording: Recording, origins: Provenance, date: StartMark, deep: bool, unknown: str) -> None:
        super().__init__()
        self.recording = recording
        self.memory = AliasTracker(recording)
        self.origins = origins
        self.started_at = origins.started_at
        self.wrapped = origins.wrapped
        self.date = date
        self.unknown = unknown
        self.draws = DrawLog(recording.rng.draws, recording.rng.generators, recording.rng.follows)
        self.scope = -1
        self.forward: CodeType | None = None  # the code of the running module's forward
        self.forwards: dict[type, CodeType | None] = {}  # by the class of a module
        self.in_trees: Counter[int] = Counter()  # by id: references to objects that modules gave, in frozen trees
        self.has_scripts = False  # a module that is TorchScript has run
        self.stateful: list[SourceRecord] = []  # buffers and attributes that were read
        self.opened: set[Any] = set()
        self.opened_site: CodePosition | None = None
        self.watch: Any = None
        self.deep = deep
        self.in_leaf = 0
        self.script_is_open = False  # inside a script that detaches nothing itself
        self.refused: BaseException | None = None
        self.failed_scope = -1  # the innermost module call that the last exception left
        self.is_special = deep  # a region is open, or a dispatch mode is on
        self.functorch = False
        self.differentiating = False  # inside torch.func.grad or the like
        self.exposed = False
        self.threads = thread_fingerprint()
        self.aliased: set[int] = set()  # objects that a call returned as they were, and the aliases given for them
        self.aliases: dict[int, AliasOrigin] = {}  # of those, the aliases
        self.outer_modes = _dispatch_modes()
        self.plain_contexts = (False, False, (), ()), (True, False, (), ())  # without gradients and with them
        self.contexts: dict[Any, Any] = {(on, False, False, ()): self.plain_contexts[on] for on in (False, True)}
        self.grad_mode = _grad_enabled()  # as the model set it; a script may change it for itself
        self.in_aten = False
        self.elsewhere: list[ThreadRead] = []  # what other threads read
        self.took = 0  # nanoseconds, of the call that is recorded next
        self.depth = 0  # of torch's stack of function modes when this one was entered

    def aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an ATen call that lies beneath no recorded call (see Tracer)."""
        raise NotImplementedError

    def leave_functorch(self) -> None:
        """End a stretch inside functorch (see Tracer)."""
        raise NotImplementedError

    def given(self, tree: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments for the model, once the inputs are known; a patched run changes them."""
        return args, kwargs

    def __enter__(self) -> Recorder:
        self.depth = count_function_modes()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        if count_function_modes() > self.depth:  # else an interrupt came before a mode within was put back
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def beneath_leaf(self) -> Any:
        """Within, ATen calls are the tracer's own or lie beneath a recorded call: the dispatch mode ignores them."""
        self.in_leaf += 1
        try:
            yield
        finally:
            self.in_leaf -= 1

    @contextmanager
    def reentered(self) -> Any:
        """Within, the mode sees calls although it is handling one."""
        work, self.in_leaf, depth = self.in_leaf, 0, count_function_modes()
        _push(self)
        try:
            yield
        finally:
            if count_function_modes() > depth:  # else an interrupt came before a mode within was put back
                _pop()
            self.in_leaf = work

    def leaf(self, rule: Rule, func: Any, args: Any, kwargs: Any, stands_for: Any = None) -> Any:
        """Record an operation that does not write. Its output may be a view, it may draw, its shape may depend on
        content.
        """
        reads, named = self.read_all(args, kwargs)
        site = self.site()
        draw = self.draws.around(rule.may_draw, func, args, kwargs)
        start = _now()
        out = draw(func, args, kwargs)
        self.took = _now() - start
        tensors = tensors_in(args, kwargs)
        if not tensors and isinstance(out, torch.Tensor) and self.from_outside(out):  # `as_tensor` of an array
            return out
        is_undefined = rule.is_undefined or is_new_memory(func, args)
        if is_undefined:
            made, empty = (blank_filled, fill_uninitialized) if fills_uninitialized() else (blank, zero_uninitialized)
            if not self.only_follows:
                empty(out)
            reads = [Target.of(func), *reads]
        if isinstance(out, torch.Tensor) and any(out is tensor for tensor in tensors):
            own = self.identity_alias(rule, out)
            if own is None:
                if rule.kind == "contiguous" or "memory_format" in kwargs:
                    self.ask("layout", func, args, kwargs, SAME_TENSOR)
                return out
            out = own
        func = stands_for or func
        returns = self.results(out, func, args, kwargs, tensors)
        if returns is None:
            if tensors and draw.key is None and not self.functorch:
                self.guard_result(func, reads, named, out)
            return out
        func = made if is_undefined else func
        if not tensors and torch.get_default_dtype() != self.recording.default_dtype and isinstance(out, torch.Tensor):
            named = {**named, "dtype": out.dtype}
        self.append(func, rule, reads, named, returns, site, draw.key, rule.is_dynamic)
        return out

    def guard_result(self, func: Any, reads: Any, named: Any, out: Any) -> None:
        """Guard what a call that read tensors and returned none gave: its numbers, or that it did not raise."""
        if out is None:
            self.guard(func, reads, named, None, True, "exception")
        elif type(out) in _NUMBERS:
            self.guard(func, reads, named, out, True)
        elif type(out) in (tuple, list) and out and all(type(one) in _NUMBERS for one in out):
            self.guard(func, reads, named, None, False)  # several numbers: the tensors they were read from are compared

    def guard(self, func: Any, reads: Any, named: Any, result: Any, plain: bool, kind: str = "content") -> None:
        position = len(self.recording.records)
        record = GuardRecord(func, reads, named, result, plain, position, self.scope, self.guard_site(), kind)
        self.recording.guards.append(record)

    def ask(self, kind: str, func: Any, args: Any, kwargs: Any, answer: Any) -> None:
        """Record a question whose answer depends on no content, such as a stride. It becomes a guard and no node."""
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or not isinstance(answer, _ANSWERS):
            return
        known, recording = self.memory.live.get(id(tensor)), self.recording
        handle = known.handle if isinstance(known, Alias) else known
        site, position = self.guard_site(), len(recording.records)
        plain = tuple(args[1:])
        recording.asked.append(
            Query(kind, func, tensor, handle, plain, kwargs or {}, answer, position, self.scope, site)
        )

    def guard_site(self) -> CodePosition | None:
        """The innermost line of the user's that is running."""
        site = self.site()
        scope = self.scope
        while (site is None or is_torch_code(site[0])) and scope >= 0:
            site, scope = self.recording.scopes[scope].site, self.recording.scopes[scope].parent
        return site

    def identity_alias(self, rule: Rule, out: torch.Tensor) -> torch.Tensor | None:
        """An alias of the argument that an identity (dropout in evaluation) returned, so that its output is a value of
        its own.

        None for calls like `contiguous`: they return the argument, and are no node. A model may test `x.to(...) is x`.
        """
        if not rule.is_identity or type(out) not in PLAIN:
            return None
        if out.requires_grad and not _grad_enabled() and self.recording.outer_modes[0]:
            return None  # a view made here could not be written later, where gradients are on again
        try:
            made = torch.ops.aten.alias.default(out)
            self.note_alias(out, made)
            return made
        except (RuntimeError, NotImplementedError):
            return None

    def note_alias(self, original: torch.Tensor, made: torch.Tensor) -> None:
        """The model is given an alias that it takes for the object itself."""
        of = self.aliases.get(id(original)) or AliasOrigin(0, original._is_view(), original.requires_grad)
        self.aliases[id(made)] = of._replace(depth=of.depth + 1)
        self.aliased.update((id(original), id(made)))

    def require_single(self, tensor: torch.Tensor, rule: Rule) -> None:
        """Refuse to reshape a tensor of which the model holds an alias that it takes for the object itself."""
        if id(tensor) in self.aliased:
            raise self.refusal_here(
                f"`{rule.kind}` gives another shape or memory to a tensor that dropout or nn.Identity returned, or "
                "to an input that is the model's own tensor.",
                "The capture puts an alias in the place of such a tensor, so it is not the same object. Reshape a "
                "copy.",
            )

    def append(
        self,
        func: Any,
        rule: Rule,
        args: Any,
        kwargs: Any,
        returns: Any,
        site: Any,
        draws: Any,
        dynamic: bool,
        original: Any = None,
    ) -> None:
        if draws is not None and "generator" in kwargs:
            kwargs = {**kwargs, "generator": recorded_generator(kwargs["generator"], draws)}
        kind, context, scope, inside, took = rule.kind, self.context(), self.scope, self.differentiating, self.took
        record = (
            func,
            kind,
            args,
            kwargs,
            returns,
            context,
            scope,
            site,
            draws,
            dynamic,
            None,
            (),
            inside,
            took,
            original,
        )
        self.took = 0
        self.recording.records.append(_tuple(CallRecord, record))

    def results(self, out: Any, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """ValueIds for all tensors in an output, as a tree of its shape; None if it has none."""
        if type(out) is _Tensor and self._is_new_memory(out, tensors):
            self.memory.live[id(out)] = handle = self.recording.keep(out)
            return handle
        found = False

        def leaf(tensor: torch.Tensor, part: tuple[int, ...]) -> ValueId:
            nonlocal found
            found = True
            if tensor.is_nested:
                raise self.refusal_here(
                    "the forward makes nested tensors, which have no single shape. Capture it on padded ones."
                )
            known = self.memory.live.get(id(tensor))
            if known is not None and any(tensor is other for other in tensors):
                return self.register_again(tensor)
            base = self.memory.storage_at(storage_of(tensor), tensors)
            handle = self.recording.keep(tensor)
            if tensor.layout is not torch.strided:
                self.memory.note_sparse(tensor, tensors)
            if base is None:
                self.memory.register(tensor, handle)
            else:
                self.register_result_view(tensor, handle, base, func, args, kwargs, tensors, part)
            return handle

        returns = result_tree(out, leaf, ())
        return returns if found else None

    def _is_new_memory(self, out: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        """True for a plain tensor in memory that nothing known lies in. `tensors`: what the call was given."""
        if out.layout is not torch.strided or out.is_nested or (key := storage_of(out)) is None:
            return False
        return key not in self.memory.bases and key not in map(storage_of, tensors)

    def register_again(self, tensor: torch.Tensor) -> ValueId:
        """A call returned an argument among several outputs: the same object, which now holds the value of that
        output.
        """
        alias = self.memory.alias_of(tensor)
        alias.handle = handle = self.recording.keep(tensor)
        if not alias.steps:
            alias.base.handle = handle
        alias.base.held.append(handle)
        return handle

    def register_result_view(
        self,
        tensor: Any,
        handle: ValueId,
        base: Storage,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Any],
        part: Any,
    ) -> None:
        """The output of a call shares memory with `base`: find the view steps that lead to it."""
        source = next((t for t in tensors if self.base_of(t) is base), None)
        if source is None:  # it shares memory with a tensor that is no argument
            self.memory.register_view(tensor, base, (geometry_step(tensor, base),), handle)
            return
        alias, name = self.memory.alias_of(source), getattr(func, "__name__", "")
        above = tuple(
            [other.handle for t in tensors if self.base_of(t) is base and (other := self.memory.alias_of(t)).steps]
        )
        if above:
            self.recording.aliasing.view_of[handle] = above
        plain = tensor.layout is torch.strided and tensor.dtype == source.dtype == base.root.dtype
        of_several = sum(self.base_of(t) is base for t in tensors) > 1
        if plain and len(part) == 1 and not of_several and op_info(func).gives_several_views:
            steps: tuple[Any, ...] = (
                *alias.steps,
                self.memory.select_step(source, tensor, name, args, kwargs, part[0]),
            )
        elif plain and ("as_strided" in name or part or of_several or not any(source is value for value in args)):
            steps = (geometry_step(tensor, base),)
        else:
            steps = (*alias.steps, self.memory.view_step(func, args, kwargs, source, part))
        self.memory.register_view(tensor, base, steps, handle)

    def base_of(self, tensor: torch.Tensor) -> Storage | None:
        known = self.memory.live.get(id(tensor))
        return known.base if isinstance(known, Alias) else None

    def outputs(self, out: Any) -> Any:
        """ValueIds for the outputs of a call that returns new memory."""

        def leaf(tensor: torch.Tensor, part: tuple[int, ...]) -> ValueId:
            handle = self.recording.keep(tensor)
            self.memory.register(tensor, handle)
            return handle

        return result_tree(out, leaf, ())

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> ValueId:
        """The value that a tensor holds now. One that was never seen gets its origin."""
        handle = self.memory.read(tensor)
        if handle is not None:
            return handle
        if type(tensor) is _Parameter:
            return self.parameter(tensor)
        where = self.origins.buffers_at_start.get(id(tensor)) if self.scope >= 0 else None
        if where is None or storage_of(tensor) in self.memory.bases:
            return self._origin(tensor)
        return self.source("buffer", tensor, where)

    def parameter(self, tensor: torch.Tensor) -> ValueId:
        """The value of a parameter at its first read: a short cut for those that stand at one address."""
        number, memory = id(tensor), self.memory
        where = self.started_at.get(number)
        if where is None or self.scope < 0 or (memory.written and storage_of(tensor) in memory.bases):
            return self._origin(tensor)
        recording = self.recording
        values, versions = recording.values, recording.versions
        handle = memory.live[number] = VALUE_IDS[len(values)]
        values.append(tensor)
        memory.counters_at_start[number] = count = version_of(tensor)
        versions.append(count)
        recording.records.append(_tuple(SourceRecord, ("parameter", handle, where, None, tensor)))
        return handle

    def read_all(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        read = self.read
        reads = [value if type(value) in ATOMS else freeze(value, read) for value in args]
        return reads, {key: freeze(value, read) for key, value in kwargs.items()} if kwargs else {}

    def source(self, kind: str, tensor: torch.Tensor, where: Any) -> ValueId:
        """Record a tensor that no call made."""
        if tensor.is_nested:
            raise self.refusal_here(
                "the forward computes with nested tensors, which have no single shape. Capture it on padded ones."
            )
        handle = self.recording.keep(tensor)
        site = self.site() if kind == "constant" else None
        record = SourceRecord(kind, handle, where, site, tensor)
        self.recording.records.append(record)
        if kind in ("buffer", "attribute"):
            self.stateful.append(record)
        self.memory.live[id(tensor)] = handle
        self.memory.counters_at_start[id(tensor)] = version_of(tensor)
        return handle

    def _origin(self, tensor: torch.Tensor) -> ValueId:
        """The value of a tensor that no recorded call made, by where it comes from (provenance.py).

        The order matters: state of the model, then known memory, then what is older than the capture. What is left was
        made in the forward unseen, and must not pass for a constant.
        """
        running = self.recording.scopes[self.scope].module if self.scope >= 0 else None
        state = self.origins.state(tensor, running)
        if state is not None and not self.origins.was_there(tensor):
            state = None  # assigned in the forward: its origin is what it was made from
        key = storage_of(tensor) if state is not None and self.memory.written else None
        base = self.memory.find_storage(tensor) if state is None else self.memory.bases.get(key or 0)
        if base is not None and not self._is_own(tensor, base):
            return self.alias_without_call(tensor, base)
        if state is not None:
            return self.source(state[0], tensor, state[1])
        older = is_older(tensor, self.date)
        if older and (where := self.origins.attribute(tensor)) is not None:
            return self.source("attribute", tensor, where)
        if older:
            return self.source("constant", tensor, "older than the capture")
        if (own := self.origins.over(storage_of(tensor))) is not None:  # `nn.Parameter(self.weight)`
            self.read(own)
            return self.alias_without_call(tensor, self.memory.alias_of(own).base)
        if self.draws.holds(tensor):
            self.recording.rng.generator_read["torch.get_rng_state"] = None
            return self.source("constant", tensor, "a generator's state")
        if self.from_outside(tensor):
            return self.memory.read(tensor)  # type: ignore[return-value]
        if self.deep and tensor.dim() == 0 and not tensor.requires_grad and self._is_alone():
            return self.source("constant", tensor, "a number that a script made a tensor")
        if self.unknown == "constant":
            return self.source("constant", tensor, "of unknown origin, taken for a constant")
        if not self.deep:
            raise RetraceAtDispatch
        raise UnknownOrigin(self._unknown_text(tensor))

    def known_storages_of(self, base: Storage) -> set[int | None]:
        """The storages in which earlier calls found this memory; a patched run adds those of substitutes."""
        return {storage_of(base.root)}

    def substitute_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that stands for one of the model's: itself, except in a patched run."""
        return tensor

    def refuse_unseen_write(self, tensor: torch.Tensor) -> None:
        """A tensor was written by a call that the function layer did not see, such as `z.real = y` or `set_`."""
        if not self.deep:
            raise RetraceAtDispatch
        raise self.refusal_here(
            f"a tensor {tuple(tensor.shape)} was written by code that the capture did not see: another thread, "
            "an extension, or a call that hides what it writes.",
            kind=UnannouncedWrite,
        )

    def _is_own(self, tensor: torch.Tensor, base: Storage) -> bool:
        """True if the tensor existed before the capture, over the memory of an input that is not written yet: then it
        is state of its own, not a view of the input.
        """
        return base.version == 0 and self.memory.is_input(base) and is_older(tensor, self.date)

    def from_outside(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies over memory that torch did not allocate, as of a numpy array. It is recorded as a
        constant then, and exposed: it can be written outside torch at any time.
        """
        if _owns_memory(tensor) or tensor.grad_fn is not None:
            return False
        twin = self.memory.overlapping_storage(tensor)
        if twin is not None and (twin.exposed is None or twin.version):
            raise self.refusal_here(
                "a tensor shares its memory with another one through numpy, dlpack or the like.",
                "Which value it holds when cannot be known. Use views made by torch, or copy.",
            )
        self.source("constant", tensor, MADE_OUTSIDE_TORCH)
        self.memory.expose(tensor)
        if twin is not None:
            self.memory.alias_of(tensor).base.twin = twin
            twin.twin = self.memory.alias_of(tensor).base
        return True

    def _is_alone(self) -> bool:
        """True if no other thread began, and no pool's workers can have worked."""
        return thread_fingerprint() == self.threads and self.threads[-1] is None

    def alias_without_call(self, tensor: torch.Tensor, base: Storage) -> ValueId:
        """Register `nn.Parameter(x)`, `x.as_subclass(...)`: a new object over known memory that no call made."""
        root, plain = base.root, (torch.Tensor, nn.Parameter)
        self.recording.aliasing.shares_inputs |= base.version > 0 and self.memory.is_input(base)
        steps: tuple[Any, ...] = ()
        if tensor.dtype != root.dtype or _lies(tensor) != _lies(root):
            steps = (geometry_step(tensor, base),)
        if tensor.is_leaf and not tensor._is_view():  # `as_subclass` makes a view, `nn.Parameter` a leaf of its own
            if tensor.requires_grad:
                steps = (*steps, packed_step(new_parameter, (Hole.HERE,), None, (), True))
            elif isinstance(tensor, nn.Parameter) or (_grad_enabled() and root.requires_grad):
                steps = (*steps, packed_step(torch.Tensor.detach, (Hole.HERE,), None, (), _grad_enabled()))
        elif root.requires_grad and not tensor.requires_grad and is_older(tensor, self.date):  # `weight.data[0]`
            steps = (*steps, packed_step(torch.Tensor.detach, (Hole.HERE,), None, (), _grad_enabled()))
        if type(tensor) is not type(root) and (type(tensor) not in plain or type(root) not in plain):
            steps = (
                *steps,
                packed_step(torch.Tensor.as_subclass, (Hole.HERE, type(tensor)), None, (), _grad_enabled()),
            )
        handle = base.handle
        self.memory.register_view(tensor, base, steps, handle)
        if steps:
            alias = self.memory.alias_of(tensor)
            alias.version = -1
            return self.read(tensor)
        return handle

    def _unknown_text(self, tensor: torch.Tensor) -> str:
        what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        return (
            f"a tensor {what} reached an operation, and no recorded call in this thread made it."
            f"{self.where()}\n"
            "It may be the result of another thread, or of code that hides its calls from torch. "
            "Compute it in the forward's own thread, or pass it in as an input; capture(..., "
            "unknown='constant') keeps such tensors as constants."
        )

    def refusal_here(self, fact: str, cure: str = "", kind: type[ReplaylensError] = CaptureError) -> ReplaylensError:
        """The error that refuses this capture: the fact, the user's line that runs, the cure."""
        return kind(fact + self.where() + (f"\n{cure}" if cure else ""))

    def where(self) -> str:
        site = self.site()
        if site is None:
            return ""
        source = user_line(self.recording, site, self.scope)
        return "\n" + source.indented if source else ""

    def site(self) -> CodePosition | None:
        if self.opened_site is not None:
            return self.opened_site
        frame = first_user_frame(sys._getframe(1))
        return self.line(user_frame(frame) or frame)

    def line(self, frame: Any) -> CodePosition:
        """The line at a frame, with its callers where it is not the forward of the running module itself."""
        code = frame.f_code
        if code is self.forward or (is_torch_code(code) and self.forward is not None and is_torch_code(self.forward)):
            return code, frame.f_lasti
        return callers(frame) or (code, frame.f_lasti)

    def context(self) -> Any:
        """The modes that a call runs under; one object for equal ones."""
        grad = self.grad_mode if self.in_aten and not self.functorch else _grad_enabled()
        key = grad, _inference(), _autocast(), settings(self.recording.default_dtype)
        watch = self.watch
        if _dispatch_modes() != self.outer_modes + (watch is not None and watch.entered and not watch.handling):
            raise self.refusal_here("the model turned on a dispatch mode of its own, whose effect cannot be seen.")
        hooks: Any = _saved_hooks(False)
        if hooks is not None and not hooks[0].__module__.startswith("torch."):
            self.recording.autograd.forward_only.append("saved_tensors_hooks")
        if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
            self.recording.checkpoints.records.add(len(self.recording.records))
        if key[2]:
            return self._autocast_context(key)
        known = self.contexts.get(key)
        if known is None:
            known = self.contexts[key] = (key[0], key[1], (), key[3])
        return known

    def _autocast_context(self, key: tuple[bool, bool, bool, Settings]) -> Any:
        modes = []
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.append((device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()))
        return key[0], key[1], tuple(modes), key[3]


def first_user_frame(frame: Any) -> Any:
    """The first frame from here outwards that is not ours."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    return frame


def result_tree(value: Any, leaf: Callable[[torch.Tensor, tuple[int, ...]], Any], part: tuple[int, ...]) -> Any:
    """A call's output as a tree: `leaf(tensor, path)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return leaf(value, part)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return tuple([result_tree(item, leaf, (*part, number)) for number, item in enumerate(value)])
    return None


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is _Tensor:
            found.append(value)
        elif type(value) not in ATOMS:
            freeze(value, found.append)
    return found


def _lies(tensor: torch.Tensor) -> Any:
    """How a strided tensor lies in its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()


def geometry_of(tensor: torch.Tensor) -> Any:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.dtype, tuple(tensor.shape), (tensor.stride(), tensor.storage_offset()) if strided else None


def _owns_memory(tensor: torch.Tensor) -> bool:
    """False if torch did not allocate this memory, as for numpy arrays."""
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        return True
