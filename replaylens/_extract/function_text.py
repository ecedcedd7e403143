"""Functions as texts by which plans are compared: the name, and a digest of the code and of what it holds.

In: a function of the user's. Out: a text that is the same in every process, and another for another function: where
it closes over another constant, or has another default, or reads another number or tensor from its module, or is a
network with other weights. What other functions do that it calls is not looked into.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from .numpy_later import np


def function_text(function: Any) -> str:
    """The name of a function and a digest of its code and of what it holds: another function has another text."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    held = _said(function, ())
    return name if held == name else f"{name} {hashlib.sha256(held.encode()).hexdigest()[:12]}"


def _said(value: Any, within: tuple[int, ...]) -> str:
    """A value in words, which are the same in every process. What shows nothing of itself is its type."""
    if id(value) in within:
        return "itself"
    inside = (*within, id(value))

    def several(values: Iterable[Any]) -> str:
        return ", ".join([_said(one, inside) for one in values])

    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type(...), torch.dtype)):
        return repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _digest_of_numbers(torch.as_tensor(value))
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {several(value.co_consts)}"
    if isinstance(value, FunctionType):
        used = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        data = [one for one in used if isinstance(one, (int, float, complex, str, torch.Tensor, np.ndarray))]
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        return several([value.__code__, value.__defaults__, value.__kwdefaults__, cells, data])
    if isinstance(value, MethodType):
        return several([value.__func__, value.__self__])
    if isinstance(value, partial):
        return several([value.func, value.args, value.keywords])
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__qualname__} {_said(dict(value.state_dict()), inside)}"
    if isinstance(value, Mapping):
        return several(item for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple)):
        return several(value)
    if isinstance(value, (set, frozenset)):
        return ", ".join(sorted(_said(one, inside) for one in value))
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return several([name, vars(value)]) if type(value).__module__ != "builtins" and hasattr(value, "__dict__") else name


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _digest_of_numbers(tensor: torch.Tensor) -> str:
    found = tensor.detach().cpu().contiguous()
    raw = found.reshape(-1).view(torch.uint8).numpy().tobytes() if found.numel() else b""
    return f"{found.dtype} {tuple(found.shape)} {hashlib.sha256(raw).hexdigest()}"
