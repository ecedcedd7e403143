"""Answers that no content decides: flags, modes and, by way of layout_guards.py, memory layouts.

In: the record of a program, and the tensors that replace recorded values. Out: a Departure for each question of the
model's that has another answer with them. Flags are followed through the graph. If no source has another layout or
flag than recorded, there is nothing to ask.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from typing import Any

import torch
from attrs import field, frozen

from .._ir.equality import python_attributes, same_content
from .._ir.graph import Graph
from .._ir.memory import with_strides
from .._ir.node import Call, Guard, Input, Ref, State, TensorSpec, specs_of
from .._ir.ops import Quirk, op_info
from .._ir.runtime import alias, deepcopied
from .._ir.torch_private import is_wrapped
from .._ir.trees import named_items, walk
from .._ir.write import Write
from .guards import Departure, changed_answer, diverged_error, guard_text
from .layout_guards import (
    LayoutWalk,
    Tensors,
    exposes_memory,
    has_other_layout,
    layout_answer_departures,
    layout_departures,
)

UNKNOWN_FLAG = "not known"
NOT_NONE = "there"  # the answer if the model only asks whether it is None
WALK = "next_functions"


@frozen
class OuterModes:
    """The modes around the whole model."""

    grad: bool
    inference: bool

    @staticmethod
    def of_replay(graph: Graph, grad: bool) -> OuterModes:
        """The modes of the capture; with gradients on if the replay needs them."""
        return OuterModes(graph.outer_modes.grad or grad, graph.outer_modes.inference and not grad)

    @staticmethod
    def now() -> OuterModes:
        """The modes of this thread now."""
        return OuterModes(torch.is_grad_enabled(), torch.is_inference_mode_enabled())


def guarded_changes(graph: Graph, changed: Collection[int], until: int | None = None) -> list[int]:
    """Of changed nodes, those on which a fact depends that no content decides, whether or not the output needs them:
    questions that the model asks behind them, exceptions that it can catch, and for nodes that the output does not
    need their shape and dtype, which Python may have read.
    """
    asked = [g for g in graph.asked if g.refs and (until is None or g.position <= until)]
    above = graph.marked_ancestors([ref.node for guard in asked for ref in guard.refs]) if changed else b""
    needed = graph.needed_marks if until is None and graph.wanted_refs else None
    return [
        position
        for position in changed
        if above[position]
        or (graph.catches and graph.dependents[position])
        or (needed is not None and not needed[position])
    ]


def metadata_departures(graph: Graph, recorded: Tensors, given: Tensors, around: OuterModes) -> Iterator[Departure]:
    """Other answers, with these tensors in the place of recorded values."""
    if graph.asked or graph.catches:
        yield from _mode_departures(graph, around)
        yield from flag_departures(graph, recorded, given, around)
    yield from layout_departures(graph, recorded, given)


def _mode_departures(graph: Graph, around: OuterModes) -> Iterator[Departure]:
    for guard in graph.asked:
        if guard.kind == "mode":
            now = around.grad if guard.target.function is torch.is_grad_enabled else around.inference
            yield from filter(None, (changed_answer(guard, now),))


def require_same_answers(graph: Graph, recorded: Tensors, given: Tensors, around: OuterModes | None = None) -> None:
    """Raises for tensors with other answers, where there is no other way out. `around` defaults to the modes that
    are on.
    """
    for departure in metadata_departures(graph, recorded, given, around or OuterModes.now()):
        raise diverged_error(departure)


def value_departures(guard: Guard, value: torch.Tensor) -> Iterator[Departure]:
    """Another answer of the tensor itself. Where it has no history here, the autograd function that gave it is not
    compared.
    """
    if guard.kind == "layout" and value.layout is torch.strided:
        yield from layout_answer_departures(guard, value)
    elif guard.target.short in ("requires_grad", "is_inference"):
        yield from filter(None, (changed_answer(guard, flag_answer(guard, value)),))
    elif guard.target.short in ("is_leaf", "grad_fn"):
        was_leaf, is_leaf = guard.result is True, value.is_leaf  # no function is True, too
        is_other = was_leaf != is_leaf and value.requires_grad == was_leaf
        if is_other or (type(guard.result) is str and value.grad_fn is not None):
            yield from filter(None, (changed_answer(guard, flag_answer(guard, value)),))


# -- patches -----------------------------------------------------------------------------------------------------------


@frozen
class ReplacedValues:
    """The tensors that replace recorded values in a replay, as far as it has come."""

    graph: Graph
    recorded: Tensors
    around: OuterModes
    fixed: Set[Ref]  # all given or patched values, now or later: neither layout nor flags follow from their operands
    given: Tensors
    other: dict[Ref, torch.Tensor] = field(init=False)  # those with another layout
    flagged: dict[Ref, torch.Tensor] = field(init=False)  # those with another flag
    reported: set[str] = field(factory=set)

    @other.default
    def _others(self) -> dict[Ref, torch.Tensor]:
        pairs = self.given.items()
        return {ref: tensor for ref, tensor in pairs if has_other_layout(self.graph, self.recorded, ref, tensor)}

    @flagged.default
    def _given(self) -> dict[Ref, torch.Tensor]:
        return dict(self.given)

    def departures(self, ref: Ref, old: Any, new: torch.Tensor) -> Iterator[Departure]:
        """Other answers with a patched value, each reported once."""
        for departure in self._departures(ref, old, new):
            if str(departure) not in self.reported:
                self.reported.add(str(departure))
                yield departure

    def _departures(self, ref: Ref, old: Any, new: torch.Tensor) -> Iterator[Departure]:
        """Other answers with a patched value. Its flag counts only if the old value had another, and the model does
        not set it right there.
        """
        graph = self.graph
        is_given = has_input_attributes(new) and isinstance(graph[ref.node], Input)
        if (graph.asked or graph.catches) and new is not old and (is_given or not _sets_own_flag(graph, ref)):
            if is_given or (isinstance(old, torch.Tensor) and _flags(old) != _flags(new)):
                self.flagged[ref] = new
                yield from flag_departures(graph, self.recorded, self.flagged, self.around, self.fixed)
                yield from () if is_given else _history_departures(graph, ref, new, of_the_object=True)
            else:
                yield from _history_departures(graph, ref, new)
        if is_given:
            yield from _class_departures(graph, ref, new)
        yield from _attribute_departures(graph, ref, new)
        if isinstance(old, torch.Tensor) and old.layout is not new.layout:
            yield Departure(f"the layout of {ref}", str(old.layout), str(new.layout))
        self._update_layout(ref, new)
        if self.other:
            yield from LayoutWalk(graph, self.recorded, self.other, fixed=self.fixed).departures()

    def _update_layout(self, ref: Ref, new: torch.Tensor) -> None:
        self.other.pop(ref, None)
        if has_other_layout(self.graph, self.recorded, ref, new):
            self.other[ref] = new

    def lay(self, ref: Ref, new: torch.Tensor) -> torch.Tensor:
        """The result of a patch, in the memory layout that the recorded path needs."""
        laid = with_strides(new, specs_of(self.graph[ref.node])[ref].strides)
        self._update_layout(ref, laid)
        return laid


def has_input_attributes(new: torch.Tensor) -> bool:
    """True if a tensor has what only a user's tensor may have, and a model may ask an input for: a class, a flag, a
    gradient, an attribute.
    """
    if type(new) is not torch.Tensor:
        return not is_wrapped(new)
    return new.requires_grad or (new.is_leaf and new.grad is not None)


def _class_departures(graph: Graph, ref: Ref, new: torch.Tensor) -> Iterator[Departure]:
    """An input patched with a tensor of another class. The model may ask for the class unseen."""
    node = graph[ref.node]
    was, now = getattr(node, "python_type", None), type(new)
    if was is None or now is torch.Tensor:
        return
    if (was.__module__, was.__qualname__) != (now.__module__, now.__qualname__):
        yield Departure(f"the class of {node.name}", was.__name__, now.__name__)


def _attribute_departures(graph: Graph, ref: Ref, new: torch.Tensor) -> Iterator[Departure]:
    """An input patched with a tensor that has other Python attributes."""
    if isinstance(graph[ref.node], Input) and type(new) in (torch.Tensor, torch.nn.Parameter):
        paths, held = walk(graph.inputs, named_items) if graph.literals else (), dict(graph.literals)
        was = next((held.get(path) for path, leaf in paths if type(leaf) is Ref and leaf == ref), None)
        if was != (now := python_attributes(new)):
            yield Departure(f"the Python attributes of {ref}", was, now)


def _sets_own_flag(graph: Graph, ref: Ref) -> bool:
    """True if the model sets the flag of this value, whatever it was: `h.detach().requires_grad_()`."""
    node = graph[ref.node]
    return isinstance(node, Call) and node.kind in ("requiresgrad", "newparameter")


def _flags(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.requires_grad, tensor.is_inference()


# -- flags -------------------------------------------------------------------------------------------------------------


def flag_departures(
    graph: Graph, recorded: Tensors, given: Tensors, around: OuterModes, fixed: Set[Ref] = frozenset()
) -> Iterator[Departure]:
    """Answers that change with the flags of the given tensors, or with other modes."""
    questions = [guard for guard in graph.asked if guard.kind == "flags"]
    flags = _Flags(graph, recorded, given, around, fixed) if questions or graph.catches else None
    for guard in questions:
        if flags is not None and (departure := flags.departure(guard)) is not None:
            yield departure
    if flags is not None and graph.catches:
        yield from flags.caught()


class _Flags:
    """Which values need gradients, with the given tensors in the place of the recorded ones."""

    def __init__(
        self, graph: Graph, recorded: Tensors, given: Tensors, around: OuterModes, fixed: Set[Ref] = frozenset()
    ) -> None:
        self.graph, self.recorded, self.given, self.fixed = graph, recorded, given, fixed
        self.around = around
        self.before: dict[Ref, bool] = {}  # which did, when they were recorded
        self.found: dict[Ref, bool] = {}
        self._follow()

    def departure(self, guard: Guard) -> Departure | None:
        """Another answer to one question."""
        ref, word = guard.refs[0], guard.target.short
        if op_info(word).has(Quirk.OBJECT) and not isinstance(self.graph[ref.node], Input):
            return None
        if ref in self.given:
            return self._other_gradient(guard, ref) or changed_answer(guard, flag_answer(guard, self.given[ref]))
        if not isinstance(self.graph[ref.node], Call):
            return None
        if word == "is_inference":
            return self._inference(guard, ref)
        was, now = self.before.get(ref), self.found.get(ref)
        if now is None or was is None or was == now:
            return None
        if word == "requires_grad":
            return changed_answer(guard, now)
        if word == "is_leaf":
            return changed_answer(guard, not now)
        what = f"`{guard_text(guard).strip('`')}`"
        return Departure(what, guard.result, UNKNOWN_FLAG if now else None, guard.source) if word == "grad_fn" else None

    def caught(self) -> Iterator[Departure]:
        """Calls that torch may refuse for values that need gradients now, where the model may catch that."""
        flagged = {ref for ref, flag in self.found.items() if flag and self.before.get(ref) is False}
        if not flagged or not self.around.grad:
            return
        for guard in filter(exposes_memory, self.graph.guards):
            if not flagged.isdisjoint(guard.refs):
                yield Departure(
                    f"whether {guard_text(guard)} can be had", "True", UNKNOWN_FLAG, guard.source, "exception"
                )
        for ref in self.graph.written.intersection(flagged, self.given):
            if self.given[ref].is_leaf:
                yield Departure(f"whether {ref}, which the model writes, needs gradients", "False", "True")
        if not self.graph.outer_modes.grad:
            for ref in self.graph.written:
                node = self.graph[ref.node]
                if isinstance(node, State) and self.before.get(ref):
                    what = f"whether {node.address}, which the model writes and which needs gradients, can be written"
                    yield Departure(what, "True", UNKNOWN_FLAG, None, "exception")
        for call in self.graph.calls:
            if call.target.function is deepcopied and not flagged.isdisjoint(call.refs):
                yield Departure(f"whether {call.refs[0]} can be copied by deepcopy", "True", UNKNOWN_FLAG, call.source)
            is_written = not (self.graph.written & flagged).isdisjoint(call.refs)
            if is_written and op_info(call.target).gives_several_views:
                what = f"whether the parts that {call.name} gives can be written"
                yield Departure(what, "True", UNKNOWN_FLAG, call.source, "exception")
            if isinstance(call, Write) and call.writes_out and not flagged.isdisjoint(call.refs):
                what = f"whether {call.name}, which gives `out=`, is asked for gradients"
                yield Departure(what, "False", "True", call.source)

    def _other_gradient(self, guard: Guard, ref: Ref) -> Departure | None:
        """The model read a gradient of the recorded tensor, which is a constant of the program."""
        new = self.given[ref]
        if guard.target.short != "grad" or guard.result is True or new.grad is None:
            return None
        known = self.recorded.get(ref)
        if known is not None and known.grad is not None and same_content(known.grad, new.grad):
            return None
        return Departure(guard_text(guard), guard.result, "another gradient", guard.source)

    def _inference(self, guard: Guard, ref: Ref) -> Departure | None:
        """A view of an inference tensor is one, so what is made from a given one may be."""
        below = self.graph.ancestors([ref.node])
        for source, tensor in self.given.items():
            known = self.recorded.get(source)
            if source.node in below and known is not None and known.is_inference() != tensor.is_inference():
                return Departure(guard_text(guard), guard.result, UNKNOWN_FLAG, guard.source)
        return None

    def _before(self, node: Call, refs: tuple[Ref, ...], meaning: TensorSpec) -> bool:
        """True if a value that was not kept needed gradients."""
        on = node.context.grad and meaning.is_differentiable and not op_info(node.target).has(Quirk.DETACHING)
        return on and any(self.before.get(one, False) for one in refs)

    def _follow(self) -> None:
        found = self.found
        for node, refs in zip(self.graph.nodes, self.graph.refs, strict=True):
            for ref, meaning in specs_of(node).items():
                if (known := self.recorded.get(ref)) is not None:
                    self.before[ref] = known.requires_grad
                elif isinstance(node, Call):
                    self.before[ref] = self._before(node, refs, meaning)
                if ref in self.given:
                    found[ref] = self.given[ref].requires_grad
                elif ref in self.fixed or not isinstance(node, Call):
                    found[ref] = bool(self.before.get(ref))
                else:
                    found[ref] = self._flag_of_call(node, ref, refs, meaning)

    def _flag_of_call(self, node: Call, ref: Ref, refs: tuple[Ref, ...], meaning: TensorSpec) -> bool:
        same = self.around.grad == self.graph.outer_modes.grad
        on = node.context.grad if same else self.around.grad
        now = on and meaning.is_differentiable and any(self.found.get(one, False) for one in refs)
        before = node.context.grad and any(self.before.get(one) or False for one in refs)
        was = self.before.get(ref)
        if before and was is False:  # a call that gives no history, whatever it reads
            return False
        if was and not before:
            return True  # a leaf that the model makes itself
        return now and not op_info(node.target).has(Quirk.DETACHING)


def flag_answer(guard: Guard, tensor: torch.Tensor) -> Any:
    """The answer of a flag question on this tensor."""
    try:
        is_bare = guard.target.short == "grad" and not (tensor.is_leaf or tensor.retains_grad)  # torch warns of asking
        found: Any = None if is_bare else guard.target.function(tensor)
    except RuntimeError:  # an inference tensor has none of this
        return UNKNOWN_FLAG
    return guard.result if guard.result == NOT_NONE and found is not None else plain_answer(found)


def plain_answer(found: Any) -> Any:
    """What a model reads of autograd, as plain data: of an object its class."""
    return found if type(found) in (bool, int) else found is None or type(found).__name__


def _through_identities(graph: Graph, ref: Ref) -> Ref:
    """The value behind identities: for a model, `nn.Identity` and inactive dropout return the very same object."""
    while isinstance(node := graph[ref.node], Call) and len(node.refs) == 1:
        is_dropout = node.kind.endswith("dropout") and any(arg is False for arg in node.args)
        if node.target.function is not alias and not is_dropout:
            break
        ref = node.refs[0]
    return ref


def _history_departures(graph: Graph, ref: Ref, new: torch.Tensor, of_the_object: bool = False) -> Iterator[Departure]:
    """Other answers to questions about the history of a patched value, or of one whose history leads back to it.
    With `of_the_object` only questions about the very object.
    """
    for guard in graph.asked:
        if guard.kind != "flags" or (of_the_object and not op_info(guard.target).has(Quirk.OBJECT)):
            continue
        if _through_identities(graph, guard.refs[0]) == ref or guard.refs[0] == ref:
            yield from filter(None, (changed_answer(guard, flag_answer(guard, new)),))
        elif guard.target.short == WALK and ref.node in graph.ancestors([guard.refs[0].node]):
            yield Departure(guard_text(guard), guard.result, UNKNOWN_FLAG, guard.source)
