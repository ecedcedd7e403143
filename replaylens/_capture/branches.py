"""Where a model went on after it had read a truth value.

In: the instruction that read it, and what it said. Out: where the branch begins that was taken, by the jump that stands
behind that instruction; None where no jump does, because the value was kept and tested later or not at all.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from itertools import pairwise
from types import CodeType

_BETWEEN = frozenset(("CACHE", "TO_BOOL", "COPY"))


def taken(code: CodeType, instruction: int, value: bool) -> int | None:
    """The instruction at which the code went on, by the jump at or behind the one that read a truth value."""
    found = _jump(code, instruction)
    if found is None:
        return None
    when, there, behind = found
    return there if value is when else behind


@lru_cache(maxsize=4096)
def _jump(code: CodeType, instruction: int) -> tuple[bool, int, int] | None:
    """The first jump from an instruction on: the truth value at which it jumps, to where, and what follows it."""
    rest = [one for one in dis.get_instructions(code) if one.offset >= instruction]
    for one, following in pairwise(rest):
        word = "TRUE" if "IF_TRUE" in one.opname else "FALSE" if "IF_FALSE" in one.opname else None
        if word and "JUMP" in one.opname:
            return word == "TRUE", one.argval, following.offset
        if one.opname not in _BETWEEN and not (one is rest[0] and "CALL" in one.opname):
            return None
    return None


@lru_cache(maxsize=4096)
def calls(code: CodeType, instruction: int) -> bool:
    """Is it a call, of `any` or `bool`, that read the value?"""
    return any(one.offset == instruction and "CALL" in one.opname for one in dis.get_instructions(code))
