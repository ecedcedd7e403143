"""prog.check(): what holds for honest programs, what the report says, what cannot be seen and why."""

import copy
import re
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from internals import (
    LAWS,
    MODEL_LAWS,
    Call,
    CheckReport,
    Finding,
    LawResult,
    ProgramUnderTest,
    Ref,
    check as check_program,
    dependent_calls,
    refs_of,
)
from metadata_law import wrong_metadata
from random_programs import programs
from torch import nn
from zoo import MODELS, is_refused_so

import replaylens as rl


def captured(name):
    case = MODELS[name]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prog = rl.capture(case.model, *case.args, **case.kwargs)
            assert len(prog.graph)
            return prog
    except Exception as error:
        if is_refused_so(name, error):
            pytest.skip(f"{type(error).__name__}: {error}".splitlines()[0])
        raise


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_zoo_holds(name):
    prog = captured(name)
    report = prog.check()
    assert report, report
    assert wrong_metadata(prog) == []


def under_test(prog, fewest):
    """The program as it is checked if so many alike calls, or operands of one call, are tested together."""
    as_captured = prog.history == ("captured",)
    return ProgramUnderTest(prog._record, prog.output, as_captured, fewest_alike=fewest, many_operands=fewest)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_tested_together_is_reported_as_one_by_one(name):
    """From one on: all calls that can be are tested under vmap, and all operands by marked numbers."""
    prog = captured(name)
    alone = check_program(under_test(prog, float("inf")))
    assert check_program(under_test(prog, 1)) == alone
    assert prog.check() == alone


@pytest.mark.filterwarnings("ignore")
def test_most_calls_of_the_zoo_can_be_tested_together():
    proved = verified = 0
    for name in list(MODELS)[::12]:
        try:
            program = under_test(captured(name), 1)
        except pytest.skip.Exception:
            continue
        check_program(program)
        with torch.no_grad():
            proved += len(dependent_calls(program))
        verified += len(program.verified)
    assert 0 < verified < 2 * proved


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore")
@given(programs())
def test_random_programs_hold(program):
    try:
        prog = rl.capture(program, *program.inputs())
    except rl.CaptureError:
        return
    report = prog.check()
    assert report, report
    assert wrong_metadata(prog) == []


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


def program():
    made = model()
    return rl.capture(made, torch.randn(3, 4))


