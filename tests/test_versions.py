"""What differs from one Python or torch to the next: how conditions are compiled, and which private names there are."""

import ast
import linecache
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from internals import torch_private
from torch import nn

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


@pytest.mark.parametrize("kind", ["[{}]", "{{{}}}", "list({})", "list(dict({}))"])
def test_the_test_of_any_comprehension_that_fails_goes_on_behind_its_element(kind, tmp_path):
    element = "(one.exp(), 1)" if "dict" in kind else "one.exp()"
    text = kind.format(f"\n{element}\nfor one in x\nif one > 0\n")
    model = written(tmp_path, f"def model(x):\n    return (\n{text})\n")
    ways = taken(model, torch.tensor([1.0, -1.0]))
    assert ways[0][0] and "one.exp()" in ways[0][1]
    assert not ways[1][0] and ways[1][1] != "if one > 0" and "one.exp()" not in ways[1][1]


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


PACKAGE = Path(rl.__file__).parent


def test_what_captures_a_forward_knows_nothing_of_layers():
    for file in (PACKAGE / "_capture").glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not [node.module for node in imports if "_layers" in (node.module or "").split(".")], file


# -- private names of torch ---------------------------------------------------------------------------------------------

HOME = PACKAGE / "_ir" / "torch_private.py"


def chains(tree):
    """Every dotted name in a file, as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            yield from (f"{node.module}.{one.name}" for one in node.names)
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_private(word):
    return word.startswith("_") and not word.endswith("__")


def test_every_private_name_of_torch_stands_in_one_file():
    owners = torch.ones(1), nn.Linear(1, 1), torch.ones(1).untyped_storage()
    known = {path.split(".")[1] for path in torch_private.ATTRIBUTES}
    for file in PACKAGE.rglob("*.py"):
        names = set(chains(ast.parse(file.read_text()))) if file != HOME else set()
        stray = {name for name in names if name.startswith("torch.") and any(map(is_private, name.split(".")))}
        assert not stray, file
        words = {name.split(".")[-1] for name in names if not name.startswith(("self.", "cls."))}
        used = {word for word in words if is_private(word) and any(hasattr(owner, word) for owner in owners)}
        assert used <= known, file


def test_this_torch_has_every_private_name_but_those_that_are_said_here():
    """Where this fails, a newer torch has dropped a name: see what torch_private.py does without it."""
    missing = {one.path for one in torch_private.NAMES if not one.is_there}
    assert missing == MISSING.get(tuple(map(int, torch.__version__.split(".")[:2])), set())
    assert all(one.path and one.purpose for one in torch_private.NAMES) and not torch_private.LACKING
    owners = {"Tensor": torch.ones(1).to_sparse(), "Module": nn.Linear(1, 1)}
    owners["UntypedStorage"] = torch.ones(1).untyped_storage()
    for path in torch_private.ATTRIBUTES:
        owner, word = path.split(".")
        assert hasattr(owners[owner], word), path


MISSING = {}  # by torch's version: what it has not


def test_the_names_of_the_compiler_are_there_when_it_is():
    script = (
        "import torch._dynamo.eval_frame, replaylens._ir.torch_private as private\n"
        "print([one.path for one in private.OF_THE_COMPILER if private._found(one.path) is None])\n"
    )
    made = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_a_torch_that_lacks_what_is_needed_is_refused_with_its_name():
    script = "import torch\ndel torch._C._autograd._top_saved_tensors_default_hooks\nimport replaylens\n"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1] == (
        f"ImportError: replaylens needs torch 2.10 or later. This one is {torch.__version__}, and it lacks "
        "torch._C._autograd._top_saved_tensors_default_hooks."
    )


def test_an_older_torch_is_refused_though_it_has_every_name():
    script = "import torch\ntorch.__version__ = '2.9.1+cpu'\nimport replaylens\n"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1] == "ImportError: replaylens needs torch 2.10 or later. This one is 2.9.1+cpu."


def test_the_floor_in_the_package_is_the_one_that_pip_is_told():
    told = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, torch_private.FLOOR))}"' in told


def test_without_a_name_that_can_be_missing_the_public_way_gives_the_same():
    script = """
import torch
del torch._C._functorch._add_batch_dim, torch._C._is_any_autocast_enabled
import replaylens as rl
from replaylens._ir import torch_private
assert {one.path.split(".")[-1] for one in torch_private.NAMES if not one.is_there} == {
    "_add_batch_dim", "_is_any_autocast_enabled"}
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)), torch.ones(2, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    prog = rl.capture(model, x)
assert torch.equal(prog.replay().output, prog.output) and prog.output.dtype is torch.bfloat16 and prog.check()
prog = rl.capture(model, x)
found = rl.sweep(prog, variants={k: {"relu_1": rl.Scale(k)} for k in (0.0, 2.0, 3.0)}, metric=torch.sum)
assert abs(found.values[1] - prog.replay(patch={"relu_1": rl.Scale(2)}).output.sum()) < 1e-5
print("same")
"""
    made = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert made.stdout.strip() == "same", made.stderr
