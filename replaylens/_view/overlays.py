"""The Scene of a recorded program with overlays: numbers as colours, a replay, another program, gradients.

In: a record, its LayerIndex, ViewOptions and an Overlay. Out: a Scene, for a drawing or a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

from .._edit.patch import shown
from .._ir.capture_metadata import Parameter
from .._ir.graph import Graph
from .._ir.location import Location
from .._ir.node import Ref, State
from .._layers.index import LayerIndex
from .._layers.layer import Layer
from .._replay.gradients import values_with_grad
from .._replay.record import Record
from .._replay.supply import Run
from ..errors import CannotDraw, NoGradient, NoSuchLayer, NotSaved
from .grouping import ViewOptions, scene
from .layer_change import LayerChange, compare
from .layer_graph import DataLink, LayerGraph, layer_graph
from .program_diff import program_diff
from .scene import Glyph, Roles, Scene
from .values import tensors_in

Layers = Callable[[Location], Any]  # makes the Layer of a Location


@frozen(kw_only=True, eq=False)
class Overlay:
    """What is laid over a picture; each item is optional."""

    values: Mapping[Any, float] | Callable[[Any], float | None] | None = None  # a number for each layer
    run: Run | None = None  # a replay of this program
    against: tuple[Record, LayerIndex] | None = None  # another program
    gradients: bool = False
    begins: frozenset[str] | None = None  # the nodes where a backward pass began; None for all outputs


def compose(record: Record, index: LayerIndex, layers: Layers, view: ViewOptions, over: Overlay) -> Scene:
    """The picture of a program with its overlays."""
    graph = record.graph
    drawn = layer_graph(graph, index, view.buffers)
    if over.against is not None:
        drawn = program_diff(layer_graph(over.against[0].graph, over.against[1], view.buffers), drawn)
    if over.run is not None:
        _require_of(over.run, record)
        patched = patched_in(graph, index, over.run)
        drawn = with_replay(drawn, executed_in(index, over.run), patched)
    if over.gradients:
        view = evolve(view, gradients=_values_with_flow(record, over.begins), begins=over.begins)
    made = _with_unread(scene(graph, index, view, drawn), record.account.unread)
    if over.against is not None:
        made = evolve(made, legend="green: only here; red: only in the other; orange: another operation or shape")
    if over.run is not None:
        changes = _changes(record, index, layers, over.run, {*executed_in(index, over.run), *patched})
        made = with_numbers(made, changes, "change against the recorded run")
    if over.values is not None:
        made = with_numbers(made, _numbers(over.values, index, layers))
    return made


def _with_unread(made: Scene, unread: tuple[Parameter, ...]) -> Scene:
    """Add the parameters that no layer read to the title: of the model, or of the module that is drawn."""
    within = f"{made.module.partition(':')[0]}." if made.module else ""
    own = [one for one in unread if any(name.startswith(within) for name in (one.address, *one.aliases))]
    totals = evolve(
        made.totals,
        parameters=made.totals.parameters + sum([one.count for one in own]),
        parameter_bytes=made.totals.parameter_bytes + sum([one.nbytes for one in own]),
    )
    return evolve(made, totals=totals)


def _values_with_flow(record: Record, begins: frozenset[str] | None) -> frozenset[Ref]:
    """The values through which gradients flow back from the outputs, or from where a backward pass began."""
    graph, flowing = record.graph, values_with_grad(record)
    used = graph.ancestors([ref.node for ref in graph.output_refs if ref in flowing] if begins is None else begins)
    found = frozenset([ref for ref in flowing if ref.node in used])
    if not found:
        raise NoGradient("no gradient flows from the output of this program, so there is none to draw.")
    return found


def _numbers(values: Any, index: LayerIndex, layers: Layers) -> dict[str, float]:
    """The numbers by label, from any names of layers or from a function of a layer."""
    if callable(values):
        found = {place.label: values(layers(place)) for place in index.places}
    elif isinstance(values, Mapping):
        found = {index.find(name).label: number for name, number in values.items()}
    else:
        kind = type(values).__name__
        raise CannotDraw(f"values are a mapping from names of layers to numbers, or a function of a layer, not {kind}.")
    return {label: _number(label, number) for label, number in found.items() if number is not None}


def _number(label: str, number: Any) -> float:
    try:
        return float(number)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(number.shape)}" if hasattr(number, "shape") else repr(number)
        raise CannotDraw(f"a layer is coloured by one number, but the value of {label} is {what}.") from None


def _require_of(run: Run, record: Record) -> None:
    """Raise unless the run is a replay of this program."""
    if not isinstance(run, Run):
        raise CannotDraw(f"run= takes what `prog.replay()` gives, not {type(run).__name__}.")
    if run.origin is None or run.origin.program.graph is not record.graph:
        raise CannotDraw("this run belongs to another program: `run.draw()` draws it over its own program.")
    if run.program is not None:
        raise CannotDraw(
            "in this run the model took another path: `run.draw()` draws it as a difference to the recorded one."
        )


def executed_in(index: LayerIndex, run: Run) -> list[str]:
    """The layers that a replay ran."""
    ran = frozenset(run.executed)
    return [place.label for place in index.places if place.node in ran]


def _changes(record: Record, index: LayerIndex, layers: Layers, run: Run, labels: set[str]) -> dict[str, float]:
    """How much these layers changed in a replay."""
    full = with_all_values(run)
    found = [compared(layers(place), full) for place in index.places if place.label in labels]
    return {change.label: change.change for change in found if change.change is not None}


def compared(layer: Layer, run: Run) -> LayerChange:
    """How much a layer's value in a run differs from the recorded one."""
    try:
        value = run[layer.label]
    except NoSuchLayer:
        return LayerChange(layer.label, None, note="did not run on the path that the model took")
    try:
        old = layer.value
    except NotSaved:
        return LayerChange(layer.label, None, note="the recorded value was not kept")
    return compare(layer.label, tensors_in(old), tensors_in(value))


