"""What a model reads of tensors besides their content: memory layout, flags, and the modes around it.

In: reads as the tracer meets them, and the code that ran. Out: Guards of the kinds "layout", "flags" and "mode". These
answers depend on no content, so nothing runs to check them again: see `_replay/flag_guards.py`. Torch shows nobody that
the gradient mode is read: code that ran and names such a function counts as reading it.

The second part finds where a model went after it read a truth value. In: the instruction that read it, and the value.
Out: the next instruction that is not part of the test; None if the value was stored and tested later, or never. It
executes the bytecode jump by jump. What the compiler adds at a branch (the jump back of a loop, the cleanup of a
chained comparison) has the source positions of the test, which tells it from statements of the user such as `continue`.
Which instructions are added varies with the version of Python; the positions do not.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from .._ir.node import Guard, Source
from .._ir.target import Target
from .._ir.trees import remake
from .bytecode import Step, line_of_word, read, words
from .user_code import Methods, named_by, users_function

MODES: dict[str, Callable[[], bool]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
}

# functions of torch's that let the model see flags: they cut off a history, or write a tensor as text
_SHOWING_FLAGS = frozenset(("_grad_preprocess", "_str_intern"))


def next_functions(tensor: torch.Tensor) -> Any:
    """The previous steps in the autograd history of a tensor."""
    return None if tensor.grad_fn is None else tensor.grad_fn.next_functions


class Asked(NamedTuple):
    """A question as it was met: of which tensor, at which record, from which line."""

    kind: str
    function: Any
    tensor: torch.Tensor
    handle: int | None  # of its value then; None if not yet read
    args: tuple[Any, ...]  # besides the tensor
    kwargs: dict[str, Any]
    result: Any
    position: int
    scope: int
    site: Any


def guard_of(asked: Asked, ref: Any, to_ref: Any, scope: Any, source: Source | None, count: int) -> Guard:
    """The question as a Guard of the program."""
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
    """True for a function of torch whose result depends on the flags of its arguments."""
    return code.co_name in _SHOWING_FLAGS


def mode_guards(ran: Iterable[CodeType], methods: Methods, ambient: Any) -> Iterator[Guard]:
    """Guards of the modes that code which ran reads, or that functions it refers to read."""
    answers = {"is_grad_enabled": ambient.grad, "is_inference_mode_enabled": ambient.inference}
    known = dict(methods.by_code)
    codes = {id(code): code for code in ran}
    for function in [known[key] for key in codes if key in known]:
        named = {id(one.__code__): one for one in map(users_function, named_by(function)) if one is not None}
        known.update(named)
        codes.update({key: one.__code__ for key, one in named.items()})
    for key, code in codes.items():
        for name in sorted({*(MODES.keys() & words(code)), *_modes_by_value(known.get(key))}):
            source = Source(code.co_filename, line_of_word(code, name), getattr(code, "co_qualname", code.co_name))
            result = answers[name]
            yield Guard(Target.of(MODES[name]), (), result=result, has_result=True, kind="mode", source=source)


def _modes_by_value(function: FunctionType | None) -> Iterator[str]:
    """The modes that a function reads by another name: an alias, a closure variable, a partial."""
    if function is None:
        return
    for value in (*named_by(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        asked = value.func if isinstance(value, partial) else value
        yield from (name for name, mode in MODES.items() if asked is mode)


_STACK_OPS = frozenset(("SWAP", "ROT_TWO", "COPY", "DUP_TOP"))
_APPENDS = frozenset(("LIST_APPEND", "SET_ADD", "MAP_ADD"))
_MAX_STEPS = 50  # instructions
_BOOL_OF_COMPARISON = 16  # in the argument of COMPARE_OP, from Python 3.13 on


@lru_cache(maxsize=4096)
def taken(code: CodeType, instruction: int, value: bool) -> int | None:
    """The offset of the instruction that ran next, if the one that read a truth value leads to a jump on it."""
    found = read(code)
    at, stack, steps = found.number_of(instruction), [value], found.steps
    test: set[Any] = {None}  # positions of the jumps so far
    if _leaves_bool(steps[at]):
        at += 1
    for _ in range(_MAX_STEPS):
        one = steps[at]
        if len(test) > 1 and (back := _loop_start(code, steps, at)) is not None:
            at = found.number_of(back)
            continue
        if not _belongs_to_test(one, stack, test) or (target := _execute(one, stack)) is None:
            return one.offset if len(test) > 1 else None
        if "IF_" in one.name:
            test.add(one.position)
        at = at + 1 if target < 0 else found.number_of(target)
    return None


def _leaves_bool(one: Step) -> bool:
    """True if the instruction that read the truth value leaves it on the stack."""
    return "CALL" in one.name or (one.name == "COMPARE_OP" and one.arg & _BOOL_OF_COMPARISON > 0)


def _loop_start(code: CodeType, steps: list[Step], at: int) -> int | None:
    """The target of the jump back of a comprehension, which in Python 3.12 has the position of the element."""
    one = steps[at]
    is_back = one.name.startswith("JUMP") and one.target is not None and one.target < one.offset
    return one.target if is_back and (steps[at - 1].name in _APPENDS or code.co_name == "<genexpr>") else None


def _belongs_to_test(one: Step, stack: list[Any], test: set[Any]) -> bool:
    """True if the instruction handles the value that was read, or is added by the compiler."""
    if one.name == "TO_BOOL" or one.name in _STACK_OPS:
        return True
    if "IF_" in one.name or one.name == "UNARY_NOT":
        return bool(stack) and stack[-1] is not None
    return one.position in test


def _execute(one: Step, stack: list[Any]) -> int | None:
    """Executes an instruction: the offset that it jumps to, -1 for the next; None if it is more than a test.

    The stack holds truth values, and None for anything else.
    """
    if one.name in ("TO_BOOL", "NOP"):
        return -1
    if one.target is None:
        return _execute_stack_op(one, stack)
    if "IF_TRUE" not in one.name and "IF_FALSE" not in one.name:
        return one.target if one.name.startswith("JUMP") else None
    jumps = stack[-1] is ("IF_TRUE" in one.name)
    if "OR_POP" not in one.name or not jumps:
        stack.pop()
    return one.target if jumps else -1


def _execute_stack_op(one: Step, stack: list[Any]) -> int | None:
    """Executes what moves stack items, or negates a truth value."""
    depth = one.arg if one.name in ("SWAP", "COPY") else 2 if one.name == "ROT_TWO" else 1
    stack[:] = [None] * (depth - len(stack)) + stack
    if one.name == "POP_TOP":
        stack.pop()
    elif one.name in ("COPY", "DUP_TOP"):
        stack.append(stack[-depth])
    elif one.name in ("SWAP", "ROT_TWO"):
        stack[-1], stack[-depth] = stack[-depth], stack[-1]
    elif one.name == "UNARY_NOT":
        stack[-1] = not stack[-1]
    else:
        return None
    return -1


@lru_cache(maxsize=4096)
def keeps(code: CodeType, instruction: int) -> bool:
    """True for a call that consumes the truth value itself, as `any` does; `bool(x)` returns it."""
    step = read(code).steps[read(code).number_of(instruction)]
    return "CALL" in step.name and not _source_from(code, step).startswith("bool(")


def _source_from(code: CodeType, step: Step) -> str:
    """The source line from where the expression of a step begins; "" if this Python does not know."""
    if type(step.position) is not tuple or step.position[2] is None:
        return ""
    line, _, column, _ = step.position
    return linecache.getline(code.co_filename, line).encode()[column:].decode(errors="replace")
