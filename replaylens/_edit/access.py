"""Positions in a tensor: reading them, writing them, a mask of them.

In: the axes of a shape, packed ones taken apart, and the positions that are meant on each; a device. Out: torch calls
that read and write there. None of them writes in place, so that `torch.func.vmap` may batch either of what they are
given. Patterns are not known here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ShapeMismatch
from .pattern import Axis

Shape = tuple[int, ...]


class Positions(NamedTuple):
    """A part on a shape: the sizes of the axes taken apart, and the positions that are meant on each.

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
    """Positions on a shape and a device, ready to read and write by a few torch calls that work under any transform."""

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
        """Spread over the whole tensor, then chosen by the mask: in one piece, so that vmap may batch either."""
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
    """Can a tensor hold this number as it is?"""
    dtype = tensor.dtype
    kinds = [bool, int, float, complex]
    kind = 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1
    if type(number) not in kinds[: kind + 1]:
        raise ShapeMismatch(f"{number!r} was given for a tensor of {dtype}. Give {_ARTICLES[kind]}.")


_ARTICLES = ("True or False", "an int", "a number", "a number")


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Does a tensor of this shape fill one of the other, as in an assignment?"""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def access(part: str, here: Positions, whole: Shape, device: torch.device) -> Access:
    """How to get at these positions in tensors of a shape, on a device. `part` is what errors call them."""
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
    """The mask with the tensor's own axes again: whole where an axis is addressed, size one elsewhere."""
    addressed = {axis.within for axis, size in zip(axes, mask.shape, strict=True) if size > 1 or axis.is_bracketed}
    mask = mask.expand([axis.size if axis.within in addressed else 1 for axis in axes])
    sizes = [[axis.size for axis in axes if axis.within == n] if n in addressed else [1] for n in range(rank)]
    return mask.reshape([torch.Size(size).numel() for size in sizes])
