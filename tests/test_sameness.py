"""Two values are the same if no one who reads them can tell them apart."""

import pytest
import torch
from internals import difference, same

import replaylens as rl


def quantized(scale):
    whole = torch.arange(4, dtype=torch.uint8)
    return torch._make_per_tensor_quantized_tensor(whole, scale, 0)


def nested(last):
    return torch.nested.nested_tensor([torch.ones(2), torch.full((3,), last)])


NAN = float("nan")
PAIRS = {
    "numbers": (torch.ones(3), torch.tensor([1.0, 1.0, 2.0])),
    "zeros": (torch.zeros(3), -torch.zeros(3)),
    "nan": (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN])),
    "types": (torch.ones(3), torch.ones(3, dtype=torch.float64)),
    "shapes": (torch.ones(3), torch.ones(3, 1)),
    "layouts": (torch.eye(3), torch.eye(3).to_sparse()),
    "sparse": (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "nested": (nested(1.0), nested(2.0)),
    "complex": (torch.ones(2, dtype=torch.cfloat), torch.tensor([1 + 0j, 1 + 1e-7j])),
    "conjugated": (torch.tensor([1 + 1j]).conj(), torch.tensor([1 + 1j])),
    "bits of halves": (torch.ones(2).half(), torch.ones(2).half() + 0.001),
    "booleans": (torch.tensor([True, False]), torch.tensor([True, True])),
    "quantised on another scale": (quantized(0.1), quantized(0.2)),
    "plain ones": (0.0, -0.0),
    "kinds": (1, True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_value_is_the_same_as_itself_and_its_copy_and_not_as_another(name):
    one, other = PAIRS[name]
    for value in (one, other):
        assert same(value, value)
        assert same(value, value.clone() if isinstance(value, torch.Tensor) else type(value)(value))
    assert not same(one, other) and not same(other, one)


def test_patches_are_the_same_by_the_same_rule():
    for one, other in PAIRS.values():
        if isinstance(one, torch.Tensor) and not one.is_nested:
            assert rl.Set(one) == rl.Set(one.clone()) and rl.Set(one) != rl.Set(other)


def test_with_zeros_the_sign_of_a_zero_does_not_count():
    assert same(torch.tensor([0.0, NAN]), torch.tensor([-0.0, NAN]), zeros=True)
    assert not same(torch.tensor([0.0, NAN]), torch.tensor([1.0, NAN]), zeros=True)


def test_how_far_two_are_apart_is_the_largest_difference_of_numbers():
    assert difference(*PAIRS["numbers"]) == 1.0
    assert difference(*PAIRS["nan"]) == float("inf")
    assert difference(*PAIRS["quantised on another scale"]) == pytest.approx(0.3)
    assert difference(*PAIRS["shapes"]) is None
