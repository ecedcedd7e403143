"""Which arrows of a picture go back: those that close a circle, against the order of execution.

In: the keys of glyphs in order, and the arrows between them. Out: pairs of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def backward(order: Sequence[str], pairs: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """The pairs that lead to an earlier glyph from one that it leads to. What only comes late, such as a buffer that
    is first read in the middle of a box, does not go back.
    """
    pairs = list(pairs)
    number = {key: n for n, key in enumerate(order)}
    circle = _circles(order, pairs)
    return frozenset(
        (one, other) for one, other in pairs if number[other] < number[one] and circle[one] == circle[other]
    )


def _circles(keys: Sequence[str], pairs: list[tuple[str, str]]) -> dict[str, str]:
    """For each key one that stands for all that lie on circles with it (Kosaraju's two walks)."""
    ahead: dict[str, list[str]] = {key: [] for key in keys}
    behind: dict[str, list[str]] = {key: [] for key in keys}
    for one, other in pairs:
        ahead[one].append(other)
        behind[other].append(one)
    found: dict[str, str] = {}
    for start in reversed(_finished(keys, ahead)):
        stack = [start]
        while stack:
            key = stack.pop()
            if key not in found:
                found[key] = start
                stack.extend(behind[key])
    return found


def _finished(keys: Sequence[str], ahead: Mapping[str, list[str]]) -> list[str]:
    """The keys in the order in which a walk into the depth is done with them."""
    done: list[str] = []
    seen: set[str] = set()
    for start in keys:
        stack = [(start, False)]
        while stack:
            key, is_done = stack.pop()
            if is_done:
                done.append(key)
            elif key not in seen:
                seen.add(key)
                stack.append((key, True))
                stack.extend((other, False) for other in ahead[key])
    return done
