"""Scripted, compiled, higher-order, custom."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn, randn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .case import Case, Net, batch, silence, small, whole


def double_and_shift(x: Tensor, k: float) -> Tensor:
    if k > 1.0:
        return x * k + 1
    return x - k


@small(refusal="gradients of what TorchScript computes")
def scripted_function(m, x):
    return scripted()(m.fc(x), 2.0) * scripted()(x, 0.5)


@functools.lru_cache
def scripted():
    with silence():
        return torch.jit.script(double_and_shift)


@whole
def scripted_module():
    inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    return Case(nn.Sequential(nn.Linear(4, 4), inner, nn.Tanh()), batch())


@whole
def scripted_model():
    return Case(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))), batch())


@whole
def traced_submodule():
    inner = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()), randn(3, 4))
    return Case(Net(lambda m, x: m.inner(m.fc(x)) + x, fc=nn.Linear(4, 4), inner=inner), batch())


@whole
def scripted_batchnorm():
    inner = torch.jit.script(nn.BatchNorm1d(4).train())
    return Case(nn.Sequential(nn.Linear(4, 4), inner).train(), batch(), stateful=True)


@whole
def symbolic_trace():
    return Case(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))), batch())


@whole
def exported_model():
    exported = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), batch())
    return Case(exported.module(), batch(), escapes=True)


@whole
def compiled_submodule():
    torch.compiler.reset()
    inner = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    return Case(Net(lambda m, x: m.inner(x) + m.fc(x), fc=nn.Linear(4, 4), inner=inner), batch())


@whole
def compiled_in_place():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model[1].compile(backend="eager")
    return Case(model, batch())


@whole
def compiled_model():
    torch.compiler.reset()
    return Case(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager"), batch())


@whole
def compiled_function():
    torch.compiler.reset()
    gate = torch.compile(lambda a, b: a.sigmoid() * b, backend="eager")

    def forward(m, x):
        with silence():  # the compiler looks at `.grad`
            return gate(m.fc(x), x)

    return Case(Net(forward, fc=nn.Linear(4, 4)), batch())


@small(escapes=True)
def branch_by_cond(m, x):
    return torch.cond(x.sum() > 0, lambda t: m.fc(t).relu(), lambda t: m.fc(t).tanh(), (x,))


@small(inputs=lambda: (randn(1, 2, 8, 4),))
def flexible_attention(m, x):
    with silence():  # it warns that it is slow when it is not compiled
        q, k = m.fc(x).detach(), x.detach()  # on this device it has no backward
        return flex_attention(q, k, k, score_mod=lambda score, b, h, i, j: score + (i - j))


@torch.library.custom_op("zoo::shifted", mutates_args=())
def shifted(x: Tensor, by: float) -> Tensor:
    return x * 2 + by


shifted.register_autograd(lambda ctx, g: (g * 2, None))


@torch.library.custom_op("zoo::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, x: Tensor) -> None:
    total += x


@torch.library.custom_op("zoo::bump", mutates_args={"x"})
def bump(x: Tensor, by: float) -> Tensor:
    old = x.clone()
    x.numpy()[...] += by
    return old


LIBRARY = torch.library.Library("zoo", "FRAGMENT")
LIBRARY.define("halve(Tensor x) -> Tensor")
LIBRARY.impl("halve", lambda x: x / 2, "CompositeImplicitAutograd")


@small
def custom_op(m, x):
    return shifted(m.fc(x), 1.0) + torch.ops.zoo.shifted(x, 0.5)


@small
def custom_op_that_writes(m, x):
    total = torch.zeros(3, 4)
    accumulate(total, m.fc(x).detach())
    torch.ops.zoo.accumulate.default(total[1:], x[1:].detach())
    return total + m.fc(x)


@small
def custom_op_that_writes_unseen(m, x):
    y = m.fc(x).detach()
    v = y[0]
    old = bump(y, 3.0)
    return v + old + m.fc(x)


@small
def custom_op_of_a_library(m, x):
    return torch.ops.zoo.halve(m.fc(x))


@small
def aten_ops_by_hand(m, x):
    y = torch.ops.aten.addmm(m.fc.bias, x, m.fc.weight.t())
    torch.ops.aten.relu_.default(y)
    return torch.ops.aten.slice.Tensor(y, 1, 0, 2) + torch.ops.prims.sin(x)[:, :2]


class Tagged(Tensor):
    """A subclass that carries a word."""

    word = "tag"


class Logged(Tensor):
    """A subclass with its own __torch_function__."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@small(inputs=lambda: (randn(3, 4).as_subclass(Tagged),))
def tensor_subclass(m, x):
    return m.fc(x).relu() + 1


@small(inputs=lambda: (randn(3, 4).as_subclass(Logged),))
def tensor_subclass_with_a_protocol(m, x):
    return torch.cat([m.fc(x), x]) * 2


@small
def tensor_subclass_inside(m, x):
    y = m.fc(x).as_subclass(Tagged)
    return (y * 2).as_subclass(Tensor) + 1


class Wrapped(Tensor):
    """A subclass that holds another tensor and sees every ATen call."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, args)
        return torch.utils._pytree.tree_map_only(Tensor, Wrapped, func(*args, **(kwargs or {})))


@small(refusal="what a wrapper subclass does lies beneath torch functions")
def tensor_subclass_that_dispatches(m, x):
    y = Wrapped(m.fc(x).detach()) * 2
    return (y + 1).inner + m.fc(x)


class Halve(TorchDispatchMode):
    """A dispatch mode of the user's: every exponential is halved."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is torch.ops.aten.exp.default else out


@small(refusal="what a dispatch mode does lies beneath torch functions")
def dispatch_mode_of_the_users(m, x):
    with Halve():
        y = m.fc(x).exp()
    return y + x.exp()


class Negate(TorchFunctionMode):
    """A mode of the user's: every sine is its negative."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return -out if func is torch.sin else out


@small
def function_mode_of_the_users(m, x):
    with Negate():
        y = torch.sin(m.fc(x))
    return y + torch.sin(x)


@small
def default_device_inside(m, x):
    with torch.device("cpu"):
        return m.fc(x) + torch.ones(4)


@small(refusal="nothing is seen of what runs with torch functions disabled")
def torch_functions_disabled(m, x):
    with torch._C.DisableTorchFunction():
        y = x * 2
    return m.fc(y)
