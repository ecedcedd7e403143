"""A followed forward changes nothing, tells each value when it is made, and only by the name that a capture gives it."""

from __future__ import annotations

import copy
import io
import signal
import threading
import types
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from internals import Label, scopes, torch_private
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_witness import (
    MAKERS,
    Convolutional,
    Language,
    Perceptron,
    Witness,
    digest,
    loss_of,
    note_generators,
    note_model,
    seed_all,
    tensors_of,
    trained,
)
from zoo import MODELS, silence

import replaylens as rl
from replaylens._watch.followed_forward import FollowedForward, why_not

MODULES = [name for name in MODELS if isinstance(MODELS[name]().model, nn.Module)]


class Told:
    """What a followed forward told: values by name, those that were proven, and why anything was lost."""

    def __init__(self, model, *names, seen=lambda label, tensor: None):
        self.values, self.proven, self.lost, self.more = {}, {}, [], seen
        self.follower = FollowedForward(model, names, self.seen, self.lost.append)

    def seen(self, label, tensor):
        self.more(label, tensor)
        self.values[label] = kept = tensor.detach().clone()
        return lambda: self.proven.__setitem__(label, kept)

    def next(self):
        self.values.clear()
        self.proven.clear()
        self.follower.arm()


def torch_now(model):
    """What a capture exchanges in torch, and what is armed on a model."""
    return (
        torch_private.count_function_modes(),
        torch_private.count_dispatch_modes(),
        torch.is_grad_enabled(),
        nn.Module.__call__.__code__,
        torch.overrides.handle_torch_function,
        torch.compile,
        threading.Thread.start,
        torch.autograd.Function.apply,
        scopes.is_listening(),
        [sorted(vars(module)) for module in model.modules()],
    )


# -- identity ----------------------------------------------------------------------------------------------------------


@contextmanager
def all_is_followed(model, optimizer):
    told = Told(model, "*")
    handle = optimizer.register_step_post_hook(lambda *given: told.follower.arm())
    told.follower.arm()
    yield
    handle.remove()
    told.follower.close()


@contextmanager
def hooks_on_gradients(model, optimizer):
    """Every value is watched, and its gradient."""
    grads = []
    told = Told(model, "*", seen=lambda label, t: t.requires_grad and t.register_hook(grads.append))
    handle = optimizer.register_step_post_hook(lambda *given: told.follower.arm())
    told.follower.arm()
    yield
    handle.remove()
    told.follower.close()


@pytest.mark.parametrize("watching", [all_is_followed, hooks_on_gradients])
@pytest.mark.parametrize("name", MAKERS)
def test_a_followed_training_is_the_unwatched_one_bit_for_bit(name, watching):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, followed = trained(MAKERS[name]), trained(MAKERS[name], watching=watching)
    assert followed == plain


def forwards(name, evaluate, follow):
    """Two forwards and backwards of a model of the zoo."""
    seed_all()
    case, witness = MODELS[name](), Witness()
    model, told = case.model, None
    with silence():
        if evaluate and name != "exported_model":
            model.eval()
        told = Told(model, "*") if follow else None
        before = torch_now(model)
        for number in range(2):
            seed_all(number)
            if told is not None:
                told.next()
            try:
                with torch.set_grad_enabled(not evaluate):
                    out = model(*case.args, **case.kwargs)
                witness.note(f"output {number}", list(tensors_of(out)))
                if (loss := loss_of(out)) is not None:
                    loss.backward()
            except Exception as error:
                notes = tuple(getattr(error, "__notes__", ()))
                witness.errors.append((type(error), str(type(error.__context__)), notes))
        if told is not None:
            told.follower.close()
            assert [*torch_now(model)][:-1] == [*before][:-1]
    note_model(witness, model)
    note_generators(witness)
    for number, tensor in enumerate(tensors_of([case.args, case.kwargs])):
        witness.note(f"input {number}", [tensor, tensor.grad])
    return witness


