"""What autograd knows of a tensor is asked of the model's own, also where a copy stands in for it; and a value whose flag
the model turns itself may be patched by any tensor.
"""

import pytest
import torch
from torch import nn

import replaylens as rl


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.steps = nn.Linear(4, 4), forward

    def forward(self, x):
        return self.steps(self, x)


def descend(m, x, optimiser):
    with torch.enable_grad():
        for _ in range(3):
            optimiser.zero_grad()
            m.fc(x.detach()).square().mean().backward()
            optimiser.step()
    optimiser.zero_grad()
    return m.fc(x)


def sgd(m, x):
    return descend(m, x, torch.optim.SGD(m.fc.parameters(), lr=0.1))


def momentum(m, x):
    return descend(m, x, torch.optim.SGD(m.fc.parameters(), lr=0.1, momentum=0.9))


def gradients_by_hand(m, x):
    with torch.enable_grad():
        for _ in range(3):
            m.fc(x.detach()).square().mean().backward()
            with torch.no_grad():
                for p in m.fc.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)
                        p.grad = None
    return m.fc(x)


def is_it_a_leaf(m, x):
    with torch.no_grad():
        m.fc.weight.mul_(2.0)
    return m.fc(x) if m.fc.weight.is_leaf else x


def needs_it_gradients(m, x):
    with torch.no_grad():
        m.fc.weight.mul_(2.0)
    return m.fc(x) if m.fc.weight.requires_grad and m.fc.weight.grad_fn is None else x


@pytest.mark.parametrize("forward", [sgd, momentum, gradients_by_hand, is_it_a_leaf, needs_it_gradients])
@pytest.mark.parametrize("patched", [False, True])
def test_a_live_run_asks_the_models_own_parameters(forward, patched):
    x = torch.randn(3, 4)
    plain, model = Model(forward), Model(forward)
    if patched:
        plain.fc.register_forward_hook(lambda module, args, out: out * 0.5 if not hooked.append(1) else None)
    hooked = []
    wanted = plain(x)
    if patched and len(hooked) > 1:  # a hook acts at each call
        patch = {f"fc:{number + 1}": rl.Scale(0.5) for number in range(len(hooked))}
    else:
        patch = {"fc": rl.Scale(0.5)} if patched else {}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = rl.run(model, x, patch=patch)
    assert torch.allclose(run.output, wanted, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def leaf_of_its_own(m, x):
    with torch.enable_grad():
        leaf = m.fc(x).detach().requires_grad_()
        leaf.square().sum().backward()
    return leaf.grad + leaf.detach()


def leaf_by_the_setter(m, x):
    with torch.enable_grad():
        leaf = m.fc(x).detach()
        leaf.requires_grad = True
        (leaf**3).sum().backward()
    return leaf.grad if leaf.requires_grad else x


@pytest.mark.parametrize(
    ("forward", "wanted"), [(leaf_of_its_own, lambda v: 3 * v), (leaf_by_the_setter, lambda v: 3 * v**2)]
)
@pytest.mark.parametrize("flag", [False, True])
def test_a_value_whose_flag_the_model_turns_takes_any_patch(forward, wanted, flag):
    prog = rl.capture(Model(forward), torch.randn(3, 4))
    for factor in 1.0, 2.0:
        value = (prog["requiresgrad_1"].value * factor).requires_grad_(flag)
        run = prog.replay(patch={"requiresgrad_1": value}, on_divergence="raise")
        assert torch.allclose(run.output, wanted(value.detach()))
