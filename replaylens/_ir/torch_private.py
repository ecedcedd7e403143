"""Every private name of torch that replaylens uses: what it is for, and what is done where torch lacks it.

Out: the names, without their underscores, and `NAMES`, a table of them. Nothing else in the package says `torch._...`
or imports an underscored name from torch; private attributes of tensors, modules and storages are in `ATTRIBUTES`. A
torch without a name that correctness depends on is refused at import, with a list of all that it lacks.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

if TYPE_CHECKING:
    from torch._ops import (
        HigherOrderOperator as HigherOrderOperator,
        OpOverload as OpOverload,
        OpOverloadPacket as OpOverloadPacket,
    )
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException as DataDependentOutputException,
        DynamicOutputShapeException as DynamicOutputShapeException,
        FakeTensor as FakeTensor,
        FakeTensorMode as FakeTensorMode,
        unset_fake_temporarily as unset_fake_temporarily,
    )
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@frozen
class Private:
    """One private name. `without` says what is done where it is missing; "" if replaylens cannot do without it."""

    path: str
    purpose: str
    without: str = ""
    is_there: bool = True


def _found(path: str) -> Any:
    """The object at a dotted path; None if there is none."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            place: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            place = getattr(place, part, None)
        return place
    return None


def _name(path: str, purpose: str, without: str = "", instead: Any = None) -> Any:
    found = _found(path)
    _listed.append(Private(path, purpose, without, found is not None))
    return instead if found is None else found


def _autocast_is_on() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


_listed: list[Private] = []

# -- modes and where they are on ---------------------------------------------------------------------------------------

push_function_mode = _name("torch._C._push_on_torch_function_stack", "the tracer sees the calls beneath one of its own")
pop_function_mode = _name("torch._C._pop_torch_function_stack", "the same, at its end")
count_function_modes = _name("torch._C._len_torch_function_stack", "which function modes are on")
function_mode_at = _name("torch._C._get_function_stack_at", "whether the one on top is a live run's own")
function_modes = _name("torch.overrides._get_current_function_mode_stack", "modes around a capture may change values")
is_function_mode_seen = _name("torch._C._is_torch_function_enabled", "whether a function mode sees the call as well")
sees_no_function_mode = _name(
    "torch._C._is_torch_function_all_disabled",
    "whether all modes are off, to be put back after interrupts",
    "taken for on",
    lambda: False,
)
without_function_modes = _name("torch._C.DisableTorchFunction", "what the tracer computes for itself is not recorded")
without_subclasses = _name("torch._C.DisableTorchFunctionSubclass", "put back after interrupts where it was on")
graph_task = _name(
    "torch._C._current_graph_task_id",
    "whether a watched module is called within a backward pass, where a checkpoint computes it again",
    "a checkpoint's second forward is watched as well",
    lambda: -1,
)  # -1 outside
is_traced_by_jit = _name("torch._C._get_tracing_state", "whether torch.jit.trace runs the model", "None", lambda: None)
_entered_where_all_is_seen = without_function_modes()
_entered_where_all_is_seen.__enter__()
_entered_where_all_is_seen.__exit__(None, None, None)


def see_functions(is_seen: bool, is_all_off: bool) -> None:
    """Restore whether torch's functions reach modes and subclasses, as `is_function_mode_seen` and
    `sees_no_function_mode` reported it. To leave such a block once more is to set what was there before it.
    """
    _entered_where_all_is_seen.__exit__(None, None, None)
    if not is_seen:
        (without_function_modes() if is_all_off else without_subclasses()).__enter__()


count_dispatch_modes = _name("torch._C._len_torch_dispatch_stack", "a dispatch mode of the model's own is refused")
is_key_on = _name(
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "dispatch keys are as the modes are after a forward",
    "taken for off",
    lambda key: False,
)
dispatch_mode_at = _name("torch._C._get_dispatch_stack_at", "modes that an interrupt left on are left")
without_any_modes = _name("torch.utils._python_dispatch._disable_current_modes", "a hook compares values unseen")
is_any_autocast_on = _name(
    "torch._C._is_any_autocast_enabled", "each call's own modes", "the public switches are asked", _autocast_is_on
)
top_saving_hooks = _name(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "gradients that a model's own saving changes are not promised",
)
leave_saving_hooks_alone = _name(
    "torch._C._autograd._saved_tensors_hooks_set_tracing", "a checkpoint must not compute again what a live run changed"
)
end_of_recomputation = _name(
    "torch.utils.checkpoint._StopRecomputationError",
    "a checkpoint around a replay ends its second run by it",
    "such a replay is refused",
    KeyboardInterrupt,
)

