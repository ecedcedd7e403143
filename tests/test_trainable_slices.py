"""A module of a program is the model up to a layer: the same bits, gradients and statistics, at any size of batch that
leads to the same program; and an error that says why at any other.
"""

import copy

import pytest
import torch
from oracle import assert_same
from shaped_models import MODELS, REFUSED
from torch import nn
from torch.utils._pytree import tree_leaves

import replaylens as rl

SIZES = (2, 1, 3, 7, 2, 3)


def pictures(size, seed=0):
    return torch.randn(size, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


class Blocks(nn.Module):
    """A small residual network, of which each module counts its calls."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Dropout(0.3), nn.ReLU())
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.layer1(x)
        x = self.layer2(x)
        return self.fc(self.pool(x).flatten(1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Blocks()


def hooked(model, names, x):
    """What modules of a model give in one forward, by name, as hooks see it."""
    found = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: found.__setitem__(name, out.clone())
        )
    found["out"] = model(x)
    for name in names:
        model.get_submodule(name)._forward_hooks.clear()
    return found


def said(kind, action):
    with pytest.raises(kind) as error:
        action()
    assert error.type is kind
    return str(error.value)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def gradients(output, leaves):
    wanted = [leaf for leaf in tensors(output) if leaf.requires_grad]
    return torch.autograd.grad(sum(one.square().sum() for one in wanted), leaves, allow_unused=True)


# ---- other sizes of batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_the_model_at_other_sizes_of_batch_or_says_that_it_is_not(name):
    model, inputs = MODELS[name]()
    twin = copy.deepcopy(model)
    module = rl.capture(model, *inputs(2)).module()
    twin(*inputs(2))
    needs_grad = not name.startswith("Writes")
    for size in SIZES:
        given, same = ([x.requires_grad_(needs_grad) for x in inputs(size)] for _ in range(2))
        torch.manual_seed(size)
        if size in REFUSED[name]:
            with pytest.raises(rl.InputMismatch, match="computes something else"):
                module(*given)
            assert_same(torch.get_rng_state(), torch.manual_seed(size).get_state())
        else:
            found, state = module(*given), torch.get_rng_state()
            assert_same(given, list(inputs(size)))
            torch.manual_seed(size)
            wanted = twin(*same)
            assert_same(found, wanted)
            assert_same(state, torch.get_rng_state())
            pairs = (found, [*model.parameters(), *given]), (wanted, [*twin.parameters(), *same])
            found, wanted = [gradients(out, [leaf for leaf in leaves if leaf.requires_grad]) for out, leaves in pairs]
            assert_same(found, wanted)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
