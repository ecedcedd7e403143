"""A program as a pure function `f(*tensors)`, for `torch.func.grad`, `vmap`, `jvp`, `jacrev` and `torch.compile`.

In: a record, and which nodes the arguments and results stand for. Out: a function without effects: it reads no mode
but those that the model itself enters, writes nothing, and draws as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._ir.autograd import as_leaf
from .._ir.equality import same_content
from .._ir.graph import Graph
from .._ir.node import Call, Ref, filled, refs_of, value_of
from .._ir.torch_private import peek_interpreter_stack
from ..errors import InputMismatch, NotDifferentiable, ReplaylensError
from .compile import CompiledGraph, Mode, compile_plan
from .flag_guards import require_same_answers
from .guards import Departure, aliasing_hazards, diverged_error, exceptions_as_departures, raise_diverged
from .inputs import require_arguments
from .interpreter import interpret, recorded_environment
from .plan import plan
from .record import Record, Steady
from .runner import initial_values


def function_of(record: Record, inputs: list[int], outputs: list[int] | None, grad: bool = True) -> Callable[..., Any]:
    """The pure function from some nodes' values to the output, or to some nodes' values."""
    graph = record.graph
    require_differentiable(graph)
    for call in graph.flag_readers if grad and not graph.outer_modes.grad else ():
        raise NotDifferentiable(
            f"{call.name} asks whether gradients are needed, and the program was captured without: as a function of "
            "torch.func it would be told otherwise. Capture it with gradients on."
        )
    names = [graph.nodes[position].name for position in inputs]
    pure = _pure(record, inputs, outputs, grad)

    def function(*tensors: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
            return pure(*tensors)
        with exceptions_as_departures(graph, lambda: names, raise_diverged):
            return pure(*tensors)

    return function


def require_differentiable(graph: Graph) -> None:
    """Raises if gradients cannot be replayed: of a custom function only the forward is known."""
    words = sorted(set(graph.forward_only))
    if told := [word for word in words if ": " in word]:
        what, _, why = told[0].partition(": ")
        raise NotDifferentiable(f"gradients through {what} cannot be replayed: {why}")
    if words:
        raise NotDifferentiable(
            f"gradients through {', '.join(words)} cannot be replayed: only the forward of this custom function "
            "could be recorded, because it "
            "reads tensors that are not its arguments, or the model was captured without gradients "
            "and has no_grad blocks of its own."
        )


def _pure(record: Record, inputs: list[int], outputs: list[int] | None, grad: bool) -> Callable[..., Any]:
    """The function itself. Its tensors go into the slots of the inputs; all other values already stand in theirs."""
    graph = record.graph
    wanted = outputs if outputs is not None else [graph.positions[ref.node] for ref in graph.output_refs]
    known = bytearray(record.held)
    for position in inputs:
        known[position] = True
    made = plan(graph, wanted, known, inputs)
    places: dict[int, tuple[Any, ...]] = dict.fromkeys(inputs, ())
    code = compile_plan(CompiledGraph(graph, is_traced=True), made, record.draws, record.value, Mode(grad), places)
    slots = [code.slots[_only_ref(graph, position)] for position in inputs]

    def held(ref: Ref) -> torch.Tensor | None:
        if graph.positions[ref.node] in inputs:
            return None
        return record.value(ref) if ref.node in record.live else as_leaf(record.value(ref))

    beginning = initial_values(code, held, raise_diverged).env
    trees = [graph.output] if outputs is None else [value_of(graph.nodes[position]) for position in outputs]
    read = [_reader(tree, code.slots) for tree in trees]
    check_arguments = _argument_check(record, made.supply, inputs)

    def pure(*tensors: torch.Tensor) -> Any:
        if len(tensors) != len(inputs):
            raise InputMismatch(f"the function takes {len(inputs)} tensors, and was given {len(tensors)}.")
        if not torch.compiler.is_compiling():
            check_arguments(tensors)
        env = list(beginning)
        for slot, tensor in zip(slots, tensors, strict=True):
            env[slot] = tensor
        with recorded_environment(code.draws, graph):
            interpret(code, env)
        return read[0](env) if len(read) == 1 else tuple([one(env) for one in read])

    return pure


def _reader(tree: Any, slots: dict[Ref, int]) -> Callable[[list[Any]], Any]:
    """Reads a tree of Refs from the env; plain trees in a way that torch.compile can trace."""
    if type(tree) is Ref:
        slot = slots[tree]
        return lambda env: env[slot]
    if type(tree) is tuple and all(type(item) is Ref for item in tree):
        several = [slots[item] for item in tree]
        return lambda env: tuple([env[slot] for slot in several])
    return lambda env: filled(tree, lambda ref: env[slots[ref]])


def _argument_check(
    record: Record, supply: tuple[int, ...], inputs: list[int]
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Raises if a value that a function holds was overwritten, or an argument does not fit."""
    refs = [ref for position in supply if position not in inputs for ref in refs_of(record.graph.nodes[position])]
    steady = Steady(record, refs)
    names = [record.graph.nodes[position].name for position in inputs]
    hazards = _hazardous_arguments(record.graph, inputs)

    def check_arguments(arguments: Sequence[torch.Tensor]) -> None:
        require_arguments(record.graph, names, arguments, record.live)
        given = {Ref(name): tensor for name, tensor in zip(names, arguments, strict=True)}
        for number, (ref, departure) in hazards.items():
            if peek_interpreter_stack() is not None or not same_content(record.value(ref), arguments[number]):
                raise diverged_error(departure)
        require_same_answers(record.graph, record.values, given)
        if not steady:
            steady.require(record)

    return check_arguments


def _hazardous_arguments(graph: Graph, inputs: list[int]) -> dict[int, tuple[Ref, Departure]]:
    """The arguments of a function, by number, for which any value but the recorded one leaves the recorded path."""
    found: dict[int, tuple[Ref, Departure]] = {}
    for number, position in enumerate(inputs):
        node = graph.nodes[position]
        for departure in aliasing_hazards(node, graph.is_recomputed(node.name)) if isinstance(node, Call) else ():
            found[number] = _only_ref(graph, position), departure
    return found


def _only_ref(graph: Graph, position: int) -> Ref:
    tree = value_of(graph.nodes[position])
    if type(tree) is not Ref:
        raise ReplaylensError(
            f"{graph.nodes[position].name} gives several tensors; a function's input must be one tensor."
        )
    return tree
