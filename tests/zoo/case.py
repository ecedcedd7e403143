"""What a case of the zoo is, and how a model is registered as one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn, randn


@frozen
class Case:
    """A model, what to call it with, and what a fair judge must know about it."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)
    seeded: bool = False  # draws random numbers
    stateful: bool = False  # its forward changes what it holds
    escapes: bool = False  # contents or inner gradients leave what is recorded: other values may need another path
    asks_identity: bool = False  # asks which object a tensor is
    loose: bool = False  # equal but for the last bits: the fused transformer path adds up in another order
    refusal: str = ""  # why a capture or a replay may refuse it


MODELS: dict[str, Callable[[], Case]] = {}


class Net(nn.Module):
    """A module whose forward is a function of the module, and whose parts are given."""

    def __init__(self, steps: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.steps = steps
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps(self, *args, **kwargs)


@contextmanager
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


with silence():
    import torch._decomp.decompositions_for_jvp


def whole(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a function that builds a Case: seeded, and in silence."""

    @functools.wraps(build)
    def seeded() -> Case:
        with silence():
            torch.manual_seed(0)
            return build()

    MODELS[build.__name__] = seeded
    return build


def batch() -> tuple[Tensor]:
    return (randn(3, 4),)


def small(steps=None, *, parts=dict, inputs=batch, kwargs=dict, train=False, **flags):
    """Register a forward function as a model: `steps(m, *inputs)`."""
    if steps is None:
        return functools.partial(small, parts=parts, inputs=inputs, kwargs=kwargs, train=train, **flags)

    def build() -> Case:
        model = Net(steps, fc=nn.Linear(4, 4), **parts()).train(train)
        return Case(model, tuple(inputs()), kwargs(), **flags)

    build.__name__ = steps.__name__
    whole(build)
    return steps
