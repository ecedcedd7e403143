"""A Graph as a pure function `f(*tensors)`, for `torch.func.grad`, `vmap`, `jvp`, `jacrev` and `torch.compile`.

In: a compiled plan, and which nodes the arguments stand for. Out: a function without effects: it reads no mode but
those that the model itself entered, writes nothing, and draws as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core.graph import Graph
from ..errors import InputMismatch
from .interpreter import Code, interpret, recorded_world


def as_function(
    code: Code,
    supplied: dict[int, torch.Tensor],
    inputs: Sequence[int],
    finish: Callable[[list[Any]], Any],
    graph: Graph,
    watch: Callable[[Sequence[torch.Tensor]], None],
) -> Callable[..., Any]:
    """`f(*tensors)`: the tensors go into the slots `inputs`, what is supplied into its own, and `finish` reads
    the env.
    """
    beginning = list(code.template)
    for slot, value in supplied.items():
        beginning[slot] = value

    def function(*tensors: torch.Tensor) -> Any:
        if len(tensors) != len(inputs):
            raise InputMismatch(f"the function takes {len(inputs)} tensors, and was given {len(tensors)}.")
        if not torch.compiler.is_compiling():
            watch(tensors)
        env = list(beginning)
        for slot, tensor in zip(inputs, tensors, strict=True):
            env[slot] = tensor
        with recorded_world(code.draws, graph):
            return finish(interpret(code, env))

    return function
