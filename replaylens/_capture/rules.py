"""What kind of call is this? One Rule for each torch function, made once and kept.

In: a callable as the function mode sees it. Out: a Rule: pass it on, open it, record it; does it write, draw, let
content out of torch. Names and schemas decide; the tables are data.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from attrs import frozen

from .._core.settings import are_usual, products_are_usual
from .._core.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket
from .._replay.layout_guards import KINDS


class How(enum.Enum):
    """What the tracer does with a call."""

    PASS = "pass it on, it is no operation"
    LEAF = "one operation"
    FRESH = "one operation, whose output never shares memory"
    RELU = "F.relu, opened by hand"
    OPEN = "run its Python body under the mode"
    OPAQUE = "one operation of which nothing is known beforehand"
    ESCAPE = "content leaves torch"
    EXPOSE = "memory leaves torch"
    SPECIAL = "has a way of its own: see Tracer"


@frozen
class Rule:
    """How one torch function is recorded."""

    how: How
    kind: str = ""  # what a person calls it: conv2d, maxpool2d
    writes: Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor]] | None = None
    reshapes: bool = False  # changes its first argument's geometry, not its content
    may_draw: bool = False
    is_dynamic: bool = False  # nothing is known of the shape that it gives: of other calls, dynamic.py knows
    is_identity: bool = False  # may give its argument back: its value gets a name of its own
    is_undefined: bool = False  # gives memory with undefined content
    special: str = ""
    is_usual: Callable[[], bool] | None = None  # are the switches that it goes by as torch has them?


METADATA = frozenset(
    """dim size numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_inference get_device __len__ has_names shape ndim dtype device layout requires_grad is_leaf
    grad_fn itemsize nbytes is_cuda is_cpu is_sparse is_nested is_quantized is_meta is_mps is_xpu is_mkldnn
    is_sparse_csr is_ipu is_maia is_mtia is_vulkan is_xla
    retains_grad name names result_type promote_types can_cast
    qscheme q_per_channel_axis _parse_to
    _has_compatible_shallow_copy_type _sym_int sym_int sym_float sym_max sym_min sym_not sym_sum sym_ite sym_sqrt
    _assert is_grad_enabled is_inference_mode_enabled retain_grad is_same_size is_signed
    register_post_accumulate_grad_hook is_distributed dense_dim sparse_dim
    __hash__ share_memory_ rename_ get_default_dtype is_storage is_tensor
    dim_order get_rng_state set_rng_state manual_seed initial_seed is_deterministic_algorithms_warn_only_enabled
    are_deterministic_algorithms_enabled is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype
    is_warn_always_enabled broadcast_shapes cudnn_is_acceptable _use_cudnn_ctc_loss""".split()
)
# Of these, what changes the very object that it is called on.
MARKING = frozenset("retain_grad register_post_accumulate_grad_hook share_memory_ rename_ __hash__".split())
# What is asked of a tensor that another one of the same content may answer otherwise.
LAYOUT = frozenset(
    "stride storage_offset is_contiguous dim_order is_non_overlapping_and_dense _debug_has_internal_overlap".split()
)
FLAGS = frozenset(
    """requires_grad is_leaf grad_fn grad retains_grad is_inference is_pinned is_shared _is_view _base _version
    output_nr _backward_hooks _post_accumulate_grad_hooks""".split()
)
FLAGS_BY_CALL = frozenset("is_inference is_pinned is_shared _is_view".split())  # of these, what is no property
ESCAPES = frozenset(
    """__bool__ __int__ __float__ __complex__ __index__ __format__ __repr__ __str__ item tolist is_nonzero equal
    allclose
    is_set_to __contains__ is_conj is_neg q_scale q_zero_point is_coalesced _nnz""".split()
)
EXPOSURES = frozenset(
    """numpy __array__ __dlpack__ __dlpack_device__ data_ptr untyped_storage storage _typed_storage __array_wrap__
    __cuda_array_interface__ storage_type""".split()
)
SPECIALS = {
    "autograd.grad": "differentiate",
    "backward": "backward",
    "__deepcopy__": "deepcopy",
    "__reduce_ex__": "expose",
    "_set_grad_enabled": "grad_mode",
    "_make_dual": "dual",
    "register_hook": "hook",
    "requires_grad_": "turn",
    "set_": "assign",
    "resize_": "resize",
    "resize_as_": "resize",
}
RESHAPES = frozenset("t_ transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_ detach_".split())
UNDEFINED = frozenset("empty empty_like new_empty empty_strided new_empty_strided empty_permuted".split())
NEVER_OPEN = frozenset(
    """__deepcopy__ __reduce_ex__ __repr__ __format__ __array__ __array_wrap__ __dlpack__ __dlpack_device__ storage
    share_memory_ register_hook backward grad _unique_impl unflatten _typed_storage __setstate__ __dir__ module_load
    register_post_accumulate_grad_hook __cuda_array_interface__ __len__ __hash__ rename_ rename refine_names align_to
    names is_shared __contains__""".split()
)
INPLACE_OPERATORS = frozenset(
    """__iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__
    __irshift__ __setitem__ __idiv__""".split()
)
PARTING = frozenset(
    """unbind split chunk tensor_split hsplit vsplit dsplit split_with_sizes unsafe_split unsafe_chunk
    unsafe_split_with_sizes""".split()
)
STATISTICS = frozenset(
    "batch_norm native_batch_norm _native_batch_norm_legit _batch_norm_impl_index instance_norm".split()
)
IDENTITIES = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout".split()
)
# Whose output is new memory whatever the arguments are. Only a matter of speed: all others are looked at.
FRESH = frozenset(
    """linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d relu gelu silu tanh sigmoid softmax log_softmax
    matmul
    mm bmm addmm baddbmm add sub mul div layer_norm group_norm max_pool2d avg_pool2d embedding cat stack exp log sqrt
    rsqrt neg abs sin cos mean sum eq ne lt gt le ge where cumsum scaled_dot_product_attention adaptive_avg_pool2d
    leaky_relu elu hardtanh hardswish rms_norm argmax zeros_like ones_like tril triu masked_fill
    adaptive_avg_pool1d adaptive_avg_pool3d max_pool1d max_pool3d mish selu celu softplus erf reciprocal""".split()
)

# of these, such as have one kernel alone for a dtype and a layout
_PLAIN = frozenset(
    """relu tanh sigmoid add sub mul div exp log sqrt rsqrt neg abs sin cos mean sum eq ne lt gt le ge where cumsum cat
    stack zeros_like ones_like tril triu masked_fill argmax embedding reciprocal leaky_relu elu hardtanh hardswish
    erf""".split()
)

# functions that write more of their arguments than the first; their schema says which
WRITE_SEVERAL = frozenset(
    """_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_ _amp_foreach_non_finite_check_and_unscale_
    _amp_update_scale_ _cummax_helper _cummin_helper""".split()
)


@cache
def rule_of(function: Callable[..., Any]) -> Rule:
    """The rule for a function, by its name, its schema and what it is written in."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return _operator_rule(function)
    if isinstance(function, HigherOrderOperator):
        return Rule(How.SPECIAL, kind_of(function.name()), special="higher_order")
    name = str(getattr(function, "__name__", ""))
    if name in ("__get__", "__set__", "__delete__"):
        return _property_rule(function, name)
    if name == "_set_grad_enabled":
        return Rule(How.SPECIAL, name, special="grad_mode")
    if name in LAYOUT or name in FLAGS_BY_CALL:
        return Rule(How.SPECIAL, name, special="asks_layout" if name in LAYOUT else "asks_flag")
    if isinstance(function, type) or name in METADATA:
        return Rule(How.PASS, special="" if isinstance(function, type) or name in MARKING else "reads")
    if function is torch.autograd.grad:
        return Rule(How.SPECIAL, "grad", special="differentiate")
    if function is torch.autograd.backward or function is torch.Tensor.backward:
        return Rule(How.SPECIAL, "backward", special="backward")
    if name in ESCAPES:
        return Rule(How.ESCAPE, kind_of(name))
    if name in EXPOSURES:
        return Rule(How.EXPOSE, kind_of(name))
    if special := SPECIALS.get(name):
        return Rule(How.SPECIAL, kind_of(name), special=special)
    return _named_rule(function, name)


