"""What a replay is asked for, as data: positions, tensors and functions. Nothing runs here.

In: what inputs.py and resolve_patches.py made of a user's words. Out: a Request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen

from .._edit.patch import Clamp, Mean, Scale, Zero
from .._ir.node import Ref
from .inputs import Mismatch


@frozen(eq=False)
class Change:
    """A new value from the old one. `follows`: it depends on the old value, so gradients go through it."""

    make: Callable[[Any], Any]
    follows: bool
    tree: Any  # the Ref, or tree of Refs, that it is for
    free: Callable[[Any], Any]  # the same for a value that is not of the recorded shape
    what: Any = None  # as the user gave it
    holds: tuple[torch.Tensor, ...] = ()  # tensors from which the new value is made, besides the old one

    @property
    def is_steady(self) -> bool:
        """True if it always gives the same. A user's function need not; a given tensor may be written to."""
        return isinstance(self.what, (Zero, Mean, Clamp, Scale)) and not self.holds

    @property
    def ref(self) -> Ref | None:
        return self.tree if type(self.tree) is Ref else None

    def __call__(self, value: Any) -> Any:
        return self.make(value)


@frozen
class ModuleOutputChange:
    """One tensor that a module call returns, and that a patch under the name of the module is for."""

    address: str
    call: int
    number: int  # among the tensors that the call returns
    count: int  # of these
    ref: Ref
    is_every: bool  # in later calls, too


@frozen
class LivePatchScope:
    """Which patches hold beyond what was recorded, where the model itself runs."""

    every: frozenset[int] = frozenset()  # changed positions that are patched in later passes, too
    kinds: frozenset[str] = frozenset()  # of operations that are patched wherever they occur
    globs: tuple[str, ...] = ()  # that name modules, also ones that were not recorded
    hands: tuple[ModuleOutputChange, ...] = ()  # changed positions that modules return


@frozen(eq=False)
class Request:
    """What a replay is asked for, in positions and tensors."""

    changed: dict[int, tuple[Change, ...]] = field(factory=dict)  # node -> its new value from its old
    given: dict[int, torch.Tensor] = field(factory=dict)  # inputs and state with another value, as the user gave them
    mismatches: tuple[Mismatch, ...] = ()  # where what is given is not as it was recorded
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # new ones, as the user gave them
    start: tuple[int, ...] = ()
    to: int | None = None
    ends: dict[Ref, Change] = field(factory=dict)  # outputs with another value
    keep: frozenset[int] = frozenset()
    grad: bool = False
    fresh: bool = False
    on_divergence: str = "raise"
    whole: bool = False
    at: frozenset[Ref] = frozenset()  # where gradients are taken: only there histories begin
    beyond: Callable[[], LivePatchScope] = LivePatchScope  # what its patches mean if the model itself runs
