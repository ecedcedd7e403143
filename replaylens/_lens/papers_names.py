"""The names that TorchLens and its paper have for what is known of a layer, each as the fact that it stands for.

One property for each name of the paper's Supplementary Table 1, and for those of the README. Nothing is worked out
here: the tidy name in the docstring says what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.label import Label
from .facts_call import CallFacts
from .facts_kin import KinFacts
from .facts_modules import ModuleFacts, addresses_of
from .facts_names import NameFacts
from .facts_parameters import ParameterFacts
from .facts_value import ValueFacts


class LayerInPapersWords(NameFacts, ValueFacts, CallFacts, ParameterFacts, KinFacts, ModuleFacts):
    """A layer by the paper's names."""

    __slots__ = ()

    # -- labels and numbers -----------------------------------------------------------------------------------------

    @property
    def layer_label(self) -> str:
        """The label of the layer without its pass: `conv2d_3_7`."""
        return Label.of(self.label).layer

    @property
    def layer_label_w_pass(self) -> str:
        """The label with its pass: `conv2d_3_7:1`."""
        return f"{Label.of(self.label).layer}:{self.pass_number}"

    @property
    def operation_num(self) -> int | None:
        """Which operation it is, from 1, inputs and outputs counted."""
        return self.ordinal + 1 if self.ordinal is not None else None

    @property
    def layer_type_num(self) -> int | None:
        """`type_number`."""
        return self.type_number

    @property
    def layer_total_num(self) -> int | None:
        """`total_number`."""
        return self.total_number

    @property
    def pass_num(self) -> int:
        """`pass_number`."""
        return self.pass_number

    @property
    def layer_passes_total(self) -> int:
        """How many passes its layer has."""
        return len(self.passes)

    @property
    def same_layer_operations(self) -> list[str]:
        """The labels of the other passes of its layer."""
        return [label for label in self.passes if label != self.label]

    # -- the value --------------------------------------------------------------------------------------------------

    @property
    def tensor_contents(self) -> Any:
        """`value`."""
        return self.value

    @property
    def tensor_shape(self) -> tuple[int, ...] | None:
        """`shape`."""
        return self.shape

    @property
    def tensor_dtype(self) -> torch.dtype | None:
        """`dtype`."""
        return self.dtype

    @property
    def tensor_fsize(self) -> int:
        """`nbytes`."""
        return self.nbytes

    @property
    def is_part_of_iterable_output(self) -> bool:
        """`is_one_of_several`."""
        return self.is_one_of_several

    @property
    def iterable_output_index(self) -> int | None:
        """`index`."""
        return self.index

    # -- the call ---------------------------------------------------------------------------------------------------

    @property
    def creation_args(self) -> tuple[Any, ...]:
        """`arguments`."""
        return self.arguments

    @property
    def creation_kwargs(self) -> dict[str, Any]:
        """`keywords`."""
        return self.keywords

    @property
    def func_applied(self) -> Callable[..., Any] | None:
        """`function`."""
        return self.function

    @property
    def func_applied_name(self) -> str | None:
        """`function_name`."""
        return self.function_name

    @property
    def func_time_elapsed(self) -> float | None:
        """`seconds`."""
        return self.seconds

    @property
    def func_rng_states(self) -> torch.Tensor | None:
        """`generator_state`."""
        return self.generator_state

    @property
    def func_position_args_non_tensor(self) -> list[Any]:
        """`plain_arguments`."""
        return list(self.plain_arguments)

    @property
    def func_keyword_args_non_tensor(self) -> dict[str, Any]:
        """`plain_keywords`."""
        return self.plain_keywords

    @property
    def function_is_inplace(self) -> bool:
        """`is_inplace`."""
        return self.is_inplace

    @property
    def gradfunc_name(self) -> str | None:
        """`gradient_function`."""
        return self.gradient_function

    @property
    def func_call_stack(self) -> list[dict[str, Any]]:
        """`stack`, each line with its file, number, function and the code around it."""
        return [
            {
                "call_fname": source.file,
                "call_linenum": source.line,
                "function": source.function.rpartition(".")[2],
                "code_context": source.lines(9),
            }
            for source in self.stack
        ]

    # -- parameters -------------------------------------------------------------------------------------------------

    @property
    def computed_with_params(self) -> bool:
        """Did it read a parameter?"""
        return bool(self.parameters)

    @property
    def num_param_tensors(self) -> int:
        """How many parameters it read."""
        return len(self.parameters)

    @property
    def parent_param_shapes(self) -> list[tuple[int, ...]]:
        """Their shapes."""
        return [parameter.shape for parameter in self.parameters]

    @property
    def num_params_total(self) -> int:
        """How many numbers are in them."""
        return sum([parameter.count for parameter in self.parameters])

    @property
    def parent_params_fsize(self) -> int:
        """How many bytes they take."""
        return sum([parameter.nbytes for parameter in self.parameters])

    # -- kin --------------------------------------------------------------------------------------------------------

    @property
    def parent_layers(self) -> list[str]:
        """`parents`."""
        return list(self.parents)

    @property
    def orig_ancestors(self) -> list[str]:
        """`origins`."""
        return list(self.origins)

    @property
    def child_layers(self) -> list[str]:
        """`children`."""
        return list(self.children)

    @property
    def sibling_layers(self) -> list[str]:
        """`siblings`."""
        return list(self.siblings)

    @property
    def spouse_layers(self) -> list[str]:
        """`spouses`."""
        return list(self.spouses)

    @property
    def is_input_layer(self) -> bool:
        """Is it an input of the model?"""
        return self.layer_type == "input"

    @property
    def has_input_ancestor(self) -> bool:
        """Does it come from an input, or is it one?"""
        return self.steps_from_input is not None

    @property
    def min_distance_from_input(self) -> int | None:
        """The least of `steps_from_input`."""
        return steps[0] if (steps := self.steps_from_input) is not None else None

    @property
    def max_distance_from_input(self) -> int | None:
        """The most of `steps_from_input`."""
        return steps[1] if (steps := self.steps_from_input) is not None else None

    @property
    def is_output_layer(self) -> bool:
        """Is it an output of the model?"""
        return self._place.output is not None

    @property
    def is_output_ancestor(self) -> bool:
        """Does it lead to an output, or is it one?"""
        return self.steps_to_output is not None

    @property
    def output_descendants(self) -> list[str]:
        """`ends`."""
        return list(self.ends)

    @property
    def min_distance_from_output(self) -> int | None:
        """The least of `steps_to_output`."""
        return steps[0] if (steps := self.steps_to_output) is not None else None

    @property
    def max_distance_from_output(self) -> int | None:
        """The most of `steps_to_output`."""
        return steps[1] if (steps := self.steps_to_output) is not None else None

    @property
    def is_buffer_layer(self) -> bool:
        """Is it a buffer of the model?"""
        return self.buffer is not None

    @property
    def buffer_address(self) -> str | None:
        """`buffer`."""
        return self.buffer

    @property
    def initialized_inside_model(self) -> bool:
        """`is_born_inside`."""
        return self.is_born_inside

    @property
    def internally_initialized_parents(self) -> list[str]:
        """The parents that were made inside the model."""
        return [label for label in self.parents if self._is_born(label)]

    @property
    def internally_initialized_ancestors(self) -> list[str]:
        """The layers made inside the model that it comes from; itself, if it is one."""
        return [label for label in self.origins if self._is_born(label)]

    @property
    def internally_initialilized_ancestors(self) -> list[str]:
        """`internally_initialized_ancestors`, as the paper's table spells it."""
        return self.internally_initialized_ancestors

    def _is_born(self, label: str) -> bool:
        return self._lens.kin.is_born[self._lens.atlas.ordinals[label]]

    @property
    def terminated_inside_model(self) -> bool:
        """`ends_inside`."""
        return self.ends_inside

    @property
    def is_terminal_bool_layer(self) -> bool:
        """`is_condition`."""
        return self.is_condition

    @property
    def is_cond_branch_start(self) -> bool:
        """`starts_condition`."""
        return self.starts_condition

    @property
    def in_cond_branch(self) -> bool:
        """`is_in_condition`."""
        return self.is_in_condition

    # -- modules ----------------------------------------------------------------------------------------------------

    @property
    def is_computed_inside_submodule(self) -> bool:
        """Was it computed in a module other than the model itself?"""
        return self.module is not None

    @property
    def containing_module_origin(self) -> str | None:
        """`module`."""
        return self.module

    @property
    def containing_module_origin_nested(self) -> list[str]:
        """The addresses of `modules`."""
        return addresses_of(self.modules)

    @property
    def modules_entered(self) -> list[str]:
        """The addresses of `input_of`."""
        return addresses_of(self.input_of)

    @property
    def modules_exited(self) -> list[str]:
        """The addresses of `output_of`."""
        return addresses_of(self.output_of)

    @property
    def is_submodule_output(self) -> bool:
        """Is it the output of a module?"""
        return bool(self.output_of)

    @property
    def is_bottom_level_submodule_output(self) -> bool:
        """`is_whole_module`."""
        return self.is_whole_module

    @property
    def bottom_level_submodule_exited(self) -> str | None:
        """The address of the module that consists of it alone."""
        call = self._whole_call
        return Label.of(call).layer if call is not None else None
