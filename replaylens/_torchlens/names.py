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


def renamed_fact(fact: str, make: Callable[[Any], Any] | None = None, doc: str = "") -> Any:
    """A fact under another name, with the type of its annotation."""
    get = attrgetter(fact)
    return Alias(get if make is None else lambda layer: make(get(layer)), fact, doc or f"`{fact}`.")


def combined_fact(make: Callable[[Any], Any], doc: str) -> Any:
    """A combination of several facts."""
    return Alias(make, "", doc)


def addresses_of(calls: tuple[str, ...]) -> list[str]:
    """The addresses of module calls, each once."""
    return list(dict.fromkeys([call.rpartition(":")[0] for call in calls]))


def is_not_none(fact: Any) -> bool:
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

    layer_label: str = renamed_fact(
        "label", lambda label: label.partition(":")[0], "The label of the layer without its pass: `conv2d_3_7`."
    )
    layer_label_w_pass: str = combined_fact(
        lambda layer: f"{layer.layer_label}:{layer.pass_number}", "The label with its pass: `conv2d_3_7:1`."
    )
    operation_num: int | None = renamed_fact(
        "ordinal",
        lambda number: number + 1 if number is not None else None,
        "The number of the operation, from 1, inputs and outputs included.",
    )
    layer_type_num: int | None = renamed_fact("type_number")
    layer_total_num: int | None = renamed_fact("total_number")
    pass_num: int = renamed_fact("pass_number")
    layer_passes_total: int = renamed_fact("passes", len, "The number of passes of its layer.")
    same_layer_operations: Labels = combined_fact(
        lambda layer: [label for label in layer.passes if label != layer.label],
        "The labels of the other passes of its layer.",
    )

    tensor_contents: Any = renamed_fact("value")
    tensor_shape: tuple[int, ...] | None = renamed_fact("shape")
    tensor_dtype: torch.dtype | None = renamed_fact("dtype")
    tensor_fsize: int = renamed_fact("nbytes")
    is_part_of_iterable_output: bool = renamed_fact("is_one_of_several")
    iterable_output_index: int | None = renamed_fact("index")

    creation_args: tuple[Any, ...] = renamed_fact("arguments")
    creation_kwargs: dict[str, Any] = renamed_fact("keywords")
    func_applied: Callable[..., Any] | None = renamed_fact("function")
    func_applied_name: str | None = renamed_fact("function_name")
    func_time_elapsed: float | None = renamed_fact("seconds")
    func_rng_states: torch.Tensor | None = renamed_fact("generator_state")
    func_position_args_non_tensor: list[Any] = renamed_fact("plain_arguments", list)
    func_keyword_args_non_tensor: dict[str, Any] = renamed_fact("plain_keywords")
    function_is_inplace: bool = renamed_fact("is_inplace")
    gradfunc_name: str | None = renamed_fact("gradient_function")
    func_call_stack: list[dict[str, Any]] = renamed_fact("stack", frames)

    computed_with_params: bool = renamed_fact("parameters", bool, "Whether it read a parameter.")
    num_param_tensors: int = renamed_fact("parameters", len, "The number of parameters it read.")
    parent_param_shapes: list[tuple[int, ...]] = renamed_fact(
        "parameters", lambda read: [p.shape for p in read], "Their shapes."
    )
    num_params_total: int = renamed_fact(
        "parameters", lambda read: sum([p.count for p in read]), "The number of their elements."
    )
    parent_params_fsize: int = renamed_fact(
        "parameters", lambda read: sum([p.nbytes for p in read]), "Their size in bytes."
    )

    parent_layers: Labels = renamed_fact("parents", list)
    orig_ancestors: Labels = renamed_fact("origins", list)
    child_layers: Labels = renamed_fact("children", list)
    sibling_layers: Labels = renamed_fact("siblings", list)
    spouse_layers: Labels = renamed_fact("spouses", list)
    is_input_layer: bool = renamed_fact(
        "layer_type", lambda kind: kind == "input", "Whether it is an input of the model."
    )
    has_input_ancestor: bool = renamed_fact(
        "steps_from_input", is_not_none, "Whether it derives from an input, or is one."
    )
    min_distance_from_input: int | None = renamed_fact("steps_from_input", least, "The smallest of `steps_from_input`.")
    max_distance_from_input: int | None = renamed_fact("steps_from_input", most, "The largest of `steps_from_input`.")
    is_output_layer: bool = renamed_fact("_place.output", is_not_none, "Whether it is an output of the model.")
    is_output_ancestor: bool = renamed_fact("steps_to_output", is_not_none, "Whether it leads to an output, or is one.")
    output_descendants: Labels = renamed_fact("ends", list)
    min_distance_from_output: int | None = renamed_fact("steps_to_output", least, "The smallest of `steps_to_output`.")
    max_distance_from_output: int | None = renamed_fact("steps_to_output", most, "The largest of `steps_to_output`.")
    is_buffer_layer: bool = renamed_fact("buffer", is_not_none, "Whether it is a buffer of the model.")
    buffer_address: str | None = renamed_fact("buffer")
    initialized_inside_model: bool = renamed_fact("is_born_inside")
    internally_initialized_parents: Labels = combined_fact(
        lambda layer: layer._born_among(layer.parents), "The parents that were created inside the model."
    )
    internally_initialized_ancestors: Labels = combined_fact(
        lambda layer: layer._born_among(layer.origins),
        "The layers created inside the model from which it derives; itself, if it is one.",
    )
    internally_initialilized_ancestors: Labels = internally_initialized_ancestors  # as the paper's table spells it
    terminated_inside_model: bool = renamed_fact("ends_inside")
    is_terminal_bool_layer: bool = renamed_fact("is_condition")
    is_cond_branch_start: bool = renamed_fact("starts_condition")
    in_cond_branch: bool = renamed_fact("is_in_condition")

    is_computed_inside_submodule: bool = renamed_fact(
        "module", is_not_none, "Whether it was computed in a module other than the model itself."
    )
    containing_module_origin: str | None = renamed_fact("module")
    containing_module_origin_nested: list[str] = renamed_fact("modules", addresses_of, "The addresses of `modules`.")
    modules_entered: list[str] = renamed_fact("input_of", addresses_of, "The addresses of `input_of`.")
    modules_exited: list[str] = renamed_fact("output_of", addresses_of, "The addresses of `output_of`.")
    is_submodule_output: bool = renamed_fact("output_of", bool, "Whether it is the output of a module.")
    is_bottom_level_submodule_output: bool = renamed_fact("is_whole_module")
    bottom_level_submodule_exited: str | None = renamed_fact(
        "_whole_call",
        lambda call: call.rpartition(":")[0] if call is not None else None,
        "The address of the module that consists of it alone.",
    )
