"""Gradients of a number at any layers, in one backward pass."""

import re

import pytest
import torch
from internals import writes_views
from oracle import CannotAsk, assert_same, differentiable, plain_bits, reseed, tensors, unasked
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from zoo import CAPTURE_REFUSED, GRADIENTS_REFUSED, MODELS, is_refused_so, silence

import replaylens as rl


def x(seed=0, *shape):
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Linear, relu, linear, with a skip."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode = nn.Linear(4, 8)
        self.decode = nn.Linear(8, 4)

    def forward(self, x):
        hidden = F.relu(self.encode(x))
        return self.decode(hidden) + x


def total(out):
    return out.square().sum()


def retained(function, *args):
    """The gradient of `total` of what a plain forward gives, at what `function` gives beside it."""
    out, *values = function(*args)
    return torch.autograd.grad(total(out), values)


# ---- what comes out ------------------------------------------------------------------------------------------------


def test_gradients_at_every_layer_are_those_of_the_model():
    net = Net()
    prog = rl.capture(net, x())
    grads = prog.grads(of=total)
    given = x().requires_grad_()
    linear = net.encode(given)
    hidden = F.relu(linear)
    decoded = net.decode(hidden)
    out = decoded + given
    plain = torch.autograd.grad(total(out), [given, linear, hidden, decoded, out])
    assert list(grads) == ["input_1_0", "linear_1_1", "relu_1_2", "linear_2_3", "add_1_4", "output_1_5"]
    assert_same(list(grads.values())[:5], list(plain))
    assert_same(grads["output_1"], plain[-1])
    assert_same(grads.metric, total(out).detach())


@pytest.mark.parametrize("name", ["linear_2_3", "linear_2", "decode", "decode:1", 3, -3])
def test_a_gradient_is_found_under_any_name_of_its_layer(name):
    prog = rl.capture(Net(), x())
    grads = prog.grads(of=total)
    assert name in grads and grads[name] is grads["linear_2_3"] and grads.get(name) is grads["linear_2_3"]
    assert_same(grads[prog["decode"]], grads["linear_2_3"])


def test_gradients_are_read_like_a_mapping():
    grads = rl.capture(Net(), x()).grads(of=total, at=["encode", "decode"])
    assert list(grads.keys()) == ["linear_1_1", "linear_2_3"] and len(grads) == 2
    assert dict(grads)["linear_1_1"] is grads["encode"]
    assert "relu_1" not in grads and grads.get("relu_1", 3) == 3
    assert repr(grads) == f"<Grads of {grads.metric.item():.6g} at 2 layers: linear_1_1, linear_2_3>"


def test_nothing_is_left_behind():
    net = Net()
    given = x().requires_grad_()
    prog = rl.capture(net, given)
    prog.grads(of=total, at=None)
    assert given.grad is None and all(p.grad is None for p in net.parameters())
    assert not any(value.requires_grad for value in prog.grads(of=total).values())


def test_a_parameter_takes_part_by_its_name_alone():
    net = Net()
    prog = rl.capture(net, x())
    grads = prog.grads(of=total, at=["encode.weight", "decode.bias", "relu_1"])
    plain = torch.autograd.grad(total(net(x())), [net.encode.weight, net.decode.bias])
    assert_same([grads["encode.weight"], grads["decode.bias"]], list(plain))
    assert "encode.weight" not in prog.grads(of=total)


def test_a_restricted_question_has_the_same_answer():
    prog = rl.capture(Net(), x())
    everywhere = prog.grads(of=total)
    for name in everywhere:
        assert_same(prog.grads(of=total, at=name)[name], everywhere[name])


