"""Keeper: what each step of a training begins with, until it is known whether the step is worth keeping.

In: the calls of a model, the gradient that comes back, the moment before the optimizer's step. Out: step files.
Nothing is copied that need not be: inputs are referred to, with their write counters; parameters are what they were
until the optimizer takes its step; buffers and generators are copied, for a forward changes them. Only a step that is
kept has its parameters copied, and is then written by a thread.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread, get_ident
from typing import Any
from weakref import ref

import torch
from attrs import define, evolve, field
from torch import nn

from .._ir.memory import storage_of, version_of
from .._ir.model_state import FUSED_STEPS, PLAIN, raw_state
from .._ir.node import Context, Ref
from .._ir.settings import Settings, settings
from .._ir.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    is_any_autocast_on,
    is_wrapped,
    without_any_modes,
    without_function_modes,
)
from .._ir.trees import ATOMS, Branch, freeze_deep, leaves, map_leaves_shared
from .._store.objects import save
from .._store.pool import require_writable
from .judges import Dead, Judge, StepNumbers, are_finite, extremes, judges_of
from .step_file import (
    GivenTensor,
    ModuleFacts,
    Step,
    StepData,
    copies_of,
    generators_of,
    modules_of,
    places_of,
    shown_text,
)
from .targets import unwrapped_model

MOST_FORWARDS = 8  # of one step, of which beginnings are kept
COOL_DOWN = 100  # steps without an alarm, until there can be another
_LARGE = 2**18  # bytes of a buffer that is looked at before it is copied
_ANEW = 50  # forwards after which a model's modules are listed anew
_DEVICES = ("cuda", "xpu", "mps")


_Seen = tuple[int, int, bool] | None  # of a parameter: its id, its write counter, whether it is trained


@define(eq=False)
class _Places:
    """Where a module has its tensors. It keeps nothing of it alive."""

    module: ref[nn.Module]
    is_compiled: bool
    modules: list[tuple[str, ref[nn.Module]]]
    parameters: list[tuple[str, ref[nn.Module], str]]
    buffers: list[tuple[str, ref[nn.Module], str]]
    generators: dict[str, torch.Generator]
    devices: list[str]  # that are in use besides the CPU
    settings: Settings  # switches that choose kernels, when the places were listed
    are_tied: bool  # a parameter stands in two places
    writes_inputs: bool = False  # a forward has written its inputs in place
    forwards: int = 0
    copies: dict[str, tuple[Any, torch.Tensor]] = field(factory=dict)  # of large buffers, and what these looked like

    @staticmethod
    def of(module: nn.Module, before: _Places | None = None) -> _Places:
        """The places of a module, beneath its wrappers, and of those below it."""
        inner, is_compiled = unwrapped_model(module)
        rows = [(address, ref(inside), key, is_parameter) for address, inside, key, is_parameter in places_of(inner)]
        return _Places(
            ref(inner),
            is_compiled,
            [(address, ref(inside)) for address, inside in modules_of(inner)],
            [(address, inside, key) for address, inside, key, is_parameter in rows if is_parameter],
            [(address, inside, key) for address, inside, key, is_parameter in rows if not is_parameter],
            generators_of(inner),
            [kind for kind in _DEVICES if _is_in_use(kind)],
            settings(torch.float32),
            len(list(inner.parameters())) < len([row for row in rows if row[3]]),
            before is not None and before.writes_inputs,
            before.forwards if before is not None and before.forwards == 1 else 0,
        )

    def held_parameters(self) -> list[torch.Tensor | None]:
        """The parameters that stand there now."""
        return [None if (module := at()) is None else module._parameters.get(key) for _, at, key in self.parameters]

    def copied_buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers."""
        found = {}
        for address, at, key in self.buffers:
            module = at()
            buffer = None if module is None else module._buffers.get(key)
            if buffer is not None:
                found[address] = self._copied(address, buffer)
        return found

    def _copied(self, address: str, buffer: torch.Tensor) -> torch.Tensor:
        if type(buffer) not in PLAIN:
            return buffer  # which no file holds
        if buffer.layout is not torch.strided or buffer.nbytes <= _LARGE:
            return buffer.detach().clone()
        look = id(buffer), version_of(buffer), raw_state(buffer)[:3]
        known = self.copies.get(address)
        if known is None or known[0] != look:
            known = self.copies[address] = look, copies_of([buffer])[0]
        return known[1]

    def generator_states(self) -> dict[str, torch.Tensor]:
        """The states of the generators that a forward may draw from."""
        found = {"cpu": torch.default_generator.get_state()}
        for kind in self.devices:
            device: Any = getattr(torch, kind)
            found |= {f"{kind}:{at}": one.get_state() for at, one in enumerate(device.default_generators)}
        for path, generator in self.generators.items():
            found[path] = generator.get_state()
        return found


