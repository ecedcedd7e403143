"""Programs broken on purpose: each break is caught, at its node, by the law that is there for it, and by no other.

The model has one of everything that can be broken: two layers with parameters, one of them run twice, a view that is
written through, a draw, a buffer that is written, numbers among arguments.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from internals import (
    LAWS,
    Call,
    Ref,
    Scope,
    Target,
    Trial,
    Versions,
    as_plain_call,
    moved_operands,
    node_runner,
    reading,
    renamed as renamed_node,
)
from metadata_law import wrong_metadata
from torch import nn

import replaylens as rl


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        x = self.first(x)
        self.seen.add_(x.detach().mean(0))
        x = self.again(self.again(x)).tanh()
        torch.full((2,), 7.0)
        row = x[0]
        x[:, 1] = 0.5
        x = x - row * 3
        x = nn.functional.dropout(x, 0.5, training=True)
        if x.sum() > -1e9:
            x = x.clamp(-2.0, 2.0)
        return self.branch(x) / (x.exp() + 1)


def program() -> Any:
    torch.manual_seed(0)
    return rl.capture(Everything(), torch.randn(3, 4))


def with_graph(prog: Any, change: Callable[[Any], Any]) -> Any:
    """The program with another graph, and the same values: what a fault in capture would leave behind."""
    record = prog._record
    made = evolve(record, graph=change(record.graph))
    return rl.Program(_record=made, _output=prog.output)


def with_node(prog: Any, name: str, **changes: Any) -> Any:
    made = as_plain_call if "target" in changes else evolve
    return with_graph(
        prog,
        lambda graph: evolve(
            graph, nodes=tuple([made(node, **changes) if node.name == name else node for node in graph.nodes])
        ),
    )


def with_value(prog: Any, name: str, value: torch.Tensor) -> Any:
    """The program with another saved value at a node, kept in all innocence."""
    record = prog._record
    ref = next(ref for ref in record.values if ref.node == name)
    values = {**record.values, ref: value}
    versions = Versions([(other, tensor._version) for other, tensor in values.items()])
    return rl.Program(_record=evolve(record, values=values, versions=versions), _output=prog.output)


def call(prog: Any, kind: str, number: int = 1) -> Call:
    return [node for node in prog.graph.calls if node.kind == kind][number - 1]


METADATA = "metadata"  # asked by tests alone: see metadata_law.py
BREAKS: dict[str, tuple[str, Callable[[Any], tuple[Any, str]]]] = {}


def caught_by(law: str) -> Callable[..., Any]:
    def register(break_: Callable[[Any], tuple[Any, str]]) -> Callable[..., Any]:
        BREAKS[break_.__name__] = law, break_
        return break_

    return register


# ---- saved values ----


@caught_by("each node alone")
def wrong_saved_value_of_the_right_shape(prog):
    name = call(prog, "tanh").name
    return with_value(prog, name, prog[name].value + 1), name


@caught_by("each node alone")
def one_bit_of_a_saved_value(prog):
    name = call(prog, "tanh").name
    value = prog[name].value.clone()
    value.view(torch.int32)[0, 0] ^= 1
    return with_value(prog, name, value), name


@caught_by("each node alone")
def minus_zero_for_zero(prog):
    name = call(prog, "relu").name
    value = prog[name].value.clone()
    value[value == 0] = -0.0
    return with_value(prog, name, value), name


@caught_by("each node alone")
def stale_view(prog):
    """The row as it is after the write, where the model read it before."""
    node = call(prog, "getitem")
    value = prog[node.name].value.clone()
    value[1] = 0.5
    return with_value(prog, node.name, value), node.name


@caught_by("saved values")
def saved_value_of_another_type(prog):
    name = call(prog, "exp").name
    return with_value(prog, name, prog[name].value.double()), name


@caught_by("saved values")
def saved_value_overwritten(prog):
    name = call(prog, "exp").name
    prog._record.values[Ref(name)].add_(1)
    return prog, name


@caught_by("saved values")
def parameter_overwritten(prog):
    with torch.no_grad():
        prog._record.values[Ref("branch.0.weight")].mul_(2)
    return prog, "branch.0.weight"


# ---- what a call reads and is ----


@caught_by("each node alone")
def swapped_arguments(prog):
    node = call(prog, "sub")
    return with_node(prog, node.name, args=node.args[::-1]), node.name


@caught_by("each node alone")
def wrong_parent(prog):
    node = call(prog, "exp")
    return with_node(prog, node.name, args=(Ref(call(prog, "tanh").name),)), node.name


@caught_by("each node alone")
def wrong_parameter(prog):
    node = call(prog, "linear", 4)
    return with_node(prog, node.name, args=(node.args[0], Ref("first.weight"), node.args[2])), node.name


@caught_by("each node alone")
def value_as_it_was_before_a_write(prog):
    reader = call(prog, "sub")
    return with_node(prog, reader.name, args=(Ref(call(prog, "tanh").name), reader.args[1])), reader.name


@caught_by("each node alone")
def lost_in_place_write(prog):
    """Another node where the write was: what comes after reads the value before it."""
    node = call(prog, "setitem")
    old, kept = node.refs[0], Target.of(torch.clone)
    return with_node(prog, node.name, target=kept, args=(old,), kwargs=()), node.name


@caught_by("each node alone")
def altered_literal(prog):
    node = call(prog, "clamp")
    return with_node(prog, node.name, args=(node.args[0], -0.1, 0.1)), node.name


@caught_by("each node alone")
def altered_keyword(prog):
    node = call(prog, "mul")
    return with_node(prog, node.name, args=(node.args[0], 4)), node.name


@caught_by("each node alone")
def wrong_function(prog):
    node = call(prog, "relu")
    return with_node(prog, node.name, target=Target.of(torch.sigmoid), args=node.args[:1], kwargs=()), node.name


@caught_by("each node alone")
def value_kept_as_a_literal(prog):
    """A call that holds the value it once gave in place of computing it: every value agrees, and nothing is read."""
    node = call(prog, "exp")
    wrong = Target.of(torch.zeros_like)
    return with_node(prog, node.name, target=wrong), node.name


def _answer(recorded: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda *args: recorded.clone()


@caught_by("nonsense parents")
def constant_in_the_place_of_a_call(prog):
    """All values agree, and the call computes nothing."""
    node = call(prog, "exp")
    return with_node(prog, node.name, target=Target.of(_answer(prog[node.name].value))), node.name


@caught_by("nonsense parents")
def parent_that_nothing_depends_on(prog):
    node, function = call(prog, "sub"), torch.sub
    ignored = Ref(call(prog, "linear").name)
    target = Target.of(lambda one, two, ignored: function(one, two))
    return with_node(prog, node.name, target=target, args=(*node.args, ignored)), node.name


# ---- draws ----


@caught_by("draws")
def dropped_generator_state(prog):
    name = call(prog, "dropout").name
    return with_node(prog, name, draws=None), name


@caught_by("each node alone")
def another_generator_state(prog):
    record = prog._record
    name = call(prog, "dropout").name
    state = torch.Generator().manual_seed(7).get_state()
    made = evolve(record, draws=dict.fromkeys(record.draws, state))
    return rl.Program(_record=made, _output=prog.output), name


# ---- the whole ----


@caught_by("whole replay")
def another_output(prog):
    name = call(prog, "exp").name
    return with_graph(prog, lambda graph: evolve(graph, output=Ref(name))), name


@caught_by("whole replay")
def output_in_another_container(prog):
    return with_graph(prog, lambda graph: evolve(graph, output=(graph.output,))), ""


@caught_by("whole replay")
def output_that_the_model_did_not_return(prog):
    wrong = prog.output.detach() + 1
    return rl.Program(_record=prog._record, _output=wrong), prog.graph.output.node


@caught_by("whole replay")
def guard_of_another_answer(prog):
    return with_graph(
        prog,
        lambda graph: evolve(graph, guards=tuple([evolve(guard, result=not guard.result) for guard in graph.guards])),
    ), ""


# ---- the graph ----


@caught_by("graph")
def missing_node(prog):
    name = call(prog, "tanh").name
    nodes = lambda graph: tuple([node for node in graph.nodes if node.name != name])  # noqa: E731
    reader = call(prog, "getitem").name
    return with_graph(prog, lambda graph: evolve(graph, nodes=nodes(graph))), reader


@caught_by("graph")
def nodes_in_the_wrong_order(prog):
    def swap(graph):
        nodes = list(graph.nodes)
        one, two = graph.positions[call(prog, "exp").name], graph.positions[call(prog, "add", 2).name]
        nodes[one], nodes[two] = nodes[two], nodes[one]
        return evolve(graph, nodes=tuple(nodes))

    return with_graph(prog, swap), call(prog, "add", 2).name


@caught_by("graph")
def meaning_of_a_value_lost(prog):
    name = call(prog, "setitem").name
    return with_node(prog, name, spec=()), name


@caught_by("graph")
def state_change_of_no_node(prog):
    wrong = (("seen", Ref("nothing_1_99")),)
    return with_graph(prog, lambda graph: evolve(graph, changes=wrong)), "output"


@caught_by("graph")
def layer_set_aside_as_an_orphan(prog):
    name = call(prog, "exp").name
    return as_captured(with_graph(prog, lambda graph: evolve(graph, orphans=frozenset([name])))), name


@caught_by("graph")
def orphan_that_is_not_set_aside(prog):
    (name,) = prog.graph.orphans
    return as_captured(with_graph(prog, lambda graph: evolve(graph, orphans=frozenset()))), name


@caught_by("graph")
def one_address_for_two_parameters(prog):
    return with_node(prog, "again.weight", address="first.weight"), "first.weight"


# ---- names ----


def as_captured(prog: Any) -> Any:
    prog.history = ("captured",)
    return prog


def renamed(prog: Any, old: str, new: str) -> Any:
    """A node by another name, everywhere: the program computes as before."""
    record = prog._record
    graph = record.graph
    moved = {ref: evolve(ref, node=new) for ref in [*record.values, Ref(old)] if ref.node == old}
    nodes = [reading(renamed_node(node, new) if node.name == old else node, moved) for node in graph.nodes]
    outputs = tuple([(scope, moved.get(tree, tree)) for scope, tree in graph.module_outputs])
    made = evolve(graph, nodes=tuple(nodes), module_outputs=outputs)
    values = {moved.get(ref, ref): value for ref, value in record.values.items()}
    return as_captured(rl.Program(_record=evolve(record, graph=made, values=values), _output=prog.output))


@caught_by(METADATA)
def off_by_one_pass_number(prog):
    old = call(prog, "linear", 3).name
    new = old.replace(":2", ":3")
    return renamed(prog, old, new), new


@caught_by(METADATA)
def label_of_another_place(prog):
    old = call(prog, "exp").name
    return renamed(prog, old, "exp_2_99"), "exp_2_99"


@caught_by(METADATA)
def pass_of_another_layer(prog):
    """The first layer called a third pass of the second, whose parameters it does not have."""
    old = call(prog, "linear", 4).name
    new = call(prog, "linear", 2).name.replace(":1", ":3")
    return renamed(prog, old, new), new


@caught_by(METADATA)
def another_type_than_the_label_says(prog):
    name = call(prog, "exp").name
    return as_captured(with_node(prog, name, kind="log")), name


@caught_by(METADATA)
def wrong_module(prog):
    node, other = call(prog, "relu"), call(prog, "linear", 1)
    return as_captured(with_node(prog, node.name, scope=other.scope)), node.name


@caught_by(METADATA)
def call_number_of_a_module_off_by_one(prog):
    node = call(prog, "linear", 3)
    scope = Scope(node.scope.address, 3, node.scope.kind, node.scope.parent, node.scope.source)

    def change(graph):
        nodes = tuple([evolve(n, scope=scope) if n.name == node.name else n for n in graph.nodes])
        outputs = tuple([(scope if s == node.scope else s, tree) for s, tree in graph.module_outputs])
        return evolve(graph, nodes=nodes, module_outputs=outputs)

    return as_captured(with_graph(prog, change)), "again:3"


@caught_by(METADATA)
def output_of_a_module_that_another_gave(prog):
    later = call(prog, "exp").name

    def change(graph):
        outputs = [(s, Ref(later) if s.address == "first" else tree) for s, tree in graph.module_outputs]
        return evolve(graph, module_outputs=tuple(outputs))

    return as_captured(with_graph(prog, change)), later


def with_distance(prog: Any, which: str, name: str, span: Any) -> Any:
    """The program whose layer of this name says that it is another distance away."""
    kin = prog._facts.topology
    spans = list(getattr(kin, which))
    spans[prog[name].ordinal] = span
    object.__setattr__(kin, which, tuple(spans))
    return prog


@caught_by(METADATA)
def longest_way_from_the_input_counted_too_short(prog):
    layer = prog[call(prog, "div").name]
    least, most = layer.steps_from_input
    return with_distance(prog, "from_input", layer.label, (least, most - 1)), layer.label


@caught_by(METADATA)
def shortest_way_to_the_output_counted_too_long(prog):
    layer = prog[call(prog, "sub").name]
    least, most = layer.steps_to_output
    return with_distance(prog, "to_output", layer.label, (least + 1, most)), layer.label


@caught_by(METADATA)
def way_to_an_output_that_there_is_not(prog):
    name = prog.conditionals[0].layer
    return with_distance(prog, "to_output", name, (1, 1)), name


@caught_by(METADATA)
def output_that_says_it_comes_from_no_input(prog):
    return with_distance(prog, "from_input", prog[-1].label, None), prog[-1].label


# ---- one of twenty alike calls, which are tested together ----

TWENTY = 20


def differences(x, shifts):
    return torch.stack([torch.sub(x[number], shifts[number]) for number in range(TWENTY)])


@pytest.mark.parametrize("number", [1, 7, TWENTY])
def test_one_of_twenty_alike_calls_that_ignores_an_operand_is_found_and_no_other(number):
    """It goes by the name of the others, and gives what they would."""
    prog = rl.capture(differences, torch.randn(TWENTY, 3, 4), torch.randn(TWENTY, 3, 4))
    node = call(prog, "sub", number)
    shift, asked = prog._record.values[node.refs[1]].clone(), []

    def ignoring(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return one - shift

    def counted(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        asked.append(one)
        return one - two

    for other in range(1, TWENTY + 1):
        target = Target("torch.sub", ignoring if other == number else counted)
        prog = with_node(prog, call(prog, "sub", other).name, target=target)
    assert call(prog, "sub", number).target == call(prog, "sub", number % TWENTY + 1).target
    report = prog.check()
    assert [(finding.law, finding.node) for finding in report.failures] == [("nonsense parents", node.name)], report
    assert report["nonsense parents"].asked == with_graph(prog, lambda graph: graph).check()["nonsense parents"].asked
    assert len(asked) < 2 * 2 * TWENTY  # of each check: once in the replay, and a few times for all together


def test_one_of_twenty_alike_calls_that_zeros_hide_an_operand_from_is_found_and_no_other():
    gates = torch.rand(TWENTY, 3, 4) + 0.5
    gates[7] = 0.0
    prog = rl.capture(
        lambda x, gates: torch.stack([torch.mul(x[number], gates[number]) for number in range(TWENTY)]),
        torch.randn(TWENTY, 3, 4),
        gates,
    )
    report = prog.check()
    assert report
    (case,) = report.special
    assert (case.node, case.fact) == (call(prog, "mul", 8).name, "hidden by zeros in another argument")


def test_one_of_twenty_operands_that_a_call_ignores_is_found_and_no_other():
    prog = rl.capture(lambda x: torch.stack([x[number].exp() for number in range(TWENTY)]), torch.randn(TWENTY, 3))
    node = call(prog, "stack")
    ignored, asked = node.refs[7], []
    kept = prog._record.values[ignored].clone()

    def whole(parts: list[torch.Tensor]) -> torch.Tensor:
        asked.append(parts)
        return torch.stack(parts)

    def ignoring(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([*parts[:7], kept, *parts[8:]])

    assert with_node(prog, node.name, target=Target.of(whole)).check()
    assert len(asked) == 4  # once in the replay, and three times for all operands together
    report = with_node(prog, node.name, target=Target.of(ignoring)).check()
    (failure,) = report.failures
    assert (failure.law, failure.node, failure.parent) == ("nonsense parents", node.name, str(ignored))
    assert report["nonsense parents"].asked == prog.check()["nonsense parents"].asked


@pytest.mark.parametrize("sign", [1, -1])
def test_arithmetic_between_operands_is_no_proof_that_another_is_read(sign):
    """Sums and differences of marked numbers may be marked numbers of the operand that is ignored."""
    prog = rl.capture(lambda x: torch.stack([*x.exp().unbind()]).sum(0), torch.randn(TWENTY, 200, 200))
    node = call(prog, "stack")

    def mixing(parts: list[torch.Tensor]) -> torch.Tensor:
        mixed = [one + sign * (two - three) for one, two, three in zip(parts, parts[1:], parts[2:])]
        return torch.stack([*mixed[:7], *mixed[:13]])

    broken = with_node(prog, node.name, target=Target.of(mixing))
    given = {ref: prog._record.values[ref] for ref in node.refs}
    runner = node_runner(broken.graph[node.name], {})
    assert moved_operands(Trial(runner, given, runner(given), {})) == frozenset()


# ---- the specification ----

# What follows from a break: a replay, and who reads a wrong value, come out wrong too. Nothing else is claimed.
CONSEQUENCES = {"each node alone": {"whole replay"}, "saved values": {"each node alone"}, "draws": {"whole replay"}}


def test_the_program_holds_before_anything_is_broken():
    prog = program()
    assert prog.check(), prog.check()
    assert with_graph(prog, lambda graph: graph).check()
    assert not wrong_metadata(prog)


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_caught_at_its_node_by_the_law_that_is_there_for_it_and_no_other(name):
    law, break_ = BREAKS[name]
    broken, node = break_(program())
    report = broken.check()
    names = wrong_metadata(broken) if law == METADATA else []
    assert bool(report) == (law == METADATA)
    assert node in [finding.node for finding in (names if law == METADATA else report[law].failures)], report
    assert {finding.law for finding in report.failures} <= {law, *CONSEQUENCES.get(law, ())}, report


def test_every_law_catches_something_and_there_are_more_than_thirty_breaks():
    assert len(BREAKS) > 30
    assert {law for law, _ in BREAKS.values()} == {METADATA, *(law.name for law in LAWS)}
