"""What a model asks of tensors besides their content: their memory layout, their flags, the modes around it.

In: reads as the tracer meets them, and the code that ran. Out: Guards of the kinds "layout", "flags" and "mode". No
content is behind these answers, so that nothing is run to ask them again: see `_replay/flag_guards.py`. Torch does not
show reads of the gradient mode to anybody: that the code which ran names them is taken for a read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from .._core.node import Guard, Source
from .._core.target import Target
from .._core.trees import remake
from .bytecode import line_of_word, words
from .user_code import Methods, named_by, users_function

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


def mode_guards(ran: Iterable[CodeType], methods: Methods, ambient: Any) -> Iterator[Guard]:
    """The modes that code which ran asks for, or functions that it names."""
    answers = {"is_grad_enabled": ambient.grad, "is_inference_mode_enabled": ambient.inference}
    known = dict(methods.by_code)
    codes = {id(code): code for code in ran}
    for function in [known[key] for key in codes if key in known]:
        named = {id(one.__code__): one for one in map(users_function, named_by(function)) if one is not None}
        known.update(named)
        codes.update({key: one.__code__ for key, one in named.items()})
    for key, code in codes.items():
        for name in sorted({*(MODES.keys() & words(code)), *_by_other_names(known.get(key))}):
            source = Source(code.co_filename, line_of_word(code, name), getattr(code, "co_qualname", code.co_name))
            result = answers[name]
            yield Guard(Target.of(MODES[name]), (), result=result, has_result=True, kind="mode", source=source)


def _by_other_names(function: FunctionType | None) -> Iterator[str]:
    """The modes that a function asks for by a name of its own: an alias, a variable that it closes over, a partial."""
    if function is None:
        return
    for value in (*named_by(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        asked = value.func if isinstance(value, partial) else value
        yield from (name for name, mode in MODES.items() if asked is mode)
