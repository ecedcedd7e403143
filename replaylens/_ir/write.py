"""In-place writes as pure calls, and the model's own call beneath such wrappers.

A `Write` is the node, `mutate` the function that it runs: it copies the written storages, derives from the copies the
views that the call was given, and lets the call write there. It returns what the call returned, and the new values.
Gradients flow as they do through the in-place call. Under `torch.func.vmap` it also works where the written value is
shared by all variants and the values written into it are not. No other module knows the order of `mutate`'s arguments.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from attrs import evolve, fields, frozen

from ..errors import ReplaylensError
from .memory import writable_copy
from .node import Call, Ref, value_of
from .runtime import blank, blank_filled, fill_new, in_old_layout
from .target import Target
from .torch_private import is_batched, is_wrapped, peek_interpreter_stack, unwrapped
from .trees import Branch, leaves, thaw


class Hole(enum.Enum):
    """Marks the place of the viewed tensor among the arguments of a view step."""

    HERE = "tensor"


class ViewStep(NamedTuple):
    """One view call, `function(*args, **kwargs)` with the tensor in the hole. `part` selects one of several results."""

    function: Target
    args: Any
    kwargs: Any
    part: tuple[int, ...]
    grad: bool


class DerivedView(NamedTuple):
    """A tensor that aliases what is written: the number of its base, and the view calls that lead from there to it."""

    base: int
    steps: tuple[ViewStep, ...]


class TargetIndex(NamedTuple):
    """Among the arguments of a call that writes: its n-th target, the very tensor object that is written."""

    number: int


class WriteArguments(NamedTuple):
    """The arguments of `mutate`, in order: trees of Refs in a node, of ValueIds in a recording."""

    function: Target  # what the model called
    bases: Any  # the storages that it wrote, each as one whole tensor, as they were before
    args: Any  # the model's own arguments, with a TargetIndex for each that is written, or aliases what is written ...
    kwargs: Any  # ... and a DerivedView without steps for a base that is only read
    targets: Any  # a DerivedView for each TargetIndex: first those that are written, then those that are only read
    values: Any  # for each target that is a view, its own recorded value; else None


class WriteResults(NamedTuple):
    """What `mutate` returns."""

    result: Any  # what the call returned, besides tensors that it was given
    targets: Any  # the new values of what it wrote
    bases: Any  # the new values of the storages that these lie in


def mutate(
    function: Target,
    bases: tuple[torch.Tensor, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[DerivedView, ...],
    values: tuple[torch.Tensor | None, ...],
) -> WriteResults:
    """Call a function that writes in place, on copies of what it writes. Nothing that was passed in changes.

    `values` holds the recorded value of each target that is a view, where a patch may have replaced it. Such a value is
    a tensor of its own, like one that a forward hook returns: the write goes to it and not to the base.
    """
    made = mutate_surely(function, bases, args, kwargs, targets, values)
    batched = _first_batched((bases, args, kwargs))
    if peek_interpreter_stack() is None or (batched is not None and not torch.compiler.is_compiling()):
        for target, where, value in zip(made.targets, targets, values, strict=True):
            copy = made.bases[where.base]
            strided = target.layout is torch.strided and not target.is_nested
            if value is None and strided and _address(target) != _address(copy):
                raise ReplaylensError(
                    f"{function.short} wrote into a copy: on these values, a view of what it writes is a copy"
                )
    return made


def mutate_surely(
    function: Target,
    bases: tuple[torch.Tensor, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[DerivedView, ...],
    values: tuple[torch.Tensor | None, ...],
) -> WriteResults:
    """The same where it is sure that what is written are views, whatever the layouts: no address is compared."""
    batched = _first_batched((bases, args, kwargs))
    with torch.enable_grad():  # the old value's gradient passes through, also where the write itself has none
        copies = tuple([_copied(base, batched) for base in bases])
    pairs = zip(targets, values, strict=True)
    written = tuple([_derive(copies, view) if held is None else writable_copy(held) for view, held in pairs])
    given, named = _concrete(args, copies, written), _concrete(kwargs, copies, written)
    result = (
        _call_with_out(named.pop("out"), function, given, named)
        if "out" in named
        else function.function(*given, **named)
    )
    return WriteResults(result, written, copies)


def _copied(base: torch.Tensor, batched: torch.Tensor | None) -> torch.Tensor:
    """A copy to write to. The compiler does not look through all that is asked of tensors of any layout."""
    if torch.compiler.is_compiling() and batched is None and base.is_contiguous() and not base.is_complex():
        return base.clone()
    return writable_copy(base, batched)


def _concrete(value: Any, bases: tuple[torch.Tensor, ...], written: tuple[torch.Tensor, ...]) -> Any:
    """The arguments, with tensors in the place of what stands for them."""
    if isinstance(value, TargetIndex):
        return written[value.number]
    if isinstance(value, DerivedView):
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
    """A tuple of a class. Named tuples take their items one by one, torch's named results (`torch.sort`) a list."""
    return getattr(kind, "_make", kind)(items)


