"""Every law of the oracle, on every model of the zoo: the name of a failing test names the difficulty."""

import pytest
import unasked
from oracle import assert_replays
from zoo import CAPTURE_REFUSED, MODELS, is_refused_so, silence

import replaylens as rl


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


def test_a_model_is_refused_by_the_error_that_is_written_of_it_and_by_no_other():
    for name in CAPTURE_REFUSED:
        case = MODELS[name]()
        error = None
        try:
            with silence():
                rl.capture(case.model, *case.args, **case.kwargs)
        except Exception as refusal:
            error = refusal
        assert case.refusal and error is not None and is_refused_so(name, error)
        assert not is_refused_so(name, TypeError(str(error))) and not is_refused_so(name, rl.CaptureError("other"))
