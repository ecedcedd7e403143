"""What is known of a forward pass and its layers: every field of the paper's table, on models where it is interesting."""

import inspect
import re
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from internals import FIELDS, Alias, Layer, TorchLensNames
from supplementary_table import MODEL, OPERATION
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import replaylens as rl

HERE = Path(__file__)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def shifted(self, x):
        return self.fc(x) + torch.rand(4)

    def forward(self, x):
        return self.shifted(x) * self.scale


class Model(nn.Module):
    """Has a condition, noise, a buffer, a module called twice, a split, a write in place, an end that nobody reads."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.unused = nn.Linear(2, 2)
        self.unused.weight.requires_grad_(False)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        if (x - 1).mean() < 3:
            x = x * 2
        x = self.act(self.inner(x))
        rest, left = torch.split(x, 3, dim=1)
        rest.sum()
        y = self.inner(x + left)
        return {"y": y, "left": left}


@pytest.fixture(scope="module")
def prog():
    torch.manual_seed(7)
    return rl.capture(Model(), torch.rand(3, 4))


def line(code):
    return next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.strip() == code)


# ---- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODEL)
def test_a_program_has_every_model_field_of_the_table(prog, name):
    assert getattr(prog, name) is not None
    assert inspect.getdoc(getattr(type(prog), name))


@pytest.mark.parametrize("name", OPERATION)
def test_every_layer_has_every_operation_field_of_the_table(prog, name):
    for layer in prog:
        getattr(layer, name)
    assert inspect.getdoc(getattr(type(prog[0]), name))


def test_parameters_and_orphans_have_every_field_too():
    def model(x, weight):
        torch.ones(3) + 1
        return F.linear(x, weight)

    prog = rl.capture(model, torch.rand(3, 4), nn.Parameter(torch.rand(2, 4)))
    orphans = sorted(prog.graph.orphans)
    assert orphans
    for name in orphans + [node.name for node in prog.graph.state_nodes]:
        for field in OPERATION:
            getattr(prog[name], field)
        assert prog[name].ordinal is None and str(prog[name])


def said(owner, name):
    return " ".join(inspect.getdoc(getattr(owner, name)).split())


def rows_of_layers():
    """What the documentation says of layers: names of TorchLens's first, then facts that have no other name."""
    aliases = {name: found for name, found in vars(TorchLensNames).items() if isinstance(found, Alias)}
    same = {name: found.fact for name, found in aliases.items() if found.__doc__ == f"`{found.fact}`."}
    for name, found in aliases.items():
        fact = f"`{found.fact}`" if found.fact[:1].isalpha() else ""
        yield f"| `{name}` | {fact} | {said(Layer, same.get(name, name))} |"
    for fact in [field.fact for field in FIELDS if field.fact not in {*aliases, *same.values()}]:
        yield f"| {f'`{fact}` | ' if fact in OPERATION else f' | `{fact}`'} | {said(Layer, fact)} |"


def rows_of_the_documentation(title):
    page = (HERE.parents[1] / "docs/metadata.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return [row for row in page.splitlines() if row.startswith("|")][2:]


def test_the_documentation_lists_every_fact_of_a_layer_in_its_own_words():
    assert rows_of_the_documentation("Of a layer") == list(rows_of_layers())


def test_the_documentation_lists_the_facts_of_a_program_in_their_own_words():
    rows = rows_of_the_documentation("Of a program")
    names = [row.split("`")[1] for row in rows]
    assert set(MODEL) <= set(names)
    assert rows == [f"| `{name}` |  | {said(rl.Program, name)} |" for name in names]


def test_every_fact_of_a_layer_is_in_the_table_of_fields():
    own = {name for base in Layer.__mro__ for name, found in vars(base).items() if type(found) is property}
    assert {name for name in own if not name.startswith("_")} <= {field.fact for field in FIELDS}
    assert all(isinstance(getattr(Layer, field.fact), property) for field in FIELDS)


# ---- the model ------------------------------------------------------------------------------------------------------


def test_the_layers_of_the_model_below(prog):
    assert prog.layer_list == prog.layer_labels
    assert [re.sub(r"_\d+$", "", label.split(":")[0]) for label in prog.layer_list] == (
        "input_1 sub_1 mean_1 lt_1 mul_1 linear_1 rand_1 add_1 buffer_1 mul_2 relu_1 split_1 sum_1 add_2 linear_1 rand_1 "
        "add_1 mul_2 output_1 output_2"
    ).split()


def test_the_structure_of_a_model(prog):
    assert prog.model_name == "Model"
    assert prog.random_seed_used == 7
    assert prog.model_is_recurrent and prog.model_max_recurrent_loops == 2
    assert prog.model_is_branching
    assert prog.model_has_conditional_branching


def test_a_chain_is_neither_recurrent_nor_branching_nor_conditional():
    prog = rl.capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.rand(1, 2))
    found = prog.model_is_recurrent, prog.model_is_branching, prog.model_has_conditional_branching
    assert found == (False, False, False)
    assert prog.model_max_recurrent_loops == 1