def _named_rule(function: Callable[..., Any], name: str) -> Rule:
    kind, draws = kind_of(name), is_seeded(name)
    writes = _writes_by_name(name)
    if isinstance(function, FunctionType):
        if function is torch.nn.functional.relu:
            return Rule(How.RELU, kind)
        if may_open(function):
            return Rule(How.OPEN, kind)
        if (function.__module__ or "").startswith("torch.nn.init"):
            return Rule(How.OPAQUE, kind, writes=_first_tensors, may_draw=True)
        return Rule(How.OPAQUE, kind, writes=writes, may_draw=True, is_dynamic=True)
    if not _is_builtin(function):
        return Rule(How.OPAQUE, kind, writes=writes, may_draw=True, is_dynamic=True)
    if name in RESHAPES:
        return Rule(How.LEAF, kind, writes=writes, reshapes=True)
    if name in FRESH and not draws:
        by_switches = are_usual if "attention" in name else None if name in _PLAIN else products_are_usual
        return Rule(How.FRESH, kind, is_usual=by_switches)
    return Rule(
        How.LEAF,
        kind,
        writes,
        may_draw=draws,
        is_identity=name in IDENTITIES,
        is_undefined=name in UNDEFINED,
    )


def is_new_memory(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Is it `tensor.new(*sizes)`, whose content is undefined? Of a tensor or a list it gives a copy."""
    return getattr(function, "__name__", "") == "new" and all(isinstance(arg, (int, torch.Size)) for arg in args[1:])


def _is_builtin(function: Callable[..., Any]) -> bool:
    return isinstance(function, BuiltinFunctionType) or type(function).__name__ in (
        "method_descriptor",
        "wrapper_descriptor",
        "method-wrapper",
        "builtin_function_or_method",
    )


def _property_rule(function: Any, word: str) -> Rule:
    name = function.__self__.__name__
    if word == "__get__" and name in FLAGS:
        return Rule(How.SPECIAL, name, special="asks_flag")
    if word == "__get__" and name in KINDS:
        return Rule(How.SPECIAL, name, special="asks_layout")
    if name in ("data", "real", "imag", "grad"):
        if word == "__set__" and name == "data":
            return Rule(How.SPECIAL, name, special="assign")
        return Rule(How.LEAF, name) if word == "__get__" and name != "grad" else Rule(How.PASS)
    if word == "__get__" and name in ("T", "mT", "H", "mH"):
        return Rule(How.LEAF, name.lower())
    if name == "requires_grad" and word == "__set__":
        return Rule(How.SPECIAL, name, special="turn")
    return Rule(How.PASS, special="reads" if word == "__get__" else "")


def _operator_rule(function: Any) -> Rule:
    """The rule of a `torch.ops` call: its schema tells."""
    is_packet = isinstance(function, OpOverloadPacket)
    overloads = [getattr(function, o) for o in function.overloads()] if is_packet else [function]
    name = function.__name__ if is_packet else function._schema.name.split("::")[-1]
    tags = {tag for overload in overloads for tag in overload.tags}
    namespace = function._qualified_op_name.split("::")[0] if is_packet else function.namespace
    if name in ("lift_fresh", "lift"):
        return Rule(How.SPECIAL, kind_of(name), special="lift")
    if name in METADATA or name in (
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "profiler",
        "requires_grad_",
    ):
        return Rule(How.PASS)
    if name in ("item", "_local_scalar_dense", "equal", "is_nonzero", "allclose", "q_scale", "q_zero_point"):
        return Rule(How.ESCAPE, kind_of(name))
    if name == "set_" and not is_packet and "source" in function._overloadname:  # no mode sees it
        return Rule(How.SPECIAL, kind_of(name), special="assign")
    silent = _writes_by_name(name) if name in STATISTICS else None
    writes = _writes_by_schema(overloads) if any(o._schema.is_mutable for o in overloads) else silent
    if torch.Tag.inplace_view in tags:
        return Rule(How.LEAF, kind_of(name), writes=_first_tensors, reshapes=True)
    seeded = torch.Tag.nondeterministic_seeded in tags
    if name in UNDEFINED and namespace == "aten":
        return Rule(How.LEAF, kind_of(name), is_undefined=True)
    known = namespace in ("aten", "prim", "prims")
    return Rule(
        How.LEAF if known else How.OPAQUE,
        kind_of(name),
        writes,
        may_draw=seeded or not known,
        is_dynamic=not known,
    )


def _writes_by_schema(overloads: list[Any]) -> Callable[..., list[torch.Tensor]]:
    def writes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for overload in overloads:
            if len(overloads) > 1 and len(overload._schema.arguments) < len(args) + len(kwargs):
                continue
            for number, argument in enumerate(overload._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = kwargs.get(argument.name, args[number] if number < len(args) else None)
                    found.extend(other for other in _tensors(value) if not any(other is one for one in found))
        return found

    return writes


def _writes_by_name(name: str) -> Callable[..., list[torch.Tensor]] | None:
    if name in STATISTICS:
        return _writes_statistics
    if name in ("rrelu_with_noise", "rrelu_with_noise_"):
        return lambda args, kwargs: [*(args[:1] if name.endswith("_") else ()), args[1]]
    if name in ("fused_moving_avg_obs_fake_quant", "_fused_moving_avg_obs_fq_helper"):
        return lambda args, kwargs: [value for value in args[3:7] if isinstance(value, torch.Tensor)]
    if name in ("batch_norm_update_stats",):
        return lambda args, kwargs: [value for value in args[1:3] if isinstance(value, torch.Tensor)]
    if name in WRITE_SEVERAL:
        packet = getattr(torch.ops.aten, name)
        return _writes_by_schema([getattr(packet, overload) for overload in packet.overloads()])
    if name in INPLACE_OPERATORS or name in ("map_", "apply_", "map2_"):
        return lambda args, kwargs: [args[0]]
    if name.endswith("_") and not name.startswith("__"):
        return _first_tensors
    return None


def _writes_statistics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    given = (
        dict(zip(("input", "weight", "bias", "running_mean", "running_var", "training"), args, strict=False)) | kwargs
    )
    training = given.get("training", given.get("use_input_stats", False))
    return [t for key in ("running_mean", "running_var") if training and isinstance(t := given.get(key), torch.Tensor)]


def _first_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    first = args[0] if args else kwargs.get("self", kwargs.get("input", kwargs.get("tensor")))
    return _tensors(first)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def may_open(function: FunctionType) -> bool:
    """Is this a torch function written in Python that asks `has_torch_function` first, so that its body can run?"""
    names = function.__code__.co_names
    asks = any(name.startswith("has_torch_function") for name in names)
    own = function.__globals__.get("__name__") != "torch._jit_internal" and "overrides" not in names
    return asks and own and function.__name__ not in NEVER_OPEN


def kind_of(name: str) -> str:
    """What a person calls an operation: `max_pool2d` is `maxpool2d`, `__getitem__` is `getitem`, `add_` is `add`."""
    return name.replace("_", "").lower() or "call"


@cache
def is_seeded(name: str) -> bool:
    """Is an ATen operator of this name tagged as drawing random numbers?"""
    for spelling in {name, name.rstrip("_")}:
        packet = getattr(torch.ops.aten, spelling, None) if spelling and not spelling.startswith("__") else None
        overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads):
            return True
    return False
