"""How each torch function is recorded: one Rule per function, made once and cached.

In: a callable as the function mode sees it. Out: a Rule: pass it on, open it or record it; whether it writes, draws, or
reads content. What is known of the function itself is in `_ir/ops.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
from attrs import frozen

from .._ir.ops import OpInfo, Quirk, kind_of, op_info
from .._ir.settings import are_default, product_settings_are_default
from .._ir.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket


class Handling(enum.Enum):
    """What the tracer does with a call."""

    PASS = "pass it on, it is no operation"
    LEAF = "one operation"
    FRESH = "one operation, whose output never shares memory"
    VIEW = "one operation, whose output as a rule is a view of its first argument"
    RELU = "F.relu, opened by hand"
    OPEN = "run its Python body under the mode"
    OPAQUE = "one operation, of which nothing is known"
    ESCAPE = "content leaves torch"
    EXPOSE = "memory leaves torch"
    SPECIAL = "handled by a method `_special_*` of Tracer"


@frozen
class Rule:
    """How one torch function is recorded."""

    how: Handling
    kind: str = ""  # as users write it: conv2d, maxpool2d
    writes: Callable[[tuple[Any, ...], dict[str, Any]], list[torch.Tensor]] | None = None
    reshapes: bool = False  # changes its first argument's geometry, not its content
    may_draw: bool = False
    is_dynamic: bool = False  # nothing is known of its output shape; for others see content_dependence.py
    is_identity: bool = False  # may return its argument: its output gets an alias
    is_undefined: bool = False  # gives memory with undefined content
    special: str = ""
    is_fresh: bool = False  # where it writes nothing, its output never shares memory
    is_usual: Callable[[], bool] | None = None  # returns True while the settings that select its kernel are torch's own


# By the name of the function: the method `_special_*` of Tracer that handles it.
SPECIALS = {
    "backward": "backward",
    "__deepcopy__": "deepcopy",
    "__reduce_ex__": "expose",
    "_make_dual": "dual",
    "register_hook": "hook",
    "requires_grad_": "turn",
    "set_": "assign",
    "resize_": "resize",
    "resize_as_": "resize",
}


@cache
def rule_of(function: Callable[..., Any]) -> Rule:
    """The rule of a function, by its name, its schema and the language it is written in."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return _operator_rule(function)
    if isinstance(function, HigherOrderOperator):
        return Rule(Handling.SPECIAL, kind_of(function.name()), special="higher_order")
    word = str(getattr(function, "__name__", ""))
    op = op_info(function)
    name, quirks = op.name, op.quirks
    if word in ("__get__", "__set__", "__delete__"):
        return _property_rule(op, word)
    if name == "_set_grad_enabled":
        return Rule(Handling.SPECIAL, name, special="grad_mode")
    if Quirk.LAYOUT in quirks:
        return Rule(Handling.SPECIAL, name, special="asks_layout")
    if _FLAGS & quirks and callable(getattr(torch.Tensor, name, None)) and not op.is_in_place:  # others are properties
        return Rule(Handling.SPECIAL, name, special="asks_flag")
    if isinstance(function, type) or _FACTS & quirks:
        return Rule(
            Handling.PASS, special="" if isinstance(function, type) or Quirk.MARKS_OBJECT in quirks else "reads"
        )
    if function is torch.autograd.grad:
        return Rule(Handling.SPECIAL, "grad", special="differentiate")
    if function is torch.autograd.backward or function is torch.Tensor.backward:
        return Rule(Handling.SPECIAL, "backward", special="backward")
    if op.reads_content:
        return Rule(Handling.ESCAPE, kind_of(name))
    if _EXPOSES & quirks:
        return Rule(Handling.EXPOSE, kind_of(name))
    if special := SPECIALS.get(name):
        return Rule(Handling.SPECIAL, kind_of(name), special=special)
    return _named_rule(function, op)


_BUILTIN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
_FLAGS = frozenset((Quirk.HISTORY, Quirk.OBJECT))
_FACTS = frozenset((Quirk.METADATA, Quirk.MARKS_OBJECT))
_EXPOSES = frozenset((Quirk.EXPOSES_MEMORY, Quirk.TELLS_ADDRESS))


def _named_rule(function: Callable[..., Any], op: OpInfo) -> Rule:
    kind, writes = kind_of(op.name), _writes_of(op)
    if isinstance(function, FunctionType):
        if function is torch.nn.functional.relu:
            return Rule(Handling.RELU, kind)
        if may_open(function):
            return Rule(Handling.OPEN, kind)
        if (function.__module__ or "").startswith("torch.nn.init"):
            return Rule(Handling.OPAQUE, kind, writes=_first_tensors, may_draw=True)
    if isinstance(function, FunctionType) or not isinstance(function, _BUILTIN):
        return Rule(Handling.OPAQUE, kind, writes=writes, may_draw=True, is_dynamic=True)
    if op.reshapes:
        return Rule(Handling.LEAF, kind, writes=writes, reshapes=True)
    chosen = product_settings_are_default if op.has(Quirk.KERNEL_BY_PRODUCTS) else are_default
    if op.returns_fresh and writes is None:
        return Rule(Handling.FRESH, kind, is_usual=None if op.has(Quirk.ONE_KERNEL) else chosen)
    if op.has(Quirk.UPDATES_STATISTICS) and not op.draws:
        return Rule(Handling.LEAF, kind, writes, is_fresh=True, is_usual=chosen)
    if _gives_one_view(op) and writes is None:
        return Rule(Handling.VIEW, kind)
    is_identity = op.has(Quirk.DROPOUT) and writes is None
    is_undefined = op.has(Quirk.UNDEFINED)
    return Rule(Handling.LEAF, kind, writes, may_draw=op.draws, is_identity=is_identity, is_undefined=is_undefined)