allows_mkldnn = _name(
    "torch._C._get_mkldnn_enabled", "which kernels a forward lets torch take", "taken for yes", lambda: True
)
let_mkldnn = _name("torch._C._set_mkldnn_enabled", "the same, in a replay", "left", lambda wanted: None)
allows_cudnn = _name("torch._C._get_cudnn_enabled", "the same", "taken for yes", lambda: True)
let_cudnn = _name("torch._C._set_cudnn_enabled", "the same", "left", lambda wanted: None)
flash_attention_is_on = _name("torch._C._get_flash_sdp_enabled", "the same, without a frame of Python's")
lean_attention_is_on = _name("torch._C._get_mem_efficient_sdp_enabled", "the same")
plain_attention_is_on = _name("torch._C._get_math_sdp_enabled", "the same")
cudnn_attention_is_on = _name("torch._C._get_cudnn_sdp_enabled", "the same")
matmul_precision = _name("torch._C._get_float32_matmul_precision", "the same")
checks_sparse = _name("torch._C._check_sparse_tensor_invariants", "the same")
sdp_order = _name("torch._C._get_sdp_priority_order", "the same", "torch has one order", list)
set_sdp_order = _name("torch._C._set_sdp_priority_order", "the same", "torch has one order", lambda wanted: None)

# -- transforms of torch.func ------------------------------------------------------------------------------------------

_FUNCTORCH = "torch._C._functorch."
peek_interpreter_stack = _name(_FUNCTORCH + "peek_interpreter_stack", "whether a transform runs")
interpreter_stack = _name(_FUNCTORCH + "get_interpreter_stack", "whether a gradient is among those that run")
TransformType = _name(_FUNCTORCH + "TransformType", "the same")
is_wrapped = _name(_FUNCTORCH + "is_functorch_wrapped_tensor", "what a module gave inside a transform is unwrapped")
unwrapped = _name(_FUNCTORCH + "get_unwrapped", "the same")
is_batched = _name(_FUNCTORCH + "is_batchedtensor", "a write in place under vmap goes to a copy with the batch")
outside_of_transforms = _name(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "draws and recorded values inside a transform"
)
_PUBLIC_VMAP = "torch.func.vmap, ten times slower"
vmap_begins = _name(_FUNCTORCH + "_vmap_increment_nesting", "many variants in one pass", _PUBLIC_VMAP)
vmap_ends = _name(_FUNCTORCH + "_vmap_decrement_nesting", "the same", _PUBLIC_VMAP)
add_batch = _name(_FUNCTORCH + "_add_batch_dim", "the same", _PUBLIC_VMAP)
remove_batch = _name(_FUNCTORCH + "_remove_batch_dim", "the same", _PUBLIC_VMAP)
warn_of_vmap_fallbacks = _name(
    _FUNCTORCH + "_set_vmap_fallback_warning_enabled", "no warning there", "torch warns", lambda wanted: None
)
load_vmap_rules = _name(
    "torch._functorch.vmap.lazy_load_decompositions",
    "the public vmap registers rules when it is first called, by which last bits differ: both have them from the start",
    "they come with the first call of the public one",
    lambda: None,
)

# -- operators, and where they stand -----------------------------------------------------------------------------------