def test_lists_of_layers_of_a_kind(prog):
    assert prog.input_layers == [prog["input_1"].label]
    assert prog.output_layers == [prog["output_1"].label, prog["output_2"].label]
    assert prog.buffer_layers == [prog["inner.scale"].label]
    assert prog.internally_initialized_layers == [prog["rand_1:1"].label, prog["rand_1:2"].label]
    assert prog.internally_terminated_layers == [prog["lt_1"].label, prog["sum_1"].label]
    assert prog.internally_terminated_bool_layers == [prog["lt_1"].label]
    assert prog.layers_computed_with_params == [prog["linear_1:1"].label, prog["linear_1:2"].label]


def test_tensors_are_counted_with_inputs_and_outputs(prog):
    values = [v for layer in prog for v in (layer.value if isinstance(layer.value, tuple) else (layer.value,))]
    assert prog.num_tensors_total == prog.num_tensors_saved == len(values) == len(prog) + 1
    assert prog.tensor_fsize_total == prog.tensor_fsize_saved == sum(v.nbytes for v in values)


def test_parameters_are_counted_once_whether_they_are_read_or_not(prog):
    assert prog.total_param_tensors == 4
    assert prog.total_params == 20 + 6 and prog.total_params_trainable == 20 + 2
    assert prog.total_params_fsize == 26 * 4
    assert prog.total_param_layers == 1
    assert prog.parameter_reads == 4


def test_a_tied_parameter_is_counted_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    prog = rl.capture(model, torch.rand(1, 3))
    assert prog.total_params == 9 + 3 + 3
    assert prog.params["0.weight"]["read_by"] == (prog[1].label, prog[2].label)
    assert prog.modules.column("parameters") == [12, 12]


def test_the_modules_of_a_model(prog):
    assert prog.module_addresses == ["inner", "inner.fc", "unused", "act"]
    assert prog.module_types == {"inner": "Inner", "inner.fc": "Linear", "unused": "Linear", "act": "ReLU"}
    assert prog.module_num_passes == {"inner": 2, "inner.fc": 2, "unused": 0, "act": 1}
    assert prog.module_pass_children == {
        "inner:1": ["inner.fc:1"],
        "inner.fc:1": [],
        "act:1": [],
        "inner:2": ["inner.fc:2"],
        "inner.fc:2": [],
    }
    assert prog.top_level_module_passes == ["inner:1", "act:1", "inner:2"]


def test_times_fit_into_one_another():
    def model(x):
        time.sleep(0.02)
        return x.sin().cos()

    before = time.time()
    prog = rl.capture(model, torch.rand(3))
    assert before <= prog.pass_start_time <= prog.pass_end_time <= time.time() + 1e-3
    assert prog.elapsed_time_total == pytest.approx(prog.pass_end_time - prog.pass_start_time, abs=1e-5)
    inside = sum(prog[name].func_time_elapsed for name in ("sin_1", "cos_1"))
    assert prog.elapsed_time_function_calls == pytest.approx(inside)
    assert prog.elapsed_time_torchlens_logging >= 0.02
    assert prog["input_1"].func_time_elapsed is None


