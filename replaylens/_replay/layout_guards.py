"""How another memory layout of some values propagates through a program, and which answers it changes.

In: a graph, its recorded values, and tensors with other layouts in their place. Out: a Departure for each question
about layout with another answer, each call that this memory does not allow where the model may catch that, each call
that gives a view of written memory instead of a copy or the reverse, and each call that was recorded as torch
decomposed it for the recorded layout. With no departure, a replay on the tensors as they lie does what the model would
have done.

Only calls behind such values run, only while their results still lie otherwise than recorded, and only if there is
something to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from attrs import frozen

from .._ir.graph import Graph
from .._ir.interrupts import exclusive_generator
from .._ir.memory import overlaps_itself
from .._ir.node import SAME_TENSOR, Call, Guard, Ref, Source, TensorSpec, filled, refs_in, refs_of, specs_of
from .._ir.ops import Quirk, op_info
from .._ir.runtime import addresses_memory, exception_name, exception_text
from .._ir.target import Target
from .._ir.torch_private import OpOverload, is_wrapped
from .._ir.trees import leaves, part_at
from .._ir.write import Write
from ..errors import ReplaylensError
from .guards import Departure, changed_answer, guard_text
from .rng_stream import has_own_generator

Tensors = Mapping[Ref, torch.Tensor]
_KNOWN = ("torch.", "replaylens.", "builtins.", "_operator.", "operator.")
_RAISED = ("exception", "message")
UNKNOWN_LAYOUT = "not known on this memory layout"


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its memory: strides, offset, and whether the conjugate or negative is stored."""
    lazy = (tensor.is_conj(), tensor.is_neg()) if is_lazy(tensor) else ()
    return (tensor.stride(), int(tensor.storage_offset()), *lazy)


def is_lazy(tensor: torch.Tensor) -> bool:
    """True if memory holds other numbers than the tensor does: their conjugates or negatives."""
    return tensor.is_conj() or tensor.is_neg()


def layout_departures(
    graph: Graph,
    recorded: Tensors,
    given: Tensors,
    up_to_rounding: bool = False,
    fixed: Set[Ref] = frozenset(),
    readers: LayoutReaders | None = None,
) -> Iterator[Departure]:
    """Answers that the memory layout of the given tensors changes, and calls that now give views of written memory."""
    other = {ref: tensor for ref, tensor in given.items() if has_other_layout(graph, recorded, ref, tensor)}
    if other:
        walk = LayoutWalk(graph, recorded, other, up_to_rounding, fixed=fixed | given.keys(), readers=readers)
        yield from walk.departures()


def edit_layout_departures(
    graph: Graph, recorded: Tensors, strides: Mapping[Ref, tuple[int, ...] | None], now: Tensors, edited: Set[Ref]
) -> Iterator[Departure]:
    """The same for an edit: values that lie otherwise than those in their places did, whose `strides` these are."""
    known = {ref: (new, strides[ref]) for ref, new in now.items() if ref in strides and _has_strides(new)}
    other = {ref: new for ref, (new, then) in known.items() if then is not None and new.stride() != then}
    if not edited.isdisjoint(other):
        yield from LayoutWalk(graph, recorded, other, strides=strides).of_computed(now)


def has_other_layout(graph: Graph, recorded: Tensors, ref: Ref, tensor: torch.Tensor) -> bool:
    """True if a dense tensor of the recorded shape has another memory layout than the recorded value."""
    meaning = specs_of(graph[ref.node]).get(ref) if ref.node in graph else None
    if meaning is None or meaning.strides is None or not _has_strides(tensor) or tuple(tensor.shape) != meaning.shape:
        return False
    return tensor.stride() != meaning.strides or not _has_layout_of(tensor, recorded.get(ref), meaning)


