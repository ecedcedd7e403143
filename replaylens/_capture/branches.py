"""Where a model went on after it had read a truth value.

In: the instruction that read it, and what it said. Out: the instruction that ran next and is no part of the test; None
where the value was kept and tested later, or not at all.

The way is walked as Python walks it, jump by jump. What a compiler puts at a branch besides (the jump back of a loop,
the tidying behind a chained comparison) has the very positions of the test: by them it is told from a statement of the
user's, such as `continue`. Which of these a Python writes differs from version to version; the positions do not.
"""

from __future__ import annotations

import linecache
from functools import lru_cache
from types import CodeType
from typing import Any

from .bytecode import Step, read

_SHUFFLES = frozenset(("SWAP", "ROT_TWO", "COPY", "DUP_TOP"))
_ADDS = frozenset(("LIST_APPEND", "SET_ADD", "MAP_ADD"))
_PATIENCE = 50  # instructions
_BOOL_OF_COMPARISON = 16  # in the argument of COMPARE_OP, from Python 3.13 on


@lru_cache(maxsize=4096)
def taken(code: CodeType, instruction: int, value: bool) -> int | None:
    """The instruction at which the code went on, where the one that read a truth value leads to a jump on it."""
    found = read(code)
    at, stack, steps = found.at(instruction), [value], found.steps
    test: set[Any] = {None}  # where the jumps so far stand
    if _leaves_it(steps[at]):
        at += 1
    for _ in range(_PATIENCE):
        one = steps[at]
        if len(test) > 1 and (back := _end_of_element(code, steps, at)) is not None:
            at = found.at(back)
            continue
        if not _is_of_the_test(one, stack, test) or (to := _walk(one, stack)) is None:
            return one.offset if len(test) > 1 else None
        if "IF_" in one.name:
            test.add(one.place)
        at = at + 1 if to < 0 else found.at(to)
    return None


def _leaves_it(one: Step) -> bool:
    """Does the instruction that read it leave the truth value itself on the stack?"""
    return "CALL" in one.name or (one.name == "COMPARE_OP" and one.arg & _BOOL_OF_COMPARISON > 0)


def _end_of_element(code: CodeType, steps: list[Step], at: int) -> int | None:
    """Where the jump back of a comprehension leads to, if this is one. Python 3.12 puts it where the element stands,
    which was not made.
    """
    one = steps[at]
    is_back = one.name.startswith("JUMP") and one.to is not None and one.to < one.offset
    return one.to if is_back and (steps[at - 1].name in _ADDS or code.co_name == "<genexpr>") else None


def _is_of_the_test(one: Step, stack: list[Any], test: set[Any]) -> bool:
    """Is it about the value that was read, or put there by the compiler and not by a statement of the user's?"""
    if one.name == "TO_BOOL" or one.name in _SHUFFLES:
        return True
    if "IF_" in one.name or one.name == "UNARY_NOT":
        return bool(stack) and stack[-1] is not None
    return one.place in test


def _walk(one: Step, stack: list[Any]) -> int | None:
    """Do what an instruction does: the offset that it jumps to, -1 for the next; None where it is more than a test.

    On the stack stand truth values, and None for anything else.
    """
    if one.name in ("TO_BOOL", "NOP"):
        return -1
    if one.to is None:
        return _shuffle(one, stack)
    if "IF_TRUE" not in one.name and "IF_FALSE" not in one.name:
        return one.to if one.name.startswith("JUMP") else None
    jumps = stack[-1] is ("IF_TRUE" in one.name)
    if "OR_POP" not in one.name or not jumps:
        stack.pop()
    return one.to if jumps else -1


def _shuffle(one: Step, stack: list[Any]) -> int | None:
    """What moves things on the stack, or turns a truth value round."""
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
    """Is it a call that reads the value for itself, as `any` does? `bool(x)` hands it on as it is."""
    step = read(code).steps[read(code).at(instruction)]
    return "CALL" in step.name and not _text(code, step).startswith("bool(")


def _text(code: CodeType, step: Step) -> str:
    """The line from where a step's expression begins; "" where this Python does not say."""
    if type(step.place) is not tuple or step.place[2] is None:
        return ""
    line, _, column, _ = step.place
    return linecache.getline(code.co_filename, line).encode()[column:].decode(errors="replace")
