"""Every law of the oracle, on every model of the zoo: the name of a failing test names the difficulty."""

import pytest
from oracle import assert_replays
from zoo import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_its_model(name):
    assert_replays(MODELS[name])  # a case with a `refusal` may be refused, but never wrong
