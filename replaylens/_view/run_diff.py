"""How much each layer of a run differs from the recorded run.

In: the layers of a program, and a run of it. Out: a Diff, which prints as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any

from attrs import field, frozen

from .._ir.util import optional
from .._layers.index import LayerIndex
from .._layers.layer import Layer
from .._replay.record import Record
from .._replay.supply import Run
from ..errors import ReplaylensError
from .layer_change import LayerChange
from .overlays import compared, executed_in, patched_in, with_all_values
from .value_plots import bars


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
        return bars([row.label for row in shown], [row.change or 0.0 for row in shown], words, ax, options)


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
