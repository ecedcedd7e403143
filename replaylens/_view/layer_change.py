"""How much one value differs from another.

In: tensors. Out: a LayerChange. Which run they are of is not known here.
"""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class LayerChange:
    """How much one layer's value differs from the recorded one.

    `change` is the size of the difference as a share of the recorded value's size (roots of sums of squares); of whole
    numbers and bools it is the share that differs. `largest` is the greatest difference of two numbers, `share` the
    share of numbers that differ. They are None where there is nothing to compare: `note` says why.
    """

    label: str
    change: float | None
    largest: float | None = None
    share: float | None = None
    note: str = ""

    @property
    def is_changed(self) -> bool:
        """Does it differ at all, or was it not to be compared?"""
        return self.change is None or bool(self.share)


def compare(label: str, old: list[torch.Tensor], new: list[torch.Tensor]) -> LayerChange:
    """Two values of one layer. NaN where there was NaN, and infinity where there was the same, is no difference."""
    shapes = [tuple(tensor.shape) for tensor in old], [tuple(tensor.shape) for tensor in new]
    if shapes[0] != shapes[1]:
        return LayerChange(label, None, note=f"was {_words(shapes[0])}, is {_words(shapes[1])}")
    before, after = _numbers(old), _numbers(new)
    if before.shape != after.shape:
        return LayerChange(label, None, note="of two kinds of tensors that cannot be compared")
    differs = (before != after) & ~(before.isnan() & after.isnan())
    if not bool(differs.any()):
        return LayerChange(label, 0.0, 0.0, 0.0)
    distance, share = (after - before)[differs].abs(), float(differs.double().mean())
    if not any(one.is_floating_point() or one.is_complex() for one in old):
        return LayerChange(label, share, float(distance.max()), share)
    length, size = float(distance.norm()), float(before[before.isfinite()].norm())
    return LayerChange(label, length / size if size else float("inf"), float(distance.max()), share)


def _numbers(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All that tensors hold, as a row of doubles. A tensor on the meta device holds nothing."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *map(_doubles, tensors)])


def _doubles(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return torch.empty(0, dtype=torch.float64)
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.cpu().to(torch.float64).reshape(-1)


def _words(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "no tensor"