@define(eq=False)
class _Input:
    """A tensor among the inputs, by reference."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool
    has_history: bool
    owner: torch.Tensor | None  # itself, where it may be one of the model's


@define(eq=False)
class _Output:
    """A tensor in the output: itself if it is small, else its extremes; and what came back to it."""

    tensor: torch.Tensor | None
    version: int
    seen: torch.Tensor | None
    received: list[tuple[torch.Tensor, int]]  # gradients with their write counters, one for each backward pass

    @staticmethod
    def of(tensor: torch.Tensor, is_judged: bool) -> _Output:
        """What is kept of a tensor."""
        if type(tensor) is torch.Tensor and not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()):
            held = tensor.detach()
            if tensor.layout is torch.strided and tensor.nbytes <= _LARGE:
                return _Output(held, version_of(held), None, [])
            return _Output(None, -1, extremes(held) if is_judged else None, [])
        return _Output(None, -1, None, [])

    def extremes(self) -> torch.Tensor | None:
        """The least and the most of it; None where that is not known."""
        if self.seen is None and self.tensor is not None:
            self.seen = extremes(self.tensor)
        return self.seen

    def is_finite(self) -> bool:
        """True if no number in it is known not to be finite."""
        if self.seen is None and self.tensor is not None:
            return are_finite([self.tensor])
        return self.seen is None or bool(torch.isfinite(self.seen).all())


class _Receiver:
    """A hook on a tensor of the output. It knows two lists alone, and keeps nothing else alive; copies have none."""

    __slots__ = ("arrivals", "number", "received")
    __torch_unserializable__ = True

    def __init__(self, received: list[tuple[torch.Tensor, int]], arrivals: list[int], number: int) -> None:
        self.received, self.arrivals, self.number = received, arrivals, number

    def __call__(self, grad: torch.Tensor) -> None:
        self.arrivals.append(self.number)
        self.received.append((grad.detach() if grad.requires_grad else grad, version_of(grad)))


@define(eq=False)
class _Beginning:
    """What one forward of a step began with, and what is known of its output."""

    step: int
    address: str
    places: _Places
    thread: int
    tree: Any
    inputs: list[_Input]
    parameters: list[_Seen]
    fused_steps: int
    training: list[bool]
    buffers: dict[str, torch.Tensor]
    generators: dict[str, torch.Tensor]
    python: Any
    numpy: Any
    context: Context
    is_over: bool = False  # the forward has ended
    is_judged: bool = False
    outputs: list[_Output] = field(factory=list)
    arrivals: list[int] = field(factory=list)  # the numbers of outputs, as gradients came to them
    loss_alone: torch.Tensor | None = None
    why: list[str] = field(factory=list)  # it is not exact

    def is_finite(self) -> bool:
        """True if no number in the output is known not to be finite."""
        return all(one.is_finite() for one in self.outputs)

    def output_extremes(self) -> list[torch.Tensor]:
        """The extremes of each tensor in the output."""
        return [found for one in self.outputs if (found := one.extremes()) is not None]

    def loss(self) -> torch.Tensor | None:
        """The loss, where the model returns it."""
        return self.loss_alone

    def output_grads(self) -> list[torch.Tensor]:
        """Everything that came back to the output."""
        return [grad for one in self.outputs for grad, _ in one.received]


def _unseen(work: Callable[..., None], *args: Any) -> None:
    """Do something that no mode of the user's sees."""
    if not (count_function_modes() or count_dispatch_modes()):
        return work(*args)
    with without_function_modes(), without_any_modes():
        return work(*args)


