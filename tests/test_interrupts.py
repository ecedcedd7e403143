"""A KeyboardInterrupt at any line leaves torch, the model and the generators as they were, and so does a fork.

A trace function counts the lines of replaylens that run, and raises at one of them. The quick tests ask for a sample,
also of what enters and leaves, the zoo suite for more, in a process of its own; `make interrupts` asks for a thousand
of each, which is all but for the longest tasks.
"""

from __future__ import annotations

import dis
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from internals import (
    capture as capture_module,
    interrupts as world,
    model_turns as turns,
    provenance as origins,
    rng_stream,
    scopes,
    snapshot as collecting,
)
from torch import nn

import replaylens as rl

MODULE_CALL = nn.Module.__call__.__code__  # type: ignore[attr-defined]
HOME = str(Path(rl.__file__).parent)
LEAVES = (
    "collect_new set_aside set_back _count _traced_function _open "
    "listening _leave _put_in _take_out marking_older_objects _began _ended eager_compiler deeper_stack during changed _recorded_world leave "
    "begin _run _unseen _running_patch reentered beneath_leaf with_model_under_test _restored_switches _trace_once trace_twice run_with_patches capture_without_effects "
    "without_fused_layers _reporting_failure execute interpret put_back put_generators_back put_own_generators_back __call__ compute_patch "
    "function_apply module_call forward _captured undo run_to_end with_turn exclusive _wait_for_others exclusive_generator "
    "user_generator_state see_functions with_model_to_itself _capture_without_effects _run_with_patches _under_check run check _take_out_if_idle alone release_fully"
).split()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, slope):
        return 2 * slope


