"""Dependency tests of many alike calls at once, under vmap.

In: a program under test, after its whole replay. Out: the calls whose value is proved to depend on everything that they
read. Nothing is said of the others: they are tested one by one.

Calls are alike if they differ in nothing but the values that they read. These are stacked, and one operand at a time is
perturbed, for all calls in one run. A proof needs two runs of one kernel: on the recorded operands it gives the
recorded values, on the perturbed ones clearly other values. So what torch does wrongly under vmap proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from .._ir.equality import BATCHED, BATCHED_NARROW
from .._ir.interrupts import restoring_modes
from .._ir.node import Call, Ref
from .._ir.ops import Quirk, op_info
from .._replay.interpreter import recorded_environment
from .._replay.record import Record
from .._sweep.batched_ops import is_torch_op, signature_key, under_vmap
from .perturbations import perturbed
from .program_under_test import ProgramUnderTest
from .run_node import NodeRunner, node_runner

_LARGEST = 2**16  # elements that a call may read and give: beyond, its kernel costs more than what surrounds it
_MOST = 2**20  # elements in one run
_TRIES = 3  # perturbations of each operand
_CLEAR = 0.01  # a change of this share of the largest number is no matter of rounding
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dependent_calls(program: ProgramUnderTest) -> frozenset[int]:
    """The positions of calls that are proved to depend on all that they read; the whole replay has verified each."""
    graph, record = program.graph, program.record
    groups: dict[Any, list[int]] = {}
    for position in sorted(program.chosen & program.verified):
        if (key := _likeness(position, record)) is not None:
            groups.setdefault(key, []).append(position)
    with recorded_environment(True, graph):
        batches = [batch for group in groups.values() for batch in _batches(group, program)]
        return frozenset([position for batch in batches for position in _proved(batch, record)])


def _likeness(position: int, record: Record) -> Any:
    """What alike calls have in common; None if the call is to be tested by itself."""
    graph = record.graph
    node, reads, gives = graph.nodes[position], graph.refs[position], graph.gives[position]
    if type(node) is not Call:
        return None
    if node.draws is not None or node.is_dynamic or node.through or node.edits is not None:
        return None
    if not is_torch_op(node.target) or op_info(node.target).has(Quirk.WRONG_UNDER_VMAP):
        return None
    values = [record.values[ref] for ref in (*reads, *gives)]
    if not (reads and gives and all(map(_is_plain, values)) and sum([one.numel() for one in values]) <= _LARGEST):
        return None
    if not all(one.dtype in _FLOATS for one in values[: len(reads)]):
        return None
    places = {ref: number for number, ref in enumerate(dict.fromkeys(reads))}
    literals = signature_key((node.args, node.kwargs), iter([(one.shape, one.dtype, one.stride()) for one in values]))
    key = node.target.function, node.context, literals, tuple([places[ref] for ref in reads]), node.spec
    try:
        hash(key)
    except TypeError:  # a literal that cannot be hashed
        return None
    return key


def _is_plain(value: Any) -> bool:
    is_dense = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return is_dense and not value.is_nested and not value.is_meta and not value.is_complex() and value.numel() > 0


def _batches(alike: list[int], program: ProgramUnderTest) -> Iterator[list[int]]:
    """These calls in batches that are neither too small to pay nor too large for memory."""
    graph, first = program.graph, alike[0]
    elements = sum([program.record.values[ref].numel() for ref in {*graph.refs[first], *graph.gives[first]}])
    most = _MOST // elements
    batches = [alike[start : start + most] for start in range(0, len(alike), most)]
    yield from [batch for batch in batches if len(batch) >= program.fewest_alike]


def _proved(alike: list[int], record: Record) -> list[int]:
    """Those of these alike calls whose value depends on each of their operands."""
    graph, count = record.graph, len(alike)
    node, refs = graph.nodes[alike[0]], graph.refs[alike[0]]
    assert isinstance(node, Call)
    runner = node_runner(node, {})
    places = [refs.index(ref) for ref in runner.reads]  # the same in all of them
    try:
        operands = [_column([graph.refs[position][place] for position in alike], record) for place in places]
        recorded = [
            _column([graph.gives[position][number] for position in alike], record).whole(count)
            for number in range(len(runner.gives))
        ]
        made = _run(runner, operands, count)
        proved = torch.stack([_are_close(*pair) for pair in zip(made, recorded, strict=True)]).all(0)
        for number in range(len(operands)):
            if proved.any():
                proved &= _react(runner, operands, number, made, proved)
    except Exception:  # torch has no rule for it under vmap, or the call refuses other values
        return []
    return [position for position, is_proved in zip(alike, proved.tolist(), strict=True) if is_proved]


@frozen(eq=False)
class Column:
    """One operand of alike calls: their values, stacked; or the one value that all of them read."""

    stack: Tensor | None
    value: Tensor

    def perturbed(self) -> Iterator[Column]:
        """The same with other content."""
        for made in islice(perturbed(self.value if self.stack is None else self.stack), _TRIES):
            yield Column(None, made) if self.stack is None else Column(made, self.value)

    def whole(self, count: int) -> Tensor:
        """The values of all calls."""
        return self.value.expand(count, *self.value.shape) if self.stack is None else self.stack


def _column(refs: list[Ref], record: Record) -> Column:
    values = [record.values[ref] for ref in refs]
    is_shared = len(refs) > 1 and len({*refs}) == 1
    return Column(None if is_shared else torch.stack(values), values[0].detach())


def _run(runner: NodeRunner, operands: Sequence[Column], count: int) -> list[Tensor]:
    """The values of all calls on these operands, each stacked."""

    def once(values: Sequence[Tensor]) -> list[Tensor]:
        return list(runner(dict(zip(runner.reads, values, strict=True))).values())

    stacks, values = [one.stack for one in operands], [one.value for one in operands]
    return restoring_modes(lambda: under_vmap(once, stacks, values, count))


def _react(
    runner: NodeRunner, operands: Sequence[Column], number: int, made: Sequence[Tensor], asked: Tensor
) -> Tensor:
    """For each call, whether its value clearly changes with this operand. Ends once all that are asked do."""
    found = torch.zeros_like(asked)
    for other in operands[number].perturbed():
        others = _run(runner, [*operands[:number], other, *operands[number + 1 :]], len(asked))
        for old, new in zip(made, others, strict=True):
            found |= _are_clearly_apart(old, new)
        if bool((found | ~asked).all()):
            break
    return found


def _are_close(made: Tensor, recorded: Tensor) -> Tensor:
    """For each call, whether vmap gives its recorded value, up to what another kernel does to the last bits."""
    if made.shape != recorded.shape or made.dtype != recorded.dtype:
        return recorded.new_zeros(len(recorded), dtype=torch.bool)
    one, other = _rows(made), _rows(recorded)
    equal = (one == other) | (one != one) & (other != other)
    if made.is_floating_point():
        slack = BATCHED_NARROW if made.dtype in (torch.float16, torch.bfloat16) else BATCHED
        allowed = slack.of_each * other.abs() + slack.of_largest * _largest(other)
        equal |= ((one - other).abs() <= allowed) & other.isfinite()
    return equal.all(1)


def _are_clearly_apart(old: Tensor, new: Tensor) -> Tensor:
    """For each call, whether some element has changed by more than any rounding could."""
    one, other = _rows(old), _rows(new)
    if not old.is_floating_point():
        return (one != other).any(1)
    apart = (one - other).abs()
    return (apart.isfinite() & (apart > _CLEAR * _largest(one))).any(1)


def _rows(stack: Tensor) -> Tensor:
    """The elements of each call's value as one row."""
    return stack.reshape(len(stack), -1)


def _largest(rows: Tensor) -> Tensor:
    """The largest finite magnitude of each row."""
    return rows.abs().nan_to_num(0.0, 0.0, 0.0).amax(1, keepdim=True)