def test_layers_are_chosen_by_any_key():
    layer = nn.Linear(4, 4)
    prog = rl.capture(lambda x: layer(layer(x).relu()).relu(), x())
    choices = {
        "linear_*": ["linear_1_1:1", "linear_1_1:2"],
        "linear_1": ["linear_1_1:1", "linear_1_1:2"],
        "relu": ["relu_1_2:1", "relu_1_2:2"],
        "relu_1": ["relu_1_2:1", "relu_1_2:2"],
        -3: ["linear_1_1:2"],
    }
    for key, labels in choices.items():
        assert list(prog.grads(of=total, at=key)) == labels
        assert list(prog.grads(of=total, at=[key])) == labels
    relus = prog.find(op="relu")
    assert list(prog.grads(of=total, at=relus)) == list(prog.grads(of=total, at=list(relus))) == list(relus.labels)
    assert list(prog.grads(of=total, at=rl.where(lambda layer: layer.layer_type == "relu"))) == list(relus.labels)
    with pytest.raises(rl.NoSuchLayer, match="'relu_1'"):
        prog.grads(of=total, at=["relu_3"])


def test_a_second_question_is_answered_like_the_first():
    prog = rl.capture(Net(), x())
    for of in (total, torch.sum, total):
        fresh = rl.capture(Net(), x())
        assert_same(dict(prog.grads(of=of)), dict(fresh.grads(of=of)))


def test_a_metric_reads_any_part_of_the_output():
    def model(x):
        return {"logits": x.sin(), "rest": [x.exp(), 3]}

    grads = rl.capture(model, x()).grads(of=lambda out: out["rest"][0][0, 1] * out["rest"][1])
    wanted = torch.zeros(3, 4)
    wanted[0, 1] = 3.0
    assert_same([grads["exp_1"], grads["output_2"]], [wanted, wanted])
    assert_same([grads["sin_1"], grads["output_1"]], [torch.zeros(3, 4)] * 2)


def test_the_gradient_at_an_output_is_of_what_the_metric_reads():
    grads = rl.capture(lambda x: ((y := x.sin()), y * 2), x()).grads(of=lambda out: (out[0] + out[1]).sum())
    assert_same(grads["output_1"], torch.ones(3, 4))
    assert_same(grads["sin_1"], torch.full((3, 4), 3.0))


def test_a_layer_of_several_tensors_has_a_gradient_for_each():
    grads = rl.capture(lambda x: [part * n for n, part in enumerate(x.split(1))], x()).grads(
        of=lambda out: sum(part.sum() for part in out)
    )
    assert_same(grads["split_1"], tuple(torch.full((1, 4), float(n)) for n in range(3)))


def test_integers_beside_floats_have_none():
    grads = rl.capture(lambda x: torch.max(x * 1, 1), x()).grads(of=lambda out: out.values.sum())
    values, indices = grads["max_1"]
    assert_same(values, torch.ones(3))
    assert indices is None


def test_a_recurrent_layer_has_a_gradient_for_each_pass():
    layer = nn.Linear(4, 4)
    first = layer(x())
    second = layer(first)
    grads = rl.capture(lambda x: layer(layer(x)), x()).grads(of=total)
    assert_same([grads["linear_1:1"], grads["linear_1:2"]], list(torch.autograd.grad(total(second), [first, second])))


def test_what_gives_its_argument_back_is_a_layer_of_its_own():
    """In eval mode dropout gives the very tensor that it was given; what reads the one does not read the other."""

    def model(x):
        hidden = x.sin()
        return F.dropout(hidden, training=False) * 2 + hidden * 5

    for at in (None, ["dropout_1"], ["dropout_1", "sin_1"]):
        grads = rl.capture(model, x()).grads(of=torch.sum, at=at)
        assert_same(grads["dropout_1"], torch.full((3, 4), 2.0))
    assert_same(grads["sin_1"], torch.full((3, 4), 7.0))


# ---- where it begins, and what takes part ----------------------------------------------------------------------------


def test_from_a_layer_only_what_follows_it_has_gradients():
    prog = rl.capture(Net(), x())
    grads = prog.grads(of=total, from_="relu_1")
    assert list(grads) == ["relu_1_2", "linear_2_3", "add_1_4", "output_1_5"]
    everywhere = prog.grads(of=total)
    assert_same(dict(grads), {label: everywhere[label] for label in grads})
    with pytest.raises(rl.ReplaylensError) as error:
        prog.grads(of=total, from_="relu_1", at=["encode"])
    assert str(error.value) == "linear_1_1 does not follow relu_1_2, where from_= begins."


