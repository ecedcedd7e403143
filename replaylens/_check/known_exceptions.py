"""Known reasons why the value of a call does not depend on one of its arguments.

In: a call whose value no perturbation of one argument changed. Out: the reason in words if the kind of call explains
it; else "". It is consulted only after every perturbation went unnoticed, so it cannot hide an argument that matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from .._edit.patch_ops import is_act
from .._ir.autograd import standing
from .._ir.graph import InnerGradient
from .._ir.node import Call, Ref, refs_in
from .._ir.ops import OpInfo, Quirk, info
from .._ir.torch_private import OpOverload, OpOverloadPacket
from .._ir.write import Write, original_call, unpacked

_SHAPE = "only its shape and type are read"


def trusts(node: Call, value: torch.Tensor) -> bool:
    """True if the call may use integers as unchecked offsets, so that perturbing them could crash the process."""
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        return False
    function = original_call(node).target
    name = function.name
    is_custom = name.startswith("torch.ops.") and not name.startswith(("torch.ops.aten.", "torch.ops.prims."))
    is_own = not name.startswith("torch.") and "replaylens" not in name
    is_of_a_family = any(family in function.short for family in ("sparse", "nested", "jagged", "sobol"))
    return is_custom or is_own or is_of_a_family or info(function).has(Quirk.TRUSTS_INTEGERS)


def known_reason(node: Call, parent: Ref, value: Mapping[Ref, Any], given: Mapping[Ref, torch.Tensor]) -> str:
    """Why the value of a call of this kind does not depend on this argument; "" if there is no known reason."""
    if not any(_has_numbers(made) for made in value.values()):
        return "the value has no elements"
    function, args, _ = original_call(node)
    op = info(function)
    if node.edits is not None or is_act(function.function):
        return "a patch replaces it"
    if op.name == "_new_zeros_with_same_feature_meta":
        return _SHAPE
    if isinstance(node, InnerGradient):
        return "a gradient that is constant"
    if function.function is standing and _stands(args[:1], parent):
        return "only its place among the gradients is used"
    if isinstance(node, Write):
        return _reason_of_a_write(node, op, parent)
    of_first = op.reads_shape_of_first and _stands(args[:1], parent)
    if of_first or (op.reads_shape_of_second and _stands(args[1:], parent)):
        return _SHAPE
    if op.has(Quirk.OVERWRITES) and _stands(args[:1], parent):
        return "all of it is overwritten"
    if (op.has(Quirk.SHARE) and _is_of_one(value)) or (op.has(Quirk.ATTENTION) and _weighs_one(node, parent, given)):
        return "a share of a single element, which is constant"
    return ""


def is_given_to_torch(node: Call, parent: Ref) -> bool:
    """True if the model itself passed the value to one of torch's compiled operations.

    A capture cannot have put anything in the place of an argument of such a call.
    """
    function, args, kwargs = original_call(node)
    called = function.function
    is_compiled = isinstance(called, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType))
    is_operator = isinstance(called, (OpOverload, OpOverloadPacket)) and function.name.startswith("torch.ops.aten.")
    is_torchs = function.is_stable and function.name.startswith("torch.") and not function.name.endswith(".apply")
    return is_torchs and (is_compiled or is_operator) and _stands((args, tuple(kwargs.values())), parent)


def _reason_of_a_write(node: Write, op: OpInfo, parent: Ref) -> str:
    given = node.arguments
    memory = given.bases, given.values
    if not _stands((memory, given.args, given.kwargs), parent) and _stands(given.targets, parent):
        steps = [step for target in given.targets for step in unpacked(target).steps if _stands(step, parent)]
        return _SHAPE if all(info(unpacked(step).function).reads_shape_of_second for step in steps) else ""
    if not _stands(memory, parent):
        return _SHAPE if op.reads_shape_of_second and _stands(given.args, parent) else ""
    return "all of it is overwritten" if node.writes_out or op.has(Quirk.OVERWRITES) else ""


def _stands(tree: Any, parent: Ref) -> bool:
    return parent in refs_in(tree)


def _has_numbers(made: Any) -> bool:
    return not isinstance(made, torch.Tensor) or made.is_nested or bool(made.numel())


def _weighs_one(node: Call, parent: Ref, given: Mapping[Ref, torch.Tensor]) -> bool:
    """True if attention has a single key: then all weight is on it, whatever query, key and mask are."""
    op, kwargs = info(node.target), dict(node.kwargs)
    key, value = (op.given(word, node.args, kwargs) for word in ("key", "value"))
    return type(key) is Ref and given[key].shape[-2] == 1 and parent != value


def _is_of_one(value: Mapping[Ref, Any]) -> bool:
    """True if some value of the call is constant, as a softmax over one element is."""
    return any(isinstance(made, torch.Tensor) and _is_constant(made) for made in value.values())


def _is_constant(made: torch.Tensor) -> bool:
    flat = made.detach().reshape(-1)
    return bool(flat.numel()) and bool(((flat == flat[0]) | (flat != flat) & (flat[0] != flat[0])).all())
