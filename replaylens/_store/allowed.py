"""Which functions a program of a file may call.

In: names of functions as a file has them, which may be any text, and names that its reader trusts. Out: functions. To
resolve a name first and judge it afterwards would be too late, for importing a module runs it. So a name is looked up
in a table that is made of torch's own registries, and nothing else is done with it. What is not there is imported only
if the reader has said so.

In the table is what computes with tensors: each function of torch's that has a kernel of its name, if the kernel's
schema takes and gives tensors, numbers and words alone; and the few listed that have none. So what a later torch adds
is left out if it does anything else. Loading a file calls none of them. Replaying does, with arguments of the file's:
they may ask for all memory, or end the process, as any kernel may that is given nonsense.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from .._edit import patch_ops
from .._edit.lower import apply_to_several
from .._ir import autograd, runtime
from .._ir.ops import stems
from .._ir.target import Target
from .._ir.torch_private import OPERATOR_PLACES, OpOverload, OpOverloadPacket, schemas_of_operator
from .._ir.write import mutate
from .._replay.inner_gradient import differentiate
from ..errors import UnresolvedTarget, Untrusted

# Has a kernel of its name, and is still not to be called because a file says so: why.
_WITHHELD: dict[str, frozenset[str]] = {
    "opens a file": frozenset(["from_file"]),
    "goes back through what others computed, and calls their hooks": frozenset("backward _backward grad".split()),
    "gives a tensor other memory, unseen by autograd": frozenset(["set_data"]),
    "makes views without a look at how much memory there is": frozenset(
        """_reshape_alias _reshape_alias_copy _nested_view_from_buffer _nested_view_from_buffer_copy
        _nested_view_from_jagged _nested_view_from_jagged_copy""".split()
    ),
    "begins or ends a level of torch's transforms": frozenset("_add_batch_dim _remove_batch_dim".split()),
}
# Computes with tensors or asks them, and has no kernel of its name: written in Python, or beside the kernels.
_WITHOUT_KERNEL: dict[str, frozenset[str]] = {
    "torch.Tensor": frozenset(
        """__array__ __array_wrap__ __bool__ __contains__ __dlpack__ __dlpack_device__ __float__ __floordiv__ __format__
        __getitem__ __ifloordiv__ __imod__ __index__ __int__ __invert__ __long__ __mod__ __repr__ __reversed__
        __rfloordiv__ __rmod__ __setitem__ __truediv__ _is_view _typed_storage as_subclass bfloat16 bool byte cdouble
        cfloat char const_data_ptr data_ptr dim_order double float half int ipu is_shared long lu mtia ndimension
        nelement new new_tensor numpy qscheme short storage tolist type unique untyped_storage xpu""".split()
    ),
    "torch": frozenset(
        """_sym_acos _sym_asin _sym_atan _sym_cos _sym_cosh _sym_sin _sym_sinh _sym_sqrt _sym_tan _sym_tanh asarray
        can_cast dsmm from_numpy hsmm is_grad_enabled is_inference_mode_enabled lobpcg lu pca_lowrank promote_types
        saddmm svd_lowrank sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum unique unravel_index""".split()
    ),
}
_OURS: tuple[Callable[..., Any], ...] = (
    *(runtime.alias, runtime.as_strided_from, runtime.blank, runtime.blank_filled, runtime.deepcopied),
    *(runtime.fill_new, runtime.gathered, runtime.in_old_layout, runtime.next_functions),
    *(runtime.read_in_another_thread, runtime.resized),
    *(autograd.new_parameter, autograd.requiring_grad, autograd.with_gradient_hook, autograd.with_history_of),
    *(mutate, differentiate, apply_to_several),
    *(patch_ops.add, patch_ops.apply, patch_ops.chain, patch_ops.clamp, patch_ops.mean, patch_ops.noise),
    *(patch_ops.project, patch_ops.resample, patch_ops.rotate, patch_ops.scale, patch_ops.set_value),
    *(patch_ops.take_from, patch_ops.zero),
)
# Refused under its full name, too: what runs, imports, opens or unpickles whatever it is given. With all that is in it.
_NEVER = (
    *("torch.load", "torch.save", "torch.from_file", "torch.serialization", "torch.storage", "torch.UntypedStorage"),
    *("torch.TypedStorage", "torch.Tensor.__reduce_ex__", "torch.Tensor.__setstate__", "torch.hub", "torch.package"),
    *("torch.jit", "torch.classes", "torch.library", "torch.compile", "torch.compiler", "torch.export", "torch.onnx"),
    *("torch.fx", "torch._C", "torch._dynamo", "torch._inductor", "torch.multiprocessing", "torch.utils.cpp_extension"),
    *("torch.utils.data", "torch.utils.model_zoo", "torch.distributed.rpc", "torch.distributed.elastic"),
    *("torch.distributed.checkpoint", "torch.ops.load_library", "torch.ops.import_module", "torch.ops.aten.from_file"),
    *("torch.ops.aten.save", "torch.ops.image", "torch.ops.debugprims", __package__),
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "builtins.open", "io.open"),
    *("_io.open", "_io.open_code", "builtins.getattr", "builtins.setattr", "builtins.delattr", "builtins.vars"),
    *("builtins.globals", "builtins.locals", "builtins.input", "builtins.breakpoint"),
)
_PLACES: tuple[tuple[str, Any], ...] = (
    *(("torch.Tensor", torch.Tensor), ("torch.nn.functional", torch.nn.functional), ("torch", torch)),
    *[(path, place) for path, place in OPERATOR_PLACES if path != "torch._C"],  # which is full of machinery
)
_KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_LIBRARIES = ("aten", "prims", "quantized", "quantized_decomposed", "torchvision")
# Operators of these come with torch, and go by their full names.
_OF_TORCH = frozenset((*_LIBRARIES, "prim", "c10d", "c10d_functional", "_c10d_functional", "higher_order", "profiler"))
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?", re.ASCII)
_PLAIN = re.compile(
    r"((Optional|List)\[)*"
    r"(Tensor|int|float|bool|number|complex|str|Device|Generator|__torch__\.torch\.classes\.(quantized|rnn)\.\w+)\]*"
)
_MOST_SHOWN = 20
_LONGEST = 1000


def known_function(name: str) -> Callable[..., Any] | None:
    """The function of this name that any file may call, or None. Nothing is imported, and nothing called."""
    return _functions().get(name) or _operator(name)


def needs_trust(names: Iterable[str], trust: Sequence[str] = ()) -> tuple[str, ...]:
    """Those of the names that not every file may call, and that `trust` does not let in, sorted. Nothing is imported:
    ask this of all names of a file before `trusted_target` imports the first.
    """
    entries = _entries(trust)
    return tuple(sorted({name for name in names if known_function(name) is None and not _lets_in(entries, name)}))


def trusted_target(name: str, trust: Sequence[str]) -> Target:
    """The function of this name, if any file may call it or `trust` has the name of it or of what it is in. Only then
    is a module imported.

    A trusted module may refer to others. A function that is found through it, `mypackage.ops.os.system`, must be
    trusted by the name that it has itself.
    """
    entries = _entries(trust)
    known = known_function(name)
    if known is not None:
        return Target(name, known)
    if not _lets_in(entries, name):
        raise untrusted([name])
    target = Target.named(name)
    own = _own_name(target.function)
    if own is None:
        raise UnresolvedTarget(f"{_shown(name)} is no function that is found again by a name of its own.")
    if own != name and known_function(own) is None and not _lets_in(entries, own):
        raise Untrusted(f"{_shown(name)} is another name of {_shown(own)}.\n{untrusted([own])}")
    return target


def untrusted(names: Iterable[str]) -> Untrusted:
    """The error for functions that a file may not call: which of them `trust` can let in, and how."""
    found: dict[_Why, list[str]] = {why: [] for why in _Why}
    for name in sorted(set(names)):
        found[_why_untrusted(name)].append(name)
    lines = []
    if others := found[_Why.UNKNOWN]:
        entries = _listed(_shortest_entries(others), quote='"')
        lines.append(f"The file calls functions that need your trust: {_listed(others)}.")
        lines.append(f"If you know what they do, load it with trust=[{entries}].")
    if never := found[_Why.NEVER]:
        lines.append(f"No trust lets in what runs code, imports, opens files or unpickles: {_listed(never)}.")
    if missing := found[_Why.MISSING]:
        lines.append(f"Not found in torch {torch.__version__} or in this replaylens: {_listed(missing)}.")
    if any(name.startswith("torch.ops.") for name in missing):
        lines.append("Operators of a library are found once it is imported.")
    if nameless := found[_Why.NAMELESS]:
        lines.append("No names of functions: " + _listed(nameless, quote="'") + ".")
    return Untrusted("\n".join(lines))


# -- what any file may call --------------------------------------------------------------------------------------------


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    """All functions but operators, by the names under which programs are saved."""
    made: dict[str, Callable[..., Any]] = {one.name: one.function for one in map(Target.of, _OURS)}
    for function in (*_of_kernels(), *_of_layers(), *_getters()):
        target = Target.of(function)
        if target.is_stable and target.name.startswith("torch."):
            made.setdefault(target.name, function)
    return made


def _of_kernels() -> Iterator[Callable[..., Any]]:
    words = {word for _, place in _PLACES for word in dir(place)}
    held_back = frozenset().union(*_WITHHELD.values())
    allowed = [word for word in words if word not in held_back and any(map(_has_plain_kernel, stems(word)))]
    for path, place in _PLACES:
        for word in (*allowed, *_WITHOUT_KERNEL.get(path, ())):
            function = getattr(place, word, None)
            if isinstance(function, _KINDS):
                yield function


def _of_layers() -> list[Callable[..., Any]]:
    """The functions of `torch.nn` that torch itself says compute with tensors; many are written in Python."""
    places = ("torch.nn.functional.", "torch.nn.init.")
    return [one for one in torch.overrides.get_testing_overrides() if Target.of(one).name.startswith(places)]


def _getters() -> list[Callable[..., Any]]:
    """What `x.T` and `x.shape` call."""
    found = [getattr(torch.Tensor, word, None) for word in dir(torch.Tensor) if word != "__weakref__"]
    return [one.__get__ for one in found if isinstance(one, (types.GetSetDescriptorType, property))]


@cache
def _has_plain_kernel(word: str) -> bool:
    return any(map(_is_plain, schemas_of_operator(f"aten::{word}")))


def _is_plain(schema: Any) -> bool:
    """True for an operator of tensors that takes and gives nothing but them, numbers, words and packed weights."""
    kinds = [str(one.type) for one in (*schema.arguments, *schema.returns)]
    return any("Tensor" in kind for kind in kinds) and all(map(_PLAIN.fullmatch, kinds))


def _operator(name: str) -> Callable[..., Any] | None:
    """The operator of this name: `torch.ops.aten.add`, or one overload of it, `torch.ops.aten.add.Tensor`."""
    found = _OPERATOR.fullmatch(name)
    library, word, overload = found.groups() if found else ("", "", None)
    if library not in _LIBRARIES or any(word in words for words in _WITHHELD.values()):
        return None
    overloads = [_overload(one) for one in schemas_of_operator(f"{library}::{word}") if _is_plain(one)]
    if not overloads or (overload or overloads[0]) not in overloads:
        return None
    # Namespaces and packets have attributes of their own besides, which an operator may be called like.
    packet = getattr(getattr(torch.ops, library), word)
    operator = packet if overload is None else getattr(packet, overload, None)
    kind = OpOverloadPacket if overload is None else OpOverload
    return operator if isinstance(packet, OpOverloadPacket) and isinstance(operator, kind) else None


def _overload(schema: Any) -> str:
    return schema.overload_name or "default"


# -- what a reader trusts ----------------------------------------------------------------------------------------------


def _entries(trust: Any) -> tuple[str, ...]:
    """What is trusted, one name or several."""
    entries = (trust,) if isinstance(trust, str) else trust
    if not isinstance(entries, (tuple, list, set, frozenset)) or not all(isinstance(one, str) for one in entries):
        raise TypeError(
            f'trust is a list of names of modules and functions, as trust=["mypackage.ops"], not {trust!r}.'
        )
    for entry in entries:
        if not all(map(str.isidentifier, entry.split("."))):
            raise ValueError(
                f'trust has names of modules and functions, as trust=["mypackage.ops"]; {entry!r} is none.'
            )
    return tuple(entries)


def _lets_in(entries: Iterable[str], name: str) -> bool:
    """True if one of the names is that of the function, or of what it is in. What is torch's or ours goes by its full
    name: `trust=["torch"]` says nothing of `torch.load`; of operators the library's is enough.
    """
    if not _is_dotted(name) or _is_never(name):
        return False
    return any(
        name == entry or (name.startswith(f"{entry}.") and (not _is_guarded(name) or _is_library(entry)))
        for entry in entries
    )


def _is_dotted(name: str) -> bool:
    return "." in name and len(name) <= _LONGEST and all(map(str.isidentifier, name.split(".")))


def _is_library(name: str) -> bool:
    """True for the operators of a library that is not torch's: `torch.ops.mylibrary`."""
    words = name.split(".")
    return words[:2] == ["torch", "ops"] and len(words) == 3 and words[2] not in _OF_TORCH


