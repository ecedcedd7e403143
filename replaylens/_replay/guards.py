"""Has the counterfactual left the recorded path?

In: a guard, and the values of this replay. Out: nothing while the answer is the recorded one; else a Departure: what
diverged, where in the user's source, the recorded and the new value. Whoever runs nodes asks guards by `departure`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from attrs import evolve, frozen

from .._ir.equality import same, same_content
from .._ir.graph import Graph
from .._ir.node import Call, Guard, Ref, Source, TensorSpec, filled
from .._ir.printer import expression
from .._ir.runtime import kind_of, message_of, what_is_raised
from ..errors import DivergedReplay, ReplaylensError


@frozen(eq=False)
class Departure:
    """One place where the model would have gone another way."""

    what: str
    recorded: Any
    new: Any
    source: Source | None = None
    kind: str = "content"  # of the guard that found it
    cure: str = ""  # what can be done besides what is said of all departures

    def __str__(self) -> str:
        where = "\n" + self.source.indented if self.source else ""
        return f"{self.what} was {_short(self.recorded)} when recorded, and is {_short(self.new)} now.{where}"


Value = Callable[[Ref], Any]  # the value of a Ref, in one run or another


def departure(guard: Guard, value: Value, recorded: Value) -> Departure | None:
    """Ask a guard of these values: does the model meet another fact now than it did when it was recorded?

    `recorded` gives the recorded value of what a guard compares as a whole.
    """
    if not guard.compares_content:
        return changed(guard, answer(guard, value))
    pairs = [(recorded(ref), value(ref)) for ref in guard.refs]
    return next(filter(None, (changed_content(guard, one, other) for one, other in pairs)), None)


def answer(guard: Guard, value: Value) -> Any:
    """What a guard's question has for an answer on these values."""
    args = [filled(arg, value) for arg in guard.args]
    return _QUESTIONS.get(guard.kind, _read)(guard, args, {key: filled(arg, value) for key, arg in guard.kwargs})


def answered(guard: Guard, value: Value) -> Guard:
    """The guard with the answer that it has on these values: for a program that goes this way."""
    if guard.compares_content:
        return guard
    result = answer(guard, value)
    return guard if same_result(guard.result, result) else evolve(guard, result=result)


def changed(guard: Guard, result: Any) -> Departure | None:
    """A departure, if the answer is another one than the recorded."""
    if same_result(guard.result, result):
        return None
    one = guard.kind == "shape" and len(guard.result) == 1
    was, now = (guard.result[0], result[0]) if one else (guard.result, result)
    return Departure(fact(guard), was, now, guard.source, guard.kind)


def changed_content(guard: Guard, recorded: torch.Tensor, new: torch.Tensor) -> Departure | None:
    """A departure, if content that left torch as a whole is another."""
    if _is_same(recorded, new):
        return None
    return Departure(fact(guard), _brief(recorded), _brief(new), guard.source, guard.kind)


def _is_same(recorded: torch.Tensor, new: torch.Tensor) -> bool:
    """To the last bit; inside a transform, where bits cannot be looked at, number by number."""
    try:
        return same(recorded, new)
    except RuntimeError:
        return same_content(recorded, new)


def same_result(one: Any, other: Any) -> bool:
    """Equal to the last bit; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    return bool(repr(one) == repr(other)) if isinstance(one, (float, complex)) else bool(one == other)


def _read(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return guard.target.function(*args, **kwargs)


def _sizes(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return tuple([TensorSpec.of(value).sizes for value in args if isinstance(value, torch.Tensor)])


def _raised(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    error = what_is_raised(guard.target.function, *args, **kwargs)
    return message_of(error) if guard.kind == "message" else kind_of(error)


def _is_there(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The values are there: what computes them has run, and would have shown by itself that it raises."""


_QUESTIONS: dict[str, Callable[[Guard, list[Any], dict[str, Any]], Any]] = {
    "shape": _sizes,
    "exception": _raised,
    "message": _raised,
    "completion": _is_there,
}


def fact(guard: Guard) -> str:
    """What a guard asks, in words."""
    nodes = ", ".join(dict.fromkeys(ref.node for ref in guard.refs))
    if guard.kind == "shape":
        return f"the shape of {nodes}"
    if guard.kind == "completion":
        return f"what `{guard.target.short.strip('_')}` raises at {nodes}"
    inner = ", ".join(expression(arg) for arg in guard.args)
    if guard.kind in ("exception", "message"):
        return f"what `{guard.target.short.strip('_')}({inner})` raises"
    words = f"{guard.target.short.strip('_')}({inner})"
    return f"the content that `{words}` took out of torch" if guard.compares_content else f"`{words}`"


