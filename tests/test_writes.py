"""A write in place is a node whose arguments have names, and no other file knows their order."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from internals import (
    DerivedView,
    Hole,
    InnerGradient,
    Ref,
    Target,
    TargetIndex,
    ViewStep,
    Write,
    WriteArguments,
    as_plain_call,
    mutate,
    original_call,
    packed_place as packed,
    problems,
    unpacked_place as unpacked,
)

import replaylens as rl

PACKAGE = Path(rl.__file__).parent
X = torch.arange(6.0).reshape(2, 3)


def through_a_view(x, y):
    x = x * 2
    x[0].add_(y)
    return x.sum()


def with_a_gradient(x):
    y = x.sin()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return slope * y


def written():
    graph = rl.capture(through_a_view, X, torch.ones(3)).graph
    return graph, next(call for call in graph.calls if isinstance(call, Write))


def differentiated():
    graph = rl.capture(with_a_gradient, X.clone().requires_grad_()).graph
    return graph, next(call for call in graph.calls if isinstance(call, InnerGradient))


def told(graph, call):
    """The problems of a graph in which a node is another one."""
    nodes = tuple([call if node.name == call.name else node for node in graph.nodes])
    return {problem.fact for problem in problems(evolve(graph, nodes=nodes))}


# ---- the node --------------------------------------------------------------------------------------------------------


def test_a_write_names_what_it_is_given_and_what_it_gives():
    _, write = written()
    given, gives = write.arguments, write.gives
    assert given.function == Target.of(torch.Tensor.add_)
    assert given.bases == (Ref("mul_1_2"),)
    assert given.args == (packed(TargetIndex(0)), Ref("input_2_1"))
    (view,) = map(unpacked, given.targets)
    assert view.base == 0 and [unpacked(step).function.short for step in view.steps] == ["__getitem__"]
    assert given.values == (Ref("getitem_1_3"),)
    assert gives == (None, (Ref(write.name, (1, 0)),), (Ref(write.name, (2, 0)),))
    assert write.returns_target and not write.writes_out and write.only_read == ()


def test_a_write_keeps_of_its_views_values_only_those_that_a_patch_has_parted():
    _, write = written()
    (value,) = write.arguments.values
    assert write.with_values({value}) == write
    assert write.with_values(set()).arguments.values == (None,)


def test_an_inner_gradient_names_what_it_is_given():
    _, call = differentiated()
    given = call.arguments
    assert [inner.kind for inner in given.stretch.calls] == ["sin", "sum"] and len(call.through) == 2
    assert given.starts == (Ref("input_1_0"),) and given.others == () and given.cotangents == (None,)
    assert given.keep_graph and given.there == ((Ref("sum_1_2"),), (Ref("input_1_0"),))


MADE = {
    "a write": (through_a_view, (X, torch.ones(3)), "add_", 2),
    "memory that was undefined": (lambda x: torch.empty(2, 3).copy_(x) + x, (X,), "empty", 2),
    "out= of another size": (lambda x: torch.add(x, 1, out=torch.empty(0)), (X,), "add", 2),
    "nothing around it": (lambda x: torch.relu(x), (X,), "relu", 1),
}


@pytest.mark.parametrize("name", MADE)
def test_the_models_own_call_is_found_beneath_what_makes_it_pure(name):
    model, args, short, count = MADE[name]
    calls = map(original_call, rl.capture(model, *args).graph.calls)
    assert [len(call.args) for call in calls if call.target.short == short] == [count]


# ---- its laws --------------------------------------------------------------------------------------------------------


def other_view(base, *holes):
    step = ViewStep(Target.of(torch.Tensor.select), (*holes, 0, 0), (), (), True)
    return packed(DerivedView(base, (packed(step),)))


MALFORMED = {
    "is given 3 arguments, not function, bases, args, kwargs, targets, values": lambda w: evolve(w, args=w.args[:3]),
    "calls 'add_', which is no function by name": lambda w: w.given(function="add_"),
    "has keyword arguments without names": lambda w: w.given(kwargs=()),
    "has bases that are not one value each": lambda w: w.given(bases=w.arguments.bases * 2),
    "has a target that is a view of no base": lambda w: w.given(targets=(other_view(1, Hole.HERE),)),
    "has an argument that is none of its targets": lambda w: w.given(args=(packed(TargetIndex(1)),)),
    "has a view that is not one of one tensor": lambda w: w.given(targets=(other_view(0),)),
    "has 0 values for 1 targets": lambda w: w.given(values=()),
    "has 1 values for 1 targets": lambda w: w.given(values=(0,)),
    "does not give what it wrote, and each base": lambda w: evolve(w, returns=(*w.returns[:2], ())),
    "is a Write and calls sin": lambda w: evolve(w, target=Target.of(torch.sin)),
    "writes in place and is no Write": lambda w: as_plain_call(w),
}


@pytest.mark.parametrize("fact", MALFORMED)
def test_a_malformed_write_is_a_problem(fact):
    graph, write = written()
    assert problems(graph) == ()
    assert fact in told(graph, MALFORMED[fact](write))


def with_given(call, **changes):
    return evolve(call, args=tuple(call.arguments._replace(**changes)))


MALFORMED_GRADIENTS = {
    "is given 2 arguments, not stretch, starts, others, cotangents, states, keep_graph, there": lambda g: evolve(
        g, args=g.args[:2]
    ),
    "does not give its stretch each input": lambda g: with_given(g, starts=()),
    "runs 1 nodes again, and has 2 in its stretch": lambda g: evolve(g, through=g.through[:1]),
    "does not have a cotangent for each output of its stretch": lambda g: with_given(g, cotangents=()),
    "has the values of its stretch exactly where it is not differentiated again": lambda g: with_given(g, there=()),
    "runs others again and is no InnerGradient": lambda g: as_plain_call(g),
}


@pytest.mark.parametrize("fact", MALFORMED_GRADIENTS)
def test_a_malformed_inner_gradient_is_a_problem(fact):
    graph, call = differentiated()
    assert problems(graph) == ()
    assert fact in told(graph, MALFORMED_GRADIENTS[fact](call))


# ---- who knows what --------------------------------------------------------------------------------------------------


def test_in_which_order_the_arguments_of_a_write_stand_is_known_in_one_file(tmp_path):
    """There they stand in the other order; all the rest of the package is as it is."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name)
    file = tmp_path / Path(inspect.getfile(Write)).relative_to(PACKAGE.parent)
    text = file.read_text()
    for piece in (inspect.getsource(WriteArguments), inspect.getsource(mutate)):
        lines = piece.splitlines()
        fields = [n for n, line in enumerate(lines) if re.match(rf"    ({'|'.join(WriteArguments._fields)}): ", line)]
        assert len(fields) == len(WriteArguments._fields)
        other = [lines[n] for n in reversed(fields)]
        for n, line in zip(fields, other, strict=True):
            lines[n] = line
        text = text.replace(piece, "\n".join(lines) + "\n")
    file.write_text(text)
    script = tmp_path / "uses_everything.py"
    script.write_text(USES)
    ran = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.decode().startswith(str(tmp_path))


