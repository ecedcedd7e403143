"""Which call draws random numbers, and the generator's state before it.

In: a call that may draw. Out: the state of the generator that it draws from, if it moved. The state is kept before each
draw, so that seeding inside the forward, forks of the generator and draws that nobody sees are harmless.
"""

from __future__ import annotations

from typing import Any

import torch

from .._replay.interpreter import one_draws

_DROPOUTS = frozenset(
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout".split()
)
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())


def is_idle(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does this call surely draw nothing, although its kind may? Dropout in evaluation is the common one."""
    if name in _DROPOUTS:
        return not (args[2] if len(args) > 2 else kwargs.get("train", kwargs.get("training", True)))
    if name == "scaled_dot_product_attention":
        return not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if name in _RECURRENT:  # input, hidden, parameters, has_biases, layers, dropout, training; packed: one more before
        floats = [value for value in args if type(value) is float]
        return bool(floats) and not floats[0]
    return False


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a call draws from: the one it is given, else the default one of its device."""
    for value in (kwargs.get("generator"), *args):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device") or next((value.device for value in args if isinstance(value, torch.Tensor)), None)
    return default_generator(torch.device(device) if device is not None else None)


def default_generator(device: torch.device | None) -> torch.Generator:
    """The generator that a call without one draws from on this device."""
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.default_generators[device.index or torch.cuda.current_device()]
    return torch.default_generator


class Draws:
    """The states before each draw, by key, and of each generator the state in which it was met first."""

    def __init__(
        self, kept: dict[str, torch.Tensor], at_first: dict[int, tuple[torch.Generator, torch.Tensor]]
    ) -> None:
        self.kept, self.at_first = kept, at_first

    def around(self, may_draw: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        """To be entered around a call. Afterwards its `key` names the state that the call began with, if it drew."""
        if not may_draw or is_idle(func.__name__, args, kwargs):
            return _NO_DRAW
        return Draw(self, generator_of(args, kwargs))

    def keep(self, generator: torch.Generator, state: torch.Tensor) -> str | None:
        """The key of the state before a call, or None if the call drew nothing."""
        if torch.equal(state, generator.get_state()):
            return None
        self.at_first.setdefault(id(generator), (generator, state))
        key = f"draw_{len(self.kept) + 1}"
        self.kept[key] = state
        return key


class Draw:
    """One call that may draw. No other thread's capture or replay sets the generator between its state and its draw."""

    def __init__(self, draws: Draws | None, generator: torch.Generator) -> None:
        self.draws, self.generator = draws, generator
        self.state: torch.Tensor | None = None
        self.key: str | None = None

    def __enter__(self) -> Draw:
        if self.draws is not None:
            one_draws.acquire()
            self.state = self.generator.get_state()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.draws is not None and self.state is not None:
            try:
                self.key = self.draws.keep(self.generator, self.state)
            finally:
                one_draws.release()


_NO_DRAW = Draw(None, torch.default_generator)
