"""What a run, a sweep or a user's numbers say of layers, to be laid over a page.

In: a run, a sweep, or a mapping. Out: Findings, numbers by label, and what stands behind each of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve, frozen

from .._lens.atlas import Atlas
from .._replay.run import Run
from ..errors import CannotDraw
from .cards import rounded
from .scene import Scene

MOST_DETAILS = 1000  # of one layer


@frozen
class Findings:
    """A number for each layer, and for the cards the numbers that it is the greatest of."""

    numbers: Any = None
    legend: str = ""
    details: Any = None

    def named(self, scene: Scene) -> Scene:
        """The picture with a legend that says what the numbers are."""
        return evolve(scene, legend=self.legend) if self.legend and scene.span is not None else scene


def findings(atlas: Atlas, run: Any, sweep: Any, values: Any) -> Findings:
    """What is to be laid over a page: one of a run, a sweep, a user's own numbers, or nothing."""
    given = [word for word, one in (("run", run), ("sweep", sweep), ("values", values)) if one is not None]
    if len(given) > 1:
        raise CannotDraw(f"a page shows one thing in colours, and {' and '.join(given)} were given. Give one of them.")
    if run is not None:
        if not isinstance(run, Run) or run.program is not None or run.origin is None:
            return Findings()  # the picture refuses it, and says why
        numbers = {row.label: row.change for row in run.diff() if row.change is not None}
        return Findings(numbers, "change against the recorded run")
    if sweep is not None:
        return _of_sweep(atlas, sweep)
    return Findings(values)


def _of_sweep(atlas: Atlas, sweep: Any) -> Findings:
    """The change of the metric that was farthest from zero at each layer, and all of them for its card."""
    if missing := [word for word in ("axes", "keys", "values", "baseline") if not hasattr(type(sweep), word)]:
        raise CannotDraw(
            f"sweep= takes what replaylens.sweep gives, and a {type(sweep).__name__} has no {missing[0]}. Numbers by "
            "the names of layers are laid over a page by values=."
        )
    baseline = torch.as_tensor(sweep.baseline)
    numbers = torch.as_tensor(sweep.values)
    if baseline.numel() != 1 or numbers.numel() != len(sweep.keys):
        raise CannotDraw("a sweep is laid over a page by one number for each variant. Give it a metric that gives one.")
    changes = (numbers.reshape(-1).double() - baseline.double()).tolist()
    details: dict[str, list[Any]] = {}
    for key, change in zip(sweep.keys, changes, strict=True):
        site, *indices = key if isinstance(key, tuple) else (key,)
        words = [f"{axis} {index}" for axis, index in zip(sweep.axes[1:], indices, strict=False)]
        for label in _labels(atlas, site):
            details.setdefault(label, []).append([", ".join(words) or str(site), change])
    if not details:
        raise CannotDraw("no variant of this sweep is named by a layer, so there is nowhere to lay it.")
    greatest = {label: max((change for _, change in rows), key=abs) for label, rows in details.items()}
    shown = {
        label: [[word, rounded(change)] for word, change in rows[:MOST_DETAILS]] for label, rows in details.items()
    }
    return Findings(greatest, "change of the metric", shown)


def _labels(atlas: Atlas, site: Any) -> Iterable[str]:
    """The layer that a variant is named by; none, where its key is a word of the user's own."""
    known = isinstance(site, str) and (site in atlas.by_label or site in atlas.aliases)
    return [atlas.find(site).label] if known else []