def with_all_values(run: Run) -> Run:
    """The same replay with every value kept. Fresh draws cannot be repeated: such a run has what it kept."""
    return run.hold_all()


def patched_in(graph: Graph, index: LayerIndex, run: Run) -> dict[str, str]:
    """The layers that a replay was given other values for, and in which words."""
    assert run.origin is not None
    request, found = run.origin.request, {}
    for position, changes in request.changed.items():
        found[graph.nodes[position].name] = "; ".join(dict.fromkeys(shown(change.what) for change in changes))
    for place in index.places:
        if place.output in request.ends:
            found[place.label] = shown(request.ends[place.output].what)
    for position in request.given:
        node = graph.nodes[position]
        if isinstance(node, State) and node.kind == "parameter":
            readers = [graph.nodes[user].name for user in graph.users[position]]
            found |= {name: f"other {node.address}" for name in readers if name not in found}
        else:
            found[node.name] = "another value"
    return found


def with_numbers(scene: Scene, numbers: Mapping[str, float], legend: str = "") -> Scene:
    """The picture coloured by these numbers. A glyph of several layers shows the number farthest from zero."""
    glyphs = tuple([_with_number(glyph, numbers) for glyph in scene.glyphs])
    shown = [glyph.value for glyph in glyphs if glyph.value is not None and math.isfinite(glyph.value)]
    span = (min(shown), max(shown)) if shown else (0.0, 0.0)
    odd = sum(glyph.value is not None and not math.isfinite(glyph.value) for glyph in glyphs)
    said = f"{legend or 'colours'}: {span[0]:.4g} to {span[1]:.4g}{f'; not finite at {odd}' if odd else ''}"
    return evolve(scene, glyphs=glyphs, span=span, legend=said)


def _with_number(glyph: Glyph, numbers: Mapping[str, float]) -> Glyph:
    found = [numbers[label] for label in glyph.layers if label in numbers]
    return evolve(glyph, value=max(found, key=_distance)) if found else glyph


def _distance(number: float) -> float:
    return math.inf if math.isnan(number) else abs(number)


def with_replay(drawn: LayerGraph, ran: Iterable[str], patched: Mapping[str, str]) -> LayerGraph:
    """Mark the layers that a replay ran, and those that were patched, with their patches in words."""
    ran = frozenset(ran)
    marks = []
    for mark in drawn.marks:
        roles: Roles = frozenset({"rerun"} if mark.label in ran else ()) | (
            {"edited"} if mark.label in patched else set()
        )
        note = "; ".join(filter(None, [mark.note, patched.get(mark.label)]))
        marks.append(evolve(mark, roles=mark.roles | roles, note=note) if roles else mark)
    affected = ran.union(patched)
    links = [_affected(link, affected, patched) for link in drawn.links]
    return LayerGraph(tuple(marks), tuple(links))


def _affected(link: DataLink, affected: frozenset[str], patched: Mapping[str, str]) -> DataLink:
    if link.edge in patched:
        return evolve(link, roles=link.roles | {"edited"}, note=patched[link.edge])
    return evolve(link, roles=link.roles | {"rerun"}) if {link.tail, link.head} <= affected else link
