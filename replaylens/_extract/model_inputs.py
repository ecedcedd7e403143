"""How a model is called with a batch: which part of it is the input, and which are labels of its rows.

In: a batch as the data give it, and what the model's forward takes. Out: arguments, keywords, and the numbers that the
batch has for each row besides. Tensors are put where a copy in another process would lie as well, at a round address,
as kernels may give other bits elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

from .._ir.graph import Graph
from ..errors import BadSource
from .data_source import batch_tensors, rows_of
from .numpy_later import np

ROUND = 64  # bytes


@frozen(eq=False)
class Call:
    """One call of the model: its arguments, how many rows they hold, and numbers that belong to these rows."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    labels: dict[str, np.ndarray[Any, Any]] = field(factory=dict)


@frozen(eq=False)
class Forward:
    """What the forward of a model takes."""

    required: int | None  # positional arguments without a default; None if nothing is known
    names: frozenset[str] = frozenset()  # keywords
    takes_any: bool = False  # other keywords as well
    device: torch.device | None = None

    @staticmethod
    def of(model: Any) -> Forward:
        graph = getattr(model, "graph", None)
        if not isinstance(model, torch.nn.Module) and isinstance(graph, Graph):  # a program
            args, kwargs = graph.inputs
            return Forward(len(_items(args)), frozenset(kwargs.keys or ()))
        device = _device(model)
        try:
            called = model.forward if isinstance(model, torch.nn.Module) else model
            found = inspect.signature(called).parameters.values()
        except (TypeError, ValueError):
            return Forward(None, takes_any=True, device=device)
        kinds = {one.kind for one in found}
        positional = [one for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        names = {one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        required = len([one for one in positional if one.default is one.empty])
        return Forward(
            None if inspect.Parameter.VAR_POSITIONAL in kinds else required,
            frozenset(names),
            inspect.Parameter.VAR_KEYWORD in kinds,
            device,
        )


def _items(args: Any) -> tuple[Any, ...]:
    return args if isinstance(args, tuple) else args.items


def _device(model: Any) -> torch.device | None:
    """The device of a model that has one."""
    found = {one.device for one in model.parameters()} if isinstance(model, torch.nn.Module) else set()
    return found.pop() if len(found) == 1 else None


def call_with(given: Any, forward: Forward, inputs: Any, rows: int | None = None) -> Call:
    """The call of the model for a batch. `inputs` is what the user says of which part is its input."""
    args, kwargs, rest = _split(given, forward, inputs)
    count = rows_of(given) if rows is None else rows
    found = [len(one) for one in batch_tensors([args, kwargs])]
    if count not in found:
        raise BadSource(
            f"a batch has {count} rows, and the model is given tensors of {', '.join(map(str, found)) or 'none'}. The "
            "first axis of its inputs must be that of the rows, and a collate_fn must keep all of them."
        )
    labels = {key: one for key, value in rest.items() if (one := _numbers(value, count)) is not None}
    ready = [_placed(one, forward.device) for one in args]
    words = {key: _placed(one, forward.device) for key, one in kwargs.items()}
    return Call(tuple(ready), words, count, labels)


def _split(given: Any, forward: Forward, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Arguments, keywords, and the rest by name."""
    if inputs is not None:
        return _chosen(given, inputs)
    if isinstance(given, Mapping):
        taken = {key: value for key, value in given.items() if key in forward.names}
        if not taken and forward.takes_any:
            taken = {key: value for key, value in given.items() if _is_tensor(value)}
        if not taken:
            words = f"takes {', '.join(sorted(forward.names))}" if forward.names else "takes no keywords"
            raise BadSource(
                f"the batch has {', '.join(map(repr, given))}, and the model {words}. Say which is its input: "
                f"inputs={next(iter(given), '')!r}, or a function of the batch."
            )
        return (), taken, {key: value for key, value in given.items() if key not in taken}
    if not isinstance(given, (tuple, list)):
        return (given,), {}, {}
    if len(given) == 1 or forward.required == len(given):
        return tuple(given), {}, {}
    if len(given) == 2 and forward.required == 1:
        return (given[0],), {}, {"target": given[1]}
    raise BadSource(
        f"a batch holds {len(given)} things, and the model {_takes(forward)}. Say which is its input: inputs=0, or a "
        "function of the batch, such as inputs=lambda batch: batch[:2]."
    )


def _chosen(given: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Arguments, keywords, and the rest, as `inputs=` says: one key, a list of them, or a function of the batch."""
    if callable(inputs):
        made = inputs(given)
        if isinstance(made, Mapping):
            return (), dict(made), {}
        return (tuple(made) if isinstance(made, (tuple, list)) else (made,)), {}, {}
    keys = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    try:
        found = {key: given[key] for key in keys}
    except (KeyError, IndexError, TypeError) as error:
        raise BadSource(f"inputs={inputs!r} is not in the batch: {type(error).__name__}: {error}.") from error
    if isinstance(given, Mapping):
        rest = {key: value for key, value in given.items() if key not in found}
        return ((), found, rest) if isinstance(inputs, (list, tuple)) else (tuple(found.values()), {}, rest)
    others = [one for place, one in enumerate(given) if place not in {key % len(given) for key in keys}]
    return tuple(found.values()), {}, {"target": others[0]} if len(others) == 1 else {}


def _takes(forward: Forward) -> str:
    return "takes any number of them" if forward.required is None else f"needs {forward.required}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _numbers(value: Any, rows: int) -> np.ndarray[Any, Any] | None:
    """One number a row, if it is that."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()
    is_row = isinstance(value, np.ndarray) and value.shape == (rows,) and value.dtype.kind in "biuf"
    return value if is_row else None


def _placed(value: Any, device: torch.device | None) -> Any:
    """The tensors of a value on the device of the model, each at a round address."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, torch.Tensor):
        if device is not None and value.device != device:
            return value.to(device)
        if value.layout is not torch.strided or value.device.type != "cpu":
            return value
        # A part of a larger tensor lies elsewhere in its memory than the first batch did, which models can ask about.
        return value.clone() if value.storage_offset() or value.data_ptr() % ROUND else value
    if type(value) is dict:
        return {key: _placed(one, device) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_placed(one, device) for one in value])
    return value
