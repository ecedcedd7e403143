"""The names of TorchLens, and of Supplementary Table 1 of its paper, for the facts of a layer.

In: the name of a fact, and a conversion. Out: properties, which `Layer` inherits. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

Labels = list[str]


class Alias(property):
    """A property that is a fact of a layer under another name, possibly converted."""

    def __init__(self, get: Callable[[Any], Any], fact: str, doc: str) -> None:
        super().__init__(get)
        self.__doc__, self.fact = doc, fact  # "" if it combines several facts


def alias(fact: str, make: Callable[[Any], Any] | None = None, doc: str = "") -> Any:
    """A fact under another name, with the type of its annotation."""
    get = attrgetter(fact)
    return Alias(get if make is None else lambda layer: make(get(layer)), fact, doc or f"`{fact}`.")


def made(make: Callable[[Any], Any], doc: str) -> Any:
    """A combination of several facts."""
    return Alias(make, "", doc)


def addresses_of(calls: tuple[str, ...]) -> list[str]:
    """The addresses of module calls, each once."""
    return list(dict.fromkeys([call.rpartition(":")[0] for call in calls]))


def is_known(fact: Any) -> bool:
    """True unless the fact is None."""
    return fact is not None


def least(span: tuple[int, int] | None) -> int | None:
    """The lower end of a span, if there is one."""
    return span[0] if span is not None else None


def most(span: tuple[int, int] | None) -> int | None:
    """The upper end of a span, if there is one."""
    return span[1] if span is not None else None


def frames(stack: Any) -> list[dict[str, Any]]:
    """Source lines in the format of TorchLens."""
    return [
        {
            "call_fname": source.file,
            "call_linenum": source.line,
            "function": source.function.rpartition(".")[2],
            "code_context": source.lines(9),
        }
        for source in stack
    ]


class TorchLensNames:
    """The facts of a layer by TorchLens's names."""

    __slots__ = ()

    layer_label: str = alias(
        "label", lambda label: label.partition(":")[0], "The label of the layer without its pass: `conv2d_3_7`."
    )
    layer_label_w_pass: str = made(
        lambda layer: f"{layer.layer_label}:{layer.pass_number}", "The label with its pass: `conv2d_3_7:1`."
    )
    operation_num: int | None = alias(
        "ordinal",
        lambda number: number + 1 if number is not None else None,
        "The number of the operation, from 1, inputs and outputs included.",
    )
    layer_type_num: int | None = alias("type_number")
    layer_total_num: int | None = alias("total_number")
    pass_num: int = alias("pass_number")
    layer_passes_total: int = alias("passes", len, "The number of passes of its layer.")
    same_layer_operations: Labels = made(
        lambda layer: [label for label in layer.passes if label != layer.label],
        "The labels of the other passes of its layer.",
    )

    tensor_contents: Any = alias("value")
    tensor_shape: tuple[int, ...] | None = alias("shape")
    tensor_dtype: torch.dtype | None = alias("dtype")
    tensor_fsize: int = alias("nbytes")
    is_part_of_iterable_output: bool = alias("is_one_of_several")
    iterable_output_index: int | None = alias("index")

    creation_args: tuple[Any, ...] = alias("arguments")
    creation_kwargs: dict[str, Any] = alias("keywords")
    func_applied: Callable[..., Any] | None = alias("function")
    func_applied_name: str | None = alias("function_name")
    func_time_elapsed: float | None = alias("seconds")
    func_rng_states: torch.Tensor | None = alias("generator_state")
    func_position_args_non_tensor: list[Any] = alias("plain_arguments", list)
    func_keyword_args_non_tensor: dict[str, Any] = alias("plain_keywords")
    function_is_inplace: bool = alias("is_inplace")
    gradfunc_name: str | None = alias("gradient_function")
    func_call_stack: list[dict[str, Any]] = alias("stack", frames)

    computed_with_params: bool = alias("parameters", bool, "Whether it read a parameter.")
    num_param_tensors: int = alias("parameters", len, "The number of parameters it read.")
    parent_param_shapes: list[tuple[int, ...]] = alias(
        "parameters", lambda read: [p.shape for p in read], "Their shapes."
    )
    num_params_total: int = alias(
        "parameters", lambda read: sum([p.count for p in read]), "The number of their elements."
    )
    parent_params_fsize: int = alias("parameters", lambda read: sum([p.nbytes for p in read]), "Their size in bytes.")

    parent_layers: Labels = alias("parents", list)
    orig_ancestors: Labels = alias("origins", list)
    child_layers: Labels = alias("children", list)
    sibling_layers: Labels = alias("siblings", list)
    spouse_layers: Labels = alias("spouses", list)
    is_input_layer: bool = alias("layer_type", lambda kind: kind == "input", "Whether it is an input of the model.")
    has_input_ancestor: bool = alias("steps_from_input", is_known, "Whether it derives from an input, or is one.")
    min_distance_from_input: int | None = alias("steps_from_input", least, "The smallest of `steps_from_input`.")
    max_distance_from_input: int | None = alias("steps_from_input", most, "The largest of `steps_from_input`.")
    is_output_layer: bool = alias("_place.output", is_known, "Whether it is an output of the model.")
    is_output_ancestor: bool = alias("steps_to_output", is_known, "Whether it leads to an output, or is one.")
    output_descendants: Labels = alias("ends", list)
    min_distance_from_output: int | None = alias("steps_to_output", least, "The smallest of `steps_to_output`.")
    max_distance_from_output: int | None = alias("steps_to_output", most, "The largest of `steps_to_output`.")
    is_buffer_layer: bool = alias("buffer", is_known, "Whether it is a buffer of the model.")
    buffer_address: str | None = alias("buffer")
    initialized_inside_model: bool = alias("is_born_inside")
    internally_initialized_parents: Labels = made(
        lambda layer: layer._born_among(layer.parents), "The parents that were created inside the model."
    )
    internally_initialized_ancestors: Labels = made(
        lambda layer: layer._born_among(layer.origins),
        "The layers created inside the model from which it derives; itself, if it is one.",
    )
    internally_initialilized_ancestors: Labels = internally_initialized_ancestors  # as the paper's table spells it
    terminated_inside_model: bool = alias("ends_inside")
    is_terminal_bool_layer: bool = alias("is_condition")
    is_cond_branch_start: bool = alias("starts_condition")
    in_cond_branch: bool = alias("is_in_condition")

    is_computed_inside_submodule: bool = alias(
        "module", is_known, "Whether it was computed in a module other than the model itself."
    )
    containing_module_origin: str | None = alias("module")
    containing_module_origin_nested: list[str] = alias("modules", addresses_of, "The addresses of `modules`.")
    modules_entered: list[str] = alias("input_of", addresses_of, "The addresses of `input_of`.")
    modules_exited: list[str] = alias("output_of", addresses_of, "The addresses of `output_of`.")
    is_submodule_output: bool = alias("output_of", bool, "Whether it is the output of a module.")
    is_bottom_level_submodule_output: bool = alias("is_whole_module")
    bottom_level_submodule_exited: str | None = alias(
        "_whole_call",
        lambda call: call.rpartition(":")[0] if call is not None else None,
        "The address of the module that consists of it alone.",
    )
