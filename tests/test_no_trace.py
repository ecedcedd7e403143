"""A capture leaves the world as a plain forward leaves it: when it succeeds, when the model raises, when it is refused."""

import gc
import itertools
import random
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
import torch._dynamo  # a dispatch mode loads it at its first call, with or without a capture
from internals import provenance as origins, snapshot as collecting, top_saving_hooks
from oracle import assert_same, belongings, generators, reseed, surroundings
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import replaylens as rl


def x(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


class Fails(Exception):
    pass


class Net(nn.Module):
    """Parameters, statistics, draws, a hook, a custom function, a transform; `end` says how its forward ends."""

    def __init__(self, end="well"):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm, self.end = nn.Linear(4, 4), nn.BatchNorm1d(4), end
        self.fc.register_forward_hook(lambda module, args, output: output + 1)
        self.fc.weight.grad = torch.ones(4, 4)

    def forward(self, x):
        y = F.dropout(self.norm(Twice.apply(self.fc(x))))
        y = y + torch.func.vmap(torch.sin)(x)
        return ENDS[self.end](y)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, slope):
        return 2 * slope


def raises(y):
    raise Fails


def raises_in_a_transform(y):
    return torch.func.vmap(raises)(y)


def raises_under_a_mode(y):
    with torch.no_grad(), torch.autocast("cpu"), torch.device("cpu"):
        raises(y)


def raises_in_a_custom_function(y):
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raises(x)

    return Breaks.apply(y)


def raises_in_a_gradient(y):
    y.register_hook(raises)
    return torch.autograd.grad(y.sum(), y)


def is_interrupted(y):
    raise KeyboardInterrupt


def is_refused(y):
    return (row for row in y)


def is_refused_in_the_middle(y):
    box = []
    thread = threading.Thread(target=lambda: box.append(y.exp()))
    thread.start()
    thread.join()
    return box[0] + 1


ENDS = {
    "well": torch.sigmoid,
    "raises": raises,
    "raises_in_a_transform": raises_in_a_transform,
    "raises_under_a_mode": raises_under_a_mode,
    "raises_in_a_custom_function": raises_in_a_custom_function,
    "raises_in_a_gradient": raises_in_a_gradient,
    "is_interrupted": is_interrupted,
    "is_refused": is_refused,
    "is_refused_in_the_middle": is_refused_in_the_middle,
}
REFUSED = ("is_refused", "is_refused_in_the_middle")


def torchs_functions():
    """What every function and class of torch's user modules is, by identity."""
    modules = torch, torch.nn, F, torch.func, torch.autograd, torch._C._nn
    classes = torch.Tensor, nn.Module, torch.autograd.Function
    return {(place.__name__, name): id(value) for place in modules + classes for name, value in vars(place).items()}


