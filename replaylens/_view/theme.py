"""Themes: the graphviz attributes of each role, as tables.

The rows of a table that match the roles of an item (see scene.py) apply from top to bottom, later ones win. `PAPER`
follows published computational graphs: green inputs, red outputs, grey parameters, yellow conditions; boxes for
modules, ellipses for other operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isinf, isnan

from attrs import evolve, field, frozen

Attributes = Mapping[str, str]
Table = Mapping[str, Attributes]


@frozen
class Theme:
    """Graphviz attributes: general ones, and those of each role of glyphs, arrows and frames.

    >>> PAPER.with_glyphs(input={"fillcolor": "gold"}).glyphs["input"]["fillcolor"]
    'gold'
    """

    graph: Attributes
    glyph: Attributes
    arrow: Attributes
    frame: Attributes
    glyphs: Table
    arrows: Table
    frames: Table
    scale: tuple[str, str, str] = field(
        default=("#4575d4", "#ffffff", "#d7432f")
    )  # colours of the least number, zero, the greatest
    faint: str = "#555555"  # small print

    def with_glyphs(self, **rows: Attributes) -> Theme:
        """The theme with other attributes for some roles of glyphs."""
        more = {role: {**self.glyphs.get(role, {}), **row} for role, row in rows.items()}
        return evolve(self, glyphs={**self.glyphs, **more})


PAPER = Theme(
    graph={"fontname": "Helvetica", "fontsize": "16", "labelloc": "t", "labeljust": "l", "nodesep": "0.3"},
    glyph={"fontname": "Helvetica", "fontsize": "12", "style": "filled", "fillcolor": "white", "shape": "ellipse"},
    arrow={"fontname": "Helvetica", "fontsize": "10", "arrowsize": "0.8"},
    frame={"fontname": "Helvetica", "fontsize": "12", "labeljust": "l", "penwidth": "1.5", "style": "solid"},
    glyphs={
        "parameters": {"fillcolor": "#d9d9d9"},
        "module": {"shape": "box"},
        "collapsed": {"shape": "box", "peripheries": "2"},
        "input": {"fillcolor": "#a4e8a0"},
        "output": {"fillcolor": "#f7a19a"},
        "buffer": {"fillcolor": "#f0f0f0", "color": "#8c8c8c"},
        "constant": {"fillcolor": "#f0f0f0", "color": "#8c8c8c", "style": "filled,dashed"},
        "internal": {"style": "filled,dashed"},
        "outside": {"style": "filled,dashed"},
        "rerun": {"fillcolor": "#fde3c8"},
        "boolean": {"fillcolor": "#f9dc5c"},
        "changed": {"fillcolor": "#fde3c8", "color": "#c35a00", "penwidth": "2"},
        "before": {"style": "filled,dashed", "fontcolor": "#777777"},
        "edited": {"fillcolor": "#f5a742", "color": "#b34700", "penwidth": "3"},
        "added": {"fillcolor": "#b7e1b1", "color": "#1a7f1a", "penwidth": "3"},
        "removed": {"fillcolor": "#f3b6b0", "color": "#b3261e", "penwidth": "3", "style": "filled,dashed"},
    },
    arrows={
        "internal": {"style": "dashed"},
        "rerun": {"color": "#c35a00"},
        "edited": {"color": "#b34700", "penwidth": "2.5", "fontcolor": "#b34700"},
        "if": {"penwidth": "2"},
        "gradient": {"color": "#3a5fcd", "arrowsize": "0.7"},
        "added": {"color": "#1a7f1a", "penwidth": "2"},
        "removed": {"color": "#b3261e", "penwidth": "2", "style": "dashed"},
    },
    frames={"repeat": {"style": "rounded", "penwidth": "3"}},
)

DARK = evolve(
    PAPER,
    graph={**PAPER.graph, "bgcolor": "#1b1d22", "fontcolor": "#e8e8e8"},
    glyph={**PAPER.glyph, "fillcolor": "#2a2d34", "color": "#b8bcc6", "fontcolor": "#f0f0f0"},
    arrow={**PAPER.arrow, "color": "#b8bcc6", "fontcolor": "#d8d8d8"},
    frame={**PAPER.frame, "color": "#8a8f9c", "fontcolor": "#e8e8e8"},
    glyphs={
        **PAPER.glyphs,
        "parameters": {"fillcolor": "#50555f"},
        "input": {"fillcolor": "#2f6b34"},
        "output": {"fillcolor": "#8c3530"},
        "buffer": {"fillcolor": "#3a3e46", "color": "#8a8f9c"},
        "constant": {"fillcolor": "#3a3e46", "color": "#8a8f9c", "style": "filled,dashed"},
        "boolean": {"fillcolor": "#8a6d00"},
        "rerun": {"fillcolor": "#5c432c"},
        "changed": {"fillcolor": "#5c432c", "color": "#ff9d4d", "penwidth": "2"},
        "before": {"style": "filled,dashed", "fontcolor": "#a0a0a0"},
        "edited": {"fillcolor": "#9c5a0b", "color": "#ffb454", "penwidth": "3"},
        "added": {"fillcolor": "#23572a", "color": "#62c46a", "penwidth": "3"},
        "removed": {"fillcolor": "#6b2a26", "color": "#ff8078", "penwidth": "3", "style": "filled,dashed"},
    },
    arrows={
        **PAPER.arrows,
        "rerun": {"color": "#ff9d4d"},
        "edited": {"color": "#ffb454", "penwidth": "2.5", "fontcolor": "#ffb454"},
        "gradient": {"color": "#7f9cff", "arrowsize": "0.7"},
    },
    scale=("#3f6fd8", "#2a2d34", "#d7432f"),
    faint="#b0b4bd",
)

THEMES: Mapping[str, Theme] = {"paper": PAPER, "dark": DARK}


def attributes(base: Attributes, table: Table, roles: frozenset[str]) -> dict[str, str]:
    """The attributes of an item with these roles, beyond the general ones."""
    found: dict[str, str] = {}
    for role, row in table.items():
        if role in roles:
            found.update(row)
    return {name: value for name, value in found.items() if base.get(name) != value}


def colour(scale: tuple[str, str, str], value: float, span: tuple[float, float]) -> str:
    """The colour of a number: the middle one for zero. A number that is not finite has the colour of an end."""
    low, high = span
    value = inf if isnan(value) else value
    end = scale[2] if value >= 0 or low >= 0 else scale[0]
    size = max(abs(low), abs(high)) if low < 0 else high
    share = 1.0 if isinf(value) else min(1.0, abs(value) / size) if size else 0.0
    channels = [(int(scale[1][n : n + 2], 16), int(end[n : n + 2], 16)) for n in (1, 3, 5)]
    return "#" + "".join(f"{round(middle + share * (far - middle)):02x}" for middle, far in channels)


def readable_on(fill: str) -> str:
    """Black or white, whichever is readable on a colour."""
    red, green, blue = (int(fill[n : n + 2], 16) for n in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
