"""The functions that programs call besides the model's own, and what guards ask of these.

Each is pure and found by its name. A call of one that takes a `function` stands for the model's call of that function.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from .interrupts import exclusive_generator
from .memory import copy_with_offset, detached_copy, in_layout_of
from .target import Target
from .torch_private import peek_interpreter_stack
from .trees import freeze, thaw


def as_strided_from(tensor: torch.Tensor, shape: Any, strides: Any, shift: int) -> torch.Tensor:
    """A view of a tensor's memory by sizes and strides, at an offset relative to the tensor's own."""
    return tensor.as_strided(shape, strides, tensor.storage_offset() + shift)


_BY_GEOMETRY = frozenset("resize resize_ resize_as resize_as_ resized _reshape_alias _reinterpret_tensor".split())


def addresses_memory(target: Target) -> bool:
    """True if it addresses memory by numbers of its own, and not in the order of its argument's elements."""
    return "as_strided" in target.name or target.short in _BY_GEOMETRY


def resized(
    tensor: torch.Tensor, shape: tuple[int, ...], is_filled: bool = False, strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The tensor with another number of elements: the first in memory stay; new ones are zero unless torch
    fills them.
    """
    made = tensor.new_zeros((math.prod(shape),))
    if is_filled:
        fill_uninitialized(made)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    count = min(made.numel(), tensor.numel())
    made[:count] = tensor.detach().permute(order).reshape(-1)[:count]
    return made.view(shape) if strides is None else made.as_strided(shape, strides)


def deepcopied(tensor: torch.Tensor) -> torch.Tensor:
    """What `copy.deepcopy` makes of a tensor."""
    return tensor.detach().clone()


def next_functions(tensor: torch.Tensor) -> Any:
    """The previous steps in the autograd history of a tensor."""
    return None if tensor.grad_fn is None else tensor.grad_fn.next_functions


def what_is_raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """The exception that a call raises on these values, or None. Changes nothing: the call gets copies, and the
    generator is restored.
    """
    leaf = lambda value: detached_copy(value) if isinstance(value, torch.Tensor) else value  # noqa: E731
    trees = freeze(args, leaf), freeze(kwargs, leaf)
    with exclusive_generator():
        state = torch.default_generator.get_state()
        try:
            with torch.no_grad():
                function(*thaw(trees[0], _as_is), **thaw(trees[1], _as_is))
        except Exception as error:
            return error.with_traceback(None)
        finally:
            torch.default_generator.set_state(state)
    return None


def exception_name(error: Exception | None) -> str | None:
    """The name of an exception's class."""
    return None if error is None else type(error).__qualname__


def exception_text(error: Exception | None) -> str | None:
    """The text of an exception, without memory addresses."""
    return None if error is None else f"{exception_name(error)}: {_ADDRESS.sub('0x', str(error))}"


_ADDRESS = re.compile("0x[0-9a-fA-F]+")


def _as_is(leaf: Any) -> Any:
    return leaf


def fill_new(function: Target, dtypes: tuple[torch.dtype, ...], /, *args: Any, **kwargs: Any) -> Any:
    """`function(..., out=t)` where torch gives `t` new memory: the result in the dtypes of the given tensors."""
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
        made = function.function(*args, **kwargs)
        several = isinstance(made, (tuple, list))
        cast = [one.to(dtype) for one, dtype in zip(made if several else (made,), dtypes, strict=True)]
        return tuple(cast) if several else cast[0]
    device = next((value.device for value in args if isinstance(value, torch.Tensor)), None)
    fresh = tuple([torch.empty(0, dtype=dtype, device=device) for dtype in dtypes])
    return function.function(*args, **kwargs, out=fresh if len(fresh) > 1 else fresh[0])


def blank(function: Target, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.empty` and its relatives, filled with zeros: uninitialized memory cannot be reproduced."""
    made = function.function(*args, **kwargs)
    return zero_uninitialized(made)


def blank_filled(function: Target, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The same where torch itself fills such memory, under `torch.use_deterministic_algorithms(True)`."""
    return fill_uninitialized(function.function(*args, **kwargs))


def fills_uninitialized() -> bool:
    """True if torch fills uninitialized memory."""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def fill_uninitialized(made: Any) -> Any:
    """Fill a tensor as torch does: with NaN, or the largest integer."""
    if not made.numel() or made.layout is not torch.strided or made.is_quantized:
        return made
    is_whole = not (made.is_floating_point() or made.is_complex() or made.dtype is torch.bool)
    most = torch.iinfo(made.dtype).max if is_whole else True if made.dtype is torch.bool else float("nan")
    with torch.no_grad():
        return made.fill_(most)


def zero_uninitialized(made: Any) -> Any:
    """Zero a tensor that was just allocated."""
    with torch.no_grad():
        return made.zero_() if made.numel() and made.layout is torch.strided and not made.is_quantized else made


def alias(tensor: torch.Tensor, number: int | None = None) -> torch.Tensor:
    """The tensor itself: what a module that returns its input computes. `number` tells apart several outputs of a
    module that has itself read or kept the tensor.
    """
    return tensor


def read_in_another_thread(*values: Any) -> None:
    """Stands for what another thread did with these values: it may have read all of them."""


def gathered(*parts: Any) -> tuple[Any, ...]:
    """Values of several nodes as the parts of one."""
    return parts


def in_old_layout(function: Target, value: Any, *args: Any, **kwargs: Any) -> Any:
    """A patch's result in the memory layout of the value that it replaces."""
    return in_layout_of(value, function.function(value, *args, **kwargs))


def outside_inference(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that autograd may save, for a tensor made in inference mode and passed there to a replay that runs outside
    of it. Any other tensor itself.
    """
    if not tensor.is_inference() or not torch.is_inference_mode_enabled():
        return tensor
    if type(tensor) is not torch.Tensor or vars(tensor) or peek_interpreter_stack() is not None:
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        return copy_with_offset(tensor).requires_grad_(tensor.requires_grad)
