"""Does what a layer gives for one batch depend on the batches before it?

In: the first batch, and what the layers gave for it. Out: nothing, or an error. Each batch begins from the state in
which the model was found, so that a model that counts its calls, or keeps an average that it reads, would give other
numbers in a loop. It is asked where its forward changes what it reads: a copy that has seen the batch already must give
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from attrs import evolve

from .._ir.equality import same_content
from .._sweep.task_draws import drawing_apart
from ..errors import BadSource
from .layer_values import LayerValues
from .model_inputs import Call

CURE = "Let it keep nothing from one forward to the next, or go through the data with forward hooks."


def require_no_memory(values: LayerValues, call: Call, first: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if the layers give something else after the model has seen a batch."""
    route = values.route(call)
    if route.unseen_draws:
        raise BadSource(
            f"the model draws numbers by {' and '.join(route.unseen_draws)}, which are recorded as they were: all "
            "batches would have the same ones. Draw them by torch's default generator."
        )
    if not route.memory or values.make is None:
        return
    found = _after_a_forward(values, call, first)
    changed = [name for name, tensor in tensors.items() if name in found and not same_content(tensor, found[name])]
    if changed:
        raise BadSource(
            f"the forward changes {' and '.join(map(repr, route.memory[:3]))}, and {changed[0]!r} depends on that: in "
            "a loop over the data it would depend on all batches before, and here each batch begins from the same "
            f"state. {CURE}"
        )


def _after_a_forward(values: LayerValues, call: Call, first: int) -> Mapping[str, torch.Tensor]:
    """What the layers of a copy of the model give after one forward; nothing where it cannot be copied."""
    assert values.make is not None
    maker, model = values.make, values.make.origin
    try:
        copied, args, kwargs = deepcopy((model, call.args, call.kwargs))
        with torch.set_grad_enabled("grad" in values.wish.what):
            drawing_apart({}, 0, lambda: copied(*args, **kwargs))
    except Exception:  # nothing is known
        return {}
    again = LayerValues(values.wish, make=evolve(maker, model=copied), seeds=values.seeds, origins={**values.origins})
    found, _ = again(call, first)
    return found
