"""How they are refused."""

from __future__ import annotations

from collections.abc import Mapping

from .case import MODELS, silence

# The class of the error that a capture raises, and words of it: a refusal of another kind is a fault.
CAPTURE_REFUSED = {
    "write_to_inputs_that_overlap": ("CaptureError: partly overlap in memory",),
    "foreach_that_fails_half_way": ("CaptureError: wrote a part of its target and then raised",),
    "lazy_module": ("UnsupportedModel: has no parameters yet",),
    "buffers_that_overlap": ("CaptureError: partly overlap in memory",),
    "linearised": ("CaptureError: the model turned on a dispatch mode of its own",),
    "tensor_subclass_that_dispatches": ("UnknownOrigin: no recorded call in this thread made it",),
    "dispatch_mode_of_the_users": ("CaptureError: the model turned on a dispatch mode of its own",),
    "threads": ("UnknownOrigin: no recorded call in this thread made it",),
    "nested_tensor": (
        "UnknownOrigin: no recorded call in this thread made it",
        "CaptureError: the forward computes with nested tensors",
    ),
    "numpy_seen_through_two_tensors": ("CaptureError: shares its memory with another one through numpy",),
    "dlpack_pair": ("CaptureError: shares its memory with another one through numpy",),
}
# The same of gradients.
GRADIENTS_REFUSED = {
    "hook_on_the_backward_of_a_module": ("NotDifferentiable: a module's backward hook",),
    "saved_tensor_hooks": ("NotDifferentiable: saved_tensors_hooks",),
    "scripted_function": ("NotDifferentiable: a scripted function",),
    "shapes_that_depend_on_data": ("NotDifferentiable: torch itself has no backward for a call",),
    "operators_from_the_right": ("NotDifferentiable: torch itself has no backward for a call",),
    "aten_ops_by_hand": ("RuntimeError: no autograd formula was registered",),
}


def is_refused_so(name: str, error: BaseException, *tables: Mapping[str, tuple[str, ...]]) -> bool:
    """Is this the error by which a model of the zoo is refused; or the one that the model raises by itself?"""
    written = [text.partition(": ") for table in tables or (CAPTURE_REFUSED,) for text in table.get(name, ())]
    if any(type(error).__name__ == kind and words in str(error) for kind, _, words in written):
        return True
    case = MODELS[name]()
    try:
        with silence():
            case.model(*case.args, **case.kwargs)
    except Exception as plain:
        return type(plain) is type(error) and str(plain).splitlines()[:1] == str(error).splitlines()[:1]
    return False
