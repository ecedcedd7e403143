"""Every ATen call of a stretch of Python, reduced to what it computes, with the place that it came from.

In: a stretch, as a context. Out: what was called, in order: an OpSignature says what sort of work a call is, its name
without the marks of writing, the shapes and dtypes of the tensors that it reads, so that a program's calls and the
model's own can be counted against each other. It follows from operators' schemas and from the tables here, which are
data. Nothing is changed.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from functools import cache, partial
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from .._capture.builder import Site, line_of
from .._capture.bytecode import is_torch_code
from .._core.node import Call, Guard, Node, Source, TensorMeaning
from .._core.ops import Quirk, info, stems
from .._core.torch_private import HigherOrderOperator, OpOverload, TorchDispatchMode, has_kernel, top_saving_hooks


class OpClass(enum.Enum):
    """What an ATen call is for. Only the first four are counted."""

    COMPUTE = "computes"
    CAST = "changes a dtype or a device"
    FILL = "fills memory with one number"
    READ = "hands content to Python"
    MOVE = "looks at memory, copies it or allocates it"


class OpSignature(NamedTuple):
    """A call without what purity may change of it: `add_.Tensor` and `add.out` are `add` of the same operands."""

    sort: OpClass
    name: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.operands)})"


QUIET = frozenset(("profiler",))  # namespaces of operators that only look on
UNSAFE = ("_unsafe_", "unsafe_")  # views that autograd may not see through


def signature_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpSignature:
    """What a call was. `out` is what it gave."""
    if not isinstance(op, OpOverload):  # a higher-order operator
        return OpSignature(OpClass.COMPUTE, op.name(), tuple(map(described, _tensors((args, kwargs)))))
    sort, name = reduced(op)
    if sort is OpClass.FILL:
        return OpSignature(sort, "fill", tuple(map(described, _tensors(out))))
    operands = tuple(map(described, _operands(op, args, kwargs)))
    if sort is OpClass.MOVE and info(name).has(Quirk.COPY) and (cast := _cast(name, args, out)):
        return OpSignature(OpClass.CAST, "cast", cast)
    return OpSignature(sort, name, operands)


@cache
def reduced(op: Any) -> tuple[OpClass, str]:
    """What sort of work an operator does, and its name without the marks of writing."""
    namespace, name = op._schema.name.split("::")
    name = _unmarked(namespace, name) if op._schema.is_mutable else name
    plain = info(name.removeprefix("new_").removesuffix("_like"))
    if plain.has(Quirk.FILL):
        return OpClass.FILL, "fill"
    is_move = plain.has(Quirk.ALLOCATION) or info(name).has(Quirk.COPY) or info(op).reshapes
    if is_move or _is_view(namespace, op, name):
        return OpClass.MOVE, name
    if op._schema.is_mutable or any("Tensor" in str(value.type) for value in op._schema.returns):
        return OpClass.COMPUTE, name
    reads = namespace not in QUIET and (namespace != "aten" or info(op).is_data_dependent)
    return (OpClass.READ if reads else OpClass.MOVE), name


def _unmarked(namespace: str, name: str) -> str:
    """`add` for `add_`, `__and__` for `__iand__`, where there is such an operator."""
    return next((stem for stem in stems(name) if stem != name and hasattr(getattr(torch.ops, namespace), stem)), name)


def _is_view(namespace: str, op: Any, name: str) -> bool:
    """Does it look at an argument's memory, or copy what a view of it would show, or write there?"""
    plain = [name.removesuffix("_copy"), name.removesuffix("_scatter"), *(name.removeprefix(mark) for mark in UNSAFE)]
    viewing = [getattr(getattr(torch.ops, namespace), one, None) for one in plain if one != name]
    return info(op).gives_view or any(one is not None and info(one).gives_view for one in viewing)


def _cast(name: str, args: tuple[Any, ...], out: Any) -> tuple[str, ...]:
    """From what to what a copy takes numbers; nothing where they stay as they are."""
    source = args[1] if name == "copy" and len(args) > 1 else args[0] if args else None
    if not isinstance(source, torch.Tensor) or not isinstance(out, torch.Tensor):
        return ()
    same = source.dtype == out.dtype and source.device == out.device
    return () if same or out.is_meta else (described(source), str(out.dtype).removeprefix("torch."), str(out.device))


