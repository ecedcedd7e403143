"""What a person reads: the code of a program, its summary, and the short forms of everything."""

import ast
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from internals import format_duration
from torch import nn
from torch.nn import functional as F
from zoo import MODELS, silence

import replaylens as rl

HERE = Path(__file__)


def x():
    return torch.ones(3, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.fc(self.norm(x))
        return F.relu(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, scale):
        for block in self.blocks:
            x = x + block(x)
        x[:, 0] = 0
        left, right = x.chunk(2, dim=1)
        return {"sum": left + right, "scaled": x * scale}


def captured(train=False):
    torch.manual_seed(0)
    return rl.capture(Net().train(train), x(), scale=torch.tensor(2.0))


def where(code, nth=0):
    """The number of the line of this file that begins so."""
    return [n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.strip().startswith(code)][nth]


# ---- code ----------------------------------------------------------------------------------------------------------


def test_the_code_of_a_small_program():
    def model(x):
        y = x.sin()
        y = torch.cat([y, x[:1]], dim=0) * 2
        return y.sum(), y.T

    assert (
        rl.capture(model, x()).code
        == f"""\
def model(input_1_0):
    # test_readable.py:{where("y = x.sin()")}  y = x.sin()
    sin_1_1 = sin(input_1_0)  # float32[3, 4]
    # test_readable.py:{where("y = torch.cat")}  y = torch.cat([y, x[:1]], dim=0) * 2
    getitem_1_2 = input_1_0[:1]  # float32[1, 4]
    cat_1_3 = cat([sin_1_1, getitem_1_2], dim=0)  # float32[4, 4]
    mul_1_4 = mul(cat_1_3, 2)  # float32[4, 4]
    # test_readable.py:{where("return y.sum(), y.T")}  return y.sum(), y.T
    sum_1_5 = sum(mul_1_4)  # float32[]
    t_1_6 = mul_1_4.T  # float32[4, 4]
    return (sum_1_5, t_1_6)"""
    )


def test_the_code_names_every_call_once_and_in_order():
    prog = captured()
    calls = [layer.label for layer in prog.layers if layer.layer_type not in ("input", "buffer", "output")]
    assert re.findall(r"^    (\w+) = ", prog.code, re.MULTILINE) == calls


def test_a_pass_of_a_layer_is_an_identifier_in_the_code():
    fc = nn.Linear(4, 4)
    assert "linear_1_1_p2 = linear(linear_1_1_p1, weight, bias)" in rl.capture(lambda x: fc(fc(x)), x()).code


def test_the_code_names_parameters_by_their_addresses_and_inputs_in_its_head():
    code = captured().code
    assert code.startswith("def Net(input_1_0, input_2_")
    assert "blocks.1.fc.weight" in code


def test_the_code_says_what_the_model_writes():
    code = captured(train=True).code
    for buffer in "running_mean", "running_var", "num_batches_tracked":
        assert re.search(rf"# the model writes blocks\.0\.norm\.{buffer} <- \w+", code)


def test_the_code_says_what_draws():
    code = rl.capture(nn.Dropout(), x()).code
    assert re.search(r"dropout_1_1 = dropout\(.*\)  # float32\[3, 4\]; draws\n", code)


READABLE = [
    "write_to_a_column",
    "augmented_slices",
    "out_of_two_results",
    "foreach_writes",
    "jacobians_of_both_modes",
    "lstm_bidirectional",
    "accumulator_in_a_loop",
    "setitem_mixed_index",
    "attention_in_training",
]


@pytest.mark.parametrize("name", READABLE)
def test_the_code_is_python(name):
    with silence():
        case = MODELS[name]()
        code = rl.capture(case.model, *case.args, **case.kwargs).code
    assert ast.parse(re.sub(r"\b(\d+)\.(?=[a-z])", r"_\1.", code))  # `blocks.0.weight` is as near as an address comes
    assert not re.search(r" at 0x[0-9a-f]+|Nth\(|Branch\(|Derived\(", code)


def test_the_code_of_a_lambda_is_python():
    (function,) = ast.parse(rl.capture(lambda x: x + 1, x()).code).body
    assert isinstance(function, ast.FunctionDef) and isinstance(function.body[-1], ast.Return)


def returns_its_input(x):
    return x


def test_a_program_without_calls_has_code():
    assert ast.parse(rl.capture(returns_its_input, x()).code)


# ---- source lines --------------------------------------------------------------------------------------------------


def test_every_call_points_at_the_line_of_the_user_that_made_it():
    prog = captured()
    lines = {
        "batchnorm_1": "x = self.fc(self.norm(x))",
        "linear_2": "x = self.fc(self.norm(x))",
        "relu_1": "return F.relu(x)",
        "add_1": "x = x + block(x)",
        "setitem_1": "x[:, 0] = 0",
        "chunk_1": "left, right = x.chunk(2, dim=1)",
        "mul_1": 'return {"sum"',
    }
    for label, code in lines.items():
        source = prog[label].source
        assert (source.file, source.line) == (str(HERE), where(code)), label
        assert source.function.endswith(".forward" if sys.version_info >= (3, 11) else "forward")
        assert source.text.startswith(code)
        assert str(source) == f"{HERE}:{where(code)}"


def test_a_source_shows_the_lines_around_it():
    shown = captured()["relu_1"].source.context(around=1).splitlines()
    assert [line[0] for line in shown] == [" ", ">"] and shown[1].endswith("return F.relu(x)")


def test_a_lambda_and_a_comprehension_have_their_own_lines():
    model = lambda x: sum(  # noqa: E731
        x.sin()
        for _ in range(2)
    )  # fmt: skip
    assert rl.capture(model, x())["sin_1"].source.line == where("x.sin()")


def test_a_module_call_knows_from_where_it_was_called():
    scopes = captured()["linear_2"].node.scope.stack
    assert [str(scope) for scope in scopes] == ["blocks.1:1", "blocks.1.fc:1"]
    assert scopes[-1].source.line == where("x = self.fc(self.norm(x))")


def test_what_runs_in_torchs_own_modules_points_at_the_users_call_of_them():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8))

        def forward(self, x):
            return self.inner(x)

    prog = rl.capture(Outer(), x())
    calls = [layer for layer in prog.layers if layer.layer_type not in ("input", "output")]
    assert {(layer.source.file, layer.source.line) for layer in calls} == {(str(HERE), where("return self.inner(x)"))}