TensorBase = _name("torch._C.TensorBase", "methods of tensors have names")
functions = _name("torch._C._VariableFunctions", "what torch wraps in Python, for tracers")
kernels = _name("torch._C._nn", "the functional twin of a write in place")
has_kernel = _name("torch._C._dispatch_has_kernel_for_dispatch_key", "which ATen calls consist of others")
schemas_of_operator = _name(
    "torch._C._jit_get_schemas_for_operator", "which operators a file may call", "all need trust", lambda name: []
)
pytree = _name("torch.utils._pytree", "containers that users registered with torch")
safe_softmax = _name("torch._safe_softmax", "attention in its open form, rows without a key")
quantized_per_tensor = _name("torch._make_per_tensor_quantized_tensor", "other quantized values, in checks")
quantized_per_channel = _name("torch._make_per_channel_quantized_tensor", "the same")
TensorGuards = _name(
    "torch._C._dynamo.guards.TensorGuards", "do the model's tensors lie as they did?", "each is asked by itself"
)
storage_holders = _name("torch._C._storage_Use_Count", "whether a value can be let go while the forward runs")
seed_tracker = _name(
    "torch.cuda._lazy_seed_tracker", "was `torch.manual_seed` called?", "only a seed that changes the generator is seen"
)
swap_of_tensors = _name(
    "torch._C._swap_tensor_impl", "`torch.utils.swap_tensors` in a forward is refused", "it is not seen"
)
inference_guard = _name(
    "torch._C._InferenceMode",
    "`torch.inference_mode` in a forward that uses torch.func",
    "dispatch keys may stay on after such a forward",
)
unpack_dual = _name(
    "torch.ops.aten._unpack_dual.default",
    "a forward-mode gradient that torch cannot give beneath a dispatch mode is refused",
    "torch's own error, of an internal assertion",
)
hooks_of_all_modules = tuple(
    _name(f"torch.nn.modules.module._global_backward_{which}", "are there hooks on every module?", "none are seen", {})
    for which in ("hooks", "pre_hooks")
)
OPERATOR_PLACES = tuple(
    (path, _name(path, "a torch function is found again by its name", "those of another place are kept as they are"))
    for path in ("torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special", "torch._C._sparse")
) + (("torch._VF", _name("torch._VF", "the same", "the same")), ("torch._C", torch._C), ("torch.Tensor", TensorBase))


def set_swap_of_tensors(swap: Any) -> None:
    """Replace the function that exchanges two tensors: `torch.utils.swap_tensors` looks it up at each call."""
    torch._C._swap_tensor_impl = swap


def set_inference_guard(guard: Any) -> None:
    """Replace the class of what holds an inference mode: `torch.inference_mode` looks it up each time it begins."""
    torch._C._InferenceMode = guard  # type: ignore[misc]


# Where torch's Python functions (`F.relu`, `torch.norm`, `Tensor.split`) look up the way to a function mode.
_FROM_PYTHON: tuple[Any, ...] = tuple(
    module
    for module in (
        torch.nn.functional,
        torch.functional,
        _name("torch._tensor", "methods written in Python come to a function mode", "by torch's own way"),
    )
    if getattr(module, "handle_torch_function", None) is torch.overrides.handle_torch_function
)


def set_way_to_modes(way: Any) -> None:
    """Replace the function through which torch's Python functions reach a function mode."""
    for module in _FROM_PYTHON:
        module.handle_torch_function = way


def compiler_if_loaded(module: str = "torch._dynamo") -> Any:
    """A module of the compiler, which takes seconds to import; None if nobody has imported it."""
    return sys.modules.get(module)


left_by_compilers = _name(
    "torch._compile._disable_dynamo",
    "a function that torch.compile leaves as it is",
    "importing replaylens is slow",
    torch.compiler.disable,
)

_set_device = _name("torch._GLOBAL_DEVICE_CONTEXT", "is a default device set?", "torch searches for it")


def default_device() -> str:
    """The device of new tensors."""
    if _set_device is not None and not count_function_modes() and getattr(_set_device, "device_context", None) is None:
        return "cpu"  # as torch finds, after a longer search
    return str(torch.get_default_device())


# -- custom functions --------------------------------------------------------------------------------------------------

FunctionBase = _name("torch._C._FunctionBase", "the `apply` of every custom function is one that was bound before")
SingleLevelFunction = _name("torch.autograd.function._SingleLevelFunction", "calls of custom functions are seen there")

operator_definitions = _name(
    "torch._library.custom_ops.OPDEFS",
    "which module registers an operator that a pickle names",
    "whoever reads the pickle must have imported it",
    {},
)
OperatorDefinition = _name(
    "torch._library.custom_ops.CustomOpDef", "functions that go to other processes may refer to one", "they cannot go"
)
negative_view = _name("torch._neg_view", "a copy of a tensor with the mark of a negative has it too")

