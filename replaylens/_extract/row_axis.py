"""Is the first axis of what a layer gives that of the rows, or one that happens to be as long?

In: what the layers gave for the first batch. Out: nothing, or an error. Where a size of the model is the number of rows
(as many tokens, units or positions), a layer could pass for one that has rows: a table of positions, a mean over the
batch, a recurrent layer that has time first. A batch of a few rows tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve

from .._ir.node import Call as NodeCall, Input
from ..errors import BadSource
from .layer_values import LayerValues, Route
from .model_inputs import Call

FEW = 2


def require_row_axis(values: LayerValues, call: Call, first: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if the first axis of a layer stays as long as it is where there are fewer rows."""
    if call.rows == 1 or not _has_other_size(values.route(call), call.rows):
        return
    few = FEW if call.rows > FEW else 1
    asked_anew = LayerValues(values.wish, make=values.make, seeds=values.seeds, origins=values.origins)
    try:
        found, _ = asked_anew(_few_rows(call, few), first)
    except Exception:  # the model, or what is asked of it, takes no other number of rows: nothing is known
        return
    for name, tensor in found.items():
        if name in tensors and (not tensor.dim() or len(tensor) != few):
            whole, part = tuple(tensors[name].shape), tuple(tensor.shape)
            raise BadSource(
                f"{name} gives {whole} for a batch of {call.rows} rows, and {part} for {few} of them: its first axis "
                f"is not that of the rows. Make it so, reduce={{{name!r}: lambda value: value.transpose(0, 1)}}, or "
                "leave the layer out."
            )


def _has_other_size(route: Route, rows: int) -> bool:
    """True if a size that is not the number of rows is as large, as far as the program tells."""
    for node in (route.cut or route.whole).graph.nodes:
        if isinstance(node, NodeCall):
            sizes = [spec.shape[1:] if node.refs else spec.shape for spec in node.spec]
        else:
            sizes = [node.spec.shape[1:] if isinstance(node, Input) else node.spec.shape]
        if any(rows in one for one in sizes):
            return True
    return False


def _few_rows(call: Call, few: int) -> Call:
    """The first rows of a call."""

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:few] if value.dim() and len(value) == call.rows else value
        if type(value) is dict:
            return {key: cut(one) for key, one in value.items()}
        return type(value)([cut(one) for one in value]) if type(value) in (list, tuple) else value

    return evolve(call, args=cut(call.args), kwargs=cut(call.kwargs), rows=few, labels={})
