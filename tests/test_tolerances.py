"""Close enough is decided in one place."""

import ast
from pathlib import Path

import pytest
import torch
from internals import BATCHED, REARRANGED, REPEATED, is_close_number

import replaylens as rl

HOME = Path(rl.__file__).parent
COMPARING = {"allclose", "isclose", "assert_close"}


def test_no_other_file_compares_numbers_up_to_rounding():
    found = {
        path.name
        for path in HOME.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in COMPARING
    }
    assert found == {"equality.py"}


def test_a_share_of_the_largest_number_is_let_be_also_at_zero():
    one, other = torch.tensor([1000.0, 0.5]), torch.tensor([1000.0, 0.0])
    assert REARRANGED.holds(one, other) and not BATCHED.holds(one, other) and not REPEATED.holds(one, other)
    assert not REARRANGED.holds(one, torch.tensor([1.0, 0.5]))


@pytest.mark.parametrize("tolerance", [REPEATED, REARRANGED, BATCHED])
def test_nan_is_close_to_nan_alone_and_an_infinite_number_to_itself(tolerance):
    nan, infinite, one = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 1.0])
    assert tolerance.holds(nan, nan.clone()) and tolerance.holds(infinite, infinite.clone())
    assert not tolerance.holds(one, nan) and not tolerance.holds(nan, one)
    assert (
        not tolerance.holds(one, infinite)
        and not tolerance.holds(infinite, one)
        and not tolerance.holds(-infinite, infinite)
    )


def test_a_number_that_left_torch_may_be_near_zero():
    assert is_close_number(1e-9, -1e-9) and is_close_number(1000.0, 1000.9)
    assert not is_close_number(1e-3, 2e-3) and not is_close_number(1.0, float("nan"))
