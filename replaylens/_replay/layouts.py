"""What becomes of another memory layout on its way through a program.

In: a graph, its recorded values, and others that are laid out otherwise. Out: a Departure for each question about
layout that has another answer, each call that cannot be made of such memory where the model may catch that, and each
one that gives a view of what the model writes where it gave a copy, or the other way round. Only the calls behind such
values are made, for as far as what they give lies otherwise than it did, and only if there is something to find.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from .._core.graph import Graph
from .._core.node import ITSELF, Call, Generator, Guard, Ref, meanings_of
from .._core.pure import mutate
from .._core.target import Target
from .._core.trees import leaves, thaw
from .._core.world import drawing_alone
from ..errors import ReplaylensError
from .guards import Departure, changed, fact

Tensors = Mapping[Ref, torch.Tensor]
UNKNOWN = "not known on this memory layout"


def geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """How a tensor lies in its memory."""
    return tensor.stride(), int(tensor.storage_offset())


def asked_of(guard: Guard, tensor: torch.Tensor) -> Iterator[Departure]:
    """Another answer of one tensor."""
    answer = _answer(guard, tensor)
    if guard.result != ITSELF:
        yield from filter(None, (changed(guard, answer),))
    elif answer is not tensor:
        yield Departure(fact(guard), ITSELF, "a copy", guard.source)


def _answer(guard: Guard, tensor: torch.Tensor) -> Any:
    leaf = lambda value: tensor if type(value) is Ref else value  # noqa: E731
    return guard.target.function(
        *[thaw(arg, leaf) for arg in guard.args], **{key: thaw(arg, leaf) for key, arg in guard.kwargs}
    )


class Layouts:
    """One walk over a graph, with some values that lie otherwise."""

    def __init__(self, graph: Graph, recorded: Tensors, other: Tensors) -> None:
        self.graph, self.recorded = graph, recorded
        self.meanings = {ref: meaning for node in graph.nodes for ref, meaning in meanings_of(node).items()}
        self.other = {ref: tensor.detach() for ref, tensor in other.items()}
        self.blank: dict[Ref, torch.Tensor] = {}  # in the place of recorded values that were not kept
        self.unknown: set[Ref] = set()  # nobody can say how they lie now
        self.ever = set(self.other)

    def departures(self) -> list[Departure]:
        """Every other answer, in the order of the program."""
        caught = [guard for guard in self.graph.guards if guard.kind == "exception"]
        asked = [guard for guard in self.graph.asked if guard.kind == "layout"]
        questions = sorted((*asked, *caught), key=lambda guard: guard.position)
        if not questions and not self._matters():
            return []
        with drawing_alone():
            state = torch.default_generator.get_state()
            try:
                with torch.no_grad(), torch.inference_mode(False):
                    return list(self._walk(questions))
            finally:
                torch.default_generator.set_state(state)

    def _matters(self) -> bool:
        """Without a question: can another layout make any difference to numbers?"""
        graph = self.graph
        return bool(graph.written) or graph.asks_identity or graph.catches or any(map(_goes_by_memory, graph.calls))

    def _walk(self, questions: list[Guard]) -> Iterator[Departure]:
        for position, node in enumerate(self.graph.nodes):
            while questions and questions[0].position <= position:
                yield from self._ask(questions.pop(0))
            if not self.other and not self.unknown:
                return
            if isinstance(node, Call) and any(ref in self.other or ref in self.unknown for ref in node.refs):
                yield from self._follow(node)
        for guard in questions:
            yield from self._ask(guard)

    # -- questions -----------------------------------------------------------------------------------------------------

    def _ask(self, guard: Guard) -> Iterator[Departure]:
        if guard.kind == "exception":
            yield from self._ask_exception(guard)
            return
        ref = guard.refs[0]
        if ref in self.unknown:
            yield Departure(fact(guard), guard.result, UNKNOWN, guard.source)
        elif ref in self.other:
            if guard.result == ITSELF:
                yield from self._ask_itself(guard, ref, _answer(guard, self.other[ref]))
            else:
                yield from asked_of(guard, self.other[ref])

    def _ask_exception(self, guard: Guard) -> Iterator[Departure]:
        """A call that raised, which the model caught: does it raise on this memory?"""
        if not any(ref in self.other or ref in self.unknown for ref in guard.refs):
            return
        leaf = lambda tree: self._value(tree) if type(tree) is Ref else tree  # noqa: E731
        now = None
        try:
            guard.target.function(
                *[thaw(arg, leaf) for arg in guard.args], **{key: thaw(arg, leaf) for key, arg in guard.kwargs}
            )
        except Exception as error:
            now = type(error).__qualname__
        yield from filter(None, (changed(guard, now),))

    def _ask_itself(self, guard: Guard, ref: Ref, answer: torch.Tensor) -> Iterator[Departure]:
        """`contiguous` of what was contiguous is no call of the program. What goes on from here is its copy now."""
        if answer is self.other[ref]:
            return
        if self.graph.asks_identity or self._is_written(ref):
            yield Departure(fact(guard), ITSELF, "a copy", guard.source)
        self._settle(ref, answer)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _follow(self, node: Call) -> Iterator[Departure]:
        """How what a call gives lies now."""
        gives = [ref for ref in leaves(node.returns) if type(ref) is Ref]
        if any(ref in self.unknown for ref in node.refs) or not _can_run(node):
            self.unknown.update(gives)
            return
        if _goes_by_memory(node) and self._is_looked_at(node):
            yield Departure(f"the memory that {node.name} looks at", "laid out in one way", "in another", node.source)
        try:
            made = self._made(node)
        except (RuntimeError, ReplaylensError) as error:
            # The model raises what torch raises; where nothing catches it, the recorded layout is a kindness.
            if self.graph.catches or isinstance(error, ReplaylensError):
                yield Departure(f"whether {node.name} can be made of this memory", "True", "False", node.source)
            return
        for ref in gives:
            new = _part(made, ref.path)
            if isinstance(new, torch.Tensor) and new.layout is torch.strided and self.meanings[ref].strides is not None:
                yield from self._other_views(node, ref, new)
                self._settle(ref, new)

    def _is_looked_at(self, node: Call) -> bool:
        """Does a call that goes by memory go by memory that lies otherwise? A write's views are made of its bases; what
        a patch gives in the place of such a view is a tensor of its own.
        """
        if node.target.function is not mutate or "as_strided" in node.args[0].name:
            return True
        return any(type(leaf) is Ref and leaf in self.other for leaf in leaves(node.args[1]))

    def _other_views(self, node: Call, ref: Ref, new: torch.Tensor) -> Iterator[Departure]:
        """Is it a view where it was a copy, or the other way round, and does the model write what it looks at?"""
        before = self.recorded.get(ref)
        for source in node.refs:
            was_source = self.recorded.get(source)
            if source not in self.other or before is None or was_source is None:
                continue
            was, now = _shares(before, was_source), _shares(new, self.other[source])
            if was != now and (self.graph.asks_identity or self._is_written(source) or self._is_written(ref)):
                words = {True: "a view of it", False: "a copy"}
                yield Departure(f"what {node.name} gives of {source}", words[was], words[now], node.source)

    def _made(self, node: Call) -> Any:
        leaf = lambda tree: self._value(tree) if type(tree) is Ref else tree  # noqa: E731
        args = [thaw(arg, leaf) for arg in node.args]
        return node.target.function(*args, **{key: thaw(arg, leaf) for key, arg in node.kwargs})

    def _value(self, ref: Ref) -> torch.Tensor:
        found = self.other.get(ref, self.recorded.get(ref))
        if found is not None:
            return found.detach()
        if ref not in self.blank:
            meaning = self.meanings[ref]
            made = torch.empty_strided(meaning.shape, meaning.strides or (), dtype=meaning.dtype, device=meaning.device)
            self.blank[ref] = made.zero_()
        return self.blank[ref]

    def _settle(self, ref: Ref, tensor: torch.Tensor) -> None:
        """From here on a value lies like this; which is of no interest where it did before."""
        known = self.recorded.get(ref)
        same = (
            geometry(known) == geometry(tensor) if known is not None else tensor.stride() == self.meanings[ref].strides
        )
        if same:
            self.other.pop(ref, None)
        else:
            self.other[ref] = tensor
            self.ever.add(ref)

    def _is_written(self, ref: Ref) -> bool:
        """Does the model write the memory of a value, or of one that lies otherwise and that it may be a view of?"""
        written = self.graph.written
        return ref in written or bool(written & self.ever & {Ref(name) for name in self.graph.ancestors([ref.node])})


def _goes_by_memory(node: Call) -> bool:
    """Does it look at memory by numbers of its own?"""
    if "as_strided" in node.target.name:
        return True
    if node.target.function is not mutate:
        return False
    trees = (node.args, tuple(value for _, value in node.kwargs))
    return any(type(leaf) is Target and "as_strided" in leaf.name for leaf in leaves(trees))


def _can_run(node: Call) -> bool:
    """Is it a function of torch's or ours, without effects? A user's own is not called for this."""
    function: Any = node.target.function
    while isinstance(function, partial):
        function = function.func
    if _draws_by_hand(node):
        return False
    module = getattr(function, "__module__", None) or type(function).__module__
    home = module.partition(".")[0]
    return home in ("torch", "builtins", "_operator") or function is mutate


def _draws_by_hand(node: Call) -> bool:
    trees = (node.args, tuple(value for _, value in node.kwargs))
    return any(type(leaf) is Generator for leaf in leaves(trees))


def _part(value: Any, path: tuple[int, ...]) -> Any:
    for index in path:
        value = value[index]
    return value


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.layout is torch.strided and one.untyped_storage()._cdata == other.untyped_storage()._cdata
