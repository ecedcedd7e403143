"""Heatmaps by matplotlib.

In: a grid of numbers with names along its axes. Out: matplotlib Axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._ir.util import optional as optional
from .._view.value_plots import new_axes


def heatmap(
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