def test_an_edited_program_has_no_times_of_its_own_calls(prog):
    edited = prog.bypass("relu_1")
    assert edited["linear_1:1"].func_time_elapsed is None and edited.elapsed_time_function_calls == 0
    assert edited.module_addresses == prog.module_addresses and edited.total_params == prog.total_params
    assert "Time:" not in str(edited)


# ---- labels and numbers ---------------------------------------------------------------------------------------------


def test_the_numbers_of_a_layer(prog):
    second = prog["linear_1:2"]
    number = second.label.split("_")[2].split(":")[0]
    assert second.layer_label == f"linear_1_{number}" and second.layer_label_w_pass == f"linear_1_{number}:2"
    assert (second.layer_type, second.layer_type_num, second.layer_total_num) == ("linear", 1, int(number))
    assert second.operation_num == prog.layer_labels.index(second.label) + 1
    assert (second.pass_num, second.layer_passes_total) == (2, 2)
    assert second.same_layer_operations == [f"linear_1_{number}:1"]
    assert prog["relu_1"].layer_label_w_pass == f"{prog['relu_1'].label}:1"
    assert prog["relu_1"].same_layer_operations == []


def test_every_lookup_key_of_every_layer_finds_it(prog):
    for layer in prog:
        assert layer.lookup_keys
        for key in layer.lookup_keys:
            assert prog[key].label == layer.label


@pytest.mark.parametrize("key", ["conv2d_2_3", "conv2d_2", "conv2d_2_3:1", "body.2", 3, -3])
def test_the_ways_of_the_readme_find_one_layer(key):
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prog = rl.capture(nn.Sequential(OrderedDict(body=body, act=nn.ReLU())), torch.rand(1, 3, 8, 8))
    assert prog[key].label == "conv2d_2_3"
    assert prog["body"].label == "conv2d_2_3"
    assert {-3, 3, "conv2d_2_3", "conv2d_2_3:1", "body.2", "body.2:1"} <= set(prog["conv2d_2_3"].lookup_keys)


# ---- values and calls -----------------------------------------------------------------------------------------------


def test_the_value_of_a_layer(prog):
    layer = prog["linear_1:1"]
    assert layer.tensor_contents is layer.value or torch.equal(layer.tensor_contents, layer.value)
    assert (layer.tensor_shape, layer.tensor_dtype, layer.tensor_fsize) == ((3, 4), torch.float32, 48)
    assert prog["lt_1"].tensor_dtype is torch.bool and prog["lt_1"].tensor_fsize == 1
    assert prog["split_1"].tensor_shape is None and prog["split_1"].tensor_fsize == 48


def test_what_a_layer_was_called_with(prog):
    layer = prog["linear_1:1"]
    x, weight, bias = layer.creation_args
    assert torch.equal(F.linear(x, weight, bias), layer.value)
    assert layer.func_applied is F.linear and layer.func_applied_name == "linear"
    split = prog["split_1"]
    assert torch.equal(split.creation_args[0], prog["relu_1"].value)
    assert split.func_position_args_non_tensor == [3, 1]
    cat = rl.capture(lambda x: torch.cat((x, x), dim=0), torch.rand(3, 4))["cat_1"]
    assert cat.func_keyword_args_non_tensor == {"dim": 0} == cat.creation_kwargs


