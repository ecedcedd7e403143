"""What the function layer cannot see: functorch, gradients taken inside the forward, scripts, custom functions.

In: a stretch of the forward that a torch function mode is blind to. Out: nodes for it all the same: the ATen calls of the
stretch, seen by a dispatch mode that lives no longer than it; or one node for a whole (a custom function, a gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .tracer import Tracer


class AtenWatch(TorchDispatchMode):
    """Tells the tracer of each ATen call that lies under none of its own."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tracer.in_leaf or torch._C._len_torch_function_stack():
            return func(*args, **kwargs)  # beneath a recorded call, or about to be seen by the function mode
        return self.tracer.aten(func, args, kwargs)


def differentiate_call(tracer: Tracer, rule: Any, func: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError


def backward_call(tracer: Tracer, rule: Any, func: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError


def apply_call(tracer: Tracer, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)
