"""A write in place as a pure call: `mutate`, and what stands for views among its arguments.

`mutate` copies what is written, derives the views that the call was given from the copy, and lets the call write there.
It gives what the call gave and the new values. Gradients pass as they do through the write itself, and it works under
`torch.func.vmap` where the written value is shared by all variants and what is written into it is not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import ReplaylensError
from .copies import writable_copy
from .target import Target
from .torch_private import is_batched, peek_interpreter_stack

differentiate_name = "replaylens._replay.differentiate.differentiate"


class Hole(enum.Enum):
    """Where the viewed tensor stands among the arguments of a view step."""

    HERE = "tensor"


class Step(NamedTuple):
    """One view call: `function(*args, **kwargs)` with the tensor in the hole; `part` of its result where it has
    several.
    """

    function: Target
    args: Any
    kwargs: Any
    part: tuple[int, ...]
    grad: bool


class Derived(NamedTuple):
    """A tensor that shares memory with what is written: the base's number, and the views that lead from it."""

    base: int
    steps: tuple[Step, ...]


class Nth(NamedTuple):
    """Among the arguments of a call that writes: its n-th target, the very object that is written."""

    number: int


class Written(NamedTuple):
    """What `mutate` gives."""

    result: Any
    targets: tuple[torch.Tensor, ...]
    bases: tuple[torch.Tensor, ...]


def mutate(
    function: Target,
    bases: tuple[torch.Tensor, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Derived, ...],
    values: tuple[torch.Tensor | None, ...],
) -> Written:
    """Call a function that writes, on copies of what it writes. Nothing that came in is changed.

    `values` are what targets that are views held before, if a patch may have come between them and their base: such a
    value is a tensor of its own, as the one that a hook gives back, and the write goes there and not to the base.
    """
    batched = _batched_among((bases, args, kwargs))
    with torch.enable_grad():  # the old value's gradient passes through, also where the write itself has none
        copies = tuple([writable_copy(base, batched) for base in bases])
    written = tuple([_apart(_derive(copies, target), v) for target, v in zip(targets, values, strict=True)])
    given, named = _concrete(args, copies, written), _concrete(kwargs, copies, written)
    result = _into(named.pop("out"), function, given, named) if "out" in named else function.function(*given, **named)
    if peek_interpreter_stack() is None:
        for target, where, value in zip(written, targets, values, strict=True):
            copy = copies[where.base]
            strided = target.layout is torch.strided and not target.is_nested
            if value is None and strided and target.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr():
                raise ReplaylensError(
                    f"{function.short} wrote into a copy: a view of what is written is none on these values"
                )
    return Written(result, written, copies)


def before_write(
    bases: tuple[torch.Tensor, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Derived, ...],
    values: tuple[torch.Tensor | None, ...],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function that writes was called with, by what `mutate` is given for it."""
    views = [_derive(bases, target) if v is None else v for target, v in zip(targets, values, strict=True)]
    return _concrete(args, bases, tuple(views)), _concrete(kwargs, bases, tuple(views))


def _concrete(value: Any, bases: tuple[torch.Tensor, ...], written: tuple[torch.Tensor, ...]) -> Any:
    """The arguments with tensors in the place of what stands for them."""
    if isinstance(value, Nth):
        return written[value.number]
    if isinstance(value, Derived):
        return _derive(bases, value)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [_concrete(item, bases, written) for item in value]
        return _tuple_of(type(value), items) if isinstance(value, tuple) else items
    if type(value) is dict:
        return {key: _concrete(item, bases, written) for key, item in value.items()}
    if type(value) is slice:
        return slice(*[_concrete(item, bases, written) for item in (value.start, value.stop, value.step)])
    return value


def _tuple_of(kind: type, items: list[Any]) -> Any:
    """A tuple of a kind. Named ones take their items one by one, torch's named results (`torch.sort`) in a list."""
    return getattr(kind, "_make", kind)(items)


def _apart(view: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """The view that is to be written, or a copy of the value that a patch has put in its place, whatever numbers that
    has.
    """
    return view if value is None else writable_copy(value)


def _into(out: Any, function: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function(..., out=out)`. Torch forbids it under vmap, and mostly where gradients flow: then by copying."""
    given = (*args, *kwargs.values())
    flows = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in (*given, out))
    if not flows and peek_interpreter_stack() is None:
        return function.function(*args, **kwargs, out=out)
    if peek_interpreter_stack() is None:
        try:  # what is made of other operations may let gradients through
            return function.function(*args, **kwargs, out=out)
        except RuntimeError as error:
            if "support automatic differentiation" not in str(error):
                raise
    result = function.function(*args, **kwargs)
    pairs = zip(out, result, strict=True) if isinstance(out, (tuple, list)) else ((out, result),)
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)
    return out


def _derive(copies: tuple[torch.Tensor, ...], view: Derived) -> torch.Tensor:
    tensor = copies[view.base]
    for step in view.steps:
        with torch.set_grad_enabled(step.grad or torch.is_grad_enabled()):
            tensor = take_step(tensor, step)
    return tensor


def take_step(tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """The view that a step makes of a tensor."""
    fill: Callable[[Any], Any] = lambda value: tensor if value is Hole.HERE else value  # noqa: E731
    args = [fill(value) for value in step.args]
    kwargs = {key: fill(value) for key, value in step.kwargs.items()}
    made = step.function.function(*args, **kwargs)
    for index in step.part:
        made = made[index]
    return made


def _batched_among(value: Any) -> torch.Tensor | None:
    if peek_interpreter_stack() is None:
        return None
    if isinstance(value, torch.Tensor):
        return value if is_batched(value) else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := _batched_among(item)) is not None), None)