@pytest.mark.parametrize("evaluate", [False, pytest.param(True, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("name", MODULES)
def test_a_followed_forward_of_any_model_leaves_what_the_plain_one_leaves(name, evaluate):
    plain = forwards(name, evaluate, follow=False)
    followed = forwards(name, evaluate, follow=True)
    if plain != followed:  # a model may differ from itself: undefined memory, addresses
        again = forwards(name, evaluate, follow=False)
        same = {key for key in plain.hashes if plain.hashes[key] == again.hashes.get(key)}
        assert {key: followed.hashes.get(key) for key in same} == {key: plain.hashes[key] for key in same}
        assert followed.errors == plain.errors


# -- names -------------------------------------------------------------------------------------------------------------


UNDEFINED = ("empty", "newempty", "emptylike")  # what a capture fills is somebody's old memory in a plain forward


def assert_names_are_those_of_capture(program, values):
    names = {Label.of(layer.label).short: layer for layer in program.layers}
    for label, value in values.items():
        name, _, part = label.partition("[")
        assert name in names, f"{label} is no name of {list(names)}"
        kept = names[name].value
        is_defined = not any(word in line for word in UNDEFINED for line in names)
        if not part and isinstance(kept, torch.Tensor) and is_defined:
            assert digest(kept.detach()) == digest(value), label


@pytest.mark.parametrize("name", sorted({*MODULES} - {"cached_constant", "noise_from_numpy_and_python"}))
def test_the_names_and_values_are_those_of_a_capture(name):
    with silence():
        seed_all()
        case = MODELS[name]()
        case.model(*case.args, **case.kwargs) if name in ("lazy_module",) else None
        told = Told(case.model, "*")
        seed_all()
        told.next()
        try:
            case.model(*case.args, **case.kwargs)
        except Exception:
            assert not told.proven
            return
        seed_all()
        other = MODELS[name]()
        seed_all()
        try:
            program = rl.capture(other.model, *other.args, **other.kwargs)
        except rl.ReplaylensError:
            assert not told.proven or case.refusal
            return
        assert_names_are_those_of_capture(program, told.proven)
        if not told.lost:
            assert told.proven


def test_values_are_told_while_the_forward_runs_once_its_path_is_known():
    order = []

    class Model(nn.Module):
        def forward(self, x):
            h = torch.relu(x)
            order.append("between")
            return torch.softmax(h, -1)

    model = Model()
    told = Told(model, "relu", "softmax", seen=lambda label, tensor: order.append(label))
    for _ in range(2):
        told.next()
        model(torch.randn(2, 3))
    assert order == ["between", "relu_1", "softmax_1", "relu_1", "between", "softmax_1"]
    assert set(told.proven) == {"relu_1", "softmax_1"}


def test_a_value_is_told_before_it_is_overwritten_and_has_its_gradient():
    grads = {}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return F.relu(self.norm(self.first(x)), inplace=True) * 2.0

    def twin(model, x):
        normed = model.norm(model.first(x))
        normed.retain_grad()
        (F.relu(normed) * 2.0).square().sum().backward()
        return normed

    model, x = Model(), torch.randn(5, 4)
    plain = twin(copy.deepcopy(model), x)

    def seen(label, tensor):
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: grads.__setitem__(label, grad))

    told = Told(model, "batchnorm", seen=seen)
    for number in range(2):
        told.next()
        other = copy.deepcopy(model) if number == 0 else model
        del other
        model.zero_grad()
        model(x).square().sum().backward()
    assert digest(told.proven["batchnorm_1"]) == digest(plain.detach())
    assert digest(grads["batchnorm_1"]) == digest(plain.grad)


@pytest.mark.parametrize(
    ("asked", "told_as"),
    [
        ("relu_2", ["relu_2"]),
        ("relu_2_4", ["relu_2_4"]),
        ("softmax", ["softmax_1"]),
        ("relu", ["relu_1", "relu_2"]),
        ("relu_*", ["relu_1", "relu_2"]),
        ("chunk", ["chunk_1[0]", "chunk_1[1]"]),
        ("input_1", ["input_1"]),
        ("output_1", ["output_1"]),
        ("sin_1:2", ["sin_1:2"]),
        ("sin_1", ["sin_1:1", "sin_1:2", "sin_1:3"]),
        ("gelu", []),
    ],
)
def test_names_mean_what_they_mean_in_a_program(asked, told_as):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = torch.relu(self.second(torch.relu(self.first(x))))
            a, b = h.chunk(2, -1)
            for _ in range(3):
                a = a.sin()
            return torch.softmax(a + b, -1)

    told = Told(model := Model(), asked)
    for _ in range(2):
        told.next()
        model(torch.randn(3, 4))
        assert sorted(told.proven) == sorted(told_as)
    assert told.follower.missing == (() if told_as else (asked,))
    assert bool(told.lost) == (not told_as)


def test_what_is_told_on_a_path_that_turns_out_another_is_never_delivered_by_a_wrong_name():
    class Model(nn.Module):
        turns = 1

        def forward(self, x):
            x = x.exp()
            for _ in range(self.turns):
                x = x.sin().cos()
            return x.sin() if self.turns == 2 else x

    told = Told(model := Model(), "*")
    x = torch.randn(3)
    for turns in (1, 3, 2, 1, 5, 2, 3):
        model.turns = turns
        told.next()
        model(x)
        program = rl.capture(model, x)
        assert_names_are_those_of_capture(program, told.proven)
        if told.follower.sampled > 3:
            assert set(told.proven) >= {"input_1", "exp_1"}
    assert not told.lost


def test_a_name_by_the_number_among_all_layers_is_not_told_where_an_alias_may_count():
    class Inner(nn.Module):
        def forward(self, x):
            self.kept = x.exp()
            return self.kept

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            out = self.inner(x)
            return torch.relu(out + self.inner.kept.sin() + out.sin())

    told = Told(model := Model(), "relu_1", "relu_1_6", "relu_1_5")
    told.next()
    model(torch.randn(3))
    assert set(told.proven) == {"relu_1"}
    assert told.follower.missing == ("relu_1_6", "relu_1_5")


# -- what cannot be followed -------------------------------------------------------------------------------------------


def test_what_is_not_seen_goes_on_unseen_and_is_said_once():
    told = Told(model := MAKERS["threaded"]().model, "*")
    for _ in range(2):
        told.next()
        model(torch.randn(8, 16))
    assert not told.proven and len(told.lost) == 1 and "another thread" in told.lost[0]


def test_a_call_that_is_refused_after_it_ran_is_not_made_again():
    calls = []
    library = torch.library.Library("followed", "FRAGMENT")
    library.define("draws_and_writes(Tensor x) -> Tensor")

    def draws_and_writes(x):
        calls.append(x.add_(torch.rand(())))
        return x.clone()

    library.impl("draws_and_writes", draws_and_writes, "CPU")

    class Model(nn.Module):
        def forward(self, x):
            h = torch.sin(x)
            return torch.cos(torch.ops.followed.draws_and_writes(h) + h)

    told = Told(model := Model(), "*")
    with torch.no_grad():
        seed_all()
        plain = model(torch.ones(3))
        state = torch.get_rng_state()
        seed_all()
        told.next()
        assert digest(model(torch.ones(3))) == digest(plain) and digest(torch.get_rng_state()) == digest(state)
    assert len(calls) == 2 and "without announcing" in told.lost[0] and not told.proven


def test_the_kernels_of_attention_in_evaluation_are_those_of_the_plain_model():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(x)
        told = Told(model, "*")
        told.next()
        assert digest(model(x)) == digest(plain)
    assert "TransformerEncoder" in told.lost[0]


def test_an_exception_of_the_models_is_its_own():
    class Model(nn.Module):
        def forward(self, x):
            try:
                torch.ones(2) @ torch.ones(3)
            except RuntimeError as error:
                raise KeyError("mine") from error

    told, before = Told(model := Model(), "*"), None
    before = torch_now(model)
    told.next()
    with pytest.raises(KeyError) as caught:
        model(torch.ones(2))
    assert type(caught.value.__cause__) is RuntimeError and not hasattr(caught.value, "__notes__")
    assert torch_now(model) == before


def test_what_raises_in_the_observer_is_raised_nowhere():
    def seen(label, tensor):
        raise ZeroDivisionError("in the observer")

    told = Told(model := Perceptron(), "softmax", seen=seen)
    for _ in range(2):
        told.next()
        model(torch.randn(2, 16))
    assert told.lost == ["softmax_1: ZeroDivisionError: in the observer"]


def test_an_interrupt_anywhere_leaves_nothing_behind():
    model, x = Convolutional(), torch.randn(4, 3, 12, 12)
    before = torch_now(model)
    told = Told(model, "*")

    def interrupt(number, frame):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    hits = 0
    try:
        for number in range(150):
            told.next()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 4e-5 * number)
                model(x)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            told.follower.disarm()
            assert torch_now(model) == before
    finally:
        signal.signal(signal.SIGALRM, old)
    assert hits > 20
    told.next()
    model(x)
    assert told.proven


# -- arming ------------------------------------------------------------------------------------------------------------


def test_only_the_next_call_is_followed_and_nothing_stays():
    model = Perceptron()
    before = torch_now(model)
    told = Told(model, "softmax")
    told.next()
    assert told.follower.is_armed
    model(torch.randn(2, 16))
    assert torch_now(model) == before and not told.follower.is_armed
    told.proven.clear()
    model(torch.randn(2, 16))
    assert not told.proven
    told.next()
    told.follower.disarm()
    told.follower.disarm()
    assert torch_now(model) == before
    told.follower.close()
    told.next()
    assert torch_now(model) == before


def test_copies_and_pickles_of_an_armed_model_are_not_armed():
    told = Told(model := Perceptron(), "softmax")
    told.next()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), copy.copy(model), torch.load(file, weights_only=False)):
        assert "_compiled_call_impl" not in vars(other)
        other(torch.randn(2, 16))
    assert not told.proven and told.follower.is_armed
    replica = model._replicate_for_data_parallel()
    replica.head = nn.Linear(32, 7)
    replica.layers = model.layers
    assert replica(torch.randn(2, 16)).shape == (2, 7) and told.follower.is_armed
    model(torch.randn(2, 16))
    assert told.proven