class Keeper:
    """Keeps what a step began with, asks the judges, and writes the steps that are worth it.

    `when` is what `judges_of` takes; at most `alarms` files are written for it, and after each there is a cool-down: a
    hundred steps without an alarm. `keep_every` writes every so many steps, `keep()` the one that runs. `told` is
    called with each Step when its file is complete, by the thread that wrote it. A user's judge that raises is asked no
    more, and `faults` says so.
    """

    def __init__(
        self,
        model: nn.Module,
        when: Any,
        folder: str | os.PathLike[str],
        alarms: int = 1,
        rng: str = "torch",
        keep_every: int | None = None,
        told: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.judges: list[Judge] = list(judges_of(when))
        self.folder, self.most_alarms, self.keep_every = Path(folder), alarms, keep_every
        self.steps: tuple[Step, ...] = ()
        self.faults: list[str] = []
        self._model = ref(unwrapped_model(model)[0])
        self._takes_all_generators = rng == "all"
        self._told = told
        self._places: dict[int, tuple[ref[nn.Module], _Places]] = {}  # by id
        self._beginnings: list[_Beginning] = []
        self._wanted: str | None = None  # why the step that runs is to be kept
        self._alarms = 0
        self._quiet = COOL_DOWN  # steps without an alarm
        self._skips = 0  # steps in a row that a GradScaler skipped
        self._scaler: Any = None
        self._scale: float | None = None  # when it was last asked
        self._handles: list[Any] = []  # hooks on leaves in outputs, which outlive the forward
        self._threads: list[Thread] = []
        self._taken: set[str] = set()  # paths of files
        self._is_closed = False

    # -- what hooks call -----------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, address: str, args: Any, kwargs: Any, step: int) -> None:
        """A forward of the model, or of a part of it that is called by itself, begins."""
        if not self._is_closed:
            _unseen(self._begin, module, address, args, kwargs, step)

    def output(self, module: nn.Module, output: Any) -> None:
        """That forward has ended."""
        if not self._is_closed:
            _unseen(self._end, module, output)

    def judge(self, step: int, optimizer: Any = None, scaler: Any = None) -> None:
        """The optimizer is about to take its step: the last moment at which the parameters are those of the forward."""
        if self._is_closed:
            return
        self._skips = 0
        if scaler is not None:
            self._scaler, self._scale = scaler, _scale_of(scaler)
        _unseen(self._judge, step)

    def keep(self, reason: str = "kept on purpose") -> None:
        """Write the step that runs now."""
        self._wanted = reason or "kept on purpose"

    def looks_at(self, address: str, module: nn.Module) -> bool:
        """True for a module whose activations a judge wants to have, by `activation`, in each sampled step."""
        return any(judge.looks_at(address, module) for judge in self.judges if isinstance(judge, Dead))

    def activation(self, name: str, tensor: torch.Tensor) -> None:
        """An activation of a sampled step."""
        with without_function_modes(), without_any_modes():
            for judge in self.judges:
                if isinstance(judge, Dead):
                    judge.activation(name, tensor)

    def close(self) -> None:
        """Judge a step that nobody ended, as where the loop itself raised at a NaN; wait until all files are there."""
        if not self._is_closed:
            if any(not one.is_judged for one in self._beginnings):
                _unseen(self._judge, self._beginnings[-1].step)
            self._is_closed = True
            self._clear()
        self.wait()

    def wait(self) -> None:
        """Wait until the files of all steps are complete."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _is_idle(self) -> bool:
        """True once all alarms are used up, and nothing else is asked for."""
        has_judges = bool(self.judges) and self._alarms < self.most_alarms
        return not (has_judges or self.keep_every or self._wanted)

    # -- the beginning of a forward ------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, address: str, args: Any, kwargs: Any, step: int) -> None:
        if self._beginnings:
            self._settle(step)
        if self._is_idle():
            self._clear()
            return
        places = self._places_of(module)
        made = self._beginning(places, address, args, kwargs, step)
        if places.is_compiled:
            made.why.append("the model is compiled by torch.compile; a program of it runs torch's own kernels")
        if places.writes_inputs:
            _copy_inputs(made)
        if len(self._beginnings) >= MOST_FORWARDS:
            self._make_room()
        self._beginnings.append(made)

    def _places_of(self, module: nn.Module) -> _Places:
        known = self._places.get(id(module))
        if known is None or known[0]() is not module:
            known = ref(module), _Places.of(module)
        elif known[1].forwards == 1 or known[1].forwards >= _ANEW:  # a first forward may have added what it needs
            known = known[0], _Places.of(module, known[1])
        self._places[id(module)] = known
        known[1].forwards += 1
        return known[1]

    def _settle(self, step: int) -> None:
        """End what came before this forward: steps that were judged, and those that never came to an optimizer."""
        latest = self._beginnings[-1]
        if latest.is_judged:
            self._clear()
        elif latest.step != step:
            self._judge(latest.step)
            self._clear()
        else:
            pending = [one for one in self._beginnings if not one.is_judged]
            is_skipped = self._is_skipped(pending)
            if is_skipped is None:
                return
            self._skips += 1
            self._judge(step, is_reached=False)
            if is_skipped:
                self._clear()

    def _is_skipped(self, pending: list[_Beginning]) -> bool | None:
        """True if a GradScaler has skipped the step of these forwards, which had the same number; False if it may have;
        None if this is the next micro-batch.
        """
        if not self.judges or not any(one.output_grads() for one in pending):
            return None
        if self._scaler is not None:
            then, self._scale = self._scale, _scale_of(self._scaler)
            if self._scale is not None and (not math.isfinite(self._scale) or (then or 0.0) > self._scale):
                return True
        grads = [grad for one in pending for grad in one.output_grads()]
        return None if not all(grad.is_cpu for grad in grads) or are_finite(grads) else False

    def _clear(self) -> None:
        self._beginnings.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _make_room(self) -> None:
        """Forget the oldest of many forwards; not one whose output is not finite, as long as there are others."""
        fine = next((at for at, one in enumerate(self._beginnings) if one.is_over and one.is_finite()), 0)
        del self._beginnings[fine]

    def _beginning(self, places: _Places, address: str, args: Any, kwargs: Any, step: int) -> _Beginning:
        inputs: list[_Input] = []
        tree = _frozen_inputs(args, kwargs, inputs)
        return _Beginning(
            step,
            address,
            places,
            get_ident(),
            tree,
            inputs,
            [
                None if one is None else (id(one), version_of(one), one.requires_grad)
                for one in places.held_parameters()
            ],
            FUSED_STEPS.count,
            [(inner := at()) is not None and inner.training for _, at in places.modules],
            places.copied_buffers() if places.buffers else {},
            places.generator_states(),
            random.getstate() if self._takes_all_generators else None,
            _numpy_state() if self._takes_all_generators else None,
            _modes_now(places),
        )

    # -- its end -------------------------------------------------------------------------------------------------------

    def _end(self, module: nn.Module, output: Any) -> None:
        thread = get_ident()
        known = self._places.get(id(module))
        inner = None if known is None else known[1].module()
        for one in reversed(self._beginnings):
            if not one.is_over and one.places.module() is inner and one.thread == thread:
                break
        else:
            return
        one.is_over = True
        self._note_output(one, output)
        for given in one.inputs:
            if version_of(given.tensor) != given.version:
                one.places.writes_inputs = True  # from now on they are copied

    def _note_output(self, one: _Beginning, output: Any) -> None:
        is_judged = bool(self.judges)
        if type(output) is torch.Tensor:
            self._note_tensor(one, output, is_judged)
            if output.numel() == 1:
                one.loss_alone = output.detach()
            return
        freeze_deep(output, lambda tensor: self._note_tensor(one, tensor, is_judged))
        loss: Any = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            one.loss_alone = loss.detach()

    def _note_tensor(self, one: _Beginning, tensor: torch.Tensor, is_judged: bool) -> None:
        if is_wrapped(tensor):  # inside of a transform, which lets nothing out
            one.outputs.append(_Output(None, -1, None, []))
            return
        made = _Output.of(tensor, is_judged)
        one.outputs.append(made)
        if tensor.requires_grad:
            handle = tensor.register_hook(_Receiver(made.received, one.arrivals, len(one.outputs) - 1))
            if tensor.is_leaf:
                self._handles.append(handle)

    # -- the judgement -------------------------------------------------------------------------------------------------

    def _judge(self, step: int, is_reached: bool = True) -> None:
        pending = self._beginnings
        if not pending:
            return
        numbers = StepNumbers(
            step, self._parameters, self._names, pending, self._scale, 0 if is_reached else self._skips
        )
        reason = self._alarm(numbers)
        if reason is not None:
            self._alarms += 1
        elif self._wanted is not None:
            reason, self._wanted = self._wanted, None
        elif is_reached and self.keep_every and step and step % self.keep_every == 0 and not pending[-1].is_judged:
            reason = f"kept every {self.keep_every} steps"
        for one in pending:
            one.is_judged = one.is_judged or is_reached
        if reason is not None:
            self._write(_worst(pending), numbers, reason)

    def _alarm(self, numbers: StepNumbers) -> str | None:
        """Why this step is an alarm, unless there were enough of them, or one only just."""
        if not self.judges or self._alarms >= self.most_alarms:
            return None
        found = next((reason for judge in [*self.judges] if (reason := self._asked(judge, numbers))), None)
        is_ready = self._quiet >= COOL_DOWN
        self._quiet = 0 if found is not None else self._quiet + 1
        return found if is_ready else None

    def _asked(self, judge: Judge, numbers: StepNumbers) -> str | None:
        try:
            return judge.reason(numbers)
        except Exception as error:
            self.judges.remove(judge)
            self.faults.append(f"when: {judge} raised {type(error).__name__}: {str(error)[:200]}; it is asked no more")
            return None

    def _parameters(self) -> list[torch.Tensor]:
        """The parameters of the model, each once."""
        model, places = self._model(), self._beginnings[-1].places
        if model is not None and places.module() is not model:
            places = self._places_of(model)
        held = [one for one in places.held_parameters() if one is not None]
        return list({id(one): one for one in held}.values()) if places.are_tied else held

    def _names(self) -> dict[int, str]:
        """The addresses of the parameters, by id."""
        model = self._model()
        return {} if model is None else {id(one): name for name, one in model.named_parameters()}

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, one: _Beginning, numbers: StepNumbers, reason: str) -> None:
        """Copy what the step began with, and have it written."""
        module, rank = one.places.module(), _rank()
        kind = "model" if module is None else type(module).__qualname__
        made = Step(one.step, shown_text(reason), kind, one.address, (), numbers.known, numbers.scale, rank)
        self.steps = (*self.steps, made)
        try:
            if module is None:
                raise RuntimeError("the model is gone")
            made._data = _data_of(one, module)
            made.why = tuple(dict.fromkeys(map(shown_text, one.why)))
            path = self._free_path(one.step, rank)
        except Exception as error:
            self._could_not(made, error)
            return
        thread = Thread(target=self._written, args=(made, path), name="replaylens step file")
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    def _written(self, step: Step, path: str) -> None:
        """In a thread of its own, which Python waits for at its end."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            save(step, path)
            step.path = path
        except Exception as error:
            self._could_not(step, error)
            return
        step.let_go()
        self._tell(step)

    def _could_not(self, step: Step, error: Exception) -> None:
        step.why = (*step.why, f"it was not written: {type(error).__name__}: {shown_text(str(error))[:500]}")
        step._data = None
        self._tell(step)

    def _tell(self, step: Step) -> None:
        try:
            self._told(step)
        except Exception as error:
            self.faults.append(f"a step was kept, and telling of it raised {type(error).__name__}: {str(error)[:200]}")

    def _free_path(self, step: int, rank: int | None) -> str:
        """A path at which nothing is yet."""
        name = f"step-{step}" + ("" if rank is None else f"-rank{rank}")
        number, path = 1, str(self.folder / f"{name}.pt")
        while path in self._taken or os.path.lexists(path):
            number += 1
            path = str(self.folder / f"{name}-{number}.pt")
        self._taken.add(path)
        return path


# -- single facts ------------------------------------------------------------------------------------------------------


def _worst(beginnings: list[_Beginning]) -> _Beginning:
    """The forward to keep: one whose output is not finite, else one that got such a gradient, else the latest."""
    for one in beginnings:
        if one.is_over and not one.is_finite():
            return one
    for one in beginnings:
        if not are_finite(one.output_grads()):
            return one
    return next((one for one in reversed(beginnings) if one.is_over), beginnings[-1])


_NO_NAMES = Branch(dict, (), ())


def _frozen_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], found: list[_Input]) -> Any:
    """The inputs as a frozen tree, in which each tensor is its number among those found."""
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most are
        found.append(_noted(args[0]))
        return _ONE_TENSOR
    numbers: dict[int, Ref] = {}

    def leaf(tensor: torch.Tensor) -> Ref:
        number = numbers.get(id(tensor))
        if number is None:
            number = numbers[id(tensor)] = Ref("input", (len(found),))
            found.append(_noted(tensor))
        return number

    return freeze_deep((tuple(args), dict(kwargs)), leaf)


