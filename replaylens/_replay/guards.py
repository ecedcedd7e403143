"""Guards: has the counterfactual left the recorded path?

In: a guard, and the values of this replay. Out: None while the answer is the recorded one; else a Departure: what
differs, where in the user's source, the recorded and the new value. All runners ask guards by `departure`.
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
from .._ir.runtime import exception_name, exception_text, what_is_raised
from .._ir.torch_private import end_of_recomputation
from ..errors import DivergedReplay, ReplaylensError


@frozen(eq=False)
class Departure:
    """One place where the model would have taken another path."""

    what: str
    recorded: Any
    new: Any
    source: Source | None = None
    kind: str = "content"  # of the guard that found it
    cure: str = ""  # what can be done besides what is said of all departures

    def __str__(self) -> str:
        where = "\n" + self.source.indented if self.source else ""
        return f"{self.what} was {_short(self.recorded)} when recorded, and is {_short(self.new)} now.{where}"


ValueOf = Callable[[Ref], Any]  # the value of a Ref, in one run or another


def departure(guard: Guard, value: ValueOf, recorded: ValueOf) -> Departure | None:
    """Checks a guard: the Departure if its answer on these values differs from the recorded one, else None.

    `recorded` gives the recorded values that a guard compares as a whole.
    """
    if not guard.compares_content:
        return changed_answer(guard, answer_of(guard, value))
    pairs = [(recorded(ref), value(ref)) for ref in guard.refs]
    return next(filter(None, (changed_content(guard, one, other) for one, other in pairs)), None)


def answer_of(guard: Guard, value: ValueOf) -> Any:
    """The answer to a guard's question on these values."""
    args = [filled(arg, value) for arg in guard.args]
    return _QUESTIONS.get(guard.kind, _call_target)(guard, args, {key: filled(arg, value) for key, arg in guard.kwargs})


def with_answer(guard: Guard, value: ValueOf) -> Guard:
    """The guard with its answer on these values, for a program that takes this path."""
    if guard.compares_content:
        return guard
    result = answer_of(guard, value)
    return guard if same_result(guard.result, result) else evolve(guard, result=result)


def changed_answer(guard: Guard, result: Any) -> Departure | None:
    """A departure if the result differs from the recorded one."""
    if same_result(guard.result, result):
        return None
    one = guard.kind == "shape" and len(guard.result) == 1
    was, now = (guard.result[0], result[0]) if one else (guard.result, result)
    return Departure(guard_text(guard), was, now, guard.source, guard.kind)


def changed_content(guard: Guard, recorded: torch.Tensor, new: torch.Tensor) -> Departure | None:
    """A departure if content that left torch as a whole differs from the recorded one."""
    if _is_same(recorded, new):
        return None
    return Departure(guard_text(guard), _excerpt(recorded), _excerpt(new), guard.source, guard.kind)


def _is_same(recorded: torch.Tensor, new: torch.Tensor) -> bool:
    """True if equal to the last bit; under a transform, where bits cannot be read, number by number."""
    try:
        return same(recorded, new)
    except RuntimeError:
        return same_content(recorded, new)


def same_result(one: Any, other: Any) -> bool:
    """True if equal to the last bit; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    return bool(repr(one) == repr(other)) if isinstance(one, (float, complex)) else bool(one == other)


def _call_target(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return guard.target.function(*args, **kwargs)


def _sizes(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return tuple([TensorSpec.of(value).sizes for value in args if isinstance(value, torch.Tensor)])


def _exception(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    error = what_is_raised(guard.target.function, *args, **kwargs)
    return exception_text(error) if guard.kind == "message" else exception_name(error)


def _completed(guard: Guard, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The values exist: the calls that compute them have run, and would have raised themselves."""


_QUESTIONS: dict[str, Callable[[Guard, list[Any], dict[str, Any]], Any]] = {
    "shape": _sizes,
    "exception": _exception,
    "message": _exception,
    "completion": _completed,
}


def guard_text(guard: Guard) -> str:
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


