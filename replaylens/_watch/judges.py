"""When is a step worth keeping? Judges look at the numbers of a step: `when=[NotFinite(), Above(grad_norm=1e3)]`.

In: StepNumbers, each number computed when somebody first asks for it. Out: a reason in words, or None. A comparison
with NaN is False in Python, so that `norm > 1e3` lets a NaN pass: `Above` does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import nn
from torch.nn.utils import get_total_norm

from .._ir.util import cached_property

GRADIENTS = ("grad_norm", "output_grad")  # what a GradScaler may make overflow without harm
NUMBERS = ("output", "loss", "weight", *GRADIENTS)
_WITHOUT: dict[str, str] = {  # why a step has no such number
    "output": "the model returned no tensor of floating-point numbers",
    "loss": "the model returned no loss: not one number alone, nor as `loss`, nor as the first of a tuple",
    "weight": "the model has no parameters",
    "grad_norm": "no parameter of the model got a gradient",
    "output_grad": "no gradient came back to what the model returned",
}


class Forward(Protocol):
    """One forward of the step: what is known of its output."""

    def is_finite(self) -> bool:
        """True if no number in the output is a NaN or an infinity."""

    def sum_of_output(self) -> complex:
        """A number that is finite only if all of the output is; it may have overflowed."""

    def output_extremes(self) -> list[torch.Tensor]:
        """The least and the most of each tensor in the output."""

    def loss(self) -> torch.Tensor | None:
        """The loss, where the model returns it."""

    def output_grads(self) -> list[torch.Tensor]:
        """The gradients that came back to the output."""


# -- the numbers of a step ---------------------------------------------------------------------------------------------


class StepNumbers:
    """The numbers of one training step, before the optimizer takes it: what a function gets that is given as `when=`.

    Of the whole step, each computed when it is first asked for; a float, NaN where a NaN is among what it was made of,
    None where there is nothing to make it of:

    `loss`         the loss, if the model returns it: alone, as `loss`, or first in a tuple (of the last forward)
    `output`       the largest magnitude in what the model returned
    `output_grad`  the largest magnitude in the gradient that came back to it
    `grad_norm`    the norm of all gradients of parameters, as the optimizer gets them: summed up, averaged, clipped
    `weight`       the largest magnitude among the parameters

    Besides: `step`, its number; `has_finite_output`; `gradients`, those of the parameters, and `named_gradients`, with
    their addresses; `broken_gradients`, the addresses of those that are not finite; `largest_gradient()`, the address
    and norm of one; `scale`, by which a GradScaler multiplied the loss, and `skipped`, how many steps in a row it let
    no optimizer take. Gradients are the training's own tensors, to be read only.

    `when=lambda numbers: numbers.step > 500 and numbers.loss is not None and numbers.loss > 3`
    """

    def __init__(
        self,
        step: int,
        parameters: Callable[[], Sequence[torch.Tensor]],
        names: Callable[[], Mapping[int, str]],
        forwards: Sequence[Forward] = (),
        scale: float | None = None,
        skipped: int = 0,
    ) -> None:
        self.step = step
        self.scale = scale  # by which a GradScaler multiplied the loss
        self.skipped = skipped  # how many steps in a row, up to this one, a GradScaler has not let the optimizer take
        self._all_parameters, self._names = parameters, names
        self._forwards = forwards

    @property
    def has_finite_output(self) -> bool:
        """Whether all that the model returned is finite."""
        return all(forward.is_finite() for forward in self._forwards)

    @property
    def is_surely_finite(self) -> bool:
        """True if one quick look tells that output and gradients are finite. False tells nothing."""
        total: complex = 0.0
        if "grad_norm" in vars(self):
            total += self.grad_norm if self.grad_norm is not None else math.nan
        elif not self.gradients or not self.gradients[0].is_cpu:
            return False
        else:
            for gradient in self.gradients:
                total += gradient.sum().item()
        for forward in self._forwards:
            total += forward.sum_of_output()
        return total - total == 0

    @cached_property
    def output(self) -> float | None:
        """The largest magnitude in what the model returned."""
        return largest([pair for forward in self._forwards for pair in forward.output_extremes()])

    @cached_property
    def loss(self) -> float | None:
        """The loss, where the model returns it: alone, as `loss`, or first in a tuple."""
        losses = [loss for forward in self._forwards if (loss := forward.loss()) is not None]
        return float(losses[-1]) if losses else None

    @cached_property
    def output_grad(self) -> float | None:
        """The largest magnitude in the gradient that came back to the output."""
        return largest([extremes(grad) for forward in self._forwards for grad in forward.output_grads()])

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of parameters, as the optimizer gets them: summed up, averaged, clipped."""
        return norm_of(self.gradients)

    @cached_property
    def weight(self) -> float | None:
        """The largest magnitude among the parameters."""
        return largest([extremes(local(tensor.detach())) for tensor in self._all_parameters()])

    @cached_property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the parameters."""
        grads = [grad for one in self._all_parameters() if (grad := one.grad) is not None]
        return grads if all(type(grad) is torch.Tensor for grad in grads) else list(map(local, grads))

    @property
    def named_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The same with the addresses of the parameters."""
        names = self._names()
        held = [one for one in self._all_parameters() if one.grad is not None]
        return [(names.get(id(one), "?"), grad) for one, grad in zip(held, self.gradients, strict=True)]

    @property
    def broken_gradients(self) -> tuple[str, ...]:
        """The parameters in whose gradients a number is not finite."""
        if "grad_norm" in vars(self) and math.isfinite(self.grad_norm or 0.0):
            return ()
        if are_finite(self.gradients):
            return ()
        return tuple([name for name, gradient in self.named_gradients if not is_finite(gradient)])

    @property
    def had_backward(self) -> bool:
        """True if a gradient came to a parameter, or to the output."""
        return bool(self.gradients) or any(forward.output_grads() for forward in self._forwards)

    @property
    def known(self) -> dict[str, float]:
        """The numbers that were asked for so far."""
        pairs = ((name, vars(self).get(name)) for name in NUMBERS)
        return {name: value for name, value in pairs if value is not None}

    def largest_gradient(self) -> tuple[str, float] | None:
        """The parameter whose gradient has the largest norm, and that norm; one with a NaN, if there is one."""
        norms = [(name, norm_of([gradient]) or 0.0) for name, gradient in self.named_gradients]
        return max(norms, key=lambda pair: (math.isnan(pair[1]), pair[1]), default=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor that is spread over several."""
    if type(tensor) is torch.Tensor:
        return tensor
    part: Any = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def _numbers_in(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, dense and real."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def extremes(tensor: torch.Tensor) -> torch.Tensor:
    """The least and the most of a tensor; NaN twice if one is in it, as no other cheap reduction tells for sure."""
    numbers = _numbers_in(tensor)
    if not numbers.numel():
        return numbers.new_zeros(2)
    return torch.stack(torch.aminmax(numbers))


def largest(pairs: Iterable[torch.Tensor]) -> float | None:
    """The largest magnitude among some extremes."""
    found = [abs(float(one)) for pair in pairs for one in pair]
    return (math.nan if any(map(math.isnan, found)) else max(found)) if found else None


def is_finite(tensor: torch.Tensor) -> bool:
    """True if each number in it is finite."""
    return bool(torch.isfinite(extremes(tensor)).all())


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """True if each number in all of them is finite. A sum is finite only if all that it is made of is, and quick; one
    that is not may have overflowed.
    """
    if not tensors:
        return True
    if tensors[0].is_cpu:
        suspects = [tensor for tensor in tensors if not _is_finite_number(tensor.sum().item())]
    else:  # one kernel for all, and one wait
        suspects = [] if math.isfinite(float(get_total_norm([_numbers_in(one) for one in tensors]))) else [*tensors]
    return all(map(is_finite, suspects))


def _is_finite_number(number: complex) -> bool:
    return number - number == 0


def norm_of(tensors: Sequence[torch.Tensor]) -> float | None:
    """The norm of all numbers in them; None if there are none."""
    if not tensors:
        return None
    plain = [_numbers_in(one) if one.is_complex() or one.layout is not torch.strided else one for one in tensors]
    if plain[0].is_cpu:
        norms = [float(torch.linalg.vector_norm(one)) for one in plain]
        found = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
    else:  # few kernels, and one wait
        found = float(get_total_norm(plain))
    if math.isinf(found) and all(map(is_finite, plain)):  # squares overflow long before numbers do
        return math.hypot(*[float(torch.linalg.vector_norm(one, dtype=torch.float64)) for one in plain])
    return found


# -- judges ------------------------------------------------------------------------------------------------------------


COOL_DOWN = 100  # steps without an alarm of a judge, until it can give another


class Judge(Protocol):
    """Says whether a step is worth keeping. Between two alarms of one judge lie a hundred steps in which it finds
    nothing; others are not held up by it. `alarms=` counts the files of all.
    """

    def reason(self, numbers: StepNumbers) -> str | None:
        """Why the step is to be kept; None if it is not."""


@frozen
class NotFinite:
    """A NaN or an infinity in the output, in the gradient that came back to it, or in the gradient of a parameter.

    It is one alarm however long the weights are poisoned from then on: the next comes after a hundred steps in which
    all is finite.

    Under a GradScaler gradients overflow now and then: the step is skipped, the scale is halved, and nothing is wrong.
    So a skipped step counts if its output is not finite, if the scale itself is not, or if it is the last of `skips`
    in a row.
    """

    skips: int = 10

    def reason(self, numbers: StepNumbers) -> str | None:
        """What is not finite, from the output back to the weights."""
        if not numbers.skipped and numbers.is_surely_finite:
            return None
        if not numbers.has_finite_output:
            return f"the output has {_kind(numbers.output or math.inf)}"
        if numbers.skipped:
            return self._of_skipped(numbers)
        if broken := numbers.broken_gradients:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            back = numbers.output_grad
            born = "" if back is None or math.isfinite(back) else f"; so has the gradient at the output {_kind(back)}"
            return f"the gradient of {broken[0]}{more} is not finite{born}"
        back = None if numbers.gradients else numbers.output_grad
        return None if back is None or math.isfinite(back) else f"the gradient at the output has {_kind(back)}"

    def _of_skipped(self, numbers: StepNumbers) -> str | None:
        if numbers.scale is not None and not math.isfinite(numbers.scale):
            return f"the scale of the loss is {numbers.scale}"
        if numbers.skipped >= self.skips:
            return f"the gradients overflowed, and the GradScaler skipped the step, {numbers.skipped} times in a row"
        return None


def _kind(number: float) -> str:
    return "a NaN" if math.isnan(number) else "an infinity"


class Above:
    """A number of the step is above a bound, or is NaN: `Above(grad_norm=1e3)`.

    Numbers are `grad_norm` (of all parameters, as the optimizer gets it: after clipping), `output_grad` and `output`
    (the largest magnitude), `loss` (where the model returns it: alone, as `loss`, or first in a tuple), `weight`. Of
    several, one is enough. Gradients of a step that a GradScaler skipped are passed over. Where the first step with a
    backward pass lacks a number, that is said once.
    """

    def __init__(self, **bounds: Any) -> None:
        for name, bound in bounds.items():
            if name not in NUMBERS:
                raise TypeError(f"Above knows no number {name!r}. It knows {', '.join(NUMBERS)}.")
            if not isinstance(bound, (int, float)) or math.isnan(bound):
                raise TypeError(f"Above({name}=...) takes a number, not {bound!r:.60}.")
        if not bounds:
            raise TypeError(f"Above takes a bound for one of {', '.join(NUMBERS)}: Above(grad_norm=1e3).")
        self.bounds: dict[str, float] = bounds

    def reason(self, numbers: StepNumbers) -> str | None:
        """Which number is above its bound."""
        for name, bound in self.bounds.items():
            if numbers.skipped and name in GRADIENTS:
                continue
            value: float | None = getattr(numbers, name)
            if value is not None and not value <= bound:
                return f"{name} is {value:.4g}, above {bound:.4g}{_which(name, numbers)}"
        return None

    def missing(self, numbers: StepNumbers) -> Iterator[str]:
        """Each number that the step lacks, with the reason."""
        for name in self.bounds:
            if getattr(numbers, name) is None:
                yield f"Above({name}=...) has nothing to judge: {_WITHOUT[name]}"

    def __repr__(self) -> str:
        return f"Above({', '.join(f'{name}={bound!r}' for name, bound in self.bounds.items())})"


def _which(name: str, numbers: StepNumbers) -> str:
    found = numbers.largest_gradient() if name == "grad_norm" else None
    return f"; the largest gradient is that of {found[0]}, {found[1]:.4g}" if found is not None else ""


@define(eq=False)
class _Units:
    """The units of one layer: which of them have been something else than zero, and how often each was looked at."""

    alive: torch.Tensor
    looks: int


_WITH_ZEROS = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardswish, nn.Hardshrink, nn.Softshrink)


@define(eq=False)
class Dead:
    """More than a share of the units of a layer are dead: `Dead(0.9)`.

    A dead unit gives exactly zero whatever it is shown. That one example leaves a unit at zero says nothing, so a unit
    counts as dead once at least `looks` of its values, in one batch or over several samples, were all zero. A unit is
    a feature: the last axis, or the second one of what a convolution gives (four axes and more); `axis` says another.
    Looked at are modules that can give exact zeros, such as ReLU, in the steps that the watch samples; `layers` names
    others by a function of address and module.
    """

    share: float = 0.9
    looks: int = 100
    axis: int | None = None
    layers: Callable[[str, nn.Module], bool] | None = None
    _units: dict[str, _Units] = field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"Dead takes a share from 0 to below 1, not {self.share!r}: Dead(0.9).")

    def __copy__(self) -> Dead:
        return Dead(self.share, self.looks, self.axis, self.layers)  # which has seen nothing yet

    def looks_at(self, address: str, module: nn.Module) -> bool:
        """True for a module whose activations it needs."""
        return isinstance(module, _WITH_ZEROS) if self.layers is None else bool(self.layers(address, module))

    def activation(self, name: str, tensor: torch.Tensor) -> None:
        """Take note of the activation of a layer in a sampled step."""
        if tensor.dim() < 1 or not tensor.numel():
            return
        axis = self.axis if self.axis is not None else 1 if tensor.dim() > 3 else -1
        others = [at for at in range(tensor.dim()) if at != axis % tensor.dim()]
        alive = torch.any(tensor.detach(), dim=others) if others else tensor.detach() != 0
        known = self._units.get(name)
        looks = tensor.numel() // alive.numel()
        if known is not None and known.alive.shape == alive.shape:
            alive, looks = known.alive | alive, known.looks + looks
        self._units[name] = _Units(alive, looks)

    def reason(self, numbers: StepNumbers) -> str | None:
        """The first layer that has too many dead units. What was looked at often enough begins anew."""
        ready = {name: units for name, units in self._units.items() if units.looks >= self.looks}
        for name, units in ready.items():
            del self._units[name]
            count = int((~units.alive).sum())
            if count > self.share * units.alive.numel():
                return (
                    f"{count} of {units.alive.numel()} units of {name} are dead: each was zero in all of its last "
                    f"{units.looks} values"
                )
        return None


@define(eq=False)
class Told:
    """A function of the user's: it gets the numbers, and returns whether the step is to be kept, or why."""

    function: Callable[[StepNumbers], Any]

    def __repr__(self) -> str:
        return str(getattr(self.function, "__name__", "the function of when="))

    def reason(self, numbers: StepNumbers) -> str | None:
        """What the function says."""
        said = self.function(numbers)
        if isinstance(said, str):
            return said or None
        return f"{self} says so" if bool(said) else None


def judges_of(when: Any) -> tuple[Judge, ...]:
    """The judges that `when=` means: one, a function of the numbers of a step, or several of these."""
    if when is None:
        return ()
    if isinstance(when, (list, tuple)):
        return tuple([judge for one in when for judge in judges_of(one)])
    if when in (NotFinite, Above, Dead):
        raise TypeError(f"when={when.__name__} is a class: write {when.__name__}(...).")
    if callable(getattr(when, "reason", None)):
        return (copy(when),)  # each watch has what its own samples showed
    if callable(when):
        return (Told(when),)
    raise TypeError(
        f"when= takes NotFinite(), Above(grad_norm=1e3), Dead(0.9), a function or a list, not {when!r:.60}."
    )