def _operands(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call reads, in the order of its schema: all but those that `out=` names."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.is_out:
            continue
        yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def described(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, in short."""
    return str(TensorMeaning.of(tensor))


class AtenCall(NamedTuple):
    """One ATen call: what it was, the line of Python, and the node or guard of a program that it ran for."""

    signature: OpSignature
    site: Site | None
    step: Node | Guard | None = None
    within: str = ""  # which part of torch's own it lies beneath: see WITHIN and AGAIN
    in_gradient: bool = False  # the engine that takes gradients made it
    builds: bool | None = False  # were gradients on? None where a program need not have them as the model has

    @property
    def source(self) -> Source | None:
        """The line of Python that it came from."""
        return self.step.source if isinstance(self.step, (Call, Guard)) else line_of(self.site)


# Files of torch beneath which calls are no operations of the model's: what content left torch there is guarded.
WITHIN = {"torch/_tensor_str.py": "text", "torch/storage.py": "storage"}

AGAIN = "again"  # beneath a checkpoint that a gradient makes compute again what the forward computed
CHECKPOINTS = "torch/utils/checkpoint.py"

# Files of torch whose functions run others with gradients on or off as they need it, which a program has open.
TRANSFORMS = ("torch/_functorch/", CHECKPOINTS)
GRADIENTS = frozenset(("_engine_run_backward", "_make_grads"))  # functions of torch's that take gradients


class Watch(TorchDispatchMode):
    """Writes down every ATen call of its thread."""

    supports_higher_order_operators = True

    def __init__(self, until: CodeType | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[AtenCall] = []
        self.step: Node | Guard | None = None
        self.packing: set[CodeType] = set()  # what the user's hooks on saved tensors run: no operations of the forward
        self.until = until  # the code that called the model: lines above it are not the model's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) and func.name() == "cond" and len(args) >= 3:
            with self:  # the branch that is taken, as it is recorded
                return (args[1] if bool(args[0]) else args[2])(*(args[3] if len(args) > 3 else ()))
        if _is_composite(func):  # where autograd is off (inference mode), torch would take it apart below this mode
            with self:
                return func.decompose(*args, **kwargs)
        builds = torch.is_grad_enabled() if forward_ad._current_level < 0 else None
        out = func(*args, **kwargs)
        code = code_of(hooks[0]) if (hooks := top_saving_hooks(False)) is not None else None
        if code is not None and not code.co_filename.endswith(CHECKPOINTS):
            self.packing.add(code)
        if self.packing and self._packs():
            return out
        site, within, in_gradient, is_transformed = self._place()
        builds = None if is_transformed else builds
        self.seen.append(AtenCall(signature_of(func, args, kwargs, out), site, self.step, within, in_gradient, builds))
        return out

    def _packs(self) -> bool:
        """Does a hook on a saved tensor make this call?"""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in self.packing and frame.f_code is not self.until:
            frame = frame.f_back
        return frame is not None and frame.f_code in self.packing

    def _place(self) -> tuple[Site | None, str, bool, bool]:
        """The nearest line that is not torch's, else a module's own; the part of torch beneath it; is it a gradient? Is
        it in a transform?
        """
        frame: FrameType | None = sys._getframe(2)
        users, modules, within, in_gradient, is_transformed, is_kept = None, None, "", False, False, False
        while frame is not None and frame.f_code is not self.until:
            code = frame.f_code
            if not is_torch_code(code):
                users = users or (code, frame.f_lasti)
            elif code.co_name in GRADIENTS:
                within, in_gradient = (AGAIN if is_kept else within), True
            elif _is_transform(code):
                is_transformed = True
                is_kept = is_kept or _keeps(code, in_gradient)
            elif users is None:
                within = within or _word(code)
                modules = modules or ((code, frame.f_lasti) if "/torch/nn/" in code.co_filename else None)
            frame = frame.f_back
        return users or modules, within, in_gradient, is_transformed


def is_within_gradient() -> bool:
    """Does torch take a gradient of the model's just now?"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in GRADIENTS and is_torch_code(frame.f_code):
            return True
        frame = frame.f_back
    return False


def code_of(function: Any) -> CodeType | None:
    """The code that a call of this runs, if it is written in Python."""
    while isinstance(function, partial):
        function = function.func
    function = unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


@cache
def _is_composite(func: Any) -> bool:
    """Is it written in terms of other operators, so that those do the work?"""
    return isinstance(func, OpOverload) and bool(has_kernel(func.name(), "CompositeImplicitAutograd"))


@cache
def _is_transform(code: CodeType) -> bool:
    return any(part in code.co_filename for part in TRANSFORMS)


def _keeps(code: CodeType, in_gradient: bool) -> bool:
    """Is it a checkpoint? One that is reentrant takes gradients in its `backward`, too: those are no second ones."""
    return code.co_filename.endswith(CHECKPOINTS) and not (in_gradient and code.co_name == "backward")


def _word(code: CodeType) -> str:
    return next((word for file, word in WITHIN.items() if code.co_filename.endswith(file)), "")
