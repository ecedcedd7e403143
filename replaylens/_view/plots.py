"""Plots of values and of results by matplotlib, which is an optional dependency.

In: tensors, grids, names, numbers. Out: matplotlib Axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch

from .._ir.util import optional
from ..errors import CannotDraw
from .values import Pictures, numbers_of, pictures, tensors_in


def plot_value(label: str, value: Any, kind: str | None, ax: Any, options: dict[str, Any]) -> Any:
    """Plot the value of a layer: feature maps or attention patterns if it has them, else a histogram."""
    tensors = tensors_in(value)
    if kind not in (None, "maps", "attention", "histogram"):
        raise ValueError(f"kind must be 'maps', 'attention', 'histogram' or None, not {kind!r}.")
    if kind == "histogram":
        return plot_histogram(label, tensors, ax, options)
    found = pictures(tensors[0], most=16) if tensors else None
    if kind is not None and (found is None or found.is_pattern != (kind == "attention")):
        want = "(batch, channels, height, width)" if kind == "maps" else "(..., heads, to, from) whose rows sum to 1"
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
        raise CannotDraw(f"{label} has no {kind} to draw: they are of a value {want}, and it gives {shapes}.")
    return plot_histogram(label, tensors, ax, options) if found is None else plot_pictures(label, found, ax, options)


def plot_pictures(label: str, found: Pictures, ax: Any, options: dict[str, Any]) -> Any:
    """Plot small pictures side by side on one scale, in a single Axes that fits into any figure."""
    title = f"{label}  {found.title}"
    ax = ax or new_axes(
        max(1.3 * min(8, len(found.grids)), len(title) / 14) + 0.9, 1.4 * -(-len(found.grids) // 8) + 0.6
    )
    sheet = contact_sheet(found.grids)
    colours = {"cmap": "viridis" if found.is_pattern else "gray", "interpolation": "nearest"}
    shown = ax.imshow(sheet.numpy(), **{**colours, **options})
    ax.set_axis_off()
    ax.set_title(title, fontsize=9)
    ax.figure.colorbar(shown, ax=ax, fraction=0.03, pad=0.01)
    return ax


def contact_sheet(grids: torch.Tensor, columns: int = 8) -> torch.Tensor:
    """A stack of pictures as one, separated by NaN."""
    count, height, width = grids.shape
    columns = min(columns, count)
    gap = max(1, width // 24)
    rows = -(-count // columns)
    sheet = torch.full((rows * (height + gap) - gap, columns * (width + gap) - gap), float("nan"))
    for number in range(count):
        top, left = number // columns * (height + gap), number % columns * (width + gap)
        sheet[top : top + height, left : left + width] = grids[number]
    return sheet


def plot_histogram(label: str, tensors: list[torch.Tensor], ax: Any, options: dict[str, Any]) -> Any:
    """Plot the distribution of the elements."""
    found = [numbers_of(tensor) for tensor in tensors]
    numbers = [one.reshape(-1).double() for one in found if one is not None and one.numel()]
    if not numbers:
        raise CannotDraw(f"{label} gives no numbers, so there is no histogram to draw.")
    together = torch.cat(numbers)
    finite = together[together.isfinite()]
    ax = ax or new_axes(5, 3)
    ax.hist(finite.numpy(), **{"bins": 50, **options})
    left_out = together.numel() - finite.numel()
    ax.set_title(
        f"{label}  {together.numel():,} numbers" + (f", {left_out:,} not finite" if left_out else ""), fontsize=9
    )
    ax.set_xlabel("value")
    ax.set_ylabel("count")
    return ax


def plot_bars(names: Sequence[str], numbers: Sequence[float], word: str, ax: Any, options: dict[str, Any]) -> Any:
    """Plot a bar for each name, the first on top. A number that is not finite is hatched, full-length and labelled."""
    ax = ax or new_axes(6, min(14, 1 + 0.22 * len(names)))
    longest = max([abs(number) for number in numbers if isfinite(number)], default=0.0) or 1.0
    drawn = ax.barh(range(len(names)), [one if isfinite(one) else longest for one in numbers], **options)
    for row, (number, patch) in enumerate(zip(numbers, drawn, strict=True)):
        if not isfinite(number):
            patch.set(hatch="///", facecolor="none", edgecolor=patch.get_facecolor())
            ax.annotate(f" {number} ", (0, row), va="center", fontsize=8, backgroundcolor="white")
    step = max(1, len(names) // 60)
    ax.set_yticks(range(0, len(names), step), labels=[names[n] for n in range(0, len(names), step)], fontsize=8)
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.set_xlabel(word)
    return ax


def new_axes(width: float, height: float) -> Any:
    """New Axes on a figure of a size in inches."""
    return optional("matplotlib.pyplot", "plot").subplots(figsize=(width, height), layout="constrained")[1]


def plot_heatmap(
    grid: torch.Tensor, rows: Sequence[str], columns: Sequence[str], words: tuple[str, str, str], ax: Any, options: Any
) -> Any:
    """Plot a grid as colours symmetric around zero. `words` are the labels of rows, columns and colours."""
    ax = ax or new_axes(min(16, 3 + 0.32 * len(columns)), min(14, 1.6 + 0.28 * len(rows)))
    limit = float(torch.nan_to_num(grid.abs(), nan=0.0).max()) or 1.0
    shown = ax.imshow(grid.numpy(), **{"cmap": "RdBu_r", "vmin": -limit, "vmax": limit, "aspect": "auto", **options})
    for axis, names in ((ax.yaxis, rows), (ax.xaxis, columns)):
        step = max(1, len(names) // 40)
        axis.set_ticks(range(0, len(names), step), labels=[names[n] for n in range(0, len(names), step)])
    ax.set_ylabel(words[0])
    ax.set_xlabel(words[1])
    if len(columns) > 8 and max(map(len, columns)) > 3:  # a column fits three letters
        ax.tick_params(axis="x", rotation=90)
    ax.figure.colorbar(shown, ax=ax, label=words[2])
    return ax
