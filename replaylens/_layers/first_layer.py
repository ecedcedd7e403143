"""The first layer whose value satisfies a predicate: where a NaN was born.

In: layers in order, a way to the value of each, a predicate. Out: a Layer, or None. What the predicate raises is the
user's, with a note of the layer that it was shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._ir.trees import freeze_deep
from .._ir.util import add_note
from .layer import Layer


def first_layer(
    layers: Iterable[Layer], value_of: Callable[[Layer], Any], predicate: Callable[[Any], Any]
) -> Layer | None:
    """The first of these layers with a tensor that satisfies the predicate."""
    return next((layer for layer in layers if _holds(layer, value_of(layer), predicate)), None)


def _holds(layer: Layer, value: Any, predicate: Callable[[Any], Any]) -> bool:
    tensors: list[torch.Tensor] = []
    freeze_deep(value, tensors.append)
    try:
        return any(_is_true(predicate(tensor)) for tensor in tensors)
    except Exception as error:
        kinds = ", ".join([f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors])
        add_note(error, f"replaylens: raised by the predicate, at {layer.label}, which holds {kinds}.")
        raise


def _is_true(answer: Any) -> bool:
    """What a predicate answers: of a tensor of bools, whether one of them is true."""
    return bool(answer.any()) if isinstance(answer, torch.Tensor) else bool(answer)
