"""What functions of a job keep from one call to the next: a generator of their own, a counter, a norm's statistics.

In: the payload of a job, as a worker read it. Out: a snapshot of what its functions hold, and the first place that is
another one after a task. One process would give out its state in the order of the work; workers each begin anew, and
which task finds what would be a matter of time. So a function that keeps state is refused. What is filled in once is no
such state: a None that becomes something, a new key of a dict. Of data, which may well keep the last file that they
opened, only generators are asked.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .._capture.user_code import nested_code
from .._store.objects import is_program
from ..errors import PlanDiffers
from .module_numbers import is_of_user

Leaves = dict[str, str]
_NUMBERS = (bool, int, float, complex, str, bytes)
_CELLS = (dict, list, tuple, set, frozenset, deque)
_OPAQUE = (torch.Tensor, torch.dtype, torch.device, ModuleType, CodeType, *_NUMBERS)
_SMALL = 1 << 16  # bytes: of larger ones it is asked whether torch wrote to them
_MOST = 20_000  # places of one function


class KeptState:
    """What the functions of a payload hold, as it was."""

    def __init__(self, payload: Any) -> None:
        self._holders = [] if getattr(payload, "may_keep_state", False) else list(_holders(payload))
        self._before = [_leaves(one) for one in self._holders]

    def require_same(self) -> None:
        """Raise if a function holds something else now."""
        for holder, before in zip(self._holders, self._before, strict=True):
            after = _leaves(holder) if before else before
            for place, leaf in before.items():
                if leaf != "None" and after.get(place, leaf) != leaf:
                    raise PlanDiffers(
                        f"{_said(holder)} keeps state from one call to the next, in `{place.lstrip('.')}`: results "
                        "would depend on which worker does which task.\nGive a function whose result depends on its "
                        "arguments alone: make what it changes anew in each call, and draw from torch's global "
                        "generator, whose state each task is given. Or run without executor=."
                    )


def _said(holder: Any) -> str:
    if isinstance(holder, partial):
        return _said(holder.func)
    name = getattr(holder, "__qualname__", None)
    return f"`{name}`" if name else f"a {type(holder).__name__}"


def _holders(payload: Any) -> Iterator[Any]:
    """The outermost things of a payload that are the user's, or that draw or learn."""
    stack, seen = [payload], dict[int, Any]()
    while stack:
        what = stack.pop()
        if id(what) in seen or what is None or isinstance(what, (*_OPAQUE, type)) or is_program(what):
            continue
        seen[id(what)] = what
        if isinstance(what, MethodType):
            stack += [what.__self__, what.__func__]
        elif _is_generator(what) or isinstance(what, torch.nn.Module) or _is_users(what):
            yield what
        else:
            stack += [inner for _, inner in _inside(what)]


def _is_users(what: Any) -> bool:
    if isinstance(what, partial):
        return _is_users(what.func)
    return is_of_user(what if isinstance(what, FunctionType) else type(what))


def _leaves(holder: Any) -> Leaves:
    """The numbers, texts, tensors and states of generators that something holds, by place."""
    is_data = hasattr(holder, "__getitem__") and not isinstance(holder, torch.nn.Module)
    found: Leaves = {}
    stack, seen = [("", holder)], dict[int, Any]()
    while stack and len(seen) < _MOST:
        place, what = stack.pop()
        leaf = _leaf(what)
        if leaf is not None and (not is_data or _is_generator(what)):
            found[place] = leaf
        if isinstance(what, _OPAQUE) or leaf == "None" or id(what) in seen or is_program(what) or _is_generator(what):
            continue
        seen[id(what)] = what
        if isinstance(what, (list, set, deque)) and not is_data:
            found[f"len({place.lstrip('.')})"] = str(len(what))
        stack += [(f"{place}{name}", inner) for name, inner in _inside(what)]
    return found


def _leaf(what: Any) -> str | None:
    """A number, text or state in short; None for what is none."""
    if what is None or isinstance(what, _NUMBERS):
        return f"{what!r:.200}"
    if isinstance(what, torch.Tensor):
        return _of_tensor(what)
    if _is_generator(what):
        return _of_generator(what)
    if type(what).__module__ == "itertools":
        return repr(what)
    if hasattr(what, "__next__") and hasattr(what, "__length_hint__"):
        return str(what.__length_hint__())
    if _name(what) == "numpy.ndarray" and what.dtype != object and what.nbytes <= _SMALL:
        return _digest(what.tobytes())
    return None


def _of_tensor(value: torch.Tensor) -> str:
    version = "" if value.is_inference() else str(value._version)
    is_small = value.device.type == "cpu" and value.layout is torch.strided and value.numel() * value.itemsize <= _SMALL
    if not is_small or type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_quantized:
        return version
    return version + _digest(value.detach().contiguous().resolve_conj().resolve_neg().flatten().view(torch.uint8))


def _digest(data: Any) -> str:
    return hashlib.sha256(bytes(data.tolist()) if isinstance(data, torch.Tensor) else data).hexdigest()


def _is_generator(what: Any) -> bool:
    is_known = isinstance(what, (torch.Generator, random.Random))
    return is_known or _name(what) in ("numpy.random._generator.Generator", "numpy.random.mtrand.RandomState")


def _of_generator(what: Any) -> str:
    if isinstance(what, torch.Generator):
        return _digest(what.get_state())
    if isinstance(what, random.Random):
        return _digest(repr(what.getstate()).encode())
    state = what.get_state(legacy=False) if hasattr(what, "get_state") else what.bit_generator.state
    return _digest(repr(_plain(state)).encode())


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(inner) for key, inner in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def _name(what: Any) -> str:
    return f"{type(what).__module__}.{type(what).__qualname__}"


def _inside(what: Any) -> Iterator[tuple[str, Any]]:
    """What something holds, and how it is reached."""
    if isinstance(what, dict):
        yield from [(f"[{key!r:.60}]", inner) for key, inner in what.items()]
    elif isinstance(what, (list, tuple, deque)):
        yield from [(f"[{number}]", inner) for number, inner in enumerate(what)]
    elif isinstance(what, FunctionType):
        yield from _inside_function(what)
    elif isinstance(what, MethodType):
        yield from [(".__self__", what.__self__), (".__func__", what.__func__)]
    elif isinstance(what, partial):
        yield from [(".func", what.func), (".args", what.args), (".keywords", what.keywords)]
    elif isinstance(what, type):
        yield from [(f".{name}", inner) for name, inner in vars(what).items()] if is_of_user(what) else ()
    elif not isinstance(what, (set, frozenset)):
        yield from [(f".{name}", inner) for name, inner in getattr(what, "__dict__", {}).items()]
        slots = [name for cls in type(what).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
        yield from [(f".{name}", getattr(what, name)) for name in slots if hasattr(what, name)]
        if is_of_user(type(what)):
            yield f".{type(what).__name__}", type(what)


def _names(slots: Any) -> list[str]:
    every = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in every if name not in ("__dict__", "__weakref__")]


def _inside_function(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a user's function keeps between its calls: of others nothing is asked."""
    if not isinstance(function, FunctionType) or not is_of_user(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell.__repr__().find("empty") < 0:
            yield f".{name}", cell.cell_contents
    yield ".__defaults__", function.__defaults__ or ()
    yield ".__kwdefaults__", function.__kwdefaults__ or {}
    yield from [(f".{name}", inner) for name, inner in vars(function).items()]
    known = function.__globals__
    names = dict.fromkeys([name for code in nested_code(function.__code__) for name in code.co_names])
    yield from [(f".{name}", known[name]) for name in names if name in known]
