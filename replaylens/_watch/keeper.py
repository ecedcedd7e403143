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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread, get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from attrs import define, evolve, field
from torch import nn
from torch.utils.hooks import unserializable_hook

from .._ir.memory import storage_of, version_of
from .._ir.model_state import FUSED_STEPS, PLAIN, raw_state
from .._ir.node import Context, Ref
from .._ir.settings import settings
from .._ir.torch_private import (
    count_dispatch_modes,
    is_any_autocast_on,
    is_wrapped,
    without_any_modes,
    without_function_modes,
)
from .._ir.trees import ATOMS, freeze_deep, leaves, map_leaves_shared
from .._store.objects import save
from .judges import Dead, Judge, StepNumbers, extremes, is_finite, judges_of
from .step_file import (
    GivenTensor,
    ModuleFacts,
    Step,
    StepData,
    copies_of,
    generators_of,
    places_of,
    shown_text,
)
from .targets import unwrapped_model

MOST_FORWARDS = 8  # of one step, of which beginnings are kept
COOL_DOWN = 100  # steps without an alarm, until there can be another
_LARGE = 2**18  # bytes of a buffer that is looked at before it is copied
_ANEW = 50  # forwards after which a model's modules are listed anew
_DEVICES = ("cuda", "xpu", "mps")
_Received = tuple[torch.Tensor, int]  # a gradient, and its write counter


