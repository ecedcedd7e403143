"""What a model asks of tensors besides their content: their memory layout, their flags, the modes around it.

In: reads as the tracer meets them, and the code that ran. Out: Guards of the kinds "layout", "flags" and "mode". No
content is behind these answers, so that nothing is run to ask them again: see `_replay/facts.py`. Torch does not show
reads of the gradient mode to anybody: that the code which ran names them is taken for a read.
"""

from __future__ import annotations

import dis
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from .._core.node import Guard, Source
from .._core.target import Target
from .._core.trees import remake

MODES: dict[str, Callable[[], bool]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
}

# functions of torch's that let the model see flags: they cut off a history, or write a tensor as text
_SHOWING_FLAGS = frozenset(("_grad_preprocess", "_str_intern"))


def next_functions(tensor: torch.Tensor) -> Any:
    """What the history of a tensor leads back to."""
    return None if tensor.grad_fn is None else tensor.grad_fn.next_functions


class Asked(NamedTuple):
    """A question as it was met: of which tensor, at which record, from where."""

    kind: str
    function: Any
    tensor: torch.Tensor
    handle: int | None  # of its value then; None where nothing had read it yet
    args: tuple[Any, ...]  # besides the tensor
    kwargs: dict[str, Any]
    result: Any
    position: int
    scope: int
    site: Any


def guard_of(asked: Asked, ref: Any, to_ref: Any, scope: Any, source: Source | None, count: int) -> Guard:
    """The question as a fact of the program."""
    return Guard(
        Target.of(asked.function),
        (ref, *remake(asked.args, to_ref)),
        tuple([(key, remake(value, to_ref)) for key, value in asked.kwargs.items()]),
        asked.result,
        has_result=True,
        kind=asked.kind,
        position=min(asked.position, count),
        scope=scope,
        source=source,
    )


def shows_flags(code: CodeType) -> bool:
    """Is it one of torch's functions whose result shows the flags of what they are given?"""
    return code.co_name in _SHOWING_FLAGS


def mode_guards(codes: Iterable[CodeType], model: Any, kinds: Iterable[type], ambient: Any) -> Iterator[Guard]:
    """The modes that code which ran asks for, or functions that it names."""
    answers = {"is_grad_enabled": ambient.grad, "is_inference_mode_enabled": ambient.inference}
    ran, kinds = list(codes), list(kinds)
    known = _functions(model, kinds)
    for code in dict.fromkeys((*ran, *_named_by(ran, known))):
        for name in sorted({*(MODES.keys() & words(code)), *_by_other_names(code, known)}):
            source = Source(code.co_filename, _line(code, name), getattr(code, "co_qualname", code.co_name))
            result = answers[name]
            yield Guard(Target.of(MODES[name]), (), result=result, has_result=True, kind="mode", source=source)


@lru_cache(maxsize=4096)
def words(code: CodeType) -> frozenset[str]:
    """The names that a code uses, and the strings in it, by which it can ask for a name; with what lies in it."""
    inner = [words(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    strings = [constant for constant in code.co_consts if type(constant) is str and constant.isidentifier()]
    return frozenset(code.co_names).union(strings, *inner)


def _functions(model: Any, kinds: Iterable[type]) -> dict[CodeType, FunctionType]:
    """By their code, the function that the model is and those of its classes."""
    functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType)]
    return {function.__code__: function for function in (*functions, model) if isinstance(function, FunctionType)}


def _by_other_names(code: CodeType, known: dict[CodeType, FunctionType]) -> Iterator[str]:
    """The modes that a function asks for by a name of its own: an alias, a variable that it closes over, a partial."""
    if (function := known.get(code)) is None:
        return
    values = [function.__globals__.get(name) for name in code.co_names]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            values.append(cell.cell_contents)
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in values:
        asked = value.func if isinstance(value, partial) else value
        yield from (name for name, mode in MODES.items() if asked is mode)


def _named_by(ran: list[CodeType], known: dict[CodeType, FunctionType]) -> Iterator[CodeType]:
    """The code of the user's functions that functions which ran call by their global names: they are known then."""
    for code in ran:
        if (function := known.get(code)) is None:
            continue
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType) and not (value.__module__ or "").startswith("torch"):
                known.setdefault(value.__code__, value)
                yield value.__code__


