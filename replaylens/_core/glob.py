"""Globs of dotted names: `*` stays within one level, `**` crosses dots.

In: a pattern and a name. Out: does it match? `layer4.*` means `layer4.0`, not `layer4.0.conv1`; `layer4.**` both;
`**.attn` every module called `attn`, on whatever level. `?` is one sign that is no dot, `[ab]` one of these.
"""

from __future__ import annotations

import re
from functools import lru_cache

SIGNS = "*?["


def is_glob(word: str) -> bool:
    """Does a word have a sign of a glob?"""
    return any(sign in word for sign in SIGNS)


def matches(name: str, pattern: str) -> bool:
    """Does the whole name match?"""
    return _compiled(pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return re.compile("".join(map(_part, parts)), re.DOTALL)


def _part(part: str) -> str:
    known = {"**.": r"(?:.*\.)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    if part in known:
        return known[part]
    if part.startswith("[") and part.endswith("]") and len(part) > 2:
        inside = part[1:-1].replace("\\", "\\\\")
        return f"[^{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
    return re.escape(part)
