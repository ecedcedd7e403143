"""What the layers asked for give for one batch after another, by replays of programs that stop at the latest of them.

In: a model, an edit, the layers, and calls of the model. Out: tensors by the name of their array, reduced. The model
runs once for each shape of batch, for a capture that leaves nothing behind, and where a batch leaves the recorded path;
that is counted. A process that has the programs alone says `Left` then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from .._capture.rerun.run import capture_without_effects
from .._edit.select import SaveSpec
from .._ir.graph import Graph
from .._ir.trees import freeze_deep
from .._layers.naming import label_nodes
from .._replay.record import keeping_only
from .._sweep.task_draws import drawing_apart
from ..errors import BadSource, DivergedReplay, InputMismatch
from ..program import Program
from .asked_layers import Asked, asked_layers, named_values, nodes_of, require_same, words_of
from .model_inputs import Call
from .reduction import FunctionStep, PerLayer, Reduction, Step

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

    @property
    def steps(self) -> Iterable[tuple[Step, ...]]:
        """What is done with values, for each choice of layers."""
        return [self.reduce.all or ()] if self.reduce.choices is None else list(self.reduce.choices.values())


@frozen(eq=False)
class Route:
    """The program of one shape of batch: whole, and cut behind the layers asked for."""

    model_name: str
    asked: tuple[Asked, ...]
    whole: Any = None  # kept if gradients are asked for
    cut: Any = None  # its output are the layers; None if activations are not asked for
    memory: tuple[str, ...] = ()  # what the forward changes and may have read
    unseen_draws: tuple[str, ...] = ()  # by what it draws besides torch

    @property
    def draws(self) -> bool:
        """True if the program draws random numbers."""
        graph = (self.whole if self.cut is None else self.cut).graph
        return any(call.draws is not None for call in graph.calls)


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
    seeds: Mapping[str, int] = field(factory=dict)  # what the random numbers of each batch follow from
    origins: dict[str, Origin] = field(factory=dict)  # by array
    first: tuple[Asked, ...] = ()  # the layers of the first route

    def __call__(self, call: Call, first: int) -> tuple[dict[str, torch.Tensor], bool]:
        """The values by array, and whether the model had to run because the batch left the recorded path. What is drawn
        at random follows from the number of the first row.
        """
        route, given = self._route(call)
        if not self.may_draw(route):
            return self._found(route, call, given)
        return drawing_apart(self.seeds, first, lambda: self._found(route, call, None))[0]

    def may_draw(self, route: Route) -> bool:
        """True if random numbers may be drawn."""
        return route.draws or any(isinstance(step, FunctionStep) for steps in self.wish.steps for step in steps)

    def _found(self, route: Route, call: Call, given: Any) -> tuple[dict[str, torch.Tensor], bool]:
        if not (route.draws and "grad" in self.wish.what):  # else gradients are of the draws of the values
            try:
                return self._values(route, call, given), False
            except (DivergedReplay, InputMismatch):
                pass
        if self.make is None:
            raise Left
        made, given = self._made(call, is_other_path=True)
        return self._values(made, call, given), not route.draws

    def route(self, call: Call) -> Route:
        """The program for calls of this shape."""
        return self._route(call)[0]

    def _route(self, call: Call) -> tuple[Route, Any]:
        """The program for calls of this shape; what its layers give for this very call, if it is new."""
        key, given = shape_key(call), None
        if key not in self.routes:
            self.routes[key], given = self._made(call)
            if len(self.routes) > KEPT:
                self.routes.popitem(last=False)
        self.routes.move_to_end(key)
        return self.routes[key], given

    def _made(self, call: Call, is_other_path: bool = False) -> tuple[Route, Any]:
        """A new route, whose labels mean what those of the first one mean."""
        if self.make is None:
            raise Left
        route, given = self.make(call, is_other_path)
        self.first = self.first or route.asked
        require_same(self.first, route.asked)
        return route, given

    def _values(self, route: Route, call: Call, given: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if route.cut is not None:
            values = given if given is not None else _replayed(route, call)
            found |= self._named(route, call, list(values), "activation")
        if "grad" in self.wish.what:
            found |= self._named(route, call, _gradients(route, call, self.wish.of), "grad")
        return found

    def _named(self, route: Route, call: Call, values: list[Any], what: str) -> dict[str, torch.Tensor]:
        """Values of all passes, in order, by array and reduced."""
        found: dict[str, torch.Tensor] = {}
        rest = iter(values)
        for asked in route.asked:
            passes = [next(rest) for _ in asked.places]
            for name, each in named_values(asked, passes).items():
                array = name if what == "activation" else f"{name}.{what}"
                reduction = self._origin(array, name, asked, what).reduction
                with torch.no_grad():
                    made = [reduction(one, _batch(call)) for one in each]
                    found[array] = _stacked(array, made) if asked.is_series else made[0]
        return found

    def _origin(self, array: str, name: str, asked: Asked, what: str) -> Origin:
        if array not in self.origins:
            names = (array, name, asked.name, asked.label, *asked.words)
            steps, dtype = self.wish.reduce.of(names, ()), self.wish.dtype.of(names, None)
            self.origins[array] = Origin(asked, what, Reduction(name, steps, dtype, self.wish.reduce.entries))
        return self.origins[array]


def _batch(call: Call) -> Any:
    """What the model was given, as a function of a value and a batch gets it."""
    if call.kwargs:
        return call.kwargs if not call.args else (*call.args, call.kwargs)
    return call.args[0] if len(call.args) == 1 else call.args


def _stacked(array: str, passes: list[torch.Tensor]) -> torch.Tensor:
    """The passes of a layer along an axis of their own, behind that of the rows."""
    if len({one.shape for one in passes}) > 1:
        shapes = ", ".join(str(tuple(one.shape)) for one in passes)
        raise BadSource(
            f"the passes of {array} have unlike shapes, and no axis for them all: {shapes}. Name one pass, "
            f"'{array}:1', or make them alike by reduce=."
        )
    return torch.stack(passes, 1)


def memory_of(whole: Graph, part: Graph) -> tuple[str, ...]:
    """What a forward changes, and may have read before: Python state, and tensors that a part of it reads."""
    read = {node.address for node in part.state_nodes}
    written = [address for address, _ in whole.changes if address in read]
    return tuple(dict.fromkeys([*whole.altered, *written]))


def _replayed(route: Route, call: Call) -> Any:
    """What the layers give for a batch."""
    return route.cut._replay_on(call.args, call.kwargs, fresh=route.draws).output


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

    def __call__(self, call: Call, is_other_path: bool = False) -> tuple[Route, Any]:
        """The program, and what the layers give for this very call, if it was captured for it."""
        if isinstance(self.model, Program):
            fits = not is_other_path and not self.model._inputs(call.args, call.kwargs).mismatches
            prog = self.model if fits else self._captured_again(self.model, call)
        else:
            fits, prog = False, self._captured(self.model, call)
        route, given = self._cut(self._edited(prog))
        return route, None if fits else given

    @property
    def origin(self) -> Any:
        """The model itself."""
        beginning = self.model._beginning if isinstance(self.model, Program) else None
        return self.model if beginning is None else beginning.model

    def _edited(self, prog: Any) -> Any:
        made = prog if self.edit is None else self.edit(prog)
        if not isinstance(made, Program):
            raise TypeError(f"edit= is a function from a program to a program, and it returned {type(made).__name__}.")
        return made

    def _cut(self, prog: Any) -> tuple[Route, Any]:
        """The program cut behind the layers that are asked for, which keeps no value of this batch but the inputs."""
        asked = asked_layers(prog, self.wish.layers)
        made = Route(prog.graph.model_name, asked, prog if "grad" in self.wish.what else None)
        made = evolve(made, unseen_draws=tuple(prog.graph.other_random_sources))
        if "activation" not in self.wish.what:
            return evolve(made, memory=memory_of(prog.graph, prog.graph)), None
        cut = prog.slice(to=tuple([name for one in asked for name in one.places]))
        bare = Program(_record=keeping_only(cut._record, frozenset()), _history=cut.history)
        return evolve(made, cut=bare, memory=memory_of(prog.graph, bare.graph)), cut.output

    def _captured_again(self, prog: Any, call: Call) -> Any:
        """A program like the one that was given, for a call that does not fit it."""
        if prog._beginning is None:
            found = prog._inputs(call.args, call.kwargs).mismatches
            raise InputMismatch(f"{found[0].text if found else 'This batch leaves the recorded path.'}\n{ONE_SHAPE}")
        made = self._captured(prog._beginning.model, call)
        return made.apply(prog.edits) if prog.edits else made

    def _captured(self, model: Any, call: Call) -> Any:
        """The program of one forward, after which the model, its buffers and the generators are as before. It keeps the
        values of the layers that are asked for, if their names are those of the model.
        """
        keys = words_of(self.wish.layers) if self.edit is None and not isinstance(self.model, Program) else []
        with torch.set_grad_enabled("grad" in self.wish.what):
            recorded = capture_without_effects(model, call.args, dict(call.kwargs), label_nodes, SaveSpec(tuple(keys)))
        made = Program(_captured=recorded, _keeps_nothing=not keys)
        if keys:
            nodes = nodes_of(made, asked_layers(made, self.wish.layers))
            made = made._derived(keeping_only(made._record, nodes), None, _beginning=made._beginning)
        return made


ONE_SHAPE = (
    "A program that was edited or loaded has one shape and one path, and does not hold the model. Give extract the "
    "model, and the edits by edit=lambda prog: ...; or batches like the recorded one."
)
