"""The TorchFunctionMode of a capture: it sees each torch call of its thread, passes it on, and records what it was.

In: calls. Out: a Recording. dispatch.py knows what kind of call it is, aliasing.py which value a tensor holds,
opaque_regions.py what no function mode sees. A torch function that is written in Python is opened: its body runs under
the mode, and the builtins that it calls are the operations.

A call is passed on exactly as it came, with one exception: dropout in evaluation and `nn.Identity` return their
argument, and the model gets an alias of it instead, so that their output is a value of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from time import perf_counter_ns as _now
from types import CodeType, FunctionType
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.autograd import forward_ad

from .._ir.memory import storage_of, version_of
from .._ir.node import SAME_TENSOR
from .._ir.ops import Quirk, op_info
from .._ir.runtime import (
    alias,
    deepcopied,
    exception_name,
    exception_text,
    next_functions,
    read_in_another_thread,
    what_is_raised,
)
from .._ir.settings import SMALLEST_NORMAL, are_default
from .._ir.target import Target
from .._ir.torch_private import (
    OpOverload,
    TransformType,
    count_dispatch_modes,
    count_function_modes,
    interpreter_stack,
    is_any_autocast_on,
    is_wrapped,
    peek_interpreter_stack,
    pop_function_mode,
    push_function_mode,
    top_saving_hooks,
    unpack_dual,
    unwrapped,
    without_function_modes,
)
from .._ir.trees import ATOMS, Branch, freeze, freeze_deep, thaw
from .._ir.write import Hole, ViewStep
from .._replay.flag_guards import NOT_NONE, WALK, plain_answer
from ..errors import ReplaylensError, UnannouncedWrite
from .aliasing import Alias
from .autograd_effects import HOOK_ON_STEP, record_hook, set_requires_grad
from .custom_functions import APPLY_BOUND_BEFORE, apply_call
from .dispatch import Handling, Rule, rule_of
from .opaque_regions import AtenWatch, backward_call, differentiate_call, run_opaque
from .output_aliases import (
    CALLER_REFERENCES,
    LISTED_REFERENCES,
    NAME_REFERENCES,
    references_of,
    replace_tensors,
    template_references,
)
from .provenance import Provenance, StartMark, is_older
from .questions import shows_flags
from .recorder import Recorder, RetraceAtDispatch, ThreadRead, first_user_frame, tensors_in
from .recording import (
    PLAIN,
    VALUE_IDS,
    CallRecord,
    CodePosition,
    GuardRecord,
    Recording,
    ScopeRecord,
    SourceRecord,
    ValueId,
    value_ids_in,
    value_ids_with_paths,
)
from .scopes import model_frames, user_frame
from .threads import frame_outside_stdlib
from .user_code import is_torch_code, keeps_exceptions, rebinds, tests_for_none
from .writes import NOT_WHOLE, assign, reshape, resize, write, write_whole

_opened: dict[Any, Callable[..., Any]] = {}
_globals: dict[int, dict[str, Any]] = {}


def opened(function: FunctionType) -> Callable[..., Any]:
    """A copy of a Python-written torch function whose `has_torch_function` checks all answer False, so that its body
    runs.
    """
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


def _never(*values: Any) -> bool:
    return False


_peek = peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_autocast = is_any_autocast_on
_dtype = torch.get_default_dtype
_dispatch_modes = count_dispatch_modes
_saved_hooks = top_saving_hooks
_aten_detach = torch.ops.aten.detach.default
_push = push_function_mode
_pop = pop_function_mode
_frame = sys._getframe
_references = sys.getrefcount
_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_tuple = tuple.__new__
_rules: dict[Any, Rule] = {}
PASS, FRESH, RELU, VIEW = Handling.PASS, Handling.FRESH, Handling.RELU, Handling.VIEW
_NO_KEYWORDS = Branch(dict, (), ())
_Tensor, _Parameter = torch.Tensor, nn.Parameter


class Tracer(Recorder):
    """The capture of one thread."""

    alone = LISTED_REFERENCES  # references to an output that the module has not kept
    has_substitutes = False

    def __init__(self, recording: Recording, origins: Provenance, date: StartMark, deep: bool, unknown: str) -> None:
        super().__init__(recording, origins, date, deep, unknown)
        self.watch = AtenWatch(self) if deep else None
        self.called_at: tuple[CodeType, int] = (Tracer.__init__.__code__, 0)  # the line of the last module's call

    # -- the door ------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _rules.get(func)
        if rule is None:
            rule = self._learn(func)
        how = rule.how
        if how is PASS:
            if self.has_substitutes and rule.special:
                args = self.substituted_args(args)
            return func(*args, **kwargs) if kwargs else func(*args)
        try:
            if self.is_special or _peek() is not None:
                return self._in_region(rule, func, args, kwargs or {})
            if how is FRESH and not kwargs:
                return self._fresh(rule, func, args, 2)
            if how is RELU and not kwargs["inplace"]:  # the commonest wrapper: its body is one of two builtins
                return self._fresh(_RELU, torch.relu, args, 4)
            if how is VIEW and not kwargs:
                return self._view(rule, func, args)
            return self._open_or_call(rule, func, args, kwargs or {})
        except (ReplaylensError, RetraceAtDispatch) as refusal:
            self.refused = self.refused or refusal  # the model may swallow it: capture raises it again
            raise
        except Exception as error:
            self._raised(rule, func, args, kwargs or {}, error)
            raise

    def substituted_args(self, args: Any) -> Any:
        """The arguments of a read; a patched run puts its substitutes in the place of the user's tensors."""
        return args

    def _in_region(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """A call while a region is open: functorch, forward-mode gradients, or a dispatch mode."""
        if _peek() is not None or forward_ad._current_level >= 0:
            return self._in_functorch(func, args, kwargs)
        if self.functorch and (self.watch is None or not self.watch.handling):
            self.leave_functorch()
        if self.watch is not None:
            return self._watched_call(rule, func, args, kwargs)
        self.is_special = self.functorch
        return self._open_or_call(rule, func, args, kwargs)

    def _watched_call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """A call while a dispatch mode is on. An ATen call that comes here is made by a script or beneath a
        transform.
        """
        outer, self.in_aten = self.in_aten, isinstance(func, OpOverload)
        try:
            with self.beneath_leaf():
                if func is _aten_detach and not self.functorch:
                    return self._script_detach(rule, func, args)
                return self._open_or_call(rule, func, args, kwargs)
        finally:
            self.in_aten = outer

    def _script_detach(self, rule: Rule, func: Any, args: Any) -> Any:
        """A detach by the executor of scripts, around gradients of its own: it stops no gradient of the model's."""
        if self.script_is_open:
            return self.leaf(rule, func, args, {}, stands_for=alias)
        if self.grad_mode and args[0].requires_grad:
            self.recording.autograd.forward_only.append("a scripted function")
        return self.leaf(rule, func, args, {})

    def _open_or_call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if rule.how in (Handling.OPEN, Handling.RELU) and func not in self.opened:
            return self._open(func, args, kwargs)
        return self._call(rule, func, args, kwargs)

    def _learn(self, func: Any) -> Rule:
        try:
            rule = _rules[func] = rule_of(func)
        except TypeError:  # an unhashable callable
            rule = Rule(Handling.OPAQUE, getattr(func, "__name__", "call"), may_draw=True)
        return rule

    def _call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """Every call but the commonest: one step slower, and complete."""
        how = rule.how
        if how is Handling.ESCAPE:
            return self._escape(func, args, kwargs)
        if how is Handling.EXPOSE:
            return self._expose(rule, func, args, kwargs)
        if how is Handling.SPECIAL:
            return getattr(self, f"_special_{rule.special}")(rule, func, args, kwargs)
        if how is Handling.OPAQUE:
            return self._opaque(rule, func, args, kwargs)
        targets = _written_by(rule, args, kwargs)
        if len(targets) == 1 and args and targets[0] is args[0] and not (kwargs or rule.reshapes or self.is_special):
            out = write_whole(self, rule, func, args)
            if out is not NOT_WHOLE:
                return out
        if targets:
            return (
                reshape(self, rule, func, args, kwargs)
                if rule.reshapes
                else write(self, rule, func, args, kwargs, targets)
            )
        if (rule.is_fresh or how is FRESH) and not self.is_special and type(self) is Tracer:
            return self._fresh(rule, func, args, 4, kwargs)
        return self.leaf(rule, func, args, kwargs)

    # -- one operation -------------------------------------------------------------------------------------------------

    def _fresh(self, rule: Rule, func: Any, args: Any, depth: int = 2, kwargs: Any = None) -> Any:
        """The commonest call: a builtin whose output is new memory. Written for speed: helpers are inlined."""
        live, refs = self.memory.live, []
        for value in args:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                handle = live.get(id(value))
                if type(handle) is not ValueId:
                    handle = self.parameter(value) if handle is None and kind is _Parameter else self.read(value)
                refs.append(handle)
            elif kind in ATOMS:
                refs.append(value)
            else:
                refs.append(freeze(value, self.read))
        named = {key: freeze(value, self.read) for key, value in kwargs.items()} if kwargs else None
        site = self.opened_site
        if site is None:
            frame = _frame(depth)
            site = (frame.f_code, frame.f_lasti) if frame.f_code is self.forward else self.line(frame)
        start = _now()
        out = func(*args, **kwargs) if kwargs else func(*args)
        took = _now() - start
        is_plain = not (_inference() or _autocast() or _saved_hooks(False)) and _dispatch_modes() == self.outer_modes
        is_plain = is_plain and SMALLEST_NORMAL * 0.5 != 0.0 and _dtype() is self.recording.default_dtype
        is_plain = is_plain and (rule.is_usual is None or rule.is_usual())
        context = self.plain_contexts[_grad_enabled()] if is_plain else self.context()
        recording = self.recording
        if type(out) is _Tensor:
            values = recording.values
            handle = VALUE_IDS[len(values)]
            values.append(out)
            recording.versions.append(out._version if is_plain else version_of(out))
            live[id(out)] = handle
        else:
            handle = self.outputs(out)
        row = (
            func,
            rule.kind,
            refs,
            named,
            handle,
            context,
            self.scope,
            site,
            None,
            False,
            None,
            (),
            False,
            took,
            None,
        )
        recording.records.append(_tuple(CallRecord, row))
        return out

    def _view(self, rule: Rule, func: Any, args: Any, depth: int = 2) -> Any:
        """A view of the first argument, of which its memory is the proof; any other call goes the long way."""
        memory, source = self.memory, args[0]
        known, kind = memory.live.get(id(source)), type(source)
        if known is None or not (kind is _Tensor or kind is _Parameter):
            return self._call(rule, func, args, {})
        others: list[torch.Tensor] = []
        rest = [value if type(value) in ATOMS else freeze(value, others.append) for value in args[1:]]
        if others or list in map(type, args):  # an index that copies
            return self._call(rule, func, args, {})
        handle = known if type(known) is ValueId else self.read(source)
        site = self.opened_site
        if site is None:
            frame = _frame(depth)
            site = (frame.f_code, frame.f_lasti) if frame.f_code is self.forward else self.line(frame)
        start = _now()
        out = func(*args)
        took = _now() - start
        alias = self._viewed(source, out)
        if alias is None:
            return self._call(rule, func, args, {})
        made = self.recording.keep(out)
        if alias.steps:
            self.recording.aliasing.view_of[made] = (alias.handle,)
        step = Branch(ViewStep, (Target.of(func), (Hole.HERE, *rest), _NO_KEYWORDS, (), _grad_enabled()))
        memory.register_view(out, alias.base, (*alias.steps, step), made)
        is_plain = not (_inference() or _autocast() or _saved_hooks(False)) and _dispatch_modes() == self.outer_modes
        is_plain = is_plain and _dtype() is self.recording.default_dtype and are_default()
        context = self.plain_contexts[_grad_enabled()] if is_plain else self.context()
        reads, scope = [handle, *rest], self.scope
        row: Any = (func, rule.kind, reads, {}, made, context, scope, site, None, False, None, (), False, took, None)
        self.recording.records.append(_tuple(CallRecord, row))
        return out

    def _viewed(self, source: torch.Tensor, out: Any) -> Alias | None:
        """The Alias of a known tensor, if `out` is a plain view of it in the storage that is known by it."""
        memory = self.memory
        if type(out) is not _Tensor or out is source or (key := storage_of(out)) is None:
            return None
        known, base = memory.live[id(source)], memory.bases.get(key)
        if isinstance(known, Alias):
            return known if known.base is base else None
        return memory.alias_of(source) if base is None and storage_of(source) == key else None

    # -- Python-written torch functions --------------------------------------------------------------------------------

    def _open(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        """Run the body of a torch function with the mode on, so that its builtins are the operations."""
        outer = self.opened_site
        if outer is None:
            frame = user_frame(_frame(3), 4)
            self.opened_site = self.line(frame) if frame is not None else None
        self.opened.add(func)
        work, self.in_leaf, depth = self.in_leaf, 0, count_function_modes()
        _push(self)
        try:
            return opened(func)(*args, **kwargs)
        finally:
            if count_function_modes() > depth:  # else an interrupt came before a mode within was put back
                _pop()
            self.in_leaf = work
            self.opened.discard(func)
            self.opened_site = outer

    # -- content that leaves torch -------------------------------------------------------------------------------------

    def _escape(self, func: Any, args: Any, kwargs: Any) -> Any:
        reads, named = self.read_all(args, kwargs)
        result = self._escape_text(func, args, kwargs) if func in _WORDS else func(*args, **kwargs)
        number = type(result) is str and isinstance(args[0], torch.Tensor) and args[0].dim() == 0
        plain = type(result) in (bool, int, float, complex) or number  # the content of larger tensors is compared
        self.guard(func, reads, named, result if plain else None, plain)
        return result

    def _escape_text(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The text of a tensor. It shows requires_grad and grad_fn, so these are asked with it."""
        text, tensor = func(*args, **kwargs), args[0]
        if type(text) is not str or not isinstance(tensor, torch.Tensor) or _is_number(func, tensor):
            return text
        given, made = self.flag_of("grad_fn", _GRAD_FN, tensor), tensor.grad_fn
        self.ask("flags", _requires_grad, (tensor,), {}, self.flag_of("requires_grad", _requires_grad, tensor))
        self.ask("flags", _GRAD_FN, (tensor,), {}, plain_answer(given))
        if made is None or given is made:
            return text
        now = "requires_grad=True" if given is None else f"grad_fn=<{type(given).__name__}>"
        return text.replace(f"grad_fn=<{type(made).__name__}>", now)

    def _expose(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if tensor is None:
            return func(*args, **kwargs)
        reads = [self.read(tensor)]
        result = func(*args, **kwargs)
        is_content_read = not op_info(func).has(Quirk.TELLS_ADDRESS)
        if is_content_read:
            self.guard(torch.Tensor.numpy if rule.kind == "numpy" else func, reads, {}, None, False)
        self.memory.expose(tensor, is_content_read)
        if "storage" in rule.kind:
            self.memory.expose_whole_storage(tensor)
        self.exposed = True
        return result

    def _raised(self, rule: Rule, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        """An operation raised, and the model may catch that: a guard holds that it raises again, with the same text if
        the model keeps the exception.

        What a call within this one raised is guarded there. Gradients and transforms do not raise because of content.
        """
        if self.functorch or _was_seen(error, _DOORS) or not (tensors := tensors_in(args, kwargs)):
            return
        if rule.special in _BY_NO_CONTENT:
            if rule.special in _BY_FLAGS:
                with without_function_modes(), self.beneath_leaf():
                    self._ask_flags_of(tensors)
            return
        try:
            with without_function_modes(), self.beneath_leaf():
                reads, named = self.read_all(args, kwargs)
                again = what_is_raised(func, *args, **kwargs) if rule.how is not Handling.OPAQUE else error
                if exception_name(again) != exception_name(error):
                    self._ask_flags_of(tensors)
                    if len({storage_of(tensor) for tensor in tensors}) < len(tensors):  # of shared memory, then
                        self.guard(func, reads, named, None, False)  # which other values may not share
                    return
        except (ReplaylensError, RetraceAtDispatch) as refusal:
            self.refused = self.refused or refusal
            return
        kept = any(keeps_exceptions(frame.f_code) for frame in model_frames(_frame(2)))
        if kept and exception_text(again) == exception_text(error):
            self.guard(func, reads, named, exception_text(error), True, "message")
        else:
            self.guard(func, reads, named, exception_name(error), True, "exception")

    def _ask_flags_of(self, tensors: list[torch.Tensor]) -> None:
        """An exception came of flags or memory layout, not of content: record those as asked by the model."""
        for tensor in tensors:
            for word in (torch.Tensor.requires_grad, torch.Tensor.is_leaf):
                self.ask("flags", word.__get__, (tensor,), {}, word.__get__(tensor))  # type: ignore[attr-defined]
            if tensor.layout is torch.strided:
                self.ask("layout", torch.Tensor.stride, (tensor,), {}, tensor.stride())

    # -- special calls: `_special_*` by the word of their rule ---------------------------------------------------------

    _special_assign, _special_resize, _special_expose = assign, resize, _expose
    _special_differentiate, _special_backward = differentiate_call, backward_call

    def _opaque(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of which nothing is known: what it wrote and drew is found by comparison."""
        tensors = tensors_in(args, kwargs)
        if targets := _written_by(rule, args, kwargs):
            return write(self, rule, func, args, kwargs, targets)
        before = [version_of(tensor) for tensor in tensors]
        with self.beneath_leaf():  # a custom Function inside it is not the model's call
            out = self.leaf(rule, func, args, kwargs)
        if [version_of(tensor) for tensor in tensors] != before:
            raise self.refusal_here(
                f"`{getattr(func, '__name__', func)}` wrote one of its arguments without announcing it.",
                "Declare what it mutates (torch.library: mutates_args), or return a new tensor.",
                kind=UnannouncedWrite,
            )
        return out

    def _special_deepcopy(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        source = self.read(args[0])
        result = func(*args, **kwargs)
        if id(result) in self.memory.live:
            return result
        handle = self.recording.keep(result)
        self.memory.register(result, handle)
        self.append(deepcopied, Rule(Handling.LEAF, "clone"), [source], {}, handle, self.site(), None, False)
        return result

    def _special_asks_layout(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """The model asks how a tensor lies in memory."""
        answer = func(*args, **kwargs)
        self.ask("layout", func, args, kwargs, answer)
        return answer

    def _special_asks_flag(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """The model asks what autograd knows of a tensor. Most such questions of torch's own code are no matter of the
        model's.
        """
        more = args[1:], kwargs
        question = (lambda tensor: func(tensor, *more[0], **more[1])) if any(more) else func
        frame, answer = first_user_frame(_frame(1)), self.flag_of(rule.kind, question, args[0])
        while getattr(func, "__code__", None) is not None and frame.f_code in (func.__code__, _HANDLES.__code__):
            frame = frame.f_back  # written in Python: the frame is its own
        code = frame.f_code
        reads_flags = op_info(code.co_name).has(Quirk.HANDS_ON_FLAGS)
        if reads_flags and not (_grad_enabled() or self.recording.outer_modes[0]):
            self.recording.autograd.forward_only.append(
                f"`{code.co_name}`: it was told that no gradient will be asked for."
            )
        if reads_flags or shows_flags(code) or not is_torch_code(code):
            if rule.kind == "grad_fn" and not _STEP_HOOKS.isdisjoint(code.co_names):
                self.recording.autograd.forward_only.append(HOOK_ON_STEP)
            known = plain_answer(answer)
            if known not in (True, False) and tests_for_none(code, frame.f_lasti):
                known = NOT_NONE
            self.ask("flags", func, args[:1], {}, known)
            if rule.kind == "grad_fn" and WALK in code.co_names:
                self.ask_history(args[0])
        return answer

    def ask_history(self, tensor: torch.Tensor) -> None:
        """The model goes back through the history of a tensor."""
        self.ask("flags", next_functions, (tensor,), {}, plain_answer(next_functions(tensor)))

    def flag_of(self, word: str, func: Any, tensor: torch.Tensor) -> Any:
        """What autograd knows of a tensor; of an alias that stands for an object, what it knows of the object."""
        if (alias := self.aliases.get(id(tensor))) is None:
            return func(tensor)
        if word in ("_base", "_is_view"):
            return alias.is_view if word == "_is_view" else func(tensor) if alias.is_view else None
        if word == "requires_grad" and not tensor.requires_grad:
            return alias.requires_grad
        original, number = alias.original(tensor)
        if isinstance(original, torch.Tensor):
            return func(original)
        return {"grad_fn": original, "output_nr": number}[word] if word in ("grad_fn", "output_nr") else func(tensor)

    def _special_dual(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """Forward-mode gradients begin: until their level ends, the ATen calls beneath are the operations."""
        return self._in_functorch(func, args, kwargs)

    def _special_lift(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """`torch.Tensor([1, 2])`: Python numbers become a tensor. Where they were read from a tensor, that read is
        guarded.
        """
        result = func(*args, **kwargs)
        if self.memory.read(result) is None and not self.from_outside(result):
            self.source("constant", result, "made from Python numbers")
        return result

    def _special_higher_order(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """`torch.cond`: the branch taken runs under the mode. Other higher-order calls are one operation."""
        if rule.kind == "cond" and len(args) >= 3:
            self.recording.took_branch = True
            with self.reentered():
                taken = args[1] if bool(args[0]) else args[2]
                return taken(*(args[3] if len(args) > 3 else ()))
        return self._opaque(Rule(Handling.OPAQUE, rule.kind, may_draw=True, is_dynamic=True), func, args, kwargs)

    def _special_grad_mode(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.recording.outer_modes[0] and not args[0] and not _grad_enabled():
            self.recording.autograd.hidden_no_grad = True  # a no_grad block where gradients are off anyway
        self.grad_mode = args[0]
        return func(*args, **kwargs)

    def _special_hook(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        return record_hook(self, func, args, kwargs)

    def _special_turn(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        return set_requires_grad(self, func, args, kwargs)

    # -- regions: functorch, scripts, everything -----------------------------------------------------------------------

    def _in_functorch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Inside a functorch transform the ATen calls that come out beneath it are the operations."""
        self._enter_functorch()
        if func is torch.Tensor.contiguous and (plain := _beneath(args[0])).is_contiguous(*args[1:], **(kwargs or {})):
            self.ask("layout", func, (plain, *args[1:]), kwargs, SAME_TENSOR)  # it makes no ATen call
        self.differentiating = _is_differentiating()
        if op_info(func).has(Quirk.FOLDS_BY_FLAGS):
            self._ask_folds(args)
        return func(*args, **kwargs)

    def _ask_folds(self, args: Any) -> None:
        """A product beneath a transform is decomposed in one of two ways, by whether its smaller factor needs
        gradients.
        """
        found = [one for arg in args for one in (arg if isinstance(arg, (tuple, list)) else (arg,))]
        plain = [_beneath(one) for one in found if isinstance(one, torch.Tensor)]
        if any(tensor.dim() > 2 for tensor in plain):
            for tensor in plain:
                if tensor.dim() <= 2 and not is_wrapped(tensor):
                    self.ask("flags", _requires_grad, (tensor,), {}, tensor.requires_grad)

    def _enter_functorch(self) -> None:
        if not self.functorch:
            self.functorch = self.is_special = True
            if self.watch is None:
                self.watch = AtenWatch(self)
                self.watch.__enter__()

    def keys_noted(self) -> None:
        """Torch is about to note its dispatch keys, or to put back those that it noted: the watch of a transform that
        runs is on by now, and that of one that has ended is off.
        """
        if _peek() is not None or forward_ad._current_level >= 0:
            self._enter_functorch()
        elif self.functorch and (self.watch is None or not self.watch.handling):
            self.leave_functorch()

    def leave_functorch(self) -> None:
        self.functorch = self.differentiating = False
        if self.watch is not None and not self.deep:
            watch, self.watch = self.watch, None
            watch.__exit__(None, None, None)

    def aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An ATen call that no recorded call made is an operation itself."""
        rule = _rules.get(func) or self._learn(func)
        if rule.how is Handling.PASS:
            return func(*args, **kwargs)
        if func is unpack_dual and args[0].is_inference() and not _inference():
            raise self._refuse_inference_dual()
        self.in_aten = True
        try:
            with self.beneath_leaf():
                return self._call(rule, func, args, kwargs)
        finally:
            self.in_aten = False

    def _refuse_inference_dual(self) -> ReplaylensError:
        refusal = self.refusal_here(
            "a forward-mode gradient (`jvp`, `jacfwd`) ends in a tensor that was made in inference mode, which torch "
            "does not unpack beneath a dispatch mode, by which the gradient is seen.",
            "Use `torch.no_grad()` in the function that is differentiated.",
        )
        self.refused = self.refused or refusal  # the model may swallow it
        return refusal

    # -- modules and custom functions ----------------------------------------------------------------------------

    def module_call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module: what happens until it returns lies in its scope."""
        recording, outer, outer_site, forward = self.recording, self.scope, self.opened_site, self.forward
        if self.wrapped and outer >= 0 and self.wrapped.get(id(module)) is recording.scopes[outer].module:
            return call(module, *args, **kwargs)  # recorded as a call of the compiler's wrapper
        scopes, frame = recording.scopes, _frame(3)
        site = (frame.f_code, frame.f_lasti) if frame.f_code is forward else self.line(frame)
        self.scope = index = len(scopes)
        scopes.append(_tuple(ScopeRecord, (module, outer, site, False)))
        self.opened_site = None
        try:
            self.forward = self.forwards[type(module)]
        except KeyError:
            self._learn_class(type(module))
        records = len(recording.records)
        try:
            if self.has_scripts and self._is_script(module):
                out = self._script_call(module, call, args, kwargs)
            else:
                out = call(module, *args, **kwargs)
            handle, count = self.memory.live.get(id(out)) if type(out) is _Tensor else None, len(recording.records)
            if type(handle) is ValueId and count != records and not self.is_special and _references(out) <= self.alone:
                recording.scope_outputs.append((index, handle, count, ()))
                return out
            beyond = _references(out) - NAME_REFERENCES
            with self.beneath_leaf():
                self.called_at = (frame.f_code, frame.f_lasti)
                out, tree, shared = self._module_output((args, kwargs), out, records, beyond)
            recording.scope_outputs.append((index, tree, len(recording.records), shared))
            return out
        except BaseException:
            self.failed_scope = max(self.failed_scope, index)
            if len(recording.records) == records:  # the model may call it again: that is then its first call
                scopes[index] = ScopeRecord(module, outer, site, is_void=True)
            raise
        finally:
            self.scope, self.opened_site, self.forward = outer, outer_site, forward

    def _learn_class(self, kind: type) -> None:
        """A class of modules runs for the first time. A function mode sees nothing of TorchScript."""
        self.has_scripts |= issubclass(kind, torch.jit.ScriptModule)
        self.forward = self.forwards[kind] = getattr(getattr(kind, "forward", None), "__code__", None)

    def _is_script(self, module: nn.Module) -> bool:
        """True for a module whose calls no function mode sees."""
        return isinstance(module, torch.jit.ScriptModule)

    def _script_call(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outer, self.script_is_open = self.script_is_open, "aten::detach" not in str(module.inlined_graph)
        try:
            return run_opaque(self, call, (module, *args), kwargs)
        finally:
            self.script_is_open = outer

    def _module_output(self, given: Any, out: Any, records: int, beyond: int) -> tuple[Any, Any, tuple[ValueId, ...]]:
        """What a module returns, the tree of its values, and which of these lie in containers that somebody else holds,
        too.

        `beyond`: the number of references to the output that others hold.
        """
        is_beneath = _peek() is not None
        if (is_beneath or forward_ad._current_level >= 0) and _is_differentiating():
            self.recording.hand_offs.differentiated.add(self.scope)
        if is_beneath:
            return out, freeze_deep(out, self._read_wrapped), ()
        if type(out) in PLAIN and len(self.recording.records) == records and given[0] and out is given[0][0]:
            out = self._identity(out)
            return out, self._handed_out(out), ()
        is_tensor = isinstance(out, _Tensor)
        before = self.own_references(out) if is_tensor else 0
        tree = freeze_deep(out, self._handed_out)
        beyond += self.own_references(out) - before if is_tensor else 0
        names = _Renaming(self, tree, given, records)
        held = template_references(tree)
        self.in_trees.update(held)
        beyond += held[id(out)]
        with without_function_modes():  # the model did not ask this
            is_whole = self.recording.scopes[self.scope].module is self.origins.root
            if not is_whole and len(set(names.known)) < len(names.known):
                replace_tensors(out, beyond, _Looking(names), self.in_trees)
            new = replace_tensors(out, beyond, names, self.in_trees) if names.known and not is_whole else out
        if new is not out or names.made:
            self.in_trees.subtract(template_references(tree))
            tree = freeze_deep(new, self._handed_out)
            self.in_trees.update(template_references(tree))
        if not is_whole and len(set(names.known)) < len(names.known):
            self._note_twice(tree)
        return new, tree, tuple(names.shared)

    def _note_twice(self, tree: Any) -> None:
        """A module returned one tensor twice: note its memory, to see later whether that is written."""
        count = Counter(value_ids_in(tree))
        for handle in [handle for handle, times in count.items() if times > 1]:
            known = self.memory.live.get(id(self.recording.values[handle]))
            first = known.base.first if isinstance(known, Alias) else handle
            self.recording.hand_offs.twice[handle] = first, len(self.memory.written)

    def is_patched_output(self, handle: ValueId, names: _Renaming) -> bool:
        """True if a patch gives those who receive this value another one."""
        return False

    def is_renamed(self, tensor: torch.Tensor, handle: ValueId, names: _Renaming, beyond: int) -> bool:
        """True if a tensor that a module returns needs a name of its own: the module has kept a reference to it."""
        held = beyond - self.own_references(tensor)
        return held > 0 and not names.is_given_over(tensor, handle, held)

    def own_references(self, tensor: torch.Tensor) -> int:
        """The number of references to a tensor that the capture itself holds."""
        return references_of(self.memory, tensor)

    def output_alias(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The n-th tensor of a module's output as an alias, since the module has kept the tensor itself."""
        hidden = tensor.requires_grad and not _grad_enabled() and self.recording.outer_modes[0]
        if self.functorch or hidden:
            return tensor
        with without_function_modes(), self.beneath_leaf():
            try:
                made = torch.ops.aten.alias.default(tensor)
            except (RuntimeError, NotImplementedError):
                return tensor
            source = self.read(tensor)
            self.note_alias(tensor, made)
            returns = self.results(made, alias, (tensor,), {}, [tensor])
            self.append(alias, _IDENTITY, [source, number], {}, returns, None, None, False)
            known = self.memory.live.get(id(tensor))
            if isinstance(known, Alias) and known.steps:
                self.recording.hand_offs.views[returns] = known.base.first, len(self.memory.written)
        return made

    def _handed_out(self, tensor: torch.Tensor) -> ValueId | None:
        """The value of a tensor that a module returned. State of the model that nothing has read yet begins here."""
        handle = self.memory.read(tensor)
        if handle is not None:
            return handle
        with without_function_modes(), self.beneath_leaf():  # the model did not ask this
            return self.read(tensor) if self.origins.own_among(tensor) or is_older(tensor, self.date) else None

    def _read_wrapped(self, tensor: torch.Tensor) -> ValueId | None:
        """The value of the plain tensor beneath functorch's wrappers."""
        return self.memory.read(_beneath(tensor))

    def _identity(self, tensor: torch.Tensor) -> torch.Tensor:
        """A module that returns its input: the output gets a name of its own."""
        with without_function_modes(), self.beneath_leaf():
            hidden = tensor.requires_grad and not _grad_enabled() and self.recording.outer_modes[0]
            return tensor if self.functorch or hidden else self.leaf(_IDENTITY, alias, (tensor,), {})

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a custom `autograd.Function`: one node with its own backward, if it reads nothing but its arguments."""
        return apply_call(self, kind, call, args, kwargs)

    def function_unseen(self, kind: type) -> None:
        """A custom function runs whose `apply` torch does not show: its body is recorded, its backward is not."""
        differentiates = torch.is_grad_enabled() or not self.recording.outer_modes[0]
        if differentiates and not self.in_leaf:
            self.recording.autograd.forward_only.append(APPLY_BOUND_BEFORE.format(name=kind.__name__))

    def handing_over(self) -> CodePosition:
        """The line that starts or wakes another thread."""
        return self.line(frame_outside_stdlib(first_user_frame(_frame(1))))

    def read_elsewhere(self, func: Any, args: Any, kwargs: Any, site: Any) -> tuple[Any, Any]:
        """Note a torch call that a job of the forward's makes in another thread. Nothing is recorded yet: what the
        forward's own thread is doing meanwhile is not known there.
        """
        rule = _rules.get(func) or self._learn(func)
        for tensor in tensors_in(args, kwargs) if rule.how is not PASS else ():
            known = self.memory.live.get(id(tensor))
            if isinstance(known, Alias):
                known = known.handle if known.version == known.base.version else known.base.handle
            self.elsewhere.append(ThreadRead(tensor, known, len(self.recording.records), site))
        return args, kwargs

    def met_another_thread(self) -> None:
        """The forward woke or waited for a thread that existed before: it may have read any value."""
        self.elsewhere.append(ThreadRead(None, None, len(self.recording.records), self.handing_over()))

    def note_other_threads(self) -> None:
        """Guard the values that other threads read."""
        records = self.recording.records
        found: dict[ValueId | None, tuple[ThreadRead, list[ValueId]]] = {}
        for read in self.elsewhere:
            if read.tensor is None:
                handles = [
                    handle for record in records[: read.position] for _, handle in value_ids_with_paths(record.returns)
                ]
                found[None] = read, list(dict.fromkeys(handles))
            elif read.handle is not None or self.origins.own_among(read.tensor):
                handle = read.handle if read.handle is not None else self.read(read.tensor)
                found.setdefault(handle, (read, [handle]))
        for read, handles in found.values():
            guard = GuardRecord(read_in_another_thread, handles, {}, None, False, read.position, -1, read.site)
            self.recording.guards.append(guard)

    def note_asked(self) -> None:
        """Parameters and buffers that were asked for a layout or flag, and read by no call, become sources."""
        if not self.recording.asked:
            return
        asked = {id(one.tensor): one.tensor for one in self.recording.asked if one.handle is None}
        for number, tensor in asked.items():
            if number not in self.memory.live and self.origins.own_among(tensor):
                self.read(tensor)
        sources = [record.tensor for record in self.recording.records if isinstance(record, SourceRecord)]
        for tensor in sources:
            if tensor.layout is torch.strided and not tensor.is_nested:
                self.recording.strides[id(tensor)] = tensor.stride()

    def swapped(self) -> None:
        """Two tensors exchanged what they are, and recorded values with them."""
        refusal = self.refusal_here(
            "`torch.utils.swap_tensors` exchanged two tensors, which a program cannot express.",
            "Exchange the names (`a, b = b, a`), or copy the numbers by `copy_`.",
        )
        self.refused = self.refused or refusal  # the model may swallow it
        raise refusal


def _is_differentiating() -> bool:
    """True beneath torch.func.grad, jvp or the like, or a forward-mode gradient."""
    keys = {level.key() for level in interpreter_stack() or ()}
    return bool(keys & {TransformType.Grad, TransformType.Jvp}) or forward_ad._current_level >= 0


def _beneath(tensor: torch.Tensor) -> torch.Tensor:
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


def _written_by(rule: Rule, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call announces that it writes: by its name or schema, and by `out=`."""
    targets = rule.writes(args, kwargs) if rule.writes is not None else []
    return targets if kwargs.get("out") is None else [*targets, *tensors_in((kwargs["out"],), {})]


class _Renaming:
    """Gives the tensors that a module returns a name of their own, where it has kept them."""

    def __init__(self, tracer: Tracer, tree: Any, given: Any, records: int) -> None:
        self.tracer, self.given, self.records = tracer, given, records
        self.known = value_ids_in(tree)
        self.made: dict[int, torch.Tensor] = {}
        self.shared: list[ValueId] = []  # in containers that others hold as well
        self.copies: dict[int, Any] = {}  # of such containers, by id

    def __call__(self, tensor: torch.Tensor, beyond: int) -> torch.Tensor:
        """The tensor, or an alias of it. `beyond`: the number of references to it outside the output."""
        if id(tensor) in self.made:
            return self.made[id(tensor)]
        if type(tensor) not in PLAIN and type(tensor) is not _Parameter:
            return tensor
        handle = self.tracer.memory.read(tensor)
        if handle not in self.known or not self.tracer.is_renamed(tensor, handle, self, beyond):
            return tensor
        if handle in self.shared and not self.tracer.is_patched_output(handle, self):
            return tensor  # one name wherever it lies: the one that others see, too
        return self._handing(tensor, handle)

    def kept(self, container: Any) -> Any:
        """A container that others hold as well; a copy of it, if a tensor in it gets another name."""
        if id(container) not in self.copies:
            old: list[torch.Tensor] = []
            freeze_deep(container, old.append)
            new = {id(tensor): self._in_kept(tensor) for tensor in old}
            same = all(new[id(tensor)] is tensor for tensor in old)
            tree = None if same else freeze_deep(container, lambda tensor: new[id(tensor)])
            self.copies[id(container)] = container if same else thaw(tree, lambda leaf: leaf)
        return self.copies[id(container)]

    def _in_kept(self, tensor: torch.Tensor) -> torch.Tensor:
        if (handle := self.note(tensor)) is None:
            return tensor
        if id(tensor) in self.made:
            return self.made[id(tensor)]
        return self._handing(tensor, handle) if self.tracer.is_patched_output(handle, self) else tensor

    def note(self, tensor: torch.Tensor) -> ValueId | None:
        """The value of a tensor in a container that others hold as well."""
        handle = self.tracer.memory.read(tensor)
        if handle is None or handle not in self.known:
            return None
        self.shared.append(handle)
        return handle

    def is_given_over(self, tensor: torch.Tensor, handle: ValueId, held: int) -> bool:
        """True if the module wrote its only argument and returned it, and only the caller holds it."""
        args, kwargs = self.given
        if held > CALLER_REFERENCES or kwargs or len(args) != 1 or args[0] is not tensor:
            return False
        new = self.tracer.recording.records[self.records :]
        if not any(
            handle == one
            for call in new
            if isinstance(call, CallRecord)
            for _, one in value_ids_with_paths(call.returns)
        ):
            return False
        return held < CALLER_REFERENCES or rebinds(*self.tracer.called_at)

    def _handing(self, tensor: torch.Tensor, handle: ValueId) -> torch.Tensor:
        made = self.tracer.output_alias(tensor, self.known.index(handle))
        if made is not tensor:
            self.made[id(tensor)] = self.made[id(made)] = made
        return made


@frozen(eq=False)
class _Looking:
    """Notes the values in containers that others hold, and changes nothing."""

    names: _Renaming

    def __call__(self, tensor: torch.Tensor, beyond: int) -> torch.Tensor:
        return tensor

    def kept(self, container: Any) -> Any:
        freeze_deep(container, self.names.note)
        return container


def _is_number(func: Any, tensor: torch.Tensor) -> bool:
    """True if a tensor is formatted as a plain number, which shows no flags."""
    return func is torch.Tensor.__format__ and tensor.dim() == 0 and type(tensor) is torch.Tensor


def _was_seen(error: BaseException, doors: tuple[CodeType, ...]) -> bool:
    """True if an exception passed through one of these functions further in."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while trace is not None:
        if trace.tb_frame.f_code in doors:
            return True
        trace = trace.tb_next
    return False


_HANDLES = torch.overrides.handle_torch_function
_DOORS = (Tracer.__torch_function__.__code__,)
_BY_NO_CONTENT = frozenset("differentiate backward grad_mode dual hook turn higher_order expose deepcopy".split())
_BY_FLAGS = frozenset("differentiate backward hook turn deepcopy".split())
_STEP_HOOKS = frozenset(("register_hook", "register_prehook"))
_WORDS = frozenset((torch.Tensor.__repr__, torch.Tensor.__str__, torch.Tensor.__format__))
_GRAD_FN: Any = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_RELU = Rule(Handling.FRESH, "relu")
_IDENTITY = Rule(Handling.LEAF, "identity", is_identity=True)
