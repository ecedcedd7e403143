"""What is known of a recorded forward besides its program: when it ran, how long, with which seed, on which model.

Nothing that a replay needs is here. A fact of a call is found under its node's name; programs made by edits know of
their model and of the forward that they descend from, but have no times of their own calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen

from .node import Ref, Source

NONE: Mapping[Any, Any] = MappingProxyType({})


@frozen
class Parameter:
    """A parameter of the model, read in the forward or not."""

    address: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool
    aliases: tuple[str, ...] = ()  # further addresses, where it is tied

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return self.count * self.dtype.itemsize


@frozen
class Account:
    """How a forward was recorded. `modules` are those of the model, address and class, called or not."""

    seed: int | None = None  # of torch's default generator when the forward began
    began: float = 0.0  # seconds since 1970
    seconds: float = 0.0  # the whole forward, with what the recording cost
    nanoseconds: Mapping[str, int] = NONE  # of each call, by the name of its node
    originals: Mapping[str, Any] = NONE  # of what was written in place: the function that the model called
    gradients: Mapping[Ref, str] = NONE  # of values that were overwritten: what autograd would have done for them
    modules: tuple[tuple[str, str], ...] = ()
    parameters: tuple[Parameter, ...] = ()
    called_from: Source | None = None  # the line that asked for the capture

    def untimed(self) -> Account:
        """The same for a program whose calls ran another time, when nobody looked at a clock."""
        return evolve(self, nanoseconds=NONE, gradients=NONE)


NOTHING_KNOWN = Account()