def test_from_a_layer_with_another_value_there():
    net = Net()
    prog = rl.capture(net, x())
    hidden = x(1, 3, 8).requires_grad_()
    plain = torch.autograd.grad(total(net.decode(hidden) + x()), hidden)
    assert_same(prog.grads(of=total, from_="relu_1", patch=hidden)["relu_1"], plain[0])
    assert_same(prog.grads(of=total, at="relu_1", patch={"relu_1": hidden.detach()})["relu_1"], plain[0])
    assert hidden.grad is None


def test_gradients_go_through_patches():
    net = Net()
    prog = rl.capture(net, x())
    grads = prog.grads(of=total, patch={"relu_1": lambda hidden: hidden * 3})
    linear = net.encode(x())
    patched = F.relu(linear) * 3
    plain = torch.autograd.grad(total(net.decode(patched) + x()), [linear, patched])
    assert_same([grads["linear_1"], grads["relu_1"]], list(plain))


def test_gradients_go_through_patches_of_parts():
    prog = rl.capture(lambda x: x.sin() * 2, x())
    grads = prog.grads(of=torch.sum, patch={"sin_1": rl.Scale(3, "b [c]", c=[0, 2]), "mul_1": rl.Zero("b [c]", c=1)})
    assert_same(grads["sin_1"], torch.tensor([2.0, 0.0, 2.0, 2.0]).expand(3, 4))
    assert_same(grads["input_1"], torch.tensor([6.0, 0.0, 6.0, 2.0]).expand(3, 4) * x().cos())


def test_a_tensor_that_stands_at_two_places_has_the_gradient_of_each():
    given = x().requires_grad_()
    prog = rl.capture(lambda x: x.sin() * 2 + x.cos() * 5, x())
    grads = prog.grads(of=torch.sum, patch={"sin_1": given, "cos_1": given})
    assert_same([grads["sin_1"], grads["cos_1"]], [torch.full((3, 4), 2.0), torch.full((3, 4), 5.0)])


def test_what_a_patch_hides_does_not_matter():
    prog = rl.capture(Net(), x())
    grads = prog.grads(of=total, patch={"relu_1": torch.zeros(3, 8)})
    assert_same(grads["linear_1"], torch.zeros(3, 8))
    assert not grads.without


def test_a_patch_at_an_output_takes_part():
    grads = rl.capture(lambda x: x.sin(), x()).grads(of=torch.sum, patch={"output_1": lambda out: out * 4})
    assert_same(grads["sin_1"], torch.full((3, 4), 4.0))
    assert_same(grads["output_1"], torch.ones(3, 4))


def test_new_inputs_and_other_state_take_part():
    net, other = Net(), x(1)
    prog = rl.capture(net, x())
    state = {"decode.weight": torch.ones(4, 8)}
    given = other.clone().requires_grad_()
    plain = torch.autograd.grad(total(F.relu(net.encode(given)) @ torch.ones(8, 4) + net.decode.bias + given), given)
    grads = prog.grads(other, of=total, state=state, at=["input_1", "decode.weight"])
    torch.testing.assert_close(grads["input_1"], plain[0])
    assert grads["decode.weight"].count_nonzero()


