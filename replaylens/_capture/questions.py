"""What a model reads of tensors besides their content: memory layout, flags, and the modes around it.

In: reads as the tracer meets them, and the code that ran. Out: Guards of the kinds "layout", "flags" and "mode". These
answers depend on no content, so nothing runs to check them again: see `_replay/flag_guards.py`. Torch shows nobody that
the gradient mode is read: code that ran and names such a function counts as reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from .._ir.node import Guard, Source
from .._ir.target import Target
from .._ir.trees import map_leaves
from .user_code import Methods, identifiers, line_of_identifier, referenced_by, user_function

MODES: dict[str, Callable[[], bool]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
}

# functions of torch's that let the model see flags: they cut off a history, or write a tensor as text
_SHOWING_FLAGS = frozenset(("_grad_preprocess", "_str_intern"))


class Query(NamedTuple):
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


def guard_of_query(asked: Query, ref: Any, to_ref: Any, scope: Any, source: Source | None, count: int) -> Guard:
    """The question as a Guard of the program."""
    return Guard(
        Target.of(asked.function),
        (ref, *map_leaves(asked.args, to_ref)),
        tuple([(key, map_leaves(value, to_ref)) for key, value in asked.kwargs.items()]),
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
        named = {id(one.__code__): one for one in map(user_function, referenced_by(function)) if one is not None}
        known.update(named)
        codes.update({key: one.__code__ for key, one in named.items()})
    for key, code in codes.items():
        for name in sorted({*(MODES.keys() & identifiers(code)), *_modes_by_value(known.get(key))}):
            source = Source(
                code.co_filename, line_of_identifier(code, name), getattr(code, "co_qualname", code.co_name)
            )
            result = answers[name]
            yield Guard(Target.of(MODES[name]), (), result=result, has_result=True, kind="mode", source=source)


def _modes_by_value(function: FunctionType | None) -> Iterator[str]:
    """The modes that a function reads by another name: an alias, a closure variable, a partial."""
    if function is None:
        return
    for value in (*referenced_by(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        asked = value.func if isinstance(value, partial) else value
        yield from (name for name, mode in MODES.items() if asked is mode)
