"""One node, run for many variants at once: row by row, under vmap, or variant by variant.

In: a call of the program, and the Deltas of its operands. Out: the Deltas of its results. Row alignments are proved on
made-up numbers, and vmap on the recorded values, before they are used: once for all calls with the same signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import torch
from attrs import define, evolve, field

from .._ir.memory import overlaps_itself, stack_with_layout_of, with_layout_of
from .._ir.node import Call, Context, Ref, TensorSpec, refs_in
from .._ir.ops import Quirk, op_info
from .._ir.runtime import alias
from .._ir.target import Target
from .._ir.torch_private import (
    add_batch,
    load_vmap_rules,
    remove_batch,
    vmap_begins,
    vmap_ends,
    warn_of_vmap_fallbacks,
)
from .._ir.trees import Branch
from .._ir.util import cached_property
from .._ir.write import Write, original_call
from .._replay.compile import caller
from .._replay.guards import Departure
from .._replay.interpreter import modes
from .._replay.layout_guards import is_foreign
from ..errors import ReplaylensError
from .alignment import NO_LITERALS, Alignment, Literals, candidates, close_across_batches, is_proved, only_moves
from .sparse_rows import Delta, dense, on_common_pairs, rows_of, stacked

Tensor = torch.Tensor
MAX_PROBED = 4_000_000  # numbers: a larger value is taken as it was recorded when a call is tried


@define(eq=False)
class CallSignature:
    """What is known of all calls with the same function, literals, shapes and whole numbers: their candidate
    alignments and the proved ones.
    """

    name: str  # of the operation; empty where it is none of torch's own
    alignments: tuple[Alignment, ...]  # those that are not refuted
    unread: frozenset[int]  # the values of which only shape, dtype or device are read
    literals: Literals = NO_LITERALS
    reads_layout: bool = True  # how its operands lie in memory may matter: none of torch's own, or given a function
    proved: set[Alignment] = field(factory=set)
    vmaps: dict[Any, bool] = field(factory=dict)  # by which values vary; missing: not tried yet
    routes: dict[Any, Any] = field(factory=dict)  # how to run a step, by the forms of what it reads
    taken: Any = None  # the rows that it takes: see prepared_program.py

    def unproved(self) -> CallSignature:
        """The same, with no proof yet: of calls of other shapes."""
        return CallSignature(self.name, self.alignments, self.unread, self.literals, self.reads_layout)


@define(eq=False, slots=False)
class BatchedOp:
    """A node with what is needed to run it for many variants."""

    node: Call
    reads: tuple[int, ...]  # the slots of what it reads, each once
    recorded: tuple[Tensor, ...]  # the recorded values of these
    outputs: tuple[Ref, ...]
    gives: tuple[int, ...]  # the slots of these
    results: tuple[Tensor, ...]  # the recorded values of what it gives
    signature: CallSignature
    call: Callable[[Sequence[Any]], Any]
    is_single: bool = field(init=False)  # it gives one tensor
    may_take: bool = field(init=False)  # it may hand on some rows as they are
    routes: dict[Any, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.routes = self.signature.routes
        self.is_single = len(self.outputs) == 1 and not self.outputs[0].path
        self.may_take = (
            self.is_single
            and len(self.reads) == 1
            and self.signature.name != ""
            and self.results[0].numel() < self.recorded[0].numel()
        )

    @property
    def alignments(self) -> tuple[Alignment, ...]:
        """Candidates: each may be used only if it `holds`."""
        return self.signature.alignments

    @property
    def unread(self) -> frozenset[int]:
        return self.signature.unread

    @cached_property
    def work(self) -> float:
        """Multiplications of a matrix product; zero for any other operation."""
        name = self.signature.name
        if name not in ("linear", "addmm", "matmul", "mm", "bmm", "baddbmm") or not self.results[0].dim():
            return 0.0
        return self.multiplications

    @property
    def multiplications(self) -> float:
        """Multiplications of products, convolutions and attention, roughly; zero for operations that only pass over
        numbers.
        """
        name, out = self.signature.name, self.results[0].numel()
        shapes = [value.shape for value in self.recorded]
        if name in ("linear", "matmul", "mm", "bmm") and shapes[0]:
            return float(out * shapes[0][-1])
        matrices = [shape for shape in shapes if len(shape) > 1]  # the factors may be tensors, too
        if name in ("addmm", "baddbmm") and len(matrices) > 1:
            return float(out * matrices[-2][-1])
        if name.startswith("conv") and len(shapes) > 1:
            return float(out * prod(shapes[1][1:]))
        if name == "scaled_dot_product_attention" and len(shapes) > 1:
            return float(2 * out * shapes[1][-2])
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            return float(prod(shapes[0][:-1]) * sum(prod(shape) for shape in shapes[1:] if len(shape) == 2))
        return 0.0

    def holds(self, align: Alignment) -> bool:
        """True if this alignment is true here. Proved once per signature."""
        signature = self.signature
        if align in signature.proved:
            return True
        if align not in signature.alignments:
            return False
        with modes(_without_gradients(self.node.context)):
            run, is_pointwise = partial(self._run_rows, align), lambda: op_info(signature.name).is_pointwise
            found = is_proved(align, self.recorded, run, signature.literals, is_pointwise) and (
                not align.resizes or only_moves(align, self.recorded, self.call)
            )
        if found:
            signature.proved.add(align)
        else:
            self.refute(align)
        return found

    def gives_what_was_recorded(self) -> bool:
        """True if the call gives the recorded results."""
        with modes(_without_gradients(self.node.context)):
            found = self.parts(self.call(self.recorded))
        return all(map(close_across_batches, found, self.results))

    def has_rows(self, number: int, axis: int) -> bool:
        """True if any true alignment has the rows of an operand along this axis."""
        return any(align.operands[number] == axis and self.holds(align) for align in self.alignments)

    def refute(self, align: Alignment) -> None:
        """Drops an alignment that turned out false."""
        self.signature.proved.discard(align)
        self.signature.alignments = tuple([other for other in self.signature.alignments if other != align])
        self.signature.routes.clear()

    def _run_rows(self, align: Alignment, values: Sequence[Tensor], rows: int | None) -> list[Tensor]:
        resized = align.resizes and rows is not None
        return self.parts(self._resized(values, align, rows) if resized else self.call(values))

    def _probes(self, varies: Sequence[bool], scale: float = 1.0) -> list[Tensor]:
        """Random numbers, all different and none large, for operands that vary: the recorded ones may all be zeros.
        Another scale gives another sum, maximum and spread, too.
        """
        generator = torch.Generator().manual_seed(len(self.recorded))
        return [
            _random(value, generator, scale) if varied and _can_be_random(value) else value
            for value, varied in zip(self.recorded, varies, strict=True)
        ]

    def by_rows(self, align: Alignment, deltas: Sequence[Delta | None]) -> list[Delta]:
        """The rows that differ, all in one call. The Deltas lie along the axes of the alignment."""
        pairs, changed = on_common_pairs(deltas, self.recorded)
        if not len(pairs):
            return []
        values = [
            data if data is not None else value if axis is None else rows_of(value, axis, pairs)
            for data, value, axis in zip(changed, self.recorded, align.operands, strict=True)
        ]
        result = self._resized(values, align, len(pairs)) if align.resizes else self.call(values)
        if self.is_single:
            axis = align.outputs[0]
            if result.dim() != self.results[0].dim() or result.shape[axis] != len(pairs):
                raise RowsDiffer
            return [Delta(axis, pairs, result)]
        found = self.parts(result)
        count = len(pairs)
        for new, result, axis in zip(found, self.results, align.outputs, strict=True):
            if new.dim() != result.dim() or new.shape[axis] != count:
                raise RowsDiffer
        return [Delta(axis, pairs, data) for data, axis in zip(found, align.outputs, strict=True)]

    def _resized(self, values: Sequence[Tensor], align: Alignment, rows: int | None) -> Any:
        number = next(n for n, axis in enumerate(align.operands) if axis is not None)
        shape, axis = self.results[0].shape, align.outputs[0]
        sizes: Any = (*shape[:axis], rows, *shape[axis + 1 :])
        return values[number].reshape(sizes) if align.resizes == "reshape" else values[number].expand(sizes)

    def whole(self, deltas: Sequence[Delta | None]) -> tuple[list[Delta], bool]:
        """Every variant's whole value, under vmap where that is right, else one by one; and whether it was vmap."""
        stacks = [
            None if delta is None else dense(delta, value) for delta, value in zip(deltas, self.recorded, strict=True)
        ]
        pairs, changed = on_common_pairs(stacks, self.recorded)
        lanes = pairs.lanes
        if self._allows_vmap() and self._is_vmappable(changed):
            try:
                found = self._under_vmap(changed, len(lanes))
                return [stacked(lanes, data) for data in found], True
            except (RuntimeError, ReplaylensError):  # such as a view that this memory layout does not have
                pass
        return self._one_by_one(changed, lanes), False

    def _allows_vmap(self) -> bool:
        """False for draws, shapes that contents decide, gradients inside, and operations whose vmap rule is wrong."""
        node = self.node
        if self.signature.reads_layout and any(map(overlaps_itself, self.recorded)):
            return False
        is_wrong = op_info(original_call(node).target).has(Quirk.WRONG_UNDER_VMAP)
        return node.draws is None and not node.is_dynamic and not node.through and not is_wrong

    def _is_vmappable(self, changed: Sequence[Tensor | None]) -> bool:
        """True if the call gives the same under vmap as lane by lane, tried on two lanes that differ in each varying
        operand. Torch's rules may read a tensor as one number for all lanes.
        """
        key = tuple([data is not None for data in changed])
        known = self.signature.vmaps.get(key)
        if known is None:
            if (lanes := self._distinct_lanes(changed)) is None:
                return False  # nothing to tell them apart by: the next values may
            one, other = [list(map(with_layout_of, values, self.recorded)) for values in lanes]
            known = self.signature.vmaps[key] = self._proves_vmap(one, other, key)
        return known

    def _proves_vmap(self, one: list[Tensor], other: list[Tensor], varies: Sequence[bool]) -> bool:
        copies = [torch.stack(pair) if varied else None for *pair, varied in zip(one, other, varies, strict=True)]
        try:
            found = self._under_vmap(copies, 2)
            wholes = zip(*[self.parts(self.call(values)) for values in (one, other)], strict=True)
            return all(
                close_across_batches(new[0], first) and close_across_batches(new[1], second)
                for new, (first, second) in zip(found, wholes, strict=True)
            )
        except Exception:  # no rule for it: the loop is always right
            return False

    def _distinct_lanes(self, changed: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Two sets of operands that differ wherever values vary; None if no such values are known."""
        varies = [data is not None for data in changed]
        one, other = self._probes(varies), self._probes(varies, 0.4)
        for number, (data, value) in enumerate(zip(changed, self.recorded, strict=True)):
            if data is not None and not _can_be_random(value):
                others = (*data, value.flip(tuple(range(value.dim()))), torch.zeros_like(value))
                found = next((new for new in others if not torch.equal(new, value)), None)
                if found is None:
                    return None
                other[number] = found
        return one, other

    def _under_vmap(self, changed: Sequence[Tensor | None], count: int) -> list[Tensor]:
        def once(values: Sequence[Tensor]) -> list[Tensor]:
            return self.parts(self.call(values))

        if self.signature.reads_layout:
            pairs = zip(changed, self.recorded, strict=True)
            changed = [None if data is None else stack_with_layout_of(data, value) for data, value in pairs]
        return under_vmap(once, changed, self.recorded, count)

    def _one_by_one(self, changed: Sequence[Tensor | None], lanes: tuple[int, ...]) -> list[Delta]:
        rows = []
        for number in range(len(lanes)):
            values = [
                value if data is None else with_layout_of(data[number], value)
                for data, value in zip(changed, self.recorded, strict=True)
            ]
            rows.append(self.parts(self.call(values)))
        columns = zip(zip(*rows, strict=True), self.results, strict=True)
        return [_stacked(self.node, lanes, column, recorded) for column, recorded in columns]

    def parts(self, result: Any) -> list[Tensor]:
        """The tensors in the result of a call, in the order of `outputs`."""
        if self.is_single:
            return [result]
        found = []
        for ref in self.outputs:
            part = result
            for index in ref.path:
                part = part[index]
            found.append(part)
        return found


def _can_be_random(value: Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and value.numel() <= MAX_PROBED


def _random(value: Tensor, generator: torch.Generator, scale: float) -> Tensor:
    made = (torch.rand(value.shape, generator=generator) + 0.1) * scale
    return (torch.complex(made, made * made) if value.is_complex() else made).to(value)


class RowsDiffer(Exception):
    """A call did not treat rows alike after all."""


class ShapesDeparted(Exception):
    """Some variants give another shape than the recorded one."""

    def __init__(self, departures: dict[int, Departure]) -> None:
        super().__init__("another shape")
        self.departures = departures


def _stacked(node: Call, lanes: tuple[int, ...], values: tuple[Tensor, ...], recorded: Tensor) -> Delta:
    others = {
        lane: Departure(f"the shape of {node.name}", tuple(recorded.shape), tuple(value.shape), node.source, "shape")
        for lane, value in zip(lanes, values, strict=True)
        if value.shape != recorded.shape
    }
    if others:
        raise ShapesDeparted(others)
    return stacked(lanes, torch.stack(values))


_IS_RAW = None not in (vmap_begins, vmap_ends, add_batch, remove_batch)
_with_all_rules = cache(load_vmap_rules)


def under_vmap(
    function: Callable[[Sequence[Tensor]], list[Tensor]],
    changed: Sequence[Tensor | None],
    others: Sequence[Tensor],
    count: int,
) -> list[Tensor]:
    """`function` under vmap: values that are None among `changed` are the same for all. The raw entry costs a tenth."""
    if not _IS_RAW:
        dims = (tuple([None if data is None else 0 for data in changed]),)
        given = [value if data is None else data for data, value in zip(changed, others, strict=True)]
        return list(torch.func.vmap(lambda values: tuple(function(values)), dims, randomness="same")(tuple(given)))
    _with_all_rules()
    level = vmap_begins(count, "same")
    warn_of_vmap_fallbacks(False)  # slow, and right: `Sweep.alone` tells what ran one by one
    try:
        given = [
            value if data is None else add_batch(data, 0, level) for data, value in zip(changed, others, strict=True)
        ]
        return [remove_batch(part, level, count, 0) for part in function(given)]
    finally:
        warn_of_vmap_fallbacks(True)
        vmap_ends()


# ---- making steps --------------------------------------------------------------------------------------------------

_SIGNATURES: dict[Any, CallSignature] = {}


def batched_op(
    node: Call,
    slot: dict[Ref, int],
    values: Sequence[Tensor],
    meanings: Sequence[TensorSpec],
    states: dict[str, Tensor],
) -> BatchedOp:
    """A node made ready to run. `values` and `meanings` are the recorded ones, by slot."""
    if isinstance(node, Write):  # a patch that parts a view from its memory runs alone: see sweep_runner.py
        node = node.with_values(frozenset())
    refs = node.refs
    every = [slot[ref] for ref in refs]
    reads = tuple(dict.fromkeys(every))
    place = {read: number for number, read in enumerate(reads)}
    slots = {ref: place[read] for ref, read in zip(refs, every, strict=True)}
    template: list[Any] = [None] * len(reads)

    def literal(value: Any) -> int:
        template.append(value)
        return len(template) - 1

    read, function = caller(node, slots, literal, states)
    rest = template[len(reads) :]

    def call(given: Sequence[Any]) -> Any:
        return function(*read([*given, *rest]))

    outputs = tuple(dict.fromkeys(refs_in(node.returns)))
    gives = tuple([slot[ref] for ref in outputs])
    recorded, results = [tuple([values[number] for number in numbers]) for numbers in (reads, gives)]
    signature = _signature_of(
        node, tuple([place[read] for read in every]), recorded, results, [meanings[read] for read in every]
    )
    return BatchedOp(node, reads, recorded, outputs, gives, results, signature, call)


def _signature_of(
    node: Call,
    where: tuple[int, ...],
    recorded: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    meanings: Sequence[TensorSpec],
) -> CallSignature:
    """The signature of a call. `where`: the number of the value at each operand."""
    if node.draws is not None or node.through:
        return CallSignature("", (), frozenset())
    met = iter([(meaning.shape, meaning.dtype, meaning.strides) for meaning in meanings])
    try:
        key = (
            node.target.function,
            node.context,
            signature_key(node.args, met),
            signature_key(node.kwargs, met),
            where,
            tuple([_content(value) for value in recorded if not (value.is_floating_point() or value.is_complex())]),
        )
        known = _SIGNATURES.get(key)
    except TypeError:  # a literal that cannot be hashed
        key, known = None, None
    if known is None:
        name = node.target.short.strip("_") if is_torch_op(node.target) else ""
        unread = _shape_only(name, where)
        found = candidates(node, name, recorded, results, unread, where)
        literals = Literals.of((node.args, node.kwargs), op_info(name), (*recorded, *results))
        known = CallSignature(name, found, unread, literals, not name or is_foreign(node))
        if key is not None:
            if len(_SIGNATURES) > 20000:
                _SIGNATURES.clear()
            _SIGNATURES[key] = known
    return known


def _shape_only(name: str, where: tuple[int, ...]) -> frozenset[int]:
    """The values of which only shape, dtype or device are read, wherever they stand."""
    op = op_info(name)
    if op.reads_shape_of_first:
        free = {0}  # what they fill with, and sizes that are tensors, are read
    elif op.reads_shape_of_second:
        free = set(range(1, len(where)))
    else:
        return frozenset()
    return frozenset(where[n] for n in free if n < len(where)) - {at for n, at in enumerate(where) if n not in free}


def _content(value: Tensor) -> int:
    """A digest of whole numbers or answers: a proof with these as indices or as a mask says nothing of others."""
    return hash(value.detach().cpu().numpy().tobytes())


@lru_cache(maxsize=256)
def _without_gradients(context: Context) -> Context:
    return evolve(context, grad=False, inference=False)


def signature_key(tree: Any, met: Iterator[Any]) -> Any:
    """What two calls of one signature share: literals with their types, and what `met` says of tensors, in order."""
    kind = type(tree)
    if kind is Ref:
        return next(met)
    if kind is tuple:
        return tuple([signature_key(item, met) for item in tree])
    if kind is Branch:
        return tree.kind, tree.keys, tuple([signature_key(item, met) for item in tree.items])
    return kind, tree


def asks_for_layout(node: Call) -> bool:
    """True for a call that may give other numbers where its operands lie otherwise: draws, writes through views, and
    code of the user's.
    """
    return node.draws is not None or isinstance(node, Write) or is_foreign(node)


def is_torch_op(target: Target) -> bool:
    """True for torch's own operations."""
    return (target.name.startswith("torch.") and not target.is_of_a_library) or target.function is alias