def test_a_model_with_a_forward_of_its_own_on_the_instance_is_followed():
    model = Perceptron()
    inner = model.forward
    model.forward = types.MethodType(lambda self, x: inner(x) + 1.0, model)
    told = Told(model, "add")
    told.next()
    out = model(torch.randn(2, 16))
    assert digest(told.proven["add_1"]) == digest(out.detach())


def test_a_call_in_another_thread_is_not_the_trainings():
    told = Told(model := Perceptron(), "softmax")
    told.next()
    thread = threading.Thread(target=model, args=(torch.randn(2, 16),))
    thread.start()
    thread.join()
    assert not told.proven and told.follower.is_armed
    model(torch.randn(2, 16))
    assert told.proven


def test_a_capture_between_is_a_capture_and_the_next_forward_is_followed():
    told, x = Told(model := Perceptron().eval(), "softmax"), torch.randn(2, 16)
    plain = rl.capture(model, x)
    told.next()
    program = rl.capture(model, x)
    assert [layer.label for layer in program.layers] == [layer.label for layer in plain.layers]
    assert not told.proven and told.follower.is_armed
    model(x)
    assert told.proven and program.check()


def test_two_watches_of_one_model_are_told_both():
    one, two = Told(model := Perceptron(), "softmax"), Told(model, "gelu")
    for _ in range(2):
        one.next()
        two.next()
        model(torch.randn(2, 16))
        assert set(one.proven) == {"softmax_1"} and set(two.proven) == {"gelu_1"}
    one.next()
    two.next()
    one.follower.close()
    model(torch.randn(2, 16))
    assert not one.proven and two.proven


