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
from contextlib import suppress
from pathlib import Path
from threading import Thread, get_ident
from typing import Any
from weakref import ref

import torch
from torch import nn

from .._ir.memory import version_of
from .._ir.model_state import FUSED_STEPS
from .._ir.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    is_wrapped,
    without_any_modes,
    without_function_modes,
)
from .._ir.trees import freeze_deep
from .._store.objects import save
from .beginnings import (
    ANEW,
    Beginning,
    GivenInput,
    Output,
    Places,
    Receiver,
    copy_inputs,
    data_of,
    frozen_inputs,
    modes_now,
    numpy_state_kept,
)
from .judges import COOL_DOWN, NUMBERS, Above, Dead, Judge, StepNumbers, are_finite, judges_of
from .step_file import NOT_WRITTEN, Step, shown_text
from .targets import unwrapped_model

MOST_FORWARDS = 8  # of one step, of which beginnings are kept


class Keeper:
    """Keeps what a step began with, asks the judges, and writes the steps that are worth it.

    `when` is what `judges_of` takes; at most `alarms` files are written for it, and after each there is a cool-down of
    the judge that gave it: a hundred steps in which it finds nothing. `keep_every` writes every so many steps, `keep()`
    the one that runs. `told` is called with each Step when its file is complete, by the thread that wrote it. A user's
    judge that raises is asked no more; `faults` and a line on stderr say so.
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
        self._unproven = [one for one in self.judges if isinstance(one, Above)]  # nobody knows if they have numbers
        self._wants_norm = any(isinstance(one, Above) and "grad_norm" in one.bounds for one in self.judges)
        self.folder, self.most_alarms, self.keep_every = Path(folder), alarms, keep_every
        self.steps: tuple[Step, ...] = ()
        self.faults: list[str] = []
        self._model = ref(unwrapped_model(model)[0])
        self._takes_all_generators = rng == "all"
        self._told = told
        self._places: dict[int, tuple[ref[nn.Module], Places]] = {}  # by id
        self._beginnings: list[Beginning] = []
        self._wanted: str | None = None  # why the step that runs is to be kept
        self._alarms = 0
        self._loud: dict[int, int] = {}  # judges in their cool-down, by id, with the steps in which they found nothing
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
            copy_inputs(made)
        if len(self._beginnings) >= MOST_FORWARDS:
            self._make_room()
        self._beginnings.append(made)

    def _places_of(self, module: nn.Module) -> Places:
        known = self._places.get(id(module))
        if known is None or known[0]() is not module:
            known = ref(module), Places.of(module)
        elif known[1].forwards == 1 or known[1].forwards >= ANEW:  # a first forward may have added what it needs
            known = known[0], Places.of(module, known[1])
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

    def _is_skipped(self, pending: list[Beginning]) -> bool | None:
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

    def _beginning(self, places: Places, address: str, args: Any, kwargs: Any, step: int) -> Beginning:
        inputs: list[GivenInput] = []
        tree = frozen_inputs(args, kwargs, inputs)
        parameters = places.held_parameters()
        return Beginning(
            step,
            address,
            places,
            get_ident(),
            tree,
            inputs,
            parameters,
            [-1 if one is None else version_of(one) for one in parameters],
            [one is not None and one.requires_grad for one in parameters],
            FUSED_STEPS.count,
            [(inner := at()) is not None and inner.training for _, at in places.modules],
            places.copied_buffers() if places.buffers else {},
            places.attributes_now() if places.is_fresh or places.varying else {},
            places.generator_states(),
            random.getstate() if self._takes_all_generators else None,
            numpy_state_kept() if self._takes_all_generators else None,
            modes_now(places),
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

    def _note_output(self, one: Beginning, output: Any) -> None:
        is_judged = bool(self.judges)
        if type(output) is torch.Tensor:
            self._note_tensor(one, output, is_judged)
        else:
            freeze_deep(output, lambda tensor: self._note_tensor(one, tensor, is_judged))
        loss = _loss_in(output)
        if loss is not None and not is_wrapped(loss):
            one.loss_alone = loss.detach()

    def _note_tensor(self, one: Beginning, tensor: torch.Tensor, is_judged: bool) -> None:
        if is_wrapped(tensor):  # inside of a transform, which lets nothing out
            one.outputs.append(Output(None, -1, None, []))
            return
        made = Output.of(tensor, is_judged)
        one.outputs.append(made)
        if tensor.requires_grad:
            handle = tensor.register_hook(Receiver(made.received, one.arrivals, len(one.outputs) - 1))
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
        if self._unproven and is_reached:
            self._say_missing(numbers)
        if reason is not None:
            self._alarms, self._wanted = self._alarms + 1, None
        elif self._wanted is not None:
            reason, self._wanted = self._wanted, None
        elif is_reached and self.keep_every and step and step % self.keep_every == 0 and not pending[-1].is_judged:
            reason = f"kept every {self.keep_every} steps"
        for one in pending:
            one.is_judged = one.is_judged or is_reached
        if reason is not None:
            self._write(_worst(pending), numbers, reason)

    def _alarm(self, numbers: StepNumbers) -> str | None:
        """Why this step is an alarm, unless there were enough of them, or one for the same reason only just."""
        if not self.judges or self._alarms >= self.most_alarms:
            return None
        if self._wants_norm:  # which, if it is finite, says that all gradients are
            _ = numbers.grad_norm
        first = None
        for judge in [*self.judges]:
            reason = self._asked(judge, numbers)
            if (reason or self._loud) and self._is_ready(judge, bool(reason)):
                first = first or reason
        return first

    def _is_ready(self, judge: Judge, has_found: bool) -> bool:
        """Whether a judge may give an alarm. If it has found something, its cool-down begins anew."""
        quiet = self._loud.get(id(judge), COOL_DOWN)
        if has_found or quiet < COOL_DOWN:
            self._loud[id(judge)] = 0 if has_found else quiet + 1
        return quiet >= COOL_DOWN

    def _asked(self, judge: Judge, numbers: StepNumbers) -> str | None:
        try:
            return judge.reason(numbers)
        except Exception as error:
            self.judges.remove(judge)
            has = f" The numbers are {', '.join(('step', *NUMBERS))}." if _asks_for_more(error, numbers) else ""
            self._fault(f"{judge} raised {type(error).__name__}: {str(error)[:200]}; it is asked no more.{has}")
            return None

    def _say_missing(self, numbers: StepNumbers) -> None:
        """In the first step that had a backward pass: which numbers some judges would wait for in vain."""
        if numbers.had_backward:
            for judge in self._unproven:
                for fact in judge.missing(numbers):
                    self._fault(f"{fact}.")
            self._unproven = []

    def _fault(self, fact: str) -> None:
        self.faults.append(fact)
        with suppress(Exception):
            print(f"replaylens: when: {fact}", file=sys.stderr)

    def _parameters(self) -> list[torch.Tensor]:
        """The parameters of the model, each once."""
        model, latest = self._model(), self._beginnings[-1]
        if model is None or latest.places.module() is model:
            found, are_tied = latest.parameters, latest.places.are_tied
        else:
            places = self._places_of(model)
            found, are_tied = places.held_parameters(), places.are_tied
        held = [one for one in found if one is not None]
        return list({id(one): one for one in held}.values()) if are_tied else held

    def _names(self) -> dict[int, str]:
        """The addresses of the parameters, by id."""
        model = self._model()
        return {} if model is None else {id(one): name for name, one in model.named_parameters()}

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, one: Beginning, numbers: StepNumbers, reason: str) -> None:
        """Copy what the step began with, and have it written."""
        module, rank = one.places.module(), _rank()
        kind = "model" if module is None else type(module).__qualname__
        made = Step(one.step, shown_text(reason), kind, one.address, (), numbers.known, numbers.scale, rank)
        self.steps = (*self.steps, made)
        try:
            if module is None:
                raise RuntimeError("the model is gone")
            made.examples = one.bad_examples()
            made._data = data_of(one, module)
            made.why = tuple(dict.fromkeys(map(shown_text, one.why)))
            path = self._free_path(one.step, rank)
        except Exception as error:
            self._could_not(made, error)
            return
        thread = Thread(target=self._written, args=(made, path), name="replaylens step file")
        try:
            thread.start()
        except RuntimeError:  # Python ends, and starts no more of them
            self._written(made, path)
            return
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]

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
        step.why = (*step.why, f"{NOT_WRITTEN}: {type(error).__name__}: {shown_text(str(error))[:500]}")
        step._data = None
        self._tell(step)

    def _tell(self, step: Step) -> None:
        try:
            self._told(step)
        except Exception as error:
            self._fault(f"a step was kept, and telling of it raised {type(error).__name__}: {str(error)[:200]}")

    def _free_path(self, step: int, rank: int | None) -> str:
        """A path at which nothing is yet."""
        name = f"step-{step}" + ("" if rank is None else f"-rank{rank}")
        number, path = 1, str(self.folder / f"{name}.pt")
        while path in self._taken or os.path.lexists(path):
            number += 1
            path = str(self.folder / f"{name}-{number}.pt")
        self._taken.add(path)
        return path


def _unseen(work: Callable[..., None], *args: Any) -> None:
    """Do something that no mode of the user's sees."""
    if not (count_function_modes() or count_dispatch_modes()):
        return work(*args)
    with without_function_modes(), without_any_modes():
        return work(*args)


def _loss_in(output: Any) -> torch.Tensor | None:
    """The loss, if the model returned it: one number, alone, as `loss`, or first in a tuple with a gradient to come."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    found: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0] if getattr(output[0], "requires_grad", False) else None
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _asks_for_more(error: Exception, numbers: StepNumbers) -> bool:
    """True where a function asked for a number that there is not."""
    return isinstance(error, AttributeError) and error.obj is numbers


def _worst(beginnings: list[Beginning]) -> Beginning:
    """The forward to keep: one whose output is not finite, else one that got such a gradient, else the latest."""
    for one in beginnings:
        if one.is_over and not one.is_finite():
            return one
    for one in beginnings:
        if not are_finite(one.output_grads()):
            return one
    return next((one for one in reversed(beginnings) if one.is_over), beginnings[-1])


def _scale_of(scaler: Any) -> float | None:
    return float(scaler.get_scale()) if scaler.is_enabled() else None


def _rank() -> int | None:
    """The number of this process among several that train together."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return int(distributed.get_rank()) if distributed.get_world_size() > 1 else None