def _call_with_out(out: Any, function: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function(..., out=out)`. Torch forbids it under vmap, and mostly where gradients flow: there the result is
    copied.
    """
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


def _address(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor begins, beneath all transforms."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor.untyped_storage().data_ptr()


def _derive(copies: tuple[torch.Tensor, ...], view: DerivedView) -> torch.Tensor:
    tensor = copies[view.base]
    for step in view.steps:
        with torch.set_grad_enabled(step.grad or torch.is_grad_enabled()):
            tensor = apply_view_step(tensor, step)
    return tensor


def apply_view_step(tensor: torch.Tensor, step: ViewStep) -> torch.Tensor:
    """The view that a step makes of a tensor."""
    fill: Callable[[Any], Any] = lambda value: tensor if value is Hole.HERE else value  # noqa: E731
    args = [fill(value) for value in step.args]
    kwargs = {key: fill(value) for key, value in step.kwargs.items()}
    made = step.function.function(*args, **kwargs)
    for index in step.part:
        made = made[index]
    return made


def _first_batched(value: Any) -> torch.Tensor | None:
    if peek_interpreter_stack() is None:
        return None
    if isinstance(value, torch.Tensor):
        return value if is_batched(value) else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := _first_batched(item)) is not None), None)


# -- the node ----------------------------------------------------------------------------------------------------------


@frozen
class Write(Call):
    """A call of `mutate`. Whatever reads, moves or runs calls may treat it as a call of that pure function.

    `x[0].add_(y)`, where x is read again later, is recorded as

        Write(
            name="add_1_3", target=mutate,
            args=WriteArguments(
                function=torch.Tensor.add_, bases=(x,), args=(TargetIndex(0), y), kwargs={},
                targets=(DerivedView(base=0, steps=(<[0]>,)),), values=(getitem_1_2,),
            ),
            returns=WriteResults(result=None, targets=(add_1_3[1][0],), bases=(add_1_3[2][0],)),
            result=add_1_3[1][0],
        )

    `mutate` copies `x`, derives `x[0]` from the copy and calls `add_` there. Later readers of `x` read `add_1_3[2][0]`,
    and other views of `x` are derived from that.

    `values` is for one case alone: a patch has replaced `getitem_1_2`. With a hook in the patch's place the model would
    write to the hook's tensor and leave `x` as it is, so the replay does the same. Where the value is not patched,
    `with_values` drops it.

    Invariants, checked by validate.py: each number names a base or a target; each view step has exactly one hole; each
    target has one value or None; a result is given for each written target and for each base.
    """

    @property
    def arguments(self) -> WriteArguments:
        """Its arguments by name."""
        return WriteArguments(*self.args)

    @property
    def gives(self) -> WriteResults:
        """What it returns by name, as trees of its own Refs."""
        return WriteResults(*self.returns)

    @property
    def writes_out(self) -> bool:
        """True if it writes the tensor passed as `out=`, which torch refuses where gradients are needed."""
        return "out" in (self.arguments.kwargs.keys or ())

    @property
    def returns_target(self) -> bool:
        """True if its value, as the model saw it, is the tensor that was written."""
        written = self.gives.targets
        return all(leaf in written for leaf in leaves(value_of(self)) if type(leaf) is Ref)

    @property
    def only_read(self) -> tuple[Ref, ...]:
        """The values of views of the written storage that it reads and does not write."""
        further = self.arguments.values[len(self.gives.targets) :]
        return tuple([value for value in further if type(value) is Ref])

    def given(self, **changes: Any) -> Write:
        """The write with other arguments, by name."""
        return evolve(self, args=tuple(self.arguments._replace(**changes)))

    def with_values(self, values: Set[Ref]) -> Write:
        """The write with only these values of its targets. All other targets are derived from their bases."""
        known = self.arguments.values
        if not any(type(value) is Ref for value in known):
            return self
        return self.given(values=tuple([value if value in values else None for value in known]))

    def view(self, tree: Any) -> DerivedView | None:
        """The view of a written storage that stands at a place among the model's arguments; None if none does."""
        place = unpacked_place(tree)
        return unpacked_place(self.arguments.targets[place.number]) if type(place) is TargetIndex else place

    def value(self, tree: Any) -> Ref | None:
        """The recorded value of the target that stands at a place among the model's arguments."""
        place = unpacked_place(tree)
        return self.arguments.values[place.number] if type(place) is TargetIndex else None


def packed_place(place: TargetIndex | DerivedView | ViewStep) -> Branch:
    """A target or view as a part of a frozen tree."""
    return Branch(type(place), tuple(place))


def unpacked_place(tree: Any) -> Any:
    """The target, view or step that a part of a frozen tree is, with named fields; None if it is none."""
    return (
        tree.kind(*tree.items) if type(tree) is Branch and tree.kind in (TargetIndex, DerivedView, ViewStep) else None
    )


def as_plain_call(call: Call, **changes: Any) -> Call:
    """The call as a plain `Call` with other fields, no longer a write."""
    return Call(**{each.name: getattr(call, each.name) for each in fields(Call)} | changes)


# -- the model's own call ----------------------------------------------------------------------------------------------


class Original(NamedTuple):
    """A call as the model made it. The arguments of a write contain targets and views."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# Of functions that take the model's: how many arguments come before the model's own. The first is its function.
_WRAPPERS = {in_old_layout: 1, blank: 1, blank_filled: 1, fill_new: 2}


def is_wrapper(function: Any) -> bool:
    """True for a function of replaylens that runs the model's own."""
    return function in _WRAPPERS


def original_target(call: Call) -> Target:
    """The function that the model called."""
    if isinstance(call, Write):
        return call.arguments.function
    found: Target = call.args[0] if is_wrapper(call.target.function) else call.target
    return found


def original_call(call: Call) -> Original:
    """The model's call, without the wrapper that made it pure."""
    if isinstance(call, Write):
        given = call.arguments
        return Original(given.function, given.args, dict(zip(given.kwargs.keys or (), given.kwargs.items, strict=True)))
    own = _WRAPPERS.get(call.target.function, 0)
    return Original(original_target(call), call.args[own:], dict(call.kwargs))


def places_in(tree: Any) -> list[TargetIndex | DerivedView]:
    """All targets and views in a tree of the model's own arguments."""
    if type(tree) is Branch and tree.kind in (TargetIndex, DerivedView):
        return [unpacked_place(tree)]
    items = tree if type(tree) is tuple else tree.items if type(tree) is Branch else ()
    return [place for item in items for place in places_in(item)]


def holds_tensor(tree: Any) -> bool:
    """True if a tree of the model's own arguments contains a tensor, or what stands for one."""
    return any(type(leaf) is Ref for leaf in leaves(tree)) or bool(places_in(tree))


def concrete_arguments(call: Call, tree: Any, fill: Callable[[Any], Any]) -> Any:
    """A tree of the model's own arguments with values in the place of Refs, targets and views."""
    value = thaw(tree, fill)
    if not isinstance(call, Write) or not holds_tensor(tree):
        return value
    read = lambda leaf: fill(leaf) if type(leaf) is Ref else leaf  # noqa: E731
    given = WriteArguments(*[thaw(one, read) for one in call.arguments])
    pairs = zip(given.targets, given.values, strict=True)
    views = [_derive(given.bases, target) if held is None else held for target, held in pairs]
    return _concrete(value, given.bases, tuple(views))
