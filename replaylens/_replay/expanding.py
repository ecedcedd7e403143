"""Fused operations opened: their open forms recorded on what the operations were given, and put in their places.

In: a Record, the calls, and a way to record a function. Out: the Record of the expanded program, and what it returns.
Which operations stand for a fused one is said in `_edit`; how a function is recorded is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import evolve

from .._core.graph import Graph
from .._core.node import Call, Ref, meanings_of, refs_of
from .._core.tolerances import REARRANGED, REARRANGED_NARROW
from .._core.trees import thaw
from .._edit.expand import as_called, expand as expanded
from ..errors import ReplaylensError
from .derive import Added, derive
from .guards import diverged
from .interpreter import modes, recorded_world
from .keeping import with_values
from .record import Record
from .rounding import departures_beyond_rounding

Recorder = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Record]


def expand(
    record: Record, names: Iterable[str], recorder: Recorder, on_divergence: str = "raise"
) -> tuple[Record, Any]:
    """The program with these calls opened. Numbers that left torch may differ as rounding lets them."""
    whole = with_values(record, [ref for name in names for ref in _around(record.graph, name)])
    graph, seen = record.graph, {name: _seen(whole, record.graph[name], recorder) for name in names}
    of_model = {id(tensor): Ref(name) for name, tensor in record.live.items()}
    shared: dict[str, dict[Ref, Ref]] = {}
    for name, look in seen.items():
        own = {Ref(node.name): of_model.get(id(look.values[Ref(node.name)])) for node in look.graph.const_nodes}
        shared[name] = {inner: ref for inner, ref in own.items() if ref is not None}
    made = expanded(graph, {name: look.graph for name, look in seen.items()}, shared)
    constants = {
        made.names[name][node.name]: look.values[Ref(node.name)]
        for name, look in seen.items()
        for node in look.graph.const_nodes
        if Ref(node.name) not in shared[name]
    }
    draws = {made.draws[name][key]: state for name, look in seen.items() for key, state in look.draws.items()}
    found, output = derive(record, made.graph, Added(constants, draws=draws), "ignore")
    if on_divergence == "raise" and (away := next(departures_beyond_rounding(record, found), None)) is not None:
        raise diverged(away)
    return found, output


def _around(graph: Graph, name: str) -> tuple[Ref, ...]:
    """The values that a call reads and gives."""
    return *graph.refs[graph.positions[name]], *refs_of(graph[name])


def _seen(record: Record, call: Any, recorder: Recorder) -> Record:
    """What a call's open form does on what the call was given, in its modes and with its draws."""
    assert isinstance(call, Call)
    given: dict[Ref, torch.Tensor] = {}  # one tensor for each value, and none for two

    def leaf(value: Any) -> Any:
        return given.setdefault(value, record.value(value).detach()) if type(value) is Ref else value

    args, kwargs = thaw(call.args, leaf), {key: thaw(value, leaf) for key, value in call.kwargs}
    with recorded_world(call.draws is not None, record.graph), modes(call.context):
        if call.draws is not None:
            torch.default_generator.set_state(record.draws[call.draws])
        seen = recorder(as_called(call), args, kwargs)
    for made, ref in zip(seen.graph.output[0].items, meanings_of(call), strict=True):
        _require_same(call, seen.values[made], record.value(ref))
    held = {Ref(node.name): seen.values[Ref(node.name)] for node in seen.graph.const_nodes}
    return evolve(seen, values=held)  # the rest comes again when the program is derived


def _require_same(call: Call, made: torch.Tensor, recorded: torch.Tensor) -> None:
    """Refuse an open form that does not give what the call gave: a kernel may draw its random numbers otherwise."""
    is_rough = bool(call.context.autocast) or recorded.dtype in (torch.float16, torch.bfloat16)
    both = made.detach().isfinite() & recorded.detach().isfinite()
    if not both.any():
        return
    away = float((made.detach() - recorded.detach())[both].abs().max())
    largest = float(recorded.detach()[both].abs().max())
    if away > (REARRANGED_NARROW if is_rough else REARRANGED).of_largest * largest:
        raise ReplaylensError(
            f"`{call.name}` cannot be expanded: open operations give values up to {away:.2g} away from what it gave "
            f"(at most {largest:.2g}).{' It draws random numbers in a way of its own.' if call.draws else ''}"
        )