def test_calls_give_their_value_again_from_their_arguments(prog):
    with torch.no_grad():
        for layer in prog:
            if layer.func_applied is not None and not layer.func_applied_name.startswith(("rand", "split")):
                given = [a.clone() if isinstance(a, torch.Tensor) else a for a in layer.creation_args]
                assert torch.allclose(layer.func_applied(*given, **layer.creation_kwargs), layer.value), layer


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda x: x.add_(1), "add_"),
        (lambda x: F.relu(x, inplace=True), "relu_"),
        (lambda x: x.__setitem__(0, 5.0), "__setitem__"),
        (lambda x: x[0].mul_(3), "mul_"),
        (lambda x: torch.sin(x, out=x), "sin"),
        (lambda x: x.t_(), "t_"),
    ],
)
def test_a_write_in_place_is_called_by_its_own_name_and_arguments(write, name):
    def model(x):
        x = x * 2
        write(x)
        return x + 1

    prog = rl.capture(model, torch.rand(2, 2) - 0.5)
    (layer,) = [layer for layer in prog if layer.function_is_inplace]
    assert layer.func_applied_name == name
    before = prog["mul_1"].value
    assert torch.equal(layer.creation_args[0], before if name != "mul_" else before[0])


def test_what_does_not_write_its_value_is_not_in_place(prog):
    assert [layer.label for layer in prog if layer.function_is_inplace] == [prog["relu_1"].label]
    norm = rl.capture(nn.BatchNorm1d(4), torch.rand(3, 4))
    assert not norm["batchnorm_1"].function_is_inplace and norm["batchnorm_1"].func_applied_name == "batch_norm"


def test_the_state_of_the_generator_gives_the_same_draw_again(prog):
    generator = torch.Generator()
    generator.set_state(prog["rand_1:2"].func_rng_states)
    assert torch.equal(torch.rand(4, generator=generator), prog["rand_1:2"].value)
    assert prog["linear_1:1"].func_rng_states is None


def test_the_name_of_the_gradient_function(prog):
    assert prog["linear_1:1"].gradfunc_name == "AddmmBackward0"
    assert prog["input_1"].gradfunc_name is None
    with torch.no_grad():
        assert rl.capture(nn.Linear(2, 2), torch.rand(1, 2))["linear_1"].gradfunc_name is None


def test_the_name_of_the_gradient_function_of_what_was_overwritten():
    prog = rl.capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), torch.rand(1, 2))
    assert prog["linear_1"].gradfunc_name == "AddmmBackward0"
    assert prog["relu_1"].gradfunc_name == "ReluBackward0"


def test_one_of_several_outputs_says_which_it_is(prog):
    split = prog["split_1"]
    assert split.is_part_of_iterable_output and split.iterable_output_index is None
    assert [part.iterable_output_index for part in split.parts] == [0, 1]
    assert [part.tensor_shape for part in split.parts] == [(3, 3), (3, 1)]
    assert prog["output_2"].iterable_output_index == 1
    assert not prog["relu_1"].is_part_of_iterable_output and prog["relu_1"].parts == (prog["relu_1"],)


def test_the_call_stack_goes_from_the_line_outwards(prog):
    rows = [line("return self.fc(x) + torch.rand(4)"), line("return self.shifted(x) * self.scale")]
    rows += [line("x = self.act(self.inner(x))"), line("return rl.capture(Model(), torch.rand(3, 4))")]
    for name in ("linear_1:1", "rand_1:1"):
        stack = prog[name].func_call_stack
        assert [entry["call_linenum"] for entry in stack[:4]] == rows
        assert [entry["function"] for entry in stack[:4]] == ["shifted", "forward", "forward", "prog"]
        assert {entry["call_fname"] for entry in stack[:4]} == {str(HERE)}
        assert stack[0]["code_context"] == HERE.read_text().splitlines(keepends=True)[rows[0] - 10 : rows[0] + 9]
    assert prog["linear_1:2"].func_call_stack[2]["call_linenum"] == line("y = self.inner(x + left)")
    assert "> " in prog["linear_1:1"].source.context(8) and prog["input_1"].func_call_stack == []


def test_the_call_stack_has_the_forward_that_called_its_parents_forward():
    class Base(nn.Module):
        def forward(self, x):
            return x.sin()

    class Child(Base):
        def forward(self, x):
            return super().forward(x) + 1

    prog = rl.capture(Child(), torch.rand(2))
    assert [s.line for s in prog["sin_1"].stack[:2]] == [line("return x.sin()"), line("return super().forward(x) + 1")]
    assert [s.line for s in prog["add_1:1"].stack[:1]] == [line("return super().forward(x) + 1")]


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_the_parameters_of_a_layer(prog):
    layer = prog["linear_1:2"]
    assert layer.computed_with_params and layer.num_param_tensors == 2
    assert layer.parent_param_shapes == [(4, 4), (4,)]
    assert (layer.num_params_total, layer.parent_params_fsize) == (20, 80)
    assert not prog["relu_1"].computed_with_params and prog["relu_1"].num_params_total == 0


