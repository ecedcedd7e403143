"""What the first batch tells: which arrays there will be, and by what an extraction is known again.

In: the first batch, what the layers give for it, and what the user asked for. Out: a Plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import frozen

from .._ir.node import Const, Input, Ref, State
from .._store.content import content_digest
from .._store.programs import graph_digest
from .._version import __version__
from ..errors import BadSource, ReplaylensError
from .batch_reader import Batch
from .extraction_plan import ArrayPlan, Plan, array_dtype, shard_rows, time_axes
from .function_text import function_text
from .layer_values import LayerValues, Route
from .memory_of_batches import require_no_memory
from .reduction import require_fit
from .row_axis import require_row_axis
from .shards import require_rows


@frozen(eq=False)
class Asked:
    """What an extraction was asked for besides layers and data, as far as results depend on it."""

    batch_size: int | None
    total: int | None
    shard_bytes: int | None
    threads: int
    edit: Callable[[Any], Any] | None
    inputs: Any
    labels: Iterable[str]


def plan_of(batch: Batch, tensors: Mapping[str, torch.Tensor], values: LayerValues, asked: Asked) -> Plan:
    """The plan of an extraction, whose first batch this is, and gave these tensors."""
    arrays = (*_layers(tensors, values, batch.call.rows), *_labels(batch, asked.labels))
    require_row_axis(values, batch.call, batch.first, tensors)
    require_no_memory(values, batch.call, batch.first, tensors)
    values.wish.reduce.require_used("reduce", tensors)
    values.wish.dtype.require_used("dtype", tensors)
    require_fit({name: values.origins[name].reduction for name in tensors})
    if twice := {*tensors} & {*asked.labels, *[one.name for one in arrays if one.is_label]}:
        raise BadSource(f"{min(twice)!r} is the name of a layer and of a label. Give the label another one.")
    rows = shard_rows(arrays, asked.batch_size or batch.call.rows, asked.total, asked.shard_bytes)
    return Plan(arrays, rows, asked.total, _document(values, batch, arrays, asked, rows))


def _layers(tensors: Mapping[str, torch.Tensor], values: LayerValues, rows: int) -> Iterable[ArrayPlan]:
    for name, tensor in tensors.items():
        require_rows(name, tensor, rows)
    series = {name: (values.origins[name].asked.is_series, one.shape[1:2].numel()) for name, one in tensors.items()}
    times = time_axes(series)
    for name, tensor in tensors.items():
        origin, (dtype, computed) = values.origins[name], array_dtype(tensor, name)
        shape = tuple(tensor.shape[1:])
        axes = (
            (times[name], *origin.reduction.axes(len(shape) - 1))
            if name in times
            else origin.reduction.axes(len(shape))
        )
        asked = origin.asked
        yield ArrayPlan(name, asked.name, asked.label, origin.what, origin.reduction.text, shape, dtype, computed, axes)


def _labels(batch: Batch, known: Iterable[str]) -> Iterable[ArrayPlan]:
    """The numbers that the data bring with each batch, unless the user gave labels of that name."""
    for name, label in batch.call.labels.items():
        if name not in known:
            yield ArrayPlan(name, "", "", "label", None, (), label.dtype.name, label.dtype.name, (), is_label=True)


def _document(
    values: LayerValues, batch: Batch, arrays: tuple[ArrayPlan, ...], asked: Asked, rows: int
) -> dict[str, Any]:
    """What must agree for an extraction to be gone on with: whatever the bits depend on."""
    route = values.route(batch.call)
    wish = values.wish
    return {
        "model": route.model_name,
        **_digests(route),
        "replaylens": __version__,
        "torch": str(torch.__version__),
        "threads": asked.threads,
        "arrays": {one.name: {**one.row, "shape": list(one.shape), "dtype": one.dtype} for one in arrays},
        "seeds": dict(values.seeds) if values.may_draw(route) else None,
        "of": _text(wish.of),
        "edit": _text(asked.edit),
        "inputs": _text(asked.inputs),
        "batch_size": asked.batch_size,
        "shard_rows": rows,
        "total": asked.total,
    }


def _text(given: Any) -> Any:
    return function_text(given) if callable(given) else given if given is None else str(given)


def _digests(route: Route) -> dict[str, str]:
    """Digests of what is computed, of the weights, and of the first batch: they tell what of it is another."""
    prog = route.whole if route.cut is None else route.cut
    graph, record = prog.graph, prog._record
    sums: dict[int, bytes] = {}  # by the identity of a tensor, which the record holds

    def digest(kind: type[State | Const | Input]) -> str:
        found = hashlib.sha256()
        for node in graph.nodes:
            if isinstance(node, kind) and Ref(node.name) in record.values:
                tensor = record.value(Ref(node.name))
                if id(tensor) not in sums:
                    sums[id(tensor)] = content_digest(tensor)
                found.update(sums[id(tensor)])
        return found.hexdigest()[:16]

    try:
        program = graph_digest(record)[:16]
    except ReplaylensError as error:
        program = f"none: {str(error).splitlines()[0]}"
    return {"program": program, "weights": digest(State), "constants": digest(Const), "first_batch": digest(Input)}
