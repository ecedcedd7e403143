"""Every error: the fact, the place, the cure. Texts are compared whole."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from internals import Call, Graph, Input, Ref, Target, TensorSpec, require_lawful
from oracle import assert_same
from torch import nn
from torch.nn import functional as F

import replaylens as rl
from replaylens import errors


def x(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        hidden = self.fc(x)
        hidden = F.relu(hidden)
        return hidden * scale


def captured(model=None, *args, **kwargs):
    torch.manual_seed(0)
    return rl.capture(model or Net(), *(args or (x(),)), **kwargs)


def said(kind, action):
    """The text of the error, which is of this very class, that an action ends in."""
    with pytest.raises(kind) as error:
        action()
    assert error.type is kind
    return str(error.value)


def line(code):
    """How a message points at the line of this file that begins so."""
    lines = Path(__file__).read_text().splitlines()
    number, text = next((n, text.strip()) for n, text in enumerate(lines, 1) if text.strip().startswith(code))
    return f"    test_errors.py:{number}    {text}"


# ---- what they are -------------------------------------------------------------------------------------------------


ERRORS = [error for error in vars(errors).values() if isinstance(error, type)]


@pytest.mark.parametrize("error", ERRORS[1:], ids=lambda error: error.__name__)
def test_every_error_is_one_of_ours_and_one_that_a_user_would_catch(error):
    assert issubclass(error, errors.ReplaylensError)
    caught = {base for base in error.__mro__ if base.__module__ == "builtins"} - {Exception, BaseException, object}
    assert caught and error.__doc__


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_can_be_caught_from_the_front_door(error):
    assert getattr(rl, error.__name__) is error


# ---- names ---------------------------------------------------------------------------------------------------------


DOORS = {
    "getitem": lambda prog, name: prog[name],
    "from_": lambda prog, name: prog.replay(from_=name),
    "to": lambda prog, name: prog.replay(to=name),
    "patch": lambda prog, name: prog.replay(patch={name: torch.zeros_like}),
    "keep": lambda prog, name: prog.replay(keep=[name]),
    "run": lambda prog, name: prog.replay()[name],
    "function": lambda prog, name: prog.function(inputs=[name]),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_unknown_name_is_answered_alike_at_every_door(door):
    ask = DOORS[door]
    prog = captured()
    text = said(rl.NoSuchLayer, lambda: ask(prog, "relo_1"))
    assert text.startswith("no layer is called 'relo_1'. The nearest names are 'relu_1', ")
    assert said(rl.NoSuchLayer, lambda: ask(prog, "?")) == "no layer is called '?'. `prog.layers` lists them all."
    assert said(rl.NoSuchLayer, lambda: ask(prog, 9)) == "no layer 9: the program has 5 layers, 0 to 4."


def test_what_is_no_name_at_all_is_answered_with_what_names_are():
    assert said(rl.NoSuchLayer, lambda: captured()[1.5]) == (
        "a layer is named by a label, a module address or an ordinal, not by float 1.5."
    )


# ---- inputs and state ----------------------------------------------------------------------------------------------


CAPTURE_AGAIN = "A program has the shapes of one forward pass. Give the recorded shape and dtype, or capture again."
ONE_STRUCTURE = "A program holds for one structure of inputs. Give the same structure, or capture again."


def test_an_input_of_another_shape():
    assert said(rl.InputMismatch, lambda: captured().replay(torch.ones(5, 4), on_divergence="raise")) == (
        f"the input at args[0] is float32[5, 4] on cpu; the program was recorded with float32[3, 4] on cpu.\n{CAPTURE_AGAIN}"
    )


def test_an_input_of_another_dtype():
    assert said(rl.InputMismatch, lambda: captured().replay(x().double(), on_divergence="raise")) == (
        f"the input at args[0] is float64[3, 4] on cpu; the program was recorded with float32[3, 4] on cpu.\n{CAPTURE_AGAIN}"
    )


def test_an_input_on_another_device():
    assert said(rl.InputMismatch, lambda: captured().replay(x().to("meta"), on_divergence="raise")) == (
        f"the input at args[0] is float32[3, 4] on meta; the program was recorded with float32[3, 4] on cpu.\n{CAPTURE_AGAIN}"
    )


def test_an_input_that_is_missing():
    prog = captured(None, x(), scale=x(1))
    assert said(rl.InputMismatch, lambda: prog.replay(x(), on_divergence="raise")) == (
        f"the input at kwargs['scale'] is missing; the program was recorded with a tensor.\n{ONE_STRUCTURE}"
    )


def test_an_input_too_many():
    text = said(rl.InputMismatch, lambda: captured().replay(x(), x(), on_divergence="raise"))
    assert text.startswith("the input at args[1] is a tensor; ") and text.endswith(ONE_STRUCTURE)
    assert "recorded with missing" not in text


def test_an_input_that_is_no_tensor_is_part_of_the_program():
    prog = captured(None, x(), 2.0)
    assert_same(prog(x(), 2.0).output, prog.output.detach())
    assert said(rl.InputMismatch, lambda: prog.replay(x(), 3.0, on_divergence="raise")) == (
        f"the input at args[1] is 3.0; the program was recorded with 2.0.\n{ONE_STRUCTURE}"
    )


def test_an_input_deep_in_a_structure():
    prog = captured(lambda tree: tree["k"][1] + 1, {"k": (1, x())})
    assert said(rl.InputMismatch, lambda: prog.replay({"k": (1, x()[0])}, on_divergence="raise")).startswith(
        "the input at args[0]['k'][1] is float32[4] on cpu; the program was recorded with float32[3, 4] on cpu."
    )


def test_a_list_is_not_a_tuple():
    prog = captured(lambda pair: pair[0] + pair[1] if isinstance(pair, tuple) else pair[0], (x(), x(1)))
    assert said(rl.InputMismatch, lambda: prog.replay([x(), x(1)], on_divergence="raise")).endswith(ONE_STRUCTURE)


def test_one_input_given_twice_can_be_another_given_twice_but_not_two():
    prog = captured(lambda query, key: query @ key.T, same := x(), same)
    assert_same(prog(other := x(1), other).output, x(1) @ x(1).T)
    with pytest.raises(rl.InputMismatch):
        prog.replay(x(1), x(2), on_divergence="raise")


def test_a_state_that_does_not_exist():
    assert said(rl.InputMismatch, lambda: captured().replay(state={"fc.weigth": torch.eye(4)})).startswith(
        "no parameter or buffer that the forward read is called 'fc.weigth'. The nearest names are 'fc.weight', "
    )


def test_a_state_of_another_shape():
    assert said(
        rl.InputMismatch, lambda: captured().replay(state={"fc.weight": torch.eye(5)}, on_divergence="raise")
    ) == ("the state at 'fc.weight' is float32[5, 5]; the program was recorded with float32[4, 4].")


def test_inputs_that_share_memory_and_are_written_can_be_no_others():
    def writes(a, b):
        a.add_(1)
        return b * 2

    prog = captured(writes, base := torch.zeros(3, 4), base.view(12))
    assert said(rl.InputMismatch, lambda: prog.replay(x(), x(1).view(12), on_divergence="raise")) == (
        "when this program was recorded, an input shared its memory with another input or with a buffer, and was written. "
        "Other inputs do not share it in this way: capture again with them."
    )


# ---- patches -------------------------------------------------------------------------------------------------------


def test_a_patch_of_another_shape_is_shown_where_it_stands():
    assert said(rl.ShapeMismatch, lambda: captured().replay(patch={"relu_1": torch.ones(3, 5)})) == (
        "the patch at `relu_1_2` gives float32[3, 5]; what uses it was recorded with float32[3, 4].\n"
        f"{line('hidden = F.relu(hidden)')}\n"
        "    linear_1_1 = linear(input_1_0, fc.weight, fc.bias)  # float32[3, 4]\n"
        "  > relu_1_2 = relu(linear_1_1)  # float32[3, 4]   <- patched with float32[3, 5]\n"
        "    mul_1_3 = mul(relu_1_2, 1.0)  # float32[3, 4]\n"
        "Give a tensor of shape (3, 4) and dtype torch.float32."
    )


@pytest.mark.parametrize("patch", [torch.ones(3, 4).double(), lambda value: value.double()], ids=["tensor", "function"])
def test_a_patch_of_another_dtype(patch):
    assert said(rl.ShapeMismatch, lambda: captured().replay(patch={"relu_1": patch})).startswith(
        "the patch at `relu_1_2` gives float64[3, 4]; what uses it was recorded with float32[3, 4].\n"
    )


def test_a_patch_that_gives_no_tensor():
    assert said(rl.ShapeMismatch, lambda: captured().replay(patch={"relu_1": lambda value: None})).startswith(
        f"the patch at `relu_1_2` gives NoneType, not a tensor.\n{line('hidden = F.relu(hidden)')}\n"
    )


def test_a_patch_of_one_value_for_several():
    prog = captured(lambda x: x.chunk(2), x()[:2])
    assert said(rl.ShapeMismatch, lambda: prog.replay(patch={"chunk_1": x()[:1]})).startswith(
        "chunk_1_1 gives several tensors; a patch for it must give as many."
    )


def test_a_patch_that_raises_raises_its_own_error_with_the_node():
    with pytest.raises(ZeroDivisionError) as error:
        captured().replay(patch={"relu_1": lambda value: 1 / 0})
    assert "relu_1_2" in error.value.__notes__[0]


def test_a_bare_patch_without_a_place():
    assert said(rl.ReplaylensError, lambda: captured().replay(patch=torch.zeros(3, 4))) == (
        "a bare patch needs from_= to say where. Or give a mapping: patch={'relu_3': tensor}."
    )


def test_two_patches_for_one_value():
    assert said(rl.ReplaylensError, lambda: captured().replay(patch={"relu_1": torch.neg, 2: torch.neg})) == (
        "two patches for relu_1_2, under 'relu_1' and 2. Give one, or a list of both."
    )


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"rng": "random"}, "rng must be one of 'replay', 'fresh', not 'random'."),
        ({"on_divergence": "warn"}, "on_divergence must be one of 'rerun', 'raise', 'ignore', not 'warn'."),
    ],
    ids=str,
)
def test_an_option_that_does_not_exist(option, text):
    assert said(ValueError, lambda: captured().replay(**option)) == text


def test_an_output_that_a_replay_did_not_reach():
    assert said(rl.NotSaved, lambda: captured().replay(to="fc").output) == (
        "the replay stopped before the output, as `to=` asked. Read the value that it stopped at: run[name]."
    )


# ---- values that were overwritten ----------------------------------------------------------------------------------


REFRESH = (
    "was overwritten since the capture, by an optimizer's step or an operation in place.\n"
    "`prog = prog.refresh()` runs the program again on what is there now; `state={...}` gives other parameters to one replay."
)


@pytest.mark.parametrize("use", [False, True], ids=["before_its_first_use", "after_a_replay"])
def test_a_parameter_that_was_overwritten(use):
    prog = captured(net := Net())
    if use:
        prog.replay()
    with torch.no_grad():
        net.fc.weight.add_(1)
    assert said(rl.StaleValue, prog.replay) == f"the parameter `fc.weight` {REFRESH}"


def test_an_input_that_was_overwritten():
    prog = captured(None, start := x())
    start.zero_()
    assert said(rl.StaleValue, prog.replay) == f"the recorded value of `input_1_0` {REFRESH}"


def test_an_input_that_was_overwritten_hurts_no_replay_on_others():
    prog = captured(net := Net(), start := x())
    start.copy_(x(1))
    assert_same(prog(x(2)).output, net(x(2)).detach())


def test_a_recorded_value_that_was_overwritten():
    prog = captured()
    prog["relu_1"].value.add_(1)
    for ask in lambda: prog["relu_1"].value, lambda: prog.replay(from_="relu_1"):
        assert said(rl.StaleValue, ask) == f"the recorded value of `relu_1_2` {REFRESH}"


# ---- another path --------------------------------------------------------------------------------------------------


def branches(x):
    if x.sum() > 0:
        return x.sin()
    return x.cos()


OTHER_WAYS = (
    'on_divergence="rerun" runs the model itself with this change, where a program still holds its model '
    '(one of a file is given it: load(path, state=model)); "ignore" goes on '
    "along the recorded path."
)


def test_a_branch_not_taken():
    prog = captured(branches, torch.ones(3))
    departure = f"`bool(gt_1_2)` was True when recorded, and is False now.\n{line('if x.sum() > 0:')}"
    assert said(rl.DivergedReplay, lambda: prog.replay(-torch.ones(3), on_divergence="raise")) == (
        f"the change leads away from the recorded path: {departure}\n{OTHER_WAYS}"
    )
    run = prog.replay(-torch.ones(3), on_divergence="ignore")
    assert run.diverged and [str(one) for one in run.departures] == [departure]
    assert_same(run.output, -torch.ones(3).sin())


def test_a_size_that_depends_on_content():
    prog = captured(lambda x: x[x > 0], torch.tensor([1.0, -1.0]))
    assert_same(prog(torch.tensor([-1.0, 3.0])).output, torch.tensor([3.0]))
    assert said(rl.DivergedReplay, lambda: prog.replay(torch.ones(2), on_divergence="raise")).startswith(
        "the change leads away from the recorded path: the shape of getitem_1_2 was (1,) when recorded, and is (2,) now.\n"
    )


READERS = {
    "item": lambda x, k: x * k.item(),
    "bool": lambda x, k: x.sin() if k > 0 else x.cos(),
    "bool_itself": lambda x, k: x.sin() if k else x.cos(),
    "int": lambda x, k: x[: int(k)],
    "tolist": lambda x, k: x * k.tolist(),
    "numpy": lambda x, k: x * float(k.numpy()),
    "format": lambda x, k: x if f"{k}" == "2.0" else -x,
    "equal": lambda x, k: x if torch.equal(k, torch.tensor(2.0)) else -x,
    "index": lambda x, k: x[range(3)[k.int()]],
}


@pytest.mark.parametrize("reader", READERS)
def test_content_of_an_input_that_is_read_in_python_is_a_guard(reader):
    prog = captured(READERS[reader], torch.arange(3.0), torch.tensor(2.0))
    assert_same(prog(torch.ones(3), torch.tensor(2.0)).output, READERS[reader](torch.ones(3), torch.tensor(2.0)))
    for ask in (
        lambda: prog.replay(torch.arange(3.0), torch.tensor(0.0), on_divergence="raise"),
        lambda: prog.replay(patch={"input_2": torch.tensor(0.0)}, on_divergence="raise"),
        lambda: prog.function()(torch.arange(3.0), torch.tensor(0.0)),
    ):
        with pytest.raises(rl.DivergedReplay):
            ask()


def test_content_of_a_buffer_that_is_read_in_python_is_a_guard():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.tensor(2.0))

        def forward(self, x):
            return x * self.k.item()

    prog = captured(net := Scaled())
    with pytest.raises(rl.DivergedReplay):
        prog.replay(state={"k": torch.tensor(3.0)}, on_divergence="raise")
    net.k.fill_(3.0)
    with pytest.raises(rl.DivergedReplay):
        prog.refresh()


def test_content_of_a_patched_value_that_is_read_in_python_is_a_guard():
    prog = captured(lambda x: x[: int(x.sum())], torch.ones(3))
    with pytest.raises(rl.DivergedReplay):
        prog.replay(patch={"sum_1": torch.tensor(1.0)}, on_divergence="raise")


# ---- what cannot be captured ---------------------------------------------------------------------------------------


def asks_another_thread(x):
    box = []
    thread = threading.Thread(target=lambda: box.append(x.exp()))
    thread.start()
    thread.join()
    return box[0] + 1


def test_a_tensor_of_another_thread():
    assert said(rl.UnknownOrigin, lambda: captured(asks_another_thread)) == (
        "a tensor float32[3, 4] reached an operation, and no recorded call in this thread made "
        "it.\n"
        f"{line('return box[0] + 1')}\n"
        "It may be the result of another thread, or of code that hides its calls from torch. "
        "Compute it in the forward's own thread, or pass it in as an input; capture(..., "
        "unknown='constant') keeps such tensors as constants."
    )


def test_a_tensor_of_another_thread_may_be_taken_for_a_constant():
    prog = captured(asks_another_thread, x(), unknown="constant")
    assert_same(prog.replay().output, x().exp() + 1)
    text = said(ValueError, lambda: captured(None, x(), unknown="ignore"))
    assert text == "unknown must be 'raise' or 'constant', not 'ignore'."


def test_a_write_by_another_thread():
    def model(x):
        y = x.sin()
        thread = threading.Thread(target=y.add_, args=(1,))
        thread.start()
        thread.join()
        return y * 2

    assert said(rl.UnannouncedWrite, lambda: captured(model)) == (
        "a tensor (3, 4) was written during the forward by code that the capture did not see: "
        "another thread, an extension, or a call that hides from torch. No value recorded after "
        "the write can be trusted, so there is no program."
    )


@torch.library.custom_op("replaylens_tests::sneaky", mutates_args=())
def sneaky(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.clone()


def calls_sneaky(x):
    y = x.sin()
    return torch.ops.replaylens_tests.sneaky(y)


def test_an_operator_that_writes_without_saying_so():
    assert said(rl.UnannouncedWrite, lambda: captured(calls_sneaky)) == (
        "`sneaky` wrote one of its arguments without announcing it.\n"
        f"{line('return torch.ops.replaylens_tests.sneaky(y)')}\n"
        "Declare what it mutates (torch.library: mutates_args), or return a new tensor."
    )


def test_a_model_in_data_parallel():
    assert said(rl.UnsupportedModel, lambda: captured(nn.DataParallel(Net()))) == (
        "the model is wrapped in DataParallel, whose replicas run in threads. Capture `model.module` instead."
    )
    assert said(rl.UnsupportedModel, lambda: captured(nn.Sequential(nn.DataParallel(Net())))) == (
        "a submodule is wrapped in DataParallel, whose replicas run in threads. Use its `.module` instead."
    )


def test_a_model_that_cannot_be_called():
    assert said(rl.UnsupportedModel, lambda: rl.capture(7, x())) == (
        "int is not callable. Pass a module or a function, then its inputs."
    )


def test_a_lazy_module_before_its_first_forward():
    lazy = nn.Sequential(nn.LazyLinear(2), nn.ReLU())
    assert said(rl.UnsupportedModel, lambda: captured(lazy)) == (
        "a LazyLinear has no parameters yet: its first forward creates them. Run the model once, then capture it."
    )
    lazy(x())
    assert_same(captured(lazy).output, lazy(x()))


@pytest.mark.parametrize(
    "model",
    [lambda x: (x * k for k in range(3)), lambda x: {"rows": [(x * k for k in range(3))]}],
    ids=["itself", "deep_in_the_output"],
)
def test_a_generator_as_output(model):
    assert "generator, which computes after the forward has ended" in said(rl.CaptureError, lambda: captured(model))


# ---- exceptions of the model's own ---------------------------------------------------------------------------------


class Fails(Exception):
    pass


class Outer(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner, self.error = Net(), error

    def forward(self, x):
        hidden = self.inner(x)
        if self.error is not None:
            raise self.error
        return hidden @ hidden


def test_a_model_that_raises_raises_its_own_exception():
    mine = Fails("too cold")
    with pytest.raises(Fails) as error:
        captured(Outer(mine))
    assert error.value is mine and error.value.__cause__ is None


@pytest.mark.parametrize("mine", [Fails("too cold"), None], ids=["the_models_own", "of_a_torch_function"])
def test_an_exception_of_the_model_is_noted_with_the_line_and_what_came_before(mine):
    with pytest.raises((Fails, RuntimeError)) as error:
        captured(Outer(mine))
    (note,) = error.value.__notes__
    assert note.startswith("replaylens: the model raised this after 3 recorded calls")
    assert line("raise self.error" if mine else "return hidden @ hidden").strip() in note
    assert "mul_1_3" in note  # the last node


def test_an_operation_that_raises_in_a_replay_is_noted_with_its_node_and_line():
    def decomposes(x):
        return torch.linalg.cholesky(x)

    prog = captured(decomposes, torch.eye(3))
    with pytest.raises(torch.linalg.LinAlgError) as error:
        prog(-torch.eye(3))
    notes = "".join(error.value.__notes__)
    assert "linalgcholesky_1_1" in notes and line("return torch.linalg.cholesky(x)").strip() in notes


# ---- gradients -----------------------------------------------------------------------------------------------------


class ReadsAParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        return x @ module.weight

    @staticmethod
    def backward(ctx, slope):
        return slope * 7, None


def test_a_custom_function_whose_backward_cannot_be_kept():
    fc = nn.Linear(4, 4)
    prog = captured(lambda x: ReadsAParameter.apply(x, fc))
    assert_same(prog(x(1)).output, x(1) @ fc.weight.detach())
    for ask in lambda: prog.replay(x().requires_grad_(), grad=True), prog.function:
        assert said(rl.NotDifferentiable, ask).startswith("gradients through ReadsAParameter cannot be replayed: ")


# ---- graphs --------------------------------------------------------------------------------------------------------


def test_a_graph_that_breaks_laws_is_told_all_of_them():
    scalar = TensorSpec((), torch.float32, "cpu", ())
    call = Call("a", "sin", Target.of(torch.sin), (Ref("b"),), returns=Ref("a"), spec=(scalar,))
    broken = Graph((Input("x", (0,), scalar), call, Input("x", (1,), scalar)), Ref("z"))
    assert said(errors.UnlawfulGraph, lambda: require_lawful(broken)) == (
        "the graph breaks 3 laws:\n"
        "  a: reads b, which no earlier node gives\n"
        "  x: the name is given twice\n"
        "  output: gives z, which no node gives"
    )


@pytest.mark.parametrize("name", ["torch.nn.functional.sinus", "no_such_module.sin"])
def test_a_function_that_is_gone(name):
    assert said(errors.UnresolvedTarget, lambda: Target.named(name)) == (
        f"no function is found under the name {name!r}. Import the module that defines it first."
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tensor", [torch.from_numpy, torch.as_tensor, torch.asarray])
def test_an_array_that_two_tensors_look_at_and_one_writes_is_refused(tensor, mode):
    def forward(x):
        room = np.zeros((3, 4), dtype=np.float32)
        first = tensor(room)
        first += x
        return tensor(room) * 2

    with mode():
        text = said(rl.CaptureError, lambda: captured(forward, x()))
    assert text.startswith("a tensor shares its memory with another one through numpy, dlpack or the like.\n")
    assert text.endswith("\nWhich value it holds when cannot be known. Use views made by torch, or copy.")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tensor", [torch.from_numpy, torch.as_tensor, torch.asarray])
def test_an_array_that_one_tensor_looks_at_is_a_constant(tensor, mode):
    def forward(x):
        room = tensor(np.ones((3, 4), dtype=np.float32))
        room += x
        return room * 2

    with mode():
        assert torch.equal(captured(forward, x()).replay(x(1)).output, forward(x(1)))