def _line(code: CodeType, name: str) -> int:
    """The line on which a name is first used, in a code or in what lies in it."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        place = getattr(instruction, "positions", None)
        line = (place.lineno if place else instruction.starts_line) or line
        if instruction.argval == name:
            return int(line)
    inner = (one for one in code.co_consts if isinstance(one, CodeType) and name in words(one))
    return next((_line(one, name) for one in inner), code.co_firstlineno)


@lru_cache(maxsize=4096)
def asks_identity(code: CodeType) -> bool:
    """Does this code ask whether one object is another, which is no constant?"""
    if _IS not in code.co_code[::2]:
        return False
    last = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and last not in ("LOAD_CONST", "LOAD_COMMON_CONSTANT"):
            return True
        last = instruction.opname
    return False


@lru_cache(maxsize=4096)
def asks_for_none(code: CodeType, instruction: int) -> bool:
    """Is what an instruction reads only asked for whether it is None?"""
    after = [one for one in _instructions(code) if one.offset > instruction][:2]
    if not after or after[0].opname != "LOAD_CONST":
        return bool(after) and after[0].opname.endswith(("IF_NONE", "IF_NOT_NONE"))
    return after[0].argval is None and len(after) > 1 and after[1].opname == "IS_OP"


@lru_cache(maxsize=4096)
def catches(code: CodeType) -> bool:
    """Does this code go on after an exception, anywhere?"""
    if "suppress" in code.co_names:
        return True
    if _HANDLES.isdisjoint(code.co_code[::2]):
        return False
    steps = _instructions(code)
    return any(one.opname in _MATCHES for one in steps) or any(_goes_on(steps, one) for one in _handlers(steps))


def _handlers(steps: list[dis.Instruction]) -> Iterator[int]:
    """The numbers of the instructions at which handlers begin, but for what a `with` does after an exception."""
    yield from (_number(steps, one.argval) for one in steps if one.opname == "SETUP_FINALLY")
    for number, one in enumerate(steps):
        if one.opname == "PUSH_EXC_INFO" and steps[number + 1].opname != "WITH_EXCEPT_START":
            yield number


def _goes_on(steps: list[dis.Instruction], handler: int) -> bool:
    """Can it end otherwise than by raising, as `except:` does, or `return`, `break` and `continue` in a `finally:`?"""
    stack, seen = [handler], set()
    while stack:
        number = stack.pop()
        one = steps[number]
        if one.opname in _GOES_ON:
            return True
        if number in seen or one.opname in _RAISES:
            continue
        seen.add(number)
        if one.opcode in _JUMPS:
            stack.append(_number(steps, one.argval))
        if one.opname not in _ALWAYS_JUMPS:
            stack.append(number + 1)
    return False


def _number(steps: list[dis.Instruction], offset: int) -> int:
    """The number of the instruction at an offset, or of the one that begins there."""
    return bisect_left([one.offset for one in steps], offset)


@lru_cache(maxsize=4096)
def keeps_exceptions(code: CodeType) -> bool:
    """Can this code read what an exception says that it catches: by `except E as error`, or by asking Python for it?"""
    if not _ASKING.isdisjoint(code.co_names):
        return True
    if _HANDLES.isdisjoint(code.co_code[::2]):
        return False
    steps = _instructions(code)
    matches = [number for number, one in enumerate(steps) if one.opname in _MATCHES]
    after = [one for number in matches for one in steps[number + 1 : number + 1 + _BINDING]]
    return any(one.opname.startswith("STORE_") for one in after)


def _instructions(code: CodeType) -> list[dis.Instruction]:
    """Those that do something: what makes the argument of one longer stands before it where a code is long."""
    return [one for one in dis.get_instructions(code) if one.opname not in _NOTHING]


_NOTHING = frozenset(("CACHE", "EXTENDED_ARG", "NOT_TAKEN"))
_ASKING = frozenset(("exc_info", "format_exc", "exception"))
_MATCHES = frozenset(("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH"))
_BINDING = 3  # within so many instructions after the match the name is bound, if there is one
_RAISES = frozenset(("RERAISE", "RAISE_VARARGS"))
_GOES_ON = frozenset(("POP_EXCEPT", "RETURN_VALUE", "RETURN_CONST"))
_ALWAYS_JUMPS = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"))
_JUMPS = {code for code in (*dis.hasjrel, *dis.hasjabs) if not dis.opname[code].startswith("SETUP_")}
_IS = dis.opmap["IS_OP"]
_HANDLES = {dis.opmap[name] for name in ("PUSH_EXC_INFO", "SETUP_FINALLY") if name in dis.opmap}