def world():
    """All that a capture could leave behind, apart from model and generators."""
    return surroundings() | {
        "functions": torchs_functions(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "profile": (sys.getprofile(), sys.gettrace()),
        "threads": threading.active_count(),
        "warnings": len(warnings.filters),
    }


def attempt(run, end):
    """Run something that ends as it ends; give how."""
    try:
        return run()
    except (Fails, KeyboardInterrupt, rl.CaptureError) as error:
        assert end != "well"
        return type(error).__name__


@pytest.mark.parametrize("end", ENDS)
def test_a_capture_leaves_everything_as_a_plain_forward_leaves_it(end):
    rl.capture(Net(), x())  # what is imported on the way is imported
    plain, model = Net(end), Net(end)
    reseed()
    attempt(lambda: plain(x()), end)
    state, before = generators(), world()
    reseed()
    how = attempt(lambda: rl.capture(model, x()), end)
    assert_same(world(), before, "world")
    assert_same(belongings(model), belongings(plain), "model")
    assert_same(generators(), state, "generators")
    assert (how in ("CaptureError", "UnknownOrigin")) == (end in REFUSED)


@pytest.mark.parametrize("end", ENDS)
def test_after_any_capture_the_next_one_is_right(end):
    attempt(lambda: rl.capture(Net(end), x()), end)
    reseed()
    prog = rl.capture(Net(), x(1))
    reseed()
    assert_same(prog.output, Net()(x(1)))
    assert_same(prog.replay().output, prog.output.detach())


def test_a_capture_that_is_refused_leaves_the_inputs_as_a_plain_forward_does():
    def model(x):
        x.add_(1)
        return is_refused_in_the_middle(x)

    given = x()
    with pytest.raises(rl.UnknownOrigin):
        rl.capture(model, given)
    assert_same(given, x() + 1)


def test_nothing_but_the_program_holds_on_to_the_model():
    model = nn.Linear(4, 4)
    prog, held = rl.capture(model, x()), weakref.ref(model)
    prog.replay()
    del model, prog
    gc.collect()
    assert held() is None


class Scripted(nn.Module):
    """It calls a ScriptFunction, which a function mode does not see: a capture looks a second time, at ATen calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.cache, self.generator = 0, [], torch.Generator().manual_seed(0)

    def forward(self, x):
        self.calls += 1
        self.cache.append(x.sum())
        x.add_(1)
        y = doubled(x) + torch.randn(4, generator=self.generator)
        return y * random.random(), len(self.cache)


@torch.jit.script
def doubled(x: torch.Tensor):
    return x * 2


def test_a_model_that_needs_a_second_look_is_left_as_if_it_had_run_once():
    plain, model, ours, theirs = Scripted(), Scripted(), x(), x()
    reseed()
    wanted, state = plain(theirs), generators()
    reseed()
    prog = rl.capture(model, ours)
    assert_same(ours, theirs, "input")
    assert_same(prog.output, wanted)
    assert_same(generators(), state, "generators")
    assert_same(belongings(model), belongings(plain), "model")


# ---- the user's own surroundings -----------------------------------------------------------------------------------


class Counts(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += resolve_name(func) == "torch.Tensor.sin"
        return func(*args, **(kwargs or {}))


class Doubles(TorchFunctionMode):
    """A mode that changes what the model computes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.sin else result


def test_a_function_mode_of_the_users_sees_what_it_sees_without_a_capture():
    with Counts() as mode:
        prog = rl.capture(lambda x: x.sin().sin(), x())
        assert mode.seen == 2
        prog.replay()
    assert_same(prog.output, x().sin().sin())


def test_a_function_mode_of_the_users_that_changes_values_changes_the_program_or_is_refused():
    with suppress(rl.CaptureError), Doubles():
        prog = rl.capture(lambda x: x.sin() + 1, x())
        assert_same(prog.output, 2 * x().sin() + 1)
        assert_same(prog(x(1)).output, 2 * x(1).sin() + 1)


def test_a_dispatch_mode_of_the_users_is_no_obstacle():
    class Watches(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Watches() as mode:
        prog = rl.capture(lambda x: x.sin().cos(), x())
        assert mode.calls >= 2
    assert_same(prog(x(1)).output, x(1).sin().cos())


AMBIENTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("cpu"),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "saved_tensors": lambda: torch.autograd.graph.save_on_cpu(),
}


@pytest.mark.parametrize("ambient", AMBIENTS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_capture_works_under_any_mode_of_the_users(ambient):
    plain, model = Net(), Net()
    with AMBIENTS[ambient]():
        reseed()
        wanted, state, before = plain(x()), generators(), world()
        reseed()
        prog = rl.capture(model, x())
        assert_same(world(), before)
        assert_same(generators(), state)
    assert_same(prog.output, wanted)
    assert_same(prog.replay().output, wanted.detach())


def test_a_model_that_was_born_in_inference_mode_is_captured_and_replayed():
    with torch.inference_mode():
        model = nn.Linear(4, 4)
        prog = rl.capture(model, x())
    assert_same(prog.replay().output, prog.output)


def test_a_default_device_holds_in_a_capture_and_after_it():
    torch.set_default_device("meta")
    try:
        prog = rl.capture(lambda: torch.ones(2).sin())
        assert prog.output.is_meta and torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)
    assert not torch.ones(1).is_meta
    assert prog.replay().output.is_meta


# ---- several captures at once ---------------------------------------------------------------------------------------


def test_captures_in_several_threads_do_not_meet():
    start = threading.Barrier(4)
    before = world()

    def work(number):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(number + 1)], nn.Dropout(), nn.ReLU())
        wanted = ["input_1_0", *(f"linear_{n}_{n}" for n in range(1, number + 2))]
        for _ in range(20):
            start.wait()
            prog = rl.capture(model.eval(), x(number))
            assert prog.layer_labels[: len(wanted)] == wanted and len(prog) == len(wanted) + 3
            assert_same(prog.output, model(x(number)))
            assert_same(prog.replay().output, prog.output.detach())
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]
        before["threads"] = threading.active_count()
        assert_same(world(), before)


