"""Where the model is: in which module call, at which line of the user's code.

In: module calls as they happen. Out: for each call the module, its number, the line it was made from, and its output.

While captures run, these entries into torch are ours. Each looks for a capture of its own thread and otherwise passes
on; they are put back when the last capture ends.

* `nn.Module.__call__`: global forward hooks cost six times as much, and see an output before the user's hooks change
  it. The function stays and its code is exchanged: a new attribute of a class with a thousand subclasses would have
  Python look up the methods of each anew, which takes longer than the capture of a small model.
* `Function.apply`, one class below `Function` itself, where an `apply` that was taken from its class earlier (`swish =
  Swish.apply`) comes by too. From torch 2.14 on such an `apply` is bound to C, and all that is seen of it is that it
  asks its class for the backward.
* `torch.utils.swap_tensors`, which no function mode sees, and the entries to other threads (threads.py).
* `torch.inference_mode`, which no function mode sees either. At its end torch puts the dispatch keys back that were on
  at its beginning, so that a dispatch mode of ours must not begin within and end outside, nor the reverse.
* the way from Python-written torch functions (`F.relu`) to a function mode, which in torch costs more than the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionMeta
from torch.overrides import handle_torch_function

from .._ir.interrupts import after_fork, during, reset_lock, run_locked
from .._ir.model_turns import Turn, modules_inside, turns, wait_for_turns, with_turn
from .._ir.node import Source
from .._ir.torch_private import (
    FunctionBase,
    SingleLevelFunction,
    compiler_if_loaded,
    count_function_modes,
    function_mode_at,
    inference_guard,
    pop_function_mode,
    push_function_mode,
    set_inference_guard,
    set_swap_of_tensors,
    set_way_to_modes,
    settle_dispatch_keys,
    swap_of_tensors,
)
from . import threads
from .recording import CodePosition, Recording
from .user_code import is_torch_code, torch_code

T = TypeVar("T")


class Listener(Protocol):
    """A capture, as the entries below know it."""

    def module_call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def function_unseen(self, kind: type) -> None: ...

    def swapped(self) -> None: ...

    def keys_noted(self) -> None: ...


_listeners: dict[int, list[Listener]] = {}  # of each thread, the innermost last
_bodies: dict[int, int] = {}  # of each thread, how many custom functions are running that were seen to begin
_lock = threading.RLock()  # what an interrupt left may be left while another capture is entered
_module_call = nn.Module.__call__
_function_apply = FunctionBase.__dict__["apply"]
_is_bound_to_c = Function.__dict__["apply"] is _function_apply  # from torch 2.14 on
_OWNERS: tuple[Any, ...] = (SingleLevelFunction, Function) if _is_bound_to_c else (SingleLevelFunction,)
_asked_of = FunctionMeta.__getattribute__
_boundaries: set[int] = set()  # by id: the functions are ours, and stay
_outermost: set[int] = set()


def boundary(function: Any) -> Any:
    """Mark a function where a line's callers end: further out they are known by the module call."""
    _boundaries.add(id(function.__code__))
    return function


def outermost(function: Any) -> Any:
    """Mark the function that calls the model."""
    _outermost.add(id(function.__code__))
    return function


def model_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames from here outwards, as far as the call of the model, without torch's own."""
    while frame is not None and id(frame.f_code) not in _outermost:
        if not is_torch_code(frame.f_code):
            yield frame
        frame = frame.f_back


@boundary
def _traced_call(self: nn.Module, args: Any, kwargs: Any) -> Any:
    if turns:
        wait_for_turns((id(self),))
    stack = _listeners.get(get_ident())
    return (
        stack[-1].module_call(self, _originals["call"], args, kwargs)
        if stack
        else _originals["call"](self, *args, **kwargs)
    )


def _call_template(self: Any, *args: Any, **kwargs: Any) -> Any:
    call: Any = "stands for _traced_call"
    return call(self, args, kwargs)