@define(eq=False)
class _Places:
    """Where a module has its tensors. It keeps nothing of it alive."""

    modules: list[tuple[str, ref[nn.Module]]]
    parameters: list[tuple[str, ref[nn.Module], str]]
    buffers: list[tuple[str, ref[nn.Module], str]]
    generators: dict[str, torch.Generator]
    forwards: int = 0
    writes_inputs: bool = False  # a forward has written its inputs in place
    copies: dict[str, tuple[Any, torch.Tensor]] = field(
        factory=dict
    )  # of large buffers: what they looked like, and they

    @staticmethod
    def of(module: nn.Module) -> _Places:
        """The places of a module and of those below it."""
        rows = [(address, ref(inner), key, is_parameter) for address, inner, key, is_parameter in places_of(module)]
        return _Places(
            [(address, ref(inner)) for address, inner in module.named_modules(remove_duplicate=False)],
            [(address, inner, key) for address, inner, key, is_parameter in rows if is_parameter],
            [(address, inner, key) for address, inner, key, is_parameter in rows if not is_parameter],
            generators_of(module),
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


@define(eq=False)
class _Input:
    """A tensor among the inputs, by reference."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool
    has_history: bool
    owner: torch.Tensor | None  # itself, where it may be one of the model's


@define(eq=False)
class _Beginning:
    """What one forward of a step began with."""

    step: int
    address: str
    module: ref[nn.Module]
    places: _Places
    thread: int
    tree: Any
    inputs: list[_Input]
    parameters: list[torch.Tensor | None]
    versions: list[int]
    trained: list[bool]
    fused_steps: int
    training: list[bool]
    buffers: dict[str, torch.Tensor]
    generators: dict[str, torch.Tensor]
    python: Any
    numpy: Any
    context: Context
    threads: int
    is_over: bool = False  # the forward has ended
    is_judged: bool = False
    outputs: list[torch.Tensor | None] = field(factory=list)  # of each tensor in the output: its extremes
    losses: list[torch.Tensor] = field(factory=list)
    grads: list[list[_Received]] = field(factory=list)  # of each: what came back, once for each backward pass
    handles: list[Any] = field(factory=list)  # hooks on leaves, which outlive the forward
    why: list[str] = field(factory=list)  # it is not exact

    def output_grads(self) -> list[torch.Tensor]:
        """Everything that came back."""
        return [grad for received in self.grads for grad, _ in received]

    def release(self) -> None:
        """Take off the hooks that would stay."""
        for handle in self.handles:
            handle.remove()


class _Unseen:
    """A block in which nothing of what is computed is seen: by autograd, by modes of the user's."""

    __slots__ = ("_blocks",)

    def __enter__(self) -> None:
        self._blocks: list[Any] = [without_function_modes(), torch.no_grad()]
        if count_dispatch_modes():
            self._blocks.append(without_any_modes())
        for block in self._blocks:
            block.__enter__()

    def __exit__(self, *error: Any) -> None:
        for block in reversed(self._blocks):
            block.__exit__(None, None, None)


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
        self._places: WeakKeyDictionary[nn.Module, _Places] = WeakKeyDictionary()
        self._beginnings: list[_Beginning] = []
        self._wanted: str | None = None  # why the step that runs is to be kept
        self._alarms = 0
        self._quiet = COOL_DOWN  # steps without an alarm
        self._skips = 0  # steps in a row that a GradScaler skipped
        self._scaler: Any = None
        self._scale: float | None = None  # when it was last asked
        self._threads: list[Thread] = []
        self._taken: set[str] = set()  # paths of files
        self._is_closed = False

    # -- what hooks call -----------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, address: str, args: Any, kwargs: Any, step: int) -> None:
        """A forward of the model, or of a part of it that is called by itself, begins."""
        if self._is_closed:
            return
        with _Unseen():
            self._settle(step)
            if self._is_idle():
                self._clear()
                return
            inner, is_compiled = unwrapped_model(module)
            places = self._places.get(inner)
            if places is None or places.forwards >= _ANEW:
                writes = places is not None and places.writes_inputs
                places = self._places[inner] = evolve(_Places.of(inner), writes_inputs=writes)
            places.forwards += 1
            made = self._beginning(inner, address, places, args, kwargs, step)
            if is_compiled:
                made.why.append("the model is compiled by torch.compile; a program of it runs torch's own kernels")
            self._make_room()
            self._beginnings.append(made)

    def output(self, module: nn.Module, output: Any) -> None:
        """That forward has ended."""
        inner, thread = unwrapped_model(module)[0], get_ident()
        one = next(
            (b for b in reversed(self._beginnings) if b.module() is inner and not b.is_over and b.thread == thread),
            None,
        )
        if self._is_closed or one is None:
            return
        one.is_over = True
        with _Unseen():
            self._note_output(one, output)
            self._note_writes(one)

    def judge(self, step: int, optimizer: Any = None, scaler: Any = None) -> None:
        """The optimizer is about to take its step: the last moment at which the parameters are those of the forward."""
        if self._is_closed:
            return
        self._skips = 0
        if scaler is not None:
            self._scaler, self._scale = scaler, _scale_of(scaler)
        with _Unseen():
            self._judge(step, self._scale)

    def keep(self, reason: str = "kept on purpose") -> None:
        """Write the step that runs now."""
        self._wanted = reason or "kept on purpose"

    def looks_at(self, address: str, module: nn.Module) -> bool:
        """True for a module whose activations a judge wants to have, by `activation`, in each sampled step."""
        return any(judge.looks_at(address, module) for judge in self.judges if isinstance(judge, Dead))

    def activation(self, name: str, tensor: torch.Tensor) -> None:
        """An activation of a sampled step."""
        with _Unseen():
            for judge in self.judges:
                if isinstance(judge, Dead):
                    judge.activation(name, tensor)

    def close(self) -> None:
        """Judge a step that nobody ended, as where the loop itself raised at a NaN; wait until all files are there."""
        if not self._is_closed:
            with _Unseen():
                if any(not one.is_judged for one in self._beginnings):
                    self._judge(self._beginnings[-1].step, None)
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

    def _settle(self, step: int) -> None:
        """End what came before this forward: steps that were judged, and those that never came to an optimizer."""
        pending = [one for one in self._beginnings if not one.is_judged]
        if not pending:
            self._clear()
        elif pending[-1].step != step:
            self._judge(pending[-1].step, None)
            self._clear()
        elif (is_skipped := self._is_skipped(pending)) is not None:
            self._skips += 1
            self._judge(step, self._scale, is_reached=False)
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
        return None if not all(grad.is_cpu for grad in grads) or all(map(is_finite, grads)) else False

    def _clear(self) -> None:
        for one in self._beginnings:
            one.release()
        self._beginnings.clear()

    def _make_room(self) -> None:
        """Forget the oldest of many forwards; not one whose output is not finite, as long as there are others."""
        if len(self._beginnings) < MOST_FORWARDS:
            return
        fine = next((at for at, one in enumerate(self._beginnings) if _is_fine(one)), 0)
        self._beginnings.pop(fine).release()

    def _beginning(
        self, module: nn.Module, address: str, places: _Places, args: Any, kwargs: Any, step: int
    ) -> _Beginning:
        inputs: list[_Input] = []
        tree = freeze_deep((tuple(args), dict(kwargs)), partial(_noted_input, inputs, {}))
        parameters = places.held_parameters()
        made = _Beginning(
            step,
            address,
            ref(module),
            places,
            get_ident(),
            tree,
            inputs,
            parameters,
            [-1 if one is None else version_of(one) for one in parameters],
            [one is not None and one.requires_grad for one in parameters],
            FUSED_STEPS.count,
            [(inner := at()) is not None and inner.training for _, at in places.modules],
            places.copied_buffers(),
            _generator_states(places.generators),
            random.getstate() if self._takes_all_generators else None,
            _numpy_state() if self._takes_all_generators else None,
            _modes_now(),
            torch.get_num_threads(),
        )
        if places.writes_inputs:
            _copy_inputs(made)
        return made

    # -- its end -------------------------------------------------------------------------------------------------------

    def _note_output(self, one: _Beginning, output: Any) -> None:
        tensors: list[torch.Tensor] = []
        freeze_deep(output, tensors.append)
        for tensor in tensors:
            is_number = (tensor.is_floating_point() or tensor.is_complex()) and not is_wrapped(tensor)
            is_seen = is_number and bool(self.judges) and type(tensor) in PLAIN and not tensor.is_meta
            one.outputs.append(extremes(tensor.detach()) if is_seen else None)
            received: list[_Received] = []
            one.grads.append(received)
            if tensor.requires_grad and is_number:
                handle = tensor.register_hook(unserializable_hook(partial(_receive, received)))
                if tensor.is_leaf:
                    one.handles.append(handle)
        loss = getattr(output, "loss", None) if not isinstance(output, torch.Tensor) else output
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point() and self.judges:
            one.losses.append(loss.detach().clone())

    def _note_writes(self, one: _Beginning) -> None:
        """The forward may have written its inputs: then those of the next one are copied."""
        if any(version_of(given.tensor) != given.version for given in one.inputs):
            one.places.writes_inputs = True

    # -- the judgement -------------------------------------------------------------------------------------------------

    def _judge(self, step: int, scale: float | None, is_reached: bool = True) -> None:
        pending = self._beginnings
        if not pending:
            return
        numbers = _numbers(step, self._parameters(), pending, scale, 0 if is_reached else self._skips)
        reason = self._alarm(numbers)
        if reason is not None:
            self._alarms += 1
        elif self._wanted is not None:
            reason, self._wanted = self._wanted, None
        elif is_reached and self.keep_every and step % self.keep_every == 0 and not pending[-1].is_judged:
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

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        model = self._model()
        if model is None:
            return []
        places = self._places.get(model)
        if places is None:
            places = self._places[model] = _Places.of(model)
        pairs = zip(places.parameters, places.held_parameters(), strict=True)
        return list({id(held): (address, held) for (address, _, _), held in pairs if held is not None}.values())

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, one: _Beginning, numbers: StepNumbers, reason: str) -> None:
        """Copy what the step began with, and have it written."""
        module, rank = one.module(), _rank()
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