@pytest.fixture
def often_switching():
    """Threads take turns a thousand times as often as usual."""
    outer = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(outer)


def test_draws_in_several_threads_do_not_meet(often_switching):
    model = nn.Sequential(nn.Dropout(), nn.Dropout(), nn.Dropout())

    def work(_):
        prog = rl.capture(model, torch.ones(50))
        return all(torch.equal(prog.replay().output, prog.output) for _ in range(3))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(60)))


def test_a_plain_forward_in_another_thread_is_not_recorded():
    stop, failures = threading.Event(), []

    def run_plainly():
        model = Net()
        while not stop.is_set():
            try:
                model(x())
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=run_plainly)
    thread.start()
    try:
        for _ in range(20):
            prog = rl.capture(lambda x: Twice.apply(x.sin()), x())
            assert prog.layer_labels == ["input_1_0", "sin_1_1", "twice_1_2", "output_1_3"]
    finally:
        stop.set()
        thread.join()
    assert failures == []


def test_a_capture_inside_a_capture_is_seen_by_both():
    inner = []

    def model(x):
        y = x.sin()
        inner.append(rl.capture(torch.cos, y))
        return inner[-1].output.exp()

    before = world()
    prog = rl.capture(model, x())
    assert_same(world(), before)
    assert inner[0].layer_labels == ["input_1_0", "cos_1_1", "output_1_2"]
    assert prog.layer_labels == ["input_1_0", "sin_1_1", "cos_1_2", "exp_1_3", "output_1_4"]
    assert_same(prog(x(1)).output, x(1).sin().cos().exp())
    assert_same(inner[0].replay().output, x().sin().cos())


def test_a_replay_inside_a_capture_is_part_of_the_model():
    helper = rl.capture(torch.cos, x())
    prog = rl.capture(lambda x: helper(x.sin()).output + 1, x())
    assert_same(prog(x(1)).output, x(1).sin().cos() + 1)


def test_a_capture_that_fails_inside_a_capture_leaves_the_outer_one_intact():
    def model(x):
        try:
            rl.capture(raises, x)
        except Fails:
            return x.cos()

    prog = rl.capture(model, x())
    assert prog.layer_labels == ["input_1_0", "cos_1_1", "output_1_2"]
    assert_same(prog(x(1)).output, x(1).cos())


TABLE = torch.arange(4.0)


def reads_a_table(x):
    return x + TABLE


def test_a_tensor_older_than_the_capture_is_a_constant_also_after_a_capture_inside():
    def model(x):
        rl.capture(torch.sin, x)
        return reads_a_table(x)

    assert_same(rl.capture(model, x())(x(1)).output, reads_a_table(x(1)))


def test_a_tensor_older_than_the_capture_is_a_constant_also_while_other_threads_capture(often_switching):
    def work(seed):
        return torch.equal(rl.capture(reads_a_table, x())(x(seed)).output, reads_a_table(x(seed)))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(150)))


def test_tuples_that_another_thread_is_building_are_let_alone(often_switching):
    is_over = threading.Event()

    def build():
        built = 0
        while not is_over.is_set():
            built += len(tuple(number for number in range(12)))  # grows once: a tuple that is held fails there
        return built

    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build)
        try:
            for _ in range(30):
                assert any(tensor is TABLE for tensor in origins._listed_tensors())
                assert not origins.is_older(TABLE, origins.StartMark([]))
        finally:
            is_over.set()
        assert built.result()


def test_what_python_itself_sets_aside_keeps_no_capture_from_it():
    gc.collect()
    with origins.marking_older_objects() as date:
        assert not date.tensors
        assert collecting.is_frozen()
    assert not collecting.is_frozen()


