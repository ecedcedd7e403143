"""What each patch does to one tensor: pure functions with stable names, which a program can hold as its calls.

In: a value, the patch's tensors, its literals and its part. Out: the new value, of the same shape and dtype; outside
the part it is the same to the last bit. No argument is written to, gradients flow to all of them, and all may be
batched by `torch.func.vmap`. Sites, programs and names are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen

from .._ir.autograd import history_of, refusing_gradient, saved_below
from .._ir.equality import same, same_content
from .._ir.memory import writable_copy
from .._ir.target import Target
from .._ir.torch_private import is_any_autocast_on, outside_of_transforms, peek_interpreter_stack
from .._ir.trees import freeze_deep, thaw
from ..errors import BadPatch, ShapeMismatch
from .part import Part, broadcasts, require_number

Tensor = torch.Tensor
Operand = torch.Tensor | float


def set_value(value: Tensor, new: Operand, part: Part | None = None) -> Tensor:
    """The value, or a part of it, replaced."""
    if part is not None:
        return part.write(value, new)
    if isinstance(new, Tensor):
        _require_same_kind("Set", new, value, None)
        return new
    require_number(value, new)
    return torch.full_like(value, new)


def zero(value: Tensor, part: Part | None = None) -> Tensor:
    """The value, or a part of it, replaced by zeros."""
    if part is None:
        return torch.zeros_like(value)
    if is_narrow(value.dtype):
        return torch.where(part.mask(value.shape, value.device), torch.zeros_like(value), value)
    return value.masked_fill(part.mask(value.shape, value.device), 0)


def take_from(value: Tensor, source: Tensor, part: Part | None = None) -> Tensor:
    """The value, or a part of it, replaced by that of another one of its shape."""
    if source.shape != value.shape or source.dtype != value.dtype:
        more = "" if part is None else ": the part is taken of both"
        raise ShapeMismatch(
            f"From was given {_kind(source)}; the value is {_kind(value)}.\nGive one of that shape and dtype{more}."
        )
    return source if part is None else part.take(value, source)


def mean(value: Tensor, of: Tensor | None = None, *, over: tuple[Any, ...] = (0,), part: Part | None = None) -> Tensor:
    """The value, or a part of it, replaced by its own mean over some axes, or that of another value."""
    _require_floating("Mean", value)
    source = value if of is None else of
    if source.dtype != value.dtype:
        _require_same_kind("Mean(of=)", source, value, part)
    axes = _mean_axes(source, over, part)
    apart = source if part is None else source.reshape([axis.size for axis in part.axes(source.shape)])
    if of is None and all(apart.shape[axis] == 1 for axis in axes):
        raise BadPatch(
            f"Mean changes nothing: there is only one value along {_words(over)} of the shape {tuple(value.shape)}.\n"
            "Name other axes (over=), or the values to take the mean of (of=)."
        )
    found = apart.mean(axes, keepdim=True)
    wanted = value.shape if part is None else torch.Size([axis.size for axis in part.axes(value.shape)])
    if len(found.shape) != len(wanted) or not broadcasts(found.shape, wanted):
        raise ShapeMismatch(
            f"Mean over {_words(over)} of a tensor of shape {tuple(source.shape)} does not fit the value, "
            f"which is {tuple(value.shape)}{_at_part(part)}."
        )
    return found.expand(wanted).contiguous() if part is None else part.take(value, found)


def _mean_axes(source: Tensor, over: tuple[Any, ...], part: Part | None) -> list[int]:
    """Axes by their names in the pattern, or their numbers in the tensor, as numbers of the unpacked axes."""
    rank = source.dim()
    if not rank:
        raise BadPatch("Mean over axis 0: the value is a single number.")
    if outside := next((axis for axis in over if isinstance(axis, int) and not -rank <= axis < rank), None):
        raise BadPatch(f"Mean over axis {outside}: the value has {rank}: {tuple(source.shape)}.")
    numbers = {axis % rank for axis in over if isinstance(axis, int)}
    if part is None:
        return sorted(numbers)
    words = [("..." if axis.name.startswith("...") else axis.name, axis.within) for axis in part.axes(source.shape)]
    return [n for n, (word, within) in enumerate(words) if word in over or within in numbers]


def resample(
    value: Tensor, permutation: tuple[int, ...] | None = None, seed: int = 0, part: Part | None = None
) -> Tensor:
    """The value, or a part of it, with the rows of its batch in another order."""
    if value.dim() == 0 or value.shape[0] < 2:
        raise BadPatch(
            f"Resample needs a batch of at least two to take other rows from; the value is {tuple(value.shape)}."
        )
    rows = value.shape[0]
    order = permutation if permutation is not None else _order(rows, seed)
    if len(order) != rows:
        raise BadPatch(f"Resample orders {len(order)} rows; the value has {rows}: {tuple(value.shape)}.")
    source = value.index_select(0, torch.tensor(order, device=value.device))
    return source if part is None else part.take(value, source)


@lru_cache(maxsize=256)
def _order(rows: int, seed: int) -> tuple[int, ...]:
    """An order drawn from a generator of its own; never the identity."""
    with outside_of_transforms():
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = tuple(torch.randperm(rows, generator=generator, device="cpu").tolist())
            if order != tuple(range(rows)):
                return order


def add(value: Tensor, vector: Operand, part: Part | None = None) -> Tensor:
    """The value, or a part of it, plus a vector."""
    _require_floating("Add", value)
    return _changed(value, part, "Add", lambda old: old + _operand("Add", vector, old, part))


def scale(value: Tensor, k: Operand, part: Part | None = None) -> Tensor:
    """The value, or a part of it, times k."""
    _require_floating("Scale", value)
    return _changed(value, part, "Scale", lambda old: old * _operand("Scale", k, old, part))


def noise(value: Tensor, std: Operand, seed: int = 0, part: Part | None = None) -> Tensor:
    """The value plus normal noise with this standard deviation. The same seed gives the same noise, whatever else is
    drawn.
    """
    _require_floating("Noise", value)

    def noisy(old: Tensor) -> Tensor:
        with outside_of_transforms():  # not one draw for each variant of a vmap, which it forbids
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(tuple(old.shape), generator=generator, dtype=old.dtype, device="cpu").to(old.device)
        return old + drawn * _operand("Noise", std, old, part)

    return _changed(value, part, "Noise", noisy)


def clamp(value: Tensor, min: Operand | None = None, max: Operand | None = None, part: Part | None = None) -> Tensor:
    """The value, or a part of it, clamped between two bounds."""
    if value.dtype is torch.bool or value.is_complex():
        raise BadPatch(f"Clamp needs values that have an order, not {value.dtype}.")

    def clamped(old: Tensor) -> Tensor:
        bounds: list[Any] = [None if b is None else _operand("Clamp", b, old, part) for b in (min, max)]
        if isinstance(bounds[0], Tensor) == isinstance(bounds[1], Tensor) or None in bounds:
            return torch.clamp(old, *bounds)
        return torch.clamp(torch.clamp(old, min=bounds[0]), max=bounds[1])

    return _changed(value, part, "Clamp", clamped)


def project(
    value: Tensor, direction: Tensor, *, off: bool = False, along: str | int | None = None, part: Part | None = None
) -> Tensor:
    """The projection of the value onto one or several directions, or what is left without it."""
    _require_floating("Project", value)

    def projected(old: Tensor) -> Tensor:
        axis = _axis("Project", old, value, along, part)
        here = old.movedim(axis, -1)
        with _without_autocast(value):
            rows = _orthonormal(_along_axis("Project", direction, old, axis, part))
            found = (here @ rows.mH) @ rows
        return (here - found if off else found).movedim(-1, axis)

    return _changed(value, part, "Project", projected)


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the rows' span."""
    wide = rows.to(torch.float32) if rows.dtype in (torch.bfloat16, torch.float16) else rows
    if wide.dim() == 1 or wide.shape[0] == 1:
        wide = wide.reshape(1, -1)
        return (wide / torch.linalg.vector_norm(wide)).to(rows.dtype)
    return torch.linalg.qr(wide.mT).Q.mT.to(rows.dtype)


