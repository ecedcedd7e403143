"""What the layers asked for give for one batch after another, by replays of programs that stop at the latest of them.

In: a model, an edit, the layers, and calls of the model. Out: tensors by the name of their array, reduced. The model
runs once for each shape of batch, for a capture that leaves nothing behind, and where a batch leaves the recorded path;
that is counted. A process that has the programs alone says `Left` then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from .._capture.rerun.run import capture_without_effects
from .._ir.trees import freeze_deep
from .._layers.naming import label_nodes
from ..errors import BadSource, DivergedReplay, InputMismatch
from ..program import Program
from .asked_layers import Asked, asked_layers, named_values, require_same
from .model_inputs import Call
from .reduction import PerLayer, Reduction

KEPT = 64  # programs, one for each shape of batch


class Left(Exception):
    """A batch that only the model can run: its shape is new, or it leaves the recorded path."""


@frozen(eq=False)
class Wish:
    """What is extracted, as the user says it."""

    layers: Any
    what: tuple[str, ...]
    of: Callable[[Any], Any] | None
    reduce: PerLayer
    dtype: PerLayer


@frozen(eq=False)
class Route:
    """The program of one shape of batch: whole, and cut behind the layers asked for."""

    whole: Any
    cut: Any  # its output are the layers; None if activations are not asked for
    asked: tuple[Asked, ...]


@frozen(eq=False)
class Origin:
    """What an array holds: the layer as it was asked for, activations or gradients, and what is made of them."""

    asked: Asked
    what: str
    reduction: Reduction


def shape_key(call: Call) -> Any:
    """What calls have in common that one program serves: shapes, dtypes, devices, and all that is no tensor."""

    def kind(tensor: torch.Tensor) -> Any:
        return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, tensor.is_contiguous()

    return repr(freeze_deep((call.args, call.kwargs), kind))


@define(eq=False)
class LayerValues:
    """The values of layers for one batch after another."""

    wish: Wish
    routes: OrderedDict[Any, Route] = field(factory=OrderedDict)
    make: RouteMaker | None = None  # takes the model; None in a process that has only the programs
    origins: dict[str, Origin] = field(factory=dict)  # by array
    first: tuple[Asked, ...] = ()  # the layers of the first route

    def __call__(self, call: Call) -> tuple[dict[str, torch.Tensor], bool]:
        """The values by array, and whether the model had to run because the batch left the recorded path."""
        route = self.route(call)
        try:
            return self._values(route, call), False
        except (DivergedReplay, InputMismatch):
            if self.make is None:
                raise Left from None
            return self._values_of_model(self.make, call), True

    def route(self, call: Call) -> Route:
        """The program for calls of this shape."""
        key = shape_key(call)
        if key not in self.routes:
            if self.make is None:
                raise Left
            self.routes[key] = self._same(self.make(call))
            if len(self.routes) > KEPT:
                self.routes.popitem(last=False)
        self.routes.move_to_end(key)
        return self.routes[key]

    def _same(self, route: Route) -> Route:
        """A route whose labels mean what those of the first one mean."""
        self.first = self.first or route.asked
        require_same(self.first, route.asked)
        return route

    def _values(self, route: Route, call: Call) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if route.cut is not None:
            found |= self._named(route, list(route.cut(*call.args, **call.kwargs).output), "activation")
        if "grad" in self.wish.what:
            found |= self._named(route, _gradients(route, call, self.wish.of), "grad")
        return found

    def _values_of_model(self, make: RouteMaker, call: Call) -> dict[str, torch.Tensor]:
        """The values of a batch that leaves the recorded path: those of a capture of its own."""
        route = self._same(make(call, keeps_values=True))
        found: dict[str, torch.Tensor] = {}
        if route.cut is not None:
            values = [route.whole[place].value for asked in route.asked for place in asked.places]
            found |= self._named(route, values, "activation")
        if "grad" in self.wish.what:
            found |= self._named(route, _gradients(route, call, self.wish.of), "grad")
        return found

    def _named(self, route: Route, values: list[Any], what: str) -> dict[str, torch.Tensor]:
        """Values of all passes, in order, by array and reduced."""
        found: dict[str, torch.Tensor] = {}
        rest = iter(values)
        for asked in route.asked:
            passes = [next(rest) for _ in asked.places]
            for name, each in named_values(asked, passes).items():
                array = name if what == "activation" else f"{name}.{what}"
                reduction = self._origin(array, name, asked, what).reduction
                with torch.no_grad():
                    made = [reduction(one) for one in each]
                    found[array] = _stacked(array, made) if asked.is_series else made[0]
        return found

    def _origin(self, array: str, name: str, asked: Asked, what: str) -> Origin:
        if array not in self.origins:
            names = (array, name, asked.name, asked.label, *asked.words)
            steps, dtype = self.wish.reduce.of(names, ()), self.wish.dtype.of(names, None)
            self.origins[array] = Origin(asked, what, Reduction(name, steps, dtype))
        return self.origins[array]


def _stacked(array: str, passes: list[torch.Tensor]) -> torch.Tensor:
    """The passes of a layer along an axis of their own, behind that of the rows."""
    if len({one.shape for one in passes}) > 1:
        shapes = ", ".join(str(tuple(one.shape)) for one in passes)
        raise BadSource(
            f"the passes of {array} have unlike shapes, and no axis for them all: {shapes}. Name one pass, "
            f"'{array}:1', or make them alike by reduce=."
        )
    return torch.stack(passes, 1)


def _gradients(route: Route, call: Call, of: Any) -> list[Any]:
    """The gradients at all passes, zeros where the number does not depend on one."""
    names = [name for one in route.asked for name in one.places]
    grads = route.whole.grads(*call.args, of=of, at=names, **call.kwargs)
    return [grads[name] for name in names]


@frozen(eq=False)
class RouteMaker:
    """Makes the program of a batch: captures the model, edits, cuts."""

    model: Any
    edit: Callable[[Any], Any] | None
    wish: Wish

    def __call__(self, call: Call, keeps_values: bool = False) -> Route:
        prog = self._captured(call, keeps_values)
        if self.edit is not None:
            prog = self.edit(prog)
            if not isinstance(prog, Program):
                raise TypeError(
                    f"edit= is a function from a program to a program, and it returned {type(prog).__name__}."
                )
        return route_of(prog, self.wish)

    def _captured(self, call: Call, keeps_values: bool) -> Any:
        if not isinstance(self.model, Program):
            with torch.set_grad_enabled(torch.is_grad_enabled() or "grad" in self.wish.what):
                return captured(self.model, call.args, call.kwargs, keeps_values)
        if not keeps_values and not self.model._inputs(call.args, call.kwargs).mismatches:
            return self.model
        beginning = self.model._beginning
        if beginning is None:
            raise InputMismatch(
                f"{self._difference(call)}\nA program that was edited or loaded has one shape and one path, and does "
                "not hold the model. Give extract the model, and the edits by edit=lambda prog: ...; or batches like "
                "the recorded one."
            )
        made = captured(beginning.model, call.args, call.kwargs, keeps_values)
        return made.apply(self.model.edits) if self.model.edits else made

    def _difference(self, call: Call) -> str:
        """How a batch differs from the recorded inputs."""
        found = self.model._inputs(call.args, call.kwargs).mismatches
        return str(found[0].text) if found else "This batch leaves the recorded path."


def captured(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], keeps_values: bool = False) -> Any:
    """The program of one forward, after which the model, its buffers and the generators are as before."""
    recorded = capture_without_effects(model, args, dict(kwargs), label_nodes)
    made = Program(_captured=recorded, _keeps_nothing=not keeps_values)
    made._record  # noqa: B018  values go now
    return made


def route_of(prog: Any, wish: Wish) -> Route:
    """The program cut behind the layers that are asked for."""
    asked = asked_layers(prog, wish.layers)
    names = tuple([name for one in asked for name in one.places])
    return Route(prog, prog.slice(to=names) if "activation" in wish.what else None, asked)