def _gives_one_view(op: OpInfo) -> bool:
    """True for functions that as a rule give a view of the first argument, by other arguments that are no tensors."""
    if op.name.startswith("_") or not op.gives_view:
        return op.name == "__getitem__"
    words = {argument.name for one in op.overloads for argument in one._schema.arguments}
    moves = op.has(Quirk.COPY_OR_VIEW) or not words.isdisjoint(("memory_format", "device"))
    return not (op.gives_several_views or op.draws or moves or "as_strided" in op.name)


def is_new_memory(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """True for `tensor.new(*sizes)`, whose content is undefined. Of a tensor or a list, `new` gives a copy."""
    return getattr(function, "__name__", "") == "new" and all(isinstance(arg, (int, torch.Size)) for arg in args[1:])


def _property_rule(op: OpInfo, word: str) -> Rule:
    name = op.name
    if word == "__get__" and _FLAGS & op.quirks:
        return Rule(Handling.SPECIAL, name, special="asks_flag")
    if word == "__get__" and op.has(Quirk.FORMAT):
        return Rule(Handling.SPECIAL, name, special="asks_layout")
    if word == "__get__" and _EXPOSES & op.quirks:
        return Rule(Handling.EXPOSE, kind_of(name))
    if word == "__get__" and op.is_free:  # `x.T`, `x.real`, `x.data`
        return Rule(Handling.LEAF, kind_of(name))
    if word == "__set__" and name in ("data", "requires_grad"):
        return Rule(Handling.SPECIAL, name, special="assign" if name == "data" else "turn")
    return Rule(Handling.PASS, special="reads" if word == "__get__" else "")


def _operator_rule(function: Any) -> Rule:
    """The rule of a `torch.ops` call, by its schema."""
    op = op_info(function)
    name, kind, is_known = op.name, kind_of(op.name), op.is_torchs
    if name in ("lift_fresh", "lift"):
        return Rule(Handling.SPECIAL, kind, special="lift")
    if (_FACTS | {Quirk.LAYOUT, Quirk.FORMAT, Quirk.HISTORY}) & op.quirks:
        return Rule(Handling.PASS)
    if op.is_data_dependent:
        return Rule(Handling.ESCAPE, kind)
    if name == "set_" and "source" in getattr(function, "_overloadname", ""):  # no mode sees the write
        return Rule(Handling.SPECIAL, kind, special="assign")
    if op.reshapes:
        return Rule(Handling.LEAF, kind, writes=_first_tensors, reshapes=True)
    if op.has(Quirk.UNDEFINED):
        return Rule(Handling.LEAF, kind, is_undefined=True)
    silent = _writes_of(op) if op.has(Quirk.UPDATES_STATISTICS) else None
    writes = _writes_by_schema(op.overloads) if op.writes else silent
    how = Handling.LEAF if is_known else Handling.OPAQUE
    return Rule(how, kind, writes, may_draw=op.draws or not is_known, is_dynamic=not is_known)


def _writes_by_schema(overloads: tuple[Any, ...]) -> Callable[..., list[torch.Tensor]]:
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


def _writes_of(op: OpInfo) -> Callable[..., list[torch.Tensor]] | None:
    if op.has(Quirk.UPDATES_STATISTICS):
        return partial(_writes_statistics, op)
    if op.has(Quirk.UPDATES_ALWAYS):
        return lambda args, kwargs: [value for value in args[1:3] if isinstance(value, torch.Tensor)]
    if op.writes_others:
        return _writes_by_schema(op.overloads)
    return _first_tensors if op.is_in_place else None


def _writes_statistics(op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    is_training = op.given("training", args, kwargs) or op.given("use_input_stats", args, kwargs)
    statistics = [op.given(word, args, kwargs) for word in ("running_mean", "running_var")]
    return [value for value in statistics if is_training and isinstance(value, torch.Tensor)]


def _first_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    first = args[0] if args else kwargs.get("self", kwargs.get("input", kwargs.get("tensor")))
    return _tensors(first)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def may_open(function: FunctionType) -> bool:
    """True for a torch function written in Python that checks `has_torch_function` first, so that its body can run."""
    names = function.__code__.co_names
    asks = any(name.startswith("has_torch_function") for name in names)
    own = function.__globals__.get("__name__") != "torch._jit_internal" and "overrides" not in names
    return asks and own and not op_info(function).has(Quirk.NEVER_OPENED)
