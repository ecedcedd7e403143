"""A gradient taken inside a forward, as one pure call.

In: the stretch of the program between what is differentiated and by what, as a Graph, and the values that it reads.
Out: the gradients. The stretch runs again to give them, so they depend on nothing but the operands, and can be
differentiated again, vmapped and patched like any other value.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen

from .._ir.graph import Graph
from .._ir.node import Ref, refs_in
from .._ir.torch_private import peek_interpreter_stack
from .._ir.trees import map_leaves
from .compile import CompiledGraph
from .plan import plan
from .rng_stream import checked_state
from .runner import Patches, Values, run

Tensors = tuple[torch.Tensor, ...]


def differentiate(
    graph: Graph,
    starts: Tensors,
    others: Tensors,
    cotangents: tuple[Any, ...],
    states: dict[str, torch.Tensor],
    keep_graph: bool,
    there: tuple[Tensors, Tensors] | tuple[()] = (),
    patches: Patches = MappingProxyType({}),
    is_alive: bool = False,
    reached: tuple[bool, ...] = (),
) -> tuple[Any, ...]:
    """The gradients of the graph's first output group with respect to its second.

    The graph's inputs are the starts, then the others. Its output is (outputs, with respect to what). Patches at nodes
    of the stretch, by their number among its calls, take part: gradients go through them.

    Of a gradient that is differentiated again, `there` is that output as the program itself computed it, and
    `is_alive` says that the whole stretch has just run with gradients. Then these values are differentiated, as the
    model does, so that other readers of the stretch add their gradients before they go further back. Rerun, the
    stretch gets its own gradients, whose sum is the same but for the last bits.

    `reached` says which gradients existed when recorded: where that differs now, the model would raise, or get None
    instead of a tensor, which it may branch on.
    """
    states = {key: checked_state(state) for key, state in states.items()}
    stretch = _Stretch(graph, starts, others, cotangents, states, patches)
    if is_alive and there and not patches and _has_live_history(*there):
        found = torch.autograd.grad(*there, list(cotangents), create_graph=True, allow_unused=True)
    elif peek_interpreter_stack() is None:
        found = stretch.gradients(keep_graph)
    else:
        found = stretch.by_transform()
    if peek_interpreter_stack() is not None:
        return found  # transforms give zeros for None
    for number, (was, now) in enumerate(zip(reached, found, strict=False)):
        if was is not (now is not None):
            raise RuntimeError(
                f"The differentiated Tensor at index {number} appears to not have been used in the graph."
                if was
                else f"The differentiated Tensor at index {number} is used in the graph, and was not when recorded."
            )
    return found


def _has_live_history(outputs: Tensors, targets: Tensors) -> bool:
    """True if gradients can go back through the values that were just computed."""
    if peek_interpreter_stack() is not None or torch.compiler.is_compiling():
        return False
    return all(value.requires_grad for value in (*outputs, *targets))


@frozen(eq=False)
class _Stretch:
    """A stretch of the program that runs again, with its operands and cotangents."""

    graph: Graph
    starts: Tensors
    others: Tensors
    cotangents: tuple[Any, ...]
    states: dict[str, torch.Tensor]
    patches: Patches

    def gradients(self, keep_graph: bool) -> tuple[Any, ...]:
        with torch.enable_grad():
            leaves = [s if s.requires_grad and keep_graph else s.detach().requires_grad_() for s in self.starts]
            ran = self.run(tuple(leaves))
            outputs, targets = (ran.listed(tree) for tree in self.graph.output)
            cotangents = list(self.cotangents)
            return torch.autograd.grad(outputs, targets, cotangents, create_graph=keep_graph, allow_unused=True)

    def by_transform(self) -> Any:
        """The same under `torch.func` transforms, which reject `torch.autograd.grad`."""
        graph, starts = self.graph, self.starts
        targets = refs_in(graph.output[1])
        if any(graph.positions[ref.node] >= len(starts) for ref in targets):
            raise NotImplementedError(
                "a gradient with respect to a value inside the differentiated stretch, under torch.func"
            )
        outputs, pull = torch.func.vjp(  # type: ignore[misc]
            lambda *leaves: tuple(self.run(leaves).listed(graph.output[0])), *starts
        )
        cotangents = zip(outputs, self.cotangents, strict=True)
        return pull(tuple([torch.ones_like(output) if slope is None else slope for output, slope in cotangents]))

    def run(self, starts: Tensors) -> Values:
        graph, given = self.graph, (*starts, *self.others)
        wanted = [graph.positions[ref.node] for ref in graph.output_refs]
        patches = {
            len(given) + number: _renamed(graph, len(given) + number, each) for number, each in self.patches.items()
        }
        made = plan(graph, wanted, frozenset(range(len(given))), tuple(patches), keep=wanted)
        supply = lambda ref: given[graph.positions[ref.node]]  # noqa: E731
        return run(CompiledGraph(graph), made, self.states, supply, lambda ref: starts[0], patches=patches)


def _renamed(graph: Graph, position: int, patch: Any) -> Any:
    """The patch for the node of the stretch that stands for a node of the program."""
    name = graph.nodes[position].name
    return tuple(
        [
            (map_leaves(tree, lambda leaf: evolve(leaf, node=name) if type(leaf) is Ref else leaf), fn)
            for tree, fn in patch
        ]
    )
