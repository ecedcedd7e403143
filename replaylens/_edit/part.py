"""Part: part of a tensor, in einops notation: `Part("b [c] h w", c=[3, 7])`.

In: a pattern whose bracketed axes are addressed, their indices, and sizes that cannot be inferred. Out: the part of a
tensor, the tensor with another part, a mask. What a part means on a shape is computed once and cached. Reading and
writing are out-of-place torch calls, so that `torch.func.vmap` may batch either operand. Three steps:

    Part("b [c] h w", c=[3, 7])  a pattern and plain indices; of any shape
    Positions                    on a shape: the positions on each axis, packed axes unpacked
    Access                       on a shape and device: slices, index tensors and masks, ready to use
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from attrs import field, frozen

from .._ir.torch_private import outside_of_transforms
from ..errors import BadPart, ShapeMismatch
from .pattern import Axis, Pattern, axes_of, parse

Index = int | tuple[int, ...] | slice
Indices = tuple[tuple[str, Index], ...]
Sizes = tuple[tuple[str, int], ...]


def frozen_axes(pattern: Pattern, axes: Mapping[str, Any]) -> tuple[Indices, Sizes]:
    """Indices of bracketed axes and sizes of other axes, in the order of the pattern."""
    bracketed = {name.word: name.is_bracketed for name in pattern.names}
    if unknown := next((word for word in axes if word not in bracketed), None):
        has = f"its axes are {', '.join(bracketed)}" if bracketed else "it names no axis"
        raise BadPart(f'the pattern "{pattern}" has no axis {unknown!r}: {has}.')
    indices: dict[str, Index] = {}
    sizes: dict[str, int] = {}
    try:
        for word in [word for word in bracketed if word in axes]:
            if bracketed[word]:
                indices[word], length = _frozen_index(word, axes[word])
                if length is not None:
                    sizes[word] = length
            else:
                sizes[word] = _frozen_size(word, axes[word])
    except BadPart as error:
        raise BadPart(f'{error}.\n    in the part "{pattern}"') from None
    return tuple(indices.items()), tuple(sizes.items())


def _frozen_index(name: str, given: Any) -> tuple[Index, int | None]:
    """An index as plain numbers; for a mask also its length, which is the size of the axis."""
    index = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(index, slice):
        return slice(*[None if e is None else operator.index(e) for e in (index.start, index.stop, index.step)]), None
    if isinstance(index, (list, tuple, range)):
        if not len(index):
            raise BadPart(f"{name}=[] selects nothing")
        if all(isinstance(one, bool) for one in index):
            found = tuple([position for position, mark in enumerate(index) if mark])
            if not found:
                raise BadPart(f"{name} is a mask without a True: it selects nothing")
            return found, len(index)
        if all(_is_number(one) for one in index):
            return tuple([operator.index(one) for one in index]), None
    elif _is_number(index):
        return operator.index(index), None
    raise BadPart(
        f"{name}={described(given)} is not an index: give a number, a list of them, a slice, or a mask of one axis"
    )


def _frozen_size(name: str, given: Any) -> int:
    size = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(size, (list, tuple, range, slice)):
        raise BadPart(
            f"{name}={described(given)} is an index, and {name} is not addressed: write [{name}] to address it"
        )
    if not _is_number(size) or size < 1:
        raise BadPart(f"{name}={described(given)} is not the size of an axis: {name} is not in brackets")
    return operator.index(size)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def index_text(index: Index) -> str:
    if isinstance(index, slice):
        ends = (index.start, index.stop) if index.step is None else (index.start, index.stop, index.step)
        return f"slice({', '.join(map(str, ends))})"
    if isinstance(index, int):
        return str(index)
    shown = list(chain(index[:6], () if len(index) <= 8 else ("...",), index[-2:] if len(index) > 8 else index[6:]))
    return f"[{', '.join(map(str, shown))}]"


Shape = tuple[int, ...]


class Positions(NamedTuple):
    """A part on a shape: the sizes of the unpacked axes, and the positions on each.

    A position is a number, several in order, or None for the whole axis.
    """

    axes: tuple[Axis, ...]
    positions: tuple[int | tuple[int, ...] | None, ...]

    @property
    def full(self) -> Shape:
        return tuple([axis.size for axis in self.axes])

    @property
    def shape(self) -> Shape:
        pairs = [pair for pair in zip(self.axes, self.positions, strict=True) if not isinstance(pair[1], int)]
        return tuple([axis.size if where is None else len(where) for axis, where in pairs])  # type: ignore[arg-type]

    @property
    def names(self) -> tuple[str, ...]:
        pairs = zip(self.axes, self.positions, strict=True)
        return tuple([axis.name for axis, where in pairs if not isinstance(where, int)])


class Access(NamedTuple):
    """Positions on a shape and device, ready to read and write with a few torch calls that work under any transform."""

    part: str
    whole: Shape
    full: Shape
    shape: Shape
    names: tuple[str, ...]
    plain: tuple[int | slice, ...] | None  # what plain indexing can do
    gathers: tuple[tuple[int, torch.Tensor], ...]  # what it cannot: (axis of what is read, positions)
    dropped: tuple[int, ...]  # axes with one index
    spreads: tuple[tuple[int, torch.Tensor], ...]  # (axis, where in the part each position is found; 0 for others)
    mask: torch.Tensor
    full_mask: torch.Tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.full != self.whole:
            tensor = tensor.reshape(self.full)
        if self.plain is not None:
            tensor = tensor[self.plain]
        for axis, positions in self.gathers:
            tensor = tensor.index_select(axis, positions)
        return tensor

    def write(self, tensor: torch.Tensor, new: Any) -> torch.Tensor:
        """Spread the new values over the whole tensor and choose by the mask: one piece, so that vmap may
        batch either.
        """
        if not isinstance(new, torch.Tensor):
            require_number(tensor, new)
            return tensor.masked_fill(self.mask, new)
        if new.dtype != tensor.dtype:
            raise ShapeMismatch(
                f"a tensor of {new.dtype} was given for {self.part} of a tensor of {tensor.dtype}.\n"
                f"Give it as {tensor.dtype}."
            )
        if new.shape != self.shape:
            if not broadcasts(new.shape, self.shape):
                raise ShapeMismatch(
                    f"a tensor of shape {tuple(new.shape)} was given for {self.part}, which is {self.shape} of "
                    f"the shape {self.whole}.\nGive one of that shape, or one that broadcasts to it."
                )
            new = new.expand(self.shape)
        for axis in self.dropped:
            new = new.unsqueeze(axis)
        for axis, positions in self.spreads:
            new = new.index_select(axis, positions)
        return self.take(tensor, new)

    def take(self, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.shape == self.whole or self.full == self.whole:
            return torch.where(self.mask, source, tensor)
        return torch.where(self.full_mask, source, tensor.reshape(self.full)).reshape(self.whole)


def require_number(tensor: torch.Tensor, number: Any) -> None:
    """Raise unless a tensor of this dtype can hold the number as it is."""
    dtype = tensor.dtype
    kinds = [bool, int, float, complex]
    kind = 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1
    if type(number) not in kinds[: kind + 1]:
        raise ShapeMismatch(f"{number!r} was given for a tensor of {dtype}. Give {_ARTICLES[kind]}.")


_ARTICLES = ("True or False", "an int", "a number", "a number")


def broadcasts(shape: Shape, to: Shape) -> bool:
    """True if a tensor of this shape can be assigned to one of the other."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def access(part: str, here: Positions, whole: Shape, device: torch.device) -> Access:
    """How to read and write these positions in tensors of a shape on a device. `part` is their name in errors."""
    full = here.full
    plain: list[int | slice] = []
    gathers, spreads, dropped = [], [], []
    mask = torch.ones((1,) * len(full), dtype=torch.bool, device="cpu")
    for axis, where in enumerate(here.positions):
        if where is None:
            plain.append(slice(None))
            continue
        marks = torch.zeros(full[axis], dtype=torch.bool, device="cpu")
        marks[torch.tensor(where, device="cpu")] = True
        mask = mask & marks.reshape([-1 if n == axis else 1 for n in range(len(full))])
        if isinstance(where, int):
            plain.append(where)
            dropped.append(axis)
            continue
        positions = torch.zeros(full[axis], dtype=torch.long, device="cpu")
        positions[torch.tensor(where, device="cpu")] = torch.arange(len(where), device="cpu")
        spreads.append((axis, positions.to(device)))
        step = where[1] - where[0] if len(where) > 1 else 1
        if step > 0 and where == tuple(range(where[0], where[-1] + 1, step)):
            plain.append(slice(where[0], where[-1] + 1, step))
        else:
            plain.append(slice(None))
            gathers.append((axis - len(dropped), torch.tensor(where, device=device)))
    is_plain = any(one != slice(None) for one in plain)
    packed = _packed(mask, here.axes, len(whole))
    return Access(
        part,
        whole,
        full,
        here.shape,
        here.names,
        tuple(plain) if is_plain else None,
        tuple(gathers),
        tuple(dropped),
        tuple(spreads),
        packed.to(device),
        mask.to(device),
    )


