"""What a layer gave: its value, and what is known of it without looking at its content."""

from __future__ import annotations

from typing import Any

import torch

from .._core.location import Location
from .._core.node import Ref, value_of
from .._core.pure import history_of
from .facts import Facts


class ValueFacts(Facts):
    """The value: content, shape, size."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The tensor that it gave when the program was recorded (a tuple of tensors, where it gives several)."""
        return self._read(self._place)

    @property
    def is_saved(self) -> bool:
        """Was its value kept?"""
        return self._lens.is_saved(self._place)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its value; None where it gives several tensors."""
        meaning = self._lens.meaning(self._place)
        return meaning.shape if meaning is not None else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its value; None where it gives several tensors."""
        meaning = self._lens.meaning(self._place)
        return meaning.dtype if meaning is not None else None

    @property
    def nbytes(self) -> int:
        """How many bytes its value takes, without what Python adds."""
        return self._lens.nbytes(self._place)

    @property
    def is_one_of_several(self) -> bool:
        """Did its operation give several tensors, as `split` and `nn.LSTM` do?"""
        return type(value_of(self.node)) is not Ref

    @property
    def index(self) -> int | None:
        """Which of several tensors it is; None for all of them together, and where there is but one."""
        ref = self._place.output or self._place.part
        if ref is None or not self.is_one_of_several:
            return None
        return self._lens.refs(Location(self.node.name)).index(ref)

    @property
    def gradient_function(self) -> str | None:
        """What autograd would do for it: `ConvolutionBackward0`; None where no gradient flows, or nothing was kept."""
        refs = self._lens.refs(self._place)
        if not refs or refs[0] in self._lens.account.gradients:
            return self._lens.account.gradients[refs[0]] if refs else None
        tensor = self._lens.record.values.get(refs[0])
        return history_of(tensor) if tensor is not None else None
