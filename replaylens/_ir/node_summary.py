"""What a capture tells of a node to whoever names it.

In: nothing. Out: a summary of a node, without tensors, and the type of a naming: a function that a capture is handed,
so that it knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from attrs import field, frozen


@frozen
class NodeSummary:
    """What naming needs to know of a node: its type, the numbers of the values that it reads and gives."""

    kind: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    function: Callable[..., Any] | None = None
    address: str | None = None  # of a parameter: it is called by it and counts as no layer
    modules: tuple[str, ...] = ()  # the addresses of the modules that it ran in, outermost first
    site: Hashable = None  # the place in the code that ran it
    literals: Callable[[], Any] = field(default=tuple, eq=False, repr=False)  # its arguments without the tensors


# A name for each node, and which of them are orphans; of the nodes in execution order, and the numbers of the values
# that the model returned or wrote.
Naming = Callable[[Sequence[NodeSummary], set[int]], tuple[list[str], list[bool]]]