# ---- kin ------------------------------------------------------------------------------------------------------------


def labels(prog, names):
    return [prog[name].label for name in names.split()]


def test_parents_children_siblings_and_spouses(prog):
    add = prog["add_2"]
    assert add.parent_layers == labels(prog, "relu_1 split_1")
    assert add.child_layers == labels(prog, "linear_1:2")
    assert add.sibling_layers == labels(prog, "split_1 sum_1 output_2")
    assert prog["relu_1"].spouse_layers == labels(prog, "split_1")
    assert prog["split_1"].child_layers == labels(prog, "sum_1 add_2 output_2")


def test_where_a_layer_comes_from_and_leads_to(prog):
    assert prog["relu_1"].orig_ancestors == labels(prog, "input_1 rand_1:1 buffer_1")
    assert prog["relu_1"].internally_initialized_ancestors == labels(prog, "rand_1:1")
    assert prog["relu_1"].internally_initialilized_ancestors == labels(prog, "rand_1:1")
    assert prog["add_1:1"].internally_initialized_parents == labels(prog, "rand_1:1")
    assert prog["relu_1"].output_descendants == labels(prog, "output_1 output_2")
    assert prog["mul_2:2"].output_descendants == labels(prog, "output_1")
    assert prog["sum_1"].output_descendants == []


def test_distances_are_counted_in_steps_between_layers(prog):
    def ends(name):
        layer = prog[name]
        return (
            *(layer.min_distance_from_input, layer.max_distance_from_input),
            *(layer.min_distance_from_output, layer.max_distance_from_output),
        )

    assert ends("input_1") == (0, 0, 7, 11)
    assert ends("relu_1") == (5, 5, 2, 6)
    assert ends("output_1") == (10, 11, 0, 0)
    assert ends("add_2") == (6, 7, 4, 4)
    assert ends("rand_1:2") == (None, None, 3, 3)
    assert ends("sum_1") == (7, 7, None, None)


def test_ends_and_beginnings(prog):
    def which(field):
        return [layer.label for layer in prog if getattr(layer, field)]

    assert which("is_input_layer") == prog.input_layers
    assert which("is_output_layer") == prog.output_layers
    assert which("is_buffer_layer") == prog.buffer_layers
    assert prog[prog.buffer_layers[0]].buffer_address == "inner.scale" and prog["relu_1"].buffer_address is None
    assert which("initialized_inside_model") == prog.internally_initialized_layers
    assert which("terminated_inside_model") == prog.internally_terminated_layers
    assert which("is_terminal_bool_layer") == labels(prog, "lt_1")
    assert which("in_cond_branch") == labels(prog, "sub_1 mean_1 lt_1")
    outside = labels(prog, "rand_1:1 buffer_1 rand_1:2")
    assert [label for label in prog.layer_labels if not prog[label].has_input_ancestor] == outside
    no_way = labels(prog, "sub_1 mean_1 lt_1 sum_1")
    assert [label for label in prog.layer_labels if not prog[label].is_output_ancestor] == no_way


def test_what_the_model_writes_to_a_buffer_does_not_end_inside():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x * 2

    prog = rl.capture(Counts(), torch.rand(2))
    assert prog["add_1:1"].children == () and not prog["add_1:1"].terminated_inside_model


# ---- modules --------------------------------------------------------------------------------------------------------


