"""Who stands next to a layer, where it comes from, where it leads to, and how far that is."""

from __future__ import annotations

from .._core.node import State
from .facts import Facts
from .kin import Span


class KinFacts(Facts):
    """Parents, children, ancestors, distances, conditions."""

    __slots__ = ()

    @property
    def parents(self) -> tuple[str, ...]:
        """The labels of the layers that it reads."""
        return self._lens.atlas.parents(self._place)

    @property
    def children(self) -> tuple[str, ...]:
        """The labels of the layers that read it."""
        return self._lens.atlas.children(self._place)

    @property
    def siblings(self) -> tuple[str, ...]:
        """The labels of the layers that share a parent with it."""
        return self._labels(self._lens.kin.siblings(self.ordinal)) if self.ordinal is not None else ()

    @property
    def spouses(self) -> tuple[str, ...]:
        """The labels of the layers that share a child with it."""
        return self._labels(self._lens.kin.spouses(self.ordinal)) if self.ordinal is not None else ()

    @property
    def origins(self) -> tuple[str, ...]:
        """The layers without parents that it comes from: inputs, buffers, what was made inside; or itself."""
        return self._labels(self._lens.kin.roots_of(self.ordinal)) if self.ordinal is not None else ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The output layers that it leads to; itself, if it is one."""
        return self._labels(self._lens.kin.ends_of(self.ordinal)) if self.ordinal is not None else ()

    @property
    def steps_from_input(self) -> Span:
        """How many steps it is from an input, least and most; None where it comes from none."""
        return self._lens.kin.from_input[self.ordinal] if self.ordinal is not None else None

    @property
    def steps_to_output(self) -> Span:
        """How many steps it is to an output, least and most; None where it leads to none."""
        return self._lens.kin.to_output[self.ordinal] if self.ordinal is not None else None

    @property
    def is_born_inside(self) -> bool:
        """Was it made inside the model, of no other layer, as by `torch.rand` or from parameters alone?"""
        return self.ordinal is not None and self._lens.kin.is_born[self.ordinal]

    @property
    def ends_inside(self) -> bool:
        """Does nothing read it, nor is it an output or what the model writes to a buffer?"""
        if self.ordinal is None or self._place.output is not None or self.children:
            return False
        return not any(ref.node == self._place.node for _, ref in self._lens.graph.changes)

    @property
    def is_condition(self) -> bool:
        """Did the model branch on it: a single value, which `if` read and nothing else?"""
        return self._place.label in self._lens.conditions.terminal_bools

    @property
    def starts_condition(self) -> bool:
        """Does what a branch is decided by leave the way to the output here?"""
        return self._place.label in self._lens.conditions.start_layers

    @property
    def is_in_condition(self) -> bool:
        """Is it computed to decide over a branch, and for nothing else?"""
        return self._place.label in self._lens.conditions.in_branch

    @property
    def buffer(self) -> str | None:
        """The address of the buffer that it is."""
        node = self.node
        is_buffer = isinstance(node, State) and node.kind == "buffer" and self._place.output is None
        return node.address if is_buffer else None  # type: ignore[union-attr]