class RerunRequired(Exception):
    """A replay left the recorded path, and a caller can run the model instead."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(str(departure))
        self.departure = departure


def mark_raising_node(error: BaseException, node: str) -> None:
    """Attaches to an exception the node of a program that raised it; '' if a patch or guard did."""
    with suppress(AttributeError):
        error._replaylens_node = node  # type: ignore[attr-defined]


def raising_node(error: BaseException) -> str:
    """The node of a program that raised an exception, if one did."""
    return str(getattr(error, "_replaylens_node", ""))


@contextmanager
def exceptions_as_departures(
    graph: Graph, altered: Callable[[], Iterable[str]], departed: Callable[[Departure], None]
) -> Iterator[None]:
    """Within, an exception that the model's own operation raises on other values than recorded is a departure: the
    model may catch it.

    `altered` gives the nodes that have another value to begin with. If departures are ignored, the recorded path still
    ends here when the model catches exceptions: what it does next was not recorded.
    """
    try:
        yield
    except Exception as error:
        if (left := _exception_departure(graph, altered, error)) is None:
            raise
        try:
            departed(left)
        except (DivergedReplay, RerunRequired) as leaving:
            raise leaving from error
        if graph.catches:
            raise _path_ends(left) from error
        raise


def _path_ends(left: Departure) -> DivergedReplay:
    return DivergedReplay(
        f"the recorded path ends here and cannot be continued: {left}\n"
        'The model catches exceptions: on_divergence="rerun" runs the model itself, where a program still holds it.'
    )


def _exception_departure(graph: Graph, altered: Callable[[], Iterable[str]], error: Exception) -> Departure | None:
    name = raising_node(error)
    node = graph[name] if name and name in graph else None
    if not isinstance(node, Call) or node.edited or isinstance(error, _NO_FACTS):
        return None
    if name not in graph.descendants(list(altered())):
        return None
    what = f"what `{node.target.short.strip('_')}` raises at {name}"
    return Departure(what, None, f"{type(error).__qualname__}: {error}", node.source, "exception")


_NO_FACTS = (ReplaylensError, RerunRequired, MemoryError, torch.OutOfMemoryError, end_of_recomputation)


class Guards(tuple[Guard, ...]):
    """The facts on which the recorded path of a program depends, in order. They print one a line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(_listed, self))


def _listed(guard: Guard) -> str:
    where = guard.source.indented if guard.source else ""
    said = "" if guard.compares_content or guard.kind == "completion" else f" was {_short(guard.result)}"
    return f"{guard.kind:10s} {guard_text(guard)}{said}{where}"


def aliasing_hazards(call: Call, is_constant: bool) -> Iterator[Departure]:
    """Departures that a new value of a call implies: through aliasing, or through gradients that the model takes.

    `is_constant`: the model takes a gradient through the call, and the new value does not depend on the old one.
    """
    if call.is_overwritten:
        what = f"the storage of {call.name}, which the model modifies in place later and reads again,"
        yield Departure(what, "shared with it", "not shared with a patch", call.source)
    if call.is_shared:
        what = f"what `{call.scope}` returns in a container that something else holds as well"
        own = ", ".join(map(str, call.refs))
        cure = f"A patch at `{own}` changes it for all that read it, from wherever they have it.\n"
        yield Departure(
            what, f"{own} for all", "another value for those that read it from there", call.source, cure=cure
        )
    if call.has_duplicate_outputs:
        what = f"what `{call.scope}` returns twice, and the model writes later,"
        own = ", ".join(map(str, call.refs))
        cure = f"A patch at `{own}` changes the one tensor that it returns.\n"
        yield Departure(what, "one tensor", "one or two, as a hook makes them", call.source, cure=cure)
    if call.is_differentiated or is_constant:
        what = f"the gradient that the model takes through {call.name}"
        yield Departure(what, "of the recorded value", "of a patch", call.source)


def diverged_error(departure: Departure, which: str = "") -> DivergedReplay:
    return DivergedReplay(
        f"{which}the change leads away from the recorded path: {departure}\n{departure.cure}"
        'on_divergence="rerun" runs the model itself with this change, where a program still holds its model '
        "(one of a file is given it: load(path, state=model)); "
        '"ignore" goes on along the recorded path.'
    )


def raise_diverged(departure: Departure) -> NoReturn:
    """Raises for a departure, where there is no other way out."""
    raise diverged_error(departure)


def departures_between_runs(one: Graph, other: Graph, recorded: ValueOf, new: ValueOf) -> tuple[Departure, ...]:
    """Facts that another run of the model, with a graph of its own, met otherwise, as far as the two paths agree."""
    found: list[Departure] = []
    for mine, theirs in zip(one.guards, other.guards, strict=False):
        if guard_identity(mine) != guard_identity(theirs):
            break
        found.extend(_guard_departures(mine, theirs, recorded, new))
    return tuple(found)


def guard_identity(guard: Guard) -> Any:
    """What identifies a guard across runs, whatever was read there."""
    return guard.kind, guard.target.name, guard.has_result, guard.source, str(guard.scope)


def _guard_departures(mine: Guard, theirs: Guard, recorded: ValueOf, new: ValueOf) -> Iterator[Departure]:
    if not mine.compares_content:
        yield from filter(None, (changed_answer(mine, theirs.result),))
        return
    for one, other in zip(mine.refs, theirs.refs, strict=False):
        yield from filter(None, (changed_content(mine, recorded(one), new(other)),))


def _excerpt(tensor: torch.Tensor) -> str:
    return str(tensor.detach().flatten()[:4].tolist()) if tensor.numel() <= 4 else f"a tensor {tuple(tensor.shape)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 80 else text[:77] + "..."