class LeftPath(Exception):
    """A replay found that it has left the recorded path, and somebody above can run the model instead."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(str(departure))
        self.departure = departure


def raised_at(error: BaseException, node: str) -> None:
    """Remember with an exception which node of a program raised it; none, if a patch or a guard did."""
    with suppress(AttributeError):
        error._replaylens_node = node  # type: ignore[attr-defined]


def node_of(error: BaseException) -> str:
    """The node of a program that raised an exception, if one did."""
    return str(getattr(error, "_replaylens_node", ""))


@contextmanager
def raising(
    graph: Graph, altered: Callable[[], Iterable[str]], departed: Callable[[Departure], None]
) -> Iterator[None]:
    """Within, an exception that the model's own operation raises because its values are others now is a departure: the
    model may catch it. `altered` gives the nodes that have another value to begin with. Where departures are ignored
    the recorded path ends there all the same: what the model does next, if it catches it, was not recorded.
    """
    try:
        yield
    except Exception as error:
        if (left := _departure_by(graph, altered, error)) is None:
            raise
        try:
            departed(left)
        except (DivergedReplay, LeftPath) as leaving:
            raise leaving from error
        if graph.catches:
            raise _at_its_end(left) from error
        raise


def _at_its_end(left: Departure) -> DivergedReplay:
    return DivergedReplay(
        f"the recorded path ends here, and cannot be gone on with: {left}\n"
        'The model catches exceptions: on_divergence="rerun" runs the model itself, where a program still holds it.'
    )


def _departure_by(graph: Graph, altered: Callable[[], Iterable[str]], error: Exception) -> Departure | None:
    name = node_of(error)
    node = graph[name] if name and name in graph else None
    if not isinstance(node, Call) or node.edited or isinstance(error, _NO_FACTS):
        return None
    if name not in graph.descendants(list(altered())):
        return None
    what = f"what `{node.target.short.strip('_')}` raises at {name}"
    return Departure(what, None, f"{type(error).__qualname__}: {error}", node.source, "exception")


_NO_FACTS = (ReplaylensError, LeftPath, MemoryError, torch.OutOfMemoryError)


class Guards(tuple[Guard, ...]):
    """The facts on which the recorded path of a program depends, in order. They print one a line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(_line, self))


def _line(guard: Guard) -> str:
    where = guard.source.indented if guard.source else ""
    said = "" if guard.compares_content or guard.kind == "completion" else f" was {_short(guard.result)}"
    return f"{guard.kind:10s} {fact(guard)}{said}{where}"


def misdirected(call: Call, is_constant: bool) -> Iterator[Departure]:
    """Where a new value of a call leads away from the path: its memory, or gradients that the model takes through it.

    `is_constant`: the model takes a gradient through the call, and nothing of its old value is in the new one.
    """
    if call.is_overwritten:
        what = f"the memory of {call.name}, which the model writes later and reads again,"
        yield Departure(what, "shared with it", "apart from it, as that of a patch is", call.source)
    if call.is_shared:
        what = f"what `{call.scope}` hands on in a container that something else holds as well"
        own = ", ".join(map(str, call.refs))
        cure = f"A patch at `{own}` changes it for all that read it, from wherever they have it.\n"
        yield Departure(
            what, f"{own} for all", "another value for those that read it from there", call.source, cure=cure
        )
    if call.is_twice:
        what = f"what `{call.scope}` hands on twice, and the model writes later,"
        own = ", ".join(map(str, call.refs))
        cure = f"A patch at `{own}` changes the one tensor that it hands on.\n"
        yield Departure(what, "one tensor", "one or two, as a hook makes them", call.source, cure=cure)
    if call.is_differentiated or is_constant:
        what = f"the gradient that the model takes through {call.name}"
        yield Departure(what, "of the recorded value", "of a patch", call.source)


def diverged(departure: Departure, which: str = "") -> DivergedReplay:
    return DivergedReplay(
        f"{which}the change leads away from the recorded path: {departure}\n{departure.cure}"
        'on_divergence="rerun" runs the model itself with this change, where a program still holds its model; '
        '"ignore" goes on along the recorded path.'
    )


def refuse(departure: Departure) -> NoReturn:
    """Where nothing else can be done about a departure."""
    raise diverged(departure)


def departures(one: Graph, other: Graph, recorded: Value, new: Value) -> tuple[Departure, ...]:
    """Where another run of the model, with its own graph, met other facts than the recorded run did: as far as the
    two paths are one.
    """
    found: list[Departure] = []
    for mine, theirs in zip(one.guards, other.guards, strict=False):
        if place(mine) != place(theirs):
            break
        found.extend(_between(mine, theirs, recorded, new))
    return tuple(found)


def place(guard: Guard) -> Any:
    """What makes a guard of one run that of another, whatever was read there."""
    return guard.kind, guard.target.name, guard.has_result, guard.source, str(guard.scope)


def _between(mine: Guard, theirs: Guard, recorded: Value, new: Value) -> Iterator[Departure]:
    if not mine.compares_content:
        yield from filter(None, (changed(mine, theirs.result),))
        return
    for one, other in zip(mine.refs, theirs.refs, strict=False):
        yield from filter(None, (changed_content(mine, recorded(one), new(other)),))


def _brief(tensor: torch.Tensor) -> str:
    return str(tensor.detach().flatten()[:4].tolist()) if tensor.numel() <= 4 else f"a tensor {tuple(tensor.shape)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else text[:77] + "..."