USES = """
import torch
import replaylens as rl
from torch import nn

print(rl.__file__)
X = torch.arange(6.0).reshape(2, 3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        y = self.lin(x)
        y[0].mul_(2)
        y[:, 1:].add_(y[:, :-1])
        y[1, torch.tensor([0, 2])] = x[0, :2]
        torch.nn.functional.relu(y, inplace=True)
        z = torch.add(y.detach(), 1, out=torch.empty(0)) + torch.empty(2, 3).copy_(y) + torch.empty(2, 3).uniform_()
        w = y.clone()
        w[0].clamp_(max=3.0)
        return z + w, y.t()


def same(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


torch.manual_seed(0)
prog = rl.capture(Model(), X)
for report in (prog.check(), rl.check(Model(), X)):
    assert report, report
assert "mul_(linear_1_3[0], 2)" in prog.code
assert same(prog.replay().output, prog.output)
tried = 0
for layer in prog.layers:
    layer.function, layer.arguments, layer.keywords, layer.plain_arguments, layer.plain_keywords, layer.flops
    if layer.shape and layer.layer_type not in ("output", "input"):
        patch = {layer.label: rl.Zero()}
        try:
            edited = prog.with_patch(patch)
        except rl.DivergedReplay:
            continue
        assert same(edited.output, prog.replay(patch=patch).output), layer.label
        tried += 1
assert tried > 9
sites = [layer.label for layer in prog.layers if layer.is_inplace and layer.shape]
rl.sweep(prog, variants={label: {label: rl.Zero()} for label in sites})
assert not same(prog.swap("clamp", lambda x, **given: x + 2).output, prog.output)
prog.draw().source
prog.grads(of=lambda out: out[0].sum())
"""


def sources():
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_no_module_knows_another_by_a_dotted_string():
    for name, text in sources().items():
        found = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        assert not [one for one in found if one.startswith("replaylens._") and not one.endswith("_view")], name


def test_nodes_are_told_by_their_kind_and_not_by_the_function_that_they_run():
    for name, text in sources().items():
        assert not re.search(r"target\.function is (not )?(mutate|differentiate)|target\.name [!=]= ", text), name