def test_a_tensor_older_than_the_capture_is_a_constant_also_where_the_user_froze_the_collector():
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        assert_same(rl.capture(reads_a_table, x())(x(1)).output, reads_a_table(x(1)))
        assert frozen / 2 < gc.get_freeze_count() <= frozen  # those that went meanwhile are not among them
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("where", ["in the forward", "around it", "in every tenth forward"])
def test_cycles_of_the_users_go_while_captures_follow_each_other(where):
    class Cycle:
        def __init__(self):
            self.itself = self

    alive, count = weakref.WeakSet(), itertools.count()

    def make():
        if where != "in every tenth forward" or not next(count) % 10:
            alive.add(Cycle())

    def model(x):
        if where != "around it":
            make()
        return x.sin()

    most = 0
    for _ in range(600):
        if where == "around it":
            make()
        rl.capture(model, x())
        most = max(most, len(alive))
    assert most < (60 if where == "in every tenth forward" else 30)


def test_what_is_kept_of_many_captures_is_looked_at_by_the_collector_when_there_is_much_more_of_it(monkeypatch):
    monkeypatch.setattr(collecting, "_COUNT_AFTER", 1_000)
    monkeypatch.setattr(collecting, "_skips", 10**9)  # what is new is never looked at
    cycles = weakref.WeakSet()

    class Cycle:
        def __init__(self):
            self.itself, self.items = self, [[] for _ in range(3_000)]

    def model(x):
        cycles.add(Cycle())
        return x.sin()

    counts = []
    for _ in range(300):
        rl.capture(model, x())
        counts.append(len(cycles))
    assert any(after < before for before, after in itertools.pairwise(counts))


def test_a_capture_leaves_the_collector_as_the_user_has_it():
    thresholds = gc.get_threshold()
    for enabled, threshold in ((True, thresholds), (False, thresholds), (True, (0, 5, 5)), (True, (50_000, 20, 20))):
        try:
            gc.set_threshold(*threshold)
            if not enabled:
                gc.disable()
            rl.capture(reads_a_table, x())
            assert (gc.get_threshold(), gc.isenabled(), collecting.is_frozen()) == (threshold, enabled, False)
        finally:
            gc.set_threshold(*thresholds)
            gc.enable()


@pytest.mark.parametrize("state", ["enable", "disable"])
def test_the_import_leaves_the_collector_as_it_was(state):
    code = f"import gc, torch; gc.{state}(); import replaylens; raise SystemExit(gc.isenabled() != ('{state}' == 'enable'))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_import_does_not_have_the_collector_traverse_what_it_makes():
    code = "import gc, torch; found = []; gc.collect(); gc.callbacks.append(lambda *event: found.append(event)); "
    code += "import replaylens; made = [[] for _ in range(50)]; gc.callbacks.clear(); raise SystemExit(len(found))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_capture_under_a_transform_of_the_users_is_right_or_refused():
    def slope(x):
        return rl.capture(torch.sin, x).output.sum()

    before = world()
    with suppress(rl.CaptureError):
        assert_same(torch.func.grad(slope)(x()), x().cos())
    assert_same(world(), before)


def test_a_live_run_puts_back_arrays_and_generators_that_the_model_holds():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.array, self.numpys, self.pythons = np.zeros(1), np.random.default_rng(0), random.Random(0)

        def forward(self, x):
            self.array += 1
            return torch.relu(x) * float(self.array[0]) + self.numpys.random() + self.pythons.random()

    model, plain = Counting(), Counting()
    run = rl.run(model, torch.ones(2), patch={"relu_1": lambda value: value * 1.0})
    assert torch.equal(run.output, plain(torch.ones(2)))
    assert model.array[0] == 0 and model.numpys.random() == np.random.default_rng(0).random()
    assert model.pythons.random() == random.Random(0).random()