_template = _call_template.__code__
# Runs as the code of a function of torch, whose globals it cannot use: what it calls is one of its constants.
_entry_code: Any = _template.replace(
    co_consts=tuple([_traced_call if type(const) is str else const for const in _template.co_consts])
)
_put_in_call: Any = FunctionType(_entry_code, globals(), "_traced_call")  # where torch's own function is replaced


def _traced_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    stack = _listeners.get(get_ident())
    call = _function_apply.__get__(None, cls)
    if not stack:
        return call(*args, **kwargs)
    return stack[-1].function_apply(cls, partial(_seen, call) if _is_bound_to_c else call, args, kwargs)


def _seen(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    here = get_ident()
    before = _bodies.get(here, 0)
    _bodies[here] = before + 1
    try:
        return call(*args, **kwargs)
    finally:
        _bodies[here] = before


def _traced_question(kind: Any, name: str) -> Any:
    """An attribute of a custom function's class is read. Only `apply` reads the backward class."""
    if name == "_backward_cls" and not _bodies.get(get_ident()) and (stack := _listeners.get(get_ident())):
        stack[-1].function_unseen(kind)
    return _asked_of(kind, name)


def _traced_swap(one: Any, other: Any) -> None:
    swap_of_tensors(one, other)  # finish it first: half an exchange is worse than a whole one
    stack = _listeners.get(get_ident())
    if stack:
        stack[-1].swapped()


class _TracedInference:
    """`torch._C._InferenceMode`, of which the capture knows before it begins, which is when it is made, and ends."""

    def __init__(self, mode: bool = True) -> None:
        _note_keys()
        self.guard = inference_guard(mode)

    def __enter__(self) -> None:
        _note_keys()
        self.guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            _note_keys()
        finally:
            self.guard.__exit__(*error)
            settle_dispatch_keys()  # the model may end it in another place than where it began


def _note_keys() -> None:
    stack = _listeners.get(get_ident())
    if stack:
        stack[-1].keys_noted()


def _traced_function(function: Any, relevant: Any, *args: Any, **kwargs: Any) -> Any:
    """`handle_torch_function` where the capture's mode is the innermost one, in a third of the time."""
    stack, number = _listeners.get(get_ident()), count_function_modes()
    mode: Any = stack[-1] if stack else None
    if not stack or not number or function_mode_at(number - 1) is not mode:
        return handle_torch_function(function, relevant, *args, **kwargs)
    try:
        pop_function_mode()
        return mode.__torch_function__(function, (), args, kwargs)
    finally:
        if count_function_modes() < number:
            push_function_mode(mode)


_traced_entry: Any = classmethod(_traced_apply)
_originals: dict[str, Any] = {"call": _module_call}
_exchanged: list[tuple[Any, CodeType]] = []  # functions that run our code now, each with its own


modules_inside.update(dict.fromkeys((_module_call.__code__, _entry_code), lambda held: (id(held["self"]),)))


def exclusive(modules: Callable[[], Iterable[nn.Module]], work: Callable[[Turn], T]) -> T:
    """The result of some work that runs while no other thread runs these modules: earlier calls end first, later ones
    wait.
    """
    return with_turn(modules, work, partial(run_locked, _lock, _put_in), partial(run_locked, _lock, _take_out_if_idle))


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Within, module calls and custom functions of this thread reach the listener."""
    here = get_ident()
    return during(_lock, partial(_enter, here, listener), partial(_leave, here, listener))


def is_listening() -> bool:
    """True if module calls of this thread reach a listener."""
    return bool(_listeners.get(get_ident()))


def stop_listening(listener: Listener) -> None:
    """Calls of this thread no longer reach a listener, whose block has not ended yet."""
    run_locked(_lock, partial(_leave, get_ident(), listener))


def _enter(here: int, listener: Listener) -> None:
    _put_in()
    _listeners.setdefault(here, []).append(listener)


def _put_in() -> None:
    if (call := nn.Module.__call__) is not _put_in_call and getattr(call, "__code__", None) is not _entry_code:
        _take_call_out()  # another one stands there since
        if type(call) is FunctionType and not call.__closure__ and not call.__defaults__:
            _originals["call"] = _with_its_code(call)
            _exchanged.append((call, call.__code__))
            call.__code__ = _entry_code
        else:
            _originals["call"] = call
            nn.Module.__call__ = _put_in_call  # type: ignore[method-assign]
    for owner in _OWNERS:
        if owner.__dict__.get("apply") is not _traced_entry:
            owner.apply = _traced_entry
    if _is_bound_to_c:
        FunctionMeta.__getattribute__ = _traced_question  # type: ignore[method-assign]
    if swap_of_tensors is not None:
        set_swap_of_tensors(_traced_swap)
    if inference_guard is not None:
        set_inference_guard(_TracedInference)
    set_way_to_modes(_traced_function)
    threads.put_in()


def _with_its_code(function: FunctionType) -> FunctionType:
    """A copy of the function, which keeps its code when the function itself is given ours."""
    made = FunctionType(function.__code__, function.__globals__, function.__name__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _take_call_out() -> None:
    for function, code in _exchanged:
        if function.__code__ is _entry_code:
            function.__code__ = code
    _exchanged.clear()
    if nn.Module.__call__ is _put_in_call:
        nn.Module.__call__ = _originals["call"]  # type: ignore[method-assign]


def _leave(here: int, listener: Listener) -> None:
    """Remove the listener, and those that were added after it in its thread."""
    stack = _listeners.get(here, [])
    at = next((number for number, other in enumerate(stack) if other is listener), None)
    if at is not None:
        del stack[at:]
    if not stack:
        _listeners.pop(here, None)
        _bodies.pop(here, None)
    _take_out_if_idle()


def _take_out_if_idle() -> None:
    if not _listeners and not turns:
        _take_out()


def _take_out() -> None:
    _take_call_out()
    if SingleLevelFunction.__dict__.get("apply") is _traced_entry:
        del SingleLevelFunction.apply
    if Function.__dict__["apply"] is _traced_entry:
        Function.apply = _function_apply  # type: ignore[method-assign]
    if "__getattribute__" in vars(FunctionMeta) and _is_bound_to_c:
        del FunctionMeta.__getattribute__
    if swap_of_tensors is not None:
        set_swap_of_tensors(swap_of_tensors)
    if inference_guard is not None:
        set_inference_guard(inference_guard)
    set_way_to_modes(handle_torch_function)
    threads.take_out()


def _in_a_child() -> None:
    """After a fork only the thread that forked exists."""
    reset_lock(_lock)
    threads.in_a_child()
    for other in [thread for thread in _listeners if thread != get_ident()]:
        del _listeners[other]
    _take_out_if_idle()


after_fork(_in_a_child)


def module_table(model: nn.Module | None) -> list[tuple[nn.Module, int, str]]:
    """Every module of the model with its parent's number and its name there. Walked before the forward, named later."""
    if model is None:
        return []
    table, seen, at = [(model, -1, "")], {id(model)}, 0
    while at < len(table):
        children = table[at][0]._modules
        for name, child in children.items() if children else ():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                table.append((child, at, name))
        at += 1
    return table


def addresses(table: list[tuple[nn.Module, int, str]]) -> dict[int, str]:
    """The dotted address of each module: that of its first place in the tree."""
    found: list[str] = []
    compiler = compiler_if_loaded()
    for module, parent, name in table:
        prefix = found[parent] if parent >= 0 else ""
        if compiler is not None and isinstance(module, compiler.OptimizedModule):
            found.append(f"{prefix}.{name}" if prefix else name)
        elif name == "_orig_mod":
            found.append(prefix)  # the compiler's wrapper is no level of the user's
        else:
            found.append(f"{prefix}.{name}" if prefix else name)
    return {id(module): address for (module, _, _), address in zip(table, found, strict=True)}


def other_addresses(table: list[tuple[nn.Module, int, str]], first: dict[int, str]) -> dict[int, list[str]]:
    """The further addresses of modules that stand at several places, or below such modules."""
    found: dict[int, list[str]] = {}
    stack: list[tuple[nn.Module, int, tuple[tuple[int, str], ...]]] = []
    stack += [(module, id(module), ((id(module), name),)) for module, parent, name in table if parent < 0]
    edges = sum(len([c for c in module._modules.values() if c is not None]) for module, _, _ in table)
    if edges == len(table) - len(stack):
        return found  # a tree, as most are
    most = 100 * len(table)
    while stack and most:
        module, number, path = stack.pop()
        most -= 1
        address = ".".join([name for _, name in path if name and name != "_orig_mod"])
        if address != first[number] and address not in found.get(number, ()):
            found.setdefault(number, []).append(address)
        for name, child in module._modules.items():
            if child is not None and id(child) in first and all(id(child) != above for above, _ in path):
                stack.append((child, id(child), (*path, (id(child), name))))
    return found


def user_frame(frame: FrameType | None, depth: int = 6) -> FrameType | None:
    """The nearest frame outside torch, within a few."""
    for _ in range(depth):
        if frame is None:
            return None
        code = frame.f_code
        known = torch_code.get(id(code))
        if not (known[1] if known is not None and known[0] is code else is_torch_code(code)):
            return frame
        frame = frame.f_back
    return None


def callers(frame: FrameType | None) -> CodePosition | None:
    """The line at a frame, and the user's lines that led to it, as far as the module call that it lies in."""
    lines: list[tuple[CodeType, int]] = []
    while frame is not None:
        code = frame.f_code
        if id(code) in _boundaries:
            break
        known = torch_code.get(id(code))
        if not lines or not (known[1] if known is not None and known[0] is code else is_torch_code(code)):
            lines.append((code, frame.f_lasti))
        frame = frame.f_back
    site: CodePosition | None = None
    for line in reversed(lines):
        site = line if site is None else (*line, site)
    return site


def user_line(recording: Recording, site: CodePosition | None, scope: int) -> Source | None:
    """The user's line nearest to a call, inside its modules or around them; the call's own line if none is the
    user's.
    """
    own = site
    while (found := _nearest(site)) is None and scope >= 0:
        site, scope = recording.scopes[scope].site, recording.scopes[scope].parent
    return line_of(own if found is None else found)


def _nearest(site: CodePosition | None) -> CodePosition | None:
    """The first of a site's lines, outwards, that is the user's."""
    while site is not None and is_torch_code(site[0]):
        site = site[2] if len(site) > 2 else None
    return site


def with_callers(site: CodePosition | None, outer: Source | None) -> Source | None:
    """The user's line at a site, whose callers lead on to `outer`; `outer` itself where the site is torch's own."""
    if site is None or len(site) == 2:
        return outer if site is None or is_torch_code(site[0]) else line_of(site, outer)
    sites: list[CodePosition] = []
    at: CodePosition | None = site
    while at is not None:
        if not is_torch_code(at[0]):
            sites.append(at)
        at = at[2] if len(at) > 2 else None
    for at in reversed(sites):
        outer = line_of(at, outer)
    return outer


def line_of(site: CodePosition | None, caller: Source | None = None) -> Source | None:
    """The line of Python at a code object and instruction."""
    if site is None:
        return None
    code, instruction = site[:2]
    key = id(code), instruction, id(caller)
    known = _lines.get(key)
    if known is None or known[0] is not code or known[1].caller is not caller:
        line = next((n for start, end, n in code.co_lines() if n and start <= instruction < end), code.co_firstlineno)
        known = code, Source(code.co_filename, line, getattr(code, "co_qualname", code.co_name), caller)
        _lines[key] = known
    return known[1]


# By id, with the object beside it: a code object's own hash reads all of its constants, every time.
_lines: dict[tuple[int, int, int], tuple[CodeType, Source]] = {}
