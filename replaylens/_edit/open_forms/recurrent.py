"""Recurrent networks as the open torch operations that `torch.lstm`, `torch.gru` and their relatives stand for.

In: the arguments of a fused function, for padded or packed sequences. Out: what it returns, and names for what it
hides: for each layer and direction (`l0`, `l0_reverse`, as torch names its parameters) the steps in the order in which
they run, backwards in the reverse direction, and in each step `hidden`, `cell`, `forget_gate` ... Plain functions of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from .attention import Opened

States = tuple[Tensor, ...]  # (hidden,) or, for an LSTM, (hidden, cell)
Named = dict[str, Tensor]


class Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None


# ---- one step: what the input gives to the gates, the states before -> what the step makes, by name ------------------


def lstm_step(given: Tensor, states: States, weights: Weights) -> Named:
    """Input, forget, candidate and output gates; the new cell and hidden state."""
    hidden, cell = states
    recurrent = linear(hidden, weights.hh, weights.bias_hh)
    entering, forgetting, new, leaving = (given + recurrent).chunk(4, -1)
    made = {
        "recurrent": recurrent,
        "input_gate": entering.sigmoid(),
        "forget_gate": forgetting.sigmoid(),
        "candidate": new.tanh(),
        "output_gate": leaving.sigmoid(),
    }
    made["cell"] = made["forget_gate"] * cell + made["input_gate"] * made["candidate"]
    made["hidden"] = made["output_gate"] * made["cell"].tanh()
    if weights.hr is not None:
        made["unprojected"], made["hidden"] = made["hidden"], linear(made["hidden"], weights.hr)
    return made


def gru_step(given: Tensor, states: States, weights: Weights) -> Named:
    """Reset and update gates, the candidate, the new hidden state."""
    (hidden,) = states
    recurrent = linear(hidden, weights.hh, weights.bias_hh)
    reset_in, update_in, new_in = given.chunk(3, -1)
    reset_hidden, update_hidden, new_hidden = recurrent.chunk(3, -1)
    reset_gate = (reset_in + reset_hidden).sigmoid()
    update_gate = (update_in + update_hidden).sigmoid()
    candidate = (new_in + reset_gate * new_hidden).tanh()
    return {
        "recurrent": recurrent,
        "reset_gate": reset_gate,
        "update_gate": update_gate,
        "candidate": candidate,
        "hidden": candidate + update_gate * (hidden - candidate),
    }


def tanh_step(given: Tensor, states: States, weights: Weights) -> Named:
    """The sum of what input and state give, squashed."""
    recurrent = linear(states[0], weights.hh, weights.bias_hh)
    return {"recurrent": recurrent, "hidden": (given + recurrent).tanh()}


def relu_step(given: Tensor, states: States, weights: Weights) -> Named:
    """The sum of what input and state give, rectified."""
    recurrent = linear(states[0], weights.hh, weights.bias_hh)
    return {"recurrent": recurrent, "hidden": (given + recurrent).relu()}


Step = Callable[[Tensor, States, Weights], Named]


# ---- the fused functions -----------------------------------------------------------------------------------------


def network(step: Step) -> Callable[..., Opened]:
    """`torch.lstm` and its relatives: all outputs, then the last states. In the overload for packed sequences, their
    batch sizes come second.
    """

    def opened(*args: Any, **kwargs: Any) -> Opened:
        second = args[1] if len(args) > 1 else None
        is_packed = "batch_sizes" in kwargs or (isinstance(second, Tensor) and not second.is_floating_point())
        outputs, states, named = (_packed if is_packed else _padded)(step, *args, **kwargs)
        return Opened((outputs, *states), named)

    return opened


def cell(step: Step) -> Callable[..., Opened]:
    """`torch.lstm_cell` and its relatives: one step."""

    def opened(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Opened:
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        made = step(linear(input, w_ih, b_ih), states, Weights(w_ih, w_hh, b_ih, b_hh))
        return Opened((made["hidden"], made["cell"]) if "cell" in made else made["hidden"], dict(made))

    return opened


# ---- layers, directions, steps -----------------------------------------------------------------------------------


def _padded(
    step: Step,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, States, dict[str, list[Named]]]:
    inputs = input.transpose(0, 1) if batch_first else input
    options = has_biases, num_layers, dropout if train else 0.0, bidirectional
    outputs, last, named = _stack(step, inputs, Tensor.unbind, torch.stack, hx, params, *options)
    return outputs.transpose(0, 1) if batch_first else outputs, last, named


def _packed(
    step: Step,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, States, dict[str, list[Named]]]:
    """Sequences of several lengths, the longest first: step t covers the first `batch_sizes[t]` of them."""
    sizes = batch_sizes.tolist()
    options = has_biases, num_layers, dropout if train else 0.0, bidirectional
    return _stack(step, data, lambda rows: rows.split(sizes), torch.cat, hx, params, *options)


def _stack(
    step: Step,
    inputs: Tensor,
    part: Callable[[Tensor], Sequence[Tensor]],
    join: Callable[[list[Tensor]], Tensor],
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    p: float,
    bidirectional: bool,
) -> tuple[Tensor, States, dict[str, list[Named]]]:
    """Layer upon layer. `part` splits all inputs into those of the steps, `join` is its inverse."""
    directions = ("", "_reverse") if bidirectional else ("",)
    begun = list(zip(*[state.unbind() for state in ((hx,) if isinstance(hx, Tensor) else hx)], strict=True))
    weights = _weights(params, has_biases, len(begun))
    last: list[States] = []
    named: dict[str, list[Named]] = {}
    for layer in range(num_layers):
        halves = []
        for direction in directions:
            own = weights[len(last)]
            given = list(part(linear(inputs, own.ih, own.bias_ih)))
            steps, states = _run_layer(step, given[::-1] if direction else given, begun[len(last)], own)
            last.append(states)
            hidden = [made["hidden"] for made in steps]
            halves.append(join(hidden[::-1] if direction else hidden))
            named[f"l{layer}{direction}"] = steps
        inputs = torch.cat(halves, -1) if bidirectional else halves[0]
        if p > 0 and layer < num_layers - 1:
            inputs = dropout(inputs, p)
    return inputs, tuple([torch.stack(states) for states in zip(*last, strict=True)]), named


def _weights(params: Sequence[Tensor], has_biases: bool, count: int) -> list[Weights]:
    """The flat list of parameters by layer and direction. An LSTM's projection is an additional one in each."""
    each = len(params) // count
    rows = [tuple(params[n * each : (n + 1) * each]) for n in range(count)]
    if has_biases:
        return [Weights(*row) for row in rows]
    return [Weights(row[0], row[1], None, None, *row[2:]) for row in rows]


def _run_layer(step: Step, inputs: list[Tensor], states: States, weights: Weights) -> tuple[list[Named], States]:
    """Step after step. Sequences that end leave the batch at its end; those that begin later join there."""
    begun, steps = states, []
    over: list[States] = []
    states = tuple([state[: len(inputs[0])] for state in begun]) if len(inputs[0]) < len(begun[0]) else begun
    for given in inputs:
        before, now = len(states[0]), len(given)
        if now < before:
            over.append(tuple([state[now:] for state in states]))
            states = tuple([state[:now] for state in states])
        if now > before:
            joining = [(state, first[before:now]) for state, first in zip(states, begun, strict=True)]
            states = tuple([torch.cat(pair) for pair in joining])
        made = step(given, states, weights)
        steps.append(made)
        states = (made["hidden"], made["cell"]) if len(begun) > 1 else (made["hidden"],)
    if over:
        states = tuple([torch.cat([state, *ended]) for state, *ended in zip(states, *reversed(over), strict=True)])
    return steps, states
