"""Where the facts of a layer are shown: in `print(layer)`, in DataFrames, on pages. One table.

In: a layer. Out: text, table cells, plain data. To add a fact, add a property in layer_facts.py and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen

from .._ir.label import Label
from .._ir.node import Call, Source, State, TensorSpec
from .._ir.printer import node_line
from .._ir.torch_private import without_function_modes
from ..errors import NotSaved, StaleValue
from .format import format_bytes, format_duration, format_flops
from .layer_facts import LayerFacts
from .program_facts import Span

Say = Callable[[LayerFacts], Any]
_LONGEST = 300  # characters of a line on a page


@frozen
class Field:
    """A fact of a layer, and where it is shown. Empty and None values are omitted."""

    fact: str
    columns: tuple[str, ...] = ()  # in `prog.to_pandas()`, by TorchLens's names
    line: tuple[str, Say] | None = None  # in `print(layer)`: a title, which may be empty, and the text
    page: tuple[str, Say] | None = None  # on the card of a page: a key and the data


def layer_card(layer: LayerFacts) -> str:
    """The text of `print(layer)`, one line per fact."""
    lines = [(title, say(layer)) for title, say in [field.line for field in FIELDS if field.line is not None]]
    return "\n    ".join([_head(layer), *[f"{title}: {words}" if title else words for title, words in lines if words]])


def page_card(layer: LayerFacts) -> dict[str, Any]:
    """The facts of a layer on a page, as plain data."""
    found = {key: say(layer) for key, say in [field.page for field in FIELDS if field.page is not None]}
    return {key: value for key, value in found.items() if value not in ("", [], (), None)}


def table_row(layer: LayerFacts) -> tuple[Any, ...]:
    """The cells of a layer under `COLUMNS`."""
    return tuple([_cell(getattr(layer, name)) for name in COLUMNS])


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, Source) else value


def _head(layer: LayerFacts) -> str:
    if layer.ordinal is None:
        return f"{layer.layer_type.capitalize()} {layer.label}:"
    count = len(layer.passes)
    passes = f" (pass {layer.pass_number} of {count})" if count > 1 else ""
    total = len(layer._facts.index.order)
    return f"Layer {Label.of(layer.label).layer}{passes}, operation {layer.ordinal + 1} of {total}:"


def _value(layer: LayerFacts) -> str:
    part = f" (number {layer.index} of several)" if layer.index is not None else ""
    specs = ", ".join(map(str, layer._facts.specs(layer._place)))
    preview = [f"        {row}" for row in _preview(layer).splitlines()]
    return "\n".join([f"{specs}, {format_bytes(layer.nbytes)}{part}", *preview])


def _preview(layer: LayerFacts) -> str:
    """A corner of the value."""
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


def _parameters(layer: LayerFacts) -> str:
    if not layer.parameters:
        return ""
    each = ", ".join([f"{one.address} {list(one.shape)}" for one in layer.parameters])
    count, nbytes = (
        sum(numbers) for numbers in zip(*[(one.count, one.nbytes) for one in layer.parameters], strict=True)
    )
    return f"{each}; {count:,} numbers, {format_bytes(nbytes)}"


def _distance(layer: LayerFacts) -> str:
    ways = (_steps(layer.steps_from_input, "from an input"), _steps(layer.steps_to_output, "to an output"))
    return ", ".join(ways) if layer.ordinal is not None else ""


def _steps(span: Span, where: str) -> str:
    if span is None:
        return f"no way {where}"
    count = str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}"
    return f"{count} {'step' if count == '1' else 'steps'} {where}"


def _address(layer: LayerFacts) -> str:
    node = layer.node
    is_other = isinstance(node, State) and not layer.is_output_layer and node.address != layer.label
    return node.address if is_other else ""  # type: ignore[union-attr]


def _function(layer: LayerFacts) -> str:
    backward = f", backward {layer.gradient_function}" if layer.gradient_function else ""
    return f"{layer.function_name}{backward}" if layer.function_name else ""


def _code(layer: LayerFacts) -> str:
    return node_line(layer.node) if isinstance(layer.node, Call) and not layer.is_output_layer else ""


def _cost(layer: LayerFacts) -> str:
    if layer.flops is None:
        return "not known"
    return format_flops(layer.flops, layer.macs or 0) if layer.flops else ""


def _condition(layer: LayerFacts) -> str:
    if layer.is_condition:
        return "Decides over a branch of the model's Python."
    return "Computed for a condition." if layer.is_in_condition else ""


def _note(layer: LayerFacts) -> str:
    node = layer.node
    if isinstance(node, State):
        return f"at {node.address}"
    if not isinstance(node, Call):
        return ""
    if node.target.name.endswith("scaled_dot_product_attention"):
        return "The attention pattern is inside this fused operation: prog.expand(...) makes it a layer."
    return node.edited


def _gives(layer: LayerFacts) -> list[str]:
    return [_sized(spec) for spec in layer._facts.specs(layer._place)]


def _read(layer: LayerFacts) -> list[list[str]]:
    specs = [(one, TensorSpec(one.shape, one.dtype, "", None)) for one in layer.parameters]
    return [[one.address, _sized(spec)] for one, spec in specs]


def _sized(spec: TensorSpec) -> str:
    return f"{spec}  {format_bytes(spec.nbytes)}"


def _listed(fact: str, nothing: str = "") -> Say:
    """A function that shows the items of a fact in one line."""
    return lambda layer: ", ".join(map(str, getattr(layer, fact))) or nothing


def _plain(fact: str) -> Say:
    return lambda layer: getattr(layer, fact)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


FIELDS: tuple[Field, ...] = (
    Field("label", ("layer_label", "layer_label_w_pass")),
    Field("short_label"),
    Field("layer_type", ("layer_type",), page=("kind", _plain("layer_type"))),
    Field("type_number"),
    Field("total_number"),
    Field("ordinal", ("operation_num",)),
    Field("pass_number", ("pass_num",)),
    Field("passes", ("layer_passes_total",)),
    Field("value", line=("Value", _value), page=("gives", _gives)),
    Field("shape", ("tensor_shape",)),
    Field("dtype", ("tensor_dtype",)),
    Field("nbytes", ("tensor_fsize",)),
    Field("is_saved", ("is_saved",)),
    Field("is_one_of_several"),
    Field("index"),
    Field("parts"),
    Field("grad"),
    Field("node", line=("Address", _address), page=("note", _note)),
    Field("function"),
    Field("function_name", ("func_applied_name",), ("Function", _function)),
    Field("arguments", line=("Code", _code), page=("code", lambda layer: _cut(_code(layer)))),
    Field("keywords"),
    Field("plain_arguments"),
    Field("plain_keywords"),
    Field("is_inplace", ("function_is_inplace",)),
    Field("gradient_function", ("gradfunc_name",)),
    Field(
        "seconds",
        ("func_time_elapsed",),
        ("Time", lambda layer: format_duration(layer.seconds) if layer.seconds else ""),
    ),
    Field("generator_state"),
    Field("flops", ("flops",), ("Cost", _cost)),
    Field("macs", ("macs",)),
    Field("parameters", ("num_param_tensors", "num_params_total"), ("Parameters", _parameters), ("parameters", _read)),
    Field("parents", ("parent_layers",), ("Parents", _listed("parents", "none")), ("parents", _plain("parents"))),
    Field("children", ("child_layers",), ("Children", _listed("children", "none")), ("children", _plain("children"))),
    Field("siblings"),
    Field("spouses"),
    Field("origins"),
    Field("ends"),
    Field("steps_from_input", ("min_distance_from_input", "max_distance_from_input"), ("Distance", _distance)),
    Field("steps_to_output", ("min_distance_from_output", "max_distance_from_output")),
    Field("is_input_layer", ("is_input_layer",)),
    Field("is_output_layer", ("is_output_layer",)),
    Field("buffer", ("is_buffer_layer",)),
    Field("is_born_inside", ("initialized_inside_model",)),
    Field("ends_inside", ("terminated_inside_model",)),
    Field("is_condition", ("is_terminal_bool_layer",), ("", _condition)),
    Field("starts_condition"),
    Field("is_in_condition", ("in_cond_branch",)),
    Field("module", ("containing_module_origin",), ("Computed inside module", _plain("module"))),
    Field("modules"),  # a card on a page has a number in the page's table of module calls instead
    Field("input_of"),
    Field(
        "output_of",
        ("modules_exited",),
        ("Output of modules", _listed("output_of")),
        ("gives_module", _plain("output_of")),
    ),
    Field(
        "is_whole_module",
        ("is_bottom_level_submodule_output",),
        ("All that is computed in module", _plain("bottom_level_submodule_exited")),
    ),
    Field(
        "source",
        ("source",),
        ("Source", lambda layer: f"{layer.source}  {layer.source.text}" if layer.source else ""),
        ("source", lambda layer: [str(layer.source), _cut(layer.source.text)] if layer.source else ""),
    ),
    Field("stack"),
    Field("lookup_keys", line=("Lookup keys", _listed("lookup_keys"))),
)
COLUMNS: tuple[str, ...] = tuple([name for field in FIELDS for name in field.columns])