@frozen
class PatchStep:
    """A patch inside another one, as a literal: its function and arguments, with a PatchOperand for each tensor."""

    target: Target
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, value: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        args = [tensors[arg.number] if type(arg) is PatchOperand else arg for arg in self.args]
        return self.target.function(value, *args, **dict(self.kwargs))


@frozen
class PatchOperand:
    """The n-th tensor of a patch that holds others."""

    number: int


def rotate(
    value: Tensor,
    basis: Tensor,
    *tensors: Tensor,
    then: PatchStep,
    of_site: tuple[int, ...] = (),
    part: Part | None = None,
) -> Tensor:
    """The value with its coordinates in some directions patched: `x + (then(z) - z) @ basis`, where `z = x @ basis.T`.

    Tensors numbered in `of_site` are other values of the same site: they are taken by their coordinates.
    """
    _require_floating("Rotate", value)

    def turned(old: Tensor) -> Tensor:
        rows = _along_axis("Rotate", basis, old, -1, part)
        with _without_autocast(value):
            inner = [
                (t if part is None else part.read(t)) @ rows.mH if n in of_site else t for n, t in enumerate(tensors)
            ]
            coordinates = old @ rows.mH
            return old + (then(coordinates, tuple(inner)) - coordinates) @ rows

    return _changed(value, part, "Rotate", turned)


