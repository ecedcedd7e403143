"""A write in place as a pure call, and what the model itself called beneath such wrappers.

A `Write` is the node, `mutate` what it runs. That copies what is written, derives the views that the call was given
from the copy, and lets the call write there. It gives what the call gave and the new values. Gradients pass as they do
through the write itself, and it works under `torch.func.vmap` where the written value is shared by all variants and
what is written into it is not. No other module knows in which order the arguments of `mutate` stand.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from attrs import evolve, fields, frozen

from ..errors import ReplaylensError
from .copies import writable_copy
from .node import Call, Ref, value_of
from .runtime import blank, fill_new, filled, laid_out
from .target import Target
from .torch_private import is_batched, peek_interpreter_stack
from .trees import Branch, leaves, thaw


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


class WriteArguments(NamedTuple):
    """What `mutate` is given, in its order. In a node trees of Refs, in a recording of Handles."""

    function: Target  # what the model called
    bases: Any  # the memory that it wrote, whole, as it was before
    args: Any  # the model's own arguments: an `Nth` for each that is written, or reads what is written meanwhile ...
    kwargs: Any  # ... and a `Derived` without steps for a base that is only read
    targets: Any  # a `Derived` for each Nth: first those that are written, then those that are only read
    values: Any  # what each target held as a value of its own, where it is a view; else None


class Written(NamedTuple):
    """What `mutate` gives."""

    result: Any  # what the call gave that it was not given
    targets: Any  # the new values of what it was told to write
    bases: Any  # ... and of the memory that those lie in


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


# -- the node ----------------------------------------------------------------------------------------------------------


@frozen
class Write(Call):
    """A call of `mutate`. All that reads, moves or runs calls takes it for a call of that pure function.

    `x[0].add_(y)`, of an x that somebody reads later, is written down so:

        Write(
            name="add_1_3", target=mutate,
            args=WriteArguments(
                function=torch.Tensor.add_, bases=(x,), args=(Nth(0), y), kwargs={},
                targets=(Derived(base=0, steps=(<[0]>,)),), values=(getitem_1_2,),
            ),
            returns=Written(result=None, targets=(add_1_3[1][0],), bases=(add_1_3[2][0],)),
            result=add_1_3[1][0],
        )

    What is written is `x`, copied. `getitem_1_2`, the value that `x[0]` had for the program, is named beside the way to
    it for one case alone: a patch has put another tensor there. Then the model, with a hook in the place of the patch,
    would write to that tensor and leave x as it is, and so does the replay; elsewhere `keeping` drops the value. Who
    reads `x` after this reads `add_1_3[2][0]`, and another view of it is derived from there.

    Laws (laws.py): each number leads to a base or a target, each step has one hole, each target one value or None.
    """

    @property
    def arguments(self) -> WriteArguments:
        """Its arguments by name."""
        return WriteArguments(*self.args)

    @property
    def gives(self) -> Written:
        """What it gives by name, as trees of its own Refs."""
        return Written(*self.returns)

    @property
    def writes_out(self) -> bool:
        """Does it write the tensor that it is given as `out=`? Torch refuses that where gradients are needed."""
        return "out" in (self.arguments.kwargs.keys or ())

    @property
    def is_handed_on(self) -> bool:
        """Is its value, as the model saw it, the tensor that was written?"""
        written = self.gives.targets
        return all(leaf in written for leaf in leaves(value_of(self)) if type(leaf) is Ref)

    @property
    def only_read(self) -> tuple[Ref, ...]:
        """The values of views of the written memory that it reads and does not write."""
        further = self.arguments.values[len(self.gives.targets) :]
        return tuple([value for value in further if type(value) is Ref])

    def given(self, **changes: Any) -> Write:
        """The write with other arguments, by name."""
        return evolve(self, args=tuple(self.arguments._replace(**changes)))

    def keeping(self, values: Set[Ref]) -> Write:
        """The write with only these values of its targets. All other targets are derived from their memory."""
        known = self.arguments.values
        if not any(type(value) is Ref for value in known):
            return self
        return self.given(values=tuple([value if value in values else None for value in known]))

    def view(self, tree: Any) -> Derived | None:
        """The view of written memory that stands at a place among the model's arguments, None where none does."""
        place = unpacked(tree)
        return unpacked(self.arguments.targets[place.number]) if type(place) is Nth else place

    def value(self, tree: Any) -> Ref | None:
        """What the target at a place held as a value of its own."""
        place = unpacked(tree)
        return self.arguments.values[place.number] if type(place) is Nth else None


def packed(place: Nth | Derived | Step) -> Branch:
    """What stands for a view, as a part of a frozen tree."""
    return Branch(type(place), tuple(place))


def unpacked(tree: Any) -> Any:
    """The `Nth`, `Derived` or `Step` that a part of a frozen tree is, with its fields by name; None if it is none."""
    return tree.kind(*tree.items) if type(tree) is Branch and tree.kind in (Nth, Derived, Step) else None


def plain_call(call: Call, **changes: Any) -> Call:
    """The call as one of another function, and so no write any more."""
    return Call(**{each.name: getattr(call, each.name) for each in fields(Call)} | changes)


# -- the model's own call ----------------------------------------------------------------------------------------------


class Original(NamedTuple):
    """A call as the model made it. Among the arguments of a write stand `Nth` and `Derived`."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_WRAPPERS = {
    laid_out: 1,
    blank: 1,
    filled: 1,
    fill_new: 2,
}  # how many arguments come before the model's; first its function


def original_call(call: Call) -> Original:
    """What the model called, beneath what was put around it to make it pure; elsewhere the call itself."""
    if isinstance(call, Write):
        given = call.arguments
        return Original(given.function, given.args, dict(zip(given.kwargs.keys or (), given.kwargs.items, strict=True)))
    own = _WRAPPERS.get(call.target.function, 0)
    return Original(call.args[0] if own else call.target, call.args[own:], dict(call.kwargs))


def places(tree: Any) -> list[Nth | Derived]:
    """All that stands for tensors in the written memory, in a tree of the model's own arguments."""
    if type(tree) is Branch and tree.kind in (Nth, Derived):
        return [unpacked(tree)]
    items = tree if type(tree) is tuple else tree.items if type(tree) is Branch else ()
    return [place for item in items for place in places(item)]


def holds_tensor(tree: Any) -> bool:
    """Does a tensor stand in a tree of the model's own arguments, or what stands for one?"""
    return any(type(leaf) is Ref for leaf in leaves(tree)) or bool(places(tree))


def concrete(call: Call, tree: Any, fill: Callable[[Any], Any]) -> Any:
    """A tree of the model's own arguments as they were: with values in the place of Refs and of views."""
    value = thaw(tree, fill)
    if not isinstance(call, Write) or not holds_tensor(tree):
        return value
    read = lambda leaf: fill(leaf) if type(leaf) is Ref else leaf  # noqa: E731
    given = WriteArguments(*[thaw(one, read) for one in call.arguments])
    pairs = zip(given.targets, given.values, strict=True)
    views = [_derive(given.bases, target) if held is None else held for target, held in pairs]
    return _concrete(value, given.bases, tuple(views))