def _numbers(
    step: int,
    parameters: list[tuple[str, torch.Tensor]],
    beginnings: list[_Beginning],
    scale: float | None = None,
    skipped: int = 0,
) -> StepNumbers:
    return StepNumbers(
        step,
        parameters,
        [pair for one in beginnings for pair in one.outputs if pair is not None],
        [loss for one in beginnings for loss in one.losses],
        [grad for one in beginnings for grad in one.output_grads()],
        scale,
        skipped,
    )


def _is_fine(one: _Beginning) -> bool:
    return one.is_over and all(pair is None or bool(torch.isfinite(pair).all()) for pair in one.outputs)


def _worst(beginnings: list[_Beginning]) -> _Beginning:
    """The forward to keep: one whose output is not finite, else one that got such a gradient, else the latest."""
    for one in beginnings:
        if one.is_over and not _is_fine(one):
            return one
    for one in beginnings:
        if not all(map(is_finite, one.output_grads())):
            return one
    return next((one for one in reversed(beginnings) if one.is_over), beginnings[-1])


def _receive(received: list[_Received], grad: torch.Tensor) -> None:
    """A hook on a tensor of the output. It knows the list alone, and keeps nothing else alive."""
    received.append((grad.detach(), version_of(grad)))


def _noted_input(found: list[_Input], known: dict[int, Ref], tensor: torch.Tensor) -> Ref:
    """In the place of a tensor its number; one that occurs twice has one."""
    number = known.get(id(tensor))
    if number is None:
        number = known[id(tensor)] = Ref("input", (len(found),))
        is_plain = type(tensor) in PLAIN and not is_wrapped(tensor)
        held = tensor.detach() if is_plain else tensor  # which shares the write counter, and no graph
        is_leaf = tensor.is_leaf
        owner = tensor if is_leaf else None
        found.append(_Input(held, version_of(tensor), tensor.requires_grad, not is_leaf, owner))
    return number