def test_a_change_that_leads_away_is_raised_as_in_a_replay():
    prog = rl.capture(lambda x: x.sin() if x.sum() > 0 else x.cos(), torch.ones(3))
    assert_same(prog.grads(of=torch.sum)["sin_1"], torch.ones(3))
    with pytest.raises(rl.DivergedReplay):
        prog.grads(-torch.ones(3), of=torch.sum)
    assert_same(prog.grads(-torch.ones(3), of=torch.sum, on_divergence="ignore")["sin_1"], torch.ones(3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_neither_the_mode_of_the_capture_nor_that_of_the_question_matters(mode):
    net = Net()
    wanted = dict(rl.capture(net, x()).grads(of=total))
    with mode():
        prog = rl.capture(net, x())
        inside = dict(prog.grads(of=total))
    assert_same([inside, dict(prog.grads(of=total))], [wanted, wanted])


def test_frozen_models_have_gradients_too():
    net = Net()
    wanted = dict(rl.capture(net, x()).grads(of=total))
    assert_same(dict(rl.capture(net.requires_grad_(False), x()).grads(of=total)), wanted)


def test_outputs_made_in_inference_mode_do_no_harm():
    def model(x):
        with torch.inference_mode():
            best = x.argmax(1)
            still = x.cos()
        return x.sin(), best, still

    grads = rl.capture(model, x()).grads(of=lambda out: (out[0] + out[2].clone()).sum())
    assert_same(grads["sin_1"], torch.ones(3, 4))
    assert_same(grads["input_1"], x().cos())


def test_a_model_of_tokens_has_gradients_from_its_embedding_on():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    grads = rl.capture(model, torch.tensor([[0, 3, 3]])).grads(of=total)
    assert list(grads) == ["embedding_1_1", "linear_1_2", "output_1_3"]
    assert grads.without == {"input_1_0": "it holds int64, which has no gradient"}


# ---- where none comes back -----------------------------------------------------------------------------------------


def of_line(text):
    """The reason with the name of this file and the number of the line left out."""
    return re.sub(r"test_grads\.py:\d+  ", "LINE ", str(text))


def detaches(x):
    hidden = x.sin()
    still = hidden.cos().detach()
    return still * 2 + x


def runs_without(x):
    hidden = x.sin()
    with torch.no_grad():
        still = hidden.cos()
    return still * 2 + x


def counts(x):
    hidden = x.sin()
    return x + (hidden > 0) * 2


def leaves_torch(x):
    hidden = x.sin()
    return x * hidden.max().item()


def writes_through_a_view(x):
    hidden = x * 1
    hidden[1:].exp_()
    return hidden + x


REASONS = {
    "written_view": (writes_through_a_view, "exp_1", "the model continues from the base tensor, not from this view"),
    "view": (writes_through_a_view, "getitem_1", "exp_1_3 (LINE hidden[1:].exp_()) writes over it in place; the gradient is that of what it is a view of"),
    "detached": (detaches, "cos_1", "detached in detach_1_3 (LINE still = hidden.cos().detach())"),
    "detached_later": (detaches, "sin_1", "detached in detach_1_3 (LINE still = hidden.cos().detach())"),
    "no_grad": (runs_without, "sin_1", "cos_1_2 (LINE still = hidden.cos()) runs where the model turned gradients off"),
    "compared": (counts, "sin_1", "gt_1_2 (LINE return x + (hidden > 0) * 2) gives bool, which has no gradient"),
    "integers": (counts, "gt_1", "it holds bool, which has no gradient"),
    "item": (leaves_torch, "max_1", "its content leaves torch by item(), at LINE return x * hidden.max().item()"),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_a_lookup_says_why_no_gradient_comes_back(case):
    model, name, reason = REASONS[case]
    prog = rl.capture(model, x())
    for grads in prog.grads(of=torch.sum), prog.grads(of=torch.sum, at=[name, "input_1"]):
        label = prog[name].label
        assert of_line(grads.without[label]) == reason
        assert label not in grads and name not in grads and grads.get(name) is None
        with pytest.raises(rl.NoGradient) as error:
            grads[name]
        assert of_line(error.value) == f"no gradient reaches {label}: {reason}."
        assert_same(grads["input_1"], torch.autograd.grad(model(given := x().requires_grad_()).sum(), given)[0])


def test_a_value_that_begins_without_gradients_has_one_by_its_name():
    prog = rl.capture(detaches, x())
    with pytest.raises(rl.NoGradient, match=r"Name it in at=\[...\] to have the gradient that begins there"):
        prog.grads(of=torch.sum)["detach_1"]
    assert_same(prog.grads(of=torch.sum, at=["detach_1"])["detach_1"], torch.full((3, 4), 2.0))


def test_a_constant_has_a_gradient_by_its_name():
    prog = rl.capture(lambda x: x * torch.arange(4.0), x())
    with pytest.raises(rl.NoGradient) as error:
        prog.grads(of=torch.sum)["arange_1"]
    assert "neither an input nor a parameter with gradients goes into it" in str(error.value)
    assert_same(prog.grads(of=torch.sum, at="arange_1")["arange_1"], x().sum(0))


def test_what_torch_does_not_differentiate_by_has_no_gradient_by_its_name_either():
    prog = rl.capture(nn.BatchNorm1d(4).eval(), x())
    with pytest.raises(rl.NoGradient) as error:
        prog.grads(of=torch.sum, at=["running_mean", "input_1"])
    assert str(error.value).startswith(
        "no gradient can begin at all of buffer_1_1: the function 'native_batch_norm' is not differentiable with respect "
        "to argument 'running_mean'. Leave out what it reads so.\nreplaylens: raised by node batchnorm_1_3 of the program"
    )


def test_what_the_metric_does_not_depend_on_has_zeros():
    def model(x):
        x.cos()
        return x.sin(), x.exp()

    grads = rl.capture(model, x()).grads(of=lambda out: out[0].sum())
    assert_same([grads["cos_1"], grads["exp_1"]], [torch.zeros(3, 4)] * 2)


def test_an_input_that_nothing_reads_has_zeros():
    grads = rl.capture(lambda x, y: x.sin(), x(), x(1, 2, 2)).grads(of=torch.sum)
    assert_same(grads["input_2"], torch.zeros(2, 2))


def test_a_layer_that_was_not_asked_for_says_so():
    grads = rl.capture(Net(), x()).grads(of=total, at=["relu_1"])
    with pytest.raises(rl.NoGradient) as error:
        grads["decode"]
    assert str(error.value) == "the gradient at linear_2_3 was not asked for. It was at relu_1_2."
    with pytest.raises(rl.NoSuchLayer, match="'relu_1_2'"):
        grads["relu_2"]


def test_a_gradient_that_the_model_takes_itself_hides_what_it_goes_through():
    def model(x):
        start = x * 1
        start = start if start.requires_grad else start.requires_grad_()
        hidden = start.sin()
        (slope,) = torch.autograd.grad(hidden.square().sum(), start, create_graph=True)
        return slope + hidden

    grads = rl.capture(model, x().requires_grad_()).grads(of=torch.sum)
    given = x().requires_grad_()
    torch.testing.assert_close(grads["input_1"], torch.autograd.grad(model(given).sum(), given)[0])
    with pytest.raises(rl.NoGradient, match="is used once more inside grad_1"):
        grads["sin_1"]


# ---- metrics that are none -------------------------------------------------------------------------------------------

METRICS = {
    "several": (lambda out: out, "of= gives float32[3, 4]; a gradient is that of one real number. Take a sum, a mean or one entry: of=lambda out: out[0, -1]."),
    "number": (lambda out: out.sum().item() * 0, "of= gives float -0.0, not a tensor. Give a tensor with one number in it; `.item()` and `float()` take a number out of torch."),
    "integer": (lambda out: out.argmax(), "of= gives int64[]; a gradient is that of one real number. Take a sum, a mean or one entry: of=lambda out: out[0, -1]."),
    "detached": (lambda out: out.detach().sum(), "of= gives a number to which no gradient leads from the output: it was detached, or made from integers, or does not read the output."),
    "written": (lambda out: out.mul_(2).sum(), "of= writes into the output in place, which changes what is differentiated. Let it make a copy."),
}  # fmt: skip


@pytest.mark.parametrize("case", METRICS)
def test_a_metric_gives_one_number_that_gradients_flow_from(case):
    of, text = METRICS[case]
    with pytest.raises(rl.BadMetric) as error:
        rl.capture(Net(), x()).grads(of=of)
    assert str(error.value).replace("float 0.0", "float -0.0") == text


def test_one_number_may_have_axes():
    prog = rl.capture(Net(), x())
    assert_same(dict(prog.grads(of=lambda out: out[:1, :1])), dict(prog.grads(of=lambda out: out[0, 0])))


# ---- on every model of the zoo ---------------------------------------------------------------------------------------


class Hooks(TorchFunctionMode):
    """A hook on everything that a plain forward makes: name of the function, value, gradient in the last backward."""

    def __init__(self):
        super().__init__()
        self.seen, self.armed = [], False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if torch._C._functorch.peek_interpreter_stack() is None:
            for value in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(value, torch.Tensor) and not value.is_inference() and not value.is_meta:
                    self.watch(getattr(function, "__name__", ""), value)
        return out

    def watch(self, name, value):
        with torch._C.DisableTorchFunction():
            entry = [name.strip("_").removeprefix("i"), plain_bits(value).clone(), None]

            def hook(gradient):
                if self.armed and gradient is not None:
                    entry[2] = gradient.detach()

            try:
                value.register_hook(hook) if value.requires_grad else None
            except RuntimeError:  # a view that torch itself refuses to differentiate
                return
            self.seen.append(entry)


def scalar(output):
    """One number that every float in an output goes into."""
    result = torch.zeros(())
    for tensor in tensors(output):
        if tensor.requires_grad:
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            real = torch.view_as_real(dense) if dense.is_complex() else dense
            weights = torch.arange(real.numel(), dtype=torch.float64).cos().reshape(real.shape)
            result = result + (real * weights).nan_to_num(0, 0, 0).sum()
    return result


def close(one, other):
    one, other = (t if t.layout is torch.strided else t.to_dense() for t in (one, other))
    if one.numel() != other.numel():
        return False
    return torch.allclose(one.flatten(), other.flatten().to(one.dtype), rtol=1e-4, atol=1e-6, equal_nan=True)


def program_and_grads(name):
    reseed()
    case = MODELS[name]()
    try:
        prog = rl.capture(case.model, *case.args, **case.kwargs)
        return prog, prog.grads(of=scalar)
    except rl.BadMetric as error:
        if any(t.is_floating_point() for t in tensors(prog.output)):
            raise
        pytest.skip(str(error))
    except Exception as error:
        if is_refused_so(name, error, CAPTURE_REFUSED, GRADIENTS_REFUSED):
            pytest.skip(str(error))
        raise


def plainly_hooked(build):
    reseed()
    case, hooks = build(), Hooks()
    with unasked():
        args = differentiable(case.args)
        for tensor in tensors(args):
            hooks.watch("nput", tensor)
        with hooks:
            out = case.model(*args, **case.kwargs)
        metric = scalar(out)
        hooks.armed = True
        metric.backward()
    return hooks.seen


OTHER_TENSORS = {  # the hooked tensor of that name and value is not what the layer is
    "write_that_changes_nothing": "a view that is read later has no call of its own",
    "input_that_is_a_parameter": "one tensor plays two parts, which are two layers",
    "checkpoint_with_reentry": "runs first without, then again with gradients",
    "hook_on_a_tensor": "its own hook comes after ours",
    "function_under_no_grad": "two tensors of one name and value",
    "function_straight_through": "two tensors of one name and value",
    "inference_tensor_returned": "two tensors of one name and value",
}
REFUSED = {  # layers that have a gradient in the model, and none here
    "write_of_a_view_to_where_it_is_read",  # it cannot be told from its memory's
    "transpose_in_place",  # what it gives is a view of its old self
    "squeeze_and_unsqueeze_in_place",
    "gradient_inside_kept_differentiable",  # gradients inside
    "gradient_penalty",
    "langevin_steps",  # requires_grad_() in the forward
    "module_copied_in_the_forward",
    "module_made_in_the_forward",
    "jacobian_of_autograd",
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_what_hooks_on_the_plain_model_get(name):
    with silence():
        try:
            seen = plainly_hooked(MODELS[name])
        except CannotAsk as reason:
            pytest.skip(str(reason))
        prog, grads = program_and_grads(name)
        if name in OTHER_TENSORS:
            return
        for layer in prog.layers:
            value = layer.value
            if layer.layer_type == "output" or not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            bits, kind = plain_bits(value), layer.layer_type.removeprefix("i")
            twins = [
                gradient
                for function, other, gradient in seen
                if function.replace("_", "") == kind
                and (other.shape, other.dtype) == (bits.shape, bits.dtype)
                and bool(((other == bits) | ((other != other) & (bits != bits))).all())
            ]
            if not twins:
                continue
            if layer.label in grads:
                mine = grads[layer.label]
                assert any(close(mine, other) if other is not None else not mine.count_nonzero() for other in twins), (
                    f"{layer.label}: {mine}, not {twins}"
                )
            elif name not in REFUSED:
                assert any(other is None or not other.count_nonzero() for other in twins), (
                    f"{layer.label}: {grads.without.get(layer.label)}, but {twins}"
                )


TELLS_WHAT_GAVE_IT = {"printing_in_the_forward", "identity_is_asked"}  # in its text, or by `_base`: a leaf is another


@pytest.mark.parametrize("name", list(MODELS)[::2])
def test_a_gradient_is_that_of_a_patch_there(name):
    with silence():
        prog, grads = program_and_grads(name)
        labels = [label for label, gradient in grads.items() if isinstance(gradient, torch.Tensor)]
        for label in labels[:: max(1, len(labels) // 4)]:
            node, value = prog[label].node, prog[label].value
            if getattr(node, "is_differentiated", False) or value.is_meta:
                continue
            patch = (value.clone() if value.layout is torch.strided else value.detach()).requires_grad_()
            choice = "ignore" if name in TELLS_WHAT_GAVE_IT else "raise"
            try:
                run = prog.replay(patch={label: patch}, grad=True, on_divergence=choice)
            except rl.DivergedReplay:  # a tensor is parted there from memory that is written, or from a gradient within
                calls = prog.graph.calls
                is_inside = any(node.name in call.through for call in calls)
                assert is_inside or writes_views(prog.graph) or any(call.is_overwritten for call in calls)
                continue
            metric = scalar(run.output)
            (wanted,) = torch.autograd.grad(metric, patch, allow_unused=True) if metric.requires_grad else (None,)
            mine = grads[label]
            assert close(mine, wanted) if wanted is not None else not mine.count_nonzero(), label


def test_a_value_far_behind_the_cut_says_where_it_was_cut():
    fc = nn.Linear(3, 3)

    def model(x):
        held = fc(x).detach()
        return fc(x) * ((held * 2) + 3).exp()

    prog = rl.capture(model, torch.randn(2, 3))
    without = prog.grads(of=torch.sum).without
    assert [label for label, why in without.items() if why.startswith("detached in detach_1_2 (")] == [
        "linear_1_1:1",
        "detach_1_2",
        "mul_1_3",
        "add_1_4",
        "exp_1_5",
    ]
    no_source = rl.capture(lambda x: fc(x) * (torch.zeros(2, 3) + 1).exp(), torch.randn(2, 3))
    assert no_source.grads(of=torch.sum).without["exp_1_4"].startswith("neither an input nor a parameter")


HOOKS = {
    "scales": [lambda g: g * 2],
    "two of them": [lambda g: g + 1, lambda g: g * 3],
    "looks on": [lambda g: None],
    "clamps": [lambda g: g.clamp(-0.1, 0.1)],
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_users_hooks_on_parameters_are_heeded_as_the_models_backward_heeds_them(name):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    for hook in HOOKS[name]:
        model[0].weight.register_hook(hook)
    prog = rl.capture(model, x)
    wanted = torch.autograd.grad(model(x).sum(), model[0].weight)[0]
    assert torch.equal(prog.grads(of=torch.sum, at=["0.weight"])["0.weight"], wanted)
    given = nn.Parameter(model[0].weight.detach() * 2)  # has none
    found = prog.grads(of=torch.sum, at=["0.weight"], state={"0.weight": given})["0.weight"]
    with torch.no_grad():
        model[0].weight._backward_hooks.clear()
        model[0].weight.copy_(given)
    assert torch.equal(found, torch.autograd.grad(model(x).sum(), model[0].weight)[0])
