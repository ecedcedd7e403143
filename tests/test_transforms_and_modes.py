"""A transform of torch.func before, in, around and after a block of inference mode, autocast or the like: what such a
block puts back at its end are dispatch keys, and a capture turns one on while a transform runs.
"""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from oracle import surroundings
from torch import nn
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap

import replaylens as rl


def dual(f, x):
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(x, torch.ones_like(x)))).primal


def pulled(f, x):
    y, pull = vjp(f, x)
    return y + pull(torch.ones_like(y))[0]


TRANSFORMS = {
    "vmap": lambda f, x: vmap(f, 1, 1)(x),
    "grad": lambda f, x: grad(lambda t: f(t).sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda t: f(t).sum()))(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda f, x: vjp(f, x)[0],
    "vjp, pulled": pulled,
    "jacrev": lambda f, x: jacrev(f)(x).sum((0, 1)),
    "jacfwd": lambda f, x: jacfwd(f)(x).sum((0, 1)),
    "functionalize": lambda f, x: functionalize(f)(x),
    "dual": dual,
}
BLOCKS = {
    "inference mode": torch.inference_mode,
    "inference mode, off": lambda: torch.inference_mode(False),
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "gradients on": lambda: torch.set_grad_enabled(True),
}


def curve(t):
    return t.sin() * t


def before(transform, block, x):
    y = transform(curve, x)
    with block():
        z = y @ y.T
    return z.float() + 1


def before_nothing(transform, block, x):
    y = transform(curve, x)
    with block():
        pass
    return torch.ones(3) + y


def within(transform, block, x):
    with block():
        y = transform(curve, x)
    return transform(torch.cos, y.clone())


def within_two(transform, block, x):
    with block():
        y = transform(curve, x)
        with block():
            y = y.cos()
        y = transform(curve, y)
    return y.clone()


def around(transform, block, x):
    def f(t):
        with block():
            return t.sin() * 2

    return transform(f, x)


def around_a_part(transform, block, x):
    def f(t):
        more = t * 3
        with block():
            s = t.sin()
        return s.clone() * more

    return transform(f, x) + 1


def before_one_that_raises(transform, block, x):
    y = transform(curve, x)
    try:
        with block():
            y = y.cos()
            raise KeyError
    except KeyError:
        return y.clone()


def around_one_that_raises(transform, block, x):
    def f(t):
        with block():
            t.cos()
            raise KeyError

    try:
        transform(f, x)
    except KeyError:
        with block():
            return x + 1


ORDERS = (
    before,
    before_nothing,
    within,
    within_two,
    around,
    around_a_part,
    before_one_that_raises,
    around_one_that_raises,
)
REFUSED = {(around, name, "inference mode") for name in ("jvp", "jacfwd", "dual", "vjp, pulled")}
REFUSED.add((around, "vjp, pulled", "no_grad"))


class Ordered(nn.Module):
    def __init__(self, order, transform, block):
        super().__init__()
        self.order, self.transform, self.block = order, transform, block

    def forward(self, x):
        return self.order(self.transform, self.block, x)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_order_is_captured_and_torch_is_left_as_it_was(transform, block):
    for order in ORDERS:
        model, first, other = Ordered(order, TRANSFORMS[transform], BLOCKS[block]), numbers(0), numbers(1)
        as_it_was = surroundings()
        if (order, transform, block) in REFUSED:
            with pytest.raises(rl.CaptureError):
                rl.capture(model, first)
        else:
            prog = rl.capture(model, first)
            assert surroundings() == as_it_was, order
            assert torch.equal(prog.replay().output, model(first)), order
            assert torch.equal(prog.replay(other).output, model(other)), order
        assert surroundings() == as_it_was, order
        assert torch.Tensor([1.0]).item() == 1.0  # no function mode sees this


def test_a_block_may_end_elsewhere_than_where_it_began():
    def model(x):
        mode = torch.inference_mode()
        with fwAD.dual_level():
            y = fwAD.make_dual(x, torch.ones_like(x)).sin()
            mode.__enter__()
        z = y * 2
        mode.__exit__(None, None, None)
        return z.clone()

    as_it_was = surroundings()
    assert torch.equal(rl.capture(model, numbers(0)).replay().output, model(numbers(0)))
    assert surroundings() == as_it_was


def test_a_forward_gradient_of_inference_tensors_is_refused_in_words():
    def model(x):
        return TRANSFORMS["jvp"](torch.inference_mode()(torch.sin), x)

    with pytest.raises(rl.CaptureError, match="made in inference mode") as refused:
        rl.capture(model, numbers(0))
    assert "Use `torch.no_grad()`" in str(refused.value)


def numbers(seed):
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))


def test_an_inference_mode_that_a_model_leaves_to_its_caller_to_end_puts_back_no_key_of_the_captures():
    held = []

    def model(x):
        y = vmap(torch.sin)(x)
        held.append(torch.inference_mode())
        held[-1].__enter__()
        return y * 2

    as_it_was = surroundings()
    rl.capture(model, numbers(0))
    for one in reversed(held):
        one.__exit__(None, None, None)
    assert surroundings() == as_it_was


def test_keys_that_torch_itself_puts_back_are_settled_when_the_capture_ends():
    def model(x):
        y = vmap(torch.sin)(x)
        with force_keys():
            y = y.cos()
        return y.clone()

    as_it_was = surroundings()
    assert torch.equal(rl.capture(model, numbers(0)).replay().output, model(numbers(0)))
    assert surroundings() == as_it_was


def force_keys():
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(*keys)
