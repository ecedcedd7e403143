"""Models of two layers, and what their own backward gives: the witness for gradients of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two layers, a buffer, and a forward that is handed them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.register_buffer("count", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def made(forward: Callable[..., Any]) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net(forward), torch.randn(3, 4), torch.randn(3, 4)


def leaf_of(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def taken(model: nn.Module, x: Tensor, output: Tensor) -> dict[str, Tensor | None]:
    """The gradients that a weighted sum of the output leaves in the input and the parameters."""
    leaves = {"x": x, **dict(model.named_parameters())}
    weights = torch.arange(1.0, output.numel() + 1).reshape(output.shape)
    (output * weights).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def assert_same(wanted: dict[str, Tensor | None], got: dict[str, Tensor | None]) -> None:
    for name, gradient in wanted.items():
        other = got[name]
        assert (gradient is None) == (other is None), f"{name}: {other}, not {gradient}"
        assert gradient is None or torch.equal(gradient, other), f"{name}: {other}, not {gradient}"


def witness(forward: Callable[..., Any], on_first: bool, hook: Any = None) -> tuple[Tensor, dict[str, Tensor | None]]:
    model, first, other = made(forward)
    x = leaf_of(first if on_first else other)
    if hook is not None:
        model.a.register_forward_hook(lambda module, args, out: hook(out))
    output = model(x)
    return output, taken(model, x, output)