def apply(value: Tensor, fn: Callable[[Tensor], Tensor], part: Part | None = None) -> Tensor:
    """What a function makes of the value, or of a part of it. It gets a copy, which it may write to."""
    return _changed(value, part, "Apply", lambda old: apply_to_copies(fn, old))


def apply_to_copies(fn: Callable[[Any], Any], values: Any) -> Any:
    """What a function makes of a value, or of several. It gets copies, which it may write to. If it returns a copy
    unchanged, or a view of the whole of it, that is the value itself.

    In the model, a hook that writes through `.data` or numpy changes what the preceding call may have saved for its
    backward. Gradients through such a patch are refused.
    """
    if torch.compiler.is_compiling():
        return fn(own_copy(values) if isinstance(values, Tensor) else thaw(freeze_deep(values, own_copy), _same))
    given: list[tuple[Tensor, Tensor, int]] = []
    pairs: list[tuple[Tensor, Tensor]] = []

    def copied(old: Tensor) -> Tensor:
        copy = own_copy(old)
        pairs.append((copy, old))
        if history_of(old) is not None and torch.is_grad_enabled() and peek_interpreter_stack() is None:
            given.append((old, copy.detach(), copy._version))
        return copy

    copies = copied(values) if isinstance(values, Tensor) else thaw(freeze_deep(values, copied), _same)
    made = _with_unchanged_values(fn(copies), pairs)
    if made is values:
        return values
    if not any(_changed_saved_value(*one) for one in given):
        return made
    return thaw(freeze_deep(made, lambda tensor: refusing_gradient(tensor, _UNSEEN)), _same)


