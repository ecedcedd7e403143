"""Laws of edits, on random programs and on every model of the zoo.

An edited graph is lawful. What nothing changes changes no bit. A program with a patch in it gives what a replay with the
patch gives. Edits at different nodes commute. A slice gives what a replay from there gives. The original stays as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from internals import Call, Ref, detached_views, original_call, problems, prune, replace
from oracle import assert_same, assert_same_gradients, gradients
from random_programs import Program, programs
from torch import nn
from zoo import MODELS

import replaylens as rl

EXAMPLES = os.environ.get("REPLAYLENS_EXAMPLES")
many = settings(
    max_examples=int(EXAMPLES or 25),
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what some models do


def captured(program: Program) -> rl.Program:
    try:
        return rl.capture(program, *program.inputs())
    except rl.CaptureError:
        assume(False)
        raise


def tensors_of(prog: rl.Program) -> list[str]:
    """The labels of the layers that compute one floating tensor."""
    found = [layer for layer in prog.layers if layer.layer_type not in ("output", "constant")]
    return [layer.label for layer in found if layer.shape is not None and layer.value.is_floating_point()]


def halved(value: torch.Tensor) -> torch.Tensor:
    return value * 0.5 if value.is_floating_point() or value.is_complex() else value.clone()


def copied(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


def both(one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any] | None:
    """What two ways give; None where both say that the change leads away, or that torch cannot do it."""
    results, errors = [], []
    for way in (one, other):
        try:
            results.append(way())
        except (rl.DivergedReplay, RuntimeError, IndexError) as error:
            errors.append(type(error))
    assert len(errors) in (0, 2), f"only one of two ways ended in {errors}"
    return None if errors else (results[0], results[1])


# ---- random programs -----------------------------------------------------------------------------------------------


@many
@given(programs(), st.data())
def test_the_empty_edit_is_the_identity(program, data):
    prog = captured(program)
    assert replace(prog.graph, {}) == prog.graph
    other = prog.with_patch({})
    assert other.graph == prog.graph
    assert all(other._record.values[ref] is value for ref, value in prog._record.values.items())
    assert not problems(prune(prog.graph))


@many
@given(programs(), st.data())
def test_a_program_with_a_patch_gives_what_a_replay_with_it_gives(program, data):
    prog = captured(program)
    labels = tensors_of(prog)
    assume(labels)
    chosen = data.draw(st.lists(st.sampled_from(labels), min_size=1, max_size=3, unique=True))
    kinds = [rl.Scale(0.5), rl.Zero(), rl.Add(1.0) >> rl.Clamp(max=2.0), halved]
    patch = {label: data.draw(st.sampled_from(kinds)) for label in chosen}
    before = {layer.label: layer.value.clone() for layer in prog.layers if layer.shape is not None}
    made = both(
        lambda: prog.replay(patch=patch, keep="all", on_divergence="raise"),
        lambda: prog.with_patch(patch),
    )
    assume(made is not None)
    run, other = made
    assert not problems(other.graph)
    assert_same(other.output, run.output, "output")
    assert_same(other.replay().output, run.output, "replayed")
    for label in prog.layer_labels:
        assert_same(other[label].value, run[label], label)
    for label, value in before.items():
        assert_same(prog[label].value, value, label)


@many
@given(programs(calm=True), st.data())
def test_gradients_through_a_patched_program_are_those_of_a_replay_with_the_patch(program, data):
    prog = captured(program)
    patch = {data.draw(st.sampled_from(tensors_of(prog))): rl.Scale(0.5)}

    def taken(make: Callable[..., Any]) -> Any:
        fresh = program.inputs()
        return gradients(make(*fresh).output, fresh, program)

    made = both(
        lambda: taken(lambda *inputs: prog.replay(*inputs, patch=patch, grad=True, on_divergence="raise")),
        lambda: taken(lambda *inputs: prog.with_patch(patch).replay(*inputs, grad=True)),
    )
    if made is not None:
        assert_same_gradients(made[1], made[0])


@many
@given(programs(), st.data())
def test_edits_at_different_nodes_commute(program, data):
    prog = captured(program)
    labels = tensors_of(prog)
    assume(len(labels) > 1)
    one, other = data.draw(st.lists(st.sampled_from(labels), min_size=2, max_size=2, unique=True))
    edits = [
        lambda prog, label: prog.with_patch({label: rl.Scale(0.5)}),
        lambda prog, label: prog.insert_after(label, halved),
        lambda prog, label: prog.lesion(label),
    ]
    first, second = data.draw(st.sampled_from(edits)), data.draw(st.sampled_from(edits))
    made = both(lambda: second(first(prog, one), other), lambda: first(second(prog, other), one))
    assume(made is not None)
    assert_same(made[0].output, made[1].output)
    assert {node.name: node for node in made[0].graph} == {node.name: node for node in made[1].graph}


@many
@given(programs(), st.data())
def test_a_copy_behind_any_node_changes_no_bit(program, data):
    prog = captured(program)
    label = data.draw(st.sampled_from(tensors_of(prog)))
    try:
        other = prog.insert_after(label, copied)
    except (rl.DivergedReplay, RuntimeError):
        return  # it parts the value from memory that the model looks at
    assert not problems(other.graph)
    wanted = prog.output
    if detached_views(other.graph, ()):  # the model itself, with the copy put in its place while it runs
        wanted = rl.run(program, *program.inputs(), patch={label: copied}).output
    assert_same(other.output, wanted)  # what the model writes later is the copy, where it would have been the value
    assert_same(other.replay().output, wanted)


@many
@given(programs(), st.data())
def test_a_function_behind_a_node_does_what_it_does_as_a_patch(program, data):
    prog = captured(program)
    label = data.draw(st.sampled_from(tensors_of(prog)))
    made = both(lambda: prog.insert_after(label, halved), lambda: prog.with_patch({label: halved}))
    if made is not None:
        assert_same(made[0].output, made[1].output)


@many
@given(programs(), st.data())
def test_a_slice_gives_what_a_replay_with_that_value_gives(program, data):
    prog = captured(program)
    label = data.draw(st.sampled_from(tensors_of(prog)))
    value = halved(prog[label].value)
    try:
        part = prog.slice(label)
    except rl.BadEdit:  # no way leads from it to the output, or a replay cannot begin there either
        with suppress(rl.DivergedReplay):
            assert_same(prog.replay(patch={label: value}, on_divergence="raise").output, prog.output)
        return
    assert not problems(part.graph)
    assert_same(part.replay().output, prog.output, "itself")
    made = both(
        lambda: prog.replay(patch={label: value}, on_divergence="raise").output,
        lambda: part(value).output,
    )
    if made is not None:
        assert_same(made[1], made[0])


@many
@given(programs(), st.data())
def test_a_bypassed_node_gives_what_it_read(program, data):
    prog = captured(program)
    calls = [call.name for call in prog.graph.calls if call.target.short != "mutate" and call.name in tensors_of(prog)]
    assume(calls)
    label = data.draw(st.sampled_from(calls))
    try:
        other = prog.bypass(label)
    except (rl.BadEdit, rl.DivergedReplay, RuntimeError):
        return
    assert not problems(other.graph)
    (ref,) = other.graph[label].refs
    assert_same(other.output, prog.replay(patch={label: prog._record.values[ref]}).output)
    assert other.bypass(label).graph == other.graph


# ---- the zoo -------------------------------------------------------------------------------------------------------


def built(name: str) -> rl.Program:
    case = MODELS[name]()
    try:
        prog = rl.capture(case.model, *case.args, **case.kwargs)
        prog.replay()
    except Exception:
        pytest.skip("it is refused, or leaves its own path")
    return prog


@pytest.mark.parametrize("name", MODELS)
def test_every_edit_of_a_model_of_the_zoo_is_lawful_and_does_what_it_says(name):
    prog = built(name)
    output = prog.replay().output
    for layer in prog.layers[:: max(1, len(prog.layers) // 5)]:
        if layer.layer_type == "output" or layer.shape is None:
            continue
        label, value = layer.label, layer.value
        wanted = both(
            lambda label=label: prog.replay(patch={label: halved}, on_divergence="raise").output,
            lambda label=label: prog.with_patch({label: halved}),
        )
        if wanted is not None:
            assert not problems(wanted[1].graph)
            assert_same(wanted[1].output, wanted[0], label)
            assert_same(wanted[1].replay().output, wanted[0], label)
            assert_same(prog.insert_after(label, halved).output, wanted[0], label, loose=True)  # its own memory layout
        if isinstance(layer.node, Call):
            function = original_call(layer.node).target
            assert prog.swap(label, function.function).graph == prog.graph
        ends = prog.slice(to=label)
        assert not problems(ends.graph)
        assert_same(ends.replay().output, value, label)
    assert_same(prog.replay().output, output, "the original")


def test_a_ref_is_all_that_ties_a_graph_together():
    """The oracle of these tests itself: a node that reads what is not there is found."""
    prog = rl.capture(lambda x: x.exp() + 1, torch.ones(2))
    with pytest.raises(rl.UnlawfulGraph, match="reads nobody, which no earlier node gives"):
        replace(prog.graph, {}, {Ref("exp_1_1"): Ref("nobody")})


# ---- edited programs check -------------------------------------------------------------------------------------------

SHAPES_BY_CONTENT = (
    "attention_in_evaluation", "custom_op", "custom_op_of_a_library", "function_differentiated_twice",
    "function_in_a_function", "function_of_ones_own", "function_that_gives_its_input_back", "function_under_no_grad",
    "packed_sequence", "quantized_dynamic", "shapes_that_depend_on_data", "sparse_matrix", "tensors_as_integers",
)  # fmt: skip


def negative(value):
    return value * -1.5


@pytest.mark.parametrize("name", dict.fromkeys((*SHAPES_BY_CONTENT, *sorted(MODELS)[::5])))
def test_every_edited_program_checks(name):
    case = MODELS[name]()
    try:
        prog = rl.capture(case.model, *case.args, **case.kwargs)
        layers = [layer for layer in prog.layers if is_dense_float(layer.value)]
    except Exception:
        assert case.refusal
        return
    decided = [one for one in layers if one.label in prog.graph and getattr(prog.graph[one.label], "is_dynamic", False)]
    for layer in (*decided[:2], *layers[len(layers) // 2 :][:1]):
        with suppress(rl.ReplaylensError):  # an edit may be refused, with its reason
            patched = prog.with_patch({layer.label: rl.Scale(-1.5)})
            assert patched.check(), f"{layer.label}\n{patched.check()}"
        with suppress(rl.ReplaylensError):
            inserted = prog.insert_after(layer.label, negative)
            assert inserted.check(), f"{layer.label}\n{inserted.check()}"


def is_dense_float(value):
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_floating_point()


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y[y.sum(1) > 0].sum(0)


def test_a_function_behind_a_shape_that_content_decides_holds_for_that_shape():
    torch.manual_seed(0)
    prog = rl.capture(Chosen(), torch.randn(5, 4))
    rows, x = len(prog["getitem_1"].value), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    assert len(prog.replay(x)["getitem_1"]) != rows

    def constant_shape(value):  # of the recorded shape, whatever it is given
        return torch.zeros(rows, 4) + value.sum() / value.shape[0]

    edited = prog.insert_after("getitem_1", constant_shape)
    assert edited.check() and torch.equal(edited.replay(*prog.inputs).output, edited.output)
    with pytest.raises(rl.DivergedReplay, match="the shape of getitem_1_4 was"):
        edited.replay(x)
    with pytest.raises(rl.ShapeMismatch, match="Give a value of shape"):
        prog.insert_after("getitem_1", lambda value: value[value.sum(1) > 1e9])
