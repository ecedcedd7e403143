"""What differs from one Python or torch to the next: how conditions are compiled, and which private names there are."""

import linecache

import pytest
import torch

import replaylens as rl


def taken(model, *inputs):
    """The truth values that a model reads, and the words at which it goes on."""
    prog = rl.capture(model, *inputs)
    return [(one.value, one.taken and one.taken.text) for one in prog.conditionals]


def number(value):
    return torch.tensor(float(value))


def written(folder, text):
    """A model in a file of its own: pytest does not rewrite its assertions, and it may be as long as it likes."""
    (folder / "model.py").write_text(text)
    linecache.checkcache()
    names = {}
    exec(compile(text, str(folder / "model.py"), "exec"), names)
    return names["model"]


# fmt: off
def test_a_while_loop_goes_on_in_its_body_and_behind_it():
    def model(x):
        while (
            x.sum() < 5
        ):
            x = x + 2
        return x.sin()

    assert taken(model, number(2)) == [(True, "x = x + 2"), (True, "x = x + 2"), (False, "return x.sin()")]


def test_a_loop_that_continues_and_breaks_goes_on_there():
    def model(x):
        for _ in range(3):
            x = x + 1
            if x < 2:
                continue
            if x > 2:
                break
            x = x * 1
        return x

    assert taken(model, number(0)) == [
        (True, "continue"),
        (False, "if x > 2:"),
        (False, "x = x * 1"),
        (False, "if x > 2:"),
        (True, "break"),
    ]


def test_a_condition_that_ends_a_loops_body_goes_on_at_the_loop():
    def model(x):
        for turn in range(2):
            if x > turn:
                x = x - 1
        return x

    assert taken(model, number(1)) == [(True, "x = x - 1"), (False, "for turn in range(2):")]


@pytest.mark.parametrize("how", ["or", "and"])
def test_each_part_of_a_condition_over_several_lines_goes_on_at_the_next(how):
    def either(x):
        if (
            x > 1
            or x < -1
        ):
            return x.sin()
        return x.cos()

    def both(x):
        if (
            x > 1
            and x < 3
        ):
            return x.sin()
        return x.cos()

    model = either if how == "or" else both
    sin, cos = "return x.sin()", "return x.cos()"
    expected = {
        "or": {2: [(True, sin)], 0: [(False, "or x < -1"), (False, cos)], -2: [(False, "or x < -1"), (True, sin)]},
        "and": {2: [(True, "and x < 3"), (True, sin)], 0: [(False, cos)], 4: [(True, "and x < 3"), (False, cos)]},
    }
    for value, way in expected[how].items():
        assert taken(model, number(value)) == way


def test_negations_and_assertions_go_on_where_python_does(tmp_path):
    model = written(tmp_path, """
def model(x):
    if not (x > 0).item():
        x = -x
    if not x > 0:
        x = x + 1
    assert x > 0, "never"
    x = x * 2
    try:
        assert x > 100
    except AssertionError:
        x = x.cos()
    return x
""")
    assert taken(model, number(-1)) == [
        (False, "x = -x"),
        (True, 'assert x > 0, "never"'),
        (True, "x = x * 2"),
        (False, "assert x > 100"),
    ]


def test_conditional_expressions_and_kept_operators_go_on_at_their_parts():
    def model(x):
        y = (
            x.sin()
            if x > 0
            else x.cos()
        )
        z = (
            (x > 5)
            or x.tan()
        )
        u = (
            (x > 5)
            and x.exp()
        )
        return y, z, u

    assert taken(model, number(1)) == [(True, "x.sin()"), (False, "or x.tan()"), (False, "u = (")]
    assert taken(model, number(6)) == [(True, "x.sin()"), (True, "z = ("), (True, "and x.exp()")]


def test_the_test_of_a_comprehension_goes_on_at_its_element_or_at_the_next_one():
    def model(x):
        return sum(
            [
                one.exp()
                for one in x
                if one > 0
            ]
        )

    first, second = taken(model, torch.tensor([1.0, -1.0]))
    assert first == (True, "one.exp()")
    assert second[0] is False and second[1] in ("[", "for one in x")  # Python 3.13 says it more exactly


def test_a_chained_comparison_goes_on_behind_both_halves():
    def model(x):
        if (
            0
            < x
            < 5
        ):
            return x.sin()
        return x.cos()

    assert taken(model, number(-1)) == [(False, "return x.cos()")]
    assert taken(model, number(7))[-1] == (False, "return x.cos()")
    assert taken(model, number(1))[-1] == (True, "return x.sin()")


# fmt: on
def test_bool_hands_a_truth_value_on_where_this_python_tells_it_from_any():
    def model(x):
        if bool(x > 0):
            x = x.sin()
        return x if any([x > 5]) else x.cos()

    way = "x = x.sin()" if hasattr(model.__code__, "co_positions") else None
    assert taken(model, number(1)) == [(True, way), (False, None)]


def test_a_condition_whose_branch_is_far_away_is_followed(tmp_path):
    body = "\n".join(f"        n = {number}" for number in range(400))
    model = written(tmp_path, f"def model(x):\n    while x < 3:\n        x = x + 2\n{body}\n    return x\n")
    assert taken(model, number(0)) == [(True, "x = x + 2"), (True, "x = x + 2"), (False, "return x")]


def test_a_truth_value_that_is_only_kept_has_no_way():
    def model(x):
        flags = [(x > 0).item(), not (x > 0).item(), bool(x > 1), x.equal(x)]
        return x * 2, flags

    assert [way for _, way in taken(model, number(1))] == [None] * 4