# ---- summary and short forms ---------------------------------------------------------------------------------------


def test_a_program_prints_as_its_summary():
    text = str(captured(train=True))
    head, *rows = text.splitlines()
    assert head == "Program of Net: 14 calls, 24 layers."
    assert rows[0] == "    Structure: purely feedforward, with branching; 7 modules, 1 of them not called."
    assert rows[1] == "    25 tensors (772 B) computed; 25 (772 B) kept."
    assert rows[2] == "    8 parameter operations; 56 numbers (224 B) in 8 parameters."
    assert (
        "The model writes blocks.0.norm.running_mean, blocks.0.norm.running_var, blocks.0.norm.num_batches_tracked"
        in text
    )
    assert [row.split(": ")[1] for row in rows[rows.index("    Layers:") + 1 :]] == captured(train=True).layer_labels


def test_a_summary_of_a_long_program_stays_on_one_screen():
    text = str(rl.capture(nn.Sequential(*[nn.Linear(4, 4) for _ in range(500)]), x()))
    assert len(text.splitlines()) < 80
    assert "0: input_1_0" in text and "501: output_1_501" in text


def test_short_forms_are_short():
    prog = captured(train=True)
    assert repr(prog) == "<Program of Net: 14 calls, 24 layers>"
    assert repr(prog["linear_1"]).startswith("<Layer linear_1_") and repr(prog["linear_1"]).endswith(
        ": linear (3, 4) in blocks.0.fc>"
    )
    assert repr(prog.graph) == "<Graph of Net: 14 calls, 2 inputs, 14 state tensors>"
    assert repr(prog.replay()).startswith("<Run: 14 nodes executed (") and len(repr(prog.replay())) < 120
    assert repr(prog.replay(from_="relu_2")).startswith("<Run: ")
    assert repr(prog["blocks.0.fc.weight"]) == "<Layer blocks.0.fc.weight: parameter (4, 4)>"
    for node in prog.graph:
        assert "tensor(" not in repr(node)


def test_a_layer_prints_as_all_that_is_known_of_it():
    prog = captured()
    label = prog["linear_1"].label
    assert (
        str(prog["linear_1"])
        == f"""\
Layer {label}, operation {prog.layer_labels.index(label) + 1} of {len(prog)}:
    Value: float32[3, 4], 48 B
        {str(prog["linear_1"].value.detach()).replace(chr(10), chr(10) + " " * 8)}
    Function: linear, backward AddmmBackward0
    Code: {label} = linear({prog["linear_1"].parents[0]}, blocks.0.fc.weight, blocks.0.fc.bias)  # float32[3, 4]
    Time: {format_duration(prog["linear_1"].seconds)}
    Cost: 96 FLOPs (48 multiply-adds)
    Parameters: blocks.0.fc.weight [4, 4], blocks.0.fc.bias [4]; 20 numbers, 80 B
    Parents: {prog["batchnorm_1"].label}
    Children: {prog["relu_1"].label}
    Distance: 2 steps from an input, 6 to 10 steps to an output
    Computed inside module: blocks.0.fc
    Output of modules: blocks.0.fc:1
    All that is computed in module: blocks.0.fc
    Source: {HERE}:{where("x = self.fc(self.norm(x))")}  x = self.fc(self.norm(x))
    Lookup keys: {", ".join(map(str, prog["linear_1"].lookup_keys))}"""
    )


class Tags(HTMLParser):
    """Counts tags, and those that are left open."""

    def __init__(self, page):
        super().__init__()
        self.open, self.rows, self.text = [], 0, ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_notebook_shows_a_table_of_the_layers():
    prog = captured()
    page = Tags(prog._repr_html_())
    assert page.open == [] and page.rows == len(prog) + 1 + len(prog.modules) + 1
    assert "Program of Net" in page.text and all(label in page.text for label in prog.layer_labels)


def test_a_notebook_is_safe_from_what_models_are_called():
    model = lambda x: x + 1  # noqa: E731
    model.__name__ = "<script>alert(1)</script>"
    prog = rl.capture(model, x())
    assert "<script>" not in prog._repr_html_() + prog["add_1"]._repr_html_()


def test_a_layer_shows_in_a_notebook_too():
    assert "linear_1" in Tags(captured()["linear_1"]._repr_html_()).text


def test_an_output_lies_in_no_module_of_the_table():
    rows = rl.capture(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))._repr_html_().split("<tr>")
    assert rows[-1].startswith("<td style='text-align:left'>2</td><td style='text-align:left'>output_1_2</td>")
    assert rows[-1].split("</tr>")[0].endswith("<td style='text-align:left'></td>")
