"""The calls that purity adds: what a write in place becomes in a program that never writes.

`mutate` copies what is written, derives the views that the call was given from the copy, and lets the call write there.
It gives what the call gave and the new values. Gradients pass as they do through the write itself, and it works under
`torch.func.vmap` where the written value is shared by all variants and what is written into it is not.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..errors import NotDifferentiable, ReplaylensError
from .sharing import overlaps_itself
from .target import Target
from .torch_private import is_batched, negative_view, outside_of_transforms, peek_interpreter_stack
from .trees import freeze, thaw
from .world import drawing_alone

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
        return tuple_of(type(value), items) if isinstance(value, tuple) else items
    if type(value) is dict:
        return {key: _concrete(item, bases, written) for key, item in value.items()}
    if type(value) is slice:
        return slice(*[_concrete(item, bases, written) for item in (value.start, value.stop, value.step)])
    return value


def tuple_of(kind: type, items: list[Any]) -> Any:
    """A tuple of a kind. Named ones take their items one by one, torch's named results (`torch.sort`) in a list."""
    return getattr(kind, "_make", kind)(items)


def _apart(view: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """The view that is to be written, or a copy of the value that a patch has put in its place, whatever numbers that
    has.
    """
    return view if value is None else writable_copy(value)


def untransformed() -> AbstractContextManager[Any]:
    """Outside of every `torch.func` transform that runs: for what outlives it, and for draws, which it forbids."""
    return outside_of_transforms()


def history_of(tensor: torch.Tensor) -> str | None:
    """What autograd would do for a tensor, by name; None where it has no history, or one that torch will not show."""
    try:
        return type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else None
    except RuntimeError:  # a view that was made without gradients and written with them
        return None


def same_content(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same in every number, NaN included; 0.0 is -0.0. For tensors under a capture: sameness.py has the bits."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.is_meta:
        return other.is_meta
    one, other = one.detach(), other.detach()
    if one.layout is not torch.strided or one.is_quantized:
        one, other = (one.dequantize(), other.dequantize()) if one.is_quantized else (one.to_dense(), other.to_dense())
    return bool(((one == other) | ((one != one) & (other != other))).all())


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


def writable_copy(tensor: torch.Tensor, batched: torch.Tensor | None = None) -> torch.Tensor:
    """A copy with the same strides, the bytes in its gaps included."""
    if batched is not None and not is_batched(tensor):
        one = batched.detach().reshape(-1)[:1].sum().to(tensor.dtype)
        never = torch.zeros((), dtype=torch.bool, device=tensor.device)
        return torch.where(never, one, tensor)
    if tensor.is_conj():
        return writable_copy(tensor.conj()).conj()
    if tensor.is_neg():
        return negative_view(writable_copy(negative_view(tensor)))
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.clone()
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def copy_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the tensor does, its offset included."""
    offset = tensor.storage_offset() if tensor.layout is torch.strided else 0
    if tensor.is_conj():
        return copy_in_place(tensor.conj()).conj()
    if tensor.is_neg():
        return negative_view(copy_in_place(negative_view(tensor)))
    copy = writable_copy(tensor)
    if not offset or copy.stride() != tensor.stride():
        return copy
    span = 1 + sum((size - 1) * stride for size, stride in zip(copy.shape, copy.stride(), strict=True))
    flat = torch.cat((copy.new_zeros(offset), copy.as_strided((span,), (1,), copy.storage_offset())))
    return flat.as_strided(tensor.shape, tensor.stride(), offset)


def _batched_among(value: Any) -> torch.Tensor | None:
    if peek_interpreter_stack() is None:
        return None
    if isinstance(value, torch.Tensor):
        return value if is_batched(value) else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := _batched_among(item)) is not None), None)


def as_strided_from(tensor: torch.Tensor, shape: Any, strides: Any, shift: int) -> torch.Tensor:
    """A view of a tensor's memory by geometry, its place relative to the tensor's own."""
    return tensor.as_strided(shape, strides, tensor.storage_offset() + shift)


_BY_GEOMETRY = frozenset("resize resize_ resize_as resize_as_ resized _reshape_alias _reinterpret_tensor".split())


def looks_at_memory(target: Target) -> bool:
    """Does it look at memory by numbers of its own, and not at what it is given in the order of its elements?"""
    return "as_strided" in target.name or target.short in _BY_GEOMETRY


def resized(
    tensor: torch.Tensor, shape: tuple[int, ...], is_filled: bool = False, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The tensor with another number of elements: the first ones in memory stay, new ones are undefined, if torch fills
    none.
    """
    made = tensor.new_zeros((math.prod(shape),))
    if is_filled:
        fill(made)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    count = min(made.numel(), tensor.numel())
    made[:count] = tensor.detach().permute(order).reshape(-1)[:count]
    return made.view(shape) if strides is None else made.as_strided(shape, strides)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """What `copy.deepcopy` makes of a tensor."""
    return tensor.detach().clone()


OTHER_KIND = (
    "gradients of a tensor that was given other memory by `.data =`, of another shape or dtype, cannot be replayed.\n"
    "Assign numbers of the same shape and dtype, or another tensor."
)


class _Standing(torch.autograd.Function):
    """One tensor's content, another one's place in the history."""

    generate_vmap_rule = True

    @staticmethod
    def forward(place: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        """The content."""
        return content.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Of what kind both are."""
        ctx.kinds = [(tuple(value.shape), value.dtype) for value in inputs]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """To the place, unchanged."""
        if ctx.kinds[0] != ctx.kinds[1]:
            raise NotDifferentiable(OTHER_KIND)
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent of the place."""
        return None if tangents[0] is None else tangents[0].clone()


def standing(place: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """What `place.data = content` makes of a tensor: the new content, the gradient goes where it went."""
    if not place.requires_grad and peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return content.detach()
    return _Standing.apply(place, content.detach())  # type: ignore[no-untyped-call]


def what_is_raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """The exception that a call raises on these values, None if it raises none. It changes nothing: it gets copies of
    what it might write, and the generator is put back.
    """
    leaf = lambda value: _own_copy(value) if isinstance(value, torch.Tensor) else value  # noqa: E731
    trees = freeze(args, leaf), freeze(kwargs, leaf)
    with drawing_alone():
        state = torch.default_generator.get_state()
        try:
            with torch.no_grad():
                function(*thaw(trees[0], _as_is), **thaw(trees[1], _as_is))
        except Exception as error:
            return error.with_traceback(None)
        finally:
            torch.default_generator.set_state(state)
    return None


def kind_of(error: Exception | None) -> str | None:
    """The name of an exception's class."""
    return None if error is None else type(error).__qualname__


def message_of(error: Exception | None) -> str | None:
    """What an exception says. Addresses in memory in it say nothing."""
    return None if error is None else f"{kind_of(error)}: {_ADDRESS.sub('0x', str(error))}"


_ADDRESS = re.compile("0x[0-9a-fA-F]+")


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout, without a history."""
    made = tensor.detach()
    if made.layout is not torch.strided or made.is_quantized or made.is_contiguous() or made.is_meta:
        return made.clone()
    spread = torch.empty(0, dtype=made.dtype, device=made.device).set_(made.untyped_storage().clone())
    return spread.as_strided(made.shape, made.stride(), made.storage_offset())


def _as_is(leaf: Any) -> Any:
    return leaf


def fill_new(function: Target, dtypes: tuple[torch.dtype, ...], args: Any, kwargs: dict[str, Any]) -> Any:
    """`function(..., out=t)` where torch gives `t` new memory: the result in the dtypes of the given tensors."""
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
        made = function.function(*args, **kwargs)
        several = isinstance(made, (tuple, list))
        cast = [one.to(dtype) for one, dtype in zip(made if several else (made,), dtypes, strict=True)]
        return tuple(cast) if several else cast[0]
    device = next((value.device for value in args if isinstance(value, torch.Tensor)), None)
    fresh = tuple([torch.empty(0, dtype=dtype, device=device) for dtype in dtypes])
    return function.function(*args, **kwargs, out=fresh if len(fresh) > 1 else fresh[0])


def blank(function: Target, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What `torch.empty` and its kin give, filled with zeros: undefined memory is no value that could be given
    again.
    """
    made = function.function(*args, **kwargs)
    return clear(made)


def filled(function: Target, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The same where torch itself fills such memory, under `torch.use_deterministic_algorithms(True)`."""
    return fill(function.function(*args, **kwargs))


def fills_memory() -> bool:
    """Does torch fill memory that it was not told to fill?"""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def fill(made: Any) -> Any:
    """What torch fills it with: not-a-number, or the largest whole number."""
    if not made.numel() or made.layout is not torch.strided or made.is_quantized:
        return made
    is_whole = not (made.is_floating_point() or made.is_complex() or made.dtype is torch.bool)
    most = torch.iinfo(made.dtype).max if is_whole else True if made.dtype is torch.bool else float("nan")
    with torch.no_grad():
        return made.fill_(most)


BLANKS = (blank, filled)


def clear(made: Any) -> Any:
    """Zeros in a tensor that was just allocated."""
    with torch.no_grad():
        return made.zero_() if made.numel() and made.layout is torch.strided and not made.is_quantized else made


def hooked(tensor: torch.Tensor, hook: Callable[..., Any]) -> torch.Tensor:
    """The tensor, with a hook on the gradient that comes back to it. A parameter of the model's may have it already."""
    if not tensor.requires_grad or any(known is hook for known in (tensor._backward_hooks or {}).values()):
        return tensor
    same = tensor.view_as(tensor)
    same.register_hook(hook)
    return same


def needing(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that needs gradients: a leaf, if it did not. A transform has no leaves of torch's own."""
    if tensor.requires_grad:
        return tensor
    return fresh_leaf(tensor) if peek_interpreter_stack() is None else tensor.detach()


def new_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """What `nn.Parameter` makes of a tensor: a leaf of its own, over the same memory."""
    if peek_interpreter_stack() is not None:
        return tensor.detach()
    is_kept = not tensor.is_inference() or torch.is_inference_mode_enabled()
    return tensor.detach().requires_grad_() if is_kept else fresh_leaf(tensor)


def alias(tensor: torch.Tensor, number: int | None = None) -> torch.Tensor:
    """The tensor itself: what a module that hands its input on computes; or the n-th that a module hands on, where the
    module itself has read or kept it.
    """
    return tensor


def read_in_another_thread(*values: Any) -> None:
    """Stands for what a thread besides the forward's own did with values: it can have read all of them."""


def gathered(*parts: Any) -> tuple[Any, ...]:
    """Values of several nodes, as the parts of one."""
    return parts


def in_layout(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor in another memory layout, where that is one in which each element has its place."""
    if strides is None or tensor.layout is not torch.strided or tensor.stride() == strides:
        return tensor
    place = tensor.detach().new_empty_strided(tuple(tensor.shape), strides)
    return tensor if overlaps_itself(place) else place.zero_().copy_(tensor)  # in a way that gradients can go


def as_it_lay(old: Any, new: Any) -> Any:
    """New numbers in memory as the old value lies in it: what stands in its gaps is there, for `as_strided` may look at
    them. Gradients go the way of the new numbers.
    """
    if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)) and len(old) == len(new):
        return tuple([as_it_lay(one, other) for one, other in zip(old, new, strict=True)])
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or _lie_alike(old, new):
        return new
    if peek_interpreter_stack() is not None or overlaps_itself(old):
        return new
    return copy_in_place(old.detach()).copy_(new)


def _lie_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.layout is not torch.strided or new.layout is not torch.strided or old.shape != new.shape:
        return True
    return old.stride() == new.stride()


def laid_out(function: Target, value: Any, *args: Any, **kwargs: Any) -> Any:
    """What a patch makes of a value, in memory as that lies."""
    return as_it_lay(value, function.function(value, *args, **kwargs))


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same value without a history, and with its flag: torch chooses kernels by whether a tensor needs
    gradients.
    """
    if not tensor.requires_grad or tensor.is_inference():
        return tensor
    with untransformed():  # a recorded value stands outside of what runs now, and such a transform forbids the flag
        return tensor.detach().requires_grad_()


def fresh_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same value as a leaf of autograd's graph: gradients end here."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone().requires_grad_()
    return tensor.detach().requires_grad_()


def outside_inference(tensor: torch.Tensor) -> torch.Tensor:
    """What was made within inference mode and is given there, for a replay that runs outside of it: a copy that
    autograd may save. Else the tensor itself.
    """
    if not tensor.is_inference() or not torch.is_inference_mode_enabled():
        return tensor
    if type(tensor) is not torch.Tensor or vars(tensor) or peek_interpreter_stack() is not None:
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        return copy_in_place(tensor).requires_grad_(tensor.requires_grad)


def placed(value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The value at a place of its own in autograd's graph: the gradient there is that of what reads this node alone.

    What has no history becomes a leaf. A call may give one of its arguments back, the very object (dropout in eval
    mode does): `others` are those that it must be told from.
    """
    if not value.requires_grad:
        return fresh_leaf(value)
    for other in others:
        if other is value:
            with torch.enable_grad():
                return value.view_as(value) if value.layout is torch.strided else value.clone()
    return value


def all_placed(count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first `count` values, each at a place of its own; one object that stands several times stays one."""
    made: dict[int, torch.Tensor] = {}
    for value in values[:count]:
        if id(value) not in made:
            made[id(value)] = placed(value, *values[count:])
    return tuple([made[id(value)] for value in values[:count]])