def test_a_follower_does_not_keep_a_model_and_a_model_not_its_follower():
    told = Told(model := Perceptron(), "softmax")
    for _ in range(2):
        told.next()
        model(torch.randn(2, 16))
    told.next()
    gone = weakref.ref(model)
    told.follower.disarm()
    del model
    assert gone() is None
    told.follower.arm()


def test_a_recomputation_in_the_backward_pass_is_no_sample():
    told = Told(model := Perceptron(), "softmax")
    x = torch.randn(2, 16, requires_grad=True)
    out = checkpoint(model, x, use_reentrant=False)
    told.next()
    out.sum().backward()
    assert not told.proven and told.follower.is_armed


def test_a_model_of_which_only_parts_are_called_is_said_to_be_so():
    told = Told(model := Perceptron(), "softmax")
    for _ in range(3):
        told.follower.arm()
        model.layers(torch.randn(2, 16))
    assert told.lost == ["the model itself was not called since: where a training calls only parts of it, watch those."]


def test_nothing_of_a_forward_is_kept_to_its_end():
    refs = []

    class Model(nn.Module):
        def forward(self, x):
            for _ in range(12):
                x = torch.relu(x * 1.01)
                refs.append(weakref.ref(x))
            alive.append(sum(ref() is not None for ref in refs[:-1]))
            return x.sum()

    alive = []
    told = Told(model := Model(), "sum")
    for _ in range(2):
        refs.clear()
        told.next()
        with torch.no_grad():
            model(torch.randn(1 << 21))
    assert set(told.proven) == {"sum_1"} and max(alive) <= 3
    assert not any(ref() is not None for ref in refs)


