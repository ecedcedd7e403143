"""What is laid over a picture: numbers as colours, what a replay ran and changed.

In: a Scene or a Sketch, and facts by the labels of layers. Out: one that has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from attrs import evolve

from .scene import Glyph, Roles, Scene
from .sketch import Line, Sketch


def with_numbers(scene: Scene, numbers: Mapping[str, float], legend: str = "") -> Scene:
    """The picture with a number for each layer that has one. What stands for several layers shows the one that is
    farthest from zero.
    """
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


def with_replay(drawn: Sketch, ran: Iterable[str], patched: Mapping[str, str]) -> Sketch:
    """The layers with what a replay ran, and what was patched in it: layer -> the patch in words."""
    ran = frozenset(ran)
    dots = []
    for dot in drawn.dots:
        roles: Roles = frozenset({"rerun"} if dot.label in ran else ()) | (
            {"edited"} if dot.label in patched else set()
        )
        note = "; ".join(filter(None, [dot.note, patched.get(dot.label)]))
        dots.append(evolve(dot, roles=dot.roles | roles, note=note) if roles else dot)
    stained = ran.union(patched)
    lines = [_stained(line, stained, patched) for line in drawn.lines]
    return Sketch(tuple(dots), tuple(lines))


def _stained(line: Line, stained: frozenset[str], patched: Mapping[str, str]) -> Line:
    if line.edge in patched:
        return evolve(line, roles=line.roles | {"edited"}, note=patched[line.edge])
    return evolve(line, roles=line.roles | {"rerun"}) if {line.tail, line.head} <= stained else line