def _is_guarded(name: str) -> bool:
    return name.startswith(("torch.", "replaylens."))


def _is_never(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in _NEVER)


def _own_name(function: Any) -> str | None:
    """The name under which a program that calls it would be saved; None if there is none."""
    target = Target.of(function) if isinstance(function, Hashable) and callable(function) else None
    return target.name if target is not None and target.is_stable else None


# -- messages ----------------------------------------------------------------------------------------------------------


class _Why(enum.Enum):
    """Why a file may not call a function."""

    NAMELESS = "no dotted name"
    MISSING = "torch or this package has no such function"
    NEVER = "refused whatever is trusted"
    UNKNOWN = "nobody has said that it is trusted"


def _why_untrusted(name: str) -> _Why:
    if not _is_dotted(name):
        return _Why.NAMELESS
    if _is_guarded(name) and not _is_there(name):
        return _Why.MISSING
    return _Why.NEVER if _is_never(name) else _Why.UNKNOWN


def _is_there(name: str) -> bool:
    """True if torch, or this package, has a function of this name. It is looked for where everything is imported
    already, and no object is asked, so that nothing runs.
    """
    if found := _OPERATOR.fullmatch(name):
        library, word, overload = found.groups()
        overloads = [_overload(one) for one in schemas_of_operator(f"{library}::{word}")]
        return bool(overloads) and (overload or overloads[0]) in overloads
    path, *words = name.split(".")
    place: Any = sys.modules.get(path)
    for word in words:
        if isinstance(place, types.ModuleType) and place.__name__ != path:  # another's, which it only refers to
            return False
        path = f"{path}.{word}"
        place = sys.modules.get(path) or inspect.getattr_static(place, word, None)
    return isinstance(place, (*_KINDS, type, staticmethod, classmethod))


def _shortest_entries(names: Iterable[str]) -> list[str]:
    """The names of the fewest modules that these functions are in."""
    entries = {_entry_for(name) for name in names}
    return sorted(one for one in entries if entries.isdisjoint(accumulate(one.split(".")[:-1], "{}.{}".format)))


def _entry_for(name: str) -> str:
    """The module of a function, as far as its name tells: classes begin with a capital. Python's own and torch's
    modules have more in them than anybody would trust.
    """
    words = name.split(".")
    if _is_library(library := ".".join(words[:3])):
        return library
    if _is_guarded(name) or words[0] in sys.stdlib_module_names:
        return name
    classes = [number for number, word in enumerate(words[:-1]) if number and word.lstrip("_")[:1].isupper()]
    return ".".join(words[: classes[0] if classes else -1])


def _listed(names: Sequence[str], quote: str = "") -> str:
    shown = [f"{quote}{_shown(name)}{quote}" for name in names[:_MOST_SHOWN]]
    return ", ".join([*shown, *([f"and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else [])])


def _shown(name: str) -> str:
    """A name of which nothing looks like something else."""
    shown = ascii(name)[1:-1]
    return shown if len(shown) <= 120 else f"{shown[:120]}..."