def _has_strides(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapped(tensor)


def _has_layout_of(tensor: torch.Tensor, recorded: torch.Tensor | None, meaning: TensorSpec) -> bool:
    """True if a tensor lies as the recorded value, or, if that was not kept, as its spec says."""
    if recorded is None:
        return tensor.stride() == meaning.strides and not is_lazy(tensor)
    return geometry(recorded) == geometry(tensor)


def layout_answer_departures(guard: Guard, tensor: torch.Tensor) -> Iterator[Departure]:
    """Another answer of one tensor."""
    answer = _answer(guard, tensor)
    if guard.result != SAME_TENSOR:
        yield from filter(None, (changed_answer(guard, answer),))
    elif answer is not tensor:
        yield Departure(guard_text(guard), SAME_TENSOR, "a copy", guard.source)


def _answer(guard: Guard, tensor: torch.Tensor) -> Any:
    return _called(guard, lambda ref: tensor)


def _called(node: Guard | Call, value_of: Callable[[Ref], torch.Tensor]) -> Any:
    """The result of a question or call on these values."""
    kwargs = {key: filled(arg, value_of) for key, arg in node.kwargs}
    return node.target.function(*[filled(arg, value_of) for arg in node.args], **kwargs)


@frozen
class LayoutReaders:
    """Where it matters how values lie, if the calls themselves are to run on values that lie as the recorded ones."""

    calls: Set[str] = frozenset()  # the names of calls
    values: Set[Ref] = frozenset()  # values that leave the program


class LayoutWalk:
    """One walk over a graph in which some values have another layout."""

    def __init__(
        self,
        graph: Graph,
        recorded: Tensors,
        other: Tensors,
        up_to_rounding: bool = False,
        strides: Mapping[Ref, tuple[int, ...] | None] = MappingProxyType({}),
        fixed: Set[Ref] = frozenset(),
        readers: LayoutReaders | None = None,
    ) -> None:
        self.graph, self.recorded, self.up_to_rounding = graph, recorded, up_to_rounding
        self.fixed = fixed  # given values: their layout does not follow from their operands
        self.strides = strides  # of an edited graph: recorded strides that differ from the specs
        self.readers = readers or LayoutReaders()
        self.meanings = {ref: meaning for node in graph.nodes for ref, meaning in specs_of(node).items()}
        self.other = {ref: tensor.detach() for ref, tensor in other.items()}
        self.zeros: dict[Ref, torch.Tensor] = {}  # for recorded values that were not kept
        self.unknown: set[Ref] = set()  # values whose layout is not known
        self.ever_other = set(self.other)
        self.viewed = graph.marked_ancestors([guard.refs[0].node for guard in graph.asked if asks_for_view(guard)])

    def departures(self) -> list[Departure]:
        """Every answer that differs, in the order of the program."""
        caught = [guard for guard in self.graph.guards if guard.kind in _RAISED or exposes_memory(guard)]
        asked = [guard for guard in self.graph.asked if guard.kind == "layout"]
        questions = sorted((*asked, *caught), key=lambda guard: guard.position)
        has_readers = bool(self.readers.calls or self.readers.values)
        if not questions and not has_readers and not depends_on_layout(self.graph):
            return []
        with exclusive_generator():
            state = torch.default_generator.get_state()
            try:
                with torch.no_grad(), torch.inference_mode(False):
                    return list(self._walk(questions))
            finally:
                torch.default_generator.set_state(state)

    def _walk(self, questions: list[Guard]) -> Iterator[Departure]:
        for ref in self.other:
            yield from self._write_departures(ref)
        for position, node in enumerate(self.graph.nodes):
            while questions and questions[0].position <= position:
                yield from self._ask(questions.pop(0))
            if not self.other and not self.unknown:
                return
            if isinstance(node, Call) and any(ref in self.other or ref in self.unknown for ref in node.refs):
                yield from self._follow(node)
        for guard in questions:
            yield from self._ask(guard)
        yield from self._reader_departures("what leaves the program", self.readers.values, None)

    def of_computed(self, now: Tensors) -> Iterator[Departure]:
        """The same without the questions, where all values are known: nothing runs again."""
        for ref in self.other:
            yield from self._write_departures(ref)
        for guard in filter(exposes_memory, self.graph.guards):
            yield from self._ask_outside(guard, guard.refs[0])
        for call in self.graph.calls if self.other else ():
            if not call.edited and any(ref in self.other for ref in call.refs):
                yield from self._memory_departures(call)
                for ref in refs_of(call):
                    if ref in now:
                        yield from self._view_departures(call, ref, now[ref])

    # -- questions -----------------------------------------------------------------------------------------------------

    def _ask(self, guard: Guard) -> Iterator[Departure]:
        if guard.kind in _RAISED:
            yield from self._ask_exception(guard)
            return
        ref = guard.refs[0]
        if guard.kind == "content":
            yield from self._ask_outside(guard, ref)
        elif ref in self.unknown:
            yield Departure(guard_text(guard), guard.result, UNKNOWN_LAYOUT, guard.source)
        elif ref in self.other:
            if guard.result == SAME_TENSOR:
                yield from self._ask_identity(guard, ref, _answer(guard, self.other[ref]))
            else:
                yield from layout_answer_departures(guard, self.other[ref])

    def _ask_outside(self, guard: Guard, ref: Ref) -> Iterator[Departure]:
        """Memory left torch: its layout can be read there."""
        if ref in self.other or ref in self.unknown:
            now = str(geometry(self.other[ref])) if ref in self.other else UNKNOWN_LAYOUT
            was = geometry(self.recorded[ref]) if ref in self.recorded else self.meanings[ref].strides
            yield Departure(f"how {ref} lies in the memory that left torch", str(was), now, guard.source, "layout")

    def _ask_exception(self, guard: Guard) -> Iterator[Departure]:
        """A call that raised, and whose exception the model caught: does it raise on this memory?"""
        if not any(ref in self.other or ref in self.unknown for ref in guard.refs):
            return
        now = None
        try:
            _called(guard, self._value)
        except Exception as error:
            now = exception_text(error) if guard.kind == "message" else exception_name(error)
        yield from filter(None, (changed_answer(guard, now),))

    def _ask_identity(self, guard: Guard, ref: Ref, answer: torch.Tensor) -> Iterator[Departure]:
        """`contiguous` of a contiguous tensor is no call of the program. Its copy replaces the value from here on."""
        if answer is self.other[ref]:
            return
        if not self.up_to_rounding or self.graph.asks_identity or self._is_written(ref) or self._is_viewed(ref):
            yield Departure(guard_text(guard), SAME_TENSOR, "a copy", guard.source)
        self._set_layout(ref, answer)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _follow(self, node: Call) -> Iterator[Departure]:
        """Finds the layout of what a call gives."""
        gives = [ref for ref in refs_in(node.returns) if ref not in self.fixed]
        yield from self._memory_departures(node)
        if any(ref in self.unknown for ref in node.refs) or not _can_run(node):
            self.unknown.update(gives)
            return
        try:
            if isinstance(node, Write):  # the other views that it writes are made of its bases
                node = node.with_values(self.fixed | self.graph.edited_refs)
            made = _called(node, self._value)
        except Exception as error:
            # The model raises what torch raises, and so does the replay where nothing catches it.
            if self.graph.catches or isinstance(error, ReplaylensError):
                yield Departure(f"whether {node.name} can be made of this memory", "True", "False", node.source)
            return
        for ref in gives:
            new = part_at(made, ref.path)
            if not isinstance(new, torch.Tensor) or tuple(new.shape) != self.meanings[ref].shape:
                self.unknown.add(ref)
            elif new.layout is torch.strided and self.meanings[ref].strides is not None:
                yield from self._view_departures(node, ref, new)
                self._set_layout(ref, new)
                yield from self._write_departures(ref)

    def _reader_departures(self, name: str, refs: Iterable[Ref], source: Source | None) -> Iterator[Departure]:
        if any(map(self._lies_otherwise, refs)):
            yield Departure(f"the memory that {name} reads", "laid out in one way", "in another", source, "layout")

    def _lies_otherwise(self, ref: Ref) -> bool:
        """True if the order or the places of a value's elements in memory differ, or may."""
        if ref not in self.other:
            return ref in self.unknown
        new, known = self.other[ref], self.recorded.get(ref)
        strides = known.stride() if known is not None else self.meanings[ref].strides or ()
        three = zip(new.shape, new.stride(), strides, strict=True)
        return any(size > 1 and mine != theirs for size, mine, theirs in three) and new.numel() > 0

    def _memory_departures(self, node: Call) -> Iterator[Departure]:
        """Departures of a call whose result depends on how its operands lie."""
        if node.name in self.readers.calls:
            knows_views = isinstance(node, Write) and node.draws is None  # for these it is asked below
            refs = self.unknown.intersection(node.refs) if knows_views else node.refs
            yield from self._reader_departures(node.name, refs, node.source)
        if _reads_geometry(node) and self._reads_other_geometry(node):
            yield Departure(f"the memory that {node.name} looks at", "laid out in one way", "in another", node.source)
        if _is_decomposed(node, self.graph.is_deep):
            yield Departure(
                f"how torch takes apart what gives {node.name}", "known", UNKNOWN_LAYOUT, node.source, "layout"
            )
        if (base := self._self_overlapping_target(node)) is not None:
            yield Departure(
                f"whether the elements of {base} lie apart, which is written,", "True", "False", node.source
            )

    def _reads_other_geometry(self, node: Call) -> bool:
        """True if a call that reads geometry reads one that has changed. The views of a write are made of its bases;
        a patch of such a view is a tensor of its own.
        """
        if not isinstance(node, Write) or addresses_memory(node.arguments.function):
            return True
        return any(map(self._has_other_layout, node.arguments.bases))

    def _self_overlapping_target(self, node: Call) -> Ref | None:
        """A written value whose elements now overlap in memory, if any: torch refuses most such writes."""
        bases = node.arguments.bases if isinstance(node, Write) else ()
        return next((ref for ref in bases if ref in self.other and overlaps_itself(self.other[ref])), None)

    def _has_other_layout(self, leaf: Any) -> bool:
        return type(leaf) is Ref and (leaf in self.other or leaf in self.unknown)

    def _view_departures(self, node: Call, ref: Ref, new: torch.Tensor) -> Iterator[Departure]:
        """Results that are views where they were copies, or the reverse, if the model writes that memory."""
        before = self.recorded.get(ref)
        for source in node.refs:
            was_source = self.recorded.get(source)
            if source not in self.other:
                continue
            if before is None or was_source is None:
                if self._is_viewed(ref):
                    yield Departure(
                        f"whether {node.name} gives a view of {source}", "known", UNKNOWN_LAYOUT, node.source
                    )
                continue
            was, now = _share_storage(before, was_source), _share_storage(new, self.other[source])
            matters = self.graph.asks_identity or self._is_viewed(ref)
            if was != now and (matters or self._is_written(source) or self._is_written(ref)):
                words = {True: "a view of it", False: "a copy"}
                yield Departure(f"what {node.name} gives of {source}", words[was], words[now], node.source)

    def _write_departures(self, ref: Ref) -> Iterator[Departure]:
        """A written value that has another layout. A write into dense memory may stand in the program as a call that
        gives new memory in a layout of its own.
        """
        if ref not in self.other or ref not in self.graph.written:
            return
        strides = self.strides.get(ref, self.meanings[ref].strides)
        is_dense = strides == torch.empty(self.meanings[ref].shape, device="meta").stride()
        if is_dense and self.other[ref].stride() != strides:
            yield Departure(
                f"the memory of {ref}, which the model writes,", "dense", "in another layout", None, "layout"
            )

    def _value(self, ref: Ref) -> torch.Tensor:
        found = self.other.get(ref, self.recorded.get(ref))
        if found is not None:
            return found.detach()
        if ref not in self.zeros:
            meaning = self.meanings[ref]
            made = torch.empty_strided(meaning.shape, meaning.strides or (), dtype=meaning.dtype, device=meaning.device)
            self.zeros[ref] = made.zero_()
        return self.zeros[ref]

    def _set_layout(self, ref: Ref, tensor: torch.Tensor) -> None:
        """Records the layout of a value from here on; one that equals the recorded layout is dropped."""
        if _has_layout_of(tensor, self.recorded.get(ref), self.meanings[ref]):
            self.other.pop(ref, None)
        else:
            self.other[ref] = tensor
            self.ever_other.add(ref)

    def _is_viewed(self, ref: Ref) -> bool:
        """True if the model asks whether this value, or one made from it, is a view."""
        return bool(self.viewed[self.graph.positions[ref.node]])

    def _is_written(self, ref: Ref) -> bool:
        """True if the model writes the memory of a value, or of one with another layout that it may be a view of."""
        written = self.graph.written
        return ref in written or bool(
            written & self.ever_other & {Ref(name) for name in self.graph.ancestors([ref.node])}
        )


def depends_on_layout(graph: Graph) -> bool:
    """True if a model may take another path where a value has another layout, even if it asks no question about it."""
    delicate = any(_reads_geometry(call) or _is_decomposed(call, graph.is_deep) for call in graph.calls)
    asked = any(map(asks_for_view, graph.asked))
    return bool(graph.written) or graph.asks_identity or graph.catches or delicate or asked


def asks_for_view(guard: Guard) -> bool:
    """True if the model asks whether a value is a view, which layouts may decide: of `reshape`, of `contiguous`."""
    return bool(guard.refs) and guard.target.short in ("_base", "_is_view")


def exposes_memory(guard: Guard) -> bool:
    """True if the memory of a tensor left torch, and not only its numbers."""
    return guard.compares_content and op_info(guard.target).has(Quirk.EXPOSES_MEMORY)


def _is_decomposed(node: Call, is_deep: bool) -> bool:
    """True for a call beneath the functions that a model calls: torch decomposes `matmul`, `linear`, `reshape` and
    the like by layout. The first call of such a decomposition is never pointwise.
    """
    function: Any = node.target.function
    if not isinstance(function, OpOverload) or function.namespace != "aten":
        return False
    op = op_info(function)
    return is_deep or not (op.is_pointwise or op.has(Quirk.SAME_BENEATH))


def _reads_geometry(node: Call) -> bool:
    """True if a call indexes memory by strides of its own."""
    return any(map(addresses_memory, node.functions))


def _can_run(node: Call) -> bool:
    """True for functions of torch's or ours without effects. A user's own function is not called for this."""
    function: Any = node.target.function
    while isinstance(function, partial):
        function = function.func
    if has_own_generator(node):
        return False
    module = getattr(function, "__module__", None) or type(function).__module__
    home = module.partition(".")[0]
    if home == "replaylens" and not isinstance(node, Write):
        return not node.through and not is_foreign(node)
    return home in ("torch", "builtins", "_operator") or isinstance(node, Write)


def is_foreign(node: Call) -> bool:
    """True for a call of functions that are neither torch's nor replaylens's own."""
    literals = leaves((node.args, node.kwargs))
    given = [leaf for leaf in literals if callable(leaf) and not isinstance(leaf, (type, Target))]
    return bool(given) or not all(one.name.startswith(_KNOWN) and not one.is_of_a_library for one in node.functions)


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.layout is torch.strided and one.untyped_storage()._cdata == other.untyped_storage()._cdata
