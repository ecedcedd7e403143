"""The Scene of a recorded program with overlays: numbers as colours, a replay, another program, gradients.

In: a record, its LayerIndex, ViewOptions and an Overlay. Out: a Scene, for a drawing or a page; and a Diff, the changes
of a run as a table. Layers of two programs are matched in execution order by kind and module, not by label, because an
insertion shifts the numbers in labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from math import isfinite
from typing import Any

from attrs import evolve, field, frozen

from .._edit.patch import shown
from .._ir.capture_metadata import ParameterInfo
from .._ir.graph import Graph
from .._ir.label import primed_name
from .._ir.location import Location
from .._ir.node import Ref, State
from .._ir.util import optional
from .._layers.index import LayerIndex
from .._layers.layer import Layer
from .._replay.gradients import values_with_grad
from .._replay.record import Record
from .._replay.supply import Run
from ..errors import CannotDraw, NoGradient, NoSuchLayer, NotSaved, ReplaylensError
from .grouping import ViewOptions, scene_of
from .layer_graph import LayerGraph, LayerLink, LayerMark, layer_graph
from .plots import plot_bars
from .scene import NO_ROLES, Glyph, Roles, Scene
from .values import LayerChange, change_between, tensors_in

ADDED, REMOVED, CHANGED = (frozenset({role}) for role in ("added", "removed", "changed"))


def program_diff(old: LayerGraph, new: LayerGraph) -> LayerGraph:
    """The new graph, together with what only the old one has."""
    same = matched(old.marks, new.marks)  # old label -> new label
    known = {mark.label for mark in new.marks}
    names = {mark.label: same.get(mark.label) or _unused(mark.label, known) for mark in old.marks}
    before = {new_label: old.by_label[label] for label, new_label in same.items()}
    marks = [evolve(mark, roles=mark.roles | _roles(mark, before.get(mark.label))) for mark in new.marks]
    gone = {
        names[mark.label]: evolve(mark, label=names[mark.label], layer=mark.label, roles=mark.roles | REMOVED)
        for mark in old.marks
        if mark.label not in same
    }
    old_links = {_ends(evolve(link, tail=names[link.tail], head=names[link.head])): link for link in old.links}
    new_links = {_ends(link) for link in new.links}
    links = [link if _ends(link) in old_links else evolve(link, roles=link.roles | ADDED) for link in new.links]
    lost = [
        evolve(link, tail=ends[0], head=ends[1], roles=link.roles | REMOVED)
        for ends, link in old_links.items()
        if ends not in new_links
    ]
    return LayerGraph(_in_place(marks, gone, old, names), (*links, *lost))


def matched(old: tuple[LayerMark, ...], new: tuple[LayerMark, ...]) -> dict[str, str]:
    """The corresponding layers of two programs, by label. Another operation at the same position and under the same
    label corresponds, too: it was changed.
    """
    found: dict[str, str] = {}
    pairs = SequenceMatcher(None, [_kind(mark) for mark in old], [_kind(mark) for mark in new], autojunk=False)
    for what, i, i_end, j, j_end in pairs.get_opcodes():
        if what == "equal":
            found |= {one.label: other.label for one, other in zip(old[i:i_end], new[j:j_end], strict=True)}
        elif what == "replace":
            here = {mark.label for mark in new[j:j_end]}
            found |= {mark.label: mark.label for mark in old[i:i_end] if mark.label in here}
    return found


def _kind(mark: LayerMark) -> tuple[str, str, bool]:
    return mark.kind, mark.scopes[-1].address if mark.scopes else "", bool(mark.roles & {"input", "output", "buffer"})


def _roles(mark: LayerMark, before: LayerMark | None) -> Roles:
    if before is None:
        return ADDED
    shapes = [[(spec.shape, spec.dtype) for spec in one.specs] for one in (mark, before)]
    return CHANGED if mark.kind != before.kind or shapes[0] != shapes[1] else NO_ROLES


def _unused(label: str, taken: set[str]) -> str:
    taken.add(label := primed_name(label, taken))
    return label


def _ends(link: LayerLink) -> tuple[str, str, str]:
    return link.tail, link.head, link.place


def _in_place(
    marks: list[LayerMark], gone: dict[str, LayerMark], old: LayerGraph, names: dict[str, str]
) -> tuple[LayerMark, ...]:
    """The layers in order, each removed one behind the layer that it followed."""
    behind: dict[str | None, list[LayerMark]] = {}
    last: str | None = None
    for mark in old.marks:
        if names[mark.label] in gone:
            behind.setdefault(last, []).append(gone[names[mark.label]])
        else:
            last = names[mark.label]
    placed = list(behind.get(None, ()))
    for mark in marks:
        placed += [mark, *behind.get(mark.label, ())]
    return tuple(placed)


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
    made = _with_unread(scene_of(graph, index, view, drawn), record.account.unread)
    if over.against is not None:
        made = evolve(made, legend="green: only here; red: only in the other; orange: another operation or shape")
    if over.run is not None:
        changes = _changes(record, index, layers, over.run, {*executed_in(index, over.run), *patched})
        made = with_numbers(made, changes, "change against the recorded run")
    if over.values is not None:
        made = with_numbers(made, _numbers(over.values, index, layers))
    return made


def _with_unread(made: Scene, unread: tuple[ParameterInfo, ...]) -> Scene:
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
    return change_between(layer.label, tensors_in(old), tensors_in(value))


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


def _affected(link: LayerLink, affected: frozenset[str], patched: Mapping[str, str]) -> LayerLink:
    if link.edge in patched:
        return evolve(link, roles=link.roles | {"edited"}, note=patched[link.edge])
    return evolve(link, roles=link.roles | {"rerun"}) if {link.tail, link.head} <= affected else link


@frozen(repr=False)
class Diff:
    """How much each layer of a run differs from the recorded run: `diff["relu_3"].change`, `print(diff)`, `.plot()`.

    `rows` has the layers that ran, or were patched, in order. All others have their recorded values.
    """

    rows: tuple[LayerChange, ...]
    _same: frozenset[str] = field(alias="same")  # the layers that did not run
    _find: Callable[[Any], str] = field(alias="find", eq=False)

    def __getitem__(self, name: Any) -> LayerChange:
        label = self._find(name)
        return next((row for row in self.rows if row.label == label), LayerChange(label, 0.0, 0.0, 0.0))

    def __iter__(self) -> Iterator[LayerChange]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def changed(self) -> tuple[LayerChange, ...]:
        """The layers whose values differ."""
        return tuple([row for row in self.rows if row.is_changed])

    def __repr__(self) -> str:
        return f"<Diff: {len(self.changed)} of {len(self.rows) + len(self._same)} layers changed>"

    def __str__(self) -> str:
        width = max((len(row.label) for row in self.rows), default=0)
        top = max((row.change for row in self.rows if row.change is not None and isfinite(row.change)), default=0.0)
        lines = [
            f"{len(self.changed)} of {len(self.rows) + len(self._same)} layers changed; {len(self._same)} did not run "
            "again.",
            f"    {'layer':{width}}  change   largest  numbers",
            *(_line(row, width, top) for row in (self.rows if len(self.rows) <= 60 else self.rows[:30])),
        ]
        if len(self.rows) > 60:
            lines += [f"    {'...':{width}}", *(_line(row, width, top) for row in self.rows[-30:])]
        return "\n".join(lines)

    def to_pandas(self) -> Any:
        """A row per layer that ran."""
        columns = ("label", "change", "largest", "share", "note")
        rows = [{name: getattr(row, name) for name in columns} for row in self.rows]
        return optional("pandas", "pandas").DataFrame(rows, columns=columns)

    def plot(self, ax: Any = None, **options: Any) -> Any:
        """The change of each layer that ran, as bars. Gives matplotlib's Axes."""
        shown = [row for row in self.rows if row.change is not None]
        if not shown:
            raise ReplaylensError("there is no change to plot, because no layer ran again.")
        words = "change (share of the recorded value)"
        return plot_bars([row.label for row in shown], [row.change or 0.0 for row in shown], words, ax, options)


def diff(record: Record, index: LayerIndex, layers: Sequence[Layer], run: Run) -> Diff:
    """Compare every layer that the run executed or patched."""
    labels = frozenset(index.order)
    if run.program is not None:  # the model itself ran, from the beginning
        ran, values = labels, run
    else:
        ran = labels & {*executed_in(index, run), *patched_in(record.graph, index, run)}
        values = with_all_values(run)
    rows = [compared(layer, values) for layer in layers if layer.label in ran]
    return Diff(tuple(rows), labels - ran, lambda name: index.find(name).label)


def _line(row: LayerChange, width: int, top: float) -> str:
    if row.change is None:
        return f"    {row.label:{width}}  {row.note}"
    share = (
        (row.change / top if top else 0.0) if isfinite(row.change) else 1.0
    )  # a change that is not finite gets the longest bar
    bar = "#" * max(round(20 * share), int(row.is_changed))
    return f"    {row.label:{width}}  {row.change:<8.3g} {row.largest:<8.3g} {row.share:7.1%}  {bar}".rstrip()