def _packed(mask: torch.Tensor, axes: tuple[Axis, ...], rank: int) -> torch.Tensor:
    """The mask with the tensor's own axes: full size where an axis is addressed, size one elsewhere."""
    addressed = {axis.within for axis, size in zip(axes, mask.shape, strict=True) if size > 1 or axis.is_bracketed}
    mask = mask.expand([axis.size if axis.within in addressed else 1 for axis in axes])
    sizes = [[axis.size for axis in axes if axis.within == n] if n in addressed else [1] for n in range(rank)]
    return mask.reshape([torch.Size(size).numel() for size in sizes])


def _comparable(indices: Indices) -> tuple[Any, ...]:
    """Indices with slices as tuples, as slices have no hash before Python 3.12."""
    return tuple([(n, ("slice", i.start, i.stop, i.step) if isinstance(i, slice) else i) for n, i in indices])


@frozen(init=False, repr=False)
class Part:
    """Part of a tensor, by an einops pattern whose bracketed axes are addressed.

    Bracketed names take indices (a number, a list, a slice, a mask), other names take sizes.

    >>> Part("b [t] ([head] d)", t=-1, head=3, d=64).shape((8, 5, 768))
    (8, 64)
    """

    pattern: str
    indices: Indices = field(eq=_comparable)
    sizes_given: Sizes
    _parsed: Pattern = field(eq=False)

    def __init__(self, pattern: str, /, **axes: Any) -> None:
        if not isinstance(pattern, str):
            raise BadPart(f'a part is written as a pattern such as "b [c] h w", not as {described(pattern)}.')
        parsed = parse(pattern)
        self.__attrs_init__(str(parsed), *frozen_axes(parsed, axes), parsed)

    @staticmethod
    def restored(pattern: str, indices: Indices, sizes: Sizes) -> Part:
        """A part from its fields, as a file has them. The length of a mask is among the sizes."""
        parsed, made = parse(pattern), object.__new__(Part)
        words = {name.word: name.is_bracketed for name in parsed.names}
        right = all(words.get(name) for name, _ in indices) and all(name in words and size for name, size in sizes)
        if not right or len(dict(indices)) != len(indices) or len(dict(sizes)) != len(sizes):
            raise BadPart(f'the pattern "{parsed}" has no such axes')
        made.__attrs_init__(str(parsed), indices, sizes, parsed)
        return made

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The bracketed axes without an index."""
        given = dict(self.indices)
        return tuple([n.word for n in self._parsed.names if n.is_bracketed and n.word not in given])

    @property
    def axis_names(self) -> tuple[str, ...]:
        """All names in the pattern, in order."""
        dots = ["..."] if None in self._parsed.groups else []
        return (*[name.word for name in self._parsed.names], *dots)

    def at(self, **axes: Any) -> Part:
        """The same part with further indices, or sizes."""
        if twice := next((word for word in axes if word in dict((*self.indices, *self.sizes_given))), None):
            raise BadPart(f"{twice} has a value already in the part {self}.")
        indices, sizes = frozen_axes(self._parsed, axes)
        made = object.__new__(Part)
        made.__attrs_init__(
            self.pattern, self._in_order(self.indices + indices), self.sizes_given + sizes, self._parsed
        )
        return made

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of this tensor: its axes in order, packed ones unpacked, those with a single index dropped."""
        return self.on(tensor).read(tensor)

    def write(self, tensor: torch.Tensor, new: torch.Tensor | float) -> torch.Tensor:
        """The tensor with this part replaced, as by `tensor[part] = new`. Nothing is changed in place."""
        return self.on(tensor).write(tensor, new)

    def take(self, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """The tensor with the source's values in this part. The source broadcasts to the tensor's unpacked axes."""
        return self.on(tensor).take(tensor, source)

    def on(self, tensor: torch.Tensor) -> Access:
        """The part on tensors of this one's shape and device, to read and write both."""
        return _located(self, tensor.shape, tensor.device)

    def mask(self, shape: Shape, device: torch.device | str = "cpu") -> torch.Tensor:
        """True within the part; broadcasts to the shape."""
        return _located(self, tuple(shape), torch.device(device)).mask

    def shape(self, shape: Shape) -> Shape:
        """The shape of this part of a tensor of this shape."""
        return resolved(self, tuple(shape)).shape

    def names(self, shape: Shape) -> tuple[str, ...]:
        """The names of the axes that `read` gives."""
        return resolved(self, tuple(shape)).names

    def sizes(self, shape: Shape) -> dict[str, int]:
        """The sizes of all axes of a tensor of this shape, packed ones unpacked."""
        return {axis.name: axis.size for axis in self.axes(shape)}

    def axes(self, shape: Shape) -> tuple[Axis, ...]:
        """The axes of a tensor of this shape in the pattern's words, whatever the indices are."""
        try:
            return axes_of(self._parsed, tuple(shape), dict(self.sizes_given))
        except BadPart as error:
            raise self._wrong(error, shape) from None

    @property
    def arguments(self) -> str:
        """As it is written in a call: `'b [c] h w', c=[3, 7]`."""
        return ", ".join([repr(self.pattern), *self._named()])

    def __str__(self) -> str:
        return ", ".join([f'"{self.pattern}"', *self._named()])

    def __repr__(self) -> str:
        return f"Part({self.arguments})"

    def _in_order(self, indices: Indices) -> Indices:
        words = [name.word for name in self._parsed.names]
        return tuple(sorted(indices, key=lambda pair: words.index(pair[0])))

    def _named(self) -> list[str]:
        bracketed = dict(self.indices)
        sizes = [f"{name}={size}" for name, size in self.sizes_given if name not in bracketed]
        return [*(f"{name}={index_text(index)}" for name, index in self.indices), *sizes]

    def _wrong(self, fact: object, shape: Shape) -> BadPart:
        return BadPart(f"{fact}.\n    the part {self} of the shape {tuple(shape)}")


@lru_cache(maxsize=4096)
def resolved(part: Part, shape: Shape) -> Positions:
    """The positions of a part on a shape, every index checked."""
    return _resolve(part, shape)


def _resolve(part: Part, shape: Shape) -> Positions:
    axes = part.axes(shape)
    if part.open_axes:
        name = part.open_axes[0]
        raise part._wrong(f"[{name}] has no index: give {name}=", shape)
    indices = dict(part.indices)
    try:
        positions = [_positions(axis, indices[axis.name]) if axis.is_bracketed else None for axis in axes]
    except BadPart as error:
        raise part._wrong(error, shape) from None
    return Positions(axes, tuple(positions))


def _positions(axis: Axis, index: Index) -> int | tuple[int, ...]:
    name, size = axis.name, axis.size
    if isinstance(index, slice):
        found = tuple(range(size)[index])
        if not found:
            raise BadPart(f"{name}={index_text(index)} selects nothing of an axis of {size}")
        return found
    for one in (index,) if isinstance(index, int) else index:
        if not -size <= one < size:
            raise BadPart(f"{name}={one} is outside of 0..{size - 1}")
    if isinstance(index, int):
        return index % size
    positions = tuple([one % size for one in index])
    if len(set(positions)) < len(positions):
        twice = next(one for one in positions if positions.count(one) > 1)
        raise BadPart(f"{name}={index_text(index)} names {twice} twice")
    return positions


_cache: dict[Any, Access] = {}


def _located(part: Part, shape: Shape, device: torch.device) -> Access:
    if torch.compiler.is_compiling():  # which looks through caches anyhow, and warns of them
        return access(str(part), _resolve(part, tuple(shape)), tuple(shape), device)
    key = (part, shape, device)
    found = _cache.get(key)
    if found is None:
        # Plain tensors, whatever mode or transform asks for them first: they outlive it.
        with outside_of_transforms(), torch.inference_mode(False):
            found = access(str(part), resolved(part, tuple(shape)), tuple(shape), device)
        if type(found.mask) is torch.Tensor:  # not while a compiler looks on with tensors of its own
            while len(_cache) >= 4096:
                _cache.pop(next(iter(_cache)), None)
            _cache[key] = found
    return found


def as_part(part: Any, axes: Mapping[str, Any]) -> Part | None:
    """The part that a patch was given: a pattern and axes by name, a ready Part, or None."""
    if part is None:
        if axes:
            name, value = next(iter(axes.items()))
            raise BadPart(f'{name}={value!r} names an axis, and there is no pattern: give one, such as "b [{name}]".')
        return None
    if isinstance(part, Part):
        return part.at(**axes) if axes else part
    return Part(part, **axes)