EDITS = {
    "patched": lambda prog: prog.with_patch({"relu_1": lambda value: value / 2}),
    "zeroed": lambda prog: prog.with_patch({"relu_1": rl.Zero()}),
    "lesioned in part": lambda prog: prog.lesion("relu_1", "b [c]", c=3),
    "swapped": lambda prog: prog.swap("relu", nn.functional.gelu),
    "with a node more": lambda prog: prog.insert_after("relu_1", torch.tanh),
    "bypassed": lambda prog: prog.bypass("relu_1"),
    "cut from the middle": lambda prog: prog.slice(from_="relu_1"),
    "cut to the middle": lambda prog: prog.slice(to="relu_1"),
    "with another parameter": lambda prog: prog.set_state("0.weight", lambda weight: weight * 2),
    "run again": lambda prog: prog.refresh(),
    "in double precision": lambda prog: prog.to(torch.float64),
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_program_holds(edit):
    edited = EDITS[edit](program())
    report = edited.check()
    assert report, report
    assert wrong_metadata(edited) == []


def test_an_expanded_attention_holds():
    torch.manual_seed(0)
    prog = rl.capture(nn.functional.scaled_dot_product_attention, *torch.randn(3, 2, 5, 4).unbind())
    report = prog.expand("scaleddotproductattention").check()
    assert report, report


def test_a_deep_copy_of_attention_holds_to_the_bit():
    report = copy.deepcopy(captured("attention_in_training")).check()
    assert report, report


def test_memory_that_is_new_and_undefined_is_zeros_in_a_program():
    report = rl.capture(lambda x: x.new(2, 3) + x, torch.ones(3)).check()
    assert report, report


def test_values_that_were_not_kept_are_computed_on_the_way():
    prog = program()
    record = prog._record
    kept = {ref: value for ref, value in record.values.items() if "relu" not in ref.node and "linear_1" not in ref.node}
    slim = rl.Program(_record=evolve(record, values=kept), _output=prog.output)
    report = slim.check()
    assert report, report
    assert report["each node alone"].asked == 2
    assert report["each node alone"].reasons == {"its value was not kept": 2}
    assert report["saved values"].note == "2 values were not kept"
    assert report["nonsense parents"].asked == prog.check()["nonsense parents"].asked


def test_a_check_changes_nothing():
    prog = program()
    before = {ref: (value, value._version, value.clone()) for ref, value in prog._record.values.items()}
    state = torch.get_rng_state()
    prog.check()
    assert torch.equal(torch.get_rng_state(), state)
    assert prog._record.values.keys() == before.keys()
    for ref, (value, version, content) in before.items():
        assert prog._record.values[ref] is value
        assert value._version == version
        assert torch.equal(value, content)


def test_a_check_is_the_same_in_every_mode():
    prog = program()
    wanted = str(prog.check())
    with torch.inference_mode():
        assert str(prog.check()) == wanted
    with torch.no_grad():
        assert str(prog.check()) == wanted


def test_a_report_is_a_table():
    assert str(program().check()) == "\n".join(
        [
            "Check of Sequential: all laws hold.",
            "    whole replay      1 output, 0 state changes  bit for bit",
            "    each node alone   4 nodes                    bit for bit",
            "    nonsense parents  8 parents                  8 change the value",
            "    draws             1 draw                     come out the same",
            "    graph             9 nodes                    well formed",
            "    saved values      9 values                   none overwritten, all of the recorded kind",
        ]
    )


def test_the_documentation_lists_the_laws_as_they_are_asked():
    page = (Path(__file__).parents[1] / "docs/checking.md").read_text()
    tables = re.findall(r"\| law \| what it asserts \|\n\|---\|---\|\n((?:\|.*\|\n)+)", page)
    listed = [[tuple(row.strip("| ").split(" | ")) for row in table.splitlines()] for table in tables]
    assert listed == [[(law.name, law.sentence) for law in laws] for laws in (LAWS, MODEL_LAWS)]


def test_a_failure_shows_the_line_of_the_program_and_of_the_user():
    prog = rl.capture(lambda x: x.exp() + 1, torch.zeros(2))  # the user's line
    prog["exp_1"].value.add_(1)
    text = str(prog.check())
    headline, cure, *_ = text.splitlines()
    assert headline.endswith(": stale: the recorded value of `exp_1_1` was overwritten since the capture.")
    assert "prog.refresh()" in cure and "broken" not in text.lower()
    assert "saved values: exp_1_1: its saved value was overwritten since the capture" in text
    assert "    exp_1_1 = exp(input_1_0)  # float32[2]" in text
    assert "# the user's line" in text


def test_a_report_is_data():
    report = rl.capture(lambda x: torch.zeros_like(x) + x, torch.ones(2)).check()
    (case,) = report.special
    assert (case.law, case.node, case.parent) == ("nonsense parents", "zeroslike_1_1", "input_1_0")
    assert report["nonsense parents"].reasons == {"only its shape and type are read": 1}
    assert list(report.to_pandas()["kind"]) == ["special"]
    with pytest.raises(KeyError, match=r"no law is named 'speed'\. There are: whole replay"):
        report["speed"]
    more = report.and_((LawResult(name="witness", failures=(Finding("", "saw another value"),)),))
    assert report
    assert not more
    assert [finding.fact for finding in more.failures] == ["saw another value"]


def test_a_law_that_was_not_asked_is_no_failure_and_is_printed():
    report = CheckReport("Net", (LawResult(name="witness", skipped="no module can be hooked"),))
    assert report
    assert str(report) == (
        "Check of Net: all checked laws hold; 1 skipped.\n    witness    skipped: no module can be hooked"
    )


@pytest.mark.parametrize(("sample", "asked"), [(3, 3), (0.5, 10), (1.0, 20), (1000, 20)])
def test_a_sample_asks_some_nodes_spread_over_the_program(sample, asked):
    prog = rl.capture(nn.Sequential(*[nn.Tanh() for _ in range(20)]), torch.ones(2))
    report = prog.check(sample=sample)
    assert report
    assert report["each node alone"].asked == asked
    if asked < 20:
        assert report["each node alone"].note == f"a sample of {asked} of 20 nodes"


@pytest.mark.parametrize("sample", [0, -1, 0.0, 1.5, "all", True])
def test_a_sample_that_makes_no_sense_is_refused(sample):
    with pytest.raises(ValueError, match="sample is a number of nodes, or a share of them between 0 and 1, not"):
        program().check(sample=sample)


REASONS = {
    "only its shape and type are read": lambda x: torch.ones_like(x) + x,
    "hidden by a mask, which is another argument": lambda x: torch.where(torch.ones(4) > 0, x, x.exp()),
    "hidden by zeros in another argument": lambda x: x * torch.zeros(4),
    "hidden by the content of another argument": lambda x: x + torch.full((4,), float("-inf")),
    "hidden by a number among the arguments, as in x * 0": lambda x: x * 0,
    "hidden by the recorded draw": lambda x: nn.functional.dropout(x[0, :1], 0.7, training=True),
    "read in several places, which cancel out, as in x - x": lambda x: x - x,
    "a share of a single element, which is constant": lambda x: x[:, :1].softmax(-1),
    "all of it is overwritten": lambda x: torch.zeros(3, 4).copy_(x),
    "it has no elements": lambda x: x[:0].sum(),
    "the value has no elements": lambda x: x[:0],
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_seen_has_its_reason(reason):
    torch.manual_seed(0)
    report = rl.capture(REASONS[reason], torch.randn(3, 4)).check()
    assert report, report
    assert reason in report["nonsense parents"].reasons, report


@pytest.mark.parametrize("keys", ["by place", "by name"])
def test_attention_to_a_single_key_puts_all_weight_on_it(keys):
    def model(query, key, value):
        if keys == "by name":
            return nn.functional.scaled_dot_product_attention(query=query, key=key, value=value)
        return nn.functional.scaled_dot_product_attention(query, key, value)

    report = rl.capture(model, torch.randn(1, 2, 5, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)).check()
    assert report, report
    assert report["nonsense parents"].reasons == {"a share of a single element, which is constant": 2}


def test_what_shows_only_where_another_argument_is_zero_is_hidden_by_it():
    report = rl.capture(lambda x: x.heaviside(torch.tensor(0.5)), torch.ones(3)).check()
    assert report, report
    assert report["nonsense parents"].reasons == {"hidden by the content of another argument": 1}


def test_what_a_far_larger_number_absorbs_is_hidden_by_it():
    report = rl.capture(lambda x: torch.full((2, 3), -1e38) + x, torch.randn(3)).check()
    assert report, report
    assert "hidden by the content of another argument" in report["nonsense parents"].reasons


def test_a_tensor_that_is_subtracted_from_itself_in_place_cancels_out():
    def model(x):
        y = x.clone()
        y[:2] -= y[:2]
        y.sub_(y)
        return y + 1

    report = rl.capture(model, torch.randn(3, 4)).check()
    assert report, report
    assert report["nonsense parents"].reasons == {"read in several places, which cancel out, as in x - x": 1}


def test_a_kernel_that_varies_is_measured_and_not_taken_for_a_fault():
    calls = []

    def wavering(x):
        calls.append(0)
        return x + 1e-6 * (len(calls) % 3)

    prog = rl.capture(torch.nn.Identity(), torch.ones(2)).insert_after("identity_1", torch.exp)
    node = next(node for node in prog.graph.calls if node.kind == "exp")
    target = evolve(node.target, name="wavering", function=wavering)
    nodes = tuple([evolve(other, target=target) if other is node else other for other in prog.graph.nodes])
    record = prog._record
    values = {**record.values, Ref(node.name): wavering(torch.ones(2))}
    graph = evolve(record.graph, nodes=nodes)
    report = rl.Program(_record=evolve(record, graph=graph, values=values)).check()
    law = report["each node alone"]
    assert not law.failures
    assert law.note.startswith("1 differ between repetitions by at most")


def test_a_model_that_was_trained_since_is_told_by_the_saved_values_alone():
    made = model()
    prog = rl.capture(made, torch.randn(3, 4))
    with torch.no_grad():
        made[0].weight.mul_(2)
    report = prog.check()
    assert [(finding.law, finding.node) for finding in report.failures] == [("saved values", "0.weight")]
    assert report["whole replay"].skipped == "a saved value was overwritten"
    assert prog.refresh().check()


def test_every_value_that_a_call_gives_is_asked():
    prog = rl.capture(lambda x: x.split(2), torch.randn(4))
    (split,) = [node for node in prog.graph.nodes if isinstance(node, Call)]
    assert len(refs_of(split)) == 2
    record = prog._record
    values = {**record.values, Ref(split.name, (1,)): torch.zeros(2)}
    report = rl.Program(_record=evolve(record, values=values), _output=prog.output).check()
    assert [finding.node for finding in report["each node alone"].failures] == [split.name]


class HandsOnTheSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, second, scale):
        ctx.save_for_backward(scale)
        return second

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


class IgnoresTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, second):
        return second * 2

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * 2


