"""The one TorchFunctionMode: sees each torch call of its thread, passes it on, and writes down what it was.

In: calls. Out: a Recording. What kind of call it is, the rules say; which value a tensor holds, the memory; where the
blind stretches are, the regions. A call is passed on exactly as it came; only a call that hands its own argument back
(dropout in evaluation, `contiguous` of a contiguous tensor) gives an alias instead, so that its value has its own name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from .._core.node import Generator
from .._core.pure import Derived, Hole, Nth, alias, blank, clear, copied, hooked, mutate, resized
from .._core.target import Target
from .._core.trees import ATOMS, Branch, freeze, freeze_deep
from ..errors import CaptureError, ReplaylensError, UnannouncedWrite, UnknownOrigin
from .builder import CallRecord, GuardRecord, Handle, Recording, ScopeRecord, Site, SourceRecord, is_torch_code, user_line, version_of
from .origins import Origins, is_older
from .randomness import Draws, is_idle
from .regions import AtenWatch, apply_call, backward_call, differentiate_call, watched
from .rules import How, Rule, rule_of
from .scopes import user_site
from .storage import Base, Entry, Memory, geometry_step, step_tree, storage_key
from .twins import twin_of

_peek = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_aten_detach = torch.ops.aten.detach.default
_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack
_frame = sys._getframe
_tuple = tuple.__new__
_rules: dict[Any, Rule] = {}
PASS, FRESH, RELU = How.PASS, How.FRESH, How.RELU
_Tensor, _Parameter = torch.Tensor, nn.Parameter


class NeedsDeepLook(BaseException):
    """A tensor was born in the forward, and the function layer did not see how. Look again at every ATen call."""


class Tracer(TorchFunctionMode):
    """One capture of one thread."""

    def __init__(self, recording: Recording, origins: Origins, date: int, deep: bool, unknown: str) -> None:
        super().__init__()
        self.recording = recording
        self.memory = Memory(recording)
        self.origins = origins
        self.start_ids = origins.start_ids
        self.date = date
        self.unknown = unknown
        self.draws = Draws(recording.draws)
        self.scope = -1
        self.module_calls: dict[int, int] = {}
        self.opened: set[Any] = set()
        self.opened_site: Site | None = None
        self.watch: AtenWatch | None = AtenWatch(self) if deep else None
        self.deep = deep
        self.in_leaf = 0
        self.script_is_open = False  # inside a script that stops no gradients itself
        self.refused: BaseException | None = None
        self.is_special = deep  # a region is open, or a dispatch mode is on
        self.functorch = False
        self.differentiating = False  # inside torch.func.grad and its kin
        self.exposed = False
        self.outer_modes = _dispatch_modes()
        self.contexts: dict[Any, Any] = {}
        self.grad_mode = _grad_enabled()  # as the model set it; beneath a script it is another
        self.in_aten = False

    # -- the door ----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _rules.get(func)
        if rule is None:
            rule = self._learn(func)
        how = rule.how
        if how is PASS:
            return func(*args, **kwargs) if kwargs else func(*args)
        try:
            if self.is_special or _peek() is not None:
                return self._special_door(rule, func, args, kwargs or {})
            if how is FRESH and not kwargs:
                return self._fresh(rule, func, args, 2)
            if how is RELU and not kwargs["inplace"]:  # the commonest Python wrapper: its body is one of two builtins
                return self._fresh(_RELU, torch.relu, args, 4)
            return self._open_or_call(rule, func, args, kwargs or {})
        except (ReplaylensError, NeedsDeepLook) as refusal:
            self.refused = self.refused or refusal  # the model may swallow it: capture raises it again
            raise

    def _special_door(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """The way in while a region is open: functorch, forward-mode gradients, or a dispatch mode that looks on."""
        if _peek() is not None or forward_ad._current_level >= 0:
            return self._in_functorch(func, args, kwargs)
        if self.functorch and (self.watch is None or not self.watch.handling):
            self._leave_functorch()
        if self.watch is not None:
            return self._watched_call(rule, func, args, kwargs)
        self.is_special = self.functorch
        return self._open_or_call(rule, func, args, kwargs)

    def _watched_call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """A call while a dispatch mode is on. An ATen call that is seen here comes from a script or a hidden stretch."""
        outer, self.in_aten = self.in_aten, isinstance(func, torch._ops.OpOverload)
        try:
            with self.at_work():
                if func is _aten_detach and not self.functorch:
                    return self._script_detach(rule, func, args)
                return self._open_or_call(rule, func, args, kwargs)
        finally:
            self.in_aten = outer

    def _script_detach(self, rule: Rule, func: Any, args: Any) -> Any:
        """The executor of scripts detaches what goes into and out of its own gradients: that is no stop of the model's."""
        if self.script_is_open:
            return self._leaf(rule, func, args, {}, stands_for=alias)
        if self.grad_mode and args[0].requires_grad:
            self.recording.one_way.append("a scripted function")
        return self._leaf(rule, func, args, {})

    def _open_or_call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if rule.how in (How.OPEN, How.RELU) and func not in self.opened:
            return self._open(func, args, kwargs)
        return self._call(rule, func, args, kwargs)

    @contextmanager
    def at_work(self) -> Any:
        """Within, ATen calls are the tracer's own or lie beneath a call that it records: a dispatch mode looks away."""
        self.in_leaf += 1
        try:
            yield
        finally:
            self.in_leaf -= 1

    def _learn(self, func: Any) -> Rule:
        try:
            rule = _rules[func] = rule_of(func)
        except TypeError:  # a callable without a hash
            rule = Rule(How.OPAQUE, getattr(func, "__name__", "call"), may_draw=True)
        return rule

    def _call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """Every call but the commonest: one step slower, and complete."""
        how = rule.how
        if how is How.ESCAPE:
            return self._escape(func, args, kwargs)
        if how is How.EXPOSE:
            return self._expose(rule, func, args, kwargs)
        if how is How.SPECIAL:
            return getattr(self, f"_special_{rule.special}")(rule, func, args, kwargs)
        if how is How.OPAQUE:
            return self._opaque(rule, func, args, kwargs)
        targets = rule.writes(args, kwargs) if rule.writes is not None else []
        if kwargs.get("out") is not None:
            out = kwargs["out"]
            targets = [*targets, *(out if isinstance(out, (tuple, list)) else (out,))]
        if targets:
            return self._reshape(rule, func, args, kwargs) if rule.reshapes else self._write(rule, func, args, kwargs, targets)
        return self._leaf(rule, func, args, kwargs)

    # -- one operation ---------------------------------------------------------------------------------------------

    def _fresh(self, rule: Rule, func: Any, args: Any, depth: int = 2) -> Any:
        """The commonest call: a builtin whose output is new memory. Written for speed: nothing here is called twice."""
        live, refs = self.memory.live, []
        for value in args:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                handle = live.get(id(value))
                if type(handle) is not Handle:
                    handle = self._parameter(value) if handle is None and kind is _Parameter else self.read(value)
                refs.append(handle)
            elif kind in ATOMS:
                refs.append(value)
            else:
                refs.append(freeze(value, self.read))
        site = self.opened_site
        if site is None:
            frame = _frame(depth)
            site = (frame.f_code, frame.f_lasti)
        out = func(*args)
        context, recording = self._context(), self.recording
        if type(out) is _Tensor:
            values = recording.values
            handle = Handle(len(values))
            values.append(out)
            recording.versions.append(-1 if context[1] else out._version)
            live[id(out)] = handle
        else:
            handle = self._outputs(out)
        recording.records.append(
            _tuple(CallRecord, (func, rule.kind, refs, None, handle, context, self.scope, site, None, False, None, (), False))
        )
        return out

    def _leaf(self, rule: Rule, func: Any, args: Any, kwargs: Any, stands_for: Any = None) -> Any:
        """One operation that does not write: its output may be a view, it may draw, its shape may depend on content."""
        reads, named = self._read_all(args, kwargs)
        site = self._site()
        draws = self.draws.before(args, kwargs) if rule.may_draw and not is_idle(func.__name__, args, kwargs) else None
        out = self._run(func, args, kwargs)
        key = self.draws.after(*draws) if draws is not None else None
        tensors = _tensors_in(args, kwargs)
        if rule.is_undefined:
            self._run(clear, (out,), {})
            reads = [Target.of(func), *reads]
        if isinstance(out, torch.Tensor) and any(out is tensor for tensor in tensors):
            own = self._own_name(rule, out)
            if own is None:
                return out
            out = own
        func = stands_for or func
        returns = self._results(out, func, args, kwargs, tensors)
        if returns is None:
            return out
        func = blank if rule.is_undefined else func
        if not tensors and torch.get_default_dtype() != self.recording.default_dtype and isinstance(out, torch.Tensor):
            named = {**named, "dtype": out.dtype}
        self._append(func, rule, reads, named, returns, site, key, rule.is_dynamic or self._depends_on_content(func, args))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call itself."""
        return func(*args, **kwargs)

    def _own_name(self, rule: Rule, out: torch.Tensor) -> torch.Tensor | None:
        """Dropout in evaluation gives its argument back: an alias of it, so that its value has a name of its own.

        None for calls like `contiguous`: they stay the argument, and are no node. A model may ask `x.to(...) is x`.
        """
        if not rule.is_identity or type(out) is not torch.Tensor:
            return None
        if out.requires_grad and not _grad_enabled() and self.recording.ambient[0]:
            return None  # a view made here could not be written later, where gradients are on again
        try:
            return torch.ops.aten.alias.default(out)  # type: ignore[no-any-return]
        except (RuntimeError, NotImplementedError):
            return None

    def _append(self, func: Any, rule: Rule, args: Any, kwargs: Any, returns: Any, site: Any, draws: Any, dynamic: bool) -> None:
        if draws is not None and "generator" in kwargs:
            kwargs = {**kwargs, "generator": Generator(draws)}
        record = CallRecord(
            func, rule.kind, args, kwargs, returns, self._context(), self.scope, site, draws, dynamic, None, (), self.differentiating
        )
        self.recording.records.append(record)

    def _results(self, out: Any, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Handles for all tensors in an output, as a tree of its shape; None where it has none."""
        found = False

        def leaf(tensor: torch.Tensor, part: tuple[int, ...]) -> Handle:
            nonlocal found
            found = True
            if tensor.is_nested:
                raise CaptureError(f"the forward makes nested tensors, which have no one shape. Capture it on padded ones.{self._where()}")
            known = self.memory.live.get(id(tensor))
            if known is not None and any(tensor is other for other in tensors):
                return self._know_again(tensor)
            base = self.memory.base_at(storage_key(tensor), tensors)
            handle = self.recording.keep(tensor)
            if base is None:
                self.memory.know(tensor, handle)
            else:
                self._know_view(tensor, handle, base, func, args, kwargs, tensors, part)
            return handle

        returns = _number(out, leaf, ())
        return returns if found else None

    def _know_again(self, tensor: torch.Tensor) -> Handle:
        """A call with several outputs gave an argument back among them: the same object, now that output's value."""
        entry = self.memory.entry(tensor)
        entry.handle = handle = self.recording.keep(tensor)
        if not entry.steps:
            entry.base.handle = handle
        entry.base.held.append(handle)
        return handle

    def _know_view(
        self, tensor: Any, handle: Handle, base: Base, func: Any, args: Any, kwargs: Any, tensors: list[Any], part: Any
    ) -> None:
        source = next((t for t in tensors if self._base_of(t) is base), None)
        if source is None:  # it shares memory with something that is no argument
            self.memory.look(tensor, base, (geometry_step(tensor, base),), handle)
            return
        entry = self.memory.entry(source)
        name = getattr(func, "__name__", "")
        if name in ("as_strided", "as_strided_") or (isinstance(func, torch._ops.OpOverload) and "as_strided" in name):
            steps: tuple[Any, ...] = (geometry_step(tensor, base),)
        elif part and tensor.layout is torch.strided and tensor.dtype == source.dtype and len(part) == 1:
            steps = (*entry.steps, self.memory.part_step(source, tensor, name, args, kwargs, part[0]))
        else:
            steps = (*entry.steps, self.memory.step(func, args, kwargs, source, part))
        self.memory.look(tensor, base, steps, handle)

    def _base_of(self, tensor: torch.Tensor) -> Base | None:
        known = self.memory.live.get(id(tensor))
        return known.base if isinstance(known, Entry) else None

    def _outputs(self, out: Any) -> Any:
        """Handles for the outputs of a call whose outputs are new memory."""

        def leaf(tensor: torch.Tensor, part: tuple[int, ...]) -> Handle:
            handle = self.recording.keep(tensor)
            self.memory.know(tensor, handle)
            return handle

        return _number(out, leaf, ())

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> Handle:
        """The Handle of the value that a tensor holds now."""
        handle = self.memory.read(tensor)
        if handle is not None:
            return handle
        return self._parameter(tensor) if type(tensor) is _Parameter else self._origin(tensor)

    def _parameter(self, tensor: torch.Tensor) -> Handle:
        """A parameter that is read for the first time: most belong to the module that is running."""
        number, recording, memory = id(tensor), self.recording, self.memory
        if self.scope >= 0 and number in self.start_ids and not memory.written:
            module = recording.scopes[self.scope][0]
            for key, value in module._parameters.items():
                if value is tensor:
                    values = recording.values
                    handle = memory.live[number] = Handle(len(values))
                    values.append(tensor)
                    recording.versions.append(version_of(tensor))
                    recording.records.append(_tuple(SourceRecord, ("parameter", handle, (module, key), None, tensor)))
                    return handle
        return self._origin(tensor)

    def _read_all(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        read = self.read
        reads = [freeze(value, read) for value in args]
        return reads, {key: freeze(value, read) for key, value in kwargs.items()} if kwargs else {}

    def source(self, kind: str, tensor: torch.Tensor, where: Any) -> Handle:
        """A tensor that no call made begins here."""
        if tensor.is_nested:
            raise CaptureError(f"the forward computes with nested tensors, which have no one shape. Capture it on padded ones.{self._where()}")
        handle = self.recording.keep(tensor)
        site = self._site() if kind == "constant" else None
        self.recording.records.append(_tuple(SourceRecord, (kind, handle, where, site, tensor)))
        self.memory.live[id(tensor)] = handle
        return handle

    def _origin(self, tensor: torch.Tensor) -> Handle:
        """What a tensor is that no recorded call made; see origins.py."""
        running = self.recording.scopes[self.scope].module if self.scope >= 0 else None
        state = self.origins.state(tensor, running)
        if state is not None and not self.origins.was_there(tensor):
            state = None  # assigned in the forward: it is what it was made from
        base = self.memory.base_anywhere(tensor) if state is None or self._wrote_sources() else None
        if base is not None:
            return self._alias_without_call(tensor, base)
        if state is not None:
            return self.source(state[0], tensor, state[1])
        older = is_older(tensor, self.date)
        if older and (where := self.origins.attribute(tensor)) is not None:
            return self.source("attribute", tensor, where)
        if older:
            return self.source("constant", tensor, "older than the capture")
        if not _owns_memory(tensor) and tensor.grad_fn is None:
            return self.source("constant", tensor, "made outside torch")
        if self.deep and self.in_aten and tensor.dim() == 0 and not tensor.requires_grad:
            return self.source("constant", tensor, "a number that a script made a tensor")
        if self.unknown == "constant":
            return self.source("constant", tensor, "of unknown origin, taken for a constant")
        if not self.deep:
            raise NeedsDeepLook
        raise UnknownOrigin(self._unknown_text(tensor))

    def _wrote_sources(self) -> bool:
        return any(base.version for base in self.memory.bases.values())

    def _alias_without_call(self, tensor: torch.Tensor, base: Base) -> Handle:
        """`nn.Parameter(x)`, `x.as_subclass(...)`: a new object over known memory."""
        root, plain = base.root, (torch.Tensor, nn.Parameter)
        self.recording.aliased |= base.version > 0 and self.memory.is_input(base)
        steps: tuple[Any, ...] = ()
        if (tensor.shape, tensor.stride(), tensor.storage_offset()) != (root.shape, root.stride(), root.storage_offset()):
            steps = (geometry_step(tensor, base),)
        if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad) or root.requires_grad > tensor.requires_grad:
            steps = (*steps, step_tree(torch.Tensor.detach, (Hole.HERE,), None, (), _grad_enabled()))
        if type(tensor) is not type(root) and (type(tensor) not in plain or type(root) not in plain):
            steps = (*steps, step_tree(torch.Tensor.as_subclass, (Hole.HERE, type(tensor)), None, (), _grad_enabled()))
        handle = base.handle
        self.memory.look(tensor, base, steps, handle)
        if steps:
            entry = self.memory.entry(tensor)
            entry.version = -1
            return self.read(tensor)
        return handle

    def _unknown_text(self, tensor: torch.Tensor) -> str:
        what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        return (
            f"a tensor {what} reached an operation, and nothing in this thread was seen to make it."
            f"{self._where()}\nIt may be the result of another thread, or of code that hides its calls from torch. Compute it in "
            "the forward's own thread, or pass it in as an input; capture(..., unknown='constant') keeps such tensors as constants."
        )

    def _where(self) -> str:
        site = self._site()
        if site is None:
            return ""
        source = user_line(self.recording, site, self.scope)
        return f"\n    {source.file.rsplit('/', 1)[-1]}:{source.line}    {source.text}" if source else ""

    def _site(self) -> Site | None:
        if self.opened_site is not None:
            return self.opened_site
        frame = _frame(1)
        home = __file__
        while frame is not None and (frame.f_code.co_filename == home or frame.f_code.co_filename.endswith("_capture/regions.py")):
            frame = frame.f_back  # type: ignore[assignment]
        return user_site(frame) or ((frame.f_code, frame.f_lasti) if frame is not None else None)

    def _context(self) -> Any:
        """The modes that a call runs under, one object for equal ones."""
        key = (self.grad_mode if self.in_aten and not self.functorch else _grad_enabled(), _inference(), _autocast())
        watch = self.watch
        if _dispatch_modes() != self.outer_modes + (watch is not None and watch.entered and not watch.handling):
            raise CaptureError(f"a dispatch mode of the model's own is on; what it does cannot be seen.{self._where()}")
        if key[0] and (hooks := _saved_hooks(False)) is not None and not hooks[0].__module__.startswith("torch."):
            self.recording.one_way.append("saved_tensors_hooks")
        if key[2]:
            return self._autocast_context(key)
        known = self.contexts.get(key)
        if known is None:
            known = self.contexts[key] = (key[0], key[1], ())
        return known

    def _autocast_context(self, key: tuple[bool, bool, bool]) -> Any:
        modes = []
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.append((device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()))
        return key[0], key[1], tuple(modes)

    @staticmethod
    def _depends_on_content(func: Any, args: Any) -> bool:
        """An index by a mask, or a whole number that is a tensor: the shape of the output is content."""
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            flat = [part for item in index for part in ((item.start, item.stop, item.step) if type(item) is slice else (item,))]
            return any(isinstance(i, (torch.Tensor, list)) for i in flat)
        if name == "where":
            return len(args) == 1
        return any(isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() == 0 for value in args[1:])

    # -- Python-written torch functions ----------------------------------------------------------------------------

    def _open(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        """Run the body of a torch function with the mode on, so that its builtins are the operations."""
        outer = self.opened_site
        if outer is None:
            self.opened_site = user_site(_frame(3), 4)
        self.opened.add(func)
        work, self.in_leaf = self.in_leaf, 0
        _push(self)
        try:
            return (_opened.get(func) or opened(func))(*args, **kwargs)
        finally:
            _pop()
            self.in_leaf = work
            self.opened.discard(func)
            self.opened_site = outer

    @contextmanager
    def seeing(self) -> Any:
        """Within, the mode sees calls again although one of its own is being handled."""
        work, self.in_leaf = self.in_leaf, 0
        _push(self)
        try:
            yield
        finally:
            _pop()
            self.in_leaf = work

    # -- writes ------------------------------------------------------------------------------------------------------

    def _write(self, rule: Rule, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Any:
        """A call that writes in place: its functional twin, or `mutate`; afterwards its bases have new values."""
        targets = list({id(target): target for target in targets}.values())
        tensors = _tensors_in(args, kwargs)
        for tensor in tensors:
            self.read(tensor)
        entries = [self.memory.entry(target) for target in targets]
        bases = list({id(entry.base): entry.base for entry in entries}.values())
        site = self._site()
        draws = self.draws.before(args, kwargs) if rule.may_draw and not is_idle(func.__name__, args, kwargs) else None
        for tensor in tensors:  # any argument may share memory with a target
            if self._base_of(tensor) is None and any(storage_key(tensor) == storage_key(b.root) for b in bases):
                self.memory.entry(tensor)
        for base in bases:
            self.memory.share(base)
        record = self._write_record(func, args, kwargs, targets, entries, bases, draws is not None)
        geometry = [_geometry(target) for target in targets]
        counters = [version_of(base.root) for base in bases]
        for base in bases:
            self.memory.preserve(base)
        try:
            out = self._run(func, args, kwargs)
        except Exception as error:
            if any(counter == -1 or version_of(base.root) != counter for base, counter in zip(bases, counters, strict=True)):
                raise CaptureError(f"`{rule.kind}` wrote a part and then raised {error!r}; what it left cannot be known.") from error
            for base in bases:
                base.held.append(base.handle)
            raise
        key = self.draws.after(*draws) if draws is not None else None
        if [_geometry(target) for target in targets] != geometry:
            return self._resized(rule, func, args, kwargs, targets, out, site)
        self._append_write(rule, record, targets, entries, bases, tensors, out, site, key)
        return out

    def _write_record(
        self, func: Any, args: Any, kwargs: Any, targets: Any, entries: Any, bases: Any, may_draw: bool
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """The pure call for a write, its arguments read before it happens."""
        shared = [t for t in _tensors_in(args, kwargs) if self._base_of(t) in bases and not any(t is x for x in targets)]
        if len(targets) == 1 and not entries[0].steps and not shared and not may_draw:
            target = targets[0]
            lost = target.requires_grad and not _grad_enabled()
            others = [tensor for tensor in _tensors_in(args, kwargs) if tensor is not target]
            if not lost and (twin := twin_of(func, args, kwargs, target, others)) is not None:
                function, arguments, named = twin
                reads, read_named = self._read_all(arguments, named)
                return function, reads, read_named
        numbers = {id(base): number for number, base in enumerate(bases)}

        def leaf(tensor: torch.Tensor) -> Any:
            for number, target in enumerate(targets):
                if tensor is target:
                    return Branch(Nth, (number,))
            base = self._base_of(tensor)
            if base is not None and id(base) in numbers:
                return Branch(Derived, (numbers[id(base)], self.memory.entry(tensor).steps))
            return self.read(tensor)

        named = Branch(dict, tuple([freeze(value, leaf) for value in kwargs.values()]), tuple(kwargs))
        written = tuple([Branch(Derived, (numbers[id(e.base)], e.steps)) for e in entries])
        reads = [Target.of(func), tuple([base.handle for base in bases]), tuple([freeze(value, leaf) for value in args]), named]
        return mutate, [*reads, written], {}

    def _append_write(
        self, rule: Rule, record: Any, targets: Any, entries: Any, bases: Any, tensors: Any, out: Any, site: Any, key: Any
    ) -> None:
        function, reads, named = record
        keep, memory = self.recording.keep, self.memory
        for base in bases:
            memory.wrote(base, keep(base.root), not self.in_aten)
        whole = tuple([base.handle for base in bases])
        views = []
        for target, entry in zip(targets, entries, strict=True):
            entry.handle = keep(target) if entry.steps else entry.base.handle
            entry.version = entry.base.version
            views.append(entry.handle)
            if entry.steps:
                entry.base.held.append(entry.handle)
        if function is not mutate:
            self._append(function, rule, reads, named, whole[0], site, key, False)
            return
        fresh: dict[int, Handle] = {}

        def leaf(tensor: torch.Tensor, part: Any) -> Any:
            known = self.memory.live.get(id(tensor))
            if known is not None and any(tensor is other for other in tensors):
                return None
            base = memory.base_at(storage_key(tensor), tensors)
            handle = fresh[id(tensor)] = keep(tensor)
            if base is None:
                memory.know(tensor, handle)
            else:
                memory.look(tensor, base, (geometry_step(tensor, base),), handle)
            return handle

        results = _number(out, leaf, ())

        def seen(tensor: torch.Tensor) -> Any:
            return fresh.get(id(tensor)) or self.read(tensor)

        result = freeze(out, seen) if _tensors_in((out,), {}) else (views[0] if len(views) == 1 else tuple(views))
        if key is not None and "generator" in dict(zip(reads[3].keys or (), reads[3].items, strict=True)):
            items = [Generator(key) if k == "generator" else v for k, v in zip(reads[3].keys, reads[3].items, strict=True)]
            reads[3] = Branch(dict, tuple(items), reads[3].keys)
        returns = (results, tuple(views), whole)
        context, inside = self._context(), self.differentiating
        record = CallRecord(mutate, rule.kind, reads, {}, returns, context, self.scope, site, key, False, result, (), inside)
        self.recording.records.append(record)

    def _resized(self, rule: Rule, func: Any, args: Any, kwargs: Any, targets: Any, out: Any, site: Any) -> Any:
        """`out=` of another size: torch gave it new memory, so it is an output like any other."""
        given = kwargs.get("out")
        outs = list(given) if isinstance(given, (tuple, list)) else [given]
        if given is None or any(len([e for e in self._entries_on(self.memory.entry(t).base)]) > 1 for t in targets):
            raise CaptureError(f"`{rule.kind}` changed the size of memory that other tensors look at.{self._where()}")
        named = {key: value for key, value in kwargs.items() if key != "out"}
        reads, read_named = self._read_all([a for a in args], named)
        for target in outs:
            self._forget(target)
        returns = self._outputs(out)
        self._append(func, rule, reads, read_named, returns, site, None, False)
        return out

    def _entries_on(self, base: Base) -> list[Entry]:
        return [entry for entry in self.memory.live.values() if isinstance(entry, Entry) and entry.base is base]

    def _forget(self, tensor: torch.Tensor) -> None:
        known = self.memory.live.pop(id(tensor), None)
        if isinstance(known, Entry):
            self.memory.bases = {key: base for key, base in self.memory.bases.items() if base is not known.base}
        self.memory.keep_alive.append(tensor)

    def _reshape(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """`t_()`, `unsqueeze_()`: the object looks at the same memory in another way from now on."""
        tensor = args[0]
        self.read(tensor)
        entry = self.memory.entry(tensor)
        pure = getattr(torch.Tensor, func.__name__[:-1]) if not isinstance(func, torch._ops.OpOverload) else None
        if pure is None:
            pure = getattr(torch.ops.aten, func._schema.name.split("::")[1][:-1])
        with torch.enable_grad():
            step = self.memory.step(pure, args, kwargs, tensor, ())
        site, source = self._site(), entry.handle
        base, steps, is_root = entry.base, entry.steps, entry.base.root is tensor
        self.memory.part_from(tensor)
        out = self._run(func, args, kwargs)
        if func.__name__ == "as_strided_":
            steps, step = (), geometry_step(tensor, base)
        handle = self.recording.keep(tensor)
        del is_root
        self.memory.look(tensor, base, (*steps, step), handle)
        base.counter = version_of(base.root)
        fill: Callable[[Any], Any] = lambda leaf: source if leaf is Hole.HERE else leaf  # noqa: E731
        reads = [fill(value) for value in step.items[1]]
        self._append(step.items[0].function, rule, reads, {}, handle, site, None, False)
        return out

    # -- content that leaves torch -----------------------------------------------------------------------------------

    def _escape(self, func: Any, args: Any, kwargs: Any) -> Any:
        reads, named = self._read_all(args, kwargs)
        result = self._run(func, args, kwargs)
        plain = type(result) in (bool, int, float, complex) or (type(result) is str and len(result) < 200)
        self._guard(func, reads, named, result if plain else None, plain)
        return result

    def _expose(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if tensor is not None:
            reads = [self.read(tensor)]
            result = self._run(func, args, kwargs)
            if rule.kind not in ("dataptr", "dlpackdevice", "cudaarrayinterface"):
                self._guard(torch.Tensor.numpy if rule.kind == "numpy" else func, reads, {}, None, False)
            self.memory.expose(tensor)
            self.exposed = True
            return result
        return self._run(func, args, kwargs)

    def _guard(self, func: Any, reads: Any, named: Any, result: Any, plain: bool) -> None:
        position = len(self.recording.records)
        record = GuardRecord(func, reads, named, result, plain, position, self.scope, self._guard_site())
        self.recording.guards.append(record)

    def _guard_site(self) -> Site | None:
        site = self._site()
        scope = self.scope
        while (site is None or is_torch_code(site[0])) and scope >= 0:
            site, scope = self.recording.scopes[scope].site, self.recording.scopes[scope].parent
        return site

    # -- calls with a way of their own ---------------------------------------------------------------------------------

    def _opaque(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of which nothing is known: what it wrote and drew is found by looking."""
        tensors = _tensors_in(args, kwargs)
        if rule.writes is not None and (targets := rule.writes(args, kwargs)):
            return self._write(rule, func, args, kwargs, targets)
        before = [version_of(tensor) for tensor in tensors]
        out = self._leaf(rule, func, args, kwargs)
        if [version_of(tensor) for tensor in tensors] != before:
            raise UnannouncedWrite(
                f"`{getattr(func, '__name__', func)}` wrote one of its arguments, and nothing announces that it does.{self._where()}\n"
                "Declare what it mutates (torch.library: mutates_args), or let it return a new tensor."
            )
        return out

    def _special_assign(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """`t.data = u`, `t.set_(u)`: the object looks at other memory from now on."""
        tensor, value = args[0], args[1] if len(args) > 1 else kwargs.get("source")
        if not isinstance(value, torch.Tensor) or len(args) > 2:
            raise CaptureError(f"`{rule.kind}` gives a tensor raw memory, which a program cannot say.{self._where()}")
        self.read(tensor)
        source = self.read(value)
        self.memory.part_from(tensor)
        result = self._run(func, args, kwargs)
        base, steps = self.memory.entry(value).base, self.memory.entry(value).steps
        step = step_tree(torch.Tensor.detach, (Hole.HERE,), None, (), True)
        handle = self.recording.keep(tensor)
        self.memory.look(tensor, base, (*steps, step), handle)
        self._append(torch.Tensor.detach, Rule(How.LEAF, "data"), [source], {}, handle, self._site(), None, False)
        return result

    def _special_resize(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        self.read(tensor)
        before = _geometry(tensor)
        self.memory.part_from(tensor)
        result = self._run(func, args, kwargs)
        if _geometry(tensor) == before:
            return result
        if len(self._entries_on(self.memory.entry(tensor).base)) > 1:
            raise CaptureError(f"`{rule.kind}` changed the size of memory that other tensors look at.{self._where()}")
        source = self.memory.entry(tensor).handle
        self._forget(tensor)
        clear(tensor.view(-1)[self.recording.values[source].numel() :])
        handle = self.recording.keep(tensor)
        self.memory.know(tensor, handle)
        reads = [source, tuple(tensor.shape)]
        self._append(resized, rule, reads, {}, handle, self._site(), None, False)
        return result

    def _special_deepcopy(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        source = self.read(args[0])
        result = self._run(func, args, kwargs)
        if id(result) in self.memory.live:
            return result
        handle = self.recording.keep(result)
        self.memory.know(result, handle)
        self._append(copied, Rule(How.LEAF, "clone"), [source], {}, handle, self._site(), None, False)
        return result

    def _special_dual(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """Forward-mode gradients begin: until their level ends, what counts are the ATen calls beneath."""
        return self._in_functorch(func, args, kwargs)

    def _special_lift(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """`torch.Tensor([1, 2])`: numbers of Python become a tensor. What they were read from is guarded."""
        result = func(*args, **kwargs)
        if self.memory.read(result) is None:
            self.source("constant", result, "made from Python numbers")
        return result

    def _special_expose(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        return self._expose(rule, func, args, kwargs)

    def _special_higher_order(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """`torch.cond`: the branch that is taken runs under the mode. Others run as they are and are one call."""
        if rule.kind == "cond" and len(args) >= 3:
            with self.seeing():
                taken = args[1] if bool(args[0]) else args[2]
                return taken(*(args[3] if len(args) > 3 else ()))
        return self._opaque(Rule(How.OPAQUE, rule.kind, may_draw=True, is_dynamic=True), func, args, kwargs)

    def _special_grad_mode(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.recording.ambient[0] and not args[0] and not _grad_enabled() and not self.in_leaf:
            self.recording.hidden_no_grad = True  # a no_grad block where nothing had a gradient anyway
        self.grad_mode = args[0]
        return func(*args, **kwargs)

    def _special_hook(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """A hook on a tensor's gradient: a value of its own from here on."""
        tensor = args[0]
        result = func(*args, **kwargs)
        if tensor.is_leaf or self.functorch:
            return result
        source = self.read(tensor)
        hook = args[1] if len(args) > 1 else kwargs["hook"]
        site = self._site()
        handle = self._know_again(tensor)
        self._append(hooked, Rule(How.LEAF, "hook"), [source, hook], {}, handle, site, None, False)
        return result

    def _special_differentiate(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        return differentiate_call(self, func, args, kwargs)

    def _special_backward(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        return backward_call(self, func, args, kwargs)

    # -- regions: functorch, scripts, everything ------------------------------------------------------------------------

    def _in_functorch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Inside a functorch transform: what counts are the ATen calls that come out beneath it."""
        if not self.functorch:
            self.functorch = self.is_special = True
            if self.watch is None:
                self.watch = AtenWatch(self)
                self.watch.__enter__()
        keys = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
        gradients = {torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp}
        self.differentiating = bool(keys & gradients) or forward_ad._current_level >= 0
        return func(*args, **kwargs)

    def _leave_functorch(self) -> None:
        self.functorch = self.differentiating = False
        if self.watch is not None and not self.deep:
            watch, self.watch = self.watch, None
            watch.__exit__(None, None, None)

    def aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An ATen call that no recorded call made: it is an operation itself."""
        rule = _rules.get(func) or self._learn(func)
        if rule.how is How.PASS:
            return func(*args, **kwargs)
        self.in_aten = True
        try:
            with self.at_work():
                return self._call(rule, func, args, kwargs)
        finally:
            self.in_aten = False

    # -- modules and custom functions -------------------------------------------------------------------------------------

    def module_call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module runs: what happens until it returns lies in its scope."""
        recording, outer, outer_site = self.recording, self.scope, self.opened_site
        calls, scopes, key = self.module_calls, recording.scopes, id(module)
        number = calls[key] = calls.get(key, 0) + 1
        frame = _frame(2)
        self.scope = index = len(scopes)
        scopes.append(_tuple(ScopeRecord, (module, number, outer, (frame.f_code, frame.f_lasti))))
        self.opened_site = None
        records = len(recording.records)
        try:
            if type(module) not in _plain_modules and is_script(module):
                out = self._script_call(module, call, args, kwargs)
            else:
                out = call(module, *args, **kwargs)
            handle = self.memory.live.get(id(out)) if type(out) is _Tensor else None
            if type(handle) is Handle and not self.is_special and len(recording.records) != records:
                recording.scope_outputs.append((index, handle))
                return out
            with self.at_work():
                out, tree = self._module_output(module, args, out, len(recording.records) == records)
            recording.scope_outputs.append((index, tree))
            return out
        finally:
            self.scope = outer
            self.opened_site = outer_site

    def _script_call(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outer, self.script_is_open = self.script_is_open, "aten::detach" not in str(module.inlined_graph)
        try:
            return watched(self, call, (module, *args), kwargs)
        finally:
            self.script_is_open = outer

    def _module_output(self, module: nn.Module, args: Any, out: Any, did_nothing: bool) -> tuple[Any, Any]:
        """What a module gave, and which values that is."""
        if _peek() is not None:
            return out, freeze_deep(out, self._read_wrapped)
        if type(out) is not _Tensor:
            return out, freeze_deep(out, self.memory.read)
        if did_nothing and args and out is args[0]:
            out = self._identity(out)
        return out, self.memory.read(out)

    def _read_wrapped(self, tensor: torch.Tensor) -> Handle | None:
        """The plain tensor beneath functorch's wrappers."""
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return self.memory.read(tensor)

    def _identity(self, tensor: torch.Tensor) -> torch.Tensor:
        """A module that hands its input on: its output gets a name of its own."""
        if self.functorch or (tensor.requires_grad and not _grad_enabled() and self.recording.ambient[0]):
            return tensor
        with torch._C.DisableTorchFunction(), self.at_work():
            return self._leaf(_IDENTITY, alias, (tensor,), {})  # type: ignore[no-any-return]

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A custom `autograd.Function`: one node with its own backward, if all that it reads are its arguments."""
        return apply_call(self, kind, call, args, kwargs)


_RELU = Rule(How.FRESH, "relu")
_IDENTITY = Rule(How.LEAF, "identity", is_identity=True)
_opened: dict[Any, Callable[..., Any]] = {}
_globals: dict[int, dict[str, Any]] = {}


def opened(function: FunctionType) -> Callable[..., Any]:
    """A copy of a Python-written torch function that does not ask whether somebody overrides it, and so runs its body."""
    made = _opened.get(function)
    if made is None:
        own = function.__globals__
        answers = _globals.get(id(own))
        if answers is None:
            no = {name: _never for name in own if name.startswith("has_torch_function")}
            answers = _globals[id(own)] = {**own, **no}
        made = FunctionType(function.__code__, answers, function.__name__, function.__defaults__, function.__closure__)
        made.__kwdefaults__ = function.__kwdefaults__
        _opened[function] = made
    return made


_plain_modules: set[type] = set()


def is_script(module: nn.Module) -> bool:
    """Is the module TorchScript, of which a function mode sees nothing?"""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    _plain_modules.add(type(module))
    return False


def _never(*values: Any) -> bool:
    return False


def _number(value: Any, leaf: Callable[[torch.Tensor, tuple[int, ...]], Any], part: tuple[int, ...]) -> Any:
    """A call's output as a tree: `leaf` of each tensor and the way to it."""
    if isinstance(value, torch.Tensor):
        return leaf(value, part)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return tuple([_number(item, leaf, (*part, number)) for number, item in enumerate(value)])
    return None


def _tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> None:
        found.append(tensor)

    for value in args:
        freeze(value, leaf)
    for value in kwargs.values():
        freeze(value, leaf)
    return found


def _geometry(tensor: torch.Tensor) -> Any:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.dtype, tuple(tensor.shape), (tensor.stride(), tensor.storage_offset()) if strided else None


def _owns_memory(tensor: torch.Tensor) -> bool:
    """Did torch allocate this memory? False for arrays of numpy and the like."""
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        return True