_ONE_TENSOR = (Ref("input", (0,)),), Branch(dict, (), ())


def _noted(tensor: torch.Tensor) -> _Input:
    """What is kept of an input: of one with a history not that, which would keep the memory of a whole forward."""
    is_leaf, needs_grad = tensor.is_leaf, tensor.requires_grad
    held = tensor if is_leaf or type(tensor) not in PLAIN or is_wrapped(tensor) else tensor.detach()
    return _Input(held, version_of(tensor), needs_grad, not is_leaf, tensor if is_leaf else None)


def _copy_inputs(one: _Beginning) -> None:
    plain = [given for given in one.inputs if type(given.tensor) in PLAIN]
    for given, copied in zip(plain, copies_of([given.tensor for given in plain]), strict=True):
        given.tensor, given.version = copied, version_of(copied)


def _is_in_use(kind: str) -> bool:
    """True if a kind of device has generators that were used."""
    device: Any = getattr(torch, kind, None)
    is_initialized = getattr(device, "is_initialized", None)
    return bool(is_initialized()) and hasattr(device, "default_generators") if is_initialized is not None else False


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return state if state is not None and state[0] == "MT19937" else None


def _modes_now(places: _Places) -> Context:
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if is_any_autocast_on():
        cached = torch.is_autocast_cache_enabled()
        on = [device for device in ("cpu", *_DEVICES) if torch.is_autocast_enabled(device)]
        autocast = tuple([(device, torch.get_autocast_dtype(device), cached) for device in on])
    elif grad and not inference and not places.settings:
        return _USUAL
    return Context(grad, inference, autocast, places.settings)


