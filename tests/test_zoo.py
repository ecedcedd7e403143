"""Every law of the oracle, on every model of the zoo: the name of a failing test names the difficulty."""

import pytest
import unasked
from oracle import assert_replays
from zoo import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_its_model(name):
    answers = assert_replays(MODELS[name])  # a case with a `refusal` may be refused, but never wrong
    listed = unasked.golden().get(name, [])
    assert unasked.lines_of(name, answers) == listed, f"`python tests/unasked.py {name}` writes golden/unasked.txt anew"


def test_a_law_that_is_not_asked_is_listed_with_its_model_and_its_reason():
    lines = [line for lines in unasked.golden().values() for line in lines]
    assert lines == sorted(lines, key=lambda line: (line.split(" | ")[0], line))
    assert all(len(line.split(" | ")) == 3 and all(line.split(" | ")) for line in lines)
    assert set(unasked.golden()) <= set(MODELS)