def _copy_inputs(one: _Beginning) -> None:
    plain = [given for given in one.inputs if type(given.tensor) in PLAIN]
    for given, copied in zip(plain, copies_of([given.tensor for given in plain]), strict=True):
        given.tensor, given.version = copied, version_of(copied)


def _generator_states(own: Mapping[str, torch.Generator]) -> dict[str, torch.Tensor]:
    found = {"cpu": torch.default_generator.get_state()}
    for kind in _DEVICES:
        device: Any = sys.modules.get(f"torch.{kind}")
        if device is not None and getattr(device, "is_initialized", bool)():
            found |= {f"{kind}:{at}": one.get_state() for at, one in enumerate(device.default_generators)}
    return found | {path: generator.get_state() for path, generator in own.items()}


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return state if state is not None and state[0] == "MT19937" else None


def _modes_now() -> Context:
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    if is_any_autocast_on():
        cached = torch.is_autocast_cache_enabled()
        on = [device for device in ("cpu", *_DEVICES) if torch.is_autocast_enabled(device)]
        autocast = tuple([(device, torch.get_autocast_dtype(device), cached) for device in on])
    return Context(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, settings(torch.float32))


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
    given = _given_of(one, module)
    tensors, state, frozen_ones = _state_of(one, module)
    kinds = {address: type(inner).__qualname__ for address, inner in module.named_modules(remove_duplicate=False)}
    training = dict(zip([address for address, _ in one.places.modules], one.training, strict=True))
    if kinds.keys() != training.keys():
        one.why.append("modules were added or taken away since the step began")
    for leaf in leaves(one.tree):
        if type(leaf) not in ATOMS and type(leaf) is not Ref and not _is_plain_leaf(leaf):
            one.why.append(f"a {type(leaf).__qualname__} among the inputs is known by its name alone")
    copies = copies_of([*[entry.tensor for entry in given], *tensors])
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
        one.threads,
        tuple([_grad_of(one, received) for received in one.grads]),
        tuple([_pair(found) for found in one.outputs]),
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
        if is_parameter and (at is None or one.parameters[at] is not held):
            one.why.append(f"{address} was exchanged since the step began")
        elif at is not None:
            if one.versions[at] != version_of(held) or FUSED_STEPS.last_of(held) > one.fused_steps:
                one.why.append(f"{address} was written since the step began")
            if not one.trained[at]:
                frozen_ones.add(address)
        elif address not in one.buffers:
            one.why.append(f"{address} came later than the step began, and is as it is after the forward")
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


def _grad_of(one: _Beginning, received: list[_Received]) -> torch.Tensor | None:
    """A copy of the gradient at a tensor of the output."""
    grads = [grad for grad, _ in received]
    if any(version_of(grad) != version for grad, version in received):
        one.why.append("the gradient at the output was written in place after it was given")
    if len(grads) > 1:
        one.why.append("several backward passes came to the output, of which the sum is kept")
        return torch.stack(grads).sum(0)
    return copies_of(grads)[0] if grads else None


def _pair(found: torch.Tensor | None) -> tuple[float, float] | None:
    return None if found is None else (float(found[0]), float(found[1]))
