"""How much one value differs from another.

In: tensors. Out: a LayerChange.
"""

from __future__ import annotations

import torch
from attrs import frozen


@frozen
class LayerChange:
    """How much one layer's value differs from the recorded one.

    `change` is the norm of the difference relative to the norm of the recorded value; for integers and bools it is the
    fraction of elements that differ. `largest` is the largest difference of two elements, `share` the fraction of
    elements that differ. They are None if the values cannot be compared; `note` says why.
    """

    label: str
    change: float | None
    largest: float | None = None
    share: float | None = None
    note: str = ""

    @property
    def is_changed(self) -> bool:
        """True if the values differ or could not be compared."""
        return self.change is None or bool(self.share)


def compare(label: str, old: list[torch.Tensor], new: list[torch.Tensor]) -> LayerChange:
    """Compare two values of one layer. Equal infinities, and NaN in the place of NaN, are no difference."""
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
    """The elements of tensors as one vector of doubles. A meta tensor has none."""
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
