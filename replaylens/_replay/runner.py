"""The runner: compiles a plan, supplies its values and interprets it. All runs of part of a program go through it.

In: a Graph, a Plan of it, and the values that it begins with. Out: Values. Callers that repeat a run keep the Code,
and call `begin` and `run_code` themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import frozen

from .._ir.graph import Graph
from .._ir.node import Ref, filled, refs_in
from .compile import AS_RECORDED, CompiledGraph, Mode, compile_plan
from .guards import Departure
from .interpreter import Code, Env, interpret, recorded_environment
from .plan import Plan

Patches = Mapping[int, tuple[tuple[Any, Callable[..., Any]], ...]]  # position -> (which of its values, new from old)
Supply = Callable[[Ref], Any]
Departed = Callable[[Departure], None]  # called with each departure


@frozen(eq=False)
class Values:
    """The env of some code, read by Ref: as far as it ran, and without values that were freed."""

    code: Code
    env: Env

    def __getitem__(self, ref: Ref) -> Any:
        return self.env[self.code.slots[ref]]

    def tree(self, tree: Any) -> Any:
        """A tree with the values in place of its Refs."""
        return filled(tree, self.__getitem__)

    def listed(self, tree: Any) -> list[Any]:
        """The values of the Refs in a tree."""
        return [self[ref] for ref in refs_in(tree)]

    def tensors(self, refs: Iterable[Ref]) -> dict[Ref, torch.Tensor]:
        """The values at these Refs that are tensors."""
        return {ref: value for ref in refs if isinstance(value := self[ref], torch.Tensor)}

    @property
    def states_begun(self) -> dict[str, torch.Tensor]:
        """The generator states of draws that may begin elsewhere than recorded, by key."""
        return {key: self.env[slot] for key, slot in self.code.begun if self.env[slot] is not None}


def run(
    compiled: CompiledGraph,
    plan: Plan,
    states: Mapping[str, torch.Tensor],
    supply: Supply,
    recorded: Supply,
    departed: Departed | None = None,
    mode: Mode = AS_RECORDED,
    patches: Patches = MappingProxyType({}),
) -> Values:
    """Runs a plan. `supply` gives the values that it begins with, `recorded` those that guards compare with."""
    patched = {position: tuple([tree for tree, _ in each]) for position, each in patches.items()}
    code = compile_plan(compiled, plan, states, recorded, mode, patched)
    return run_code(compiled.graph, initial_values(code, supply, departed, patches))


def initial_values(
    code: Code, supply: Supply, departed: Departed | None = None, patches: Patches = MappingProxyType({})
) -> Values:
    """The initial env."""
    env = list(code.template)
    for ref, slot in code.supply:
        env[slot] = supply(ref)
    for position, number, slot in code.patches if patches else ():
        env[slot] = patches[position][number][1]
    env[code.departed] = departed
    return Values(code, env)


def run_code(graph: Graph, values: Values) -> Values:
    """Runs the steps in the recorded world."""
    with recorded_environment(values.code.draws, graph):
        interpret(values.code, values.env)
    return values