class Counted(TorchFunctionMode):
    """Counts the calls of torch's that come to it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_functions_of_torch_come_to_a_mode_within_the_forward_as_they_do_without_a_capture():
    seen = []

    def model(x):
        with Counted() as mode:
            y = F.softmax(F.relu(torch.norm(x, dim=0)), dim=0)
        seen.append(mode.names)
        with torch.device("meta"):
            shape = F.one_hot(torch.zeros(2, dtype=torch.int64), 3).shape
        return F.relu(y) * shape[1]

    expected = model(x())
    prog = rl.capture(model, x())
    assert seen[0] == seen[1] and "softmax" in seen[0]
    assert_same(prog.output, expected)
    assert_same(prog.replay().output, expected)


def test_functions_of_torch_in_another_thread_pass_by_a_capture():
    apart = {}

    def model(x):
        thread = threading.Thread(target=lambda: apart.update(value=F.relu(torch.ones(2) - 3), modes=modes()))
        thread.start()
        thread.join()
        return F.relu(x)

    modes = torch._C._len_torch_function_stack
    prog = rl.capture(model, x())
    assert apart["modes"] == 1 and apart["value"].tolist() == [0.0, 0.0]  # the one that notes what is read there
    assert [call.kind for call in prog.graph.calls] == ["relu"]


class FailsInCheckpoints(nn.Module):
    """Raises within so many checkpoints, one in the other."""

    def __init__(self, depth):
        super().__init__()
        self.fc, self.depth = nn.Linear(4, 4), depth

    def block(self, x, depth):
        if depth:
            return checkpoint(self.block, self.fc(x), depth - 1, use_reentrant=False)
        raise KeyError(depth)

    def forward(self, x):
        return self.block(x, self.depth)


def captured_among_hooks_of_ones_own(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        kept = top_saving_hooks(True)
        try:
            rl.capture(model, x)
        finally:
            assert top_saving_hooks(True) == kept


def run_with_gradients(model, x):
    rl.run(model, x, patch={"fc": rl.Scale(2.0)}, grad=True)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("ask", [rl.capture, run_with_gradients, captured_among_hooks_of_ones_own])
def test_a_model_that_raises_in_checkpoints_leaves_no_hooks_of_theirs_while_its_exception_is_held(depth, ask):
    model, x = FailsInCheckpoints(depth), torch.randn(2, 4, requires_grad=True)
    with pytest.raises(KeyError) as held:
        ask(model, x)
    assert held.traceback
    assert top_saving_hooks(True) is None
    assert torch.func.grad(lambda y: y.sin().sum())(torch.ones(2)).shape == (2,)


@pytest.mark.parametrize("lives", [False, True])
def test_a_parameter_can_be_exchanged_by_torch_after_a_capture(lives):
    """Torch refuses to where a weak reference to it stands anywhere."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    prog = rl.capture(model, torch.randn(2, 3))
    prog.replay()
    if not lives:
        del prog
        gc.collect()
    for tensor in list(model.parameters()):
        assert not weakref.getweakrefcount(tensor)
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(3, 3)))
    assert torch.equal(model[0].weight, torch.ones(3, 3))
    if lives:  # what backward needs holds the others, as after any forward
        with pytest.raises(rl.StaleValue):
            prog.replay()
        return
    with swapping():
        model.double()
    x = torch.randn(2, 3).double()
    assert torch.equal(rl.capture(model, x).replay().output.detach(), model(x))


@contextmanager
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_what_is_known_of_a_tensor_that_is_gone_is_said_of_none_in_its_place():
    """Its number is taken by another one soon, and its memory as well."""
    for number in range(50):
        model = nn.Linear(4, 4)
        prog = rl.capture(model, torch.ones(2, 4))
        assert torch.equal(prog.replay().output.detach(), model(torch.ones(2, 4)))
        with torch.no_grad():
            model.weight.data.fill_(number)
        with pytest.raises(rl.StaleValue):
            prog.replay()
        del model, prog


def kept_call(self, *args, **kwargs):
    return self._call_impl(*args, **kwargs)


def closed_call(count):
    def call(self, *args, **kwargs):
        count.append(self)
        return self._call_impl(*args, **kwargs)

    return call


@pytest.mark.parametrize("other", [None, kept_call, closed_call([])], ids=["torch's own", "a function", "a closure"])
def test_the_entry_of_modules_is_what_it_was(other, monkeypatch):
    """Another library may have put a function of its own there."""
    if other is not None:
        monkeypatch.setattr(nn.Module, "__call__", other)
    entry, code, during = nn.Module.__call__, nn.Module.__call__.__code__, []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(lambda *_: during.append(nn.Module.__call__))
    wanted = model(x())
    prog = rl.capture(model, x())
    assert prog.module_num_passes == {"0": 1, "1": 1}
    assert_same(prog.output, wanted)
    assert (nn.Module.__call__, nn.Module.__call__.__code__) == (entry, code)
    if not entry.__closure__:
        assert during == [entry] * 2  # the class is never given another attribute