def test_the_modules_around_a_layer(prog):
    linear, add, scaled = prog["linear_1:1"], prog["add_1:1"], prog["mul_2:1"]
    assert linear.containing_module_origin == "inner.fc"
    assert linear.containing_module_origin_nested == ["inner", "inner.fc"]
    assert linear.is_computed_inside_submodule and not prog["add_2"].is_computed_inside_submodule
    assert linear.is_bottom_level_submodule_output and linear.modules_exited == ["inner.fc"]
    assert scaled.is_submodule_output and scaled.modules_exited == ["inner"]
    assert not scaled.is_bottom_level_submodule_output and not add.is_submodule_output
    assert scaled.modules_entered == ["act"] and prog["mul_1"].modules_entered == ["inner", "inner.fc"]
    assert prog["output_1"].modules_exited == [] and prog["output_1"].containing_module_origin is None


# ---- cost -----------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """One of each kind of product."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 3, stride=2)
        self.up, self.linear = nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Linear(5, 6, bias=False)

    def forward(self, a, b, c):
        q = b[None]
        return (
            self.conv1(a),
            self.conv1(a[0]),
            self.up(self.conv2(c)),
            self.linear(b),
            b @ b.transpose(1, 2),
            torch.bmm(b, b.mT),
            torch.addmm(b[0, :, 0], b[0], b[0].T),
            torch.baddbmm(b[:, :, :1], b, b.mT),
            torch.einsum("bij,bkj->bik", b, b),
            torch.linalg.matmul(b, b.mT),
            F.scaled_dot_product_attention(q, q, q),
        )


def test_products_cost_what_torch_counts_for_them():
    args = torch.rand(3, 2, 8), torch.rand(2, 4, 5), torch.rand(1, 2, 9, 9)
    model = Everything()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*args)  # it does not know the attention that CPUs have of their own
    prog = rl.capture(model, *args)
    assert prog.uncounted == []
    assert 2 * prog.macs == counter.get_total_flops()


@pytest.mark.parametrize("equation", ["bchw,bcij->bhi", "bchw,bihw->", "bchw,xyzw->cy", "bchw,chwb", "bchh,bchh->ch"])
def test_an_einsum_costs_what_torch_makes_of_it(equation):
    one, other = torch.rand(2, 3, 4, 4), torch.rand(*([3, 4, 4, 2] if equation == "bchw,chwb" else [2, 3, 4, 4]))
    with FlopCounterMode(display=False) as counter:
        torch.einsum(equation, one, other)
    prog = rl.capture(partial(torch.einsum, equation), one, other)
    assert 2 * prog.macs == prog.flops == counter.get_total_flops() > 0


def test_a_matrix_by_a_vector_costs_its_matrix():
    prog = rl.capture(torch.mv, torch.rand(3, 5), torch.rand(5))
    assert (prog["mv_1"].macs, prog["mv_1"].flops) == (15, 30)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("more", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}])
def test_recurrent_networks_cost_their_matrices_at_every_step(kind, more):
    model, x = kind(3, 4, **more), torch.rand(5, 2, 3)
    prog = rl.capture(model, x)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert prog.macs == 10 * matrices and prog.flops == 2 * prog.macs


def test_the_cost_of_what_is_not_known_is_no_number():
    prog = rl.capture(lambda x: torch.linalg.svd(x)[1] * 2, torch.rand(3, 3))
    svd = next(layer for layer in prog if "svd" in layer.layer_type)
    assert svd.flops is None and svd.macs is None
    assert prog.uncounted == [svd.layer_type] and prog.flops == 3
    assert "Cost: at least 3 FLOPs; not counted: linalgsvd" in str(prog) and "Cost: not known" in str(svd)


def test_elementwise_operations_cost_one_a_number_and_moving_data_nothing():
    prog = rl.capture(lambda x: F.max_pool2d(x.relu().permute(0, 1, 3, 2), 2).mean(), torch.rand(1, 2, 4, 4))
    found = [prog[name].flops for name in ("relu_1", "permute_1", "maxpool2d_1", "mean_1", "output_1")]
    assert found == [32, 0, 32, 8, 0]


