"""A running watch: what happens at each step, and in which order.

In: a model, Targets and what its user wished. Out: samples in the ring, and steps in the keeper's hands. Everything
here is called by hooks in the middle of somebody's training: an error ends in `faults`, and the probe that gave it is
left alone from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakSet, ref

import torch
from attrs import define, field, frozen
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._ir.interrupts import after_fork
from .._ir.torch_private import (
    count_dispatch_modes,
    without_any_modes,
    without_function_modes,
)
from ..errors import UnsupportedModel
from .child.wire import Sample
from .child_process import Child
from .clock import Closure, OptimizerClock, parameters_of, scaler_above
from .followed_forward import FollowedForward
from .hooks import CompiledCall, Tap, is_checkpointed, is_no_forward, say
from .keeper import Keeper
from .ring import Ring
from .taps import Sampler
from .targets import FORWARD_KINDS, SCRIPTED, ModuleTarget, Schedule, Targets, has_fast_path, is_compiled_itself

UNSEEN_STEPS = 2  # sampled steps without a forward of a watched module, until it is said


@frozen(eq=False)
class Wishes:
    """What the user of a watch asked for, checked."""

    schedule: Schedule
    kinds: tuple[str, ...]
    clock: str
    micro: str
    when: Any
    alarms: int
    keep_every: int | None
    folder: Path
    name: str
    start: int  # the number of the first step
    scaler: Any
    raw: int
    slots: int | None
    process: bool
    rng: str
    patience: float | None  # seconds for the sinks to end in; None: as they need
    samples: bool  # False: only alarms

    @property
    def keeps_steps(self) -> bool:
        """True if steps are judged, or written from time to time."""
        return self.when is not None or self.keep_every is not None


@define(eq=False)
class Session:
    """What the hooks of one watch call."""

    model: ref[nn.Module]  # whose modules have the addresses
    root: ref[nn.Module]  # that the loop calls: the model, or the compiler's wrapper around it
    wishes: Wishes
    targets: Targets
    unseen: dict[str, str] = field(factory=dict)  # what is not watched, and why
    faults: dict[str, str] = field(factory=dict)  # what went wrong in the training's process, by name
    ring: Ring | None = None
    children: list[Child] = field(factory=list)
    keeper: Keeper | None = None
    follower: FollowedForward | None = None
    clock: OptimizerClock | None = None
    scaler: Any = None
    note: str = ""
    seconds: float = 0.0
    sampled: int = 0
    is_over: bool = False  # stopped, or in a forked process
    is_forked: bool = False  # then children and ring are those of another process
    is_closed: bool = False
    is_paused: bool = False
    last: dict[tuple[str, str], Sample] = field(factory=dict)  # after the end, the newest of each name and kind
    sampler: Sampler = field(init=False)
    judged: Sampler | None = None  # of the activations that `when=` asks for
    _step: int = 0  # where no optimizer counts
    _root_calls: int = 0
    _calls_kept: int = 0  # of which the keeper was told
    _steps_without_calls: int = 0
    _followed_before: int = 0  # forwards, when the step began
    _unfollowed: int = 0  # sampled steps in which the model itself was not called
    _ran: set[str] = field(factory=set)  # in this step, where forwards are the clock
    _just_armed: bool = False
    _has_stepped: bool = False  # an optimizer
    _put_at: int = -1  # the last step of which anything was sent
    _waiting: int = 0  # samples since the children were woken
    _handles: list[Any] = field(factory=list)
    _inner_handles: list[Any] = field(factory=list)
    _handles_of_all: list[Any] = field(factory=list)  # on all optimizers

    # -- life ----------------------------------------------------------------------------------------------------------

    def __attrs_post_init__(self) -> None:
        wishes, self._step = self.wishes, self.wishes.start
        training = wishes.clock == "optimizer"
        self.scaler = wishes.scaler
        self.sampler = Sampler(
            self.put,
            self.safely,
            wishes.kinds,
            self.targets,
            wishes.micro,
            training,
            scale=self.loss_scale,
            is_unsure=self._may_be_scaled,
            is_doubtful=self._is_probably_scaled,
            has_backed_off=self._has_backed_off,
            find=self._find,
            root=self.root,
            follow_next=self._follow_next,
        )

    def start(self) -> None:
        """Put on what stays on, and begin the first step."""
        model, root = self.model(), self.root()
        assert model is not None and root is not None
        if self.wishes.clock == "optimizer":
            self.clock = OptimizerClock.of(
                model, self._before_optimizer, self._after_optimizer, self._step, self._single_tensors
            )
            self.clock.late = lambda: self.begin(self.step)
            self.clock.failed = self._clock_failed
        elif "grad" in self.wishes.kinds and self.scaler is None:
            self._handles_of_all.append(register_optimizer_step_pre_hook(self._meet))
        if self.wishes.clock == "forward" or self.keeper is not None:
            self.hook_roots()
        if self.wishes.clock == "forward":
            self._step -= 1
            self._arm_follower(self._step + 1)
        else:
            self.begin(self.step)
        _running.add(self)

    def hook_roots(self) -> None:
        """See each call of the model; of a list of models, those of each."""
        root = self.root()
        if self._handles or root is None:
            return
        is_called = not isinstance(root, (nn.ModuleList, nn.ModuleDict))
        for name, module in [("", root)] if is_called else root.named_children():
            self._handles += self._hooks_on(module, name)

    def keep_steps(self, keeper: Keeper) -> None:
        """Have steps judged and kept from now on; with the activations that a judge wants, on sampled steps."""
        self.keeper = keeper
        model = self.model()
        if model is None:
            return
        wanted = [
            ModuleTarget(address, ref(module), has_fast_path=has_fast_path(model, address))
            for address, module in model.named_modules()
            if keeper.looks_at(address, module) and not is_compiled_itself(module)
        ]
        if wanted:
            put, training = partial(self._judge_activation, keeper), self.wishes.clock == "optimizer"
            self.judged = Sampler(put, self.safely, ("activation",), Targets(tuple(wanted)), "first", training)

    def _judge_activation(self, keeper: Keeper, tensor: torch.Tensor, name: str, kind: str) -> None:
        keeper.activation(name, tensor)

    def disarm(self) -> None:
        """Nothing is sampled until the next step begins."""
        self.sampler.disarm()
        if self.judged is not None:
            self.judged.disarm()

    def pause(self) -> None:
        """Nothing is sampled, until `resume`."""
        self.is_paused = True
        self.disarm()

    def resume(self) -> None:
        """Samples again: of the step that runs, if nothing of it was sampled yet."""
        self.is_paused = False
        if self.wishes.clock != "forward" and self._put_at != self.step:
            self.begin(self.step)

    def log(self, name: str, number: torch.Tensor) -> None:
        """Send a number of the user's."""
        if self.ring is not None and not self.is_over:
            self.ring.put(number, name, "scalar", self.step, note=self.note)
            self._sent()

    def _find(self, target: ModuleTarget) -> nn.Module | None:
        """The module that is watched, where it stands now."""
        found = target.find(self.model())
        if found is None:
            self.unseen[target.name] = "there is no such module any more."
        return found

    def _follow_next(self) -> None:
        """The forward that was followed raised, or others are wanted as well."""
        if self.wishes.clock != "forward":
            self._arm_follower(self.sampler.number, is_another=True)

    def change(self, targets: Targets) -> None:
        """Watch these, from the next sampled step on."""
        self.sampler.disarm()
        self.targets = self.sampler.targets = targets

    def stop(self) -> None:
        """Take everything off."""
        self.sampler.send_early()
        self.unseen |= self.why_it_stands(is_ending=True)
        self.is_over = True
        self.disarm()
        if self.follower is not None:
            self.follower.close()
        if self.clock is not None:
            self.clock.close()
        for handle in (*self._handles, *self._inner_handles, *self._handles_of_all):
            handle.remove()
        self._handles.clear()
        self._inner_handles.clear()
        _running.discard(self)

    def die(self) -> None:
        """In a forked process: the hooks stay, and do nothing."""
        self.is_over = self.is_forked = True
        self.disarm()
        if self.follower is not None:
            self.follower.disarm()

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the step that runs now: how many have ended."""
        return self.clock.step if self.clock is not None else max(self._step, 0)

    def begin(self, step: int, follows: bool = True) -> None:
        """A step begins: hooks on, if it is sampled. `follows=False`: its first forward has begun already."""
        if self.sampler.is_armed or self.judged is not None or self.follower is not None:
            self._end_sampled()
        schedule = self.wishes.schedule
        if self.is_over or self.is_paused or (self.ring is None and self.judged is None):
            return
        if type(schedule.every) is int and step % schedule.every:
            return  # nearly always
        if not self.safely("every", schedule.is_due, step) or any(child.wants_pause for child in self.children):
            return
        if self.judged is not None:
            self.safely("when", self.judged.arm, step)
        if self.ring is None:
            return
        self.sampler.takes = partial(schedule.takes, step=step)
        self.safely("hooks", self.sampler.arm, step)
        if self.wishes.clock != "forward" and follows:
            self._arm_follower(step)

    def _end_sampled(self) -> None:
        was_armed, forwards = self.sampler.is_armed, self.sampler.forwards
        for name, calls in self.sampler.too_few().items():
            self.unseen[name] = f"step {self.sampler.number} had {calls} call{'s' if calls > 1 else ''} of this module."
        self.disarm()
        if self._waiting:
            self._wake()
        self.tell_news()
        if self.follower is not None and self.wishes.clock != "forward":
            self._disarm_follower(self.follower, was_armed)
        self.sampled += was_armed
        if was_armed and not forwards and self.sampled == UNSEEN_STEPS and self._expects_forwards():
            self.unseen["modules"] = (
                f"in {self.sampled} sampled steps no forward of a watched module was seen: the model was compiled "
                "after the watch began, what runs is another copy of it, or it runs inside a transform of torch.func."
            )

    def _disarm_follower(self, follower: FollowedForward, was_sampled: bool) -> None:
        self._unfollowed += was_sampled and follower.is_armed and follower.sampled == self._followed_before
        follower.disarm()
        if self._unfollowed == UNSEEN_STEPS:
            self.not_followed(
                f"in {UNSEEN_STEPS} sampled steps the model itself was not called. Where a training calls only parts "
                "of it, watch those; what is compiled cannot be followed."
            )

    def _expects_forwards(self) -> bool:
        wanted = any(target.has_values for target in self.targets.modules)
        return wanted and not FORWARD_KINDS.isdisjoint(self.wishes.kinds)

    def _arm_follower(self, step: int, is_another: bool = False) -> None:
        if self.follower is not None and self.safely("every", self.wishes.schedule.is_due, step):
            if not is_another:
                self._followed_before = self.follower.sampled
            if not self.follower.is_armed:
                self.safely("operations", self.follower.arm)

    def next_step(self) -> None:
        """The user's own clock ticks."""
        self._step += 1
        self.begin(self._step)

    def _before_optimizer(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        if self.is_over:
            return None
        if self.scaler is None and (not self._has_stepped or self.sampler.is_armed or self.keeper is not None):
            self.scaler = scaler_above(sys._getframe())
        if not self._has_stepped:
            self._has_stepped = True
            self.sampler.send_early()
        if (root := self.root()) is not None:
            self.sampler.trains_while = root.training
        if self.keeper is not None and closure is None:
            self._judge(optimizer)
        if self.sampler.is_armed and self.ring is not None:
            self.sampler.before_step(optimizer, self.ring.thin, closure is not None)
        return None if self.keeper is None or closure is None else self._judged(closure, optimizer)

    def _judge(self, optimizer: Optimizer) -> None:
        if self.keeper is not None and not self.is_over:
            self.safely("when", self.keeper.judge, self.step, optimizer, self.scaler)

    def _judged(self, closure: Closure, optimizer: Optimizer) -> Closure:
        """The closure, after whose first run the step is judged: later ones may have other weights."""
        runs = count()

        @wraps(closure)
        def judged(*args: Any, **kwargs: Any) -> Any:
            given = closure(*args, **kwargs)
            if next(runs) == 0:
                self._judge(optimizer)
            return given

        return judged

    def _after_optimizer(self, optimizer: Optimizer, is_closure: bool) -> None:
        if self.is_over:
            return
        if self.sampler.is_armed:
            self.sampler.after_step(optimizer, self._put_update, is_closure)
        if self.keeper is not None and not self._calls_kept:
            self._look_elsewhere()
        if self.clock is not None and self.clock.is_pending:
            if self._handles and not self._root_calls and not self._inner_handles:
                self._watch_children()
            self.hook_roots()
            self._arm_follower(self.step + 1)  # of which the next forward may be
        elif self.step != self.sampler.number:
            self.begin(self.step)

    # -- the model's own calls -----------------------------------------------------------------------------------------

    def _hooks_on(self, module: nn.Module, address: str) -> list[Any]:
        before, after = partial(self._root_entered, address), partial(self._root_left, address)
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModel(f"its calls cannot be counted or kept: {SCRIPTED.format(place='the model')}")
        if is_compiled_itself(module):
            return [CompiledCall.around(module, before, after)]
        return [
            module.register_forward_pre_hook(Tap(before), with_kwargs=True),
            module.register_forward_hook(Tap(after)),
        ]

    def _look_elsewhere(self) -> None:
        """The model is never called itself, as in Lightning's training steps: its children are."""
        self._steps_without_calls += 1
        if self._steps_without_calls > UNSEEN_STEPS:
            self.unseen["when"] = (
                "no call of the model was seen, so that no step can be judged or kept: it was compiled after the watch "
                "began, what runs is another copy of it, or its `forward` is called by itself."
            )
        if self._steps_without_calls == 1:
            self._watch_children()

    def _watch_children(self) -> None:
        model = self.model() if not self._inner_handles else None
        for name, child in model.named_children() if model is not None else ():
            if not is_compiled_itself(child):
                self._inner_handles += self._hooks_on(child, name)

    def _root_entered(self, address: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_over or torch.compiler.is_compiling() or is_no_forward():
            return
        self._root_calls += not address
        if self.wishes.clock == "forward":
            self._tick(address)
            self._sample_input(address, module, args, kwargs)
        elif self.clock is not None and self.clock.is_pending and self.sampler.is_meant(module):
            self.clock.end()
            self.begin(self.step, follows=False)
            self._just_armed = self.sampler.is_armed
            if self._just_armed and not address:
                self.sampler.begin_forward(module)
            self._sample_input(address, module, args, kwargs)
        if self.keeper is not None and self._is_trained():
            self._calls_kept += 1
            self.safely("when", self.keeper.begin, module, address, args, kwargs, self.step)

    def _tick(self, address: str) -> None:
        """A forward begins, and with it a step, if this is the model, or a part of it that ran already."""
        if not self._ran or address in self._ran:
            self._ran.clear()
            self._step += 1
            self.begin(self._step)
            self._just_armed = self.sampler.is_armed
        else:
            self._just_armed = False
        self._ran.add(address)

    def _sample_input(self, address: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The hook that samples it was put on just now, too late for this call."""
        for target in self.targets.modules if self._just_armed and "input" in self.wishes.kinds else ():
            if self._find(target) is module:
                self.sampler.entered(target, module, args, kwargs)

    def _root_left(self, address: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.is_over or torch.compiler.is_compiling() or is_no_forward():
            return
        if self.keeper is not None and self._is_trained():
            self.safely("when", self.keeper.output, module, output)
        if self.wishes.clock == "forward":
            self._arm_follower(self._step + 1)

    def _is_trained(self) -> bool:
        return self.wishes.clock != "optimizer" or torch.is_grad_enabled() or is_checkpointed(sys._getframe())

    # -- samples -------------------------------------------------------------------------------------------------------

    def put(
        self,
        tensor: torch.Tensor,
        name: str,
        kind: str,
        exact: bool = True,
        scaled: bool = False,
        number: int | None = None,
    ) -> None:
        """Hand a tensor to the ring, and wake those who read it."""
        if self.ring is None or self.is_over:
            return
        number = self.sampler.number if number is None else number
        self._put_at = number
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()  # of a DTensor, this rank's part
        self.ring.put(tensor, name, kind, number, exact=exact, scaled=scaled, note=self.note)
        self._sent()

    def _sent(self) -> None:
        """Whoever reads is woken at the end of the step, for waking takes longer than sending; or if much waits."""
        self._waiting += 1
        if self.ring is not None and self._waiting > self.ring.slots // 4:
            self._wake()

    def tell_news(self) -> None:
        """What went wrong in the children since it was last told."""
        for child in self.children:
            for sink, text in child.news().items():
                say(f"sink {sink}: {text}")

    def _wake(self) -> None:
        self._waiting = 0
        for child in self.children:
            child.wake()

    def _put_update(self, parameter: torch.Tensor, before: torch.Tensor, name: str) -> None:
        assert self.ring is not None
        self.ring.put_pair(parameter.detach(), before, name, "update", self.sampler.number, self.note)
        self._sent()

    def followed(self, label: str, tensor: torch.Tensor) -> Callable[[], None] | None:
        """A value of an operation, as the followed forward meets it; returned is what sends it, once its name is
        certain.
        """
        if not self.sampler.is_armed or not self.sampler.takes(label):
            return None
        return self.safely(label, self._held, label, tensor)

    def _held(self, label: str, tensor: torch.Tensor) -> Callable[[], None]:
        assert self.ring is not None
        facts = label, "activation", self.sampler.number
        send = self.ring.hold(tensor, *facts, note=self.note) if "activation" in self.wishes.kinds else None
        prove = self.sampler.watch_unproven(tensor, label)

        def proven() -> None:
            prove()
            if send is not None:
                send()
                self._sent()

        return proven

    def why_it_stands(self, is_ending: bool = False) -> dict[str, str]:
        """Why the first step has not ended, if that is odd: its backward pass has begun, or the watch ends."""
        if self.clock is None or self.clock.step > self.wishes.start:
            return {}
        has_begun = self._calls_kept or self.sampler.forwards if is_ending else self.sampler.is_done
        text = (
            "no optimizer of torch's has ended a step of this model, and only the first step is sampled. Where weights "
            'are changed in another way, or the optimizer\'s step is compiled: clock="manual" and step().'
        )
        return {"later steps": text} if has_begun else {}

    def is_meant(self) -> bool:
        """True if a call of the model at this moment is one that is watched."""
        model = self.model()
        return model is not None and self.sampler.is_meant(model)

    def not_followed(self, why: str) -> None:
        """A forward could not be followed; it went on unseen."""
        if (known := self.unseen.get("operations", "")) and why in known:
            return
        self.unseen["operations"] = f"{known} {why}".strip()
        say(f"operations: {why} replaylens.probes(model, ...) lists what can be watched.")

    def _single_tensors(self) -> list[torch.Tensor]:
        return [tensor for one in self.targets.tensors if (tensor := one.tensor()) is not None]

    def _may_be_scaled(self) -> bool:
        """In the first step nobody has met the GradScaler yet, if there is one."""
        return self.scaler is None and self.clock is not None and not self._has_stepped

    def _clock_failed(self, error: Exception) -> None:
        if "clock" not in self.faults:
            self.faults["clock"] = f"{type(error).__name__}: {error}"
            say(f"a step was not watched: {self.faults['clock']}")

    def _meet(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Another clock counts; the first step of the model's optimizer tells whether a GradScaler called it."""
        model = self.model()
        own = set() if model is None else set(map(id, model.parameters()))
        if torch.compiler.is_compiling() or not any(id(one) in own for one in parameters_of(optimizer)):
            return
        self._has_stepped = True
        self.scaler = self.scaler or scaler_above(sys._getframe())
        for handle in self._handles_of_all:
            handle.remove()
        self._handles_of_all.clear()

    def _is_probably_scaled(self) -> bool:
        """Under autocast, as long as no optimizer has shown whether there is a GradScaler."""
        return bool(self._handles_of_all) and self.sampler.saw_autocast

    def _has_backed_off(self) -> bool:
        first = getattr(self.scaler, "_init_scale", None)
        return first is not None and self.loss_scale() != 1.0 and self.loss_scale() < first

    def loss_scale(self) -> float:
        """By which a GradScaler multiplied the loss; 1 if none is known."""
        return float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0

    def safely(self, name: str, work: Callable[..., Any], *given: Any) -> Any:
        """What some work gives, unseen by modes and tensor classes of the user's. An error of it is noted, and what has
        this name is not done again.
        """
        if name in self.faults:
            return None
        began = perf_counter()
        try:
            with without_function_modes(), without_any_modes() if count_dispatch_modes() else nullcontext():
                return work(*given)
        except Exception as error:
            self.faults[name] = f"{type(error).__name__}: {error}"
            say(f"{name} is no longer watched: {self.faults[name]}")
            return None
        finally:
            self.seconds += perf_counter() - began


_running: WeakSet[Session] = WeakSet()


def _in_a_child() -> None:
    for session in list(_running):
        session.die()


after_fork(_in_a_child)
