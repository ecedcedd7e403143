"""A matrix product of which only some columns are computed: those that anybody reads.

In: a product, and the columns that are read, such as the logits of two words. Out: the product with these columns of
its weights alone, if it is proved to give the same. Its results have the recorded columns everywhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import evolve, frozen
from torch import Tensor

from .alignment import Alignment
from .batched_ops import BatchedOp
from .sparse_rows import Delta, index_tensor, rows_of

SPARE = 8  # columns that nobody reads, in the proof


@frozen(eq=False)
class NarrowedProduct:
    """A product that computes only some columns. `narrow` is the same call with these of its weights."""

    product: BatchedOp
    narrow: BatchedOp
    axis: int  # of the columns, in the result
    columns: Tensor
    weights: Sequence[int]  # which operands have the columns: they must be as recorded

    def fits(self, align: Alignment, deltas: Sequence[Delta | None]) -> bool:
        """True if the rows that these Deltas hold can be computed so."""
        if align.outputs[0] == self.axis or any(deltas[number] is not None for number in self.weights):
            return False
        return self.narrow.holds(align)

    def by_rows(self, align: Alignment, deltas: Sequence[Delta | None]) -> list[Delta]:
        """What the product itself gives, in the columns that are read."""
        found = []
        for axis, pairs, data in self.narrow.by_rows(align, deltas):
            whole = rows_of(self.product.results[0], axis or 0, pairs)
            whole = whole.clone() if pairs.count == 1 else whole  # rows of one are views of it
            found.append(Delta(axis, pairs, whole.index_copy_(self.axis, self.columns, data)))
        return found


def narrowed_product(
    step: BatchedOp, axis: int, columns: Collection[int], fixed: Collection[int]
) -> NarrowedProduct | None:
    """The product with only these columns along an axis of its result; None if that is not proved, or not worth it.
    `fixed`: the operands that are as recorded.

    That columns are independent is proved like an alignment, on made-up numbers for these columns and a few more; and
    that the whole product has these very columns, on the recorded numbers.
    """
    size = step.results[0].shape[axis]
    if 2 * (len(columns) + SPARE) > size or not step.is_single:
        return None
    spare = [number for number in range(size) if number not in columns][:SPARE]
    for align in step.alignments:
        weights = [number for number, at in enumerate(align.operands) if at is not None]
        if align.outputs != (axis,) or align.resizes or not set(weights) <= set(fixed):
            continue
        few = _cut(step, align, sorted([*columns, *spare]))
        narrow = _cut(step, align, sorted(columns))
        if few.holds(align) and narrow.gives_what_was_recorded():
            where = index_tensor(sorted(columns), step.results[0].device)
            return NarrowedProduct(step, narrow, axis, where, weights)
    return None


def _cut(step: BatchedOp, align: Alignment, rows: Sequence[int]) -> BatchedOp:
    """The same call with only these rows of its operands and of its result, with proofs of its own."""
    where = index_tensor(rows, step.results[0].device)
    recorded = [
        value if axis is None else value.index_select(axis, where)
        for value, axis in zip(step.recorded, align.operands, strict=True)
    ]
    results = [value.index_select(axis, where) for value, axis in zip(step.results, align.outputs, strict=True)]
    return evolve(step, recorded=tuple(recorded), results=tuple(results), signature=step.signature.unproved())