# -- classes -----------------------------------------------------------------------------------------------------------

if not TYPE_CHECKING:
    OpOverload = _name("torch._ops.OpOverload", "which calls are of operators")
    OpOverloadPacket = _name("torch._ops.OpOverloadPacket", "the same")
    HigherOrderOperator = _name("torch._ops.HigherOrderOperator", "the same")
    TorchDispatchMode = _name("torch.utils._python_dispatch.TorchDispatchMode", "to see ATen calls beneath transforms")
    DeviceContext = _name("torch.utils._device.DeviceContext", "the mode of a default device changes no values")
    _FAKE = "torch._subclasses.fake_tensor."
    FakeTensor = _name(_FAKE + "FakeTensor", "captures that compute nothing")
    FakeTensorMode = _name(_FAKE + "FakeTensorMode", "the same")
    DataDependentOutputException = _name(_FAKE + "DataDependentOutputException", "the same: what has no answer there")
    DynamicOutputShapeException = _name(_FAKE + "DynamicOutputShapeException", "the same")
    unset_fake_temporarily = _name(_FAKE + "unset_fake_temporarily", "the same: what is computed all the same")


def settle_dispatch_keys() -> None:
    """Turn the dispatch keys of modes on if this thread has a dispatch mode, and off if it has none."""
    if is_key_on("Python") == bool(count_dispatch_modes()):
        return
    with TorchDispatchMode(), without_any_modes():  # torch turns them at the first one and at the last
        pass


def module_of_operator(operator: Any) -> str | None:
    """The module that defines a custom operator in Python; None if that is not known, or is the script that runs."""
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    return module_of_definition(operator_definitions.get(packet._qualified_op_name))


def module_of_definition(definition: Any) -> str | None:
    """The same, of what `torch.library.custom_op` gave."""
    module = getattr(getattr(definition, "_init_fn", None), "__module__", None)
    return module if module not in ("__main__", "__mp_main__") else None


NAMES: tuple[Private, ...] = tuple(_listed)
OF_THE_COMPILER = (  # looked for where the compiler is loaded only
    Private("torch._dynamo.OptimizedModule", "the compiler's wrapper is no level of a model"),
    Private("torch._dynamo.eval_frame._set_stance", "compiled modules run eagerly in a capture"),
    Private("torch._dynamo.eval_frame._stance", "the same, and afterwards as the user had it"),
    Private("torch._dynamo.eval_frame.DynamoStance", "the same"),
)
ATTRIBUTES = {
    "Tensor._version": "was it written since?",
    "Tensor._base": "is it a view?",
    "Tensor._is_view": "the same",
    "Tensor._is_zerotensor": "has it memory?",
    "Tensor._use_count": "does anybody hold it?",
    "Tensor._grad": "the gradient, without the warning for tensors that are no leaves",
    "Tensor._backward_hooks": "is there a hook on its gradient?",
    "Tensor._indices": "what a sparse tensor is made of",
    "Tensor._values": "the same",
    "Tensor._nnz": "how many numbers it has",
    "UntypedStorage._cdata": "which memory it is",
    "Module._parameters": "parameters and buffers by name, without asking a module's `__getattr__`",
    "Module._buffers": "the same",
    "Module._modules": "the same",
    "Module._non_persistent_buffers_set": "which buffers a state_dict lacks",
    "Module._backward_pre_hooks": "are there hooks?",
    "Module._call_impl": "the call itself, beneath what is put around it",
    "Module._compiled_call_impl": "what a module's next call runs instead: a watch follows one forward by it",
    "Module._apply": "what `module.to`, `double` and the like go through",
}
FLOOR = (2, 10)
LACKING = tuple([one.path for one in NAMES if not one.is_there and not one.without])
_is_old = tuple(map(int, torch.__version__.split(".")[:2])) < FLOOR

if LACKING or _is_old:
    lacks = f", and it lacks {', '.join(LACKING)}" if LACKING else ""
    raise ImportError(f"replaylens needs torch 2.10 or later. This one is {torch.__version__}{lacks}.")
