"""The forward of a module made from a program, at the shapes of one capture.

In: a Record, the tensors that the model holds now, and inputs of the recorded shapes. Out: the values of a run that
takes the recorded path, with fresh draws and, if the caller wants them, gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from .._ir.autograd import as_leaf
from .._ir.graph import Graph
from .._ir.node import Call, Node, Ref
from ..errors import NotDifferentiable
from .compile import CompiledGraph, Mode, compile_plan
from .flag_guards import require_same_answers
from .function import require_differentiable
from .guards import exceptions_as_departures, raise_diverged
from .inputs import GivenInputs, new_inputs
from .interpreter import Code
from .layout_guards import depends_on_layout
from .plan import plan
from .record import Record
from .runner import Values, initial_values, run_code

Held = dict[str, torch.Tensor]  # by the name of a node: what the model holds there


class ShapedForward:
    """One recorded forward, and its code."""

    def __init__(self, record: Record, traced: Callable[[bool], Any]) -> None:
        graph = record.graph
        self.record, self.graph = record, graph
        self.traced = {grad: traced(grad) for grad in (True, False)}  # for torch.compile: see traced_forward.py
        self.codes: dict[bool, Code] = {}
        self.sources = tuple([node.name for node in graph.nodes if not isinstance(node, Call)])  # what is no call
        self.asks_state = bool(graph.asked) or depends_on_layout(graph)  # of its layouts or flags, perhaps

    def forget_inputs(self) -> None:
        """Frees the inputs of the capture, where no call asks for more than was noted of them."""
        graph = self.graph
        compares = graph.catches or any(guard.compares_content for guard in graph.guards)
        if not self.asks_state and not compares:
            given = {Ref(node.name) for node in graph.input_nodes}
            self.record = evolve(self.record, values={r: v for r, v in self.record.values.items() if r not in given})

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], held: Held) -> GivenInputs:
        """What these inputs stand for here, and where they differ from the recorded ones."""
        return new_inputs(self.graph, args, kwargs, held)

    def run(self, held: Held, fitting: dict[int, torch.Tensor]) -> Values:
        """The values for inputs that fit."""
        graph, fixed = self.graph, self.record.value
        given = {graph.nodes[position].name: tensor for position, tensor in fitting.items()}
        known = {**held, **given}
        asked = known if self.asks_state else given
        require_same_answers(graph, self.record.values, {Ref(name): tensor for name, tensor in asked.items()})
        sources = {name: known[name] if name in known else as_leaf(fixed(Ref(name))) for name in self.sources}
        grad = torch.is_grad_enabled()
        if grad and any(tensor.requires_grad for tensor in sources.values()):
            require_trainable(graph)
        with exceptions_as_departures(graph, lambda: sources, raise_diverged):
            return run_code(graph, initial_values(self._code(grad), lambda ref: sources[ref.node], raise_diverged))

    def _code(self, grad: bool) -> Code:
        if grad not in self.codes:
            self.codes[grad] = code_of(self.record, grad)
        return self.codes[grad]


def code_of(record: Record, grad: bool, is_traced: bool = False) -> Code:
    """The whole program as code that draws anew. Traced code draws where it stands, as torch does."""
    graph = record.graph if grad else _without_gradients(record.graph)
    wanted = [graph.positions[ref.node] for ref in graph.wanted_refs]
    sources = [p for p, mark in enumerate(graph.call_marks) if not mark]
    drawn = [graph.positions[call.name] for call in graph.calls if call.draws is not None]
    changed, last = (*sources, *drawn), graph.last_draw
    made = plan(graph, wanted, frozenset(sources), changed, keep=wanted, turns=graph.turns, last=last)
    mode = Mode(grad, fresh=True, left=None if is_traced else graph.left)
    return compile_plan(CompiledGraph(graph, is_traced), made, record.draws, record.value, mode)


def require_trainable(graph: Graph) -> None:
    """Raises for gradients that would not be those of the model."""
    require_differentiable(graph)
    _require_written_once(graph)
    _require_left_alone(graph)


def _without_gradients(graph: Graph) -> Graph:
    """The graph with gradients off in every call, for callers that want none."""

    def quiet(node: Node) -> Node:
        if not isinstance(node, Call):
            return node
        inference = node.context.inference and not graph.outer_modes.inference
        return evolve(node, context=evolve(node.context, grad=False, inference=inference))

    return evolve(graph, nodes=tuple(map(quiet, graph.nodes)))


def _require_written_once(graph: Graph) -> None:
    """Raises for gradients through a model whose backward writes again what its checkpoints wrote."""
    written = {address for address, _ in graph.changes}
    if again := [address for address in graph.recomputed_writes if address in written]:
        raise NotDifferentiable(
            f"the model writes {' and '.join(again)} in a checkpoint (torch.utils.checkpoint), and once more when its "
            "backward computes the checkpoint again. A program computes nothing again, so that they would end "
            "otherwise.\nTurn checkpoints off and capture the model again, or train the model itself; without "
            "gradients (torch.no_grad()) the module can be called."
        )


def _require_left_alone(graph: Graph) -> None:
    """Raises for gradients through a forward that itself leaves gradients in the model's parameters."""
    if graph.collects:
        raise NotDifferentiable(
            "the forward calls `.backward()`, which adds gradients to those of the model's parameters. A program adds "
            "none: training by it would be another.\nTake them by torch.autograd.grad, or name the tensors that "
            "are to have them (`inputs=[...]`); without gradients (torch.no_grad()) the module can be called."
        )
