"""What is known of a recorded forward besides its program: when it ran, how long, with which seed, on which model.

No replay needs any of it. Facts of a call are stored under its node; programs made by edits know their model and the
forward that they descend from, but have no times of their own calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen

from .node import Ref, Source

NO_FACTS: Mapping[Any, Any] = MappingProxyType({})


@frozen
class ParameterInfo:
    """A parameter or buffer of the model, read in the forward or not."""

    address: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool
    aliases: tuple[str, ...] = ()  # further addresses, where it is tied

    @property
    def count(self) -> int:
        """The number of its elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.count * self.dtype.itemsize


@frozen
class CaptureMetadata:
    """How a forward was recorded. `modules` are the addresses of all modules, called or not. Parameters that no call
    reads are listed here; others are nodes.
    """

    seed: int | None = None  # of torch's default generator when the forward began
    began: float = 0.0  # seconds since 1970
    seconds: float = 0.0  # the whole forward, with what the recording cost
    nanoseconds: Sequence[int] = ()  # of each node, by its position
    originals: Mapping[str, Any] = NO_FACTS  # of what was written in place: the function that the model called
    gradients: Mapping[Ref, str] = NO_FACTS  # of values overwritten or not kept: what autograd would have done for them
    modules: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # of the modules
    unread: tuple[ParameterInfo, ...] = ()
    unread_buffers: tuple[ParameterInfo, ...] = ()
    untrained: frozenset[str] = frozenset()  # the nodes of state that was read, and that asks for no gradient
    called_from: Source | None = None  # the line that asked for the capture

    def untimed(self) -> CaptureMetadata:
        """The same for a program whose calls ran again untimed."""
        return evolve(self, nanoseconds=(), gradients=NO_FACTS)


NO_METADATA = CaptureMetadata()
