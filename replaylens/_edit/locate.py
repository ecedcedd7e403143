"""Part: which part of a tensor is meant, in einops words: `Part("b [c] h w", c=[3, 7])`.

In: a pattern whose bracketed axes are addressed, their indices, and sizes where they cannot be worked out. Out: the
part of a tensor, the tensor with another part, a mask. What is done with it is not known here. What a part means on a
shape is worked out once, and cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from attrs import field, frozen

from .._core.torch_private import outside_of_transforms
from ..errors import BadPart
from .access import Access, Positions, Shape, access
from .index import Index, Indices, Sizes, described, frozen_axes, index_text
from .pattern import Axis, Pattern, axes_of, parse


def _comparable(indices: Indices) -> tuple[Any, ...]:
    """Slices have no hash before Python 3.12."""
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

    @property
    def open_axes(self) -> tuple[str, ...]:
        """The bracketed axes that have no index yet."""
        given = dict(self.indices)
        return tuple([n.word for n in self._parsed.names if n.is_bracketed and n.word not in given])

    @property
    def axis_names(self) -> tuple[str, ...]:
        """All names that the pattern writes, in order."""
        dots = ["..."] if None in self._parsed.groups else []
        return (*[name.word for name in self._parsed.names], *dots)

    def at(self, **axes: Any) -> Part:
        """The same part with more indices, or sizes."""
        if twice := next((word for word in axes if word in dict((*self.indices, *self.sizes_given))), None):
            raise BadPart(f"{twice} has a value already in the part {self}.")
        indices, sizes = frozen_axes(self._parsed, axes)
        made = object.__new__(Part)
        made.__attrs_init__(
            self.pattern, self._in_order(self.indices + indices), self.sizes_given + sizes, self._parsed
        )
        return made

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of this tensor: its axes in order, packed ones taken apart, those with one index dropped."""
        return self.on(tensor).read(tensor)

    def write(self, tensor: torch.Tensor, new: torch.Tensor | float) -> torch.Tensor:
        """The tensor with something else in this part, as `tensor[part] = new` would have it. Nothing is changed."""
        return self.on(tensor).write(tensor, new)

    def take(self, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """The tensor with what the source has in this part. The source broadcasts to the tensor's axes, taken apart."""
        return self.on(tensor).take(tensor, source)

    def on(self, tensor: torch.Tensor) -> Access:
        """The part on tensors of this one's shape and device, for who reads and writes both."""
        return _located(self, tensor.shape, tensor.device)

    def mask(self, shape: Shape, device: torch.device | str = "cpu") -> torch.Tensor:
        """True where the part is; broadcasts to the shape."""
        return _located(self, tuple(shape), torch.device(device)).mask

    def shape(self, shape: Shape) -> Shape:
        """The shape of the part of a tensor of this shape."""
        return resolved(self, tuple(shape)).shape

    def names(self, shape: Shape) -> tuple[str, ...]:
        """The names of the axes of what `read` gives."""
        return resolved(self, tuple(shape)).names

    def sizes(self, shape: Shape) -> dict[str, int]:
        """The sizes of all axes of a tensor of this shape, packed ones taken apart."""
        return {axis.name: axis.size for axis in self.axes(shape)}

    def axes(self, shape: Shape) -> tuple[Axis, ...]:
        """The axes of a tensor of this shape in the pattern's words. No index is looked at."""
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
    """What a part means on a shape, every index checked."""
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
    """What a patch was given as its part: a pattern and the names of axes, a ready Part, or nothing."""
    if part is None:
        if axes:
            name, value = next(iter(axes.items()))
            raise BadPart(f'{name}={value!r} names an axis, and there is no pattern: give one, such as "b [{name}]".')
        return None
    if isinstance(part, Part):
        return part.at(**axes) if axes else part
    return Part(part, **axes)