def test_what_a_custom_function_reads_in_its_backward_alone_has_that_reason():
    def model(x, y, scale):
        return HandsOnTheSecond.apply(x * 1, y * 2, scale + 1) + 1

    inputs = torch.randn(3), torch.randn(3), torch.randn(3)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            report = rl.capture(model, *inputs).check()
        assert report, report
        assert report["nonsense parents"].reasons == {"read only in the backward of a custom function": 2}


def test_what_a_custom_function_reads_nowhere_is_said():
    report = rl.capture(lambda x, y: IgnoresTheFirst.apply(x * 1, y * 2), torch.randn(3), torch.randn(3)).check()
    (case,) = report["nonsense parents"].special
    assert report and (case.node, case.parent) == ("ignoresthefirst_1_4", "mul_1_2")
    assert case.fact == "passed to code outside of torch, which ignores it"


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda t: self.a(t).sin(), lambda t: self.b(t).cos(), (x,))


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_a_model_with_branches_of_torchs_is_checked_whether_its_input_needs_gradients_or_not(needs_gradients):
    for sign in (1, -1):
        x = torch.full((3, 4), 0.5 * sign).requires_grad_(needs_gradients)
        assert rl.check(Chooses(), x)


class MakesClasses(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.l, self.kind = nn.Linear(3, 3), kind

    def forward(self, x):
        if self.kind == "named":
            return namedtuple("Out", "y z")(self.l(x), x)

        class Out(dict):
            pass

        return Out(y=self.l(x))


@pytest.mark.parametrize("kind", ["named", "dict"])
def test_a_forward_may_make_the_class_of_its_output_itself(kind):
    assert rl.check(MakesClasses(kind), torch.randn(2, 3))


@pytest.mark.parametrize("scramble", [False, True])
def test_numbers_that_a_kernel_takes_for_places_in_memory_are_left_as_they_are(scramble):
    """With nonsense in their place it would write beyond its memory."""

    def model(x):
        engine = torch.quasirandom.SobolEngine(4, scramble=scramble)
        return x * engine.draw(2) + engine.fast_forward(3).draw(2)

    assert rl.capture(model, torch.ones(2, 4)).check()


def test_attributes_that_hang_on_an_input_are_not_taken_from_a_model_that_is_checked():
    x = torch.ones(2, 4)
    x.scale = torch.ones(1) * 2
    assert rl.check(lambda x: torch.relu(x) * getattr(x, "scale", 3.0), x)