_USUAL = Context(grad=True)


def _scale_of(scaler: Any) -> float | None:
    return float(scaler.get_scale()) if scaler.is_enabled() else None


def _rank() -> int | None:
    """The number of this process among several that train together."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return int(distributed.get_rank()) if distributed.get_world_size() > 1 else None


def _data_of(one: _Beginning, module: nn.Module) -> StepData:
    """Copies of all that the step began with; what is no longer as it was is noted in `why`."""
    for at, entry in enumerate(one.inputs):
        require_writable(entry.tensor, f"input {at}")
    for address, held in _held(module).items():
        require_writable(held, address)
    given = _given_of(one, module)
    if settings(torch.float32) != one.context.settings:
        one.why.append("switches of torch that choose kernels changed since, and may have been others in the forward")
    tensors, state, frozen_ones = _state_of(one, module)
    kinds = {address: type(inner).__qualname__ for address, inner in modules_of(module)}
    training = dict(zip([address for address, _ in one.places.modules], one.training, strict=True))
    if kinds.keys() != training.keys():
        one.why.append("modules were added or taken away since the step began")
        one.places.forwards = _ANEW
    for leaf in leaves(one.tree):
        if type(leaf) not in ATOMS and type(leaf) is not Ref and not _is_plain_leaf(leaf):
            one.why.append(f"a {type(leaf).__qualname__} among the inputs is known by its name alone")
    copies = copies_of([*[entry.tensor.detach() for entry in given], *tensors])
    return StepData(
        map_leaves_shared(one.tree, _own_array),
        tuple([evolve(entry, tensor=copied) for entry, copied in zip(given, copies, strict=False)]),
        tuple(copies[len(given) :]),
        state,
        frozen_ones,
        tuple([ModuleFacts(address, kind, training.get(address, False)) for address, kind in kinds.items()]),
        one.generators,
        one.python,
        one.numpy,
        one.context,
        torch.get_num_threads(),
        tuple([_grad_of(one, each.received) for each in one.outputs]),
        tuple(dict.fromkeys(one.arrivals)),
        tuple([_extremes_of(each) for each in one.outputs]),
    )


def _given_of(one: _Beginning, module: nn.Module) -> list[GivenTensor]:
    own = {
        id(held): address for address, inner, key, _ in places_of(module) if (held := getattr(inner, key)) is not None
    }
    memory = {storage_of(held): address for address, held in _held(module).items()}
    found = []
    for given in one.inputs:
        if version_of(given.tensor) != given.version:
            one.why.append(f"an input of shape {list(given.tensor.shape)} was written in place after it was given")
        address = own.get(id(given.owner), "")
        if not address and (place := memory.get(storage_of(given.tensor))) is not None:
            one.why.append(f"an input shares memory with {place}")
        found.append(GivenTensor(given.tensor, given.requires_grad, given.has_history, address))
    return found


def _held(module: nn.Module) -> dict[str, torch.Tensor]:
    places = ((address, getattr(inner, key)) for address, inner, key, _ in places_of(module))
    return {address: held for address, held in places if held is not None}


def _state_of(one: _Beginning, module: nn.Module) -> tuple[list[torch.Tensor], dict[str, int], frozenset[str]]:
    """The parameters and buffers as they were when the step began: tensors, which of them stands where, and which need
    no gradient.
    """
    then = {place[0]: at for at, place in enumerate(one.places.parameters)}
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    state, frozen_ones = {}, set()
    for address, inner, key, is_parameter in places_of(module):
        held = getattr(inner, key)
        if held is None:
            continue
        at = then.get(address) if is_parameter else None
        seen = None if at is None else one.parameters[at]
        if is_parameter and (seen is None or seen[0] != id(held)):
            one.why.append(f"{address} was exchanged since the step began")
        elif seen is not None:
            _, version, is_trained = seen
            if version != version_of(held) or FUSED_STEPS.last_of(held) > one.fused_steps:
                one.why.append(f"{address} was written since the step began")
            if not is_trained:
                frozen_ones.add(address)
        elif address not in one.buffers:
            one.why.append(f"{address} came later than the step began, and is as it is after the forward")
            one.places.forwards = _ANEW
        number = numbers.get(id(held))
        if number is None:
            number = numbers[id(held)] = len(tensors)
            tensors.append(held.detach() if is_parameter else one.buffers.get(address, held))
        state[address] = number
    return tensors, state, frozenset(frozen_ones)


def _is_plain_leaf(leaf: Any) -> bool:
    kind = type(leaf)
    return kind.__module__ == "numpy" or (kind in (list, dict, set, frozenset) and not leaf)


def _own_array(leaf: Any) -> Any:
    return leaf.copy() if type(leaf).__module__ == "numpy" and hasattr(leaf, "shape") else leaf


def _grad_of(one: _Beginning, received: list[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
    """A copy of the gradient at a tensor of the output."""
    grads = [grad for grad, _ in received]
    if any(version_of(grad) != version for grad, version in received):
        one.why.append("the gradient at the output was written in place after it was given")
    if len(grads) > 1:
        one.why.append("several backward passes came to the output, of which the sum is kept")
        return torch.stack(grads).sum(0)
    return copies_of(grads)[0] if grads else None


def _extremes_of(one: _Output) -> tuple[float, float] | None:
    """The extremes of a tensor in the output, if it was not written since."""
    if one.tensor is not None and version_of(one.tensor) != one.version:
        return None
    found = one.extremes()
    return None if found is None else (float(found[0]), float(found[1]))
