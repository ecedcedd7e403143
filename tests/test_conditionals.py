"""What a model read to choose its way, and what kind of network a program is."""

import torch
from internals import Conditionals, is_branching, is_recurrent, max_recurrent_loops, passes_of_layers as passes
from torch import nn

import replaylens as rl


def x():
    return torch.ones(3, 3)


def of(model, *inputs):
    prog = rl.capture(model, *(inputs or (x(),)))
    return prog, Conditionals(prog.graph)


def paper(x):
    """The paper's example."""
    if torch.mean(x - 5) > 3:
        return x * 2
    return x + 1


def test_the_papers_condition_ends_in_its_comparison_and_begins_with_its_subtraction():
    prog, found = of(paper)
    assert prog.layer_labels == ["input_1_0", "sub_1_1", "mean_1_2", "gt_1_3", "add_1_4", "output_1_5"]
    assert found.terminal_bools == ("gt_1_3",)
    assert found.in_branch == {"sub_1_1", "mean_1_2", "gt_1_3"}
    assert found.starts == (("input_1_0", "sub_1_1"),) and found.start_layers == {"sub_1_1"}


def test_a_conditional_says_what_was_read_where_and_which_way_it_went():
    for value, text in ((x(), "return x + 1"), (x() * 9, "return x * 2")):
        prog, _ = of(paper, value)
        (one,) = prog.conditionals
        assert (one.layer, one.value) == ("gt_1_3", value[0, 0] > 8)
        assert one.source.text == "if torch.mean(x - 5) > 3:" and one.taken.text == text
        assert str(one) == (
            f"gt_1_3 was {one.value} at {one.source}: {one.source.text}, went on at line {one.taken.line}: {text}"
        )


def test_each_round_of_a_loop_has_its_own_conditional():
    def model(x):
        while x.sum() < 100:
            x = x * 2
        return x

    prog, found = of(model)
    assert [one.value for one in prog.conditionals] == [True] * 4 + [False]
    assert [one.taken.text for one in prog.conditionals] == ["x = x * 2"] * 4 + ["return x"]
    assert [one.layer for one in prog.conditionals] == list(found.terminal_bools)
    assert all(name.startswith(("sum_", "lt_")) for name in found.in_branch) and len(found.in_branch) == 10


def test_a_negated_condition_a_conditional_expression_and_an_item_know_their_way():
    def model(x):
        if not x.sum() > 100:
            x = x + 1
        x = (
            x.sin()
            if x.max() > 0
            else x.cos()
        )  # fmt: skip
        if (x.min() > 5).item():
            x = x * 3
        return x.relu()

    prog, _ = of(model)
    assert [one.taken.text for one in prog.conditionals] == ["x = x + 1", "x.sin()", "return x.relu()"]


def test_a_truth_value_that_is_tested_later_has_no_line_taken():
    def model(x):
        flag = bool(x.sum() > 0)
        if any([x.max() > 5, x.min() > 0]) or as_it_is((x.min() > 5).item()):
            x = x * 2
        return x + 1 if flag else x

    def as_it_is(value):
        return value

    prog, _ = of(model)
    assert [(one.value, one.taken) for one in prog.conditionals] == [(True, None), (False, None), (True, None)]
    prog, _ = of(model, -x())
    assert [(one.value, one.taken) for one in prog.conditionals] == [(False, None)] * 4


def test_a_condition_that_is_also_used_is_no_terminal_one():
    def model(x):
        positive = x.sum() > 0
        return x * positive if positive else x

    prog, found = of(model)
    assert prog.conditionals[0].layer == "gt_1_2" and prog.conditionals[0].value is True
    assert found.terminal_bools == () and found.in_branch == frozenset() and found.starts == ()


def test_layers_know_their_part_in_a_condition_also_one_on_a_number():
    def model(x):
        if (x - 5).sum():
            return x * 2
        return x

    prog, _ = of(model)
    assert [one.label for one in prog if one.is_cond_branch_start] == ["sub_1_1"]
    assert [one.label for one in prog if one.in_cond_branch] == ["sub_1_1", "sum_1_2"]
    assert [one.label for one in prog if one.is_terminal_bool_layer] == ["sum_1_2"]
    assert prog.internally_terminated_bool_layers == ["sum_1_2"]


def test_a_truth_value_that_nobody_read_is_no_condition():
    prog, found = of(lambda x: (x.sum() > 0, x + 1)[1])
    assert prog.conditionals == () and found.terminal_bools == () and not prog.model_has_conditional_branching
    assert "gt_1_2" in prog


def test_numbers_and_arrays_that_leave_torch_are_no_conditions():
    prog, _ = of(lambda x: x * float(x.sum()) + x.detach().numpy().max())
    assert prog.conditionals == () and len(prog.guards) == 2


def test_recurrence_and_branching_are_as_the_paper_says():
    fc = nn.Linear(3, 3)

    def recurrent(x):
        for _ in range(4):
            x = fc(x).relu()
        return x

    for model, loops, branches, decides in (
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU()), 1, False, False),
        (recurrent, 4, False, False),
        (lambda x: x.cos() + x.sin(), 1, True, False),
        (paper, 1, True, True),
    ):
        prog = rl.capture(model, x())
        assert (max_recurrent_loops(prog.graph), is_recurrent(prog.graph)) == (loops, loops > 1)
        assert is_branching(prog.graph) == branches and prog.model_has_conditional_branching == decides
    assert passes(rl.capture(recurrent, x()).graph) == {"linear_1_1": 4, "relu_1_2": 4}


def test_an_output_that_is_also_read_branches():
    assert is_branching(rl.capture(lambda x: (y := x.cos(), y.sin()), x()).graph)
    assert not is_branching(rl.capture(lambda x: x.chunk(3)[0].sin(), x()).graph)