def test_what_the_model_returns_is_returned():
    made = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.skip = nn.Identity()

        def forward(self, x):
            made.append([self.skip(x), {"a": F.dropout(x, 0.5, False)}, (n for n in range(3))])
            return made[-1]

    told = Told(model := Model(), "*")
    x = torch.randn(3)
    told.next()
    out = model(x)
    assert out is made[0] and out[0] is x and out[1]["a"] is x and list(out[2]) == [0, 1, 2]


# -- compilers, wrappers -----------------------------------------------------------------------------------------------


def test_a_compiled_model_is_refused_with_the_reason():
    model = Perceptron()
    assert why_not(model) is None
    model.layers.compile(backend="eager")
    assert "compiled" in why_not(model)
    told = Told(model, "softmax")
    told.next()
    assert not told.follower.is_armed and "compiled" in told.lost[0]
    assert "compiled" in why_not(torch.compile(Perceptron(), backend="eager"))


def test_a_compiled_function_that_the_forward_calls_is_compiled_as_ever():
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counted, fullgraph=True)
    def inside(x):
        return torch.relu(x) * 2.0

    class Model(nn.Module):
        def forward(self, x):
            return torch.sin(inside(torch.cos(x)))

    model, x = Model(), torch.randn(3)
    told = Told(model, "*")
    before = torch_now(model)
    told.next()
    out = model(x)
    assert torch_now(model) == before and "compiled function" in told.lost[0]
    assert digest(model(x)) == digest(out) and counted.frame_count == 1


def test_a_compiled_step_around_an_armed_model_is_compiled_and_right():
    torch._dynamo.reset()
    model, x = Perceptron().eval(), torch.randn(2, 16)
    plain = model(x)
    step = torch.compile(lambda x: model(x) * 1.0, backend="eager", fullgraph=True)
    told = Told(model, "softmax")
    told.next()
    assert digest(step(x)) == digest(plain * 1.0)
    told.follower.disarm()
    assert digest(step(x)) == digest(plain * 1.0)
    assert not told.proven


def test_functional_calls_and_transforms_of_an_armed_model_are_theirs():
    model, x = Perceptron().eval(), torch.randn(4, 16)
    state = {name: value.detach() * 1.5 for name, value in model.named_parameters()}
    plain = torch.func.functional_call(model, state, (x,))
    rows = torch.vmap(model)(x)
    told = Told(model, "softmax")
    told.next()
    assert digest(torch.func.functional_call(model, state, (x,)).detach()) == digest(plain.detach())
    assert told.proven
    told.next()
    assert digest(torch.vmap(model)(x).detach()) == digest(rows.detach())
    assert not told.proven


def test_the_module_inside_a_wrapper_of_distributed_training_is_followed(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Language()
        wrapped = nn.parallel.DistributedDataParallel(model)
        told = Told(model, "softmax", "gelu")
        for _ in range(2):
            told.next()
            wrapped(torch.randint(0, 32, (2, 10))).sum().backward()
            assert set(told.proven) == {"softmax_1", "softmax_2", "gelu_1", "gelu_2"}
    finally:
        torch.distributed.destroy_process_group()
