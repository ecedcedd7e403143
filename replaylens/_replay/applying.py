"""Patches as the functions that one replay calls: what they give is looked at, and remembered.

In: the Changes of a request. Out: a function for each, which stands in a slot of the env. A value that lies otherwise
in memory than the recorded one, or that is flagged otherwise, may lead away from the recorded path: that is said, and
where departures are ignored the replay goes on as if it lay as recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import frozen

from .._core.graph import Graph
from .._core.node import Ref, refs_in
from .._core.sharing import storage_of
from .._core.torch_private import peek_interpreter_stack
from .facts import Instead
from .guards import Departure
from .late import Remembered
from .parting import parted
from .request import Change


@frozen(eq=False)
class Applying:
    """The patches of one replay."""

    graph: Graph
    writes_views: bool  # does the model write through views?
    instead: Instead
    departed: Callable[[Departure], None]
    remembered: Remembered

    def function(self, position: int, number: int, change: Change) -> Callable[[Any], Any]:
        """What is called with the value of a node, and gives the value that the replay goes on with."""
        return self.remembered.watched(position, number, partial(self._applied, change), change.is_steady)

    def _applied(self, change: Change, old: Any) -> Any:
        new, tree = change(old), change.tree
        if peek_interpreter_stack() is not None:
            return new
        if isinstance(new, torch.Tensor):
            return self._looked_at(tree, old, new)
        refs = refs_in(tree)
        if not isinstance(new, (tuple, list)) or len(refs) != len(new):
            return new
        olds = old if isinstance(old, (tuple, list)) and len(old) == len(new) else [None] * len(new)
        return tuple([self._looked_at(*one) for one in zip(refs, olds, new, strict=True)])

    def _looked_at(self, ref: Ref, old: Any, new: torch.Tensor) -> torch.Tensor:
        if self.writes_views and _is_handed_back(old, new) and parted(self.graph, (ref,)):
            what = f"the memory of {ref}, which the model writes through it,"
            self.departed(Departure(what, "shared", "shared again"))
        found = [*map(self.departed, self.instead.departures(ref, old, new))]
        return self.instead.lay(ref, new) if found else new


def _is_handed_back(old: Any, new: torch.Tensor) -> bool:
    """Does a patch hand on the very memory that it was given?"""
    if new is old:
        return True
    dense = isinstance(old, torch.Tensor) and new.layout is old.layout is torch.strided
    return dense and storage_of(new) == storage_of(old)
