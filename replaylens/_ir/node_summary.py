"""What a capture tells a naming about each node, so that it needs to know nothing of layers itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from attrs import field, frozen


@frozen
class NodeSummary:
    """What naming needs to know of a node: its type, and the numbers of the values that it reads and gives."""

    kind: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    function: Callable[..., Any] | None = None
    address: str | None = None  # of a parameter, which is named by it and counts as no layer
    modules: tuple[str, ...] = ()  # the addresses of the modules that it ran in, outermost first
    site: Hashable = None  # the place in the code that ran it
    literals: Callable[[], Any] = field(default=tuple, eq=False, repr=False)  # its arguments without the tensors


# From the nodes in execution order, and the numbers of the values that the model returned or wrote: a name for each
# node, and which of them are orphans.
Naming = Callable[[Sequence[NodeSummary], set[int]], tuple[list[str], list[bool]]]
