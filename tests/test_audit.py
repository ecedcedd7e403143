"""`replaylens.check` holds on every honest program, leaves no trace, and finds what is missing, wrong or made up."""

import ctypes
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import zoo
from attrs import evolve
from internals import (
    Call,
    ModelUnderTest,
    OpClass,
    Ref,
    Target,
    audit_aten_calls as audit,
    compare_with_hooks as witness,
    comparison_of,
    other_inputs_agree,
    plain_calls,
    replayed_calls,
    with_model_under_test,
)
from oracle import belongings, generators, tensors
from torch import nn
from torch.utils.checkpoint import checkpoint

import replaylens as rl

OFF = "Disable{}Function".format("Torch")  # as no name in the code says, so that the capture does not see it coming


MODES = {"with_gradients": torch.enable_grad, "without_gradients": torch.no_grad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_check_of_an_honest_model_holds_and_leaves_no_trace(name: str, mode: str) -> None:
    case = zoo.MODELS[name]()
    before = belongings(case.model), generators(), [t.detach().clone() for t in tensors(case.args)]
    with MODES[mode]():
        try:
            report = rl.check(case.model, *case.args, **case.kwargs)
        except Exception as refusal:
            if zoo.is_refused_so(name, refusal):
                pytest.skip(f"{type(refusal).__name__}: {refusal}".splitlines()[0])
            raise
    assert report, str(report)
    assert repr(belongings(case.model)) == repr(before[0])
    assert repr(generators()) == repr(before[1])
    assert all(
        torch.equal(one, other)
        for one, other in zip(tensors(case.args), before[2])
        if one.layout is torch.strided and not one.is_quantized and not one.is_meta and not one.isnan().any()
    )


def raises_plainly(name: str) -> bool:
    case = zoo.MODELS[name]()
    try:
        case.model(*case.args, **case.kwargs)
    except Exception:
        return True
    return False


# ---- what the capture was blind to ------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, steps: Callable) -> None:
        super().__init__()
        self.steps, self.fc, self.norm = steps, nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.steps(self, x)


def checked(steps: Callable) -> rl.CheckReport:
    torch.manual_seed(0)
    return rl.check(Model(steps), torch.randn(3, 4))


def line_of(steps: Callable, shift: int) -> int:
    return steps.__code__.co_firstlineno + shift


def gradient_in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        return t * torch.autograd.grad(((t * 2) ** 2).sum(), t, create_graph=True)[0]

    leaf = x.detach().requires_grad_()
    out = checkpoint(inner, leaf, use_reentrant=False)
    return out.detach() + torch.autograd.grad(out.sum(), leaf)[0]


def checkpoint_in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    out = checkpoint(lambda t: checkpoint(torch.exp, t.sin(), use_reentrant=False), leaf, use_reentrant=False)
    return out.detach() + torch.autograd.grad(out.sum(), leaf)[0]


@pytest.mark.parametrize("forward", [gradient_in_a_checkpoint, checkpoint_in_a_checkpoint])
def test_what_a_checkpoint_computes_again_for_a_gradient_of_the_forwards_was_not_missed(forward: Callable) -> None:
    report = rl.check(forward, torch.rand(3, 4))
    assert report, str(report)


def test_a_sum_taken_where_torch_functions_are_off_is_named_with_its_line() -> None:
    def steps(m, x):
        y = m.fc(x)
        with getattr(torch._C, OFF)():
            scale = y.sum().item()
        return y * scale

    report = checked(steps)
    found = {finding.fact: finding.source.line for finding in report["completeness"].failures}
    assert found == {
        "`sum(float32[3, 4])` was missed: a plain forward makes 1 of these calls, a replay 0": line_of(steps, 3),
        "`_local_scalar_dense(float32[])` was missed: a plain forward makes 1 of these calls, a replay 0": line_of(
            steps, 3
        ),
    }
    assert not report["other inputs"]


def test_an_operation_that_only_decides_a_branch_is_missed_if_it_was_hidden() -> None:
    def steps(m, x):
        y = m.fc(x)
        with getattr(torch._C, OFF)():
            positive = bool((y.abs().amax() > 0).item())
        return y.relu() if positive else y

    missed = {finding.fact.split("(")[0] for finding in checked(steps)["completeness"].failures}
    assert missed == {"`abs", "`amax", "`gt", "`_local_scalar_dense"}


def test_what_numpy_computed_behind_torchs_back_is_seen_on_other_inputs() -> None:
    def steps(m, x):
        y = m.fc(x)
        with getattr(torch._C, OFF)():
            hidden = np.tanh(y.detach().numpy())
        return y + torch.from_numpy(hidden)

    report = checked(steps)
    assert [law.name for law in report.laws if not law] == ["other inputs"]
    assert report["other inputs"].failures[0].fact == (
        "on other inputs the model's own output is other numbers: something that depends on the inputs was recorded as "
        "a constant"
    )


def test_what_a_raw_pointer_gave_is_seen_on_other_inputs() -> None:
    def steps(m, x):
        y = m.fc(x)
        with getattr(torch._C, OFF)():
            first = ctypes.c_float.from_address(y.data_ptr()).value
        return y * first

    report = checked(steps)
    assert [law.name for law in report.laws if not law] == ["other inputs"]


class HandsOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bias = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.table = torch.arange(4.0)

    def forward(self, x):
        return self.fc(x), self.bias, self.scale, self.table


class AddsLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = HandsOut()

    def forward(self, x):
        x, bias, scale, table = self.inner(x)
        return x * scale + bias + table


def test_a_module_that_hands_out_its_own_tensors_before_anything_read_them_gives_values_of_the_program() -> None:
    report = rl.check(AddsLater(), torch.randn(3, 4))
    assert report, str(report)
    graph = rl.capture(AddsLater(), torch.randn(3, 4)).graph
    given = next(tree for scope, tree in graph.module_outputs if scope.address == "inner")
    assert [graph[ref.node].address for ref in given[1:]] == ["inner.bias", "inner.scale", "inner.table"]


def test_a_cache_outside_of_the_model_is_no_fault_and_is_said() -> None:
    cache: list[torch.Tensor] = []

    def steps(m, x):
        if not cache:
            cache.append(torch.arange(4.0).cos())
        return m.fc(x) * cache[0]

    report = checked(steps)
    assert report
    assert report["completeness"].note.startswith(
        "of a second capture: the first one filled a cache that lies outside of the model"
    )


def test_a_model_that_reads_a_counter_outside_of_it_is_no_fault_and_is_said() -> None:
    count: list[int] = []

    def steps(m, x):
        count.append(1)
        return m.fc(x) * len(count)

    report = checked(steps)
    assert report
    assert list(report["witness"].reasons) == [
        "the model gives another output each time: it reads something outside of it, such as a clock or a counter"
    ]


def test_a_cache_that_is_read_by_another_operation_than_it_is_made_is_no_fault() -> None:
    cache: list[torch.Tensor] = []

    def steps(m, x):
        if cache:
            return m.fc(x) + cache[0].index_select(0, torch.tensor([0]))
        cache.append(torch.arange(8.0).view(2, 4).cos())
        return m.fc(x) + cache[0][:1]

    assert checked(steps)


class Slotted:
    __slots__ = ("table",)


def in_closure(tensor):
    return lambda: tensor


def in_slots(tensor):
    made = Slotted()
    made.table = tensor
    return made


HOLDERS = {
    "closure": (in_closure, lambda held: held()),
    "partial": (lambda tensor: partial(torch.neg, tensor), lambda held: held.args[0]),
    "slots": (in_slots, lambda held: held.table),
    "set": (lambda tensor: {tensor}, lambda held: next(iter(held))),
    "frozenset": (lambda tensor: frozenset((tensor,)), lambda held: next(iter(held))),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_tensor_that_hangs_on_the_model_in_whatever_holds_it_is_not_taken_for_removed(name: str) -> None:
    hold, find = HOLDERS[name]
    model = Model(lambda m, x: m.fc(x) + find(m.held))
    model.held = hold(torch.randn(4))
    prog = rl.capture(model, torch.randn(3, 4))
    assert not prog.graph.removed
    assert prog.check()
    find(model.held).add_(1)
    assert prog.check().stale


def test_a_fused_layer_is_said_with_how_far_it_is_from_the_open_one() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        report = rl.check(layer, torch.randn(2, 3, 8))
    (special,) = report["completeness"].special
    assert report and special.node == "_transformer_encoder_layer_fwd"
    assert special.fact == "a plain forward runs it as one fused kernel, the program has it open"
    assert 0 <= special.difference < 1e-4


def test_padding_that_a_fused_encoder_leaves_zero_is_said_and_nothing_else_differs() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        report = rl.check(encoder, torch.randn(2, 5, 8), src_key_padding_mask=padding)
    assert report, str(report)
    (fact,) = report["completeness"].reasons
    assert fact == (
        "a plain forward runs it as one fused kernel, which leaves zeros where tokens are padding; the program has it "
        "open, and other numbers there"
    )


def test_a_fused_encoder_whose_padding_reaches_other_numbers_is_no_fault_of_the_kernels_rounding() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        report = rl.check(lambda x: encoder(x, src_key_padding_mask=padding).mean(1), torch.randn(2, 5, 8))
    assert {failure.node for failure in report.failures} == {"_transformer_encoder_layer_fwd"}, str(report)


# ---- programs that were broken on purpose ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_whichever_node_a_program_drops_its_calls_are_missed() -> None:
    dropped = []

    def drop(name: str, subject: ModelUnderTest) -> None:
        plain, replayed = plain_calls(subject)[0], replayed_calls(subject.record)
        for node in subject.record.graph.calls:
            rest = [seen for seen in replayed if seen.step is not node]
            if any(seen.signature.sort is OpClass.COMPUTE and seen.step is node for seen in replayed):
                dropped.append(node)
                assert comparison_of(plain, rest, subject.record.graph.guards).missing, f"{name}: {node.name}"

    for name, build in zoo.MODELS.items():
        case = build()
        if case.refusal or raises_plainly(name):
            continue
        with_model_under_test(case.model, case.args, dict(case.kwargs), partial(drop, name))
    assert len(dropped) > 1500


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 4)

    def forward(self, x):
        y = self.norm(self.conv(x)).relu()
        y = y + y.mean()
        y.mul_(2)
        return self.fc(y.flatten(1)), y.exp()


def broken(law: Callable, change: Callable) -> tuple:
    """The failures of a law on a program of which `change` was made."""
    torch.manual_seed(0)

    def ask(subject: ModelUnderTest) -> tuple:
        assert law(subject), "the law holds before the change"
        return law(evolve(subject, record=change(subject.record))).failures

    return with_model_under_test(Small().train(), (torch.randn(2, 3, 4, 4),), {}, ask)


def with_call(record, name: str, **changes):
    nodes = tuple([evolve(node, **changes) if node.name == name else node for node in record.graph.nodes])
    return evolve(record, graph=evolve(record.graph, nodes=nodes))


def by_kind(record, kind: str) -> Call:
    return next(call for call in record.graph.calls if call.kind == kind)


def test_an_operation_that_the_program_dropped_is_named_with_its_line() -> None:
    def change(record):
        call = by_kind(record, "exp")
        return with_call(record, call.name, target=Target.of(torch.Tensor.detach))

    (found,) = broken(audit, change)
    assert found.fact == "`exp(float32[2, 4, 4, 4])` was missed: a plain forward makes 1 of these calls, a replay 0"
    assert found.source.text == "return self.fc(y.flatten(1)), y.exp()"


def test_a_convolution_in_the_place_of_another_is_seen_by_its_operands() -> None:
    def change(record):
        conv = by_kind(record, "conv2d")
        return with_call(record, conv.name, target=Target.of(narrow_convolution))

    missed, made_up = broken(audit, change)
    assert missed.fact.startswith("`convolution(float32[2, 3, 4, 4], float32[4, 3, 3, 3], float32[4])` was missed")
    assert made_up.node == "conv2d_1_1" and "is too much" in made_up.fact


def narrow_convolution(x, weight, bias, *rest):
    return torch.conv2d(x, weight[:, :, 1:2, 1:2], bias)


def test_an_operation_that_the_program_made_up_is_named_with_its_node() -> None:
    def change(record):
        return with_call(record, by_kind(record, "exp").name, target=Target.of(exp_of_a_sine))

    (found,) = broken(audit, change)
    assert found.node == "exp_1_13" and found.line.startswith("exp_1_13 = ")
    assert found.fact == "`sin(float32[2, 4, 4, 4])` is too much: a replay makes 1 of these calls, a plain forward 0"


def exp_of_a_sine(x):
    return x.sin().exp()


def test_a_dropped_operation_does_not_hide_behind_one_of_other_operands() -> None:
    def change(record):
        return with_call(record, by_kind(record, "mean").name, target=Target.of(mean_of_a_row))

    missed, made_up = broken(audit, change)
    assert missed.fact.startswith("`mean(float32[2, 4, 4, 4])` was missed")
    assert made_up.fact.startswith("`mean(float32[4, 4, 4])` is too much")


def mean_of_a_row(x):
    return x[0].mean()


def test_a_write_in_place_that_the_program_lost_is_missed() -> None:
    def change(record):
        return with_call(
            record, by_kind(record, "mul").name, target=Target.of(first_of), args=by_kind(record, "mul").args[:1]
        )

    (found,) = broken(audit, change)
    assert found.fact == "`mul(float32[2, 4, 4, 4])` was missed: a plain forward makes 1 of these calls, a replay 0"


def first_of(x):
    return x


def test_a_wrong_value_of_a_module_is_seen_by_the_witness() -> None:
    def change(record):
        ref = Ref(by_kind(record, "batchnorm").name)
        ref = next(known for known in record.values if known.node == ref.node)
        return evolve(record, values=record.values | {ref: record.values[ref].detach() + 1})

    found = broken(witness, change)
    assert [finding.fact for finding in found][:1] == ["the output of norm:1 is other numbers"]


def test_a_wrong_output_is_seen_by_the_witness() -> None:
    def change(record):
        ref = record.graph.output[1]
        return evolve(record, values=record.values | {ref: record.values[ref].detach() * 2})

    (found,) = broken(witness, change)
    assert found.fact == "the output of a plain forward is other numbers"


def test_a_wrong_change_of_state_is_seen_by_the_witness() -> None:
    def change(record):
        ref = dict(record.graph.changes)["norm.running_mean"]
        return evolve(record, values=record.values | {ref: record.values[ref].detach() + 1})

    (found,) = broken(witness, change)
    assert found.fact == "a plain forward leaves something else in `norm.running_mean` than was recorded"


def with_graph(**changes: Callable):
    """A change of the record: each field of its graph by what a function makes of it."""
    return lambda record: evolve(
        record, graph=evolve(record.graph, **{name: f(getattr(record.graph, name)) for name, f in changes.items()})
    )


def test_a_change_of_state_that_the_program_lost_is_seen_by_the_witness() -> None:
    found = broken(witness, with_graph(changes=lambda changes: ()))
    assert [finding.fact for finding in found] == [
        f"a plain forward leaves something else in `norm.{name}` than was recorded"
        for name in ("num_batches_tracked", "running_mean", "running_var")
    ]


def test_a_change_of_state_that_the_program_made_up_is_seen_by_the_witness() -> None:
    def change(record):
        more = ("norm.bias", dict(record.graph.changes)["norm.running_mean"])
        return with_graph(changes=lambda changes: (*changes, more))(record)

    (found,) = broken(witness, change)
    assert found.fact == "a plain forward leaves something else in `norm.bias` than was recorded"


def test_parameters_that_changed_their_addresses_are_seen_by_the_witness() -> None:
    other = {"norm.weight": "norm.bias", "norm.bias": "norm.weight"}

    def swapped(nodes):
        return tuple([evolve(n, address=other[n.address]) if getattr(n, "address", "") in other else n for n in nodes])

    facts = [finding.fact for finding in broken(witness, with_graph(nodes=swapped))]
    assert facts[:2] == [
        "the model holds another parameter at `norm.bias` than is recorded",
        "the model holds another parameter at `norm.weight` than is recorded",
    ]


def test_a_parameter_that_is_recorded_as_a_buffer_or_under_one_name_of_two_is_seen_by_the_witness() -> None:
    def wrongly(nodes):
        wrong = {"norm.weight": {"kind": "buffer"}, "norm.bias": {"aliases": ("fc.bias",)}}
        return tuple([evolve(node, **wrong.get(getattr(node, "address", ""), {})) for node in nodes])

    facts = [finding.fact for finding in broken(witness, with_graph(nodes=wrongly))]
    assert facts[:2] == [
        "`norm.weight` is a parameter of the model, and recorded as a buffer",
        "the model holds it at `norm.bias`, and recorded is `fc.bias`, `norm.bias`",
    ]


def test_a_parameter_that_lost_its_gradient_is_seen_by_the_witness() -> None:
    def change(record):
        ref = Ref(next(node.name for node in record.graph.state_nodes if node.address == "fc.weight"))
        return evolve(record, values=record.values | {ref: record.values[ref].detach()})

    (found,) = broken(witness, change)
    assert found.fact == "`fc.weight` needs a gradient, and is recorded otherwise"


def test_inputs_in_another_order_are_seen_by_the_witness() -> None:
    model, one, other = (lambda x, y: x - y * 2), torch.randn(3), torch.randn(3)

    def ask(subject: ModelUnderTest) -> tuple:
        turned = with_graph(inputs=lambda inputs: (inputs[0][::-1], inputs[1]))(subject.record)
        assert witness(subject)
        return witness(evolve(subject, record=turned)).failures

    (found,) = with_model_under_test(model, (one, other), {}, ask)
    assert found.fact == "the inputs are recorded otherwise than they were given: other numbers"


@pytest.mark.parametrize("kind", ["exp", "mean"])
def test_a_call_that_runs_without_gradients_in_the_program_alone_is_named(kind: str) -> None:
    def change(record):
        call = by_kind(record, kind)
        return with_call(record, call.name, context=evolve(call.context, grad=False))

    (found,) = broken(audit, change)
    assert found.node.startswith(kind) and found.fact.endswith(
        "gradients are on in 0 of these calls in a replay, in 1 in a plain forward"
    )


def test_a_module_call_that_the_program_lost_is_seen_by_the_witness() -> None:
    def change(record):
        return evolve(record, graph=evolve(record.graph, module_outputs=record.graph.module_outputs[1:]))

    (found,) = broken(witness, change)
    assert (found.node, found.fact) == ("conv:1", "a hook sees this module call, the program has none")


def test_a_module_call_that_the_program_made_up_is_seen_by_the_witness() -> None:
    def change(record):
        scope, tree = record.graph.module_outputs[0]
        more = (*record.graph.module_outputs, (evolve(scope, call=2), tree))
        return evolve(record, graph=evolve(record.graph, module_outputs=more))

    (found,) = broken(witness, change)
    assert (found.node, found.fact) == ("conv:2", "the program has this module call, no hook sees it")


def test_a_constant_in_the_place_of_what_depends_on_the_input_is_seen_on_other_inputs() -> None:
    def change(record):
        call = by_kind(record, "mean")
        return with_call(record, call.name, target=Target.of(the_same_number))

    (found,) = broken(other_inputs_agree, change)
    assert found.fact.startswith("on other inputs the model's own output is other numbers")


def the_same_number(x):
    return x.new_ones(())


# ---- restoring -------------------------------------------------------------------------------------------------------


def test_a_model_that_raises_raises_its_own_error_and_is_left_as_it_was() -> None:
    def steps(m, x):
        m.seen = True
        torch.rand(1)
        raise KeyError("mine")

    model, state = Model(steps), torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        rl.check(model, torch.randn(3, 4, generator=torch.Generator()))
    assert not hasattr(model, "seen") and torch.equal(torch.get_rng_state(), state)


def writes(m, x):
    x.add_(1)
    return m.norm(m.fc(x))


def trains(m, x):
    with torch.enable_grad():
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        m.fc(x).square().sum().backward()
        optimizer.step()
    return m.fc(x)


def replaces(m, x):
    m.fc.weight = nn.Parameter(m.fc.weight * 2)
    m.norm.running_mean = m.norm.running_mean + 1
    return m.fc(x)


def turns_switches(m, x):
    m.eval().requires_grad_(False)
    x.grad = torch.ones_like(x)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_default_dtype(torch.float64)
    return m.fc(x)


def switches() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        torch.backends.mha.get_fastpath_enabled(),
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("raises", [False, True], ids=["", "and raises"])
@pytest.mark.parametrize("steps", [writes, trains, replaces, turns_switches])
def test_whatever_a_forward_does_before_it_raises_or_returns_is_undone(steps: Callable, raises: bool) -> None:
    def forward(m, x):
        made = steps(m, x)
        if raises:
            raise KeyError("mine")
        return made

    torch.manual_seed(0)
    model, x = Model(forward), torch.randn(3, 4)
    model.fc.weight.grad = torch.ones(4, 4)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    before = [repr(belongings(model)), repr(generators()), switches(), x.clone()]
    with pytest.raises(KeyError, match="mine") if raises else nullcontext():
        assert rl.check(model, x)
    after = [repr(belongings(model)), repr(generators()), switches(), x]
    assert after[:3] == before[:3] and torch.equal(after[3], before[3]) and x.grad is None
    assert torch.equal(model.fc.weight.grad, torch.ones(4, 4))
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(now[name] is tensor for name, tensor in held.items()) and now.keys() == held.keys()


def test_a_model_that_gives_a_parameter_other_data_is_checked_like_others() -> None:
    def steps(m, x):
        m.fc.weight.data = m.fc.weight.data * 2
        return m.fc(x)

    torch.manual_seed(0)
    model = Model(steps)
    before = model.fc.weight.detach().clone()
    assert rl.check(model, torch.randn(3, 4))
    assert torch.equal(model.fc.weight, before)


def test_hooks_of_the_users_are_seen_and_none_is_left_behind() -> None:
    model = Model(lambda m, x: m.norm(m.fc(x)))
    model.fc.register_forward_hook(lambda module, args, output: output * 2)
    assert rl.check(model, torch.randn(3, 4))
    assert len(model.fc._forward_hooks) == 1 and not model.norm._forward_hooks and not model.fc._forward_pre_hooks


def test_the_report_has_the_laws_of_the_program_and_those_of_the_model() -> None:
    report = rl.check(nn.Linear(4, 4), torch.randn(3, 4))
    assert [law.name for law in report.laws][-4:] == ["completeness", "witness", "other inputs", "gradients"]
    assert "completeness" in str(report) and "1 ATen call " in str(report)


def test_keywords_are_the_models_own() -> None:
    def model(x, *, scale):
        return x * scale

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rl.check(model, torch.randn(3, 4), scale=2.0, sample=1)


# -- what torch does by itself -----------------------------------------------------------------------------------------


class Mapped(nn.Module):
    """A product beneath vmap, which torch opens in one way or another as its factor needs gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        weights = torch.stack([self.layer.weight, self.layer.weight * 2])
        return torch.vmap(lambda weight: x @ weight)(weights).sum(0) + self.layer(x)


def test_a_product_beneath_vmap_is_opened_as_the_model_opens_it():
    torch.manual_seed(0)
    model, x = Mapped(), torch.randn(3, 4)
    prog = rl.capture(model, x)
    needing = x.clone().requires_grad_()
    run = prog.replay(needing, grad=True)
    assert run.diverged
    (gradient,) = torch.autograd.grad(run.output.sum(), needing)
    (wanted,) = torch.autograd.grad(model(needing).sum(), needing)
    assert torch.equal(gradient, wanted)
    with pytest.raises(rl.DivergedReplay, match=r"`requires_grad\(input_1_0\)` was False when recorded"):
        prog.replay(needing, grad=True, on_divergence="raise")
    for given in (x, needing):
        report = rl.check(model, given)
        assert report, str(report)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).relu()


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Own])
def test_a_compiled_submodule_is_called_once(make):
    torch.manual_seed(0)
    model, x = nn.Sequential(torch.compile(make(), backend="eager"), nn.Tanh()), torch.randn(3, 4)
    report = rl.check(model, x)
    assert report, str(report)
    prog = rl.capture(model, x)
    assert [str(scope) for scope, _ in prog.graph.module_outputs if scope.address == "0"] == ["0:1"]
    assert torch.equal(prog.replay(patch={"0": torch.neg}).output, torch.tanh(-model[0](x)))


class Doubled:
    def __call__(self, tensor):
        return tensor * 2


def halves_again(tensor):
    return Doubled()(tensor) / 4


@pytest.mark.parametrize("pack", [lambda tensor: tensor * 2, Doubled(), halves_again, partial(halves_again)])
def test_what_hooks_on_saved_tensors_compute_is_no_operation_of_the_model(pack):
    class Packing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return self.layer(x).pow(2)

    report = rl.check(Packing(), torch.randn(3, 4))
    assert report, str(report)


def test_a_hook_that_the_forward_itself_puts_on_a_module_is_no_fault():
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            handle = self.a.register_forward_hook(lambda module, args, out: out + 1)
            made = self.a(x)
            handle.remove()
            return self.b(made)

    report = rl.check(Hooked(), torch.randn(3, 4))
    assert report, report
