"""Attribution: the effect of patching each layer on a metric, estimated from gradients.

In: two programs of one model, a metric, layers. Out: an Attribution: for each layer the estimated change of the metric,
as a whole or per index of the axes that a part brackets. What people call is in attributed_pairs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
from attrs import field, frozen

from .._edit.part import Part
from .._ir.util import optional
from .._ir.value_source import Saved
from .._layers.index import LayerIndex
from .._layers.layer import Layer
from .._replay.supply import Run
from .._store.graphs import graph_json, read_graph
from .._store.objects import Kind, register
from .._store.pool import natural
from .._store.read_trees import TreeReader, bad, exactly, items, mapping, number, optional as if_any, text
from .._store.write_trees import TreeWriter
from ..errors import BadPart, DivergedReplay, NoGradient, NoSuchLayer, ReplaylensError, ShapeMismatch
from ..program import Program
from .tables import coordinate, plain

Indices = tuple[int, ...]
Axes = tuple[tuple[str, Indices], ...]  # the axes of a score, each with the indices of the layer along it


@frozen(eq=False, repr=False)
class Attribution(Saved, Mapping[str, torch.Tensor]):
    """The estimated effect of each layer on a metric: `found["attn_3"]`, a tensor with an axis for each bracketed one.

    A score is what the metric of the corrupt run would change by, if this much of the layer were as in the clean run.
    `corrupt` and `clean` are the metrics of the two runs themselves. A layer without a score is not among the keys;
    `without` says why it has none.
    """

    method: str
    part: Part | None
    corrupt: float
    clean: float
    scores: Mapping[str, torch.Tensor]
    axes: Mapping[str, Axes]
    without: Mapping[str, str]
    _index: LayerIndex

    def __getitem__(self, name: Any) -> torch.Tensor:
        label = name if self._is_label(name) else self._index.find(name).label
        if label in self.scores:
            return self.scores[label]
        reason = f": {self.without[label]}" if label in self.without else ""
        raise NoGradient(f"{label} has no score{reason}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __contains__(self, name: Any) -> bool:
        try:
            return self._is_label(name) or self._index.find(name).label in self.scores
        except NoSuchLayer:
            return False

    def _is_label(self, name: Any) -> bool:
        return isinstance(name, str) and name in self.scores

    @property
    def total(self) -> dict[str, float]:
        """The effect of each layer as a whole: the sum of its scores."""
        return {label: float(score.sum()) for label, score in self.scores.items()}

    def top(self, count: int = 10) -> list[tuple[str, Indices, float]]:
        """The largest scores by size, with the layer and the indices along its axes."""
        return sorted(self._rows(), key=lambda row: -abs(row[2]))[:count]

    def to_pandas(self) -> Any:
        """A row for each score: the layer, the index along each axis, the score."""
        names = self._axis_names
        rows = [(label, *self._along(label, indices), score) for label, indices, score in self._rows()]
        return optional("pandas", "pandas").DataFrame(rows, columns=["layer", *names, "score"])

    def to_xarray(self) -> Any:
        """The scores as a DataArray: a dimension for the layers, and one for each bracketed axis. Where layers have
        different axes there is one dimension, "entry", with the layer and its indices as coordinates.
        """
        labels, attrs = list(self.scores), {"method": self.method, "corrupt": self.corrupt, "clean": self.clean}
        attrs |= {} if self.part is None else {"part": str(self.part)}
        make = optional("xarray", "xarray").DataArray
        alike = {*self.axes.values()}
        if len(alike) == 1:
            [axes] = alike
            coords = {"layer": coordinate(labels), **{name: coordinate(indices) for name, indices in axes}}
            numbers = torch.stack([plain(score) for score in self.scores.values()]).numpy()
            return make(numbers, coords, [*coords], "score", attrs)
        rows = [(label, *self._along(label, indices)) for label, indices, _ in self._rows()]
        columns = zip(("layer", *self._axis_names), zip(*rows, strict=True), strict=True)
        coords = {name: ("entry", coordinate(column)) for name, column in columns}
        return make([score for _, _, score in self._rows()], coords, ["entry"], "score", attrs)

    @property
    def _axis_names(self) -> list[str]:
        return list(dict.fromkeys(name for axes in self.axes.values() for name, _ in axes))

    def _along(self, label: str, indices: Indices) -> list[int | None]:
        """The index of a score along each of the axes that any layer has."""
        return along(self.axes[label], indices, self._axis_names)

    def _rows(self) -> Iterator[tuple[str, Indices, float]]:
        for label, score in self.scores.items():
            places = product(*[indices for _, indices in self.axes[label]])
            for indices, value in zip(places, score.flatten().tolist(), strict=True):
                yield label, indices, value

    def __repr__(self) -> str:
        over = f" over {self.part}" if self.part is not None else ""
        return f"<Attribution by {self.method} of {self.corrupt:.6g} -> {self.clean:.6g} to {len(self)} layers{over}>"

    def __str__(self) -> str:
        rows = [("layer", *self._axis_names, "effect")]
        for label, indices, score in self.top():
            along = ["" if index is None else str(index) for index in self._along(label, indices)]
            rows.append((label, *along, f"{score:+.6g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([repr(self), *(f"  {line}" for line in lines)])


def along(axes: Axes, indices: Indices, names: Iterable[str]) -> list[int | None]:
    """The index of a score along each of these axes; None along those that it has not."""
    own = dict(zip([name for name, _ in axes], indices, strict=True))
    return [own.get(name) for name in names]


@frozen
class Question:
    """What is asked of a pair: which layers, by which method, for which parts of them."""

    at: Any = None
    method: str = field(default="patching")
    steps: int = 16
    part: Part | None = None

    @method.validator
    def _is_known(self, attribute: Any, method: str) -> None:
        if method not in ("patching", "integrated"):
            raise ValueError(f"method must be 'patching' or 'integrated', not {method!r}.")


def attributed(
    clean: Program | Run, corrupt: Program, metric: Callable[[Any], torch.Tensor], asked: Question
) -> Attribution:
    """The effect of each layer of the clean run on the metric of the corrupt one."""
    grads = corrupt.grads(of=metric, at=asked.at)
    before = clean.saving("all") if isinstance(clean, Program) else clean
    after, without = corrupt.saving("all"), grads.without
    scores: dict[str, torch.Tensor] = {}
    found: dict[str, Axes] = {}
    for label, gradient in grads.items():
        change = _change(before, after, label)
        try:
            if asked.part is not None:
                _require_fit(asked.part, label, gradient)
            slopes = (
                _float_tensors(gradient)
                if asked.method == "patching"
                else _mean_gradient(after, metric, label, change, asked.steps)
            )
        except (BadPart, DivergedReplay) as error:
            if asked.at is not None:
                raise
            without[label] = str(error).partition("\n")[0].rstrip(".")
            continue
        scores[label], found[label] = _score(asked.part, change, slopes)
    if not scores:
        raise ReplaylensError(f"none of the layers has a score: {next(iter(without.values()))}.")
    number = float(metric(clean.output).detach())
    return Attribution(asked.method, asked.part, float(grads.metric), number, scores, found, without, corrupt._index)


def _float_tensors(value: Any) -> list[torch.Tensor | None]:
    """The tensors in a value; None in the place of those without floating-point numbers."""
    values = [value] if isinstance(value, torch.Tensor) else list(value)
    return [one if one is not None and (one.is_floating_point() or one.is_complex()) else None for one in values]


def _value(run: Program | Run, label: str) -> Any:
    found = run[label]
    return found.value if isinstance(found, Layer) else found


def _change(clean: Program | Run, corrupt: Program, label: str) -> list[torch.Tensor | None]:
    """The clean value of a layer minus the corrupt one."""
    pairs = zip(_float_tensors(_value(clean, label)), _float_tensors(corrupt[label].value), strict=True)
    changes: list[torch.Tensor | None] = []
    for new, old in pairs:
        if new is not None and old is not None and new.shape != old.shape:
            raise ShapeMismatch(
                f"{label} is {tuple(new.shape)} in the clean run and {tuple(old.shape)} in the corrupt one.\n"
                "Capture both on inputs of the same shapes."
            )
        changes.append(new - old if new is not None and old is not None else None)
    return changes


def _mean_gradient(
    corrupt: Program, metric: Callable[[Any], torch.Tensor], label: str, change: list[torch.Tensor | None], steps: int
) -> list[torch.Tensor | None]:
    """The mean gradient on the line from corrupt to clean, by the midpoint rule with `steps` intervals."""
    base = corrupt[label].value
    several = not isinstance(base, torch.Tensor)
    means: list[torch.Tensor | None] = [None] * len(change)
    for step in range(steps):
        share = (step + 0.5) / steps
        values = list(base) if several else [base]
        points = [value if c is None else value + share * c for value, c in zip(values, change, strict=True)]
        patch = tuple(points) if several else points[0]
        slopes = _float_tensors(corrupt.grads(of=metric, from_=label, patch={label: patch}, at=[label])[label])
        pairs = zip(means, slopes, strict=True)
        means = [slope if mean is None or slope is None else mean + slope for mean, slope in pairs]
    return [None if mean is None else mean / steps for mean in means]


def _score(
    part: Part | None, change: list[torch.Tensor | None], slopes: list[torch.Tensor | None]
) -> tuple[torch.Tensor, Axes]:
    """The change times the gradient, summed over the axes that the part does not bracket."""
    pairs = zip(change, slopes, strict=True)
    products = [(one * slope.conj()).real for one, slope in pairs if one is not None and slope is not None]
    if part is None:
        return torch.stack([one.sum() for one in products]).sum(), ()
    (whole,) = products
    part = part.at(**dict.fromkeys(part.open_axes, slice(None)))
    bracketed = {axis.name for axis in part.axes(whole.shape) if axis.is_bracketed}
    names = part.names(whole.shape)
    summed = [axis for axis, name in enumerate(names) if name not in bracketed]
    found = part.read(whole)
    score = found.sum(summed) if summed else found
    sizes, given = part.sizes(whole.shape), dict(part.indices)
    return score, tuple([(name, _positions(given[name], sizes[name])) for name in names if name in bracketed])


def _positions(index: Any, size: int) -> Indices:
    """The positions that an index selects along an axis of this size."""
    return tuple(range(size)[index]) if isinstance(index, slice) else tuple([range(size)[one] for one in index])


def _require_fit(part: Part, label: str, gradient: Any) -> None:
    try:
        if not isinstance(gradient, torch.Tensor):
            raise BadPart(f"it gives {len(gradient)} tensors, and {part} is for part of one.")
        part.at(**dict.fromkeys(part.open_axes, slice(None))).shape(tuple(gradient.shape))
    except BadPart as error:
        raise BadPart(f"the part at `{label}`: {error}") from error


# -- as a file ---------------------------------------------------------------------------------------------------------


def attribution_json(writer: TreeWriter, found: Attribution) -> Any:
    """The scores, with the graph of the corrupt program, by which layers are found under any name."""
    axes = {label: [[name, list(indices)] for name, indices in of] for label, of in found.axes.items()}
    return {
        "graph": graph_json(writer, found._index.graph),
        "method": found.method,
        "part": None if found.part is None else writer.part(found.part),
        "metrics": [writer.value(found.corrupt), writer.value(found.clean)],
        "scores": [[label, axes[label], writer.pool.add(score, label)] for label, score in found.scores.items()],
        "without": dict(found.without),
    }


def _write_attribution(writer: TreeWriter, found: Attribution) -> Callable[[], Any]:
    made = attribution_json(writer, found)
    return lambda: made


def read_attribution(reader: TreeReader, json: Any) -> Attribution:
    """An attribution, if it fits together."""
    given = mapping(json)
    if {*given} != {"graph", "method", "part", "metrics", "scores", "without"}:
        bad("an attribution lacks a part, or has others")
    index = LayerIndex(read_graph(reader, given["graph"]))
    scores: dict[str, torch.Tensor] = {}
    axes: dict[str, Axes] = {}
    for row in items(given["scores"], 1):
        label, of, place = exactly(row, 3)
        score = reader.pool.tensor(place)
        axes[text(label)] = mine = tuple([_read_axis(axis) for axis in items(of)])
        is_plain = score.layout is torch.strided and score.is_floating_point() and not score.is_meta
        if not is_plain or tuple(score.shape) != tuple([len(indices) for _, indices in mine]):
            bad(f"the scores of {label} have other axes than they are said to have")
        scores[label] = score
    without = {text(label): text(why) for label, why in mapping(given["without"]).items()}
    if not all(label in index.by_label for label in (*scores, *without)):
        bad("scores are those of layers that are not there")
    corrupt, clean = (float(number(one)) for one in exactly(given["metrics"], 2))
    part = if_any(reader.part, given["part"])
    return Attribution(text(given["method"]), part, corrupt, clean, scores, axes, without, index)


def _read_axis(json: Any) -> tuple[str, Indices]:
    name, indices = exactly(json, 2)
    return text(name), tuple(map(natural, items(indices)))


register(Kind("attribution", Attribution, _write_attribution, read_attribution))