def test_dropout_costs_nothing_in_evaluation():
    for train, cost in ((False, 0), (True, 8)):
        assert rl.capture(nn.Dropout().train(train), torch.rand(4))["dropout_1"].flops == cost


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_a_data_frame_has_a_row_for_each_operation(prog):
    pytest.importorskip("pandas")
    frame = prog.to_pandas()
    assert list(frame.layer_label_w_pass) == [layer.layer_label_w_pass for layer in prog]
    row = frame.set_index("layer_label_w_pass").loc[prog["linear_1:1"].label]
    assert row.macs == 48 and row.num_params_total == 20 and row.containing_module_origin == "inner.fc"
    assert row.source == f"{HERE}:{line('return self.fc(x) + torch.rand(4)')}"


def test_the_table_of_modules(prog):
    assert str(prog.modules) == (
        "address   type    calls  operations  parameters\n"
        "inner     Inner   2      8           20\n"
        "inner.fc  Linear  2      2           20\n"
        "unused    Linear  0      0           6\n"
        "act       ReLU    1      1           0"
    )
    assert prog.modules["inner"]["calls"] == 2 and len(prog.modules) == 4


def test_the_table_of_parameters(prog):
    assert prog.params["inner.fc.weight"] == {
        "address": "inner.fc.weight",
        "shape": (4, 4),
        "dtype": torch.float32,
        "numbers": 16,
        "bytes": 64,
        "trainable": True,
        "read_by": tuple(labels(prog, "linear_1:1 linear_1:2")),
    }
    assert prog.params["unused.weight"]["trainable"] is False and prog.params["unused.weight"]["read_by"] == ()
    assert "<table>" in prog.params._repr_html_()
    with pytest.raises(KeyError, match="no row of this table has the address 'nothing'"):
        prog.params["nothing"]
    with pytest.raises(KeyError, match=r"the address 'inner\.weight'\. The nearest names are 'inner\.fc\.weight'"):
        prog.params["inner.weight"]


def test_a_tied_parameter_is_a_row_by_all_its_names():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    params = rl.capture(model, torch.tensor([1, 2])).params
    assert len(params) == 1 and params["0.weight"] == params["1.weight"]
    assert params["1.weight"]["read_by"] == ("embedding_1_1", "linear_1_2")


# ---- print ----------------------------------------------------------------------------------------------------------


def test_a_program_prints_its_structure_sizes_cost_seed_time_modules_and_layers(prog):
    text = re.sub(r"Time: .*", "Time: ...", str(prog))
    assert text.startswith(
        """\
Program of Model: 16 calls, 20 layers.
    Structure: recurrent (at most 2 passes), with branching, with conditions; 4 modules, 1 of them not called.
    21 tensors (693 B) computed; 21 (693 B) kept.
    4 parameter operations; 26 numbers (104 B) in 4 parameters.
    Cost: 310 FLOPs (96 multiply-adds)
    Random seed: 7
    Time: ...
    Content read in Python 1 time: a replay in which it changes has left the recorded path.
    Module hierarchy:
        inner:
            inner.fc
        act
    Layers:
         0: input_1_0
"""
    )
    assert re.search(r"linear_1_\d+:2  \(pass 2 of 2\)", text)


def test_a_card_of_a_pass_says_which_and_a_condition_that_it_is_one(prog):
    head = str(prog["linear_1:2"]).splitlines()[0]
    second = prog["linear_1:2"]
    assert head == f"Layer {second.layer_label} (pass 2 of 2), operation {second.operation_num} of 20:"
    assert "Decides over a branch of the model's Python." in str(prog["lt_1"])
    assert "Computed for a condition." in str(prog["mean_1"])
    assert "no way to an output" in str(prog["sum_1"])


def test_a_card_of_a_value_that_was_overwritten_says_so():
    x = torch.rand(2)
    prog = rl.capture(torch.sin, x)
    prog.graph
    x.add_(1)
    assert "(overwritten since)" in str(prog["input_1"])


def test_looking_runs_nothing_and_changes_nothing(prog):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    str(prog), prog._repr_html_(), [str(layer) for layer in prog], prog.modules, prog.params
    assert torch.equal(torch.get_rng_state(), before)