def _with_unchanged_values(made: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """What a function made of copies, with the values themselves, or views of them, where it left copies unchanged."""

    def leaf(new: Tensor) -> Tensor:
        for copy, old in pairs:
            if (new is copy or _is_whole_view_of(new, copy)) and _is_unchanged(new, old):
                own = old if new.requires_grad == old.requires_grad else old.detach()
                return own if new is copy or new._base is None else own.view_as(own)
        return new

    if isinstance(made, Tensor):
        return leaf(made)
    return thaw(freeze_deep(made, leaf), _same) if isinstance(made, (tuple, list)) else made


def _is_whole_view_of(new: Tensor, copy: Tensor) -> bool:
    """True if it is another tensor over exactly the same memory, such as `value.detach()`."""
    if type(new) is not Tensor or new.layout is not torch.strided or copy.layout is not torch.strided:
        return False
    if new.requires_grad and new.is_leaf:
        return False
    return peek_interpreter_stack() is None and new.data_ptr() == copy.data_ptr() and new.numel() == copy.numel() > 0


def _is_unchanged(copy: Tensor, value: Tensor) -> bool:
    """True if a function left its copy unchanged. It may have written through `.data`, which no counter shows."""
    if peek_interpreter_stack() is not None or value.layout is not torch.strided or value.is_nested:
        return False
    alike = copy.requires_grad <= value.requires_grad and copy.stride() == value.stride()
    return alike and same(copy, value)


def _changed_saved_value(old: Tensor, there: Tensor, version: int) -> bool:
    """True if the copy was written unseen by torch, where a hook would have changed what the value's own call had
    saved.
    """
    if there._version != version or same_content(old, there):
        return False
    memory = old.untyped_storage()._cdata if old.layout is torch.strided else None
    return saved_below(old.grad_fn, lambda one: one.untyped_storage()._cdata == memory, set())


_UNSEEN = (
    "gradients through a patch that writes its value by .data or numpy cannot be given, where the call that made the "
    "value saved it: torch's own backward reads what a hook wrote.\nGive a new tensor."
)


def _same(leaf: Any) -> Any:
    return leaf


def own_copy(tensor: Tensor) -> Tensor:
    """A copy that a user's function may write to, in the same layout unless elements share memory."""
    if torch.compiler.is_compiling() or (tensor.layout is torch.strided and 0 in tensor.stride()):
        return tensor.clone()
    return writable_copy(tensor)


def is_patch_op(function: Callable[..., Any]) -> bool:
    """True for the functions of this module, which patches stand for."""
    return getattr(function, "__module__", None) == __name__


def chain(value: Tensor, *tensors: Tensor, steps: tuple[PatchStep, ...]) -> Tensor:
    """Several patches, one after another."""
    for step in steps:
        value = step(value, tensors)
    return value


def _changed(value: Tensor, part: Part | None, word: str, change: Callable[[Tensor], Tensor]) -> Tensor:
    if part is None:
        return _require_same_kind(word, change(value), value, None)
    here = part.on(value)
    old = here.read(value)
    return here.write(value, _require_same_kind(word, change(old), old, part))


def _without_autocast(value: Tensor) -> Any:
    """Without autocast: the model's precision is no reason to round what a patch computes."""
    if torch.compiler.is_compiling() or not is_any_autocast_on():
        return nullcontext()
    return torch.autocast(value.device.type, enabled=False)


def _require_same_kind(word: str, new: Any, old: Tensor, part: Part | None) -> Tensor:
    """The new value, which must have the shape and dtype of the old one."""
    if not isinstance(new, Tensor):
        raise ShapeMismatch(f"{word} gives {type(new).__name__}, not a tensor.")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ShapeMismatch(
            f"{word} gives {_kind(new)}; {_patched(part)} is {_kind(old)}.\nGive one of that shape and dtype."
        )
    return new


def _require_floating(word: str, value: Tensor) -> None:
    if not (value.is_floating_point() or value.is_complex()):
        raise BadPatch(
            f"{word} needs numbers of a floating type, and the value is {value.dtype}.\n"
            "Zero, Set, From, Clamp, Resample and Apply take integers."
        )
    if is_narrow(value.dtype):
        raise BadPatch(
            f"{word} needs arithmetic, and torch has none for {value.dtype}.\n"
            "Patch the wider value that it was made from, or give a function such as "
            "`lambda t: (t.float() * 2).to(t.dtype)`."
        )


def is_narrow(dtype: torch.dtype) -> bool:
    """True for one-byte floating types, which torch stores but does not compute in."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _operand(word: str, given: Any, old: Tensor, part: Part | None) -> Any:
    """A number or tensor that fits what it is combined with."""
    if not isinstance(given, Tensor):
        require_number(old, given)
    elif given.dtype != old.dtype or not broadcasts(given.shape, old.shape):
        raise ShapeMismatch(
            f"{word} was given {_kind(given)}; {_patched(part)} is {_kind(old)}.\n"
            "Give one of that dtype, whose shape broadcasts to that shape."
        )
    return given


def _axis(word: str, old: Tensor, value: Tensor, along: str | int | None, part: Part | None) -> int:
    """The number of the axis that is meant, in what was read."""
    if isinstance(along, str):
        assert part is not None
        names = part.on(value).names
        if along not in names:
            raise BadPatch(f"{word} along {along!r}: the part {part} has the axes {', '.join(names) or 'none'}.")
        return names.index(along)
    axis = -1 if along is None else along
    if not -old.dim() <= axis < old.dim():
        raise BadPatch(f"{word} along axis {axis}: {_patched(part)} is {_kind(old)}.")
    return axis


def _along_axis(word: str, rows: Tensor, old: Tensor, axis: int, part: Part | None) -> Tensor:
    """Directions, checked to be as long as the axis that they lie along."""
    if old.dim() == 0 or rows.shape[-1] != old.shape[axis] or rows.dtype != old.dtype:
        raise ShapeMismatch(
            f"{word} was given directions {_kind(rows)}; {_patched(part)} is {_kind(old)}.\n"
            "Give directions of that dtype, as long as the axis that they lie along."
        )
    return rows


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def _patched(part: Part | None) -> str:
    return f"the part {part}" if part else "the value"


def _words(over: tuple[Any, ...]) -> str:
    return " ".join(map(str, over)) if isinstance(over[0], str) else f"axis {', '.join(map(str, over))}"


def _at_part(part: Part | None) -> str:
    return f" at {part}" if part is not None else ""