class Net(nn.Module):
    """A parameter, a buffer, an attribute, a draw, a custom function, a condition."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.calls, self.seen = nn.Linear(3, 3), 0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        h = F.dropout(Twice.apply(self.fc(x))) + random.random() + float(np.random.rand())
        return F.normalize(h) if h.sum() < 1000 else h


def x():
    return torch.ones(2, 3)


def far(value):
    return value + 10_000


ALIKE = rl.capture(nn.Sequential(*[nn.Tanh() for _ in range(4)]), torch.ones(2))
TASKS: dict[str, Callable[[Net, rl.Program], Any]] = {
    "capture": lambda net, prog: rl.capture(net, x()),
    "replay": lambda net, prog: prog.replay(),
    "replay with gradients": lambda net, prog: prog.replay(grad=True, patch={"fc": rl.Zero()}),
    "fresh": lambda net, prog: prog.replay(rng="fresh", on_divergence="ignore"),
    "sweep": lambda net, prog: prog.replay_many(
        {"a": {"fc": rl.Zero()}, "b": {"fc": rl.Scale(2.0)}}, lambda y: y.sum()
    ),
    "run": lambda net, prog: rl.run(net, x(), patch={"fc": lambda value: value + torch.rand(2, 3)}),
    "live rerun": lambda net, prog: prog.replay(patch={"fc": far}),
    "check": lambda net, prog: rl.check(net, x(), progress=False),
    "check of a program": lambda net, prog: prog.check(progress=False),
    "check of alike calls": lambda net, prog: ALIKE.check(progress=False),
    "grads": lambda net, prog: prog.grads(of=lambda y: y.sum()),
    "edit": lambda net, prog: prog.with_patch({"fc": rl.Zero()}),
    "module": lambda net, prog: prog.slice(to="fc").function()(x()),
}
FORWARDS = ("capture", "fresh")  # these move generators, or leave what a forward leaves


@cache
def comprehensions(code: CodeType) -> frozenset[int]:
    """The instructions of comprehensions that Python, from 3.12 on, writes into the function around them: what a trace
    function raises there passes by every `finally`, which an interrupt does not.
    """
    found, is_within = set(), False
    for one in dis.get_instructions(code):
        is_within = (is_within or one.opname == "LOAD_FAST_AND_CLEAR") and one.opname != "END_FOR"
        found.update({one.offset} if is_within else ())
    return frozenset(found)


class Interrupt:
    """Raises at the n-th line of replaylens that runs, of some functions only if they are named."""

    def __init__(self, at: int, within: tuple[str, ...] = (), opcodes: bool = False) -> None:
        self.at, self.within, self.opcodes, self.count, self.place = at, within, opcodes, 0, ""

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(HOME) or (self.within and code.co_name not in self.within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.opcodes, not self.opcodes
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "opcode") and frame.f_lasti not in comprehensions(frame.f_code):
            self.count += 1
            if self.count == self.at:
                self.place = f"{frame.f_code.co_filename[len(HOME) :]}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._line


def surroundings() -> dict[str, Any]:
    """What must be as it was, whatever ran."""
    free: list[bool] = []

    def ask() -> None:
        free.append(world.generator_lock.acquire(blocking=False))
        if free[0]:
            world.generator_lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return {
        "module entry": (nn.Module.__call__ is scopes._module_call, nn.Module.__call__.__code__ is MODULE_CALL),
        "function entry": "apply" in vars(scopes.SingleLevelFunction),
        "exchange": torch._C._swap_tensor_impl is scopes.swap_of_tensors,
        "inference guard": torch._C._InferenceMode is scopes.inference_guard,
        "way to modes": nn.functional.handle_torch_function is torch.overrides.handle_torch_function,
        "listeners": dict(scopes._listeners),
        "collector": (collecting.is_frozen(), gc.get_threshold(), dict(origins._running)),
        "compiler": (list(capture_module._stance.before), dict(capture_module._stance.users)),
        "locks": (free, scopes._lock._is_owned(), origins._lock._is_owned(), capture_module._settings_lock._is_owned()),
        "functions seen": (torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()),
        "transforms": len(torch._C._functorch.get_interpreter_stack() or ()),
        "turns": (list(turns.turns), dict(turns._waiting)),
        "stack": (
            sys.getrecursionlimit(),
            list(capture_module._stack_limit.before),
            dict(capture_module._stack_limit.users),
        ),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "outside": len(rng_stream.user_states),
        "layers": torch.backends.mha.get_fastpath_enabled(),
    }


def dice() -> tuple[Any, ...]:
    numpys = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]


def belongings(net: Net) -> dict[str, Any]:
    """All that hangs on a model."""
    return {
        "keys": [sorted(vars(module)) for module in net.modules()],
        "calls": (net.calls, list(net.seen), net.training),
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()],
        "count": net.count.item(),
        "flags": [(p.requires_grad, p.grad) for p in net.parameters()],
        "weights": [p.tolist() for p in net.parameters()],
        "buffers": (list(net._buffers), net.count.requires_grad),
    }


def interrupted(task: str, at: int, **how: Any) -> tuple[bool, list[str]]:
    """Was there an n-th line, and what was not as it was before? What a plain forward may change it may change."""
    net = Net()
    net(x())
    prog = rl.capture(net, x())
    before, owned, drawn = surroundings(), belongings(net), dice()
    trap = Interrupt(at, **how)
    try:
        with trap:
            TASKS[task](net, prog)
    except KeyboardInterrupt:
        pass
    after = surroundings()
    left = [f"{what}: {before[what]} -> {after[what]}" for what in before if before[what] != after[what]]
    if task not in FORWARDS:
        now = belongings(net)
        left += [f"{what}: {owned[what]} -> {now[what]}" for what in owned if owned[what] != now[what]]
        left += ["generators"] * (dice() != drawn)
    if not left:
        seeds()
        wanted = Net()(x())
        seeds()
        again = rl.capture(Net(), x())
        if not torch.equal(again.output, wanted) or not torch.equal(again.replay().output, wanted):
            left.append("the next capture")
    return trap.count >= at, [f"{task}, {at}, {trap.place}: {one}" for one in left]


def seeds() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def lines_of(task: str, **how: Any) -> int:
    net = Net()
    prog = rl.capture(net, x())
    with Interrupt(-1, **how) as trap:
        TASKS[task](net, prog)
    return trap.count


@pytest.mark.parametrize("task", TASKS)
def test_an_interrupt_where_something_is_entered_or_left_leaves_nothing(task):
    count = lines_of(task, within=tuple(LEAVES))
    step = max(1, count // 12)
    found = [left for at in range(1, count + 1, step) for left in interrupted(task, at, within=tuple(LEAVES))[1]]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("task", TASKS)
def test_an_interrupt_at_some_line_leaves_nothing(task):
    count = lines_of(task)
    places = sorted(random.Random(0).sample(range(1, count + 1), min(count, 8)))
    found = [left for at in places for left in interrupted(task, at)[1]]
    assert not found, "\n".join(found)


PLACES = int(os.environ.get("REPLAYLENS_INTERRUPTS", 1_000))
HOWS = {"lines": {}, "bytecodes": {"within": tuple(LEAVES), "opcodes": True}}


@pytest.mark.interrupts
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("task", TASKS)
def test_an_interrupt_anywhere_leaves_nothing(task, how):
    count = lines_of(task, **HOWS[how])
    places = sorted(random.Random(1).sample(range(1, count + 1), min(count, PLACES)))
    found = [left for at in places for left in interrupted(task, at, **HOWS[how])[1]]
    assert not found, "\n".join(found[:40])


@pytest.mark.zoo
def test_an_interrupt_at_some_of_these_places_leaves_nothing_in_a_process_of_its_own():
    """What is left after all spoils no other test there."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "interrupts", __file__]
    path = os.pathsep.join((str(Path(HOME).parent), *filter(None, [os.environ.get("PYTHONPATH")])))
    env = {**os.environ, "PYTHONPATH": path, "REPLAYLENS_INTERRUPTS": "25"}
    ran = subprocess.run(words, env=env, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert ran.returncode == 0, ran.stdout[-3_000:] + ran.stderr[-1_000:]


# ---- forks -------------------------------------------------------------------------------------------------------------


def in_a_child(ask: Callable[[], bool]) -> bool:
    """What a forked child finds, which has ten seconds for it."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(10)
            os._exit(0 if ask() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def works() -> bool:
    seeds()
    wanted = Net()(x())
    seeds()
    ran = rl.run(Net(), x())
    clean = nn.Module.__call__.__code__ is MODULE_CALL and not scopes._listeners and not rng_stream.user_states
    return clean and torch.equal(ran.output, wanted) and not collecting.is_frozen()


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
forks_among_threads = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@contextmanager
def meanwhile(work: Callable[[threading.Event, threading.Event], None]) -> Iterator[None]:
    """Another thread is in the middle of some work."""
    begun, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(begun, over))
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@forks
@forks_among_threads
def test_a_child_that_is_forked_while_another_thread_captures_has_clean_entries():
    def work(begun: threading.Event, over: threading.Event) -> None:
        def model(x):
            begun.set()
            over.wait()
            return x + 1

        rl.capture(model, x())

    with meanwhile(work):
        assert in_a_child(works)
    assert works()


@forks
@forks_among_threads
@pytest.mark.parametrize("lock", [world.generator_lock, scopes._lock, origins._lock, capture_module._settings_lock])
def test_a_child_that_is_forked_while_another_thread_holds_a_lock_does_not_wait_for_it(lock):
    def work(begun: threading.Event, over: threading.Event) -> None:
        with lock:
            begun.set()
            over.wait()

    with meanwhile(work):
        assert in_a_child(works)
    assert works()


@forks
@forks_among_threads
def test_a_child_that_is_forked_in_the_middle_of_a_replay_has_the_users_generator():
    prog = rl.capture(lambda x: F.dropout(x).relu() + torch.rand(3), x())
    torch.manual_seed(5)
    state = torch.get_rng_state()

    def work(begun: threading.Event, over: threading.Event) -> None:
        def wait(value):
            begun.set()
            over.wait()
            return value

        prog.replay(patch={"relu_1": wait, "dropout_1": lambda value: value})

    with meanwhile(work):
        assert in_a_child(lambda: torch.equal(torch.get_rng_state(), state) and works())
    assert torch.equal(torch.get_rng_state(), state)


@forks
@forks_among_threads
def test_a_child_that_is_forked_in_the_middle_of_a_live_run_has_the_model_as_it_was():
    net, found = Net(), []
    prog = rl.capture(net, x())
    net(x())
    seeds()
    owned, drawn = belongings(net), dice()

    def is_whole() -> bool:
        return belongings(net) == owned and dice() == drawn and works() and rl.run(net, x()).output.shape == (2, 3)

    def midway(start: threading.Event, over: threading.Event) -> None:
        calls = []

        def wait(value):
            calls.append(1)
            if len(calls) == 2:  # the replay has left its path, and the model runs
                start.set()
                over.wait()
            return far(value)

        found.append(prog.replay(patch={"fc": wait}).diverged)

    with meanwhile(midway):
        assert in_a_child(is_whole)
    assert found == [True]
    assert belongings(net) == owned and dice() == drawn


@forks
@forks_among_threads
def test_a_child_that_is_forked_while_others_wait_for_their_turn_does_not_wait():
    net = Net()
    prog = rl.capture(net, x())

    def midway(start: threading.Event, over: threading.Event) -> None:
        def wait(value):
            start.set()
            over.wait()
            return value

        rl.run(net, x(), patch={"fc": wait})

    with meanwhile(midway):
        other = threading.Thread(target=lambda: prog.replay(patch={"fc": far}))
        other.start()
        while sys._current_frames()[other.ident].f_code.co_name != "exclusive_generator":
            pass
        assert in_a_child(lambda: works() and prog.replay(patch={"fc": far}).diverged)
    other.join()


@forks
def test_a_forward_may_fork():
    def model(x):
        assert in_a_child(lambda: torch.equal(Net().fc(x), Net().fc(x)))
        return x + 1

    assert torch.equal(rl.capture(model, x()).replay().output, x() + 1)
    assert works()


@forks
@forks_among_threads
def test_a_child_that_is_forked_while_another_thread_works_out_a_graph_has_graphs_of_its_own():
    def slow(x):
        for _ in range(300):
            x = x + 1
        return x

    def again(begun: threading.Event, over: threading.Event) -> None:
        while not over.is_set():
            rl.capture(slow, torch.ones(2)).replay()
            begun.set()

    with meanwhile(again):
        for _ in range(5):
            assert in_a_child(lambda: len(rl.capture(torch.relu, torch.ones(2)).graph.nodes) == 2)
