"""Does a call put what it gives where it had its argument from: `x = self.act(x)`, `return self.act(x)`?

In: a line of Python that calls, as code and instruction. Out: True where the name that was given stands for nothing
else afterwards. What is written in another way may be such a call too: then False is the careful answer.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

_NOTHING = frozenset(("CACHE", "PRECALL", "EXTENDED_ARG"))
_CALLS = frozenset(("CALL", "CALL_FUNCTION", "CALL_METHOD"))
_ENDS = frozenset(("RETURN_VALUE",))


@lru_cache(maxsize=4096)
def rebinds(code: CodeType, instruction: int) -> bool:
    """Is the one argument of this call a local name to which the result is bound, or which ends with it?"""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NOTHING]
    at = max((n for n, step in enumerate(steps) if step.offset <= instruction), default=0)
    if not 0 < at < len(steps) - 1 or steps[at].opname not in _CALLS or steps[at].arg != 1:
        return False
    before, after = steps[at - 1], steps[at + 1]
    if not before.opname.startswith("LOAD_FAST"):
        return False
    given = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
    taken = after.argval[0] if isinstance(after.argval, tuple) else after.argval
    return after.opname in _ENDS or (after.opname.startswith("STORE_FAST") and given == taken)
