"""Which values a replay begins with; and Run, the values of one replay.

In: a record, and a Request. Out: which nodes have a usable value, and that value as the request needs it: with which
history, flag and storage. A Run reads the env that the interpreter left: the output in the model's own structure, and
any value by name. Values that were not kept are computed on demand: see deferred.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from .._ir.autograd import as_leaf, fresh_leaf, with_history_of
from .._ir.graph import Graph
from .._ir.memory import have_same_address
from .._ir.node import Call, Ref, State
from .._ir.torch_private import peek_interpreter_stack
from .._ir.value_source import ValueSource
from ..errors import NotSaved, StaleValue
from .guards import Departure, ValueOf
from .interpreter import Code, Env
from .record import Record, Steady, stale_text
from .request import Request
from .runner import initial_values


def supply(record: Record, request: Request, ref: Ref, value: ValueOf | None = None) -> Any:
    """The value that a replay begins with. The first row that applies decides:

        the request                       | the value                     | gives
        ----------------------------------|-------------------------------|--------------------------------------------
        at=..., this value among them     | given, else recorded          | a fresh leaf, where gradients end
        at=...                            | given, else recorded          | without history (inference tensors: a copy)
        given, grad                       | given                         | as it is: gradients may go on behind it
        given                             | given, an inference tensor    | as it is
        given, under a transform          | given                         | without history: flags are forbidden there
        given                             | given                         | a leaf with the recorded `requires_grad`
        grad, the model holds it          | live, in the recorded memory  | the model's own tensor, which collects grads
        grad, the model holds it          | live, moved, never written    | StaleValue
        grad, the model holds it          | live, has a history           | the recorded value
        grad, the model holds it          | live, written by the forward  | the recorded content, standing for live
        grad                              | recorded, an inference tensor | a copy, which can have gradients
        grad                              | recorded                      | itself if it is a leaf, else a new leaf
        no grad, the model holds it       | recorded                      | as it is
        no grad                           | recorded                      | a leaf, without the model's history

    Reading a recorded value, by `value`, raises StaleValue if it was overwritten since.
    """
    given, value = request.given.get(record.graph.positions[ref.node]), value or record.value
    if request.at:
        return _grad_start(value(ref) if given is None else given, ref in request.at)
    if given is not None:
        return given if request.grad else _with_recorded_flag(given, record.values[ref])
    if request.grad:
        live = record.live.get(ref.node)
        return _own_leaf(value(ref)) if live is None else _live(record, ref, live, value(ref))
    return value(ref) if ref.node in record.live else as_leaf(value(ref))


def _grad_start(value: torch.Tensor, is_asked: bool) -> torch.Tensor:
    """A fresh leaf where gradients are asked for, and a value without history elsewhere."""
    if is_asked:
        return fresh_leaf(value)
    return value.clone() if value.is_inference() else value.detach()


def _own_leaf(value: torch.Tensor) -> torch.Tensor:
    """The recorded value as a leaf that can have gradients."""
    if value.is_inference():
        return value.clone()
    return value if value.is_leaf else as_leaf(value)


def _live(record: Record, ref: Ref, live: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """The model's own tensor, which collects the gradients; where the forward wrote it, a stand-in with its recorded
    content.
    """
    node = record.graph[ref.node]
    if have_same_address(live, recorded):
        return live
    if isinstance(node, State) and node.name not in record.graph.written_state:
        raise StaleValue(stale_text(record.graph, ref))
    if live.grad_fn is not None:  # a buffer with the history of what was written into it since
        return recorded
    return with_history_of(live, recorded)


def _with_recorded_flag(given: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """A given value without a history, with the flag of the recorded one."""
    if given.is_inference():
        return given
    hidden = peek_interpreter_stack() is not None  # a transform forbids the flag
    return given.detach() if hidden else given.detach().requires_grad_(recorded.requires_grad)


class InitialEnv:
    """The env that the replays of one kind begin with. What all of them share is prepared once."""

    def __init__(self, code: Code, request: Request) -> None:
        self.code = code
        self.varying: list[tuple[Ref, int]] = []  # given ones, and what is a leaf of its own in each replay
        self.is_live = request.grad and not request.at  # the model's own parameters collect the gradients
        self.is_repeated = False
        self.kept: tuple[Steady, Env] | None = None

    def begin(self, record: Record, request: Request) -> Env:
        """The initial env. Which nodes are given is the same for all replays of a kind."""
        if self.kept is None:
            value = record.reading(len(self.code.supply))
            env = initial_values(self.code, partial(supply, record, request, value=value)).env
            if self.is_repeated:
                self._keep(record, request, env)
            self.is_repeated = True
            return env
        steady, kept = self.kept
        if not steady:
            if self.is_live:
                return initial_values(self.code, partial(supply, record, request)).env
            steady.require(record)
        env = kept.copy()
        for ref, slot in self.varying:
            env[slot] = supply(record, request, ref)
        return env

    def _keep(self, record: Record, request: Request, env: Env) -> None:
        """Keeps of the second env what is the same in all: a study may come to each place once."""
        positions = record.graph.positions
        fixed = [(ref, slot) for ref, slot in self.code.supply if positions[ref.node] not in request.given]
        same = {ref for ref, slot in fixed if self._is_shared(record, ref, env[slot])}
        self.varying, kept = [(ref, slot) for ref, slot in self.code.supply if ref not in same], env.copy()
        for _, slot in self.varying:
            kept[slot] = None
        self.kept = Steady(record, same), kept

    def _is_shared(self, record: Record, ref: Ref, value: torch.Tensor) -> bool:
        """True if each replay begins with this very object: with gradients only the model's own, where it still
        holds them.
        """
        if not self.is_live:
            return True
        return value is record.live.get(ref.node) and record.place_of(ref) is not None


def known_marks(record: Record, request: Request) -> bytearray:
    """Marks of the nodes with usable values. With gradients only sources and the start are: all others need a
    history.
    """
    graph, marks = record.graph, bytearray(record.held)
    if request.grad and not request.at:
        marks = bytearray(graph.source_marks)
        for position in request.start:
            marks[position] = record.held[position]
    for position in graph.drawing if request.fresh else ():
        if is_drawn_anew(graph, request, position):
            marks[position] = 0
    return marks


def is_drawn_anew(graph: Graph, request: Request, position: int) -> bool:
    """True if a fresh replay draws there: not if a seed fixed the draw, nor at the node on whose recorded value it
    begins.
    """
    node = graph.nodes[position]
    return isinstance(node, Call) and bool(node.draws) and not node.is_seeded and position not in request.start


def reached_by_draws(graph: Graph, request: Request) -> bytearray:
    """Marks of the nodes that a fresh replay gives other values than recorded, or would if it ran them. What led to the
    node on whose recorded value it begins is as recorded.
    """
    start = [graph.nodes[position].name for position in request.start]
    before = graph.marked_ancestors(start)
    drawn = [p for p in graph.drawing if is_drawn_anew(graph, request, p) and not before[p]]
    return graph.marked_descendants([graph.nodes[position].name for position in drawn])


@frozen(eq=False)
class Origin:
    """Where a run comes from: the program that was replayed, and the request."""

    program: Any
    request: Any
    resolve: Callable[[Any], Any]  # a user's name -> where that lies in the program


@frozen(eq=False, repr=False)
class Run(ValueSource):
    """The values of one replay. `run.output` is what the model would have returned; `run["relu_3"]` any value on the
    way.
    """

    executed: tuple[str, ...]
    state_changes: dict[str, torch.Tensor | None]
    departures: tuple[Departure, ...]
    _output: Any
    _has_output: bool
    _lookup: Callable[[Any], Any] = field()
    _everything: Callable[[], None] = field(default=lambda: None)  # computes all that was not kept
    program: Any = None  # where the model itself was run: the path that it took, as a Program, patches and all
    origin: Origin | None = None

    @property
    def output(self) -> Any:
        """The output of the replay, in the structure that the model returns."""
        if not self._has_output:
            raise NotSaved(
                "the replay stopped before the output, as `to=` asked. Read the value that it stopped at: run[name]."
            )
        return self._output

    @property
    def diverged(self) -> bool:
        """True if the model would have taken another path. `departures` says where."""
        return bool(self.departures)

    def draw(self, path: Any = None, **options: Any) -> Any:
        """The program's picture, each layer in a colour that says how much it changed against the recorded run: the
        size of the difference over the size of the recorded value. What was patched stands out.

        Options are those of `Program.draw`. Where the model itself was run, the path that it took is drawn as a
        difference to the recorded one.
        """
        assert self.origin is not None
        if self.program is not None:
            return self.program.draw(path, against=self.origin.program, **options)
        return self.origin.program.draw(path, run=self, **options)

    def page(self, path: Any, **options: Any) -> Any:
        """The program's page with this run laid over it, as `run.draw()` lays it over a picture."""
        assert self.origin is not None
        if self.program is not None:
            return self.program.page(path, against=self.origin.program, **options)
        return self.origin.program.page(path, run=self, **options)

    def diff(self) -> Any:
        """How much each layer differs from the recorded run, as a table: `print(run.diff())`, `run.diff()["relu_3"]`,
        `.to_pandas()`, `.plot()`.
        """
        assert self.origin is not None
        return self.origin.program._diff(self)

    def __getitem__(self, name: Any) -> Any:
        return self._lookup(name)

    def hold_all(self) -> Run:
        """Compute now, in one go, every value that the replay did not keep."""
        self._everything()
        return self

    def save(self, path: Any, *, values: Any = None) -> None:
        """Write the run and its program to one file. `replaylens.load(path)` gives a run that answers the same.

        Every value that the run can give is written; what it did not keep is computed now. `values` selects fewer, by
        the words of a capture's `save=`: `"none"` writes the output alone. Functions among the patches are not written:
        the file has what they gave. What was drawn afresh and not kept is left out.
        """
        self._save_to(path, values=values)

    def _value_for(self, name: str) -> Any:
        return self[name]

    def __repr__(self) -> str:
        more = f", diverged at {len(self.departures)} places" if self.departures else ""
        shown = ", ".join(self.executed[:3]) + (", ..." if len(self.executed) > 3 else "")
        return f"<Run: {len(self.executed)} nodes executed ({shown}){more}>"
