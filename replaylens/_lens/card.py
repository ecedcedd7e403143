"""print(layer): all that is known of it, on a card.

In: a layer. Out: text. What a line says is a fact of the layer; here it is only put into words.
"""

from __future__ import annotations

import torch

from .._core.node import Call, State
from .._core.text import line
from .._core.torch_private import without_function_modes
from ..errors import NotSaved, StaleValue
from .kin import Span
from .papers_names import LayerInPapersWords
from .units import cost, duration, human


def card(layer: LayerInPapersWords) -> str:
    """The card of a layer, one line a fact; lines that have nothing to say are left out."""
    rows = [
        _head(layer),
        *_value(layer),
        *_parameters(layer),
        *_kin(layer),
        *_function(layer),
        *_place(layer),
        f"Lookup keys: {', '.join(map(str, layer.lookup_keys))}",
    ]
    return "\n    ".join(rows)


def _head(layer: LayerInPapersWords) -> str:
    if layer.ordinal is None:
        return f"{layer.layer_type.capitalize()} {layer.label}:"
    passes = f" (pass {layer.pass_number} of {layer.layer_passes_total})" if layer.layer_passes_total > 1 else ""
    return f"Layer {layer.layer_label}{passes}, operation {layer.operation_num} of {len(layer._lens.atlas.order)}:"


def _value(layer: LayerInPapersWords) -> list[str]:
    part = f" (number {layer.index} of several)" if layer.index is not None else ""
    meanings = ", ".join(map(str, layer._lens.meanings(layer._place)))
    return [f"Value: {meanings}, {human(layer.nbytes)}{part}", *[f"    {row}" for row in _preview(layer).splitlines()]]


def _preview(layer: LayerInPapersWords) -> str:
    """A corner of its content."""
    try:
        tensor = layer.value
    except (NotSaved, StaleValue) as reason:
        return "(not kept)" if isinstance(reason, NotSaved) else "(overwritten since)"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or not tensor.numel():
        return ""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return ""
    with without_function_modes(), torch.no_grad():
        corner = tensor.detach()[(0,) * max(0, tensor.dim() - 2)]
        whole = corner.numel() == tensor.numel() and all(size <= 5 for size in corner.shape)
        corner = corner[tuple(slice(5) for _ in corner.shape)]
        return f"{corner}{'' if whole else ' ...'}"


def _parameters(layer: LayerInPapersWords) -> list[str]:
    if not layer.parameters:
        return []
    each = ", ".join([f"{one.address} {list(one.shape)}" for one in layer.parameters])
    return [f"Parameters: {each}; {layer.num_params_total:,} numbers, {human(layer.parent_params_fsize)}"]


def _kin(layer: LayerInPapersWords) -> list[str]:
    rows = [f"Parents: {', '.join(layer.parents) or 'none'}", f"Children: {', '.join(layer.children) or 'none'}"]
    if layer.ordinal is None:
        return rows
    ways = (_steps(layer.steps_from_input, "from an input"), _steps(layer.steps_to_output, "to an output"))
    return [*rows, f"Distance: {', '.join(ways)}"]


def _steps(span: Span, where: str) -> str:
    if span is None:
        return f"no way {where}"
    count = str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}"
    return f"{count} {'step' if count == '1' else 'steps'} {where}"


def _function(layer: LayerInPapersWords) -> list[str]:
    node = layer.node
    if not isinstance(node, Call) or layer.is_output_layer:
        return [f"Address: {node.address}"] if isinstance(node, State) and node.address != layer.label else []
    backward = f", backward {layer.gradient_function}" if layer.gradient_function else ""
    rows = [f"Function: {layer.function_name}{backward}", f"Code: {line(node)}"]
    if layer.flops is None:
        rows.append("Cost: not known")
    elif layer.flops:
        rows.append(f"Cost: {cost(layer.flops, layer.macs or 0)}")
    return [*rows, f"Time: {duration(layer.seconds)}"] if layer.seconds is not None else rows


def _place(layer: LayerInPapersWords) -> list[str]:
    rows = [f"Computed inside module: {layer.module}"] if layer.module else []
    if layer.output_of:
        rows.append(f"Output of modules: {', '.join(layer.output_of)}")
    if layer.is_whole_module:
        rows.append(f"All that is computed in module: {layer.bottom_level_submodule_exited}")
    if layer.is_condition or layer.is_in_condition:
        rows.append(
            "Decides over a branch of the model's Python." if layer.is_condition else "Computed for a condition."
        )
    if layer.source:
        rows.append(f"Source: {layer.source}  {layer.source.text}")
    return rows
