"""Trees of values as nested tuples of words, numbers and literals: torch.compile looks through nothing else as well.

In: a frozen tree, and what stands for each of its Refs. Out: a pattern, which builds the tree again from the values in
their slots, or tells whether a value has the recorded containers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._ir.node import Ref
from .._ir.trees import Branch

_WORDS = {list: "list", slice: "slice"}


def is_plain(tree: Any, kinds: tuple[type, ...] = (list, dict)) -> bool:
    """True for a tree of tuples, and of containers of these kinds; tuples among them: named ones too."""
    if type(tree) is tuple:
        return all(is_plain(item, kinds) for item in tree)
    if type(tree) is Branch:
        is_known = tree.kind in kinds or (tuple in kinds and hasattr(tree.kind, "_fields"))
        return is_known and tree.loop is None and all(is_plain(item, kinds) for item in tree.items)
    return True


def pattern_of(tree: Any, name: Callable[[Ref], Any]) -> Any:
    """The pattern of a plain tree: a word, and what it is about."""
    if type(tree) is Ref:
        return ("value", name(tree))
    if type(tree) is tuple:
        return ("tuple", tuple([pattern_of(item, name) for item in tree]))
    if type(tree) is not Branch:
        return ("literal", tree)
    items = tuple([pattern_of(item, name) for item in tree.items])
    if tree.kind is dict:
        return ("dict", items, tuple(tree.keys or ()))
    return (_WORDS[tree.kind], items) if tree.kind in _WORDS else ("named", items, tree.kind)


def built(pattern: Any, env: Sequence[Any]) -> Any:
    """The tree, of the values in their slots."""
    word, about = pattern[0], pattern[1]
    if word == "value":
        return env[about]
    if word == "literal":
        return about
    items = [built(item, env) for item in about]
    if word == "dict":
        return dict(zip(pattern[2], items, strict=True))
    if word == "named":
        return pattern[2](*items)
    if word == "slice":
        return slice(items[0], items[1], items[2])
    return tuple(items) if word == "tuple" else items


def matches(pattern: Any, value: Any, found: dict[str, Any]) -> bool:
    """True if a value has the recorded containers and literals. `found` gets the values by name."""
    word, about = pattern[0], pattern[1]
    if word == "value":
        is_other = about in found and found[about] is not value
        found[about] = value
        return not is_other
    if word == "literal":
        return type(value) is type(about) and bool(value == about)
    if word == "dict":
        if type(value) is not dict or tuple(value.keys()) != pattern[2]:
            return False
        return all(matches(item, value[key], found) for key, item in zip(pattern[2], about, strict=True))
    if type(value) is not (tuple if word == "tuple" else list) or len(value) != len(about):
        return False
    return all(matches(item, one, found) for item, one in zip(about, value, strict=True))
